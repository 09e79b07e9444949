"""Many cases in little memory: packed away some dozens together, and unpacked when they are asked for."""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, overload

from attncheck.reading.case import Case
from attncheck.reading.yaml_reader import YamlDocument
from attncheck.reading.yaml_scalars import FieldPath

TOGETHER = 64
"""Cases of one file resemble each other, so that together they pack to a small part of what each would take."""

_UNPACKED = 32
"""Parts that stay unpacked: all of a corpus of 2,048 cases, through which a run comes several times."""


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

    def __reduce__(self) -> tuple[Callable[..., PackedCases], tuple[list[bytes], list[Case], array[int]]]:
        return _restored, (self._parts, self._open, self._order)  # sent to another process they stay packed

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


def _restored(parts: list[bytes], opened: list[Case], order: array[int]) -> PackedCases:
    cases = PackedCases(opened)
    cases._parts.extend(parts)
    cases._order = order
    return cases


def _unpack(part: bytes) -> list[Case]:
    found: list[Case] = pickle.loads(zlib.decompress(part))
    return found


EACH = "each"
_SHOWN = 60


def referred(data: Any) -> str | None:
    """Return the name in ``{each: name}``; None for what is anything else."""
    name = data.get(EACH) if isinstance(data, dict) else None
    return name if isinstance(name, str) else None


def as_written(name: str) -> str:
    """Write a reference to a name as a file does."""
    return f"{{{EACH}: {name if name.isidentifier() and len(name) <= _SHOWN else ascii(name)[:_SHOWN]}}}"


@dataclass(frozen=True)
class Origin:
    """Which case of the file one is made of, and where the values stand that its names have."""

    number: int
    values: Mapping[str, FieldPath]


@dataclass(frozen=True)
class _Followed:
    """How far a path leads: in the cases as written out, in the file, and perhaps on into a value of ``for_each``."""

    found: FieldPath
    path: FieldPath
    name: str | None = None
    value: FieldPath = ()


@dataclass(frozen=True)
class WrittenOut(YamlDocument):
    """``data`` holds the cases as written out, ``lines`` those of the file, whose own data is ``written``."""

    written: Any = None
    origins: tuple[Origin, ...] = field(default=())

    def locate(self, path: FieldPath) -> tuple[FieldPath, int | None]:
        """Return the longest part of a path that exists, and its line; of a value, where the case has its name."""
        followed = self._follow(path)
        return followed.found, self.lines.get(followed.path)

    def source(self, path: FieldPath) -> FieldPath:
        """Return where in the file stands what a path leads to."""
        followed = self._follow(path)
        return followed.value if followed.name else followed.path

    def value_of(self, path: FieldPath) -> tuple[str, int | None] | None:
        """Return the name whose value a path leads to, and the line of that value."""
        followed = self._follow(path)
        return (followed.name, self.lines.get(followed.value)) if followed.name else None

    def _follow(self, path: FieldPath) -> _Followed:
        match path:
            case ("cases", int(number), *rest):
                origin = self.origins[number]
            case _:
                found, _ = super().locate(path)
                return _Followed(found, found)
        written: FieldPath = ("cases", origin.number)
        now = self._into(_Followed(("cases", number), written), origin, written)
        for part in rest:
            ahead = (*(now.value if now.name else now.path), part)
            if ahead not in self.lines:
                continue
            if now.name:
                now = _Followed((*now.found, part), now.path, now.name, ahead)
            else:
                now = _Followed((*now.found, part), ahead)
            now = self._into(now, origin, ahead)
        return now

    def _into(self, followed: _Followed, origin: Origin, at: FieldPath) -> _Followed:
        """Go on to the value, where one stands."""
        while (name := referred(self._written_at(at))) is not None and name in origin.values:
            at = origin.values[name]
            followed = _Followed(followed.found, followed.path, name, at)
        return followed

    def _written_at(self, path: FieldPath) -> Any:
        data = self.written
        for part in path:
            data = data[part]
        return data
