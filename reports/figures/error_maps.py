"""Errors over bounds, drawn element by element: where an implementation goes wrong, and how far."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attncheck.reports.figures.error_matrices import ErrorMatrix, describe_errors, error_matrices
from attncheck.reports.figures.layout import colour_bar, grid, only_text
from attncheck.reports.figures.picture import INK, PAPER, Format, Picture, drawing, picture_of

Array = NDArray[Any]
Real = NDArray[np.float64]

_MIN_RATIO, _MAX_RATIO = 1e-3, 1e3
"""Where the colours end: the same in every picture, so that two can be compared."""
_NOT_JUDGED = (212, 212, 217)
_CELL = 7
"""Pixels of a cell."""
_FROM_EDGE = np.minimum(np.arange(_CELL), np.arange(_CELL)[::-1])
_INCHES, _LARGEST_INCHES, _MAX_INCHES = 0.16, 3.4, 9.5


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
