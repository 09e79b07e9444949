"""At which lengths of queries and keys an implementation fails over all cases, and the tile that explains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reports.failure_patterns import TILES, in_common, judged_of, lengths_of
from attncheck.reports.frames import Column, Frames, once_for_frames

Counts = NDArray[np.int64]
Holds = NDArray[np.bool_]
_MIN_PLACES = 2
_MAX_LISTED = 12


WIDTHS = (8, 32, 64, 128)
"""Up to which a width D belongs to one range; the last range has no end."""
CAUSALITY = ("all", "causal", "not causal")


@dataclass(frozen=True, eq=False)
class LengthView:
    """How many of some cases fail, and how many there are, both of shape (queries, keys)."""

    causality: int
    """Of ``CAUSALITY``."""
    widths: int
    """0 for all, else the number of a range from 1 on."""
    failing: Counts
    cases: Counts


@dataclass(frozen=True, eq=False)
class LengthMap:
    """How many cases of these lengths fail on an implementation, and how many there are.

    ``failing`` and ``cases`` are of shape (queries, keys); a case that fails in any dtype fails. ``tile`` is 0 where no
    tile explains anything, and ``explained`` the sentence that it is said in, where it explains all.
    """

    column: Column
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    tile: int
    explained: str
    views: tuple[LengthView, ...]
    """The same of fewer cases: of each kind of causality with each range of widths, all of both first."""

    def words(self) -> str:
        """Say in words what the map shows."""
        failing, cases = int(self.failing.sum()), int(self.cases.sum())
        places = [
            f"Lq={self.queries[row]} Lk={self.keys[column]} ({self.failing[row, column]} of {self.cases[row, column]})"
            for row, column in zip(*np.nonzero(self.failing), strict=True)
        ]
        more = f" and {len(places) - _MAX_LISTED} more" if len(places) > _MAX_LISTED else ""
        return f"{failing:,} of {cases:,} cases fail, at {', '.join(places[:_MAX_LISTED])}{more}"

    @property
    def failing(self) -> Counts:
        """How many cases fail of all."""
        return self.views[0].failing

    @property
    def cases(self) -> Counts:
        """How many cases there are in all."""
        return self.views[0].cases

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
        cases, failing = _judged_cases(frames, column)
        lengths = [lengths_of(case) for case in cases]
        places = [(of["Lq"], of["Lk"]) for of in lengths]
        if not failing.any() or len(set(places)) < _MIN_PLACES:
            continue
        queries, keys = (tuple(sorted({place[axis] for place in places})) for axis in (0, 1))
        at = np.array([queries.index(place[0]) for place in places]), np.array([keys.index(of[1]) for of in places])
        causal = np.array([bool(case["options"].get("is_causal")) for case in cases])
        widths = 1 + np.searchsorted(WIDTHS, [of.get("D", 0) for of in lengths])
        views = tuple(_views((len(queries), len(keys)), at, failing, causal, widths))
        found = said.get(column)
        tile = found.tile if found else explaining_tile(places, failing)
        explained = found.text(with_environment=many) if found else ""
        yield LengthMap(column, queries, keys, tile, explained, views)


def _views(
    shape: tuple[int, int], at: tuple[Counts, Counts], failing: Holds, causal: Holds, widths: Counts
) -> Iterator[LengthView]:
    """Yield the views that show some cases, but not those of the only causality or range of widths."""
    everything = np.ones(len(failing), dtype=bool)
    kinds = [everything, causal, ~causal] if 0 < causal.sum() < len(causal) else [everything]
    ranges = [0, *sorted(set(widths.tolist()))] if len(set(widths.tolist())) > 1 else [0]
    for causality, of_kind in enumerate(kinds):
        for width in ranges:
            chosen = of_kind & (widths == width) if width else of_kind
            counts = [np.zeros(shape, dtype=np.int64) for _ in range(2)]
            for count, counted in zip(counts, (chosen & failing, chosen), strict=True):
                np.add.at(count, (at[0][counted], at[1][counted]), 1)
            yield LengthView(causality, width, *counts)


def _judged_cases(frames: Frames, column: Column) -> tuple[list[Mapping[str, Any]], Holds]:
    """Return the cases with lengths that were judged, and whether each fails in any dtype."""
    judged = judged_of(frames, column)
    fails: dict[str, bool] = {}
    for case, verdict in zip(judged.cases, judged.verdicts, strict=True):
        fails[case] = fails.get(case, False) or bool(verdict)
    known = [case for case in fails if {"Lq", "Lk"} <= lengths_of(frames.cases[case]).keys()]
    return [frames.cases[case] for case in known], np.array([fails[case] for case in known], dtype=bool)


def explaining_tile(places: list[tuple[int, int]], failing: Holds) -> int:
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


def _told_by(lengths: Counts, failing: Holds, tile: int) -> int:
    """Count the cases that are as most of those are that lie alike to a tile."""
    kinds = np.where(lengths < tile, 0, np.where(lengths % tile == 0, 1, 2)) @ np.array([3, 1])
    return sum(max(int((kinds[failing] == kind).sum()), int((kinds[~failing] == kind).sum())) for kind in range(9))
