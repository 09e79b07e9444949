"""A run as a whole: what is planned, written and judged of what was asked, and the standard cases alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tables import tables_beside

from attncheck import plan
from attncheck.backends import BACKENDS, BackendEntry, Mode
from attncheck.config import minimum_of
from attncheck.errors import ExitCode
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.options import RunOptions, read_options
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.selection import select_cases
from attncheck.results.format import EXACT, FORMAT, INPUTS
from attncheck.results.reader import Run, read_run
from attncheck.run import RunSummary, Settings, run_cases

pytestmark = pytest.mark.usefixtures("forked_workers")

RunSmall = Callable[..., tuple[RunSummary, Run]]
Entries = tuple[BackendEntry, BackendEntry]
TEXTS = tables_beside(__file__)["run"]

WRONG = "def softmax(scores):\n    stages = numpy_backend.softmax(scores); stages['weights'] *= -1; return stages"


@pytest.mark.usefixtures("workers_here")
def test_two_that_agree_give_0_and_every_comparison_is_a_row(honest: Entries, run_small: RunSmall) -> None:
    summary, run = run_small(honest, dtypes=(), label="one of many", command=["attncheck", "run", "two words"])
    assert summary.exit_code == ExitCode.AGREE
    assert (summary.cases, summary.evaluations, summary.failures) == (4, 16, ())
    # Two stages per case, dtype: a row for each of two implementations, and one for the pair. Six known numbers.
    counts = run.rows["comparison"].value_counts().to_dict()
    assert counts == {"stage": 4 * 2 * 2 * 2, "pair": 4 * 2 * 2, "known": 6 * 2 * 2}
    assert summary.verdicts == {"agree": len(run.rows)}
    stages = run.rows[run.rows["comparison"] == "stage"]
    assert set(stages["tier"]) == {"within"}
    assert (stages["ratio"] <= 1).all()
    assert run.summary == {**TEXTS["summary"], "format": FORMAT, "verdicts": {"agree": len(run.rows)}}
    assert run.arrays() == {}
    environment = run.environment
    assert (run.label, environment["command"]) == ("one of many", "attncheck run 'two words'")
    assert environment["implementations"] == {"first.eager": "numpy", "second.eager": "numpy"}
    classes = {"float64": "native", "float32": "native", "bfloat16": "eager", "float16": "eager"}
    assert environment["classes"] == {"first.eager": classes, "second.eager": classes}
    assert {"attncheck", "numpy"} <= environment["versions"].keys()
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


def test_our_own_faults_end_a_run(honest: Entries, run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("in the harness")

    monkeypatch.setattr(plan, "make_exact_inputs", broken)
    with pytest.raises(ZeroDivisionError, match="in the harness"):
        run_small(honest)


def test_every_file_of_a_run_is_whole_and_of_the_same_format(honest: Entries, run_small: RunSmall) -> None:
    _, run = run_small(honest)
    documents = {"environment.json", "cases.json", "summary.json", "failed.json"}
    names = {path.relative_to(run.directory).as_posix() for path in run.directory.rglob("*") if path.is_file()}
    logs = {"logs/first.eager-float64.txt", "logs/second.eager-float64.txt"}
    assert names == {*documents, *logs, "rows/part-00000.parquet"}
    for name in documents:
        assert json.loads((run.directory / name).read_text())["format"] == FORMAT
    assert run.environment["backends"]["first.eager-float64"]["version"] == run.environment["versions"]["numpy"]


# Cases in dtypes that an implementation does not declare


@pytest.mark.usefixtures("workers_here")
def test_who_declares_no_such_dtype_is_unsupported_and_was_never_asked(
    run_small: RunSmall, case_folder: Path, make_backend: Callable[..., BackendEntry]
) -> None:
    def write(dtypes: str) -> None:
        (case_folder / "small.yaml").write_text(
            "title: Small cases\nsource: {kind: derivation, title: Made for the tests}\noperation: softmax\n"
            f"defaults: {{dtypes: [{dtypes}]}}\n"
            "cases:\n  - name: Some weights\n    inputs: {scores: {values: [[0, 1, 2], [3, 1, 0]]}}\n"
        )

    write("bfloat16, float64")
    summary, run = run_small([BACKENDS["numpy"], make_backend("wide", TEXTS["in_double"])], dtypes=())
    narrow = run.rows[run.rows["dtype"] == "bfloat16"]
    [refused] = narrow[narrow["implementation"] == "numpy.eager"].itertuples()
    assert (refused.verdict, refused.message) == ("unsupported", "declares no bfloat16")
    assert set(narrow[narrow["implementation"] == "wide.eager"]["verdict"]) == {"agree"}
    assert set(run.rows[run.rows["dtype"] == "float64"]["verdict"]) == {"agree"}
    assert summary.evaluations == 3  # wide in both, numpy in float64 alone
    assert set(run.environment["backends"]) == {"numpy.eager-float64", "wide.eager-bfloat16-float64"}
    classes = {name: own["bfloat16"] for name, own in run.environment["classes"].items()}
    assert classes == {"numpy.eager": None, "wide.eager": "eager"}
    write("bfloat16, float16")
    summary, run = run_small([BACKENDS["numpy"]], dtypes=())
    assert (summary.evaluations, run.summary is None) == (0, False), "a case that nobody can run ends, too"
    assert sorted(run.rows["message"]) == ["declares no bfloat16", "declares no float16"]


# What was judged: the first line and the exit code say it


def test_a_project_says_how_much_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command and a file that say no number, sessions.yaml has."""
    (tmp_path / "pyproject.toml").write_text('[tool.attncheck]\nmin_judged = "80%"\n')
    monkeypatch.chdir(tmp_path)
    assert str(minimum_of(RunOptions(), complete=True)) == "80%"
    assert minimum_of(RunOptions(), complete=False) is None
    assert str(minimum_of(read_options({"min_judged": "5"}), complete=False)) == "5"


SLOW = "slow_to_compile"


@pytest.fixture
def run_standard(
    tmp_path: Path,
    case_folder: Path,
    make_backend: Callable[..., BackendEntry],
    monkeypatch: pytest.MonkeyPatch,
    workers_here: None,
) -> Callable[..., tuple[RunSummary, Run]]:
    """Run four cases in two dtypes on an implementation that is asked for few, and on one that is asked for all."""
    made = make_backend(SLOW, "")
    slow = BackendEntry(SLOW, made.module, ("numpy",), modes=(Mode("slow", made.module, "", standard_only=True),))
    quick = BackendEntry("quick", "attncheck.backends.numpy_backend", ("numpy",))
    chosen = ImplementationSelection((Implementation(slow, "slow"), Implementation(quick)))
    monkeypatch.setattr(plan, "MAX_COMPILED", 0)

    def run(**settings: Any) -> tuple[RunSummary, Run]:
        cases = select_cases(["small"], base=tmp_path).cases
        summary = run_cases(cases, chosen, Settings(tmp_path / "out", dtypes=("float64", "float32"), **settings))
        return summary, read_run(tmp_path / "out")

    return run


def units_of(rows: pd.DataFrame, **having: str) -> int:
    for column, value in having.items():
        rows = rows[rows[column] == value]
    return len(rows[["case", "dtype"]].drop_duplicates())


def test_what_is_left_out_is_neither_judged_nor_failing_and_runs_where_that_is_asked(
    run_standard: Callable[..., tuple[RunSummary, Run]],
) -> None:
    summary, run = run_standard()
    slow = run.rows[run.rows["implementation"] == f"{SLOW}.slow"]
    left_out = units_of(slow, verdict="unsupported", lacks="--all-cases")
    assert 0 < left_out < 8
    assert units_of(slow, verdict="agree") == 8 - left_out
    assert units_of(run.rows, implementation="quick.eager", verdict="agree") == 8
    assert summary.exit_code == 0
    summary, run = run_standard(all_cases=True, resume=True)
    slow = run.rows[run.rows["implementation"] == f"{SLOW}.slow"]
    assert units_of(slow, verdict="agree") == units_of(slow) == 8
    assert summary.judged == {f"{SLOW}.slow": 4, "quick.eager": 4}


@pytest.mark.parametrize(("all_cases", "code"), [(False, 0), (True, 1)])
def test_an_expected_failure_is_outdated_only_where_nothing_was_left_out(
    all_cases: bool, code: int, run_standard: Callable[..., tuple[RunSummary, Run]], tmp_path: Path
) -> None:
    path = tmp_path / "expected.yaml"
    entry = f"implementation: {SLOW}.slow\n  cases: ['small/*']\n  verdict: numeric\n  decided: numeric\n"
    path.write_text(f"- {entry}  reason: It is wrong somewhere.\n", encoding="utf-8")
    summary, _ = run_standard(all_cases=all_cases, complete=True, expected_failures=load_expected_failures([path]))
    assert int(summary.exit_code) == code
