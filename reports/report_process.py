"""Functions that a separate process calls to make a report, one after the other.

The report modules import pandas, which takes as long as judging a hundred small cases. The functions import them when
they run, so the caller does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.reports.frames import Frames
    from attncheck.reports.terminal import Line

IMPORTED_MODULES = (
    "attncheck.results.reader",
    "attncheck.reports.merge",
    "attncheck.reports.short_form",
    "attncheck.reports.write",
)
"""The modules that the functions import."""

_frames: Frames | None = None


def load_and_summarise(results: Path, quiet: bool) -> list[Line]:
    """Read a results directory, and return the lines of the answer; the frames stay here for the report."""
    from attncheck.reports.short_form import summary_lines

    frames = _load_frames(results)
    return list(summary_lines(frames, quiet=quiet, announced=frames.announced))


def load_and_list_causes(results: Path) -> list[Line]:
    """Read a results directory, and return the lines of the causes; the frames stay here for the report."""
    from attncheck.reports.short_form import cause_lines

    return list(cause_lines(_load_frames(results)))


def _load_frames(results: Path) -> Frames:
    from attncheck.reports.frames import make_frames
    from attncheck.reports.merge import merge_runs
    from attncheck.results.reader import read_runs

    global _frames
    _frames = make_frames(merge_runs(read_runs([results])))
    return _frames


def write_loaded_report(folder: Path) -> Path:
    """Write the report of the results that were summarised; return the file to open first."""
    from attncheck.reports.write import write_report

    assert _frames is not None, "no results were summarised"
    return write_report(_frames, folder)
