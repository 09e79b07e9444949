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

_faulty_masks = partial(mutant, "masks")
_faulty_empty_rows = partial(mutant, "empty rows")


def _dropped_if(unwanted: Callable[[Masks], bool]) -> Steps:
    return dropped("mask", unwanted)


@_faulty_masks(
    mask_read_as, at="masked", defect="true read as drop: tensorflow text#894, unturtle#56", diagnosis="mask-inverted"
)
def mask_inverted(mask: Array, scores: Array) -> Array:
    return ~mask


@_faulty_masks(_dropped_if, at="masked", defect="the argument has no effect", diagnosis="mask-ignored")
def mask_ignored(masks: Masks) -> bool:
    return True


@_faulty_masks(
    _dropped_if,
    at="masked",
    defect="only one of mask and bias is used: pytorch#136816's kind",
    diagnosis="mask-ignored",
)
def mask_dropped_when_a_bias_is_given(masks: Masks) -> bool:
    return masks["bias"] is not None


@_faulty_masks(
    _dropped_if, at="masked", defect="causality replaces padding: onnxruntime#14363", diagnosis="mask-ignored"
)
def mask_dropped_when_causal(masks: Masks) -> bool:
    return bool(masks["is_causal"])


@_faulty_masks(masks_read_as, at="masked", defect="either may allow, where both must")
def mask_or_causal(scores: Array, masks: Masks) -> Masks:
    if masks["mask"] is None or not masks["is_causal"]:
        return {}
    rules = allowed_keys(scores, masks | {"mask": None})
    return {**NO_RULES, "mask": masks["mask"] | rules}


@_faulty_masks(
    mask_read_as,
    at="masked",
    defect="queries and keys swapped, silent where Lq == Lk: keras#21483",
    diagnosis="mask-transposed",
)
def mask_transposed_where_square(mask: Array, scores: Array) -> Array:
    queries, keys = scores.shape[-2:]
    return np.swapaxes(mask, -1, -2) if mask.ndim >= 2 and queries == keys else mask


@_faulty_masks(
    mask_read_as,
    at="masked",
    defect="padding masks rows, silent where Lq == Lk: hyunwoongko transformer#40",
    diagnosis="mask-transposed",
)
def padding_on_the_query_axis(mask: Array, scores: Array) -> Array:
    is_padding = mask.ndim >= 2 and mask.shape[-2] == 1
    return mask_transposed_where_square(mask, scores) if is_padding else mask


for _axis, _name, _defect, _diagnosis in (
    (0, "batch_entry", "one entry's mask for all: graph-transformer-pytorch#2", "mask-of-first-batch-entry"),
    (1, "head", "one head's mask for all: lighthouse#77's kind", "mask-of-first-head"),
    (2, "query", "one row's mask for all: keras#20488's expansion", ()),
):

    def _first_along(mask: Array, scores: Array, axis: int = _axis) -> Array:
        return mask.take([0], axis=axis) if mask.ndim == 4 else mask

    _faulty_masks(mask_read_as, at="masked", defect=_defect, diagnosis=_diagnosis, name=f"mask_of_the_first_{_name}")(
        _first_along
    )


@_faulty_masks(mask_read_as, at="masked", defect="(B, 1, ..) read as (1, H, ..) where B == H: mlx-lm#1903, onnx#8108")
def mask_of_batch_taken_for_heads(mask: Array, scores: Array) -> Array:
    batch, heads = scores.shape[:2]
    return mask.swapaxes(0, 1) if mask.ndim == 4 and batch == heads else mask


@_faulty_masks(mask_read_as, at="masked", defect="a tile is masked as a whole or not at all: tt-metal#41215")
def mask_rounded_up_to_four_keys(mask: Array, scores: Array) -> Array:
    """Let a group of four keys be attended as soon as one of them may be."""
    keys = mask.shape[-1]
    groups = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -keys % 4)]).reshape(*mask.shape[:-1], -1, 4)
    return np.repeat(groups.any(axis=-1), 4, axis=-1)[..., :keys]


def _filled_with(number: Callable[[Array], float]) -> Steps:
    """Give what is masked a number."""
    return filled(lambda biased, allowed, masks: np.where(allowed, biased, np.asarray(number(biased), biased.dtype)))


@_faulty_masks(
    _filled_with,
    at="masked",
    defect="leaks where a masked logit is 1e4 above a kept one: transformers#12109",
    diagnosis="empty-rows-uniform",
)
def mask_filled_with_minus_1e4(biased: Array) -> float:
    return -1e4


@_faulty_masks(
    _filled_with,
    at="masked",
    defect="an empty row becomes uniform: tensorflow#55682's mask",
    dtypes=WIDE,
    diagnosis="empty-rows-uniform",
)
def mask_filled_with_minus_1e9(biased: Array) -> float:
    return -1e9


@_faulty_masks(
    _filled_with,
    at="masked",
    defect="an empty row becomes uniform: pytorch#109517, transformers#31303",
    diagnosis="empty-rows-uniform",
)
def mask_filled_with_least_finite(biased: Array) -> float:
    # ml_dtypes' bfloat16 has no np.finfo; its range is float32's except for the last digits.
    return float(np.finfo(biased.dtype).min) if biased.dtype.kind == "f" else -3.38953139e38


@_faulty_masks(_filled_with, at="masked", defect="a typo for -1e9: RibonanzaNet#5")
def mask_filled_with_minus_1e_minus_9(biased: Array) -> float:
    return -1e-9


@_faulty_masks(_filled_with, at="masked", defect="scores * mask leaves masked keys at 0")
def mask_multiplied_to_scores(biased: Array) -> float:
    return 0.0


@_faulty_masks(
    filled,
    at="masked",
    defect="a boolean mask converted to numbers and added: torch's float masks",
    diagnosis="mask-added",
)
def mask_added_as_zero_and_one(biased: Array, allowed: Array, masks: Masks) -> Array:
    return np.asarray(biased + allowed.astype(biased.dtype))


@_faulty_masks(filled, at="masked", defect="(1 - mask) * -inf = NaN at kept slots: onnx 1.19.1's reference")
def mask_times_minus_infinity(biased: Array, allowed: Array, masks: Masks) -> Array:
    # Only where a mask and causality come together: alone, either is a plain -inf in the reference this is taken from.
    kept = np.nan if masks["mask"] is not None and masks["is_causal"] else 1
    return np.where(allowed, biased * kept, -np.inf).astype(biased.dtype)


_faulty_masks(
    at="masked",
    defect="weights * mask, not renormalised: vigg_ribonanza#1",
    diagnosis="weights-not-renormalised",
    name="mask_after_softmax",
)(filled(lambda biased, allowed, masks: biased) | weights_where_allowed(0.0))
_faulty_masks(
    weights_where_allowed,
    at="weights",
    defect="a masked weight is tiny, not zero",
    dtypes=WIDE,
    name="masked_weights_leak_1e_10",
)(1e-10)


def _only(convention: EmptyRows) -> Steps:
    """Know no convention but this one, and give zeros for all others."""

    def normalise(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
        return _softmax_with_sinks(scores, sinks, empty_rows if empty_rows == convention else "zero")

    return {"_softmax_with_sinks": normalise}


_faulty_empty_rows(
    _only,
    at="weights",
    defect="the convention that is asked for is not looked at",
    diagnosis="empty-rows-zero",
    name="uniform_rows_are_zero",
)("nan")
_faulty_empty_rows(
    _only,
    at="weights",
    defect="NaN replaced by zeros where NaN is asked for: pytorch#141128",
    diagnosis="empty-rows-zero",
    name="nan_rows_are_zero",
)("uniform")


def _is_filled(logits: Array, seen: Array) -> Array:
    """Return which rows have no key, and something else in the place of their logits; the axis of keys kept."""
    return np.asarray((np.isneginf(logits) & ~np.isneginf(seen)).any(axis=-1, keepdims=True))


@_faulty_empty_rows(
    in_attention,
    at="weights",
    defect="the mean of the keys that are no padding, not of all keys",
    diagnosis="empty-rows-zero",  # where the length is 0 there is nothing to take the mean of
)
def uniform_rows_within_the_length(call: Call) -> Steps:
    def within_length(logits: Array, seen: Array) -> Array:
        is_key = allowed_keys(logits, {"key_lengths": call.key_lengths})
        return np.where(_is_filled(logits, seen) & ~is_key, -np.inf, seen)

    return rows_read_as(within_length) if call.empty_rows == "uniform" else {}


def _uniform_rows(change: Callable[[Array, Array], Array]) -> Steps:
    """Do so where rows are to be uniform."""
    return rows_read_as(change, lambda empty_rows: empty_rows == "uniform")


@_faulty_empty_rows(
    _uniform_rows,
    at="weights",
    defect="the mean of the keys up to the query's own position, as if causality still held",
)
def uniform_rows_up_to_the_query(logits: Array, seen: Array) -> Array:
    return np.where(_is_filled(logits, seen) & ~allowed_keys(logits, {"is_causal": True}), -np.inf, seen)


def _unmasked_rows(steps_of: Callable[[Call], Steps]) -> Steps:
    """Do so in attention; a softmax alone has no scores but those of -inf."""
    return _only("nan") | in_attention(steps_of)


@_faulty_empty_rows(
    _unmasked_rows,
    at="weights",
    defect="a number subtracted from masked scores, not put in their place: keras.layers.Attention in float64",
    diagnosis=("empty-rows-unmasked", "empty-rows-zero"),
)
def uniform_rows_weigh_what_was_masked(call: Call) -> Steps:
    return _uniform_rows(lambda logits, seen: np.where(_is_filled(logits, seen), call.scores, seen))


@_faulty_empty_rows(
    _uniform_rows, at="weights", defect="a row's maximum that starts at the first score: the whole weight on one key"
)
def uniform_rows_take_the_first_key(logits: Array, seen: Array) -> Array:
    first = np.arange(logits.shape[-1]) == 0
    return np.where(_is_filled(logits, seen) & ~first, -np.inf, seen)


@_faulty_empty_rows(
    rows_read_as, at="weights", defect="NaN in every query of a head in which one has no key: pytorch#160064"
)
def nan_rows_spread_through_the_head(logits: Array, seen: Array) -> Array:
    return np.where(np.isnan(seen).any(axis=(-2, -1), keepdims=True), np.nan, seen)


@_faulty_empty_rows(
    value_weights_read_as,
    at="grad_value",
    defect="the backward pass skips a row whose keys are all masked, though the forward pass averaged its values",
    diagnosis="empty-rows-zero",
)
def uniform_rows_give_values_no_gradient(call: Call, weights: Array) -> Array:
    return np.where(_is_filled(call.masked, call.logits), np.zeros((), weights.dtype), weights)
