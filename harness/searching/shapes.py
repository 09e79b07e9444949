"""The lengths of a random problem's axes.

A search draws other lengths for every problem, at the edges of tiles: mostly small ones, and lengths just below, at and
above a power of two; whole tiles of queries and keys; one or two queries with long keys. Letters that ``Dimensions``
does not have follow from the others (``_DERIVED_AXES``), or are drawn small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.spec import Operation

Real: TypeAlias = NDArray[np.float64]
Random: TypeAlias = np.random.RandomState

_MAX_SCORES_OF_GRADIENTS, _MAX_SCORES_OF_COSTLY = 1 << 14, 1 << 12
"""Gradients are judged in all rows; the additive score has a hidden layer for every pair of query and key; and merged
parts have values for every query."""
KERNEL_WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
"""The widths for which kernels have separate code."""
_MODULE_PROBLEM_SHARE, _MAX_MODULE_WIDTH = 0.4, 96
"""The share of problems in the shape of a module, and the largest width of its model. A choice: wider is slower."""
_EQUAL_LENGTHS_SHARE = 0.5
"""The share of modules that have as many queries as keys."""
DRAWN_KERNEL_HEADS = ((1, 1), (2, 2), (4, 1), (8, 8), (8, 2), (8, 1), (40, 5), (40, 40))
"""Heads of the query, and of key and value, for a tenth of the problems: none, some or all query heads share them."""
DRAWN_HEADS = ((1, 1), (1, 1), (2, 2), (2, 2), (3, 3), (2, 1), (4, 2), (6, 2), (4, 1))
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
    def score_count(self) -> int:
        """The number of scores."""
        return self.B * self.H * self.Lq * self.Lk


def give_some_module_shape(random: Random, dims: Dimensions) -> Dimensions:
    """Give some problems the shape that modules such as torch's require: one width for all projections."""
    if random.rand() >= _MODULE_PROBLEM_SHARE:
        return dims
    width = min(dims.D, max(1, _MAX_MODULE_WIDTH // dims.H))
    model = dims.H * width
    keys = dims.Lq if random.rand() < _EQUAL_LENGTHS_SHARE else dims.Lk
    return replace(dims, Hkv=dims.H, D=width, Dv=width, E=model, Ek=model, Ev=model, Eo=model, Lk=keys)


def max_scores(operation: Operation, axes: frozenset[str], default_limit: int) -> int:
    """Return how many scores a problem of an operation may have, if other operations may have ``default_limit``.

    Example:
        >>> from attncheck.spec import OPERATIONS
        >>> names = ("attention", "attention_gradients")
        >>> [max_scores(OPERATIONS[name], frozenset(), 1 << 20) for name in names]
        [1048576, 16384]
    """
    if axes & {"A", "N"} or (operation.computes_gradients and operation.is_lowered):
        return min(default_limit, _MAX_SCORES_OF_COSTLY)
    return min(default_limit, _MAX_SCORES_OF_GRADIENTS) if operation.computes_gradients else default_limit


EDGE_LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Lengths next to 1, 2, and the powers of two from 8 to 128, where loops over tiles and vectors end."""
_BATCH_SIZES = (1, 2, 3, 5, 17)
_CUMULATIVE_BATCH_SHARES = (0.55, 0.9, 0.96, 0.99)
"""Share of problems with at most 1, 2, 3 and 5 batch entries. A choice: more entries take more time."""
_MAX_SMALL_LENGTH = 9
"""Largest length that counts as small: one more than 8, the smallest edge of vectors and tiles."""
_LENGTHS_BEYOND_TILES = (65, 127, 128, 129, 160, 192, 193, 255, 256, 257, 259)
_SHARE_BEYOND_TILES, _SHARE_LONG_KEYS, _SHARE_WHOLE_TILES, _SHARE_DECODING = 0.06, 0.02, 0.12, 0.1
"""Shares of problems with a special shape. A choice: long ones are slow to judge, so they are few."""
_TILE_SIZES = (16, 32, 64)
_LONG_KEY_LENGTHS = (300, 2100, 8100)
"""Lengths of keys that kernels split over blocks; none is a multiple of a tile size of 8 or more."""
_MAX_DRAWN_LENGTH = 300
_MAX_NUMBERS_DRAWN_OFTEN = 1 << 10
"""Larger problems are drawn less often in proportion, but at least with ``_MIN_SHARE_OF_LARGE``."""
_MIN_SHARE_OF_LARGE = 0.15
_MAX_INPUT_NUMBERS = 1 << 15
"""Limits of the numbers and the scores of a problem. A choice: exact answers of larger ones are slow."""
_MAX_SCORES_AT_EDGES = 1 << 14


def draw_edge_dimensions(operation: Operation, axes: frozenset[str], random: Random) -> Dimensions:
    """Draw the shape of a problem of an operation, whose inputs have these axes."""
    most = max_scores(operation, axes, _MAX_SCORES_AT_EDGES)
    position = random.rand()
    if position < _SHARE_BEYOND_TILES:
        return _draw_beyond_tiles(random)
    if position < _SHARE_BEYOND_TILES + _SHARE_LONG_KEYS:
        return _draw_long_keys(random, most)
    if position < _SHARE_BEYOND_TILES + _SHARE_LONG_KEYS + _SHARE_WHOLE_TILES:
        return _draw_whole_tiles(random, most)
    while True:
        dims = _draw_dimensions(random)
        numbers = dims.B * (dims.H * dims.Lq * dims.D + dims.Hkv * dims.Lk * (dims.D + dims.Dv)) + dims.score_count
        share = max(_MIN_SHARE_OF_LARGE, _MAX_NUMBERS_DRAWN_OFTEN / numbers)
        if numbers <= _MAX_INPUT_NUMBERS and dims.score_count <= most and random.rand() < share:
            return dims


def _draw_dimensions(random: Random) -> Dimensions:
    heads = DRAWN_KERNEL_HEADS if random.rand() < 0.1 else DRAWN_HEADS
    query_heads, shared = heads[random.randint(len(heads))]
    batch = _BATCH_SIZES[np.searchsorted(_CUMULATIVE_BATCH_SHARES, random.rand())]
    queries, keys = _draw_length(random), _draw_length(random)
    queries = 1 if random.rand() < _SHARE_DECODING else queries
    width, value_width = _draw_width(random), _draw_width(random)
    keys = queries if random.rand() < 0.2 else keys
    value_width = width if random.rand() < 0.35 else value_width
    models = (int(width) for width in random.randint(1, 13, 4))
    lengths = (batch, query_heads, queries, keys, width, value_width, *models, shared)
    return Dimensions(*lengths)


def _draw_beyond_tiles(random: Random) -> Dimensions:
    """Draw long queries and keys of one head, for faults after the first tiles."""
    queries, keys = (int(random.choice(_LENGTHS_BEYOND_TILES)) for _ in range(2))
    keys = queries if random.rand() < 0.3 else keys
    width, value_width, *models = (int(width) for width in random.randint(1, _MAX_SMALL_LENGTH, 6))
    lengths = (1, 1, queries, keys, width, value_width, *models, 1)
    return Dimensions(*lengths)


def _draw_long_keys(random: Random, score_limit: int) -> Dimensions:
    """Draw one or two narrow queries with long keys, for code that splits the keys."""
    queries = int(random.randint(1, 3))
    keys = int(random.choice([length for length in _LONG_KEY_LENGTHS if queries * length <= score_limit]))
    width, value_width = (int(width) for width in random.randint(2, 5, 2))
    models = dict(zip(("E", "Ek", "Ev", "Eo"), map(int, random.randint(1, _MAX_SMALL_LENGTH, 4)), strict=True))
    return Dimensions(B=1, H=1, Lq=queries, Lk=keys, D=width, Dv=value_width, Hkv=1, **models)


def _draw_whole_tiles(random: Random, score_limit: int) -> Dimensions:
    """Draw queries and keys that fill one tile or two, for branches without bounds checks."""
    tile = int(random.choice([length for length in _TILE_SIZES if length**2 <= score_limit]))
    queries, keys = (tile * int(random.randint(1, 3)) for _ in range(2))
    keys = queries if random.rand() < _EQUAL_LENGTHS_SHARE else keys
    queries, keys = (tile, tile) if queries * keys > score_limit else (queries, keys)
    query_heads, shared = DRAWN_HEADS[random.randint(len(DRAWN_HEADS))]
    batch = 2 if random.rand() < _EQUAL_LENGTHS_SHARE else 1
    if batch * query_heads * queries * keys > score_limit:
        batch, query_heads, shared = 1, 1, 1
    widths = dict(
        zip(("D", "Dv", "E", "Ek", "Ev", "Eo"), map(int, random.randint(1, _MAX_SMALL_LENGTH, 6)), strict=True)
    )
    return Dimensions(B=batch, H=query_heads, Lq=queries, Lk=keys, Hkv=shared, **widths)


def _draw_length(random: Random) -> int:
    """Draw a length: small, at an edge, or any up to some hundreds."""
    position = random.rand()
    if position < 0.6:
        return int(random.randint(1, _MAX_SMALL_LENGTH + 1))
    if position < 0.9:
        return int(random.choice(EDGE_LENGTHS))
    return round(math.exp(random.uniform(0, math.log(_MAX_DRAWN_LENGTH))))


def _draw_width(random: Random) -> int:
    """Draw a width: mostly small, or one for which kernels have separate code, or next to one."""
    position = random.rand()
    if position < 0.7:
        return int(random.randint(1, _MAX_SMALL_LENGTH + 1))
    if position < 0.9:
        return int(random.choice(KERNEL_WIDTHS))
    return int(random.choice(KERNEL_WIDTHS)) + int(random.choice([-1, 1]))


_MAX_PARTS = 40
"""Largest number of merged parts. A choice: more parts only make problems larger."""
_PAGE_SIZES = (1, 3, 4, 8, 16, 64, 128, 129, 256)
_MAX_PAGE_SLOTS = 1 << 10
"""Keys of all pages of a batch together, where a page is larger than its keys."""


def _draw_page_size(lengths: Mapping[str, int], random: Random) -> int:
    page = _PAGE_SIZES[random.randint(len(_PAGE_SIZES))]
    return page if lengths["S"] * page <= _MAX_PAGE_SLOTS else _PAGE_SIZES[random.randint(3)]


_DERIVED_AXES: Mapping[str, Callable[[Mapping[str, int], Random], int]] = {
    "T": lambda of, random: of["Lk"] + of["P"],
    "R": lambda of, random: random.randint(1, max(of["D"] // 2, 1) + 1),
    "Lr": lambda of, random: of["Lq"] + of["T"] + random.randint(3),
    "C": lambda of, random: (of["D"] + of["Dv"], of["D"], of["Dv"])[random.randint(3)],
    "Dk": lambda of, random: of["Ek"],
    "N": lambda of, random: random.randint(1, min(_MAX_PARTS, of["Lk"] + 1) + 1),
    "S1": lambda of, random: of["S"] + 1,
    "Lp": _draw_page_size,
    "W": lambda of, random: -(-of["Lk"] // of["Lp"]),
    "Ts": lambda of, random: of["W"] * of["Lp"],
    "Np": lambda of, random: of["S"] * of["W"] + 2,  # two pages are unused
}
"""The lengths of axes that follow from others; any other letter is a small width."""


def axis_lengths(dims: Dimensions, axes: frozenset[str], random: Random) -> dict[str, int]:
    """Return the length of every axis of a problem, by its letter; a past takes half of the keys.

    Packed sequences of all batch entries follow one another in one entry.
    """
    lengths = {**asdict(dims), "P": 0, "S": dims.B}
    if "P" in axes:
        lengths["P"] = max(dims.Lk // 2, 1)
        lengths["Lk"] = max(dims.Lk - lengths["P"], 1)
    if "S1" in axes:
        sequences = max(dims.B, int(random.randint(1, 5)))
        keys = dims.Lk if "W" in axes else dims.B * dims.Lk  # a table has the keys of each sequence
        lengths |= {"B": 1, "Lq": dims.B * dims.Lq, "Lk": keys, "S": sequences}
    for letter, follow in _DERIVED_AXES.items():
        if letter in axes or letter == "T" or (letter == "Ts" and "W" in axes):
            lengths[letter] = int(follow(lengths, random))
    for letter in sorted(axes - lengths.keys()):
        lengths[letter] = int(random.randint(1, _MAX_SMALL_LENGTH + 1))
    return lengths
