"""The files of a report, written from frames."""

from __future__ import annotations

from pathlib import Path

from attncheck.harness.errors import OutputError
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.reports.junit import render_junit
from attncheck.reports.markdown.report import render_markdown
from attncheck.reports.spreadsheet import write_csv

REPORT_NAME = "report.md"
HTML_NAME = "report.html"
JUNIT_NAME = "junit.xml"


def write_report(frames: Frames, directory: Path) -> Path:
    """Write report.md, report.html, junit.xml, and every frame as CSV and Parquet; return the path of report.md.

    The same frames give the same bytes. Raises ``OutputError`` where the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in frames.tables().items():
            write_csv(frame, directory / f"{name}.csv")
            frame.to_parquet(directory / f"{name}.parquet", index=False)
        write_junit(frames, directory / JUNIT_NAME)
        (directory / HTML_NAME).write_text(render_html(frames), encoding="utf-8", newline="\n")
        path = directory / REPORT_NAME
        path.write_text(render_markdown(frames), encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError(f"{directory} cannot be written: {error.strerror or error}") from None
    return path


def write_junit(frames: Frames, path: Path) -> None:
    """Write the JUnit XML. Raises ``OutputError`` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_junit(frames), encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
