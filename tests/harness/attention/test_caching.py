"""A cache in front of projections: its values, its bounds, what moves them, and what it has no part in."""

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
from attncheck.reading.canonical import call_form, canonical_form
from attncheck.reading.inputs import Inputs

Array = NDArray[Any]
OPERATION = "multi_head_attention"
OPTIONS: dict[str, Any] = {"heads": 4, "kv_heads": 2}
PAST, NEW, QUERIES = 3, 2, 5


def drawn(new: int = NEW, past: int = PAST, **more: Array) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    shapes = {
        **{"query": (2, QUERIES, 6), "key": (2, new, 7), "value": (2, new, 8)},
        **{"query_weight": (6, 12), "key_weight": (7, 6), "value_weight": (8, 10), "output_weight": (20, 9)},
        **{"past_key": (2, 2, past, 3), "past_value": (2, 2, past, 5), "key_bias": (6,)},
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | more


def canonical(inputs: dict[str, Array], **options: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    posed = canonical_form(OPERATION, OPTIONS | options, inputs)
    return posed.options, posed.inputs


def with_rotation(**more: Array) -> dict[str, Array]:
    rng = np.random.default_rng(6)
    return drawn(**more) | {name: rng.standard_normal((8, 1)) for name in ("rotary_cos", "rotary_sin")}


def test_the_cache_is_an_input_of_its_own_behind_the_projections() -> None:
    inputs = drawn()
    _, posed = canonical(inputs)
    assert posed["key"].shape == inputs["key"].shape
    np.testing.assert_array_equal(posed["cached_key"], inputs["past_key"])
    assert not posed.keys() & {"past_key", "past_value"}
    again = canonical_form(OPERATION, OPTIONS, posed)
    assert again.inputs.keys() == posed.keys()


def test_causality_counts_the_cache() -> None:
    called, (_, posed) = (
        call_form(OPERATION, OPTIONS | {"is_causal": True}, drawn()),
        canonical(drawn(), is_causal=True),
    )
    assert "is_causal" not in called.options
    for inputs in (called.inputs, posed):
        np.testing.assert_array_equal(inputs["mask"][0, 0], np.tri(QUERIES, PAST + NEW, PAST, dtype=bool))


@pytest.mark.parametrize("inputs", [drawn(), with_rotation(), drawn(new=0), drawn(past=0)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_every_stage_is_that_of_the_backend_within_its_bound(inputs: dict[str, Array], sinks: bool) -> None:
    inputs = inputs | ({"sinks": np.array([0.5, -np.inf, 2, 0])} if sinks else {})
    stored = {name: array.astype(np.float32) for name, array in inputs.items()}
    returned = numpy_backend.multi_head_attention(**stored, **OPTIONS)
    options, posed = canonical(stored)
    exact = exact_stages(OPERATION, options, posed)
    model = rounding_model_named("native", "float32")
    bounds = accumulated_bounds(OPERATION, options, posed, model, {n: each.high for n, each in exact.items()})
    assert returned.keys() == exact.keys() == bounds.keys()
    for stage, array in returned.items():
        error = np.abs(array - exact[stage].high)
        assert array.shape == exact[stage].high.shape
        finite = np.isfinite(exact[stage].high)
        assert (error[finite] <= bounds[stage].max_error[finite]).all(), stage


@pytest.mark.parametrize("stage", ["rotated_key", "raw_scores", "context", "output"])
def test_every_stage_follows_from_those_that_an_implementation_returned(stage: str) -> None:
    stored = {name: array.astype(np.float32) for name, array in with_rotation().items()}
    returned = numpy_backend.multi_head_attention(**stored, **OPTIONS)
    options, posed = canonical(stored)
    before = {name: array for name, array in returned.items() if name != stage}
    exact = exact_from(OPERATION, options, posed, before, stage)
    assert exact is not None
    model = rounding_model_named("native", "float32")
    bound = introduced_bound(OPERATION, options, posed, model, before, exact.high, stage)
    assert bound is not None
    assert (np.abs(returned[stage] - exact.high) <= bound.max_error).all()


def test_nothing_is_rounded_in_the_cache() -> None:
    options, posed = canonical(drawn())
    problem = Problem.of(OPERATION, options, posed).in_float64()
    model = rounding_model_named("native", "float32")
    found = error_walk(problem, model, value_walk(problem)).node("joined_key")
    assert (found.max_error[:, :, :PAST] == 0).all()
    assert (found.variance[:, :, :PAST] == 0).all()
    assert (found.max_error[:, :, PAST:] > 0).all()


def test_radii_of_the_cache_move_what_follows_from_it() -> None:
    inputs = drawn()
    radius = {name: np.full(array.shape, 1e-3 if name == "past_key" else 0.0) for name, array in inputs.items()}
    balls = propagate(OPERATION, OPTIONS, Inputs(inputs, radius))
    assert (balls["key"].radius == 0).all()
    assert (balls["raw_scores"].radius[..., PAST:] == 0).all()
    rng = np.random.default_rng(7)
    moved = inputs | {"past_key": inputs["past_key"] + rng.choice([-1e-3, 1e-3], inputs["past_key"].shape)}
    first, second = (numpy_backend.multi_head_attention(**each, **OPTIONS) for each in (inputs, moved))
    for stage in ("raw_scores", "weights", "output"):
        distance = np.abs(first[stage] - second[stage])
        assert distance.max() > 1e-5
        assert (distance <= balls[stage].radius + 1e-12).all(), stage


@pytest.mark.parametrize("sinks", [False, True])
def test_nan_in_the_cache_reaches_its_own_scores_alone(sinks: bool) -> None:
    inputs = drawn() | ({"sinks": np.ones(4)} if sinks else {})
    options, posed = canonical(inputs)
    problem = Problem.of(OPERATION, options, posed)
    flags = {name: np.zeros(array.shape, bool) for name, array in problem.inputs.items()}
    flags["cached_key"][1, 0, 2, 1] = True
    walk = reach_walk(problem, flags, None)
    reached = np.broadcast_to(problem.without_added("raw_scores", walk.node("raw_scores")), (2, 4, QUERIES, PAST + NEW))
    expected = np.zeros_like(reached)
    expected[1, :2, :, 2] = True
    np.testing.assert_array_equal(reached, expected)
    assert not problem.without_added("key", walk.node("key")).any()
