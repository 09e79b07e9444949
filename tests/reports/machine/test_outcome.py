"""The document of a report: the answer, and every failure with the numbers of its worst element."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from attncheck.errors import ExitCode
from attncheck.reports.frames import Frames
from attncheck.reports.machine.documents import SCHEMA
from attncheck.reports.machine.failures import failures_of
from attncheck.reports.machine.outcome import outcome_document
from attncheck.reports.machine.text import document_text
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]


def test_the_document_says_what_a_report_opens_with(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(), make_row(stage="output", verdict="nonfinite", message="nan", value=float("nan"))]
    frames = frames_of(write_run(rows))
    found = outcome_document(frames, ExitCode.DISAGREE, report=Path("here/report.md"), results=Path("here"))
    record = json.loads(document_text(found), parse_constant=pytest.fail)
    assert record["attncheck"] == {"version": version("attncheck"), "schema": SCHEMA, "command": "check"}
    assert record["answer"] == "numpy is wrong in the only case that it was judged in"
    assert record["judged"] == "Judged 1 of 1 case"
    assert record["coverage"]["numpy.eager 1.0 (local)"] == {
        "asked": 1,
        "judged": 1,
        "unsupported": 0,
        "lacks": {},
        "unverified": 0,
        "stopped": 0,
        "not_run": 0,
        "padded": 0,
    }
    assert record["numbers"]["unverified"] == 0
    assert (record["exit_code"], record["report"], record["notes"]) == (1, "here/report.md", [])
    assert record["verdicts"] == {"file/one": {"numpy.eager 1.0 (local)": "nonfinite at output"}}
    assert (record["stopped"], record["in_common"]) == ({}, [])
    assert record["failures"] == [
        {
            "case": "file/one",
            "dtype": "float64",
            "environment": "local",
            "implementation": "numpy.eager",
            "stage": "output",
            "verdict": "nonfinite",
            "message": "nan",
            "rows": 1,
            "file": "file.yaml",
            "line": 7,
            "element_stage": None,
            "element": None,
            "computed": None,
            "exact": None,
            "error": None,
            "bound": None,
            "ratio": None,
            "against": None,
            "diagnosis": None,
            "shape": "B=1 H=1 Lq=1 Lk=3",
            "tags": [],
            "next": [f"attncheck {name} file/one numpy.eager --dtype float64" for name in ("explain", "repro")],
        }
    ]
    assert record["next"] == ["attncheck explain file/one numpy.eager --dtype float64"]


def test_a_failure_has_the_numbers_of_the_stage_where_it_begins(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    numbers = {"index": "0,1,2", "value": 2.0, "reference": float("inf"), "difference": float("inf"), "allowed": 0.5}
    rows = [
        make_row(stage="weights", verdict="agree", begins_at="weights"),
        make_row(stage="output", verdict="numeric", begins_at="weights", against="exact", ratio=3.0, **numbers),
        make_row(
            stage="weights",
            dtype="float32",
            verdict="semantic",
            against="step",
            ratio=1.5,
            introduced_ratio=7.0,
            diagnosis="causal-top-left",
            **numbers | {"reference": float("nan")},
        ),
        make_row(stage="output", dtype="float32", verdict="numeric", begins_at="weights", **numbers | {"index": "9"}),
    ]
    second, first = failures_of(frames_of(write_run(rows)))
    assert (first.dtype, first.stage, first.element, first.against, first.ratio) == (
        "float64",
        "weights",
        [0, 1, 2],
        "exact",
        3.0,
    )
    assert (second.dtype, second.element, second.ratio, second.diagnosis) == (
        "float32",
        [0, 1, 2],
        7.0,
        "causal-top-left",
    )
    text = document_text(outcome_document(frames_of(write_run(rows)), ExitCode.DISAGREE))
    found = [(each["exact"], each["computed"]) for each in json.loads(text, parse_constant=pytest.fail)["failures"]]
    assert found == [("NaN", 2.0), ("Infinity", 2.0)]


def test_what_a_document_prints_wrongly_is_a_failure_of_no_implementation(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(),
        make_row(
            comparison="printed",
            verdict="misprint",
            index="0,1",
            value=0.5,
            reference=0.6,
            reference_text="0.6",
            exact=0.5,
            difference=0.1,
            allowed=0.05,
            message="off",
        ),
    ]
    [failure] = failures_of(frames_of(write_run(rows, document=True)))
    assert (failure.implementation, failure.dtype, failure.verdict, failure.next) == ("", "", "misprint", [])
