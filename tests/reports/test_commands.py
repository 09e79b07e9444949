"""The commands in reports: every one that is printed is run, as it stands, in the folder where the check ran."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attncheck import check
from attncheck.reports.commands import commands_again, first_commands
from attncheck.reports.frames import Frames, records
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
CASES = [f"{FOLDER}/a b/one", f"{FOLDER}/a b/two", "mine/below-cases", "out side/o/outside", BUNDLED]
AS_IT_STANDS = re.compile(r"^\s*(?:Why: )?((?:attncheck (?:check|explain|repro|report|show)|python) .*)$")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A check of own cases with an own kernel, both in files whose names a shell takes apart; it fails everywhere."""
    above = tmp_path_factory.mktemp("pasted")
    project = above / "project"
    files = {
        project / FOLDER / "a b.yaml": ["One", "Two"],
        project / "cases" / "mine.yaml": ["Below cases"],
        above / "out side" / "o.yaml": ["Outside"],
    }
    for path, names in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(HEAD + "".join(map(CASE.format, names)), encoding="utf-8")
    (project / "my $kernel's.py").write_text(KERNEL, encoding="utf-8")
    asked = ["attncheck", "check", FOLDER, "cases/mine.yaml", "../out side", BUNDLED]
    asked += ["--implementation", "my $kernel's.py:attention", "--framework", "numpy", "--dtype", "float64"]
    done = run(project, [*asked, "--output", "my results", "--ci-summary", "summary.md", "--time-limit", "30"])
    assert done.returncode == 1, done.stdout + done.stderr
    (project / "stdout.txt").write_text(done.stdout, encoding="utf-8")
    return project


def run(folder: Path, command: list[str] | str) -> subprocess.CompletedProcess[str]:
    """Run a command, or paste a text into a shell."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = ["bash", "-c", command] if isinstance(command, str) else command
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
        "report.html": 2 * len(CASES),
        "junit.xml": len(CASES),
        "summary": 1,
        "scripts": 2 * len(CASES),
        "environment": 1,
    }
    explains = {line for line in found["report.html"] if line.startswith("attncheck explain")}
    assert set(found["junit.xml"]) == explains
    assert {*found["terminal"], *found["report.md"], *found["summary"]} <= explains
    assert all(line in explains for line in found["scripts"] if line.startswith("attncheck"))


def test_every_printed_command_works_and_finds_what_the_check_found(project: Path) -> None:
    for line in sorted({line for lines in printed(project).values() for line in lines}):
        done = run(project, line)
        makes_a_script = line.startswith("attncheck repro")
        assert done.returncode == (0 if makes_a_script else 1), f"{line}\n{done.stdout}{done.stderr}"
        if line.startswith("attncheck explain"):
            assert "It goes wrong at output" in done.stdout
        if makes_a_script:
            (again,) = in_lines(done.stdout)
            script = run(project, again)
            assert script.returncode == 1, f"{again}\n{script.stdout}{script.stderr}"
            assert re.search("^output (is WRONG|has shape)", script.stdout, re.MULTILINE)


@pytest.mark.parametrize("identity", CASES)
def test_the_ids_and_names_in_a_report_are_taken_too(identity: str, project: Path) -> None:
    """With the report's own name of the implementation, which its results lead to."""
    named = ["my $kernel's.attention", "--results", "my results"]
    done = run(project, ["attncheck", "explain", identity, *named])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in float64" in done.stdout or identity == BUNDLED


def test_show_takes_what_the_other_commands_take(project: Path) -> None:
    for wanted in (f"{FOLDER}/a b/one", f"{FOLDER}/a b.yaml::on", "cases/mine.yaml", "../out side/o.yaml"):
        done = run(project, ["attncheck", "show", wanted])
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(("One", "Below cases", "Outside"))


def test_a_dtype_that_a_case_has_not_is_answered_with_those_that_it_has(project: Path) -> None:
    done = run(project, ["attncheck", "explain", "cases/mine.yaml", "numpy", "--dtype", "float32"])
    assert done.returncode == 2
    assert done.stderr == "attncheck: mine/below-cases has no dtype 'float32'; expected one of float64\n"


def test_results_that_are_named_have_to_be_there(project: Path) -> None:
    done = run(project, ["attncheck", "explain", "cases/mine.yaml", "numpy", "--results", "gone"])
    assert done.returncode == 2
    assert "gone is not a folder; expected a results directory" in done.stderr


def test_an_object_has_no_command_and_the_page_says_so() -> None:
    result = check(lambda query, key, value: 2 * value, cases=[BUNDLED], dtypes=["float64"])
    (row,) = records(result.frames.results)
    assert commands_again(result.frames, row) == ()
    assert first_commands(result.frames, result.frames.results) == []
    page = render_html(result.frames)
    assert "handed over as an object" in page
    assert "attncheck explain" not in page


def test_one_command_for_each_of_some_implementations(
    make_row: Callable[..., Row], write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    def rows() -> Iterator[Row]:
        for name in ("torch.eager", "numpy.eager", "mine.attention", "jax.eager", "jax.jit"):
            yield make_row(implementation=name, verdict="numeric")

    frames = frames_of(write_run(rows(), again={}))
    lines = first_commands(frames, frames.results)
    names = [line.split()[3] for line in lines]
    assert names == ["jax.eager", "jax.jit", "numpy.eager"]  # in the report's order; nobody can name mine.attention
