"""How large the errors of a backward pass can be, up to the gradients of logits and scores.

In the notation of ``bounds_backward`` and ``softmax``. P bounds the error of a weight that is used backwards:

    P   stored weights       G + c_p (p + G) + 2 eta_p,      c_p = (n + r) u_sum + 3u_c + u_p + n eta_p
        e^(s - L), L stored  p (e^(E + F) - 1) + (u_p + u_c) p e^(E + F) + 2 eta_p,  F = B_L + (c_x + c_m) u_c lambda
    E_dp    = Dv u_acc |g||v|^T + u_dp |dp| + eta
    E_Delta of sum_j p dp    sum_j [ G |y| + (P - G)|dp| + (p + P)( E_dp + (n u_sum + 2u_c)(|dp| + E_dp) ) ] + storage
            of sum_c g o     sum_c [ |g| B_o + Dv u_acc |g|(|o| + B_o) ] + storage
    E_y     = E_dp + E_Delta + 3u_c ( |dp| + E_dp + |Delta| + E_Delta )
    E_dl    = P |y| + (p + P) E_y + w (|p y| + ..) + 4 eta,       w = max(u_s, u_p)
    E_ds    = E_dl (kappa + E_kappa) + |p y| E_kappa + 4w (..)    with a softcap, h = tanh(s / c):
    E_kappa = 2|h| E_h + E_h^2 + u_c (2|h| + 4 kappa),            E_h = dh + (eps_tanh + 3u_s)(|h| + dh)

Why G |y|: exponents that are perturbed leave the sum of the weights 1, so that sum_j (p^ - p) dp = sum_j (p^ - p) y.
Why 3u_c: p dp - p Delta rounds both products, p (dp - Delta) the difference; differentiating the quotient of
exponentials rounds Delta twice more, of which the sum's 2u_c has one. E_kappa covers 1 - h^2 and (1 + h)(1 - h).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.bounds_backward import Backward
from attncheck.attention.errors import Operand, Real, transposed
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.softcap import rise_of_tanh
from attncheck.attention.softmax import moved_weights, normalisation_error, stored_log_sum_exp_error
from attncheck.attention.weighted_mean import output_bound

_SUBTRACTION_COUNT = 3
STORAGE_COUNT = 4
"""Intermediates between the weights' gradient and the logits', and between the logits' and the scores' of a softcap."""


@dataclass(frozen=True, eq=False)
class Largest:
    """The largest errors of the weights and of the gradients of logits and scores; 0 where nothing is attended to."""

    weights: Real  # P
    grad_logits: Real  # E_dl
    grad_scores: Real  # E_ds


def largest_errors(back: Backward, rounding: RoundingModel) -> Largest:
    """Bound the errors of a backward pass, its sums over queries or keys left out."""
    attended, rows, size = back.attended, back.rows, np.abs(back.grad_weights)
    # How much larger the weights can be than float64 has them.
    more = np.divide(back.most_weight, rows.weights, out=np.ones_like(rows.weights), where=rows.weights > 0)
    moved = attended * more * moved_weights(rows)
    stored = moved + attended * (_stored(back, moved, rounding) + 2 * rounding.weight_underflow)
    weights = stored
    if rounding.recomputes:
        weights = np.maximum(stored, attended * (more * _recomputed(back, rounding) + 2 * rounding.weight_underflow))
    gradient = _of_grad_weights(back, size, rounding)
    delta = _of_delta(back, moved, stored, gradient, rounding)
    if rounding.recomputes:
        delta = np.maximum(delta, _of_delta_from_output(back, rounding))
    of_delta = np.abs(back.delta) + delta
    delta = delta + rounding.score_unit * of_delta + rounding.score_underflow
    rounded = _SUBTRACTION_COUNT * rounding.compute_unit * (size + gradient + of_delta)
    error = weights * back.most_centred + (back.most_weight + weights) * (gradient + delta + rounded)
    storing, underflow = storage_of(rounding)
    error = error + storing * (np.abs(back.grad_logits) + error) + STORAGE_COUNT * underflow
    error = attended * error * (1 + 8 * rounding.coarsest_unit)
    return Largest(weights, error, error if back.softcap is None else _through_softcap(back, error, rounding))


def storage_of(rounding: RoundingModel) -> tuple[float, float]:
    """Return unit roundoff and underflow of the coarsest format that gradients of logits are stored in."""
    return max((rounding.score_unit, rounding.score_underflow), (rounding.weight_unit, rounding.weight_underflow))


def slope_error(back: Backward, rounding: RoundingModel) -> Real:
    """Return E_kappa."""
    assert back.softcap is not None
    argument = back.scores / back.softcap
    height = np.abs(np.tanh(argument))
    rise = rise_of_tanh(argument, back.score_error.worst / abs(back.softcap), rounding)
    risen = rise + (rounding.tanh_error + 3 * rounding.score_unit) * (height + rise)
    error: Real = risen * (2 * height + risen) + rounding.compute_unit * (2 * height + 4 * back.slope)
    return error


def _stored(back: Backward, moved: Real, rounding: RoundingModel) -> Real:
    relative = normalisation_error(back.rows, rounding) + rounding.weight_unit
    stored: Real = relative * (1 + 2 * relative) * (back.most_weight + moved)
    return stored


def _recomputed(back: Backward, rounding: RoundingModel) -> Real:
    """Return how far e^(s - L) is from p, L being stored in the format of the computation."""
    rows, shift = back.rows, stored_log_sum_exp_error(back.rows, rounding)
    grown = (rows.weights + rows.grown) * np.exp(shift)[..., np.newaxis]
    error: Real = grown - rows.weights + (rounding.weight_unit + rounding.compute_unit) * grown
    return error


def _of_grad_weights(back: Backward, size: Real, rounding: RoundingModel) -> Real:
    """Return E_dp."""
    width, u_acc = back.value.shape[-1], rounding.accumulate_unit
    underflow = rounding.weight_underflow if rounding.weight_gradient_unit > u_acc else rounding.accumulate_underflow
    relative = width * u_acc + rounding.product_error
    summed = relative * (np.abs(back.grad_output) @ transposed(np.abs(back.value)))
    error: Real = summed + rounding.weight_gradient_unit * (size + summed)
    error += 2 * (width + 2) * rounding.accumulate_underflow + underflow
    if rounding.product_unit:  # a factor that is flushed to zero
        of_query, of_key = (np.abs(each).sum(axis=-1, keepdims=True) for each in (back.grad_output, back.value))
        error += rounding.product_underflow * (of_query + transposed(of_key))
    return error


def _of_delta(back: Backward, moved: Real, stored: Real, gradient: Real, rounding: RoundingModel) -> Real:
    """Return the error of sum_j p dp, (..., Lq, 1)."""
    size = np.abs(back.grad_weights)
    summed = back.rows.count * rounding.sum_unit + 2 * rounding.compute_unit
    if rounding.product_unit:  # by einsum, say
        summed = back.rows.count * rounding.accumulate_unit + 2 * rounding.compute_unit + rounding.product_error
    each = moved * back.most_centred + (stored - moved) * size
    each = each + (back.most_weight + stored) * (gradient + summed * (size + gradient))
    total: Real = (each + back.attended * 2 * rounding.score_underflow).sum(axis=-1, keepdims=True)
    return total


def _of_delta_from_output(back: Backward, rounding: RoundingModel) -> Real:
    """Return the error of sum_c g o, (..., Lq, 1)."""
    width, size = back.value.shape[-1], np.abs(back.grad_output)
    bound = output_bound(back.rows, Operand(back.value), back.output, rounding).worst
    relative = width * rounding.accumulate_unit + rounding.product_error
    each = size * (bound + relative * (np.abs(back.output) + bound))
    total: Real = each.sum(axis=-1, keepdims=True)
    total += 2 * (width + 2) * rounding.accumulate_underflow
    return total


def _through_softcap(back: Backward, error: Real, rounding: RoundingModel) -> Real:
    """Return E_ds from E_dl."""
    assert back.softcap is not None
    storing, underflow = storage_of(rounding)
    steep = slope_error(back, rounding)
    size = np.abs(back.grad_logits)
    through = error * (back.slope + steep) + size * steep
    rounded = STORAGE_COUNT * storing * (size + error) * (back.slope + steep)
    floor = STORAGE_COUNT * underflow * (1 + 1 / abs(back.softcap))
    scores: Real = back.attended * ((through + rounded) * (1 + 8 * rounding.coarsest_unit) + floor)
    return scores
