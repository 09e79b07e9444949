"""One case in one dtype, with the inputs of one seed, put to faults and right variants.

A variant is the reference's own code with some steps replaced. So it differs only where the reference calls a function
that holds a replaced step, and only if what that function returns is not the same there, bit by bit. The reference's
calls are recorded once for each computation. A variant's functions are handed what the reference's were handed, which
costs a fraction of the whole; whoever differs anywhere has to compute all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.operations import Task
from attncheck.execution.runner import task_of
from attncheck.execution.worker import NOT_RETURNED, Computed, Failure, Outcome, evaluate_on
from attncheck.judging.diagnosis import Evidence
from attncheck.judging.truth import Stages
from attncheck.mutation.forms import ReadAs
from attncheck.mutation.judgement import (
    MAX_SCORES,
    REFERENCE_CLASSES,
    RULES,
    ExactJudge,
    Findings,
    JudgeStages,
    StageFinding,
    StageResult,
    rejected_by_rules,
)
from attncheck.mutation.mutant import REFERENCE, Mutant, PerCall, Step, Subject, Variant, is_function, recording
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.shapes import score_elements
from attncheck.spec import STAGES

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
    elements: int

    @cached_property
    def inputs(self) -> Inputs:
        """The inputs in the dtype, made when somebody is asked."""
        return convert_inputs(self.case, make_exact_inputs(self.case), self.dtype)

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
        is_some = self.dtype == "float32" and len(self.case.id) % 4 == 0
        return self.elements <= MAX_SCORES and (self.dtype == "float64" or is_some)


def unit_of(case: Case, seed: int, dtype: str, elements: int | None = None) -> Unit:
    """Return a case in one dtype, with the inputs of a seed."""
    counted = count_scores(case) if elements is None else elements
    return Unit(case, dtype, seed, counted)


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
    """Judges what subjects make of one unit; the same bits of the same rounding model are judged once."""

    unit: Unit
    judge: JudgeStages
    visible: Collection[str] | None = None
    _without: dict[Variant, Fingerprint] = field(default_factory=dict)
    _rejected: dict[tuple[str, bytes], Mapping[str, bool]] = field(default_factory=dict)
    _findings: dict[Any, Findings] = field(default_factory=dict)
    _evidence: dict[Any, Evidence | None] = field(default_factory=dict)

    def findings(self, subject: Subject) -> Findings | None:
        """Return what is found of a subject.

        None where it is as without its fault, or as the reference, which alone is judged for it; and where it never
        holds what is asked.
        """
        outcome, fingerprint = self._evaluated(subject.backend)
        if _holds_nothing(subject, outcome) or self._is_as_without(subject, fingerprint):
            return None
        if isinstance(outcome, Failure):
            verdict = outcome.verdict
            return (_result("", verdict, caught=verdict != "unsupported"),)
        known = fingerprint, subject.classes.get(self.unit.dtype)
        if known not in self._findings:
            self._findings[known] = self._judged(subject, outcome, fingerprint)
        return self._findings[known]

    def evidence(self, subject: Subject) -> Evidence | None:
        """Return what the unit says of a fault; None where it does not fail by its numbers."""
        judge, (outcome, fingerprint) = self.judge, self._evaluated(subject.backend)
        if not isinstance(judge, ExactJudge) or isinstance(outcome, Failure):
            return None
        unit, claimed = self.unit, subject.classes.get(self.unit.dtype)
        if (fingerprint, claimed) not in self._evidence:
            stages = _seen(outcome.stages, self.visible)
            self._evidence[fingerprint, claimed] = judge.evidence(unit.case, unit.dtype, unit.inputs, stages, claimed)
        return self._evidence[fingerprint, claimed]

    @cached_property
    def _reference(self) -> ReferenceRun:
        return _recorder().run(self.unit.task)

    @cached_property
    def _reference_fingerprint(self) -> Fingerprint:
        return _fingerprint(self._reference.outcome, self.visible)

    def _evaluated(self, backend: Variant) -> tuple[Outcome, Fingerprint]:
        if _DIFFERED[backend] < _MAX_TRIALS and self._reference.has_the_bits_of(backend):
            _DIFFERED[backend] = 0
            return self._reference.outcome, self._reference_fingerprint
        outcome = evaluate_on(backend, self.unit.task)
        fingerprint = _fingerprint(outcome, self.visible)
        _DIFFERED[backend] = 0 if fingerprint == self._reference_fingerprint else _DIFFERED[backend] + 1
        return outcome, fingerprint

    def _is_as_without(self, subject: Subject, fingerprint: Fingerprint) -> bool:
        """Whether the case does not reach a fault, or what a right variant does in another way."""
        if not isinstance(subject, Mutant) or subject.without is None:
            return fingerprint == self._reference_fingerprint and subject.name != REFERENCE
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


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a function of the backend by another one, or from outside, and what it returned."""

    name: str
    caller: str | None
    arrays: tuple[Any, ...]
    given: Mapping[str, Any]
    returned: Any


@dataclass(frozen=True, eq=False)
class ReferenceRun:
    """What the reference makes of a task, with the functions that it calls, in the order in which the calls begin."""

    outcome: Outcome
    calls: tuple[_Call, ...]

    def has_the_bits_of(self, variant: Variant) -> bool:
        """Whether a variant provably returns the same; where it may or may not, False."""
        if variant.steps is None or variant.hidden or not isinstance(self.outcome, Computed):
            return False
        try:
            with np.errstate(all="ignore"):
                return self._gives_the_same(variant, _replaced_by(variant))
        except BaseException:  # whatever a step raises has to be seen where it is raised
            return False

    def _gives_the_same(self, variant: Variant, replaced: _Replaced) -> bool:
        """Whether the steps of a variant return what the reference's do, call by call."""
        made: dict[tuple[str | None, str], Step] = {}
        for call in self.calls:
            if call.name in replaced.per_call:
                steps = variant.steps_of_call(call.name, call.arrays, call.given)
                if not all(map(is_function, steps)):
                    return False
                made |= {(call.name, name): step for name, step in steps.items()}
                continue  # the same function, if all that it calls returns the same
            function = made.get((call.caller, call.name)) or replaced.function_for(call)
            if function is None:
                continue
            if isinstance(function, ReadAs) and function.read(*call.arrays, **call.given) is None:
                continue
            if call.caller is None:
                return False  # to compare what it returns is to compute everything
            if not _is_same(function(*call.arrays, **call.given), call.returned):
                return False
        return True


@dataclass(frozen=True, eq=False)
class _Replaced:
    """The functions of a variant that hold replaced steps: by name, and those that one function alone calls.

    The steps of those ``per_call`` are made for each call.
    """

    everywhere: Mapping[str, Step]
    within: Mapping[tuple[str | None, str], Step]
    per_call: frozenset[str]

    def function_for(self, call: _Call) -> Step | None:
        """Return what the variant calls in the place of a call of the reference; None where that is the same."""
        return self.within.get((call.caller, call.name)) or self.everywhere.get(call.name)


@lru_cache(maxsize=4096)
def _replaced_by(variant: Variant) -> _Replaced:
    everywhere: dict[str, Step] = {}
    within: dict[tuple[str | None, str], Step] = {}
    per_call = set()
    for key, step in (variant.steps or {}).items():
        function, _, name = key.rpartition(".")
        if isinstance(step, PerCall):
            per_call.add(name)
        elif function and is_function(name):
            within[function, name] = step
        else:  # of what is no function of the backend, such as its library, the whole function is compared
            everywhere[function or name] = variant.function(function or name)
    return _Replaced(everywhere, within, frozenset(per_call - everywhere.keys()))


class Recorder:
    """The reference, which takes note of its calls; one for all tasks."""

    def __init__(self) -> None:
        self._calls: list[_Call | None] = []
        self._running: list[str] = []
        self._backend = Variant()
        for name, function in recording(self._recorded).items():
            if not name.startswith("_"):
                setattr(self._backend, name, function)

    def run(self, task: Task) -> ReferenceRun:
        """Evaluate a task."""
        self._calls.clear()
        outcome = evaluate_on(self._backend, task)
        calls = tuple(call for call in self._calls if call is not None)
        return ReferenceRun(outcome, calls)

    def _recorded(self, name: str, function: Step) -> Step:
        @wraps(function)
        def run(*arrays: Any, **given: Any) -> Any:
            caller, position = self._running[-1] if self._running else None, len(self._calls)
            self._calls.append(None)
            self._running.append(name)
            try:
                returned = function(*arrays, **given)
            finally:
                self._running.pop()
            self._calls[position] = _Call(name, caller, arrays, given, _kept(returned))
            return returned

        return run


def _kept(returned: Any) -> Any:
    """Keep what was returned from changes: stages are added to what others returned, and a step may write in place."""
    for array in returned.values() if isinstance(returned, dict) else (returned,):
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return dict(returned) if isinstance(returned, dict) else returned


def _is_same(one: Any, other: Any) -> bool:
    """Whether no code can tell two values apart: type, bits, and how arrays lie in memory."""
    if type(one) is not type(other):
        return False
    match one:
        case np.ndarray() | np.generic():
            is_alike = one.dtype == other.dtype and one.shape == other.shape and one.strides == other.strides
            return bool(is_alike and one.tobytes() == other.tobytes())
        case dict():
            return list(one) == list(other) and all(_is_same(each, other[name]) for name, each in one.items())
        case tuple() | list():
            return len(one) == len(other) and all(map(_is_same, one, other))
        case bool() | int() | float() | str():
            return bool(repr(one) == repr(other))
    return one is other
