"""The bounds of results whose score matrix is never held whole: some query rows at a time, with the keys they may see.

Given key and value, the bounds of a row are made of what that row attends to, so they are the same in any company, but
for what the rows of a head share (the extremes of the values, powers of two that cancel): that gets tighter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import Arrays, Bound, Options, bounds_of
from attncheck.attention.errors import Real
from attncheck.attention.problem import LOGITS, Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.oracle.sampling import axis_of_queries, rows_of_stage

ELEMENTS_AT_A_TIME = 1 << 18
"""Elements of the score matrix at a time; about thirty arrays of so many float64 numbers are held at once."""


def bounds_by_rows(
    operation: str,
    options: Options,
    inputs: Arrays,
    rounding: RoundingModel,
    exact: Mapping[str, Real],
    stages: Sequence[str],
) -> dict[str, Bound]:
    """Bound the error of stages without an axis of keys, as ``accumulated_bounds`` does."""
    problem = Problem.of(operation, options, inputs)
    attended = next(exact[stage] for stage in reversed(LOGITS) if stage in exact) > -np.inf
    *_, queries, keys = attended.shape
    size = max(1, ELEMENTS_AT_A_TIME // max(math.prod(attended.shape) // max(queries, 1), 1))
    parts = []
    for start in range(0, max(queries, 1), size):
        rows = np.arange(start, min(start + size, queries))
        first, stop = _span(attended[..., rows, :]) if keys else (0, 0)
        part = problem.of_rows(rows).of_keys(first, stop)
        of_part = {stage: _part_of(stage, array, rows, first, stop) for stage, array in exact.items()}
        parts.append(bounds_of(part, rounding, of_part, stages))
    return {stage: _joined(stage, [part[stage] for part in parts]) for stage in stages}


def _span(attended: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the first key that any row attends to, and the one after the last."""
    keys = np.flatnonzero(attended.any(axis=tuple(range(attended.ndim - 1))))
    return (int(keys[0]), int(keys[-1]) + 1) if len(keys) else (0, 1)


def _part_of(stage: str, array: Real, rows: NDArray[np.intp], first: int, stop: int) -> Real:
    part = rows_of_stage(stage, array, rows)
    return part if stage in ("output", "log_sum_exp") else part[..., first:stop]


def _joined(stage: str, parts: Sequence[Bound]) -> Bound:
    axis = axis_of_queries(stage)
    assert axis is not None
    return Bound(
        np.concatenate([part.max_error for part in parts], axis), np.concatenate([part.sigma for part in parts], axis)
    )
