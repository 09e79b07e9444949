"""The writer for a terminal or a log: lines, and tables of the document model."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table as RichTable

from attncheck.reports.document_model import Table, Text, plain_text

_UNBOUNDED_WIDTH = 10_000


def plain_console() -> Console:
    """Return a console that shows texts as they are."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED_WIDTH  # a file or a log has no width at which names would have to be cut
    return console


Line = str | Text | Table
"""A line of plain text, one whose kind is its style, or a table."""


def print_lines(lines: Iterable[Line], console: Console | None = None) -> None:
    """Print lines, which the terminal breaks where it ends."""
    console = console or plain_console()
    for line in lines:
        if isinstance(line, Table):
            console.print(terminal_table(line))
        else:
            text = Text(line) if isinstance(line, str) else line
            console.print(plain_text(text.content), style=text.kind, soft_wrap=True)


def terminal_table(table: Table) -> RichTable:
    """Render a table of a section."""
    shown = RichTable(box=None, pad_edge=False, show_edge=False)
    for heading, letter in zip(table.headings, table.align.ljust(len(table.headings), "l"), strict=False):
        shown.add_column(plain_text(heading), justify="right" if letter == "r" else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(plain_text, row))
    return shown
