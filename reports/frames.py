"""The tidy frames from which every report is made, and the kept arrays.

``results``       one row per environment, implementation, case, dtype and stage
``pairs``         one row per two implementations, case, dtype and stage
``numbers``       one row per printed, known or unprinted number and implementation
``environments``  one row per environment

Rows are split by what they compare, versions added, and sorted, so that the same results give the same bytes. Arrays
are read one case at a time, so that a report of a million rows reads only what it draws.

Parquet holds every text as it was read: one line, with escapes for control characters and direction marks. CSV is for
spreadsheets too, so there, in columns of text:

- a text that a spreadsheet would run as a formula (it begins with = + - @, a tab or a line break) gets an apostrophe
  before it, and so does such a beginning after a semicolon, a tab or a line break within a text; a number that is
  written as text, such as -0.25 in ``printed``, is unchanged;
- line breaks are single line feeds, inside quotes; other control characters and direction marks are U+FFFD;
- an empty text is a pair of quotes, and a missing value is an empty field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import product
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.common.errors import ResultsError
from attncheck.common.wording import (
    DocumentLayout,
    format_element,
    format_judged_rows,
    parse_index,
    stage_layout,
    truncate_list,
)
from attncheck.results.coverage import RequestedRun
from attncheck.results.format import COLUMNS as ROW_COLUMNS
from attncheck.results.format import ROW_SCHEMA, Row, frame_columns
from attncheck.results.parts import ArrayParts
from attncheck.results.reader import Run
from attncheck.results.records import CaseRecords
from attncheck.spec import DTYPES, stage_position
from attncheck.spec.verdicts import HARMLESS_VERDICTS, Verdict

Array = NDArray[Any]
ArrayKey = tuple[str, str, str]
"""environment, implementation, stage; ``EXACT``, ``INPUTS`` and ``bound_array_name(class)`` replace an
implementation"""


@dataclass(frozen=True)
class Merged:
    """Rows of all runs with the columns ``environment`` and ``other_environment``, and the runs themselves."""

    rows: pd.DataFrame
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()
    """Comparisons across the runs that could not be made, and why."""

    @property
    def cases(self) -> CaseRecords:
        """Every run's case records, by id."""
        return CaseRecords.join(run.cases for run in self.runs)


@dataclass(frozen=True)
class KeptArrays:
    """Arrays of runs, by the runs' labels and directories, read on request."""

    directories: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def _parts(self) -> Mapping[str, ArrayParts]:
        return {environment: ArrayParts(directory) for environment, directory in self.directories.items()}

    def arrays_of(self, case: str, dtype: str) -> dict[ArrayKey, Array]:
        """Return the kept arrays of one case in one dtype, read-only; empty if there are none.

        Unreadable arrays are left out: a report without a picture is better than no report.
        """
        arrays: dict[ArrayKey, Array] = {}
        for environment, parts in self._parts.items():
            with suppress(ResultsError):
                arrays |= {(environment, *key): array for key, array in parts.arrays_of(case, dtype).items()}
        return arrays


_HIDDEN_COLUMNS = {"environment", "complete"}


def environment_facts(frames: Frames) -> list[tuple[str, list[str]]]:
    """Return each fact's name and its text in every environment; unknown facts are empty."""
    environments = frames.environments
    return [
        (name.removeprefix("version_").replace("_", " "), [fact_text(value) for value in environments[name]])
        for name in environments.columns
        if name not in _HIDDEN_COLUMNS
    ]


def fact_text(value: Any) -> str:
    """Write a fact: a missing value as an empty text, and a whole number without a point."""
    if pd.isna(value):
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


@dataclass(frozen=True)
class Column:
    """One implementation in one environment: a column of every table that people read."""

    environment: str
    implementation: str
    version: str

    @property
    def key(self) -> tuple[str, str]:
        """The environment and the implementation, which identify a column."""
        return self.environment, self.implementation

    @property
    def release(self) -> str:
        """The version without the label of a build: 2.13.0 for 2.13.0+cpu and 2.13.0+cu130."""
        return self.version.partition("+")[0]

    @property
    def framework(self) -> str:
        """The name before the first point: the backend, or the module of a user's implementation."""
        return self.implementation.partition(".")[0]

    def title(self, *, with_environment: bool, with_version: bool = True) -> str:
        """Return the column's heading."""
        text = f"{self.implementation} {self.version}".rstrip() if with_version else self.implementation
        return f"{text} ({self.environment})" if with_environment else text


@dataclass(frozen=True, eq=False)
class Frames:
    """All facts of a report, as frames, with the records of the cases."""

    results: pd.DataFrame
    pairs: pd.DataFrame
    numbers: pd.DataFrame
    environments: pd.DataFrame
    columns: tuple[Column, ...]
    cases: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    """Units that did not run, and why, a line each."""
    has_faults: bool
    """Whether a case file could not be used."""
    problems: tuple[str, ...] = ()
    """The notes about missing units that were requested; a framework that is not installed is none."""
    announced: tuple[str, ...] = ()
    """The problems that a run prints when it begins."""
    requests: Mapping[str, RequestedRun] = field(default_factory=dict)
    """The request of every run, by environment."""
    sources: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """By environment and implementation: the file and line of the ``def`` of a user's function."""
    started: Mapping[str, str] = field(default_factory=dict)
    """The start of every run (UTC), by environment; empty if it is not recorded."""
    times: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Seconds of each evaluation. They are measured, so no table has them."""
    arrays: KeptArrays = field(default_factory=KeptArrays)
    """The kept inputs, stages, exact answers and bounds of the runs."""
    classes: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)
    """By environment and implementation, then by dtype: the rounding model that names the bounds among the arrays."""
    command_words: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    """By environment, then by implementation: the words that name it on a command line (``settings.commands``)."""

    properties: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """By environment: the rows of properties, if the run tested any."""

    @property
    def has_several_environments(self) -> bool:
        """Return whether names need their environment."""
        return len(self.environments) > 1

    def name_with_environment(self, name: str, environment: str) -> str:
        """Return an implementation's name, with its environment if there are several; empty for an empty name."""
        return f"{name} ({environment})" if name and environment and self.has_several_environments else name

    def title(self, column: Column, *, with_version: bool = True) -> str:
        """Return a column's heading."""
        return column.title(with_environment=self.has_several_environments, with_version=with_version)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the frames by name."""
        asked = [
            {"environment": label, **property_columns(row)} for label, rows in self.properties.items() for row in rows
        ]
        return {
            "results": self.results,
            "pairs": self.pairs,
            "numbers": self.numbers,
            "environments": self.environments,
            **({"properties": pd.DataFrame(asked)} if asked else {}),
        }


_PROPERTY_SOURCES = {"outcome": "verdict", "first": "value", "second": "reference"}
"""Columns of the properties' frame that have another name in ``Row``."""
PROPERTY_COLUMNS = frame_columns(
    "properties",
    *("implementation", "property_name", "case", "dtype", "variant", "outcome", "claim", "xfail", "stage", "index"),
    *("first", "second"),
)


def property_columns(row: Row) -> dict[str, Any]:
    """Return the values of a property's row, by the column of the properties' frame."""
    return {name: getattr(row, _PROPERTY_SOURCES.get(name, name)) for name in PROPERTY_COLUMNS}


Result = TypeVar("Result")
Item = TypeVar("Item")
Key = TypeVar("Key")


def cached_for_frames(make: Callable[[Frames], Result]) -> Callable[[Frames], Result]:
    """Cache the result of ``make`` for each frames, because each format of a report needs it."""
    made: WeakKeyDictionary[Frames, Result] = WeakKeyDictionary()

    @wraps(make)
    def remembered(frames: Frames) -> Result:
        if frames not in made:
            made[frames] = make(frames)
        return made[frames]

    return remembered


def select_failing(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that fail a run."""
    return _select_rows(frame, are_wrong(frame) & ~frame["xfail"].astype(bool))


def select_expected_failures(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that would fail a run if they were not expected, without documents' errata."""
    return _select_rows(frame, are_wrong(frame) & frame["xfail"].astype(bool) & frame["verdict"].ne(Verdict.MISPRINT))


def are_by_convention(expected: pd.DataFrame) -> pd.Series[bool]:
    """Return which expected failures are a convention for queries without a key, and not on a list."""
    if "empty_rows" not in expected:
        return pd.Series(False, index=expected.index)
    return expected["empty_rows"].notna() & expected["empty_rows"].ne("")


def _select_rows(frame: pd.DataFrame, are_meant: pd.Series[bool]) -> pd.DataFrame:
    """Return the marked rows; skip the search of each column if there are none, which is common."""
    return frame[are_meant] if are_meant.any() else frame.iloc[:0]


def are_wrong(frame: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows have a verdict that fails a run unless it is expected."""
    return ~frame["verdict"].isin(list(HARMLESS_VERDICTS))


def first_failing_stages(frame: pd.DataFrame) -> pd.Series[str]:
    """Return the stage at which each row's failure begins: an earlier stage, or the row's stage."""
    return frame["begins_at"].where(frame["begins_at"].notna(), frame["stage"])


def to_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows as plain records."""
    if frame.empty:
        return []
    names = [str(name) for name in frame.columns]
    columns = (_plain_values(column) for _, column in frame.items())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _plain_values(column: pd.Series[Any]) -> list[Any]:
    """Return a column's values as Python objects, with None for an empty cell among texts and whole numbers.

    Converting all texts of Arrow's memory at once takes a tenth of the time of converting them one by one.
    """
    if isinstance(column.dtype, pd.StringDtype) or column.dtype == object:
        texts = column.to_numpy(dtype=object, copy=True)
        texts[column.isna()] = None
        return texts.tolist()
    values = column.tolist()
    return [None if value is pd.NA else value for value in values] if column.hasnans else values


def rows_of_column(frame: pd.DataFrame, column: Column) -> pd.DataFrame:
    """Return the rows of an implementation in an environment."""
    return frame[frame["environment"].eq(column.environment) & frame["implementation"].eq(column.implementation)]


def split_by(frame: pd.DataFrame, keys: str | list[str]) -> dict[Any, pd.DataFrame]:
    """Return the parts of a frame by the value of a column, or the values of several."""
    return dict(iter(frame.groupby(keys)))


def group_by_key(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by key, in the order of each key's first item."""
    grouped: dict[Key, list[Item]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped


def case_sort_key(case: Mapping[str, Any]) -> tuple[bool, str, int]:
    """Sort key: documents first, then file by file, in the order of the file."""
    return (not is_document(case), case["file"], case["line"])


def is_document(case: Mapping[str, Any]) -> bool:
    """Return whether a case is transcribed from a published document."""
    return bool(case["source"]["kind"] == "document")


def document_layout(case: Mapping[str, Any], row: Mapping[str, Any]) -> DocumentLayout | None:
    """Return how the document of a case lays out the stage or the printed number of a row."""
    expected = [entry for entry in case["expected"] if entry["name"] == row["stage"]]
    shape = row.get("shape")
    lengths = shape.split("x") if isinstance(shape, str) and shape != "scalar" else ()
    shape_shown = tuple(map(int, lengths)) or next((tuple(entry["shape"]) for entry in expected), ())
    transposed = ((entry["name"], bool(entry["transpose"])) for entry in expected)
    return stage_layout(str(row["stage"]), shape_shown, transposed, is_document=is_document(case))


def element_text(case: Mapping[str, Any], row: Mapping[str, Any], name: str = "") -> str:
    """Write the element that a row names, in the shape in which the case's document counts, if it has one."""
    return format_element(row["index"] or "", name, document_layout(case, row))


def documents_of(frames: Frames) -> dict[str, list[Mapping[str, Any]]]:
    """Return the documents' cases, by file and in the order of the file."""
    return group_by_key(sorted(document_cases(frames).values(), key=case_sort_key), lambda case: str(case["file"]))


@cached_for_frames
def document_cases(frames: Frames) -> Mapping[str, Mapping[str, Any]]:
    """Return the cases that are transcribed from documents, by id."""
    return {identity: case for identity, case in frames.cases.items() if is_document(case)}


def are_under_erratum(frames: Frames, numbers: pd.DataFrame) -> pd.Series[bool]:
    """Return which numbers are printed under a recorded erratum."""
    kept = _recorded_errata(frames)
    flags = [key in kept for key in zip(numbers["case"], numbers["stage"], strict=True)]
    return pd.Series(flags, index=numbers.index, dtype=bool)


@cached_for_frames
def _recorded_errata(frames: Frames) -> frozenset[tuple[str, str]]:
    """Return the cases and stages of all recorded errata."""
    return frozenset(
        (identity, expected["name"])
        for identity, case in frames.cases.items()
        for expected in case["expected"]
        if "erratum" in expected
    )


def sampled_row_texts(frames: Frames) -> dict[str, str]:
    """Return how many query rows were judged, for each case of which only a sample was judged."""
    rows = frames.results[frames.results["query_rows"].notna()].drop_duplicates("case")
    counts_of = zip(rows["case"], rows["judged_rows"], rows["query_rows"], strict=True)
    return {case: format_judged_rows(judged, queries) for case, judged, queries in counts_of}


def count_numbers(numbers: pd.DataFrame) -> int:
    """Count numbers once, however many implementations and dtypes they were compared with."""
    return len(numbers[["case", "stage", "index"]].drop_duplicates())


def stage_sort_key(stage: str) -> tuple[int, str]:
    """Sort key: the order in which attention computes the stages, then names of quantities."""
    return (stage_position(stage), stage)


COLUMN_MEANINGS: Mapping[str, str] = {
    "environment": "label of the run",
    "version": "version of the implementation's framework",
    "basis": "printed by the document, known by derivation, or exact: computed by the document and not printed",
    "printed": ROW_COLUMNS["reference_text"].meaning,
    "outcome": "one word: bitwise, within bounds, nan, broken, failed, not judged, unsupported or xpass",
    "first": "what the first call gave there",
    "second": "what the further calls gave there, mapped back",
    **{name: column.meaning for name, column in ROW_COLUMNS.items() if column.frames},
}
"""The meaning of every column of the frames."""

RESULT_COLUMNS = frame_columns("results", "environment", "implementation", "version")
PAIR_COLUMNS = frame_columns(
    "pairs",
    *("case", "operation", "dtype", "stage", "environment", "implementation", "version"),
    *("other_environment", "other", "other_version"),
)
NUMBER_COLUMNS = frame_columns(
    "numbers",
    *("case", "dtype", "stage", "called", "basis", "index", "printed"),
    *("environment", "implementation", "version", "value"),
)
_COUNT_COLUMNS = [name for name, kind in ROW_SCHEMA.items() if kind.type == "int" and name in RESULT_COLUMNS]
_MAX_WARNINGS = 10
_NOTE, _PROBLEM, _ANNOUNCED = range(3)


def make_frames(merged: Merged) -> Frames:
    """Split merged rows into frames, add versions, and sort."""
    rows = merged.rows.copy(deep=False)
    versions = {
        (run.label, name): run.environment["versions"].get(package, "")
        for run in merged.runs
        for name, package in run.environment["implementations"].items()
    }
    for column, environment, implementation in (
        ("version", "environment", "implementation"),
        ("other_version", "other_environment", "other"),
    ):
        rows[column] = _look_up_pairs(rows[environment], rows[implementation], versions)
    rows["basis"] = rows["comparison"]
    rows["printed"] = rows["reference_text"]
    for column in _COUNT_COLUMNS:
        rows[column] = pd.to_numeric(rows[column]).astype("Int64")  # whole numbers beside empty cells
    kinds, notes = rows["comparison"], [note for run in merged.runs for note in _missing_unit_notes(run, merged)]
    return Frames(
        results=_select_and_sort(rows[kinds == "stage"], RESULT_COLUMNS),
        pairs=_select_and_sort(rows[kinds == "pair"], PAIR_COLUMNS),
        numbers=_select_and_sort(rows[kinds.isin(["printed", "known", "exact"])], NUMBER_COLUMNS),
        environments=_environment_frame(merged),
        columns=tuple(Column(*key, version) for key, version in versions.items()),
        cases=merged.cases,
        notes=(*(text for _, text in notes), *merged.notes, *_case_warnings(merged)),
        has_faults=any(run.environment["faults"] for run in merged.runs),
        problems=tuple(text for kind, text in notes if kind >= _PROBLEM),
        announced=tuple(text for kind, text in notes if kind == _ANNOUNCED),
        requests={
            run.label: RequestedRun.from_environment(run.environment, len(run.cases), run.stopped)
            for run in merged.runs
        },
        sources={
            (run.label, name): source
            for run in merged.runs
            for name, source in run.environment.get("sources", {}).items()
        },
        started={run.label: run.environment.get("started", "") for run in merged.runs},
        times=rows.loc[rows["seconds"].notna(), ["environment", "implementation", "case", "dtype", "seconds"]],
        arrays=KeptArrays({run.label: run.directory for run in merged.runs}),
        command_words={run.label: run.environment.get("again", {}) for run in merged.runs},
        properties={run.label: run.properties for run in merged.runs if run.properties},
        classes={(run.label, name): of for run in merged.runs for name, of in run.environment["classes"].items()},
    )


def _look_up_pairs(
    first: pd.Series[str], second: pd.Series[str], texts_by_pair: Mapping[tuple[str, str], str]
) -> pd.Series[str]:
    """Look up two columns' values together, each combination once."""
    first_codes, first_values = pd.factorize(first, use_na_sentinel=True)
    second_codes, second_values = pd.factorize(second, use_na_sentinel=True)
    texts = [texts_by_pair.get(pair) for pair in product([*first_values, None], [*second_values, None])]
    # A value that is absent has the code -1, the last place.
    codes = (first_codes % (len(first_values) + 1)) * (len(second_values) + 1) + second_codes % (len(second_values) + 1)
    return pd.Series(texts, dtype=first.dtype).take(codes).set_axis(first.index)


def _select_and_sort(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    names = ("case", "dtype", "environment", "implementation", "stage", "other_environment", "other", "basis", "index")
    orders: Mapping[str, Callable[[str], Any]] = {"dtype": DTYPES.index, "stage": stage_sort_key, "index": parse_index}
    keys = [_ranks(rows[name], orders.get(name, str)) for name in names]
    return rows[list(columns)].take(np.lexsort(keys[::-1])).reset_index(drop=True)


def _ranks(texts: pd.Series[str], key: Callable[[str], Any]) -> NDArray[np.intp]:
    """Return each text's rank by a key, which is computed once per distinct text; missing texts come first."""
    codes, names = pd.factorize(texts, use_na_sentinel=True)
    distinct = names.tolist()
    ranks = np.empty(len(distinct) + 1, dtype=np.intp)
    ranks[sorted(range(len(distinct)), key=lambda number: key(distinct[number]))] = np.arange(len(distinct))
    ranks[-1] = -1
    return ranks[codes]


def _environment_frame(merged: Merged) -> pd.DataFrame:
    rows = [
        {
            "environment": run.label,
            "python": environment["python"],
            **{f"version_{name}": version for name, version in sorted(environment["versions"].items())},
            **{name: environment[name] for name in ("platform", "processors", "threads_per_worker")},
            "cpu_features": " ".join(environment["cpu_features"]),
            "flags": " ".join(f"{name}={value}" for name, value in sorted(environment["flags"].items())),
            "command": environment["command"],
            "complete": run.is_complete,
            "exit_code": None if run.summary is None else run.summary["exit_code"],
        }
        for run in merged.runs
        for environment in [run.environment]
    ]
    return pd.DataFrame(rows).sort_values("environment", ignore_index=True)


def _case_warnings(merged: Merged) -> list[str]:
    """Return the distinct warnings of the cases."""
    lines = list(dict.fromkeys(line for case in merged.cases.values() for line in case.get("warnings", ())))
    return truncate_list(_MAX_WARNINGS, [f"warning: {line}" for line in lines], "and {} more warnings")


def _missing_unit_notes(run: Run, merged: Merged) -> Iterator[tuple[int, str]]:
    """Yield the units that did not run, and why, with at least ``_PROBLEM`` if they were requested.

    A framework that is not installed was not requested. A run prints ``_ANNOUNCED`` notes when it begins.
    """
    where, environment = f"{run.label}: " if len(merged.runs) > 1 else "", run.environment
    for name, reason in environment["left_out"].items():
        yield _NOTE, f"{where}{name} was left out: {reason}{_substitute_text(name, run, merged)}"
    missing = [(name, reason, _substitute_text(name, run, merged)) for name, reason in environment["missing"].items()]
    for name, reason, instead in sorted(missing, key=lambda entry: not entry[2]):
        yield _NOTE if instead else _ANNOUNCED, f"{where}{name} could not run: {reason}{instead}"
    yield from ((_ANNOUNCED, f"{where}bad case: {fault}") for fault in environment["faults"])
    if run.summary is None:
        yield _PROBLEM, f"{where}this run was interrupted, or is still going on: its results are not complete"
    yield from ((_PROBLEM, f"{where}partial results: {note}") for note in run.notes)


def _substitute_text(name: str, run: Run, merged: Merged) -> str:
    """Name another environment that ran a backend or implementation that this one lacks; empty if none did."""
    for candidate in merged.runs:
        names = [f"{implementation}." for implementation in candidate.environment["implementations"]]
        if candidate is not run and any(text.startswith(f"{name}.") for text in names):
            return f"; {candidate.label} ran it"
    return ""
