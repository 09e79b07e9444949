"""The mutation score: which cases catch which fault, at which stage, and what common tolerances would have said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pandas as pd

from attncheck.errors import UsageError
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENT, MUTANTS
from attncheck.mutation.judgement import ExactJudge, JudgeStages
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.mutation.naming import Naming
from attncheck.mutation.summary import EVALUATION_COLUMNS, MutationFrames, summarise
from attncheck.mutation.unit import MAX_SCORES_FOR_ALL, Unit, UnitScorer, count_scores, units_of
from attncheck.reading.case import Case

SEED_STEP = 1_000_003
"""Fresh seeds lie so far apart (an odd number) that no case's k-th seed is another case's own."""

ENOUGH_CASES = 2
"""Cases that have to catch a fault, in a dtype and a seed, before it is caught often enough."""
LARGE_AT_A_TIME = 16
"""Large cases that are put to faults before it is seen which of them are caught often enough."""


class _Caught:
    """Which cases catch each fault so far, in each dtype and seed."""

    def __init__(self) -> None:
        self._cases: dict[tuple[str, str, int], set[str]] = {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take note of the rows that are caught."""
        for row in rows:
            if row["caught"]:
                self._cases.setdefault((row["subject"], row["dtype"], row["seed"]), set()).add(row["case"])

    def caught_enough(self) -> frozenset[tuple[str, str, int]]:
        """Return the faults of which further cases would say nothing more, by name, dtype and seed."""
        return frozenset(key for key, cases in self._cases.items() if len(cases) >= ENOUGH_CASES)


@dataclass(frozen=True, eq=False)
class ScoredCases:
    """What some cases say: their rows, and the evidence by which subjects are named."""

    rows: list[dict[str, Any]]
    naming: Naming


@dataclass(frozen=True)
class CaseScorer:
    """How cases are put to subjects; those in ``caught_enough`` (name, dtype, seed) are not asked any more."""

    subjects: Sequence[Subject]
    visible: Collection[str] | None = None
    caught_enough: frozenset[tuple[str, str, int]] = frozenset()

    def judge(self, cases: Iterable[tuple[Case, int]], judge: JudgeStages) -> ScoredCases:
        """Put cases to the subjects, each with a seed."""
        rows: list[dict[str, Any]] = []
        naming = Naming()
        for case, seed in cases:
            for unit in units_of(case, seed):
                scorer = UnitScorer(unit, judge, self.visible, naming)
                rows += [row for subject in self._asked(unit) for row in scorer.rows(subject)]
        return ScoredCases(rows, naming)

    def _asked(self, unit: Unit) -> list[Subject]:
        """Return whom a case is put to; right kernels are asked everywhere."""
        return [
            subject
            for subject in self.subjects
            if unit.dtype in subject.dtypes
            and not (isinstance(subject, Mutant) and (subject.name, unit.dtype, unit.seed) in self.caught_enough)
        ]


JudgeCases: TypeAlias = Callable[[CaseScorer, Sequence[tuple[Case, int]]], ScoredCases]
"""Puts cases to subjects, in this process or in several."""


def run_mutants(
    cases: Iterable[Case],
    seeds: Sequence[int] = (0,),
    *,
    judge_stages: JudgeStages | None = None,
    judge_cases: JudgeCases | None = None,
    subjects: Sequence[Subject] = (*MUTANTS, *CONTROLS),
    visible: Collection[str] | None = None,
) -> MutationFrames:
    """Run every subject on every case, dtype and seed.

    Seed 0 is the case's own; seed k redraws what is drawn. Cases that draw nothing count in every seed. Large cases
    come last, some at a time, and are put to faults alone that fewer than ``ENOUGH_CASES`` others caught. ``visible``
    hides all other stages, to see what a fault leaves for somebody who has the output alone. ``judge_cases`` may put
    cases to subjects in several processes (``workers.py``); what comes of it is the same.
    """
    judge = judge_stages or ExactJudge()
    put = judge_cases or (lambda scorer, some: scorer.judge(some, judge))
    small, large = _by_size(cases, seeds)
    scorer, caught = CaseScorer(subjects, visible), _Caught()
    parts = [put(scorer, small)]
    for first in range(0, len(large), LARGE_AT_A_TIME):
        caught.add(parts[-1].rows)
        parts.append(put(replace(scorer, caught_enough=caught.caught_enough()), large[first : first + LARGE_AT_A_TIME]))
    rows = [row for part in parts for row in part.rows]
    return summarise(pd.DataFrame(rows, columns=list(EVALUATION_COLUMNS)), subjects, seeds, parts[0].naming.names())


def subjects_of(topics: Collection[str]) -> tuple[Subject, ...]:
    """Return the faults of these topics, or of all, with every control and every equivalent variant.

    Raises ``UsageError`` for a topic that does not exist.
    """
    known = {mutant.topic for mutant in MUTANTS}
    unknown = [topic for topic in topics if topic not in known]
    if unknown:
        raise UsageError(f"no fault has the topic {unknown[0]!r}; expected {', '.join(sorted(known))}")
    faults = [mutant for mutant in MUTANTS if not topics or mutant.topic in topics]
    return (*faults, *CONTROLS, *EQUIVALENT)


def redrawn(case: Case, seed: int) -> Case:
    """Return the case with its k-th fresh seed; k = 0 is its own."""
    if case.random is None or seed == 0:
        return case
    fresh = (case.random.seed + seed * SEED_STEP) % 2**32
    return replace(case, random=case.random.model_copy(update={"seed": fresh}))


def _by_size(cases: Iterable[Case], seeds: Sequence[int]) -> tuple[list[tuple[Case, int]], list[tuple[Case, int]]]:
    """Return the cases that every fault is put to, each with its seeds, and the larger ones by size."""
    small, large = [], []
    for case in cases:
        elements = count_scores(case)
        for seed in seeds if case.random is not None else seeds[:1]:
            drawn = (redrawn(case, seed), seed)
            if elements > MAX_SCORES_FOR_ALL:
                large.append((elements, drawn))
            else:
                small.append(drawn)
    return small, [drawn for _, drawn in sorted(large, key=lambda each: each[0])]
