"""The documents of commands about one case, made of what those commands found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from attncheck.errors import ExitCode
from attncheck.explain import Explanation
from attncheck.judging.conditioning import Conditioning
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.tiers import Measured
from attncheck.reading.case import Case
from attncheck.reading.record import case_record
from attncheck.repeating import Repeated, RepeatedExplanation
from attncheck.reports.machine.case_documents import (
    ArrayRecord,
    CallRecord,
    CaseDocument,
    CaseRecord,
    ConditionRecord,
    Errors,
    ExplanationDocument,
    NumberRecord,
    RepeatedRecord,
    StageRecord,
)
from attncheck.reports.machine.failures import failure_of, verdict_of
from attncheck.reports.machine.text import header
from attncheck.reports.show import Shown, outcome_of
from attncheck.results.format import Row
from attncheck.verdicts import Verdict

MAX_ELEMENTS = 4096
"""Of an array whose numbers are printed."""


def of_case(case: Case) -> CaseRecord:
    """Return a case's names, shapes and options."""
    record = case_record(case, {})
    names = ("id", "name", "file", "line", "operation", "tags", "inputs", "options", "dtypes")
    return CaseRecord(**{name: record[name] for name in names})


def explanation_document(
    explained: RepeatedExplanation, code: ExitCode, commands: Sequence[str]
) -> ExplanationDocument:
    """Return a case on one implementation, stage by stage; ``commands`` say more of its failure."""
    explanation = explained.explanation
    failure = failure_of(explanation, commands)
    return ExplanationDocument(
        attncheck=header("explain"),
        exit_code=int(code),
        answer=answer_of(explanation),
        failures=[] if failure is None else [failure],
        next=[] if failure is None else list(commands),
        notes=[],
        implementation=explanation.implementation,
        case=of_case(explanation.case),
        dtype=explanation.dtype,
        rounding_model=explanation.rounding_model,
        verdict=verdict_of(explanation),
        begins_at=explanation.begins_at,
        stages=[_stage(each, explanation) for each in explanation.judgements],
        failure=explanation.failure,
        outside=explanation.outside,
        expected_failures=dict(explanation.expected_failures),
        padded=explanation.padded,
        lacks=list(explanation.lacks),
        repeated=None if explained.repeated is None else _repeated(explained.repeated),
    )


def answer_of(explanation: Explanation) -> str:
    """Say in a line what an implementation does with a case."""
    who = f"{explanation.implementation} in {explanation.dtype}"
    if explanation.failure:
        return f"{who}: {explanation.failure}"
    if explanation.outside:
        return f"{who}: there is no exact answer: {explanation.outside}"
    if explanation.begins_at:
        return f"{who} is wrong at {explanation.begins_at}: {verdict_of(explanation)}"
    return f"{who}: {'nothing was judged' if verdict_of(explanation) == Verdict.UNVERIFIED else 'agrees'}"


def _stage(judgement: StageJudgement, explanation: Explanation) -> StageRecord:
    condition = explanation.conditioning.get(judgement.stage)
    return StageRecord(
        stage=judgement.stage,
        verdict=judgement.verdict.value,
        is_noisy=judgement.is_noisy,
        accumulated=_errors(judgement.accumulated),
        introduced=_errors(judgement.introduced),
        element=None if judgement.index is None else list(judgement.index),
        computed=judgement.value,
        computed_hex=None if judgement.value is None else judgement.value.hex(),
        exact=judgement.exact,
        exact_hex=None if judgement.exact is None else judgement.exact.hex(),
        error=judgement.error,
        bound=judgement.bound,
        against=judgement.against,
        condition=None if condition is None else _condition(condition),
        judged_rows=judgement.judged_rows,
        query_rows=judgement.query_rows,
        unjudged=judgement.unjudged,
        message=judgement.message,
        expected_failure=explanation.expected_failures.get(judgement.stage, ""),
    )


def _errors(measured: Measured | None) -> Errors | None:
    if measured is None:
        return None
    return Errors(
        tier=str(measured.tier.value),
        ratio=measured.ratio,
        element=None if measured.index is None else list(measured.index),
        largest_z=measured.largest_z,
        mean_z=measured.mean_z,
        elements=measured.elements,
    )


def _condition(found: Conditioning) -> ConditionRecord:
    return ConditionRecord(median=found.median, largest=found.largest, ill=found.ill, elements=found.elements)


def _repeated(repeated: Repeated) -> RepeatedRecord:
    needed = None
    if repeated.needed is not None:
        needed = [CallRecord(case=case.id, dtype=dtype) for case, dtype in repeated.needed]
    return RepeatedRecord(
        found=repeated.found,
        before=repeated.before,
        needed=needed,
        are_fewest=repeated.are_fewest,
        remark=repeated.remark,
    )


def case_document(shown: Shown, saved: str | None = None) -> CaseDocument:
    """Return a case with its inputs, its exact stages, and the numbers that its document prints."""
    case = shown.case
    return CaseDocument(
        attncheck=header("show"),
        exit_code=int(ExitCode.AGREE),
        answer=case.name,
        failures=[],
        next=[],
        notes=list(case.warnings),
        case=of_case(case),
        source=case.source.model_dump(exclude_none=True),
        remarks=list(case.notes),
        dtype=shown.dtype,
        inputs=_arrays(shown.inputs),
        stages=_arrays(shown.exact),
        numbers=[
            _number(case.expected[position].name, case.expected[position].basis, row)
            for position, rows in shown.numbers.items()
            for row in rows
        ],
        outside=shown.outside or shown.undefined,
        sampled=shown.sampled,
        saved=saved,
    )


def _arrays(arrays: Mapping[str, NDArray[Any]]) -> list[ArrayRecord]:
    return [
        ArrayRecord(name=name, shape=list(array.shape), values=_values(array) if array.size <= MAX_ELEMENTS else None)
        for name, array in arrays.items()
    ]


def _values(array: NDArray[Any]) -> Any:
    """Return nested lists; of bfloat16 and float16 the same numbers as float64."""
    return array.tolist() if array.dtype.kind in "biu" else array.astype("float64").tolist()


def _number(stage: str, basis: str, row: Row) -> NumberRecord:
    return NumberRecord(
        stage=stage,
        called=row.called or "",
        basis=basis,
        element=row.index or "",
        printed=row.reference_text or "",
        exact=row.value,
        difference=row.difference,
        outcome=outcome_of(row),
    )
