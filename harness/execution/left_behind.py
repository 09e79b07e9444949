"""What a call leaves behind that could still compute: threads, and a forked child that comes back from it.

Whatever computes on after the return may write into what is being judged, so it is a fault. Three kinds of threads are
none: those that a framework starts for itself, as a compiler does for its workers; those of a pool, of threads or of
processes, that has nothing left to do; and those that began outside Python and run no Python now, as an engine's for
backward passes.
"""

from __future__ import annotations

import functools
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import process, thread
from contextlib import contextmanager
from multiprocessing import pool, queues
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from attncheck.backends import EVERYTHING

_WAIT = 0.5
"""Seconds in which a child may say that it came back, and a pool let go of its last job."""
_LOOKS = 50
_FRAMEWORKS = frozenset(package for entry in EVERYTHING.values() for package in entry.packages) | {"triton"}
"""Packages whose own threads are their own affair: they wait for what they compute before they show it."""
_Locals = Mapping[str, Any]


def _has_no_item(found: _Locals) -> bool:
    item, queue = found.get("work_item"), found.get("work_queue")
    return queue is not None and queue.empty() and (item is None or item.future.done())


def _has_no_job(found: _Locals) -> bool:
    return not found.get("cache") and found.get("job") is None


_IDLE: Mapping[CodeType, Callable[[_Locals], bool]] = {
    thread._worker.__code__: _has_no_item,
    process._ExecutorManagerThread.run.__code__: lambda found: not found["self"].pending_work_items,
    queues.Queue._feed.__code__: lambda found: not found["buffer"],  # type: ignore[attr-defined]
    pool.worker.__code__: _has_no_job,  # type: ignore[attr-defined]
    **{getattr(pool.Pool, f"_handle_{name}").__code__: _has_no_job for name in ("workers", "tasks", "results")},
}
"""What every thread of a pool runs, of threads or of processes, and whether it has nothing to do, by its variables."""


class Misbehaved(Exception):
    """An implementation did what none may do; says what."""


@contextmanager
def unchanged(tensors: Mapping[str, Any], to_numpy: Callable[[Any], NDArray[Any]]) -> Iterator[None]:
    """Raise ``Misbehaved`` where a call has changed one of its inputs, bit by bit."""
    before = {name: np.array(to_numpy(tensor)).tobytes() for name, tensor in tensors.items()}
    yield
    for name, was in before.items():
        if to_numpy(tensors[name]).tobytes() != was:
            raise Misbehaved(f"changed its input {name}")


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Raise ``Misbehaved`` where threads outlive a call that may still compute, or a forked child comes back from it.

    Such a child ends here: it would go on as a second worker and answer in its parent's place.
    """
    own, threads, children = os.getpid(), set(threading.enumerate()), _children()
    heard, notify = os.pipe()
    try:
        with _started_by_frameworks() as excused:
            try:
                yield
            finally:
                if os.getpid() != own:
                    os.write(notify, b"!")
                    os._exit(0)
                os.close(notify)
        if _children() - children and _came_back(heard):
            raise Misbehaved("forked, and the child process came back from the call")
        frames = sys._current_frames()
        new = [thread for thread in threading.enumerate() if thread not in threads | excused and thread.is_alive()]
        left = [thread.name for thread in new if _may_compute(thread, frames)]
        if left:
            raise Misbehaved(f"left {len(left)} thread(s) running: {', '.join(left)}")
    finally:
        os.close(heard)


@contextmanager
def _started_by_frameworks() -> Iterator[set[threading.Thread]]:
    """Give the threads that frameworks start meanwhile: who started a thread is not known of it afterwards."""
    found: set[threading.Thread] = set()
    start = threading.Thread.start

    @functools.wraps(start)
    def noted(thread: threading.Thread) -> None:
        if _first_outside_the_library(sys._getframe(1)) in _FRAMEWORKS:
            found.add(thread)
        start(thread)

    threading.Thread.start = noted  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def _first_outside_the_library(frame: FrameType | None) -> str:
    """Return the top-level package of the innermost caller that is not Python's own."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in sys.stdlib_module_names:
            return package
        frame = frame.f_back
    return ""


def _may_compute(thread: threading.Thread, frames: Mapping[int, FrameType]) -> bool:
    """Whether a thread has, or could have, something to do; ``frames`` are what all threads are running."""
    frame = frames.get(thread.ident or 0)
    if frame is None:
        return not isinstance(thread, threading._DummyThread)
    return not _is_idle_in_a_pool(frame)


def _is_idle_in_a_pool(frame: FrameType | None) -> bool:
    """Whether a thread waits in a pool: what it had to do is done, and nothing else is asked."""
    while frame is not None and frame.f_code not in _IDLE:
        frame = frame.f_back
    if frame is None:
        return False
    for _ in range(_LOOKS):  # whoever waits for a job has its result a moment before the pool has let go of it
        if _IDLE[frame.f_code](frame.f_locals):
            return True
        time.sleep(_WAIT / _LOOKS)
    return False


def _came_back(heard: int) -> bool:
    """Whether a child says so; one that runs another program, or has ended, closes the pipe and is not waited for."""
    return bool(select.select([heard], [], [], _WAIT)[0]) and bool(os.read(heard, 1))


def _children() -> set[int]:
    """Return the children of this process, also those that have ended and that nobody has collected."""
    if not hasattr(os, "waitid"):
        return set()  # a platform that cannot fork either
    try:
        # Looks without taking the exit code from its owner.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # as nearly always, and quickly known
    try:
        # Linux knows them, thread by thread; to look for them among all processes takes longer than a small call.
        if listed := [path.read_text() for path in Path("/proc/self/task").glob("*/children")]:
            return {int(number) for text in listed for number in text.split()}
    except OSError:
        pass  # a thread has ended meanwhile
    return {child.pid for child in psutil.Process().children()}
