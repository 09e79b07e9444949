"""A mutant of an option does what its name says, in numbers that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.execution.operations import apply_layout
from attncheck.mutation.catalogue import variant_named
from attncheck.mutation.layouts import memory_of

Array = NDArray[Any]

ZEROS = np.zeros((1, 1, 4, 5))


@pytest.mark.parametrize(
    ("name", "window", "keys_of_query_two"),
    [
        ("window_one_key_too_many_before", (1, 0), [0, 1, 2]),
        ("window_one_key_too_few_before", (1, 0), [2]),
        ("window_one_key_too_many_after", (0, 1), [2, 3, 4]),
        ("window_one_key_too_few_after", (0, 1), [2]),
        ("window_sides_swapped", (2, 0), [2, 3, 4]),
        ("one_sided_window_on_both_sides", (1, None), [1, 2, 3]),
        ("open_right_side_taken_for_zero", (1, None), [1, 2]),
        ("open_left_side_taken_for_zero", (None, 1), [2, 3]),
        ("side_of_zero_taken_for_open", (1, 0), [1, 2, 3, 4]),
        ("window_split_between_its_sides", (2, 2), [1, 2, 3]),
        ("window_ignored", (0, 0), [0, 1, 2, 3, 4]),
        ("window_aligned_bottom_right", (0, 0), [3]),
        ("window_does_not_move", (1, 1), [0, 1]),
        ("window_by_groups_of_four", (0, 0), [0, 1, 2, 3]),
        ("window_without_its_own_key", (1, 1), [1, 3]),
        ("window_inverted", (1, 0), [0, 3, 4]),
    ],
)
def test_a_wrong_window_lets_through_what_its_name_says(
    name: str, window: tuple[int | None, int | None], keys_of_query_two: list[int]
) -> None:
    masked = variant_named(name).mask_scores(ZEROS, window=window)["masked"]
    assert np.flatnonzero(np.isfinite(masked[0, 0, 2])).tolist() == keys_of_query_two


def test_a_window_and_causality_that_may_each_allow_forbid_less_than_both() -> None:
    masked = variant_named("window_or_causal").mask_scores(ZEROS, window=(0, 1), is_causal=True)["masked"]
    assert np.flatnonzero(np.isfinite(masked[0, 0, 2])).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("key_lengths_one_too_long", [4, 1, 6]),
        ("key_lengths_one_too_short", [2, 0, 4]),
        ("key_lengths_ignored", [5, 5, 5]),
        ("key_lengths_of_the_first_batch_entry", [3, 3, 3]),
        ("key_lengths_of_the_longest_batch_entry", [5, 5, 5]),
        ("key_lengths_of_the_next_batch_entry", [0, 5, 3]),
        ("key_lengths_rounded_up_to_four", [4, 0, 5]),
        ("key_length_of_zero_taken_for_all", [3, 5, 5]),
        ("key_lengths_at_least_one", [3, 1, 5]),
    ],
)
def test_wrong_lengths_let_through_as_many_keys_as_their_name_says(name: str, lengths: list[int]) -> None:
    scores = np.zeros((3, 1, 1, 5))
    masked = variant_named(name).mask_scores(scores, key_lengths=np.array([3, 0, 5]))["masked"]
    np.testing.assert_array_equal(np.isfinite(masked).sum(axis=-1)[:, 0, 0], np.minimum(lengths, 5))


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("reference", [0, 0, 0, 1, 1, 1]),
        ("groups_tiled", [0, 1, 0, 1, 0, 1]),
        ("groups_as_large_as_their_number", [0, 0, 1, 1, 0, 0]),
        ("one_group_for_all_heads", [0] * 6),
        ("groups_reversed", [1, 1, 1, 0, 0, 0]),
        ("groups_shifted_by_one_head", [0, 0, 1, 1, 1, 0]),
        ("groups_of_two_heads", [0, 0, 1, 1, 1, 1]),
        ("values_of_groups_tiled", [0, 1, 0, 1, 0, 1]),
        ("values_of_the_first_head_of_each_group_alone", [0, 0, 0, 1, 0, 0]),
    ],
)
def test_a_wrong_head_map_averages_the_values_of_the_heads_that_its_name_says(name: str, groups: list[int]) -> None:
    """Every value is the number of its head, so that every average is."""
    query, key = np.ones((1, 6, 1, 2)), np.ones((1, 2, 3, 2))
    value = np.broadcast_to(np.arange(2.0)[:, np.newaxis, np.newaxis], (1, 2, 3, 1))
    output = variant_named(name).attention(query, key, value)["output"]
    np.testing.assert_allclose(output[0, :, 0, 0], groups, atol=1e-15)


def test_a_group_count_as_large_as_a_group_hides_a_head_map_by_the_number_of_groups() -> None:
    rng = np.random.default_rng(22)
    arrays = rng.normal(size=(1, 4, 3, 5)), rng.normal(size=(1, 2, 3, 5)), rng.normal(size=(1, 2, 3, 5))
    got = variant_named("groups_as_large_as_their_number").attention(*arrays)["output"]
    np.testing.assert_array_equal(got, numpy_backend.attention(*arrays)["output"])


@pytest.mark.parametrize(
    ("name", "capped"),
    [
        ("softcap_ignored", 3),
        ("softcap_before_the_scale", 2 * np.tanh(12 / 2) / 4),
        ("softcap_doubled", 4 * np.tanh(3 / 4)),
        ("softcap_applied_twice", 2 * np.tanh(np.tanh(3 / 2))),
        ("softcap_not_multiplied_back", np.tanh(3 / 2)),
        ("softcap_not_divided_by", 2 * np.tanh(3)),
        ("softcap_clips", 2),
        ("softcap_by_softsign", 2 * 3 / (2 + 3)),
        ("softcap_by_a_ratio_of_exponentials", 2 * np.tanh(3 / 2)),
        ("softcap_by_expm1", 2 * np.tanh(3 / 2)),
    ],
)
def test_a_wrong_softcap_gives_the_number_that_its_name_says(name: str, capped: float) -> None:
    query, key = np.array([[[[3.0]]]]), np.array([[[[4.0]]]])
    stages = variant_named(name).dot_scores(query, key, scale=0.25, softcap=2.0)
    np.testing.assert_allclose(stages["capped"].item(), capped, rtol=1e-14)


def test_a_ratio_of_exponentials_overflows_far_beyond_the_cap() -> None:
    query, key = np.array([[[[1000.0]]]]), np.ones((1, 1, 1, 1))
    with np.errstate(all="ignore"):
        ratio = variant_named("softcap_by_a_ratio_of_exponentials").dot_scores(query, key, softcap=1.0)
    assert np.isnan(ratio["capped"].item())
    assert variant_named("softcap_by_expm1").dot_scores(query, key, softcap=1.0)["capped"] == 1


def test_a_softcap_after_the_mask_gives_masked_keys_minus_the_cap() -> None:
    one = np.ones((1, 1, 1, 1))
    keys, mask = np.ones((1, 1, 2, 1)), np.array([[[[True, False]]]])
    stages = variant_named("softcap_after_the_mask").attention(one, keys, keys, mask=mask, softcap=5.0)
    np.testing.assert_array_equal(stages["masked"][0, 0, 0], [5 * np.tanh(1 / 5), -5])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("reference", [1, 2, 3, 4]),
        ("past_dropped", [0, 0, 3, 4]),
        ("past_appended_after_the_keys", [3, 4, 1, 2]),
        ("past_values_dropped", [0, 0, 3, 4]),
        ("past_values_reversed", [2, 1, 3, 4]),
        ("values_one_step_behind_their_keys", [4, 1, 2, 3]),
        ("new_keys_not_written_to_the_cache", [1, 2, 0, 0]),
        ("last_key_of_the_past_lost", [1, 3, 4, 0]),
        ("new_keys_written_one_slot_late", [1, 2, 0, 3]),
        ("past_key_and_past_value_swapped", [5, 6, 3, 4]),
    ],
)
def test_a_wrong_cache_holds_the_values_that_its_name_says(name: str, values: list[float]) -> None:
    def column(*numbers: float) -> Array:
        return np.array(numbers)[np.newaxis, np.newaxis, :, np.newaxis]

    past = {"past_key": column(5.0, 6.0), "past_value": column(1.0, 2.0)}
    only = np.eye(4, dtype=bool)[np.newaxis, np.newaxis]  # query i sees slot i alone
    # The past's two positions and two new ones are asked for by four queries.
    output = variant_named(name).attention(
        np.zeros((1, 1, 4, 1)), column(7.0, 8.0), column(3.0, 4.0), mask=only, **past
    )
    np.testing.assert_array_equal(output["output"][0, 0, :, 0], values)


@pytest.mark.parametrize(
    ("name", "total"),
    [("reference", 4), ("sinks_ignored", 2), ("sinks_counted_twice", 6), ("sinks_scaled_with_scores", 10)],
)
def test_a_wrong_sink_has_the_part_of_the_sum_that_its_name_says(name: str, total: float) -> None:
    """Two keys have a score of 0, and the sink is log 2: the sum is 4."""
    query, keys = np.zeros((1, 1, 1, 2)), np.ones((1, 1, 2, 2))
    stages = variant_named(name).attention(query, keys, keys, sinks=np.array([np.log(2)]), scale=3.0)
    np.testing.assert_allclose(stages["weights"], np.full((1, 1, 1, 2), 1 / total), rtol=1e-15)
    np.testing.assert_allclose(stages["log_sum_exp"].item(), np.log(total), rtol=1e-15)


def test_sinks_that_are_read_by_key_heads_are_those_of_the_first_heads() -> None:
    query, keys, sinks = np.zeros((1, 4, 1, 2)), np.ones((1, 2, 1, 2)), np.log([1.0, 2.0, 3.0, 4.0])
    weights = variant_named("sinks_read_by_key_heads").attention(query, keys, keys, sinks=sinks)["weights"]
    np.testing.assert_allclose(weights[0, :, 0, 0], 1 / (1 + np.array([1, 1, 2, 2])), rtol=1e-15)


def test_a_strided_view_is_read_with_what_lies_between() -> None:
    view = apply_layout({"key": np.arange(4.0).reshape(2, 2)}, {"key": "strided"})["key"]
    got = variant_named("strided_view_read_as_contiguous").from_numpy(view)
    np.testing.assert_array_equal(got, [[0, 7], [1, 7]])
    got = variant_named("last_stride_taken_for_one").from_numpy(view)
    np.testing.assert_array_equal(got, [[0, 7], [2, 7]])


def test_a_transposed_view_is_read_in_the_order_of_its_memory() -> None:
    array = np.arange(8.0).reshape(1, 2, 2, 2)
    view = apply_layout({"key": array}, {"key": "transposed"})["key"]
    got = variant_named("transposed_view_read_as_contiguous").from_numpy(view)
    np.testing.assert_array_equal(got.reshape(-1), [0, 1, 4, 5, 2, 3, 6, 7])
    interleaved = variant_named("merged_heads_read_as_interleaved").from_numpy(view)
    np.testing.assert_array_equal(interleaved[0, 0], [[0, 4], [2, 6]])


def test_a_broadcast_view_is_read_beyond_its_only_slice() -> None:
    array = np.broadcast_to(np.array([[1.0, 2.0, 3.0]]), (2, 3))
    view = apply_layout({"key": array}, {"key": "broadcast"})["key"]
    assert view.strides[0] == 0
    np.testing.assert_array_equal(memory_of(view), [1, 2, 3])
    got = variant_named("broadcast_view_read_once").from_numpy(view)
    np.testing.assert_array_equal(got, [[1, 2, 3], [0, 0, 0]])


@pytest.mark.parametrize("name", ["strided_view_read_as_contiguous", "broadcast_view_read_once"])
def test_a_contiguous_array_is_read_rightly(name: str) -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert variant_named(name).from_numpy(array) is array


# Two keys of equal weight: p = 1/2, dp = (g v1, g v2) = (2, 6), delta = 4, dlogits = (-1, 1).
QUERY, KEY = np.zeros((1, 1, 1, 4)), np.array([[[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]]])
VALUE, GRAD_OUTPUT = np.array([[[[1.0], [3.0]]]]), np.array([[[[2.0]]]])


@pytest.mark.parametrize(
    ("name", "grad_query"),
    [
        ("reference", [-0.5, 0.5, 0, 0]),
        ("row_sum_missing_in_the_gradient", [0.5, 1.5, 0, 0]),
        ("row_sum_of_the_gradient_averaged", [0, 1, 0, 0]),
        ("gradient_stops_at_the_softmax", [0, 0, 0, 0]),
        ("gradient_of_the_logits_without_weights", [-1, 1, 0, 0]),
        ("query_gradient_without_scale", [-1, 1, 0, 0]),
    ],
)
def test_a_wrong_gradient_of_the_query_is_the_one_that_its_name_says(name: str, grad_query: list[float]) -> None:
    gradients = variant_named(name).attention_gradients(QUERY, KEY, VALUE, GRAD_OUTPUT)
    np.testing.assert_allclose(gradients["grad_query"][0, 0, 0], grad_query, rtol=1e-15)


@pytest.mark.parametrize(
    ("name", "grad_bias"),
    [
        ("reference", [[-1, 1]]),
        ("bias_gradient_of_the_first_of_a_broadcast_axis", [[-0.5, 0.5]]),
        ("bias_gradient_averaged", [[-0.5, 0.5]]),
        ("bias_gradient_zero", [[0, 0]]),
        ("bias_gradient_scaled", [[-0.5, 0.5]]),
    ],
)
def test_a_wrong_gradient_of_a_spread_bias_is_the_one_that_its_name_says(
    name: str, grad_bias: list[list[float]]
) -> None:
    two = {"query": np.zeros((1, 1, 2, 4)), "grad_output": np.ones((1, 1, 2, 1))}  # dlogits of each are (-1/2, 1/2)
    gradients = variant_named(name).attention_gradients(key=KEY, value=VALUE, bias=np.zeros((1, 1, 1, 2)), **two)
    np.testing.assert_allclose(gradients["grad_bias"][0, 0], grad_bias, rtol=1e-15)


def test_a_bias_gradient_that_is_not_summed_has_the_shape_of_the_scores() -> None:
    query, grad_output = np.zeros((1, 3, 2, 4)), np.ones((1, 3, 2, 1))
    gradients = variant_named("bias_gradient_not_summed").attention_gradients(
        query, np.zeros((1, 3, 5, 4)), np.zeros((1, 3, 5, 1)), grad_output, bias=np.zeros((1, 3, 1, 5))
    )
    assert gradients["grad_bias"].shape == (1, 3, 2, 5)


@pytest.mark.parametrize(
    ("name", "grad_value"),
    [
        ("reference", [3, 12]),
        ("group_gradient_of_its_first_head", [1, 4]),
        ("group_gradient_without_its_last_head", [1, 4]),
        ("group_gradient_averaged", [1.5, 6]),
        ("group_gradient_summed_as_if_tiled", [5, 10]),
        ("value_gradient_of_groups_summed_as_if_tiled", [5, 10]),
    ],
)
def test_the_heads_of_a_group_contribute_as_the_name_says(name: str, grad_value: list[float]) -> None:
    """One key has all the weight: the gradient of its value is the sum of its query heads' gradients 1, 2, 4, 8."""
    grad_output = np.array([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1, 1)
    one = np.ones((1, 2, 1, 1))
    gradients = variant_named(name).attention_gradients(np.ones((1, 4, 1, 1)), one, one, grad_output)
    np.testing.assert_array_equal(gradients["grad_value"][0, :, 0, 0], grad_value)


@pytest.mark.parametrize(
    ("name", "grad_value"),
    [
        ("reference", 0),
        ("gradient_nan_at_an_empty_row", np.nan),
        ("gradient_uniform_at_an_empty_row", 1),
    ],
)
def test_an_empty_row_gives_the_values_the_gradient_that_the_name_says(name: str, grad_value: float) -> None:
    mask = np.zeros((1, 1, 1, 2), bool)
    gradients = variant_named(name).attention_gradients(QUERY, KEY, VALUE, GRAD_OUTPUT, mask=mask)
    np.testing.assert_array_equal(gradients["grad_value"], np.full((1, 1, 2, 1), grad_value))


def test_scales_that_are_multiplied_elsewhere_are_rounded_elsewhere() -> None:
    rng = np.random.default_rng(1603)
    codes = [(30 * rng.normal(size=(2, 2, 9, 6))).astype(ml_dtypes.float8_e4m3fn) for _ in range(2)]
    scales = {f"{name}_scale": rng.uniform(0.02, 0.2, (1, 2, 1)) for name in ("key", "value")}  # one for a head
    query = rng.normal(size=(2, 4, 5, 6))
    right = numpy_backend.quantized_attention(query, *codes, **scales)["output"]
    moved = variant_named("scales_multiplied_into_queries_and_output").quantized_attention(query, *codes, **scales)
    np.testing.assert_allclose(moved["output"], right, rtol=1e-12)
    assert not np.array_equal(moved["output"], right)
