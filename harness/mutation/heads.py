"""Faults of heads and batch entries: how they are split, merged, ordered, shared, and laid out in memory.

A layout's fault takes a view's numbers from where those of a contiguous array would lie: it reads the memory that the
view itself lies in, as a kernel does that ignores strides. An array that is contiguous is always read rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import (
    _merge_heads,
    _project,
    _repeat_heads,
    attention,
    gated_attention,
    multi_head_attention,
)
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, bfloat16, call_read_as, tf32
from attncheck.mutation.mutant import ROUNDED, Call, Steps, mutant
from attncheck.spec import PROJECTIONS

_faulty_heads = partial(mutant, "heads", at="output")
_faulty_value = partial(mutant, "value", at="context")
_faulty_grouped = partial(mutant, "grouped", at="raw_scores")
_faulty_gate = partial(mutant, "output gate", at="output")


def _head(heads: int) -> Array:
    """Return the number of each head, (H, 1, 1)."""
    return np.arange(heads)[:, np.newaxis, np.newaxis]


def _batch_read_as_group(array: Array, call: Call) -> Array:
    """Spread what each batch entry has over the groups of heads, where there are as many (B, 1, ..) -> (1, H, ..)."""
    batch, heads = call.query.shape[:2]
    kv_heads = call.key.shape[1]
    per_batch = array.ndim == 4 and array.shape[:2] == (batch, 1)
    if not per_batch or kv_heads in (1, heads) or batch != kv_heads:
        return array
    return np.repeat(array.swapaxes(0, 1), heads // batch, axis=1)


_faulty_layouts = partial(mutant, "layouts", at="raw_scores")
_faulty_projections = partial(mutant, "projections", at="output")


def memory_of(view: Array) -> Array:
    """Return the whole memory that a view lies in, number after number."""
    owner = view
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return np.ravel(owner, order="K")


def is_strided(array: Array) -> bool:
    """Whether numbers of the last axis do not lie side by side."""
    return bool(array.size) and array.shape[-1] > 1 and array.strides[-1] > array.itemsize


def is_broadcast(array: Array) -> bool:
    """Whether some axis has the stride 0."""
    return any(length > 1 and stride == 0 for length, stride in zip(array.shape, array.strides, strict=True))


def is_transposed(array: Array) -> bool:
    """Whether the axes lie in memory in another order, or further apart, or backwards."""
    return not (array.flags.c_contiguous or is_strided(array) or is_broadcast(array))


def is_reversed(array: Array) -> bool:
    """Return whether some stride is negative."""
    return min(array.strides, default=0) < 0


def reaches_far(array: Array) -> bool:
    """Return whether some number lies further behind the first than an offset of 16 bits reaches."""
    reach = sum(stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True))
    return not is_reversed(array) and reach >= 2**16 * array.itemsize


def _offsets(array: Array) -> NDArray[np.int64]:
    """Return how many numbers each element lies behind the first."""
    found = np.zeros(array.shape, np.int64)
    for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        places = np.arange(length) * (stride // array.itemsize)
        found += places.reshape([-1 if each == axis else 1 for each in range(array.ndim)])
    return found


def _behind_the_first(array: Array, offsets: NDArray[np.int64]) -> Array:
    """Return the numbers that lie so far behind the first one."""
    return as_strided(array, (int(offsets.max(initial=0)) + 1,), (array.itemsize,))[offsets]


def _side_by_side(view: Array, axis: int, stride: int) -> Array:
    """Read slices along an axis as if nothing lay between them."""
    strides = list(view.strides)
    if strides[axis] <= stride:
        return view
    strides[axis] = stride
    return as_strided(view, strides=strides).copy()


def _has_rows_in_order(view: Array) -> bool:
    is_in_order = view.ndim < 3 or view.strides[-3] >= view.shape[-2] * view.strides[-2]
    return view.ndim > 1 and is_in_order and view.strides[-1] == view.itemsize


def _where(applies: Callable[[Array], bool], read: Callable[[Array], Array]) -> Steps:
    """Read the inputs of a layout in another way."""
    return {"from_numpy": lambda array: read(array) if array.size and applies(array) else array}


_strided, _transposed, _broadcast, _reversed, _far = (
    partial(_where, each) for each in (is_strided, is_transposed, is_broadcast, is_reversed, reaches_far)
)
_of_masks = partial(_where, lambda array: array.dtype == np.bool_ and not array.flags.c_contiguous)


def _as_contiguous(view: Array) -> Array:
    """Read as many numbers as there are, from the first on; where memory ends, it begins again."""
    return np.resize(memory_of(view), view.shape)


@_faulty_layouts(_broadcast, defect="only the first of equal slices is there: pytorch#191937's kind")
def broadcast_view_read_once(view: Array) -> Array:
    """Read each axis of stride 0 once, and zeros beyond."""
    kept = np.zeros_like(view, subok=False)
    first = tuple(
        slice(1) if stride == 0 and length > 1 else slice(None)
        for length, stride in zip(view.shape, view.strides, strict=True)
    )
    kept[first] = view[first]
    return kept


@_faulty_projections(
    "multi_head_attention", at="output", defect="every head meets the first head's rows of the weight: nntile#347"
)
def projected_before_the_merge(*arrays: Array, **given: Any) -> Stages:
    """Project each head before the merge, all of them with the first head's rows of the weight."""
    stages, weight = multi_head_attention(*arrays, **given), given.get("output_weight")
    if weight is not None:
        context = stages["context"]
        stages["output"] = _project(context.sum(axis=1), weight[: context.shape[-1]], given.get("output_bias"))
    return stages


def _opened(gate: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-gate)))


@_faulty_gate("gated_attention", at="context")
def gate_on_the_values(query: Array, key: Array, value: Array, gate: Array, **given: Any) -> Stages:
    """each value is gated where its query's mean should be: position G2 of arXiv 2505.06708 in the place of G1"""
    if gate.shape != value.shape or given.get("past_value") is not None:
        return gated_attention(query, key, value, gate, **given)
    stages = attention(query, key, value * _opened(gate), **given)
    return stages | {"context": stages["output"]}


_call = partial(call_read_as, "multi_head_attention")
_WEIGHTS = tuple(f"{role}_weight" for role in PROJECTIONS)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
for _fault in forms.misread(
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
):
    mutant(**_fault)
_faulty_heads(forms.outputs_read_as, "output_zero_beyond_the_first_batch_entry", "zeros for batch > 0: pytorch#139462",
    lambda output: np.concatenate([output[:1], np.zeros_like(output[1:])]), at="context")
_faulty_value(forms.weights_read_as, "one_weight_zeroed", "a single slot of P is lost",
    lambda weights: np.where((np.arange(weights.shape[-2])[:, np.newaxis] == weights.shape[-2] - 1)
        & (np.arange(weights.shape[-1]) == 0), 0, weights), at="weights")
_faulty_grouped("_repeat_heads", "groups_averaged", "all heads of keys and values pooled into one",
    lambda key, value, heads: tuple(each if each.shape[1] == heads else np.repeat(
        each.mean(axis=1, keepdims=True).astype(each.dtype), heads, axis=1) for each in (key, value)))
_faulty_grouped("_repeat_heads", "last_group_lost", "the last group reads zeros: pytorch#174861, pytorch#193893",
    lambda key, value, heads: tuple(each if key.shape[1] == heads else np.where(
        _head(heads) < heads - heads // key.shape[1], each, 0) for each in _repeat_heads(key, value, heads)))
_faulty_grouped("_repeat_heads", "values_of_the_first_head_of_each_group_alone",
    "a head of values is read once and not again for its group: pytorch#174861's kind",
    lambda key, value, heads: (_repeat_heads(key, value, heads)[0], np.where(_head(heads) % (heads // key.shape[1])
        == 0, _repeat_heads(key, value, heads)[1], 0)), at="context")
_faulty_heads("_split_heads", "heads_split_by_view",
    "reshape without transpose: FuxiCTR#30, Chinese-Text-Classification#10",
    lambda inputs, heads: inputs.reshape(inputs.shape[0], heads, inputs.shape[1], inputs.shape[2] // heads), at="query",
    diagnosis="heads-split-by-view")
_faulty_heads("_merge_heads", "heads_merged_by_view",
    "reshape without transpose: jsbaan#6, ajhalthor#4, jadore801120#7",
    lambda context: context.reshape(context.shape[0], context.shape[2], context.shape[1] * context.shape[3]),
    diagnosis="heads-merged-by-view")
_faulty_heads("_merge_heads", "heads_and_batch_confused_on_merge", "(H, B) read as (B, H): gazelle93#1",
    lambda context: _merge_heads(context.swapaxes(0, 1).reshape(context.shape)))
_faulty_value(forms.values_read_as, "two_values_swapped", "two rows of the value change places",
    lambda value: value[..., [1, 0, *range(2, value.shape[-2])], :] if value.shape[-2] > 1 else value)
_faulty_value(forms.inputs_changed, "value_cut_to_the_key_width", "the output has width D for Dv: pytorch#176767",
    lambda query, key, value: (query, key, value[..., : min(key.shape[-1], value.shape[-1])]))
_faulty_grouped(forms.in_attention, "mask_of_batch_entries_taken_for_groups",
    "(B, 1, ..) spread over groups of heads where there are B: mlx-lm#1903, onnx#8108",
    lambda call: forms.mask_read_as(lambda mask, scores: _batch_read_as_group(mask, call)), at="masked")
_faulty_grouped(forms.in_attention, "bias_of_batch_entries_taken_for_groups",
    "(B, 1, ..) spread over groups of heads where there are B: mlx-lm#1903's kind",
    lambda call: forms.bias_read_as(lambda bias, scores: _batch_read_as_group(bias, call)), at="biased")
_faulty_gate("_sigmoid", "gate_without_sigmoid", "the projection of the gate is multiplied as it is", lambda gate: gate)
_faulty_gate("_sigmoid", "gate_through_silu", "x sigmoid(x), which gates feed-forward layers",
    lambda gate: gate * _opened(gate))
_faulty_gate("_sigmoid", "gate_of_the_first_element", "a gate for each head is read where each element has its own",
    lambda gate: _opened(np.broadcast_to(gate[..., :1], gate.shape)))
_faulty_gate("gated_attention_gradients._sigmoid_slope", "gradient_of_the_gate_without_its_slope",
    "the sigmoid is differentiated as if it were e^x: s, not s (1 - s)", lambda opened: opened, at="grad_gate")
_faulty_layouts(_strided, "strided_view_read_as_contiguous",
    "every second number belongs to something else: pytorch#181133, pytorch#112577",
    _as_contiguous)
_faulty_layouts(_strided, "last_stride_taken_for_one", "all strides are heeded but the last: pytorch#187506",
    lambda view: as_strided(view, strides=(*view.strides[:-1], view.itemsize)).copy())
_faulty_layouts(_transposed, "transposed_view_read_as_contiguous",
    "(B, L, H, D) in memory read as (B, H, L, D): jax#35916, torch-spyre#4331",
    _as_contiguous)
_faulty_layouts(_transposed, "page_stride_taken_for_a_page",
    "slices lie side by side, whatever the first stride says: pages of keys and values in one array",
    lambda view: _side_by_side(view, 0, view[0].nbytes) if view.ndim == 4 and view.strides[-1] == view.itemsize
        and view.strides[-2] == view.shape[-1] * view.itemsize else view)
_faulty_layouts(_transposed, "fused_tokens_read_side_by_side",
    "the token stride H D for 3 H D of a fused projection: qkv.unbind handed to a kernel of one tensor",
    lambda view: _side_by_side(view, 2, view[0, :, 0].nbytes) if view.ndim == 4
        and view.strides[1] == view.shape[-1] * view.itemsize else view)
_faulty_layouts(_transposed, "padded_rows_read_side_by_side", "the row stride is the width, whatever lies between rows",
    lambda view: _side_by_side(view, -2, view.shape[-1] * view.itemsize) if _has_rows_in_order(view) else view)
_faulty_layouts(_of_masks, "strides_of_the_mask_ignored", "a mask read as if its rows lay side by side",
    _as_contiguous, at="masked")
_faulty_layouts(_reversed, "negative_strides_taken_for_positive", "a flipped view is read forwards",
    lambda view: view[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in view.strides)])
_faulty_layouts(_far, "offsets_in_16_bits", "the offset of a slice is computed in 16 bits and wraps",
    lambda view: _behind_the_first(view, _offsets(view) % 2**16))
# Read merged heads (B, L, H*D) as if they were interleaved, (B, L, D*H).
_faulty_layouts(_transposed, "merged_heads_read_as_interleaved",
    "columns of merged heads dealt out in turn: tensor_parallel#103, slapo#46",
    lambda view: view if view.ndim != 4 or not view.swapaxes(1, 2).flags.c_contiguous else view.swapaxes(1,
        2).reshape(view.shape[0], view.shape[2], view.shape[3], view.shape[1]).transpose(0, 3, 1, 2))
_faulty_layouts(_transposed, "transposed_view_read_one_row_ahead",
    "an offset for another layout: pytorch#195320's kind",
    lambda view: np.roll(view, -1, axis=-2) if view.ndim > 1 else view)
_faulty_layouts(_broadcast, "broadcast_view_read_as_contiguous", "stride 0 taken for a full one: pytorch#191937",
    _as_contiguous)
# Read the last row before its turn where a tile of 32 is left with one.
_faulty_layouts(_broadcast, "last_row_of_a_broadcast_view_stale_where_lk_mod_32_is_1",
    "the tail of a tile of 32 with stride 0: pytorch#191937",
    lambda view: view[..., [*range(view.shape[-2] - 1), view.shape[-2] - 2], :] if view.shape[-2] > 1
        and view.shape[-2] % 32 == 1 else view)
_faulty_projections(_call, "projection_weights_in_bfloat16", "weights stored in 16 bits",
    lambda call: {name: bfloat16(call[name]) for name in _WEIGHTS}, at="query", **ROUNDED)
_faulty_projections(_call, "projections_in_tf32", "float32 matmul silently in TF32: pytorch#161022",
    lambda call: {name: tf32(call[name]) for name in (*PROJECTIONS, *_WEIGHTS)}, at="query", **ROUNDED)
# fmt: on
