"""The verdict matrix, the details of each case with every stage, and the maps of lengths, as the page shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from attncheck.reports.coverage import OF_DOCUMENTS as _OF_DOCUMENTS
from attncheck.reports.failure_patterns import CAUSALITY, WIDTHS, LengthMap, LengthView, length_maps
from attncheck.reports.frames import (
    Cell,
    CellRow,
    Column,
    Frames,
    State,
    expected_failures,
    failing,
    records,
    rows_judged,
    stage_order,
    states_of,
    worst_cell,
)
from attncheck.reports.html import contents
from attncheck.reports.sections import Details, Figure, Text
from attncheck.verdicts import Verdict
from attncheck.wording import counted

if TYPE_CHECKING:
    from attncheck.reports.html.evidence import Evidence


_SHOWN = [
    "environment",
    "implementation",
    "dtype",
    "stage",
    "verdict",
    "ratio",
    "tier",
    "introduced_ratio",
    "introduced_tier",
    "unjudged",
    "padded",
    "message",
]


class StageCell(NamedTuple):
    """One stage: its largest error over the bound, accumulated and introduced, and a mark where that is notable."""

    accumulated: str
    introduced: str
    state: str
    mark: str


StageRows = Mapping[tuple[str, str, str], Mapping[str, Mapping[str, Any]]]
"""By environment, implementation and dtype, then by stage: what a case came to."""


class CaseDetails(NamedTuple):
    """One case: its record, its cells, the stages that anybody has with their rows, and why what fails does."""

    record: Mapping[str, Any]
    row: CellRow
    stages: tuple[str, ...]
    rows: StageRows
    evidence: tuple[Evidence, ...]

    @property
    def in_short(self) -> str:
        """What is wrong or expected to be, in a few words; empty where all agree."""
        urgent = (State.FAILING, State.XFAIL)
        notes = [f"{item.text} in {item.title}" for item in self.evidence if item.state in _OF_DOCUMENTS]
        notes += [
            f"{column.implementation}: {cell.text}"
            for column, cells in self.row.items()
            for cell in cells.values()
            if cell.state in urgent
        ]
        shown = list(dict.fromkeys(notes))
        return "; ".join(shown[:2]) + (f"; and {len(shown) - 2} more" if len(shown) > 2 else "")

    @property
    def state(self) -> str:
        """Return the state that matters most."""
        states = states_of(self.row)
        return next((state for state in contents.URGENCY if state in states), State.AGREE).value

    @property
    def options(self) -> list[str]:
        """Return the options as they stand in the case, and how inputs lie in memory where it says so."""
        record = self.record
        notes = contents.options_text(record["options"])
        notes += [f"inputs stored in {record['storage']}"] if record.get("storage") else []
        notes += [f"{name} in memory: {form}" for name, form in record.get("memory_layout", {}).items()]
        return [*notes, *(f"{name} has its heads merged" for name in record.get("merged", []))]

    @property
    def inputs(self) -> list[str]:
        """Return the inputs with their shapes."""
        return [f"{name} {contents.shape_text(shape)}" for name, shape in self.record["inputs"].items()]

    def cells(self, column: Column, dtype: str) -> list[StageCell | None]:
        """Return a cell per stage of one implementation in one dtype; none where it has no stage."""
        own = self._rows(column, dtype)
        cells = [_stage_cell(own[stage]) if stage in own else None for stage in self.stages]
        return cells if any(cells) else []

    def message(self, column: Column, dtype: str) -> str:
        """Return why there is no stage."""
        own = self._rows(column, dtype)
        return str(own[""]["message"]) if "" in own else ""

    def padded(self, column: Column, dtype: str) -> str:
        """Return what the call was padded with, empty where it was made as the case has it."""
        return next((row["padded"] for row in self._rows(column, dtype).values() if isinstance(row["padded"], str)), "")

    def _rows(self, column: Column, dtype: str) -> Mapping[str, Mapping[str, Any]]:
        return self.rows.get((*column.key, dtype), {})


def case_details(
    frames: Frames,
    table: Mapping[str, CellRow],
    detailed: Collection[str],
    evidence: Mapping[str, Sequence[Evidence]],
) -> Iterator[CaseDetails]:
    """Yield the details of some cases, in the order of the matrix."""
    results = frames.results[frames.results["case"].isin(detailed)]
    marks = pd.Series("", index=results.index)
    marks[failing(results).index] = "failing"
    marks[expected_failures(results).index] = "xfail"
    by_case: dict[str, dict[tuple[str, str, str], dict[str, Mapping[str, Any]]]] = {}
    for item in records(results[["case", *_SHOWN]].assign(state=marks)):
        key = (item["environment"], item["implementation"], item["dtype"])
        by_case.setdefault(item["case"], {}).setdefault(key, {})[item["stage"]] = item
    for case in table:
        if case in detailed:
            found = {stage for rows in by_case[case].values() for stage in rows if stage}
            stages = tuple(sorted(found, key=stage_order))
            why = tuple(evidence.get(case, ()))
            yield CaseDetails(frames.cases[case], table[case], stages, by_case[case], why)


def _stage_cell(row: Mapping[str, Any]) -> StageCell:
    if row["verdict"] == Verdict.UNVERIFIED:
        return StageCell("?", "", "", "")
    tiers = [tier for tier in (row["tier"], row["introduced_tier"]) if isinstance(tier, str) and tier != "within"]
    open_ = "?" if not pd.isna(row["unjudged"]) and row["unjudged"] else ""  # elements without an exact answer
    # in the order of the alphabet, the worst first
    mark = row["verdict"] if row["state"] else min(tiers, default=open_)
    return StageCell(contents.short(row["ratio"], 2), contents.short(row["introduced_ratio"], 2), row["state"], mark)


def cells_alike(cells: Mapping[str, Cell]) -> list[tuple[Cell, str, str]]:
    """Return the different cells of a case, each with its dtypes in full and shortly."""
    alike: dict[Cell, list[str]] = {}
    for dtype, cell in cells.items():
        alike.setdefault(cell, []).append(dtype)
    return [
        (cell, " ".join(dtypes), " ".join(contents.SHORT_DTYPES.get(dtype, dtype) for dtype in dtypes))
        for cell, dtypes in alike.items()
    ]


def are_alike(row: CellRow, columns: Sequence[Column]) -> bool:
    """Whether several columns have the same cells of a case, which are then shown once."""
    first = row.get(columns[0]) if columns else None
    return len(columns) > 1 and all(row.get(column) == first for column in columns)


@dataclass(frozen=True)
class FileRows:
    """The cases of one file that are listed, and in words how many there are and how many of them fail."""

    file: str
    title: str
    anchor: str
    cases: tuple[str, ...]
    left_out: int
    counts: str


def verdict_matrix(frames: Frames, table: Mapping[str, CellRow], budget: contents.Budget) -> tuple[FileRows, ...]:
    """Return the files in order; above the budget, cases in which everything agrees are only counted."""

    def letters(case: str) -> int:
        cells = 1 if are_alike(table[case], frames.columns) else len(frames.columns)
        return contents.LETTERS_PER_ROW + contents.LETTERS_PER_CELL * cells

    kept = contents.within(contents.urgent_first(table), letters, budget.matrix_letters)
    files: dict[str, list[str]] = {}
    for case in table:
        files.setdefault(frames.cases[case]["file"], []).append(case)
    return tuple(
        FileRows(
            file=file,
            title=frames.cases[cases[0]]["title"],
            anchor=f"file-{number}",
            cases=tuple(case for case in cases if case in kept),
            left_out=sum(case not in kept for case in cases),
            counts=_format_counts([table[case] for case in cases]),
        )
        for number, (file, cases) in enumerate(files.items(), start=1)
    )


def sampled_cases(frames: Frames) -> dict[str, str]:
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


_CELL, _LEFT, _TOP = 14, 52, 44
"""Pixels: of a square, and of the room for lengths beside and above them."""


_LEGEND = (
    "A square: the chosen cases of these lengths. Crossed out: all of them fail; one stroke: some fail; plain: all "
    "pass. Dashed: Lq = Lk."
)


def drawn_lengths(frames: Frames) -> list[Details]:
    """Return a map for every implementation that fails, with switches that choose what it shows."""
    return [_drawn(frames, found, number) for number, found in enumerate(length_maps(frames), 1)]


def _drawn(frames: Frames, found: LengthMap, number: int) -> Details:
    title = frames.title(found.column, with_version=False)
    words = f"{found.failing.sum():,} of {counted(int(found.cases.sum()), 'case')} fail. {found.grid_words()}"
    switches = Markup().join(_switch(f"l{number}-{name}", name, choices) for name, choices in _switches(found))
    form = (
        '<div class="lengths">{}<div class="scroll" role="group" aria-label="Map of lengths at which {} fails" '
        'tabindex="0">{}</div></div>'
    )
    figure = Figure(found.words(), Markup(form).format(switches, title, _picture(found)))
    summary = f"Where {title} fails, by the lengths of queries and keys"
    return Details(summary, [Text(words), figure, Text(_LEGEND, "muted")], is_open=number == 1)


def _switch(group: str, name: str, choices: Sequence[tuple[str, str]]) -> Markup:
    """Return radio buttons, each with a class of the style sheet; the first is chosen."""
    form = Markup('<label><input type="radio" name="{}" class="{}"{}> {}</label>')
    buttons = (
        form.format(group, kind, "" if number else Markup(" checked"), text)
        for number, (kind, text) in enumerate(choices)
    )
    return Markup('<fieldset class="switch"><legend>{}</legend>{}</fieldset>').format(name, Markup().join(buttons))


def _switches(found: LengthMap) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Yield the switches that choose among several views."""
    kinds = [
        (f"c{each.causality}", f"{CAUSALITY[each.causality]}{_of(each)}") for each in found.views if not each.widths
    ]
    widths = [(f"w{each.widths}", f"{_width(each.widths)}{_of(each)}") for each in found.views if not each.causality]
    yield from ((name, tuple(choices)) for name, choices in (("cases", kinds), ("width", widths)) if len(choices) > 1)


def _of(view: LengthView) -> str:
    return f" ({view.failing.sum():,} of {view.cases.sum():,})"


def _width(number: int) -> str:
    """Name a range of widths."""
    if not number:
        return "all"
    if number > len(WIDTHS):
        return f"D > {WIDTHS[-1]}"
    return f"D ≤ {WIDTHS[0]}" if number == 1 else f"{WIDTHS[number - 2] + 1} to {WIDTHS[number - 1]}"


def _picture(found: LengthMap) -> Markup:
    rows, columns = found.cases.shape
    width, height = _LEFT + columns * _CELL + 4, _TOP + rows * _CELL + 4
    label = escape(f"{found.explained + '. ' if found.explained else ''}{found.words()}. {found.grid_words()}")
    views = [f'<g class="v v{each.causality}{each.widths}">{"".join(_squares(each))}</g>' for each in found.views]
    parts = [*_diagonal(found), *views, *_names(found), *_lines(found)]
    return Markup(
        f'<svg class="lengths" role="img" aria-label="{label}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">{"".join(parts)}</svg>'
    )


def _squares(found: LengthView) -> Iterator[str]:
    """Fill the squares by how many fail; what fails is crossed out, all of it or, where some pass, half."""
    some = (found.failing > 0) & (found.failing < found.cases)
    every = (found.failing > 0) & ~some
    side = _CELL - 2
    for name, chosen in (("lp", (found.cases > 0) & (found.failing == 0)), ("ls", some), ("lf", every)):
        if path := "".join(f"M{x} {y}h{side}v{side}h-{side}z" for x, y in _corners(chosen)):
            yield f'<path class="{name}" d="{path}"/>'
    inner = side - 6
    crosses = [f"M{x + 3} {y + 3}l{inner} {inner}" for x, y in _corners(some | every)]
    crosses += [f"M{x + 3 + inner} {y + 3}l-{inner} {inner}" for x, y in _corners(every)]
    if crosses:
        yield f'<path class="lx" d="{"".join(crosses)}"/>'


def _corners(chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Iterator[tuple[int, int]]:
    for row, column in zip(*np.nonzero(chosen), strict=True):
        yield _LEFT + int(column) * _CELL + 1, _TOP + int(row) * _CELL + 1


def _names(found: LengthMap) -> Iterator[str]:
    """Write every length beside its row or above its column."""
    yield f'<text x="2" y="{_TOP - 6}">Lq \N{DOWNWARDS ARROW}</text><text x="2" y="12">Lk \N{RIGHTWARDS ARROW}</text>'
    for row, length in enumerate(found.queries):
        yield f'<text class="r" x="{_LEFT - 5}" y="{_TOP + row * _CELL + 11}">{length}</text>'
    for column, length in enumerate(found.keys):
        x = _LEFT + column * _CELL + 11
        yield f'<text x="{x}" y="{_TOP - 4}" transform="rotate(-90 {x} {_TOP - 4})">{length}</text>'


def _diagonal(found: LengthMap) -> Iterator[str]:
    """Draw where as many queries as keys lie, between the lengths that both have."""
    low, high = (max(found.queries[0], found.keys[0]), min(found.queries[-1], found.keys[-1]))
    lengths = sorted(each for each in {*found.queries, *found.keys, low, high} if low <= each <= high)
    places = (np.interp(lengths, axis, np.arange(len(axis))) for axis in (found.keys, found.queries))
    x, y = (start + (place + 0.5) * _CELL for start, place in zip((_LEFT, _TOP), places, strict=True))
    if len(lengths) > 1:
        points = " ".join(f"{one:.0f},{other:.0f}" for one, other in zip(x, y, strict=True))
        yield f'<polyline class="ld" points="{points}"/>'


def _lines(found: LengthMap) -> Iterator[str]:
    if not found.tile:
        return
    rows, columns = found.cases.shape
    path = "".join(
        f"M{_LEFT + place * _CELL} {_TOP - 4}V{_TOP + rows * _CELL}" for place in _edges(found.keys, found.tile)
    )
    path += "".join(
        f"M{_LEFT - 4} {_TOP + place * _CELL}H{_LEFT + columns * _CELL}" for place in _edges(found.queries, found.tile)
    )
    if path:
        yield f'<path class="lt" d="{path}"/>'


def _edges(lengths: Sequence[int], tile: int) -> Iterator[int]:
    """Yield the places before which a tile ends: lengths up to it stand before, those past it behind."""
    for place in range(1, len(lengths)):
        if -(-lengths[place] // tile) != -(-lengths[place - 1] // tile):
            yield place
