"""The error of an operand that a kernel stores in codes with scales before a product of matrices.

``docs/numerics.md``, section 3.1, derives it. A kernel may share scales among fewer elements than it declares, which
makes them smaller, and the error with them. What is no number shares nothing: a kernel whose scale follows from a NaN
that nobody attends to is held to the others. Less the mean, codes are those of k - m, m the mean of a head's keys.
Variances are squares of largest errors: a rounding is noise of which nothing else is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from attncheck.attention.errors import Operand, Real, finite
from attncheck.spec.rounding import FORMATS, Quantization, RoundingModel

_SINGLE = FORMATS["float32"].unit_roundoff


def stored_operand_of(name: str, operand: Operand, rounding: RoundingModel) -> Operand:
    """Return the operand of a product, (..., L, D), as the class stores it: with the error of its codes."""
    quantization = rounding.quantization_of(name)
    if quantization is None or not operand.value.size:
        return operand
    value = finite(operand.value)
    size, of_mean = np.where(np.isfinite(operand.value), operand.magnitude, 0.0), np.zeros(())
    if quantization.is_centred:
        mean = value.mean(axis=-2, keepdims=True)
        of_mean = (sum(value.shape[-2:]) + 4) * _SINGLE * (size + np.abs(mean))
        size = np.abs(value - mean) + (size - np.abs(value)) + of_mean
    error = _error_of_codes(size, quantization) + of_mean
    variance = error * error
    return replace(
        operand,
        max_error=error if operand.max_error is None else operand.max_error + error,
        variance=variance if operand.variance is None else operand.variance + variance,
    )


_TOGETHER: Mapping[str, tuple[int, ...] | None] = {"row": (-1,), "channel": (-2,), "head": (-2, -1), "tensor": None}


def _error_of_codes(size: Real, quantization: Quantization) -> Real:
    grid = quantization.grid
    scale = 1.0 if quantization.per == "none" else _largest_of_block(size, quantization) / grid.largest
    error: Real = np.maximum(grid.unit * size, scale * (grid.step / 2)) + 4 * _SINGLE * size
    return error + np.maximum(size - scale * grid.largest, 0.0)


def _largest_of_block(size: Real, quantization: Quantization) -> Real:
    """Return the largest magnitude of those that share a scale, for each element."""
    largest: Real
    if quantization.per in _TOGETHER:
        largest = size.max(axis=_TOGETHER[quantization.per], keepdims=True)
        return largest
    axis = -2 if quantization.per == "rows" else -1
    shared = size.max(axis=-1, keepdims=True) if axis == -2 else size
    starts = np.arange(0, size.shape[axis], quantization.count)
    largest = np.repeat(np.maximum.reduceat(shared, starts, axis=axis), quantization.count, axis=axis)
    return largest.take(np.arange(size.shape[axis]), axis=axis)
