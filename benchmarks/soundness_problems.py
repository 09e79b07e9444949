"""Random problems for the soundness campaign, each made from a seed and its number alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from soundness_regimes import GENERIC, MASKS, REGIMES, Dimensions, Random, Real, draw_mask

from attncheck.harness.reading.shapes import bind_axes, stage_shapes
from attncheck.harness.vocabulary import Shape, inputs_of

Inputs = dict[str, NDArray[Any]]

_POOL = 64
"""Shapes to draw from: JAX compiles every operation anew for each shape."""
_MANY_ENTRIES = 1 << 11
"""Shapes of more scores than this are rarer in proportion, for the oracle takes longer in proportion."""
_MOST_ENTRIES_ADDITIVE = 1 << 12  # the additive score has a hidden layer for every pair of query and key
_DECODING = Dimensions(B=1, H=2, Lq=1, Lk=37, D=12, Dv=20, E=96, Ek=53, Ev=64, Eo=80)
"""One query at a time, as a decoder asks: libraries take another way through their products for so few rows."""
_DECODING_SHARE = 0.1
_LARGE_SHARE = 0.005
_LARGE = (
    Dimensions(B=1, H=2, Lq=256, Lk=256, D=64, Dv=64, E=1, Ek=1, Ev=1, Eo=1),
    Dimensions(B=1, H=1, Lq=512, Lk=512, D=128, Dv=128, E=1, Ek=1, Ev=1, Eo=1),
)

_OPERATIONS = {
    "attention": 0.58,
    "softmax": 0.1,
    "masking": 0.05,
    "multi_head_attention": 0.15,
    "scaled_dot": 0.03,
    "dot": 0.03,
    "general": 0.03,
    "additive": 0.03,
}
"""How often each operation, or kind of score, is drawn."""
_SCORES = frozenset({"scaled_dot", "dot", "general", "additive"})


@dataclass(frozen=True, eq=False)
class Drawn:
    """One random problem; ``inputs`` in float64, masks boolean. ``generic`` tells whether statistics apply to it."""

    number: int
    operation: str
    options: Mapping[str, Any]
    inputs: Mapping[str, NDArray[Any]]
    regime: str
    mask: str

    @property
    def generic(self) -> bool:
        """Whether the numbers are continuous and unstructured."""
        return self.regime in GENERIC

    @property
    def kind(self) -> str:
        """The operation, and the kind of score where that is one's own."""
        return f"{self.operation} {self.options['score']}" if "score" in self.options else self.operation

    @property
    def stage_shapes(self) -> dict[str, Shape]:
        """The shape of every stage that may be returned."""
        specs = inputs_of(self.operation, self.options.get("score"))
        shapes = {name: array.shape for name, array in self.inputs.items()}
        return stage_shapes(self.operation, bind_axes(specs, shapes, self.options.get("heads")))

    def stored(self, dtype: str) -> Inputs:
        """Round the inputs once to a dtype."""
        return {
            name: array if array.dtype == bool else np.ascontiguousarray(array.astype(dtype))
            for name, array in self.inputs.items()
        }


def draw_problem(seed: int, number: int) -> Drawn:
    """Draw the problem of a number."""
    random = np.random.RandomState([seed, number])
    kind = str(random.choice(list(_OPERATIONS), p=list(_OPERATIONS.values())))
    regime = str(random.choice(list(REGIMES)))
    mask = str(random.choice(MASKS[1:] if kind == "masking" else MASKS))
    dims = _dimensions(kind, random, _pool(seed))
    if kind in _SCORES:
        return Drawn(number, "scoring", {"score": kind}, _scoring(kind, regime, random, dims), regime, "none")
    options: dict[str, Any] = {"is_causal": True} if mask == "causal" and kind != "softmax" else {}
    masks = draw_mask(mask, random, dims)
    if kind == "softmax":
        return Drawn(number, kind, {}, {"scores": _masked_scores(regime, mask, masks, random, dims)}, regime, mask)
    if kind == "masking":
        return Drawn(number, kind, options, {"scores": _scores(regime, random, dims), **masks}, regime, mask)
    if kind == "multi_head_attention":
        inputs = _projected(regime, random, dims)
        return Drawn(number, kind, options | {"heads": dims.H}, inputs | masks, regime, mask)
    if random.rand() < 0.15:
        options["scale"] = float(np.float32(random.uniform(-0.5, 2)))
    query, key, value = REGIMES[regime](random, dims)
    return Drawn(number, kind, options, {"query": query, "key": key, "value": value, **masks}, regime, mask)


@lru_cache(maxsize=4)
def _pool(seed: int) -> tuple[Dimensions, ...]:
    """Draw the shapes of a campaign, two given ones among them."""
    random = np.random.RandomState([seed])
    pool = [Dimensions(*(1,) * 10), _DECODING]
    while len(pool) < _POOL:
        batch, heads = random.choice([1, 1, 2, 3]), random.choice([1, 2, 2, 3])
        queries, keys = _lengths(random, 256)
        width, value_width = _lengths(random, 128)
        models = np.exp(random.uniform(0, math.log(96), 4)).round()
        dims = Dimensions(*(int(length) for length in (batch, heads, queries, keys, width, value_width, *models)))
        if random.rand() < _MANY_ENTRIES / dims.entries:
            pool.append(dims)
    return tuple(pool)


def _lengths(random: Random, most: int) -> tuple[int, int]:
    """Draw two lengths, log-uniform, mostly unlike each other: swapped axes hide where they are alike."""
    alike = random.rand() < 0.15
    while True:
        one, other = (int(length) for length in np.exp(random.uniform(0, math.log(most + 0.49), 2)).round())
        if alike:
            return one, one
        if one != other:
            return one, other


def _dimensions(kind: str, random: Random, pool: tuple[Dimensions, ...]) -> Dimensions:
    if kind == "attention" and random.rand() < _LARGE_SHARE:
        return _LARGE[random.randint(len(_LARGE))]
    if kind == "multi_head_attention" and random.rand() < _DECODING_SHARE:
        return _DECODING
    fitting = [dims for dims in pool if kind != "additive" or dims.entries <= _MOST_ENTRIES_ADDITIVE]
    return fitting[random.randint(len(fitting))]


def _scores(regime: str, random: Random, dims: Dimensions) -> Real:
    query, key, _ = REGIMES[regime](random, dims)
    scores: Real = query @ np.swapaxes(key, -1, -2) / math.sqrt(dims.D)
    return scores


def _masked_scores(regime: str, mask: str, masks: Inputs, random: Random, dims: Dimensions) -> Real:
    scores = _scores(regime, random, dims) + masks.get("bias", 0.0)
    allowed = np.tri(dims.Lq, dims.Lk, dtype=bool) if mask == "causal" else masks.get("mask", np.True_)
    masked: Real = np.where(allowed, scores, -np.inf)
    return masked


def _scoring(kind: str, regime: str, random: Random, dims: Dimensions) -> Inputs:
    query, key, _ = REGIMES[regime](random, dims)
    if kind in ("scaled_dot", "dot"):
        return {"query": query, "key": key}
    key = key[..., : dims.E]  # the key's own width, Dk
    key_width = key.shape[-1]
    if kind == "general":
        return {"query": query, "key": key, "weight": _weight(random, dims.D, key_width)}
    hidden = 1 + dims.Ek % 12
    inputs: Inputs = {
        "query": query,
        "key": key,
        "query_weight": _weight(random, dims.D, hidden),
        "key_weight": _weight(random, key_width, hidden),
        "score_vector": random.randn(hidden),
    }
    return inputs | {"score_bias": random.randn(hidden)} if random.rand() < 0.5 else inputs


def _projected(regime: str, random: Random, dims: Dimensions) -> Inputs:
    """Draw the inputs of multi-head attention; the regime is that of what is projected."""
    widest = max(dims.E, dims.Ek)
    outer = Dimensions(dims.B, 1, dims.Lq, dims.Lk, widest, dims.Ev, *(1,) * 4)
    query, key, value = (array[:, 0] for array in REGIMES[regime](random, outer))
    inputs: Inputs = {
        "query": query[..., : dims.E],
        "key": key[..., : dims.Ek],
        "value": value,
        "query_weight": _weight(random, dims.E, dims.H * dims.D),
        "key_weight": _weight(random, dims.Ek, dims.H * dims.D),
        "value_weight": _weight(random, dims.Ev, dims.H * dims.Dv),
    }
    biased, projected = random.rand(2) < 0.5
    size = 10 ** random.uniform(-1, 1)  # beside products of about 1; a library may begin its sums with the bias
    if biased:
        for name in ("query", "key", "value"):
            inputs[f"{name}_bias"] = size * random.randn(inputs[f"{name}_weight"].shape[1])
    if projected:
        inputs["output_weight"] = _weight(random, dims.H * dims.Dv, dims.Eo)
    if biased and projected:
        inputs["output_bias"] = size * random.randn(dims.Eo)
    return inputs


def _weight(random: Random, rows: int, columns: int) -> Real:
    weight: Real = random.randn(rows, columns) / math.sqrt(rows)
    return weight
