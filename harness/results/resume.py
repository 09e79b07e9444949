"""Rows on disk that are used again: by a run that resumes an interrupted one, and by the diagnosis.

The diagnosis rewrites failing rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from attncheck.common.errors import OutputError, UsageError
from attncheck.results.format import CHANGED_BY_DIAGNOSIS, FORMAT_VERSION, ROW_SCHEMA, Row
from attncheck.results.parts import list_row_parts, read_rows, read_rows_part, remove_damaged, remove_units
from attncheck.results.reader import read_environment
from attncheck.results.records import cases_json_lines, read_cases
from attncheck.results.tables import RowTable, concatenate_tables, to_column
from attncheck.results.writer import has_no_files_to_lose, write_table
from attncheck.spec.verdicts import ALL_CASES, Verdict

_IDENTICAL_FIELDS = (
    "implementations",
    "versions",
    "classes",
    "python",
    "platform",
    "cpu_features",
    "threads_per_worker",
    "flags",
)
"""The fields of environment.json on which numbers may depend."""
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class ResumeState:
    """The rows that an earlier run judged, as they are on disk.

    ``kept_environment`` are its label, its command and its start, which are kept; ``backend_descriptions`` are the
    descriptions of its workers. ``is_empty`` if there was no earlier run.
    """

    table: RowTable = field(default_factory=lambda: concatenate_tables([], ROW_SCHEMA))
    kept_environment: Mapping[str, str] = field(default_factory=dict)
    backend_descriptions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    is_empty: bool = True

    @classmethod
    def empty(cls) -> ResumeState:
        """Return the state of a new run."""
        return cls()

    @property
    def finished_units(self) -> frozenset[tuple[str, str]]:
        """The finished (case, dtype): all rows of one are written together."""
        return frozenset(self.table.units())

    def rows(self) -> Iterator[list[Row]]:
        """Yield the rows, some at a time: as objects, they may not fit in memory."""
        for start in range(0, len(self.table), _ROWS_AT_ONCE):
            yield [Row(**record) for record in self.table.take(slice(start, start + _ROWS_AT_ONCE)).records()]


Records = Callable[[], Iterable[Mapping[str, Any]]]
"""Returns the records of a run's cases; it may be called several times."""


def read_resume_state(
    directory: Path, environment: Mapping[str, Any], cases: Records, *, untried: bool = False, left_out: bool = False
) -> ResumeState:
    """Read the state of an earlier run of the same plan; it is empty if there is no directory, or an empty one.

    It is also empty if a run was killed before it wrote its cases, or while it replaced another one. With ``untried``,
    cases that were left untried run again, and with ``left_out`` cases that an implementation did not run by
    default: all rows of such a case and dtype are removed.

    Parts that cannot be read are removed, and computed again. Raises ``UsageError`` if the earlier run was another one,
    and ``ResultsError`` if the directory contains anything else.
    """
    if not directory.exists() or (directory.is_dir() and has_no_files_to_lose(directory)):
        return ResumeState.empty()
    before = read_environment(directory)
    if not (directory / "cases.json").exists():
        return ResumeState.empty()
    _require_same(directory, "the format of its results", before["format"], FORMAT_VERSION)
    for name in _IDENTICAL_FIELDS:
        _require_same(directory, name, before.get(name), environment[name])
    _require_same_cases(directory, cases)
    remove_damaged(directory)
    if untried:
        remove_units(directory, "verdict", Verdict.UNTRIED.value)
    if left_out:
        remove_units(directory, "lacks", ALL_CASES)
    names: dict[str, str] = {name: before[name] for name in ("label", "command", "started") if name in before}
    return ResumeState(read_rows(directory)[0], names, before.get("backends", {}), is_empty=False)


def _require_same_cases(directory: Path, cases: Records) -> None:
    """Compare the cases as text, and read the file as a whole only if the texts differ."""
    path = directory / "cases.json"
    if _file_contains(path, cases_json_lines(cases())):
        return
    before, now = read_cases(path)[0], {case["id"]: case for case in cases()}
    for identity in sorted(before.keys() | now.keys()):
        # The meaning of a tag is in the first case that has it, which may be another one now.
        pair = ({**case, "probes": {}} if case else None for case in (before.get(identity), now.get(identity)))
        _require_same(directory, f"the case {identity}", *pair)


def _file_contains(path: Path, pieces: Iterable[str]) -> bool:
    """Return whether a file consists of exactly these pieces; false if it cannot be read."""
    with suppress(OSError):
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                return all(file.read(len(piece)) == piece for piece in pieces) and not file.read(1)
    return False


def _require_same(directory: Path, what: str, before: Any, now: Any) -> None:
    if _to_plain_json(before) == _to_plain_json(now):
        return
    change = (
        f"was {_to_json_text(before)} and is {_to_json_text(now)}"
        if len(_to_json_text(before) + _to_json_text(now)) < 200
        else "is another"
    )
    raise UsageError(
        f"the run in {directory} cannot be resumed: {what} {change}; run it anew without --resume, or in another folder"
    )


def _to_plain_json(content: Any) -> Any:
    return json.loads(json.dumps(content))


def _to_json_text(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False)


RowKey: TypeAlias = tuple[Any, ...]
_KEY_FIELDS = (
    *("implementation", "case", "dtype", "comparison", "stage", "other", "called", "index"),
    *("verdict", "message", "reference_text"),
)
_CHANGEABLE_VERDICTS = [Verdict.NUMERIC.value, Verdict.NONFINITE.value, Verdict.SEMANTIC.value]


def row_key(row: Row) -> RowKey:
    """Return the key of a row on disk, as it was first written; rows with the same key have the same text."""
    return tuple(None if (value := getattr(row, name)) is None else str(value) for name in _KEY_FIELDS)


def replace_rows(directory: Path, changed: Mapping[RowKey, Row]) -> None:
    """Rewrite changed rows in the parts on disk; a part is renamed into place when it is complete."""
    changed = {identity: row for identity, row in changed.items() if row_key(row) != identity}
    for path in list_row_parts(directory) if changed else ():
        with OutputError.convert_os_errors(path):
            _replace_rows_in_part(path, changed)


def _replace_rows_in_part(path: Path, changed: Mapping[RowKey, Row]) -> None:
    table = read_rows_part(path)
    numbers = np.flatnonzero(np.isin(table["verdict"].array, _CHANGEABLE_VERDICTS))
    identities = map(itemgetter(*_KEY_FIELDS), table.take(numbers).records(_KEY_FIELDS))
    numbered = zip(numbers.tolist(), identities, strict=True)
    changed_rows = {number: changed[identity] for number, identity in numbered if identity in changed}
    if not changed_rows:
        return
    columns = dict(table.columns)
    for name in CHANGED_BY_DIAGNOSIS:
        values = table[name].tolist()
        for number, row in changed_rows.items():
            value = getattr(row, name)
            values[number] = None if value is None else str(value)
        columns[name] = to_column(values, ROW_SCHEMA[name])
    write_table(path, RowTable(columns))
