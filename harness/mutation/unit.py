"""One case in one dtype, with the inputs of one seed, put to faults and right variants: what is said of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.runner import task_of
from attncheck.execution.worker import NOT_RETURNED, Failure, Outcome, Task, evaluate_on
from attncheck.judging.diagnosis import Evidence
from attncheck.judging.truth import Stages
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.judgement import REFERENCE_CLASSES, ExactJudge, JudgeStages, StageFinding
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.mutation.naming import MAX_SCORES, Naming
from attncheck.mutation.rules import rejected_by_rules
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.shapes import score_elements
from attncheck.spec import STAGES

MAX_SCORES_FOR_ALL = 1 << 10
"""Elements of the score matrix up to which a case is put to every fault; beyond, to those caught too seldom."""

_REFERENCE = SUBJECTS["reference"].backend


@dataclass(frozen=True)
class Unit:
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
        """What a subject is asked."""
        return task_of(self.case, self.inputs)

    @property
    def serves_naming(self) -> bool:
        """Whether what fails here is used to name it: small cases, in 64 bits, and some in 32."""
        is_asked = self.dtype == "float64" or (self.dtype == "float32" and len(self.case.id) % 4 == 0)
        return is_asked and self.elements <= MAX_SCORES


def units_of(case: Case, seed: int) -> Iterator[Unit]:
    exact, elements = make_exact_inputs(case), count_scores(case)
    for dtype in (dtype for dtype in case.dtypes if dtype in REFERENCE_CLASSES):
        yield Unit(case, dtype, seed, convert_inputs(case, exact, dtype), elements)


def count_scores(case: Case) -> int:
    shapes = {name: np.broadcast_to(np.zeros(()), shape) for name, shape in case.input_shapes.items()}
    return score_elements(case.operation, case.options, shapes)


@dataclass(frozen=True, eq=False)
class UnitScorer:
    """Judges what subjects make of one unit; the same bits of the same rounding model are judged once."""

    unit: Unit
    judge: JudgeStages
    visible: Collection[str] | None
    naming: Naming
    _right: dict[int, Any] = field(default_factory=dict)
    _judged: dict[Any, Mapping[str, StageFinding]] = field(default_factory=dict)
    _evidence: dict[Any, Evidence | None] = field(default_factory=dict)

    def rows(self, subject: Subject) -> Iterator[dict[str, Any]]:
        """Yield a row per stage of a subject, or one for what it raised; none where it is as without its fault."""
        outcome = evaluate_on(subject.backend, self.unit.task)
        fingerprint = _fingerprint(outcome, self.visible)
        if _holds_nothing(subject, outcome) or self._is_as_without(subject, fingerprint):
            return
        blank = self._blank(subject)
        if isinstance(outcome, Failure):
            verdict = outcome.verdict
            yield {**blank, "stage": "", "own": True, "tier": verdict, "caught": verdict != "unsupported"}
            return
        stages, claimed = _seen(outcome.stages, self.visible), subject.classes.get(self.unit.dtype)
        what = claimed, fingerprint
        if what not in self._judged:
            self._judged[what] = self.judge(self.unit.case, self.unit.dtype, self.unit.inputs, stages, claimed)
        yield from _stage_rows(blank, stages, self._judged[what])
        if self.naming.wants(subject) and self.unit.serves_naming:
            self._name(subject, stages, what)

    def _is_as_without(self, subject: Subject, fingerprint: Any) -> bool:
        """Whether the case does not reach a fault."""
        if not isinstance(subject, Mutant):
            return False
        without = subject.without or _REFERENCE
        if id(without) not in self._right:
            self._right[id(without)] = _fingerprint(evaluate_on(without, self.unit.task), self.visible)
        return bool(fingerprint == self._right[id(without)])

    def _blank(self, subject: Subject) -> dict[str, Any]:
        return {
            "subject": subject.name,
            "case": self.unit.case.id,
            "dtype": self.unit.dtype,
            "seed": self.unit.seed,
            "drawn": self.unit.case.random is not None,
            "complete": self.unit.is_for_all,
        }

    def _name(self, subject: Subject, stages: Stages, what: tuple[str | None, Any]) -> None:
        """Take note of what the unit says of a fault; only the exact judge can say it."""
        if not isinstance(self.judge, ExactJudge):
            return
        unit, (claimed, _) = self.unit, what
        if what not in self._evidence:
            self._evidence[what] = self.judge.evidence(unit.case, unit.dtype, unit.inputs, stages, claimed)
        if (evidence := self._evidence[what]) is not None:
            self.naming.add(subject, (unit.case.id, unit.dtype, unit.seed), evidence)


def _holds_nothing(subject: Subject, outcome: Outcome) -> bool:
    """Whether a variant hides the operation's result, as one that never holds it would not have it at all."""
    refused = tuple(f"{NOT_RETURNED} {stage}" for stage in subject.backend.hidden)
    return isinstance(outcome, Failure) and outcome.message.endswith(refused)


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
