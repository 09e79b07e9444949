"""The arrays that a random problem works on, for every operation and kind of score."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from attncheck.searching.merging import draw_parts
from attncheck.searching.options import MASKS, Asked, Inputs, draw_mask, split_past
from attncheck.searching.regimes import REGIMES, raw_scores
from attncheck.searching.sequences import lay_out
from attncheck.searching.shapes import Dimensions, Random, Real
from attncheck.spec import BY_SCORE, PROJECTIONS

LOWERED = {
    "packed_attention": "",
    "packed_attention_gradients": "attention_gradients",
    "paged_attention": "",
    "quantized_attention": "",
    "normalized_attention": "",
    "latent_attention": "",
}
"""Operations of sequences, and what their operands are drawn as; none has a past."""
_GROUPED_PROJECTIONS = 0.5
"""Of shapes that have grouped heads."""
_SELF = 0.5
"""Of modules with as many queries as keys, so many attend to what they query."""
_LENGTHS = 0.05, 10.0
"""The largest number of a vector that has a cosine lies between: its square is a normal number in every dtype."""


def draw_operands(kind: str, regime: str, random: Random, dims: Dimensions, asked: Asked) -> Inputs:
    """Draw what an operation works on; heads and a past are further options."""
    match kind:
        case "softmax":
            return {"scores": _masked_scores(regime, random, dims, asked)}
        case "masking":
            return {"scores": _scores(regime, random, dims)}
        case "multi_head_attention" | "merge_states":
            return (draw_parts if kind == "merge_states" else _projected)(regime, random, dims, asked)
        case "attention" | "attention_gradients":
            return _attended(kind, regime, random, dims, asked)
    if kind in LOWERED:
        return lay_out(kind, random, _attended(LOWERED[kind], regime, random, dims, asked), asked)
    scored = _scored(kind.removesuffix("_attention"), regime, random, dims)
    return scored | {"value": REGIMES[regime](random, dims)[-1]} if kind in BY_SCORE else scored


def _attended(kind: str, regime: str, random: Random, dims: Dimensions, asked: Asked) -> Inputs:
    inputs: Inputs = dict(zip(PROJECTIONS, REGIMES[regime](random, dims), strict=True))
    if dims.Hkv < dims.H:
        asked.names.append("grouped")
    if kind == "attention_gradients":
        *_, grad_output = REGIMES[regime](random, replace(dims.ungrouped, Lk=dims.Lq))
        return inputs | {"grad_output": grad_output}
    if kind == "attention":
        inputs, has_past = split_past(inputs, random)
        if has_past:
            asked.names.append("past")
    return inputs


def _scores(regime: str, random: Random, dims: Dimensions) -> Real:
    query, key, _ = REGIMES[regime](random, dims)
    return raw_scores(query, key) / math.sqrt(dims.D)


def _masked_scores(regime: str, random: Random, dims: Dimensions, asked: Asked) -> Real:
    mask = str(random.choice(MASKS))
    asked.names.append(mask)
    masks = draw_mask(mask, random, dims)
    scores = _scores(regime, random, dims) + masks.get("bias", 0.0)
    allowed = np.tri(dims.Lq, dims.Lk, dtype=bool) if mask == "causal" else masks.get("mask", np.True_)
    masked: Real = np.where(allowed, scores, -np.inf)
    return masked


def _scored(kind: str, regime: str, random: Random, dims: Dimensions) -> Inputs:
    query, key, _ = REGIMES[regime](random, dims)
    if kind == "cosine":  # of a vector of length 0 there is none
        return {"query": _with_length(query), "key": _with_length(key)}
    if kind in ("scaled_dot", "dot"):
        return {"query": query, "key": key}
    key = key[..., : dims.E]  # the key's own width, Dk
    key_width = key.shape[-1]
    if kind == "general":
        inputs = {"query": query, "key": key, "weight": _weight(random, dims.D, key_width)}
        bias = random.randn(query.shape[1] if random.rand() < 0.5 else 1)
        return inputs | {"score_bias": bias} if random.rand() < 0.5 else inputs
    hidden = 1 + dims.Ek % 12
    inputs = {
        "query": query,
        "key": key,
        "query_weight": _weight(random, dims.D, hidden),
        "key_weight": _weight(random, key_width, hidden),
        "score_vector": random.randn(hidden),
    }
    return inputs | {"score_bias": random.randn(hidden)} if random.rand() < 0.5 else inputs


def _with_length(vectors: Real) -> Real:
    """Give vectors a length that no dtype loses, (..., L, 1), by their own direction; those of zeros become ones.

    Of vectors of ones in their place, rounding errors would all be the same, and no statistics.
    """
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    has_length = (largest > _LENGTHS[0]) & (largest < _LENGTHS[1])
    turned = np.divide(vectors, largest, out=np.ones_like(vectors), where=largest > 0)
    return np.where(has_length, vectors, turned)


def _projected(regime: str, random: Random, dims: Dimensions, asked: Asked) -> Inputs:
    """Draw the inputs of multi-head attention; the regime is that of what is projected."""
    asked.options["heads"], shared = dims.H, dims.H
    if dims.Hkv < dims.H and random.rand() < _GROUPED_PROJECTIONS:
        asked.options["kv_heads"] = shared = dims.Hkv
        asked.names.append("grouped")
    outer = Dimensions(dims.B, 1, dims.Lq, dims.Lk, max(dims.E, dims.Ek), dims.Ev, *(1,) * 5)
    query, key, value = (array[:, 0] for array in REGIMES[regime](random, outer))
    is_self = dims.is_module and dims.Lq == dims.Lk and random.rand() < _SELF
    if is_self:
        key = value = query
    inputs: Inputs = {
        **dict(zip(PROJECTIONS, (query[..., : dims.E], key[..., : dims.Ek], value), strict=True)),
        "query_weight": _weight(random, dims.E, dims.H * dims.D),
        "key_weight": _weight(random, dims.Ek, shared * dims.D),
        "value_weight": _weight(random, dims.Ev, shared * dims.Dv),
    }
    if not is_self:
        _split_cache(inputs, random, (dims.B, shared, dims.D, dims.Dv), asked)
    biased, projected = random.rand(2) < 0.5
    projected = projected or dims.is_module
    size = 10 ** random.uniform(-1, 1)  # beside products of about 1; a library may begin its sums with the bias
    if biased:
        for name in PROJECTIONS:
            inputs[f"{name}_bias"] = size * random.randn(inputs[f"{name}_weight"].shape[1])
    if projected:
        inputs["output_weight"] = _weight(random, dims.H * dims.Dv, dims.Eo)
    if biased and projected:
        inputs["output_bias"] = size * random.randn(dims.Eo)
    return inputs


def _split_cache(inputs: Inputs, random: Random, shape: tuple[int, int, int, int], asked: Asked) -> None:
    """Put, seldom, a cache of projected keys and values in the place of the first half of what is projected."""
    parts, has_past = split_past(inputs, random)
    if not has_past:
        return
    batch, heads, width, value_width = shape
    past = parts["past_key"].shape[-2]
    inputs |= {name: parts[name] for name in ("key", "value")}
    inputs["past_key"] = random.randn(batch, heads, past, width)
    inputs["past_value"] = random.randn(batch, heads, past, value_width)
    asked.names.append("past")


def _weight(random: Random, rows: int, columns: int) -> Real:
    weight: Real = random.randn(rows, columns) / math.sqrt(rows)
    return weight
