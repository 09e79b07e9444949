"""Correct linear layers, heads and other kinds of scores never exceed their bounds, alone or along the whole chain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound, accumulated_bounds, introduced_bound
from attncheck.attention.rounding import rounding_model_named
from attncheck.backends import BACKENDS
from attncheck.execution.operations import run_operation
from attncheck.judging.tiers import Tier, measure
from attncheck.oracle.evaluate import exact_from, exact_stages
from attncheck.spec import BY_SCORE

Array = NDArray[Any]
Stages = dict[str, Array]
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BY_KIND = ("general", "additive", "cosine")
OPERATIONS = (*BY_KIND, "dot", "softmax", "masking", "multi_head_attention", "attention", *BY_SCORE)


def draw(rng: np.random.Generator, operation: str, dtype: str) -> tuple[str, Stages, dict[str, Any]]:
    """Draw inputs and options: the operation, inputs as stored, options."""
    queries, keys, width, other = (int(each) for each in rng.integers((1, 1, 1, 1), (8, 40, 20, 20)))
    size = float(rng.choice([1e-2, 1.0, 8.0]))

    def normal(*shape: int) -> Array:
        return size * rng.standard_normal(shape)

    if operation in BY_SCORE:
        _, inputs, options = draw(rng, operation.removesuffix("_attention"), dtype)
        shape = (*inputs["query"].shape[:2], inputs["key"].shape[2], int(rng.integers(1, 9)))
        inputs["value"] = rng.standard_normal(shape).astype(DTYPES[dtype])
        del options["score"]
        return operation, inputs, options
    options: dict[str, Any] = {"score": operation}
    name = "scoring"
    match operation:
        case "general":
            inputs = {"query": normal(1, 2, queries, width), "key": normal(1, 2, keys, other)}
            inputs["weight"] = rng.standard_normal((width, other))
            if rng.integers(2):
                inputs["score_bias"] = 10 * rng.standard_normal(int(rng.integers(1, 3)))
        case "additive":
            inputs = {"query": normal(1, 2, queries, width), "key": normal(1, 2, keys, other)}
            inputs |= {"query_weight": rng.standard_normal((width, 7)), "key_weight": rng.standard_normal((other, 7))}
            inputs |= {"score_vector": rng.standard_normal(7), "score_bias": rng.standard_normal(7)}
        case "cosine" | "dot":
            inputs = {"query": normal(1, 2, queries, width), "key": normal(1, 2, keys, width)}
            if operation == "cosine":
                options["scale"] = float(rng.choice([1.0, 10.0, -2.0]))
        case "softmax" | "masking":
            name, options = operation, {}
            inputs = {"scores": 5 * normal(1, 2, queries, keys)}
            if operation == "masking":
                inputs["bias"], options = normal(1, 1, queries, keys), {"is_causal": True}
        case "attention":
            name, options, shared = operation, {}, int(rng.integers(1, 3))
            inputs = {"query": normal(1, 2 * shared, queries, width), "key": normal(1, shared, keys, width)}
            inputs["value"] = normal(1, shared, keys, other)
        case _:
            name, options = operation, {"heads": 2, "is_causal": bool(rng.random() < 0.5)}
            options["kv_heads"] = int(rng.integers(1, 3))
            inputs = _of_heads(rng, queries, keys, options["kv_heads"])
    return name, {key: array.astype(DTYPES[dtype]) for key, array in inputs.items()}, options


def _of_heads(rng: np.random.Generator, queries: int, keys: int, shared: int) -> Stages:
    key_width, value_width = 6 * shared, 3 * shared
    shapes: dict[str, tuple[int, ...]] = {"query": (2, queries, 10), "key": (2, keys, 9), "value": (2, keys, 8)}
    shapes |= {"query_weight": (10, 12), "key_weight": (9, key_width), "value_weight": (8, value_width)}
    shapes |= {"query_bias": (12,), "key_bias": (key_width,), "value_bias": (value_width,)}
    shapes |= {"output_weight": (6, 5), "output_bias": (5,)}
    biases = rng.random() < 0.5
    return {
        name: rng.standard_normal(shape) / (3 if "weight" in name else 1)
        for name, shape in shapes.items()
        if biases or "bias" not in name
    }


def rounded_everywhere(name: str, inputs: Stages, options: dict[str, Any], stored: Any) -> Iterator[Stages]:
    """Evaluate in float32, and round every stage: what a fused implementation of 16 bits does."""
    wide = {key: array.astype(np.float32) for key, array in inputs.items()}
    yield {stage: array.astype(stored) for stage, array in honest(name, wide, options).items()}


def honest(name: str, inputs: Stages, options: dict[str, Any]) -> Stages:
    """Evaluate with the NumPy backend, and the cosine by normalising first."""
    if options.get("score") == "cosine":
        unit_q, unit_k = (
            inputs[each] / np.sqrt((inputs[each] ** 2).sum(-1, keepdims=True)) for each in ("query", "key")
        )
        scores = (unit_q @ unit_k.swapaxes(-1, -2)) * inputs["query"].dtype.type(options["scale"])
        return {"scores": scores}
    return dict(run_operation(BACKENDS["numpy"].load(), name, inputs, dict(options)))


def tier_of(computed: Array, exact: Any, bound: Bound, *, supports_statistics: bool) -> Tier:
    """Judge a stage."""
    judged = np.isfinite(exact.high)
    assert not np.isnan(bound.max_error).any()
    assert not np.isnan(bound.sigma).any()
    return measure(
        exact.error_of(computed),
        exact.radius,
        bound.max_error,
        bound.sigma,
        judged,
        supports_statistics=supports_statistics,
    ).tier


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_honest_stages_are_within_both_bounds(operation: str, dtype: str, seed: int) -> None:
    name, inputs, options = draw(np.random.default_rng(seed), operation, dtype)
    wide = dtype in ("float64", "float32")
    rounding = rounding_model_named("native" if wide else "fused", dtype)
    exact = exact_stages(name, options, inputs)
    bounds = accumulated_bounds(name, options, inputs, rounding, {stage: each.high for stage, each in exact.items()})
    assert set(bounds) == set(exact)
    for stages in [honest(name, inputs, options)] if wide else rounded_everywhere(name, inputs, options, DTYPES[dtype]):
        for stage, array in stages.items():
            assert not tier_of(array, exact[stage], bounds[stage], supports_statistics=True).fails, stage
            step = exact_from(name, options, inputs, stages, stage)
            assert step is not None
            bound = introduced_bound(name, options, inputs, rounding, stages, step.high, stage)
            assert bound is not None
            assert not tier_of(array, step, bound, supports_statistics=stage not in ("biased", "capped")).fails, stage
