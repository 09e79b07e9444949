"""A hostile case file and a hostile implementation, really run: in no format do their texts become more than text."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from attncheck.reports.figures.heatmaps import heatmaps
from attncheck.reports.figures.panels import Panel

BIDI = "\u202e\u2066"
SHORT = f"<script>alert(1)</script> | `c` ]]> [red]x[/red] {{{{ 7 * 7 }}}} {BIDI} ::error::x %0A"
"""One line, as the names of cases are."""
LONG = (
    "=cmd|'/c calc'!A1\n+1\t@SUM(1)\r\n::error file=x::owned\n</failure></td></style><img src=x onerror=alert(2)>\n"
    + SHORT
)
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
        for number, start in enumerate(("=1+1", "+1", "-1", "@x", "::error::x", "\x85"))
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the command as a user does; return where it ran, with what it printed beside its results."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "cases").mkdir()
    (folder / "cases" / "all.yaml").write_text(json.dumps(CASES), encoding="utf-8")
    tags = {"tags": {"hostile": {"probes": LONG, "defect": LONG}}}
    (folder / "cases" / "tags.yaml").write_text(json.dumps(tags), encoding="utf-8")
    (folder / "own.py").write_text(MODULE, encoding="utf-8")
    asked = ("--implementation", "numpy.eager,own.py", "--output", "out", "--dtype", "float64")
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


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_command_wrote_nothing_elsewhere(folder: Path) -> None:
    expected = {"cases", "own.py", "out", "summary.md", "junit.xml", "stdout.txt", "stderr.txt"}
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == expected
    assert not (folder / "out" / "report" / "report.html").is_symlink()


def test_html_has_no_element_or_attribute_of_theirs(folder: Path) -> None:
    page = _Page()
    page.feed((folder / "out" / "report" / "report.html").read_text(encoding="utf-8"))
    names = [tag for tag, _ in page.tags]
    assert (names.count("script"), names.count("img"), names.count("title")) == (1, 0, 1)
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "raised: =cmd|" in page.text
    assert "<img src=x onerror=alert(2)>" in page.text


def cells_of(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        for row in reader:
            assert None not in row
            yield from row.items()


def test_csv_has_no_formula_in_any_cell(folder: Path) -> None:
    seen = ""
    for path in (folder / "out" / "report").glob("*.csv"):
        for _, cell in cells_of(path):
            if cell and not re.fullmatch(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|inf|nan)", cell):
                assert cell[0] not in "=+-@\t\r\n", cell
            assert not CONTROL.search(cell)
            seen += cell
    assert "'=cmd|" in seen or "=cmd|" in seen


def test_junit_is_well_formed_and_says_the_same(folder: Path) -> None:
    for path in (folder / "junit.xml", folder / "out" / "report" / "junit.xml"):
        root = ElementTree.parse(path).getroot()
        assert {element.tag for element in root.iter()} <= {
            *("testsuites", "testsuite", "testcase", "failure", "error", "skipped", "properties", "property"),
            *("system-out", "system-err"),
        }
        texts = [text for element in root.iter() for text in (element.text or "", *element.attrib.values())]
        assert any("raised: =cmd|" in text for text in texts)
        assert any("]]>" in text and "<script>alert(1)</script>" in text for text in texts)
        assert not any(CONTROL.search(text) for text in texts)


def test_markdown_tables_keep_their_columns_and_hold_no_markup(folder: Path) -> None:
    for path in (folder / "out" / "report" / "report.md", folder / "summary.md"):
        text = path.read_text(encoding="utf-8")
        widths: list[int] = []
        for line in [*text.splitlines(), ""]:
            if line.startswith("|"):
                widths.append(len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)))
                continue
            assert len(set(widths)) <= 1, line
            widths = []
        outside_code = re.sub(r"(?<!\\)(`+)[^\n]*?(?<!`)\1(?!`)", "", text)
        assert not re.search(r"(?<!\\)<(script|img|/td|/style)", outside_code)
        assert not CONTROL.search(text)


def test_the_terminal_gets_text_and_no_markup_or_sequences(folder: Path) -> None:
    for name in ("stdout.txt", "stderr.txt"):
        text = (folder / name).read_text(encoding="utf-8")
        assert not CONTROL.search(text.replace("\r\n", "\n")), name
        assert "Traceback" not in text
    assert "[red]x[/red]" in (folder / "stdout.txt").read_text(encoding="utf-8")


def test_annotations_are_the_commands_own(folder: Path) -> None:
    lines = (folder / "stdout.txt").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.lstrip().startswith("::")]
    assert commands
    for line in commands:
        found = re.fullmatch(r"::(error|warning|notice) file=([^,:]*),line=(\d+),title=([^,:]*)::(.*)", line)
        found = found or re.fullmatch(r"::(error|warning|notice) title=([^,:]*)::(.*)", line)
        assert found, line


def test_a_picture_is_well_formed_and_runs_nothing() -> None:
    picture = heatmaps([Panel(LONG, np.array([[0.5]]), row_axis=LONG, row_labels=[SHORT])], heading=LONG)
    root = ElementTree.fromstring(picture.data)
    assert not [element for element in root.iter() if element.tag.rpartition("}")[2] in ("script", "a", "use")]
    hrefs = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith("href")]
    assert all(href.startswith("data:image/png;base64,") for href in hrefs)
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
