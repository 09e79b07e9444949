"""Texts of cases, kernels and machines in every format: none becomes markup, a formula, a command or a heading."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attncheck.reports.ci import annotation_lines, append_summary, render_ci_summary
from attncheck.reports.frames import Frames
from attncheck.reports.terminal import print_summary
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
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


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


def test_junit_is_well_formed_and_says_the_same(written: Path) -> None:
    for path in (written / "junit.xml", written / "report" / "junit.xml"):
        root = ElementTree.parse(path).getroot()
        texts = [text for element in root.iter() for text in (element.text or "", *element.attrib.values())]
        assert any("]]>" in text and "<script>alert(1)</script>" in text for text in texts)
        assert not any(CONTROL.search(text.replace("\r", "")) for text in texts)


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
        acted_on = re.sub(r"\\[\\`*_{}\[\]<>()#|~&]", "", outside_code)
        assert not re.search(r"<(script|img|/td|/style)", acted_on)
        assert "**d**" not in acted_on
        own_link = r"^Drawn in \[report\.html\]\(report\.html#document-[A-Za-z0-9.-]+\)\.$"
        assert "](" not in re.sub(own_link, "", acted_on, flags=re.MULTILINE)
        assert "&lt;" not in re.sub(r"<summary>.*", "", acted_on)
        headings = [line for line in outside_blocks.splitlines() if line.startswith(("# ", "## "))]
        assert not {"# g", "## h"} & set(headings)
        assert not CONTROL.search(text)


def test_annotations_are_the_commands_own(written: Path) -> None:
    lines = (written / "stdout.txt").read_text(encoding="utf-8").splitlines()
    assert lines
    for line in lines:
        found = re.fullmatch(r"::(error|warning|notice) file=([^,:]*),line=(\d+),title=([^,:]*)::(.*)", line)
        found = found or re.fullmatch(r"::(error|warning|notice) title=([^,:]*)::(.*)", line)
        assert found, line
    assert not any(line.startswith("::error") for line in (written / "summary.md").read_text("utf-8").splitlines())


@pytest.fixture
def written(hostile_frames: Frames, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The formats of the frames, in a folder of their own."""
    folder = tmp_path / "formats" / "written"
    write_report(hostile_frames, folder / "report")
    write_junit(hostile_frames, folder / "junit.xml")
    append_summary(render_ci_summary(hostile_frames, Path("report.md")), folder / "summary.md")
    lines = annotation_lines(hostile_frames, Path("report.md"))
    (folder / "stdout.txt").write_text("\n".join(lines), encoding="utf-8")
    print_summary(hostile_frames, Path("report.md"), quiet=False)
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
    assert all(name.replace("-", "").replace(".", "").replace("_", "").isalnum() and name.isascii() for name in ids)
    for text in ("<script>alert(1)</script>", "{{ 7 * 7 }}", "=cmd|", "<img src=x onerror=alert(2)>"):
        assert text in page.text
    for section in ("answer", "wrong", "verdicts", "documents", "expected-failures", "environments", "cases"):
        assert "<script>alert(1)</script> | b\\|z `c`" in page.one("section", id=section).text, section
    assert THREAD in page.one("section", id="expected-failures").text
    for command in [block.raw for block in page.all("pre", of_class="command")] if shutil.which("bash") else []:
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
        words = done.stdout.decode().split("\0")
        assert words[0] == "attncheck"
        assert words[2:4] in ([f"{LONG}/case", LONG], [f"{LONG}/case", f"{LONG} 2"])
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
