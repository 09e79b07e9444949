"""The regimes of values: what the numbers of a random problem look like.

Each regime draws a query (B, H, Lq, D), a key (B, Hkv, Lk, D) and a value (B, Hkv, Lk, Dv) in float64. ``GENERIC`` are
those whose rounding errors behave like noise; the others are structured: their errors agree with each other, and
statistics do not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from attncheck.searching.shapes import Dimensions, Random, Real

Triple: TypeAlias = tuple[Real, Real, Real]


def raw_scores(query: Real, key: Real) -> Real:
    """Return q k^T (B, H, Lq, Lk), each key head shared by its group of query heads."""
    groups = query.shape[1] // key.shape[1]
    scores: Real = query @ np.repeat(key, groups, axis=1).swapaxes(-1, -2)
    return scores


def _normal(random: Random, dims: Dimensions) -> Triple:
    return (
        random.randn(dims.B, dims.H, dims.Lq, dims.D),
        random.randn(dims.B, dims.Hkv, dims.Lk, dims.D),
        random.randn(dims.B, dims.Hkv, dims.Lk, dims.Dv),
    )


def _uniform(random: Random, dims: Dimensions) -> Triple:
    low = random.choice([-1.0, 0.0])
    query, key, value = (random.uniform(low, 1, array.shape) for array in _normal(random, dims))
    return query, key, value


def _peaky(random: Random, dims: Dimensions) -> Triple:
    query, key, value = _normal(random, dims)
    return query * random.uniform(4, 30), key, value


def _logits_80(random: Random, dims: Dimensions) -> Triple:
    query, key, value = _normal(random, dims)
    largest = np.abs(raw_scores(query, key)).max() / math.sqrt(dims.D)
    return query * (80 / largest), key, value


def _tiny(random: Random, dims: Dimensions) -> Triple:
    """Products that underflow in float32, and weights that are nearly uniform."""
    query, key, value = (array * 10 ** random.uniform(-25, -2) for array in _normal(random, dims))
    return query, key, value


def _cancelling(random: Random, dims: Dimensions) -> Triple:
    """Columns in pairs whose products cancel except for a small part."""
    query, key, value = _normal(random, dims)
    half = dims.D // 2
    query[..., half : 2 * half] = query[..., :half]
    key[..., half : 2 * half] = -key[..., :half] * (1 + 1e-3 * random.randn(*key[..., :half].shape))
    return query * 10 ** random.uniform(0, 2), key, value


def _common_offset(random: Random, dims: Dimensions) -> Triple:
    """One column whose product adds nearly the same large number to every logit."""
    query, key, value = _normal(random, dims)
    offset = math.sqrt(10 ** random.uniform(1, 3) * math.sqrt(dims.D))
    query[..., 0] += offset
    key[..., 0] += offset
    return query, key, value


def _heavy_tailed(random: Random, dims: Dimensions) -> Triple:
    query, key, value = (random.standard_t(1.5, array.shape) for array in _normal(random, dims))
    return query, key, value


def _repeated_keys(random: Random, dims: Dimensions) -> Triple:
    query, key, value = _normal(random, dims)
    kept = random.randint(0, max(1, dims.Lk // 4), dims.Lk)
    return query, key[..., kept, :], value


def _offset_values(random: Random, dims: Dimensions) -> Triple:
    query, key, value = _normal(random, dims)
    return query, key, value + 10 ** random.uniform(1, 6)


def _heavy_values(random: Random, dims: Dimensions) -> Triple:
    query, key, value = _normal(random, dims)
    return query, key, value * np.exp(4 * random.randn(*value.shape))


def _small_integers(random: Random, dims: Dimensions) -> Triple:
    query, key, value = (random.randint(-4, 5, array.shape).astype(np.float64) for array in _normal(random, dims))
    return query, key, value


REGIMES: Mapping[str, Callable[[Random, Dimensions], Triple]] = {
    "normal": _normal,
    "uniform": _uniform,
    "peaky": _peaky,
    "logits 80": _logits_80,
    "tiny": _tiny,
    "cancelling": _cancelling,
    "common offset": _common_offset,
    "heavy-tailed": _heavy_tailed,
    "repeated keys": _repeated_keys,
    "offset values": _offset_values,
    "heavy values": _heavy_values,
    "small integers": _small_integers,
}

GENERIC = frozenset({"normal", "uniform", "peaky", "logits 80", "common offset", "heavy-tailed", "heavy values"})
