"""One case in one dtype, with the inputs of one seed, on faults and right variants.

A variant is the reference's code with some steps replaced. So its result can differ only if the reference calls a
function with a replaced step, and only if that function returns other bits there. The reference's calls are recorded
once for each computation. A variant's functions get the arguments of the recorded calls, which costs a fraction of the
whole; a variant that differs in any call has to compute everything.

Many implementations are judged by one truth, one after the other. Most faults change a single step, so that all stages
before it are the reference's: results that begin with the same stages, bit by bit, share the judgement of these. Stages
after one that is itself wrong are only compared with the exact answer, and not with their own step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from typing import Any, TypeAlias

import numpy as np

from attncheck.diagnosis.case_evidence import Evidence
from attncheck.diagnosis.decision import DIAGNOSABLE_VERDICTS, collect_evidence
from attncheck.diagnosis.examine import judge_and_diagnose
from attncheck.execution.worker import MISSING_STAGE, Computed, Failure, Outcome, evaluate_on_backend
from attncheck.judging.exact_stages import Stages, digest_array
from attncheck.judging.judge_stages import StageJudgement, judge_stage, select_well_formed_stages, sort_stages
from attncheck.judging.truth import Truth, find_truth
from attncheck.mutation.forms import ReadingFault
from attncheck.mutation.judgement import REFERENCE_ROUNDING_MODELS, StageResult, StageResults, judge_stage_result
from attncheck.mutation.mutant import (
    REFERENCE_NAME,
    BackendVariant,
    FunctionPerCall,
    Mutant,
    StepFunction,
    Subject,
    wrap_backend_functions,
)
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, make_inputs, make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.spec import STAGES

MAX_SCORES_FOR_ALL_FAULTS = 1 << 10
"""Elements of the score matrix up to which a case runs on every fault; larger ones run on faults caught too seldom."""
MAX_SCORES_FOR_DIAGNOSIS = 1 << 11
"""The most elements of the score matrix of a case that names faults."""


@dataclass(frozen=True, eq=False)
class SeededUnit:
    """One case in one dtype with one seed's inputs."""

    case: Case
    dtype: str
    seed: int = 0

    @cached_property
    def score_count(self) -> int:
        """The number of elements of the score matrix."""
        return count_case_scores(self.case)

    @property
    def runs_on_all_faults(self) -> bool:
        """True if the unit runs on every fault; large ones run on faults that small ones caught too seldom."""
        return self.score_count <= MAX_SCORES_FOR_ALL_FAULTS

    @property
    def gives_diagnosis_evidence(self) -> bool:
        """True if failures are evidence for a name: of small cases in 64 bits, and of some in 32."""
        is_some = self.dtype == "float32" and len(self.case.id) % 4 == 0
        return self.score_count <= MAX_SCORES_FOR_DIAGNOSIS and (self.dtype == "float64" or is_some)


def count_case_scores(case: Case) -> int:
    shapes = {name: np.broadcast_to(np.zeros(()), shape) for name, shape in case.input_shapes.items()}
    return count_scores(case.operation, case.options, shapes)


Fingerprint: TypeAlias = tuple[tuple[str, str, tuple[int, ...], bytes], ...] | Failure
"""Distinguishes two outcomes: the dtype, shape and a digest of every bit of each stage, or the failure."""


@dataclass(frozen=True, eq=False)
class UnitScorer:
    """Judges the results of subjects on one unit."""

    unit: SeededUnit
    _fingerprints_without_fault: dict[BackendVariant, Fingerprint] = field(default_factory=dict)
    _judged_stages: dict[tuple[Any, ...], tuple[StageJudgement, StageResult]] = field(default_factory=dict)
    _stage_results: dict[Any, StageResults] = field(default_factory=dict)
    _evidence: dict[Any, Evidence | None] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> RoundedInputs:
        """The inputs in the dtype."""
        return make_inputs(self.unit.case, self.unit.dtype)

    @cached_property
    def call(self) -> Problem:
        """The call that every subject gets."""
        return make_problem_of_case(self.unit.case, self.inputs).as_call()

    @cached_property
    def truth(self) -> Truth:
        """The exact answer."""
        return find_truth(make_problem_of_case(self.unit.case, self.inputs), whole=True)

    def judge_subject(self, subject: Subject) -> StageResults | None:
        """Return the judged stages of a subject.

        None if the subject gives the result that it has without its fault, or that of the reference, which is judged
        only once; and if it never has the result of the operation.
        """
        outcome, fingerprint = self._evaluate_variant(subject.backend)
        # A variant that hides the operation's result would not have it at all.
        refused = tuple(f"{MISSING_STAGE} {stage}" for stage in subject.backend.hidden_stages)
        has_none = isinstance(outcome, Failure) and outcome.message.endswith(refused)
        if has_none or self._has_no_effect(subject, fingerprint):
            return None
        if isinstance(outcome, Failure):
            return (StageResult("", None if outcome.verdict == "unsupported" else outcome.verdict),)
        known = fingerprint, self._rounding_model_of(subject)
        if known not in self._stage_results:
            results = [result for _, result in self._judge_stages(outcome.stages, *known)]
            self._stage_results[known] = tuple(sorted(results, key=lambda result: STAGES.index(result.stage)))
        return self._stage_results[known]

    def diagnosis_evidence(self, subject: Subject) -> Evidence | None:
        """Return the unit's evidence on a fault; None if the fault does not fail by its numbers."""
        outcome, fingerprint = self._evaluate_variant(subject.backend)
        known = fingerprint, self._rounding_model_of(subject)
        if not isinstance(outcome, Failure) and known not in self._evidence:
            judgements = [judgement for judgement, _ in self._judge_stages(outcome.stages, *known)]
            case = self.unit.case
            judged = judge_and_diagnose(self.truth, outcome.stages, case.stage_shapes, known[1], judgements=judgements)
            failing = [judgement.stage for judgement in judged.judgements if judgement.verdict in DIAGNOSABLE_VERDICTS]
            evidence = collect_evidence(judged.findings, failing[0], case.operation) if failing else None
            self._evidence[known] = evidence
        return self._evidence.get(known)

    def _rounding_model_of(self, subject: Subject) -> str:
        return subject.rounding_models.get(self.unit.dtype) or REFERENCE_ROUNDING_MODELS[self.unit.dtype]

    @cached_property
    def _reference_run(self) -> tuple[ReferenceRun, Fingerprint]:
        run = run_reference(self.call)
        return run, _fingerprint_outcome(run.outcome)

    def _evaluate_variant(self, backend: BackendVariant) -> tuple[Outcome, Fingerprint]:
        run, right = self._reference_run
        if run.has_same_result_as(backend):
            return run.outcome, right
        outcome = evaluate_on_backend(backend, self.call)
        return outcome, _fingerprint_outcome(outcome)

    def _has_no_effect(self, subject: Subject, fingerprint: Fingerprint) -> bool:
        """Return whether the case does not reach a fault, or the step that a right variant replaces."""
        if not isinstance(subject, Mutant) or subject.without_fault is None:
            return fingerprint == self._reference_run[1] and subject.name != REFERENCE_NAME
        if subject.without_fault not in self._fingerprints_without_fault:
            self._fingerprints_without_fault[subject.without_fault] = self._evaluate_variant(subject.without_fault)[1]
        return fingerprint == self._fingerprints_without_fault[subject.without_fault]

    def _judge_stages(
        self, stages: Stages, fingerprint: Fingerprint, rounding_model: str
    ) -> list[tuple[StageJudgement, StageResult]]:
        """Judge every stage, in the order of computation."""
        assert not isinstance(fingerprint, Failure)
        shapes, bits = self.unit.case.stage_shapes, {stage_bits[0]: stage_bits for stage_bits in fingerprint}
        truth = self.truth.for_returned_dtypes(stages)
        sound = select_well_formed_stages(truth, stages, shapes)
        past: tuple[Any, ...] = (rounding_model, truth.bounds.has_wide_statistics)
        results: list[tuple[StageJudgement, StageResult]] = []
        for stage in sort_stages(stages, truth.judged_problem.canonical.options):
            past = (*past, bits[stage])
            if past not in self._judged_stages:
                judge_step = not any(result.caught and result.begins_error for _, result in results)
                judgement = judge_stage(
                    truth, stage, stages[stage], sound, shapes, rounding_model, judge_step=judge_step
                )
                result = judge_stage_result(judgement, stages[stage], truth.exact.get(stage), self.unit.dtype)
                self._judged_stages[past] = judgement, result
            results.append(self._judged_stages[past])
        return results


def _fingerprint_outcome(outcome: Outcome) -> Fingerprint:
    if isinstance(outcome, Failure):
        return outcome
    return tuple(
        (name, _dtype_name(array.dtype), array.shape, digest_array(array)) for name, array in outcome.stages.items()
    )


@lru_cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name


@dataclass(eq=False)
class _RecordedCall:
    """One call of a function of the backend by another one, or from outside, and its result."""

    name: str
    caller: str | None
    arrays: tuple[Any, ...]
    keywords: Mapping[str, Any]
    returned: Any = None


@dataclass(frozen=True, eq=False)
class ReferenceRun:
    """The reference's result of a call, and the calls of its functions, in the order in which they begin."""

    outcome: Outcome
    calls: tuple[_RecordedCall, ...]

    def has_same_result_as(self, variant: BackendVariant) -> bool:
        """Return whether a variant provably returns the same; False if that is unknown."""
        if variant.steps is None or variant.hidden_stages or not isinstance(self.outcome, Computed):
            return False
        replaced = dict(variant.replaced_functions)
        try:
            with np.errstate(all="ignore"):
                return all(_is_call_unchanged(call, replaced) for call in self.calls)
        except BaseException:  # whatever a step raises has to be seen where it is raised
            return False


def _is_call_unchanged(call: _RecordedCall, replaced: dict[tuple[str | None, str], StepFunction]) -> bool:
    """Return whether the function that a variant calls instead of the reference's returns the same.

    A function whose steps are made for each call is the same if all that it calls is; these are added to ``replaced``.
    """
    function = replaced.get((call.caller, call.name)) or replaced.get((None, call.name))
    if isinstance(function, FunctionPerCall):
        steps = function.replacements_in_call(call.arrays, call.keywords)
        replaced |= {(call.name, name): step for name, step in steps.items()}
        return all(map(callable, steps.values()))  # and none is a library
    if function is None or (
        isinstance(function, ReadingFault) and function.apply_reading(*call.arrays, **call.keywords) is None
    ):
        return True
    if call.caller is None:
        return False  # to compare what it returns is to compute everything
    return bool(_bitwise_key(function(*call.arrays, **call.keywords)) == _bitwise_key(call.returned))


_RECORDED_CALLS: list[_RecordedCall] = []
_RUNNING_FUNCTIONS: list[str] = []


def _record_calls(name: str, function: StepFunction) -> StepFunction:
    @wraps(function)
    def run_and_record(*arrays: Any, **keywords: Any) -> Any:
        call = _RecordedCall(name, _RUNNING_FUNCTIONS[-1] if _RUNNING_FUNCTIONS else None, arrays, keywords)
        _RECORDED_CALLS.append(call)
        _RUNNING_FUNCTIONS.append(name)
        try:
            call.returned = _make_read_only(function(*arrays, **keywords))
        finally:
            _RUNNING_FUNCTIONS.pop()
        return call.returned

    return run_and_record


def _make_read_only(returned: Any) -> Any:
    """Protect a result from changes: callers add stages to the dictionary, and a step may write in place."""
    for array in returned.values() if isinstance(returned, dict) else (returned,):
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return dict(returned) if isinstance(returned, dict) else returned


def run_reference(call: Problem) -> ReferenceRun:
    """Evaluate a call, and record the reference's calls."""
    _RECORDED_CALLS.clear()
    outcome = evaluate_on_backend(_recording_variant(), call)
    return ReferenceRun(outcome, tuple(_RECORDED_CALLS))


@lru_cache
def _recording_variant() -> BackendVariant:
    backend = BackendVariant()
    for name, function in wrap_backend_functions(_record_calls).items():
        if not name.startswith("_"):
            setattr(backend, name, function)
    return backend


def _bitwise_key(value: Any) -> Any:
    """Return everything that distinguishes a value for code: its type, its bits, and the memory layout of arrays."""
    match value:
        case np.ndarray() | np.generic():
            return type(value), value.dtype, value.shape, value.strides, value.tobytes()
        case dict():
            return [(name, _bitwise_key(item)) for name, item in value.items()]
        case tuple() | list():
            return type(value), *map(_bitwise_key, value)
        case bool() | int() | float() | str():
            return type(value), repr(value)
    return value
