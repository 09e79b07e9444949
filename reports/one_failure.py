"""One failure, in plain words and with the numbers of its worst element: of a row of a report, or of an answer.

This module loads no pandas: commands about one case, such as ``explain``, word their failure here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attncheck.common.wording import index_from, told_apart, written_element, written_ratio
from attncheck.reading.shapes import axis_lengths, lengths_text
from attncheck.reports.json_documents import Failure
from attncheck.results.format import FAILURE_NUMBERS, Row
from attncheck.spec import OPERATIONS, stage_position

KEYS = ("case", "dtype", "environment", "implementation")
_ELEMENT = re.compile(r"\d+(?:,\d+)*")
_NO_NUMBERS: Mapping[str, Any] = dict.fromkeys(FAILURE_NUMBERS)
_Row = Mapping[str, Any]


def failure_of_rows(
    rows: Iterable[Row], case: Mapping[str, Any], commands: Sequence[str] = (), diagnosis: str | None = None
) -> Failure | None:
    """Return the failure of one evaluation, given its rows and the record of its case; None if nothing fails a run."""
    of_answer = {"environment": "", "case": case["id"]}
    bad = [{**vars(row), **of_answer, "diagnosis": row.diagnosis or diagnosis} for row in rows if row.fails_run]
    return failure_among(bad, min(bad, key=first_failing_row), len(bad), case, commands) if bad else None


def failure_among(
    rows: Sequence[_Row], first: _Row, count: int, case: Mapping[str, Any], commands: Sequence[str]
) -> Failure:
    """Return the failure that begins at the ``first`` of some failing rows, with the numbers of its worst element."""
    stage = _begins_at(first)
    shown = next((each for each in rows if each["stage"] == stage), rows[0] if rows else None)
    diagnosed = next((each["diagnosis"] for each in rows if each.get("diagnosis") is not None), None)
    numbers = _NO_NUMBERS if shown is None else {**_numbers_of_row(shown), "diagnosis": diagnosed or None}
    return Failure(
        **{name: first[name] for name in (*KEYS, "verdict", "message")},
        stage=stage,
        rows=count,
        **numbers,
        file=case["file"],
        line=case["line"],
        shape=shape_text(case),
        tags=list(case["tags"]),
        next=list(commands),
    )


def first_failing_row(row: _Row) -> tuple[bool, tuple[int, str]]:
    """Sort key: the row where a failure begins comes first.

    A stage that only inherits an error comes after the one where it begins, wherever it stands in the computation. So
    does a number, of a stage that fails itself: the stage's message says why the number misses.
    """
    return _begins_at(row) != row["stage"] or row.get("basis") is not None, (stage_position(row["stage"]), row["stage"])


def _begins_at(row: _Row) -> str:
    """Return where a row's error begins, also where the implementation does not return that stage."""
    begins = row.get("begins_at")
    return str(row["stage"] if begins is None else begins)


def _numbers_of_row(row: _Row) -> dict[str, Any]:
    """Return the numbers of the element that a row names. In frames, what is not there is NaN."""
    against = row.get("against")
    ratio = row.get("introduced_ratio") if against == "step" else row.get("ratio")
    if row["index"] is None:
        return {**_NO_NUMBERS, "ratio": _number(ratio)}
    return {
        "element_stage": row["stage"],
        "element": _element(row["index"]),
        "computed": float(row["value"]),
        "exact": float(row["reference"]),
        "error": _number(row["difference"]),
        "bound": _number(row["allowed"]),
        "ratio": _number(ratio),
        "against": against,
    }


def _element(index: str) -> list[int] | None:
    """Read an index; what names no single element is none."""
    return list(index_from(index)) if not index or _ELEMENT.fullmatch(index) else None


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def lengths_of(case: Mapping[str, Any]) -> dict[str, int]:
    """Return the length of every axis of a case record; empty where nothing is known of its shapes."""
    if case["operation"] not in OPERATIONS:
        return {}
    return axis_lengths(
        case["operation"], case["options"], {name: tuple(shape) for name, shape in case["inputs"].items()}
    )


def shape_text(case: Mapping[str, Any]) -> str:
    """Write the shape of a case record: B=1 H=4 Hkv=2 Lq=3 Lk=5 D=8."""
    return lengths_text(lengths_of(case))


def how_wrong(failure: Failure, *, of_several: bool) -> str:
    """Describe a wrong element: its value, the right one, and the error in units of the bound."""
    if failure.element is None or failure.computed is None or failure.exact is None:
        return failure.message
    computed, exact = told_apart(failure.computed, failure.exact)
    element = written_element(failure.element, failure.element_stage or "")
    where = f" in {failure.dtype}" if of_several else ""
    text = f"{element} is {computed}{where}, should be {exact}"
    if failure.ratio is None or not abs(failure.ratio) < float("inf"):
        return text
    return f"{text}: off by {written_ratio(failure.ratio)} times the error bound"


def comparisons_fail(number: int) -> str:
    """Write how many comparisons fail."""
    return "1 comparison fails" if number == 1 else f"{number:,} comparisons fail"
