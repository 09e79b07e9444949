"""Several runs as one comparison: implementations of different environments and versions compared with each other.

Nothing is computed again by any framework. Where the runs kept their arrays, and the bounds beside them, every two
implementations are compared across the runs too, except for cases that are not the same in both runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from attncheck.common.errors import ResultsError
from attncheck.judging.xfail import ExpectedStageFailure, find_earliest_expected_failures, mark_inherited_failure
from attncheck.reports.frames import Merged
from attncheck.results.format import INPUTS, ROW_SCHEMA, Row, bound_array_name
from attncheck.results.parts import ArrayParts
from attncheck.results.reader import Run
from attncheck.results.records import differing_cases, first_differing_input
from attncheck.results.tables import ColumnKind, to_table
from attncheck.spec.verdicts import Verdict

Stages = Mapping[str, NDArray[Any]]
Unit = tuple[str, str]
"""case, dtype"""

_PAIR_SCHEMA = {**ROW_SCHEMA, **dict.fromkeys(("environment", "other_environment"), ColumnKind("text"))}
_MAX_PAIRS_PER_FRAME = 20_000


def merge_runs(runs: Sequence[Run], *, across: bool = True) -> Merged:
    """Put runs side by side, for one report.

    Args:
        runs: The runs, as ``read_runs`` returns them.
        across: Whether implementations of different runs are compared.
    """
    rows = pd.concat([run.rows.assign(environment=run.label) for run in runs], ignore_index=True)
    rows["other_environment"] = rows["environment"].where(rows["other"].notna())
    notes = [
        f"{run.directory} is called {run.label} here: another run is labelled {run.environment['label']} too"
        for run in runs
        if run.label != run.environment["label"]
    ]
    if len(runs) > 1 and across:
        differing = differing_cases({run.label: run.cases for run in runs})
        comparison, frames = _CrossRunComparison(runs, rows, differing), list[pd.DataFrame]()
        # In frames of a bounded size: a million dictionaries would not fit into memory.
        across_runs = comparison.pairs()
        while batch := list(islice(across_runs, _MAX_PAIRS_PER_FRAME)):
            frames.append(to_table(batch, _PAIR_SCHEMA).to_pandas())
        rows = pd.concat([rows, *frames], ignore_index=True)
        notes += [
            f"{case} is not the same case everywhere: {why}" for case, why in sorted(comparison.differing.items())
        ]
        notes += sorted(comparison.unreadable)
    return Merged(rows, tuple(runs), tuple(notes))


@dataclass(frozen=True)
class _Subject:
    """An implementation in an environment: its rounding model in the current dtype, and its expected failure."""

    implementation: str
    environment: str
    rounding_model: str
    xfail: ExpectedStageFailure | None


class _CrossRunComparison:
    """The pairs of implementations that ran in different environments, if both runs kept their arrays."""

    def __init__(self, runs: Sequence[Run], rows: pd.DataFrame, differing: Mapping[str, str]) -> None:
        self.runs = runs
        self.differing = dict(differing)
        """Cases that differ between the runs, and how."""
        self.unreadable: set[str] = set()
        self._xfails: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        """Expected failures by environment, case and dtype."""
        for record in rows[rows["xfail"].astype(bool) & rows["comparison"].eq("stage")].to_dict("records"):
            row = Row(**{name: record[name] for name in ROW_SCHEMA})
            self._xfails[record["environment"], row.case, row.dtype].append(row)

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Compare one case in one dtype at a time, so that only that and a part of every run are in memory."""
        parts = {run.label: run.parts for run in self.runs}
        runs_of: dict[Unit, list[Run]] = defaultdict(list)
        for run in self.runs:
            for unit in parts[run.label].units():
                runs_of[unit].append(run)
        for unit, runs in runs_of.items():  # in the order of the parts, each of which is then read once
            if len(runs) > 1 and unit[0] not in self.differing:
                yield from self._compare(unit, {run.label: self._read(parts[run.label], unit) for run in runs})

    def _read(self, parts: ArrayParts, unit: Unit) -> Mapping[str, Stages]:
        stages: dict[str, dict[str, NDArray[Any]]] = defaultdict(dict)
        try:
            for (name, stage), array in parts.arrays_of(*unit).items():
                stages[name][stage] = array
        except ResultsError as error:
            self.unreadable.add(str(error))
            return {}
        return stages

    def _compare(self, unit: Unit, kept: Mapping[str, Mapping[str, Stages]]) -> Iterator[dict[str, Any]]:
        case, dtype = unit
        inputs = {label: of_run[INPUTS] for label, of_run in kept.items() if INPUTS in of_run}
        if difference := first_differing_input(inputs):
            self.differing[case] = difference
            return
        subjects: dict[_Subject, Stages] = {}
        bounds: dict[str, Stages] = {}
        operation = ""
        for run in self.runs:
            classes = run.environment["classes"]
            for name, stages in kept.get(run.label, {}).items():
                rounding_model = classes.get(name, {}).get(dtype)
                if rounding_model is None:
                    bounds[name] = {**bounds.get(name, {}), **stages}
                    continue
                operation = run.cases[case]["operation"] if case in run.cases else operation
                expected = find_earliest_expected_failures(self._xfails.get((run.label, case, dtype), ())).get(name)
                subjects[_Subject(name, run.label, rounding_model, expected)] = stages
        yield from _pair_rows(Row(case, operation, dtype, "", "pair", "", Verdict.AGREE), subjects, bounds)


def _pair_rows(
    blank: Row, subjects: Mapping[_Subject, Stages], bounds: Mapping[str, Stages]
) -> Iterator[dict[str, Any]]:
    """Compare one case in one dtype across environments; inside each, the run compared already."""
    from attncheck.judging.judge import compare_all_pairs, make_pair_row  # one run needs neither

    for first, second in combinations(subjects, 2):
        if first.environment == second.environment:
            continue
        named = {"first": subjects[first], "second": subjects[second]}
        allowed = {
            name: bounds.get(bound_array_name(subject.rounding_model), {})
            for name, subject in (("first", first), ("second", second))
        }
        for (_, _, stage), comparison in compare_all_pairs(named, allowed).items():
            row = make_pair_row(blank, first.implementation, second.implementation, stage, comparison)
            row = mark_inherited_failure(row, [member.xfail for member in (first, second) if member.xfail])
            yield asdict(row) | {"environment": first.environment, "other_environment": second.environment}
