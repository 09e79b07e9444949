"""Cells: the verdict of one case on one implementation in one dtype, of which every matrix and every count is made."""

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

from attncheck.common.wording import at_stage
from attncheck.reports.frames import Column, Frames, begins_of, case_order, goes_wrong, once_for_frames, stage_order
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import Verdict

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
        return at_stage(self.word, self.stage)


CellRow = dict[Column, dict[str, Cell]]
"""A case's cells by column, then by dtype in the order of ``DTYPES``; a column that did not run is left out.

Cases whose cells are all alike share theirs.
"""


@once_for_frames
def cell_table(frames: Frames) -> dict[str, CellRow]:
    """Return every case's cells, documents first, then file by file."""
    columns = {column.key: column for column in frames.columns}
    order = sorted(frames.results["case"].unique(), key=lambda case: (*case_order(frames.cases[case]), case))
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


def _values(column: pd.Series[Any]) -> list[Any]:
    """Return a column's values, of which those that are equal are one object."""
    codes, distinct = pd.factorize(column, use_na_sentinel=False)
    values = distinct.tolist()
    return [values[code] for code in codes]


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
    verdict, known, wrong = rows["verdict"], rows["xfail"].astype(bool), goes_wrong(rows)
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
    stages = begins_of(bad)
    ordered = sorted(set(stages), key=stage_order)
    positions = stages.map({stage: position for position, stage in enumerate(ordered)})
    first = positions.groupby(bad["cell"]).min()
    return first.map(dict(enumerate(ordered)))
