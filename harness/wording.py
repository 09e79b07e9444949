"""Numbers and names as messages write them."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Write 1 case, or 2,000 cases."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Iterable[str]) -> str:
    """Write one, or one and two, or one, two and three; nothing for no name."""
    *first, last = list(names) or [""]
    return f"{', '.join(first)} and {last}" if first else last
