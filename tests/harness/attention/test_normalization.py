"""Norms of queries and keys: the exact step at 200 bits, bounds for every way to take one, and other readings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.errors import Operand
from attncheck.attention.normalization import DEFAULT_EPSILON, normalization_of
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import rounding_model_named
from attncheck.attention.step import Around, At
from attncheck.attention.walk import error_walk, radius_walk, reach_walk, value_walk
from attncheck.backends import numpy_backend
from attncheck.judging.truth import Truth, find_truth
from attncheck.oracle.evaluate import exact_stages
from attncheck.reading.canonical import AttentionProblem, canonical_form
from attncheck.reading.lowered import lowered

Array = NDArray[Any]
SEEDS = 40
"""Of random problems that are held against mpmath; 500 were, once."""
MODELS = [("float64", "native"), ("float32", "native"), ("float16", "fused"), ("float16", "eager")]


def drawn(seed: int, dtype: str = "float32") -> tuple[dict[str, Any], dict[str, Array]]:
    """Draw a small problem: any norm, of heads or of all, before a rotation or behind it, with weights or without."""
    rng = np.random.default_rng(seed)
    heads, shared = [(2, 1), (2, 2), (4, 2)][rng.integers(3)]
    width = int(rng.integers(2, 6))
    sizes = 10.0 ** rng.uniform(-3, 1, 2)
    inputs: dict[str, Array] = {
        "query": sizes[0] * rng.standard_normal((1, heads, 2, width)),
        "key": sizes[1] * rng.standard_normal((1, shared, 3, width)),
        "value": rng.standard_normal((1, shared, 3, 2)),
    }
    options: dict[str, Any] = {"norm": ["rms", "l2"][rng.integers(2)], "epsilon": float(10.0 ** rng.uniform(-6, 0))}
    if rng.random() < 0.5:
        options["norm_over"] = ["head", "full"][rng.integers(2)]
    is_full = options.get("norm_over") == "full"
    for name, count in (("query", heads), ("key", shared)):
        if rng.random() < 0.6:
            inputs[f"{name}_norm_weight"] = rng.standard_normal(width * (count if is_full else 1))
    if rng.random() < 0.5:
        pairs = width // 2
        inputs |= {"rotary_cos": rng.standard_normal((4, pairs)), "rotary_sin": rng.standard_normal((4, pairs))}
        options |= {"rotary_interleaved": bool(rng.random() < 0.5), "norm_after_rotation": bool(rng.random() < 0.5)}
    if rng.random() < 0.2:
        inputs["query"][:, :, 0] = 0
    return options, {name: array.astype(dtype) for name, array in inputs.items()}


def truth_of(options: dict[str, Any], inputs: dict[str, Array], dtype: str) -> Truth:
    return find_truth("normalized_attention", options, inputs, dtype, supports_statistics=True)


def rotated(vector: list[Any], position: int, options: dict[str, Any], inputs: dict[str, Array]) -> list[Any]:
    cos, sin = ([mpmath.mpf(float(x)) for x in inputs[f"rotary_{part}"][position]] for part in ("cos", "sin"))
    turned = list(vector)
    for pair, (c, s) in enumerate(zip(cos, sin, strict=True)):
        first, second = (2 * pair, 2 * pair + 1) if options["rotary_interleaved"] else (pair, pair + len(cos))
        x, y = vector[first], vector[second]
        turned[first], turned[second] = x * c - y * s, y * c + x * s
    return turned


def normalized(name: str, heads: list[list[Any]], options: dict[str, Any], inputs: dict[str, Array]) -> list[list[Any]]:
    """Normalise the vectors that all heads have at a position, by the definitions of the contract."""
    is_full, epsilon = options.get("norm_over") == "full", mpmath.mpf(options["epsilon"])
    weight = [mpmath.mpf(float(w)) for w in inputs.get(f"{name}_norm_weight", [])]
    groups = [[x for head in heads for x in head]] if is_full else heads
    found = []
    for vector in groups:
        squares = mpmath.fsum(x * x for x in vector)
        if options["norm"] == "rms":
            divisor = mpmath.sqrt(squares / len(vector) + epsilon)
        else:
            divisor = max(mpmath.sqrt(squares), epsilon)
        found.append([x / divisor * w for x, w in zip(vector, weight or [1] * len(vector), strict=True)])
    width = len(heads[0])
    return [found[0][h * width : (h + 1) * width] for h in range(len(heads))] if is_full else found


def prepared(name: str, position: int, options: dict[str, Any], inputs: dict[str, Array]) -> dict[str, list[list[Any]]]:
    """Return the vectors of all heads at a position, normalised, and as they meet."""
    vectors = [[mpmath.mpf(float(x)) for x in row[position]] for row in inputs[name][0]]
    if "rotary_cos" not in inputs:
        own = normalized(name, vectors, options, inputs)
        return {"normalized": own, "last": own}
    if options["norm_after_rotation"]:
        turned = [rotated(each, position, options, inputs) for each in vectors]
        own = normalized(name, turned, options, inputs)
        return {"normalized": own, "last": own}
    own = normalized(name, vectors, options, inputs)
    return {"normalized": own, "last": [rotated(each, position, options, inputs) for each in own]}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_exact_answer_is_that_of_the_definition_at_200_bits(seed: int) -> None:
    options, inputs = drawn(seed)
    exact = truth_of(options, inputs, "float32").exact
    with mpmath.workprec(200):
        keys = [prepared("key", j, options, inputs) for j in range(inputs["key"].shape[2])]
        for i in range(inputs["query"].shape[2]):
            queries = prepared("query", i, options, inputs)
            for h, query in enumerate(queries["last"]):
                close(exact["normalized_query"].high[0, h, i], queries["normalized"][h])
                shared = h // (inputs["query"].shape[1] // inputs["key"].shape[1])
                scores = [mpmath.fsum(q * k for q, k in zip(query, key["last"][shared], strict=True)) for key in keys]
                terms = [mpmath.exp(score / mpmath.sqrt(len(query))) for score in scores]
                rows = inputs["value"][0, shared].astype(float)
                means = [
                    mpmath.fsum(t * mpmath.mpf(v) for t, v in zip(terms, column, strict=True)) / mpmath.fsum(terms)
                    for column in rows.T.tolist()
                ]
                close(exact["output"].high[0, h, i], means)
        for j, key in enumerate(keys):
            close(exact["normalized_key"].high[0, :, j], key["normalized"])


def close(found: Array, expected: Any) -> None:
    for value, right in zip(found.ravel(), np.ravel(np.array(expected, dtype=object)), strict=True):
        assert abs(right - mpmath.mpf(float(value))) <= abs(right) * 2.0**-52


def by_reciprocal(rows: Array, weight: Array, options: dict[str, Any], epsilon: Any) -> Array:
    """Multiply with the reciprocal of the root, of a sum from the last square to the first."""
    squares = np.cumsum((rows * rows)[..., ::-1], axis=-1, dtype=rows.dtype)[..., -1:]
    if options["norm"] == "rms":
        return rows * (1 / np.sqrt(squares / rows.dtype.type(rows.shape[-1]) + epsilon)) * weight
    return rows * (1 / np.maximum(np.sqrt(squares), epsilon)) * weight


def weighted_first(rows: Array, weight: Array, options: dict[str, Any], epsilon: Any) -> Array:
    """Multiply with the weight before the division."""
    squares = (rows * rows).sum(axis=-1, keepdims=True)
    if options["norm"] == "rms":
        return rows * weight / np.sqrt(squares / rows.dtype.type(rows.shape[-1]) + epsilon)
    return rows * weight / np.maximum(np.sqrt(squares), epsilon)


@pytest.mark.parametrize(("dtype", "model"), MODELS)
@pytest.mark.parametrize("way", [by_reciprocal, weighted_first])
def test_every_way_to_take_a_norm_is_within_bounds(way: Callable[..., Array], dtype: str, model: str) -> None:
    for seed in range(60):
        options, inputs = drawn(seed, dtype)
        if options.get("norm_after_rotation"):
            continue
        truth = truth_of(options, inputs, dtype)
        rounding = rounding_model_named(model, dtype)
        for name in ("query", "key"):
            merged = numpy_backend._merge_heads(inputs[name]) if options.get("norm_over") == "full" else inputs[name]
            wide = merged.astype(np.float32) if dtype == "float16" else merged
            weight = inputs.get(f"{name}_norm_weight", np.ones(1, dtype)).astype(wide.dtype)
            found = way(wide, weight, options, wide.dtype.type(options["epsilon"])).astype(dtype).astype(np.float64)
            if merged is not inputs[name]:
                found = numpy_backend._split_heads(found, inputs[name].shape[1])
            exact, bound = truth.exact[f"normalized_{name}"].high, truth.bounds(model)[f"normalized_{name}"]
            assert (np.abs(found - exact) <= bound.max_error).all()
            assert (bound.sigma <= bound.max_error).all()
            assert (bound.max_error <= 64 * rounding.coarsest_unit * (np.abs(exact) + 2.0**-10)).all()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("dtype", "model"), [("float64", "native"), ("float32", "native")])
def test_the_backend_is_within_bounds_at_every_stage(dtype: str, model: str, seed: int) -> None:
    options, inputs = drawn(100 + seed, dtype)
    truth = truth_of(options, inputs, dtype)
    returned = numpy_backend.normalized_attention(**inputs, **options)
    assert set(returned) == set(truth.exact)
    for stage, array in returned.items():
        error = np.abs(array.astype(np.float64) - truth.exact[stage].high)
        assert (error <= truth.bounds(model)[stage].max_error).all(), stage
        step = truth.introduced(stage, returned, model)
        assert step is not None
        assert (np.abs(array.astype(np.float64) - step[0].high) <= step[1].max_error).all(), stage


def problem_of(options: dict[str, Any], inputs: dict[str, Array]) -> Problem:
    operation, posed = lowered("normalized_attention", AttentionProblem(options, inputs))
    plain = canonical_form(operation, posed.options, posed.inputs)
    return Problem.of(operation, plain.options, plain.inputs).in_float64()


@pytest.mark.parametrize("seed", range(20))
def test_what_moves_by_its_radius_moves_a_norm_by_no_more_than_its_own(seed: int) -> None:
    problem = problem_of(*drawn(200 + seed, "float64"))
    rng = np.random.default_rng(seed)
    for size in (1e-6, 1e-2, 1.0):
        radii = {name: size * rng.random(array.shape) for name, array in problem.inputs.items()}
        walk = radius_walk(problem, radii)
        for _ in range(20):
            moved = {
                name: array + radii[name] * rng.choice([-1, 1, 0.5], array.shape)
                for name, array in problem.inputs.items()
            }
            other = value_walk(Problem.of(problem.operation, problem.options, moved))
            for stage in ("normalized_query", "normalized_key"):
                ball = walk.node(stage)
                assert (np.abs(other.node(stage) - ball.value) <= ball.radius * (1 + 1e-9) + 1e-12).all()


def test_errors_of_a_rotation_before_the_norm_are_carried_through_it() -> None:
    options, inputs = {"norm": "rms", "epsilon": 1e-6}, drawn(3, "float64")[1]
    kept = {name: inputs[name] for name in ("query", "key", "value")}
    problem = problem_of(options, kept)
    values = value_walk(problem)
    exact = values.node("normalized_query")
    rng = np.random.default_rng(0)
    error = 0.05 * np.abs(problem.inputs["query"]) * rng.random(exact.shape)
    rounding = rounding_model_named("native", "float64")
    walk = error_walk(
        problem, rounding, values, states={"query": Operand(problem.inputs["query"], error, error**2 / 3)}
    )
    bound = walk.node("normalized_query").bound(rounding)
    for _ in range(50):
        shifted = problem.inputs["query"] + error * rng.choice([-1, 1], exact.shape)
        other = value_walk(Problem.of("attention", problem.options, problem.inputs | {"query": shifted}))
        assert (np.abs(other.node("normalized_query") - exact) <= bound.max_error).all()
    assert bound.max_error.max() < 0.5 * np.abs(exact).max()


@pytest.mark.parametrize("norm_over", ["head", "full"])
def test_one_element_reaches_all_that_it_is_normalised_with(norm_over: str) -> None:
    inputs = {
        "query": np.ones((1, 4, 2, 3)),
        "key": np.ones((1, 2, 3, 3)),
        "value": np.ones((1, 2, 3, 2)),
    }
    problem = problem_of({"norm_over": norm_over}, inputs)
    flags = {name: np.zeros(array.shape, np.bool_) for name, array in problem.inputs.items()}
    flags["query"][0, 1, 0, 2] = True
    reached = np.broadcast_to(reach_walk(problem, flags, None).node("normalized_query"), (1, 4, 2, 3))
    expected = np.zeros((1, 4, 2, 3), np.bool_)
    expected[0, slice(None) if norm_over == "full" else 1, 0] = True
    np.testing.assert_array_equal(reached, expected)


def test_a_key_that_a_sink_adds_is_charged_nothing() -> None:
    inputs = {"query": np.ones((1, 1, 2, 3)), "key": np.ones((1, 1, 3, 3)), "value": np.ones((1, 1, 3, 2))}
    problem = problem_of({}, inputs | {"sinks": np.zeros(1)})
    rounding = rounding_model_named("native", "float32")
    added = error_walk(problem, rounding, value_walk(problem)).node("normalized_key")
    assert (added.value[..., -1, :] == 0).all()
    assert (added.max_error[..., -1, :] == 0).all()
    assert (added.max_error[..., :-1, :] > 0).all()


@pytest.mark.parametrize(
    ("reading", "divisor"),
    [
        ({"norm": "rms"}, lambda s, e: np.sqrt(s / 3 + e)),
        ({"norm": "l2"}, lambda s, e: max(np.sqrt(s), e)),
        ({"norm": "rms", "epsilon_at": "outside"}, lambda s, e: np.sqrt(s / 3) + e),
        ({"norm": "rms", "epsilon_at": "maximum"}, lambda s, e: max(np.sqrt(s / 3), e)),
        ({"norm": "l2", "epsilon_at": "square"}, lambda s, e: np.sqrt(max(s, e))),
        ({"norm": "l2", "epsilon_at": "inside"}, lambda s, e: np.sqrt(s + e)),
    ],
)
@pytest.mark.parametrize("size", [0.25, 3.0])
def test_epsilon_stands_where_a_reading_puts_it(
    reading: dict[str, Any], divisor: Callable[[float, float], float], size: float
) -> None:
    inputs = {
        "query": size * np.array([[[[1.0, -2.0, 0.5]]]]),
        "key": np.ones((1, 1, 1, 3)),
        "value": np.ones((1, 1, 1, 1)),
        "query_norm": np.ones((1, 3)),
        "key_norm": np.ones((1, 3)),
    }
    expected = inputs["query"] / divisor(float((inputs["query"] ** 2).sum()), 0.75)
    exact = exact_stages("attention", {"epsilon": 0.75, **reading}, inputs)["normalized_query"].high
    np.testing.assert_allclose(exact, expected, rtol=1e-14)
    problem = Problem.of("attention", {"epsilon": 0.75, **reading}, inputs)
    np.testing.assert_allclose(value_walk(problem).node("normalized_query"), expected, rtol=1e-14)


def test_epsilon_is_the_contracts_where_none_is_given() -> None:
    options, inputs = drawn(0)
    del options["epsilon"]
    given = truth_of({**options, "epsilon": DEFAULT_EPSILON}, inputs, "float32").exact["output"].high
    np.testing.assert_array_equal(truth_of(options, inputs, "float32").exact["output"].high, given)
    assert (numpy_backend.normalized_attention.__kwdefaults__ or {})["epsilon"] == DEFAULT_EPSILON


def test_what_a_reading_leaves_out_stays_as_it_is() -> None:
    problem = problem_of({"unnormalized": "key"}, drawn(1)[1] | {})
    step = normalization_of("key")
    array = problem.inputs["key"]
    assert step.value(problem, array) is array
    operand = Operand(array)
    handed_on = step.error(_at(problem), operand)
    assert handed_on.value is array
    assert not handed_on.max_error.any()
    ball = Around(problem, {"key": np.ones_like(array)}).ball("key")
    assert step.radius(Around(problem, {}), array, ball) is ball.radius


def _at(problem: Problem) -> Any:
    return At(problem, rounding_model_named("native", "float32"), lambda: None, lambda _: None)
