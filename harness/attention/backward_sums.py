"""The last steps of a backward pass: the sums of gradients over keys or queries, and their errors.

``docs/numerics.md`` has the gradients (section 2), the bounds of these sums (4.6) and their variances (5). Rounded keys
and values are met by every query, and what cuts have in common is in everything: no sum over queries takes such errors
for independent, their deviations add up. What perturbed exponents do to ds k is looked at as a whole, for equal keys
leave no gradient: the states behind each other keep what they were made of.

The row sum of g and the output would be the same delta as sum_j p dp (Dao et al. 2022, "FlashAttention", appendix B.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.backward import (
    BACKWARD_WEIGHTS,
    GRAD_LOGITS,
    GRAD_SCORES,
    GRAD_WEIGHTS,
    SLOPE,
    BackwardWeights,
    GradLogits,
    GradScores,
    gradient_storage_rounding,
    score_scale_sensitivity,
)
from attncheck.attention.errors import (
    SUMMATION_ORDER_FACTOR,
    ZERO,
    Bound,
    BoundedStage,
    Operand,
    Real,
    add_errors,
    broadcast_heads,
    make_bound,
    matmul_variance_factors,
    quantization_error,
    quantize_operand,
    row_sums,
    summation_variance,
    transposed,
)
from attncheck.attention.flags import pass_through
from attncheck.attention.logits import exact_grad_bias, lift_shape_and_broadcast_axes, propagate_grad_bias_flags
from attncheck.attention.problem import Computation
from attncheck.attention.scores import (
    PerHead,
    exact_grad_key,
    exact_grad_query,
    is_scale_folding_exact,
    max_roundings_of_constant,
    max_roundings_of_scale,
    multiply_by_scale_exactly,
    propagate_grad_key_flags,
    score_scale,
)
from attncheck.attention.softmax import flag_linear_weights
from attncheck.attention.step import ErrorContext, GraphNode, Step
from attncheck.attention.weighted_mean import exact_grad_value, propagate_grad_value_flags
from attncheck.reading.lowering import Factor
from attncheck.spec import Shape
from attncheck.spec.rounding import RoundingModel

_HEADS_AXIS = 1
"""The axis of heads in the logits."""
_MAX_LINEAR_VARIANCE = 1 / 4
"""Variance of a logit's error up to which gradients have a statistical scale. A choice, 16 times that of weights:
variances of gradients contain second-order terms (``second_order_variance``). A smaller number judges fewer gradients
by statistics."""


@dataclass(frozen=True)
class ScaleRounding:
    """The roundings of a scale, relative to what is added up."""

    underflow_factor: PerHead  # max(1, |a|), for what underflows before it is scaled
    max_error: PerHead = 0.0  # n_s max(u_s, u_p) + n_pre u_pre
    variance: PerHead = 0.0
    constant_error: PerHead = 0.0  # n_a u_s: the roundings of the constant, one number in every element of a head

    @property
    def is_shared(self) -> bool:
        """True if all heads have one scale."""
        return np.ndim(self.underflow_factor) == 0

    def max_over_groups(self, groups: int) -> ScaleRounding:
        """Return the largest of the query heads that share a key head."""
        if self.is_shared or not groups:
            return self

        def largest(number: PerHead) -> PerHead:
            return np.broadcast_to(number, self.underflow_factor.shape).reshape(groups, -1, 1, 1).max(axis=1)

        return ScaleRounding(*map(largest, (self.underflow_factor, self.max_error, self.variance, self.constant_error)))


@dataclass(frozen=True, eq=False)
class GradientSums:
    """Sums over keys or queries of an error-prone factor times inputs, per query head: (B, H, L, D) or ``ZERO``."""

    value: Real
    magnitude: Real  # of what is added up, errors included
    sum_of_squares: Real
    max_error: Real  # what the factor's errors make
    variance: Real
    scaling: ScaleRounding
    nonzero_count: Real  # N: what is not exactly 0
    score_scale_variance: float  # u_s^2 + u_c^2, and of factors that are cut off
    score_scale_change: Real  # what a relative change of all scores makes: one number's error, in every head the same
    deviation_shared_by_queries: Real  # of what errors that all terms share make
    underflow_error: Real  # what underflow of the factor makes
    underflow_variance: Real  # its variance


def scale_rounding_of(scale: Factor, rounding: RoundingModel) -> ScaleRounding:
    """Return the roundings of a scale that multiplies ds, a sum of it, or the other factor."""
    folds_exactly, counted = is_scale_folding_exact(scale, rounding), max_roundings_of_scale(scale)
    folded, storing = np.where(folds_exactly, 0.0, rounding.prescale_unit), gradient_storage_rounding(rounding)[0]
    return ScaleRounding(
        underflow_factor=np.maximum(1.0, abs(scale)),
        max_error=(1 + counted) * storing + rounding.prescale_count * folded,
        variance=storing**2 + 2 * folded**2,
        constant_error=max_roundings_of_constant(counted, folds_exactly) * rounding.score_unit,
    )


def bound_grouped_sums(sums: GradientSums, exact: Real, length: int, rounding: RoundingModel) -> Bound:
    """Add up the heads of each group, with the roundings of sums and storage; ``length`` is that of the summed axis."""
    heads = exact.shape[-3]
    group = sums.value.shape[-3] // heads if heads else 1
    # The tiles of all heads of a group are added up in one place.
    tiles = 1 if rounding.gradient_tile is None else max(math.ceil(length / rounding.gradient_tile), 1) * max(group, 1)

    def together(array: Real) -> Real:
        if group == 1:
            return array
        whole = np.broadcast_to(array, sums.value.shape)
        summed: Real = whole.reshape(*whole.shape[:-3], heads, group, *whole.shape[-2:]).sum(axis=-3)
        return summed

    scaling = sums.scaling.max_over_groups(heads)
    count, u_acc, u_o = together(sums.nonzero_count), rounding.accumulate_unit, rounding.output_unit
    magnitude, squares = together(sums.magnitude), together(sums.sum_of_squares)
    some = count > 0
    relative = count * u_acc + scaling.max_error + (tiles - 1) * u_o + rounding.product_error
    # A sum before it is scaled, its products and partial sums.
    lost = 2 * (count + 2) * rounding.accumulate_underflow + (tiles + 1) * rounding.output_underflow
    floor = some * scaling.underflow_factor * lost
    max_error = (together(sums.max_error) + relative * magnitude) * (1 + 8 * rounding.coarsest_unit)
    max_error = max_error + floor
    variance, heads_square, exact_square = together(sums.variance), together(sums.value**2), exact * exact
    if sums.underflow_variance is not ZERO:
        max_error, variance = max_error + together(sums.underflow_error), variance + together(sums.underflow_variance)
    if sums.score_scale_change is not ZERO:
        variance = variance + sums.score_scale_variance * together(sums.score_scale_change) ** 2
    if sums.deviation_shared_by_queries is not ZERO:
        variance = variance + together(sums.deviation_shared_by_queries) ** 2
    of_total, of_squares = matmul_variance_factors(rounding, count)
    variance = variance + of_total * np.maximum(exact_square, heads_square)
    variance += (of_squares + scaling.variance) * squares
    # Scales of their own are rounded each by itself, and what cancels in a sum of heads does not in their errors.
    variance += scaling.constant_error**2 * (
        exact_square if scaling.is_shared else np.maximum(exact_square, heads_square)
    )
    if tiles > 1:
        variance += SUMMATION_ORDER_FACTOR * u_o**2 * tiles * (heads_square / 3 + squares / 6)
    if group > 1:
        max_error = max_error + (rounding.output_count * u_o + group * u_acc) * (magnitude + max_error)
        max_error, floor = (
            max_error + some * group * rounding.output_underflow,
            floor + group * rounding.output_underflow,
        )
        variance += (rounding.output_count * u_o**2 + group * u_acc**2) * heads_square
    return bound_after_storage(exact, max_error, variance, floor, some, rounding)


def bound_after_storage(
    exact: Real, max_error: Real, variance: Real, floor: Real, has_terms: NDArray[np.bool_], rounding: RoundingModel
) -> Bound:
    """Return a bound after the roundings of storage; a sum without a term is exactly 0."""
    max_error = (
        max_error
        + rounding.output_count * rounding.output_unit * (np.abs(exact) + max_error)
        + rounding.output_underflow
    )
    variance = variance + rounding.output_count * (rounding.output_unit * exact) ** 2
    bound = make_bound(exact, max_error, variance, floor + rounding.output_underflow)
    if has_terms.all():
        return bound
    return Bound(np.where(has_terms, bound.max_error, 0.0), np.where(has_terms, bound.sigma, 0.0))


def make_bounded_gradient(stage: str, weights: BackwardWeights, exact: Real, bound: Bound) -> BoundedStage:
    """Return a gradient with its bound; no statistical scale if weights that reach it are no longer linear."""
    nonlinear = flag_nonlinear_weights(weights)
    if not nonlinear.any():
        return BoundedStage(exact, bound)
    reached = _elements_reached_by_weights(stage, nonlinear, bound.max_error.shape)
    return BoundedStage(exact, Bound(bound.max_error, np.where(reached, bound.max_error, bound.sigma)))


def flag_nonlinear_weights(weights: BackwardWeights) -> NDArray[np.bool_]:
    """Return which weights, (B, H, Lq, Lk), are no longer linear in the errors of the exponents of their row."""
    linear = flag_linear_weights(weights.rows, _MAX_LINEAR_VARIANCE)
    return weights.rows.attended & ~linear.all(axis=-1, keepdims=True)


def _elements_reached_by_weights(stage: str, nonlinear: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return which elements of a gradient, in its shape, these weights (B, H, Lq, Lk) reach."""
    reached = np.asarray(nonlinear.any(axis=-1 if stage == "grad_query" else -2))[..., np.newaxis]
    groups = reached.shape[-3] // shape[-3] if shape[-3] else 1
    # (B, H, L, 1) -> (B, Hkv, H / Hkv, L, 1): a key head is reached by every query head that shares it.
    shared = reached.reshape(*reached.shape[:-3], shape[-3], groups, *reached.shape[-2:]).any(axis=-3)
    return np.broadcast_to(shared, shape)


def _bound_grad_query(at: ErrorContext, scores: GradScores, key: Operand) -> BoundedStage:
    key = quantize_operand("backward_key", key, at.rounding)
    keys = broadcast_heads(key.value, scores.value.shape[1])
    factor = score_scale(at.problem)
    sums = _sum_grad_scores(scores, keys, factor, at.rounding)
    sums = replace(sums, variance=factor**2 * _grad_query_variance(scores, keys, at.rounding))
    sums = _add_operand_errors(sums, scores, key, factor)
    bound = bound_grouped_sums(sums, at.value, key.value.shape[-2], at.rounding)
    return make_bounded_gradient("grad_query", scores.logits.weights, at.value, bound)


def _bound_grad_key(at: ErrorContext, scores: GradScores, query: Operand, _: Operand) -> BoundedStage:
    factor, query = score_scale(at.problem), quantize_operand("backward_query", query, at.rounding)
    sums = _add_operand_errors(
        _sum_grad_key(scores, query.value, factor, at.rounding), scores, query, factor, by_key=True
    )
    bound = bound_grouped_sums(sums, at.value, query.value.shape[-2], at.rounding)
    return make_bounded_gradient("grad_key", scores.logits.weights, at.value, bound)


def _bound_grad_value(at: ErrorContext, weights: BackwardWeights, grad_output: Operand, _: Operand) -> BoundedStage:
    sums = _sum_grad_value(weights, quantize_operand("grad_output", grad_output, at.rounding), at.rounding)
    bound = bound_grouped_sums(sums, at.value, grad_output.value.shape[-2], at.rounding)
    return make_bounded_gradient("grad_value", weights, at.value, bound)


def _bound_grad_bias(at: ErrorContext, logits: GradLogits) -> BoundedStage:
    columns = slice(None, logits.value.shape[-1] - at.problem.added_keys)
    return bound_summed_grad_logits(at, logits, at.value.shape, columns)


def bound_summed_grad_logits(at: ErrorContext, logits: GradLogits, shape: Shape, columns: slice) -> BoundedStage:
    """Bound some columns of the logits' gradient, added up over the axes that a shape has not, or has of length 1.

    The value that the step returns has as many elements as the shape.
    """
    lifted, axes = lift_shape_and_broadcast_axes(shape, logits.value.ndim)
    bound = _bound_column_sums(logits, at.value.reshape(lifted), columns, at)
    bent = flag_nonlinear_weights(logits.weights)[..., columns]
    scale = np.where(bent.any(axis=axes, keepdims=True), bound.max_error, bound.sigma)
    max_error, scale = (array.reshape(at.value.shape) for array in (bound.max_error, scale))
    return BoundedStage(at.value, Bound(max_error, scale))


def _add_operand_errors(
    sums: GradientSums, scores: GradScores, operand: Operand, factor: Factor, *, by_key: bool = False
) -> GradientSums:
    """Add the errors of the computed keys or queries by which ds is multiplied."""
    if operand.max_error is None or operand.variance is None:
        return sums
    heads, size = scores.value.shape[1], np.abs(scores.value)
    met, squares = size + scores.max_error, size**2
    if by_key:
        met, squares = transposed(met), transposed(squares)
    moved = abs(factor) * (met @ broadcast_heads(operand.max_error, heads))
    return replace(
        sums,
        magnitude=sums.magnitude + moved,
        max_error=sums.max_error + moved,
        variance=sums.variance + factor**2 * (squares @ broadcast_heads(operand.variance, heads)),
    )


def _sum_grad_scores(
    scores: GradScores, operand: Real, factor: Factor, rounding: RoundingModel, *, by_key: bool = False
) -> GradientSums:
    """Return a ds k, or a ds^T q, but for its variance."""
    weights, scale, size = scores.logits.weights, abs(factor), np.abs(operand)
    for_scores, errors, attended, count = (
        np.abs(scores.value),
        scores.max_error,
        weights.attended_as_numbers,
        weights.rows.attended_count,
    )
    if by_key:
        for_scores, errors, attended = (transposed(array) for array in (for_scores, errors, attended))
        count = attended.sum(axis=-1, keepdims=True)
    squares, square_operand = for_scores * for_scores, size * size
    max_error = scale * (errors @ size)
    value = transposed(scores.value) if by_key else scores.value
    lost = _underflow_bound(factor, attended @ square_operand, squares.sum(axis=-1, keepdims=True), rounding, power=2)
    if scores.code_error is not ZERO:  # small ones all lose alike
        lost = lost + (scale * ((transposed(scores.code_error) if by_key else scores.code_error) @ size)) ** 2
    return GradientSums(
        value=factor * (value @ operand),
        magnitude=scale * (for_scores @ size) + max_error,
        sum_of_squares=scale**2 * (squares @ square_operand),
        max_error=max_error,
        variance=ZERO,
        scaling=scale_rounding_of(factor, rounding),
        nonzero_count=count,
        score_scale_variance=weights.rows.score_scale_variance(rounding),
        score_scale_change=ZERO,
        deviation_shared_by_queries=ZERO,
        underflow_error=_underflow_bound(factor, attended @ size, for_scores.sum(axis=-1, keepdims=True), rounding),
        underflow_variance=lost,
    )


def _sum_grad_key(scores: GradScores, query: Real, factor: Factor, rounding: RoundingModel) -> GradientSums:
    """Return a ds^T q."""
    sums, scale, size = _sum_grad_scores(scores, query, factor, rounding, by_key=True), abs(factor), np.abs(query)
    deviation = ZERO
    if scores.logits.weights.queries_share_errors:
        deviation = scale * (transposed(scores.deviation_shared_by_queries(rounding)) @ size)
    moves = factor * (transposed(score_scale_sensitivity(scores.logits) * scores.slope.value) @ query)
    return replace(
        sums,
        variance=scale**2 * (transposed(scores.variance_per_score(rounding)) @ (size * size)),
        score_scale_change=moves if sums.scaling.is_shared else np.abs(moves),
        deviation_shared_by_queries=deviation,
    )


def _sum_grad_value(weights: BackwardWeights, grad_output: Operand, rounding: RoundingModel) -> GradientSums:
    """Return p^T g."""
    gradient, rows, deviation, lost = grad_output.value, weights.rows, ZERO, ZERO
    size, square = grad_output.magnitude, gradient * gradient
    of_codes = quantization_error("backward_weights", weights.largest_possible + weights.max_error, rounding)
    error, met = add_errors(weights.max_error, of_codes), weights.largest_possible
    max_error, variance = transposed(error) @ size, transposed(weights.variance_per_weight(rounding)) @ square
    if of_codes is not ZERO:  # small ones all lose alike
        lost = (transposed(of_codes) @ size) ** 2
    if grad_output.max_error is not None and grad_output.variance is not None:
        if rounding.quantized_operands:  # their errors are not small
            met = met + error
        max_error = max_error + transposed(met) @ grad_output.max_error
        variance = variance + transposed(rows.weights * rows.weights) @ grad_output.variance
    if weights.queries_share_errors:
        deviation = transposed(weights.deviation_shared_by_queries()) @ size
    return GradientSums(
        value=transposed(rows.weights) @ gradient,
        magnitude=transposed(weights.largest_possible + error) @ size,
        sum_of_squares=transposed(rows.weights * rows.weights) @ square,
        max_error=max_error,
        variance=variance,
        scaling=ScaleRounding(1.0),
        nonzero_count=transposed(weights.attended_as_numbers).sum(axis=-1, keepdims=True),
        score_scale_variance=rows.score_scale_variance(rounding),
        score_scale_change=transposed(rows.weights * (rows.shifted_logits - rows.mean_shifted_logit)) @ gradient,
        deviation_shared_by_queries=deviation,
        underflow_error=ZERO,
        underflow_variance=lost,
    )


def _underflow_bound(
    factor: Factor, operand_sums: Real, gradient_sums: Real, rounding: RoundingModel, *, power: int = 1
) -> Real:
    """Bound the underflow of a scaled ds and of a scaled operand; of their squares with ``power`` 2."""
    folded = 0.0 if rounding.folding == "none" else rounding.prescale_underflow
    scale = np.maximum(1.0, abs(factor))
    floor: Real = (scale * 2 * gradient_storage_rounding(rounding)[1]) ** power * operand_sums + (
        scale * folded
    ) ** power * gradient_sums
    return floor


def _bound_column_sums(logits: GradLogits, exact: Real, columns: slice, at: ErrorContext) -> Bound:
    """Sum columns of the logits' gradient over the axes of length 1 that the result has, (B, H, Lq, T)."""
    rounding = at.rounding
    shape, axes = lift_shape_and_broadcast_axes(exact.shape, exact.ndim)

    def summed(array: Real) -> Real:
        total: Real = array.sum(axis=axes, keepdims=True)
        return total

    def together(array: Real) -> Real:
        return summed(array[..., columns])

    count, error, u_acc = together(logits.weights.attended_as_numbers), logits.max_error, rounding.accumulate_unit
    size = np.abs(logits.value) + error
    max_error = together(error) + np.maximum(count - 1, 0) * u_acc * together(size)
    max_error = max_error * (1 + 8 * rounding.coarsest_unit)
    variance = logits.variance[..., columns]
    if shape[-1] == 1:
        # The errors of one row have causes in common.
        variance = np.sqrt(variance).sum(axis=-1, keepdims=True) ** 2
    # Rounded keys and values are those of every query.
    variance = summed(np.sqrt(variance)) ** 2 if logits.weights.queries_share_errors else summed(variance)
    moves = score_scale_sensitivity(logits)[..., columns]
    if np.ndim(score_scale(at.problem)):  # scales of their own are rounded each by itself
        moves = np.abs(moves.sum(axis=tuple({*axes} - {_HEADS_AXIS}), keepdims=True))
    variance = variance + logits.weights.rows.score_scale_variance(rounding) * moves.sum(axis=axes, keepdims=True) ** 2
    added = summation_variance(u_acc, count, exact * exact, together(logits.value**2))
    variance = variance + np.where(count > 1, added, 0.0)
    return bound_after_storage(exact, max_error, variance, np.zeros(exact.shape), count > 0, rounding)


def _sum_grad_logits_to_bias(problem: Computation, logits: Real) -> Real:
    columns = slice(None, logits.shape[-1] - problem.added_keys)
    return sum_grad_logits(logits, problem.input_array("bias").shape, columns)


def sum_grad_logits(logits: Real, shape: Shape, columns: slice) -> Real:
    """Add up some columns of the logits' gradient over the axes that a shape has not, or has of length 1."""
    _, axes = lift_shape_and_broadcast_axes(shape, logits.ndim)
    summed: Real = logits[..., columns].sum(axis=axes, keepdims=True)
    return summed.reshape(shape)


GRAD_QUERY = Step(exact_grad_query, _bound_grad_query, propagate_flags=pass_through)
GRAD_KEY = Step(exact_grad_key, _bound_grad_key, propagate_flags=propagate_grad_key_flags)
GRAD_VALUE = Step(exact_grad_value, _bound_grad_value, propagate_flags=propagate_grad_value_flags)
GRAD_BIAS = Step(
    exact_grad_bias,
    _bound_grad_bias,
    propagate_flags=propagate_grad_bias_flags,
    evaluate_in_float64=_sum_grad_logits_to_bias,
)


GRADIENT_NODES: Mapping[str, GraphNode] = {
    "grad_weights": GraphNode(GRAD_WEIGHTS, ("grad_output", "value")),
    "backward_weights": GraphNode(BACKWARD_WEIGHTS, ("weights", "query", "key", "scores")),
    "grad_logits": GraphNode(GRAD_LOGITS, ("backward_weights", "grad_weights", "masked")),
    "slope": GraphNode(SLOPE, ("scores",)),
    "grad_scores": GraphNode(GRAD_SCORES, ("grad_logits", "slope")),
    # What the scale rounds counts with the sums: it may be in front of them, behind them, or in what is added up.
    "grad_products": GraphNode(
        Step(multiply_by_scale_exactly, lambda _, scores: scores, propagate_flags=pass_through), ("grad_scores",)
    ),
    "grad_query": GraphNode(GRAD_QUERY, ("grad_products", "key")),
    "grad_key": GraphNode(GRAD_KEY, ("grad_products", "query", "key")),
    "grad_value": GraphNode(GRAD_VALUE, ("backward_weights", "grad_output", "value")),
    "grad_bias": GraphNode(GRAD_BIAS, ("grad_logits",)),
}


def _grad_query_variance(scores: GradScores, key: Real, rounding: RoundingModel) -> Real:
    """Return the variance of ds k, (..., Lq, D)."""
    weights, centred, gradient = scores.logits.weights, scores.logits.centred, scores.logits.centred.grad_weights
    rows = weights.rows
    p, y, slope, square = rows.weights, centred.centred_value, scores.slope, rows.squared_weights
    squares, weighted, moved = key * key, slope.multiply(p), p * rows.shifted_logits * y
    mean, result = weighted @ key, scores.value @ key  # X and S
    variance: Real = _grad_query_exponent_variance(scores, key, mean, result, rounding)
    of_constants = slope.multiply(moved) @ key - mean * row_sums(moved)
    variance += rows.score_scale_variance(rounding) * (of_constants - result * rows.mean_shifted_logit) ** 2
    common = weights.sum_variance + rounding.common_product_variance
    variance += common * (np.abs(result) + np.abs(centred.delta * mean)) ** 2
    if gradient.queries_share_errors:
        of_row = np.sqrt(gradient.factor_variance)  # a rounded g meets every key
        variance += ((weighted * (of_row + row_sums(p * of_row))) @ np.abs(key)) ** 2
    size, of_size, square_mean = np.abs(slope.multiply(y)), np.abs(gradient.value), mean * mean
    met, of_met = square * size, square * of_size
    of_weight = (met * size) @ squares + square_mean * row_sums(of_met * of_size)
    of_weight += 2 * np.abs(mean) * ((met * of_size) @ np.abs(key))
    variance += weights.rounding_variance * of_weight
    of_gradient = square * gradient.variance
    sloped = slope.multiply(of_gradient)
    alone = slope.multiply(sloped) @ squares
    together = alone - 2 * mean * (sloped @ key) + square_mean * row_sums(of_gradient)
    variance += np.maximum(alone if rounding.recomputes_weights else 0.0, np.maximum(together, 0))
    variance += (
        scores.logits.delta_variance * square_mean
        + slope.multiply(slope.multiply(scores.logits.rounding_squares)) @ squares
    )
    if slope.softcap is None:
        return variance
    size = np.abs(scores.logits.value)
    of_slope = (size * size * slope.variance) @ squares
    capped: Real = (np.sqrt(variance) + np.sqrt(of_slope)) ** 2
    return capped + scores.softcap_storage_variance(rounding) @ squares


def _grad_query_exponent_variance(
    scores: GradScores, key: Real, mean: Real, result: Real, rounding: RoundingModel
) -> Real:
    """Return the variance of ds k by errors of exponents: each key's, and by Cauchy's inequality the shared ones."""
    weights, y, slope = scores.logits.weights, scores.logits.centred.centred_value, scores.slope
    squares, of_means, of_both, of_results = key * key, mean * mean, 2 * result * mean, result * result

    def expand(weighted: Real) -> Real:
        """Return sum_l weighted_l times the square of theta_l's coefficient over p_l."""
        once = weighted * y
        twice, sloped = once * y, slope.multiply(once)
        sloped_twice = sloped * y
        first = slope.multiply(sloped_twice) @ squares
        rest = of_results * row_sums(weighted) + of_both * row_sums(once) + of_means * row_sums(twice)
        crossed = mean * (sloped_twice @ key) + result * (sloped @ key)
        together = np.maximum(first + rest - 2 * crossed, 0)
        return np.maximum(first + np.maximum(rest, 0), together) if rounding.recomputes_weights else together

    rows = weights.rows
    return expand(rows.weighted_independent_variance) + expand(rows.weights) * row_sums(
        rows.weights * weights.shared_variance
    )
