"""Parquet parts of a results directory, read one by one: a damaged one is named and left out, and the rest is there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from attncheck.dtypes import numpy_dtype
from attncheck.errors import ResultsError
from attncheck.results.format import ARRAY_SCHEMA, PROPERTY_PART, ROW_SCHEMA, ComparisonKind, Row
from attncheck.results.writer import write_table
from attncheck.spec import CLAIMS, DTYPES, PROPERTIES
from attncheck.verdicts import PropertyOutcome, Verdict
from attncheck.wording import LONGEST_TEXT, UNPRINTABLE, one_line

ArrayKey = tuple[str, str, str, str]
"""case, dtype, implementation, stage"""

_NUMBERS = frozenset("biufc")
"""NumPy's kinds of dtypes that an implementation may return, beside those that NumPy lacks."""
_WORDS: Mapping[str, Sequence[str]] = {
    "verdict": list(Verdict),
    "comparison": [kind for kind in get_args(ComparisonKind) if kind != "property"],
    "dtype": list(DTYPES),
}
_PROPERTY_WORDS: Mapping[str, Sequence[str]] = {
    "verdict": list(PropertyOutcome),
    "comparison": ["property"],
    "dtype": list(DTYPES),
    "property_name": list(PROPERTIES),
    "claim": ["", *CLAIMS],
}
_INDEX = r"^([0-9]{1,18}(,[0-9]{1,18})*)?$"
_SHAPE = r"^(scalar|[0-9]{1,18}(x[0-9]{1,18})*)?$"
_COUNTS = [column.name for column in ROW_SCHEMA if pa.types.is_integer(column.type)]
_MAX_COUNTED = 2**53
"""Beyond it, a count is no whole number in the frames of a report."""
_GROUPS_IN_MEMORY = 2
"""Row groups that stay read: a case's arrays lie together, and so do those of the case that is asked for next."""


_MAX_ROWS = 1_000_000
"""Of one part. A run writes some fifty thousand; a few kilobytes can hold as many as they like, all of them alike."""
_MAX_PROPERTY_ROWS = 200_000
"""Of a run, as objects: a run of all implementations asks some ten thousand."""
_MAX_GROUPS = 100
"""Of one part, which a run writes in one: each is read by itself."""
_MAX_BYTES = {"rows": 2**30, "arrays": 2**32}
"""Of one part of rows, or of one row group of arrays, as it lies in memory."""
_MAX_BYTES_TOGETHER = 2**32
"""Of all parts of rows: some ten million of them."""


class _DamagedError(Exception):
    """A part that does not hold what a run writes."""


_UNREADABLE = (OSError, KeyError, ValueError, MemoryError, pa.ArrowException, _DamagedError)


def read_rows(directory: Path) -> tuple[pa.Table, tuple[str, ...]]:
    """Read the rows of a results directory; return them with a note for every part that cannot be read."""
    tables, notes, size = [ROW_SCHEMA.empty_table()], [], 0
    for path in sorted((directory / "rows").glob("part-*.parquet")):
        try:
            table = _read_rows_part(path)
            if size + table.nbytes > _MAX_BYTES_TOGETHER:
                raise _DamagedError("with the parts before, more rows than a report can hold")
            size += table.nbytes
            tables.append(table)
        except _UNREADABLE as error:
            notes.append(f"{path} cannot be read, its rows are left out: {_shortly(error)}")
    return pa.concat_tables(tables), tuple(notes)


def read_property_rows(directory: Path) -> list[Row]:
    """Read what a run found of properties; none where it asked for none. Raises ``ResultsError`` where it is damaged.

    Not as a frame, in which NaN and no number at all would be one.
    """
    path = directory / PROPERTY_PART
    if not path.exists():
        return []
    try:
        table = _read_rows_part(path, _PROPERTY_WORDS)
        if table.num_rows > _MAX_PROPERTY_ROWS:
            raise _DamagedError(f"it has {table.num_rows} rows; expected at most {_MAX_PROPERTY_ROWS}")
        return [Row(**record) for record in table.to_pylist()]
    except _UNREADABLE as error:
        raise ResultsError(f"{path} cannot be read: {_shortly(error)}") from None


def release_memory() -> None:
    """Give back what pyarrow keeps for later: of a hundred thousand rows, more than they take themselves."""
    pa.default_memory_pool().release_unused()


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


def remove_units(directory: Path, of_row: pc.Expression) -> None:
    """Remove every row of a case in a dtype of which one row is such, so that it is computed again."""
    for path in sorted((directory / "rows").glob("part-*.parquet")):
        table = _read_rows_part(path)
        found = table.filter(of_row).select(["case", "dtype"])
        if not found.num_rows:
            continue
        (directory / "summary.json").unlink(missing_ok=True)  # first: the run is not complete any more
        kept = table.join(found.group_by(["case", "dtype"]).aggregate([]), ["case", "dtype"], join_type="left anti")
        write_table(path, kept.select(ROW_SCHEMA.names).cast(ROW_SCHEMA))


def _read_rows_part(path: Path, known: Mapping[str, Sequence[str]] = _WORDS) -> pa.Table:
    with _opened(path, ROW_SCHEMA) as file:
        groups = range(file.num_row_groups)
        table = _checked(_read_groups(file, groups, ROW_SCHEMA.names, _MAX_BYTES["rows"]), ROW_SCHEMA)
    for name, words in known.items():
        strange = pc.unique(table[name]).to_pylist()
        if odd := sorted(set(map(str, strange)) - set(map(str, words))):
            raise _DamagedError(f"it has the {name} {odd[0]!r}, which this version does not know")
    for name, pattern, what in (("index", _INDEX, "an index that is no"), ("shape", _SHAPE, "a shape that is no")):
        if not pc.all(pc.match_substring_regex(pc.drop_null(table[name]), pattern), min_count=0).as_py():
            raise _DamagedError(f"it has {what} list of whole numbers")
    _check_numbers(table)
    return table


def _check_numbers(table: pa.Table) -> None:
    """Refuse rows that say one thing and leave out what belongs to it, or count what cannot be counted."""
    for name in _COUNTS:
        counts = table[name].drop_null().to_numpy()
        if not ((counts >= 0) & (counts <= _MAX_COUNTED)).all():
            raise _DamagedError(f"it has {name} that are no number of anything")
    judged, query = (table[name].is_null().to_numpy() for name in ("judged_rows", "query_rows"))
    if (judged != query).any():
        raise _DamagedError("it has judged_rows without query_rows, or query_rows without judged_rows")
    units = table["half_unit"].drop_null().to_numpy()
    units = units[~np.isnan(units)]
    if not ((units >= 0) & (units <= np.finfo(np.float64).max / 2)).all():  # a whole unit is a number too
        raise _DamagedError("it has a half_unit that is no size")


def _opened(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    """Open a part so that a text which stands in many rows is in memory once; a pipe or device is none."""
    if not path.is_file():
        raise _DamagedError("it is no regular file")
    texts = [column.name for column in schema if pa.types.is_string(column.type) or pa.types.is_binary(column.type)]
    file = pq.ParquetFile(path, read_dictionary=texts)
    if file.num_row_groups > _MAX_GROUPS:
        file.close()
        raise _DamagedError(f"it has {file.num_row_groups} row groups; expected at most {_MAX_GROUPS}")
    return file


def _read_groups(file: pq.ParquetFile, groups: Iterable[int], columns: Sequence[str], most: int) -> pa.Table:
    """Read row groups, unless they would be far larger in memory than anything that a run writes."""
    groups = list(groups)
    read = [file.metadata.row_group(group) for group in groups]
    rows = sum(group.num_rows for group in read)
    if rows > _MAX_ROWS:
        raise _DamagedError(f"it has {rows} rows; expected at most {_MAX_ROWS}")
    unpacked = sum(group.total_byte_size for group in read)  # asking a damaged column for its size ends the process
    if unpacked <= most:
        table = file.read_row_groups(groups, columns=list(columns))
        unpacked = sum(map(_spread_bytes, table.itercolumns()))
    if unpacked > most:
        raise _DamagedError(f"it would take {unpacked} bytes of memory; expected at most {most}")
    return _on_one_line(table)


_FOR_DIAGNOSING = "evidence"
"""A column that no report shows: JSON, which cannot be cut."""


def _on_one_line(table: pa.Table) -> pa.Table:
    """Return a table in which every text is one printable line of some length; each text is looked at once."""
    for place, name in enumerate(table.column_names):
        column = table[name]
        is_coded = pa.types.is_dictionary(column.type)
        if name != _FOR_DIAGNOSING and pa.types.is_string(column.type.value_type if is_coded else column.type):
            column = column if is_coded else column.dictionary_encode()
            chunks = [_lines_of(chunk) for chunk in column.chunks]
            table = table.set_column(place, name, pa.chunked_array(chunks, column.type))
    return table


def _lines_of(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    texts = chunk.dictionary
    strange = pc.or_(pc.match_substring_regex(texts, UNPRINTABLE), pc.greater(pc.utf8_length(texts), LONGEST_TEXT))
    if not pc.any(strange, min_count=0).as_py():
        return chunk
    lines = [text if text is None else one_line(text) for text in texts.to_pylist()]
    return pa.DictionaryArray.from_arrays(chunk.indices, pa.array(lines, texts.type))


def _spread_bytes(column: pa.ChunkedArray) -> int:
    """Return how many bytes a column takes once every row has its own text."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = (pc.binary_length(chunk.dictionary).take(chunk.indices) for chunk in column.chunks)
    return sum(pc.sum(pc.cast(each, pa.int64())).as_py() or 0 for each in lengths)


def _checked(table: pa.Table, schema: pa.Schema) -> pa.Table:
    table = table.select(schema.names).cast(schema)
    table.validate(full=True)  # a damaged text would only be noticed where it is shown
    for column in schema:
        if not column.nullable and table[column.name].null_count:
            raise _DamagedError(f"it has no {column.name} where there must be one")
    return table


class _ArrayLocation(NamedTuple):
    """The place of arrays of one case in one dtype: which part, which row group of it, which rows there."""

    path: Path
    group: int
    start: int
    rows: int


@dataclass(frozen=True)
class ArrayParts:
    """The arrays that one run kept, read when they are asked for; only their names are read before."""

    directory: Path
    _groups: OrderedDict[tuple[Path, int], pa.Table] = field(default_factory=OrderedDict, repr=False, compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """The parts that cannot be read, and why, a line each."""
        return self._index[1]

    def units(self) -> list[tuple[str, str]]:
        """Return the (case, dtype) of which something was kept, in the order of their parts."""
        return list(self._index[0])

    def of(self, case: str, dtype: str) -> dict[tuple[str, str], NDArray[Any]]:
        """Return what was kept of one case in one dtype, by implementation and stage; arrays are read-only.

        Raises ``ResultsError`` where it cannot be read after all.
        """
        found = {}
        for location in self._index[0].get((case, dtype), ()):
            for record in self._group(location.path, location.group).slice(location.start, location.rows).to_pylist():
                key = (case, dtype, record["implementation"], record["stage"])
                found[key[2], key[3]] = decode_array(record, key, location.path)
        return found

    @cached_property
    def _index(self) -> tuple[Mapping[tuple[str, str], list[_ArrayLocation]], tuple[str, ...]]:
        locations: dict[tuple[str, str], list[_ArrayLocation]] = {}
        notes = []
        for path in sorted((self.directory / "arrays").glob("part-*.parquet")):
            try:
                keys = list(_keys_of(path))
            except _UNREADABLE as error:
                notes.append(f"{path} cannot be read, its arrays are left out: {_shortly(error)}")
                continue
            for key, location in keys:
                locations.setdefault(key, []).append(location)
        return locations, tuple(notes)

    def _group(self, path: Path, group: int) -> pa.Table:
        if (path, group) not in self._groups:
            try:
                with _opened(path, ARRAY_SCHEMA) as file:
                    table = _read_groups(file, [group], ARRAY_SCHEMA.names, _MAX_BYTES["arrays"])
                self._groups[path, group] = _checked(table, ARRAY_SCHEMA)
            except _UNREADABLE as error:
                raise ResultsError(f"{path} cannot be read: {_shortly(error)}") from None
            while len(self._groups) > _GROUPS_IN_MEMORY:
                self._groups.popitem(last=False)
        self._groups.move_to_end((path, group))
        return self._groups[path, group]


def _keys_of(path: Path) -> Iterator[tuple[tuple[str, str], _ArrayLocation]]:
    """Read the cases and dtypes of a part's arrays, row group by row group, and nothing else."""
    with _opened(path, ARRAY_SCHEMA) as file:
        if absent := set(ARRAY_SCHEMA.names) - set(file.schema_arrow.names):
            raise _DamagedError(f"it has no column {min(absent)}")
        for group in range(file.num_row_groups):
            keys = _read_groups(file, [group], ["case", "dtype"], _MAX_BYTES["arrays"])
            if keys.num_rows:
                first = np.flatnonzero(np.logical_or(*(_begins(keys[name]) for name in ("case", "dtype"))))
                units = (keys[name].take(pa.array(first)).to_pylist() for name in ("case", "dtype"))
                counts = np.diff(first, append=keys.num_rows)
                for case, dtype, row, count in zip(*units, first.tolist(), counts.tolist(), strict=True):
                    yield (case, dtype), _ArrayLocation(path, group, row, count)


def _begins(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Mark the rows that have another text than the one before."""
    codes = pc.dictionary_encode(column.cast(pa.string())).combine_chunks().indices.fill_null(-1).to_numpy()
    return np.asarray(np.diff(codes, prepend=-2) != 0)


def decode_array(row: Mapping[str, Any], key: ArrayKey, path: Path) -> NDArray[Any]:
    """Return the array that a row of ``ARRAY_SCHEMA`` holds; ``path`` says where it stands.

    Raises ``ResultsError`` for a row that is damaged.
    """
    try:
        dtype = numpy_dtype(row["array_dtype"])
        if dtype.kind not in _NUMBERS and dtype.name not in DTYPES:
            raise TypeError(f"its dtype is {dtype}, which is not of numbers")
        return np.frombuffer(row["data"], dtype=dtype).reshape(row["shape"])
    except (TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"{path}: the array {' '.join(key)} cannot be read: {error}") from None


def _shortly(error: BaseException) -> str:
    return one_line(" ".join(str(error).split()), 200).rstrip(".") or type(error).__name__
