"""The commands in reports: every one that is printed is run, as it stands, in the folder where the check ran."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from here import command_here, own_code_here

from attncheck import check
from attncheck.reports.commands import commands_again, first_commands
from attncheck.reports.frames import records
from attncheck.reports.html.render import render_html
from attncheck.results.format import Row

HEAD = """
title: Cases of one's own
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}, dtypes: [float64]}
arrays: {words: {draw: randn, shape: [3, 4]}}
cases:
"""
CASE = "  - {{name: {}, inputs: {{query: words, key: words, value: words}}}}\n"
KERNEL = """
def attention(query, key, value):
    return 2 * value
"""
FOLDER = "it's my [own] `cases`"
BUNDLED = "attention/every-dimension-is-different-and-none-is-forgotten"
CASES = [f"{FOLDER}/a b/one", "mine/below-cases", "out side/o/outside", BUNDLED]
AS_IT_STANDS = re.compile(r"^\s*(?:Why: )?((?:attncheck (?:check|explain|repro|report|show)|python) .*)$")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A check of own cases with an own kernel, both in files whose names a shell takes apart; it fails everywhere."""
    above = tmp_path_factory.mktemp("pasted")
    project = above / "project"
    files = {
        project / FOLDER / "a b.yaml": ["One"],
        project / "cases" / "mine.yaml": ["Below cases"],
        above / "out side" / "o.yaml": ["Outside"],
    }
    for path, names in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(HEAD + "".join(map(CASE.format, names)), encoding="utf-8")
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


def in_lines(text: str) -> list[str]:
    return [found[1] for line in text.splitlines() if (found := AS_IT_STANDS.match(line))]


def in_elements(page: str) -> list[str]:
    """Return the commands of the HTML page; those of the scripts in it are in the scripts' files too."""
    found = re.findall(r'<pre class="command"><code>(.*?)</code></pre>', page, re.DOTALL)
    return [html.unescape(each) for each in found]


def printed(project: Path) -> dict[str, list[str]]:
    """Return every command, by what prints it."""
    report = project / "my results" / "report"
    junit = ElementTree.parse(report / "junit.xml").iter("failure")
    scripts = sorted((project / "my results" / "scripts").glob("*.py"))
    environment = json.loads((project / "my results" / "environment.json").read_text(encoding="utf-8"))
    return {
        "terminal": in_lines((project / "stdout.txt").read_text(encoding="utf-8")),
        "report.md": in_lines((report / "report.md").read_text(encoding="utf-8")),
        "report.html": in_elements((report / "report.html").read_text(encoding="utf-8")),
        "junit.xml": [line for each in junit for line in in_lines(each.text or "")],
        "summary": in_lines((project / "summary.md").read_text(encoding="utf-8")),
        "scripts": [line for path in scripts for line in in_lines(path.read_text(encoding="utf-8"))],
        "environment": [environment["command"]],
    }


def test_every_format_prints_the_commands_of_its_failures(project: Path) -> None:
    found = printed(project)
    counts = {name: len(lines) for name, lines in found.items()}
    assert counts == {
        "terminal": 1,
        "report.md": 1,
        "report.html": 2 * len(CASES) + 2,  # of each case, and of each of two defects
        "junit.xml": len(CASES),
        "summary": 1,
        "scripts": 2 * len(CASES),
        "environment": 1,
    }
    explains = {line for line in found["report.html"] if line.startswith("attncheck explain")}
    assert set(found["junit.xml"]) == explains
    assert {*found["terminal"], *found["report.md"], *found["summary"]} <= explains
    assert all(line in explains for line in found["scripts"] if line.startswith("attncheck"))


def test_every_kind_of_printed_command_works_and_finds_what_the_check_found(project: Path) -> None:
    """Pasted into a shell: of a case in a folder whose name a shell takes apart, and of one outside the folder."""
    lines = sorted({line for lines in printed(project).values() for line in lines})
    kinds = {kind: [line for line in lines if line.startswith(f"attncheck {kind}")] for kind in ("explain", "repro")}
    assert len(lines) == 1 + 3 * len(CASES)  # the check itself, and what runs a script
    for kind, among in kinds.items():
        assert len(among) == len(CASES)
        words = [shlex.split(line) for line in among]
        assert all(each[3] == "my $kernel's.py:attention" for each in words), words
        line = max(among, key=lambda each: each.count("'"))
        assert "own" in line
        done = paste(project, line)
        assert done.returncode == (1 if kind == "explain" else 0), f"{line}\n{done.stdout}{done.stderr}"
        assert kind == "repro" or "It goes wrong at output" in done.stdout
    (again,) = in_lines(done.stdout)
    script = paste(project, again)
    assert script.returncode == 1, f"{again}\n{script.stdout}{script.stderr}"
    assert re.search("^output (is WRONG|has shape)", script.stdout, re.MULTILINE)


def test_the_ids_and_names_in_a_report_are_taken_too(project: Path) -> None:
    """With the report's own name of the implementation, which its results lead to."""

    def ends_with(*arguments: str) -> tuple[int, str, str]:
        with own_code_here():
            return command_here(arguments, project)

    named = ["my $kernel's.attention", "--results", "my results"]
    code, out, err = ends_with("explain", "out side/o/outside", *named)
    assert code == 1, out + err
    assert "in float64" in out
    for wanted in (f"{FOLDER}/a b/one", f"{FOLDER}/a b.yaml::on", "cases/mine.yaml", "../out side/o.yaml"):
        code, out, err = ends_with("show", wanted)
        assert not code, err
        assert out.startswith(("One", "Below cases", "Outside"))
    code, _, err = ends_with("explain", "cases/mine.yaml", "numpy", "--dtype", "float32")
    said = "attncheck: mine/below-cases has no dtype 'float32'; expected one of float64\n"
    assert (code, err) == (2, said)
    code, _, err = ends_with("explain", "cases/mine.yaml", "numpy", "--results", "gone")
    assert code == 2
    assert "gone is not a folder; expected a results directory" in err


def test_an_object_has_no_command_and_the_page_says_so() -> None:
    with own_code_here():
        result = check(lambda query, key, value: 2 * value, cases=[BUNDLED], dtypes=["float64"])
    (row,) = records(result.frames.results)
    assert commands_again(result.frames, row) == ()
    assert first_commands(result.frames) == []
    page = render_html(result.frames)
    assert "handed over as an object" in page
    assert "attncheck explain" not in page


def test_one_command_for_each_of_some_implementations(hand: Any) -> None:
    def rows() -> Iterator[Row]:
        for name in ("torch.eager", "numpy.eager", "mine.attention", "jax.eager", "jax.jit"):
            yield hand.row(implementation=name, verdict="numeric")

    frames = hand.frames(rows(), again={})
    lines = first_commands(frames)
    names = [line.split()[3] for line in lines]
    assert names == ["jax.eager", "jax.jit", "numpy.eager"]  # in the report's order; nobody can name mine.attention
