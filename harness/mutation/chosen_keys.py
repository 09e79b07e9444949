"""Faults of keys that are chosen by index: what -1 names, whose indices are read, and where a block ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import Stages, Window
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, change_argument, change_call_arguments, pad_last_axis
from attncheck.mutation.mutant import (
    FAST_PATH_DTYPES,
    StepReplacements,
    rebind_globals,
    register_control,
    register_fault,
)
from attncheck.reading.lowering import name_keys_once

_register_index_fault = partial(register_fault, "chosen keys", stage="log_sum_exp")
_register_result_fault = partial(register_fault, "chosen keys", "sparse_attention")
_change_indices = partial(change_argument, "sparse_attention", "key_indices")
_change_call = partial(change_call_arguments, "sparse_attention")


def _change_rules(change: Callable[..., Array]) -> StepReplacements:
    """Change which of the named keys are allowed: ``change(allowed, positions, places, is_causal)``.

    ``places`` are the positions of queries, (B, 1, Lq, 1) or (Lq, 1).
    """

    def allowed_positions(
        positions: Array, is_causal: bool | None, window: Window | None, lengths: Array | None, offsets: Array | None
    ) -> Array:
        allowed = backend._allowed_positions(positions, is_causal, window, lengths, offsets)
        places = np.arange(positions.shape[-2])[:, np.newaxis]
        if offsets is not None:
            places = places + offsets[:, np.newaxis, np.newaxis, np.newaxis]
        return change(allowed, positions, places, bool(is_causal))

    return {"_allowed_positions": allowed_positions}


@_register_result_fault(stage="log_sum_exp", diagnosis=("empty-rows-nan",))
def nan_behind_sixteen_without_a_key(**call: Any) -> Stages:
    """the first 16 indices name no key, and -inf minus -inf stays NaN in every later sum: vllm#48364"""
    stages = backend.sparse_attention(**call)
    (batch, heads, queries, _), indices = call["query"].shape, call["key_indices"]
    is_dead = np.broadcast_to((indices[..., :16] < 0).all(axis=-1), (batch, indices.shape[1], queries))
    rows = np.repeat(is_dead, heads // is_dead.shape[1], axis=1)
    nan = call["query"].dtype.type(np.nan)
    return {
        "log_sum_exp": np.where(rows, nan, stages["log_sum_exp"]),
        "output": np.where(rows[..., np.newaxis], nan, stages["output"]),
    }


@_register_result_fault(stage="log_sum_exp")
def cut_block_filled_with_zeros(**call: Any) -> Stages:
    """keys behind the last one are zeros, whose score of 0 counts: flashinfer#5090"""
    missing = -call["key"].shape[2] % (call.get("block_size") or 1)
    longer = {name: np.pad(call[name], ((0, 0), (0, 0), (0, missing), (0, 0))) for name in ("key", "value") if missing}
    return backend.sparse_attention(**{**call, **longer})


@_register_result_fault(stage="output")
def values_not_gathered(**call: Any) -> Stages:
    """structure: the keys are gathered, and values are read at the places of indices"""
    names = iter(("key", "value"))

    def gather(rows: Array, positions: Array) -> Array:
        places = np.arange(positions.shape[-1])
        in_order = np.where((positions >= 0) & (places < rows.shape[2]), places, -1)
        return backend._gather_keys(rows, positions if next(names) == "key" else in_order)

    stages: Stages = rebind_globals(backend.sparse_attention, _gather_keys=gather)(**call)
    return stages


@_register_result_fault(stage="output")
def last_head_of_an_odd_group_unwritten(**call: Any) -> Stages:
    """half of a group's heads go to each vector unit, and an odd one to none: tile-ai/tilelang-ascend#1741"""
    stages = backend.sparse_attention(**call)
    heads = call["query"].shape[1]
    group = heads // call["key"].shape[1]
    is_lost = (np.arange(heads) % group == group - 1) & (group > 1) & (group % 2 == 1)
    return {**stages, "output": np.where(is_lost[:, np.newaxis, np.newaxis], 0, stages["output"])}


@register_control("sparse_attention", why="all keys are scored, under a mask of those that are named")
def chosen_keys_under_a_mask(**call: Any) -> Stages:
    block, keys = call.pop("block_size", 1), call["key"].shape[2]
    named = (call.pop("key_indices")[..., np.newaxis] == np.arange(keys) // block).any(axis=-2)
    mask = named if named.shape[1] == 1 else np.repeat(named, call["query"].shape[1] // named.shape[1], axis=1)
    stages = backend.attention(**call, mask=mask)
    return {name: stages[name] for name in ("log_sum_exp", "output")}


@register_control("sparse_attention", why="keys and indices are repeated for every query head, in another order")
def choice_repeated_for_every_head(**call: Any) -> Stages:
    heads, indices = call["query"].shape[1], call["key_indices"]
    repeated = {name: np.repeat(call[name], heads // call[name].shape[1], axis=1) for name in ("key", "value")}
    of_heads = np.repeat(np.flip(indices, axis=-1), heads // indices.shape[1], axis=1)
    return backend.sparse_attention(**{**call, **repeated, "key_indices": of_heads})


# Rows, laid out by hand: the reading that is computed, and the defect in the wild.
# fmt: off
for _fault in forms.faults_from_readings(
    ("chosen keys", "indices-none-as-last",
        "-1 passes a check of the upper end, and names the last key: PaddlePaddle/PaddleFleet#1038"),
    ("chosen keys", "indices-none-as-first", "-1 is clamped to 0 for the mask, too: a safe read taken for a choice"),
    ("chosen keys", "indices-none-hides-first",
        "-1 is clamped to 0, and scattered over the 0 that was chosen: NVIDIA-NeMo/Automodel#2144"),
    ("chosen keys", "indices-none-as-end",
        "a row has as many indices as stand in front of the first -1: hw-native-sys/pypto-lib#523's kind"),
    ("chosen keys", "indices-one-too-high",
        "an offset is added to indices that have it: sgl-project/sglang#12583's kind"),
    ("chosen keys", "indices-one-too-low", "indices are taken to count from 1"),
    ("chosen keys", "indices-without-last", "the loop over indices ends one early"),
    ("chosen keys", "indices-without-first", "the loop over indices starts at 1"),
    ("chosen keys", "indices-as-places", "the keys are not gathered: block tables ignored, as in paged caches"),
    ("chosen keys", "indices-as-run",
        "indices are taken for a range that begins with the first: flashinfer#5083's flag for such rows"),
    ("chosen keys", "indices-ignored", "structure: attention is dense below a length, and above it, too"),
    ("chosen keys", "block-of-first-key", "the position of a block is that of its first key: no loop inside of it"),
    ("chosen keys", "block-cut-left-out", "structure: Lk // n blocks, without the one that is cut off"),
    stage="log_sum_exp",
):
    register_fault(**_fault)
# What is named twice here counts twice, as keys do that a kernel gathers.
_register_index_fault("_positions_of_indices", "none_gathered_from_the_end",
    "a negative position counts from the end, once for each -1: PaddlePaddle/PaddleFleet#1054",
    lambda key_indices, block_size, keys: np.where(key_indices[..., :, np.newaxis] < 0, max(keys - 1, -1),
        backend._positions_of_indices(key_indices, block_size, keys).reshape(*key_indices.shape, block_size)).reshape(
        *key_indices.shape[:-1], key_indices.shape[-1] * block_size), diagnosis="indices-minus-one-repeats-last")
_register_index_fault("_positions_of_indices", "none_gathered_as_key_0",
    "-1 is clamped to 0 for a safe read, and never masked: hw-native-sys/pypto-lib#494's kind",
    lambda key_indices, block_size, keys: backend._positions_of_indices(
        np.maximum(key_indices, 0 if keys else -1), block_size, keys), diagnosis="indices-minus-one-repeats-first")
_register_index_fault("_positions_of_indices", "padding_counted_from_the_end",
    "as many indices count as are valid, wherever -1 stands: vllm-project/vllm-gaudi#1777",
    lambda key_indices, block_size, keys: backend._positions_of_indices(np.where(
        np.arange(key_indices.shape[-1]) < (key_indices >= 0).sum(axis=-1, keepdims=True), key_indices, -1),
        block_size, keys), diagnosis="indices-none-as-end")
_register_index_fault("_positions_of_indices", "blocks_end_one_key_late", "j n <= position <= (j + 1) n",
    lambda key_indices, block_size, keys: backend._positions_of_indices(key_indices, block_size, keys)
        if block_size == 1 else np.concatenate([backend._positions_of_indices(key_indices, block_size, keys),
        np.where((key_indices >= 0) & ((key_indices + 1) * block_size < keys), (key_indices + 1) * block_size, -1)],
        axis=-1), diagnosis="block-one-key-too-long")
_register_index_fault("_positions_of_indices", "blocks_end_one_key_early", "the last key of each block is not seen",
    lambda key_indices, block_size, keys: backend._positions_of_indices(key_indices, block_size, keys)
        if block_size == 1 else np.where(np.tile(np.arange(block_size) < block_size - 1, key_indices.shape[-1]),
        backend._positions_of_indices(key_indices, block_size, keys), -1), diagnosis="block-one-key-too-short")
_register_index_fault(_change_indices, "indices_behind_whole_tiles_of_sixteen_lost",
    "structure: a count of indices that is no multiple of a tile has no loop for the rest",
    lambda indices: indices if indices.shape[-1] < 16 else indices[..., : indices.shape[-1] // 16 * 16])
_register_index_fault(_change_indices, "indices_beyond_sixteen_lost",
    "structure: a buffer of indices is as wide as another layer's",
    lambda indices: indices[..., :16])
_register_index_fault("_positions_of_indices", "positions_in_16_bits", "a position is a short: ATOM#702's kind",
    lambda key_indices, block_size, keys: np.where(
        (positions := backend._positions_of_indices(key_indices, block_size, keys)) < 0, -1, positions % 2**16),
    dtypes=FAST_PATH_DTYPES)
_register_index_fault("_positions_of_indices", "positions_in_8_bits", "a position is a byte: ATOM#702's kind",
    lambda key_indices, block_size, keys: np.where(
        (positions := backend._positions_of_indices(key_indices, block_size, keys)) < 0, -1, positions % 2**8),
    dtypes=FAST_PATH_DTYPES)
_register_index_fault(_change_call, "choice_of_the_first_query_of_a_tile",
    "sixteen queries of a tile share the choice of its first: block-sparse attention of query blocks",
    lambda call: {"key_indices": call["key_indices"].take(np.arange(call["key_indices"].shape[2]) // 16 * 16, axis=2)},
    diagnosis="key-indices-of-first-query")
_register_index_fault(_change_call, "own_block_added",
    "the block of a query's own position is always seen, as MoBA's gate has it, whatever is chosen",
    lambda call: {} if not call.get("is_causal") or call.get("query_offsets") is not None else {
        "key_indices": name_keys_once(np.concatenate([np.broadcast_to(call["key_indices"], (
            *call["key_indices"].shape[:2], call["query"].shape[2], call["key_indices"].shape[3])), np.broadcast_to(
            np.where((rows := np.arange(call["query"].shape[2])) < call["key"].shape[2], rows, -1)[:, np.newaxis]
            // (call.get("block_size") or 1), (*call["key_indices"].shape[:2], call["query"].shape[2], 1))], axis=-1),
            call["key"].shape[2])})
_register_index_fault(partial(change_argument, "sparse_attention", "block_size"), "blocks_of_sixty_four",
    "the block size is a constant of the kernel: fla-org/native-sparse-attention#26's kind", lambda size: 64,
    diagnosis="block-size-of-64")
_register_index_fault(_change_rules, "chunks_skipped_by_their_place",
    "the place of an index is compared with a position, and chunks of four are skipped: flagos-ai/FlagGems#2184",
    lambda allowed, positions, places, is_causal: allowed & (
        np.arange(positions.shape[-1]) // 4 * 4 <= places) if is_causal else allowed)
_register_index_fault(_change_rules, "causality_inverted_behind_indices",
    "a mask function that is true where a key is forbidden: tilde-research/nsa-release#3",
    lambda allowed, positions, places, is_causal: (positions >= places) & (positions >= 0) if is_causal else allowed,
    diagnosis="causal-mirrored")
_register_index_fault(_change_call, "causality_of_whole_blocks",
    "structure: a block is seen as a whole where its first key is, so that what follows the query leaks",
    lambda call: {} if not call.get("is_causal") or call.get("query_offsets") is not None else {"is_causal": None,
        "key_indices": np.where(call["key_indices"] * (call.get("block_size") or 1) <= np.arange(
            call["query"].shape[2])[:, np.newaxis], call["key_indices"], -1)},
    diagnosis=tuple(f"causal-by-tiles-of-{size}" for size in (4, 16, 32, 64)))
_register_index_fault(_change_call, "queries_of_chosen_keys_aligned_bottom_right",
    "the last query stands at the last key: other lengths break causality, fla-org/flash-linear-attention#417",
    lambda call: {} if call.get("query_offsets") is not None or not (call.get("is_causal") or call.get("window"))
        else {"query_offsets": np.full(len(call["query"]), call["key"].shape[2] - call["query"].shape[2])},
    diagnosis="aligned-bottom-right")
_register_index_fault("sparse_attention.attention", "chosen_keys_masked_at_minus_ten_thousand",
    "what may not be seen is scored -10000, which a row without a key turns into a mean: ohdearquant/lattice#6",
    lambda query, key, value, **keywords: backend.attention(query, key, value, **keywords, mask_fill=-1e4),
    diagnosis=("empty-rows-uniform", "masked-at-minus-1e4", "fill-of-minus-1e4"))
_register_index_fault("_gather_keys", "keys_of_the_first_batch_entry_gathered",
    "indices count within a request, and its offset is not added: sgl-project/sglang#12583's kind",
    lambda rows, positions: backend._gather_keys(np.broadcast_to(rows[:1], rows.shape), positions))
_register_index_fault("_gather_keys", "keys_of_the_first_head_gathered",
    "every group of heads reads the cache of the first: flagos-ai/FlagGems#2184",
    lambda rows, positions: backend._gather_keys(np.broadcast_to(rows[:, :1], rows.shape), positions),
    diagnosis="groups-of-first-head")
_register_result_fault("chosen_from_nothing_is_plus_infinity",
    "a query without a key has a log_sum_exp of plus infinity, as FlashMLA returns it: NVIDIA/Megatron-LM#7434",
    lambda **call: (stages := backend.sparse_attention(**call)) | {"log_sum_exp": np.where(
        np.isneginf(stages["log_sum_exp"]), np.inf, stages["log_sum_exp"]).astype(stages["log_sum_exp"].dtype)},
    stage="log_sum_exp")
register_control(_change_indices, "indices_in_ascending_order", "indices are sorted first, those of -1 in front",
    lambda indices: np.sort(indices, axis=-1))
register_control(_change_indices, "indices_in_descending_order", "indices are sorted first, those of -1 at the end",
    lambda indices: -np.sort(-indices, axis=-1))
register_control(_change_indices, "indices_padded_to_sixty_four", "indices are padded with -1 to a whole tile",
    lambda indices: pad_last_axis(indices, 64, -1))
register_control(_change_call, "blocks_as_indices_of_keys", "indices of blocks become those of keys, from the last on",
    lambda call: {"key_indices": -np.sort(-backend._positions_of_indices(call["key_indices"],
        call.get("block_size") or 1, call["key"].shape[2]), axis=-1), "block_size": None})
# fmt: on
