"""Bounds where they can be worked out by hand, what each rounding model allows, and small faults that they notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound, accumulated_bounds, introduced_bounds
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import FORMATS, RoundingModel, rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.judging.tiers import Tier, measure
from attncheck.judging.truth import Truth, find_truth
from attncheck.mutation import reduced
from attncheck.mutation.mutant import Control, subjects_of_module
from attncheck.oracle.evaluate import exact_stages
from attncheck.spec import ROUNDING_MODELS

Array = NDArray[Any]
Inputs = dict[str, Array]
U32 = 2.0**-24
SINGLE = rounding_model_named("native", "float32")
GRADIENTS = "attention_gradients"


def drawn(seed: int, *, keys: int = 5, width: int = 3, queries: int = 4, heads: int = 2, dtype: str = "f") -> Inputs:
    rng = np.random.default_rng(seed)
    shapes = {"query": (1, heads, queries, width), "key": (1, heads, keys, width), "value": (1, heads, keys, 3)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def truth_of(inputs: Inputs, operation: str = "attention", dtype: str = "float32", **options: Any) -> Truth:
    return find_truth(operation, options, inputs, dtype, supports_statistics=True)


def bounds_of(inputs: Inputs, operation: str = "attention", **options: Any) -> Mapping[str, Bound]:
    return truth_of(inputs, operation, **options).bounds("native")


def softmax_bounds(*row: float) -> Mapping[str, Bound]:
    return bounds_of({"scores": np.array([[[row]]], np.float32)}, "softmax")


def attend(inputs: Inputs, **options: Any) -> Inputs:
    return dict(numpy_backend.attention(**inputs, **options))


def tier_of(stage: str, computed: Array, inputs: Inputs, operation: str = "attention") -> Tier:
    truth = truth_of(inputs, operation)
    exact, bound = truth.exact[stage], truth.bounds("native")[stage]
    parts = exact.error_of(computed), exact.radius, bound.max_error, bound.sigma
    return measure(*parts, np.isfinite(exact.high), supports_statistics=True).tier


# By hand, forwards.


def test_one_product_may_err_by_its_own_rounding_and_its_storage() -> None:
    one = np.full((1, 1, 1, 1), np.float32(1.1))
    max_error = bounds_of({"query": one, "key": one}, "scoring", score="dot")["raw_scores"].max_error
    np.testing.assert_allclose(max_error, 2 * U32 * float(one.item()) ** 2, rtol=1e-6)


def test_small_integers_are_exact_unless_an_inexact_scale_was_folded_into_them() -> None:
    rng = np.random.default_rng(1)
    inputs = {name: rng.integers(-4, 5, (1, 2, 6, 16)).astype(np.float32) for name in ("query", "key")}
    for stage in ("raw_scores", "scores"):  # 1/sqrt(16) is a power of two
        assert bounds_of(inputs, "scoring")[stage].max_error.max() < 1e-35
    inputs = {name: array[..., :8] for name, array in inputs.items()}
    folded = bounds_of(inputs, "scoring")["scores"].max_error
    exact = {stage: each.high for stage, each in exact_stages("scoring", {}, inputs).items()}
    apart = accumulated_bounds("scoring", {}, inputs, replace(SINGLE, folding="none"), exact)["scores"].max_error
    np.testing.assert_allclose(apart, 2 * U32 * np.abs(exact["scores"]), rtol=1e-6, atol=1e-35)
    assert (folded > apart + U32 * np.abs(exact["scores"])).all()


def test_integers_too_large_to_add_up_exactly_are_rounded() -> None:
    large = np.array([[[[4096.0, 1.0]]]], np.float32)
    fits, rounds = (
        bounds_of({"query": large + by, "key": large}, "scoring", score="dot")["raw_scores"].max_error for by in (-1, 1)
    )
    assert fits.max() < 1e-35
    assert rounds.min() > 2 * U32 * 4096**2


def test_two_equal_scores_have_the_bound_that_the_formulas_give() -> None:
    exponent = (2 * 4 * U32 + 2 * U32) * (1 + 8 * U32)  # one rescaling: two exponentials, two products
    moved = 0.5 * np.expm1(exponent) / np.exp(-exponent)
    relative = 3 * U32 + 3 * U32 + 2 * U32  # n + r, division, storage
    bound = softmax_bounds(0.0, 0.0)["weights"].max_error
    np.testing.assert_allclose(bound, moved + relative * (0.5 + moved), rtol=1e-5)


def test_a_single_key_has_a_weight_that_no_score_can_move_and_a_log_of_a_sum_that_its_score_moves() -> None:
    near, far = (softmax_bounds(score)["weights"].max_error for score in (1.0, 1e6))
    np.testing.assert_allclose(near, far, rtol=1e-6)
    assert near.max() < 10 * U32
    inputs = drawn(3, keys=1, width=7)
    for size in (1.0, 1e3, 1e5, 1e8):  # at 1e5 a score may err by thousands, and e^1000 is beyond float64
        bounds = bounds_of({name: array * np.float32(size) for name, array in inputs.items()})
        assert (bounds["log_sum_exp"].max_error >= bounds["scores"].max_error[..., 0]).all()


def test_the_log_of_a_sum_keeps_a_bound_where_it_crosses_zero() -> None:
    assert 10 * U32 < softmax_bounds(-np.log(2), -np.log(2))["log_sum_exp"].max_error.item() < 60 * U32
    # Far from it: two roundings each of the score, of the maximum and of the result.
    assert 5.9 * U32 < softmax_bounds(1e6)["log_sum_exp"].max_error.item() / 1e6 < 6.1 * U32


def test_equal_values_leave_no_room_for_errors_of_the_weights() -> None:
    inputs = drawn(2)
    inputs["query"] *= 30
    signs = np.where(np.arange(5)[:, None] % 2, 3, -3)
    equal, different = (
        bounds_of(inputs | {"value": (each + 0 * inputs["value"]).astype(np.float32)})["output"].max_error.max()
        for each in (3, signs)
    )
    assert equal < 3 * 40 * U32 < 3 * 80 * U32 < different


def test_a_masked_key_has_no_bound_and_an_empty_row_none_at_all() -> None:
    mask = np.ones((1, 1, 4, 5), bool)
    mask[..., 1, :], mask[..., 0, 3] = False, False
    bounds = bounds_of(drawn(3) | {"mask": mask})
    assert (bounds["weights"].max_error[..., 0, 3] == 0).all()
    assert (bounds["weights"].max_error[..., 0, :3] > 0).all()
    for stage in ("weights", "log_sum_exp", "output"):
        assert (bounds[stage].max_error[:, :, 1] == 0).all()


@pytest.mark.parametrize("poison", [np.inf, np.nan, 3e38])
def test_what_a_masked_key_holds_changes_no_bound(poison: float) -> None:
    inputs = drawn(4) | {"mask": np.broadcast_to(np.arange(5) < 4, (1, 1, 4, 5))}
    exact = {stage: each.high for stage, each in exact_stages("attention", {}, inputs).items()}
    poisoned = inputs | {"value": np.where(np.arange(5)[:, None] == 4, np.float32(poison), inputs["value"])}
    clean, other = (accumulated_bounds("attention", {}, each, SINGLE, exact)["output"] for each in (inputs, poisoned))
    np.testing.assert_array_equal(other.max_error, clean.max_error)


@pytest.mark.parametrize("fill", [-1e4, -1e9, float(np.finfo(np.float32).min)])
def test_a_large_finite_bias_loosens_only_its_own_key(fill: float) -> None:
    bias = np.zeros((1, 1, 4, 5), np.float32)
    bias[..., 4] = fill
    finite, infinite = (
        bounds_of(drawn(5) | {"bias": each})["output"] for each in (bias, np.where(bias, -np.inf, bias))
    )
    np.testing.assert_allclose(finite.max_error, infinite.max_error, rtol=0.3)
    np.testing.assert_allclose(finite.sigma, infinite.sigma, rtol=0.3)


def test_no_error_is_larger_than_the_range_of_the_values_that_are_attended_to() -> None:
    inputs = drawn(6, queries=5)
    inputs["query"] *= np.float32(1e9)
    spread = np.ptp(inputs["value"].astype(np.float64), axis=-2, keepdims=True)
    assert (bounds_of(inputs)["output"].max_error <= spread * (1 + 1e-4)).all()
    inputs["value"][..., 4, :] = 1e6
    assert bounds_of(inputs, is_causal=True)["output"].max_error[..., :4, :].max() < 10


def test_tiny_weights_of_float64_keep_a_scale_above_their_errors() -> None:
    scores = np.array([[[[0.0, -400.0, -700.0, -800.0]]]])
    truth = truth_of({"scores": scores}, "softmax", "float64")
    sigma = truth.bounds("native")["weights"].sigma
    assert (truth.exact["weights"].error_of(numpy_backend.softmax(scores)["weights"]) / sigma).max() < 2
    assert sigma[0, 0, 0, 1] < 1e-180


def test_bounds_scale_with_the_values() -> None:
    inputs = drawn(7)
    one, four = (bounds_of(inputs | {"value": factor * inputs["value"]})["output"] for factor in (1, 4))
    for part in ("max_error", "sigma"):
        np.testing.assert_allclose(getattr(four, part), 4 * getattr(one, part), rtol=1e-6)


def test_a_cap_that_is_saturated_hides_the_errors_of_scores() -> None:
    inputs = drawn(8)
    inputs["query"] *= 50
    bounds = bounds_of(inputs, softcap=2.0)
    saturated = np.abs(exact_stages("attention", {}, inputs)["scores"].high) > 40
    assert saturated.any()
    assert (bounds["capped"].max_error[saturated] < 2 * 16 * U32).all()
    assert (bounds["scores"].max_error[saturated] > 40 * 4 * U32).all()


def test_query_heads_that_share_keys_have_the_bounds_of_repeated_ones() -> None:
    inputs = drawn(9, heads=4)
    shared = inputs | {name: inputs[name][:, ::2] for name in ("key", "value")}
    repeated = shared | {name: np.repeat(shared[name], 2, axis=1) for name in ("key", "value")}
    one, other = (bounds_of(each)["output"].max_error for each in (shared, repeated))
    np.testing.assert_array_equal(one, other)


def test_no_introduced_bound_follows_from_what_is_not_finite() -> None:
    inputs = drawn(11)
    stages = attend(inputs)
    problem, exact = Problem.of("attention", {}, inputs), stages["weights"].astype(np.float64)
    assert introduced_bounds(problem, SINGLE, stages, {"weights": exact}) is not None
    for poison in (np.nan, np.inf):
        broken = stages | {"scores": np.where(np.arange(5) == 2, poison, stages["scores"])}
        for stage in ("weights", "log_sum_exp"):
            assert introduced_bounds(problem, SINGLE, broken, {stage: exact}) is None
        # The output follows from the weights.
        output = stages["output"].astype(np.float64)
        assert introduced_bounds(problem, SINGLE, broken, {"output": output}) is not None


@pytest.mark.parametrize("shape", [(1, 1, 3, 0, 4, 2), (1, 1, 0, 3, 4, 2), (0, 1, 2, 3, 4, 2), (1, 1, 2, 3, 0, 2)])
def test_axes_of_length_zero_have_bounds_of_their_shape(shape: tuple[int, ...]) -> None:
    batch, heads, queries, keys, width, columns = shape
    shapes = {"query": (queries, width), "key": (keys, width), "value": (keys, columns)}
    inputs = {name: np.ones((batch, heads, *each), np.float32) for name, each in shapes.items()}
    exact = {name: array.astype(np.float64) for name, array in attend(inputs, scale=0.5).items()}
    bounds = accumulated_bounds("attention", {"scale": 0.5}, inputs, SINGLE, exact)
    assert {name: bound.max_error.shape for name, bound in bounds.items()} == {n: e.shape for n, e in exact.items()}
    assert keys or (bounds["output"].max_error == 0).all()


# By hand, backwards.


def two_keys(keys: int = 2, value: float = 1.0, key: float = 0.0) -> Inputs:
    shapes = {"query": (1, 0.0), "key": (keys, key), "value": (keys, value), "grad_output": (1, 3.0)}
    return {name: np.full((1, 1, length, 1), number, np.float32) for name, (length, number) in shapes.items()}


def test_the_gradient_of_a_value_is_as_uncertain_as_its_weight() -> None:
    truth = truth_of(two_keys(), GRADIENTS, scale=1.0)
    stored = replace(SINGLE, recomputes=False)
    exponent = (2 * 4 * U32 + 2 * U32) * (1 + 8 * U32)  # one rescaling: two exponentials, two products
    moved = 0.5 * np.expm1(exponent) / np.exp(-exponent)
    weight = moved + ((2 + 1) * U32 + 3 * U32 + U32) * (0.5 + moved)  # sum, division, storage
    expected = 3 * weight + U32 * 3 * (0.5 + weight) + 2 * U32 * 3 * 0.5  # the product, storage of the result
    values = {stage: each.high for stage, each in truth.exact.items()}
    own = accumulated_bounds(GRADIENTS, truth.options, truth.inputs, stored, values)["grad_value"]
    np.testing.assert_allclose(own.max_error, expected, rtol=1e-5)
    assert (truth.bounds("native")["grad_value"].max_error > expected).all()


def test_a_query_of_one_key_has_no_gradient_but_its_roundings() -> None:
    truth = truth_of(two_keys(1, 2.0, 1.0), GRADIENTS, scale=1.0)
    assert abs(truth.exact["grad_query"].high.item()) < 1e-30
    assert 3 * U32 < truth.bounds("native")["grad_query"].max_error.item() < 300 * 6 * U32  # dp and Delta are 6


def test_a_gradient_through_a_mask_has_no_bound() -> None:
    inputs = drawn(5) | {"bias": np.zeros((1, 2, 4, 5), np.float32)}
    inputs["grad_output"] = drawn(6)["query"]
    mask = np.ones((1, 1, 4, 5), bool)
    mask[..., 1, :], mask[..., :, 3] = False, False
    truth = truth_of(inputs | {"mask": mask}, GRADIENTS)
    for stage, bound in truth.bounds("native").items():
        row = 1 if stage in ("grad_query", "grad_bias") else 3
        assert (bound.max_error[:, :, row] == 0).all()
        reached = (np.arange(bound.max_error.shape[2]) != row)[:, None] & (truth.exact[stage].high != 0)
        assert (bound.max_error[reached] > 0).all()
    unbounded = truth.bounds("native")["grad_bias"].max_error == 0
    assert (unbounded == ~np.broadcast_to(mask, (1, 2, 4, 5))).all()


def test_heads_of_a_group_add_their_bounds_up() -> None:
    rng = np.random.default_rng(6)
    shapes = {"query": (1, 2, 9, 4), "key": (1, 1, 8, 4), "value": (1, 1, 8, 3), "grad_output": (1, 2, 9, 3)}
    whole = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    both, *alone = (
        bounds_of({name: array[:, heads] if array.shape[1] == 2 else array for name, array in whole.items()}, GRADIENTS)
        for heads in (slice(None), slice(0, 1), slice(1, 2))
    )
    for stage in ("grad_key", "grad_value"):
        total = alone[0][stage].max_error + alone[1][stage].max_error
        assert (both[stage].max_error > 0.9 * total).all()
        assert (both[stage].max_error < 1.5 * total).all()
        likely = np.hypot(alone[0][stage].sigma, alone[1][stage].sigma)
        np.testing.assert_allclose(both[stage].sigma, likely, rtol=0.25)


def test_scores_that_float64_cannot_tell_have_no_small_bounds() -> None:
    key = np.array([1e30, 1.000001e30], np.float32).reshape(1, 1, 2, 1)
    inputs = two_keys() | {"query": np.full((1, 1, 1, 1), 1e8, np.float32), "key": key}
    exact = {name: each.high for name, each in exact_stages(GRADIENTS, {"scale": 1.0}, inputs).items()}
    bound = accumulated_bounds(GRADIENTS, {"scale": 1.0}, inputs, SINGLE, exact)
    assert (bound["grad_value"].max_error >= 1).all()


# Small faults.


@pytest.mark.parametrize("seed", range(3))
def test_a_scale_that_is_wrong_in_the_fifth_digit_and_weights_in_bfloat16_exceed_their_bounds(seed: int) -> None:
    inputs = drawn(seed)
    scale = 1 / np.sqrt(3)
    right, wrong = (attend(inputs, scale=each)["scores"] for each in (scale, scale * (1 + 1e-5)))
    assert not tier_of("scores", right, inputs).fails
    assert tier_of("scores", wrong, inputs) is Tier.PROVEN
    weights = attend(inputs)["weights"]
    assert not tier_of("weights", weights, inputs).fails
    assert tier_of("weights", weights.astype(ml_dtypes.bfloat16).astype(np.float32), inputs) is Tier.PROVEN
    wide = drawn(seed, width=64, queries=16, keys=16)
    assert tier_of("scores", attend(wide, scale=(1 + 1e-5) / 8)["scores"], wide).fails


@pytest.mark.parametrize("row", [[0.0, -9.0], [3.0, -6.5, -7.0]])
def test_a_millionth_in_the_denominator_exceeds_the_bound_of_weights(row: list[float]) -> None:
    scores = np.array([[[row]]], np.float32)
    powers = np.exp(scores - scores.max())
    right, wrong = powers / powers.sum(), powers / (powers.sum() + np.float32(1e-6))
    assert not tier_of("weights", right, {"scores": scores}, "softmax").fails
    assert tier_of("weights", wrong, {"scores": scores}, "softmax") is Tier.PROVEN


# Rounding models.

SIXTEEN = ("fused", "fused_bwd", "eager", "eager_pre")


def units(rounding: RoundingModel, *ends: str) -> dict[str, float]:
    return {name: value for name, value in dataclasses.asdict(rounding).items() if name.endswith(ends)}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_the_numbers_that_their_libraries_state(name: str) -> None:
    limits, stated = ml_dtypes.finfo(name), FORMATS[name]  # type: ignore[no-untyped-call]
    numbers = limits.eps, limits.smallest_normal, limits.smallest_subnormal, limits.max
    own = 2 * stated.unit_roundoff, stated.least_normal, stated.least_subnormal, stated.largest
    assert own == tuple(map(float, numbers))
    assert stated.underflow == (2.0**-25 if name == "float16" else stated.least_normal)  # it alone keeps subnormals


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_native_class_rounds_to_its_own_format_alone(dtype: str) -> None:
    rounding, unit = rounding_model_named("native", dtype), float(np.finfo(dtype).eps) / 2
    own = units(rounding, "_unit")
    assert own.pop("product_unit") == 0, "what meets in a product is not rounded for it"
    assert set(own.values()) == {unit}
    assert rounding.exp_error == 4 * unit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_classes_of_16_bits_differ_in_what_they_store_and_never_accumulate_in_16_bits(dtype: str) -> None:
    models = fused, backward, eager, prescaled = tuple(rounding_model_named(each, dtype) for each in SIXTEEN)
    for rounding in models:
        assert rounding.accumulate_unit == rounding.sum_unit == U32
        assert rounding.output_unit == rounding.weight_unit == FORMATS[dtype].unit_roundoff
    assert fused.score_unit < eager.score_unit
    assert eager.prescale_unit < prescaled.prescale_unit
    assert fused.weight_gradient_unit < backward.weight_gradient_unit
    assert (fused.gradient_tile, backward.gradient_tile) == (None, 32)
    assert (fused.recomputes, backward.recomputes, eager.recomputes) == (True, True, False)
    for fine, coarse in ((fused, eager), (eager, prescaled)):
        pairs = zip(units(fine, "_unit", "_error").values(), units(coarse, "_unit", "_error").values(), strict=True)
        assert all(one <= other for one, other in pairs)


def test_every_class_has_a_policy_in_each_of_its_dtypes_and_in_no_other() -> None:
    for name, dtypes in ROUNDING_MODELS.items():
        for dtype in dtypes:
            rounding = rounding_model_named(name, dtype)
            assert (rounding.rounding_model, rounding.dtype) == (name, dtype)
            assert rounding.from_log_sum_exp == name.endswith("_lse")
            assert (rounding.product_unit > 0) == name.endswith("_products")
            assert rounding.of_statistics is rounding
        for dtype in {*FORMATS, "float8"} - {*dtypes}:
            with pytest.raises(ValueError, match=r"rounding model|dtype"):
                rounding_model_named(name, dtype)
    with pytest.raises(ValueError, match="rounding model: one of"):
        rounding_model_named("exact", "float32")


@pytest.mark.parametrize("name", ["tf32_products", "bf16_products", "bf16x3_products"])
def test_a_reduced_product_keeps_float32_at_both_ends(name: str) -> None:
    rounding = rounding_model_named(name, "float32")
    changed = ("rounding_model", "accumulate_unit", "product_precision", "product_unit", "product_underflow")
    assert replace(rounding, **{each: getattr(SINGLE, each) for each in changed}) == SINGLE
    assert rounding.product_error > SINGLE.accumulate_unit


@pytest.mark.parametrize("operation", ["attention", GRADIENTS])
def test_a_coarser_product_is_allowed_more(operation: str) -> None:
    inputs = drawn(3, keys=20, width=9) | {"mask": np.arange(20) % 7 > 0}
    inputs["mask"] = np.broadcast_to(inputs["mask"], (1, 1, 4, 20))
    inputs |= {"grad_output": drawn(4)["query"]} if operation == GRADIENTS else {}
    for softcap in (None, 5.0):
        truth = truth_of(inputs, operation, softcap=softcap)
        for fine, coarse in pairwise(("native", "bf16x3_products", "tf32_products", "bf16_products")):
            for stage, bound in truth.bounds(coarse).items():
                assert (bound.max_error >= truth.bounds(fine)[stage].max_error).all(), (stage, fine, coarse)
                assert (bound.sigma <= bound.max_error).all()


def test_a_stored_log_sum_exp_costs_weights_and_output_more_with_its_size_and_nothing_else() -> None:
    truth = truth_of(drawn(1))
    for stage, bound in truth.bounds("native_lse").items():
        own = truth.bounds("native")[stage].max_error
        if stage in ("weights", "output"):
            assert (bound.max_error >= own).all()
            assert (bound.max_error > own).any()
        else:
            np.testing.assert_array_equal(bound.max_error, own)
    scores, relative = np.random.default_rng(0).standard_normal((1, 1, 3, 5)), []
    for offset in (0.0, 1000.0):
        truth = truth_of({"scores": (scores + offset).astype("f")}, "softmax")
        exact, max_error = truth.exact["weights"].high, truth.bounds("native_lse")["weights"].max_error
        relative.append(float((max_error / exact).max()))
    assert relative[1] > relative[0] + 1000 * U32


def test_what_a_factor_can_hold_is_not_rounded() -> None:
    rng = np.random.default_rng(0)
    inputs = {name: rng.integers(-100, 101, (1, 1, 6, 16)).astype("f") for name in ("query", "key")}
    model = "tf32_products"
    assert (truth_of(inputs, "scoring", score="dot").bounds(model)["raw_scores"].max_error < 1e-30).all()
    inputs["query"][0, 0, 0, 0] = 2049  # 12 bits
    bound = truth_of(inputs, "scoring", score="dot").bounds(model)["raw_scores"].max_error
    assert (bound > 2.0**-11 * 2049).any()


def test_an_honest_variant_claims_a_class_for_each_of_its_dtypes() -> None:
    controls = [each for each in subjects_of_module(reduced.__name__) if isinstance(each, Control)]
    assert controls
    for honest in controls:
        for dtype in honest.dtypes:
            assert rounding_model_named(honest.classes[dtype], dtype).dtype == dtype
