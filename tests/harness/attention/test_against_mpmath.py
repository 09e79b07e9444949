"""The oracle against the papers' formulas, written once more as plain loops over mpmath numbers of 200 bits.

Nothing here is the oracle's: other numbers, other loops, another library. Every number carries the sum of the absolute
terms that it is made of, its ``size``; agreement is to 1e-25 of that, and to the oracle's own proven radius.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpmath import cosh, exp, log, mp, mpf, sqrt, tanh
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from problems import NAMES, draw

from attncheck.attention.oracle import exact_stages
from attncheck.reading.lowering import Problem
from attncheck.spec import STAGES, computed_stages, score_kind

Array = NDArray[Any]


@dataclass(frozen=True)
class Number:
    """A true value, None for minus infinity, and the sum of the absolute terms behind it."""

    value: Any
    size: Any

    def __add__(self, other: Number) -> Number:
        if self.value is None or other.value is None:
            return MINUS_INFINITY
        return Number(self.value + other.value, self.size + other.size)

    def __mul__(self, other: Number) -> Number:
        return Number(self.value * other.value, self.size * other.size)

    def __sub__(self, other: Number) -> Number:
        return self + other.times(-1)

    def times(self, factor: Any) -> Number:
        return Number(self.value * factor, self.size * abs(factor))


ZERO, MINUS_INFINITY = Number(mpf(0), mpf(0)), Number(None, mpf(0))


def read(array: Array) -> Array:
    """Stored numbers as exact ones."""
    numbers = np.empty(array.shape, dtype=object)
    for at in np.ndindex(array.shape):
        stored = float(array[at])
        numbers[at] = MINUS_INFINITY if stored == -math.inf else Number(mpf(stored), abs(mpf(stored)))
    return numbers


def dot(left: Sequence[Number] | Array, right: Sequence[Number] | Array) -> Number:
    assert len(left) == len(right)
    return sum((x * y for x, y in zip(left, right, strict=True)), ZERO)


def score(kind: str, scale: Any, query: Array, key: Array, weights: Mapping[str, Any]) -> Number:
    if kind == "general":
        product = dot([dot(query, column) for column in weights["weight"].T], key)
        return product + weights["score_bias"] if "score_bias" in weights else product
    if kind == "additive":
        left = [dot(query, column) for column in weights["query_weight"].T]
        right = [dot(key, column) for column in weights["key_weight"].T]
        bias = weights.get("score_bias", [ZERO] * len(left))
        hidden = [x + y + z for x, y, z in zip(left, right, bias, strict=True)]
        return dot([Number(tanh(x.value), min(x.size, 1)) for x in hidden], weights["score_vector"])
    if kind == "cosine":
        lengths = sqrt(sum(x.value**2 for x in query)) * sqrt(sum(x.value**2 for x in key))
        return dot(query, key).times((mpf(1) if scale is None else mpf(scale)) / lengths)
    if scale is None:
        scale = 1 / sqrt(len(query)) if kind == "scaled_dot" else 1
    return dot(query, key).times(mpf(scale))


def weights_of(kind: str, weights: Mapping[str, Array], head: int) -> Mapping[str, Any]:
    """The weights of a head: a bilinear score has a bias of its own for each, or one for all."""
    if kind != "general" or "score_bias" not in weights:
        return weights
    bias = weights["score_bias"]
    return {**weights, "score_bias": bias[head % len(bias)]}


def softmax(row: list[Number]) -> tuple[list[Number], Number]:
    members = [x.value for x in row if x.value is not None]
    if not members:
        return [ZERO for _ in row], MINUS_INFINITY
    largest = max(members)
    powers = [mpf(0) if x.value is None else exp(x.value - largest) for x in row]
    total = sum(powers)
    log_sum_exp = largest + log(total)
    return [Number(x / total, x / total) for x in powers], Number(log_sum_exp, max(mpf(1), abs(log_sum_exp)))


def score_stages(options: Mapping[str, Any], inputs: Mapping[str, Array], scores: Array) -> dict[str, Array]:
    """The stages between the scores and the softmax."""
    stages = {name: np.empty(scores.shape, dtype=object) for name in ("capped", "biased", "masked")}
    cap = options.get("softcap")
    bias = read(np.broadcast_to(inputs["bias"], scores.shape)) if "bias" in inputs else None
    fill = MINUS_INFINITY if options.get("mask_fill") is None else read(np.array(options["mask_fill"]))[()]
    for at in np.ndindex(scores.shape):
        number: Any = scores[at]
        if cap is not None:
            number = Number(mpf(cap) * tanh(number.value / mpf(cap)), number.size)
        stages["capped"][at] = number
        stages["biased"][at] = number if bias is None else number + bias[at]
        stages["masked"][at] = fill if is_forbidden(options, inputs, scores.shape, at) else stages["biased"][at]
    return stages


def is_forbidden(
    options: Mapping[str, Any], inputs: Mapping[str, Array], shape: tuple[int, ...], at: tuple[int, ...]
) -> bool:
    mask = np.broadcast_to(inputs.get("mask", np.True_), shape)
    return bool(not mask[at] or (options.get("is_causal") and at[3] > at[2]))


def project(name: str, inputs: Mapping[str, Array], heads: int) -> Array:
    """X W + b; head h has the columns from h D to (h + 1) D."""
    array, weight = read(inputs[name]), read(inputs[f"{name}_weight"])
    bias = read(inputs.get(f"{name}_bias", np.zeros(weight.shape[1])))
    width = weight.shape[1] // heads
    projected = np.empty((array.shape[0], heads, array.shape[1], width), dtype=object)
    for b, h, i, d in np.ndindex(projected.shape):
        column = h * width + d
        projected[b, h, i, d] = dot(array[b, i], weight[:, column]) + bias[column]
    return projected


def project_back(context: Array, inputs: Mapping[str, Array]) -> Array:
    batch, heads, queries, width = context.shape
    merged = np.empty((batch, queries, heads * width), dtype=object)
    for b, h, i, d in np.ndindex(context.shape):
        merged[b, i, h * width + d] = context[b, h, i, d]
    if "output_weight" not in inputs:
        return merged
    weight = read(inputs["output_weight"])
    bias = read(inputs.get("output_bias", np.zeros(weight.shape[1])))
    output = np.empty((batch, queries, weight.shape[1]), dtype=object)
    for b, i, e in np.ndindex(output.shape):
        output[b, i, e] = dot(merged[b, i], weight[:, e]) + bias[e]
    return output


def prepared(whole: dict[str, Array], options: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Multiply with factors, make of latent vectors, normalise and rotate, in place; return the stages among these."""
    stages = {}
    for name in ("key", "value"):
        if f"{name}_factor" in inputs:
            factors = read(np.broadcast_to(inputs[f"{name}_factor"], whole[name].shape))
            whole[name] = np.array([x * y for x, y in zip(whole[name].ravel(), factors.ravel(), strict=True)], object)
            whole[name] = whole[name].reshape(factors.shape)
        if f"{name}_projection" in inputs:
            whole[name] = made_of_latents(whole[name], read(inputs[f"{name}_projection"]))
    for name in ("query", "key"):
        if f"{name}_norm" in inputs and not options.get("norm_after_rotation"):
            whole[name] = stages[f"normalized_{name}"] = normalized(whole[name], name, options, inputs)
        if f"{name}_cos" in inputs:
            whole[name] = stages[f"rotated_{name}"] = rotated(whole[name], name, options, inputs)
        if f"{name}_norm" in inputs and options.get("norm_after_rotation"):
            whole[name] = stages[f"normalized_{name}"] = normalized(whole[name], name, options, inputs)
    return stages


def reference(operation: str, options: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every stage as an array of numbers, from the formulas of the papers."""
    projected = operation == "multi_head_attention"
    heads = {"query": options.get("heads")} | dict.fromkeys(
        ("key", "value"), options.get("kv_heads", options.get("heads"))
    )
    stages = {
        name: project(name, inputs, heads[name]) if projected else read(inputs[name])
        for name in ("query", "key", "value", "scores")
        if name in inputs
    }
    whole = {  # what a cache holds comes before what is projected
        name: np.concatenate([read(inputs[f"cached_{name}"]), array], axis=2) if f"cached_{name}" in inputs else array
        for name, array in stages.items()
    }
    stages |= prepared(whole, options, inputs)
    if "scores" not in stages:
        query, key = whole["query"], whole["key"]
        shape = (*query.shape[:3], key.shape[2])
        weights = {name: read(array) for name, array in inputs.items() if name in SCORE_WEIGHTS}
        kind = score_kind(operation, options)
        group = shape[1] // key.shape[1]  # query heads that share a key and value head
        stages |= {name: np.empty(shape, dtype=object) for name in ("raw_scores", "scores")}
        for b, h, i, j in np.ndindex(shape):
            if kind in ("dot", "scaled_dot"):
                stages["raw_scores"][b, h, i, j] = dot(query[b, h, i], key[b, h // group, j])
            stages["scores"][b, h, i, j] = score(
                kind, options.get("scale"), query[b, h, i], key[b, h // group, j], weights_of(kind, weights, h)
            )
    stages |= score_stages(options, inputs, stages["scores"])
    shape = stages["masked"].shape
    stages |= {"weights": np.empty(shape, dtype=object), "log_sum_exp": np.empty(shape[:3], dtype=object)}
    sinks = read(inputs["sinks"]) if "sinks" in inputs else None
    stages["sink weights"] = np.full(shape[:3], ZERO)
    for b, h, i in np.ndindex(shape[:3]):
        row = list(stages["masked"][b, h, i]) + ([] if sinks is None else [sinks[h]])
        weights_row, stages["log_sum_exp"][b, h, i] = softmax(row)
        if sinks is not None:
            stages["sink weights"][b, h, i] = weights_row.pop()
        for j, weight in enumerate(weights_row):
            stages["weights"][b, h, i, j] = weight
    if "value" in stages:
        value = whole["value"]
        context = stages["context"] = np.empty((*shape[:3], value.shape[3]), dtype=object)
        for b, h, i, c in np.ndindex(context.shape):
            context[b, h, i, c] = dot(stages["weights"][b, h, i], value[b, h // group, :, c])
        stages["output"] = project_back(context, inputs) if projected else context
    if operation == "attention_gradients":
        stages |= gradients(options, inputs, stages)
    return stages


def merged(options: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Parts of attention, weighed by b^L over the sum of these; an empty part is not even looked at."""
    outputs, totals = read(np.nan_to_num(inputs["outputs"].astype(np.float64))), read(inputs["log_sum_exps"])
    base = log(mpf(2)) if options.get("lse_base") == "2" else mpf(1)
    parts, *shape = totals.shape
    stages = {"weights": np.empty((*shape, parts), dtype=object), "log_sum_exp": np.empty(shape, dtype=object)}
    stages["output"] = np.empty((*shape, outputs.shape[-1]), dtype=object)
    for at in np.ndindex(*shape):
        own = totals[(slice(None), *at)]
        weights, total = softmax([each if each.value is None else each.times(base) for each in own])
        stages["log_sum_exp"][at] = total if total.value is None else Number(total.value / base, total.size)
        for number, weight in enumerate(weights):
            stages["weights"][(*at, number)] = weight
        for column in range(outputs.shape[-1]):
            members = [number for number, each in enumerate(own) if each.value is not None]
            chosen = [weights[number] for number in members], [outputs[(number, *at, column)] for number in members]
            stages["output"][(*at, column)] = dot(*chosen)
    return stages


def rotated(array: Array, name: str, options: Mapping[str, Any], inputs: Mapping[str, Array], sign: int = 1) -> Array:
    """Every pair of elements by the angle of its row; backwards with a sign of -1."""
    cos, sin = read(inputs[f"{name}_cos"]), read(inputs[f"{name}_sin"])
    turned, count = array.copy(), cos.shape[-1]
    for b, h, row in np.ndindex(array.shape[:3]):
        at = (b, 0, row) if cos.ndim > 2 else (row,)  # each batch entry may have rows of its own
        for c in range(count):
            one, other = (2 * c, 2 * c + 1) if options.get("rotary_interleaved") else (c, c + count)
            x, y = array[b, h, row, one], array[b, h, row, other]
            turned[b, h, row, one] = x * cos[(*at, c)] - (y * sin[(*at, c)]).times(sign)
            turned[b, h, row, other] = y * cos[(*at, c)] + (x * sin[(*at, c)]).times(sign)
    return turned


def normalized(array: Array, name: str, options: Mapping[str, Any], inputs: Mapping[str, Array]) -> Array:
    """The vectors of each head, or of all heads together, over their root mean square or their length."""
    found, epsilon = array.copy(), mpf(options["epsilon"])
    weight = read(inputs[f"{name}_norm"])
    for b, row in np.ndindex(array.shape[0], array.shape[2]):
        heads = range(array.shape[1])
        for group in [tuple(heads)] if options.get("norm_over") == "full" else [(head,) for head in heads]:
            squares = [x.value**2 for head in group for x in array[b, head, row]]
            if options.get("norm", "rms") == "rms":
                divisor = sqrt(sum(squares) / len(squares) + epsilon)
            else:
                divisor = max(sqrt(sum(squares)), epsilon)
            for head in group:
                for c, x in enumerate(array[b, head, row]):
                    found[b, head, row, c] = x.times(1 / divisor) * weight[head, c]
    return found


def made_of_latents(latents: Array, weight: Array) -> Array:
    """The keys or values of every head, with what is rotated behind them."""
    (batch, _, keys, width), (heads, rank, columns) = latents.shape, weight.shape
    found = np.empty((batch, heads, keys, columns + width - rank), dtype=object)
    for b, h, j in np.ndindex(found.shape[:3]):
        row = latents[b, 0, j]
        found[b, h, j, :columns] = [dot(row[:rank], column) for column in weight[h].T]
        found[b, h, j, columns:] = row[rank:]
    return found


def gradients(options: Mapping[str, Any], inputs: Mapping[str, Array], stages: Mapping[str, Array]) -> dict[str, Array]:
    """The chain rule, one product of numbers after the other."""
    weights, value = stages["weights"], stages["value"]
    query, key = (stages.get(f"rotated_{name}", stages[name]) for name in ("query", "key"))
    grad_output, group = read(inputs["grad_output"]), query.shape[1] // key.shape[1]
    width, cap = query.shape[3], options.get("softcap")
    scale = mpf(options["scale"]) if options.get("scale") is not None else 1 / sqrt(mpf(width))
    total = {f"grad_{name}": np.full(stages[name].shape, ZERO) for name in ("query", "key", "value")}
    if "bias" in inputs:
        total["grad_bias"] = np.full(inputs["bias"].shape, ZERO)
        places = np.broadcast_to(np.arange(inputs["bias"].size).reshape(inputs["bias"].shape), weights.shape)
    if "sinks" in inputs:
        total["grad_sinks"] = np.full(inputs["sinks"].shape, ZERO)
    for b, h, i in np.ndindex(weights.shape[:3]):
        row, shared = weights[b, h, i], h // group
        grad_weights = [dot(grad_output[b, h, i], value[b, shared, j]) for j in range(len(row))]
        mean = dot(row, grad_weights)
        if "sinks" in inputs:
            total["grad_sinks"][h] += (stages["sink weights"][b, h, i] * mean).times(-1)
        for j, weight in enumerate(row):
            gradient = weight * (grad_weights[j] - mean)
            for c in range(value.shape[3]):
                total["grad_value"][b, shared, j, c] += weight * grad_output[b, h, i, c]
            if "mask_fill" in options and is_forbidden(options, inputs, weights.shape, (b, h, i, j)):
                continue  # the score has no part in what stands there
            if "bias" in inputs:
                total["grad_bias"].ravel()[places[b, h, i, j]] += gradient
            if cap is not None:
                gradient = gradient.times(1 / cosh(stages["scores"][b, h, i, j].value / mpf(cap)) ** 2)
            for d in range(width):
                total["grad_query"][b, h, i, d] += (gradient * key[b, shared, j, d]).times(scale)
                total["grad_key"][b, shared, j, d] += (gradient * query[b, h, i, d]).times(scale)
    for name in ("query", "key"):
        if f"{name}_cos" in inputs:
            total[f"grad_{name}"] = rotated(total[f"grad_{name}"], name, options, inputs, -1)
    return total


SCORE_WEIGHTS = ("weight", "query_weight", "key_weight", "score_vector", "score_bias")


def elements(array: Array) -> Iterator[tuple[tuple[int, ...], Any]]:
    for at in np.ndindex(array.shape):
        yield at, array[at]


REGIMES: dict[str, Callable[[np.random.Generator, Array], Array]] = {
    "float64": lambda random, array: array * 10.0 ** random.uniform(-6, 1.5, array.shape),
    "float32": lambda random, array: 3 * array,
    "float16": lambda random, array: np.round(2 * array),
    "bfloat16": lambda random, array: 1 + array * 2.0**-8,
}
"""Numbers spread over magnitudes, large ones, small whole ones, and nearly equal ones, each in a dtype."""


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_agrees_with_mpmath(name: str) -> None:
    for seed, (dtype, change) in enumerate(REGIMES.items()):
        problem, random = draw(name, seed), np.random.default_rng(seed)
        drawn = {
            each: change(random, array) if array.dtype == np.float64 else array
            for each, array in problem.inputs.items()
        }
        first = {each: array[:1] if is_of_batch(each, array) else array for each, array in drawn.items()}
        problem = problem.with_inputs(**first).stored(dtype)
        is_merged = problem.operation == "merge_states"
        plain = (problem.operation, problem.options, problem.inputs) if is_merged else problem.laid_out()
        hold(*plain, f"{name} in {dtype}")


def is_of_batch(name: str, array: Array) -> bool:
    """Whether the first axis is that of both batch entries, of which one is enough."""
    return len(array) == 2 and (array.ndim > 2 or name in ("key_lengths", "query_offsets", "query_mask"))


def hold(operation: str, options: Mapping[str, Any], inputs: Mapping[str, Array], case: str) -> None:
    """Hold every stage of the oracle against the reference."""
    # All nodes of the chain, those included that the backends leave out because nothing asks for them.
    has_parts = operation == "merge_states"
    asked = set(computed_stages(operation, options, inputs))
    asked |= set() if has_parts or operation == "scoring" else {"masked"}
    problem = Problem(operation, options, inputs).canonical().inputs if has_parts else inputs
    got = exact_stages(Problem(operation, options, problem), [stage for stage in STAGES if stage in asked])
    with mp.workprec(200):
        truth = merged(options, inputs) if has_parts else reference(operation, options, inputs)
        for stage, enclosure in got.items():
            assert enclosure.shape == truth[stage].shape
            for at, number in elements(truth[stage]):
                high, low, radius = (float(part[at]) for part in (enclosure.high, enclosure.low, enclosure.radius))
                where = f"{case}, {stage}{list(at)}: {options}"
                if number.value is None:
                    assert (high, low, radius) == (-math.inf, 0, 0), where
                    continue
                error = abs(number.value - mpf(high) - mpf(low))
                # Below 2^-1072 float64 has no numbers; the radius is then the least that there is.
                assert error <= max(mpf(10) ** -25 * number.size, mpf(2) ** -1072), where
                assert radius <= max(1e-24 * number.size, mpf(2) ** -1072), where
                # mpmath's own rounding, at 200 bits, is not the oracle's.
                assert error <= radius + mpf(2) ** -180 * number.size, where
