"""Faults of what a query without a key gives, where a case asks for another convention than zero."""

from __future__ import annotations

import numpy as np

from attncheck.mutants.backward import Backward, Saved
from attncheck.mutants.mask_steps import MaskRequest, causal_mask, is_empty, without_a_key
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant


def _only(convention: str) -> Variant:
    """Know no convention but this one, and give zeros for all others."""

    def stand_in(logits: Array, request: MaskRequest) -> Array:
        return without_a_key(logits, request) if request.empty_rows == convention else logits

    return Variant(without_a_key=stand_in)


def _within_length(logits: Array, request: MaskRequest) -> Array:
    seen = without_a_key(logits, request)
    if request.empty_rows != "uniform" or request.key_lengths is None:
        return seen
    is_key = np.arange(logits.shape[-1]) < request.key_lengths[:, np.newaxis, np.newaxis, np.newaxis]
    return np.where(is_empty(logits) & ~is_key, -np.inf, seen)


def _up_to_the_query(logits: Array, request: MaskRequest) -> Array:
    seen = without_a_key(logits, request)
    if request.empty_rows != "uniform":
        return seen
    earlier = causal_mask(*logits.shape[-2:])
    return np.where(is_empty(logits) & ~earlier, -np.inf, seen)


def _unmasked_scores(logits: Array, request: MaskRequest) -> Array:
    seen = without_a_key(logits, request)
    return np.where(is_empty(logits) & np.isfinite(seen), request.scores, seen)


def _whole_head(logits: Array, request: MaskRequest) -> Array:
    seen = without_a_key(logits, request)
    return np.where(np.isnan(seen).any(axis=(-2, -1), keepdims=True), np.nan, seen)


def _one_key(logits: Array, request: MaskRequest) -> Array:
    seen = without_a_key(logits, request)
    first = np.arange(logits.shape[-1]) == 0
    return np.where(is_empty(logits) & np.isfinite(seen) & ~first, -np.inf, seen)


def _no_weights(saved: Saved, weights: Array) -> Array:
    return np.where(is_empty(saved.masked), np.zeros((), weights.dtype), weights)


MUTANTS = (
    Mutant(
        "uniform_rows_are_zero",
        "empty rows",
        "the convention that is asked for is not looked at",
        _only("nan"),
        "weights",
        diagnosis=("empty-rows-zero",),
    ),
    Mutant(
        "nan_rows_are_zero",
        "empty rows",
        "NaN replaced by zeros where NaN is asked for: pytorch#141128",
        _only("uniform"),
        "weights",
        diagnosis=("empty-rows-zero",),
    ),
    Mutant(
        "uniform_rows_within_the_length",
        "empty rows",
        "the mean of the keys that are no padding, not of all keys",
        Variant(without_a_key=_within_length),
        "weights",
        diagnosis=("empty-rows-zero",),  # where the length is 0 there is nothing to take the mean of
    ),
    Mutant(
        "uniform_rows_up_to_the_query",
        "empty rows",
        "the mean of the keys up to the query's own position, as if causality still held",
        Variant(without_a_key=_up_to_the_query),
        "weights",
    ),
    Mutant(
        "uniform_rows_weigh_what_was_masked",
        "empty rows",
        "a number subtracted from masked scores, not put in their place: keras.layers.Attention in float64",
        Variant(without_a_key=_unmasked_scores),
        "weights",
        diagnosis=("empty-rows-unmasked", "empty-rows-zero"),  # a softmax alone has no scores but those of -inf
    ),
    Mutant(
        "uniform_rows_take_the_first_key",
        "empty rows",
        "a row's maximum that starts at the first score: the whole weight on one key",
        Variant(without_a_key=_one_key),
        "weights",
    ),
    Mutant(
        "nan_rows_spread_through_the_head",
        "empty rows",
        "NaN in every query of a head in which one has no key: pytorch#160064",
        Variant(without_a_key=_whole_head),
        "weights",
    ),
    Mutant(
        "uniform_rows_give_values_no_gradient",
        "empty rows",
        "the backward pass skips a row whose keys are all masked, though the forward pass averaged its values",
        Variant(backward=Backward(value_weights=_no_weights)),
        "grad_value",
        diagnosis=("empty-rows-zero",),
    ),
)
