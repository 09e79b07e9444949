"""The report's short form, for a terminal, a log and a program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from attncheck.harness.errors import ExitCode
from attncheck.harness.verdicts import Verdict
from attncheck.reports.alike import count_told, told_once
from attncheck.reports.answer import make_answer, verdict_table, what_is_wrong
from attncheck.reports.cells import Cell, State, cell_table, worst_cell
from attncheck.reports.frames import Frames

_MOST_LISTED = 20
_UNBOUNDED = 10_000
_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


def plain_console() -> Console:
    """Return a console that shows texts as they are."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED  # a file or a log has no width at which names would have to be cut
    return console


def print_summary(frames: Frames, path: Path, *, quiet: bool) -> None:
    """Print the answer, a count of verdicts per implementation, what is wrong, and where the report is.

    Quiet, print only what is wrong.
    """
    console = plain_console()
    answer = make_answer(frames)
    wrong = what_is_wrong(frames)
    if not quiet:
        console.print(f"{answer.word}.", style="bold", soft_wrap=True)
        for line in (*answer.sentences, *(f"{note}." for note in frames.notes)):
            console.print(line, soft_wrap=True)
        console.print(_counts(frames))
    told = told_once(wrong)
    for each in told[:_MOST_LISTED]:
        row = each.row
        where = (
            str(row["implementation"])
            if len(frames.environments) == 1
            else f"{row['implementation']} ({row['environment']})"
        )
        place = f"{row['stage']}: " if row["stage"] else ""
        # On one line, also because a CI system takes a line that begins with :: for a command.
        message = _LINE_BREAK.sub(" ", row["message"])
        which = f"{row['case']} [{', '.join(each.dtypes)}]"
        if each.others:
            which = f"{len(each.cases):,} cases, the first {row['case']} [{row['dtype']}],"
        text = f"{row['verdict']}: {which} {where}: {place}{message}"
        console.print(text, style="red", soft_wrap=True)
    if unsaid := len(wrong) - count_told(told[:_MOST_LISTED]):
        console.print(f"and {unsaid} more", soft_wrap=True)
    if not quiet:
        console.print(f"Report: {path.with_suffix('.html')}", soft_wrap=True)


def as_record(frames: Frames, path: Path, code: ExitCode) -> dict[str, Any]:
    """Return the same as plain data."""
    answer = make_answer(frames)
    wrong = what_is_wrong(frames)
    return {
        "answer": answer.word,
        "sentences": list(answer.sentences),
        "notes": list(frames.notes),
        "exit_code": int(code),
        "failures": wrong.to_dict("records"),
        "verdicts": {
            case: {column.title(with_environment=True): cell for column, cell in cells.items()}
            for case, cells in verdict_table(frames).items()
        },
        "report": str(path),
        "html": str(path.with_suffix(".html")),
    }


def _counts(frames: Frames) -> Table:
    """Cases per verdict, one line per implementation."""
    table = Table(box=None, pad_edge=False)
    headings, lines = verdict_counts(frames)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    for line in lines:
        table.add_row(*line)
    return table


def verdict_counts(frames: Frames) -> tuple[list[str], list[list[str]]]:
    """Count cases per verdict: the headings, and a line per implementation; "-" where there is none."""
    many = len(frames.environments) > 1
    cells = cell_table(frames)
    words = {
        column: Counter(_counted_as(row[column]) if column in row else "not run" for row in cells.values())
        for column in frames.columns
    }
    shown = sorted({word for counts in words.values() for word in counts}, key=lambda word: (word != "agree", word))
    lines = [
        [column.title(with_environment=many), *(str(counts[word]) if counts[word] else "-" for word in shown)]
        for column, counts in words.items()
    ]
    return ["implementation", *shown], lines


def _counted_as(cells: Mapping[str, Cell]) -> str:
    """Return the verdict as which a case counts: what diverges in any dtype, else that it agrees in one."""
    diverging = {dtype: cell for dtype, cell in cells.items() if cell.state in (State.FAILING, State.KNOWN)}
    if diverging:
        return worst_cell(diverging).word
    agrees = any(cell.state in (State.AGREE, State.ERRATUM) for cell in cells.values())
    return Verdict.AGREE.value if agrees else worst_cell(cells).word
