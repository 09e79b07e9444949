"""Who may go on: at most so many at the same time, and of those that wait the one that comes first in the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

_LOOK = 0.2
"""Seconds between looks whether a spare place is still wanted."""


class PrioritySemaphore:
    """At most ``limit`` at the same time; a place is spare while fewer than ``busy`` are taken."""

    def __init__(self, limit: int, busy: int | None = None) -> None:
        self._free, self._kept_free = limit, max(0, limit - (limit if busy is None else busy))
        self._waiting: list[tuple[int, int]] = []
        self._tickets = 0
        self._changed = Condition()

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for a place."""
        with self._changed:
            return bool(self._waiting)

    @contextmanager
    def acquire(self, step: int) -> Iterator[None]:
        """Wait for a place; of those that wait, the one whose ``step`` in the plan comes first is next."""
        with self._changed:
            self._tickets += 1
            ticket = (step, self._tickets)
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._free and min(self._waiting) == ticket)
            self._waiting.remove(ticket)
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    @contextmanager
    def spare(self, is_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Wait for a place that nobody else waits for; give whether there is one, or it is not wanted any more."""
        with self._changed:
            while (wanted := is_wanted()) and not (self._free > self._kept_free and not self._waiting):
                self._changed.wait(_LOOK)
            self._free -= wanted
        try:
            yield wanted
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()
