"""Computes the distance of a result from each reading of its case in float64.

The distance selects the readings that are worth an exact answer. ``fit_number`` fits the free number of a reading.
``CaseReadings`` holds all readings of one case in one dtype, and evaluates each reading once, when the first failing
implementation needs it. The truth of the case keeps them, so that the other implementations that fail the case are
compared with all readings at little cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Real
from attncheck.attention.sampling import RowIndices
from attncheck.attention.walk import approximate_stages
from attncheck.diagnosis.readings import apply_all_readings
from attncheck.judging.alternatives import AppliedReading, as_call_with_head_options
from attncheck.judging.exact_stages import Array, Stages
from attncheck.judging.stage_bounds import StageReference
from attncheck.judging.truth import Truth, truth_of_reading
from attncheck.judging.undefined import UndefinedRows, find_undefined_rows
from attncheck.reading.problem import Problem
from attncheck.spec import DEFAULT_EMPTY_ROWS

_OCTAVES, _PER_OCTAVE, _ITERATIONS = 6, 2, 12
"""Octaves of the coarse search on both sides, its points per octave, and the steps of Newton's iteration.

A choice: the octaves reach from 1 / 64 to 64 times the given number, of either sign. A number outside them is not
found; each point costs one evaluation in float64.
"""


def fit_scale(residual: Callable[[float], Real], reference: float) -> float | None:
    """Return the scale that minimises a residual in the least-squares sense; None if there is no such scale.

    A coarse search covers some octaves on both sides of ``reference``, of either sign. Then Gauss and Newton's
    iteration refines the best scale, between its neighbours of the coarse search.

    Example:
        >>> round(fit_scale(lambda scale: np.array([1.0, 2.0]) * (scale - 0.3), reference=1.0), 6)
        0.3
    """
    grid = make_scale_grid(reference)
    far = np.array([np.abs(residual(scale)).sum() for scale in grid])
    if not np.isfinite(far).any():
        return None
    best = int(np.nanargmin(far))
    if best in (0, len(grid) - 1):
        return None
    low, scale, high = grid[best - 1 : best + 2]
    for _ in range(_ITERATIONS):
        step = 1e-5 * (high - low)
        slope = (residual(scale + step) - residual(scale - step)) / (2 * step)
        steepness = float(slope @ slope)
        if not steepness > 0:
            return None
        before, scale = scale, min(max(scale - float(slope @ residual(scale)) / steepness, low), high)
        if scale == before:
            break
    return scale if low < scale < high else None


def make_scale_grid(reference: float) -> list[float]:
    """Return the scales of the coarse search in ascending order.

    Example:
        >>> grid = make_scale_grid(0.5)
        >>> len(grid), grid[0], grid[-1]
        (51, -32.0, 32.0)
    """
    steps = np.arange(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1)
    octaves = 2.0 ** (steps / _PER_OCTAVE) * (abs(reference) or 1.0)
    return [*(-octaves[::-1]).tolist(), 0.0, *octaves.tolist()]


def shorten_number(scale: float, relative: float, reference: float) -> float:
    """Return the nearby number with the fewest digits, since constants in code are short.

    Example:
        >>> shorten_number(0.12500001, relative=1e-6, reference=1.0), shorten_number(1e-9, 1e-6, 1.0)
        (0.125, 0.0)
    """
    if abs(scale) <= relative * abs(reference):
        return 0.0
    for digits in range(2, 10):
        short = float(f"{scale:.{digits}g}")
        if abs(short - scale) <= relative * abs(scale):
            return short
    return scale


_MAX_CACHED_ELEMENTS = 1 << 13
"""Maximum size of the failing stages for which the coarse search caches its stages: 51 times as many elements."""


@dataclass(frozen=True, eq=False)
class Approximation:
    """The stages of a reading in float64, and its rows without a key."""

    stages: Stages
    undefined_rows: UndefinedRows


def approximate(problem: Problem, rows: RowIndices | None = None) -> Approximation:
    """Evaluate a reading in float64, only in the query ``rows`` if they are given."""
    plain = problem.canonical(rows)
    undefined_rows = find_undefined_rows(plain, DEFAULT_EMPTY_ROWS)
    return Approximation(approximate_stages(plain), undefined_rows)


def relative_distance(
    approximation: Approximation,
    returned: Stages,
    stage_aliases: Mapping[str, str] | None = None,
    limit: float = np.inf,
) -> float:
    """Return the largest relative mean difference of the returned stages from a reading.

    ``stage_aliases`` maps a stage to the name of the stage to compare it with. Rows without a key do not count. If the
    distance is larger than ``limit``, the result may be any of the differences that are larger.
    """
    undefined_rows, far = approximation.undefined_rows, 0.0
    some_empty = undefined_rows.empty_rows.any()
    for stage, array in returned.items():
        expected = approximation.stages.get((stage_aliases or {}).get(stage, stage))
        if expected is None or expected.shape != array.shape:
            return np.inf
        if far <= limit:
            judged = ~undefined_rows.flag_affected_by_empty_rows(stage, array.shape) if some_empty else ...
            far = max(far, _mean_difference(array.astype(np.float64)[judged].ravel(), expected[judged].ravel()))
    return far


def fit_number(
    with_number: Callable[[float], Problem],
    returned: Stages,
    reference: float,
    known: dict[float, Stages],
) -> float | None:
    """Return the number with which a problem is nearest to the returned stages; None if there is none.

    ``with_number`` returns the problem in canonical form. For a small problem, ``known`` caches the stages for the
    numbers of the coarse search.
    """
    wanted = {stage: array.astype(np.float64) for stage, array in returned.items()}
    grid, is_small = (
        frozenset(make_scale_grid(reference)),
        sum(array.size for array in wanted.values()) <= _MAX_CACHED_ELEMENTS,
    )

    def stages_with(number: float) -> Stages:
        if number in known:
            return known[number]
        stages = approximate_stages(with_number(number))
        if is_small and number in grid:
            known[number] = stages
        return stages

    def differences(number: float) -> NDArray[np.float64]:
        expected = stages_with(number)
        flat = np.concatenate([(array - expected.get(stage, np.nan)).ravel() for stage, array in wanted.items()])
        return np.where(np.isfinite(flat), flat, 0.0)

    with np.errstate(all="ignore"):
        return fit_scale(differences, reference)


def _mean_difference(array: Array, expected: Array) -> float:
    if not array.size:
        return 0.0
    with np.errstate(all="ignore"):
        difference, size = float(np.abs(array - expected).sum()), float(np.abs(expected).sum())
    if math.isfinite(difference) and math.isfinite(size):  # and so is every number
        return difference / (size + float(np.finfo(np.float64).tiny))  # infinity, and no warning, where it overflows
    finite = np.isfinite(array) & np.isfinite(expected)
    odd = ~finite & ~((array == expected) | (np.isnan(array) & np.isnan(expected)))
    with np.errstate(over="ignore"):
        difference = float(np.abs(array[finite] - expected[finite]).sum())
        size = float(np.abs(expected[finite]).sum() + np.finfo(np.float64).tiny)
        # Sums of the lowest numbers of float64 overflow.
        relative = difference / size if np.isfinite(size) else np.inf
        return float(relative + odd.mean())


@dataclass(eq=False)
class CaseReadings:
    """The readings of a case, with their stages and truths as far as they were needed."""

    truth: Truth
    _approximations: dict[AppliedReading, Approximation] = field(default_factory=dict)
    _truths: dict[tuple[AppliedReading, str, frozenset[str]], Truth | None] = field(default_factory=dict)
    _distances_from_exact: dict[tuple[AppliedReading, frozenset[str]], float] = field(default_factory=dict)

    @cached_property
    def applied_readings(self) -> tuple[AppliedReading, ...]:
        """All readings: conventions first, then mistakes and steps."""
        return self.apply_readings()

    def apply_readings(self, names: Container[str] | None = None) -> tuple[AppliedReading, ...]:
        """Return the readings with these names, or all: conventions first, then mistakes and steps.

        To make all readings of a case takes longer than to try one.
        """
        called, problem = self.truth.judged_problem.called_problem, self.truth.judged_problem.problem_without_layout
        if called is not problem:  # readings of the call first: the lowered problem has options that no case sets
            return (
                *apply_all_readings(called, names, changes_called_operation=True),
                *apply_all_readings(problem, names),
            )
        call = as_call_with_head_options(problem)
        mask = call.inputs.get("mask")
        if mask is None or mask is problem.inputs.get("mask"):
            return tuple(apply_all_readings(problem, names))
        # The call has a mask that the case lacks, such as one of queries; the readings of masks apply to it.
        of_mask = (reading for reading in apply_all_readings(call, names) if reading.name.startswith("mask-"))
        return (*apply_all_readings(problem, names), *(reading for reading in of_mask if not reading.step_replacement))

    @cached_property
    def case_approximation(self) -> Approximation:
        """The case itself in float64."""
        return approximate(self.truth.judged_problem.problem_without_layout, self.truth.judged_problem.judged_rows)

    def has_no_distance(self, alternative: AppliedReading) -> bool:
        """Return whether a reading has no distance: it is another step, or has the softcap in another place."""
        problem = self.truth.judged_problem.problem_without_layout
        moves_softcap = alternative.problem.options.get("softcap_follows") != problem.options.get("softcap_follows")
        return alternative.step_replacement is not None or moves_softcap

    def distance_from_reading(self, alternative: AppliedReading, returned: Stages, most: float = np.inf) -> float:
        """Return the distance of stages from a reading; if it is larger than ``most``, some larger number."""
        return relative_distance(self.approximate_reading(alternative), returned, alternative.stage_aliases, most)

    def approximate_reading(self, alternative: AppliedReading) -> Approximation:
        """Return a reading in float64."""
        if alternative not in self._approximations:
            self._approximations[alternative] = approximate(alternative.problem, self.truth.judged_problem.judged_rows)
        return self._approximations[alternative]

    def distance_from_exact(self, alternative: AppliedReading, stages: frozenset[str]) -> float:
        """Return the distance of the exact answer from a reading, at some stages."""
        key = alternative, stages
        if key not in self._distances_from_exact:
            exact = {stage: self.truth.exact[stage].high for stage in stages}
            self._distances_from_exact[key] = self.distance_from_reading(alternative, exact)
        return self._distances_from_exact[key]

    def truth_of(self, alternative: AppliedReading, rounding_model: str, failing: Stages) -> Truth | None:
        """Return the exact answer of a reading; None if it has none."""
        if alternative.step_replacement is None:
            key = alternative, "", frozenset[str]()
        else:
            key = alternative, rounding_model, frozenset(failing)
        if key not in self._truths:
            self._truths[key] = (
                truth_of_reading(self.truth, alternative.problem)
                if alternative.step_replacement is None
                else alternative.step_replacement(self.truth, rounding_model, failing)
            )
        return self._truths[key]


def largest_relative_bound(references: Iterable[StageReference]) -> float:
    """Return the largest ratio of a stage's mean bound to its mean absolute value."""
    largest = 0.0
    for reference in references:
        exact, max_error = reference.exact.high, reference.bound.max_error
        judged = np.isfinite(exact) & np.isfinite(max_error)
        with np.errstate(over="ignore", invalid="ignore"):  # if a sum overflows, no reading is near
            size, allowed = np.abs(exact[judged]).sum(), max_error[judged].sum()
            if size > 0:
                largest = max(largest, float(np.nan_to_num(allowed / size, posinf=0.0)))
    return largest
