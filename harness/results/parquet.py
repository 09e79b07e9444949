"""Parts that earlier versions wrote, in Parquet: read if pyarrow is installed, which nothing else here needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from attncheck.common.errors import ResultsError
from attncheck.common.wording import one_line
from attncheck.results.tables import ColumnKind, ColumnValues, DamagedError, RowTable, Schema

_ARRAY_COLUMNS = ("case", "dtype", "implementation", "stage", "array_dtype", "shape", "data")
_MAX_GROUPS = 100
"""Of one part, which a run wrote in one: each is read by itself."""


def has_pyarrow() -> bool:
    """Return true if pyarrow can be imported."""
    return find_spec("pyarrow") is not None


def require_pyarrow(directory: Path) -> None:
    """Raise ``ResultsError`` if results in Parquet cannot be read here, and say what to install."""
    if not has_pyarrow():
        raise ResultsError(
            f"{directory} holds Parquet, which an earlier attncheck wrote; to read it, install pyarrow: "
            "pip install 'attncheck[parquet]'"
        )


def read_parquet_rows(path: Path, schema: Schema, most_bytes: int, most_rows: int) -> RowTable:
    """Read a part of rows. Raises ``UNREADABLE``."""
    with _ParquetPart(path, most_bytes, most_rows) as part:
        table = part.read(range(part.groups), tuple(schema))
    columns = {name: _values(name, table[name], kind) for name, kind in schema.items()}
    return RowTable(columns, sum(map(_spread_bytes, table.itercolumns())))


def read_parquet_keys(path: Path, most_bytes: int, most_rows: int) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Give the case and dtype of the arrays of a part, row group by row group. Raises ``UNREADABLE``."""
    with _ParquetPart(path, most_bytes, most_rows) as part:
        for group in range(part.groups):
            table = part.read([group], ("case", "dtype"), of=_ARRAY_COLUMNS)
            yield (
                group,
                [
                    (one_line(case), one_line(dtype))
                    for case, dtype in zip(*(table[name].to_pylist() for name in ("case", "dtype")), strict=True)
                ],
            )


def read_parquet_arrays(path: Path, group: int, most_bytes: int, most_rows: int) -> list[dict[str, Any]]:
    """Return the arrays of a row group as records of names, shape and ``data``. Raises ``UNREADABLE``."""
    with _ParquetPart(path, most_bytes, most_rows) as part:
        records: list[dict[str, Any]] = part.read([group], _ARRAY_COLUMNS).to_pylist()
    if any(value is None for record in records for value in record.values()):
        raise DamagedError("an array has no name, shape or data")
    return [{name: one_line(of) if isinstance(of, str) else of for name, of in record.items()} for record in records]


class _ParquetPart:
    """A file of Parquet, whose own exceptions become ``DamagedError``."""

    def __init__(self, path: Path, most_bytes: int, most_rows: int) -> None:
        if not path.is_file():
            raise DamagedError("it is no regular file")
        self._path, self._most_bytes, self._most_rows = path, most_bytes, most_rows

    def __enter__(self) -> _ParquetPart:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._errors = pa.ArrowException
        with self._path.open("rb") as file:
            try:
                schema = pq.read_schema(file)
            except pa.ArrowException as error:
                raise DamagedError(str(error)) from None
        texts = [each.name for each in schema if pa.types.is_string(each.type) or pa.types.is_binary(each.type)]
        self._file = pq.ParquetFile(self._path, read_dictionary=texts)  # a text of many rows is in memory once
        self.groups = self._file.num_row_groups
        if self.groups > _MAX_GROUPS:
            self._file.close()
            raise DamagedError(f"it has {self.groups} row groups; expected at most {_MAX_GROUPS}")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, groups: Iterable[int], names: Sequence[str], of: Sequence[str] = ()) -> Any:
        """Read row groups, unless they would be far larger in memory than anything that a run writes."""
        if absent := {*names, *of} - set(self._file.schema_arrow.names):
            raise DamagedError(f"it has no column {min(absent)}")
        groups = list(groups)
        read = [self._file.metadata.row_group(group) for group in groups]
        if (rows := sum(group.num_rows for group in read)) > self._most_rows:
            raise DamagedError(f"it has {rows} rows; expected at most {self._most_rows}")
        unpacked = sum(group.total_byte_size for group in read)  # asking a damaged column for its size ends the process
        try:
            if unpacked <= self._most_bytes:
                table = self._file.read_row_groups(groups, columns=list(names))
                table.validate(full=True)  # a damaged text would only be noticed where it is shown
                unpacked = sum(map(_spread_bytes, table.itercolumns()))
        except self._errors as error:
            raise DamagedError(str(error)) from None
        if unpacked > self._most_bytes:
            raise DamagedError(f"it would take {unpacked} bytes of memory; expected at most {self._most_bytes}")
        return table


def _spread_bytes(column: Any) -> int:
    """Return how many bytes a column takes once every row has its own text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = (pc.binary_length(chunk.dictionary).take(chunk.indices) for chunk in column.chunks)
    return sum(pc.sum(pc.cast(each, pa.int64())).as_py() or 0 for each in lengths)


def _values(name: str, column: Any, kind: ColumnKind) -> ColumnValues:
    import pyarrow as pa

    types = {"text": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
    if column.null_count and not kind.nullable:
        raise DamagedError(f"it has no {name} where there must be one")
    try:
        column = column.cast(types[kind.type])
    except pa.ArrowException as error:
        raise DamagedError(f"its {name}: {error}") from None
    if kind.type == "text":
        return ColumnValues(np.array([*column.to_pylist(), None], object)[:-1])
    null = column.is_null().to_numpy() if column.null_count else None
    return ColumnValues(column.fill_null(0).to_numpy() if column.null_count else column.to_numpy(), null)
