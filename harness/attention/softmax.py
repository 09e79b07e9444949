"""The softmax: weights e^(s_j) / sum_l e^(s_l) and log_sum_exp log sum_l e^(s_l), and the weights' transpose.

In a row without a key weights are 0, or all alike if that is the convention, and log_sum_exp is -inf.

``SoftmaxError`` say how the exponents may be perturbed, from which the bounds of weights, log_sum_exp and output start.
``docs/numerics.md`` derives these bounds (section 4.3), their variances (5), and how far the softmax moves where every
logit moves by its radius, however large that is (8); the fields of ``SoftmaxError`` have the symbols of 4.3. The form
of the largest perturbation E is that of the shifted softmax in Blanchard, D. Higham and N. Higham, IMA J. Numer. Anal.
41 (2021).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import (
    ZERO,
    Ball,
    Bound,
    BoundedStage,
    Elementwise,
    Logits,
    Operand,
    Real,
    add_errors,
    make_bound,
    quantization_error,
    replace_unusable_max_error,
    row_dot_products,
    row_sums,
    zero_nonfinite,
)
from attncheck.attention.exact_array import ExactArray, compute_row_exponentials, divide_by_row_sums, log_row_sums
from attncheck.attention.flags import any_over_axes, pass_through
from attncheck.attention.logits import exact_zero_filled_gradients
from attncheck.attention.problem import Computation
from attncheck.attention.step import ErrorContext, RadiusContext, Step
from attncheck.spec import Shape
from attncheck.spec.rounding import RoundingModel

_MAX_LINEAR_VARIANCE = 1 / 64
"""Variance of theta up to which weights have a statistical scale: at three times its root, e^theta - 1 is 1.2 theta."""
_MIN_VARIANCE = 2.0**-20
"""Variance of theta up to which two terms of its second order are all that float64 can tell, and better than more."""
_NEGLIGIBLE_SHARE = 2.0**-80
"""Beside the variance of an exponential's own error, what is so much smaller shows in no sum of float64 numbers."""
_MAX_EXPM1_EXPONENT = 1.0
"""Exponents up to here go through expm1; larger ones through the logarithm of the weight."""
LARGEST_EXPONENT = 700.0  # e^709 is the largest power of e in float64
_MIN_WEIGHT = 1e-300
"""Smaller weights are near the least normal number of float64, 2.2e-308, or below it, where bits are lost; the
logarithm of a weight is then the difference of logit and log_sum_exp."""


@dataclass(frozen=True, eq=False)
class SoftmaxError(Elementwise):
    """A softmax and how its exponents may be perturbed; keys that are not attended to have zeros.

    (..., Lq, Lk) per key, (..., Lq, 1) per row.
    """

    attended: NDArray[np.bool_]
    are_all_attended: bool
    weights: Real  # p
    shifted_logits: Real  # x
    row_maximum: Real  # m
    attended_count: Real  # n
    block_count: Real  # r
    expected_rescalings: Real  # rho: how often the running maximum is expected to change, on data without an order
    row_maximum_error: Real  # D_m
    max_exponent_error: Real  # E
    max_weight_growth: Real  # p (e^E - 1)
    sum_of_squared_growth: Real  # sum p (e^E - 1)^2
    weight_growth_sum: Real  # R
    min_normalizer: Real  # Z
    normalizer_loss: Real  # 1 - Z
    independent_variance: Real  # t^2: variance of theta, each key's own
    shared_variance: Real  # c^2: variance of theta, common to the keys of a row
    squared_weights: Real  # p^2
    weighted_independent_variance: Real  # p^2 t^2
    independent_variance_sum: Real  # sum p^2 t^2
    shared_variance_sum: Real  # sum p c^2
    mean_shifted_logit: Real  # sum p x
    log_sum_exp: Real  # L
    common_exponent_error: Real  # of theta, what all keys of a row have alike, beyond E, and what L gets back
    score_scale_error_variance: float = 0.0  # variance of a relative error that all scores have in common

    @cached_property
    def exponent_variance(self) -> Real:
        """The variance of theta."""
        variance = add_errors(self.independent_variance, self.shared_variance)
        return (
            variance + self.score_scale_error_variance * self.shifted_logits * self.shifted_logits
            if self.score_scale_error_variance
            else variance
        )

    @cached_property
    def largest_exponent_variance(self) -> float:
        """The largest variance of theta."""
        return float(self.exponent_variance.max(initial=0.0))

    @cached_property
    def log_sum_decrease(self) -> Real:
        """-ln Z, at least 0, by 1 - Z where Z is so near 1 that its last bits count; large for an empty row."""
        near = self.min_normalizer > 0.5
        fall = -np.log1p(-np.where(near, self.normalizer_loss, 0.0))
        return np.maximum(fall if near.all() else np.where(near, fall, -np.log(np.minimum(self.min_normalizer, 1))), 0)

    def score_scale_variance(self, rounding: RoundingModel) -> float:
        """The variance of what moves every score in proportion: a rounded scale, factors that are cut off."""
        return rounding.score_unit**2 + rounding.compute_unit**2 + self.score_scale_error_variance


def compute_softmax_error(error: Logits, weights: Real, log_sum_exp: Real, rounding: RoundingModel) -> SoftmaxError:
    """Prepare the bounds of whatever follows from logits, whose exact softmax is given.

    logits, weights (..., Lq, Lk), log_sum_exp (..., Lq). A row with NaN or +inf in it counts as empty.
    """
    logits = error.value
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    attended, maximum = logits > -np.inf, zero_nonfinite(highest)
    if maximum is not highest:
        attended &= np.isfinite(highest)
    whole, even = bool(attended.all()), _flag_constant_rows(error, attended, rounding)
    distance, shifted = error.max_error, logits - maximum
    if not whole:
        distance, shifted, weights = (np.where(attended, array, 0.0) for array in (distance, shifted, weights))
    count = np.full(highest.shape, float(logits.shape[-1])) if whole else row_sums(attended.astype(np.float64))
    blocks = np.ceil(count / rounding.min_block_keys)
    rescalings = 1 + np.log1p(blocks)
    largest = (shifted + distance).max(axis=-1, keepdims=True, initial=0.0)
    common, apart, beyond = ZERO, maximum, largest
    if even is not None:
        # What the keys of an even row have in common leaves its weights as they are.
        common = largest + rounding.maximum_count * rounding.compute_unit * (np.abs(maximum) + largest)
        common = np.where(even, common, 0.0)
        distance, apart, beyond = (np.where(even, 0.0, array) for array in (distance, maximum, largest))
    common = common if error.restored_mean_error is None else add_errors(common, error.restored_mean_error)
    exponent = _exponent_error(distance, shifted, _row_exponent_error(apart, beyond, count, blocks, rounding), rounding)
    grown, squares, least, lost = _perturbed_row_sums(weights, logits, log_sum_exp, exponent, attended)
    independent, shared = _exponent_variances(shifted, apart, rescalings, error, rounding)
    if even is not None:
        independent = np.where(even, rounding.exp_error**2 * (1 + rescalings), independent)
        shared = np.where(even, 0.0, shared)
    if not whole:
        # A score of -1e308 has a variance of inf, and a weight of 0.
        weighty = weights > 0
        independent = np.where(weighty, independent, 0.0)
        shared = shared if shared is ZERO else np.where(weighty, shared, 0.0)
    square_p = weights * weights
    independent_terms = square_p * independent
    return SoftmaxError(
        attended=attended,
        are_all_attended=whole,
        weights=weights,
        shifted_logits=shifted,
        row_maximum=maximum,
        attended_count=count,
        block_count=blocks,
        expected_rescalings=rescalings,
        row_maximum_error=largest,
        max_exponent_error=exponent,
        max_weight_growth=grown,
        sum_of_squared_growth=squares,
        weight_growth_sum=row_sums(grown),
        min_normalizer=np.maximum(least, np.finfo(np.float64).tiny),
        normalizer_loss=lost,
        independent_variance=independent,
        shared_variance=shared,
        squared_weights=square_p,
        weighted_independent_variance=independent_terms,
        independent_variance_sum=row_sums(independent_terms),
        shared_variance_sum=ZERO if shared is ZERO else row_sums(weights * shared),
        mean_shifted_logit=row_dot_products(weights, shifted),
        log_sum_exp=zero_nonfinite(log_sum_exp)[..., np.newaxis],
        common_exponent_error=common,
        score_scale_error_variance=error.score_scale_error_variance,
    )


def _flag_constant_rows(
    error: Logits, attended: NDArray[np.bool_], rounding: RoundingModel
) -> NDArray[np.bool_] | None:
    """Return which rows, (..., Lq, 1), have one and the same number for all that is attended to; None without any.

    Parts of a row that are merged by a stored log_sum_exp have errors of their own, whatever is in them.
    """
    if error.constant_elements is None or rounding.from_log_sum_exp:
        return None
    even = np.asarray((error.constant_elements | ~attended).all(axis=-1, keepdims=True))
    return even if even.any() else None


def flag_linear_weights(rows: SoftmaxError, max_variance: float = _MAX_LINEAR_VARIANCE) -> NDArray[np.bool_]:
    """Return where e^theta - 1 is about theta: elsewhere noise in a score is no noise of that size in its weight.

    ``max_variance`` is the largest variance of theta that counts as small.
    """
    if rows.largest_exponent_variance <= max_variance / 2:  # and so is the mean of a row
        return np.ones((1, 1), np.bool_)
    variance = rows.exponent_variance
    of_row = (rows.weights * zero_nonfinite(variance)).sum(axis=-1, keepdims=True)
    linear: NDArray[np.bool_] = np.maximum(variance, of_row) <= max_variance
    return linear


def second_order_variance(rows: SoftmaxError) -> Real:
    """Return f(t) = E (e^theta - 1 - theta)^2 of a normal theta with the variance t: 3/4 t^2 if that is small.

    f(t) = e^(2t) - 2 (1 + t) e^(t/2) + 1 + t = 3/4 t^2 + 25/24 t^3 + O(t^4)
    """
    variance = rows.exponent_variance
    if rows.largest_exponent_variance < _MIN_VARIANCE:
        return variance * variance * (0.75 + 25 / 24 * variance)
    bounded = np.minimum(variance, LARGEST_EXPONENT / 2)
    grown: Real = np.expm1(2 * bounded) - 2 * (1 + bounded) * np.expm1(bounded / 2) - bounded
    return np.maximum(grown, 0.75 * bounded * bounded)  # the difference cancels


def _row_exponent_error(maximum: Real, largest: Real, count: Real, blocks: Real, rounding: RoundingModel) -> Real:
    """Return the part of E that the keys of a row have in common."""
    unit = rounding.compute_unit
    rescaled = np.minimum(blocks, np.maximum(count - 1, 0))
    of_row: Real = unit * (rounding.difference_count * largest + rounding.maximum_count * (np.abs(maximum) + largest))
    of_row += (1 + rescaled) * rounding.exp_error + 2 * unit * rescaled
    return of_row


def _exponent_error(score_error: Real, shifted: Real, row_error: Real, rounding: RoundingModel) -> Real:
    """Return E."""
    relative, room = rounding.compute_unit * rounding.difference_count, 1 + 8 * rounding.coarsest_unit
    exponent = shifted * (-relative * room)  # no x is above 0
    exponent += score_error * ((1 + relative) * room)
    exponent += row_error * room
    return exponent


def _perturbed_row_sums(
    weights: Real, logits: Real, log_sum_exp: Real, exponent: Real, attended: NDArray[np.bool_]
) -> tuple[Real, Real, Real, Real]:
    """Return p (e^E - 1), and of each row the sums of p (e^E - 1)^2, p e^-E and p (1 - e^-E).

    There e^E may overflow and p underflow.
    """
    small = exponent <= _MAX_EXPM1_EXPONENT
    if small.all():
        rise = np.expm1(exponent)
        grown, fallen = weights * rise, 1 / (1 + rise)
        return grown, row_dot_products(grown, rise), row_dot_products(weights, fallen), row_dot_products(grown, fallen)
    rise = np.expm1(np.where(small, exponent, 0.0))
    grown = weights * rise
    squares, least, lost = grown * rise, weights / (1 + rise), grown / (1 + rise)
    large = attended & ~small
    p, raised = weights[large], exponent[large]
    # If the weight itself has underflowed, its logarithm still is a number.
    difference = (np.where(attended, logits, 0.0) - zero_nonfinite(log_sum_exp)[..., np.newaxis])[large]
    logarithm = np.where(p > _MIN_WEIGHT, np.log(np.maximum(p, _MIN_WEIGHT)), difference)
    grown[large] = np.exp(np.minimum(logarithm + raised, LARGEST_EXPONENT)) - p
    squares[large] = np.exp(np.minimum(logarithm + 2 * raised, LARGEST_EXPONENT))
    least[large] = np.exp(logarithm - raised)
    lost[large] = np.maximum(p - least[large], 0)
    return grown, row_sums(squares), row_sums(least), row_sums(lost)


def _exponent_variances(
    shifted: Real, maximum: Real, rescalings: Real, error: Logits, rounding: RoundingModel
) -> tuple[Real, Real]:
    """Return the variances of theta: each key's own, and common to a row's keys."""
    unit, exponential = rounding.compute_unit, rounding.exp_error**2
    of_row = unit**2 * (maximum * maximum + rescalings) + exponential * (1 + rescalings)
    independent = shifted * shifted
    independent *= 2 * unit**2
    independent += of_row
    independent += error.independent_variance
    underflow = float(error.underflow_error.max(initial=0.0))
    if underflow**2 < _NEGLIGIBLE_SHARE * exponential:
        return independent, error.shared_variance
    return independent, add_errors(error.shared_variance, error.underflow_error * error.underflow_error)


_LARGEST_EXPONENT = 600.0
"""e^600, and a sum of many such terms, are numbers of float64; a weight that may grow to it may as well become 1."""
_MIN_TOTAL = 1e-290
"""Sums below have lost terms to underflow."""


def propagate_weight_radius(weights: Real, log_weights: Real, radius: Real) -> Real:
    """Return how far each weight moves at most, one way or the other."""
    grown, shrunk = _weight_growth(weights, log_weights, radius), -weights * np.expm1(-radius)
    most, least = weights + grown, np.exp(log_weights - radius)
    rest = _sum_of_others(weights)
    up_total, down_total = most + _sum_of_others(least), least + _sum_of_others(most)
    up = (rest * grown + weights * _sum_of_others(shrunk)) / up_total
    down = (rest * shrunk + weights * _sum_of_others(grown)) / down_total
    # If all of a row can become too small for float64, the weight may become anything between 0 and 1.
    lost = np.minimum(up_total, down_total) < _MIN_TOTAL
    return np.where(lost, np.maximum(weights, rest), np.maximum(up, down))


def propagate_log_sum_exp_radius(weights: Real, log_weights: Real, radius: Real) -> Real:
    """Return how far each log_sum_exp moves at most, one way or the other."""
    row_grown = _weight_growth(weights, log_weights, radius).sum(axis=-1)
    logarithms = log_weights + radius
    largest = logarithms.max(axis=-1, keepdims=True, initial=-np.inf)
    log_total = largest[..., 0] + np.log(np.exp(logarithms - largest).sum(axis=-1))
    # Near 1 the logarithm of the sum loses the digits that log1p keeps; far from it the sum itself may overflow.
    moved: Real = np.where(row_grown < 1, np.log1p(row_grown), log_total)
    return moved


def _weight_growth(weights: Real, log_weights: Real, radius: Real) -> Real:
    """Return p (e^d - 1), where p itself may be too small for float64, and e^d too large."""
    most = np.exp(np.minimum(log_weights + radius, _LARGEST_EXPONENT))
    return np.where(radius < 1, weights * np.expm1(np.minimum(radius, 1)), most - weights)


def _sum_of_others(terms: Real) -> Real:
    """Return, for each element of a row, the sum of all others; row sum less element would cancel."""
    before, after = np.zeros_like(terms), np.zeros_like(terms)
    before[..., 1:] = np.cumsum(terms[..., :-1], axis=-1)
    after[..., :-1] = np.cumsum(terms[..., :0:-1], axis=-1)[..., ::-1]
    return before + after


_FLOAT64_UNIT = 2.0**-53
_LARGEST_GROWN = np.exp(LARGEST_EXPONENT - 1)
"""A sum of p (e^E - 1) of which a term has been cut off is larger than this."""


class Softmax(NamedTuple):
    """Both results of one softmax."""

    weights: Real
    log_sum_exp: Real


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights that were computed: what follows from them follows from the exponents of their rows."""

    value: Real
    rows: SoftmaxError

    def bound(self, rounding: RoundingModel) -> Bound:
        """Return the bound of the weights."""
        return bound_weights(self.rows, self.value, rounding)


def softmax(logits: Real, empty_row_weight: float = 0.0) -> Softmax:
    """Evaluate weights and log_sum_exp in float64: ``empty_row_weight`` and -inf in a row without a key.

    Example:
        >>> weights, log_sum_exp = softmax(np.array([[3.0, -np.inf], [-np.inf, -np.inf]]))
        >>> weights.tolist(), log_sum_exp.tolist()
        ([[1.0, 0.0], [0.0, 0.0]], [3.0, -inf])
    """
    _, powers, total, highest = _shifted_exponentials(logits)
    weights = powers / total
    if empty_row_weight != 0:
        weights = np.where(highest == -np.inf, empty_row_weight, weights)
    return Softmax(weights, (highest + np.log(total))[..., 0])


def _shifted_exponentials(logits: Real) -> tuple[Real, Real, Real, Real]:
    """Return logits less their row's maximum, their exponentials, the sum of these (1 without any), and the maximum."""
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    empty = highest == -np.inf
    shifted = logits - np.where(empty, 0.0, highest)
    powers = np.exp(shifted)
    return shifted, powers, np.where(empty, 1.0, powers.sum(axis=-1, keepdims=True)), highest


def _softmax_value(problem: Computation, logits: Real) -> Softmax:
    of_empty = {"uniform": 1 / max(_count_own_keys(problem, logits.shape), 1), "nan": np.nan}
    return softmax(logits, of_empty.get(str(problem.options.get("empty_rows")), 0.0))


def _count_own_keys(problem: Computation, shape: Shape) -> int:
    return shape[-1] - problem.added_keys


def _exponentials_with_error(at: ErrorContext, logits: Logits) -> SoftmaxError:
    return compute_softmax_error(logits, at.value.weights, at.value.log_sum_exp, at.rounding)


def _softmax_radii(_around: RadiusContext, value: Softmax, logits: Ball) -> Softmax:
    attended = logits.value > -np.inf
    shifted, _, total, highest = _shifted_exponentials(logits.value)
    # The logarithm of a weight is a number if the weight itself is too small for float64.
    log_weights, radius = shifted - np.log(total), np.where(attended, logits.radius, 0)
    weights = np.where(highest == -np.inf, 0, value.weights)  # by convention, which no rounding of the scores moves
    moved = np.where(attended, propagate_weight_radius(weights, log_weights, radius), 0)
    return Softmax(
        moved, np.where(np.isinf(value.log_sum_exp), 0, propagate_log_sum_exp_radius(weights, log_weights, radius))
    )


EXPONENTIALS = Step(
    lambda problem, logits: compute_row_exponentials(
        logits, uniform=_count_own_keys(problem, logits.shape) if problem.has_uniform_rows else 0
    ),
    _exponentials_with_error,
    _softmax_radii,
    propagate_flags=lambda known, logits: any_over_axes(
        logits if known.attended is None else logits & known.attended, -1
    ),
    evaluate_in_float64=_softmax_value,
)
WEIGHTS = Step(
    lambda _, powers: divide_by_row_sums(powers),
    lambda at, rows: Weights(at.value, rows),
    lambda _, __, both: both.radius.weights,
    lambda _, array: Operand(array),  # roundings of the weights that meet the values are counted with the mean
    pass_through,
    lambda _, both: both.weights,
    exact_magnitude=abs,
)
LOG_SUM_EXP = Step(
    lambda _, powers: log_row_sums(powers),
    lambda at, rows: BoundedStage(at.value, bound_log_sum_exp(rows, at.value, at.rounding.for_log_sum_exp)),
    lambda _, __, both: both.radius.log_sum_exp,
    propagate_flags=lambda _, row: row[..., 0],
    evaluate_in_float64=lambda _, both: both.log_sum_exp,
    exact_magnitude=lambda entry: 1 + abs(entry),
)


def exact_grad_logits(
    problem: Computation, weights: ExactArray, grad_weights: ExactArray, masked: ExactArray
) -> ExactArray:
    """Return p (dp - sum p dp), of magnitudes p (|dp| + sum p |dp|); 0 at masked keys, were a row of them uniform.

    The Jacobian of a softmax is diag(p) - p p^T.
    """
    mean = (weights * grad_weights).sum(-1)
    gradients = weights * (grad_weights + mean if problem.uses_magnitudes else grad_weights - mean)
    if masked.attended is not None:
        gradients = gradients.select_where(masked.attended, 0.0)
    return exact_zero_filled_gradients(problem, gradients)


def bound_weights(rows: SoftmaxError, exact: Real, rounding: RoundingModel) -> Bound:
    """Bound the weights; 0 if a key is not attended to: the weight there must be exactly 0."""
    p, moved = rows.weights, max_weight_change(rows)
    stored = rounding.output_count * rounding.output_unit
    if rounding.weight_unit != rounding.sum_unit:  # else the weight that meets the values is the one returned
        stored += rounding.weight_unit
    relative = normalisation_error(rows, rounding) + stored
    floor = 2 * rounding.weight_underflow + rounding.output_underflow + narrow_weight_error(rows, rounding)
    # A factor of both would overflow if a relative error does; there may be nothing that it meets.
    max_error = (moved * (1 + relative) + p * relative) * (1 + 2 * relative) + floor
    largest = replace_unusable_max_error(exact, max_error)
    # The weight is a factor of the whole scale: squared it would underflow.
    scale = np.fmin(p * np.sqrt(_weights_variance(rows, rounding)) + floor, largest)
    linear = flag_linear_weights(rows)
    scale = scale if linear.all() else np.where(linear, scale, largest)
    if rows.are_all_attended:
        return Bound(largest, scale)
    return Bound(np.where(rows.attended, largest, 0.0), np.where(rows.attended, scale, 0.0))


def narrow_weight_error(rows: SoftmaxError, rounding: RoundingModel) -> Real | float:
    """Return min{p^, h / Z}: what a weight loses to the least numbers of its format, and never more than itself."""
    if not rounding.has_narrow_weights:
        return 0.0
    share: Real | float = 1.0
    if rounding.stores_exponentials:
        excess = np.where(rows.attended_count > 0, rows.row_maximum + rows.row_maximum_error - rows.log_sum_exp, 0.0)
        share = np.minimum(np.exp(np.minimum(excess, 0)) / rows.min_normalizer, 1)
    return narrow_format_error((rows.weights + rows.max_weight_growth) / rows.min_normalizer, share, rounding)


def narrow_format_error(largest_weights: Real, share: Real | float, rounding: RoundingModel) -> Real:
    """Return what weights lose that may be so large, if an exponential of 1 is such a ``share``."""
    if rounding.weight_step:
        return np.minimum(largest_weights, rounding.weight_step * share)
    return quantization_error("weights", np.minimum(largest_weights, 1.0), rounding, share)


def max_weight_change(rows: SoftmaxError) -> Real:
    """Return G: how far perturbed exponents alone can move each weight."""
    p = rows.weights
    # R - p W cancels if one key has nearly all of the weight.
    others = (
        np.maximum(rows.weight_growth_sum - rows.max_weight_growth, 0)
        + rows.attended_count * _FLOAT64_UNIT * rows.weight_growth_sum
    )
    return np.minimum(((1 - p) * rows.max_weight_growth + p * others) / rows.min_normalizer, np.maximum(p, 1 - p))


def normalisation_error(rows: SoftmaxError, rounding: RoundingModel) -> Real:
    """Return the relative error of the sum of exponentials, and of a division by it."""
    summed = (
        rows.attended_count + rows.block_count
    ) * rounding.sum_unit + rows.attended_count * rounding.weight_underflow
    relative: Real = summed + 3 * rounding.compute_unit
    return relative + recomputed_sum_error(rows, rounding) if rounding.from_log_sum_exp else relative


def recomputed_sum_error(rows: SoftmaxError, rounding: RoundingModel) -> Real:
    """Return how far sum_j e^(s^_j - L^) can be from 1, where L^ is a stored log_sum_exp, of scores made on their own.

    tau = max{ (1 + R) e^F - 1, 1 - Z e^-F },    F = B_L + (c_x + c_m) u_c lambda
    """
    shift = stored_log_sum_exp_error(rows, rounding)[..., np.newaxis]
    above = np.expm1(np.minimum(shift + np.log1p(rows.weight_growth_sum), LARGEST_EXPONENT))
    below = -np.expm1(-rows.log_sum_decrease - shift)
    return np.maximum(above, below)


def stored_log_sum_exp_error(rows: SoftmaxError, rounding: RoundingModel) -> Real:
    """Return F, (..., Lq): the error of s - L beyond that of s - m, L being stored in the format of the computation."""
    unit, exact = rounding.compute_unit, rows.log_sum_exp[..., 0]
    kept = replace(rounding, output_unit=unit, output_underflow=rounding.score_underflow, output_count=2)
    return bound_log_sum_exp(rows, exact, kept).max_error + extra_exponent_error(rows, rounding)


def extra_exponent_error(rows: SoftmaxError, rounding: RoundingModel) -> Real:
    """Return (c_x + c_m) u_c lambda, (..., Lq): what s - L rounds more than s - m does."""
    excess = np.where(rows.attended_count[..., 0] > 0, rows.log_sum_exp[..., 0] - rows.row_maximum[..., 0], 0.0)
    counts = rounding.difference_count + rounding.maximum_count
    error: Real = counts * rounding.compute_unit * np.maximum(excess, 0)
    return error


def stored_log_sum_exp_variance(rows: SoftmaxError, rounding: RoundingModel) -> Real:
    """Return the variance of a stored L beyond that of its sum, (..., Lq, 1)."""
    maximum, unit = rows.row_maximum, rounding.compute_unit
    stored = np.where(rows.attended_count > 0, rows.log_sum_exp, 0.0)
    excess = np.maximum(stored - maximum, 0)
    variance: Real = (rounding.log_error + unit) ** 2 * excess**2 + 2 * unit**2 * (maximum**2 + stored**2)
    return variance


def bound_log_sum_exp(rows: SoftmaxError, exact: Real, rounding: RoundingModel) -> Bound:
    """Bound log_sum_exp, ``exact`` (..., Lq); 0 for a row without a key."""
    unit, maximum, size = rounding.compute_unit, rows.row_maximum[..., 0], np.abs(exact)
    excess = np.maximum(zero_nonfinite(exact) - maximum, 0)  # lambda
    largest = rows.row_maximum_error[..., 0]
    moved = np.maximum(np.log1p(rows.weight_growth_sum), rows.log_sum_decrease)[..., 0]
    furthest = rows.max_exponent_error.max(axis=-1, initial=0.0)
    # A p e^E that would overflow has been cut off; no sum moves further than its largest exponent.
    cut_off = rows.weight_growth_sum[..., 0] > _LARGEST_GROWN
    moved = np.where(cut_off, furthest, np.minimum(moved, furthest)) + rows.common_exponent_error[..., 0]
    terms = rows.attended_count + rows.block_count
    summed = (terms * rounding.sum_unit + rows.attended_count * rounding.weight_underflow)[..., 0] + 2 * unit
    summed = summed * (1 + 2 * summed)
    max_error = (
        moved
        + summed
        + (rounding.log_error + unit) * (excess + moved + summed + largest)
        + 2 * unit * (np.abs(maximum) + largest)
        + rounding.output_count * rounding.output_unit * (size + moved)
        + rounding.output_underflow
    )
    return make_bound(exact, max_error, _log_sum_exp_variance(rows, exact, excess, rounding), rounding.output_underflow)


def _log_sum_exp_variance(rows: SoftmaxError, exact: Real, excess: Real, rounding: RoundingModel) -> Real:
    unit, maximum = rounding.compute_unit, rows.row_maximum[..., 0]
    of_exponents = add_errors(rows.independent_variance_sum, rows.shared_variance_sum)[..., 0]
    # The rounding of the scale moves every score in proportion, the maximum included.
    variance = of_exponents + rows.score_scale_variance(rounding) * (rows.mean_shifted_logit[..., 0] + maximum) ** 2
    if rows.common_exponent_error is not ZERO:
        variance += rows.common_exponent_error[..., 0] ** 2
    variance += rounding.sum_unit**2 * (rows.attended_count + rows.expected_rescalings)[..., 0]
    variance += ((rounding.log_error + unit) * excess) ** 2 + 2 * (unit * maximum) ** 2
    variance += rounding.output_count * (rounding.output_unit * exact) ** 2
    return variance


def _weights_variance(rows: SoftmaxError, rounding: RoundingModel) -> Real:
    """Return the variance of a weight's relative error, that of theta_j - sum p_l theta_l and of the normalisation.

    Errors in common: by Cauchy's inequality at most 2 (1 - p_j) [ (1 - 2p_j) c_j + sum p_l c_l ].
    """
    p, independent, shared, unit = rows.weights, rows.independent_variance, rows.shared_variance, rounding.compute_unit
    apart, opposite = rounding.from_log_sum_exp, 1 - 2 * p
    of_row = rounding.sum_unit**2 * (rows.attended_count + rows.expected_rescalings) + 2 * unit**2
    of_row += rounding.output_count * rounding.output_unit**2
    variance: Real = (independent if apart else independent * opposite) + rows.independent_variance_sum
    if shared is not ZERO:
        mean = rows.shared_variance_sum
        variance += 2 * (shared + mean) if apart else (1 + opposite) * (opposite * shared + mean)
    np.maximum(variance, 0, out=variance)
    if apart:
        of_row += stored_log_sum_exp_variance(rows, rounding)
    variance += rows.score_scale_variance(rounding) * (rows.shifted_logits - rows.mean_shifted_logit) ** 2
    variance += of_row
    return variance
