"""Failures as every document has them: of the rows of runs, of an explanation, and of what a search found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from attncheck.explain import NUMBERS, Explanation
from attncheck.reading.case import case_record
from attncheck.reports.commands import commands_again
from attncheck.reports.failure_patterns import shape_text
from attncheck.reports.frames import Frames, failing, once_for_frames, records
from attncheck.reports.machine.documents import Failure
from attncheck.reports.summary import findings
from attncheck.verdicts import Verdict

AGAIN = ("explain", "repro")
"""Commands about one case on one implementation that say more of its failure."""
_KEYS = ("case", "dtype", "environment", "implementation")
_ELEMENT = re.compile(r"\d+(?:,\d+)*")
_NONE_NAMED: Mapping[str, Any] = dict.fromkeys(NUMBERS)


def failures_of(frames: Frames, wrong: pd.DataFrame | None = None) -> list[Failure]:
    """Return what is wrong, the simplest case first, with the numbers of the element that is worst.

    ``wrong`` are some rows of ``findings``; None is all of them.
    """
    found = findings(frames) if wrong is None else wrong
    rows = _failing_rows(frames)
    return [_failure(frames, row, rows.get(tuple(row[key] for key in _KEYS), [])) for row in records(found)]


@once_for_frames
def _failing_rows(frames: Frames) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Return the rows that fail, by what they are of: of stages, then of numbers, then of pairs."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for frame in (frames.results, frames.numbers, frames.pairs):
        for row in records(failing(frame)):
            found.setdefault(tuple(row[key] for key in _KEYS), []).append(row)
    return found


def _failure(frames: Frames, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Failure:
    case = frames.cases[row["case"]]
    shown = next((each for each in rows if each["stage"] == row["stage"]), rows[0] if rows else None)
    diagnosed = next((each["diagnosis"] for each in rows if isinstance(each.get("diagnosis"), str)), None)
    numbers = _NONE_NAMED if shown is None else {**_numbers_of_row(shown), "diagnosis": diagnosed or None}
    of_implementation = bool(row["implementation"] and row["dtype"])
    return Failure(
        **{key: row[key] for key in (*_KEYS, "verdict", "stage", "message", "rows")},
        **numbers,
        **_of_case(case),
        next=list(commands_again(frames, row, AGAIN)) if of_implementation else [],
    )


def _of_case(case: Mapping[str, Any]) -> dict[str, Any]:
    return {"file": case["file"], "line": case["line"], "shape": shape_text(case), "tags": list(case["tags"])}


def _numbers_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the element that a row names. In frames, what is not there is NaN."""
    against = _text(row.get("against"))
    ratio = row.get("introduced_ratio") if against == "step" else row.get("ratio")
    if _text(row["index"]) is None:
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


def _element(index: object) -> list[int] | None:
    """Read an index; what names no single element is none."""
    text = _text(index)
    if text == "":
        return []
    return [int(axis) for axis in text.split(",")] if text is not None and _ELEMENT.fullmatch(text) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def failure_of(explanation: Explanation, commands: Sequence[str]) -> Failure | None:
    """Return the failure of an explanation; None where nothing is wrong, or where that was expected."""
    unexpected = [stage for stage in explanation.failing_stages if stage not in explanation.expected_failures]
    if not unexpected:
        return None
    judgement = explanation.first_failing
    return Failure(
        implementation=explanation.implementation,
        environment="",
        case=explanation.case.id,
        dtype=explanation.dtype,
        verdict=str(judgement.verdict if judgement else explanation.failure.partition(":")[0]),
        stage=explanation.begins_at,
        **explanation.numbers,
        message=explanation.failure if judgement is None else judgement.message,
        rows=len(unexpected),
        next=list(commands),
        **_of_case(case_record(explanation.case, {})),
    )


def verdict_of(explanation: Explanation) -> str:
    """Return the verdict of the first stage that is wrong, or of the call; agree, or unverified, where nothing is."""
    if explanation.failure:
        return explanation.failure.partition(":")[0]
    judgement = explanation.first_failing
    if judgement is not None:
        return judgement.verdict.value
    verdicts = {each.verdict for each in explanation.judgements}
    return (Verdict.UNVERIFIED if verdicts == {Verdict.UNVERIFIED} else Verdict.AGREE).value


def first_of_each(failures: Iterable[Failure], most: int = 3) -> list[str]:
    """Return the first command of the first failure of each of some implementations."""
    firsts: dict[tuple[str, str], str] = {}
    for each in failures:
        if each.next:
            firsts.setdefault((each.environment, each.implementation), each.next[0])
    return list(firsts.values())[:most]
