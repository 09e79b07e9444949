"""A mutant does what its name says, in numbers that can be worked out by hand: not just something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.execution.operations import apply_layout
from attncheck.mutation.catalogue import variant_named
from attncheck.mutation.heads import memory_of

Array = NDArray[Any]

QUERY = KEY = np.array([[[[1.0, 2.0, -1.0], [0.5, 0.0, 2.0], [3.0, 1.0, 1.0]]]])
SCORES = np.array([[[[0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [3.0, 0.0, -3.0]]]])
TOTAL = np.exp(SCORES - SCORES.max(-1, keepdims=True)).sum(-1)[0, 0]
EMPTY = np.where(np.arange(3)[:, None] == 1, -np.inf, SCORES)
ONE = np.ones((1, 1, 1, 1))
NAN, INF = np.nan, np.inf


def column(*numbers: float) -> Array:
    return np.array(numbers)[np.newaxis, np.newaxis, :, np.newaxis]


def masked(backend: Any, scores: Array, **given: Any) -> Any:
    """Scores of queries that are their rows, with keys that are unit vectors."""
    keys = np.broadcast_to(np.eye(scores.shape[-1]), (len(scores), 1, scores.shape[-1], scores.shape[-1]))
    return backend.attention(scores, keys, keys, scale=1.0, **given)["masked"]


def scale(backend: Any) -> Any:
    return backend.attention(QUERY, KEY, KEY)["scores"] / numpy_backend.dot_scores(QUERY, KEY)["scores"]


def causal(backend: Any) -> Any:
    return np.isfinite(masked(backend, SCORES, is_causal=True)[0, 0])


def causal_of_one_query(backend: Any) -> Any:
    return np.isfinite(masked(backend, SCORES[:, :, :1], is_causal=True)[0, 0, 0])


def masked_row(backend: Any) -> Any:
    return masked(backend, SCORES, mask=np.array([[[[True, False, True]]]]))[0, 0, 0]


def sum_of_weights(backend: Any) -> Any:
    return backend.softmax(SCORES)["weights"].sum(-1)[0, 0]


def empty_row(backend: Any) -> Any:
    return backend.softmax(EMPTY)["weights"][0, 0, 1]


def weight_of_one_in_three_thousand(backend: Any) -> Any:
    return backend.softmax(np.zeros((1, 1, 1, 3000)))["weights"][0, 0, 0, 0]


def above_the_maximum(backend: Any) -> Any:
    maximum = SCORES.max(axis=-1)
    return (backend.softmax(SCORES)["log_sum_exp"] - maximum)[0, 0] / np.log(TOTAL)


def swapped_values(backend: Any) -> Any:
    return backend.attention(QUERY[..., :2, :], KEY[..., :2, :], column(0.0, 1.0))["output"][0, 0, :, 0]


def window(*sides: int | None, **more: Any) -> Callable[[Any], Any]:
    """Which of five keys the third query sees."""

    def seen(backend: Any) -> Any:
        found = masked(backend, np.zeros((1, 1, 4, 5)), window=sides, **more)
        return np.flatnonzero(np.isfinite(found[0, 0, 2]))

    return seen


def lengths(backend: Any) -> Any:
    """How many of five keys are seen in three batch entries."""
    found = masked(backend, np.zeros((3, 1, 1, 5)), key_lengths=np.array([3, 0, 5]))
    return np.isfinite(found).sum(axis=-1)[:, 0, 0]


def groups(backend: Any) -> Any:
    """Every value is the number of its head, so that every average is."""
    query, key = np.ones((1, 6, 1, 2)), np.ones((1, 2, 3, 2))
    value = np.broadcast_to(np.arange(2.0)[:, np.newaxis, np.newaxis], (1, 2, 3, 1))
    return backend.attention(query, key, value)["output"][0, :, 0, 0]


def softcap(backend: Any) -> Any:
    return backend.attention(3 * ONE, 4 * ONE, ONE, scale=0.25, softcap=2.0)["capped"].item()


def softcap_far_beyond(backend: Any) -> Any:
    with np.errstate(all="ignore"):
        return backend.dot_scores(1000 * ONE, ONE, softcap=1.0)["capped"].item()


def softcap_of_a_masked_key(backend: Any) -> Any:
    keys, mask = np.ones((1, 1, 2, 1)), np.array([[[[True, False]]]])
    return backend.attention(ONE, keys, keys, mask=mask, softcap=5.0)["masked"][0, 0, 0]


def cache(backend: Any) -> Any:
    """The past's two values and two new ones, of which each of four queries sees one."""
    past = {"past_key": column(5.0, 6.0), "past_value": column(1.0, 2.0)}
    only = np.eye(4, dtype=bool)[np.newaxis, np.newaxis]
    found = backend.attention(np.zeros((1, 1, 4, 1)), column(7.0, 8.0), column(3.0, 4.0), mask=only, **past)
    return found["output"][0, 0, :, 0]


def sinks(backend: Any) -> Any:
    """Two keys have a score of 0, and the sink is log 2: the sum is 4."""
    query, keys = np.zeros((1, 1, 1, 2)), np.ones((1, 1, 2, 2))
    found = backend.attention(query, keys, keys, sinks=np.array([np.log(2)]), scale=3.0)
    return [*1 / found["weights"].reshape(-1), np.exp(found["log_sum_exp"].item())]


def sinks_of_heads(backend: Any) -> Any:
    query, keys = np.zeros((1, 4, 1, 2)), np.ones((1, 2, 1, 2))
    return 1 / backend.attention(query, keys, keys, sinks=np.log([1.0, 2.0, 3.0, 4.0]))["weights"][0, :, 0, 0] - 1


def view(layout: str, array: Array) -> Callable[[Any], Any]:
    laid_out = apply_layout({"key": array}, {"key": layout})["key"] if layout else array
    return lambda backend: backend.from_numpy(laid_out).reshape(-1)


def tokens(backend: Any) -> Any:
    """Two tokens of one head, between which those of another input lie."""
    array = STRIDED[np.newaxis, np.newaxis]
    return backend.from_numpy(
        apply_layout({"key": array, "value": array}, {"key": "fused", "value": "fused"})["key"]
    ).reshape(-1)


# Two keys of equal weight: p = 1/2, dp = (g v1, g v2) = (2, 6), delta = 4, dlogits = (-1, 1).
PAIR = {
    "query": np.zeros((1, 1, 1, 4)),
    "key": np.array([[[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]]]),
    "value": column(1.0, 3.0),
    "grad_output": 2 * ONE,
}


def grad_query(backend: Any) -> Any:
    return backend.attention_gradients(**PAIR)["grad_query"][0, 0, 0, :2]


def grad_bias(backend: Any) -> Any:
    """Of two queries, dlogits of each are (-1/2, 1/2)."""
    two = {"query": np.zeros((1, 1, 2, 4)), "grad_output": np.ones((1, 1, 2, 1))}
    return backend.attention_gradients(**PAIR | two, bias=np.zeros((1, 1, 1, 2)))["grad_bias"].reshape(-1)


def grad_value_of_groups(backend: Any) -> Any:
    """One key has all the weight: the gradient of its value is the sum of its query heads' gradients 1, 2, 4, 8."""
    grad_output = np.array([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1, 1)
    one = np.ones((1, 2, 1, 1))
    return backend.attention_gradients(np.ones((1, 4, 1, 1)), one, one, grad_output)["grad_value"][0, :, 0, 0]


def grad_value_without_a_key(backend: Any) -> Any:
    return backend.attention_gradients(**PAIR, mask=np.zeros((1, 1, 1, 2), bool))["grad_value"].reshape(-1)


STRIDED, TRANSPOSED = np.arange(4.0).reshape(2, 2), np.arange(8.0).reshape(1, 2, 2, 2)
REPEATED = np.broadcast_to(np.array([[1.0, 2.0, 3.0]]), (2, 3))

Rows = dict[str, Any]
DIRECTIONS: tuple[tuple[Callable[[Any], Any], Rows], ...] = (
    (scale, {"scale_of_width_plus_one": math.sqrt(3) / 2, "scale_off_by_1e_6": 1 + 1e-6}),
    (scale, {"scale_off_by_1e_5": 1 + 1e-5, "scale_missing": math.sqrt(3)}),
    (scale, dict.fromkeys(("scale_twice", "scale_without_root"), 1 / math.sqrt(3))),
    (causal, {"causal_next_key": np.tri(3, k=1), "causal_without_own_key": np.tri(3, k=-1)}),
    (causal, {"causal_mirrored": np.tri(3).T, "causality_ignored": 1, "causal_by_groups_of_four": 1}),
    (causal_of_one_query, {"causal_aligned_bottom_right": 1}),
    (masked_row, {"masked_at_minus_1e4": [0, -1e4, 2], "mask_filled_with_minus_1e_minus_9": [0, -1e-9, 2]}),
    (masked_row, {"masked_at_zero": [0, 0, 2], "mask_added": [1, 1, 3]}),
    (masked_row, {"mask_rounded_up_to_four_keys": [0, 1, 2]}),
    (sum_of_weights, {"one_added_to_the_sum": TOTAL / (TOTAL + 1), "sum_plus_1e_3": TOTAL / (TOTAL + 1e-3)}),
    (sum_of_weights, {"sum_plus_1e_6": TOTAL / (TOTAL + 1e-6), "sum_plus_1e_9": TOTAL / (TOTAL + 1e-9)}),
    (empty_row, {"empty_row_gives_nan": NAN, "empty_row_is_uniform": 1 / 3}),
    (empty_row, {"empty_row_takes_the_first_key": [1, 0, 0]}),
    (weight_of_one_in_three_thousand, {"sum_accumulated_in_bfloat16": 1 / 256}),
    (weight_of_one_in_three_thousand, {"sum_accumulated_in_float16": 1 / 2048}),
    (above_the_maximum, {"log_sum_exp_in_base_two": 1 / math.log(2)}),
    (swapped_values, {"two_values_swapped": 1 - swapped_values(numpy_backend)}),
    (window(1, 0), {"window_zero_as_open": [1, 2, 3, 4], "window_inverted": [0, 3, 4]}),
    (window(0, 1), {"window_too_wide_right": [2, 3, 4], "window_too_narrow_right": [2]}),
    (window(2, 0), {"window_sides_swapped": [2, 3, 4]}),
    (window(1, None), {"window_on_both_sides": [1, 2, 3], "window_open_right_as_zero": [1, 2]}),
    (window(None, 1), {"window_open_left_as_zero": [2, 3]}),
    (window(2, 2), {"window_split_between_its_sides": [1, 2, 3]}),
    (window(0, 0), {"window_ignored": [0, 1, 2, 3, 4], "window_aligned_bottom_right": [3]}),
    (window(0, 0), {"window_by_groups_of_four": [0, 1, 2, 3]}),
    (window(1, 1), {"window_of_first_query": [0, 1], "window_without_own_key": [1, 3]}),
    (window(0, 1, is_causal=True), {"window_or_causality": [0, 1, 2, 3]}),
    (lengths, {"key_lengths_one_too_long": [4, 1, 5]}),
    (lengths, {"key_lengths_ignored": 5, "key_lengths_of_first_batch_entry": 3}),
    (lengths, {"key_lengths_of_the_longest_batch_entry": 5}),
    (lengths, {"key_lengths_up_to_four": [4, 0, 5], "key_length_of_zero_taken_for_all": [3, 5, 5]}),
    (lengths, {"key_lengths_at_least_one": [3, 1, 5]}),
    (groups, {"reference": [0, 0, 0, 1, 1, 1], "heads_tiled": [0, 1, 0, 1, 0, 1]}),
    (groups, {"groups_as_large_as_their_number": [0, 0, 1, 1, 0, 0], "groups_of_first_head": 0}),
    (groups, {"groups_in_reverse": [1, 1, 1, 0, 0, 0], "groups_one_head_late": [0, 0, 1, 1, 1, 0]}),
    (groups, {"groups_of_two_heads": [0, 0, 1, 1, 1, 1], "value_heads_tiled": [0, 1, 0, 1, 0, 1]}),
    (groups, {"values_of_the_first_head_of_each_group_alone": [0, 0, 0, 1, 0, 0]}),
    (softcap, {"softcap_ignored": 3, "softcap_of_raw_scores": 2 * math.tanh(12 / 2) / 4}),
    (softcap, {"softcap_applied_twice": 2 * math.tanh(math.tanh(3 / 2))}),
    (softcap, {"softcap_not_multiplied_back": math.tanh(3 / 2), "softcap_not_divided_by": 2 * math.tanh(3)}),
    (softcap, {"softcap_clips": 2, "softcap_by_softsign": 2 * 3 / (2 + 3)}),
    (softcap, dict.fromkeys(("softcap_by_a_ratio_of_exponentials", "softcap_by_expm1"), 2 * math.tanh(3 / 2))),
    (softcap_far_beyond, {"softcap_by_a_ratio_of_exponentials": NAN, "softcap_by_expm1": 1}),
    (softcap_of_a_masked_key, {"softcap_after_the_mask": [5 * math.tanh(1 / 5), -5]}),
    (cache, {"reference": [1, 2, 3, 4], "past_dropped": [0, 0, 3, 4], "past_behind_new": [3, 4, 1, 2]}),
    (cache, {"past_values_dropped": [0, 0, 3, 4], "attention_past_value_with_each_past_key_in_reverse": [2, 1, 3, 4]}),
    (cache, {"values_one_step_behind_their_keys": [4, 1, 2, 3], "past_without_new": [1, 2, 0, 0]}),
    (cache, {"past_overwritten": [1, 3, 4, 0], "past_with_a_gap": [1, 2, 0, 3]}),
    (cache, {"past_swapped": [5, 6, 3, 4]}),
    (sinks, {"reference": 4, "attention_sinks_left_out": 2, "sinks_twice": 6, "sinks_scaled": 10}),
    (sinks_of_heads, {"sinks_by_key_heads": [1, 1, 2, 2]}),
    (view("strided", STRIDED), {"strided_view_read_as_contiguous": [0, 7, 1, 7]}),
    (view("strided", STRIDED), {"last_stride_taken_for_one": [0, 7, 2, 7]}),
    (view("transposed", TRANSPOSED), {"transposed_view_read_as_contiguous": [0, 1, 4, 5, 2, 3, 6, 7]}),
    (view("transposed", TRANSPOSED), {"merged_heads_read_as_interleaved": [0, 4, 2, 6, 1, 5, 3, 7]}),
    (view("broadcast", REPEATED), {"broadcast_view_read_once": [1, 2, 3, 0, 0, 0]}),
    (view("padded", STRIDED), {"padded_rows_read_side_by_side": [0, 1, 7, 7]}),
    (view("spaced", TRANSPOSED[0, :, :1, np.newaxis]), {"page_stride_taken_for_a_page": [0, 1, 7, 7]}),
    (view("reversed", STRIDED), {"negative_strides_taken_for_positive": [3, 2, 1, 0]}),
    (view("distant", STRIDED), {"offsets_in_16_bits": [0, 1, 7, 7]}),
    (view("strided", STRIDED > 0), {"strides_of_the_mask_ignored": [0, 1, 1, 1]}),
    (tokens, {"fused_tokens_read_side_by_side": [0, 1, 0, 1]}),
    (view("", STRIDED), {"strided_view_read_as_contiguous": [0, 1, 2, 3], "broadcast_view_read_once": [0, 1, 2, 3]}),
    (grad_query, {"reference": [-0.5, 0.5], "row_sum_missing_in_the_gradient": [0.5, 1.5]}),
    (grad_query, {"row_sum_of_the_gradient_averaged": [0, 1], "gradient_stops_at_the_softmax": 0}),
    (grad_query, {"gradient_of_the_logits_without_weights": [-1, 1], "query_gradient_without_scale": [-1, 1]}),
    (grad_bias, {"reference": [-1, 1], "bias_gradient_of_the_first_of_a_broadcast_axis": [-0.5, 0.5]}),
    (grad_bias, {"bias_gradient_averaged": [-0.5, 0.5], "bias_gradient_zero": 0, "bias_gradient_scaled": [-0.5, 0.5]}),
    (grad_bias, {"bias_gradient_not_summed": [-0.5, 0.5, -0.5, 0.5]}),
    (grad_value_of_groups, {"reference": [3, 12], "group_gradient_of_its_first_head": [1, 4]}),
    (grad_value_of_groups, {"group_gradient_without_its_last_head": [1, 4], "group_gradient_averaged": [1.5, 6]}),
    (grad_value_of_groups, {"group_gradient_summed_as_if_tiled": [5, 10]}),
    (grad_value_of_groups, {"value_gradient_of_groups_summed_as_if_tiled": [5, 10]}),
    (grad_value_without_a_key, {"reference": 0, "gradient_nan_at_an_empty_row": NAN}),
    (grad_value_without_a_key, {"gradient_uniform_at_an_empty_row": 1}),
)
"""What is computed with a fault, and what comes of it by the name of each; one number stands for all."""


def test_a_fault_gives_the_numbers_that_its_name_says() -> None:
    offenders = []
    for computed, rows in DIRECTIONS:
        for name, expected in rows.items():
            found = np.asarray(computed(variant_named(name)), float)
            if not np.allclose(found, expected, rtol=1e-14, atol=1e-15, equal_nan=True):
                offenders.append((computed.__name__, name, found, expected))
    assert offenders == []


def test_rounding_to_bfloat16_keeps_eight_bits_and_truncating_goes_towards_zero() -> None:
    value = ONE * (1 + 1 / 256 + 1 / 1024)
    rounded = variant_named("attention_weighted_sum_value_in_bfloat16").attention(ONE, ONE, value)
    assert rounded["output"].item() == 1 + 1 / 128
    keys = np.ones((1, 1, 3, 1))
    third = variant_named("weights_truncated_to_bfloat16").attention(ONE, keys, keys)["weights"].max()
    assert 1 / 3 - 2**-9 < third < 1 / 3


def test_a_group_count_as_large_as_a_group_hides_a_head_map_by_the_number_of_groups() -> None:
    rng = np.random.default_rng(22)
    arrays = rng.normal(size=(1, 4, 3, 5)), rng.normal(size=(1, 2, 3, 5)), rng.normal(size=(1, 2, 3, 5))
    got = variant_named("groups_as_large_as_their_number").attention(*arrays)["output"]
    np.testing.assert_array_equal(got, numpy_backend.attention(*arrays)["output"])


def test_the_memory_of_a_broadcast_view_is_its_only_slice() -> None:
    laid_out = apply_layout({"key": REPEATED}, {"key": "broadcast"})["key"]
    assert laid_out.strides[0] == 0
    np.testing.assert_array_equal(memory_of(laid_out), [1, 2, 3])


def test_scales_that_are_multiplied_elsewhere_are_rounded_elsewhere() -> None:
    rng = np.random.default_rng(1603)
    codes = [(30 * rng.normal(size=(2, 2, 9, 6))).astype(ml_dtypes.float8_e4m3fn) for _ in range(2)]
    scales = {f"{name}_scale": rng.uniform(0.02, 0.2, (1, 2, 1)) for name in ("key", "value")}  # one for a head
    query = rng.normal(size=(2, 4, 5, 6))
    right = numpy_backend.quantized_attention(query, *codes, **scales)["output"]
    moved = variant_named("scales_multiplied_into_queries_and_output").quantized_attention(query, *codes, **scales)
    np.testing.assert_allclose(moved["output"], right, rtol=1e-12)
    assert not np.array_equal(moved["output"], right)
