"""What bounds are where they can be worked out by hand, and that they notice small faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound, accumulated_bounds, introduced_bound
from attncheck.attention.rounding import rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.judging.tiers import Tier, measure
from attncheck.oracle.evaluate import exact_from, exact_stages

Array = NDArray[Any]
U32 = 2.0**-24
SINGLE = rounding_model_named("native", "float32")
DOUBLE = rounding_model_named("native", "float64")


def attention_inputs(rng: np.random.Generator, *, keys: int = 5, width: int = 3, queries: int = 4) -> dict[str, Array]:
    shapes = {"query": (1, 2, queries, width), "key": (1, 2, keys, width), "value": (1, 2, keys, 3)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def attend(inputs: dict[str, Array], **options: Any) -> dict[str, Array]:
    keywords: dict[str, Any] = {**inputs, **options}
    return numpy_backend.attention(**keywords)


def bounds_of(
    inputs: dict[str, Array], options: dict[str, Any] | None = None, operation: str = "attention"
) -> dict[str, Bound]:
    exact = {stage: each.high for stage, each in exact_stages(operation, options or {}, inputs).items()}
    return accumulated_bounds(operation, options or {}, inputs, SINGLE, exact)


def tier_of(stage: str, computed: Array, inputs: dict[str, Array], operation: str = "attention") -> Tier:
    exact, bound = exact_stages(operation, {}, inputs)[stage], bounds_of(inputs, operation=operation)[stage]
    judged = np.isfinite(exact.high)
    return measure(
        exact.error_of(computed), exact.radius, bound.max_error, bound.sigma, judged, supports_statistics=True
    ).tier


def softmax_bounds(*rows: list[float]) -> dict[str, Bound]:
    return bounds_of({"scores": np.array([[rows]], np.float32)}, operation="softmax")


# By hand


def test_one_product_may_err_by_its_own_rounding_and_its_storage() -> None:
    one = np.full((1, 1, 1, 1), np.float32(1.1))
    max_error = bounds_of({"query": one, "key": one}, {"score": "dot"}, "scoring")["raw_scores"].max_error
    np.testing.assert_allclose(max_error, 2 * U32 * float(one[0, 0, 0, 0]) ** 2, rtol=1e-6)


def test_small_integers_have_exact_scores_where_the_scale_is_a_power_of_four() -> None:
    rng = np.random.default_rng(1)
    inputs = {name: rng.integers(-4, 5, (1, 2, 6, 16)).astype(np.float32) for name in ("query", "key")}
    bounds = bounds_of(inputs, operation="scoring")
    assert bounds["raw_scores"].max_error.max() < 1e-35
    assert bounds["scores"].max_error.max() < 1e-35


def test_small_integers_folded_into_an_inexact_scale_are_not_exact() -> None:
    rng = np.random.default_rng(1)
    query, key = (rng.integers(-4, 5, (1, 1, 6, 8)).astype(np.float32) for _ in range(2))
    inputs = {"query": query, "key": key}
    folded = bounds_of(inputs, operation="scoring")["scores"].max_error
    exact = {stage: each.high for stage, each in exact_stages("scoring", {}, inputs).items()}
    apart = accumulated_bounds("scoring", {}, inputs, replace(SINGLE, folding="none"), exact)["scores"].max_error
    np.testing.assert_allclose(apart, 2 * U32 * np.abs(exact["scores"]), rtol=1e-6, atol=1e-35)
    assert (folded > apart + U32 * np.abs(exact["scores"])).all()


def test_integers_too_large_to_add_up_exactly_are_rounded() -> None:
    large = np.array([[[[4096.0, 1.0]]]], np.float32)
    fits = bounds_of({"query": large - 1, "key": large}, {"score": "dot"}, "scoring")["raw_scores"]
    rounds = bounds_of({"query": large + 1, "key": large}, {"score": "dot"}, "scoring")["raw_scores"]
    assert fits.max_error.max() < 1e-35
    assert rounds.max_error.min() > 2 * U32 * 4096**2


def test_two_equal_scores_have_the_bound_that_the_formulas_give() -> None:
    bound = softmax_bounds([0.0, 0.0])["weights"].max_error
    exponent = (2 * 4 * U32 + 2 * U32) * (1 + 8 * U32)  # one rescaling: two exponentials, two products
    moved = 0.5 * np.expm1(exponent) / np.exp(-exponent)
    relative = 3 * U32 + 3 * U32 + 2 * U32  # n + r, division, storage
    np.testing.assert_allclose(bound, moved + relative * (0.5 + moved), rtol=1e-5)


def test_a_single_key_has_a_weight_that_no_score_can_move() -> None:
    near, far = softmax_bounds([1.0])["weights"].max_error, softmax_bounds([1e6])["weights"].max_error
    np.testing.assert_allclose(near, far, rtol=1e-6)
    assert near.max() < 10 * U32


def test_the_log_of_a_sum_keeps_a_bound_where_it_crosses_zero() -> None:
    bound = softmax_bounds([-np.log(2), -np.log(2)])["log_sum_exp"]
    assert 10 * U32 < bound.max_error.item() < 60 * U32


def test_a_single_keys_log_of_a_sum_may_err_by_as_much_as_its_score() -> None:
    rng = np.random.default_rng(3)
    inputs = attention_inputs(rng, keys=1, width=7)
    for size in (1.0, 1e3, 1e5, 1e8):  # at 1e5 a score may err by thousands, and e^1000 is beyond float64
        larger = {name: array * np.float32(size) for name, array in inputs.items()}
        bounds = bounds_of(larger)
        assert (bounds["log_sum_exp"].max_error >= bounds["scores"].max_error[..., 0]).all()


def test_equal_values_leave_no_room_for_errors_of_the_weights() -> None:
    inputs = attention_inputs(np.random.default_rng(2))
    inputs["query"] *= 30
    equal = inputs | {"value": np.full_like(inputs["value"], 3)}
    different = inputs | {"value": np.where(np.arange(5)[:, None] % 2, 3, -3).astype(np.float32) + 0 * inputs["value"]}
    assert bounds_of(equal)["output"].max_error.max() < 3 * 40 * U32
    assert bounds_of(different)["output"].max_error.max() > 3 * 80 * U32


def test_a_masked_key_has_no_bound_and_an_empty_row_none_at_all() -> None:
    inputs = attention_inputs(np.random.default_rng(3))
    mask = np.ones((1, 1, 4, 5), bool)
    mask[..., 1, :], mask[..., 0, 3] = False, False
    bounds = bounds_of(inputs | {"mask": mask})
    assert (bounds["weights"].max_error[..., 0, 3] == 0).all()
    assert (bounds["weights"].max_error[..., 0, :3] > 0).all()
    for stage in ("weights", "log_sum_exp", "output"):
        assert (bounds[stage].max_error[:, :, 1] == 0).all()


@pytest.mark.parametrize("poison", [np.inf, np.nan, 3e38])
def test_what_a_masked_key_holds_changes_no_bound(poison: float) -> None:
    inputs = attention_inputs(np.random.default_rng(4)) | {"mask": np.arange(5) < 4}
    inputs["mask"] = np.broadcast_to(inputs["mask"], (1, 1, 4, 5))
    exact = {stage: each.high for stage, each in exact_stages("attention", {}, inputs).items()}
    clean = accumulated_bounds("attention", {}, inputs, SINGLE, exact)["output"]
    poisoned = inputs | {"value": inputs["value"].copy()}
    poisoned["value"][..., 4, :] = poison
    np.testing.assert_array_equal(
        accumulated_bounds("attention", {}, poisoned, SINGLE, exact)["output"].max_error, clean.max_error
    )


@pytest.mark.parametrize("fill", [-1e4, -1e9, float(np.finfo(np.float32).min)])
def test_a_large_finite_bias_loosens_only_its_own_key(fill: float) -> None:
    inputs = attention_inputs(np.random.default_rng(5))
    bias = np.zeros((1, 1, 4, 5), np.float32)
    bias[..., 4] = fill
    finite, infinite = (bounds_of(inputs | {"bias": each})["output"] for each in (bias, np.where(bias, -np.inf, bias)))
    np.testing.assert_allclose(finite.max_error, infinite.max_error, rtol=0.3)
    np.testing.assert_allclose(finite.sigma, infinite.sigma, rtol=0.3)


def test_nothing_says_nothing_about_more_than_the_range_of_the_values() -> None:
    inputs = attention_inputs(np.random.default_rng(6))
    inputs["query"] *= np.float32(1e9)
    max_error = bounds_of(inputs)["output"].max_error
    spread = np.ptp(inputs["value"].astype(np.float64), axis=-2, keepdims=True)
    assert (max_error <= spread * (1 + 1e-4)).all()


def test_rows_that_may_change_by_half_are_bounded_by_the_values_that_they_attend_to() -> None:
    inputs = attention_inputs(np.random.default_rng(6), queries=5)
    inputs["query"] *= np.float32(1e9)
    inputs["value"][..., 4, :] = 1e6
    max_error = bounds_of(inputs, {"is_causal": True})["output"].max_error
    assert max_error[..., :4, :].max() < 10


def test_tiny_weights_of_float64_keep_a_scale_above_their_errors() -> None:
    scores = np.array([[[[0.0, -400.0, -700.0, -800.0]]]])
    exact = exact_stages("softmax", {}, {"scores": scores})
    bound = accumulated_bounds("softmax", {}, {"scores": scores}, DOUBLE, {k: v.high for k, v in exact.items()})
    computed = numpy_backend.softmax(scores)["weights"]
    z = exact["weights"].error_of(computed) / bound["weights"].sigma
    assert z.max() < 2
    assert bound["weights"].sigma[0, 0, 0, 1] < 1e-180


def test_bounds_scale_with_the_inputs() -> None:
    inputs = attention_inputs(np.random.default_rng(7))
    doubled = inputs | {"value": 4 * inputs["value"]}
    one, four = bounds_of(inputs)["output"], bounds_of(doubled)["output"]
    np.testing.assert_allclose(four.max_error, 4 * one.max_error, rtol=1e-6)
    np.testing.assert_allclose(four.sigma, 4 * one.sigma, rtol=1e-6)


def test_a_cap_that_is_saturated_hides_the_errors_of_scores() -> None:
    inputs = attention_inputs(np.random.default_rng(8))
    inputs["query"] *= 50
    bounds = bounds_of(inputs, {"softcap": 2.0})
    saturated = np.abs(exact_stages("attention", {}, inputs)["scores"].high) > 40
    assert saturated.any()
    assert (bounds["capped"].max_error[saturated] < 2 * 16 * U32).all()
    assert (bounds["scores"].max_error[saturated] > 40 * 4 * U32).all()


def test_query_heads_that_share_keys_have_the_bounds_of_repeated_ones() -> None:
    rng = np.random.default_rng(9)
    shapes = {"query": (1, 4, 3, 5), "key": (1, 2, 6, 5), "value": (1, 2, 6, 2)}
    shared = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    repeated = shared | {name: np.repeat(shared[name], 2, axis=1) for name in ("key", "value")}
    exact = {stage: each.high for stage, each in exact_stages("attention", {}, repeated).items()}
    of_shared, of_repeated = (accumulated_bounds("attention", {}, each, SINGLE, exact) for each in (shared, repeated))
    np.testing.assert_array_equal(of_shared["output"].max_error, of_repeated["output"].max_error)


def test_only_the_stages_asked_for_are_bounded() -> None:
    inputs = attention_inputs(np.random.default_rng(10))
    exact = {stage: each.high for stage, each in exact_stages("attention", {}, inputs).items()}
    assert list(accumulated_bounds("attention", {}, inputs, SINGLE, exact, ["output"])) == ["output"]


def test_no_introduced_bound_follows_from_what_is_not_finite() -> None:
    inputs = attention_inputs(np.random.default_rng(11))
    stages = attend(inputs)
    exact = stages["weights"].astype(np.float64)
    assert introduced_bound("attention", {}, inputs, SINGLE, stages, exact, "weights") is not None
    for poison in (np.nan, np.inf):
        broken = stages | {"scores": np.where(np.arange(5) == 2, poison, stages["scores"])}
        assert introduced_bound("attention", {}, inputs, SINGLE, broken, exact, "weights") is None


def test_a_stage_that_was_not_returned_hands_its_own_errors_on() -> None:
    inputs = attention_inputs(np.random.default_rng(12))
    stages = attend(inputs)
    without = {"output": stages["output"]}
    exact = exact_from("attention", {}, inputs, without, "output")
    assert exact is not None
    bound = introduced_bound("attention", {}, inputs, SINGLE, without, exact.high, "output")
    assert bound is not None
    np.testing.assert_allclose(bound.max_error, bounds_of(inputs)["output"].max_error, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 3, 0, 4, 2), (1, 1, 0, 3, 4, 2), (0, 1, 2, 3, 4, 2), (1, 1, 2, 3, 0, 2)])
def test_axes_of_length_zero_have_bounds_of_their_shape(shape: tuple[int, ...]) -> None:
    batch, heads, queries, keys, width, columns = shape
    shapes = {"query": (queries, width), "key": (keys, width), "value": (keys, columns)}
    inputs = {name: np.ones((batch, heads, *each), np.float32) for name, each in shapes.items()}
    exact = {name: array.astype(np.float64) for name, array in attend(inputs, scale=0.5).items()}
    bounds = accumulated_bounds("attention", {"scale": 0.5}, inputs, SINGLE, exact)
    assert {name: bound.max_error.shape for name, bound in bounds.items()} == {
        name: each.shape for name, each in exact.items()
    }
    if not keys:
        assert (bounds["output"].max_error == 0).all()


# Sensitivity


@pytest.mark.parametrize("seed", range(5))
def test_a_scale_that_is_wrong_in_the_fifth_digit_exceeds_the_bound_of_scores(seed: int) -> None:
    inputs = attention_inputs(np.random.default_rng(seed))
    scale = 1 / np.sqrt(3)
    right, wrong = (attend(inputs, scale=each)["scores"] for each in (scale, scale * (1 + 1e-5)))
    assert not tier_of("scores", right, inputs).fails
    assert tier_of("scores", wrong, inputs) is Tier.PROVEN


@pytest.mark.parametrize("seed", range(5))
def test_a_scale_that_is_wrong_in_the_fifth_digit_is_seen_in_wide_vectors_too(seed: int) -> None:
    inputs = attention_inputs(np.random.default_rng(seed), width=64, queries=16, keys=16)
    wrong = attend(inputs, scale=(1 + 1e-5) / 8)["scores"]
    assert tier_of("scores", wrong, inputs).fails


@pytest.mark.parametrize("seed", range(5))
def test_weights_rounded_to_bfloat16_exceed_their_bound(seed: int) -> None:
    inputs = attention_inputs(np.random.default_rng(seed))
    weights = attend(inputs)["weights"]
    assert not tier_of("weights", weights, inputs).fails
    coarse = weights.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert tier_of("weights", coarse, inputs) is Tier.PROVEN


@pytest.mark.parametrize("row", [[0.0, -9.0], [3.0, -6.5, -7.0]])
def test_a_millionth_in_the_denominator_exceeds_the_bound_of_weights(row: list[float]) -> None:
    scores = np.array([[[row]]], np.float32)
    powers = np.exp(scores - scores.max())
    right, wrong = powers / powers.sum(), powers / (powers.sum() + np.float32(1e-6))
    assert not tier_of("weights", right, {"scores": scores}, "softmax").fails
    assert tier_of("weights", wrong, {"scores": scores}, "softmax") is Tier.PROVEN
