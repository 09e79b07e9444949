"""Several runs as one comparison: implementations of different environments and versions held against each other.

Nothing is computed again by any framework. Where the runs kept their arrays, and the bounds beside them, every two
implementations are compared across the runs too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from attncheck.harness.judging.judge import judge_pairs, pair_row
from attncheck.harness.judging.known import Known, inherited, known_stages
from attncheck.harness.results.reader import Run
from attncheck.harness.results.writer import ROW_SCHEMA, Row, bound_name
from attncheck.harness.verdicts import Verdict

Stages = Mapping[str, NDArray[Any]]


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
    """Add the pairs of implementations that ran in different environments, where both runs kept their arrays."""
    computed: dict[tuple[str, str], dict[_Subject, Stages]] = defaultdict(dict)
    bounds: dict[tuple[str, str], dict[str, Stages]] = defaultdict(dict)
    known_rows: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in rows[rows["known"].astype(bool)].to_dict("records"):
        known_rows[record["environment"], record["case"], record["dtype"]].append(
            {str(name): value for name, value in record.items()}
        )
    for run in runs:
        classes = run.environment["classes"]
        for (case, dtype, name), stages in _by_name(run).items():
            if name in classes:
                known = known_stages(map(_as_row, known_rows.get((run.label, case, dtype), []))).get(name)
                computed[case, dtype][_Subject(name, run.label, classes[name][dtype], known)] = stages
            else:
                bounds[case, dtype][name] = stages
    operations = {identity: case["operation"] for run in runs for identity, case in run.cases.items()}
    found = [
        record
        for (case, dtype), subjects in sorted(computed.items())
        for record in _pairs(Row(case, operations[case], dtype, "", "pair", "", Verdict.AGREE), subjects, bounds)
    ]
    return pd.concat([rows, pd.DataFrame(found, columns=list(rows.columns))], ignore_index=True) if found else rows


@dataclass(frozen=True)
class _Subject:
    """An implementation in an environment: its numerical class in the dtype at hand, how it is known to diverge."""

    implementation: str
    environment: str
    numerical_class: str
    known: Known | None


def _as_row(record: Mapping[str, Any]) -> Row:
    return Row(**{name: record[name] for name in ROW_SCHEMA.names})


def _by_name(run: Run) -> dict[tuple[str, str, str], Stages]:
    stages: dict[tuple[str, str, str], dict[str, NDArray[Any]]] = defaultdict(dict)
    for (case, dtype, name, stage), array in run.arrays().items():
        stages[case, dtype, name][stage] = array
    return dict(stages)


def _pairs(
    blank: Row, subjects: Mapping[_Subject, Stages], bounds: Mapping[tuple[str, str], Mapping[str, Stages]]
) -> list[dict[str, Any]]:
    """Compare one case in one dtype across environments; inside one they have been compared already."""
    of_class = bounds.get((blank.case, blank.dtype), {})
    records = []
    for first, second in combinations(subjects, 2):
        if first.environment == second.environment:
            continue
        named = {"first": subjects[first], "second": subjects[second]}
        allowed = {
            name: of_class.get(bound_name(subject.numerical_class), {})
            for name, subject in (("first", first), ("second", second))
        }
        for (_, _, stage), comparison in judge_pairs(named, allowed).items():
            row = pair_row(blank, first.implementation, second.implementation, stage, comparison)
            row = inherited(row, [member.known for member in (first, second) if member.known])
            places = {"environment": first.environment, "other_environment": second.environment}
            records.append(asdict(row) | places)
    return records
