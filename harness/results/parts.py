"""Parts of a results directory, read one by one: a damaged part is reported and left out."""

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
from attncheck.common.wording import ESCAPED_CHARACTERS, MAX_TEXT_LENGTH, escape_to_one_line
from attncheck.results.format import ARRAY_SCHEMA, PROPERTY_PART, ROW_SCHEMA, ComparisonKind, Row
from attncheck.results.tables import (
    UNREADABLE_ERRORS,
    ColumnValues,
    DamagedError,
    RowTable,
    TableFile,
    concatenate_tables,
)
from attncheck.results.writer import write_table
from attncheck.spec import CLAIMS, DTYPES, PROPERTIES
from attncheck.spec.dtypes import numpy_dtype
from attncheck.spec.verdicts import PropertyOutcome, Verdict

ArrayKey = tuple[str, str, str, str]
"""case, dtype, implementation, stage"""

_NUMBERS = frozenset("biufc")
"""NumPy's kinds of dtypes that an implementation may return, in addition to those that NumPy lacks."""
_KNOWN_WORDS: Mapping[str, Sequence[str]] = {
    "verdict": list(Verdict),
    "comparison": [kind for kind in get_args(ComparisonKind) if kind != "property"],
    "dtype": list(DTYPES),
}
_KNOWN_PROPERTY_WORDS: Mapping[str, Sequence[str]] = {
    "verdict": list(PropertyOutcome),
    "comparison": ["property"],
    "dtype": list(DTYPES),
    "property_name": list(PROPERTIES),
    "claim": ["", *CLAIMS],
}
_INDEX_PATTERN = re.compile(r"([0-9]{1,18}(,[0-9]{1,18})*)?")
_SHAPE_PATTERN = re.compile(r"(scalar|[0-9]{1,18}(x[0-9]{1,18})*)?")
_COUNT_COLUMNS = [name for name, kind in ROW_SCHEMA.items() if kind.type == "int"]
_MAX_COUNT = 2**53
"""Larger counts are not exact as floats, which the frames of a report contain."""
_GROUPS_IN_MEMORY = 2
"""Blocks that are cached: the arrays of a case are in one block."""


_MAX_ROWS = 1_000_000
"""Limit of one part. A run writes fifty thousand; equal rows compress so well that a small file may have many more."""
_MAX_PROPERTY_ROWS = 200_000
"""Limit of a run, as objects: a run of all implementations has about ten thousand."""
_MAX_BYTES = {"rows": 2**30, "arrays": 2**32}
"""Limit in memory of one part of rows, or of the arrays of one case."""
_MAX_KEY_BYTES = 2**26
"""Limit of the keys of one part of arrays, which are read again for each block: a run writes a few hundred rows."""
_MAX_TOTAL_BYTES = 2**32
"""Limit of all parts of rows: about ten million rows."""


def read_rows(directory: Path) -> tuple[RowTable, tuple[str, ...]]:
    """Read the rows of a results directory; return them with a note for every part that cannot be read."""
    tables, notes, size = list[RowTable](), [], 0
    for path in list_row_parts(directory):
        try:
            table = read_rows_part(path)
            if size + table.size > _MAX_TOTAL_BYTES:
                raise DamagedError("together with the parts before, it has more rows than a report can hold")
            size += table.size
            tables.append(table)
        except UNREADABLE_ERRORS as error:
            notes.append(f"{path} cannot be read, its rows are left out: {_short_message(error)}")
    return concatenate_tables(tables, ROW_SCHEMA), tuple(notes)


def list_row_parts(directory: Path) -> list[Path]:
    """Return the parts of rows in their order."""
    return _list_parts(directory / "rows")


def _list_parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.npz"))


def read_property_rows(directory: Path) -> list[Row]:
    """Read the rows of properties; none if the run has none. Raises ``ResultsError`` if they are damaged.

    They are no frame, since a frame does not distinguish NaN from a missing number.
    """
    path = directory / PROPERTY_PART
    if not path.exists():
        return []
    try:
        table = read_rows_part(path, _KNOWN_PROPERTY_WORDS)
        if len(table) > _MAX_PROPERTY_ROWS:
            raise DamagedError(f"it has {len(table)} rows; expected at most {_MAX_PROPERTY_ROWS}")
        return [Row(**record) for record in table.records()]
    except UNREADABLE_ERRORS as error:
        raise ResultsError(f"{path} cannot be read: {_short_message(error)}; run the command again") from None


def remove_damaged(directory: Path) -> None:
    """Remove the parts that cannot be read, and files that were not yet renamed into place."""
    for kind, read in (("rows", read_rows_part), ("arrays", lambda path: list(_iterate_locations(path)))):
        for path in list((directory / kind).glob("*.npz*")):
            try:
                whole = path.name.startswith("part-") and read(path) is not None
            except UNREADABLE_ERRORS:
                whole = False
            if not whole:
                path.unlink(missing_ok=True)


def remove_units(directory: Path, column: str, value: str) -> None:
    """Remove all rows of each case and dtype with a row of this value, so that they are computed again."""
    for path in list_row_parts(directory):
        table = read_rows_part(path)
        units = table.units()
        removed = {unit for unit, cell in zip(units, table[column].array, strict=True) if cell == value}
        if removed:
            (directory / "summary.json").unlink(missing_ok=True)  # first: the run is no longer complete
            write_table(path, table.take(np.fromiter((unit not in removed for unit in units), bool, len(units))))


def read_rows_part(path: Path, known: Mapping[str, Sequence[str]] = _KNOWN_WORDS) -> RowTable:
    """Read a part of rows, whose columns of words have only ``known`` ones. Raises ``UNREADABLE_ERRORS``."""
    with TableFile(path, _MAX_BYTES["rows"], _MAX_ROWS) as file:
        table = _sanitize_texts(file.read_columns(ROW_SCHEMA))
    for name, words in known.items():
        if odd := sorted(set(table[name].array.tolist()) - set(map(str, words))):
            raise DamagedError(f"it has the {name} {odd[0]!r}, which this version does not know")
    for name, pattern, what in (
        ("index", _INDEX_PATTERN, "an index that is no"),
        ("shape", _SHAPE_PATTERN, "a shape that is no"),
    ):
        if not all(pattern.fullmatch(text) for text in set(table[name].array.tolist()) - {None}):
            raise DamagedError(f"it has {what} list of whole numbers")
    _check_numbers(table)
    return table


def _sanitize_texts(table: RowTable) -> RowTable:
    """Return a table in which every text is one printable line of limited length; each text is checked once."""
    columns = dict(table.columns)
    for name, values in table.columns.items():
        if values.array.dtype == object:
            texts = set(values.array.tolist()) - {None}
            if any(ESCAPED_CHARACTERS.search(text) or len(text) > MAX_TEXT_LENGTH for text in texts):
                lines = {None: None, **{text: escape_to_one_line(text) for text in texts}}
                array = np.empty(len(values.array), object)
                array[:] = [lines[text] for text in values.array.tolist()]
                columns[name] = ColumnValues(array)
    return RowTable(columns, table.size)


def _check_numbers(table: RowTable) -> None:
    """Raise ``DamagedError`` for rows with impossible counts, or without a number that belongs to another."""
    for name in _COUNT_COLUMNS:
        counts = table[name].present_values
        if not ((counts >= 0) & (counts <= _MAX_COUNT)).all():
            raise DamagedError(f"its {name} are no whole numbers of at least 0")
    if (table["judged_rows"].is_missing != table["query_rows"].is_missing).any():
        raise DamagedError("it has judged_rows without query_rows, or query_rows without judged_rows")
    units = table["half_unit"].present_values
    units = units[~np.isnan(units)]
    if not ((units >= 0) & (units <= np.finfo(np.float64).max / 2)).all():  # a whole unit is a number too
        raise DamagedError("its half_unit is no positive number")


class _ArrayLocation(NamedTuple):
    """The location of arrays of one case in one dtype: the part, its block, and the rows."""

    path: Path
    group: int
    start: int
    rows: int


@dataclass(frozen=True)
class ArrayParts:
    """The arrays of one run. Each is read on request; only the names are read before."""

    directory: Path
    _groups: OrderedDict[tuple[Path, int], _Records] = field(default_factory=OrderedDict, repr=False, compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """The parts that cannot be read, and why, a line each."""
        return self._locations_and_notes[1]

    def units(self) -> list[tuple[str, str]]:
        """Return the (case, dtype) that have arrays, in the order of their parts."""
        return list(self._locations_and_notes[0])

    def arrays_of(self, case: str, dtype: str) -> dict[tuple[str, str], NDArray[Any]]:
        """Return the arrays of one case in one dtype, by implementation and stage; they are read-only.

        Raises ``ResultsError`` if a part cannot be read.
        """
        arrays = {}
        for location in self._locations_and_notes[0].get((case, dtype), ()):
            records = self._read_group(location.path, location.group)
            for record in records[location.start : location.start + location.rows]:
                key = (case, dtype, record["implementation"], record["stage"])
                arrays[key[2], key[3]] = decode_array(record, key, location.path)
        return arrays

    @cached_property
    def _locations_and_notes(self) -> tuple[Mapping[tuple[str, str], list[_ArrayLocation]], tuple[str, ...]]:
        locations: dict[tuple[str, str], list[_ArrayLocation]] = {}
        notes = []
        for path in _list_parts(self.directory / "arrays"):
            try:
                keys = list(_iterate_locations(path))
            except UNREADABLE_ERRORS as error:
                notes.append(f"{path} cannot be read, its arrays are left out: {_short_message(error)}")
                continue
            for key, location in keys:
                locations.setdefault(key, []).append(location)
        return locations, tuple(notes)

    def _read_group(self, path: Path, group: int) -> _Records:
        """Read the arrays of a block as records with their bytes."""
        if (path, group) not in self._groups:
            try:
                with TableFile(path, _MAX_BYTES["arrays"], _MAX_ROWS) as file:
                    table = _sanitize_texts(file.read_columns(ARRAY_SCHEMA, _MAX_KEY_BYTES))
                    data = file.read_block(group)
                self._groups[path, group] = [
                    {
                        **row,
                        "data": data[row["start"] : row["start"] + row["size"]],
                        "shape": _parse_shape(row["shape"]),
                    }
                    for row in table.take(table["block"].array == group).records()
                ]
            except UNREADABLE_ERRORS as error:
                raise ResultsError(f"{path} cannot be read: {_short_message(error)}; run the check again") from None
            while len(self._groups) > _GROUPS_IN_MEMORY:
                self._groups.popitem(last=False)
        self._groups.move_to_end((path, group))
        return self._groups[path, group]


_Records = Sequence[Mapping[str, Any]]


def _iterate_locations(path: Path) -> Iterator[tuple[tuple[str, str], _ArrayLocation]]:
    """Read only the cases and dtypes of a part's arrays."""
    with TableFile(path, _MAX_KEY_BYTES, _MAX_ROWS) as file:
        table = _sanitize_texts(file.read_columns({name: ARRAY_SCHEMA[name] for name in ("case", "dtype", "block")}))
    blocks = table["block"].array.tolist()
    for block, rows in groupby(zip(blocks, table.units(), strict=True), lambda row: row[0]):
        start = 0
        for unit, of_unit in groupby(unit for _, unit in rows):
            count = len(list(of_unit))
            yield unit, _ArrayLocation(path, block, start, count)
            start += count


def _parse_shape(text: str) -> list[int]:
    if not _SHAPE_PATTERN.fullmatch(text):
        raise DamagedError(f"{text[:40]!r} is no shape")
    return [] if text == "scalar" else [int(length) for length in text.split("x")]


def decode_array(row: Mapping[str, Any], key: ArrayKey, path: Path) -> NDArray[Any]:
    """Return the array of a row of ``ARRAY_SCHEMA``; ``path`` is its file, for errors.

    Raises ``ResultsError`` for a damaged row.
    """
    try:
        dtype = numpy_dtype(row["array_dtype"])
        if dtype.kind not in _NUMBERS and dtype.name not in DTYPES:
            raise TypeError(f"its dtype is {dtype}; expected a dtype of numbers")
        return np.frombuffer(row["data"], dtype=dtype).reshape(row["shape"])
    except (TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"{path}: the array {' '.join(key)} cannot be read: {error}; run the check again") from None


def _short_message(error: BaseException) -> str:
    return escape_to_one_line(" ".join(str(error).split()), 200).rstrip(".") or type(error).__name__
