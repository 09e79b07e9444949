"""Covering: few that hold every combination, chosen among what there is, or made of the levels of factors.

A covering array of strength three has every three levels that are possible together in one of its rows. Rows are made
one after the other, each from a combination that no row has yet: the other factors get the level that completes most of
those that are missing (Bryce and Colbourn's one-row-at-a-time greedy method). Then a row is dropped, and single levels
of others are changed until these have what it alone had (as in Lin and others' tabu search), as often as that works: a
quarter of the rows goes. NumPy keeps the stream of the generator that draws on the way, so that the same factors give
the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, islice, permutations, product

import numpy as np
from numpy.typing import NDArray

Levels = dict[int, int]
"""The levels of some factors, both by number."""
Numbers = NDArray[np.intp]
"""Levels, numbered through all factors."""
Exclusion = Mapping[int, Collection[int]]
"""Levels that do not go together: of each factor that it names, one of these."""
_MOST_CHANGES = 1000
"""So many levels are changed in search of fewer rows: three times as many would save another 2 % of them."""
_RESTS = 5
"""A level that was changed stays for so many changes: without rest, rows go to and fro."""
_IMPOSSIBLE = 1 << 14
"""Is counted where levels cannot meet, so that they are never missing."""


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
    return _Rows(sizes, strength, excluded).make()


class _Rows:
    """Rows being made. ``_counts`` has an axis of all levels for each that meet: how many rows have these."""

    def __init__(self, sizes: Sequence[int], strength: int, excluded: Sequence[Exclusion]) -> None:
        self._sizes, self._strength, self._excluded = sizes, strength, excluded
        self._first = np.cumsum([0, *sizes[:-1]])
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        self._bound = sorted({factor for each in excluded for factor in each})
        self._possible: dict[frozenset[tuple[int, int]], bool] = {}
        self._counts = np.full((sum(sizes),) * strength, _IMPOSSIBLE, dtype=np.int16)
        self._fewest = 0
        for factors in combinations(range(len(sizes)), strength):
            together = product(*(range(sizes[factor]) for factor in factors))
            possible = [each for each in together if self._is_possible(dict(zip(factors, each, strict=True)))]
            numbers = self._first[[*factors]] + np.array(possible, dtype=int).reshape(-1, strength)
            for axes in permutations(numbers.T):
                self._counts[axes] = 0
            self._fewest = max(self._fewest, len(possible))

    def make(self) -> list[tuple[int, ...]]:
        """Return rows in which no combination is missing, sorted."""
        rows = np.array([*self._greedy()], dtype=int).reshape(-1, len(self._sizes))
        return sorted(map(tuple, (self._with_fewer(rows) - self._first).tolist()))

    def _greedy(self) -> Iterator[Numbers]:
        """Yield rows until no combination is missing."""
        places = np.argwhere(self._counts == 0)
        while len(places := places[self._counts[tuple(places.T)] == 0]):
            factors = self._owners[places[0]]
            begun = (places[0] - self._first[factors]).tolist()
            levels = self._completed(dict(zip(factors.tolist(), begun, strict=True)))
            row = self._first + [levels[factor] for factor in range(len(self._sizes))]
            self._count(row, 1)
            yield row

    def _completed(self, levels: Levels) -> Levels:
        """Give every other factor the level that completes most; those with many levels come first."""
        for factor in sorted(set(range(len(self._sizes))) - levels.keys(), key=lambda each: (-self._sizes[each], each)):
            own = self._first[factor] + np.arange(self._sizes[factor])
            present = [self._first[other] + level for other, level in levels.items()]
            missing = self._counts[np.ix_(own, *[present] * (self._strength - 1))] == 0
            gains = missing.reshape(len(own), -1).sum(axis=1)
            possible = [level for level in range(len(own)) if self._is_possible({**levels, factor: level})]
            levels[factor] = max(possible, key=lambda level: gains[level])
        return levels

    def _with_fewer(self, rows: Numbers) -> Numbers:
        """Drop rows as long as the others can get what these alone have; return those that are left."""
        draws, change, kept = np.random.RandomState(0), 0, rows
        changed = np.full(rows.shape, -_RESTS)
        while change < _MOST_CHANGES and len(kept) > self._fewest:
            if len(missing := np.flatnonzero(self._counts == 0)):
                change += 1
                wanted = np.unravel_index(missing[draws.randint(len(missing))], self._counts.shape)
                order = draws.permutation(len(rows))
                ways = self._ways(np.array(wanted), rows, order, changed < change - _RESTS)
                for row, factor, level in islice(ways, 1):
                    self._count(rows[row], -1)
                    rows[row, factor], changed[row, factor] = level, change
                    self._count(rows[row], 1)
            else:
                kept = rows.copy()
                dropped = self._having(1, *[rows] * self._strength).argmin()
                self._count(rows[dropped], -1)
                rows = np.delete(rows, dropped, axis=0)
                changed = np.delete(changed, dropped, axis=0)
        return kept

    def _ways(
        self, wanted: Numbers, rows: Numbers, order: Numbers, rested: NDArray[np.bool_]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield a row, a factor and the one level there that completes what is wanted; first where that costs least."""
        misses = rows[order][:, self._owners[wanted]] != wanted
        near = misses.sum(axis=1) == 1
        row, level = order[near], wanted[misses[near].argmax(axis=1)]
        factor, after = self._owners[level], rows[row]
        after[np.arange(len(row)), factor] = level
        others = [after] * (self._strength - 1)
        cost = self._having(1, rows[row, factor, None], *others) - self._having(0, level[:, None], *others)
        for best in np.argsort(cost, kind="stable"):
            if rested[row, factor][best] and self._is_possible(dict(enumerate((after[best] - self._first).tolist()))):
                yield row[best], factor[best], level[best]

    def _count(self, row: Numbers, times: int) -> None:
        self._counts[np.ix_(*[row] * self._strength)] += times

    def _having(self, count: int, *axes: Numbers) -> Numbers:
        """Return of each row how many combinations, of a level from each axis, so many rows have."""
        places = range(len(axes))
        apart = [each[:, *(slice(None) if own == place else None for own in places)] for place, each in enumerate(axes)]
        numbers: Numbers = (self._counts[tuple(apart)] == count).sum(axis=tuple(range(1, len(axes) + 1)))
        return numbers

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
