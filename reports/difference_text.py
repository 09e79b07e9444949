"""A difference between two results as text, files and JSON, and the differences from release to release."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from attncheck.errors import ExitCode, OutputError
from attncheck.merge import merge_runs
from attncheck.reports.build_frames import make_frames
from attncheck.reports.comparison import (
    BETTER,
    MAX_LISTED,
    OTHER,
    WIDTH,
    WORSE,
    Evaluation,
    change_lines,
    only_implementation,
    summary_of,
    with_dtypes_together,
)
from attncheck.reports.difference import ERROR_MEASURES, Difference, make_difference, outcomes
from attncheck.reports.frames import Frames, records
from attncheck.reports.machine.documents import opening
from attncheck.reports.machine.other_documents import (
    BisectionDocument,
    DifferenceDocument,
    DifferenceRecord,
)
from attncheck.reports.machine.outcome import failures_of, first_of_each, rows_of
from attncheck.reports.markdown import code, escape, number, table
from attncheck.reports.summary import what_is_wrong
from attncheck.reports.terminal import plain_console
from attncheck.reports.write import write_csv
from attncheck.results.reader import find_runs, read_runs
from attncheck.wording import counted

_MAX_IN_MARKDOWN = 200

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
    lines = [
        f"{summary_of(difference.verdicts['change'])}; {counted(difference.compared, 'evaluation')} compared.",
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


def print_difference(difference: Difference, *, quiet: bool, verbose: bool = False) -> None:
    """Print what changed, a line a change; quiet, only the verdicts that got worse, and verbose, all in full."""
    console = plain_console()
    if quiet:
        worse = difference.verdicts[difference.verdicts["change"].eq(WORSE)]
        _print_changes(console, "verdicts", worse, verbose=verbose)
        return
    console.print(f"{difference.before} -> {difference.after}", style="bold", soft_wrap=True)
    for sentence in sentences(difference):
        console.print(sentence, soft_wrap=True)
    for name, frame in difference.tables().items():
        _print_changes(console, name, frame, verbose=verbose)


def _print_changes(console: Console, name: str, frame: pd.DataFrame, *, verbose: bool = False) -> None:
    if frame.empty:
        return
    width = console.width if console.is_terminal else WIDTH
    read = records(frame if verbose or name == "verdicts" else frame.head(MAX_LISTED))
    rows = with_dtypes_together(read)
    shown = rows if verbose else rows[:MAX_LISTED]
    of = "" if verbose else only_implementation(shown)
    console.print()
    console.print(f"{_TITLES[name]}, {of}" if of else _TITLES[name], style="bold")
    for line, row in zip(change_lines(name, shown, None if verbose else width), shown, strict=True):
        console.print(line, style="red" if row["change"] == WORSE else None, soft_wrap=True)
    if more := len(rows) - len(shown) + len(frame) - len(read):
        console.print(f"and {more:,} more: --verbose lists all, in full", soft_wrap=True)


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
    align = "".join("r" if column in ERROR_MEASURES else "l" for column in columns)
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
    with OutputError.where(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in difference.tables().items():
            write_csv(frame, directory / f"diff_{name}.csv")
            frame.to_parquet(directory / f"diff_{name}.parquet", index=False)
        path = directory / DIFF_NAME
        path.write_text(render_diff_markdown(difference), encoding="utf-8", newline="\n")
    return path


def read_frames(folder: Path) -> Frames:
    """Read the results of one release."""
    return make_frames(merge_runs(read_runs(find_runs([folder])), across=False))


@dataclass
class Bisection:
    """Releases of a distribution, oldest first, and the differences from each to the next that ran."""

    distribution: str
    releases: dict[str, Frames] = field(default_factory=dict)
    steps: list[Difference] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)
    """Releases that could not be run, and why."""

    def add(self, version: str, frames: Frames) -> None:
        """Add what the next release gave. Raises ``UsageError`` where it has nothing in common with the one before."""
        if self.releases:
            before, earlier = list(self.releases.items())[-1]
            self.steps.append(make_difference(earlier, frames, (before, version)))
        self.releases[version] = frames

    def miss(self, version: str, why: str) -> None:
        """Note that a release could not be run; the one after it is compared with the one before."""
        self.missed[version] = why

    @property
    def made_worse(self) -> bool:
        """Whether any release failed where the one before did not."""
        return any((step.verdicts["change"] == WORSE).any() for step in self.steps)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each release: what came of its evaluations, and how that differs from the one before."""
        changes = {step.after: step.verdicts["change"].value_counts() for step in self.steps}
        for version, frames in self.releases.items():
            found = [outcome for outcome in outcomes(frames).values() if outcome.word]
            counts = changes.get(version)
            yield {
                "release": version,
                "right": sum(not outcome.level and outcome.word == "agree" for outcome in found),
                "failing": sum(bool(outcome.level) for outcome in found),
                "unsupported": sum(outcome.word == "unsupported" for outcome in found),
                **{each: None if counts is None else int(counts.get(each, 0)) for each in (WORSE, BETTER, OTHER)},
            }


def print_bisection(found: Bisection, console: Console | None = None) -> None:
    """Print a line for each release, and below it every verdict that one of them changed."""
    console = console or plain_console()
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in ("release", "right", "failing", "unsupported", WORSE, BETTER, OTHER):
        table.add_column(column, justify="left" if column == "release" else "right")
    for row in found.rows():
        values = ["-" if value is None else str(value) for value in row.values()]
        table.add_row(f"{found.distribution} {values[0]}", *values[1:])
    console.print(table)
    for step in found.steps:
        if len(step.verdicts):
            console.print(f"\n{found.distribution} {step.after} changed, against {step.before}:", soft_wrap=True)
            _print_changes(console, "verdicts", step.verdicts)
    if found.steps and not any(len(step.verdicts) for step in found.steps):
        console.print("No release changed a verdict.", soft_wrap=True)
    for why in found.missed.values():
        console.print(why, soft_wrap=True)


def difference_document(difference: Difference, after: Frames) -> DifferenceDocument:
    """Return what changed between two results; what got worse with its numbers, of the frames ``after``."""
    worse = difference.verdicts[difference.verdicts["change"].eq(WORSE)]
    wrong = what_is_wrong(after)
    keys = [pd.MultiIndex.from_frame(frame[list(Evaluation._fields)].astype(object)) for frame in (wrong, worse)]
    failures = failures_of(after, wrong[keys[0].isin(keys[1])])
    return DifferenceDocument.derive(
        difference,
        **opening("diff", difference.exit_code, sentences(difference)[0]),
        failures=failures,
        next=first_of_each(failures),
        notes=difference.notes,
        **_told(difference),
    )


def _told(difference: Difference) -> dict[str, Any]:
    """Return the sentences and the rows of all tables."""
    tables = {name: rows_of(frame) for name, frame in difference.tables().items()}
    return {"sentences": sentences(difference), **tables}


def bisection_document(found: Bisection, code: ExitCode) -> BisectionDocument:
    """Return what several releases gave."""
    return BisectionDocument.derive(
        found,
        **opening("bisect", code, _answer(found)),
        notes=list(found.missed.values()),
        releases=list(found.rows()),
        steps=[DifferenceRecord.derive(step, **_told(step)) for step in found.steps],
    )


def _answer(found: Bisection) -> str:
    changed = [step.after for step in found.steps if len(step.verdicts)]
    if not changed:
        return "No release changed a verdict."
    return f"{found.distribution} changed verdicts in {', '.join(changed)}."
