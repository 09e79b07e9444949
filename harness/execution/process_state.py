"""What the evaluations of a worker share, put back after each: its result must not depend on which came before it.

A run that goes on after it was interrupted evaluates in another order than an unbroken one. Put back is what Python and
NumPy keep for the whole process; what a framework keeps for itself, such as its default dtype, is the framework's.
"""

from __future__ import annotations

import gc
import locale
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


@dataclass(frozen=True)
class ProcessState:
    """What a process is like before an evaluation: where it prints, its threads, and how to make the rest as it was."""

    _outlets: tuple[object, ...]
    _threads: frozenset[int]
    _restore: tuple[Callable[[], None], ...]

    @classmethod
    def snapshot(cls) -> ProcessState:
        """Look what it is like now."""
        return cls(
            _outlets(),
            frozenset(thread.ident or 0 for thread in threading.enumerate()),
            _restorers(),
        )

    def restore(self) -> bool:
        """Make everything as it was; return whether the process is fit for another evaluation."""
        for restore in self._restore:
            with suppress(Exception):
                restore()
        return _outlets() == self._outlets and not (sys.stdout.closed or sys.stderr.closed)

    def has_more_threads(self) -> bool:
        """Whether there are threads now that were not there."""
        return any(thread.ident not in self._threads for thread in threading.enumerate())


_LEAST_HELD = 2**30
"""Bytes. A process that holds less has not compiled thousands of programs; to count its mappings takes a while."""
_MAPPINGS, _MAX_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def has_many_mappings(held: int) -> bool:
    """Whether a process that holds so many bytes has more than half of the memory mappings that Linux lets it have.

    A compiler maps memory for each program, and keeps them all: at the limit it cannot compile the next, and crashes.
    """
    if held < _LEAST_HELD:
        return False
    try:
        return _MAPPINGS.read_bytes().count(b"\n") > int(_MAX_MAPPINGS.read_text()) // 2
    except (OSError, ValueError):  # another system, which has another limit, or none
        return False


@cache
def _restorers() -> tuple[Callable[[], None], ...]:
    """Remember what is put back: once, for it is put back after every evaluation."""
    return _streams(), _folder(), _signals(), _warnings(), _locale(), _random(), _interpreter(), _functions(np)


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


def _streams() -> Callable[[], None]:
    before = sys.stdin, sys.stdout, sys.stderr

    def restore() -> None:
        sys.stdin, sys.stdout, sys.stderr = before

    return restore


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


def _random() -> Callable[[], None]:
    python, numpy = random.getstate(), np.random.get_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return restore


def _interpreter() -> Callable[[], None]:
    depth, collects = sys.getrecursionlimit(), gc.isenabled()

    def restore() -> None:
        sys.setrecursionlimit(depth)
        (gc.enable if collects else gc.disable)()

    return restore


def _functions(module: Any) -> Callable[[], None]:
    before = dict(vars(module))

    def restore() -> None:
        now = vars(module)
        for name, function in before.items():
            if now.get(name) is not function:
                setattr(module, name, function)

    return restore
