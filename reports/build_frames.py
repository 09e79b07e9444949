"""The frames made of results: rows split by what they compare, versions added, sorted; and the columns of each frame.

Parquet holds every text as it is. CSV is for spreadsheets too, so there, in columns of text:

- a text that a spreadsheet would run as a formula (it begins with = + - @, a tab or a line break) has an apostrophe
  before it, and so has what stands like that after a semicolon, a tab or a line break within a text; a number that is
  written as text, such as -0.25 in ``printed``, stays as it is;
- line breaks are single line feeds, inside quotes; other control characters are replacement characters (U+FFFD);
- an empty text is a pair of quotes, and no value at all is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from attncheck.merge import Merged
from attncheck.reports.frames import Column, Frames, KeptArrays, stage_order
from attncheck.results.coverage import RequestedRun
from attncheck.results.format import COLUMNS as ROW_COLUMNS
from attncheck.results.format import ROW_SCHEMA, columns_of
from attncheck.results.reader import Run
from attncheck.spec import DTYPES
from attncheck.wording import at_most, index_from

COLUMNS: Mapping[str, str] = {
    "environment": "label of the run",
    "version": "version of the implementation's framework",
    "basis": "printed by the document, known by derivation, or exact: computed by the document and not printed",
    "printed": ROW_COLUMNS["reference_text"].meaning,
    "outcome": "one word: bitwise, within bounds, nan, broken, failed, not judged, unsupported or xpass",
    "first": "what the first call gave there",
    "second": "what the further calls gave there, mapped back",
    **{name: column.meaning for name, column in ROW_COLUMNS.items() if column.frames},
}
"""The meaning of every column of the frames."""

RESULTS = columns_of("results", "environment", "implementation", "version")
PAIRS = columns_of(
    "pairs",
    *("case", "operation", "dtype", "stage", "environment", "implementation", "version"),
    *("other_environment", "other", "other_version"),
)
NUMBERS = columns_of(
    "numbers",
    *("case", "dtype", "stage", "called", "basis", "index", "printed"),
    *("environment", "implementation", "version", "value"),
)
_COUNTS = [column.name for column in ROW_SCHEMA if pa.types.is_integer(column.type) and column.name in RESULTS]
_MAX_WARNINGS = 10
_NOTE, _PROBLEM, _ANNOUNCED = range(3)


def make_frames(merged: Merged) -> Frames:
    """Split merged rows into frames, add versions, and sort."""
    rows = merged.rows.copy(deep=False)
    versions = {
        (run.label, name): run.environment["versions"].get(package, "")
        for run in merged.runs
        for name, package in run.environment["implementations"].items()
    }
    for column, environment, implementation in (
        ("version", "environment", "implementation"),
        ("other_version", "other_environment", "other"),
    ):
        rows[column] = _looked_up(rows[environment], rows[implementation], versions)
    rows["basis"] = rows["comparison"]
    rows["printed"] = rows["reference_text"]
    for column in _COUNTS:
        rows[column] = pd.to_numeric(rows[column]).astype("Int64")  # whole numbers beside empty cells
    kinds, notes = rows["comparison"], [note for run in merged.runs for note in _notes(run, merged)]
    return Frames(
        results=_sorted(rows[kinds == "stage"], RESULTS),
        pairs=_sorted(rows[kinds == "pair"], PAIRS),
        numbers=_sorted(rows[kinds.isin(["printed", "known", "exact"])], NUMBERS),
        environments=_environments(merged),
        columns=tuple(Column(*key, version) for key, version in versions.items()),
        cases=merged.cases,
        notes=(*(text for _, text in notes), *merged.notes, *_warnings(merged)),
        has_faults=any(run.environment["faults"] for run in merged.runs),
        is_incomplete=any(kind >= _PROBLEM for kind, _ in notes),
        problems=tuple(text for kind, text in notes if kind >= _PROBLEM),
        announced=tuple(text for kind, text in notes if kind == _ANNOUNCED),
        asked={run.label: RequestedRun.of(run.environment, len(run.cases), run.stopped) for run in merged.runs},
        sources={
            (run.label, name): source
            for run in merged.runs
            for name, source in run.environment.get("sources", {}).items()
        },
        started={run.label: run.environment.get("started", "") for run in merged.runs},
        times=rows.loc[rows["seconds"].notna(), ["environment", "implementation", "case", "dtype", "seconds"]],
        arrays=KeptArrays({run.label: run.directory for run in merged.runs}),
        again={run.label: run.environment.get("again", {}) for run in merged.runs},
        properties={run.label: run.properties for run in merged.runs if run.properties},
        classes={(run.label, name): of for run in merged.runs for name, of in run.environment["classes"].items()},
    )


def _looked_up(one: pd.Series[str], other: pd.Series[str], found: Mapping[tuple[str, str], str]) -> pd.Series[str]:
    """Look up two columns' values together, each combination once."""
    ones, first = pd.factorize(one, use_na_sentinel=True)
    others, second = pd.factorize(other, use_na_sentinel=True)
    texts = [found.get((name, each)) for name in [*first, None] for each in [*second, None]]
    # A value that is absent has the code -1, the last place.
    codes = (ones % (len(first) + 1)) * (len(second) + 1) + others % (len(second) + 1)
    return pd.Series(texts, dtype=one.dtype).take(codes).set_axis(one.index)


def _sorted(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    names = ("case", "dtype", "environment", "implementation", "stage", "other_environment", "other", "basis", "index")
    orders: Mapping[str, Callable[[str], Any]] = {"dtype": DTYPES.index, "stage": stage_order, "index": index_from}
    keys = [_ranks(rows[name], orders.get(name, str)) for name in names]
    return rows[list(columns)].take(np.lexsort(keys[::-1])).reset_index(drop=True)


def _ranks(texts: pd.Series[str], key: Callable[[str], Any]) -> NDArray[np.intp]:
    """Return each text's place in the order of a key, which is asked once for each; what is absent comes first."""
    codes, found = pd.factorize(texts, use_na_sentinel=True)
    distinct = found.tolist()
    ranks = np.empty(len(distinct) + 1, dtype=np.intp)
    ranks[sorted(range(len(distinct)), key=lambda number: key(distinct[number]))] = np.arange(len(distinct))
    ranks[-1] = -1
    return ranks[codes]


def _environments(merged: Merged) -> pd.DataFrame:
    records = [
        {
            "environment": run.label,
            "python": environment["python"],
            **{f"version_{name}": version for name, version in sorted(environment["versions"].items())},
            **{name: environment[name] for name in ("platform", "processors", "threads_per_worker")},
            "cpu_features": " ".join(environment["cpu_features"]),
            "flags": " ".join(f"{name}={value}" for name, value in sorted(environment["flags"].items())),
            "command": environment["command"],
            "complete": run.is_complete,
            "exit_code": None if run.summary is None else run.summary["exit_code"],
        }
        for run in merged.runs
        for environment in [run.environment]
    ]
    return pd.DataFrame(records).sort_values("environment", ignore_index=True)


def _warnings(merged: Merged) -> list[str]:
    """Say what in the cases is probably not meant, each thing once."""
    found = list(dict.fromkeys(line for case in merged.cases.values() for line in case.get("warnings", ())))
    return at_most(_MAX_WARNINGS, [f"warning: {line}" for line in found], "and {} more warnings")


def _notes(run: Run, merged: Merged) -> Iterator[tuple[int, str]]:
    """Yield what did not run, and why, with ``_PROBLEM`` or more where it was asked for and is not there.

    A framework that is simply not installed is not asked for. What is ``_ANNOUNCED`` a run printed when it began.
    """
    where, environment = f"{run.label}: " if len(merged.runs) > 1 else "", run.environment
    for name, reason in environment["left_out"].items():
        yield _NOTE, f"{where}{name} was left out: {reason}{_instead(name, run, merged)}"
    missing = [(name, reason, _instead(name, run, merged)) for name, reason in environment["missing"].items()]
    for name, reason, instead in sorted(missing, key=lambda each: not each[2]):
        yield _NOTE if instead else _ANNOUNCED, f"{where}{name} could not run: {reason}{instead}"
    yield from ((_ANNOUNCED, f"{where}bad case: {fault}") for fault in environment["faults"])
    if run.summary is None:
        yield _PROBLEM, f"{where}this run was interrupted, or is still going on: its results are not complete"
    yield from ((_PROBLEM, f"{where}partial results: {note}") for note in run.notes)


def _instead(name: str, run: Run, merged: Merged) -> str:
    """Say which other environment ran a backend or implementation that this one lacks; empty where none did."""
    filled = [
        other.label
        for other in merged.runs
        if other is not run and any(f"{each}.".startswith(f"{name}.") for each in other.environment["implementations"])
    ]
    return f"; {filled[0]} ran it" if filled else ""
