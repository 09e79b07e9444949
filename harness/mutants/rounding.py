"""Narrower arithmetic inside wider arrays: what a kernel does when it rounds an intermediate to 16 bits or TF32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Store = Callable[[Array], Array]
"""How an intermediate is stored: rounded to something, or left as it is."""

_SIGNIFICAND_BITS = {"bfloat16": 8, "tf32": 11}


def exactly(array: Array) -> Array:
    """Store without rounding."""
    return array


def to_bits(array: Array, bits: int, *, truncate: bool = False) -> Array:
    """Round (or truncate towards zero) to a significand of so many bits; the exponent keeps its range."""
    significand, exponent = np.frexp(array)
    integral = (np.trunc if truncate else np.rint)(significand * 2.0**bits)
    rounded: Array = np.ldexp(integral, exponent - bits).astype(array.dtype)
    return rounded


def bfloat16(array: Array) -> Array:
    """Round to bfloat16's precision."""
    return to_bits(array, _SIGNIFICAND_BITS["bfloat16"])


def truncated_bfloat16(array: Array) -> Array:
    """Cut off what bfloat16 has no bits for."""
    return to_bits(array, _SIGNIFICAND_BITS["bfloat16"], truncate=True)


def tf32(array: Array) -> Array:
    """Round to TF32's precision."""
    return to_bits(array, _SIGNIFICAND_BITS["tf32"])


def truncated_tf32(array: Array) -> Array:
    """Cut off what TF32 has no bits for."""
    return to_bits(array, _SIGNIFICAND_BITS["tf32"], truncate=True)


def float16(array: Array) -> Array:
    """Round to float16, its range included: above 65504 is infinity."""
    return array.astype(np.float16).astype(array.dtype)


def float32(array: Array) -> Array:
    """Round to float32."""
    return array.astype(np.float32).astype(array.dtype)


def sequential_sum(array: Array, store: Store = exactly) -> Array:
    """Add along the last axis from the first to the last, each partial sum stored; the axis is kept."""
    total = np.zeros((*array.shape[:-1], 1), array.dtype)
    for position in range(array.shape[-1]):
        total = store(total + array[..., position : position + 1])
    return total


def sequential_matmul(left: Array, right: Array, store: Store = exactly) -> Array:
    """Multiply matrices with one running sum per element, each partial sum stored."""
    product = np.zeros((*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]))
    product = product.astype(left.dtype)
    for position in range(left.shape[-1]):
        term = left[..., :, position : position + 1] * right[..., position : position + 1, :]
        product = store(product + term)
    return product
