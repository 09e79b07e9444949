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

_faulty_gradients = partial(mutant, "gradients")

_DELTA = "attention_gradients._row_sum"
"""What sums p dp over the keys."""


@_faulty_gradients(_DELTA, at="grad_query", defect="the softmax's Jacobian taken for diag(p): Odyssey#2134")
def row_sum_missing_in_the_gradient(terms: Array) -> Array:
    return np.zeros_like(terms[..., :1])


@_faulty_gradients(_DELTA, at="grad_query", defect="the mean over the keys for their sum")
def row_sum_of_the_gradient_averaged(terms: Array) -> Array:
    return np.asarray(_row_sum(terms) / max(1, terms.shape[-1]))


@_faulty_gradients(_DELTA, at="grad_query", defect="delta over the wrong axis: annotated_deep_learning#146's kind")
def row_sum_of_the_gradient_over_queries(terms: Array) -> Array:
    return np.asarray(terms.sum(axis=-2, keepdims=True))


@_faulty_gradients(_DELTA, at="grad_query", defect="delta of the first block alone: FlagGems#898's kind")
def row_sum_of_the_gradient_in_the_first_16_keys(terms: Array) -> Array:
    return _row_sum(terms[..., :16])


@_faulty_gradients("_softmax_gradient", at="grad_query", defect="sum dp for sum p dp")
def row_sum_of_the_gradient_unweighted(weights: Array, grad_weights: Array, mean: Array) -> Array:
    return np.asarray(weights * (grad_weights - row_sum_of_the_gradient_averaged(grad_weights)))


@_faulty_gradients(
    "_softmax_gradient",
    at="grad_query",
    defect="a softmax without a backward pass, gradients silently absent: candle#3724",
)
def gradient_stops_at_the_softmax(weights: Array, grad_weights: Array, mean: Array) -> Array:
    return np.zeros_like(weights)


@_faulty_gradients("_softmax_gradient", at="grad_query", defect="dp - delta, not multiplied with p")
def gradient_of_the_logits_without_weights(weights: Array, grad_weights: Array, mean: Array) -> Array:
    return np.where(weights == 0, 0, grad_weights - mean)


def _unscaled(name: str) -> Steps:
    """Leave the scale out of one gradient."""
    return only(name, {"attention_gradients._scale_of": lambda query, scale: 1.0})


_faulty_gradients(
    _unscaled,
    at="grad_query",
    defect="the chain rule without its factor, for dq: cntkx#10's kind",
    diagnosis="gradients-unscaled",
    name="query_gradient_without_scale",
)("grad_query")
_faulty_gradients(
    _unscaled,
    at="grad_key",
    defect="the chain rule without its factor, for dk: GenerativeModels#146's kind",
    diagnosis="gradients-unscaled",
    name="key_gradient_without_scale",
)("grad_key")


def _in_key_gradient(steps_of: Callable[[Call], Steps]) -> Steps:
    return only("grad_key", in_gradients(steps_of))


@_faulty_gradients(
    _in_key_gradient,
    at="grad_key",
    defect="an already scaled query enters dk, and the scale once more",
    diagnosis="gradients-scaled-twice",
)
def key_gradient_scaled_twice(call: Call) -> Steps:
    return {"_sum_over_queries": lambda weights, rows: _sum_over_queries(weights * call.factor, rows)}


@_faulty_gradients(
    "attention_gradients._scale_of",
    at="grad_query",
    defect="a constant printed with five digits in the backward pass",
    dtypes=WIDE,
)
def gradient_scale_off_by_1e_5(query: Array, scale: float | None) -> float:
    return _scale_of(query, scale) * (1 + 1e-5)


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


@_faulty_gradients(gradients_read_as, at="grad_key", defect="transposed twice, silent where L == H: diffusers#14341")
def key_and_value_gradients_with_heads_and_length_swapped(gradients: Stages) -> Stages:
    turned = [name for name in ("grad_key", "grad_value") if gradients[name].shape[1] == gradients[name].shape[2]]
    return gradients | {name: np.swapaxes(gradients[name], 1, 2) for name in turned}


@_faulty_gradients(gradients_read_as, at="grad_query", defect="zeros for batch > 0: pytorch#139462's kind")
def gradients_zero_beyond_the_first_batch_entry(gradients: Stages) -> Stages:
    kept = {name: gradient.copy() for name, gradient in gradients.items()}
    for gradient in kept.values():
        gradient[1:] = 0
    return kept


@_faulty_gradients("_cap_slope", at="grad_query", defect="the backward pass forgets the softcap: vllm#7425's kind")
def softcap_slope_missing(capped: Array, softcap: float) -> Array:
    return np.ones_like(capped)


@_faulty_gradients("_cap_slope", at="grad_query", defect="1 - tanh for 1 - tanh^2")
def softcap_slope_not_squared(capped: Array, softcap: float) -> Array:
    return np.asarray(1 - capped / softcap)


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


@_faulty_gradients(of_keys, at="grad_key", defect="the loop over tiles of queries runs once: pytorch#158212's kind")
def key_gradient_of_the_first_64_queries(weights: Array, rows: Array) -> Array:
    return _sum_over_queries(weights[..., :64, :], rows[..., :64, :])


@_faulty_gradients(
    of_keys, at="grad_key", defect="statistics of padding rows are not initialised: tilelang#2461, fla#892"
)
def key_gradient_nan_from_padded_queries(weights: Array, rows: Array) -> Array:
    gradient = _sum_over_queries(weights, rows)
    return np.full_like(gradient, np.nan) if weights.shape[-2] % 16 else gradient


def _over_groups(total: Callable[[Array], Array]) -> Steps:
    """Bring the gradients of a group's query heads (B, Hkv, H / Hkv, ..) together in another way."""
    return {"_sum_heads": lambda gradient, kv_heads: total(in_groups(gradient, kv_heads))}


@_faulty_gradients(
    _over_groups, at="grad_key", defect="one query head of a group contributes, the others are lost: FlagGems#898"
)
def group_gradient_of_its_first_head(grouped: Array) -> Array:
    return grouped[:, :, 0]


@_faulty_gradients(_over_groups, at="grad_key", defect="the loop over a group's query heads ends one early")
def group_gradient_without_its_last_head(grouped: Array) -> Array:
    return np.asarray((grouped[:, :, :-1] if grouped.shape[2] > 1 else grouped).sum(axis=2))


@_faulty_gradients(_over_groups, at="grad_key", defect="the mean over a group's query heads for their sum")
def group_gradient_averaged(grouped: Array) -> Array:
    return np.asarray(grouped.mean(axis=2))


@_faulty_gradients("_sum_heads", at="grad_key", defect="repeat forwards, tile backwards: onnx#7274's kind")
def group_gradient_summed_as_if_tiled(gradient: Array, kv_heads: int) -> Array:
    batch, heads, *rest = gradient.shape
    return np.asarray(gradient.reshape(batch, heads // kv_heads, kv_heads, *rest).sum(axis=1))


_faulty_gradients(
    at="grad_value", defect="dk right, dv by another head map", name="value_gradient_of_groups_summed_as_if_tiled"
)(only("grad_value", {"_sum_heads": group_gradient_summed_as_if_tiled}))


@_faulty_gradients(
    "_sum_broadcast",
    at="grad_bias",
    defect="a broadcast bias gets a gradient of the scores' shape: jax#30593, TransformerEngine#2537",
)
def bias_gradient_not_summed(gradient: Array, bias: Array) -> Array:
    return gradient


@_faulty_gradients(
    "_sum_broadcast", at="grad_bias", defect="the gradient of a broadcast bias is not added up: jax#30593"
)
def bias_gradient_of_the_first_of_a_broadcast_axis(gradient: Array, bias: Array) -> Array:
    return gradient[tuple(slice(1) if length == 1 else slice(None) for length in bias.shape)]


@_faulty_gradients(
    "_sum_broadcast",
    at="grad_bias",
    defect="the wrong axis is added up, silent where B == H: TransformerEngine#2537's kind",
)
def bias_gradient_summed_over_heads_for_batch(gradient: Array, bias: Array) -> Array:
    batch, heads = gradient.shape[:2]
    return _sum_broadcast(np.swapaxes(gradient, 0, 1) if batch == heads else gradient, bias)


@_faulty_gradients("_sum_broadcast", at="grad_bias", defect="the mean along broadcast axes for the sum")
def bias_gradient_averaged(gradient: Array, bias: Array) -> Array:
    return np.asarray(_sum_broadcast(gradient, bias) * (bias.size / gradient.size)).astype(gradient.dtype)


@_faulty_gradients("_sum_broadcast", at="grad_bias", defect="no gradient for the bias: jax#27184, pytorch#148476")
def bias_gradient_zero(gradient: Array, bias: Array) -> Array:
    return np.zeros_like(bias)


@_faulty_gradients(
    bias_logits_read_as,
    at="grad_bias",
    defect="the bias treated as if it were scaled with the scores: TransformerEngine#236's kind",
    diagnosis="bias-gradient-scaled",
)
def bias_gradient_scaled(call: Call, gradient: Array) -> Array:
    return np.asarray(gradient * call.factor)


@_faulty_gradients(
    bias_logits_read_as,
    at="grad_bias",
    defect="the bias treated as if it were capped with the scores: onnx#7865's kind",
)
def bias_gradient_through_the_softcap(call: Call, gradient: Array) -> Array:
    if call.softcap is None:
        return gradient
    return np.asarray(gradient * _cap_slope(call.stages["capped"], call.softcap))
