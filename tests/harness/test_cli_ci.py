"""The command line inside a CI system: where JUnit, summary and annotations go, and what happens if they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attncheck.results.format import Row

Invoke = Callable[..., tuple[int, str, str]]

ANNOTATION = "::error file=file.yaml,line=7,title=numeric%3A numpy.eager in float64::one: weights: off by 2"


@pytest.fixture
def wrong(make_row: Callable[..., Row], write_run: Callable[..., Path]) -> Path:
    """Return the results of one case that disagrees."""
    return write_run([make_row(verdict="numeric", message="off by 2")], exit_code=1)


WRONG = "def softmax(scores):\n    return {'weights': scores * 0 - 1}\n"


def test_a_check_in_ci_leaves_all_that_a_ci_system_reads(
    invoke: Invoke, case_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    Path("summary.md").write_text("An earlier step.\n")
    Path("wrong.py").write_text(WRONG)
    arguments = ("check", "small", "-i", "wrong.py:softmax", "-d", "float64", "--junit-xml", "ci/junit.xml")
    code, out, err = invoke(*arguments, "--annotations")
    assert (code, err) == (1, "")
    line = next(number for number, text in enumerate(WRONG.splitlines(), 1) if text.startswith("def "))
    assert [line.split("::")[1] for line in out.splitlines() if line.startswith("::")] == [
        f"error file=wrong.py,line={line},title=numeric%3A wrong.softmax in float64"
    ] * 2
    assert (
        Path("summary.md")
        .read_text()
        .startswith("An earlier step.\n\n### attncheck: wrong.softmax is wrong in all 2 cases")
    )
    (suite,) = ElementTree.parse("ci/junit.xml").getroot()
    assert [suite.attrib[name] for name in ("tests", "failures", "skipped")] == ["4", "2", "2"]
    assert Path("ci/junit.xml").read_bytes() == Path("results/latest/report/junit.xml").read_bytes()


def test_nothing_is_printed_or_appended_that_was_not_asked_for(invoke: Invoke, wrong: Path) -> None:
    _, out, _ = invoke("report", wrong)
    assert "::error" not in out
    assert {path.name for path in Path.cwd().iterdir()} == {wrong.name}


def test_an_explicit_file_comes_before_the_one_that_the_ci_system_names(
    invoke: Invoke, wrong: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "named.md")
    assert invoke("report", wrong, "--ci-summary", "mine.md")[0] == 1
    assert Path("mine.md").is_file()
    assert not Path("named.md").exists()


def test_a_summary_that_cannot_be_written_ends_only_what_asked_for_it(
    invoke: Invoke, wrong: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = invoke("report", wrong, "--ci-summary", "no/such/folder.md")
    assert (code, err.count("\n")) == (2, 1)
    assert "the summary no/such/folder.md cannot be written" in err
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no/such/folder.md")
    code, out, err = invoke("report", wrong)
    assert (code, err.count("\n")) == (1, 1)
    assert "cannot be written" in err
    assert "Report: " in out
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "")
    assert invoke("report", wrong)[2] == ""


def test_annotations_do_not_spoil_json(invoke: Invoke, wrong: Path) -> None:
    code, out, err = invoke("report", wrong, "--json", "--annotations")
    assert (code, err) == (1, f"{ANNOTATION}\n")
    assert json.loads(out)["exit_code"] == 1
    code, out, _ = invoke("report", wrong, "--quiet", "--annotations")
    assert ANNOTATION in out.splitlines()
