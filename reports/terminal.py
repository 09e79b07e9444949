"""The report's short form, for a terminal, a log and a program."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console
from rich.table import Table

from attncheck.elements import told_apart, written_element
from attncheck.reports.alike import AlikeRows, group_alike, group_by_case
from attncheck.reports.answer import findings, make_summary
from attncheck.reports.causes import cause_line, causes
from attncheck.reports.cells import FAILS_A_RUN, Cell, State, cell_table, worst_cell
from attncheck.reports.commands import first_commands
from attncheck.reports.coverage import picked, unjudged
from attncheck.reports.frames import Frames
from attncheck.reports.in_common import in_common_lines
from attncheck.reports.printed_numbers import unverified_on
from attncheck.verdicts import Verdict

if TYPE_CHECKING:
    from attncheck.reports.machine.documents import Failure

_MAX_LISTED = 3
"""Failures that are shown, the simplest first."""
_MAX_PROPERTIES = 20
_UNBOUNDED = 10_000
_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


def print_failing_properties(frames: Frames, console: Console) -> None:
    """Print the properties that do not hold, a line each."""
    if not frames.properties:
        return
    from attncheck.reports.properties import broken_properties

    for broken in broken_properties(frames)[:_MAX_PROPERTIES]:
        row = broken.row
        line = f"{row.implementation}  {row.property_name}  {row.case}  {row.dtype}: {row.sentence}"
        console.print(_LINE_BREAK.sub(" ", line), style="red", soft_wrap=True)
        if broken.command:
            console.print(f"  {broken.command}", soft_wrap=True)


def plain_console() -> Console:
    """Return a console that shows texts as they are."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED  # a file or a log has no width at which names would have to be cut
    return console


def print_summary(
    frames: Frames, path: Path, *, quiet: bool, announced: Collection[str] = (), ending: str = "Report"
) -> None:
    """Print the answer, a count of verdicts per implementation, what is wrong, and where the report is.

    Where an implementation is wrong, that is said first and shortly; what else was judged is in the report. Quiet,
    print only what is wrong. Notes that were ``announced`` already are not repeated.
    """
    console = plain_console()
    wrong = findings(frames)
    if quiet:
        for line in unjudged(frames):
            console.print(f"too little was judged: {line}", style="red", soft_wrap=True)
    _print_answer(frames, console, announced, quiet=quiet)
    print_failing_properties(frames, console)
    shown = 0
    for lines, evaluations in _simplest(frames, wrong):
        shown += evaluations
        for line in lines:
            console.print(_LINE_BREAK.sub(" ", line), style="red" if line is lines[0] else "", soft_wrap=True)
    if unsaid := len(wrong) - shown:
        console.print(f"and {unsaid:,} more", soft_wrap=True)
    if not quiet:
        for command in first_commands(frames, wrong):
            console.print(f"Why: {command}", soft_wrap=True)
        console.print(f"{ending}: {path}", soft_wrap=True)


def _print_answer(frames: Frames, console: Console, announced: Collection[str], *, quiet: bool) -> None:
    """Print who agrees and who is wrong, and in what; of one that is wrong, what its failing cases have in common."""
    answer, found = make_summary(frames), causes(frames)
    texts = {column: text for column, of in found.items() if (text := cause_line(of))}
    many = len(frames.environments) > 1
    first = answer.word
    is_of_one = len(found) == 1 and first.startswith(next(iter(found)).implementation)
    if texts and is_of_one and ";" not in first and ". " not in first:
        first = f"{first}: {next(iter(texts.values()))}"
        texts = {}
    if not quiet:
        opening = answer.first_line.removesuffix(".") if first == answer.word else first
        console.print(_LINE_BREAK.sub(" ", f"{opening}."), style="bold", soft_wrap=True)
    elif first != answer.word:
        console.print(_LINE_BREAK.sub(" ", f"{first}."), style="bold", soft_wrap=True)
    for column, text in texts.items():
        title = column.title(with_environment=many, with_version=False)
        console.print(_LINE_BREAK.sub(" ", f"{title}: {text}."), style="bold", soft_wrap=True)
    for line in in_common_lines(frames):
        console.print(f"{_LINE_BREAK.sub(' ', line)}.", style="bold", soft_wrap=True)
    if quiet:
        return
    sentences = (answer.judged + ".",) if first != answer.word and answer.judged else ()
    for line in (*sentences, *((*answer.warnings, *picked(frames)) if found else answer.sentences)):
        console.print(line, soft_wrap=True)
    for note in frames.notes:
        if note not in announced:
            console.print(f"{note}.", soft_wrap=True)
    console.print(_counts(frames))


def _simplest(frames: Frames, wrong: pd.DataFrame) -> Iterator[tuple[list[str], int]]:
    """Yield the lines of the simplest failures, and of how many evaluations they are; then of documents and records.

    What could not be run for one reason, in whatever cases, is one of them.
    """
    if wrong.empty:
        return
    from attncheck.reports.machine.failures import failures_of

    of_implementations = wrong["implementation"].ne("") & wrong["dtype"].ne("")
    many = len(frames.environments) > 1
    numbers: list[int] = []
    for alike in group_by_case(wrong[of_implementations])[:_MAX_LISTED]:
        numbers.append(alike.evaluations)
        described = [f"{_line(alike, many=many)}"]
        if not alike.others and alike.row["stage"]:
            (failure,) = failures_of(frames, pd.DataFrame([alike.row]))
            described.append(f"  {how_wrong(failure, of_several=len(alike.dtypes) > 1)}")
        yield described, alike.evaluations
    for alike in group_alike(wrong[~of_implementations])[:_MAX_LISTED]:
        yield [f"{_line(alike, many=many)}: {alike.row['message']}"], alike.evaluations


def how_wrong(failure: Failure, *, of_several: bool) -> str:
    """Describe a wrong element: its value, the right one, and the error in units of the bound."""
    if failure.element is None or failure.computed is None or failure.exact is None:
        return failure.message
    computed, exact = told_apart(failure.computed, failure.exact)
    element = written_element(failure.element, failure.element_stage or "")
    where = f" in {failure.dtype}" if of_several else ""
    text = f"{element} is {computed}{where}, should be {exact}"
    if failure.ratio is None or not math.isfinite(failure.ratio):
        return text
    return f"{text}: off by {failure.ratio:.3g} times the error bound"


def _line(alike: AlikeRows, *, many: bool) -> str:
    row = alike.row
    environment = f" ({row['environment']})" if many and row["environment"] else ""
    where = f" {row['implementation']}{environment}" if row["implementation"] else ""
    which = f"{row['case']} [{', '.join(alike.dtypes)}]" if row["dtype"] else str(row["case"])
    if alike.others:
        which = f"{len(alike.cases):,} cases, the first {row['case']} [{row['dtype']}],"
    if row["stage"] or not row["implementation"]:
        return f"{row['verdict']}: {which}{where}"
    # On one line, also because a CI system takes a line that begins with :: for a command.
    return f"{row['verdict']}: {which}{where}: {row['message']}"


def _counts(frames: Frames) -> Table:
    """Cases per verdict, one line per implementation."""
    table = Table(box=None, pad_edge=False)
    headings, lines = verdict_counts(frames)
    for stage, heading in enumerate(headings):
        table.add_column(heading, justify="right" if stage else "left")
    for line in lines:
        table.add_row(*line)
    return table


def verdict_counts(frames: Frames) -> tuple[list[str], list[list[str]]]:
    """Count cases per verdict: the headings, and a line per implementation; "-" where there is none.

    What was not judged has columns of its own, numbers that were not compared another.
    """
    many = len(frames.environments) > 1
    cells = cell_table(frames)
    words = {
        column: Counter(counted_as(row[column]) if column in row else "not run" for row in cells.values())
        for column in frames.columns
    }
    shown = sorted({word for counts in words.values() for word in counts}, key=lambda word: (word != "agree", word))
    open_numbers = {column: unverified_on(frames, column) for column in frames.columns}
    lines = [
        [column.title(with_environment=many), *(str(counts[word]) if counts[word] else "-" for word in shown)]
        + ([str(open_numbers[column] or "-")] if any(open_numbers.values()) else [])
        for column, counts in words.items()
    ]
    return ["implementation", *shown, *(["unverified numbers"] if any(open_numbers.values()) else [])], lines


def counted_as(cells: Mapping[str, Cell]) -> str:
    """Return the verdict as which a case counts: what fails in any dtype, else that it agrees in one."""
    wrong = {dtype: cell for dtype, cell in cells.items() if cell.state in (*FAILS_A_RUN, State.XFAIL)}
    if wrong:
        return worst_cell(wrong).word
    agrees = any(cell.state in (State.AGREE, State.ERRATUM) for cell in cells.values())
    return Verdict.AGREE.value if agrees else worst_cell(cells).word
