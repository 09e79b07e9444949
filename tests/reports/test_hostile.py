"""Texts of cases, kernels and machines in every format: none becomes markup, a formula, a command or a heading."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attncheck.reports.ci import annotation_lines, append_summary, render_ci_summary
from attncheck.reports.frames import Frames
from attncheck.reports.write import write_junit, write_report

BIDI = "\u202e\u2066"
SHORT = (
    f"<script>alert(1)</script> | b\\|z `c` **d** [e](f) &lt; ]]> [red]x[/red] {{{{ 7 * 7 }}}} {BIDI} \"q\" 'p' "
    "::error::x 100%, a:b,line=1 %0A"
)
"""One line, as the names of cases are."""
LONG = (
    "=cmd|'/c calc'!A1\n+1\t@SUM(1)\r\n::error file=x::owned\n</failure></td></style></title>--><img src=x "
    f"onerror=alert(2)>\n# g\n## h\n\n| i |\n{SHORT}\n\\"
)
THREAD = "javascript:alert(1)//https://example.org"
CASES = {
    "title": f"=cmd|'/c calc'!A1 {SHORT}",
    "source": {"kind": "document", "title": LONG, "author": LONG, "section": LONG, "notes": [LONG]},
    "operation": "softmax",
    "cases": [
        {
            "name": f"{start} {number} {SHORT}",
            "inputs": {"scores": {"values": [[0, 1, 2]]}},
            "expect": [
                {"stage": "weights", "printed": "0.5 0.24 0.67", "called": LONG, "erratum": LONG},
                {"stage": "weights", "known": "0.1 0.2 0.7", "because": LONG, "note": LONG, "decimals": 1},
            ],
            "tags": ["hostile"],
            "notes": [LONG],
        }
        for number, start in enumerate(("=1+1", "-1", "@x", "::error::x", "\x85"))
    ],
}
MODULE = f"""
import numpy as np

def softmax(scores, **options):
    if scores.shape[-1] == 3 and not np.isnan(scores).any():
        print("\\x1b]0;owned\\x07", {LONG!r})
        raise ValueError("raised: " + {LONG!r} + "\\x00\\x1b[31m\\ufffe")
"""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
SECTIONS = [
    *("# Attention conformance report", "## What is wrong", "## Documents at a glance", "## Verdicts"),
    "## By implementation",
    *("## Expected failures", "## Documents", "## Largest differences between two implementations", "## Environments"),
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the command as a user does; return where it ran, with what it printed beside its results."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "cases").mkdir()
    (folder / "cases" / "all.yaml").write_text(json.dumps(CASES), encoding="utf-8")
    tags = {"tags": {"hostile": {"probes": LONG, "defect": LONG}}}
    (folder / "cases" / "tags.yaml").write_text(json.dumps(tags), encoding="utf-8")
    (folder / "own.py").write_text(MODULE, encoding="utf-8")
    asked = ("--implementation", "own.py", "--output", "out", "--dtype", "float64")
    said = ("--annotations", "--ci-summary", "summary.md", "--junit-xml", "junit.xml")
    done = subprocess.run(
        [sys.executable, "-m", "attncheck", "check", "cases", *asked, *said],
        cwd=folder,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode in (1, 3), done.stderr.decode()
    (folder / "stdout.txt").write_bytes(done.stdout)
    (folder / "stderr.txt").write_bytes(done.stderr)
    return folder


@pytest.fixture
def hostile_frames(hand: Any) -> Frames:
    """Frames in which every text that comes from outside is hostile."""
    shared: dict[str, Any] = {"of": "weights", "transpose": False, "shape": [1, 1, 1, 2], "called": LONG}
    expected = [
        {"name": "weights", "basis": "printed", "erratum": LONG, **shared},
        {"name": "weights", "basis": "known", "because": LONG, "note": LONG, **shared},
        {"name": "output", "basis": "unprinted", "note": LONG, **shared, "of": "output"},
    ]
    identity = f"{LONG}/case"
    case = hand.case(
        identity,
        **dict.fromkeys(("name", "file", "title"), LONG),
        source={"kind": "document", "title": LONG, "author": LONG, "section": LONG, "notes": [LONG]},
        notes=[LONG],
        tags=[LONG, "causal"],
        probes={tag: {"probes": LONG, "defect": LONG} for tag in (LONG, "causal")},
        options={LONG: LONG},
        inputs={LONG: [1]},
        expected=expected,
    )
    rows = []
    for name in (LONG, f"{LONG} 2"):
        of = {"case": identity, "implementation": name}
        printed = {"index": "0,0,0,1", "value": 0.5, "reference_text": LONG, "half_unit": 0.05}
        rows += [
            hand.row(**of, verdict="numeric", stage=LONG, message=LONG, index="0", against="exact"),
            hand.row(**of, verdict="numeric", xfail=True, dtype="float32", reason=LONG, thread=THREAD),
            hand.row(**of, verdict="error", stage="", message=LONG, dtype="float16"),
            hand.row(**of, verdict="unsupported", stage="", message=LONG, dtype="bfloat16"),
            hand.row(**of, comparison="printed", **printed),
            hand.row(**of, comparison="known", **printed),
            hand.row(**of, comparison="exact", stage="output", index="0,0,0,1", value=0.5, verdict="numeric"),
        ]
    pair: dict[str, Any] = {"index": "0", "value": 1.0, "ratio": 2.0, "difference": 1.0}
    rows.append(hand.row(**of, comparison="pair", stage="output", other=LONG, verdict="numeric", **pair))
    texts: dict[str, Any] = {"left_out": {LONG: LONG}, "missing": {LONG: LONG}, "faults": [LONG], "flags": {"A": LONG}}
    return hand.frames(rows, label=LONG, name="run", cases=[case], summary=False, command=LONG, platform=LONG, **texts)


WRITTEN: list[Path] = []


@pytest.fixture
def hand_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The formats of the frames that are made by hand, written once."""
    if WRITTEN:
        return WRITTEN[0]
    hostile_frames = request.getfixturevalue("hostile_frames")
    folder = tmp_path_factory.mktemp("written")
    WRITTEN.append(folder)
    write_report(hostile_frames, folder / "out" / "report")
    write_junit(hostile_frames, folder / "junit.xml")
    append_summary(render_ci_summary(hostile_frames, Path("report.md")), folder / "summary.md")
    lines = annotation_lines(hostile_frames, Path("report.md"))
    (folder / "stdout.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(params=["run", "hand"])
def hostile(request: pytest.FixtureRequest) -> Path:
    """The formats of both, each in a folder."""
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    return folder


def test_the_command_wrote_nothing_elsewhere_and_printed_text(run_folder: Path) -> None:
    expected = {"cases", "own.py", "out", "summary.md", "junit.xml", "stdout.txt", "stderr.txt"}
    assert {path.name for path in run_folder.iterdir()} - {"__pycache__"} == expected
    assert not (run_folder / "out" / "report" / "report.html").is_symlink()
    for name in ("stdout.txt", "stderr.txt"):
        text = (run_folder / name).read_text(encoding="utf-8")
        assert not CONTROL.search(text.replace("\r\n", "\n")), name
        assert "Traceback" not in text
    assert "[red]x[/red]" in (run_folder / "stdout.txt").read_text(encoding="utf-8")


def test_html_has_no_element_or_attribute_of_theirs(hostile: Path, page_of: Callable[..., Any]) -> None:
    page = page_of((hostile / "out" / "report" / "report.html").read_text(encoding="utf-8"))
    assert [len(page.all(tag)) for tag in ("script", "style", "title", "img")] == [1, 1, 1, 0]
    for element in page.walk():
        assert not [name for name in element.attributes if name.startswith("on") or name == "src"]
        assert element.attributes.get("href", "#").startswith(("#", "data:,"))
    ids = [element.attributes["id"] for element in page.walk() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    assert all(name.replace("-", "").replace(".", "").replace("_", "").isalnum() and name.isascii() for name in ids)
    for text in ("<script>alert(1)</script>", "{{ 7 * 7 }}", "=cmd|", "<img src=x onerror=alert(2)>"):
        assert text in page.text


def test_every_section_of_the_page_shows_the_text_and_no_character_that_it_cannot_hold(
    hostile_frames: Frames, page_of: Callable[..., Any], hand: Any
) -> None:
    page = page_of(hostile_frames)
    for section in ("answer", "wrong", "verdicts", "documents", "expected-failures", "environments", "cases"):
        assert "<script>alert(1)</script> | b\\|z `c`" in page.one("section", id=section).text, section
    assert THREAD in page.one("section", id="expected-failures").text
    text = page_of(hand.frames([hand.row(verdict="numeric", message="a\x00b\x1bc\ufffed")], name="control")).raw
    assert "a\ufffdb\ufffdc\ufffdd" in text
    if shutil.which("bash"):
        commands = [block.raw for block in page.all("pre", of_class="command")]
        assert commands
        for command in commands:
            done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
            words = done.stdout.decode().split("\0")
            assert words[0] == "attncheck"
            assert words[2:4] in ([f"{LONG}/case", LONG], [f"{LONG}/case", f"{LONG} 2"])


def test_csv_has_no_formula_in_any_cell(hostile: Path) -> None:
    seen = ""
    for path in (hostile / "out" / "report").glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, strict=True):
                assert None not in row
                for cell in row.values():
                    if cell and not re.fullmatch(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|inf|nan)", cell):
                        assert cell[0] not in "=+-@\t\r\n", cell
                    assert not CONTROL.search(cell)
                    seen += cell
    assert "'=cmd|" in seen or "=cmd|" in seen


def test_junit_is_well_formed_and_says_the_same(hostile: Path) -> None:
    for path in (hostile / "junit.xml", hostile / "out" / "report" / "junit.xml"):
        root = ElementTree.parse(path).getroot()
        assert {element.tag for element in root.iter()} <= {
            *("testsuites", "testsuite", "testcase", "failure", "error", "skipped", "properties", "property"),
            *("system-out", "system-err"),
        }
        texts = [text for element in root.iter() for text in (element.text or "", *element.attrib.values())]
        assert any("=cmd|" in text for text in texts)
        assert any("]]>" in text and "<script>alert(1)</script>" in text for text in texts)
        assert not any(CONTROL.search(text.replace("\r", "")) for text in texts)


def test_markdown_tables_keep_their_columns_and_nothing_becomes_markup(hostile: Path) -> None:
    for path in (hostile / "out" / "report" / "report.md", hostile / "summary.md"):
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
        acted_on = re.sub(r"\\[\\`*_{}\[\]<>()#|~&]", "", outside_code)
        assert not re.search(r"<(script|img|/td|/style)", acted_on)
        assert "**d**" not in acted_on
        own_link = r"^Drawn in \[report\.html\]\(report\.html#document-[A-Za-z0-9.-]+\)\.$"
        assert "](" not in re.sub(own_link, "", acted_on, flags=re.MULTILINE)
        assert "&lt;" not in re.sub(r"<summary>.*", "", acted_on)
        headings = [line for line in outside_blocks.splitlines() if line.startswith(("# ", "## "))]
        assert set(headings) <= set(SECTIONS)
        assert not CONTROL.search(text)


def test_annotations_are_the_commands_own(hostile: Path) -> None:
    lines = (hostile / "stdout.txt").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.lstrip().startswith("::")]
    assert commands
    for line in commands:
        found = re.fullmatch(r"::(error|warning|notice) file=([^,:]*),line=(\d+),title=([^,:]*)::(.*)", line)
        found = found or re.fullmatch(r"::(error|warning|notice) title=([^,:]*)::(.*)", line)
        assert found, line
    assert not any(line.startswith("::error") for line in (hostile / "summary.md").read_text("utf-8").splitlines())
