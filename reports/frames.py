"""The tidy frames that every report is made of, and the cells and kept arrays beside them.

``results``       one row per environment, implementation, case, dtype and stage
``pairs``         one row per two implementations, case, dtype and stage
``numbers``       one row per printed, known or unprinted number and implementation
``environments``  one row per environment

``build_frames.py`` documents the columns; rows are sorted, so that the same results give the same bytes. A cell is the
verdict of one case on one implementation in one dtype: every matrix and every count is made of cells. Arrays are read
one case at a time, so that a report of a million rows reads only what it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, wraps
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.errors import ResultsError
from attncheck.results.coverage import RequestedRun
from attncheck.results.format import Row, columns_of
from attncheck.results.parts import ArrayParts
from attncheck.spec import DTYPES, stage_position
from attncheck.verdicts import Verdict
from attncheck.wording import DocumentLayout, layout_of, written_element

Array = NDArray[Any]
ArrayKey = tuple[str, str, str]
"""environment, implementation, stage; ``EXACT``, ``INPUTS`` and ``bound_name(class)`` take an implementation's place"""


@dataclass(frozen=True)
class KeptArrays:
    """Arrays of runs, by the runs' labels and directories; nothing is read before it is asked for."""

    directories: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def _parts(self) -> Mapping[str, ArrayParts]:
        return {environment: ArrayParts(directory) for environment, directory in self.directories.items()}

    def units(self) -> tuple[tuple[str, str], ...]:
        """Return the (case, dtype) of which something was kept, sorted; the arrays themselves are not read."""
        return tuple(sorted({unit for parts in self._parts.values() for unit in parts.units()}))

    def of(self, case: str, dtype: str) -> dict[ArrayKey, Array]:
        """Return what was kept of one case in one dtype, empty where nothing was; arrays are read-only.

        What cannot be read is as if it were not kept: a report without a picture says more than none.
        """
        found: dict[ArrayKey, Array] = {}
        for environment, parts in self._parts.items():
            with suppress(ResultsError):
                found |= {(environment, *key): array for key, array in parts.of(case, dtype).items()}
        return found


_SAID_ELSEWHERE = {"environment", "complete"}


def environment_facts(frames: Frames) -> list[tuple[str, list[str]]]:
    """Return each fact's name and its text in every environment; empty where it is not known."""
    environments = frames.environments
    return [
        (name.removeprefix("version_").replace("_", " "), [_text(value) for value in environments[name]])
        for name in environments.columns
        if name not in _SAID_ELSEWHERE
    ]


def _text(value: Any) -> str:
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
        """The environment and the implementation, which tell columns apart."""
        return self.environment, self.implementation

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
    """Everything that a report says, as frames, with the cases' own records beside them."""

    results: pd.DataFrame
    pairs: pd.DataFrame
    numbers: pd.DataFrame
    environments: pd.DataFrame
    columns: tuple[Column, ...]
    cases: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    """What did not run, and why, a line each."""
    has_faults: bool
    """Whether a case file could not be used."""
    is_incomplete: bool
    """Whether something that was asked for is not there; a framework that is simply not installed is not asked for."""
    problems: tuple[str, ...] = ()
    """Those of the notes that say what was asked for and is not there."""
    announced: tuple[str, ...] = ()
    """Those of the problems that a run tells when it begins."""
    asked: Mapping[str, RequestedRun] = field(default_factory=dict)
    """What every run was asked for, by environment."""
    sources: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """By environment and implementation: the file and line of an own implementation's ``def``."""
    started: Mapping[str, str] = field(default_factory=dict)
    """When every run began (UTC), by environment; empty where it does not say."""
    times: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Seconds that each evaluation took. They are measured, so they stand in none of the tables."""
    arrays: KeptArrays = field(default_factory=KeptArrays)
    """What the runs kept of inputs, stages, exact answers and bounds."""
    classes: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)
    """By environment and implementation, then by dtype: the rounding model that names the bounds among the arrays."""
    again: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    """By environment, then by implementation: the words that name it on a command line (``harness/commands.py``)."""

    properties: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """By environment: what was found of properties, where they were asked for."""

    @property
    def has_several_environments(self) -> bool:
        """Whether names have to say in which environment they are."""
        return len(self.environments) > 1

    def named(self, name: str, environment: str) -> str:
        """Return an implementation's name, with its environment where there are several; nothing for none."""
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


_OF_PROPERTIES = {"outcome": "verdict", "first": "value", "second": "reference"}
"""What columns of rows are called where they are of properties."""
PROPERTIES = columns_of(
    "properties",
    *("implementation", "property_name", "case", "dtype", "variant", "outcome", "claim", "xfail", "stage", "index"),
    *("first", "second"),
)


def property_columns(row: Row) -> dict[str, Any]:
    """Return what a row says of a property, by the column of the properties' frame."""
    return {name: getattr(row, _OF_PROPERTIES.get(name, name)) for name in PROPERTIES}


Made = TypeVar("Made")


def once_for_frames(make: Callable[[Frames], Made]) -> Callable[[Frames], Made]:
    """Let what is made of frames alone be made once: a report in several formats asks for it in each."""
    made: WeakKeyDictionary[Frames, Made] = WeakKeyDictionary()

    @wraps(make)
    def remembered(frames: Frames) -> Made:
        if frames not in made:
            made[frames] = make(frames)
        return made[frames]

    return remembered


def failing(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that fail a run."""
    return _those(frame, _goes_wrong(frame) & ~frame["xfail"].astype(bool))


def expected_failures(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that would fail a run, were they not expected; documents' errata are others."""
    return _those(frame, _goes_wrong(frame) & frame["xfail"].astype(bool) & frame["verdict"].ne(Verdict.MISPRINT))


def by_convention(expected: pd.DataFrame) -> pd.Series[bool]:
    """Return which expected failures are a convention for queries without a key, and on no list."""
    if "empty_rows" not in expected:
        return pd.Series(False, index=expected.index)
    return expected["empty_rows"].notna() & expected["empty_rows"].ne("")


def _those(frame: pd.DataFrame, are_meant: pd.Series[bool]) -> pd.DataFrame:
    """Return some rows; where there are none, as mostly, without looking through each column."""
    return frame[are_meant] if are_meant.any() else frame.iloc[:0]


def _goes_wrong(frame: pd.DataFrame) -> pd.Series[bool]:
    harmless = [verdict.value for verdict in Verdict if not verdict.exit_code]
    return ~frame["verdict"].isin(harmless)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows as plain records."""
    if frame.empty:
        return []
    names = [str(name) for name in frame.columns]
    columns = (_plain_values(column) for _, column in frame.items())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _plain_values(column: pd.Series[Any]) -> list[Any]:
    """Return a column's values as Python has them, as ``to_dict`` does: None for an empty cell among whole numbers.

    Texts come out of Arrow's memory all at once, which takes a tenth of the time of one after the other.
    """
    if isinstance(column.dtype, pd.StringDtype):
        return column.to_numpy(dtype=object).tolist()
    values = column.tolist()
    return [None if value is pd.NA else value for value in values] if column.hasnans else values


def of_column(frame: pd.DataFrame, column: Column) -> pd.DataFrame:
    """Return the rows of an implementation in an environment."""
    return frame[frame["environment"].eq(column.environment) & frame["implementation"].eq(column.implementation)]


def groups(frame: pd.DataFrame, keys: str | list[str]) -> dict[Any, pd.DataFrame]:
    """Return the parts of a frame by the value of a column, or the values of several."""
    return dict(iter(frame.groupby(keys)))


def case_order(case: Mapping[str, Any]) -> tuple[bool, str, int]:
    """Sort key: documents first, then file by file, in the order of the file."""
    return (not is_document(case), case["file"], case["line"])


def is_document(case: Mapping[str, Any]) -> bool:
    """Whether a case is transcribed from a published document."""
    return bool(case["source"]["kind"] == "document")


def layout_in(case: Mapping[str, Any], row: Mapping[str, Any]) -> DocumentLayout | None:
    """Return how the document of a case lays out what a row is of: a stage, or a number that it prints."""
    expected = [each for each in case["expected"] if each["name"] == row["stage"]]
    shape = row.get("shape")
    lengths = shape.split("x") if isinstance(shape, str) and shape != "scalar" else ()
    given = tuple(map(int, lengths)) or next((tuple(each["shape"]) for each in expected), ())
    transposed = ((each["name"], bool(each["transpose"])) for each in expected)
    return layout_of(str(row["stage"]), given, transposed, is_document=is_document(case))


def element_in(case: Mapping[str, Any], row: Mapping[str, Any], name: str = "") -> str:
    """Write the element that a row names, in the shape in which the case's document counts, if it has one."""
    return written_element(index_of(row), name, layout_in(case, row))


def index_of(row: Mapping[str, Any]) -> str:
    """Return the place that a row names; empty where it names none, which is NaN in a column without any."""
    return row["index"] if isinstance(row["index"], str) else ""


def documents_of(frames: Frames) -> dict[str, list[Mapping[str, Any]]]:
    """Return the documents' cases, by file and in the order of the file."""
    documents: dict[str, list[Mapping[str, Any]]] = {}
    for case in sorted(document_cases(frames).values(), key=case_order):
        documents.setdefault(case["file"], []).append(case)
    return documents


@once_for_frames
def document_cases(frames: Frames) -> Mapping[str, Mapping[str, Any]]:
    """Return the cases that are transcribed from documents, by id."""
    return {identity: case for identity, case in frames.cases.items() if is_document(case)}


def under_erratum(frames: Frames, numbers: pd.DataFrame) -> pd.Series[bool]:
    """Say of each number whether it is printed under a recorded erratum."""
    kept = _errata(frames)
    flags = [key in kept for key in zip(numbers["case"], numbers["stage"], strict=True)]
    return pd.Series(flags, index=numbers.index, dtype=bool)


@once_for_frames
def _errata(frames: Frames) -> frozenset[tuple[str, str]]:
    """Return the cases and stages of all recorded errata."""
    return frozenset(
        (identity, expected["name"])
        for identity, case in frames.cases.items()
        for expected in case["expected"]
        if "erratum" in expected
    )


def rows_judged(judged: int, queries: int) -> str:
    """Say how many query rows stand for all."""
    return f"{judged:,} of {queries:,} query rows judged"


def count_numbers(numbers: pd.DataFrame) -> int:
    """Count numbers once, however many implementations and dtypes they were compared with."""
    return len(numbers[["case", "stage", "index"]].drop_duplicates())


def stage_order(stage: str) -> tuple[int, str]:
    """Sort key: the order in which attention computes the stages, then names of quantities."""
    return (stage_position(stage), stage)


_KEYS = ["case", "environment", "implementation", "dtype"]


class State(StrEnum):
    """What a cell is to a reader, from harmless to severe."""

    AGREE = "agree"
    ERRATUM = "erratum"
    """Agrees, except for numbers that the document prints for another call."""
    UNVERIFIED = "unverified"
    UNSUPPORTED = "unsupported"
    XFAIL = "xfail"
    XPASS = "xpass"
    """Agrees, but something is recorded of it that is no longer so."""
    MISPRINT = "misprint"
    """Agrees, but a document prints something else."""
    FAILING = "failing"
    """The implementation is wrong, or could not be run."""


FAILS_A_RUN = frozenset({State.XPASS, State.MISPRINT, State.FAILING})


@dataclass(frozen=True)
class Cell:
    """One case on one implementation in one dtype: the worst verdict, and where it begins."""

    state: State
    verdict: str
    stage: str
    """Where a cell that fails a run begins; empty elsewhere, and where the whole case failed."""

    @property
    def word(self) -> str:
        """Return the verdict in a word or two."""
        if self.state is State.ERRATUM:
            return "agree (erratum)"
        if self.state is State.XFAIL:
            return "other convention" if self.verdict == Verdict.SEMANTIC else f"xfail {self.verdict}"
        return self.verdict

    @property
    def text(self) -> str:
        """Return the word, and where a failing cell begins."""
        return f"{self.word} at {self.stage}" if self.stage else self.word


CellRow = dict[Column, dict[str, Cell]]
"""A case's cells by column, then by dtype in the order of ``DTYPES``; a column that did not run is left out.

Cases whose cells are all alike share theirs.
"""


@once_for_frames
def cell_table(frames: Frames) -> dict[str, CellRow]:
    """Return every case's cells, documents first, then file by file."""
    columns = {column.key: column for column in frames.columns}
    order = _in_order(frames)
    found = _cells(frames)
    found = found.assign(
        case=pd.Index(order).get_indexer(pd.Index(found["case"])),
        dtype=found["dtype"].map({dtype: number for number, dtype in enumerate(DTYPES)}),
    )
    found = found[found["case"] >= 0].sort_values(["case", "dtype"], kind="stable")
    kinds: dict[tuple[Any, ...], Cell] = {}  # there are few, and hundreds of thousands of cells
    rows: dict[tuple[Any, ...], CellRow] = {}  # and many cases whose cells are all alike

    def row_of(cells: Iterable[tuple[Any, ...]]) -> CellRow:
        row: CellRow = {}
        for _, environment, implementation, dtype, *kind in cells:
            if (column := columns.get((environment, implementation))) is not None:
                if (cell := kinds.get(tuple(kind))) is None:
                    cell = kinds[tuple(kind)] = Cell(State(kind[0]), *kind[1:])
                row.setdefault(column, {})[DTYPES[dtype]] = cell
        return rows.setdefault(tuple((column, *cells.items()) for column, cells in row.items()), row)

    nothing: CellRow = {}
    table = dict.fromkeys(order, nothing)
    cells = zip(*(_values(found[name]) for name in found), strict=True)
    table |= {order[position]: row_of(of_case) for position, of_case in groupby(cells, key=itemgetter(0))}
    return table


def states_of(row: CellRow) -> set[State]:
    """Return the states of a case's cells."""
    return {cell.state for cells in row.values() for cell in cells.values()}


def is_unsupported(row: CellRow) -> bool:
    """Whether a case ran, and no implementation supports it: it is counted, and shown nowhere."""
    return states_of(row) == {State.UNSUPPORTED}


def _in_order(frames: Frames) -> list[str]:
    """Return the cases of which there are results, documents first, then file by file."""
    files: dict[tuple[bool, str], list[tuple[int, str]]] = {}
    for case in frames.results["case"].unique():
        not_document, file, line = case_order(frames.cases[case])
        files.setdefault((not_document, file), []).append((line, case))
    return [case for _, cases in sorted(files.items()) for _, case in sorted(cases)]


def _values(column: pd.Series[Any]) -> list[Any]:
    """Return a column's values, of which those that are equal are one object."""
    codes, distinct = pd.factorize(column, use_na_sentinel=False)
    values = distinct.tolist()
    return [values[code] for code in codes]


def worst_cell(cells: Mapping[str, Cell]) -> Cell:
    """Return the cell that stands for several dtypes in a count."""
    states = list(State)
    return max(cells.values(), key=lambda cell: (states.index(cell.state), Verdict(cell.verdict).severity))


_RANKS = (
    *(State.UNVERIFIED, State.AGREE, State.UNSUPPORTED, State.ERRATUM),
    *(State.XFAIL, State.XPASS, State.MISPRINT, State.FAILING),
)
"""States of rows: the last one that a cell has is the cell's."""
_WORDS_OF_HARMLESS = (Verdict.UNVERIFIED, Verdict.AGREE, Verdict.UNSUPPORTED, Verdict.AGREE)
"""The verdicts of the first ones; of the others the most severe of the rows counts."""


def _cells(frames: Frames) -> pd.DataFrame:
    """Return one row per cell: its keys, state, verdict, and the stage where it begins, if it fails a run."""
    wanted = [*_KEYS, "stage", "verdict", "xfail"]
    stages = frames.results[[*wanted, "begins_at"]].assign(is_number=False)
    numbers = frames.numbers[wanted].assign(begins_at=None, is_number=True)
    rows = pd.concat([stages, numbers.astype({"begins_at": object})], ignore_index=True) if len(numbers) else stages
    if rows.empty:
        return pd.DataFrame(columns=[*_KEYS, "state", "verdict", "stage"])
    rows = rows.assign(cell=rows.groupby(_KEYS, sort=False).ngroup())
    rows = rows.assign(rank=_ranks(rows), severity=rows["verdict"].map({each.value: each.severity for each in Verdict}))
    top = rows[rows["rank"].eq(rows.groupby("cell")["rank"].transform("max"))]
    keys = rows.drop_duplicates("cell")[[*_KEYS, "cell"]].set_index("cell").sort_index()
    found = top.groupby("cell")[["rank", "severity"]].max()
    harmless = found["rank"] < len(_WORDS_OF_HARMLESS)
    begins = _first_stages(top[top["rank"] > _RANKS.index(State.XFAIL)]).astype(object)
    words = found["severity"].map(dict(enumerate(each.value for each in Verdict)))
    return keys.assign(
        state=found["rank"].map(dict(enumerate(each.value for each in _RANKS))),
        verdict=words.mask(harmless, found["rank"].map(dict(enumerate(each.value for each in _WORDS_OF_HARMLESS)))),
        stage=begins.reindex(keys.index, fill_value=""),
    )


def _ranks(rows: pd.DataFrame) -> NDArray[np.int64]:
    """Return the place of every row's state among ``_RANKS``."""
    verdict, known, wrong = rows["verdict"], rows["xfail"].astype(bool), _goes_wrong(rows)
    fails, misprint = wrong & ~known, verdict.eq(Verdict.MISPRINT)
    expected = wrong & known & ~misprint
    # Numbers that do not hold follow from the stages, whose verdicts say more.
    follows = rows["is_number"] & rows["cell"].isin(rows.loc[expected & ~rows["is_number"], "cell"])
    # A stage of a name of its own, or a number that cannot be held, does not make a whole case unverified.
    judged = rows["stage"].ne("") & verdict.ne(Verdict.UNVERIFIED) & ~rows["is_number"]
    states = {
        State.XPASS: fails & verdict.eq(Verdict.XPASS),
        State.MISPRINT: fails & misprint,
        State.FAILING: fails,
        State.XFAIL: expected & ~follows,
        State.ERRATUM: misprint,
        State.UNSUPPORTED: verdict.eq(Verdict.UNSUPPORTED),
        State.AGREE: judged,
    }
    return np.select([*states.values()], [_RANKS.index(state) for state in states], 0)


def _first_stages(bad: pd.DataFrame) -> pd.Series[str]:
    """Return where each failing cell begins, in the order of computation."""
    stages = bad["begins_at"].where(bad["begins_at"].notna(), bad["stage"])
    ordered = sorted(set(stages), key=stage_order)
    positions = stages.map({stage: position for position, stage in enumerate(ordered)})
    first = positions.groupby(bad["cell"]).min()
    return first.map(dict(enumerate(ordered)))
