"""What failed last time, how a run is narrowed to it, and how much has to be judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tables import tables_beside

from attncheck.errors import ResultsError, UsageError
from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases
from attncheck.results.coverage import Minimum, RequestedRun, Stop, is_judged, shortfalls
from attncheck.results.format import FORMAT, Row
from attncheck.results.last_failed import (
    FAILED_FILE,
    Failed,
    FailedRecord,
    RunWatch,
    failed_alone,
    failed_evaluations,
    failed_first,
    read_failed,
)

MakeRow = Callable[..., Row]


def test_what_fails_and_what_was_held_against_the_exact_answer(make_row: MakeRow) -> None:
    for fields, fails, judged in tables_beside(__file__)["failing_rows"]:
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
    record.note([make_row(case="b", implementation="n")])
    record.note([make_row(case="c", implementation="n", verdict="numeric")])
    record.note([make_row(case="c", implementation="n", stage="output")])  # rows of a case may come in two parts
    assert record.as_record() == {
        "failed": [("a", "float64", "n"), ("b", "float32", "n"), ("b", "float64", "t"), ("c", "float64", "n")]
    }


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_failed(tmp_path / "nowhere") is None
    assert read_failed(tmp_path) is None
    record = FailedRecord({("a", "float64", "n")}, {("b", "float32", "t")}, [("a", "float64")])
    (tmp_path / FAILED_FILE).write_text(json.dumps({"format": FORMAT, **record.as_record()}))
    found = read_failed(tmp_path)
    assert found == Failed(frozenset({("a", "float64", "n"), ("b", "float32", "t")}), frozenset({("a", "float64")}))
    assert found.units(["t", "other"]) == {("b", "float32")}


DAMAGED = [
    "",
    "[]",
    "{}",
    '{"format": 9}',
    '{"format": 9, "failed": {"a": 1}}',
    '{"format": 9, "failed": [["a", "float64"]]}',
    '{"format": 9, "failed": [["a", "float64", 3]]}',
    '{"format": 9, "failed": [], "selected": [["a"]]}',
    '{"format": 7, "failed": []}',
    "[" * 100_000,
    '{"format": 9, "failed": [["a", "b", "\ud800',
]


def test_failures_of_the_former_format_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FAILED_FILE).write_text(json.dumps({"format": FORMAT - 1, "failed": []}))
    words = rf"has results format {FORMAT - 1}; .* reads {FORMAT}: an older attncheck wrote it; run it again"
    with pytest.raises(ResultsError, match=words):
        read_failed(tmp_path)


def test_a_damaged_file_or_a_folder_in_its_place_is_one_error_that_names_it(tmp_path: Path) -> None:
    for text in DAMAGED:
        (tmp_path / FAILED_FILE).write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ResultsError, match=r"failed\.json"):
            read_failed(tmp_path)
    (tmp_path / FAILED_FILE).unlink()
    (tmp_path / FAILED_FILE).mkdir()
    with pytest.raises(ResultsError, match=r"failed\.json cannot be read"):
        read_failed(tmp_path)


def test_cases_are_counted_and_not_their_dtypes_and_what_was_left_is_said(make_row: MakeRow) -> None:
    told: list[str] = []
    watch = RunWatch(FailedRecord(), 2, lambda failed: told.append(f"{failed.case} {failed.dtype}"))
    seen = [("a", "float64", "numeric"), ("a", "float32", "numeric"), ("b", "float64", "agree")]
    for case, dtype, verdict in seen:
        assert not watch.see([make_row(case=case, dtype=dtype, verdict=verdict)])
    assert watch.see([make_row(case="c", verdict="crash")])
    assert told == ["a float64", "a float32", "c float64"]
    planned = [(case, dtype) for case in "abcde" for dtype in ("float64", "float32")]
    assert watch.stop(planned, {("b", "float32")}) == Stop(2, not_run=2, in_part=1)
    assert watch.stop(planned[:3], set()) is None  # nothing was left
    after = "the run was stopped after"
    assert Stop(1, 9).of(1200) == f"{after} 1 failing case: 9 of 1,200 cases were not run"
    assert Stop(3, 1, 1).of(1200) == (
        f"{after} 3 failing cases: 1 of 1,200 cases was not run, and 1 not in all of its dtypes"
    )
    # A run that is never stopped remembers no case.
    watch = RunWatch(FailedRecord())
    assert not watch.see([make_row(verdict="numeric")])
    assert not watch.judged
    assert watch.stop([("b", "float64")], ()) is None


A, B, C, D = (f"small/small/{name}" for name in ("a-scores", "b-weights", "c-scores", "d-weights"))


@pytest.fixture
def cases(case_folder: Path) -> list[Case]:
    return list(select_cases(["small"], base=case_folder.parent).cases)


def write(folder: Path, *failed: tuple[str, str, str], selected: list[tuple[str, str]] | None = None) -> Path:
    more = {} if selected is None else {"selected": selected}
    (folder / FAILED_FILE).write_text(json.dumps({"format": FORMAT, "failed": failed, **more}))
    return folder


def ids(cases: object) -> list[str]:
    return [case.id for case in cases]  # type: ignore[attr-defined]


def test_what_failed_runs_alone_in_the_dtypes_in_which_it_failed(cases: list[Case], tmp_path: Path) -> None:
    folder = write(tmp_path, (D, "float32", "n"), (B, "float64", "n"), (A, "float64", "t"), ("gone", "float64", "n"))
    found = failed_alone(cases, (), ["n"], folder)
    assert ids(found.cases) == [B, D]
    assert found.only == {(B, "float64"), (D, "float32")}
    assert found.note == f"2 of 4 cases failed last time in {tmp_path} and run alone"
    assert failed_alone(cases, ["float32"], ["n"], folder).only == {(D, "float32")}
    assert ids(failed_alone(cases, (), ["n", "t"], folder).cases) == [A, B, D]


def test_where_nothing_failed_nothing_runs_and_that_is_said(cases: list[Case], tmp_path: Path) -> None:
    folder = write(tmp_path, (A, "float64", "n"))
    found = failed_alone(cases, (), ["other"], folder)  # whose run did not come to its end
    assert (ids(found.cases), found.only) == ([A, B, C, D], None)
    assert found.note == f"{tmp_path} has no whole run of other: every selected case runs"
    (folder / "summary.json").write_text('{"implementations": ["n", "other"]}')
    found = failed_alone(cases, (), ["other"], folder)
    assert (ids(found.cases), found.only) == ([], frozenset())
    assert found.note == f"nothing failed last time in {tmp_path}: nothing runs"
    note = f"nothing selected failed last time in {tmp_path}: nothing runs"
    assert failed_alone(cases[1:], (), ["n"], folder).note == note
    assert failed_alone(cases, ["float32"], ["n"], folder).note == note
    assert ids(failed_alone(cases[1:], (), ["n"], folder).cases) == []


def test_without_earlier_results_or_with_damaged_ones_everything_runs(cases: list[Case], tmp_path: Path) -> None:
    found = failed_alone(cases, (), ["n"], tmp_path / "new")
    assert found.note == f"there are no earlier results in {tmp_path / 'new'}: every selected case runs"
    (tmp_path / FAILED_FILE).write_text("{")
    found = failed_alone(cases, (), ["n"], tmp_path)
    assert (ids(found.cases), found.only) == ([A, B, C, D], None)
    assert found.note.startswith(f"what failed last time is not known: {tmp_path / FAILED_FILE} cannot be read")
    assert failed_first(cases, (), ["n"], tmp_path).note.endswith(": the cases run in their order")


def test_a_run_that_goes_on_has_the_cases_that_it_was_narrowed_to(cases: list[Case], tmp_path: Path) -> None:
    folder = write(tmp_path, (A, "float64", "n"), selected=[(A, "float64"), (C, "float32")])
    assert failed_alone(cases, (), ["n"], folder, resume=True).only == {(A, "float64"), (C, "float32")}
    folder = write(tmp_path, (A, "float64", "n"))
    found = failed_alone(cases, (), ["n"], folder, resume=True)
    assert (ids(found.cases), found.only) == ([A, B, C, D], None)
    assert found.note == f"the run in {tmp_path} was of everything that was selected, and goes on"


def test_what_failed_comes_first_and_the_rest_behind_it_in_its_order(cases: list[Case], tmp_path: Path) -> None:
    folder = write(tmp_path, (D, "float32", "n"), (B, "float64", "n"))
    found = failed_first(cases, (), ["n"], folder)
    assert ids(found.cases) == [B, D, A, C]
    assert found.only is None
    assert found.note == f"2 of 4 cases failed last time in {tmp_path} and run first"
    assert failed_first(cases, (), ["t"], folder).note == (
        f"nothing selected failed last time in {tmp_path}: the cases run in their order"
    )


def test_a_minimum_is_a_number_or_a_share_of_what_was_asked() -> None:
    for given, judged in {"5": 5, "20%": 5, "100%": 25, "0": 0}.items():
        assert Minimum.of(given, "--min-judged").is_reached(judged, 25), given
    for given, judged in {"5": 4, "20.1%": 5, "100 %": 24}.items():
        assert not Minimum.of(given, "--min-judged").is_reached(judged, 25), given
    assert Minimum.of(5, "here") == Minimum.of("5", "here")
    for text in ("20", "80%", "12.5%"):
        assert str(Minimum.of(text, "here")) == text
    for wrong in ("", "many", "-1", "101%", "1e3", "5 cases", "NaN%", True, 1.5, None, [5]):
        with pytest.raises(UsageError, match=r"^here: expected a number of cases, such as 20, or a share, .*; got "):
            Minimum.of(wrong, "here")  # type: ignore[arg-type]


SHORT: tuple[tuple[dict[str, int], RequestedRun, list[str]], ...] = (
    ({"a": 25, "b": 1}, RequestedRun(25), []),
    ({"a": 25, "b": 0}, RequestedRun(25), []),  # a mode that supports none of it, which nobody asked for by its name
    ({"a": 25, "b": 0}, RequestedRun(25, ("b",)), ["b was asked for by name and not judged in any of the 25 cases"]),
    ({"a": 0, "b": 0}, RequestedRun(25), ["no implementation was judged in any of the 25 cases"]),
    ({"a": 0}, RequestedRun(1, ("a",)), ["no implementation was judged in the only case"]),
    (
        {"a": 24, "b": 5},
        RequestedRun(25, ("a",), Minimum.of("80%", "")),
        ["b was judged in 5 of 25 cases; at least 80% have to be (min_judged)"],
    ),
    ({}, RequestedRun(25), []),
    ({"a": 0}, RequestedRun(0), []),
)


def test_what_falls_short_is_told() -> None:
    for judged, asked, lines in SHORT:
        assert shortfalls(judged, asked, {}) == lines


def test_the_minimum_is_that_of_the_operations_that_are_offered() -> None:
    asked = RequestedRun(25, (), Minimum.of("80%", ""))
    assert shortfalls({"a": 8, "b": 20}, asked, {"a": 15}) == []
    told = "a was judged in 7 of the 10 cases of what it offers; at least 80% have to be (min_judged)"
    assert shortfalls({"a": 7, "b": 20}, asked, {"a": 15}) == [told]
    nothing = "a was judged in 0 of 25 cases; at least 80% have to be (min_judged)"
    assert shortfalls({"a": 0, "b": 20}, asked, {"a": 25}) == [nothing]
