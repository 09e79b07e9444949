"""Properties in a terminal: implementation by property, what fails, and the story of a call that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from attncheck.elements import written_element
from attncheck.properties.rows import PropertyOutcome, PropertyRow, sentence_of
from attncheck.reports.properties import PropertyTable, command_for, failing_first, property_table
from attncheck.reports.terminal import plain_console
from attncheck.spec.properties import PROPERTIES

_MAX_LISTED = 20


def print_properties(
    rows: Sequence[PropertyRow], again: Mapping[str, Sequence[str]], console: Console | None = None, *, quiet: bool
) -> None:
    """Print implementation by property, and below what fails with the command that explains it."""
    console = console or plain_console()
    if not quiet:
        console.print(sentence_of(rows), style="bold", soft_wrap=True)
        console.print(_terminal_table(property_table(rows)))
    failing = failing_first(rows)
    for row in failing[:_MAX_LISTED]:
        line = f"{row.implementation}  {row.property_name}  {row.case}  {row.dtype}: {row.sentence}"
        console.print(line, style="red", soft_wrap=True)
        if again_line := command_for(row, again):
            console.print(f"  {again_line}", soft_wrap=True)
    if len(failing) > _MAX_LISTED:
        console.print(f"and {len(failing) - _MAX_LISTED} more", soft_wrap=True)
    if not quiet:
        for line in _not_run(rows):
            console.print(line, soft_wrap=True)


def _not_run(rows: Sequence[PropertyRow]) -> list[str]:
    """Say what could not be asked, each reason once."""
    open_ = (PropertyOutcome.FAILED, PropertyOutcome.NOT_JUDGED)
    left = [row for row in rows if row.outcome in open_]
    lines = list(
        dict.fromkeys(f"{row.implementation}  {row.property_name}: {row.outcome}: {row.message}" for row in left)
    )
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return [*lines[:_MAX_LISTED], *more]


def _terminal_table(table: PropertyTable) -> Table:
    shown = Table(box=None, pad_edge=False, show_edge=False)
    for column in ("property", *table.columns):
        shown.add_column(column, overflow="fold")
    for line in table.lines:
        cells = [f"{cell.text}, expected" if cell.state == "xfail" else cell.text for cell in line.cells]
        shown.add_row(line.name, *cells)
    return shown


def explanation_of(row: PropertyRow, call: str) -> list[str]:
    """Tell a row's story: what the calls were, which element, the two numbers, the exact one, and the bounds."""
    lines = [
        f"{row.implementation}, {row.property_name}, {row.case} in {row.dtype}: {row.outcome}"
        + (f", and claims {row.claim}" if row.claim else ""),
        f"  what must hold   {PROPERTIES[row.property_name].says}",
        f"  the first call   {call}",
        f"  further calls    {row.variant}",
    ]
    if row.first is not None and row.second is not None:
        lines += [
            f"  the element      {written_element(row.index, row.stage)}",
            f"  the first gave   {row.first!r}",
            f"  the further      {row.second!r}",
        ]
    if row.exact is not None and row.first_bound is not None and row.second_bound is not None:
        lines += [
            f"  the exact answer {row.exact!r}",
            f"  the bounds       {row.first_bound:.6g} of the first, {row.second_bound:.6g} of the further",
        ]
    if row.elements:
        lines.append(f"  in all           {row.differing} of {row.elements} elements differ in some bits")
    return [*lines, f"  {row.sentence}"]
