"""What is found of what variants return for one case in one dtype, as it goes from process to process and into a store.

Nearly all variants of a case return the bits of another one: what is found of them is one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from attncheck.judging.compare import Tier
from attncheck.verdicts import Verdict

OF_NUMBERS = frozenset({str(Tier.PROVEN), str(Tier.STATISTICAL), str(Verdict.NONFINITE)})
"""The tiers of wrong numbers: what is wrong in form or raises has no cause that could be named by its numbers."""


class StageResult(NamedTuple):
    """What is found of one stage: the last columns of an evaluation (``EVALUATION_COLUMNS``)."""

    stage: str
    tier: str | None
    caught: bool
    own: bool
    ratio: float | None
    assert_close: bool | None
    allclose: bool | None
    rtol_1e_3: bool | None


Findings = tuple[StageResult, ...]
"""What is found of one evaluation, stage by stage; one without a stage where it raised."""


def is_caught(findings: Findings) -> bool:
    """Whether any stage is flagged."""
    return any(each.caught for each in findings)


def has_wrong_numbers(findings: Findings) -> bool:
    """Whether any stage is flagged for its numbers."""
    return any(each.tier in OF_NUMBERS for each in findings)


@dataclass(frozen=True)
class UnitFindings:
    """What is found of every variant that one case was put to in one dtype; faults that it does not reach are left out.

    ``complete``, ``drawn`` and the rest are the first columns of an evaluation. ``serves_naming`` says whether what
    fails here is used to name it.
    """

    case: str
    dtype: str
    seed: int
    drawn: bool
    complete: bool
    serves_naming: bool
    found: tuple[tuple[str, Findings], ...]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield evaluations, one per subject and stage."""
        unit = self.case, self.dtype, self.seed, self.drawn, self.complete
        for subject, findings in self.found:
            for each in findings:
                yield (subject, *unit, *each)

    def of(self, is_asked: Callable[[str], bool]) -> UnitFindings:
        """Return the same of some subjects."""
        found = tuple(each for each in self.found if is_asked(each[0]))
        return self if len(found) == len(self.found) else UnitFindings(**{**vars(self), "found": found})
