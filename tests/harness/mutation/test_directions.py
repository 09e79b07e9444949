"""A mutant does what its name says: not just something else than the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attncheck.backends import numpy_backend
from attncheck.mutation.catalogue import variant_named

QUERY = KEY = np.array([[[[1.0, 2.0, -1.0], [0.5, 0.0, 2.0], [3.0, 1.0, 1.0]]]])
VALUE = np.array([[[[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]]])
SCORES = np.array([[[[0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [3.0, 0.0, -3.0]]]])


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("scale_of_width_plus_one", math.sqrt(3) / 2),
        ("scale_off_by_1e_6", 1 + 1e-6),
        ("scale_off_by_1e_5", 1 + 1e-5),
        ("scale_missing", math.sqrt(3)),
        ("scale_applied_twice", 1 / math.sqrt(3)),
        ("scale_without_root", 1 / math.sqrt(3)),
    ],
)
def test_a_wrong_scale_is_wrong_by_the_factor_that_its_name_says(name: str, factor: float) -> None:
    scores = variant_named(name).dot_scores(QUERY, KEY)["scores"]
    np.testing.assert_allclose(scores, factor * numpy_backend.dot_scores(QUERY, KEY)["scores"], rtol=1e-14)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("causal_sees_the_next_key", [[1, 1, 0], [1, 1, 1], [1, 1, 1]]),
        ("causal_without_its_own_key", [[0, 0, 0], [1, 0, 0], [1, 1, 0]]),
        ("causal_mirrored", [[1, 1, 1], [0, 1, 1], [0, 0, 1]]),
        ("causal_ignored", [[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
        ("causal_by_groups_of_four", [[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
    ],
)
def test_a_wrong_causal_mask_lets_through_what_its_name_says(name: str, allowed: list[list[int]]) -> None:
    masked = variant_named(name).mask_scores(SCORES, is_causal=True)["masked"]
    np.testing.assert_array_equal(np.isfinite(masked[0, 0]), np.array(allowed, bool))


def test_a_causal_mask_that_is_aligned_bottom_right_lets_a_single_query_see_every_key() -> None:
    masked = variant_named("causal_aligned_bottom_right").mask_scores(SCORES[:, :, :1], is_causal=True)["masked"]
    assert np.isfinite(masked).all()


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("mask_inverted", [-np.inf, 1, -np.inf]),
        ("mask_ignored", [0, 1, 2]),
        ("mask_filled_with_minus_1e4", [0, -1e4, 2]),
        ("mask_filled_with_minus_1e_minus_9", [0, -1e-9, 2]),
        ("mask_multiplied_to_scores", [0, 0, 2]),
        ("mask_added_as_zero_and_one", [1, 1, 3]),
        ("mask_rounded_up_to_four_keys", [0, 1, 2]),
    ],
)
def test_a_wrong_mask_leaves_the_row_that_its_name_says(name: str, row: list[float]) -> None:
    masked = variant_named(name).mask_scores(SCORES, mask=np.array([True, False, True]))["masked"]
    np.testing.assert_array_equal(masked[0, 0, 0], row)


@pytest.mark.parametrize("name", ["one_added_to_the_sum", "sum_plus_1e_3", "sum_plus_1e_6", "sum_plus_1e_9"])
def test_an_enlarged_sum_leaves_rows_that_add_up_to_less_than_one(name: str) -> None:
    added = {"one_added_to_the_sum": 1.0}.get(name) or float(name.removeprefix("sum_plus_").replace("_", "-"))
    weights = variant_named(name).softmax(SCORES)["weights"]
    total = np.exp(SCORES - SCORES.max(axis=-1, keepdims=True)).sum(axis=-1)
    np.testing.assert_allclose(weights.sum(axis=-1), total / (total + added), rtol=1e-14)


@pytest.mark.parametrize(("name", "axis"), [("softmax_over_queries", 2), ("softmax_over_heads", 1)])
def test_a_softmax_over_a_wrong_axis_adds_up_to_one_there(name: str, axis: int) -> None:
    scores = np.random.default_rng(3).normal(size=(2, 3, 4, 5))
    np.testing.assert_allclose(variant_named(name).softmax(scores)["weights"].sum(axis=axis), 1)


def test_a_logarithm_of_base_two_enlarges_only_what_is_added_to_the_maximum() -> None:
    got = variant_named("log_sum_exp_in_base_two").softmax(SCORES)["log_sum_exp"]
    honest = numpy_backend.softmax(SCORES)["log_sum_exp"]
    maximum = SCORES.max(axis=-1)
    np.testing.assert_allclose(got - maximum, (honest - maximum) / math.log(2))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("empty_row_gives_nan", [np.nan] * 3),
        ("empty_row_is_uniform", [1 / 3] * 3),
        ("empty_row_takes_the_first_key", [1, 0, 0]),
    ],
)
def test_an_empty_row_gets_the_weights_that_its_name_says(name: str, row: list[float]) -> None:
    scores = SCORES.copy()
    scores[0, 0, 1] = -np.inf
    weights = variant_named(name).softmax(scores)["weights"]
    np.testing.assert_array_equal(weights[0, 0, 1], row)
    np.testing.assert_array_equal(weights[0, 0, [0, 2]], numpy_backend.softmax(scores)["weights"][0, 0, [0, 2]])


def test_swapped_values_are_those_of_the_first_two_keys() -> None:
    got = variant_named("two_values_swapped").attention(QUERY, KEY, VALUE)["output"]
    wanted = numpy_backend.attention(QUERY, KEY, VALUE)["weights"] @ VALUE[:, :, [1, 0, 2]]
    np.testing.assert_allclose(got, wanted)


def test_rounding_to_bfloat16_keeps_eight_bits_and_truncating_goes_towards_zero() -> None:
    value = np.array([[[[1 + 1 / 256 + 1 / 1024]]]])
    one = np.ones((1, 1, 1, 1))
    assert variant_named("value_in_bfloat16").attention(one, one, value)["output"].item() == 1 + 1 / 128
    third = variant_named("weights_truncated_to_bfloat16").attention(one, np.ones((1, 1, 3, 1)), np.ones((1, 1, 3, 1)))
    assert third["weights"].max() < 1 / 3
    assert third["weights"].max() > 1 / 3 - 2**-9


def test_a_row_sum_in_bfloat16_sticks_at_256_and_in_float16_at_2048() -> None:
    flat = np.zeros((1, 1, 1, 3000))
    assert variant_named("sum_accumulated_in_bfloat16").softmax(flat)["weights"][0, 0, 0, 0] == 1 / 256
    assert variant_named("sum_accumulated_in_float16").softmax(flat)["weights"][0, 0, 0, 0] == 1 / 2048
