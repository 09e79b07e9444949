"""Texts of cases and frameworks are shown as they are: none becomes markup, a link, a script or an attribute."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.results.format import Row

HOSTILE = (
    """<script>alert(1)</script></style></title>]]>--><img src=x onerror='alert(2)'> "q" 'p' &lt; {{ 7 * 7 }} \u202e"""
)
THREAD = "javascript:alert(1)//https://example.org"


@pytest.fixture
def hostile_frames(
    make_row: Callable[..., Row],
    make_case_record: Callable[..., dict[str, Any]],
    write_run: Callable[..., Path],
    frames_of: Callable[..., Frames],
) -> Frames:
    shared: dict[str, Any] = {"of": "weights", "transpose": False, "shape": [1, 1, 1, 2], "called": HOSTILE}
    expected = [
        {"name": "weights", "basis": "printed", "erratum": HOSTILE, **shared},
        {"name": "weights", "basis": "known", "because": HOSTILE, "note": HOSTILE, **shared},
    ]
    source = {"kind": "document", "title": HOSTILE, "author": HOSTILE, "section": HOSTILE, "notes": [HOSTILE]}
    identity = f"{HOSTILE}/case"
    case = make_case_record(
        identity,
        name=HOSTILE,
        file=HOSTILE,
        title=HOSTILE,
        source=source,
        notes=[HOSTILE],
        tags=[HOSTILE, "causal"],
        probes={tag: {"probes": HOSTILE, "defect": HOSTILE} for tag in (HOSTILE, "causal")},
        options={HOSTILE: HOSTILE},
        inputs={HOSTILE: [1]},
        expected=expected,
    )
    rows = []
    for name in (HOSTILE, f"{HOSTILE} 2"):
        of = {"case": identity, "implementation": name}
        rows += [
            make_row(**of, verdict="numeric", stage=HOSTILE, message=HOSTILE, index="0", against="exact"),
            make_row(**of, verdict="numeric", xfail=True, dtype="float32", reason=HOSTILE, thread=THREAD),
            make_row(**of, verdict="error", stage="", message=HOSTILE, dtype="float16"),
            make_row(**of, comparison="printed", index="0,0,0,1", value=0.5, reference_text=HOSTILE, half_unit=0.05),
        ]
    rows.append(make_row(**of, comparison="pair", other=HOSTILE, verdict="numeric", ratio=2.0, index="0", value=1.0))
    texts = {"left_out": {HOSTILE: HOSTILE}, "missing": {HOSTILE: HOSTILE}, "faults": [HOSTILE]}
    texts |= {"command": HOSTILE, "platform": HOSTILE, "flags": {"A": HOSTILE}}
    return frames_of(write_run(rows, label=HOSTILE, name="run", cases=[case], summary=False, **texts))


def test_no_text_becomes_markup(hostile_frames: Frames, page_of: Callable[..., Any]) -> None:
    page = page_of(hostile_frames)
    assert len(page.all("script")) == len(page.all("style")) == len(page.all("title")) == 1
    assert not page.all("img")
    for element in page.walk():
        assert not [name for name in element.attributes if name.startswith("on")]
        href = element.attributes.get("href", "#")
        assert href.startswith("#") or href == "data:,", href
    shown = " ".join(HOSTILE.split())
    for section in ("answer", "wrong", "verdicts", "documents", "expected-failures", "environments", "cases"):
        assert shown in page.one("section", id=section).text, section
    assert THREAD in page.one("section", id="expected-failures").text
    assert page.one("details", of_class="case").one("summary").one("span", of_class="name").text == shown


def test_ids_are_harmless(hostile_frames: Frames, page_of: Callable[..., Any]) -> None:
    page = page_of(hostile_frames)
    ids = [element.attributes["id"] for element in page.walk() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    assert all(name.replace("-", "").replace(".", "").replace("_", "").isalnum() and name.isascii() for name in ids)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no Bash")
def test_commands_keep_a_hostile_name_one_word(hostile_frames: Frames, page_of: Callable[..., Any]) -> None:
    page = page_of(hostile_frames)
    commands = [block.raw for block in page.all("pre", of_class="command")]
    assert commands
    for command in commands:
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
        words = done.stdout.split("\0")
        assert words[0] == "attncheck"
        assert words[2] == f"{HOSTILE}/case"
        assert words[3] in (HOSTILE, f"{HOSTILE} 2")


def test_what_no_page_can_hold_is_replaced(
    make_row: Callable[..., Row], write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    text = render_html(frames_of(write_run([make_row(verdict="numeric", message="a\x00b\x1bc\ufffed")])))
    assert "a\ufffdb\ufffdc\ufffdd" in text
    text.encode("utf-8")
