"""The variance of ds k, what grad_query adds up over the keys: their errors, which cancel where the keys are alike.

To first order theta_l moves sum_j dlogits_j x_j, for any x, by

    theta_l p_l [ y_l (x_l - X) - S ],     X = sum_j p x,  S = sum_j p y x

In the notation of ``backward_softmax``; constants in common to all keys and rows (the rounding of the scale) make
theta_j = epsilon x_j, x_j = s_j - m.
"""

from __future__ import annotations

import numpy as np

from attncheck.attention.backward_softcap import GradScores
from attncheck.attention.backward_weights import sum_of_row
from attncheck.attention.errors import Real
from attncheck.attention.rounding import RoundingModel


def query_variance(scores: GradScores, key: Real, rounding: RoundingModel) -> Real:
    """Return the variance of ds k, (..., Lq, D)."""
    weights, centred, gradient = scores.logits.weights, scores.logits.centred, scores.logits.centred.gradient
    rows = weights.rows
    p, y, slope = rows.weights, centred.value, scores.slope.value
    square, squares = p * p, key * key
    mean, result = (p * slope) @ key, scores.value @ key  # X and S
    variance: Real = _of_exponents(scores, key, mean, result, rounding)
    of_constants = (p * rows.shifted * y * slope) @ key - mean * sum_of_row(p * rows.shifted * y)
    variance += rows.constants(rounding) * (of_constants - result * rows.mean_shifted) ** 2
    common = weights.of_sum + rounding.product_common
    variance += common * (np.abs(result) + np.abs(centred.delta * mean)) ** 2
    if rounding.product_unit:
        of_row = np.sqrt(gradient.of_factors)  # a rounded g meets every key
        variance += ((p * slope * (of_row + sum_of_row(p * of_row))) @ np.abs(key)) ** 2
    size, of_size = np.abs(y * slope), np.abs(gradient.value)
    of_weight = (square * size * size) @ squares + mean * mean * sum_of_row(square * of_size * of_size)
    of_weight += 2 * np.abs(mean) * ((square * size * of_size) @ np.abs(key))
    variance += weights.of_weight * of_weight
    weighted = square * gradient.variance
    alone = (weighted * slope**2) @ squares
    together = alone - 2 * mean * ((weighted * slope) @ key) + mean * mean * sum_of_row(weighted)
    variance += np.maximum(alone if rounding.recomputes else 0.0, np.maximum(together, 0))
    variance += scores.logits.of_delta * mean * mean + (scores.logits.rounded * slope**2) @ squares
    if scores.slope.softcap is None:
        return variance
    size = np.abs(scores.logits.value)
    of_slope = (size * size * scores.slope.variance) @ squares
    capped: Real = (np.sqrt(variance) + np.sqrt(of_slope)) ** 2
    return capped + scores.of_storage(rounding) @ squares


def _of_exponents(scores: GradScores, key: Real, mean: Real, result: Real, rounding: RoundingModel) -> Real:
    """Return what the errors of exponents do to ds k: each key's own, and by Cauchy's inequality what they share."""
    weights, y, slope = scores.logits.weights, scores.logits.centred.value, scores.slope.value
    p = weights.rows.weights

    def expand(weighted: Real) -> Real:
        """Return sum_l weighted_l times the square of theta_l's coefficient over p_l."""
        first = (weighted * y * y * slope**2) @ (key * key)
        rest = result * result * sum_of_row(weighted) + 2 * result * mean * sum_of_row(weighted * y)
        rest = rest + mean * mean * sum_of_row(weighted * y * y)
        crossed = mean * ((weighted * y * y * slope) @ key) + result * ((weighted * y * slope) @ key)
        together = np.maximum(first + rest - 2 * crossed, 0)
        return np.maximum(first + np.maximum(rest, 0), together) if rounding.recomputes else together

    exponents: Real = expand(p * p * weights.rows.independent) + expand(p) * sum_of_row(p * weights.shared)
    return exponents
