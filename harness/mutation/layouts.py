"""Faults of reading memory, and of the projections around multi-head attention.

A layout's fault takes a view's numbers from where those of a contiguous array would lie: it reads the memory that the
view itself lies in, as a kernel does that ignores strides. An array that is contiguous is always read rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _project, multi_head_attention
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, mutant
from attncheck.mutation.variant import Steps
from attncheck.spec import PROJECTIONS

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
    """Whether the axes lie in memory in another order."""
    return not (array.flags.c_contiguous or is_strided(array) or is_broadcast(array))


def _where(applies: Callable[[Array], bool], read: Callable[[Array], Array]) -> Steps:
    """Read the inputs of a layout in another way."""
    return {"from_numpy": lambda array: read(array) if array.size and applies(array) else array}


_strided, _transposed, _broadcast = (partial(_where, each) for each in (is_strided, is_transposed, is_broadcast))


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


Arguments = dict[str, Any]


def _arguments(change: Callable[[Arguments], Arguments]) -> Steps:
    """Call multi-head attention with other arguments: ``change(given)`` are those that differ."""

    def attend(*arrays: Array, **options: Any) -> Stages:
        given = signature(multi_head_attention).bind(*arrays, **options).arguments
        return multi_head_attention(**{**given, **change(given)})

    return {"multi_head_attention": attend}


def _weight_transposed(role: str) -> Steps:
    name = f"{role}_weight"

    def change(given: Arguments) -> Arguments:
        weight = given.get(name)
        return {} if weight is None or weight.shape[0] != weight.shape[1] else {name: weight.T}

    return _arguments(change)


def _bias_dropped(role: str) -> Steps:
    return _arguments(lambda given: {f"{role}_bias": None})


_SILENT = "W^T for W, silent where it is square"
_ROLES = (("query", _SILENT), ("value", _SILENT), ("output", f"{_SILENT}: nntile#347's kind"))
for _role, _defect in _ROLES:
    _faulty_projections(
        _weight_transposed,
        at=_role,
        defect=_defect,
        diagnosis=f"{_role}-weight-transposed",
        name=f"{_role}_weight_transposed",
    )(_role)
for _role, _ in _ROLES:
    _faulty_projections(
        _bias_dropped,
        at=_role,
        defect="the bias is not loaded",
        diagnosis=f"{_role}-bias-missing",
        name=f"{_role}_bias_dropped",
    )(_role)


def _output_bias(change: Callable[[Array, int], Array]) -> Steps:
    """Add another bias to the output: ``change(bias, heads)``."""

    def changed(given: Arguments) -> Arguments:
        bias = given.get("output_bias")
        return {} if bias is None else {"output_bias": change(bias, given["heads"])}

    return _arguments(changed)


@_faulty_projections(_arguments, at="query", defect="(x + b) W for x W + b, silent where the widths are equal")
def projection_bias_before_the_product(given: Arguments) -> Arguments:
    changed: Arguments = {}
    for role in PROJECTIONS:
        inputs, bias = given[role], given.get(f"{role}_bias")
        if bias is not None and inputs.shape[-1] == bias.shape[-1]:
            changed |= {role: inputs + bias, f"{role}_bias": None}
    return changed


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


def _rounded(store: arithmetic.Store, given: Arguments, *names: str) -> Arguments:
    return {name: store(given[name]) for name in names}


_WEIGHTS = tuple(f"{role}_weight" for role in PROJECTIONS)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_layouts(_strided, "strided_view_read_as_contiguous",
    "every second number belongs to something else: pytorch#181133, pytorch#112577",
    _as_contiguous)
_faulty_layouts(_strided, "last_stride_taken_for_one", "all strides are heeded but the last: pytorch#187506",
    lambda view: as_strided(view, strides=(*view.strides[:-1], view.itemsize)).copy())
_faulty_layouts(_transposed, "transposed_view_read_as_contiguous",
    "(B, L, H, D) in memory read as (B, H, L, D): jax#35916, torch-spyre#4331",
    _as_contiguous)
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
_faulty_projections(_output_bias, "output_bias_added_twice", "by the kernel and by its caller",
    lambda bias, heads: np.asarray(bias + bias), diagnosis="output-bias-twice")
_faulty_projections(_output_bias, "output_bias_added_per_head", "each head's part of a split product brings the bias",
    lambda bias, heads: np.asarray(heads * bias), diagnosis="output-bias-of-each-head")
_faulty_projections(_arguments, "key_and_value_inputs_swapped", "Keras takes query, value, key, in that order",
    lambda given: {"key": given["value"], "value": given["key"]} if given["key"].shape == given["value"].shape else {},
    at="key", diagnosis="key-and-value-inputs-swapped")
_faulty_projections(_arguments, "key_and_value_weights_swapped",
    "packed weights read in another order: slapo#46, tt-metal#57366",
    lambda given: {"key_weight": given["value_weight"], "value_weight": given["key_weight"]}
        if given["key_weight"].shape == given["value_weight"].shape else {},
    at="key", diagnosis="key-and-value-weights-swapped")
_faulty_projections(_arguments, "projection_weights_in_bfloat16", "weights stored in 16 bits",
    lambda given: _rounded(arithmetic.bfloat16, given, *_WEIGHTS), at="query", dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
_faulty_projections(_arguments, "projections_in_tf32", "float32 matmul silently in TF32: pytorch#161022",
    lambda given: _rounded(arithmetic.tf32, given, *PROJECTIONS, *_WEIGHTS), at="query", dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
