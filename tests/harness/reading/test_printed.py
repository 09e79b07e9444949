"""Printed numbers: the arrays that libraries print, what each digit leaves open, and digits that are missing."""

from __future__ import annotations

import sys
import textwrap
from contextlib import suppress
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tables import tables_beside

from attncheck.reading.printed import (
    PrintedError,
    PrintedRounding,
    max_number_count,
    parse_printed,
    split_printed_numbers,
)

TABLES = tables_beside(__file__)


def test_a_number_has_a_value_and_half_a_unit_of_its_last_digit() -> None:
    for text, rounding, value, half_unit in TABLES["printed_numbers"]:
        parsed = parse_printed(text, PrintedRounding(**rounding))
        assert (parsed.value, parsed.text[()]) == (value, text)
        assert parsed.half_unit == pytest.approx(half_unit, rel=1e-15, abs=0.0)
    for source, shape in TABLES["printed_shapes"]:
        assert parse_printed(source, PrintedRounding()).shape == tuple(shape), source
    parsed = parse_printed(". 2\n3 .", PrintedRounding())  # a number that is not given
    np.testing.assert_array_equal(parsed.given, [[False, True], [True, False]])
    assert np.isnan(parsed.value[0, 0])


PIECES = (
    """[ ] [[ ]] , 1 0.5 -3e-5 nan array( ) tensor( > ... . dtype=float32 shape=(2,) numpy= <tf.Tensor: [1,] [,1] [1]"""
)
TEXTS = st.lists(st.sampled_from([*PIECES.split(), ", ", " ", "\n"]), max_size=14).map("".join)


@settings(max_examples=400)
@given(
    source=st.recursive(
        TEXTS | st.text(alphabet="0123456789.eE+-naif,[]() \n", max_size=12) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=8,
    ),
    rounding=st.builds(
        PrintedRounding, decimals=st.none() | st.integers(0, 400), significant_digits=st.none() | st.integers(1, 10**30)
    ),
)
def test_whatever_the_text_it_is_read_whole_or_refused(source: object, rounding: PrintedRounding) -> None:
    with suppress(PrintedError):
        parsed = parse_printed(source, rounding)
        assert parsed.value.shape == parsed.half_unit.shape == parsed.given.shape == parsed.text.shape
        assert ((parsed.half_unit >= 0) & np.isfinite(parsed.half_unit)).all()
        if isinstance(source, str):
            assert 0 < parsed.value.size <= max_number_count(source)


def test_what_was_cut_off_lay_away_from_zero() -> None:
    parsed = parse_printed("0.25 -0.25 0.00 -0.00", PrintedRounding(truncated=True))
    unit = pytest.approx(0.01)
    assert parsed.radius_on_side_of(np.array([1.0, -1.0, 1.0, 1.0])).tolist() == [unit] * 4
    assert parsed.radius_on_side_of(np.array([0.0, 0.0, -1.0, -1.0])).tolist() == [0.0, 0.0, unit, unit]
    assert parsed.radius.tolist() == [unit] * 4
    assert parsed.rearrange(lambda array: array.reshape(2, 2)).truncated
    rounded = parse_printed("0.25 -0.25", PrintedRounding())
    assert rounded.radius_on_side_of(np.array([1.0, 1.0])).tolist() == rounded.radius.tolist() == [0.005, 0.005]


def test_an_array_is_read_as_it_was_printed() -> None:
    for text in TABLES["printed_squares"]:
        assert (
            split_printed_numbers(text)
            == split_printed_numbers(textwrap.indent(text, "    "))
            == [["0.10", "2."], ["-3e-5", "nan"]]
        )
        assert max_number_count(text) >= 4
    assert {text: split_printed_numbers(text) for text in TABLES["printed_others"]} == TABLES["printed_others"]


arrays = npst.arrays(
    st.sampled_from([np.float64, np.float32]),
    npst.array_shapes(min_dims=1, max_dims=4, max_side=5),
    elements={"min_value": -(2.0**20), "max_value": 2.0**20},
)


@given(array=arrays, precision=st.integers(1, 9), width=st.integers(12, 90), text=st.sampled_from(["str", "repr"]))
def test_what_numpy_prints_is_read_back(array: np.ndarray, precision: int, width: int, text: str) -> None:
    with np.printoptions(precision=precision, linewidth=width, threshold=sys.maxsize):
        printed = str(array) if text == "str" else repr(array)
    parsed = parse_printed(printed, PrintedRounding())
    assert parsed.shape == array.shape
    for shown, number in zip(parsed.text.ravel(), array.ravel(), strict=True):
        # NumPy rounds the shortest digits that tell the float from others, which may lie half a spacing beside it.
        unit = Decimal(10) ** int(Decimal(shown).as_tuple().exponent)
        float_error = Decimal(float(np.spacing(np.abs(number)))) / 2
        assert shown in printed
        assert abs(Decimal(shown) - Decimal(float(number))) <= unit / 2 + float_error
    assert (np.abs(parsed.value - array) <= parsed.half_unit * (1 + 2.0**-52) + np.spacing(np.abs(array))).all()
