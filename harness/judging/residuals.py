"""How near a result is to a reading of its case: measured in float64 NumPy, to choose what is worth an exact answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.problem import Problem
from attncheck.attention.walk import value_walk
from attncheck.backends import numpy_backend
from attncheck.execution.operations import run_operation
from attncheck.judging.scales import fit_scale, grid_around
from attncheck.judging.undefined_rows import SpecialRows, special_rows
from attncheck.reading.lowering import AttentionProblem, canonical_form
from attncheck.spec import DEFAULT_EMPTY_ROWS, FOLDED_INPUTS, computed_stages

Array = NDArray[Any]
Stages = Mapping[str, Array]

_MAX_KEPT = 1 << 13
"""Elements that failing stages may have for what is tried beside them to be kept: half a hundred times as much."""


@dataclass(frozen=True, eq=False)
class Approximation:
    """The stages of a reading in float64, empty where NumPy cannot do it, and its rows without a key."""

    stages: Stages
    special: SpecialRows


def approximate(operation: str, posed: AttentionProblem) -> Approximation:
    """Evaluate a reading in float64."""
    plain = canonical_form(operation, posed.options, posed.inputs)
    special = special_rows(operation, plain.options, plain.inputs, DEFAULT_EMPTY_ROWS)
    return Approximation(approximate_stages(operation, plain), special)


def residual(approximation: Approximation, returned: Stages, stage_aliases: Mapping[str, str] | None = None) -> float:
    """Return how far stages are from a reading: of their mean differences, each over its size, the largest.

    ``stage_aliases`` names the stages to compare with where they have other names. Rows without a key do not count.
    """
    special, far = approximation.special, 0.0
    for stage, array in returned.items():
        other = approximation.stages.get((stage_aliases or {}).get(stage, stage))
        if other is None or other.shape != array.shape:
            return np.inf
        judged = ~special.affected_by_empty(stage, array.shape)
        far = max(far, _mean_difference(array.astype(np.float64)[judged], other[judged]))
    return far


def best_number(
    operation: str,
    pose: Callable[[float], AttentionProblem],
    returned: Stages,
    own: float,
    known: dict[float, Stages],
) -> float | None:
    """Return the number with which a problem comes nearest to what was returned; None where none is nearest.

    ``pose`` gives a problem in canonical form; of a small one, ``known`` keeps what it comes to with the numbers that
    are tried whatever was returned.
    """
    stages = {stage: array.astype(np.float64) for stage, array in returned.items()}
    grid, is_small = frozenset(grid_around(own)), sum(array.size for array in stages.values()) <= _MAX_KEPT

    def stages_with(number: float) -> Stages:
        if number in known:
            return known[number]
        found = approximate_stages(operation, pose(number))
        if is_small and number in grid:
            known[number] = found
        return found

    def differences(number: float) -> NDArray[np.float64]:
        other = stages_with(number)
        flat = np.concatenate([(array - other.get(stage, np.nan)).ravel() for stage, array in stages.items()])
        return np.where(np.isfinite(flat), flat, 0.0)

    with np.errstate(all="ignore"):
        return fit_scale(differences, own)


def _mean_difference(array: Array, other: Array) -> float:
    if not array.size:
        return 0.0
    finite = np.isfinite(array) & np.isfinite(other)
    odd = ~finite & ~((array == other) | (np.isnan(array) & np.isnan(other)))
    with np.errstate(over="ignore"):
        difference = np.abs(array[finite] - other[finite]).sum()
        size = np.abs(other[finite]).sum() + np.finfo(np.float64).tiny
        # Sums of the lowest numbers of float64 overflow.
        relative = difference / size if np.isfinite(size) else np.inf
        return float(relative + odd.mean())


def approximate_stages(operation: str, plain: AttentionProblem) -> dict[str, Array]:
    """Return the stages of a problem in canonical form, from the NumPy backend; nothing where it cannot do it.

    A backend takes no inputs that this form alone has; these problems are walked in float64.
    """
    inputs = {name: array if array.dtype == bool else array.astype(np.float64) for name, array in plain.inputs.items()}
    options = {name: value for name, value in plain.options.items() if value is not None}
    try:
        with np.errstate(all="ignore"):
            if not inputs.keys().isdisjoint(FOLDED_INPUTS):
                return _walked(Problem.of(operation, options, inputs))
            return dict(run_operation(numpy_backend, operation, inputs, options))
    except NotImplementedError:
        return {}


def _walked(problem: Problem) -> dict[str, Array]:
    walk, stages = value_walk(problem), computed_stages(problem.operation, problem.options, problem.inputs)
    return {stage: problem.without_added(stage, walk.node(stage)) for stage in stages}
