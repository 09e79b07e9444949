"""Failures as every document has them, and the documents of what cases and properties came to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from attncheck.common.errors import ExitCode
from attncheck.common.wording import index_from
from attncheck.reports import json_documents, properties
from attncheck.reports.coverage import coverage, number_counts, padded_cases, unjudged
from attncheck.reports.defects import commands_again, defects, first_commands
from attncheck.reports.failure_patterns import in_common, shape_text
from attncheck.reports.frames import Frames, by_key, failing, once_for_frames, records
from attncheck.reports.summary import findings, make_summary, verdict_table
from attncheck.results.format import FAILURE_NUMBERS, Row

AGAIN = ("explain", "repro")
"""Commands about one case on one implementation that say more of its failure."""
_KEYS = ("case", "dtype", "environment", "implementation")
_ELEMENT = re.compile(r"\d+(?:,\d+)*")
_NONE_NAMED: Mapping[str, Any] = dict.fromkeys(FAILURE_NUMBERS)
_MOST_COMMANDS = 3


def failures_of(frames: Frames, wrong: pd.DataFrame | None = None) -> list[json_documents.Failure]:
    """Return what is wrong, the simplest case first, with the numbers of the element that is worst.

    ``wrong`` are some rows of ``findings``; None is all of them.
    """
    found = findings(frames) if wrong is None else wrong
    rows = _failing_rows(frames)
    return [_failure(frames, row, rows.get(tuple(row[key] for key in _KEYS), [])) for row in records(found)]


@once_for_frames
def _failing_rows(frames: Frames) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Return the rows that fail, by what they are of: of stages, then of numbers, then of pairs."""
    tables = (frames.results, frames.numbers, frames.pairs)
    return by_key((row for frame in tables for row in records(failing(frame))), itemgetter(*_KEYS))


def _failure(frames: Frames, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> json_documents.Failure:
    case = frames.cases[row["case"]]
    shown = next((each for each in rows if each["stage"] == row["stage"]), rows[0] if rows else None)
    diagnosed = next((each["diagnosis"] for each in rows if each.get("diagnosis") is not None), None)
    numbers = _NONE_NAMED if shown is None else {**_numbers_of_row(shown), "diagnosis": diagnosed or None}
    of_implementation = bool(row["implementation"] and row["dtype"])
    return json_documents.Failure(
        **{key: row[key] for key in (*_KEYS, "verdict", "stage", "message", "rows")},
        **numbers,
        **facts_of_case(case),
        next=list(commands_again(frames, row, AGAIN)) if of_implementation else [],
    )


def facts_of_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a failure says of its case."""
    return {"file": case["file"], "line": case["line"], "shape": shape_text(case), "tags": list(case["tags"])}


def _numbers_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
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


def rows_of(frame: pd.DataFrame) -> list[json_documents.Row]:
    """Return a frame's rows; a cell without a value is None."""
    return [{name: None if pd.isna(value) else value for name, value in row.items()} for row in records(frame)]


def first_of_each(failures: Iterable[json_documents.Failure]) -> list[str]:
    """Return the first command of the first failure of each of some implementations."""
    firsts = by_key((each for each in failures if each.next), lambda each: (each.environment, each.implementation))
    return [first.next[0] for first, *_ in firsts.values()][:_MOST_COMMANDS]


def outcome_document(
    frames: Frames, code: ExitCode, *, command: str = "check", report: Path | None = None, results: Path | None = None
) -> json_documents.Outcome:
    """Return what a comparison came to.

    ``report`` is None where none is written, ``results`` where there are several.
    """
    answer = make_summary(frames)
    failures = failures_of(frames)
    padded = padded_cases(frames)
    titles = {column: column.title(with_environment=True) for column in frames.columns}
    asked = properties.property_table(properties.asked_rows(frames))
    broken = properties.broken_properties(frames)
    worst = {name: {title: properties.worst_of(of) for title, of in cells.items()} for name, cells in asked.items()}
    return json_documents.Outcome(
        **json_documents.opening(command, code, answer.word),
        defects=[
            json_documents.DefectRecord.derive(
                each, diagnosis=each.diagnosis or None, dtypes=list(filter(None, each.dtypes))
            )
            for each in defects(frames)
        ],
        failures=failures,
        next=[*first_commands(frames), *(command for _, command in broken[:1] if command)],
        notes=list(frames.notes),
        judged=answer.judged,
        coverage={
            titles[each.column]: json_documents.CoverageRecord.derive(
                each,
                lacks=dict(each.lacks.singly),
                padded=padded[each.column]["case"].nunique() if each.column in padded else 0,
            )
            for each in coverage(frames)
        },
        too_few_judged=list(unjudged(frames)),
        numbers=json_documents.plain(number_counts(frames)),
        sentences=list(answer.sentences),
        stopped={
            label: json_documents.Stopped.derive(asked.stopped)
            for label, asked in frames.asked.items()
            if asked.stopped
        },
        in_common=[
            json_documents.InCommon.derive(each, text=each.text(with_environment=False), counted=f"{each.noun}s")
            for each in in_common(frames)
        ],
        verdicts={
            case: {titles[column]: words.replace("**", "") for column, words in cells.items()}
            for case, cells in verdict_table(frames).items()
        },
        properties={
            name: {title: row.verdict if row else "-" for title, row in cells.items()} for name, cells in worst.items()
        },
        broken_properties=[_property_record(*each) for each in broken],
        report=None if report is None else str(report),
        html=None if report is None else str(report.with_suffix(".html")),
        results=None if results is None else str(results),
    )


def properties_document(
    rows: Sequence[Row], again: Mapping[str, Sequence[str]], code: ExitCode, notes: Sequence[str]
) -> json_documents.PropertiesDocument:
    """Return every way in which properties were asked; ``again`` names implementations on a command line."""
    commands = (properties.command_for(row, again) for row in properties.failing_first(rows)[:1])
    return json_documents.PropertiesDocument(
        **json_documents.opening("properties", code, properties.sentence_of(rows)),
        next=[each for each in commands if each],
        notes=list(notes),
        properties=[_property_record(row, properties.command_for(row, again) if row.fails_run else "") for row in rows],
    )


def _property_record(row: Row, command: str) -> json_documents.PropertyRecord:
    return json_documents.PropertyRecord.derive(row, next=[command] if command else [])
