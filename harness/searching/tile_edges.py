"""Shapes at the edges of tiles, for a search: small ones mostly, and lengths just before, at and behind a power of two.

A campaign that compares frameworks takes its shapes from a pool (``shapes.py``); here every problem has its own.
"""

from __future__ import annotations

import math

from attncheck.searching.shapes import HEADS, KERNEL_HEADS, WIDTHS, Dimensions, Random, max_entries

EDGES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
_SMALL = 9
_BEYOND = (65, 127, 128, 129, 160, 192, 193, 255, 256, 257, 259)
_SHARE_BEYOND_TILES = 0.06
_LONGEST = 300
_MANY_NUMBERS = 1 << 10
"""Problems of more numbers than this are drawn less often in proportion, but not below ``_LEAST_SHARE``."""
_LEAST_SHARE = 0.15
_MAX_NUMBERS = 1 << 15
_MAX_ENTRIES = 1 << 14


def draw_at_edges(kind: str, random: Random) -> Dimensions:
    """Draw the shape of a problem of a kind."""
    if random.rand() < _SHARE_BEYOND_TILES:
        return _beyond_tiles(random)
    while True:
        dims = _draw(random)
        numbers = dims.B * (dims.H * dims.Lq * dims.D + dims.Hkv * dims.Lk * (dims.D + dims.Dv)) + dims.entries
        share = max(_LEAST_SHARE, _MANY_NUMBERS / numbers)
        if numbers <= _MAX_NUMBERS and dims.entries <= max_entries(kind, _MAX_ENTRIES) and random.rand() < share:
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
