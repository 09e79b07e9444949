from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from attncheck.quantities import QUANTITIES

Array = NDArray[np.float64]

ROWS = (1, 2, 3, 4)
SINGLE_QUERY = (2, 2, 1, 3)
VALUE = (2, 2, 3, 2)


def _whole(shape: tuple[int, ...], low: int, high: int) -> st.SearchStrategy[Array]:
    """Whole numbers: products and sums of them are exact, so that a bound must hold without any slack."""
    return arrays(np.int64, shape, elements=st.integers(low, high)).map(lambda array: array.astype(np.float64))


def test_the_row_maxima_are_those_that_the_base_r_vignette_prints() -> None:
    scores = np.array([[6, 4, 10, 5], [4, 6, 10, 6], [10, 10, 20, 11], [3, 1, 4, 2]], dtype=np.float64)
    np.testing.assert_array_equal(QUANTITIES["row_maxima"].compute(scores, {}), [[10], [10], [20], [4]])


@given(stage=_whole(ROWS, -50, 50), moved=_whole(ROWS, -5, 5), slack=_whole(ROWS, 0, 3))
def test_row_maxima_move_no_further_than_their_radius(stage: Array, moved: Array, slack: Array) -> None:
    quantity = QUANTITIES["row_maxima"]
    radius = quantity.radius(np.abs(moved) + slack, stage, {}, {})
    change = np.abs(quantity.compute(stage + moved, {}) - quantity.compute(stage, {}))
    assert (change <= radius).all()


@given(weights=_whole(SINGLE_QUERY, -9, 9), value=_whole(VALUE, -9, 9))
def test_the_applied_values_add_up_to_the_output(weights: Array, value: Array) -> None:
    applied = QUANTITIES["applied_values"].compute(weights, {"value": value})
    np.testing.assert_array_equal(applied.sum(axis=-2, keepdims=True), weights @ value)


@given(
    weights=_whole(SINGLE_QUERY, -9, 9),
    value=_whole(VALUE, -9, 9),
    weights_moved=_whole(SINGLE_QUERY, -3, 3),
    value_moved=_whole(VALUE, -3, 3),
)
def test_applied_values_move_no_further_than_their_radius(
    weights: Array, value: Array, weights_moved: Array, value_moved: Array
) -> None:
    quantity = QUANTITIES["applied_values"]
    radius = quantity.radius(np.abs(weights_moved), weights, {"value": value}, {"value": np.abs(value_moved)})
    moved = quantity.compute(weights + weights_moved, {"value": value + value_moved})
    assert (np.abs(moved - quantity.compute(weights, {"value": value})) <= radius).all()


@given(
    weights=arrays(np.float64, ROWS, elements=st.floats(0, 1)),
    moved=arrays(np.float64, ROWS, elements=st.floats(-0.5, 0.5)),
)
def test_log_weights_move_no_further_than_their_radius(weights: Array, moved: Array) -> None:
    quantity = QUANTITIES["log_weights"]
    other = np.maximum(weights + moved, 0)
    radius = quantity.radius(np.abs(other - weights), weights, {}, {})
    finite = np.isfinite(radius)
    before, after = quantity.compute(weights, {})[finite], quantity.compute(other, {})[finite]
    same = before == after
    assert (
        same | (np.abs(np.where(same, 0, after) - np.where(same, 0, before)) <= radius[finite] * (1 + 1e-12) + 1e-13)
    ).all()


def test_log_weights_are_those_of_a_log_softmax() -> None:
    scores = np.array([[1.0, 2.0, -np.inf]])
    weights = np.exp(scores - 2) / np.exp(scores - 2).sum()
    expected = scores - np.log(np.exp(scores).sum())
    np.testing.assert_allclose(QUANTITIES["log_weights"].compute(weights, {}), expected, rtol=1e-15)


def test_a_mask_is_read_from_what_is_minus_infinity() -> None:
    masked = np.array([[1.0, -np.inf, np.nan, -1e38]])
    np.testing.assert_array_equal(QUANTITIES["allowed"].compute(masked, {}), [[1, 0, np.nan, 1]])
    np.testing.assert_array_equal(QUANTITIES["forbidden"].compute(masked, {}), [[0, 1, np.nan, 0]])
    radius = QUANTITIES["allowed"].radius(np.array([[2.0, 0.0, np.inf, 1e30]]), masked, {}, {})
    np.testing.assert_array_equal(radius, [[0, 0, np.inf, 0]])


@pytest.mark.parametrize(
    ("name", "stage_shape"),
    [*((name, ROWS) for name in QUANTITIES if name != "applied_values"), ("applied_values", SINGLE_QUERY)],
)
def test_the_declared_shape_is_the_computed_one(name: str, stage_shape: tuple[int, ...]) -> None:
    quantity = QUANTITIES[name]
    inputs, radii = {"value": np.ones(VALUE)}, {"value": np.zeros(VALUE)}
    declared = quantity.shape(stage_shape, {"value": VALUE})
    assert quantity.compute(np.ones(stage_shape), inputs).shape == declared
    assert quantity.radius(np.zeros(stage_shape), np.ones(stage_shape), inputs, radii).shape == declared


def test_applied_values_are_for_a_single_query_only() -> None:
    with pytest.raises(ValueError, match="needs a single query, got 2"):
        QUANTITIES["applied_values"].shape((1, 1, 2, 3), {"value": (1, 1, 3, 4)})


def test_a_quantity_is_found_by_its_own_name_and_says_what_it_means() -> None:
    assert {name: quantity.name for name, quantity in QUANTITIES.items()} == {name: name for name in QUANTITIES}
    assert all(quantity.meaning for quantity in QUANTITIES.values())
    assert {quantity.needs for quantity in QUANTITIES.values()} <= {None, "value"}
