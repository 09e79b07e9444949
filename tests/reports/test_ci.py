"""What CI systems are given: a summary that fits, and annotations that are one line whatever they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.errors import OutputError
from attncheck.reports.ci import MAX_SUMMARY_BYTES, annotation_lines, append_summary, render_ci_summary
from attncheck.reports.frames import Frames
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
MakeCase = Callable[..., dict[str, object]]

REPORT = Path("results/latest/report/report.md")
COMMAND = re.compile(r"::(error|warning|notice) ([^:]*)::(.*)")


def told(frames: Frames) -> list[tuple[str, dict[str, str], str]]:
    """Read annotations as the runner does: kind, properties and message, unescaped."""
    read = []
    for line in annotation_lines(frames, REPORT):
        assert "\n" not in line
        assert "\r" not in line
        found = COMMAND.fullmatch(line)
        assert found is not None, line
        kind, properties, message = found.groups()
        pairs = [item.split("=", 1) for item in properties.split(",")]
        read.append((kind, {name: unescaped(value) for name, value in pairs}, unescaped(message)))
    return read


def unescaped(text: str) -> str:
    for code, letter in (("%3A", ":"), ("%2C", ","), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(code, letter)
    return text


def test_the_summary_says_the_answer_the_counts_and_where_the_report_is(document_frames: Frames) -> None:
    lines = render_ci_summary(document_frames, REPORT).splitlines()
    count = len(document_frames.cases)
    assert lines[0] == f"### attncheck: first and second agree. Judged {count} of {count} cases on each."
    assert "| implementation | agree |" in lines
    assert [line for line in lines if line.startswith("| first")] == [
        f"| {document_frames.columns[0].title(with_environment=False)} | {count} |"
    ]
    assert lines[-1] == "The whole report: `results/latest/report/report.md`"


def test_the_summary_lists_what_is_wrong_and_counts_the_rest(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(case=f"file/{n:02}", verdict="numeric", message="off | by <b>2</b>") for n in range(23)]
    lines = render_ci_summary(frames_of(write_run(rows, missing={"torch": "not there"})), REPORT).splitlines()
    assert "- torch could not run: not there" in lines
    wrong = [line for line in lines if line.startswith("| `file/")]
    assert len(wrong) == 20
    assert wrong[0] == r"| `file/00` | float64 | numpy.eager | **numeric** | `weights` | off \| by \<b\>2\</b\> |"
    assert "And 3 more." in lines


def test_the_summary_stays_short_whatever_goes_wrong(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(case=f"file/{n}", verdict="error", stage="", message="x" * 100_000) for n in range(50)]
    text = render_ci_summary(frames_of(write_run(rows, faults=["y" * 100_000] * 500)), REPORT)
    assert len(text.encode()) < 50_000
    assert "- and 480 more that could not be run" in text


def test_the_summary_is_appended_and_fits_into_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    append_summary("first", path)
    append_summary("second \N{GREEK SMALL LETTER ALPHA}", path)
    assert path.read_text(encoding="utf-8").split() == ["first", "second", "\N{GREEK SMALL LETTER ALPHA}"]
    append_summary("| row of a table |\n" * 100_000, path)
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size <= MAX_SUMMARY_BYTES
    assert path.stat().st_size > MAX_SUMMARY_BYTES - 100
    assert text.startswith("\nfirst")
    assert text.endswith("| row of a table |\n\n(The rest is left out: a summary may have 1 MiB.)\n")
    for room in (40, 0):  # others have taken the rest
        path.write_bytes(b"x" * (MAX_SUMMARY_BYTES - room))
        append_summary("| row of a table |\n" * 10, path)
        assert path.stat().st_size <= MAX_SUMMARY_BYTES
    with pytest.raises(OutputError, match=r"the summary .* cannot be written: [^\n]+$"):
        append_summary("text", tmp_path)


def test_failures_are_errors_at_the_line_of_their_case(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(verdict="numeric", message="off by 2"),
        make_row(dtype="float32", stage="", verdict="crash"),
        make_row(case="file/two", verdict="numeric", xfail=True, reason="known"),
        make_row(case="file/three"),
    ]
    assert told(frames_of(write_run(rows))) == [
        (
            "error",
            {"file": "file.yaml", "line": "7", "title": "crash: numpy.eager in float32"},
            "one: crash",
        ),
        (
            "error",
            {"file": "file.yaml", "line": "7", "title": "numeric: numpy.eager in float64"},
            "one: weights: off by 2",
        ),
    ]


def test_noise_is_a_warning_once_for_a_case(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    rows = [
        make_row(stage="scores", introduced_tier="warning"),
        make_row(tier="warning"),
        make_row(case="file/known", tier="warning", verdict="numeric", xfail=True),
    ]
    ((kind, properties, message),) = told(frames_of(write_run(rows)))
    assert (kind, properties["title"]) == ("warning", "noisy: numpy.eager in float64")
    assert message.startswith("one: scores: larger errors than known good implementations make")


def test_ten_of_each_kind_are_printed_and_the_rest_is_counted(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(case=f"file/{n:02}", verdict="numeric") for n in range(25)]
    rows += [make_row(case=f"noisy/{n:02}", tier="warning") for n in range(12)]
    lines = told(frames_of(write_run(rows, faults=["bad.yaml:3: no inputs"])))
    assert [kind for kind, _, _ in lines] == ["error"] * 10 + ["warning"] * 10 + ["notice"]
    assert lines[0] == ("error", {"title": "attncheck: not run"}, "bad case: bad.yaml:3: no inputs")
    assert lines[-1][2] == "16 more errors and 2 more warnings in the report: results/latest/report/report.md"


def test_nothing_is_printed_where_all_agree(document_frames: Frames) -> None:
    assert told(document_frames) == []


def test_names_and_messages_cannot_begin_a_command_of_their_own(
    make_row: MakeRow, make_case_record: MakeCase, write_run: WriteRun, frames_of: FramesOf
) -> None:
    hostile = "100%, a:b,line=1::\r\n::error file=x::owned\n%0A"
    record = make_case_record("file/one") | {"file": f"{hostile}.yaml", "name": hostile}
    rows = [make_row(verdict="numeric", message=hostile, implementation=hostile)]
    frames = frames_of(write_run(rows, cases=[record], faults=[hostile]))
    fault, failure = told(frames)
    assert fault[2] == f"bad case: {hostile}"
    assert failure[1] == {"file": f"{hostile}.yaml", "line": "7", "title": f"numeric: {hostile} in float64"}
    assert failure[2] == f"{hostile}: weights: {hostile}"
    assert "\n::error" not in render_ci_summary(frames, REPORT)


def test_two_environments_are_told_apart(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    frames = frames_of(
        write_run([make_row(verdict="numeric", message="off")], label="new"), write_run([make_row()], label="old")
    )
    assert told(frames)[0][1]["title"] == "numeric: numpy.eager (new) in float64"
    assert "numpy.eager (new)" in render_ci_summary(frames, REPORT)
