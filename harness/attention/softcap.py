"""The softcap, c tanh(s / c) (Gemma Team 2024, section 2), and its transpose: times sech(s / c)^2.

    z = s/c, h = tanh z:  dz = D/|c| + (2u_c + u_s)(|z| + D/|c|);  dh = min(1, sech(z)^2 + 0.77 dz) dz
    D <- [ |c| dh + (eps_tanh + u_c + 2u_s)(|c h| + |c| dh) ] (1 + 8u*) + 2 eta_s (1 + |c|)

0.77 > max |d sech^2 / dz| = 4 / (3 sqrt 3). The slope of tanh is at most 1, and c tanh moves by 2 c at most.
"""

from __future__ import annotations

import numpy as np

from attncheck.attention.errors import Ball, Logits, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import handed_on
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import Around, At, Step, stored_logits


def cap_of(problem: Problem) -> float | None:
    """Return c; None without a softcap."""
    softcap = problem.options.get("softcap")
    return None if softcap is None else float(softcap)


def _exact(problem: Problem, scores: ExactArray) -> ExactArray:
    if cap_of(problem) is None:
        return scores
    cap = problem.number(problem.options["softcap"])
    capped = (scores / cap).tanh() * cap
    if capped.attended is None:
        return capped
    return capped.where(capped.attended, -cap).with_attended()  # the tanh of -inf is -1


def _value(problem: Problem, scores: Real) -> Real:
    cap = cap_of(problem)
    return scores if cap is None else np.asarray(cap * np.tanh(scores / cap))


def _radius(around: Around, _: Real, scores: Ball) -> Real:
    cap = cap_of(around.problem)
    return scores.radius if cap is None else np.minimum(scores.radius, 2 * cap)


def _error(at: At, scores: Logits) -> Logits:
    cap = cap_of(at.problem)
    return scores if cap is None else _capped(scores, cap, at.value, at.rounding)


def _capped(error: Logits, cap: float, value: Real, rounding: RoundingModel) -> Logits:
    # tanh(-inf) is -1 without any error
    before = np.where(error.value == -np.inf, 0.0, error.value)
    size, unit = abs(cap), rounding.score_unit
    ratio = before / cap
    height, slope = np.abs(np.tanh(ratio)), slope_of_tanh(ratio)
    rise = rise_of_tanh(ratio, error.max_error / size, rounding)
    relative = rounding.tanh_error + rounding.compute_unit + 2 * unit
    floor = np.asarray(2 * rounding.score_underflow * (1 + size))
    max_error = size * (rise + relative * (height + rise)) * (1 + 8 * rounding.coarsest_unit) + floor
    spread = error.independent + (2 * rounding.compute_unit**2 + unit**2) * before * before
    functional = (rounding.tanh_error**2 + 2 * unit**2) * (size * height) ** 2
    shared = error.shared_with_proportion(before)
    steep = np.minimum(1, slope + 0.77 * np.sqrt(spread + shared) / size) ** 2
    return Logits(value, max_error, steep * spread + functional, steep * shared, floor + np.sqrt(steep) * error.floor)


def rise_of_tanh(argument: Real, moved: Real, rounding: RoundingModel) -> Real:
    """Return dh: how far tanh can move where its argument s / c does, ``moved`` being what the error of s moves it."""
    moved = moved + (2 * rounding.compute_unit + rounding.score_unit) * (np.abs(argument) + moved)
    rise: Real = np.minimum(1, slope_of_tanh(argument) + 0.77 * moved) * moved
    return rise


def slope_of_tanh(argument: Real) -> Real:
    """sech^2 without the cancellation of 1 - tanh^2, nor the overflow of cosh."""
    decay = np.exp(-2 * np.abs(argument))
    slope: Real = 4 * decay / (1 + decay) ** 2
    return slope


def exact_slope(problem: Problem, scores: ExactArray) -> ExactArray:
    """Return the derivative of the softcap: 1 without one."""
    if cap_of(problem) is None:
        return scores.of_numbers(np.ones(scores.shape))
    decay = (abs(scores / problem.number(problem.options["softcap"])) * -2).exp()  # sech(x) = 2 e^-|x| / (1 + e^-2|x|)
    return decay * 4 / ((decay + 1) * (decay + 1))


def exact_grad_scores(problem: Problem, grad_logits: ExactArray, slope: ExactArray) -> ExactArray:
    """Go back through the softcap."""
    if cap_of(problem) is None:
        return grad_logits
    return grad_logits * slope


SOFTCAP = Step(_exact, _value, _error, _radius, stored_logits, handed_on)
