"""The files of a difference: diff.md, and every frame as CSV and Parquet."""

from __future__ import annotations

from pathlib import Path

from attncheck.errors import OutputError
from attncheck.reports.diff.difference import Difference
from attncheck.reports.diff.text import render_diff_markdown
from attncheck.reports.spreadsheet import write_csv

DIFF_NAME = "diff.md"


def write_difference(difference: Difference, directory: Path) -> Path:
    """Write diff.md and diff_verdicts.csv, diff_verdicts.parquet and so on; return the path of diff.md.

    The same results give the same bytes. Raises ``OutputError`` where the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in difference.tables().items():
            write_csv(frame, directory / f"diff_{name}.csv")
            frame.to_parquet(directory / f"diff_{name}.parquet", index=False)
        path = directory / DIFF_NAME
        path.write_text(render_diff_markdown(difference), encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError.of(directory, error) from None
    return path
