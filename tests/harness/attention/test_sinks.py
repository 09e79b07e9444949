"""Attention sinks: what one more key of zeros gives, with a value of zeros and the sinks for a bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import accumulated_bounds, introduced_bound
from attncheck.attention.problem import Problem
from attncheck.attention.radii import propagate
from attncheck.attention.rounding import rounding_model_named
from attncheck.attention.walk import error_walk, reach_walk, value_walk
from attncheck.backends import numpy_backend
from attncheck.oracle.evaluate import exact_from, exact_stages
from attncheck.reading.inputs import Inputs
from attncheck.spec import key_axis

Array = NDArray[Any]
RNG = np.random.default_rng(7)
HEADS, KV_HEADS, QUERIES, KEYS = 4, 2, 5, 6
SINKS_OF_HEADS = np.array([0.5, -np.inf, 6.0, -3.0])
BIAS = RNG.standard_normal((HEADS, QUERIES, KEYS))
MASK = RNG.random((2, 1, QUERIES, KEYS)) < 0.6
MASK[0, 0, 2] = False
OPTIONS: list[dict[str, Any]] = [{}, {"softcap": 1.5, "scale": 0.7}]


def drawn(*, gradients: bool = False, **more: Array) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    inputs = {
        "query": rng.standard_normal((2, HEADS, QUERIES, 3)),
        "key": rng.standard_normal((2, KV_HEADS, KEYS, 3)),
        "value": rng.standard_normal((2, KV_HEADS, KEYS, 4)),
    }
    if gradients:
        inputs["grad_output"] = rng.standard_normal((2, HEADS, QUERIES, 4))
    return inputs | {"sinks": SINKS_OF_HEADS} | more


def with_one_more_key(inputs: dict[str, Array]) -> dict[str, Array]:
    """Return the same attention without sinks, as a user would write it."""
    lowered = {name: array for name, array in inputs.items() if name != "sinks"}
    for name in ("key", "value"):
        lowered[name] = np.concatenate([inputs[name], np.zeros_like(inputs[name][:, :, :1])], axis=2)
    bias = np.broadcast_to(inputs.get("bias", np.zeros(1)), (2, HEADS, QUERIES, KEYS))
    sinks = np.broadcast_to(inputs["sinks"][:, None, None], (2, HEADS, QUERIES, 1))
    lowered["bias"] = np.concatenate([bias, sinks], axis=-1)
    if "mask" in inputs:
        mask = np.broadcast_to(inputs["mask"], (2, 1, QUERIES, KEYS))
        lowered["mask"] = np.concatenate([mask, np.ones_like(mask[..., :1])], axis=-1)
    return lowered


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("more", [{}, {"bias": BIAS}, {"mask": MASK}, {"mask": MASK, "bias": BIAS[:, :, :1]}])
def test_the_exact_stages_are_those_with_one_more_key(options: dict[str, Any], more: dict[str, Array]) -> None:
    inputs = drawn(**more)
    own, lowered = (exact_stages("attention", options, each) for each in (inputs, with_one_more_key(inputs)))
    for stage, exact in own.items():
        axis = key_axis(stage)
        high = lowered[stage].high if axis is None else np.delete(lowered[stage].high, -1, axis)
        np.testing.assert_array_equal(exact.high, high, stage)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("more", [{"bias": np.broadcast_to(BIAS, (2, *BIAS.shape))}, {"mask": MASK}])
def test_the_gradient_of_a_sink_is_that_of_its_bias(options: dict[str, Any], more: dict[str, Array]) -> None:
    inputs = drawn(gradients=True, **more)
    own, lowered = (exact_stages("attention_gradients", options, each) for each in (inputs, with_one_more_key(inputs)))
    of_bias = lowered["grad_bias"].high
    np.testing.assert_allclose(own["grad_sinks"].high, of_bias[..., -1].sum(axis=(0, 2)), rtol=1e-14, atol=1e-300)
    assert own["grad_sinks"].shape == (HEADS,)
    for name in ("grad_key", "grad_value"):
        np.testing.assert_array_equal(own[name].high, lowered[name].high[:, :, :-1])
    if "bias" in inputs:
        np.testing.assert_array_equal(own["grad_bias"].high, of_bias[..., :-1])


def test_a_bias_that_is_one_number_for_all_keys_has_a_gradient_without_the_sink() -> None:
    inputs = drawn(gradients=True, bias=BIAS[:, :, :1])
    spread = inputs | {"bias": np.broadcast_to(inputs["bias"], (2, *BIAS.shape))}
    of_one, of_each = (exact_stages("attention_gradients", {}, each)["grad_bias"].high for each in (inputs, spread))
    np.testing.assert_allclose(of_one, of_each.sum(axis=(0, 3))[..., None], rtol=1e-13, atol=1e-15)


def test_sinks_of_minus_infinity_are_none() -> None:
    inputs = drawn(mask=MASK)
    none = inputs | {"sinks": np.full(HEADS, -np.inf)}
    without = {name: array for name, array in inputs.items() if name != "sinks"}
    for convention in ("zero", "uniform"):
        own, other = (exact_stages("attention", {"empty_rows": convention}, each) for each in (none, without))
        for stage in own:
            np.testing.assert_array_equal(own[stage].high, other[stage].high, stage)


def test_a_row_of_a_sink_alone_has_its_logit_for_log_sum_exp_and_gives_0() -> None:
    exact = exact_stages("attention", {}, drawn(mask=MASK))
    assert (exact["output"].high[0, :, 2] == 0).all()
    np.testing.assert_array_equal(exact["log_sum_exp"].high[0, :, 2], SINKS_OF_HEADS)


@pytest.mark.parametrize(("dtype", "model"), [("float64", "native"), ("float32", "native"), ("float16", "eager")])
@pytest.mark.parametrize("operation", ["attention", "attention_gradients"])
@pytest.mark.parametrize("more", [{}, {"bias": BIAS[None], "mask": MASK}, {"bias": BIAS[None, :, :, :1]}])
def test_a_right_implementation_is_within_the_bounds(
    operation: str, dtype: str, model: str, more: dict[str, Array]
) -> None:
    inputs = drawn(gradients=operation == "attention_gradients", **more)
    inputs = {name: array if array.dtype == np.bool_ else array.astype(dtype) for name, array in inputs.items()}
    exact = exact_stages(operation, {"softcap": 1.5}, inputs)
    highs = {stage: each.high for stage, each in exact.items()}
    bounds = accumulated_bounds(operation, {"softcap": 1.5}, inputs, rounding_model_named(model, dtype), highs)
    with np.errstate(all="ignore"):
        returned = getattr(numpy_backend, operation)(**inputs, softcap=1.5)
    assert bounds.keys() == exact.keys() == returned.keys()
    for stage, bound in bounds.items():
        assert bound.max_error.shape == exact[stage].shape
        assert (exact[stage].error_of(returned[stage]) <= bound.max_error + exact[stage].radius).all(), stage
        assert (bound.sigma <= bound.max_error).all()


@pytest.mark.parametrize(("model", "charged"), [("eager", False), ("fused", True)])
def test_adding_a_sink_is_charged_no_rounding_but_that_of_its_base(model: str, charged: bool) -> None:
    rounding = rounding_model_named(model, "float16")
    assert (rounding.folding == "base") == charged
    problem = Problem.of("attention", {}, drawn(bias=BIAS, mask=MASK)).in_float64()
    state = error_walk(problem, rounding, value_walk(problem)).node("logits")
    unit = rounding.compute_unit if charged else 0.0
    finite = np.where(np.isfinite(SINKS_OF_HEADS), np.abs(SINKS_OF_HEADS), 0.0)
    np.testing.assert_array_equal(
        state.max_error[..., -1], np.broadcast_to(unit * finite[:, None], (2, HEADS, QUERIES))
    )
    assert not state.floor[..., -1].any()
    assert not state.shared[..., -1].any()


def test_what_follows_from_returned_stages_counts_the_sink() -> None:
    inputs, rounding = drawn(bias=BIAS, mask=MASK), rounding_model_named("native", "float64")
    exact = {stage: each.high for stage, each in exact_stages("attention", {}, inputs).items()}
    for stage in ("weights", "log_sum_exp", "output"):
        before = {name: exact[name] for name in ("biased", "masked", "weights") if name != stage}
        if stage == "output":
            before = {"weights": exact["weights"]}
        step = exact_from("attention", {}, inputs, before, stage)
        assert step is not None
        np.testing.assert_allclose(step.high, exact[stage], rtol=1e-13, atol=1e-300)
        bound = introduced_bound("attention", {}, inputs, rounding, before, step.high, stage)
        assert bound is not None
        assert bound.max_error.shape == exact[stage].shape


def test_the_radius_of_a_sink_moves_weights_and_log_sum_exp() -> None:
    arrays = drawn(bias=BIAS)
    arrays["sinks"] = np.array([0.5, 1.0, 6.0, -3.0])
    moved = arrays | {"sinks": arrays["sinks"] + 1e-3}
    radius = {name: np.zeros_like(array) for name, array in arrays.items()} | {"sinks": np.full(HEADS, 1e-3)}
    balls = propagate("attention", {}, Inputs(arrays, radius))
    other = exact_stages("attention", {}, moved)
    for stage in ("weights", "log_sum_exp", "output"):
        distance = np.abs(other[stage].high - balls[stage].value)
        assert (distance <= balls[stage].radius * (1 + 1e-9)).all(), stage
        assert distance.max() > 1e-6


def test_a_query_that_is_reached_as_a_whole_reaches_every_key_behind_projections() -> None:
    rng = np.random.default_rng(4)
    inputs = {"query": rng.standard_normal((2, 5, 8)), "sinks": rng.standard_normal(4)}
    inputs |= {name: rng.standard_normal((2, 6, 8)) for name in ("key", "value")}
    inputs |= {f"{name}_weight": rng.standard_normal((8, 12)) for name in ("query", "key", "value")}
    problem = Problem.of("multi_head_attention", {"heads": 4}, inputs)
    flags = {name: np.zeros(array.shape, dtype=np.bool_) for name, array in inputs.items()}
    flags["query"][1, 2] = True
    walk = reach_walk(problem, flags, None)
    logits = np.broadcast_to(walk.node("logits"), (2, 4, 5, 7))
    assert logits[1, :, 2, :6].all()
    assert logits[..., :6].sum() == 4 * 6
    assert not logits[..., 6].any()
    assert np.broadcast_to(walk.node("weights"), (2, 4, 5, 7))[1, :, 2].all()
