"""Forms of faults: each replaces steps of the NumPy backend by a function that the fault defines.

A form has one parameter for the faulty function, and passes it the arrays that it needs. The backend computes all other
steps. If a call has sinks, a faulty softmax gets them as one more key, whose value is zero.

The online softmax takes keys in blocks, and rescales sum and average when the running maximum grows: Milakov &
Gimelshein 2018, "Online normalizer calculation for softmax".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, TypeAlias

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.composed import window_from_first_key
from attncheck.backends.contract import EmptyRows, Stages
from attncheck.diagnosis.readings import READING_CATALOGUE
from attncheck.judging.alternatives import AppliedReading, Reading
from attncheck.mutation.kernel import Array, Rounding, leave_unrounded
from attncheck.mutation.mutant import (
    AttentionCall,
    BackendVariant,
    StepFunction,
    StepReplacements,
    StepsPerCall,
    rebind_globals,
)
from attncheck.reading.lowering import Options
from attncheck.reading.problem import Problem
from attncheck.spec import OPERATIONS, SCORE_SPECS, computed_stages

OPERATION_OF_FUNCTION: Mapping[str, tuple[str, Options]] = {
    **{operation.function_name: (name, {}) for name, operation in OPERATIONS.items()},
    **{spec.function_name: ("scoring", {"score": name}) for name, spec in SCORE_SPECS.items()},
}
"""The functions that can compute another problem instead of theirs, with their operation and score."""
_READINGS_BY_NAME: Mapping[str, list[Reading]] = {
    name: [reading for rows in READING_CATALOGUE.values() for reading in rows if reading.name == name]
    for name in {reading.name for rows in READING_CATALOGUE.values() for reading in rows}
}


@dataclass(frozen=True, eq=False)
class ReadingFault:
    """A function of the backend that computes the problem of a reading, if the reading applies."""

    function: str
    reading: str
    applies_to: Callable[[Problem], object]

    def __call__(self, *arrays: Any, **keywords: Any) -> Stages:
        """Return the stages of the problem that is computed instead, by the names of the expected stages."""
        alternative = self.apply_reading(*arrays, **keywords)
        if alternative is None:
            unchanged_stages: Stages = self._unchanged_function(*arrays, **keywords)
            return unchanged_stages
        right: StepFunction = getattr(backend, self.function)
        asked = self._problem_of_call(*arrays, **keywords)
        dtype = next(iter(asked.inputs.values())).dtype
        dtypes = {name: array.dtype for name, array in asked.inputs.items()}
        stages = computed_stages(asked.operation, asked.options, asked.inputs)
        called = alternative.problem.as_call()
        inputs = {
            name: array.astype(dtypes.get(name, dtype)) if array.dtype.kind == "f" else array
            for name, array in called.inputs.items()
        }
        computed = right(**inputs, **{name: value for name, value in called.options.items() if name != "score"})
        named = {stage: alternative.stage_aliases.get(stage, stage) for stage in stages}
        return {stage: computed[name] for stage, name in named.items() if name in computed}

    @cached_property
    def _unchanged_function(self) -> StepFunction:
        """The unchanged function, except that functions that it calls may be misread."""
        return BackendVariant(
            {name: step for name, step in self.steps_for_all_functions().items() if name != self.function}
        ).function_named(self.function)

    def steps_for_all_functions(self) -> StepReplacements:
        """Return this fault for every function of its reading: before keys and values are laid out, or after."""
        is_lowered = {reading.changes_called_operation for reading in _READINGS_BY_NAME[self.reading]}
        return {
            function: replace(self, function=function)
            for function, (operation, _) in OPERATION_OF_FUNCTION.items()
            if OPERATIONS[operation].is_lowered in is_lowered
        }

    def apply_reading(self, *arrays: Any, **keywords: Any) -> AppliedReading | None:
        """Return the problem of a call by the reading; None if the reading does not apply."""
        problem = self._problem_of_call(*arrays, **keywords)
        is_lowered = OPERATIONS[problem.operation].is_lowered
        for reading in _READINGS_BY_NAME[self.reading]:
            if reading.changes_called_operation is not is_lowered:
                continue
            for form in replace(reading, changes_called_operation=False).apply_to_problem(problem):
                called = form.problem.as_call()
                taken = {"score", *_FUNCTION_SIGNATURES[self.function].parameters}
                if (
                    form.step_replacement is None
                    and taken >= {*called.inputs, *called.options}
                    and self.applies_to(problem)
                ):
                    return form
        return None

    def _problem_of_call(self, *arrays: Any, **keywords: Any) -> Problem:
        arguments = {**dict(zip(_FUNCTION_SIGNATURES[self.function].parameters, arrays, strict=False)), **keywords}
        asked = {name: value for name, value in arguments.items() if value is not None}
        inputs = {name: array for name, array in asked.items() if isinstance(array, np.ndarray)}
        operation, score = OPERATION_OF_FUNCTION[self.function]
        return Problem(
            operation, {**score, **{name: value for name, value in asked.items() if name not in inputs}}, inputs
        )


_FUNCTION_SIGNATURES = {name: signature(getattr(backend, name)) for name in OPERATION_OF_FUNCTION}


def faults_from_readings(*rows: tuple[Any, ...], **common_fields: Any) -> Iterator[dict[str, Any]]:
    """Yield faults that apply a reading of the catalogue to their problem, as keywords of ``register_fault``.

    A row has the topic, the reading, and the defect in the wild; the fault has the reading's name. A fault that applies
    the reading only to some problems has its own name, and ``applies_to(problem)``. All have ``common_fields``.
    """
    for row in rows:
        yield _fault_from_reading(*row) | common_fields


def _fault_from_reading(
    topic: str,
    reading: str,
    defect: str,
    name: str = "",
    applies_to: Callable[[Problem], object] = lambda problem: True,
) -> dict[str, Any]:
    first = _READINGS_BY_NAME[reading][0]
    return {
        "topic": topic,
        "name": name or reading.replace("-", "_").lower(),
        "defect": defect,
        "change": ReadingFault("", reading, applies_to).steps_for_all_functions(),
        "stage": "rotated_query" if first.option_or_input == "rotary_cos" else first.first_stage,
        "diagnosis": reading,
        "needed_argument": first.option_or_input
        if len({row.option_or_input for row in _READINGS_BY_NAME[reading]}) == 1
        else "",
    }


def has_any_of(*names: str) -> Callable[[Problem], object]:
    """Return a function that returns whether a problem has any of these inputs and options."""
    return lambda problem: any(name in problem.inputs or problem.options.get(name) for name in names)


def is_operation(name: str) -> Callable[[Problem], object]:
    """Return a function that returns whether a problem is of this operation, or only of its score."""
    score = OPERATIONS[name].fixed_score
    return lambda problem: problem.operation == name or problem.options.get("score", "") == score


MaskArguments: TypeAlias = dict[str, Any]
"""The arguments of ``mask_scores`` besides the scores: bias, mask, is_causal, window and so on."""
_MASK_DEFAULTS: MaskArguments = {
    name: parameter.default
    for name, parameter in signature(backend.mask_scores).parameters.items()
    if parameter.kind is Parameter.KEYWORD_ONLY
}
NO_MASK_RULES: MaskArguments = {option: value for option, value in _MASK_DEFAULTS.items() if option != "bias"}
"""Nothing is forbidden."""


def may_forbid_keys(masks: MaskArguments) -> bool:
    """Return whether any key may be forbidden."""
    has_rules = masks["mask"] is not None or masks["key_lengths"] is not None
    return bool(masks["is_causal"] or has_rules or any(side is not None for side in masks["window"] or ()))


def allowed_keys(scores: Array, masks: MaskArguments) -> Array:
    """Return flags of the keys that each query may attend to, (B, H, Lq, T), as the backend masks them."""
    asked = {**_MASK_DEFAULTS, **masks, "bias": None, "mask_fill": None}
    stages = backend.mask_scores(np.zeros(scores.shape, bool), **asked)
    return np.asarray(~np.isneginf(stages["masked"])) if "masked" in stages else np.ones(scores.shape, bool)


def causal_mask(queries: int, keys: int) -> Array:
    """Return the causal mask, (Lq, T): each query may attend to its own key and earlier ones."""
    return allowed_keys(np.zeros((queries, keys), bool), {"is_causal": True})


def window_mask(scores: Array, window: Any) -> Array:
    """Return the mask of a window, (Lq, T)."""
    return allowed_keys(np.zeros(scores.shape[-2:], bool), {"window": window})


def key_minus_query_position(scores: Array) -> Array:
    """Return the position of each key minus the position of each query, j - i: (Lq, T)."""
    queries, keys = scores.shape[-2:]
    behind: Array = np.arange(keys) - np.arange(queries)[:, np.newaxis]
    return behind


def combine_masks(mask: Array | None, pattern: Array) -> Array:
    """Return a mask that allows a key if both masks allow it."""
    return pattern if mask is None else np.logical_and(mask, pattern)


def _replace_masking(step: Callable[[Array, MaskArguments], Stages]) -> StepReplacements:
    """Replace the masking by a step that gets the scores and all masks."""
    return {"mask_scores": lambda scores, **keywords: step(scores, {**_MASK_DEFAULTS, **keywords})}


def change_mask_arguments(change: Callable[[Array, MaskArguments], MaskArguments]) -> StepReplacements:
    """Change the masks, if any key may be forbidden: ``change(scores, masks)`` returns the changed masks."""

    def mask_scores(scores: Array, masks: MaskArguments) -> Stages:
        if may_forbid_keys(masks):
            masks |= change(scores, masks)
            if masks["mask"] is None:  # whatever is left of the rules, there is a stage for them
                masks["mask"] = np.ones((), bool)
        return backend.mask_scores(scores, **masks)

    return _replace_masking(mask_scores)


def change_mask(change: Callable[[Array, Array], Array]) -> StepReplacements:
    """Replace the mask by ``change(mask, scores)``."""
    return _change_mask_argument("mask", change)


def change_window(change: Callable[..., Any]) -> StepReplacements:
    """Replace the window by ``change(left, right)``."""
    return _change_mask_argument("window", lambda window, scores: change(*window))


def change_key_lengths(change: Callable[[Array, int], Array]) -> StepReplacements:
    """Replace the key lengths by ``change(lengths, keys)``."""
    return _change_mask_argument("key_lengths", lambda lengths, scores: change(lengths, scores.shape[-1]))


def _change_mask_argument(option: str, change: Callable[[Any, Array], Any]) -> StepReplacements:
    return change_mask_arguments(
        lambda scores, masks: {} if masks[option] is None else {option: change(masks[option], scores)}
    )


def _replace_rule_by_mask(rule: str, pattern: Callable[[Array, MaskArguments], Array]) -> StepReplacements:
    """Replace a rule by another pattern, for queries whose position is their index."""

    def replace_rule(scores: Array, masks: MaskArguments) -> MaskArguments:
        if not masks[rule] or masks["query_offsets"] is not None:
            return {}
        return {rule: _MASK_DEFAULTS[rule], "mask": combine_masks(masks["mask"], pattern(scores, masks))}

    return change_mask_arguments(replace_rule)


def replace_causality(pattern: Callable[[int, int], Array]) -> StepReplacements:
    """Replace causality by ``pattern(queries, keys)``, for queries whose position is their index."""
    return _replace_rule_by_mask("is_causal", lambda scores, masks: pattern(*scores.shape[-2:]))


def replace_window(pattern: Callable[[Array, MaskArguments], Array]) -> StepReplacements:
    """Replace the window by ``pattern(scores, masks)``, for queries whose position is their index."""
    return _replace_rule_by_mask("window", pattern)


def replace_fill(fill: Callable[[Array, Array, MaskArguments], Array]) -> StepReplacements:
    """Set masked scores by ``fill(biased, allowed, masks)`` instead of to -inf."""

    def mask_scores(scores: Array, masks: MaskArguments) -> Stages:
        stages = backend.mask_scores(scores, **masks)
        if "masked" in stages:
            stages["masked"] = fill(stages.get("biased", scores), allowed_keys(scores, masks), masks)
        return stages

    return _replace_masking(mask_scores)


def replace_bias_addition(add: Callable[[Array, Array, MaskArguments], Array]) -> StepReplacements:
    """Add the bias, if there is one, by ``add(scores, bias, masks)``."""

    def mask_scores(scores: Array, masks: MaskArguments) -> Stages:
        if masks["bias"] is None:
            return backend.mask_scores(scores, **masks)
        biased = add(scores, masks["bias"], masks)
        return {"biased": biased} | backend.mask_scores(biased, **{**masks, "bias": None})

    return _replace_masking(mask_scores)


def change_bias(change: Callable[[Array, Array], Array]) -> StepReplacements:
    """Replace the bias by ``change(bias, scores)``."""
    return replace_bias_addition(lambda scores, bias, masks: np.asarray(scores + change(bias, scores)))


def allowed_keys_of_call(call: AttentionCall, **changed: Any) -> Array:
    """Return flags of the keys that each query of a call may attend to, (B, H, Lq, T), under ``changed`` masks."""
    offsets = call.query_offsets
    window = call.window if offsets is not None else window_from_first_key(call.window, call.past_length)
    masks = {"mask": call.mask, "is_causal": call.is_causal, "window": window, "key_lengths": call.key_lengths}
    masks["query_offsets"] = offsets
    return allowed_keys(np.zeros(call.scores_shape, bool), masks | changed)


MatrixProduct: TypeAlias = Callable[[Array, Array], Array]
AverageValues: TypeAlias = Callable[[Array, Array, Array], Array]
"""Averages the values, by the logits or the weights: ``average(logits, weights, value)``."""


def replace_attention_steps(make_steps: Callable[[AttentionCall], StepReplacements]) -> StepReplacements:
    """Replace steps of attention, made for each call from its arguments: ``make_steps(call)``."""
    return {"attention": StepsPerCall(make_steps)}


CALL_CONDITIONS: Mapping[str, Callable[[AttentionCall], bool]] = {
    "groups": lambda call: call.has_shared_heads,
    "softcap": lambda call: call.softcap is not None,
    "window": lambda call: call.window is not None,
    "bias": lambda call: call.bias is not None,
}
"""Name -> whether a call has a feature for which kernels often have a separate path."""


def change_query_key_value(change: Callable[[Array, Array, Array], tuple[Array, Array, Array]]) -> StepReplacements:
    """Change query, key and value in the forward and backward pass; a past changes like the new keys and values."""

    def run_with_changed_inputs(name: str) -> StepFunction:
        def run(query: Array, key: Array, value: Array, *more: Array, **keywords: Any) -> Stages:
            if keywords.get("past_key") is not None:
                _, past_key, past_value = change(query, keywords["past_key"], keywords["past_value"])
                keywords |= {"past_key": past_key, "past_value": past_value}
            stages: Stages = getattr(backend, name)(*change(query, key, value), *more, **keywords)
            return stages

        return run

    return {name: run_with_changed_inputs(name) for name in ("attention", "attention_gradients")}


def replace_score_function(score: Callable[[Array, Array, float], Stages]) -> StepReplacements:
    """Compute the scores by ``score(query, key, factor)``; the softcap applies to them."""

    def dot_scores(query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None) -> Stages:
        stages = score(query, key, backend._scale_of(query, scale))
        if softcap is not None:
            stages["capped"] = backend._cap(stages["scores"], softcap)
        return stages

    return {"dot_scores": dot_scores}


def change_scores(change: Callable[[Array], Array]) -> StepReplacements:
    """Change the scaled scores."""

    def score(query: Array, key: Array, factor: float) -> Stages:
        stages = backend.dot_scores(query, key, scale=factor)
        return stages | {"scores": change(stages["scores"])}

    return replace_score_function(score)


def change_filled_logits(
    change: Callable[[Array, Array], Array], applies: Callable[[EmptyRows], bool] = lambda empty_rows: True
) -> StepReplacements:
    """Change the logits before the softmax: ``change(logits, filled_logits)``.

    ``filled_logits`` are the logits in which rows without a key have got what stands in for them.
    """

    def softmax(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
        filled_logits = backend._fill_empty_rows(scores, sinks, empty_rows)
        return backend._softmax_with_sinks(
            change(scores, filled_logits) if applies(empty_rows) else filled_logits, sinks, "zero"
        )

    return {"_softmax_with_sinks": softmax}


def change_logits(change: Callable[[Array], Array]) -> StepReplacements:
    """Change the logits before the softmax; rows without a key already have their stand-ins."""
    return change_filled_logits(lambda logits, seen: change(seen))


def replace_softmax(compute_softmax: Callable[[Array], Stages]) -> StepReplacements:
    """Replace the softmax; in its logits, rows without a key already have their stand-ins.

    A sink is one more key to it, and its column is cut off what it returns.
    """

    def softmax(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
        logits = backend._fill_empty_rows(scores, sinks, empty_rows)
        if sinks is None:
            return compute_softmax(logits)
        stages = compute_softmax(append_sinks(logits, sinks))
        return stages | {"weights": stages["weights"][..., :-1]}

    return {"_softmax_with_sinks": softmax}


def append_sinks(logits: Array, sinks: Array) -> Array:
    """Return the logits with a column for the sink of each head: (B, H, Lq, T + 1)."""
    column = np.broadcast_to(sinks[:, np.newaxis, np.newaxis], (*logits.shape[:-1], 1))
    return np.concatenate([logits, column.astype(logits.dtype)], axis=-1)


def replace_row_maximum(maximum: Callable[[Array], Array]) -> StepReplacements:
    """Subtract ``maximum(scores)`` instead of a row's maximum, if the row has a key."""

    def row_maximum(scores: Array) -> Array:
        right = backend._row_maximum(scores)
        return np.where(right == -np.inf, right, maximum(scores))

    return {"_row_maximum": row_maximum}


def replace_reciprocal(reciprocal: Callable[[Array], Array]) -> StepReplacements:
    """Multiply the exponentials by ``reciprocal(sum)``, instead of dividing by the sum."""

    def softmax_by_reciprocal(logits: Array) -> Stages:
        stages, exponentials = softmax_and_exponentials(logits)
        total = backend._row_sum(exponentials)
        weights = np.where(total == 0, 0, exponentials * reciprocal(np.where(total == 0, 1, total)))
        return stages | {"weights": weights}

    return replace_softmax(softmax_by_reciprocal)


def softmax_and_exponentials(logits: Array) -> tuple[Stages, Array]:
    """Return the stages of the softmax, and the exponentials that it adds up."""
    seen: list[Array] = []

    def row_sum(exponentials: Array) -> Array:
        seen.append(exponentials)
        return backend._row_sum(exponentials)

    stages: Stages = rebind_globals(backend._softmax_with_sinks, _row_sum=row_sum)(logits, None, "zero")
    return stages, seen[0]


def change_weights(change: Callable[[Array], Array]) -> StepReplacements:
    """Change the weights between softmax and average; the operation softmax is unchanged."""
    return _change_softmax_weights(lambda call, weights: change(weights))


def set_forbidden_weights(number: float) -> StepReplacements:
    """Set the weights of forbidden keys to this number, after the softmax."""
    return _change_softmax_weights(
        lambda call, weights: np.where(allowed_keys_of_call(call), weights, np.asarray(number, weights.dtype))
    )


def _change_softmax_weights(change: Callable[[AttentionCall, Array], Array]) -> StepReplacements:
    def make_steps(call: AttentionCall) -> StepReplacements:
        def softmax(*arguments: Any) -> Stages:
            stages: Stages = call.step_function("_softmax_with_sinks")(*arguments)
            return stages | {"weights": change(call, stages["weights"])}

        return {"_softmax_with_sinks": softmax}

    return replace_attention_steps(make_steps)


def replace_average(average: AverageValues) -> StepReplacements:
    """Replace the average of the values, which may use the logits; a sink is one more key with a value of 0."""

    def make_steps(call: AttentionCall) -> StepReplacements:
        seen: list[Array] = []
        right = call.step_function("_softmax_with_sinks")

        def softmax(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
            seen.append(backend._fill_empty_rows(scores, sinks, empty_rows))
            stages: Stages = right(scores, sinks, empty_rows)
            return stages

        def weighted_sum(weights: Array, value: Array) -> Array:
            if call.sinks is None:
                return average(seen[-1], weights, value)
            # Of no keys there is no first one to take the shape of.
            value = np.concatenate([value, np.zeros((*value.shape[:-2], 1, value.shape[-1]), value.dtype)], axis=-2)
            weights = np.concatenate([weights, np.zeros((*weights.shape[:-1], 1), weights.dtype)], axis=-1)
            return average(append_sinks(seen[-1], call.sinks), weights, value)

        return {"_softmax_with_sinks": softmax, "_weighted_sum": weighted_sum}

    return replace_attention_steps(make_steps)


def change_outputs(change: Callable[[Array], Array]) -> StepReplacements:
    """Change the average of the values, before it is projected."""
    return {"attention._weighted_sum": lambda weights, value: change(weights @ value)}


def change_values(change: Callable[[Array], Array]) -> StepReplacements:
    """Change the values when they are averaged."""
    return {"attention._weighted_sum": lambda weights, value: weights @ change(value)}


def add_score_bias(scores: Array, score_bias: Array | None) -> Stages:
    """Add the bias of a bilinear score, if there is one."""
    return {"scores": scores if score_bias is None else scores + score_bias[:, np.newaxis, np.newaxis]}


def replace_matrix_product(product: MatrixProduct) -> StepReplacements:
    """Use another product of matrices throughout, except for the additive score's."""

    def dot(query: Array, key: Array) -> Array:
        return product(query, np.swapaxes(key, -1, -2))

    def general_scores(query: Array, key: Array, weight: Array, *, score_bias: Array | None = None) -> Stages:
        return add_score_bias(dot(product(query, weight), key), score_bias)

    def project(inputs: Array, weight: Array, bias: Array | None) -> Array:
        projected = product(inputs, weight)
        return projected if bias is None else np.asarray(projected + bias)

    return {
        "_dot": dot,
        "general_scores": general_scores,
        "_weighted_sum": product,
        "_sum_over_queries": lambda weights, rows: product(np.swapaxes(weights, -1, -2), rows),
        "_project": project,
    }


def replace_grouped_product(product: MatrixProduct) -> StepReplacements:
    """Multiply all query heads of a group with their shared head in one product, without repeating the head."""

    def dot(left: Array, right: Array) -> Array:
        return product(left, np.swapaxes(right, -1, -2))

    return {
        "_repeat_heads": lambda key, value, heads: (key, value),
        "dot_scores._dot": dot,
        "attention._weighted_sum": product,
        "attention_gradients._dot": dot,
        "attention_gradients._weighted_sum": product,
    }


def replace_gradient_steps(make_steps: Callable[[AttentionCall], StepReplacements]) -> StepReplacements:
    """Replace steps of the gradients, made for each call from its arguments and the stages of its forward pass."""
    return {"attention_gradients": StepsPerCall(make_steps)}


def recompute_weights(logits: Array, log_sum_exp: Array) -> Array:
    """Compute the weights from logits and log_sum_exp (B, H, Lq, 1); a row without a key has weights of 0."""
    exponentials = np.exp(logits - np.where(np.isinf(log_sum_exp), 0, log_sum_exp))
    return np.where(np.isneginf(log_sum_exp), 0, exponentials)


def replace_backward_weights(weights: Callable[[AttentionCall], Array]) -> StepReplacements:
    """Use other weights in the backward pass than those of the forward pass."""
    return replace_gradient_steps(lambda call: {"attention": forward_pass_with_weights(call, weights(call))})


def forward_pass_with_weights(call: AttentionCall, weights: Array) -> StepFunction:
    """Return a step that returns the stages of the forward pass, but with these weights."""
    stages = call.stages | {"weights": weights}
    return lambda *arrays, **keywords: stages


def replace_gradient_row_sum(row_sum: Callable[[AttentionCall, Array], Array]) -> StepReplacements:
    """Replace the sum of the terms p dp over the keys by ``row_sum(call, terms)``."""
    return replace_gradient_steps(lambda call: {"_row_sum": lambda terms: row_sum(call, terms)})


def gradient_row_sum_from_output(call: AttentionCall) -> Array:
    """Return sum p dp as g o: Dao et al. 2022, FlashAttention, appendix B.4."""
    return backend._row_sum(call.grad_output * call.stages["output"])


def remask_weights(call: AttentionCall, allowed: Array) -> Array:
    """Return the weights that a backward pass recomputes from scores with another mask."""
    if np.array_equal(allowed, allowed_keys_of_call(call)):
        return call.weights
    return recompute_weights(np.where(allowed, call.unmasked_logits, -np.inf), call.log_sum_exp)


def split_into_groups(gradient: Array, kv_heads: int) -> Array:
    """Split the axis of query heads into groups: (B, H, ..) -> (B, Hkv, H / Hkv, ..)."""
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, kv_heads, heads // kv_heads, *rest)


def change_gradients(change: Callable[[Stages], Stages]) -> StepReplacements:
    """Change the results of the backward pass."""
    return {"attention_gradients": lambda *arrays, **keywords: change(backend.attention_gradients(*arrays, **keywords))}


def change_value_gradient_weights(change: Callable[[AttentionCall, Array], Array]) -> StepReplacements:
    """Use other weights in the gradient of the values only."""
    return replace_some_gradients("grad_value", _change_step_argument("_sum_over_queries", change))


def change_bias_gradient_terms(change: Callable[[AttentionCall, Array], Array]) -> StepReplacements:
    """Change the gradients of the logits that are summed for the bias."""
    return _change_step_argument("_sum_broadcast", change)


def _change_step_argument(name: str, change: Callable[[AttentionCall, Array], Array]) -> StepReplacements:
    """Replace the first array of a step of the gradients."""
    right: StepFunction = getattr(backend, name)
    return replace_gradient_steps(lambda call: {name: lambda first, second: right(change(call, first), second)})


def replace_some_gradients(names: str | Iterable[str], steps: StepReplacements) -> StepReplacements:
    """Use some gradients of a faulty backward pass, and the others of the right one."""
    faulty, chosen = BackendVariant(steps), (names,) if isinstance(names, str) else tuple(names)

    def attention_gradients(*arrays: Any, **keywords: Any) -> Stages:
        wrong = faulty.attention_gradients(*arrays, **keywords)
        return backend.attention_gradients(*arrays, **keywords) | {name: wrong[name] for name in chosen}

    return {"attention_gradients": attention_gradients}


def replace_key_gradient_product(product: MatrixProduct) -> StepReplacements:
    """Replace the sum over queries for the gradient of the keys."""
    return replace_some_gradients("grad_key", {"_sum_over_queries": product})


def replace_value_gradient_product(product: MatrixProduct) -> StepReplacements:
    """Replace the sum over queries for the gradient of the values."""
    return replace_some_gradients("grad_value", {"_sum_over_queries": product})


UNSTORED_STAGES = frozenset({"weights"})
"""Stages that are not returned: the output was not computed from these weights, but would be compared with them."""


@dataclass(frozen=True)
class OnlineSoftmax:
    """Softmax and average in blocks of keys.

    ``product`` multiplies exponentials and values; ``rescales_sum`` and ``rescales_output`` say whether a block
    remembers to; ``store`` is how the running average is kept between blocks.
    """

    block: int
    product: MatrixProduct = np.matmul
    rescales_sum: Callable[[int], bool] = lambda block: True
    rescales_output: Callable[[int], bool] = lambda block: True
    store: Rounding = leave_unrounded

    @property
    def steps(self) -> StepReplacements:
        """The steps that run over blocks."""
        return {**replace_softmax(self.compute_softmax), **replace_average(self.average_values)}

    def compute_softmax(self, logits: Array) -> Stages:
        """Return log_sum_exp, and weights made in a second pass."""
        maximum, total, _ = self._run_over_blocks(logits, None)
        stages: Stages = rebind_globals(
            backend._softmax_with_sinks, _row_maximum=lambda scores: maximum, _row_sum=lambda terms: total
        )(logits, None, "zero")
        return stages

    def average_values(self, logits: Array, weights: Array, value: Array) -> Array:
        """Average the values in one pass over the logits."""
        maximum, total, output = self._run_over_blocks(logits, value)
        empty = maximum == -np.inf
        return np.where(empty, 0, output / np.where(empty, 1, total))

    def _run_over_blocks(self, logits: Array, value: Array | None) -> tuple[Array, Array, Array]:
        maximum = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
        total = np.zeros_like(maximum)
        output = np.zeros((*logits.shape[:-1], 1 if value is None else value.shape[-1]), logits.dtype)
        for number, start in enumerate(range(0, logits.shape[-1], self.block)):
            tile = logits[..., start : start + self.block]
            grown = np.maximum(maximum, backend._row_maximum(tile))
            shift = np.where(grown == -np.inf, 0, grown)
            correction = np.exp(maximum - shift)
            exponentials = np.exp(tile - shift)
            total = total * (correction if self.rescales_sum(number) else 1)
            total = total + backend._row_sum(exponentials)
            if value is not None:
                output = output * (correction if self.rescales_output(number) else 1)
                output = self.store(output + self.product(exponentials, value[..., start : start + self.block, :]))
            maximum = grown
        return maximum, total, output
