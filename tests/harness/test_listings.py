"""What can be chosen, as people read it: cases with what they compute, in columns."""

from __future__ import annotations

import pytest

from attncheck.listings import case_lines, list_cases
from attncheck.reading.selection import select_cases


def test_a_case_says_what_it_computes_on_what() -> None:
    (record,) = list_cases(select_cases(["attention/a-bias-of-minus-infinity-everywhere-empties-a-row-too"]))
    assert record["operation"] == "attention"
    assert record["shape"] == "B=1 H=1 Lq=2 Lk=3 D=5 Dv=2"
    assert record["dtypes"] == ["float64", "float32"]
    assert record["tags"] == ["empty-row", "additive-bias"]
    assert list(case_lines([record])) == [
        "attention/a-bias-of-minus-infinity-everywhere-empties-a-row-too",
        "  attention  B=1 H=1 Lq=2 Lk=3 D=5 Dv=2  f64 f32  empty-row, additive-bias",
    ]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return list(case_lines(list_cases(select_cases(["kernel_shapes/*", "gradients/*", "attention/*"]))))


def test_columns_stand_below_each_other_and_fit_100(lines: list[str]) -> None:
    described = [line for line in lines if line.startswith("  ") and line[2] != " "]
    ids = [line for line in lines if not line.startswith(" ")]
    assert len(described) == len(ids) > 100
    starts = {line.index(" B=") for line in described if " B=" in line}
    assert len(starts) == 1
    long = [line for line in lines if line.startswith(" ") and len(line) > 100]
    assert len(long) < len(described) / 10


def test_no_tag_is_lost(lines: list[str]) -> None:
    text = "\n".join(lines)
    for case in list_cases(select_cases(["kernel_shapes/*"])):
        for tag in case["tags"]:
            assert tag in text


def test_nothing_selected_has_no_line() -> None:
    assert list(case_lines([])) == []
