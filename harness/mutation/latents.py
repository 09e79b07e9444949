"""Faults of latent vectors, of normalised queries and keys, and of states of parts that are merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import LseBase, Norm, Stages
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, change_argument, change_call_arguments, round_to_bfloat16
from attncheck.mutation.mutant import (
    ROUNDING_FIELDS,
    StepReplacements,
    rebind_globals,
    register_control,
    register_fault,
)

_change_latent_call = partial(change_call_arguments, "latent_attention")
_register_scale_fault = partial(register_fault, "latents", stage="scores")
_register_key_fault = partial(register_fault, "latents", stage="raw_scores")
_register_value_fault = partial(register_fault, "latents", stage="output")
CallArguments = Mapping[str, Any]
"""The arrays and options of a call, by name."""


def _rotary_width(call: CallArguments) -> int:
    return 0 if call.get("key_rotary") is None else int(call["key_rotary"].shape[-1])


def _change_default_scale(scale_of_call: Callable[[CallArguments], float]) -> StepReplacements:
    """Replace the default scale."""
    return _change_latent_call(lambda call: {"scale": scale_of_call(call)} if call.get("scale") is None else {})


@register_control("_project_latents", why="keys and values are made of three latent vectors at a time")
def made_in_chunks(latent: Array, projection: Array) -> Array:
    parts = [
        backend._project_latents(latent[:, start : start + 3], projection) for start in range(0, latent.shape[1], 3)
    ]
    return np.concatenate(parts, axis=2) if parts else backend._project_latents(latent, projection)


@register_control("latent_attention", why="the part that is rotated stands in front")
def rotated_part_in_front(
    query: Array, latent: Array, key_projection: Array, value_projection: Array, **options: Any
) -> Stages:
    rotated = [options.pop(name, None) for name in ("query_rotary", "key_rotary")]
    key, value = (backend._project_latents(latent, weight) for weight in (key_projection, value_projection))
    if rotated[0] is not None:
        shared = np.broadcast_to(rotated[1][:, np.newaxis], (*key.shape[:-1], rotated[1].shape[-1]))
        query, key = np.concatenate([rotated[0], query], axis=-1), np.concatenate([shared, key], axis=-1)
    return backend.attention(query, key, value, **options)


_register_norm_fault = partial(register_fault, "norms", stage="normalized_query")


def _normalize_by_name(change: Callable[..., Array]) -> StepReplacements:
    """Normalise query and key in different ways: the first argument of ``change`` is the input's name."""

    def normalized_attention(*arrays: Array, **keywords: Any) -> Stages:
        names = iter(("query", "key"))
        normalize = rebind_globals(
            backend.normalized_attention, _normalize=lambda *arguments: change(next(names), *arguments)
        )
        stages: Stages = normalize(*arrays, **keywords)
        return stages

    return {"normalized_attention": normalized_attention}


def _normalize_by_head(inputs: Array, weight: Array | None, norm: Norm, epsilon: float, is_full: bool) -> Array:
    """Normalise each head's vector instead of the full width, which has the weights."""
    normalized = backend._normalize(inputs, None if is_full else weight, norm, epsilon, is_full=False)
    if not is_full or weight is None:
        return normalized
    return np.asarray(normalized * weight.reshape(inputs.shape[1], 1, -1))


def _replace_norm_divisor(divisor: Callable[[Array, float], Array]) -> StepReplacements:
    """Divide by another root, of the mean of squares or of their sum."""
    return {
        "_root_mean_square": lambda squares, epsilon: divisor(squares.mean(axis=-1, keepdims=True), epsilon),
        "_length": lambda squares, epsilon: divisor(squares.sum(axis=-1, keepdims=True), epsilon),
    }


def _replace_row_normalization(change: Callable[..., Array]) -> StepReplacements:
    """Normalise rows, of a head or of all heads, in another right way, in float32 if they have 16 bits."""

    def normalize_rows(inputs: Array, weight: Array | None, norm: Norm, epsilon: float, is_full: bool) -> Array:
        rows = backend._merge_heads(inputs) if is_full else inputs
        wide = rows if rows.dtype.itemsize > 2 else rows.astype(np.float32)
        root = backend._root_mean_square if norm == "rms" else backend._length
        normalized = change(wide, root(backend._squares(rows), epsilon), weight).astype(inputs.dtype)
        return backend._split_heads(normalized, inputs.shape[1]) if is_full else normalized

    return {"_normalize": normalize_rows}


_change_norm_call = partial(change_call_arguments, "normalized_attention")
_register_merge_fault = partial(register_fault, "merging", stage="weights")
_LN2 = math.log(2)


def _replace_merge_stage(stage: str, change: Callable[[Array], Array]) -> StepReplacements:
    """Replace the weights or the log_sum_exp, given the parts' natural log-sum-exps (B, H, Lq, N)."""
    return {"merge_states.softmax": lambda scores: backend.softmax(scores) | {stage: change(scores)}}


_replace_merge_weights, _replace_merge_log_sum_exp = (
    partial(_replace_merge_stage, "weights"),
    partial(_replace_merge_stage, "log_sum_exp"),
)


def _change_merge_scores(change: Callable[[Array], Array]) -> StepReplacements:
    """Change the log-sum-exps before their softmax."""
    return {"merge_states.softmax": lambda scores: backend.softmax(change(scores))}


def _finite_maximum(scores: Array) -> Array:
    """Return the largest number of each row, 0 if all parts are empty."""
    highest = scores.max(axis=-1, keepdims=True)
    return np.where(np.isneginf(highest), 0, highest)


def _softmax_without_maximum(scores: Array) -> Stages:
    powers = np.exp(scores)
    total = powers.sum(axis=-1, keepdims=True)
    return {"weights": powers / np.where(total == 0, 1, total), "log_sum_exp": np.log(total)[..., 0]}


def _merge_weights_by_larger_part(scores: Array) -> Array:
    """Merge one part after the other, and weigh the earlier ones only by the largest of them."""
    weights, running = np.zeros_like(scores), scores[..., :1]
    weights[..., :1] = ~np.isneginf(running)
    for number in range(1, scores.shape[-1]):
        part = scores[..., number : number + 1]
        shares = backend.softmax(np.concatenate([running, part], axis=-1))["weights"]
        weights[..., :number] *= shares[..., :1]
        weights[..., number : number + 1] = shares[..., 1:]
        running = np.maximum(running, part)
    return weights


# What is right.
MergedPart = tuple[Array, Array]
"""Output and log_sum_exp of parts that have been merged, (B, H, Lq, Dv) and (B, H, Lq)."""
WeightsAndTotal = tuple[Array, Array]
"""Weights of parts and the log_sum_exp of all of them, (B, H, Lq, N) and (B, H, Lq)."""


def _replace_merge(merge: Callable[[list[MergedPart]], MergedPart]) -> StepReplacements:
    """Merge by a function of the parts, in float32 or wider, their log-sum-exps natural."""

    def merge_states(outputs: Array, log_sum_exps: Array, *, lse_base: LseBase = "e") -> Stages:
        parts = backend._without_empty_parts(outputs, log_sum_exps).astype(log_sum_exps.dtype)
        output, total = merge(list(zip(parts, backend._natural_logarithms(log_sum_exps, lse_base), strict=True)))
        whole = backend._logarithms_in_base(total, lse_base)
        return {"log_sum_exp": whole, "output": output.astype(outputs.dtype)}

    return {"merge_states": merge_states}


_register_right_merge = partial(register_control, _replace_merge)


def _merge_by_weights(weigh: Callable[[Array], WeightsAndTotal]) -> Callable[[list[MergedPart]], MergedPart]:
    """Average the parts by weights, which come with the whole: ``weigh(totals)``, the parts along the last axis."""

    def merge_by_weights(parts: list[MergedPart]) -> MergedPart:
        outputs, totals = zip(*parts, strict=True)
        weights, whole = weigh(np.stack(totals, axis=-1))
        return backend._average_parts(weights, np.stack(outputs, axis=-2)), whole

    return merge_by_weights


def _merge_pair(*pair: MergedPart) -> MergedPart:
    """Merge two parts by a softmax of two."""
    return _merge_by_weights(lambda totals: ((stages := backend.softmax(totals))["weights"], stages["log_sum_exp"]))(
        [*pair]
    )


@_register_right_merge(why="two by two, as a reduction over devices does")
def parts_merged_in_a_tree(parts: list[MergedPart]) -> MergedPart:
    while len(parts) > 1:
        pairs = [_merge_pair(*parts[start : start + 2]) for start in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


def _merge_by_logistic_function(first: MergedPart, second: MergedPart) -> MergedPart:
    (output, total), (own_output, own_total) = first, second
    with np.errstate(all="ignore"):
        share = np.where(np.isneginf(total), 1, 1 / (1 + np.exp(total - own_total)))
        share = np.where(np.isneginf(own_total), 0, share).astype(total.dtype)
    return output - share[..., np.newaxis] * (output - own_output), np.logaddexp(total, own_total)


def _weights_from_log_sum_exp(totals: Array) -> WeightsAndTotal:
    whole = backend.softmax(totals)["log_sum_exp"]
    return np.exp(totals - np.where(np.isneginf(whole), 0, whole)[..., np.newaxis]), whole


def _merge_weights_in_base_two(totals: Array) -> WeightsAndTotal:
    highest = _finite_maximum(totals / _LN2)
    powers = np.exp2(totals / _LN2 - highest)
    sums = powers.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return powers / np.where(sums == 0, 1, sums), (highest + np.log2(sums))[..., 0] * _LN2


@_register_right_merge(why="outputs times e^(L_n - m), added up, and divided at the end")
def parts_divided_at_the_end(parts: list[MergedPart]) -> MergedPart:
    highest = reduce(np.maximum, [total for _, total in parts])
    shift = np.where(np.isneginf(highest), 0, highest)
    powers = [np.exp(total - shift) for _, total in parts]
    sums = sum(powers[1:], powers[0])
    mean = sum(output * power[..., np.newaxis] for (output, _), power in zip(parts, powers, strict=True))
    with np.errstate(divide="ignore"):
        return np.asarray(mean / np.where(sums == 0, 1, sums)[..., np.newaxis]), np.asarray(shift + np.log(sums))


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
register_control("latent_attention", "projections_absorbed",
    "the projections are absorbed: no key and no value is made",
    backend.ABSORBED.latent_attention)
register_control("_project_latents", "made_from_the_last_term",
    "the terms of a projection are added up from the last to the first",
    lambda latent, projection: backend._project_latents(
        np.ascontiguousarray(latent[..., ::-1]), np.ascontiguousarray(projection[:, ::-1])))
_register_scale_fault(_change_default_scale, "scale_without_the_rotated_part",
    "1/sqrt of the part that is not rotated: NVIDIA/Megatron-LM#1501's kind",
    lambda call: 1 / math.sqrt(call["query"].shape[-1]), diagnosis="scale-inverse-root-of-Dn")
_register_scale_fault(_change_default_scale, "scale_of_absorbed_queries",
              "1/sqrt of the width that absorbed queries have, 576 for 192",
    lambda call: 1 / math.sqrt(call["latent"].shape[-1] + _rotary_width(call)),
    diagnosis="scale-inverse-root-of-C+Dr")
_register_scale_fault(_change_default_scale, "scale_of_the_values_of_latents",
    "1/sqrt of the values' width, which is that of no query: NVIDIA/Megatron-LM#1501's kind",
    lambda call: 1 / math.sqrt(call["value_projection"].shape[-1]), diagnosis="scale-inverse-root-of-Dv")
_register_scale_fault(_change_default_scale, "scale_of_latents_reversed",
    "multiplied by sqrt(D + Dr) for divided by it: AI-Hypercomputer/maxtext#1370",
    lambda call: (call["query"].shape[-1] + _rotary_width(call)) ** 0.5, diagnosis="scale-root-of-width")
for _fault in forms.faults_from_readings(
    ("latents", "rotated-part-ignored", "the scores lack the part that is rotated"),
    ("latents", "rotated-part-scaled-twice",
        "the rotated part is scaled before it is added, and with the rest again"),
    ("latents", "latent-projections-swapped", "kv_b_proj is split with v before k_nope"),
    *(
        ("latents", f"{of}-projection-{reading}", defect.format(of))
        for of in ("key", "value")
        for reading, defect in (
            ("transposed",
                "W_UK or W_UV is kept transposed in a checkpoint: that of {}s is multiplied from the other side"),
            ("ignored",
                "latent vectors are taken for {}s, which are as wide: the projection is not absorbed anywhere"),
            ("viewed",
                "kv_b_proj is viewed as heads first, for {}s alone: a reshape without a transposition"),
        )
    ),
    ("merging", "first-part-in-other-base", "a prefix in base e meets a suffix in base 2: sglang#40903"),
    ("merging", "lse-base-2", "log is written and log2 is read: sglang#35045"),
    ("merging", "empty-part-at-zero", "the logarithm of an empty part's sum is 0: mlx#2608"),
    ("merging", "last-part-lost", "structure: one part fewer is merged than there are"),
    ("merging", "last-part-lost", "structure: a warp merges its 32 parts, and not a last one behind",
        "parts_beyond_32_lost", lambda problem: len(problem.inputs["outputs"]) > 32),
):
    register_fault(**_fault)
_register_key_fault(partial(change_argument, "latent_attention", "latent"), "chunks_of_latents_from_the_start",
    "a long cache is made into keys in chunks, each from its start: vllm#26042's kind",
    lambda latent: np.concatenate([latent[:, :32], latent[:, : max(latent.shape[1] - 32, 0)]], axis=1))
_register_value_fault("latent_attention", "mean_of_latents_in_bfloat16",
    "the mean of latent vectors is stored in bfloat16 before W_UV",
    lambda query, latent, key_projection, value_projection, **options:
        (stages := backend.latent_attention(query, latent, key_projection, value_projection, **options)) | {"output":
        np.asarray(round_to_bfloat16(stages["weights"] @ latent[:, np.newaxis]) @ value_projection)}, **ROUNDING_FIELDS)
register_control("_squares", "squares_in_float64", "squares in float64, rounded once behind the root",
    lambda rows: rows.astype(np.float64) ** 2, dtypes=("float32", "float16"))
register_control(_replace_row_normalization, "norm_by_reciprocal_root", "the reciprocal of the root is multiplied",
    lambda rows, divisor, weight: np.asarray(rows * (1 / divisor) * (1 if weight is None else weight)))
register_control(_replace_row_normalization, "norm_weighted_before_it_is_rounded",
    "weights are multiplied before anything is rounded to 16 bits, as in Gemma",
    lambda rows, divisor, weight: np.asarray(rows / divisor if weight is None else rows * weight / divisor))
_register_norm_fault("_normalize", "norm_left_out", "the norm is never called: Cerebras/modelzoo#85",
    lambda inputs, *_: inputs, diagnosis="norm-ignored")
_register_norm_fault(_normalize_by_name, "norm_of_keys_alone", "keys and values are normalised: kyegomez/MegaVIT#17",
    lambda name, inputs, *rest: inputs if name == "query" else backend._normalize(inputs, *rest),
    diagnosis="norm-of-key-alone")
register_fault("norms", _normalize_by_name, "norm_of_queries_alone",
    "one of two norms is missed: huggingface/transformers#37620's kind",
    lambda name, inputs, *rest: inputs if name == "key" else backend._normalize(inputs, *rest),
    stage="normalized_key", diagnosis="norm-of-query-alone")
_register_norm_fault("_normalize", "full_width_for_a_head", "the model's width for a head's: PaddleFormers#2998",
    lambda inputs, weight, norm, epsilon, is_full: backend._normalize(inputs, weight if is_full or weight is None
        else np.tile(weight, inputs.shape[1]), norm, epsilon, is_full=True), diagnosis="norm-width")
_register_norm_fault("_normalize", "a_head_for_the_full_width", "the norm behind the split: vllm-metal#767, mlxcel#316",
    _normalize_by_head, diagnosis="norm-width")
_register_norm_fault(_change_norm_call, "norm_behind_the_rotation",
    "queries and keys are normalised behind the rotation: torchtune#2809",
    lambda call: {"norm_after_rotation": True} if call.get("rotary_cos") is not None else {}, diagnosis="norm-order")
_register_norm_fault(_change_norm_call, "norm_before_the_rotation",
    "Llama 4's and HunYuan's norm behind the rotation taken before it: torchtune#2809, the other way round",
    lambda call: {"norm_after_rotation": False} if call.get("rotary_cos") is not None else {}, diagnosis="norm-order")
_register_norm_fault(_change_norm_call, "norm_weights_swapped", "q_norm is loaded as k_norm, and k_norm as q_norm",
    lambda call: {name: call.get(source) for name, source in (("query_norm_weight", "key_norm_weight"),
        ("key_norm_weight", "query_norm_weight")) if call.get("norm_over") != "full"
        or call["query"].shape[1] == call["key"].shape[1]}, diagnosis="norm-weights-swapped")
_register_norm_fault("_squares", "squares_in_sixteen_bits",
    "squares overflow in float16: pytorch#133085, LeetCUDA#335, nntrainer#3935",
    lambda rows: np.asarray(rows * rows), dtypes=("float16",))
_register_norm_fault(_replace_norm_divisor, "epsilon_left_out", "epsilon is lost: microsoft/DeepSpeed#581",
    lambda square, epsilon: np.asarray(np.sqrt(square)), diagnosis="norm-epsilon-ignored")
_register_norm_fault("_root_mean_square", "epsilon_outside_the_root",
    "sqrt(mean) + epsilon, as in layers of other libraries",
    lambda squares, epsilon: np.asarray(np.sqrt(squares.mean(axis=-1, keepdims=True)) + epsilon),
    diagnosis="norm-epsilon-outside")
_register_norm_fault("_length", "epsilon_as_the_least_square",
    "sqrt(max(x.x, epsilon)), as tf.math.l2_normalize has it",
    lambda squares, epsilon: np.asarray(np.sqrt(np.maximum(squares.sum(axis=-1, keepdims=True), epsilon))),
    diagnosis="norm-epsilon-least-square")
_register_norm_fault("_length", "epsilon_under_the_root_of_a_length", "sqrt(x.x + epsilon) for max(|x|, epsilon)",
    lambda squares, epsilon: np.asarray(np.sqrt(squares.sum(axis=-1, keepdims=True) + epsilon)),
    diagnosis="norm-epsilon-inside")
_register_norm_fault("_root_mean_square", "epsilon_of_another_model", "epsilon is fixed at 1e-5: amd/IRON#139",
    lambda squares, epsilon: backend._root_mean_square(squares, 1e-05), diagnosis="norm-epsilon-of-1e-5")
_register_norm_fault("_root_mean_square", "epsilon_no_less_than_one_in_ten_thousand",
    "epsilon is at least 1e-4, so that float16 has it: nntrainer#4318",
    lambda squares, epsilon: backend._root_mean_square(squares, max(epsilon, 1e-4)),
    diagnosis="norm-epsilon-at-least-1e-4")
_register_norm_fault("_root_mean_square", "epsilon_times_the_largest_square",
    "epsilon is added behind a division by the largest element: apple/coremltools#2821",
    lambda squares, epsilon: backend._root_mean_square(
        squares, epsilon * squares.max(axis=-1, keepdims=True, initial=0)))
_register_norm_fault("_root_mean_square", "length_for_root_mean_square", "unit vectors where the model has RMSNorm",
    lambda squares, epsilon: backend._length(squares, epsilon), diagnosis="norm-kind")
_register_norm_fault("_multiply_by_weight", "weight_plus_one", "Gemma's weights are 1 + w, others' w",
    lambda normalized, weight: np.asarray(normalized * (1 + weight)), diagnosis="norm-weight-plus-one")
_register_norm_fault("_multiply_by_weight", "norm_weights_left_out", "the weights of the norms are not loaded",
    lambda normalized, weight: normalized, diagnosis="norm-weight-ignored")
_register_norm_fault("_normalize", "mean_subtracted", "LayerNorm for RMSNorm: the mean is subtracted",
    lambda inputs, weight, norm, epsilon, is_full: backend._normalize(inputs - inputs.mean(axis=(1, 3) if is_full
        else 3, keepdims=True), weight, norm, epsilon, is_full), diagnosis="norm-of-differences")
_register_merge_fault("_logarithms_in_base", "whole_returned_in_base_e",
    "the whole is returned in base e, whatever the parts are in: vllm#28840's kind",
    lambda scores, base: scores, stage="log_sum_exp", diagnosis="log-sum-exp-base-e")
_register_merge_fault("_logarithms_in_base", "whole_returned_in_base_two",
    "the whole is returned in base 2, whatever the parts are in: cudnn-frontend#931's kind",
    lambda scores, base: np.asarray(scores / _LN2), stage="log_sum_exp", diagnosis="log-sum-exp-base-2")
_register_merge_fault("merge_states.softmax", "parts_merged_without_their_maximum",
    "e^L without its maximum: inf / inf, or 0 / 0: trl#7181", _softmax_without_maximum)
_register_merge_fault(_replace_merge_weights, "nothing_at_all_gives_nan",
              "-inf minus -inf where all parts are empty: flashinfer#4051",
    lambda scores: np.where(np.isneginf(scores).all(axis=-1, keepdims=True), np.nan,
        backend.softmax(scores)["weights"]), diagnosis="empty-rows-nan")
_register_merge_fault(_replace_merge_weights, "running_log_sum_exp_is_the_larger_one",
    "a merge of two keeps the larger log-sum-exp: the next part weighs too much", _merge_weights_by_larger_part)
_register_merge_fault(_replace_merge_weights, "parts_not_normalised",
              "structure: each part is scaled to the maximum, and never to the sum",
    lambda scores: np.asarray(np.exp(scores - _finite_maximum(scores))))
_register_merge_fault(_replace_merge_weights, "parts_averaged",
    "structure: the merge forgets how much each part weighs",
    lambda scores: backend.softmax(np.where(np.isneginf(scores), scores, 0).astype(scores.dtype))["weights"],
    diagnosis="parts-averaged")
_register_merge_fault(_replace_merge_log_sum_exp, "whole_of_nothing_is_plus_infinity",
    "a query without a key gets plus infinity, as in FlashAttention 2: vllm#28181",
    lambda scores: np.where(np.isneginf(total := backend.softmax(scores)["log_sum_exp"]), np.inf, total),
    stage="log_sum_exp")
_register_merge_fault(_replace_merge_log_sum_exp, "whole_is_the_maximum_alone",
              "the maximum is stored in place of the whole: aiter#3334's kind",
    lambda scores: np.asarray(scores.max(axis=-1)), stage="log_sum_exp", diagnosis="log-sum-exp-of-maximum-alone")
_register_merge_fault(_replace_merge_log_sum_exp, "whole_adds_the_logarithm_of_the_count",
              "structure: the parts are counted, not weighed",
    lambda scores: np.asarray(scores.max(axis=-1) + np.log(scores.shape[-1]).astype(scores.dtype)), stage="log_sum_exp")
_register_merge_fault(_replace_merge_log_sum_exp, "whole_without_its_maximum",
    "the maximum that was subtracted is not added again",
    lambda scores: np.asarray(backend.softmax(scores)["log_sum_exp"] - _finite_maximum(scores)[..., 0]),
    stage="log_sum_exp", diagnosis="log-sum-exp-without-maximum")
_register_merge_fault(_change_merge_scores, "empty_part_is_plus_infinity",
    "an empty part is written as plus infinity: vllm#28181, #15492",
    lambda scores: np.where(np.isneginf(scores), np.inf, scores))
_register_merge_fault(_change_merge_scores, "empty_part_is_minus_a_hundred",
    "-100 for minus infinity: a part that is empty weighs beside low ones",
    lambda scores: np.maximum(scores, np.asarray(-100, scores.dtype)), diagnosis="empty-part-at-minus-100")
_register_merge_fault("_without_empty_parts", "empty_part_let_through",
    "0 times the NaN of an empty part: flashinfer#5262, vllm#27491", lambda outputs, log_sum_exps: outputs,
        stage="output")
_register_merge_fault("merge_states", "first_part_handed_on_where_all_are_empty",
    "the first part is handed on where all are empty: vllm#39148's kind",
    lambda outputs, log_sum_exps, *, lse_base="e": (stages := backend.merge_states(outputs, log_sum_exps,
        lse_base=lse_base)) | {"output": np.where(np.isneginf(log_sum_exps.max(axis=0))[..., np.newaxis], outputs[0],
        stages["output"])}, stage="output")
_register_right_merge("parts_merged_in_sequence", "one part after the other, as they come around a ring",
    partial(reduce, _merge_pair))
_register_right_merge("parts_merged_in_reverse", "one part after the other, from the last",
    lambda parts: reduce(_merge_pair, parts[::-1]))
_register_right_merge("parts_merged_by_a_logistic_function",
    "a logistic function of the difference, as ring attention has it",
    partial(reduce, _merge_by_logistic_function))
_register_right_merge("parts_weighed_from_the_stored_whole",
    "weights e^(L_n - L) from an L that was stored, as split decoding combines",
    _merge_by_weights(_weights_from_log_sum_exp))
_register_right_merge("parts_merged_in_powers_of_two", "exponentials and the logarithm in base 2",
    _merge_by_weights(_merge_weights_in_base_two))
# fmt: on
