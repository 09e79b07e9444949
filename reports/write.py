"""The files of a report, written from frames, and a badge that says how much of a corpus agrees.

The badge is a small SVG, or the JSON that shields.io draws one from. It is green where everything that was asked was
judged and agrees, and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from csv import writer
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from xml.sax.saxutils import escape

import pandas as pd
import pyarrow as pa
from pyarrow import csv

from attncheck.errors import ExitCode, OutputError
from attncheck.reports.coverage import coverage
from attncheck.reports.frames import PROPERTIES, Frames, cell_table, property_columns
from attncheck.reports.html.page import html_pieces
from attncheck.reports.junit import property_suites, render_junit, render_suites
from attncheck.reports.markdown import render_markdown
from attncheck.reports.properties import sentence_of
from attncheck.reports.summary import exit_code_of
from attncheck.reports.terminal import counted_as
from attncheck.results.format import PROPERTIES_TABLE, Row
from attncheck.verdicts import Verdict

# Spreadsheets run what begins like this; some take the full-width forms too, and some pass over leading blanks.
_SIGN = r"[=+\-@\uff1d\uff0b\uff0d\uff20]"
_FORMULA = re.compile(rf"\s*{_SIGN}|[\t\n]")
# Where a list separator is a semicolon, a spreadsheet begins a new cell after one, whatever the quotes say.
_FORMULA_WITHIN = re.compile(rf"([;\t\n]\s*)(?={_SIGN})")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf|nan)")
_LINE_BREAK = re.compile(r"\r\n?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as CSV: a line of column names, texts in quotes, numbers in full, nothing for no value."""
    table = pa.Table.from_pandas(frame.assign(**_harmless_columns(frame)), preserve_index=False)
    csv.write_csv(table, path)


def harmless(text: str) -> str:
    """Return a text as a cell that no spreadsheet runs; numbers stay as they are."""
    if _NUMBER.fullmatch(text):
        return text
    text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _LINE_BREAK.sub("\n", text))
    text = _FORMULA_WITHIN.sub(r"\1'", text)
    return f"'{text}" if _FORMULA.match(text) else text


def csv_text(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV with a line of column names, each cell as one that no spreadsheet runs."""
    text = StringIO()
    lines = ([harmless(str(cell)) for cell in row] for row in rows)
    writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def _harmless_columns(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the columns in which something has to be changed; each text is looked at once."""
    columns = {}
    for name in frame.select_dtypes(exclude=["number", "bool"]).columns:
        texts = [value for value in frame[name].unique() if isinstance(value, str)]
        changed = {text: safe for text in texts if (safe := harmless(text)) != text}
        if changed:
            columns[str(name)] = frame[name].map(lambda value, changed=changed: changed.get(value, value))
    return columns


_MOST_ROWS = 10_000
"""Rows of a table that is written as CSV too: more are for programs, which read Parquet at a tenth of the size."""

REPORT_NAME = "report.md"
HTML_NAME = "report.html"
JUNIT_NAME = "junit.xml"


def write_report(frames: Frames, directory: Path) -> Path:
    """Write report.md, report.html, junit.xml, and every frame as Parquet and CSV; return the path of report.md.

    A frame of more than 10,000 rows is written as Parquet only. The same frames give the same bytes. Raises
    ``OutputError`` where the folder cannot be written.
    """
    if directory.is_symlink() and (directory.parent / "environment.json").exists():
        raise OutputError(f"{directory} is a link that came with the results; name another folder with --output")
    with OutputError.where(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.tables().items():
        _write_table(frame, directory / f"{name}.csv")
        with OutputError.where(path := directory / f"{name}.parquet"):
            frame.to_parquet(_own(path), index=False, compression="zstd")
    texts = {JUNIT_NAME: render_junit(frames), HTML_NAME: html_pieces(frames), REPORT_NAME: [render_markdown(frames)]}
    for name, pieces in texts.items():
        with OutputError.where(path := directory / name):
            _own(path)
        _write_pieces(path, pieces)
    return directory / REPORT_NAME


def _write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as CSV, or remove what an earlier report left where it has too many rows."""
    with OutputError.where(path):
        if len(frame) > _MOST_ROWS:
            path.unlink(missing_ok=True)
        else:
            write_csv(frame, _own(path))


def _own(path: Path) -> Path:
    """Return a path at which there is no link: results that somebody sent may hold one, to any file of ours."""
    if path.is_symlink():
        path.unlink()
    return path


def _write_pieces(path: Path, pieces: Iterable[str]) -> None:
    with OutputError.where(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(pieces)


def write_junit(frames: Frames, path: Path) -> None:
    """Write the JUnit XML. Raises ``OutputError`` where it cannot be written."""
    _write_pieces(path, render_junit(frames))


def write_sarif(frames: Frames, path: Path) -> None:
    """Write the SARIF log of a run in this folder. Raises ``OutputError`` where it cannot be written."""
    from attncheck.reports.ci import folder_in_repository, render_sarif  # few runs write one

    _write_pieces(path, [render_sarif(frames, folder_in_repository(Path.cwd()))])


def write_badge(frames: Frames, path: Path) -> None:
    """Write the badge: as JSON for shields.io into a file that ends with .json, else as an SVG.

    Raises ``OutputError`` where it cannot be written.
    """
    badge = badge_of(frames)
    _write_pieces(path, [render_endpoint(badge) if path.suffix == ".json" else render_svg(badge)])


def write_property_table(rows: Sequence[Row], directory: Path) -> None:
    """Write rows of properties as properties.csv, as a report has them. Raises ``OutputError``."""
    path = directory / PROPERTIES_TABLE
    with OutputError.where(path):
        directory.mkdir(parents=True, exist_ok=True)
        write_csv(pd.DataFrame(list(map(property_columns, rows)), columns=list(PROPERTIES)), _own(path))


def write_property_junit(rows: Sequence[Row], again: Mapping[str, Sequence[str]], path: Path) -> None:
    """Write the JUnit XML of properties alone. Raises ``OutputError`` where it cannot be written."""
    suites = property_suites({"": rows}, {"": again})
    _write_pieces(path, render_suites(f"attncheck: {sentence_of(rows)}", list(suites)))


LABEL = "attention"
LABEL_COLOUR = "#24292f"
GREEN, RED, AMBER, BLUE, GREY = "#1a7f37", "#cf222e", "#8a5a00", "#0860c4", "#57606a"
"""All agrees; something is wrong; something could not be run; a part was judged, and agrees; nothing was judged."""
INK = "#ffffff"
_PADDING, _HEIGHT = 8, 20
_WIDTHS = {**dict.fromkeys("il,. ", 3.5), **dict.fromkeys("tfr", 4.5), **dict.fromkeys("0123456789", 7.0)}
"""Pixels, of letters of 11 pixels in the fonts that are named."""
_WIDTH = 6.8
"""Of all others."""


@dataclass(frozen=True)
class Badge:
    """What a badge says, and its colour."""

    message: str
    colour: str


def badge_of(frames: Frames) -> Badge:
    """Count the cases that agree among those that were asked, of all implementations together."""
    rows = cell_table(frames).values()
    agree = sum(counted_as(row[column]) == Verdict.AGREE for row in rows for column in frames.columns if column in row)
    counts = coverage(frames)
    asked, judged = sum(each.asked for each in counts), sum(each.judged for each in counts)
    code = exit_code_of(frames)
    if not judged:
        return Badge("not judged", GREY)
    message = f"{agree:,} of {asked:,} agree"
    if code is ExitCode.AGREE:
        return Badge(message, GREEN if agree == judged == asked else BLUE)
    return Badge(message, RED if code is ExitCode.DISAGREE else AMBER)


def render_svg(badge: Badge) -> str:
    """Return the badge as an SVG that needs nothing else, and that a screen reader reads."""
    widths = [
        round(sum(_WIDTHS.get(letter, _WIDTH) for letter in text)) + 2 * _PADDING for text in (LABEL, badge.message)
    ]
    whole, title = sum(widths), escape(f"{LABEL}: {badge.message}", {'"': "&quot;"})
    texts = "".join(
        f'<text x="{start + width / 2:g}" y="14" textLength="{width - 2 * _PADDING}">{escape(text)}</text>'
        for text, start, width in zip((LABEL, badge.message), (0, widths[0]), widths, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{_HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<clipPath id="round"><rect width="{whole}" height="{_HEIGHT}" rx="3"/></clipPath>'
        f'<g clip-path="url(#round)"><rect width="{widths[0]}" height="{_HEIGHT}" fill="{LABEL_COLOUR}"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="{_HEIGHT}" fill="{badge.colour}"/></g>'
        f'<g fill="{INK}" text-anchor="middle" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="11">'
        f"{texts}</g></svg>\n"
    )


def render_endpoint(badge: Badge) -> str:
    """Return what shields.io reads from an endpoint."""
    record = {"schemaVersion": 1, "label": LABEL, "message": badge.message, "color": badge.colour}
    return json.dumps(record, indent=2) + "\n"
