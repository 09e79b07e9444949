"""How far an exact result moves when every input moves by its radius: the allowance for printed, rounded inputs.

A document that prints its inputs rounded computed with other numbers than it shows; so does a float32 run of a float64
document. Each input x then stands for any x' with |x' - x| <= r. For every stage this module gives a radius R such that
the exact stage of x' differs from the exact stage of x by at most R:

    product      |x'y' - xy| <= |x| ry + rx |y| + rx ry, summed over the inner axis
    sum, scale   radii add; |a| r
    tanh         |tanh z' - tanh z| <= min(r, 2), its slope being at most 1; c tanh(z / c) moves by at most min(r, 2 c)
    cosine       |x' / |x'| - x / |x|| <= 2 |r| / |x| in the norms of vectors; a product of two unit vectors moves by at
                 most the sum of what they move by, and by at most 2
    softmax      with |s' - s| <= d per score, p'_j is largest where s_j rises by d_j and every other score falls by its
                 own d_l, and smallest the other way round; with O_j(x) the sum of x_l over l != j, it moves
                 up by at most    p_j [ O_j(p) (e^(d_j) - 1) + O_j(p (1 - e^-d)) ] / (p_j e^(d_j) + O_j(p e^-d))
                 down by at most  p_j [ O_j(p) (1 - e^(-d_j)) + O_j(p (e^d - 1)) ] / (p_j e^(-d_j) + O_j(p e^d))
                 and both are reached; R is the larger of the two
    log_sum_exp  at most log sum_j p_j e^(d_j); downwards it is -log sum_j p_j e^(-d_j), which is never more, as
                 (sum_j p_j e^(d_j)) (sum_j p_j e^(-d_j)) >= 1

The formulas hold for radii of any size, not to first order; they are evaluated in float64, whose own rounding is far
below any digit that a document prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.canonical import canonical_form
from attncheck.reading.inputs import Inputs

Real = NDArray[np.float64]

PROPAGATED = frozenset({"scoring", "softmax", "masking", "attention", "multi_head_attention"})
"""Operations whose results may be given as numbers."""

_LARGEST_EXPONENT = 600.0
"""e^600, and a sum of many such terms, are numbers of float64; a weight that may grow to it may as well become 1."""
_MIN_TOTAL = 1e-290
"""Sums below have lost terms to underflow."""


@dataclass(frozen=True)
class Ball:
    """Values and, per element, the radius around them; an infinite value has radius 0."""

    value: Real
    radius: Real

    def __add__(self, other: Ball) -> Ball:
        value = self.value + other.value
        return Ball(value, np.where(np.isinf(value), 0, self.radius + other.radius))

    def __matmul__(self, other: Ball) -> Ball:
        radius = np.abs(self.value) @ other.radius + self.radius @ (np.abs(other.value) + other.radius)
        return Ball(self.value @ other.value, radius)

    def scaled(self, factor: float) -> Ball:
        """Multiply by an exact number."""
        return Ball(self.value * factor, self.radius * abs(factor))

    def with_last_axes_swapped(self) -> Ball:
        """Transpose the matrices."""
        return Ball(np.swapaxes(self.value, -1, -2), np.swapaxes(self.radius, -1, -2))

    def reshaped(self, *shape: int) -> Ball:
        """Change the shape of values and radii alike."""
        return Ball(self.value.reshape(shape), self.radius.reshape(shape))

    def with_heads(self, heads: int) -> Ball:
        """Give every query head the key or value head that its group shares."""
        value, radius = (np.repeat(each, heads // each.shape[-3], axis=-3) for each in (self.value, self.radius))
        return Ball(value, radius)

    def with_axes_swapped(self, first: int, second: int) -> Ball:
        """Swap two axes of values and radii alike."""
        return Ball(np.swapaxes(self.value, first, second), np.swapaxes(self.radius, first, second))


def propagate(operation: str, options: Mapping[str, Any], inputs: Inputs) -> dict[str, Ball]:
    """Return every stage of the operation as balls, from inputs with their radii; gradients have none."""
    if operation not in PROPAGATED:
        raise AssertionError(f"no propagation for the operation {operation}")
    posed = canonical_form(operation, options, inputs.arrays)
    balls = {
        name: Ball(array.astype(np.float64), _radius(inputs, name))
        for name, array in posed.inputs.items()
        if array.dtype != bool
    }
    # What a query without a key gives is no part of a problem in essential form.
    options, mask = {**posed.options, "empty_rows": options.get("empty_rows")}, posed.inputs.get("mask")
    with np.errstate(all="ignore"):
        match operation:
            case "scoring":
                return _scoring(balls, options)
            case "softmax":
                return _softmax(balls["scores"], options)
            case "masking":
                return _masking(balls["scores"], balls.get("bias"), mask, options)
            case "attention":
                return _attention(balls["query"], balls["key"], balls["value"], balls.get("bias"), mask, options)
            case _:
                return _multi_head_attention(balls, mask, options)


def _radius(inputs: Inputs, name: str) -> Real:
    """Return the radii of an input, those of the past in front."""
    own, past = inputs.radius[name], inputs.radius.get(f"past_{name}")
    return own if past is None else np.concatenate([past, own], axis=-2)


def _scoring(balls: Mapping[str, Ball], options: Mapping[str, Any]) -> dict[str, Ball]:
    query, key = balls["query"], balls["key"]
    match options.get("score", "scaled_dot"):
        case "general":
            return {"scores": query @ balls["weight"] @ key.with_last_axes_swapped()}
        case "additive":
            return {"scores": _additive(balls)}
        case "cosine":
            return {"scores": _cosine(query, key).scaled(options.get("scale", 1.0))}
        case "dot":
            return _dot(query, key, {"scale": 1.0, **options})
    return _dot(query, key, options)


def _dot(query: Ball, key: Ball, options: Mapping[str, Any]) -> dict[str, Ball]:
    raw_scores = query @ key.with_last_axes_swapped()
    scale, softcap = options.get("scale"), options.get("softcap")
    scores = raw_scores.scaled(1 / math.sqrt(query.value.shape[-1]) if scale is None else scale)
    stages = {"raw_scores": raw_scores, "scores": scores}
    if softcap is not None:
        capped = softcap * np.tanh(scores.value / softcap)
        stages["capped"] = Ball(capped, np.minimum(scores.radius, 2 * softcap))
    return stages


def _cosine(query: Ball, key: Ball) -> Ball:
    (query_unit, query_moved), (key_unit, key_moved) = _unit_rows(query), _unit_rows(key)
    moved = query_moved[..., :, None] + key_moved[..., None, :]
    return Ball(query_unit @ np.swapaxes(key_unit, -1, -2), np.minimum(moved, 2))


def _unit_rows(vectors: Ball) -> tuple[Real, Real]:
    """Return each row at length 1, and how far it moves at most."""
    lengths = np.linalg.norm(vectors.value, axis=-1)
    return vectors.value / lengths[..., None], 2 * np.linalg.norm(vectors.radius, axis=-1) / lengths


def _additive(balls: Mapping[str, Ball]) -> Ball:
    query_part, key_part = balls["query"] @ balls["query_weight"], balls["key"] @ balls["key_weight"]
    hidden = Ball(
        query_part.value[..., :, None, :] + key_part.value[..., None, :, :],
        query_part.radius[..., :, None, :] + key_part.radius[..., None, :, :],
    )
    if "score_bias" in balls:
        hidden = hidden + balls["score_bias"]
    return Ball(np.tanh(hidden.value), np.minimum(hidden.radius, 2)) @ balls["score_vector"]


def _masking(scores: Ball, bias: Ball | None, mask: NDArray[Any] | None, options: Mapping[str, Any]) -> dict[str, Ball]:
    stages: dict[str, Ball] = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    allowed = np.ones(scores.value.shape, dtype=bool) if mask is None else np.broadcast_to(mask, scores.value.shape)
    if options.get("is_causal"):
        allowed = allowed & np.tri(*scores.value.shape[-2:], dtype=np.bool_)
    if mask is not None or options.get("is_causal"):
        stages["masked"] = Ball(np.where(allowed, scores.value, -np.inf), np.where(allowed, scores.radius, 0))
    return stages


def _softmax(scores: Ball, options: Mapping[str, Any]) -> dict[str, Ball]:
    attended = scores.value > -np.inf
    maximum = scores.value.max(axis=-1, keepdims=True, initial=-np.inf)
    empty = maximum == -np.inf
    shifted = scores.value - np.where(empty, 0, maximum)
    total = np.where(empty, 1, np.exp(shifted).sum(axis=-1, keepdims=True))
    weights = np.exp(shifted) / total
    log_sum_exp = np.where(np.isinf(maximum), maximum, maximum + np.log(total))[..., 0]
    # The logarithm of a weight is a number where the weight itself is too small for float64.
    log_weights = shifted - np.log(total)
    radius = np.where(attended, scores.radius, 0)
    moved = np.where(attended, _weight_radius(weights, log_weights, radius), 0)
    moved_sum = np.where(np.isinf(log_sum_exp), 0, _log_sum_radius(weights, log_weights, radius))
    of_empty = {"uniform": 1 / max(weights.shape[-1], 1), "nan": np.nan}.get(str(options.get("empty_rows")), 0.0)
    weights = np.where(empty, of_empty, weights)  # which no rounding of the scores moves
    return {"weights": Ball(weights, moved), "log_sum_exp": Ball(log_sum_exp, moved_sum)}


def _weight_radius(weights: Real, log_weights: Real, radius: Real) -> Real:
    """Return how far each weight moves at most, one way or the other."""
    grown, shrunk = _grown(weights, log_weights, radius), -weights * np.expm1(-radius)
    most, least = weights + grown, np.exp(log_weights - radius)
    rest = _sum_of_others(weights)
    up_total, down_total = most + _sum_of_others(least), least + _sum_of_others(most)
    up = (rest * grown + weights * _sum_of_others(shrunk)) / up_total
    down = (rest * shrunk + weights * _sum_of_others(grown)) / down_total
    # Where all of a row can become too small for float64, the weight may become anything between 0 and 1.
    lost = np.minimum(up_total, down_total) < _MIN_TOTAL
    return np.where(lost, np.maximum(weights, rest), np.maximum(up, down))


def _log_sum_radius(weights: Real, log_weights: Real, radius: Real) -> Real:
    row_grown = _grown(weights, log_weights, radius).sum(axis=-1)
    logarithms = log_weights + radius
    largest = logarithms.max(axis=-1, keepdims=True, initial=-np.inf)
    log_total = largest[..., 0] + np.log(np.exp(logarithms - largest).sum(axis=-1))
    # Near 1 the logarithm of the sum loses the digits that log1p keeps; far from it the sum itself may overflow.
    moved: Real = np.where(row_grown < 1, np.log1p(row_grown), log_total)
    return moved


def _grown(weights: Real, log_weights: Real, radius: Real) -> Real:
    """Return p (e^d - 1), where p itself may be too small for float64, and e^d too large."""
    most = np.exp(np.minimum(log_weights + radius, _LARGEST_EXPONENT))
    return np.where(radius < 1, weights * np.expm1(radius), most - weights)


def _sum_of_others(terms: Real) -> Real:
    """Return, for each element of a row, the sum of all others; row sum less element would cancel."""
    before, after = np.zeros_like(terms), np.zeros_like(terms)
    before[..., 1:] = np.cumsum(terms[..., :-1], axis=-1)
    after[..., :-1] = np.cumsum(terms[..., :0:-1], axis=-1)[..., ::-1]
    return before + after


def _attention(
    query: Ball, key: Ball, value: Ball, bias: Ball | None, mask: NDArray[Any] | None, options: Mapping[str, Any]
) -> dict[str, Ball]:
    heads = query.value.shape[-3]
    stages = _dot(query, key.with_heads(heads), options)
    *_, scores = stages.values()  # the last stage that was asked for
    stages |= _masking(scores, bias, mask, options)
    *_, logits = stages.values()
    stages |= _softmax(logits, options)
    stages["output"] = stages["weights"] @ value.with_heads(heads)
    return stages


def _multi_head_attention(
    balls: Mapping[str, Ball], mask: NDArray[Any] | None, options: Mapping[str, Any]
) -> dict[str, Ball]:
    stages: dict[str, Ball] = {}
    kv_heads = options.get("kv_heads") or options["heads"]
    for name, heads in (("query", options["heads"]), ("key", kv_heads), ("value", kv_heads)):
        projected = _project(balls[name], balls[f"{name}_weight"], balls.get(f"{name}_bias"))
        batch, length, width = projected.value.shape
        # (B, L, H*D) -> (B, H, L, D)
        stages[name] = projected.reshaped(batch, length, heads, width // heads).with_axes_swapped(1, 2)
    stages |= _attention(stages["query"], stages["key"], stages["value"], balls.get("bias"), mask, options)
    context = stages["context"] = stages.pop("output")
    batch, heads, length, width = context.value.shape
    merged = context.with_axes_swapped(1, 2).reshaped(batch, length, heads * width)  # (B, H, L, D) -> (B, L, H*D)
    weight = balls.get("output_weight")
    stages["output"] = merged if weight is None else _project(merged, weight, balls.get("output_bias"))
    return stages


def _project(inputs: Ball, weight: Ball, bias: Ball | None) -> Ball:
    projected = inputs @ weight
    return projected if bias is None else projected + bias
