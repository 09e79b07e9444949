"""A validator's complaints, said to the person who wrote the file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from attncheck.harness import case_model
from attncheck.harness.errors import Fault
from attncheck.harness.yaml_reader import FieldPath, YamlDocument

MOST_FAULTS = 5


class FieldFault(Exception):
    """A fault at a field of the file that is being read."""

    def __init__(self, path: FieldPath, message: str) -> None:
        super().__init__(message)
        self.path = path


def faults_of(error: ValidationError, file: str, document: YamlDocument) -> list[Fault]:
    """Turn a validator's errors into faults with file, line, case and field."""
    details = error.errors(include_url=False)
    faults = [fault_at(detail["loc"], _say(detail), file, document) for detail in details]
    # One mistake can break several alternatives; each place is named once.
    unique = list({(fault.line, fault.field): fault for fault in reversed(faults)}.values())[::-1]
    if len(unique) > MOST_FAULTS:
        rest = Fault(file, f"and {len(unique) - MOST_FAULTS} more faults")
        unique = [*unique[:MOST_FAULTS], rest]
    return unique


def fault_at(path: FieldPath, message: str, file: str, document: YamlDocument) -> Fault:
    """Return a fault at a field of a file, or at the closest field around it that exists."""
    found, line = document.locate(path)
    if path and isinstance(path[-1], str) and path[-1] not in found and "missing" in message:
        found = (*found, path[-1])
    return Fault(file, message, line, _case_name(found, document.data), _dotted(found))


def _case_name(path: FieldPath, data: Any) -> str | None:
    match path:
        case ("cases", int(number), *_):
            entry = data["cases"][number]
            name = entry.get("name") if isinstance(entry, dict) else None
            return name if isinstance(name, str) and name else f"number {number + 1}"
    return None


def _dotted(path: FieldPath) -> str | None:
    """Write a path as inputs.query.values[0]; the case itself is named apart."""
    if path[:1] == ("cases",) and len(path) > 1:
        path = path[2:]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or None


def _say(detail: ErrorDetails) -> str:
    got = _short(detail["input"])
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown field{_suggest(str(detail['loc'][-1]))}"
        case "missing":
            return "this field is missing"
        case "literal_error":
            return f"expected {detail['ctx']['expected']}, got {got}"
        case "array_kind":
            return f"{detail['msg']}, got {got}"
        case "string_type" if isinstance(detail["input"], int | float):
            return f"expected text in quotes, got {got}: a bare number would lose its last digits"
        case "string_pattern_mismatch":
            return f"expected a name that matches {detail['ctx']['pattern']}, got {got}"
    message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    expected = f"expected {message}" if detail["msg"].startswith("Input should be ") else message
    return f"{expected}, got {got}"


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, _all_fields(), n=1)
    return f"; did you mean {close[0]}?" if close else "; see `attncheck schema` for the fields that exist"


def _all_fields() -> Iterable[str]:
    models = [item for item in vars(case_model).values() if isinstance(item, type) and issubclass(item, BaseModel)]
    return sorted({field for model in models for field in model.model_fields})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
