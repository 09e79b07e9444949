"""Faults of the backward pass: the softmax's Jacobian, the scale, the softcap's slope, and its sums.

The sums are over queries, over the heads of a group, and over the axes along which a bias was spread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import (
    _cap_slope,
    _row_maximum,
    _row_sum,
    _scale_of,
    _sum_broadcast,
    _sum_over_queries,
)
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.backward_forms import (
    bias_logits_read_as,
    gradients_read_as,
    in_gradients,
    in_groups,
    of_keys,
    of_values,
    only,
    value_weights_read_as,
)
from attncheck.mutation.mutant import WIDE, equivalent, mutant
from attncheck.mutation.variant import Call, Steps

_faulty_gradients = partial(mutant, "gradients", at="grad_query")

_DELTA = "attention_gradients._row_sum"
"""What sums p dp over the keys."""


@_faulty_gradients(_DELTA, at="grad_query", defect="the mean over the keys for their sum")
def row_sum_of_the_gradient_averaged(terms: Array) -> Array:
    return np.asarray(_row_sum(terms) / max(1, terms.shape[-1]))


def _unscaled(name: str) -> Steps:
    """Leave the scale out of one gradient."""
    return only(name, {"attention_gradients._scale_of": lambda query, scale: 1.0})


def _in_key_gradient(steps_of: Callable[[Call], Steps]) -> Steps:
    return only("grad_key", in_gradients(steps_of))


@_faulty_gradients(value_weights_read_as, at="grad_value", defect="exp(s - m) for the weights in dv")
def value_gradient_from_unnormalised_weights(call: Call, weights: Array) -> Array:
    maximum = _row_maximum(call.logits)
    return np.asarray(np.exp(call.logits - np.where(np.isinf(maximum), 0, maximum)))


@_faulty_gradients(
    value_weights_read_as, at="grad_value", defect="dropout is active in the backward pass alone: pytorch#124464's kind"
)
def value_gradient_from_dropped_out_weights(call: Call, weights: Array) -> Array:
    """Drop one weight of ten, and enlarge the others."""
    kept = np.arange(weights.size).reshape(weights.shape) % 10 != 3
    return np.asarray(weights * kept * np.asarray(1 / 0.9, weights.dtype))


@_faulty_gradients(gradients_read_as, at="grad_query", defect="zeros for batch > 0: pytorch#139462's kind")
def gradients_zero_beyond_the_first_batch_entry(gradients: Stages) -> Stages:
    kept = {name: gradient.copy() for name, gradient in gradients.items()}
    for gradient in kept.values():
        gradient[1:] = 0
    return kept


@_faulty_gradients(in_gradients, at="grad_query", defect="1 - x^2 from the saved input where the saved output is due")
def softcap_slope_of_uncapped_scores(call: Call) -> Steps:
    def slope(capped: Array, softcap: float) -> Array:
        argument = call.stages["scores"] / softcap
        return np.asarray(1 - argument * argument)

    return {"_cap_slope": slope}


@equivalent(
    "_cap_slope",
    defect="a clamp against a slope of the wrong sign",
    proof="|tanh| is at most 1 and rounding is monotone: fl(c t) is at most c in magnitude, divided by c at most 1, "
    "and so is its square. 1 minus that is at least 0. NaN stays NaN.",
)
def softcap_slope_clipped_at_zero(capped: Array, softcap: float) -> Array:
    return np.maximum(_cap_slope(capped, softcap), 0)


@_faulty_gradients(of_values, at="grad_value", defect="the last tile of queries is dropped: FlagGems#898")
def value_gradient_without_queries_beyond_a_multiple_of_64(weights: Array, rows: Array) -> Array:
    queries = weights.shape[-2]
    whole = queries - queries % 64 if queries > 64 else queries
    return _sum_over_queries(weights[..., :whole, :], rows[..., :whole, :])


@_faulty_gradients(
    of_keys, at="grad_key", defect="statistics of padding rows are not initialised: tilelang#2461, fla#892"
)
def key_gradient_nan_from_padded_queries(weights: Array, rows: Array) -> Array:
    gradient = _sum_over_queries(weights, rows)
    return np.full_like(gradient, np.nan) if weights.shape[-2] % 16 else gradient


def _over_groups(total: Callable[[Array], Array]) -> Steps:
    """Bring the gradients of a group's query heads (B, Hkv, H / Hkv, ..) together in another way."""
    return {"_sum_heads": lambda gradient, kv_heads: total(in_groups(gradient, kv_heads))}


@_faulty_gradients("_sum_heads", at="grad_key", defect="repeat forwards, tile backwards: onnx#7274's kind")
def group_gradient_summed_as_if_tiled(gradient: Array, kv_heads: int) -> Array:
    batch, heads, *rest = gradient.shape
    return np.asarray(gradient.reshape(batch, heads // kv_heads, kv_heads, *rest).sum(axis=1))


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_gradients(_DELTA, "row_sum_missing_in_the_gradient", "the softmax's Jacobian taken for diag(p): Odyssey#2134",
    lambda terms: np.zeros_like(terms[..., :1]))
_faulty_gradients(_DELTA, "row_sum_of_the_gradient_over_queries",
    "delta over the wrong axis: annotated_deep_learning#146's kind",
    lambda terms: np.asarray(terms.sum(axis=-2, keepdims=True)))
_faulty_gradients(_DELTA, "row_sum_of_the_gradient_in_the_first_16_keys",
    "delta of the first block alone: FlagGems#898's kind",
    lambda terms: _row_sum(terms[..., :16]))
_faulty_gradients("_softmax_gradient", "row_sum_of_the_gradient_unweighted", "sum dp for sum p dp",
    lambda weights, grad_weights, mean:
        np.asarray(weights * (grad_weights - row_sum_of_the_gradient_averaged(grad_weights))))
_faulty_gradients("_softmax_gradient", "gradient_stops_at_the_softmax",
    "a softmax without a backward pass, gradients silently absent: candle#3724",
    lambda weights, grad_weights, mean: np.zeros_like(weights))
_faulty_gradients("_softmax_gradient", "gradient_of_the_logits_without_weights", "dp - delta, not multiplied with p",
    lambda weights, grad_weights, mean: np.where(weights == 0, 0, grad_weights - mean))
_faulty_gradients(_unscaled, "query_gradient_without_scale",
    "the chain rule without its factor, for dq: cntkx#10's kind",
    "grad_query", diagnosis="gradients-unscaled")
_faulty_gradients(_unscaled, "key_gradient_without_scale",
    "the chain rule without its factor, for dk: GenerativeModels#146's kind",
    "grad_key", at="grad_key", diagnosis="gradients-unscaled")
_faulty_gradients(_in_key_gradient, "key_gradient_scaled_twice",
    "an already scaled query enters dk, and the scale once more",
    lambda call: {"_sum_over_queries": lambda weights, rows: _sum_over_queries(weights * call.factor, rows)},
    at="grad_key", diagnosis="gradients-scaled-twice")
_faulty_gradients("attention_gradients._scale_of", "gradient_scale_off_by_1e_5",
    "a constant printed with five digits in the backward pass",
    lambda query, scale: _scale_of(query, scale) * (1 + 1e-05), dtypes=WIDE)
_faulty_gradients(gradients_read_as, "key_and_value_gradients_with_heads_and_length_swapped",
    "transposed twice, silent where L == H: diffusers#14341",
    lambda gradients: gradients | {name: np.swapaxes(gradients[name], 1, 2) for name in [name for name in ("grad_key",
        "grad_value") if gradients[name].shape[1] == gradients[name].shape[2]]},
    at="grad_key")
_faulty_gradients("_cap_slope", "softcap_slope_missing", "the backward pass forgets the softcap: vllm#7425's kind",
    lambda capped, softcap: np.ones_like(capped))
_faulty_gradients("_cap_slope", "softcap_slope_not_squared", "1 - tanh for 1 - tanh^2",
    lambda capped, softcap: np.asarray(1 - capped / softcap))
_faulty_gradients(of_keys, "key_gradient_of_the_first_64_queries",
    "the loop over tiles of queries runs once: pytorch#158212's kind",
    lambda weights, rows: _sum_over_queries(weights[..., :64, :], rows[..., :64, :]), at="grad_key")
_faulty_gradients(_over_groups, "group_gradient_of_its_first_head",
    "one query head of a group contributes, the others are lost: FlagGems#898",
    lambda grouped: grouped[:, :, 0], at="grad_key")
_faulty_gradients(_over_groups, "group_gradient_without_its_last_head",
    "the loop over a group's query heads ends one early",
    lambda grouped: np.asarray((grouped[:, :, :-1] if grouped.shape[2] > 1 else grouped).sum(axis=2)), at="grad_key")
_faulty_gradients(_over_groups, "group_gradient_averaged", "the mean over a group's query heads for their sum",
    lambda grouped: np.asarray(grouped.mean(axis=2)), at="grad_key")
_faulty_gradients(None, "value_gradient_of_groups_summed_as_if_tiled", "dk right, dv by another head map",
    only("grad_value", {"_sum_heads": group_gradient_summed_as_if_tiled}), at="grad_value")
_faulty_gradients("_sum_broadcast", "bias_gradient_not_summed",
    "a broadcast bias gets a gradient of the scores' shape: jax#30593, TransformerEngine#2537",
    lambda gradient, bias: gradient, at="grad_bias")
_faulty_gradients("_sum_broadcast", "bias_gradient_of_the_first_of_a_broadcast_axis",
    "the gradient of a broadcast bias is not added up: jax#30593",
    lambda gradient, bias: gradient[tuple(slice(1) if length == 1 else slice(None) for length in bias.shape)],
    at="grad_bias")
_faulty_gradients("_sum_broadcast", "bias_gradient_summed_over_heads_for_batch",
    "the wrong axis is added up, silent where B == H: TransformerEngine#2537's kind",
    lambda gradient, bias: _sum_broadcast(np.swapaxes(gradient, 0, 1) if gradient.shape[0] == gradient.shape[1]
        else gradient, bias),
    at="grad_bias")
_faulty_gradients("_sum_broadcast", "bias_gradient_averaged", "the mean along broadcast axes for the sum",
    lambda gradient, bias: np.asarray(_sum_broadcast(gradient,
        bias) * (bias.size / gradient.size)).astype(gradient.dtype),
    at="grad_bias")
_faulty_gradients("_sum_broadcast", "bias_gradient_zero", "no gradient for the bias: jax#27184, pytorch#148476",
    lambda gradient, bias: np.zeros_like(bias), at="grad_bias", diagnosis="gradient-of-bias-zero")
_faulty_gradients(bias_logits_read_as, "bias_gradient_scaled",
    "the bias treated as if it were scaled with the scores: TransformerEngine#236's kind",
    lambda call, gradient: np.asarray(gradient * call.factor), at="grad_bias", diagnosis="bias-gradient-scaled")
_faulty_gradients(bias_logits_read_as, "bias_gradient_through_the_softcap",
    "the bias treated as if it were capped with the scores: onnx#7865's kind",
    lambda call, gradient: gradient if call.softcap is None
        else np.asarray(gradient * _cap_slope(call.stages["capped"], call.softcap)),
    at="grad_bias")
