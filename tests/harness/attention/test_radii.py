"""Radii where they can be worked out by hand, and those of the softmax in every corner."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.radii import PROPAGATED, propagate
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.reading.selection import select_cases

Array = NDArray[Any]
INFINITE = -np.inf
WITH_NUMBERS = ["documents/*", "attention.yaml", "caches.yaml", "empty_rows.yaml", "merge_states.yaml", "sinks.yaml"]


def test_values_are_the_stages_that_numpy_computes_where_numbers_are_expected(
    compute: Callable[[Case, str], tuple[Inputs, dict[str, Array]]],
) -> None:
    offenders, count = [], 0
    for case in select_cases(WITH_NUMBERS).cases:
        if not case.expected or case.operation not in PROPAGATED:
            continue
        count += 1
        inputs, stages = compute(case, "float64")
        balls = propagate(case.operation, case.options, inputs)
        if list(balls) != list(stages):
            offenders.append((case.id, "stages"))
        for name, ball in balls.items():
            value, computed = ball.value, stages[name]
            if name == "log_sum_exp" and case.options.get("empty_rows") in ("uniform", "nan"):
                # No convention says what it is in a row without a key.
                value, computed = value[value > -np.inf], computed[value > -np.inf]
            largest = np.abs(computed[np.isfinite(computed)]).max(initial=1)
            same = np.allclose(value, computed, rtol=1e-13, atol=1e-14 * largest, equal_nan=True)
            if not same or ball.radius.shape != ball.value.shape:
                offenders.append((case.id, name))
    assert offenders == []
    assert count > 20


def moved_by(operation: str, inputs: dict[str, list[float]], radii: dict[str, list[float]], **options: Any) -> Any:
    """Return the balls of the stages of rows of numbers that move by radii."""
    arrays, around = ({name: np.array([[[row]]]) for name, row in rows.items()} for rows in (inputs, radii))
    return propagate(operation, options, Inputs(arrays, around))


def softmax_moved(scores: list[float], radii: list[float]) -> Any:
    return moved_by("softmax", {"scores": scores}, {"scores": radii})


def test_products_sums_and_factors_move_by_what_they_are_made_of() -> None:
    balls = moved_by("scoring", {"query": [2.0], "key": [-3.0]}, {"query": [0.5], "key": [0.25]}, scale=-4.0)
    # |2.5 * -3.25 + 6| = 2.125 = 2 * 0.25 + 0.5 * 3 + 0.5 * 0.25
    assert (balls["raw_scores"].value.item(), balls["raw_scores"].radius.item()) == (-6.0, 2.125)
    assert (balls["scores"].value.item(), balls["scores"].radius.item()) == (24.0, 8.5)
    inputs, radii = {"scores": [1.0, 2.0], "bias": [4.0, INFINITE]}, {"scores": [0.5, 0.5], "bias": [0.25, 0.0]}
    total = moved_by("masking", inputs, radii)["biased"]
    np.testing.assert_array_equal(total.value.ravel(), [5.0, INFINITE])
    np.testing.assert_array_equal(total.radius.ravel(), [0.75, 0.0])


def test_two_scores_that_part_move_their_weights_by_the_logistic_function() -> None:
    balls = softmax_moved([0.0, 0.0], [0.5, 0.5])
    # One score up by a half, the other down: their difference is 1.
    np.testing.assert_allclose(balls["weights"].radius.ravel(), [1 / (1 + math.exp(-1)) - 0.5] * 2, rtol=1e-15)
    # Both up by a half.
    np.testing.assert_allclose(balls["log_sum_exp"].radius.ravel(), [0.5], rtol=1e-15)


def corners(scores: Array, radius: Array) -> tuple[Array, float]:
    """Return the largest moves of the weights and of log_sum_exp at all corners, by the definition."""

    def both(moved: Array) -> tuple[Array, float]:
        exponentials = np.exp(moved - moved.max())
        return exponentials / exponentials.sum(), float(moved.max() + np.log(exponentials.sum()))

    weights, log_sum = both(scores)
    moved = [both(scores + np.array(signs) * radius) for signs in product((-1, 1), repeat=scores.size)]
    return np.max([np.abs(own - weights) for own, _ in moved], axis=0), max(abs(own - log_sum) for _, own in moved)


@pytest.mark.parametrize(
    ("spread", "size"), [(1, 1e-9), (1, 1e-3), (1, 1), (5, 30), (30, 50), (100, 100), (1000, 1000), (300, 3000)]
)
def test_softmax_moves_to_its_radius_in_some_corner_and_never_beyond(spread: float, size: float) -> None:
    generator = np.random.default_rng(11)
    for _ in range(30):
        count = int(generator.integers(1, 7))
        scores = spread * generator.standard_normal(count)
        radius = np.where(generator.random(count) < 0.8, size * generator.random(count), 0)
        balls = propagate("softmax", {}, Inputs({"scores": scores[None]}, {"scores": radius[None]}))
        weights, log_sum = corners(scores, radius)
        rounded = 1e-15 * (4 + np.abs(scores).max() + size)
        assert (weights <= balls["weights"].radius[0] + rounded).all()
        assert log_sum <= balls["log_sum_exp"].radius.item() + rounded
        # Where a whole row may underflow, the radius is all that a weight can move, and no corner is that bad.
        if size < 300:
            assert (balls["weights"].radius[0] <= 1.001 * weights + rounded).all()
            assert balls["log_sum_exp"].radius.item() <= 1.001 * log_sum + rounded


def test_what_hardly_counts_may_win_what_wins_may_lose_and_what_is_alone_stays() -> None:
    balls = softmax_moved([0.0, -800.0], [0.0, 1000.0])
    np.testing.assert_array_equal(balls["weights"].value.ravel(), [1, 0])
    np.testing.assert_array_equal(balls["weights"].radius.ravel(), [1, 1])
    # -800 + 1000 = 200 is the row's new maximum.
    np.testing.assert_allclose(balls["log_sum_exp"].radius.ravel(), [200], rtol=1e-14)
    # A finite fill of -1e30, as it is rounded to float32, can never win.
    moved = softmax_moved([0.0, 0.0, -1e30], [1e-9, 1e-9, 1e22])["weights"].radius
    np.testing.assert_allclose(moved.ravel(), [5e-10, 5e-10, 0], rtol=1e-8, atol=0)
    # p' = 1 / (1 + e^(60 - 40 + 1)), far below 1, although e^-40 vanishes beside 1.
    moved = softmax_moved([0.0, -40.0], [60.0, 1.0])["weights"].radius
    np.testing.assert_allclose(moved.ravel(), [1.0, 1.0], rtol=1e-8)
    balls = softmax_moved([3.0], [50.0])
    assert (balls["weights"].radius.item(), balls["log_sum_exp"].radius.item()) == (0, 50)


@pytest.mark.parametrize("radius", [0.0, 1e-3, 5.0, 1e5, 1e300])
def test_an_additive_score_cannot_leave_the_range_of_its_vector(radius: float) -> None:
    arrays = {"query": np.array([[9.0]]), "key": np.array([[0.0]]), "query_weight": np.array([[1.0]])}
    arrays |= {"key_weight": np.array([[1.0]]), "score_vector": np.array([3.0])}
    radii = {name: np.zeros(array.shape) for name, array in arrays.items()} | {"query": np.array([[radius]])}
    ball = propagate("scoring", {"score": "additive"}, Inputs(arrays, radii))["scores"]
    assert ball.radius.item() == pytest.approx(3 * min(radius, 2), rel=1e-15)


def test_an_operation_without_a_propagation_is_refused() -> None:
    with pytest.raises(AssertionError, match="no propagation for the operation convolution"):
        propagate("convolution", {}, Inputs({}, {}))
