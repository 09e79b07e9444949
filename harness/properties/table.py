"""Which function asks each property; the properties themselves stand in ``spec/properties.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attncheck.properties import numbers, sequences
from attncheck.properties.problem import AnyVariant, Problem
from attncheck.spec.properties import PROPERTIES

Asked = Callable[[Problem], Sequence[AnyVariant]]
"""Makes further calls of a problem. Raises ``UnfitError`` where it says nothing of one."""
_ROOMS = (sequences, numbers)

ASKED_BY: Mapping[str, Asked] = {
    name: next(getattr(room, name) for room in _ROOMS if hasattr(room, name)) for name in PROPERTIES
}
"""Each property's function, which has its name."""


def variants_of(name: str, problem: Problem) -> Sequence[AnyVariant]:
    """Return the calls by which a property is asked of a problem. Raises ``UnfitError``."""
    return ASKED_BY[name](problem)
