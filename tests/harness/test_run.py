"""A run as a whole: what is planned, written and judged of what was asked, and what a stranger is told of it first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from here import own_code_here

from attncheck import plan
from attncheck.backends import BACKENDS, BackendEntry
from attncheck.errors import ExitCode, UsageError
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.plan import Plan
from attncheck.reading.selection import select_cases
from attncheck.results.format import EXACT, FORMAT, INPUTS
from attncheck.results.reader import Run
from attncheck.run import RunSummary, Settings, run_cases

pytestmark = pytest.mark.usefixtures("forked_workers")

RunSmall = Callable[..., tuple[RunSummary, Run]]
Entries = tuple[BackendEntry, BackendEntry]

WRONG = "def softmax(scores):\n    stages = numpy_backend.softmax(scores); stages['weights'] *= -1; return stages"


@pytest.mark.usefixtures("workers_here")
def test_two_that_agree_give_0_and_every_comparison_is_a_row(honest: Entries, run_small: RunSmall) -> None:
    summary, run = run_small(honest, dtypes=())
    assert summary.exit_code == ExitCode.AGREE
    assert (summary.cases, summary.evaluations, summary.failures) == (4, 16, ())
    # Two stages per case, dtype: a row for each of two implementations, and one for the pair. Six known numbers.
    counts = run.rows["comparison"].value_counts().to_dict()
    assert counts == {"stage": 4 * 2 * 2 * 2, "pair": 4 * 2 * 2, "known": 6 * 2 * 2}
    assert summary.verdicts == {"agree": len(run.rows)}
    stages = run.rows[run.rows["comparison"] == "stage"]
    assert set(stages["tier"]) == {"within"}
    assert (stages["ratio"] <= 1).all()
    assert run.summary == {
        "format": FORMAT,
        "exit_code": 0,
        "cases": 4,
        "implementations": ["first.eager", "second.eager"],
        "evaluations": 16,
        "judged": {"first.eager": 4, "second.eager": 4},
        "shortfalls": [],
        "verdicts": {"agree": len(run.rows)},
        "failures": 0,
        "faults": 0,
    }


def test_the_environment_says_what_ran_and_how_it_was_asked_for(honest: Entries, run_small: RunSmall) -> None:
    _, run = run_small(honest, label="one of many", command=["attncheck", "run", "two words"])
    environment = run.environment
    assert run.label == "one of many"
    assert environment["command"] == "attncheck run 'two words'"
    assert environment["implementations"] == {"first.eager": "numpy", "second.eager": "numpy"}
    classes = {"float64": "native", "float32": "native", "bfloat16": "eager", "float16": "eager"}
    assert environment["classes"] == {"first.eager": classes, "second.eager": classes}
    assert {"attncheck", "numpy"} <= environment["versions"].keys()
    assert environment["backends"]["first.eager-float64"]["version"] == environment["versions"]["numpy"]
    assert environment["threads_per_worker"] == 1


@pytest.mark.usefixtures("workers_here")
def test_which_arrays_are_kept(make_backend: Callable[..., BackendEntry], honest: Entries, run_small: RunSmall) -> None:
    entries = [honest[0], make_backend("wrong", WRONG), honest[1]]
    _, run = run_small(entries)
    arrays = run.arrays()
    assert {case for case, _, _, _ in arrays} == {"small/small/b-weights", "small/small/d-weights"}
    bound = "bound of class native"
    implementations = {"first.eager", "wrong.eager", "second.eager"}
    assert {name for _, _, name, _ in arrays} == {*implementations, bound, EXACT, INPUTS}
    key = ("small/small/d-weights", "float64")
    assert (arrays[*key, "wrong.eager", "weights"] == -arrays[*key, "first.eager", "weights"]).all()
    assert arrays[*key, INPUTS, "scores"].shape == arrays[*key, EXACT, "weights"].shape
    assert (arrays[*key, bound, "weights"] > 0).all()
    assert (arrays[*key, bound, "weights"] < 1e-14).all()
    _, run = run_small(entries, keep_all_arrays=True)
    counts = Counter(name for _, _, name, _ in run.arrays())
    assert counts == {**dict.fromkeys([*implementations, bound, EXACT], 8), INPUTS: 6}
    _, run = run_small(honest)
    assert run.arrays() == {}


@pytest.mark.usefixtures("workers_here")
def test_progress_counts_every_evaluation_once(case_folder: Path, honest: Entries, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    run_cases(
        select_cases(["small"], base=tmp_path).cases,
        ImplementationSelection(tuple(map(Implementation, honest))),
        Settings(tmp_path / "out"),
        on_progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == [(done, 16) for done in range(17)]


def test_our_own_faults_end_a_run(honest: Entries, run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("in the harness")

    monkeypatch.setattr(plan, "make_exact_inputs", broken)
    with pytest.raises(ZeroDivisionError, match="in the harness"):
        run_small(honest)


def test_every_file_of_a_run_is_whole_and_of_the_same_format(honest: Entries, run_small: RunSmall) -> None:
    _, run = run_small(honest)
    names = {path.relative_to(run.directory).as_posix() for path in run.directory.rglob("*") if path.is_file()}
    assert names == {
        "environment.json",
        "cases.json",
        "summary.json",
        "failed.json",
        "rows/part-00000.parquet",
        "logs/first.eager-float64.txt",
        "logs/second.eager-float64.txt",
    }
    for name in ("environment.json", "cases.json", "summary.json", "failed.json"):
        assert json.loads((run.directory / name).read_text())["format"] == FORMAT


# Cases in dtypes that an implementation does not declare

IN_DOUBLE = """
import numpy as np

def softmax(scores):
    stages = numpy_backend.softmax(scores.astype(np.float64))
    return {name: array.astype(scores.dtype) for name, array in stages.items()}
"""
"""Everything in float64, and rounded at the end."""


@pytest.fixture
def narrow_cases(case_folder: Path) -> Callable[[str], None]:
    """Leave only softmax without known numbers, in these dtypes."""

    def write(dtypes: str) -> None:
        (case_folder / "small.yaml").write_text(
            "title: Small cases\nsource: {kind: derivation, title: Made for the tests}\noperation: softmax\n"
            f"defaults: {{dtypes: [{dtypes}]}}\n"
            "cases:\n  - name: Some weights\n    inputs: {scores: {values: [[0, 1, 2], [3, 1, 0]]}}\n"
        )

    return write


@pytest.fixture
def wide(make_backend: Callable[..., BackendEntry]) -> BackendEntry:
    """Return a backend that declares all four dtypes."""
    return make_backend("wide", IN_DOUBLE)


@pytest.mark.usefixtures("workers_here")
def test_who_declares_no_such_dtype_is_unsupported_and_was_never_asked(
    run_small: RunSmall, narrow_cases: Callable[[str], None], wide: BackendEntry
) -> None:
    narrow_cases("bfloat16, float64")
    summary, run = run_small([BACKENDS["numpy"], wide], dtypes=())
    narrow = run.rows[run.rows["dtype"] == "bfloat16"]
    [refused] = narrow[narrow["implementation"] == "numpy.eager"].itertuples()
    assert (refused.verdict, refused.message) == ("unsupported", "declares no bfloat16")
    stages = narrow[narrow["comparison"] == "stage"]
    assert set(stages[stages["implementation"] == "wide.eager"]["verdict"]) == {"agree"}
    assert set(run.rows[run.rows["dtype"] == "float64"]["verdict"]) == {"agree"}
    # wide in both, numpy in float64 alone
    assert summary.evaluations == 3
    assert set(run.environment["backends"]) == {"numpy.eager-float64", "wide.eager-bfloat16-float64"}
    assert run.environment["classes"]["numpy.eager"]["bfloat16"] is None
    assert run.environment["classes"]["wide.eager"]["bfloat16"] == "eager"


@pytest.mark.usefixtures("workers_here")
def test_a_case_that_nobody_can_run_is_told_and_ends(run_small: RunSmall, narrow_cases: Callable[[str], None]) -> None:
    narrow_cases("bfloat16, float16")
    summary, run = run_small([BACKENDS["numpy"]], dtypes=())
    assert summary.evaluations == 0
    assert sorted(zip(run.rows["dtype"], run.rows["message"], strict=True)) == [
        ("bfloat16", "declares no bfloat16"),
        ("float16", "declares no float16"),
    ]
    assert set(run.rows["verdict"]) == {"unsupported"}
    assert run.summary is not None


# The plan: every case in every dtype that is declared and asked for


def test_every_case_is_planned_in_every_dtype_that_it_declares(case_folder: Path, tmp_path: Path) -> None:
    plan = Plan.of(select_cases(["small"], base=tmp_path).cases, ())
    assert [(plan.case(unit).name, unit.dtype) for unit in plan][:3] == [
        ("A scores", "float64"),
        ("A scores", "float32"),
        ("B weights", "float64"),
    ]
    assert [unit.position for unit in plan] == list(range(len(plan.units)))
    assert plan.dtypes == ("float32", "float64")
    assert Plan.of(plan.cases, ["float32"]).dtypes == ("float32",)
    assert Plan.of([], ["float32"]).units == []


def test_a_dtype_that_no_case_declares_is_refused(case_folder: Path, tmp_path: Path) -> None:
    defaults = "operation: softmax\ndefaults: {dtypes: [float64]}"
    text = (case_folder / "small.yaml").read_text().replace("operation: softmax", defaults, 1)
    (case_folder / "small.yaml").write_text(text)
    cases = select_cases(["small"], base=tmp_path).cases
    with pytest.raises(UsageError, match="no case is declared for float32"):
        Plan.of(cases, ["float32"])


def test_what_is_done_is_left_out_and_the_rest_keeps_its_place(case_folder: Path, tmp_path: Path) -> None:
    plan = Plan.of(select_cases(["small"], base=tmp_path).cases, ())
    first = plan.units[0]
    left = plan.without(frozenset({(plan.case(first).id, first.dtype)}))
    assert left.units == plan.units[1:]


# What was judged: the first line, the exit code and every format say it


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
UNMASKED = MINIMAL.replace("if is_causal:", "if False:")
NOTHING = 'def attention(query, key, value, *, mask=None):\n    raise NotImplementedError("only on a GPU")\n'

ASKED = """\
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
    inputs: {query: {values: [[1, 0]]}, key: {values: [[2, 0], [1, 0]]}, value: {values: [[1, 5], [3, 7]]}}
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
    inputs: {query: {values: [[1, 0], [0, 1]]}, key: {values: [[0, 0], [-1, 0], [3, 4]]}}
    options: {score: cosine}
    expect: [{stage: scores, called: S, printed: "0.5 -1 0.6\\nnan 0.0 0.8"}]
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


KERNEL, SIZE = "kernel.attention", '"head size 2 is not a multiple of 8" 3'


@pytest.mark.parametrize(
    ("kernel", "code", "answer", "judged"),
    [
        (
            MINIMAL,
            0,
            "kernel.attention agrees with the exact answer where judged",
            "3 of 5 cases; 2 unsupported: mask 2",
        ),
        (
            ALIGNED,
            3,
            "Nothing was judged",
            f"0 of 5 cases; 5 unsupported: {SIZE}, mask 2",
        ),
        (NOTHING, 3, "Nothing was judged", '0 of 5 cases; 5 unsupported: "only on a GPU" 3, is_causal 1'),
        (
            UNMASKED,
            1,
            f"{KERNEL} is wrong in 1 of the 3 cases that it was judged in",
            "3 of 5 cases; 2 unsupported: mask 2",
        ),
    ],
    ids=["minimal", "aligned", "nothing", "wrong"],
)
def test_the_first_line_says_what_was_judged(kernel: str, code: int, answer: str, judged: str, told: Told) -> None:
    found, lines = told(kernel, ASKED, "--no-report")
    assert (found, lines[0]) == (code, f"{answer}. Judged {judged}, softcap 1.")
    if code == 0:  # where something is wrong, the report says what else was left out
        assert "bfloat16 not tested on kernel.attention: declare `dtypes`." in lines
        assert told(kernel, ASKED, command="run")[1][0] == lines[0]


def test_too_little_judged_ends_with_3(told: Told, invoke: Invoke) -> None:
    words = "kernel.attention was judged in 3 of 5 cases; at least {} have to be (min_judged)"
    found, lines = told(MINIMAL, ASKED, "--min-judged", "61%", "--no-report")
    assert (found, f"Too little was judged: {words.format('61%')}." in lines) == (3, True)
    assert invoke("report", "out")[0] == 3  # which was asked the same
    for minimum, code in (("4", 3), ("60%", 0)):
        found, out, _ = invoke("report", "out", "--min-judged", minimum)
        assert (found, f"Too little was judged: {words.format(minimum)}." in out) == (code, bool(code))
    quiet = told(MINIMAL, ASKED, "--min-judged", "4", "--quiet", command="run")
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


def test_a_project_says_how_much_is_judged(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
