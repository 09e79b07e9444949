"""The mutation score: which cases catch which fault, at which stage, and what common tolerances would have said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.errors import UsageError
from attncheck.execution.runner import task_of
from attncheck.execution.worker import NOT_RETURNED, Failure, Outcome, Task, evaluate_on
from attncheck.judging.diagnosis import Evidence
from attncheck.judging.truth import Stages
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENT, MUTANTS, SUBJECTS
from attncheck.mutation.judgement import REFERENCE_CLASSES, ExactJudge, JudgeStages, StageFinding
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.mutation.naming import MAX_SCORES, Naming
from attncheck.mutation.rules import rejected_by_rules
from attncheck.mutation.summary import EVALUATION_COLUMNS, MutationFrames, summarise
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.shapes import score_elements
from attncheck.spec import STAGES

SEED_STEP = 1_000_003
"""Fresh seeds lie so far apart (an odd number) that no case's k-th seed is another case's own."""

MAX_SCORES_FOR_ALL = 1 << 10
"""Elements of the score matrix up to which a case is put to every fault; beyond, to those caught too seldom."""
ENOUGH_CASES = 2
"""Cases that have to catch a fault, in a dtype and a seed, before it is caught often enough."""
LARGE_AT_A_TIME = 16
"""Large cases that are put to faults before it is seen which of them are caught often enough."""

_REFERENCE = SUBJECTS["reference"].backend


@dataclass(frozen=True)
class _Unit:
    """One case in one dtype with one seed's inputs."""

    case: Case
    dtype: str
    seed: int
    inputs: Inputs
    elements: int

    @property
    def is_for_all(self) -> bool:
        """Whether every fault is asked: what is large is for those that smaller cases did not catch often enough."""
        return self.elements <= MAX_SCORES_FOR_ALL

    @property
    def task(self) -> Task:
        return task_of(self.case, self.inputs)

    @property
    def serves_naming(self) -> bool:
        """Whether what fails here is used to name it: small cases, in 64 bits, and some in 32."""
        is_asked = self.dtype == "float64" or (self.dtype == "float32" and len(self.case.id) % 4 == 0)
        return is_asked and self.elements <= MAX_SCORES


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
            for unit in _units_of(case, seed):
                rows += _judge_unit(unit, judge, self._asked(unit), self.visible, naming)
        return ScoredCases(rows, naming)

    def _asked(self, unit: _Unit) -> list[Subject]:
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


def _holds_nothing(subject: Subject, outcome: Outcome) -> bool:
    """Whether a variant hides the operation's result, as one that never holds it would not have it at all."""
    refused = tuple(f"{NOT_RETURNED} {stage}" for stage in subject.backend.hidden)
    return isinstance(outcome, Failure) and outcome.message.endswith(refused)


def _by_size(cases: Iterable[Case], seeds: Sequence[int]) -> tuple[list[tuple[Case, int]], list[tuple[Case, int]]]:
    """Return the cases that every fault is put to, each with its seeds, and the larger ones by size."""
    small, large = [], []
    for case in cases:
        elements = _score_elements(case)
        for seed in seeds if case.random is not None else seeds[:1]:
            drawn = (redrawn(case, seed), seed)
            if elements > MAX_SCORES_FOR_ALL:
                large.append((elements, drawn))
            else:
                small.append(drawn)
    return small, [drawn for _, drawn in sorted(large, key=lambda each: each[0])]


def _score_elements(case: Case) -> int:
    shapes = {name: np.broadcast_to(np.zeros(()), shape) for name, shape in case.input_shapes.items()}
    return score_elements(case.operation, case.options, shapes)


def _units_of(case: Case, seed: int) -> Iterator[_Unit]:
    exact, elements = make_exact_inputs(case), _score_elements(case)
    for dtype in (dtype for dtype in case.dtypes if dtype in REFERENCE_CLASSES):
        yield _Unit(case, dtype, seed, convert_inputs(case, exact, dtype), elements)


def _judge_unit(
    unit: _Unit, judge: JudgeStages, subjects: Sequence[Subject], visible: Collection[str] | None, naming: Naming
) -> Iterator[dict[str, Any]]:
    """Judge every subject that differs from what it is without its fault; the same bits are judged once."""
    right: dict[int, Any] = {}
    known: dict[Any, Mapping[str, StageFinding]] = {}
    evidences: dict[Any, Evidence | None] = {}
    for subject in subjects:
        outcome = evaluate_on(subject.backend, unit.task)
        if _holds_nothing(subject, outcome):
            continue
        fingerprint = _fingerprint(outcome, visible)
        if isinstance(subject, Mutant):
            without = subject.without or _REFERENCE
            if id(without) not in right:
                right[id(without)] = _fingerprint(evaluate_on(without, unit.task), visible)
            if fingerprint == right[id(without)]:
                continue  # the case does not reach the fault
        blank = {
            "subject": subject.name,
            "case": unit.case.id,
            "dtype": unit.dtype,
            "seed": unit.seed,
            "drawn": unit.case.random is not None,
            "complete": unit.is_for_all,
        }
        if isinstance(outcome, Failure):
            yield {
                **blank,
                "stage": "",
                "own": True,
                "tier": outcome.verdict,
                "caught": outcome.verdict != "unsupported",
            }
            continue
        stages, claimed = _seen(outcome.stages, visible), subject.classes.get(unit.dtype)
        judged = (claimed, fingerprint)
        if judged not in known:
            known[judged] = judge(unit.case, unit.dtype, unit.inputs, stages, claimed)
        yield from _stage_rows(blank, stages, known[judged])
        if isinstance(judge, ExactJudge) and naming.wants(subject) and unit.serves_naming:
            if judged not in evidences:
                evidences[judged] = judge.evidence(unit.case, unit.dtype, unit.inputs, stages, claimed)
            if (evidence := evidences[judged]) is not None:
                naming.add(subject, (unit.case.id, unit.dtype, unit.seed), evidence)


def _stage_rows(
    blank: Mapping[str, Any], stages: Stages, judgements: Mapping[str, StageFinding]
) -> Iterator[dict[str, Any]]:
    for stage in sorted(judgements, key=STAGES.index):
        judgement = judgements[stage]
        row = {**blank, "stage": stage, "tier": judgement.tier, "caught": judgement.tier is not None}
        row |= {"own": judgement.own, "ratio": judgement.ratio}
        if judgement.exact is not None:
            row |= rejected_by_rules(stages[stage], judgement.exact, blank["dtype"])
        yield row


def _seen(stages: Stages, visible: Collection[str] | None) -> dict[str, NDArray[Any]]:
    return {name: array for name, array in stages.items() if visible is None or name in visible}


def _fingerprint(outcome: Outcome, visible: Collection[str] | None) -> Any:
    """Return what tells two outcomes apart, signs of zeros included."""
    if isinstance(outcome, Failure):
        return outcome
    return tuple(
        (name, str(array.dtype), array.shape, array.tobytes()) for name, array in _seen(outcome.stages, visible).items()
    )
