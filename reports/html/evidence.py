"""Evidence on the page: the worst elements and the map of errors of each failing cell, and a drawing of each document.

Matrices are tables with coloured cells, which stay text. Errors over bounds are maps, or numbers if the array is small.
Only the failing parts of a document are open.
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

from attncheck.common.wording import count_noun, format_distinct
from attncheck.judging.compare import absolute_difference, error_ratio, flag_differing_nonfinite
from attncheck.reading.shapes import format_shape
from attncheck.reports import panels
from attncheck.reports.cells import FAILS_A_RUN, CellRow, State, cell_table, distinct_states, is_unsupported_everywhere
from attncheck.reports.coverage import DOCUMENT_VERDICTS, Misprint, count_numbers_of_cases, misprints
from attncheck.reports.defects import thread_address
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
    more_in_files,
)
from attncheck.reports.documents import (
    NUMBERS_EXPLAINED,
    DocumentComputation,
    computations_by_document,
    expectation_parts,
    source_blocks,
)
from attncheck.reports.failures import RERUN_COMMANDS, rerun_commands
from attncheck.reports.frames import (
    Column,
    Frames,
    document_layout,
    element_text,
    group_by_key,
    select_expected_failures,
    select_failing,
    to_records,
)
from attncheck.reports.html import contents
from attncheck.reports.html.contents import CellEvidence, render_macro
from attncheck.results.format import EXACT, bound_array_name

Array = NDArray[Any]
_MAX_ROWS = 12
"""Stages and numbers that are listed; further ones follow from the same fault."""
_MAX_PRINTED = 50


def make_evidence(
    frames: Frames, table: Mapping[str, CellRow], detailed: Collection[str], budget: contents.Budget
) -> tuple[dict[str, list[CellEvidence]], int]:
    """Return the evidence by case, and the number of cells without evidence.

    Failures come first; among these, the first dtype of every case, in the order of ``detailed``.
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
    rows = _failing_rows(frames, {item[1] for item in chosen})
    scripts = contents.script_names(frames.arrays.directories)
    map_letters, script_letters = budget.map_letters, budget.script_letters
    evidence: dict[str, list[CellEvidence]] = {}
    for misprint in misprints(frames):
        evidence.setdefault(misprint.case, []).append(misprint_evidence(misprint))
    for _, case, column, dtype in chosen:
        rows_of_cell = rows.get((case, dtype, *column.key), [])
        cell, stages = table[case][column][dtype], [str(row["stage"]) for row in rows_of_cell]
        maps = list(_error_maps(frames, case, dtype, column, stages)) if map_letters > 0 else []
        script = list(contents.script_details(scripts, case, dtype, column)) if script_letters > 0 else []
        map_letters -= sum(len(figure.markup) for figure in maps)
        script_letters -= sum(
            len(block.markup) for details in script for block in details.blocks if isinstance(block, Figure)
        )
        blocks = (
            *(Text(message, "message") for message in _stage_messages(rows_of_cell)),
            *_reason_text(rows_of_cell),
            *_worst_elements(rows_of_cell, frames.cases[case]),
            *maps,
            *_rerun_blocks(rerun_commands(frames, asdict(column) | {"case": case, "dtype": dtype}, RERUN_COMMANDS)),
            *script,
        )
        key = (*column.key, case, dtype)
        item = CellEvidence(cell.state.value, cell.text, frames.title(column), dtype, blocks, key)
        evidence.setdefault(case, []).append(item)
    return evidence, len(wanted) - len(chosen)


def _failing_rows(frames: Frames, cases: set[str]) -> dict[Any, list[dict[str, Any]]]:
    """Return the rows of stages and numbers that fail or are expected to, by case, dtype and implementation."""
    parts = []
    for frame in (frames.results, frames.numbers):
        of_cases = frame[frame["case"].isin(cases)]
        bad, expected = select_failing(of_cases), select_expected_failures(of_cases)
        bad = bad[~bad["verdict"].isin(DOCUMENT_VERDICTS)]  # has a card of its own, once for all implementations
        parts.append(pd.concat([bad, expected]).sort_index())
    parts[1] = parts[1].assign(against="number")
    rows = pd.concat([part for part in parts if len(part)]) if any(map(len, parts)) else parts[0]
    # All at once: there may be a thousand cells.
    return group_by_key(to_records(rows), itemgetter("case", "dtype", "environment", "implementation"))


def _stage_messages(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the messages of stages; without failing stages, those of numbers, which otherwise are in the table."""
    of_stages = [row for row in rows if row["against"] != "number"] or rows
    return tuple(dict.fromkeys(str(row["message"]) for row in of_stages if row["message"]))[:_MAX_ROWS]


def _reason_text(rows: list[dict[str, Any]]) -> Iterator[Text]:
    """Yield the recorded reason of an expected failure, if there is one."""
    expected = next((row for row in rows if row["xfail"] and row["reason"] is not None), None)
    if expected is None:
        return
    thread = expected["thread"] or ""
    where: Inline = (" (", Mark(thread, "link", thread_address(thread)), ")") if thread else ""
    yield Text((Mark("Expected failure:", "strong"), f" {expected['reason']}", where))


def _rerun_blocks(commands: Sequence[str]) -> Iterator[Block]:
    """Yield the commands that show the failure again."""
    if commands:
        yield Text("See it again, in the folder where the check ran:", "how")
        yield Code(commands)
    else:
        more = "It was handed over as an object, which no command line can name; "
        yield Text((more, Mark("check(...).explain()"), " tells more."), "how")


_REFERENCE_WORDS = {
    "exact": "the exact answer",
    "step": "the exact step from its own previous stage",
    "number": "a number of the case",
}
_WORST_HEADINGS = ("stage", "verdict", "element", "computed", "should be", "difference", "allowed", "compared with")


def _worst_elements(rows: list[dict[str, Any]], case: Mapping[str, Any]) -> Iterator[Block]:
    """Yield a table of the element of each stage, or the number, with the largest difference."""
    lines: list[tuple[Inline, ...]] = []
    for row in [row for row in rows if row["index"] is not None][:_MAX_ROWS]:
        is_number, exact, printed = row["against"] == "number", row.get("exact"), row.get("printed")
        against = (
            f"the printed {printed}" if is_number and printed is not None else _REFERENCE_WORDS.get(row["against"], "")
        )
        # The computed value is compared with the exact answer if there is one, else with the number of the case.
        should_be = exact if is_number and exact is not None and not pd.isna(exact) else row["reference"]
        cells = str(row["stage"]), str(row["verdict"]), element_text(case, row)
        numbers = format_distinct(float(row["value"]), float(should_be))
        lines.append(
            (
                *cells,
                *numbers,
                contents.short_number_or_dash(row["difference"]),
                contents.short_number_or_dash(row["allowed"]),
                against,
            )
        )
    if lines:
        yield Table("The worst element of each stage", _WORST_HEADINGS, lines, "lllrrrrl")
    if len(rows) > _MAX_ROWS:
        yield more_in_files(
            f"{len(rows) - _MAX_ROWS} more stages or numbers", "results.csv", "numbers.csv", kind="muted"
        )


def _error_maps(frames: Frames, case: str, dtype: str, column: Column, stages: Sequence[str]) -> Iterator[Figure]:
    """Yield a map for each stage whose array, exact answer and bound were kept."""
    kept, name = frames.arrays.arrays_of(case, dtype), frames.classes.get(column.key, {}).get(dtype, "")
    for stage in dict.fromkeys(stages):
        keys = ((column.environment, of, stage) for of in (column.implementation, EXACT, bound_array_name(name)))
        arrays = [kept[key] for key in keys if key in kept]
        if len(arrays) == 3 and len({array.shape for array in arrays}) == 1:
            yield _error_figure(stage, frames.cases[case], *arrays)


def _error_figure(stage: str, case: Mapping[str, Any], computed: Array, exact: Array, bound: Array) -> Figure:
    """Show errors over bounds as maps, or the numbers of a small array.

    A map has cells by level, with neighbours of one row as one run; cells beyond the bound are crossed out.
    """
    errors = element_error_ratios(computed, exact, bound)
    layout = document_layout(case, {"stage": stage, "shape": format_shape(errors.shape)})
    words = panels.describe_errors(errors, "error over bound", layout)
    small = _small_matrices(computed, exact, errors, is_document=layout is not None)
    maps: list[tuple[object, ...]] = []
    if not small and errors.size and not np.isnan(errors).all():
        for matrix in panels.error_matrices(errors, _MAX_CELLS, is_document=layout is not None):
            level = np.searchsorted(contents.ERROR_LIMITS, np.nan_to_num(matrix.errors, nan=0.0, posinf=np.inf))
            level[np.isnan(matrix.errors)] = len(contents.ERROR_LIMITS) + 1
            levels = [
                (name, list(_horizontal_runs(level == number))) for number, name in enumerate(contents.ERROR_LEVELS)
            ]
            beyond = np.argwhere(matrix.errors > 1).tolist()
            pixels = max(_MIN_PIXELS, min(_MAX_PIXELS, _WIDTH // max(matrix.errors.shape)))
            maps.append((matrix.title, matrix.errors.shape, pixels, levels, beyond, matrix.worst))
    return Figure(words, render_macro("errors", stage, words, small, maps))


def element_error_ratios(computed: NDArray[Any], reference: NDArray[Any], allowed: NDArray[Any]) -> NDArray[np.float64]:
    """Return the error of every element over the allowed one; 1 is the limit. All three have one shape.

    ``reference`` is the exact answer and ``allowed`` the bound, or another implementation's array and the sum of both
    bounds. An element is NaN if it was not judged or has no exact answer. It is infinite if only one of the two arrays
    has NaN or infinity there.

    Example:
        >>> element_error_ratios(np.array([1.5, np.nan, 9.0]), np.ones(3), np.array([0.25, 0.25, np.inf])).tolist()
        [2.0, inf, nan]
    """
    ratio = error_ratio(absolute_difference(computed, reference), allowed)
    ratio[flag_differing_nonfinite(computed, reference)] = np.inf
    ratio[np.isposinf(allowed) | np.isnan(allowed)] = np.nan
    return ratio


def misprint_evidence(misprint: Misprint) -> CellEvidence:
    """Return a misprint's message and its numbers, each with the right one."""
    note = f"stage {misprint.stage}" if misprint.called != misprint.stage else ""
    blocks: tuple[Block, ...] = (Text(misprint.message, "message"),)
    if misprint.numbers:
        rows = [(f"[{place}]", printed, exact) for place, printed, exact in misprint.numbers[:_MAX_PRINTED]]
        table = Table("What is printed, and what it should be", ("element", "printed", "should be"), rows, "lrr")
        blocks = (Text("The exact answer itself misses what is printed, so no implementation can hold it."), table)
    if len(misprint.numbers) > _MAX_PRINTED:
        more = f"{len(misprint.numbers) - _MAX_PRINTED} more"
        blocks = (*blocks, more_in_files(more, "numbers.csv", kind="muted"))
    return CellEvidence(misprint.verdict, misprint.verdict, misprint.called, note, blocks)


_MAX_PIXELS_WIDE = 480


def heatmap_markup(panel: panels.Panel) -> Markup:
    """Return a matrix as a table with coloured cells, or as a picture if it is too large for numbers."""
    pixels = panels.cell_colours(panel) if panel.matrix.size else np.zeros((0, 0, 3), np.uint8)
    if panel.matrix.size and max(panel.matrix.shape) <= panels.MAX_ANNOTATED:
        cells = [
            [
                (*panels.cell_text(panel, row, column), bytes(pixel).hex(), panels.contrasting_ink(pixel))
                for column, pixel in line
            ]
            for row, line in enumerate(map(enumerate, pixels))
        ]
        return render_macro("heat", panel, cells)
    if not panel.matrix.size:
        return render_macro("picture", f"{panel.title}: empty, shape {format_shape(panel.matrix.shape)}", 0, "")
    width = panel.matrix.shape[1] * max(1, min(_MAX_PIXELS, _MAX_PIXELS_WIDE // max(panel.matrix.shape)))
    return render_macro("picture", panels.describe_panel(panel), width, b64encode(panels.encode_png(pixels)).decode())


Real = NDArray[np.float64]

_MAX_CELLS = 32
"""Rows or columns of a map. The page only locates an error; `attncheck show` draws larger matrices finer."""
_WIDTH, _MIN_PIXELS, _MAX_PIXELS = 220, 7, 20
"""The width of a picture, and the smallest and the largest size of its cells, in pixels."""


_MOST_COMPARED = 64
"""Elements of an array that is small enough to print its numbers."""


def _small_matrices(
    computed: Array, exact: Array, errors: Real, *, is_document: bool
) -> list[tuple[str, list[list[tuple[tuple[str, str, str], bool]]]]]:
    """Write each element of a small array: computed, exact and their difference; empty for a larger array.

    There is a matrix for each index of the leading axes, and a mark for wrong elements.
    """
    if not 0 < errors.size <= _MOST_COMPARED:
        return []
    arrays = [np.atleast_2d(np.asarray(array, dtype=np.float64)) for array in (computed, exact, errors)]
    return [
        (
            name,
            [
                [
                    (_number_texts(value, expected, wrong=error > 1), error > 1)
                    for value, expected, error in zip(*row, strict=True)
                ]
                for row in zip(*(array[index].tolist() for array in arrays), strict=True)
            ],
        )
        for index, name in panels.matrix_names(arrays[0].shape[:-2], is_document=is_document)
    ]


def _number_texts(computed: float, exact: float, *, wrong: bool) -> tuple[str, str, str]:
    """Write two numbers and their difference; if the first is wrong, with enough digits to show how they differ."""
    texts = format_distinct(computed, exact) if wrong else (f"{computed:.4g}", f"{exact:.4g}")
    return (*texts, f"{computed - exact:.2g}")


def _horizontal_runs(chosen: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Yield the row, the start and the length of each run of chosen neighbours in a row.

    Example:
        >>> list(_horizontal_runs(np.array([[True, True, False, True]])))
        [(0, 0, 2), (0, 3, 1)]
    """
    for y, row in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(np.int8), [0]))))
        yield from ((y, start, end - start) for start, end in edges.reshape(-1, 2).tolist())


_MAX_IN_PART = 10
"""Computations in one part of a document; a longer document is split."""


class DocumentPages:
    """Documents on the page, with their numbers, inputs, pictures and links as far as the budget allows.

    Failing computations come first. Computations that no implementation supports are only counted.
    """

    def __init__(self, frames: Frames, linked: Collection[str], budget: contents.Budget) -> None:
        self._frames, self._linked, self._every = frames, linked, computations_by_document(frames)
        table = cell_table(frames)
        kept = {case for case in table if not is_unsupported_everywhere(table[case])}
        self._failing = {case for case, row in table.items() if distinct_states(row) & FAILS_A_RUN}
        self._failing |= {item.id for items in self._every.values() for item in items if item.fails}
        kept |= self._failing
        self._shown = {name: [item for item in items if item.id in kept] for name, items in self._every.items()}
        shown = [computation for items in self._shown.values() for computation in items]
        first = sorted(shown, key=lambda computation: computation.id not in self._failing)
        sizes = {item.id: contents.LETTERS_PER_NUMBER * sum(map(len, item.rows.values())) for item in first}
        self._with_numbers = contents.select_within_budget(sizes, sizes.__getitem__, budget.number_letters)
        self._pictures_left = {True: budget.failing_pictures, False: budget.pictures}
        self._are_late = len(shown) > budget.computations

    def section(self) -> Section:
        """Return every document with the computations that some implementation supports."""
        blocks: list[Block] = [Text(NUMBERS_EXPLAINED)]
        if omitted := sum(map(len, self._every.values())) - sum(map(len, self._shown.values())):
            text = f"{omitted:,} computation{'s' if omitted > 1 else ''} that no implementation supports "
            blocks.append(Text(f"{text}{'are' if omitted > 1 else 'is'} left out."))
        blocks += [
            self._index_table(),
            *(self._document_details(name, cases) for name, cases in self._shown.items() if cases),
        ]
        return Section("Documents", "documents", blocks)

    def _index_table(self) -> Table:
        """Return a table of the printed numbers of each document, each counted once."""
        rows: list[list[Inline]] = []
        for name, cases in self._every.items():
            all_counts = count_numbers_of_cases(self._frames, [computation.id for computation in cases])
            kept = ("printed", "hold", "misprints", "missed", "unverified", "errata")
            counts = [getattr(all_counts, name) for name in kept]
            title = Mark(cases[0].case["title"], "link", f"#{anchor_of('document', name)}")
            numbers = (f"{count:,}" if count else Coloured(contents.NO_VALUE, "none") for count in counts)
            rows += [[title, *numbers]] if self._shown[name] else []
        states = (State.AGREE, State.MISPRINT, State.FAILING, State.UNVERIFIED, "errata")
        kinds = map(Mark, ("hold", "misprint", "missed", "unverified", "erratum"), states)
        caption = "Printed numbers, each counted once"
        return Table(caption, ["document", "printed", *kinds], rows, "lrrrrrr", "counts index")

    def _document_details(self, name: str, cases: Sequence[DocumentComputation]) -> Details:
        """Return one document; a long one is split into parts."""
        shown = [self._computation_details(computation) for computation in cases]
        parts: list[Block] = []
        for start in range(0, len(shown), _MAX_IN_PART):
            chosen = shown[start : start + _MAX_IN_PART]
            title = f"Computations {start + 1} to {start + len(chosen)} of {len(shown)}:"
            parts.append(Details(title, chosen, *_failing_summary(chosen), "part"))
        blocks = [*source_blocks(cases[0].case), *(parts if len(parts) > 1 else shown)]
        return Details(
            cases[0].case["title"], blocks, *_failing_summary(shown), "pages", 3, anchor_of("document", name)
        )

    def _computation_details(self, computation: DocumentComputation) -> Details:
        case, fails = computation.case, computation.id in self._failing
        has_numbers, code = computation.id in self._with_numbers, Mark(f"attncheck show {case['id']}")
        panels = [(drawing.is_input, panel) for drawing in computation.drawings for panel in drawing.panels]
        chosen = panels[: self._pictures_left[fails]]
        self._pictures_left[fails] -= len(chosen)
        blocks: list[Block] = [Text(note) for note in computation.notes]
        if has_numbers and (inputs := _input_tables(computation)):
            blocks.append(Details("Its inputs, in numbers", inputs))
        for is_input, words in ((True, "Inputs"), (False, "What is computed")):
            if pictures := [heatmap_markup(panel) for of, panel in chosen if of is is_input]:
                blocks.append(Figure(words, render_macro("pictures", words, case["name"], pictures)))
        if omitted := len(panels) - len(chosen):
            why = "" if fails else ", since nothing fails here"
            text = f"{omitted} picture{'s' if omitted > 1 else ''} left out{why}: "
            blocks.append(Text((text, code, " draws them."), "muted"))
        if not has_numbers:
            text = "Its numbers are left out, to keep this page small; they are in "
            blocks.append(Text((text, Mark("numbers.csv"), "."), "muted"))
        blocks += expectation_parts(self._frames, computation, with_numbers=has_numbers)
        words = "Its verdicts on every implementation"  # a screen reader, which may list all links, says of which case
        to_case = (
            render_macro("link", anchor_of("case", case["id"]), words, case["name"])
            if computation.id in self._linked
            else ""
        )
        link = [Figure(words, to_case)] if to_case else []
        note = Mark("fails", State.FAILING) if fails else ""
        late = blocks if self._are_late else ()
        shown = [*link, *(() if late else blocks)]
        return Details(case["name"], shown, fails, note, "computation", 4, late=late)


def _failing_summary(shown: Sequence[Details]) -> tuple[bool, Mark]:
    """Return whether any computation fails (failing ones are open), and how many do in words."""
    failing, every = sum(computation.is_open for computation in shown), count_noun(len(shown), "computation")
    words = Mark(f"{failing:,} of {every} fail", State.FAILING) if failing else Mark(f"{every}, none fails", "muted")
    return bool(failing), words


def _input_tables(computation: DocumentComputation) -> list[Block]:
    """Return a table for each named input, with its numbers if the document has them."""
    blocks: list[Block] = []
    for called, names, numbers in computation.given:
        also = "" if names == [called] else f" ({', '.join(names)})"
        missing = "" if numbers else ": not written down in the document, or too many to list"
        figure = render_macro("numbers", called, computation.case["name"], f"{called}{also}{missing}", numbers)
        blocks.append(Figure(called, figure))
    return blocks
