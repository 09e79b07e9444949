"""Where things go in a figure: matrices side by side, a colour bar beside one, or nothing but words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure

from attncheck.reports.figures.panels import safe_text

_INCHES_PER_LETTER = 0.064
_BESIDE, _BAR, _ABOVE = 0.5, 0.65, 0.75
"""Inches beside a matrix for ticks, for a colour bar, and above and below it for titles and ticks."""


class _Cell(NamedTuple):
    """A matrix's own width and height, and the width that it takes with what is beside it."""

    width: float
    height: float
    taken: float


def grid(
    sizes: Sequence[tuple[float, float]], titles: Sequence[str], most_inches: float, *, with_bars: bool
) -> tuple[Figure, list[Axes]]:
    """Lay axes of these widths and heights out in rows, with room for their titles and ticks; all in inches."""
    lines = _broken(_cells(sizes, titles, with_bars=with_bars), most_inches)
    width = max(sum(each.taken for each in line) for line in lines)
    height = sum(max(each.height for each in line) + _ABOVE for line in lines)
    figure = Figure(figsize=(width, height))
    axes, top = [], height
    for line in lines:
        left = _BESIDE
        for each in line:
            box = (left, top - 0.35 - each.height, each.width, each.height)
            axes.append(figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height)))
            left += each.taken
        top -= max(each.height for each in line) + _ABOVE
    return figure, axes


def page_lengths(
    sizes: Sequence[tuple[float, float]],
    titles: Sequence[str],
    most_inches: float,
    most_height: float,
    *,
    with_bars: bool,
) -> list[int]:
    """Return how many of these axes, in their order, go on each page of this height; a higher one has its own."""
    pages, height = [0], 0.0
    for line in _broken(_cells(sizes, titles, with_bars=with_bars), most_inches):
        taken = max(each.height for each in line) + _ABOVE
        if pages[-1] and height + taken > most_height:
            pages.append(0)
            height = 0.0
        pages[-1] += len(line)
        height += taken
    return pages


def _cells(sizes: Sequence[tuple[float, float]], titles: Sequence[str], *, with_bars: bool) -> list[_Cell]:
    beside = _BESIDE + (_BAR if with_bars else 0)
    return [
        _Cell(*size, max(size[0], _title_inches(title)) + beside) for size, title in zip(sizes, titles, strict=True)
    ]


def _title_inches(title: str) -> float:
    return _INCHES_PER_LETTER * max(map(len, title.splitlines()), default=0)


def _broken(cells: Sequence[_Cell], most: float) -> list[list[_Cell]]:
    """Break a line of things where it would get too wide."""
    lines: list[list[_Cell]] = [[]]
    for cell in cells:
        if lines[-1] and sum(each.taken for each in lines[-1]) + cell.taken > most:
            lines.append([])
        lines[-1].append(cell)
    return lines


def only_text(words: str) -> Figure:
    """Return a figure that says why there is nothing to see."""
    figure = Figure(figsize=(4, 0.4))
    figure.text(0.02, 0.4, safe_text(words), parse_math=False)
    return figure


def colour_bar(figure: Figure, axes: Axes, norm: Normalize, colours: Colormap) -> Axes:
    """Draw the scale of a matrix beside it, and return its axes."""
    box = axes.get_position()
    inch = 1 / figure.get_figwidth()
    bar = figure.add_axes((box.x1 + 0.1 * inch, box.y0, 0.1 * inch, box.height))
    figure.colorbar(ScalarMappable(norm, colours), cax=bar).outline.set_visible(False)
    return bar
