"""What went wrong alike in many cases is told once, with a count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.alike import count_evaluations, group_alike
from attncheck.reports.answer import findings, what_is_wrong
from attncheck.reports.causes import faults
from attncheck.reports.ci import render_ci_summary
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.reports.markdown.report import wrong_section
from attncheck.reports.terminal import print_summary
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
FAILED: dict[str, Any] = {"stage": "", "verdict": "error", "message": "TypeError: not | today"}


@pytest.fixture
def frames(make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]) -> Frames:
    """Twenty-five cases that fail for one reason, one in another dtype too, and three for reasons of their own."""
    rows = [make_row(case=f"file/{number:02}", **FAILED) for number in range(25)]
    rows += [
        make_row(case="file/24", dtype="float32", **FAILED),
        make_row(case="file/25", **FAILED | {"message": "TypeError: another"}),
        make_row(case="file/26", **FAILED | {"implementation": "torch.eager"}),
        make_row(case="file/27", verdict="numeric", message="off"),
        make_row(case="file/28", verdict="numeric", message="off"),
    ]
    return frames_of(write_run(rows))


def test_equal_errors_of_one_implementation_are_one(frames: Frames) -> None:
    told = group_alike(what_is_wrong(frames))
    assert [(each.row["case"], each.others, each.evaluations) for each in told] == [
        ("file/00", 24, 26),
        ("file/25", 0, 1),
        ("file/26", 0, 1),
        ("file/27", 0, 1),
        ("file/28", 0, 1),
    ]
    assert told[0].dtypes == ("float64", "float32")
    assert count_evaluations(told) == len(what_is_wrong(frames)) == 30


def test_the_terminal_tells_it_with_the_number_of_cases(frames: Frames, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(frames, Path("report.md"), quiet=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "error: 25 cases, the first file/00 [float64], numpy.eager: TypeError: not | today",
        "error: file/25 [float64] numpy.eager: TypeError: another",
        "error: file/26 [float64] torch.eager: TypeError: not | today",
    ]
    assert lines[3:] == ["and 2 more"]


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
        r"| `file/00` and 24 more<br>B=1 H=1 Lq=1 Lk=3 | numpy.eager | float64, float32 | **error** |  | "
        r"TypeError: not \| today | 26 |" in wrong_section(frames)
    )
    summary = render_ci_summary(frames, Path("report.md"))
    assert (
        r"| `file/00` and 24 more | float64, float32 | numpy.eager | **error** |  | TypeError: not \| today |"
        in summary
    )
    assert "more." not in summary


def test_the_page_tells_it_so_too(frames: Frames) -> None:
    page = render_html(frames).partition('id="wrong"')[2].partition("</section>")[0]
    assert page.count('class="message">TypeError: not | today') == 2
    assert "numpy.eager: 25 cases, in float64, float32" in page
    assert "All 25 cases" in page


def test_a_fault_is_its_cause_or_its_verdict_and_stage(
    make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    rows = [
        make_row(
            case=f"file/{number}",
            dtype=dtype,
            verdict="semantic",
            message=f"a scale; {number}",
            diagnosis="x",
        )
        for number in range(3)
        for dtype in ("float32", "float64")
    ]
    rows += [make_row(case=f"file/{number}", verdict="numeric", message=f"off by {number}") for number in range(3, 8)]
    rows += [make_row(case="file/8", verdict="numeric", stage="output"), make_row(case="file/9", **FAILED)]
    rows += [make_row(case="file/0", dtype="float16", **FAILED)]
    outdated = {"verdict": "xpass", "stage": "weights"}
    rows += [make_row(case=f"file/{number}", message=f"record {number}", **outdated) for number in (10, 11)]
    frames = frames_of(write_run(rows))
    found = faults(frames, findings(frames))
    assert [(each.cause, each.row["stage"], each.row["verdict"], len(each.cases), each.dtypes) for each in found] == [
        ("", "weights", "numeric", 5, ("float64",)),
        ("a scale", "weights", "semantic", 3, ("float64", "float32")),
        ("", "", "error", 2, ("float64", "float16")),
        ("", "output", "numeric", 1, ("float64",)),
        ("", "weights", "xpass", 1, ("float64",)),
        ("", "weights", "xpass", 1, ("float64",)),
    ]
    page = render_html(frames).partition('id="wrong"')[2].partition("</section>")[0]
    assert "<strong>a scale</strong>" in page
    assert [page.count(f">file/{number}</a>") for number in range(10)] == [4, 1, 1, 2, 1, 1, 1, 1, 1, 1]


def test_what_is_not_listed_is_counted_whole(
    make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    rows = [make_row(case=f"file/{number:02}", **FAILED | {"message": f"{number // 2}"}) for number in range(50)]
    assert "And 10 more." in render_ci_summary(frames_of(write_run(rows)), Path("report.md"))
