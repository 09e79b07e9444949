"""The standard cases, and what asks for them alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

from attncheck import plan as module
from attncheck import run as running
from attncheck.backends import BackendEntry, Mode
from attncheck.errors import ExitCode, UsageError
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.plan import Plan, _features_of_case, recorded_units, standard_units
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.selection import select_cases
from attncheck.results.reader import Run, read_run
from attncheck.run import RunSummary, Settings, run_cases
from attncheck.spec import DTYPES, OPERATIONS


@pytest.fixture(scope="module")
def corpus() -> Plan:
    return Plan.of(select_cases().cases, [])


def features(cases: list[Case] | tuple[Case, ...], units: list[tuple[int, str]]) -> set[Any]:
    return {
        feature
        for case, dtype in units
        for key, in_each_dtype in of_case(cases[case])
        for feature in (key, *([(key, dtype)] if in_each_dtype else []))
    }


FOUND: dict[str, list[Any]] = {}
"""What each case of the corpus has, worked out once."""


def of_case(case: Case) -> list[Any]:
    if case.id not in FOUND:
        FOUND[case.id] = list(_features_of_case(case))
    return FOUND[case.id]


def test_few_of_the_bundled_cases_have_all_that_occurs_in_any(corpus: Plan) -> None:
    units = [(unit.case, unit.dtype) for unit in corpus]
    chosen = [units[position] for position in standard_units(corpus.cases, units)]
    assert features(corpus.cases, chosen) == features(corpus.cases, units)
    assert {corpus.cases[case].operation for case, _ in chosen} == set(OPERATIONS)
    assert {dtype for _, dtype in chosen} == set(DTYPES)
    tags = [{tag for case, _ in every for tag in corpus.cases[case].tags} for every in (chosen, units)]
    assert tags[0] == tags[1]
    assert {unit for unit in units if corpus.cases[unit[0]].is_document} <= set(chosen)
    assert len(chosen) * 8 < len(units)


@given(data=some.data())
def test_whatever_is_asked_for_none_is_chosen_that_adds_nothing_at_first(corpus: Plan, data: some.DataObject) -> None:
    every = [(unit.case, unit.dtype) for unit in corpus]
    units = data.draw(some.lists(some.sampled_from(every), min_size=1, max_size=12, unique=True))
    positions = standard_units(corpus.cases, units)
    assert positions == sorted(set(positions))
    assert features(corpus.cases, [units[each] for each in positions]) == features(corpus.cases, units)


def test_units_that_have_the_same_are_tried_once(corpus: Plan) -> None:
    recorded = recorded_units()
    case = next(number for number, each in enumerate(corpus.cases) if each.id not in recorded)
    assert standard_units(corpus.cases, [(case, corpus.cases[case].dtypes[0])] * 3) == [0]


def test_documents_are_planned_first_where_that_is_asked_for(corpus: Plan) -> None:
    cases = corpus.cases[::60]
    cases = [*cases, *(case for case in corpus.cases if case.is_document)]
    plan = Plan.of(cases, ["float32"], documents_first=True)
    documents = [plan.case(unit).is_document for unit in plan]
    assert documents == sorted(documents, reverse=True)
    assert [unit.position for unit in plan] == list(range(len(documents)))
    assert Plan.of(cases, ["float32"]).units[0].case == 0


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
    monkeypatch.setattr(module, "MAX_COMPILED", 0)

    def run(**settings: Any) -> tuple[RunSummary, Run]:
        cases = select_cases(["small"], base=tmp_path).cases
        summary = run_cases(cases, chosen, Settings(tmp_path / "out", dtypes=("float64", "float32"), **settings))
        return summary, read_run(tmp_path / "out")

    return run


def units_of(run: Run, implementation: str, **having: str) -> int:
    return units_of_rows(run.rows, implementation=implementation, **having)


def units_of_rows(rows: pd.DataFrame, **having: str) -> int:
    for column, value in having.items():
        rows = rows[rows[column] == value]
    return len(rows[["case", "dtype"]].drop_duplicates())


def test_what_is_left_out_is_neither_judged_nor_failing(run_standard: Callable[..., tuple[RunSummary, Run]]) -> None:
    summary, run = run_standard()
    left_out = units_of(run, f"{SLOW}.slow", verdict="unsupported", lacks="--all-cases")
    assert 0 < left_out < 8
    assert units_of(run, f"{SLOW}.slow", verdict="agree") == 8 - left_out
    assert units_of(run, "quick.eager", verdict="agree") == 8
    assert summary.exit_code == 0


def test_all_cases_run_where_asked_and_resumed(run_standard: Callable[..., tuple[RunSummary, Run]]) -> None:
    run_standard()
    summary, run = run_standard(all_cases=True, resume=True)
    assert units_of(run, f"{SLOW}.slow", verdict="agree") == units_of(run, f"{SLOW}.slow") == 8
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


def test_all_cases_by_command(invoke: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def note(cases: object, chosen: object, settings: Settings, *_: object, **__: object) -> None:
        seen.append(settings)
        raise UsageError("seen")

    monkeypatch.setattr(running, "run_cases", note)
    for command in ("check", "run"):
        for words in ([], ["--all-cases"]):
            code, _, err = invoke(command, "softmax/*", "--backend", "numpy", *words)
            assert (code, "seen" in err) == (int(ExitCode.BAD_INPUT), True)
    assert [each.all_cases for each in seen] == [False, True, False, True]


@pytest.mark.usefixtures("workers_here")
def test_anyone_can_run_standard_cases(invoke: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    code, out, _ = invoke(
        *("check", "softmax/*", "lengths/*", "masking/*", "windows/*", "--backend", "numpy", "--standard", "numpy"),
        *("--no-report", "--output", str(folder)),
    )
    rows = read_run(folder).rows
    left_out = units_of_rows(rows, lacks="--all-cases")
    assert 0 < units_of_rows(rows) - left_out < left_out
    assert f"numpy.eager was not asked for {left_out} evaluations, which others cover; --all-cases asks for all." in out
    assert code == 0


def test_the_standard_set_of_what_does_not_run_is_refused(invoke: Callable[..., tuple[int, str, str]]) -> None:
    for words, says in (
        (["--standard", "torch.*"], "torch.*: no implementation of this run is called so; it has numpy.eager"),
        (["--standard", "numpy", "--all-cases"], "leaves no case out, --standard runs some alone: give one"),
    ):
        code, _, err = invoke("check", "softmax/*", "--backend", "numpy", *words)
        assert (code, says in err) == (int(ExitCode.BAD_INPUT), True)
