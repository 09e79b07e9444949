"""Failing cases: the simplest first, each with its shape and what it probes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reading.case import case_record
from attncheck.reading.selection import select_cases
from attncheck.reports.commands import first_commands
from attncheck.reports.defects import defects
from attncheck.reports.failure_patterns import described, given_of, shape_text, simplicity
from attncheck.reports.frames import Frames
from attncheck.reports.summary import findings
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
MakeRecord = Callable[..., dict[str, Any]]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]

DTYPES = ("float32", "float64")
SHAPES: dict[str, Any] = {
    "query": [2, 4, 3, 8],
    "key": [2, 2, 5, 8],
    "value": [2, 2, 5, 6],
    "mask": [1, 1, 3, 5],
}


def test_a_shape_is_written_by_its_axes(make_case_record: MakeRecord) -> None:
    record = make_case_record(operation="attention", inputs=SHAPES, tags=["bool-mask", "grouped-heads"])
    assert shape_text(record) == "B=2 H=4 Hkv=2 Lq=3 Lk=5 D=8 Dv=6"
    assert described(record) == "B=2 H=4 Hkv=2 Lq=3 Lk=5 D=8 Dv=6; probes bool-mask, grouped-heads"
    alike = {name: [2, 2, 5, 8] for name in ("query", "key", "value")}
    assert shape_text(make_case_record(operation="attention", inputs=alike)) == "B=2 H=2 Lq=5 Lk=5 D=8"
    assert shape_text(make_case_record()) == "B=1 H=1 Lq=1 Lk=3"


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": ""},
        {"operation": "dreaming"},
        {"operation": "attention", "inputs": {"query": [1]}},
        {"operation": "attention", "inputs": {"query": [1, 2, 3]}, "options": {"heads": 0}},
        {"operation": "multi_head_attention", "inputs": {"query_weight": [2, 3]}, "options": {"heads": "many"}},
        {"operation": "scoring", "options": {"score": ["dot"]}},
        {"operation": "scoring", "options": {"score": "shouting"}},
    ],
)
def test_of_a_record_that_fits_no_operation_nothing_is_said(
    make_case_record: MakeRecord, fields: dict[str, Any]
) -> None:
    record = make_case_record(**fields)
    assert described(record) == ""
    assert simplicity(record)[0] >= 0


def test_every_case_of_the_corpus_has_a_shape(tmp_path: Path) -> None:
    selection = select_cases(base=tmp_path)
    for case in selection.cases:
        assert "Lq=" in shape_text(case_record(case, selection.tags)), case.id


def test_what_need_not_be_given_counts_behind_the_elements(make_case_record: MakeRecord) -> None:
    options = {"is_causal": True, "softcap": 2.0, "window": None}
    full = make_case_record(operation="attention", inputs=SHAPES, options=options)
    assert given_of(full) == ["softcap", "is_causal", "mask"]
    bare = make_case_record(operation="attention", inputs=SHAPES, options={"is_causal": False})
    assert given_of(bare) == ["mask"]
    elements = 2 * 4 * 3 * 8 + 2 * 2 * 5 * (8 + 6) + 15
    assert simplicity(full) == (elements, 3)
    assert simplicity(bare) == (elements, 1)


def test_what_fails_is_listed_from_the_simplest_on(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, make_case_record: MakeRecord
) -> None:
    records = [
        make_case_record("file/a", inputs={"scores": [1, 1, 9, 9]}),
        make_case_record("file/b", inputs={"scores": [1, 1, 1, 4]}, options={"empty_rows": "nan"}, tags=["axis"]),
        make_case_record("file/c", inputs={"scores": [1, 1, 2, 2]}),
    ]
    rows = [make_row(case=f"file/{name}", dtype=dtype, verdict="numeric") for name in "abc" for dtype in DTYPES]
    frames = frames_of(write_run(rows, cases=records))
    wrong = findings(frames)
    assert list(zip(wrong["case"], wrong["dtype"], strict=True)) == [
        (f"file/{name}", dtype) for name in "cba" for dtype in DTYPES
    ]
    assert first_commands(frames) == ["attncheck explain file/c numpy.eager --dtype float32"]
    (defect,) = defects(frames)
    assert defect.cases == ("file/c", "file/b", "file/a")
