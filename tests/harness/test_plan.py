"""The plan of a run: every case in every dtype that is declared and asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncheck.errors import UsageError
from attncheck.plan import Plan
from attncheck.reading.selection import select_cases


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
    text = (
        (case_folder / "small.yaml")
        .read_text()
        .replace("operation: softmax", "operation: softmax\ndefaults: {dtypes: [float64]}", 1)
    )
    (case_folder / "small.yaml").write_text(text)
    cases = select_cases(["small"], base=tmp_path).cases
    with pytest.raises(UsageError, match="no case is declared for float32"):
        Plan.of(cases, ["float32"])


def test_what_is_done_is_left_out_and_the_rest_keeps_its_place(case_folder: Path, tmp_path: Path) -> None:
    plan = Plan.of(select_cases(["small"], base=tmp_path).cases, ())
    first = plan.units[0]
    left = plan.without(frozenset({(plan.case(first).id, first.dtype)}))
    assert left.units == plan.units[1:]
