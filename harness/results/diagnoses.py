"""A run's failing rows, written again when it is known what the implementations do instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from attncheck.errors import OutputError
from attncheck.results.format import ROW_SCHEMA, Row
from attncheck.verdicts import Verdict

Identity: TypeAlias = tuple[Any, ...]
_OF_IDENTITY = (
    *("implementation", "case", "dtype", "comparison", "stage", "other", "called", "index"),
    *("verdict", "message", "reference_text"),
)
_CHANGED = ("verdict", "message", "begins_at", "empty_rows", "diagnosis", "evidence")
_CHANGEABLE = [Verdict.NUMERIC.value, Verdict.NONFINITE.value, Verdict.SEMANTIC.value]


def identity_of(row: Row) -> Identity:
    """Return what a row is found by on disk, as it was first written; rows that share it read alike."""
    return tuple(None if (value := getattr(row, name)) is None else str(value) for name in _OF_IDENTITY)


def change_rows(directory: Path, changed: Mapping[Identity, Row]) -> None:
    """Write in the parts on disk what has changed of failing rows; a part is renamed into place when it is whole."""
    changed = {identity: row for identity, row in changed.items() if identity_of(row) != identity}
    for path in sorted((directory / "rows").glob("part-*.parquet")) if changed else ():
        try:
            _change_part(path, changed)
        except OSError as error:
            raise OutputError.of(path, error) from None


def _change_part(path: Path, changed: Mapping[Identity, Row]) -> None:
    table = pq.read_table(path, schema=ROW_SCHEMA)
    numbers = np.flatnonzero(pc.is_in(table["verdict"], pa.array(_CHANGEABLE)).to_numpy())
    failing = table.select(_OF_IDENTITY).take(pa.array(numbers))
    identities = zip(*(failing[name].to_pylist() for name in _OF_IDENTITY), strict=True)
    found = {int(number): changed[each] for number, each in zip(numbers, identities, strict=True) if each in changed}
    if not found:
        return
    for name in _CHANGED:
        values = table[name].to_pylist()
        for number, row in found.items():
            value = getattr(row, name)
            values[number] = None if value is None else str(value)
        column = ROW_SCHEMA.field(name)
        table = table.set_column(ROW_SCHEMA.get_field_index(name), column, pa.array(values, column.type))
    temporary = path.with_name(f".{path.name}.partial")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)
