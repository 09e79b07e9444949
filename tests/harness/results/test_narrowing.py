"""A run narrowed to what failed last time: what is kept, in which order, and what is said where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases
from attncheck.results.failed import FAILED_FILE
from attncheck.results.format import FORMAT
from attncheck.results.narrowing import failed_alone, failed_first

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


@pytest.mark.parametrize("names", [["other"], []])
def test_where_nothing_failed_everything_runs_and_that_is_said(
    cases: list[Case], tmp_path: Path, names: list[str]
) -> None:
    found = failed_alone(cases, (), names, write(tmp_path, (A, "float64", "n")))
    assert (ids(found.cases), found.only) == ([A, B, C, D], None)
    assert found.note == f"nothing failed last time in {tmp_path}: every selected case runs"


def test_where_nothing_that_failed_is_selected_everything_runs(cases: list[Case], tmp_path: Path) -> None:
    folder = write(tmp_path, (A, "float64", "n"))
    note = f"nothing selected failed last time in {tmp_path}: every selected case runs"
    assert failed_alone(cases[1:], (), ["n"], folder).note == note
    assert failed_alone(cases, ["float32"], ["n"], folder).note == note
    assert ids(failed_alone(cases[1:], (), ["n"], folder).cases) == [B, C, D]


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
