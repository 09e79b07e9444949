from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.reading.printed import PrintedArray, Rounding, parse_printed
from attncheck.reading.printed_text import PrintedError

AS_SHOWN = Rounding()

decimals_of_any_size = st.decimals(
    min_value=-(10**6), max_value=10**6, allow_nan=False, allow_infinity=False, places=12
)


def _distance(parsed: PrintedArray, true: Decimal) -> Decimal:
    """How far the true number is outside what printing it leaves open; float64 itself may move it by half a spacing."""
    float_error = Decimal(float(np.spacing(np.abs(parsed.value[()])))) / 2
    return (
        abs(Decimal(float(parsed.value)) - true)
        - Decimal(float(parsed.half_unit)) * (1 + Decimal(2) ** -52)
        - float_error
    )


@given(true=decimals_of_any_size, places=st.integers(0, 9))
def test_the_number_that_was_rounded_to_the_decimals_shown_lies_within_half_a_unit(true: Decimal, places: int) -> None:
    shown = f"{true:.{places}f}"
    assert _distance(parse_printed(shown, AS_SHOWN), true) <= 0


@given(true=decimals_of_any_size, places=st.integers(1, 9))
def test_with_decimals_declared_trailing_zeros_may_be_left_out(true: Decimal, places: int) -> None:
    shown = f"{true:.{places}f}".rstrip("0")
    parsed = parse_printed(shown, Rounding(decimals=places))
    assert _distance(parsed, true) <= 0
    assert parsed.half_unit == pytest.approx(0.5 * 10.0**-places, rel=1e-15)


@given(true=decimals_of_any_size.filter(bool), digits=st.integers(1, 15))
def test_with_significant_digits_declared_half_a_unit_follows_the_size(true: Decimal, digits: int) -> None:
    rounded = Context(prec=digits, rounding=ROUND_HALF_EVEN).plus(true)
    shown = str(rounded.normalize())
    assert _distance(parse_printed(shown, Rounding(significant_digits=digits)), true) <= 0


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_shortest_text_of_a_float_is_read_back_as_that_float(number: float) -> None:
    assert parse_printed(repr(number), Rounding(exact=True)).value == number


@pytest.mark.parametrize(
    ("text", "rounding", "value", "half_unit"),
    [
        ("0.8429010", AS_SHOWN, 0.842901, 5e-8),  # its last zero counts
        ("927", AS_SHOWN, 927.0, 0.5),
        ("927", Rounding(exact=True), 927.0, 0.0),
        ("0.", AS_SHOWN, 0.0, 0.5),
        (".5", AS_SHOWN, 0.5, 0.05),
        ("-1.5e3", AS_SHOWN, -1500.0, 50.0),
        ("1.2E-5", AS_SHOWN, 1.2e-5, 5e-7),
        ("0.5", Rounding(decimals=8), 0.5, 5e-9),
        ("0.025", Rounding(significant_digits=4), 0.025, 5e-6),
        ("1200", Rounding(significant_digits=2), 1200.0, 50.0),
        ("5.77e-340", AS_SHOWN, 0.0, 0.0),  # below float64's range: nothing of it is left
    ],
)
def test_a_number_has_a_value_and_half_a_unit_of_its_last_digit(
    text: str, rounding: Rounding, value: float, half_unit: float
) -> None:
    parsed = parse_printed(text, rounding)
    assert parsed.value == value
    assert parsed.half_unit == pytest.approx(half_unit, rel=1e-15, abs=0.0)
    assert parsed.text[()] == text


def test_non_finite_numbers_are_read_as_themselves() -> None:
    parsed = parse_printed("inf -inf +inf nan NaN", AS_SHOWN)
    np.testing.assert_array_equal(parsed.value, [np.inf, -np.inf, np.inf, np.nan, np.nan])
    assert not parsed.half_unit.any()
    assert parsed.given.all()


def test_a_point_user_function_a_number_that_is_not_given() -> None:
    parsed = parse_printed(". 2\n3 .", AS_SHOWN)
    np.testing.assert_array_equal(parsed.given, [[False, True], [True, False]])
    assert np.isnan(parsed.value[0, 0])


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ("1", ()),
        ("1 2 3", (3,)),
        ("1 2 3\n4 5 6\n", (2, 3)),
        ("\n  1\t2\n\n  3 4\n", (2, 2)),
        ("1\n2", (2, 1)),
        (["1 2\n3 4", "5 6\n7 8", "9 0\n1 2"], (3, 2, 2)),
        ([["1 2\n3 4"]], (1, 1, 2, 2)),
        (["1", "2"], (2,)),
    ],
)
def test_rows_are_lines_and_lists_are_further_axes(source: object, shape: tuple[int, ...]) -> None:
    assert parse_printed(source, AS_SHOWN).shape == shape


def test_numbers_stay_at_their_place_when_transposed_or_reshaped() -> None:
    parsed = parse_printed("1 2.0 3\n4 . 6", AS_SHOWN)
    turned = parsed.transposed()
    np.testing.assert_array_equal(turned.value, [[1, 4], [2, np.nan], [3, 6]])
    np.testing.assert_array_equal(turned.text, [["1", "4"], ["2.0", "."], ["3", "6"]])
    assert turned.half_unit[1, 0] == 0.05
    assert not turned.given[1, 1]
    assert parsed.reshaped((1, 1, 2, 3)).shape == (1, 1, 2, 3)
    assert parsed.reshaped((1, 1, 2, 3)).text[0, 0, 1, 2] == "6"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "no number is given"),
        (" \n ", "no number is given"),
        ([], "no number is given"),
        ("1 2\n3", "ragged rows: 1 in row 2, 2 in row 1"),
        (["1 2\n3 4", "1 2"], "ragged: entry 2 has shape 2, entry 1 has shape 2x2"),
        ("1 2\n3 x", "row 2, number 2: 'x' is not a number"),
        (["1 2\n3 4", "1 2\n3 x"], "matrix 2, row 2, number 2: 'x' is not a number"),
        ("1; 2", "number 1: '1;' is not a number"),
        ("1_000", "'1_000' is not a number"),
        ("٣", "'٣' is not a number"),
        ("sNaN", "'sNaN' is not a number"),
        ("infinity", "'infinity' is not a number"),
        ("--1", "'--1' is not a number"),
        ("1e", "'1e' is not a number"),
        ("1.8e308", "'1.8e308' is beyond the range of float64"),
        ("1e999999999", "beyond the range of float64"),
        ("1e99999999999999999999", "beyond the range of float64"),
        ("0e999999", "beyond the range of float64"),
        ("1e-401", "'1e-401' is closer to zero than 1e-400"),
        ("1e-999999999", "closer to zero than 1e-400"),
        (1.5, "expected text in quotes, got 1.5: a bare number would lose its last digits"),
        ([1, 2], "expected text in quotes, got 1"),
        ([{"a": 1}], "expected text in quotes, got {'a': 1}"),
        ([[[[[["1"]]]]]], "expected at most 5 axes, got 6"),
    ],
)
def test_what_no_document_prints_is_refused(source: object, words: str) -> None:
    with pytest.raises(PrintedError) as error:
        parse_printed(source, AS_SHOWN)
    assert words in str(error.value)


@given(
    source=st.recursive(
        st.text(alphabet="0123456789.eE+-naif,[]() \n", max_size=12) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=8,
    ),
    rounding=st.builds(
        Rounding,
        decimals=st.none() | st.integers(0, 400),
        significant_digits=st.none() | st.integers(1, 10**30),
    ),
)
def test_whatever_the_text_it_is_read_whole_or_refused(source: object, rounding: Rounding) -> None:
    try:
        parsed = parse_printed(source, rounding)
    except PrintedError:
        return
    assert parsed.value.shape == parsed.half_unit.shape == parsed.given.shape == parsed.text.shape
    assert (parsed.half_unit >= 0).all()
    assert np.isfinite(parsed.half_unit).all()


def test_what_was_cut_off_lay_away_from_zero() -> None:
    parsed = parse_printed("0.25 -0.25 0.00 -0.00", Rounding(truncated=True))
    unit = pytest.approx(0.01)
    assert parsed.open_towards(np.array([1.0, -1.0, 1.0, 1.0])).tolist() == [unit] * 4
    assert parsed.open_towards(np.array([0.0, 0.0, -1.0, -1.0])).tolist() == [0.0, 0.0, unit, unit]
    assert parsed.radius.tolist() == [unit] * 4
    assert parsed.reshaped((2, 2)).truncated
    rounded = parse_printed("0.25 -0.25", Rounding())
    assert rounded.open_towards(np.array([1.0, 1.0])).tolist() == rounded.radius.tolist() == [0.005, 0.005]


def test_digits_that_may_be_off_leave_as_many_units_open() -> None:
    assert parse_printed("0.25", Rounding(units_off=2)).half_unit == pytest.approx(0.025)
    assert parse_printed("25", Rounding(exact=True, units_off=2)).half_unit == 0.0
