"""Contents of the page: how much it holds, kept scripts, and how states, numbers, shapes and addresses are written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from attncheck.errors import ResultsError
from attncheck.reports.frames import CellRow, Column, State, states_of
from attncheck.reports.sections import Details, Figure
from attncheck.results.format import SCRIPTS_FOLDER
from attncheck.results.records import read_json

URGENCY = (State.FAILING, State.MISPRINT, State.XPASS, State.XFAIL)


LETTERS_PER_ROW, LETTERS_PER_CELL = 400, 90
"""Markup of the matrix: of a case's row, and of each cell in it, where they are not all alike."""
LETTERS_PER_CASE, LETTERS_PER_STAGE = 1_600, 70
"""Markup of a case's details: of what it is, and of each stage on one implementation in one dtype."""
LETTERS_PER_NUMBER, LETTERS_PER_INPUT = 45, 25
"""Markup of a document's number as it is printed, exact, or computed, and of one of an input."""


@dataclass(frozen=True)
class Budget:
    """The most of each that one page holds: 3 MB in all, which a phone opens and an issue takes.

    Sizes are of the markup, measured on the bundled corpus. What fails comes first; the rest is in the files beside it.
    """

    matrix_letters: int = 1_200_000
    detail_letters: int = 700_000
    evidence: int = 80
    """What is said of a cell that fails or is expected to takes 4 KB."""
    map_letters: int = 150_000
    """A map of errors takes 1 to 10 KB, mostly 2; the numbers of a small array 5."""
    pictures: int = 40
    """A matrix of a document takes 2 KB, a large one 10."""
    failing_pictures: int = 100
    """Those of computations that fail, beyond it."""
    number_letters: int = 250_000
    """Markup of documents' numbers; what fails has the first."""
    computations: int = 60
    """Of more computations of documents each is laid out only when it comes into view."""
    script_letters: int = 80_000
    """A script that reproduces a cell takes 5 to 100 KB."""
    wrong: int = 100
    """Nobody reads a longer list of defects; the table of all failures is in results.csv."""
    listed: int = 500
    """A case that a defect lists takes 200 letters."""


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
    states = states_of(row)
    return next((urgency for urgency, state in enumerate(URGENCY) if state in states), len(URGENCY))


_MAX_BYTES = 100_000
"""A script that is larger holds large inputs: `attncheck repro` writes it again."""


class Scripts:
    """Reads scripts until the budget is spent."""

    def __init__(self, directories: Mapping[str, Path], most: int) -> None:
        self._folders = {label: directory / SCRIPTS_FOLDER for label, directory in directories.items()}
        self._names = {label: _index(folder) for label, folder in self._folders.items()}
        self._left = most

    def of(self, case: str, dtype: str, column: Column) -> Iterator[Details]:
        """Yield the script of a cell, if there is one."""
        name = self._names.get(column.environment, {}).get(f"{case}|{column.implementation}|{dtype}")
        if name is None or self._left <= 0:
            return
        path = self._folders[column.environment] / name
        try:
            # A link could show any file of whoever makes the report.
            if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_BYTES:
                return
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return
        self._left -= len(text)
        file = f"{slug(f'{case} {column.implementation} {dtype}')}.py"
        form = '<pre class="script" tabindex="0" data-name="{}"><code>{}</code></pre>'
        shown = Figure(file, Markup(form).format(file, _as_text(text)))
        yield Details(f"The script that shows it without attncheck, {file}", [shown])


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


LEVELS = (
    (0.1, "e0", "below a tenth of the bound"),
    (1.0, "e1", "within the bound"),
    (10.0, "e2", "up to ten times it"),
)
BEYOND = ("e3", "more than ten times it, or not finite")
NOT_JUDGED = ("en", "not judged")
"""How large an error is, beside its bound: a class of the style sheet, and what it says."""

SYMBOLS: Mapping[State, str] = {
    State.AGREE: "✓",
    State.ERRATUM: "✓",
    State.UNVERIFIED: "?",
    State.UNSUPPORTED: "\N{EN DASH}",
    State.XFAIL: "≈",
    State.XPASS: "!",
    State.MISPRINT: "!",
    State.FAILING: "✗",
}
"""A sign beside every word, so that no verdict is said by colour alone."""

NOTHING = "\N{EN DASH}"
"""Stands where there is no number."""

SHORT_DTYPES: Mapping[str, str] = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def short(value: float | None, digits: int = 3) -> str:
    """Write a number shortly; a dash for no number."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.{digits}g}"


def shape_text(shape: Sequence[int]) -> str:
    """Write the lengths of axes."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "scalar"


def options_text(options: Mapping[str, Any]) -> list[str]:
    """Write options as they stand in a case."""
    return [f"{name} = {value}" for name, value in options.items()]


_LONGEST = 120
_ELSE = re.compile(r"[^A-Za-z0-9._]+")


@dataclass(frozen=True)
class Anchors:
    """The ids of cases and columns; those of cells are made of both."""

    cases: Mapping[str, str]
    columns: Mapping[Column, str]

    def case(self, case: str) -> str:
        """Return the id of a case's details."""
        return f"case-{self.cases[case]}"

    def cell(self, case: str, column: Column) -> str:
        """Return the id of what one implementation gives in a case."""
        return f"cell-{self.cases[case]}--{self.columns[column]}"


def make_anchors(cases: Iterable[str], columns: Iterable[Column]) -> Anchors:
    """Name every case and column; the environment is part of a name where there are several."""
    columns = list(columns)
    many = len({column.environment for column in columns}) > 1
    slugs = [[slug(c.implementation), *([slug(c.environment)] if many else [])] for c in columns]
    names = _numbered("--".join(parts) for parts in slugs)
    return Anchors(_by_text(cases), dict(zip(columns, names, strict=True)))


def slug(text: str) -> str:
    """Return a text with everything but letters, digits, points and underscores made a hyphen."""
    return _ELSE.sub("-", text).strip("-")[:_LONGEST] or "x"


def unique_slugs(texts: Iterable[str]) -> list[str]:
    """Return a slug per text; of two that are the same, the later is numbered."""
    return _numbered(map(slug, texts))


def _numbered(starts: Iterable[str]) -> list[str]:
    taken: set[str] = set()
    numbers: dict[str, int] = {}  # the last one behind each text: names in other scripts are all alike as slugs
    names = []
    for start in starts:
        name = start
        while name in taken:
            numbers[start] = numbers.get(start, 1) + 1
            name = f"{start}-{numbers[start]}"
        taken.add(name)
        names.append(name)
    return names


def _by_text(texts: Iterable[str]) -> dict[str, str]:
    texts = list(texts)
    return dict(zip(texts, unique_slugs(texts), strict=True))
