"""What a restricted function requires of the shapes that it is given, as it declares it.

    attention.requires = {"width_multiple": 8, "value_width": "equal", "max_width": 256}

The harness pads what does not meet a requirement (``padding.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any


@dataclass(frozen=True)
class Requirements:
    """The shapes that a function takes.

    Widths are D and Dv (and Dk, the width of the key of a bilinear or additive score): each is a multiple of
    ``width_multiple``, one of ``widths`` where these are given, and between ``min_width`` and ``max_width``. With
    ``value_width``, Dv is D. Lq is a multiple of ``query_length_multiple``, and T, the number of all keys with those of
    the past, of ``key_length_multiple``. With ``lengths``, Lq is T.
    """

    width_multiple: int = 1
    widths: tuple[int, ...] = ()
    min_width: int = 1
    max_width: int | None = None
    value_width: str | None = None
    query_length_multiple: int = 1
    key_length_multiple: int = 1
    lengths: str | None = None

    @classmethod
    def of(cls, declared: Any) -> Requirements:
        """Check what a function declares. Raises ``ValueError``, which says what was expected."""
        if not isinstance(declared, Mapping):
            raise ValueError(f"requires: expected {_EXAMPLE}; got {declared!r}")
        for name, value in declared.items():
            _check(name, value)
        given: dict[str, Any] = {name: tuple(value) if name == "widths" else value for name, value in declared.items()}
        found = cls(**given)
        if found.width(1) is None:
            raise ValueError(f"requires: no width meets all of {dict(declared)!r}; expected one that does")
        return found

    def width(self, least: int) -> int | None:
        """Return the smallest width that is taken and is at least ``least``; None where there is none."""
        least = max(least, self.min_width)
        offered = sorted(self.widths) or [_round_up(least, self.width_multiple)]
        fitting = [
            width
            for width in offered
            if width >= least and width % self.width_multiple == 0 and width <= (self.max_width or width)
        ]
        return fitting[0] if fitting else None

    def query_and_key_length(self, queries: int, keys: int) -> tuple[int, int]:
        """Return the smallest numbers of queries and of keys that are taken and are at least these."""
        if self.lengths is None:
            return _round_up(queries, self.query_length_multiple), _round_up(keys, self.key_length_multiple)
        both = math.lcm(self.query_length_multiple, self.key_length_multiple)
        return (_round_up(max(queries, keys), both),) * 2

    @property
    def limits(self) -> str:
        """Return what keeps a width from being taken, however it is padded."""
        if self.widths:
            return f"widths of {', '.join(map(str, sorted(self.widths)))}"
        return f"widths of at most {self.max_width}"


_EXAMPLE = 'a dict such as {"width_multiple": 8, "value_width": "equal"}'
_EQUAL = frozenset({"value_width", "lengths"})


def _check(name: Any, value: Any) -> None:
    """Raise ``ValueError`` for a key that nothing knows, or a value that it cannot have."""
    known = [field.name for field in fields(Requirements)]
    if name not in known:
        meant = get_close_matches(str(name), known, 1)
        guess = f"; {meant[0]} is meant?" if meant else ""
        raise ValueError(f"requires: unknown key {name!r}; expected {', '.join(known)}{guess}")
    if name in _EQUAL:
        if value != "equal":
            raise ValueError(f'requires: {name}: expected "equal"; got {value!r}')
    elif name == "widths":
        if not isinstance(value, list | tuple | set | frozenset) or not value or not all(map(_is_count, value)):
            raise ValueError(f"requires: widths: expected a list of whole numbers of at least 1; got {value!r}")
    elif not _is_count(value):
        raise ValueError(f"requires: {name}: expected a whole number of at least 1; got {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
