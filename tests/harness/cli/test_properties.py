"""``attncheck properties`` and ``check --properties``: what is asked, what is shown, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kernels import kernel

from attncheck.errors import ExitCode

pytestmark = pytest.mark.usefixtures("forked_workers")

Invoke = Callable[..., tuple[int, str, str]]
HEAD = """
title: Calls
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 5}, dtypes: [float32]}
arrays: {words: {draw: randn, shape: [3, 2, 7, 4]}}
cases:
"""
ASKED = """
  - name: A batch
    inputs: {query: words, key: words, value: words}
    properties: [repeated, batch_invariant]
"""
USUAL = """
  - name: A usual case
    inputs: {query: words, key: words, value: words}
"""
KERNEL = kernel("output * query.dtype.type(FACTOR)")
ENTRY = """
- implementation: "kernel.*"
  cases: ["calls/*"]
  property: batch_invariant
  verdict: broken
  decided: numeric
  reason: the last entry of a batch of three is known to be wrong
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "calls.yaml").write_text(HEAD + USUAL + ASKED, encoding="utf-8")
    (tmp_path / "kernel.py").write_text(KERNEL.replace("FACTOR", "1"), encoding="utf-8")
    faulty = KERNEL.replace("FACTOR", "1 + (len(query) == 3) / 8")
    (tmp_path / "faulty.py").write_text(faulty, encoding="utf-8")


def test_a_kernel_that_holds_what_is_asked_ends_with_0_and_what_nobody_can_ask_is_refused(
    invoke: Invoke, tmp_path: Path
) -> None:
    asked = ("properties", "kernel.py:attention", "--cases")
    code, out, _ = invoke(*asked, "calls.yaml")
    assert code == ExitCode.AGREE
    assert "Properties hold: 2 properties, 3 comparisons." in out
    (tmp_path / "unfit.yaml").write_text((HEAD + ASKED).replace("batch_invariant", "decoding"), encoding="utf-8")
    for words, message in (
        (("calls.yaml", "--property", "splendour"), "unknown property 'splendour'"),
        (("calls.yaml", "--dtype", "float7"), "unknown dtype 'float7'"),
        (("calls.yaml", "--property", "decoding"), "no case asks for these properties"),
        (("unfit.yaml",), 'unfit.yaml:9: case "A batch": properties: decoding: the case has no is_causal'),
    ):
        code, _, error = invoke(*asked, *words)
        assert code == ExitCode.BAD_INPUT
        assert message in error


def test_a_broken_one_ends_with_1_is_explained_and_may_be_expected(invoke: Invoke, tmp_path: Path) -> None:
    code, out, _ = invoke("properties", "faulty.py:attention", "--cases", "calls.yaml", "--explain")
    assert code == ExitCode.DISAGREE
    assert "faulty.attention  batch_invariant  calls/a-batch  float32: output[" in out
    assert "attncheck properties faulty.py:attention --cases calls/a-batch --property batch_invariant" in out
    assert "each batch entry alone" in out
    assert "the exact answer" in out
    (tmp_path / "expected.yaml").write_text(ENTRY.replace("kernel.*", "faulty.*"), encoding="utf-8")
    words = ("--cases", "calls.yaml", "--expected-failures", "expected.yaml")
    code, out, _ = invoke("properties", "faulty.py:attention", *words)
    assert (code, "broken, expected" in out) == (ExitCode.AGREE, True)


def test_rows_are_written_and_printed_as_json(invoke: Invoke, tmp_path: Path) -> None:
    code, out, _ = invoke(
        *("properties", "faulty.py:attention", "--cases", "calls.yaml", "--json"),
        *("--output", "found", "--junit-xml", "found/junit.xml"),
    )
    assert code == ExitCode.DISAGREE
    rows = json.loads(out)["properties"]
    assert {row["property_name"] for row in rows if row["fails"]} == {"batch_invariant"}
    assert (tmp_path / "found" / "properties.csv").read_text(encoding="utf-8").count("\n") == len(rows) + 1
    assert 'type="broken"' in (tmp_path / "found" / "junit.xml").read_text(encoding="utf-8")


def test_a_plain_check_leaves_cases_with_properties_out(invoke: Invoke) -> None:
    code, out, _ = invoke("check", "calls.yaml", "--implementation", "faulty.py:attention", "--json", "--no-report")
    assert list(json.loads(out)["verdicts"]) == ["calls/a-usual-case"]
    assert code == ExitCode.DISAGREE


def test_a_check_with_properties_counts_them_in_its_exit_code(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.attncheck]\ncases = ["calls.yaml"]\n', encoding="utf-8")
    once = KERNEL.replace("FACTOR", "1 + (len(query) == 1) / 8")  # which no usual case shows
    (tmp_path / "once.py").write_text(once, encoding="utf-8")
    words = ("check", "calls.yaml", "--implementation", "once.py:attention", "--dtype", "float32")
    assert invoke(*words)[0] == ExitCode.AGREE
    assert not (tmp_path / "results" / "latest" / "properties.csv").exists()
    code, out, _ = invoke(*words, "--properties")
    assert code == ExitCode.DISAGREE
    assert "once.attention  batch_invariant  calls/a-batch  float32" in out
    results = tmp_path / "results" / "latest"
    assert json.loads((results / "summary.json").read_text(encoding="utf-8"))["exit_code"] == 1
    assert "## Properties" in (results / "report" / "report.md").read_text(encoding="utf-8")
    assert invoke(*words)[0] == ExitCode.AGREE
    assert not (results / "properties.csv").exists()
