"""The shapes of the soundness campaign's problems: a pool of them, from which every problem takes one.

Frameworks compile anew for each shape, JAX every single operation, so that there are few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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
