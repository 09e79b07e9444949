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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import pool, queues
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from attncheck.backends import ALL_ENTRIES
from attncheck.execution.call_server import filled_memory

THIS_PROCESS = psutil.Process()
"""Making the object takes as long as calling a small kernel."""
_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


@dataclass(frozen=True)
class ProcessState:
    """The state of a process before an evaluation: output files, threads, and functions that restore the rest."""

    _output_files: tuple[object, ...]
    _threads: frozenset[int]
    _restore: tuple[Callable[[], object], ...]

    @classmethod
    def snapshot(cls) -> ProcessState:
        """Take the state of this process now."""
        return cls(
            _output_file_identities(),
            frozenset(thread.ident or 0 for thread in threading.enumerate()),
            _make_restorers(),
        )

    def restore(self) -> bool:
        """Make everything as it was; return whether the process is fit for another evaluation."""
        for restore in self._restore:
            with suppress(Exception):
                restore()
        return _output_file_identities() == self._output_files and not (sys.stdout.closed or sys.stderr.closed)

    def has_new_threads(self) -> bool:
        """Return whether there are threads now that were not there."""
        return any(thread.ident not in self._threads for thread in threading.enumerate())


_MIN_HELD_TO_COUNT = 2**30
"""Bytes. A process that holds less has not compiled thousands of programs; to count its mappings takes a while."""
_MAPPINGS_FILE, _MAX_MAPPINGS_FILE = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def has_many_mappings(held: int) -> bool:
    """Return whether a process that holds so many bytes has over half of the memory mappings that Linux allows it.

    A compiler maps memory for each program, and keeps them all: at the limit it cannot compile the next, and crashes.
    """
    if held < _MIN_HELD_TO_COUNT:
        return False
    try:
        return _MAPPINGS_FILE.read_bytes().count(b"\n") > int(_MAX_MAPPINGS_FILE.read_text()) // 2
    except (OSError, ValueError):  # another system, which has another limit, or none
        return False


@cache
def _make_restorers() -> tuple[Callable[[], object], ...]:
    """Return the functions that restore the state, made once for all evaluations."""
    return (
        partial(vars(sys).update, stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr),
        _folder_restorer(),
        _signal_restorer(),
        _warning_restorer(),
        _locale_restorer(),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(sys.setrecursionlimit, sys.getrecursionlimit()),
        gc.enable if gc.isenabled() else gc.disable,
        _attribute_restorer(np),
    )


def _output_file_identities() -> tuple[object, ...]:
    """Return the identities of the files behind standard output and standard error."""
    outlets: list[object] = []
    for descriptor in (1, 2):
        try:
            status = os.fstat(descriptor)
            outlets.append((status.st_dev, status.st_ino))
        except OSError:
            outlets.append(None)
    return tuple(outlets)


def _folder_restorer() -> Callable[[], None]:
    try:
        before = os.getcwd()  # noqa: PTH109 # a Path of it is made of the same
    except OSError:
        return lambda: None
    return lambda: os.chdir(before)


def _signal_restorer() -> Callable[[], None]:
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


def _warning_restorer() -> Callable[[], None]:
    filters, shown = list(warnings.filters), warnings.showwarning

    def restore() -> None:
        warnings.showwarning = shown
        if warnings.filters != filters:
            warnings.filters[:] = filters  # type: ignore[index] # a list in fact
            warnings._filters_mutated()  # type: ignore[attr-defined] # what its own catch_warnings does

    return restore


def _locale_restorer() -> Callable[[], None]:
    before = locale.setlocale(locale.LC_ALL)

    def restore() -> None:
        if locale.setlocale(locale.LC_ALL) != before:
            locale.setlocale(locale.LC_ALL, before)

    return restore


def _attribute_restorer(module: Any) -> Callable[[], None]:
    before = dict(vars(module))

    def restore() -> None:
        now = vars(module)
        for name, function in before.items():
            if now.get(name) is not function:
                setattr(module, name, function)

    return restore


_WAIT_SECONDS = 0.5
"""Seconds in which a child may say that it came back, and a pool let go of its last job."""
# A choice: 10 ms between checks; more checks end the wait sooner and cost processor time.
_POLLS = 50
_FRAMEWORK_PACKAGES = frozenset(package for entry in ALL_ENTRIES.values() for package in entry.packages) | {"triton"}
"""Packages whose own threads are their own affair: they wait for what they compute before they show it."""
_LocalVariables = Mapping[str, Any]


def _is_executor_thread_idle(variables: _LocalVariables) -> bool:
    item, queue = variables.get("work_item"), variables.get("work_queue")
    return queue is not None and queue.empty() and (item is None or item.future.done())


def _is_pool_thread_idle(variables: _LocalVariables) -> bool:
    return not variables.get("cache") and variables.get("job") is None


_IDLE_TESTS: Mapping[CodeType, Callable[[_LocalVariables], bool]] = {
    thread._worker.__code__: _is_executor_thread_idle,
    process._ExecutorManagerThread.run.__code__: lambda variables: not variables["self"].pending_work_items,
    queues.Queue._feed.__code__: lambda variables: not variables["buffer"],  # type: ignore[attr-defined]
    pool.worker.__code__: _is_pool_thread_idle,  # type: ignore[attr-defined]
    **{
        getattr(pool.Pool, f"_handle_{name}").__code__: _is_pool_thread_idle for name in ("workers", "tasks", "results")
    },
}
"""What every thread of a pool runs, of threads or of processes, and whether it has nothing to do, by its variables."""


class Misbehaved(Exception):
    """An implementation did what none may do; says what."""


@contextmanager
def forbid_changed_inputs(tensors: Mapping[str, Any], to_numpy: Callable[[Any], NDArray[Any]]) -> Iterator[None]:
    """Raise ``Misbehaved`` if a call has changed a bit of its inputs."""
    before = {name: np.array(to_numpy(tensor)).tobytes() for name, tensor in tensors.items()}
    yield
    for name, was in before.items():
        if to_numpy(tensors[name]).tobytes() != was:
            raise Misbehaved(f"changed its input {name}")


@contextmanager
def forbid_leaked_threads() -> Iterator[None]:
    """Raise ``Misbehaved`` if threads outlive a call and may still compute, or if a forked child returns from it.

    Such a child ends here: otherwise it would continue as a second worker and answer instead of its parent.
    """
    pid, threads, children = os.getpid(), set(threading.enumerate()), _child_process_ids()
    heard, notify = os.pipe()
    try:
        with _collect_framework_threads() as excused:
            try:
                yield
            finally:
                if os.getpid() != pid:
                    os.write(notify, b"!")
                    os._exit(0)
                os.close(notify)
        # A child that comes back writes a byte; one that runs another program, or has ended, closes the pipe.
        if _child_process_ids() - children and select.select([heard], [], [], _WAIT_SECONDS)[0] and os.read(heard, 1):
            raise Misbehaved("forked, and the child process came back from the call")
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # it refers to this dictionary: a cycle that would keep the call's arrays
        new = [thread for thread in threading.enumerate() if thread not in threads | excused and thread.is_alive()]
        running = [thread.name for thread in new if _may_compute(thread, frames)]
        if running:
            raise Misbehaved(f"left {len(running)} thread(s) running: {', '.join(running)}")
    finally:
        os.close(heard)


@contextmanager
def _collect_framework_threads() -> Iterator[set[threading.Thread]]:
    """Collect the threads that frameworks start meanwhile: a thread does not record which code started it."""
    started: set[threading.Thread] = set()
    start = threading.Thread.start

    @functools.wraps(start)
    def start_and_collect(thread: threading.Thread) -> None:
        if _package_of_caller(sys._getframe(1)) in _FRAMEWORK_PACKAGES:
            started.add(thread)
        start(thread)

    threading.Thread.start = start_and_collect  # type: ignore[method-assign, assignment]
    try:
        yield started
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def _package_of_caller(frame: FrameType | None) -> str:
    """Return the top-level package of the innermost caller that is not Python's own."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in sys.stdlib_module_names:
            return package
        frame = frame.f_back
    return ""


_filling_disabled = ContextVar("memory is left alone", default=False)


def fill_free_memory(sizes: Iterable[int]) -> AbstractContextManager[None]:
    """Fill free memory meanwhile, as ``filled_memory`` does, unless ``disable_memory_filling`` says not to."""
    return nullcontext() if _filling_disabled.get() else filled_memory(sizes)


@contextmanager
def disable_memory_filling() -> Iterator[None]:
    """Fill no memory meanwhile: the caller examines what a call makes of the memory before it."""
    before = _filling_disabled.set(True)
    try:
        yield
    finally:
        _filling_disabled.reset(before)


def _may_compute(thread: threading.Thread, frames: Mapping[int, FrameType]) -> bool:
    """Return whether a thread may still compute; ``frames`` has the innermost frame of each thread by its number.

    A thread without a frame may compute if Python started it. A pool's thread does not if it waits for its next job.
    """
    frame = frames.get(thread.ident or 0)
    if frame is None:
        return not isinstance(thread, threading._DummyThread)
    pool_frame: FrameType | None = frame
    while pool_frame is not None and pool_frame.f_code not in _IDLE_TESTS:
        pool_frame = pool_frame.f_back
    if pool_frame is None:
        return True
    for _ in range(_POLLS):  # a job's result is returned a moment before the pool forgets the job
        if _IDLE_TESTS[pool_frame.f_code](pool_frame.f_locals):
            return False
        time.sleep(_WAIT_SECONDS / _POLLS)
    return True


def _child_process_ids() -> set[int]:
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
    return {child.pid for child in THIS_PROCESS.children()}
