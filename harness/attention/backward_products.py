"""The last steps of a backward pass: what gradients add up, and the errors that they return.

    grad_query  a ds k        largest |a| E_ds |k|      grad_value  p^T g     largest P^T |g|
    grad_key    a ds^T q      largest |a| E_ds^T |q|    grad_bias   dlogits, summed over the axes of the bias

    grad_bias   B' = [ sum E_dl + (N - 1) u_acc sum (|p y| + E_dl) ] (1 + 8u*)

Rounded keys and values are met by every query, and what cuts have in common is in everything: no sum over queries takes
such errors for independent, their deviations add up.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attncheck.attention.backward_query import query_variance
from attncheck.attention.backward_softcap import GradScores
from attncheck.attention.backward_softmax import GradLogits, constant_moves, storage_of
from attncheck.attention.backward_sums import (
    Scaling,
    Sums,
    bound_of_stored,
    bound_of_sums,
    finished,
    of_bent_weights,
    scaling_of,
)
from attncheck.attention.backward_weights import BackwardWeights
from attncheck.attention.errors import (
    NOTHING,
    Bound,
    Finished,
    Operand,
    Real,
    every_head,
    summation_variance,
    transposed,
)
from attncheck.attention.flags import handed_on
from attncheck.attention.logits import exact_grad_bias, reach_of_grad_bias, spread_over
from attncheck.attention.problem import Problem
from attncheck.attention.products import exact_grad_key, exact_grad_query, reach_of_grad_key
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.scores import scale_of
from attncheck.attention.step import At, Step
from attncheck.attention.weighted_mean import exact_grad_value, reach_of_grad_value
from attncheck.spec import Shape


def _error_of_query(at: At, scores: GradScores, key: Operand) -> Finished:
    keys = every_head(key.value, scores.value.shape[1])
    factor = scale_of(at.problem)
    sums = _with_errors(_over_keys(scores, keys, factor, at.rounding), scores, key, factor)
    bound = bound_of_sums(sums, at.value, key.value.shape[-2], at.rounding)
    return finished("grad_query", scores.logits.weights, at.value, bound)


def _error_of_key(at: At, scores: GradScores, query: Operand, _: Operand) -> Finished:
    factor = scale_of(at.problem)
    sums = _over_queries(scores, query.value, factor, at.rounding)
    sums = _with_errors(sums, scores, query, factor, by_key=True)
    bound = bound_of_sums(sums, at.value, query.value.shape[-2], at.rounding)
    return finished("grad_key", scores.logits.weights, at.value, bound)


def _error_of_value(at: At, weights: BackwardWeights, grad_output: Operand, _: Operand) -> Finished:
    sums = _of_weights(weights, grad_output.value, at.rounding)
    bound = bound_of_sums(sums, at.value, grad_output.value.shape[-2], at.rounding)
    return finished("grad_value", weights, at.value, bound)


def _error_of_bias(at: At, logits: GradLogits) -> Finished:
    own = slice(None, logits.value.shape[-1] - at.problem.added_keys)
    return bound_of_summed_logits(at, logits, at.value.shape, own)


def bound_of_summed_logits(at: At, logits: GradLogits, shape: Shape, columns: slice) -> Finished:
    """Bound some columns of the logits' gradient, added up over the axes that a shape has not, or has of length 1.

    The value that the step returns has as many elements as the shape.
    """
    lifted, axes = spread_over(shape, logits.value.ndim)
    bound = _of_bias(logits, at.value.reshape(lifted), columns, at.rounding)
    bent = of_bent_weights(logits.weights)[..., columns]
    scale = np.where(bent.any(axis=axes, keepdims=True), bound.max_error, bound.sigma)
    max_error, scale = (each.reshape(at.value.shape) for each in (bound.max_error, scale))
    return Finished(at.value, Bound(max_error, scale))


def _with_errors(sums: Sums, scores: GradScores, operand: Operand, factor: float, *, by_key: bool = False) -> Sums:
    """Add what the errors of keys or queries do that ds meets, where they are computed."""
    if operand.max_error is None or operand.variance is None:
        return sums
    heads, size = scores.value.shape[1], np.abs(scores.value)
    met, squares = size + scores.max_error, size**2
    if by_key:
        met, squares = transposed(met), transposed(squares)
    moved = abs(factor) * (met @ every_head(operand.max_error, heads))
    return replace(
        sums,
        magnitude=sums.magnitude + moved,
        max_error=sums.max_error + moved,
        variance=sums.variance + factor**2 * (squares @ every_head(operand.variance, heads)),
    )


def _over_keys(scores: GradScores, key: Real, factor: float, rounding: RoundingModel) -> Sums:
    """Return a ds k."""
    weights, scale, size = scores.logits.weights, abs(factor), np.abs(key)
    of_scores, attended = np.abs(scores.value), weights.attended
    square_scores, square_keys = of_scores * of_scores, size * size
    max_error = scale * (scores.max_error @ size)
    return Sums(
        value=factor * (scores.value @ key),
        magnitude=scale * (of_scores @ size) + max_error,
        squares=scale**2 * (square_scores @ square_keys),
        max_error=max_error,
        variance=scale**2 * query_variance(scores, key, rounding),
        moves=NOTHING,
        deviation=NOTHING,
        scaling=scaling_of(factor, rounding),
        floor=_underflow(factor, attended @ size, of_scores.sum(axis=-1, keepdims=True), rounding),
        lost=_underflow(factor, attended @ square_keys, square_scores.sum(axis=-1, keepdims=True), rounding, power=2),
        count=weights.rows.count,
        constants=weights.rows.constants(rounding),
    )


def _over_queries(scores: GradScores, query: Real, factor: float, rounding: RoundingModel) -> Sums:
    """Return a ds^T q."""
    weights, scale, size = scores.logits.weights, abs(factor), np.abs(query)
    of_scores, attended, deviation = transposed(np.abs(scores.value)), transposed(weights.attended), NOTHING
    squares, square_queries = of_scores * of_scores, size * size
    max_error = scale * (transposed(scores.max_error) @ size)
    if weights.shares_errors:
        deviation = scale * (transposed(scores.deviation(rounding)) @ size)
    return Sums(
        value=factor * (transposed(scores.value) @ query),
        magnitude=scale * (of_scores @ size) + max_error,
        squares=scale**2 * (squares @ square_queries),
        max_error=max_error,
        variance=scale**2 * (transposed(scores.variance(rounding)) @ square_queries),
        moves=factor * (transposed(constant_moves(scores.logits) * scores.slope.value) @ query),
        deviation=deviation,
        scaling=scaling_of(factor, rounding),
        floor=_underflow(factor, attended @ size, of_scores.sum(axis=-1, keepdims=True), rounding),
        lost=_underflow(factor, attended @ square_queries, squares.sum(axis=-1, keepdims=True), rounding, power=2),
        count=attended.sum(axis=-1, keepdims=True),
        constants=weights.rows.constants(rounding),
    )


def _of_weights(weights: BackwardWeights, gradient: Real, rounding: RoundingModel) -> Sums:
    """Return p^T g."""
    rows, size, square, deviation = weights.rows, np.abs(gradient), gradient * gradient, NOTHING
    if weights.shares_errors:
        deviation = transposed(weights.deviation()) @ size
    return Sums(
        value=transposed(rows.weights) @ gradient,
        magnitude=transposed(weights.largest + weights.max_error) @ size,
        squares=transposed(rows.weights * rows.weights) @ square,
        max_error=transposed(weights.max_error) @ size,
        variance=transposed(weights.variance(rounding)) @ square,
        moves=transposed(rows.weights * (rows.shifted - rows.mean_shifted)) @ gradient,
        deviation=deviation,
        scaling=Scaling(1.0),
        floor=NOTHING,
        lost=NOTHING,
        count=transposed(weights.attended).sum(axis=-1, keepdims=True),
        constants=rows.constants(rounding),
    )


def _underflow(factor: float, entries: Real, gradients: Real, rounding: RoundingModel, *, power: int = 1) -> Real:
    """Bound what underflow does to a scaled ds and to a scaled operand; their squares with ``power`` 2."""
    folded = 0.0 if rounding.folding == "none" else rounding.prescale_underflow
    scale = max(1.0, abs(factor))
    floor: Real = (scale * 2 * storage_of(rounding)[1]) ** power * entries + (scale * folded) ** power * gradients
    return floor


def _of_bias(logits: GradLogits, exact: Real, columns: slice, rounding: RoundingModel) -> Bound:
    """Sum columns of the logits' gradient over the axes of length 1 that the result has, (B, H, Lq, T)."""
    shape, axes = spread_over(exact.shape, exact.ndim)

    def summed(array: Real) -> Real:
        total: Real = array.sum(axis=axes, keepdims=True)
        return total

    def together(array: Real) -> Real:
        return summed(array[..., columns])

    count, error, u_acc = together(logits.weights.attended), logits.max_error, rounding.accumulate_unit
    size = np.abs(logits.value) + error
    max_error = together(error) + np.maximum(count - 1, 0) * u_acc * together(size)
    max_error = max_error * (1 + 8 * rounding.coarsest_unit)
    variance = logits.variance[..., columns]
    if shape[-1] == 1:
        # The errors of one row have causes in common.
        variance = np.sqrt(variance).sum(axis=-1, keepdims=True) ** 2
    # Rounded keys and values are those of every query.
    variance = summed(np.sqrt(variance)) ** 2 if logits.weights.shares_errors else summed(variance)
    variance = variance + logits.weights.rows.constants(rounding) * together(constant_moves(logits)) ** 2
    added = summation_variance(u_acc, count, exact * exact, together(logits.value**2))
    variance = variance + np.where(count > 1, added, 0.0)
    return bound_of_stored(exact, max_error, variance, np.zeros(exact.shape), count > 0, rounding)


def _value_of_query(_: Problem, products: Real, key: Real) -> Real:
    gradient: Real = products @ every_head(key, products.shape[1])
    return gradient


def _value_of_key(_: Problem, products: Real, query: Real, key: Real) -> Real:
    return _sum_of_group(transposed(products) @ query, key.shape[1])


def _value_of_value(_: Problem, weights: Real, grad_output: Real, value: Real) -> Real:
    return _sum_of_group(transposed(weights) @ grad_output, value.shape[1])


def _value_of_bias(problem: Problem, logits: Real) -> Real:
    own = slice(None, logits.shape[-1] - problem.added_keys)
    return value_of_summed_logits(logits, problem.array("bias").shape, own)


def value_of_summed_logits(logits: Real, shape: Shape, columns: slice) -> Real:
    """Add up some columns of the logits' gradient over the axes that a shape has not, or has of length 1."""
    _, axes = spread_over(shape, logits.ndim)
    summed: Real = logits[..., columns].sum(axis=axes, keepdims=True)
    return summed.reshape(shape)


def _sum_of_group(per_head: Real, kv_heads: int) -> Real:
    batch, heads, *rest = per_head.shape
    summed: Real = per_head.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(axis=2)
    return summed


GRAD_QUERY = Step(exact_grad_query, _value_of_query, _error_of_query, reach=handed_on)
GRAD_KEY = Step(exact_grad_key, _value_of_key, _error_of_key, reach=reach_of_grad_key)
GRAD_VALUE = Step(exact_grad_value, _value_of_value, _error_of_value, reach=reach_of_grad_value)
GRAD_BIAS = Step(exact_grad_bias, _value_of_bias, _error_of_bias, reach=reach_of_grad_bias)
