"""The oracle against the papers' formulas, written once more with arrays of mpmath numbers of 200 bits.

Nothing here is the oracle's: other numbers, other formulas, another library. Every number carries the sum of the
absolute terms that it is made of, its ``size``; agreement is to 1e-25 of that, and to the oracle's own proven radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mpmath import cosh, exp, log, mp, mpf, sqrt, tanh
from problems import NAMES, Array, Problem, draw

from attncheck.attention.oracle import enclose_exact_stages
from attncheck.spec import STAGES, computed_stages, score_kind


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
        return self if self.value is None else Number(self.value * factor, self.size * abs(factor))


ZERO, MINUS_INFINITY = Number(mpf(0), mpf(0)), Number(None, mpf(0))
read = np.frompyfunc(
    lambda stored: MINUS_INFINITY if stored == -math.inf else Number(mpf(float(stored)), abs(mpf(float(stored)))), 1, 1
)
times = np.frompyfunc(Number.times, 2, 1)
values_of = np.frompyfunc(lambda number: number.value, 1, 1)
root = np.frompyfunc(sqrt, 1, 1)
sigmoid = np.frompyfunc(lambda number: 1 / (1 + exp(-number.value)), 1, 1)


def turned(array: Array) -> Array:
    return np.swapaxes(array, -1, -2)


def scores_of(kind: str, scale: Any, query: Array, key: Array, given: Mapping[str, Array]) -> dict[str, Array]:
    if kind == "general":
        product = query @ given["weight"] @ turned(key)
        return {"scores": product + given["score_bias"][:, None, None] if "score_bias" in given else product}
    if kind == "additive":
        hidden = (query @ given["query_weight"])[..., None, :] + (key @ given["key_weight"])[..., None, :, :]
        hidden = hidden + given["score_bias"] if "score_bias" in given else hidden
        bent = np.frompyfunc(lambda number: Number(tanh(number.value), min(number.size, 1)), 1, 1)(hidden)
        return {"scores": bent @ given["score_vector"]}
    raw = query @ turned(key)
    if kind == "cosine":
        lengths = [root((values_of(each) ** 2).sum(-1, keepdims=True)) for each in (query, key)]
        return {"scores": times(raw, (mpf(1) if scale is None else mpf(scale)) / (lengths[0] * turned(lengths[1])))}
    if scale is None:
        scale = 1 / sqrt(query.shape[-1]) if kind == "scaled_dot" else 1
    return {"raw_scores": raw, "scores": times(raw, factor_of(mpf(scale), given))}


def factor_of(scale: Any, given: Mapping[str, Array]) -> Any:
    return values_of(given["head_scale"])[:, None, None] if "head_scale" in given else scale


def softmax(logits: Array) -> tuple[Array, Array]:
    weights, totals = np.full(logits.shape, ZERO), np.full(logits.shape[:-1], MINUS_INFINITY)
    for at in np.ndindex(totals.shape):
        members = [number.value for number in logits[at] if number.value is not None]
        if members:
            powers = [mpf(0) if x.value is None else exp(x.value - max(members)) for x in logits[at]]
            weights[at] = [Number(power / sum(powers), power / sum(powers)) for power in powers]
            total = max(members) + log(sum(powers))
            totals[at] = Number(total, max(mpf(1), abs(total)))
    return weights, totals


def rotated(array: Array, name: str, problem: Problem, given: Mapping[str, Array], sign: int = 1) -> Array:
    """Every pair of elements by the angle of its row; backwards with a sign of -1."""
    cos, sin = given[f"{name}_cos"], given[f"{name}_sin"]
    found, count = array.copy(), cos.shape[-1]
    neighbours = np.s_[..., : 2 * count : 2], np.s_[..., 1 : 2 * count : 2]
    halves = np.s_[..., :count], np.s_[..., count : 2 * count]
    one, other = neighbours if problem.options.get("rotary_interleaved") else halves
    found[one] = array[one] * cos - times(array[other] * sin, sign)
    found[other] = array[other] * cos + times(array[one] * sin, sign)
    return found


def normalized(array: Array, name: str, problem: Problem, given: Mapping[str, Array]) -> Array:
    """The vectors of each head, or of all heads together, over their root mean square or their length."""
    options, epsilon = problem.options, mpf(problem.options["epsilon"])
    squares, over = values_of(array) ** 2, (1, 3) if options.get("norm_over") == "full" else 3
    total, count = squares.sum(over, keepdims=True), squares.size // squares.sum(over).size
    is_mean = options.get("norm", "rms") == "rms"
    divisor = root(total / count + epsilon) if is_mean else np.maximum(root(total), epsilon)
    return np.asarray(times(array, 1 / divisor) * given[f"{name}_norm"][:, None])


def laid_out(problem: Problem, given: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the stages before the scores; and query, keys and values as the scores take them."""
    options, whole, heads = problem.options, {}, {"query": problem.options.get("heads")}
    stages = {name: given[name] for name in ("query", "key", "value") if name in given}
    if problem.operation == "multi_head_attention":
        for name in stages:  # head h has the columns from h D to (h + 1) D
            projected = stages[name] @ given[f"{name}_weight"]
            projected = projected + given[f"{name}_bias"] if f"{name}_bias" in given else projected
            count = heads.get(name) or options.get("kv_heads", options["heads"])
            stages[name] = np.moveaxis(projected.reshape(*projected.shape[:2], count, -1), 2, 1)
    for name, array in stages.items():
        rows = np.concatenate([given[f"cached_{name}"], array], 2) if f"cached_{name}" in given else array
        rows = rows * given[f"{name}_factor"] if f"{name}_factor" in given else rows
        if (weight := given.get(f"{name}_projection")) is not None:
            rank, copies = weight.shape[1], (len(rows), len(weight), rows.shape[2], rows.shape[3] - weight.shape[1])
            rows = np.concatenate([rows[..., :rank] @ weight, np.broadcast_to(rows[..., rank:], copies)], -1)
        whole[name] = rows
    steps: list[tuple[str, str, Callable[..., Array]]] = [
        ("norm", "normalized", normalized),
        ("cos", "rotated", rotated),
    ]
    made = {}
    for suffix, stage, step in reversed(steps) if options.get("norm_after_rotation") else steps:
        for name in ("query", "key"):
            if f"{name}_{suffix}" in given:
                whole[name] = made[f"{stage}_{name}"] = step(whole[name], name, problem, given)
    return stages | made, whole


def reference(problem: Problem) -> dict[str, Array]:
    """Every stage as an array of numbers, from the formulas of the papers."""
    operation, options, inputs = problem.operation, problem.options, problem.inputs
    given = {name: read(array) for name, array in inputs.items() if array.dtype != bool}
    stages, whole = laid_out(problem, given)
    if "query" in whole:
        for name in {"key", "value"} & whole.keys():  # query heads that share a key and value head
            whole[name] = np.repeat(whole[name], whole["query"].shape[1] // whole[name].shape[1], axis=1)
        kind = score_kind(operation, options)
        stages |= scores_of(kind, options.get("scale"), whole["query"], whole["key"], given)
    else:
        stages["scores"] = given["scores"]
    scores, cap = stages["scores"], options.get("softcap")
    capped = np.frompyfunc(lambda number: Number(mpf(cap) * tanh(number.value / mpf(cap)), number.size), 1, 1)
    stages["capped"] = scores if cap is None else capped(scores)
    stages["biased"] = stages["capped"] + given["bias"] if "bias" in given else stages["capped"]
    fill = MINUS_INFINITY if options.get("mask_fill") is None else read(options["mask_fill"])
    allowed = np.broadcast_to(inputs.get("mask", np.True_), scores.shape)
    allowed = allowed & np.tri(*scores.shape[2:], dtype=bool) if options.get("is_causal") else allowed
    stages["masked"] = np.where(allowed, stages["biased"], fill)
    logits, keys = stages["masked"], scores.shape[-1]
    if "sinks" in given:
        sinks = np.broadcast_to(given["sinks"][:, None, None], (*scores.shape[:3], 1))
        logits = np.concatenate([logits, sinks], -1)
    weights, stages["log_sum_exp"] = softmax(logits)
    stages["weights"] = weights[..., :keys]
    if "value" in whole:
        stages["context"] = stages["output"] = stages["weights"] @ whole["value"]
    if "gate" in given and "value" in whole:
        stages["output"] = times(stages["context"], sigmoid(given["gate"]))
    if operation == "multi_head_attention":
        merged = np.moveaxis(stages["context"], 1, 2)
        stages["output"] = merged.reshape(*merged.shape[:2], -1)
        if "output_weight" in given:
            stages["output"] = stages["output"] @ given["output_weight"] + given["output_bias"]
    if operation == "attention_gradients":
        stages |= gradients(problem, given, stages, whole, weights, allowed)
    return stages


def gradients(
    problem: Problem,
    given: Mapping[str, Array],
    stages: Mapping[str, Array],
    whole: Mapping[str, Array],
    weights: Array,
    allowed: Array,
) -> dict[str, Array]:
    """The chain rule, one product of arrays after the other."""
    options, keys = problem.options, stages["weights"].shape[-1]
    scale = mpf(options["scale"]) if options.get("scale") is not None else 1 / sqrt(mpf(whole["query"].shape[-1]))
    scale = factor_of(scale, given)

    def shared(each: Array, name: str) -> Array:
        """Add up the heads that share a key and value head."""
        return np.asarray(each.reshape(len(each), given[name].shape[1], -1, *each.shape[2:]).sum(axis=2))

    grad_output = given["grad_output"]
    if "gate" in given:
        grad_output = times(grad_output, sigmoid(given["gate"]))
    grad_weights = grad_output @ turned(whole["value"])
    mean = (stages["weights"] * grad_weights).sum(-1, keepdims=True)
    gradient = stages["weights"] * (grad_weights - mean)
    found = {"grad_value": shared(turned(stages["weights"]) @ grad_output, "value")}
    if "gate" in given:
        found["grad_gate"] = times(grad_output * stages["context"], sigmoid(times(given["gate"], -1)))
    if "sinks" in given:
        found["grad_sinks"] = times((weights[..., keys:] * mean).sum((0, 2, 3)), -1)
    if "mask_fill" in options:  # the score has no part in what stands there
        gradient = np.where(allowed, gradient, ZERO)
    if "bias" in given:
        axes = tuple(axis for axis, length in enumerate(given["bias"].shape) if length == 1)
        found["grad_bias"] = gradient.sum(axes, keepdims=True)
    if (cap := options.get("softcap")) is not None:
        slope = np.frompyfunc(lambda score: 1 / cosh(score.value / mpf(cap)) ** 2, 1, 1)
        gradient = times(gradient, slope(stages["scores"]))
    found["grad_query"] = times(gradient @ whole["key"], scale)
    found["grad_key"] = shared(times(turned(gradient) @ whole["query"], scale), "key")
    for name in ("query", "key"):
        if f"{name}_cos" in given:
            found[f"grad_{name}"] = rotated(found[f"grad_{name}"], name, problem, given, -1)
    return found


def merged(problem: Problem) -> dict[str, Array]:
    """Parts of attention, weighed by b^L over the sum of these; an empty part has no weight, whatever it holds."""
    outputs, totals = (np.moveaxis(read(problem.inputs[name]), 0, -1) for name in ("outputs", "log_sum_exps"))
    base = log(mpf(2)) if problem.options.get("lse_base") == "2" else mpf(1)
    weights, total = softmax(times(totals, base))
    rescaled = np.frompyfunc(
        lambda number: number if number.value is None else Number(number.value / base, number.size), 1, 1
    )
    output = (outputs * weights[..., None, :]).sum(-1)
    return {"weights": weights, "log_sum_exp": rescaled(total), "output": output}


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
        hold(problem if problem.operation == "merge_states" else problem.laid_out(), f"{name} in {dtype}")


def is_of_batch(name: str, array: Array) -> bool:
    """Whether the first axis is that of both batch entries, of which one is enough."""
    return len(array) == 2 and (array.ndim > 2 or name in ("key_lengths", "query_offsets", "query_mask"))


def hold(problem: Problem, case: str) -> None:
    """Hold every stage of the oracle against the reference, those that backends leave out included."""
    has_parts = problem.operation == "merge_states"
    asked = set(computed_stages(problem.operation, problem.options, problem.inputs))
    asked |= set() if has_parts or problem.operation == "scoring" else {"masked"}
    got = enclose_exact_stages(
        problem.canonical() if has_parts else problem, [stage for stage in STAGES if stage in asked]
    )
    least = mpf(2) ** -1072  # below it float64 has no numbers; the radius is then the least that there is
    with mp.workprec(200):
        truth = merged(problem) if has_parts else reference(problem)
        for stage, enclosure in got.items():
            assert enclosure.shape == truth[stage].shape
            for at in np.ndindex(enclosure.shape):
                number, where = truth[stage][at], f"{case}, {stage}{list(at)}: {problem.options}"
                high, low, radius = (float(part[at]) for part in (enclosure.high, enclosure.low, enclosure.radius))
                if number.value is None:
                    assert (high, low, radius) == (-math.inf, 0, 0), where
                    continue
                error = abs(number.value - mpf(high) - mpf(low))
                assert error <= max(mpf(10) ** -25 * number.size, least), where
                assert radius <= max(1e-24 * number.size, least), where
                # mpmath's own rounding, at 200 bits, is not the oracle's.
                assert error <= radius + mpf(2) ** -180 * number.size, where
