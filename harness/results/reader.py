"""Results directories read back, also during a run or after one was interrupted.

Damaged parts are left out and listed in ``Run.notes``; only folders that are no results directory are errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from attncheck.common.errors import ResultsError
from attncheck.results.coverage import EarlyStop
from attncheck.results.format import FORMAT_VERSION, Row
from attncheck.results.parts import ArrayKey, ArrayParts, read_property_rows, read_rows
from attncheck.results.records import (
    CaseRecords,
    EnvironmentRecord,
    SummaryRecord,
    read_cases,
    read_json,
    require_valid_record,
    with_missing_records,
)

if TYPE_CHECKING:
    import pandas as pd


Content = TypeVar("Content")


@dataclass(frozen=True)
class Run:
    """One run's results: its environment, its rows as a frame in ``ROW_SCHEMA``'s columns, and the rows of properties.

    ``summary`` is None during the run, or if it was interrupted. ``notes`` list the parts that cannot be read.
    ``label`` is the label of the run, with more words if several runs that are read together share it.
    """

    directory: Path
    label: str
    environment: dict[str, Any]
    cases: CaseRecords
    rows: pd.DataFrame
    summary: dict[str, Any] | None
    notes: tuple[str, ...] = ()
    properties: Sequence[Row] = ()

    @property
    def is_complete(self) -> bool:
        """True if the run was completed and all of its files could be read."""
        return self.summary is not None and self.stopped is None and not self.notes

    @property
    def stopped(self) -> EarlyStop | None:
        """The stop of the run after some failing cases; None if it was not stopped."""
        stop = (self.summary or {}).get("stopped")
        return None if stop is None else EarlyStop(stop["failing"], stop["not_run"], stop.get("in_part", 0))

    @property
    def parts(self) -> ArrayParts:
        """The arrays of the run, none of them read yet."""
        return ArrayParts(self.directory)

    def arrays(self) -> dict[ArrayKey, NDArray[Any]]:
        """Read all arrays of the run."""
        return read_arrays(self.directory)


def read_run(directory: Path) -> Run:
    """Read one results directory. Raises ``ResultsError`` for anything else."""
    environment = read_environment(directory)
    table, notes = read_rows(directory)
    rows: pd.DataFrame = table.to_pandas()
    del table
    cases, of_cases = read_cases(directory / "cases.json")
    named = with_missing_records(cases, rows["case"].unique().tolist())
    if len(named) > len(cases) and not of_cases:
        of_cases = (f"{directory / 'cases.json'} is absent or incomplete: some cases have no title and no options",)
    summary, of_summary = _read_or_note(lambda: _read_summary(directory / "summary.json"), None)
    properties, of_properties = _read_or_note(lambda: read_property_rows(directory), list[Row]())
    notes += of_cases + of_summary + of_properties + ArrayParts(directory).notes
    return Run(directory, environment["label"], environment, named, rows, summary, notes, properties)


def read_environment(directory: Path) -> dict[str, Any]:
    """Read environment.json of a results directory. Raises ``ResultsError`` for anything else."""
    if not directory.is_dir():
        raise ResultsError(f"{directory} is not a folder; expected a results directory that `attncheck check` wrote")
    environment = read_json(directory / "environment.json")
    if environment is None:
        raise ResultsError(
            f"{directory} is not a results directory: it has no environment.json; name a folder "
            "that `attncheck check` wrote"
        )
    require_format_version(environment.get("format"), directory)
    require_valid_record(environment, EnvironmentRecord, directory / "environment.json")
    return environment


def _read_or_note(read: Callable[[], Content], otherwise: Content) -> tuple[Content, tuple[str, ...]]:
    """Return what ``read`` returns, or ``otherwise`` with a note why it cannot be read."""
    try:
        return read(), ()
    except ResultsError as error:
        return otherwise, (str(error),)


def require_format_version(version: object, path: Path) -> None:
    """Raise ``ResultsError`` for results of another version of the format."""
    if version == FORMAT_VERSION and not isinstance(version, bool):
        return
    named = ascii(version)[:60]  # any value of the file, on one line
    message = f"{path} has results format {named}; this version of attncheck reads {FORMAT_VERSION}"
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ResultsError(f"{message}: a newer attncheck wrote it; update attncheck")
    raise ResultsError(f"{message}: an older attncheck wrote it; run the check again, or read it with that version")


def _read_summary(path: Path) -> dict[str, Any] | None:
    summary = read_json(path)
    if summary is not None:
        require_valid_record(summary, SummaryRecord, path)
    return summary


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the results directories among the paths and directly below them, each once.

    A path that is neither is returned unchanged: reading it raises the error.
    """
    directories: list[Path] = []
    for path in paths:
        below = sorted(item.parent for item in path.glob("*/environment.json")) if path.is_dir() else []
        directories += below if below and not (path / "environment.json").is_file() else [path]
    distinct: dict[Path, Path] = {}
    for path in directories:
        distinct.setdefault(path.resolve(), path)
    return list(distinct.values())


def read_runs(directories: Path | str | Sequence[Path | str]) -> list[Run]:
    """Read results directories, sorted by label; if several share a label, their folders are added to it.

    Args:
        directories: The folder that ``attncheck check`` or ``attncheck run`` wrote, or several.

    Raises:
        ResultsError: If a folder holds no results.
    """
    folders = [directories] if isinstance(directories, Path | str) else directories
    runs = [read_run(Path(directory)) for directory in folders]
    labels = distinct_labels({run.directory: run.label for run in runs})
    renamed = [replace(run, label=labels[run.directory]) for run in runs]
    return sorted(renamed, key=lambda run: run.label)


def with_matching_labels(before: Sequence[Run], after: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Give a single run on each side the same label, so that they are compared even if their labels differ."""
    if len(before) == len(after) == 1 and before[0].label != after[0].label:
        label = f"{before[0].label} -> {after[0].label}"
        return [replace(before[0], label=label)], [replace(after[0], label=label)]
    return list(before), list(after)


def distinct_labels(labels: Mapping[Path, str]) -> dict[Path, str]:
    """Append the folder's name to every label that several runs share, with as much of its path as necessary.

    Example:
        >>> labels = {Path("/old/latest"): "laptop", Path("/new/latest"): "laptop"}
        >>> sorted(distinct_labels(labels).values())
        ['laptop (new/latest)', 'laptop (old/latest)']
    """
    counts = Counter(labels.values())
    distinct = {path: label for path, label in labels.items() if counts[label] == 1}
    for path, label in sorted(labels.items(), key=lambda item: item[0].resolve()):
        if path in distinct:
            continue
        name = f"{label} ({_shortest_unique_ending(path, [another for another in labels if labels[another] == label])})"
        copies = sum(1 for another in distinct.values() if another == name or another.startswith(f"{name} #"))
        distinct[path] = f"{name} #{copies + 1}" if copies else name
    return distinct


def _shortest_unique_ending(path: Path, paths: Sequence[Path]) -> str:
    """Return the shortest end of a path that no other path has."""
    parts = path.resolve().parts
    others = [another.resolve().parts for another in paths if another != path]
    distinct = (n for n in range(1, len(parts)) if parts[-n:] not in {another[-n:] for another in others})
    length = next(distinct, len(parts))
    return "/".join(parts[-length:])


def read_arrays(directory: Path) -> dict[ArrayKey, NDArray[Any]]:
    """Read all arrays of one results directory. Raises ``ResultsError`` for a damaged one."""
    parts = ArrayParts(directory)
    return {
        (case, dtype, name, stage): array
        for case, dtype in parts.units()
        for (name, stage), array in parts.arrays_of(case, dtype).items()
    }
