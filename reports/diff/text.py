"""A difference as text, and its files: diff.md, and every frame as CSV and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from attncheck.errors import OutputError
from attncheck.reports.diff.difference import BETTER, OTHER, WORSE, Difference
from attncheck.reports.frames import records
from attncheck.reports.markdown.text import code, escape, number, table
from attncheck.reports.terminal import plain_console
from attncheck.reports.write import write_csv
from attncheck.wording import counted

_MAX_LISTED = 20
_MAX_IN_MARKDOWN = 200
_NUMBERS = ("before_z", "after_z", "before_ratio", "after_ratio")

_TITLES = {
    "verdicts": "Verdicts",
    "errors": "Errors beyond rounding noise",
    "expected_failures": "Expected failures",
    "cases": "Cases",
    "environments": "Environments and implementations",
}
_EXPLAINED = {
    "verdicts": "Worse is what fails now and did not before, and what ran and now gives nothing.",
    "errors": "z is the largest error in units of its statistical scale: it more than doubled or halved, and the "
    "larger one is more than rounding noise. What is within its bound fails nothing.",
    "expected_failures": "How many cases fail as expected.",
    "cases": "Cases that only one of the two has, or that are not the same; the errors of those are not compared.",
    "environments": "Versions, processors and settings that differ, and implementations that only one of the two has.",
}


def sentences(difference: Difference) -> list[str]:
    """Say what changed, the worst first; one sentence where nothing did."""
    changes = difference.verdicts["change"].value_counts()
    worse, better, other = (int(changes.get(name, 0)) for name in (WORSE, BETTER, OTHER))
    lines = [
        f"{counted(worse, 'verdict')} got worse, {better:,} got better, {other:,} changed otherwise; "
        f"{counted(difference.compared, 'evaluation')} compared."
    ]
    if any(difference.only):
        one, other = difference.only
        lines.append(f"{counted(one, 'evaluation')} only in {difference.before}, {other:,} only in {difference.after}.")
    if len(difference.errors):
        grew = int(difference.errors["change"].eq("grew").sum())
        lines.append(
            f"{counted(grew, 'error')} grew beyond rounding noise, {len(difference.errors) - grew:,} shrank below it."
        )
    for name, what in (("expected_failures", "expected failure"), ("cases", "case")):
        frame = difference.tables()[name]
        if len(frame):
            counts = frame["change"].value_counts(sort=False)
            parts = ", ".join(f"{count:,} {change}" for change, count in counts.items())
            lines.append(f"{what.capitalize()}s: {parts}.")
    return [*lines, *(f"{note}." for note in difference.notes)]


def print_difference(difference: Difference, *, quiet: bool) -> None:
    """Print what changed, a table per kind of change; quiet, only the verdicts that got worse."""
    console = plain_console()
    if quiet:
        worse = difference.verdicts[difference.verdicts["change"].eq(WORSE)]
        _print_table(console, "verdicts", worse)
        return
    console.print(f"{difference.before} -> {difference.after}", style="bold", soft_wrap=True)
    for sentence in sentences(difference):
        console.print(sentence, soft_wrap=True)
    for name, frame in difference.tables().items():
        _print_table(console, name, frame)


def print_changes(console: Console, difference: Difference) -> None:
    """Print the verdicts that changed, alone."""
    _print_table(console, "verdicts", difference.verdicts)


def _print_table(console: Console, name: str, frame: pd.DataFrame) -> None:
    if frame.empty:
        return
    columns = _shown(frame)
    shown = Table(title=_TITLES[name], title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        shown.add_column(_heading(column), justify="right" if column in _NUMBERS else "left", overflow="fold")
    for row in records(frame.head(_MAX_LISTED)):
        shown.add_row(*(_text(row[column]) for column in columns), style="red" if row["change"] == WORSE else None)
    console.print()
    console.print(shown)
    if len(frame) > _MAX_LISTED:
        console.print(f"and {len(frame) - _MAX_LISTED:,} more", soft_wrap=True)


def render_diff_markdown(difference: Difference) -> str:
    """Return the difference as Markdown. The same results give the same text."""
    lines = ["# What changed", "", f"{code(difference.before)} → {code(difference.after)}", ""]
    lines += [f"- {escape(sentence)}" for sentence in sentences(difference)]
    for name, frame in difference.tables().items():
        if len(frame):
            lines += ["", f"## {_TITLES[name]}", "", _EXPLAINED[name], "", *_markdown_table(frame)]
        if len(frame) > _MAX_IN_MARKDOWN:
            lines += ["", f"And {len(frame) - _MAX_IN_MARKDOWN:,} more, in `diff_{name}.csv`."]
    return "\n".join([*lines, ""])


def _markdown_table(frame: pd.DataFrame) -> list[str]:
    columns = _shown(frame)
    rows = [[_cell(column, row[column]) for column in columns] for row in records(frame.head(_MAX_IN_MARKDOWN))]
    align = "".join("r" if column in _NUMBERS else "l" for column in columns)
    return table([_heading(column) for column in columns], rows, align)


def _cell(column: str, value: object) -> str:
    text = _text(value)
    if column in ("case", "before_stage", "after_stage", "stage"):
        return code(text)
    return f"**{text}**" if column == "change" and text == WORSE else escape(text)


def _shown(frame: pd.DataFrame) -> Sequence[str]:
    """Leave out columns that say nothing in this frame."""
    filled = [column for column in frame.columns if column == "change" or not frame[column].isin(["", False]).all()]
    return [column for column in filled if column != "environment" or frame[column].nunique() > 1]


def _heading(column: str) -> str:
    return column.replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return ("yes" if value else "") if isinstance(value, bool) else str(value)


DIFF_NAME = "diff.md"


def write_difference(difference: Difference, directory: Path) -> Path:
    """Write diff.md and diff_verdicts.csv, diff_verdicts.parquet and so on; return the path of diff.md.

    The same results give the same bytes. Raises ``OutputError`` where the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in difference.tables().items():
            write_csv(frame, directory / f"diff_{name}.csv")
            frame.to_parquet(directory / f"diff_{name}.parquet", index=False)
        path = directory / DIFF_NAME
        path.write_text(render_diff_markdown(difference), encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError.of(directory, error) from None
    return path
