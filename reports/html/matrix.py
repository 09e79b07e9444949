"""The verdict matrix: case by implementation, file by file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attncheck.reports.cells import Cell, CellRow, State, worst_cell
from attncheck.reports.frames import Column, Frames, rows_judged
from attncheck.reports.html.contents import LETTERS_PER_CELL, LETTERS_PER_ROW, Budget, urgent_first, within
from attncheck.reports.html.text import SHORT_DTYPES, SYMBOLS, Anchors
from attncheck.spec import DTYPES
from attncheck.wording import counted

NOT_RUN = "not run"


@dataclass(frozen=True)
class Part:
    """One word of a matrix cell, and the dtypes of which it is said; none where it is said of all."""

    dtypes: str
    short: str
    state: str
    symbol: str
    verdict: str
    text: str


@dataclass(frozen=True)
class MatrixCell:
    """One case on one implementation: one part where all dtypes are alike, else one per word."""

    anchor: str
    parts: tuple[Part, ...]
    is_uniform: bool


@dataclass(frozen=True)
class MatrixRow:
    """One case: its names, what it is filtered by, and its cells, None where an implementation did not run it."""

    case: str
    name: str
    anchor: str
    is_detailed: bool
    tags: str
    dtypes: str
    note: str
    cells: tuple[MatrixCell | None, ...]


@dataclass(frozen=True)
class FileRows:
    """The cases of one file."""

    file: str
    title: str
    anchor: str
    rows: tuple[MatrixRow, ...]
    left_out: int
    counts: str
    """How many cases and how many of them fail or are expected to, in words."""


def verdict_matrix(
    frames: Frames,
    columns: Sequence[Column],
    table: Mapping[str, CellRow],
    anchors: Anchors,
    detailed: Collection[str],
    budget: Budget,
) -> tuple[FileRows, ...]:
    """Return the files in order; above the budget, cases in which everything agrees are only counted."""
    notes = _notes(frames)
    letters = LETTERS_PER_ROW + LETTERS_PER_CELL * len(frames.columns)
    kept = within(urgent_first(table), lambda _: letters, budget.matrix_letters)
    files: dict[str, list[str]] = {}
    for case in table:
        files.setdefault(frames.cases[case]["file"], []).append(case)
    return tuple(
        FileRows(
            file=file,
            title=frames.cases[cases[0]]["title"],
            anchor=f"file-{number}",
            rows=tuple(
                _row(frames, columns, case, table[case], anchors, notes.get(case, ""), is_detailed=case in detailed)
                for case in cases
                if case in kept
            ),
            left_out=sum(case not in kept for case in cases),
            counts=_format_counts([table[case] for case in cases]),
        )
        for number, (file, cases) in enumerate(files.items(), start=1)
    )


def _row(
    frames: Frames,
    columns: Sequence[Column],
    case: str,
    row: CellRow,
    anchors: Anchors,
    note: str,
    *,
    is_detailed: bool,
) -> MatrixRow:
    record = frames.cases[case]
    present = {dtype for cells in row.values() for dtype in cells}
    return MatrixRow(
        case=case,
        name=record["name"],
        anchor=anchors.case(case),
        is_detailed=is_detailed,
        tags=" ".join(record["tags"]),
        dtypes=" ".join(dtype for dtype in DTYPES if dtype in present),
        note=note,
        cells=tuple(_cell(row.get(column), anchors.cell(case, column)) for column in columns),
    )


def _cell(cells: Mapping[str, Cell] | None, anchor: str) -> MatrixCell | None:
    if not cells:
        return None
    alike: dict[Cell, list[str]] = {}
    for dtype, cell in cells.items():
        alike.setdefault(cell, []).append(dtype)
    if len(alike) == 1:
        return MatrixCell(anchor, (_part([], *alike),), is_uniform=True)
    return MatrixCell(anchor, tuple(_part(dtypes, cell) for cell, dtypes in alike.items()), is_uniform=False)


def _part(dtypes: list[str], cell: Cell) -> Part:
    shortly = " ".join(SHORT_DTYPES.get(dtype, dtype) for dtype in dtypes)
    return Part(" ".join(dtypes), shortly, cell.state.value, SYMBOLS[cell.state], cell.word, cell.text)


def _notes(frames: Frames) -> dict[str, str]:
    """Say of each case in which some query rows stand for all how many."""
    rows = frames.results[frames.results["query_rows"].notna()].drop_duplicates("case")
    counts_of = zip(rows["case"], rows["judged_rows"], rows["query_rows"], strict=True)
    return {case: rows_judged(judged, queries) for case, judged, queries in counts_of}


def _format_counts(rows: list[CellRow]) -> str:
    states = Counter(max(_states(row), key=list(State).index, default=State.UNSUPPORTED) for row in rows)
    words = [counted(len(rows), "case")]
    words += [f"{states[state]:,} {word}" for state, word in _COUNTED.items() if states[state]]
    return ", ".join(words)


_COUNTED = {
    State.FAILING: "failing",
    State.MISPRINT: "with misprints",
    State.XPASS: "with records that no longer hold",
    State.XFAIL: "with expected failures",
}


def _states(row: CellRow) -> set[State]:
    return {worst_cell(cells).state for cells in row.values() if cells}
