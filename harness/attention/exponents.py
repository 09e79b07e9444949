"""A softmax and how its exponents may be perturbed: what the bounds of weights, log_sum_exp and output start from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import NOTHING, Logits, Real, added, finite, sum_of_products, sum_of_row
from attncheck.attention.rounding import RoundingModel

_MAX_LINEAR = 1 / 64
"""Variance of theta up to which weights have a statistical scale: at three times its root, e^theta - 1 is 1.2 theta."""
_MIN_VARIANCE = 2.0**-20
"""Variance of theta up to which two terms of its second order are all that float64 can tell, and better than more."""
_NEGLIGIBLE = 2.0**-80
"""Beside the variance of an exponential's own error, what is so much smaller shows in no sum of float64 numbers."""
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
    rescalings: Real  # rho: how often the running maximum is expected to change, on data without an order
    maximum_error: Real  # D_m
    exponent: Real  # E
    grown: Real  # p (e^E - 1)
    grown_squares: Real  # sum p (e^E - 1)^2
    grown_sum: Real  # R
    least_sum: Real  # Z
    lost_sum: Real  # 1 - Z
    independent: Real  # t^2: variance of theta, each key's own
    shared: Real  # c^2: variance of theta, common to the keys of a row
    squares: Real  # p^2
    own: Real  # p^2 t^2
    own_sum: Real  # sum p^2 t^2
    shared_sum: Real  # sum p c^2
    mean_shifted: Real  # sum p x
    log_sum_exp: Real  # L
    common: Real  # of theta, what all keys of a row have alike, beyond E
    proportion: float = 0.0  # variance of a relative error that all scores have in common

    @cached_property
    def variance(self) -> Real:
        """The variance of theta."""
        variance = added(self.independent, self.shared)
        return variance + self.proportion * self.shifted * self.shifted if self.proportion else variance

    @cached_property
    def largest_variance(self) -> float:
        """The largest variance of theta."""
        return float(self.variance.max(initial=0.0))

    @cached_property
    def fall(self) -> Real:
        """-ln Z, at least 0, by 1 - Z where Z is so near 1 that its last bits count; large for an empty row."""
        near = self.least_sum > 0.5
        fall = -np.log1p(-np.where(near, self.lost_sum, 0.0))
        return np.maximum(fall if near.all() else np.where(near, fall, -np.log(np.minimum(self.least_sum, 1))), 0)

    def constants(self, rounding: RoundingModel) -> float:
        """The variance of what moves every score in proportion: a rounded scale, factors that are cut off."""
        return rounding.score_unit**2 + rounding.compute_unit**2 + self.proportion


def rows_of(error: Logits, weights: Real, log_sum_exp: Real, rounding: RoundingModel) -> Rows:
    """Prepare the bounds of whatever follows from logits, whose exact softmax is given.

    logits, weights (..., Lq, Lk), log_sum_exp (..., Lq). A row with NaN or +inf in it counts as empty.
    """
    logits = error.value
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    attended, maximum = logits > -np.inf, finite(highest)
    if maximum is not highest:
        attended &= np.isfinite(highest)
    whole, even = bool(attended.all()), _even_rows(error, attended, rounding)
    distance, shifted = error.max_error, logits - maximum
    if not whole:
        distance, shifted, weights = (np.where(attended, each, 0.0) for each in (distance, shifted, weights))
    count = np.full(highest.shape, float(logits.shape[-1])) if whole else sum_of_row(attended.astype(np.float64))
    blocks = np.ceil(count / rounding.block)
    rescalings = 1 + np.log1p(blocks)
    largest = (shifted + distance).max(axis=-1, keepdims=True, initial=0.0)
    common, apart, beyond = NOTHING, maximum, largest
    if even is not None:
        # What the keys of an even row have in common leaves its weights as they are.
        common = largest + rounding.maximum_count * rounding.compute_unit * (np.abs(maximum) + largest)
        common = np.where(even, common, 0.0)
        distance, apart, beyond = (np.where(even, 0.0, each) for each in (distance, maximum, largest))
    exponent = _exponent(distance, shifted, _exponent_of_row(apart, beyond, count, blocks, rounding), rounding)
    grown, squares, least, lost = _perturbed(weights, logits, log_sum_exp, exponent, attended)
    independent, shared = _variances(shifted, apart, rescalings, error, rounding)
    if even is not None:
        independent = np.where(even, rounding.exp_error**2 * (1 + rescalings), independent)
        shared = np.where(even, 0.0, shared)
    if not whole:
        # A score of -1e308 has a variance of inf, and a weight of 0.
        weighty = weights > 0
        independent = np.where(weighty, independent, 0.0)
        shared = shared if shared is NOTHING else np.where(weighty, shared, 0.0)
    square_p = weights * weights
    own = square_p * independent
    return Rows(
        attended=attended,
        all_attended=whole,
        weights=weights,
        shifted=shifted,
        maximum=maximum,
        count=count,
        blocks=blocks,
        rescalings=rescalings,
        maximum_error=largest,
        exponent=exponent,
        grown=grown,
        grown_squares=squares,
        grown_sum=sum_of_row(grown),
        least_sum=np.maximum(least, np.finfo(np.float64).tiny),
        lost_sum=lost,
        independent=independent,
        shared=shared,
        squares=square_p,
        own=own,
        own_sum=sum_of_row(own),
        shared_sum=NOTHING if shared is NOTHING else sum_of_row(weights * shared),
        mean_shifted=sum_of_products(weights, shifted),
        log_sum_exp=finite(log_sum_exp)[..., np.newaxis],
        common=common,
        proportion=error.proportion,
    )


def _even_rows(error: Logits, attended: NDArray[np.bool_], rounding: RoundingModel) -> NDArray[np.bool_] | None:
    """Return which rows, (..., Lq, 1), have one and the same number for all that is attended to; None without any.

    Parts of a row that are merged by a stored log_sum_exp have errors of their own, whatever is in them.
    """
    if error.constant is None or rounding.from_log_sum_exp:
        return None
    even = np.asarray((error.constant | ~attended).all(axis=-1, keepdims=True))
    return even if even.any() else None


def is_linear(rows: Rows, most: float = _MAX_LINEAR) -> NDArray[np.bool_]:
    """Return where e^theta - 1 is about theta: elsewhere noise in a score is no noise of that size in its weight.

    ``most`` is the largest variance of theta that counts as small.
    """
    if rows.largest_variance <= most / 2:  # and so is the mean of a row
        return np.ones((1, 1), np.bool_)
    variance = rows.variance
    of_row = (rows.weights * finite(variance)).sum(axis=-1, keepdims=True)
    linear: NDArray[np.bool_] = np.maximum(variance, of_row) <= most
    return linear


def second_order(rows: Rows) -> Real:
    """Return f(t) = E (e^theta - 1 - theta)^2 of a normal theta with the variance t: 3/4 t^2 where that is small.

    f(t) = e^(2t) - 2 (1 + t) e^(t/2) + 1 + t = 3/4 t^2 + 25/24 t^3 + O(t^4)
    """
    variance = rows.variance
    if rows.largest_variance < _MIN_VARIANCE:
        return variance * variance * (0.75 + 25 / 24 * variance)
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
    relative, room = rounding.compute_unit * rounding.difference_count, 1 + 8 * rounding.coarsest_unit
    exponent = shifted * (-relative * room)  # no x is above 0
    exponent += distance * ((1 + relative) * room)
    exponent += of_row * room
    return exponent


def _perturbed(
    weights: Real, logits: Real, log_sum_exp: Real, exponent: Real, attended: NDArray[np.bool_]
) -> tuple[Real, Real, Real, Real]:
    """Return p (e^E - 1), and of each row the sums of p (e^E - 1)^2, p e^-E and p (1 - e^-E).

    There e^E may overflow and p underflow.
    """
    small = exponent <= _SMALL
    if small.all():
        rise = np.expm1(exponent)
        grown, fallen = weights * rise, 1 / (1 + rise)
        return grown, sum_of_products(grown, rise), sum_of_products(weights, fallen), sum_of_products(grown, fallen)
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
    return grown, sum_of_row(squares), sum_of_row(least), sum_of_row(lost)


def _variances(
    shifted: Real, maximum: Real, rescalings: Real, error: Logits, rounding: RoundingModel
) -> tuple[Real, Real]:
    """Return the variances of theta: each key's own, and common to a row's keys."""
    unit, exponential = rounding.compute_unit, rounding.exp_error**2
    of_row = unit**2 * (maximum * maximum + rescalings) + exponential * (1 + rescalings)
    independent = shifted * shifted
    independent *= 2 * unit**2
    independent += of_row
    independent += error.independent
    underflow = float(error.floor.max(initial=0.0))
    if underflow**2 < _NEGLIGIBLE * exponential:
        return independent, error.shared
    return independent, added(error.shared, error.floor * error.floor)
