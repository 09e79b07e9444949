"""Errors over bounds as matrices that can be shown, and in words; nothing here draws, or needs what does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncheck.elements import DocumentLayout, written_element
from attncheck.reports.figures.panels import safe_text

Real = NDArray[np.float64]

MAX_CELLS = 64
"""Larger matrices are thinned out to at most this many rows and columns, each cell the largest error of its block."""
MAX_PANELS = 8
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
