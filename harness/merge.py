"""Several runs as one comparison: implementations of different environments and versions held against each other.

Nothing is computed again by any framework. Where the runs kept all their arrays, every two implementations are compared
across the runs, and each stage is judged among all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import pandas as pd
from numpy.typing import NDArray

from attncheck.harness.judging.judge import judge_among, judge_pairs, pair_row
from attncheck.harness.results.reader import Run
from attncheck.harness.results.writer import Row
from attncheck.harness.verdicts import Verdict

_REJUDGED = (Verdict.AGREE, Verdict.UNVERIFIED, Verdict.NUMERIC, Verdict.NONFINITE)
"""What depends on whom an implementation is compared with."""

_SEPARATOR = " @ "


@dataclass(frozen=True)
class Merged:
    """Rows of all runs with the columns ``environment`` and ``other_environment``, and the runs themselves."""

    rows: pd.DataFrame
    runs: tuple[Run, ...]

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        """Every run's case records, by id."""
        return {identity: case for run in self.runs for identity, case in sorted(run.cases.items())}


def merge_runs(runs: Sequence[Run]) -> Merged:
    """Put runs side by side; with two or more, compare across them."""
    frames = [run.rows.assign(environment=run.label, other_environment=None) for run in runs]
    rows = pd.concat(frames, ignore_index=True)
    rows.loc[rows["other"].notna(), "other_environment"] = rows["environment"]
    if len(runs) > 1:
        rows = _compare_across(rows, runs)
    return Merged(rows, tuple(runs))


def _compare_across(rows: pd.DataFrame, runs: Sequence[Run]) -> pd.DataFrame:
    """Replace pairs and stage verdicts where arrays of several runs are there to be compared."""
    computed: dict[tuple[str, str], dict[str, dict[str, NDArray[Any]]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        for (case, dtype, implementation, stage), array in run.arrays().items():
            computed[case, dtype][f"{implementation}{_SEPARATOR}{run.label}"][stage] = array
    rejudged: list[dict[str, Any]] = []
    for (case, dtype), implementations in sorted(computed.items()):
        about = rows[(rows["case"] == case) & (rows["dtype"] == dtype)]
        kept = {f"{row.implementation}{_SEPARATOR}{row.environment}" for row in about.itertuples() if row.stage}
        if kept != set(implementations):
            continue  # a run without all its arrays: what it says by itself stays
        stage_rows = about[about["comparison"] == "stage"]
        rows = rows.drop(about.index[about["comparison"].isin(["stage", "pair"])])
        rejudged += _rejudge(stage_rows, implementations)
    if not rejudged:
        return rows
    return pd.concat([rows, pd.DataFrame(rejudged, columns=list(rows.columns))], ignore_index=True)


def _rejudge(
    stage_rows: pd.DataFrame, implementations: Mapping[str, Mapping[str, NDArray[Any]]]
) -> list[dict[str, Any]]:
    pairs = judge_pairs(implementations)
    found = [_row(cast(dict[str, Any], record)) for record in stage_rows.to_dict("records")]
    judged = [judge_among(row, pairs) if row.verdict in _REJUDGED and row.stage else row for row in found]
    blank = Row(found[0].case, found[0].operation, found[0].dtype, "", "pair", "", Verdict.AGREE)
    judged += [pair_row(blank, first, second, stage, pair) for (first, second, stage), pair in pairs.items()]
    return [_with_environments(row) for row in judged]


def _row(record: Mapping[str, Any]) -> Row:
    """Turn a frame's record back into a row, named by implementation and environment, its last verdict forgotten."""
    values = {field.name: record[field.name] for field in fields(Row)}
    values = {name: None if _is_missing(value) else value for name, value in values.items()}
    name = f"{record['implementation']}{_SEPARATOR}{record['environment']}"
    if values["verdict"] in _REJUDGED:
        cleared = dict.fromkeys(("other", "index", "value", "reference", "difference", "units"))
        values |= {**cleared, "message": "", "verdict": Verdict.AGREE}
    return Row(**{**values, "implementation": name})


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _with_environments(row: Row) -> dict[str, Any]:
    implementation, environment = row.implementation.split(_SEPARATOR, 1)
    other, other_environment = row.other.split(_SEPARATOR, 1) if row.other else (None, None)
    return asdict(row) | {
        "implementation": implementation,
        "environment": environment,
        "other": other,
        "other_environment": other_environment,
    }
