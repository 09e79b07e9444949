"""Matrices to be drawn, in a figure, on the page or in a terminal, and what they show in words.

They are those of any array, of errors over bounds, and of a document's case: its inputs and exact stages, as the
document lays them out. Nothing here draws, or needs what does.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.common.wording import DocumentLayout, format_distinct, format_element, parse_index
from attncheck.reports.frames import KeptArrays
from attncheck.results.format import EXACT, INPUTS
from attncheck.spec import LOGITS, MEANS, PROJECTIONS, STAGES, STAGES_ON_SCORES
from attncheck.spec.quantities import QUANTITIES

Array = NDArray[Any]
Pixels = NDArray[np.uint8]

MAX_ANNOTATED = 20
"""Matrices with more rows or columns show colours without numbers."""
MAX_CELLS = 64
"""Larger ones are thinned out to at most this many rows and columns."""
_DIGITS = 6
MAX_PANELS = 8
"""Of an array with more matrices than these the first are drawn."""

PURPLE, ORANGE, BLUE, GREY = "#6a0d83", "#d9730d", "#0b4fa8", "#4a4a4a"
"""Light to dark in one hue: purple, orange and blue as in the attention scoring post, and grey for masks."""
MISPRINT = "#9c72d0"
"""Frames what a document prints otherwise, as on the page."""
LIGHTEST = "#f3f1f4"
_NOT_A_NUMBER, _BELOW, _ABOVE = "#d4d4d8", "#2a2a2e", "#8b0000"

# What XML cannot hold, what turns the direction of text, and half characters.
_UNSHOWABLE_PATTERN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


@dataclass(frozen=True)
class Panel:
    """One matrix to draw: its title, its colour, and what its rows and columns are."""

    title: str
    matrix: Array
    colour: str = PURPLE
    row_axis: str = ""
    column_axis: str = ""
    printed: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By row and column: the number that a document prints there, if it is not the matrix's number."""


def cell_text(panel: Panel, row: int, column: int) -> tuple[str, str]:
    """Write a cell's number, and the misprint there if any, with enough digits to show how they differ."""
    value, printed = panel.matrix[row, column].item(), panel.printed.get((row, column), "")
    with suppress(ValueError):
        return (format_distinct(float(printed), float(value))[1] if printed else short_number(value)), printed
    return short_number(value, _DIGITS), printed


def split_into_panels(array: Array, title: str, **fields: Any) -> tuple[Panel, ...]:
    """Return a panel per matrix of an array: one row for a vector, and the first matrices for more axes.

    Titles leave out leading axes of length 1.
    """
    matrices = np.atleast_2d(array)
    leading = matrices.shape[:-2]
    named = islice(matrix_names(leading, is_document=True), MAX_PANELS)
    panels = tuple(Panel(f"{title}{name}", matrices[index], **fields) for index, name in named)
    left_out = math.prod(leading) - len(panels)
    if left_out > 0:
        panels = (*panels[:-1], replace(panels[-1], title=f"{panels[-1].title} (and {left_out} more)"))
    return panels


def describe_panel(panel: Panel) -> str:
    """Describe a matrix in words: every number of a small one, the range of a larger one."""
    rows, columns = panel.matrix.shape
    start = f"{safe_text(panel.title)}: {rows} x {columns} matrix"
    if panel.printed:
        places = (f"{safe_text(text)} at {format_element(place)}" for place, text in panel.printed.items())
        return f"{describe_panel(replace(panel, printed={}))}; printed otherwise: {', '.join(places)}"
    if panel.matrix.size <= MAX_CELLS:
        spelt = [", ".join(map(short_number, row)) for row in panel.matrix.tolist()]
        return f"{start}; " + "; ".join(f"row {index}: {row}" for index, row in enumerate(spelt))
    values = np.asarray(panel.matrix, dtype=np.float64)
    finite = values[np.isfinite(values)]
    others = "" if finite.size == values.size else f", {values.size - finite.size} not finite"
    if not finite.size:
        return f"{start}{others}"
    return f"{start}, from {short_number(finite.min())} to {short_number(finite.max())}{others}"


def value_range(matrix: Array) -> tuple[float, float]:
    """Return the smallest and the largest finite number; 0 and 1 if there is none."""
    values = np.asarray(matrix, dtype=np.float64)
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


def cell_colours(panel: Panel) -> Pixels:
    """Return the colour of every cell, (rows, columns, 3): light for the smallest number, the panel's for the largest.

    NaN, minus infinity and infinity have colours of their own.
    """
    values = np.asarray(panel.matrix, dtype=np.float64)
    low, high = value_range(values)
    finite = np.isfinite(values)
    # Halves, because the difference of two numbers of float64 may be beyond it.
    part = (np.where(finite, values, low) / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)
    light, dark = (np.array(_parse_colour(colour), dtype=np.float64) for colour in (LIGHTEST, panel.colour))
    pixels = (light + part[..., np.newaxis] * (dark - light)).round().astype(np.uint8)
    for odd, colour in ((np.isnan(values), _NOT_A_NUMBER), (values == -np.inf, _BELOW), (values == np.inf, _ABOVE)):
        pixels[odd] = _parse_colour(colour)
    return pixels


def encode_png(pixels: Pixels) -> bytes:
    """Return the PNG of pixels, (rows, columns, 3)."""
    rows, columns, _ = pixels.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)], axis=1)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _parse_colour(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def contrasting_ink(pixel: Pixels) -> str:
    """Return black or white, whichever has more contrast on a colour (WCAG 2 relative luminance).

    Example:
        >>> contrasting_ink(np.array([255, 255, 0], np.uint8)), contrasting_ink(np.array([0, 0, 255], np.uint8))
        ('#000000', '#ffffff')
    """
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in pixel / 255]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def short_number(value: float, digits: int = 3) -> str:
    """Write a number in a few significant digits, a whole one of up to five digits in full.

    Example:
        >>> short_number(12345.0), short_number(123456.0), short_number(0.12345)
        ('12345', '1.23e+05', '0.123')
    """
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    return str(int(number)) if number == int(number) and abs(number) < 1e5 else f"{number:.{digits}g}"


def safe_text(text: object, most: int = 120) -> str:
    """Return a text in one line without characters that images cannot show, truncated if it is long."""
    line = " ".join(_UNSHOWABLE_PATTERN.sub("\ufffd", " ".join(str(text).split())).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


Real = NDArray[np.float64]


@dataclass(frozen=True)
class ErrorMatrix:
    """One matrix of errors, thinned out, and the position of the worst of all errors if this matrix has it."""

    title: str
    errors: Real
    worst: tuple[int, int] | None


def describe_errors(ratio: Real, title: str, layout: DocumentLayout | None = None) -> str:
    """Describe an error map in words: the worst element, how many exceed the limit, how many were not judged."""
    start = f"{safe_text(title)}, shape {' x '.join(map(str, ratio.shape)) or '()'}"
    if not ratio.size:
        return f"{start}: there is no element."
    unjudged = int(np.isnan(ratio).sum())
    if unjudged == ratio.size:
        return f"{start}: no element was judged."
    flat = int(np.nanargmax(ratio))
    index = tuple(int(axis) for axis in np.unravel_index(flat, ratio.shape))
    where = f" at {format_element(index, layout=layout)}" if index else ""
    beyond = int((ratio > 1).sum())
    many = (
        f"{beyond:,} of {ratio.size - unjudged:,} elements exceed the limit 1" if beyond else "none exceeds the limit 1"
    )
    unjudged_text = f"; {unjudged:,} not judged" if unjudged else ""
    return f"{start}: largest {ratio.flat[flat]:.3g}{where}; {many}{unjudged_text}."


def error_matrices(errors: Real, most_cells: int = MAX_CELLS, *, is_document: bool = False) -> list[ErrorMatrix]:
    """Split an array into its matrices, or fold many into one; large ones are thinned out.

    Each is named by the index of its leading axes; for documents, without axes of length 1.
    """
    matrices = np.atleast_2d(errors)
    leading, worst = matrices.shape[:-2], np.unravel_index(int(np.nanargmax(matrices)), matrices.shape)
    row, column = int(worst[-2]), int(worst[-1])
    if math.prod(leading) > MAX_PANELS:
        folded = np.fmax.reduce(matrices.reshape(-1, *matrices.shape[-2:]), axis=0)
        return [_thinned_matrix(f"largest of {math.prod(leading):,} matrices", folded, (row, column), most_cells)]
    return [
        _thinned_matrix(
            name,
            matrices[index],
            (row, column) if index == tuple(worst[:-2]) else None,
            most_cells,
        )
        for index, name in matrix_names(leading, is_document=is_document)
    ]


def matrix_names(leading: tuple[int, ...], *, is_document: bool) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the index of each matrix of an array by its leading axes, and its name.

    Example:
        >>> list(matrix_names((1, 2), is_document=True))
        [((0, 0), '[0]'), ((0, 1), '[1]')]
        >>> list(matrix_names((1, 2), is_document=False))
        [((0, 0), '[0, 0]'), ((0, 1), '[0, 1]')]
    """
    several = [axis for axis, length in enumerate(leading) if length > 1]
    among = several if is_document or not several else range(len(leading))
    for index in np.ndindex(leading):
        yield index, format_element([index[axis] for axis in among]) if among else ""


def _thinned_matrix(title: str, errors: Real, worst: tuple[int, int] | None, most_cells: int) -> ErrorMatrix:
    rows, columns = (math.ceil(length / most_cells) for length in errors.shape)
    if (rows, columns) == (1, 1):
        return ErrorMatrix(title, errors, worst)
    starts = [np.arange(0, length, step) for length, step in zip(errors.shape, (rows, columns), strict=True)]
    thinned = np.fmax.reduceat(np.fmax.reduceat(errors, starts[0], axis=0), starts[1], axis=1)  # NaN only of NaN alone
    title = f"{title}; a cell: the largest of {rows} x {columns}".removeprefix("; ")
    index = None if worst is None else (worst[0] // rows, worst[1] // columns)
    return ErrorMatrix(title, thinned, index)


MAX_WRITTEN = 64
"""Inputs with more numbers are not listed unless the document prints them."""

_COLOUR_OF_STAGE = (
    dict.fromkeys(("query", *LOGITS), PURPLE) | dict.fromkeys(MEANS, BLUE) | dict.fromkeys(("mask", "bias"), GREY)
)
_UNDRAWN_STAGES = frozenset({"log_sum_exp"})
_PER_TOKEN_STAGES = frozenset({*PROJECTIONS, *MEANS, "applied_values"})
"""Arrays with a row per token, or a column if a document writes vectors as columns."""
_PER_KEY_STAGES = frozenset({*STAGES_ON_SCORES, "mask", "bias"})


PrintedNumbers = Mapping[str, Mapping[str, str]]
"""By stage or quantity, then by an element's index as results keep it: the text that a document prints."""


@dataclass(frozen=True)
class KeptCase:
    """One case in one dtype as the run kept it: the inputs as delivered, the exact stages in float64."""

    inputs: Mapping[str, Array]
    exact: Mapping[str, Array]


@dataclass(frozen=True)
class Drawing:
    """One picture to draw with ``figures.heatmaps(panels)``.

    ``names`` are the inputs, or the stages and quantities, that it shows: several if they are equal.
    """

    title: str
    names: tuple[str, ...]
    is_input: bool
    panels: tuple[Panel, ...]


def read_kept_case(arrays: KeptArrays, case: str, dtype: str) -> KeptCase | None:
    """Return a case's inputs and exact stages, of the first run that kept them; None if no run did."""
    kept = arrays.arrays_of(case, dtype)
    for environment in dict.fromkeys(key[0] for key in kept):
        inputs, exact = ({k[2]: kept[k] for k in kept if k[:2] == (environment, name)} for name in (INPUTS, EXACT))
        if inputs and exact:
            return KeptCase(inputs, exact)
    return None


def exact_array(expected: Mapping[str, Any], kept: KeptCase) -> Array | None:
    """Return the exact value of a stage, or of the quantity that is derived from it; None if it was not kept."""
    name, stage = expected["name"], kept.exact.get(expected["of"])
    if stage is None or name == expected["of"]:
        return stage
    with np.errstate(all="ignore"):
        return QUANTITIES[name].compute(stage, kept.inputs) if name in QUANTITIES else None


def input_text(case: Mapping[str, Any], name: str, array: Array) -> tuple[tuple[str, ...], ...]:
    """Return an input's numbers as the document prints them, else in their shortest form if they are few."""
    printed = case.get("given", {}).get(name, {}).get("printed")
    if printed is not None:
        rows = np.array(printed, dtype=object)
        return tuple(tuple(map(str, row)) for row in rows.reshape(-1, rows.shape[-1] if rows.ndim else 1))
    if array.size > MAX_WRITTEN or not array.ndim:
        return ()
    return tuple(tuple(map(_shortest_number, row)) for row in array.reshape(-1, array.shape[-1]).tolist())


def _shortest_number(value: float) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def make_drawings(
    case: Mapping[str, Any], kept: KeptCase, *, in_columns: bool, printed: PrintedNumbers = MappingProxyType({})
) -> tuple[Drawing, ...]:
    """Return the inputs, then the stages in the order of computation; ``in_columns`` vectors are drawn as columns.

    ``printed`` has the document's misprints.
    """
    inputs_in_document = case.get("given", {})
    names = {name: inputs_in_document.get(name, {}).get("called", "") for name in kept.inputs}
    called = {expected["name"]: expected["called"] for expected in case["expected"] if "called" in expected}
    stages = {stage: kept.exact[stage] for stage in STAGES if stage in kept.exact and stage not in _UNDRAWN_STAGES}
    derived = {expected["name"]: expected for expected in case["expected"] if expected["name"] != expected["of"]}
    for name, expected in derived.items():
        value = exact_array(expected, kept)
        if value is not None:  # a derived quantity stands behind the stage that it comes from
            before = [*stages].index(expected["of"]) + 1 if expected["of"] in stages else len(stages)
            items = list(stages.items())
            stages = dict([*items[:before], (name, value), *items[before:]])
    return tuple(
        drawing
        for arrays, titles, is_input in ((kept.inputs, names, True), (stages, called, False))
        for drawing in _draw_arrays(arrays, titles, is_input, in_columns, {} if is_input else printed)
    )


def _draw_arrays(
    arrays: Mapping[str, Array], called: Mapping[str, str], is_input: bool, in_columns: bool, printed: PrintedNumbers
) -> Sequence[Drawing]:
    """Draw each array once; equal arrays share a picture."""
    together: dict[str, list[str]] = {}
    for name, array in arrays.items():
        same = next((first for first in together if _are_equal(arrays[first], array)), name)
        together.setdefault(same, []).append(name)
    drawings = []
    for first, names in together.items():
        title = matrix_title(names, dict.fromkeys(text for name in names if (text := called.get(name))))
        turned = in_columns and first in _PER_TOKEN_STAGES and arrays[first].ndim > 1
        panels = split_into_panels(
            np.swapaxes(arrays[first], -1, -2) if turned else arrays[first], title, **_panel_style(first)
        )
        marked = [
            _with_misprints(panels, arrays[name], printed[name], first, in_columns) for name in names if name in printed
        ]
        drawings.append(Drawing(title, tuple(names), is_input, marked[0] if marked else panels))
    return drawings


def _with_misprints(
    panels: tuple[Panel, ...], array: Array, printed: Mapping[str, str], name: str, in_columns: bool
) -> tuple[Panel, ...]:
    """Add the misprints of an array to its panels."""
    printed_by_panel: dict[int, dict[tuple[int, int], str]] = {}
    for text, number in printed.items():
        index = parse_index(text)
        if len(index) != array.ndim or any(place >= length for place, length in zip(index, array.shape, strict=True)):
            continue  # another program wrote these results
        *leading, row, column = (0, *index) if array.ndim == 1 else index
        place = (column, row) if in_columns and name in _PER_TOKEN_STAGES and array.ndim > 1 else (row, column)
        panel = int(np.ravel_multi_index(leading, array.shape[:-2])) if leading else 0
        printed_by_panel.setdefault(panel, {})[place] = number
    return tuple(replace(panel, printed=printed_by_panel.get(number, {})) for number, panel in enumerate(panels))


def matrix_title(names: Sequence[str], documents: Collection[str]) -> str:
    """Return a matrix's name in the document, followed by the names of the stages or inputs if they differ."""
    words, document_name = ", ".join(names), ", ".join(documents)
    return f"{document_name} ({words})" if document_name and document_name != words else words


def _are_equal(first: Array, second: Array) -> bool:
    """Return whether two arrays look the same, without leading axes of length 1."""
    shapes = [
        array.shape[next((i for i, n in enumerate(array.shape) if n != 1), array.ndim) :] for array in (first, second)
    ]
    return shapes[0] == shapes[1] and np.array_equal(first.ravel(), second.ravel(), equal_nan=True)


def _panel_style(name: str) -> dict[str, str]:
    """Return a matrix's colour and the names of its axes."""
    axes = {"row_axis": "query", "column_axis": "key"} if name in _PER_KEY_STAGES else {}
    return axes | {
        "colour": _COLOUR_OF_STAGE.get(name, GREY if "_" in name and name.endswith(("weight", "bias")) else ORANGE)
    }
