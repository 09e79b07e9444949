"""The files of vectors: one line of JSON for each case and dtype, and one safetensors file with all arrays.

A line says where in that file each array begins, so that it is read without a library, too: ``docs/vectors.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from attncheck.digests import digest_of
from attncheck.errors import OutputError, ResultsError

Array = NDArray[Any]
VERSION = 1
LINES, ARRAYS = "vectors.jsonl", "vectors.safetensors"
_DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_ALIGNED = 8


class VectorsWriter:
    """Writes vectors into a folder. The arrays are kept beside it until their places are known."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._size = folder, 0
        self._records: list[dict[str, Any]] = []
        self._entries: dict[str, Any] = {}
        self._arrays: IO[bytes] | None = None

    def __enter__(self) -> VectorsWriter:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._arrays = self._partial.open("wb")
        except OSError as error:
            raise OutputError.of(self._folder, error) from None
        return self

    @property
    def _partial(self) -> Path:
        return self._folder / f"{ARRAYS}.partial"

    def add(self, record: dict[str, Any], arrays: Mapping[str, Array]) -> None:
        """Add a line; in ``record`` every ``Name`` of one of the ``arrays`` becomes where it is."""
        for name, array in arrays.items():
            data = np.ascontiguousarray(array).tobytes()
            self._write(name, _DTYPES[str(array.dtype)], list(array.shape), data)
            if padding := -len(data) % _ALIGNED:  # readers may take numbers from where they lie; no byte may be unnamed
                self._write(f"{name}/padding", "U8", [padding], b"\0" * padding)
        self._records.append(record)

    def _write(self, name: str, kind: str, shape: list[int], data: bytes) -> None:
        assert self._arrays is not None, "entered as a context"
        self._entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [self._size, self._size + len(data)]}
        self._arrays.write(data)
        self._size += len(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._arrays is not None, "entered as a context"
        self._arrays.close()
        try:
            if error is None:
                self._finish()
        except OSError as problem:
            raise OutputError.of(self._folder, problem) from None
        finally:
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNED)
        begin = 8 + len(header)
        with (self._folder / ARRAYS).open("wb") as file, self._partial.open("rb") as arrays:
            file.write(len(header).to_bytes(8, "little") + header)
            while chunk := arrays.read(2**20):
                file.write(chunk)
        lines = (json.dumps(self._placed(each, begin), separators=(",", ":")) for each in self._records)
        (self._folder / LINES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")

    def _placed(self, value: Any, begin: int) -> Any:
        """Put where an array is in the place of its name, anywhere in a record."""
        if isinstance(value, Name):
            first, end = self._entries[value]["data_offsets"]
            return {"tensor": str(value), "offset": begin + first, "bytes": end - first}
        if isinstance(value, dict):
            return {key: self._placed(each, begin) for key, each in value.items()}
        return [self._placed(each, begin) for each in value] if isinstance(value, list) else value


class Name(str):
    """The name of an array, which becomes its place in the file."""

    __slots__ = ()


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Give the lines of vectors. Raises ``ResultsError`` where there are none, or they are damaged."""
    path = folder / LINES
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read: {error}; expected what `attncheck vectors export` wrote") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            known = record["attncheck_vectors"] == VERSION and isinstance(record["id"], str)
        except (ValueError, TypeError, KeyError) as error:
            raise ResultsError(f"{path}, line {number}: {error!r}; expected a line of vectors") from None
        if not known:
            raise ResultsError(f"{path}, line {number}: vectors of another version than {VERSION}")
        yield record


def digest_of_call(function: str, options: Mapping[str, Any], inputs: Mapping[str, Array]) -> str:
    """Return what a call is recognised by: its function, options, and the bits of its inputs."""
    return digest_of(function, dict(options), {name: np.ascontiguousarray(array) for name, array in inputs.items()})
