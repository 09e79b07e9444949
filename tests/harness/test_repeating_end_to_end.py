"""A kernel that keeps something between calls, as people meet it: by command, by call, in their test suite."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attncheck import check
from attncheck.cli import app

CASE = "row/9-queries"
FRESH = "In a fresh process nothing is wrong with this case.\nThe check found numeric at output: "


@pytest.fixture(autouse=True)
def folder(calls_in_a_row: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(calls_in_a_row)
    return calls_in_a_row


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_a_command_repeats_what_its_check_met_and_its_script_does_so_alone(
    folder: Path, remembering: Callable[[str], Path]
) -> None:
    remembering("{2, 5}")
    assert ask("check", "row.yaml", "-i", "kernel.py:attention", "--output", "elsewhere").exit_code == 1
    about = (CASE, "kernel.py:attention", "--dtype", "float32")
    alone = ask("explain", *about)  # nobody says that it failed anywhere
    assert alone.exit_code == 0
    assert "Every stage is within its error bound" in alone.stdout
    told = ask("explain", *about, "--results", "elsewhere")
    assert told.exit_code == 1
    assert told.stdout.startswith(FRESH)
    assert "That happens again after 2 of the 8 calls that the check's process had been asked before" in told.stdout
    assert "  after row/2-queries in float32\n  after row/5-queries in float32\n" in told.stdout
    assert ask("repro", *about, "--results", "elsewhere", "--output", "script.py").exit_code == 0
    text = (folder / "script.py").read_text(encoding="utf-8")
    assert "It makes 2 other calls, and then one" in text
    assert FRESH in text
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "output is WRONG" in done.stdout


def test_a_kernel_that_was_mended_since_is_said_to_have_changed(
    folder: Path, remembering: Callable[[str], Path]
) -> None:
    remembering("set()")
    assert ask("check", "row.yaml", "-i", "kernel.py:attention").exit_code == 1
    later = time.time() + 10
    os.utime(remembering("{99}"), (later, later))
    told = ask("explain", CASE, "kernel.py:attention")
    assert told.exit_code == 0
    assert told.stdout.startswith(FRESH)
    assert "That does not happen again, neither in a fresh process nor after the 8 calls" in told.stdout
    assert "kernel.py has changed since." in told.stdout


def test_a_case_that_was_changed_since_is_another_one(folder: Path, remembering: Callable[[str], Path]) -> None:
    remembering("{2}")
    assert ask("check", "row.yaml", "-i", "kernel.py:attention").exit_code == 1
    path = folder / "row.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("[9, 4]", "[10, 4]"), encoding="utf-8")
    told = ask("explain", CASE, "kernel.py:attention")
    assert told.exit_code == 0
    assert "fresh process" not in told.stdout


def test_calls_that_are_too_many_for_a_script_are_refused_with_what_shows_them(
    remembering: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attncheck.repro.script.MAX_BEFORE", 1)
    remembering("{2, 5}")
    assert ask("check", "row.yaml", "-i", "kernel.py:attention").exit_code == 1
    done = CliRunner().invoke(app, ["repro", CASE, "kernel.py:attention"])
    assert "goes wrong only after 2 other calls" in str(done.exception)


def test_the_call_from_python_explains_as_the_command_does(remembering: Callable[[str], Path]) -> None:
    result = check(f"{remembering('{3}')}:attention", cases=["row.yaml"])
    told = result.explain()
    assert f"\n\n{FRESH}" in told
    assert "That happens again after 1 of the 8 calls" in told
    assert "  after row/3-queries in float32" in told


def test_a_test_suite_tells_it_in_its_failure(folder: Path, remembering: Callable[[str], Path]) -> None:
    remembering("{3}")
    words = ["--attncheck", "kernel.py:attention", "--attncheck-cases", "row.yaml", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "1 failed, 8 passed" in done.stdout
    assert "In a fresh process nothing is wrong with this case." in done.stdout
    assert "That happens again after 1 of the 8 calls" in done.stdout
    assert "attncheck explain" not in done.stdout  # it would start a fresh process, and find nothing


def test_a_failure_that_a_fresh_process_shows_too_has_a_command(
    folder: Path, remembering: Callable[[str], Path]
) -> None:
    remembering("set()")
    words = ["--attncheck", "kernel.py:attention", "--attncheck-cases", "row.yaml", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "fresh process" not in done.stdout
    assert f"attncheck explain {CASE} kernel.py:attention --dtype float32\n" in done.stdout
