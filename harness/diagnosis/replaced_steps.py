"""Steps of attention that were computed as other steps: readings that are no problem.

Such an answer is followed from the exact stages before it in float64: values, and per element the largest error that
they may have, by the formulas of the stages that it is made of. What float64 itself may be off by is the bound of class
native in float64, and stands in the answer's radius: a result fits where it is within its own class's bound beside it.
No statistics are asked, only the largest error that is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from attncheck.attention.errors import Bound, Elementwise, Finished, Operand, Real, as_float64, exact_logits
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.flags import Flags
from attncheck.attention.problem import LOGITS, Computation
from attncheck.attention.projection import merge_heads
from attncheck.attention.walk import Walk, error_walk, value_walk
from attncheck.judging.alternatives import (
    Change,
    Form,
    Number,
    Reading,
    StepReplacement,
    convention,
    has_scale,
    numbered,
    scale_of,
    widths_of,
)
from attncheck.judging.exact_stages import ExactStages, Stages
from attncheck.judging.truth import Truth
from attncheck.judging.undefined import NOTHING_UNDEFINED
from attncheck.reading.lowering import queries_and_keys
from attncheck.reading.problem import Problem
from attncheck.spec import BY_SCORE, DEFAULT_EMPTY_ROWS, MEANS, OPERATIONS, QUERY_KEY_VALUE, stage_position
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import RoundingModel

Estimates = dict[str, tuple[Real, Real]]
"""Stage -> values in float64, and per element the largest error that they may have."""

_LN2 = math.log(2)
_HALF_PLACES = 8
"""Roundings of a few operations on a finished result."""


@dataclass(frozen=True, eq=False)
class Followed:
    """The exact answer from which another step is followed, a rounding model, and the largest errors of its stages."""

    truth: Truth
    rounding: RoundingModel
    errors: Mapping[str, Real]

    @property
    def stages(self) -> ExactStages:
        """The exact stages, with their canonical problem and its computation."""
        return self.truth.stages

    @property
    def few_roundings(self) -> float:
        """The relative error of a few operations on a finished result."""
        return _HALF_PLACES * self.rounding.coarsest_unit

    def value(self, stage: str) -> Real:
        """Return a stage of the exact answer in float64."""
        return self.truth.exact[stage].high

    def walk(self, states: Mapping[str, Any]) -> Walk:
        """Follow values and errors from other states of some nodes, and from the inputs."""
        problem = self.stages.wide_computation
        states = {name: _with_added(problem, name, state) for name, state in states.items()}
        values = value_walk(problem, {name: state.value for name, state in states.items()})
        return error_walk(problem, self.rounding, values, states=states)

    def estimates(self, walk: Walk, stages: Iterable[str]) -> Estimates:
        """Return what a walk finds for stages as they are returned."""
        without_added, states = self.stages.computation.without_added, {stage: walk.node(stage) for stage in stages}
        return {
            stage: (without_added(stage, state.value), without_added(stage, state.bound(self.rounding).max_error))
            for stage, state in states.items()
        }

    def times(self, stage: str, factor: float) -> tuple[Real, Real]:
        """Multiply a stage by a number."""
        value = self.value(stage) * factor
        error = np.abs(factor) * self.errors[stage] + self.few_roundings * np.abs(value)
        return value, error + self.rounding.output_underflow

    def last_logits(self) -> tuple[Real, Real]:
        """Return what the softmax sees, and its largest errors."""
        order = [stage for stage in LOGITS if stage in self.truth.exact]
        if not order:
            scores = as_float64(self.stages.canonical.inputs["scores"])
            return scores, np.zeros_like(scores)
        return self.value(order[-1]), self.errors[order[-1]]

    def highest_logit(self) -> tuple[Real, Real]:
        """Return the highest logit of every row, and the largest error of any that is finite."""
        logits, error = self.last_logits()
        largest: Real = np.where(np.isfinite(logits), error, 0.0).max(axis=-1, initial=0.0)
        return logits.max(axis=-1, initial=-np.inf), largest

    def before_mask(self) -> tuple[tuple[Real, Real], Flags | None]:
        """Return the logits that meet the mask, with their errors, and where it allows; None where nothing masks."""
        last = [stage for stage in LOGITS[:-1] if stage in self.truth.exact][-1]
        logits = self.value(last)
        return (logits, self.errors[last]), Computation.as_given(self.stages.canonical).kept(logits.shape)

    def softmax_of(self, logits: Real, error: Real) -> Estimates:
        """Return weights and log_sum_exp of logits that are off by ``error`` at most."""
        return self.estimates(self.walk({"masked": exact_logits(logits, error)}), ("weights", "log_sum_exp"))

    def behind_weights(self, weights: Real, max_error: Real) -> Estimates:
        """Follow other weights through the average of the values, and through the output projection."""
        if self.stages.canonical.operation == "softmax":
            return {}
        states = {"weights": Operand(weights, max_error)}
        if "value" in self.truth.exact:
            errors = self.errors["value"]
            states["value"] = Operand(self.value("value"), errors, errors**2)
        walk = self.walk(states)
        return self.estimates(walk, [stage for stage in ("context", "output") if stage in walk.graph])

    def from_logits(self, stage: str, value: Real, moved: Real) -> Estimates:
        """Follow other logits of a stage, and the largest errors that they may have, through all that follows."""
        walk, found = self.walk({stage: exact_logits(value, moved)}), {}
        for each in LOGITS[LOGITS.index(stage) :]:
            if each in self.truth.exact:
                state = walk.node(each)
                both = state.value, state.max_error + np.zeros_like(state.value)
                shown, error = (self.stages.computation.without_added(each, array) for array in both)
                found[each] = shown, error
        if self.stages.canonical.operation == "scoring":
            return found
        found |= self.estimates(walk, ("weights", "log_sum_exp"))
        return found | self.behind_weights(*found["weights"])


Follow = Callable[[Followed], Estimates]


def _with_added(problem: Computation, name: str, state: Any) -> Any:
    is_added = problem.added_keys and isinstance(state, Elementwise)
    return state.mapped(partial(problem.with_added, name)) if is_added else state


# What projections are joined with.


def joined(change: Callable[[Any, int], Any], names: Iterable[str]) -> StepReplacement:
    """Change past and new keys or values, one behind the other, given the length of the past."""

    def follow(at: Followed) -> Estimates:
        walk, states = at.walk({}), dict[str, Any]()
        past = at.stages.canonical.inputs["cached_key"].shape[-2] if "joined_key" in walk.graph else 0
        if not past:
            return {}
        for name in names:
            states[f"joined_{name}"] = walk.node(f"joined_{name}").mapped(lambda part: change(part, past))
        behind = [stage for stage in at.truth.exact if stage_position(stage) >= stage_position("raw_scores")]
        return at.estimates(at.walk(states), behind)

    return replacement_by(follow)


# What is behind a finished result.


def multiplied(stages: tuple[str, ...], factor: float) -> Follow:
    """Multiply stages by a number."""
    return lambda at: {stage: at.times(stage, factor) for stage in stages if stage in at.truth.exact}


def log_sum_exp_as(of_maximum: float, of_rest: float, *, base_two: bool | None = False) -> Follow:
    """Take a m + b (L - m) for log_sum_exp: maximum and logarithm of the sum, each with a factor, in a base or any."""

    def follow(at: Followed) -> Estimates:
        if base_two not in (None, at.stages.canonical.options.get("lse_base") == "2"):
            return {}
        if of_maximum == of_rest:
            return {"log_sum_exp": at.times("log_sum_exp", of_rest)}
        highest, moved = at.highest_logit()
        total, maximum = at.value("log_sum_exp"), np.where(np.isfinite(highest), highest, 0.0)
        rest = np.where(np.isfinite(total), total - maximum, 0.0)
        value = np.where(np.isfinite(total), of_maximum * maximum + of_rest * rest, total)
        rounding_error = at.few_roundings * (np.abs(maximum) + np.abs(rest))
        max_error = (of_maximum + of_rest) * (at.errors["log_sum_exp"] + 2 * moved) + rounding_error
        return {"log_sum_exp": (value, np.where(np.isfinite(total), max_error + at.rounding.output_underflow, 0.0))}

    return follow


# Another softmax.


def softmax_over(axis: int) -> Follow:
    """Normalise along another axis than that of the keys."""

    def follow(at: Followed) -> Estimates:
        logits, error = at.last_logits()
        if logits.ndim < -axis or at.stages.computation.added_keys:  # what is added belongs to the axis of the keys
            return {}
        turned, moved = (np.moveaxis(np.broadcast_to(each, logits.shape), axis, -1) for each in (logits, error))
        weights, max_error = (np.moveaxis(each, -1, axis) for each in at.softmax_of(turned, moved)["weights"])
        return {"weights": (weights, max_error)} | at.behind_weights(weights, max_error)

    return follow


def not_renormalised(at: Followed) -> Estimates:
    """Take the softmax of what nothing masks, and leave masked weights out afterwards."""
    return _masked_behind(at, None)


def mask_not_renormalised(at: Followed) -> Estimates:
    """Do the same with the mask alone: causality, windows and lengths are there before the softmax."""
    asked = at.truth.judged.problem.as_call()
    if "mask" not in asked.inputs:
        return {}
    plain = asked.without_input("mask").canonical()
    return _masked_behind(at, Computation.as_given(plain).kept(at.last_logits()[0].shape))


def _masked_behind(at: Followed, before: Flags | None) -> Estimates:
    (logits, error), allowed = at.before_mask()
    if allowed is None:
        return {}
    if before is not None:
        logits, error = np.where(before, logits, -np.inf), np.where(before, error, 0.0)
    found = at.softmax_of(logits, error)
    weights, max_error = (np.where(allowed, each, 0.0) for each in found["weights"])
    found |= {"masked": (logits, error), "weights": (weights, max_error)}
    return found | at.behind_weights(weights, max_error)


def masked_at_minus_cap(at: Followed) -> Estimates:
    """Give a masked key the logit -softcap: that is what the softcap makes of -inf."""
    (logits, error), allowed = at.before_mask()
    softcap = at.stages.canonical.options.get("softcap")
    if allowed is None or softcap is None:
        return {}
    logits = np.where(allowed, logits, -softcap)
    error = np.where(allowed, error, at.few_roundings * softcap)
    found = at.softmax_of(logits, error) | {"masked": (logits, error)}
    return found | at.behind_weights(*found["weights"])


# Other scores.


def squared(at: Followed) -> Estimates:
    """Square the scores."""
    scores, error = at.value("scores"), at.errors["scores"]
    squares = scores * scores
    moved = 2 * np.abs(scores) * error + error * error + at.few_roundings * squares + at.rounding.score_underflow
    return at.from_logits("scores", squares, moved)


def capped_as(change: Callable[[Real, float, float], Real], slope: Callable[[float, float], float]) -> Follow:
    """Bound scores otherwise than c tanh(s / c): ``change(scores, c, scale)``, of at most ``slope(c, scale)``."""

    def follow(at: Followed) -> Estimates:
        cap, problem = at.stages.canonical.options.get("softcap"), at.truth.judged.problem
        if cap is None or "scores" not in at.truth.exact or OPERATIONS[at.stages.canonical.operation].has_gradients:
            return {}
        scores, error = at.value("scores"), at.errors["scores"]
        numbers = float(cap), scale_of(problem) if has_scale(problem) else 1.0
        value = change(scores, *numbers)
        moved = slope(*numbers) * (error + at.few_roundings * np.abs(scores))
        moved = moved + at.few_roundings * np.abs(value) + at.rounding.score_underflow
        return at.from_logits("capped", value, moved)

    return follow


def scores_times(name: str, power: float) -> Follow:
    """Multiply scores by a power of the lengths of queries or keys, or of both."""

    def follow(at: Followed) -> Estimates:
        query, key = (
            np.linalg.norm(as_float64(at.stages.canonical.inputs[each]), axis=-1) for each in ("query", "key")
        )
        lengths = {"query": query[..., np.newaxis], "key": key[..., np.newaxis, :]}
        factor = lengths[name] if name in lengths else lengths["query"] * lengths["key"]
        if factor.shape[-3] != at.value("scores").shape[-3] or not (factor > 0).all():
            return {}
        factor = factor**power
        value = at.value("scores") * factor
        moved = at.errors["scores"] * factor + at.few_roundings * np.abs(value) + at.rounding.score_underflow
        return at.from_logits("scores", value, moved)

    return follow


def denominator_plus(number: float) -> Follow:
    """Add a number to the sum of exponentials, of which the largest is 1."""

    def follow(at: Followed) -> Estimates:
        errors, is_base_two = at.errors, at.stages.canonical.options.get("lse_base") == "2"
        if is_base_two or not {"log_sum_exp", "weights"} <= at.truth.exact.keys():
            return {}
        (highest, moved), total = at.highest_logit(), at.value("log_sum_exp")
        if not np.isfinite(highest).all() or "sinks" in at.stages.canonical.inputs:
            return {}
        shift = errors["log_sum_exp"] + moved
        parts = np.exp(total - highest)[..., np.newaxis]
        factor = parts / (parts + number)
        weights = at.value("weights") * factor
        of_shift = np.expm1(shift)[..., np.newaxis] * number / (parts + number)
        max_error = errors["weights"] * factor + np.abs(weights) * (of_shift + at.few_roundings)
        max_error = max_error + at.rounding.weight_underflow
        total = np.log(parts[..., 0] + number) + highest
        rounded = at.few_roundings * (np.abs(total) + np.abs(highest) + 1)
        found = {"weights": (weights, max_error), "log_sum_exp": (total, (errors["log_sum_exp"] + 2 * shift) + rounded)}
        return found | at.behind_weights(weights, max_error)

    return follow


# Other heads.


def merged_by_view(at: Followed) -> Estimates:
    """Merge heads without bringing positions before them."""
    context = at.value("context")
    batch, heads, length, width = context.shape
    seen, moved = (
        np.ascontiguousarray(each).reshape(batch, length, heads, width).swapaxes(1, 2)
        for each in (context, at.errors["context"])
    )
    return at.estimates(at.walk({"context": Finished(seen, Bound(moved, moved))}), ("output",))


def split_by_view(at: Followed) -> Estimates:
    """Split the projected width without bringing heads before positions, and attend with what that gives."""
    operands = {}
    for name in QUERY_KEY_VALUE:
        shape = at.value(name).shape
        value, error = (merge_heads(each).reshape(shape) for each in (at.value(name), at.errors[name]))
        operands[name] = Operand(value, error, error**2)
    found: Estimates = {name: (each.value, each.errors[0]) for name, each in operands.items()}
    walk = at.walk(operands)
    behind = [stage for stage in at.truth.exact if stage in walk.graph and stage not in operands]
    return found | at.estimates(walk, behind)


_ATTENTION = ("attention", "multi_head_attention")
_WITH_SOFTMAX = ("softmax", *_ATTENTION, *BY_SCORE)
_WITH_VALUES = (*_ATTENTION, *BY_SCORE)
_MERGED = ("merge_states",)
_WITH_LOG_SUM_EXP = (*_WITH_SOFTMAX, *_MERGED)
_WITH_SCORES = ("scoring", *_ATTENTION, *BY_SCORE)
_HEADS = ("multi_head_attention",)
_CAPPED = ("attention", "scoring")
_COSINE = ("scoring", "cosine_attention")


def replacement_by(follow: Follow, *, only_failing: bool = False, begins_at: str = "") -> StepReplacement:
    """Follow another step with the errors of a rounding model, and with those of float64 itself as radii.

    Of those that ``only_failing`` stages have, what does not fail is the case's own. Nothing is replaced unless the
    stage fails that it ``begins_at``.
    """

    def replacement(truth: Truth, rounding_model: str, failing: Stages) -> Truth | None:
        if not _is_plain(truth) or (begins_at and begins_at not in failing):
            return None
        known = truth.of_readings.setdefault("followed", {})  # the same whoever fails
        if (follow, rounding_model) not in known:
            known[follow, rounding_model] = _followed(follow, truth, rounding_model)
        found, radii = known[follow, rounding_model]
        if not found:
            return None
        changed = [stage for stage in found if stage in truth.exact and (stage in failing or not only_failing)]
        exact = {stage: _enclosure(found[stage][0], radii[stage][1]) for stage in changed}
        bounds = {stage: Bound(found[stage][1], found[stage][1]) for stage in changed}
        stages = ExactStages(truth.judged.canonical, {**truth.exact, **exact})
        known_bounds = {**truth.bounds.of(rounding_model), **bounds}
        return replace(
            truth,
            stages=stages,
            bounds=replace(truth.bounds, stages=stages).with_known(rounding_model, known_bounds),
            undefined=NOTHING_UNDEFINED,
            supports_statistics=False,
        )

    return replacement


def _followed(follow: Follow, truth: Truth, rounding_model: str) -> tuple[Estimates, Estimates]:
    """Follow a step with the errors of a rounding model, and with those of float64."""
    own = {stage: bound.max_error for stage, bound in truth.bounds.of(rounding_model).items()}
    known = {stage: np.abs(each.low) + each.radius for stage, each in truth.exact.items()}
    with np.errstate(all="ignore"):
        found = follow(Followed(truth, truth.bounds.rounding(rounding_model), own))
        return found, follow(Followed(truth, rounding_model_named("native", "float64"), known))


def _is_plain(truth: Truth) -> bool:
    """Whether every row has an answer by arithmetic, and all of it is known."""
    rows, judged = truth.undefined.rows, truth.judged
    conventional = rows is None or (rows.convention == DEFAULT_EMPTY_ROWS and not rows.nan_rows.any())
    is_defined = truth.undefined.elements is None and not truth.stages.inner and judged.query_rows is None
    return conventional and is_defined and "softcap_follows" not in judged.canonical.options


def _enclosure(value: Real, radius: Real) -> Enclosure:
    """Enclose what was computed in float64; NaN has no answer."""
    known = np.isfinite(value)
    radius = np.where(known, radius, np.where(np.isnan(value), np.inf, 0.0))
    return Enclosure(value, np.zeros_like(value), np.broadcast_to(radius, value.shape))


def _step(follow: Follow, operations: tuple[str, ...], answer: str = "") -> Change:
    """Take another step in some operations."""
    replacement = replacement_by(follow)

    def change(problem: Problem) -> Form | None:
        is_there = problem.operation in operations and (follow is not squared or has_scale(problem))
        return Form(problem, replacement=replacement, answer=answer) if is_there else None

    return change


_SOFTMAX = (
    *(
        Reading(f"softmax-over-{axis}", f"the softmax runs over the {axis}, not over the keys",
                _step(softmax_over(number), _WITH_SOFTMAX), stage="weights")
        for axis, number in (("queries", -2), ("heads", -3), ("batch", -4))
    ),
    Reading("weights-not-renormalised", "masked weights are set to zero behind the softmax, the others not "
            "renormalised", _step(not_renormalised, _WITH_VALUES, "not renormalised")),
    Reading("mask-not-renormalised", "weights that the mask forbids are set to zero behind the softmax, and the "
            "others not renormalised", _step(mask_not_renormalised, _WITH_VALUES, "not renormalised")),
    convention("softcap-after-masked", "the softcap is applied after the mask, and masked keys have the logit "
               "-softcap; the case means before it", _step(masked_at_minus_cap, _ATTENTION)),
    Reading("scores-squared", "the scores are squared", _step(squared, _WITH_SCORES), stage="scores"),
    *(
        Reading(f"softcap-{name}", f"the softcap {says}", _step(capped_as(change, slope), _CAPPED), "softcap", "capped")
        for name, says, change, slope in (
            ("twice", "is applied twice", lambda s, c, a: c * np.tanh(np.tanh(s / c)), lambda c, a: 1.0),
            ("not-multiplied-back", "is tanh(s / c), without the factor c", lambda s, c, a: np.tanh(s / c),
             lambda c, a: 1 / c),
            ("not-divided-by", "is c tanh(s)", lambda s, c, a: c * np.tanh(s), lambda c, a: c),
            ("of-twice-scaled-scores", "is of scores that are scaled twice", lambda s, c, a: c * np.tanh(a * s / c),
             lambda c, a: abs(a)),
            ("clips", "clips at c and -c", lambda s, c, a: np.clip(s, -c, c), lambda c, a: 1.0),
            ("by-softsign", "is c s / (c + |s|)", lambda s, c, a: c * s / (c + np.abs(s)), lambda c, a: 1.0),
        )
    ),
    *(
        Reading(f"cosine-times-{slug}", f"scores are {says}", _step(scores_times(name, power), _COSINE), stage="scores")
        for slug, says, name, power in (
            ("length-of-query", "not divided by the length of the query", "query", 1),
            ("length-of-key", "not divided by the length of the key", "key", 1),
            ("inverse-lengths", "divided by the squares of lengths", "both", -1),
        )
    ),
    *(
        Reading(f"denominator-plus-{number:g}", f"{number:g} is added to the sum of the exponentials",
                _step(denominator_plus(number), _WITH_SOFTMAX), stage="weights")
        for number in (1.0, 1e-3, 1e-6, 1e-9)
    ),
    Reading("heads-merged-by-view", "heads are merged by a reshape without a transposition",
            _step(merged_by_view, _HEADS), stage="output"),
    Reading("heads-split-by-view", "heads are split by a reshape without a transposition", _step(split_by_view, _HEADS),
            stage="query"),
)  # fmt: skip
_LOG_SUM_EXP = tuple(
    Reading(f"log-sum-exp-{name}", f"log_sum_exp {says}", _step(follow, operations), stage="log_sum_exp")
    for name, says, follow, operations in (
        ("base-2", "is in base 2: it lacks the factor ln(2)", log_sum_exp_as(1 / _LN2, 1 / _LN2), _WITH_LOG_SUM_EXP),
        ("base-e", "is in base e: it has the factor ln(2)", log_sum_exp_as(_LN2, _LN2, base_two=True), _MERGED),
        ("mixed-base", "adds the logarithm in base 2 of the sum to the maximum", log_sum_exp_as(1.0, 1 / _LN2),
         _WITH_LOG_SUM_EXP),
        ("of-maximum-alone", "is the maximum alone", log_sum_exp_as(1.0, 0.0), _WITH_LOG_SUM_EXP),
        ("without-maximum", "lacks the maximum that was subtracted", log_sum_exp_as(0.0, 1.0, base_two=None),
         _WITH_LOG_SUM_EXP),
    )
)  # fmt: skip


def in_operations(
    operations: tuple[str, ...], number: Callable[[Problem], float | None]
) -> Callable[[Problem], float | None]:
    """Return a number for problems of some operations."""
    return lambda problem: number(problem) if problem.operation in operations else None


def powers(prefix: str, name: str, words: str, size: Callable[[Problem], float | None]) -> Sequence[Number]:
    """Return a factor that follows from the shapes, and its inverse."""

    def inverse(problem: Problem) -> float | None:
        number = size(problem)
        return 1 / number if number else None

    return (
        (f"{prefix}-times-{name}", f"is {words} times too large", size),
        (f"{prefix}-over-{name}", f"is {words} times too small", inverse),
    )


def width_to(power: float) -> Callable[[Problem], float | None]:
    """Return a power of the width of a head, where there are features."""

    def number(problem: Problem) -> float | None:
        width = widths_of(problem)["D"]
        return float(width**power) if width else None

    return number


def _heads_in(problem: Problem) -> float | None:
    widths = widths_of(problem)
    return widths["H D"] / widths["D"] if widths["D"] else None


def _keys_in(problem: Problem) -> float:
    return float(queries_and_keys(problem.inputs)[1])


def multiplied_stages(*stages: str, each: bool = False) -> Callable[[Problem, float, str], Sequence[Form]]:
    """Multiply those of some stages that fail; ``each``, what is returned of them may begin at any one."""

    def change(problem: Problem, factor: float, words: str) -> Sequence[Form]:
        return [
            Form(
                problem,
                stage=stages[first],
                replacement=replacement_by(
                    multiplied(stages[first:], factor), only_failing=True, begins_at=stages[first] if each else ""
                ),
            )
            for first in range(len(stages) if each else 1)
        ]

    return change


_OUTPUTS = numbered(
    lambda words: f"the {{stage}} {words}",
    "output times",
    (
        ("output-doubled", "is twice as large", in_operations(_WITH_SOFTMAX, lambda problem: 2.0)),
        ("output-halved", "is half as large", in_operations(_WITH_SOFTMAX, lambda problem: 0.5)),
        ("output-negated", "is the negative", in_operations(_WITH_SOFTMAX, lambda problem: -1.0)),
        *powers("output", "keys", "the number of keys", in_operations(_WITH_SOFTMAX, _keys_in)),
        *powers("output", "root-of-width", "sqrt(D)", in_operations(_ATTENTION, width_to(0.5))),
        *powers("output", "width", "D", in_operations(_ATTENTION, width_to(1))),
        *powers("output", "heads", "the number of heads", in_operations(_ATTENTION, _heads_in)),
    ),
    multiplied_stages("weights", *MEANS, each=True),
)

REPLACED_STEPS: Mapping[str, Sequence[Reading]] = {
    "Softmax, log_sum_exp and output": (*_SOFTMAX, *_LOG_SUM_EXP, *_OUTPUTS),
}
"""Readings that are another step, by what they are about."""
