"""Rows of properties on disk: one table beside the rows of a run, in CSV, as text and numbers in full."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from attncheck.errors import ExitCode, OutputError, ResultsError
from attncheck.properties.rows import COLUMNS, PropertyOutcome, PropertyRow
from attncheck.results.format import PROPERTIES_TABLE
from attncheck.spec.properties import CLAIMS, PROPERTIES

_MAX_BYTES = 1 << 28


def write_property_rows(directory: Path, rows: Sequence[PropertyRow]) -> Path:
    """Write the rows of a run beside its others. Raises ``OutputError``."""
    path = directory / PROPERTIES_TABLE
    unfinished = path.with_suffix(".part")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({name: _text(value) for name, value in row.as_record().items()} for row in rows)
        unfinished.replace(path)
    except OSError as error:
        raise OutputError.of(path, error) from None
    return path


def read_property_rows(directory: Path) -> list[PropertyRow]:
    """Read the rows of a run; none where it asked for no properties. Raises ``ResultsError``."""
    path = directory / PROPERTIES_TABLE
    if path.is_symlink() or not path.is_file():
        return []
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ResultsError(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ResultsError(f"{path}: expected the columns {', '.join(COLUMNS)}")
            return [_row(record) for record in reader]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None


def note_exit_code(directory: Path, code: ExitCode) -> None:
    """Let the summary of a run say what the run came to with its properties. Raises ``OutputError``."""
    path = directory / "summary.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        unfinished = path.with_suffix(".part")
        unfinished.write_text(
            json.dumps({**content, "exit_code": int(code)}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        unfinished.replace(path)
    except OSError as error:
        raise OutputError.of(path, error) from None


def _text(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _flag(text: str) -> bool:
    return {"True": True, "False": False}[text]


_READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "bool": _flag,
    "int": int,
    "float | None": lambda text: float(text) if text else None,
}


def _row(record: Mapping[str, str]) -> PropertyRow:
    row = PropertyRow(**{each.name: _READ[str(each.type)](record[each.name]) for each in fields(PropertyRow)})
    if row.property_name not in PROPERTIES or row.claim not in ("", *CLAIMS):
        raise ValueError(f"an unknown property or claim: {row.property_name} {row.claim}")
    PropertyOutcome(row.outcome)
    return row
