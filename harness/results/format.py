"""The format of a results directory: its files, which ``docs/reference/results.md`` lists, and its rows and arrays.

Parts are renamed into place when they are whole. summary.json is written last: without it, a run was interrupted;
failed.json outlives the next run in the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from numpy.typing import NDArray

from attncheck.results.tables import ColumnKind, Schema
from attncheck.spec import OPERATIONS
from attncheck.spec.verdicts import HARMLESS, MEETS_CLAIM

FORMAT = 10
REPORT_FOLDER = "report"
SCRIPTS_FOLDER = "scripts"
PROPERTY_PART = "rows/properties.npz"
SEARCH_STATE = "search.json"
"""The state of a search: only in folders of searches."""
PROPERTIES_TABLE = "properties.csv"
"""Written by `attncheck properties --output` for people, in addition to the rows."""
ComparisonKind = Literal["stage", "pair", "printed", "known", "exact", "property"]

ARRAY_SCHEMA: Schema = {
    **dict.fromkeys(("case", "dtype", "implementation", "stage", "array_dtype", "shape"), ColumnKind("text")),
    **dict.fromkeys(("block", "start", "size"), ColumnKind("int")),
}
"""A row for each array; its bytes are ``size`` bytes from ``start`` of a block, which holds those of one case."""

_Text = str | None
_Number = float | None
_Count = int | None


class ColumnMeaning(NamedTuple):
    """The meaning of a column of ``Row``, and the frames of a report that have it."""

    meaning: str
    frames: str = ""


def about(meaning: str, frames: str = "") -> Mapping[str, ColumnMeaning]:
    """Return the metadata of a required field of ``Row``."""
    return {"column": ColumnMeaning(meaning, frames)}


def column(meaning: str, frames: str = "", default: Any = None, *, compare: bool = True) -> Any:
    """Return an optional field of ``Row``."""
    return field(default=default, compare=compare, metadata=about(meaning, frames))


_STAGES, _NUMBERS, _PROPERTIES, _PAIRED = "results", "numbers", "properties", "results pairs"
_COMPARED = "results pairs numbers"
_ALL = f"{_COMPARED} properties"


@dataclass(frozen=True)
class Row:
    """One comparison on one implementation, of one case in one dtype: of a stage, a pair, a number, or two calls.

    A stage is compared twice: with the exact answer (``tier``, ``ratio``, ``largest_z``, ``mean_z``, ``elements``) and
    with the exact step from the implementation's own previous stage (``introduced_tier``, ``introduced_ratio``,
    ``introduced_z``). ``index``, ``value``, ``reference``, ``difference`` and ``allowed`` belong to the comparison that
    ``against`` names: ``step`` if the step itself fails, so that difference / allowed is then ``introduced_ratio``,
    else ``exact``. For a number, ``allowed`` is the sum of ``half_unit``, ``propagated``, ``document_bound`` and the
    implementation's bound.

    For a property, ``value`` is the result of the first call at ``index``, ``reference`` that of the further calls,
    mapped back, and ``verdict`` a ``PropertyOutcome``.

    Columns are defined only here: the dtype on disk follows from the type.
    """

    case: str = field(metadata=about("id of the case: its file, then its name", _ALL))
    operation: str = field(metadata=about(", ".join(OPERATIONS), _PAIRED))
    dtype: str = field(metadata=about("working dtype of inputs and results", _ALL))
    implementation: str = field(metadata=about("backend and mode", _ALL))
    comparison: ComparisonKind = field(
        metadata=about(
            "stage (against the exact answer), pair (against other), a number (printed, known, exact), or property"
        )
    )
    stage: str = field(
        metadata=about("named intermediate, or derived quantity; empty where the whole case failed", _ALL)
    )
    verdict: str = field(metadata=about("one word: docs/reference/verdicts.md", _COMPARED))
    xfail: bool = column("an expected failure, does not fail a run", _ALL, default=False)
    other: _Text = column("the implementation that it is compared with, and its environment", "pairs")
    called: _Text = column("the document's own name for the stage", _NUMBERS)
    shape: _Text = column("lengths of the stage's axes", _STAGES)
    index: _Text = column("element where the two differ most, or the number's place", _ALL)
    value: _Number = column("the implementation's number there", _COMPARED)
    reference: _Number = column("the number that it is compared with", _COMPARED)
    reference_text: _Text = column("the number as it is printed")
    exact: _Number = column("the exact answer, rounded to float64", f"{_NUMBERS} {_PROPERTIES}")
    difference: _Number = column("absolute difference of the two", _COMPARED)
    half_unit: _Number = column(
        "what the printed digits leave open on the value's side: half a unit of the last one if rounded", _NUMBERS
    )
    propagated: _Number = column("what the rounding of the case's inputs can move the number by", _NUMBERS)
    document_bound: _Number = column(
        "largest error of the precision that the document was computed in; empty where none is declared", _NUMBERS
    )
    allowed: _Number = column(
        "largest difference that agrees: an error bound or the sum of two; of a number, with its rounding", _COMPARED
    )
    first_bound: _Number = column("how far the first call's number may be from the exact answer", _PROPERTIES)
    second_bound: _Number = column("how far the further calls' number may be from it", _PROPERTIES)
    against: _Text = column(
        "exact or step: which comparison of a stage index, value, reference, difference and allowed are of", _STAGES
    )
    ratio: _Number = column("largest difference over what is allowed there, in the whole stage", _PAIRED)
    tier: _Text = column("within, warning (noisy), statistical or proven (wrong), against the exact answer", _STAGES)
    largest_z: _Number = column("largest error in units of its statistical scale", _STAGES)
    mean_z: _Number = column("root mean square of the errors in units of their statistical scale", _STAGES)
    introduced_tier: _Text = column("the same tier for the step from the implementation's own previous stage", _STAGES)
    introduced_ratio: _Number = column("the same ratio for that step", _STAGES)
    introduced_z: _Number = column("the same largest z for that step", _STAGES)
    begins_at: _Text = column("the first stage that is itself at fault in this case", _STAGES)
    differing: _Count = column("in how many elements some bits differ", _PROPERTIES)
    elements: _Count = column("how many elements were compared", _PROPERTIES)
    judged_rows: _Count = column("query rows that were judged, where some stand for all; empty where all were", _STAGES)
    query_rows: _Count = column("query rows that the stage has, where some stand for all", _STAGES)
    unjudged: _Count = column(
        "elements (of the judged rows) that no exact answer was known of; of a pair, those of them that differ", _PAIRED
    )
    message: str = column("what is wrong, in words", _ALL, default="")
    hint: _Text = column("what would explain a misprint, and how a case declares it", _NUMBERS)
    lacks: _Text = column("what an implementation would need to support the case, comma-separated", _STAGES)
    padded: _Text = column(
        "what the call was padded with, as the implementation requires; empty where it was not", _STAGES
    )
    seconds: _Number = column(
        "how long the evaluation took, in its first row alone; measured, so no report but JUnit shows it", compare=False
    )
    diagnosis: _Text = column(
        "what the implementation does instead: a name of docs/diagnoses.md; empty where that is not known", _STAGES
    )
    reason: _Text = column("why the failure is expected", _COMPARED)
    thread: _Text = column("where that is discussed", _COMPARED)
    empty_rows: _Text = column(
        "what a query without a key gives (zero, uniform, nan), where nothing else differs from the case", _STAGES
    )

    property_name: str = column("the property's name", _PROPERTIES, default="")
    variant: str = column("which further calls were made", _PROPERTIES, default="")
    claim: str = column(
        "what the implementation claims of the property; empty where it claims nothing", _PROPERTIES, default=""
    )

    @property
    def fails(self) -> bool:
        """True if it fails, expected or not; a property also fails if it is less than the claim."""
        if self.comparison == "property":
            return self.verdict not in MEETS_CLAIM[self.claim]
        return self.verdict not in HARMLESS

    @property
    def fails_run(self) -> bool:
        """True if it fails a run."""
        return self.fails and not self.xfail

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults: a third of the fields in most rows."""
        return {name: value for name, value in vars(self).items() if value is not _DEFAULTS[name]}


_DEFAULTS = {row_field.name: row_field.default for row_field in fields(Row)}
COLUMNS: Mapping[str, ColumnMeaning] = {row_field.name: row_field.metadata["column"] for row_field in fields(Row)}
"""The columns of rows, in order."""
_TYPES: Mapping[Any, Literal["text", "bool", "int", "float"]] = {bool: "bool", int: "int", float: "float"}


def _kind(annotation: Any) -> ColumnKind:
    """Return the type of a column on disk; it is nullable if None is allowed, and literals are texts."""
    members = get_args(annotation) or (annotation,)
    return ColumnKind(next((_TYPES[member] for member in members if member in _TYPES), "text"), NoneType in members)


ROW_SCHEMA: Schema = {name: _kind(annotation) for name, annotation in get_type_hints(Row).items()}


def columns_of(frame: str, *first: str) -> tuple[str, ...]:
    """Return the columns of a frame of a report: ``first``, then the others in the order of ``Row``."""
    others = (name for name, column in COLUMNS.items() if frame in column.frames.split() and name not in first)
    return (*first, *others)


CHANGED_BY_DIAGNOSIS = ("verdict", "message", "begins_at", "empty_rows", "diagnosis")
"""Columns of a failing row that are rewritten when it has a diagnosis."""


def disagrees(rows: Iterable[Row]) -> bool:
    """Return whether any of the rows fails, expected or not."""
    return any(row.fails for row in rows)


def bound_name(rounding_model: str) -> str:
    """Return the name under which the bounds of a class are stored with the implementations' arrays."""
    return f"bound of class {rounding_model}"


EXACT = "exact answer"
"""The name of the exact stages, rounded to float64; NaN in query rows that were not judged."""
INPUTS = "inputs"
"""The name of the case's inputs, as they were passed."""
FAILURE_NUMBERS = ("element_stage", "element", "computed", "exact", "error", "bound", "ratio", "against", "diagnosis")
"""Names of the numbers that are recorded for the worst element of a failure."""


@dataclass(frozen=True)
class StoredArray:
    """One stage as an implementation returned it; or an exact stage, an input or a bound, by the names above."""

    case: str
    dtype: str
    implementation: str
    stage: str
    array: NDArray[Any]
