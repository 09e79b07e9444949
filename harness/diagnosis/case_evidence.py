"""What a failing case says of its implementation, which all cases of a run decide together.

The verdict of a case does not depend on it. ``diagnosis.examine`` finds it and ``diagnosis.decision`` weighs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """A reading that explains a case; ``unsure`` names all that have its answer there, ``description`` it alone.

    ``factor`` is the number that was fitted, over the one that the case means. ``shared`` is the description where all
    cases that the reading explains have that one.
    """

    name: str
    description: str
    stage: str
    verdict: str
    answer: str
    unsure: str = ""
    is_fitted: bool = False
    factor: float | None = None
    shared: str = ""


@dataclass(frozen=True)
class Evidence:
    """What one failing case says of its implementation.

    ``failing`` is the first stage that fails, ``operation`` that of the case.
    """

    fits: tuple[Fit, ...] = ()
    refuted: frozenset[str] = frozenset()
    failing: str = ""
    operation: str = ""
