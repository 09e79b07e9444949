"""What the page may hold: how much it shows, and the scripts that a results directory keeps for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
    """A matrix of a document takes 2 KB, a large one 10: 1 MB. What fails is drawn beyond it."""
    computations: int = 60
    """Of more computations of documents each is laid out only when it comes into view."""
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
