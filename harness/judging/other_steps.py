"""Steps of attention that were computed as other steps, followed from the exact stages before them in float64.

Each takes a truth, the roundings that are allowed and the errors of the stages before it, and returns the stages that
come out otherwise: values, and per element the largest error that they may have, by the formulas of the stages that
they are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from attncheck.attention import bounds_rows, bounds_softmax
from attncheck.attention.bounds import Bound
from attncheck.attention.bounds_accumulated import attention_bounds, merge_heads, output_of_heads
from attncheck.attention.bounds_logits import LOGITS, logit_errors, logits_of, next_logits, softmax
from attncheck.attention.bounds_output import mean_bound
from attncheck.attention.errors import LogitError, Operand, Real, as_float64
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.judging.scales import scale_of
from attncheck.judging.truth import Truth
from attncheck.reading.canonical import AttentionProblem, call_form, canonical_form

Errors = Mapping[str, Real]
Estimates = dict[str, tuple[Real, Real]]
"""Stage -> values in float64, and per element the largest error that they may have."""
Follow = Callable[[Truth, RoundingModel, Errors], Estimates]

_LN2 = math.log(2)
_SLACK = 1 + 2.0**-10
_HALF_PLACES = 8
"""Roundings of a few operations on a finished result."""


# What is behind a finished result.


def multiplied(stages: tuple[str, ...], factor: float) -> Follow:
    """Multiply stages by a number."""

    def follow(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
        return {stage: _times(truth, stage, factor, rounding, errors) for stage in stages if stage in truth.exact}

    return follow


def _times(truth: Truth, stage: str, factor: float, rounding: RoundingModel, errors: Errors) -> tuple[Real, Real]:
    value = truth.exact[stage].high * factor
    return value, np.abs(factor) * errors[stage] + _few_roundings(rounding) * np.abs(value) + rounding.output_underflow


def _few_roundings(rounding: RoundingModel) -> float:
    return _HALF_PLACES * rounding.coarsest_unit


def in_base_two(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Take log_sum_exp in base 2."""
    return {"log_sum_exp": _times(truth, "log_sum_exp", 1 / _LN2, rounding, errors)}


def mixed(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Add the logarithm in base 2 of the sum to the maximum."""
    return _split_log_sum_exp(truth, rounding, errors, 1.0, 1 / _LN2)


def without_maximum(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Leave the maximum out of log_sum_exp."""
    return _split_log_sum_exp(truth, rounding, errors, 0.0, 1.0)


def _split_log_sum_exp(
    truth: Truth, rounding: RoundingModel, errors: Errors, of_maximum: float, of_rest: float
) -> Estimates:
    """Return a m + b (L - m): maximum and logarithm of the sum, each with a factor."""
    logits, error = _last_logits(truth, errors)
    highest, total = logits.max(axis=-1, initial=-np.inf), truth.exact["log_sum_exp"].high
    maximum = np.where(np.isfinite(highest), highest, 0.0)
    rest = np.where(np.isfinite(total), total - maximum, 0.0)
    value = np.where(np.isfinite(total), of_maximum * maximum + of_rest * rest, total)
    moved = np.where(np.isfinite(logits), error, 0.0).max(axis=-1, initial=0.0)
    rounding_error = _few_roundings(rounding) * (np.abs(maximum) + np.abs(rest))
    worst = (of_maximum + of_rest) * (errors["log_sum_exp"] + 2 * moved) + rounding_error + rounding.output_underflow
    return {"log_sum_exp": (value, np.where(np.isfinite(total), worst, 0.0))}


# Another softmax.


def _last_logits(truth: Truth, errors: Errors) -> tuple[Real, Real]:
    """Return what the softmax sees, and its largest errors."""
    order = [stage for stage in logits_of(truth.options) if stage in truth.exact]
    if not order:
        scores = as_float64(truth.inputs["scores"])
        return scores, np.zeros_like(scores)
    return truth.exact[order[-1]].high, errors[order[-1]]


def softmax_over(axis: int) -> Follow:
    """Normalise along another axis than that of the keys."""

    def follow(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
        logits, error = _last_logits(truth, errors)
        if logits.ndim < -axis:
            return {}
        turned, moved = (np.moveaxis(np.broadcast_to(each, logits.shape), axis, -1) for each in (logits, error))
        weights, worst = (np.moveaxis(each, -1, axis) for each in _softmax_of(turned, moved, rounding)["weights"])
        return {"weights": (weights, worst)} | _behind_weights(truth, weights, worst, rounding, errors)

    return follow


def _softmax_of(logits: Real, error: Real, rounding: RoundingModel) -> Estimates:
    """Return weights and log_sum_exp of logits that are off by ``error`` at most."""
    weights, total = softmax(logits)
    zero = np.zeros_like(logits)
    rows = bounds_rows.rows_of(logits, weights, total, LogitError(error, zero, zero, zero), rounding)
    return {
        "weights": (weights, bounds_softmax.weights_bound(rows, weights, rounding).worst),
        "log_sum_exp": (total, bounds_softmax.log_sum_exp_bound(rows, total, rounding).worst),
    }


def not_renormalised(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Take the softmax of what nothing masks, and leave masked weights out afterwards."""
    return _masked_behind(truth, rounding, errors, None)


def mask_not_renormalised(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Do the same with the mask alone: causality, windows and lengths are there before the softmax."""
    asked = call_form(truth.operation, truth.posed.options, truth.posed.inputs) if truth.posed is not None else None
    if asked is None or "mask" not in asked.inputs:
        return {}
    del asked.inputs["mask"]
    plain = canonical_form(truth.operation, asked.options, asked.inputs)
    logits, _ = _last_logits(truth, errors)
    before = Problem.of(truth.operation, plain.options, plain.inputs).allowed(logits.shape)
    return _masked_behind(truth, rounding, errors, before)


def _masked_behind(
    truth: Truth, rounding: RoundingModel, errors: Errors, before: NDArray[np.bool_] | None
) -> Estimates:
    logits, _ = _last_logits(truth, errors)
    allowed = Problem.of(truth.operation, truth.options, truth.inputs).allowed(logits.shape)
    if allowed is None:
        return {}
    last = [stage for stage in LOGITS[:-1] if stage in truth.exact][-1]
    logits, error = truth.exact[last].high, errors[last]
    if before is not None:
        logits, error = np.where(before, logits, -np.inf), np.where(before, error, 0.0)
    found = _softmax_of(logits, error, rounding)
    weights, worst = (np.where(allowed, each, 0.0) for each in found["weights"])
    found |= {"masked": (logits, error), "weights": (weights, worst)}
    return found | _behind_weights(truth, weights, worst, rounding, errors)


def _behind_weights(truth: Truth, weights: Real, worst: Real, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Follow other weights through the average of the values, and through the output projection."""
    if truth.operation == "softmax":
        return {}
    value = _value(truth, errors, weights.shape[-3])
    mean = np.asarray(weights @ value.value)
    bound = mean_bound(Operand(weights), value, mean, rounding).worst + _SLACK * (worst @ value.magnitude)
    return _behind_mean(truth, mean, bound, rounding)


def _value(truth: Truth, errors: Errors, heads: int) -> Operand:
    if "value" in truth.exact:
        error = errors["value"]
        return Operand(truth.exact["value"].high, error, error**2).for_query_heads(heads)
    return Operand(as_float64(truth.inputs["value"])).for_query_heads(heads)


def _behind_mean(truth: Truth, mean: Real, worst: Real, rounding: RoundingModel) -> Estimates:
    if truth.operation != "multi_head_attention":
        return {"output": (mean, worst)}
    return {"context": (mean, worst), "output": _output_of_heads(truth, mean, worst, rounding)}


def _output_of_heads(truth: Truth, context: Real, worst: Real, rounding: RoundingModel) -> tuple[Real, Real]:
    given = {name: as_float64(array) for name, array in truth.inputs.items() if array.dtype != bool}
    output = merge_heads(context)
    if "output_weight" in given:
        output = output @ given["output_weight"] + given.get("output_bias", 0.0)
    return output, output_of_heads(context, Bound(worst, worst), given, output, rounding).worst


# Other scores.


def squared(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Square the scores."""
    scores, error = truth.exact["scores"].high, errors["scores"]
    squares = scores * scores
    moved = 2 * np.abs(scores) * error + error * error + _few_roundings(rounding) * squares + rounding.score_underflow
    zero = np.zeros_like(scores)
    return _behind_scores(truth, squares, LogitError(moved, zero, zero, zero), rounding, errors)


def _behind_scores(truth: Truth, scores: Real, error: LogitError, rounding: RoundingModel, errors: Errors) -> Estimates:
    given = {name: as_float64(array) for name, array in truth.inputs.items() if array.dtype != bool}
    allowed = Problem.of(truth.operation, truth.options, truth.inputs).allowed(scores.shape)
    values = {"scores": scores}
    for stage in LOGITS[1:]:
        if stage in truth.exact:
            values[stage] = scores = next_logits(stage, scores, truth.options, given, allowed)
    worst = logit_errors("scores", error, given, truth.options, rounding, values)
    found = {stage: (values[stage], each.worst + np.zeros_like(scores)) for stage, each in worst.items()}
    if truth.operation == "scoring":
        return found
    last = found[list(found)[-1]]
    found |= _softmax_of(*last, rounding)
    return found | _behind_weights(truth, *found["weights"], rounding, errors)


# Other heads.


def merged_by_view(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Merge heads without bringing positions before them."""
    context, error = truth.exact["context"].high, errors["context"]
    batch, heads, length, width = context.shape
    seen, moved = (
        each.reshape(batch, length, heads, width).swapaxes(1, 2)
        for each in (np.ascontiguousarray(context), np.ascontiguousarray(error))
    )
    return {"output": _output_of_heads(truth, seen, moved, rounding)}


def split_by_view(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Split the projected width without bringing heads before positions, and attend with what that gives."""
    given = {name: as_float64(array) for name, array in truth.inputs.items() if array.dtype != bool}
    operands = {}
    for name in ("query", "key", "value"):
        shape = truth.exact[name].high.shape
        value, error = (merge_heads(each).reshape(shape) for each in (truth.exact[name].high, errors[name]))
        operands[name] = Operand(value, error, error**2)
    found: Estimates = {name: (each.value, np.asarray(each.worst)) for name, each in operands.items()}
    heads = operands["query"].value.shape[1]
    shared = {name: each.for_query_heads(heads) for name, each in operands.items()}
    scale = scale_of(truth.operation, AttentionProblem(dict(truth.options), dict(truth.inputs)))
    scores = shared["query"].value @ np.swapaxes(shared["key"].value, -1, -2)
    values = {"raw_scores": scores, "scores": scores * scale}
    allowed = Problem.of(truth.operation, truth.options, truth.inputs).allowed(scores.shape)
    scores = values["scores"]
    for stage in LOGITS[1:]:
        if stage in truth.exact:
            values[stage] = scores = next_logits(stage, scores, truth.options, given, allowed)
    values["weights"], values["log_sum_exp"] = softmax(scores)
    values["context"] = values["weights"] @ shared["value"].value
    bounds = attention_bounds(shared, given, truth.options, rounding, values, set(values))
    found |= {stage: (values[stage], bounds[stage].worst) for stage in values}
    return found | {"output": _output_of_heads(truth, *found["context"], rounding)}
