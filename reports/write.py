"""The files of a report, written from frames."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attncheck.errors import OutputError
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import html_pieces
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
    if directory.is_symlink() and (directory.parent / "environment.json").exists():
        raise OutputError(f"{directory} is a link that came with the results; name another folder with --output")
    path = directory  # which of them cannot be written
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in frames.tables().items():
            path = _own(directory / f"{name}.csv")
            write_csv(frame, path)
            path = _own(directory / f"{name}.parquet")
            frame.to_parquet(path, index=False)
        write_junit(frames, _own(directory / JUNIT_NAME))
        path = _own(directory / HTML_NAME)
        _write_pieces(path, html_pieces(frames))
        path = _own(directory / REPORT_NAME)
        path.write_text(render_markdown(frames), encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError.of(path, error) from None
    return path


def _own(path: Path) -> Path:
    """Return a path at which there is no link: results that somebody sent may hold one, to any file of ours."""
    if path.is_symlink():
        path.unlink()
    return path


def write_junit(frames: Frames, path: Path) -> None:
    """Write the JUnit XML. Raises ``OutputError`` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_pieces(path, render_junit(frames))
    except OSError as error:
        raise OutputError.of(path, error) from None


def _write_pieces(path: Path, pieces: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(pieces)
