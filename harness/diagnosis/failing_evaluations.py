"""The failing evaluations of a run, with what the diagnosis needs of each: judged rows and returned stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from attncheck.common.errors import ResultsError
from attncheck.diagnosis.case_evidence import Evidence
from attncheck.execution.worker import Computed
from attncheck.judging.units import Evaluation, is_undiagnosed
from attncheck.planning.plan import Plan, Unit
from attncheck.reading.case import Case
from attncheck.results.format import Row
from attncheck.results.parts import ArrayParts
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import Verdict

ReturnedLookup: TypeAlias = Callable[[Evaluation], Computed | None]
"""Returns the computed stages of an evaluation; None if they are not known any more."""


@dataclass(frozen=True, eq=False)
class FailingEvaluation:
    """One failing evaluation: the judged rows of its failing stages, and the returned stages if they are known.

    ``right_stages`` are the stages that do not fail.
    """

    unit: Unit
    case: Case
    rows: tuple[Row, ...]
    returned: Computed | None
    right_stages: frozenset[str]

    @property
    def key(self) -> Evaluation:
        """The evaluation: implementation, case and dtype."""
        return evaluation_of(self.rows[0])

    @property
    def failure_kind(self) -> tuple[str, str, str]:
        """Operation, first failing stage and verdict; cases of one kind are examined together."""
        first = self.rows[0]
        return first.operation, first.stage, Verdict(first.verdict).value

    @property
    def simplicity_sort_key(self) -> tuple[int, int, int, int]:
        """Sort key: number of input elements, number of inputs and options, position in the plan."""
        shapes = self.case.input_shapes
        arguments = len(shapes) + sum(value is not None for value in self.case.options.values())
        elements = sum(math.prod(shape) for shape in shapes.values())
        return elements, arguments, self.unit.case_index, DTYPES.index(self.unit.dtype)

    @property
    def element_count(self) -> int:
        """Number of returned elements of the first failing stage."""
        return 0 if self.returned is None else self.returned.stages[self.rows[0].stage].size

    @property
    def has_all_rows_judged(self) -> bool:
        """True if all query rows were judged."""
        return all(row.judged_rows is None for row in self.rows)

    @property
    def empty_evidence(self) -> Evidence:
        """Evidence without a fit and without a refuted reading."""
        return Evidence((), frozenset(), self.rows[0].stage, self.case.operation)


@dataclass(frozen=True)
class ReturnedStagesLookup:
    """Returned stages of failing evaluations, from memory or from the arrays that an earlier run stored."""

    directory: Path
    stages_in_memory: Mapping[Evaluation, Computed]

    def __call__(self, evaluation: Evaluation) -> Computed | None:
        """Return the stages that an implementation returned for a case in a dtype; None if they were not stored."""
        if evaluation in self.stages_in_memory:
            return self.stages_in_memory[evaluation]
        name, case, dtype = evaluation
        try:
            arrays = self._stored_arrays.arrays_of(case, dtype)
        except ResultsError:
            return None
        stages = {stage: array for (implementation, stage), array in arrays.items() if implementation == name}
        return Computed(stages) if stages else None

    @cached_property
    def _stored_arrays(self) -> ArrayParts:
        return ArrayParts(self.directory)


def evaluation_of(row: Row) -> Evaluation:
    """Return the evaluation that a row belongs to: implementation, case and dtype."""
    return row.implementation, row.case, row.dtype


def find_failing_evaluations(rows: Sequence[Row], plan: Plan, returned: ReturnedLookup) -> list[FailingEvaluation]:
    """Return the evaluations to diagnose, the simplest first."""
    undiagnosed: dict[Evaluation, list[Row]] = defaultdict(list)
    failed: dict[Evaluation, set[str]] = defaultdict(set)
    for row in rows:
        failed[evaluation_of(row)].add(row.stage)
        if is_undiagnosed(row):
            undiagnosed[evaluation_of(row)].append(row)
    units = {(plan.case(unit).id, unit.dtype): unit for unit in plan} if undiagnosed else {}
    failing = []
    for key, failing_rows in undiagnosed.items():
        if (unit := units.get(key[1:])) is not None:
            computed = returned(key)
            right = frozenset() if computed is None else frozenset(computed.stages.keys() - failed[key])
            failing.append(FailingEvaluation(unit, plan.case(unit), tuple(failing_rows), computed, right))
    return sorted(failing, key=lambda failure: failure.simplicity_sort_key)
