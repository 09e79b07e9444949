"""Bounds worked out by hand, rounding models, and honest attention that never exceeds its bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import accumulated_bounds, introduced_bounds
from attncheck.attention.oracle import exact_stages
from attncheck.attention.problem import Computation
from attncheck.attention.rounding import FORMATS, rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.judging.truth import Truth, find_truth
from attncheck.spec import ROUNDING_MODELS

sys.path.insert(0, str(Path(__file__).parent))
from problems import NAMES, Problem, draw

from attncheck.execution.operations import run_operation
from attncheck.judging.judge_stages import judge_stages
from attncheck.mutation.catalogue import CONTROLS
from attncheck.mutation.judgement import REFERENCE_CLASSES
from attncheck.verdicts import Verdict

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
    return find_truth(Problem(operation, options, inputs), dtype, supports_statistics=True)


# By hand, forwards.


def test_two_equal_scores_have_the_bound_that_the_formulas_give() -> None:
    exponent = (2 * 4 * U32 + 2 * U32) * (1 + 8 * U32)  # one rescaling: two exponentials, two products
    moved = 0.5 * np.expm1(exponent) / np.exp(-exponent)
    relative = 3 * U32 + 3 * U32 + 2 * U32  # n + r, division, storage
    truth = truth_of({"scores": np.zeros((1, 1, 1, 2), np.float32)}, "softmax")
    bound = truth.bounds("native")["weights"].max_error
    np.testing.assert_allclose(bound, moved + relative * (0.5 + moved), rtol=1e-5)


@pytest.mark.parametrize("poison", [np.inf, np.nan, 3e38])
def test_what_a_masked_key_holds_changes_no_bound(poison: float) -> None:
    inputs = drawn(4) | {"mask": np.broadcast_to(np.arange(5) < 4, (1, 1, 4, 5))}
    exact = {stage: each.high for stage, each in exact_stages(Problem("attention", {}, inputs)).items()}
    poisoned = inputs | {"value": np.where(np.arange(5)[:, None] == 4, np.float32(poison), inputs["value"])}
    clean, other = (
        accumulated_bounds(Problem("attention", {}, each), SINGLE, exact)["output"] for each in (inputs, poisoned)
    )
    np.testing.assert_array_equal(other.max_error, clean.max_error)


def test_no_introduced_bound_follows_from_what_is_not_finite() -> None:
    inputs = drawn(11)
    stages = dict(numpy_backend.attention(**inputs))
    problem, exact = Computation.of(Problem("attention", {}, inputs)), stages["weights"].astype(np.float64)
    assert introduced_bounds(problem, SINGLE, stages, {"weights": exact}) is not None
    for poison in (np.nan, np.inf):
        broken = stages | {"scores": np.where(np.arange(5) == 2, poison, stages["scores"])}
        for stage in ("weights", "log_sum_exp"):
            assert introduced_bounds(problem, SINGLE, broken, {stage: exact}) is None
        # The output follows from the weights.
        output = stages["output"].astype(np.float64)
        assert introduced_bounds(problem, SINGLE, broken, {"output": output}) is not None


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
    own = accumulated_bounds(Problem(GRADIENTS, truth.options, truth.inputs), stored, values)["grad_value"]
    np.testing.assert_allclose(own.max_error, expected, rtol=1e-5)
    assert (truth.bounds("native")["grad_value"].max_error > expected).all()


# Rounding models.


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_the_numbers_that_their_libraries_state(name: str) -> None:
    limits, stated = ml_dtypes.finfo(name), FORMATS[name]  # type: ignore[no-untyped-call]
    numbers = limits.eps, limits.smallest_normal, limits.smallest_subnormal, limits.max
    own = 2 * stated.unit_roundoff, stated.least_normal, stated.least_subnormal, stated.largest
    assert own == tuple(map(float, numbers))
    assert stated.underflow == (2.0**-25 if name == "float16" else stated.least_normal)  # it alone keeps subnormals


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


DTYPES = ("float64", "float32", "float16", "bfloat16")
GENERIC = ("normal", "peaky", "small")
REGIMES: dict[str, dict[str, Callable[[np.random.Generator, Array], Array]]] = {
    "normal": {},
    "peaky": {"query": lambda _, query: 6 * query, "log_sum_exps": lambda _, totals: 100 * totals},
    "small": {"query": lambda _, query: query / 20, "value": lambda _, value: value / 100},
    "tiny": dict.fromkeys(("query", "key", "value"), lambda _, array: array / 1000),
    "huge": {"query": lambda _, query: 60 * query, "log_sum_exps": lambda _, totals: 1000 * totals},
    "cancelling": {"query": lambda random, query: query + 20 * random.choice([-1, 1], query.shape[-1])},
    "repeated": {"key": lambda _, key: np.repeat(key[..., :1, :], key.shape[-2], axis=-2)},
    "whole": dict.fromkeys(("query", "key"), lambda random, array: random.integers(-3, 4, array.shape) * 1.0),
    "offset keys": {"key": lambda _, key: key / 10 + 3, "log_sum_exps": lambda _, totals: totals - 800},
    "offset values": {"value": lambda _, value: value / 100 + 50, "log_sum_exps": lambda _, totals: totals + 90},
}
"""What numbers of inputs are like. Statistics are held where they are generic."""
ONE_IN = 4
"""Of the right ways, so many are taken for a problem in a dtype and a regime, in turn."""


def in_regime(problem: Problem, regime: str, random: np.random.Generator) -> Problem:
    changes = REGIMES[regime].items()
    drawn = {name: problem.inputs[name] for name, _ in changes if name in problem.inputs}
    return problem.with_inputs(
        **{name: change(random, drawn[name]) for name, change in changes if drawn.get(name, MASK).dtype == np.float64}
    )


MASK = np.zeros(1, bool)


@pytest.mark.parametrize("name", NAMES)
def test_no_right_way_to_compute_exceeds_its_bounds(name: str) -> None:
    turn, offenders, count = NAMES.index(name), [], 0
    for dtype in DTYPES:
        for _ in range(2):
            turn += 1
            regime = list(REGIMES)[turn % len(REGIMES)]
            random = np.random.default_rng(turn)
            problem = in_regime(draw(name, turn), regime, random).stored(dtype)
            with np.errstate(all="ignore"):
                truth = problem.truth(dtype, supports_statistics=regime in GENERIC)
                called = problem.called()
                for control in CONTROLS[turn % ONE_IN :: ONE_IN]:
                    if dtype not in control.dtypes:
                        continue
                    try:
                        stages = run_operation(control.backend, problem.operation, called.inputs, called.options)
                    except NotImplementedError:  # it lacks something that the problem has
                        continue
                    count += 1
                    shapes = {stage: exact.shape for stage, exact in truth.exact.items()}
                    model = control.classes.get(dtype, REFERENCE_CLASSES.get(dtype, ""))
                    found = judge_stages(truth.for_returned(stages), stages, shapes, model)
                    offenders += [
                        (control.name, dtype, regime, each.stage, each.message)
                        for each in found
                        if each.verdict is not Verdict.AGREE
                    ]
    assert offenders == []
    assert count > 40


def test_heads_added_up_in_16_bits_are_within_the_bounds_of_such_kernels_alone() -> None:
    """64 heads share a key and a value; float16 adds them up one after the other, as torch's flash kernel does."""
    beyond = 0
    for seed in range(10):
        random = np.random.RandomState(seed).standard_normal
        shapes = {"query": (1, 64, 1, 4), "key": (1, 1, 3, 4), "value": (1, 1, 3, 4), "grad_output": (1, 64, 1, 4)}
        inputs = {name: random(shape).astype(np.float16) for name, shape in shapes.items()}
        inputs["grad_output"] = np.abs(inputs["grad_output"])  # no term takes away what another has added
        query, key, upstream = (inputs[name].astype(np.float64) for name in ("query", "key", "grad_output"))
        powers = np.exp(query @ key.swapaxes(-1, -2) / 2)
        weights = powers / powers.sum(axis=-1, keepdims=True)
        total = np.zeros((1, 1, 3, 4), np.float16)
        for head in range(64):
            part = weights[:, head : head + 1].swapaxes(-1, -2) @ upstream[:, head : head + 1]
            total = (total + part).astype(np.float16)
        truth = Problem("attention_gradients", {}, inputs).truth("float16")
        error = truth.exact["grad_value"].error_of(total)
        assert (error <= truth.bounds("fused_bwd")["grad_value"].max_error).all()
        beyond += (error > truth.bounds("fused")["grad_value"].max_error).any()
    assert beyond > 0


# Caches and fills.


def assert_agrees(problem: Problem, dtype: str = "float32") -> None:
    stages = problem.returned()
    shapes = {stage: array.shape for stage, array in stages.items()}
    judged = judge_stages(problem.truth(dtype, supports_statistics=False), stages, shapes, "native")
    assert {each.verdict for each in judged} == {Verdict.AGREE}


@pytest.mark.parametrize(("new", "past"), [(0, 3), (6, 0)])
def test_a_cache_may_be_empty_or_all_that_there_is(new: int, past: int) -> None:
    problem = draw("layer, rotated cache").stored("float32")
    shorter = {name: problem.inputs[name][:, :new] for name in ("key", "value")}
    shorter |= {name: problem.inputs[name][:, :, :past] for name in ("past_key", "past_value")}
    assert_agrees(problem.with_inputs(**shorter))


@pytest.mark.parametrize("fill", [-1e9, 0.25])
def test_numpy_is_within_the_bounds_of_fills_of_any_size(fill: float) -> None:
    for name in ("fill", "gradients, rotary"):
        problem = draw(name).stored("float32")
        assert_agrees(Problem(problem.operation, {**problem.options, "mask_fill": fill}, problem.inputs))


def test_a_fill_is_rounded_to_the_dtype_and_beyond_it_is_minus_infinity() -> None:
    def filled(fill: float, dtype: str) -> Problem:
        return Problem("attention", {"mask_fill": fill}, draw("fill").stored(dtype).inputs)

    for dtype, fill in (("float64", -1e-9), ("float32", float(np.float32(-1e-9))), ("float16", -0.0)):
        for form in (Problem.called, Problem.canonical):
            assert form(filled(-1e-9, dtype)).options["mask_fill"] == fill
    assert "mask_fill" not in filled(-1e9, "float16").canonical().options
