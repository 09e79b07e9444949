"""Queries and keys divided by the root of the mean of their squares, or of their sum, times a weight.

    rms   y = w x / N,   N = sqrt(x.x / n + e)          n: the width of a head, or of all heads of a position
    l2    y = w x / N,   N = max(|x|, e)

A vector of zeros stays one, exactly. ``docs/numerics.md``, section 4.1c, derives the bound, and how far errors of x
move x / N. What the elements of a vector have in common is the error of N, a relative one, whose variance is
``Operand.common_relative_variance``. Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; ``contract.py``
has the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attncheck.attention.errors import Operand, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import FlagContext, Flags, any_over_axes
from attncheck.attention.problem import Computation
from attncheck.attention.step import ErrorContext, Step

DEFAULT_EPSILON = 1e-6  # the default of the contract (``backends/contract.py``)
_DEFAULT_EPSILON_PLACE = {"rms": "inside", "l2": "maximum"}
"""Where epsilon stands: added under the root, or the smallest divisor. Other readings add it to the root (``outside``),
or take it for the smallest square (``square``)."""


@dataclass(frozen=True)
class _Norm:
    """The divisor of a norm: ``mean_count`` is what the sum of squares is divided by, ``axes`` are those of the sum."""

    kind: str
    epsilon: float
    epsilon_place: str
    is_over_all_heads: bool

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> _Norm:
        kind = options.get("norm") or "rms"
        epsilon = options.get("epsilon")
        return cls(
            kind,
            DEFAULT_EPSILON if epsilon is None else float(epsilon),
            str(options.get("epsilon_at") or _DEFAULT_EPSILON_PLACE[kind]),
            options.get("norm_over") == "full",
        )

    def vector_length(self, shape: tuple[int, ...]) -> int:
        return shape[-1] * (shape[-3] if self.is_over_all_heads else 1)

    def mean_count(self, shape: tuple[int, ...]) -> int:
        return self.vector_length(shape) if self.kind == "rms" else 1

    def sum_over_vector(self, terms: Real) -> Real:
        """Add up each vector's terms: (B, H, L, D) -> (B, H, L, 1)."""
        total: Real = terms.sum(axis=-1, keepdims=True)
        return np.broadcast_to(total.sum(axis=-3, keepdims=True), total.shape) if self.is_over_all_heads else total

    def divisor(self, array: Real) -> Real:
        """Return N of each vector, of which not all squares need be numbers of float64: (B, H, L, 1)."""
        largest = np.abs(array).max(axis=(-3, -1) if self.is_over_all_heads else -1, keepdims=True, initial=0)
        unit = np.exp2(np.frexp(np.where(largest > 0, largest, 1.0))[1])
        root = unit * np.sqrt(self.sum_over_vector((array / unit) ** 2) / self.mean_count(array.shape))
        return self._with_epsilon(root)

    def _with_epsilon(self, root: Real) -> Real:
        least = np.sqrt(self.epsilon) if self.epsilon_place == "square" else self.epsilon
        divisor: Real = np.maximum(root, least)
        if self.epsilon_place == "inside":
            divisor = np.hypot(root, np.sqrt(self.epsilon))
        if self.epsilon_place == "outside":
            divisor = root + self.epsilon
        return divisor

    @property
    def min_divisor(self) -> float:
        """The least that N can be."""
        return float(np.sqrt(self.epsilon)) if self.epsilon_place in {"inside", "square"} else self.epsilon

    def exact_divisor(self, squares: ExactArray, count: int, epsilon: float) -> ExactArray:
        """Return N from a sum of squares."""
        mean = squares / count
        match self.epsilon_place:
            case "inside":
                return (mean + epsilon).sqrt()
            case "outside":
                return mean.sqrt() + epsilon
            case "maximum":
                return mean.sqrt().maximum(epsilon)
        return mean.maximum(epsilon).sqrt()


def normalization_step(name: str) -> Step:
    """Return the norm of queries or keys; a reading may leave either of them unchanged."""

    def exact(problem: Computation, array: ExactArray) -> ExactArray:
        if is_unnormalized(problem, name):
            return array
        return _exact_normalized(problem, array, problem.to_exact_array(problem.input_array(f"{name}_norm")))

    def value(problem: Computation, array: Real) -> Real:
        if is_unnormalized(problem, name):
            return array
        divisor = _Norm.from_options(problem.options).divisor(array)
        # 0 / 0, of a key that is added if epsilon is 0, is 0.
        return norm_weight(problem, name) * (array / np.where(divisor > 0, divisor, 1))

    def error(at: ErrorContext, operand: Operand) -> Operand:
        if is_unnormalized(at.problem, name):
            return Operand(operand.value, *operand.max_error_and_variance, operand.common_relative_variance)
        return _normalized_error(at, operand, norm_weight(at.problem, name))

    def reach(known: FlagContext, flags: Flags) -> Flags:
        if is_unnormalized(known.problem, name):
            return flags
        is_full = _Norm.from_options(known.problem.options).is_over_all_heads
        reached: Flags = np.broadcast_to(any_over_axes(flags, (-3, -1) if is_full else -1), (*flags.shape[:-1], 1))
        weight = known.input_flags.get(f"{name}_norm")
        return reached if weight is None or not weight.any() else reached | weight[:, np.newaxis, :]

    return Step(exact, error, propagate_flags=reach, evaluate_in_float64=value)


def is_unnormalized(problem: Computation, name: str) -> bool:
    """Return whether a reading leaves query or key, or both, without the norm."""
    return problem.options.get("unnormalized") in {name, "both"}


def norm_weight(problem: Computation, name: str) -> Real:
    """Return the weight of each element of each head: (H, 1, D)."""
    return problem.input_array(f"{name}_norm")[:, np.newaxis, :]


def _exact_normalized(problem: Computation, array: ExactArray, weight: ExactArray) -> ExactArray:
    norm, epsilon = (
        _Norm.from_options(problem.options),
        problem.magnitude_if_absolute(_Norm.from_options(problem.options).epsilon),
    )
    squares = (array * array).sum(*((-1, -3) if norm.is_over_all_heads else (-1,)))
    divisor = norm.exact_divisor(squares, norm.mean_count(array.shape), epsilon)
    weighted = array * weight.map_parts(lambda part: part[:, np.newaxis, :])
    return weighted / divisor.replace_zeros_by_ones()  # a row of zeros stays what it is


def _normalized_error(at: ErrorContext, operand: Operand, weight: Real) -> Operand:
    norm, rounding, size = _Norm.from_options(at.problem.options), at.rounding, np.abs(weight)
    divisor = norm.divisor(operand.value)
    width = norm.vector_length(operand.value.shape)
    underflow = (3 + width / norm.mean_count(operand.value.shape)) * rounding.accumulate_underflow
    with np.errstate(divide="ignore", over="ignore"):
        lost: Real = underflow / divisor**2
    stored = max(rounding.compute_unit, at.returned_unit_roundoff)
    second_order = 1 + 8 * rounding.coarsest_unit
    relative = _inverse_root_error((width + 1) * rounding.accumulate_unit + 4 * rounding.compute_unit + lost)
    relative = (relative + 3 * rounding.compute_unit + 2 * stored) * second_order
    magnitude = np.abs(at.value)
    floor = (1 + size) * 2 * max(rounding.score_underflow, rounding.output_underflow)
    max_error, variance = magnitude * relative, 2 * (stored * magnitude) ** 2
    # The relative error of N: of a sum of squares, all of one sign, and of the operations after it.
    of_square = (width + 2) * rounding.accumulate_unit**2 + 4 * rounding.compute_unit**2 + lost**2
    common = of_square / 4 + 3 * rounding.compute_unit**2
    if operand.max_error is not None:
        moved = size * _max_normalized_change(norm, operand.value, operand.max_error, divisor)
        max_error = max_error + moved * (1 + relative)
        magnitude = magnitude + moved
    if operand.variance is not None:
        variance = variance + (size / divisor) ** 2 * operand.variance
        common = (
            common
            + norm.sum_over_vector(operand.value**2 * operand.variance)
            / (norm.mean_count(operand.value.shape) * divisor**2) ** 2
        )
    floor = np.where(magnitude > 0, floor, 0.0)  # zeros stay what they are
    return Operand(at.value, max_error + floor, variance + floor**2, common)


def _inverse_root_error(relative: Real) -> Real:
    """Bound the relative error of 1 / sqrt(V) by that of V."""
    rest = np.sqrt(np.maximum(1 - relative, 0))
    with np.errstate(divide="ignore"):
        bound: Real = relative / (rest * (1 + rest))
    return bound


def _max_normalized_change(norm: _Norm, value: Real, moved: Real, divisor: Real) -> Real:
    """Bound how far x / N moves where x moves by ``moved`` at most, of any size."""
    count, size = norm.mean_count(value.shape), np.abs(value)
    length = np.sqrt(norm.sum_over_vector(moved**2) / count)
    least = np.maximum(divisor - length, norm.min_divisor)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        by_squares = norm.sum_over_vector((2 * size + moved) * moved) / (count * (divisor + least))
        of_divisor = np.minimum(length, np.where(np.isnan(by_squares), np.inf, by_squares))
        bound = (moved + size * of_divisor / divisor) / least
    largest: Real = np.minimum(np.where(np.isnan(bound), np.inf, bound), 2 * np.sqrt(count))
    return largest
