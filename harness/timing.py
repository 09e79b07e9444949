"""The time that a run takes: seconds by what was done, those of processes side by side added up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter


@dataclass(frozen=True)
class Times:
    """Seconds by what was done, in the order in which it was first done."""

    seconds: dict[str, float] = field(default_factory=dict)
    _adding: Lock = field(default_factory=Lock, repr=False, compare=False)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Count the time that something takes."""
        begun = perf_counter()
        try:
            yield
        finally:
            self.add(what, perf_counter() - begun)

    def add(self, what: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        with self._adding:
            self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def __str__(self) -> str:
        """Return in words what took a tenth of a second or more."""
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.seconds.items() if seconds >= 0.05)
