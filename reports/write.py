"""The files of a report, written from frames."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from attncheck.harness.errors import OutputError
from attncheck.reports.frames import Frames
from attncheck.reports.markdown import render_markdown

REPORT_NAME = "report.md"
# Spreadsheet programs run what begins like this as a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def write_report(frames: Frames, directory: Path) -> Path:
    """Write report.md and every frame as CSV and Parquet; return the path of report.md.

    The same frames give the same bytes. Raises ``OutputError`` where the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in frames.tables().items():
            _harmless(frame).to_csv(directory / f"{name}.csv", index=False, lineterminator="\n")
            frame.to_parquet(directory / f"{name}.parquet", index=False)
        path = directory / REPORT_NAME
        path.write_text(render_markdown(frames), encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError(f"{directory} cannot be written: {error.strerror or error}") from None
    return path


def _harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """Put an apostrophe before texts that a spreadsheet would run as a formula; numbers stay as they are."""

    def guard(value: object) -> object:
        if not isinstance(value, str) or not value.startswith(_FORMULA_STARTS):
            return value
        try:
            float(value)
        except ValueError:
            return f"'{value}"
        return value

    texts = frame.select_dtypes(exclude=["number", "bool"]).columns
    return frame.assign(**{name: frame[name].map(guard) for name in texts})
