"""Readings of a backward pass: they replace one of its steps, or multiply a gradient by a number.

The steps are those of ``attention_gradients``. They are computed in float64 from the exact forward pass, each number
with its largest possible error. All later steps use the result of the replaced step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attncheck.attention.errors import Elementwise, Real, broadcast_heads
from attncheck.attention.logits import lift_shape_and_broadcast_axes, softcap_of, zero_filled_gradients
from attncheck.attention.problem import Computation
from attncheck.attention.scores import score_scale as factor_of
from attncheck.attention.walk import Walk
from attncheck.diagnosis.replaced_steps import (
    ApproximateStages,
    ReplacedStepContext,
    StepRule,
    factor_and_inverse_rows,
    head_width_power,
    make_step_replacement,
    multiply_failing_stages,
    restrict_to_operations,
)
from attncheck.judging.alternatives import (
    NumberRow,
    ProblemChange,
    Reading,
    ReadingForm,
    intended_scale,
    leave_out_input,
    number_readings,
    set_options,
)
from attncheck.judging.truth import Truth
from attncheck.reading.problem import Problem
from attncheck.spec import GRADIENTS, QUERY_KEY_VALUE, Shape
from attncheck.spec.rounding import RoundingModel

_ROUNDINGS_PER_STEP = 8
"""Number of roundings of one step in addition to those of its sum."""


@dataclass(frozen=True, eq=False)
class ApproximateArray(Elementwise):
    """Computed numbers: values in float64, and their largest possible errors."""

    value: Real
    max_error: Real
    rounding: RoundingModel

    def add_step_roundings(
        self, value: Real, error: Real, terms: int = 0, size: Real | None = None
    ) -> ApproximateArray:
        """Return the result of a step with its roundings added; ``size`` is the sum of the absolute terms of a sum."""
        rounding, whole = self.rounding, np.abs(value) + error + (0.0 if size is None else size)
        rounded = (terms * rounding.accumulate_unit + _ROUNDINGS_PER_STEP * rounding.coarsest_unit) * whole
        underflow = (terms + _ROUNDINGS_PER_STEP) * max(rounding.weight_underflow, rounding.output_underflow)
        return ApproximateArray(value, np.where(whole > 0, error + rounded + underflow, 0.0), rounding)

    def __add__(self, addend: ApproximateArray) -> ApproximateArray:
        return self.add_step_roundings(
            self.value + addend.value, self.max_error + addend.max_error, 0, np.abs(self.value)
        )

    def __sub__(self, subtrahend: ApproximateArray) -> ApproximateArray:
        return self + subtrahend.multiply_exact(-1.0)

    def __mul__(self, factor: ApproximateArray) -> ApproximateArray:
        error = np.abs(self.value) * factor.max_error + self.max_error * (np.abs(factor.value) + factor.max_error)
        return self.add_step_roundings(self.value * factor.value, error)

    def __matmul__(self, right: ApproximateArray) -> ApproximateArray:
        size = np.abs(right.value) + right.max_error
        error = np.abs(self.value) @ right.max_error + self.max_error @ size
        whole = (np.abs(self.value) + self.max_error) @ size
        return self.add_step_roundings(self.value @ right.value, error, self.value.shape[-1], whole)

    def multiply_exact(self, factor: Any) -> ApproximateArray:
        """Multiply by exact numbers."""
        return ApproximateArray(self.value * factor, self.max_error * np.abs(factor), self.rounding)

    def sum(self, *axes: int) -> ApproximateArray:
        """Add up over axes, and keep them with length 1."""
        whole, error = (
            (np.abs(self.value) + self.max_error).sum(axes, keepdims=True),
            self.max_error.sum(axes, keepdims=True),
        )
        terms = self.value.size // max(1, whole.size)
        return self.add_step_roundings(self.value.sum(axes, keepdims=True), error, terms, whole)

    def exp(self) -> ApproximateArray:
        """Return the exponentials; the exponential of minus infinity is 0."""
        value = np.exp(self.value)
        return self.add_step_roundings(value, value * np.expm1(np.where(value > 0, self.max_error, 0.0)))

    def keep_or_replace(self, kept: Any, otherwise: float = 0.0) -> ApproximateArray:
        """Replace the numbers that are not kept by an exact number."""
        return ApproximateArray(
            np.where(kept, self.value, otherwise), np.where(kept, self.max_error, 0.0), self.rounding
        )


Step = Callable[["BackwardPass"], ApproximateArray]


@dataclass(frozen=True, eq=False)
class BackwardPass:
    """A backward pass with ``changed_steps`` steps; each step is computed when it is needed."""

    truth: Truth
    problem: Computation
    walk: Walk
    rounding: RoundingModel
    changed_steps: Mapping[str, Step]
    computed_steps: dict[str, ApproximateArray] = field(default_factory=dict)

    def __getitem__(self, name: str) -> ApproximateArray:
        if name not in self.computed_steps:
            self.computed_steps[name] = (self.changed_steps.get(name) or BACKWARD_STEPS[name])(self)
        return self.computed_steps[name]

    def original_step(self, name: str) -> ApproximateArray:
        """Return the original step, computed from the steps before it in this pass."""
        return BACKWARD_STEPS[name](self)

    def forward_step(self, name: str) -> ApproximateArray:
        """Return a step of the forward pass, or a backward step that depends on no other backward step."""
        state = self.walk.evaluate(name)
        error = state.max_error if hasattr(state, "max_error") else state.bound(self.rounding).max_error
        value = np.asarray(state.value)
        return ApproximateArray(
            value, np.zeros_like(value) if error is None else error + np.zeros_like(value), self.rounding
        )

    @property
    def query_head_count(self) -> int:
        """The number of query heads."""
        return int(self.walk.evaluate("query").value.shape[1])

    def repeat_to_query_heads(self, name: str) -> ApproximateArray:
        """Return the keys or values of every query head."""
        return self.forward_step(name).map_arrays(lambda part: broadcast_heads(part, self.query_head_count))

    def split_into_groups(self, gradient: ApproximateArray, name: str) -> ApproximateArray:
        """Split the axis of query heads into groups: (B, H, ..) -> (B, Hkv, H / Hkv, ..)."""
        shared = self.walk.evaluate(name).value.shape[1]
        return gradient.map_arrays(
            lambda part: part.reshape(len(part), shared, part.shape[1] // shared, *part.shape[2:])
        )

    def sum_over_group(self, name: str) -> ApproximateArray:
        """Add up the gradients of the query heads of each group."""
        return self.split_into_groups(self[f"{name} by head"], name).sum(2).map_arrays(lambda part: part[:, :, 0])

    def allowed_mask(self, change: ProblemChange | None = None) -> Any:
        """Return the mask, (B, H, Lq, Lk), of the call or of the changed call."""
        call = self.truth.judged_problem.problem_without_layout.as_call()
        changed_call = call if change is None else change(call)
        shape = self.walk.evaluate("masked").value.shape
        kept = (
            None
            if changed_call is None
            else Computation.from_problem_without_added_key(changed_call.canonical()).flag_unmasked_scores(shape)
        )
        return np.ones(shape, np.bool_) if kept is None else kept

    def recompute_weights(self, logits: ApproximateArray) -> ApproximateArray:
        """Compute the weights from logits and log_sum_exp; a row without a key has weights of 0."""
        totals = self["log_sum_exp"].map_arrays(lambda part: part[..., np.newaxis])
        has_key = np.isfinite(totals.value)
        return (logits - totals.keep_or_replace(has_key)).exp().keep_or_replace(has_key)


def _transpose(array: ApproximateArray) -> ApproximateArray:
    return array.map_arrays(lambda part: np.swapaxes(part, -1, -2))


def _bias_shape_and_axes(step: BackwardPass, logits: ApproximateArray) -> tuple[Shape, tuple[int, ...]]:
    """Return the shape of the bias, and the axes along which it was broadcast."""
    shape = step.truth.exact["grad_bias"].high.shape
    return shape, lift_shape_and_broadcast_axes(shape, logits.value.ndim)[1]


def _bias_gradient(step: BackwardPass, logits: ApproximateArray) -> ApproximateArray:
    shape, axes = _bias_shape_and_axes(step, logits)
    return (logits.sum(*axes) if axes else logits).map_arrays(lambda part: part.reshape(shape))


BACKWARD_STEPS: Mapping[str, Step] = {
    "log_sum_exp": lambda step: step.forward_step("log_sum_exp"),
    "weights": lambda step: step.forward_step("backward_weights"),
    "weights of values": lambda step: step["weights"],
    "mean": lambda step: (step["weights"] * step.forward_step("grad_weights")).sum(-1),
    "logits behind a fill": lambda step: step["weights"] * (step.forward_step("grad_weights") - step["mean"]),
    "logits": lambda step: step["logits behind a fill"].map_arrays(
        lambda part: zero_filled_gradients(step.problem, part)
    ),
    "slope": lambda step: step.forward_step("slope"),
    "products": lambda step: (step["logits"] * step["slope"]).multiply_exact(factor_of(step.problem)),
    "key by head": lambda step: _transpose(step["products"]) @ step.forward_step("query"),
    "value by head": lambda step: _transpose(step["weights of values"]) @ step.forward_step("grad_output"),
    "of query": lambda step: step["products"] @ step.repeat_to_query_heads("key"),
    "of key": lambda step: step.sum_over_group("key"),
    "of value": lambda step: step.sum_over_group("value"),
    "of bias": lambda step: _bias_gradient(step, step["logits"]),
}
"""Name of each step of a backward pass -> its computation from earlier steps."""


def replace_backward_steps(changed: Mapping[str, Step], applies: Callable[[BackwardPass], bool]) -> StepRule:
    """Return the gradients of a backward pass with changed steps; none if ``applies`` is false for it."""

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        truth, rounding = at.truth, at.rounding
        known = truth.cached_readings.setdefault("backward", {})
        if rounding not in known:
            known[rounding] = BackwardPass(
                truth, at.exact_stages.float64_computation, at.walk_from_states({}), rounding, {}
            )
        problem, step = known[rounding].problem, replace(known[rounding], changed_steps=changed, computed_steps={})
        if problem.added_keys or not {"sinks", "query_cos"}.isdisjoint(problem.inputs) or not applies(step):
            return {}
        names = {stage: f"of {stage.removeprefix('grad_')}" for stage in truth.exact}
        gradients = {stage: step[name] for stage, name in names.items() if name in BACKWARD_STEPS}
        return {stage: (gradient.value, gradient.max_error) for stage, gradient in gradients.items()}

    return compute_stages


_ALWAYS: Callable[[BackwardPass], bool] = lambda step: True  # noqa: E731


def _backward_reading(
    name: str, says: str, changed: Mapping[str, Step], of: str = "", stage: str = "grad_query",
    applies: Callable[[BackwardPass], bool] = _ALWAYS,
) -> Reading:  # fmt: skip
    """Return the reading in which steps of a backward pass are replaced."""
    replacement = make_step_replacement(replace_backward_steps(changed, applies))

    def change(problem: Problem) -> ReadingForm | None:
        return ReadingForm(problem, step_replacement=replacement) if problem.operation in _GRADIENT_OPERATIONS else None

    return Reading(name, says, change, of, stage)


def _weights_with_mask(change: ProblemChange) -> Mapping[str, Step]:
    """Recompute the weights from scores with another mask."""
    return {
        "weights": lambda step: step.recompute_weights(
            step.forward_step("biased").keep_or_replace(step.allowed_mask(change), -np.inf)
        )
    }


def _weights_with_causal_offset(steps: int) -> Mapping[str, Step]:
    """Recompute the weights with keys up to ``steps`` after the query's position."""

    def weights(step: BackwardPass) -> ApproximateArray:
        kept = step.allowed_mask(set_options(is_causal=False))
        offset = kept.shape[-1] - kept.shape[-2] if "past_key" in step.problem.inputs else 0
        distance = np.arange(kept.shape[-1]) - np.arange(kept.shape[-2])[:, np.newaxis] - offset
        return step.recompute_weights(step.forward_step("biased").keep_or_replace(kept & (distance <= steps), -np.inf))

    return {"weights": weights}


def _weights_without_bias(step: BackwardPass) -> ApproximateArray:
    biased = step.forward_step("biased").value
    return step.recompute_weights(
        step.forward_step("capped").keep_or_replace(step.allowed_mask() & (biased > -np.inf), -np.inf)
    )


def _weights_without_softcap(step: BackwardPass) -> ApproximateArray:
    bias = step.forward_step("biased") - step.forward_step("capped")
    return step.recompute_weights((bias + step.forward_step("scores")).keep_or_replace(step.allowed_mask(), -np.inf))


def _unnormalised_weights(step: BackwardPass) -> ApproximateArray:
    logits = step.forward_step("masked")
    highest = logits.value.max(-1, keepdims=True, initial=-np.inf)
    return (
        logits - logits.add_step_roundings(np.where(np.isfinite(highest), highest, 0.0), np.zeros_like(highest))
    ).exp()


def _softcap_slope(change: Callable[[Real, float], Real], of: str) -> Mapping[str, Step]:
    """Replace the slope of the softcap by ``change(scores, softcap)``; ``of`` names the stage of these scores."""

    def slope(step: BackwardPass) -> ApproximateArray:
        scores, cap = step.forward_step(of), float(step.problem.options["softcap"])
        value = change(scores.value, cap)
        steep = 2 * (np.abs(scores.value) + scores.max_error) / cap**2 + 1 / abs(cap)
        return scores.add_step_roundings(
            value, np.broadcast_to(scores.max_error, scores.value.shape) * steep, 1, 1 + np.abs(value)
        )

    return {"slope": slope}


def _slope_of_all_scores(step: BackwardPass) -> ApproximateArray:
    """Return the slope of every score, including those that a fill replaced."""
    if softcap_of(step.problem) is not None:
        return _softcap_slope(lambda scores, cap: 1 - (scores / cap) ** 2, "capped")["slope"](step)
    return step.original_step("slope").map_arrays(np.zeros_like).add_step_roundings(np.ones((1, 1)), np.zeros((1, 1)))


def _combine_group_gradients(change: Callable[[ApproximateArray], ApproximateArray], *names: str) -> Mapping[str, Step]:
    """Combine the gradients of a group's query heads (B, Hkv, H / Hkv, ..) in another way."""

    def of_name(name: str) -> Step:
        return lambda step: change(step.split_into_groups(step[f"{name} by head"], name)).map_arrays(
            lambda part: part[:, :, 0]
        )

    return {f"of {name}": of_name(name) for name in names or ("key", "value")}


def _sum_tiled_heads(grouped: ApproximateArray) -> ApproximateArray:
    """Add up heads as if they were tiled: query head h belongs to key head h % Hkv."""

    def tiled(part: Real) -> Real:
        batch, shared, group, *rest = part.shape
        return part.reshape(batch, group, shared, *rest).swapaxes(1, 2)

    return grouped.map_arrays(tiled).sum(2)


def _has_grouped_heads(step: BackwardPass) -> bool:
    return bool(step.query_head_count != step.walk.evaluate("key").value.shape[1])


def _divide_step_by(number: Callable[[BackwardPass], float], name: str) -> Step:
    return lambda step: step.original_step(name).multiply_exact(1 / max(1.0, number(step)))


def _first_bias_entry(step: BackwardPass) -> ApproximateArray:
    shape, axes = _bias_shape_and_axes(step, step["logits"])
    first = tuple(slice(1) if axis in axes else slice(None) for axis in range(step["logits"].value.ndim))
    return step["logits"].map_arrays(lambda part: part[first].reshape(shape))


def _bias_gradient_with_swapped_axes(step: BackwardPass) -> ApproximateArray:
    logits = step["logits"]
    return _bias_gradient(step, logits.map_arrays(lambda part: part.swapaxes(0, 1)))


def _keep_first_batch_entry(name: str) -> Step:
    def change(step: BackwardPass) -> ApproximateArray:
        gradient = step.original_step(name)
        first = np.arange(len(gradient.value)) == 0
        return gradient.keep_or_replace(first.reshape(-1, *[1] * (gradient.value.ndim - 1)))

    return change


def _swap_heads_and_positions(name: str) -> Step:
    def change(step: BackwardPass) -> ApproximateArray:
        gradient = step.original_step(name)
        is_square = gradient.value.shape[1] == gradient.value.shape[2]
        return gradient.map_arrays(lambda part: part.swapaxes(1, 2)) if is_square else gradient

    return change


_GRADIENT_OPERATIONS = ("attention_gradients",)
_OPERANDS = tuple(f"of {name}" for name in QUERY_KEY_VALUE)
_STEP_READINGS = (
    *(
        _backward_reading(f"{name}-ignored-on-the-way-back",
                 f"the backward pass makes its weights again without {called}",
                 _weights_with_mask(change), of)
        for name, called, of, change in (
            ("mask", "the mask", "mask", leave_out_input("mask")),
            ("window", "the window", "window", set_options(window=None)),
            ("key-lengths", "the key lengths", "key_lengths", leave_out_input("key_lengths")),
            ("causality", "causality", "is_causal", set_options(is_causal=False)),
        )
    ),
    _backward_reading("bias-ignored-on-the-way-back", "the backward pass makes its weights again without the bias",
             {"weights": _weights_without_bias}, "bias"),
    _backward_reading("softcap-ignored-on-the-way-back",
             "the backward pass makes its weights again without the softcap",
             {"weights": _weights_without_softcap}, "softcap"),
    *(
        _backward_reading(f"causal-{name}-on-the-way-back", f"causality is off by one in the backward pass: {says}",
                 _weights_with_causal_offset(steps), "is_causal")
        for name, says, steps in (("next-key", "j <= i + 1", 1), ("without-own-key", "j < i", -1))
    ),
    _backward_reading("log-sum-exp-of-base-2-on-the-way-back", "the backward pass reads log_sum_exp in base 2",
             {"weights": lambda step: step.recompute_weights(step.forward_step("masked")),
              "log_sum_exp": lambda step: step.forward_step("log_sum_exp").multiply_exact(1 / np.log(2))}),
    _backward_reading("value-gradient-unnormalised",
             "the gradient of the values is that of weights that are not normalised",
             {"weights of values": _unnormalised_weights}, stage="grad_value"),
    _backward_reading("value-gradient-without-fills", "values whose scores a fill took the place of get no gradient",
             {"weights of values": lambda step: step["weights"].keep_or_replace(step.allowed_mask())},
             "mask_fill", "grad_value"),
    _backward_reading("gradient-through-fill", "the gradient goes through a score that a fill took the place of",
             {"logits": lambda step: step["logits behind a fill"], "slope": _slope_of_all_scores}, "mask_fill"),
    *(
        _backward_reading(f"softmax-gradient-{slug}",
                 f"in the gradient of the softmax, p (dp - sum p dp), {says}", changed)
        for slug, says, changed in (
            ("without-mean", "the sum is missing",
             {"mean": lambda step: step.original_step("mean").multiply_exact(0.0)}),
            ("averaged", "the mean over the keys is taken for the sum",
             {"mean": _divide_step_by(lambda step: step.walk.evaluate("masked").value.shape[-1], "mean")}),
            ("over-queries", "the sum runs over the queries",
             {"mean": lambda step: (step["weights"] * step.forward_step("grad_weights")).sum(-2)}),
            ("unweighted", "the mean of dp is taken for the sum", {
                "mean": lambda step: step.forward_step("grad_weights").sum(-1).multiply_exact(
                    1 / max(1, step.walk.evaluate("masked").value.shape[-1]))}),
            ("without-weights", "the factor p is missing", {"logits behind a fill": lambda step: (
                step.forward_step("grad_weights") - step["mean"]).keep_or_replace(step["weights"].value != 0)}),
        )
    ),
    _backward_reading("gradients-of-query-and-key-zero",
             "no gradient goes through the softmax: those of query and key are zero",
             {"logits": lambda step: step.original_step("logits").multiply_exact(0.0)}),
    *(
        _backward_reading(f"softcap-slope-{slug}",
                 f"the slope of the softcap is {says}", _softcap_slope(change, of), "softcap")
        for slug, says, change, of in (
            ("missing", "left out", lambda scores, cap: np.ones_like(scores), "capped"),
            ("not-squared", "1 - t for 1 - t^2", lambda scores, cap: 1 - scores / cap, "capped"),
            ("of-uncapped-scores", "1 - (s / c)^2, of scores that are not capped",
             lambda scores, cap: 1 - (scores / cap) ** 2, "scores"),
        )
    ),
    *(
        _backward_reading(f"group-gradient-{slug}", f"gradients of keys and values are {says}",
                 _combine_group_gradients(change),
                 stage="grad_key", applies=_has_grouped_heads)
        for slug, says, change in (
            ("as-if-tiled", "added up over query heads h % Hkv, as if heads were tiled", _sum_tiled_heads),
            ("of-first-head", "those of the first query head of each group",
             lambda grouped: grouped.map_arrays(lambda part: part[:, :, :1])),
            ("without-last-head", "added up without the last query head of each group",
             lambda grouped: grouped.map_arrays(lambda part: part[:, :, :-1]).sum(2)),
            ("averaged", "the mean over the query heads of each group",
             lambda grouped: grouped.sum(2).multiply_exact(1 / grouped.value.shape[2])),
        )
    ),
    _backward_reading("value-gradient-as-if-tiled", "the gradient of the values is added up as if heads were tiled",
             _combine_group_gradients(_sum_tiled_heads, "value"), stage="grad_value", applies=_has_grouped_heads),
    _backward_reading("gradients-of-first-batch-entry-alone", "gradients are zero beyond the first batch entry",
             {name: _keep_first_batch_entry(name) for name in _OPERANDS},
             applies=lambda step: len(step.walk.evaluate("query").value) > 1),
    _backward_reading("gradients-with-heads-and-keys-swapped",
             "heads and positions of the gradients of keys and values are "
             "swapped", {name: _swap_heads_and_positions(name) for name in _OPERANDS[1:]}, stage="grad_key"),
    *(
        _backward_reading(f"bias-gradient-{slug}", f"the gradient of the bias is {says}", {"of bias": change}, "bias",
                 "grad_bias", applies)
        for slug, says, change, applies in (
            ("averaged", "the mean over the axes along which it is spread, not the sum",
             _divide_step_by(lambda step: step["logits"].value.size / step.truth.exact["grad_bias"].high.size,
                             "of bias"), _ALWAYS),
            ("of-first", "that of the first entry of each axis along which it is spread", _first_bias_entry, _ALWAYS),
            ("of-batch-for-heads", "added up over heads for batch entries",
             _bias_gradient_with_swapped_axes, lambda step: len(set(step.walk.evaluate("query").value.shape[:2])) == 1),
            ("through-softcap", "multiplied by the slope of the softcap",
             lambda step: _bias_gradient(step, step["logits"] * step["slope"]),
             lambda step: softcap_of(step.problem) is not None),
        )
    ),
)  # fmt: skip


def _multiple_readings(
    stages: Sequence[str], answer: str, *rows: NumberRow, of: str = "", called: str = "{stage}"
) -> tuple[Reading, ...]:
    """Return readings in which gradients are multiplied by a number."""
    gradient_rows = tuple(
        (name, words, restrict_to_operations(_GRADIENT_OPERATIONS, number)) for name, words, number in rows
    )
    return number_readings(
        lambda words: f"the {called} {words}",
        answer,
        gradient_rows,
        multiply_failing_stages(*stages),
        option_or_input=of,
        first_stage=stages[0],
    )


_MULTIPLE_READINGS = (
    *_multiple_readings(
        ["grad_query", "grad_key"], "gradients times",
        ("gradients-unscaled", "lacks the scale", lambda problem: 1 / (intended_scale(problem) or 1.0)),
        ("gradients-scaled-twice", "is scaled twice", intended_scale),
        *factor_and_inverse_rows("gradients", "root-of-width", "sqrt(D)", head_width_power(0.5)),
        *factor_and_inverse_rows("gradients", "width", "D", head_width_power(1)),
    ),
    *(
        reading
        for name in (stage.removeprefix("grad_") for stage in GRADIENTS)
        for reading in _multiple_readings(
            [f"grad_{name}"], f"gradient of {name} times",
            (f"gradient-of-{name}-zero", "is zero", lambda problem: 0.0), of=name,
        )
    ),
    *_multiple_readings(
        ["grad_bias"], "gradient of the bias times",
        ("bias-gradient-scaled", "is scaled like that of the scores", intended_scale),
        of="bias", called="gradient of the bias",
    ),
)  # fmt: skip
GRADIENT_READINGS = (*_MULTIPLE_READINGS, *_STEP_READINGS)
