"""The variance of ds k, what grad_query adds up over the keys: their errors, which cancel where the keys are alike.

To first order theta_l moves sum_j dlogits_j x_j, for any x, by

    theta_l p_l [ y_l (x_l - X) - S ],     X = sum_j p x,  S = sum_j p y x

In the notation of ``backward_softmax``; constants in common to all keys and rows (the rounding of the scale) make
theta_j = epsilon x_j, x_j = s_j - m.
"""

from __future__ import annotations

import numpy as np

from attncheck.attention.backward_softcap import GradScores
from attncheck.attention.errors import Real, sum_of_row
from attncheck.attention.rounding import RoundingModel


def query_variance(scores: GradScores, key: Real, rounding: RoundingModel) -> Real:
    """Return the variance of ds k, (..., Lq, D)."""
    weights, centred, gradient = scores.logits.weights, scores.logits.centred, scores.logits.centred.gradient
    rows = weights.rows
    p, y, slope, square = rows.weights, centred.value, scores.slope, rows.squares
    squares, weighted, moved = key * key, slope.times(p), p * rows.shifted * y
    mean, result = weighted @ key, scores.value @ key  # X and S
    variance: Real = _of_exponents(scores, key, mean, result, rounding)
    of_constants = slope.times(moved) @ key - mean * sum_of_row(moved)
    variance += rows.constants(rounding) * (of_constants - result * rows.mean_shifted) ** 2
    common = weights.of_sum + rounding.product_common
    variance += common * (np.abs(result) + np.abs(centred.delta * mean)) ** 2
    if rounding.product_unit:
        of_row = np.sqrt(gradient.of_factors)  # a rounded g meets every key
        variance += ((weighted * (of_row + sum_of_row(p * of_row))) @ np.abs(key)) ** 2
    size, of_size, square_mean = np.abs(slope.times(y)), np.abs(gradient.value), mean * mean
    met, of_met = square * size, square * of_size
    of_weight = (met * size) @ squares + square_mean * sum_of_row(of_met * of_size)
    of_weight += 2 * np.abs(mean) * ((met * of_size) @ np.abs(key))
    variance += weights.of_weight * of_weight
    of_gradient = square * gradient.variance
    sloped = slope.times(of_gradient)
    alone = slope.times(sloped) @ squares
    together = alone - 2 * mean * (sloped @ key) + square_mean * sum_of_row(of_gradient)
    variance += np.maximum(alone if rounding.recomputes else 0.0, np.maximum(together, 0))
    variance += scores.logits.of_delta * square_mean + slope.times(slope.times(scores.logits.rounded)) @ squares
    if slope.softcap is None:
        return variance
    size = np.abs(scores.logits.value)
    of_slope = (size * size * slope.variance) @ squares
    capped: Real = (np.sqrt(variance) + np.sqrt(of_slope)) ** 2
    return capped + scores.of_storage(rounding) @ squares


def _of_exponents(scores: GradScores, key: Real, mean: Real, result: Real, rounding: RoundingModel) -> Real:
    """Return what the errors of exponents do to ds k: each key's own, and by Cauchy's inequality what they share."""
    weights, y, slope = scores.logits.weights, scores.logits.centred.value, scores.slope
    squares, of_means, of_both, of_results = key * key, mean * mean, 2 * result * mean, result * result

    def expand(weighted: Real) -> Real:
        """Return sum_l weighted_l times the square of theta_l's coefficient over p_l."""
        once = weighted * y
        twice, sloped = once * y, slope.times(once)
        sloped_twice = sloped * y
        first = slope.times(sloped_twice) @ squares
        rest = of_results * sum_of_row(weighted) + of_both * sum_of_row(once) + of_means * sum_of_row(twice)
        crossed = mean * (sloped_twice @ key) + result * (sloped @ key)
        together = np.maximum(first + rest - 2 * crossed, 0)
        return np.maximum(first + np.maximum(rest, 0), together) if rounding.recomputes else together

    rows = weights.rows
    exponents: Real = expand(rows.own) + expand(rows.weights) * sum_of_row(rows.weights * weights.shared)
    return exponents
