"""One case on one implementation, computed again and judged stage by stage: the story of ``attncheck explain``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from attncheck.config import expected_failures_of
from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.execution.runner import Group, GroupRunner, task_of
from attncheck.execution.worker import Computed, Outcome, Task
from attncheck.judging.judge_implementation import JudgedStages, judge_and_diagnose, with_padding_faults
from attncheck.judging.judge_stages import StageJudgement, sound_stages
from attncheck.judging.truth import Conditioning, Truth, conditioning_of, truth_of_case
from attncheck.judging.units import own_empty_rows
from attncheck.judging.xfail import beyond_expected, largest_ratio, reason_for
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.verdicts import Verdict

_Evaluation = tuple[str, str, str]
"""An implementation, a case and a dtype."""
NUMBERS = ("element_stage", "element", "computed", "exact", "error", "bound", "ratio", "against", "diagnosis")
"""What is recorded of the element where a failure is worst."""


@dataclass(frozen=True)
class Explanation:
    """What one implementation did with one case in one dtype.

    ``failure`` says why there are no stages; ``outside`` why there is no exact answer to hold them against.
    ``expected_failures`` tells, by stage, why what is wrong there was expected.
    """

    case: Case
    dtype: str
    implementation: str
    rounding_model: str
    judgements: tuple[StageJudgement, ...]
    begins_at: str
    failure: str = ""
    outside: str = ""
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    """What the implementation would need to support the case, where that is why there are no stages."""
    padded: str = ""
    """What the call was padded with, as the implementation requires; empty where it was made as the case has it."""
    conditioning: Mapping[str, Conditioning] = field(default_factory=dict)
    """By stage, how large the error bounds are beside the numbers."""
    diagnosis: str | None = None
    """The convention or mistake that gives these numbers, where that is known: a name of docs/diagnoses.md."""

    @property
    def fails(self) -> bool:
        """Whether anything is wrong; what is unsupported is not."""
        of_stages = any(judgement.verdict.exit_code for judgement in self.judgements)
        return of_stages or bool(self.failure and not self.failure.startswith(Verdict.UNSUPPORTED))

    @property
    def failing_stages(self) -> list[str]:
        """The stages that fail; one without a name where there are none to judge."""
        failing = [item.stage for item in self.judgements if item.verdict.exit_code]
        return failing or ([""] if self.fails else [])

    @property
    def first_failing(self) -> StageJudgement | None:
        """The judgement of the stage where it goes wrong, or of the first that fails; None where none does.

        What an implementation does not return is known from what it does to later stages.
        """
        failing = [each for each in self.judgements if each.verdict.exit_code]
        return next((each for each in failing if each.stage == self.begins_at), failing[0] if failing else None)

    @property
    def numbers(self) -> Mapping[str, Any]:
        """What ``NUMBERS`` names, of the element where it is worst; None for what there is not."""
        found = self.first_failing
        if found is None:
            return dict.fromkeys(NUMBERS)
        measured = found.introduced if found.against == "step" else found.accumulated
        return {
            "element_stage": None if found.index is None else found.stage,
            "element": None if found.index is None else list(found.index),
            "computed": found.value,
            "exact": found.exact,
            "error": found.error,
            "bound": found.bound,
            "ratio": None if measured is None else measured.ratio,
            "against": found.against,
            "diagnosis": self.diagnosis,
        }


def find_implementation(name: str, framework: str | None = None, signature: str | None = None) -> Implementation:
    """Return an implementation by its name, its backend's, or as file.py:function. Raises ``UsageError``."""
    chosen: ImplementationSelection = select_implementations(None, [name], framework, signature=signature)
    if chosen.missing:
        raise UsageError(f"{chosen.missing[0]} is not installed")
    return chosen.implementations[0]


def explain_case(
    case: Case,
    implementation: Implementation,
    dtype: str,
    limits: Limits,
    runner: GroupRunner[str] | None = None,
    expected_failures: Sequence[ExpectedFailure] | None = None,
) -> Explanation:
    """Compute a case in a worker, ``runner``'s if there is one, and judge every stage.

    ``expected_failures`` of the implementation; None is what is bundled, and what the project names.
    """
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    rounding_model = implementation.rounding_model(dtype)
    if rounding_model is None:
        absent = f"unsupported: declares no {dtype}"
        return Explanation(case, dtype, implementation.name, "none", (), "", absent, lacks=(dtype,))
    if expected_failures is None:
        expected_failures = expected_failures_of([implementation.entry.name])
    evaluation = (implementation.name, case.id, dtype)
    task = task_of(case, inputs)
    outcome = runner.evaluate(task) if runner else _compute(implementation, dtype, limits, task)
    if not isinstance(outcome, Computed):
        failure = f"{outcome.verdict}: {outcome.message}"
        found = reason_for(expected_failures, *evaluation, "", outcome.verdict)
        reasons = {} if found is None else {"": found.entry.reason}
        whose = (case, dtype, implementation.name, rounding_model)
        return Explanation(
            *whose, (), "", failure, expected_failures=reasons, lacks=outcome.lacks, padded=outcome.padded
        )
    truth = truth_of_case(case, dtype, inputs, outcome.stages)
    own = own_empty_rows(implementation, expected_failures, case.id, dtype)
    own = replace(own, is_asked=not outcome.not_asked)
    judged = judge_and_diagnose(truth, outcome.stages, case.stage_shapes, rounding_model, own)
    judged = with_padding_faults(judged, outcome.padding_faults)
    measured = {each.stage for each in judged.judgements if each.accumulated is not None}
    sound = sound_stages(truth.for_returned(outcome.stages), outcome.stages, case.stage_shapes)
    conditions = _conditioning(
        truth.for_returned(outcome.stages),
        {name: array for name, array in sound.items() if name in measured},
        rounding_model,
    )
    return Explanation(
        case,
        dtype,
        implementation.name,
        rounding_model,
        tuple(_with_limit(expected_failures, each, evaluation) for each in judged.judgements),
        judged.begins_at,
        outside=truth.outside,
        expected_failures=_expected_stages(expected_failures, judged, evaluation),
        padded=outcome.padded,
        conditioning=conditions,
        diagnosis=judged.diagnosis.name if judged.diagnosis is not None else None,
    )


def _conditioning(truth: Truth, stages: Mapping[str, NDArray[Any]], rounding_model: str) -> dict[str, Conditioning]:
    """Return by stage how large the bounds are beside the numbers, of the query rows that were judged."""
    found = {name: conditioning_of(truth, name, array, rounding_model) for name, array in stages.items()}
    return {name: each for name, each in found.items() if each is not None}


def _expected_stages(
    expected_failures: Sequence[ExpectedFailure], judged: JudgedStages, evaluation: _Evaluation
) -> dict[str, str]:
    """Return the reasons of the failures that are expected, by stage."""
    reasons = {
        each.stage: reason_for(
            expected_failures, *evaluation, each.stage, each.verdict, ratio=_ratio(each), empty_rows=each.empty_rows
        )
        for each in judged.judgements
        if each.verdict.exit_code
    }
    excused = dict.fromkeys(sorted(judged.excused), judged.reason)
    return {stage: found.entry.reason for stage, found in reasons.items() if found is not None} | excused


def _with_limit(
    expected_failures: Sequence[ExpectedFailure], judgement: StageJudgement, evaluation: _Evaluation
) -> StageJudgement:
    """Say of a stage where a failure is expected that its error is larger than the entry allows."""
    beyond = beyond_expected(
        expected_failures, *evaluation, judgement.stage, judgement.verdict, ratio=_ratio(judgement)
    )
    return replace(judgement, message=f"{judgement.message}; {beyond}") if beyond else judgement


def _ratio(judgement: StageJudgement) -> float:
    return largest_ratio(*(each.ratio for each in (judgement.accumulated, judgement.introduced) if each is not None))


def _compute(implementation: Implementation, dtype: str, limits: Limits, task: Task) -> Outcome:
    with tempfile.TemporaryDirectory() as logs:
        runner: GroupRunner[str] = GroupRunner(Group(implementation, (dtype,)), limits, Path(logs))
        try:
            return runner.evaluate(task)
        finally:
            runner.close()
