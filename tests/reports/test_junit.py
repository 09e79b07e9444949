"""JUnit XML: what becomes a failure, an error, a skip or a pass; valid whatever stands in names and messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from attncheck.reports.frames import Frames
from attncheck.reports.junit import render_junit, xml_text
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
MakeCase = Callable[..., dict[str, object]]

# From junit-10.xsd of Jenkins' xUnit plugin: what an element may hold, must say, and may say.
SCHEMA = {
    "testsuites": ({"testsuite"}, set(), {"name", "time", "tests", "failures", "errors"}),
    "testsuite": (
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
        {"name", "tests", "failures", "errors"},
        {"skipped", "time", "timestamp", "hostname", "id", "package", "file"},
    ),
    "properties": ({"property"}, set(), set()),
    "property": (set(), {"name", "value"}, set()),
    "testcase": (
        {"skipped", "error", "failure", "system-out", "system-err"},
        {"name"},
        {"time", "classname", "group"},
    ),
    "failure": (set(), set(), {"type", "message"}),
    "error": (set(), set(), {"type", "message"}),
    "skipped": (set(), set(), {"type", "message"}),
    "system-out": (set(), set(), set()),
}


def parse(frames: Frames) -> Element:
    """Parse the XML, and hold it against the schema and its own counts."""
    root = ElementTree.fromstring("".join(render_junit(frames)).encode("utf-8"))
    for element in root.iter():
        children, required, optional = SCHEMA[element.tag]
        assert {child.tag for child in element} <= children
        assert required <= set(element.attrib) <= required | optional
    for suite in root:
        tests = suite.findall("testcase")
        counted = [len(suite.findall(f"testcase/{tag}")) for tag in ("failure", "error", "skipped")]
        assert [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")] == [
            len(tests),
            *counted,
        ]
    for name in ("tests", "failures", "errors"):
        assert int(root.attrib[name]) == sum(int(suite.attrib[name]) for suite in root)
    return root


def only(root: Element, path: str) -> Element:
    (found,) = root.iterfind(f".//{path}")
    return found


def test_a_suite_per_implementation_and_environment_and_a_test_per_case_and_dtype(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(dtype=dtype, stage=stage) for dtype in ("float32", "float64") for stage in ("scores", "weights")]
    rows.append(make_row(implementation="torch.eager"))
    root = parse(frames_of(write_run(rows, label="new"), write_run(rows[:2], label="old")))
    assert [suite.attrib["name"] for suite in root] == ["new: numpy.eager", "new: torch.eager", "old: numpy.eager"]
    assert [[test.attrib["name"] for test in suite.iter("testcase")] for suite in root] == [
        ["one [float64]", "one [float32]"],
        ["one [float64]"],
        ["one [float32]"],
    ]
    assert {test.attrib["classname"] for test in root[0].iter("testcase")} == {"new.numpy.eager.file"}
    assert root.attrib["name"].startswith("attncheck: ")
    assert {item.attrib["name"]: item.attrib["value"] for item in root[1].iter("property")} == {
        "environment": "new",
        "implementation": "torch.eager",
        "version": "1.0",
        "python": "3.11.7",
        "platform": "Linux",
        "judged": "judged 1 of 1 case",
    }
    assert (root.attrib["tests"], root.attrib["failures"], root.attrib["errors"]) == ("4", "0", "0")
    # Nothing of it is made up: what a run did not record is left out.
    assert not [name for element in root.iter() for name in element.attrib if name in ("time", "timestamp")]


@pytest.mark.parametrize("verdict", ["numeric", "nonfinite", "semantic", "shape", "dtype"])
def test_what_is_wrong_is_a_failure_with_the_verdict_and_what_to_do(
    verdict: str, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(stage="scores", verdict=verdict, message="off by 2", begins_at="scores"),
        make_row(verdict=verdict, message="follows", begins_at="scores"),
        make_row(dtype="float32"),
    ]
    root = parse(frames_of(write_run(rows)))
    failure = only(root, "failure")
    assert failure.attrib == {"type": verdict, "message": "scores: off by 2"}
    assert failure.text is not None
    assert failure.text.splitlines() == [
        "scores: off by 2",
        "",
        "file.yaml:7: one",
        "2 comparisons fail",
        "attncheck explain file/one numpy.eager --dtype float64",
    ]
    assert root.attrib["failures"] == "1"


@pytest.mark.parametrize("verdict", ["error", "crash", "timeout"])
def test_what_did_not_come_to_an_end_is_an_error(
    verdict: str, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    root = parse(frames_of(write_run([make_row(stage="", verdict=verdict, message="killed")])))
    assert only(root, "error").attrib == {"type": verdict, "message": "killed"}


def test_the_unsupported_is_skipped_with_its_reason_and_so_is_what_nothing_can_be_said_of(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(stage="", verdict="unsupported", message="no windows"),
        make_row(dtype="float32", verdict="unverified", message="inputs hold infinity"),
    ]
    root = parse(frames_of(write_run(rows)))
    assert [skipped.attrib["message"] for skipped in root.iter("skipped")] == [
        "unsupported: no windows",
        "unverified: there is no exact answer to hold it against",
    ]


def test_a_misprint_fails_once_and_no_implementation_for_it(
    make_row: MakeRow, make_case_record: MakeCase, write_run: WriteRun, frames_of: FramesOf
) -> None:
    number = {"comparison": "printed", "index": "0,0", "reference_text": "0.27", "called": "A", "exact": 0.25}
    rows = [
        make_row(implementation=name, dtype=dtype, **fields)
        for name in ("numpy.eager", "torch.eager")
        for dtype in ("float64", "float32")
        for fields in ({}, number | {"verdict": "misprint"}, number | {"index": "0,1", "verdict": "unverified"})
    ]
    rows.append(make_row(comparison="printed", stage="output", index="0", verdict="unverified", reference_text="1"))
    expected = {"name": "weights", "of": "weights", "basis": "printed", "transpose": False, "shape": [1, 2]}
    root = parse(frames_of(write_run(rows, cases=[make_case_record(expected=[expected])])))
    assert [suite.attrib["failures"] for suite in root] == ["0", "0", "1"]
    failure = only(root, "failure")
    assert failure.attrib == {"type": "misprint", "message": "A[0, 0] is printed as 0.27; it should be 0.25"}
    assert only(root[2], "skipped").attrib["message"].startswith("unverified: 1 of 1 numbers have no exact answer")


def test_a_record_that_no_longer_holds_is_a_failure_once(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(), make_row(stage="", verdict="xpass", message="known.yaml:3: no longer gives numeric")]
    failure = only(parse(frames_of(write_run(rows))), "failure")
    assert failure.attrib == {"type": "xpass", "message": "known.yaml:3: no longer gives numeric"}


def test_times_are_those_that_the_run_recorded(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    rows = [
        make_row(stage="scores", seconds=1.25),
        make_row(),
        make_row(dtype="float32", seconds=0.5),
        make_row(implementation="torch.eager", seconds=2.0),
    ]
    directory = write_run(rows, started="2025-01-31T08:30:00")
    root = parse(frames_of(directory))
    assert [(suite.attrib["timestamp"], suite.attrib["time"]) for suite in root] == [
        ("2025-01-31T08:30:00", "1.750"),
        ("2025-01-31T08:30:00", "2.000"),
    ]
    assert root.attrib["time"] == "3.750"
    assert [test.attrib["time"] for test in root.iter("testcase")] == ["1.250", "0.500", "2.000"]
    assert "".join(render_junit(frames_of(directory))) == "".join(render_junit(frames_of(directory)))


def test_the_command_names_an_own_implementation_as_the_run_did(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    again = {"mine.attention": ["kernels/mine.py:attention", "--framework", "torch"]}
    rows = [make_row(implementation="mine.attention", verdict="numeric")]
    failure = only(parse(frames_of(write_run(rows, again=again))), "failure")
    assert failure.text is not None
    assert failure.text.splitlines()[-1] == (
        "attncheck explain file/one kernels/mine.py:attention --dtype float64 --framework torch"
    )


def test_an_expected_failure_passes_and_says_why(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    known = {"xfail": True, "reason": "the kernel adds in another order", "thread": "owner/project#7"}
    rows = [
        make_row(verdict="numeric", message="off", **known),
        make_row(dtype="float32", comparison="printed", index="0", verdict="misprint", xfail=True, message="erratum"),
        make_row(dtype="float32"),
    ]
    root = parse(frames_of(write_run(rows)))
    assert [told.text for told in root.iter("system-out")] == [
        "xfail numeric\nthe kernel adds in another order\nowner/project#7",
        "a recorded erratum: the document prints these numbers for another call",
        "a recorded erratum: the document prints these numbers for another call",  # once more, among the numbers
    ]
    assert (root.attrib["tests"], root.attrib["failures"]) == ("3", "0")


def test_two_that_differ_although_no_stage_is_blamed_are_a_failure(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    pair = {"comparison": "pair", "other": "torch.eager", "verdict": "numeric", "difference": 2.0, "index": "0,1"}
    rows = [make_row(), make_row(implementation="torch.eager"), make_row(**pair)]
    failure = only(parse(frames_of(write_run(rows))), "failure")
    assert failure.attrib == {
        "type": "numeric",
        "message": "weights: differs from torch.eager by 2 at [0, 1]",
    }


def test_what_was_asked_for_and_is_not_there_is_an_error(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    directory = write_run(
        [make_row()],
        left_out={"jax": "not installed"},
        missing={"torch": "no such library"},
        faults=["bad.yaml:3: no inputs"],
        summary=False,
    )
    root = parse(frames_of(directory))
    assert [error.attrib["message"] for error in root.iter("error")] == [
        "torch could not run: no such library",
        "bad case: bad.yaml:3: no inputs",
        "this run was interrupted, or is still going on: its results are not complete",
    ]
    assert "jax" not in "".join(render_junit(frames_of(directory)))


HOSTILE = "]]></failure><script>alert('1')</script>&lt;\"\x1b[31m\x00\x08\ufffe\r\nnext\tline \U0001f600"


def test_names_and_messages_cannot_leave_their_place(
    make_row: MakeRow, make_case_record: MakeCase, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(case=HOSTILE, implementation=HOSTILE, verdict="numeric", message=HOSTILE),
        make_row(case=HOSTILE, implementation="known", verdict="numeric", xfail=True, reason=HOSTILE),
        make_row(case=HOSTILE, implementation="skipped", stage="", verdict="unsupported", message=HOSTILE),
    ]
    record = make_case_record(HOSTILE) | {"file": f"/{HOSTILE}.yaml", "name": HOSTILE}
    directory = write_run(rows, cases=[record], label=HOSTILE, name="run", platform=HOSTILE, faults=[HOSTILE])
    root = parse(frames_of(directory))
    failure = only(root, "failure")
    seen = (
        HOSTILE.replace("\x1b", "\\x1b").replace("\x00", "\\x00").replace("\x08", "\\x08").replace("\ufffe", "\\ufffe")
    )
    assert failure.attrib["message"] == f"weights: {' '.join(seen.split())}"
    assert failure.text is not None
    assert failure.text.startswith(f"weights: {seen}".replace("\r\n", "\n"))
    assert root[0].attrib["name"] == f"{seen}: {seen}"


def test_no_character_is_left_that_xml_cannot_hold() -> None:
    text = "".join(map(chr, [*range(0x20), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x10FFFF]))
    written = xml_text(text)
    assert written.startswith("\\x00\\x01")
    assert written.endswith("\\ud800\\udfff\\ufffe\\uffff\U0010ffff")
    assert [letter for letter in written if ord(letter) < 0x20] == ["\t", "\n", "\r"]
    ElementTree.fromstring(f"<a>{written}</a>")


def test_a_report_of_nothing_is_valid(write_run: WriteRun, frames_of: FramesOf) -> None:
    root = parse(frames_of(write_run()))
    assert (root.attrib["tests"], len(root)) == ("0", 0)
