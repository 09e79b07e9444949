"""Back through the softcap: ds = dlogits kappa, kappa = sech(s / c)^2 or 1; and through no scale yet.

    E_ds    = E_dl (kappa + E_kappa) + |p y| E_kappa + 4w (..)    with a softcap, h = tanh(s / c):
    E_kappa = 2|h| E_h + E_h^2 + u_c (2|h| + 4 kappa),            E_h = dh + (eps_tanh + 3u_s)(|h| + dh)
    V_kappa = 4h^2 V_h + u_c^2 (4h^2 + 4 kappa^2),                V_h = kappa^2 V_z + (eps_tanh^2 + 3u_s^2) h^2

E_kappa covers 1 - h^2 and (1 + h)(1 - h).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.backward_softmax import (
    STORAGE_COUNT,
    GradLogits,
    of_cuts,
    of_own_exponents,
    storage_of,
)
from attncheck.attention.errors import Logits, Real, sum_of_row
from attncheck.attention.flags import handed_on
from attncheck.attention.logits import cap_of, exact_grad_scores, exact_slope, rise_of_tanh, slope_of_tanh, through_mask
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import At, Step

_ONE = np.ones((1, 1))


@dataclass(frozen=True, eq=False)
class Slope:
    """The slope of the softcap; 1 without an error where there is none, and 0 where a fill took the score's place."""

    value: Real  # kappa
    softcap: float | None
    max_error: Real  # E_kappa
    variance: Real  # V_kappa

    def times(self, array: Real) -> Real:
        """Multiply by the slope, where it is not 1 throughout."""
        return array if self.value is _ONE else array * self.value


@dataclass(frozen=True, eq=False)
class GradScores:
    """The gradient of the scores and its error; 0 where nothing is attended to."""

    logits: GradLogits
    slope: Slope
    value: Real  # p y kappa
    max_error: Real  # E_ds

    def variance(self, rounding: RoundingModel) -> Real:
        """Return the variance of each score's gradient from that of the logits'."""
        if self.slope.softcap is None:
            return self.logits.variance
        size = np.abs(self.logits.value)
        # The slope and the weight have errors of the same score.
        variance: Real = (self.slope.value * np.sqrt(self.logits.variance) + size * np.sqrt(self.slope.variance)) ** 2
        return variance + self.of_storage(rounding)

    def deviation(self, rounding: RoundingModel) -> Real:
        """Return the deviation of each score's gradient by errors that queries share: rounded keys, values, cuts.

        Sums over queries must not take them for independent; deviations add up as if all had one sign.
        """
        weights, centred = self.logits.weights, self.logits.centred
        p, of_factors = weights.rows.weights, centred.gradient.of_factors
        own = np.maximum(of_own_exponents(centred, weights.of_columns, rounding), 0)
        relative = own + of_factors + sum_of_row(p * p * of_factors) + of_cuts(centred, rounding)
        through = p * np.sqrt(relative) * self.slope.value
        deviation: Real = through + np.abs(self.logits.value) * np.sqrt(self.slope.variance)
        return deviation

    def of_storage(self, rounding: RoundingModel) -> Real:
        """Return the variance of storing the intermediates of a softcap's gradient."""
        assert self.slope.softcap is not None
        unit, underflow = storage_of(rounding)
        lost = underflow**2 * (1 + 1 / self.slope.softcap**2)
        variance: Real = STORAGE_COUNT * (unit**2 * self.value**2 + self.logits.weights.attended * lost)
        return variance


def _value_of_slope(problem: Problem, scores: Real) -> Real:
    cap = cap_of(problem)
    return np.ones((1, 1)) if cap is None else slope_of_tanh(scores / cap)


def _error_of_slope(at: At, scores: Logits) -> Slope:
    problem, cap, rounding = at.problem, cap_of(at.problem), at.rounding
    if cap is None:
        whole = _ONE if problem.fill is None else np.ones(scores.value.shape)
        return Slope(through_mask(problem, whole), None, np.zeros((1, 1)), np.zeros((1, 1)))
    argument = scores.value / cap
    slope = slope_of_tanh(argument)
    own = (slope, _worst(scores, argument, slope, cap, rounding), _variance(scores, argument, slope, cap, rounding))
    slope, max_error, variance = (through_mask(problem, each) for each in own)
    return Slope(slope, cap, max_error, variance)


def _worst(scores: Logits, argument: Real, slope: Real, cap: float, rounding: RoundingModel) -> Real:
    """Return E_kappa."""
    height = np.abs(np.tanh(argument))
    rise = rise_of_tanh(argument, scores.max_error / abs(cap), rounding)
    risen = rise + (rounding.tanh_error + 3 * rounding.score_unit) * (height + rise)
    error: Real = risen * (2 * height + risen) + rounding.compute_unit * (2 * height + 4 * slope)
    return error


def _variance(scores: Logits, argument: Real, slope: Real, cap: float, rounding: RoundingModel) -> Real:
    """Return V_kappa."""
    height, unit = np.tanh(argument) ** 2, rounding.compute_unit
    of_score = (scores.independent + scores.shared) / cap**2
    of_argument = of_score + (2 * unit**2 + rounding.score_unit**2) * argument**2
    steep = np.minimum(1, slope + 0.77 * np.sqrt(of_argument))
    of_height = steep**2 * of_argument + (rounding.tanh_error**2 + 3 * rounding.score_unit**2) * height
    variance: Real = 4 * height * of_height + of_height**2 + unit**2 * 4 * (height + slope**2)
    return variance


def _error_of_grad_scores(at: At, logits: GradLogits, slope: Slope) -> GradScores:
    value = slope.times(logits.value)
    return GradScores(logits, slope, value, _through_softcap(logits, slope, at.rounding))


def _through_softcap(logits: GradLogits, slope: Slope, rounding: RoundingModel) -> Real:
    """Return E_ds from E_dl."""
    error, steep = logits.max_error, slope.max_error
    if slope.softcap is None:
        return error
    storing, underflow = storage_of(rounding)
    size = np.abs(logits.value)
    through = error * (slope.value + steep) + size * steep
    rounded = STORAGE_COUNT * storing * (size + error) * (slope.value + steep)
    floor = STORAGE_COUNT * underflow * (1 + 1 / abs(slope.softcap))
    scores: Real = logits.weights.attended * ((through + rounded) * (1 + 8 * rounding.coarsest_unit) + floor)
    return scores


# A slope is that of a score, which the weights of its row follow from: it reaches nothing more.
SLOPE = Step(exact_slope, _value_of_slope, _error_of_slope, reach=handed_on, magnitude=abs)
GRAD_SCORES = Step(exact_grad_scores, lambda _, logits, slope: logits * slope, _error_of_grad_scores, reach=handed_on)
