"""The softmax: weights e^(s_j) / sum_l e^(s_l) and log_sum_exp log sum_l e^(s_l), and the weights' transpose.

In a row without a key weights are 0, or all alike where that is the convention, and log_sum_exp is -inf.

Let an implementation's unnormalised weight be e^(x_j + theta_j), x_j = s_j - m. Then |theta_j| <= E_j,

    E_j = { D_j + u_c [ c_x (|x_j| + D_j + D_m) + c_m (|m| + D_m) ] + (1 + k) eps_exp + 2 k u_c } (1 + 8u*)
    D_m = max_l (x_l + D_l), how far the maximum can be off: a key far below it has no part in that
    n keys attended to, r = ceil(n / block) blocks of an online softmax, k = min(r, n - 1) rescalings

The rescalings telescope: the differences that are rounded on the way from a key's block to the end are of one sign and
sum to x_j, hence c_x |x_j| whatever the blocks. With W = e^E - 1, R = sum p W, Z = sum p e^-E, and exactly, not to
first order, for sum p_j e^theta_j is in [Z, 1 + R]:

    weights       G_j = min{ p_j [ (1 - p_j) W_j + sum_(l /= j) p_l W_l ] / Z, max(p_j, 1 - p_j) }
                  B = [ G + c (p + G) ] (1 + 2c) + 2 eta_p + eta_o,    c = (n + r) u_sum + 3u_c + n eta_p + storage
    log_sum_exp   G = min{ max(log(1 + R), -log Z), max_j E_j },   L = m + lambda
                  c_l = (n + r) u_sum + 2u_c + n eta_p
                  B = G + c_l (1 + 2c_l) + (eps_log + u_c)(lambda + G + c_l + D_m) + 2u_c (|m| + D_m)
                      + k_o u_o (|L| + G) + eta_o;     relative to |L| it cannot be: L crosses 0

Where a class allows weights e^(s - L) from a stored L, c has tau (``total_error``) more, for they need not add up to 1.

The form of E is that of the shifted softmax in Blanchard, D. Higham and N. Higham, IMA J. Numer. Anal. 41 (2021).

How far a softmax moves when every logit moves by its radius, however large that is.

With |s' - s| <= d per score, p'_j is largest where s_j rises by d_j and every other score falls by its own d_l, and
smallest the other way round; with O_j(x) the sum of x_l over l != j, it moves

    up by at most    p_j [ O_j(p) (e^(d_j) - 1) + O_j(p (1 - e^-d)) ] / (p_j e^(d_j) + O_j(p e^-d))
    down by at most  p_j [ O_j(p) (1 - e^(-d_j)) + O_j(p (e^d - 1)) ] / (p_j e^(-d_j) + O_j(p e^d))

and both are reached; the radius is the larger of the two. log_sum_exp moves by at most log sum_j p_j e^(d_j); downwards
it is -log sum_j p_j e^(-d_j), which is never more, as (sum_j p_j e^(d_j)) (sum_j p_j e^(-d_j)) >= 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from attncheck.attention.errors import (
    NOTHING,
    Ball,
    Bound,
    Finished,
    Logits,
    Operand,
    Real,
    added,
    bound_of,
    finite,
    largest_of,
)
from attncheck.attention.exact_array import ExactArray, Exponentials, exponentials, log_sum, normalised
from attncheck.attention.exponents import LARGEST_EXPONENT, Rows, is_linear, rows_of
from attncheck.attention.flags import Flags, Reach, any_of, handed_on
from attncheck.attention.logits import exact_through_mask
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import Around, At, Step
from attncheck.spec import Shape

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


_HALF_BIT = 2.0**-53
_LARGEST_GROWN = np.exp(LARGEST_EXPONENT - 1)
"""A sum of p (e^E - 1) of which a term has been cut off is larger than this."""


class Softmax(NamedTuple):
    """Both results of one softmax."""

    weights: Real
    log_sum_exp: Real


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights that were computed: what follows from them follows from the exponents of their rows."""

    value: Real
    rows: Rows

    def bound(self, rounding: RoundingModel) -> Bound:
        """Return the bound of the weights."""
        return weights_bound(self.rows, self.value, rounding)


def softmax(logits: Real, of_empty: float = 0.0) -> Softmax:
    """Evaluate weights and log_sum_exp in float64: ``of_empty`` and -inf in a row without a key."""
    _, powers, total, highest = _exponentials(logits)
    weights = powers / total
    if of_empty != 0:
        weights = np.where(highest == -np.inf, of_empty, weights)
    return Softmax(weights, (highest + np.log(total))[..., 0])


def _exponentials(logits: Real) -> tuple[Real, Real, Real, Real]:
    """Return logits less their row's maximum, their exponentials, the sum of these (1 without any), and the maximum."""
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    empty = highest == -np.inf
    shifted = logits - np.where(empty, 0.0, highest)
    powers = np.exp(shifted)
    return shifted, powers, np.where(empty, 1.0, powers.sum(axis=-1, keepdims=True)), highest


def _exact(problem: Problem, logits: ExactArray) -> Exponentials:
    return exponentials(logits, uniform=_own_keys(problem, logits.shape) if problem.has_uniform_rows else 0)


def _value(problem: Problem, logits: Real) -> Softmax:
    of_empty = {"uniform": 1 / max(_own_keys(problem, logits.shape), 1), "nan": np.nan}
    return softmax(logits, of_empty.get(str(problem.options.get("empty_rows")), 0.0))


def _own_keys(problem: Problem, shape: Shape) -> int:
    return shape[-1] - problem.added_keys


def _error(at: At, logits: Logits) -> Rows:
    return rows_of(logits, at.value.weights, at.value.log_sum_exp, at.rounding)


def _radius(_around: Around, value: Softmax, logits: Ball) -> Softmax:
    attended = logits.value > -np.inf
    shifted, _, total, highest = _exponentials(logits.value)
    # The logarithm of a weight is a number where the weight itself is too small for float64.
    log_weights, radius = shifted - np.log(total), np.where(attended, logits.radius, 0)
    weights = np.where(highest == -np.inf, 0, value.weights)  # by convention, which no rounding of the scores moves
    moved = np.where(attended, weight_radius(weights, log_weights, radius), 0)
    return Softmax(moved, np.where(np.isinf(value.log_sum_exp), 0, log_sum_radius(weights, log_weights, radius)))


def _stored_weights(_: At, array: Real) -> Operand:
    # Roundings of the weights that meet the values are counted with the mean.
    return Operand(array)


def _reach(known: Reach, logits: Flags) -> Flags:
    return any_of(logits if known.attended is None else logits & known.attended, -1)


EXPONENTIALS = Step(_exact, _value, _error, _radius, reach=_reach)
WEIGHTS = Step(
    lambda _, powers: normalised(powers),
    lambda _, both: both.weights,
    lambda at, rows: Weights(at.value, rows),
    lambda _, __, both: both.radius.weights,
    _stored_weights,
    handed_on,
    magnitude=abs,
)
LOG_SUM_EXP = Step(
    lambda _, powers: log_sum(powers),
    lambda _, both: both.log_sum_exp,
    lambda at, rows: Finished(at.value, log_sum_exp_bound(rows, at.value, at.rounding.of_statistics)),
    lambda _, __, both: both.radius.log_sum_exp,
    reach=lambda _, row: row[..., 0],
    magnitude=lambda entry: 1 + abs(entry),
)


def exact_grad_logits(
    problem: Problem, weights: ExactArray, grad_weights: ExactArray, masked: ExactArray
) -> ExactArray:
    """Return p (dp - sum p dp), of magnitudes p (|dp| + sum p |dp|); 0 at masked keys, were a row of them uniform.

    The Jacobian of a softmax is diag(p) - p p^T.
    """
    mean = (weights * grad_weights).sum(-1)
    gradients = weights * (grad_weights + mean if problem.absolute else grad_weights - mean)
    if masked.attended is not None:
        gradients = gradients.where(masked.attended, 0.0)
    return exact_through_mask(problem, gradients)


def weights_bound(rows: Rows, exact: Real, rounding: RoundingModel) -> Bound:
    """Bound the weights; 0 where a key is not attended to: the weight there must be exactly 0."""
    p, moved = rows.weights, moved_weights(rows)
    relative = normalisation_error(rows, rounding) + _storage(rounding)
    floor = 2 * rounding.weight_underflow + rounding.output_underflow
    # A factor of both would overflow where a relative error does; there may be nothing that it meets.
    max_error = (moved * (1 + relative) + p * relative) * (1 + 2 * relative) + floor
    largest = largest_of(exact, max_error)
    # The weight is a factor of the whole scale: squared it would underflow.
    scale = np.fmin(p * np.sqrt(_weights_variance(rows, rounding)) + floor, largest)
    linear = is_linear(rows)
    scale = scale if linear.all() else np.where(linear, scale, largest)
    if rows.all_attended:
        return Bound(largest, scale)
    return Bound(np.where(rows.attended, largest, 0.0), np.where(rows.attended, scale, 0.0))


def moved_weights(rows: Rows) -> Real:
    """Return G: how far perturbed exponents alone can move each weight."""
    p = rows.weights
    # R - p W cancels where one key has nearly all of the weight.
    others = np.maximum(rows.grown_sum - rows.grown, 0) + rows.count * _HALF_BIT * rows.grown_sum
    moved: Real = np.minimum(((1 - p) * rows.grown + p * others) / rows.least_sum, np.maximum(p, 1 - p))
    return moved


def normalisation_error(rows: Rows, rounding: RoundingModel) -> Real:
    """Return the relative error of the sum of exponentials, and of a division by it."""
    summed = (rows.count + rows.blocks) * rounding.sum_unit + rows.count * rounding.weight_underflow
    relative: Real = summed + 3 * rounding.compute_unit
    return relative + total_error(rows, rounding) if rounding.from_log_sum_exp else relative


def total_error(rows: Rows, rounding: RoundingModel) -> Real:
    """Return how far sum_j e^(s^_j - L^) can be from 1, where L^ is a stored log_sum_exp, of scores made on their own.

    tau = max{ (1 + R) e^F - 1, 1 - Z e^-F },    F = B_L + (c_x + c_m) u_c lambda
    """
    shift = stored_log_sum_exp_error(rows, rounding)[..., np.newaxis]
    above = np.expm1(np.minimum(shift + np.log1p(rows.grown_sum), LARGEST_EXPONENT))
    below = -np.expm1(-rows.fall - shift)
    total: Real = np.maximum(above, below)
    return total


def stored_log_sum_exp_error(rows: Rows, rounding: RoundingModel) -> Real:
    """Return F, (..., Lq): the error of s - L beyond that of s - m, L being stored in the format of the computation."""
    unit, exact = rounding.compute_unit, rows.log_sum_exp[..., 0]
    kept = replace(rounding, output_unit=unit, output_underflow=rounding.score_underflow, output_count=2)
    excess = np.where(rows.count[..., 0] > 0, exact - rows.maximum[..., 0], 0.0)
    counts = rounding.difference_count + rounding.maximum_count
    shift: Real = log_sum_exp_bound(rows, exact, kept).max_error + counts * unit * np.maximum(excess, 0)
    return shift


def stored_log_sum_exp_variance(rows: Rows, rounding: RoundingModel) -> Real:
    """Return the variance of a stored L beyond that of its sum, (..., Lq, 1)."""
    maximum, unit = rows.maximum, rounding.compute_unit
    stored = np.where(rows.count > 0, rows.log_sum_exp, 0.0)
    excess = np.maximum(stored - maximum, 0)
    variance: Real = (rounding.log_error + unit) ** 2 * excess**2 + 2 * unit**2 * (maximum**2 + stored**2)
    return variance


def log_sum_exp_bound(rows: Rows, exact: Real, rounding: RoundingModel) -> Bound:
    """Bound log_sum_exp, ``exact`` (..., Lq); 0 for a row without a key."""
    unit, maximum, size = rounding.compute_unit, rows.maximum[..., 0], np.abs(exact)
    excess = np.maximum(finite(exact) - maximum, 0)  # lambda
    largest = rows.maximum_error[..., 0]
    moved = np.maximum(np.log1p(rows.grown_sum), rows.fall)[..., 0]
    furthest = rows.exponent.max(axis=-1, initial=0.0)
    # A p e^E that would overflow has been cut off; no sum moves further than its largest exponent.
    cut_off = rows.grown_sum[..., 0] > _LARGEST_GROWN
    moved = np.where(cut_off, furthest, np.minimum(moved, furthest)) + rows.common[..., 0]
    terms = rows.count + rows.blocks
    summed = (terms * rounding.sum_unit + rows.count * rounding.weight_underflow)[..., 0] + 2 * unit
    summed = summed * (1 + 2 * summed)
    max_error = (
        moved
        + summed
        + (rounding.log_error + unit) * (excess + moved + summed + largest)
        + 2 * unit * (np.abs(maximum) + largest)
        + rounding.output_count * rounding.output_unit * (size + moved)
        + rounding.output_underflow
    )
    return bound_of(exact, max_error, _log_sum_exp_variance(rows, exact, excess, rounding), rounding.output_underflow)


def _log_sum_exp_variance(rows: Rows, exact: Real, excess: Real, rounding: RoundingModel) -> Real:
    unit, maximum = rounding.compute_unit, rows.maximum[..., 0]
    of_exponents = added(rows.own_sum, rows.shared_sum)[..., 0]
    # The rounding of the scale moves every score in proportion, the maximum included.
    variance = of_exponents + rows.constants(rounding) * (rows.mean_shifted[..., 0] + maximum) ** 2
    if rows.common is not NOTHING:
        variance += rows.common[..., 0] ** 2
    variance += rounding.sum_unit**2 * (rows.count + rows.rescalings)[..., 0]
    variance += ((rounding.log_error + unit) * excess) ** 2 + 2 * (unit * maximum) ** 2
    variance += rounding.output_count * (rounding.output_unit * exact) ** 2
    return variance


def _weights_variance(rows: Rows, rounding: RoundingModel) -> Real:
    """Return the variance of a weight's relative error, that of theta_j - sum p_l theta_l and of the normalisation.

    Errors in common: by Cauchy's inequality at most 2 (1 - p_j) [ (1 - 2p_j) c_j + sum p_l c_l ].
    """
    p, own, shared, unit = rows.weights, rows.independent, rows.shared, rounding.compute_unit
    apart, opposite = rounding.from_log_sum_exp, 1 - 2 * p
    of_row = rounding.sum_unit**2 * (rows.count + rows.rescalings) + 2 * unit**2
    of_row += rounding.output_count * rounding.output_unit**2
    variance: Real = (own if apart else own * opposite) + rows.own_sum
    if shared is not NOTHING:
        mean = rows.shared_sum
        variance += 2 * (shared + mean) if apart else (1 + opposite) * (opposite * shared + mean)
    np.maximum(variance, 0, out=variance)
    if apart:
        of_row += stored_log_sum_exp_variance(rows, rounding)
    variance += rows.constants(rounding) * (rows.shifted - rows.mean_shifted) ** 2
    variance += of_row
    return variance


def _storage(rounding: RoundingModel) -> float:
    """Roundings of the stored weight; in the native class the weight that meets the values is the one returned."""
    stored = rounding.output_count * rounding.output_unit
    return stored if rounding.weight_unit == rounding.sum_unit else stored + rounding.weight_unit
