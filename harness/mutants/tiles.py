"""Faults of tiles of 16, 64 and 128 keys or queries: edges, tails, and the tiles that causality and windows skip."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attncheck.backends.contract import Stages, Window
from attncheck.mutants.mask_steps import Allowed, MaskRequest, causal_mask, within_window
from attncheck.mutants.mutant import KERNELS, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import SOFTMAX
from attncheck.mutants.variant import Variant


def _logits(change: Callable[[Array], Array]) -> Variant:
    """Take the softmax of other logits."""
    return Variant(normalise=lambda logits, unmasked: SOFTMAX(change(logits), unmasked))


def _kept(keeps: Callable[[Array, int], Array]) -> Variant:
    """Look only at the keys for which ``keeps(key, keys)``."""

    def change(logits: Array) -> Array:
        keys = logits.shape[-1]
        return np.where(keeps(np.arange(keys), keys), logits, -np.inf)

    return _logits(change)


def _without_tail(tile: int) -> Variant:
    return _kept(lambda key, keys: (key < keys - keys % tile) | (keys < tile))


def _without_last_of_full_tile(tile: int) -> Variant:
    return _kept(lambda key, keys: (key < keys - 1) | (keys % tile != 0))


def _padding_counted(tile: int) -> Variant:
    """Let the keys with which the last tile is filled up take part, with scores and values of 0."""

    def normalise(logits: Array, unmasked: Array) -> Stages:
        keys = logits.shape[-1]
        missing = -keys % tile if keys > tile else 0
        padding = np.zeros((*logits.shape[:-1], missing), logits.dtype)
        stages = SOFTMAX(np.concatenate([logits, padding], axis=-1), unmasked)
        return stages | {"weights": stages["weights"][..., :keys]}

    return Variant(normalise=normalise)


def _overlapping(tile: int) -> Variant:
    """Move the last tile back until it is full: its first keys are read a second time."""

    def change(logits: Array) -> Array:
        keys = logits.shape[-1]
        key, rest = np.arange(keys), keys % tile
        twice = (key >= keys - tile) & (key < keys - rest) & (rest > 0) & (keys > tile)
        return np.asarray(logits + np.where(twice, math.log(2), 0).astype(logits.dtype))

    return _logits(change)


def _written(change: Callable[[Array], Array]) -> Variant:
    return Variant(average=lambda logits, weights, value: change(weights @ value))


def _last_tile_zero(tile: int) -> Variant:
    def change(output: Array) -> Array:
        queries = output.shape[-2]
        if queries > tile and queries % tile:
            output[..., queries - queries % tile :, :] = 0
        return output

    return _written(change)


def _last_row_repeats(tile: int) -> Variant:
    def change(output: Array) -> Array:
        last = np.arange(tile - 1, output.shape[-2], tile)
        output[..., last, :] = output[..., last - 1, :]
        return output

    return _written(change)


def _first_row_repeats(tile: int) -> Variant:
    def change(output: Array) -> Array:
        first = np.arange(tile, output.shape[-2], tile)
        output[..., first, :] = output[..., :1, :]
        return output

    return _written(change)


def _by_number_of_keys(logits: Array, weights: Array, value: Array) -> Array:
    output = weights @ value
    output[..., value.shape[-2] :, :] = 0
    return np.asarray(output)


def _tile_of(length: int, tile: int) -> Array:
    return np.asarray(np.arange(length) // tile)


def _causal(change: Callable[[Array, Array, Array], Array]) -> Variant:
    """Change what causality allows, by the positions of query and key."""

    def causal(queries: int, keys: int) -> Array:
        return change(causal_mask(queries, keys), np.arange(queries)[:, np.newaxis], np.arange(keys))

    return Variant(allowed=Allowed(causal=causal))


def _without_diagonal_tile(tile: int) -> Variant:
    return _causal(lambda allowed, query, key: allowed & ~((query // tile == key // tile) & (query >= tile)))


def _diagonal_tile_open(tile: int) -> Variant:
    return _causal(lambda allowed, query, key: allowed | ((query // tile == key // tile) & (query >= tile)))


def _bounded_from_the_other_corner(queries: int, keys: int) -> Array:
    """Mask from the top left, but end the loop over tiles of 16 keys as if the last query stood at the last key."""
    row = np.arange(queries)[:, np.newaxis]
    end = np.ceil(((row // 16 + 1) * 16 + keys - queries) / 16) * 16
    return np.asarray(causal_mask(queries, keys) & (np.arange(keys) < end))


def _first_partial_tile_skipped(request: MaskRequest, window: Window) -> Array:
    """Begin at the first tile of 16 keys that lies wholly inside of the window of a tile's first query."""
    within, left = within_window(request, window), window[0]
    if left is None:
        return within
    queries, keys = request.scores.shape[-2:]
    begin = np.maximum(_tile_of(queries, 16) * 16 - left, 0)
    return np.asarray(within & (np.arange(keys) >= (np.ceil(begin / 16) * 16)[:, np.newaxis]))


def _last_tile_of_window_skipped(request: MaskRequest, window: Window) -> Array:
    """End at the tile of 64 keys in which a tile of queries begins, whatever the right side is."""
    within, right = within_window(request, window), window[1]
    if right is None:
        return within
    queries, keys = request.scores.shape[-2:]
    end = (_tile_of(queries, 64) + 1) * 64
    return np.asarray(within & (np.arange(keys) < end[:, np.newaxis]))


def _tiled(name: str, defect: str, backend: Variant, first_wrong_stage: str) -> Mutant:
    return Mutant(name, "tiles", defect, backend, first_wrong_stage, KERNELS)


def _at_each(
    tiles: tuple[int, ...], name: str, defect: str, backend: Callable[[int], Variant], first_wrong_stage: str
) -> tuple[Mutant, ...]:
    return tuple(_tiled(name.format(tile), defect, backend(tile), first_wrong_stage) for tile in tiles)


_TILES = (64, 128)

MUTANTS = (
    *_at_each(
        _TILES,
        "keys_behind_tiles_of_{}_dropped",
        "only whole tiles of keys are read: FlagGems#898",
        _without_tail,
        "weights",
    ),
    *_at_each(
        (16, *_TILES),
        "last_key_of_a_full_tile_of_{}_dropped",
        "structure: j < n - 1 where the last tile needs no mask",
        _without_last_of_full_tile,
        "weights",
    ),
    *_at_each(
        (16, *_TILES),
        "padding_of_the_last_tile_of_{}_counted",
        "keys that fill up the last tile are not masked: tt-metal#41215, SageAttention#376",
        _padding_counted,
        "weights",
    ),
    *_at_each(
        _TILES,
        "last_tile_of_{}_read_twice",
        "structure: the last tile is moved back until it is full",
        _overlapping,
        "weights",
    ),
    *_at_each(
        _TILES,
        "last_tile_of_{}_queries_zero",
        "the last tile of queries is not written: fla#892's kind",
        _last_tile_zero,
        "context",
    ),
    *_at_each(
        (16, *_TILES),
        "last_row_of_each_tile_of_{}_repeated",
        "structure: a store at the edge of a tile is off by one row",
        _last_row_repeats,
        "context",
    ),
    _tiled(
        "first_row_behind_a_tile_of_128_reads_the_first_query",
        "structure: the offset of the next tile is added after its first row",
        _first_row_repeats(128),
        "context",
    ),
    _tiled(
        "queries_beyond_the_number_of_keys_zero",
        "the grid is sized by keys: pytorch#139462's kind",
        Variant(average=_by_number_of_keys),
        "context",
    ),
    *_at_each(
        (16, *_TILES),
        "causal_loop_ends_before_the_diagonal_tile_of_{}",
        "structure: the loop over tiles of keys ends one early",
        _without_diagonal_tile,
        "masked",
    ),
    *_at_each(
        _TILES,
        "causal_diagonal_tile_of_{}_open",
        "the diagonal tile is taken for a full one beyond the first: gcnasm#21's kind",
        _diagonal_tile_open,
        "masked",
    ),
    _tiled(
        "causal_loop_by_one_tile_of_64_for_128_queries",
        "structure: tiles of 128 queries and 64 keys, of which the second on the diagonal is skipped",
        _causal(lambda allowed, query, key: allowed & (key < query // 128 * 128 + 64)),
        "masked",
    ),
    _tiled(
        "causal_loop_bounded_from_the_other_corner",
        "masked from the top left, bounded from the bottom right: cutlass#2336's kind",
        Variant(allowed=Allowed(causal=_bounded_from_the_other_corner)),
        "masked",
    ),
    _tiled(
        "first_partial_tile_of_a_window_skipped",
        "structure: the first tile of a window is rounded up instead of down",
        Variant(allowed=Allowed(window=_first_partial_tile_skipped)),
        "masked",
    ),
    _tiled(
        "window_ends_with_the_tile_of_its_query",
        "structure: the right side of a window does not lengthen the loop over tiles of 64",
        Variant(allowed=Allowed(window=_last_tile_of_window_skipped)),
        "masked",
    ),
)
