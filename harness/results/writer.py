"""Results written to disk as they arrive, readable during the run (``format.py`` describes the files)."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import psutil

from attncheck.common.errors import ExitCode, OutputError, ResultsError
from attncheck.results.format import (
    ARRAY_SCHEMA,
    FORMAT_VERSION,
    PROPERTIES_TABLE,
    PROPERTY_PART,
    REPORT_FOLDER,
    ROW_SCHEMA,
    SCRIPTS_FOLDER,
    SEARCH_STATE,
    Row,
    StoredArray,
)
from attncheck.results.records import cases_json_lines, read_json
from attncheck.results.tables import RowTable, Schema, to_table, write_file

_PART_FOLDERS = ("rows", "arrays", "logs")
_CLAIM_FILE = ".writer.partial"
"""The file that names the process that writes to a directory; one that remains names no running process."""


class ResultsWriter:
    """Writes one run's directory; every file is renamed into place when it is complete."""

    ROWS_PER_PART = 50_000
    SECONDS_PER_PART = 10.0
    """Older rows are on disk, however the run ends."""
    ARRAY_BYTES_PER_PART = 64 * 2**20

    def __init__(self, directory: Path, *, resume: bool = False, is_search: bool = False) -> None:
        """Remove an earlier run from a directory, or with ``resume`` continue it.

        Only a search may write to the directory of a search, and only to such a one. Raises ``OutputError``.
        """
        self.directory = directory
        self._rows: list[Row] = []
        self._arrays: list[StoredArray] = []
        self._array_bytes = 0
        self._flushed = monotonic()
        self.before_rows: Callable[[], None] = lambda: None
        _require_unclaimed(directory)
        _prepare_directory(directory, ("rows", "arrays", "cases.json") if resume else (), is_search=is_search)
        # This machine, the number of this process and its start: no other process has the same three.
        process = f"{platform.node()} {os.getpid()} {psutil.Process().create_time()}"
        _write_atomically(directory / _CLAIM_FILE, lambda temporary: temporary.write_text(process, encoding="utf-8"))
        self._parts = {kind: _next_part_number(directory / kind) for kind in ("rows", "arrays")}

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add rows; they are written as soon as a part is full."""
        self._rows.extend(rows)
        if len(self._rows) >= self.ROWS_PER_PART or monotonic() - self._flushed > self.SECONDS_PER_PART:
            self.flush()

    def add_arrays(self, arrays: Iterable[StoredArray]) -> None:
        """Add arrays; they are written as soon as a part is full."""
        for stored in arrays:
            self._arrays.append(stored)
            self._array_bytes += stored.array.nbytes
        if self._array_bytes >= self.ARRAY_BYTES_PER_PART:
            self.flush()

    def flush(self) -> None:
        """Write everything that was added, arrays first, so that no row refers to a missing array.

        Before rows, ``before_rows`` writes the state of the implementations: a finished case does not run again.
        """
        if self._arrays:
            self._write_part("arrays", *_pack_arrays(self._arrays))
            self._arrays, self._array_bytes = [], 0
        if self._rows:
            self.before_rows()
            self._write_part("rows", to_table(self._rows, ROW_SCHEMA))
            self._rows = []
        self._flushed = monotonic()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write environment.json or summary.json."""
        _write_json(self.directory / name, {"format": FORMAT_VERSION, **content})
        if name == "summary.json":
            (self.directory / _CLAIM_FILE).unlink(missing_ok=True)

    def write_cases(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write cases.json."""

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", errors="replace") as file:
                file.writelines(cases_json_lines(records))

        _write_atomically(self.directory / "cases.json", write)

    def _write_part(self, kind: str, table: RowTable, blocks: Sequence[bytes] = ()) -> None:
        schema = ROW_SCHEMA if kind == "rows" else ARRAY_SCHEMA
        write_table(self.directory / kind / f"part-{self._parts[kind]:05d}.npz", table, schema, blocks)
        self._parts[kind] += 1


def write_property_rows(directory: Path, rows: Sequence[Row]) -> None:
    """Write the rows of properties to the directory of a run, in place of earlier ones. Raises ``OutputError``."""
    path = directory / PROPERTY_PART
    with OutputError.convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_table(path, to_table(rows, ROW_SCHEMA))


def update_exit_code(directory: Path, code: ExitCode) -> None:
    """Set the exit code of a run with its properties in its summary. Raises ``OutputError``."""
    path = directory / "summary.json"
    _write_json(path, {**(read_json(path) or {}), "exit_code": int(code)})


def store_confirmed_features(directory: Path, confirmed: Mapping[str, Sequence[str]]) -> None:
    """Store the features of failing cases that were confirmed with a run's environment. Raises ``OutputError``."""
    path = directory / "environment.json"
    environment = dict(read_json(path) or {})
    environment["asked"] = {**environment.get("asked", {}), "confirmed": dict(confirmed)}
    _write_json(path, environment)


def write_table(path: Path, table: RowTable, schema: Schema = ROW_SCHEMA, blocks: Sequence[bytes] = ()) -> None:
    """Write a part; it replaces an earlier one when it is complete. Raises ``OutputError``."""
    _write_atomically(path, lambda temporary: write_file(temporary, table, schema, blocks))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # A command line may have bytes that are not UTF-8; they become question marks.
    _write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="replace"))


def _next_part_number(folder: Path) -> int:
    numbers = [int(path.stem.removeprefix("part-")) for path in folder.glob("part-*.npz")]
    return max(numbers, default=-1) + 1


def _require_unclaimed(directory: Path) -> None:
    """Raise ``OutputError`` if another running process writes to a directory, or if its name is not UTF-8."""
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        named = str(directory).encode(errors="replace").decode()
        raise OutputError(f"{named}: the folder's name is not UTF-8; name another folder with --output") from None
    with suppress(OSError, ValueError, psutil.Error):
        node, number, started = (directory / _CLAIM_FILE).read_text(encoding="utf-8").rsplit(" ", 2)
        writer = psutil.Process(int(number))
        if node == platform.node() and int(number) != os.getpid() and writer.create_time() == float(started):
            raise OutputError(
                f"{directory}: another run writes there (process {number}); wait for it, or name another folder with "
                "--output"
            )


def _prepare_directory(directory: Path, keep: Sequence[str], *, is_search: bool) -> None:
    """Create the directory, or remove an earlier run from it, except for ``keep``; other files stay."""
    with OutputError.convert_os_errors(directory):
        if directory.exists() and not directory.is_dir():
            raise OutputError(f"{directory} is a file; expected a folder to write results to")
        holds_search = (directory / SEARCH_STATE).is_file()
        if holds_search != is_search and (holds_search or _has_results(directory)):
            held = "a search" if holds_search else "results that are not of a search"
            raise OutputError(f"{directory} holds {held}; name another folder with --output")
        if directory.is_dir() and not (holds_search or has_no_files_to_lose(directory) or _has_results(directory)):
            problem = "is not empty and holds no earlier results; name another folder with --output"
            raise OutputError(f"{directory} {problem}")
        # The summary is removed first: if this process ends before the rest is removed, no run looks complete.
        for name in ("summary.json", "cases.json", PROPERTY_PART, PROPERTIES_TABLE):
            if name not in keep:
                (directory / name).unlink(missing_ok=True)
        for partial in directory.glob(".*.partial"):
            partial.unlink(missing_ok=True)
        if (directory / REPORT_FOLDER / "report.md").is_file():
            shutil.rmtree(directory / REPORT_FOLDER)
        for part in ("rows", "arrays", "logs", SCRIPTS_FOLDER):
            if (directory / part).is_symlink():
                raise OutputError(f"{directory / part} is a link; name another folder with --output")
            if part not in keep and (directory / part).is_dir():
                shutil.rmtree(directory / part)
        for part in _PART_FOLDERS:
            (directory / part).mkdir(parents=True, exist_ok=True)


def has_no_files_to_lose(directory: Path) -> bool:
    """Return whether a folder has no files to lose: it is empty, or its run was killed at once."""
    entries = [path for path in directory.iterdir() if not path.name.endswith(".partial")]
    if any(path.name not in _PART_FOLDERS or not path.is_dir() for path in entries):
        return False
    return not any(path.is_file() for path in directory.rglob("*") if not path.name.endswith(".partial"))


def _has_results(directory: Path) -> bool:
    """Return whether an earlier run wrote this directory; other tools write a file environment.json, too."""
    try:
        environment = read_json(directory / "environment.json")
    except ResultsError:
        return False
    return environment is not None and {"format", "label", "implementations"} <= environment.keys()


def _write_atomically(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.unlink(missing_ok=True)  # a link would lead elsewhere
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # otherwise a power failure could leave an empty file
        temporary.replace(path)
    except OSError as error:
        raise OutputError.from_os_error(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _pack_arrays(arrays: Sequence[StoredArray]) -> tuple[RowTable, list[bytes]]:
    """Return arrays as a table of ``ARRAY_SCHEMA`` and its blocks: one for each case and dtype, equal bytes once."""
    records, blocks = [], list[bytes]()
    for unit, of_unit in groupby(arrays, lambda stored: (stored.case, stored.dtype)):
        block, starts = bytearray(), dict[bytes, int]()
        for stored in of_unit:
            data = np.ascontiguousarray(stored.array).tobytes()
            if data not in starts:
                starts[data] = len(block)
                block += data
            shape = "x".join(map(str, stored.array.shape)) or "scalar"
            names = (*unit, stored.implementation, stored.stage, str(stored.array.dtype), shape)
            records.append((*names, len(blocks), starts[data], len(data)))
        blocks.append(bytes(block))
    return to_table([dict(zip(ARRAY_SCHEMA, record, strict=True)) for record in records], ARRAY_SCHEMA), blocks
