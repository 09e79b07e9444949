"""Cases for the tile of a kernel: one bundled file states them, and a row for it can be made for any size.

``kernel_shapes/tiles.yaml`` has three rows of lengths under ``for_each``. With another row in their place it makes the
same cases for another tile. Their ids say which tile that is, so that an id alone leads to its case.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attncheck.errors import UsageError
from attncheck.reading.case import Case
from attncheck.spec import OPERATIONS

TEMPLATE = "kernel_shapes/tiles"
"""The file below the bundled corpus, and what its cases' ids begin with."""
MIN_TILE, MAX_TILE = 2, 4096
MAX_SCORES = 1 << 18
"""Scores of which every row is judged. Gradients have no rows that stand for all, and are left out beyond this."""

_MAX_SHOWN_WHOLE = 32
"""Tiles up to this size are judged at every stage, larger ones at the output: scores and weights cost more than it."""
_IN_AN_ID = re.compile(r"(?<![0-9a-z])tile-([1-9][0-9]{0,3})(?![0-9])")


def tile_row(tile: int) -> dict[str, Any]:
    """Return the row of ``for_each`` for a tile."""
    return {
        "name": f"tile {tile}",
        "under": tile - 1,
        "whole": tile,
        "over": tile + 1,
        "double": 2 * tile + 1,
        "heads": 2 if tile <= _MAX_SHOWN_WHOLE else 1,
        "stages": None if tile <= _MAX_SHOWN_WHOLE else ["output"],
    }


def read_tiles(given: Iterable[Any], where: str) -> tuple[int, ...]:
    """Read the sizes of tiles. Raises ``UsageError``, which names ``where`` they stand."""
    tiles: dict[int, None] = {}
    for each in given:
        is_whole = isinstance(each, int) and not isinstance(each, bool)
        size = int(each) if is_whole or (isinstance(each, str) and re.fullmatch("[0-9]{1,9}", each.strip())) else 0
        if not MIN_TILE <= size <= MAX_TILE:
            shown = repr(each) if len(repr(each)) <= 60 else f"{repr(each)[:57]}..."
            why = "; every length is a whole number of tiles of one" if size == 1 else ""
            raise UsageError(f"{where}: expected a whole number from {MIN_TILE} to {MAX_TILE}, got {shown}{why}")
        tiles[size] = None
    return tuple(tiles)


def tiles_named(texts: Iterable[str]) -> tuple[int, ...]:
    """Return the tiles that ids, or globs over them, name."""
    found = (int(size) for text in texts for size in _IN_AN_ID.findall(text))
    return tuple(dict.fromkeys(size for size in found if MIN_TILE <= size <= MAX_TILE))


def load_tile(path: Path, display_name: str, known_tags: Iterable[str], tile: int) -> list[Case]:
    """Read the bundled file for one tile, without the gradients that are too large to be judged whole."""
    from attncheck.reading.loader import load_case_file

    cases = load_case_file(path, display_name, TEMPLATE, known_tags, for_each=[tile_row(tile)])
    return [case for case in cases if not _is_large_gradient(case)]


def left_out(tiles: Iterable[int]) -> str:
    """Return what is not judged of large tiles; empty where everything is."""
    large = [size for size in tiles if size * (2 * size + 1) > MAX_SCORES]
    if not large:
        return ""
    return (
        f"--tile {','.join(map(str, large))}: rows stand for all where there are more than {MAX_SCORES:,} scores, and "
        "gradients of so many are left out"
    )


def _is_large_gradient(case: Case) -> bool:
    if not OPERATIONS[case.operation].has_gradients:
        return False
    return math.prod(case.input_shapes["query"][:-1]) * case.input_shapes["key"][-2] > MAX_SCORES
