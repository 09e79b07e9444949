"""What a results directory holds: its files, the columns of its rows and arrays.

environment.json      what ran where: versions, platform, threads, command, what was left out
rows/part-*.parquet   one row per comparison, each part renamed into place when it is whole
arrays/part-*.parquet the stages of what disagreed and of documents, or of everything; beside them what they are held
                      against: inputs, exact answer, bounds
logs/*.txt            what a framework printed
scripts/*.py          what failed, each to be run by itself; index.json says which is which
failed.json           what failed when it was last run, in this run or before; it outlives the next run in the folder
summary.json          counts and exit code, written last: without it, a run was interrupted
report/               made from the above by `attncheck check` or `attncheck report`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pyarrow as pa
from numpy.typing import NDArray

from attncheck.verdicts import HARMLESS

FORMAT = 8
REPORT_FOLDER = "report"
SCRIPTS_FOLDER = "scripts"
PROPERTIES_TABLE = "properties.csv"
"""What was found of properties, in a results directory that asked for them."""
ComparisonKind = Literal["stage", "pair", "printed", "known", "exact"]

ROW_SCHEMA = pa.schema(
    [
        pa.field("case", pa.string(), nullable=False),
        pa.field("operation", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("implementation", pa.string(), nullable=False),
        pa.field("comparison", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("verdict", pa.string(), nullable=False),
        pa.field("xfail", pa.bool_(), nullable=False),
        pa.field("other", pa.string()),
        pa.field("called", pa.string()),
        pa.field("shape", pa.string()),
        pa.field("index", pa.string()),
        pa.field("value", pa.float64()),
        pa.field("reference", pa.float64()),
        pa.field("reference_text", pa.string()),
        pa.field("difference", pa.float64()),
        pa.field("allowed", pa.float64()),
        pa.field("against", pa.string()),
        pa.field("ratio", pa.float64()),
        pa.field("half_unit", pa.float64()),
        pa.field("propagated", pa.float64()),
        pa.field("document_bound", pa.float64()),
        pa.field("hint", pa.string()),
        pa.field("tier", pa.string()),
        pa.field("largest_z", pa.float64()),
        pa.field("mean_z", pa.float64()),
        pa.field("introduced_tier", pa.string()),
        pa.field("introduced_ratio", pa.float64()),
        pa.field("introduced_z", pa.float64()),
        pa.field("begins_at", pa.string()),
        pa.field("elements", pa.int64()),
        pa.field("judged_rows", pa.int64()),
        pa.field("query_rows", pa.int64()),
        pa.field("unjudged", pa.int64()),
        pa.field("message", pa.string(), nullable=False),
        pa.field("lacks", pa.string()),
        pa.field("padded", pa.string()),
        pa.field("exact", pa.float64()),
        pa.field("seconds", pa.float64()),
        pa.field("reason", pa.string()),
        pa.field("thread", pa.string()),
        pa.field("empty_rows", pa.string()),
        pa.field("diagnosis", pa.string()),
        pa.field("evidence", pa.string()),
    ]
)

ARRAY_SCHEMA = pa.schema(
    [
        pa.field("case", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("implementation", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("array_dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Row:
    """One comparison of one stage of one case on one implementation in one dtype.

    ``comparison`` is ``stage`` (against the exact answer), ``pair`` (against ``other``), ``printed`` (one number of a
    document), ``known`` (one derived number) or ``exact`` (one number that a document computes and does not print).
    ``value`` is the implementation's number at ``index``, ``reference`` what it is compared with; ``difference`` is
    absolute, ``allowed`` the largest one that agrees, ``ratio`` the largest quotient of the two in the stage. ``xfail``
    marks a failure that is expected and does not fail a run; ``reason`` says why it is so, ``thread`` where that is
    discussed.

    A stage is compared twice: with the exact answer (``tier``, ``ratio``, ``largest_z``, ``mean_z``, ``elements``) and
    with the exact step from the implementation's own previous stage (``introduced_tier``, ``introduced_ratio``,
    ``introduced_z``). ``index``, ``value``, ``reference``, ``difference`` and ``allowed`` belong to one of the two,
    which ``against`` names: ``step`` where the step itself fails, so that difference / allowed is then
    ``introduced_ratio``, else ``exact``. ``begins_at`` is the stage at which the implementation goes wrong. Where some
    query rows stand for all, ``judged_rows`` of ``query_rows`` were judged; both are None where all were. ``unjudged``
    counts the elements of these rows that have no exact answer; of a pair, those of them that differ.
    ``empty_rows`` is what rows without a key give, where that and nothing else differs from what the case means.

    ``diagnosis`` is the name of what the implementation does instead, which all cases of a run decide together when
    the last is judged (``diagnosing.py``); ``evidence`` is what a case says of that that was diagnosed before.

    Of a number ``half_unit`` is what its digits leave open on the side where the value lies, ``propagated`` what the
    rounding of the inputs can move it by, and ``document_bound`` the largest error of the precision that its document
    was computed in, where that is declared; ``allowed`` is their sum and the implementation's own bound.
    ``hint`` says of a misprint what would explain it, and how a case declares that.

    ``lacks`` names what an unsupported case would need, comma-separated. ``padded`` says what a call was padded with,
    as the implementation requires; None where it was made as the case has it. ``exact`` is the exact answer where
    ``reference`` is a number of the case. ``seconds`` is how long the evaluation took, in its first row alone: it is
    measured, so no report but JUnit shows it.
    """

    case: str
    operation: str
    dtype: str
    implementation: str
    comparison: ComparisonKind
    stage: str
    verdict: str
    xfail: bool = False
    other: str | None = None
    called: str | None = None
    shape: str | None = None
    index: str | None = None
    value: float | None = None
    reference: float | None = None
    reference_text: str | None = None
    difference: float | None = None
    allowed: float | None = None
    against: str | None = None
    ratio: float | None = None
    half_unit: float | None = None
    propagated: float | None = None
    document_bound: float | None = None
    hint: str | None = None
    tier: str | None = None
    largest_z: float | None = None
    mean_z: float | None = None
    introduced_tier: str | None = None
    introduced_ratio: float | None = None
    introduced_z: float | None = None
    begins_at: str | None = None
    elements: int | None = None
    judged_rows: int | None = None
    query_rows: int | None = None
    unjudged: int | None = None
    message: str = ""
    lacks: str | None = None
    padded: str | None = None
    exact: float | None = None
    seconds: float | None = field(default=None, compare=False)
    reason: str | None = None
    thread: str | None = None
    empty_rows: str | None = None
    diagnosis: str | None = None
    evidence: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what differs from the defaults, which the class has itself; of most rows that is a third."""
        return {name: value for name, value in vars(self).items() if value is not _DEFAULTS[name]}


_DEFAULTS = {each.name: each.default for each in fields(Row)}


def disagrees(rows: Iterable[Row]) -> bool:
    """Whether any of the rows is one that does not agree."""
    return any(row.verdict not in HARMLESS for row in rows)


def bound_name(rounding_model: str) -> str:
    """Return under which name the bounds of a class are kept beside the implementations' arrays."""
    return f"bound of class {rounding_model}"


EXACT = "exact answer"
"""Under this name the exact stages are kept, rounded to float64; NaN in query rows that were not judged."""
INPUTS = "inputs"
"""Under this name the case's inputs are kept, as they were delivered."""


@dataclass(frozen=True)
class StoredArray:
    """One stage as an implementation returned it; under ``EXACT``, ``INPUTS``, ``bound_name``: what it is held by."""

    case: str
    dtype: str
    implementation: str
    stage: str
    array: NDArray[Any]
