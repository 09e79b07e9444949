"""Faults of reading memory: a view's numbers taken from where those of a contiguous array would lie.

Each reads the memory that the view itself lies in, as a kernel does that ignores strides. An array that is contiguous
is always read rightly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import as_strided

from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant


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


def _where(applies: Callable[[Array], bool], read: Callable[[Array], Array]) -> Variant:
    return Variant(receive=lambda array: read(array) if array.size and applies(array) else array)


def _as_contiguous(view: Array) -> Array:
    """Read as many numbers as there are, from the first on; where memory ends, it begins again."""
    return np.resize(memory_of(view), view.shape)


def _last_stride_of_one(view: Array) -> Array:
    """Keep every stride but the last."""
    return as_strided(view, strides=(*view.strides[:-1], view.itemsize)).copy()


def _only_the_first(view: Array) -> Array:
    """Read each axis of stride 0 once, and zeros beyond."""
    kept = np.zeros_like(view, subok=False)
    first = tuple(
        slice(1) if stride == 0 and length > 1 else slice(None)
        for length, stride in zip(view.shape, view.strides, strict=True)
    )
    kept[first] = view[first]
    return kept


def _last_row_stale(view: Array) -> Array:
    """Read the last row before its turn where a tile of 32 is left with one."""
    rows = view.shape[-2]
    return view[..., [*range(rows - 1), rows - 2], :] if rows > 1 and rows % 32 == 1 else view


def _heads_fastest(view: Array) -> Array:
    """Read merged heads (B, L, H*D) as if they were interleaved, (B, L, D*H)."""
    if view.ndim != 4 or not view.swapaxes(1, 2).flags.c_contiguous:
        return view
    batch, heads, length, width = view.shape
    return view.swapaxes(1, 2).reshape(batch, length, width, heads).transpose(0, 3, 1, 2)


def _one_row_ahead(view: Array) -> Array:
    """Start one row late."""
    return np.roll(view, -1, axis=-2) if view.ndim > 1 else view


MUTANTS = (
    Mutant(
        "strided_view_read_as_contiguous",
        "layouts",
        "every second number belongs to something else: pytorch#181133, pytorch#112577",
        _where(is_strided, _as_contiguous),
        "raw_scores",
    ),
    Mutant(
        "last_stride_taken_for_one",
        "layouts",
        "all strides are heeded but the last: pytorch#187506",
        _where(is_strided, _last_stride_of_one),
        "raw_scores",
    ),
    Mutant(
        "transposed_view_read_as_contiguous",
        "layouts",
        "(B, L, H, D) in memory read as (B, H, L, D): jax#35916, torch-spyre#4331",
        _where(is_transposed, _as_contiguous),
        "raw_scores",
    ),
    Mutant(
        "merged_heads_read_as_interleaved",
        "layouts",
        "columns of merged heads dealt out in turn: tensor_parallel#103, slapo#46",
        _where(is_transposed, _heads_fastest),
        "raw_scores",
    ),
    Mutant(
        "transposed_view_read_one_row_ahead",
        "layouts",
        "an offset for another layout: pytorch#195320's kind",
        _where(is_transposed, _one_row_ahead),
        "raw_scores",
    ),
    Mutant(
        "broadcast_view_read_as_contiguous",
        "layouts",
        "stride 0 taken for a full one: pytorch#191937",
        _where(is_broadcast, _as_contiguous),
        "raw_scores",
    ),
    Mutant(
        "broadcast_view_read_once",
        "layouts",
        "only the first of equal slices is there: pytorch#191937's kind",
        _where(is_broadcast, _only_the_first),
        "raw_scores",
    ),
    Mutant(
        "last_row_of_a_broadcast_view_stale_where_lk_mod_32_is_1",
        "layouts",
        "the tail of a tile of 32 with stride 0: pytorch#191937",
        _where(is_broadcast, _last_row_stale),
        "raw_scores",
    ),
)
