"""What is particular to single steps: caches, rotations, norms, fills, sinks, latent vectors, codes and parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from problems import INF, Problem, draw

from attncheck.attention.rounding import rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.dtypes import EIGHT_BITS, rounded_once

Array = NDArray[Any]
Arrays = dict[str, Array]
MODELS = [("float64", "native"), ("float32", "native"), ("float16", "fused"), ("float16", "eager")]


def held(found: Array, exact: Array, bound: Any) -> float:
    """Hold an array within its bound, and return the largest error in units of that."""
    known = np.isfinite(exact) & (bound.max_error > 0)
    error = np.abs(np.where(known, found.astype(np.float64) - np.where(known, exact, 0), 0))
    assert (error <= bound.max_error).all()
    assert (bound.sigma <= bound.max_error).all()
    return float((error[known] / bound.max_error[known]).max(initial=0))


# The graph.


# Caches and rotations.


@pytest.mark.parametrize(("new", "past"), [(0, 3), (6, 0)])
def test_a_cache_may_be_empty_or_all_that_there_is(new: int, past: int) -> None:
    problem = draw("layer, rotated cache").stored("float32")
    shorter = {name: problem.inputs[name][:, :new] for name in ("key", "value")}
    shorter |= {name: problem.inputs[name][:, :, :past] for name in ("past_key", "past_value")}
    problem = problem.with_inputs(**shorter)
    truth = problem.truth("float32")
    for stage, array in problem.returned().items():
        held(array, truth.exact[stage].high, truth.bounds("native")[stage])


# Sinks and fills.


def filled(fill: float, dtype: str = "float32") -> tuple[str, dict[str, Any], Arrays]:
    mask = np.array([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)[np.newaxis, np.newaxis]
    rng = np.random.default_rng(12)
    shapes = {"query": (2, 2, 3, 5), "key": (2, 2, 4, 5), "value": (2, 2, 4, 6)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return "attention", {"mask_fill": fill}, arrays | {"mask": mask}


@pytest.mark.parametrize("operation", ["attention", "attention_gradients"])
def test_numpy_is_within_the_bounds_of_fills_of_any_size(operation: str) -> None:
    for fill in (-1e9, 0.25):
        _, options, inputs = filled(fill)
        inputs |= {"grad_output": inputs["query"][..., [0, 1, 2, 3, 4, 0]]} if "gradients" in operation else {}
        truth = Problem(operation, options, inputs).truth("float32")
        for stage, array in getattr(numpy_backend, operation)(**inputs, **options).items():
            held(array, truth.exact[stage].high, truth.bounds("native")[stage])


def test_a_fill_is_rounded_to_the_dtype_and_beyond_it_is_minus_infinity() -> None:
    for dtype, fill in (("float64", -1e-9), ("float32", float(np.float32(-1e-9))), ("float16", -0.0)):
        for form in (Problem.called, Problem.canonical):
            assert form(Problem(*filled(-1e-9, dtype))).options["mask_fill"] == fill
    assert "mask_fill" not in Problem(*filled(-1e9, "float16")).canonical().options


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
