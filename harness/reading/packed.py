"""Many cases in little memory: packed away some dozens together, and unpacked when they are asked for."""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import overload

from attncheck.reading.case import Case

TOGETHER = 64
"""Cases of one file resemble each other, so that together they pack to a small part of what each would take."""

_UNPACKED = 8
"""Parts that stay unpacked; workers are never far from each other in the plan."""


class PackedCases(Sequence[Case]):
    """A sequence of cases of which most are packed; what is unpacked twice is equal, and not the same object."""

    def __init__(self, cases: Iterable[Case] = ()) -> None:
        self._parts: list[bytes] = []
        self._open: list[Case] = []
        self._order = array("L")
        parts = self._parts  # not ourselves, or only the garbage collector would ever free us
        self._part = lru_cache(maxsize=_UNPACKED)(lambda part: _unpack(parts[part]))
        for case in cases:
            self.append(case)

    def append(self, case: Case) -> None:
        """Add a case at the end."""
        self._order.append(len(self._parts) * TOGETHER + len(self._open))
        self._open.append(case)
        if len(self._open) == TOGETHER:
            self._parts.append(zlib.compress(pickle.dumps(self._open, pickle.HIGHEST_PROTOCOL), 1))
            self._open = []

    def arrange(self, order: Iterable[int]) -> None:
        """Put the cases in another order: that of their present places."""
        self._order = array("L", (self._order[index] for index in order))

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | Sequence[Case]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        part, inside = divmod(self._order[index], TOGETHER)
        return self._open[inside] if part == len(self._parts) else self._part(part)[inside]


def _unpack(part: bytes) -> list[Case]:
    found: list[Case] = pickle.loads(zlib.decompress(part))
    return found
