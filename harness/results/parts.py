"""Parts of a results directory, read one by one: a damaged one is named and left out, and the rest is there."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from attncheck.common.errors import ResultsError
from attncheck.common.wording import ESCAPED, LONGEST_TEXT, one_line
from attncheck.results.format import ARRAY_SCHEMA, PROPERTY_PART, ROW_SCHEMA, ComparisonKind, Row
from attncheck.results.tables import UNREADABLE, ColumnValues, DamagedError, RowTable, TableFile, concatenate
from attncheck.results.writer import write_table
from attncheck.spec import CLAIMS, DTYPES, PROPERTIES
from attncheck.spec.dtypes import numpy_dtype
from attncheck.spec.verdicts import PropertyOutcome, Verdict

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
_INDEX = re.compile(r"([0-9]{1,18}(,[0-9]{1,18})*)?")
_SHAPE = re.compile(r"(scalar|[0-9]{1,18}(x[0-9]{1,18})*)?")
_COUNTS = [name for name, kind in ROW_SCHEMA.items() if kind.type == "int"]
_MAX_COUNTED = 2**53
"""Beyond it, a count is no whole number in the frames of a report."""
_GROUPS_IN_MEMORY = 2
"""Blocks that stay read: a case's arrays lie together."""


_MAX_ROWS = 1_000_000
"""Of one part. A run writes some fifty thousand; a few kilobytes can hold as many as they like, all of them alike."""
_MAX_PROPERTY_ROWS = 200_000
"""Of a run, as objects: a run of all implementations asks some ten thousand."""
_MAX_BYTES = {"rows": 2**30, "arrays": 2**32}
"""Of one part of rows, or of the arrays of one case, as it lies in memory."""
_MAX_KEY_BYTES = 2**26
"""Of the keys of one part of arrays, which is read again for each block: a run writes a few hundred rows."""
_MAX_BYTES_TOGETHER = 2**32
"""Of all parts of rows: some ten million of them."""


def read_rows(directory: Path) -> tuple[RowTable, tuple[str, ...]]:
    """Read the rows of a results directory; return them with a note for every part that cannot be read."""
    tables, notes, size = list[RowTable](), [], 0
    for path in row_parts(directory):
        try:
            table = read_rows_part(path)
            if size + table.size > _MAX_BYTES_TOGETHER:
                raise DamagedError("with the parts before, more rows than a report can hold")
            size += table.size
            tables.append(table)
        except UNREADABLE as error:
            notes.append(f"{path} cannot be read, its rows are left out: {_shortly(error)}")
    return concatenate(tables, ROW_SCHEMA), tuple(notes)


def row_parts(directory: Path) -> list[Path]:
    """Return the parts of rows in their order."""
    return _parts(directory / "rows")


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.npz"))


def read_property_rows(directory: Path) -> list[Row]:
    """Read what a run found of properties; none where it asked for none. Raises ``ResultsError`` where it is damaged.

    Not as a frame, in which NaN and no number at all would be one.
    """
    path = directory / PROPERTY_PART
    if not path.exists():
        return []
    try:
        table = read_rows_part(path, _PROPERTY_WORDS)
        if len(table) > _MAX_PROPERTY_ROWS:
            raise DamagedError(f"it has {len(table)} rows; expected at most {_MAX_PROPERTY_ROWS}")
        return [Row(**record) for record in table.records()]
    except UNREADABLE as error:
        raise ResultsError(f"{path} cannot be read: {_shortly(error)}") from None


def remove_damaged(directory: Path) -> None:
    """Remove the parts that cannot be read, and what was not yet renamed into place."""
    for kind, read in (("rows", read_rows_part), ("arrays", lambda path: list(_keys_of(path)))):
        for path in list((directory / kind).glob("*.npz*")):
            try:
                whole = path.name.startswith("part-") and read(path) is not None
            except UNREADABLE:
                whole = False
            if not whole:
                path.unlink(missing_ok=True)


def remove_units(directory: Path, column: str, value: str) -> None:
    """Remove every row of a case in a dtype of which one row has this value, so that it is computed again."""
    for path in row_parts(directory):
        table = read_rows_part(path)
        units = table.units()
        removed = {unit for unit, found in zip(units, table[column].array, strict=True) if found == value}
        if removed:
            (directory / "summary.json").unlink(missing_ok=True)  # first: the run is not complete any more
            write_table(path, table.take(np.fromiter((unit not in removed for unit in units), bool, len(units))))


def read_rows_part(path: Path, known: Mapping[str, Sequence[str]] = _WORDS) -> RowTable:
    """Read a part of rows, whose columns of words have only ``known`` ones. Raises ``UNREADABLE``."""
    with TableFile(path, _MAX_BYTES["rows"], _MAX_ROWS) as file:
        table = _on_one_line(file.table(ROW_SCHEMA))
    for name, words in known.items():
        if odd := sorted(set(table[name].array.tolist()) - set(map(str, words))):
            raise DamagedError(f"it has the {name} {odd[0]!r}, which this version does not know")
    for name, pattern, what in (("index", _INDEX, "an index that is no"), ("shape", _SHAPE, "a shape that is no")):
        if not all(pattern.fullmatch(text) for text in set(table[name].array.tolist()) - {None}):
            raise DamagedError(f"it has {what} list of whole numbers")
    _check_numbers(table)
    return table


def _on_one_line(table: RowTable) -> RowTable:
    """Return a table in which every text is one printable line of some length; each text is looked at once."""
    columns = dict(table.columns)
    for name, values in table.columns.items():
        if values.array.dtype == object:
            texts = set(values.array.tolist()) - {None}
            if any(ESCAPED.search(text) or len(text) > LONGEST_TEXT for text in texts):
                lines = {None: None, **{text: one_line(text) for text in texts}}
                array = np.empty(len(values.array), object)
                array[:] = [lines[text] for text in values.array.tolist()]
                columns[name] = ColumnValues(array)
    return RowTable(columns, table.size)


def _check_numbers(table: RowTable) -> None:
    """Refuse rows that say one thing and leave out what belongs to it, or count what cannot be counted."""
    for name in _COUNTS:
        counts = table[name].present
        if not ((counts >= 0) & (counts <= _MAX_COUNTED)).all():
            raise DamagedError(f"it has {name} that are no number of anything")
    if (table["judged_rows"].missing != table["query_rows"].missing).any():
        raise DamagedError("it has judged_rows without query_rows, or query_rows without judged_rows")
    units = table["half_unit"].present
    units = units[~np.isnan(units)]
    if not ((units >= 0) & (units <= np.finfo(np.float64).max / 2)).all():  # a whole unit is a number too
        raise DamagedError("it has a half_unit that is no size")


class _ArrayLocation(NamedTuple):
    """The place of arrays of one case in one dtype: which part, which of its blocks or row groups, which rows."""

    path: Path
    group: int
    start: int
    rows: int


@dataclass(frozen=True)
class ArrayParts:
    """The arrays that one run kept, read when they are asked for; only their names are read before."""

    directory: Path
    _groups: OrderedDict[tuple[Path, int], _Records] = field(default_factory=OrderedDict, repr=False, compare=False)

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
            records = self._group(location.path, location.group)
            for record in records[location.start : location.start + location.rows]:
                key = (case, dtype, record["implementation"], record["stage"])
                found[key[2], key[3]] = decode_array(record, key, location.path)
        return found

    @cached_property
    def _index(self) -> tuple[Mapping[tuple[str, str], list[_ArrayLocation]], tuple[str, ...]]:
        locations: dict[tuple[str, str], list[_ArrayLocation]] = {}
        notes = []
        for path in _parts(self.directory / "arrays"):
            try:
                keys = list(_keys_of(path))
            except UNREADABLE as error:
                notes.append(f"{path} cannot be read, its arrays are left out: {_shortly(error)}")
                continue
            for key, location in keys:
                locations.setdefault(key, []).append(location)
        return locations, tuple(notes)

    def _group(self, path: Path, group: int) -> _Records:
        if (path, group) not in self._groups:
            try:
                self._groups[path, group] = _array_records(path, group)
            except UNREADABLE as error:
                raise ResultsError(f"{path} cannot be read: {_shortly(error)}") from None
            while len(self._groups) > _GROUPS_IN_MEMORY:
                self._groups.popitem(last=False)
        self._groups.move_to_end((path, group))
        return self._groups[path, group]


_Records = Sequence[Mapping[str, Any]]


def _keys_of(path: Path) -> Iterator[tuple[tuple[str, str], _ArrayLocation]]:
    """Read the cases and dtypes of a part's arrays, and nothing else."""
    with TableFile(path, _MAX_KEY_BYTES, _MAX_ROWS) as file:
        table = _on_one_line(file.table({name: ARRAY_SCHEMA[name] for name in ("case", "dtype", "block")}))
    blocks = table["block"].array.tolist()
    for block, rows in groupby(zip(blocks, table.units(), strict=True), lambda row: row[0]):
        yield from _runs_of(path, block, [unit for _, unit in rows])


def _runs_of(
    path: Path, group: int, units: Sequence[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], _ArrayLocation]]:
    start = 0
    for unit, rows in groupby(units):
        yield unit, _ArrayLocation(path, group, start, count := len(list(rows)))
        start += count


def _array_records(path: Path, group: int) -> _Records:
    """Return the arrays of a block as records with their bytes."""
    with TableFile(path, _MAX_BYTES["arrays"], _MAX_ROWS) as file:
        table = _on_one_line(file.table(ARRAY_SCHEMA, _MAX_KEY_BYTES))
        data = file.block(group)
    of_block = table.take(table["block"].array == group)
    return [
        {**record, "data": data[record["start"] : record["start"] + record["size"]], "shape": _shape(record["shape"])}
        for record in of_block.records()
    ]


def _shape(text: str) -> list[int]:
    if not _SHAPE.fullmatch(text):
        raise DamagedError(f"{text[:40]!r} is no shape")
    return [] if text == "scalar" else [int(length) for length in text.split("x")]


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
