"""What the page may hold: how much it shows, and the scripts that a results directory keeps for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from attncheck.errors import ResultsError
from attncheck.reports.cells import CellRow, State
from attncheck.reports.frames import Column
from attncheck.reports.html.text import slug
from attncheck.results.format import SCRIPTS_FOLDER
from attncheck.results.records import read_json

_URGENCY = (State.FAILING, State.MISPRINT, State.XPASS, State.XFAIL)


LETTERS_PER_ROW, LETTERS_PER_CELL = 400, 150
"""Markup of the matrix: of a case's row, and of each cell in it."""
LETTERS_PER_CASE, LETTERS_PER_STAGE = 1_600, 70
"""Markup of a case's details: of what it is, and of each stage on one implementation in one dtype."""
LETTERS_PER_NUMBER, LETTERS_PER_INPUT = 45, 25
"""Markup of a document's number as it is printed, exact, or computed, and of one of an input."""


@dataclass(frozen=True)
class Budget:
    """The most of each that one page holds. Sizes are of the markup, measured on the bundled corpus.

    The bundled corpus on twenty implementations is far below all of them; together they keep the page of a million
    results under 20 MB, which a phone still opens, and that of one implementation under 1.5 MB.
    """

    matrix_letters: int = 5_000_000
    detail_letters: int = 3_000_000
    """Besides what the matrix does not take up."""
    evidence: int = 400
    """What is said of a cell that fails or is expected to takes 4 KB: 1.6 MB."""
    map_letters: int = 1_000_000
    """A map of errors takes 1 to 10 KB, mostly 2; the numbers of a small array 5."""
    pictures: int = 300
    """A matrix of a document takes 2 KB, a large one 10: 1 MB."""
    failing_pictures: int = 1_000
    """Those of computations that fail, beyond it."""
    number_letters: int = 6_000_000
    """Markup of documents' numbers; what fails has the first."""
    computations: int = 60
    """Of more computations of documents each is laid out only when it comes into view."""
    script_letters: int = 1_000_000
    """A script that reproduces a cell takes 5 to 100 KB."""
    wrong: int = 200
    """Nobody reads a longer list of defects; the table of all failures is in results.csv."""
    listed: int = 2_000
    """A case that a defect lists takes 200 letters."""


_OF_ONE = {
    "matrix_letters": 360_000,
    "detail_letters": 220_000,
    "evidence": 50,
    "map_letters": 90_000,
    "pictures": 60,
    "failing_pictures": 60,
    "number_letters": 160_000,
    "script_letters": 60_000,
    "wrong": 60,
    "listed": 400,
}
"""What the page of one implementation holds, which is read on a phone, attached to an issue, and kept by CI."""
_MANY = 4
"""From so many implementations on, a page may hold as much as any."""


def budget_of(columns: int) -> Budget:
    """Return what the page of so many implementations may hold: a kernel beside a reference has little more."""
    part = ((min(max(columns, 1), _MANY) - 1) / (_MANY - 1)) ** 2
    whole = Budget()
    return replace(
        whole, **{name: int(least + part * (getattr(whole, name) - least)) for name, least in _OF_ONE.items()}
    )


def urgent_first(table: Mapping[str, CellRow]) -> list[str]:
    """Return the cases with those first that fail, then those with expected failures, then the rest as they were."""
    return sorted(table, key=lambda case: _urgency(table[case]))


def within(cases: Iterable[str], size_of: Callable[[str], int], most: int) -> dict[str, None]:
    """Return the first cases whose sizes together stay within a budget, in their order."""
    kept: dict[str, None] = {}
    spent = 0
    for case in cases:
        spent += size_of(case)
        if spent > most:
            break
        kept[case] = None
    return kept


def _urgency(row: CellRow) -> int:
    states = {cell.state for cells in row.values() for cell in cells.values()}
    return next((urgency for urgency, state in enumerate(_URGENCY) if state in states), len(_URGENCY))


_MAX_BYTES = 100_000
"""A script that is larger holds large inputs: `attncheck repro` writes it again."""


@dataclass(frozen=True)
class Script:
    """A script: its file name and its text."""

    name: str
    text: Markup


class Scripts:
    """Reads scripts until the budget is spent."""

    def __init__(self, directories: Mapping[str, Path], most: int) -> None:
        self._folders = {label: directory / SCRIPTS_FOLDER for label, directory in directories.items()}
        self._names = {label: _index(folder) for label, folder in self._folders.items()}
        self._left = most

    def of(self, case: str, dtype: str, column: Column) -> Script | None:
        """Return the script of a cell, if there is one."""
        name = self._names.get(column.environment, {}).get(f"{case}|{column.implementation}|{dtype}")
        if name is None or self._left <= 0:
            return None
        path = self._folders[column.environment] / name
        try:
            # A link could show any file of whoever makes the report.
            if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_BYTES:
                return None
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        self._left -= len(text)
        return Script(f"{slug(f'{case} {column.implementation} {dtype}')}.py", _as_text(text))


def _as_text(text: str) -> Markup:
    """Escape a text that stands between tags: there quotes, of which scripts have many, are harmless."""
    return Markup(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _index(folder: Path) -> dict[str, str]:
    """Read which file belongs to which cell; names that lead elsewhere are left out."""
    try:
        content = read_json(folder / "index.json") or {}
    except ResultsError:
        return {}
    return {key: name for key, name in content.items() if isinstance(name, str) and name and Path(name).name == name}
