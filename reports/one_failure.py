"""One failure, in plain words and with the numbers of its worst element: of a row of a report, or of an answer.

This module loads no pandas: commands about one case, such as ``explain``, word their failure here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attncheck.common.wording import DocumentLayout, format_distinct, format_element, format_ratio, parse_index
from attncheck.reading.shapes import axis_lengths, format_lengths
from attncheck.reports.json_documents import Failure
from attncheck.results.format import FAILURE_NUMBERS, Row
from attncheck.spec import OPERATIONS, stage_position

EVALUATION_KEYS = ("case", "dtype", "environment", "implementation")
_ELEMENT_PATTERN = re.compile(r"\d+(?:,\d+)*")
_NO_NUMBERS: Mapping[str, Any] = dict.fromkeys(FAILURE_NUMBERS)
_Row = Mapping[str, Any]


def failure_of_rows(
    rows: Iterable[Row], case: Mapping[str, Any], commands: Sequence[str] = (), diagnosis: str | None = None
) -> Failure | None:
    """Return the failure of one evaluation, given its rows and the record of its case; None if nothing fails a run."""
    of_answer = {"environment": "", "case": case["id"]}
    bad = [{**vars(row), **of_answer, "diagnosis": row.diagnosis or diagnosis} for row in rows if row.fails_run]
    return make_failure(bad, min(bad, key=failing_row_sort_key), len(bad), case, commands) if bad else None


def make_failure(
    rows: Sequence[_Row], first: _Row, failing_comparisons: int, case: Mapping[str, Any], commands: Sequence[str]
) -> Failure:
    """Return the failure of one evaluation, with the numbers of its worst element.

    Args:
        rows: The failing rows of the evaluation, from which the worst element and the diagnosis are read.
        first: The row at which the failure begins; it has the verdict and the message.
        failing_comparisons: The number of failing comparisons that the failure reports.
        case: The record of the case.
        commands: The commands to run next.
    """
    stage = _first_wrong_stage(first)
    shown = next((row for row in rows if row["stage"] == stage), rows[0] if rows else None)
    diagnosed = next((row["diagnosis"] for row in rows if row.get("diagnosis") is not None), None)
    numbers = _NO_NUMBERS if shown is None else {**_element_numbers(shown), "diagnosis": diagnosed or None}
    return Failure(
        **{name: first[name] for name in (*EVALUATION_KEYS, "verdict", "message")},
        stage=stage,
        rows=failing_comparisons,
        **numbers,
        file=case["file"],
        line=case["line"],
        shape=shape_text(case),
        tags=list(case["tags"]),
        next=list(commands),
    )


def failing_row_sort_key(row: _Row) -> tuple[bool, tuple[int, str]]:
    """Sort key: the row at which a failure begins comes first.

    A stage that only inherits an error comes after the stage at which it begins, in any order of computation. A number
    comes after its failing stage, whose message explains why the number misses.
    """
    return _first_wrong_stage(row) != row["stage"] or row.get("basis") is not None, (
        stage_position(row["stage"]),
        row["stage"],
    )


def _first_wrong_stage(row: _Row) -> str:
    """Return the stage at which a row's error begins, even if the implementation does not return it."""
    begins = row.get("begins_at")
    return str(row["stage"] if begins is None else begins)


def _element_numbers(row: _Row) -> dict[str, Any]:
    """Return the numbers of the element that a row names; NaN of frames becomes None."""
    against = row.get("against")
    ratio = row.get("introduced_ratio") if against == "step" else row.get("ratio")
    if (index := row["index"]) is None:
        return {**_NO_NUMBERS, "ratio": _optional_float(ratio)}
    return {
        "element_stage": row["stage"],
        # An index of several elements, such as a range, is left out.
        "element": list(parse_index(index)) if not index or _ELEMENT_PATTERN.fullmatch(index) else None,
        "computed": float(row["value"]),
        "exact": float(row["reference"]),
        "error": _optional_float(row["difference"]),
        "bound": _optional_float(row["allowed"]),
        "ratio": _optional_float(ratio),
        "against": against,
    }


def _optional_float(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def record_axis_lengths(case: Mapping[str, Any]) -> dict[str, int]:
    """Return the length of every axis of a case record; empty if its shapes are unknown."""
    if case["operation"] not in OPERATIONS:
        return {}
    return axis_lengths(
        case["operation"], case["options"], {name: tuple(shape) for name, shape in case["inputs"].items()}
    )


def shape_text(case: Mapping[str, Any]) -> str:
    """Write the shape of a case record: B=1 H=4 Hkv=2 Lq=3 Lk=5 D=8.

    Example:
        >>> inputs = {"query": [1, 4, 3, 8], "key": [1, 2, 5, 8], "value": [1, 2, 5, 6]}
        >>> shape_text({"operation": "attention", "options": {}, "inputs": inputs})
        'B=1 H=4 Hkv=2 Lq=3 Lk=5 D=8 Dv=6'
    """
    return format_lengths(record_axis_lengths(case))


def wrong_element_text(failure: Failure, layout: DocumentLayout | None, *, of_several: bool) -> str:
    """Describe a wrong element: its value, the right one, and the error in units of the bound.

    Args:
        failure: The failure, whose element is counted as in arrays.
        layout: The layout in which the case's document counts, if there is one.
        of_several: True to name the dtype.
    """
    if failure.element is None or failure.computed is None or failure.exact is None:
        return failure.message
    computed, exact = format_distinct(failure.computed, failure.exact)
    element = format_element(failure.element, failure.element_stage or "", layout)
    where = f" in {failure.dtype}" if of_several else ""
    text = f"{element} is {computed}{where}, should be {exact}"
    if failure.ratio is None or not abs(failure.ratio) < float("inf"):
        return text
    return f"{text}: off by {format_ratio(failure.ratio)} times the error bound"


def failing_comparisons_text(number: int) -> str:
    """Write how many comparisons fail."""
    return "1 comparison fails" if number == 1 else f"{number:,} comparisons fail"
