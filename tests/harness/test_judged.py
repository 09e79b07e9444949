"""What a stranger is told first: kernels that can do little, and documents whose numbers do not hold or cannot be held.

Each is run as they would run it; the first line, the exit code and every format say what was judged of what was asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from here import own_code_here

Told = Callable[..., tuple[int, list[str]]]

Invoke = Callable[..., tuple[int, str, str]]

MINIMAL = """\
import numpy as np


def attention(query, key, value, *, is_causal=False, scale=None):
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(each, group, axis=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(scale, query.dtype)
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ value
"""
ALIGNED = MINIMAL.replace(
    "    group =",
    "    if query.shape[-1] % 8:\n"
    '        raise NotImplementedError(f"head size {query.shape[-1]} is not a multiple of 8")\n'
    "    group =",
)
WRONG = MINIMAL.replace("if is_causal:", "if False:")
NOTHING = 'def attention(query, key, value, *, mask=None):\n    raise NotImplementedError("only on a GPU")\n'

CASES = """\
title: Cases that ask for little and for more
source: {kind: derivation, title: Made for the tests}
operation: attention
cases:
  - name: Plain
    inputs: &inputs
      query: {values: [[1, 0], [0, 1]]}
      key: {values: [[2, 0], [0, 1]]}
      value: {values: [[1, 5], [3, 7]]}
  - name: Causal
    inputs: *inputs
    options: {is_causal: true}
  - name: Masked
    inputs: &masked
      query: {values: [[1, 0], [0, 1]]}
      key: {values: [[2, 0], [0, 1]]}
      value: {values: [[1, 5], [3, 7]]}
      mask: {values: [[true, false], [true, true]]}
  - name: Masked and capped
    inputs: *masked
    options: {softcap: 2.0}
  - name: In sixteen bits
    inputs: *inputs
    dtypes: [float64, bfloat16]
"""
MISPRINT = """\
title: A document with a misprint
source: {kind: document, title: A document with a misprint}
operation: attention
cases:
  - name: Two keys of which one is twice as long
    inputs:
      query: {values: [[1, 0]]}
      key: {values: [[2, 0], [1, 0]]}
      value: {values: [[1, 5], [3, 7]]}
    options: {scale: 1.0}
    expect:
      - {stage: weights, called: A, printed: "0.7311 0.2698"}
      - {stage: output, called: Z, printed: "1.5379 5.5379"}
"""
NO_ANSWER = """\
title: A document with a cosine of nothing
source: {kind: document, title: A document with a cosine of nothing}
operation: scoring
cases:
  - name: A cosine of a vector of length zero
    inputs:
      query: {values: [[1, 0], [0, 1]]}
      key: {values: [[0, 0], [-1, 0], [3, 4]]}
    options: {score: cosine}
    expect:
      - {stage: scores, called: S, printed: "0.5 -1 0.6\\nnan 0.0 0.8"}
"""


@pytest.fixture
def told(invoke: Invoke, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run a kernel over cases, each given as text; return the exit code and the lines that are printed."""

    def run(kernel: str, cases: str, *options: str, command: str = "check") -> tuple[int, list[str]]:
        (tmp_path / "kernel.py").write_text(kernel, encoding="utf-8")
        (tmp_path / "own.yaml").write_text(cases, encoding="utf-8")
        named = ("--implementation", "kernel.py:attention") if kernel else ("--backend", "numpy")
        with own_code_here():
            code, out, err = invoke(command, "own.yaml", *named, *options, "-o", "out")
        assert err == ""
        return code, out.splitlines()

    return run


LEAST = "kernel.attention agrees with the exact answer where judged. Judged 3 of 5 cases; 2 unsupported: "


@pytest.mark.parametrize(
    ("kernel", "code", "first"),
    [
        (MINIMAL, 0, f"{LEAST}mask 2, softcap 1."),
        (
            ALIGNED,
            3,
            "Nothing was judged. Judged 0 of 5 cases; 5 unsupported: "
            '"head size 2 is not a multiple of 8" 3, mask 2, softcap 1.',
        ),
        (
            NOTHING,
            3,
            'Nothing was judged. Judged 0 of 5 cases; 5 unsupported: "only on a GPU" 2, is_causal 1, softcap 1.',
        ),
        (
            WRONG,
            1,
            "kernel.attention is wrong in 1 of the 3 cases that it was judged in. Judged 3 of 5 cases; 2 unsupported: "
            "mask 2, softcap 1.",
        ),
    ],
    ids=["minimal", "aligned", "nothing", "wrong"],
)
def test_the_first_line_of_every_format_says_what_was_judged(
    kernel: str, code: int, first: str, told: Told, invoke: Invoke
) -> None:
    if kernel == NOTHING:
        first = first.replace('"only on a GPU" 2', '"only on a GPU" 3')
    if kernel in (ALIGNED, NOTHING):
        found, lines = told(kernel, CASES, "--no-report")
        assert (found, lines[0]) == (code, first)
        return
    found, lines = told(kernel, CASES, "--ci-summary", "summary.md")
    assert (found, lines[0]) == (code, first)
    if code == 0:  # where something is wrong, the report says what else was left out
        assert "bfloat16 not tested on kernel.attention: declare `dtypes`." in lines
    assert "Partial run: only the cases own.yaml." in lines
    report = Path("out/report")
    plain = report.joinpath("report.md").read_text().replace("\\", "")
    assert f"**{first}**" in plain
    assert f"### attncheck: {first}" in Path("summary.md").read_text().replace("\\", "")
    page = report.joinpath("report.html").read_text().replace("&#34;", '"')
    judged = first[first.index("Judged ") :]
    assert f'<span class="judged">{judged}</span></span></h1>' in page
    suites = ElementTree.parse(report / "junit.xml").getroot()
    assert suites.attrib["name"] == f"attncheck: {first}"
    record = json.loads(invoke("report", "out", "--json")[1])
    assert f"{record['answer']}. {record['judged']}." == first
    assert record["exit_code"] == code
    if kernel == MINIMAL:  # And `run`, which writes no report, says it too.
        assert told(kernel, CASES, command="run")[1][0] == first


def test_too_little_judged_ends_with_3(told: Told, invoke: Invoke) -> None:
    words = "kernel.attention was judged in 3 of 5 cases; at least {} have to be (min_judged)"
    found, lines = told(MINIMAL, CASES, "--min-judged", "61%", "--no-report")
    assert (found, f"Too little was judged: {words.format('61%')}." in lines) == (3, True)
    assert invoke("report", "out")[0] == 3  # which was asked the same
    for minimum, code in (("4", 3), ("60%", 0)):
        found, out, _ = invoke("report", "out", "--min-judged", minimum)
        assert (found, f"Too little was judged: {words.format(minimum)}." in out) == (code, bool(code))
    quiet = told(MINIMAL, CASES, "--min-judged", "4", "--quiet", command="run")
    assert quiet == (3, [f"too little was judged: {words.format('4')}"])


def test_what_is_no_minimum_is_told_before_anything_runs(invoke: Invoke) -> None:
    code, out, err = invoke("check", "softmax", "-b", "numpy", "--min-judged", "most")
    assert (code, out) == (2, "")
    assert err.startswith("attncheck: --min-judged: expected a number of cases, such as 20, or a share, such as 80%;")


def test_a_misprint_is_told_once_and_a_number_without_an_exact_answer_is_unverified(told: Told) -> None:
    code, lines = told("", MISPRINT, "--no-report")
    first = "numpy agrees with the exact answer. 1 of 4 printed numbers does not hold. Judged 1 of 1 case."
    assert (code, lines[0]) == (1, first)
    (line,) = [line for line in lines if line.startswith("misprint: ")]
    assert line.endswith(": A[1] is printed as 0.2698, should be 0.2689")
    assert "Of 4 printed numbers 3 hold and 1 does not hold." in lines
    code, lines = told("", NO_ANSWER)
    first = "numpy agrees with the exact answer. 1 of 6 printed numbers is unverified. Judged 1 of 1 case."
    assert (code, lines[0]) == (0, first)
    assert "Of 6 printed numbers 5 hold and 1 is unverified: there is no exact answer to compare with." in lines
    report = Path("out/report")
    page = report.joinpath("report.html").read_text()
    assert 'class="answer agree"' not in page
    assert " unverified</span></h5>" in page
    assert "✓</span> holds</span></h5>" not in page
    assert "unverified" in report.joinpath("report.md").read_text().partition("## Documents at a glance")[2]


def test_a_project_says_how_much_has_to_be_judged_where_nothing_is_picked(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attncheck.config import minimum_of
    from attncheck.options import RunOptions, read_options

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.attncheck]\nmin_judged = "80%"\n')
    assert str(minimum_of(RunOptions(), complete=True)) == "80%"
    assert minimum_of(RunOptions(), complete=False) is None
    assert str(minimum_of(read_options({"min_judged": "5"}), complete=False)) == "5"
    (tmp_path / "pyproject.toml").write_text("[tool.attncheck]\nmin_judged = true\n")
    code, _, err = invoke("check", "-b", "numpy")
    assert code == 2
    assert "pyproject.toml: tool.attncheck.min_judged: expected a number of cases" in err
