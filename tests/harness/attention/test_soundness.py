"""Honest attention and its gradients, evaluated in many ways, never exceed their bounds; small faults in them do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.attention.enclosure import Enclosure
from attncheck.judging.compare import threshold
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.lowering import Problem

Array = NDArray[Any]
Stages = dict[str, Array]
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORWARD, BACKWARD = "attention", "attention_gradients"
GENERIC = ("normal", "peaky", "small")
REGIMES = (*GENERIC, "tiny", "huge", "cancelling", "repeated", "integers", "offset keys", "offset values")
WITHOUT_STATISTICS = ("capped", "biased", "masked")
"""Stages of one rounding, of which statistics say nothing in a single step."""


@dataclass(frozen=True)
class Sample:
    """One attention computation, or its vector-Jacobian product."""

    inputs: Stages
    options: dict[str, Any]

    def truth(self, operation: str, dtype: str) -> Truth:
        return find_truth(Problem(operation, self.options, self.inputs), dtype, supports_statistics=True, whole=True)

    def allowed(self, shape: tuple[int, ...]) -> Array:
        allowed = np.broadcast_to(self.inputs.get("mask", np.True_), shape)
        return allowed & np.tri(*shape[-2:], dtype=bool) if self.options.get("is_causal") else allowed


def make_problem(rng: np.random.Generator, operation: str, dtype: str, regime: str = "") -> Sample:
    """Draw a problem: a regime of inputs, a shape, masks and options."""
    shared, group = (int(each) for each in rng.integers(1, 3, 2))
    queries, keys = int(rng.integers(1, 30)), int(rng.choice([1, 2, 3, int(rng.integers(4, 60))]))
    width, columns = int(rng.choice([1, 3, 4, 16, int(rng.integers(5, 50))])), int(rng.integers(1, 9))
    shapes = {"query": (group * shared, queries, width), "key": (shared, keys, width), "value": (shared, keys, columns)}
    shapes |= {"grad_output": (group * shared, queries, columns)} if operation == BACKWARD else {}
    inputs = in_regime(
        rng, regime or str(rng.choice(REGIMES)), {n: rng.standard_normal((1, *s)) for n, s in shapes.items()}
    )
    if rng.random() < 0.4:
        lengths = [length if rng.random() < 0.6 else 1 for length in (1, group * shared, queries, keys)]
        inputs["bias"] = np.where(rng.random(lengths) < 0.1, -np.inf, rng.standard_normal(lengths))
    stored = {name: array.astype(DTYPES[dtype]) for name, array in inputs.items()}
    if rng.random() < 0.4:
        stored["mask"] = rng.random((1, 1, queries, keys)) < 0.7
    options: dict[str, Any] = {"is_causal": True} if rng.random() < 0.3 else {}
    options |= {"scale": float(rng.choice([1.0, 0.3, 0.25, 1.7]))} if rng.random() < 0.3 else {}
    options |= {"softcap": float(rng.choice([0.7, 2.0, 30.0]))} if rng.random() < 0.3 else {}
    return Sample(stored, options)


def in_regime(rng: np.random.Generator, regime: str, inputs: Stages) -> Stages:
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    match regime:
        case "peaky":
            query = query * 6
        case "small":
            query, value = query * 0.05, value * 1e-2
        case "tiny":
            query, key, value = query * 1e-3, key * 1e-3, value * 1e-3
        case "huge":
            query = query * 60
        case "cancelling":
            query = query + 20 * rng.choice([-1, 1], query.shape[-1])
        case "repeated":
            key = np.repeat(key[..., :1, :], key.shape[-2], axis=-2)
        case "integers":
            query, key = (rng.integers(-3, 4, each.shape) * 1.0 for each in (query, key))
        case "offset keys":
            key = key * 0.1 + 3
        case "offset values":
            value = value * 1e-2 + 50
    return inputs | {"query": query, "key": key, "value": value}


@dataclass(frozen=True)
class Variant:
    """One honest way to compute: precision after each step, order of sums, base, blocks; and how to go backwards."""

    rounding_model: str
    order: str = "blas"
    folded: str = "none"
    base_two: bool = False
    block: int | None = None
    reciprocal: bool = False
    recomputed: bool = False  # weights from log_sum_exp, Delta from the output
    apart: bool = False  # p dp - p Delta in place of p (dp - Delta)
    tile: int | None = None


VARIANTS = {
    (FORWARD, "wide"): (
        Variant("native"),
        Variant("native", order="sequential"),
        Variant("native", folded="query", order="reversed"),
        Variant("native", folded="both"),
        Variant("native", base_two=True, reciprocal=True),
        Variant("native", block=16, base_two=True, order="reversed"),
        Variant("native", block=64, folded="query"),
    ),
    (FORWARD, "narrow"): (
        Variant("eager"),
        Variant("eager", order="sequential", reciprocal=True),
        Variant("eager_pre", folded="query"),
        Variant("eager_pre", folded="both", order="reversed"),
        Variant("fused"),
        Variant("fused", block=16, base_two=True),
        Variant("fused", block=16, folded="query", order="reversed"),
    ),
    (BACKWARD, "wide"): (
        Variant("native"),
        Variant("native", recomputed=True),
        Variant("native", recomputed=True, folded="both", order="reversed"),
        Variant("native", apart=True, order="reversed"),
    ),
    (BACKWARD, "narrow"): (
        Variant("eager"),
        Variant("eager", apart=True),
        Variant("eager_pre", folded="both"),
        Variant("fused"),
        Variant("fused", recomputed=True, folded="both"),
        Variant("fused_bwd", recomputed=True, tile=32),
        Variant("fused_bwd", tile=32, order="reversed"),
    ),
}


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a problem by a variant."""

    problem: Sample
    variant: Variant
    stored: Any

    @property
    def working(self) -> Any:
        return self.stored if self.variant.rounding_model == "native" else np.float32

    def store(self, array: Array) -> Array:
        """Round what a class always stores."""
        return np.asarray(array.astype(self.stored).astype(self.working))

    def step(self, array: Array) -> Array:
        """Round an intermediate where the class stores every one."""
        return self.store(array) if self.variant.rounding_model.startswith("eager") else array

    def product(self, left: Array, right: Array) -> Array:
        """Multiply matrices in the working format, the sum in the variant's order."""
        order, count = self.variant.order, left.shape[-1]
        if order == "blas":
            return np.asarray(left @ right)
        total = np.zeros((*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]))
        total = total.astype(left.dtype)
        for index in range(count) if order == "sequential" else range(count - 1, -1, -1):
            total = total + left[..., :, index, None] * right[..., None, index, :]
        return total

    def operands(self) -> Stages:
        """Return the inputs in the working format, keys and values repeated for every head of a group."""
        arrays = {n: a.astype(self.working) for n, a in self.problem.inputs.items() if n not in ("mask", "bias")}
        group = arrays["query"].shape[1] // arrays["key"].shape[1]
        return arrays | {name: np.repeat(arrays[name], group, axis=1) for name in ("key", "value")}

    def scale(self) -> Any:
        return self.problem.options.get("scale", 1 / math.sqrt(self.problem.inputs["query"].shape[-1]))

    def forward(self) -> Stages:
        """Return every stage in the working format, and what going backwards needs."""
        arrays, working, step, folded = self.operands(), self.working, self.step, self.variant.folded
        query, keys, scale = arrays["query"], arrays["key"].swapaxes(-1, -2), working(self.scale())
        if folded != "none":
            root = working(math.sqrt(self.scale())) if folded == "both" else scale
            query, keys = step(query * root), step(keys * root) if folded == "both" else keys
        scores = step(self.product(query, keys))
        stages = {"left": query, "right": keys.swapaxes(-1, -2)}
        if folded == "none":
            stages["raw_scores"], scores = scores, step(scores * scale)
        stages["scores"] = logits = scores
        if "softcap" in self.problem.options:
            cap = working(self.problem.options["softcap"])
            stages["height"] = step(np.tanh(step(logits / cap)))
            stages["capped"] = logits = step(stages["height"] * cap)
        if "bias" in self.problem.inputs:
            stages["biased"] = logits = step(logits + self.problem.inputs["bias"].astype(working))
        if "mask" in self.problem.inputs or self.problem.options.get("is_causal"):
            allowed = self.problem.allowed(scores.shape)
            stages["masked"] = logits = np.where(allowed, logits, -np.inf).astype(working)
        return stages | self.attend(logits, arrays["value"])

    def attend(self, logits: Array, value: Array) -> Stages:
        """Take softmax and mean in blocks, each with the maximum so far; one block is the ordinary softmax."""
        variant, step, working = self.variant, self.step, self.working
        constant, power = working(math.log2(math.e)), np.exp2 if variant.base_two else np.exp
        shape = (*logits.shape[:-1], 1)
        highest, total = np.full(shape, -np.inf, working), np.zeros(shape, working)
        mean = np.zeros((*logits.shape[:-1], value.shape[-1]), working)

        def exponential(scores: Array, maximum: Array) -> Array:
            shift = np.where(np.isfinite(maximum), maximum, working(0))
            difference = scores * constant - shift * constant if variant.base_two else scores - shift
            return step(power(step(difference)).astype(working))

        size = variant.block or logits.shape[-1]
        for start in range(0, logits.shape[-1], size):
            part = slice(start, start + size)
            risen = np.maximum(highest, logits[..., part].max(axis=-1, keepdims=True))
            powers, kept = exponential(logits[..., part], risen), exponential(highest, risen)
            total = total * kept + powers.sum(axis=-1, keepdims=True, dtype=working)
            mean = mean * kept + self.product(self.store(powers), value[..., part, :])
            highest = risen
        divisor = np.where(total > 0, step(total), working(1))
        powers = exponential(logits, highest)
        weights = step(powers * step(1 / divisor)) if variant.reciprocal else step(powers / divisor)
        output = mean / divisor if variant.block else self.product(self.store(weights), value)
        log_sum_exp = highest + step(np.log(divisor))
        if variant.recomputed:
            weights = np.exp(logits - np.where(total > 0, log_sum_exp, working(0)))
        return {"weights": weights, "log_sum_exp": log_sum_exp[..., 0], "output": step(output)}

    def returned(self) -> Stages:
        """Return the stages of the forward pass as they are stored."""
        inner = ("left", "right", "height")
        return {stage: each.astype(self.stored) for stage, each in self.forward().items() if stage not in inner}

    def gradients(self) -> Stages:
        """Go backwards, every gradient as it is stored."""
        stages, arrays, step, store = self.forward(), self.operands(), self.step, self.store
        variant, weights, upstream = self.variant, stages["weights"], arrays["grad_output"]
        is_stored = variant.rounding_model == "fused_bwd"
        of_weights = step(self.product(upstream, arrays["value"].swapaxes(-1, -2)))
        of_weights = store(of_weights) if is_stored else of_weights
        if variant.recomputed:
            mean = (upstream * store(stages["output"])).sum(axis=-1, keepdims=True)
        else:
            mean = step(step(weights * of_weights).sum(axis=-1, keepdims=True))
        if variant.apart:
            gradient = step(step(weights * of_weights) - step(weights * mean))
        else:
            gradient = step(weights * step(of_weights - mean))
        of_scores, scale = gradient, self.working(self.scale())
        if "softcap" in self.problem.options:
            cap = self.working(self.problem.options["softcap"])
            slope = step(1 - step(stages["height"] * stages["height"]))
            of_scores = step(step(step(gradient * cap) * slope) / cap)
        of_scores = of_scores if variant.folded == "both" else step(of_scores * scale)
        of_products = store(of_scores) if is_stored else of_scores
        of_query = self.tiled(of_products, stages["right"])
        of_key = self.tiled(of_products.swapaxes(-1, -2), stages["left"])
        if variant.folded == "both":
            root = self.working(math.sqrt(self.scale()))
            of_query, of_key = step(step(of_query) * root), step(step(of_key) * root)
        of_value = self.tiled(store(weights).swapaxes(-1, -2), upstream)
        found = {"grad_query": of_query, "grad_key": self.of_group(of_key), "grad_value": self.of_group(of_value)}
        if "bias" in self.problem.inputs:
            axes = tuple(axis for axis, length in enumerate(self.problem.inputs["bias"].shape) if length == 1)
            found["grad_bias"] = gradient.sum(axis=axes, keepdims=True)
        return {name: array.astype(self.stored) for name, array in found.items()}

    def tiled(self, left: Array, right: Array) -> Array:
        """Multiply; in tiles, partial sums are kept in the output's format."""
        if self.variant.tile is None:
            return self.product(left, right)
        total = np.zeros((*left.shape[:-1], right.shape[-1]), self.working)
        for start in range(0, left.shape[-1], self.variant.tile):
            part = slice(start, start + self.variant.tile)
            total = self.store(total + self.product(left[..., part], right[..., part, :]))
        return total

    def of_group(self, gradient: Array) -> Array:
        """Add up the heads that share a key and a value."""
        heads, shared = self.store(gradient), self.problem.inputs["key"].shape[1]
        return np.asarray(heads.reshape(1, shared, -1, *heads.shape[2:]).sum(axis=2, dtype=self.working))


def evaluations(problem: Sample, operation: str, dtype: str) -> Iterator[tuple[Variant, Stages]]:
    """Evaluate in every way that the dtype has."""
    for variant in VARIANTS[operation, "wide" if dtype in ("float64", "float32") else "narrow"]:
        evaluation = Evaluation(problem, variant, DTYPES[dtype])
        yield variant, evaluation.gradients() if operation == BACKWARD else evaluation.returned()


def compared(array: Array, exact: Enclosure, bound: Any) -> tuple[Array, Array]:
    """Return errors in units of the bound and of sigma; what is not finite has to be the same."""
    known = np.isfinite(exact.high)
    assert not np.isnan(bound.max_error).any()
    assert (bound.sigma <= bound.max_error).all()
    assert (bound.max_error[~known] == 0).all()
    assert (array[~known] == exact.high[~known]).all()
    error = np.maximum(exact.error_of(array) - exact.radius, 0)[known]
    with np.errstate(divide="ignore", invalid="ignore"):
        return tuple(np.where(error == 0, 0, error / each[known]) for each in (bound.max_error, bound.sigma))


@pytest.mark.parametrize("operation", [FORWARD, BACKWARD])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=14, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), regime=st.sampled_from(["", *GENERIC]))
def test_no_honest_evaluation_exceeds_its_bounds(operation: str, dtype: str, seed: int, regime: str) -> None:
    problem = make_problem(np.random.default_rng(seed), operation, dtype, regime)
    with np.errstate(all="ignore"):
        truth = problem.truth(operation, dtype)
        for variant, stages in evaluations(problem, operation, dtype):
            # A kernel's values never met the weights that are returned, unless they were multiplied with these.
            kept = {name: each for name, each in stages.items() if name != "weights" or variant.block is None}
            for stage, array in stages.items():
                found = [(truth.exact[stage], truth.bounds(variant.rounding_model)[stage])]
                if operation == FORWARD and (stage != "output" or "weights" in kept):
                    step = truth.introduced(stage, kept, variant.rounding_model)
                    assert step is not None
                    found.append(step)
                for exact, bound in found:
                    ratio, z = compared(array, exact, bound)
                    assert ratio.max(initial=0) <= 1, (variant, stage, problem.options)
                    if regime and stage not in WITHOUT_STATISTICS:
                        assert z.max(initial=0) <= threshold(z.size), (variant, stage, problem.options)
                        assert z.size < 256 or np.sqrt(np.mean(z**2)) <= 1, (variant, stage)


def test_heads_added_up_in_16_bits_are_within_the_bounds_of_such_kernels_alone() -> None:
    """64 heads share a key and a value; float16 adds them up one after the other, as torch's flash kernel does."""
    beyond = 0
    for seed in range(10):
        draw = np.random.RandomState(seed).standard_normal
        shapes = {"query": (1, 64, 1, 4), "key": (1, 1, 3, 4), "value": (1, 1, 3, 4), "grad_output": (1, 64, 1, 4)}
        inputs = {name: draw(shape).astype(np.float16) for name, shape in shapes.items()}
        inputs["grad_output"] = np.abs(inputs["grad_output"])  # no term takes away what another has added
        query, key, upstream = (inputs[name].astype(np.float64) for name in ("query", "key", "grad_output"))
        powers = np.exp(query @ key.swapaxes(-1, -2) / 2)
        weights = powers / powers.sum(axis=-1, keepdims=True)
        total = np.zeros((1, 1, 3, 4), np.float16)
        for head in range(64):
            part = weights[:, head : head + 1].swapaxes(-1, -2) @ upstream[:, head : head + 1]
            total = (total + part).astype(np.float16)
        truth = Sample(inputs, {}).truth(BACKWARD, "float16")
        error = truth.exact["grad_value"].error_of(total)
        assert (error <= truth.bounds("fused_bwd")["grad_value"].max_error).all()
        beyond += (error > truth.bounds("fused")["grad_value"].max_error).any()
    assert beyond > 0


# Faults.
