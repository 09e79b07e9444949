"""What pytest does with the ids of attncheck's tests: last failures, ids that are pasted, keywords, several processes.

Each pytest release has read ids in its own way: ``tox -e py311-pytest84,py311-pytest90,py311-pytestlatest``.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from here import own_code_here

KERNEL = """
import numpy as np

def attention(query, key, value):
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    scores = scores * query.dtype.type(1.5 if query.shape[2] == 3 else 1.0)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
"""Wrong where there are three queries."""
CASES = """
title: Three small cases
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}, dtypes: [float32]}
arrays: {words: {draw: randn, shape: [3, 4]}}
cases:
  - name: Two queries
    inputs: {query: {draw: randn, shape: [2, 4]}, key: words, value: words}
  - name: Three queries
    inputs: {query: {draw: randn, shape: [3, 4]}, key: words, value: words}
  - name: Four queries
    inputs: {query: {draw: randn, shape: [4, 4]}, key: words, value: words}
"""
Run = Callable[..., subprocess.CompletedProcess[str]]
FOLDER = "my [own] cases"
TEST = f"""
from kernel import attention
from attncheck.pytest_plugin import conformance

test_attention = conformance(attention, cases=[{FOLDER!r}])
"""
OPTIONS = ["--attncheck", "kernel.py:attention", "--attncheck-cases", FOLDER]
ONE_ID = f"attncheck::kernel.attention[{FOLDER}/a/three-queries-float32]"


@pytest.fixture
def run_pytest(run_pytest: Run) -> Run:
    """Run pytest, and the kernel, in this process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with own_code_here():
            return run_pytest(*arguments)

    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A kernel that fails one of three cases, in a folder whose name has brackets and spaces."""
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "a.yaml").write_text(CASES, encoding="utf-8")
    return tmp_path


@pytest.fixture(params=["option", "file"])
def asked(request: pytest.FixtureRequest, project: Path, run_pytest: Run) -> Callable[..., list[str]]:
    """Run pytest with arguments, by ``--attncheck`` or by a test file, and return its lines."""
    by_file = request.param == "file"
    if by_file:
        (project / "test_kernel.py").write_text(TEST, encoding="utf-8")

    def ask(*arguments: str) -> list[str]:
        return run_pytest(*([] if by_file else OPTIONS), *arguments).stdout.splitlines()

    return ask


def failed_ids(lines: list[str]) -> list[str]:
    return [line.removeprefix("FAILED ").partition(" - ")[0] for line in lines if line.startswith("FAILED ")]


def test_last_failures_and_keywords_select_and_a_pasted_id_runs_its_test(asked: Callable[..., list[str]]) -> None:
    all_lines = asked()
    assert all_lines[-1].startswith("1 failed, 2 passed")
    (failed,) = failed_ids(all_lines)
    again = asked("--last-failed")
    assert failed_ids(again) == [failed]
    assert "passed" not in again[-1]
    assert asked("--failed-first")[0].startswith("F..")
    assert asked("-k", "three")[-1].startswith("1 failed, 2 deselected")
    assert asked(failed)[-1].startswith("1 failed in")


def test_an_id_without_a_case_runs_all_of_an_implementation_and_others_are_not_collected(
    project: Path, run_pytest: Run
) -> None:
    (project / "test_other.py").write_text("def test_other():\n    pass\n", encoding="utf-8")
    passed = run_pytest(*OPTIONS, "attncheck::kernel.attention").stdout.splitlines()[-1]
    assert passed.startswith("1 failed, 2 passed")
    both = run_pytest(*OPTIONS, "test_other.py", ONE_ID).stdout.splitlines()[-1]
    assert both.startswith("1 failed, 1 passed")


def test_several_processes_have_the_same_ids(project: Path, run_pytest: Run) -> None:
    """Those of the option, and of a test file beside it."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    (project / "test_kernel.py").write_text(TEST, encoding="utf-8")
    lines = run_pytest(*OPTIONS, "-n", "2").stdout.splitlines()
    assert lines[-1].startswith("2 failed, 4 passed")
    failed = failed_ids(lines)
    assert {each.partition("::")[0] for each in failed} == {"attncheck", "test_kernel.py"}
    assert run_pytest(*OPTIONS, "-n", "1", *failed).stdout.splitlines()[-1].startswith("2 failed in")


def test_an_id_that_names_no_test_is_one_line(project: Path, run_pytest: Run) -> None:
    done = run_pytest(*OPTIONS, "attncheck::kernel.attention[gone-float32]")
    assert done.returncode == 4
    assert "not found: attncheck::kernel.attention[gone-float32]; the ids of 3 tests begin with" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_an_id_without_the_option_says_what_is_missing(project: Path, run_pytest: Run) -> None:
    done = run_pytest(ONE_ID)
    assert done.returncode == 4
    assert f"pytest --attncheck FILE.py:function {shlex.quote(ONE_ID)}" in done.stderr
