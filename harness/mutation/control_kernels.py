"""Right kernels as they are written for speed, in all four dtypes: none of them may be flagged at any size.

They take keys, queries or widths in tiles, in parts, in another order, or filled up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import ml_dtypes
import numpy as np

from attncheck.backends.contract import EmptyRows, Stages
from attncheck.backends.numpy_backend import (
    _dot,
    _row_maximum,
    _row_sum,
    _scale_of,
    _softmax_with_sinks,
    _sum_over_queries,
    _weighted_sum,
    dot_scores,
    merge_states,
    softmax,
)
from attncheck.mutation.arithmetic import Array, Store, pairwise_matmul, pairwise_sum, wider
from attncheck.mutation.backward_forms import delta_from_output, in_gradients, stages_remembered, weights_again
from attncheck.mutation.forward_forms import Product, averaged, grouped_by, in_attention, normalised, scored
from attncheck.mutation.kernel import ALL, NARROW, NEVER_RETURNED, STATISTICS, Inside, Kernel
from attncheck.mutation.mutant import control
from attncheck.mutation.online import Online
from attncheck.mutation.variant import Call, Steps, numpy_with, within

FUSED: Mapping[str, str] = {"float64": "native", "float32": "native", "bfloat16": "fused", "float16": "fused"}
_EAGER = {**FUSED, "bfloat16": "eager", "float16": "eager"}
_STORED = {dtype: f"{name}_lse" for dtype, name in FUSED.items()}


def _right(
    *,
    why: str,
    name: str | None = None,
    classes: Mapping[str, str] = FUSED,
    hidden: frozenset[str] = NEVER_RETURNED,
    wide: frozenset[str] = frozenset(),
) -> Callable[[Inside], Inside]:
    """Register what runs between the ends of a right kernel."""

    def register(inside: Inside) -> Inside:
        def form(inside: Inside) -> Kernel:
            return Kernel(inside, hidden=hidden, wide=wide)

        return control(form, why=why, dtypes=ALL, classes=classes, name=name or inside.__name__)(inside)

    return register


def spans(length: int, tile: int) -> list[slice]:
    """Cut a length into tiles."""
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def _added(parts: Iterable[Array], like: Array) -> Array:
    """Add parts up, one after the other."""
    total = np.zeros((), like.dtype)
    for part in parts:
        total = total + part
    return np.asarray(total)


def _blocked(terms: int) -> Product:
    """Multiply matrices by blocks of the inner axis, one after the other."""

    def product(left: Array, right: Array) -> Array:
        parts = spans(left.shape[-1], terms)
        return _added((left[..., span] @ right[..., span, :] for span in parts), left) if parts else left @ right

    return product


def _over_tiles_of_queries(tile: int) -> Product:
    """Sum over queries tile by tile."""

    def product(weights: Array, rows: Array) -> Array:
        tiles = spans(weights.shape[-2], tile)
        parts = (_sum_over_queries(weights[..., span, :], rows[..., span, :]) for span in tiles)
        return _added(parts, weights) if tiles else _sum_over_queries(weights, rows)

    return product


def _tiled_backward(call: Call, tile: int) -> Steps:
    """Go back as fused kernels do: weights from log_sum_exp, Delta from the output, sums over tiles of queries."""
    return {
        "attention": stages_remembered(call, weights_again(call.logits, call.log_sum_exp)),
        "_row_sum": lambda terms: delta_from_output(call),
        "_weighted_sum": _blocked(tile),
        "_sum_over_queries": _over_tiles_of_queries(tile),
    }


def _flash(tile: int, product: Product = np.matmul) -> Inside:
    """Take keys in tiles; exponentials are stored in the format of the ends before they meet the values."""

    def inside(store: Store) -> Steps:
        online = Online(tile, product=lambda weights, value: product(store(weights), value))
        return {**online.steps, **in_gradients(lambda call: _tiled_backward(call, tile))}

    return inside


for _tile in (16, 64, 128):
    _right(
        why="one pass over tiles of keys, weights in the format of the ends, a backward pass from log_sum_exp",
        name=f"fused_kernel_with_tiles_of_{_tile}",
    )(_flash(_tile))
_right(
    why="log_sum_exp is returned in float32 beside outputs of 16 bits, as FlashAttention does",
    name="fused_kernel_with_statistics_in_float32",
    wide=STATISTICS,
)(_flash(64))


def _to_eight_bits(weights: Array) -> Array:
    """Round exponentials, at most 1, to float8_e4m3fn."""
    return weights.astype(ml_dtypes.float8_e4m3fn).astype(weights.dtype)


control(
    Kernel,
    why="one pass over tiles of 64 keys, exponentials rounded to 8 bits before they meet the values",
    name="fused_kernel_with_weights_of_8_bits",
    dtypes=NARROW,
    classes=dict.fromkeys(NARROW, "fused_fp8"),
)(lambda store: Online(64, product=lambda weights, value: _to_eight_bits(weights) @ value).steps)


def _averaged_from(store: Store) -> Steps:
    """Store the weights in the format of the ends before they meet the values."""
    return {"attention._weighted_sum": lambda weights, value: store(weights) @ value}


def _in_base_two(store: Store) -> Steps:
    """Fold the scale into the query, and take 2^((s - m) log2(e))."""
    library = numpy_with(
        exp=lambda shifted: np.exp2(shifted * math.log2(math.e)), log=lambda total: np.log2(total) * math.log(2)
    )
    score = scored(lambda query, key, factor: {"scores": _dot(query * factor, key)})
    return {**score, "_softmax_with_sinks.np": library, **_averaged_from(store)}


_right(why="the scale is folded into the query, exponentials in base 2", name="fused_kernel_in_base_two")(_in_base_two)
_right(
    why="the same, and log_sum_exp is returned in float32, as FlexAttention does",
    name="fused_kernel_in_base_two_with_statistics_in_float32",
    wide=STATISTICS,
)(_in_base_two)


_LOG2E = math.log2(math.e)


def _with_log2e_in_the_scale(store: Store) -> Steps:
    """Multiply q k^T, or the tanh of a softcap, once, by the scale (or the cap) times log2(e); take 2^(s - m) of that.

    What FlashAttention's kernels do. docs/numerics.md, 4.1c, derives why its roundings are within every class. The
    softcap is in base e in front of that. A bias or a fill has a rounding of its own there, and may leave the range
    with it: behind these the logits are in base e.
    """

    def steps(call: Call) -> Steps:
        if call.bias is not None or call.mask_fill is not None:
            return {}
        folded: list[Array] = []

        def score(query: Array, key: Array, *, scale: float | None, softcap: float | None) -> Stages:
            stages = dot_scores(query, key, scale=scale, softcap=softcap)
            if softcap is None:
                folded.append(stages["raw_scores"] * (_scale_of(query, scale) * _LOG2E))
            else:
                folded.append(np.tanh(stages["scores"] / softcap) * (softcap * _LOG2E))
            return stages

        def normalise(logits: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
            in_two = np.where(np.isneginf(logits), logits, folded[-1])
            sinks = None if sinks is None else sinks * _LOG2E
            stages = within(_softmax_with_sinks, np=numpy_with(exp=np.exp2, log=np.log2))(in_two, sinks, empty_rows)
            return {**stages, "log_sum_exp": stages["log_sum_exp"] * math.log(2)}

        return {"dot_scores": score, "_softmax_with_sinks": normalise}

    return {**in_attention(steps), **_averaged_from(store)}


_right(
    why="q k^T is multiplied once, by the scale times log2(e), and exponentials and statistics are in base two",
    name="fused_kernel_with_log2e_in_the_scale",
)(_with_log2e_in_the_scale)


def _split(spans_of: Callable[[int], list[slice]]) -> Inside:
    """Attend to parts of the keys, each with its own softmax, and merge them by their log_sum_exp."""

    def inside(store: Store) -> Steps:
        def average(logits: Array, weights: Array, value: Array) -> Array:
            chosen = spans_of(logits.shape[-1])
            parts = [softmax(logits[..., span]) for span in chosen]
            if not parts:
                return np.asarray(weights @ value)
            shares = softmax(np.stack([part["log_sum_exp"] for part in parts], axis=-1))["weights"]
            averages = [store(part["weights"]) @ value[..., span, :] for part, span in zip(parts, chosen, strict=True)]
            return _added((each * shares[..., n : n + 1] for n, each in enumerate(averages)), value)

        return averaged(average)

    return inside


def _thirds(keys: int) -> list[slice]:
    """Cut the keys into three parts."""
    edges = [keys * part // 3 for part in range(4)]
    return [slice(*edge) for edge in pairwise(edges) if edge[0] < edge[1]]


_right(
    why="parts of the keys merged by log_sum_exp, as in split decoding", name="keys_split_in_three", classes=_STORED
)(_split(_thirds))
_right(why="parts of 64 keys merged by log_sum_exp", name="keys_split_into_parts_of_64", classes=_STORED)(
    _split(lambda keys: spans(keys, 64))
)


@_right(why="softmax and average do not depend on the order of the keys")
def keys_in_another_order(store: Store) -> Steps:
    """Take the keys in another order: every seventh first, and so on."""

    def order(keys: int) -> Array:
        return np.argsort(np.arange(keys) % 7, kind="stable")

    def normalise(logits: Array) -> Stages:
        stages = softmax(logits[..., order(logits.shape[-1])])
        return stages | {"weights": stages["weights"][..., np.argsort(order(logits.shape[-1]))]}

    def average(weights: Array, value: Array) -> Array:
        chosen = order(weights.shape[-1])
        return np.asarray(store(weights)[..., chosen] @ np.ascontiguousarray(value[..., chosen, :]))

    return {**normalised(normalise), "attention._weighted_sum": average}


def _by(product: Product, total: Callable[[Array], Array]) -> Inside:
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
        return sum((_row_sum(exponentials[..., span]) for span in spans(exponentials.shape[-1], terms)), nothing)

    return total


_right(why="sums by halves", name="kernel_with_sums_in_pairs")(_by(pairwise_matmul, pairwise_sum))
for _terms in (32, 8):
    _right(why=f"blocks of {_terms} terms, one after the other", name=f"kernel_with_sums_in_blocks_of_{_terms}")(
        _by(_blocked(_terms), _blocked_sum(_terms))
    )
_right(why="products and sums in float64, rounded once", name="kernel_with_sums_in_float64")(
    _by(wider(np.matmul), wider(_row_sum))
)
_right(why="tiles of 64 keys, products in blocks of 16", name="kernel_with_tiles_and_blocks")(_flash(64, _blocked(16)))


@_right(why="zeros behind the last feature add nothing")
def widths_padded_to_32(store: Store) -> Steps:
    """Fill widths up to a multiple of 32 with zeros."""

    def padded(array: Array) -> Array:
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 32)])

    def average(weights: Array, value: Array) -> Array:
        return np.asarray((store(weights) @ padded(value))[..., : value.shape[-1]])

    return {"dot_scores._dot": lambda query, key: _dot(padded(query), padded(key)), "attention._weighted_sum": average}


@_right(why="keys that are masked have a weight of exactly 0")
def keys_padded_to_64(store: Store) -> Steps:
    """Fill the last tile of 64 keys with scores of minus infinity and values of zero."""

    def filled_up(logits: Array) -> Array:
        missing = -logits.shape[-1] % 64
        return np.concatenate([logits, np.full((*logits.shape[:-1], missing), -np.inf, logits.dtype)], axis=-1)

    def normalise(logits: Array) -> Stages:
        stages = softmax(filled_up(logits))
        return stages | {"weights": stages["weights"][..., : logits.shape[-1]]}

    def average(weights: Array, value: Array) -> Array:
        missing = [(0, -value.shape[-2] % 64), (0, 0)]
        padded = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + missing[:1])
        return np.asarray(store(padded) @ np.pad(value, [(0, 0)] * (value.ndim - 2) + missing))

    return {**normalised(normalise), "attention._weighted_sum": average}


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

    return averaged(average)


@_right(why="statistics first, then the average, in tiles of 64 keys")
def two_passes_over_tiles(store: Store) -> Steps:
    """Take maximum and sum in tiles of 64 keys, then the average of stored weights in a second pass."""
    product = _blocked(64)
    return {
        **normalised(Online(64).normalise),
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
    return grouped_by(_group_as_rows) | {
        "attention._weighted_sum": lambda weights, value: _group_as_rows(store(weights), value)
    }


@_right(why="exponentials meet the values, and the sum divides the average")
def kernel_that_divides_last(store: Store) -> Steps:
    """Average exponentials, and multiply with the reciprocal of their sum."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        maximum = _row_maximum(logits)
        empty = np.isneginf(maximum)
        exponentials = np.exp(logits - np.where(empty, 0, maximum))
        total = np.where(empty, 1, _row_sum(exponentials))
        return np.asarray((store(exponentials) @ value) * (1 / total))

    return averaged(average)


@_right(why="a (ds k) for (a ds) k, p dp - p Delta")
def kernel_that_scales_the_gradient_last(store: Store) -> Steps:
    """Scale the gradient of the query last, and take the softmax's gradient apart."""

    def steps(call: Call) -> Steps:
        over_queries = _over_tiles_of_queries(128)
        return _tiled_backward(call, 128) | {
            "_softmax_gradient": lambda weights, gradient, delta: weights * gradient - weights * delta,
            "_scale_of": lambda query, scale: 1.0,
            "_weighted_sum": lambda gradient, key: _weighted_sum(gradient, key) * call.factor,
            "_sum_over_queries": lambda weights, rows: over_queries(
                weights if rows is call.grad_output else weights * call.factor, rows
            ),
        }

    return {**_averaged_from(store), **in_gradients(steps)}


@_right(why="the class eager, sums in pairs", classes=_EAGER, hidden=frozenset())
def every_step_stored_in_the_format_of_the_ends(store: Store) -> Steps:
    """Store every intermediate; products and sums accumulate in float32, in pairs."""

    def score(query: Array, key: Array, factor: float) -> Stages:
        raw_scores = store(pairwise_matmul(query, np.swapaxes(key, -1, -2)))
        return {"raw_scores": raw_scores, "scores": store(raw_scores * factor)}

    def total(exponentials: Array) -> Array:
        nothing = np.zeros((*exponentials.shape[:-1], 1), exponentials.dtype)
        return store(pairwise_sum(exponentials)) if exponentials.shape[-1] else nothing

    library = numpy_with(exp=lambda shifted: store(np.exp(store(shifted))), log=lambda total: store(np.log(total)))
    stored_softmax = within(_softmax_with_sinks, np=library, _row_sum=total)

    def average(weights: Array, value: Array) -> Array:
        return pairwise_matmul(weights, value) if weights.shape[-1] else np.asarray(weights @ value)

    return {
        **scored(score),
        **normalised(lambda logits: {name: store(each) for name, each in stored_softmax(logits, None, "zero").items()}),
        "attention._weighted_sum": average,
        "merge_states": merge_states,  # of statistics in float32, whatever the ends are
    }
