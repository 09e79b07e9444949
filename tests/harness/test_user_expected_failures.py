"""A project's own cases and list of expected failures, which hold on the command line, in pytest and in Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.errors import ExitCode, UsageError
from attncheck.reading.selection import select_cases

Invoke = Callable[..., tuple[int, str, str]]
CASES = """\
title: Two small cases
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {dtypes: [float64]}
cases:
  - name: A plain one
    inputs: {query: {identity: 2}, key: {constant: 1, shape: [3, 2]}, value: {values: [[1], [2], [6]]}}
  - name: A single key
    inputs: {query: {identity: 2}, key: {values: [[1, 1]]}, value: {values: [[3]]}}
"""
KERNEL = """
import numpy as np

def attention(query, key, value):
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(query.shape[-1] ** -0.5, query.dtype)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output = weights / weights.sum(-1, keepdims=True) @ value
    return output + 1 if key.shape[-2] > 1 else output
"""
KNOWN = """\
- implementation: my_kernel.attention
  cases: ["conformance/own/a-plain-one"]
  verdict: numeric
  reason: it adds one to everything but single keys
  decided: numeric
"""
PROJECT = '[tool.attncheck]\ncases = ["conformance/"]\nexpected_failures = ["conformance/known.yaml"]\n'
IN_PYTHON = """
from attncheck import check
from my_kernel import attention
result = check(attention, cases=["conformance"])
print(result.agrees, *set(result.frames.results["implementation"]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The example of the README: cases and their list of expected failures in one folder."""
    (tmp_path / "conformance").mkdir()
    files = {"pyproject.toml": PROJECT, "my_kernel.py": KERNEL, "conformance/own.yaml": CASES}
    for name, text in {**files, "conformance/known.yaml": KNOWN}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def python(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=project, check=False)


def pytest_in(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(project, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments)


def write_test(project: Path) -> None:
    text = "from attncheck.pytest_plugin import conformance\nfrom my_kernel import attention\n"
    (project / "test_kernel.py").write_text(f"{text}test_it = conformance(attention, cases=['conformance'])\n")


def test_the_list_is_no_case_file_and_what_it_names_fails_nothing(project: Path, invoke: Invoke) -> None:
    code, out, said = invoke("check", "conformance", "--implementation", "my_kernel.py:attention")
    assert code == ExitCode.AGREE, out + said
    assert "2 cases" in out
    assert "xfail numeric" in out
    assert "known.yaml" not in said


def test_it_holds_for_a_function_that_is_handed_over(project: Path) -> None:
    done = python(project, "-c", IN_PYTHON)
    assert done.stdout == "True my_kernel.attention\n", done.stderr


def test_it_holds_in_pytest_by_the_option_and_by_one_line(project: Path) -> None:
    done = pytest_in(project, "--attncheck", "my_kernel.py:attention", "--attncheck-cases", "conformance")
    assert "1 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
    write_test(project)
    done = pytest_in(project, "-rx")
    assert "1 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
    assert "it adds one to everything but single keys" in done.stdout


@pytest.mark.parametrize("text", ["- {implementation: x}\n", "implementation: x\n", "- ]\n"])
def test_a_list_that_is_broken_is_one_usage_error_everywhere(project: Path, invoke: Invoke, text: str) -> None:
    (project / "conformance" / "known.yaml").write_text(text, encoding="utf-8")
    code, out, said = invoke("check", "conformance", "--implementation", "my_kernel.py:attention")
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    assert said.count("attncheck: ") == 1
    assert "known.yaml:1: " in said
    done = pytest_in(project, "--attncheck", "my_kernel.py:attention", "--attncheck-cases", "conformance")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: attncheck: ")
    write_test(project)
    done = pytest_in(project)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "1 error in" in done.stdout
    assert done.stdout.count("attncheck: ") == 1
    assert "known.yaml:1: " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "pytest_plugin.py" not in done.stdout


def test_without_cases_the_project_s_own_run_besides_the_bundled_ones(project: Path) -> None:
    write_test(project)
    text = (project / "test_kernel.py").read_text().replace("cases=['conformance']", "tags=['my-tag']")
    (project / "test_kernel.py").write_text(text)
    (project / "conformance" / "tags.yaml").write_text("tags: {my-tag: {probes: nothing, defect: none is known}}\n")
    (project / "conformance" / "own.yaml").write_text(CASES.replace("defaults: {", "defaults: {tags: [my-tag], "))
    done = pytest_in(project)
    assert "1 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr


def test_a_list_of_the_command_line_is_no_case_file_either(project: Path, invoke: Invoke) -> None:
    (project / "pyproject.toml").unlink()
    command = ("check", "conformance", "--implementation", "my_kernel.py:attention")
    assert invoke(*command, "--expected-failures", "conformance/known.yaml")[0] == ExitCode.AGREE
    code, _, said = invoke(*command)
    assert code == ExitCode.BAD_INPUT
    assert "conformance/known.yaml:1: expected a mapping of fields, got what looks like a list of expected fail" in said
    assert "name such a list in pyproject.toml (tool.attncheck.expected_failures) or with --expected-failures" in said


def test_lists_are_left_out_wherever_cases_are_looked_for(project: Path) -> None:
    lists = [project / "conformance" / "known.yaml"]
    for patterns in (["conformance"], ["conformance/own.yaml", "conformance/known.yaml"], ["."]):
        found = select_cases(patterns, base=project, expected_failures=lists)
        assert len(found.cases) == 2
        assert not found.faults
    with pytest.raises(UsageError, match="is a list of expected failures; expected a case file"):
        select_cases(["conformance/known.yaml"], base=project, expected_failures=lists)
    assert select_cases(["conformance"], base=project).faults
