"""What is particular to single steps: caches, rotations, norms, fills, sinks, latent vectors, codes and parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from problems import INF, LK, LQ, SINKS, Problem, draw

from attncheck.attention.bounds import accumulated_bounds, introduced_bounds
from attncheck.attention.errors import Operand
from attncheck.attention.graph import graph_of, logits_order, nearest
from attncheck.attention.latents import size_of_made
from attncheck.attention.normalization import DEFAULT_EPSILON, normalization_of
from attncheck.attention.problem import LOGITS
from attncheck.attention.problem import Problem as Canonical
from attncheck.attention.radii import propagate
from attncheck.attention.rounding import rounding_model_named
from attncheck.attention.step import Around, At
from attncheck.attention.walk import error_walk, reach_walk, value_walk
from attncheck.backends import numpy_absorbed, numpy_backend
from attncheck.oracle.evaluate import exact_from, exact_stages
from attncheck.reading.dtypes import EIGHT_BITS, rounded_once
from attncheck.reading.inputs import Inputs
from attncheck.reading.lowering import call_form, canonical_form
from attncheck.spec import stage_dtype

Array = NDArray[Any]
Arrays = dict[str, Array]
SINGLE, DOUBLE = (rounding_model_named("native", dtype) for dtype in ("float32", "float64"))
MODELS = [("float64", "native"), ("float32", "native"), ("float16", "fused"), ("float16", "eager")]


def highs(operation: str, options: dict[str, Any], inputs: Arrays) -> Arrays:
    return {stage: each.high for stage, each in exact_stages(operation, options, inputs).items()}


def errors_of(name: str, rounding: Any = SINGLE, **inputs: Array) -> Any:
    """Return the walk of errors of a problem."""
    posed = draw(name).with_inputs(**inputs).on_walk()
    return error_walk(posed, rounding, value_walk(posed))


def held(found: Array, exact: Array, bound: Any) -> float:
    """Hold an array within its bound, and return the largest error in units of that."""
    known = np.isfinite(exact) & (bound.max_error > 0)
    error = np.abs(np.where(known, found.astype(np.float64) - np.where(known, exact, 0), 0))
    assert (error <= bound.max_error).all()
    assert (bound.sigma <= bound.max_error).all()
    return float((error[known] / bound.max_error[known]).max(initial=0))


# The graph.


@pytest.mark.parametrize(
    ("follows", "order"),
    [
        ("scores", LOGITS),
        ("biased", ("scores", "biased", "capped", "masked")),
        ("masked", ("scores", "biased", "masked", "capped")),
    ],
)
def test_the_order_of_composition_is_an_edge_of_the_graph(follows: str, order: tuple[str, ...]) -> None:
    operation, options, inputs = draw("attention, all").canonical()
    options = options | {"softcap_follows": follows}
    problem = Canonical.of(operation, options, inputs)
    graph = graph_of(problem)
    assert logits_order(problem) == order
    assert [graph[stage].follows for stage in order[1:]] == [(stage,) for stage in order[:-1]]
    assert graph["exponentials"].follows == order[-1:]
    scores = inputs["query"] @ np.repeat(inputs["key"], 2, 1).swapaxes(-1, -2) * -0.4
    allowed = np.broadcast_to(inputs["mask"] & np.tri(LQ, LK, dtype=bool), scores.shape)
    for stage in order[1:]:
        scores = {
            "capped": 1.5 * np.tanh(scores / 1.5),
            "biased": scores + inputs["bias"],
            "masked": np.where(allowed, scores, -INF),
        }[stage]
        exact = exact_stages(operation, options, inputs, [stage])[stage]
        np.testing.assert_allclose(exact.high, scores, rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(value_walk(problem.in_float64()).node(stage), scores, rtol=1e-14, atol=1e-15)


def test_a_stage_follows_from_the_nearest_known_nodes_alone() -> None:
    graph = graph_of(draw("layer").on_walk())
    for stage, known, found in (
        ("output", {"weights", "value", "masked"}, {"weights", "value"}),
        ("output", {"context", "weights"}, {"context"}),
        ("scores", {"raw_scores", "query", "key"}, {"query", "key"}),
        ("log_sum_exp", {"weights", "capped", "scores"}, {"capped"}),
        ("query", {"key"}, set()),
    ):
        assert nearest(graph, stage, known) == found


def test_flags_reach_a_row_of_every_head_and_nothing_where_there_is_no_key() -> None:
    problem = draw("layer")
    problem = problem.with_inputs(**{name: problem.inputs[name][:, :0] for name in ("key", "value")}).on_walk()
    flags = {name: np.zeros(array.shape, dtype=bool) for name, array in problem.inputs.items()}
    flags["query"][1, 2, 3] = True
    walk = reach_walk(problem, flags, None)
    np.testing.assert_array_equal(np.argwhere(walk.node("query").any(axis=(1, 3))), [[1, 2]])
    assert walk.node("query")[1, :, 2].all()
    assert not walk.node("key").any()
    assert not walk.node("output").any()  # no query meets a key


@pytest.mark.parametrize("kind", ["general", "additive"])
def test_a_softcap_behind_scores_that_were_not_returned_has_the_error_of_these(kind: str) -> None:
    operation, options, inputs = draw(kind).canonical()
    options = options | {"softcap": 1.5}
    exact = {name: each.high for name, each in exact_stages(operation, options, inputs, ["scores", "capped"]).items()}
    accumulated = accumulated_bounds(operation, options, inputs, SINGLE, exact)["capped"]
    introduced = introduced_bounds(Canonical.of(operation, options, inputs), SINGLE, {}, {"capped": exact["capped"]})
    assert introduced is not None
    np.testing.assert_allclose(introduced["capped"].max_error, accumulated.max_error, rtol=1e-6)


def test_a_returned_score_of_minus_infinity_may_have_been_any_number_where_it_was_used() -> None:
    operation, options, inputs = draw("dot").canonical()
    scores = np.where(np.arange(LK) == 2, -INF, highs(operation, options, inputs)["scores"])
    exact = {"capped": 2 * np.tanh(scores / 2)}
    bound = introduced_bounds(Canonical.of(operation, options, inputs), SINGLE, {"scores": scores}, exact)
    assert bound is not None
    np.testing.assert_array_equal(np.isinf(bound["capped"].max_error), np.isinf(scores))


# Caches and rotations.


def test_a_cache_counts_for_causality_stays_apart_behind_projections_and_is_not_rounded() -> None:
    problem = draw("layer, cache")
    options = problem.options | {"is_causal": True}
    called, plain = (form(problem.operation, options, problem.inputs) for form in (call_form, canonical_form))
    assert "is_causal" not in called.options
    for posed in (called, plain):
        np.testing.assert_array_equal(posed.inputs["mask"][0, 0], np.tri(LQ, LK + 3, 3, dtype=bool))
    assert plain.inputs["key"].shape == problem.inputs["key"].shape
    np.testing.assert_array_equal(plain.inputs["cached_key"], problem.inputs["past_key"])
    assert not plain.inputs.keys() & {"past_key", "past_value"}
    assert canonical_form(problem.operation, problem.options, plain.inputs).inputs.keys() == plain.inputs.keys()
    joined = errors_of("layer, cache").node("joined_key")
    assert not joined.max_error[:, :, :3].any()
    assert not joined.variance[:, :, :3].any()
    assert (joined.max_error[:, :, 3:] > 0).all()
    radius = {n: np.full(each.shape, 1e-3 if n == "past_key" else 0.0) for n, each in problem.inputs.items()}
    balls = propagate(problem.operation, problem.options, Inputs(problem.inputs, radius))
    assert not balls["key"].radius.any()
    assert not balls["raw_scores"].radius[..., 3:].any()
    assert (balls["raw_scores"].radius[..., :3] > 0).all()


@pytest.mark.parametrize(("new", "past"), [(0, 3), (6, 0)])
def test_a_cache_may_be_empty_or_all_that_there_is(new: int, past: int) -> None:
    problem = draw("layer, rotated cache").stored("float32")
    shorter = {name: problem.inputs[name][:, :new] for name in ("key", "value")}
    shorter |= {name: problem.inputs[name][:, :, :past] for name in ("past_key", "past_value")}
    problem = problem.with_inputs(**shorter)
    truth = problem.truth("float32")
    for stage, array in problem.returned().items():
        held(array, truth.exact[stage].high, truth.bounds("native")[stage])


def test_a_rotation_by_nothing_or_a_quarter_rounds_nothing() -> None:
    problem = draw("rotary").canonical()[2]
    cos, sin = (np.repeat(np.array([each]).T, 1, 1) for each in ([1.0, 0, -1, 0, 0.6], [0.0, 1, 0, -1, 0.8]))
    tables = {"query_cos": cos, "query_sin": sin, "key_cos": np.ones((LK, 1)), "key_sin": np.zeros((LK, 1))}
    posed = Canonical.of("attention", {}, problem | tables).in_float64()
    walk = error_walk(posed, SINGLE, value_walk(posed))
    of_query = walk.node("rotated_query").max_error
    assert not of_query[..., :4, :].any()
    assert not walk.node("rotated_key").max_error.any()
    assert (of_query[..., 4, :2] > 0).all()
    assert not of_query[..., 2:].any()


# Sinks and fills.


@pytest.mark.parametrize(("model", "is_charged"), [("eager", False), ("fused", True)])
def test_adding_a_sink_is_charged_no_rounding_but_that_of_its_base(model: str, is_charged: bool) -> None:
    rounding = rounding_model_named(model, "float16")
    assert (rounding.folding == "base") == is_charged
    state = errors_of("sinks", rounding).node("logits")
    unit = rounding.compute_unit if is_charged else 0.0
    expected = unit * np.where(np.isfinite(SINKS), np.abs(SINKS), 0.0)[:, None]
    np.testing.assert_array_equal(state.max_error[..., -1], np.broadcast_to(expected, (2, 4, LQ)))
    assert not state.floor[..., -1].any()
    assert not state.shared[..., -1].any()
    added = errors_of("norms", sinks=np.zeros(4)).node("normalized_key")
    assert not added.value[..., -1, :].any()
    assert not added.max_error[..., -1, :].any()
    assert (added.max_error[..., :-1, :] > 0).all()


def test_sinks_of_minus_infinity_are_none() -> None:
    problem = draw("sinks").with_inputs(sinks=np.full(4, -INF))
    without = {name: array for name, array in problem.inputs.items() if name != "sinks"}
    for convention in ("zero", "uniform"):
        options = {"empty_rows": convention, "softcap": 1.5}
        own, other = (highs("attention", options, each) for each in (problem.inputs, without))
        for stage in own:
            np.testing.assert_array_equal(own[stage], other[stage], stage)


def filled(fill: float, dtype: str = "float32") -> tuple[str, dict[str, Any], Arrays]:
    mask = np.array([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)[np.newaxis, np.newaxis]
    rng = np.random.default_rng(12)
    shapes = {"query": (2, 2, 3, 5), "key": (2, 2, 4, 5), "value": (2, 2, 4, 6)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return "attention", {"mask_fill": fill}, arrays | {"mask": mask}


@pytest.mark.parametrize("fill", [-1e9, -3.4028234663852886e38])
def test_a_row_of_fills_is_bounded_as_if_they_were_nothing(fill: float) -> None:
    posed = filled(fill)
    exact = highs(*posed)
    np.testing.assert_array_equal(exact["weights"][..., 2, :], 0.25)
    bounds = accumulated_bounds(*posed, SINGLE, exact)
    assert bounds["weights"].max_error[..., 2, :].max() < 4e-6
    assert bounds["output"].max_error[..., 2, :].max() < 2e-5
    assert (bounds["log_sum_exp"].max_error[..., 2] >= 2.0**-24 * abs(fill)).all()
    # A stored log_sum_exp loses what a row of fills adds up to.
    stored = rounding_model_named("native_lse", "float32")
    assert accumulated_bounds(*posed, stored, exact)["output"].max_error[..., 2, :].min() > 0.1
    # What follows from a returned fill is not excused by its size.
    returned = {"masked": numpy_backend.attention(**posed[2], **posed[1])["masked"]}
    step = exact_from(Canonical.of(*posed), returned, ["weights"])
    assert step is not None
    bound = introduced_bounds(Canonical.of(*posed), SINGLE, returned, {"weights": step["weights"].high})
    assert bound is not None
    assert bound["weights"].max_error.max() < 1e-5


@pytest.mark.parametrize("operation", ["attention", "attention_gradients"])
def test_numpy_is_within_the_bounds_of_fills_of_any_size(operation: str) -> None:
    for fill in (-1e9, 0.25):
        _, options, inputs = filled(fill)
        inputs |= {"grad_output": inputs["query"][..., [0, 1, 2, 3, 4, 0]]} if "gradients" in operation else {}
        truth = Problem(operation, options, inputs).truth("float32")
        for stage, array in getattr(numpy_backend, operation)(**inputs, **options).items():
            held(array, truth.exact[stage].high, truth.bounds("native")[stage])


def test_a_fill_in_base_two_is_multiplied_like_a_score_and_moves_by_no_radius() -> None:
    posed = filled(-4.0, "float16")
    fused, eager = (
        accumulated_bounds(*posed, rounding_model_named(model, "float16"), highs(*posed))["masked"].max_error
        for model in ("fused", "eager")
    )
    masked = ~np.broadcast_to(posed[2]["mask"], fused.shape)
    assert (fused[masked] > 0).all()
    assert (eager[masked] == 0).all()
    operation, options, inputs = filled(-7.0, "float64")
    radius = {name: np.full(array.shape, 0.01) for name, array in inputs.items() if name != "mask"}
    moved = propagate(operation, options, Inputs(inputs, radius))["masked"].radius
    np.testing.assert_array_equal(moved == 0, masked)


def test_a_fill_is_rounded_to_the_dtype_and_beyond_it_is_minus_infinity() -> None:
    for dtype, fill in (("float64", -1e-9), ("float32", float(np.float32(-1e-9))), ("float16", -0.0)):
        for form in (call_form, canonical_form):
            assert form(*filled(-1e-9, dtype)).options["mask_fill"] == fill
    assert "mask_fill" not in canonical_form(*filled(-1e9, "float16")).options


def test_every_key_takes_part_beside_a_fill() -> None:
    problem, shape = Canonical.of(*filled(-1e9)), (2, 2, 3, 4)
    assert problem.allowed(shape) is None
    assert not problem.unattended(shape).any()
    kept = problem.kept(shape)
    assert kept is not None
    np.testing.assert_array_equal(kept, np.broadcast_to(problem.inputs["mask"], shape))


# Norms.


def divisor_of(rows: Array, options: dict[str, Any], *, backwards: bool) -> Array:
    squares = rows * rows
    total = (
        np.cumsum(squares[..., ::-1], axis=-1, dtype=rows.dtype)[..., -1:] if backwards else squares.sum(-1)[..., None]
    )
    epsilon = rows.dtype.type(options["epsilon"])
    if options.get("norm", "rms") == "rms":
        return np.sqrt(total / rows.dtype.type(rows.shape[-1]) + epsilon)
    return np.maximum(np.sqrt(total), epsilon)


@pytest.mark.parametrize(("dtype", "model"), MODELS)
@pytest.mark.parametrize("name", ["norms", "norms, full"])
def test_every_way_to_take_a_norm_is_within_bounds(name: str, dtype: str, model: str) -> None:
    for seed in range(12):
        problem = draw(name, seed, [1.0, 0.01, 8.0][seed % 3]).stored(dtype)
        truth, is_full = problem.truth(dtype), problem.options.get("norm_over") == "full"
        for each in ("query", "key"):
            array = problem.inputs[each]
            merged = numpy_backend._merge_heads(array) if is_full else array
            wide = merged.astype(np.float32) if dtype == "float16" else merged
            weight = problem.inputs.get(f"{each}_norm_weight", np.ones(1, dtype)).astype(wide.dtype)
            exact, bound = truth.exact[f"normalized_{each}"].high, truth.bounds(model)[f"normalized_{each}"]
            for found in (
                wide * (1 / divisor_of(wide, problem.options, backwards=True)) * weight,
                wide * weight / divisor_of(wide, problem.options, backwards=False),
            ):
                stored = found.astype(dtype).astype(np.float64)
                held(numpy_backend._split_heads(stored, array.shape[1]) if is_full else stored, exact, bound)
            unit = rounding_model_named(model, dtype).coarsest_unit
            assert (bound.max_error <= 64 * unit * (np.abs(exact) + 2.0**-10)).all()


def test_errors_of_what_is_normalised_are_carried_through_the_norm() -> None:
    posed = draw("norms, late").on_walk()
    values, rng = value_walk(posed), np.random.default_rng(0)
    turned, exact = values.node("rotated_query"), values.node("normalized_query")
    error = 0.05 * np.abs(turned) * rng.random(exact.shape)
    states = {"rotated_query": Operand(turned, error, error**2 / 3)}
    bound = error_walk(posed, DOUBLE, values, states=states).node("normalized_query").bound(DOUBLE)
    for _ in range(20):
        moved = value_walk(posed, {"rotated_query": turned + error * rng.choice([-1, 1], exact.shape)})
        assert (np.abs(moved.node("normalized_query") - exact) <= bound.max_error).all()
    assert bound.max_error.max() < 0.5 * np.abs(exact).max()


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
def test_epsilon_stands_where_a_reading_puts_it(reading: dict[str, Any], divisor: Callable[..., float]) -> None:
    for size in (0.25, 3.0):
        inputs = {
            "query": size * np.array([[[[1.0, -2.0, 0.5]]]]),
            "key": np.ones((1, 1, 1, 3)),
            "value": np.ones((1, 1, 1, 1)),
            "query_norm": np.ones((1, 3)),
            "key_norm": np.ones((1, 3)),
        }
        expected = inputs["query"] / divisor(float((inputs["query"] ** 2).sum()), 0.75)
        posed = "attention", {"epsilon": 0.75, **reading}, inputs
        np.testing.assert_allclose(highs(*posed)["normalized_query"], expected, rtol=1e-14)
        np.testing.assert_allclose(value_walk(Canonical.of(*posed)).node("normalized_query"), expected, rtol=1e-14)


def test_epsilon_is_the_contracts_where_none_is_given_and_what_a_reading_leaves_out_stays() -> None:
    problem = draw("norms")
    default, given = (
        Problem(problem.operation, options, problem.inputs).truth().exact["output"].high
        for options in ({}, {"epsilon": DEFAULT_EPSILON})
    )
    np.testing.assert_array_equal(default, given)
    assert (numpy_backend.normalized_attention.__kwdefaults__ or {})["epsilon"] == DEFAULT_EPSILON
    posed = Problem(problem.operation, {"unnormalized": "key"}, problem.inputs).on_walk()
    step, array = normalization_of("key"), posed.inputs["key"]
    assert step.value(posed, array) is array
    handed_on = step.error(At(posed, SINGLE, lambda: None, lambda _: None), Operand(array))
    assert handed_on.value is array
    assert not handed_on.max_error.any()
    ball = Around(posed, {"key": np.ones_like(array)}).ball("key")
    assert step.radius(Around(posed, {}), array, ball) is ball.radius


# Latent vectors: keys and values that are made of them, and projections that are absorbed.


def softmax_of(scores: Array, options: dict[str, Any], stored: Callable[[Array], Array]) -> Arrays:
    stages = {"scores": scores}
    if options.get("is_causal"):
        stages["masked"] = scores = np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores, -INF)
    return stages | {name: stored(array) for name, array in numpy_backend.softmax(scores).items()}


def made(options: dict[str, Any], inputs: Arrays, stored: Callable[[Array], Array], scale: float) -> Arrays:
    """Make keys and values, and store them."""
    key, value = (stored(inputs["latent"][:, np.newaxis] @ inputs[f"{name}_projection"]) for name in ("key", "value"))
    query = inputs["query"]
    if "key_rotary" in inputs:
        query = np.concatenate([query, inputs["query_rotary"]], axis=-1)
        rotary = inputs["key_rotary"][:, np.newaxis]
        key = np.concatenate([key, np.broadcast_to(rotary, (*key.shape[:-1], rotary.shape[-1]))], axis=-1)
    raw = stored(query @ key.swapaxes(-1, -2))
    stages = softmax_of(stored(raw * scale), options, stored)
    return {"raw_scores": raw, **stages, "output": stored(stages["weights"] @ value)}


def absorbed(options: dict[str, Any], inputs: Arrays, stored: Callable[[Array], Array], scale: float) -> Arrays:
    """Store queries behind the key projection, and means of latent vectors; add two products up, each stored."""
    latent = inputs["latent"][:, np.newaxis]
    raw = stored(stored(inputs["query"] @ inputs["key_projection"].swapaxes(-1, -2)) @ latent.swapaxes(-1, -2))
    if "key_rotary" in inputs:
        raw = stored(raw + stored(inputs["query_rotary"] @ inputs["key_rotary"][:, np.newaxis].swapaxes(-1, -2)))
    stages = softmax_of(stored(raw * scale), options, stored)
    mean = stored(stages["weights"] @ latent)
    return {"raw_scores": raw, **stages, "output": stored(mean @ inputs["value_projection"])}


@pytest.mark.parametrize(("dtype", "model"), MODELS)
@pytest.mark.parametrize("way", [made, absorbed])
def test_both_forms_of_latent_attention_are_within_one_bound_that_is_not_idle(
    way: Callable[..., Arrays], dtype: str, model: str
) -> None:
    largest, z = 0.0, []
    for seed in range(16):
        problem = draw(["latents", "latents, rotary"][seed % 2], seed, [1.0, 0.5, 2.0][seed % 3]).stored(dtype)
        truth, bounds = (truth := problem.truth(dtype)), truth.bounds(model)
        wide = {n: array.astype("float32" if dtype == "float16" else dtype) for n, array in problem.inputs.items()}
        scale = wide["query"].dtype.type(problem.options.get("scale", 0.5))
        stored = (lambda a: a.astype("float16").astype("float32")) if model == "eager" else (lambda a: a)
        for stage, array in way(problem.options, wide, stored, scale).items():
            returned, exact = array.astype(dtype), truth.exact[stage].high
            largest = max(largest, held(returned, exact, bounds[stage]))
            if stage in ("raw_scores", "output"):
                z += ((returned.astype(np.float64) - exact) / bounds[stage].sigma).ravel().tolist()
    assert 0.1 < largest <= 1
    assert 0.05 < np.sqrt(np.mean(np.square(z))) < 1


def test_the_backend_that_absorbs_is_within_bounds_at_every_stage_and_step() -> None:
    for name, dtype in (("latents", "float32"), ("latents, rotary", "float64")):
        for seed in range(4):
            problem = draw(name, seed).stored(dtype)
            truth, returned = problem.truth(dtype), numpy_absorbed.latent_attention(**problem.inputs, **problem.options)
            assert set(returned) == set(truth.exact)
            for stage, array in returned.items():
                held(array, truth.exact[stage].high, truth.bounds("native")[stage])
                step = truth.introduced(stage, returned, "native")
                assert step is not None
                held(array, step[0].high, step[1])


def test_no_bound_is_larger_than_both_forms_together_can_need() -> None:
    for name in ("latents", "latents, rotary"):
        walk, inputs = errors_of(name, DOUBLE), draw(name).on_walk().inputs
        terms = np.abs(inputs["query"]) @ size_of_made(inputs["key"], inputs["key_projection"]).swapaxes(-1, -2)
        count = 2 * (inputs["key"].shape[-1] + inputs["query"].shape[-1]) + 12
        assert (walk.node("raw_scores").max_error <= count * DOUBLE.accumulate_unit * terms + 1e-300).all()


# Keys and values of 8 bits.


def scaled_last(inputs: Arrays) -> Array:
    """Multiply scores with the scale of each key, and the output with that of the head."""
    query = inputs["query"]
    key, value = (np.repeat(inputs[name].astype(query.dtype), 2, axis=1) for name in ("key", "value"))
    of_keys, of_values = (np.repeat(inputs[f"{name}_scale"], 2, axis=1) for name in ("key", "value"))
    scores = query @ key.swapaxes(-1, -2) * of_keys[:, :, np.newaxis] * query.dtype.type(0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(weights @ value * of_values[:, :, np.newaxis])


@pytest.mark.parametrize(("dtype", "model"), [("float64", "native"), ("float32", "native"), ("float16", "eager")])
def test_every_way_to_apply_a_scale_is_within_bounds_and_one_that_is_left_out_is_not(dtype: str, model: str) -> None:
    for codes in EIGHT_BITS.values():
        for seed in range(4):
            problem = draw("codes", seed)
            stored = {name: problem.inputs[name].astype(codes) for name in ("key", "value")}
            problem = problem.with_inputs(**stored).stored(dtype)
            truth = problem.truth(dtype)
            exact, bound = truth.exact["output"].high, truth.bounds(model)["output"]
            for found in (numpy_backend.quantized_attention(**problem.inputs)["output"], scaled_last(problem.inputs)):
                held(found, exact, bound)
            assert (bound.max_error <= 2.0**12 * np.finfo(dtype).eps * 10).all()  # no more than rounding can make
    ones = np.ones_like(problem.inputs["value_scale"])
    wrong = scaled_last(problem.inputs | {"value_scale": ones}).astype(np.float64)
    assert (np.abs(wrong - exact) > 10 * bound.max_error).mean() > 0.5


def test_weights_of_8_bits_are_allowed_their_rounding_and_no_more() -> None:
    truth = draw("codes").stored("bfloat16").truth("bfloat16")
    fine, coarse = (truth.bounds(name)["output"].max_error for name in ("fused", "fused_fp8"))
    assert (coarse > fine).all()
    model, info = rounding_model_named("fused_fp8", "bfloat16"), ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
    assert model.weight_unit == float(info.eps) / 2
    assert model.weight_underflow == float(info.smallest_subnormal) / 2


# Parts that are merged.


def in_sequence(outputs: Array, totals: Array) -> tuple[Array, Array]:
    output, total = outputs[0], totals[0]
    for own_output, own_total in zip(outputs[1:], totals[1:], strict=True):
        whole = np.logaddexp(total, own_total)
        shares = [np.exp(np.where(np.isneginf(each), -INF, each - whole)) for each in (total, own_total)]
        output, total = shares[0][..., None] * output + shares[1][..., None] * own_output, whole
    return output, total


def by_a_logistic_function(outputs: Array, totals: Array) -> tuple[Array, Array]:
    """Merge as ring attention does (zhuzilin/ring-flash-attention, utils.py)."""
    output, total = outputs[0], totals[0]
    for own_output, own_total in zip(outputs[1:], totals[1:], strict=True):
        share = 1 / (1 + np.exp(total - own_total))
        share = np.where(np.isneginf(own_total), 0, np.where(np.isneginf(total), 1, share)).astype(total.dtype)
        above = np.where(np.isneginf(own_total), -INF, own_total - total)
        grown = np.where(above > 0, above, 0) + np.log1p(np.exp(-np.abs(above)))
        total = np.where(np.isneginf(total), own_total, total + grown).astype(total.dtype)
        output = output - share[..., None] * (output - own_output)
    return output, total


def in_powers_of_two(outputs: Array, totals: Array) -> tuple[Array, Array]:
    totals = totals * totals.dtype.type(1 / np.log(2))
    highest = totals.max(axis=0)
    shift = np.where(np.isneginf(highest), 0, highest)
    powers = np.exp2(totals - shift)
    total = powers.sum(axis=0)
    mean = (powers[..., None] * outputs).sum(axis=0)
    return mean / np.where(total == 0, 1, total)[..., None], (shift + np.log2(total)) * totals.dtype.type(np.log(2))


def parts(count: int, size: float, at: float) -> Arrays:
    rng = np.random.default_rng(3)
    totals = at + size * rng.standard_normal((count, 2, 3, 5))
    return {"outputs": rng.standard_normal((count, 2, 3, 5, 6)), "log_sum_exps": totals}


@pytest.mark.parametrize(
    ("dtype", "model"), [*MODELS, ("float32", "tf32_products"), ("bfloat16", "eager_pre")]
)  # fmt: skip
@pytest.mark.parametrize("way", [in_sequence, by_a_logistic_function, in_powers_of_two])
def test_every_way_to_merge_is_within_the_bounds(
    dtype: str, model: str, way: Callable[..., tuple[Array, Array]]
) -> None:
    for count, size, at in ((2, 3, 0), (2, 3000, 0), (2, 200, -500), (7, 2, -800), (16, 30, 90), (33, 1, 700)):
        for base in ("e", "2"):
            arrays = parts(count, size, at)
            arrays["log_sum_exps"][1, 0], arrays["outputs"][1, 0] = -INF, 7.0
            problem = Problem("merge_states", {"lse_base": base}, arrays).stored(dtype)
            truth, totals = problem.truth(dtype), problem.inputs["log_sum_exps"]
            unit = totals.dtype.type(1 if base == "e" else np.log(2))
            outputs = problem.inputs["outputs"].astype(totals.dtype)
            with np.errstate(all="ignore"):
                output, total = way(np.where(np.isneginf(totals)[..., None], 0, outputs), totals * unit)
            for stage, array in (("log_sum_exp", total / unit), ("output", rounded_once(output, dtype))):
                bound, exact = truth.bounds(model)[stage], truth.exact[stage]
                assert (exact.error_of(array) - exact.radius <= bound.max_error).all(), (stage, count, base)
                assert (bound.sigma <= bound.max_error).all()


@pytest.mark.parametrize("at", [0.0, -90.0, -800.0])
def test_a_thousandth_of_the_differences_of_log_sum_exps_shows_in_float32(at: float) -> None:
    problem = Problem("merge_states", {}, parts(2, 3.0, at)).stored("float32")
    truth, totals = problem.truth("float32"), problem.inputs["log_sum_exps"]
    middle = totals.mean(axis=0)
    for wrong in (1.001, 1 / np.log(2)):
        moved = (middle + (totals - middle) * np.float32(wrong)).astype(np.float32)
        other = numpy_backend.merge_states(problem.inputs["outputs"], moved)["output"]
        assert (truth.exact["output"].error_of(other) > truth.bounds("native")["output"].max_error).any()


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 9), (0, 4), (4, 4, 10, 10), ()])
def test_parts_of_attention_become_the_whole(cuts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(11)
    query, key, value = (rng.standard_normal((1, 2, length, 5)) for length in (3, 10, 10))
    edges = [slice(*each) for each in zip((0, *cuts), (*cuts, 10), strict=True)]
    whole, *found = (
        highs("attention", {}, {"query": query, "key": key[:, :, part], "value": value[:, :, part]})
        for part in (slice(None), *edges)
    )
    arrays = {f"{name}s": np.stack([part[name] for part in found]) for name in ("output", "log_sum_exp")}
    merged = Problem("merge_states", {}, arrays).truth().exact
    for stage in ("log_sum_exp", "output"):
        np.testing.assert_allclose(merged[stage].high, whole[stage], rtol=1e-13, atol=1e-15)


def test_log_sum_exps_are_float32_beside_sixteen_bits_and_the_canonical_form_is_its_own() -> None:
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        wide = dtype if dtype.endswith(("64", "32")) else "float32"
        found = [stage_dtype("merge_states", stage, dtype) for stage in ("log_sum_exp", "weights", "output")]
        assert found == [wide, wide, dtype]
    assert stage_dtype("attention", "log_sum_exp", "bfloat16") == "bfloat16"
    plain = canonical_form("merge_states", {"lse_base": "2"}, draw("parts").inputs)
    again = canonical_form("merge_states", plain.options, plain.inputs)
    assert again.options == plain.options == {"lse_base": "2"}
    assert again.inputs.keys() == plain.inputs.keys() == {"scores", "row_values"}
    assert Canonical.of("merge_states", plain.options, plain.inputs).rows.tolist() == list(range(LQ))
