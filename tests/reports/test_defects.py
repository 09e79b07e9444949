"""One thing that is wrong is one line in every format, in however many cases and dtypes it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.ci import annotation_lines, render_ci_summary
from attncheck.reports.defects import cause_line, defects
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.reports.markdown.report import wrong_section
from attncheck.reports.summary import findings
from attncheck.reports.terminal import print_summary
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
FAILED: dict[str, Any] = {"stage": "", "verdict": "error", "message": "TypeError: not | today"}


@pytest.fixture
def frames(make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]) -> Frames:
    """Twenty-five cases that raise for one reason, one in another dtype too, and others for reasons of their own."""
    rows = [make_row(case=f"file/{number:02}", **FAILED) for number in range(25)]
    rows += [
        make_row(case="file/24", dtype="float32", **FAILED),
        make_row(case="file/25", **FAILED | {"message": "TypeError: another"}),
        make_row(case="file/26", **FAILED | {"implementation": "torch.eager"}),
        make_row(case="file/27", verdict="numeric", message="off"),
        make_row(case="file/28", verdict="numeric", message="off"),
    ]
    return frames_of(write_run(rows))


def test_what_fails_alike_on_one_implementation_is_one(frames: Frames) -> None:
    told = defects(frames)
    assert [(each.name, each.row["case"], each.others, each.evaluations) for each in told] == [
        ("numeric", "file/27", 1, 2),
        ("error", "file/00", 24, 26),
        ("error", "file/25", 0, 1),
        ("error", "file/26", 0, 1),
    ]
    assert told[1].dtypes == ("float64", "float32")
    assert sum(each.evaluations for each in told) == len(findings(frames)) == 30


def test_errors_that_differ_in_numbers_and_shapes_are_one(
    make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    messages = ["no (1, 2) into [3]: 17 bytes", "no (4, 5, 6) into [7]: 1.5e+3 bytes", "no (1, 2) into [3]: 17 words"]
    rows = [make_row(case=f"file/{number}", **FAILED | {"message": text}) for number, text in enumerate(messages)]
    assert [each.cases for each in defects(frames_of(write_run(rows)))] == [("file/0", "file/1"), ("file/2",)]


def test_a_diagnosis_is_one_defect_at_whatever_stage_and_in_whatever_dtype_it_was_made(
    make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    corner = {"verdict": "semantic", "diagnosis": "aligned-bottom-right", "message": "bottom-right; meant top-left"}
    rows = [
        make_row(case="file/0", stage="weights", **corner),
        make_row(case="file/0", stage="weights", dtype="float32", verdict="numeric", message="off"),
        make_row(case="file/1", stage="output", **corner),
        make_row(case="file/2", verdict="nonfinite", message="NaN; taken by itself: the window is ignored"),
    ]
    frames = frames_of(write_run(rows))
    found = defects(frames)
    assert [(each.name, each.cases, each.dtypes, each.text) for each in found] == [
        ("aligned-bottom-right", ("file/0", "file/1"), ("float64", "float32"), "bottom-right; meant top-left"),
        ("nonfinite", ("file/2",), ("float64",), "NaN; taken by itself: the window is ignored"),
    ]
    nameless = "no cause found (1 case: file/2; taken by itself: the window is ignored)"
    assert cause_line(found) == f"bottom-right; meant top-left (2 cases); {nameless}"
    first, second = annotation_lines(frames, Path("report.md"))
    assert "title=aligned-bottom-right%3A numpy.eager in float64%2C float32::2 cases, the simplest " in first
    assert "title=nonfinite%3A numpy.eager in float64::" in second


def test_the_terminal_tells_it_with_the_number_of_cases(frames: Frames, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(frames, Path("report.md"), quiet=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "numeric: 2 cases [float64], the first file/27, numpy.eager",
        "  off",
        "error: 25 cases [float64, float32], the first file/00, numpy.eager: TypeError: not | today",
        "error: file/25 [float64] numpy.eager: TypeError: another",
        "and 1 more defect",
    ]


def test_one_case_in_several_dtypes_is_one_line(
    make_row: MakeRow,
    write_run: Callable[..., Path],
    frames_of: Callable[..., Frames],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [make_row(dtype=dtype, **FAILED) for dtype in ("float32", "float64")]
    print_summary(frames_of(write_run(rows)), Path("report.md"), quiet=True)
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "file/one" in each]
    assert line == "error: file/one [float64, float32] numpy.eager: TypeError: not | today"


def test_markdown_and_the_summary_of_ci_tell_it_so_too(frames: Frames) -> None:
    assert (
        r"| TypeError: not \| today | numpy.eager | 25 | float64, float32 | **error** |  | "
        r"`file/00`<br>B=1 H=1 Lq=1 Lk=3 | 26 |" in wrong_section(frames)
    )
    summary = render_ci_summary(frames, Path("report.md"))
    assert r"| TypeError: not \| today | numpy.eager | 25 | float64, float32 | **error** |  | `file/00` |" in summary
    assert "more." not in summary


def test_the_page_tells_it_so_too(frames: Frames) -> None:
    page = render_html(frames).partition('id="wrong"')[2].partition("</section>")[0]
    assert page.count('class="message">TypeError: not | today') == 2
    assert "numpy.eager: 25 cases, in float64, float32" in page
    assert "All 25 cases" in page


def test_a_card_of_the_page_has_the_cause_and_lists_the_cases_of_all(
    make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    scale = {"verdict": "semantic", "message": "a scale", "diagnosis": "x"}
    rows = [
        make_row(case=f"file/{number}", dtype=dtype, **scale) for number in range(3) for dtype in ("float32", "float64")
    ]
    rows += [make_row(case=f"file/{number}", verdict="numeric", message=f"off by {number}") for number in range(3, 8)]
    rows += [make_row(case="file/8", verdict="numeric", stage="output"), make_row(case="file/9", **FAILED)]
    rows += [make_row(case="file/0", dtype="float16", **FAILED)]
    page = render_html(frames_of(write_run(rows))).partition('id="wrong"')[2].partition("</section>")[0]
    assert "<strong>a scale</strong>" in page
    assert [page.count(f">file/{number}</a>") for number in range(10)] == [4, 1, 1, 2, 1, 1, 1, 1, 1, 1]


def test_what_is_not_listed_is_counted_whole(
    make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    rows = [make_row(case=f"file/{number:02}", **FAILED | {"message": "x" * (1 + number // 2)}) for number in range(50)]
    assert "And 5 more defects." in render_ci_summary(frames_of(write_run(rows)), Path("report.md"))
