"""Two arrays compared: shape, then dtype, then the places of NaN and infinity, then values."""

from __future__ import annotations

import warnings
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from attncheck.judging.compare import (
    Comparison,
    absolute_difference,
    compare_arrays,
    compare_forms,
    differing_nonfinite,
    index_of_largest,
    is_floating,
    quotient,
)
from attncheck.verdicts import Verdict

Array = NDArray[Any]
DTYPES = ("float32", "float64")
NAN, INF = np.nan, np.inf


def compare(first: Any, second: Any, allowed: Any = 0.0, dtype: str = "float64") -> Comparison:
    """Compare where one number, or one for each element, is allowed."""
    array = np.array(first, dtype)
    return compare_arrays(array, np.array(second, dtype), np.broadcast_to(np.asarray(allowed, np.float64), array.shape))


# What comes first.


def test_shape_comes_before_everything_else() -> None:
    found = compare_arrays(np.full((2, 3), NAN), np.ones((3, 2), np.float32), np.ones((2, 3)))
    assert found == Comparison(Verdict.SHAPE, "shape 2x3 against 3x2")


def test_shapes_that_would_broadcast_are_different_shapes() -> None:
    assert compare_arrays(np.ones((1, 1)), np.ones(1), None).verdict is Verdict.SHAPE


def test_dtype_comes_before_nan_and_values() -> None:
    found = compare_arrays(np.array([NAN, 1]), np.array([1, 2], np.float32), np.ones(2))
    assert found == Comparison(Verdict.DTYPE, "dtype float64 against float32")


def test_equal_values_of_another_dtype_do_not_agree() -> None:
    assert compare_arrays(np.ones(2), np.ones(2, np.float32), np.ones(2)).verdict is Verdict.DTYPE


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex128", "object"])
def test_what_is_no_floating_number_has_the_wrong_dtype_and_raises_nothing(dtype: str) -> None:
    found = compare([1, 0], [1, 0], 9.0, dtype)
    assert (found.verdict, found.message) == (Verdict.DTYPE, f"dtype {dtype} is not a floating one")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_floating_dtype_is_one(dtype: str) -> None:
    assert is_floating(np.zeros(1, dtype))


def test_the_places_of_nan_come_before_values() -> None:
    found = compare([[1.0, 2.0], [3.0, NAN]], [[100.0, 2.0], [3.0, 4.0]])
    assert (found.verdict, found.index, found.second) == (Verdict.NONFINITE, (1, 1), 4.0)
    assert np.isnan(found.first or 0)
    assert found.difference is found.allowed is found.ratio is None


# NaN and infinity.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "second"), list(permutations([NAN, INF, -INF, 1.0], 2)))
def test_nan_and_each_infinity_agree_with_nothing_else(dtype: str, first: float, second: float) -> None:
    # However much is allowed, and also where nothing is known of that.
    assert compare([0, first], [0, second], INF, dtype).verdict is Verdict.NONFINITE
    pair = np.array([[0, first], [0, second]], dtype)
    assert compare_arrays(pair[0], pair[1], None).verdict is Verdict.NONFINITE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_nan_and_each_infinity_agree_with_themselves(dtype: str, special: float) -> None:
    found = compare([special, 2.0], [special, 2.0], 0.0, dtype)
    assert (found.verdict, found.difference, found.ratio) == (Verdict.AGREE, 0.0, 0.0)


def test_nan_in_another_place_does_not_agree() -> None:
    found = compare([NAN, 1.0], [1.0, NAN])
    assert (found.verdict, found.index) == (Verdict.NONFINITE, (0,))


def test_values_are_still_compared_beside_nan_and_infinity() -> None:
    found = compare([NAN, INF, 1.0], [NAN, INF, 1.5], 0.25)
    assert (found.verdict, found.index, found.difference) == (Verdict.NUMERIC, (2,), 0.5)


# Values.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", [1, -1])
def test_what_is_allowed_agrees_and_the_next_number_does_not(dtype: str, direction: int) -> None:
    edge = np.array(1.0 + direction * 0.25, dtype)
    beyond = np.nextafter(edge, np.array(direction * INF, dtype))
    assert compare([1.0], [edge], 0.25, dtype).verdict is Verdict.AGREE
    found = compare([1.0], [beyond], 0.25, dtype)
    assert (found.verdict, found.allowed, found.difference) == (Verdict.NUMERIC, 0.25, abs(float(beyond) - 1))


def test_all_is_said_of_the_element_that_is_worst_beside_what_is_allowed_there() -> None:
    found = compare([[1000.0, 0.0], [1.0, 0.0]], [[1008.0, 0.0], [1.0, 0.5]], [[10.0, 1.0], [1.0, 0.25]])
    assert found == Comparison(Verdict.NUMERIC, "", (1, 1), 0.0, 0.5, 0.5, 0.25, 2.0)
    found = compare([[1000.0, 0.0]], [[1008.0, 0.5]], [[10.0, 1.0]])
    assert found == Comparison(Verdict.AGREE, "", (0, 0), 1000.0, 1008.0, 8.0, 10.0, 0.8)


def test_where_nothing_is_allowed_equal_numbers_agree_and_others_do_not() -> None:
    assert compare([0.0, 1.0], [0.0, 1.0]).ratio == 0.0
    found = compare([0.0, 1.0], [5e-324, 1.0])
    assert (found.verdict, found.index, found.ratio) == (Verdict.NUMERIC, (0,), INF)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_agrees_with_minus_zero(dtype: str) -> None:
    assert compare([0.0], [-0.0], 0.0, dtype).verdict is Verdict.AGREE


@pytest.mark.parametrize(
    ("allowed", "reason"),
    [
        (None, "there is no exact answer, and so no bound"),
        # The shape that the bounds have not is another row's fault.
        (np.ones((1, 3)), "shape 3, where the exact answer has 1x3"),
    ],
)
def test_without_bounds_of_its_shape_nothing_is_said_of_values_that_differ(allowed: Any, reason: str) -> None:
    found = compare_arrays(np.ones(3), np.array([1.0, 3.0, 2.0]), allowed)
    wanted = Comparison(Verdict.UNVERIFIED, f"values not compared: {reason}", (1,), 1.0, 3.0, 2.0)
    assert found == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("allowed", [None, np.ones((1, 4))])
def test_without_bounds_the_same_values_agree_and_the_next_number_does_not(dtype: str, allowed: Any) -> None:
    array = np.array([NAN, -INF, 0.0, 1.0], dtype)
    assert compare_arrays(array, array.copy(), allowed) == Comparison(Verdict.AGREE)
    other = array.copy()
    other[3] = np.nextafter(other[3], np.array(2, dtype))
    assert compare_arrays(array, other, allowed).verdict is Verdict.UNVERIFIED


def test_forms_are_compared_without_a_word_on_values() -> None:
    assert compare_forms(np.array([NAN, 1.0]), np.array([NAN, 2.0])) is None
    assert compare_forms(np.ones(2), np.ones(3)) == Comparison(Verdict.SHAPE, "shape 2 against 3")


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_empty_arrays_agree_and_have_no_worst_element(shape: tuple[int, ...]) -> None:
    assert compare(np.zeros(shape), np.zeros(shape)) == Comparison(Verdict.AGREE)


def test_single_numbers_of_no_axis_are_compared() -> None:
    found = compare(1.0, 2.0)
    assert (found.verdict, found.index, found.difference) == (Verdict.NUMERIC, (), 1.0)


def test_a_difference_beyond_the_range_of_float64_disagrees_unless_anything_is_allowed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compare([1.7e308], [-1.7e308], 1.0).verdict is Verdict.NUMERIC
        found = compare([1.7e308, 1.0], [-1.7e308, 1.5], [INF, 1.0])
    assert (found.verdict, found.index, found.ratio) == (Verdict.AGREE, (1,), 0.5)


def test_a_float32_difference_is_taken_without_rounding() -> None:
    small = np.array([2.0**-60], np.float32)
    assert absolute_difference(np.array([1], np.float32), small).item() == 1 - 2.0**-60
    assert absolute_difference(small, np.array([-(2.0**-100)], np.float32)).item() == 2.0**-60 + 2.0**-100


def test_a_quotient_knows_zero_and_infinity() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = quotient(
            np.array([0.0, 1.0, 0.0, 1.0, 3.0, INF, 1e308]), np.array([0.0, 0.0, 2.0, INF, 2.0, INF, 1e-308])
        )
    assert found.tolist() == [0.0, INF, 0.0, 0.0, 1.5, 0.0, INF]


SPECIAL = st.sampled_from([NAN, INF, -INF, 0.0, 1.0, -2.5])


@given(first=arrays(np.float64, (2, 3), elements=SPECIAL), second=arrays(np.float64, (2, 3), elements=SPECIAL))
def test_which_of_the_two_comes_first_does_not_matter(first: Array, second: Array) -> None:
    one, other = (compare_arrays(*pair, np.full((2, 3), 1.25)) for pair in ((first, second), (second, first)))
    assert (one.verdict, one.index, one.difference, one.ratio) == (
        other.verdict, other.index, other.difference, other.ratio,
    )  # fmt: skip
    np.testing.assert_equal([one.first, one.second], [other.second, other.first])


@given(array=arrays(np.float32, (2, 3), elements=st.floats(width=32)))
def test_every_array_agrees_with_itself(array: Array) -> None:
    assert compare_arrays(array, array.copy(), np.zeros((2, 3))).verdict is Verdict.AGREE


def test_flags_say_where_the_nonfinite_numbers_differ() -> None:
    first, second = np.array([NAN, NAN, INF, INF, 1.0, 1.0]), np.array([NAN, 1.0, INF, -INF, INF, 2.0])
    flags = differing_nonfinite(first, second)
    np.testing.assert_array_equal(flags, [False, True, False, True, True, False])
    assert index_of_largest(flags.reshape(2, 3)) == (0, 1)


def test_where_anything_is_right_nan_is_too_and_nowhere_else() -> None:
    first, second = np.array([np.nan, 1.0]), np.array([0.0, 1.0])
    assert compare_arrays(first, second, np.array([np.nan, 1e-9])).verdict is Verdict.AGREE
    assert compare_arrays(first, second, np.array([1.0, np.nan])).verdict is Verdict.NONFINITE
