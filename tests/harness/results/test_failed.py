"""What failed last time, how a run is narrowed to it, and how much has to be judged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tables import tables_beside

from attncheck.common.errors import ResultsError, UsageError
from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases
from attncheck.results.coverage import EarlyStop, MinimumJudged, RequestedRun, is_judged, shortfall_sentences
from attncheck.results.format import FORMAT_VERSION, Row
from attncheck.results.last_failed import (
    FAILED_FILE,
    FailedRecord,
    FailureLimit,
    LastFailures,
    failed_evaluations,
    order_failed_first,
    read_last_failures,
    select_failed,
)

MakeRow = Callable[..., Row]
TABLES = tables_beside(__file__)


def test_what_fails_and_what_was_held_against_the_exact_answer(make_row: MakeRow) -> None:
    for fields, fails, judged in TABLES["failing_rows"]:
        row = make_row(**fields)
        assert (bool(failed_evaluations([row])), is_judged(row)) == (fails, judged), fields


def test_a_failing_evaluation_is_told_at_the_stage_where_it_begins(make_row: MakeRow) -> None:
    rows = [
        make_row(stage="log_sum_exp", verdict="shape", begins_at="weights"),
        make_row(stage="weights", verdict="numeric", begins_at="weights"),
        make_row(stage="output", verdict="nonfinite", begins_at="weights"),
        make_row(stage="weights", implementation="torch.eager"),
        make_row(stage="weights", verdict="numeric", comparison="pair", other="torch.eager"),
    ]
    [failed] = failed_evaluations(rows)
    assert str(failed) == "numpy.eager: file/one [float64]: numeric at weights"
    assert failed.key == ("file/one", "float64", "numpy.eager")
    [crashed] = failed_evaluations([make_row(stage="", verdict="crash")])
    assert str(crashed) == "numpy.eager: file/one [float64]: crash"
    # Two that differ are blamed where neither fails by itself.
    blamed = failed_evaluations([make_row(), rows[-1]])
    assert [evaluation.implementation for evaluation in blamed] == ["numpy.eager", "torch.eager"]


def test_what_is_judged_is_replaced_and_all_else_stays(make_row: MakeRow) -> None:
    record = FailedRecord({("a", "float64", "n"), ("b", "float64", "n"), ("b", "float32", "n"), ("b", "float64", "t")})
    record.record([make_row(case="b", implementation="n")])
    record.record([make_row(case="c", implementation="n", verdict="numeric")])
    record.record([make_row(case="c", implementation="n", stage="output")])  # rows of a case may come in two parts
    failed = [("a", "float64", "n"), ("b", "float32", "n"), ("b", "float64", "t"), ("c", "float64", "n")]
    assert record.as_record() == {"failed": failed}


def test_it_is_read_as_it_was_written_or_refused_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / FAILED_FILE
    assert read_last_failures(tmp_path / "nowhere") is None
    assert read_last_failures(tmp_path) is None
    record = FailedRecord({("a", "float64", "n")}, {("b", "float32", "t")}, [("a", "float64")])
    path.write_text(json.dumps({"format": FORMAT_VERSION, **record.as_record()}))
    found = read_last_failures(tmp_path)
    assert found == LastFailures(
        frozenset({("a", "float64", "n"), ("b", "float32", "t")}), frozenset({("a", "float64")})
    )
    assert found.failed_units(["t", "other"]) == {("b", "float32")}
    wrong = [
        '{"a": 1}}',
        '[["a", "float64"]]}',
        '[["a", "float64", 3]]}',
        '[], "selected": [["a"]]}',
        '[["a", "b", "\ud800',
    ]
    damaged = [f'{{"format": {FORMAT_VERSION}, "failed": {rest}' for rest in wrong]
    old = f'{{"format": {FORMAT_VERSION - 1}, "failed": []}}'
    for text in ("", "[]", "{}", old, f'{{"format": {FORMAT_VERSION}}}', "[" * 100_000, *damaged):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ResultsError, match=r"failed\.json"):
            read_last_failures(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ResultsError, match=r"failed\.json cannot be read"):
        read_last_failures(tmp_path)


def test_cases_are_counted_and_not_their_dtypes_and_what_was_left_is_said(make_row: MakeRow) -> None:
    told: list[str] = []
    watch = FailureLimit(FailedRecord(), 2, lambda failed: told.append(f"{failed.case} {failed.dtype}"))
    seen = [("a", "float64", "numeric"), ("a", "float32", "numeric"), ("b", "float64", "agree")]
    for case, dtype, verdict in seen:
        assert not watch.record_rows([make_row(case=case, dtype=dtype, verdict=verdict)])
    assert watch.record_rows([make_row(case="c", verdict="crash")])
    assert told == ["a float64", "a float32", "c float64"]
    planned = [(case, dtype) for case in "abcde" for dtype in ("float64", "float32")]
    assert watch.early_stop(planned, {("b", "float32")}) == EarlyStop(2, not_run=2, in_part=1)
    assert watch.early_stop(planned[:3], set()) is None  # nothing was left
    after = "the run was stopped after"
    assert EarlyStop(1, 9).describe(1200) == f"{after} 1 failing case: 9 of 1,200 cases were not run"
    left = "1 of 1,200 cases was not run, and 1 not in all of its dtypes"
    assert EarlyStop(3, 1, 1).describe(1200) == f"{after} 3 failing cases: {left}"
    # A run that is never stopped remembers no case.
    watch = FailureLimit(FailedRecord())
    assert not watch.record_rows([make_row(verdict="numeric")])
    assert not watch.judged_units
    assert watch.early_stop([("b", "float64")], ()) is None


A, B, C, D = (f"small/small/{name}" for name in ("a-scores", "b-weights", "c-scores", "d-weights"))


@pytest.fixture
def cases(case_folder: Path) -> list[Case]:
    return list(select_cases(["small"], base=case_folder.parent).cases)


def write(folder: Path, *failed: tuple[str, str, str], selected: list[tuple[str, str]] | None = None) -> Path:
    more = {} if selected is None else {"selected": selected}
    (folder / FAILED_FILE).write_text(json.dumps({"format": FORMAT_VERSION, "failed": failed, **more}))
    return folder


def ids(cases: object) -> list[str]:
    return [case.id for case in cases]  # type: ignore[attr-defined]


def test_what_failed_runs_alone_in_the_dtypes_in_which_it_failed_or_before_the_rest(
    cases: list[Case], tmp_path: Path
) -> None:
    folder = write(tmp_path, (D, "float32", "n"), (B, "float64", "n"), (A, "float64", "t"), ("gone", "float64", "n"))
    found = select_failed(cases, (), ["n"], folder)
    assert ids(found.cases) == [B, D]
    assert found.failed_units == {(B, "float64"), (D, "float32")}
    assert found.description == f"2 of 4 cases failed last time in {tmp_path} and run alone"
    assert select_failed(cases, ["float32"], ["n"], folder).failed_units == {(D, "float32")}
    assert ids(select_failed(cases, (), ["n", "t"], folder).cases) == [A, B, D]
    first = order_failed_first(cases, (), ["n"], folder)
    assert (ids(first.cases), first.failed_units) == ([B, D, A, C], None)
    assert first.description == f"2 of 4 cases failed last time in {tmp_path} and run first"
    assert order_failed_first(cases, (), ["x"], folder).description.endswith(": the cases run in their order")
    folder = write(tmp_path, (A, "float64", "n"), selected=[(A, "float64"), (C, "float32")])
    assert select_failed(cases, (), ["n"], folder, resume=True).failed_units == {(A, "float64"), (C, "float32")}
    (folder / "summary.json").write_text('{"implementations": ["n", "other"]}')
    for selected, dtypes, names, said in (
        (cases, (), ["other"], "nothing"),
        (cases[1:], (), ["n"], "nothing selected"),
        (cases, ["float32"], ["n"], "nothing selected"),
    ):
        found = select_failed(selected, dtypes, names, folder)
        assert (ids(found.cases), found.failed_units) == ([], frozenset())
        assert found.description == f"{said} failed last time in {tmp_path}: nothing runs"


def test_without_results_that_say_what_failed_nothing_runs(cases: list[Case], tmp_path: Path) -> None:
    new, damaged = tmp_path / "new", tmp_path / "damaged"
    damaged.mkdir()
    (damaged / FAILED_FILE).write_text("{")
    for folder, reason in (
        (new, f"--failed: there are no earlier results in {new}; check without --failed first"),
        (damaged, f"--failed: what failed last time is not known: {damaged / FAILED_FILE} cannot be read"),
    ):
        with pytest.raises(UsageError, match=f"^{re.escape(reason)}"):
            select_failed(cases, (), ["n"], folder)
    assert order_failed_first(cases, (), ["n"], damaged).description.endswith(": the cases run in their order")


def test_after_an_unfinished_run_everything_runs(cases: list[Case], tmp_path: Path) -> None:
    write(tmp_path, (A, "float64", "n"))
    for name, resume, note in (
        ("other", False, f"{tmp_path} has no whole run of other: every selected case runs"),
        ("n", True, f"the run in {tmp_path} was of everything that was selected, and goes on"),
    ):
        found = select_failed(cases, (), [name], tmp_path, resume=resume)
        assert (ids(found.cases), found.failed_units) == ([A, B, C, D], None)
        assert found.description.startswith(note)


def test_a_minimum_is_a_number_or_a_share_of_what_was_asked() -> None:
    for given, judged, is_reached in (
        *(("5", 5, True), ("20%", 5, True), ("100%", 25, True), ("0", 0, True)),
        *(("5", 4, False), ("20.1%", 5, False), ("100 %", 24, False)),
    ):
        assert MinimumJudged.parse(given, "--min-judged").is_reached(judged, 25) is is_reached, given
    assert MinimumJudged.parse(5, "here") == MinimumJudged.parse("5", "here")
    for wrong in ("", "many", "-1", "101%", "1e3", "5 cases", "NaN%", True, 1.5, None, [5]):
        with pytest.raises(UsageError, match=r"^here: expected a number of cases, such as 20, or a share, .*; got "):
            MinimumJudged.parse(wrong, "here")  # type: ignore[arg-type]


def test_what_falls_short_of_all_cases_or_of_those_that_are_offered_is_told() -> None:
    for judged, cases, named, minimum, offered, told in TABLES["shortfalls"]:
        asked = RequestedRun(cases, tuple(named), MinimumJudged.parse(minimum, "") if minimum else None)
        assert shortfall_sentences(judged, asked, offered) == told
