"""Scripts for what failed, kept with the results of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from attncheck.cli import app
from attncheck.execution.implementation_selection import select_callable
from attncheck.reading.selection import select_cases
from attncheck.repro import failing, write_scripts
from attncheck.results.format import Row

CASES = ["softmax/drawn-scores-are-normalised-over-the-last-axis-and-no-other"]


def test_a_check_keeps_a_script_for_what_fails_that_finds_it_again(
    tmp_path: Path, wrong_kernels: str, run_script: Callable[..., object]
) -> None:
    results = tmp_path / "results"
    arguments = ["check", CASES[0], "-i", wrong_kernels, "-d", "float32", "--output", str(results)]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    ((place, name),) = json.loads((results / "scripts" / "index.json").read_text()).items()
    assert place.startswith(f"{CASES[0]}|")
    assert place.endswith("|float32")
    done = run_script((results / "scripts" / name).read_text())
    assert done.returncode == 1, done  # type: ignore[attr-defined]


def test_a_run_without_failures_leaves_no_scripts_of_an_earlier_one(tmp_path: Path, right_kernels: str) -> None:
    results = tmp_path / "results"
    arguments = ["check", CASES[0], "-i", right_kernels, "-d", "float32", "--output", str(results)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (results / "scripts").mkdir()
    (results / "scripts" / "000.py").write_text("of an earlier run")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (results / "scripts").exists()


def test_every_implementation_has_its_first_script_before_any_has_a_second() -> None:
    places = [("one", "a", "float32"), ("two", "a", "float32"), ("one", "b", "float32")]
    assert failing._one_of_each_first(places) == [places[0], places[2], places[1]]


def test_what_no_script_can_show_has_none(tmp_path: Path) -> None:
    cases = select_cases([CASES[0]], base=tmp_path).cases
    implementation = select_callable(lambda query, key, value: value, None, "mine")
    row = Row(CASES[0], "softmax", "float32", implementation.name, "stage", "weights", "numeric")
    assert write_scripts(cases, [implementation], [row], tmp_path) == 0
    assert not (tmp_path / "scripts").exists()
