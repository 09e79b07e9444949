"""The parts of which random problems are drawn: shapes, regimes of values, and what is asked besides the product.

A campaign that compares frameworks takes its shapes from a pool: frameworks compile anew for each shape, JAX every
single operation, so that there are few. In a search every problem has its own, at the edges of tiles: small ones
mostly, and lengths just before, at and behind a power of two.

Regimes are what numbers look like. Each draws a query (B, H, Lq, D), a key (B, Hkv, Lk, D) and a value (B, Hkv, Lk, Dv)
in float64. ``GENERIC`` are those whose rounding errors behave like noise; the others are structured: their errors agree
with each other, and statistics do not apply.

Masks, biases, windows, caches and scales are asked besides the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.spec import BY_SCORE

Real: TypeAlias = NDArray[np.float64]
Random: TypeAlias = np.random.RandomState

SHAPES = 64
FEW_SHAPES = 40
"""For what is compiled, and for gradients, which are made of many more operations."""

_MANY_ENTRIES = 1 << 11
"""Shapes of more scores than this are rarer in proportion, for the oracle takes longer in proportion."""
_MAX_ENTRIES = {
    "additive": 1 << 12,
    "attention_gradients": 1 << 14,
    "packed_attention_gradients": 1 << 12,
    "merge_states": 1 << 12,
}
"""The additive score has a hidden layer for every pair of query and key, a query values of its own where parts are
merged; gradients are judged whole."""
_DECODING_SHARE = 0.1
_LARGE_SHARE = 0.005
_KERNEL_SHARE = 0.25
_KERNEL_SHAPES_PER_SHAPE = 3 / 8
_KERNEL_ENTRIES = 1 << 14
WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
"""The widths for which kernels have a path of their own."""
_MODULE_SHARE, _MODULE_WIDTH = 0.4, 96
_ALIKE_SHARE = 0.5
"""Of modules, so many have as many queries as keys."""
_TILES = (16, 16, 16, 64, 64, 128)
KERNEL_HEADS = ((1, 1), (2, 2), (4, 1), (8, 8), (8, 2), (8, 1), (40, 5), (40, 40))
_KERNEL_BATCHES = (1, 2, 5, 17)
HEADS = ((1, 1), (1, 1), (2, 2), (2, 2), (3, 3), (2, 1), (4, 2), (6, 2), (4, 1))
"""Heads of the query, and of key and value."""


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
    Hkv: int

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """The shape of the scores."""
        return (self.B, self.H, self.Lq, self.Lk)

    @property
    def entries(self) -> int:
        """How many scores there are."""
        return math.prod(self.scores)

    @property
    def ungrouped(self) -> Dimensions:
        """The same, where every query head has a key and value head of its own."""
        return replace(self, Hkv=self.H)

    @property
    def is_module(self) -> bool:
        """Whether all projections have one width, of which every head has an equal part."""
        return {self.E, self.Ek, self.Ev, self.Eo, self.H * self.Dv} == {self.H * self.D}


_DECODING = Dimensions(B=1, H=2, Lq=1, Lk=37, D=12, Dv=20, E=96, Ek=53, Ev=64, Eo=80, Hkv=2)
"""One query at a time, as a decoder asks: libraries take another way through their products for so few rows."""
_LARGE = (
    Dimensions(B=1, H=2, Lq=256, Lk=256, D=64, Dv=64, E=1, Ek=1, Ev=1, Eo=1, Hkv=2),
    Dimensions(B=1, H=1, Lq=512, Lk=512, D=128, Dv=128, E=1, Ek=1, Ev=1, Eo=1, Hkv=1),
)


def draw_dimensions(kind: str, random: Random, seed: int, shapes: int) -> Dimensions:
    """Draw the shape of a problem of a kind from the first ``shapes`` of a seed."""
    if kind == "attention" and random.rand() < _LARGE_SHARE:
        return _LARGE[random.randint(len(_LARGE))]
    if kind == "multi_head_attention" and random.rand() < _DECODING_SHARE:
        return _DECODING
    if kind in ("attention", "attention_gradients") and random.rand() < _KERNEL_SHARE:
        kernel_pool = _kernel_pool(seed, max(1, round(shapes * _KERNEL_SHAPES_PER_SHAPE)))
        return kernel_pool[random.randint(len(kernel_pool))]
    pool = _pool(seed, shapes)
    fitting = [dims for dims in pool if dims.entries <= max_entries(kind, dims.entries)]
    return fitting[random.randint(len(fitting))]


def some_as_modules(random: Random, dims: Dimensions) -> Dimensions:
    """Give some problems the shape that modules such as torch's ask for: one width for all projections."""
    if random.rand() >= _MODULE_SHARE:
        return dims
    width = min(dims.D, max(1, _MODULE_WIDTH // dims.H))
    model = dims.H * width
    keys = dims.Lq if random.rand() < _ALIKE_SHARE else dims.Lk
    return replace(dims.ungrouped, D=width, Dv=width, E=model, Ek=model, Ev=model, Eo=model, Lk=keys)


def max_entries(kind: str, most: int) -> int:
    """Return how many scores a problem of a kind may have, where others may have ``most``."""
    return min(most, _MAX_ENTRIES.get(kind, most))


@lru_cache(maxsize=4)
def _pool(seed: int, shapes: int) -> tuple[Dimensions, ...]:
    """Draw the shapes of a campaign, two given ones among them."""
    random = np.random.RandomState([seed])
    pool = [Dimensions(*(1,) * 11), _DECODING]
    while len(pool) < shapes:
        batch, (heads, shared) = random.choice([1, 1, 2, 3]), HEADS[random.randint(len(HEADS))]
        queries, keys = _lengths(random, 256, 0.15)
        width, value_width = _lengths(random, 128, 0.4)  # kernels made by hand ask that these be alike
        models = np.exp(random.uniform(0, math.log(96), 4)).round()
        lengths = (batch, heads, queries, keys, width, value_width, *models, shared)
        dims = Dimensions(*(int(length) for length in lengths))
        if random.rand() < _MANY_ENTRIES / dims.entries:
            pool.append(dims)
    return tuple(pool)


@lru_cache(maxsize=4)
def _kernel_pool(seed: int, shapes: int) -> tuple[Dimensions, ...]:
    """Draw shapes at which kernels change their path: widths of powers of two, lengths around the edges of tiles."""
    random = np.random.RandomState([seed, shapes])
    pool: list[Dimensions] = []
    while len(pool) < shapes:
        width, other = (int(each) for each in random.choice(WIDTHS, 2))
        heads, shared = KERNEL_HEADS[random.randint(len(KERNEL_HEADS))]
        queries, keys = _around_tiles(random, (1, 5)), _around_tiles(random, ())
        value_width = width if random.rand() < 0.6 else other
        batch = int(random.choice(_KERNEL_BATCHES))
        dims = Dimensions(batch, heads, queries, keys, width, value_width, 1, 1, 1, 1, shared)
        if dims.entries <= _KERNEL_ENTRIES and random.rand() < _MANY_ENTRIES / dims.entries:
            pool.append(dims)
    return tuple(pool)


def _around_tiles(random: Random, few: tuple[int, ...]) -> int:
    """Draw a length at the edge of a tile, or one of a few lengths."""
    if few and random.rand() < 0.4:
        return int(random.choice(few))
    tile = int(random.choice(_TILES))
    return int(random.choice((tile - 1, tile, tile + 1, 2 * tile + 1)))


def _lengths(random: Random, most: int, share_alike: float) -> tuple[int, int]:
    """Draw two lengths, log-uniform, mostly unlike each other: swapped axes hide where they are alike."""
    alike = random.rand() < share_alike
    while True:
        one, other = (int(length) for length in np.exp(random.uniform(0, math.log(most + 0.49), 2)).round())
        if alike:
            return one, one
        if one != other:
            return one, other


EDGES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
_SMALL = 9
_BEYOND = (65, 127, 128, 129, 160, 192, 193, 255, 256, 257, 259)
_SHARE_BEYOND_TILES = 0.06
_LONGEST = 300
_MANY_NUMBERS = 1 << 10
"""Problems of more numbers than this are drawn less often in proportion, but not below ``_LEAST_SHARE``."""
_LEAST_SHARE = 0.15
_MAX_NUMBERS = 1 << 15
_MAX_ENTRIES_AT_EDGES = 1 << 14


def draw_at_edges(kind: str, random: Random) -> Dimensions:
    """Draw the shape of a problem of a kind."""
    if random.rand() < _SHARE_BEYOND_TILES:
        return _beyond_tiles(random)
    while True:
        dims = _draw(random)
        numbers = dims.B * (dims.H * dims.Lq * dims.D + dims.Hkv * dims.Lk * (dims.D + dims.Dv)) + dims.entries
        share = max(_LEAST_SHARE, _MANY_NUMBERS / numbers)
        if (
            numbers <= _MAX_NUMBERS
            and dims.entries <= max_entries(kind, _MAX_ENTRIES_AT_EDGES)
            and random.rand() < share
        ):
            return dims


def _draw(random: Random) -> Dimensions:
    heads = KERNEL_HEADS if random.rand() < 0.1 else HEADS
    query_heads, shared = heads[random.randint(len(heads))]
    batch = int(random.choice([1, 1, 1, 2, 2, 3, 5, 17], p=[0.25, 0.2, 0.1, 0.2, 0.15, 0.06, 0.03, 0.01]))
    queries, keys = _length(random), _length(random)
    width, value_width = _width(random), _width(random)
    keys = queries if random.rand() < 0.2 else keys
    value_width = width if random.rand() < 0.35 else value_width
    models = (int(each) for each in random.randint(1, 13, 4))
    lengths = (batch, query_heads, queries, keys, width, value_width, *models, shared)
    return Dimensions(*lengths)


def _beyond_tiles(random: Random) -> Dimensions:
    """Draw long queries and keys of one head: what goes wrong behind the first tiles."""
    queries, keys = (int(random.choice(_BEYOND)) for _ in range(2))
    keys = queries if random.rand() < 0.3 else keys
    width, value_width, *models = (int(each) for each in random.randint(1, _SMALL, 6))
    lengths = (1, 1, queries, keys, width, value_width, *models, 1)
    return Dimensions(*lengths)


def _length(random: Random) -> int:
    """Draw a length: small, at an edge, or any up to some hundreds."""
    which = random.rand()
    if which < 0.6:
        return int(random.randint(1, _SMALL + 1))
    if which < 0.9:
        return int(random.choice(EDGES))
    return round(math.exp(random.uniform(0, math.log(_LONGEST))))


def _width(random: Random) -> int:
    """Draw a width: small mostly, or one for which kernels have a path of their own, or beside one."""
    which = random.rand()
    if which < 0.7:
        return int(random.randint(1, _SMALL + 1))
    if which < 0.9:
        return int(random.choice(WIDTHS))
    return int(random.choice(WIDTHS)) + int(random.choice([-1, 1]))


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


Inputs = dict[str, NDArray[Any]]

MASKS = ("none", "causal", "padding", "random", "bias", "bias with -inf")

_SELDOM = 0.08
_SCALED = 0.15
_ATTENDANCE = frozenset({"masking", "attention", "attention_gradients", "multi_head_attention", *BY_SCORE})
_NORMALIZED, _LATENT = "normalized_attention", "latent_attention"
_SEQUENCES = frozenset({"packed_attention", "packed_attention_gradients", "paged_attention", "quantized_attention"})
_ROTATED = frozenset({"attention", "attention_gradients", "multi_head_attention", _NORMALIZED})
_OFFSETS = frozenset({"masking", "attention", _LATENT})
FILLS = (-1e9, -1e6, -1e4, -60.0, -4.0, -0.5, -1e-9, 0.0, 2.0)
_WITH_SINKS = _ROTATED | _SEQUENCES
_SCALABLE = _WITH_SINKS | {_LATENT}
_CAPPABLE = frozenset({"attention", "attention_gradients", "scaled_dot", "dot", _NORMALIZED, _LATENT, *_SEQUENCES})


@dataclass
class DrawnOptions:
    """Options and inputs besides the operands, and what to call them."""

    options: dict[str, Any] = field(default_factory=dict)
    inputs: Inputs = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def draw_asked(kind: str, random: Random, dims: Dimensions) -> DrawnOptions:
    """Draw what a problem of a kind asks; masking always asks something, most others often nothing."""
    asked = DrawnOptions()
    if kind in _ATTENDANCE:
        _add_mask(asked, str(random.choice(MASKS[1:] if kind == "masking" else MASKS)), random, dims)
        _add_attendance(asked, random, dims)
    if kind in (_NORMALIZED, _LATENT):
        _add_mask(asked, str(random.choice(MASKS)), random, dims)
    if kind in {*_SCALABLE, "cosine_attention"} and random.rand() < _SCALED:
        scale = float(np.float32(random.uniform(-1, 2)))
        asked.options["scale"] = scale
        asked.names.append("scale" if scale >= 0 else "negative scale")
    if kind in _CAPPABLE and random.rand() < _SELDOM:
        asked.options["softcap"] = float(np.float32(10 ** random.uniform(-1, 2)))
        asked.names.append("softcap")
    if kind in _WITH_SINKS and random.rand() < _SCALED:
        sinks = random.randn(dims.H) * 10 ** random.uniform(-1, 1.3)
        asked.inputs["sinks"] = np.where(random.rand(dims.H) < _SELDOM, -np.inf, sinks)
        asked.names.append("sinks")
    if kind in _ROTATED and random.rand() < _SCALED:
        _add_rotation(asked, random, dims)
    if kind in _ATTENDANCE and _forbids(asked) and random.rand() < 2 * _SCALED:
        asked.options["mask_fill"] = float(random.choice(FILLS))
        asked.names.append("fill")
    is_positioned = asked.options.keys() & {"is_causal", "window"} or "rotary_cos" in asked.inputs
    if kind in _OFFSETS and is_positioned and "alignment" not in asked.options and random.rand() < _SCALED:
        asked.inputs["query_offsets"] = random.randint(0, dims.Lk + 1, dims.B)
        asked.names.append("query offsets")
    return asked


def _forbids(asked: DrawnOptions) -> bool:
    return bool(asked.options.keys() & {"is_causal", "window"} or asked.inputs.keys() & {"mask", "key_lengths"})


def _add_rotation(asked: DrawnOptions, random: Random, dims: Dimensions) -> None:
    """Add the cosines and sines of angles, for some of the pairs or all; none where there is no pair."""
    if dims.D < 2:
        return
    pairs = int(random.randint(1, dims.D // 2 + 1))
    angles = random.uniform(-np.pi, np.pi, (dims.Lq + dims.Lk, pairs))
    asked.inputs |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    asked.names.append("rotary")
    if random.rand() < 1 / 2:
        asked.options["rotary_interleaved"] = True


def _add_mask(asked: DrawnOptions, mask: str, random: Random, dims: Dimensions) -> None:
    if mask == "none":
        return
    asked.names.append(mask)
    asked.inputs |= draw_mask(mask, random, dims)
    if mask == "causal":
        asked.options["is_causal"] = True


def _add_attendance(asked: DrawnOptions, random: Random, dims: Dimensions) -> None:
    """Add, each seldom, a window, key lengths, a mask of queries, and another alignment."""
    window, lengths, queries, alignment = random.rand(4) < (_SELDOM, _SELDOM, _SELDOM / 2, 2 * _SELDOM)
    if window:
        sides = [None if unbounded else int(random.randint(0, 9)) for unbounded in random.rand(2) < 0.3]
        asked.options["window"] = tuple(sides) if any(side is not None for side in sides) else (4, None)
        asked.names.append("window")
    if lengths:
        asked.inputs["key_lengths"] = random.randint(0, dims.Lk + 1, dims.B)
        asked.names.append("key lengths")
    if queries:
        asked.inputs["query_mask"] = random.rand(dims.B, dims.Lq) < 0.8
        asked.names.append("query mask")
    if alignment and asked.options:
        asked.options["alignment"] = "bottom_right"
        asked.names.append("bottom right")


def draw_mask(kind: str, random: Random, dims: Dimensions) -> Inputs:
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
            return {"bias": random.randn(*_bias_shape(random, dims)) * 10 ** random.uniform(-2, 1)}
        case "bias with -inf":
            bias = random.randn(1, dims.H, dims.Lq, dims.Lk)
            bias[random.rand(*bias.shape) < 0.2] = -np.inf
            return {"bias": bias}
    return {}


def _bias_shape(random: Random, dims: Dimensions) -> tuple[int, ...]:
    """Draw the shape of a bias: whole, or the same for some axes."""
    whole = dims.scores
    kept = [(True,) * 4, (True,) * 4, (False, True, True, True), (False, False, True, True), (True, False, False, True)]
    kept.append((False, True, True, False))
    chosen = kept[random.randint(len(kept))]
    return tuple(length if keep else 1 for length, keep in zip(whole, chosen, strict=True))


def split_past(inputs: Mapping[str, NDArray[Any]], random: Random) -> tuple[Inputs, bool]:
    """Make, seldom, the first half of the keys and values a past."""
    keys = inputs["key"].shape[-2]
    if keys < 2 or random.rand() >= _SELDOM:
        return dict(inputs), False
    parts = dict(inputs)
    for name in ("key", "value"):
        parts[f"past_{name}"], parts[name] = np.split(inputs[name], [keys // 2], axis=-2)
    return parts, True
