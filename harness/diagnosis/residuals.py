"""The distance of a result from readings of its case, in float64 NumPy, to choose what is worth an exact answer.

Beside it the number with which a result comes nearest, and all readings of one case in one dtype, each worked out once,
when the first implementation that fails needs it. A truth keeps what they come to, so that the next implementation that
fails the same case is compared with all of them at little cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Real
from attncheck.attention.sampling import Rows
from attncheck.attention.walk import approximate_stages
from attncheck.diagnosis.readings import readings_of
from attncheck.judging.alternatives import Alternative, delivered
from attncheck.judging.exact_stages import Array, Stages
from attncheck.judging.stage_bounds import StageReference
from attncheck.judging.truth import Truth, truth_of_reading
from attncheck.judging.undefined import UndefinedRows, find_undefined_rows
from attncheck.reading.problem import Problem
from attncheck.spec import DEFAULT_EMPTY_ROWS

_OCTAVES, _PER_OCTAVE, _ITERATIONS = 6, 2, 12


def fit_scale(residual: Callable[[float], Real], own: float) -> float | None:
    """Return the scale at which a residual is smallest, by least squares; None where there is no such place.

    A coarse search over some octaves on both sides of ``own``, of either sign, then Gauss and Newton's iteration, which
    stays between the neighbours of the coarse best.
    """
    grid = grid_around(own)
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


def grid_around(own: float) -> list[float]:
    """Return the scales of the coarse search, in their order."""
    octaves = 2.0 ** (np.arange(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1) / _PER_OCTAVE) * (abs(own) or 1.0)
    return [*(-octaves[::-1]).tolist(), 0.0, *octaves.tolist()]


def shortest(scale: float, relative: float, own: float) -> float:
    """Return the number of fewest digits this close to a scale: a constant in code is seldom longer."""
    if abs(scale) <= relative * abs(own):
        return 0.0
    for digits in range(2, 10):
        short = float(f"{scale:.{digits}g}")
        if abs(short - scale) <= relative * abs(scale):
            return short
    return scale


_MAX_KEPT = 1 << 13
"""Elements that failing stages may have for what is tried beside them to be kept: half a hundred times as much."""


@dataclass(frozen=True, eq=False)
class Approximation:
    """The stages of a reading in float64, and its rows without a key."""

    stages: Stages
    undefined_rows: UndefinedRows


def approximate(problem: Problem, rows: Rows | None = None) -> Approximation:
    """Evaluate a reading in float64, of some query rows alone where they are given."""
    plain = problem.canonical(rows)
    undefined_rows = find_undefined_rows(plain, DEFAULT_EMPTY_ROWS)
    return Approximation(approximate_stages(plain), undefined_rows)


def residual(
    approximation: Approximation,
    returned: Stages,
    stage_aliases: Mapping[str, str] | None = None,
    most: float = np.inf,
) -> float:
    """Return how far stages are from a reading: of their mean differences, each over its size, the largest.

    ``stage_aliases`` names the stages to compare with where they have other names. Rows without a key do not count. Of
    what is farther than ``most`` it may return any of the differences that are.
    """
    undefined_rows, far = approximation.undefined_rows, 0.0
    some_empty = undefined_rows.empty.any()
    for stage, array in returned.items():
        other = approximation.stages.get((stage_aliases or {}).get(stage, stage))
        if other is None or other.shape != array.shape:
            return np.inf
        if far <= most:
            judged = ~undefined_rows.affected_by_empty(stage, array.shape) if some_empty else ...
            far = max(far, _mean_difference(array.astype(np.float64)[judged].ravel(), other[judged].ravel()))
    return far


def best_number(
    with_number: Callable[[float], Problem],
    returned: Stages,
    own: float,
    known: dict[float, Stages],
) -> float | None:
    """Return the number with which a problem comes nearest to what was returned; None where none is nearest.

    ``with_number`` gives a problem in canonical form; of a small one, ``known`` keeps what it comes to with the numbers
    that are tried whatever was returned.
    """
    stages = {stage: array.astype(np.float64) for stage, array in returned.items()}
    grid, is_small = frozenset(grid_around(own)), sum(array.size for array in stages.values()) <= _MAX_KEPT

    def stages_with(number: float) -> Stages:
        if number in known:
            return known[number]
        found = approximate_stages(with_number(number))
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
    with np.errstate(all="ignore"):
        difference, size = float(np.abs(array - other).sum()), float(np.abs(other).sum())
    if math.isfinite(difference) and math.isfinite(size):  # and so is every number
        return difference / (size + float(np.finfo(np.float64).tiny))  # infinity, and no warning, where it overflows
    finite = np.isfinite(array) & np.isfinite(other)
    odd = ~finite & ~((array == other) | (np.isnan(array) & np.isnan(other)))
    with np.errstate(over="ignore"):
        difference = float(np.abs(array[finite] - other[finite]).sum())
        size = float(np.abs(other[finite]).sum() + np.finfo(np.float64).tiny)
        # Sums of the lowest numbers of float64 overflow.
        relative = difference / size if np.isfinite(size) else np.inf
        return float(relative + odd.mean())


@dataclass(eq=False)
class Readings:
    """The readings of a case, with what they come to as far as anybody has asked."""

    truth: Truth
    _approximate: dict[Alternative, Approximation] = field(default_factory=dict)
    _truths: dict[tuple[Alternative, str, frozenset[str]], Truth | None] = field(default_factory=dict)
    _apart: dict[tuple[Alternative, frozenset[str]], float] = field(default_factory=dict)

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Conventions first, then mistakes and steps."""
        called, problem = self.truth.judged.called, self.truth.judged.problem
        if called is not problem:  # first, for what it was lowered to has options that nobody was asked for
            return (*readings_of(called, before_lowering=True), *readings_of(problem))
        return (*readings_of(problem), *_of_delivered_mask(problem))

    @cached_property
    def own(self) -> Approximation:
        """The case itself in float64."""
        return approximate(self.truth.judged.problem, self.truth.judged.query_rows)

    def is_open(self, alternative: Alternative) -> bool:
        """Whether no distance says how near a reading is.

        Beside a softcap in another place, with which the problem is read already, every other reading has one.
        """
        problems = self.truth.judged.problem, alternative.problem
        own, other = (problem.options.get("softcap_follows") for problem in problems)
        return alternative.replacement is not None or own != other

    def residual(self, alternative: Alternative, returned: Stages, most: float = np.inf) -> float:
        """Return how far stages are from a reading; of what is farther than ``most``, only that."""
        return residual(self.approximation(alternative), returned, alternative.stage_aliases, most)

    def approximation(self, alternative: Alternative) -> Approximation:
        """Return a reading in float64."""
        if alternative not in self._approximate:
            self._approximate[alternative] = approximate(alternative.problem, self.truth.judged.query_rows)
        return self._approximate[alternative]

    def separation(self, alternative: Alternative, stages: frozenset[str]) -> float:
        """Return how far the exact answer itself is from a reading, at some stages."""
        key = alternative, stages
        if key not in self._apart:
            exact = {stage: self.truth.exact[stage].high for stage in stages}
            self._apart[key] = self.residual(alternative, exact)
        return self._apart[key]

    def truth_of(self, alternative: Alternative, rounding_model: str, failing: Stages) -> Truth | None:
        """Return the exact answer of a reading; None where it has none."""
        if alternative.replacement is None:
            key = alternative, "", frozenset[str]()
        else:
            key = alternative, rounding_model, frozenset(failing)
        if key not in self._truths:
            self._truths[key] = (
                truth_of_reading(self.truth, alternative.problem)
                if alternative.replacement is None
                else alternative.replacement(self.truth, rounding_model, failing)
            )
        return self._truths[key]


def _of_delivered_mask(problem: Problem) -> Iterator[Alternative]:
    """Yield what may be done to a mask that only the call has: of queries, or of positions that no argument tells."""
    asked = delivered(problem)
    mask = asked.inputs.get("mask")
    if mask is None or mask is problem.inputs.get("mask"):
        return
    yield from (each for each in readings_of(asked) if each.name.startswith("mask-") and not each.replacement)


def relative_bound(references: Iterable[StageReference]) -> float:
    """Return the mean bound of stages over their mean size, the largest of them."""
    largest = 0.0
    for reference in references:
        exact, max_error = reference.exact.high, reference.bound.max_error
        judged = np.isfinite(exact) & np.isfinite(max_error)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float64's range nothing is near
            size, allowed = np.abs(exact[judged]).sum(), max_error[judged].sum()
            if size > 0:
                largest = max(largest, float(np.nan_to_num(allowed / size, posinf=0.0)))
    return largest
