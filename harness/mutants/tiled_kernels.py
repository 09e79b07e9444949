"""Right kernels that take keys, queries or widths in tiles, in parts, in another order, or filled up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.backward import Backward, for_rows
from attncheck.mutants.kernel import Inside
from attncheck.mutants.online import Online
from attncheck.mutants.recomputation import weights_again
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import SOFTMAX, DotScore, dot
from attncheck.mutants.variant import Variant

Product = Callable[[Array, Array], Array]


def spans(length: int, tile: int) -> list[slice]:
    """Cut a length into tiles."""
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def added(parts: Iterable[Array], like: Array) -> Array:
    """Add parts up, one after the other."""
    total = np.zeros((), like.dtype)
    for part in parts:
        total = total + part
    return np.asarray(total)


def blocked(terms: int) -> Product:
    """Multiply matrices by blocks of the inner axis, one after the other."""

    def product(left: Array, right: Array) -> Array:
        parts = spans(left.shape[-1], terms)
        return added((left[..., span] @ right[..., span, :] for span in parts), left) if parts else left @ right

    return product


def tiled_backward(tile: int) -> Backward:
    """Go back as fused kernels do: weights from log_sum_exp, Delta from the output, sums over tiles of queries."""

    def over_queries(by_key: Array, by_query: Array) -> Array:
        tiles = spans(by_key.shape[-2], tile)
        parts = (for_rows(by_key[..., span, :], by_query[..., span, :]) for span in tiles)
        return added(parts, by_key) if tiles else for_rows(by_key, by_query)

    return Backward(
        weights=lambda saved: weights_again(saved.logits, saved.log_sum_exp),
        delta=lambda saved, grad_output, *_: (grad_output * saved.stages["output"]).sum(axis=-1, keepdims=True),
        query=lambda gradient, saved: blocked(tile)(gradient, saved.key),
        key=over_queries,
        value=over_queries,
    )


def flash(tile: int, product: Product = np.matmul) -> Inside:
    """Take keys in tiles; exponentials are stored in the format of the ends before they meet the values."""

    def inside(store: Store) -> Variant:
        online = Online(tile, product=lambda weights, value: product(store(weights), value))
        return Variant(normalise=online.normalise, average=online.average, backward=tiled_backward(tile))

    return inside


def split(spans_of: Callable[[int], list[slice]]) -> Inside:
    """Attend to parts of the keys, each with its own softmax, and merge them by their log_sum_exp."""

    def inside(store: Store) -> Variant:
        def average(logits: Array, weights: Array, value: Array) -> Array:
            chosen = spans_of(logits.shape[-1])
            parts = [SOFTMAX(logits[..., span], logits) for span in chosen]
            if not parts:
                return np.asarray(weights @ value)
            statistics = np.stack([part["log_sum_exp"] for part in parts], axis=-1)
            shares = SOFTMAX(statistics, statistics)["weights"]
            averages = [store(part["weights"]) @ value[..., span, :] for part, span in zip(parts, chosen, strict=True)]
            return added((each * shares[..., n : n + 1] for n, each in enumerate(averages)), value)

        return Variant(average=average)

    return inside


def thirds(keys: int) -> list[slice]:
    """Cut the keys into three parts."""
    edges = [keys * part // 3 for part in range(4)]
    return [slice(*edge) for edge in pairwise(edges) if edge[0] < edge[1]]


def permuted(store: Store) -> Variant:
    """Take the keys in another order: every seventh first, and so on."""

    def order(keys: int) -> Array:
        return np.argsort(np.arange(keys) % 7, kind="stable")

    def normalise(logits: Array, unmasked: Array) -> Stages:
        stages = SOFTMAX(logits[..., order(logits.shape[-1])], unmasked)
        return stages | {"weights": stages["weights"][..., np.argsort(order(logits.shape[-1]))]}

    def average(logits: Array, weights: Array, value: Array) -> Array:
        chosen = order(logits.shape[-1])
        return np.asarray(store(weights)[..., chosen] @ np.ascontiguousarray(value[..., chosen, :]))

    return Variant(normalise=normalise, average=average)


def width_padded(store: Store) -> Variant:
    """Fill widths up to a multiple of 32 with zeros."""

    def padded(array: Array) -> Array:
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 32)])

    def average(logits: Array, weights: Array, value: Array) -> Array:
        return np.asarray((store(weights) @ padded(value))[..., : value.shape[-1]])

    return Variant(score=DotScore(dot=lambda query, key: dot(padded(query), padded(key))), average=average)


def keys_padded(store: Store) -> Variant:
    """Fill the last tile of 64 keys with scores of minus infinity and values of zero."""

    def filled(logits: Array) -> Array:
        missing = -logits.shape[-1] % 64
        return np.concatenate([logits, np.full((*logits.shape[:-1], missing), -np.inf, logits.dtype)], axis=-1)

    def normalise(logits: Array, unmasked: Array) -> Stages:
        stages = SOFTMAX(filled(logits), unmasked)
        return stages | {"weights": stages["weights"][..., : logits.shape[-1]]}

    def average(logits: Array, weights: Array, value: Array) -> Array:
        missing = [(0, -value.shape[-2] % 64), (0, 0)]
        filled_up = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + missing[:1])
        return np.asarray(store(filled_up) @ np.pad(value, [(0, 0)] * (value.ndim - 2) + missing))

    return Variant(normalise=normalise, average=average)


def tiles_of_queries(store: Store) -> Variant:
    """Take 64 queries at a time, and of the keys no more than the last one that any of them attends to."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        output = np.zeros((*weights.shape[:-1], value.shape[-1]), value.dtype)
        for span in spans(weights.shape[-2], 64):
            attended = ~np.isneginf(logits[..., span, :]).all(axis=tuple(range(logits.ndim - 1)))
            end = int(np.flatnonzero(attended).max(initial=-1)) + 1
            output[..., span, :] = store(weights[..., span, :end]) @ value[..., :end, :]
        return output

    return Variant(average=average)
