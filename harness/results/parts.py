"""Parquet parts of a results directory, read one by one: a damaged one is named and left out, and the rest is there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from attncheck.harness.errors import ResultsError
from attncheck.harness.reading.dtypes import numpy_dtype
from attncheck.harness.results.format import ARRAY_SCHEMA, ROW_SCHEMA, ComparisonKind
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import DTYPES

ArrayKey = tuple[str, str, str, str]
"""case, dtype, implementation, stage"""

_WORDS = {"verdict": list(Verdict), "comparison": list(get_args(ComparisonKind)), "dtype": list(DTYPES)}
_INDEX = r"^([0-9]+(,[0-9]+)*)?$"
_GROUPS_IN_MEMORY = 2
"""Row groups that stay read: a case's arrays lie together, and so do those of the case that is asked for next."""


class _DamagedError(Exception):
    """A part that does not hold what a run writes."""


_UNREADABLE = (OSError, KeyError, ValueError, MemoryError, pa.ArrowException, _DamagedError)


def read_rows(directory: Path) -> tuple[pa.Table, tuple[str, ...]]:
    """Read the rows of a results directory; return them with a note for every part that cannot be read."""
    tables, notes = [ROW_SCHEMA.empty_table()], []
    for path in sorted((directory / "rows").glob("part-*.parquet")):
        try:
            tables.append(_read_rows_part(path))
        except _UNREADABLE as error:
            notes.append(f"{path} cannot be read, its rows are left out: {_shortly(error)}")
    return pa.concat_tables(tables), tuple(notes)


def remove_damaged(directory: Path) -> None:
    """Remove the parts that cannot be read, and what was not yet renamed into place."""
    for kind, read in (("rows", _read_rows_part), ("arrays", lambda path: list(_keys_of(path)))):
        for path in (directory / kind).glob("*.parquet*"):
            try:
                whole = path.name.startswith("part-") and read(path) is not None
            except _UNREADABLE:
                whole = False
            if not whole:
                path.unlink(missing_ok=True)


def _read_rows_part(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        table = _checked(file.read(columns=ROW_SCHEMA.names), ROW_SCHEMA)
    for name, words in _WORDS.items():
        strange = pc.unique(table[name]).to_pylist()
        if odd := sorted(set(map(str, strange)) - set(map(str, words))):
            raise _DamagedError(f"it has the {name} {odd[0]!r}, which this version does not know")
    if not pc.all(pc.match_substring_regex(pc.drop_null(table["index"]), _INDEX), min_count=0).as_py():
        raise _DamagedError("it has an index that is no list of whole numbers")
    return table


def _checked(table: pa.Table, schema: pa.Schema) -> pa.Table:
    table = table.select(schema.names).cast(schema)
    table.validate(full=True)  # a damaged text would only be noticed where it is shown
    for column in schema:
        if not column.nullable and table[column.name].null_count:
            raise _DamagedError(f"it has no {column.name} where there must be one")
    return table


class _Place(NamedTuple):
    """Where one array is kept: which part, which row group of it, which row there."""

    path: Path
    group: int
    row: int


@dataclass(frozen=True)
class ArrayParts:
    """The arrays that one run kept, read when they are asked for; only their names are read before."""

    directory: Path
    _groups: OrderedDict[tuple[Path, int], pa.Table] = field(default_factory=OrderedDict, repr=False, compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What cannot be read, a line for every part."""
        return self._index[1]

    def units(self) -> list[tuple[str, str]]:
        """Return the (case, dtype) of which something was kept, in the order of their parts."""
        return list(self._index[0])

    def of(self, case: str, dtype: str) -> dict[tuple[str, str], NDArray[Any]]:
        """Return what was kept of one case in one dtype, by implementation and stage; arrays are read-only.

        Raises ``ResultsError`` where it cannot be read after all.
        """
        found = {}
        for place in self._index[0].get((case, dtype), ()):
            record = self._group(place.path, place.group).slice(place.row, 1).to_pylist()[0]
            key = (case, dtype, record["implementation"], record["stage"])
            found[key[2], key[3]] = decode_array(record, key, place.path)
        return found

    @cached_property
    def _index(self) -> tuple[Mapping[tuple[str, str], list[_Place]], tuple[str, ...]]:
        places: dict[tuple[str, str], list[_Place]] = {}
        notes = []
        for path in sorted((self.directory / "arrays").glob("part-*.parquet")):
            try:
                keys = list(_keys_of(path))
            except _UNREADABLE as error:
                notes.append(f"{path} cannot be read, its arrays are left out: {_shortly(error)}")
                continue
            for key, place in keys:
                places.setdefault(key, []).append(place)
        return places, tuple(notes)

    def _group(self, path: Path, group: int) -> pa.Table:
        if (path, group) not in self._groups:
            try:
                with pq.ParquetFile(path) as file:
                    table = file.read_row_group(group, columns=ARRAY_SCHEMA.names)
                self._groups[path, group] = _checked(table, ARRAY_SCHEMA)
            except _UNREADABLE as error:
                raise ResultsError(f"{path} cannot be read: {_shortly(error)}") from None
            while len(self._groups) > _GROUPS_IN_MEMORY:
                self._groups.popitem(last=False)
        self._groups.move_to_end((path, group))
        return self._groups[path, group]


def _keys_of(path: Path) -> Iterator[tuple[tuple[str, str], _Place]]:
    """Read the case and dtype of every array of a part, row group by row group, and nothing else."""
    with pq.ParquetFile(path) as file:
        if absent := set(ARRAY_SCHEMA.names) - set(file.schema_arrow.names):
            raise _DamagedError(f"it has no column {min(absent)}")
        for group in range(file.num_row_groups):
            keys = file.read_row_group(group, columns=["case", "dtype"])
            for row, key in enumerate(zip(keys["case"].to_pylist(), keys["dtype"].to_pylist(), strict=True)):
                yield key, _Place(path, group, row)


def decode_array(row: Mapping[str, Any], key: ArrayKey, path: Path) -> NDArray[Any]:
    """Return the array that a row of ``ARRAY_SCHEMA`` holds; ``path`` says where it stands."""
    try:
        return np.frombuffer(row["data"], dtype=numpy_dtype(row["array_dtype"])).reshape(row["shape"])
    except (TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"{path}: the array {' '.join(key)} cannot be read: {error}") from None


def _shortly(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
