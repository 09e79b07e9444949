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
from attncheck.spec.verdicts import HARMLESS_VERDICTS, OUTCOMES_MEETING_CLAIM

FORMAT_VERSION = 10
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

_NullableText = str | None
_NullableNumber = float | None
_NullableCount = int | None


class ColumnMeaning(NamedTuple):
    """The meaning of a column of ``Row``, and the frames of a report that have it."""

    meaning: str
    frames: str = ""


def required_column(meaning: str, frames: str = "") -> Mapping[str, ColumnMeaning]:
    """Return the metadata of a required field of ``Row``."""
    return {"column": ColumnMeaning(meaning, frames)}


def optional_column(meaning: str, frames: str = "", default: Any = None, *, compare: bool = True) -> Any:
    """Return an optional field of ``Row``."""
    return field(default=default, compare=compare, metadata=required_column(meaning, frames))


_STAGES, _NUMBERS, _PROPERTIES, _PAIRED = "results", "numbers", "properties", "results pairs"
_COMPARISON_FRAMES = "results pairs numbers"
_ALL_FRAMES = f"{_COMPARISON_FRAMES} properties"


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

    case: str = field(metadata=required_column("id of the case: its file, then its name", _ALL_FRAMES))
    operation: str = field(metadata=required_column(", ".join(OPERATIONS), _PAIRED))
    dtype: str = field(metadata=required_column("working dtype of inputs and results", _ALL_FRAMES))
    implementation: str = field(metadata=required_column("backend and mode", _ALL_FRAMES))
    comparison: ComparisonKind = field(
        metadata=required_column(
            "stage (against the exact answer), pair (against other), a number (printed, known, exact), or property"
        )
    )
    stage: str = field(
        metadata=required_column(
            "named intermediate, or derived quantity; empty where the whole case failed", _ALL_FRAMES
        )
    )
    verdict: str = field(metadata=required_column("one word: docs/reference/verdicts.md", _COMPARISON_FRAMES))
    xfail: bool = optional_column("an expected failure, does not fail a run", _ALL_FRAMES, default=False)
    other: _NullableText = optional_column("the implementation that it is compared with, and its environment", "pairs")
    called: _NullableText = optional_column("the document's own name for the stage", _NUMBERS)
    shape: _NullableText = optional_column("lengths of the stage's axes", _STAGES)
    index: _NullableText = optional_column("element where the two differ most, or the number's place", _ALL_FRAMES)
    value: _NullableNumber = optional_column("the implementation's number there", _COMPARISON_FRAMES)
    reference: _NullableNumber = optional_column("the number that it is compared with", _COMPARISON_FRAMES)
    reference_text: _NullableText = optional_column("the number as it is printed")
    exact: _NullableNumber = optional_column("the exact answer, rounded to float64", f"{_NUMBERS} {_PROPERTIES}")
    difference: _NullableNumber = optional_column("absolute difference of the two", _COMPARISON_FRAMES)
    half_unit: _NullableNumber = optional_column(
        "what the printed digits leave open on the value's side: half a unit of the last one if rounded", _NUMBERS
    )
    propagated: _NullableNumber = optional_column(
        "what the rounding of the case's inputs can move the number by", _NUMBERS
    )
    document_bound: _NullableNumber = optional_column(
        "largest error of the precision that the document was computed in; empty where none is declared", _NUMBERS
    )
    allowed: _NullableNumber = optional_column(
        "largest difference that agrees: an error bound or the sum of two; of a number, with its rounding",
        _COMPARISON_FRAMES,
    )
    first_bound: _NullableNumber = optional_column(
        "how far the first call's number may be from the exact answer", _PROPERTIES
    )
    second_bound: _NullableNumber = optional_column("how far the further calls' number may be from it", _PROPERTIES)
    against: _NullableText = optional_column(
        "exact or step: which comparison of a stage index, value, reference, difference and allowed are of", _STAGES
    )
    ratio: _NullableNumber = optional_column(
        "largest difference over what is allowed there, in the whole stage", _PAIRED
    )
    tier: _NullableText = optional_column(
        "within, warning (noisy), statistical or proven (wrong), against the exact answer", _STAGES
    )
    largest_z: _NullableNumber = optional_column("largest error in units of its statistical scale", _STAGES)
    mean_z: _NullableNumber = optional_column(
        "root mean square of the errors in units of their statistical scale", _STAGES
    )
    introduced_tier: _NullableText = optional_column(
        "the same tier for the step from the implementation's own previous stage", _STAGES
    )
    introduced_ratio: _NullableNumber = optional_column("the same ratio for that step", _STAGES)
    introduced_z: _NullableNumber = optional_column("the same largest z for that step", _STAGES)
    begins_at: _NullableText = optional_column("the first stage that is itself at fault in this case", _STAGES)
    differing: _NullableCount = optional_column("in how many elements some bits differ", _PROPERTIES)
    elements: _NullableCount = optional_column("how many elements were compared", _PROPERTIES)
    judged_rows: _NullableCount = optional_column(
        "query rows that were judged, where some stand for all; empty where all were", _STAGES
    )
    query_rows: _NullableCount = optional_column("query rows that the stage has, where some stand for all", _STAGES)
    unjudged: _NullableCount = optional_column(
        "elements (of the judged rows) that no exact answer was known of; of a pair, those of them that differ", _PAIRED
    )
    message: str = optional_column("what is wrong, in words", _ALL_FRAMES, default="")
    hint: _NullableText = optional_column("what would explain a misprint, and how a case declares it", _NUMBERS)
    lacks: _NullableText = optional_column(
        "what an implementation would need to support the case, comma-separated", _STAGES
    )
    padded: _NullableText = optional_column(
        "what the call was padded with, as the implementation requires; empty where it was not", _STAGES
    )
    seconds: _NullableNumber = optional_column(
        "how long the evaluation took, in its first row alone; measured, so no report but JUnit shows it", compare=False
    )
    diagnosis: _NullableText = optional_column(
        "what the implementation does instead: a name of docs/diagnoses.md; empty where that is not known", _STAGES
    )
    reason: _NullableText = optional_column("why the failure is expected", _COMPARISON_FRAMES)
    thread: _NullableText = optional_column("where that is discussed", _COMPARISON_FRAMES)
    empty_rows: _NullableText = optional_column(
        "what a query without a key gives (zero, uniform, nan), where nothing else differs from the case", _STAGES
    )

    property_name: str = optional_column("the property's name", _PROPERTIES, default="")
    variant: str = optional_column("which further calls were made", _PROPERTIES, default="")
    claim: str = optional_column(
        "what the implementation claims of the property; empty where it claims nothing", _PROPERTIES, default=""
    )

    @property
    def fails(self) -> bool:
        """True if it fails, expected or not; a property also fails if it is less than the claim."""
        if self.comparison == "property":
            return self.verdict not in OUTCOMES_MEETING_CLAIM[self.claim]
        return self.verdict not in HARMLESS_VERDICTS

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
_KIND_NAMES: Mapping[Any, Literal["text", "bool", "int", "float"]] = {bool: "bool", int: "int", float: "float"}


def _column_kind(annotation: Any) -> ColumnKind:
    """Return the type of a column on disk; it is nullable if None is allowed, and literals are texts."""
    members = get_args(annotation) or (annotation,)
    return ColumnKind(
        next((_KIND_NAMES[member] for member in members if member in _KIND_NAMES), "text"), NoneType in members
    )


ROW_SCHEMA: Schema = {name: _column_kind(annotation) for name, annotation in get_type_hints(Row).items()}


def frame_columns(frame: str, *first: str) -> tuple[str, ...]:
    """Return the columns of a frame of a report: ``first``, then the others in the order of ``Row``."""
    others = (name for name, column in COLUMNS.items() if frame in column.frames.split() and name not in first)
    return (*first, *others)


CHANGED_BY_DIAGNOSIS = ("verdict", "message", "begins_at", "empty_rows", "diagnosis")
"""Columns of a failing row that are rewritten when it has a diagnosis."""


def has_failure(rows: Iterable[Row]) -> bool:
    """Return whether any of the rows fails, expected or not."""
    return any(row.fails for row in rows)


def bound_array_name(rounding_model: str) -> str:
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
