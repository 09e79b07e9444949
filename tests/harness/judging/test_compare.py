"""Two arrays compared: shape, then dtype, then the places of NaN and infinity, then values."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from attncheck.harness.judging.compare import (
    Comparison,
    absolute_difference,
    compare_stage,
    differing_nonfinite,
    first_index,
)
from attncheck.harness.verdicts import Verdict

Array = NDArray[Any]
DTYPES = ("float32", "float64")
NAN, INF = np.nan, np.inf


def compare(first: Any, second: Any, dtype: str = "float64", stage: str = "output") -> Comparison:
    return compare_stage(stage, {stage: np.array(first, dtype)}, {stage: np.array(second, dtype)})


# What comes first.


def test_shape_comes_before_everything_else() -> None:
    found = compare_stage("output", {"output": np.full((2, 3), NAN)}, {"output": np.ones((3, 2), np.float32)})
    assert found == Comparison(Verdict.SHAPE, "shape 2x3 against 3x2")


def test_shapes_that_would_broadcast_are_different_shapes() -> None:
    assert compare([[1.0]], [1.0]).verdict is Verdict.SHAPE


def test_dtype_comes_before_nan_and_values() -> None:
    found = compare_stage("output", {"output": np.array([NAN, 1])}, {"output": np.array([1, 2], np.float32)})
    assert found == Comparison(Verdict.DTYPE, "dtype float64 against float32")


def test_equal_values_of_another_dtype_do_not_agree() -> None:
    found = compare_stage("output", {"output": np.ones(2)}, {"output": np.ones(2, np.float32)})
    assert found.verdict is Verdict.DTYPE


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex128", "object"])
def test_what_is_no_floating_number_has_the_wrong_dtype_and_raises_nothing(dtype: str) -> None:
    found = compare([1, 0], [1, 0], dtype)
    assert (found.verdict, found.message) == (Verdict.DTYPE, f"dtype {dtype} is not a floating one")


def test_the_places_of_nan_come_before_values() -> None:
    found = compare([[1.0, 2.0], [3.0, NAN]], [[100.0, 2.0], [3.0, 4.0]])
    assert (found.verdict, found.index, found.second) == (Verdict.NONFINITE, (1, 1), 4.0)
    assert np.isnan(found.first or 0)
    assert found.difference is found.units is None


# NaN and infinity.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "second"), list(permutations([NAN, INF, -INF, 1.0], 2)))
def test_nan_and_each_infinity_agree_with_nothing_else(dtype: str, first: float, second: float) -> None:
    assert compare([0, first], [0, second], dtype).verdict is Verdict.NONFINITE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_nan_and_each_infinity_agree_with_themselves(dtype: str, special: float) -> None:
    found = compare([special, 2.0], [special, 2.0], dtype)
    assert (found.verdict, found.difference, found.units) == (Verdict.AGREE, 0.0, 0.0)


def test_nan_in_another_place_does_not_agree() -> None:
    found = compare([NAN, 1.0], [1.0, NAN])
    assert (found.verdict, found.index) == (Verdict.NONFINITE, (0,))


def test_values_are_still_compared_beside_nan_and_infinity() -> None:
    found = compare([NAN, INF, 1.0], [NAN, INF, 1.5])
    assert (found.verdict, found.index, found.difference) == (Verdict.NUMERIC, (2,), 0.5)


# Values.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [1.0, -1.0, 3.0, 1e-3, 1000.0])
@pytest.mark.parametrize("direction", [1, -1])
def test_sixty_four_units_agree_and_one_more_does_not(dtype: str, start: float, direction: int) -> None:
    # The row's largest number sets the unit; the small number beside it is what moves.
    largest = np.array(start, dtype)
    unit = np.abs(np.spacing(largest))
    for count, verdict in ((64, Verdict.AGREE), (65, Verdict.NUMERIC)):
        found = compare([largest, 0], [largest, direction * count * unit], dtype)
        assert (found.verdict, found.units, found.index) == (verdict, count, (1,))
        assert found.difference == count * float(unit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixty_four_steps_of_nextafter_agree_and_one_more_does_not(dtype: str) -> None:
    steps = [np.array(1.5, dtype)]
    for _ in range(65):
        steps.append(np.nextafter(steps[-1], np.array(2, dtype)))
    assert compare([steps[0]], [steps[64]], dtype).verdict is Verdict.AGREE
    assert compare([steps[0]], [steps[65]], dtype).verdict is Verdict.NUMERIC


def test_the_worst_element_in_units_is_reported_and_not_the_largest_difference() -> None:
    found = compare([[1000.0, 0.0], [1e-6, 0.0]], [[1000.0, 1e-12], [1e-6, 1e-13]])
    assert found.index == (1, 1)
    assert (found.first, found.second, found.difference) == (0.0, 1e-13, 1e-13)


def test_an_error_counts_in_units_of_its_own_row() -> None:
    # 1e-13 is nothing beside 1000 and far too much beside 1e-6.
    assert compare([[1000.0, 0.0]], [[1000.0, 1e-13]]).verdict is Verdict.AGREE
    assert compare([[1000.0, 0.0], [1e-6, 0.0]], [[1000.0, 0.0], [1e-6, 1e-13]]).verdict is Verdict.NUMERIC


@pytest.mark.parametrize("dtype", DTYPES)
def test_flushing_a_subnormal_number_to_zero_does_not_count(dtype: str) -> None:
    smallest_normal = np.finfo(dtype).smallest_normal
    largest_subnormal = np.nextafter(smallest_normal, np.array(0, dtype), dtype=dtype)
    assert compare([largest_subnormal], [0], dtype).verdict is Verdict.AGREE
    assert compare([4 * smallest_normal], [0], dtype).verdict is Verdict.NUMERIC


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_agrees_with_minus_zero(dtype: str) -> None:
    assert compare([0.0], [-0.0], dtype).verdict is Verdict.AGREE


def test_masked_scores_are_held_to_the_unit_of_the_scores_behind_the_mask() -> None:
    scores = np.array([[1024.0, 1.0]])
    moved = 1.0 + 64 * np.spacing(1024.0)
    own = {"scores": scores, "masked": np.array([[-INF, 1.0]])}
    other = {"scores": scores, "masked": np.array([[-INF, moved]])}
    assert compare_stage("masked", own, other).verdict is Verdict.AGREE
    # Without the scores, the only number that is left sets the unit.
    del own["scores"], other["scores"]
    assert compare_stage("masked", own, other).verdict is Verdict.NUMERIC


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_empty_arrays_agree_and_have_no_worst_element(shape: tuple[int, ...]) -> None:
    assert compare(np.zeros(shape), np.zeros(shape)) == Comparison(Verdict.AGREE)


def test_single_numbers_of_no_axis_are_compared() -> None:
    found = compare(1.0, 2.0)
    assert (found.verdict, found.index, found.difference) == (Verdict.NUMERIC, (), 1.0)


def test_a_difference_beyond_the_range_of_float64_disagrees() -> None:
    assert compare([1.7e308], [-1.7e308]).verdict is Verdict.NUMERIC


@pytest.mark.parametrize("dtype", DTYPES)
def test_beside_the_largest_number_of_the_dtype_not_everything_agrees(dtype: str) -> None:
    # The largest number has no next one; the distance to the one before is as good.
    largest = np.finfo(dtype).max
    assert compare([largest, 0], [largest, largest / 2], dtype).verdict is Verdict.NUMERIC
    assert compare([largest], [np.nextafter(largest, np.array(0, dtype))], dtype).units == 1


def test_a_float32_difference_is_taken_without_rounding() -> None:
    small = np.array([2.0**-60], np.float32)
    assert absolute_difference(np.array([1], np.float32), small).item() == 1 - 2.0**-60
    assert absolute_difference(small, np.array([-(2.0**-100)], np.float32)).item() == 2.0**-60 + 2.0**-100


SPECIAL = st.sampled_from([NAN, INF, -INF, 0.0, 1.0, -2.5])


@given(first=arrays(np.float64, (2, 3), elements=SPECIAL), second=arrays(np.float64, (2, 3), elements=SPECIAL))
def test_two_arrays_compare_alike_in_either_order(first: Array, second: Array) -> None:
    there, back = compare(first, second), compare(second, first)
    assert (there.verdict, there.index, there.difference, there.units) == (
        back.verdict,
        back.index,
        back.difference,
        back.units,
    )
    np.testing.assert_array_equal([there.first, there.second], [back.second, back.first])


@given(array=arrays(np.float32, (2, 3), elements=st.floats(width=32)))
def test_every_array_agrees_with_itself(array: Array) -> None:
    assert compare_stage("weights", {"weights": array}, {"weights": array.copy()}).verdict is Verdict.AGREE


def test_flags_say_where_the_nonfinite_numbers_differ() -> None:
    first, second = np.array([NAN, NAN, INF, INF, 1.0, 1.0]), np.array([NAN, 1.0, INF, -INF, INF, 2.0])
    flags = differing_nonfinite(first, second)
    np.testing.assert_array_equal(flags, [False, True, False, True, True, False])
    assert first_index(flags.reshape(2, 3)) == (0, 1)
