"""Worker processes as such: how they are started and ended with all that they started, how much memory they hold."""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import current_process, parent_process, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

import psutil

_MARK = "ATTNCHECK_WORKER"
"""In the environment of a worker and of all that it starts: by this they are found when nothing else leads to them.

Its value is which harness it is, in three words (``_harness``), and which worker.
"""

_SECONDS_TO_END = 10.0
_PR_SET_PDEATHSIG = 1

_spawning = threading.Lock()


class _Worker(SpawnProcess):
    """A spawned process that does not run the caller's main module again, and leaves Ctrl-C to its parent.

    A script without a main guard would otherwise start its whole run anew in every worker, and a worker that is just
    loading its modules would answer Ctrl-C, which a terminal sends to all, with a traceback.
    """

    mark = ""

    def start(self) -> None:
        self.mark = f"{_harness()} {uuid4().hex}"
        with _spawning, _interrupts_blocked(), _children_allowed():
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            os.environ[_MARK] = self.mark
            try:
                super().start()
            finally:
                del os.environ[_MARK]
                sys.modules["__main__"] = main


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread, and in the processes that it starts meanwhile."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # or it is started now, and unblocks what is blocked here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _children_allowed() -> Iterator[None]:
    """Let a daemonic process, such as a worker of Dask's under its nanny, start a process too.

    ``multiprocessing`` forbids it because such children would be left behind; ours end with their parent by themselves.
    """
    configuration: dict[str, object] = current_process()._config  # type: ignore[attr-defined] # there is no other way
    daemon = configuration.pop("daemon", None)
    try:
        yield
    finally:
        if daemon is not None:
            configuration["daemon"] = daemon


def spawn(function: Callable[..., None], *arguments: object) -> _Worker:
    """Start a process that calls a function."""
    process = _Worker(target=function, args=arguments, name="attncheck worker")
    _spawner(os.getpid()).submit(process.start).result()
    return process


@cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """Return the thread that starts all workers of a process: they end with the thread that started them (below)."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"attncheck spawns for {pid}")


def end_with_parent() -> None:
    """Called in a worker: end it when its parent ends, however that ends and whatever the worker is doing then."""
    parent = parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        import ctypes

        # The kernel's signal reaches a worker that hangs in C and lets no other thread of Python run.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent.pid:  # it had ended before
            os._exit(1)
    threading.Thread(target=_end_after, args=(parent.join,), daemon=True).start()


def _end_after(wait: Callable[[], object]) -> None:
    wait()
    os._exit(1)


def sacrifice() -> None:
    """Called in a worker: where the machine's memory runs out, the kernel ends this process, not the harness."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


def end(process: _Worker) -> None:
    """Kill a worker and everything that it started, whatever they are doing, and wait until they are gone."""
    deadline = monotonic() + _SECONDS_TO_END
    started = _descendants(process)  # while it lives: who loses its parent is only found by the mark
    while True:
        alive = [each for each in {*started, *_marked(process.mark)} if each.pid != process.pid and _is_alive(each)]
        for each in alive:
            with suppress(psutil.Error):
                each.kill()
        if process.exitcode is None:
            process.kill()
            process.join(0.01 if alive else _SECONDS_TO_END)
        if not alive or monotonic() > deadline:
            return
        sleep(0.01)


def end_strays() -> int:
    """Kill what workers have started and left behind, of harnesses that are no more; return how many there were.

    A harness that is killed takes its workers along, and they have no time to look after what they have started.
    """
    here, count = _harness().split(), 0
    for each, mark in _all_marked():
        with suppress(psutil.Error, ValueError):
            space, pid, begun, _ = mark.split(" ")
            if space == here[0] and not _is_running(int(pid), float(begun)):
                each.kill()
                count += 1
    return count


@cache
def _harness_of(pid: int) -> str:
    try:
        space = Path("/proc/self/ns/pid").readlink().name  # process numbers of another container mean nothing here
    except OSError:
        space = "all"
    return f"{space} {pid} {psutil.Process(pid).create_time()}"


def _harness() -> str:
    return _harness_of(os.getpid())


def _is_running(pid: int, begun: float) -> bool:
    with suppress(psutil.NoSuchProcess):
        return abs(psutil.Process(pid).create_time() - begun) < 1
    return False


def _descendants(process: _Worker) -> list[psutil.Process]:
    with suppress(psutil.Error):
        if process.exitcode is None:
            return psutil.Process(process.pid).children(recursive=True)
    return []


def _marked(mark: str) -> list[psutil.Process]:
    """Return what has a worker's mark, which is also what made itself a daemon."""
    return [each for each, found in _all_marked() if found == mark]


def _all_marked() -> Iterator[tuple[psutil.Process, str]]:
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if (mark := each.environ().get(_MARK, "")).count(" ") == 3:
                yield each, mark


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def memory_of(pid: int) -> int:
    """Return the bytes of memory that a process and its children hold."""
    held = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                held += each.memory_info().rss
    return held
