"""What implementations mean, side by side, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from attncheck.conventions import Measured
from attncheck.errors import ExitCode
from attncheck.reports.machine.other_documents import ConventionsDocument, Meaning
from attncheck.reports.machine.text import header
from attncheck.reports.terminal import plain_console

Conventions = Mapping[str, Sequence[Measured]]
"""What was measured of each implementation, by its name and dtype, in the order of the questions."""


def print_conventions(measured: Conventions, console: Console | None = None) -> None:
    """Print a line for each question, and below what is declared wrongly, or has to be declared."""
    console = console or plain_console()
    console.print(_table(measured))
    for name, answers in measured.items():
        for line in _notes(answers):
            console.print(f"{name}: {line}", soft_wrap=True)


def conventions_document(measured: Conventions, code: ExitCode, missing: Sequence[str]) -> ConventionsDocument:
    """Return the same for programs."""
    answers = [answer for each in measured.values() for answer in each]
    counts = {
        "answers": sum(answer.kind in ("measured", "open") for answer in answers),
        "unlike attncheck's cases": sum(answer.departs for answer in answers),
        "unlike what is declared": sum(answer.contradicts for answer in answers),
    }
    return ConventionsDocument(
        attncheck=header("conventions"),
        exit_code=int(code),
        answer=", ".join(f"{count:,} {what}" for what, count in counts.items()),
        failures=[],
        next=[],
        notes=[
            *(f"{name} is not installed" for name in missing),
            *(f"{name}: {line}" for name, each in measured.items() for line in _notes(each)),
        ],
        implementations={name: [Meaning(**answer.as_record()) for answer in each] for name, each in measured.items()},
    )


def _table(measured: Conventions) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in ("convention", "attncheck's cases mean", *measured):
        table.add_column(column, overflow="fold")
    for answers in zip(*measured.values(), strict=True):
        question = answers[0].question
        expected = " or ".join(dict.fromkeys(answer.question.expected for answer in answers)) or "-"
        table.add_row(f"{question.name}: {question.asks}", expected, *map(_cell, answers))
    return table


def _cell(answer: Measured) -> str:
    if answer.kind in ("unsupported", "failed"):
        return answer.kind
    return f"{answer.means} (differs)" if answer.departs else answer.means


def _notes(answers: Sequence[Measured]) -> Iterator[str]:
    for answer in answers:
        if answer.contradicts:
            yield f"it declares {answer.declared} for {answer.question.name}, and gives {answer.means}"
        if answer.declaration:
            yield f'declare what it does: attention.conventions = {{"empty_rows": "{answer.declaration}"}}'
    departing = [answer for answer in answers if answer.departs and not (answer.declaration or answer.declared)]
    if departing:
        yield f"attncheck's cases mean otherwise: {_names(departing)}"
    if inexact := [answer for answer in answers if not answer.is_exact]:
        yield f"less accurate than it declares, and recognised all the same: {_names(inexact)}"
    for answer in answers:
        if answer.kind == "failed":
            yield f"{answer.question.name} failed: {answer.means}"
    unsupported = [answer for answer in answers if answer.kind == "unsupported"]
    for reason in dict.fromkeys(answer.means for answer in unsupported):
        without = [answer for answer in unsupported if answer.means == reason]
        yield f"not asked ({reason})" + ("" if len(without) == len(answers) else f": {_names(without)}")


def _names(answers: Sequence[Measured]) -> str:
    return "; ".join(answer.question.name for answer in answers)
