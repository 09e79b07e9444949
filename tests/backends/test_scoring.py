"""Scores by small integers, where every order of summation gives the same exact number, and by the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend

Run = Callable[..., dict[str, NDArray[Any]]]

# (1, 1, 2, 3) and (1, 1, 3, 3): q k^T = [[1*1+2*0+3*1, 1*0+2*1+3*0, 1*2+2*2+3*2], [-1+0+2, 0, -2+0+4]]
QUERY = np.array([[[[1, 2, 3], [-1, 0, 2]]]])
KEY = np.array([[[[1, 0, 1], [0, 1, 0], [2, 2, 2]]]])
PRODUCTS = np.array([[[[4, 2, 12], [1, 0, 2]]]])


def test_dot_scores_of_integers_are_exact_where_the_scale_is_a_power_of_two(run: Run) -> None:
    # Luong et al. 2015, section 3.1, "dot": score(h_t, h_s) = h_t^T h_s.
    for scale in (1.0, 0.5, -2.0, 0.0):
        stages = run("dot_scores", QUERY, KEY, scale=scale)
        np.testing.assert_array_equal(stages["raw_scores"], PRODUCTS)
        np.testing.assert_array_equal(stages["scores"], PRODUCTS * scale)


def test_the_default_scale_is_one_over_the_square_root_of_the_key_width(run: Run, unit: float) -> None:
    # Vaswani et al. 2017, equation 1. Exact for width 4; for width 3 the scale and the product are each rounded once,
    # so 2 units, the limit that a scale which went through float32 on its way to float64 exceeds by far.
    four = run("dot_scores", np.full((1, 1, 1, 4), 2.0), np.full((1, 1, 1, 4), 3.0))
    np.testing.assert_array_equal(four["scores"], [[[[12.0]]]])
    three = run("dot_scores", QUERY, KEY)
    np.testing.assert_allclose(three["scores"], PRODUCTS / math.sqrt(3), rtol=2.5 * unit, atol=0)


def test_general_scores_of_integers_are_exact_and_multiply_query_weight_and_key_in_this_order(run: Run) -> None:
    # Luong et al. 2015, section 3.1, "general": h_t^T W h_s. q W = [1*1+2*3, 1*0+2*1, 1*2+2*-1] = [7, 2, 0].
    query, key = np.array([[[[1, 2]]]]), np.array([[[[1, 1, 5], [0, 3, 1]]]])
    weight = np.array([[1, 0, 2], [3, 1, -1]])
    np.testing.assert_array_equal(run("general_scores", query, key, weight)["scores"], [[[[9, 6]]]])


def test_the_bias_of_a_bilinear_score_is_added_to_every_score_of_its_head(run: Run) -> None:
    # torch.nn.Bilinear: x1^T A x2 + b; q W = [7, 2, 0] as above, and a second head twice as large.
    query, key = np.array([[[[1, 2]], [[2, 4]]]]), np.array([[[[1, 1, 5], [0, 3, 1]]] * 2]).reshape(1, 2, 2, 3)
    weight = np.array([[1, 0, 2], [3, 1, -1]])
    alone = run("general_scores", query, key, weight)["scores"]
    one = run("general_scores", query, key, weight, score_bias=np.array([3]))["scores"]
    each = run("general_scores", query, key, weight, score_bias=np.array([3, -5]))["scores"]
    np.testing.assert_array_equal(alone, [[[[9, 6]], [[18, 12]]]])
    np.testing.assert_array_equal(one, [[[[12, 9]], [[21, 15]]]])
    np.testing.assert_array_equal(each, [[[[12, 9]], [[13, 7]]]])


def test_additive_scores_of_saturated_and_zero_units_are_sums_of_the_score_vector(run: Run, unit: float) -> None:
    # Bahdanau et al. 2015, appendix A.1.2: v^T tanh(W s + U h). Query 50 opens both units, key -50 closes the second,
    # so with v = (3, 5): tanh(50 + 0), tanh(50 - 50) -> 3 + 0 = 3, and tanh(50 + 50), tanh(50 + 0) -> 3 + 5 = 8.
    query, key = np.array([[[[50.0]]]]), np.array([[[[0.0, -50.0], [50.0, 0.0]]]])
    stages = run("additive_scores", query, key, np.array([[1.0, 1.0]]), np.eye(2), np.array([3.0, 5.0]))
    # A saturated tanh may be one unit or two below 1 in some libraries; the sum of absolute terms is 8.
    np.testing.assert_allclose(stages["scores"], [[[[3.0, 8.0]]]], rtol=0, atol=8 * 8 * unit)


def test_the_bias_of_an_additive_score_is_added_inside_the_hyperbolic_tangent(run: Run, unit: float) -> None:
    # q Wq + k Wk + b = 1 - 3 + 2 = 0 for the first unit, and 0 + 0 - 50 for the second: 7 tanh(0) + 11 tanh(-50).
    stages = run(
        "additive_scores",
        np.array([[[[1.0]]]]),
        np.array([[[[3.0]]]]),
        np.array([[1.0, 0.0]]),
        np.array([[-1.0, 0.0]]),
        np.array([7.0, 11.0]),
        score_bias=np.array([2.0, -50.0]),
    )
    np.testing.assert_allclose(stages["scores"], [[[[-11.0]]]], rtol=0, atol=8 * 11 * unit)


def test_additive_scores_follow_the_formula_term_by_term_in_every_batch_and_head(run: Run, unit: float) -> None:
    rng = np.random.default_rng(1409)
    # Values with few bits are the same numbers in float32 and float64.
    query, key, query_weight, key_weight, vector, bias = (
        rng.integers(-8, 9, size=shape) / 8 for shape in [(2, 3, 4, 5), (2, 3, 6, 7), (5, 8), (7, 8), (8,), (8,)]
    )
    found = run("additive_scores", query, key, query_weight, key_weight, vector, score_bias=bias)["scores"]
    assert found.shape == (2, 3, 4, 6)
    for b, h, i, j in np.ndindex(*found.shape):
        expected = math.fsum(
            vector[a]
            * math.tanh(
                math.fsum(query[b, h, i, c] * query_weight[c, a] for c in range(5))
                + math.fsum(key[b, h, j, c] * key_weight[c, a] for c in range(7))
                + bias[a]
            )
            for a in range(8)
        )
        # 8 terms, each at most 1, each tanh good to 8 u (docs/numerics.md, section 3), and their sum: 8 (8 + 8) u.
        assert abs(found[b, h, i, j] - expected) <= 8 * 16 * unit


def test_a_softcap_bends_the_scaled_scores_towards_its_own_size_and_keeps_their_sign(run: Run, unit: float) -> None:
    # Gemma Team 2024, "Gemma 2", section 2: c tanh(s / c). Scores 8, 4, 24 and 2, 0, 4, capped at 5.
    stages = run("dot_scores", QUERY, KEY, scale=2.0, softcap=5.0)
    assert list(stages) == ["raw_scores", "scores", "capped"]
    np.testing.assert_array_equal(stages["scores"], PRODUCTS * 2)
    expected = [5 * math.tanh(score / 5) for score in (PRODUCTS * 2).ravel()]
    # A quotient, a tanh good to 8 u (docs/numerics.md, section 3) and a product; the slope of tanh is at most 1.
    np.testing.assert_allclose(stages["capped"].ravel(), expected, rtol=0, atol=5 * 12 * unit)
    np.testing.assert_array_equal(stages["capped"][0, 0, 1, 1], 0)
    # At 16 times the cap nothing is left but the cap: 1 - tanh(16) is 3e-14.
    far = run("dot_scores", QUERY, -KEY, scale=40.0, softcap=2.5)["capped"][0, 0, 0]
    np.testing.assert_allclose(far, [-2.5, -2.5, -2.5], rtol=8 * unit + 3e-14, atol=0)


@pytest.mark.parametrize("factor", [1e-309, 1e-160, 1e160, 1e307])
def test_the_reference_knows_the_angle_of_vectors_whose_squares_no_number_holds(factor: float) -> None:
    query, key = np.array([[[[3.0, 4.0]]]]), np.array([[[[4.0, 3.0], [-3.0, -4.0]]]])
    found = numpy_backend.cosine_scores(query, key * factor)["scores"]
    # Of 1e-309 subnormal numbers hold 14 bits less than others.
    np.testing.assert_allclose(found, [[[[0.96, -1.0]]]], rtol=1e-12)


def test_cosine_scores_of_angles_that_are_known(run: Run, unit: float) -> None:
    # Graves et al. 2014, section 3.3.1: u.v / (|u| |v|). (3, 4).(4, 3) = 24 of 5 times 5; a right angle; the opposite.
    query, key = np.array([[[[3, 4], [0, 2]]]]), np.array([[[[4, 3], [-8, 6], [-6, -8], [30, 40]]]])
    cosines = np.array([[[[0.96, 0, -1, 1], [0.6, 0.6, -0.8, 0.8]]]])
    # Two lengths, divisions or reciprocals of both, two products and their sum: below 16 u of the sum of magnitudes.
    found = run("cosine_scores", query, key)
    assert list(found) == ["scores"]
    np.testing.assert_allclose(found["scores"], cosines, rtol=0, atol=16 * unit)
    np.testing.assert_allclose(run("cosine_scores", query, key, scale=-10.0)["scores"], -10 * cosines, atol=200 * unit)


def test_a_cosine_does_not_depend_on_the_lengths_of_its_vectors(run: Run, unit: float) -> None:
    before = run("cosine_scores", QUERY, KEY)["scores"]
    after = run("cosine_scores", QUERY * np.array([[0.001], [70]]), KEY * np.array([[3], [0.5], [1000]]))["scores"]
    np.testing.assert_allclose(after, before, rtol=0, atol=32 * unit)


@pytest.mark.parametrize("operation", ["dot_scores", "cosine_scores", "general_scores", "additive_scores"])
def test_no_keys_give_scores_of_length_zero(run: Run, operation: str) -> None:
    extra = {"general_scores": [(5, 5)], "additive_scores": [(5, 6), (5, 6), (6,)]}
    inputs = [np.ones(shape) for shape in [(2, 3, 4, 5), (2, 3, 0, 5), *extra.get(operation, [])]]
    assert run(operation, *inputs)["scores"].shape == (2, 3, 4, 0)
