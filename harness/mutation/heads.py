"""Faults of what attention is handed: heads, projections, layouts in memory, pasts, packed sequences, and pages.

A layout's fault takes a view's numbers from where those of a contiguous array would lie: it reads the memory that the
view itself lies in, as a kernel does that ignores strides. An array that is contiguous is always read rightly. A past
stands in front of projections, too; sequences have limits, and pages have lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import Stages, Window
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, change_call_arguments, round_to_bfloat16, round_to_tf32
from attncheck.mutation.mutant import (
    FAST_PATH_DTYPES,
    ROUNDING_FIELDS,
    AttentionCall,
    StepReplacements,
    register_equivalent,
    register_fault,
)
from attncheck.spec import PROJECTIONS

_register_head_fault = partial(register_fault, "heads", stage="output")
_register_value_fault = partial(register_fault, "value", stage="context")
_register_group_fault = partial(register_fault, "grouped", stage="raw_scores")
_register_gate_fault = partial(register_fault, "output gate", stage="output")


def _head_indices(heads: int) -> Array:
    """Return the number of each head, (H, 1, 1)."""
    return np.arange(heads)[:, np.newaxis, np.newaxis]


def _spread_batch_over_groups(array: Array, call: AttentionCall) -> Array:
    """Spread what each batch entry has over the groups of heads, where there are as many (B, 1, ..) -> (1, H, ..)."""
    batch, heads = call.query.shape[:2]
    kv_heads = call.key.shape[1]
    per_batch = array.ndim == 4 and array.shape[:2] == (batch, 1)
    if not per_batch or kv_heads in (1, heads) or batch != kv_heads:
        return array
    return np.repeat(array.swapaxes(0, 1), heads // batch, axis=1)


_register_layout_fault = partial(register_fault, "layouts", stage="raw_scores")
_register_projection_fault = partial(register_fault, "projections", stage="output")


def values_in_memory(view: Array) -> Array:
    """Return all numbers in the memory of a view, in their order in memory."""
    owner = view
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return np.ravel(owner, order="K")


def is_strided(array: Array) -> bool:
    """Return whether the numbers of the last axis are not contiguous."""
    return bool(array.size) and array.shape[-1] > 1 and array.strides[-1] > array.itemsize


def is_broadcast(array: Array) -> bool:
    """Return whether some axis has the stride 0."""
    return any(length > 1 and stride == 0 for length, stride in zip(array.shape, array.strides, strict=True))


def is_transposed(array: Array) -> bool:
    """Return whether the axes are in another order in memory, or further apart, or backwards."""
    return not (array.flags.c_contiguous or is_strided(array) or is_broadcast(array))


def is_reversed(array: Array) -> bool:
    """Return whether some stride is negative."""
    return min(array.strides, default=0) < 0


def exceeds_16_bit_offsets(array: Array) -> bool:
    """Return whether some number is further from the first than an offset of 16 bits reaches."""
    reach = sum(stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True))
    return not is_reversed(array) and reach >= 2**16 * array.itemsize


def _memory_offsets(array: Array) -> NDArray[np.int64]:
    """Return the distance in memory of each element from the first, in numbers."""
    offsets = np.zeros(array.shape, np.int64)
    for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        places = np.arange(length) * (stride // array.itemsize)
        offsets += places.reshape([-1 if dimension == axis else 1 for dimension in range(array.ndim)])
    return offsets


def _read_at_offsets(array: Array, offsets: NDArray[np.int64]) -> Array:
    """Return the numbers at these distances from the first one."""
    return as_strided(array, (int(offsets.max(initial=0)) + 1,), (array.itemsize,))[offsets]


def _read_without_gaps(view: Array, axis: int, stride: int) -> Array:
    """Read slices along an axis as if there were no gaps between them."""
    strides = list(view.strides)
    if strides[axis] <= stride:
        return view
    strides[axis] = stride
    return as_strided(view, strides=strides).copy()


def _has_rows_in_order(view: Array) -> bool:
    is_in_order = view.ndim < 3 or view.strides[-3] >= view.shape[-2] * view.strides[-2]
    return view.ndim > 1 and is_in_order and view.strides[-1] == view.itemsize


def _change_if_layout(applies: Callable[[Array], bool], read: Callable[[Array], Array]) -> StepReplacements:
    """Change how inputs with this layout are read."""
    return {"from_numpy": lambda array: read(array) if array.size and applies(array) else array}


_change_strided, _change_transposed, _change_broadcast, _change_reversed, _change_far_offsets = (
    partial(_change_if_layout, layout)
    for layout in (is_strided, is_transposed, is_broadcast, is_reversed, exceeds_16_bit_offsets)
)
_change_noncontiguous_masks = partial(
    _change_if_layout, lambda array: array.dtype == np.bool_ and not array.flags.c_contiguous
)


def _read_as_contiguous(view: Array) -> Array:
    """Read the view's number of elements from the start of its memory, and again from the start at its end."""
    return np.resize(values_in_memory(view), view.shape)


@_register_layout_fault(_change_broadcast, defect="only the first of equal slices is there: pytorch#191937's kind")
def broadcast_view_read_once(view: Array) -> Array:
    """Read each axis of stride 0 once, and zeros beyond."""
    kept = np.zeros_like(view, subok=False)
    first = tuple(
        slice(1) if stride == 0 and length > 1 else slice(None)
        for length, stride in zip(view.shape, view.strides, strict=True)
    )
    kept[first] = view[first]
    return kept


@_register_projection_fault(
    "multi_head_attention", stage="output", defect="every head meets the first head's rows of the weight: nntile#347"
)
def projected_before_the_merge(*arrays: Array, **keywords: Any) -> Stages:
    """Project each head before the merge, all of them with the first head's rows of the weight."""
    stages, weight = backend.multi_head_attention(*arrays, **keywords), keywords.get("output_weight")
    if weight is not None:
        context, bias = stages["context"], keywords.get("output_bias")
        stages["output"] = backend._project(context.sum(axis=1), weight[: context.shape[-1]], bias)
    return stages


def _sigmoid(gate: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-gate)))


@_register_gate_fault("gated_attention", stage="context")
def gate_on_the_values(query: Array, key: Array, value: Array, gate: Array, **keywords: Any) -> Stages:
    """each value is gated where its query's mean should be: position G2 of arXiv 2505.06708 in the place of G1"""
    if gate.shape != value.shape or keywords.get("past_value") is not None:
        return backend.gated_attention(query, key, value, gate, **keywords)
    stages = backend.attention(query, key, value * _sigmoid(gate), **keywords)
    return stages | {"context": stages["output"]}


_change_multi_head_call = partial(change_call_arguments, "multi_head_attention")
_PROJECTION_WEIGHTS = tuple(f"{role}_weight" for role in PROJECTIONS)
_register_length_fault = partial(register_fault, "lengths", stage="masked")
_register_cache_fault = partial(register_fault, "caches", stage="masked")


@register_equivalent(
    forms.change_key_lengths,
    defect="a clamp on lengths that are too long",
    proof="j < length is asked for 0 <= j < T alone: every length of T or more allows all of them, every length of 0 "
    "or less none.",
)
def key_lengths_clipped_to_the_keys(lengths: Array, keys: int) -> Array:
    return np.clip(lengths, 0, keys)


def _change_past(function: str, change: Callable[[str, Array, Mapping[str, Any]], Array]) -> StepReplacements:
    """Read the past of a function as another one: ``change(name, past, call)`` for key and value."""

    def changed_past(call: Mapping[str, Any]) -> Mapping[str, Any]:
        names = [name for name in ("key", "value") if call.get("past_key") is not None]
        return {f"past_{name}": change(name, call[f"past_{name}"], call) for name in names}

    return change_call_arguments(function, changed_past)


def _project_past_again(name: str, past: Array, call: Mapping[str, Any]) -> Array:
    batch, heads, length, width = past.shape
    if call[f"{name}_weight"].shape[0] != heads * width:
        return past
    merged = past.swapaxes(1, 2).reshape(batch, length, heads * width)
    return backend._split_heads(backend._project(merged, call[f"{name}_weight"], None), heads)


_register_projected_cache_fault = partial(
    register_fault, "projected caches", partial(_change_past, "multi_head_attention"), stage="raw_scores"
)
_register_sequence_fault = partial(register_fault, "packed sequences", stage="log_sum_exp")
_register_page_fault = partial(register_fault, "paged caches", stage="log_sum_exp")
SequenceLimits = tuple[Array, Array, Array | None]
SequenceSlices = list[tuple[slice, slice, int]]


def _change_sequence_limits(change: Callable[[Array, Array, Array | None], SequenceLimits]) -> StepReplacements:
    """Change the limits and lengths of sequences."""
    return {"packed_attention._sequence_slices": lambda *limits: backend._sequence_slices(*change(*limits))}


def _skip_empty_sequences(queries: Array, keys: Array, lengths: Array | None) -> SequenceLimits:
    starts = queries[np.append(np.diff(queries) > 0, True)]
    return starts, np.append(keys[: len(starts) - 1], keys[-1]), None if lengths is None else lengths[: len(starts) - 1]


def _top_left_mask(queries: int, keys: int, is_causal: bool, window: Window | None) -> Any:
    mask = backend._allowed_from_the_end(keys, keys, is_causal, window)
    if mask is None:
        return None
    rows = np.ones((1, 1, queries, keys), np.bool_)
    rows[..., : min(queries, keys), :] = mask[..., : min(queries, keys), :]
    left = (window or (None, None))[0]
    return rows if left is None else rows & (np.arange(keys) - np.arange(queries)[:, np.newaxis] >= -left)


@register_fault("packed sequences", "packed_attention_gradients", stage="grad_sinks")
def sink_gradients_overwritten(**arguments: Any) -> Stages:
    """gradients of sinks of the last sequence alone, the others overwritten: nki-samples#106's kind"""
    stages = backend.packed_attention_gradients(**arguments)
    if arguments.get("sinks") is None:
        return stages
    queries, keys, lengths = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"], arguments.get("key_lengths")
    last = {name: arguments[name][:, :, queries[-2] :] for name in ("query", "grad_output")}
    last |= {name: arguments[name][:, :, keys[-2] :] for name in ("key", "value")}
    last |= {"cu_seqlens_q": queries[-2:] - queries[-2], "cu_seqlens_k": keys[-2:] - keys[-2]}
    last["key_lengths"] = None if lengths is None else lengths[-1:]
    return {**stages, "grad_sinks": backend.packed_attention_gradients(**{**arguments, **last})["grad_sinks"]}


@register_fault("paged caches", "paged_attention", stage="output")
def unused_slots_are_multiplied_by_zero(
    query: Array, key_pages: Array, value_pages: Array, block_table: Array, key_lengths: Array, **options: Any
) -> Stages:
    """unused slots are masked, not left out, and 0 times NaN is NaN: vllm#42494"""
    parts = []
    is_causal, window = options.pop("is_causal", False), options.pop("window", None)
    for rows, pages, used in zip(query, block_table, key_lengths, strict=True):
        key, value = backend._join_pages(key_pages, pages), backend._join_pages(value_pages, pages)
        mask = np.zeros((1, 1, rows.shape[-2], key.shape[-2]), np.bool_)
        seen = backend._allowed_from_the_end(rows.shape[-2], int(used), is_causal, window)
        mask[..., :used] = True if seen is None else seen
        parts.append(backend.attention(rows[np.newaxis], key, value, mask=mask, **options))
    return {name: np.concatenate([part[name] for part in parts]) for name in ("log_sum_exp", "output")}


@register_equivalent(
    "packed_attention._sequence_slices",
    defect="sequences without a query are left out, of queries, keys and lengths alike",
    proof="what has no query has no row in any result",
)
def sequences_without_queries_left_out(
    cu_seqlens_q: Array, cu_seqlens_k: Array, key_lengths: Array | None
) -> SequenceSlices:
    parts = backend._sequence_slices(cu_seqlens_q, cu_seqlens_k, key_lengths)
    return [part for part in parts if part[0].start < part[0].stop]


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
for _fault in forms.faults_from_readings(
    ("heads", "heads-split-interleaved", "head index fastest, not slowest: slapo#46, tensor_parallel#103"),
    ("heads", "heads-merged-in-reverse", "the output projection meets the wrong heads: nntile#347"),
    ("grouped", "heads-tiled", "head h attends with head h % Hkv: onnx#7274, axlearn#842"),
    ("grouped", "key-heads-tiled", "keys and values by different head maps: onnx#7274's kind"),
    ("grouped", "value-heads-tiled", "keys and values by different head maps: onnx#7274's kind"),
    ("grouped", "groups-as-large-as-their-number",
        "h // Hkv, right where Hkv is the size of a group: HipKittens#22, FreeToken#177"),
    ("grouped", "groups-of-first-head",
        "the first head of keys and values for every query head: pytorch#193893's kind"),
    ("grouped", "groups-in-reverse", "the heads of keys and values from the last to the first"),
    ("grouped", "groups-one-head-late",
        "the last query head of a group belongs to the next one: FreeToken#177's kind"),
    ("grouped", "groups-of-two-heads", "two query heads per group, whatever their number: HipKittens#22's kind"),
    ("projections", "query-weight-transposed", "W^T for W, silent where it is square"),
    ("projections", "value-weight-transposed", "W^T for W, silent where it is square"),
    ("projections", "output-weight-transposed", "W^T for W, silent where it is square: nntile#347's kind"),
    ("projections", "query-bias-projected", "(x + b) W for x W + b, silent where the widths are equal"),
    ("projections", "output-bias-of-each-head", "each head's part of a split product brings the bias"),
    ("projections", "key-and-value-inputs-swapped", "Keras takes query, value, key, in that order"),
    ("projections", "key-and-value-weights-swapped",
        "packed weights read in another order: slapo#46, tt-metal#57366"),
    ("lengths", "key-lengths-of-heads", "one length per head where B == H: lighthouse#77's kind"),
    ("lengths", "key-lengths-ignored", "the argument has no effect: jax#23349"),
    ("lengths", "key-lengths-ignored", "only one of lengths and causality is used: onnxruntime#14363",
        "key_lengths_dropped_when_causal", forms.has_any_of("is_causal")),
    ("lengths", "key-lengths-ignored", "only one of lengths and mask is used: jax#23349's kind",
        "key_lengths_dropped_when_a_mask_is_given", forms.has_any_of("mask")),
    ("lengths", "mask-ignored", "only one of lengths and mask is used: onnxruntime#28379's kind",
        "mask_dropped_when_key_lengths_are_given", forms.has_any_of("key_lengths")),
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
        "window_moved_one_too_far_behind_a_past", forms.has_any_of("past_key")),
    ("caches", "aligned-top-left", "positions start at 0 in every step: transformers#39408's kind",
        "window_counted_from_the_first_key_behind_a_past", forms.has_any_of("past_key")),
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
        "values_one_step_behind_their_keys", forms.has_any_of("past_key")),
    ("projected caches", "past-viewed", "a cache of (B, H, L, D) viewed as (B, L, H, D): FuxiCTR#30's kind",
        "past_heads_taken_for_positions", forms.is_operation("multi_head_attention")),
    # The values, and not the keys: of both together nothing would show without positions.
    ("projected caches", "past-values-one-position-late",
        "a ring buffer returned as it lies, newer keys first: moshi#241", "past_in_the_order_of_a_ring",
        forms.is_operation("multi_head_attention")),
):
    register_fault(**_fault)
_register_head_fault(forms.change_outputs, "output_zero_beyond_the_first_batch_entry",
    "zeros for batch > 0: pytorch#139462",
    lambda output: np.concatenate([output[:1], np.zeros_like(output[1:])]), stage="context",
    diagnosis="batch-entries-unwritten")
_register_value_fault(forms.change_weights, "one_weight_zeroed", "a single slot of P is lost",
    lambda weights: np.where((np.arange(weights.shape[-2])[:, np.newaxis] == weights.shape[-2] - 1)
        & (np.arange(weights.shape[-1]) == 0), 0, weights), stage="weights")
_register_group_fault("_repeat_heads", "groups_averaged", "all heads of keys and values pooled into one",
    lambda key, value, heads: tuple(array if array.shape[1] == heads else np.repeat(
        array.mean(axis=1, keepdims=True).astype(array.dtype), heads, axis=1) for array in (key, value)))
_register_group_fault("_repeat_heads", "last_group_lost", "the last group reads zeros: pytorch#174861, pytorch#193893",
    lambda key, value, heads: tuple(array if key.shape[1] == heads else np.where(
        _head_indices(heads) < heads - heads // key.shape[1], array, 0) for array in backend._repeat_heads(
            key, value, heads)))
_register_group_fault("_repeat_heads", "values_of_the_first_head_of_each_group_alone",
    "a head of values is read once and not again for its group: pytorch#174861's kind",
    lambda key, value, heads: (backend._repeat_heads(key, value, heads)[0], np.where(_head_indices(heads)
        % (heads // key.shape[1]) == 0, backend._repeat_heads(key, value, heads)[1], 0)), stage="context")
_register_head_fault("_split_heads", "heads_split_by_view",
    "reshape without transpose: FuxiCTR#30, Chinese-Text-Classification#10",
    lambda inputs, heads: inputs.reshape(inputs.shape[0], heads, inputs.shape[1], inputs.shape[2] // heads),
        stage="query",
    diagnosis="heads-split-by-view")
_register_head_fault("_merge_heads", "heads_merged_by_view",
    "reshape without transpose: jsbaan#6, ajhalthor#4, jadore801120#7",
    lambda context: context.reshape(context.shape[0], context.shape[2], context.shape[1] * context.shape[3]),
    diagnosis="heads-merged-by-view")
_register_head_fault("_merge_heads", "heads_and_batch_confused_on_merge", "(H, B) read as (B, H): gazelle93#1",
    lambda context: backend._merge_heads(context.swapaxes(0, 1).reshape(context.shape)))
_register_value_fault(forms.change_values, "two_values_swapped", "two rows of the value change places",
    lambda value: value[..., [1, 0, *range(2, value.shape[-2])], :] if value.shape[-2] > 1 else value)
_register_value_fault(forms.change_query_key_value, "value_cut_to_the_key_width",
    "the output has width D for Dv: pytorch#176767",
    lambda query, key, value: (query, key, value[..., : min(key.shape[-1], value.shape[-1])]))
_register_group_fault(forms.replace_attention_steps, "mask_of_batch_entries_taken_for_groups",
    "(B, 1, ..) spread over groups of heads where there are B: mlx-lm#1903, onnx#8108",
    lambda call: forms.change_mask(lambda mask, scores: _spread_batch_over_groups(mask, call)), stage="masked")
_register_group_fault(forms.replace_attention_steps, "bias_of_batch_entries_taken_for_groups",
    "(B, 1, ..) spread over groups of heads where there are B: mlx-lm#1903's kind",
    lambda call: forms.change_bias(lambda bias, scores: _spread_batch_over_groups(bias, call)), stage="biased")
_register_gate_fault("_sigmoid", "gate_without_sigmoid", "the projection of the gate is multiplied as it is",
    lambda gate: gate)
_register_gate_fault("_sigmoid", "gate_through_silu", "x sigmoid(x), which gates feed-forward layers",
    lambda gate: gate * _sigmoid(gate))
_register_gate_fault("_sigmoid", "gate_of_the_first_element",
    "a gate for each head is read where each element has its own",
    lambda gate: _sigmoid(np.broadcast_to(gate[..., :1], gate.shape)))
_register_gate_fault("gated_attention_gradients._sigmoid_slope", "gradient_of_the_gate_without_its_slope",
    "the sigmoid is differentiated as if it were e^x: s, not s (1 - s)", lambda opened: opened, stage="grad_gate")
_register_layout_fault(_change_strided, "strided_view_read_as_contiguous",
    "every second number belongs to something else: pytorch#181133, pytorch#112577",
    _read_as_contiguous)
_register_layout_fault(_change_strided, "last_stride_taken_for_one",
    "all strides are heeded but the last: pytorch#187506",
    lambda view: as_strided(view, strides=(*view.strides[:-1], view.itemsize)).copy())
_register_layout_fault(_change_transposed, "transposed_view_read_as_contiguous",
    "(B, L, H, D) in memory read as (B, H, L, D): jax#35916, torch-spyre#4331",
    _read_as_contiguous)
_register_layout_fault(_change_transposed, "page_stride_taken_for_a_page",
    "slices lie side by side, whatever the first stride says: pages of keys and values in one array",
    lambda view: _read_without_gaps(view, 0, view[0].nbytes) if view.ndim == 4 and view.strides[-1] == view.itemsize
        and view.strides[-2] == view.shape[-1] * view.itemsize else view)
_register_layout_fault(_change_transposed, "fused_tokens_read_side_by_side",
    "the token stride H D for 3 H D of a fused projection: qkv.unbind handed to a kernel of one tensor",
    lambda view: _read_without_gaps(view, 2, view[0, :, 0].nbytes) if view.ndim == 4
        and view.strides[1] == view.shape[-1] * view.itemsize else view)
_register_layout_fault(_change_transposed, "padded_rows_read_side_by_side",
    "the row stride is the width, whatever lies between rows",
    lambda view: _read_without_gaps(view, -2, view.shape[-1] * view.itemsize) if _has_rows_in_order(view) else view)
_register_layout_fault(_change_noncontiguous_masks, "strides_of_the_mask_ignored",
    "a mask read as if its rows lay side by side",
    _read_as_contiguous, stage="masked")
_register_layout_fault(_change_reversed, "negative_strides_taken_for_positive", "a flipped view is read forwards",
    lambda view: view[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in view.strides)])
_register_layout_fault(_change_far_offsets, "offsets_in_16_bits",
    "the offset of a slice is computed in 16 bits and wraps",
    lambda view: _read_at_offsets(view, _memory_offsets(view) % 2**16))
# Read merged heads (B, L, H*D) as if they were interleaved, (B, L, D*H).
_register_layout_fault(_change_transposed, "merged_heads_read_as_interleaved",
    "columns of merged heads dealt out in turn: tensor_parallel#103, slapo#46",
    lambda view: view if view.ndim != 4 or not view.swapaxes(1, 2).flags.c_contiguous else view.swapaxes(1,
        2).reshape(view.shape[0], view.shape[2], view.shape[3], view.shape[1]).transpose(0, 3, 1, 2))
_register_layout_fault(_change_transposed, "transposed_view_read_one_row_ahead",
    "an offset for another layout: pytorch#195320's kind",
    lambda view: np.roll(view, -1, axis=-2) if view.ndim > 1 else view)
_register_layout_fault(_change_broadcast, "broadcast_view_read_as_contiguous",
    "stride 0 taken for a full one: pytorch#191937",
    _read_as_contiguous)
# Read the last row before its turn where a tile of 32 is left with one.
_register_layout_fault(_change_broadcast, "last_row_of_a_broadcast_view_stale_where_lk_mod_32_is_1",
    "the tail of a tile of 32 with stride 0: pytorch#191937",
    lambda view: view[..., [*range(view.shape[-2] - 1), view.shape[-2] - 2], :] if view.shape[-2] > 1
        and view.shape[-2] % 32 == 1 else view)
_register_projection_fault(_change_multi_head_call, "projection_weights_in_bfloat16", "weights stored in 16 bits",
    lambda call: {name: round_to_bfloat16(call[name]) for name in _PROJECTION_WEIGHTS}, stage="query",
        **ROUNDING_FIELDS)
_register_projection_fault(_change_multi_head_call, "projections_in_tf32",
    "float32 matmul silently in TF32: pytorch#161022",
    lambda call: {name: round_to_tf32(call[name]) for name in (*PROJECTIONS, *_PROJECTION_WEIGHTS)}, stage="query",
        **ROUNDING_FIELDS)
for _fault in forms.faults_from_readings(
    ("packed sequences", "limits-one-too-late", "the first key of the next document is seen: nanoVLM#204"),
    ("packed sequences", "sequences-ignored",
        "one mask over all documents: transformers#46634, open-instruct#669"),
    ("packed sequences", "key-lengths-one-too-long", "j <= length", "used_keys_one_too_many",
        forms.is_operation("packed_attention")),
    ("paged caches", "block-table-ignored", "the table has no effect: pages are read in their order"),
    ("paged caches", "block-table-transposed", "the table is read with the strides of its transpose"),
    ("paged caches", "slots-in-reverse", "slots of a page are read in reverse"),
    ("paged caches", "pages-with-heads-first", "heads and slots of a page are confused: NHD for HND"),
    ("paged caches", "key-lengths-up-to-pages", "whole pages are attended"),
    ("paged caches", "key-lengths-down-to-pages", "the last page is dropped where it is not full"),
    stage="log_sum_exp",
):
    register_fault(**_fault)
_register_length_fault(forms.change_key_lengths, "key_lengths_of_the_longest_batch_entry",
    "padding up to the longest entry is attended",
    lambda lengths, keys: np.full_like(lengths, lengths.max(initial=0)), diagnosis="key-lengths-of-longest")
_register_length_fault(forms.change_key_lengths, "key_length_of_zero_taken_for_all",
    "0 is false, so an empty entry counts as one without a length: pytorch#81077's kind",
    lambda lengths, keys: np.where(lengths == 0, keys, lengths), diagnosis="key-lengths-of-zero-for-all")
_register_length_fault(forms.replace_fill, "key_lengths_filled_with_minus_1e4",
    "a finite fill for padding: onnxruntime#14363, transformers#12109",
    lambda biased, allowed, masks: np.where(allowed, biased, -np.inf if masks["key_lengths"] is None
        else np.asarray(-10000.0, biased.dtype)),
    diagnosis=("empty-rows-uniform", "masked-at-minus-1e4", "fill-of-minus-1e4"))
_register_cache_fault(partial(_change_past, "attention"), "past_beyond_its_first_page_repeated",
    "every page of 16 keys read from the first one: tt-metal#41215's kind",
    lambda name, past, call: past[..., np.arange(past.shape[-2]) % 16, :], stage="raw_scores")
_register_cache_fault(forms.replace_attention_steps, "causal_mask_behind_a_past_aligned_top_left",
    "a mask recognised as causal becomes is_causal, which knows no past: transformers#30437, pytorch#108108",
    lambda call: forms.change_mask(lambda mask, scores: forms.causal_mask(*scores.shape[-2:]) if call.past_length
        and mask.shape[-1] > 1 and (mask == np.tri(scores.shape[-2], scores.shape[-1], call.past_length,
        dtype=bool)).all()
        else mask),
    diagnosis="aligned-top-left")
_register_projected_cache_fault("past_projected_again",
    "the whole sequence goes through the projection, silent where H D = E",
    _project_past_again)
_register_projected_cache_fault("past_biased_again",
    "the bias is added behind the cache, so that it counts once more in every step",
    lambda name, past, call: past if call.get(f"{name}_bias") is None
        else np.asarray(past + call[f"{name}_bias"].reshape(past.shape[1], 1, -1)))
register_fault("rotary", partial(change_call_arguments, "attention"), "rotary_applied_to_the_past_again",
    "keys are cached behind the rotation, and all of the cache is rotated in every step",
    lambda call: {} if call.get("rotary_cos") is None or call.get("past_key") is None
        else {"past_key": backend._rotate(call["past_key"], call["rotary_cos"], call["rotary_sin"],
            call.get("rotary_interleaved", False))}, stage="rotated_key", diagnosis="rotary-of-past-again")
_register_sequence_fault(_change_sequence_limits, "empty_sequences_of_queries_skipped",
    "empty sequences are skipped in one list alone: flash-attention#2562's kind", _skip_empty_sequences)
_register_sequence_fault("packed_attention._allowed_from_the_end", "packed_causality_aligned_top_left",
    "the other corner in each document: flash-attention before 2.1",
    _top_left_mask, diagnosis="aligned-top-left")
_register_sequence_fault(_change_sequence_limits, "limits_of_queries_taken_for_keys",
    "cu_seqlens_q passed for cu_seqlens_k: flash-attention#1713's kind",
    lambda queries, keys, lengths: (queries, np.minimum(queries, keys[-1]), None), diagnosis="limits-of-queries")
_register_sequence_fault("packed_attention._sequence_slices", "documents_cut_at_sixteen_keys",
    "the longest document is cut at a tile: max_seqlen too small",
    lambda *limits: [(queries, slice(keys.start, min(keys.stop, keys.start + 16)), 0)
        for queries, keys, _ in backend._sequence_slices(*limits)])
_register_sequence_fault("packed_attention_gradients._sequence_slices", "gradients_of_sequences_that_see_each_other",
    "no limits in the backward pass: transformers#46634's kind",
    lambda cu_seqlens_q, cu_seqlens_k, key_lengths: backend._sequence_slices(
        cu_seqlens_q[[0, -1]], cu_seqlens_k[[0, -1]], None), stage="grad_query")
_register_sequence_fault("packed_attention_gradients", "key_gradients_of_the_next_sequence",
    "gradients of keys are written from the start of the pack: AReaL#1103's kind",
    lambda **keywords: (gradients := backend.packed_attention_gradients(**keywords)) | {
        "grad_key": np.roll(gradients["grad_key"], 1, axis=-2)}, stage="grad_key")
_register_page_fault("_join_pages", "last_page_is_the_one_before",
    "a stale page: vllm#47042, the last page of a sequence is the one before it",
    lambda pages, table: backend._join_pages(pages, np.append(table[:-1], table[-2:][:1])))
_register_page_fault("_join_pages", "large_pages_read_by_one_tile",
    "slots beyond 128 of a page are those of its first tile: flashinfer#4347",
    lambda pages, table: backend._join_pages(pages[:, np.arange(pages.shape[1]) % 128], table), dtypes=FAST_PATH_DTYPES)
_register_page_fault("paged_attention._allowed_from_the_end", "paged_causality_aligned_top_left",
    "the other corner behind a cache", _top_left_mask, diagnosis="aligned-top-left")
# fmt: on
