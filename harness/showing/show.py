"""A case in a terminal, an image or a document: its text, its inputs, and the exact value of every stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attncheck.attention.sampling import count_queries
from attncheck.common.errors import ExitCode, OutputError, UsageError
from attncheck.common.wording import format_judged_rows
from attncheck.judging.judge import exact_values_of_whole_stages
from attncheck.judging.judge_numbers import judge_numbers
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.reading.case import Case, ExpectedStage, make_case_record
from attncheck.reading.inputs import RoundedInputs, make_inputs
from attncheck.reading.model import TagEntry
from attncheck.reports import panels
from attncheck.reports.document_model import Text as Block
from attncheck.reports.documents import element_in_document, format_computed
from attncheck.reports.json_documents import opening_fields
from attncheck.reports.terminal import Line, plain_console, print_lines
from attncheck.results.format import EXACT, Row
from attncheck.showing.explanation import inputs_line, tag_lines, to_case_record
from attncheck.showing.json_schema import ArrayRecord, CaseDocument, NumberRecord
from attncheck.spec.verdicts import Verdict

if TYPE_CHECKING:
    from attncheck.showing.heatmaps import ImageFormat

Array = NDArray[Any]

_DIGITS = 5
_MAX_ROWS = 12
_MAX_READ = 64
_PIPE_WIDTH = 120
_MAX_NUMBERS = 40
"""If there are more numbers, only wrong ones are listed."""


@dataclass(frozen=True)
class EvaluatedCase:
    """A case in one dtype: its drawings, and the document's numbers compared with the exact ones.

    ``outside`` is the reason why there is no exact answer, if there is none, and ``undefined`` why some elements have
    none; ``sampled`` says how many query rows stand for all. ``inputs`` and ``exact`` are the arrays that are drawn.
    """

    case: Case
    dtype: str
    drawings: tuple[panels.Drawing, ...]
    numbers: Mapping[int, tuple[Row, ...]]
    """Position of an expectation -> its numbers, with the exact ones."""
    outside: str
    undefined: str
    sampled: str
    inputs: Mapping[str, Array]
    exact: Mapping[str, Array]


def evaluate_case(case: Case, dtype: str, stages: Collection[str] = ()) -> EvaluatedCase:
    """Evaluate a case exactly, from its inputs as stored in a dtype; only these stages and inputs, or all.

    Raises ``UsageError`` for a stage that the case does not have.
    """
    inputs = make_inputs(case, dtype)
    truth = truth_of_case(case, inputs)
    exact = dict(exact_values_of_whole_stages(truth))
    in_columns = any(expected.transpose for expected in case.expected)
    numbers = {} if truth.no_answer_reason else _compare_printed_numbers(case, inputs, truth, exact, stages)
    printed = {
        case.expected[number].name: {
            row.index: str(row.reference_text)
            for row in rows
            if row.index and row.allowed is not None and not is_printed_number_right(row)
        }
        for number, rows in numbers.items()
        if case.expected[number].basis == "printed"
    }
    kept = panels.KeptCase(inputs.arrays, exact)
    drawings = panels.make_drawings(make_case_record(case, {}), kept, in_columns=in_columns, printed=printed)
    judged = truth.judged_problem
    rows = 0 if judged.judged_rows is None else len(judged.judged_rows)
    return EvaluatedCase(
        case=case,
        dtype=dtype,
        drawings=_select_drawings(drawings, stages),
        numbers=numbers,
        outside=truth.no_answer_reason,
        undefined=truth.undefined.elements.reason if truth.undefined.elements else "",
        sampled=f"{format_judged_rows(rows, count_queries(judged.problem_without_layout.inputs))}; they stand for all"
        if rows
        else "",
        inputs={name: array for name, array in inputs.arrays.items() if not stages or name in stages},
        exact={name: array for name, array in exact.items() if not stages or name in stages},
    )


def _select_drawings(drawings: tuple[panels.Drawing, ...], stages: Collection[str]) -> tuple[panels.Drawing, ...]:
    names = list(dict.fromkeys(name for drawing in drawings for name in drawing.names))
    for stage in stages:
        if stage not in names:
            raise UsageError(f"no stage {stage!r} here; expected {', '.join(names)}")
    return tuple(drawing for drawing in drawings if not stages or set(drawing.names) & set(stages))


def _compare_printed_numbers(
    case: Case, inputs: RoundedInputs, truth: Truth, exact: Mapping[str, Array], stages: Collection[str]
) -> dict[int, tuple[Row, ...]]:
    """Compare the exact answer with the document's numbers, as for an implementation."""
    blank = Row(case.id, case.operation, truth.bounds.dtype, EXACT, "stage", "", Verdict.AGREE)
    return {
        number: tuple(
            judge_numbers(replace(case, expected=(expected,)), inputs, truth, {EXACT: exact}, {EXACT: "native"}, blank)
        )
        for number, expected in enumerate(case.expected)
        if expected.numbers is not None and (not stages or {expected.name, expected.of} & set(stages))
    }


def is_printed_number_right(row: Row) -> bool:
    """Return whether a printed number is right: within half a unit, and the effect of the inputs' rounding."""
    if row.verdict == Verdict.NONFINITE or row.difference is None or row.allowed is None:
        return False
    if row.value is None or row.reference is None or not np.isfinite(row.reference):
        return row.verdict == Verdict.AGREE
    rounding = 2 * float(np.spacing(abs(row.reference)))  # both are rounded to float64
    slack = (row.half_unit or 0.0) + (row.propagated or 0.0) + (row.document_bound or 0.0)
    return row.difference <= slack + rounding


def printed_number_outcome(row: Row) -> str:
    """Return the outcome of a printed number in a word or two."""
    if row.allowed is None:
        return "not compared"
    return "holds" if is_printed_number_right(row) else "erratum" if row.xfail else "does not hold"


def print_case(shown: EvaluatedCase, tags: Mapping[str, TagEntry], console: Console | None = None) -> None:
    """Print a case: its text, its inputs, its exact stages, and its numbers compared with the exact ones."""
    console = console or plain_console()
    width = console.width if console.is_terminal else _PIPE_WIDTH
    print_lines(_opening_lines(shown.case, tags), console)
    inputs, stages = ([drawing for drawing in shown.drawings if drawing.is_input is kind] for kind in (True, False))
    for title, drawings in ((f"Inputs in {shown.dtype}", inputs), ("Exact stages", stages)):
        print_lines(["", Block(f"{title}:", "bold")] if drawings else [], console)
        for panel in (panel for drawing in drawings for panel in drawing.panels):
            console.print()
            console.print(matrix_text(panel, width), soft_wrap=True)
    open_ = shown.undefined and f"There is no exact answer where nan stands: {shown.undefined}."
    outside = f"There is no exact answer: {shown.outside}." if shown.outside else open_
    for line in filter(None, (shown.sampled and f"{shown.sampled}.", outside)):
        print_lines(["", line], console)
    for number, rows in shown.numbers.items():
        console.print()
        _print_numbers(console, shown.case.expected[number], rows)


def _opening_lines(case: Case, tags: Mapping[str, TagEntry]) -> Iterator[Line]:
    source = case.source
    by = f", by {source.author}" if source.author else ""
    yield Block(case.name, "bold")
    yield f"{case.id} ({case.file}:{case.line})"
    yield f"from {source.title}{by}{f'; {source.section}' if source.section else ''}"
    yield from filter(None, [source.url])
    yield f"{case.operation}, {inputs_line(case)}"
    yield from tag_lines(case, tags)
    yield from [f"Its numbers were computed in {case.computed_in}."] if case.computed_in else []
    yield from (*source.notes, *case.notes)
    yield from (Block(f"warning: {line}", "yellow") for line in case.warnings)


def matrix_text(panel: panels.Panel, width: int) -> Text:
    """Return a matrix as coloured cells with their numbers, as many as fit the width; others are elided."""
    matrix = panel.matrix
    text = Text(f"{panels.safe_text(panel.title, width)}, {' x '.join(map(str, matrix.shape))}")
    if not matrix.size:
        return text
    rows = _elided_positions(matrix.shape[0], _MAX_ROWS)
    labels = ["..." if row is None else str(row) for row in rows]
    margin = max(map(len, labels)) + 1
    kept = [row for row in rows if row is not None]
    cells = {row: [panels.short_number(value, _DIGITS) for value in matrix[row].tolist()[:_MAX_READ]] for row in kept}
    longest = max(len(cell) for line in cells.values() for cell in line) + 2
    columns = _elided_positions(matrix.shape[1], max(3, min((width - margin) // longest, _MAX_READ)))
    pixels = panels.cell_colours(panel)
    text.append("\n" + " " * margin)
    for column in columns:
        text.append(("..." if column is None else str(column)).rjust(longest - 1) + " ", style="dim")
    for row, label in zip(rows, labels, strict=True):
        text.append("\n" + label.rjust(margin - 1) + " ", style="dim")
        for column in columns if row is not None else ():
            if column is None:
                text.append("...".rjust(longest - 1) + " ")
                continue
            number, pixel = panels.short_number(matrix[row, column].item(), _DIGITS), pixels[row, column]
            text.append(
                number.rjust(longest - 1) + " ",
                style=Style(color=panels.contrasting_ink(pixel), bgcolor=f"#{bytes(pixel).hex()}"),
            )
    return text


def _elided_positions(length: int, most: int) -> list[int | None]:
    """Return the positions that are shown: all, or the first and last ones with None between them.

    Example:
        >>> _elided_positions(10, 6)
        [0, 1, 2, None, 8, 9]
    """
    if length <= most:
        return list(range(length))
    return [*range(most - 3), None, length - 2, length - 1] if most > 3 else [0, None, length - 1]


def _print_numbers(console: Console, expected: ExpectedStage, rows: Sequence[Row]) -> None:
    missed = [row for row in rows if not is_printed_number_right(row)]
    name = panels.matrix_title([expected.name], [expected.called] if expected.called else [])
    console.print(f"{name}, {expected.basis}: {len(rows) - len(missed)} of {len(rows)} hold", style="bold")
    for note in filter(
        None, (expected.because, expected.note, expected.digits, expected.erratum and f"Erratum: {expected.erratum}")
    ):
        console.print(note, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("element")
    for heading in (expected.basis, "exact", "off by"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    layout = {"shape": expected.shape, "transpose": expected.transpose}
    for row in rows if len(rows) <= _MAX_NUMBERS else missed[:_MAX_NUMBERS]:
        table.add_row(
            element_in_document(row.index or "", layout),
            row.reference_text or "",
            format_computed(row.value if row.value is not None else np.nan, "float64", row.half_unit or 0.0),
            f"{row.difference:.2g}" if row.difference is not None and np.isfinite(row.difference) else "",
            printed_number_outcome(row),
            style="" if is_printed_number_right(row) else "magenta",
        )
    if table.row_count:
        console.print(table)


def save_case(shown: EvaluatedCase, path: Path) -> list[Path]:
    """Write a case's inputs and exact stages as images, and return their paths.

    Several pages are written if one is not enough: to one PDF, or to FILE-1.png, FILE-2.png and so on. Raises
    ``OutputError`` if a file cannot be written.
    """
    from attncheck.showing.heatmaps import draw_heatmap_pdf, draw_heatmaps, split_into_pages

    kind = parse_image_format(path)
    pages = split_into_pages([panel for drawing in shown.drawings for panel in drawing.panels])
    title = f"{shown.case.name} ({shown.dtype})"
    headings = [title] if len(pages) == 1 else [f"{title}, page {n} of {len(pages)}" for n in range(1, len(pages) + 1)]
    if kind == "pdf":
        files = {path: draw_heatmap_pdf(pages, headings)}
    else:
        paths = [path] if len(pages) == 1 else [path.with_stem(f"{path.stem}-{n}") for n in range(1, len(pages) + 1)]
        drawn = [
            draw_heatmaps(page, heading=heading, format=kind) for page, heading in zip(pages, headings, strict=True)
        ]
        files = {file: picture.data for file, picture in zip(paths, drawn, strict=True)}
    for file, data in files.items():
        with OutputError.convert_os_errors(file):
            file.write_bytes(data)
    return list(files)


_IMAGE_FORMATS: Mapping[str, ImageFormat] = {".png": "png", ".svg": "svg", ".pdf": "pdf"}


def parse_image_format(path: Path) -> ImageFormat:
    """Return the image format of a file's name. Raises ``UsageError`` for any other, and without matplotlib."""
    if find_spec("matplotlib") is None:
        raise UsageError("show --save needs the extra draw: pip install 'attncheck[draw]'")
    if path.suffix.lower() in _IMAGE_FORMATS:
        return _IMAGE_FORMATS[path.suffix.lower()]
    raise UsageError(f"{path}: cannot save as {path.suffix or 'a file without a suffix'}; expected .png, .svg or .pdf")


MAX_ELEMENTS = 4096
"""Arrays with more elements are printed without their numbers."""


def case_document(shown: EvaluatedCase, saved: Sequence[str] = ()) -> CaseDocument:
    """Return a case with its inputs, its exact stages, and the numbers that its document prints."""
    case = shown.case
    return CaseDocument.derive(
        shown,
        **opening_fields("show", ExitCode.AGREE, case.name),
        notes=list(case.warnings),
        case=to_case_record(case),
        source=case.source.model_dump(exclude_none=True),
        remarks=case.notes,
        inputs=_array_records(shown.inputs),
        stages=_array_records(shown.exact),
        numbers=[
            NumberRecord.derive(
                row,
                stage=case.expected[position].name,
                basis=case.expected[position].basis,
                outcome=printed_number_outcome(row),
                called=row.called or "",
                element=row.index or "",
                printed=row.reference_text or "",
            )
            for position, rows in shown.numbers.items()
            for row in rows
        ],
        outside=shown.outside or shown.undefined,
        saved=saved,
    )


def _array_records(arrays: Mapping[str, NDArray[Any]]) -> list[ArrayRecord]:
    # bfloat16 and float16 as the same numbers of float64
    plain = {name: array if array.dtype.kind in "biu" else array.astype("float64") for name, array in arrays.items()}
    return [
        ArrayRecord(name=name, shape=list(array.shape), values=array.tolist() if array.size <= MAX_ELEMENTS else None)
        for name, array in plain.items()
    ]
