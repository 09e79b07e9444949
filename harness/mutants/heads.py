"""Faults of heads and batch entries: how the width is split, merged and ordered; and of which value is averaged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import merge_heads
from attncheck.mutants.variant import Variant


def _view_split(inputs: Array, heads: int) -> Array:
    batch, length, width = inputs.shape
    return inputs.reshape(batch, heads, length, width // heads)


def _interleaved_split(inputs: Array, heads: int) -> Array:
    batch, length, width = inputs.shape
    return inputs.reshape(batch, length, width // heads, heads).transpose(0, 3, 1, 2)


def _view_merge(context: Array) -> Array:
    batch, heads, length, width = context.shape
    return context.reshape(batch, length, heads * width)


def _batch_for_heads(context: Array) -> Array:
    batch, heads, length, width = context.shape
    return merge_heads(context.swapaxes(0, 1).reshape(batch, heads, length, width))


def _value(change: Callable[[Array], Array]) -> Variant:
    return Variant(average=lambda logits, weights, value: weights @ change(value))


def _first_two_swapped(value: Array) -> Array:
    return value[..., [1, 0, *range(2, value.shape[-2])], :] if value.shape[-2] > 1 else value


def _largest_zeroed(weights: Array, allowed: Array) -> Array:
    """Zero the weight of the first key of the last row."""
    changed = weights.copy()
    changed[..., -1, 0] = 0
    return changed


def _last_column_zero(logits: Array, weights: Array, value: Array) -> Array:
    output = np.asarray(weights @ value)
    output[..., -1] = 0
    return output


def _first_batch_entry_only(logits: Array, weights: Array, value: Array) -> Array:
    output = np.asarray(weights @ value)
    output[1:] = 0
    return output


def _as_wide_as_the_key(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    width = min(key.shape[-1], value.shape[-1])
    return query, key, value[..., :width]


MUTANTS = (
    Mutant(
        "heads_split_by_view",
        "heads",
        "reshape without transpose: FuxiCTR#30, Chinese-Text-Classification#10",
        Variant(split=_view_split),
        "query",
        diagnosis=("heads-split-by-view",),
    ),
    Mutant(
        "heads_split_interleaved",
        "heads",
        "head index fastest, not slowest: slapo#46, tensor_parallel#103",
        Variant(split=_interleaved_split),
        "query",
        diagnosis=("heads-split-interleaved",),
    ),
    Mutant(
        "heads_merged_by_view",
        "heads",
        "reshape without transpose: jsbaan#6, ajhalthor#4, jadore801120#7",
        Variant(merge=_view_merge),
        "output",
        diagnosis=("heads-merged-by-view",),
    ),
    Mutant(
        "heads_merged_in_reverse",
        "heads",
        "the output projection meets the wrong heads: nntile#347",
        Variant(merge=lambda context: merge_heads(context[:, ::-1])),
        "output",
        diagnosis=("heads-merged-in-reverse",),
    ),
    Mutant(
        "heads_and_batch_confused_on_merge",
        "heads",
        "(H, B) read as (B, H): gazelle93#1",
        Variant(merge=_batch_for_heads),
        "output",
    ),
    Mutant(
        "value_of_the_next_head",
        "heads",
        "head index off by one: HipKittens#22, pytorch#193893",
        _value(lambda value: np.roll(value, -1, axis=1)),
        "context",
        diagnosis=("value-of-next-head",),
    ),
    Mutant(
        "value_of_the_first_head",
        "heads",
        "one head's value for all, as with one key-value head: onnx#7274's kind",
        _value(lambda value: value[:, :1]),
        "context",
    ),
    Mutant(
        "output_zero_beyond_the_first_batch_entry",
        "heads",
        "zeros for batch > 0: pytorch#139462",
        Variant(average=_first_batch_entry_only),
        "context",
    ),
    Mutant("two_values_swapped", "value", "two rows of the value change places", _value(_first_two_swapped), "context"),
    Mutant(
        "last_value_column_zero",
        "value",
        "the loop over the value's width ends one early",
        Variant(average=_last_column_zero),
        "context",
    ),
    Mutant(
        "one_weight_zeroed", "value", "a single slot of P is lost", Variant(after_softmax=_largest_zeroed), "weights"
    ),
    Mutant(
        "value_cut_to_the_key_width",
        "value",
        "the output has width D for Dv: pytorch#176767",
        Variant(inputs=_as_wide_as_the_key),
        "context",
    ),
)
