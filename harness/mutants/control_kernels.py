"""Right kernels as they are written for speed, in all four dtypes: none of them may be flagged at any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.backward import Backward, Saved, for_query
from attncheck.mutants.kernel import ALL, NEVER_RETURNED, Inside, Kernel
from attncheck.mutants.mutant import Control
from attncheck.mutants.online import Online
from attncheck.mutants.products import pairwise_matmul, pairwise_sum, wider
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import SOFTMAX, DotScore, Softmax, dot, largest, times
from attncheck.mutants.tiled_kernels import (
    Product,
    blocked,
    flash,
    keys_padded,
    permuted,
    spans,
    split,
    thirds,
    tiled_backward,
    tiles_of_queries,
    width_padded,
)
from attncheck.mutants.variant import Variant


def _by(product: Product, total: Callable[[Array], Array] | None = None) -> Inside:
    """Use another product of matrices and another row sum."""

    def inside(store: Store) -> Variant:
        return Variant(
            score=DotScore(dot=lambda query, key: product(query, np.swapaxes(key, -1, -2))),
            normalise=SOFTMAX if total is None else Softmax(total=total),
            average=lambda logits, weights, value: product(store(weights), value),
        )

    return inside


def _blocked_sum(terms: int) -> Callable[[Array], Array]:
    def total(exponentials: Array) -> Array:
        tiles = spans(exponentials.shape[-1], terms)
        nothing = np.zeros((*exponentials.shape[:-1], 1), exponentials.dtype)
        return sum((exponentials[..., span].sum(axis=-1, keepdims=True) for span in tiles), nothing)

    return total


def _base_two(store: Store) -> Variant:
    """Fold the scale into the query, and take 2^((s - m) log2(e))."""

    def score(query: Array, key: Array, scale: float) -> Stages:
        return {"scores": dot(query * scale, key)}

    return Variant(
        score=score,
        normalise=lambda logits, unmasked: _in_base_two(logits),
        average=lambda logits, weights, value: store(weights) @ value,
    )


def _in_base_two(logits: Array) -> Stages:
    maximum = largest(logits)
    empty = np.isneginf(maximum)
    exponentials = np.exp2(times(logits - np.where(empty, 0, maximum), math.log2(math.e)))
    total = np.where(empty, 1, exponentials.sum(axis=-1, keepdims=True))
    log_sum_exp = np.where(np.isinf(maximum), maximum, maximum + times(np.log2(total), math.log(2)))
    return {"weights": np.where(empty, 0, exponentials / total), "log_sum_exp": log_sum_exp[..., 0]}


def _two_passes(store: Store) -> Variant:
    """Take maximum and sum in tiles of 64 keys, then the average of stored weights in a second pass."""
    online = Online(64)
    product = blocked(64)
    return Variant(normalise=online.normalise, average=lambda logits, weights, value: product(store(weights), value))


def _group_as_rows(left: Array, right: Array) -> Array:
    """Lay the query heads of a group one below the other: (B, Hkv, G L, X) times (B, Hkv, X, Y)."""
    batch, heads, rows, inner = left.shape
    kv_heads = right.shape[1]
    stacked = left.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return np.asarray(stacked @ right).reshape(batch, heads, rows, right.shape[-1])


def _grouped(store: Store) -> Variant:
    return Variant(
        repeat_key=lambda inputs, heads: inputs,
        repeat_value=lambda inputs, heads: inputs,
        score=DotScore(dot=lambda query, key: _group_as_rows(query, np.swapaxes(key, -1, -2))),
        average=lambda logits, weights, value: _group_as_rows(store(weights), value),
        backward=Backward(
            grad_weights=lambda saved, grad_output: _group_as_rows(grad_output, np.swapaxes(saved.value, -1, -2)),
            query=lambda gradient, saved: _group_as_rows(gradient, saved.key),
        ),
    )


def _divided_last(store: Store) -> Variant:
    """Average exponentials, and multiply with the reciprocal of their sum."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        maximum = logits.max(axis=-1, keepdims=True, initial=-np.inf)
        empty = np.isneginf(maximum)
        exponentials = np.exp(logits - np.where(empty, 0, maximum))
        total = np.where(empty, 1, exponentials.sum(axis=-1, keepdims=True))
        return np.asarray((store(exponentials) @ value) * (1 / total))

    return Variant(average=average)


def _scaled_last(store: Store) -> Variant:
    """Scale the gradient of the query last, and take the softmax's gradient apart."""

    def query(gradient: Array, saved: Saved) -> Array:
        return times(for_query(gradient, saved), saved.request.scale)

    backward = replace(
        tiled_backward(128),
        query_scale=lambda gradient, scale: gradient,
        query=query,
        grad_logits=lambda weights, gradient, delta: weights * gradient - weights * delta,
    )
    return Variant(average=lambda logits, weights, value: store(weights) @ value, backward=backward)


def _every_step_stored(store: Store) -> Variant:
    """Store every intermediate; products and sums accumulate in float32, in pairs."""

    def score(query: Array, key: Array, scale: float) -> Stages:
        raw_scores = store(pairwise_matmul(query, np.swapaxes(key, -1, -2)))
        return {"raw_scores": raw_scores, "scores": store(times(raw_scores, scale))}

    def total(exponentials: Array) -> Array:
        nothing = np.zeros((*exponentials.shape[:-1], 1), exponentials.dtype)
        return store(pairwise_sum(exponentials)) if exponentials.shape[-1] else nothing

    softmax = Softmax(
        exponential=lambda shifted: store(np.exp(store(shifted))),
        total=total,
        divide=lambda exponentials, total: store(exponentials / total),
        log_sum_exp=lambda maximum, total: store(maximum + store(np.log(total))),
    )
    return Variant(
        score=score,
        normalise=softmax,
        average=lambda logits, weights, value: (
            pairwise_matmul(weights, value) if weights.shape[-1] else np.asarray(weights @ value)
        ),
    )


_FUSED: Mapping[str, str] = {"float64": "native", "float32": "native", "bfloat16": "fused", "float16": "fused"}
_EAGER = {**_FUSED, "bfloat16": "eager", "float16": "eager"}
_STORED = {dtype: f"{name}_lse" for dtype, name in _FUSED.items()}


def _honest(
    name: str, why: str, inside: Inside, classes: Mapping[str, str] = _FUSED, hidden: frozenset[str] = NEVER_RETURNED
) -> Control:
    return Control(name, why, Kernel(inside=inside, hidden=hidden), ALL, classes)


CONTROLS = (
    *(
        _honest(
            f"fused_kernel_with_tiles_of_{tile}",
            "one pass over tiles of keys, weights in the format of the ends, a backward pass from log_sum_exp",
            flash(tile),
        )
        for tile in (16, 64, 128)
    ),
    _honest("fused_kernel_in_base_two", "the scale is folded into the query, exponentials in base 2", _base_two),
    _honest(
        "keys_split_in_three", "parts of the keys merged by log_sum_exp, as in split decoding", split(thirds), _STORED
    ),
    _honest(
        "keys_split_into_parts_of_64",
        "parts of 64 keys merged by log_sum_exp",
        split(lambda keys: spans(keys, 64)),
        _STORED,
    ),
    _honest("keys_in_another_order", "softmax and average do not depend on the order of the keys", permuted),
    _honest("kernel_with_sums_in_pairs", "sums by halves", _by(pairwise_matmul, pairwise_sum)),
    _honest(
        "kernel_with_sums_in_blocks_of_32",
        "blocks of 32 terms, one after the other",
        _by(blocked(32), _blocked_sum(32)),
    ),
    _honest(
        "kernel_with_sums_in_blocks_of_8", "blocks of 8 terms, one after the other", _by(blocked(8), _blocked_sum(8))
    ),
    _honest(
        "kernel_with_sums_in_float64",
        "products and sums in float64, rounded once",
        _by(wider(np.matmul), wider(lambda terms: terms.sum(axis=-1, keepdims=True))),
    ),
    _honest("kernel_with_tiles_and_blocks", "tiles of 64 keys, products in blocks of 16", flash(64, blocked(16))),
    _honest("widths_padded_to_32", "zeros behind the last feature add nothing", width_padded),
    _honest("keys_padded_to_64", "keys that are masked have a weight of exactly 0", keys_padded),
    _honest("tiles_of_queries_that_skip_keys", "tiles that nobody attends to are not read", tiles_of_queries),
    _honest("two_passes_over_tiles", "statistics first, then the average, in tiles of 64 keys", _two_passes),
    _honest("groups_as_rows", "the query heads of a group are rows of one tile, nothing is repeated", _grouped),
    _honest("kernel_that_divides_last", "exponentials meet the values, and the sum divides the average", _divided_last),
    _honest("kernel_that_scales_the_gradient_last", "a (ds k) for (a ds) k, p dp - p Delta", _scaled_last),
    _honest(
        "every_step_stored_in_the_format_of_the_ends",
        "the class eager, sums in pairs",
        _every_step_stored,
        _EAGER,
        frozenset(),
    ),
)
