"""Numbers and names as messages write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_LONGEST: Final = 100
_MOST_MEANT: Final = 2
BY_ITSELF: Final = "; taken by itself: "
"""Before what one failing case names in which all of them together name nothing."""
_LISTED: Final = 12
NEAR: Final = 0.61
_AS_NEAR: Final = 0.1


def counted(number: int, noun: str) -> str:
    """Write 1 case, or 2,000 cases."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Iterable[str]) -> str:
    """Write one, or one and two, or one, two and three; nothing for no name."""
    *first, last = list(names) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def listed_or(names: Iterable[str]) -> str:
    """Write one, or one or two, or one, two or three; nothing for no name."""
    *first, last = list(names) or [""]
    return f"{', '.join(first)} or {last}" if first else last


def expected(name: str, known: Iterable[str], lists_all: str = "", *, one_of: bool = True) -> str:
    """Say what could be meant by a ``name`` that is not ``known``: what is nearly called that, and what there is.

    Where there are many names or one is near, the command that ``lists_all`` takes the place of the list.
    """
    import difflib

    names = list(known)
    lower = {each.lower(): each for each in reversed(names)}
    asked = name[:_LONGEST].lower()
    likeness = {
        each: difflib.SequenceMatcher(None, each, asked).ratio()
        for each in difflib.get_close_matches(asked, lower, _MOST_MEANT, NEAR)
    }
    close = [lower[each] for each, alike in likeness.items() if alike >= max(likeness.values()) - _AS_NEAR]
    everything = f"expected {'one of ' if one_of else ''}{', '.join(names)}"
    if lists_all and (close or len(names) > _LISTED):
        everything = f"{lists_all} lists all"
    return f"did you mean {listed_or(close)}? ({everything})" if close else everything


def slug(name: str) -> str:
    """Return a case's name, or what is added to it, as it stands in an id."""
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")
