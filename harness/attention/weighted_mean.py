"""The weighted mean of the values, and its transposes: the output of attention, the context of one head.

With E, W = e^E - 1, R, Z of ``softmax``. Because sum_j p_j (v_j - o) = 0,

    o^ - o = sum_j p_j (e^theta_j - 1)(v_j - o) / sum_j p_j e^theta_j

exactly, so that with Var = sum_j p_j v_j^2 - o^2

    G = min{ (pW)|v| + |o| R,  sqrt( Var sum_j p_j W_j^2 ) } / Z,    and at most max(max v - o, o - min v)

the last because o^ and o are means of the same values. The second keeps the cancellation "all values equal, no error".
What comes after the exponentials, and errors E_v that the values may have (S = sum_j p^_j |v_j| + E_v at most):

    S     = min{ p|v| + min{ (pW)|v| + (p|v|) R, sqrt( Var sum_j p_j W_j^2 ) } / Z,  max |v| } + V
    V     = min{ (p E_v + (pW) E_v) / Z, max E_v }
    c_pv  = (n + r) u_acc + u_p + 2u_c,    c_row = (n + r) u_sum + 2u_c + n eta_p
    B'    = [ G + V + c_pv S + c_row (|o| + G + V) + 2 eta_p sum_j |v_j| + 2 (n + r) eta_acc ] (1 + c_pv + c_row + 2u_o)
    B     = B' + k_o u_o (|o| + B') + eta_o

The scale: sigma^2 = S1 + .. + S6 (t^2 each key's own variance of theta, c^2 what the keys of a row share)

    S1 = sum_j p_j^2 t_j^2 (v_j - o)^2      S2 = (u_s^2 + u_c^2) ((px) v - o sum_j p_j x_j)^2 + Var sum_j p_j c_j^2
    S3 = (u_p^2 + 2u_c^2)(p^2 v^2 + o^2)    S4 = f u_acc^2 [ n (o^2/3 + p^2 v^2/6) + p^2 v^2 ]
    S5 = o^2 [ u_sum^2 (n + rho) + 2u_c^2 + k_o u_o^2 ]             S6 = Var sum_j p_j f(t_j^2 + c_j^2)

S6 is what is beyond the first order, f(t^2) = E (e^theta - 1 - theta)^2 of a normal theta, about 3/4 t^4; c by Cauchy's
inequality; the values' own variance adds p^2 Var_v.
Where factors of products are rounded, c_pv has 2u_t + u_t^2 more, and S4 is that of such a product; where weights may
be e^(s - L), c_row has tau more, and nothing cancels in S1 and S2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.errors import (
    Ball,
    Bound,
    Finished,
    Operand,
    Real,
    bound_of,
    finite,
    for_query_heads,
    heads_of,
    product_variance,
    transposed,
)
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.exponents import Rows, second_order
from attncheck.attention.flags import Flags, Reach, any_of, flags_per_group, flags_per_head, reach_of_mean
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.softmax import Weights, stored_log_sum_exp_variance, total_error
from attncheck.attention.step import Around, At, NotFiniteError, Step

_MIN_SQUARE = 2.0**-1000
"""Relative to the largest value of a column, what its squares may have lost to underflow."""
_SLACK = 1 + 2.0**-10
"""Room for the roundings of weights whose own error is known."""
_UNCERTAIN = 0.5
"""Rows whose weights may change by half are worth an own maximum of the values that they attend to."""


@dataclass(frozen=True, eq=False)
class _Scaled:
    """Values and output with every column divided by a power of two, so that squares neither over- nor underflow."""

    unit: Real  # (..., 1, Dv)
    value: Operand
    size: Real  # |v|, errors included
    output: Real  # |o|
    signed_output: Real


def _exact(_: Problem, weights: ExactArray, value: ExactArray) -> ExactArray:
    return weights @ value.for_heads_of(weights)


def _value(_: Problem, weights: Real, value: Real) -> Real:
    mean: Real = weights @ for_query_heads(value, heads_of(weights))
    return mean


def _radius(_: Around, __: Real, weights: Ball, value: Ball) -> Real:
    shared = value.for_query_heads(heads_of(weights.value))
    return weights.radius_of_product(shared.value, shared.radius)


def _error(at: At, weights: Weights | Operand, value: Operand) -> Finished:
    exact, shared = at.value, value.for_query_heads(heads_of(weights.value))
    if isinstance(weights, Weights):
        return Finished(exact, output_bound(weights.rows, shared, exact, at.rounding))
    # An empty row may hold NaN by convention; then its exact mean does, too.
    expected = np.broadcast_to(np.isfinite(exact).any(axis=-1), weights.value.shape[:-1])
    if weights.max_error is None and not np.isfinite(weights.value[expected]).all():
        raise NotFiniteError
    bound = mean_bound(weights, shared, exact, at.rounding)
    if weights.max_error is None:
        return Finished(exact, bound)
    largest = bound.max_error + _SLACK * (weights.max_error @ shared.magnitude)
    return Finished(exact, Bound(largest, largest))


def _reach(known: Reach, weights: Flags, value: Flags) -> Flags:
    return weights | reach_of_mean(flags_per_head(value, weights), known.attended)


WEIGHTED_MEAN = Step(_exact, _value, _error, _radius, reach=_reach)


def exact_grad_weights(_: Problem, grad_output: ExactArray, value: ExactArray) -> ExactArray:
    """Return g v^T, (B, H, Lq, Lk)."""
    return grad_output @ value.for_heads_of(grad_output).transposed()


def exact_grad_value(_: Problem, weights: ExactArray, grad_output: ExactArray, value: ExactArray) -> ExactArray:
    """Return p^T g, (B, Hkv, Lk, Dv)."""
    return (weights.transposed() @ grad_output).summed_in_groups(value.shape[-3])


def reach_of_grad_weights(known: Reach, grad_output: Flags, value: Flags) -> Flags:
    """Follow a row of the output's gradient, and the values that the row meets."""
    values = any_of(flags_per_head(value, grad_output), -1)
    return any_of(grad_output, -1) | reach_of_mean(values, known.attended)


def reach_of_grad_value(_: Reach, weights: Flags, grad_output: Flags, value: Flags) -> Flags:
    """Collect all of a head's rows."""
    return flags_per_group(any_of(weights | grad_output, -2), value.shape[-3])


def output_bound(rows: Rows, value: Operand, exact: Real, rounding: RoundingModel) -> Bound:
    """Bound weights times values, the weights computed: value (..., Lk, Dv), exact (..., Lq, Dv)."""
    scaled = _scaled(rows, value, exact)
    both = rows.weights @ np.concatenate([np.abs(scaled.value.value), scaled.value.value**2], axis=-1)
    mean_size, mean_square = np.split(both, 2, axis=-1)
    variance = np.maximum(mean_square - scaled.output**2, 0)
    # The difference cancels; clamped at 0 alone it would claim that there is no error.
    variance += 8 * (rows.count + 4) * 2.0**-53 * mean_square + _MIN_SQUARE
    max_error = _worst(rows, scaled, mean_size, variance, rounding)
    spread = scaled.unit**2 * _spread(rows, scaled, variance, rounding)
    floor = scaled.unit * 2 * rounding.weight_underflow * _attended_sum(rows, scaled.size)
    floor = floor + 2 * (rows.count + rows.blocks) * rounding.accumulate_underflow + rounding.output_underflow
    return bound_of(np.where(rows.count > 0, exact, np.nan), max_error, spread, floor)


def mean_bound(weights: Operand, value: Operand, exact: Real, rounding: RoundingModel) -> Bound:
    """Bound weights times values, the weights given: those that the implementation itself returned.

        c  = (n + r) u_acc + u_p + 2u_c
        B' = [ c w|v| + w E_v ] (1 + c) + 2 (n + r) eta_acc + 2 eta_p sum_j |v_j|
        B  = B' + k_o u_o (|o| + B') + eta_o
        sigma^2 = S4 + (u_p^2 + 2u_c^2) w^2 v^2 + k_o u_o^2 o^2 + w^2 Var_v

    The values may have met weights that were not normalised or rounded yet, hence 2u_c and u_p.
    """
    w, unit, storage_error = np.abs(weights.value), rounding.compute_unit, rounding.output_count * rounding.output_unit
    count = (w > 0).sum(axis=-1, keepdims=True).astype(np.float64)
    terms = count + np.ceil(count / rounding.block)
    size = finite(value.magnitude)
    # A fused kernel rounds what it returns as weights; its values never met that.
    relative = terms * rounding.accumulate_unit + rounding.weight_unit + 2 * unit + rounding.product_error
    relative = relative + (rounding.output_unit if unit < rounding.output_unit else 0)
    underflow = 2 * terms * rounding.accumulate_underflow + 2 * rounding.weight_underflow * size.sum(
        axis=-2, keepdims=True
    )
    max_error = relative * (w @ size)
    squares = (w * w) @ (size * size)
    variance = product_variance(rounding, count, exact * exact, squares)
    variance += (rounding.weight_unit**2 + 2 * unit**2) * squares
    variance += rounding.output_count * (rounding.output_unit * exact) ** 2
    if value.max_error is not None:
        max_error = max_error + w @ finite(value.max_error)
    if value.variance is not None:
        variance = variance + (w * w) @ finite(value.variance)
    max_error = max_error * (1 + relative) + underflow
    max_error = max_error + storage_error * (np.abs(exact) + max_error) + rounding.output_underflow
    return bound_of(exact, max_error, variance, underflow + rounding.output_underflow)


def _worst(rows: Rows, scaled: _Scaled, mean_size: Real, variance: Real, rounding: RoundingModel) -> Real:
    """Return B."""
    total, unit = rows.least_sum, rounding.compute_unit
    grown_size = rows.grown @ np.abs(scaled.value.value)
    by_variance = np.sqrt(variance * rows.grown_squares)
    moved = np.minimum(grown_size + scaled.output * rows.grown_sum, by_variance) / total
    moved = np.minimum(moved, _largest_move(rows, scaled))
    amount = mean_size + np.minimum(grown_size + mean_size * rows.grown_sum, by_variance) / total
    amount = np.minimum(amount, scaled.size.max(axis=-2, keepdims=True, initial=0))
    carried = np.zeros((1, 1))
    if scaled.value.max_error is not None:
        error = scaled.value.max_error
        carried = (rows.weights @ error + rows.grown @ error) / total
        carried = np.minimum(carried, error.max(axis=-2, keepdims=True, initial=0))
    terms = rows.count + rows.blocks
    c_pv = terms * rounding.accumulate_unit + rounding.weight_unit + 2 * unit + rounding.product_error
    c_row = terms * rounding.sum_unit + 2 * unit + rows.count * rounding.weight_underflow
    if rounding.from_log_sum_exp:
        c_row = c_row + total_error(rows, rounding)
    max_error = moved + carried + c_pv * (amount + carried) + c_row * (scaled.output + moved + carried)
    max_error = scaled.unit * (max_error + 2 * rounding.weight_underflow * _attended_sum(rows, scaled.size))
    max_error = (max_error + 2 * terms * rounding.accumulate_underflow) * (1 + c_pv + c_row + 2 * rounding.output_unit)
    stored = rounding.output_count * rounding.output_unit
    rounded: Real = max_error + stored * (scaled.unit * scaled.output + max_error) + rounding.output_underflow
    return rounded


def _spread(rows: Rows, scaled: _Scaled, variance: Real, rounding: RoundingModel) -> Real:
    """Return S1 + .. + S6 in units of the columns."""
    p, v, o, square_o = rows.weights, scaled.value.value, scaled.signed_output, scaled.output**2
    square_v, square_p, width, unit = v * v, p * p, v.shape[-1], rounding.compute_unit
    own = square_p * rows.independent
    second, first = np.split(own @ np.concatenate([square_v, v], axis=-1), [width], axis=-1)
    of_row = square_o * own.sum(axis=-1, keepdims=True)
    spread: Real = np.maximum(second - 2 * o * first + of_row, 0)  # S1
    if rounding.from_log_sum_exp:
        # The exponents of the weights and those of L may have errors of their own, so that nothing cancels.
        spread = second + of_row + square_o * stored_log_sum_exp_variance(rows, rounding)
        variance = 4 * (variance + square_o)
    spread += rows.constants(rounding) * ((p * rows.shifted) @ v - o * rows.mean_shifted) ** 2  # S2
    common = (p * rows.shared + p * second_order(rows.variance)).sum(axis=-1, keepdims=True)
    spread += variance * common  # S2, S6
    squares = square_p @ square_v
    spread += (rounding.weight_unit**2 + 2 * unit**2) * (squares + square_o)  # S3
    spread += product_variance(rounding, rows.count, square_o, squares)  # S4
    relative = rounding.sum_unit**2 * (rows.count + rows.rescalings) + 2 * unit**2
    spread += square_o * (relative + rounding.output_count * rounding.output_unit**2)  # S5
    if scaled.value.variance is not None:
        spread += square_p @ scaled.value.variance
        if rounding.product_unit:  # what cuts have in common is in a projected value, too
            spread += 2 * rounding.product_common * square_o
    return spread


def _scaled(rows: Rows, value: Operand, exact: Real) -> _Scaled:
    # A key that no query attends to may hold anything, infinity included.
    used = transposed(rows.attended.astype(np.float64).max(axis=-2, keepdims=True, initial=0)) > 0
    values = np.where(used, finite(value.value), 0.0)
    max_error = None if value.max_error is None else np.where(used, finite(value.max_error), 0.0)
    size = np.abs(values) if max_error is None else np.abs(values) + max_error
    exponent = np.frexp(size.max(axis=-2, keepdims=True, initial=0))[1]
    unit = np.ldexp(1.0, np.minimum(exponent, 1023))
    variance = None if value.variance is None else np.where(used, finite(value.variance), 0.0) / unit / unit
    output = finite(exact) / unit
    operand = Operand(values / unit, None if max_error is None else max_error / unit, variance)
    return _Scaled(unit, operand, size / unit, np.abs(output), output)


def _attended_sum(rows: Rows, size: Real) -> Real:
    if rows.all_attended:
        total: Real = size.sum(axis=-2, keepdims=True)
        return total
    attended: Real = rows.attended.astype(np.float64) @ size
    return attended


def _largest_move(rows: Rows, scaled: _Scaled) -> Real:
    """Return how far apart two means of the attended values can be, one of them being the output."""
    value, output = scaled.value.value, scaled.signed_output
    highest = np.broadcast_to(value.max(axis=-2, keepdims=True, initial=-np.inf), output.shape)
    lowest = np.broadcast_to(value.min(axis=-2, keepdims=True, initial=np.inf), output.shape)
    uncertain = rows.grown_sum[..., 0] > _UNCERTAIN
    if not rows.all_attended and uncertain.any():
        # Keys that this row does not attend to may hold much larger values. A whole tensor (Lq, Lk, Dv) is never made.
        highest, lowest = highest.copy(), lowest.copy()
        values = np.broadcast_to(value, (*output.shape[:-2], *value.shape[-2:]))
        attended = np.broadcast_to(rows.attended, (*output.shape[:-1], value.shape[-2]))
        for index in zip(*np.nonzero(np.broadcast_to(uncertain, output.shape[:-1])), strict=True):
            members = values[index[:-1]][attended[index]]
            if members.size:
                highest[index], lowest[index] = members.max(axis=0), members.min(axis=0)
    move: Real = np.maximum(np.maximum(highest - output, output - lowest), 0)
    return move
