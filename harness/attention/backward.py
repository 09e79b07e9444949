"""The backward pass from the weights to the gradient of the scores: each step of it with its errors.

``docs/numerics.md`` has the bounds (section 4.6), their variances (5) and the symbols beside the fields below. With p
the weights, dp = g v^T their gradient and y = dp - Delta, the steps are: the weights once more, as a backward pass uses
them (stored, or made again as e^(s - L)), dp, the gradient p y of the logits, the slope kappa of the softcap, and the
gradient p y kappa of the scores.

float64 has errors of its own here. They are of second order in a bound, being relative errors of its terms, except
if float64 itself can hardly tell the weights: so p is taken as large as it can be, p e^E / Z with the E and Z of
float64 itself, and so is |y|.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.errors import (
    ZERO,
    Logits,
    Operand,
    Real,
    add_errors,
    broadcast_heads,
    matmul_variance,
    quantization_error,
    quantize_operand,
    row_sums,
    summation_variance,
    transposed,
    zero_nonfinite,
)
from attncheck.attention.flags import pass_through
from attncheck.attention.logits import (
    exact_grad_scores,
    exact_softcap_slope,
    max_tanh_change,
    softcap_of,
    tanh_derivative,
    zero_filled_gradients,
)
from attncheck.attention.problem import Computation
from attncheck.attention.scores import score_scale
from attncheck.attention.softmax import (
    SoftmaxError,
    Weights,
    exact_grad_logits,
    extra_exponent_error,
    max_weight_change,
    normalisation_error,
    recomputed_sum_error,
    second_order_variance,
    stored_log_sum_exp_error,
    stored_log_sum_exp_variance,
)
from attncheck.attention.step import ErrorContext, Step
from attncheck.attention.weighted_mean import bound_output, exact_grad_weights, propagate_grad_weights_flags
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import RoundingModel

_FLOAT64_MODEL = rounding_model_named("native", "float64")


@dataclass(frozen=True, eq=False)
class BackwardWeights:
    """Weights that a backward pass uses: (..., Lq, Lk) per key, (..., Lq, 1) per row."""

    value: Real  # p
    rows: SoftmaxError
    attended_as_numbers: Real  # 1 or 0
    largest_possible: Real  # p, at most
    max_change: Real  # G
    stored_max_error: Real  # P of stored weights
    max_error: Real  # P
    shared_variance: Real  # c^2, and what is beyond the first order
    sum_variance: Real  # V_nu
    rounding_variance: float  # V_eps
    shared_key_variance: Real  # of what rounded keys do to exponents, for all queries at once
    queries_share_errors: bool  # whether queries share errors of keys

    def variance_per_weight(self, rounding: RoundingModel) -> Real:
        """Return the variance of each weight as it meets grad_output; constants in common to all are left out."""
        p, independent = self.rows.weights, self.rows.independent_variance
        independent = independent * (1.0 if rounding.recomputes_weights else 1 - 2 * p) + row_sums(p * p * independent)
        shared = 2 * (self.shared_variance + row_sums(p * self.shared_variance))
        relative = np.maximum(independent, 0) + shared + self.sum_variance + self.rounding_variance
        return p * p * relative + self.attended_as_numbers * (2 * rounding.weight_underflow) ** 2

    def deviation_shared_by_queries(self) -> Real:
        """Return the deviation of each weight by errors that queries share."""
        p = self.rows.weights
        return p * np.sqrt(self.shared_key_variance + row_sums(p * p * self.shared_key_variance))


def _backward_weights_with_error(
    at: ErrorContext, weights: Weights, query: Operand, key: Operand, scores: Logits
) -> BackwardWeights:
    rows, rounding = weights.rows, at.rounding
    attended = rows.attended.astype(np.float64)
    largest = _largest_possible_weights(
        rows if rounding == _FLOAT64_MODEL else at.walk_with_rounding(_FLOAT64_MODEL).evaluate("weights").rows
    )
    # How much larger the weights can be than float64 has them.
    more = np.divide(largest, rows.weights, out=np.ones_like(rows.weights), where=rows.weights > 0)
    moved = attended * more * max_weight_change(rows)
    stored = moved + attended * (_stored_weights_error(rows, largest, moved, rounding) + 2 * rounding.weight_underflow)
    max_error = stored
    if rounding.recomputes_weights:
        max_error = np.maximum(
            stored, attended * (more * _recomputed_weights_error(rows, rounding) + 2 * rounding.weight_underflow)
        )
    unit = rounding.compute_unit
    of_sum = rounding.sum_unit**2 * (rows.attended_count + rows.expected_rescalings) + 2 * unit**2
    if rounding.recomputes_weights or rounding.from_log_sum_exp:
        of_sum = of_sum + stored_log_sum_exp_variance(rows, rounding)
    of_columns = ZERO
    if rounding.product_unit:
        of_columns = _exponent_variance_from_keys(at.problem, query, key.value**2) * rounding.product_spread**2
        of_columns = of_columns + rounding.common_product_variance * scores.value**2
    if key.variance is not None:
        of_columns = add_errors(of_columns, _exponent_variance_from_keys(at.problem, query, key.variance))
    return BackwardWeights(
        value=weights.value,
        rows=rows,
        attended_as_numbers=attended,
        largest_possible=largest,
        max_change=moved,
        stored_max_error=stored,
        max_error=max_error,
        shared_variance=add_errors(second_order_variance(rows), rows.shared_variance),
        sum_variance=of_sum,
        rounding_variance=rounding.weight_unit**2 + 2 * unit**2,
        shared_key_variance=of_columns,
        queries_share_errors=bool(rounding.product_unit) or key.variance is not None,
    )


def _exponent_variance_from_keys(problem: Computation, query: Operand, square: Real) -> Real:
    """Return the variance of exponents, (B, H, Lq, T), from that of the keys' elements, (B, Hkv, T, D)."""
    variance: Real = score_scale(problem) ** 2 * (
        query.value**2 @ transposed(broadcast_heads(square, query.value.shape[1]))
    )
    return variance


BACKWARD_WEIGHTS = Step(pass_through, _backward_weights_with_error, propagate_flags=pass_through)


def _largest_possible_weights(rows: SoftmaxError) -> Real:
    p = rows.weights
    most = (p + rows.max_weight_growth) / rows.min_normalizer
    return np.where(p > 0, np.where(np.isnan(most), np.inf, most), 0.0)


def _stored_weights_error(rows: SoftmaxError, largest: Real, moved: Real, rounding: RoundingModel) -> Real:
    relative = normalisation_error(rows, rounding) + rounding.weight_unit
    return relative * (1 + 2 * relative) * (largest + moved)


def _recomputed_weights_error(rows: SoftmaxError, rounding: RoundingModel) -> Real:
    """Return how far e^(s - L) is from p, L being stored in the format of the computation."""
    shift = stored_log_sum_exp_error(rows, rounding)[..., np.newaxis]
    # p e^(E + F) - p, written so that nothing cancels: in float64, E + F is but some dozens of units.
    moved = rows.max_weight_growth * np.exp(shift) + rows.weights * np.expm1(shift)
    return moved + (rounding.weight_unit + rounding.compute_unit) * (rows.weights + moved)


@dataclass(frozen=True, eq=False)
class GradWeights:
    """The gradient of the weights, (B, H, Lq, Lk), and its factors, with values for every query head."""

    value: Real  # dp
    grad_output: Operand  # g
    values_per_query_head: Real  # v
    max_error: Real  # E_dp
    variance: Real  # V_dp
    factor_variance: Real  # of what rounding g, or v, does to dp: for all keys, or for all queries, at once
    queries_share_errors: bool  # whether it does anything


def _grad_weights_with_error(at: ErrorContext, grad_output: Operand, value: Operand) -> GradWeights:
    grad_output = quantize_operand("grad_output", grad_output, at.rounding)
    gradient, rounding, dp = grad_output.value, at.rounding, at.value
    values = broadcast_heads(value.value, gradient.shape[1])
    of_codes = quantization_error("backward_value", np.abs(zero_nonfinite(value.value)), rounding)
    of_codes = of_codes if of_codes is ZERO else broadcast_heads(of_codes, gradient.shape[1])
    square, squares = dp**2, gradient**2 @ transposed(values**2)
    variance = matmul_variance(rounding, values.shape[-1], square, squares)
    of_factors = rounding.product_spread**2 * squares
    if grad_output.variance is not None:
        of_factors = of_factors + grad_output.variance @ transposed(values**2)
    if of_codes is not ZERO:
        of_factors = of_factors + gradient**2 @ transposed(of_codes**2)
    return GradWeights(
        value=dp,
        grad_output=grad_output,
        values_per_query_head=values,
        max_error=_grad_weights_max_error(grad_output, values, of_codes, np.abs(dp), rounding),
        variance=variance + rounding.weight_gradient_unit**2 * square,
        factor_variance=of_factors,
        queries_share_errors=bool(rounding.product_unit) or grad_output.variance is not None or of_codes is not ZERO,
    )


def _grad_weights_max_error(
    gradient: Operand, values: Real, code_error: Real, size: Real, rounding: RoundingModel
) -> Real:
    """Return E_dp; ``code_error`` is the error of values in codes."""
    width, u_acc = values.shape[-1], rounding.accumulate_unit
    met = transposed(add_errors(np.abs(values), code_error))
    largest = gradient.magnitude
    if gradient.max_error is not None and rounding.quantized_operands:  # its errors are not small
        largest = largest + gradient.max_error
    underflow = rounding.weight_underflow if rounding.weight_gradient_unit > u_acc else rounding.accumulate_underflow
    relative = width * u_acc + rounding.product_error
    summed = relative * (largest @ met)
    if gradient.max_error is not None:
        summed = summed + gradient.max_error @ met
    if code_error is not ZERO:
        summed = summed + gradient.magnitude @ transposed(code_error)
    error: Real = summed + rounding.weight_gradient_unit * (size + summed)
    error += 2 * (width + 2) * rounding.accumulate_underflow + underflow
    if rounding.product_unit:  # a factor that is flushed to zero
        of_query, of_key = (operand.sum(axis=-1, keepdims=True) for operand in (gradient.magnitude, np.abs(values)))
        error += rounding.product_underflow * (of_query + transposed(of_key))
    return error


GRAD_WEIGHTS = Step(exact_grad_weights, _grad_weights_with_error, propagate_flags=propagate_grad_weights_flags)


_SUBTRACTION_ROUNDING_COUNT = 3
STORAGE_ROUNDING_COUNT = 4
"""Intermediates between the weights' gradient and the logits', and between the logits' and the scores' of a softcap."""


@dataclass(frozen=True, eq=False)
class CentredGradient:
    """The parts of the gradient of a softmax, before anything is rounded."""

    weights: BackwardWeights
    grad_weights: GradWeights
    output: Real  # o
    delta: Real  # Delta
    centred_value: Real  # y
    max_magnitude: Real  # |y|, at most


@dataclass(frozen=True, eq=False)
class GradLogits:
    """The gradient of the logits and its error; 0 for keys that are not attended to."""

    centred: CentredGradient
    value: Real  # p y
    max_error: Real  # E_dl
    variance: Real  # V_dl; constants that all have in common are left out
    delta_variance: Real  # V_D
    rounding_squares: Real  # p^2 (dp^2 + Delta^2), y

    @property
    def weights(self) -> BackwardWeights:
        """The weights that were used."""
        return self.centred.weights


def _grad_logits_with_error(at: ErrorContext, weights: BackwardWeights, gradient: GradWeights, _: Logits) -> GradLogits:
    centred, rounding = _centre_gradient(weights, gradient), at.rounding
    value = weights.rows.weights * centred.centred_value
    of_delta, rounded = _delta_variance(centred, rounding), _grad_logits_rounding_variance(centred, value, rounding)
    variance, max_error = (
        _grad_logits_variance(centred, of_delta, rounding) + rounded,
        _grad_logits_max_error(centred, value, rounding),
    )
    value, max_error, variance, rounded = (
        zero_filled_gradients(at.problem, array) for array in (value, max_error, variance, rounded)
    )
    return GradLogits(centred, value, max_error, variance, of_delta, rounded)


GRAD_LOGITS = Step(
    exact_grad_logits,
    _grad_logits_with_error,
    propagate_flags=lambda _, weights, gradient, __: weights | gradient,
)


def _centre_gradient(weights: BackwardWeights, gradient: GradWeights) -> CentredGradient:
    p, dp = weights.value, gradient.value
    delta = (p * dp).sum(axis=-1, keepdims=True)
    centred = np.where(weights.rows.attended, dp - delta, 0.0)
    uncertain = ((weights.largest_possible - p) * np.abs(dp)).sum(axis=-1, keepdims=True)
    largest = np.abs(centred) + weights.attended_as_numbers * uncertain
    return CentredGradient(weights, gradient, p @ gradient.values_per_query_head, delta, centred, largest)


def gradient_storage_rounding(rounding: RoundingModel) -> tuple[float, float]:
    """Return unit roundoff and underflow of the coarsest format that gradients of logits are stored in."""
    return max((rounding.score_unit, rounding.score_underflow), (rounding.weight_unit, rounding.weight_underflow))


def _grad_logits_max_error(centred: CentredGradient, value: Real, rounding: RoundingModel) -> Real:
    """Return E_dl."""
    weights, gradient = centred.weights, centred.grad_weights.max_error
    delta = _delta_max_error_from_weights(
        centred, weights.stored_max_error - weights.max_change, weights.stored_max_error, rounding
    )  # of stored weights
    if rounding.recomputes_weights:
        again, from_output = (
            _delta_max_error_from_recomputed_weights(centred, rounding),
            _delta_max_error_from_output(centred, rounding),
        )
        delta = np.maximum(np.maximum(delta, again), from_output)
    of_delta = np.abs(centred.delta) + delta
    delta = delta + rounding.score_unit * of_delta + rounding.score_underflow
    size = np.abs(centred.grad_weights.value)
    rounded = _SUBTRACTION_ROUNDING_COUNT * rounding.compute_unit * (size + gradient + of_delta)
    error = weights.max_error * centred.max_magnitude + (weights.largest_possible + weights.max_error) * (
        gradient + delta + rounded
    )
    storing, underflow = gradient_storage_rounding(rounding)
    error = error + storing * (np.abs(value) + error) + STORAGE_ROUNDING_COUNT * underflow
    return weights.attended_as_numbers * error * (1 + 8 * rounding.coarsest_unit)


def _delta_max_error_from_recomputed_weights(centred: CentredGradient, rounding: RoundingModel) -> Real:
    """Return the error of sum_j p dp, (..., Lq, 1), of weights e^(s - L), which add up to T."""
    weights = centred.weights
    further = extra_exponent_error(weights.rows, rounding)[..., np.newaxis]
    rounded = np.expm1(further) + rounding.weight_unit + rounding.compute_unit
    apart = weights.attended_as_numbers * (
        rounded * (weights.largest_possible + weights.max_change) + 2 * rounding.weight_underflow
    )
    total = recomputed_sum_error(weights.rows, rounding)
    return total * np.abs(centred.delta) + (1 + total) * _delta_max_error_from_weights(
        centred, apart, weights.max_error, rounding
    )


def _delta_max_error_from_weights(
    centred: CentredGradient, rounding_error: Real, max_error: Real, rounding: RoundingModel
) -> Real:
    """Return the error of a sum of p dp.

    Weights have the error ``rounding_error`` in addition to that of perturbed exponents, and ``max_error`` in all.
    """
    weights, gradient, size = centred.weights, centred.grad_weights.max_error, np.abs(centred.grad_weights.value)
    count = weights.rows.attended_count
    summed = count * rounding.sum_unit + 2 * rounding.compute_unit
    if rounding.product_unit:  # by einsum, say
        summed = count * rounding.accumulate_unit + 2 * rounding.compute_unit + rounding.product_error
    error = weights.max_change * centred.max_magnitude + rounding_error * size
    error = error + (weights.largest_possible + max_error) * (gradient + summed * (size + gradient))
    return row_sums(error + weights.attended_as_numbers * 2 * rounding.score_underflow)


def _delta_max_error_from_output(centred: CentredGradient, rounding: RoundingModel) -> Real:
    """Return the error of sum_c g o, (..., Lq, 1)."""
    width, gradient = centred.grad_weights.values_per_query_head.shape[-1], centred.grad_weights.grad_output
    bound = bound_output(
        centred.weights.rows, Operand(centred.grad_weights.values_per_query_head), centred.output, rounding
    ).max_error
    relative = width * rounding.accumulate_unit + rounding.product_error
    total = row_sums(gradient.magnitude * (bound + relative * (np.abs(centred.output) + bound)))
    if gradient.max_error is not None:
        total += row_sums(gradient.max_error * np.abs(centred.output))
    total += 2 * (width + 2) * rounding.accumulate_underflow
    return total


def _grad_logits_rounding_variance(centred: CentredGradient, value: Real, rounding: RoundingModel) -> Real:
    """Return the variance of the roundings of y and of dlogits."""
    unit, (storing, underflow) = rounding.compute_unit, gradient_storage_rounding(rounding)
    squares = centred.weights.rows.weights**2 * (centred.grad_weights.value**2 + centred.delta**2)
    rounded = 2 * unit**2 * squares + (storing**2 + unit**2) * value * value
    # What underflows is rounded like anything else, by at most eta.
    lost = (2 * rounding.weight_underflow * centred.centred_value) ** 2 + STORAGE_ROUNDING_COUNT * underflow**2
    return rounded + centred.weights.attended_as_numbers * lost


def _delta_variance(centred: CentredGradient, rounding: RoundingModel) -> Real:
    """Return V_D, (..., Lq, 1)."""
    rows, gradient, square = centred.weights.rows, centred.grad_weights, centred.delta**2
    p = rows.weights
    squares = row_sums(p * p * gradient.value**2)
    variance = summation_variance(rounding.sum_unit, rows.attended_count, square, squares)
    if rounding.product_unit:  # by einsum, say
        variance = matmul_variance(rounding, rows.attended_count, square, squares)
    variance = variance + 2 * rounding.compute_unit**2 * squares
    lost = (2 * rounding.weight_underflow) ** 2 * row_sums(centred.weights.attended_as_numbers * gradient.value**2)
    variance = variance + lost + rows.attended_count * (2 * rounding.score_underflow) ** 2
    if rounding.recomputes_weights:
        # What weights made again add up to: their errors and those of L may be apart.
        of_sum = 2 * (rows.independent_variance_sum + rows.shared_variance_sum) * square
        output, of_rows = centred.output**2, gradient.grad_output.value**2
        of_output = matmul_variance(rounding, rows.attended_count, output, (p * p) @ gradient.values_per_query_head**2)
        of_output = of_output + rounding.output_count * rounding.output_unit**2 * output
        width, squares = gradient.values_per_query_head.shape[-1], row_sums(of_rows * output)
        of_row = matmul_variance(rounding, width, square, squares) + row_sums(of_rows * of_output)
        if gradient.grad_output.variance is not None:
            of_row += row_sums(gradient.grad_output.variance * output)
        variance = np.maximum(variance + of_sum, of_row)
    return variance + rounding.score_unit**2 * square


def _grad_logits_variance(centred: CentredGradient, delta_variance: Real, rounding: RoundingModel) -> Real:
    """Return the variance of each logit's gradient before it is rounded."""
    weights, gradient = centred.weights, centred.grad_weights
    p, dp, size = weights.rows.weights, gradient.value, np.abs(centred.centred_value)
    of_exponents = relative_exponent_variance(centred, weights.rows.independent_variance, rounding)
    mean, mean_shared = row_sums(p * size), row_sums(p * weights.shared_variance)
    shared = (2 * size + mean) * (
        size * (weights.shared_variance + mean_shared) + row_sums(p * weights.shared_variance * size)
    )
    of_sum = weights.sum_variance * (size + np.abs(centred.delta)) ** 2
    of_weight = weights.rounding_variance * ((size + p * np.abs(dp)) ** 2 + row_sums(p * p * dp * dp))
    of_gradient = gradient.variance * (1 - 2 * p) + row_sums(p * p * gradient.variance)
    if rounding.recomputes_weights:
        of_gradient = np.maximum(of_gradient, gradient.variance)
    relative = np.maximum(of_exponents, 0) + shared + of_sum + of_weight + np.maximum(of_gradient, 0) + delta_variance
    if gradient.queries_share_errors:
        of_row = np.sqrt(gradient.factor_variance)
        relative = relative + (of_row + row_sums(p * of_row)) ** 2 + common_truncation_variance(centred, rounding)
    variance: Real = p * p * relative
    return variance


def relative_exponent_variance(centred: CentredGradient, independent: Real, rounding: RoundingModel) -> Real:
    """Return the variance of each logit's gradient over its weight by independent errors of the keys' exponents."""
    p, y = centred.weights.rows.weights, centred.centred_value
    weighted = p * p * independent
    total, first, second = (row_sums(weighted * factor) for factor in (1.0, y, y * y))
    return (
        y * y * total
        + 2 * y * first
        + second
        + independent * y * y * (1.0 if rounding.recomputes_weights else 1 - 4 * p)
    )


def common_truncation_variance(centred: CentredGradient, rounding: RoundingModel) -> Real:
    """Return the variance that cut off factors have in common, in dp and in Delta, which need not be the same."""
    size = np.abs(centred.grad_weights.value) + np.abs(centred.delta)
    return rounding.common_product_variance * size**2


def score_scale_sensitivity(logits: GradLogits) -> Real:
    """Return how a relative change of all scores moves the gradients of the logits."""
    rows, y = logits.weights.rows, logits.centred.centred_value
    p, x = rows.weights, rows.shifted_logits
    return p * (y * (x - rows.mean_shifted_logit) - row_sums(p * x * y))


_UNIT_SLOPE = np.ones((1, 1))


@dataclass(frozen=True, eq=False)
class SoftcapSlope:
    """The slope of the softcap; 1 without an error if there is no softcap, and 0 for scores that a fill replaced."""

    value: Real  # kappa
    softcap: float | None
    max_error: Real  # E_kappa
    variance: Real  # V_kappa

    def multiply(self, array: Real) -> Real:
        """Multiply by the slope, unless it is 1 throughout."""
        return array if self.value is _UNIT_SLOPE else array * self.value


@dataclass(frozen=True, eq=False)
class GradScores:
    """The gradient of the scores and its error; 0 for keys that are not attended to."""

    logits: GradLogits
    slope: SoftcapSlope
    value: Real  # p y kappa
    max_error: Real  # E_ds
    code_error: Real  # what it has of codes

    def variance_per_score(self, rounding: RoundingModel) -> Real:
        """Return the variance of each score's gradient from that of the logits'."""
        if self.slope.softcap is None:
            return self.logits.variance
        size = np.abs(self.logits.value)
        # The slope and the weight have errors of the same score.
        variance: Real = (self.slope.value * np.sqrt(self.logits.variance) + size * np.sqrt(self.slope.variance)) ** 2
        return variance + self.softcap_storage_variance(rounding)

    def deviation_shared_by_queries(self, rounding: RoundingModel) -> Real:
        """Return the deviation of each score's gradient by errors that queries share: rounded keys, values, cuts.

        Sums over queries must not take them for independent; deviations add up as if all had one sign.
        """
        weights, centred = self.logits.weights, self.logits.centred
        p, of_factors = weights.rows.weights, centred.grad_weights.factor_variance
        of_exponents = np.maximum(relative_exponent_variance(centred, weights.shared_key_variance, rounding), 0)
        relative = (
            of_exponents + of_factors + row_sums(p * p * of_factors) + common_truncation_variance(centred, rounding)
        )
        through = p * np.sqrt(relative) * self.slope.value
        deviation: Real = through + np.abs(self.logits.value) * np.sqrt(self.slope.variance)
        return deviation

    def softcap_storage_variance(self, rounding: RoundingModel) -> Real:
        """Return the variance of storing the intermediates of a softcap's gradient."""
        assert self.slope.softcap is not None
        unit, underflow = gradient_storage_rounding(rounding)
        lost = underflow**2 * (1 + 1 / self.slope.softcap**2)
        return STORAGE_ROUNDING_COUNT * (unit**2 * self.value**2 + self.logits.weights.attended_as_numbers * lost)


def _softcap_slope_with_error(at: ErrorContext, scores: Logits) -> SoftcapSlope:
    problem, cap, rounding = at.problem, softcap_of(at.problem), at.rounding
    if cap is None:
        whole = _UNIT_SLOPE if problem.mask_fill is None else np.ones(scores.value.shape)
        return SoftcapSlope(zero_filled_gradients(problem, whole), None, np.zeros((1, 1)), np.zeros((1, 1)))
    argument = scores.value / cap
    slope, height = tanh_derivative(argument), np.abs(np.tanh(argument))
    rise = max_tanh_change(argument, scores.max_error / abs(cap), rounding)
    risen = rise + (rounding.tanh_error + 3 * rounding.score_unit) * (height + rise)
    max_error = risen * (2 * height + risen) + rounding.compute_unit * (2 * height + 4 * slope)  # E_kappa
    unmasked = slope, max_error, _softcap_slope_variance(scores, argument, slope, cap, rounding)
    slope, max_error, variance = (zero_filled_gradients(problem, array) for array in unmasked)
    return SoftcapSlope(slope, cap, max_error, variance)


def _softcap_slope_variance(scores: Logits, argument: Real, slope: Real, cap: float, rounding: RoundingModel) -> Real:
    """Return V_kappa."""
    height, unit = np.tanh(argument) ** 2, rounding.compute_unit
    of_score = (scores.independent_variance + scores.shared_variance) / cap**2
    of_argument = of_score + (2 * unit**2 + rounding.score_unit**2) * argument**2
    steep = np.minimum(1, slope + 0.77 * np.sqrt(of_argument))
    of_height = steep**2 * of_argument + (rounding.tanh_error**2 + 3 * rounding.score_unit**2) * height
    return 4 * height * of_height + of_height**2 + unit**2 * 4 * (height + slope**2)


def _grad_scores_with_error(at: ErrorContext, logits: GradLogits, slope: SoftcapSlope) -> GradScores:
    value, error = slope.multiply(logits.value), _grad_scores_max_error(logits, slope, at.rounding)
    of_codes = quantization_error("grad_scores", np.abs(value) + error, at.rounding)
    return GradScores(logits, slope, value, add_errors(error, of_codes), of_codes)


def _grad_scores_max_error(logits: GradLogits, slope: SoftcapSlope, rounding: RoundingModel) -> Real:
    """Return E_ds from E_dl."""
    error, steep = logits.max_error, slope.max_error
    if slope.softcap is None:
        return error
    storing, underflow = gradient_storage_rounding(rounding)
    size = np.abs(logits.value)
    through = error * (slope.value + steep) + size * steep
    rounded = STORAGE_ROUNDING_COUNT * storing * (size + error) * (slope.value + steep)
    floor = STORAGE_ROUNDING_COUNT * underflow * (1 + 1 / abs(slope.softcap))
    return logits.weights.attended_as_numbers * ((through + rounded) * (1 + 8 * rounding.coarsest_unit) + floor)


# A slope is that of a score, which the weights of its row follow from: it reaches nothing more.
SLOPE = Step(exact_softcap_slope, _softcap_slope_with_error, propagate_flags=pass_through, exact_magnitude=abs)
GRAD_SCORES = Step(exact_grad_scores, _grad_scores_with_error, propagate_flags=pass_through)
