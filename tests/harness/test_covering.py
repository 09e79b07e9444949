"""Covering arrays: every combination of levels that is possible occurs, and none that is excluded."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.covering import Exclusion, count_combinations, covering_rows


@st.composite
def designs(draw: st.DrawFn) -> tuple[list[int], int, list[Exclusion]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    levels = st.integers(0, len(sizes) - 1).flatmap(
        lambda factor: st.tuples(st.just(factor), st.sets(st.integers(0, sizes[factor] - 1), min_size=1))
    )
    excluded = draw(st.lists(st.lists(levels, min_size=1, max_size=3).map(dict), max_size=4))
    return sizes, draw(st.integers(2, min(3, len(sizes)))), excluded


@settings(max_examples=150)
@given(designs())
def test_every_combination_that_is_possible_meets(design: tuple[list[int], int, list[Exclusion]]) -> None:
    sizes, strength, excluded = design
    possible = [
        row
        for row in product(*map(range, sizes))
        if not any(all(row[factor] in levels for factor, levels in each.items()) for each in excluded)
    ]
    rows = covering_rows(sizes, strength, excluded)
    assert set(rows) <= set(possible)
    assert len(set(rows)) == len(rows)

    def met(some: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
        return {each for row in some for each in combinations(enumerate(row), strength)}

    assert met(rows) == met(possible)
    assert count_combinations(sizes, strength) == sum(map(prod, combinations(sizes, strength)))
