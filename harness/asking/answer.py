"""Answers: the judged results of questions to implementations.

Every command gets the same answer to a question. The exact answer is the one under the conventions that the
implementation declares, stages are judged by its rounding model, and expected failures are marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from attncheck.asking.question import Question
from attncheck.common.store import NO_STORE, Store
from attncheck.diagnosis.declared import truth_for_implementation
from attncheck.diagnosis.examine import DiagnosedStages, judge_and_diagnose_outcome
from attncheck.execution.implementations import Implementation
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.judge_stages import StageJudgement, select_well_formed_stages
from attncheck.judging.stage_bounds import Conditioning, measure_conditioning
from attncheck.judging.truth import Truth
from attncheck.judging.units import find_known_empty_rows
from attncheck.judging.xfail import (
    ExpectedFailureRecord,
    KnownEmptyRows,
    describe_exceeded_ratio,
    largest_ratio,
    make_blank_row,
    make_failure_row,
)
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.results.format import Row
from attncheck.spec.verdicts import Verdict


@dataclass(frozen=True)
class Repetition:
    """The outcome of repeating a failure that does not show in a fresh process.

    Attributes:
        found: The failure that the check reported, in words.
        before: The number of calls before it in the check.
        needed: The calls after which it happens again; None if it did not happen again.
        are_fewest: True if each of them is needed.
        remark: A change since the check that may explain a different result; empty if there is none.
    """

    found: str
    before: int
    needed: tuple[Question, ...] | None = None
    are_fewest: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Answer:
    """The judged result of a question to one implementation.

    Attributes:
        question: The question.
        implementation: The name of the implementation.
        rounding_model: The rounding model by which it is judged; ``none`` if it does not have the dtype.
        rows: The rows that a check would write: one per stage, or one for a call that failed.
        judgements: The judgement of every stage that the implementation returned.
        begins_at: The first stage that is itself at fault; empty if none is.
        failed: The failure of a call that returned no stages; None if it returned some.
        outside: The reason why there is no exact answer; empty if there is one.
        padded: The padding of the call, as the implementation requires it; empty if there is none.
        conditioning: The condition numbers of the measured stages, which compare error bounds with values.
        diagnosis: The convention or mistake that gives these numbers, if it is known: a name of docs/diagnoses.md.
        repeated: The outcome of repeating a failure that a fresh process does not show.
    """

    question: Question
    implementation: str
    rounding_model: str
    rows: tuple[Row, ...]
    judgements: tuple[StageJudgement, ...] = ()
    begins_at: str = ""
    failed: Failure | None = None
    outside: str = ""
    padded: str = ""
    conditioning: Mapping[str, Conditioning] = field(default_factory=dict)
    diagnosis: str | None = None
    repeated: Repetition | None = None

    @property
    def case(self) -> Case:
        """The case of the question."""
        return self.question.case

    @property
    def dtype(self) -> str:
        """The dtype of the call."""
        return self.question.dtype

    @property
    def failure(self) -> str:
        """``failed`` as a text: the verdict and the message; empty if the call returned stages."""
        return f"{self.failed.verdict}: {self.failed.message}" if self.failed else ""

    @property
    def lacks(self) -> tuple[str, ...]:
        """The features that an unsupported call needs; empty for other calls."""
        return self.failed.lacks if self.failed else ()

    @property
    def is_unsupported(self) -> bool:
        """True if the implementation does not support the call."""
        return self.failed is not None and self.failed.verdict == Verdict.UNSUPPORTED

    @property
    def expected_failures(self) -> Mapping[str, str]:
        """The reasons of expected failures, by stage; a call that returned no stages has the stage ''."""
        return {row.stage: row.reason or "" for row in self.rows if row.xfail}

    @property
    def before(self) -> tuple[Question, ...]:
        """The calls that have to come before this one for the failure to happen; see ``repeated``."""
        return (self.repeated.needed or ()) if self.repeated else ()

    @property
    def fails(self) -> bool:
        """True if a stage or the whole call fails, expected or not; an unsupported call does not fail."""
        is_wrong = any(judgement.verdict.exit_code for judgement in self.judgements)
        return is_wrong or bool(self.failed and not self.is_unsupported)

    @property
    def agrees(self) -> bool:
        """True if a stage was judged, and all failures are expected or declared, as in ``check``."""
        expected = self.expected_failures
        is_judged = any(judged.verdict == Verdict.AGREE or judged.stage in expected for judged in self.judgements)
        return is_judged and all(stage in expected for stage in self.failing_stages)

    @property
    def failing_stages(self) -> list[str]:
        """The stages that fail; the stage '' if the call failed without stages."""
        failing = [item.stage for item in self.judgements if item.verdict.exit_code]
        return failing or ([""] if self.fails else [])

    def for_question(self, question: Question) -> Answer:
        """Return a copy of the answer for another question that computes the same problem."""
        return replace(self, question=question, rows=tuple(replace(row, case=question.case.id) for row in self.rows))

    @property
    def first_failing(self) -> StageJudgement | None:
        """The judgement of the stage ``begins_at``, or of the first that fails; None if none fails.

        A fault in a stage that the implementation does not return shows in the later stages.
        """
        failing = [judgement for judgement in self.judgements if judgement.verdict.exit_code]
        first = failing[0] if failing else None
        return next((judgement for judgement in failing if judgement.stage == self.begins_at), first)


def judge_outcome(
    question: Question,
    implementation: Implementation,
    outcome: Outcome,
    expected_failures: Sequence[ExpectedFailure],
    store: Store = NO_STORE,
    *,
    measure_conditions: bool = True,
) -> Answer:
    """Judge every stage that an implementation returned for a question, in this process.

    Args:
        question: The question.
        implementation: The implementation.
        outcome: The result of the call.
        expected_failures: The expected failures of the implementation.
        store: The store of exact answers.
        measure_conditions: Whether condition numbers are measured; only explanations show them.
    """
    case, dtype = question.case, question.dtype
    rounding_model = implementation.rounding_model(dtype) or "none"
    blank = replace(make_blank_row(case, dtype), implementation=implementation.name)
    asked = question, implementation.name, rounding_model
    evaluation = implementation.name, case.id, dtype
    marks = ExpectedFailureRecord(expected_failures)
    if isinstance(outcome, Failure):
        rows = marks.mark_expected_rows([make_failure_row(blank, implementation.name, outcome)])
        return Answer(*asked, rows, failed=outcome, padded=outcome.padded)
    assert isinstance(outcome, Computed), "an outcome is one or the other"
    truth = truth_for_implementation(implementation, case, question.inputs, outcome.stages, store)
    known = known_conventions_of_empty_rows(implementation, outcome, expected_failures, question)
    examined = judge_and_diagnose_outcome(blank, case, truth, outcome, rounding_model, known)
    judged = examined.diagnosed_stages
    return Answer(
        *asked,
        marks.mark_expected_rows(examined.rows),
        tuple(_note_excess_error(expected_failures, judgement, evaluation) for judgement in judged.judgements),
        judged.begins_at,
        outside=truth.no_answer_reason,
        padded=outcome.padded,
        conditioning=(
            _conditioning_by_stage(truth, judged, outcome, case, rounding_model) if measure_conditions else {}
        ),
        diagnosis=judged.diagnosis_name,
    )


def known_conventions_of_empty_rows(
    implementation: Implementation, outcome: Computed, expected_failures: Sequence[ExpectedFailure], question: Question
) -> KnownEmptyRows:
    """Return the known results of an implementation for a query without a key."""
    known = find_known_empty_rows(implementation, expected_failures, *question.key)
    return replace(known, accepts_convention_option=not outcome.ignored_conventions)


def _conditioning_by_stage(
    truth: Truth, judged: DiagnosedStages, outcome: Computed, case: Case, rounding_model: str
) -> dict[str, Conditioning]:
    """Return the condition numbers of the stages that were measured."""
    measured = {judgement.stage for judgement in judged.judgements if judgement.accumulated is not None}
    returned = truth.for_returned_dtypes(outcome.stages)
    sound = select_well_formed_stages(returned, outcome.stages, case.stage_shapes)
    return {
        name: large
        for name, array in sound.items()
        if name in measured
        and (large := measure_conditioning(returned.stage_reference(name, rounding_model, array))) is not None
    }


def _note_excess_error(
    expected_failures: Sequence[ExpectedFailure], judgement: StageJudgement, evaluation: tuple[str, str, str]
) -> StageJudgement:
    """Add to the message if an error is larger than its expected failure allows."""
    measured = (judgement.accumulated, judgement.introduced)
    ratio = largest_ratio(*(errors.ratio for errors in measured if errors is not None))
    beyond = describe_exceeded_ratio(expected_failures, *evaluation, judgement.stage, judgement.verdict, ratio=ratio)
    return replace(judgement, message=f"{judgement.message}; {beyond}") if beyond else judgement
