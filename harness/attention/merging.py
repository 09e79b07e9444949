"""Merging the results of attention over parts of the keys: a softmax over the parts, with other values for each query.

    L = log sum_n e^(L_n),    p_n = e^(L_n - L),    o = sum_n p_n o_n

In canonical form the log_sum_exps L_n are ``scores``, (B, H, Lq, N), and the parts' outputs o_n are ``row_values``,
(B, H, Lq, N, Dv). An empty part has the score -inf and values of 0. Logarithms in base b, s_n = ln(b) L_n, are turned
into those in base e before the softmax, and its log_sum_exp is turned back.

Statistics are float32 in 16 bits, so that the softmax is class native in float32 there, whatever the class; what meets
the outputs may be rounded to theirs. Parts may be merged all at once, one after the other, or two by two:
``docs/numerics.md``, section 4.5, derives what that adds to the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attncheck.attention.errors import (
    Ball,
    Bound,
    BoundedStage,
    Logits,
    Operand,
    Real,
    logits_from_values,
    make_bound,
    zero_nonfinite,
)
from attncheck.attention.exact_array import ExactArray, Exponentials, log_row_sums
from attncheck.attention.flags import FlagContext, Flags, any_over_axes
from attncheck.attention.problem import Computation
from attncheck.attention.softmax import EXPONENTIALS, LOG_SUM_EXP, WEIGHTS, Softmax, SoftmaxError, Weights
from attncheck.attention.step import ErrorContext, RadiusContext, Step
from attncheck.attention.weighted_mean import WEIGHTED_MEAN
from attncheck.spec import statistics_dtype
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import RoundingModel


def log_sum_exp_rounding_model(rounding: RoundingModel) -> RoundingModel:
    """Return the roundings of the softmax over parts, and of a log_sum_exp that is returned."""
    wide = statistics_dtype(rounding.dtype)
    widened = rounding if wide == rounding.dtype else rounding_model_named("native", wide)
    return replace(widened, min_block_keys=1, from_log_sum_exp=True)


def _mean_rounding_model(rounding: RoundingModel) -> RoundingModel:
    """Return the roundings of the mean: in 16 bits the weights may be stored as the outputs are, and the products too.

    Products are stored where every intermediate is.
    """
    statistics = log_sum_exp_rounding_model(rounding)
    if statistics.dtype == rounding.dtype:
        return statistics
    stores_all = rounding.compute_unit == rounding.output_unit
    return replace(
        statistics,
        dtype=rounding.dtype,
        weight_unit=rounding.weight_unit * (2 if stores_all else 1),
        weight_underflow=rounding.weight_underflow,
        output_unit=rounding.output_unit,
        output_count=rounding.output_count,
        output_underflow=rounding.output_underflow,
    )


_TWO = np.array([[2.0]])


def _has_natural_base(problem: Computation) -> bool:
    return problem.options.get("lse_base") != "2"


# The logits: natural logarithms.


def _exact_part_logits(problem: Computation, scores: ExactArray) -> ExactArray:
    return scores if _has_natural_base(problem) else scores * problem.to_exact_array(_TWO).log()


def _part_logits_radius(around: RadiusContext, _: Real, scores: Ball) -> Real:
    return scores.radius if _has_natural_base(around.problem) else scores.radius * math.log(2)


def _part_logits_with_error(at: ErrorContext, _: Logits) -> Logits:
    value, rounding = at.value, log_sum_exp_rounding_model(at.rounding)
    attended = value > -np.inf
    largest, spread = _row_size_and_spread(value)
    apart = np.where(
        attended, zero_nonfinite(value) - zero_nonfinite(value.max(axis=-1, keepdims=True, initial=-np.inf)), 0.0
    )
    later = np.maximum(attended.sum(axis=-1, keepdims=True) - 2, 0)
    stored = _intermediate_storage_error(largest, spread, rounding)
    converted = 0.0 if _has_natural_base(at.problem) else 2 * rounding.compute_unit * np.abs(apart)
    max_error = np.where(attended, later * stored + converted, 0.0)
    variance = np.where(attended, later * stored**2 + converted**2, 0.0)
    return replace(logits_from_values(value, max_error), independent_variance=variance)


def _row_size_and_spread(logits: Real) -> tuple[Real, Real]:
    """Return S without |L|, and rho, (..., 1): 0 in a row without a part."""
    attended = np.isfinite(logits)
    size = np.where(attended, np.abs(logits), 0.0).max(axis=-1, keepdims=True, initial=0.0)
    highest = np.where(attended, logits, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    lowest = np.where(attended, logits, np.inf).min(axis=-1, keepdims=True, initial=np.inf)
    count = np.maximum(attended.sum(axis=-1, keepdims=True), 1)
    return size + np.log(count), np.maximum(
        zero_nonfinite(highest) - zero_nonfinite(lowest), 0.0
    )  # |L| <= max |s| + log n


def _intermediate_storage_error(largest: Real, spread: Real, rounding: RoundingModel) -> Real:
    """Return eta: the error that each L stored on the way adds to all later ones."""
    unit = rounding.compute_unit
    return unit * (largest + 2 * spread) + rounding.log_error + rounding.exp_error + 4 * unit


PART_LOGITS = Step(
    _exact_part_logits, _part_logits_with_error, _part_logits_radius, propagate_flags=lambda _, scores: scores
)


# The softmax over the parts, in the format of the statistics.


@dataclass(frozen=True, eq=False)
class _PartWeights(Weights):
    """Weights of parts, stored as statistics are."""

    def bound(self, rounding: RoundingModel) -> Bound:
        """Return the bound of the weights."""
        return super().bound(log_sum_exp_rounding_model(rounding))


def _part_softmax_error(at: ErrorContext, logits: Logits) -> SoftmaxError:
    rows: SoftmaxError = EXPONENTIALS.propagate_error(
        replace(at, rounding=log_sum_exp_rounding_model(at.rounding)), logits
    )
    return rows


PART_EXPONENTIALS = replace(EXPONENTIALS, propagate_error=_part_softmax_error)
PART_WEIGHTS = replace(WEIGHTS, propagate_error=lambda at, rows: _PartWeights(at.value, rows))


# Its log_sum_exp, in the base of those that are given.


def _exact_log_sum_exp(problem: Computation, powers: Exponentials) -> ExactArray:
    total = log_row_sums(powers)
    return total if _has_natural_base(problem) else total / problem.to_exact_array(_TWO).log()


def _log_sum_exp(problem: Computation, both: Softmax) -> Real:
    return both.log_sum_exp if _has_natural_base(problem) else both.log_sum_exp / math.log(2)


def _log_sum_exp_radius(around: RadiusContext, _: Real, both: Any) -> Real:
    radius: Real = both.radius.log_sum_exp
    return radius if _has_natural_base(around.problem) else radius / math.log(2)


def _bound_log_sum_exp(at: ErrorContext, rows: SoftmaxError) -> BoundedStage:
    rounding, base = log_sum_exp_rounding_model(at.rounding), 1.0 if _has_natural_base(at.problem) else math.log(2)
    natural = replace(at, rounding=rounding, compute_value=lambda: at.value * base)
    natural_bound: Bound = LOG_SUM_EXP.propagate_error(natural, rows).final_bound
    logits = np.where(rows.attended, rows.shifted_logits + rows.row_maximum, -np.inf)
    stored = np.where(
        rows.attended_count > 0, _intermediate_storage_error(*_row_size_and_spread(logits), rounding), 0.0
    )[..., 0]
    max_error, variance = (natural_bound.max_error + stored) / base, (natural_bound.sigma**2 + stored**2) / base**2
    if base != 1:
        size = np.abs(zero_nonfinite(at.value))
        max_error = max_error + 2 * rounding.compute_unit * (size + max_error)
        variance = variance + 2 * (rounding.compute_unit * size) ** 2
    return BoundedStage(at.value, make_bound(at.value, max_error, variance, rounding.output_underflow))


PART_LOG_SUM_EXP = replace(
    LOG_SUM_EXP,
    evaluate_exactly=_exact_log_sum_exp,
    evaluate_in_float64=_log_sum_exp,
    propagate_error=_bound_log_sum_exp,
    propagate_radius=_log_sum_exp_radius,
)


# The mean: each query has values of its own, one row of them for each part.


def _exact_part_mean(problem: Computation, weights: ExactArray, values: ExactArray) -> ExactArray:
    *leading, queries, parts = weights.shape
    alone = weights.reshaped((*leading, queries, 1, parts))
    mean: ExactArray = WEIGHTED_MEAN.evaluate_exactly(problem, alone, values)
    return mean.reshaped((*leading, queries, values.shape[-1]))


def _part_mean_radius(around: RadiusContext, value: Real, weights: Ball, values: Ball) -> Real:
    moved: Real = WEIGHTED_MEAN.propagate_radius(around, value, weights.map_arrays(_as_single_row_matrices), values)[
        ..., 0, :
    ]
    return moved


def _bound_part_mean(at: ErrorContext, weights: Weights | Operand, values: Operand) -> BoundedStage:
    rounding, has_keys = _mean_rounding_model(at.rounding), at.problem.input_array("scores") > -np.inf
    if isinstance(weights, Weights):
        rows: Weights | Operand = Weights(
            _as_single_row_matrices(weights.value), weights.rows.map_arrays(_as_single_row_matrices)
        )
    else:
        rows = weights.map_arrays(_as_single_row_matrices)
    at_rows = replace(at, rounding=rounding, compute_value=lambda: _as_single_row_matrices(at.value))
    bound: Bound = WEIGHTED_MEAN.propagate_error(at_rows, rows, values).final_bound
    # o + w (o_n - o) rounds more than a sum does: in proportion to an output, however small its weight.
    largest = np.where(has_keys[..., np.newaxis], np.abs(zero_nonfinite(values.value)), 0.0).max(axis=-2, initial=0.0)
    others = np.maximum(has_keys.sum(axis=-1) - 1, 0)[..., np.newaxis]
    moved = 4 * others * rounding.compute_unit * largest
    max_error = bound.max_error[..., 0, :] + moved
    variance = bound.sigma[..., 0, :] ** 2 + moved**2
    return BoundedStage(at.value, make_bound(at.value, max_error, variance, 0.0))


def _as_single_row_matrices(array: Real) -> Real:
    """Make a matrix of one row for every query: (..., Lq, N) -> (..., Lq, 1, N)."""
    return array[..., np.newaxis, :]


def _propagate_part_mean_flags(_: FlagContext, weights: Flags, values: Flags) -> Flags:
    return any_over_axes(weights, -1) | any_over_axes(values, -2)[..., 0, :]


MERGED_MEAN = Step(_exact_part_mean, _bound_part_mean, _part_mean_radius, propagate_flags=_propagate_part_mean_flags)
