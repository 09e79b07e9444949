"""Query rows that stand for all rows, if the exact answer of every row would cost too much.

Given key and value, the rows of attention do not depend on each other, so each row that is judged is judged as
strictly as ever. Which ones: the first and the last; those on both sides of the edges of tiles, whose sizes are powers
of two in the kernels that have them; and the rest at random, from a fixed seed, so that two runs judge the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.spec import query_axis

OPERATIONS_SUMMING_QUERIES = frozenset({"attention_gradients"})
"""The gradients of key and value are sums over the query rows: none can stand for another."""

MAX_UNSAMPLED_ELEMENTS = 1 << 18
"""Elements of a score matrix of which all are judged. The exact answer of so many takes about a second. A choice: more
make a run slower, fewer leave more rows unjudged."""

MAX_SAMPLED_ROWS = 64
"""Rows that stand for all: as many as the oracle takes at a time."""

_SMALLEST_TILE = 16
"""Rows of the smallest product of a tensor core: tiles of queries are powers of two from there."""
_SEED = 0  # a choice: any fixed seed makes two runs judge the same rows

RowIndices = NDArray[np.intp]


def choose_sampled_rows(problem: Problem) -> RowIndices | None:
    """Return the query rows to judge, ascending; None for all of them, if there are few or none can be left out.

    Example:
        >>> row = np.ones((1, 1, 1024, 1))
        >>> rows = choose_sampled_rows(Problem("attention", {}, {"query": row, "key": row, "value": row}))
        >>> len(rows), {0, 15, 16, 255, 256, 1023}.issubset(rows.tolist())  # the ends, and both sides of edges of tiles
        (64, True)
    """
    queries, elements = count_queries(problem.inputs), count_scores(problem.operation, problem.options, problem.inputs)
    if (
        queries <= MAX_SAMPLED_ROWS
        or elements <= MAX_UNSAMPLED_ELEMENTS
        or problem.operation in OPERATIONS_SUMMING_QUERIES
    ):
        return None
    tiles = [_SMALLEST_TILE << power for power in range(queries.bit_length()) if _SMALLEST_TILE << power < queries]
    chosen = {0, queries - 1, *tiles, *(tile - 1 for tile in tiles)}
    # RandomState: its numbers are the same in every version of NumPy.
    others = (int(row) for row in np.random.RandomState(_SEED).permutation(queries) if row not in chosen)
    drawn = [next(others) for _ in range(MAX_SAMPLED_ROWS - len(chosen))]
    return np.array(sorted({*chosen, *drawn}), dtype=np.intp)


def must_judge_all_rows(problem: Problem, rows: RowIndices | None) -> bool:
    """Tell if there are many rows and none stands for another: they are added up, or their numbers are known."""
    return rows is None and (
        problem.operation in OPERATIONS_SUMMING_QUERIES or count_queries(problem.inputs) > MAX_SAMPLED_ROWS
    )


def count_queries(inputs: Mapping[str, Array]) -> int:
    """Return the number of query rows, Lq."""
    if "log_sum_exps" in inputs:
        return int(inputs["log_sum_exps"].shape[-1])
    return int(inputs["query" if "query" in inputs else "scores"].shape[-2])


def select_stage_rows(stage: str, array: Array, rows: RowIndices | None) -> Array:
    """Keep these query rows of a stage; all of one that has none."""
    axis = query_axis(stage)
    return array if rows is None or axis is None else array.take(rows, axis)


def is_long_enough_for_rows(stage: str, array: Array, rows: RowIndices) -> bool:
    """Tell if an implementation's array, which may have any shape, is long enough to have these query rows."""
    axis = query_axis(stage)
    return axis is None or (array.ndim >= -axis and array.shape[axis] > int(rows.max(initial=-1)))


def index_in_whole_stage(stage: str, index: tuple[int, ...] | None, rows: RowIndices | None) -> tuple[int, ...] | None:
    """Return the index in the whole array of an element of its kept rows.

    Example:
        >>> rows = np.array([0, 15, 16])
        >>> index_in_whole_stage("output", (0, 0, 1, 3), rows), index_in_whole_stage("value", (0, 0, 1, 3), rows)
        ((0, 0, 15, 3), (0, 0, 1, 3))
    """
    axis = query_axis(stage)
    if index is None or rows is None or axis is None:
        return index
    moved = list(index)
    moved[axis] = int(rows[index[axis]])
    return tuple(moved)


def scatter_rows(
    stage: str, kept: NDArray[np.float64], rows: RowIndices | None, queries: int, elsewhere: float = np.inf
) -> NDArray[np.float64]:
    """Lay kept rows out in the whole array's shape; of bounds, every other row may be anything: infinity."""
    axis = query_axis(stage)
    if rows is None or axis is None:
        return kept
    shape = list(kept.shape)
    shape[axis] = queries
    whole = np.full(shape, elsewhere)
    np.moveaxis(whole, axis, 0)[rows] = np.moveaxis(kept, axis, 0)
    return whole
