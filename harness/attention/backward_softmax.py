"""Back through the softmax: Delta = sum_j p dp, y = dp - Delta, dlogits = p y.

With G and P of ``backward_weights``, E_dp and V_dp of ``backward_mean``:

    E_Delta of sum_j p dp    sum_j [ G |y| + (P - G)|dp| + (p + P)( E_dp + (n u_sum + 2u_c)(|dp| + E_dp) ) ] + storage
            of sum_c g o     sum_c [ |g| B_o + Dv u_acc |g|(|o| + B_o) ] + storage
    E_y     = E_dp + E_Delta + 3u_c ( |dp| + E_dp + |Delta| + E_Delta )
    E_dl    = P |y| + (p + P) E_y + w (|p y| + ..) + 4 eta,       w = max(u_s, u_p)

Why G |y|: exponents that are perturbed leave the sum of the weights 1, so that sum_j (p^ - p) dp = sum_j (p^ - p) y.
Why 3u_c: p dp - p Delta rounds both products, p (dp - Delta) the difference; differentiating the quotient of
exponentials rounds Delta twice more, of which the sum's 2u_c has one. |y| is taken as large as float64 lets it be.

To first order theta_l moves dlogits_j by theta_l [ (j = l) p_l y_l - p_j p_l (y_j + y_l) ]. Where weights are
recomputed from L, the first y_l has a theta of its own. Of a row and of an element,

    V_D  = f u_sum^2 [ n (Delta^2/3 + Q/6) + Q ] + 2u_c^2 Q + u_s^2 Delta^2,   Q = p^2 dp^2
    or     f u_acc^2 [ Dv (Delta^2/3 + Q/6) + Q ] + g^2 [ S4 + k_o u_o^2 o^2 ] + u_s^2 Delta^2,  Q = g^2 o^2
    y      2u_c^2 p^2 (dp^2 + Delta^2) + (w^2 + u_c^2) p^2 y^2 + eta^2, as everything that may underflow
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.backward_mean import GradWeights
from attncheck.attention.backward_weights import BackwardWeights
from attncheck.attention.errors import Logits, Operand, Real, product_variance, sum_of_row, summation_variance
from attncheck.attention.logits import through_mask
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.softmax import exact_grad_logits
from attncheck.attention.step import At, Step
from attncheck.attention.weighted_mean import output_bound

_SUBTRACTION_COUNT = 3
STORAGE_COUNT = 4
"""Intermediates between the weights' gradient and the logits', and between the logits' and the scores' of a softcap."""


@dataclass(frozen=True, eq=False)
class Centred:
    """What the gradient of a softmax is made of, before anything is rounded."""

    weights: BackwardWeights
    gradient: GradWeights
    output: Real  # o
    delta: Real  # Delta
    value: Real  # y
    largest: Real  # |y|, at most


@dataclass(frozen=True, eq=False)
class GradLogits:
    """The gradient of the logits and its error; 0 where nothing is attended to."""

    centred: Centred
    value: Real  # p y
    max_error: Real  # E_dl
    variance: Real  # V_dl; constants that all have in common are left out
    of_delta: Real  # V_D
    rounded: Real  # p^2 (dp^2 + Delta^2), y

    @property
    def weights(self) -> BackwardWeights:
        """The weights that were used."""
        return self.centred.weights


def _error(at: At, weights: BackwardWeights, gradient: GradWeights, _: Logits) -> GradLogits:
    centred, rounding = _centred(weights, gradient), at.rounding
    value = weights.rows.weights * centred.value
    of_delta, rounded = _variance_of_delta(centred, rounding), _rounded(centred, value, rounding)
    variance, max_error = _variance(centred, of_delta, rounding) + rounded, _worst(centred, value, rounding)
    value, max_error, variance, rounded = (
        through_mask(at.problem, each) for each in (value, max_error, variance, rounded)
    )
    return GradLogits(centred, value, max_error, variance, of_delta, rounded)


def _value(problem: Problem, weights: Real, gradient: Real, _: Real) -> Real:
    return through_mask(problem, weights * (gradient - sum_of_row(weights * gradient)))


GRAD_LOGITS = Step(exact_grad_logits, _value, _error, reach=lambda _, weights, gradient, __: weights | gradient)


def _centred(weights: BackwardWeights, gradient: GradWeights) -> Centred:
    p, dp = weights.value, gradient.value
    delta = (p * dp).sum(axis=-1, keepdims=True)
    centred = np.where(weights.rows.attended, dp - delta, 0.0)
    uncertain = ((weights.largest - p) * np.abs(dp)).sum(axis=-1, keepdims=True)
    largest = np.abs(centred) + weights.attended * uncertain
    return Centred(weights, gradient, p @ gradient.values, delta, centred, largest)


def storage_of(rounding: RoundingModel) -> tuple[float, float]:
    """Return unit roundoff and underflow of the coarsest format that gradients of logits are stored in."""
    return max((rounding.score_unit, rounding.score_underflow), (rounding.weight_unit, rounding.weight_underflow))


def _worst(centred: Centred, value: Real, rounding: RoundingModel) -> Real:
    """Return E_dl."""
    weights, gradient = centred.weights, centred.gradient.max_error
    delta = _of_delta(centred, rounding)
    if rounding.recomputes:
        delta = np.maximum(delta, _of_delta_from_output(centred, rounding))
    of_delta = np.abs(centred.delta) + delta
    delta = delta + rounding.score_unit * of_delta + rounding.score_underflow
    size = np.abs(centred.gradient.value)
    rounded = _SUBTRACTION_COUNT * rounding.compute_unit * (size + gradient + of_delta)
    error = weights.max_error * centred.largest + (weights.largest + weights.max_error) * (gradient + delta + rounded)
    storing, underflow = storage_of(rounding)
    error = error + storing * (np.abs(value) + error) + STORAGE_COUNT * underflow
    return weights.attended * error * (1 + 8 * rounding.coarsest_unit)


def _of_delta(centred: Centred, rounding: RoundingModel) -> Real:
    """Return the error of sum_j p dp, (..., Lq, 1)."""
    weights, gradient, size = centred.weights, centred.gradient.max_error, np.abs(centred.gradient.value)
    count = weights.rows.count
    summed = count * rounding.sum_unit + 2 * rounding.compute_unit
    if rounding.product_unit:  # by einsum, say
        summed = count * rounding.accumulate_unit + 2 * rounding.compute_unit + rounding.product_error
    each = weights.moved * centred.largest + (weights.stored - weights.moved) * size
    each = each + (weights.largest + weights.stored) * (gradient + summed * (size + gradient))
    return sum_of_row(each + weights.attended * 2 * rounding.score_underflow)


def _of_delta_from_output(centred: Centred, rounding: RoundingModel) -> Real:
    """Return the error of sum_c g o, (..., Lq, 1)."""
    width, size = centred.gradient.values.shape[-1], np.abs(centred.gradient.grad_output)
    bound = output_bound(centred.weights.rows, Operand(centred.gradient.values), centred.output, rounding).max_error
    relative = width * rounding.accumulate_unit + rounding.product_error
    total = sum_of_row(size * (bound + relative * (np.abs(centred.output) + bound)))
    total += 2 * (width + 2) * rounding.accumulate_underflow
    return total


def _rounded(centred: Centred, value: Real, rounding: RoundingModel) -> Real:
    """Return the variance of the roundings of y and of dlogits."""
    unit, (storing, underflow) = rounding.compute_unit, storage_of(rounding)
    own = centred.weights.rows.weights**2 * (centred.gradient.value**2 + centred.delta**2)
    rounded = 2 * unit**2 * own + (storing**2 + unit**2) * value * value
    # What underflows is rounded like anything else, by at most eta.
    lost = (2 * rounding.weight_underflow * centred.value) ** 2 + STORAGE_COUNT * underflow**2
    variance: Real = rounded + centred.weights.attended * lost
    return variance


def _variance_of_delta(centred: Centred, rounding: RoundingModel) -> Real:
    """Return V_D, (..., Lq, 1)."""
    rows, gradient, square = centred.weights.rows, centred.gradient, centred.delta**2
    p = rows.weights
    squares = sum_of_row(p * p * gradient.value**2)
    variance = summation_variance(rounding.sum_unit, rows.count, square, squares)
    if rounding.product_unit:  # by einsum, say
        variance = product_variance(rounding, rows.count, square, squares)
    variance = variance + 2 * rounding.compute_unit**2 * squares
    lost = (2 * rounding.weight_underflow) ** 2 * sum_of_row(centred.weights.attended * gradient.value**2)
    variance = variance + lost + rows.count * (2 * rounding.score_underflow) ** 2
    if rounding.recomputes:
        output, of_rows = centred.output**2, gradient.grad_output**2
        of_output = product_variance(rounding, rows.count, output, (p * p) @ gradient.values**2)
        of_output = of_output + rounding.output_count * rounding.output_unit**2 * output
        width, squares = gradient.values.shape[-1], sum_of_row(of_rows * output)
        of_row = product_variance(rounding, width, square, squares) + sum_of_row(of_rows * of_output)
        variance = np.maximum(variance, of_row)
    return variance + rounding.score_unit**2 * square


def _variance(centred: Centred, of_delta: Real, rounding: RoundingModel) -> Real:
    """Return the variance of each logit's gradient by what is before its own rounding."""
    weights, gradient = centred.weights, centred.gradient
    p, dp, size = weights.rows.weights, gradient.value, np.abs(centred.value)
    own = of_own_exponents(centred, weights.rows.independent, rounding)
    mean, mean_shared = sum_of_row(p * size), sum_of_row(p * weights.shared)
    shared = (2 * size + mean) * (size * (weights.shared + mean_shared) + sum_of_row(p * weights.shared * size))
    of_sum = weights.of_sum * (size + np.abs(centred.delta)) ** 2
    of_weight = weights.of_weight * ((size + p * np.abs(dp)) ** 2 + sum_of_row(p * p * dp * dp))
    of_gradient = gradient.variance * (1 - 2 * p) + sum_of_row(p * p * gradient.variance)
    if rounding.recomputes:
        of_gradient = np.maximum(of_gradient, gradient.variance)
    relative = np.maximum(own, 0) + shared + of_sum + of_weight + np.maximum(of_gradient, 0) + of_delta
    if rounding.product_unit:
        of_row = np.sqrt(gradient.of_factors)
        relative = relative + (of_row + sum_of_row(p * of_row)) ** 2 + of_cuts(centred, rounding)
    variance: Real = p * p * relative
    return variance


def of_own_exponents(centred: Centred, own: Real, rounding: RoundingModel) -> Real:
    """Return what the errors of exponents do to each logit's gradient over its weight, every key's for itself."""
    p, y = centred.weights.rows.weights, centred.value
    weighted = p * p * own
    total, first, second = (sum_of_row(weighted * factor) for factor in (1.0, y, y * y))
    variance: Real = y * y * total + 2 * y * first + second + own * y * y * (1.0 if rounding.recomputes else 1 - 4 * p)
    return variance


def of_cuts(centred: Centred, rounding: RoundingModel) -> Real:
    """Return what factors that are cut off have in common, in dp and in Delta, which need not be the same."""
    size = np.abs(centred.gradient.value) + np.abs(centred.delta)
    variance: Real = rounding.product_common * size**2
    return variance


def constant_moves(logits: GradLogits) -> Real:
    """Return how a relative change of all scores moves the gradients of the logits."""
    rows, y = logits.weights.rows, logits.centred.value
    p, x = rows.weights, rows.shifted
    moves: Real = p * (y * (x - rows.mean_shifted) - sum_of_row(p * x * y))
    return moves
