"""Right implementations that compute in another way: none of them may be flagged.

Some are kernels as they are written for speed, in all four dtypes: they take keys, queries or widths in tiles, in
parts, in another order, or filled up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import EmptyRows, Stages
from attncheck.mutation import forms, kernel
from attncheck.mutation.kernel import Array, Store
from attncheck.mutation.mutant import REFERENCE, WIDE, Call, Steps, control, numpy_with, within
from attncheck.spec import LOGITS

_STORED = {"float64": "native_lse", "float32": "native_lse", "float16": "eager_lse"}

control(why="the reference itself", name=REFERENCE)({})


def _in_order(product: forms.Product, total: Callable[[Array], Array]) -> Steps:
    return {**forms.products_by(product), "_softmax_with_sinks._row_sum": total}


# Running sums of float16 are kept in float16 here, as einsum may, and so is a scaled query: these are of other
# classes than the reference.
control(why="sums from the last term to the first", dtypes=WIDE, name="keys_reversed")(
    _in_order(kernel.reversed_matmul, lambda exponentials: kernel.sequential_sum(exponentials[..., ::-1]))
)

# What runs over blocks is kept in the arrays' own format: in float16, over thousands of keys, that is a fault.
for _block in (16, 64):
    control(
        why="one pass over the keys, rescaled",
        dtypes=WIDE,
        hidden=forms.NEVER_HELD,
        name=f"online_softmax_in_blocks_of_{_block}",
    )(forms.Online(_block).steps)


@control(forms.scored, why="the scale's root is folded into query and key", dtypes=WIDE)
def query_and_key_prescaled(query: Array, key: Array, factor: float) -> Stages:
    root = math.sqrt(abs(factor))
    return {"scores": backend._dot(query * math.copysign(root, factor), key * root)}


@control(forms.averaged, why="the values are averaged before the division by the sum")
def divided_last(logits: Array, weights: Array, value: Array) -> Array:
    maximum = backend._row_maximum(logits)
    empty = maximum == -np.inf
    exponentials = np.exp(logits - np.where(empty, 0, maximum))
    return np.asarray((exponentials @ value) / np.where(empty, 1, backend._row_sum(exponentials)))


@control("general_scores", why="the bias is a feature that is always 1: [q W, b] . [k, 1]", dtypes=WIDE)
def bilinear_bias_as_one_more_feature(
    query: Array, key: Array, weight: Array, *, score_bias: Array | None = None
) -> Stages:
    """Begin every sum with the bias."""
    left = query @ weight
    if score_bias is None:
        return {"scores": backend._dot(left, key)}
    bias = np.broadcast_to(score_bias[:, np.newaxis, np.newaxis], (*left.shape[:-1], 1))
    ones = np.ones((*key.shape[:-1], 1), key.dtype)
    return {"scores": backend._dot(np.concatenate([bias, left], axis=-1), np.concatenate([ones, key], axis=-1))}


@control("multi_head_attention", hidden=frozenset({"key", *LOGITS, "log_sum_exp"}) - {"capped"})
def key_bias_dropped(*arrays: Array, sinks: Array | None = None, **given: Any) -> Stages:
    """softmax is shift invariant: q b is the same for every key of a row"""
    if sinks is not None:
        raise NotImplementedError("a sink is no key: what all keys of a row have in common counts beside it")
    if given.get("mask_fill") is not None and given.get("key_bias") is not None:
        raise NotImplementedError("a fill is no score: what all scores of a row have in common counts beside it")
    if given.get("rotary_cos") is not None:
        raise NotImplementedError("a rotated bias is another one for every key")
    if given.get("past_key") is not None:  # which has the bias, so that the new keys keep theirs
        return backend.multi_head_attention(*arrays, **given)
    return backend.multi_head_attention(*arrays, **{**given, "key_bias": None})


@control("attention_gradients")
def masks_that_are_added(*arrays: Array, empty_rows: EmptyRows = "zero", **given: Any) -> Stages:
    """the gradient of a row without a key goes on to its scores, where the mask is a sum and no selection"""

    def forward(*inputs: Array, **options: Any) -> Stages:
        return backend.attention(*inputs, **options | {"empty_rows": empty_rows})

    gradients: Stages = within(backend.attention_gradients, attention=forward)(*arrays, **given)
    return gradients


@control(forms.in_gradients, dtypes=WIDE)
def backward_weights_from_log_sum_exp(call: Call) -> Steps:
    """p = exp(s - L), made again in the backward pass, and the row sum from the output"""
    return {
        "attention": forms.stages_remembered(call, forms.weights_again(call.logits, call.log_sum_exp)),
        "_row_sum": lambda terms: forms.delta_from_output(call),
    }


def _in_tiles(rows: int) -> forms.Product:
    """Add up tiles of so many queries, one after the other."""

    def product(weights: Array, given: Array) -> Array:
        total = backend._sum_over_queries(weights[..., :rows, :], given[..., :rows, :])
        for start in range(rows, weights.shape[-2], rows):
            tile = slice(start, start + rows)
            total = total + backend._sum_over_queries(weights[..., tile, :], given[..., tile, :])
        return total

    return product


@control(forms.in_gradients, why="a (ds k) for (a ds) k")
def query_gradient_scaled_last(call: Call) -> Steps:
    return {
        "_scale_of": lambda query, scale: 1.0,
        "_weighted_sum": lambda gradient, key: backend._weighted_sum(gradient, key) * call.factor,
        "_sum_over_queries": lambda weights, rows: backend._sum_over_queries(
            weights if rows is call.grad_output else weights * call.factor, rows
        ),
        "attention": lambda *arrays, **given: call.stages,
    }


@control("_cap", why="tanh x = -expm1(-2x) / (2 + expm1(-2x))")
def softcap_by_expm1(scores: Array, softcap: float) -> Array:
    argument: Array = scores / softcap
    grown = np.expm1(-2 * np.abs(argument))  # e^-2|x| - 1 loses nothing at small x, and cannot overflow
    return np.asarray(softcap * np.copysign(-grown / (2 + grown), argument))


@control(forms.normalised, why="what a window or a mask forbids is left out of the sums")
def attended_keys_gathered(logits: Array) -> Stages:
    """Take only the keys that may be attended, side by side, and put their weights back where they belong."""
    order = np.argsort(logits == -np.inf, axis=-1, kind="stable")
    stages = backend.softmax(np.take_along_axis(logits, order, axis=-1))
    weights = np.zeros_like(logits)
    np.put_along_axis(weights, order, stages["weights"], axis=-1)
    return stages | {"weights": weights}


@control(
    forms.averaged,
    why="each half has its softmax, merged by log_sum_exp as in split decoding",
    hidden=forms.NEVER_HELD,
    classes=_STORED,
)
def halves_of_the_keys_merged(logits: Array, weights: Array, value: Array) -> Array:
    """Attend to the first and to the last half of the keys, and merge the two by their log_sum_exp."""
    half = logits.shape[-1] // 2
    halves = (slice(half), slice(half, None))
    parts = [backend.softmax(logits[..., span]) for span in halves]
    shares = backend.softmax(np.stack([part["log_sum_exp"] for part in parts], axis=-1))["weights"]
    first, last = (part["weights"] @ value[..., span, :] for part, span in zip(parts, halves, strict=True))
    return np.asarray(first * shares[..., :1] + last * shares[..., 1:])


@control("cosine_scores", why="q k / (|q| |k|) for (q / |q|) (k / |k|)")
def cosine_divided_after_the_product(query: Array, key: Array, *, scale: float | None = None) -> Stages:
    lengths = [np.linalg.norm(vectors, axis=-1, keepdims=True) for vectors in (query, key)]
    cosine = backend._dot(query, key) / (lengths[0] * np.swapaxes(lengths[1], -1, -2))
    return {"scores": cosine if scale is None else cosine * scale}


FUSED: Mapping[str, str] = {"float64": "native", "float32": "native", "bfloat16": "fused", "float16": "fused"}
_EAGER = {**FUSED, "bfloat16": "eager", "float16": "eager"}
_MERGED = {dtype: f"{name}_lse" for dtype, name in FUSED.items()}


def _right(
    name: str | None = None,
    why: str = "",
    inside: kernel.Inside | None = None,
    *,
    hidden: frozenset[str] = kernel.NEVER_RETURNED,
    wide: frozenset[str] = frozenset(),
    classes: Mapping[str, str] = FUSED,
) -> Callable[[kernel.Inside], kernel.Inside]:
    """Register what runs between the ends of a right kernel, as a row or decorated."""
    form = partial(kernel.Kernel, hidden=hidden, wide=wide)
    return control(form, name, why, inside, dtypes=kernel.ALL, classes=classes)


def spans(length: int, tile: int) -> list[slice]:
    """Cut a length into tiles."""
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def _added(parts: Iterable[Array], like: Array) -> Array:
    """Add parts up, one after the other."""
    total = np.zeros((), like.dtype)
    for part in parts:
        total = total + part
    return np.asarray(total)


def _blocked(terms: int) -> forms.Product:
    """Multiply matrices by blocks of the inner axis, one after the other."""

    def product(left: Array, right: Array) -> Array:
        parts = spans(left.shape[-1], terms)
        return _added((left[..., span] @ right[..., span, :] for span in parts), left) if parts else left @ right

    return product


def _over_tiles_of_queries(tile: int) -> forms.Product:
    """Sum over queries tile by tile."""

    def product(weights: Array, rows: Array) -> Array:
        tiles = spans(weights.shape[-2], tile)
        parts = (backend._sum_over_queries(weights[..., span, :], rows[..., span, :]) for span in tiles)
        return _added(parts, weights) if tiles else backend._sum_over_queries(weights, rows)

    return product


def _tiled_backward(call: Call, tile: int) -> Steps:
    """Go back as fused kernels do: weights from log_sum_exp, Delta from the output, sums over tiles of queries."""
    return {
        "attention": forms.stages_remembered(call, forms.weights_again(call.logits, call.log_sum_exp)),
        "_row_sum": lambda terms: forms.delta_from_output(call),
        "_weighted_sum": _blocked(tile),
        "_sum_over_queries": _over_tiles_of_queries(tile),
    }


def _flash(tile: int, product: forms.Product = np.matmul) -> kernel.Inside:
    """Take keys in tiles; exponentials are stored in the format of the ends before they meet the values."""

    def inside(store: Store) -> Steps:
        online = forms.Online(tile, product=lambda weights, value: product(store(weights), value))
        return {**online.steps, **forms.in_gradients(lambda call: _tiled_backward(call, tile))}

    return inside


for _tile in (16, 64, 128):
    _right(f"fused_kernel_with_tiles_of_{_tile}",
        "one pass over tiles of keys, weights in the format of the ends, a backward pass from log_sum_exp",
        _flash(_tile))  # fmt: skip
_right("fused_kernel_with_statistics_in_float32",
    "log_sum_exp is returned in float32 beside outputs of 16 bits, as FlashAttention does",
    _flash(64), wide=kernel.STATISTICS)  # fmt: skip


def _to_eight_bits(weights: Array) -> Array:
    """Round exponentials, at most 1, to float8_e4m3fn."""
    return weights.astype(ml_dtypes.float8_e4m3fn).astype(weights.dtype)


def _averaged_from(store: Store) -> Steps:
    """Store the weights in the format of the ends before they meet the values."""
    return {"attention._weighted_sum": lambda weights, value: store(weights) @ value}


def _in_base_two(store: Store) -> Steps:
    """Fold the scale into the query, and take 2^((s - m) log2(e))."""
    library = numpy_with(
        exp=lambda shifted: np.exp2(shifted * math.log2(math.e)), log=lambda total: np.log2(total) * math.log(2)
    )
    score = forms.scored(lambda query, key, factor: {"scores": backend._dot(query * factor, key)})
    return {**score, "_softmax_with_sinks.np": library, **_averaged_from(store)}


_right("fused_kernel_in_base_two", "the scale is folded into the query, exponentials in base 2", _in_base_two)
_right("fused_kernel_in_base_two_with_statistics_in_float32",
    "the same, and log_sum_exp is returned in float32, as FlexAttention does",
    _in_base_two, wide=kernel.STATISTICS)  # fmt: skip


_LOG2E = math.log2(math.e)


def _with_log2e_in_the_scale(store: Store) -> Steps:
    """Multiply q k^T, or the tanh of a softcap, once, by the scale (or the cap) times log2(e); take 2^(s - m) of that.

    What FlashAttention's kernels do. docs/numerics.md, 4.1c, derives why its roundings are within every class. The
    softcap is in base e in front of that. A bias or a fill has a rounding of its own there, and may leave the range
    with it: behind these the logits are in base e, and so they are where each head has a scale of its own.
    """

    def steps(call: Call) -> Steps:
        if call.bias is not None or call.mask_fill is not None or call.head_scale is not None:
            return {}
        folded: list[Array] = []

        def score(query: Array, key: Array, *, scale: float | None, softcap: float | None) -> Stages:
            stages = backend.dot_scores(query, key, scale=scale, softcap=softcap)
            if softcap is None:
                folded.append(stages["raw_scores"] * (backend._scale_of(query, scale) * _LOG2E))
            else:
                folded.append(np.tanh(stages["scores"] / softcap) * (softcap * _LOG2E))
            return stages

        def normalise(logits: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
            in_two = np.where(np.isneginf(logits), logits, folded[-1])
            sinks = None if sinks is None else sinks * _LOG2E
            stages = within(backend._softmax_with_sinks, np=numpy_with(exp=np.exp2, log=np.log2))(
                in_two, sinks, empty_rows
            )
            return {**stages, "log_sum_exp": stages["log_sum_exp"] * math.log(2)}

        return {"dot_scores": score, "_softmax_with_sinks": normalise}

    return {**forms.in_attention(steps), **_averaged_from(store)}


_right("fused_kernel_with_log2e_in_the_scale",
    "q k^T is multiplied once, by the scale times log2(e), and exponentials and statistics are in base two",
    _with_log2e_in_the_scale)  # fmt: skip


def _split(spans_of: Callable[[int], list[slice]]) -> kernel.Inside:
    """Attend to parts of the keys, each with its own softmax, and merge them by their log_sum_exp."""

    def inside(store: Store) -> Steps:
        def average(logits: Array, weights: Array, value: Array) -> Array:
            chosen = spans_of(logits.shape[-1])
            parts = [backend.softmax(logits[..., span]) for span in chosen]
            if not parts:
                return np.asarray(weights @ value)
            shares = backend.softmax(np.stack([part["log_sum_exp"] for part in parts], axis=-1))["weights"]
            averages = [store(part["weights"]) @ value[..., span, :] for part, span in zip(parts, chosen, strict=True)]
            return _added((each * shares[..., n : n + 1] for n, each in enumerate(averages)), value)

        return forms.averaged(average)

    return inside


def _thirds(keys: int) -> list[slice]:
    """Cut the keys into three parts."""
    edges = [keys * part // 3 for part in range(4)]
    return [slice(*edge) for edge in pairwise(edges) if edge[0] < edge[1]]


_right("keys_split_in_three", "parts of the keys merged by log_sum_exp, as in split decoding",
    _split(_thirds), classes=_MERGED)  # fmt: skip
_right("keys_split_into_parts_of_64", "parts of 64 keys merged by log_sum_exp",
    _split(lambda keys: spans(keys, 64)), classes=_MERGED)  # fmt: skip


@_right(why="softmax and average do not depend on the order of the keys")
def keys_in_another_order(store: Store) -> Steps:
    """Take the keys in another order: every seventh first, and so on."""

    def order(keys: int) -> Array:
        return np.argsort(np.arange(keys) % 7, kind="stable")

    def normalise(logits: Array) -> Stages:
        stages = backend.softmax(logits[..., order(logits.shape[-1])])
        return stages | {"weights": stages["weights"][..., np.argsort(order(logits.shape[-1]))]}

    def average(weights: Array, value: Array) -> Array:
        chosen = order(weights.shape[-1])
        return np.asarray(store(weights)[..., chosen] @ np.ascontiguousarray(value[..., chosen, :]))

    return {**forms.normalised(normalise), "attention._weighted_sum": average}


def _by(product: forms.Product, total: Callable[[Array], Array]) -> kernel.Inside:
    """Use another product of matrices and another row sum."""

    def inside(store: Store) -> Steps:
        return {
            "dot_scores._dot": lambda query, key: product(query, np.swapaxes(key, -1, -2)),
            "_softmax_with_sinks._row_sum": total,
            "attention._weighted_sum": lambda weights, value: product(store(weights), value),
        }

    return inside


def _blocked_sum(terms: int) -> Callable[[Array], Array]:
    def total(exponentials: Array) -> Array:
        nothing = np.zeros((*exponentials.shape[:-1], 1), exponentials.dtype)
        return sum(
            (backend._row_sum(exponentials[..., span]) for span in spans(exponentials.shape[-1], terms)), nothing
        )

    return total


_right("kernel_with_sums_in_pairs", "sums by halves", _by(kernel.pairwise_matmul, kernel.pairwise_sum))
for _terms in (32, 8):
    _right(f"kernel_with_sums_in_blocks_of_{_terms}", f"blocks of {_terms} terms, one after the other",
        _by(_blocked(_terms), _blocked_sum(_terms)))  # fmt: skip
_right("kernel_with_sums_in_float64", "products and sums in float64, rounded once",
    _by(kernel.wider(np.matmul), kernel.wider(backend._row_sum)))  # fmt: skip
_right("kernel_with_tiles_and_blocks", "tiles of 64 keys, products in blocks of 16", _flash(64, _blocked(16)))


@_right(why="zeros behind the last feature add nothing")
def widths_padded_to_32(store: Store) -> Steps:
    """Fill widths up to a multiple of 32 with zeros."""

    def padded(array: Array) -> Array:
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 32)])

    def average(weights: Array, value: Array) -> Array:
        return np.asarray((store(weights) @ padded(value))[..., : value.shape[-1]])

    return {
        "dot_scores._dot": lambda query, key: backend._dot(padded(query), padded(key)),
        "attention._weighted_sum": average,
    }


@_right(why="keys that are masked have a weight of exactly 0")
def keys_padded_to_64(store: Store) -> Steps:
    """Fill the last tile of 64 keys with scores of minus infinity and values of zero."""

    def filled_up(logits: Array) -> Array:
        missing = -logits.shape[-1] % 64
        return np.concatenate([logits, np.full((*logits.shape[:-1], missing), -np.inf, logits.dtype)], axis=-1)

    def normalise(logits: Array) -> Stages:
        stages = backend.softmax(filled_up(logits))
        return stages | {"weights": stages["weights"][..., : logits.shape[-1]]}

    def average(weights: Array, value: Array) -> Array:
        missing = [(0, -value.shape[-2] % 64), (0, 0)]
        padded = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + missing[:1])
        return np.asarray(store(padded) @ np.pad(value, [(0, 0)] * (value.ndim - 2) + missing))

    return {**forms.normalised(normalise), "attention._weighted_sum": average}


@_right(why="tiles that nobody attends to are not read")
def tiles_of_queries_that_skip_keys(store: Store) -> Steps:
    """Take 64 queries at a time, and of the keys no more than the last one that any of them attends to."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        output = np.zeros((*weights.shape[:-1], value.shape[-1]), value.dtype)
        for span in spans(weights.shape[-2], 64):
            attended = ~np.isneginf(logits[..., span, :]).all(axis=tuple(range(logits.ndim - 1)))
            end = int(np.flatnonzero(attended).max(initial=-1)) + 1
            output[..., span, :] = store(weights[..., span, :end]) @ value[..., :end, :]
        return output

    return forms.averaged(average)


@_right(why="statistics first, then the average, in tiles of 64 keys")
def two_passes_over_tiles(store: Store) -> Steps:
    """Take maximum and sum in tiles of 64 keys, then the average of stored weights in a second pass."""
    product = _blocked(64)
    return {
        **forms.normalised(forms.Online(64).normalise),
        "attention._weighted_sum": lambda weights, value: product(store(weights), value),
    }


def _group_as_rows(left: Array, right: Array) -> Array:
    """Lay the query heads of a group one below the other: (B, Hkv, G L, X) times (B, Hkv, X, Y)."""
    batch, heads, rows, inner = left.shape
    kv_heads = right.shape[1]
    stacked = left.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return np.asarray(stacked @ right).reshape(batch, heads, rows, right.shape[-1])


@_right(why="the query heads of a group are rows of one tile, nothing is repeated")
def groups_as_rows(store: Store) -> Steps:
    return forms.grouped_by(_group_as_rows) | {
        "attention._weighted_sum": lambda weights, value: _group_as_rows(store(weights), value)
    }


@_right(why="exponentials meet the values, and the sum divides the average")
def kernel_that_divides_last(store: Store) -> Steps:
    """Average exponentials, and multiply with the reciprocal of their sum."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        maximum = backend._row_maximum(logits)
        empty = np.isneginf(maximum)
        exponentials = np.exp(logits - np.where(empty, 0, maximum))
        total = np.where(empty, 1, backend._row_sum(exponentials))
        return np.asarray((store(exponentials) @ value) * (1 / total))

    return forms.averaged(average)


@_right(why="a (ds k) for (a ds) k, p dp - p Delta")
def kernel_that_scales_the_gradient_last(store: Store) -> Steps:
    """Scale the gradient of the query last, and take the softmax's gradient apart."""

    def steps(call: Call) -> Steps:
        over_queries = _over_tiles_of_queries(128)
        return _tiled_backward(call, 128) | {
            "_softmax_gradient": lambda weights, gradient, delta: weights * gradient - weights * delta,
            "_scale_of": lambda query, scale: 1.0,
            "_weighted_sum": lambda gradient, key: backend._weighted_sum(gradient, key) * call.factor,
            "_sum_over_queries": lambda weights, rows: over_queries(
                weights if rows is call.grad_output else weights * call.factor, rows
            ),
        }

    return {**_averaged_from(store), **forms.in_gradients(steps)}


@_right(why="the class eager, sums in pairs", classes=_EAGER, hidden=frozenset())
def every_step_stored_in_the_format_of_the_ends(store: Store) -> Steps:
    """Store every intermediate; products and sums accumulate in float32, in pairs."""

    def score(query: Array, key: Array, factor: float) -> Stages:
        raw_scores = store(kernel.pairwise_matmul(query, np.swapaxes(key, -1, -2)))
        return {"raw_scores": raw_scores, "scores": store(raw_scores * factor)}

    def total(exponentials: Array) -> Array:
        nothing = np.zeros((*exponentials.shape[:-1], 1), exponentials.dtype)
        return store(kernel.pairwise_sum(exponentials)) if exponentials.shape[-1] else nothing

    library = numpy_with(exp=lambda shifted: store(np.exp(store(shifted))), log=lambda total: store(np.log(total)))
    stored_softmax = within(backend._softmax_with_sinks, np=library, _row_sum=total)

    def average(weights: Array, value: Array) -> Array:
        return kernel.pairwise_matmul(weights, value) if weights.shape[-1] else np.asarray(weights @ value)

    return {
        **forms.scored(score),
        **forms.normalised(
            lambda logits: {name: store(each) for name, each in stored_softmax(logits, None, "zero").items()}
        ),
        "attention._weighted_sum": average,
        "merge_states": backend.merge_states,  # of statistics in float32, whatever the ends are
    }


# Rows, laid out by hand: the variant and why it is right, and below what it does instead.
# fmt: off
control("_softmax_with_sinks._row_sum", "sum_sorted", "the row sum from the smallest term to the largest",
    lambda exponentials: kernel.sequential_sum(np.sort(exponentials, axis=-1)), dtypes=WIDE)
control(None, "sums_sequential", "one running sum each", _in_order(kernel.sequential_matmul, kernel.sequential_sum),
        dtypes=WIDE)
control(None, "sums_pairwise", "sums by halves", _in_order(kernel.pairwise_matmul, kernel.pairwise_sum), dtypes=WIDE)
control(forms.scored, "query_prescaled", "the scale is folded into the query",
    lambda query, key, factor: {"scores": backend._dot(query * factor, key)}, dtypes=WIDE)
control("_softmax_with_sinks.np", "exp2_for_exp", "exp(x) = exp2(x log2(e)), and log likewise",
    numpy_with(exp=lambda shifted: np.exp2(shifted * math.log2(math.e)), log=lambda total:
        np.log2(total) * math.log(2)))
control(forms.reciprocal_read_as, "reciprocal_multiplied", "e (1/l) for e/l", lambda total: np.asarray(1 / total))
control(forms.products_by, "products_transposed", "A B = (B^T A^T)^T, with copies in other layouts",
        kernel.by_transposes)
control(forms.products_by, "products_by_einsum", "einsum for matmul", kernel.einsum, dtypes=WIDE)
control(forms.products_by, "products_row_by_row", "matrix times vector, one query at a time", kernel.by_rows)
control(None, "accumulated_in_float64", "sums and exponentials in float64, rounded once",
    {**forms.products_by(kernel.wider(np.matmul)), "_softmax_with_sinks.np": numpy_with(exp=kernel.wider(np.exp)),
        "_softmax_with_sinks._row_sum": kernel.wider(backend._row_sum), "additive_scores.np": numpy_with(
        tanh=kernel.wider(np.tanh))},
    dtypes=("float32", "float16"))
control(forms.products_by, "fused_multiply_add", "one rounding per multiplication and addition",
    kernel.fused_multiply_add, dtypes=("float32",))
control("general_scores", "bilinear_key_first", "q (W k) for (q W) k",
    lambda query, key, weight, *, score_bias=None: forms.with_score_bias(backend._dot(query, key @ weight.T),
        score_bias))
control("general_scores", "bilinear_by_einsum", "the bilinear score in one einsum",
    lambda query, key, weight, *, score_bias=None: forms.with_score_bias(np.asarray(np.einsum("...qd,de,...ke->...qk",
        query,
        weight, key)), score_bias),
    dtypes=WIDE)
control(forms.rows_read_as, "uniform_rows_by_the_least_finite_number",
    "equal scores have equal weights, whatever they are: torch.finfo(dtype).min in place of masked scores",
    lambda logits, seen: np.where(np.isneginf(logits) & np.isfinite(seen), np.finfo(logits.dtype).min, seen))
# in 16 bits the class eager has no row sum from an output that was stored
control(forms.delta_read_as, "gradient_row_sum_from_the_output",
    "sum p dp = g o: Dao et al. 2022, FlashAttention, appendix B.4",
    lambda call, terms: forms.delta_from_output(call), dtypes=WIDE)
control(forms.in_gradients, "fused_backward_pass",
        "weights made again, row sum from the output, sums in tiles of 64 queries",
    lambda call: {**backward_weights_from_log_sum_exp(call), "_sum_over_queries": _in_tiles(64)}, dtypes=WIDE)
control("_sum_over_queries", "gradients_in_tiles_of_16_queries", "sums over queries tile by tile", _in_tiles(16))
control("_softmax_gradient", "softmax_gradient_distributed",
    "p dp - p delta for p (dp - delta), as automatic differentiation gives it",
    lambda weights, grad_weights, mean: np.asarray(weights * grad_weights - weights * mean))
control(forms.in_gradients, "softcap_slope_by_cosh", "1 - tanh^2 = 1 / cosh^2",
    lambda call: {"_cap_slope": lambda capped, softcap: 1 / np.cosh(call.stages["scores"] / softcap) ** 2})
# Multiply (B, H, L, X) with (B, Hkv, X, Y), each query head with its group's.
control(forms.grouped_by, "grouped_heads_by_einsum", "query heads of a group side by side, nothing repeated",
    lambda left, right: np.asarray(np.einsum("bkglx,bkxy->bkgly", left.reshape(right.shape[0], right.shape[1],
        left.shape[1] // right.shape[1], *left.shape[2:]), right).reshape(*left.shape[:3], right.shape[-1])),
    dtypes=WIDE)
control(kernel.Kernel, "fused_kernel_with_weights_of_8_bits",
    "one pass over tiles of 64 keys, exponentials rounded to 8 bits before they meet the values",
    lambda store: forms.Online(64, product=lambda weights, value: _to_eight_bits(weights) @ value).steps,
        dtypes=kernel.NARROW,
    classes=dict.fromkeys(kernel.NARROW, "fused_fp8"))
# fmt: on
