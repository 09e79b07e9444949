"""The tidy frames that every report is made of.

``results``       one row per environment, implementation, case, dtype and stage
``pairs``         one row per two implementations, case, dtype and stage
``numbers``       one row per printed, known or unprinted number and implementation
``environments``  one row per environment

Columns are documented in ``columns.py``; rows are sorted, so that the same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd

from attncheck.harness.merge import Merged
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import DTYPES, stage_place
from attncheck.reports.columns import NUMBERS, PAIRS, RESULTS


@dataclass(frozen=True)
class Column:
    """One implementation in one environment: a column of every table that people read."""

    environment: str
    implementation: str
    version: str

    def title(self, *, with_environment: bool) -> str:
        """Return the column's heading."""
        text = f"{self.implementation} {self.version}"
        return f"{text} ({self.environment})" if with_environment else text


@dataclass(frozen=True)
class Frames:
    """Everything that a report says, as frames, with the cases' own records beside them."""

    results: pd.DataFrame
    pairs: pd.DataFrame
    numbers: pd.DataFrame
    environments: pd.DataFrame
    columns: tuple[Column, ...]
    cases: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    """What did not run, and why, a line each."""
    has_faults: bool
    """Whether a case file could not be used."""
    is_incomplete: bool
    """Whether something that was asked for is not there; a framework that is simply not installed is not asked for."""

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the frames by name."""
        return {
            "results": self.results,
            "pairs": self.pairs,
            "numbers": self.numbers,
            "environments": self.environments,
        }


def make_frames(merged: Merged) -> Frames:
    """Split merged rows into frames, add versions, and sort."""
    rows = merged.rows.copy()
    versions = {
        (run.label, name): run.environment["versions"].get(package, "")
        for run in merged.runs
        for name, package in run.environment["implementations"].items()
    }
    for column, environment, implementation in (
        ("version", "environment", "implementation"),
        ("other_version", "other_environment", "other"),
    ):
        keys = zip(rows[environment], rows[implementation], strict=True)
        rows[column] = [versions.get(key) for key in keys]
    rows["basis"] = rows["comparison"]
    rows["printed"] = rows["reference_text"]
    for column in ("judged_rows", "query_rows"):
        rows[column] = pd.to_numeric(rows[column]).astype("Int64")  # whole numbers beside empty cells
    kinds = rows["comparison"]
    return Frames(
        results=_sorted(rows[kinds == "stage"], RESULTS),
        pairs=_sorted(rows[kinds == "pair"], PAIRS),
        numbers=_sorted(rows[kinds.isin(["printed", "known", "exact"])], NUMBERS),
        environments=_environments(merged),
        columns=tuple(Column(*key, version) for key, version in versions.items()),
        cases=merged.cases,
        notes=_notes(merged),
        has_faults=any(run.environment["faults"] for run in merged.runs),
        is_incomplete=any(
            run.summary is None or run.environment["missing"] or run.environment["faults"] for run in merged.runs
        ),
    )


def failing(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that fail a run."""
    return frame[_goes_wrong(frame) & ~frame["known"].astype(bool)]


def known_divergences(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that would fail a run, were they not known beforehand; documents' errata are others."""
    return frame[_goes_wrong(frame) & frame["known"].astype(bool) & frame["verdict"].ne(Verdict.MISPRINT)]


def _goes_wrong(frame: pd.DataFrame) -> pd.Series[bool]:
    harmless = [verdict.value for verdict in Verdict if not verdict.exit_code]
    return ~frame["verdict"].isin(harmless)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows as plain records."""
    return cast(list[dict[str, Any]], frame.to_dict("records"))


def groups(frame: pd.DataFrame, keys: str | list[str]) -> dict[Any, pd.DataFrame]:
    """Return the parts of a frame by the value of a column, or the values of several."""
    return dict(iter(frame.groupby(keys)))


def case_order(case: Mapping[str, Any]) -> tuple[bool, str, int]:
    """Sort key: documents first, then file by file, in the order of the file."""
    return (not is_document(case), case["file"], case["line"])


def is_document(case: Mapping[str, Any]) -> bool:
    """Whether a case is transcribed from a published document."""
    return bool(case["source"]["kind"] == "document")


def documents_of(frames: Frames) -> dict[str, list[Mapping[str, Any]]]:
    """Return the documents' cases, by file and in the order of the file."""
    documents: dict[str, list[Mapping[str, Any]]] = {}
    for case in sorted(frames.cases.values(), key=case_order):
        if is_document(case):
            documents.setdefault(case["file"], []).append(case)
    return documents


def under_erratum(frames: Frames, numbers: pd.DataFrame) -> pd.Series[bool]:
    """Say of each number whether it is printed under a recorded erratum."""
    places = {
        (identity, expected["name"])
        for identity, case in frames.cases.items()
        for expected in case["expected"]
        if "erratum" in expected
    }
    flags = [place in places for place in zip(numbers["case"], numbers["stage"], strict=True)]
    return pd.Series(flags, index=numbers.index, dtype=bool)


def rows_judged(judged: int, queries: int) -> str:
    """Say how many query rows stand for all."""
    return f"{judged:,} of {queries:,} query rows judged"


def count_places(numbers: pd.DataFrame) -> int:
    """Count numbers once, however many implementations and dtypes they were compared with."""
    return len(numbers[["case", "stage", "index"]].drop_duplicates())


def stage_order(stage: str) -> tuple[int, str]:
    """Sort key: the order in which attention computes the stages, then names of quantities."""
    return (stage_place(stage), stage)


def _sorted(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    keys = pd.DataFrame(
        {
            "case": rows["case"],
            "dtype": rows["dtype"].map({dtype: number for number, dtype in enumerate(DTYPES)}),
            "environment": rows["environment"],
            "implementation": rows["implementation"],
            "stage": rows["stage"].map(stage_order),
            "other_environment": rows["other_environment"].fillna(""),
            "other": rows["other"].fillna(""),
            "basis": rows["basis"],
            "index": rows["index"].map(_index_order),
        }
    )
    order = keys.sort_values(list(keys.columns), kind="stable").index
    return rows.loc[order, list(columns)].reset_index(drop=True)


def _index_order(index: object) -> tuple[int, ...]:
    return tuple(int(axis) for axis in index.split(",")) if isinstance(index, str) and index else ()


def _environments(merged: Merged) -> pd.DataFrame:
    records = []
    for run in merged.runs:
        environment = run.environment
        records.append(
            {
                "environment": run.label,
                "python": environment["python"],
                **{f"version_{name}": version for name, version in sorted(environment["versions"].items())},
                "platform": environment["platform"],
                "processors": environment["processors"],
                "threads_per_worker": environment["threads_per_worker"],
                "cpu_features": " ".join(environment["cpu_features"]),
                "flags": " ".join(f"{name}={value}" for name, value in sorted(environment["flags"].items())),
                "command": environment["command"],
                "complete": run.summary is not None,
                "exit_code": None if run.summary is None else run.summary["exit_code"],
            }
        )
    return pd.DataFrame(records).sort_values("environment", ignore_index=True)


def _notes(merged: Merged) -> tuple[str, ...]:
    notes = []
    for run in merged.runs:
        environment = run.environment
        where = f"{run.label}: " if len(merged.runs) > 1 else ""
        notes += [f"{where}{name} was left out: {reason}" for name, reason in environment["left_out"].items()]
        notes += [f"{where}{name} could not run: {reason}" for name, reason in environment["missing"].items()]
        notes += [f"{where}bad case: {fault}" for fault in environment["faults"]]
        if run.summary is None:
            notes.append(f"{where}this run was interrupted, or is still going on: its results are not complete")
    return tuple(notes)
