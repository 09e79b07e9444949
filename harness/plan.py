"""The plan of a run: every case in every dtype that it declares and that is asked for, one unit each, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from attncheck.errors import UsageError
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Task
from attncheck.reading.case import Case
from attncheck.reading.inputs import Exact, Inputs, convert_inputs, make_exact_inputs

_INPUTS_KEPT = 64
"""Cases whose inputs are kept: the workers come through the plan side by side, and a case's dtypes share them."""

_CONVERTED_KEPT = 32
"""Of these, what was delivered lately: it is judged soon after, and kept while as much again is delivered."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One case in one dtype: what is judged at once. ``position`` is its own in the plan, ``case`` that of its case.

    ``in_standard`` tells whether modes are asked for it that compile each case separately (``standard.py``).
    """

    position: int
    case: int
    dtype: str
    in_standard: bool = True


class Plan:
    """The units of a run, and what each of them works on, made when it is asked for."""

    def __init__(self, cases: Sequence[Case], units: Sequence[Unit]) -> None:
        self.cases = cases
        self.units = units
        exact: Callable[[int], dict[str, Exact]]
        exact = lru_cache(maxsize=_INPUTS_KEPT)(lambda case: make_exact_inputs(cases[case]))
        self._converted: Callable[[int, str], Inputs]
        self._converted = lru_cache(maxsize=_CONVERTED_KEPT)(
            lambda case, dtype: _judged_by(cases[case], convert_inputs(cases[case], exact(case), dtype))
        )

    @classmethod
    def of(cls, cases: Sequence[Case], dtypes: Sequence[str], *, documents_first: bool = False) -> Plan:
        """Plan cases in the dtypes asked for, all if none is. Raises ``UsageError`` where no case declares one."""
        asked = [(case, dtype, each.is_document) for case, each in enumerate(cases) for dtype in each.dtypes]
        chosen = [each for each in asked if not dtypes or each[1] in dtypes]
        if documents_first:
            chosen.sort(key=lambda each: not each[2])
        units = [Unit(position, case, dtype) for position, (case, dtype, _) in enumerate(chosen)]
        if cases and not units:
            raise UsageError(f"no case is declared for {', '.join(dtypes)}")
        return cls(cases, units)

    def case(self, unit: Unit) -> Case:
        """Return the case of a unit."""
        return self.cases[unit.case]

    def inputs(self, unit: Unit) -> Inputs:
        """Return the inputs of a unit in its dtype."""
        return self._converted(unit.case, unit.dtype)

    def task(self, unit: Unit) -> Task:
        """Return what a worker has to evaluate for a unit."""
        return task_of(self.case(unit), self.inputs(unit))

    def with_standard(self, positions: Collection[int]) -> Plan:
        """Ask modes that compile each case separately for the units at these places of the plan alone."""
        return Plan(
            self.cases, [replace(unit, in_standard=index in positions) for index, unit in enumerate(self.units)]
        )

    def only(self, units: Collection[tuple[str, str]]) -> Plan:
        """Keep these units, by case and dtype."""
        kept = [unit for unit in self.units if (self.case(unit).id, unit.dtype) in units]
        return Plan(self.cases, kept)

    def without(self, finished: frozenset[tuple[str, str]]) -> Plan:
        """Leave out the units, by case and dtype, that are done."""
        if not finished:
            return self
        return Plan(self.cases, [unit for unit in self.units if (self.case(unit).id, unit.dtype) not in finished])

    @property
    def standard_cases(self) -> int:
        """How many cases are asked of modes that compile each case separately; 0 where these are asked for all."""
        standard = {unit.case for unit in self.units if unit.in_standard}
        return len(standard) if any(not unit.in_standard for unit in self.units) else 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of all units."""
        return tuple(sorted({unit.dtype for unit in self.units}))

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)


def _judged_by(case: Case, inputs: Inputs) -> Inputs:
    """Leave the radii out where no number is held against them: sent to whoever judges they outweigh the inputs."""
    return inputs if case.expected else replace(inputs, radius={})
