"""The verdict matrix, the details of each case with every stage, and the maps of lengths, as the page shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from attncheck.reports.documents import Misprint, misprints
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
    worst_cell,
)
from attncheck.reports.html.contents import (
    LETTERS_PER_CELL,
    LETTERS_PER_ROW,
    SHORT_DTYPES,
    SYMBOLS,
    Anchors,
    Budget,
    options_text,
    shape_text,
    short,
    urgent_first,
    within,
)
from attncheck.reports.sections import Details, Figure, Text
from attncheck.spec import DTYPES
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


@dataclass(frozen=True)
class StageCell:
    """One stage: its largest error over the bound, accumulated and introduced, and a mark where that is notable."""

    accumulated: str
    introduced: str
    state: str
    mark: str


@dataclass(frozen=True)
class DtypeRow:
    """One implementation in one dtype: its verdict, and a cell per stage, or a message where it has no stage.

    ``padded`` says what its call was padded with, empty where it was made as the case has it.
    """

    dtype: str
    state: str
    symbol: str
    text: str
    padded: str
    message: str
    stages: tuple[StageCell | None, ...]


@dataclass(frozen=True)
class ImplementationRows:
    """One implementation's rows."""

    anchor: str
    title: str
    rows: tuple[DtypeRow, ...]


@dataclass(frozen=True)
class CaseDetails:
    """Everything about one case."""

    case: str
    name: str
    anchor: str
    location: str
    source: str
    operation: str
    tags: tuple[str, ...]
    options: tuple[str, ...]
    inputs: tuple[str, ...]
    notes: tuple[str, ...]
    in_short: str
    """What is wrong or expected to be, in a few words; empty where all agree."""
    state: str
    stages: tuple[str, ...]
    implementations: tuple[ImplementationRows, ...]
    misprints: tuple[Misprint, ...]
    evidence: tuple[Evidence, ...]


def case_details(
    frames: Frames,
    table: Mapping[str, CellRow],
    anchors: Anchors,
    detailed: Collection[str],
    evidence: Mapping[str, Sequence[Evidence]],
) -> Iterator[CaseDetails]:
    """Return the details of some cases, in the order of the matrix."""
    results = frames.results[frames.results["case"].isin(detailed)]
    marks = pd.Series("", index=results.index)
    marks[failing(results).index] = "failing"
    marks[expected_failures(results).index] = "xfail"
    printed: dict[str, list[Misprint]] = {}
    for misprint in misprints(frames):
        printed.setdefault(misprint.case, []).append(misprint)
    by_case: dict[str, list[Mapping[str, Any]]] = {}
    for item in records(results[["case", *_SHOWN]].assign(state=marks)):
        by_case.setdefault(item["case"], []).append(item)
    for case in table:
        if case in detailed:
            parts = _implementations(frames, case, table[case], by_case[case], anchors)
            evidence_of = (printed.get(case, ()), evidence.get(case, ()))
            yield _details(frames.cases[case], table[case], anchors, parts, evidence_of)


def _details(
    record: Mapping[str, Any],
    row: CellRow,
    anchors: Anchors,
    found: tuple[tuple[str, ...], tuple[ImplementationRows, ...]],
    evidence_of: tuple[Sequence[Misprint], Sequence[Evidence]],
) -> CaseDetails:
    source = record["source"]
    notes = [f"{each.verdict} in {each.called}" for each in evidence_of[0]]
    notes += [f"{column.implementation}: {cell.text}" for column, cells in row.items() for cell in _urgent(cells)]
    shown = list(dict.fromkeys(notes))
    return CaseDetails(
        case=record["id"],
        name=record["name"],
        anchor=anchors.case(record["id"]),
        location=f"{record['file']}:{record['line']}",
        source=", ".join([source["title"], *(source[name] for name in ("author", "section") if name in source)]),
        operation=record["operation"],
        tags=tuple(record["tags"]),
        options=(*options_text(record["options"]), *_storage(record)),
        inputs=tuple(f"{name} {shape_text(shape)}" for name, shape in record["inputs"].items()),
        notes=tuple(record["notes"]),
        in_short="; ".join(shown[:2]) + (f"; and {len(shown) - 2} more" if len(shown) > 2 else ""),
        state=_state(row),
        stages=found[0],
        implementations=found[1],
        misprints=tuple(evidence_of[0]),
        evidence=tuple(evidence_of[1]),
    )


def _storage(record: Mapping[str, Any]) -> list[str]:
    """Say how the inputs lie in memory, where a case says so."""
    notes = [f"inputs stored in {record['storage']}"] if record.get("storage") else []
    notes += [f"{name} in memory: {form}" for name, form in record.get("memory_layout", {}).items()]
    return [*notes, *(f"{name} has its heads merged" for name in record.get("merged", []))]


def _urgent(cells: Mapping[str, Cell]) -> list[Cell]:
    return [cell for cell in cells.values() if cell.state.value in ("failing", "xfail")]


def _state(row: CellRow) -> str:
    states = {cell.state.value for cells in row.values() for cell in cells.values()}
    return next((state for state in ("failing", "misprint", "xpass", "xfail") if state in states), "agree")


def _implementations(
    frames: Frames,
    case: str,
    row: CellRow,
    rows: Sequence[Mapping[str, Any]],
    anchors: Anchors,
) -> tuple[tuple[str, ...], tuple[ImplementationRows, ...]]:
    """Return the stages that anybody has, in order, and every implementation's rows."""
    stages = tuple(sorted({item["stage"] for item in rows if item["stage"]}, key=stage_order))
    found: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for item in rows:
        found.setdefault((item["environment"], item["implementation"], item["dtype"]), {})[item["stage"]] = item
    return stages, tuple(
        ImplementationRows(
            anchors.cell(case, column),
            frames.title(column),
            tuple(_dtype_row(dtype, cell, found.get(_key(column, dtype), {}), stages) for dtype, cell in cells.items()),
        )
        for column in frames.columns
        if (cells := row.get(column))
    )


def _key(column: Column, dtype: str) -> tuple[str, str, str]:
    return column.environment, column.implementation, dtype


def _dtype_row(dtype: str, cell: Cell, own: Mapping[str, Mapping[str, Any]], stages: Sequence[str]) -> DtypeRow:
    cells = tuple(_stage_cell(own[stage]) if stage in own else None for stage in stages)
    message = str(own[""]["message"]) if "" in own else ""
    padded = next((row["padded"] for row in own.values() if isinstance(row["padded"], str)), "")
    state = cell.state
    return DtypeRow(dtype, state.value, SYMBOLS[state], cell.text, padded, message, cells if any(cells) else ())


def _stage_cell(row: Mapping[str, Any]) -> StageCell:
    tiers = [tier for tier in (row["tier"], row["introduced_tier"]) if isinstance(tier, str) and tier != "within"]
    open_ = "?" if not pd.isna(row["unjudged"]) and row["unjudged"] else ""  # elements without an exact answer
    mark = (
        row["verdict"] if row["state"] else min(tiers, default=open_)
    )  # in the order of the alphabet, the worst first
    if row["verdict"] == Verdict.UNVERIFIED:
        return StageCell("?", "", "", "")
    return StageCell(short(row["ratio"], 2), short(row["introduced_ratio"], 2), row["state"], mark)


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
