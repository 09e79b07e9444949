"""Bounds where they can be worked out by hand, what each rounding model allows, and small faults that they notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound, accumulated_bounds, introduced_bounds
from attncheck.attention.oracle import exact_stages
from attncheck.attention.problem import Computation
from attncheck.attention.rounding import FORMATS, rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.lowering import Problem
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
    return find_truth(Problem(operation, options, inputs), dtype, supports_statistics=True)


def bounds_of(inputs: Inputs, operation: str = "attention", **options: Any) -> Mapping[str, Bound]:
    return truth_of(inputs, operation, **options).bounds("native")


def softmax_bounds(*row: float) -> Mapping[str, Bound]:
    return bounds_of({"scores": np.array([[[row]]], np.float32)}, "softmax")


def attend(inputs: Inputs, **options: Any) -> Inputs:
    return dict(numpy_backend.attention(**inputs, **options))


# By hand, forwards.


def test_two_equal_scores_have_the_bound_that_the_formulas_give() -> None:
    exponent = (2 * 4 * U32 + 2 * U32) * (1 + 8 * U32)  # one rescaling: two exponentials, two products
    moved = 0.5 * np.expm1(exponent) / np.exp(-exponent)
    relative = 3 * U32 + 3 * U32 + 2 * U32  # n + r, division, storage
    bound = softmax_bounds(0.0, 0.0)["weights"].max_error
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
    stages = attend(inputs)
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
