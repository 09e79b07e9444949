"""Conventions and expected failures: what fails a run and what does not, and what reports and own lists say of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from here import own_code_here
from kernels import kernel

from attncheck import explain
from attncheck.api import check
from attncheck.backends import BackendEntry, DeclaredConvention, Mode
from attncheck.errors import ExitCode, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.explain import explain_case
from attncheck.merge import merge_runs
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.selection import select_cases
from attncheck.reports.build_frames import make_frames
from attncheck.reports.explanation import explanation_text
from attncheck.reports.frames import Frames
from attncheck.reports.markdown import render_markdown
from attncheck.reports.summary import make_summary, verdict_table
from attncheck.results.reader import Run
from attncheck.run import RunSummary

MakeBackend = Callable[..., BackendEntry]

CASES = """\
title: Causality and empty rows
source: {kind: derivation, title: Made for the tests}
operation: attention
arrays:
  keys: {draw: randn, shape: [5, 4]}
defaults:
  random: {generator: numpy-legacy, seed: 3}
cases:
  - name: Causal
    inputs: {query: {draw: randn, shape: [3, 4]}, key: keys, value: keys}
    options: {is_causal: true}
  - name: Empty
    inputs:
      query: {draw: randn, shape: [2, 4]}
      key: keys
      value: keys
      mask: {values: [[true, true, false, true, true], [false, false, false, false, false]]}
  - name: Plain
    inputs: {query: {draw: randn, shape: [3, 4]}, key: keys, value: keys}
"""

LOWER_RIGHT = """
import numpy as np
def attention(query, key, value, *, mask=None, is_causal=False):
    if is_causal:
        mask = np.tri(query.shape[-2], key.shape[-2], key.shape[-2] - query.shape[-2], dtype=bool)[None, None]
    return {"output": numpy_backend.attention(query, key, value, mask=mask)["output"]}
"""

UNIFORM = """
import numpy as np
def attention(query, key, value, *, mask=None, is_causal=False):
    stages = numpy_backend.attention(query, key, value, mask=mask, is_causal=is_causal)
    empty = stages["log_sum_exp"][..., None] == -np.inf
    weights = np.where(empty, 1 / key.shape[-2], stages["weights"]).astype(query.dtype)
    return {"weights": weights, "output": weights @ value}
"""

ENTRY = """\
- implementation: lower.*
  cases: [small/small/causal]
  verdict: semantic
  reason: causality is counted from the last key, by design
  decided: semantic
  thread: example/attention#7
"""

RunBelow = Callable[..., tuple[RunSummary, Run]]


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "small.yaml").write_text(CASES, encoding="utf-8")
    return folder


@pytest.fixture
def run_below(workers_here: None, run_below: RunBelow) -> RunBelow:
    """Run cases below a folder, without workers."""
    return run_below


def known(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "known.yaml"
    path.write_text(text, encoding="utf-8")
    return load_expected_failures([path])


def frames_of(run: Run) -> Frames:
    return make_frames(merge_runs([run]))


def bad(frame: pd.DataFrame) -> list[tuple[str, str, str, bool]]:
    rows = frame[~frame["verdict"].isin(["agree", "unverified", "unsupported"])]
    return [(row["case"], row["stage"], row["verdict"], bool(row["xfail"])) for row in rows.to_dict("records")]


@pytest.fixture
def lower(make_backend: MakeBackend) -> BackendEntry:
    return make_backend("lower", LOWER_RIGHT)


@pytest.fixture
def right(honest: tuple[BackendEntry, BackendEntry]) -> BackendEntry:
    return honest[0]


@pytest.mark.usefixtures("cases")
def test_a_known_failure_is_told(tmp_path: Path, run_below: RunBelow, lower: BackendEntry, right: BackendEntry) -> None:
    summary, run = run_below(tmp_path, [right, lower], expected_failures=known(tmp_path, ENTRY))
    frames = frames_of(run)
    assert (summary.exit_code, summary.failures) == (ExitCode.AGREE, ())
    assert bad(frames.results) == [("small/small/causal", "output", "semantic", True)]
    assert bad(frames.pairs) == [("small/small/causal", "output", "numeric", True)]
    answer = make_summary(frames)
    assert answer.word == "first and lower agree, except for expected failures in 1 case"
    assert answer.sentences[1].endswith("all are within their error bounds, except for 1 expected failure.")
    assert answer.sentences[2].endswith("none disagrees, except for 1 expected failure.")
    assert answer.sentences[-1] == ("1 evaluation of 1 implementation fails as expected (xfail), which fails no run.")
    section = render_markdown(frames).partition("## Expected failures")[2].partition("## Verdicts")[0]
    assert "causality is counted from the last key, by design" in section
    assert "[example/attention\\#7](https://github.com/example/attention/issues/7)" in section
    assert "| lower.eager | semantic | `small/small/causal` | float64 | `masked` |" in section
    assert "In 1 comparison with other implementations or numbers" in section
    cells = {case: list(cells.values()) for case, cells in verdict_table(frames).items()}
    assert cells["small/small/causal"] == ["agree", "other convention"]
    assert cells["small/small/plain"] == ["agree", "agree"]


@pytest.mark.usefixtures("cases")
def test_a_stale_entry_fails_a_complete_run(tmp_path: Path, run_below: RunBelow, right: BackendEntry) -> None:
    entry = ENTRY.replace("lower.*", "first.eager")
    summary, run = run_below(tmp_path, [right], expected_failures=known(tmp_path, entry))
    assert summary.exit_code is ExitCode.AGREE, "it need not show in some of the cases alone"
    assert "## Queries without a key" not in render_markdown(frames_of(run)), "where all give the same"
    summary, run = run_below(tmp_path, [right], expected_failures=known(tmp_path, entry), complete=True)
    assert summary.exit_code is ExitCode.DISAGREE
    assert summary.verdicts["xpass"] == 1
    (failure,) = summary.failures
    assert f"{tmp_path / 'known.yaml'}:1: this expected failure no longer happens" in failure.message
    assert bad(frames_of(run).results) == [("small/small/causal", "", "xpass", False)]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[[BackendEntry], None]:
    """Let a backend declare that a query without a key gives the mean of all values."""

    def declared(entry: BackendEntry) -> None:
        conventions = {"empty_rows": DeclaredConvention("uniform", "for tests", "")}
        mode = Mode("eager", entry.module, "for tests", conventions=conventions)
        of_others = property(lambda each: mode if each.entry is entry else each.entry.all_modes[each.mode])
        monkeypatch.setattr(Implementation, "declared", of_others)

    return declared


@pytest.mark.usefixtures("cases")
@pytest.mark.parametrize("declares", [True, False])
def test_a_declared_convention_fails_no_run(
    tmp_path: Path,
    run_below: RunBelow,
    make_backend: MakeBackend,
    right: BackendEntry,
    declare: Callable[[BackendEntry], None],
    declares: bool,
) -> None:
    entry = make_backend("uniform", UNIFORM)
    if declares:
        declare(entry)
    summary, run = run_below(tmp_path, [right, entry], expected_failures=())
    assert summary.exit_code is (ExitCode.AGREE if declares else ExitCode.DISAGREE)
    frames = frames_of(run)
    assert bad(frames.results) == [
        ("small/small/empty", stage, "semantic", declares) for stage in ("weights", "output")
    ]
    assert {row[3] for row in bad(frames.pairs)} == {declares}
    messages = set(frames.results[frames.results["verdict"] == "semantic"]["message"])
    says = "a query without a key gives the mean of all values (uniform); the case expects zero"
    assert messages == {f"{says} (declared)" if declares else says}


NUMBERS = """\
title: Empty rows with numbers
source: {kind: derivation, title: Made for the tests}
operation: attention
cases:
  - name: Empty
    inputs:
      query: {values: [[1, 2], [3, 4]]}
      key: {values: [[1, 0], [0, 1]]}
      value: {values: [[1, 8], [3, 4]]}
      mask: {values: [[true, false], [false, false]]}
    expect:
      - {stage: output, exact: true, because: one key and no key, known: "1 8\\n0 0"}
"""

PRINTED = """\
title: A tutorial that fills masked scores with -1e9
source: {kind: document, title: Made for the tests}
operation: attention
cases:
  - name: Empty
    options: {empty_rows: CONVENTION}
    allow_nonfinite: true
    inputs:
      query: {values: [[1, 2], [3, 4]]}
      key: {values: [[1, 0], [0, 1], [1, 1]]}
      value: {values: [[1, 8], [3, 4], [4, 1]]}
      mask: {values: [[true, false, false], [false, false, false]]}
    expect:
      - {stage: weights, printed: WEIGHTS}
      - {stage: output, printed: OUTPUT}
"""

DOCUMENTS = {
    "uniform": ('"1. 0. 0.\\n0.3333 0.3333 0.3333"', '"1. 8.\\n2.6667 4.3333"'),
    "nan": ('"1. 0. 0.\\nnan nan nan"', '"1. 8.\\nnan nan"'),
    "zero": ('"1. 0. 0.\\n0. 0. 0."', '"1. 8.\\n0. 0."'),
}


def printed(folder: Path, convention: str) -> None:
    weights, output = DOCUMENTS[convention]
    text = PRINTED.replace("CONVENTION", convention).replace("WEIGHTS", weights).replace("OUTPUT", output)
    (folder / "small.yaml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("convention", DOCUMENTS)
def test_a_document_may_print_any_convention_and_who_has_no_keyword_for_it_fails_where_zeros_are_meant_alone(
    tmp_path: Path, run_below: RunBelow, make_backend: MakeBackend, right: BackendEntry, cases: Path, convention: str
) -> None:
    printed(cases, convention)
    summary, run = run_below(tmp_path, [right, make_backend("uniform", UNIFORM)], expected_failures=())
    frames = frames_of(run)
    is_known = convention != "zero"
    assert summary.exit_code is (ExitCode.AGREE if is_known else ExitCode.DISAGREE)
    who_takes_it = frames.numbers[frames.numbers["implementation"] == "first.eager"]
    assert (len(who_takes_it), set(who_takes_it["verdict"]), set(who_takes_it["xfail"])) == (10, {"agree"}, {False})
    if convention == "uniform":
        assert bad(frames.results) + bad(frames.pairs) + bad(frames.numbers) == []
        return
    assert bad(frames.results) == [("small/small/empty", each, "semantic", is_known) for each in ("weights", "output")]
    told = frames.results[frames.results["verdict"] == "semantic"]
    assert set(told["empty_rows"]) == {"uniform"}
    says = f"a query without a key gives the mean of all values (uniform); the case expects {convention}"
    assert all(message.startswith(says) for message in told["message"])
    assert {row[2:] for row in bad(frames.numbers)} == {("semantic", is_known)}
    assert {row[3] for row in bad(frames.pairs)} == {is_known}


WRONG = UNIFORM.replace("weights @ value}", "weights @ value * (1 + 1e-6)}")


def test_other_errors_still_fail(tmp_path: Path, run_below: RunBelow, make_backend: MakeBackend, cases: Path) -> None:
    printed(cases, "nan")
    (case,) = select_cases([str(cases)], base=tmp_path).cases
    for name, code, says in (
        ("uniform", UNIFORM, "It means something else at weights"),
        ("wrong", WRONG, "It goes wrong at"),
    ):
        entry = make_backend(name, code)
        text = explanation_text(explain_case(case, Implementation(entry), "float64", Limits()), {})
        assert says in text
        assert "the case expects nan, for which it has no keyword empty_rows" in text
    summary, run = run_below(tmp_path, [entry], expected_failures=())
    assert summary.exit_code is ExitCode.DISAGREE
    failing = [row for row in bad(frames_of(run).results) if not row[3]]
    assert failing == [("small/small/empty", "output", "numeric", False)]


def test_one_convention_alone(tmp_path: Path, run_below: RunBelow, make_backend: MakeBackend, cases: Path) -> None:
    printed(cases, "zero")
    entry = ENTRY.replace("lower.*", "uniform.*").replace("[small/small/causal]", '["*"]')
    for recorded, code in (("uniform", ExitCode.AGREE), ("nan", ExitCode.DISAGREE)):
        expected_failures = known(tmp_path, entry.replace("  reason", f"  empty_rows: {recorded}\n  reason"))
        summary, run = run_below(
            tmp_path, [make_backend("uniform", UNIFORM)], expected_failures=expected_failures, complete=True
        )
        assert summary.exit_code is code
        told = frames_of(run).results
        semantic = told[told["verdict"] == "semantic"]
        assert set(semantic["xfail"]) == {recorded == "uniform"}
        assert ("xpass" in set(told["verdict"])) is (recorded == "nan")


def test_the_report_says_what_each_gives_for_a_query_without_a_key(
    tmp_path: Path,
    run_below: RunBelow,
    make_backend: MakeBackend,
    right: BackendEntry,
    cases: Path,
    declare: Callable[[BackendEntry], None],
) -> None:
    (cases / "numbers.yaml").write_text(NUMBERS, encoding="utf-8")
    declare(entry := make_backend("uniform", UNIFORM))
    summary, run = run_below(tmp_path, [right, entry], expected_failures=())
    assert summary.exit_code is ExitCode.AGREE
    frames = frames_of(run)
    section = render_markdown(frames).partition("## Queries without a key")[2].partition("## Verdicts")[0]
    assert "| implementation | zero | the mean of all values (uniform) |" in section
    counts = {line.split()[1]: line.split("|")[2:4] for line in section.splitlines() if "eager" in line}
    assert counts == {"first.eager": [" 2 ", " - "], "uniform.eager": [" - ", " 2 "]}
    # The numbers of the document do not hold either, but that follows from the convention.
    cells = {case: list(cells.values()) for case, cells in verdict_table(frames).items()}
    assert cells["small/numbers/empty"] == ["agree", "other convention"]


ROUNDED = """
import numpy as np
def attention(query, key, value):
    return {"output": numpy_backend.attention(query, key, value)["output"].astype(np.float32).astype(np.float64)}
"""

ROUNDS = """\
- implementation: rounded.*
  cases: ["*"]
  verdict: numeric
  max_ratio: {max_ratio}
  reason: the output is rounded to float32
  decided: numeric
"""


@pytest.mark.parametrize(("max_ratio", "is_known"), [("5.4e+8", True), ("10", False)])
def test_a_larger_error_than_a_list_excuses_fails_a_run_and_explaining_says_so(
    cases: Path,
    tmp_path: Path,
    run_below: RunBelow,
    make_backend: MakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    max_ratio: str,
    is_known: bool,
) -> None:
    entry, expected_failures = make_backend("rounded", ROUNDED), known(tmp_path, ROUNDS.format(max_ratio=max_ratio))
    summary, _ = run_below(tmp_path, [entry], expected_failures=expected_failures)
    assert summary.exit_code is (ExitCode.AGREE if is_known else ExitCode.DISAGREE)
    where = expected_failures[0].location
    says = f"an expected failure ({where}) allows errors up to {float(max_ratio):g} times their bound"
    assert [says in row.message for row in summary.failures] == ([] if is_known else [True])
    monkeypatch.setattr(explain, "expected_failures_of", lambda backends: expected_failures)
    (case,) = [case for case in select_cases([str(cases)], base=tmp_path).cases if case.name == "Plain"]
    found = explain_case(case, Implementation(entry), "float64", Limits())
    assert found.begins_at == "output"
    assert dict(found.expected_failures) == ({"output": "the output is rounded to float32"} if is_known else {})
    text = explanation_text(found, {})
    assert (says in text, "Expected failure: the output is rounded" in text) == (not is_known, is_known)


Invoke = Callable[..., tuple[int, str, str]]

TWO_CASES = """\
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

KERNEL = kernel("output + 1 if key.shape[-2] > 1 else output")

KNOWN = """\
- implementation: my_kernel.attention
  cases: ["conformance/own/a-plain-one"]
  verdict: numeric
  reason: it adds one to everything but single keys
  decided: numeric
"""

PROJECT = '[tool.attncheck]\ncases = ["conformance/"]\nexpected_failures = ["conformance/known.yaml"]\n'

QUIETLY = ("-p", "no:cacheprovider")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """The example of the README: cases and their list of expected failures in one folder. The kernel runs here."""
    (tmp_path / "conformance").mkdir()
    files = {"pyproject.toml": PROJECT, "my_kernel.py": KERNEL, "conformance/own.yaml": TWO_CASES}
    for name, text in {**files, "conformance/known.yaml": KNOWN}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with own_code_here():
        yield tmp_path


def write_test(project: Path) -> None:
    text = "from attncheck.pytest_plugin import conformance\nfrom my_kernel import attention\n"
    (project / "test_kernel.py").write_text(f"{text}test_it = conformance(attention, cases=['conformance'])\n")


def test_what_a_list_names_fails_nothing(project: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, said = invoke("check", "conformance", "--implementation", "my_kernel.py:attention")
    assert code == ExitCode.AGREE, out + said
    assert "2 cases" in out
    assert re.search(r"my_kernel\.attention +\d+ +\d+ numeric +-", out), out
    assert "known.yaml" not in said
    monkeypatch.chdir(project)
    result = check("my_kernel.py:attention", cases=["conformance"])
    assert result.agrees
    assert set(result.frames.results["implementation"]) == {"my_kernel.attention"}


def test_it_holds_in_pytest_by_the_option_and_by_one_line(project: Path, run_pytest: Run) -> None:
    done = run_pytest(*QUIETLY, "--attncheck", "my_kernel.py:attention", "--attncheck-cases", "conformance")
    assert "1 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
    write_test(project)
    done = run_pytest(*QUIETLY, "-rx")
    assert "1 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
    assert "it adds one to everything but single keys" in done.stdout


def test_a_list_that_is_broken_is_one_usage_error_everywhere(project: Path, invoke: Invoke, run_pytest: Run) -> None:
    (project / "conformance" / "known.yaml").write_text("- {implementation: x}\n", encoding="utf-8")
    code, out, said = invoke("check", "conformance", "--implementation", "my_kernel.py:attention")
    assert (code, out, said.count("attncheck: "), "known.yaml:1: " in said) == (ExitCode.BAD_INPUT, "", 1, True)
    done = run_pytest(*QUIETLY, "--attncheck", "my_kernel.py:attention", "--attncheck-cases", "conformance")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: attncheck: ")
    write_test(project)
    done = run_pytest(*QUIETLY)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert (done.stdout.count("attncheck: "), "Traceback" in done.stdout + done.stderr) == (1, False)


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
