"""Results on disk: one directory per run, readable while the run goes on.

environment.json      what ran where: versions, platform, threads, command, what was left out
rows/part-*.parquet   one row per comparison, each part renamed into place when it is whole
arrays/part-*.parquet the stages of what disagreed and of documents, or of everything; beside them what they are held
                      against: inputs, exact answer, bounds
logs/*.txt            what a framework printed
scripts/*.py          what failed, each to be run by itself; index.json says which is which
summary.json          counts and exit code, written last: without it, a run was interrupted
report/               made from the above by `attncheck check` or `attncheck report`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from attncheck.harness.errors import OutputError

FORMAT = 4
REPORT_FOLDER = "report"
SCRIPTS_FOLDER = "scripts"
ComparisonKind = Literal["stage", "pair", "printed", "known", "exact"]

ROW_SCHEMA = pa.schema(
    [
        pa.field("case", pa.string(), nullable=False),
        pa.field("operation", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("implementation", pa.string(), nullable=False),
        pa.field("comparison", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("verdict", pa.string(), nullable=False),
        pa.field("known", pa.bool_(), nullable=False),
        pa.field("other", pa.string()),
        pa.field("called", pa.string()),
        pa.field("shape", pa.string()),
        pa.field("index", pa.string()),
        pa.field("value", pa.float64()),
        pa.field("reference", pa.float64()),
        pa.field("reference_text", pa.string()),
        pa.field("difference", pa.float64()),
        pa.field("allowed", pa.float64()),
        pa.field("against", pa.string()),
        pa.field("ratio", pa.float64()),
        pa.field("half_unit", pa.float64()),
        pa.field("propagated", pa.float64()),
        pa.field("tier", pa.string()),
        pa.field("largest_z", pa.float64()),
        pa.field("mean_z", pa.float64()),
        pa.field("introduced_tier", pa.string()),
        pa.field("introduced_ratio", pa.float64()),
        pa.field("introduced_z", pa.float64()),
        pa.field("begins_at", pa.string()),
        pa.field("elements", pa.int64()),
        pa.field("judged_rows", pa.int64()),
        pa.field("query_rows", pa.int64()),
        pa.field("message", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("thread", pa.string()),
    ]
)

ARRAY_SCHEMA = pa.schema(
    [
        pa.field("case", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("implementation", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("array_dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Row:
    """One comparison of one stage of one case on one implementation in one dtype.

    ``comparison`` is ``stage`` (against the exact answer), ``pair`` (against ``other``), ``printed`` (one number of a
    document), ``known`` (one derived number) or ``exact`` (one number that a document computes and does not print).
    ``value`` is the implementation's number at ``index``, ``reference`` what it is held against; ``difference`` is
    absolute, ``allowed`` the largest one that agrees, ``ratio`` the largest quotient of the two in the stage. ``known``
    marks what is recorded and does not fail a run; ``reason`` says why it is so, ``thread`` where that is discussed.

    A stage is compared twice: with the exact answer (``tier``, ``ratio``, ``largest_z``, ``mean_z``, ``elements``) and
    with the exact step from the implementation's own previous stage (``introduced_tier``, ``introduced_ratio``,
    ``introduced_z``). ``index``, ``value``, ``reference``, ``difference`` and ``allowed`` belong to one of the two,
    which ``against`` names: ``step`` where the step itself fails, so that difference / allowed is then
    ``introduced_ratio``, else ``exact``. ``begins_at`` is the stage at which the implementation goes wrong. Where some
    query rows stand for all, ``judged_rows`` of ``query_rows`` were judged; both are None where all were.
    """

    case: str
    operation: str
    dtype: str
    implementation: str
    comparison: ComparisonKind
    stage: str
    verdict: str
    known: bool = False
    other: str | None = None
    called: str | None = None
    shape: str | None = None
    index: str | None = None
    value: float | None = None
    reference: float | None = None
    reference_text: str | None = None
    difference: float | None = None
    allowed: float | None = None
    against: str | None = None
    ratio: float | None = None
    half_unit: float | None = None
    propagated: float | None = None
    tier: str | None = None
    largest_z: float | None = None
    mean_z: float | None = None
    introduced_tier: str | None = None
    introduced_ratio: float | None = None
    introduced_z: float | None = None
    begins_at: str | None = None
    elements: int | None = None
    judged_rows: int | None = None
    query_rows: int | None = None
    message: str = ""
    reason: str | None = None
    thread: str | None = None


def bound_name(numerical_class: str) -> str:
    """Return under which name the bounds of a class are kept beside the implementations' arrays."""
    return f"bound of class {numerical_class}"


EXACT = "exact answer"
"""Under this name the exact stages are kept, rounded to float64; NaN in query rows that were not judged."""
INPUTS = "inputs"
"""Under this name the case's inputs are kept, as they were delivered."""


@dataclass(frozen=True)
class StoredArray:
    """One stage as an implementation returned it; under ``EXACT``, ``INPUTS``, ``bound_name``: what it is held by."""

    case: str
    dtype: str
    implementation: str
    stage: str
    array: NDArray[Any]


class ResultsWriter:
    """Writes one run's directory; every file is renamed into place when it is whole."""

    ROWS_PER_PART = 50_000
    SECONDS_PER_PART = 10.0
    """What was judged longer ago is on disk, whatever ends the run."""
    ARRAY_BYTES_PER_PART = 64 * 2**20

    def __init__(self, directory: Path, *, resume: bool = False) -> None:
        """Empty a directory that holds an earlier run, or with ``resume`` add to it. Raises ``OutputError``."""
        self.directory = directory
        self._rows: list[Row] = []
        self._arrays: list[StoredArray] = []
        self._array_bytes = 0
        self._flushed = monotonic()
        _prepare_directory(directory, keep=("rows", "arrays") if resume else ())
        self._parts = {kind: _next_part(directory / kind) for kind in ("rows", "arrays")}

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Keep rows; they are written as soon as a part is full."""
        self._rows.extend(rows)
        if len(self._rows) >= self.ROWS_PER_PART or monotonic() - self._flushed > self.SECONDS_PER_PART:
            self.flush()

    def add_arrays(self, arrays: Iterable[StoredArray]) -> None:
        """Keep arrays; they are written as soon as a part is full."""
        for stored in arrays:
            self._arrays.append(stored)
            self._array_bytes += stored.array.nbytes
        if self._array_bytes >= self.ARRAY_BYTES_PER_PART:
            self.flush()

    def flush(self) -> None:
        """Write everything that is kept, arrays first, so that no row speaks of an array that is not there."""
        if self._arrays:
            self._write_part("arrays", pa.Table.from_pylist(list(map(_array_record, self._arrays)), ARRAY_SCHEMA))
            self._arrays, self._array_bytes = [], 0
        if self._rows:
            self._write_part("rows", pa.Table.from_pydict(_columns(self._rows), ROW_SCHEMA))
            self._rows = []
        self._flushed = monotonic()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write environment.json, cases.json or summary.json."""
        text = json.dumps({"format": FORMAT, **content}, indent=2, ensure_ascii=False) + "\n"
        # A command line may hold bytes that are no text; they are shown as question marks.
        _write(self.directory / name, lambda path: path.write_text(text, encoding="utf-8", errors="replace"))

    def _write_part(self, kind: str, table: pa.Table) -> None:
        number = self._parts[kind]
        path = self.directory / kind / f"part-{number:05d}.parquet"
        _write(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
        self._parts[kind] = number + 1


def _next_part(folder: Path) -> int:
    numbers = [int(path.stem.removeprefix("part-")) for path in folder.glob("part-*.parquet")]
    return max(numbers, default=-1) + 1


def _prepare_directory(directory: Path, keep: Sequence[str] = ()) -> None:
    """Create the directory, or empty one that holds an earlier run but for what is kept; all else is left alone."""
    try:
        if directory.exists() and not directory.is_dir():
            raise OutputError(f"{directory} is a file; expected a folder to write results to")
        if directory.is_dir() and any(directory.iterdir()) and not _holds_results(directory):
            raise OutputError(
                f"{directory} is not empty and holds no earlier results; name another folder with --output"
            )
        # The summary goes first: whatever ends us before the rest is gone, no earlier run is shown as complete.
        for name in ("summary.json", "cases.json"):
            (directory / name).unlink(missing_ok=True)
        if (directory / REPORT_FOLDER / "report.md").is_file():
            shutil.rmtree(directory / REPORT_FOLDER)
        for part in ("rows", "arrays", "logs", SCRIPTS_FOLDER):
            if part not in keep and (directory / part).is_dir():
                shutil.rmtree(directory / part)
        for part in ("rows", "arrays", "logs"):
            (directory / part).mkdir(parents=True, exist_ok=part in keep)
    except OSError as error:
        raise OutputError(f"{directory} cannot be written: {error.strerror or error}") from None


def _holds_results(directory: Path) -> bool:
    """Whether an earlier run wrote this directory; other tools, too, call a file environment.json."""
    try:
        environment = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(environment, dict) and {"format", "label", "implementations"} <= environment.keys()


def _write(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    return {field.name: [getattr(row, field.name) for row in rows] for field in fields(Row)}


def _array_record(stored: StoredArray) -> dict[str, Any]:
    array = np.ascontiguousarray(stored.array)
    return {
        "case": stored.case,
        "dtype": stored.dtype,
        "implementation": stored.implementation,
        "stage": stored.stage,
        "array_dtype": str(array.dtype),
        "shape": list(stored.array.shape),
        "data": array.tobytes(),
    }
