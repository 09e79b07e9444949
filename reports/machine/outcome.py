"""The document of a report: what check, report and vectors verify print.

The document of what holds between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attncheck.errors import ExitCode
from attncheck.properties.rows import sentence_of
from attncheck.reports.commands import first_commands
from attncheck.reports.coverage import judged_counts, unjudged
from attncheck.reports.defects import Defect, defects
from attncheck.reports.failure_patterns import InCommon as Found
from attncheck.reports.failure_patterns import in_common
from attncheck.reports.frames import Frames, property_columns
from attncheck.reports.machine.documents import CoverageRecord, DefectRecord, InCommon, Outcome, PropertyRecord, Stopped
from attncheck.reports.machine.failures import failures_of
from attncheck.reports.machine.other_documents import PropertiesDocument
from attncheck.reports.machine.text import header
from attncheck.reports.printed_numbers import number_counts
from attncheck.reports.properties import (
    asked_rows,
    broken_properties,
    command_for,
    failing_first,
    property_table,
    words_by_title,
)
from attncheck.reports.summary import make_summary, verdict_table
from attncheck.results.format import Row


def outcome_document(
    frames: Frames, code: ExitCode, *, command: str = "check", report: Path | None = None, results: Path | None = None
) -> Outcome:
    """Return what a comparison came to.

    ``report`` is None where none is written, ``results`` where there are several.
    """
    answer = make_summary(frames)
    failures = failures_of(frames)
    titles = {column: column.title(with_environment=True) for column in frames.columns}
    broken, again = broken_properties(frames), words_by_title(frames)
    return Outcome(
        attncheck=header(command),
        exit_code=int(code),
        answer=answer.word,
        defects=[_defect(each) for each in defects(frames)],
        failures=failures,
        next=[*first_commands(frames), *(each.command for each in broken[:1] if each.command)],
        notes=list(frames.notes),
        judged=answer.judged,
        coverage={titles[column]: _coverage(counts) for column, counts in judged_counts(frames).items()},
        too_few_judged=list(unjudged(frames)),
        numbers=asdict(number_counts(frames)),
        sentences=list(answer.sentences),
        stopped={label: Stopped(**asdict(asked.stopped)) for label, asked in frames.asked.items() if asked.stopped},
        in_common=[_in_common(each) for each in in_common(frames)],
        verdicts={
            case: {titles[column]: words.replace("**", "") for column, words in cells.items()}
            for case, cells in verdict_table(frames).items()
        },
        properties=_properties(frames),
        broken_properties=[property_record(each.row, again) for each in broken],
        report=None if report is None else str(report),
        html=None if report is None else str(report.with_suffix(".html")),
        results=None if results is None else str(results),
    )


def _defect(found: Defect) -> DefectRecord:
    return DefectRecord(
        environment=found.row["environment"],
        implementation=found.row["implementation"],
        verdict=found.row["verdict"],
        stage=found.row["stage"],
        diagnosis=found.diagnosis or None,
        text=found.text,
        cases=list(found.cases),
        dtypes=[dtype for dtype in found.dtypes if dtype],
        evaluations=found.evaluations,
    )


def _coverage(counts: Any) -> CoverageRecord:
    return CoverageRecord(**counts)


def _properties(frames: Frames) -> dict[str, dict[str, str]]:
    """Return what each property comes to on each implementation; nothing where none was asked."""
    table = property_table(asked_rows(frames))
    return {
        line.name: dict(zip(table.columns, (cell.word for cell in line.cells), strict=True)) for line in table.lines
    }


def _in_common(found: Found) -> InCommon:
    return InCommon(
        environment=found.column.environment,
        implementation=found.column.implementation,
        text=found.text(with_environment=False),
        where=found.where,
        failing=found.failing,
        of=found.holding,
        passing_elsewhere=found.passing_elsewhere,
        counted=f"{found.noun}s",
    )


def properties_document(
    rows: Sequence[Row], again: Mapping[str, Sequence[str]], code: ExitCode, notes: Sequence[str]
) -> PropertiesDocument:
    """Return every way in which properties were asked; ``again`` names implementations on a command line."""
    commands = (command_for(row, again) for row in failing_first(rows)[:1])
    return PropertiesDocument(
        attncheck=header("properties"),
        exit_code=int(code),
        answer=sentence_of(rows),
        failures=[],
        next=[each for each in commands if each],
        notes=list(notes),
        properties=[property_record(row, again if row.fails_run else {}) for row in rows],
    )


def property_record(row: Row, again: Mapping[str, Sequence[str]]) -> PropertyRecord:
    """Return one way in which a property was asked."""
    command = command_for(row, again) if again else ""
    return PropertyRecord(**property_columns(row), fails=row.fails_run, next=[command] if command else [])
