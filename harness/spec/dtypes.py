"""The dtypes of cases as NumPy's; bfloat16, which NumPy lacks, is that of ml_dtypes."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import CODE_FORMATS

_EXTENSION_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", *(form.elements for form in CODE_FORMATS.values()), "float8_e8m0fnu")
    if hasattr(ml_dtypes, name)
}
"""Dtypes that NumPy lacks: bfloat16, codes of 8 bits and fewer, and scales of blocks of them."""
_INTEGER_CODES = frozenset(form.elements for form in CODE_FORMATS.values() if "int" in form.elements)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of this name."""
    return _EXTENSION_DTYPES[name] if name in _EXTENSION_DTYPES else np.dtype(name)


@cache
def largest_number(name: str) -> float:
    """Return the largest magnitude of a finite number of a dtype.

    Example:
        >>> largest_number("float16"), largest_number("float8_e4m3fn"), largest_number("int8")
        (65504.0, 448.0, 128.0)
    """
    dtype = numpy_dtype(name)
    if name in _INTEGER_CODES:
        return float(max(ml_dtypes.iinfo(dtype).max, -ml_dtypes.iinfo(dtype).min))
    return float(ml_dtypes.finfo(dtype).max)


@cache
def has_nan(name: str) -> bool:
    """Return whether a dtype has a NaN; codes of few bits and whole numbers have none.

    Example:
        >>> has_nan("bfloat16"), has_nan("float8_e4m3fn"), has_nan("float4_e2m1fn"), has_nan("int8")
        (True, True, False, False)
    """
    with np.errstate(invalid="ignore"):
        return name not in _INTEGER_CODES and bool(
            np.isnan(np.array(np.nan).astype(numpy_dtype(name)).astype(np.float64))
        )


def max_rounding_error(size: NDArray[Any], name: str) -> NDArray[np.float64]:
    """Return the largest error of numbers of at most this size by rounding to a dtype, subnormals flushed."""
    if name in _INTEGER_CODES:
        return np.full(size.shape, 0.5)
    info = ml_dtypes.finfo(numpy_dtype(name))
    return np.asarray(size, dtype=np.float64) * float(info.eps) / 2 + float(info.smallest_normal)


def round_to(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Round numbers to a dtype: to the nearest, ties to even; codes saturate.

    Example:
        >>> above_middle = np.array([1 + 2.0**-8 + 2.0**-40])  # float32 in between would give the middle, and then 1.0
        >>> round_to(above_middle, "bfloat16").astype(float).tolist()
        [1.0078125]
        >>> round_to(np.array([300.0, 2.5, -0.6]), "int8").tolist()
        [127, 2, -1]
    """
    if name in _INTEGER_CODES:
        info = ml_dtypes.iinfo(numpy_dtype(name))
        return np.clip(np.rint(array.astype(np.float64)), int(info.min), int(info.max)).astype(numpy_dtype(name))
    with np.errstate(over="ignore"):  # what is too large for a dtype is infinite in it
        if name in _EXTENSION_DTYPES and array.dtype != np.float32:
            array = _round_to_odd_float32(array.astype(np.float64))
        return array.astype(numpy_dtype(name))


def _round_to_odd_float32(array: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32 such that rounding once more, to at most 22 bits, gives what rounding at once would give.

    ml_dtypes goes by float32 on its way to bfloat16, and what is then in the middle between two numbers of bfloat16 may
    have been above it. Here what float32 cannot hold is cut off and the last bit set to 1 instead, so that nothing
    gets into the middle: Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums: proved algorithms
    using rounding to odd".
    """
    near = array.astype(np.float32)
    inexact = (near != array) & np.isfinite(array)
    outwards = inexact & (np.abs(near) > np.abs(array))
    cut = np.where(outwards, np.nextafter(near, np.float32(0)), near)
    odd: NDArray[np.uint32] = cut.view(np.uint32) | inexact.astype(np.uint32)
    return odd.view(np.float32)
