"""The documents of commands about one case: explain, show, repro and reduce.

The documents of commands about one case, made of what those commands found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from attncheck.errors import ExitCode
from attncheck.explain import Explanation
from attncheck.judging.compare import Measured
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import Conditioning
from attncheck.reading.case import Case, case_record
from attncheck.repeating import Repeated, RepeatedExplanation
from attncheck.reports.machine.documents import Document, Record
from attncheck.reports.machine.failures import failure_of, verdict_of
from attncheck.reports.machine.text import header
from attncheck.reports.show import Shown, outcome_of
from attncheck.results.format import Row
from attncheck.verdicts import Verdict


@dataclass(frozen=True, kw_only=True)
class CaseRecord(Record):
    """A case."""

    id: str
    """Its id."""
    name: str
    """Its name, a sentence."""
    file: str
    """Its file."""
    line: int
    """Its line there."""
    operation: str
    """The operation that it calls."""
    tags: Sequence[str]
    """What it probes."""
    inputs: Mapping[str, Sequence[int]]
    """The shapes of its inputs."""
    options: Mapping[str, Any]
    """Its options, as its file gives them."""
    dtypes: Sequence[str]
    """The dtypes that it declares."""


@dataclass(frozen=True, kw_only=True)
class Errors(Record):
    """The errors of a stage."""

    tier: str
    """within, warning (noisy), statistical or proven (wrong)."""
    ratio: float
    """The largest error over its bound."""
    element: Sequence[int] | None
    """The element where that is."""
    largest_z: float
    """The largest error in units of the error that noise would make."""
    mean_z: float
    """The root mean square of the errors in these units."""
    elements: int
    """How many elements were measured."""


@dataclass(frozen=True, kw_only=True)
class ConditionRecord(Record):
    """How large the error bounds of a stage are beside its numbers."""

    median: float
    """The bound in units of rounding the number itself, in the median."""
    largest: float
    """The largest."""
    ill: int
    """How many elements have a bound that is larger than the number."""
    elements: int
    """Of how many."""


@dataclass(frozen=True, kw_only=True)
class StageRecord(Record):
    """A stage that an implementation returned."""

    stage: str
    """Its name."""
    verdict: str
    """One word of docs/reference/verdicts.md."""
    is_noisy: bool
    """Whether errors are larger than those of known good implementations, and fail nothing."""
    accumulated: Errors | None
    """Against the exact answer."""
    introduced: Errors | None
    """Against the exact step from the implementation's own previous stage."""
    element: Sequence[int] | None
    """The element that is named."""
    computed: float | None
    """The number there."""
    computed_hex: str | None
    """The same, exactly."""
    exact: float | None
    """What is right there, rounded to float64."""
    exact_hex: str | None
    """The same, exactly."""
    error: float | None
    """The absolute difference of the two."""
    bound: float | None
    """The largest error that agrees there."""
    against: str | None
    """What computed is compared with: exact, or step."""
    condition: ConditionRecord | None
    """How well the inputs determine the stage."""
    judged_rows: int | None
    """How many query rows stand for all; null where all were judged."""
    query_rows: int | None
    """Of how many."""
    unjudged: int
    """Elements without an exact answer."""
    message: str
    """What is wrong, in words."""
    expected_failure: str
    """Why a failure here is expected; empty where it is not."""


@dataclass(frozen=True, kw_only=True)
class CallRecord(Record):
    """A call that was made before."""

    case: str
    """The case's id."""
    dtype: str
    """The dtype."""


@dataclass(frozen=True, kw_only=True)
class RepeatedRecord(Record):
    """A failure of a check that a fresh process does not show."""

    found: str
    """What the check found."""
    before: int
    """How many calls came before it in the check."""
    needed: Sequence[CallRecord] | None
    """The calls after which it happens again; null where it does not."""
    are_fewest: bool
    """Whether each of them is needed."""
    remark: str
    """What may have changed since."""


@dataclass(frozen=True, kw_only=True)
class ExplanationDocument(Document):
    """explain: one case on one implementation, stage by stage."""

    implementation: str
    """The implementation."""
    case: CaseRecord
    """The case."""
    dtype: str
    """The dtype of the inputs."""
    rounding_model: str
    """By which roundings it was judged."""
    verdict: str
    """The verdict of the first stage that is wrong, or of the call; agree where nothing is."""
    begins_at: str
    """The first stage that is wrong; empty where none is."""
    stages: Sequence[StageRecord]
    """Every stage that came back, in the order of computation."""
    failure: str
    """Why no stages came back."""
    outside: str
    """Why there is no exact answer."""
    expected_failures: Mapping[str, str]
    """By stage: why its failure is expected."""
    padded: str
    """What the call was padded with."""
    lacks: Sequence[str]
    """What the implementation would need to support the case."""
    repeated: RepeatedRecord | None
    """What became of a failure that a fresh process does not show."""


@dataclass(frozen=True, kw_only=True)
class ArrayRecord(Record):
    """An input or an exact stage."""

    name: str
    """Its name."""
    shape: Sequence[int]
    """Its shape."""
    values: Any
    """Its numbers as nested lists, row by row; null where there are more than 4,096."""


@dataclass(frozen=True, kw_only=True)
class NumberRecord(Record):
    """A number that a document prints, beside the exact one."""

    stage: str
    """The stage that it is of."""
    called: str
    """The document's own name for it."""
    basis: str
    """printed, known or exact."""
    element: str
    """The element."""
    printed: str
    """The number as it is printed."""
    exact: float | None
    """The exact one."""
    difference: float | None
    """How far off it is."""
    outcome: str
    """holds, does not hold, erratum or not compared."""


@dataclass(frozen=True, kw_only=True)
class CaseDocument(Document):
    """show: a case with its inputs, its exact stages, and its printed numbers."""

    case: CaseRecord
    """The case."""
    source: Mapping[str, Any]
    """Where it is from."""
    remarks: Sequence[str]
    """What the case and its source say besides."""
    dtype: str
    """The dtype of the inputs."""
    inputs: Sequence[ArrayRecord]
    """Its inputs, as stored in that dtype."""
    stages: Sequence[ArrayRecord]
    """Its exact stages, rounded to float64; NaN in query rows that were not evaluated."""
    numbers: Sequence[NumberRecord]
    """Its printed numbers."""
    outside: str
    """Why there is no exact answer, of all or of some elements."""
    sampled: str
    """How many query rows stand for all."""
    saved: Sequence[str]
    """The images that were written."""


@dataclass(frozen=True, kw_only=True)
class ScriptDocument(Document):
    """repro: a script that reproduces one case."""

    implementation: str
    """The implementation."""
    case: CaseRecord
    """The case, or what it was reduced to."""
    dtype: str
    """The dtype of the inputs."""
    script: str
    """The script."""
    command: str
    """The command that runs it: it ends with 1 where it finds an error, with 0 where it finds none."""
    tries: int
    """In how many tries the case was reduced; 0 where it was not."""


@dataclass(frozen=True, kw_only=True)
class ReductionDocument(Document):
    """reduce: the smallest case that fails alike."""

    implementation: str
    """The implementation."""
    case: str
    """The id of the case that was reduced."""
    dtype: str
    """The dtype of the inputs."""
    file: str | None
    """The file of the reduced case; null where nothing fails."""
    before: str
    """The shapes and options of the case."""
    reduced: str
    """Those of the reduced one."""
    tries: int
    """How many smaller cases were tried."""
    is_smallest: bool
    """Whether nothing smaller fails alike."""


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


def case_document(shown: Shown, saved: Sequence[str] = ()) -> CaseDocument:
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
        saved=list(saved),
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
