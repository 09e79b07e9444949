"""Steps of attention that were computed as other steps, followed from the exact stages before them in float64.

Each takes a truth, the roundings that are allowed and the errors of the stages before it, and returns the stages that
come out otherwise: values, and per element the largest error that they may have, by the formulas of the stages that
they are made of.

Steps of attention that were computed as other steps: answers that no problem has.

Such an answer is followed from the exact stages before it in float64, and so are its error bounds, by the formulas of
the stages that it is made of. What float64 itself may be off by is the bound of class native in float64, and stands in
the answer's radius: a result fits where it is within its own class's bound beside that. No statistics are asked, only
the largest error that is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import for_bounds
from attncheck.attention.enclosure import Enclosure
from attncheck.attention.errors import Bound, Finished, Logits, Operand, Real, as_float64, exact_logits
from attncheck.attention.problem import LOGITS, Computation
from attncheck.attention.projection import merge_heads
from attncheck.attention.rounding import RoundingModel, rounding_model_named
from attncheck.attention.walk import Walk, error_walk, value_walk
from attncheck.judging.alternatives import Alternative, StepReplacement, queries_and_keys
from attncheck.judging.residuals import has_scale, scale_of, widths_of
from attncheck.judging.truth import Stages, Truth
from attncheck.reading.lowering import Problem
from attncheck.spec import BY_SCORE, DEFAULT_EMPTY_ROWS, MEANS, QUERY_KEY_VALUE
from attncheck.verdicts import Verdict

Errors = Mapping[str, Real]
Estimates = dict[str, tuple[Real, Real]]
"""Stage -> values in float64, and per element the largest error that they may have."""
Follow = Callable[[Truth, RoundingModel, Errors], Estimates]

_LN2 = math.log(2)
_HALF_PLACES = 8
"""Roundings of a few operations on a finished result."""


def _walk_from(truth: Truth, rounding: RoundingModel, states: Mapping[str, Any]) -> Walk:
    """Follow values and errors from other states of some nodes, and from the inputs."""
    problem = for_bounds(_problem(truth))
    states = {name: _with_added(problem, name, state) for name, state in states.items()}
    values = value_walk(problem, {name: state.value for name, state in states.items()})
    return error_walk(problem, rounding, values, states=states)


def _problem(truth: Truth) -> Computation:
    return Computation.of(truth.canonical)


def _with_added(problem: Computation, name: str, state: Any) -> Any:
    if not problem.added_keys or not isinstance(state, Logits | Operand):
        return state
    parts = {each.name: getattr(state, each.name) for each in fields(state)}
    arrays = {part: array for part, array in parts.items() if isinstance(array, np.ndarray)}
    return type(state)(**{**parts, **{part: problem.with_added(name, array) for part, array in arrays.items()}})


def _estimates(truth: Truth, walk: Walk, stages: Iterable[str], rounding: RoundingModel) -> Estimates:
    """Return what a walk finds for stages as they are returned."""
    without_added, states = _problem(truth).without_added, {stage: walk.node(stage) for stage in stages}
    return {
        stage: (without_added(stage, state.value), without_added(stage, state.bound(rounding).max_error))
        for stage, state in states.items()
    }


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
    if _is_in_base_two(truth):
        return {}
    return {"log_sum_exp": _times(truth, "log_sum_exp", 1 / _LN2, rounding, errors)}


def in_base_e(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Take log_sum_exp in base e where base 2 is asked for."""
    if not _is_in_base_two(truth):
        return {}
    return {"log_sum_exp": _times(truth, "log_sum_exp", _LN2, rounding, errors)}


def mixed(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Add the logarithm in base 2 of the sum to the maximum."""
    if _is_in_base_two(truth):
        return {}
    return _split_log_sum_exp(truth, rounding, errors, 1.0, 1 / _LN2)


def without_maximum(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Leave the maximum out of log_sum_exp."""
    return _split_log_sum_exp(truth, rounding, errors, 0.0, 1.0)


def _is_in_base_two(truth: Truth) -> bool:
    return truth.options.get("lse_base") == "2"


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
    max_error = (
        (of_maximum + of_rest) * (errors["log_sum_exp"] + 2 * moved) + rounding_error + rounding.output_underflow
    )
    return {"log_sum_exp": (value, np.where(np.isfinite(total), max_error, 0.0))}


# Another softmax.


def _last_logits(truth: Truth, errors: Errors) -> tuple[Real, Real]:
    """Return what the softmax sees, and its largest errors."""
    order = [stage for stage in LOGITS if stage in truth.exact]
    if not order:
        scores = as_float64(truth.inputs["scores"])
        return scores, np.zeros_like(scores)
    return truth.exact[order[-1]].high, errors[order[-1]]


def softmax_over(axis: int) -> Follow:
    """Normalise along another axis than that of the keys."""

    def follow(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
        logits, error = _last_logits(truth, errors)
        if logits.ndim < -axis or _problem(truth).added_keys:  # what is added belongs to the axis of the keys
            return {}
        turned, moved = (np.moveaxis(np.broadcast_to(each, logits.shape), axis, -1) for each in (logits, error))
        weights, max_error = (
            np.moveaxis(each, -1, axis) for each in _softmax_of(truth, turned, moved, rounding)["weights"]
        )
        return {"weights": (weights, max_error)} | _behind_weights(truth, weights, max_error, rounding, errors)

    return follow


def _softmax_of(truth: Truth, logits: Real, error: Real, rounding: RoundingModel) -> Estimates:
    """Return weights and log_sum_exp of logits that are off by ``error`` at most."""
    walk = _walk_from(truth, rounding, {"masked": exact_logits(logits, error)})
    return _estimates(truth, walk, ("weights", "log_sum_exp"), rounding)


def not_renormalised(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Take the softmax of what nothing masks, and leave masked weights out afterwards."""
    return _masked_behind(truth, rounding, errors, None)


def mask_not_renormalised(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Do the same with the mask alone: causality, windows and lengths are there before the softmax."""
    asked = truth.problem.called() if truth.problem is not None else None
    if asked is None or "mask" not in asked.inputs:
        return {}
    plain = asked.without_input("mask").canonical()
    logits, _ = _last_logits(truth, errors)
    before = Computation.as_given(plain).kept(logits.shape)
    return _masked_behind(truth, rounding, errors, before)


def _masked_behind(
    truth: Truth, rounding: RoundingModel, errors: Errors, before: NDArray[np.bool_] | None
) -> Estimates:
    (logits, error), allowed = _before_mask(truth, errors)
    if allowed is None:
        return {}
    if before is not None:
        logits, error = np.where(before, logits, -np.inf), np.where(before, error, 0.0)
    found = _softmax_of(truth, logits, error, rounding)
    weights, max_error = (np.where(allowed, each, 0.0) for each in found["weights"])
    found |= {"masked": (logits, error), "weights": (weights, max_error)}
    return found | _behind_weights(truth, weights, max_error, rounding, errors)


def _before_mask(truth: Truth, errors: Errors) -> tuple[tuple[Real, Real], NDArray[np.bool_] | None]:
    """Return the logits that meet the mask with their largest errors, and where it allows; None where nothing masks."""
    last = [stage for stage in LOGITS[:-1] if stage in truth.exact][-1]
    logits = truth.exact[last].high
    allowed = Computation.as_given(truth.canonical).kept(logits.shape)
    return (logits, errors[last]), allowed


def masked_at_minus_cap(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Give a masked key the logit -softcap: that is what the softcap makes of -inf."""
    (logits, error), allowed = _before_mask(truth, errors)
    softcap = truth.options.get("softcap")
    if allowed is None or softcap is None:
        return {}
    logits = np.where(allowed, logits, -softcap)
    error = np.where(allowed, error, _few_roundings(rounding) * softcap)
    found = _softmax_of(truth, logits, error, rounding) | {"masked": (logits, error)}
    return found | _behind_weights(truth, *found["weights"], rounding, errors)


def _behind_weights(truth: Truth, weights: Real, max_error: Real, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Follow other weights through the average of the values, and through the output projection."""
    if truth.operation == "softmax":
        return {}
    states = {"weights": Operand(weights, max_error)}
    if "value" in truth.exact:
        states["value"] = _projected(truth, errors, "value")
    walk = _walk_from(truth, rounding, states)
    return _estimates(truth, walk, [stage for stage in ("context", "output") if stage in walk.graph], rounding)


def _projected(truth: Truth, errors: Errors, name: str) -> Operand:
    return Operand(truth.exact[name].high, errors[name], errors[name] ** 2)


# Other scores.


def squared(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Square the scores."""
    problem, scores, error = _problem(truth), truth.exact["scores"].high, errors["scores"]
    squares = scores * scores
    moved = 2 * np.abs(scores) * error + error * error + _few_roundings(rounding) * squares + rounding.score_underflow
    walk = _walk_from(truth, rounding, {"scores": exact_logits(squares, moved)})
    found = {}
    for stage in LOGITS:
        if stage in truth.exact:
            state = walk.node(stage)
            value, error = state.value, state.max_error + np.zeros_like(state.value)
            found[stage] = problem.without_added(stage, value), problem.without_added(stage, error)
    if truth.operation == "scoring":
        return found
    found |= _estimates(truth, walk, ("weights", "log_sum_exp"), rounding)
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
    walk = _walk_from(truth, rounding, {"context": Finished(seen, Bound(moved, moved))})
    return _estimates(truth, walk, ("output",), rounding)


def split_by_view(truth: Truth, rounding: RoundingModel, errors: Errors) -> Estimates:
    """Split the projected width without bringing heads before positions, and attend with what that gives."""
    operands = {}
    for name in QUERY_KEY_VALUE:
        shape = truth.exact[name].high.shape
        value, error = (merge_heads(each).reshape(shape) for each in (truth.exact[name].high, errors[name]))
        operands[name] = Operand(value, error, error**2)
    found: Estimates = {name: (each.value, np.asarray(each.max_error)) for name, each in operands.items()}
    walk = _walk_from(truth, rounding, operands)
    behind = [stage for stage in truth.exact if stage in walk.graph and stage not in operands]
    return found | _estimates(truth, walk, behind, rounding)


_ATTENTION = ("attention", "multi_head_attention")
_WITH_SOFTMAX = ("softmax", *_ATTENTION, *BY_SCORE)
_WITH_VALUES = (*_ATTENTION, *BY_SCORE)
_MERGED = ("merge_states",)
_WITH_LOG_SUM_EXP = (*_WITH_SOFTMAX, *_MERGED)
_WITH_SCORES = ("scoring", *_ATTENTION, *BY_SCORE)
_HEADS = ("multi_head_attention",)


@dataclass(frozen=True)
class _Step:
    """A step that may have been taken for another, at a stage of some operations."""

    name: str
    description: str
    stage: str
    follow: Follow
    operations: tuple[str, ...]
    answer: str = ""
    verdict: Verdict = Verdict.NUMERIC


_STEPS = (
    _Step("log-sum-exp-base-2", "log_sum_exp is in base 2: it lacks the factor ln(2)", "log_sum_exp", in_base_two,
          _WITH_LOG_SUM_EXP),
    _Step("log-sum-exp-base-e", "log_sum_exp is in base e: it has the factor ln(2)", "log_sum_exp", in_base_e,
          _MERGED),
    _Step("log-sum-exp-mixed-base", "log_sum_exp adds the logarithm in base 2 of the sum to the maximum", "log_sum_exp",
          mixed, _WITH_LOG_SUM_EXP),
    _Step("log-sum-exp-without-maximum", "log_sum_exp lacks the maximum that was subtracted", "log_sum_exp",
          without_maximum, _WITH_LOG_SUM_EXP),
    _Step("softmax-over-queries", "the softmax runs over the queries, not over the keys", "weights", softmax_over(-2),
          _WITH_SOFTMAX),
    _Step("softmax-over-heads", "the softmax runs over the heads, not over the keys", "weights", softmax_over(-3),
          _WITH_SOFTMAX),
    _Step("softmax-over-batch", "the softmax runs over the batch, not over the keys", "weights", softmax_over(-4),
          _WITH_SOFTMAX),
    _Step("weights-not-renormalised", "masked weights are set to zero behind the softmax, the others not renormalised",
          "masked", not_renormalised, _WITH_VALUES, "not renormalised"),
    _Step("mask-not-renormalised", "weights that the mask forbids are set to zero behind the softmax, and the "
          "others not renormalised", "masked", mask_not_renormalised, _WITH_VALUES, "not renormalised"),
    _Step("softcap-after-masked", "the softcap is applied after the mask, and masked keys have the logit -softcap; the "
          "case means before it", "masked", masked_at_minus_cap, _ATTENTION, verdict=Verdict.SEMANTIC),
    _Step("scores-squared", "the scores are squared", "scores", squared, _WITH_SCORES),
    _Step("heads-merged-by-view", "heads are merged by a reshape without a transposition", "output", merged_by_view,
          _HEADS),
    _Step("heads-split-by-view", "heads are split by a reshape without a transposition", "query", split_by_view,
          _HEADS),
)  # fmt: skip


def replaced_steps_of(problem: Problem) -> Iterator[Alternative]:
    """Yield the steps that may have been taken for others in an operation."""
    for step in _STEPS:
        is_there = step.follow is not squared or has_scale(problem)
        if problem.operation in step.operations and is_there:
            found = _convention(step.name, step.description, step.stage, problem, _replacement(step.follow))
            yield replace(found, answer=step.answer, verdict=step.verdict)
    if problem.operation == "attention_gradients":
        yield from _gradients(problem)
    if problem.operation in _WITH_SOFTMAX:
        yield from _outputs(problem)


def _gradients(problem: Problem) -> Iterator[Alternative]:
    scale = scale_of(problem)
    width = widths_of(problem)["D"]
    factors = {
        "unscaled": (1 / scale if scale else 1.0, "lacks the scale"),
        "scaled-twice": (scale, "is scaled twice"),
        **_powers({"root-of-width": (math.sqrt(width), "sqrt(D)"), "width": (width, "D")}),
    }
    yield from _multiples("gradients", ("grad_query", "grad_key"), factors, problem)
    if "bias" in problem.inputs:
        description = "the gradient of the bias is scaled like that of the scores"
        replacement = _replacement(multiplied(("grad_bias",), scale))
        yield _convention("bias-gradient-scaled", description, "grad_bias", problem, replacement)


def _outputs(problem: Problem) -> Iterator[Alternative]:
    """Yield weights, or what they average, times a number that follows from the shapes."""
    sizes = {"keys": (float(queries_and_keys(problem)[1]), "the number of keys")}
    if problem.operation in _ATTENTION:
        widths = widths_of(problem)
        sizes["root-of-width"] = (math.sqrt(widths["D"]), "sqrt(D)")
        sizes["width"] = (widths["D"], "D")
        sizes["heads"] = (widths["H D"] / widths["D"], "the number of heads")
    factors = {
        "doubled": (2.0, "is twice as large"),
        "halved": (0.5, "is half as large"),
        "negated": (-1.0, "is the negative"),
        **_powers(sizes),
    }
    stages = ("weights", *MEANS)
    for first in range(len(stages)):  # what is returned of them begins there
        yield from _multiples("output", stages[first:], factors, problem, begins_at=stages[first])


def _powers(sizes: Mapping[str, tuple[float, str]]) -> dict[str, tuple[float, str]]:
    times = {f"times-{name}": (size, f"is {words} times too large") for name, (size, words) in sizes.items()}
    over = {f"over-{name}": (1 / (size or 1.0), f"is {words} times too small") for name, (size, words) in sizes.items()}
    return times | over


def _multiples(
    prefix: str,
    stages: tuple[str, ...],
    factors: Mapping[str, tuple[float, str]],
    problem: Problem,
    begins_at: str = "",
) -> Iterator[Alternative]:
    """Yield those of some stages that fail, times a number; numbers that are the same are one answer."""
    same = {name: f"{factor:.12g}" for name, (factor, _) in factors.items()}
    for name, (factor, description) in factors.items():
        replacement = _replacement(multiplied(stages, factor), only_failing=True, begins_at=begins_at)
        alike = [other for key, (_, other) in factors.items() if same[key] == same[name]]
        unsure = f"the {{stage}} {' or '.join(alike)}"
        found = _convention(f"{prefix}-{name}", f"the {{stage}} {description}", stages[0], problem, replacement)
        yield replace(found, answer=f"{prefix} times {same[name]}", unsure=unsure)


def _convention(name: str, description: str, stage: str, problem: Problem, replacement: StepReplacement) -> Alternative:
    return Alternative(name, description, stage, problem, Verdict.NUMERIC, replacement=replacement)


def _replacement(follow: Follow, *, only_failing: bool = False, begins_at: str = "") -> StepReplacement:
    def replacement(truth: Truth, rounding_model: str, failing: Stages) -> Truth | None:
        if not _is_plain(truth) or (begins_at and begins_at not in failing):
            return None
        own = {stage: bound.max_error for stage, bound in truth.bounds(rounding_model).items()}
        known = {stage: np.abs(each.low) + each.radius for stage, each in truth.exact.items()}
        with np.errstate(all="ignore"):
            found = follow(truth, truth.rounding(rounding_model), own)
            radii = follow(truth, rounding_model_named("native", "float64"), known)
        if not found:
            return None
        changed = [stage for stage in found if stage in truth.exact and (stage in failing or not only_failing)]
        exact = {stage: _enclosure(found[stage][0], radii[stage][1]) for stage in changed}
        bounds = {stage: Bound(found[stage][1], found[stage][1]) for stage in changed}
        return _other(truth, {**truth.exact, **exact}, rounding_model, {**truth.bounds(rounding_model), **bounds})

    return replacement


def _other(truth: Truth, exact: Mapping[str, Enclosure], rounding_model: str, bounds: Mapping[str, Bound]) -> Truth:
    return replace(
        truth,
        exact=exact,
        solved={},
        undefined_rows=None,
        supports_statistics=False,
        _bounds={rounding_model: dict(bounds)},
        _readings={},
    )


def _is_plain(truth: Truth) -> bool:
    """Whether every row has an answer by arithmetic, and all of it is known."""
    rows = truth.undefined_rows
    conventional = rows is None or (rows.convention == DEFAULT_EMPTY_ROWS and not rows.nan_rows.any())
    is_defined = truth.undefined_elements is None and not truth.inner
    return conventional and is_defined and truth.query_rows is None and "softcap_follows" not in truth.options


def _enclosure(value: Real, radius: Real) -> Enclosure:
    """Enclose what was computed in float64; NaN has no answer."""
    known = np.isfinite(value)
    radius = np.where(known, radius, np.where(np.isnan(value), np.inf, 0.0))
    return Enclosure(value, np.zeros_like(value), np.broadcast_to(radius, value.shape))
