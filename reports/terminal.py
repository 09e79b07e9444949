"""The report's short form and the outcome of properties, for a terminal, a log and a program."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from attncheck.common.wording import at_most, counted
from attncheck.reports.coverage import picked, unjudged
from attncheck.reports.defects import Defect, cause_line, declaration_lines, defects, defects_of, first_commands
from attncheck.reports.failure_patterns import in_common_lines
from attncheck.reports.frames import Frames
from attncheck.reports.outcome import failures_of
from attncheck.reports.properties import broken_properties, command_for, facts_of, failing_first, sentence_of
from attncheck.reports.sections import Coloured, Figure, Inline, how_wrong, implementations, properties_of
from attncheck.reports.sections import Table as TableBlock
from attncheck.reports.summary import make_summary
from attncheck.results.format import Row
from attncheck.spec import PROPERTIES
from attncheck.spec.verdicts import PropertyOutcome

_MAX_LISTED = 3
"""Defects that are shown, each in its simplest case."""
_MAX_PROPERTIES = 20
_UNBOUNDED = 10_000
_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


def plain_console() -> Console:
    """Return a console that shows texts as they are."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED  # a file or a log has no width at which names would have to be cut
    return console


Line = str | tuple[str, str] | TableBlock
"""A line, one in a style, or a table."""


def print_lines(lines: Iterable[Line], console: Console | None = None) -> None:
    """Print lines, which the terminal breaks where it ends."""
    console = console or plain_console()
    for line in lines:
        if isinstance(line, TableBlock):
            console.print(terminal_table(line))
        else:
            text, style = (line, "") if isinstance(line, str) else line
            console.print(text, style=style, soft_wrap=True)


def print_summary(
    frames: Frames, path: Path, *, quiet: bool, announced: Collection[str] = (), ending: str = "Report"
) -> None:
    """Print the answer, a count of verdicts per implementation, what is wrong, and where the report is.

    Where an implementation is wrong, that is said first and shortly; what else was judged is in the report. Quiet,
    print only what is wrong. Notes that were ``announced`` already are not repeated.
    """
    ends = [] if quiet else [*(f"Why: {command}" for command in first_commands(frames)), f"{ending}: {path}"]
    print_lines(chain(_answer_lines(frames, announced, quiet=quiet), _wrong_lines(frames), ends))


def _wrong_lines(frames: Frames) -> Iterator[Line]:
    """Yield properties that do not hold, and the first defects, each in its simplest case."""
    yield from _broken_lines(broken_properties(frames) if frames.properties else ())
    shown = _shown(frames)
    for defect in shown:
        # On one line, also because a CI system takes a line that begins with :: for a command.
        first, *rest = (_LINE_BREAK.sub(" ", line) for line in _lines(frames, defect))
        yield first, "red"
        yield from rest
    if unsaid := len(defects(frames)) - len(shown):
        yield f"and {counted(unsaid, 'more defect')}"


def _broken_lines(broken: Sequence[tuple[Row, str]]) -> Iterator[Line]:
    """Yield rows of properties that do not hold, each with the command that explains it."""
    for row, command in broken[:_MAX_PROPERTIES]:
        text = f"{row.implementation}  {row.property_name}  {row.case}  {row.dtype}: {row.message}"
        yield _LINE_BREAK.sub(" ", text), "red"
        yield from [f"  {command}"] if command else []


def _answer_lines(frames: Frames, announced: Collection[str], *, quiet: bool) -> Iterator[Line]:
    """Yield who agrees and who is wrong, and in what; of one that is wrong, what its failing cases have in common."""
    answer, found = make_summary(frames), [column for column in frames.columns if defects_of(frames, column)]
    if quiet:
        yield from ((f"too little was judged: {line}", "red") for line in unjudged(frames))
    texts = {column: text for column in found if (text := cause_line(defects_of(frames, column)))}
    first = answer.word
    is_of_one = len(found) == 1 and first.startswith(found[0].implementation)
    if texts and is_of_one and ";" not in first and ". " not in first:
        first = f"{first}: {next(iter(texts.values()))}"
        texts = {}
    opening = first if quiet or first != answer.word else answer.first_line.removesuffix(".")
    said = [f"{opening}."] if not quiet or first != answer.word else []
    said += [f"{frames.title(column, with_version=False)}: {text}." for column, text in texts.items()]
    said += [*declaration_lines(frames), *(f"{line}." for line in in_common_lines(frames))]
    yield from ((_LINE_BREAK.sub(" ", line), "bold") for line in said)
    if not quiet:
        yield from [f"{answer.judged}."] if first != answer.word and answer.judged else []
        yield from (*answer.warnings, *picked(frames)) if found else answer.sentences
        yield from (f"{note}." for note in frames.notes if note not in announced)
        yield implementations(frames)


def _shown(frames: Frames) -> list[Defect]:
    """Return the first defects of implementations, and the first things that documents or lists have wrong."""
    found = defects(frames)
    of_calls = [each for each in found if each.is_shown_by_calls][:_MAX_LISTED]
    return of_calls + [each for each in found if not each.is_shown_by_calls][:_MAX_LISTED]


def _lines(frames: Frames, defect: Defect) -> list[str]:
    """Return where a defect shows, and how in the simplest case."""
    row = defect.row
    dtypes = f" [{', '.join(defect.dtypes)}]" if row["dtype"] else ""
    which = f"{row['case']}{dtypes}"
    if defect.others:
        which = f"{len(defect.cases):,} cases{dtypes}, the first {row['case']},"
    line = f"{defect.name}: {which} {frames.named(row['implementation'], row['environment'])}".rstrip()
    if not (row["stage"] and defect.is_shown_by_calls):
        return [f"{line}: {row['message']}"]
    (failure,) = failures_of(frames, pd.DataFrame([row]))
    return [line, f"  {how_wrong(failure, of_several=len(defect.dtypes) > 1)}"]


def print_properties(rows: Sequence[Row], again: Mapping[str, Sequence[str]], *, quiet: bool) -> None:
    """Print implementation by property, and below what fails with the command that explains it."""
    failing = failing_first(rows)
    more = [f"and {len(failing) - _MAX_PROPERTIES} more"] if len(failing) > _MAX_PROPERTIES else []
    broken = [*_broken_lines([(row, command_for(row, again)) for row in failing]), *more]
    opening: list[Line] = [(sentence_of(rows), "bold"), properties_of(rows, shortly=True)]
    print_lines(broken if quiet else [*opening, *broken, *_not_run(rows)])


def _not_run(rows: Sequence[Row]) -> list[str]:
    """Say what could not be asked, each reason once."""
    open_ = (PropertyOutcome.FAILED, PropertyOutcome.NOT_JUDGED)
    left = [row for row in rows if row.verdict in open_]
    lines = dict.fromkeys(f"{row.implementation}  {row.property_name}: {row.verdict}: {row.message}" for row in left)
    return at_most(_MAX_PROPERTIES, list(lines))


def terminal_table(table: TableBlock) -> Table:
    """Render a table of a section."""
    shown = Table(box=None, pad_edge=False, show_edge=False)
    for heading, letter in zip(table.headings, table.align.ljust(len(table.headings), "l"), strict=False):
        shown.add_column(plain_text(heading), justify="right" if letter == "r" else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(plain_text, row))
    return shown


def plain_text(part: Inline) -> str:
    """Return a text without its marks."""
    if isinstance(part, tuple):
        return "".join(map(plain_text, part))
    if isinstance(part, Coloured):
        return plain_text(part.content)
    return part.words if isinstance(part, Figure) else part if isinstance(part, str) else part.text


def explanation_of(row: Row, call: str) -> list[str]:
    """Tell a row's story: what the calls were, which element, the two numbers, the exact one, and the bounds."""
    claim = f", and claims {row.claim}" if row.claim else ""
    facts = {"what must hold": PROPERTIES[row.property_name].says, "the call": call} | facts_of(row)
    return [
        f"{row.implementation}, {row.property_name}, {row.case} in {row.dtype}: {row.verdict}{claim}",
        *(f"  {name:<21} {text}" for name, text in facts.items()),
        f"  {row.message}",
    ]
