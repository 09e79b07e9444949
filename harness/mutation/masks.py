"""Faults of the boolean mask: its meaning, its axes, its company, its fill, rows without a key, and masks of models.

A kernel gets a plain boolean mask. Where it goes wrong with the masks of today's models, it takes the mask for a
simpler one, skips tiles that it should not, or reads the mask with the positions of another tile. Where a model's own
code makes the mask, it is another mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.judging.alternatives import queries_and_keys
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array
from attncheck.mutation.mutant import KERNELS, WIDE, Call, Steps, control, mutant, within
from attncheck.reading.lowering import Problem

_faulty_masks = partial(mutant, "masks", at="masked")
_faulty_empty_rows = partial(mutant, "empty rows", at="weights")


def _filled_with(number: Callable[[Array], float]) -> Steps:
    """Give what is masked a number."""
    return forms.filled(
        lambda biased, allowed, masks: np.where(allowed, biased, np.asarray(number(biased), biased.dtype))
    )


def _is_filled(logits: Array, seen: Array) -> Array:
    """Return which rows have no key, and something else in the place of their logits; the axis of keys kept."""
    return np.asarray((np.isneginf(logits) & ~np.isneginf(seen)).any(axis=-1, keepdims=True))


def _uniform_rows(change: Callable[[Array, Array], Array]) -> Steps:
    """Do so where rows are to be uniform."""
    return forms.rows_read_as(change, lambda empty_rows: empty_rows == "uniform")


def _begins_causally(problem: Problem) -> object:
    """Return whether the first row of any batch entry's mask is that of a text."""
    (queries, keys), mask = queries_and_keys(problem), problem.inputs["mask"]
    return mask.ndim > 1 and (mask[..., 0, :] == (np.arange(keys) <= keys - queries)).all(axis=-1).any()


# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
# fmt: off
for _fault in forms.misread(
    ("masks", "mask-transposed", "queries and keys swapped, silent where Lq == Lk: keras#21483"),
    ("masks", "mask-ignored", "only one of mask and bias is used: pytorch#136816's kind",
        "mask_dropped_when_a_bias_is_given", forms.given("bias")),
    ("masks", "mask-ignored", "causality replaces padding: onnxruntime#14363", "mask_dropped_when_causal",
        forms.given("is_causal")),
    ("masks", "mask-or-causality", "either may allow, where both must"),
    ("masks", "mask-of-batch-for-heads", "(B, 1, ..) read as (1, H, ..) where B == H: mlx-lm#1903, onnx#8108"),
    ("masks", "masked-at-minus-1e4", "leaks where a masked logit is 1e4 above a kept one: transformers#12109"),
    ("masks", "masked-at-minus-1e9", "an empty row becomes uniform: tensorflow#55682's mask"),
    ("masks", "masked-at-least-number", "an empty row becomes uniform: pytorch#109517, transformers#31303"),
    ("masks", "masked-at-zero", "scores * mask leaves masked keys at 0"),
    ("masks", "mask-added", "a boolean mask converted to numbers and added: torch's float masks"),
    ("empty rows", "empty-rows-zero", "the convention that is asked for is not looked at", "uniform_rows_are_zero",
        lambda problem: problem.options.get("empty_rows") == "uniform"),
    ("empty rows", "empty-rows-zero", "NaN replaced by zeros where NaN is asked for: pytorch#141128",
        "nan_rows_are_zero", lambda problem: problem.options.get("empty_rows") == "nan"),
    ("mask fills", "fill-inverted", "a typo, 1e-9 for -1e9: RibonanzaNet#5"),
    ("mask fills", "fill-of-minus-1e4", "a constant of its own: -1e4 for every dtype, transformers#12109"),
    ("mask fills", "fill-added", "(1 - mask) * -1e4 is added, and not put in place: transformers#12109"),
    ("mask fills", "fill-scaled", "masked before the scores are scaled"),
    ("masks of models", "mask-and-causal",
        "taken for causal, whatever it is: transformers#39389, the prefix of unsloth-zoo#963's kind"),
    ("masks of models", "mask-and-causal", "is_causal is told from the first row, which is text: transformers#38295",
        "mask_that_begins_causally_is_causal", _begins_causally),
    ("masks of models", "mask-of-last-run",
        "a loop over the last run of keys alone: the first tokens leave with the window, vllm#1304's kind"),
    ("masks of models", "mask-without-gaps", "a row is taken for the range from its first to its last key"),
    ("masks of models", "mask-without-first-key-but-key-0",
        "the first key of a row is left out where its chunk or document begins"),
    ("masks of models", "mask-one-key-early",
        "the first key of a row is off by one: transformers#37414, chunks and documents"),
):
    mutant(**_fault)
_faulty_masks(forms.mask_read_as, "padding_on_the_query_axis",
    "padding masks rows, silent where Lq == Lk: hyunwoongko transformer#40",
    lambda mask, scores: mask.swapaxes(-1, -2) if mask.ndim >= 2 and mask.shape[-2] == 1
        and scores.shape[-2] == scores.shape[-1] else mask,
    diagnosis="mask-transposed")
# Let a group of four keys be attended as soon as one of them may be.
_faulty_masks(forms.mask_read_as, "mask_rounded_up_to_four_keys",
        "a tile is masked as a whole or not at all: tt-metal#41215",
    lambda mask, scores: np.repeat(np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0,
        -mask.shape[-1] % 4)]).reshape(*mask.shape[:-1], -1, 4).any(axis=-1), 4, axis=-1)[..., : mask.shape[-1]])
_faulty_masks(_filled_with, "mask_filled_with_minus_1e_minus_9", "a typo for -1e9: RibonanzaNet#5",
    lambda biased: -1e-09)
# Only where a mask and causality come together: alone, either is a plain -inf in the reference this is taken from.
_faulty_masks(forms.filled, "mask_times_minus_infinity",
        "(1 - mask) * -inf = NaN at kept slots: onnx 1.19.1's reference",
    lambda biased, allowed, masks: np.where(allowed, biased * (np.nan if masks["mask"] is not None
        and masks["is_causal"] else 1), -np.inf).astype(biased.dtype), diagnosis="fill-minus-infinity")
_faulty_masks(None, "mask_after_softmax", "weights * mask, not renormalised: vigg_ribonanza#1",
    forms.filled(lambda biased, allowed, masks: biased) | forms.weights_where_allowed(0.0),
    diagnosis=("weights-not-renormalised", "mask-ignored", "causality-ignored"))
_faulty_masks(forms.weights_where_allowed, "masked_weights_leak_1e_10", "a masked weight is tiny, not zero",
    1e-10, at="weights", dtypes=WIDE)
# where the length is 0 there is nothing to take the mean of
_faulty_empty_rows(forms.in_attention, "uniform_rows_within_the_length",
    "the mean of the keys that are no padding, not of all keys",
    lambda call: forms.rows_read_as(lambda logits, seen: np.where(_is_filled(logits, seen) & ~forms.allowed_keys(logits,
        {"key_lengths": call.key_lengths}), -np.inf, seen)) if call.empty_rows == "uniform" else {},
    diagnosis="empty-rows-zero")
_faulty_empty_rows(_uniform_rows, "uniform_rows_up_to_the_query",
    "the mean of the keys up to the query's own position, as if causality still held",
    lambda logits, seen: np.where(_is_filled(logits, seen) & ~forms.allowed_keys(logits, {"is_causal": True}), -np.inf,
        seen))
_faulty_empty_rows(forms.in_attention, "uniform_rows_weigh_what_was_masked",
    "a number subtracted from masked scores, not put in their place: keras.layers.Attention in float64",
    lambda call: _uniform_rows(lambda logits, seen: np.where(_is_filled(logits, seen), call.scores, seen)),
    diagnosis=("empty-rows-unmasked", "empty-rows-zero"))
_faulty_empty_rows(_uniform_rows, "uniform_rows_take_the_first_key",
    "a row's maximum that starts at the first score: the whole weight on one key",
    lambda logits, seen: np.where(_is_filled(logits, seen) & ~(np.arange(logits.shape[-1]) == 0), -np.inf, seen))
_faulty_empty_rows(forms.rows_read_as, "nan_rows_spread_through_the_head",
    "NaN in every query of a head in which one has no key: pytorch#160064",
    lambda logits, seen: np.where(np.isnan(seen).any(axis=(-2, -1), keepdims=True), np.nan, seen))
_faulty_empty_rows(forms.value_weights_read_as, "uniform_rows_give_values_no_gradient",
    "the backward pass skips a row whose keys are all masked, though the forward pass averaged its values",
    lambda call, weights: np.where(_is_filled(call.masked, call.logits), np.zeros((), weights.dtype), weights),
    at="grad_value", diagnosis="empty-rows-zero")
# fmt: on


_faulty_fill = partial(mutant, "mask fills", at="masked")


def _placed(place: Callable[[Array, Array, Array, forms.Masks], Array]) -> Steps:
    """Put a fill in place in another way, where there is one: ``place(biased, allowed, fill, masks)``."""

    def fill(biased: Array, allowed: Array, masks: forms.Masks) -> Array:
        if masks["mask_fill"] is None:
            return np.where(allowed, biased, np.asarray(-np.inf, biased.dtype))
        return place(biased, allowed, np.asarray(masks["mask_fill"], biased.dtype), masks)

    return forms.filled(fill)


@_faulty_fill(_placed)
def fills_that_add_up(biased: Array, allowed: Array, fill: Array, masks: forms.Masks) -> Array:
    """mask and causality are filled one after the other, and the fills add up: transformers#31035"""
    if masks["mask"] is None or not masks["is_causal"]:
        return np.where(allowed, biased, fill)
    by_mask = forms.allowed_keys(biased, {**forms.NO_RULES, "mask": masks["mask"]})
    by_rules = forms.allowed_keys(biased, {**masks, "mask": None})
    return np.where(by_mask | by_rules, np.where(allowed, biased, fill), fill + fill)


def _fill_of_call(change: Callable[[Call, float], float]) -> Steps:
    """Take the fill of attention for another one."""

    def steps(call: Call) -> Steps:
        if call.mask_fill is None:
            return {}
        fill = change(call, call.mask_fill)
        return {"mask_scores": lambda scores, **given: backend.mask_scores(scores, **{**given, "mask_fill": fill})}

    return forms.in_attention(steps)


def _where_filled(steps_of: Callable[[Call, Array], Steps]) -> Steps:
    """Replace steps of attention where fills stand beside scores: ``steps_of(call, kept)``."""
    return forms.in_attention(lambda call: {} if call.mask_fill is None else steps_of(call, forms.allowed_in(call)))


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_fill(_placed, "fill_where_the_mask_says_yes", "masked_fill(mask == 1), where 1 says yes: unturtle#56",
    lambda biased, allowed, fill, masks: np.where(allowed, fill, biased), diagnosis="mask-inverted")
_faulty_fill(_placed, "fill_left_out_of_rows_without_a_key",
    "a row without a key is minus infinity: what a guard against empty rows leaves",
    lambda biased, allowed, fill, masks: np.where(~allowed.any(axis=-1, keepdims=True), np.asarray(-np.inf,
        biased.dtype), np.where(allowed, biased, fill)))
_faulty_fill(_placed, "fill_as_an_upper_limit", "the lesser of score and fill: a fill above a score has no effect",
    lambda biased, allowed, fill, masks: np.where(allowed, biased, np.minimum(biased, fill)))
_faulty_fill(_placed, "fill_for_the_mask_alone",
    "the fill is for the mask alone: causality and lengths are minus infinity",
    lambda biased, allowed, fill, masks: np.where(forms.allowed_keys(biased, {**masks, "mask": None}), np.where(allowed,
        biased, fill), np.asarray(-np.inf, biased.dtype)))
_faulty_fill(_placed, "fill_in_front_of_the_bias", "the bias comes behind the mask, and moves the fill",
    lambda biased, allowed, fill, masks: np.where(allowed, biased, fill + np.asarray(0 if masks["bias"] is None
        else masks["bias"], biased.dtype)))
_faulty_fill(_fill_of_call, "fill_held_back_by_the_softcap",
    "the softcap comes behind the mask, and holds the fill back: onnx#7865",
    lambda call, fill: fill if call.softcap is None else float(backend._cap(np.asarray(fill), call.softcap)))
_faulty_fill("multi_head_attention", "fill_lost_between_projections",
    "the layer does not hand the fill on to its attention: its heads mask by minus infinity",
    lambda *arrays, mask_fill=None, **given: backend.multi_head_attention(*arrays, **given),
        diagnosis="fill-minus-infinity")
mutant("mask fills", "attention_gradients._allowed_keys", "gradient_through_a_fill",
    "the gradient goes through a score that the fill took the place of: a mask that is added",
    lambda *_, **__: None, at="grad_query", diagnosis="gradient-through-fill")
mutant("mask fills", forms.value_weights_read_as, "no_gradient_of_values_behind_a_fill",
    "values behind a mask get no gradient, though a row of fills alone is their mean",
    lambda call, weights: weights if call.mask_fill is None else np.where(forms.allowed_in(call), weights, 0),
    at="grad_value", diagnosis="value-gradient-without-fills")
# fmt: on


_TILE = 64
_SMALL_TILE = 4


def _rows_read_as(change: Callable[[Array, Array, Array, int], Array]) -> Steps:
    """Take a mask that has rows for another one, ``change(rows, causal, key, past)``.

    ``rows`` are the mask of every row and key, (..., Lq, T), ``causal`` who sees whom if the last query stands at the
    last key, (Lq, T), ``key`` the numbers of the keys, and ``past`` where the first query then stands.
    """

    def read(mask: Array, scores: Array) -> Array:
        queries, keys = scores.shape[-2:]
        if mask.ndim < 2 or mask.shape[-2] == 1:
            return mask
        rows = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, (queries, keys)))
        past = keys - queries
        return np.asarray(change(rows, np.tri(queries, keys, past, dtype=bool), np.arange(keys), past))

    return forms.mask_read_as(read)


_faulty = partial(mutant, "masks of models", _rows_read_as, at="masked")


def _tiles(mask: Array, tile: int) -> Array:
    """Return the mask in tiles, (..., tiles of queries, tile, tiles of keys, tile), with false behind its ends."""
    queries, keys = mask.shape[-2:]
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 2) + [(0, -queries % tile), (0, -keys % tile)])
    tiles: Array = padded.reshape(*mask.shape[:-2], -(-queries // tile), tile, -(-keys // tile), tile)
    return tiles


def _row_of_tiles(mask: Array, tile: int, row: int) -> Array:
    """Return the tiles of which a row sees anything, (..., tiles of queries, tiles of keys)."""
    return np.asarray(_tiles(mask, tile)[..., row, :, :].any(axis=-1))


def _table(mask: Array, tile: int) -> Array:
    """Return the tiles of which anything is seen, (..., tiles of queries, tiles of keys)."""
    return np.asarray(_tiles(mask, tile).any(axis=(-1, -3)))


def _of_tiles(table: Array, tile: int, mask: Array) -> Array:
    """Return a table of tiles, (..., tiles of queries, tiles of keys), as a mask of the shape of another."""
    queries, keys = mask.shape[-2:]
    return np.asarray(table.repeat(tile, axis=-2).repeat(tile, axis=-1)[..., :queries, :keys])


def _tiles_ahead(rows: Array, past: int, tile: int) -> Array:
    """Return how many tiles each key lies ahead of each query, (Lq, T)."""
    queries, keys = rows.shape[-2:]
    ahead: Array = np.arange(keys) // tile - (np.arange(queries)[:, np.newaxis] + past) // tile
    return ahead


def _end_of_prefix(rows: Array) -> Array:
    """Return the last key that the first row sees, -1 where it sees none, (..., 1, 1)."""
    first = rows[..., :1, :]
    return np.asarray(np.where(first, np.arange(rows.shape[-1]), -1).max(axis=-1, keepdims=True, initial=-1))


@_faulty(defect="images see each other: any two tokens of images, transformers#38053")
def images_see_each_other(rows: Array, causal: Array, key: Array, past: int) -> Array:
    ahead = np.asarray(rows & ~causal)
    of_keys = np.asarray(ahead.any(axis=-2, keepdims=True))  # seen by tokens before them, (..., 1, T)
    of_queries = ahead.any(axis=-1, keepdims=True)
    of_queries = np.logical_or(of_queries, of_keys[..., past:].swapaxes(-1, -2)) if past >= 0 else of_queries
    return np.asarray(rows | (of_queries & of_keys))


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty("tiles_below_the_diagonal_taken_for_open",
    "a tile below the diagonal is taken for open: FastDeploy#3514, where trees have gaps there",
    lambda rows, causal, key, past: rows | (_tiles_ahead(rows, past, _SMALL_TILE) < 0))
_faulty("tiles_above_the_diagonal_skipped", "tiles above the diagonal are skipped, whatever the mask says there",
    lambda rows, causal, key, past: rows & (_tiles_ahead(rows, past, _SMALL_TILE) <= 0))
_faulty("tiles_of_64_above_the_diagonal_skipped", "tiles of 64 above the diagonal are skipped, whatever is seen there",
    lambda rows, causal, key, past: rows & (_tiles_ahead(rows, past, _TILE) <= 0), dtypes=KERNELS)
_faulty("tiles_skipped_by_their_first_row", "a tile is skipped if its first row sees nothing in it",
    lambda rows, causal, key, past: rows & _of_tiles(_row_of_tiles(rows, _SMALL_TILE, 0), _SMALL_TILE, rows))
_faulty("tiles_of_64_taken_for_open_by_their_ends", "a tile of 64 is taken for open if its first and last rows are",
    lambda rows, causal, key, past: rows | _of_tiles(_row_of_tiles(rows, _TILE, 0) & _row_of_tiles(rows, _TILE, -1),
        _TILE, rows), dtypes=KERNELS)
_faulty("tiles_skipped_by_the_first_of_the_batch",
    "which tiles are skipped is told from the first of the batch: attention-gym#62's kind",
    lambda rows, causal, key, past: rows if rows.ndim < 4 else rows & _of_tiles(_table(rows[:1], _SMALL_TILE),
        _SMALL_TILE, rows))
_faulty("tiles_skipped_by_the_first_head", "which tiles are skipped is told from the first head",
    lambda rows, causal, key, past: rows if rows.ndim < 4 else rows & _of_tiles(_table(rows[:, :1], _SMALL_TILE),
        _SMALL_TILE, rows))
_faulty("table_of_tiles_transposed", "a square table of tiles, read by columns: pytorch#141126's kind",
    lambda rows, causal, key, past: rows & _of_tiles(table.swapaxes(-1, -2), _SMALL_TILE, rows)
        if (table := _table(rows, _SMALL_TILE)).shape[-1] == table.shape[-2] else rows)
_faulty("tiles_of_64_read_as_128", "a table of tiles of 64 read as one of 128: bd3lms#23",
    lambda rows, causal, key, past: rows & _of_tiles(_table(rows, _TILE), 2 * _TILE, rows)
        if min(rows.shape[-2:]) > _TILE else rows, dtypes=KERNELS)
_faulty("prefix_one_key_too_short", "the last key of a prefix is left out: j < n - 1",
    lambda rows, causal, key, past: rows & ((key != _end_of_prefix(rows)) | causal))
_faulty("prefix_one_key_too_long", "one key behind a prefix is part of it: j <= n",
    lambda rows, causal, key, past: rows | ((key == _end_of_prefix(rows) + 1) & rows.any(axis=-1, keepdims=True)))
_faulty("keys_ahead_seen_by_all", "a key that any earlier query sees is seen by all: text sees the image behind it",
    lambda rows, causal, key, past: rows | (rows & ~causal).any(axis=-2, keepdims=True))
_faulty("mask_counted_from_the_first_new_key", "positions that do not count the past: transformers#37351's chunks",
    lambda rows, causal, key, past: np.roll(rows, -max(past, 0), axis=-1))
_faulty("tree_taken_for_a_chain", "a tree taken for a chain, so that siblings are seen: vllm#20401's kind",
    lambda rows, causal, key, past: rows | (causal & (key >= past)) if past >= 0 else rows)
_faulty("ancestors_dropped", "the diagonal of a tree alone, without the ancestors of a node",
    lambda rows, causal, key, past: rows & ((key < past) | (key == past + np.arange(len(causal))[:, np.newaxis]))
        if past > 0 else rows)
_faulty("committed_keys_masked_causally", "what is committed is masked as the new tokens are, from the first key on",
    lambda rows, causal, key, past: rows & ((key >= past) | forms.causal_keys(*causal.shape)) if past > 0 else rows)
mutant("masks of models", forms.mask_read_as, "mask_of_the_first_key_of_a_tile",
    "a document goes on in the next one for a tile: the mask is read once for a tile's keys, its first",
    lambda mask, scores: mask if mask.shape[-1] == 1 else np.asarray(mask[...,
        np.arange(mask.shape[-1]) // _SMALL_TILE * _SMALL_TILE]), at="masked")
control(_where_filled, "fills_added_up_apart",
    "the sum of exponentials is that of the scores that are kept and that of the fills",
    lambda call, kept: {"_softmax_with_sinks": within(backend._softmax_with_sinks, _row_sum=lambda exponentials:
        np.asarray(backend._row_sum(np.where(kept, exponentials, 0)) + backend._row_sum(np.where(kept, 0,
        exponentials))))})
control(_where_filled, "values_behind_fills_averaged_apart", "the values behind fills are averaged apart, and added",
    lambda call, kept: {"_weighted_sum": lambda weights, value: np.asarray(sum(backend._weighted_sum(np.where(each,
        weights,
        0), value) for each in (kept, ~kept)))})
# fmt: on
