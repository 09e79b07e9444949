"""Masks and biases on scores: exact, because nothing is rounded when integers are added or replaced by -inf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Run = Callable[..., dict[str, NDArray[Any]]]

INF = np.inf
SCORES = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 3), [[0, -INF, -INF], [0, 0, -INF], [0, 0, 0]]),
        ((2, 4), [[0, -INF, -INF, -INF], [0, 0, -INF, -INF]]),
        ((4, 2), [[0, -INF], [0, 0], [0, 0], [0, 0]]),
        ((1, 3), [[0, -INF, -INF]]),
        ((3, 1), [[0], [0], [0]]),
        ((2, 0), [[], []]),
    ],
)
def test_causal_means_that_key_j_is_seen_by_query_i_when_j_is_at_most_i(
    run: Run, shape: tuple[int, int], expected: list[list[float]]
) -> None:
    masked = run("mask_scores", np.zeros((1, 1, *shape)), is_causal=True)["masked"]
    np.testing.assert_array_equal(masked, np.array(expected).reshape(1, 1, *shape))


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 5), (2, 1, 1, 5), (1, 3, 1, 5), (1, 1, 4, 5), (2, 1, 4, 1), (2, 3, 4, 5), (1, 1, 1, 1), (4, 5), (5,)],
    ids=str,
)
def test_a_mask_with_axes_of_length_one_counts_for_the_whole_axis(run: Run, shape: tuple[int, ...]) -> None:
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.5
    masked = run("mask_scores", SCORES, mask=mask)["masked"]
    # True = may attend: those scores stay, bit for bit; the others are -inf.
    full = np.broadcast_to(mask, SCORES.shape)
    np.testing.assert_array_equal(masked[full], SCORES[full])
    assert (masked[~full] == -INF).all()


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 1, 4, 1), (1, 3, 1, 1), (2, 3, 4, 5), (4, 5)], ids=str)
def test_a_bias_with_axes_of_length_one_is_added_to_the_whole_axis(run: Run, shape: tuple[int, ...]) -> None:
    bias = np.random.default_rng(sum(shape)).integers(-9, 9, size=shape)
    np.testing.assert_array_equal(run("mask_scores", SCORES, bias=bias)["biased"], SCORES + bias)


@pytest.mark.parametrize(
    ("window", "shape", "expected"),
    [
        ((0, 0), (3, 3), [[0, -INF, -INF], [-INF, 0, -INF], [-INF, -INF, 0]]),
        ((1, 0), (3, 3), [[0, -INF, -INF], [0, 0, -INF], [-INF, 0, 0]]),
        ((0, 1), (3, 3), [[0, 0, -INF], [-INF, 0, 0], [-INF, -INF, 0]]),
        ((1, None), (4, 3), [[0, 0, 0], [0, 0, 0], [-INF, 0, 0], [-INF, -INF, 0]]),
        ((None, 1), (2, 4), [[0, 0, -INF, -INF], [0, 0, 0, -INF]]),
        # Keys before the first one are in nobody's way, and a query may look past the last key and find none.
        ((0, 0), (3, 2), [[0, -INF], [-INF, 0], [-INF, -INF]]),
        ((9, 9), (2, 3), [[0, 0, 0], [0, 0, 0]]),
    ],
    ids=str,
)
def test_a_window_reaches_so_many_keys_to_both_sides_of_a_query_that_is_not_counted_itself(
    run: Run, window: tuple[int | None, int | None], shape: tuple[int, int], expected: list[list[float]]
) -> None:
    masked = run("mask_scores", np.zeros((1, 1, *shape)), window=window)["masked"]
    np.testing.assert_array_equal(masked, np.array(expected).reshape(1, 1, *shape))


def test_key_lengths_count_the_keys_of_each_batch_item_that_may_be_attended(run: Run) -> None:
    masked = run("mask_scores", SCORES, key_lengths=np.array([4, 0]))["masked"]
    np.testing.assert_array_equal(masked[0, ..., :4], SCORES[0, ..., :4])
    assert (masked[0, ..., 4] == -INF).all()
    assert (masked[1] == -INF).all()
    whole = run("mask_scores", SCORES, key_lengths=np.array([5, 5]))["masked"]
    np.testing.assert_array_equal(whole, SCORES)


def test_every_rule_must_allow_a_key_where_several_are_given(run: Run) -> None:
    mask = np.ones((1, 3, 1, 5), dtype=bool)
    mask[0, 2, 0, 1] = False
    options = {"mask": mask, "is_causal": True, "window": (1, 1), "key_lengths": np.array([5, 2])}
    masked = run("mask_scores", SCORES, **options)["masked"]
    for b, h, i, j in np.ndindex(*SCORES.shape):
        allowed = not (h == 2 and j == 1) and j <= i and i - 1 <= j <= i + 1 and j < (5, 2)[b]
        assert masked[b, h, i, j] == (SCORES[b, h, i, j] if allowed else -INF), (b, h, i, j)


def test_mask_and_causality_must_both_allow_a_key(run: Run) -> None:
    mask = np.array([[[[False, True, True]]]])
    masked = run("mask_scores", np.ones((1, 1, 3, 3)), mask=mask, is_causal=True)["masked"]
    np.testing.assert_array_equal(masked[0, 0], [[-INF, -INF, -INF], [-INF, 1, -INF], [-INF, 1, 1]])


def test_the_bias_is_added_before_the_mask_is_applied_and_both_stages_are_returned(run: Run) -> None:
    bias, mask = np.array([[[[10, -INF, INF]]]]), np.array([[[[True, True, False]]]])
    stages = run("mask_scores", np.array([[[[1, 2, 3]]]]), bias=bias, mask=mask)
    np.testing.assert_array_equal(stages["biased"], [[[[11, -INF, INF]]]])
    np.testing.assert_array_equal(stages["masked"], [[[[11, -INF, -INF]]]])


def test_a_masked_score_that_is_not_finite_is_forgotten_and_an_attended_one_is_kept(run: Run) -> None:
    scores, mask = np.array([[[[np.nan, INF, np.nan, INF]]]]), np.array([[[[False, False, True, True]]]])
    masked = run("mask_scores", scores, mask=mask)["masked"]
    np.testing.assert_array_equal(masked, [[[[-INF, -INF, np.nan, INF]]]])


@pytest.mark.parametrize("fill", [-1e9, -65504.0, -3.4028234663852886e38, 0.0, 2.5])
def test_a_fill_takes_the_place_of_what_is_masked(run: Run, fill: float) -> None:
    mask = np.arange(5) % 2 == 0
    bias = np.where(np.arange(5) == 1, -INF, 1.0)
    stages = run("mask_scores", SCORES, mask=mask, bias=bias, is_causal=True, mask_fill=fill)
    kept = mask & np.tril(np.ones((4, 5), dtype=bool))
    expected = np.where(kept, SCORES + bias, np.asarray(fill, stages["masked"].dtype))
    np.testing.assert_array_equal(stages["masked"], expected)


def test_a_fill_without_a_rule_has_no_stage(run: Run) -> None:
    assert run("mask_scores", SCORES, mask_fill=-1e9) == {}
