"""Documents as JSON: numbers that JSON has not are texts, and every text can be encoded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from attncheck.errors import AttncheckError, CaseError, ExitCode
from attncheck.reports.machine.documents import SCHEMA, Document, ErrorDocument, ErrorRecord, Fault, Header

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Numbers that JSON cannot hold, as texts; float() of Python and Number() of JavaScript read them."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def header(command: str) -> Header:
    """Say what prints a document."""
    from importlib.metadata import version

    return Header(version=version("attncheck"), schema=SCHEMA, command=command)


def document_text(document: Document) -> str:
    """Return a document as JSON, with a line break at its end."""
    # Half of a character, of a file's name that is no Unicode: nothing but an escape can hold it.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", _written(plain(document), "\n")) + "\n"


def _written(value: Any, line_break: str) -> str:
    """Write plain data, indented; numbers and texts of one list stand on one line, so that a row is a line."""
    inner = f"{line_break}  "
    if isinstance(value, dict) and value:
        entries = (f"{_scalar(key)}: {_written(each, inner)}" for key, each in value.items())
        return f"{{{inner}{f',{inner}'.join(entries)}{line_break}}}"
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return f"[{inner}{f',{inner}'.join(_written(each, inner) for each in value)}{line_break}]"
    return f"[{', '.join(map(_scalar, value))}]" if isinstance(value, list) else _scalar(value)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Return records, mappings and sequences as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, float):
        return plain_number(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    return value


def plain_number(value: float) -> float | str:
    """Return a number, as a text where it is not finite."""
    if math.isfinite(value):
        return value
    return NOT_FINITE[0] if math.isnan(value) else NOT_FINITE[1 if value > 0 else 2]


def error_document(command: str, error: AttncheckError) -> ErrorDocument:
    """Return what a command prints that ends with an error."""
    found = error.faults if isinstance(error, CaseError) else []
    faults = [
        Fault(file=each.file, line=each.line, case=each.case, field=each.field, message=each.message) for each in found
    ]
    return error_of(command, type(error).__name__, str(error), error.exit_code, faults)


def error_of(
    command: str, kind: str, message: str, code: int = ExitCode.BAD_INPUT, faults: Sequence[Fault] = ()
) -> ErrorDocument:
    """Return what a command prints that has no outcome, of an error of any kind."""
    return ErrorDocument(
        attncheck=header(command),
        exit_code=int(code),
        answer=message.split("\n", 1)[0],
        failures=[],
        next=[],
        notes=[],
        error=ErrorRecord(kind=kind, message=message, faults=faults),
    )
