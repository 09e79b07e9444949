"""Verdicts per case, implementation and dtype: the cells of which every matrix and every count is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.reports.frames import (
    Column,
    Frames,
    case_order,
    expected_failures,
    failing,
    once_for_frames,
    stage_order,
)
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict

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
    columns = {(column.environment, column.implementation): column for column in frames.columns}
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


def is_unsupported(row: CellRow) -> bool:
    """Whether a case ran, and no implementation supports it: it is counted, and shown nowhere."""
    states = {cell.state for cells in row.values() for cell in cells.values()}
    return states == {State.UNSUPPORTED}


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


def _cells(frames: Frames) -> pd.DataFrame:
    """Return one row per cell: its keys, state, verdict and stage. What is put later outweighs what was there."""
    rows = _rows_by_cell(frames)
    if rows.empty:
        return pd.DataFrame(columns=[*_KEYS, "state", "verdict", "stage"])
    keys = rows.drop_duplicates("cell")[[*_KEYS, "cell"]].set_index("cell").sort_index()
    columns = _Columns.of_unverified(len(keys))
    columns.put_harmless(rows)
    columns.put_expected(expected_failures(rows))
    columns.put_failing(failing(rows))
    return keys.assign(state=columns.state, verdict=columns.verdict, stage=columns.stage)


def _rows_by_cell(frames: Frames) -> pd.DataFrame:
    """Return the rows of stages and of numbers, each with the number of its cell and how severe it is."""
    wanted = [*_KEYS, "stage", "verdict", "xfail"]
    stages = frames.results[[*wanted, "begins_at"]].assign(is_number=False)
    numbers = frames.numbers[wanted].assign(begins_at=None, is_number=True)
    rows = pd.concat([stages, numbers.astype({"begins_at": object})], ignore_index=True) if len(numbers) else stages
    return rows.assign(cell=rows.groupby(_KEYS, sort=False).ngroup(), severity=_severities(rows["verdict"]))


@dataclass(frozen=True, eq=False)
class _Columns:
    """What is said of every cell, by its number."""

    state: NDArray[np.object_]
    verdict: NDArray[np.object_]
    stage: NDArray[np.object_]

    @classmethod
    def of_unverified(cls, count: int) -> _Columns:
        """Begin with cells of which nothing is known."""
        state, verdict, stage = State.UNVERIFIED.value, Verdict.UNVERIFIED.value, ""
        return cls(*(np.full(count, each, dtype=object) for each in (state, verdict, stage)))

    def put_harmless(self, rows: pd.DataFrame) -> None:
        """Say which cells agree, are not supported, or miss a number that is a recorded erratum."""
        # A stage of a name of its own, or a number that cannot be held, does not make a whole case unverified.
        own = rows["stage"].ne("") & rows["verdict"].ne(Verdict.UNVERIFIED) & ~rows["is_number"]
        for chosen, name, word in (
            (own, State.AGREE, Verdict.AGREE),
            (rows["verdict"].eq(Verdict.UNSUPPORTED), State.UNSUPPORTED, Verdict.UNSUPPORTED),
            (rows["verdict"].eq(Verdict.MISPRINT), State.ERRATUM, Verdict.AGREE),
        ):
            positions = rows.loc[chosen, "cell"].to_numpy()
            self.state[positions], self.verdict[positions] = name.value, word.value

    def put_expected(self, rows: pd.DataFrame) -> None:
        """Say which cells fail as expected."""
        # Numbers that do not hold follow from the stages, whose verdicts say more.
        has_stages = rows["cell"].isin(rows.loc[~rows["is_number"], "cell"])
        self._put_worst(rows[~(has_stages & rows["is_number"])], State.XFAIL)

    def put_failing(self, rows: pd.DataFrame) -> None:
        """Say which cells fail a run, and where they begin."""
        is_record = rows["verdict"].isin([State.XPASS.value, State.MISPRINT.value])
        for chosen, name in (
            (rows["verdict"].eq(State.XPASS.value), State.XPASS),
            (rows["verdict"].eq(State.MISPRINT.value), State.MISPRINT),
            (~is_record, State.FAILING),
        ):
            if chosen.any():
                self._put_worst(rows[chosen], name)
                first = _first_stages(rows[chosen])
                self.stage[first.index.to_numpy()] = first.to_numpy()

    def _put_worst(self, rows: pd.DataFrame, name: State) -> None:
        """Give the cells of some rows a state, and the most severe of the rows' verdicts."""
        if rows.empty:
            return
        most = rows.groupby("cell")["severity"].max()
        words = np.array([item.value for item in Verdict], dtype=object)
        self.state[most.index.to_numpy()] = name.value
        self.verdict[most.index.to_numpy()] = words[most.to_numpy()]


def _severities(verdicts: pd.Series[str]) -> pd.Series[int]:
    return verdicts.map({verdict.value: verdict.severity for verdict in Verdict})


def _first_stages(bad: pd.DataFrame) -> pd.Series[str]:
    """Return where each failing cell begins, in the order of computation."""
    stages = bad["begins_at"].where(bad["begins_at"].notna(), bad["stage"])
    ordered = sorted(set(stages), key=stage_order)
    positions = stages.map({stage: position for position, stage in enumerate(ordered)})
    first = positions.groupby(bad["cell"]).min()
    return first.map(dict(enumerate(ordered)))
