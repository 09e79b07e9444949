"""Matrices to be drawn, in a figure or a terminal, and what they show in words.

Errors over bounds as matrices that can be shown, and in words; nothing here draws, or needs what does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.elements import DocumentLayout, told_apart, written_element

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
_UNSHOWABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Panel:
    """One matrix to draw: its title, its colour, what its rows and columns are, and names of each if there are any."""

    title: str
    matrix: Array
    colour: str = PURPLE
    row_axis: str = ""
    column_axis: str = ""
    row_labels: Sequence[str] = ()
    column_labels: Sequence[str] = ()
    printed: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By row and column: what a document prints there, where that is not the matrix's number."""


def cell_text(panel: Panel, row: int, column: int) -> tuple[str, str]:
    """Write a cell's number, and what is printed instead of it, if anything: with digits that tell the two apart."""
    value, printed = panel.matrix[row, column].item(), panel.printed.get((row, column), "")
    with suppress(ValueError):
        return (told_apart(float(printed), float(value))[1] if printed else short_number(value)), printed
    return short_number(value, _DIGITS), printed


def panels_of(array: Array, title: str, **fields: Any) -> tuple[Panel, ...]:
    """Return a panel per matrix of an array: of a vector one row, of more axes one for each of the first matrices.

    Leading axes of length 1 are not spoken of.
    """
    matrices = np.atleast_2d(array)
    leading = matrices.shape[:-2]
    indices = list(np.ndindex(leading))[:MAX_PANELS]
    among = [axis for axis, length in enumerate(leading) if length > 1]
    names = [written_element([index[axis] for axis in among], title) if among else title for index in indices]
    panels = tuple(Panel(name, matrices[index], **fields) for index, name in zip(indices, names, strict=True))
    left_out = math.prod(leading) - len(panels)
    if left_out > 0:
        panels = (*panels[:-1], replace(panels[-1], title=f"{panels[-1].title} (and {left_out} more)"))
    return panels


def describe(panel: Panel) -> str:
    """Say a matrix in words: every number of a small one, of a larger one its range."""
    rows, columns = panel.matrix.shape
    start = f"{safe_text(panel.title)}: {rows} x {columns} matrix"
    if panel.printed:
        places = (f"{safe_text(text)} at {written_element(place)}" for place, text in panel.printed.items())
        return f"{describe(replace(panel, printed={}))}; printed otherwise: {', '.join(places)}"
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
    """Return the smallest and the largest finite number; 0 and 1 where there is none."""
    values = np.asarray(matrix, dtype=np.float64)
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


def shades(panel: Panel) -> Pixels:
    """Return the colour of every cell, (rows, columns, 3): light for the smallest number, the panel's for the largest.

    NaN, minus infinity and infinity have colours of their own.
    """
    values = np.asarray(panel.matrix, dtype=np.float64)
    low, high = value_range(values)
    finite = np.isfinite(values)
    # Halves, because the difference of two numbers of float64 may be beyond it.
    part = (np.where(finite, values, low) / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)
    light, dark = (np.array(_parts(colour), dtype=np.float64) for colour in (LIGHTEST, panel.colour))
    pixels = (light + part[..., np.newaxis] * (dark - light)).round().astype(np.uint8)
    for odd, colour in ((np.isnan(values), _NOT_A_NUMBER), (values == -np.inf, _BELOW), (values == np.inf, _ABOVE)):
        pixels[odd] = _parts(colour)
    return pixels


def _parts(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def ink_on(pixel: Pixels) -> str:
    """Return black or white, whichever has more contrast on a colour (WCAG 2 relative luminance)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in pixel / 255]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def short_number(value: float, digits: int = 3) -> str:
    """Write a number in a few significant digits, a whole one of up to five digits in full."""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    return str(int(number)) if number == int(number) and abs(number) < 1e5 else f"{number:.{digits}g}"


def safe_text(text: object, most: int = 120) -> str:
    """Return a text in one line that any image can hold, cut where it is long."""
    line = " ".join(_UNSHOWABLE.sub("\ufffd", " ".join(str(text).split())).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


Real = NDArray[np.float64]

"""Larger matrices are thinned out to at most this many rows and columns, each cell the largest error of its block."""
"""Of more matrices than these the largest error of all is drawn, place by place."""


@dataclass(frozen=True)
class ErrorMatrix:
    """One matrix of errors, thinned out, and the place of the worst of all errors in it, if it is there."""

    title: str
    errors: Real
    worst: tuple[int, int] | None
    block: tuple[int, int] = (1, 1)
    """Of how many rows and columns a cell is the largest error."""


def describe_errors(ratio: Real, title: str, layout: DocumentLayout | None = None) -> str:
    """Say in words what an error map shows: the worst element, how many exceed the limit, how many were not judged."""
    start = f"{safe_text(title)}, shape {' x '.join(map(str, ratio.shape)) or '()'}"
    if not ratio.size:
        return f"{start}: there is no element."
    unjudged = int(np.isnan(ratio).sum())
    if unjudged == ratio.size:
        return f"{start}: no element was judged."
    flat = int(np.nanargmax(ratio))
    index = tuple(int(axis) for axis in np.unravel_index(flat, ratio.shape))
    where = f" at {written_element(index, layout=layout)}" if index else ""
    beyond = int((ratio > 1).sum())
    many = (
        f"{beyond:,} of {ratio.size - unjudged:,} elements exceed the limit 1" if beyond else "none exceeds the limit 1"
    )
    left = f"; {unjudged:,} not judged" if unjudged else ""
    return f"{start}: largest {ratio.flat[flat]:.3g}{where}; {many}{left}."


def error_matrices(errors: Real, most_cells: int = MAX_CELLS, *, is_document: bool = False) -> list[ErrorMatrix]:
    """Split an array into its matrices, or fold them into one where they are many; large ones are thinned out.

    Each is named by the index of its leading axes, in a document's case without those of length 1.
    """
    matrices = np.atleast_2d(errors)
    leading, worst = matrices.shape[:-2], np.unravel_index(int(np.nanargmax(matrices)), matrices.shape)
    row, column = int(worst[-2]), int(worst[-1])
    several = [axis for axis, length in enumerate(leading) if length > 1]
    among = several if is_document or not several else range(len(leading))
    if math.prod(leading) > MAX_PANELS:
        folded = _largest(matrices.reshape(-1, *matrices.shape[-2:]), 0)
        return [_map(f"largest of {math.prod(leading):,} matrices", folded, (row, column), most_cells)]
    return [
        _map(
            written_element([index[axis] for axis in among]) if among else "",
            matrices[index],
            (row, column) if index == tuple(worst[:-2]) else None,
            most_cells,
        )
        for index in np.ndindex(leading)
    ]


def _map(title: str, errors: Real, worst: tuple[int, int] | None, most_cells: int) -> ErrorMatrix:
    rows, columns = (math.ceil(length / most_cells) for length in errors.shape)
    if (rows, columns) == (1, 1):
        return ErrorMatrix(title, errors, worst)
    starts = [np.arange(0, length, step) for length, step in zip(errors.shape, (rows, columns), strict=True)]
    filled = np.where(np.isnan(errors), -1.0, errors)  # errors are never negative
    thinned = np.maximum.reduceat(np.maximum.reduceat(filled, starts[0], axis=0), starts[1], axis=1)
    title = f"{title}; a cell: the largest of {rows} x {columns}".removeprefix("; ")
    index = None if worst is None else (worst[0] // rows, worst[1] // columns)
    return ErrorMatrix(title, np.where(thinned < 0, np.nan, thinned), index, (rows, columns))


def _largest(errors: Real, axis: int) -> Real:
    """Return the largest along an axis, NaN where nothing was judged."""
    largest = np.where(np.isnan(errors), -1.0, errors).max(axis=axis)
    return np.where(largest < 0, np.nan, largest)
