"""Another process makes the answer and the report that this one would make."""

from __future__ import annotations

import os
from pathlib import Path

from attncheck.cli.output import ReportProcess
from attncheck.reports.frames import Frames
from attncheck.reports.report_process import load_and_list_causes, load_and_summarise, write_loaded_report
from attncheck.reports.short_form import cause_lines, summary_lines


def test_another_process_gives_the_same_answer_and_the_same_files_until_it_ends(
    document_run: Path, document_frames: Frames, document_report: Path, tmp_path: Path
) -> None:
    process = ReportProcess()
    assert process.call(os.getpid) is None, "it has not been started"
    process.start()
    lines = process.call(load_and_summarise, document_run, False)
    expected = summary_lines(document_frames, quiet=False, announced=document_frames.announced)
    assert lines is not None
    assert [str(line) for line in lines] == [str(line) for line in expected]
    assert process.call(load_and_list_causes, document_run) == list(cause_lines(document_frames))
    written = process.call(write_loaded_report, tmp_path / "report")
    assert written == tmp_path / "report" / "report.md"
    here, there = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (document_report, written.parent)
    )
    assert here == there
    assert process.call(os._exit, 1) is None
    assert process.call(os.getpid) is None, "it has ended, so the caller makes the report"
