"""Numbers as pictures on the page: matrices with coloured cells, which stay text, and maps of errors over bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from attncheck.elements import told_apart, written_element
from attncheck.reports.figures.error_matrices import ErrorMatrix, error_matrices
from attncheck.reports.figures.panels import MAX_ANNOTATED, Panel, cell_text, ink_on, shades
from attncheck.reports.html.text import BEYOND, LEVELS, NOT_JUDGED

_BLACK = "#000000"


@dataclass(frozen=True)
class HeatTable:
    """One matrix: its title, what its rows and columns are, their names, and a colour and a text per cell."""

    title: str
    axes: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, bool, str, str], ...]], ...]
    """each row's name, and of each cell its colour, whether its ink is light, its number, and what else is printed"""


@dataclass(frozen=True)
class Heat:
    """A matrix as a table, or, where it is too large for numbers, as a picture."""

    table: HeatTable | None
    picture: Markup


def heat_of(panel: Panel, number: int) -> Heat:
    """Return a matrix to show; ``number`` keeps the parts of one picture apart from those of another."""
    if not panel.matrix.size or max(panel.matrix.shape) > MAX_ANNOTATED:
        from attncheck.reports.figures.heatmaps import heatmaps  # Matplotlib takes long to load, and few pages need it

        # Own markup: made by matplotlib, with every text escaped.
        markup = heatmaps([panel]).markup
        for reference in ('id="', "url(#", 'href="#'):
            markup = markup.replace(reference, f"{reference}heat{number}-")
        return Heat(None, Markup(markup))
    return Heat(_table(panel), Markup())


def _table(panel: Panel) -> HeatTable:
    colours = shades(panel)
    rows = []
    for index in range(panel.matrix.shape[0]):
        cells = tuple(
            ("#" + bytes(colour).hex(), ink_on(colour) != _BLACK, *cell_text(panel, index, column))
            for column, colour in enumerate(colours[index])
        )
        rows.append((_name(panel.row_labels, index), cells))
    columns = tuple(_name(panel.column_labels, index) for index in range(panel.matrix.shape[1]))
    axes = [f"{panel.row_axis} ↓" if panel.row_axis else "", f"{panel.column_axis} →" if panel.column_axis else ""]
    return HeatTable(panel.title, " ".join(filter(None, axes)), columns, tuple(rows))


def _name(labels: object, index: int) -> str:
    """Return a row's or column's name, its number where it has none."""
    return str(labels[index]) if isinstance(labels, list | tuple) and index < len(labels) else str(index)


Real = NDArray[np.float64]

_MAX_CELLS = 32
"""The page shows where an error lies; `attncheck show` draws larger matrices finer."""
_WIDTH, _MIN_PIXELS, _MAX_PIXELS = 220, 7, 20
"""Pixels: of a picture, if its cells are neither smaller nor larger than these."""


def error_pictures(errors: Real, title: str, *, is_document: bool = False) -> list[tuple[str, Markup]]:
    """Return a title and an SVG per matrix of errors over bounds; what exceeds the bound is crossed out."""
    if not errors.size or np.isnan(errors).all():
        return []
    return [
        (matrix.title, _picture(matrix, title))
        for matrix in error_matrices(errors, _MAX_CELLS, is_document=is_document)
    ]


_MOST_COMPARED = 64
"""Elements of an array that is small enough to be read."""


@dataclass(frozen=True)
class ComparedMatrix:
    """A small matrix as computed, as it should be, and the difference: a text for each element, and what is wrong."""

    title: str
    columns: range
    tables: tuple[tuple[str, tuple[tuple[tuple[str, bool], ...], ...]], ...]
    """each table's name, and of each row the texts, each with whether that element is wrong"""

    @property
    def letters(self) -> int:
        """How much markup it takes."""
        return sum(60 + sum(20 + len(text) for row in rows for text, _ in row) for _, rows in self.tables)


def compared_matrices(
    computed: NDArray[Any], exact: NDArray[Any], errors: Real, *, is_document: bool = False
) -> list[ComparedMatrix]:
    """Return the numbers of a small array, a matrix for each index of its leading axes; nothing of a larger one."""
    if not 0 < errors.size <= _MOST_COMPARED:
        return []
    arrays = [np.atleast_2d(np.asarray(each, dtype=np.float64)) for each in (computed, exact, errors)]
    leading = arrays[0].shape[:-2]
    several = [axis for axis, length in enumerate(leading) if length > 1]
    among = several if is_document or not several else range(len(leading))
    return [
        _compared(
            written_element([index[axis] for axis in among]) if among else "", *(array[index] for array in arrays)
        )
        for index in np.ndindex(leading)
    ]


def _compared(title: str, computed: Real, exact: Real, errors: Real) -> ComparedMatrix:
    texts: list[list[list[tuple[str, bool]]]] = [[], [], []]
    for row in zip(computed.tolist(), exact.tolist(), (errors > 1).tolist(), strict=True):
        cells = [(_beside(*of, wrong=wrong), wrong) for *of, wrong in zip(*row, strict=True)]
        for place, rows in enumerate(texts):
            rows.append([(texts_of[place], wrong) for texts_of, wrong in cells])
    names = ("computed", "exact", "difference")
    tables = tuple((name, tuple(map(tuple, rows))) for name, rows in zip(names, texts, strict=True))
    return ComparedMatrix(title, range(computed.shape[1]), tables)


def _beside(computed: float, exact: float, *, wrong: bool) -> tuple[str, str, str]:
    """Write two numbers and their difference, with all digits that tell a wrong one from the right one."""
    texts = told_apart(computed, exact) if wrong else (f"{computed:.4g}", f"{exact:.4g}")
    return (*texts, f"{computed - exact:.2g}")


def _picture(matrix: ErrorMatrix, title: str) -> Markup:
    rows, columns = matrix.errors.shape
    levels = _levels(matrix.errors)
    paths = [
        f'<path class="{name}" d="{path}"/>'
        for number, name in enumerate([*(name for _, name, _ in LEVELS), BEYOND[0], NOT_JUDGED[0]])
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
    limits = [limit for limit, _, _ in LEVELS]
    levels = np.searchsorted(limits, np.nan_to_num(errors, nan=0.0, posinf=np.inf), side="left")
    return np.where(np.isnan(errors), len(limits) + 1, levels)


def _runs(chosen: NDArray[np.bool_]) -> Iterator[str]:
    """Write the cells as rectangles, neighbours in a row as one."""
    for y, row in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(np.int8), [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield f"M{start} {y}h{end - start}v1h-{end - start}z"
