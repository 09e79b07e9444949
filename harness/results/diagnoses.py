"""A run's failing rows, written again when it is known what the implementations do instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from attncheck.results.format import ROW_SCHEMA, Row

Identity: TypeAlias = tuple[Any, ...]
_OF_IDENTITY = (
    *("implementation", "case", "dtype", "comparison", "stage", "other", "called", "index"),
    *("verdict", "message", "reference_text"),
)
_CHANGED = ("verdict", "message", "begins_at", "empty_rows", "diagnosis", "evidence")


def identity_of(row: Row) -> Identity:
    """Return what a row is found by on disk, as it was first written; rows that share it read alike."""
    return tuple(None if (value := getattr(row, name)) is None else str(value) for name in _OF_IDENTITY)


def change_rows(directory: Path, changed: Mapping[Identity, Row]) -> None:
    """Write in the parts on disk what has changed of rows, each part renamed into place when it is whole."""
    changed = {identity: row for identity, row in changed.items() if _says_more(identity, row)}
    for path in sorted((directory / "rows").glob("part-*.parquet")) if changed else ():
        table = pq.read_table(path, schema=ROW_SCHEMA)
        identities = zip(*(table[name].to_pylist() for name in _OF_IDENTITY), strict=True)
        found = {number: changed[each] for number, each in enumerate(identities) if each in changed}
        if not found:
            continue
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


def _says_more(identity: Identity, row: Row) -> bool:
    return identity_of(row) != identity or row.diagnosis is not None or row.evidence is None
