"""Faults of a past, in front of projections too, of packed sequences, and of paged caches: limits, pages, lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import Stages, Window
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, call_read_as
from attncheck.mutation.mutant import KERNELS, Steps, equivalent, mutant

_faulty_lengths = partial(mutant, "lengths", at="masked")
_faulty_caches = partial(mutant, "caches", at="masked")


@equivalent(
    forms.lengths_read_as,
    defect="a clamp on lengths that are too long",
    proof="j < length is asked for 0 <= j < T alone: every length of T or more allows all of them, every length of 0 "
    "or less none.",
)
def key_lengths_clipped_to_the_keys(lengths: Array, keys: int) -> Array:
    return np.clip(lengths, 0, keys)


def _past_read_as(function: str, change: Callable[[str, Array, Mapping[str, Any]], Array]) -> Steps:
    """Take the past of a function for another one: ``change(name, past, call)`` for key and value."""

    def changed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        given = [name for name in ("key", "value") if call.get("past_key") is not None]
        return {f"past_{name}": change(name, call[f"past_{name}"], call) for name in given}

    return call_read_as(function, changed)


def _projected_again(name: str, past: Array, call: Mapping[str, Any]) -> Array:
    batch, heads, length, width = past.shape
    if call[f"{name}_weight"].shape[0] != heads * width:
        return past
    merged = past.swapaxes(1, 2).reshape(batch, length, heads * width)
    return backend._split_heads(backend._project(merged, call[f"{name}_weight"], None), heads)


_faulty_projected = partial(mutant, "projected caches", partial(_past_read_as, "multi_head_attention"), at="raw_scores")
_faulty_sequences = partial(mutant, "packed sequences", at="log_sum_exp")
_faulty_pages = partial(mutant, "paged caches", at="log_sum_exp")
Limits = tuple[Array, Array, Array | None]
Parts = list[tuple[slice, slice, int]]


def _limits_read_as(change: Callable[[Array, Array, Array | None], Limits]) -> Steps:
    """Take the limits and lengths for other ones."""
    return {"packed_attention._sequences": lambda *limits: backend._sequences(*change(*limits))}


def _empty_ones_skipped(queries: Array, keys: Array, lengths: Array | None) -> Limits:
    own = queries[np.append(np.diff(queries) > 0, True)]
    return own, np.append(keys[: len(own) - 1], keys[-1]), None if lengths is None else lengths[: len(own) - 1]


def _seen_from_the_top_left(queries: int, keys: int, is_causal: bool, window: Window | None) -> Any:
    mask = backend._seen_from_the_end(keys, keys, is_causal, window)
    if mask is None:
        return None
    rows = np.ones((1, 1, queries, keys), np.bool_)
    rows[..., : min(queries, keys), :] = mask[..., : min(queries, keys), :]
    left = (window or (None, None))[0]
    return rows if left is None else rows & (np.arange(keys) - np.arange(queries)[:, np.newaxis] >= -left)


@mutant("packed sequences", "packed_attention_gradients", at="grad_sinks")
def sink_gradients_overwritten(**given: Any) -> Stages:
    """gradients of sinks of the last sequence alone, the others overwritten: nki-samples#106's kind"""
    found = backend.packed_attention_gradients(**given)
    if given.get("sinks") is None:
        return found
    queries, keys, lengths = given["cu_seqlens_q"], given["cu_seqlens_k"], given.get("key_lengths")
    last = {name: given[name][:, :, queries[-2] :] for name in ("query", "grad_output")}
    last |= {name: given[name][:, :, keys[-2] :] for name in ("key", "value")}
    last |= {"cu_seqlens_q": queries[-2:] - queries[-2], "cu_seqlens_k": keys[-2:] - keys[-2]}
    last["key_lengths"] = None if lengths is None else lengths[-1:]
    return {**found, "grad_sinks": backend.packed_attention_gradients(**{**given, **last})["grad_sinks"]}


@mutant("paged caches", "paged_attention", at="output")
def unused_slots_are_multiplied_by_zero(
    query: Array, key_pages: Array, value_pages: Array, block_table: Array, key_lengths: Array, **options: Any
) -> Stages:
    """unused slots are masked, not left out, and 0 times NaN is NaN: vllm#42494"""
    parts = []
    is_causal, window = options.pop("is_causal", False), options.pop("window", None)
    for own, pages, used in zip(query, block_table, key_lengths, strict=True):
        key, value = backend._read(key_pages, pages), backend._read(value_pages, pages)
        mask = np.zeros((1, 1, own.shape[-2], key.shape[-2]), np.bool_)
        seen = backend._seen_from_the_end(own.shape[-2], int(used), is_causal, window)
        mask[..., :used] = True if seen is None else seen
        parts.append(backend.attention(own[np.newaxis], key, value, mask=mask, **options))
    return {name: np.concatenate([part[name] for part in parts]) for name in ("log_sum_exp", "output")}


@equivalent(
    "packed_attention._sequences",
    defect="sequences without a query are left out, of queries, keys and lengths alike",
    proof="what has no query has no row in any result",
)
def sequences_without_queries_left_out(cu_seqlens_q: Array, cu_seqlens_k: Array, key_lengths: Array | None) -> Parts:
    parts = backend._sequences(cu_seqlens_q, cu_seqlens_k, key_lengths)
    return [part for part in parts if part[0].start < part[0].stop]


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
for _fault in forms.misread(
    ("lengths", "key-lengths-of-heads", "one length per head where B == H: lighthouse#77's kind"),
    ("lengths", "key-lengths-ignored", "the argument has no effect: jax#23349"),
    ("lengths", "key-lengths-ignored", "only one of lengths and causality is used: onnxruntime#14363",
        "key_lengths_dropped_when_causal", forms.given("is_causal")),
    ("lengths", "key-lengths-ignored", "only one of lengths and mask is used: jax#23349's kind",
        "key_lengths_dropped_when_a_mask_is_given", forms.given("mask")),
    ("lengths", "mask-ignored", "only one of lengths and mask is used: onnxruntime#28379's kind",
        "mask_dropped_when_key_lengths_are_given", forms.given("key_lengths")),
    ("lengths", "key-lengths-one-too-long", "j <= length: tt-metal#41215"),
    ("lengths", "key-lengths-of-first-batch-entry",
        "one length for the whole batch: graph-transformer-pytorch#2's kind"),
    ("lengths", "key-lengths-from-the-end", "padding expected on the left"),
    ("lengths", "key-lengths-of-queries", "padding on the wrong axis: transformer#40"),
    ("lengths", "key-lengths-of-queries-too",
        "queries beyond the length of the keys get nothing: unpadding of self-attention"),
    ("lengths", "key-lengths-up-to-four", "whole groups of four keys are attended: tt-metal#41215's kind"),
    ("lengths", "key-lengths-at-least-one", "an empty entry attends to its first key"),
    ("caches", "key-lengths-of-new-keys",
        "lengths of the new keys read where those of all keys are given: jax#23349's kind, vllm#30887's kind"),
    ("caches", "window-one-key-late", "positions start at P + 1: mlx-lm#390",
        "window_moved_one_too_far_behind_a_past", forms.given("past_key")),
    ("caches", "aligned-top-left", "positions start at 0 in every step: transformers#39408's kind",
        "window_counted_from_the_first_key_behind_a_past", forms.given("past_key")),
    ("caches", "past-dropped", "only the new keys count; those of the past are zeros: transformers#30437's kind"),
    ("caches", "past-swapped", "the pair unpacked in the other order, silent where Dv == D"),
    ("caches", "past-values-dropped", "the values of the cache are not read"),
    ("caches", "mask-beside-past", "only new keys are masked, the past is always attended: onnxruntime#28379's kind"),
    ("caches", "mask-from-first-new-key", "the mask's first column meets the first new key"),
    ("caches", "bias-from-first-new-key", "ALiBi's distances start at the first new key: vllm#945's kind"),
    ("caches", "past-behind-new", "the cache joined at the wrong end"),
    ("caches", "past-without-new", "attention over the cache as it was before this step"),
    ("caches", "past-overwritten",
        "written one slot early, over the newest key of the past: tt-metal#41215's position"),
    ("caches", "past-with-a-gap", "one slot between past and new keys that nobody wrote"),
    ("caches", "past-of-first-batch-entry", "one cache for the whole batch: pytorch#191937's stride 0"),
    ("caches", "past-of-next-head", "head index off by one in the cache alone: pytorch#193893's kind"),
    ("caches", "value-one-position-late", "two write positions that have come apart",
        "values_one_step_behind_their_keys", forms.given("past_key")),
    ("projected caches", "past-viewed", "a cache of (B, H, L, D) viewed as (B, L, H, D): FuxiCTR#30's kind",
        "past_heads_taken_for_positions", forms.of_operation("multi_head_attention")),
    # The values, and not the keys: of both together nothing would show without positions.
    ("projected caches", "past-values-one-position-late",
        "a ring buffer returned as it lies, newer keys first: moshi#241", "past_in_the_order_of_a_ring",
        forms.of_operation("multi_head_attention")),
):
    mutant(**_fault)
for _fault in forms.misread(
    ("packed sequences", "limits-one-too-late", "the first key of the next document is seen: nanoVLM#204"),
    ("packed sequences", "sequences-ignored",
        "one mask over all documents: transformers#46634, open-instruct#669"),
    ("packed sequences", "key-lengths-one-too-long", "j <= length", "used_keys_one_too_many",
        forms.of_operation("packed_attention")),
    ("paged caches", "block-table-ignored", "the table has no effect: pages are read in their order"),
    ("paged caches", "block-table-transposed", "the table is read with the strides of its transpose"),
    ("paged caches", "slots-in-reverse", "slots of a page are read in reverse"),
    ("paged caches", "pages-with-heads-first", "heads and slots of a page are confused: NHD for HND"),
    ("paged caches", "key-lengths-up-to-pages", "whole pages are attended"),
    ("paged caches", "key-lengths-down-to-pages", "the last page is dropped where it is not full"),
    at="log_sum_exp",
):
    mutant(**_fault)
_faulty_lengths(forms.lengths_read_as, "key_lengths_of_the_longest_batch_entry",
    "padding up to the longest entry is attended",
    lambda lengths, keys: np.full_like(lengths, lengths.max(initial=0)), diagnosis="empty-rows-unmasked")
_faulty_lengths(forms.lengths_read_as, "key_length_of_zero_taken_for_all",
    "0 is false, so an empty entry counts as one without a length: pytorch#81077's kind",
    lambda lengths, keys: np.where(lengths == 0, keys, lengths), diagnosis="empty-rows-unmasked")
_faulty_lengths(forms.filled, "key_lengths_filled_with_minus_1e4",
    "a finite fill for padding: onnxruntime#14363, transformers#12109",
    lambda biased, allowed, masks: np.where(allowed, biased, -np.inf if masks["key_lengths"] is None
        else np.asarray(-10000.0, biased.dtype)), diagnosis=("empty-rows-uniform", "masked-at-minus-1e4"))
_faulty_caches(partial(_past_read_as, "attention"), "past_beyond_its_first_page_repeated",
    "every page of 16 keys read from the first one: tt-metal#41215's kind",
    lambda name, past, call: past[..., np.arange(past.shape[-2]) % 16, :], at="raw_scores")
_faulty_caches(forms.in_attention, "causal_mask_behind_a_past_aligned_top_left",
    "a mask recognised as causal becomes is_causal, which knows no past: transformers#30437, pytorch#108108",
    lambda call: forms.mask_read_as(lambda mask, scores: forms.causal_keys(*scores.shape[-2:]) if call.past
        and mask.shape[-1] > 1 and (mask == np.tri(scores.shape[-2], scores.shape[-1], call.past, dtype=bool)).all()
        else mask),
    diagnosis="aligned-top-left")
_faulty_projected("past_projected_again", "the whole sequence goes through the projection, silent where H D = E",
    _projected_again)
_faulty_projected("past_biased_again",
    "the bias is added behind the cache, so that it counts once more in every step",
    lambda name, past, call: past if call.get(f"{name}_bias") is None
        else np.asarray(past + call[f"{name}_bias"].reshape(past.shape[1], 1, -1)))
mutant("rotary", partial(call_read_as, "attention"), "rotary_applied_to_the_past_again",
    "keys are cached behind the rotation, and all of the cache is rotated in every step",
    lambda call: {} if call.get("rotary_cos") is None or call.get("past_key") is None
        else {"past_key": backend._rotate(call["past_key"], call["rotary_cos"], call["rotary_sin"],
            call.get("rotary_interleaved", False))}, at="rotated_key", diagnosis="rotary-of-past-again")
_faulty_sequences(_limits_read_as, "empty_sequences_of_queries_skipped",
    "empty sequences are skipped in one list alone: flash-attention#2562's kind", _empty_ones_skipped)
_faulty_sequences("packed_attention._seen_from_the_end", "packed_causality_aligned_top_left",
    "the other corner in each document: flash-attention before 2.1",
    _seen_from_the_top_left, diagnosis="aligned-top-left")
_faulty_sequences(_limits_read_as, "limits_of_queries_taken_for_keys",
    "cu_seqlens_q passed for cu_seqlens_k: flash-attention#1713's kind",
    lambda queries, keys, lengths: (queries, np.minimum(queries, keys[-1]), None), diagnosis="limits-of-queries")
_faulty_sequences("packed_attention._sequences", "documents_cut_at_sixteen_keys",
    "the longest document is cut at a tile: max_seqlen too small",
    lambda *limits: [(own, slice(keys.start, min(keys.stop, keys.start + 16)), 0)
        for own, keys, _ in backend._sequences(*limits)])
_faulty_sequences("packed_attention_gradients._sequences", "gradients_of_sequences_that_see_each_other",
    "no limits in the backward pass: transformers#46634's kind",
    lambda cu_seqlens_q, cu_seqlens_k, key_lengths: backend._sequences(
        cu_seqlens_q[[0, -1]], cu_seqlens_k[[0, -1]], None), at="grad_query")
_faulty_sequences("packed_attention_gradients", "key_gradients_of_the_next_sequence",
    "gradients of keys are written from the start of the pack: AReaL#1103's kind",
    lambda **given: (found := backend.packed_attention_gradients(**given)) | {
        "grad_key": np.roll(found["grad_key"], 1, axis=-2)}, at="grad_key")
_faulty_pages("_read", "last_page_is_the_one_before",
    "a stale page: vllm#47042, the last page of a sequence is the one before it",
    lambda pages, table: backend._read(pages, np.append(table[:-1], table[-2:][:1])))
_faulty_pages("_read", "large_pages_read_by_one_tile",
    "slots beyond 128 of a page are those of its first tile: flashinfer#4347",
    lambda pages, table: backend._read(pages[:, np.arange(pages.shape[1]) % 128], table), dtypes=KERNELS)
_faulty_pages("paged_attention._seen_from_the_end", "paged_causality_aligned_top_left",
    "the other corner behind a cache", _seen_from_the_top_left, diagnosis="aligned-top-left")
# fmt: on
