"""Faults of heads and batch entries: how they are split, merged, ordered and shared, and of which value is averaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.numpy_backend import _merge_heads, _repeat_heads
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import (
    in_attention,
    inputs_changed,
    outputs_read_as,
    values_read_as,
    weights_read_as,
)
from attncheck.mutation.mask_forms import bias_read_as, mask_read_as
from attncheck.mutation.mutant import mutant
from attncheck.mutation.variant import Call, Steps

_faulty_heads = partial(mutant, "heads", at="output")
_faulty_value = partial(mutant, "value", at="context")
_faulty_grouped = partial(mutant, "grouped", at="raw_scores")

Three = tuple[Array, Array, Array]


@_faulty_heads(outputs_read_as, at="context", defect="zeros for batch > 0: pytorch#139462")
def output_zero_beyond_the_first_batch_entry(output: Array) -> Array:
    output[1:] = 0
    return output


@_faulty_value(
    outputs_read_as,
    at="context",
    defect="the loop over the value's width ends one early",
    diagnosis="last-value-column-dropped",
)
def last_value_column_zero(output: Array) -> Array:
    output[..., -1] = 0
    return output


@_faulty_value(weights_read_as, at="weights", defect="a single slot of P is lost")
def one_weight_zeroed(weights: Array) -> Array:
    """Zero the weight of the first key of the last row."""
    changed = weights.copy()
    changed[..., -1, 0] = 0
    return changed


HeadMap = Callable[[Array, int, int], Array]
"""Head of keys and values for each query head, from the query heads' numbers, Hkv and H / Hkv."""


def repeated_by(heads_of: HeadMap, inputs: Array, heads: int) -> Array:
    """Give every query head the head that the map says."""
    kv_heads = inputs.shape[1]
    if heads == kv_heads:
        return inputs
    return inputs[:, heads_of(np.arange(heads), kv_heads, heads // kv_heads)]


def _both(heads_of: HeadMap) -> Steps:
    """Read keys and values by another map."""
    return {
        "_repeat_heads": lambda key, value, heads: (
            repeated_by(heads_of, key, heads),
            repeated_by(heads_of, value, heads),
        )
    }


def _keys(heads_of: HeadMap) -> Steps:
    """Read keys by another map than values."""
    return {
        "_repeat_heads": lambda key, value, heads: (
            repeated_by(heads_of, key, heads),
            _repeat_heads(key, value, heads)[1],
        )
    }


def _values(heads_of: HeadMap) -> Steps:
    """Read values by another map than keys."""
    return {
        "_repeat_heads": lambda key, value, heads: (
            _repeat_heads(key, value, heads)[0],
            repeated_by(heads_of, value, heads),
        )
    }


@_faulty_grouped(
    _both, at="raw_scores", defect="head h attends with head h % Hkv: onnx#7274, axlearn#842", diagnosis="heads-tiled"
)
def groups_tiled(head: Array, kv_heads: int, group: int) -> Array:
    return np.asarray(head % kv_heads)


_TILED = "keys and values by different head maps: onnx#7274's kind"


@_faulty_grouped("_repeat_heads", at="raw_scores", defect="all heads of keys and values pooled into one")
def groups_averaged(key: Array, value: Array, heads: int) -> tuple[Array, Array]:
    if key.shape[1] == heads:
        return key, value
    key, value = (each.mean(axis=1, keepdims=True).astype(each.dtype) for each in (key, value))
    return np.repeat(key, heads, axis=1), np.repeat(value, heads, axis=1)


@_faulty_grouped("_repeat_heads", at="raw_scores", defect="the last group reads zeros: pytorch#174861, pytorch#193893")
def last_group_lost(key: Array, value: Array, heads: int) -> tuple[Array, Array]:
    group = heads // key.shape[1]
    key, value = _repeat_heads(key, value, heads)
    if group == 1:
        return key, value
    kept = (np.arange(heads) < heads - group)[:, np.newaxis, np.newaxis]
    return np.where(kept, key, 0), np.where(kept, value, 0)


@_faulty_grouped(
    "_repeat_heads",
    at="context",
    defect="a head of values is read once and not again for its group: pytorch#174861's kind",
)
def values_of_the_first_head_of_each_group_alone(key: Array, value: Array, heads: int) -> tuple[Array, Array]:
    first = (np.arange(heads) % (heads // key.shape[1]) == 0)[:, np.newaxis, np.newaxis]
    key, value = _repeat_heads(key, value, heads)
    return key, np.where(first, value, 0)


def _batch_read_as_group(array: Array, call: Call) -> Array:
    """Spread what each batch entry has over the groups of heads, where there are as many (B, 1, ..) -> (1, H, ..)."""
    batch, heads = call.query.shape[:2]
    kv_heads = call.key.shape[1]
    per_batch = array.ndim == 4 and array.shape[:2] == (batch, 1)
    if not per_batch or kv_heads in (1, heads) or batch != kv_heads:
        return array
    return np.repeat(array.swapaxes(0, 1), heads // batch, axis=1)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_heads("_split_heads", "heads_split_by_view",
    "reshape without transpose: FuxiCTR#30, Chinese-Text-Classification#10",
    lambda inputs, heads: inputs.reshape(inputs.shape[0], heads, inputs.shape[1], inputs.shape[2] // heads), at="query",
    diagnosis="heads-split-by-view")
_faulty_heads("_split_heads", "heads_split_interleaved",
    "head index fastest, not slowest: slapo#46, tensor_parallel#103",
    lambda inputs, heads: inputs.reshape(inputs.shape[0], inputs.shape[1], inputs.shape[2] // heads,
        heads).transpose(0, 3, 1, 2),
    at="query", diagnosis="heads-split-interleaved")
_faulty_heads("_merge_heads", "heads_merged_by_view",
    "reshape without transpose: jsbaan#6, ajhalthor#4, jadore801120#7",
    lambda context: context.reshape(context.shape[0], context.shape[2], context.shape[1] * context.shape[3]),
    diagnosis="heads-merged-by-view")
_faulty_heads("_merge_heads", "heads_merged_in_reverse", "the output projection meets the wrong heads: nntile#347",
    lambda context: _merge_heads(context[:, ::-1]), diagnosis="heads-merged-in-reverse")
_faulty_heads("_merge_heads", "heads_and_batch_confused_on_merge", "(H, B) read as (B, H): gazelle93#1",
    lambda context: _merge_heads(context.swapaxes(0, 1).reshape(context.shape)))
_faulty_heads(values_read_as, "value_of_the_next_head", "head index off by one: HipKittens#22, pytorch#193893",
    lambda value: np.roll(value, -1, axis=1), at="context", diagnosis="value-of-next-head")
_faulty_heads(values_read_as, "value_of_the_first_head",
    "one head's value for all, as with one key-value head: onnx#7274's kind",
    lambda value: value[:, :1], at="context", diagnosis="value-of-first-head")
_faulty_value(values_read_as, "two_values_swapped", "two rows of the value change places",
    lambda value: value[..., [1, 0, *range(2, value.shape[-2])], :] if value.shape[-2] > 1 else value)
_faulty_value(inputs_changed, "value_cut_to_the_key_width", "the output has width D for Dv: pytorch#176767",
    lambda query, key, value: (query, key, value[..., : min(key.shape[-1], value.shape[-1])]))
_faulty_grouped(_keys, "keys_of_groups_tiled", _TILED, groups_tiled, diagnosis="key-heads-tiled")
_faulty_grouped(_values, "values_of_groups_tiled", _TILED, groups_tiled, at="context",
    diagnosis="value-heads-tiled")
_faulty_grouped(_both, "groups_as_large_as_their_number",
    "h // Hkv, right where Hkv is the size of a group: HipKittens#22, FreeToken#177",
    lambda head, kv_heads, group: np.asarray(head // kv_heads % kv_heads),
    diagnosis="groups-as-large-as-their-number")
_faulty_grouped(_both, "one_group_for_all_heads",
    "the first head of keys and values for every query head: pytorch#193893's kind",
    lambda head, kv_heads, group: np.zeros_like(head), diagnosis="groups-of-first-head")
_faulty_grouped(_both, "groups_reversed", "the heads of keys and values from the last to the first",
    lambda head, kv_heads, group: np.asarray(kv_heads - 1 - head // group), diagnosis="groups-in-reverse")
_faulty_grouped(_both, "groups_shifted_by_one_head",
    "the last query head of a group belongs to the next one: FreeToken#177's kind",
    lambda head, kv_heads, group: np.asarray((head + 1) // group % kv_heads), diagnosis="groups-one-head-late")
_faulty_grouped(_both, "groups_of_two_heads", "two query heads per group, whatever their number: HipKittens#22's kind",
    lambda head, kv_heads, group: np.asarray(np.minimum(head // 2, kv_heads - 1)), diagnosis="groups-of-two-heads")
_faulty_grouped(in_attention, "mask_of_batch_entries_taken_for_groups",
    "(B, 1, ..) spread over groups of heads where there are B: mlx-lm#1903, onnx#8108",
    lambda call: mask_read_as(lambda mask, scores: _batch_read_as_group(mask, call)), at="masked")
_faulty_grouped(in_attention, "bias_of_batch_entries_taken_for_groups",
    "(B, 1, ..) spread over groups of heads where there are B: mlx-lm#1903's kind",
    lambda call: bias_read_as(lambda bias, scores: _batch_read_as_group(bias, call)), at="biased")
