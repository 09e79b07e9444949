"""The unit of the interim rule: the last place of the row's largest finite magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.harness.judging.interim_rule import UNITS, unit_of_rows

Array = NDArray[Any]
DTYPES = ("float32", "float64")
# Distance from 1 to the next number: 2^-23 and 2^-52 by IEEE 754; and the smallest normal numbers.
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}
SMALLEST_NORMAL = {"float32": 2.0**-126, "float64": 2.0**-1022}


def units(stage: str, dtype: str, **stages: Any) -> Array:
    return unit_of_rows(stage, {name: np.array(values, dtype=dtype) for name, values in stages.items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_unit_is_the_last_place_of_the_largest_magnitude_of_each_row(dtype: str) -> None:
    unit = units("scores", dtype, scores=[[1.0, 0.001, -5.0], [0.3, 0.2, 0.1]])
    assert unit.dtype == np.float64
    # 5 lies in [4, 8), 0.3 in [1/4, 1/2).
    np.testing.assert_array_equal(unit, np.array([[4.0] * 3, [0.25] * 3]) * EPSILON[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_larger_of_the_implementations_counts(dtype: str) -> None:
    small, large = {"scores": np.array([[1.0, 1.0]], dtype)}, {"scores": np.array([[1.0, 8.0]], dtype)}
    for pair in ((small, large), (large, small)):
        np.testing.assert_array_equal(unit_of_rows("scores", *pair), [[8 * EPSILON[dtype]] * 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_and_nan_have_no_magnitude(dtype: str) -> None:
    unit = units("scores", dtype, scores=[[np.inf, -np.inf, np.nan, 2.0]])
    np.testing.assert_array_equal(unit, [[2 * EPSILON[dtype]] * 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_scores_keep_the_unit_of_the_row_they_were_computed_in(dtype: str) -> None:
    unit = units("masked", dtype, scores=[[64.0, 1.0]], biased=[[0.5, 1.0]], masked=[[-np.inf, 1.0]])
    np.testing.assert_array_equal(unit, [[64 * EPSILON[dtype]] * 2])
    unit = units("masked", dtype, scores=[[0.5, 1.0]], biased=[[64.0, 1.0]], masked=[[-np.inf, 1.0]])
    np.testing.assert_array_equal(unit, [[64 * EPSILON[dtype]] * 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_biased_scores_keep_the_unit_of_the_scores_and_scores_that_of_their_own(dtype: str) -> None:
    stages = {"raw_scores": [[1024.0, 1.0]], "scores": [[16.0, 1.0]], "biased": [[0.0, 1.0]]}
    np.testing.assert_array_equal(units("biased", dtype, **stages), [[16 * EPSILON[dtype]] * 2])
    np.testing.assert_array_equal(units("scores", dtype, **stages), [[16 * EPSILON[dtype]] * 2])


def test_scores_of_another_shape_lend_no_magnitude() -> None:
    unit = units("masked", "float64", scores=[[64.0]], masked=[[-np.inf, 1.0]])
    np.testing.assert_array_equal(unit, [[EPSILON["float64"]] * 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_log_sum_exp_near_zero_has_the_unit_of_one(dtype: str) -> None:
    np.testing.assert_array_equal(units("log_sum_exp", dtype, log_sum_exp=[1e-9, -1e-5]), [EPSILON[dtype]] * 2)
    np.testing.assert_array_equal(units("output", dtype, output=[2.0**-20, 0]), [2.0**-20 * EPSILON[dtype]] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [[0.0, 0.0], [np.nan, np.inf]])
def test_units_allowed_together_are_never_less_than_the_smallest_normal_number(dtype: str, row: list[float]) -> None:
    np.testing.assert_array_equal(UNITS * units("weights", dtype, weights=[row]), [[SMALLEST_NORMAL[dtype]] * 2])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 0, 0)])
def test_an_empty_stage_has_no_units(shape: tuple[int, ...]) -> None:
    assert unit_of_rows("scores", {"scores": np.zeros(shape)}).shape == shape


def test_a_single_number_is_a_row_of_its_own() -> None:
    assert units("output", "float64", output=4.0).item() == 4 * EPSILON["float64"]
