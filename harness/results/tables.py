"""Tables of a results directory: columns in memory, and their files.

A file is in NumPy's format npz: a zip archive of arrays, which ``numpy.load`` opens. A column of numbers is the array
of its name, and ``NAME.null`` marks the rows without a number, if there are any. A column of texts is an array of
indices into the list of its distinct texts, which is ``NAME.words`` as JSON. A file may also have blocks of bytes.
docs/architecture/index.md shows the measurement that chose this format.

A reader does not trust a file: sizes are compared with limits before anything is unpacked, zip's checksums find damage,
and no Python object is loaded.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd


class ColumnKind(NamedTuple):
    """The type of a column's values, and whether a row may have none."""

    type: Literal["text", "bool", "int", "float"]
    nullable: bool = False


Schema = Mapping[str, ColumnKind]
_DTYPES_ON_DISK = {"bool": np.dtype("?"), "int": np.dtype("<i8"), "float": np.dtype("<f8")}
_CODE_DTYPES = tuple(map(np.dtype, ("<u1", "<u2", "<u4")))
_COMPRESSION_LEVEL = 1
"""zlib's level: level 6 takes three times as long, and a tenth less space."""
_SAMPLE_BYTES = 1 << 16
"""Bytes of a large entry that decide whether it is compressed."""
_MAX_COMPRESSED_SHARE = 0.6
"""Share to which the sample of a compressed entry shrinks. Stages of random inputs shrink to 0.7 to 0.95 of their size;
compressing those of a wrong kernel took 1.2 s of its 10 s and saved a quarter of 60 MB."""
_MAX_HEADER_BYTES = 4096
"""Limit for the heading of an array of one axis, in bytes; NumPy writes 128."""


class DamagedError(Exception):
    """A part that no run wrote in this form."""


UNREADABLE_ERRORS = (
    *(OSError, EOFError, LookupError, ValueError, ArithmeticError, MemoryError, RuntimeError),
    *(struct.error, zipfile.BadZipFile, zlib.error, DamagedError),
)
"""The errors of reading a damaged file: zipfile reports damage by many of them."""


class ColumnValues(NamedTuple):
    """The values of a column; texts are objects, with None. ``null`` marks missing numbers, if there are any."""

    array: NDArray[Any]
    null: NDArray[np.bool_] | None = None

    @property
    def is_missing(self) -> NDArray[np.bool_]:
        """The rows without a value."""
        if self.array.dtype == object:
            return _missing_values(self.array)
        return np.zeros(len(self.array), bool) if self.null is None else self.null

    @property
    def present_values(self) -> NDArray[Any]:
        """The values of all rows with a value."""
        return self.array[~self.is_missing]

    def take(self, rows: Any) -> ColumnValues:
        """Return the values of some rows: a slice, their indices, or a mask."""
        return ColumnValues(self.array[rows], None if self.null is None else self.null[rows])

    def tolist(self) -> list[Any]:
        """Return the values as Python objects, None for a missing one."""
        values: list[Any] = self.array.tolist()
        if self.null is None:
            return values
        return [None if no else value for value, no in zip(values, self.null.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows of one schema, column by column; ``size`` is their number of bytes if rows share no texts."""

    columns: Mapping[str, ColumnValues]
    size: int = 0

    def __len__(self) -> int:
        return max((len(values.array) for values in self.columns.values()), default=0)

    def __getitem__(self, name: str) -> ColumnValues:
        return self.columns[name]

    def take(self, rows: Any) -> RowTable:
        """Return some rows: a slice, their indices, or a mask."""
        return RowTable({name: values.take(rows) for name, values in self.columns.items()}, self.size)

    def records(self, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the rows as dictionaries of these columns, or all."""
        names = names or tuple(self.columns)
        for row in zip(*(self.columns[name].tolist() for name in names), strict=True):
            yield dict(zip(names, row, strict=True))

    def units(self) -> list[tuple[str, str]]:
        """Return the case and dtype of every row."""
        return list(zip(self["case"].array.tolist(), self["dtype"].array.tolist(), strict=True))

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows as a frame, in which a missing number is NaN, too."""
        import pandas as pd

        series = {name: _pandas_series(values) for name, values in self.columns.items()}
        return pd.DataFrame(series, copy=False)


def _pandas_series(values: ColumnValues) -> Any:
    import pandas as pd

    if values.array.dtype == object:
        return pd.Series(values.array, dtype="str", copy=False)
    if values.null is None:
        return values.array
    return np.where(values.null, np.nan, values.array.astype(np.float64))


def to_table(rows: Sequence[Any], schema: Schema) -> RowTable:
    """Return a table of objects with the columns as attributes, or of mappings with the columns as keys."""
    getter: Callable[[str], Callable[[Any], Any]] = attrgetter
    if rows and isinstance(rows[0], Mapping):
        getter = itemgetter
    return RowTable({name: to_column(list(map(getter(name), rows)), kind) for name, kind in schema.items()})


def to_column(values: list[Any], kind: ColumnKind) -> ColumnValues:
    """Return Python objects as a column.

    Example:
        >>> column = to_column([1, None, 3], ColumnKind("int", nullable=True))
        >>> column.array.tolist(), column.null.tolist()
        ([1, 0, 3], [False, True, False])
    """
    if kind.type == "text":
        array = np.empty(len(values), object)
        array[:] = values
        return ColumnValues(array)
    if kind.nullable and (none := values.count(None)):
        if none == len(values):
            return ColumnValues(np.zeros(none, _DTYPES_ON_DISK[kind.type]), np.ones(none, bool))
        objects = np.array(values, object)
        null = _missing_values(objects)
        objects[null] = 0
        return ColumnValues(objects.astype(_DTYPES_ON_DISK[kind.type]), null)
    return ColumnValues(np.array(values, _DTYPES_ON_DISK[kind.type]))


def _missing_values(objects: NDArray[Any]) -> NDArray[np.bool_]:
    flags: NDArray[np.bool_] = np.equal(objects, np.array(None, object)).astype(bool)
    return flags


def concatenate_tables(tables: Sequence[RowTable], schema: Schema) -> RowTable:
    """Join tables of one schema."""
    joined = {}
    for name, kind in schema.items():
        columns = [table[name] for table in tables]
        nulls = [column.is_missing for column in columns] if any(column.null is not None for column in columns) else ()
        arrays = [column.array for column in columns] or [to_column([], kind).array]
        joined[name] = ColumnValues(np.concatenate(arrays), np.concatenate(nulls) if len(nulls) else None)
    return RowTable(joined, sum(table.size for table in tables))


def write_file(path: Path, table: RowTable, schema: Schema, blocks: Iterable[bytes] = ()) -> None:
    """Write a table, and blocks of bytes that can be read one by one."""
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, kind in schema.items():
            for member, array in _column_arrays(name, table[name], kind):
                data = io.BytesIO()
                np.lib.format.write_array(data, array, (1, 0), allow_pickle=False)
                _write_entry(archive, f"{member}.npy", data.getvalue())
        for number, block in enumerate(blocks):
            _write_entry(archive, f"{number}.block", block)


def _write_entry(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    member = zipfile.ZipInfo(name)  # without a time, so that the same rows give the same bytes
    sample = data[:_SAMPLE_BYTES]
    is_worth_compressing = len(zlib.compress(sample, _COMPRESSION_LEVEL)) <= _MAX_COMPRESSED_SHARE * len(sample)
    method = zipfile.ZIP_DEFLATED if len(data) == len(sample) or is_worth_compressing else zipfile.ZIP_STORED
    archive.writestr(member, data, method, _COMPRESSION_LEVEL)


def _column_arrays(name: str, values: ColumnValues, kind: ColumnKind) -> Iterator[tuple[str, NDArray[Any]]]:
    if kind.type == "text":
        texts = values.array.tolist()
        words = {word: code for code, word in enumerate(dict.fromkeys(texts))}
        dtype = next(code for code in _CODE_DTYPES if len(words) <= np.iinfo(code).max)
        yield name, np.fromiter(map(words.__getitem__, texts), dtype, len(texts))
        yield f"{name}.words", np.frombuffer(json.dumps(list(words), ensure_ascii=False).encode(), np.uint8)
        return
    yield name, values.array.astype(_DTYPES_ON_DISK[kind.type], copy=False)
    if values.null is not None:
        yield f"{name}.null", values.null


class TableFile:
    """A file that ``write_file`` wrote, open for reading; it raises ``UNREADABLE_ERRORS`` if it is damaged."""

    def __init__(self, path: Path, most_bytes: int, most_rows: int) -> None:
        """Open a regular file; ``most_bytes`` limits the memory of its columns, and of a block."""
        if not path.is_file():
            raise DamagedError("it is not a regular file")
        self._archive = zipfile.ZipFile(path)
        self._most_bytes, self._most_rows = most_bytes, most_rows

    def __enter__(self) -> TableFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def read_columns(self, schema: Schema, most_bytes: int | None = None) -> RowTable:
        """Read only the columns of a schema, which may take ``most_bytes``."""
        wanted = {f"{name}{ending}.npy" for name in schema for ending in ("", ".words", ".null")}
        unpacked = sum(member.file_size for member in self._archive.infolist() if member.filename in wanted)
        self._require_bytes(unpacked, most_bytes)
        columns, size = {}, 0
        for name, kind in schema.items():
            columns[name], taken = self._read_column(name, kind)
            size += taken
            self._require_bytes(size, most_bytes)
        if len({len(values.array) for values in columns.values()}) > 1:
            raise DamagedError("its columns have different lengths")
        return RowTable(columns, size)

    def read_block(self, number: int) -> bytes:
        """Read a block of bytes."""
        return self._read_entry(f"{number}.block")

    def _read_entry(self, name: str) -> bytes:
        member = self._archive.getinfo(name)
        self._require_bytes(member.file_size)  # zipfile unpacks no more than that
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DamagedError(f"its {name} is compressed by an unknown method")
        return self._archive.read(member)

    def _require_bytes(self, size: int, most_bytes: int | None = None) -> None:
        most = self._most_bytes if most_bytes is None else most_bytes
        if size > most:
            raise DamagedError(f"it would take {size} bytes of memory; expected at most {most}")

    def _read_column(self, name: str, kind: ColumnKind) -> tuple[ColumnValues, int]:
        names = self._archive.NameToInfo
        if f"{name}.npy" not in names:
            raise DamagedError(f"it has no column {name}")
        if kind.type != "text":
            array = self._read_array(name, (_DTYPES_ON_DISK[kind.type],))
            null = self._read_array(f"{name}.null", (np.dtype("?"),)) if f"{name}.null.npy" in names else None
            if null is not None and len(null) != len(array):
                raise DamagedError(f"its {name} and {name}.null have different lengths")
            if null is not None and not kind.nullable and null.any():
                raise DamagedError(f"it has rows without {name}")
            return ColumnValues(array, null), array.nbytes
        codes = self._read_array(name, _CODE_DTYPES)
        words = json.loads(self._read_array(f"{name}.words", (np.dtype("u1"),)).tobytes().decode())
        return _decode_texts(name, codes, words, kind)

    def _read_array(self, name: str, dtypes: Sequence[np.dtype[Any]]) -> NDArray[Any]:
        """Read an array of one axis and one of these dtypes."""
        data = self._read_entry(f"{name}.npy")
        file = io.BytesIO(data[:_MAX_HEADER_BYTES])
        if np.lib.format.read_magic(file) != (1, 0):
            raise DamagedError(f"its {name} is not an array in npy format 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        array = np.frombuffer(data, dtype, offset=file.tell()) if dtype in dtypes else None
        if array is None or shape != array.shape:
            raise DamagedError(f"its {name} is no column: it has {len(shape)} axes and dtype {dtype}")
        if not name.endswith(".words") and len(array) > self._most_rows:
            raise DamagedError(f"it has {len(array)} rows; expected at most {self._most_rows}")
        return array


def _decode_texts(name: str, codes: NDArray[Any], words: Any, kind: ColumnKind) -> tuple[ColumnValues, int]:
    """Return texts by their indices among the distinct ones, and the bytes of all texts together."""
    if not isinstance(words, list) or not all(word is None or isinstance(word, str) for word in words):
        raise DamagedError(f"its {name} is not a list of texts")
    if len(codes) and int(codes.max()) >= len(words):
        raise DamagedError(f"its {name} refers to a text that is missing")
    counts = np.bincount(codes, minlength=len(words))
    if not kind.nullable and any(word is None and count for word, count in zip(words, counts, strict=True)):
        raise DamagedError(f"it has rows without {name}")
    "".join(word for word in words if word).encode()  # half a surrogate pair is no text
    lengths = np.fromiter((len(word or "") for word in words), np.float64, len(words))
    distinct = np.empty(len(words), object)
    distinct[:] = words
    return ColumnValues(distinct[codes]), int(lengths @ counts) if len(words) else 0
