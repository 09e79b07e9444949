"""Covering: few that hold every combination, chosen among what there is, or made of the levels of factors.

A covering array of strength three has every three levels that are possible together in one of its rows. Rows are made
one after the other, each from a combination that no row has yet: the other factors get the level that completes most of
those that are missing (Bryce and Colbourn's one-row-at-a-time greedy method). Nothing is drawn at random, so that the
same factors give the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, permutations, product
from typing import Any

import numpy as np

Levels = dict[int, int]
"""The levels of some factors, both by number."""
Exclusion = Mapping[int, Collection[int]]
"""Levels that do not go together: of each factor that it names, one of these."""
_TRIED = 12
"""So many beginnings of a row are tried, and the one that adds most is kept."""


def covering(features: Sequence[frozenset[Hashable]], chosen: Collection[int] = ()) -> list[int]:
    """Add to what is chosen until every feature is there; return positions, in order.

    The one that adds most comes first, which is at most a small factor from the fewest that are possible.
    """
    found = set(chosen)
    open_ones = frozenset[Hashable]().union(*features).difference(*(features[position] for position in found))
    heap = [(-len(each), position) for position, each in enumerate(features)]
    heapify(heap)
    while open_ones:
        _, position = heappop(heap)
        adds = len(features[position] & open_ones)
        if heap and adds < -heap[0][0]:  # what it would add has shrunk since it was put there
            heappush(heap, (-adds, position))
            continue
        found.add(position)
        open_ones -= features[position]
    return sorted(found)


def count_combinations(sizes: Sequence[int], strength: int) -> int:
    """Count the combinations of so many levels of as many factors, possible or not, by the recurrence over factors."""
    counts = [1] + [0] * strength
    for size in sizes:
        for length in range(strength, 0, -1):
            counts[length] += counts[length - 1] * size
    return counts[strength]


def covering_rows(sizes: Sequence[int], strength: int, excluded: Sequence[Exclusion] = ()) -> list[tuple[int, ...]]:
    """Make rows, a level of each factor, in which every combination of ``strength`` levels that is possible occurs.

    Args:
        sizes: The number of levels of each factor.
        strength: How many levels meet, at most the number of factors.
        excluded: What no row may have.

    Returns:
        The rows, sorted; none where everything is excluded.
    """
    return sorted(_Rows(sizes, strength, excluded).make())


class _Rows:
    """Rows being made. Levels are numbered through all factors; ``_missing`` has an axis of them for each that meet."""

    def __init__(self, sizes: Sequence[int], strength: int, excluded: Sequence[Exclusion]) -> None:
        self._sizes, self._strength, self._excluded = sizes, strength, excluded
        self._first = [sum(sizes[:factor]) for factor in range(len(sizes))]
        self._bound = sorted({factor for each in excluded for factor in each})
        self._possible: dict[frozenset[tuple[int, int]], bool] = {}
        self._missing = np.zeros((sum(sizes),) * strength, dtype=bool)
        for factors in combinations(range(len(sizes)), strength):
            own = [slice(self._first[factor], self._first[factor] + sizes[factor]) for factor in factors]
            for axes in permutations(own):
                self._missing[axes] = True
            for chosen in product(*(range(sizes[factor]) for factor in factors)) if self._bound else ():
                levels = dict(zip(factors, chosen, strict=True))
                if not self._is_possible(levels):
                    self._missing[self._places(self._numbers(levels))] = False

    def make(self) -> Iterator[tuple[int, ...]]:
        """Yield rows until no combination is missing."""
        owners = np.repeat(np.arange(len(self._sizes)), self._sizes)
        places = np.argwhere(self._missing)
        places = places[(np.diff(places, axis=1) > 0).all(axis=1)]
        while True:
            places = places[self._missing[tuple(places.T)]]
            if not len(places):
                return
            step = max(1, len(places) // _TRIED)
            rows = [
                self._completed({int(owners[level]): int(level) - self._first[owners[level]] for level in begun})
                for begun in places[::step][:_TRIED]
            ]
            best = max(rows, key=lambda row: np.count_nonzero(self._missing[self._places(self._numbers(row))]))
            self._missing[self._places(self._numbers(best))] = False
            yield tuple(best[factor] for factor in range(len(self._sizes)))

    def _completed(self, levels: Levels) -> Levels:
        """Give every other factor the level that completes most; those with many levels come first."""
        for factor in sorted(set(range(len(self._sizes))) - levels.keys(), key=lambda each: (-self._sizes[each], each)):
            first, present = self._first[factor], self._numbers(levels)
            completed = self._missing[first : first + self._sizes[factor]]
            for axis in range(1, self._strength):
                completed = completed.take(present, axis=axis)
            gains = completed.reshape(self._sizes[factor], -1).sum(axis=1)
            possible = [level for level in range(self._sizes[factor]) if self._is_possible({**levels, factor: level})]
            levels[factor] = max(possible, key=lambda level: gains[level])
        return levels

    def _numbers(self, levels: Levels) -> list[int]:
        return [self._first[factor] + level for factor, level in levels.items()]

    def _places(self, numbers: Sequence[int]) -> Any:
        """Return where all combinations of these levels stand."""
        return np.ix_(*[numbers] * self._strength)

    def _is_possible(self, levels: Levels) -> bool:
        """Return whether a row may have these levels: whether those that exclusions name can be chosen for the rest."""
        bound = frozenset((factor, level) for factor, level in levels.items() if factor in self._bound)
        if bound not in self._possible:
            self._possible[bound] = self._can_be_completed(dict(bound))
        return self._possible[bound]

    def _can_be_completed(self, levels: Levels) -> bool:
        if any(all(levels.get(factor) in several for factor, several in each.items()) for each in self._excluded):
            return False
        left = next((factor for factor in self._bound if factor not in levels), None)
        return left is None or any(
            self._can_be_completed({**levels, left: level}) for level in range(self._sizes[left])
        )
