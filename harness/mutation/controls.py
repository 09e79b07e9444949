"""Right implementations that compute in another way: none of them may be flagged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from attncheck.backends.contract import EmptyRows, Stages
from attncheck.backends.numpy_backend import (
    _dot,
    _row_maximum,
    _row_sum,
    _sum_over_queries,
    _weighted_sum,
    attention,
    attention_gradients,
    multi_head_attention,
    softmax,
)
from attncheck.mutation.arithmetic import (
    Array,
    by_rows,
    by_transposes,
    einsum,
    fused_multiply_add,
    pairwise_matmul,
    pairwise_sum,
    reversed_matmul,
    sequential_matmul,
    sequential_sum,
    wider,
)
from attncheck.mutation.backward_forms import (
    delta_from_output,
    delta_read_as,
    in_gradients,
    stages_remembered,
    weights_again,
)
from attncheck.mutation.forward_forms import (
    Product,
    averaged,
    grouped_by,
    normalised,
    products_by,
    reciprocal_read_as,
    rows_read_as,
    scored,
    with_score_bias,
)
from attncheck.mutation.mutant import REFERENCE, WIDE, control
from attncheck.mutation.online import NEVER_HELD, Online
from attncheck.mutation.variant import Call, Steps, numpy_with, within
from attncheck.spec import LOGITS

_STORED = {"float64": "native_lse", "float32": "native_lse", "float16": "eager_lse"}

control(why="the reference itself", name=REFERENCE)({})


def _reversed_sum(exponentials: Array) -> Array:
    return sequential_sum(exponentials[..., ::-1])


def _sorted_sum(exponentials: Array) -> Array:
    return sequential_sum(np.sort(exponentials, axis=-1))


def _in_order(product: Product, total: Callable[[Array], Array]) -> Steps:
    return {**products_by(product), "_softmax_with_sinks._row_sum": total}


# Running sums of float16 are kept in float16 here, as einsum may, and so is a scaled query: these are of other
# classes than the reference.
control(why="sums from the last term to the first", dtypes=WIDE, name="keys_reversed")(
    _in_order(reversed_matmul, _reversed_sum)
)
control(
    "_softmax_with_sinks._row_sum",
    why="the row sum from the smallest term to the largest",
    dtypes=WIDE,
    name="sum_sorted",
)(_sorted_sum)
control(why="one running sum each", dtypes=WIDE, name="sums_sequential")(_in_order(sequential_matmul, sequential_sum))
control(why="sums by halves", dtypes=WIDE, name="sums_pairwise")(_in_order(pairwise_matmul, pairwise_sum))

# What runs over blocks is kept in the arrays' own format: in float16, over thousands of keys, that is a fault.
for _block in (16, 64):
    control(
        why="one pass over the keys, rescaled",
        dtypes=WIDE,
        hidden=NEVER_HELD,
        name=f"online_softmax_in_blocks_of_{_block}",
    )(Online(_block).steps)


@control(scored, why="the scale is folded into the query", dtypes=WIDE)
def query_prescaled(query: Array, key: Array, factor: float) -> Stages:
    return {"scores": _dot(query * factor, key)}


@control(scored, why="the scale's root is folded into query and key", dtypes=WIDE)
def query_and_key_prescaled(query: Array, key: Array, factor: float) -> Stages:
    root = math.sqrt(abs(factor))
    return {"scores": _dot(query * math.copysign(root, factor), key * root)}


control("_softmax_with_sinks.np", why="exp(x) = exp2(x log2(e)), and log likewise", name="exp2_for_exp")(
    numpy_with(exp=lambda shifted: np.exp2(shifted * math.log2(math.e)), log=lambda total: np.log2(total) * math.log(2))
)


@control(averaged, why="the values are averaged before the division by the sum")
def divided_last(logits: Array, weights: Array, value: Array) -> Array:
    maximum = _row_maximum(logits)
    empty = maximum == -np.inf
    exponentials = np.exp(logits - np.where(empty, 0, maximum))
    return np.asarray((exponentials @ value) / np.where(empty, 1, _row_sum(exponentials)))


@control(reciprocal_read_as, why="e (1/l) for e/l")
def reciprocal_multiplied(total: Array) -> Array:
    return np.asarray(1 / total)


control(products_by, why="A B = (B^T A^T)^T, with copies in other layouts", name="products_transposed")(by_transposes)
control(products_by, why="einsum for matmul", dtypes=WIDE, name="products_by_einsum")(einsum)
control(products_by, why="matrix times vector, one query at a time", name="products_row_by_row")(by_rows)
control(
    why="sums and exponentials in float64, rounded once", dtypes=("float32", "float16"), name="accumulated_in_float64"
)(
    {
        **products_by(wider(np.matmul)),
        "_softmax_with_sinks.np": numpy_with(exp=wider(np.exp)),
        "_softmax_with_sinks._row_sum": wider(_row_sum),
        "additive_scores.np": numpy_with(tanh=wider(np.tanh)),
    }
)
control(
    products_by, why="one rounding per multiplication and addition", dtypes=("float32",), name="fused_multiply_add"
)(fused_multiply_add)


@control("general_scores", why="q (W k) for (q W) k")
def bilinear_key_first(query: Array, key: Array, weight: Array, *, score_bias: Array | None = None) -> Stages:
    return with_score_bias(_dot(query, key @ weight.T), score_bias)


@control("general_scores", why="the bilinear score in one einsum", dtypes=WIDE)
def bilinear_by_einsum(query: Array, key: Array, weight: Array, *, score_bias: Array | None = None) -> Stages:
    return with_score_bias(np.asarray(np.einsum("...qd,de,...ke->...qk", query, weight, key)), score_bias)


@control("general_scores", why="the bias is a feature that is always 1: [q W, b] . [k, 1]", dtypes=WIDE)
def bilinear_bias_as_one_more_feature(
    query: Array, key: Array, weight: Array, *, score_bias: Array | None = None
) -> Stages:
    """Begin every sum with the bias."""
    left = query @ weight
    if score_bias is None:
        return {"scores": _dot(left, key)}
    bias = np.broadcast_to(score_bias[:, np.newaxis, np.newaxis], (*left.shape[:-1], 1))
    ones = np.ones((*key.shape[:-1], 1), key.dtype)
    return {"scores": _dot(np.concatenate([bias, left], axis=-1), np.concatenate([ones, key], axis=-1))}


@control(
    "multi_head_attention",
    why="softmax is shift invariant: q b is the same for every key of a row",
    hidden=frozenset({"key", *LOGITS, "log_sum_exp"}) - {"capped"},
)
def key_bias_dropped(*arrays: Array, sinks: Array | None = None, **given: Any) -> Stages:
    if sinks is not None:
        raise NotImplementedError("a sink is no key: what all keys of a row have in common counts beside it")
    if given.get("mask_fill") is not None and given.get("key_bias") is not None:
        raise NotImplementedError("a fill is no score: what all scores of a row have in common counts beside it")
    if given.get("rotary_cos") is not None:
        raise NotImplementedError("a rotated bias is another one for every key")
    if given.get("past_key") is not None:  # which has the bias, so that the new keys keep theirs
        return multi_head_attention(*arrays, **given)
    return multi_head_attention(*arrays, **{**given, "key_bias": None})


@control(
    rows_read_as,
    why="equal scores have equal weights, whatever they are: torch.finfo(dtype).min in place of masked scores",
)
def uniform_rows_by_the_least_finite_number(logits: Array, seen: Array) -> Array:
    is_filled = np.isneginf(logits) & np.isfinite(seen)
    return np.where(is_filled, np.finfo(logits.dtype).min, seen)


@control(
    "attention_gradients",
    why="the gradient of a row without a key goes on to its scores, where the mask is a sum and no selection",
)
def masks_that_are_added(*arrays: Array, empty_rows: EmptyRows = "zero", **given: Any) -> Stages:
    def forward(*inputs: Array, **options: Any) -> Stages:
        return attention(*inputs, **options | {"empty_rows": empty_rows})

    gradients: Stages = within(attention_gradients, attention=forward)(*arrays, **given)
    return gradients


@control(
    delta_read_as,
    why="sum p dp = g o: Dao et al. 2022, FlashAttention, appendix B.4",
    dtypes=WIDE,  # in 16 bits the class eager has no row sum from an output that was stored
)
def gradient_row_sum_from_the_output(call: Call, terms: Array) -> Array:
    return delta_from_output(call)


@control(
    in_gradients, why="p = exp(s - L), made again in the backward pass, and the row sum from the output", dtypes=WIDE
)
def backward_weights_from_log_sum_exp(call: Call) -> Steps:
    return {
        "attention": stages_remembered(call, weights_again(call.logits, call.log_sum_exp)),
        "_row_sum": lambda terms: delta_from_output(call),
    }


def _in_tiles(rows: int) -> Product:
    """Add up tiles of so many queries, one after the other."""

    def product(weights: Array, given: Array) -> Array:
        total = _sum_over_queries(weights[..., :rows, :], given[..., :rows, :])
        for start in range(rows, weights.shape[-2], rows):
            tile = slice(start, start + rows)
            total = total + _sum_over_queries(weights[..., tile, :], given[..., tile, :])
        return total

    return product


@control(in_gradients, why="weights made again, row sum from the output, sums in tiles of 64 queries", dtypes=WIDE)
def fused_backward_pass(call: Call) -> Steps:
    return {**backward_weights_from_log_sum_exp(call), "_sum_over_queries": _in_tiles(64)}


control("_sum_over_queries", why="sums over queries tile by tile", name="gradients_in_tiles_of_16_queries")(
    _in_tiles(16)
)


@control("_softmax_gradient", why="p dp - p delta for p (dp - delta), as automatic differentiation gives it")
def softmax_gradient_distributed(weights: Array, grad_weights: Array, mean: Array) -> Array:
    return np.asarray(weights * grad_weights - weights * mean)


@control(in_gradients, why="a (ds k) for (a ds) k")
def query_gradient_scaled_last(call: Call) -> Steps:
    return {
        "_scale_of": lambda query, scale: 1.0,
        "_weighted_sum": lambda gradient, key: _weighted_sum(gradient, key) * call.factor,
        "_sum_over_queries": lambda weights, rows: _sum_over_queries(
            weights if rows is call.grad_output else weights * call.factor, rows
        ),
        "attention": lambda *arrays, **given: call.stages,
    }


@control(in_gradients, why="1 - tanh^2 = 1 / cosh^2")
def softcap_slope_by_cosh(call: Call) -> Steps:
    return {"_cap_slope": lambda capped, softcap: 1 / np.cosh(call.stages["scores"] / softcap) ** 2}


@control("_cap", why="tanh x = -expm1(-2x) / (2 + expm1(-2x))")
def softcap_by_expm1(scores: Array, softcap: float) -> Array:
    argument: Array = scores / softcap
    grown = np.expm1(-2 * np.abs(argument))  # e^-2|x| - 1 loses nothing at small x, and cannot overflow
    return np.asarray(softcap * np.copysign(-grown / (2 + grown), argument))


@control(grouped_by, why="query heads of a group side by side, nothing repeated", dtypes=WIDE)
def grouped_heads_by_einsum(left: Array, right: Array) -> Array:
    """Multiply (B, H, L, X) with (B, Hkv, X, Y), each query head with its group's."""
    batch, kv_heads = right.shape[:2]
    grouped = left.reshape(batch, kv_heads, left.shape[1] // kv_heads, *left.shape[2:])
    product = np.einsum("bkglx,bkxy->bkgly", grouped, right)
    return np.asarray(product.reshape(*left.shape[:3], right.shape[-1]))


@control(normalised, why="what a window or a mask forbids is left out of the sums")
def attended_keys_gathered(logits: Array) -> Stages:
    """Take only the keys that may be attended, side by side, and put their weights back where they belong."""
    order = np.argsort(logits == -np.inf, axis=-1, kind="stable")
    stages = softmax(np.take_along_axis(logits, order, axis=-1))
    weights = np.zeros_like(logits)
    np.put_along_axis(weights, order, stages["weights"], axis=-1)
    return stages | {"weights": weights}


@control(
    averaged,
    why="each half has its softmax, merged by log_sum_exp as in split decoding",
    hidden=NEVER_HELD,
    classes=_STORED,
)
def halves_of_the_keys_merged(logits: Array, weights: Array, value: Array) -> Array:
    """Attend to the first and to the last half of the keys, and merge the two by their log_sum_exp."""
    half = logits.shape[-1] // 2
    halves = (slice(half), slice(half, None))
    parts = [softmax(logits[..., span]) for span in halves]
    shares = softmax(np.stack([part["log_sum_exp"] for part in parts], axis=-1))["weights"]
    first, last = (part["weights"] @ value[..., span, :] for part, span in zip(parts, halves, strict=True))
    return np.asarray(first * shares[..., :1] + last * shares[..., 1:])


@control("cosine_scores", why="q k / (|q| |k|) for (q / |q|) (k / |k|)")
def cosine_divided_after_the_product(query: Array, key: Array, *, scale: float | None = None) -> Stages:
    lengths = [np.linalg.norm(vectors, axis=-1, keepdims=True) for vectors in (query, key)]
    cosine = _dot(query, key) / (lengths[0] * np.swapaxes(lengths[1], -1, -2))
    return {"scores": cosine if scale is None else cosine * scale}
