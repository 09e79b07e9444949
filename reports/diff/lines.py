"""What changed, in a line a change that fits a terminal: names are cut in their middle where they are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from attncheck.reports.frames import records
from attncheck.reports.markdown.text import number

WIDTH = 100
"""Columns of a line in a file or a pipe, and in a terminal that does not say how wide it is."""
_APART = "  "
_MIN_NAME = 16
_CUT = "…"
_PARTS = (0.5, 0.6, 0.7, 0.4, 0.3)
"""Of a name that is cut: how much of what is kept is its beginning."""

Row = Mapping[str, Any]


def change_lines(name: str, frame: pd.DataFrame, width: int | None) -> list[str]:
    """Return a line for each change of a frame of a difference; without a width nothing is cut."""
    with_environment = "environment" in frame and frame["environment"].nunique() > 1
    cells = [list(_CELLS[name](row, with_environment)) for row in records(frame)]
    if width is not None and only_implementation(frame):
        cells = [[change, *rest] for change, _, *rest in cells]
    return aligned(cells, width)


def only_implementation(frame: pd.DataFrame) -> str:
    """Return the implementation that every change is of: it is said once above the lines; empty for several."""
    if "implementation" not in frame:
        return ""
    found = frame[["environment", "implementation"]].drop_duplicates()
    return str(found["implementation"].iloc[0]) if len(found) == 1 else ""


def aligned(cells: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lay rows out in columns, the last of which ends where the line does.

    All others but the first are cut until a line fits, the longest first.
    """
    *columns, texts = zip(*cells, strict=True)
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        _narrow(widths, width)
    shown = [_cut(column, length) for column, length in zip(columns, widths, strict=True)]
    lines = (_APART.join(row).rstrip() for row in zip(*shown, texts, strict=True))
    return [line if width is None else _ended(line, width, sum(widths) + len(_APART) * len(columns)) for line in lines]


def _narrow(widths: list[int], most: int) -> None:
    """Take from the longest columns what is too much, down to what still tells names apart."""
    left = sum(widths) + len(_APART) * (len(widths) - 1) - most
    while left > 0 and (wide := [index for index in range(1, len(widths)) if widths[index] > _MIN_NAME]):
        longest = max(wide, key=lambda index: widths[index])
        widths[longest] -= 1
        left -= 1


def _cut(names: Sequence[str], most: int) -> list[str]:
    """Cut names where most of them can still be told apart."""
    distinct = {part: len({shortened(name, most, part) for name in names}) for part in _PARTS}
    part = max(_PARTS, key=lambda part: distinct[part])  # of equals the first
    return [shortened(name, most, part).ljust(most) for name in names]


def shortened(text: str, most: int, part: float = 0.5) -> str:
    """Leave out what is in the middle of a long name; ``part`` of what is kept is its beginning."""
    if len(text) <= most:
        return text
    first = int(part * (most - len(_CUT)))
    return f"{text[:first]}{_CUT}{text[len(text) - (most - len(_CUT) - first) :]}"


def _ended(line: str, most: int, start: int) -> str:
    """End a line where there is no room; its text, which begins at ``start``, is left out rather than a few letters."""
    if len(line) > most and start + _MIN_NAME > most >= len(line[:start].rstrip()):
        return line[:start].rstrip()
    return line if len(line) <= most else f"{line[: most - len(_CUT)].rstrip()}{_CUT}"


def _implementation(row: Row, with_environment: bool) -> str:
    return f"{row['implementation']} ({row['environment']})" if with_environment else str(row["implementation"])


def _verdict(row: Row, with_environment: bool) -> Iterator[str]:
    yield from (row["change"], _implementation(row, with_environment), row["case"], row["dtype"])
    after = _outcome(row["after"], row["after_stage"])
    other_case = " (another case by this id)" if row["case_changed"] else ""
    yield f"{_outcome(row['before'], row['before_stage'])} -> {after}{other_case}"
    yield row["message"]


def _outcome(word: str, stage: str) -> str:
    return f"{word} at {stage}" if stage else word


def _error(row: Row, with_environment: bool) -> Iterator[str]:
    yield from (row["change"], _implementation(row, with_environment), row["case"], row["dtype"], row["stage"])
    yield f"z {number(row['before_z'])} -> {number(row['after_z'])}"
    tiers = f"{row['before_tier']} -> {row['after_tier']}"
    yield f"{number(row['before_ratio'])} -> {number(row['after_ratio'])} of the bound ({row['measure']}), {tiers}"


def _expected_failure(row: Row, with_environment: bool) -> Iterator[str]:
    yield from (row["change"], _implementation(row, with_environment), _outcome(row["verdict"], row["stage"]))
    yield f"{row['before_cases']:,} -> {row['after_cases']:,} cases"
    yield f"{row['reason']} {row['thread']}".strip()


def _case(row: Row, with_environment: bool) -> Iterator[str]:
    yield from (row["change"], row["case"], f"{row['failing']:,} failing", row["what"])


def _environment(row: Row, with_environment: bool) -> Iterator[str]:
    yield row["change"]
    yield row["environment"]
    yield row["what"]
    yield {"added": row["after"], "removed": row["before"]}.get(row["change"], f"{row['before']} -> {row['after']}")


_CELLS: Mapping[str, Callable[..., Iterator[str]]] = {
    "verdicts": _verdict,
    "errors": _error,
    "expected_failures": _expected_failure,
    "cases": _case,
    "environments": _environment,
}
