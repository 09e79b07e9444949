"""Results directories read back, also while a run goes on or after one was interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from attncheck.harness.errors import ResultsError
from attncheck.harness.results.writer import ARRAY_SCHEMA, FORMAT, ROW_SCHEMA

_ENVIRONMENT = (
    "label",
    "command",
    "python",
    "platform",
    "cpu_features",
    "processors",
    "threads_per_worker",
    "versions",
    "flags",
    "implementations",
    "classes",
    "left_out",
    "missing",
    "faults",
)
"""What reports take from environment.json."""

ArrayKey = tuple[str, str, str, str]
"""case, dtype, implementation, stage"""


@dataclass(frozen=True)
class Run:
    """One run's results: rows as a frame in ``ROW_SCHEMA``'s columns, and what it ran on.

    ``summary`` is None while the run goes on, or when it was interrupted.
    """

    directory: Path
    label: str
    environment: dict[str, Any]
    cases: dict[str, dict[str, Any]]
    rows: pd.DataFrame
    summary: dict[str, Any] | None

    def arrays(self) -> dict[ArrayKey, NDArray[Any]]:
        """Read the arrays that the run kept."""
        return read_arrays(self.directory)


def read_run(directory: Path) -> Run:
    """Read one results directory. Raises ``ResultsError`` for anything else."""
    if not directory.is_dir():
        raise ResultsError(f"{directory} is not a folder; expected a results directory that `attncheck run` wrote")
    environment = _read_json(directory / "environment.json")
    if environment is None:
        raise ResultsError(f"{directory} is not a results directory: it has no environment.json")
    if environment.get("format") != FORMAT:
        raise ResultsError(
            f"{directory} has results format {environment.get('format')}; this version reads {FORMAT}; run it again"
        )
    _require(environment, _ENVIRONMENT, directory / "environment.json")
    cases = _read_json(directory / "cases.json") or {"cases": []}
    _require(cases, ("cases",), directory / "cases.json")
    summary = _read_json(directory / "summary.json")
    if summary is not None:
        _require(summary, ("exit_code",), directory / "summary.json")
    return Run(
        directory=directory,
        label=environment["label"],
        environment=environment,
        cases={case["id"]: case for case in cases["cases"]},
        rows=_read_parts(directory / "rows", ROW_SCHEMA).to_pandas(),
        summary=summary,
    )


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the results directories among the paths and directly below them.

    A path that is neither is returned as it is: the reader says what it is instead.
    """
    found: list[Path] = []
    for path in paths:
        below = sorted(item.parent for item in path.glob("*/environment.json")) if path.is_dir() else []
        found += below if below and not (path / "environment.json").is_file() else [path]
    return list(dict.fromkeys(found))


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read several results directories, sorted by label. Raises ``ResultsError`` where two have the same label."""
    runs = sorted((read_run(directory) for directory in directories), key=lambda run: run.label)
    for first, second in pairwise(runs):
        if first.label == second.label:
            raise ResultsError(
                f"{first.directory} and {second.directory} are both labelled {first.label!r}; "
                "give each run a --label of its own"
            )
    return runs


def read_arrays(directory: Path) -> dict[ArrayKey, NDArray[Any]]:
    """Read the arrays of one results directory."""
    arrays: dict[ArrayKey, NDArray[Any]] = {}
    for row in _read_parts(directory / "arrays", ARRAY_SCHEMA).to_pylist():
        key = (row["case"], row["dtype"], row["implementation"], row["stage"])
        try:
            arrays[key] = np.frombuffer(row["data"], dtype=row["array_dtype"]).reshape(row["shape"])
        except (TypeError, ValueError) as error:
            raise ResultsError(f"{directory}: the array {' '.join(key)} cannot be read: {error}") from None
    return arrays


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ResultsError(f"{path} is not what `attncheck run` writes")
    return content


def _require(content: dict[str, Any], names: Sequence[str], path: Path) -> None:
    absent = [name for name in names if name not in content]
    if absent:
        raise ResultsError(f"{path} is not what `attncheck run` writes: it has no {absent[0]}")


def _read_parts(folder: Path, schema: pa.Schema) -> pa.Table:
    tables = [schema.empty_table()]
    for path in sorted(folder.glob("part-*.parquet")):
        try:
            tables.append(pq.read_table(path).select(schema.names).cast(schema))
        except (OSError, KeyError, pa.ArrowException) as error:
            raise ResultsError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    return pa.concat_tables(tables)
