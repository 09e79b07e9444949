"""The document of what holds between two calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attncheck.errors import ExitCode
from attncheck.properties.rows import PropertyRow, sentence_of
from attncheck.reports.machine.documents import PropertyRecord
from attncheck.reports.machine.other_documents import PropertiesDocument
from attncheck.reports.machine.text import header
from attncheck.reports.properties import command_for, failing_first


def properties_document(
    rows: Sequence[PropertyRow], again: Mapping[str, Sequence[str]], code: ExitCode, notes: Sequence[str]
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


def property_record(row: PropertyRow, again: Mapping[str, Sequence[str]]) -> PropertyRecord:
    """Return one way in which a property was asked."""
    command = command_for(row, again) if again else ""
    return PropertyRecord(**row.as_record(), fails=row.fails_run, next=[command] if command else [])
