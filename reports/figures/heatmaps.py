"""Matrices as annotated heatmaps, and errors over bounds as maps, each with what it shows in words.

Pictures are SVG with text as text: it can be selected and scaled, and a matrix of 4 x 4 takes a few KB. By itself a
picture is dark ink on white paper; put into a page, its style sheet can give the classes ``paper`` and ``ink`` another
fill and ``rule`` another stroke. Colours run from light to dark in one hue, or along cividis, so that they are told
apart by lightness alone; what matters is marked and written as well.

Errors over bounds, drawn element by element: where an implementation goes wrong, and how far.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from attncheck.reports.figures.panels import (
    LIGHTEST,
    MAX_ANNOTATED,
    MAX_CELLS,
    MISPRINT,
    PURPLE,
    ErrorMatrix,
    Panel,
    Pixels,
    cell_text,
    describe,
    describe_errors,
    error_matrices,
    ink_on,
    safe_text,
    shades,
    value_range,
)
from attncheck.reports.figures.picture import (
    INK,
    PAPER,
    Format,
    Picture,
    colour_bar,
    drawing,
    grid,
    only_text,
    page_lengths,
    pdf_of,
    picture_of,
)

Array = NDArray[Any]
_INCHES_PER_LETTER = 0.068
_TITLE_LETTERS = 40
_MOST_INCHES = 9.5
"""Of a page's width."""


def annotated_heatmap(
    matrix: Array,
    title: str,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    *,
    colour: str = PURPLE,
    row_axis: str = "",
    column_axis: str = "",
    format: Format = "svg",  # noqa: A002
) -> Picture:
    """Draw a matrix as coloured cells, each with its number in it; large ones without the numbers, or thinned out."""
    panel = Panel(title, matrix, colour, row_axis, column_axis, row_labels, column_labels)
    return heatmaps([panel], format=format)


def heatmaps(
    panels: Sequence[Panel],
    *,
    heading: str = "",
    most_inches: float = _MOST_INCHES,
    format: Format = "svg",  # noqa: A002
) -> Picture:
    """Draw matrices as annotated heatmaps, side by side as far as the width goes, below a heading if there is one."""
    with drawing():
        figure, words = _figure(panels, heading, most_inches)
        return picture_of(figure, words, format)


def heatmap_document(pages: Sequence[Sequence[Panel]], headings: Sequence[str]) -> bytes:
    """Draw pages of matrices as one PDF."""
    with drawing():
        return pdf_of([_figure(page, heading, _MOST_INCHES)[0] for page, heading in zip(pages, headings, strict=True)])


def _figure(panels: Sequence[Panel], heading: str, most_inches: float) -> tuple[Figure, str]:
    """Lay matrices out and draw them; return the figure, and what it shows in words."""
    drawn = [panel for panel in panels if panel.matrix.size]
    empty = [f"{safe_text(panel.title)}: empty, shape {' x '.join(map(str, panel.matrix.shape))}" for panel in panels]
    words = [describe(panel) for panel in drawn] or empty or ["nothing to draw"]
    if not drawn:
        return only_text("; ".join(words)), "; ".join(words)
    texts, sizes, titles = _measured(drawn)
    figure, axes = grid(sizes, titles, most_inches, with_bars=None in texts)
    for panel, title, text, axis_of in zip(drawn, titles, texts, axes, strict=True):
        axis_of.set_title(title, loc="left", pad=5, parse_math=False)
        _draw_matrix(figure, axis_of, panel, text)
    if heading:
        figure.text(0, 1, _broken(heading, 110), weight="bold", va="bottom", parse_math=False)
    return figure, " ".join(f"{word}." for word in (*filter(None, [safe_text(heading, 400)]), *words))


def _measured(
    drawn: Sequence[Panel],
) -> tuple[list[list[list[str]] | None], list[tuple[float, float]], list[str]]:
    """Return what is written into the cells of each matrix, its size in inches, and its title."""
    texts = [_annotations(panel) for panel in drawn]
    sizes = [_inches(panel, text) for panel, text in zip(drawn, texts, strict=True)]
    return texts, sizes, [_title(panel) for panel in drawn]


def heatmap_pages(panels: Sequence[Panel], most_height: float = 11.0) -> list[list[Panel]]:
    """Split matrices into pages on which they can be read; empty ones come last."""
    drawn = [panel for panel in panels if panel.matrix.size]
    if not drawn:
        return [list(panels)]
    texts, sizes, titles = _measured(drawn)
    left = iter(drawn)
    lengths = page_lengths(sizes, titles, _MOST_INCHES, most_height, with_bars=None in texts)
    pages = [[next(left) for _ in range(length)] for length in lengths]
    pages[-1] += [panel for panel in panels if not panel.matrix.size]
    return pages


def _broken(text: str, letters: int) -> str:
    return "\n".join(textwrap.wrap(safe_text(text, 400), letters))


def _title(panel: Panel) -> str:
    """Break a long title into two lines, and say what is left out of a large matrix."""
    lines = textwrap.wrap(safe_text(panel.title, 2 * _TITLE_LETTERS), _TITLE_LETTERS)[:2]
    rows, columns = (math.ceil(length / MAX_CELLS) for length in panel.matrix.shape)
    if (rows, columns) != (1, 1):
        lines = [*lines[:1], f"1 of {rows} rows, 1 of {columns} columns"]
    return "\n".join(lines)


def _annotations(panel: Panel) -> list[list[str]] | None:
    if max(panel.matrix.shape) > MAX_ANNOTATED:
        return None
    rows, columns = panel.matrix.shape
    return [[_annotation(panel, row, column) for column in range(columns)] for row in range(rows)]


def _annotation(panel: Panel, row: int, column: int) -> str:
    """Write a cell's number, and beneath it what is printed instead."""
    text, printed = cell_text(panel, row, column)
    return f"{text}\nprinted {safe_text(printed, 12)}" if printed else text


def _inches(panel: Panel, texts: list[list[str]] | None) -> tuple[float, float]:
    """Return a matrix's width and height: cells as wide as their longest number, in large ones small squares."""
    rows, columns = (min(length, MAX_CELLS) for length in panel.matrix.shape)
    if texts is None:
        cell = min(0.16, 4.5 / max(rows, columns))
        return max(columns * cell, 0.5), max(rows * cell, 0.5)
    longest = max(len(line) for row in texts for text in row for line in text.split("\n"))
    return columns * max(0.34, 0.12 + _INCHES_PER_LETTER * longest), rows * 0.3


def _draw_matrix(figure: Figure, axes: Axes, panel: Panel, texts: list[list[str]] | None) -> None:
    step = (math.ceil(panel.matrix.shape[0] / MAX_CELLS), math.ceil(panel.matrix.shape[1] / MAX_CELLS))
    pixels = shades(panel)[:: step[0], :: step[1]]
    _draw_cells(axes, pixels)
    _label(axes, panel, pixels.shape, step)
    low, high = value_range(panel.matrix)
    if texts is None and math.isfinite(high - low):
        palette = LinearSegmentedColormap.from_list(panel.colour, [LIGHTEST, panel.colour])
        colour_bar(figure, axes, Normalize(low, high if high > low else low + 1), palette)
    for row, column in np.ndindex(pixels.shape[:2]) if texts is not None else ():
        text, ink = texts[row][column], ink_on(pixels[row, column])  # type: ignore[index]
        axes.text(column, row, text, ha="center", va="center", color=ink, in_layout=False)
    for row, column in panel.printed if texts is not None else ():
        place = (column - 0.48, row - 0.47)
        for colour, width in (("white", 3.2), (MISPRINT, 1.8)):
            axes.add_patch(Rectangle(place, 0.96, 0.94, fill=False, edgecolor=colour, linewidth=width))


def _draw_cells(axes: Axes, pixels: Pixels) -> None:
    """Fill the cells and rule white lines between them."""
    # Pixels stay pixels, however large they are drawn: a cell is one of them.
    axes.imshow(pixels, interpolation="none", aspect="auto")
    axes.set_xticks(np.arange(-0.5, pixels.shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, pixels.shape[0]), minor=True)
    if max(pixels.shape) <= MAX_ANNOTATED:
        axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _label(axes: Axes, panel: Panel, shape: tuple[int, ...], step: tuple[int, int]) -> None:
    """Number the rows and columns from 0, or name them; of many only some."""
    named = (panel.row_labels, panel.column_labels)
    for which, (axis, labels) in enumerate(zip((axes.yaxis, axes.xaxis), named, strict=True)):
        spacing = 1 if shape[which] <= MAX_ANNOTATED else 8
        ticks = range(0, shape[which], spacing)
        texts = [safe_text(labels[tick], 24) if tick < len(labels) else str(tick * step[which]) for tick in ticks]
        axis.set_ticks(list(ticks), texts, parse_math=False)
    axes.set_ylabel(safe_text(panel.row_axis, 40), parse_math=False)
    axes.set_xlabel(safe_text(panel.column_axis, 40), parse_math=False)


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
    sizes = [_inches_of_map(each.errors.shape) for each in maps]
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


def _inches_of_map(shape: tuple[int, ...]) -> tuple[float, float]:
    rows, columns = (max(0.5, min(_LARGEST_INCHES, _INCHES * length)) for length in shape)
    return columns, rows
