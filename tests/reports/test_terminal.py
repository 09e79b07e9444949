"""The short form: what is printed, and how much of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
        write_run([make_row(verdict="numeric", message=message), make_row(dtype="float32", verdict="crash", stage="")])
    )
    shape = "  B=1 H=1 Lq=1 Lk=3"
    wrong = [
        "crash: file/one [float32] numpy.eager: ",
        f"numeric: file/one [float64] numpy.eager: weights: {message}",
    ]
    command = "Why: attncheck explain file/one numpy.eager --dtype float32"
    assert [line for line in printed(frames) if "file/one" in line] == [*wrong, command]
    assert printed(frames, quiet=True) == [wrong[0], shape, wrong[1], shape]


def test_a_long_list_is_cut_and_says_so(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    frames = frames_of(write_run([make_row(case=f"file/{n:02}", verdict="numeric") for n in range(25)]))
    lines = printed(frames, quiet=True)
    assert len(lines) == 2 * 20 + 1
    assert lines[-1] == "and 5 more"


def test_with_two_environments_every_line_says_which(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, printed: Printed
) -> None:
    frames = frames_of(
        write_run([make_row(verdict="numeric", message="off")], label="new"), write_run([make_row()], label="old")
    )
    lines = printed(frames)
    assert "numeric: file/one [float64] numpy.eager (new): weights: off" in lines
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
