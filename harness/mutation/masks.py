"""Faults of the boolean mask: its meaning, its axes, its company, what a masked key gets, and rows without a key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import EmptyRows, Stages
from attncheck.backends.numpy_backend import _softmax_with_sinks
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.backward_forms import value_weights_read_as
from attncheck.mutation.forward_forms import in_attention, rows_read_as, weights_where_allowed
from attncheck.mutation.mask_forms import NO_RULES, Masks, allowed_keys, dropped, filled, mask_read_as, masks_read_as
from attncheck.mutation.mutant import WIDE, mutant
from attncheck.mutation.variant import Call, Steps

_faulty_masks = partial(mutant, "masks", at="masked")
_faulty_empty_rows = partial(mutant, "empty rows", at="weights")


def _dropped_if(unwanted: Callable[[Masks], bool]) -> Steps:
    return dropped("mask", unwanted)


@_faulty_masks(
    mask_read_as,
    at="masked",
    defect="queries and keys swapped, silent where Lq == Lk: keras#21483",
    diagnosis="mask-transposed",
)
def mask_transposed_where_square(mask: Array, scores: Array) -> Array:
    queries, keys = scores.shape[-2:]
    return np.swapaxes(mask, -1, -2) if mask.ndim >= 2 and queries == keys else mask


for _axis, _name, _defect, _diagnosis in (
    (0, "batch_entry", "one entry's mask for all: graph-transformer-pytorch#2", "mask-of-first-batch-entry"),
    (1, "head", "one head's mask for all: lighthouse#77's kind", "mask-of-first-head"),
    (2, "query", "one row's mask for all: keras#20488's expansion", "mask-of-first-query"),
):

    def _first_along(mask: Array, scores: Array, axis: int = _axis) -> Array:
        return mask.take([0], axis=axis) if mask.ndim == 4 else mask

    _faulty_masks(mask_read_as, at="masked", defect=_defect, diagnosis=_diagnosis, name=f"mask_of_the_first_{_name}")(
        _first_along
    )


def _filled_with(number: Callable[[Array], float]) -> Steps:
    """Give what is masked a number."""
    return filled(lambda biased, allowed, masks: np.where(allowed, biased, np.asarray(number(biased), biased.dtype)))


def _only(convention: EmptyRows) -> Steps:
    """Know no convention but this one, and give zeros for all others."""

    def normalise(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
        return _softmax_with_sinks(scores, sinks, empty_rows if empty_rows == convention else "zero")

    return {"_softmax_with_sinks": normalise}


def _is_filled(logits: Array, seen: Array) -> Array:
    """Return which rows have no key, and something else in the place of their logits; the axis of keys kept."""
    return np.asarray((np.isneginf(logits) & ~np.isneginf(seen)).any(axis=-1, keepdims=True))


def _uniform_rows(change: Callable[[Array, Array], Array]) -> Steps:
    """Do so where rows are to be uniform."""
    return rows_read_as(change, lambda empty_rows: empty_rows == "uniform")


def _unmasked_rows(steps_of: Callable[[Call], Steps]) -> Steps:
    """Do so in attention; a softmax alone has no scores but those of -inf."""
    return _only("nan") | in_attention(steps_of)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_masks(mask_read_as, "mask_inverted", "true read as drop: tensorflow text#894, unturtle#56",
    lambda mask, scores: ~mask, diagnosis="mask-inverted")
_faulty_masks(_dropped_if, "mask_ignored", "the argument has no effect", lambda masks: True, diagnosis="mask-ignored")
_faulty_masks(_dropped_if, "mask_dropped_when_a_bias_is_given",
    "only one of mask and bias is used: pytorch#136816's kind",
    lambda masks: masks["bias"] is not None, diagnosis="mask-ignored")
_faulty_masks(_dropped_if, "mask_dropped_when_causal", "causality replaces padding: onnxruntime#14363",
    lambda masks: bool(masks["is_causal"]), diagnosis="mask-ignored")
_faulty_masks(masks_read_as, "mask_or_causal", "either may allow, where both must",
    lambda scores, masks: {} if masks["mask"] is None or not masks["is_causal"] else {**NO_RULES, "mask":
        masks["mask"] | allowed_keys(scores, masks | {"mask": None})}, diagnosis="mask-or-causality")
_faulty_masks(mask_read_as, "padding_on_the_query_axis",
    "padding masks rows, silent where Lq == Lk: hyunwoongko transformer#40",
    lambda mask, scores: mask_transposed_where_square(mask, scores) if mask.ndim >= 2 and mask.shape[-2] == 1 else mask,
    diagnosis="mask-transposed")
_faulty_masks(mask_read_as, "mask_of_batch_taken_for_heads",
    "(B, 1, ..) read as (1, H, ..) where B == H: mlx-lm#1903, onnx#8108",
    lambda mask, scores: mask.swapaxes(0, 1) if mask.ndim == 4 and scores.shape[0] == scores.shape[1] else mask,
    diagnosis="mask-of-batch-for-heads")
# Let a group of four keys be attended as soon as one of them may be.
_faulty_masks(mask_read_as, "mask_rounded_up_to_four_keys", "a tile is masked as a whole or not at all: tt-metal#41215",
    lambda mask, scores: np.repeat(np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0,
        -mask.shape[-1] % 4)]).reshape(*mask.shape[:-1], -1, 4).any(axis=-1), 4, axis=-1)[..., : mask.shape[-1]])
_faulty_masks(_filled_with, "mask_filled_with_minus_1e4",
    "leaks where a masked logit is 1e4 above a kept one: transformers#12109",
    lambda biased: -1e4, diagnosis=("empty-rows-uniform", "masked-at-minus-1e4"))
_faulty_masks(_filled_with, "mask_filled_with_minus_1e9", "an empty row becomes uniform: tensorflow#55682's mask",
    lambda biased: -1e9, dtypes=WIDE, diagnosis=("empty-rows-uniform", "masked-at-minus-1e9"))
# ml_dtypes' bfloat16 has no np.finfo; its range is float32's except for the last digits.
_faulty_masks(_filled_with, "mask_filled_with_least_finite",
    "an empty row becomes uniform: pytorch#109517, transformers#31303",
    lambda biased: float(np.finfo(biased.dtype).min) if biased.dtype.kind == "f" else -3.38953139e38,
    diagnosis="empty-rows-uniform")
_faulty_masks(_filled_with, "mask_filled_with_minus_1e_minus_9", "a typo for -1e9: RibonanzaNet#5",
    lambda biased: -1e-09)
_faulty_masks(_filled_with, "mask_multiplied_to_scores", "scores * mask leaves masked keys at 0", lambda biased: 0.0,
    diagnosis="masked-at-zero")
_faulty_masks(filled, "mask_added_as_zero_and_one",
    "a boolean mask converted to numbers and added: torch's float masks",
    lambda biased, allowed, masks: np.asarray(biased + allowed.astype(biased.dtype)), diagnosis="mask-added")
# Only where a mask and causality come together: alone, either is a plain -inf in the reference this is taken from.
_faulty_masks(filled, "mask_times_minus_infinity", "(1 - mask) * -inf = NaN at kept slots: onnx 1.19.1's reference",
    lambda biased, allowed, masks: np.where(allowed, biased * (np.nan if masks["mask"] is not None
        and masks["is_causal"] else 1), -np.inf).astype(biased.dtype))
_faulty_masks(None, "mask_after_softmax", "weights * mask, not renormalised: vigg_ribonanza#1",
    filled(lambda biased, allowed, masks: biased) | weights_where_allowed(0.0),
    diagnosis=("weights-not-renormalised", "mask-ignored", "causality-ignored"))
_faulty_masks(weights_where_allowed, "masked_weights_leak_1e_10", "a masked weight is tiny, not zero",
    1e-10, at="weights", dtypes=WIDE)
_faulty_empty_rows(_only, "uniform_rows_are_zero", "the convention that is asked for is not looked at",
    "nan", diagnosis="empty-rows-zero")
_faulty_empty_rows(_only, "nan_rows_are_zero", "NaN replaced by zeros where NaN is asked for: pytorch#141128",
    "uniform", diagnosis="empty-rows-zero")
# where the length is 0 there is nothing to take the mean of
_faulty_empty_rows(in_attention, "uniform_rows_within_the_length",
    "the mean of the keys that are no padding, not of all keys",
    lambda call: rows_read_as(lambda logits, seen: np.where(_is_filled(logits, seen) & ~allowed_keys(logits,
        {"key_lengths": call.key_lengths}), -np.inf, seen)) if call.empty_rows == "uniform" else {},
    diagnosis="empty-rows-zero")
_faulty_empty_rows(_uniform_rows, "uniform_rows_up_to_the_query",
    "the mean of the keys up to the query's own position, as if causality still held",
    lambda logits, seen: np.where(_is_filled(logits, seen) & ~allowed_keys(logits, {"is_causal": True}), -np.inf, seen))
_faulty_empty_rows(_unmasked_rows, "uniform_rows_weigh_what_was_masked",
    "a number subtracted from masked scores, not put in their place: keras.layers.Attention in float64",
    lambda call: _uniform_rows(lambda logits, seen: np.where(_is_filled(logits, seen), call.scores, seen)),
    diagnosis=("empty-rows-unmasked", "empty-rows-zero"))
_faulty_empty_rows(_uniform_rows, "uniform_rows_take_the_first_key",
    "a row's maximum that starts at the first score: the whole weight on one key",
    lambda logits, seen: np.where(_is_filled(logits, seen) & ~(np.arange(logits.shape[-1]) == 0), -np.inf, seen))
_faulty_empty_rows(rows_read_as, "nan_rows_spread_through_the_head",
    "NaN in every query of a head in which one has no key: pytorch#160064",
    lambda logits, seen: np.where(np.isnan(seen).any(axis=(-2, -1), keepdims=True), np.nan, seen))
_faulty_empty_rows(value_weights_read_as, "uniform_rows_give_values_no_gradient",
    "the backward pass skips a row whose keys are all masked, though the forward pass averaged its values",
    lambda call, weights: np.where(_is_filled(call.masked, call.logits), np.zeros((), weights.dtype), weights),
    at="grad_value", diagnosis="empty-rows-zero")
