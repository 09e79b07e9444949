"""Faults of key lengths and of caches: what is padding, how the past is joined, and from where positions count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _seen_from_the_first_key, attention
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array, Store
from attncheck.mutation.forward_forms import in_attention
from attncheck.mutation.mask_forms import (
    Masks,
    allowed_keys,
    bias_read_as,
    causal_keys,
    dropped,
    filled,
    lengths_pattern,
    lengths_read_as,
    mask_read_as,
)
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, equivalent, mutant
from attncheck.mutation.variant import Call, Steps

_faulty_lengths = partial(mutant, "lengths", at="masked")
_faulty_caches = partial(mutant, "caches", at="masked")


def _dropped_if(unwanted: Callable[[Masks], bool]) -> Steps:
    return dropped("key_lengths", unwanted)


def _keys(scores: Array, masks: Masks) -> Array:
    """Return which keys are no padding."""
    return allowed_keys(scores, {"key_lengths": masks["key_lengths"]})


def _queries(scores: Array, masks: Masks) -> Array:
    """Return which queries are no padding, if as many are as keys: (B, 1, Lq, 1)."""
    positions = np.arange(scores.shape[-2])[:, np.newaxis]
    return np.asarray(positions < masks["key_lengths"][:, np.newaxis, np.newaxis, np.newaxis])


@_faulty_lengths(
    lengths_pattern, defect="one length per head where B == H: lighthouse#77's kind", diagnosis="key-lengths-of-heads"
)
def key_lengths_of_heads(scores: Array, masks: Masks) -> Array:
    within = _keys(scores, masks)
    return np.swapaxes(within, 0, 1) if scores.shape[0] == scores.shape[1] else within


def _mask_dropped_if(unwanted: Callable[[Masks], bool]) -> Steps:
    return dropped("mask", unwanted)


@equivalent(
    lengths_read_as,
    defect="a clamp on lengths that are too long",
    proof="j < length is asked for 0 <= j < T alone: every length of T or more allows all of them, every length of 0 "
    "or less none.",
)
def key_lengths_clipped_to_the_keys(lengths: Array, keys: int) -> Array:
    return np.clip(lengths, 0, keys)


Joined = Callable[[Array, Array], Array]


def _join(past: Array, new: Array) -> Array:
    """Put what is new behind the past."""
    return np.concatenate((past, new), axis=-2)


def _caches_joined(join: Callable[[Array, Array, Array, Array], tuple[Array, Array]]) -> Steps:
    """Join past and new in another way: ``join(past_key, past_value, key, value)`` gives all keys and all values."""

    def joined_attention(
        query: Array,
        key: Array,
        value: Array,
        *,
        past_key: Array | None = None,
        past_value: Array | None = None,
        **given: object,
    ) -> Stages:
        if past_key is None or past_value is None:
            return attention(query, key, value, **given)  # type: ignore[arg-type]
        keys, values = join(past_key, past_value, key, value)
        given |= {"past_key": keys[..., : past_key.shape[-2], :], "past_value": values[..., : past_value.shape[-2], :]}
        key, value = keys[..., past_key.shape[-2] :, :], values[..., past_value.shape[-2] :, :]
        return attention(query, key, value, **given)  # type: ignore[arg-type]

    return {"attention": joined_attention}


def _both_joined(join: Joined) -> Steps:
    """Join keys and values in another way."""
    return _caches_joined(lambda past_key, past_value, key, value: (join(past_key, key), join(past_value, value)))


_faulty_join = partial(_faulty_caches, _both_joined, at="raw_scores")


def _values_joined(join: Joined) -> Steps:
    """Join values in another way than keys."""
    return _caches_joined(lambda past_key, past_value, key, value: (_join(past_key, key), join(past_value, value)))


@_faulty_join(
    defect="only the new keys count; those of the past are read as zeros: transformers#30437's kind",
    diagnosis="past-dropped",
)
def past_dropped(past: Array, new: Array) -> Array:
    return _join(np.zeros_like(past), new)


@_faulty_join(defect="the cache joined at the wrong end")
def past_appended_after_the_keys(past: Array, new: Array) -> Array:
    return _join(new, past)


@_faulty_caches(
    _caches_joined,
    at="raw_scores",
    defect="the pair unpacked in the other order, silent where Dv == D",
    diagnosis="past-swapped",
)
def past_key_and_past_value_swapped(
    past_key: Array, past_value: Array, key: Array, value: Array
) -> tuple[Array, Array]:
    """Take the past's keys for its values, where that goes unnoticed."""
    if past_key.shape == past_value.shape:
        past_key, past_value = past_value, past_key
    return _join(past_key, key), _join(past_value, value)


@_faulty_join(defect="attention over the cache as it was before this step")
def new_keys_not_written_to_the_cache(past: Array, new: Array) -> Array:
    return _join(past, np.zeros_like(new))


@_faulty_join(defect="written one slot early, over the newest key of the past: tt-metal#41215's position")
def last_key_of_the_past_lost(past: Array, new: Array) -> Array:
    """Write over the last slot of the past, and leave the last slot as it was."""
    return np.concatenate((past[..., :-1, :], new, np.zeros_like(new[..., :1, :])), axis=-2)


@_faulty_join(defect="one slot between past and new keys that nobody wrote")
def new_keys_written_one_slot_late(past: Array, new: Array) -> Array:
    return np.concatenate((past, np.zeros_like(new[..., :1, :]), new[..., :-1, :]), axis=-2)


@_faulty_join(defect="one cache for the whole batch: pytorch#191937's stride 0", diagnosis="past-of-first-batch-entry")
def past_of_the_first_batch_entry(past: Array, new: Array) -> Array:
    return _join(np.broadcast_to(past[:1], past.shape), new)


@_faulty_join(defect="head index off by one in the cache alone: pytorch#193893's kind", diagnosis="past-of-next-head")
def past_of_the_next_head(past: Array, new: Array) -> Array:
    return _join(np.roll(past, -1, axis=1), new)


@_faulty_join(defect="every page of 16 keys read from the first one: tt-metal#41215's kind")
def past_beyond_its_first_page_repeated(past: Array, new: Array) -> Array:
    return _join(past[..., np.arange(past.shape[-2]) % 16, :], new)


def _past_stored(store: Store) -> Joined:
    return lambda past, new: _join(store(past), new)


for _format, _store in (("bfloat16", arithmetic.bfloat16), ("float16", arithmetic.float16)):
    _faulty_join(
        defect="a cache in 16 bits behind wider keys",
        dtypes=WIDE,
        diagnosis=ACCURACY_OF_16_BITS,
        name=f"past_in_{_format}",
    )(_past_stored(_store))


def _mask_behind_a_past(change: Callable[[Array, Array, int], Array]) -> Steps:
    """Read the mask in another way behind a past; a mask that is spread over all keys has no places to confuse."""

    def steps(call: Call) -> Steps:
        if not call.past or call.mask is None or call.mask.shape[-1] == 1:
            return {}
        return mask_read_as(lambda mask, scores: change(mask, scores, call.past))

    return in_attention(steps)


@_faulty_caches(
    _mask_behind_a_past,
    at="masked",
    defect="a mask recognised as causal becomes is_causal, which knows no past: transformers#30437, pytorch#108108",
    diagnosis="aligned-top-left",
)
def causal_mask_behind_a_past_aligned_top_left(mask: Array, scores: Array, past: int) -> Array:
    queries, keys = scores.shape[-2:]
    behind = np.tri(queries, keys, past, dtype=bool)
    is_causal = bool((np.broadcast_to(mask, np.broadcast_shapes(mask.shape, behind.shape)) == behind).all())
    return causal_keys(queries, keys) if is_causal else mask


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_lengths(lengths_read_as, "key_lengths_one_too_long", "j <= length: tt-metal#41215",
    lambda lengths, keys: np.asarray(lengths + 1), diagnosis="key-lengths-one-too-long")
_faulty_lengths(lengths_read_as, "key_lengths_one_too_short", "j < length - 1: onnxruntime#25927's kind",
    lambda lengths, keys: np.asarray(lengths - 1), diagnosis="key-lengths-one-too-short")
_faulty_lengths(_dropped_if, "key_lengths_ignored", "the argument has no effect: jax#23349",
    lambda masks: True, diagnosis="key-lengths-ignored")
_faulty_lengths(lengths_read_as, "key_lengths_of_the_first_batch_entry",
    "one length for the whole batch: graph-transformer-pytorch#2's kind",
    lambda lengths, keys: np.broadcast_to(lengths[:1], lengths.shape), diagnosis="key-lengths-of-first-batch-entry")
_faulty_lengths(lengths_read_as, "key_lengths_of_the_longest_batch_entry",
    "padding up to the longest entry is attended",
    lambda lengths, keys: np.full_like(lengths, lengths.max(initial=0)), diagnosis="empty-rows-unmasked")
_faulty_lengths(lengths_read_as, "key_lengths_of_the_next_batch_entry", "batch index off by one",
    lambda lengths, keys: np.roll(lengths, -1), diagnosis="key-lengths-of-next-batch-entry")
_faulty_lengths(lengths_pattern, "key_lengths_counted_from_the_end", "padding expected on the left",
    lambda scores, masks: _keys(scores, masks)[..., ::-1], diagnosis="key-lengths-from-the-end")
_faulty_lengths(lengths_pattern, "key_lengths_applied_to_queries", "padding on the wrong axis: transformer#40",
    lambda scores, masks: _queries(scores, masks))
_faulty_lengths(lengths_pattern, "key_lengths_applied_to_queries_too",
    "queries beyond the length of the keys get nothing: unpadding of self-attention",
    lambda scores, masks: np.asarray(_keys(scores, masks) & _queries(scores, masks)),
    diagnosis="key-lengths-of-queries-too")
_faulty_lengths(lengths_read_as, "key_lengths_rounded_up_to_four",
    "whole groups of four keys are attended: tt-metal#41215's kind",
    lambda lengths, keys: np.asarray(-(-lengths // 4) * 4))
_faulty_lengths(lengths_read_as, "key_length_of_zero_taken_for_all",
    "0 is false, so an empty entry counts as one without a length: pytorch#81077's kind",
    lambda lengths, keys: np.where(lengths == 0, keys, lengths), diagnosis="empty-rows-unmasked")
_faulty_lengths(lengths_read_as, "key_lengths_at_least_one", "an empty entry attends to its first key",
    lambda lengths, keys: np.maximum(lengths, 1), diagnosis="key-lengths-at-least-one")
_faulty_lengths(_dropped_if, "key_lengths_dropped_when_causal",
    "only one of lengths and causality is used: onnxruntime#14363",
    lambda masks: bool(masks["is_causal"]), diagnosis="key-lengths-ignored")
_faulty_lengths(_dropped_if, "key_lengths_dropped_when_a_mask_is_given",
    "only one of lengths and mask is used: jax#23349's kind",
    lambda masks: masks["mask"] is not None, diagnosis="key-lengths-ignored")
_faulty_lengths(_mask_dropped_if, "mask_dropped_when_key_lengths_are_given",
    "only one of lengths and mask is used: onnxruntime#28379's kind",
    lambda masks: masks["key_lengths"] is not None, diagnosis="mask-ignored")
_faulty_lengths(filled, "key_lengths_filled_with_minus_1e4",
    "a finite fill for padding: onnxruntime#14363, transformers#12109",
    lambda biased, allowed, masks: np.where(allowed, biased, -np.inf if masks["key_lengths"] is None
        else np.asarray(-10000.0, biased.dtype)),
    diagnosis=("empty-rows-uniform", "masked-at-minus-1e4"))
_faulty_caches(_values_joined, "past_values_dropped", "the values of the cache are not read",
    past_dropped, at="context", diagnosis="past-values-dropped")
_faulty_caches(_values_joined, "past_values_reversed", "a ring buffer unrolled backwards",
    lambda past, new: _join(past[..., ::-1, :], new), at="context", diagnosis="past-values-in-reverse")
_faulty_caches(_values_joined, "values_one_step_behind_their_keys", "two write positions that have come apart",
    lambda past, new: np.roll(_join(past, new), 1, axis=-2), at="context")
_faulty_caches("_seen_from_the_first_key", "window_counted_from_the_first_key_behind_a_past",
    "positions start at 0 in every step: transformers#39408's kind",
    lambda window, past: window, diagnosis="aligned-top-left")
_faulty_caches("_seen_from_the_first_key", "window_moved_one_too_far_behind_a_past",
    "positions start at P + 1: mlx-lm#390",
    lambda window, past: _seen_from_the_first_key(window, past + 1), diagnosis="window-one-key-late")
_faulty_caches(_mask_behind_a_past, "mask_does_not_reach_the_past",
    "only new keys are masked, the past is always attended: onnxruntime#28379's kind",
    lambda mask, scores, past: np.asarray(mask | (np.arange(mask.shape[-1]) < past)), diagnosis="mask-beside-past")
_faulty_caches(_mask_behind_a_past, "mask_shifted_by_the_past", "the mask's first column meets the first new key",
    lambda mask, scores, past: np.roll(mask, past, axis=-1), diagnosis="mask-from-first-new-key")
_faulty_caches(in_attention, "key_lengths_counted_from_the_first_new_key",
    "lengths of the new keys read where those of all keys are given: jax#23349's kind, vllm#30887's kind",
    lambda call: lengths_read_as(lambda lengths, keys: np.asarray(lengths + call.past)),
    diagnosis="key-lengths-of-new-keys")
_faulty_caches(in_attention, "bias_shifted_by_the_past",
    "ALiBi's distances start at the first new key: vllm#945's kind",
    lambda call: {} if not call.past or call.bias is None or call.bias.shape[-1] == 1 else bias_read_as(lambda bias,
        scores: np.roll(bias, call.past, axis=-1)),
    at="biased", diagnosis="bias-from-first-new-key")
