"""The backward pass from the weights to the gradient of the scores: each step of it with its errors.

``docs/numerics.md`` has the bounds (section 4.6), their variances (5) and the symbols beside the fields below. With p
the weights, dp = g v^T their gradient and y = dp - Delta, the steps are: the weights once more, as a backward pass uses
them (stored, or made again as e^(s - L)), dp, the gradient p y of the logits, the slope kappa of the softcap, and the
gradient p y kappa of the scores.

float64 has errors of its own here. They are of second order in a bound, being relative errors of its terms, except
where float64 itself can hardly tell the weights: so p is taken as large as it can be, p e^E / Z with the E and Z of
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
    added,
    error_of_codes,
    every_head,
    finite,
    product_variance,
    stored_operand_of,
    sum_of_row,
    summation_variance,
    transposed,
)
from attncheck.attention.flags import pass_through
from attncheck.attention.logits import cap_of, exact_grad_scores, exact_slope, rise_of_tanh, slope_of_tanh, through_mask
from attncheck.attention.problem import Computation
from attncheck.attention.scores import scale_of
from attncheck.attention.softmax import (
    SoftmaxError,
    Weights,
    exact_grad_logits,
    further_exponent_error,
    moved_weights,
    normalisation_error,
    second_order,
    stored_log_sum_exp_error,
    stored_log_sum_exp_variance,
    total_error,
)
from attncheck.attention.step import ErrorContext, Step
from attncheck.attention.weighted_mean import exact_grad_weights, output_bound, reach_of_grad_weights
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import RoundingModel

_DOUBLE = rounding_model_named("native", "float64")


@dataclass(frozen=True, eq=False)
class BackwardWeights:
    """Weights that a backward pass uses: (..., Lq, Lk) per key, (..., Lq, 1) per row; ``attended`` is 1 or 0."""

    value: Real  # p
    rows: SoftmaxError
    attended: Real
    largest: Real  # p, at most
    moved: Real  # G
    stored: Real  # P of stored weights
    max_error: Real  # P
    shared: Real  # c^2, and what is beyond the first order
    of_sum: Real  # V_nu
    of_weight: float  # V_eps
    of_columns: Real  # of what rounded keys do to exponents, for all queries at once
    shares_errors: bool  # whether queries share errors of keys

    def variance(self, rounding: RoundingModel) -> Real:
        """Return the variance of each weight as it meets grad_output; constants in common to all are left out."""
        p, independent = self.rows.weights, self.rows.independent
        independent = independent * (1.0 if rounding.recomputes else 1 - 2 * p) + sum_of_row(p * p * independent)
        shared = 2 * (self.shared + sum_of_row(p * self.shared))
        relative = np.maximum(independent, 0) + shared + self.of_sum + self.of_weight
        return p * p * relative + self.attended * (2 * rounding.weight_underflow) ** 2

    def deviation(self) -> Real:
        """Return the deviation of each weight by errors that queries share."""
        p = self.rows.weights
        return p * np.sqrt(self.of_columns + sum_of_row(p * p * self.of_columns))


def _error_of_weights(
    at: ErrorContext, weights: Weights, query: Operand, key: Operand, scores: Logits
) -> BackwardWeights:
    rows, rounding = weights.rows, at.rounding
    attended = rows.attended.astype(np.float64)
    largest = _largest_weights(rows if rounding == _DOUBLE else at.walk_in(_DOUBLE).node("weights").rows)
    # How much larger the weights can be than float64 has them.
    more = np.divide(largest, rows.weights, out=np.ones_like(rows.weights), where=rows.weights > 0)
    moved = attended * more * moved_weights(rows)
    stored = moved + attended * (_error_of_stored(rows, largest, moved, rounding) + 2 * rounding.weight_underflow)
    max_error = stored
    if rounding.recomputes:
        max_error = np.maximum(
            stored, attended * (more * _error_of_recomputed(rows, rounding) + 2 * rounding.weight_underflow)
        )
    unit = rounding.compute_unit
    of_sum = rounding.sum_unit**2 * (rows.count + rows.rescalings) + 2 * unit**2
    if rounding.recomputes or rounding.from_log_sum_exp:
        of_sum = of_sum + stored_log_sum_exp_variance(rows, rounding)
    of_columns = ZERO
    if rounding.product_unit:
        of_columns = _variance_of_exponents(at.problem, query, key.value**2) * rounding.product_spread**2
        of_columns = of_columns + rounding.product_common * scores.value**2
    if key.variance is not None:
        of_columns = added(of_columns, _variance_of_exponents(at.problem, query, key.variance))
    return BackwardWeights(
        value=weights.value,
        rows=rows,
        attended=attended,
        largest=largest,
        moved=moved,
        stored=stored,
        max_error=max_error,
        shared=added(second_order(rows), rows.shared),
        of_sum=of_sum,
        of_weight=rounding.weight_unit**2 + 2 * unit**2,
        of_columns=of_columns,
        shares_errors=bool(rounding.product_unit) or key.variance is not None,
    )


def _variance_of_exponents(problem: Computation, query: Operand, square: Real) -> Real:
    """Return the variance of exponents, (B, H, Lq, T), from that of the keys' elements, (B, Hkv, T, D)."""
    variance: Real = scale_of(problem) ** 2 * (query.value**2 @ transposed(every_head(square, query.value.shape[1])))
    return variance


BACKWARD_WEIGHTS = Step(pass_through, _error_of_weights, reach=pass_through)


def _largest_weights(rows: SoftmaxError) -> Real:
    p = rows.weights
    most = (p + rows.grown) / rows.least_sum
    return np.where(p > 0, np.where(np.isnan(most), np.inf, most), 0.0)


def _error_of_stored(rows: SoftmaxError, largest: Real, moved: Real, rounding: RoundingModel) -> Real:
    relative = normalisation_error(rows, rounding) + rounding.weight_unit
    return relative * (1 + 2 * relative) * (largest + moved)


def _error_of_recomputed(rows: SoftmaxError, rounding: RoundingModel) -> Real:
    """Return how far e^(s - L) is from p, L being stored in the format of the computation."""
    shift = stored_log_sum_exp_error(rows, rounding)[..., np.newaxis]
    # p e^(E + F) - p, written so that nothing cancels: in float64, E + F is but some dozens of units.
    moved = rows.grown * np.exp(shift) + rows.weights * np.expm1(shift)
    return moved + (rounding.weight_unit + rounding.compute_unit) * (rows.weights + moved)


@dataclass(frozen=True, eq=False)
class GradWeights:
    """The gradient of the weights, (B, H, Lq, Lk), and its factors, with values for every query head."""

    value: Real  # dp
    grad_output: Operand  # g
    values: Real  # v
    max_error: Real  # E_dp
    variance: Real  # V_dp
    of_factors: Real  # of what rounding g, or v, does to dp: for all keys, or for all queries, at once
    shares_errors: bool  # whether it does anything


def _error_of_grad_weights(at: ErrorContext, grad_output: Operand, value: Operand) -> GradWeights:
    grad_output = stored_operand_of("grad_output", grad_output, at.rounding)
    gradient, rounding, dp = grad_output.value, at.rounding, at.value
    values = every_head(value.value, gradient.shape[1])
    of_codes = error_of_codes("backward_value", np.abs(finite(value.value)), rounding)
    of_codes = of_codes if of_codes is ZERO else every_head(of_codes, gradient.shape[1])
    square, squares = dp**2, gradient**2 @ transposed(values**2)
    variance = product_variance(rounding, values.shape[-1], square, squares)
    of_factors = rounding.product_spread**2 * squares
    if grad_output.variance is not None:
        of_factors = of_factors + grad_output.variance @ transposed(values**2)
    if of_codes is not ZERO:
        of_factors = of_factors + gradient**2 @ transposed(of_codes**2)
    return GradWeights(
        value=dp,
        grad_output=grad_output,
        values=values,
        max_error=_max_error_of_grad_weights(grad_output, values, of_codes, np.abs(dp), rounding),
        variance=variance + rounding.weight_gradient_unit**2 * square,
        of_factors=of_factors,
        shares_errors=bool(rounding.product_unit) or grad_output.variance is not None or of_codes is not ZERO,
    )


def _max_error_of_grad_weights(
    gradient: Operand, values: Real, of_codes: Real, size: Real, rounding: RoundingModel
) -> Real:
    """Return E_dp; ``of_codes`` is the error of values in codes."""
    width, u_acc = values.shape[-1], rounding.accumulate_unit
    met = transposed(added(np.abs(values), of_codes))
    largest = gradient.magnitude
    if gradient.max_error is not None and rounding.quantized:  # its errors are not small
        largest = largest + gradient.max_error
    underflow = rounding.weight_underflow if rounding.weight_gradient_unit > u_acc else rounding.accumulate_underflow
    relative = width * u_acc + rounding.product_error
    summed = relative * (largest @ met)
    if gradient.max_error is not None:
        summed = summed + gradient.max_error @ met
    if of_codes is not ZERO:
        summed = summed + gradient.magnitude @ transposed(of_codes)
    error: Real = summed + rounding.weight_gradient_unit * (size + summed)
    error += 2 * (width + 2) * rounding.accumulate_underflow + underflow
    if rounding.product_unit:  # a factor that is flushed to zero
        of_query, of_key = (operand.sum(axis=-1, keepdims=True) for operand in (gradient.magnitude, np.abs(values)))
        error += rounding.product_underflow * (of_query + transposed(of_key))
    return error


GRAD_WEIGHTS = Step(exact_grad_weights, _error_of_grad_weights, reach=reach_of_grad_weights)


_SUBTRACTION_COUNT = 3
STORAGE_COUNT = 4
"""Intermediates between the weights' gradient and the logits', and between the logits' and the scores' of a softcap."""


@dataclass(frozen=True, eq=False)
class Centred:
    """The parts of the gradient of a softmax, before anything is rounded."""

    weights: BackwardWeights
    gradient: GradWeights
    output: Real  # o
    delta: Real  # Delta
    value: Real  # y
    largest: Real  # |y|, at most


@dataclass(frozen=True, eq=False)
class GradLogits:
    """The gradient of the logits and its error; 0 for keys that are not attended to."""

    centred: Centred
    value: Real  # p y
    max_error: Real  # E_dl
    variance: Real  # V_dl; constants that all have in common are left out
    of_delta: Real  # V_D
    rounded: Real  # p^2 (dp^2 + Delta^2), y

    @property
    def weights(self) -> BackwardWeights:
        """The weights that were used."""
        return self.centred.weights


def _error_of_grad_logits(at: ErrorContext, weights: BackwardWeights, gradient: GradWeights, _: Logits) -> GradLogits:
    centred, rounding = _centred(weights, gradient), at.rounding
    value = weights.rows.weights * centred.value
    of_delta, rounded = _variance_of_delta(centred, rounding), _variance_of_roundings(centred, value, rounding)
    variance, max_error = (
        _variance_of_grad_logits(centred, of_delta, rounding) + rounded,
        _max_error_of_grad_logits(centred, value, rounding),
    )
    value, max_error, variance, rounded = (
        through_mask(at.problem, array) for array in (value, max_error, variance, rounded)
    )
    return GradLogits(centred, value, max_error, variance, of_delta, rounded)


GRAD_LOGITS = Step(
    exact_grad_logits,
    _error_of_grad_logits,
    reach=lambda _, weights, gradient, __: weights | gradient,
)


def _centred(weights: BackwardWeights, gradient: GradWeights) -> Centred:
    p, dp = weights.value, gradient.value
    delta = (p * dp).sum(axis=-1, keepdims=True)
    centred = np.where(weights.rows.attended, dp - delta, 0.0)
    uncertain = ((weights.largest - p) * np.abs(dp)).sum(axis=-1, keepdims=True)
    largest = np.abs(centred) + weights.attended * uncertain
    return Centred(weights, gradient, p @ gradient.values, delta, centred, largest)


def storage_of(rounding: RoundingModel) -> tuple[float, float]:
    """Return unit roundoff and underflow of the coarsest format that gradients of logits are stored in."""
    return max((rounding.score_unit, rounding.score_underflow), (rounding.weight_unit, rounding.weight_underflow))


def _max_error_of_grad_logits(centred: Centred, value: Real, rounding: RoundingModel) -> Real:
    """Return E_dl."""
    weights, gradient = centred.weights, centred.gradient.max_error
    delta = _error_of_sum(centred, weights.stored - weights.moved, weights.stored, rounding)  # of stored weights
    if rounding.recomputes:
        again, from_output = (
            _error_of_recomputed_delta(centred, rounding),
            _error_of_delta_from_output(centred, rounding),
        )
        delta = np.maximum(np.maximum(delta, again), from_output)
    of_delta = np.abs(centred.delta) + delta
    delta = delta + rounding.score_unit * of_delta + rounding.score_underflow
    size = np.abs(centred.gradient.value)
    rounded = _SUBTRACTION_COUNT * rounding.compute_unit * (size + gradient + of_delta)
    error = weights.max_error * centred.largest + (weights.largest + weights.max_error) * (gradient + delta + rounded)
    storing, underflow = storage_of(rounding)
    error = error + storing * (np.abs(value) + error) + STORAGE_COUNT * underflow
    return weights.attended * error * (1 + 8 * rounding.coarsest_unit)


def _error_of_recomputed_delta(centred: Centred, rounding: RoundingModel) -> Real:
    """Return the error of sum_j p dp, (..., Lq, 1), of weights e^(s - L), which add up to T."""
    weights = centred.weights
    further = further_exponent_error(weights.rows, rounding)[..., np.newaxis]
    rounded = np.expm1(further) + rounding.weight_unit + rounding.compute_unit
    apart = weights.attended * (rounded * (weights.largest + weights.moved) + 2 * rounding.weight_underflow)
    total = total_error(weights.rows, rounding)
    return total * np.abs(centred.delta) + (1 + total) * _error_of_sum(centred, apart, weights.max_error, rounding)


def _error_of_sum(centred: Centred, apart: Real, max_error: Real, rounding: RoundingModel) -> Real:
    """Return the error of a sum of p dp: weights err by ``apart`` beside what perturbed exponents do, in all by P."""
    weights, gradient, size = centred.weights, centred.gradient.max_error, np.abs(centred.gradient.value)
    count = weights.rows.count
    summed = count * rounding.sum_unit + 2 * rounding.compute_unit
    if rounding.product_unit:  # by einsum, say
        summed = count * rounding.accumulate_unit + 2 * rounding.compute_unit + rounding.product_error
    error = weights.moved * centred.largest + apart * size
    error = error + (weights.largest + max_error) * (gradient + summed * (size + gradient))
    return sum_of_row(error + weights.attended * 2 * rounding.score_underflow)


def _error_of_delta_from_output(centred: Centred, rounding: RoundingModel) -> Real:
    """Return the error of sum_c g o, (..., Lq, 1)."""
    width, gradient = centred.gradient.values.shape[-1], centred.gradient.grad_output
    bound = output_bound(centred.weights.rows, Operand(centred.gradient.values), centred.output, rounding).max_error
    relative = width * rounding.accumulate_unit + rounding.product_error
    total = sum_of_row(gradient.magnitude * (bound + relative * (np.abs(centred.output) + bound)))
    if gradient.max_error is not None:
        total += sum_of_row(gradient.max_error * np.abs(centred.output))
    total += 2 * (width + 2) * rounding.accumulate_underflow
    return total


def _variance_of_roundings(centred: Centred, value: Real, rounding: RoundingModel) -> Real:
    """Return the variance of the roundings of y and of dlogits."""
    unit, (storing, underflow) = rounding.compute_unit, storage_of(rounding)
    squares = centred.weights.rows.weights**2 * (centred.gradient.value**2 + centred.delta**2)
    rounded = 2 * unit**2 * squares + (storing**2 + unit**2) * value * value
    # What underflows is rounded like anything else, by at most eta.
    lost = (2 * rounding.weight_underflow * centred.value) ** 2 + STORAGE_COUNT * underflow**2
    return rounded + centred.weights.attended * lost


def _variance_of_delta(centred: Centred, rounding: RoundingModel) -> Real:
    """Return V_D, (..., Lq, 1)."""
    rows, gradient, square = centred.weights.rows, centred.gradient, centred.delta**2
    p = rows.weights
    squares = sum_of_row(p * p * gradient.value**2)
    variance = summation_variance(rounding.sum_unit, rows.count, square, squares)
    if rounding.product_unit:  # by einsum, say
        variance = product_variance(rounding, rows.count, square, squares)
    variance = variance + 2 * rounding.compute_unit**2 * squares
    lost = (2 * rounding.weight_underflow) ** 2 * sum_of_row(centred.weights.attended * gradient.value**2)
    variance = variance + lost + rows.count * (2 * rounding.score_underflow) ** 2
    if rounding.recomputes:
        # What weights made again add up to: their errors and those of L may be apart.
        of_sum = 2 * (rows.independent_sum + rows.shared_sum) * square
        output, of_rows = centred.output**2, gradient.grad_output.value**2
        of_output = product_variance(rounding, rows.count, output, (p * p) @ gradient.values**2)
        of_output = of_output + rounding.output_count * rounding.output_unit**2 * output
        width, squares = gradient.values.shape[-1], sum_of_row(of_rows * output)
        of_row = product_variance(rounding, width, square, squares) + sum_of_row(of_rows * of_output)
        if gradient.grad_output.variance is not None:
            of_row += sum_of_row(gradient.grad_output.variance * output)
        variance = np.maximum(variance + of_sum, of_row)
    return variance + rounding.score_unit**2 * square


def _variance_of_grad_logits(centred: Centred, of_delta: Real, rounding: RoundingModel) -> Real:
    """Return the variance of each logit's gradient before it is rounded."""
    weights, gradient = centred.weights, centred.gradient
    p, dp, size = weights.rows.weights, gradient.value, np.abs(centred.value)
    of_exponents = of_own_exponents(centred, weights.rows.independent, rounding)
    mean, mean_shared = sum_of_row(p * size), sum_of_row(p * weights.shared)
    shared = (2 * size + mean) * (size * (weights.shared + mean_shared) + sum_of_row(p * weights.shared * size))
    of_sum = weights.of_sum * (size + np.abs(centred.delta)) ** 2
    of_weight = weights.of_weight * ((size + p * np.abs(dp)) ** 2 + sum_of_row(p * p * dp * dp))
    of_gradient = gradient.variance * (1 - 2 * p) + sum_of_row(p * p * gradient.variance)
    if rounding.recomputes:
        of_gradient = np.maximum(of_gradient, gradient.variance)
    relative = np.maximum(of_exponents, 0) + shared + of_sum + of_weight + np.maximum(of_gradient, 0) + of_delta
    if gradient.shares_errors:
        of_row = np.sqrt(gradient.of_factors)
        relative = relative + (of_row + sum_of_row(p * of_row)) ** 2 + of_cuts(centred, rounding)
    variance: Real = p * p * relative
    return variance


def of_own_exponents(centred: Centred, independent: Real, rounding: RoundingModel) -> Real:
    """Return the variance of each logit's gradient over its weight by independent errors of the keys' exponents."""
    p, y = centred.weights.rows.weights, centred.value
    weighted = p * p * independent
    total, first, second = (sum_of_row(weighted * factor) for factor in (1.0, y, y * y))
    return y * y * total + 2 * y * first + second + independent * y * y * (1.0 if rounding.recomputes else 1 - 4 * p)


def of_cuts(centred: Centred, rounding: RoundingModel) -> Real:
    """Return the variance that cut off factors have in common, in dp and in Delta, which need not be the same."""
    size = np.abs(centred.gradient.value) + np.abs(centred.delta)
    return rounding.product_common * size**2


def constant_moves(logits: GradLogits) -> Real:
    """Return how a relative change of all scores moves the gradients of the logits."""
    rows, y = logits.weights.rows, logits.centred.value
    p, x = rows.weights, rows.shifted
    return p * (y * (x - rows.mean_shifted) - sum_of_row(p * x * y))


_ONE = np.ones((1, 1))


@dataclass(frozen=True, eq=False)
class Slope:
    """The slope of the softcap; 1 without an error if there is no softcap, and 0 for scores that a fill replaced."""

    value: Real  # kappa
    softcap: float | None
    max_error: Real  # E_kappa
    variance: Real  # V_kappa

    def times(self, array: Real) -> Real:
        """Multiply by the slope, unless it is 1 throughout."""
        return array if self.value is _ONE else array * self.value


@dataclass(frozen=True, eq=False)
class GradScores:
    """The gradient of the scores and its error; 0 for keys that are not attended to."""

    logits: GradLogits
    slope: Slope
    value: Real  # p y kappa
    max_error: Real  # E_ds
    of_codes: Real  # what it has of codes

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
        of_exponents = np.maximum(of_own_exponents(centred, weights.of_columns, rounding), 0)
        relative = of_exponents + of_factors + sum_of_row(p * p * of_factors) + of_cuts(centred, rounding)
        through = p * np.sqrt(relative) * self.slope.value
        deviation: Real = through + np.abs(self.logits.value) * np.sqrt(self.slope.variance)
        return deviation

    def of_storage(self, rounding: RoundingModel) -> Real:
        """Return the variance of storing the intermediates of a softcap's gradient."""
        assert self.slope.softcap is not None
        unit, underflow = storage_of(rounding)
        lost = underflow**2 * (1 + 1 / self.slope.softcap**2)
        return STORAGE_COUNT * (unit**2 * self.value**2 + self.logits.weights.attended * lost)


def _error_of_slope(at: ErrorContext, scores: Logits) -> Slope:
    problem, cap, rounding = at.problem, cap_of(at.problem), at.rounding
    if cap is None:
        whole = _ONE if problem.fill is None else np.ones(scores.value.shape)
        return Slope(through_mask(problem, whole), None, np.zeros((1, 1)), np.zeros((1, 1)))
    argument = scores.value / cap
    slope, height = slope_of_tanh(argument), np.abs(np.tanh(argument))
    rise = rise_of_tanh(argument, scores.max_error / abs(cap), rounding)
    risen = rise + (rounding.tanh_error + 3 * rounding.score_unit) * (height + rise)
    max_error = risen * (2 * height + risen) + rounding.compute_unit * (2 * height + 4 * slope)  # E_kappa
    unmasked = slope, max_error, _variance_of_slope(scores, argument, slope, cap, rounding)
    slope, max_error, variance = (through_mask(problem, array) for array in unmasked)
    return Slope(slope, cap, max_error, variance)


def _variance_of_slope(scores: Logits, argument: Real, slope: Real, cap: float, rounding: RoundingModel) -> Real:
    """Return V_kappa."""
    height, unit = np.tanh(argument) ** 2, rounding.compute_unit
    of_score = (scores.independent + scores.shared) / cap**2
    of_argument = of_score + (2 * unit**2 + rounding.score_unit**2) * argument**2
    steep = np.minimum(1, slope + 0.77 * np.sqrt(of_argument))
    of_height = steep**2 * of_argument + (rounding.tanh_error**2 + 3 * rounding.score_unit**2) * height
    return 4 * height * of_height + of_height**2 + unit**2 * 4 * (height + slope**2)


def _error_of_grad_scores(at: ErrorContext, logits: GradLogits, slope: Slope) -> GradScores:
    value, error = slope.times(logits.value), _through_softcap(logits, slope, at.rounding)
    of_codes = error_of_codes("grad_scores", np.abs(value) + error, at.rounding)
    return GradScores(logits, slope, value, added(error, of_codes), of_codes)


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
    return logits.weights.attended * ((through + rounded) * (1 + 8 * rounding.coarsest_unit) + floor)


# A slope is that of a score, which the weights of its row follow from: it reaches nothing more.
SLOPE = Step(exact_slope, _error_of_slope, reach=pass_through, magnitude=abs)
GRAD_SCORES = Step(exact_grad_scores, _error_of_grad_scores, reach=pass_through)
