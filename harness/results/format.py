"""The format of a results directory: its files, which ``docs/reference/results.md`` lists, and its rows and arrays.

Parts are renamed into place when they are whole. summary.json is written last: without it, a run was interrupted;
failed.json outlives the next run in the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import pyarrow as pa
from numpy.typing import NDArray

from attncheck.spec import OPERATIONS
from attncheck.verdicts import HARMLESS, MEETS_CLAIM

FORMAT = 9
REPORT_FOLDER = "report"
SCRIPTS_FOLDER = "scripts"
PROPERTY_PART = "rows/properties.parquet"
PROPERTIES_TABLE = "properties.csv"
"""Written by `attncheck properties --output` for people, beside the rows."""
ComparisonKind = Literal["stage", "pair", "printed", "known", "exact", "property"]

_ARRAY_COLUMNS = {
    **dict.fromkeys(("case", "dtype", "implementation", "stage", "array_dtype"), pa.string()),
    **{"shape": pa.list_(pa.int64()), "data": pa.binary()},
}
ARRAY_SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _ARRAY_COLUMNS.items()])

_Text = str | None
_Number = float | None
_Count = int | None


class Column(NamedTuple):
    """The meaning of a column of ``Row``, and the frames of a report that have it."""

    meaning: str
    frames: str = ""


_STAGES, _NUMBERS, _PROPERTIES, _PAIRED = "results", "numbers", "properties", "results pairs"
_COMPARED = "results pairs numbers"
_ALL = f"{_COMPARED} properties"


@dataclass(frozen=True)
class Row:
    """One comparison on one implementation, of one case in one dtype: of a stage, a pair, a number, or two calls.

    A stage is compared twice: with the exact answer (``tier``, ``ratio``, ``largest_z``, ``mean_z``, ``elements``) and
    with the exact step from the implementation's own previous stage (``introduced_tier``, ``introduced_ratio``,
    ``introduced_z``). ``index``, ``value``, ``reference``, ``difference`` and ``allowed`` belong to the one that
    ``against`` names: ``step`` where the step itself fails, so that difference / allowed is then ``introduced_ratio``,
    else ``exact``. Of a number, ``allowed`` is the sum of ``half_unit``, ``propagated``, ``document_bound`` and the
    implementation's own bound.

    Of a property, ``value`` is what the first call gave at ``index``, ``reference`` what the further calls gave there,
    mapped back, and ``verdict`` a ``PropertyOutcome``.

    Every column is stated here alone: its dtype on disk, its meaning, and the frames that have it follow from its
    annotation.
    """

    case: Annotated[str, Column("id of the case: its file, then its name", _ALL)]
    operation: Annotated[str, Column(", ".join(OPERATIONS), _PAIRED)]
    dtype: Annotated[str, Column("working dtype of inputs and results", _ALL)]
    implementation: Annotated[str, Column("backend and mode", _ALL)]
    comparison: Annotated[
        ComparisonKind,
        Column("stage (against the exact answer), pair (against other), a number (printed, known, exact), or property"),
    ]
    stage: Annotated[str, Column("named intermediate, or derived quantity; empty where the whole case failed", _ALL)]
    verdict: Annotated[str, Column("one word: docs/reference/verdicts.md", _COMPARED)]
    xfail: Annotated[bool, Column("an expected failure, does not fail a run", _ALL)] = False
    other: Annotated[_Text, Column("the implementation that it is compared with, and its environment", "pairs")] = None
    called: Annotated[_Text, Column("the document's own name for the stage", _NUMBERS)] = None
    shape: Annotated[_Text, Column("lengths of the stage's axes", _STAGES)] = None
    index: Annotated[_Text, Column("element where the two differ most, or the number's place", _ALL)] = None
    value: Annotated[_Number, Column("the implementation's number there", _COMPARED)] = None
    reference: Annotated[_Number, Column("the number that it is compared with", _COMPARED)] = None
    reference_text: Annotated[_Text, Column("the number as it is printed")] = None
    exact: Annotated[_Number, Column("the exact answer, rounded to float64", f"{_NUMBERS} {_PROPERTIES}")] = None
    difference: Annotated[_Number, Column("absolute difference of the two", _COMPARED)] = None
    half_unit: Annotated[
        _Number,
        Column(
            "what the printed digits leave open on the value's side: half a unit of the last one if rounded", _NUMBERS
        ),
    ] = None
    propagated: Annotated[
        _Number, Column("what the rounding of the case's inputs can move the number by", _NUMBERS)
    ] = None
    document_bound: Annotated[
        _Number,
        Column(
            "largest error of the precision that the document was computed in; empty where none is declared", _NUMBERS
        ),
    ] = None
    allowed: Annotated[
        _Number,
        Column(
            "largest difference that agrees: an error bound or the sum of two; of a number, with its rounding",
            _COMPARED,
        ),
    ] = None
    first_bound: Annotated[
        _Number, Column("how far the first call's number may be from the exact answer", _PROPERTIES)
    ] = None
    second_bound: Annotated[_Number, Column("how far the further calls' number may be from it", _PROPERTIES)] = None
    against: Annotated[
        _Text,
        Column(
            "exact or step: which comparison of a stage index, value, reference, difference and allowed are of", _STAGES
        ),
    ] = None
    ratio: Annotated[_Number, Column("largest difference over what is allowed there, in the whole stage", _PAIRED)] = (
        None
    )
    tier: Annotated[
        _Text, Column("within, warning (noisy), statistical or proven (wrong), against the exact answer", _STAGES)
    ] = None
    largest_z: Annotated[_Number, Column("largest error in units of its statistical scale", _STAGES)] = None
    mean_z: Annotated[
        _Number, Column("root mean square of the errors in units of their statistical scale", _STAGES)
    ] = None
    introduced_tier: Annotated[
        _Text, Column("the same tier for the step from the implementation's own previous stage", _STAGES)
    ] = None
    introduced_ratio: Annotated[_Number, Column("the same ratio for that step", _STAGES)] = None
    introduced_z: Annotated[_Number, Column("the same largest z for that step", _STAGES)] = None
    begins_at: Annotated[_Text, Column("the first stage that is itself at fault in this case", _STAGES)] = None
    differing: Annotated[_Count, Column("in how many elements some bits differ", _PROPERTIES)] = None
    elements: Annotated[_Count, Column("how many elements were compared", _PROPERTIES)] = None
    judged_rows: Annotated[
        _Count, Column("query rows that were judged, where some stand for all; empty where all were", _STAGES)
    ] = None
    query_rows: Annotated[_Count, Column("query rows that the stage has, where some stand for all", _STAGES)] = None
    unjudged: Annotated[
        _Count,
        Column(
            "elements (of the judged rows) that no exact answer was known of; of a pair, those of them that differ",
            _PAIRED,
        ),
    ] = None
    message: Annotated[str, Column("what is wrong, in words", _ALL)] = ""
    hint: Annotated[_Text, Column("what would explain a misprint, and how a case declares it", _NUMBERS)] = None
    lacks: Annotated[
        _Text, Column("what an implementation would need to support the case, comma-separated", _STAGES)
    ] = None
    padded: Annotated[
        _Text, Column("what the call was padded with, as the implementation requires; empty where it was not", _STAGES)
    ] = None
    seconds: Annotated[
        _Number,
        Column("how long the evaluation took, in its first row alone; measured, so no report but JUnit shows it"),
    ] = field(default=None, compare=False)
    diagnosis: Annotated[
        _Text,
        Column(
            "what the implementation does instead: a name of docs/diagnoses.md; empty where that is not known", _STAGES
        ),
    ] = None
    evidence: Annotated[
        _Text, Column("what the case says of that by itself, until all cases decide together (diagnosing.py)")
    ] = None
    reason: Annotated[_Text, Column("why the failure is expected", _COMPARED)] = None
    thread: Annotated[_Text, Column("where that is discussed", _COMPARED)] = None
    empty_rows: Annotated[
        _Text,
        Column(
            "what a query without a key gives (zero, uniform, nan), where nothing else differs from the case", _STAGES
        ),
    ] = None

    property_name: Annotated[str, Column("the property's name", _PROPERTIES)] = ""
    variant: Annotated[str, Column("which further calls were made", _PROPERTIES)] = ""
    claim: Annotated[
        str, Column("what the implementation claims of the property; empty where it claims nothing", _PROPERTIES)
    ] = ""

    @property
    def fails(self) -> bool:
        """True if it fails, expected or not; a property fails also where it is less than is claimed."""
        if self.comparison == "property":
            return self.verdict not in MEETS_CLAIM[self.claim]
        return self.verdict not in HARMLESS

    @property
    def fails_run(self) -> bool:
        """True if it fails a run."""
        return self.fails and not self.xfail

    def __getstate__(self) -> dict[str, Any]:
        """Return what differs from the defaults, which the class has itself; of most rows that is a third."""
        return {name: value for name, value in vars(self).items() if value is not _DEFAULTS[name]}


_DEFAULTS = {each.name: each.default for each in fields(Row)}
_HINTS = {name: get_args(hint) for name, hint in get_type_hints(Row, include_extras=True).items()}
COLUMNS: Mapping[str, Column] = {name: column for name, (_, column) in _HINTS.items()}
"""The columns of rows, in order."""
_ARROW = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def _field(name: str, kind: Any) -> pa.Field:
    """Return a column as it is on disk; what may be None is nullable, and a word of several is a text."""
    members = get_args(kind) or (kind,)
    arrow = next((_ARROW[member] for member in members if member in _ARROW), pa.string())
    return pa.field(name, arrow, nullable=NoneType in members)


ROW_SCHEMA = pa.schema([_field(name, kind) for name, (kind, _) in _HINTS.items()])


def columns_of(frame: str, *first: str) -> tuple[str, ...]:
    """Return the columns of a frame of a report: those that come first, then its others in the order of ``Row``."""
    others = (name for name, column in COLUMNS.items() if frame in column.frames.split() and name not in first)
    return (*first, *others)


CHANGED_BY_DIAGNOSIS = ("verdict", "message", "begins_at", "empty_rows", "diagnosis", "evidence")
"""Columns of a failing row that are written again when it is known what the implementation does instead."""


def disagrees(rows: Iterable[Row]) -> bool:
    """Return true if any of the rows does not agree."""
    return any(row.fails for row in rows)


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
