"""Covering: choose few items, or make few rows, that together have every feature or combination of levels.

A kernel has many options, and a bug often needs two or three of them together. All combinations of all options are too
many to run: the bundled design for kernels has ten factors with 6,912 combinations. A covering array of strength three
has rows such that every combination of three levels occurs in some row. For that design, 36 rows suffice. A bug that
needs four options together can escape.

``make_covering_rows`` makes such an array in two phases.

1. Add rows. Each row starts with a combination that no row has yet. Every other factor then gets the level that
   completes most missing combinations, and factors with many levels come first. This is the greedy method of Bryce and
   Colbourn, one row at a time. It is fast, but early choices are never corrected.
2. Drop rows. Drop the row that is needed for the fewest combinations, then change single levels of the other rows until
   they have these combinations, too. Repeat while this works. A changed level stays for a few changes, because rows
   would otherwise change back and forth. This is a tabu search, as that of Lin and others. It drops about a quarter of
   the rows: 75 rows become 57 for ten factors with three levels each at strength three.

The number of rows is at least the largest number of combinations of any group of factors; the search stops there.

Levels may exclude each other. A row is possible if no exclusion applies to it. A partial row is possible if it can be
completed, so the greedy phase never reaches a dead end. Impossible combinations count as present.

All combinations have a number, and an array counts how many rows have each combination. One change of a level then
costs a few array operations. Time and memory grow with the number of combinations, which ``for_each.py`` limits.

Alternatives cost more. The smallest array is a hard search problem. Random rows need many more rows for the last
combinations. Tables of known arrays do not allow exclusions or factors of different sizes. The same factors always give
the same rows: draws come from NumPy's ``RandomState``, whose stream never changes.

``choose_to_cover_features`` chooses among existing items instead, such as the units of a run (``planning/plan.py``). It
is the greedy algorithm for set cover: the item with the most missing features is next.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, islice, permutations, product

import numpy as np
from numpy.typing import NDArray

Levels = dict[int, int]
"""The levels of some factors, both by number."""
IntArray = NDArray[np.intp]
ExcludedLevels = Mapping[int, Collection[int]]
"""Levels that must not occur together: for each factor that it names, one of these."""
_MAX_CHANGES = 1000
"""The number of changes in search of fewer rows; three times as many would save another 2 % of the rows."""
_TABU_CHANGES = 5
"""A changed level stays for so many changes; otherwise rows change back and forth."""
_IMPOSSIBLE_COUNT = 1 << 14
"""The count of impossible combinations, so that they are never missing."""


def choose_to_cover_features(features: Sequence[frozenset[Hashable]], chosen: Collection[int] = ()) -> list[int]:
    """Add positions to the chosen ones until every feature is there; return them in order.

    Greedy: the position that adds most features is next. The result is at most a small factor above the minimum.

    Example:
        >>> choose_to_cover_features([frozenset("ab"), frozenset("bc"), frozenset("abd")])
        [1, 2]
    """
    selected = set(chosen)
    open_ones = frozenset[Hashable]().union(*features).difference(*(features[position] for position in selected))
    heap = [(-len(feature_set), position) for position, feature_set in enumerate(features)]
    heapify(heap)
    while open_ones:
        _, position = heappop(heap)
        adds = len(features[position] & open_ones)
        if heap and adds < -heap[0][0]:  # what it would add has shrunk since it was put there
            heappush(heap, (-adds, position))
            continue
        selected.add(position)
        open_ones -= features[position]
    return sorted(selected)


def count_combinations(sizes: Sequence[int], strength: int) -> int:
    """Count the combinations of so many levels of as many factors, possible or not, by the recurrence over factors.

    Example:
        >>> count_combinations([2, 3, 4], 2)  # 2 * 3 + 2 * 4 + 3 * 4
        26
    """
    counts = [1] + [0] * strength
    for size in sizes:
        for length in range(strength, 0, -1):
            counts[length] += counts[length - 1] * size
    return counts[strength]


def make_covering_rows(
    sizes: Sequence[int], strength: int, excluded: Sequence[ExcludedLevels] = ()
) -> list[tuple[int, ...]]:
    """Make rows, a level of each factor, in which every combination of ``strength`` levels that is possible occurs.

    Args:
        sizes: The number of levels of each factor.
        strength: How many levels meet, at most the number of factors.
        excluded: What no row may have.

    Returns:
        The rows, sorted; none if everything is excluded.

    Example:
        >>> make_covering_rows([2, 2], 2, [{0: [1], 1: [1]}])
        [(0, 0), (0, 1), (1, 0)]
        >>> len(make_covering_rows([2] * 4, 2))  # instead of 16
        5
    """
    return _CoveringArray(sizes, strength, excluded).make_rows()


class _CoveringArray:
    """Rows being made: a level of each factor.

    All levels that meet have a place, those of the same factors side by side: levels l of factors f have the place
    base + sum_i l_i stride_i. ``_counts`` says of each place how many rows have these levels.
    """

    def __init__(self, sizes: Sequence[int], strength: int, excluded: Sequence[ExcludedLevels]) -> None:
        self._sizes, self._excluded = sizes, excluded
        self._constrained_factors = sorted({factor for exclusion in excluded for factor in exclusion})
        self._possible: dict[tuple[tuple[int, int], ...], bool] = {}
        self._groups = np.array([*combinations(range(len(sizes)), strength)])
        together = [
            np.indices([sizes[factor] for factor in factors]).reshape(strength, -1).T for factors in self._groups
        ]
        lengths = [len(levels) for levels in together]
        self._levels = np.concatenate(together)
        self._factors = np.repeat(self._groups, lengths, axis=0)
        self._first_places = np.cumsum([0, *lengths[:-1]])
        self._strides = np.ones_like(self._groups)
        self._strides[:, :-1] = np.array(sizes)[self._groups][:, :0:-1].cumprod(axis=1)[:, ::-1]
        self._groups_of_factor = np.array(
            [np.flatnonzero((self._groups == factor).any(axis=1)) for factor in range(len(sizes))]
        )
        self._strides_of_factor = np.array(
            [self._strides[of][self._groups[of] == factor] for factor, of in enumerate(self._groups_of_factor)]
        )
        numbers = np.cumsum([0, *sizes[:-1]])[self._factors] + self._levels
        orders = numbers[:, [*permutations(range(strength))]]
        self._sort_keys = (orders * sum(sizes) ** np.arange(strength)[::-1]).sum(axis=-1)
        possible = np.concatenate(
            [self._flag_possible_combinations(factors.tolist()).ravel() for factors in self._groups]
        )
        self._counts = np.where(possible, 0, _IMPOSSIBLE_COUNT).astype(np.int16)
        self._min_rows = int(np.add.reduceat(possible, self._first_places).max())

    def _flag_possible_combinations(self, factors: Sequence[int]) -> NDArray[np.bool_]:
        """Return which levels of factors are possible together, along an axis for each factor."""
        bound = [factor for factor in factors if factor in self._constrained_factors]
        levels = product(*(range(self._sizes[factor]) for factor in bound))
        possible = [self._is_possible(dict(zip(bound, chosen, strict=True))) for chosen in levels]
        shape = [self._sizes[factor] if factor in bound else 1 for factor in factors]
        return np.broadcast_to(np.reshape(possible, shape), [self._sizes[factor] for factor in factors])

    def make_rows(self) -> list[tuple[int, ...]]:
        """Return rows in which no combination is missing, sorted."""
        rows: list[IntArray] = []
        places = self._sort_keys[:, 0].argsort()
        while len(places := places[self._counts[places] == 0]):
            first = places[0]
            levels = dict(zip(self._factors[first].tolist(), self._levels[first].tolist(), strict=True))
            rows.append(self._complete_row(levels))
            self._counts[self._combination_places(rows[-1])] += 1
        every = np.array(rows, dtype=int).reshape(-1, len(self._sizes))
        return sorted(map(tuple, self._drop_rows(every).tolist()))

    def _combination_places(self, rows: IntArray) -> IntArray:
        """Return the places of all that meets in rows."""
        places: IntArray = self._first_places + (rows[..., self._groups] * self._strides).sum(axis=-1)
        return places

    def _complete_row(self, levels: Levels) -> IntArray:
        """Give every other factor the level that completes most combinations; factors with many levels come first."""
        row, assigned = np.zeros(len(self._sizes), int), np.zeros(len(self._sizes), np.bool_)
        row[[*levels]], assigned[[*levels]] = [*levels.values()], True
        open_factors = set(range(len(self._sizes))) - levels.keys()
        for factor in sorted(open_factors, key=lambda number: (-self._sizes[number], number)):
            assigned[factor] = True
            of, choices = self._groups_of_factor[factor], range(self._sizes[factor])
            met = assigned[self._groups[of]].all(axis=1)
            of, stride = of[met], self._strides_of_factor[factor][met]
            places = self._first_places[of] + (row[self._groups[of]] * self._strides[of]).sum(axis=1)
            gains = (self._counts[places + np.outer(choices, stride)] == 0).sum(axis=1)
            is_free = factor not in self._constrained_factors
            levels[factor] = row[factor] = max(
                (level for level in choices if is_free or self._is_possible({**levels, factor: level})),
                key=lambda level: gains[level],
            )
        return row

    def _drop_rows(self, rows: IntArray) -> IntArray:
        """Drop rows while the others can be changed to have all their combinations; return the remaining rows."""
        draws, change, kept, places = np.random.RandomState(0), 0, rows, self._combination_places(rows)
        changed = np.full(rows.shape, -_TABU_CHANGES)
        while change < _MAX_CHANGES and len(kept) > self._min_rows:
            if len(missing := np.flatnonzero(self._counts == 0)):
                change += 1
                # Draw one missing combination, among all orders in which its levels may be named, sorted.
                named = self._sort_keys[missing].ravel()
                drawn = named.argsort()[draws.randint(len(named))]
                wanted = int(missing[drawn // self._sort_keys.shape[1]])
                order = draws.permutation(len(rows))
                ways = self._find_completing_changes(wanted, rows, places, order, changed, change - _TABU_CHANGES)
                for row, factor, level in islice(ways, 1):
                    of, moved = (
                        self._groups_of_factor[factor],
                        (level - rows[row, factor]) * self._strides_of_factor[factor],
                    )
                    self._counts[places[row, of]] -= 1
                    places[row, of] += moved
                    self._counts[places[row, of]] += 1
                    rows[row, factor], changed[row, factor] = level, change
            else:
                kept = rows.copy()
                dropped = (self._counts[places] == 1).sum(axis=1).argmin()
                self._counts[places[dropped]] -= 1
                rows, places, changed = (np.delete(array, dropped, axis=0) for array in (rows, places, changed))
        return kept

    def _find_completing_changes(
        self, wanted: int, rows: IntArray, places: IntArray, order: IntArray, changed: IntArray, before: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield changes (row, factor, level) that complete the wanted combination, the cheapest first.

        Only levels whose last change (``changed``) was ``before`` a time.
        """
        factors, levels = self._factors[wanted], self._levels[wanted]
        misses = rows[order[:, np.newaxis], factors] != levels
        near = misses.sum(axis=1) == 1
        row, place = order[near], misses[near].argmax(axis=1)
        rested = changed[row, factors[place]] < before
        row, factor, level = row[rested], factors[place[rested]], levels[place[rested]]
        had = places[row[:, np.newaxis], self._groups_of_factor[factor]]
        gets = had + (level - rows[row, factor])[:, np.newaxis] * self._strides_of_factor[factor]
        cost = (self._counts[had] == 1).sum(axis=1) - (self._counts[gets] == 0).sum(axis=1)
        for best in cost.argsort(kind="stable"):
            in_row, of_factor, new_level = int(row[best]), int(factor[best]), int(level[best])
            levels_then = {**dict(enumerate(rows[in_row].tolist())), of_factor: new_level}
            if of_factor not in self._constrained_factors or self._is_possible(levels_then):
                yield in_row, of_factor, new_level

    def _is_possible(self, levels: Levels) -> bool:
        """Return whether a row may have these levels, so that no exclusion applies to all choices of the rest."""
        bound = tuple([(factor, levels[factor]) for factor in self._constrained_factors if factor in levels])
        if bound not in self._possible:
            self._possible[bound] = self._can_be_completed(dict(bound))
        return self._possible[bound]

    def _can_be_completed(self, levels: Levels) -> bool:
        threatening = [
            exclusion
            for exclusion in self._excluded
            if all(levels[factor] in several for factor, several in exclusion.items() if factor in levels)
        ]
        if not threatening:
            return True
        open_factors = [[factor for factor in exclusion if factor not in levels] for exclusion in threatening]
        nearest = min(open_factors, key=len)
        return bool(nearest) and any(
            self._is_possible({**levels, nearest[0]: level}) for level in range(self._sizes[nearest[0]])
        )
