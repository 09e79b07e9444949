"""How much the page shows: what is wrong always comes first, and what is left out is counted and said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from attncheck.reports.cells import CellRow, State

_URGENCY = (State.FAILING, State.MISPRINT, State.XPASS, State.XFAIL)


LETTERS_PER_ROW, LETTERS_PER_CELL = 400, 150
"""Markup of the matrix: of a case's row, and of each cell in it."""
LETTERS_PER_CASE, LETTERS_PER_STAGE = 1_600, 70
"""Markup of a case's details: of what it is, and of each stage on one implementation in one dtype."""


@dataclass(frozen=True)
class Budget:
    """The most of each that one page holds. Sizes are of the markup, measured on the bundled corpus.

    The bundled corpus on twenty implementations is far below all of them; together they keep the page of a million
    results under 20 MB, which a phone still opens.
    """

    matrix_letters: int = 5_000_000
    detail_letters: int = 6_000_000
    evidence: int = 400
    """What is said of a cell that fails or is expected to takes 4 KB: 1.6 MB."""
    maps: int = 400
    """A map of errors takes 1 to 10 KB, mostly 2: 1 MB."""
    pictures: int = 300
    """A matrix of a document takes 2 KB, a large one 10: 1 MB."""
    script_letters: int = 1_000_000
    """A script that reproduces a cell takes 5 to 100 KB."""
    wrong: int = 200
    """Nobody reads a longer list of failures; the table of all is in results.csv."""


def urgent_first(table: Mapping[str, CellRow]) -> list[str]:
    """Return the cases with those first that fail, then those with expected failures, then the rest as they were."""
    return sorted(table, key=lambda case: _urgency(table[case]))


def within(cases: Iterable[str], size_of: Callable[[str], int], most: int) -> set[str]:
    """Return the first cases whose sizes together stay within a budget."""
    kept, spent = set(), 0
    for case in cases:
        spent += size_of(case)
        if spent > most:
            break
        kept.add(case)
    return kept


def _urgency(row: CellRow) -> int:
    states = {cell.state for cells in row.values() for cell in cells.values()}
    return next((urgency for urgency, state in enumerate(_URGENCY) if state in states), len(_URGENCY))
