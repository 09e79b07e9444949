"""A softmax and how its exponents may be perturbed: what the bounds of weights, log_sum_exp and output start from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Logits, Real, finite
from attncheck.attention.rounding import RoundingModel

_MAX_LINEAR = 1 / 64
"""Variance of theta up to which weights have a statistical scale: at three times its root, e^theta - 1 is 1.2 theta."""
_SMALL = 1.0
"""Exponents up to here go through expm1; larger ones through the logarithm of the weight."""
LARGEST_EXPONENT = 700.0
_MIN_WEIGHT = 1e-300


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
    fall: Real  # -ln Z
    independent: Real  # t^2: variance of theta, each key's own
    shared: Real  # variance of theta, common to the keys of a row
    mean_shifted: Real  # sum p x
    log_sum_exp: Real  # L
    common: Real  # of theta, what all keys of a row have alike, beyond E
    proportion: float = 0.0  # variance of a relative error that all scores have in common

    @property
    def variance(self) -> Real:
        """The variance of theta."""
        variance = self.independent + self.shared
        return variance + self.proportion * self.shifted * self.shifted if self.proportion else variance

    def constants(self, rounding: RoundingModel) -> float:
        """The variance of what moves every score in proportion: a rounded scale, factors that are cut off."""
        return rounding.score_unit**2 + rounding.compute_unit**2 + self.proportion

    @property
    def rescalings(self) -> Real:
        """rho = 1 + ln(1 + r): how often the running maximum is expected to change, on data without an order."""
        changes: Real = 1 + np.log1p(self.blocks)
        return changes


def rows_of(error: Logits, weights: Real, log_sum_exp: Real, rounding: RoundingModel) -> Rows:
    """Prepare the bounds of whatever follows from logits, whose exact softmax is given.

    logits, weights (..., Lq, Lk), log_sum_exp (..., Lq). A row with NaN or +inf in it counts as empty.
    """
    logits = error.value
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    attended = (logits > -np.inf) & np.isfinite(highest)
    whole, even = bool(attended.all()), _even_rows(error, attended, rounding)
    maximum = np.where(np.isfinite(highest), highest, 0.0)
    distance = error.max_error + np.zeros_like(logits)
    shifted = logits - maximum
    if not whole:
        distance, shifted, weights = (np.where(attended, each, 0.0) for each in (distance, shifted, weights))
    count = attended.sum(axis=-1, keepdims=True).astype(np.float64)
    blocks = np.ceil(count / rounding.block)
    largest = (shifted + distance).max(axis=-1, keepdims=True, initial=0.0)
    # What the keys of an even row have in common leaves its weights as they are.
    common = np.where(even, largest + rounding.maximum_count * rounding.compute_unit * (np.abs(maximum) + largest), 0.0)
    distance = np.where(even, 0.0, distance)
    apart, beyond = np.where(even, 0.0, maximum), np.where(even, 0.0, largest)
    exponent = _exponent(distance, shifted, _exponent_of_row(apart, beyond, count, blocks, rounding), rounding)
    grown, squares, least, lost = _perturbed(weights, logits, log_sum_exp, exponent, attended)
    least_sum = np.maximum(least.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    independent, shared = _variances(shifted, apart, blocks, error, rounding)
    if even.any():
        independent = np.where(even, rounding.exp_error**2 * (2 + np.log1p(blocks)), independent)
        shared = np.where(even, 0.0, shared)
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
        least_sum=least_sum,
        fall=_fall(least_sum, lost.sum(axis=-1, keepdims=True)),
        independent=independent,
        shared=shared,
        mean_shifted=(weights * shifted).sum(axis=-1, keepdims=True),
        log_sum_exp=finite(log_sum_exp)[..., np.newaxis],
        common=common,
        proportion=error.proportion,
    )


def _even_rows(error: Logits, attended: NDArray[np.bool_], rounding: RoundingModel) -> NDArray[np.bool_]:
    """Return which rows, (..., Lq, 1), have one and the same number for all that is attended to.

    Parts of a row that are merged by a stored log_sum_exp have errors of their own, whatever is in them.
    """
    if error.constant is None or rounding.from_log_sum_exp:
        return np.zeros((1, 1), np.bool_)
    return np.asarray((error.constant | ~attended).all(axis=-1, keepdims=True))


def is_linear(rows: Rows, most: float = _MAX_LINEAR) -> NDArray[np.bool_]:
    """Return where e^theta - 1 is about theta: elsewhere noise in a score is no noise of that size in its weight.

    ``most`` is the largest variance of theta that counts as small.
    """
    variance = rows.variance
    of_row = (rows.weights * finite(variance)).sum(axis=-1, keepdims=True)
    linear: NDArray[np.bool_] = np.maximum(variance, of_row) <= most
    return linear


def second_order(variance: Real) -> Real:
    """Return f(t) = E (e^theta - 1 - theta)^2 of a normal theta with the variance t: 3/4 t^2 where that is small.

    f(t) = e^(2t) - 2 (1 + t) e^(t/2) + 1 + t
    """
    bounded = np.minimum(variance, LARGEST_EXPONENT / 2)
    grown: Real = np.expm1(2 * bounded) - 2 * (1 + bounded) * np.expm1(bounded / 2) - bounded
    return np.maximum(grown, 0.75 * bounded * bounded)  # the difference cancels


def _exponent_of_row(maximum: Real, largest: Real, count: Real, blocks: Real, rounding: RoundingModel) -> Real:
    """Return the part of E that the keys of a row have in common."""
    unit = rounding.compute_unit
    rescaled = np.minimum(blocks, np.maximum(count - 1, 0))
    of_row: Real = unit * (rounding.difference_count * largest + rounding.maximum_count * (np.abs(maximum) + largest))
    of_row += (1 + rescaled) * rounding.exp_error + 2 * unit * rescaled
    return of_row


def _exponent(distance: Real, shifted: Real, of_row: Real, rounding: RoundingModel) -> Real:
    """Return E."""
    relative = rounding.compute_unit * rounding.difference_count
    exponent = np.abs(shifted)
    exponent *= relative
    exponent += distance * (1 + relative)
    exponent += of_row
    exponent *= 1 + 8 * rounding.coarsest_unit
    return exponent


def _perturbed(
    weights: Real, logits: Real, log_sum_exp: Real, exponent: Real, attended: NDArray[np.bool_]
) -> tuple[Real, Real, Real, Real]:
    """Return p (e^E - 1), p (e^E - 1)^2, p e^-E and p (1 - e^-E), where e^E may overflow and p underflow."""
    if bool((exponent <= _SMALL).all()):
        rise = np.expm1(exponent)
        grown = weights * rise
        return grown, grown * rise, weights / (1 + rise), grown / (1 + rise)
    small = exponent <= _SMALL
    rise = np.expm1(np.where(small, exponent, 0.0))
    grown = weights * rise
    squares, least, lost = grown * rise, weights / (1 + rise), grown / (1 + rise)
    large = attended & ~small
    p, raised = weights[large], exponent[large]
    # Where the weight itself has underflowed, its logarithm still is a number.
    difference = (np.where(attended, logits, 0.0) - finite(log_sum_exp)[..., np.newaxis])[large]
    logarithm = np.where(p > _MIN_WEIGHT, np.log(np.maximum(p, _MIN_WEIGHT)), difference)
    grown[large] = np.exp(np.minimum(logarithm + raised, LARGEST_EXPONENT)) - p
    squares[large] = np.exp(np.minimum(logarithm + 2 * raised, LARGEST_EXPONENT))
    least[large] = np.exp(logarithm - raised)
    lost[large] = np.maximum(p - least[large], 0)
    return grown, squares, least, lost


def _fall(least_sum: Real, lost_sum: Real) -> Real:
    """Return -ln Z, at least 0, by 1 - Z where Z is so near 1 that its last bits count; large for an empty row."""
    near = least_sum > 0.5
    fall: Real = np.where(near, -np.log1p(-np.where(near, lost_sum, 0.0)), -np.log(np.minimum(least_sum, 1)))
    return np.maximum(fall, 0)


def _variances(shifted: Real, maximum: Real, blocks: Real, error: Logits, rounding: RoundingModel) -> tuple[Real, Real]:
    """Return the variances of theta: each key's own, and common to a row's keys."""
    unit, exponential = rounding.compute_unit, rounding.exp_error**2
    rescalings = 1 + np.log1p(blocks)
    of_row = unit**2 * (maximum**2 + rescalings) + exponential * (1 + rescalings)
    independent = shifted * shifted
    independent *= 2 * unit**2
    independent += of_row
    independent += error.independent
    return independent, error.shared + error.floor**2 + np.zeros_like(shifted)
