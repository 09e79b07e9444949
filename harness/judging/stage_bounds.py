"""Error bounds of stages by rounding model, the exact values that they belong to, and condition numbers.

Bounds are computed once for all implementations of a rounding model. A condition number compares the bound of a number
with the number itself: ``docs/numerics.md``, section 7, on condition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import (
    Bound,
    bound_accumulated_errors,
    bound_accumulated_errors_by_rows,
    bound_introduced_errors,
    bound_stages,
)
from attncheck.attention.errors import Real
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.flags import Flags
from attncheck.attention.problem import Computation
from attncheck.judging.exact_stages import Array, ExactStages, ExactStep, Stages
from attncheck.judging.undefined import UndefinedRows, remove_bounds_of_overflown
from attncheck.spec import GRADIENTS, GRADIENTS_THROUGH_SCORES, OPERATIONS, stage_dtype, wide_dtype
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import FORMATS, RoundingModel

_GRADIENTS_FROM_WEIGHTS = frozenset(GRADIENTS).difference(GRADIENTS_THROUGH_SCORES)


@dataclass(frozen=True, eq=False)
class StageBounds:
    """The error bounds of exact stages in a dtype.

    ``uniform_rows`` are the rows without a key, if their weights are uniform by convention. Bounds that
    ``has_wide_statistics`` are for implementations that return log_sum_exp in float32 and outputs in 16 bits.
    """

    exact_stages: ExactStages
    dtype: str
    uniform_rows: UndefinedRows | None = None
    has_wide_statistics: bool = False
    _bounds_by_model: dict[str, Mapping[str, Bound]] = field(default_factory=dict, init=False)
    _accumulated_bounds: dict[RoundingModel, Mapping[str, Bound]] = field(default_factory=dict, init=False)
    """Bounds from the inputs alone, before values that are not finite get a bound of 0."""
    _cached_step_bounds: dict[tuple[Any, ...], Mapping[str, Bound] | None] = field(default_factory=dict, init=False)

    def stage_dtype(self, stage: str) -> str:
        """Return the dtype in which a stage is returned."""
        dtype = stage_dtype(self.exact_stages.canonical_problem.operation, stage, self.dtype)
        return (wide_dtype(stage, dtype) if self.has_wide_statistics else None) or dtype

    def has_wider_stage(self, stages: Stages) -> bool:
        """Return whether a stage has a wider dtype than these bounds are for, and may have it."""
        return any(str(array.dtype) == wide_dtype(stage, self.stage_dtype(stage)) for stage, array in stages.items())

    def find_rounding_model(self, rounding_model: str) -> RoundingModel:
        """Return a rounding model by its name, in the dtype of the inputs."""
        rounding = rounding_model_named(rounding_model, self.dtype)
        return replace(rounding, wide_statistics=True) if self.has_wide_statistics else rounding

    def bounds_by_stage(self, rounding_model: str) -> Mapping[str, Bound]:
        """Return the bounds of every stage against its exact value."""
        if rounding_model not in self._bounds_by_model:
            self._bounds_by_model[rounding_model] = self._compute_bounds(rounding_model)
        return self._bounds_by_model[rounding_model]

    def with_replaced_bounds(self, rounding_model: str, bounds: Mapping[str, Bound]) -> StageBounds:
        """Return a copy with other bounds for a rounding model."""
        bounds_with = replace(self)
        bounds_with._bounds_by_model[rounding_model] = bounds
        return bounds_with

    def _compute_bounds(self, rounding_model: str) -> dict[str, Bound]:
        if not self.exact_stages.enclosures:
            return {}
        rounding, rows, canonical = (
            self.find_rounding_model(rounding_model),
            self.uniform_rows,
            self.exact_stages.canonical_problem,
        )
        values, exact = (
            self.exact_stages.float64_values,
            {**self.exact_stages.inner_stages, **self.exact_stages.float64_values},
        )
        if rows is not None:
            canonical = replace(canonical, inputs=rows.zero_logits_of_empty_rows(canonical.inputs))
            exact = rows.zero_logits_of_empty_rows(exact)
        if self.exact_stages.inner_stages:
            bounds = bound_accumulated_errors_by_rows(canonical, rounding, exact, tuple(values))
        elif rows is not None:
            bounds = bound_stages(Computation.from_problem(canonical), rounding, exact, exact)
            if sums := [
                stage for stage in exact if stage in _GRADIENTS_FROM_WEIGHTS
            ]:  # uniform weights take part, without a key
                bounds |= bound_accumulated_errors(rows.with_equal_scores(canonical.options), rounding, exact, sums)
            bounds = self._remove_bounds_of_overflown(rounding, bounds)
        else:
            bounds = bound_stages(self.exact_stages.float64_computation, rounding, exact, exact)
            bounds = self._remove_bounds_of_overflown(rounding, bounds)
            if not OPERATIONS[canonical.operation].has_projections:
                self._accumulated_bounds[rounding] = bounds
        return {stage: _zero_unless_finite(bound, values[stage]) for stage, bound in bounds.items()}

    def step_bounds(self, step: ExactStep, rounding_model: str) -> Mapping[str, Bound] | None:
        """Return the bounds of a step; None if a stage before it is missing or not finite.

        The last ones are kept for implementations with the same stages before it.
        """
        if self.exact_stages.inner_stages and step.exact_values is self.exact_stages.enclosures:
            return self.bounds_by_stage(rounding_model)
        key = (rounding_model, *step.cache_key, *sorted(step.earlier_stages))
        if key not in self._cached_step_bounds:
            rounding = self.find_rounding_model(rounding_model)
            if step.exact_values is self.exact_stages.enclosures and rounding in self._accumulated_bounds:
                return self._accumulated_bounds[rounding]
            values = {stage: step.exact_values[stage].high for stage in step.stages}
            bounds = bound_introduced_errors(
                self.exact_stages.float64_computation, rounding, step.earlier_stages, values
            )
            self._cached_step_bounds.clear()
            self._cached_step_bounds[key] = bounds and self._remove_bounds_of_overflown(rounding, bounds)
        return self._cached_step_bounds[key]

    def _remove_bounds_of_overflown(self, rounding: RoundingModel, bounds: Mapping[str, Bound]) -> dict[str, Bound]:
        """Remove the bounds of elements that depend on scores that overflow the format in which they are stored."""
        return remove_bounds_of_overflown(
            self.exact_stages.canonical_problem, rounding, self.exact_stages.float64_values.get("raw_scores"), bounds
        )


def _zero_unless_finite(bound: Bound, exact: Array) -> Bound:
    """Set the bound to 0 for exact values that are not finite: such values are compared, not measured."""
    finite = np.isfinite(exact)
    return bound if finite.all() else bound.map_arrays(lambda part: np.where(finite, part, 0.0))


@dataclass(frozen=True, eq=False)
class StageReference:
    """The exact values of one stage, or of one step, and the bound of a rounding model for a result in a dtype.

    If it ``supports_statistics``, errors are sums of many roundings of generic inputs.
    """

    exact: Enclosure
    bound: Bound
    dtype: str
    supports_statistics: bool

    @cached_property
    def measured_elements(self) -> Flags:
        """The elements with an error: the exact value is a number of the dtype, and its bound is finite."""
        return flag_within_range(self.exact, self.dtype) & np.isfinite(self.bound.max_error)

    @cached_property
    def nonfinite_exact_elements(self) -> Flags:
        """The elements whose exact answer is -inf or NaN: the result has to be the same."""
        high = self.exact.high
        prescribed: Flags = ((high == -np.inf) | np.isnan(high)) & (self.exact.radius == 0)
        return prescribed

    @cached_property
    def unjudged_elements(self) -> Flags:
        """The elements that cannot be judged: neither measured nor prescribed."""
        return (
            ~self.measured_elements
            if self.measured_elements.all()
            else ~(self.measured_elements | self.nonfinite_exact_elements)
        )

    @property
    def max_error(self) -> Real:
        """The largest error that is possible, NaN for elements without an exact answer."""
        return np.where(self.unjudged_elements, np.nan, self.bound.max_error)

    def flag_wrong_nonfinite(self, array: Array) -> Flags:
        """Flag values that are NaN or infinite if the exact one is not, or the other way round."""
        stored = array.astype(np.float64)
        odd: Flags = ~np.isfinite(stored) & self.measured_elements
        if not self.measured_elements.all():
            high = self.exact.high
            odd |= self.nonfinite_exact_elements & ~((stored == high) | (np.isnan(stored) & np.isnan(high)))
        return odd

    def flag_beyond_bound(self, array: Array) -> Flags:
        """Flag errors that are larger than their bounds."""
        with np.errstate(invalid="ignore"):  # unjudged elements may have an infinite error and an infinite radius
            error = self.exact.distance_to(array) - self.exact.radius
            beyond: Flags = self.measured_elements & (error > self.bound.max_error)
        return beyond


def flag_within_range(exact: Enclosure, dtype: str) -> NDArray[np.bool_]:
    """Flag exact values in the range of a dtype: enclosed, and no larger than its largest number."""
    return np.isfinite(exact.radius) & (np.abs(exact.high) <= FORMATS[dtype].largest)


@dataclass(frozen=True)
class Conditioning:
    """The condition numbers of the elements of a stage that are measured.

    ``ill`` counts those whose bound exceeds the value, of so many ``elements``.
    """

    median: float
    largest: float
    ill: int
    elements: int
    unit_roundoff: float

    def condition_number(self, bound: float, exact: float) -> float:
        """Return the condition number of one element."""
        return float(condition_numbers(np.array(exact), np.array(bound), self.unit_roundoff))


def condition_numbers(
    exact: NDArray[np.float64], bound: NDArray[np.float64], unit_roundoff: float
) -> NDArray[np.float64]:
    """Return B / (u |x|): 0 if no error is possible, infinity if only x is 0.

    Example:
        >>> condition_numbers(np.array([1.0, 0.0, 0.0]), np.array([2.0**-20, 1.0, 0.0]), 2.0**-24).tolist()
        [16.0, inf, 0.0]
    """
    with np.errstate(all="ignore"):
        numbers: NDArray[np.float64] = np.where(bound == 0, 0.0, bound / (unit_roundoff * np.abs(exact)))
    return numbers


def measure_conditioning(reference: StageReference) -> Conditioning | None:
    """Return the condition numbers of a stage; None if no element is measured."""
    measured, unit_roundoff = reference.measured_elements, FORMATS[reference.dtype].unit_roundoff
    if not measured.any():
        return None
    values, errors = reference.exact.high[measured], reference.bound.max_error[measured]
    numbers = condition_numbers(values, errors, unit_roundoff)
    ill = int((errors > np.abs(values)).sum())
    return Conditioning(float(np.median(numbers)), float(numbers.max()), ill, int(numbers.size), unit_roundoff)
