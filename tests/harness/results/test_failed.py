"""What failed last time: which rows say so, how a run brings it up to date, and when a run has seen enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import ResultsError
from attncheck.results.coverage import Stop
from attncheck.results.failed import (
    FAILED_FILE,
    Failed,
    FailedRecord,
    RunWatch,
    failed_evaluations,
    read_failed,
)
from attncheck.results.format import FORMAT, Row

MakeRow = Callable[..., Row]


@pytest.mark.parametrize(
    ("fields", "fails"),
    [
        ({}, False),
        ({"verdict": "numeric"}, True),
        ({"verdict": "numeric", "xfail": True}, False),
        ({"verdict": "crash", "stage": ""}, True),
        ({"verdict": "untried", "stage": ""}, True),
        ({"verdict": "unsupported", "stage": ""}, False),
        ({"verdict": "unverified"}, False),
        ({"verdict": "misprint", "comparison": "printed"}, True),
        ({"verdict": "xpass", "stage": ""}, False),  # found by a run of everything alone
    ],
)
def test_what_fails(make_row: MakeRow, fields: dict[str, Any], *, fails: bool) -> None:
    assert bool(failed_evaluations([make_row(**fields)])) is fails


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


def test_two_that_differ_are_blamed_where_neither_fails_by_itself(make_row: MakeRow) -> None:
    pair = make_row(verdict="numeric", comparison="pair", other="torch.eager")
    assert [each.implementation for each in failed_evaluations([make_row(), pair])] == ["numpy.eager", "torch.eager"]


def test_what_is_judged_is_replaced_and_all_else_stays(make_row: MakeRow) -> None:
    record = FailedRecord({("a", "float64", "n"), ("b", "float64", "n"), ("b", "float32", "n"), ("b", "float64", "t")})
    record.note([make_row(case="b", implementation="n")])
    record.note([make_row(case="c", implementation="n", verdict="numeric")])
    found = record.as_record()
    assert found == {
        "failed": [("a", "float64", "n"), ("b", "float32", "n"), ("b", "float64", "t"), ("c", "float64", "n")]
    }


def test_rows_of_one_case_may_come_in_two_parts(make_row: MakeRow) -> None:
    record = FailedRecord({("file/one", "float64", "numpy.eager")})
    record.note([make_row(verdict="numeric")])
    record.note([make_row(stage="output")])
    assert record.as_record() == {"failed": [("file/one", "float64", "numpy.eager")]}


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_failed(tmp_path / "nowhere") is None
    assert read_failed(tmp_path) is None
    record = FailedRecord({("a", "float64", "n")}, {("b", "float32", "t")}, [("a", "float64")])
    (tmp_path / FAILED_FILE).write_text(json.dumps({"format": FORMAT, **record.as_record()}))
    found = read_failed(tmp_path)
    assert found == Failed(frozenset({("a", "float64", "n"), ("b", "float32", "t")}), frozenset({("a", "float64")}))
    assert found.units(["t", "other"]) == {("b", "float32")}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 8}',
        '{"format": 8, "failed": {"a": 1}}',
        '{"format": 8, "failed": [["a", "float64"]]}',
        '{"format": 8, "failed": [["a", "float64", 3]]}',
        '{"format": 8, "failed": [], "selected": [["a"]]}',
        '{"format": 7, "failed": []}',
        "[" * 100_000,
        '{"format": 8, "failed": [["a", "b", "\ud800',
    ],
)
def test_a_damaged_file_is_one_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / FAILED_FILE).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ResultsError, match=r"failed\.json"):
        read_failed(tmp_path)


def test_a_folder_in_its_place_is_an_error_too(tmp_path: Path) -> None:
    (tmp_path / FAILED_FILE).mkdir()
    with pytest.raises(ResultsError, match=r"failed\.json cannot be read"):
        read_failed(tmp_path)


def test_cases_are_counted_and_not_their_dtypes(make_row: MakeRow) -> None:
    told: list[str] = []
    watch = RunWatch(FailedRecord(), 2, lambda failed: told.append(f"{failed.case} {failed.dtype}"))
    ends = [
        watch.see([make_row(case=case, dtype=dtype, verdict=verdict)])
        for case, dtype, verdict in [
            ("a", "float64", "numeric"),
            ("a", "float32", "numeric"),
            ("b", "float64", "agree"),
            ("c", "float64", "crash"),
        ]
    ]
    assert ends == [False, False, False, True]
    assert told == ["a float64", "a float32", "c float64"]
    planned = [(case, dtype) for case in "abcde" for dtype in ("float64", "float32")]
    assert watch.stop(planned, {("b", "float32")}) == Stop(2, not_run=2, in_part=1)
    assert watch.stop(planned[:3], set()) is None  # nothing was left


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (Stop(1, 9), "the run was stopped after 1 failing case: 9 of 1,200 cases were not run"),
        (
            Stop(3, 1, 1),
            "the run was stopped after 3 failing cases: 1 of 1,200 cases was not run, and 1 not in all of its dtypes",
        ),
    ],
)
def test_a_stop_says_what_was_left(stop: Stop, text: str) -> None:
    assert stop.of(1200) == text


def test_a_run_that_is_never_stopped_remembers_no_case(make_row: MakeRow) -> None:
    watch = RunWatch(FailedRecord())
    assert not watch.see([make_row(verdict="numeric")])
    assert not watch.judged
    assert watch.stop([("b", "float64")], ()) is None
