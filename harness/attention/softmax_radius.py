"""How far a softmax moves when every logit moves by its radius, however large that is.

With |s' - s| <= d per score, p'_j is largest where s_j rises by d_j and every other score falls by its own d_l, and
smallest the other way round; with O_j(x) the sum of x_l over l != j, it moves

    up by at most    p_j [ O_j(p) (e^(d_j) - 1) + O_j(p (1 - e^-d)) ] / (p_j e^(d_j) + O_j(p e^-d))
    down by at most  p_j [ O_j(p) (1 - e^(-d_j)) + O_j(p (e^d - 1)) ] / (p_j e^(-d_j) + O_j(p e^d))

and both are reached; the radius is the larger of the two. log_sum_exp moves by at most log sum_j p_j e^(d_j); downwards
it is -log sum_j p_j e^(-d_j), which is never more, as (sum_j p_j e^(d_j)) (sum_j p_j e^(-d_j)) >= 1.
"""

from __future__ import annotations

import numpy as np

from attncheck.attention.errors import Real

_LARGEST_EXPONENT = 600.0
"""e^600, and a sum of many such terms, are numbers of float64; a weight that may grow to it may as well become 1."""
_MIN_TOTAL = 1e-290
"""Sums below have lost terms to underflow."""


def weight_radius(weights: Real, log_weights: Real, radius: Real) -> Real:
    """Return how far each weight moves at most, one way or the other."""
    grown, shrunk = _grown(weights, log_weights, radius), -weights * np.expm1(-radius)
    most, least = weights + grown, np.exp(log_weights - radius)
    rest = _sum_of_others(weights)
    up_total, down_total = most + _sum_of_others(least), least + _sum_of_others(most)
    up = (rest * grown + weights * _sum_of_others(shrunk)) / up_total
    down = (rest * shrunk + weights * _sum_of_others(grown)) / down_total
    # Where all of a row can become too small for float64, the weight may become anything between 0 and 1.
    lost = np.minimum(up_total, down_total) < _MIN_TOTAL
    return np.where(lost, np.maximum(weights, rest), np.maximum(up, down))


def log_sum_radius(weights: Real, log_weights: Real, radius: Real) -> Real:
    """Return how far each log_sum_exp moves at most, one way or the other."""
    row_grown = _grown(weights, log_weights, radius).sum(axis=-1)
    logarithms = log_weights + radius
    largest = logarithms.max(axis=-1, keepdims=True, initial=-np.inf)
    log_total = largest[..., 0] + np.log(np.exp(logarithms - largest).sum(axis=-1))
    # Near 1 the logarithm of the sum loses the digits that log1p keeps; far from it the sum itself may overflow.
    moved: Real = np.where(row_grown < 1, np.log1p(row_grown), log_total)
    return moved


def _grown(weights: Real, log_weights: Real, radius: Real) -> Real:
    """Return p (e^d - 1), where p itself may be too small for float64, and e^d too large."""
    most = np.exp(np.minimum(log_weights + radius, _LARGEST_EXPONENT))
    return np.where(radius < 1, weights * np.expm1(np.minimum(radius, 1)), most - weights)


def _sum_of_others(terms: Real) -> Real:
    """Return, for each element of a row, the sum of all others; row sum less element would cancel."""
    before, after = np.zeros_like(terms), np.zeros_like(terms)
    before[..., 1:] = np.cumsum(terms[..., :-1], axis=-1)
    after[..., :-1] = np.cumsum(terms[..., :0:-1], axis=-1)[..., ::-1]
    return before + after
