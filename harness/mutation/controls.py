"""Right implementations that compute in another way: none of them may be flagged.

Some are kernels as they are written for speed, in all four dtypes: they take keys, queries or widths in tiles, in
parts, in another order, or filled up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import EmptyRows, Stages
from attncheck.mutation import forms, kernel
from attncheck.mutation.blocks import attend_in_parts, cut_keys_evenly
from attncheck.mutation.kernel import (
    Array,
    MatrixProduct,
    Rounding,
    pad_last_axis,
    product_over_queries,
    tile_slices,
    tiled_product,
    tiled_row_sum,
)
from attncheck.mutation.mutant import (
    REFERENCE_NAME,
    WIDE_DTYPES,
    AttentionCall,
    StepReplacements,
    numpy_with,
    rebind_globals,
    register_control,
)
from attncheck.spec import LOGITS

_LOG2E = math.log2(math.e)
_NUMPY_IN_BASE_TWO = numpy_with(
    exp=lambda shifted: np.exp2(shifted * _LOG2E), log=lambda total: np.log2(total) * math.log(2)
)
"""exp(x) = exp2(x log2(e)), and log likewise."""


def _replace_products_and_row_sum(
    product: MatrixProduct, row_sum: Callable[[Array], Array], store: Rounding = kernel.leave_unrounded
) -> StepReplacements:
    """Use another product of matrices in scores and average, and another row sum."""
    return {
        "dot_scores._dot": lambda query, key: product(query, np.swapaxes(key, -1, -2)),
        "_softmax_with_sinks._row_sum": row_sum,
        "attention._weighted_sum": lambda weights, value: product(store(weights), value),
    }


def _replace_all_products_and_row_sum(product: MatrixProduct, row_sum: Callable[[Array], Array]) -> StepReplacements:
    return {**forms.replace_matrix_product(product), "_softmax_with_sinks._row_sum": row_sum}


def _divide_after_average(
    divide: Callable[[Array, Array], Array], store: Rounding = kernel.leave_unrounded
) -> StepReplacements:
    """Average exponentials, and divide by their sum behind that."""

    def average_exponentials(logits: Array, weights: Array, value: Array) -> Array:
        exponentials = forms.softmax_and_exponentials(logits)[1]
        total = backend._row_sum(exponentials)
        return divide(store(exponentials) @ value, np.where(total == 0, 1, total))

    return forms.replace_average(average_exponentials)


def _fused_backward_steps(call: AttentionCall, tile: int | None = None) -> StepReplacements:
    """Go back as fused kernels do: weights from log_sum_exp, Delta from the output, and sums in tiles."""
    tiled: StepReplacements = {}
    if tile is not None:
        tiled = {"_weighted_sum": tiled_product(tile), "_sum_over_queries": product_over_queries(tiled_product(tile))}
    return tiled | {
        "attention": forms.forward_pass_with_weights(call, forms.recompute_weights(call.logits, call.log_sum_exp)),
        "_row_sum": lambda terms: forms.gradient_row_sum_from_output(call),
    }


def _scale_gradients_last(call: AttentionCall, product: MatrixProduct = np.matmul) -> StepReplacements:
    """Leave the scale to the end of the sums over keys, and to the terms of those over queries."""
    summed = product_over_queries(product)
    return {
        "_scale_of": lambda query, scale: 1.0,
        "_weighted_sum": lambda gradient, key: backend._weighted_sum(gradient, key) * call.scale_factor,
        "_sum_over_queries": lambda weights, rows: summed(
            weights if rows is call.grad_output else weights * call.scale_factor, rows
        ),
    }


@register_control("general_scores", why="the bias is a feature that is always 1: [q W, b] . [k, 1]", dtypes=WIDE_DTYPES)
def bilinear_bias_as_one_more_feature(
    query: Array, key: Array, weight: Array, *, score_bias: Array | None = None
) -> Stages:
    """Begin every sum with the bias."""
    projected = query @ weight
    if score_bias is None:
        return {"scores": backend._dot(projected, key)}
    bias = np.broadcast_to(score_bias[:, np.newaxis, np.newaxis], (*projected.shape[:-1], 1))
    ones = np.ones((*key.shape[:-1], 1), key.dtype)
    return {"scores": backend._dot(np.concatenate([bias, projected], axis=-1), np.concatenate([ones, key], axis=-1))}


@register_control("multi_head_attention", hidden_stages=frozenset({"key", *LOGITS, "log_sum_exp"}) - {"capped"})
def key_bias_dropped(*arrays: Array, sinks: Array | None = None, **keywords: Any) -> Stages:
    """softmax is shift invariant: q b is the same for every key of a row"""
    if sinks is not None:
        raise NotImplementedError("a sink is no key: what all keys of a row have in common counts beside it")
    if keywords.get("mask_fill") is not None and keywords.get("key_bias") is not None:
        raise NotImplementedError("a fill is no score: what all scores of a row have in common counts beside it")
    if keywords.get("rotary_cos") is not None:
        raise NotImplementedError("a rotated bias is another one for every key")
    if keywords.get("past_key") is not None:  # which has the bias, so that the new keys keep theirs
        return backend.multi_head_attention(*arrays, **keywords)
    return backend.multi_head_attention(*arrays, **{**keywords, "key_bias": None})


@register_control("attention_gradients")
def masks_that_are_added(*arrays: Array, empty_rows: EmptyRows = "zero", **keywords: Any) -> Stages:
    """the gradient of a row without a key goes on to its scores, where the mask is a sum and no selection"""

    def forward(*inputs: Array, **options: Any) -> Stages:
        return backend.attention(*inputs, **options | {"empty_rows": empty_rows})

    gradients: Stages = rebind_globals(backend.attention_gradients, attention=forward)(*arrays, **keywords)
    return gradients


@register_control("_cap", why="tanh x = -expm1(-2x) / (2 + expm1(-2x))")
def softcap_by_expm1(scores: Array, softcap: float) -> Array:
    argument: Array = scores / softcap
    grown = np.expm1(-2 * np.abs(argument))  # e^-2|x| - 1 loses nothing at small x, and cannot overflow
    return np.asarray(softcap * np.copysign(-grown / (2 + grown), argument))


@register_control(forms.replace_softmax, why="what a window or a mask forbids is left out of the sums")
def attended_keys_gathered(logits: Array) -> Stages:
    """Take only the keys that may be attended, side by side, and put their weights back where they belong."""
    order = np.argsort(logits == -np.inf, axis=-1, kind="stable")
    stages = backend.softmax(np.take_along_axis(logits, order, axis=-1))
    weights = np.zeros_like(logits)
    np.put_along_axis(weights, order, stages["weights"], axis=-1)
    return stages | {"weights": weights}


@register_control("cosine_scores", why="q k / (|q| |k|) for (q / |q|) (k / |k|)")
def cosine_divided_after_the_product(query: Array, key: Array, *, scale: float | None = None) -> Stages:
    lengths = [np.linalg.norm(vectors, axis=-1, keepdims=True) for vectors in (query, key)]
    cosine = backend._dot(query, key) / (lengths[0] * np.swapaxes(lengths[1], -1, -2))
    return {"scores": cosine if scale is None else cosine * scale}


FUSED_ROUNDING_MODELS: Mapping[str, str] = {
    "float64": "native",
    "float32": "native",
    "bfloat16": "fused",
    "float16": "fused",
}
_EAGER_ROUNDING_MODELS = {**FUSED_ROUNDING_MODELS, "bfloat16": "eager", "float16": "eager"}
_MERGED_ROUNDING_MODELS = {dtype: f"{name}_lse" for dtype, name in FUSED_ROUNDING_MODELS.items()}


_register_right_kernel = partial(
    register_control, kernel.MixedPrecisionKernel, dtypes=kernel.ALL_DTYPES, rounding_models=FUSED_ROUNDING_MODELS
)
_register_right_wide_kernel = partial(
    register_control,
    partial(kernel.MixedPrecisionKernel, wide_stages=kernel.WIDE_STAGES),
    dtypes=kernel.ALL_DTYPES,
    rounding_models=FUSED_ROUNDING_MODELS,
)


def _round_weights(store: Rounding) -> StepReplacements:
    """Store the weights in the format of the ends before they meet the values."""
    return {"attention._weighted_sum": lambda weights, value: store(weights) @ value}


def _flash_attention(tile: int, product: MatrixProduct = np.matmul) -> kernel.StepsForRounding:
    """Take keys in tiles; exponentials are stored in the format of the ends before they meet the values."""

    def steps_for_rounding(store: Rounding) -> StepReplacements:
        online = forms.OnlineSoftmax(tile, product=lambda weights, value: product(store(weights), value))
        return {**online.steps, **forms.replace_gradient_steps(lambda call: _fused_backward_steps(call, tile))}

    return steps_for_rounding


def _compute_in_base_two(store: Rounding) -> StepReplacements:
    """Fold the scale into the query, and take 2^((s - m) log2(e))."""
    score = forms.replace_score_function(lambda query, key, factor: {"scores": backend._dot(query * factor, key)})
    return {**score, "_softmax_with_sinks.np": _NUMPY_IN_BASE_TWO, **_round_weights(store)}


def _fold_log2e_into_scale(store: Rounding) -> StepReplacements:
    """Multiply q k^T, or the tanh of a softcap, once, by the scale (or the cap) times log2(e); take 2^(s - m) of that.

    What FlashAttention's kernels do. docs/numerics.md, 4.1c, derives why its roundings are within every class. The
    softcap is in base e in front of that. A bias or a fill has a rounding of its own there, and may leave the range
    with it: behind these the logits are in base e, and so they are where each head has a scale of its own.
    """

    def make_steps(call: AttentionCall) -> StepReplacements:
        if call.bias is not None or call.mask_fill is not None or call.head_scale is not None:
            return {}
        folded: list[Array] = []

        def dot_scores(query: Array, key: Array, *, scale: float | None, softcap: float | None) -> Stages:
            stages = backend.dot_scores(query, key, scale=scale, softcap=softcap)
            if softcap is None:
                folded.append(stages["raw_scores"] * (backend._scale_of(query, scale) * _LOG2E))
            else:
                folded.append(np.tanh(stages["scores"] / softcap) * (softcap * _LOG2E))
            return stages

        def softmax_in_base_two(logits: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
            in_two = np.where(np.isneginf(logits), logits, folded[-1])
            sinks = None if sinks is None else sinks * _LOG2E
            stages = rebind_globals(backend._softmax_with_sinks, np=numpy_with(exp=np.exp2, log=np.log2))(
                in_two, sinks, empty_rows
            )
            return {**stages, "log_sum_exp": stages["log_sum_exp"] * math.log(2)}

        return {"dot_scores": dot_scores, "_softmax_with_sinks": softmax_in_base_two}

    return {**forms.replace_attention_steps(make_steps), **_round_weights(store)}


def _reorder_keys(
    reorder: Callable[[Array, float], Array], restore_order: Callable[[Array, int], Array], store: Rounding
) -> StepReplacements:
    """Lay keys out by ``reorder(array, filled up with)``, and take their weights back by ``restore_order``."""

    def softmax_of_reordered_keys(logits: Array) -> Stages:
        stages = backend.softmax(reorder(logits, -np.inf))
        return stages | {"weights": restore_order(stages["weights"], logits.shape[-1])}

    def average_reordered_values(weights: Array, value: Array) -> Array:
        return np.asarray(store(reorder(weights, 0)) @ np.swapaxes(reorder(np.swapaxes(value, -1, -2), 0), -1, -2))

    return {**forms.replace_softmax(softmax_of_reordered_keys), "attention._weighted_sum": average_reordered_values}


def _key_order_by_remainder(keys: int) -> Array:
    return np.argsort(np.arange(keys) % 7, kind="stable")


@_register_right_kernel(why="tiles that nobody attends to are not read")
def tiles_of_queries_that_skip_keys(store: Rounding) -> StepReplacements:
    """Take 64 queries at a time, and of the keys no more than the last one that any of them attends to."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        output = np.zeros((*weights.shape[:-1], value.shape[-1]), value.dtype)
        for span in tile_slices(weights.shape[-2], 64):
            attended = ~np.isneginf(logits[..., span, :]).all(axis=tuple(range(logits.ndim - 1)))
            end = int(np.flatnonzero(attended).max(initial=-1)) + 1
            output[..., span, :] = store(weights[..., span, :end]) @ value[..., :end, :]
        return output

    return forms.replace_average(average)


def _multiply_group_as_rows(left: Array, right: Array) -> Array:
    """Lay the query heads of a group one below the other: (B, Hkv, G L, X) times (B, Hkv, X, Y)."""
    batch, heads, rows, inner = left.shape
    stacked = left.reshape(batch, right.shape[1], heads // right.shape[1] * rows, inner)
    return np.asarray(stacked @ right).reshape(batch, heads, rows, right.shape[-1])


@register_control(partial(kernel.MixedPrecisionKernel, hidden_stages=frozenset()), why="the class eager, sums in pairs",
    dtypes=kernel.ALL_DTYPES,
    rounding_models=_EAGER_ROUNDING_MODELS)  # fmt: skip
def every_step_stored_in_the_format_of_the_ends(store: Rounding) -> StepReplacements:
    """Store every intermediate; products and sums accumulate in float32, in pairs."""

    def score(query: Array, key: Array, factor: float) -> Stages:
        raw_scores = store(kernel.pairwise_matmul(query, np.swapaxes(key, -1, -2)))
        return {"raw_scores": raw_scores, "scores": store(raw_scores * factor)}

    library = numpy_with(exp=lambda shifted: store(np.exp(store(shifted))), log=lambda total: store(np.log(total)))
    summed = {"_row_sum": lambda terms: store(kernel.pairwise_sum(terms))}
    softmax = rebind_globals(backend._softmax_with_sinks, np=library, **summed)
    return {
        **forms.replace_score_function(score),
        **forms.replace_softmax(
            lambda logits: {name: store(array) for name, array in softmax(logits, None, "zero").items()}
        ),
        "attention._weighted_sum": kernel.pairwise_matmul,
        "merge_states": backend.merge_states,  # of statistics in float32, whatever the ends are
    }


# Rows, laid out by hand: the variant and why it is right, and below what it does instead.
# fmt: off
register_control(None, REFERENCE_NAME, "the reference itself", {})
# Running sums of float16 are kept in float16 here, as einsum may, and so is a scaled query: these are of other
# classes than the reference.
register_control("_softmax_with_sinks._row_sum", "sum_sorted", "the row sum from the smallest term to the largest",
    lambda exponentials: kernel.sequential_sum(np.sort(exponentials, axis=-1)), dtypes=WIDE_DTYPES)
register_control(None, "sums_sequential", "one running sum each",
    _replace_all_products_and_row_sum(kernel.sequential_matmul, kernel.sequential_sum), dtypes=WIDE_DTYPES)
register_control(None, "sums_pairwise", "sums by halves", _replace_all_products_and_row_sum(kernel.pairwise_matmul,
    kernel.pairwise_sum),
        dtypes=WIDE_DTYPES)
register_control(None, "keys_reversed", "sums from the last term to the first",
    _replace_all_products_and_row_sum(lambda left, right: np.ascontiguousarray(left[..., ::-1])
        @ np.ascontiguousarray(right[...,
        ::-1, :]),
        lambda exponentials: kernel.sequential_sum(exponentials[..., ::-1])), dtypes=WIDE_DTYPES)
register_control(forms.replace_score_function, "query_prescaled", "the scale is folded into the query",
    lambda query, key, factor: {"scores": backend._dot(query * factor, key)}, dtypes=WIDE_DTYPES)
register_control(forms.replace_score_function, "query_and_key_prescaled",
    "the scale's root is folded into query and key",
    lambda query, key, factor: {"scores": backend._dot(query * math.copysign(math.sqrt(abs(factor)), factor),
        key * math.sqrt(abs(factor)))}, dtypes=WIDE_DTYPES)
register_control("_softmax_with_sinks.np", "exp2_for_exp", "exp(x) = exp2(x log2(e)), and log likewise",
    _NUMPY_IN_BASE_TWO)
register_control(forms.replace_reciprocal, "reciprocal_multiplied", "e (1/l) for e/l", lambda total: np.asarray(1
    / total))
register_control(_divide_after_average, "divided_last", "the values are averaged before the division by the sum",
    np.divide)
register_control(forms.replace_matrix_product, "products_transposed", "A B = (B^T A^T)^T, with copies in other layouts",
    lambda left, right: np.swapaxes(
        np.swapaxes(right, -1, -2).copy() @ np.swapaxes(left, -1, -2).copy(), -1, -2).copy())
register_control(forms.replace_matrix_product, "products_by_einsum", "einsum for matmul",
    lambda left, right: np.asarray(np.einsum("...ij,...jk->...ik", left, right)), dtypes=WIDE_DTYPES)
register_control(forms.replace_matrix_product, "products_row_by_row", "matrix times vector, one query at a time",
    lambda left, right: np.concatenate([left[..., :0, :] @ right,
        *(left[..., row : row + 1, :] @ right for row in range(left.shape[-2]))], axis=-2))
register_control(None, "accumulated_in_float64", "sums and exponentials in float64, rounded once",
    {**forms.replace_matrix_product(kernel.accumulate_in_float64(np.matmul)),
     "_softmax_with_sinks.np": numpy_with(exp=kernel.accumulate_in_float64(np.exp)),
        "_softmax_with_sinks._row_sum": kernel.accumulate_in_float64(backend._row_sum),
        "additive_scores.np": numpy_with(tanh=kernel.accumulate_in_float64(np.tanh))}, dtypes=("float32", "float16"))
# float64 holds a product of two numbers of float32 exactly
register_control(forms.replace_matrix_product, "fused_multiply_add", "one rounding per multiplication and addition",
    kernel.accumulate_in_float64(partial(kernel.sequential_matmul, store=kernel.round_to_float32)), dtypes=("float32",))
register_control("general_scores", "bilinear_key_first", "q (W k) for (q W) k",
    lambda query, key, weight, *, score_bias=None:
        forms.add_score_bias(backend._dot(query, key @ weight.T), score_bias))
register_control("general_scores", "bilinear_by_einsum", "the bilinear score in one einsum",
    lambda query, key, weight, *, score_bias=None:
        forms.add_score_bias(np.asarray(np.einsum("...qd,de,...ke->...qk", query, weight, key)), score_bias),
    dtypes=WIDE_DTYPES)
register_control(forms.change_filled_logits, "uniform_rows_by_the_least_finite_number",
    "equal scores have equal weights, whatever they are: torch.finfo(dtype).min in place of masked scores",
    lambda logits, seen: np.where(np.isneginf(logits) & np.isfinite(seen), np.finfo(logits.dtype).min, seen))
# Multiply (B, H, L, X) with (B, Hkv, X, Y), each query head with its group's.
register_control(forms.replace_grouped_product, "grouped_heads_by_einsum",
    "query heads of a group side by side, nothing repeated",
    lambda left, right: np.asarray(np.einsum("bkglx,bkxy->bkgly", forms.split_into_groups(left, right.shape[1]),
        right).reshape(*left.shape[:3], right.shape[-1])), dtypes=WIDE_DTYPES)
register_control(None, "halves_of_the_keys_merged",
    "each half has its softmax, merged by log_sum_exp as in split decoding",
    attend_in_parts(cut_keys_evenly(2)), hidden_stages=forms.UNSTORED_STAGES,
    rounding_models={"float64": "native_lse", "float32": "native_lse", "float16": "eager_lse"})
# What runs over blocks is kept in the arrays' own format: in float16, over thousands of keys, that is a fault.
for _tile in (16, 64):
    register_control(None, f"online_softmax_in_blocks_of_{_tile}", "one pass over the keys, rescaled",
        forms.OnlineSoftmax(_tile).steps, dtypes=WIDE_DTYPES, hidden_stages=forms.UNSTORED_STAGES)

# in 16 bits the class eager has no row sum from an output that was stored
register_control(forms.replace_gradient_row_sum, "gradient_row_sum_from_the_output",
    "sum p dp = g o: Dao et al. 2022, FlashAttention, appendix B.4",
    lambda call, terms: forms.gradient_row_sum_from_output(call), dtypes=WIDE_DTYPES)
register_control(forms.replace_gradient_steps, "backward_weights_from_log_sum_exp",
    "p = exp(s - L), made again in the backward pass, and the row sum from the output", _fused_backward_steps,
    dtypes=WIDE_DTYPES)
register_control(forms.replace_gradient_steps, "gradient_row_sum_of_weights_made_again",
    "p = exp(s - L) in the sum of p dp, too",
    lambda call: {"attention": forms.forward_pass_with_weights(call, forms.recompute_weights(
        call.logits, call.log_sum_exp))},
    dtypes=WIDE_DTYPES)
register_control(forms.replace_gradient_steps, "fused_backward_pass",
    "weights made again, row sum from the output, sums in tiles of 64", partial(_fused_backward_steps, tile=64),
    dtypes=WIDE_DTYPES)
register_control(forms.replace_gradient_steps, "query_gradient_scaled_last", "a (ds k) for (a ds) k",
    _scale_gradients_last)
register_control("_sum_over_queries", "gradients_in_tiles_of_16_queries", "sums over queries tile by tile",
    product_over_queries(tiled_product(16)))
register_control("_softmax_gradient", "softmax_gradient_distributed",
    "p dp - p delta for p (dp - delta), as automatic differentiation gives it",
    lambda weights, grad_weights, mean: np.asarray(weights * grad_weights - weights * mean))
register_control(forms.replace_gradient_steps, "softcap_slope_by_cosh", "1 - tanh^2 = 1 / cosh^2",
    lambda call: {"_cap_slope": lambda capped, softcap: 1 / np.cosh(call.stages["scores"] / softcap) ** 2})

for _tile in (16, 64, 128):
    _register_right_kernel(f"fused_kernel_with_tiles_of_{_tile}",
        "one pass over tiles of keys, weights in the format of the ends, a backward pass from log_sum_exp",
        _flash_attention(_tile))
_register_right_wide_kernel("fused_kernel_with_statistics_in_float32",
    "log_sum_exp is returned in float32 beside outputs of 16 bits, as FlashAttention does", _flash_attention(64))
_register_right_kernel("kernel_with_tiles_and_blocks", "tiles of 64 keys, products in blocks of 16",
              _flash_attention(64, tiled_product(16)))
_register_right_kernel("fused_kernel_in_base_two", "the scale is folded into the query, exponentials in base 2",
              _compute_in_base_two)
_register_right_wide_kernel("fused_kernel_in_base_two_with_statistics_in_float32",
    "the same, and log_sum_exp is returned in float32, as FlexAttention does", _compute_in_base_two)
_register_right_kernel("fused_kernel_with_log2e_in_the_scale",
    "q k^T is multiplied once, by the scale times log2(e), and exponentials and statistics are in base two",
    _fold_log2e_into_scale)
_register_right_kernel("keys_split_in_three", "parts of the keys merged by log_sum_exp, as in split decoding",
    lambda store: attend_in_parts(cut_keys_evenly(3), store=store), rounding_models=_MERGED_ROUNDING_MODELS)
_register_right_kernel("keys_split_into_parts_of_64", "parts of 64 keys merged by log_sum_exp",
    lambda store: attend_in_parts(lambda logits: tile_slices(logits.shape[-1], 64), store=store),
    rounding_models=_MERGED_ROUNDING_MODELS)
_register_right_kernel("kernel_with_sums_in_pairs", "sums by halves",
              partial(_replace_products_and_row_sum, kernel.pairwise_matmul, kernel.pairwise_sum))
for _terms in (32, 8):
    _register_right_kernel(f"kernel_with_sums_in_blocks_of_{_terms}", f"blocks of {_terms} terms, one after the other",
        partial(_replace_products_and_row_sum, tiled_product(_terms), tiled_row_sum(_terms)))
_register_right_kernel("kernel_with_sums_in_float64", "products and sums in float64, rounded once",
    partial(_replace_products_and_row_sum, kernel.accumulate_in_float64(np.matmul),
            kernel.accumulate_in_float64(backend._row_sum)))
_register_right_kernel("keys_in_another_order", "softmax and average do not depend on the order of the keys",
    partial(_reorder_keys, lambda array, number: array[..., _key_order_by_remainder(array.shape[-1])],
        lambda weights, keys: weights[..., np.argsort(_key_order_by_remainder(keys))]))
_register_right_kernel("keys_padded_to_64", "keys that are masked have a weight of exactly 0",
    partial(_reorder_keys, lambda array, number: pad_last_axis(array, 64, number), lambda weights,
            keys: weights[..., :keys]))
_register_right_kernel("widths_padded_to_32", "zeros behind the last feature add nothing",
    lambda store: {"dot_scores._dot": lambda query, key: backend._dot(pad_last_axis(query, 32), pad_last_axis(key, 32)),
        "attention._weighted_sum": lambda weights, value: (store(weights) @ pad_last_axis(value, 32))[...,
            : value.shape[-1]]})
# Take maximum and sum in tiles of 64 keys, then the average of stored weights in a second pass.
_register_right_kernel("two_passes_over_tiles", "statistics first, then the average, in tiles of 64 keys",
    lambda store: {**forms.replace_softmax(forms.OnlineSoftmax(64).compute_softmax),
        "attention._weighted_sum": lambda weights, value: tiled_product(64)(store(weights), value)})
_register_right_kernel("groups_as_rows", "the query heads of a group are rows of one tile, nothing is repeated",
    lambda store: forms.replace_grouped_product(_multiply_group_as_rows) | {
        "attention._weighted_sum": lambda weights, value: _multiply_group_as_rows(store(weights), value)})
_register_right_kernel("kernel_that_divides_last",
    "exponentials meet the values, and the reciprocal of the sum the average",
    partial(_divide_after_average, lambda mean, total: np.asarray(mean * (1 / total))))
_register_right_kernel("kernel_that_scales_the_gradient_last", "a (ds k) for (a ds) k, p dp - p Delta",
    lambda store: {**_round_weights(store), **forms.replace_gradient_steps(lambda call: {**_fused_backward_steps(call,
        128),
        "_softmax_gradient": lambda weights, gradient, delta: weights * gradient - weights * delta,
        **_scale_gradients_last(call, tiled_product(128))})})
register_control(kernel.MixedPrecisionKernel, "fused_kernel_with_weights_of_8_bits",
    "one pass over tiles of 64 keys, exponentials rounded to 8 bits before they meet the values",
    lambda store: forms.OnlineSoftmax(64, product=lambda weights, value:
        weights.astype(ml_dtypes.float8_e4m3fn).astype(weights.dtype) @ value).steps,
    dtypes=kernel.NARROW_DTYPES, rounding_models=dict.fromkeys(kernel.NARROW_DTYPES, "fused_fp8"))
# fmt: on
