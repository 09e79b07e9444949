"""One graph, one walk: what every analysis has in common, whatever its rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import accumulated_bounds, introduced_bound
from attncheck.attention.graph import graph_of, logits_order, nearest
from attncheck.attention.problem import LOGITS, Problem
from attncheck.attention.rounding import rounding_model_named
from attncheck.attention.step import Step
from attncheck.attention.walk import reach_walk, value_walk
from attncheck.oracle.evaluate import exact_from, exact_stages
from attncheck.spec import OPERATIONS, computed_stages

Array = NDArray[Any]
DOUBLE = rounding_model_named("native", "float64")
SINGLE = rounding_model_named("native", "float32")
RNG = np.random.default_rng(12)


def draw(*shape: int) -> Array:
    return RNG.standard_normal(shape)


QKV = {"query": draw(2, 4, 5, 3), "key": draw(2, 2, 6, 3), "value": draw(2, 2, 6, 3)}
MASK = RNG.random((5, 6)) < 0.7
BIAS = draw(5, 6)
LAYER = {f"{name}_weight": draw(8, width) for name, width in (("query", 12), ("key", 6), ("value", 6))}
LAYER |= {"output_weight": draw(12, 7), "output_bias": draw(7), "key_bias": draw(6)}
PARTS = ("cos", "sin")
QUERY, KEY = draw(2, 2, 5, 3), draw(2, 2, 6, 4)
PROBLEMS: Mapping[str, tuple[str, dict[str, Any], dict[str, Array]]] = {
    "attention": ("attention", {"softcap": 1.5, "is_causal": True}, {**QKV, "mask": MASK, "bias": BIAS}),
    "plain attention": ("attention", {}, QKV),
    "multi-head attention": (
        "multi_head_attention",
        {"heads": 4, "kv_heads": 2},
        {"query": draw(2, 5, 8), "key": draw(2, 6, 8), "value": draw(2, 6, 8), **LAYER, "bias": BIAS, "mask": MASK},
    ),
    "attention with sinks": (
        "attention",
        {"softcap": 1.5, "is_causal": True},
        {**QKV, "mask": MASK, "bias": BIAS, "sinks": np.array([0.5, -np.inf, 40, -3])},
    ),
    "multi-head attention with sinks": (
        "multi_head_attention",
        {"heads": 4, "kv_heads": 2},
        {"query": draw(2, 5, 8), "key": draw(2, 6, 8), "value": draw(2, 6, 8), **LAYER, "sinks": draw(4)},
    ),
    "rotated attention": (
        "attention",
        {"rotary_interleaved": True},
        {
            **QKV,
            "bias": BIAS,
            **{f"query_{part}": draw(5, 1) for part in PARTS},
            **{f"key_{part}": draw(6, 1) for part in PARTS},
        },
    ),
    "rotated multi-head attention with sinks": (
        "multi_head_attention",
        {"heads": 4, "kv_heads": 2},
        {
            **{"query": draw(2, 5, 8), "key": draw(2, 6, 8), "value": draw(2, 6, 8), **LAYER, "sinks": draw(4)},
            **{f"query_{part}": draw(5, 1) for part in PARTS},
            **{f"key_{part}": draw(6, 1) for part in PARTS},
        },
    ),
    "softmax": ("softmax", {}, {"scores": draw(2, 5, 6)}),
    "masking": ("masking", {"is_causal": True}, {"scores": draw(2, 2, 5, 6), "bias": BIAS}),
    "dot": ("scoring", {"score": "dot", "softcap": 2.0}, {"query": QUERY, "key": draw(2, 2, 6, 3)}),
    "cosine": ("scoring", {"score": "cosine", "scale": 3.0}, {"query": QUERY, "key": draw(2, 2, 6, 3)}),
    "general": ("scoring", {"score": "general"}, {"query": QUERY, "key": KEY, "weight": draw(3, 4)}),
    "bilinear attention": (
        "general_attention",
        {"is_causal": True},
        {"query": QUERY, "key": KEY, "value": draw(2, 2, 6, 5), "weight": draw(3, 4), "score_bias": draw(2)},
    ),
    "additive attention": (
        "additive_attention",
        {},
        {
            **{"query": QUERY, "key": KEY, "value": draw(2, 2, 6, 5), "bias": BIAS},
            **{"query_weight": draw(3, 5), "key_weight": draw(4, 5), "score_vector": draw(5)},
        },
    ),
    "cosine attention": (
        "cosine_attention",
        {"scale": -2.0},
        {"query": QUERY, "key": draw(2, 2, 6, 3), "value": draw(2, 2, 6, 5), "mask": draw(2, 1, 5, 6) > -1},
    ),
    "additive": (
        "scoring",
        {"score": "additive"},
        {
            **{"query": QUERY, "key": KEY, "query_weight": draw(3, 5), "key_weight": draw(4, 5)},
            **{"score_vector": draw(5), "score_bias": draw(5)},
        },
    ),
}
every_problem = pytest.mark.parametrize(("operation", "options", "inputs"), PROBLEMS.values(), ids=PROBLEMS)


@pytest.mark.parametrize("operation", [name for name, own in OPERATIONS.items() if not own.is_lowered])
def test_every_stage_is_a_node(operation: str) -> None:
    tables = {f"{name}_{part}": draw(5, 1) for name in ("query", "key") for part in PARTS}
    problem = Problem.of(operation, {"heads": 1}, {"query": QUERY, "scores": BIAS, **tables})
    assert set(OPERATIONS[operation].stages) <= graph_of(problem).keys()


@every_problem
def test_every_step_of_a_forward_pass_has_all_of_its_rules(
    operation: str, options: dict[str, Any], inputs: dict[str, Array]
) -> None:
    unstated = Step(exact=lambda: None).radius
    for name, node in graph_of(Problem.of(operation, options, inputs)).items():
        step = node.step
        rules = (step.exact, step.value, step.error, step.stored, step.radius, step.reach)
        assert unstated not in rules, name


@every_problem
def test_float64_values_are_the_exact_ones_within_their_error_bounds(
    operation: str, options: dict[str, Any], inputs: dict[str, Array]
) -> None:
    exact = exact_stages(operation, options, inputs)
    highs = {stage: each.high for stage, each in exact.items()}
    bounds = accumulated_bounds(operation, options, inputs, DOUBLE, highs)
    problem = Problem.of(operation, options, inputs)
    values = value_walk(problem.in_float64())
    for stage in computed_stages(operation, options, inputs):
        value = problem.without_added(stage, values.node(stage))
        assert (exact[stage].error_of(value) <= bounds[stage].max_error + exact[stage].radius).all(), stage


@every_problem
def test_introduced_bounds_that_start_at_the_inputs_are_the_accumulated_ones(
    operation: str, options: dict[str, Any], inputs: dict[str, Array]
) -> None:
    highs = {stage: each.high for stage, each in exact_stages(operation, options, inputs).items()}
    accumulated = accumulated_bounds(operation, options, inputs, SINGLE, highs)
    for stage, exact in highs.items():
        introduced = introduced_bound(operation, options, inputs, SINGLE, {}, exact, stage)
        if operation == "multi_head_attention" and stage not in inputs:
            assert introduced is None, stage  # without the projections that were returned
            continue
        assert introduced is not None
        np.testing.assert_allclose(introduced.max_error, accumulated[stage].max_error, rtol=1e-6, atol=1e-30)
        np.testing.assert_allclose(introduced.sigma, accumulated[stage].sigma, rtol=1e-6, atol=1e-30)


def test_flags_reach_a_row_of_every_head_and_nothing_where_there_is_no_key() -> None:
    operation, options, inputs = PROBLEMS["multi-head attention"]
    inputs = {name: array[:, :0] if name in ("key", "value") else array for name, array in inputs.items()}
    inputs |= {name: inputs[name][..., :0] for name in ("mask", "bias")}
    flags = {name: np.zeros(array.shape, dtype=bool) for name, array in inputs.items()}
    flags["query"][1, 2, 3] = True
    walk = reach_walk(Problem.of(operation, options, inputs), flags, None)
    np.testing.assert_array_equal(np.argwhere(walk.node("query").any(axis=(1, 3))), [[1, 2]])
    assert walk.node("query")[1, :, 2].all()
    assert not walk.node("key").any()
    assert not walk.node("output").any()  # no query meets a key


@pytest.mark.parametrize("kind", ["general", "additive"])
def test_a_softcap_behind_scores_that_were_not_returned_has_the_error_of_these(kind: str) -> None:
    operation, options, inputs = PROBLEMS[kind]
    options = options | {"softcap": 1.5}
    exact = exact_stages(operation, options, inputs, ["scores", "capped"])
    highs = {stage: each.high for stage, each in exact.items()}
    accumulated = accumulated_bounds(operation, options, inputs, SINGLE, highs)["capped"]
    introduced = introduced_bound(operation, options, inputs, SINGLE, {}, highs["capped"], "capped")
    assert introduced is not None
    np.testing.assert_allclose(introduced.max_error, accumulated.max_error, rtol=1e-6)


def test_a_returned_stage_has_its_storage_error_and_what_is_behind_it_follows() -> None:
    operation, options, inputs = PROBLEMS["plain attention"]
    returned = {stage: each.high for stage, each in exact_stages(operation, options, inputs).items()}
    step = exact_from(operation, options, inputs, {"weights": returned["weights"]}, "output")
    assert step is not None
    from_weights = introduced_bound(operation, options, inputs, SINGLE, returned, step.high, "output")
    from_inputs = introduced_bound(operation, options, inputs, SINGLE, {}, step.high, "output")
    assert from_weights is not None
    assert from_inputs is not None
    assert (from_weights.max_error < from_inputs.max_error).all()


@pytest.mark.parametrize(
    ("follows", "order"),
    [
        ("scores", LOGITS),
        ("biased", ("scores", "biased", "capped", "masked")),
        ("masked", ("scores", "biased", "masked", "capped")),
    ],
)
def test_the_order_of_composition_is_an_edge_of_the_graph(follows: str, order: tuple[str, ...]) -> None:
    operation, options, inputs = PROBLEMS["attention"]
    options = options | {"softcap_follows": follows}
    problem = Problem.of(operation, options, inputs)
    graph = graph_of(problem)
    assert logits_order(problem) == order
    assert [graph[stage].follows for stage in order[1:]] == [(stage,) for stage in order[:-1]]
    assert graph["exponentials"].follows == order[-1:]
    scores = QKV["query"] @ np.repeat(QKV["key"], 2, 1).swapaxes(-1, -2) / np.sqrt(3)
    allowed = MASK & np.tri(5, 6, dtype=bool)
    for stage in order[1:]:
        scores = {
            "capped": 1.5 * np.tanh(scores / 1.5),
            "biased": scores + BIAS,
            "masked": np.where(allowed, scores, -np.inf),
        }[stage]
        exact = exact_stages(operation, options, inputs, [stage])[stage]
        np.testing.assert_allclose(exact.high, scores, rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(value_walk(problem.in_float64()).node(stage), scores, rtol=1e-14, atol=1e-15)


def test_a_stage_follows_from_the_nearest_known_nodes_alone() -> None:
    graph = graph_of(Problem.of(*PROBLEMS["multi-head attention"]))
    assert nearest(graph, "output", {"weights", "value", "masked"}) == {"weights", "value"}
    assert nearest(graph, "output", {"context", "weights"}) == {"context"}
    assert nearest(graph, "scores", {"raw_scores", "query", "key"}) == {"query", "key"}
    assert nearest(graph, "log_sum_exp", {"weights", "capped", "scores"}) == {"capped"}
    assert nearest(graph, "query", {"key"}) == set()


def test_a_row_that_a_returned_stage_has_no_number_for_has_no_bound() -> None:
    operation, options, inputs = PROBLEMS["plain attention"]
    returned = {stage: each.high for stage, each in exact_stages(operation, options, inputs).items()}
    broken = {**returned, "scores": np.where(np.arange(6) == 2, np.nan, returned["scores"])}
    for stage in ("weights", "log_sum_exp"):
        assert introduced_bound(operation, options, inputs, SINGLE, returned, returned[stage], stage) is not None
        assert introduced_bound(operation, options, inputs, SINGLE, broken, returned[stage], stage) is None
    assert introduced_bound(operation, options, inputs, SINGLE, broken, returned["output"], "output") is not None


def test_a_returned_score_of_minus_infinity_may_have_been_any_number_where_it_was_used() -> None:
    inputs = {"query": QUERY, "key": draw(2, 2, 6, 3)}
    scores = np.where(np.arange(6) == 2, -np.inf, draw(2, 2, 5, 6))
    capped = 2 * np.tanh(scores / 2)
    bound = introduced_bound("scoring", {"softcap": 2.0}, inputs, SINGLE, {"scores": scores}, capped, "capped")
    assert bound is not None
    np.testing.assert_array_equal(np.isinf(bound.max_error), np.isinf(scores))
