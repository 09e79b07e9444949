"""Honest backward passes, evaluated in many ways, never exceed their bounds; small faults in them do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound, accumulated_bounds, introduced_bound
from attncheck.attention.rounding import rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.judging.tiers import Tier, measure
from attncheck.oracle.enclosure import Enclosure
from attncheck.oracle.evaluate import exact_stages

Array = NDArray[Any]
Stages = dict[str, Array]
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
GENERIC = ("normal", "peaky", "small")
STRUCTURED = ("tiny", "huge", "cancelling", "repeated", "integers", "offset keys", "offset values")
U32 = 2.0**-24


@dataclass(frozen=True)
class Problem:
    """One vector-Jacobian product and what is known of its inputs."""

    inputs: Stages
    options: dict[str, Any]
    supports_statistics: bool


@dataclass(frozen=True)
class Variant:
    """One honest way to go backwards: what is recomputed, folded, and stored after which step."""

    rounding_model: str
    recomputed: bool = False  # weights from log_sum_exp, Delta from the output
    apart: bool = False  # p dp - p Delta in place of p (dp - Delta)
    folded: bool = False  # the scale into query and key, its root each
    backwards: bool = False  # sums from the last term to the first
    tile: int | None = None


NATIVE = (
    Variant("native"),
    Variant("native", recomputed=True),
    Variant("native", recomputed=True, folded=True, backwards=True),
    Variant("native", apart=True, backwards=True),
)
SIXTEEN = (
    Variant("eager"),
    Variant("eager", apart=True),
    Variant("eager_pre", folded=True),
    Variant("fused"),
    Variant("fused", recomputed=True, folded=True),
    Variant("fused_bwd", recomputed=True, tile=32),
    Variant("fused_bwd", tile=32, backwards=True),
)


def make_problem(rng: np.random.Generator, dtype: str, regime: str | None = None) -> Problem:
    """Draw a problem: a regime of inputs, a shape, masks and options."""
    regime = regime or str(rng.choice(GENERIC + STRUCTURED))
    shared, group = (int(each) for each in rng.integers(1, 3, 2))
    queries, keys = int(rng.integers(1, 50)), int(rng.choice([1, 2, 3, int(rng.integers(4, 50))]))
    width, columns = int(rng.choice([1, 3, 4, 16, int(rng.integers(5, 40))])), int(rng.integers(1, 12))
    shapes = {"query": (group * shared, queries, width), "key": (shared, keys, width), "value": (shared, keys, columns)}
    shapes["grad_output"] = (group * shared, queries, columns)
    inputs = _in_regime(rng, regime, {name: rng.standard_normal((1, *shape)) for name, shape in shapes.items()})
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        lengths = [length if rng.random() < 0.6 else 1 for length in (1, group * shared, queries, keys)]
        inputs["bias"] = rng.standard_normal(lengths)
        inputs["bias"][rng.random(lengths) < 0.1] = -np.inf
    stored = {name: array.astype(DTYPES[dtype]) for name, array in inputs.items()}
    if rng.random() < 0.3:
        stored["mask"] = rng.random((1, 1, queries, keys)) < 0.7
    if rng.random() < 0.3:
        options["is_causal"] = True
    if rng.random() < 0.3:
        options["scale"] = float(rng.choice([1.0, 0.3, 0.25, 1.7]))
    if rng.random() < 0.3:
        options["softcap"] = float(rng.choice([0.7, 2.0, 30.0]))
    return Problem(stored, options, regime in GENERIC)


def _in_regime(rng: np.random.Generator, regime: str, inputs: Stages) -> Stages:
    query, key, value, grad_output = (inputs[name] for name in ("query", "key", "value", "grad_output"))
    match regime:
        case "peaky":
            query = query * 5
        case "small":
            query, value, grad_output = query * 0.05, value * 1e-2, grad_output * 0.1
        case "tiny":
            query, key, value, grad_output = query * 1e-3, key * 1e-3, value * 1e-3, grad_output * 1e-2
        case "huge":
            query = query * 40
        case "cancelling":
            query = query + 10 * rng.choice([-1, 1], query.shape[-1])
        case "repeated":
            key = np.repeat(key[..., :1, :], key.shape[-2], axis=-2)
        case "integers":
            query, key, value, grad_output = (
                rng.integers(-3, 4, each.shape) * 1.0 for each in (query, key, value, grad_output)
            )
        case "offset keys":
            key = key * 0.1 + 3
        case "offset values":
            value = value * 1e-2 + 20
    return {"query": query, "key": key, "value": value, "grad_output": grad_output}


@dataclass(frozen=True)
class Arithmetic:
    """What is rounded after which step, and how sums are taken."""

    working: Any
    stored: Any
    every_step: bool
    backwards: bool

    def step(self, array: Array) -> Array:
        """Store an intermediate."""
        return self.store(array) if self.every_step else array

    def store(self, array: Array) -> Array:
        """Store what a class always stores."""
        return np.asarray(array.astype(self.stored).astype(self.working))

    def product(self, left: Array, right: Array) -> Array:
        """Multiply matrices in the working format."""
        if not self.backwards:
            return np.asarray(left @ right)
        total = np.zeros((*left.shape[:-1], right.shape[-1]), self.working)
        for index in range(left.shape[-1] - 1, -1, -1):
            total = total + left[..., :, index, None] * right[..., None, index, :]
        return total


def evaluate(problem: Problem, variant: Variant, dtype: str) -> Stages:
    """Go forwards and backwards as ``variant`` does; gradients rounded to ``dtype``."""
    stored = DTYPES[dtype]
    working = stored if variant.rounding_model == "native" else np.float32
    arithmetic = Arithmetic(working, stored, variant.rounding_model.startswith("eager"), variant.backwards)
    step, product = arithmetic.step, arithmetic.product
    names = ("query", "key", "value", "grad_output")
    query, key, value, grad_output = (problem.inputs[name].astype(working) for name in names)
    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    scale = working(problem.options.get("scale", 1 / math.sqrt(query.shape[-1])))
    root = working(math.sqrt(scale)) if variant.folded else working(1)
    left, right = step(query * root), step(key * root)
    scores = step(product(left, right.swapaxes(-1, -2)))
    scores = scores if variant.folded else step(scores * scale)
    logits, height = _logits(problem, scores, arithmetic)
    weights, output = _forwards(logits, value, variant, arithmetic)
    gradient = _of_logits(
        weights, product(grad_output, value.swapaxes(-1, -2)), output, grad_output, variant, arithmetic
    )
    of_scores = gradient
    if "softcap" in problem.options:
        cap = working(problem.options["softcap"])
        of_scores = step(step(step(gradient * cap) * step(1 - step(height * height))) / cap)
    of_scores = of_scores if variant.folded else step(of_scores * scale)
    of_products = arithmetic.store(of_scores) if variant.rounding_model == "fused_bwd" else of_scores
    of_query = _tiled(of_products, right, variant, arithmetic)
    of_key = _tiled(of_products.swapaxes(-1, -2), left, variant, arithmetic)
    if variant.folded:
        of_query, of_key = step(step(of_query) * root), step(step(of_key) * root)
    gradients = {
        "grad_query": of_query,
        "grad_key": _of_group(of_key, group, arithmetic),
        "grad_value": _of_group(
            _tiled(arithmetic.store(weights).swapaxes(-1, -2), grad_output, variant, arithmetic), group, arithmetic
        ),
    }
    if "bias" in problem.inputs:
        axes = tuple(axis for axis, length in enumerate(problem.inputs["bias"].shape) if length == 1)
        gradients["grad_bias"] = gradient.sum(axis=axes, keepdims=True)
    return {name: array.astype(stored) for name, array in gradients.items()}


def _logits(problem: Problem, scores: Array, arithmetic: Arithmetic) -> tuple[Array, Array]:
    height, logits = np.zeros(()), scores
    if "softcap" in problem.options:
        cap = arithmetic.working(problem.options["softcap"])
        height = arithmetic.step(np.tanh(arithmetic.step(scores / cap)))
        logits = arithmetic.step(height * cap)
    if "bias" in problem.inputs:
        logits = arithmetic.step(logits + problem.inputs["bias"].astype(arithmetic.working))
    allowed = problem.inputs.get("mask", np.True_)
    if problem.options.get("is_causal"):
        allowed = allowed & np.tri(*scores.shape[-2:], dtype=bool)
    return np.where(allowed, logits, arithmetic.working(-np.inf)), height


def _forwards(logits: Array, value: Array, variant: Variant, arithmetic: Arithmetic) -> tuple[Array, Array]:
    """Return weights as they are used backwards, and the output as it is stored."""
    step, working = arithmetic.step, arithmetic.working
    highest = logits.max(axis=-1, keepdims=True)
    highest = np.where(np.isfinite(highest), highest, working(0))
    powers = step(np.exp(step(logits - highest)))
    total = step(powers.sum(axis=-1, keepdims=True))
    divisor = np.where(total > 0, total, working(1))
    weights = step(powers / divisor)
    output = arithmetic.store(arithmetic.product(arithmetic.store(weights), value))
    if variant.recomputed:
        weights = np.exp(logits - (highest + np.log(divisor)))
    return weights, output


def _of_logits(
    weights: Array, grad_weights: Array, output: Array, grad_output: Array, variant: Variant, arithmetic: Arithmetic
) -> Array:
    step = arithmetic.step
    grad_weights = step(grad_weights)
    if variant.rounding_model == "fused_bwd":
        grad_weights = arithmetic.store(grad_weights)
    if variant.recomputed:
        mean = (grad_output * output).sum(axis=-1, keepdims=True)
    else:
        mean = step(step(weights * grad_weights).sum(axis=-1, keepdims=True))
    if variant.apart:
        return step(step(weights * grad_weights) - step(weights * mean))
    return step(weights * step(grad_weights - mean))


def _tiled(left: Array, right: Array, variant: Variant, arithmetic: Arithmetic) -> Array:
    """Multiply; in tiles, partial sums are kept in the output's format."""
    if variant.tile is None:
        return arithmetic.product(left, right)
    total = np.zeros((*left.shape[:-1], right.shape[-1]), arithmetic.working)
    for start in range(0, left.shape[-1], variant.tile):
        part = slice(start, start + variant.tile)
        total = arithmetic.store(total + arithmetic.product(left[..., part], right[..., part, :]))
    return total


def _of_group(gradient: Array, group: int, arithmetic: Arithmetic) -> Array:
    heads = arithmetic.store(gradient)
    return np.asarray(heads.reshape(1, -1, group, *heads.shape[2:]).sum(axis=2, dtype=arithmetic.working))


def evaluations(problem: Problem, dtype: str) -> Iterator[tuple[str, str, Stages]]:
    """Go backwards in every way that the dtype has: name, rounding model, gradients."""
    wide = dtype in ("float64", "float32")
    if wide:
        keywords: dict[str, Any] = {**problem.inputs, **problem.options}
        yield "numpy", "native", numpy_backend.attention_gradients(**keywords)
    for variant in NATIVE if wide else SIXTEEN:
        yield str(variant), variant.rounding_model, evaluate(problem, variant, dtype)


def bounds_of(problem: Problem, rounding: Any, exact: dict[str, Enclosure]) -> dict[str, Bound]:
    """Bound every gradient."""
    values = {stage: each.high for stage, each in exact.items()}
    return accumulated_bounds("attention_gradients", problem.options, problem.inputs, rounding, values)


def tier_of(computed: Array, exact: Enclosure, bound: Bound, *, supports_statistics: bool) -> Tier:
    """Judge a gradient."""
    assert not np.isnan(bound.max_error).any()
    assert (bound.sigma <= bound.max_error).all()
    everywhere = np.ones(exact.shape, dtype=np.bool_)
    error = exact.error_of(computed)
    return measure(
        error, exact.radius, bound.max_error, bound.sigma, everywhere, supports_statistics=supports_statistics
    ).tier


def failures(problem: Problem, dtype: str) -> Iterator[tuple[str, str, Tier]]:
    """Judge every evaluation: those that fail, of which there is none."""
    exact = exact_stages("attention_gradients", problem.options, problem.inputs)
    bounds = {
        each: bounds_of(problem, rounding_model_named(each, dtype), exact)
        for each in {name for _, name, _ in evaluations(problem, dtype)}
    }
    for name, rounding_model, stages in evaluations(problem, dtype):
        assert set(stages) == set(exact)
        for stage, array in stages.items():
            tier = tier_of(
                array, exact[stage], bounds[rounding_model][stage], supports_statistics=problem.supports_statistics
            )
            if tier.fails:
                yield name, stage, tier


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_no_honest_gradient_exceeds_its_bounds(dtype: str, seed: int) -> None:
    problem = make_problem(np.random.default_rng(seed), dtype)
    with np.errstate(all="ignore"):
        assert not list(failures(problem, dtype)), problem.options


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiles_that_are_added_up_in_16_bits_are_a_class_of_their_own(dtype: str) -> None:
    shapes = {"query": (1, 1500, 2), "key": (1, 30, 2), "value": (1, 30, 30), "grad_output": (1, 1500, 30)}
    rng = np.random.default_rng(3)
    inputs = {name: rng.standard_normal((1, *shape)).astype(DTYPES[dtype]) for name, shape in shapes.items()}
    problem = Problem(inputs, {}, supports_statistics=True)
    exact = exact_stages("attention_gradients", {}, inputs)
    computed = evaluate(problem, Variant("fused_bwd", recomputed=True, tile=32), dtype)
    fails = {
        rounding_model: [
            stage
            for stage, bound in bounds_of(problem, rounding_model_named(rounding_model, dtype), exact).items()
            if tier_of(computed[stage], exact[stage], bound, supports_statistics=True).fails
        ]
        for rounding_model in ("fused", "fused_bwd")
    }
    assert "grad_value" in fails["fused"]
    assert not fails["fused_bwd"]


# By hand


def two_equal_keys() -> Problem:
    inputs = {"query": np.zeros((1, 1, 1, 1)), "key": np.zeros((1, 1, 2, 1)), "value": np.ones((1, 1, 2, 1))}
    inputs |= {"grad_output": np.full((1, 1, 1, 1), 3.0)}
    return Problem(
        {name: array.astype(np.float32) for name, array in inputs.items()}, {"scale": 1.0}, supports_statistics=False
    )


def test_the_gradient_of_a_value_is_as_uncertain_as_its_weight() -> None:
    problem = two_equal_keys()
    exact = exact_stages("attention_gradients", problem.options, problem.inputs)
    stored = replace(rounding_model_named("native", "float32"), recomputes=False)
    exponent = (2 * 4 * U32 + 2 * U32) * (1 + 8 * U32)  # one rescaling: two exponentials, two products
    moved = 0.5 * np.expm1(exponent) / np.exp(-exponent)
    weight = moved + ((2 + 1) * U32 + 3 * U32 + U32) * (0.5 + moved)  # sum, division, storage
    expected = 3 * weight + U32 * 3 * (0.5 + weight) + 2 * U32 * 3 * 0.5  # the product, storage of the result
    np.testing.assert_allclose(bounds_of(problem, stored, exact)["grad_value"].max_error, expected, rtol=1e-5)
    recomputed = bounds_of(problem, rounding_model_named("native", "float32"), exact)["grad_value"].max_error
    assert (recomputed > expected).all()


def test_a_query_of_one_key_has_no_gradient_but_its_roundings() -> None:
    problem = two_equal_keys()
    one = replace(
        problem, inputs=problem.inputs | {name: problem.inputs[name][..., :1, :] + 1 for name in ("key", "value")}
    )
    exact = exact_stages("attention_gradients", one.options, one.inputs)
    bound = bounds_of(one, rounding_model_named("native", "float32"), exact)
    assert abs(exact["grad_query"].high.item()) < 1e-30
    assert 3 * U32 < bound["grad_query"].max_error.item() < 300 * 6 * U32  # dp and Delta are 6


def test_what_is_masked_has_no_bound() -> None:
    rng = np.random.default_rng(5)
    shapes = {"query": (1, 2, 4, 3), "key": (1, 1, 5, 3), "value": (1, 1, 5, 2), "grad_output": (1, 2, 4, 2)}
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs["bias"] = np.zeros((1, 2, 4, 5), np.float32)
    mask = np.ones((1, 1, 4, 5), bool)
    mask[..., 1, :], mask[..., :, 3] = False, False
    problem = Problem(inputs | {"mask": mask}, {}, supports_statistics=True)
    exact = exact_stages("attention_gradients", {}, problem.inputs)
    bounds = bounds_of(problem, rounding_model_named("native", "float32"), exact)
    assert (bounds["grad_query"].max_error[:, :, 1] == 0).all()
    assert (bounds["grad_key"].max_error[:, :, 3] == 0).all()
    assert (bounds["grad_value"].max_error[:, :, 3] == 0).all()
    assert ((bounds["grad_bias"].max_error == 0) == ~np.broadcast_to(mask, (1, 2, 4, 5))).all()
    for stage, bound in bounds.items():
        reached = np.ones(bound.max_error.shape, bool)
        reached[..., 1 if stage in ("grad_query", "grad_bias") else 3, :] = False
        assert (bound.max_error[reached & (exact[stage].high != 0)] > 0).all()


def test_heads_of_a_group_add_their_bounds_up() -> None:
    rng = np.random.default_rng(6)
    shapes = {"query": (1, 2, 9, 4), "key": (1, 1, 8, 4), "value": (1, 1, 8, 3), "grad_output": (1, 2, 9, 3)}
    whole = Problem({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}, {}, True)
    rounding = rounding_model_named("native", "float32")
    both = bounds_of(whole, rounding, exact_stages("attention_gradients", {}, whole.inputs))
    alone = []
    for head in (0, 1):
        inputs = {
            name: array[:, head : head + 1] if array.shape[1] == 2 else array for name, array in whole.inputs.items()
        }
        part = replace(whole, inputs=inputs)
        alone.append(bounds_of(part, rounding, exact_stages("attention_gradients", {}, inputs)))
    for stage in ("grad_key", "grad_value"):
        total = alone[0][stage].max_error + alone[1][stage].max_error
        assert (both[stage].max_error > 0.9 * total).all()
        assert (both[stage].max_error < 1.5 * total).all()
        likely = np.hypot(alone[0][stage].sigma, alone[1][stage].sigma)
        np.testing.assert_allclose(both[stage].sigma, likely, rtol=0.25)


def test_scores_that_float64_cannot_tell_have_no_small_bounds() -> None:
    problem = two_equal_keys()
    key = np.array([1e30, 1.000001e30], np.float32).reshape(1, 1, 2, 1)
    large = replace(problem, inputs=problem.inputs | {"query": problem.inputs["query"] + np.float32(1e8), "key": key})
    exact = exact_stages("attention_gradients", large.options, large.inputs)
    bound = bounds_of(large, rounding_model_named("native", "float32"), exact)
    assert (bound["grad_value"].max_error >= 1).all()


def test_no_gradient_has_a_step_of_its_own() -> None:
    problem = two_equal_keys()
    exact = exact_stages("attention_gradients", problem.options, problem.inputs)
    returned = {stage: each.high for stage, each in exact.items()}
    rounding, high = rounding_model_named("native", "float32"), exact["grad_key"].high
    options, inputs = problem.options, problem.inputs
    assert introduced_bound("attention_gradients", options, inputs, rounding, returned, high, "grad_key") is None


# Faults

FAULTS = (
    "scale in the backward pass",
    "no delta",
    "weights in bfloat16",
    "weights of the values in bfloat16",
    "logits' gradient in bfloat16",
    "a head dropped",
    "heads in another order",
    "bias not added up",
    "softcap's slope left out",
    "bias behind the softcap",
)


def faulty(problem: Problem, fault: str) -> Stages:
    """Go backwards in float32 with a fault."""
    names = ("query", "key", "value", "grad_output")
    query, key, value, grad_output = (problem.inputs[name] for name in names)
    group = query.shape[1] // key.shape[1]
    spread = np.tile if fault == "heads in another order" else np.repeat
    repeats: Any = (1, group, 1, 1) if spread is np.tile else group
    key, value = (
        spread(each, repeats) if spread is np.tile else np.repeat(each, group, axis=1) for each in (key, value)
    )
    scale = np.float32(1 / math.sqrt(query.shape[-1]))
    cap = np.float32(problem.options["softcap"])
    height = np.tanh(query @ key.swapaxes(-1, -2) * scale / cap)
    powers = np.exp(height * cap + problem.inputs["bias"])
    weights = powers / powers.sum(axis=-1, keepdims=True)
    shown = weights
    if fault.startswith("weights"):
        shown = weights.astype(ml_dtypes.bfloat16).astype(np.float32)
        weights = shown if fault == "weights in bfloat16" else weights
    grad_weights = grad_output @ value.swapaxes(-1, -2)
    mean = (weights * grad_weights).sum(axis=-1, keepdims=True)
    gradient = weights * (grad_weights - (0 if fault == "no delta" else mean))
    if fault == "logits' gradient in bfloat16":
        gradient = gradient.astype(ml_dtypes.bfloat16).astype(np.float32)
    of_scores = gradient if fault == "softcap's slope left out" else gradient * (1 - height * height)
    scale = scale * np.float32(1 + 1e-5) if fault == "scale in the backward pass" else scale
    of_bias = of_scores if fault == "bias behind the softcap" else gradient

    def together(array: Array) -> Array:
        heads = array.reshape(1, -1, group, *array.shape[2:])
        return np.asarray((heads[:, :, 1:] if fault == "a head dropped" else heads).sum(axis=2))

    return {
        "grad_query": of_scores * scale @ key,
        "grad_key": together((of_scores * scale).swapaxes(-1, -2) @ query),
        "grad_value": together(shown.swapaxes(-1, -2) @ grad_output),
        "grad_bias": of_bias[:, :, :1] if fault == "bias not added up" else of_bias.sum(axis=2, keepdims=True),
    }


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fault_in_a_small_generic_problem_is_noticed(fault: str) -> None:
    found = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        queries, keys, width, columns = (int(each) for each in rng.integers(6, 24, 4))
        shapes = {"query": (4, queries, width), "key": (2, keys, width), "value": (2, keys, columns)}
        shapes |= {"grad_output": (4, queries, columns), "bias": (4, 1, keys)}
        inputs = {name: rng.standard_normal((1, *shape)).astype(np.float32) for name, shape in shapes.items()}
        problem = Problem(inputs, {"softcap": 5.0}, supports_statistics=True)
        exact = exact_stages("attention_gradients", problem.options, inputs)
        bounds = bounds_of(problem, rounding_model_named("native", "float32"), exact)
        stages = faulty(problem, fault)
        found += any(
            tier_of(stages[name], exact[name], bounds[name], supports_statistics=True).fails for name in stages
        )
    assert found == (5 if fault else 0)
