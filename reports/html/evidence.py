"""Evidence on the page: the worst elements and the map of errors of each cell that fails, and each document drawn.

Matrices are tables with coloured cells, which stay text; errors over bounds are maps, of a small array its numbers. Of
a document only what fails is open.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup, escape
from numpy.typing import NDArray

from attncheck.reading.shapes import show
from attncheck.reports import panels
from attncheck.reports.coverage import OF_DOCUMENTS, Misprint, NumberCounts, misprints, number_counts_of
from attncheck.reports.defects import address_of, commands_again
from attncheck.reports.documents import DocumentCase, DocumentPage, document_pages, expectation_part
from attncheck.reports.frames import (
    FAILS_A_RUN,
    CellRow,
    Column,
    Frames,
    State,
    cell_table,
    element_in,
    expected_failures,
    failing,
    is_unsupported,
    layout_in,
    records,
)
from attncheck.reports.html import contents
from attncheck.reports.sections import Block, Code, Figure, Inline, Key, Mark, Table, Text
from attncheck.results.format import EXACT, bound_name
from attncheck.wording import told_apart

Array = NDArray[Any]
_MAX_ROWS = 12
"""Stages and numbers that are spelt out; more follow from the same fault."""
_MAX_PRINTED = 50


@dataclass(frozen=True)
class Evidence:
    """Why something fails, or is expected to: a verdict, whose it is, and blocks that show it."""

    state: str
    text: str
    title: str
    note: str
    blocks: tuple[Block, ...]
    key: Key = ("", "", "", "")

    @property
    def figures(self) -> list[Figure]:
        """Return the pictures among the blocks."""
        return [block for block in self.blocks if isinstance(block, Figure)]


def make_evidence(
    frames: Frames, table: Mapping[str, CellRow], detailed: Collection[str], budget: contents.Budget
) -> tuple[dict[str, list[Evidence]], int]:
    """Return the evidence by case, and how many cells had to go without.

    Failures come first, of these one dtype of every case, and of those the cases as ``detailed`` has them.
    """
    order = {case: number for number, case in enumerate(detailed)}
    wanted = [
        ((cell.state is not State.FAILING, number, order.get(case, len(order))), case, column, dtype)
        for case, row in table.items()
        for column, cells in row.items()
        for number, (dtype, cell) in enumerate(cells.items())
        if cell.state in (State.FAILING, State.XFAIL)
    ]
    wanted.sort(key=lambda item: item[0])
    chosen = [item for item in wanted if item[1] in order][: budget.evidence]
    rows = _rows(frames, {item[1] for item in chosen})
    maps, scripts = (
        _Maps(frames, budget.map_letters),
        contents.Scripts(frames.arrays.directories, budget.script_letters),
    )
    found: dict[str, list[Evidence]] = {}
    for misprint in misprints(frames):
        found.setdefault(misprint.case, []).append(misprint_evidence(misprint))
    for _, case, column, dtype in chosen:
        rows_of_cell = rows.get((case, dtype, column.environment, column.implementation), [])
        cell = table[case][column][dtype]
        blocks = (
            *(Text(message, "message") for message in _messages(rows_of_cell)),
            *_reason(rows_of_cell),
            *_worst(rows_of_cell, frames.cases[case]),
            *maps.of(case, dtype, column, [str(row["stage"]) for row in rows_of_cell]),
            *_again(commands_again(frames, _evaluation(case, column, dtype), ("explain", "repro"))),
            *scripts.of(case, dtype, column),
        )
        key = (column.environment, column.implementation, case, dtype)
        item = Evidence(cell.state.value, cell.text, frames.title(column), dtype, blocks, key)
        found.setdefault(case, []).append(item)
    return found, len(wanted) - len(chosen)


def _evaluation(case: str, column: Column, dtype: str) -> dict[str, str]:
    return {
        "case": case,
        "environment": column.environment,
        "implementation": column.implementation,
        "dtype": dtype,
    }


def _rows(frames: Frames, cases: set[str]) -> dict[Any, list[dict[str, Any]]]:
    """Return the rows of stages and numbers that fail or are expected to, by case, dtype and implementation."""
    parts = []
    for frame in (frames.results, frames.numbers):
        own = frame[frame["case"].isin(cases)]
        bad, expected = failing(own), expected_failures(own)
        bad = bad[~bad["verdict"].isin(OF_DOCUMENTS)]  # has a card of its own, once for all implementations
        parts.append(pd.concat([bad, expected]).sort_index())
    parts[1] = parts[1].assign(against="number")
    rows = pd.concat([part for part in parts if len(part)]) if any(map(len, parts)) else parts[0]
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in records(rows):  # all at once: there may be a thousand cells
        found.setdefault((row["case"], row["dtype"], row["environment"], row["implementation"]), []).append(row)
    return found


def _messages(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return what the stages say; what numbers say stands in the table, unless they alone fail."""
    of_stages = [row for row in rows if row["against"] != "number"] or rows
    return tuple(dict.fromkeys(str(row["message"]) for row in of_stages if row["message"]))[:_MAX_ROWS]


def _reason(rows: list[dict[str, Any]]) -> Iterator[Text]:
    """Yield why a failure is expected, where one says so."""
    expected = next((row for row in rows if row["xfail"] and isinstance(row["reason"], str)), None)
    if expected is None:
        return
    thread = expected["thread"] if isinstance(expected["thread"], str) else ""
    where: Inline = (" (", Mark(thread, "link", address_of(thread)), ")") if thread else ""
    yield Text((Mark("Expected failure:", "strong"), f" {expected['reason']}", where))


def _again(commands: Sequence[str]) -> Iterator[Block]:
    """Yield how to see it again."""
    if commands:
        yield Text("See it again, in the folder where the check ran:", "how")
        yield Code(commands)
    else:
        more = "It was handed over as an object, which no command line can name; "
        yield Text((more, Mark("check(...).explain()"), " tells more."), "how")


_AGAINST = {
    "exact": "the exact answer",
    "step": "the exact step from its own previous stage",
    "number": "a number of the case",
}
_WORST = ("stage", "verdict", "element", "computed", "should be", "difference", "allowed", "compared with")


def _worst(rows: list[dict[str, Any]], case: Mapping[str, Any]) -> Iterator[Block]:
    """Yield a table of the element of each stage, or the number, at which the two differ most."""
    named = [_worst_cells(row, case) for row in rows if isinstance(row["index"], str)][:_MAX_ROWS]
    if named:
        yield Table("The worst element of each stage", _WORST, named, "lllrrrrl")
    if len(rows) > _MAX_ROWS:
        files = (Mark("results.csv"), " and ", Mark("numbers.csv"))
        yield Text((f"And {len(rows) - _MAX_ROWS} more stages or numbers, in ", *files, "."), "muted")


def _worst_cells(row: Mapping[str, Any], case: Mapping[str, Any]) -> tuple[Inline, ...]:
    against = f"the printed {row['printed']}" if _is_printed(row) else _AGAINST.get(row["against"], "")
    return (
        *(str(row["stage"]), str(row["verdict"]), element_in(case, row)),
        *told_apart(float(row["value"]), _should_be(row)),
        *(contents.short(row["difference"]), contents.short(row["allowed"]), against),
    )


def _is_printed(row: Mapping[str, Any]) -> bool:
    return row["against"] == "number" and isinstance(row.get("printed"), str)


def _should_be(row: Mapping[str, Any]) -> float:
    """Return the exact answer, of a printed number too; the number itself where there is none."""
    exact = row.get("exact")
    if row["against"] != "number" or exact is None or pd.isna(exact):
        return float(row["reference"])
    return float(exact)


class _Maps:
    """Draws maps of errors until the budget is spent."""

    def __init__(self, frames: Frames, most: int) -> None:
        self._frames = frames
        self._left = most

    def of(self, case: str, dtype: str, column: Column, stages: list[str]) -> Iterator[Figure]:
        """Yield a map for each stage whose array, exact answer and bound were kept."""
        if self._left <= 0:
            return
        kept = self._frames.arrays.of(case, dtype)
        name = self._frames.classes.get((column.environment, column.implementation), {}).get(dtype, "")
        for stage in dict.fromkeys(stages):
            keys = ((column.environment, of, stage) for of in (column.implementation, EXACT, bound_name(name)))
            arrays = [kept[key] for key in keys if key in kept]
            if len(arrays) == 3 and len({array.shape for array in arrays}) == 1 and self._left > 0:
                figure = _error_figure(stage, self._frames.cases[case], *arrays)
                self._left -= len(figure.markup)
                yield figure


def _error_figure(stage: str, case: Mapping[str, Any], computed: Array, exact: Array, bound: Array) -> Figure:
    """Show errors over bounds as maps, or, of a small array, the numbers themselves."""
    errors = error_ratio(computed, exact, bound)
    layout = layout_in(case, {"stage": stage, "shape": show(errors.shape)})
    words = panels.describe_errors(errors, "error over bound", layout)
    inside = compared_matrices(computed, exact, errors, is_document=layout is not None)
    inside = inside or error_pictures(errors, f"Map of {stage}", is_document=layout is not None)
    form = "<figure><figcaption><strong>{}</strong> {}</figcaption>{}</figure>"
    return Figure(words, Markup(form).format(stage, words, Markup().join(inside)))


def error_ratio(computed: NDArray[Any], reference: NDArray[Any], allowed: NDArray[Any]) -> NDArray[np.float64]:
    """Return the error of every element over what is allowed; 1 is the limit. All three have one shape.

    ``reference`` is the exact answer and ``allowed`` the bound, or another implementation's array and both bounds'
    sum. NaN where nothing was judged, or where the exact answer leaves open what is right; infinite where NaN or
    infinity stands in one of the two alone.
    """
    from attncheck.judging.compare import absolute_difference, differing_nonfinite, quotient

    ratio = quotient(absolute_difference(computed, reference), allowed)
    ratio[differing_nonfinite(computed, reference)] = np.inf
    ratio[np.isposinf(allowed) | np.isnan(allowed)] = np.nan
    return ratio


def misprint_evidence(misprint: Misprint) -> Evidence:
    """Return what is printed wrongly, and what it should be."""
    note = f"stage {misprint.stage}" if misprint.called != misprint.stage else ""
    blocks: tuple[Block, ...] = (Text(misprint.message, "message"),)
    if misprint.numbers:
        rows = [(f"[{place}]", printed, exact) for place, printed, exact in misprint.numbers[:_MAX_PRINTED]]
        table = Table("What is printed, and what it should be", ("element", "printed", "should be"), rows, "lrr")
        blocks = (Text("The exact answer itself misses what is printed, so no implementation can hold it."), table)
    if len(misprint.numbers) > _MAX_PRINTED:
        more = f"And {len(misprint.numbers) - _MAX_PRINTED} more, in "
        blocks = (*blocks, Text((more, Mark("numbers.csv"), "."), "muted"))
    return Evidence(misprint.verdict, misprint.verdict, misprint.called, note, blocks)


_BLACK = "#000000"


_MAX_PIXELS_WIDE = 480


def heat_of(panel: panels.Panel) -> Markup:
    """Return a matrix as a table with coloured cells, or, where it is too large for numbers, as a picture."""
    if panel.matrix.size and max(panel.matrix.shape) <= panels.MAX_ANNOTATED:
        return _table(panel)
    words = panels.describe(panel) if panel.matrix.size else f"{panel.title}: empty, shape {show(panel.matrix.shape)}"
    if not panel.matrix.size:
        return Markup('<figure class="drawing"><figcaption>{}</figcaption></figure>').format(words)
    width = panel.matrix.shape[1] * max(1, min(_MAX_PIXELS, _MAX_PIXELS_WIDE // max(panel.matrix.shape)))
    form = (
        '<figure class="drawing"><figcaption>{words}</figcaption>'
        '<img alt="{words}" width="{width}" src="data:image/png;base64,{data}"></figure>'
    )
    return Markup(form).format(words=words, width=width, data=b64encode(panels.png_of(panels.shades(panel))).decode())


def _table(panel: panels.Panel) -> Markup:
    rows, columns = (range(length) for length in panel.matrix.shape)
    colours = panels.shades(panel)
    axes = [f"{panel.row_axis} ↓" if panel.row_axis else "", f"{panel.column_axis} →" if panel.column_axis else ""]
    head = (Markup('<th scope="col">{}</th>').format(_name(panel.column_labels, column)) for column in columns)
    body = []
    for row in rows:
        cells = (_heat_cell(colours[row, column], *panels.cell_text(panel, row, column)) for column in columns)
        form = Markup('<tr><th scope="row">{}</th>{}</tr>')
        body.append(form.format(_name(panel.row_labels, row), Markup().join(cells)))
    form = Markup(
        '<table class="heat"><caption>{}</caption><thead><tr><td>{}</td>{}</tr></thead><tbody>{}</tbody></table>'
    )
    return form.format(panel.title, " ".join(filter(None, axes)), Markup().join(head), Markup().join(body))


def _heat_cell(colour: panels.Pixels, text: str, printed: str) -> Markup:
    """Return a cell: light ink is of class l, what is printed otherwise of class p."""
    kinds = [name for name, holds in (("l", panels.ink_on(colour) != _BLACK), ("p", bool(printed))) if holds]
    kind = Markup(' class="{}"').format(" ".join(kinds)) if kinds else ""
    also = Markup("<small>printed {}</small>").format(printed) if printed else ""
    return Markup('<td{} style="background:#{}">{}{}</td>').format(kind, bytes(colour).hex(), text, also)


def _name(labels: object, index: int) -> str:
    """Return a row's or column's name, its number where it has none."""
    return str(labels[index]) if isinstance(labels, list | tuple) and index < len(labels) else str(index)


Real = NDArray[np.float64]

_MAX_CELLS = 32
"""The page shows where an error lies; `attncheck show` draws larger matrices finer."""
_WIDTH, _MIN_PIXELS, _MAX_PIXELS = 220, 7, 20
"""Pixels: of a picture, if its cells are neither smaller nor larger than these."""


def error_pictures(errors: Real, title: str, *, is_document: bool = False) -> list[Markup]:
    """Return an SVG with its title per matrix of errors over bounds; what exceeds the bound is crossed out."""
    if not errors.size or np.isnan(errors).all():
        return []
    return [
        Markup('<div class="panel"><span>{}</span>{}</div>').format(matrix.title, _picture(matrix, title))
        for matrix in panels.error_matrices(errors, _MAX_CELLS, is_document=is_document)
    ]


_MOST_COMPARED = 64
"""Elements of an array that is small enough to be read."""


def compared_matrices(computed: Array, exact: Array, errors: Real, *, is_document: bool = False) -> list[Markup]:
    """Show a small array as computed, as it should be, and the difference, side by side; nothing of a larger one.

    There is a matrix for each index of the leading axes; elements that are wrong are marked.
    """
    if not 0 < errors.size <= _MOST_COMPARED:
        return []
    arrays = [np.atleast_2d(np.asarray(each, dtype=np.float64)) for each in (computed, exact, errors)]
    leading = arrays[0].shape[:-2]
    return [
        _side_by_side(name, *(array[index] for array in arrays))
        for index, name in panels.named_matrices(leading, is_document=is_document)
    ]


def _side_by_side(title: str, computed: Real, exact: Real, errors: Real) -> Markup:
    texts = np.empty((*computed.shape, 3), dtype=object)
    for place in np.ndindex(computed.shape):
        texts[place] = _beside(computed[place].item(), exact[place].item(), wrong=bool(errors[place] > 1))
    tables = [
        _small_table(f"{name}{title}", texts[..., number], errors > 1)
        for number, name in enumerate(("computed", "exact", "difference"))
    ]
    return Markup('<div class="side-by-side">{}</div>').format(Markup().join(tables))


def _small_table(caption: str, texts: NDArray[np.object_], wrong: NDArray[np.bool_]) -> Markup:
    def joined(form: str, parts: Iterable[tuple[Any, ...]]) -> Markup:
        return Markup().join(Markup(form).format(*part) for part in parts)

    head = joined('<th scope="col">{}</th>', ((column,) for column in range(texts.shape[1])))
    marked = np.where(wrong, "w", "")
    rows = (
        (number, joined('<td class="{}">{}</td>', zip(marked[number], row, strict=True)))
        for number, row in enumerate(texts)
    )
    form = '<table class="small"><caption>{}</caption><thead><tr><td></td>{}</tr></thead><tbody>{}</tbody></table>'
    return Markup(form).format(caption, head, joined('<tr><th scope="row">{}</th>{}</tr>', rows))


def _beside(computed: float, exact: float, *, wrong: bool) -> tuple[str, str, str]:
    """Write two numbers and their difference, with all digits that tell a wrong one from the right one."""
    texts = told_apart(computed, exact) if wrong else (f"{computed:.4g}", f"{exact:.4g}")
    return (*texts, f"{computed - exact:.2g}")


def _picture(matrix: panels.ErrorMatrix, title: str) -> Markup:
    rows, columns = matrix.errors.shape
    levels = _levels(matrix.errors)
    paths = [
        f'<path class="{name}" d="{path}"/>'
        for number, name in enumerate(
            [*(name for _, name, _ in contents.LEVELS), contents.BEYOND[0], contents.NOT_JUDGED[0]]
        )
        if (path := "".join(_runs(levels == number)))
    ]
    if crosses := "".join(
        f"M{x}.2 {y}.2l.6 .6m0-.6l-.6 .6" for y, x in zip(*np.nonzero(levels_beyond(levels)), strict=True)
    ):
        paths.append(f'<path class="ex" d="{crosses}"/>')
    if matrix.worst is not None:
        row, column = matrix.worst
        paths.append(f'<circle class="ew" cx="{column + 0.5}" cy="{row + 0.5}" r=".7"/>')
    label = escape(f"{title} {matrix.title}".strip())
    pixels = max(_MIN_PIXELS, min(_MAX_PIXELS, _WIDTH // max(rows, columns)))
    size = f'width="{(columns + 1) * pixels}" height="{(rows + 1) * pixels}"'
    box = f"-.5 -.5 {columns + 1} {rows + 1}"
    return Markup(f'<svg class="map" role="img" aria-label="{label}" viewBox="{box}" {size}>{"".join(paths)}</svg>')


def levels_beyond(levels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which levels exceed the bound."""
    return np.isin(levels, (2, 3))


def _levels(errors: Real) -> NDArray[np.int64]:
    """Return the level of every error; a limit belongs to the level below it."""
    limits = [limit for limit, _, _ in contents.LEVELS]
    levels = np.searchsorted(limits, np.nan_to_num(errors, nan=0.0, posinf=np.inf), side="left")
    return np.where(np.isnan(errors), len(limits) + 1, levels)


def _runs(chosen: NDArray[np.bool_]) -> Iterator[str]:
    """Write the cells as rectangles, neighbours in a row as one."""
    for y, row in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(np.int8), [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield f"M{start} {y}h{end - start}v1h-{end - start}z"


_MAX_IN_PART = 10
"""Computations of a document that stand together; a longer one is split."""


@dataclass(frozen=True)
class DrawnCase:
    """One computation of a document, whether anything of it fails, where its stages are, and its pictures."""

    case: DocumentCase
    fails: bool
    anchor: str
    inputs: tuple[Markup, ...]
    stages: tuple[Markup, ...]
    left_out: int
    """Pictures that the page has no room for."""
    has_numbers: bool
    """Whether it has room for the numbers."""
    expectations: tuple[Block, ...]


@dataclass(frozen=True)
class DrawnPart:
    """Computations that follow each other, in a long document with a title; ``failing`` of them fail."""

    title: str
    failing: int
    cases: tuple[DrawnCase, ...]


@dataclass(frozen=True)
class DrawnDocument:
    """One document, its anchor, and how many of its printed numbers hold, fail, or were not compared."""

    page: DocumentPage
    anchor: str
    counts: NumberCounts
    parts: tuple[DrawnPart, ...]

    @property
    def shown(self) -> int:
        """How many of its computations are laid out."""
        return sum(len(part.cases) for part in self.parts)

    @property
    def unsupported(self) -> int:
        """How many of its computations no implementation supports."""
        return len(self.page.cases) - self.shown

    @property
    def failing(self) -> int:
        """How many of its computations fail."""
        return sum(part.failing for part in self.parts)


def drawn_documents(frames: Frames, anchors: contents.Anchors, budget: contents.Budget) -> tuple[DrawnDocument, ...]:
    """Return every document with the computations that anybody supports.

    Numbers and pictures of what fails come first, of the rest as many as the budget has room for.
    """
    pages = document_pages(frames)
    failing, table = _failing(frames), cell_table(frames)
    artist = _Artist(budget)
    shown = [
        case
        for page in pages
        for case in page.cases
        if case.id in failing or not is_unsupported(table.get(case.id, {}))
    ]
    sizes = {case.id: _letters(case) for case in sorted(shown, key=lambda case: case.id not in failing)}
    with_numbers = contents.within(sizes, sizes.__getitem__, budget.number_letters)
    names = contents.unique_slugs(page.file.rpartition("/")[2].removesuffix(".yaml") for page in pages)
    found = []
    for page, name in zip(pages, names, strict=True):
        drawn = [
            _drawn(frames, case, anchors, artist, fails=case.id in failing, has_numbers=case.id in with_numbers)
            for case in page.cases
            if case.id in sizes
        ]
        counts = number_counts_of(frames, [case.id for case in page.cases])
        found.append(DrawnDocument(page, f"document-{name}", counts, tuple(_parts(drawn))))
    return tuple(found)


def _failing(frames: Frames) -> frozenset[str]:
    """Return the cases of documents of which a stage or a number fails."""
    of_stages = {
        case
        for case, row in cell_table(frames).items()
        if any(cell.state in FAILS_A_RUN for cells in row.values() for cell in cells.values())
    }
    of_numbers = {
        case.id
        for page in document_pages(frames)
        for case in page.cases
        if any(each.fails for each in case.expectations)
    }
    return frozenset(of_stages | of_numbers)


def _letters(case: DocumentCase) -> int:
    """Return how much markup a computation's numbers take."""
    inputs = sum(len(row) for given in case.given for row in given.rows)
    tables = [table for expected in case.expectations for table in expected.tables]
    numbers = sum(len(table.lines) * (3 + len(table.columns)) for table in tables)
    return contents.LETTERS_PER_INPUT * inputs + contents.LETTERS_PER_NUMBER * numbers


def _parts(cases: list[DrawnCase]) -> Iterator[DrawnPart]:
    starts = range(0, len(cases), _MAX_IN_PART)
    for start in starts:
        chosen = tuple(cases[start : start + _MAX_IN_PART])
        title = f"Computations {start + 1} to {start + len(chosen)} of {len(cases)}" if len(starts) > 1 else ""
        yield DrawnPart(title, sum(case.fails for case in chosen), chosen)


class _Artist:
    """Draws what fails, and of the rest, as much as the page has room for."""

    def __init__(self, budget: contents.Budget) -> None:
        self._left = {True: budget.failing_pictures, False: budget.pictures}

    def draw(self, case: DocumentCase, *, fails: bool) -> list[tuple[bool, Markup]]:
        drawn = [(drawing.is_input, panel) for drawing in case.drawings for panel in drawing.panels]
        chosen = drawn[: self._left[fails]]
        self._left[fails] -= len(chosen)
        return [(is_input, heat_of(panel)) for is_input, panel in chosen]


def _drawn(
    frames: Frames, case: DocumentCase, anchors: contents.Anchors, artist: _Artist, *, fails: bool, has_numbers: bool
) -> DrawnCase:
    heats = artist.draw(case, fails=fails)
    return DrawnCase(
        case,
        fails,
        anchors.case(case.id) if case.id in anchors.cases else "",
        tuple(heat for is_input, heat in heats if is_input),
        tuple(heat for is_input, heat in heats if not is_input),
        sum(len(drawing.panels) for drawing in case.drawings) - len(heats),
        has_numbers,
        tuple(
            expectation_part(each, with_environment=frames.has_several_environments, with_numbers=has_numbers)
            for each in case.expectations
        ),
    )
