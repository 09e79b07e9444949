"""The documents of commands about one case: explain, show, repro and reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attncheck.reports.machine.documents import Document, Record


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
