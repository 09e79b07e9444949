"""What one or several workers of the same implementations get through, and whether another one would pay."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from time import perf_counter

from attncheck.plan import Unit

CHUNK = 32
"""Units that a worker takes at once, where several may."""
MIN_SECONDS_LEFT = 15.0
"""So long at least the rest has to take for another worker to be started, which takes seconds itself."""


class SharedWork:
    """The units of a plan, taken in order."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units, self._next = units, 0
        self._begun = 0.0
        self._lock = Lock()

    def take(self, most: int) -> Sequence[Unit]:
        """Return the next units, so many at most; none where nothing is left."""
        with self._lock:
            self._begun = self._begun or perf_counter()
            taken = self._units[self._next : self._next + most]
            self._next += len(taken)
            return taken

    @property
    def is_long(self) -> bool:
        """Whether the rest takes so long, at the speed so far, that another worker pays."""
        with self._lock:
            done, left = self._next - CHUNK, len(self._units) - self._next
            return done > 0 and left > CHUNK and (perf_counter() - self._begun) / done * left > MIN_SECONDS_LEFT

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        with self._lock:
            return self._next >= len(self._units)
