"""The short form: what is printed, how much of it, and commands that work as they are printed in every format."""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from here import command_here, own_code_here

from attncheck import check
from attncheck.errors import ExitCode
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.score import mutants_document, print_mutation, run_mutants
from attncheck.reading.selection import select_cases
from attncheck.reports.defects import commands_again, first_commands
from attncheck.reports.frames import records
from attncheck.reports.html.page import render_html
from attncheck.reports.terminal import print_summary

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
    assert len(explains) == len(repros) == len(CASES)
    texts = [project / "stdout.txt", project / "summary.md", report / "report.md", report / "junit.xml"]
    for path in (*texts, *(project / "my results" / "scripts").glob("*.py")):
        lines = {line for line in commands_of(path) if line.startswith("attncheck")}
        assert lines, path
        assert lines <= explains, path
    for among, code in ((explains, 1), (repros, 0)):
        assert [shlex.split(line)[3] for line in among] == ["my $kernel's.py:attention"] * len(CASES)
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
    (row,) = records(result.frames.results)
    assert (commands_again(result.frames, row), first_commands(result.frames)) == ((), [])
    page = render_html(result.frames)
    assert "handed over as an object" in page
    assert "attncheck explain" not in page
    names = ("torch.eager", "numpy.eager", "mine.attention", "jax.eager", "jax.jit")
    lines = first_commands(hand.frames([{"implementation": name, "verdict": "numeric"} for name in names], again={}))
    # In the report's order; nobody can name mine.attention.
    assert [line.split()[3] for line in lines] == ["jax.eager", "jax.jit", "numpy.eager"]


def test_a_mutation_score_says_what_was_spared_and_tries_other_rules_only_where_nothing_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    subjects, cases = [SUBJECTS["maximum_not_subtracted"], SUBJECTS["reference"]], select_cases(["softmax.yaml"]).cases
    spared = "each right variant was put to a share of the cases"
    for exhaustive in (False, True):
        frames = run_mutants(cases, subjects=subjects, exhaustive=exhaustive)
        print_mutation(frames)
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
        print_summary(hand.frames(rows), Path("here/report.html"), quiet=True)
        assert capsys.readouterr().out.splitlines() == lines
