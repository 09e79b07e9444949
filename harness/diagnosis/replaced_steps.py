"""Readings that replace a step of attention by another step, such as a softmax over the queries.

No other problem has such an answer, so the oracle cannot compute it. Each reading computes its stages in float64 from
the exact stages before the step: values, and for each element the largest possible error under a rounding model, by the
formulas of the steps. The error of float64 itself is the bound of class native in float64; it becomes the radius of the
answer. A result fits if it is within the bound of its class around that radius. Only the largest errors count, no
statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from attncheck.attention.errors import Bound, BoundedStage, Elementwise, Operand, Real, as_float64, logits_from_values
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.flags import Flags
from attncheck.attention.problem import LOGITS, Computation
from attncheck.attention.projection import merge_heads
from attncheck.attention.walk import Walk, error_walk, value_walk
from attncheck.judging.alternatives import (
    Change,
    NumberRow,
    Reading,
    ReadingForm,
    StepReplacement,
    convention_reading,
    has_scale,
    intended_scale,
    number_readings,
    widths_for_scale,
)
from attncheck.judging.exact_stages import ExactStages, Stages
from attncheck.judging.truth import Truth
from attncheck.judging.undefined import NOTHING_UNDEFINED
from attncheck.reading.lowering import count_queries_and_keys
from attncheck.reading.problem import Problem
from attncheck.spec import DEFAULT_EMPTY_ROWS, MEANS, OPERATIONS, OPERATIONS_BY_SCORE, QUERY_KEY_VALUE, stage_position
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import RoundingModel

ApproximateStages = dict[str, tuple[Real, Real]]
"""Stage -> values in float64, and the largest error of each element."""

_LN2 = math.log(2)
_FEW_ROUNDINGS_COUNT = 8
"""Number of unit roundoffs that bound a few operations on a finished result."""


@dataclass(frozen=True, eq=False)
class ReplacedStepContext:
    """The exact answer before a replaced step, a rounding model, and the largest errors of the stages."""

    truth: Truth
    rounding: RoundingModel
    max_errors: Mapping[str, Real]

    @property
    def exact_stages(self) -> ExactStages:
        """The exact stages, with their canonical problem and its computation."""
        return self.truth.stages

    @property
    def few_roundings_error(self) -> float:
        """The relative error of a few operations on a finished result."""
        return _FEW_ROUNDINGS_COUNT * self.rounding.coarsest_unit

    def exact_value(self, stage: str) -> Real:
        """Return a stage of the exact answer in float64."""
        return self.truth.exact[stage].high

    def walk_from_states(self, states: Mapping[str, Any]) -> Walk:
        """Walk over the graph with other states of some nodes, computing values and errors."""
        problem = self.exact_stages.float64_computation
        if problem.added_keys:
            states = {
                name: state.map_arrays(partial(problem.with_added_key, name))
                if isinstance(state, Elementwise)
                else state
                for name, state in states.items()
            }
        values = value_walk(problem, {name: state.value for name, state in states.items()})
        return error_walk(problem, self.rounding, values, states=states)

    def convert_to_returned_stages(self, walk: Walk, stages: Iterable[str]) -> ApproximateStages:
        """Return stages of a walk, in the form in which implementations return them."""
        without_added_key, states = (
            self.exact_stages.computation.without_added_key,
            {stage: walk.evaluate(stage) for stage in stages},
        )
        return {
            stage: (
                without_added_key(stage, state.value),
                without_added_key(stage, state.bound(self.rounding).max_error),
            )
            for stage, state in states.items()
        }

    def multiply_stage(self, stage: str, factor: float) -> tuple[Real, Real]:
        """Multiply a stage by a number."""
        value = self.exact_value(stage) * factor
        error = np.abs(factor) * self.max_errors[stage] + self.few_roundings_error * np.abs(value)
        return value, error + self.rounding.output_underflow

    def last_logits_and_errors(self) -> tuple[Real, Real]:
        """Return the input of the softmax, and its largest errors."""
        order = [stage for stage in LOGITS if stage in self.truth.exact]
        if not order:
            scores = as_float64(self.exact_stages.canonical_problem.inputs["scores"])
            return scores, np.zeros_like(scores)
        return self.exact_value(order[-1]), self.max_errors[order[-1]]

    def row_maxima_and_errors(self) -> tuple[Real, Real]:
        """Return the highest logit of each row, and the largest error of the row's finite logits."""
        logits, error = self.last_logits_and_errors()
        largest: Real = np.where(np.isfinite(logits), error, 0.0).max(axis=-1, initial=0.0)
        return logits.max(axis=-1, initial=-np.inf), largest

    def logits_before_mask(self) -> tuple[tuple[Real, Real], Flags | None]:
        """Return the logits before the mask with their errors, and the mask; None as the mask if nothing is masked."""
        last = [stage for stage in LOGITS[:-1] if stage in self.truth.exact][-1]
        logits = self.exact_value(last)
        return (logits, self.max_errors[last]), Computation.from_problem_without_added_key(
            self.exact_stages.canonical_problem
        ).flag_unmasked_scores(logits.shape)

    def softmax_with_errors(self, logits: Real, error: Real) -> ApproximateStages:
        """Return weights and log_sum_exp of logits that are off by ``error`` at most."""
        return self.convert_to_returned_stages(
            self.walk_from_states({"masked": logits_from_values(logits, error)}), ("weights", "log_sum_exp")
        )

    def stages_after_weights(self, weights: Real, max_error: Real) -> ApproximateStages:
        """Compute context and output from other weights."""
        if self.exact_stages.canonical_problem.operation == "softmax":
            return {}
        states = {"weights": Operand(weights, max_error)}
        if "value" in self.truth.exact:
            errors = self.max_errors["value"]
            states["value"] = Operand(self.exact_value("value"), errors, errors**2)
        walk = self.walk_from_states(states)
        return self.convert_to_returned_stages(walk, [stage for stage in ("context", "output") if stage in walk.graph])

    def stages_from_logits(self, stage: str, value: Real, moved: Real) -> ApproximateStages:
        """Compute a logits stage and all later stages from other values of it and their largest errors."""
        walk, results = self.walk_from_states({stage: logits_from_values(value, moved)}), {}
        for logits_stage in LOGITS[LOGITS.index(stage) :]:
            if logits_stage in self.truth.exact:
                state = walk.evaluate(logits_stage)
                both = state.value, state.max_error + np.zeros_like(state.value)
                shown, error = (self.exact_stages.computation.without_added_key(logits_stage, array) for array in both)
                results[logits_stage] = shown, error
        if self.exact_stages.canonical_problem.operation == "scoring":
            return results
        results |= self.convert_to_returned_stages(walk, ("weights", "log_sum_exp"))
        return results | self.stages_after_weights(*results["weights"])


StepRule = Callable[[ReplacedStepContext], ApproximateStages]


# Joined past and new keys of projections.


def change_joined_past(change: Callable[[Any, int], Any], names: Iterable[str]) -> StepReplacement:
    """Change past keys or values joined with the new ones, given the length of the past."""

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        walk, states = at.walk_from_states({}), dict[str, Any]()
        past = at.exact_stages.canonical_problem.inputs["cached_key"].shape[-2] if "joined_key" in walk.graph else 0
        if not past:
            return {}
        for name in names:
            states[f"joined_{name}"] = walk.evaluate(f"joined_{name}").map_arrays(lambda part: change(part, past))
        later = [stage for stage in at.truth.exact if stage_position(stage) >= stage_position("raw_scores")]
        return at.convert_to_returned_stages(at.walk_from_states(states), later)

    return make_step_replacement(compute_stages)


# Changes of a finished result.


def multiply_stages(stages: tuple[str, ...], factor: float) -> StepRule:
    """Multiply stages by a number."""
    return lambda at: {stage: at.multiply_stage(stage, factor) for stage in stages if stage in at.truth.exact}


def change_log_sum_exp(of_maximum: float, of_rest: float, *, base_two: bool | None = False) -> StepRule:
    """Return a m + b (L - m) as log_sum_exp L of maximum m, for factors a and b.

    If ``base_two`` is not None, only for a log_sum_exp that the case has in base 2, or not.
    """

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        if base_two not in (None, at.exact_stages.canonical_problem.options.get("lse_base") == "2"):
            return {}
        if of_maximum == of_rest:
            return {"log_sum_exp": at.multiply_stage("log_sum_exp", of_rest)}
        highest, moved = at.row_maxima_and_errors()
        total, maximum = at.exact_value("log_sum_exp"), np.where(np.isfinite(highest), highest, 0.0)
        rest = np.where(np.isfinite(total), total - maximum, 0.0)
        value = np.where(np.isfinite(total), of_maximum * maximum + of_rest * rest, total)
        rounding_error = at.few_roundings_error * (np.abs(maximum) + np.abs(rest))
        max_error = (of_maximum + of_rest) * (at.max_errors["log_sum_exp"] + 2 * moved) + rounding_error
        return {"log_sum_exp": (value, np.where(np.isfinite(total), max_error + at.rounding.output_underflow, 0.0))}

    return compute_stages


# Another softmax.


def softmax_over_axis(axis: int) -> StepRule:
    """Normalise along another axis than that of the keys."""

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        logits, error = at.last_logits_and_errors()
        if (
            logits.ndim < -axis or at.exact_stages.computation.added_keys
        ):  # what is added belongs to the axis of the keys
            return {}
        turned, moved = (np.moveaxis(np.broadcast_to(array, logits.shape), axis, -1) for array in (logits, error))
        weights, max_error = (
            np.moveaxis(array, -1, axis) for array in at.softmax_with_errors(turned, moved)["weights"]
        )
        return {"weights": (weights, max_error)} | at.stages_after_weights(weights, max_error)

    return compute_stages


def mask_after_softmax(at: ReplacedStepContext) -> ApproximateStages:
    """Take the softmax of unmasked logits, and set masked weights to zero afterwards."""
    return _zero_weights_after_softmax(at, None)


def only_mask_after_softmax(at: ReplacedStepContext) -> ApproximateStages:
    """Do the same only with the mask: causality, windows and lengths apply before the softmax."""
    call = at.truth.judged_problem.problem_without_layout.as_call()
    if "mask" not in call.inputs:
        return {}
    plain = call.without_input("mask").canonical()
    return _zero_weights_after_softmax(
        at, Computation.from_problem_without_added_key(plain).flag_unmasked_scores(at.last_logits_and_errors()[0].shape)
    )


def _zero_weights_after_softmax(at: ReplacedStepContext, before: Flags | None) -> ApproximateStages:
    (logits, error), allowed = at.logits_before_mask()
    if allowed is None:
        return {}
    if before is not None:
        logits, error = np.where(before, logits, -np.inf), np.where(before, error, 0.0)
    results = at.softmax_with_errors(logits, error)
    weights, max_error = (np.where(allowed, array, 0.0) for array in results["weights"])
    results |= {"masked": (logits, error), "weights": (weights, max_error)}
    return results | at.stages_after_weights(weights, max_error)


def mask_at_minus_softcap(at: ReplacedStepContext) -> ApproximateStages:
    """Give a masked key the logit -softcap, which is the softcap of -inf."""
    (logits, error), allowed = at.logits_before_mask()
    softcap = at.exact_stages.canonical_problem.options.get("softcap")
    if allowed is None or softcap is None:
        return {}
    logits = np.where(allowed, logits, -softcap)
    error = np.where(allowed, error, at.few_roundings_error * softcap)
    results = at.softmax_with_errors(logits, error) | {"masked": (logits, error)}
    return results | at.stages_after_weights(*results["weights"])


# Other scores.


def square_scores(at: ReplacedStepContext) -> ApproximateStages:
    """Square the scores."""
    scores, error = at.exact_value("scores"), at.max_errors["scores"]
    squares = scores * scores
    moved = 2 * np.abs(scores) * error + error * error + at.few_roundings_error * squares + at.rounding.score_underflow
    return at.stages_from_logits("scores", squares, moved)


def change_softcap_function(
    change: Callable[[Real, float, float], Real], slope: Callable[[float, float], float]
) -> StepRule:
    """Replace the softcap c tanh(s / c) by ``change(scores, c, scale)``, whose slope is at most ``slope(c, scale)``."""

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        cap, problem = (
            at.exact_stages.canonical_problem.options.get("softcap"),
            at.truth.judged_problem.problem_without_layout,
        )
        if (
            cap is None
            or "scores" not in at.truth.exact
            or OPERATIONS[at.exact_stages.canonical_problem.operation].computes_gradients
        ):
            return {}
        scores, error = at.exact_value("scores"), at.max_errors["scores"]
        numbers = float(cap), intended_scale(problem) if has_scale(problem) else 1.0
        value = change(scores, *numbers)
        moved = slope(*numbers) * (error + at.few_roundings_error * np.abs(scores))
        moved = moved + at.few_roundings_error * np.abs(value) + at.rounding.score_underflow
        return at.stages_from_logits("capped", value, moved)

    return compute_stages


def scores_times_lengths(name: str, power: float) -> StepRule:
    """Multiply scores by a power of the Euclidean lengths of queries or keys, or of both."""

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        query, key = (
            np.linalg.norm(as_float64(at.exact_stages.canonical_problem.inputs[operand]), axis=-1)
            for operand in ("query", "key")
        )
        lengths = {"query": query[..., np.newaxis], "key": key[..., np.newaxis, :]}
        factor = lengths[name] if name in lengths else lengths["query"] * lengths["key"]
        if factor.shape[-3] != at.exact_value("scores").shape[-3] or not (factor > 0).all():
            return {}
        factor = factor**power
        value = at.exact_value("scores") * factor
        moved = at.max_errors["scores"] * factor + at.few_roundings_error * np.abs(value) + at.rounding.score_underflow
        return at.stages_from_logits("scores", value, moved)

    return compute_stages


# Other heads.


def merge_heads_by_view(at: ReplacedStepContext) -> ApproximateStages:
    """Merge heads by a reshape without a transposition."""
    context = at.exact_value("context")
    batch, heads, length, width = context.shape
    seen, moved = (
        np.ascontiguousarray(array).reshape(batch, length, heads, width).swapaxes(1, 2)
        for array in (context, at.max_errors["context"])
    )
    return at.convert_to_returned_stages(
        at.walk_from_states({"context": BoundedStage(seen, Bound(moved, moved))}), ("output",)
    )


def split_heads_by_view(at: ReplacedStepContext) -> ApproximateStages:
    """Split heads by a reshape without a transposition, and compute attention with these heads."""
    operands = {}
    for name in QUERY_KEY_VALUE:
        shape = at.exact_value(name).shape
        value, error = (merge_heads(part).reshape(shape) for part in (at.exact_value(name), at.max_errors[name]))
        operands[name] = Operand(value, error, error**2)
    results: ApproximateStages = {name: (part.value, part.max_error_and_variance[0]) for name, part in operands.items()}
    walk = at.walk_from_states(operands)
    later = [stage for stage in at.truth.exact if stage in walk.graph and stage not in operands]
    return results | at.convert_to_returned_stages(walk, later)


_ATTENTION_OPS = ("attention", "multi_head_attention")
SOFTMAX_OPS = ("softmax", *_ATTENTION_OPS, *OPERATIONS_BY_SCORE)
_VALUE_OPS = (*_ATTENTION_OPS, *OPERATIONS_BY_SCORE)
PLAIN_OPS = ("attention", *OPERATIONS_BY_SCORE)
"""Operations whose output is the weighted mean of the values, (B, H, Lq, Dv)."""
_MERGE_OPS = ("merge_states",)
_LSE_OPS = (*SOFTMAX_OPS, *_MERGE_OPS)
_SCORE_OPS = ("scoring", *_ATTENTION_OPS, *OPERATIONS_BY_SCORE)
_PROJECTION_OPS = ("multi_head_attention",)
_SOFTCAP_OPS = ("attention", "scoring")
_COSINE_OPS = ("scoring", "cosine_attention")


def make_step_replacement(rule: StepRule, *, only_failing: bool = False, begins_at: str = "") -> StepReplacement:
    """Return the truth of another step: the errors of a rounding model as bounds, and those of float64 as radii.

    If ``only_failing``, the stages that do not fail keep the exact answer of the case. If ``begins_at`` names a stage
    that does not fail, there is no replacement.
    """

    def replacement(truth: Truth, rounding_model: str, failing: Stages) -> Truth | None:
        if not _is_fully_defined(truth) or (begins_at and begins_at not in failing):
            return None
        known = truth.cached_readings.setdefault("followed", {})  # shared by all implementations
        if (rule, rounding_model) not in known:
            errors = {stage: bound.max_error for stage, bound in truth.bounds.bounds_by_stage(rounding_model).items()}
            exact_errors = {stage: np.abs(answer.low) + answer.radius for stage, answer in truth.exact.items()}
            in_model = ReplacedStepContext(truth, truth.bounds.find_rounding_model(rounding_model), errors)
            in_float64 = ReplacedStepContext(truth, rounding_model_named("native", "float64"), exact_errors)
            with np.errstate(all="ignore"):
                known[rule, rounding_model] = rule(in_model), rule(in_float64)
        results, radii = known[rule, rounding_model]
        if not results:
            return None
        changed = [stage for stage in results if stage in truth.exact and (stage in failing or not only_failing)]
        exact = {stage: _enclose_float64(results[stage][0], radii[stage][1]) for stage in changed}
        bounds = {stage: Bound(results[stage][1], results[stage][1]) for stage in changed}
        stages = ExactStages(truth.judged_problem.canonical, {**truth.exact, **exact})
        known_bounds = {**truth.bounds.bounds_by_stage(rounding_model), **bounds}
        return replace(
            truth,
            stages=stages,
            bounds=replace(truth.bounds, exact_stages=stages).with_replaced_bounds(rounding_model, known_bounds),
            undefined=NOTHING_UNDEFINED,
            supports_statistics=False,
        )

    return replacement


def _is_fully_defined(truth: Truth) -> bool:
    """Return whether arithmetic defines every element of the answer, and all of them are judged."""
    rows, judged = truth.undefined.rows, truth.judged_problem
    conventional = rows is None or (rows.empty_rows_convention == DEFAULT_EMPTY_ROWS and not rows.nan_rows.any())
    is_defined = truth.undefined.elements is None and not truth.stages.inner_stages and judged.judged_rows is None
    return conventional and is_defined and "softcap_follows" not in judged.canonical.options


def _enclose_float64(value: Real, radius: Real) -> Enclosure:
    """Return an enclosure of float64 values; NaN gets an infinite radius, unless its own is 0: the result is NaN."""
    known = np.isfinite(value)
    radius = np.where(known, radius, np.where(np.isnan(value) & (radius != 0), np.inf, 0.0))
    return Enclosure(value, np.zeros_like(value), np.broadcast_to(radius, value.shape))


def replace_step(rule: StepRule, operations: tuple[str, ...], answer: str = "") -> Change:
    """Return a change that replaces a step in some operations."""
    replacement = make_step_replacement(rule)

    def change(problem: Problem) -> ReadingForm | None:
        is_there = problem.operation in operations and (rule is not square_scores or has_scale(problem))
        return ReadingForm(problem, step_replacement=replacement, result_key=answer) if is_there else None

    return change


_SOFTMAX_READINGS = (
    *(
        Reading(f"softmax-over-{axis}", f"the softmax runs over the {axis}, not over the keys",
                replace_step(softmax_over_axis(number), SOFTMAX_OPS), first_stage="weights")
        for axis, number in (("queries", -2), ("heads", -3), ("batch", -4))
    ),
    Reading("weights-not-renormalised", "masked weights are set to zero behind the softmax, the others not "
            "renormalised", replace_step(mask_after_softmax, _VALUE_OPS, "not renormalised")),
    Reading("mask-not-renormalised", "weights that the mask forbids are set to zero behind the softmax, and the "
            "others not renormalised", replace_step(only_mask_after_softmax, _VALUE_OPS, "not renormalised")),
    convention_reading("softcap-after-masked", "the softcap is applied after the mask, and masked keys have the logit "
               "-softcap; the case means before it", replace_step(mask_at_minus_softcap, _ATTENTION_OPS)),
    Reading("scores-squared", "the scores are squared", replace_step(square_scores, _SCORE_OPS), first_stage="scores"),
    *(
        Reading(f"softcap-{name}", f"the softcap {says}",
                replace_step(change_softcap_function(change, slope), _SOFTCAP_OPS), "softcap", "capped")
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
        Reading(f"cosine-times-{slug}", f"scores are {says}",
                replace_step(scores_times_lengths(name, power), _COSINE_OPS), first_stage="scores")
        for slug, says, name, power in (
            ("length-of-query", "not divided by the length of the query", "query", 1),
            ("length-of-key", "not divided by the length of the key", "key", 1),
            ("inverse-lengths", "divided by the squares of lengths", "both", -1),
        )
    ),
    Reading("heads-merged-by-view", "heads are merged by a reshape without a transposition",
            replace_step(merge_heads_by_view, _PROJECTION_OPS), first_stage="output"),
    Reading("heads-split-by-view", "heads are split by a reshape without a transposition",
            replace_step(split_heads_by_view, _PROJECTION_OPS), first_stage="query"),
)  # fmt: skip
_LOG_SUM_EXP_READINGS = tuple(
    Reading(f"log-sum-exp-{name}", f"log_sum_exp {says}", replace_step(rule, operations), first_stage="log_sum_exp")
    for name, says, rule, operations in (
        ("base-2", "is in base 2: it lacks the factor ln(2)", change_log_sum_exp(1 / _LN2, 1 / _LN2), _LSE_OPS),
        ("base-e", "is in base e: it has the factor ln(2)", change_log_sum_exp(_LN2, _LN2, base_two=True), _MERGE_OPS),
        ("mixed-base", "adds the logarithm in base 2 of the sum to the maximum", change_log_sum_exp(1.0, 1 / _LN2),
         _LSE_OPS),
        ("of-maximum-alone", "is the maximum alone", change_log_sum_exp(1.0, 0.0), _LSE_OPS),
        ("without-maximum", "lacks the maximum that was subtracted", change_log_sum_exp(0.0, 1.0, base_two=None),
         _LSE_OPS),
    )
)  # fmt: skip


def restrict_to_operations(
    operations: tuple[str, ...], number: Callable[[Problem], float | None]
) -> Callable[[Problem], float | None]:
    """Restrict a number to problems of some operations."""
    return lambda problem: number(problem) if problem.operation in operations else None


def factor_and_inverse_rows(
    prefix: str, name: str, words: str, size: Callable[[Problem], float | None]
) -> Sequence[NumberRow]:
    """Return the readings with a factor that the shapes define, and with its inverse."""

    def inverse(problem: Problem) -> float | None:
        number = size(problem)
        return 1 / number if number else None

    return (
        (f"{prefix}-times-{name}", f"is {words} times too large", size),
        (f"{prefix}-over-{name}", f"is {words} times too small", inverse),
    )


def head_width_power(power: float) -> Callable[[Problem], float | None]:
    """Return a power of the head width; None if the width is 0."""

    def number(problem: Problem) -> float | None:
        width = widths_for_scale(problem)["D"]
        return float(width**power) if width else None

    return number


def _head_count(problem: Problem) -> float | None:
    widths = widths_for_scale(problem)
    return widths["H D"] / widths["D"] if widths["D"] else None


def multiply_failing_stages(
    *stages: str, from_any: bool = False
) -> Callable[[Problem, float, str], Sequence[ReadingForm]]:
    """Multiply the failing stages among some; if ``from_any``, in one form for each stage at which they may begin."""

    def change(problem: Problem, factor: float, words: str) -> Sequence[ReadingForm]:
        return [
            ReadingForm(
                problem,
                first_stage=stages[first],
                step_replacement=make_step_replacement(
                    multiply_stages(stages[first:], factor),
                    only_failing=True,
                    begins_at=stages[first] if from_any else "",
                ),
            )
            for first in range(len(stages) if from_any else 1)
        ]

    return change


_OUTPUT_READINGS = number_readings(
    lambda words: f"the {{stage}} {words}",
    "output times",
    (
        ("output-doubled", "is twice as large", restrict_to_operations(SOFTMAX_OPS, lambda problem: 2.0)),
        ("output-halved", "is half as large", restrict_to_operations(SOFTMAX_OPS, lambda problem: 0.5)),
        ("output-negated", "is the negative", restrict_to_operations(SOFTMAX_OPS, lambda problem: -1.0)),
        *factor_and_inverse_rows(
            "output",
            "keys",
            "the number of keys",
            restrict_to_operations(SOFTMAX_OPS, lambda problem: float(count_queries_and_keys(problem.inputs)[1])),
        ),
        *factor_and_inverse_rows(
            "output", "root-of-width", "sqrt(D)", restrict_to_operations(_ATTENTION_OPS, head_width_power(0.5))
        ),
        *factor_and_inverse_rows("output", "width", "D", restrict_to_operations(_ATTENTION_OPS, head_width_power(1))),
        *factor_and_inverse_rows(
            "output", "heads", "the number of heads", restrict_to_operations(_ATTENTION_OPS, _head_count)
        ),
    ),
    multiply_failing_stages("weights", *MEANS, from_any=True),
)

REPLACED_STEPS: Sequence[Reading] = (*_SOFTMAX_READINGS, *_LOG_SUM_EXP_READINGS, *_OUTPUT_READINGS)
