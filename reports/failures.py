"""Failures: each is one case that fails on one implementation in one dtype, in plain words and with its numbers.

Every format of a report writes the fields of the same ``Failure``, and selects nothing from the rows itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pandas as pd

from attncheck.common.wording import index_from, told_apart, written_element, written_ratio
from attncheck.reports.coverage import OF_DOCUMENTS, misprints
from attncheck.reports.failure_patterns import shape_text, simplicity
from attncheck.reports.frames import Frames, by_key, element_in, failing, once_for_frames, records, stage_order
from attncheck.reports.json_documents import Failure
from attncheck.results.format import FAILURE_NUMBERS, Row
from attncheck.settings.commands import command, words_of
from attncheck.spec.verdicts import Verdict

AGAIN = ("explain", "repro")
"""Commands about one case on one implementation that say more of its failure."""
KEYS = ("case", "dtype", "environment", "implementation")
_ELEMENT = re.compile(r"\d+(?:,\d+)*")
_NONE_NAMED: Mapping[str, Any] = dict.fromkeys(FAILURE_NUMBERS)
_Row = Mapping[str, Any]


@once_for_frames
def failures(frames: Frames) -> tuple[Failure, ...]:
    """Return the failures of implementations, the simplest case first, then each wrong document and record once.

    A wrong document has neither implementation nor dtype: every one of them shows it.
    """
    of_documents = [_failure(frames, dict.fromkeys(KEYS, "") | vars(each), each.rows) for each in misprints(frames)]
    outdated = [first for first, *_ in by_key(outdated_records(frames), lambda each: each.message).values()]
    return (*wrong_implementations(frames), *of_documents, *outdated)


@once_for_frames
def wrong_implementations(frames: Frames) -> tuple[Failure, ...]:
    """Return the failures that implementations are to blame for, the simplest case first."""
    found = what_is_wrong(frames, with_records=False)
    order = {case: simplicity(frames.cases[case]) for case in {each.case for each in found}}
    return tuple(sorted(found, key=lambda each: order[each.case]))


def outdated_records(frames: Frames) -> list[Failure]:
    """Return the stages whose expected failure no longer happens."""
    rows = failing(frames.results)
    return failures_of(frames, rows[rows["verdict"].eq(Verdict.XPASS)])


def what_is_wrong(frames: Frames, *, with_records: bool = True) -> list[Failure]:
    """Return each failing case, dtype and implementation once, where it begins, with the number of its failing rows.

    Pairs are the evidence behind a stage's verdict and are listed only where no stage is blamed. ``with_records``, what
    is printed or recorded wrongly is listed too, with every implementation that shows it.
    """
    left_out = () if with_records else OF_DOCUMENTS
    rows_of = _failing_rows(frames)
    every = (row for rows in rows_of.values() for row in rows)
    blamed = {_STAGE(row) for row in every if row.get("other") is None and row["verdict"] not in left_out}
    found = []
    for key in sorted(rows_of):
        bad = [row for row in rows_of[key] if row["verdict"] not in left_out]
        bad = [row for row in bad if row.get("other") is None or _STAGE(row) not in blamed]
        if bad:
            found.append(_failure(frames, min(bad, key=_first), len(bad)))
    return found


def failures_of(frames: Frames, rows: pd.DataFrame) -> list[Failure]:
    """Return a failure for each of some rows of results."""
    return [_failure(frames, row, 1) for row in records(rows)]


_STAGE = itemgetter("case", "dtype", "stage")


@once_for_frames
def _failing_rows(frames: Frames) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Return the rows that fail, by ``KEYS``: of stages, then of numbers, then of pairs."""
    tables = (frames.results, frames.numbers, frames.pairs)
    return by_key((row for frame in tables for row in records(failing(frame))), itemgetter(*KEYS))


def _first(row: _Row) -> tuple[bool, tuple[int, str]]:
    """Sort key: the row where a failure begins comes first.

    A stage that only inherits an error comes after the one where it begins, wherever it stands in the computation. So
    does a number, of a stage that fails itself: the stage's message says why the number misses.
    """
    return _begins_at(row) != row["stage"] or row.get("basis") is not None, stage_order(row["stage"])


def _begins_at(row: _Row) -> str:
    """Return where a row's error begins, also where the implementation does not return that stage."""
    begins = row.get("begins_at")
    return str(row["stage"] if begins is None else begins)


def _failure(frames: Frames, row: _Row, count: int) -> Failure:
    rows = _failing_rows(frames).get(itemgetter(*KEYS)(row), [])
    if row.get("other") is not None:
        row = {**row, "message": f"differs from {row['other']}{_apart(frames, row)}"}
    commands = commands_again(frames, row, AGAIN) if row["implementation"] and row["dtype"] else ()
    return _failure_among(rows, row, count, frames.cases[row["case"]], commands)


def failure_of_rows(
    rows: Iterable[Row], case: Mapping[str, Any], commands: Sequence[str] = (), diagnosis: str | None = None
) -> Failure | None:
    """Return the failure of one evaluation, given its rows and the record of its case; None if nothing fails a run."""
    of_answer = {"environment": "", "case": case["id"]}
    bad = [{**vars(row), **of_answer, "diagnosis": row.diagnosis or diagnosis} for row in rows if row.fails_run]
    return _failure_among(bad, min(bad, key=_first), len(bad), case, commands) if bad else None


def _failure_among(
    rows: Sequence[_Row], first: _Row, count: int, case: Mapping[str, Any], commands: Sequence[str]
) -> Failure:
    """Return the failure that begins at the ``first`` of some failing rows, with the numbers of its worst element."""
    stage = _begins_at(first)
    shown = next((each for each in rows if each["stage"] == stage), rows[0] if rows else None)
    diagnosed = next((each["diagnosis"] for each in rows if each.get("diagnosis") is not None), None)
    numbers = _NONE_NAMED if shown is None else {**_numbers_of_row(shown), "diagnosis": diagnosed or None}
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


def _apart(frames: Frames, row: _Row) -> str:
    if row["message"]:
        return f": {row['message']}"
    return f" by {row['difference']:.3g} at {element_in(frames.cases[row['case']], row)}"


def _numbers_of_row(row: _Row) -> dict[str, Any]:
    """Return the numbers of the element that a row names. In frames, what is not there is NaN."""
    against = row.get("against")
    ratio = row.get("introduced_ratio") if against == "step" else row.get("ratio")
    if row["index"] is None:
        return {**_NONE_NAMED, "ratio": _number(ratio)}
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
    return None if value is None or pd.isna(value) else float(value)


def commands_again(frames: Frames, cell: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return commands about a cell, a record with its case, dtype, environment and implementation.

    There are none where no command line can name the implementation: it was handed over as an object.
    """
    words = words_of(cell["implementation"], frames.again.get(cell["environment"], {}))
    case = frames.cases[cell["case"]]
    return tuple(command(name, case, words, cell["dtype"]) for name in names) if words else ()


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
