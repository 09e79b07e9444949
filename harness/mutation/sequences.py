"""Faults of packed sequences and paged caches: limits, pages, lengths, and from where positions count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attncheck.backends.contract import Stages, Window
from attncheck.backends.numpy_backend import (
    _read,
    _seen_from_the_end,
    _sequences,
    attention,
    packed_attention_gradients,
    paged_attention,
)
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.mutant import KERNELS, equivalent, mutant
from attncheck.mutation.variant import Steps

_faulty_sequences = partial(mutant, "packed sequences", at="log_sum_exp")
_faulty_pages = partial(mutant, "paged caches", at="log_sum_exp")

Limits = tuple[Array, Array, Array | None]
Parts = list[tuple[slice, slice, int]]


def _limits_read_as(change: Callable[[Array, Array, Array | None], Limits]) -> Steps:
    """Take the limits and lengths for other ones."""

    def sequences(cu_seqlens_q: Array, cu_seqlens_k: Array, key_lengths: Array | None) -> Parts:
        return _sequences(*change(cu_seqlens_q, cu_seqlens_k, key_lengths))

    return {"packed_attention._sequences": sequences}


def _moved(limits: Array, steps: int) -> Array:
    """Move what stands between the ends."""
    moved = limits.copy()
    moved[1:-1] = np.clip(limits[1:-1] + steps, 0, limits[-1])
    return moved


@_faulty_sequences(
    "packed_attention._sequences",
    defect="the first key of the next document is seen: nanoVLM#204",
    diagnosis="limits-one-too-late",
)
def sequences_end_one_key_too_late(cu_seqlens_q: Array, cu_seqlens_k: Array, key_lengths: Array | None) -> Parts:
    parts = _sequences(cu_seqlens_q, cu_seqlens_k, None)
    begins = [keys.start + (number > 0) for number, (_, keys, _) in enumerate(parts)]
    ends = [keys.stop + (number < len(parts) - 1) for number, (_, keys, _) in enumerate(parts)]
    return [(own, slice(min(begin, end), end), 0) for (own, _, _), begin, end in zip(parts, begins, ends, strict=True)]


@_faulty_sequences(_limits_read_as, defect="empty sequences are skipped in one list alone: flash-attention#2562's kind")
def empty_sequences_of_queries_skipped(queries: Array, keys: Array, lengths: Array | None) -> Limits:
    kept = np.append(np.diff(queries) > 0, True)
    own = queries[kept]
    return own, np.append(keys[: len(own) - 1], keys[-1]), None if lengths is None else lengths[: len(own) - 1]


@_faulty_sequences(
    "packed_attention._seen_from_the_end",
    defect="the other corner in each document: flash-attention before 2.1",
    diagnosis="aligned-top-left",
)
def packed_causality_aligned_top_left(queries: int, keys: int, is_causal: bool, window: Window | None) -> Any:
    mask = _seen_from_the_end(keys, keys, is_causal, window)
    if mask is None:
        return None
    rows = np.ones((1, 1, queries, keys), np.bool_)
    rows[..., : min(queries, keys), :] = mask[..., : min(queries, keys), :]
    left = (window or (None, None))[0]
    behind = np.arange(keys) - np.arange(queries)[:, np.newaxis]
    return rows if left is None else rows & (behind >= -left)


_faulty_gradients = partial(mutant, "packed sequences", at="grad_query")


@mutant(
    "packed sequences",
    "packed_attention_gradients",
    at="grad_key",
    defect="gradients of keys are written from the start of the pack: AReaL#1103's kind",
)
def key_gradients_of_the_next_sequence(**given: Any) -> Stages:
    found = packed_attention_gradients(**given)
    return {**found, "grad_key": np.roll(found["grad_key"], 1, axis=-2)}


@mutant(
    "packed sequences",
    "packed_attention_gradients",
    at="grad_sinks",
    defect="gradients of sinks of the last sequence alone, the others overwritten: nki-samples#106's kind",
)
def sink_gradients_overwritten(**given: Any) -> Stages:
    found = packed_attention_gradients(**given)
    if given.get("sinks") is None:
        return found
    queries, keys, lengths = given["cu_seqlens_q"], given["cu_seqlens_k"], given.get("key_lengths")
    last = {name: given[name][:, :, queries[-2] :] for name in ("query", "grad_output")}
    last |= {name: given[name][:, :, keys[-2] :] for name in ("key", "value")}
    last |= {"cu_seqlens_q": queries[-2:] - queries[-2], "cu_seqlens_k": keys[-2:] - keys[-2]}
    last["key_lengths"] = None if lengths is None else lengths[-1:]
    return {**found, "grad_sinks": packed_attention_gradients(**{**given, **last})["grad_sinks"]}


# Pages.


@_faulty_pages(
    "paged_attention", defect="the table has no effect: pages are read in their order", diagnosis="block-table-ignored"
)
def block_table_ignored(block_table: Array, **given: Any) -> Stages:
    in_order = np.arange(block_table.size).reshape(block_table.shape) % len(given["key_pages"])
    return paged_attention(block_table=in_order, **given)


@_faulty_pages("_read", defect="a stale page: vllm#47042, the last page of a sequence is the one before it")
def last_page_is_the_one_before(pages: Array, table: Array) -> Array:
    stale = table.copy()
    stale[-1:] = table[-2:-1] if len(table) > 1 else table[-1:]
    return _read(pages, stale)


def _lengths_read_as(change: Callable[[Array, int, int], Array]) -> Steps:
    """Take the key lengths for other ones: ``change(lengths, page, most)``."""

    def paged(key_pages: Array, block_table: Array, key_lengths: Array, **given: Any) -> Stages:
        page, most = key_pages.shape[1], key_pages.shape[1] * block_table.shape[1]
        other = np.clip(change(key_lengths, page, most), 0, most)
        return paged_attention(key_pages=key_pages, block_table=block_table, key_lengths=other, **given)

    return {"paged_attention": paged}


@mutant(
    "paged caches",
    "paged_attention",
    at="output",
    defect="unused slots are masked, not left out, and 0 times NaN is NaN: vllm#42494",
)
def unused_slots_are_multiplied_by_zero(
    query: Array, key_pages: Array, value_pages: Array, block_table: Array, key_lengths: Array, **options: Any
) -> Stages:
    parts = []
    is_causal, window = options.pop("is_causal", False), options.pop("window", None)
    for own, pages, used in zip(query, block_table, key_lengths, strict=True):
        key, value = _read(key_pages, pages), _read(value_pages, pages)
        mask = np.zeros((1, 1, own.shape[-2], key.shape[-2]), np.bool_)
        seen = _seen_from_the_end(own.shape[-2], int(used), is_causal, window)
        mask[..., :used] = True if seen is None else seen
        parts.append(attention(own[np.newaxis], key, value, mask=mask, **options))
    return {name: np.concatenate([part[name] for part in parts]) for name in ("log_sum_exp", "output")}


def _sinks_dropped(function: Callable[..., Stages]) -> Callable[..., Stages]:
    def without(*arrays: Array, **options: Any) -> Stages:
        return function(*arrays, **{**options, "sinks": None})

    return without


@equivalent(
    "packed_attention._sequences",
    defect="sequences without a query are left out, of queries, keys and lengths alike",
    proof="what has no query has no row in any result",
)
def sequences_without_queries_left_out(cu_seqlens_q: Array, cu_seqlens_k: Array, key_lengths: Array | None) -> Parts:
    parts = _sequences(cu_seqlens_q, cu_seqlens_k, key_lengths)
    return [part for part in parts if part[0].start < part[0].stop]


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_sequences(_limits_read_as, "sequences_see_each_other",
    "one mask over all documents: transformers#46634, open-instruct#669",
    lambda queries, keys, lengths: (queries[[0, -1]], keys[[0, -1]], None), diagnosis="sequences-ignored")
_faulty_sequences(_limits_read_as, "limits_of_queries_taken_for_keys",
    "cu_seqlens_q passed for cu_seqlens_k: flash-attention#1713's kind",
    lambda queries, keys, lengths: (queries, np.minimum(queries, keys[-1]), None), diagnosis="limits-of-queries")
_faulty_sequences(_limits_read_as, "used_keys_ignored", "the lengths that are used have no effect: seqused_k dropped",
    lambda queries, keys, lengths: (queries, keys, None), diagnosis="key-lengths-ignored")
_faulty_sequences(_limits_read_as, "used_keys_one_too_many", "j <= length",
    lambda queries, keys, lengths: (queries, keys, None if lengths is None else np.minimum(lengths + 1, np.diff(keys))),
    diagnosis="key-lengths-one-too-long")
_faulty_sequences(_limits_read_as, "used_keys_one_too_few", "j < length - 1",
    lambda queries, keys, lengths: (queries, keys, None if lengths is None else np.maximum(lengths - 1, 0)),
    diagnosis="key-lengths-one-too-short")
_faulty_sequences("packed_attention._seen_from_the_end", "packed_window_dropped",
    "the window is dropped behind cu_seqlens: sglang#30050",
    lambda queries, keys, is_causal, window: _seen_from_the_end(queries, keys, is_causal, None))
_faulty_sequences("packed_attention._seen_from_the_end", "packed_causality_dropped",
    "causality is dropped behind cu_seqlens",
    lambda queries, keys, is_causal, window: _seen_from_the_end(queries, keys, False, window))
_faulty_sequences("packed_attention._sequences", "documents_cut_at_sixteen_keys",
    "the longest document is cut at a tile: max_seqlen too small",
    lambda cu_seqlens_q, cu_seqlens_k, key_lengths: [(own, slice(keys.start, min(keys.stop, keys.start + 16)),
        0) for own, keys, _ in _sequences(cu_seqlens_q, cu_seqlens_k, key_lengths)])
_faulty_gradients("packed_attention_gradients._sequences", "gradients_of_sequences_that_see_each_other",
    "no limits in the backward pass: transformers#46634's kind",
    lambda cu_seqlens_q, cu_seqlens_k, key_lengths: _sequences(cu_seqlens_q[[0, -1]], cu_seqlens_k[[0, -1]], None))
_faulty_gradients("packed_attention_gradients._seen_from_the_end", "packed_gradients_without_causality",
    "the backward pass drops causality behind cu_seqlens",
    lambda queries, keys, is_causal, window: _seen_from_the_end(queries, keys, False, window))
_faulty_pages("paged_attention", "block_table_of_the_first_batch_entry",
    "one block table for the whole batch: a stride of 0",
    lambda block_table, **given: paged_attention(block_table=np.broadcast_to(block_table[:1], block_table.shape),
        **given),
    diagnosis="block-table-of-first-batch-entry")
_faulty_pages("paged_attention", "block_table_transposed", "the table is read with the strides of its transpose",
    lambda block_table, **given: paged_attention(block_table=block_table.T.reshape(block_table.shape), **given),
    diagnosis="block-table-transposed")
_faulty_pages("_read", "slots_in_reverse", "slots of a page are read in reverse",
    lambda pages, table: _read(pages[:, ::-1], table), diagnosis="slots-in-reverse")
_faulty_pages("_read", "large_pages_read_by_one_tile",
    "slots beyond 128 of a page are those of its first tile: flashinfer#4347",
    lambda pages, table: _read(pages[:, np.arange(pages.shape[1]) % 128], table), dtypes=KERNELS)
_faulty_pages("_read", "pages_read_with_heads_first", "heads and slots of a page are confused: NHD for HND",
    lambda pages, table: _read(pages.reshape(len(pages), pages.shape[2], pages.shape[1], -1).swapaxes(1, 2), table),
    diagnosis="pages-with-heads-first")
_faulty_pages(_lengths_read_as, "lengths_rounded_up_to_pages", "whole pages are attended",
    lambda lengths, page, most: -(-lengths // page) * page, diagnosis="key-lengths-up-to-pages")
_faulty_pages(_lengths_read_as, "lengths_rounded_down_to_pages", "the last page is dropped where it is not full",
    lambda lengths, page, most: lengths // page * page, diagnosis="key-lengths-down-to-pages")
_faulty_pages(_lengths_read_as, "paged_lengths_one_too_long", "j <= length",
    lambda lengths, page, most: lengths + 1, diagnosis="key-lengths-one-too-long")
_faulty_pages(_lengths_read_as, "paged_lengths_one_too_short", "the newest key is not seen",
    lambda lengths, page, most: lengths - 1, diagnosis="key-lengths-one-too-short")
_faulty_pages(_lengths_read_as, "paged_lengths_of_the_first_batch_entry", "one length for all",
    lambda lengths, page, most: np.broadcast_to(lengths[:1], lengths.shape),
    diagnosis="key-lengths-of-first-batch-entry")
_faulty_pages("paged_attention._seen_from_the_end", "paged_causality_aligned_top_left",
    "the other corner behind a cache",
    lambda queries, keys, is_causal, window: packed_causality_aligned_top_left(queries, keys, is_causal, window),
    diagnosis="aligned-top-left")
_faulty_pages("paged_attention._seen_from_the_end", "paged_window_dropped",
    "the window is dropped behind a cache: sglang#30050",
    lambda queries, keys, is_causal, window: _seen_from_the_end(queries, keys, is_causal, None),
    diagnosis="window-ignored")
mutant("paged caches", None, "sinks_dropped_behind_pages", "sinks are dropped in batched decoding: sglang#30050",
    {"paged_attention.attention": _sinks_dropped(attention)}, at="log_sum_exp", diagnosis="sinks-ignored")
mutant("packed sequences", None, "sinks_dropped_behind_limits",
    "sinks are dropped behind cu_seqlens: vllm-metal#212's kind",
    {"packed_attention.attention": _sinks_dropped(attention)}, at="log_sum_exp", diagnosis="sinks-ignored")
