"""The report's short form, for a terminal, a log and a program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attncheck.reports.alike import AlikeRows, count_evaluations, group_alike
from attncheck.reports.answer import findings, make_summary
from attncheck.reports.cells import FAILS_A_RUN, Cell, State, cell_table, worst_cell
from attncheck.reports.commands import first_commands
from attncheck.reports.coverage import unjudged
from attncheck.reports.frames import Frames
from attncheck.reports.in_common import in_common_lines
from attncheck.reports.printed_numbers import unverified_on
from attncheck.reports.simplest import described
from attncheck.verdicts import Verdict

_MAX_LISTED = 20
_UNBOUNDED = 10_000
_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


def print_failing_properties(frames: Frames, console: Console) -> None:
    """Print the properties that do not hold, a line each."""
    if not frames.properties:
        return
    from attncheck.reports.properties import broken_properties

    for broken in broken_properties(frames)[:_MAX_LISTED]:
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

    Quiet, print only what is wrong. Notes that were ``announced`` already are not repeated.
    """
    console = plain_console()
    wrong = findings(frames)
    if quiet:
        for line in unjudged(frames):
            console.print(f"too little was judged: {line}", style="red", soft_wrap=True)
    else:
        answer = make_summary(frames)
        console.print(answer.first_line, style="bold", soft_wrap=True)
        for line in (*answer.sentences, *(f"{note}." for note in frames.notes if note not in announced)):
            console.print(line, soft_wrap=True)
        console.print(_counts(frames))
    for line in in_common_lines(frames):
        console.print(f"{_LINE_BREAK.sub(' ', line)}.", style="bold", soft_wrap=True)
    print_failing_properties(frames, console)
    listed = group_alike(wrong)[:_MAX_LISTED]
    for each in listed:
        console.print(_line(each, many=len(frames.environments) > 1), style="red", soft_wrap=True)
        if each.row["implementation"] and (text := described(frames.cases[each.row["case"]])):
            console.print(f"  {_LINE_BREAK.sub(' ', text)}", style="dim", soft_wrap=True)
    if unsaid := len(wrong) - count_evaluations(listed):
        console.print(f"and {unsaid} more", soft_wrap=True)
    if not quiet:
        for command in first_commands(frames, wrong):
            console.print(f"Why: {command}", soft_wrap=True)
        console.print(f"{ending}: {path}", soft_wrap=True)


def _line(alike: AlikeRows, *, many: bool) -> str:
    row = alike.row
    environment = f" ({row['environment']})" if many and row["environment"] else ""
    where = f" {row['implementation']}{environment}" if row["implementation"] else ""
    which = f"{row['case']} [{', '.join(alike.dtypes)}]" if row["dtype"] else str(row["case"])
    if alike.others:
        which = f"{len(alike.cases):,} cases, the first {row['case']} [{row['dtype']}],"
    stage = f"{row['stage']}: " if row["stage"] else ""
    # On one line, also because a CI system takes a line that begins with :: for a command.
    message = _LINE_BREAK.sub(" ", row["message"])
    return f"{row['verdict']}: {which}{where}: {stage}{message}"


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
