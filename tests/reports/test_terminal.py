"""The short form: what is printed, and how much of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.elements import told_apart, written_ratio
from attncheck.reports.frames import Frames
from attncheck.reports.terminal import print_summary
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
Printed = Callable[..., list[str]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Return the lines that are printed for some frames."""

    def run(frames: Frames, *, quiet: bool = False) -> list[str]:
        print_summary(frames, Path("here/report.html"), quiet=quiet)
        return capsys.readouterr().out.splitlines()

    return run


def test_the_answer_comes_first_and_where_the_report_is_comes_last(document_frames: Frames, printed: Printed) -> None:
    lines = printed(document_frames)
    count = len(document_frames.cases)
    assert lines[0] == f"first and second agree. Judged {count} of {count} cases on each."
    assert lines[-1] == "Report: here/report.html"
    assert printed(document_frames, quiet=True) == []


def test_cases_are_counted_per_implementation_and_verdict(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    rows = [
        make_row(case="file/a"),
        make_row(case="file/b", comparison="printed", verdict="misprint", xfail=True),
        make_row(case="file/b"),
        make_row(case="file/c", verdict="numeric"),
        make_row(case="file/c", dtype="float32"),
        make_row(case="file/a", implementation="torch.eager", verdict="unsupported", stage=""),
        make_row(case="file/b", implementation="torch.eager", verdict="crash", stage="", dtype="float32"),
        make_row(case="file/b", implementation="torch.eager", verdict="unverified"),
    ]
    lines = [line.split() for line in printed(frames_of(write_run(rows)))]
    start = lines.index(["implementation", "agree", "crash", "not", "run", "numeric", "unsupported"])
    assert lines[start + 1] == ["numpy.eager", "1.0", "2", "-", "-", "1", "-"]
    assert lines[start + 2] == ["torch.eager", "1.0", "-", "1", "1", "-", "1"]


def test_a_case_counts_by_the_dtype_in_which_it_fails_and_agrees_where_only_some_dtypes_are_supported(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    rows = [
        make_row(case="file/a", dtype="float64"),
        make_row(case="file/a", dtype="float32", verdict="numeric", xfail=True),
        make_row(case="file/b", dtype="float64", verdict="unsupported", stage=""),
        make_row(case="file/b", dtype="float32"),
    ]
    lines = [line.split() for line in printed(frames_of(write_run(rows)))]
    start = lines.index(["implementation", "agree", "xfail", "numeric"])
    assert lines[start + 1] == ["numpy.eager", "1.0", "1", "1"]


def test_what_is_wrong_is_one_line_each_also_when_it_is_long(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    message = "differs " * 40 + "[bold]not markup[/bold] :smile:"
    frames = frames_of(
        write_run(
            [
                make_row(verdict="numeric", message=message),
                make_row(case="file/two", dtype="float32", verdict="crash", stage=""),
            ]
        )
    )
    wrong = [
        "numeric: file/one [float64] numpy.eager",
        f"  {message}",
        "crash: file/two [float32] numpy.eager: ",
    ]
    command = "Why: attncheck explain file/one numpy.eager --dtype float64"
    assert [line for line in printed(frames) if "file/" in line or line == wrong[1]] == [*wrong, command]
    assert printed(frames, quiet=True) == wrong


def test_a_long_list_is_cut_and_says_so(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    stages = ("scores", "masked", "weights", "output")
    rows = [make_row(case=f"file/{n:02}", stage=stages[n // 6], verdict="numeric") for n in range(24)]
    lines = printed(frames_of(write_run(rows)), quiet=True)
    assert len(lines) == 2 * 3 + 1
    assert lines[-1] == "and 1 more defect"


def test_a_failing_element_is_one_line_with_as_many_digits_as_tell_two_numbers_apart(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    wrong = {"verdict": "numeric", "index": "0,0,1,2", "value": 1.9375, "ratio": 12.5, "message": "off; at 0x1p+1"}
    rows = [make_row(dtype=dtype, reference=1.93751, **wrong) for dtype in ("float32", "float64")]
    assert printed(frames_of(write_run(rows)), quiet=True) == [
        "numeric: file/one [float64, float32] numpy.eager",
        "  weights[0, 0, 1, 2] is 1.9375 in float32, should be 1.93751: off by 12.5 times the error bound",
    ]


@pytest.mark.parametrize(
    ("computed", "exact", "texts"),
    [
        (2.0, 1.9, ("2", "1.9")),
        (0.0649728626, -0.148007434, ("0.06497", "-0.148")),
        (0.1, 0.1, ("0.1", "0.1")),
        (1.0, 1.0 + 2.0**-52, ("1", "1.0000000000000002")),
        (math.nan, 0.123456, ("nan", "0.1235")),
        (math.inf, 1e30, ("inf", "1e+30")),
    ],
)
def test_numbers_are_written_so_that_they_differ(computed: float, exact: float, texts: tuple[str, str]) -> None:
    assert told_apart(computed, exact) == texts


def test_with_two_environments_every_line_says_which(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    frames = frames_of(
        write_run([make_row(verdict="numeric", message="off")], label="new"), write_run([make_row()], label="old")
    )
    lines = printed(frames)
    start = lines.index("numeric: file/one [float64] numpy.eager (new)")
    assert lines[start + 1] == "  off"
    assert any(line.startswith("numpy.eager 1.0 (old)") for line in lines)


def test_no_name_is_cut_where_there_is_no_terminal(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    label = "an-environment-whose-name-is-longer-than-a-terminal-is-wide-because-somebody-wanted-to-be-precise"
    versions = {"numpy.eager": "1.0+" + "x" * 40}
    directories = [write_run([make_row()], label=label + end, versions=versions) for end in "ab"]
    title = f"numpy.eager {versions['numpy.eager']} ({label}a)"
    assert any(line.startswith(title) for line in printed(frames_of(*directories)))


def test_notes_are_printed_and_nothing_crashes_without_results(
    write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    lines = printed(frames_of(write_run(left_out={"jax": "not installed"}, summary=False)))
    assert lines[0] == "Nothing was run."
    assert "jax was left out: not installed." in lines
    assert "this run was interrupted, or is still going on: its results are not complete." in lines


def test_a_ratio_above_1_is_never_written_as_1() -> None:
    ratios = (12.34, 1.0, 1.0004, 1.005, 0.999)
    assert [written_ratio(each) for each in ratios] == ["12.3", "1", "1.0004", "1.005", "0.999"]
