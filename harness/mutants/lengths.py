"""Faults of the number of keys that each batch entry has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.mutants.mask_steps import ALLOWED, Allowed, MaskRequest, within_lengths
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant


def _read_as(change: Callable[[Array, int], Array]) -> Variant:
    """Take the lengths for other lengths; the second argument is the number of all keys."""
    return Variant(
        allowed=Allowed(
            lengths=lambda request, lengths: within_lengths(request, change(lengths, request.scores.shape[-1]))
        )
    )


def _dropped_if(unwanted: Callable[[MaskRequest], bool]) -> Variant:
    def allowed(request: MaskRequest) -> Array:
        return ALLOWED(replace(request, key_lengths=None) if unwanted(request) else request)

    return Variant(allowed=allowed)


def _of_queries(request: MaskRequest, lengths: Array) -> Array:
    queries = np.arange(request.scores.shape[-2])[:, np.newaxis]
    return queries < lengths[:, np.newaxis, np.newaxis, np.newaxis]


def _of_heads(request: MaskRequest, lengths: Array) -> Array:
    within = within_lengths(request, lengths)
    batch, heads = request.scores.shape[:2]
    return np.swapaxes(within, 0, 1) if batch == heads else within


def _from_the_end(request: MaskRequest, lengths: Array) -> Array:
    return within_lengths(request, lengths)[..., ::-1]


def _both_ends(request: MaskRequest, lengths: Array) -> Array:
    """Cut queries beyond the length too, as self-attention would."""
    return within_lengths(request, lengths) & _of_queries(request, lengths)


def _minus_1e4(biased: Array, allowed: Array, request: MaskRequest) -> Array:
    filled = -np.inf if request.key_lengths is None else np.asarray(-1e4, biased.dtype)
    return np.where(allowed, biased, filled)


MUTANTS = (
    Mutant(
        "key_lengths_one_too_long",
        "lengths",
        "j <= length: tt-metal#41215",
        _read_as(lambda lengths, keys: lengths + 1),
        "masked",
        diagnosis=("key-lengths-one-too-long",),
    ),
    Mutant(
        "key_lengths_one_too_short",
        "lengths",
        "j < length - 1: onnxruntime#25927's kind",
        _read_as(lambda lengths, keys: lengths - 1),
        "masked",
        diagnosis=("key-lengths-one-too-short",),
    ),
    Mutant(
        "key_lengths_ignored",
        "lengths",
        "the argument has no effect: jax#23349",
        _dropped_if(lambda r: True),
        "masked",
        diagnosis=("key-lengths-ignored",),
    ),
    Mutant(
        "key_lengths_of_the_first_batch_entry",
        "lengths",
        "one length for the whole batch: graph-transformer-pytorch#2's kind",
        _read_as(lambda lengths, keys: np.broadcast_to(lengths[:1], lengths.shape)),
        "masked",
        diagnosis=("key-lengths-of-first-batch-entry",),
    ),
    Mutant(
        "key_lengths_of_the_longest_batch_entry",
        "lengths",
        "padding up to the longest entry is attended",
        _read_as(lambda lengths, keys: np.full_like(lengths, lengths.max(initial=0))),
        "masked",
    ),
    Mutant(
        "key_lengths_of_the_next_batch_entry",
        "lengths",
        "batch index off by one",
        _read_as(lambda lengths, keys: np.roll(lengths, -1)),
        "masked",
    ),
    Mutant(
        "key_lengths_counted_from_the_end",
        "lengths",
        "padding expected on the left",
        Variant(allowed=Allowed(lengths=_from_the_end)),
        "masked",
    ),
    Mutant(
        "key_lengths_applied_to_queries",
        "lengths",
        "padding on the wrong axis: transformer#40",
        Variant(allowed=Allowed(lengths=_of_queries)),
        "masked",
    ),
    Mutant(
        "key_lengths_applied_to_queries_too",
        "lengths",
        "queries beyond the length of the keys get nothing: unpadding of self-attention",
        Variant(allowed=Allowed(lengths=_both_ends)),
        "masked",
    ),
    Mutant(
        "key_lengths_of_heads",
        "lengths",
        "one length per head where B == H: lighthouse#77's kind",
        Variant(allowed=Allowed(lengths=_of_heads)),
        "masked",
    ),
    Mutant(
        "key_lengths_rounded_up_to_four",
        "lengths",
        "whole groups of four keys are attended: tt-metal#41215's kind",
        _read_as(lambda lengths, keys: -(-lengths // 4) * 4),
        "masked",
    ),
    Mutant(
        "key_length_of_zero_taken_for_all",
        "lengths",
        "0 is false, so an empty entry counts as one without a length: pytorch#81077's kind",
        _read_as(lambda lengths, keys: np.where(lengths == 0, keys, lengths)),
        "masked",
        diagnosis=("empty-rows-unmasked",),
    ),
    Mutant(
        "key_lengths_at_least_one",
        "lengths",
        "an empty entry attends to its first key",
        _read_as(lambda lengths, keys: np.maximum(lengths, 1)),
        "masked",
    ),
    Mutant(
        "key_lengths_dropped_when_causal",
        "lengths",
        "only one of lengths and causality is used: onnxruntime#14363",
        _dropped_if(lambda request: request.is_causal),
        "masked",
        diagnosis=("key-lengths-ignored",),
    ),
    Mutant(
        "key_lengths_dropped_when_a_mask_is_given",
        "lengths",
        "only one of lengths and mask is used: jax#23349's kind",
        _dropped_if(lambda request: request.mask is not None),
        "masked",
        diagnosis=("key-lengths-ignored",),
    ),
    Mutant(
        "mask_dropped_when_key_lengths_are_given",
        "lengths",
        "only one of lengths and mask is used: onnxruntime#28379's kind",
        Variant(
            allowed=lambda request: ALLOWED(request if request.key_lengths is None else replace(request, mask=None))
        ),
        "masked",
        diagnosis=("mask-ignored",),
    ),
    Mutant(
        "key_lengths_filled_with_minus_1e4",
        "lengths",
        "a finite fill for padding: onnxruntime#14363, transformers#12109",
        Variant(fill=_minus_1e4),
        "masked",
        diagnosis=("empty-rows-uniform",),
    ),
)
