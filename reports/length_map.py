"""At which lengths of queries and keys an implementation fails over all cases, and the tile that explains it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncheck.reports.features import TILES
from attncheck.reports.frames import Column, Frames, once_for_frames
from attncheck.reports.in_common import in_common, judged_of
from attncheck.reports.simplest import lengths_of

Counts = NDArray[np.int64]
_MIN_PLACES = 2
_MAX_LISTED = 12


@dataclass(frozen=True, eq=False)
class LengthMap:
    """How many cases of these lengths fail on an implementation, and how many there are.

    ``failing`` and ``cases`` are of shape (queries, keys); a case that fails in any dtype fails. ``tile`` is 0 where no
    tile explains anything, and ``explained`` the sentence that it is said in, where it explains all.
    """

    column: Column
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    failing: Counts
    cases: Counts
    tile: int
    explained: str

    def words(self) -> str:
        """Say in words what the map shows."""
        failing, cases = int(self.failing.sum()), int(self.cases.sum())
        places = [
            f"Lq={self.queries[row]} Lk={self.keys[column]} ({self.failing[row, column]} of {self.cases[row, column]})"
            for row, column in zip(*np.nonzero(self.failing), strict=True)
        ]
        more = f" and {len(places) - _MAX_LISTED} more" if len(places) > _MAX_LISTED else ""
        return f"{failing:,} of {cases:,} cases fail, at {', '.join(places[:_MAX_LISTED])}{more}"

    def grid_words(self) -> str:
        """Say which tiles are drawn."""
        if not self.tile:
            return f"No tile of {', '.join(map(str, TILES[:-1]))} or {TILES[-1]} tells what fails from what passes."
        return f"Lines are drawn where a tile of {self.tile} ends."


@once_for_frames
def length_maps(frames: Frames) -> tuple[LengthMap, ...]:
    """Return a map for every implementation that fails somewhere, and was judged at several lengths."""
    return tuple(_maps(frames))


def _maps(frames: Frames) -> Iterator[LengthMap]:
    many = len(frames.environments) > 1
    said = {found.column: found for found in in_common(frames) if found.tile}
    for column in frames.columns:
        places, failing = _places(frames, column)
        if not failing.any() or len(set(places)) < _MIN_PLACES:
            continue
        queries, keys = (tuple(sorted({place[axis] for place in places})) for axis in (0, 1))
        shape = len(queries), len(keys)
        at = ([queries.index(place[0]) for place in places], [keys.index(place[1]) for place in places])
        counts = [np.zeros(shape, dtype=np.int64) for _ in range(2)]
        for count, chosen in zip(counts, (failing, np.ones(len(failing), dtype=bool)), strict=True):
            np.add.at(count, at, chosen.astype(np.int64))
        found = said.get(column)
        tile = found.tile if found else explaining_tile(places, failing)
        explained = found.text(with_environment=many) if found else ""
        yield LengthMap(column, queries, keys, counts[0], counts[1], tile, explained)


def _places(frames: Frames, column: Column) -> tuple[list[tuple[int, int]], NDArray[np.bool_]]:
    """Return the lengths of every case that was judged, and whether it fails in any dtype."""
    judged = judged_of(frames, column)
    fails: dict[str, bool] = {}
    for case, verdict in zip(judged.cases, judged.verdicts, strict=True):
        fails[case] = fails.get(case, False) or bool(verdict)
    lengths = {case: lengths_of(frames.cases[case]) for case in fails}
    known = [case for case in fails if {"Lq", "Lk"} <= lengths[case].keys()]
    places = [(lengths[case]["Lq"], lengths[case]["Lk"]) for case in known]
    return places, np.array([fails[case] for case in known], dtype=bool)


def explaining_tile(places: list[tuple[int, int]], failing: NDArray[np.bool_]) -> int:
    """Return the tile whose edges tell most of what fails from what passes; 0 where none does.

    Lengths are told apart by how they lie to a tile: below it, whole tiles, or past the last full one. Of two tiles
    that tell as much, the larger.
    """
    lengths = np.array(places)
    guessed = max(int(failing.sum()), int((~failing).sum()))
    right = {tile: _told_by(lengths, failing, tile) for tile in TILES}
    best = max(TILES, key=lambda tile: (right[tile], tile))
    wrong = len(failing) - right[best]
    return best if 2 * wrong <= len(failing) - guessed else 0


def _told_by(lengths: Counts, failing: NDArray[np.bool_], tile: int) -> int:
    """Count the cases that are as most of those are that lie alike to a tile."""
    kinds = np.where(lengths < tile, 0, np.where(lengths % tile == 0, 1, 2)) @ np.array([3, 1])
    return sum(max(int((kinds[failing] == kind).sum()), int((kinds[~failing] == kind).sum())) for kind in range(9))
