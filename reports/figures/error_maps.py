"""Errors over bounds, drawn element by element: where an implementation goes wrong, and how far."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attncheck.reports.figures.layout import colour_bar, grid, only_text
from attncheck.reports.figures.panels import safe_text
from attncheck.reports.figures.picture import INK, PAPER, Format, Picture, drawing, picture_of

Array = NDArray[Any]
Real = NDArray[np.float64]

MAX_CELLS = 64
"""Larger matrices are thinned out to at most this many rows and columns, each cell the largest error of its block."""
MAX_PANELS = 8
"""Of more matrices than these the largest error of all is drawn, place by place."""

_MIN_RATIO, _MAX_RATIO = 1e-3, 1e3
"""Where the colours end: the same in every picture, so that two can be compared."""
_NOT_JUDGED = (212, 212, 217)
_CELL = 7
"""Pixels of a cell."""
_FROM_EDGE = np.minimum(np.arange(_CELL), np.arange(_CELL)[::-1])
_INCHES, _LARGEST_INCHES, _MAX_INCHES = 0.16, 3.4, 9.5


@dataclass(frozen=True)
class ErrorMatrix:
    """One matrix of errors, thinned out, and the place of the worst of all errors in it, if it is there."""

    title: str
    errors: Real
    worst: tuple[int, int] | None
    block: tuple[int, int] = (1, 1)
    """Of how many rows and columns a cell is the largest error."""


def error_map(ratio: Array, title: str = "error over bound", *, format: Format = "svg") -> Picture:  # noqa: A002
    """Draw errors over bounds of any rank, a panel per matrix; the limit is 1, and NaN is not judged.

    Colours are logarithmic, from 0.001 to 1,000. What exceeds the limit is crossed out, and the worst element is ringed
    and written. Of many matrices the largest error in each place is drawn, of a large one the largest of each block:
    no error is lost.
    """
    errors = np.asarray(ratio, dtype=np.float64)
    words = describe_errors(errors, title)
    with drawing():
        if not errors.size or np.isnan(errors).all():
            return picture_of(only_text(words), words, format)
        return picture_of(_draw(error_matrices(errors), words), words, format)


def describe_errors(ratio: Real, title: str) -> str:
    """Say in words what an error map shows: the worst element, how many exceed the limit, how many were not judged."""
    start = f"{safe_text(title)}, shape {' x '.join(map(str, ratio.shape)) or '()'}"
    if not ratio.size:
        return f"{start}: there is no element."
    unjudged = int(np.isnan(ratio).sum())
    if unjudged == ratio.size:
        return f"{start}: no element was judged."
    flat = int(np.nanargmax(ratio))
    index = ",".join(str(axis) for axis in np.unravel_index(flat, ratio.shape))
    where = f" at [{index}]" if index else ""
    beyond = int((ratio > 1).sum())
    many = (
        f"{beyond:,} of {ratio.size - unjudged:,} elements exceed the limit 1" if beyond else "none exceeds the limit 1"
    )
    left = f"; {unjudged:,} not judged" if unjudged else ""
    return f"{start}: largest {ratio.flat[flat]:.3g}{where}; {many}{left}."


def error_matrices(errors: Real, most_cells: int = MAX_CELLS) -> list[ErrorMatrix]:
    """Split an array into its matrices, or fold them into one where they are many; large ones are thinned out."""
    matrices = np.atleast_2d(errors)
    leading, worst = matrices.shape[:-2], np.unravel_index(int(np.nanargmax(matrices)), matrices.shape)
    row, column = int(worst[-2]), int(worst[-1])
    if math.prod(leading) > MAX_PANELS:
        folded = _largest(matrices.reshape(-1, *matrices.shape[-2:]), 0)
        return [_map(f"largest of {math.prod(leading):,} matrices", folded, (row, column), most_cells)]
    return [
        _map(
            "".join(f"[{i}]" for i, length in zip(index, leading, strict=True) if length > 1),
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


def _draw(maps: list[ErrorMatrix], words: str) -> Figure:
    sizes = [_inches(each.errors.shape) for each in maps]
    figure, axes_of = grid(sizes, [each.title for each in maps], _MAX_INCHES, with_bars=False)
    norm, colours = LogNorm(_MIN_RATIO, _MAX_RATIO, clip=True), colormaps["cividis"]
    for each, axes in zip(maps, axes_of, strict=True):
        rows, columns = each.errors.shape
        # Pixels stay pixels, however large they are drawn: a cell is a few of them, for the crosses.
        edges = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        axes.imshow(
            _crossed(each.errors, colours(norm(_filled(each.errors)))),
            interpolation="none",
            extent=edges,
            aspect="auto",
        )
        axes.set_title(each.title, loc="left", pad=5)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if each.worst is not None:
            _ring(axes, each.worst)
        _number_axes(axes, each)
    bar = colour_bar(figure, axes_of[-1], norm, colours)
    bar.axhline(1, color=INK, linewidth=2.5)
    bar.axhline(1, color=PAPER, linewidth=1)
    bar.set_yticks([_MIN_RATIO, 1, _MAX_RATIO], ["≤ 0.001", "limit 1", "≥ 1000"])
    bar.minorticks_off()
    lines = textwrap.wrap(words, max(40, int(figure.get_figwidth() * 14)))
    figure.text(0, 1, "\n".join(lines), ha="left", va="bottom", parse_math=False)
    return figure


def _filled(errors: Real) -> Real:
    return np.nan_to_num(errors, nan=_MIN_RATIO, posinf=_MAX_RATIO)


def _crossed(errors: Real, colours: Real) -> NDArray[np.uint8]:
    """Enlarge every cell, and cross out those that exceed the limit: nothing is said by colour alone."""
    pixels = (colours[..., :3] * 255).round().astype(np.uint8)
    pixels[np.isnan(errors)] = _NOT_JUDGED
    cells: NDArray[np.uint8] = np.repeat(np.repeat(pixels, _CELL, axis=0), _CELL, axis=1)
    diagonal = np.eye(_CELL, dtype=bool)
    cross = (diagonal | diagonal[::-1]) & (np.add.outer(_FROM_EDGE, _FROM_EDGE) > 2)
    cells[np.kron(errors > 1, cross).astype(bool)] = 0
    return cells


def _ring(axes: Axes, worst: tuple[int, int]) -> None:
    for colour, width in (("white", 2.6), ("#c4003e", 1.3)):
        axes.plot(
            worst[1], worst[0], "o", markersize=9, fillstyle="none", color=colour, markeredgewidth=width, clip_on=False
        )


def _number_axes(axes: Axes, each: ErrorMatrix) -> None:
    for axis, length, block in zip((axes.yaxis, axes.xaxis), each.errors.shape, each.block, strict=True):
        spacing = 1 if length <= 10 else 2 if length <= 20 else 8
        ticks = range(0, length, spacing)
        axis.set_ticks(list(ticks), [str(tick * block) for tick in ticks])


def _inches(shape: tuple[int, ...]) -> tuple[float, float]:
    rows, columns = (max(0.5, min(_LARGEST_INCHES, _INCHES * length)) for length in shape)
    return columns, rows
