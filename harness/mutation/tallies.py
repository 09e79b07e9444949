"""What units find of each subject in a dtype, counted in one pass: a run has hundreds of thousands of evaluations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from attncheck.mutation.findings import Findings, UnitFindings
from attncheck.mutation.rules import RULES
from attncheck.spec import stage_position


@dataclass(frozen=True)
class Evaluation:
    """One subject on one unit: the first flagged stage that is itself at fault, else the first flagged one.

    ``rejects`` says by rule, the harness's own among them, whether any stage is rejected.
    """

    stage: str | None
    tier: str
    ratio: float
    rejects: Mapping[str, bool]


def evaluation_of(findings: Findings) -> Evaluation:
    flagged = [each for each in findings if each.caught]
    first = min(
        flagged, key=lambda each: (not each.own, stage_position(each.stage) if each.stage else -1), default=None
    )
    ratios = [each.ratio for each in findings if each.ratio is not None and not math.isnan(each.ratio)]
    rejects = {rule: any(getattr(each, rule) for each in findings) for rule in ("caught", *RULES)}
    if first is None:
        return Evaluation(None, "", max(ratios, default=math.nan), rejects)
    return Evaluation(first.stage, first.tier or "", max(ratios, default=math.nan), rejects)


@dataclass
class Tally:
    """One subject in one dtype: the evaluations that reach it, those that catch it, and what each rule rejects.

    ``catches`` are the flagged stage and its tier by case and seed; ``complete`` counts for the rules of faults.
    """

    reached: set[str] = field(default_factory=set)
    catches: dict[str, dict[int, tuple[str, str]]] = field(default_factory=dict)
    is_caught_undrawn: bool = False
    largest_ratio: float = math.nan
    evaluations: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_complete: Counter[str] = field(default_factory=Counter)

    def add(self, part: UnitFindings, found: Evaluation) -> None:
        """Add what one unit finds."""
        self.reached.add(part.case)
        self.evaluations += 1
        if found.ratio > self.largest_ratio or math.isnan(self.largest_ratio):
            self.largest_ratio = found.ratio
        rejecting = [rule for rule, rejects in found.rejects.items() if rejects]
        self.rejected.update(rejecting)
        if part.complete:
            self.rejected_complete.update(rejecting)
        if found.stage is not None:
            self.catches.setdefault(part.case, {})[part.seed] = found.stage, found.tier
            self.is_caught_undrawn |= not part.drawn

    @property
    def flagged(self) -> list[tuple[str, str]]:
        """Return every flagged stage with its tier."""
        return [each for of_case in self.catches.values() for each in of_case.values()]

    @property
    def seeds(self) -> set[int]:
        """Return the seeds that catch it."""
        return {seed for of_case in self.catches.values() for seed in of_case}


Tallies: TypeAlias = Mapping[tuple[str, str], Tally]
"""By the name of a subject, and the dtype."""


def tallies_of(parts: Iterable[UnitFindings]) -> Tallies:
    """Count what was found."""
    tallies: dict[tuple[str, str], Tally] = {}
    for part in parts:
        known: dict[int, Evaluation] = {}  # many subjects share what is found of them
        for subject, findings in part.found:
            if not findings:
                continue
            if id(findings) not in known:
                known[id(findings)] = evaluation_of(findings)
            tallies.setdefault((subject, part.dtype), Tally()).add(part, known[id(findings)])
    return tallies
