"""The state that the evaluations of a worker share, put back after each, and what a call leaves behind.

A result must not depend on which evaluation came before it: a run that goes on after it was interrupted evaluates in
another order than an unbroken one. Put back is what Python and NumPy keep for the whole process; what a framework keeps
for itself, such as its default dtype, is the framework's.

Threads that a call leaves, and a forked child that comes back from it, could still compute. Whatever computes on after
the return may write into what is being judged, so it is a fault. Three kinds of threads are none: those that a
framework starts for itself, as a compiler does for its workers; those of a pool, of threads or of processes, that has
nothing left to do; and those that began outside Python and run no Python now, as an engine's for backward passes.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import locale
import os
import random
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import process, thread
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import pool, queues
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import numpy as np
import psutil
from numpy.typing import NDArray

from attncheck.backends import EVERYTHING
from attncheck.execution.operations import FREE_BYTE

_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


@dataclass(frozen=True)
class ProcessState:
    """The state of a process before an evaluation: where it prints, its threads, and how to make the rest as it was."""

    _outlets: tuple[object, ...]
    _threads: frozenset[int]
    _restore: tuple[Callable[[], object], ...]

    @classmethod
    def snapshot(cls) -> ProcessState:
        """Look what it is like now."""
        return cls(_outlets(), frozenset(thread.ident or 0 for thread in threading.enumerate()), _restorers())

    def restore(self) -> bool:
        """Make everything as it was; return whether the process is fit for another evaluation."""
        for restore in self._restore:
            with suppress(Exception):
                restore()
        return _outlets() == self._outlets and not (sys.stdout.closed or sys.stderr.closed)

    def has_more_threads(self) -> bool:
        """Return whether there are threads now that were not there."""
        return any(thread.ident not in self._threads for thread in threading.enumerate())


_LEAST_HELD = 2**30
"""Bytes. A process that holds less has not compiled thousands of programs; to count its mappings takes a while."""
_MAPPINGS, _MAX_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def has_many_mappings(held: int) -> bool:
    """Return whether a process that holds so many bytes has over half of the memory mappings that Linux allows it.

    A compiler maps memory for each program, and keeps them all: at the limit it cannot compile the next, and crashes.
    """
    if held < _LEAST_HELD:
        return False
    try:
        return _MAPPINGS.read_bytes().count(b"\n") > int(_MAX_MAPPINGS.read_text()) // 2
    except (OSError, ValueError):  # another system, which has another limit, or none
        return False


@cache
def _restorers() -> tuple[Callable[[], object], ...]:
    """Remember what is put back: once, for it is put back after every evaluation."""
    return (
        partial(vars(sys).update, stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr),
        _folder(),
        _signals(),
        _warnings(),
        _locale(),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(sys.setrecursionlimit, sys.getrecursionlimit()),
        gc.enable if gc.isenabled() else gc.disable,
        _functions(np),
    )


def _outlets() -> tuple[object, ...]:
    """Return which files standard output and standard error are."""
    found: list[object] = []
    for descriptor in (1, 2):
        try:
            status = os.fstat(descriptor)
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def _folder() -> Callable[[], None]:
    try:
        before = os.getcwd()  # noqa: PTH109 # a Path of it is made of the same
    except OSError:
        return lambda: None
    return lambda: os.chdir(before)


def _signals() -> Callable[[], None]:
    if sys.platform == "win32":
        return lambda: None
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def restore() -> None:
        for name in _TIMERS:
            signal.setitimer(getattr(signal, name), 0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    return restore


def _warnings() -> Callable[[], None]:
    filters, shown = list(warnings.filters), warnings.showwarning

    def restore() -> None:
        warnings.showwarning = shown
        if warnings.filters != filters:
            warnings.filters[:] = filters  # type: ignore[index] # a list in fact
            warnings._filters_mutated()  # type: ignore[attr-defined] # what its own catch_warnings does

    return restore


def _locale() -> Callable[[], None]:
    before = locale.setlocale(locale.LC_ALL)

    def restore() -> None:
        if locale.setlocale(locale.LC_ALL) != before:
            locale.setlocale(locale.LC_ALL, before)

    return restore


def _functions(module: Any) -> Callable[[], None]:
    before = dict(vars(module))

    def restore() -> None:
        now = vars(module)
        for name, function in before.items():
            if now.get(name) is not function:
                setattr(module, name, function)

    return restore


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
def no_leaked_threads() -> Iterator[None]:
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
        del frames[threading.get_ident()]  # it refers to this dictionary: a cycle that would keep the call's arrays
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


@cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return the function of glibc that says what memory is filled with; None where there is another allocator."""
    try:
        found = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return None
    return cast(Callable[[int, int], int], found) if sys.platform == "linux" else None


_PERTURB = -6
_SMALL, _KEPT = 1 << 10, 8
"""NumPy keeps up to seven blocks of each size below this one for itself."""


_left_alone = ContextVar("memory is left alone", default=False)


@contextmanager
def filled_memory(sizes: Iterable[int]) -> Iterator[None]:
    """Fill free memory meanwhile with ``FREE_BYTE``, so that a number that nobody writes is no right one by chance.

    Blocks of these ``sizes`` are filled that NumPy would use again.
    """
    mallopt = _mallopt()
    if mallopt is None or _left_alone.get():
        yield
        return
    mallopt(_PERTURB, 0xFF ^ FREE_BYTE)
    try:
        for size in {size for size in sizes if 0 < size < _SMALL}:
            blocks = [np.full(size, FREE_BYTE, np.uint8) for _ in range(_KEPT)]
            blocks.clear()
        yield
    finally:
        mallopt(_PERTURB, 0)


@contextmanager
def memory_left_alone() -> Iterator[None]:
    """Fill no memory meanwhile: what was there before a call is what somebody looks at."""
    before = _left_alone.set(True)
    try:
        yield
    finally:
        _left_alone.reset(before)


def _may_compute(thread: threading.Thread, frames: Mapping[int, FrameType]) -> bool:
    """Return whether a thread has, or could have, something to do; ``frames`` are what all threads are running."""
    frame = frames.get(thread.ident or 0)
    if frame is None:
        return not isinstance(thread, threading._DummyThread)
    return not _is_idle_in_a_pool(frame)


def _is_idle_in_a_pool(frame: FrameType | None) -> bool:
    """Return whether a thread waits in a pool: what it had to do is done, and nothing else is asked."""
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
    """Return whether a child says so; one that runs another program, or has ended, closes the pipe."""
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
