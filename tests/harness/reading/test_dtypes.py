"""Rounding to the dtypes of cases, against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attncheck.reading.dtypes import largest_number, numpy_dtype, rounded_once
from attncheck.spec import DTYPES

# Bits of the significand, and the exponent of the least subnormal number: IEEE 754-2019, table 3.5.
FORMATS = {"float64": (53, -1074), "float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}


def nearest(number: float, dtype: str) -> Fraction:
    """The closest number of a format without an end to its exponents; in the middle, the even one."""
    bits, least = FORMATS[dtype]
    exact = Fraction(number)
    if not exact:
        return exact
    exponent = 0
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - bits + 1, least)
    return round(exact / unit) * unit  # Python rounds a fraction in the middle to the even number


@pytest.mark.parametrize("dtype", DTYPES)
@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.floats(-70000, 70000))
@example(number=1 + 2.0**-8 + 2.0**-40)
@example(number=-(1 + 2.0**-8 + 2.0**-40))
@example(number=2.0**-134 + 2.0**-180)
@example(number=2.0**-149)
@example(number=3.4e38)
@example(number=65519.999)
def test_a_number_is_rounded_once_to_the_nearest(dtype: str, number: float) -> None:
    with np.errstate(over="ignore"):
        rounded = float(rounded_once(np.array([number]), dtype)[0])
    wanted = nearest(number, dtype)
    if abs(wanted) > largest_number(dtype):
        assert rounded == np.copysign(np.inf, number)
    else:
        assert Fraction(rounded) == wanted


def test_by_way_of_float32_bfloat16_would_be_rounded_twice() -> None:
    above_the_middle = np.array([1 + 2.0**-8 + 2.0**-40])
    assert above_the_middle.astype(ml_dtypes.bfloat16)[0] == 1  # why this module does not do it so
    assert rounded_once(above_the_middle, "bfloat16")[0] == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_and_the_sign_of_zero_are_kept(dtype: str) -> None:
    rounded = rounded_once(np.array([np.inf, -np.inf, np.nan, -0.0, 3.0]), dtype).astype(np.float64)
    np.testing.assert_array_equal(rounded, [np.inf, -np.inf, np.nan, 0, 3])
    assert np.signbit(rounded[3])


@pytest.mark.parametrize("source", [np.float32, np.int64, bool, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_a_source_may_have_is_rounded(source: type, dtype: str) -> None:
    rounded = rounded_once(np.array([[0, 1], [1, 1]]).astype(source), dtype)
    assert rounded.dtype == numpy_dtype(dtype)
    assert rounded.astype(np.float64).tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float16", 65504), ("bfloat16", (2 - 2.0**-7) * 2.0**127), ("float32", (2 - 2.0**-23) * 2.0**127)],
)
def test_the_largest_number_is_that_of_the_format(dtype: str, largest: float) -> None:
    assert largest_number(dtype) == largest
