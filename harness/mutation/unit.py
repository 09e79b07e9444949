"""One case in one dtype, with the inputs of one seed, put to faults and right variants: what is said of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.operations import Task
from attncheck.execution.runner import task_of
from attncheck.execution.worker import NOT_RETURNED, Computed, Failure, Outcome, evaluate_on
from attncheck.judging.diagnosis import Evidence
from attncheck.judging.truth import Stages
from attncheck.mutation.findings import Findings, StageResult
from attncheck.mutation.judgement import REFERENCE_CLASSES, ExactJudge, JudgeStages, StageFinding
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.mutation.naming import MAX_SCORES
from attncheck.mutation.reach import Recorder, ReferenceRun
from attncheck.mutation.remembered import EVIDENCE, FINDINGS, RememberedUnit, remembered_unit
from attncheck.mutation.rules import RULES, rejected_by_rules
from attncheck.mutation.variant import Variant
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.shapes import score_elements
from attncheck.spec import STAGES
from attncheck.store import NO_STORE, Store, digest_of

_MAX_TRIALS = 8
_DIFFERED: Counter[Variant] = Counter()
"""How often in a row each variant returned other bits than the reference: it is not compared step by step any more."""

MAX_SCORES_FOR_ALL = 1 << 10
"""Elements of the score matrix up to which a case is put to every fault; beyond, to those caught too seldom."""


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

    @cached_property
    def task(self) -> Task:
        """What a subject is asked."""
        return task_of(self.case, self.inputs)

    @property
    def serves_naming(self) -> bool:
        """Whether what fails here is used to name it: small cases, in 64 bits, and some in 32."""
        return serves_naming(self.case, self.dtype, self.elements)


def serves_naming(case: Case, dtype: str, elements: int) -> bool:
    """Whether what a case of so many scores fails in a dtype is used to name it."""
    return elements <= MAX_SCORES and (dtype == "float64" or (dtype == "float32" and len(case.id) % 4 == 0))


def unit_of(case: Case, seed: int, dtype: str) -> Unit:
    """Return a case in one dtype, with the inputs of a seed."""
    return Unit(case, dtype, seed, convert_inputs(case, make_exact_inputs(case), dtype), count_scores(case))


def judged_dtypes(case: Case) -> list[str]:
    """Return the dtypes of a case in which variants are judged."""
    return [dtype for dtype in case.dtypes if dtype in REFERENCE_CLASSES]


def count_scores(case: Case) -> int:
    shapes = {name: np.broadcast_to(np.zeros(()), shape) for name, shape in case.input_shapes.items()}
    return score_elements(case.operation, case.options, shapes)


@dataclass(frozen=True)
class Fingerprint:
    """What tells two outcomes apart: of each stage a digest of every bit, in their order, or why there are none."""

    stages: tuple[tuple[str, bytes], ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, eq=False)
class UnitScorer:
    """Judges what subjects make of one unit; the same bits of the same rounding model are judged once.

    What is in the ``store`` is not judged again.
    """

    unit: Unit
    judge: JudgeStages
    visible: Collection[str] | None = None
    store: Store = NO_STORE
    _without: dict[Variant, Fingerprint] = field(default_factory=dict)
    _rejected: dict[tuple[str, bytes], Mapping[str, bool]] = field(default_factory=dict)

    def findings(self, subject: Subject) -> Findings | None:
        """Return what is found of a subject; None where it is as without its fault, or never holds what is asked."""
        outcome, fingerprint = self._evaluated(subject.backend)
        if _holds_nothing(subject, outcome) or self._is_as_without(subject, fingerprint):
            return None
        if isinstance(outcome, Failure):
            verdict = outcome.verdict
            return (_result("", verdict, caught=verdict != "unsupported"),)
        return self._findings.get(
            self._digest(subject, fingerprint), lambda: self._judged(subject, outcome, fingerprint)
        )

    def evidence(self, subject: Subject) -> Evidence | None:
        """Return what the unit says of a fault; None where it does not fail by its numbers."""
        judge, (outcome, fingerprint) = self.judge, self._evaluated(subject.backend)
        if not isinstance(judge, ExactJudge) or isinstance(outcome, Failure):
            return None
        unit, stages = self.unit, _seen(outcome.stages, self.visible)
        claimed = subject.classes.get(unit.dtype)
        return self._evidence.get(
            self._digest(subject, fingerprint),
            lambda: judge.evidence(unit.case, unit.dtype, unit.inputs, stages, claimed),
        )

    def keep(self) -> None:
        """Keep what was found in the store."""
        for name in ("_findings", "_evidence"):
            if name in vars(self):  # whoever asked for neither reads neither
                getattr(self, name).keep()

    @cached_property
    def _reference(self) -> ReferenceRun:
        return _recorder().run(self.unit.task)

    @cached_property
    def _reference_fingerprint(self) -> Fingerprint:
        return _fingerprint(self._reference.outcome, self.visible)

    @cached_property
    def _findings(self) -> RememberedUnit[Findings]:
        return remembered_unit(FINDINGS, self._judges_store, self.unit.case, self.unit.dtype, self.unit.inputs)

    @cached_property
    def _evidence(self) -> RememberedUnit[Evidence | None]:
        return remembered_unit(EVIDENCE, self._judges_store, self.unit.case, self.unit.dtype, self.unit.inputs)

    @property
    def _judges_store(self) -> Store:
        """The store; none for a judge of somebody's own, of whose code no key knows."""
        return self.store if isinstance(self.judge, ExactJudge) else NO_STORE

    def _evaluated(self, backend: Variant) -> tuple[Outcome, Fingerprint]:
        if _DIFFERED[backend] < _MAX_TRIALS and self._reference.has_the_bits_of(backend):
            _DIFFERED[backend] = 0
            return self._reference.outcome, self._reference_fingerprint
        outcome = evaluate_on(backend, self.unit.task)
        fingerprint = _fingerprint(outcome, self.visible)
        _DIFFERED[backend] = 0 if fingerprint == self._reference_fingerprint else _DIFFERED[backend] + 1
        return outcome, fingerprint

    def _is_as_without(self, subject: Subject, fingerprint: Fingerprint) -> bool:
        """Whether the case does not reach a fault."""
        if not isinstance(subject, Mutant):
            return False
        if subject.without is None:
            return fingerprint == self._reference_fingerprint
        if subject.without not in self._without:
            self._without[subject.without] = self._evaluated(subject.without)[1]
        return fingerprint == self._without[subject.without]

    def _judged(self, subject: Subject, outcome: Computed, fingerprint: Fingerprint) -> Findings:
        unit, stages, digests = self.unit, _seen(outcome.stages, self.visible), dict(fingerprint.stages)
        found = self.judge(unit.case, unit.dtype, unit.inputs, stages, subject.classes.get(unit.dtype))
        return tuple(
            self._stage_result(stage, found[stage], stages, digests) for stage in sorted(found, key=STAGES.index)
        )

    def _stage_result(
        self, stage: str, finding: StageFinding, stages: Stages, digests: Mapping[str, bytes]
    ) -> StageResult:
        ratio = None if finding.ratio is None else float(finding.ratio)
        rejected: Mapping[str, bool] = {}
        if finding.exact is not None:
            known = stage, digests[stage]
            if known not in self._rejected:
                self._rejected[known] = rejected_by_rules(stages[stage], finding.exact, self.unit.dtype)
            rejected = self._rejected[known]
        return _result(stage, finding.tier, own=bool(finding.own), ratio=ratio, rejected=rejected)

    def _digest(self, subject: Subject, fingerprint: Fingerprint) -> str:
        """Return what stands for returned bits and for the rounding model by which they are judged."""
        claimed = subject.classes.get(self.unit.dtype)
        model = self.judge.model_of(self.unit.dtype, claimed) if isinstance(self.judge, ExactJudge) else claimed
        return digest_of(model, [(name, digest.hex()) for name, digest in fingerprint.stages])


@lru_cache
def _recorder() -> Recorder:
    return Recorder()


def _result(
    stage: str,
    tier: str | None,
    *,
    caught: bool | None = None,
    own: bool = True,
    ratio: float | None = None,
    rejected: Mapping[str, bool] | None = None,
) -> StageResult:
    is_caught = tier is not None if caught is None else caught
    return StageResult(stage, tier, is_caught, own, ratio, *((rejected or {}).get(rule) for rule in RULES))


def _holds_nothing(subject: Subject, outcome: Outcome) -> bool:
    """Whether a variant hides the operation's result, as one that never holds it would not have it at all."""
    refused = tuple(f"{NOT_RETURNED} {stage}" for stage in subject.backend.hidden)
    return isinstance(outcome, Failure) and outcome.message.endswith(refused)


def _seen(stages: Stages, visible: Collection[str] | None) -> dict[str, NDArray[Any]]:
    return {name: array for name, array in stages.items() if visible is None or name in visible}


def _fingerprint(outcome: Outcome, visible: Collection[str] | None) -> Fingerprint:
    if isinstance(outcome, Failure):
        return Fingerprint(failure=outcome)
    return Fingerprint(tuple((name, _digest_of(array)) for name, array in _seen(outcome.stages, visible).items()))


def _digest_of(array: NDArray[Any]) -> bytes:
    digest = blake2b(f"{_name_of(array.dtype)} {array.shape}".encode(), digest_size=16)
    digest.update(array.tobytes())
    return digest.digest()


@lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name
