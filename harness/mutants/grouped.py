"""Faults of grouped heads: which query head attends with which head of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.mutants.mask_steps import ALLOWED, MaskRequest, add_bias
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import repeat_heads
from attncheck.mutants.variant import Variant

HeadMap = Callable[[Array, int, int], Array]
"""Head of keys and values for each query head, from the query heads' numbers, Hkv and H / Hkv."""


def _repeat_by(heads_of: HeadMap) -> Callable[[Array, int], Array]:
    def repeat(inputs: Array, heads: int) -> Array:
        kv_heads = inputs.shape[1]
        if heads == kv_heads:
            return inputs
        return inputs[:, heads_of(np.arange(heads), kv_heads, heads // kv_heads)]

    return repeat


def _both(heads_of: HeadMap) -> Variant:
    return Variant(repeat_key=_repeat_by(heads_of), repeat_value=_repeat_by(heads_of))


def _tiled(head: Array, kv_heads: int, group: int) -> Array:
    return np.asarray(head % kv_heads)


def _by_number_of_groups(head: Array, kv_heads: int, group: int) -> Array:
    return np.asarray(head // kv_heads % kv_heads)


def _last_of_group_in_the_next(head: Array, kv_heads: int, group: int) -> Array:
    return np.asarray((head + 1) // group % kv_heads)


def _pairs(head: Array, kv_heads: int, group: int) -> Array:
    """Take every group for one of two heads."""
    return np.asarray(np.minimum(head // 2, kv_heads - 1))


def _last_group_lost(inputs: Array, heads: int) -> Array:
    repeated = repeat_heads(inputs, heads)
    group = heads // inputs.shape[1]
    if group == 1:
        return repeated
    return np.where((np.arange(heads) < heads - group)[:, np.newaxis, np.newaxis], repeated, 0)


def _beyond_first_of_group_zero(inputs: Array, heads: int) -> Array:
    repeated = repeat_heads(inputs, heads)
    first = np.arange(heads) % (heads // inputs.shape[1]) == 0
    return np.where(first[:, np.newaxis, np.newaxis], repeated, 0)


def _averaged(inputs: Array, heads: int) -> Array:
    if inputs.shape[1] == heads:
        return inputs
    mean = inputs.mean(axis=1, keepdims=True).astype(inputs.dtype)
    return np.repeat(mean, heads, axis=1)


def _batch_read_as_group(array: Array, request: MaskRequest) -> Array:
    """Spread what each batch entry has over the groups of heads, where there are as many (B, 1, ..) -> (1, H, ..)."""
    batch, heads = request.scores.shape[:2]
    per_batch = array.ndim == 4 and array.shape[:2] == (batch, 1)
    if not per_batch or request.kv_heads in (1, heads) or batch != request.kv_heads:
        return array
    return np.repeat(array.swapaxes(0, 1), heads // batch, axis=1)


def _mask_of_groups(request: MaskRequest) -> Array:
    mask = request.mask
    return ALLOWED(request if mask is None else replace(request, mask=_batch_read_as_group(mask, request)))


def _bias_of_groups(request: MaskRequest) -> Array:
    bias = request.bias
    return add_bias(request if bias is None else replace(request, bias=_batch_read_as_group(bias, request)))


MUTANTS = (
    Mutant(
        "groups_tiled",
        "grouped",
        "head h attends with head h % Hkv: onnx#7274, axlearn#842",
        _both(_tiled),
        "raw_scores",
        diagnosis=("heads-tiled",),
    ),
    Mutant(
        "keys_of_groups_tiled",
        "grouped",
        "keys and values by different head maps: onnx#7274's kind",
        Variant(repeat_key=_repeat_by(_tiled)),
        "raw_scores",
    ),
    Mutant(
        "values_of_groups_tiled",
        "grouped",
        "keys and values by different head maps: onnx#7274's kind",
        Variant(repeat_value=_repeat_by(_tiled)),
        "context",
    ),
    Mutant(
        "groups_as_large_as_their_number",
        "grouped",
        "h // Hkv, right where Hkv is the size of a group: HipKittens#22, FreeToken#177",
        _both(_by_number_of_groups),
        "raw_scores",
    ),
    Mutant(
        "one_group_for_all_heads",
        "grouped",
        "the first head of keys and values for every query head: pytorch#193893's kind",
        _both(lambda head, kv_heads, group: np.zeros_like(head)),
        "raw_scores",
    ),
    Mutant(
        "groups_reversed",
        "grouped",
        "the heads of keys and values from the last to the first",
        _both(lambda head, kv_heads, group: kv_heads - 1 - head // group),
        "raw_scores",
    ),
    Mutant(
        "groups_shifted_by_one_head",
        "grouped",
        "the last query head of a group belongs to the next one: FreeToken#177's kind",
        _both(_last_of_group_in_the_next),
        "raw_scores",
    ),
    Mutant(
        "groups_of_two_heads",
        "grouped",
        "two query heads per group, whatever their number: HipKittens#22's kind",
        _both(_pairs),
        "raw_scores",
    ),
    Mutant(
        "groups_averaged",
        "grouped",
        "all heads of keys and values pooled into one",
        Variant(repeat_key=_averaged, repeat_value=_averaged),
        "raw_scores",
    ),
    Mutant(
        "last_group_lost",
        "grouped",
        "the last group reads zeros: pytorch#174861, pytorch#193893",
        Variant(repeat_key=_last_group_lost, repeat_value=_last_group_lost),
        "raw_scores",
    ),
    Mutant(
        "values_of_the_first_head_of_each_group_alone",
        "grouped",
        "a head of values is read once and not again for its group: pytorch#174861's kind",
        Variant(repeat_value=_beyond_first_of_group_zero),
        "context",
    ),
    Mutant(
        "mask_of_batch_entries_taken_for_groups",
        "grouped",
        "(B, 1, ..) spread over groups of heads where there are B: mlx-lm#1903, onnx#8108",
        Variant(allowed=_mask_of_groups),
        "masked",
    ),
    Mutant(
        "bias_of_batch_entries_taken_for_groups",
        "grouped",
        "(B, 1, ..) spread over groups of heads where there are B: mlx-lm#1903's kind",
        Variant(add_bias=_bias_of_groups),
        "biased",
    ),
)
