"""What some implementations have answered to a unit that others have not answered yet.

Implementations come through a plan one after the other where fewer workers may be alive than there are frameworks. Then
most of what they answer waits, and what memory should not hold waits in a file that has no name and no other reader.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from attncheck.execution.worker import Computed, Outcome
from attncheck.plan import Unit

MAX_HELD = 2**28
"""Bytes of arrays that wait in memory."""


@dataclass(frozen=True)
class _Filed:
    """Where in the file an outcome is."""

    offset: int
    length: int


class WaitingOutcomes:
    """Outcomes by unit, until every implementation that is asked for it has answered."""

    def __init__(self, asked_of: Callable[[Unit], int], max_held: int = MAX_HELD) -> None:
        """``asked_of`` counts the implementations that are asked for a unit."""
        self._asked_of, self._max_held = asked_of, max_held
        self._waiting: dict[int, dict[str, Outcome | _Filed]] = {}
        self._held = 0
        self._file: IO[bytes] | None = None

    def add(self, unit: Unit, implementation: str, outcome: Outcome) -> dict[str, Outcome] | None:
        """Return what all have answered to the unit, where this is the last answer."""
        found = self._waiting.setdefault(unit.position, {})
        if len(found) + 1 < self._asked_of(unit):
            found[implementation] = self._kept(outcome)
            return None
        del self._waiting[unit.position]
        return {**{name: self._taken(each) for name, each in found.items()}, implementation: outcome}

    def close(self) -> None:
        """Forget what still waits."""
        self._waiting.clear()
        if self._file is not None:
            self._file.close()

    def _kept(self, outcome: Outcome) -> Outcome | _Filed:
        size = _size(outcome)
        if self._held + size > self._max_held:
            with suppress(OSError):  # where no file can hold it, memory has to
                return self._filed(outcome)
        self._held += size
        return outcome

    def _filed(self, outcome: Outcome) -> _Filed:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        data = pickle.dumps(outcome)
        offset = self._file.seek(0, 2)
        self._file.write(data)
        self._file.flush()
        return _Filed(offset, len(data))

    def _taken(self, each: Outcome | _Filed) -> Outcome:
        if not isinstance(each, _Filed):
            self._held -= _size(each)
            return each
        assert self._file is not None
        self._file.seek(each.offset)
        outcome: Outcome = pickle.loads(self._file.read(each.length))  # what this process wrote, and nobody else can
        return outcome


def _size(outcome: Outcome) -> int:
    return sum(array.nbytes for array in outcome.stages.values()) if isinstance(outcome, Computed) else 0
