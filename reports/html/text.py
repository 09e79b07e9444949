"""How states, numbers, shapes and addresses are written on the page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attncheck.reports.cells import State
from attncheck.reports.frames import Column
from attncheck.wording import counted

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


def long(value: float | None, dtype: str) -> str:
    """Write a number with all digits that its dtype has."""
    return short(value, 17 if dtype == "float64" else 9)


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


def failing_words(failing: int, of: int) -> str:
    """Say how many computations fail, in the words of a heading."""
    return (
        f"{failing:,} of {counted(of, 'computation')} fail" if failing else f"{counted(of, 'computation')}, none fails"
    )
