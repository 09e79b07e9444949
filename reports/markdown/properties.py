"""Properties in Markdown: implementation by property, and what fails with its numbers."""

from __future__ import annotations

from attncheck.elements import written_element
from attncheck.reports.frames import Frames
from attncheck.reports.markdown.text import code, commands, escape, table
from attncheck.reports.properties import (
    OUTCOMES_NOTE,
    PropertyCell,
    asked_rows,
    command_for,
    failing_first,
    property_table,
    words_by_title,
)

_MAX_LISTED = 50
_MAX_COMMANDS = 3


def properties_section(frames: Frames) -> list[str]:
    """Return a line per property with what it comes to on each implementation; nothing where none was asked."""
    rows = asked_rows(frames)
    if not rows:
        return []
    shown = property_table(rows)
    lines = [[code(line.name), escape(line.says), *map(_cell, line.cells)] for line in shown.lines]
    headings = ["property", "what must hold", *map(escape, shown.columns)]
    section = ["## Properties", "", OUTCOMES_NOTE, "", *table(headings, lines)]
    failing = failing_first(rows)
    if not failing:
        return section
    wrong = [
        [
            *(escape(row.implementation), code(row.property_name), code(row.case), row.dtype, f"**{row.outcome}**"),
            written_element(row.index, row.stage),
            *map(_number, (row.first, row.second, row.exact, row.first_bound, row.second_bound)),
            escape(row.sentence),
        ]
        for row in failing[:_MAX_LISTED]
    ]
    columns = ["implementation", "property", "case", "dtype", "outcome", "element", "first", "second", "exact"]
    columns += ["its bound", "the other's", "what happened"]
    section += ["", "### Properties that do not hold", "", *table(columns, wrong, "llllllrrrrrl")]
    if len(failing) > _MAX_LISTED:
        section += ["", f"And {len(failing) - _MAX_LISTED} more, in `properties.csv`."]
    again = words_by_title(frames)
    shown_again = commands([line for row in failing[:_MAX_COMMANDS] if (line := command_for(row, again))])
    return [*section, "", *shown_again[:-1]] if shown_again else section


def _number(value: float | None) -> str:
    """Write a number shortly, NaN too: it is what went wrong."""
    return "" if value is None else f"{value:.6g}"


def _cell(cell: PropertyCell) -> str:
    text = escape(cell.text)
    if cell.state == "failing":
        return f"**{text}**"
    return f"{text}, expected" if cell.state == "xfail" else text
