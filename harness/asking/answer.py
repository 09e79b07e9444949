"""Answers: what an implementation gave to a question, judged.

A question has one answer, whoever asks it. The exact answer is the one under the conventions that the implementation
declares, stages are judged by its rounding model, and expected failures are marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from attncheck.asking.question import Question
from attncheck.common.store import NO_STORE, Store
from attncheck.diagnosis.declared import truth_for
from attncheck.diagnosis.examine import DiagnosedStages, examine
from attncheck.execution.implementations import Implementation
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.judge_stages import StageJudgement, sound_stages
from attncheck.judging.stage_bounds import Conditioning, conditioning_of
from attncheck.judging.truth import Truth
from attncheck.judging.units import own_empty_rows
from attncheck.judging.xfail import (
    ExpectedFailureRecord,
    OwnEmptyRows,
    beyond_expected,
    blank_row,
    failure_row,
    largest_ratio,
)
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.results.format import Row
from attncheck.spec.verdicts import Verdict


@dataclass(frozen=True)
class Repetition:
    """The outcome of repeating a failure that does not show in a fresh process.

    Attributes:
        found: What the check found.
        before: How many calls came before it there.
        needed: The calls after which it happens again; None where it did not happen again.
        are_fewest: Whether each of them is needed.
        remark: What may have changed since the check.
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
        rows: The rows that a check writes of it: one per stage, or one for a call that failed.
        judgements: The judgement of every stage that came back.
        begins_at: The stage where it goes wrong; empty if it does not.
        failed: The failure of a call that gave no stages.
        outside: Why there is no exact answer; empty if there is one.
        padded: The padding of the call, as the implementation requires it; empty if there is none.
        conditioning: How large the error bounds are beside the numbers, by stage.
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
        """The case that was asked."""
        return self.question.case

    @property
    def dtype(self) -> str:
        """The dtype of the call."""
        return self.question.dtype

    @property
    def failure(self) -> str:
        """The reason why there are no stages; empty if there are."""
        return f"{self.failed.verdict}: {self.failed.message}" if self.failed else ""

    @property
    def lacks(self) -> tuple[str, ...]:
        """The features that the implementation needs to support the call, if that is why there are no stages."""
        return self.failed.lacks if self.failed else ()

    @property
    def is_unsupported(self) -> bool:
        """True if the implementation does not support the call."""
        return self.failed is not None and self.failed.verdict == Verdict.UNSUPPORTED

    @property
    def expected_failures(self) -> Mapping[str, str]:
        """The reasons why what is wrong was expected, by stage; a call that gave no stages has the stage ''."""
        return {row.stage: row.reason or "" for row in self.rows if row.xfail}

    @property
    def before(self) -> tuple[Question, ...]:
        """The calls that have to come first for the failure to happen."""
        return (self.repeated.needed or ()) if self.repeated else ()

    @property
    def fails(self) -> bool:
        """True if anything is wrong, expected or not; what is unsupported is not."""
        return any(each.verdict.exit_code for each in self.judgements) or bool(self.failed and not self.is_unsupported)

    @property
    def agrees(self) -> bool:
        """True if a stage was judged, and nothing is wrong but what is expected or declared, as ``check`` has it."""
        expected = self.expected_failures
        is_judged = any(each.verdict == Verdict.AGREE or each.stage in expected for each in self.judgements)
        return is_judged and all(stage in expected for stage in self.failing_stages)

    @property
    def failing_stages(self) -> list[str]:
        """The stages that fail; one without a name where there are none to judge."""
        failing = [item.stage for item in self.judgements if item.verdict.exit_code]
        return failing or ([""] if self.fails else [])

    def for_question(self, question: Question) -> Answer:
        """Return the answer as that to another question about the same problem."""
        return replace(self, question=question, rows=tuple(replace(row, case=question.case.id) for row in self.rows))

    @property
    def first_failing(self) -> StageJudgement | None:
        """The judgement of the stage where it goes wrong, or of the first that fails; None where none does.

        What an implementation does not return is known from what it does to later stages.
        """
        failing = [each for each in self.judgements if each.verdict.exit_code]
        return next((each for each in failing if each.stage == self.begins_at), failing[0] if failing else None)


def judge_outcome(
    question: Question,
    implementation: Implementation,
    outcome: Outcome,
    expected_failures: Sequence[ExpectedFailure],
    store: Store = NO_STORE,
) -> Answer:
    """Judge every stage that an implementation gave to a question, in this process.

    Args:
        question: What was asked.
        implementation: Who was asked.
        outcome: What came back.
        expected_failures: The expected failures of the implementation.
        store: Where exact answers are kept.
    """
    case, dtype = question.case, question.dtype
    rounding_model = implementation.rounding_model(dtype) or "none"
    blank = replace(blank_row(case, dtype), implementation=implementation.name)
    whose = question, implementation.name, rounding_model
    evaluation = implementation.name, case.id, dtype
    marks = ExpectedFailureRecord(expected_failures)
    if isinstance(outcome, Failure):
        rows = marks.mark([failure_row(blank, implementation.name, outcome)])
        return Answer(*whose, rows, failed=outcome, padded=outcome.padded)
    assert isinstance(outcome, Computed), "an outcome is one or the other"
    truth = truth_for(implementation, case, question.inputs, outcome.stages, store)
    known = known_conventions(implementation, outcome, expected_failures, question)
    examined = examine(blank, case, truth, outcome, rounding_model, known)
    judged = examined.judged
    return Answer(
        *whose,
        marks.mark(examined.rows),
        tuple(_with_limit(expected_failures, each, evaluation) for each in judged.judgements),
        judged.begins_at,
        outside=truth.outside,
        padded=outcome.padded,
        conditioning=_conditioning(truth, judged, outcome, case, rounding_model),
        diagnosis=judged.diagnosis_name,
    )


def known_conventions(
    implementation: Implementation, outcome: Computed, expected_failures: Sequence[ExpectedFailure], question: Question
) -> OwnEmptyRows:
    """Return what an implementation is known to return for a query that may attend to no key."""
    known = own_empty_rows(implementation, expected_failures, *question.key)
    return replace(known, is_asked=not outcome.not_asked)


def _conditioning(
    truth: Truth, judged: DiagnosedStages, outcome: Computed, case: Case, rounding_model: str
) -> dict[str, Conditioning]:
    """Return how large the error bounds are beside the numbers of the stages that were measured."""
    measured = {each.stage for each in judged.judgements if each.accumulated is not None}
    returned = truth.for_returned(outcome.stages)
    sound = sound_stages(returned, outcome.stages, case.stage_shapes)
    return {
        name: large
        for name, array in sound.items()
        if name in measured and (large := conditioning_of(returned.reference(name, rounding_model, array))) is not None
    }


def _with_limit(
    expected_failures: Sequence[ExpectedFailure], judgement: StageJudgement, evaluation: tuple[str, str, str]
) -> StageJudgement:
    """Describe an error that is larger than the entry of its expected failure allows."""
    ratio = largest_ratio(*(each.ratio for each in (judgement.accumulated, judgement.introduced) if each is not None))
    beyond = beyond_expected(expected_failures, *evaluation, judgement.stage, judgement.verdict, ratio=ratio)
    return replace(judgement, message=f"{judgement.message}; {beyond}") if beyond else judgement
