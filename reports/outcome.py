"""The JSON documents of the outcomes of cases and properties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from attncheck.common.errors import ExitCode
from attncheck.reports import json_documents, properties
from attncheck.reports.coverage import count_printed_numbers, coverage_by_column, padded_cases, shortfall_lines
from attncheck.reports.defects import find_defects, first_commands
from attncheck.reports.document_model import plain_text
from attncheck.reports.failure_patterns import confirmed_patterns
from attncheck.reports.failures import find_failures
from attncheck.reports.frames import Frames, group_by_key, to_records
from attncheck.reports.summary import make_summary, verdict_table
from attncheck.results.format import Row

_MAX_COMMANDS = 3


def to_json_rows(frame: pd.DataFrame) -> list[json_documents.Row]:
    """Return a frame's rows; a cell without a value is None."""
    return [{name: None if pd.isna(value) else value for name, value in row.items()} for row in to_records(frame)]


def first_command_of_each(failures: Iterable[json_documents.Failure]) -> list[str]:
    """Return the first command of the first failure of each of some implementations."""
    with_commands = (failure for failure in failures if failure.next)
    firsts = group_by_key(with_commands, lambda failure: (failure.environment, failure.implementation))
    return [first.next[0] for first, *_ in firsts.values()][:_MAX_COMMANDS]


def outcome_document(
    frames: Frames, code: ExitCode, *, command: str = "check", report: Path | None = None, results: Path | None = None
) -> json_documents.Outcome:
    """Return the outcome of a comparison.

    ``report`` is None if none is written, ``results`` if there are several.
    """
    answer = make_summary(frames)
    padded = padded_cases(frames)
    titles = {column: column.title(with_environment=True) for column in frames.columns}
    asked = properties.group_by_property(properties.property_rows(frames))
    broken = properties.broken_properties(frames)
    worst = {
        name: {title: properties.worst_row(rows) for title, rows in cells.items()} for name, cells in asked.items()
    }
    return json_documents.Outcome(
        **json_documents.opening_fields(command, code, answer.word),
        defects=[
            json_documents.DefectRecord.derive(
                defect, diagnosis=defect.diagnosis or None, dtypes=list(filter(None, defect.dtypes))
            )
            for defect in find_defects(frames)
        ],
        failures=find_failures(frames),
        next=[*first_commands(frames), *(command for _, command in broken[:1] if command)],
        notes=list(frames.notes),
        judged=answer.judged,
        coverage={
            titles[entry.column]: json_documents.CoverageRecord.derive(
                entry,
                lacks=dict(entry.lacks.missing_feature_counts),
                padded=padded[entry.column]["case"].nunique() if entry.column in padded else 0,
            )
            for entry in coverage_by_column(frames)
        },
        too_few_judged=list(shortfall_lines(frames)),
        numbers=json_documents.to_plain_data(count_printed_numbers(frames)),
        sentences=list(answer.sentences),
        stopped={
            label: json_documents.Stopped.derive(asked.stopped)
            for label, asked in frames.requests.items()
            if asked.stopped
        },
        in_common=[
            json_documents.InCommon.derive(
                pattern, text=pattern.text(with_environment=False), counted=f"{pattern.noun}s"
            )
            for pattern in confirmed_patterns(frames)
        ],
        verdicts={
            case: {titles[column]: plain_text(words) for column, words in cells.items()}
            for case, cells in verdict_table(frames).items()
        },
        properties={
            name: {title: row.verdict if row else "-" for title, row in cells.items()} for name, cells in worst.items()
        },
        broken_properties=[_property_record(*item) for item in broken],
        report=None if report is None else str(report),
        html=None if report is None else str(report.with_suffix(".html")),
        results=None if results is None else str(results),
    )


def properties_document(
    rows: Sequence[Row], again: Mapping[str, Sequence[str]], code: ExitCode, notes: Sequence[str]
) -> json_documents.PropertiesDocument:
    """Return every test of a property; ``again`` has the words that name an implementation on a command line."""
    commands = (properties.explain_command(row, again) for row in properties.worst_failing_rows(rows)[:1])
    return json_documents.PropertiesDocument(
        **json_documents.opening_fields("properties", code, properties.properties_sentence(rows)),
        next=[item for item in commands if item],
        notes=list(notes),
        properties=[
            _property_record(row, properties.explain_command(row, again) if row.fails_run else "") for row in rows
        ],
    )


def _property_record(row: Row, command: str) -> json_documents.PropertyRecord:
    return json_documents.PropertyRecord.derive(row, next=[command] if command else [])
