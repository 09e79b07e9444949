"""A document's matrix as a table with coloured cells: its numbers are text, which everyone can read, copy and print."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from attncheck.reports.figures.heatmaps import heatmaps
from attncheck.reports.figures.panels import MAX_ANNOTATED, Panel, ink_on, shades, short_number

_BLACK = "#000000"


@dataclass(frozen=True)
class HeatTable:
    """One matrix: its title, what its rows and columns are, their names, and a colour and a text per cell."""

    title: str
    axes: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, bool, str], ...]], ...]
    """each row's name, and of each cell its colour, whether its ink is light, and its number"""


@dataclass(frozen=True)
class Heat:
    """A matrix as a table, or, where it is too large for numbers, as a picture."""

    table: HeatTable | None
    picture: Markup


def heat_of(panel: Panel, number: int) -> Heat:
    """Return a matrix to show; ``number`` keeps the parts of one picture apart from those of another."""
    if not panel.matrix.size or max(panel.matrix.shape) > MAX_ANNOTATED:
        # Own markup: made by matplotlib, with every text escaped.
        markup = heatmaps([panel]).markup
        for reference in ('id="', "url(#", 'href="#'):
            markup = markup.replace(reference, f"{reference}heat{number}-")
        return Heat(None, Markup(markup))
    return Heat(_table(panel), Markup())


def _table(panel: Panel) -> HeatTable:
    colours = shades(panel)
    rows = []
    for index, numbers in enumerate(panel.matrix.tolist()):
        cells = tuple(
            ("#" + bytes(colour).hex(), ink_on(colour) != _BLACK, short_number(value))
            for colour, value in zip(colours[index], numbers, strict=True)
        )
        rows.append((_name(panel.row_labels, index), cells))
    columns = tuple(_name(panel.column_labels, index) for index in range(panel.matrix.shape[1]))
    axes = [f"{panel.row_axis} ↓" if panel.row_axis else "", f"{panel.column_axis} →" if panel.column_axis else ""]
    return HeatTable(panel.title, " ".join(filter(None, axes)), columns, tuple(rows))


def _name(labels: object, index: int) -> str:
    """Return a row's or column's name, its number where it has none."""
    return str(labels[index]) if isinstance(labels, list | tuple) and index < len(labels) else str(index)
