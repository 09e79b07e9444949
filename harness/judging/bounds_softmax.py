"""Error bounds of the weights and of log_sum_exp.

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
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.judging.bounds_terms import Bound, LogitError, Real, finite, settle
from attncheck.harness.judging.policies import Policy

_MOST_LINEAR = 1 / 64
"""Variance of theta up to which weights have a statistical scale: at three times its root, e^theta - 1 is 1.2 theta."""
_SMALL = 1.0
"""Exponents up to here go through expm1; larger ones through the logarithm of the weight."""
_LARGEST_EXPONENT = 700.0
_LEAST_WEIGHT = 1e-300
_HALF_BIT = 2.0**-53


@dataclass(frozen=True, eq=False)
class Rows:
    """A softmax and how its exponents may be perturbed; keys that are not attended to have zeros.

    (..., Lq, Lk) per key, (..., Lq, 1) per row.
    """

    attended: NDArray[np.bool_]
    all_attended: bool
    weights: Real  # p
    shifted: Real  # x
    maximum: Real  # m
    count: Real  # n
    blocks: Real  # r
    maximum_error: Real  # D_m
    exponent: Real  # E
    grown: Real  # p (e^E - 1)
    grown_squares: Real  # sum p (e^E - 1)^2
    grown_sum: Real  # R
    least_sum: Real  # Z
    independent: Real  # t^2: variance of theta, each key's own
    shared: Real  # variance of theta, common to the keys of a row
    mean_shifted: Real  # sum p x
    log_sum_exp: Real  # L
    proportion: float = 0.0  # variance of a relative error that all scores have in common

    @property
    def variance(self) -> Real:
        """The variance of theta."""
        variance = self.independent + self.shared
        return variance + self.proportion * self.shifted * self.shifted if self.proportion else variance

    def constants(self, policy: Policy) -> float:
        """The variance of what moves every score in proportion: a rounded scale, factors that are cut off."""
        return policy.score_unit**2 + policy.compute_unit**2 + self.proportion

    @property
    def rescalings(self) -> Real:
        """rho = 1 + ln(1 + r): how often the running maximum is expected to change, on data without an order."""
        changes: Real = 1 + np.log1p(self.blocks)
        return changes


def rows_of(logits: Real, weights: Real, log_sum_exp: Real, error: LogitError, policy: Policy) -> Rows:
    """Prepare the bounds of whatever follows from ``logits``, whose exact softmax is given.

    logits, weights (..., Lq, Lk), log_sum_exp (..., Lq). A row with NaN or +inf in it counts as empty.
    """
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    attended = (logits > -np.inf) & np.isfinite(highest)
    whole = bool(attended.all())
    maximum = np.where(np.isfinite(highest), highest, 0.0)
    distance = error.worst + np.zeros_like(logits)
    shifted = logits - maximum
    if not whole:
        distance, shifted, weights = (np.where(attended, each, 0.0) for each in (distance, shifted, weights))
    count = attended.sum(axis=-1, keepdims=True).astype(np.float64)
    blocks = np.ceil(count / policy.block)
    largest = (shifted + distance).max(axis=-1, keepdims=True, initial=0.0)
    exponent = _exponent(distance, shifted, _exponent_of_row(maximum, largest, count, blocks, policy), policy)
    grown, squares, least = _perturbed(weights, logits, log_sum_exp, exponent, attended)
    independent, shared = _variances(shifted, maximum, blocks, error, policy)
    if not whole:
        # A score of -1e308 has a variance of inf, and a weight of 0.
        independent, shared = (np.where(attended & (weights > 0), each, 0.0) for each in (independent, shared))
    return Rows(
        attended=attended,
        all_attended=whole,
        weights=weights,
        shifted=shifted,
        maximum=maximum,
        count=count,
        blocks=blocks,
        maximum_error=largest,
        exponent=exponent,
        grown=grown,
        grown_squares=squares.sum(axis=-1, keepdims=True),
        grown_sum=grown.sum(axis=-1, keepdims=True),
        least_sum=np.maximum(least.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny),
        independent=independent,
        shared=shared,
        mean_shifted=(weights * shifted).sum(axis=-1, keepdims=True),
        log_sum_exp=finite(log_sum_exp)[..., np.newaxis],
        proportion=error.proportion,
    )


def weights_bound(rows: Rows, exact: Real, policy: Policy) -> Bound:
    """Bound the weights; 0 where a key is not attended to: the weight there must be exactly 0."""
    p, moved = rows.weights, moved_weights(rows)
    relative = normalisation_error(rows, policy) + _storage(policy)
    floor = 2 * policy.weight_underflow + policy.output_underflow
    worst = (moved + relative * (p + moved)) * (1 + 2 * relative) + floor
    bound = settle(exact, worst, np.zeros_like(worst), 0.0)
    # The weight is a factor of the whole scale: squared it would underflow.
    scale = p * np.sqrt(_weights_variance(rows, policy)) + floor
    known = np.isfinite(exact) & np.isfinite(scale) & is_linear(rows)
    scale = np.where(known, np.minimum(scale, bound.worst), bound.worst)
    if rows.all_attended:
        return Bound(bound.worst, scale)
    return Bound(np.where(rows.attended, bound.worst, 0.0), np.where(rows.attended, scale, 0.0))


def moved_weights(rows: Rows) -> Real:
    """Return G: how far perturbed exponents alone can move each weight."""
    p = rows.weights
    # R - p W cancels where one key has nearly all of the weight.
    others = np.maximum(rows.grown_sum - rows.grown, 0) + rows.count * _HALF_BIT * rows.grown_sum
    moved: Real = np.minimum(((1 - p) * rows.grown + p * others) / rows.least_sum, np.maximum(p, 1 - p))
    return moved


def normalisation_error(rows: Rows, policy: Policy) -> Real:
    """Return the relative error of the sum of exponentials, and of a division by it."""
    summed = (rows.count + rows.blocks) * policy.sum_unit + rows.count * policy.weight_underflow
    relative: Real = summed + 3 * policy.compute_unit
    return relative + total_error(rows, policy) if policy.from_log_sum_exp else relative


def total_error(rows: Rows, policy: Policy) -> Real:
    """Return how far sum_j e^(s^_j - L^) can be from 1, where L^ is a stored log_sum_exp, of scores made on their own.

    tau = max{ (1 + R) e^F - 1, 1 - Z e^-F },    F = B_L + (c_x + c_m) u_c lambda
    """
    shift = stored_log_sum_exp_error(rows, policy)[..., np.newaxis]
    above = np.expm1(np.minimum(shift + np.log1p(rows.grown_sum), _LARGEST_EXPONENT))
    below = -np.expm1(np.log(np.minimum(rows.least_sum, 1)) - shift)
    total: Real = np.maximum(above, below)
    return total


def stored_log_sum_exp_error(rows: Rows, policy: Policy) -> Real:
    """Return F, (..., Lq): the error of s - L beyond that of s - m, L being stored in the format of the computation."""
    unit, exact = policy.compute_unit, rows.log_sum_exp[..., 0]
    kept = replace(policy, output_unit=unit, output_underflow=policy.score_underflow, output_count=2)
    excess = np.where(rows.count[..., 0] > 0, exact - rows.maximum[..., 0], 0.0)
    counts = policy.difference_count + policy.maximum_count
    shift: Real = log_sum_exp_bound(rows, exact, kept).worst + counts * unit * np.maximum(excess, 0)
    return shift


def stored_log_sum_exp_variance(rows: Rows, policy: Policy) -> Real:
    """Return the variance of a stored L beyond that of its sum, (..., Lq, 1)."""
    maximum, unit = rows.maximum, policy.compute_unit
    stored = np.where(rows.count > 0, rows.log_sum_exp, 0.0)
    excess = np.maximum(stored - maximum, 0)
    variance: Real = (policy.log_error + unit) ** 2 * excess**2 + 2 * unit**2 * (maximum**2 + stored**2)
    return variance


def log_sum_exp_bound(rows: Rows, exact: Real, policy: Policy) -> Bound:
    """Bound log_sum_exp, ``exact`` (..., Lq); 0 for a row without a key."""
    unit, maximum, rounding = policy.compute_unit, rows.maximum[..., 0], policy.output_count * policy.output_unit
    excess = np.maximum(finite(exact) - maximum, 0)  # lambda
    largest = rows.maximum_error[..., 0]
    moved = np.maximum(np.log1p(rows.grown_sum), -np.log(np.minimum(rows.least_sum, 1)))[..., 0]
    furthest = rows.exponent.max(axis=-1, initial=0.0)
    # An e^E that would overflow has been cut off; no sum moves further than its largest exponent.
    moved = np.where(furthest > _LARGEST_EXPONENT, furthest, np.minimum(moved, furthest))
    summed = (rows.count + rows.blocks) * policy.sum_unit + 2 * unit + rows.count * policy.weight_underflow
    summed = (summed * (1 + 2 * summed))[..., 0]
    worst = (
        moved
        + summed
        + (policy.log_error + unit) * (excess + moved + summed + largest)
        + 2 * unit * (np.abs(maximum) + largest)
        + rounding * (np.abs(exact) + moved)
        + policy.output_underflow
    )
    p, constants = rows.weights, rows.constants(policy)
    variance = (
        (p * p * rows.independent + p * rows.shared).sum(axis=-1)
        # The rounding of the scale moves every score in proportion, the maximum included.
        + constants * (rows.mean_shifted[..., 0] + maximum) ** 2
        + policy.sum_unit**2 * (rows.count + rows.rescalings)[..., 0]
        + (policy.log_error + unit) ** 2 * excess**2
        + 2 * unit**2 * maximum**2
        + policy.output_count * policy.output_unit**2 * exact**2
    )
    return settle(exact, worst, variance, policy.output_underflow)


def _exponent_of_row(maximum: Real, largest: Real, count: Real, blocks: Real, policy: Policy) -> Real:
    """Return the part of E that the keys of a row have in common."""
    unit = policy.compute_unit
    rescaled = np.minimum(blocks, np.maximum(count - 1, 0))
    of_row: Real = unit * (policy.difference_count * largest + policy.maximum_count * (np.abs(maximum) + largest))
    of_row += (1 + rescaled) * policy.exp_error + 2 * unit * rescaled
    return of_row


def _exponent(distance: Real, shifted: Real, of_row: Real, policy: Policy) -> Real:
    """Return E."""
    relative = policy.compute_unit * policy.difference_count
    exponent = np.abs(shifted)
    exponent *= relative
    exponent += distance * (1 + relative)
    exponent += of_row
    exponent *= 1 + 8 * policy.coarsest_unit
    return exponent


def _perturbed(
    weights: Real, logits: Real, log_sum_exp: Real, exponent: Real, attended: NDArray[np.bool_]
) -> tuple[Real, Real, Real]:
    """Return p (e^E - 1), p (e^E - 1)^2 and p e^-E, where e^E may overflow and p underflow."""
    if bool((exponent <= _SMALL).all()):
        rise = np.expm1(exponent)
        grown = weights * rise
        return grown, grown * rise, weights / (1 + rise)
    small = exponent <= _SMALL
    rise = np.expm1(np.where(small, exponent, 0.0))
    grown = weights * rise
    squares, least = grown * rise, weights / (1 + rise)
    large = attended & ~small
    p, raised = weights[large], exponent[large]
    # Where the weight itself has underflowed, its logarithm still is a number.
    difference = (np.where(attended, logits, 0.0) - finite(log_sum_exp)[..., np.newaxis])[large]
    logarithm = np.where(p > _LEAST_WEIGHT, np.log(np.maximum(p, _LEAST_WEIGHT)), difference)
    grown[large] = np.exp(np.minimum(logarithm + raised, _LARGEST_EXPONENT)) - p
    squares[large] = np.exp(np.minimum(logarithm + 2 * raised, _LARGEST_EXPONENT))
    least[large] = np.exp(logarithm - raised)
    return grown, squares, least


def _variances(shifted: Real, maximum: Real, blocks: Real, error: LogitError, policy: Policy) -> tuple[Real, Real]:
    """Return the variances of theta: each key's own, and common to a row's keys."""
    unit, exponential = policy.compute_unit, policy.exp_error**2
    rescalings = 1 + np.log1p(blocks)
    of_row = unit**2 * (maximum**2 + rescalings) + exponential * (1 + rescalings)
    independent = shifted * shifted
    independent *= 2 * unit**2
    independent += of_row
    independent += error.independent
    return independent, error.shared + error.floor**2 + np.zeros_like(shifted)


def is_linear(rows: Rows, most: float = _MOST_LINEAR) -> NDArray[np.bool_]:
    """Return where e^theta - 1 is about theta: elsewhere noise in a score is no noise of that size in its weight.

    ``most`` is the largest variance of theta that counts as small.
    """
    variance = rows.variance
    of_row = (rows.weights * finite(variance)).sum(axis=-1, keepdims=True)
    linear: NDArray[np.bool_] = np.maximum(variance, of_row) <= most
    return linear


def _weights_variance(rows: Rows, policy: Policy) -> Real:
    """Return the variance of a weight's relative error, that of theta_j - sum p_l theta_l and of the normalisation.

    Errors in common: by Cauchy's inequality at most 2 (1 - p_j) [ (1 - 2p_j) c_j + sum p_l c_l ].
    """
    p, own, unit, apart = rows.weights, rows.independent, policy.compute_unit, policy.from_log_sum_exp
    variance: Real = own * (1.0 if apart else 1 - 2 * p) + (p * p * own).sum(axis=-1, keepdims=True)
    of_row = (p * rows.shared).sum(axis=-1, keepdims=True)
    variance += 2 * (rows.shared + of_row) if apart else 2 * (1 - p) * ((1 - 2 * p) * rows.shared + of_row)
    np.maximum(variance, 0, out=variance)
    if apart:
        variance += stored_log_sum_exp_variance(rows, policy)
    variance += rows.constants(policy) * (rows.shifted - rows.mean_shifted) ** 2
    variance += policy.sum_unit**2 * (rows.count + rows.rescalings) + 2 * unit**2
    variance += policy.output_count * policy.output_unit**2
    return variance


def _storage(policy: Policy) -> float:
    """Roundings of the stored weight; in the native class the weight that meets the values is the one returned."""
    stored = policy.output_count * policy.output_unit
    return stored if policy.weight_unit == policy.sum_unit else stored + policy.weight_unit
