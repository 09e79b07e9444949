"""Attention to latent vectors: the exact answer at 200 bits, and one bound for keys that are made and absorbed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.latents import size_of_made
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import rounding_model_named
from attncheck.attention.walk import error_walk, radius_walk, reach_walk, value_walk
from attncheck.backends import numpy_absorbed, numpy_backend
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.canonical import AttentionProblem, canonical_form
from attncheck.reading.lowered import lowered

Array = NDArray[Any]
Stages = dict[str, Array]
SEEDS = 40
"""Of random problems that are held against mpmath; ``python tests/harness/attention/test_latents.py 500`` does more."""
MODELS = [("float64", "native"), ("float32", "native"), ("float16", "fused"), ("float16", "eager")]


def drawn(seed: int, dtype: str = "float32") -> tuple[dict[str, Any], dict[str, Array]]:
    """Draw options and inputs: with a rotated part or without, of some size, causal or not."""
    rng = np.random.default_rng(seed)
    heads, queries, keys, latent, width, rotary, wide = rng.integers(1, 6, 7)
    shapes = {
        "query": (1, heads, queries, width),
        "latent": (1, keys, latent),
        "key_projection": (heads, latent, width),
        "value_projection": (heads, latent, wide),
    }
    if rng.random() < 0.7:
        shapes |= {"query_rotary": (1, heads, queries, rotary), "key_rotary": (1, keys, rotary)}
    sizes = {name: 2.0 ** rng.integers(-2, 2) for name in shapes}
    inputs = {name: (rng.normal(size=shape) * sizes[name]).astype(dtype) for name, shape in shapes.items()}
    options = {"scale": float(rng.choice([0.25, 0.3]))} if rng.random() < 0.4 else {}
    return options | ({"is_causal": True} if rng.random() < 0.4 else {}), inputs


def truth_of(options: dict[str, Any], inputs: dict[str, Array], dtype: str) -> Truth:
    return find_truth("latent_attention", options, inputs, dtype, supports_statistics=True)


def problem_of(options: dict[str, Any], inputs: dict[str, Array]) -> Problem:
    operation, posed = lowered("latent_attention", AttentionProblem(options, inputs))
    plain = canonical_form(operation, posed.options, posed.inputs)
    return Problem.of(operation, plain.options, plain.inputs).in_float64()


def numbers(array: Array) -> Any:
    """Return an array's numbers as mpmath's."""
    return mpmath.matrix(array.astype(np.float64).tolist())


def hold_against_the_definition(seed: int) -> None:
    """Absorb the projections at 200 bits: (q Wk^T) c^T and (p c) Wv."""
    options, inputs = drawn(seed)
    exact = truth_of(options, inputs, "float32").exact
    with mpmath.workprec(200):
        latent = numbers(inputs["latent"][0])
        for h in range(inputs["query"].shape[1]):
            query = numbers(inputs["query"][0, h])
            raw = query * numbers(inputs["key_projection"][h]).T * latent.T
            width = query.cols
            if "key_rotary" in inputs:
                rotary = numbers(inputs["query_rotary"][0, h])
                raw, width = raw + rotary * numbers(inputs["key_rotary"][0]).T, width + rotary.cols
            scale = mpmath.mpf(options["scale"]) if "scale" in options else 1 / mpmath.sqrt(width)
            for i in range(raw.rows):
                seen = min(i + 1, latent.rows) if options.get("is_causal") else latent.rows
                close(exact["scores"].high[0, h, i], [raw[i, j] * scale for j in range(raw.cols)])
                terms = [mpmath.exp(raw[i, j] * scale) for j in range(seen)]
                total = mpmath.fsum(terms)
                close(exact["weights"].high[0, h, i], [t / total for t in terms] + [0] * (latent.rows - seen))
                close(exact["log_sum_exp"].high[0, h, i : i + 1], [mpmath.log(total)])
                mean = mpmath.matrix([[mpmath.fsum(t / total * latent[j, c] for j, t in enumerate(terms))
                                       for c in range(latent.cols)]])  # fmt: skip
                close(exact["output"].high[0, h, i], list(mean * numbers(inputs["value_projection"][h])))


def close(found: Array, expected: Any) -> None:
    for value, right in zip(found.ravel().tolist(), expected, strict=True):
        assert abs(right - mpmath.mpf(value)) <= abs(right) * 2.0**-52


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_exact_answer_is_that_of_the_definition_at_200_bits(seed: int) -> None:
    hold_against_the_definition(seed)


def softmax_of(scores: Array, options: dict[str, Any], stored: Callable[[Array], Array]) -> Stages:
    stages = {"scores": scores}
    if options.get("is_causal"):
        allowed = np.tri(*scores.shape[-2:], dtype=np.bool_)
        stages["masked"] = scores = np.where(allowed, scores, -np.inf)
    found = numpy_backend.softmax(scores)
    return stages | {name: stored(array) for name, array in found.items()}


def made(options: dict[str, Any], inputs: dict[str, Array], stored: Callable[[Array], Array]) -> Stages:
    """Make keys and values, and store them."""
    key, value = (stored(inputs["latent"][:, np.newaxis] @ inputs[f"{name}_projection"]) for name in ("key", "value"))
    query = inputs["query"]
    if "key_rotary" in inputs:
        query = np.concatenate([query, inputs["query_rotary"]], axis=-1)
        rotary = np.broadcast_to(
            inputs["key_rotary"][:, np.newaxis], (*key.shape[:-1], query.shape[-1] - key.shape[-1])
        )
        key = np.concatenate([key, rotary], axis=-1)
    raw = stored(query @ key.swapaxes(-1, -2))
    stages = softmax_of(stored(raw * scale_of(options, query.shape[-1])), options, stored)
    return {"raw_scores": raw, **stages, "output": stored(stages["weights"] @ value)}


def absorbed(options: dict[str, Any], inputs: dict[str, Array], stored: Callable[[Array], Array]) -> Stages:
    """Store queries behind the key projection, and means of latent vectors; add two products up, each stored."""
    query, latent = inputs["query"], inputs["latent"][:, np.newaxis]
    width = query.shape[-1]
    raw = stored(stored(query @ inputs["key_projection"].swapaxes(-1, -2)) @ latent.swapaxes(-1, -2))
    if "key_rotary" in inputs:
        rotary, width = inputs["query_rotary"], width + inputs["query_rotary"].shape[-1]
        raw = stored(raw + stored(rotary @ inputs["key_rotary"][:, np.newaxis].swapaxes(-1, -2)))
    stages = softmax_of(stored(raw * scale_of(options, width)), options, stored)
    mean = stored(stages["weights"] @ latent)
    return {"raw_scores": raw, **stages, "output": stored(mean @ inputs["value_projection"])}


def scale_of(options: dict[str, Any], width: int) -> float:
    return float(options.get("scale", 1 / np.sqrt(width)))


def ratios(way: Callable[..., Stages], dtype: str, model: str, seeds: range) -> tuple[float, dict[str, float]]:
    """Return the largest error in units of its bound, and per stage the root mean square in units of sigma."""
    largest, squares = 0.0, {"raw_scores": [0.0], "output": [0.0]}
    for seed in seeds:
        options, inputs = drawn(seed, dtype)
        truth = truth_of(options, inputs, dtype)
        wide = {name: array.astype("float32" if dtype == "float16" else dtype) for name, array in inputs.items()}

        def stored(array: Array) -> Array:
            return array.astype("float16").astype("float32") if model == "eager" else array

        for stage, array in way(options, wide, stored).items():
            exact, bound = truth.exact[stage].high, truth.bounds(model)[stage]
            returned = array.astype(dtype).astype(np.float64)
            known = np.isfinite(exact) & (bound.max_error > 0)
            error = np.abs(np.where(known, returned - np.where(known, exact, 0), 0))
            assert (error <= bound.max_error).all(), (seed, stage)
            assert (bound.sigma <= bound.max_error).all()
            largest = max(largest, float((error[known] / bound.max_error[known]).max(initial=0)))
            if stage in squares:
                squares[stage] += ((error[known] / bound.sigma[known]) ** 2).tolist()
    return largest, {stage: float(np.sqrt(np.mean(each[1:]))) for stage, each in squares.items()}


@pytest.mark.parametrize(("dtype", "model"), MODELS)
@pytest.mark.parametrize("way", [made, absorbed])
def test_both_forms_are_within_one_bound_that_is_not_idle(way: Callable[..., Stages], dtype: str, model: str) -> None:
    largest, spread = ratios(way, dtype, model, range(1000, 1060))
    assert 0.1 < largest <= 1
    assert all(0.05 < each < 1 for each in spread.values()), spread


@pytest.mark.parametrize("way", [numpy_backend, numpy_absorbed])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_backend_is_within_bounds_at_every_stage(way: Any, dtype: str, seed: int) -> None:
    options, inputs = drawn(100 + seed, dtype)
    truth = truth_of(options, inputs, dtype)
    returned = way.latent_attention(**inputs, **options)
    assert set(returned) == set(truth.exact)
    for stage, array in returned.items():
        assert is_within(array, truth.exact[stage].high, truth.bounds("native")[stage].max_error), stage
        step = truth.introduced(stage, returned, "native")
        assert step is not None
        assert is_within(array, step[0].high, step[1].max_error), stage


def is_within(array: Array, exact: Array, bound: Array) -> bool:
    """Whether an array is no further from the exact one than its bound, and -inf where that is."""
    finite = np.isfinite(exact)
    error = np.abs(array.astype(np.float64)[finite] - exact[finite])
    return bool((error <= bound[finite]).all() and (array[~finite] == exact[~finite]).all())


def test_no_bound_is_larger_than_both_forms_together_can_need() -> None:
    for seed in range(30):
        problem = problem_of(*drawn(seed, "float64"))
        rounding = rounding_model_named("native", "float64")
        walk = error_walk(problem, rounding, value_walk(problem))
        latents, weight = problem.inputs["key"], problem.inputs["key_projection"]
        terms = np.abs(problem.inputs["query"]) @ size_of_made(latents, weight).swapaxes(-1, -2)
        count = 2 * (latents.shape[-1] + problem.inputs["query"].shape[-1]) + 12
        assert (walk.node("raw_scores").max_error <= count * rounding.accumulate_unit * terms + 1e-300).all()


@pytest.mark.parametrize("seed", range(20))
def test_what_moves_by_its_radius_moves_no_stage_by_more_than_its_own(seed: int) -> None:
    options, inputs = drawn(200 + seed, "float64")
    problem, rng = problem_of(options | {"is_causal": False}, inputs), np.random.default_rng(seed)
    for size in (1e-6, 1e-2):
        radii = {name: size * rng.random(array.shape) for name, array in problem.inputs.items()}
        walk = radius_walk(problem, radii)
        for _ in range(20):
            moved = {
                name: array + radii[name] * rng.choice([-1, 1, 0.5], array.shape)
                for name, array in problem.inputs.items()
            }
            other = value_walk(Problem.of(problem.operation, problem.options, moved))
            for stage in ("projected_key", "projected_value", "raw_scores"):
                ball = walk.node(stage)
                assert (np.abs(other.node(stage) - ball.value) <= ball.radius * (1 + 1e-9) + 1e-12).all()


def flags_of(problem: Problem, name: str, index: tuple[int, ...]) -> dict[str, Array]:
    flags = {each: np.zeros(array.shape, np.bool_) for each, array in problem.inputs.items()}
    flags[name][index] = True
    return flags


def test_one_element_reaches_what_is_made_of_it() -> None:
    inputs = {
        "query": np.ones((1, 3, 2, 4)),
        "latent": np.ones((1, 5, 6)),
        "key_projection": np.ones((3, 6, 4)),
        "value_projection": np.ones((3, 6, 2)),
        "query_rotary": np.ones((1, 3, 2, 1)),
        "key_rotary": np.ones((1, 5, 1)),
    }
    problem = problem_of({}, inputs)
    for index, columns in ((2, slice(0, 4)), (6, slice(4, 5))):  # an element of a latent vector, and a rotated one
        reached = reach_walk(problem, flags_of(problem, "key", (0, 0, 3, index)), None).node("projected_key")
        expected = np.zeros((1, 3, 5, 5), np.bool_)
        expected[:, :, 3, columns] = True
        np.testing.assert_array_equal(np.broadcast_to(reached, expected.shape), expected)
    reached = reach_walk(problem, flags_of(problem, "value_projection", (1, 0, 1)), None).node("output")
    expected = np.zeros((1, 3, 2, 2), np.bool_)
    expected[:, 1, :, 1] = True
    np.testing.assert_array_equal(np.broadcast_to(reached, expected.shape), expected)


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        hold_against_the_definition(number)
    print(f"{sys.argv[1]} problems agree with their definition at 200 bits")
