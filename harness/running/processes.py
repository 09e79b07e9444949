"""Worker processes as such: how they are started, how they ended, how much memory they hold."""

from __future__ import annotations

import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process, resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess

import psutil

ENDED_ITSELF = 256
"""Stands for exit code 0 of a worker; no process has this one."""

_spawning = threading.Lock()
_exit_codes: dict[int, int] = {}
"""By process, of those that are gone. A pool that breaks because its worker died does not say how."""


class _Worker(SpawnProcess):
    """A spawned process that does not run the caller's main module again, and leaves Ctrl-C to its parent.

    A script without a main guard would otherwise start its whole run anew in every worker, and a worker that is just
    loading its modules would answer Ctrl-C, which a terminal sends to all, with a traceback.
    """

    def start(self) -> None:
        with _spawning, _interrupts_blocked(), _children_allowed():
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main

    @property
    def exitcode(self) -> int | None:
        """The exit code, but for 0: no worker ends in good order by itself, and pebble would wait for such a one."""
        code: int | None = super().exitcode
        if code is not None and self.pid is not None:
            _exit_codes[self.pid] = code
        return ENDED_ITSELF if code == 0 else code


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


class WorkerContext(SpawnContext):
    """Starts workers."""

    Process = _Worker


def exit_code_of(pid: int) -> int | None:
    """Return with which exit code a worker ended; None while it runs, and where nobody has looked."""
    return _exit_codes.get(pid)


def memory_of(pid: int) -> int:
    """Return the bytes of memory that a process and its children hold."""
    held = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                held += each.memory_info().rss
    return held
