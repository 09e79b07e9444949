"""Faults that show with the masks of today's models: prefixes, images, chunks, kept tokens, blocks, trees, documents.

A kernel gets a plain boolean mask. Where it goes wrong, it takes the mask for a simpler one, skips tiles that it should
not, or reads the mask with the positions of another tile. Where a model's own code makes the mask, it is another mask.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from attncheck.mutation.arithmetic import Array
from attncheck.mutation.mask_forms import both, causal_keys, mask_read_as
from attncheck.mutation.mutant import KERNELS, mutant

_faulty = partial(mutant, "masks of models", mask_read_as, at="masked")

_TILE = 64
_SMALL_TILE = 4


def _offset(scores: Array) -> int:
    """Return where the first query stands if the last one stands at the last key."""
    return int(scores.shape[-1] - scores.shape[-2])


def _causal(scores: Array) -> Array:
    """Return who sees whom if the last query stands at the last key, (Lq, T)."""
    queries, keys = scores.shape[-2:]
    return np.tri(queries, keys, keys - queries, dtype=bool)


def _spread(mask: Array, scores: Array) -> Array:
    """Return the mask of every row and key, (..., Lq, T)."""
    spread: Array = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, scores.shape[-2:]))
    return spread


def _has_rows(mask: Array) -> bool:
    return mask.ndim >= 2 and mask.shape[-2] > 1


def _tiles(mask: Array, tile: int) -> Array:
    """Return the mask in tiles, (..., tiles of queries, tile, tiles of keys, tile), with false behind its ends."""
    queries, keys = mask.shape[-2:]
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 2) + [(0, -queries % tile), (0, -keys % tile)])
    tiles: Array = padded.reshape(*mask.shape[:-2], -(-queries // tile), tile, -(-keys // tile), tile)
    return tiles


def _sees_any(mask: Array, tile: int) -> Array:
    """Return the tiles of which anything is seen, (..., tiles of queries, tiles of keys)."""
    return np.asarray(_tiles(mask, tile).any(axis=(-1, -3)))


def _of_tiles(table: Array, tile: int, mask: Array) -> Array:
    """Return a table of tiles, (..., tiles of queries, tiles of keys), as a mask of the shape of another."""
    queries, keys = mask.shape[-2:]
    return np.asarray(table.repeat(tile, axis=-2).repeat(tile, axis=-1)[..., :queries, :keys])


def _first_key_seen(mask: Array) -> Array:
    """Return the first key that each row sees, an axis for keys kept."""
    return np.asarray(mask.argmax(axis=-1)[..., np.newaxis])


def _last_key_seen(mask: Array) -> Array:
    """Return the last key that each row sees, -1 where it sees none, an axis for keys kept."""
    keys = mask.shape[-1]
    last = keys - 1 - mask[..., ::-1].argmax(axis=-1)
    return np.asarray(np.where(mask.any(axis=-1), last, -1)[..., np.newaxis])


@_faulty(
    defect="is_causal is told from the first row, which is text: transformers#38295's kind", diagnosis="mask-and-causal"
)
def mask_that_begins_causally_is_causal(mask: Array, scores: Array) -> Array:
    rows = _spread(mask, scores)
    if not _has_rows(mask):
        return mask
    alike = (rows[..., 0, :] == _causal(scores)[0]).all(axis=-1)[..., np.newaxis, np.newaxis]
    return np.asarray(np.where(alike, rows & _causal(scores), rows))


@_faulty(defect="a tile below the diagonal is taken for open: FastDeploy#3514, where trees have gaps there")
def tiles_below_the_diagonal_taken_for_open(mask: Array, scores: Array) -> Array:
    queries, keys = scores.shape[-2:]
    rows, columns = np.arange(queries)[:, np.newaxis] + _offset(scores), np.arange(keys)
    below = columns // _SMALL_TILE < rows // _SMALL_TILE
    return np.asarray(mask | below) if _has_rows(mask) else mask


@_faulty(defect="a tile is skipped if its first row sees nothing in it")
def tiles_skipped_by_their_first_row(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask):
        return mask
    rows = _spread(mask, scores)
    seen = np.asarray(_tiles(rows, _SMALL_TILE)[..., 0, :, :].any(axis=-1))
    return rows & _of_tiles(seen, _SMALL_TILE, rows)


@_faulty(defect="a tile of 64 is taken for open if its first and last rows are", dtypes=KERNELS)
def tiles_of_64_taken_for_open_by_their_ends(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask):
        return mask
    rows = _spread(mask, scores)
    tiles = _tiles(rows, _TILE)
    ends = np.asarray(tiles[..., 0, :, :].any(axis=-1) & tiles[..., -1, :, :].any(axis=-1))
    return rows | _of_tiles(ends, _TILE, rows)


@_faulty(defect="which tiles are skipped is told from the first of the batch: attention-gym#62's kind")
def tiles_skipped_by_the_first_of_the_batch(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask) or mask.ndim < 4:
        return mask
    rows = _spread(mask, scores)
    return rows & _of_tiles(_sees_any(rows[:1], _SMALL_TILE), _SMALL_TILE, rows)


@_faulty(defect="which tiles are skipped is told from the first head")
def tiles_skipped_by_the_first_head(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask) or mask.ndim < 4:
        return mask
    rows = _spread(mask, scores)
    return rows & _of_tiles(_sees_any(rows[:, :1], _SMALL_TILE), _SMALL_TILE, rows)


@_faulty(defect="a square table of tiles, read by columns: pytorch#141126's kind")
def table_of_tiles_transposed(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask):
        return mask
    rows = _spread(mask, scores)
    table = _sees_any(rows, _SMALL_TILE)
    return rows & _of_tiles(np.swapaxes(table, -1, -2), _SMALL_TILE, rows) if _is_square(table) else rows


def _is_square(table: Array) -> bool:
    return bool(table.shape[-1] == table.shape[-2])


@_faulty(defect="a table of tiles of 64 read as one of 128: bd3lms#23", dtypes=KERNELS)
def tiles_of_64_read_as_128(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask) or min(scores.shape[-2:]) <= _TILE:
        return mask
    rows = _spread(mask, scores)
    table = _sees_any(rows, _TILE)
    return rows & _of_tiles(table, 2 * _TILE, rows)


@_faulty(
    defect="a loop over the last run of keys alone: the first tokens leave with the window, vllm#1304's kind",
    diagnosis="mask-of-last-run",
)
def only_the_last_run_of_keys(mask: Array, scores: Array) -> Array:
    gaps = np.where(mask, -1, np.arange(mask.shape[-1]))
    before_last = np.arange(mask.shape[-1]) <= _last_key_seen(mask)
    last_gap = np.where(before_last, gaps, -1).max(axis=-1, keepdims=True, initial=-1)
    return np.asarray(mask & (np.arange(mask.shape[-1]) > last_gap))


@_faulty(defect="a row is taken for the range from its first to its last key", diagnosis="mask-without-gaps")
def every_key_between_the_first_and_the_last(mask: Array, scores: Array) -> Array:
    key = np.arange(mask.shape[-1])
    return np.asarray((key >= _first_key_seen(mask)) & (key <= _last_key_seen(mask)))


@_faulty(
    defect="the first key of a row is left out where its chunk or document begins",
    diagnosis="mask-without-first-key-but-key-0",
)
def rows_begin_one_key_too_late(mask: Array, scores: Array) -> Array:
    first = _first_key_seen(mask)
    begins = (np.arange(mask.shape[-1]) == first) & (first > 0)
    return np.asarray(mask & ~begins)


@_faulty(defect="the last key of a prefix is left out: j < n - 1")
def prefix_one_key_too_short(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask):
        return mask
    rows = _spread(mask, scores)
    last = _last_key_seen(rows)[..., :1, :]  # of the first row: the end of the prefix
    beyond = (np.arange(rows.shape[-1]) == last) & ~_causal(scores)
    return np.asarray(rows & ~beyond)


@_faulty(defect="one key behind a prefix is part of it: j <= n")
def prefix_one_key_too_long(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask):
        return mask
    rows = _spread(mask, scores)
    last = _last_key_seen(rows)[..., :1, :]
    return np.asarray(rows | ((np.arange(rows.shape[-1]) == last + 1) & rows.any(axis=-1, keepdims=True)))


@_faulty(defect="a key that any earlier query sees is seen by all: text sees the image behind it")
def keys_ahead_seen_by_all(mask: Array, scores: Array) -> Array:
    rows = _spread(mask, scores)
    ahead = (rows & ~_causal(scores)).any(axis=-2, keepdims=True)
    return np.asarray(rows | ahead) if _has_rows(mask) else mask


@_faulty(defect="images see each other: any two tokens of images, transformers#38053")
def images_see_each_other(mask: Array, scores: Array) -> Array:
    if not _has_rows(mask):
        return mask
    rows = _spread(mask, scores)
    queries = rows.shape[-2]
    ahead = np.asarray(rows & ~_causal(scores))
    of_keys = np.asarray(ahead.any(axis=-2))  # tokens that somebody before them sees
    new = of_keys[..., rows.shape[-1] - queries :] if rows.shape[-1] >= queries else of_keys[..., :0]
    looks_ahead = np.asarray(ahead.any(axis=-1))
    of_queries = np.asarray(looks_ahead | new) if new.shape[-1] == queries else looks_ahead
    return np.asarray(rows | (of_queries[..., np.newaxis] & of_keys[..., np.newaxis, :]))


@_faulty(defect="positions that do not count the past: transformers#37351's chunks")
def mask_counted_from_the_first_new_key(mask: Array, scores: Array) -> Array:
    past = _offset(scores)
    return np.roll(mask, -past, axis=-1) if past > 0 and _has_rows(mask) else mask


@_faulty(defect="a tree taken for a chain, so that siblings are seen: vllm#20401's kind")
def tree_taken_for_a_chain(mask: Array, scores: Array) -> Array:
    queries, keys = scores.shape[-2:]
    if not _has_rows(mask) or keys < queries:
        return mask
    rows = _spread(mask, scores)
    new = np.arange(keys) >= keys - queries
    return np.asarray(np.where(new, rows | _causal(scores), rows))


@_faulty(defect="the diagonal of a tree alone, without the ancestors of a node")
def ancestors_dropped(mask: Array, scores: Array) -> Array:
    queries, keys = scores.shape[-2:]
    if not _has_rows(mask) or keys <= queries:
        return mask
    own = np.arange(keys) == np.arange(queries)[:, np.newaxis] + keys - queries
    return np.asarray(_spread(mask, scores) & (own | (np.arange(keys) < keys - queries)))


@_faulty(defect="what is committed is masked as the new tokens are, from the first key on")
def committed_keys_masked_causally(mask: Array, scores: Array) -> Array:
    queries, keys = scores.shape[-2:]
    if not _has_rows(mask) or keys <= queries:
        return mask
    committed = np.arange(keys) < keys - queries
    return np.asarray(_spread(mask, scores) & (~committed | causal_keys(queries, keys)))


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty("mask_of_a_model_taken_for_causal",
    "a mask taken for causal, whatever it is: transformers#39389, the prefix of unsloth-zoo#963's kind",
    lambda mask, scores: both(mask, _causal(scores)) if _has_rows(mask) else mask, diagnosis="mask-and-causal")
_faulty("tiles_above_the_diagonal_skipped", "tiles above the diagonal are skipped, whatever the mask says there",
    lambda mask, scores: both(mask, np.arange(scores.shape[-1]) // _SMALL_TILE <= (np.arange(scores.shape[-2])[:,
        np.newaxis] + _offset(scores)) // _SMALL_TILE) if _has_rows(mask) else mask)
_faulty("tiles_of_64_above_the_diagonal_skipped",
    "tiles of 64 above the diagonal are skipped, whatever the mask says there",
    lambda mask, scores: both(mask, np.arange(scores.shape[-1]) // _TILE <= (np.arange(scores.shape[-2])[:,
        np.newaxis] + _offset(scores)) // _TILE) if _has_rows(mask) else mask,
    dtypes=KERNELS)
_faulty("rows_begin_one_key_too_early",
    "the first key of a row is off by one: transformers#37414, chunks and documents",
    lambda mask, scores: np.asarray(mask | (np.arange(mask.shape[-1]) == _first_key_seen(mask) - 1) & mask.any(axis=-1,
        keepdims=True)), diagnosis="mask-one-key-early")
_faulty("mask_of_the_first_key_of_a_tile",
    "a document goes on in the next one for a tile: the mask is read once for a tile's keys, its first",
    lambda mask, scores: mask if mask.shape[-1] == 1 else np.asarray(mask[...,
        np.arange(mask.shape[-1]) // _SMALL_TILE * _SMALL_TILE]))
