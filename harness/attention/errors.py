"""The parts of error bounds: a bound, an operand with its error, logits with theirs, and a ball in float64.

Every bound has two numbers per element. ``max_error`` (B) holds for any order of summation, blocking and fusing that
the rounding model allows. ``sigma`` is the size of the error if roundings behave as bounded, mean-independent noise
(``docs/numerics.md``, section 5): variances are propagated instead of sums.

A kernel may store an operand in codes with scales (section 3.1). If a scale is shared by fewer elements than declared,
it is smaller, and so is the error. NaN and infinity do not count as the largest element of a scale. If the mean is
subtracted first, the codes are those of k - m, with m the mean of a head's keys, and the errors of the query's codes
multiply k - m. The variance of codes is the square of their largest error: nothing else is known of that rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from attncheck.spec.rounding import FORMATS, SCALE_FORMATS, Quantization, RoundingModel

Real = NDArray[np.float64]

_FLOAT64_SLACK = 1 + 2.0**-30
"""The formulas are sums of non-negative terms: float64 evaluates them far better than this."""
ZERO: Real = np.zeros((1, 1))
"""An error, or a variance, that is known to be 0 everywhere, so that no sum needs it."""
_ONE: Real = np.ones((1, 1))
_MIN_VARIANCE = 2.0**-900
"""Sums of squares below have lost terms to underflow; nothing is known of the statistical scale there."""

SUMMATION_ORDER_FACTOR = 2.0
"""f. For x_1 .. x_n with sum s and sum of squares Q, the partial sums S_m of a random order have the mean

    E sum_m S_m^2 = (n + 1) (s^2 / 3 + Q / 6)

so the roundings of a sum have the variance u^2 times that; twice as much is allowed to one order that is not random.
"""


@dataclass(frozen=True, eq=False)
class Elementwise:
    """Arrays that together describe the same elements."""

    def map_arrays(self, function: Callable[[Any], Any]) -> Self:
        """Rearrange the elements, repeat or leave some out, in all of the arrays."""
        parts = (getattr(self, name) for name in self.__dataclass_fields__)
        return type(self)(*(function(part) if isinstance(part, np.ndarray) else part for part in parts))

    def repeat_heads(self, heads: int) -> Self:
        """Repeat each head of a key or value for the query heads that share it: (B, Hkv, L, D) -> (B, H, L, D)."""
        return self.map_arrays(lambda part: repeat_heads(part, heads))


@dataclass(frozen=True, eq=False)
class Bound(Elementwise):
    """Per element, the largest error that the class allows (B) and its statistical scale (at most B)."""

    max_error: Real
    sigma: Real


@dataclass(frozen=True, eq=False)
class Operand(Elementwise):
    """An array as an implementation holds it: exact values, and their error if they are computed ones.

    ``common_relative_variance`` is the variance of a relative error that all elements of a row have in common, (..., L,
    1).
    """

    value: Real
    max_error: Real | None = None
    variance: Real | None = None
    common_relative_variance: Real | None = None

    @property
    def magnitude(self) -> Real:
        """The largest magnitude that each element can have."""
        magnitude: Real = np.abs(self.value)
        return magnitude if self.max_error is None else magnitude + self.max_error

    @property
    def max_error_and_variance(self) -> tuple[Real, Real]:
        """The largest error of each element and its variance: 0 if they are exact."""
        zero = np.zeros_like(self.value)
        return zero if self.max_error is None else self.max_error, zero if self.variance is None else self.variance

    def bound(self, _: RoundingModel) -> Bound:
        """Return the bound of a computed operand."""
        max_error, variance = self.max_error_and_variance
        variance = (
            variance
            if self.common_relative_variance is None
            else variance + self.common_relative_variance * self.value**2
        )
        return make_bound(self.value, max_error, variance, 0.0)


@dataclass(frozen=True, eq=False)
class Logits(Elementwise):
    """One stage between the product of query and key and the softmax, and its error per element.

    ``max_error`` is D. ``independent_variance`` (tau^2) is the variance of errors that each key has for itself,
    ``shared_variance`` of errors that the keys of a row may have in common. ``underflow_error`` is an absolute error by
    underflow, and ``score_scale_error_variance`` the variance of a relative error that all scores have in common; the
    variances before include neither. ``constant_elements`` flags elements that are one and the same number, error
    included, and not computed from query and key. ``restored_mean_error``, (..., Lq, 1), is the rounding of a number
    that was subtracted from a row's scores and is added to its log_sum_exp.
    """

    value: Real
    max_error: Real
    independent_variance: Real
    shared_variance: Real
    underflow_error: Real
    score_scale_error_variance: float = 0.0
    constant_elements: NDArray[np.bool_] | None = None
    restored_mean_error: Real | None = None

    def shared_with_proportion(self, scores: Real) -> Real:
        """Return the shared variance after another step, which shares an error in proportion to ``scores``."""
        return (
            self.shared_variance + self.score_scale_error_variance * scores * scores
            if self.score_scale_error_variance
            else self.shared_variance
        )

    def bound(self, rounding: RoundingModel) -> Bound:
        """Return the bound of the stage as it is returned: in the format of results, if that is the coarser one."""
        exact, max_error, floor = self.value, self.max_error, self.underflow_error
        variance = add_errors(self.independent_variance, self.shared_variance)
        if self.score_scale_error_variance:
            variance = variance + self.score_scale_error_variance * exact * exact
        if rounding.output_unit > rounding.score_unit:
            max_error = max_error + rounding.output_unit * (np.abs(exact) + max_error) + rounding.output_underflow
            variance = variance + rounding.output_unit**2 * exact * exact
            floor = floor + rounding.output_underflow
        return make_bound(exact, max_error, variance, floor)


def logits_from_values(value: Real, max_error: Real | None = None) -> Logits:
    """Return logits that are given, not computed, or off by at most ``max_error`` with an unknown variance."""
    zero = np.zeros_like(value)
    return Logits(value, zero if max_error is None else max_error, zero, zero, zero)


def logits_with_shared_variance(
    value: Real, max_error: Real, variance: Real, shared: Real, floor: Real, rounding: RoundingModel
) -> Logits:
    """Return logits, part of whose variance is from errors that the keys of a row may have in common.

    Where factors of products are rounded, all of it may be: a row's query is rounded for all keys at once.
    """
    common = variance if rounding.product_unit else np.minimum(np.broadcast_to(shared, variance.shape), variance)
    return Logits(value, max_error, variance - common, common, floor)


@dataclass(frozen=True, eq=False)
class BoundedStage:
    """A stage after the softmax, with its bound as it is returned."""

    value: Real
    final_bound: Bound

    @property
    def max_error_and_variance(self) -> tuple[Real, Real]:
        """The largest error of each element and its variance."""
        return self.final_bound.max_error, self.final_bound.sigma**2

    def bound(self, _: RoundingModel) -> Bound:
        """Return the bound."""
        return self.final_bound


def make_bound(exact: Real, max_error: Real, variance: Real, floor: Real | float) -> Bound:
    """Make a bound; 0 if the exact value is not finite, since such values are compared and not measured."""
    largest = replace_unusable_max_error(exact, max_error)
    scale, known = np.sqrt(variance), variance >= _MIN_VARIANCE
    scale = np.fmin(scale + floor, largest)
    # If nothing is known of the variance it is NaN, infinite, or too small.
    return Bound(largest, scale if known.all() else np.where(known, scale, largest))


def replace_unusable_max_error(exact: Real, max_error: Real) -> Real:
    """Return the error to judge by: infinite if it is NaN, and 0 if the exact value is not finite."""
    largest: Real = max_error * _FLOAT64_SLACK
    if math.isnan(largest.max(initial=0.0)):
        largest = np.where(np.isnan(largest), np.inf, largest)
    judged = np.isfinite(exact)
    return largest if largest.shape == exact.shape and judged.all() else np.where(judged, largest, 0.0)


def add_errors(first: Real, second: Real) -> Real:
    """Add two errors, or variances, each of which may be ``ZERO``."""
    if second is ZERO:
        return first
    return second if first is ZERO else first + second


def summation_variance(unit: float, length: int | Real, total_square: Real, squares: Real) -> Real:
    """Return the variance of an inner product of ``length`` terms: of its partial sums, and of its products."""
    return SUMMATION_ORDER_FACTOR * unit**2 * (length * (total_square / 3 + squares / 6) + squares)


def relative_sum_error(rounding: RoundingModel, terms: int | Real) -> Real:
    """Return the relative error of a sum of products: after ``sum_length`` of them, sums of sums are added up."""
    error: Real
    if rounding.sum_length == math.inf:
        error = terms * rounding.accumulate_unit  # type: ignore[assignment]  # a number counts as an array
        return error
    within = np.minimum(terms, rounding.sum_length)
    error = within * rounding.accumulate_unit + (terms - within) * rounding.promoted_unit
    return error


def inner_product_variance(rounding: RoundingModel, length: int | Real, total_square: Real, squares: Real) -> Real:
    """Return the variance of a sum of products, whose factors are exact.

    The squares of sums of N products each have the mean (N/n) s^2 + (1 - N/n) Q in all. Partial sums that are cut off
    err in one direction: n such errors add up to sqrt(n) times those of either sign, and so do those of n/N sums.
    """
    if rounding.sum_length == math.inf and not rounding.cuts_sums:
        return summation_variance(rounding.accumulate_unit, length, total_square, squares)
    within = np.minimum(length, rounding.sum_length)
    cut = np.maximum(within, 1)
    parts = np.maximum(length, 1) / cut
    if not rounding.cuts_sums:
        return summation_variance(rounding.accumulate_unit, within, total_square, squares * (3 - 2 / parts))
    return summation_variance(rounding.accumulate_unit, within, total_square, squares * (3 * parts - 2)) * cut


def matmul_variance_factors(rounding: RoundingModel, length: int | Real) -> tuple[Real, Real]:
    """Return the factors of the square of an inner product, and of the sum of the squares of its terms.

    They make its variance in a product of matrices, of which both factors may be rounded. If they are cut off
    instead, what all have in common of that is a relative error of the result.
    """
    of_total, of_squares = (inner_product_variance(rounding, length, *terms) for terms in ((_ONE, ZERO), (ZERO, _ONE)))
    if not rounding.product_unit:
        return of_total, of_squares
    return of_total + rounding.common_product_variance, of_squares + 2 * rounding.product_spread**2


def matmul_variance(rounding: RoundingModel, length: int | Real, total_square: Real, squares: Real) -> Real:
    """Return the variance of an inner product in a product of matrices."""
    of_total, of_squares = matmul_variance_factors(rounding, length)
    return of_total * total_square + of_squares * squares


@dataclass(frozen=True, eq=False)
class Ball(Elementwise):
    """Values in float64 and, per element, the radius around them; an infinite value has radius 0."""

    value: Real
    radius: Real

    def matmul_radius(self, value: Real, radius: Real) -> Real:
        """Return how far a product of matrices with another ball moves: |x'y' - xy| <= |x| r_y + r_x (|y| + r_y)."""
        return np.abs(self.value) @ radius + self.radius @ (np.abs(value) + radius)


def repeat_heads(array: Real, heads: int) -> Real:
    """Repeat each head of keys or values for the query heads that share it: (B, Hkv, L, D) -> (B, H, L, D).

    Example:
        >>> repeat_heads(np.array([[[1.0]], [[2.0]]]), 4).ravel().tolist()  # query heads 0 and 1 share key head 0
        [1.0, 1.0, 2.0, 2.0]
    """
    key_heads = array.shape[-3] if array.ndim > 2 else 1
    return array if key_heads in (1, heads) else np.repeat(array, heads // key_heads, -3)


def broadcast_heads(array: Real, heads: int) -> Real:
    """Return keys or values of every query head, broadcast if one serves all."""
    shared = repeat_heads(array, heads)
    return np.broadcast_to(shared, (*shared.shape[:-3], heads, *shared.shape[-2:]))


def count_heads(array: Real) -> int:
    """Return the number of heads of a query, or of what follows from it."""
    return array.shape[-3] if array.ndim > 2 else 1


def row_sums(array: Real) -> Real:
    """Add the keys of a row up: (..., Lq, 1)."""
    total: Real = array.sum(axis=-1, keepdims=True)
    return total


def row_dot_products(first: Real, second: Real) -> Real:
    """Return the sum of the products of each row of two arrays of one shape: (..., L, 1)."""
    total: Real = np.vecdot(first, second)[..., np.newaxis]
    return total


def transposed(matrix: Real) -> Real:
    """Swap the last two axes."""
    return np.swapaxes(matrix, -1, -2)


def as_float64(array: NDArray[Any]) -> Real:
    """Widen stored numbers, exactly."""
    return np.asarray(array).astype(np.float64, copy=False)


def zero_nonfinite(array: Real) -> Real:
    """Set numbers that are not finite to 0; a matrix product would spread them to rows that never attend to them."""
    inside = np.isfinite(array)
    return array if inside.all() else np.where(inside, array, 0.0)


_FLOAT32_UNIT = FORMATS["float32"].unit_roundoff


def quantize_operand(name: str, operand: Operand, rounding: RoundingModel) -> Operand:
    """Return the operand of a product, (..., L, D), as the class stores it: perhaps less a mean, off by its codes."""
    quantization = rounding.quantization_of(name)
    if quantization is None or not operand.value.size:
        return operand
    less, of_mean = operand.value, np.zeros(())
    size = np.where(np.isfinite(operand.value), operand.magnitude, 0.0)
    if quantization.subtracts_mean:
        mean, of_mean = quantization_mean(operand.value, quantization), mean_subtraction_error(name, operand, rounding)
        less = _subtract_mean(operand.value, mean, name, quantization)
        # A mean that is added up in pairs and stored in the format of results is another one.
        apart = _PAIRWISE_SUM_UNITS * rounding.output_unit * quantization_mean(np.abs(operand.value), quantization)
        less = less + np.copysign(apart, less)
        size = np.abs(zero_nonfinite(less)) + (size - np.abs(zero_nonfinite(operand.value))) + of_mean
    error = quantization_error(name, size, rounding) + of_mean
    variance = error * error
    return replace(
        operand,
        value=less,
        max_error=error if operand.max_error is None else operand.max_error + error,
        variance=variance if operand.variance is None else operand.variance + variance,
    )


_PAIRWISE_SUM_UNITS = 8
"""A mean of 2^8 rows, added up in pairs, is off by so many units of their mean magnitude."""


def quantization_mean(value: Real, quantization: Quantization) -> Real:
    """Return the mean of each head or block of an operand, (..., L, D), which is subtracted before it becomes codes."""
    length = value.shape[-2]
    starts = np.arange(0, length, quantization.mean_block_rows or length)
    rows = np.diff([*starts, length])
    return np.repeat(np.add.reduceat(zero_nonfinite(value), starts, axis=-2) / rows[:, np.newaxis], rows, axis=-2)


def _subtract_mean(value: Real, mean: Real, name: str, quantization: Quantization) -> Real:
    """Subtract the mean. A last block of queries may have been filled with zeros, which lessen its mean."""
    less, length = value - mean, value.shape[-2]
    if name == "key":
        return less
    whole = length - length % quantization.mean_block_rows if quantization.mean_block_rows else 0
    is_less = (np.arange(length)[:, np.newaxis] < whole) | (np.abs(less) > np.abs(value))
    return np.where(is_less, less, value)


def mean_subtraction_error(name: str, operand: Operand, rounding: RoundingModel) -> Real:
    """Bound the error of each element by the subtraction of a mean whose product is added back later."""
    quantization = rounding.quantization_of(name)
    if quantization is None or not quantization.subtracts_mean or not operand.value.size:
        return ZERO
    mean, (length, width) = quantization_mean(operand.value, quantization), operand.value.shape[-2:]
    size = np.where(np.isfinite(operand.value), operand.magnitude, 0.0)
    summed = width * rounding.for_score_product.accumulate_unit + (length + 4) * _FLOAT32_UNIT
    error: Real = rounding.output_unit * np.abs(zero_nonfinite(operand.value) - mean) + summed * (size + np.abs(mean))
    return error


def restored_mean_error(query: Operand, key: Operand, rounding: RoundingModel) -> Real | None:
    """Bound the error of q m, m the keys' mean, which log_sum_exp adds back in the format of results: (..., Lq, 1)."""
    quantization, unit = rounding.quantization_of("key"), rounding.output_unit
    if quantization is None or not quantization.subtracts_mean or not key.value.size:
        return None
    mean, apart = (
        transposed(repeat_heads(quantization_mean(numbers, quantization)[..., :1, :], count_heads(query.value)))
        for numbers in (key.value, _PAIRWISE_SUM_UNITS * unit * np.abs(key.value))
    )
    product = np.abs(zero_nonfinite(query.value) @ mean) + zero_nonfinite(query.magnitude) @ apart
    moved = 0.0 if query.max_error is None else query.max_error @ np.abs(mean)
    return unit * (product + moved) + rounding.output_underflow


_AXES_SHARING_SCALE: Mapping[str, tuple[int, ...] | None] = {
    "row": (-1,),
    "channel": (-2,),
    "head": (-2, -1),
    "tensor": None,
}


def quantization_error(name: str, size: Real, rounding: RoundingModel, whole: Real | float | None = None) -> Real:
    """Return the error of storing an operand in codes, from the largest size of each element; ``ZERO`` without codes.

    ``whole`` is the number to which a second scale assigns the largest code; by default the largest of all elements.
    """
    quantization = rounding.quantization_of(name)
    if quantization is None or not size.size:
        return ZERO
    grid = quantization.grid
    if quantization.scale_group == "none":
        scale, lost = np.ones(()), np.maximum(size - min(grid.largest, grid.shorter_end), 0.0)
    else:
        kept, scale = (
            SCALE_FORMATS[quantization.scale_format],
            _maxima_of_scale_groups(size, quantization) / grid.largest,
        )
        largest = scale.max() if whole is None else whole / grid.largest
        least = kept.absolute_error * largest if kept.has_second_scale else kept.absolute_error
        scale, lost = (1 + kept.unit_roundoff) * scale + least, quantization.scale_error * size + least * grid.largest
        lost = lost + np.maximum(size - kept.largest * grid.largest, 0.0)
    unit = max(grid.unit_roundoff / (1 + grid.unit_roundoff), 1 - grid.shorter_end / grid.largest)
    error: Real = np.maximum(unit * size, scale * (grid.smallest_step / 2)) + 4 * _FLOAT32_UNIT * size + lost
    return np.where(size > 0, error, 0.0)


def _maxima_of_scale_groups(size: Real, quantization: Quantization) -> Real:
    """Return, for each element, the largest magnitude of the elements that share its scale."""
    largest: Real
    if quantization.scale_group in _AXES_SHARING_SCALE:
        largest = size.max(axis=_AXES_SHARING_SCALE[quantization.scale_group], keepdims=True)
        return largest
    axis = -1 if quantization.scale_group == "columns" else -2
    shared = size.max(axis=-1, keepdims=True) if quantization.scale_group == "rows" else size
    starts = np.arange(0, size.shape[axis], quantization.group_size)
    largest = np.repeat(np.maximum.reduceat(shared, starts, axis=axis), quantization.group_size, axis=axis)
    return largest.take(np.arange(size.shape[axis]), axis=axis)
