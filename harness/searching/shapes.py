"""The lengths of a random problem's axes.

A campaign that compares frameworks takes its shapes from a pool: frameworks compile anew for each shape, JAX every
single operation, so that there are few. In a search every problem has its own, at the edges of tiles: small ones
mostly, and lengths just before, at and behind a power of two. The letters that a pool does not have follow from the
others (``_FOLLOWING``), or are drawn small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.spec import PER_HEAD, Operation

Real: TypeAlias = NDArray[np.float64]
Random: TypeAlias = np.random.RandomState

SHAPES = 64
FEW_SHAPES = 40
"""For what is compiled, and for gradients, which are made of many more operations."""

_MANY_ENTRIES = 1 << 11
"""Shapes of more scores than this are rarer in proportion, for the oracle takes longer in proportion."""
_MAX_OF_GRADIENTS, _MAX_OF_MANY = 1 << 14, 1 << 12
"""Gradients are judged whole; the additive score has a hidden layer for every pair of query and key, and a query has
values of its own where parts are merged."""
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
        """The number of scores."""
        return math.prod(self.scores)


_DECODING = Dimensions(B=1, H=2, Lq=1, Lk=37, D=12, Dv=20, E=96, Ek=53, Ev=64, Eo=80, Hkv=2)
"""One query at a time, as a decoder asks: libraries take another way through their products for so few rows."""
_LARGE = (
    Dimensions(B=1, H=2, Lq=256, Lk=256, D=64, Dv=64, E=1, Ek=1, Ev=1, Eo=1, Hkv=2),
    Dimensions(B=1, H=1, Lq=512, Lk=512, D=128, Dv=128, E=1, Ek=1, Ev=1, Eo=1, Hkv=1),
)


def draw_dimensions(own: Operation, axes: frozenset[str], random: Random, seed: int, shapes: int) -> Dimensions:
    """Draw the shape of a problem of an operation, whose inputs have these axes, from the first shapes of a seed."""
    if own.name in PER_HEAD and not own.has_gradients and random.rand() < _LARGE_SHARE:
        return _LARGE[random.randint(len(_LARGE))]
    if own.has_projections and random.rand() < _DECODING_SHARE:
        return _DECODING
    if own.name in PER_HEAD and random.rand() < _KERNEL_SHARE:
        kernel_pool = _kernel_pool(seed, max(1, round(shapes * _KERNEL_SHAPES_PER_SHAPE)))
        return kernel_pool[random.randint(len(kernel_pool))]
    pool = _pool(seed, shapes)
    fitting = [dims for dims in pool if dims.entries <= max_entries(own, axes, dims.entries)]
    return fitting[random.randint(len(fitting))]


def some_as_modules(random: Random, dims: Dimensions) -> Dimensions:
    """Give some problems the shape that modules such as torch's ask for: one width for all projections."""
    if random.rand() >= _MODULE_SHARE:
        return dims
    width = min(dims.D, max(1, _MODULE_WIDTH // dims.H))
    model = dims.H * width
    keys = dims.Lq if random.rand() < _ALIKE_SHARE else dims.Lk
    return replace(dims, Hkv=dims.H, D=width, Dv=width, E=model, Ek=model, Ev=model, Eo=model, Lk=keys)


def max_entries(own: Operation, axes: frozenset[str], most: int) -> int:
    """Return how many scores a problem of an operation may have, where others may have ``most``."""
    if axes & {"A", "N"} or (own.has_gradients and own.is_lowered):
        return min(most, _MAX_OF_MANY)
    return min(most, _MAX_OF_GRADIENTS) if own.has_gradients else most


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
_BATCHES = (1, 2, 3, 5, 17)
_BATCH_SHARES = (0.55, 0.9, 0.96, 0.99)
_SMALL = 9
_BEYOND = (65, 127, 128, 129, 160, 192, 193, 255, 256, 257, 259)
_SHARE_BEYOND_TILES = 0.06
_LONGEST = 300
_MANY_NUMBERS = 1 << 10
"""Problems of more numbers than this are drawn less often in proportion, but not below ``_LEAST_SHARE``."""
_LEAST_SHARE = 0.15
_MAX_NUMBERS = 1 << 15
_MAX_ENTRIES_AT_EDGES = 1 << 14


def draw_at_edges(own: Operation, axes: frozenset[str], random: Random) -> Dimensions:
    """Draw the shape of a problem of an operation, whose inputs have these axes."""
    if random.rand() < _SHARE_BEYOND_TILES:
        return _beyond_tiles(random)
    while True:
        dims = _draw(random)
        numbers = dims.B * (dims.H * dims.Lq * dims.D + dims.Hkv * dims.Lk * (dims.D + dims.Dv)) + dims.entries
        share = max(_LEAST_SHARE, _MANY_NUMBERS / numbers)
        if (
            numbers <= _MAX_NUMBERS
            and dims.entries <= max_entries(own, axes, _MAX_ENTRIES_AT_EDGES)
            and random.rand() < share
        ):
            return dims


def _draw(random: Random) -> Dimensions:
    heads = KERNEL_HEADS if random.rand() < 0.1 else HEADS
    query_heads, shared = heads[random.randint(len(heads))]
    batch = _BATCHES[np.searchsorted(_BATCH_SHARES, random.rand())]
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


_MAX_PARTS = 40
_PAGES = (1, 3, 4, 8, 16, 64, 128, 129, 256)
_MAX_SLOTS = 1 << 10
"""Keys of all pages of a batch together, where a page is larger than its keys."""


def _page(of: Mapping[str, int], random: Random) -> int:
    page = _PAGES[random.randint(len(_PAGES))]
    return page if of["B"] * page <= _MAX_SLOTS else _PAGES[random.randint(3)]


_FOLLOWING: Mapping[str, Callable[[Mapping[str, int], Random], int]] = {
    "T": lambda of, random: of["Lk"] + of["P"],
    "R": lambda of, random: random.randint(1, max(of["D"] // 2, 1) + 1),
    "Lr": lambda of, random: of["Lq"] + of["T"] + random.randint(3),
    "C": lambda of, random: (of["D"] + of["Dv"], of["D"], of["Dv"])[random.randint(3)],
    "Dk": lambda of, random: of["Ek"],
    "N": lambda of, random: random.randint(1, min(_MAX_PARTS, of["Lk"] + 1) + 1),
    "S1": lambda of, random: of["S"] + 1,
    "Lp": _page,
    "W": lambda of, random: -(-of["Lk"] // of["Lp"]),
    "Np": lambda of, random: of["B"] * of["W"] + 2,  # two pages are nobody's
}
"""The lengths of axes that follow from others; any other letter is a small width."""


def axis_lengths(dims: Dimensions, axes: frozenset[str], random: Random) -> dict[str, int]:
    """Return the length of every axis of a problem, by its letter; a past takes half of the keys.

    Packed sequences lie one after the other, those of all batch entries in one.
    """
    lengths = {**asdict(dims), "P": 0, "S": dims.B}
    if "P" in axes:
        lengths["P"] = max(dims.Lk // 2, 1)
        lengths["Lk"] = max(dims.Lk - lengths["P"], 1)
    if "S1" in axes:
        sequences = max(dims.B, int(random.randint(1, 5)))
        lengths |= {"B": 1, "Lq": dims.B * dims.Lq, "Lk": dims.B * dims.Lk, "S": sequences}
    for letter, follow in _FOLLOWING.items():
        if letter in axes or letter == "T":
            lengths[letter] = int(follow(lengths, random))
    for letter in sorted(axes - lengths.keys()):
        lengths[letter] = int(random.randint(1, _SMALL + 1))
    return lengths
