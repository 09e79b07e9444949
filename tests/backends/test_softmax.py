"""The softmax by numbers known without a computer, by its invariants, and where rows are empty or not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

Run = Callable[..., dict[str, NDArray[Any]]]

# One shape throughout, because JAX compiles every operation anew for each.
ROWS = arrays(np.float32, (1, 1, 2, 5), elements=st.floats(-1e4, 1e4, width=32))


def row(*scores: float) -> NDArray[Any]:
    return np.array([[[scores]]])


@pytest.mark.parametrize("length", [1, 3, 7, 33])
def test_equal_scores_get_exactly_one_over_n_each(run: Run, unit: float, length: int) -> None:
    # exp(0) = 1, n ones add up exactly, and 1/n is rounded once.
    stages = run("softmax", np.full((1, 1, 2, length), -7.25))
    assert set(stages["weights"].ravel().tolist()) == {float(stages["weights"].dtype.type(1) / length)}
    # Two roundings of a number of at most 7.25, and a logarithm good to 4 u.
    np.testing.assert_allclose(stages["log_sum_exp"], math.log(length) - 7.25, rtol=0, atol=(2 * 7.25 + 4 * 4) * unit)


def test_scores_that_are_logarithms_give_the_ratio_of_their_arguments(run: Run, unit: float) -> None:
    # softmax(ln 1, ln 2, ln 5) = (1, 2, 5) / 8. Rounding ln 5 moves its weight by 1.6 u, exp is good to 4 u, the sum
    # and the quotient take one each, numerator and denominator: 16 u in all.
    stages = run("softmax", row(0.0, math.log(2), math.log(5)))
    np.testing.assert_allclose(stages["weights"], row(1 / 8, 2 / 8, 5 / 8), rtol=16 * unit, atol=0)
    np.testing.assert_allclose(stages["log_sum_exp"], [[[math.log(8)]]], rtol=16 * unit, atol=0)


def test_scores_far_beyond_the_range_of_exp_neither_overflow_nor_vanish(run: Run, unit: float) -> None:
    stages = run("softmax", row(1e30, 1e30, -1e30))
    np.testing.assert_array_equal(stages["weights"], row(0.5, 0.5, 0.0))
    np.testing.assert_allclose(stages["log_sum_exp"], [[[1e30]]], rtol=4 * unit)


@pytest.mark.parametrize("scores", [(-np.inf, -np.inf, -np.inf), ()], ids=["every score -inf", "no key"])
def test_an_empty_row_has_weights_of_zero_and_a_log_sum_exp_of_minus_infinity(
    run: Run, scores: tuple[float, ...]
) -> None:
    stages = run("softmax", row(*scores))
    np.testing.assert_array_equal(stages["weights"], np.zeros((1, 1, 1, len(scores))))
    np.testing.assert_array_equal(stages["log_sum_exp"], [[[-np.inf]]])


def test_an_empty_row_leaves_its_neighbours_alone(run: Run, unit: float) -> None:
    full = [0.0, 1.0, -np.inf]
    together = run("softmax", np.array([[[[-np.inf] * 3, full, [-np.inf] * 3]]]))
    alone = run("softmax", row(*full))
    # Not bit for bit: a vectorised exp serves the last few elements of an array with other code.
    np.testing.assert_allclose(together["weights"][0, 0, 1], alone["weights"][0, 0, 0], rtol=16 * unit, atol=0)
    np.testing.assert_array_equal(together["weights"][0, 0, [0, 2]], np.zeros((2, 3)))
    assert together["weights"][0, 0, 1, 2] == 0


@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("others", [0.5, -np.inf], ids=["among numbers", "among -inf"])
def test_a_nan_score_shows_in_the_weights_and_the_log_sum_exp_of_its_row_and_in_no_other(
    run: Run, position: int, others: float
) -> None:
    # At every place of a row longer than a vector register: a vectorised maximum may lose a NaN in some lanes only.
    scores = np.full((1, 1, 2, 9), others)
    scores[0, 0, 0, position] = np.nan
    stages = run("softmax", scores)
    # TensorFlow's float32 kernel confines the NaN to its own weight; all others spread it over the row.
    assert np.isnan(stages["weights"][0, 0, 0, position])
    assert np.isnan(stages["log_sum_exp"][0, 0]).tolist() == [True, False]
    assert not np.isnan(stages["weights"][0, 0, 1]).any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf, which is what is asked for
def test_a_score_of_plus_infinity_gives_an_infinite_log_sum_exp_and_a_weight_that_is_nan(run: Run) -> None:
    stages = run("softmax", row(0.0, np.inf, 1.0))
    np.testing.assert_array_equal(stages["log_sum_exp"], [[[np.inf]]])
    assert np.isnan(stages["weights"][0, 0, 0, 1])


def test_adding_the_same_number_to_every_score_changes_no_bit_of_the_weights(run: Run, unit: float) -> None:
    # Quarters plus 64 are exact, so that every implementation which subtracts the maximum sees the same differences.
    scores = row(0.25, -1.5, 3.0, 0.0, 2.75)
    before, after = run("softmax", scores), run("softmax", scores + 64)
    np.testing.assert_array_equal(after["weights"], before["weights"])
    # Numbers below 128: half a unit in the last place is 64 u, for one addition each.
    np.testing.assert_allclose(after["log_sum_exp"] - 64, before["log_sum_exp"], rtol=0, atol=2 * 64 * unit)


@settings(max_examples=40, deadline=None)
@given(scores=ROWS)
def test_every_row_of_weights_lies_between_zero_and_one_and_adds_up_to_one(
    run: Run, unit: float, scores: NDArray[Any]
) -> None:
    weights = run("softmax", scores)["weights"].astype(np.float64)
    # A reciprocal and a product may round a weight of 1 up by a unit in the last place.
    assert ((weights >= 0) & (weights <= 1 + 4 * unit)).all()
    # Five quotients and four additions in the sum that divides them, each good to a unit.
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=16 * unit)


@settings(max_examples=40, deadline=None)
@given(scores=ROWS, order=st.permutations(range(5)))
def test_permuting_the_keys_permutes_the_weights(run: Run, unit: float, scores: NDArray[Any], order: list[int]) -> None:
    before, after = run("softmax", scores), run("softmax", scores[..., order])
    # The same exponentials, added in another order: two sums of five terms.
    np.testing.assert_allclose(after["weights"], before["weights"][..., order], rtol=16 * unit, atol=1e-37)


@settings(max_examples=40, deadline=None)
@given(scores=ROWS)
def test_the_log_sum_exp_lies_between_the_maximum_and_the_maximum_plus_log_n(
    run: Run, unit: float, scores: NDArray[Any]
) -> None:
    # Compared in float64: a float32 comparison would round the limits themselves.
    log_sum_exp = run("softmax", scores)["log_sum_exp"].astype(np.float64)
    maximum = scores.max(axis=-1).astype(np.float64)
    slack = 4 * unit * (np.abs(maximum) + 4)  # the addition and the logarithm
    assert (log_sum_exp >= maximum - slack).all()
    assert (log_sum_exp <= maximum + math.log(5) + slack).all()
