"""Evidence on the page: the worst elements and the map of errors of each cell that fails, and each document drawn.

Matrices are tables with coloured cells, which stay text; errors over bounds are maps, of a small array its numbers. Of
a document only what fails is open.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray

from attncheck.common.wording import counted, told_apart
from attncheck.judging.compare import absolute_difference, differing_nonfinite, quotient
from attncheck.reading.shapes import show
from attncheck.reports import panels
from attncheck.reports.cells import FAILS_A_RUN, CellRow, State, cell_table, is_unsupported, states_of
from attncheck.reports.coverage import OF_DOCUMENTS, Misprint, misprints, number_counts_of
from attncheck.reports.defects import address_of
from attncheck.reports.document_model import (
    Block,
    Code,
    Coloured,
    Details,
    Figure,
    Inline,
    Mark,
    Section,
    Table,
    Text,
    anchor_of,
    more_in,
)
from attncheck.reports.documents import NUMBERS_EXPLAINED, Computation, documents, expectation_parts, source_blocks
from attncheck.reports.failures import AGAIN, commands_again
from attncheck.reports.frames import (
    Column,
    Frames,
    by_key,
    element_in,
    expected_failures,
    failing,
    layout_in,
    records,
)
from attncheck.reports.html import contents
from attncheck.reports.html.contents import Evidence, drawn
from attncheck.results.format import EXACT, bound_name

Array = NDArray[Any]
_MAX_ROWS = 12
"""Stages and numbers that are spelt out; more follow from the same fault."""
_MAX_PRINTED = 50


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
    scripts = contents.script_names(frames.arrays.directories)
    map_letters, script_letters = budget.map_letters, budget.script_letters
    found: dict[str, list[Evidence]] = {}
    for misprint in misprints(frames):
        found.setdefault(misprint.case, []).append(misprint_evidence(misprint))
    for _, case, column, dtype in chosen:
        rows_of_cell = rows.get((case, dtype, *column.key), [])
        cell, stages = table[case][column][dtype], [str(row["stage"]) for row in rows_of_cell]
        maps = list(_maps_of(frames, case, dtype, column, stages)) if map_letters > 0 else []
        script = list(contents.script_of(scripts, case, dtype, column)) if script_letters > 0 else []
        map_letters -= sum(len(each.markup) for each in maps)
        script_letters -= sum(
            len(block.markup) for each in script for block in each.blocks if isinstance(block, Figure)
        )
        blocks = (
            *(Text(message, "message") for message in _messages(rows_of_cell)),
            *_reason(rows_of_cell),
            *_worst(rows_of_cell, frames.cases[case]),
            *maps,
            *_again(commands_again(frames, asdict(column) | {"case": case, "dtype": dtype}, AGAIN)),
            *script,
        )
        key = (*column.key, case, dtype)
        item = Evidence(cell.state.value, cell.text, frames.title(column), dtype, blocks, key)
        found.setdefault(case, []).append(item)
    return found, len(wanted) - len(chosen)


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
    # All at once: there may be a thousand cells.
    return by_key(records(rows), itemgetter("case", "dtype", "environment", "implementation"))


def _messages(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return what the stages say; what numbers say stands in the table, unless they alone fail."""
    of_stages = [row for row in rows if row["against"] != "number"] or rows
    return tuple(dict.fromkeys(str(row["message"]) for row in of_stages if row["message"]))[:_MAX_ROWS]


def _reason(rows: list[dict[str, Any]]) -> Iterator[Text]:
    """Yield why a failure is expected, where one says so."""
    expected = next((row for row in rows if row["xfail"] and row["reason"] is not None), None)
    if expected is None:
        return
    thread = expected["thread"] or ""
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
    named = [_worst_cells(row, case) for row in rows if row["index"] is not None][:_MAX_ROWS]
    if named:
        yield Table("The worst element of each stage", _WORST, named, "lllrrrrl")
    if len(rows) > _MAX_ROWS:
        yield more_in(f"{len(rows) - _MAX_ROWS} more stages or numbers", "results.csv", "numbers.csv", kind="muted")


def _worst_cells(row: Mapping[str, Any], case: Mapping[str, Any]) -> tuple[Inline, ...]:
    is_number, exact, printed = row["against"] == "number", row.get("exact"), row.get("printed")
    against = f"the printed {printed}" if is_number and printed is not None else _AGAINST.get(row["against"], "")
    # A number is shown beside the exact answer too, and stands itself where there is none.
    should_be = exact if is_number and exact is not None and not pd.isna(exact) else row["reference"]
    return (
        *(str(row["stage"]), str(row["verdict"]), element_in(case, row)),
        *told_apart(float(row["value"]), float(should_be)),
        *(contents.short(row["difference"]), contents.short(row["allowed"]), against),
    )


def _maps_of(frames: Frames, case: str, dtype: str, column: Column, stages: Sequence[str]) -> Iterator[Figure]:
    """Yield a map for each stage whose array, exact answer and bound were kept."""
    kept, name = frames.arrays.of(case, dtype), frames.classes.get(column.key, {}).get(dtype, "")
    for stage in dict.fromkeys(stages):
        keys = ((column.environment, of, stage) for of in (column.implementation, EXACT, bound_name(name)))
        arrays = [kept[key] for key in keys if key in kept]
        if len(arrays) == 3 and len({array.shape for array in arrays}) == 1:
            yield _error_figure(stage, frames.cases[case], *arrays)


def _error_figure(stage: str, case: Mapping[str, Any], computed: Array, exact: Array, bound: Array) -> Figure:
    """Show errors over bounds as maps, or, of a small array, the numbers themselves."""
    errors = error_ratio(computed, exact, bound)
    layout = layout_in(case, {"stage": stage, "shape": show(errors.shape)})
    words = panels.describe_errors(errors, "error over bound", layout)
    compared = _compared(computed, exact, errors, is_document=layout is not None)
    maps = [] if compared else _maps(errors, is_document=layout is not None)
    return Figure(words, drawn("errors", stage, words, compared, maps))


def error_ratio(computed: NDArray[Any], reference: NDArray[Any], allowed: NDArray[Any]) -> NDArray[np.float64]:
    """Return the error of every element over what is allowed; 1 is the limit. All three have one shape.

    ``reference`` is the exact answer and ``allowed`` the bound, or another implementation's array and both bounds'
    sum. NaN where nothing was judged, or where the exact answer leaves open what is right; infinite where NaN or
    infinity stands in one of the two alone.
    """
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
        more = f"{len(misprint.numbers) - _MAX_PRINTED} more"
        blocks = (*blocks, more_in(more, "numbers.csv", kind="muted"))
    return Evidence(misprint.verdict, misprint.verdict, misprint.called, note, blocks)


_MAX_PIXELS_WIDE = 480


def heat_of(panel: panels.Panel) -> Markup:
    """Return a matrix as a table with coloured cells, or, where it is too large for numbers, as a picture."""
    pixels = panels.shades(panel) if panel.matrix.size else np.zeros((0, 0, 3), np.uint8)
    if panel.matrix.size and max(panel.matrix.shape) <= panels.MAX_ANNOTATED:
        cells = [
            [
                (*panels.cell_text(panel, row, column), bytes(pixel).hex(), panels.ink_on(pixel))
                for column, pixel in line
            ]
            for row, line in enumerate(map(enumerate, pixels))
        ]
        return drawn("heat", panel, cells)
    if not panel.matrix.size:
        return drawn("picture", f"{panel.title}: empty, shape {show(panel.matrix.shape)}", 0, "")
    width = panel.matrix.shape[1] * max(1, min(_MAX_PIXELS, _MAX_PIXELS_WIDE // max(panel.matrix.shape)))
    return drawn("picture", panels.describe(panel), width, b64encode(panels.png_of(pixels)).decode())


Real = NDArray[np.float64]

_MAX_CELLS = 32
"""The page shows where an error lies; `attncheck show` draws larger matrices finer."""
_WIDTH, _MIN_PIXELS, _MAX_PIXELS = 220, 7, 20
"""Pixels: of a picture, if its cells are neither smaller nor larger than these."""


_MOST_COMPARED = 64
"""Elements of an array that is small enough to be read."""


def _compared(
    computed: Array, exact: Array, errors: Real, *, is_document: bool
) -> list[tuple[str, list[list[tuple[tuple[str, str, str], bool]]]]]:
    """Write a small array as computed, as it should be, and the difference; nothing of a larger one.

    There is a matrix for each index of the leading axes; elements that are wrong are marked.
    """
    if not 0 < errors.size <= _MOST_COMPARED:
        return []
    arrays = [np.atleast_2d(np.asarray(each, dtype=np.float64)) for each in (computed, exact, errors)]
    return [
        (
            name,
            [
                [(_beside(one, other, wrong=error > 1), error > 1) for one, other, error in zip(*row, strict=True)]
                for row in zip(*(array[index].tolist() for array in arrays), strict=True)
            ],
        )
        for index, name in panels.named_matrices(arrays[0].shape[:-2], is_document=is_document)
    ]


def _beside(computed: float, exact: float, *, wrong: bool) -> tuple[str, str, str]:
    """Write two numbers and their difference, with all digits that tell a wrong one from the right one."""
    texts = told_apart(computed, exact) if wrong else (f"{computed:.4g}", f"{exact:.4g}")
    return (*texts, f"{computed - exact:.2g}")


def _maps(errors: Real, *, is_document: bool) -> Iterator[tuple[object, ...]]:
    """Yield what is drawn of each matrix: cells by level, neighbours in a row as one; what exceeds is crossed out."""
    if not errors.size or np.isnan(errors).all():
        return
    for matrix in panels.error_matrices(errors, _MAX_CELLS, is_document=is_document):
        rows, columns = matrix.errors.shape
        number = np.searchsorted(contents.LIMITS, np.nan_to_num(matrix.errors, nan=0.0, posinf=np.inf))
        number[np.isnan(matrix.errors)] = len(contents.LIMITS) + 1
        levels = [(name, list(_runs(number == level))) for level, name in enumerate(contents.LEVELS)]
        beyond = np.argwhere(matrix.errors > 1).tolist()
        pixels = max(_MIN_PIXELS, min(_MAX_PIXELS, _WIDTH // max(rows, columns)))
        yield matrix.title, (rows, columns), pixels, levels, beyond, matrix.worst


def _runs(chosen: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Yield the row, the start and the length of neighbours."""
    for y, row in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(np.int8), [0]))))
        yield from ((y, start, end - start) for start, end in edges.reshape(-1, 2).tolist())


_MAX_IN_PART = 10
"""Computations of a document that stand together; a longer one is split."""


class DrawnDocuments:
    """Documents on the page: beside the numbers their inputs, pictures and links, as far as there is room for them.

    Numbers and pictures of what fails come first. What no implementation supports is counted alone.
    """

    def __init__(self, frames: Frames, linked: Collection[str], budget: contents.Budget) -> None:
        self._frames, self._linked, self._every = frames, linked, documents(frames)
        table = cell_table(frames)
        kept = {case for case in table if not is_unsupported(table[case])}
        self._failing = {case for case, row in table.items() if states_of(row) & FAILS_A_RUN}
        self._failing |= {each.id for cases in self._every.values() for each in cases if each.fails}
        kept |= self._failing
        self._shown = {name: [each for each in cases if each.id in kept] for name, cases in self._every.items()}
        shown = [each for cases in self._shown.values() for each in cases]
        first = sorted(shown, key=lambda each: each.id not in self._failing)
        sizes = {each.id: contents.LETTERS_PER_NUMBER * sum(map(len, each.rows.values())) for each in first}
        self._with_numbers = contents.within(sizes, sizes.__getitem__, budget.number_letters)
        self._left = {True: budget.failing_pictures, False: budget.pictures}
        self._are_late = len(shown) > budget.computations

    def section(self) -> Section:
        """Return every document with the computations that anybody supports."""
        blocks: list[Block] = [Text(NUMBERS_EXPLAINED)]
        if left := sum(map(len, self._every.values())) - sum(map(len, self._shown.values())):
            text = f"{left:,} computation{'s' if left > 1 else ''} that no implementation supports "
            blocks.append(Text(f"{text}{'are' if left > 1 else 'is'} left out."))
        blocks += [self._index(), *(self._document(name, cases) for name, cases in self._shown.items() if cases)]
        return Section("Documents", "documents", blocks)

    def _index(self) -> Table:
        """Count the printed numbers of each document, each once."""
        rows: list[list[Inline]] = []
        for name, cases in self._every.items():
            of = number_counts_of(self._frames, [each.id for each in cases])
            counts = (of.printed, of.hold, of.misprints, of.missed, of.unverified, of.errata)
            title = Mark(cases[0].case["title"], "link", f"#{anchor_of('document', name)}")
            numbers = (f"{count:,}" if count else Coloured(contents.NOTHING, "none") for count in counts)
            rows += [[title, *numbers]] if self._shown[name] else []
        states = (State.AGREE, State.MISPRINT, State.FAILING, State.UNVERIFIED, "errata")
        kinds = map(Mark, ("hold", "misprint", "missed", "unverified", "erratum"), states)
        caption = "Printed numbers, each counted once"
        return Table(caption, ["document", "printed", *kinds], rows, "lrrrrrr", "counts index")

    def _document(self, name: str, cases: Sequence[Computation]) -> Details:
        """Return one document; a long one is split into parts."""
        shown = [self._computation(each) for each in cases]
        parts: list[Block] = []
        for start in range(0, len(shown), _MAX_IN_PART):
            chosen = shown[start : start + _MAX_IN_PART]
            title = f"Computations {start + 1} to {start + len(chosen)} of {len(shown)}:"
            parts.append(Details(title, chosen, *_failing(chosen), "part"))
        blocks = [*source_blocks(cases[0].case), *(parts if len(parts) > 1 else shown)]
        return Details(cases[0].case["title"], blocks, *_failing(shown), "pages", 3, anchor_of("document", name))

    def _computation(self, found: Computation) -> Details:
        case, fails = found.case, found.id in self._failing
        has_numbers, code = found.id in self._with_numbers, Mark(f"attncheck show {case['id']}")
        panels = [(drawing.is_input, panel) for drawing in found.drawings for panel in drawing.panels]
        chosen = panels[: self._left[fails]]
        self._left[fails] -= len(chosen)
        blocks: list[Block] = [Text(note) for note in found.notes]
        blocks += [Details("Its inputs, in numbers", inputs)] if has_numbers and (inputs := _inputs(found)) else []
        for is_input, words in ((True, "Inputs"), (False, "What is computed")):
            if pictures := [heat_of(panel) for of, panel in chosen if of is is_input]:
                blocks.append(Figure(words, drawn("pictures", words, case["name"], pictures)))
        if left := len(panels) - len(chosen):
            why = "" if fails else ", since nothing fails here"
            text = f"{left} picture{'s' if left > 1 else ''} left out{why}: "
            blocks.append(Text((text, code, " draws them."), "muted"))
        if not has_numbers:
            text = "Its numbers are left out, to keep this page small; they are in "
            blocks.append(Text((text, Mark("numbers.csv"), "."), "muted"))
        blocks += expectation_parts(self._frames, found, with_numbers=has_numbers)
        words = "Its verdicts on every implementation"  # a screen reader, which may list all links, says of which case
        to_case = drawn("link", anchor_of("case", case["id"]), words, case["name"]) if found.id in self._linked else ""
        link = [Figure(words, to_case)] if to_case else []
        note = Mark("fails", State.FAILING) if fails else ""
        late = blocks if self._are_late else ()
        shown = [*link, *(() if late else blocks)]
        return Details(case["name"], shown, fails, note, "computation", 4, late=late)


def _failing(shown: Sequence[Details]) -> tuple[bool, Mark]:
    """Return whether computations fail, which are the open ones, and how many do in words."""
    failing, every = sum(each.is_open for each in shown), counted(len(shown), "computation")
    words = Mark(f"{failing:,} of {every} fail", State.FAILING) if failing else Mark(f"{every}, none fails", "muted")
    return bool(failing), words


def _inputs(found: Computation) -> list[Block]:
    """Return a table for each input that has a name, with its numbers where the document writes them down."""
    blocks: list[Block] = []
    for called, names, numbers in found.given:
        also = "" if names == [called] else f" ({', '.join(names)})"
        missing = "" if numbers else ": not written down in the document, or too many to list"
        figure = drawn("numbers", called, found.case["name"], f"{called}{also}{missing}", numbers)
        blocks.append(Figure(called, figure))
    return blocks
