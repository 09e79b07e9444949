"""Faults of the backward pass: of gradients, of what is computed again for them, and of two options that meet there.

Gradients are sums over queries, over the heads of a group, and over the axes along which a bias was spread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.mutation import forms
from attncheck.mutation.kernel import (
    Array,
    product_over_queries,
    round_to_bfloat16,
    round_to_float16,
    round_to_tf32,
    tiled_product,
)
from attncheck.mutation.mutant import (
    FAST_PATH_DTYPES,
    ROUNDING_FIELDS,
    WIDE_DTYPES,
    AttentionCall,
    StepReplacements,
    register_equivalent,
    register_fault,
)

_register_gradient_fault = partial(register_fault, "gradients", stage="grad_query")
_register_rounding_fault = partial(_register_gradient_fault, **ROUNDING_FIELDS)
_register_pair_fault = partial(register_fault, "gradients of pairs", dtypes=FAST_PATH_DTYPES, stage="grad_query")
_WITHOUT_SOFTCAP_SLOPE: StepReplacements = {"_cap_slope": lambda capped, softcap: np.ones_like(capped)}
_ROW_SUM_STEP = "attention_gradients._row_sum"
"""What sums p dp over the keys."""


def _row_mean(terms: Array) -> Array:
    return np.asarray(backend._row_sum(terms) / max(1, terms.shape[-1]))


@register_equivalent(
    "_cap_slope",
    defect="a clamp against a slope of the wrong sign",
    proof="|tanh| is at most 1 and rounding is monotone: fl(c t) is at most c in magnitude, divided by c at most 1, "
    "and so is its square. 1 minus that is at least 0. NaN stays NaN.",
)
def softcap_slope_clipped_at_zero(capped: Array, softcap: float) -> Array:
    return np.maximum(backend._cap_slope(capped, softcap), 0)


@register_equivalent(
    forms.replace_backward_weights,
    defect="a clamp that has nothing to clamp",
    proof="No weight is above 1: all exponentials are at least 0, so every rounded partial sum is at least each of "
    "its terms, and a quotient of two numbers of which the divisor is not smaller does not round above 1. NaN stays "
    "NaN.",
)
def backward_weights_clipped_at_one(call: AttentionCall) -> Array:
    return np.minimum(call.weights, 1)


def _replace_group_sum(sum_group: Callable[[Array], Array]) -> StepReplacements:
    """Bring the gradients of a group's query heads (B, Hkv, H / Hkv, ..) together in another way."""
    return {"_sum_heads": lambda gradient, kv_heads: sum_group(forms.split_into_groups(gradient, kv_heads))}


def _sum_groups_as_if_tiled(gradient: Array, kv_heads: int) -> Array:
    return np.asarray(forms.split_into_groups(gradient, gradient.shape[1] // kv_heads).sum(axis=1))


def _product_over_first_queries(query_count: Callable[[int], int]) -> forms.MatrixProduct:
    """Return a product that sums over only the first ``query_count(queries)`` queries."""
    return lambda weights, rows: backend._sum_over_queries(
        weights[..., : query_count(weights.shape[-2]), :], rows[..., : query_count(weights.shape[-2]), :]
    )


def _product_with_zeros_from_key(first_zero_key: Callable[[int], int]) -> forms.MatrixProduct:
    """Return a product that leaves the gradient at zero from key ``first_zero_key(keys)`` on."""

    def gradient_with_zeros(weights: Array, rows: Array) -> Array:
        gradient = backend._sum_over_queries(weights, rows)
        gradient[..., first_zero_key(gradient.shape[-2]) :, :] = 0
        return gradient

    return gradient_with_zeros


def _ignore_option_backwards(
    option: str, applies: Callable[[AttentionCall], bool] = lambda call: True
) -> StepReplacements:
    """Ignore an option that masks in the backward pass, always or only if ``applies``."""
    neutral = {option: False if option == "is_causal" else None}
    return forms.replace_backward_weights(
        lambda call: (
            forms.remask_weights(call, forms.allowed_keys_of_call(call, **neutral)) if applies(call) else call.weights
        )
    )


def _shift_backward_causality(steps: int) -> StepReplacements:
    """Use key j in the backward pass iff j <= i + steps."""

    def backward_weights(call: AttentionCall) -> Array:
        if not call.is_causal:
            return call.weights
        allowed = forms.allowed_keys_of_call(call, is_causal=False) & (
            forms.key_minus_query_position(call.weights) <= steps
        )
        return forms.recompute_weights(np.where(allowed, call.unmasked_logits, -np.inf), call.log_sum_exp)

    return forms.replace_backward_weights(backward_weights)


def _change_bias_gradient_terms_if(
    applies: Callable[[AttentionCall], bool], change: Callable[[AttentionCall, Array], Array]
) -> StepReplacements:
    """Sum other gradients of the logits for the bias, if ``applies(call)``."""
    return forms.change_bias_gradient_terms(
        lambda call, gradient: change(call, gradient) if applies(call) else gradient
    )


def _is_bias_broadcast(call: AttentionCall, axis: int) -> bool:
    return call.bias is not None and bool(call.bias.shape[axis] == 1)


def _indices_along(array: Array, axis: int) -> Array:
    """Return the number of each element along an axis, with the axes behind it."""
    return np.arange(array.shape[axis]).reshape(-1, *(1,) * (-axis - 1))


def _skip_diagonal_tile_in_value_gradient(tile: int) -> StepReplacements:
    """Begin the loop over queries one tile behind the diagonal, from the second tile on."""

    def weights_without_diagonal_tile(call: AttentionCall, weights: Array) -> Array:
        query, key = _indices_along(weights, -2) // tile, _indices_along(weights, -1) // tile
        return np.where((query == key) & (key > 0) & call.is_causal, 0, weights)

    return forms.change_value_gradient_weights(weights_without_diagonal_tile)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_register_gradient_fault(_ROW_SUM_STEP, "row_sum_of_the_gradient_averaged", "the mean over the keys for their sum",
    _row_mean, diagnosis="softmax-gradient-averaged")
_register_gradient_fault(_ROW_SUM_STEP, "row_sum_missing_in_the_gradient",
                  "the softmax's Jacobian taken for diag(p): Odyssey#2134",
    lambda terms: np.zeros_like(terms[..., :1]), diagnosis=("softmax-gradient-without-mean", "gradient-of-sinks-zero"))
_register_gradient_fault(_ROW_SUM_STEP, "row_sum_of_the_gradient_over_queries",
    "delta over the wrong axis: annotated_deep_learning#146's kind",
    lambda terms: np.asarray(terms.sum(axis=-2, keepdims=True)), diagnosis="softmax-gradient-over-queries")
_register_gradient_fault(_ROW_SUM_STEP, "row_sum_of_the_gradient_in_the_first_16_keys",
    "delta of the first block alone: FlagGems#898's kind", lambda terms: backend._row_sum(terms[..., :16]))
_register_gradient_fault("_softmax_gradient", "row_sum_of_the_gradient_unweighted", "sum dp for sum p dp",
    lambda weights, grad_weights, mean: np.asarray(weights * (grad_weights - _row_mean(grad_weights))),
    diagnosis="softmax-gradient-unweighted")
_register_gradient_fault("_softmax_gradient", "gradient_stops_at_the_softmax",
    "a softmax without a backward pass, gradients silently absent: candle#3724",
    lambda weights, grad_weights, mean: np.zeros_like(weights), diagnosis="gradients-of-query-and-key-zero")
_register_gradient_fault("_softmax_gradient", "gradient_of_the_logits_without_weights",
    "dp - delta, not multiplied with p",
    lambda weights, grad_weights, mean: np.where(weights == 0, 0, grad_weights - mean),
    diagnosis="softmax-gradient-without-weights")
for _of, _seen in (("query", "dq: cntkx#10's kind"), ("key", "dk: GenerativeModels#146's kind")):
    _register_gradient_fault(partial(forms.replace_some_gradients, f"grad_{_of}"), f"{_of}_gradient_without_scale",
        f"the chain rule without its factor, for {_seen}", {"attention_gradients._scale_of": lambda query, scale: 1.0},
        stage=f"grad_{_of}", diagnosis="gradients-unscaled")
_register_gradient_fault(lambda steps_of: forms.replace_some_gradients("grad_key",
    forms.replace_gradient_steps(steps_of)),
                  "key_gradient_scaled_twice",
    "an already scaled query enters dk, and the scale once more",
    lambda call: {"_sum_over_queries": lambda weights, rows: backend._sum_over_queries(weights * call.scale_factor,
        rows)},
    stage="grad_key", diagnosis="gradients-scaled-twice")
_register_gradient_fault("attention_gradients._scale_of", "gradient_scale_off_by_1e_5",
    "a constant printed with five digits in the backward pass",
    lambda query, scale: backend._scale_of(query, scale) * (1 + 1e-05), dtypes=WIDE_DTYPES)
_register_gradient_fault(forms.change_gradients, "gradients_zero_beyond_the_first_batch_entry",
    "zeros for batch > 0: pytorch#139462's kind",
    lambda gradients: {name: np.concatenate([rows[:1], np.zeros_like(rows[1:])]) for name, rows in gradients.items()},
    diagnosis="gradients-of-first-batch-entry-alone")
_register_gradient_fault(forms.change_gradients, "key_and_value_gradients_with_heads_and_length_swapped",
    "transposed twice, silent where L == H: diffusers#14341",
    lambda gradients: gradients | {name: np.swapaxes(gradients[name], 1, 2) for name in ("grad_key", "grad_value")
        if gradients[name].shape[1] == gradients[name].shape[2]},
    stage="grad_key", diagnosis="gradients-with-heads-and-keys-swapped")
_register_gradient_fault(forms.replace_gradient_steps, "softcap_slope_of_uncapped_scores",
    "1 - x^2 from the saved input where the saved output is due",
    lambda call: {"_cap_slope": lambda capped, softcap: np.asarray(1 - (call.stages["scores"] / softcap) ** 2)},
    diagnosis="softcap-slope-of-uncapped-scores")
_register_gradient_fault(None, "softcap_slope_missing", "the backward pass forgets the softcap: vllm#7425's kind",
    _WITHOUT_SOFTCAP_SLOPE,
    diagnosis="softcap-slope-missing")
_register_gradient_fault("_cap_slope", "softcap_slope_not_squared", "1 - tanh for 1 - tanh^2",
    lambda capped, softcap: np.asarray(1 - capped / softcap), diagnosis="softcap-slope-not-squared")
_register_gradient_fault(forms.change_value_gradient_weights, "value_gradient_from_unnormalised_weights",
    "exp(s - m) for the weights in dv", lambda call, weights: forms.softmax_and_exponentials(call.logits)[1],
    stage="grad_value", diagnosis="value-gradient-unnormalised")
_register_gradient_fault(forms.change_value_gradient_weights, "value_gradient_from_dropped_out_weights",
    "dropout of one weight in ten is active in the backward pass alone: pytorch#124464's kind",
    lambda call, weights: np.asarray(weights * (np.arange(weights.size).reshape(weights.shape) % 10 != 3)
        * np.asarray(1 / 0.9, weights.dtype)), stage="grad_value")
_register_gradient_fault(forms.replace_value_gradient_product, "value_gradient_without_queries_beyond_a_multiple_of_64",
    "the last tile of queries is dropped: FlagGems#898",
    _product_over_first_queries(lambda queries: max(queries // 64 * 64, min(queries, 64))), stage="grad_value")
_register_gradient_fault(forms.replace_key_gradient_product, "key_gradient_of_the_first_64_queries",
    "the loop over tiles of queries runs once: pytorch#158212's kind", _product_over_first_queries(lambda queries: 64),
    stage="grad_key")
_register_gradient_fault(forms.replace_key_gradient_product, "key_gradient_nan_from_padded_queries",
    "statistics of padding rows are not initialised: tilelang#2461, fla#892",
    lambda weights, rows: backend._sum_over_queries(weights, rows) * (np.nan if weights.shape[-2] % 16 else 1),
    stage="grad_key")
_register_gradient_fault("_sum_heads", "group_gradient_summed_as_if_tiled",
    "repeat forwards, tile backwards: onnx#7274's kind", _sum_groups_as_if_tiled,
    stage="grad_key", diagnosis="group-gradient-as-if-tiled")
_register_gradient_fault(partial(forms.replace_some_gradients, "grad_value"),
    "value_gradient_of_groups_summed_as_if_tiled",
    "dk right, dv by another head map", {"_sum_heads": _sum_groups_as_if_tiled}, stage="grad_value",
    diagnosis="value-gradient-as-if-tiled")
_register_gradient_fault(_replace_group_sum, "group_gradient_of_its_first_head",
    "one query head of a group contributes, the others are lost: FlagGems#898",
    lambda grouped: grouped[:, :, 0], stage="grad_key", diagnosis="group-gradient-of-first-head")
_register_gradient_fault(_replace_group_sum, "group_gradient_without_its_last_head",
    "the loop over a group's query heads ends one early",
    lambda grouped: np.asarray(grouped[:, :, : max(grouped.shape[2] - 1, 1)].sum(axis=2)), stage="grad_key",
    diagnosis="group-gradient-without-last-head")
_register_gradient_fault(_replace_group_sum, "group_gradient_averaged",
    "the mean over a group's query heads for their sum",
    lambda grouped: np.asarray(grouped.mean(axis=2)), stage="grad_key", diagnosis="group-gradient-averaged")
_register_gradient_fault("_sum_broadcast", "bias_gradient_not_summed",
    "a broadcast bias gets a gradient of the scores' shape: jax#30593, TransformerEngine#2537",
    lambda gradient, bias: gradient, stage="grad_bias")
_register_gradient_fault("_sum_broadcast", "bias_gradient_of_the_first_of_a_broadcast_axis",
    "the gradient of a broadcast bias is not added up: jax#30593",
    lambda gradient, bias: gradient[tuple(slice(1) if length == 1 else slice(None) for length in bias.shape)],
    stage="grad_bias", diagnosis="bias-gradient-of-first")
_register_gradient_fault("_sum_broadcast", "bias_gradient_summed_over_heads_for_batch",
    "the wrong axis is added up, silent where B == H: TransformerEngine#2537's kind",
    lambda gradient, bias: backend._sum_broadcast(np.swapaxes(gradient, 0, 1)
        if gradient.shape[0] == gradient.shape[1] else gradient, bias),
    stage="grad_bias", diagnosis="bias-gradient-of-batch-for-heads")
_register_gradient_fault("_sum_broadcast", "bias_gradient_averaged", "the mean along broadcast axes for the sum",
    lambda gradient, bias: (backend._sum_broadcast(gradient, bias) * (bias.size / gradient.size)).astype(
        gradient.dtype), stage="grad_bias", diagnosis="bias-gradient-averaged")
_register_gradient_fault("_sum_broadcast", "bias_gradient_zero", "no gradient for the bias: jax#27184, pytorch#148476",
    lambda gradient, bias: np.zeros_like(bias), stage="grad_bias", diagnosis="gradient-of-bias-zero")
_register_gradient_fault(forms.change_bias_gradient_terms, "bias_gradient_scaled",
    "the bias treated as if it were scaled with the scores: TransformerEngine#236's kind",
    lambda call, gradient: np.asarray(gradient * call.scale_factor), stage="grad_bias",
        diagnosis="bias-gradient-scaled")
_register_gradient_fault(partial(_change_bias_gradient_terms_if, forms.CALL_CONDITIONS["softcap"]),
    "bias_gradient_through_the_softcap",
    "the bias treated as if it were capped with the scores: onnx#7865's kind",
    lambda call, gradient: np.asarray(gradient * backend._cap_slope(call.stages["capped"], call.softcap)),
    stage="grad_bias", diagnosis="bias-gradient-through-softcap")


def _backward_reading_name(option: str) -> str:
    return f"{'causality' if option == 'is_causal' else option.replace('_', '-')}-ignored-on-the-way-back"


for _option, _defect in (
    ("mask", "p made again from scores that are not masked"),
    ("window", "p made again without the window: jax#32300's kind"),
    ("key_lengths", "p made again for padding too: tilelang#2461's kind"),
    ("is_causal", "the gradient sees the future: keras#23038's kind"),
):
    _register_gradient_fault(_ignore_option_backwards, f"{_option.removeprefix('is_')}_ignored_in_the_backward_pass",
        _defect, _option,
        diagnosis=_backward_reading_name(_option))
_register_gradient_fault(_shift_backward_causality, "causal_sees_the_next_key_in_the_backward_pass",
    "j <= i + 1 in the backward pass alone: tt-metal#41215's kind", 1, diagnosis="causal-next-key-on-the-way-back")
_register_gradient_fault(_shift_backward_causality, "causal_without_its_own_key_in_the_backward_pass",
    "j < i in the backward pass alone: onnxruntime#25927's kind",
    -1, diagnosis="causal-without-own-key-on-the-way-back")
_register_gradient_fault(forms.replace_backward_weights, "bias_forgotten_in_the_backward_pass",
    "p made again from scores without the bias: jax#32242's kind", lambda call: call.weights if call.bias is None
        else forms.recompute_weights(call.logits - np.where(np.isfinite(call.bias), call.bias, 0), call.log_sum_exp),
    diagnosis="bias-ignored-on-the-way-back")
_register_gradient_fault(forms.replace_backward_weights, "softcap_forgotten_in_the_backward_pass",
    "p made again from scores that are not capped: vllm#7425's kind", lambda call: call.weights if call.softcap is None
        else forms.recompute_weights(call.logits - call.stages["capped"] + call.stages["scores"], call.log_sum_exp),
    diagnosis="softcap-ignored-on-the-way-back")
_register_gradient_fault(forms.replace_backward_weights, "backward_pass_reads_log_sum_exp_in_base_two",
    "log2 written, log read: flashinfer#2113", lambda call: forms.recompute_weights(call.logits,
        call.log_sum_exp / np.asarray(np.log(2), call.logits.dtype)),
    diagnosis="log-sum-exp-of-base-2-on-the-way-back")
_register_gradient_fault(forms.replace_backward_weights, "gradient_nan_at_an_empty_row",
    "0 times infinity behind a right output: tensorflow#11756, jax#17070, iree#24178",
    lambda call: np.where(np.isneginf(call.log_sum_exp), np.nan, call.weights).astype(call.weights.dtype),
    diagnosis="empty-rows-nan")
_register_gradient_fault(forms.replace_backward_weights, "gradient_uniform_at_an_empty_row",
    "the output is set to 0, the weights of the backward pass are not: keras#21123's kind",
    lambda call: np.where(np.isneginf(call.log_sum_exp), 1 / call.weights.shape[-1], call.weights).astype(
        call.weights.dtype), diagnosis="empty-rows-uniform")
_register_rounding_fault(forms.replace_backward_weights, "backward_pass_reads_log_sum_exp_in_float16",
                 "statistics kept in 16 bits",
    lambda call: forms.recompute_weights(call.logits, round_to_float16(call.log_sum_exp)))
_register_rounding_fault(forms.replace_backward_weights, "backward_weights_in_bfloat16",
                 "p is stored in bfloat16 for the backward pass",
    lambda call: round_to_bfloat16(call.weights))
_register_rounding_fault(forms.replace_backward_weights, "backward_weights_in_float16",
                 "p is stored in float16 for the backward pass",
    lambda call: round_to_float16(call.weights))
_register_rounding_fault(forms.replace_gradient_row_sum, "row_sum_from_an_output_in_bfloat16",
    "delta = sum g o from an output that was rounded for storage",
    lambda call, terms: backend._row_sum(call.grad_output * round_to_bfloat16(call.stages["output"])))
_register_rounding_fault("_sum_over_queries", "gradients_kept_in_bfloat16_between_tiles",
    "dk and dv are added up in the output's type: torch's CPU kernel",
    product_over_queries(tiled_product(32, round_to_bfloat16)), stage="grad_key")
_register_rounding_fault("_sum_over_queries", "gradient_products_in_tf32",
                 "TF32 in the backward pass: pytorch#161022, mlx#3860",
    lambda weights, rows: backend._sum_over_queries(round_to_tf32(weights), round_to_tf32(rows)), stage="grad_key")
for _option, _of, _given, _defect in (
    ("window", "of_groups", "groups", "p made again without the window where heads are shared: jax#32300's kind"),
    ("is_causal", "with_a_bias", "bias", "p made again from all keys where a bias is given: keras#23038's kind"),
    ("key_lengths", "with_a_softcap", "softcap", "p made again for padding behind a cap: onnxruntime#28379's kind"),
    ("mask", "of_groups", "groups", "p made again without the mask where heads are shared: FlagGems#898's kind"),
):
    _register_pair_fault(partial(_ignore_option_backwards, _option),
        f"{_option.removeprefix('is_')}_ignored_in_the_backward_pass_{_of}",
        _defect, forms.CALL_CONDITIONS[_given], diagnosis=_backward_reading_name(_option))
for _tile in (16, 64):
    _register_pair_fault(_skip_diagonal_tile_in_value_gradient, f"causal_value_gradient_late_by_a_tile_of_{_tile}",
        "structure: the loop over tiles of queries begins behind the diagonal", _tile, stage="grad_value")
_register_pair_fault(forms.change_gradients, "query_gradient_beyond_width_64_zero",
    "structure: one block of 64 columns is written", lambda gradients: gradients | {"grad_query": np.where(
        _indices_along(gradients["grad_query"], -1) < 64, gradients["grad_query"], 0)})
for _stage, _which in (("masked", "behind_a_mask"), ("biased", "with_a_bias")):
    _register_pair_fault(lambda stage: forms.replace_gradient_steps(lambda call: _WITHOUT_SOFTCAP_SLOPE
        if stage in call.stages else {}),
        f"softcap_slope_missing_{_which}", f"the {_stage} path forgets the cap on the way back: onnx#7865's kind",
        _stage, diagnosis="softcap-slope-missing")
_register_pair_fault(forms.replace_gradient_steps, "query_gradient_scaled_twice_with_a_softcap",
    "structure: the scale is part of the cap's argument, and applied once more",
    lambda call: {} if call.softcap is None else {"_weighted_sum":
        lambda gradient, key: backend._weighted_sum(gradient, key) * call.scale_factor},
    diagnosis="gradients-scaled-twice")
# Keep the last query of a bias that all share, where causality writes row by row.
_register_pair_fault(partial(_change_bias_gradient_terms_if, lambda call: call.is_causal and _is_bias_broadcast(call,
    2)),
    "bias_gradient_of_the_last_query_when_causal",
    "a bias that queries share is written row by row and not added up: jax#30593's kind",
    lambda call, gradient: np.where(_indices_along(gradient, -2) == gradient.shape[-2] - 1, gradient, 0),
    stage="grad_bias")
_register_pair_fault(partial(_change_bias_gradient_terms_if, lambda call: call.key_lengths is not None
    and _is_bias_broadcast(call, 0)),
    "bias_gradient_of_the_first_batch_entry_with_key_lengths",
    "a bias that batch entries share is not added up: TransformerEngine#2537's kind",
    lambda call, gradient: np.where(_indices_along(gradient, -4) == 0, gradient, 0), stage="grad_bias")
_register_pair_fault(partial(_change_bias_gradient_terms_if, lambda call: call.has_shared_heads
    and not _is_bias_broadcast(call, 1)),
    "bias_gradient_averaged_in_groups", "query heads of a group get the mean of their gradients: FlagGems#898's kind",
    lambda call, gradient: np.repeat(forms.split_into_groups(gradient, call.key.shape[1]).mean(axis=2),
        gradient.shape[1] // call.key.shape[1], axis=1).astype(gradient.dtype), stage="grad_bias")
_register_pair_fault(partial(_change_bias_gradient_terms_if, forms.CALL_CONDITIONS["window"]),
    "bias_gradient_zero_in_a_window",
    "no gradient for the bias where a window is given: jax#27184's kind",
    lambda call, gradient: np.zeros_like(gradient), stage="grad_bias", diagnosis="gradient-of-bias-zero")
_register_pair_fault(forms.change_value_gradient_weights, "value_gradient_of_the_first_head_of_causal_groups",
    "the causal path reads one head of each group: FlagGems#898's kind",
    lambda call, weights: weights if not call.is_causal or not call.has_shared_heads
        else np.where(_indices_along(weights, -3) % (weights.shape[1] // call.key.shape[1]) == 0, weights, 0),
        stage="grad_value")
_register_pair_fault(forms.replace_key_gradient_product, "key_gradient_behind_whole_tiles_of_64_zero",
    "the last tile of keys is not written: FlagGems#898's kind",
    _product_with_zeros_from_key(lambda keys: max(keys // 64 * 64, min(keys, 64))), stage="grad_key")
_register_pair_fault("_sum_over_queries", "key_and_value_gradients_beyond_128_keys_zero",
    "the grid of the backward pass has one tile of 128 keys: pytorch#158212's kind",
    _product_with_zeros_from_key(lambda keys: 128), stage="grad_key")
_register_pair_fault(forms.replace_value_gradient_product, "value_gradient_of_the_first_128_queries",
    "the loop over tiles of queries runs once: pytorch#158212's kind",
    _product_over_first_queries(lambda queries: 128), stage="grad_value")
_register_pair_fault("attention_gradients._weighted_sum", "query_gradient_of_the_first_128_keys",
    "the loop over tiles of keys runs once: pytorch#158212's kind",
    lambda gradient, key: backend._weighted_sum(gradient[..., :128], key[..., :128, :]))
_register_pair_fault("attention_gradients._row_sum", "row_sum_of_the_gradient_in_the_first_128_keys",
    "the sum over a row ends with its first tile: Odyssey#2134's kind",
    lambda terms: backend._row_sum(terms[..., :128]))
# fmt: on
