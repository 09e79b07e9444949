"""Arrays laid out in memory as a case asks: now and then a kernel reads a strided or stride-0 input wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.shapes import repeated_axes

Array = NDArray[Any]


def apply_layout(inputs: Mapping[str, Array], memory_layout: Mapping[str, str]) -> dict[str, Array]:
    """Return the same numbers, each input that ``memory_layout`` names as a view of another layout.

    strided: every second number of the last axis; transposed: heads inside of length, (B, L, H, D) in memory;
    broadcast: stride 0 along the axes, except for the last, in which all slices are alike. Properties alone ask for
    padded: rows of a wider array; unaligned: one number behind a boundary of 64 bytes; reversed: negative strides
    along the last two axes.
    """
    return {
        name: _LAYOUTS[memory_layout[name]](array) if name in memory_layout else array for name, array in inputs.items()
    }


def _strided(array: Array) -> Array:
    # What lies between must show when it is read.
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), 7, dtype=array.dtype)
    view = wide[..., ::2]
    view[...] = array
    return view


def _transposed(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(-2, -3)).swapaxes(-2, -3)  # (B, H, L, D) -> (B, L, H, D) -> as it was


def _broadcast(array: Array) -> Array:
    repeated = repeated_axes(array)
    first = array[tuple(slice(1) if axis in repeated else slice(None) for axis in range(array.ndim))]
    return np.broadcast_to(np.ascontiguousarray(first), array.shape)


def _padded(array: Array) -> Array:
    wide = np.full((*array.shape[:-1], array.shape[-1] + 3), 7, dtype=array.dtype)
    view = wide[..., : array.shape[-1]]
    view[...] = array
    return view


def _unaligned(array: Array) -> Array:
    memory = np.full(array.size + 2 * _BOUNDARY, 7, dtype=array.dtype)
    address = memory.ctypes.data // array.itemsize
    first = -address % (_BOUNDARY // array.itemsize) + 1
    view = memory[first : first + array.size].reshape(array.shape)
    view[...] = array
    return view


def _reversed(array: Array) -> Array:
    return np.ascontiguousarray(array[..., ::-1, ::-1])[..., ::-1, ::-1]


_BOUNDARY = 64
"""Bytes at which vectors of every processor begin."""
_LAYOUTS = {
    "strided": _strided,
    "transposed": _transposed,
    "broadcast": _broadcast,
    "padded": _padded,
    "unaligned": _unaligned,
    "reversed": _reversed,
}
