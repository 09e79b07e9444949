"""The weighted mean of the values, and its transposes: the output of attention, the context of one head.

``docs/numerics.md`` derives its bound, of weights that were computed (section 4.4) or returned (6), and the scale
S1 + .. + S6 (5), in whose symbols the functions below speak. The bound keeps the cancellation "all values equal, no
error".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.errors import (
    Ball,
    Bound,
    BoundedStage,
    Operand,
    Real,
    add_errors,
    count_heads,
    make_bound,
    matmul_variance_factors,
    quantize_operand,
    relative_sum_error,
    row_sums,
    zero_nonfinite,
)
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import (
    FlagContext,
    Flags,
    any_in_head_groups,
    any_over_axes,
    propagate_weighted_mean_flags,
    repeat_flags_for_heads,
)
from attncheck.attention.problem import Computation
from attncheck.attention.softmax import (
    SoftmaxError,
    Weights,
    narrow_format_error,
    narrow_weight_error,
    recomputed_sum_error,
    second_order_variance,
    stored_log_sum_exp_variance,
)
from attncheck.attention.step import ErrorContext, NotFiniteError, RadiusContext, Step
from attncheck.spec.rounding import SCALE_FORMATS, RoundingModel

_MIN_SQUARE = 2.0**-1000
"""Relative to the largest value of a column, what its squares may have lost to underflow."""
_SAFE_RANGE = 2.0**-30, 2.0**30
"""Squares of columns whose largest value is in between lose no more than that as they are."""
_MAX_SORTED_PRODUCTS = 1 << 14
"""Products of weights and values that are worth to be put into order: more would double what bounds cost."""
_FLOAT64_MEAN_LOSS = 2.0**-48
"""What a mean of float64 numbers loses for each of them, relative to the largest one and to what its weights were."""
_WEIGHT_SLACK = 1 + 2.0**-10
"""Room for the roundings of weights whose own error is known."""
_UNCERTAIN_GROWTH = 0.5
"""Rows whose weights may change by half are worth an own maximum of the values that they attend to."""


@dataclass(frozen=True, eq=False)
class _ScaledColumns:
    """Values and output, columns divided by a power of two where squares would over- or underflow."""

    column_unit: Real | None  # (..., 1, Dv); None if there is nothing to divide by
    value: Operand
    max_magnitude: Real  # |v|, errors included
    column_maximum: Real  # the largest of each column
    magnitude: Real  # |v|
    squares: Real  # v^2
    output_magnitude: Real  # |o|
    signed_output: Real
    squared_output: Real

    def unscale(self, array: Real, power: int = 1) -> Real:
        """Return what is in units of the columns, or of their squares, as it is."""
        return array if self.column_unit is None else self.column_unit**power * array


def _exact_mean(_: Computation, weights: ExactArray, value: ExactArray) -> ExactArray:
    return weights @ value.repeat_heads_for(weights)


def _mean_radius(_: RadiusContext, __: Real, weights: Ball, value: Ball) -> Real:
    shared = value.repeat_heads(count_heads(weights.value))
    return weights.matmul_radius(shared.value, shared.radius)


def _bound_mean(at: ErrorContext, weights: Weights | Operand, value: Operand) -> BoundedStage:
    exact, value = at.value, quantize_operand("value", value, at.rounding)
    shared = value.repeat_heads(count_heads(weights.value))
    if isinstance(weights, Weights):
        return BoundedStage(exact, bound_output(weights.rows, shared, exact, at.rounding))
    if weights.max_error is None and not np.isfinite(weights.value).all():
        # An empty row may hold NaN by convention; then its exact mean does, too.
        expected = np.broadcast_to(np.isfinite(exact).any(axis=-1), weights.value.shape[:-1])
        if not np.isfinite(weights.value[expected]).all():
            raise NotFiniteError
    bound = bound_mean_of_returned_weights(weights, shared, exact, at.rounding)
    if weights.max_error is None:
        return BoundedStage(exact, bound)
    largest = bound.max_error + _WEIGHT_SLACK * (weights.max_error @ shared.magnitude)
    return BoundedStage(exact, Bound(largest, largest))


def _propagate_mean_flags(known: FlagContext, weights: Flags, value: Flags) -> Flags:
    return weights | propagate_weighted_mean_flags(repeat_flags_for_heads(value, weights), known.attended)


WEIGHTED_MEAN = Step(_exact_mean, _bound_mean, _mean_radius, propagate_flags=_propagate_mean_flags)


def exact_grad_weights(_: Computation, grad_output: ExactArray, value: ExactArray) -> ExactArray:
    """Return g v^T, (B, H, Lq, Lk)."""
    return grad_output @ value.repeat_heads_for(grad_output).transposed()


def exact_grad_value(_: Computation, weights: ExactArray, grad_output: ExactArray, value: ExactArray) -> ExactArray:
    """Return p^T g, (B, Hkv, Lk, Dv)."""
    return (weights.transposed() @ grad_output).sum_head_groups(value.shape[-3])


def propagate_grad_weights_flags(known: FlagContext, grad_output: Flags, value: Flags) -> Flags:
    """Follow a row of the output's gradient, and the values that the row meets."""
    values = any_over_axes(repeat_flags_for_heads(value, grad_output), -1)
    return any_over_axes(grad_output, -1) | propagate_weighted_mean_flags(values, known.attended)


def propagate_grad_value_flags(_: FlagContext, weights: Flags, grad_output: Flags, value: Flags) -> Flags:
    """Collect all of a head's rows."""
    return any_in_head_groups(any_over_axes(weights | grad_output, -2), value.shape[-3])


def bound_output(rows: SoftmaxError, value: Operand, exact: Real, rounding: RoundingModel) -> Bound:
    """Bound weights times values, the weights computed: value (..., Lk, Dv), exact (..., Lq, Dv)."""
    scaled = _scale_columns(rows, value, exact)
    mean_size, mean_square = rows.weights @ scaled.magnitude, rows.weights @ scaled.squares
    variance = np.maximum(mean_square - scaled.squared_output, 0)
    # The difference cancels; clamped at 0 alone it would claim that there is no error.
    variance += (8 * 2.0**-53 * (rows.attended_count + 4)) * mean_square
    variance += _MIN_SQUARE
    # What underflows: a weight, a product or a partial sum.
    lost = scaled.unscale(2 * rounding.weight_underflow * _attended_sum(rows, scaled.max_magnitude))
    lost = lost + 2 * (rows.attended_count + rows.block_count) * rounding.accumulate_underflow
    if rounding.has_narrow_weights:
        lost = lost + scaled.unscale(_narrow_weights_mean_error(rows, scaled, rounding))
    spread = scaled.unscale(_output_variance(rows, scaled, variance, rounding), 2)
    max_error = _output_max_error(rows, scaled, mean_size, variance, lost, rounding)
    if rounding.largest_sum < np.inf:  # of exponentials that are at most 1, each times its value
        max_error = np.where(
            scaled.unscale(_attended_sum(rows, scaled.max_magnitude)) < rounding.largest_sum, max_error, np.inf
        )
    if not rows.attended_count.all():
        exact = np.where(rows.attended_count > 0, exact, np.nan)
    return make_bound(exact, max_error, spread, lost + rounding.output_underflow)


def bound_mean_of_returned_weights(weights: Operand, value: Operand, exact: Real, rounding: RoundingModel) -> Bound:
    """Bound weights times values, the weights given: those that the implementation itself returned.

    The values may have met weights that were not normalised or rounded yet (``docs/numerics.md``, section 6).
    """
    w, unit, size = np.abs(weights.value), rounding.compute_unit, zero_nonfinite(value.magnitude)
    count = (w > 0).sum(axis=-1, keepdims=True, dtype=np.float64)
    terms, stored = count + np.ceil(count / rounding.min_block_keys), rounding.output_count * rounding.output_unit
    # A fused kernel rounds what it returns as weights; its values never met that.
    of_weights = rounding.weight_unit + 2 * unit + (rounding.output_unit if unit < rounding.output_unit else 0)
    relative = relative_sum_error(rounding, terms) + (of_weights + rounding.product_error)
    underflow = 2 * rounding.weight_underflow * size.sum(axis=-2, keepdims=True)
    underflow = underflow + 2 * terms * rounding.accumulate_underflow
    max_error = relative * (w @ size)
    squares = w * w
    of_exact, of_squares = matmul_variance_factors(rounding, count)
    variance = (of_squares + (rounding.weight_unit**2 + 2 * unit**2)) * (squares @ (size * size))
    variance += (of_exact + rounding.output_count * rounding.output_unit**2) * (exact * exact)
    if rounding.has_narrow_weights:
        underflow = underflow + narrow_format_error(_WEIGHT_SLACK * w, _exponential_share(w, rounding), rounding) @ size
    if value.max_error is not None:
        max_error = max_error + w @ zero_nonfinite(value.max_error)
    if value.variance is not None:
        variance += squares @ zero_nonfinite(value.variance)
    max_error = (max_error * (1 + relative) + underflow) * (1 + stored)
    max_error = max_error + stored * np.abs(exact) + rounding.output_underflow
    if rounding.largest_sum < np.inf:
        max_error = np.where((w > 0).astype(np.float64) @ size < rounding.largest_sum, max_error, np.inf)
    return make_bound(exact, max_error, variance, underflow + rounding.output_underflow)


def _exponential_share(weights: Real, rounding: RoundingModel) -> Real | float:
    """Return the weight of an exponential of 1, (..., Lq, 1): the largest weight, or that of a sink."""
    if not rounding.stores_exponentials:
        return 1.0
    rest = 1 - weights.sum(axis=-1, keepdims=True)
    share: Real = np.minimum(_WEIGHT_SLACK * np.maximum(weights.max(axis=-1, keepdims=True, initial=0), rest), 1)
    return share


def _narrow_weights_mean_error(rows: SoftmaxError, scaled: _ScaledColumns, rounding: RoundingModel) -> Real:
    """Bound the error of the mean by narrow weights: in blocks, all of them together lose hardly more than themselves.

    What rounds up is at most doubled, by a scale that may have been rounded up itself.
    """
    lost: Real = np.asarray(narrow_weight_error(rows, rounding)) @ scaled.max_magnitude
    codes = rounding.quantization_of("weights")
    if codes is None:
        return lost
    scale = SCALE_FORMATS[codes.scale_format]
    return np.minimum(
        lost,
        (_WEIGHT_SLACK + 2 * scale.unit_roundoff + rows.attended_count * scale.absolute_error) * scaled.column_maximum,
    )


def max_mean_change(rows: SoftmaxError, value: Real, mean: Real) -> Real:
    """Return how far the mean moves at most if each weight is p e^theta over their sum, |theta| at most E.

    Values above some number have the largest weights then, and those below it the least ones, or the other way round.
    """
    most, least = rows.weights + rows.max_weight_growth, rows.weights * np.exp(-rows.max_exponent_error)
    values = np.broadcast_to(value, (*most.shape[:-2], *value.shape[-2:])).swapaxes(-1, -2)[..., np.newaxis, :]
    order = np.argsort(values, axis=-1)  # (..., Dv, 1, Lk)
    more = np.take_along_axis((most - least)[..., np.newaxis, :, :], order, axis=-1)
    moved = np.cumsum(more * np.take_along_axis(values, order, axis=-1), axis=-1).swapaxes(-3, -1)  # (..., Lk, Lq, Dv)
    more = np.cumsum(more, axis=-1).swapaxes(-3, -1)
    (all_most, largest), (all_least, smallest) = (
        (weights.sum(axis=-1, keepdims=True), weights @ value) for weights in (most, least)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        up = ((largest[..., np.newaxis, :, :] - moved) / (all_most[..., np.newaxis, :, :] - more)).max(axis=-3)
        down = ((smallest[..., np.newaxis, :, :] + moved) / (all_least[..., np.newaxis, :, :] + more)).min(axis=-3)
        furthest: Real = np.maximum(up - mean, mean - down)
        lost = all_most / all_least * (rows.attended_count + 4) * _FLOAT64_MEAN_LOSS
        furthest = furthest + lost * np.abs(value).max(axis=-2, keepdims=True, initial=0)
    return np.where(np.isnan(furthest), np.inf, furthest)


def _output_max_error(
    rows: SoftmaxError, scaled: _ScaledColumns, mean_size: Real, variance: Real, lost: Real, rounding: RoundingModel
) -> Real:
    """Return B."""
    unit, terms, output = rounding.compute_unit, rows.attended_count + rows.block_count, scaled.output_magnitude
    grown_size = rows.max_weight_growth @ scaled.magnitude
    by_variance = np.sqrt(variance * rows.sum_of_squared_growth)
    moved = np.minimum(grown_size + output * rows.weight_growth_sum, by_variance) / rows.min_normalizer
    moved = np.minimum(moved, _max_distance_to_values(rows, scaled))
    if (
        rounding.quantized_operands
        and rows.weights.size * output.shape[-1] <= _MAX_SORTED_PRODUCTS
        and not rounding.from_log_sum_exp
    ):
        moved = np.minimum(moved, max_mean_change(rows, scaled.value.value, scaled.signed_output))
    amount = mean_size + np.minimum(grown_size + mean_size * rows.weight_growth_sum, by_variance) / rows.min_normalizer
    amount = np.minimum(amount, scaled.column_maximum)
    if scaled.value.max_error is not None:
        error = scaled.value.max_error
        carried = (rows.weights @ error + rows.max_weight_growth @ error) / rows.min_normalizer
        carried = np.minimum(carried, error.max(axis=-2, keepdims=True, initial=0))
        moved, amount = moved + carried, amount + carried
    c_pv = relative_sum_error(rounding, terms) + (rounding.weight_unit + 2 * unit + rounding.product_error)
    c_row = terms * rounding.sum_unit + 2 * unit + rows.attended_count * rounding.weight_underflow
    if rounding.from_log_sum_exp:
        c_row = c_row + recomputed_sum_error(rows, rounding)
    stored = rounding.output_count * rounding.output_unit
    room = (1 + c_pv + c_row + 2 * rounding.output_unit) * (1 + stored)
    largest: Real = (moved * (1 + c_row) + amount * c_pv + output * (c_row + stored / room)) * room
    return scaled.unscale(largest) + lost * room + rounding.output_underflow


def _output_variance(rows: SoftmaxError, scaled: _ScaledColumns, variance: Real, rounding: RoundingModel) -> Real:
    """Return S1 + .. + S6 in units of the columns."""
    p, v, o, square_o = rows.weights, scaled.value.value, scaled.signed_output, scaled.squared_output
    unit = rounding.compute_unit
    second, of_row = rows.weighted_independent_variance @ scaled.squares, square_o * rows.independent_variance_sum
    if rounding.from_log_sum_exp:
        # The exponents of the weights and those of L may have errors of their own, so that nothing cancels.
        spread: Real = second + of_row + square_o * stored_log_sum_exp_variance(rows, rounding)
        variance = 4 * (variance + square_o)
    else:
        spread = np.maximum(second - 2 * o * (rows.weighted_independent_variance @ v) + of_row, 0)  # S1
    spread += (
        rows.score_scale_variance(rounding) * ((p * rows.shifted_logits) @ v - o * rows.mean_shifted_logit) ** 2
    )  # S2
    spread += variance * add_errors(row_sums(p * second_order_variance(rows)), rows.shared_variance_sum)  # S2, S6
    squares = rows.squared_weights @ scaled.squares
    of_output, of_squares = matmul_variance_factors(rounding, rows.attended_count)  # S4
    of_weights = rounding.weight_unit**2 + 2 * unit**2  # S3
    relative = rounding.sum_unit**2 * (rows.attended_count + rows.expected_rescalings) + 2 * unit**2
    relative = relative + rounding.output_count * rounding.output_unit**2  # S5
    spread += squares * (of_squares + of_weights) + square_o * (of_output + of_weights + relative)
    if scaled.value.variance is not None:
        spread += rows.squared_weights @ scaled.value.variance
        if rounding.product_unit:  # what cuts have in common is in a projected value, too
            spread += 2 * rounding.common_product_variance * square_o
    return spread


def _scale_columns(rows: SoftmaxError, value: Operand, exact: Real) -> _ScaledColumns:
    # Set to 0 the values that no query attends to: they may be anything, infinity included.
    used = np.swapaxes(rows.attended.any(axis=-2, keepdims=True), -1, -2)
    are_all = rows.are_all_attended or bool(used.all())
    operand = value.map_arrays(
        lambda part: zero_nonfinite(part) if are_all else np.where(used, zero_nonfinite(part), 0.0)
    )
    size, output, unit = operand.magnitude, zero_nonfinite(exact), None
    largest = size.max(axis=-2, keepdims=True, initial=0)
    if not _SAFE_RANGE[0] < largest.min(initial=1) <= largest.max(initial=1) < _SAFE_RANGE[1]:
        unit = np.ldexp(1.0, np.minimum(np.frexp(largest)[1], 1023))
        max_error = None if operand.max_error is None else operand.max_error / unit
        variance = None if operand.variance is None else operand.variance / unit / unit
        operand = Operand(operand.value / unit, max_error, variance)
        size, largest, output = size / unit, largest / unit, output / unit
    absolute = size if operand.max_error is None else np.abs(operand.value)
    square, square_output = operand.value * operand.value, output * output
    return _ScaledColumns(unit, operand, size, largest, absolute, square, np.abs(output), output, square_output)


def _attended_sum(rows: SoftmaxError, size: Real) -> Real:
    if rows.are_all_attended:
        total: Real = size.sum(axis=-2, keepdims=True)
        return total
    return rows.attended.astype(np.float64) @ size


def _max_distance_to_values(rows: SoftmaxError, scaled: _ScaledColumns) -> Real:
    """Return how far apart two means of the attended values can be, one of them being the output."""
    value, output = scaled.value.value, scaled.signed_output
    highest = value.max(axis=-2, keepdims=True, initial=-np.inf)
    lowest = value.min(axis=-2, keepdims=True, initial=np.inf)
    uncertain = rows.weight_growth_sum[..., 0] > _UNCERTAIN_GROWTH
    if not rows.are_all_attended and uncertain.any():
        # Keys that this row does not attend to may hold much larger values. A whole tensor (Lq, Lk, Dv) is never made.
        highest, lowest = (np.broadcast_to(extreme, output.shape).copy() for extreme in (highest, lowest))
        values = np.broadcast_to(value, (*output.shape[:-2], *value.shape[-2:]))
        attended = np.broadcast_to(rows.attended, (*output.shape[:-1], value.shape[-2]))
        for index in zip(*np.nonzero(np.broadcast_to(uncertain, output.shape[:-1])), strict=True):
            members = values[index[:-1]][attended[index]]
            if members.size:
                highest[index], lowest[index] = members.max(axis=0), members.min(axis=0)
    move: Real = np.maximum(np.maximum(highest - output, output - lowest), 0)
    return move
