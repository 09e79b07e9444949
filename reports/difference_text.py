"""A difference between two results as text, files and JSON, and the differences from release to release.

A change is a line that fits a terminal: names are cut in their middle where they are too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from attncheck.errors import ExitCode, OutputError
from attncheck.merge import merge_runs
from attncheck.reports.build_frames import make_frames
from attncheck.reports.difference import BETTER, ERROR_MEASURES, OTHER, WORSE, Difference, make_difference, outcomes
from attncheck.reports.frames import Frames, records
from attncheck.reports.machine.documents import header
from attncheck.reports.machine.other_documents import (
    BisectionDocument,
    DifferenceDocument,
    DifferenceRecord,
    ReleaseRecord,
)
from attncheck.reports.machine.outcome import failures_of, first_of_each, rows_of
from attncheck.reports.markdown import code, escape, number, table
from attncheck.reports.summary import what_is_wrong
from attncheck.reports.terminal import plain_console
from attncheck.reports.write import write_csv
from attncheck.results.reader import find_runs, read_runs
from attncheck.wording import counted

_MAX_LISTED = 20
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


def print_changes(console: Console, difference: Difference) -> None:
    """Print the verdicts that changed, alone."""
    _print_changes(console, "verdicts", difference.verdicts, verbose=False)


def _print_changes(console: Console, name: str, frame: pd.DataFrame, *, verbose: bool) -> None:
    if frame.empty:
        return
    width = console.width if console.is_terminal else WIDTH
    shown = frame if verbose else frame.head(_MAX_LISTED)
    lines = change_lines(name, shown, None if verbose else width)
    console.print()
    of = "" if verbose else only_implementation(shown)
    console.print(f"{_TITLES[name]}, {of}" if of else _TITLES[name], style="bold")
    for line, change in zip(lines, shown["change"], strict=True):
        console.print(line, style="red" if change == WORSE else None, soft_wrap=True)
    if len(frame) > len(shown):
        console.print(f"and {len(frame) - len(shown):,} more: --verbose lists all, in full", soft_wrap=True)


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
            print_changes(console, step)
    if found.steps and not any(len(step.verdicts) for step in found.steps):
        console.print("No release changed a verdict.", soft_wrap=True)
    for why in found.missed.values():
        console.print(why, soft_wrap=True)


_KEYS = ["environment", "implementation", "case", "dtype"]


def difference_document(difference: Difference, after: Frames) -> DifferenceDocument:
    """Return what changed between two results; what got worse with its numbers, of the frames ``after``."""
    worse = difference.verdicts[difference.verdicts["change"].eq(WORSE)]
    wrong = what_is_wrong(after)
    keys = [pd.MultiIndex.from_frame(frame[_KEYS].astype(object)) for frame in (wrong, worse)]
    failures = failures_of(after, wrong[keys[0].isin(keys[1])])
    return DifferenceDocument(
        attncheck=header("diff"),
        exit_code=int(difference.exit_code),
        answer=sentences(difference)[0],
        failures=failures,
        next=first_of_each(failures),
        notes=list(difference.notes),
        **_fields(difference),
    )


def _fields(difference: Difference) -> dict[str, Any]:
    return {
        "before": difference.before,
        "after": difference.after,
        "compared": difference.compared,
        "only": list(difference.only),
        "sentences": sentences(difference),
        **{name: rows_of(frame) for name, frame in difference.tables().items()},
    }


def bisection_document(found: Bisection, code: ExitCode) -> BisectionDocument:
    """Return what several releases gave."""
    return BisectionDocument(
        attncheck=header("bisect"),
        exit_code=int(code),
        answer=_answer(found),
        notes=list(found.missed.values()),
        distribution=found.distribution,
        releases=[ReleaseRecord(**row) for row in found.rows()],
        steps=[DifferenceRecord(**_fields(step)) for step in found.steps],
        missed=dict(found.missed),
    )


def _answer(found: Bisection) -> str:
    changed = [step.after for step in found.steps if len(step.verdicts)]
    if not changed:
        return "No release changed a verdict."
    return f"{found.distribution} changed verdicts in {', '.join(changed)}."
