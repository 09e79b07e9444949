"""Cells: the verdict of one case on one implementation in one dtype. Every matrix and every count is made of cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.common.wording import format_at_stage
from attncheck.reports.frames import (
    Column,
    Frames,
    are_wrong,
    cached_for_frames,
    case_sort_key,
    first_failing_stages,
    stage_sort_key,
)
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import Verdict

_CELL_COLUMNS = ["case", "environment", "implementation", "dtype"]


class State(StrEnum):
    """The state of a cell, from harmless to severe."""

    AGREE = "agree"
    ERRATUM = "erratum"
    """Agrees, except for numbers that the document prints for another call."""
    UNVERIFIED = "unverified"
    UNSUPPORTED = "unsupported"
    XFAIL = "xfail"
    XPASS = "xpass"
    """Agrees, but a recorded failure or erratum no longer happens."""
    MISPRINT = "misprint"
    """Agrees, but a document prints something else."""
    FAILING = "failing"
    """The implementation is wrong, or could not be run."""


FAILS_A_RUN = frozenset({State.XPASS, State.MISPRINT, State.FAILING})


@dataclass(frozen=True)
class Cell:
    """One case on one implementation in one dtype: the worst verdict, and the stage at which it begins."""

    state: State
    verdict: str
    stage: str
    """The first failing stage of a cell that fails a run; empty for other cells, and if the whole case failed."""

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
        """Return the word, and the first failing stage."""
        return format_at_stage(self.word, self.stage)


CellRow = dict[Column, dict[str, Cell]]
"""A case's cells by column, then by dtype in the order of ``DTYPES``; a column that did not run is left out.

Cases with equal cells share one row object.
"""


@cached_for_frames
def cell_table(frames: Frames) -> dict[str, CellRow]:
    """Return every case's cells, documents first, then file by file."""
    columns = {column.key: column for column in frames.columns}
    order = sorted(frames.results["case"].unique(), key=lambda case: (*case_sort_key(frames.cases[case]), case))
    frame = _cell_frame(frames)
    frame = frame.assign(
        case=pd.Index(order).get_indexer(pd.Index(frame["case"])),
        dtype=frame["dtype"].map({dtype: number for number, dtype in enumerate(DTYPES)}),
    )
    frame = frame[frame["case"] >= 0].sort_values(["case", "dtype"], kind="stable")
    kinds: dict[tuple[Any, ...], Cell] = {}  # hundreds of thousands of cells share few distinct ones
    rows: dict[tuple[Any, ...], CellRow] = {}  # many cases share equal rows

    def make_cell_row(cells: Iterable[tuple[Any, ...]]) -> CellRow:
        row: CellRow = {}
        for _, environment, implementation, dtype, *kind in cells:
            if (column := columns.get((environment, implementation))) is not None:
                if (cell := kinds.get(tuple(kind))) is None:
                    cell = kinds[tuple(kind)] = Cell(State(kind[0]), *kind[1:])
                row.setdefault(column, {})[DTYPES[dtype]] = cell
        return rows.setdefault(tuple((column, *cells.items()) for column, cells in row.items()), row)

    nothing: CellRow = {}
    table = dict.fromkeys(order, nothing)
    cells = zip(*(_share_equal_values(frame[name]) for name in frame), strict=True)
    table |= {order[position]: make_cell_row(of_case) for position, of_case in groupby(cells, key=itemgetter(0))}
    return table


def distinct_states(row: CellRow) -> set[State]:
    """Return the states of a case's cells."""
    return {cell.state for cells in row.values() for cell in cells.values()}


def is_unsupported_everywhere(row: CellRow) -> bool:
    """Return whether a case ran and no implementation supports it: it is counted, but not shown."""
    return distinct_states(row) == {State.UNSUPPORTED}


def _share_equal_values(column: pd.Series[Any]) -> list[Any]:
    """Return a column's values, with one object for all equal values."""
    codes, distinct = pd.factorize(column, use_na_sentinel=False)
    values = distinct.tolist()
    return [values[code] for code in codes]


_CELL_RANKS = (
    *(State.UNVERIFIED, State.AGREE, State.UNSUPPORTED, State.ERRATUM),
    *(State.XFAIL, State.XPASS, State.MISPRINT, State.FAILING),
)
"""States of rows: the state of a cell is the last one that any of its rows has."""
_HARMLESS_VERDICTS = (Verdict.UNVERIFIED, Verdict.AGREE, Verdict.UNSUPPORTED, Verdict.AGREE)
"""The verdicts of cells in the first states; in the others, the most severe verdict of the rows counts."""


def _cell_frame(frames: Frames) -> pd.DataFrame:
    """Return one row per cell: its keys, state, verdict, and its first failing stage if it fails a run."""
    wanted = [*_CELL_COLUMNS, "stage", "verdict", "xfail"]
    stages = frames.results[[*wanted, "begins_at"]].assign(is_number=False)
    numbers = frames.numbers[wanted].assign(begins_at=None, is_number=True)
    rows = pd.concat([stages, numbers.astype({"begins_at": object})], ignore_index=True) if len(numbers) else stages
    if rows.empty:
        return pd.DataFrame(columns=[*_CELL_COLUMNS, "state", "verdict", "stage"])
    rows = rows.assign(cell=rows.groupby(_CELL_COLUMNS, sort=False).ngroup())
    severity = {verdict.value: verdict.severity for verdict in Verdict}
    rows = rows.assign(rank=_row_ranks(rows), severity=rows["verdict"].map(severity))
    top = rows[rows["rank"].eq(rows.groupby("cell")["rank"].transform("max"))]
    keys = rows.drop_duplicates("cell")[[*_CELL_COLUMNS, "cell"]].set_index("cell").sort_index()
    worst = top.groupby("cell")[["rank", "severity"]].max()
    harmless = worst["rank"] < len(_HARMLESS_VERDICTS)
    begins = _first_failing_stages(top[top["rank"] > _CELL_RANKS.index(State.XFAIL)]).astype(object)
    words = worst["severity"].map(dict(enumerate(verdict.value for verdict in Verdict)))
    return keys.assign(
        state=worst["rank"].map(dict(enumerate(state.value for state in _CELL_RANKS))),
        verdict=words.mask(harmless, worst["rank"].map(dict(enumerate(word.value for word in _HARMLESS_VERDICTS)))),
        stage=begins.reindex(keys.index, fill_value=""),
    )


def _row_ranks(rows: pd.DataFrame) -> NDArray[np.int64]:
    """Return the place of every row's state among ``_CELL_RANKS``."""
    verdict, known, wrong = rows["verdict"], rows["xfail"].astype(bool), are_wrong(rows)
    fails, misprint = wrong & ~known, verdict.eq(Verdict.MISPRINT)
    expected = wrong & known & ~misprint
    # If a stage fails as expected, so do its numbers; the stage's verdict is more precise.
    follows = rows["is_number"] & rows["cell"].isin(rows.loc[expected & ~rows["is_number"], "cell"])
    # An unverified stage, or an unverified number, does not make a whole case unverified.
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
    return np.select([*states.values()], [_CELL_RANKS.index(state) for state in states], 0)


def _first_failing_stages(bad: pd.DataFrame) -> pd.Series[str]:
    """Return the first failing stage of each failing cell, in the order of computation."""
    stages = first_failing_stages(bad)
    ordered = sorted(set(stages), key=stage_sort_key)
    positions = stages.map({stage: position for position, stage in enumerate(ordered)})
    first = positions.groupby(bad["cell"]).min()
    return first.map(dict(enumerate(ordered)))
