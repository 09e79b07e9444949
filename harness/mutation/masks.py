"""Faults of who may attend to whom: masks, their fill, rows without a key, causality, windows, offsets, and positions.

A kernel gets a plain boolean mask. Where it goes wrong with the masks of today's models, it takes the mask for a
simpler one, skips tiles that it should not, or reads the mask with the positions of another tile. Where a model's own
code makes the mask, it is another mask. A bias that follows from positions is numbers to a kernel; what a model's code,
or a kernel that makes the bias itself, does instead is told from them: a bias that is minus a slope times a distance
(ALiBi), or one that depends on the distance alone (T5).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, change_call_arguments
from attncheck.mutation.mutant import (
    FAST_PATH_DTYPES,
    WIDE_DTYPES,
    AttentionCall,
    StepReplacements,
    rebind_globals,
    register_control,
    register_equivalent,
    register_fault,
)
from attncheck.reading.generated_arrays import alibi_slopes, find_relative_buckets
from attncheck.reading.lowering import count_queries_and_keys
from attncheck.reading.problem import Problem

_register_mask_fault = partial(register_fault, "masks", stage="masked")
_register_empty_row_fault = partial(register_fault, "empty rows", stage="weights")


def _filled_empty_rows(logits: Array, filled_logits: Array) -> Array:
    """Return flags of the rows without a key whose logits are filled; the axis of keys has length 1."""
    return np.asarray((np.isneginf(logits) & ~np.isneginf(filled_logits)).any(axis=-1, keepdims=True))


def _change_uniform_row_logits(change: Callable[[Array, Array], Array]) -> StepReplacements:
    """Change rows whose weights should be uniform."""
    return forms.change_filled_logits(change, lambda empty_rows: empty_rows == "uniform")


def _mask_begins_causally(problem: Problem) -> object:
    """Return whether the first row of any batch entry's mask is causal."""
    (queries, keys), mask = count_queries_and_keys(problem.inputs), problem.inputs["mask"]
    return mask.ndim > 1 and (mask[..., 0, :] == (np.arange(keys) <= keys - queries)).all(axis=-1).any()


_register_fill_fault = partial(register_fault, "mask fills", stage="masked")


def _replace_fill_if_given(set_fill: Callable[[Array, Array, Array, forms.MaskArguments], Array]) -> StepReplacements:
    """Replace how a fill is set, if there is one: ``set_fill(biased, allowed, fill, masks)``."""

    def fill_or_minus_infinity(biased: Array, allowed: Array, masks: forms.MaskArguments) -> Array:
        if masks["mask_fill"] is None:
            return np.where(allowed, biased, np.asarray(-np.inf, biased.dtype))
        return set_fill(biased, allowed, np.asarray(masks["mask_fill"], biased.dtype), masks)

    return forms.replace_fill(fill_or_minus_infinity)


@_register_fill_fault(_replace_fill_if_given)
def fills_that_add_up(biased: Array, allowed: Array, fill: Array, masks: forms.MaskArguments) -> Array:
    """mask and causality are filled one after the other, and the fills add up: transformers#31035"""
    if masks["mask"] is None or not masks["is_causal"]:
        return np.where(allowed, biased, fill)
    by_mask = forms.allowed_keys(biased, {**forms.NO_MASK_RULES, "mask": masks["mask"]})
    by_rules = forms.allowed_keys(biased, {**masks, "mask": None})
    return np.where(by_mask | by_rules, np.where(allowed, biased, fill), fill + fill)


def _replace_steps_if_filled(make_steps: Callable[[AttentionCall, Array], StepReplacements]) -> StepReplacements:
    """Replace steps of attention in calls with a fill: ``make_steps(call, kept)``."""
    return forms.replace_attention_steps(
        lambda call: {} if call.mask_fill is None else make_steps(call, forms.allowed_keys_of_call(call))
    )


_TILE_SIZE = 64
"""Tile size of common kernels."""
_SMALL_TILE_SIZE = 4
"""A tile so small that masks of the small cases of the corpus have several."""
_FIRST_ROW, _LAST_ROW = slice(1), slice(-1, None)


def _change_mask_rows(change: Callable[[Array, Array, Array, int], Array]) -> StepReplacements:
    """Replace a mask with rows by ``change(rows, causal, key, past)``.

    ``rows`` are the mask of every row and key, (..., Lq, T), ``causal`` who sees whom if the last query stands at the
    last key, (Lq, T), ``key`` the numbers of the keys, and ``past`` where the first query then stands.
    """

    def changed_mask(mask: Array, scores: Array) -> Array:
        queries, keys = scores.shape[-2:]
        if mask.ndim < 2 or mask.shape[-2] == 1:
            return mask
        rows = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, (queries, keys)))
        past = keys - queries
        return np.asarray(change(rows, np.tri(queries, keys, past, dtype=bool), np.arange(keys), past))

    return forms.change_mask(changed_mask)


_register_model_mask_fault = partial(register_fault, "masks of models", _change_mask_rows, stage="masked")


def _nonempty_tiles(mask: Array, tile_size: int, rows: slice = slice(None)) -> Array:
    """Return the tiles in which some of their rows see a key, (..., tiles of queries, tiles of keys)."""
    queries, keys = mask.shape[-2:]
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 2) + [(0, -queries % tile_size), (0, -keys % tile_size)])
    tiles = padded.reshape(*mask.shape[:-2], -(-queries // tile_size), tile_size, -(-keys // tile_size), tile_size)
    return np.asarray(tiles[..., rows, :, :].any(axis=(-1, -3)))


def _expand_tiles_to_mask(tiles: Array, tile_size: int, mask: Array) -> Array:
    """Return a table of tiles, (..., tiles of queries, tiles of keys), as a mask of the shape of another."""
    queries, keys = mask.shape[-2:]
    return np.asarray(tiles.repeat(tile_size, axis=-2).repeat(tile_size, axis=-1)[..., :queries, :keys])


def _key_tile_minus_query_tile(mask: Array, past: int, tile_size: int) -> Array:
    """Return how many tiles each key lies ahead of each query, (Lq, T)."""
    queries, keys = mask.shape[-2:]
    ahead: Array = np.arange(keys) // tile_size - (np.arange(queries)[:, np.newaxis] + past) // tile_size
    return ahead


def _last_key_of_first_row(mask: Array) -> Array:
    """Return the last key that the first row sees, -1 if it sees none, (..., 1, 1)."""
    first = mask[..., :1, :]
    return np.asarray(np.where(first, np.arange(mask.shape[-1]), -1).max(axis=-1, keepdims=True, initial=-1))


@_register_model_mask_fault(defect="images see each other: any two tokens of images, transformers#38053")
def images_see_each_other(rows: Array, causal: Array, key: Array, past: int) -> Array:
    ahead = np.asarray(rows & ~causal)
    of_keys = np.asarray(ahead.any(axis=-2, keepdims=True))  # seen by tokens before them, (..., 1, T)
    of_queries = ahead.any(axis=-1, keepdims=True)
    of_queries = np.logical_or(of_queries, of_keys[..., past:].swapaxes(-1, -2)) if past >= 0 else of_queries
    return np.asarray(rows | (of_queries & of_keys))


_register_causal_fault = partial(register_fault, "causal", stage="masked")
_register_window_fault = partial(register_fault, "windows", stage="masked")


@_register_window_fault(forms.replace_window, defect="decided once per four queries: pytorch#195910's kind")
def window_by_groups_of_four(scores: Array, masks: forms.MaskArguments) -> Array:
    """Show every query of a group of four all keys that any of them sees."""
    within = forms.window_mask(scores, masks["window"])
    groups = np.arange(len(within)) // 4
    return np.array([within[groups == group].any(axis=0) for group in groups]).reshape(within.shape)


@register_equivalent(
    forms.change_mask_arguments,
    defect="a bound that causality makes idle is not tested",
    proof="Causality asks for j <= i, a window's right side for j <= i + right with right >= 0: the first implies the "
    "second, so that both together are the first. A mask knows true and false only.",
)
def right_side_of_a_window_dropped_when_causal(scores: Array, masks: forms.MaskArguments) -> forms.MaskArguments:
    window = masks["window"]
    return {} if window is None or not masks["is_causal"] else {"window": (window[0], None)}


@register_fault(
    "query offsets",
    forms.change_mask_arguments,
    stage="masked",
    defect="the near end of the window counts in the block of queries: lalamo#200's kind",
)
def query_offsets_reach_the_far_side_of_the_window_alone(
    scores: Array, masks: forms.MaskArguments
) -> forms.MaskArguments:
    """Move the left end of the window by the offset, and leave its right end and causality where they are."""
    left, right = masks["window"] or (None, None)
    if masks["query_offsets"] is None or right is None:
        return {}
    far = forms.allowed_keys(scores, {"window": (left, None), "query_offsets": masks["query_offsets"]})
    near = forms.allowed_keys(scores, {"window": (None, right)})
    return {"window": None, "mask": forms.combine_masks(masks["mask"], far & near)}


_register_bias_fault = partial(register_fault, "biases from positions", stage="biased")
_ALIBI_TOLERANCE = 2.0**-6
"""A slope and its products are rounded to the dtype."""


def _change_alibi_bias(change: Callable[[Array, Array, Array], Array]) -> StepReplacements:
    """Replace ALiBi by another bias, (H, Lq, T): ``change(slopes, query, key)`` by positions; leave other biases."""

    def changed_bias(bias: Array, scores: Array) -> Array:
        alibi = _alibi_slopes_and_offset(bias)
        if alibi is None:
            return bias
        slopes, offset = alibi
        query, key = offset + np.arange(bias.shape[-2])[:, np.newaxis], np.arange(bias.shape[-1])
        return np.asarray(change(slopes[:, np.newaxis, np.newaxis], query, key)[np.newaxis], bias.dtype)

    return forms.change_bias(changed_bias)


def _alibi_slopes_and_offset(bias: Array) -> tuple[Array, int] | None:
    """Return the slope of each head, and the position of the first query, where a bias is ALiBi."""
    if bias.ndim != 4 or bias.shape[0] != 1 or bias.shape[1] < 2 or bias.shape[-1] < 2 or not bias.shape[-2]:
        return None
    is_at_zero = (bias[0, :, 0] == 0).all(axis=0)
    offset = int(is_at_zero.argmax())
    slopes = -np.asarray(bias[0, :, 0, offset - 1 if offset else 1], np.float64)
    away = np.abs(np.arange(bias.shape[-1]) - offset - np.arange(bias.shape[-2])[:, np.newaxis])
    is_alibi = np.allclose(
        np.asarray(bias[0], np.float64), -slopes[:, np.newaxis, np.newaxis] * away, rtol=_ALIBI_TOLERANCE
    )
    return (slopes, offset) if is_alibi and is_at_zero.sum() == 1 and (slopes > 0).all() else None


def _change_alibi_slopes(change: Callable[[Array], Array]) -> StepReplacements:
    """Replace the slopes of ALiBi by ``change(slopes)``, (H)."""
    return _change_alibi_bias(lambda slopes, query, key: -change(slopes.ravel())[:, None, None] * np.abs(query - key))


def _round_down_to_power_of_two(number: int) -> int:
    """Return the largest power of two that is at most a number of heads."""
    return 1 << (number.bit_length() - 1)


def _change_bias_distances(change: Callable[[Array], Array]) -> StepReplacements:
    """Replace a bias that depends only on the distance j - p by the bias at ``change(distance)``."""

    def changed_bias(bias: Array, scores: Array) -> Array:
        if bias.ndim != 4 or min(bias.shape[-2:]) < 2 or bias.shape[-1] < bias.shape[-2]:
            return bias
        queries, keys = bias.shape[-2:]
        numbers = np.concatenate([bias[..., ::-1, 0], bias[..., 0, 1:]], axis=-1)  # by distance, (..., Lq + T - 1)
        place = np.arange(keys) + queries - 1 - np.arange(queries)[:, np.newaxis]
        if not np.array_equal(numbers[..., place], bias) or (numbers == numbers[..., :1]).all():
            return bias
        zero = keys - 1  # where the last query meets the last key
        return np.asarray(numbers[..., np.clip(change(place - zero) + zero, 0, numbers.shape[-1] - 1)])

    return forms.change_bias(changed_bias)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
for _fault in forms.faults_from_readings(
    ("masks", "mask-transposed", "queries and keys swapped, silent where Lq == Lk: keras#21483"),
    ("masks", "mask-transposed", "padding masks rows, silent where Lq == Lk: hyunwoongko transformer#40",
        "padding_on_the_query_axis", lambda problem: problem.inputs["mask"].shape[-2:-1] == (1,)),
    ("masks", "mask-ignored", "only one of mask and bias is used: pytorch#136816's kind",
        "mask_dropped_when_a_bias_is_given", forms.has_any_of("bias")),
    ("masks", "mask-ignored", "causality replaces padding: onnxruntime#14363", "mask_dropped_when_causal",
        forms.has_any_of("is_causal")),
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
        "mask_that_begins_causally_is_causal", _mask_begins_causally),
    ("masks of models", "mask-of-last-run",
        "a loop over the last run of keys alone: the first tokens leave with the window, vllm#1304's kind"),
    ("masks of models", "mask-without-gaps", "a row is taken for the range from its first to its last key"),
    ("masks of models", "mask-without-first-key-but-key-0",
        "the first key of a row is left out where its chunk or document begins"),
    ("masks of models", "mask-one-key-early",
        "the first key of a row is off by one: transformers#37414, chunks and documents"),
    ("causal", "causal-next-key", "j <= i + 1: tt-metal#41215"),
    ("causal", "causal-without-own-key", "j < i: onnxruntime#25927's kind"),
    ("causal", "causal-mirrored", "j >= i, the upper triangle"),
    ("causal", "aligned-bottom-right", "the other corner: mlx#2835, cutlass#2336, flash-attention#1778",
        "causal_aligned_bottom_right", forms.has_any_of("is_causal")),
    ("causal", "aligned-bottom-right", "the other corner, if Lq == 1 only: onnxruntime#29020",
        "causal_bottom_right_for_one_query", lambda problem: problem.options.get("is_causal")
        and count_queries_and_keys(problem.inputs)[0] == 1),
    ("causal", "causality-ignored", "the argument has no effect: keras#23038"),
    ("causal", "causality-ignored", "a mask of one's own ends causality: transformers#48748, keras",
        "causal_dropped_when_a_mask_is_given", forms.has_any_of("mask")),
    ("causal", "causality-ignored", "a bias of one's own ends causality", "causal_dropped_when_a_bias_is_given",
        forms.has_any_of("bias")),
    ("windows", "causality-ignored", "a window of one's own ends causality: transformers#26792's kind",
        "causal_dropped_when_a_window_is_given", forms.has_any_of("window")),
    ("windows", "aligned-bottom-right", "the other corner where Lq and Lk differ: mlx#2835's kind",
        "window_aligned_bottom_right", forms.has_any_of("window")),
    ("windows", "window-too-wide-right", "j <= i + right + 1: transformers#47010"),
    ("windows", "window-too-narrow-right", "j < i + right: transformers#47010"),
    ("windows", "window-sides-swapped", "(left, right) read as (right, left)"),
    ("windows", "window-on-both-sides", "what is bounded on one side is bounded on both: jax's local_window_size"),
    ("windows", "window-open-right-as-zero", "no bound on the right read as none to the right: sglang#34273's kind"),
    ("windows", "window-open-left-as-zero", "no bound on the left read as none to the left"),
    ("windows", "window-zero-as-open", "0 is false, so a side of 0 keys counts as none given: zml#763's kind"),
    ("windows", "window-ignored", "the argument has no effect"),
    ("windows", "window-ignored", "an early return where no mask is given: jax#32300",
        "window_ignored_without_a_mask", lambda problem: "mask" not in problem.inputs),
    ("windows", "window-ignored", "a mask of one's own ends the window: transformers#48748's kind",
        "window_dropped_when_a_mask_is_given", forms.has_any_of("mask")),
    ("windows", "window-ignored", "only one of causality and window is used: onnxruntime#14363's kind",
        "window_dropped_when_causal", forms.has_any_of("is_causal")),
    ("windows", "window-ignored", "only one of lengths and window is used: jax#23349's kind",
        "window_dropped_when_key_lengths_are_given", forms.has_any_of("key_lengths")),
    ("windows", "window-or-causality", "either may allow, where both must"),
    ("windows", "window-of-first-query", "every query sees the window of the first one"),
    ("windows", "window-without-own-key", "the current token is left out: onnxruntime#25927"),
    ("windows", "window-inverted", "what is within is forbidden: text#894's polarity"),
    ("empty rows", "empty-rows-nan", "softmax of a row of -inf: pytorch#103749, rten#1321, iree#24178",
        "empty_row_gives_nan"),
    ("empty rows", "empty-rows-uniform", "the mean of the values: keras#21123", "empty_row_is_uniform"),
    ("query offsets", "query-offsets-of-first-batch-entry",
        "the position of the first sequence for all of them: candle-vllm#140, reasoning-from-scratch#33"),
    ("query offsets", "query-offsets-ignored", "causality counts from the first key whatever the cache: onnx#8054"),
    ("query offsets", "query-offsets-one-too-far", "positions start at 1: mlx-lm#390's kind"),
    ("query offsets", "query-offsets-of-longest", "the longest sequence's position for all: left padding is assumed"),
    ("query offsets", "query-offsets-of-next-batch-entry", "batch index off by one"),
    ("biases from positions", "bias-of-first-half-of-heads",
        "every rank counts its heads from 0: flashinfer#1606, Megatron-DeepSpeed#227"),
    ("biases from positions", "bias-of-first-head-of-group",
        "query heads of a group share the bias of its first: a kernel that packs groups"),
    ("biases from positions", "bias-ignored", "no bias once there is a cache: TensorRT-LLM#13870",
        "bias_dropped_behind_a_past", forms.has_any_of("past_key")),
):
    register_fault(**_fault)
# Let a group of four keys be attended as soon as one of them may be.
_register_mask_fault(forms.change_mask, "mask_rounded_up_to_four_keys",
        "a tile is masked as a whole or not at all: tt-metal#41215",
    lambda mask, scores: np.repeat(np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0,
        -mask.shape[-1] % 4)]).reshape(*mask.shape[:-1], -1, 4).any(axis=-1), 4, axis=-1)[..., : mask.shape[-1]])
_register_mask_fault(forms.replace_fill, "mask_filled_with_minus_1e_minus_9", "a typo for -1e9: RibonanzaNet#5",
    lambda biased, allowed, masks: np.where(allowed, biased, np.asarray(-1e-09, biased.dtype)))
# Only where a mask and causality come together: alone, either is a plain -inf in the reference this is taken from.
_register_mask_fault(forms.replace_fill, "mask_times_minus_infinity",
        "(1 - mask) * -inf = NaN at kept slots: onnx 1.19.1's reference",
    lambda biased, allowed, masks: np.where(allowed, biased * (np.nan if masks["mask"] is not None
        and masks["is_causal"] else 1), -np.inf).astype(biased.dtype), diagnosis="fill-minus-infinity")
_register_mask_fault(None, "mask_after_softmax", "weights * mask, not renormalised: vigg_ribonanza#1",
    forms.replace_fill(lambda biased, allowed, masks: biased) | forms.set_forbidden_weights(0.0),
    diagnosis=("weights-not-renormalised", "mask-ignored", "causality-ignored"))
_register_mask_fault(forms.set_forbidden_weights, "masked_weights_leak_1e_10", "a masked weight is tiny, not zero",
    1e-10, stage="weights", dtypes=WIDE_DTYPES)
# where the length is 0 there is nothing to take the mean of
_register_empty_row_fault(forms.replace_attention_steps, "uniform_rows_within_the_length",
    "the mean of the keys that are no padding, not of all keys",
    lambda call: forms.change_filled_logits(lambda logits, seen: np.where(_filled_empty_rows(logits, seen)
        & ~forms.allowed_keys(logits,
        {"key_lengths": call.key_lengths}), -np.inf, seen)) if call.empty_rows == "uniform" else {},
    diagnosis="empty-rows-zero")
_register_empty_row_fault(_change_uniform_row_logits, "uniform_rows_up_to_the_query",
    "the mean of the keys up to the query's own position, as if causality still held",
    lambda logits, seen: np.where(_filled_empty_rows(logits, seen) & ~forms.allowed_keys(logits, {"is_causal": True}),
        -np.inf,
        seen))
_register_empty_row_fault(forms.replace_attention_steps, "uniform_rows_weigh_what_was_masked",
    "a number subtracted from masked scores, not put in their place: keras.layers.Attention in float64",
    lambda call: _change_uniform_row_logits(lambda logits, seen: np.where(_filled_empty_rows(logits, seen),
        call.scores, seen)),
    diagnosis=("empty-rows-unmasked", "empty-rows-zero"))
_register_empty_row_fault(_change_uniform_row_logits, "uniform_rows_take_the_first_key",
    "a row's maximum that starts at the first score: the whole weight on one key",
    lambda logits, seen: np.where(_filled_empty_rows(logits, seen) & ~(np.arange(logits.shape[-1]) == 0), -np.inf,
        seen))
_register_empty_row_fault(forms.change_filled_logits, "nan_rows_spread_through_the_head",
    "NaN in every query of a head in which one has no key: pytorch#160064",
    lambda logits, seen: np.where(np.isnan(seen).any(axis=(-2, -1), keepdims=True), np.nan, seen))
_register_empty_row_fault(forms.change_value_gradient_weights, "uniform_rows_give_values_no_gradient",
    "the backward pass skips a row whose keys are all masked, though the forward pass averaged its values",
    lambda call, weights: np.where(_filled_empty_rows(call.masked_logits, call.logits), np.zeros((), weights.dtype),
        weights),
    stage="grad_value", diagnosis="empty-rows-zero")
_register_fill_fault(_replace_fill_if_given, "fill_where_the_mask_says_yes",
    "masked_fill(mask == 1), where 1 says yes: unturtle#56",
    lambda biased, allowed, fill, masks: np.where(allowed, fill, biased), diagnosis="mask-inverted")
_register_fill_fault(_replace_fill_if_given, "fill_left_out_of_rows_without_a_key",
    "a row without a key is minus infinity: what a guard against empty rows leaves",
    lambda biased, allowed, fill, masks: np.where(~allowed.any(axis=-1, keepdims=True), np.asarray(-np.inf,
        biased.dtype), np.where(allowed, biased, fill)))
_register_fill_fault(_replace_fill_if_given, "fill_as_an_upper_limit",
    "the lesser of score and fill: a fill above a score has no effect",
    lambda biased, allowed, fill, masks: np.where(allowed, biased, np.minimum(biased, fill)))
_register_fill_fault(_replace_fill_if_given, "fill_for_the_mask_alone",
    "the fill is for the mask alone: causality and lengths are minus infinity",
    lambda biased, allowed, fill, masks: np.where(forms.allowed_keys(biased, {**masks, "mask": None}), np.where(allowed,
        biased, fill), np.asarray(-np.inf, biased.dtype)))
_register_fill_fault(_replace_fill_if_given, "fill_in_front_of_the_bias",
    "the bias comes behind the mask, and moves the fill",
    lambda biased, allowed, fill, masks: np.where(allowed, biased, fill + np.asarray(0 if masks["bias"] is None
        else masks["bias"], biased.dtype)))
_register_fill_fault(partial(change_call_arguments, "attention"), "fill_held_back_by_the_softcap",
    "the softcap comes behind the mask, and holds the fill back: onnx#7865",
    lambda call: {} if call.get("mask_fill") is None or call.get("softcap") is None
        else {"mask_fill": float(backend._cap(np.asarray(call["mask_fill"]), call["softcap"]))})
_register_fill_fault("multi_head_attention", "fill_lost_between_projections",
    "the layer does not hand the fill on to its attention: its heads mask by minus infinity",
    lambda *arrays, mask_fill=None, **keywords: backend.multi_head_attention(*arrays, **keywords),
        diagnosis="fill-minus-infinity")
register_fault("mask fills", "attention_gradients._allowed_keys", "gradient_through_a_fill",
    "the gradient goes through a score that the fill took the place of: a mask that is added",
    lambda *_, **__: None, stage="grad_query", diagnosis="gradient-through-fill")
register_fault("mask fills", forms.change_value_gradient_weights, "no_gradient_of_values_behind_a_fill",
    "values behind a mask get no gradient, though a row of fills alone is their mean",
    lambda call, weights: weights if call.mask_fill is None else np.where(forms.allowed_keys_of_call(call), weights, 0),
    stage="grad_value", diagnosis="value-gradient-without-fills")
_register_model_mask_fault("tiles_below_the_diagonal_taken_for_open",
    "a tile below the diagonal is taken for open: FastDeploy#3514, where trees have gaps there",
    lambda rows, causal, key, past: rows | (_key_tile_minus_query_tile(rows, past, _SMALL_TILE_SIZE) < 0))
_register_model_mask_fault("tiles_above_the_diagonal_skipped",
                    "tiles above the diagonal are skipped, whatever the mask says there",
    lambda rows, causal, key, past: rows & (_key_tile_minus_query_tile(rows, past, _SMALL_TILE_SIZE) <= 0))
_register_model_mask_fault("tiles_of_64_above_the_diagonal_skipped",
                    "tiles of 64 above the diagonal are skipped, whatever is seen there",
    lambda rows, causal, key, past: rows & (_key_tile_minus_query_tile(rows, past, _TILE_SIZE) <= 0),
        dtypes=FAST_PATH_DTYPES)
_register_model_mask_fault("tiles_skipped_by_their_first_row", "a tile is skipped if its first row sees nothing in it",
    lambda rows, causal, key, past: rows & _expand_tiles_to_mask(_nonempty_tiles(
        rows, _SMALL_TILE_SIZE, _FIRST_ROW), _SMALL_TILE_SIZE, rows))
_register_model_mask_fault("tiles_of_64_taken_for_open_by_their_ends",
                    "a tile of 64 is taken for open if its first and last rows are",
    lambda rows, causal, key, past: rows | _expand_tiles_to_mask(_nonempty_tiles(rows, _TILE_SIZE, _FIRST_ROW)
        & _nonempty_tiles(rows,
        _TILE_SIZE, _LAST_ROW),
        _TILE_SIZE, rows), dtypes=FAST_PATH_DTYPES)
_register_model_mask_fault("tiles_skipped_by_the_first_of_the_batch",
    "which tiles are skipped is told from the first of the batch: attention-gym#62's kind",
    lambda rows, causal, key, past: rows if rows.ndim < 4 else rows & _expand_tiles_to_mask(_nonempty_tiles(rows[
        :1], _SMALL_TILE_SIZE),
        _SMALL_TILE_SIZE, rows))
_register_model_mask_fault("tiles_skipped_by_the_first_head", "which tiles are skipped is told from the first head",
    lambda rows, causal, key, past: rows if rows.ndim < 4 else rows & _expand_tiles_to_mask(_nonempty_tiles(rows[
        :, :1], _SMALL_TILE_SIZE),
        _SMALL_TILE_SIZE, rows))
_register_model_mask_fault("table_of_tiles_transposed",
    "a square table of tiles, read by columns: pytorch#141126's kind",
    lambda rows, causal, key, past: rows & _expand_tiles_to_mask(table.swapaxes(-1, -2), _SMALL_TILE_SIZE, rows)
        if (table := _nonempty_tiles(rows, _SMALL_TILE_SIZE)).shape[-1] == table.shape[-2] else rows)
_register_model_mask_fault("tiles_of_64_read_as_128", "a table of tiles of 64 read as one of 128: bd3lms#23",
    lambda rows, causal, key, past: rows & _expand_tiles_to_mask(_nonempty_tiles(rows, _TILE_SIZE), 2 * _TILE_SIZE,
        rows)
        if min(rows.shape[-2:]) > _TILE_SIZE else rows, dtypes=FAST_PATH_DTYPES)
_register_model_mask_fault("prefix_one_key_too_short", "the last key of a prefix is left out: j < n - 1",
    lambda rows, causal, key, past: rows & ((key != _last_key_of_first_row(rows)) | causal))
_register_model_mask_fault("prefix_one_key_too_long", "one key behind a prefix is part of it: j <= n",
    lambda rows, causal, key, past: rows | ((key == _last_key_of_first_row(rows) + 1) & rows.any(axis=-1,
        keepdims=True)))
_register_model_mask_fault("keys_ahead_seen_by_all",
                    "a key that any earlier query sees is seen by all: text sees the image behind it",
    lambda rows, causal, key, past: rows | (rows & ~causal).any(axis=-2, keepdims=True))
_register_model_mask_fault("mask_counted_from_the_first_new_key",
                    "positions that do not count the past: transformers#37351's chunks",
    lambda rows, causal, key, past: np.roll(rows, -max(past, 0), axis=-1))
_register_model_mask_fault("tree_taken_for_a_chain",
    "a tree taken for a chain, so that siblings are seen: vllm#20401's kind",
    lambda rows, causal, key, past: rows | (causal & (key >= past)) if past >= 0 else rows)
_register_model_mask_fault("ancestors_dropped", "the diagonal of a tree alone, without the ancestors of a node",
    lambda rows, causal, key, past: rows & ((key < past) | (key == past + np.arange(len(causal))[:, np.newaxis]))
        if past > 0 else rows)
_register_model_mask_fault("committed_keys_masked_causally",
                    "what is committed is masked as the new tokens are, from the first key on",
    lambda rows, causal, key, past: rows & ((key >= past) | forms.causal_mask(*causal.shape)) if past > 0 else rows)
register_fault("masks of models", forms.change_mask, "mask_of_the_first_key_of_a_tile",
    "a document goes on in the next one for a tile: the mask is read once for a tile's keys, its first",
    lambda mask, scores: mask if mask.shape[-1] == 1 else np.asarray(mask[...,
        np.arange(mask.shape[-1]) // _SMALL_TILE_SIZE * _SMALL_TILE_SIZE]), stage="masked")
register_control(_replace_steps_if_filled, "fills_added_up_apart",
    "the sum of exponentials is that of the scores that are kept and that of the fills",
    lambda call, kept: {"_softmax_with_sinks": rebind_globals(backend._softmax_with_sinks, _row_sum=lambda exponentials:
        np.asarray(backend._row_sum(np.where(kept, exponentials, 0)) + backend._row_sum(np.where(kept, 0,
        exponentials))))})
register_control(_replace_steps_if_filled, "values_behind_fills_averaged_apart",
        "the values behind fills are averaged apart, and added",
    lambda call, kept: {"_weighted_sum": lambda weights, value: np.asarray(sum(backend._weighted_sum(np.where(part,
        weights,
        0), value) for part in (kept, ~kept)))})
register_fault("rotary", forms.replace_attention_steps, "query_offsets_do_not_reach_the_rotation",
    "one position of the rotation for the whole batch: reasoning-from-scratch#33",
    lambda call: {"_rotate": lambda inputs, cos, sin, interleaved: backend._rotate(inputs,
        call.rotary_cos[call.past_length :],
        call.rotary_sin[call.past_length :], interleaved)}, stage="rotated_query", diagnosis="rotary-without-offsets")
register_fault("rotary", "_rows_at", "query_offset_of_the_first_batch_entry_in_the_rotation",
    "positions of a batch are those of its first sequence: reasoning-from-scratch#33",
    lambda table, offsets, length: backend._rows_at(table, np.broadcast_to(offsets[:1], offsets.shape), length),
    stage="rotated_query", diagnosis="rotary-of-first-batch-entry")
_register_causal_fault(forms.replace_causality, "causal_by_groups_of_four",
    # every query sees what the group's last one sees
    "decided once per four queries: pytorch#195910",
    lambda queries, keys: np.arange(keys) <= np.minimum(np.arange(queries) // 4 * 4 + 3, queries - 1)[:, np.newaxis],
    diagnosis="causal-by-tiles-of-4")
_register_causal_fault(forms.replace_causality, "causal_beyond_64_queries_ignored",
    "right in the first tile of 64 rows only: gcnasm#21",
    lambda queries, keys: np.asarray(forms.causal_mask(queries, keys) | (np.arange(queries)[:, np.newaxis] >= 64)))
_register_empty_row_fault(forms.change_logits, "empty_row_takes_the_first_key", "argmax of nothing is 0",
    lambda logits: np.where(np.isneginf(logits).all(axis=-1, keepdims=True) & (np.arange(logits.shape[-1]) == 0),
        np.zeros((), logits.dtype), logits))
_register_empty_row_fault(forms.replace_softmax, "empty_row_has_log_sum_exp_zero",
    "log 1 for -inf: merged states weigh an empty one (mlx#2608)",
    lambda logits: (stages := backend.softmax(logits)) | {"log_sum_exp": np.where(
        np.isneginf(stages["log_sum_exp"]), 0, stages["log_sum_exp"])}, stage="log_sum_exp")
_register_window_fault(forms.change_window, "window_split_between_its_sides",
    "the sides read as the width of the whole window",
    lambda left, right: (None if left is None else left // 2, None if right is None else right // 2))
_register_window_fault(forms.replace_window, "window_beyond_64_queries_ignored",
    "right in the first tile of 64 rows only: gcnasm#21's kind",
    lambda scores, masks: np.asarray(forms.window_mask(scores, masks["window"]) | (np.arange(scores.shape[-2])[:,
        np.newaxis] >= 64)))
_register_bias_fault(_change_alibi_slopes, "alibi_slopes_of_one_sequence",
    "2^(-8 (h + 1) / n) for any number of heads: mlx#343, fixed by mlx#3071",
    lambda slopes: slopes if len(slopes) == _round_down_to_power_of_two(len(slopes))
        else np.asarray(2.0 ** (-8 * np.arange(1, len(slopes) + 1) / len(slopes))))
_register_bias_fault(_change_alibi_slopes, "alibi_slopes_without_leaving_any_out",
    "the first slopes of 2n heads, not every other one, where n heads are too few",
    lambda slopes: np.array([*alibi_slopes(below := _round_down_to_power_of_two(len(slopes))), *alibi_slopes(2
        * below)[:
        len(slopes) - below]]))
# of eight heads, this is twice the bias
_register_bias_fault(_change_alibi_slopes, "alibi_slopes_begin_with_one",
    "2^(-8 h / n), the exponent off by one: aprender#2143",
    lambda slopes: np.asarray(slopes * 2.0 ** (8 / _round_down_to_power_of_two(len(slopes)))),
    diagnosis=("bias-twice", "bias-fitted"))
_register_bias_fault(_change_alibi_slopes, "alibi_slopes_sorted",
    "slopes in order for every number of heads: CROMA#12, TensorRT-LLM#1611",
    lambda slopes: np.sort(slopes)[::-1])
_register_bias_fault(_change_alibi_bias, "alibi_of_the_keys_alone",
    "the slope times the key's position: right but with sinks, as rows are shifted",
    lambda slopes, query, key: np.asarray(slopes * (key + 0 * query)))
_register_bias_fault(_change_alibi_bias, "alibi_without_magnitude",
    "a signed distance, which rewards later keys where nothing forbids them",
    lambda slopes, query, key: np.asarray(slopes * (key - query)))
_register_bias_fault(_change_alibi_bias, "alibi_from_the_first_new_key",
    "distances that do not count the past: flash-attention#907's kind",
    lambda slopes, query, key: np.asarray(-slopes * np.abs(query - query[0] - key)))
_register_bias_fault(_change_bias_distances, "relative_distance_of_the_other_sign",
    "the distance p - j for j - p: later keys have the buckets of earlier ones",
    lambda distance: -distance)
_register_bias_fault(_change_bias_distances, "relative_buckets_of_both_sides",
    "the buckets of an encoder in a decoder: text-to-text-transfer-transformer#415",
    lambda distance: np.asarray(np.where(distance < 0, -find_relative_buckets(np.minimum(distance, 0), 32, 128,
        bidirectional=True), distance)))
_register_bias_fault(_change_bias_distances, "relative_buckets_of_one_side",
    "the buckets of a decoder in an encoder: every later key as the own one",
    lambda distance: np.minimum(distance, 0))
_register_bias_fault(_change_bias_distances, "relative_buckets_without_a_logarithm",
    "buckets that end with those of a distance each: no logarithm",
    lambda distance: np.clip(distance, -8, 8))
_register_bias_fault(_change_bias_distances, "relative_buckets_one_distance_late",
    "the step to the next bucket one distance late: > for >=",
    lambda distance: np.asarray(distance - np.sign(distance) * (np.abs(distance) >= 8)))
# fmt: on
