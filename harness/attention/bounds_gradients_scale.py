"""The likely size of the errors of a backward pass: variances, where ``bounds_gradients_worst`` adds sizes up.

In the notation of ``bounds_backward``; t^2 and c^2 are the variances of a key's exponent, its own and what the keys of
a row share, with what is beyond the first order: c^2 + f(t^2 + c^2). To first order theta_l moves dlogits_j by

    theta_l [ (j = l) p_l y_l - p_j p_l (y_j + y_l) ],     and sum_j dlogits_j x_j, for any x, by
    theta_l p_l [ y_l (x_l - X) - S ],     X = sum_j p x,  S = sum_j p y x

Where weights are recomputed from L, the first y_l has a theta of its own. What else there is, per row or element:

    nu     the sum of the weights       V_nu = u_sum^2 (n + rho) + 2u_c^2,  with a stored L  + its own logarithm's
    eps    a weight's own roundings     u_p^2 + 2u_c^2
    dp     V_dp = f u_acc^2 [ Dv (dp^2/3 + Q/6) + Q ] + u_dp^2 dp^2
    Delta  V_D  = f u_sum^2 [ n (Delta^2/3 + Q/6) + Q ] + 2u_c^2 Q + u_s^2 Delta^2,   Q = p^2 dp^2
           or     f u_acc^2 [ Dv (Delta^2/3 + Q/6) + Q ] + g^2 [ S4 + k_o u_o^2 o^2 ] + u_s^2 Delta^2,  Q = g^2 o^2
    y      2u_c^2 p^2 (dp^2 + Delta^2) + (w^2 + u_c^2) p^2 y^2 + eta^2, as everything that may underflow
    kappa  V_kappa = 4h^2 V_h + u_c^2 (4h^2 + 4 kappa^2),  V_h = kappa^2 V_z + (eps_tanh^2 + 3u_s^2) h^2

and constants in common to all keys and rows (the rounding of the scale): theta_j = epsilon x_j, x_j = s_j - m.

Where products round their factors, a rounded g is met by every key of a row, rounded keys and values by every query,
and what cuts have in common by everything: no sum takes such errors for independent, their deviations add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.bounds_backward import Backward
from attncheck.attention.bounds_gradients_worst import STORAGE_COUNT, storage_of
from attncheck.attention.errors import Real, product_variance, summation_variance, transposed
from attncheck.attention.exponents import second_order
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.softmax import stored_log_sum_exp_variance


@dataclass(frozen=True, eq=False)
class Spread:
    """Variances of a backward pass: (..., Lq, Lk) per key, (..., Lq, 1) per row."""

    own: Real  # t^2
    shared: Real  # c^2, and what is beyond the first order
    of_sum: Real  # V_nu
    of_weight: float  # V_eps
    of_grad_weights: Real  # V_dp
    of_delta: Real  # V_D
    rounded: Real  # p^2 (dp^2 + Delta^2), y
    of_slope: Real  # V_kappa
    constants: float  # u_s^2 + u_c^2, and of factors that are cut off
    common: float  # what factors that are cut off have in common, in dp alone
    of_columns: Real  # of what rounded keys do to exponents, for all queries at once
    of_factors: Real  # of what rounding g, or v, does to dp: for all keys, or for all queries, at once


def spread_of(back: Backward, rounding: RoundingModel) -> Spread:
    """Prepare the variances of a backward pass."""
    rows, unit = back.rows, rounding.compute_unit
    of_sum = rounding.sum_unit**2 * (rows.count + rows.rescalings) + 2 * unit**2
    if rounding.recomputes or rounding.from_log_sum_exp:
        of_sum = of_sum + stored_log_sum_exp_variance(rows, rounding)
    square, squares = back.grad_weights**2, back.grad_output**2 @ transposed(back.value**2)
    width, centred = back.value.shape[-1], back.grad_logits
    of_grad_weights = product_variance(rounding, width, square, squares)
    of_scores = back.scale**2 * (back.query**2 @ transposed(back.key**2)) if rounding.product_unit else np.zeros((1, 1))
    storing, underflow = storage_of(rounding)
    of_scores = of_scores * rounding.product_spread**2 + rounding.product_common * back.scores**2
    own = rows.weights**2 * (square + back.delta**2)
    rounded = 2 * unit**2 * own + (storing**2 + unit**2) * centred * centred
    # What underflows is rounded like anything else, by at most eta.
    lost = (2 * rounding.weight_underflow * back.centred) ** 2 + STORAGE_COUNT * underflow**2
    return Spread(
        own=rows.independent,
        shared=rows.shared + second_order(rows.variance),
        of_sum=of_sum,
        of_weight=rounding.weight_unit**2 + 2 * unit**2,
        of_grad_weights=of_grad_weights + rounding.weight_gradient_unit**2 * square,
        of_delta=_of_delta(back, rounding),
        rounded=rounded + back.attended * lost,
        of_slope=np.zeros((1, 1)) if back.softcap is None else _of_slope(back, rounding),
        constants=rows.constants(rounding),
        common=rounding.product_common,
        of_columns=of_scores,
        of_factors=rounding.product_spread**2 * squares,
    )


def logits_variance(back: Backward, spread: Spread, rounding: RoundingModel) -> Real:
    """Return the variance of each logit's gradient; constants that all have in common are left out."""
    p, dp, size = back.rows.weights, back.grad_weights, np.abs(back.centred)
    own = _of_own_exponents(back, spread.own, rounding)
    mean, mean_shared = _sum(p * size), _sum(p * spread.shared)
    shared = (2 * size + mean) * (size * (spread.shared + mean_shared) + _sum(p * spread.shared * size))
    of_sum = spread.of_sum * (size + np.abs(back.delta)) ** 2
    of_weight = spread.of_weight * ((size + p * np.abs(dp)) ** 2 + _sum(p * p * dp * dp))
    of_gradient = spread.of_grad_weights * (1 - 2 * p) + _sum(p * p * spread.of_grad_weights)
    if rounding.recomputes:
        of_gradient = np.maximum(of_gradient, spread.of_grad_weights)
    relative = np.maximum(own, 0) + shared + of_sum + of_weight + np.maximum(of_gradient, 0) + spread.of_delta
    if rounding.product_unit:
        of_row = np.sqrt(spread.of_factors)
        relative = relative + (of_row + _sum(p * of_row)) ** 2 + _of_cuts(back, spread)
    variance: Real = p * p * relative + spread.rounded
    return variance


def _of_own_exponents(back: Backward, own: Real, rounding: RoundingModel) -> Real:
    """Return what the errors of exponents do to each logit's gradient over its weight, every key's for itself."""
    p, y = back.rows.weights, back.centred
    weighted = p * p * own
    total, first, second = (_sum(weighted * factor) for factor in (1.0, y, y * y))
    variance: Real = y * y * total + 2 * y * first + second + own * y * y * (1.0 if rounding.recomputes else 1 - 4 * p)
    return variance


def _of_cuts(back: Backward, spread: Spread) -> Real:
    """Return what factors that are cut off have in common, in dp and in Delta, which need not be the same."""
    variance: Real = spread.common * (np.abs(back.grad_weights) + np.abs(back.delta)) ** 2
    return variance


def columns_deviation(back: Backward, spread: Spread, rounding: RoundingModel) -> Real:
    """Return the deviation of each score's gradient by errors that queries share: rounded keys, values, cuts.

    Sums over queries must not take them for independent; deviations add up as if all had one sign.
    """
    p = back.rows.weights
    own = np.maximum(_of_own_exponents(back, spread.of_columns, rounding), 0)
    relative = own + spread.of_factors + _sum(p * p * spread.of_factors) + _of_cuts(back, spread)
    through = p * np.sqrt(relative) * back.slope
    deviation: Real = through + np.abs(back.grad_logits) * np.sqrt(spread.of_slope)
    return deviation


def weights_deviation(back: Backward, spread: Spread) -> Real:
    """Return the deviation of each weight by errors that queries share."""
    p = back.rows.weights
    deviation: Real = p * np.sqrt(spread.of_columns + _sum(p * p * spread.of_columns))
    return deviation


def scores_variance(back: Backward, spread: Spread, logits: Real, rounding: RoundingModel) -> Real:
    """Return the variance of each score's gradient from that of the logits'."""
    if back.softcap is None:
        return logits
    size = np.abs(back.grad_logits)
    # The slope and the weight have errors of the same score.
    variance: Real = (back.slope * np.sqrt(logits) + size * np.sqrt(spread.of_slope)) ** 2
    return variance + _of_storage(back, rounding)


def constant_moves(back: Backward) -> Real:
    """Return how a relative change of all scores moves the gradients of the logits."""
    p, x, y = back.rows.weights, back.rows.shifted, back.centred
    moves: Real = p * (y * (x - back.rows.mean_shifted) - _sum(p * x * y))
    return moves


def weights_variance(back: Backward, spread: Spread, rounding: RoundingModel) -> Real:
    """Return the variance of each weight as it meets grad_output; constants that all have in common are left out."""
    p = back.rows.weights
    own = spread.own * (1.0 if rounding.recomputes else 1 - 2 * p) + _sum(p * p * spread.own)
    shared = 2 * (spread.shared + _sum(p * spread.shared))
    relative = np.maximum(own, 0) + shared + spread.of_sum + spread.of_weight
    variance: Real = p * p * relative + back.attended * (2 * rounding.weight_underflow) ** 2
    return variance


def query_variance(back: Backward, spread: Spread, rounding: RoundingModel) -> Real:
    """Return the variance of ds k, (..., Lq, D): the keys' errors, which cancel where the keys are alike."""
    p, y, slope, key = back.rows.weights, back.centred, back.slope, back.key
    square, squares = p * p, key * key
    mean, result = (p * slope) @ key, back.grad_scores @ key  # X and S
    variance: Real = _of_exponents(back, spread, mean, result, rounding)
    of_constants = (p * back.rows.shifted * y * slope) @ key - mean * _sum(p * back.rows.shifted * y)
    variance += spread.constants * (of_constants - result * back.rows.mean_shifted) ** 2
    variance += (spread.of_sum + spread.common) * (np.abs(result) + np.abs(back.delta * mean)) ** 2
    if rounding.product_unit:
        of_row = np.sqrt(spread.of_factors)  # a rounded g meets every key
        variance += ((p * slope * (of_row + _sum(p * of_row))) @ np.abs(key)) ** 2
    size, gradient = np.abs(y * slope), np.abs(back.grad_weights)
    of_weight = (square * size * size) @ squares + mean * mean * _sum(square * gradient * gradient)
    of_weight += 2 * np.abs(mean) * ((square * size * gradient) @ np.abs(key))
    variance += spread.of_weight * of_weight
    weighted = square * spread.of_grad_weights
    alone = (weighted * slope**2) @ squares
    together = alone - 2 * mean * ((weighted * slope) @ key) + mean * mean * _sum(weighted)
    variance += np.maximum(alone if rounding.recomputes else 0.0, np.maximum(together, 0))
    variance += spread.of_delta * mean * mean + (spread.rounded * slope**2) @ squares
    if back.softcap is None:
        return variance
    size = np.abs(back.grad_logits)
    of_slope = (size * size * spread.of_slope) @ squares
    capped: Real = (np.sqrt(variance) + np.sqrt(of_slope)) ** 2
    return capped + _of_storage(back, rounding) @ squares


def _of_storage(back: Backward, rounding: RoundingModel) -> Real:
    """Return what storing the intermediates of a softcap's gradient rounds."""
    assert back.softcap is not None
    unit, underflow = storage_of(rounding)
    lost = underflow**2 * (1 + 1 / back.softcap**2)
    variance: Real = STORAGE_COUNT * (unit**2 * back.grad_scores**2 + back.attended * lost)
    return variance


def _of_exponents(back: Backward, spread: Spread, mean: Real, result: Real, rounding: RoundingModel) -> Real:
    """Return what the errors of exponents do to ds k: each key's own, and by Cauchy's inequality what they share."""
    p, y, slope, key = back.rows.weights, back.centred, back.slope, back.key

    def expand(weighted: Real) -> Real:
        """Return sum_l weighted_l times the square of theta_l's coefficient over p_l."""
        first = (weighted * y * y * slope**2) @ (key * key)
        rest = result * result * _sum(weighted) + 2 * result * mean * _sum(weighted * y)
        rest = rest + mean * mean * _sum(weighted * y * y)
        crossed = mean * ((weighted * y * y * slope) @ key) + result * ((weighted * y * slope) @ key)
        together = np.maximum(first + rest - 2 * crossed, 0)
        return np.maximum(first + np.maximum(rest, 0), together) if rounding.recomputes else together

    exponents: Real = expand(p * p * spread.own) + expand(p) * _sum(p * spread.shared)
    return exponents


def _of_delta(back: Backward, rounding: RoundingModel) -> Real:
    """Return V_D, (..., Lq, 1)."""
    p, square = back.rows.weights, back.delta**2
    squares = _sum(p * p * back.grad_weights**2)
    variance = summation_variance(rounding.sum_unit, back.rows.count, square, squares)
    if rounding.product_unit:  # by einsum, say
        variance = product_variance(rounding, back.rows.count, square, squares)
    variance = variance + 2 * rounding.compute_unit**2 * squares
    lost = (2 * rounding.weight_underflow) ** 2 * _sum(back.attended * back.grad_weights**2)
    variance = variance + lost + back.rows.count * (2 * rounding.score_underflow) ** 2
    if rounding.recomputes:
        output, gradient = back.output**2, back.grad_output**2
        of_output = product_variance(rounding, back.rows.count, output, (p * p) @ back.value**2)
        of_output = of_output + rounding.output_count * rounding.output_unit**2 * output
        width, squares = back.value.shape[-1], _sum(gradient * output)
        of_row = product_variance(rounding, width, square, squares) + _sum(gradient * of_output)
        variance = np.maximum(variance, of_row)
    return variance + rounding.score_unit**2 * square


def _of_slope(back: Backward, rounding: RoundingModel) -> Real:
    """Return V_kappa."""
    assert back.softcap is not None
    argument = back.scores / back.softcap
    height, unit = np.tanh(argument) ** 2, rounding.compute_unit
    of_score = (back.score_error.independent + back.score_error.shared) / back.softcap**2
    of_argument = of_score + (2 * unit**2 + rounding.score_unit**2) * argument**2
    steep = np.minimum(1, back.slope + 0.77 * np.sqrt(of_argument))
    of_height = steep**2 * of_argument + (rounding.tanh_error**2 + 3 * rounding.score_unit**2) * height
    variance: Real = 4 * height * of_height + of_height**2 + unit**2 * 4 * (height + back.slope**2)
    return variance


def _sum(array: Real) -> Real:
    total: Real = array.sum(axis=-1, keepdims=True)
    return total
