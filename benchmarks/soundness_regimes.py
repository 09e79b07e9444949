"""The regimes of the soundness campaign: what the numbers of a random problem look like, and what may be attended to.

Each regime draws a query (B, H, Lq, D), a key (B, H, Lk, D) and a value (B, H, Lk, Dv) in float64. ``GENERIC`` names
those whose rounding errors behave like noise; the others are structured: their errors agree with each other, and
statistics do not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Real: TypeAlias = NDArray[np.float64]
Triple: TypeAlias = tuple[Real, Real, Real]
Random: TypeAlias = np.random.RandomState


@dataclass(frozen=True)
class Dimensions:
    """The lengths of a problem's axes; E, Ek, Ev and Eo are the widths of the models around the projections."""

    B: int
    H: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    E: int
    Ek: int
    Ev: int
    Eo: int

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """The shape of the scores."""
        return (self.B, self.H, self.Lq, self.Lk)

    @property
    def entries(self) -> int:
        """How many scores there are."""
        return math.prod(self.scores)


def _normal(random: Random, dims: Dimensions) -> Triple:
    return (
        random.randn(dims.B, dims.H, dims.Lq, dims.D),
        random.randn(dims.B, dims.H, dims.Lk, dims.D),
        random.randn(dims.B, dims.H, dims.Lk, dims.Dv),
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
    largest = np.abs(query @ np.swapaxes(key, -1, -2)).max() / math.sqrt(dims.D)
    return query * (80 / largest), key, value


def _tiny(random: Random, dims: Dimensions) -> Triple:
    """Products that underflow in float32, and weights that are nearly uniform."""
    query, key, value = (array * 10 ** random.uniform(-25, -2) for array in _normal(random, dims))
    return query, key, value


def _cancelling(random: Random, dims: Dimensions) -> Triple:
    """Columns in pairs whose products cancel but for a small part."""
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

MASKS = ("none", "causal", "padding", "random", "bias", "bias with -inf")


def draw_mask(kind: str, random: Random, dims: Dimensions) -> dict[str, NDArray[np.bool_] | Real]:
    """Draw the mask or bias of a kind; causality is an option and no input."""
    match kind:
        case "padding":
            lengths = random.randint(1, dims.Lk + 1, (dims.B, 1, 1, 1))
            return {"mask": np.arange(dims.Lk) < lengths}
        case "random":
            mask = random.rand(*dims.scores) < random.choice([0.5, 0.9])
            mask[..., random.rand(dims.Lq) < 0.1, :] = False  # rows in which nothing may be attended to
            return {"mask": mask}
        case "bias":
            return {"bias": random.randn(*dims.scores) * 10 ** random.uniform(-2, 1)}
        case "bias with -inf":
            bias = random.randn(1, dims.H, dims.Lq, dims.Lk)
            bias[random.rand(*bias.shape) < 0.2] = -np.inf
            return {"bias": bias}
    return {}
