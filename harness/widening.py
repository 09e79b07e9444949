"""Requirements that would let a user's function be judged in more cases, found by trying.

A function that refuses most shapes agrees with little, and nobody knows why until the refusals are read. What it does
take is found by calling it: the cases that it refuses are padded to the strictest shapes, and then each requirement
is halved, and dropped, as far as no case is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import Task
from attncheck.execution.padding import padded_call
from attncheck.execution.runner import Group, GroupRunner, task_of
from attncheck.execution.worker import Computed, Failure
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs

Requirements = Mapping[str, int | str]
_STRICTEST: Requirements = {
    "lengths": "equal",
    "value_width": "equal",
    "width_multiple": 64,
    "query_length_multiple": 64,
    "key_length_multiple": 64,
}
_LEAST_MULTIPLE = 8
_MOST_TRIED, _MOST_COUNTED = 60, 600
"""Cases that requirements are tried on, and those that are then tried with the ones that stay."""
_MOST_ELEMENTS = 1 << 16
_MOST_SECONDS = 60.0
"""A function that takes longer for all that would be asked of it is not tried further, and nothing is advised."""


@dataclass(frozen=True)
class Widening:
    """The requirements that a function may declare, and the number of cases that it then computes, of those tried."""

    requires: Requirements
    computed: int
    tried: int

    def words(self, function: str) -> str:
        """Return the advice, with the line to paste."""
        line = f"{function}.requires = {dict(self.requires)}".replace("'", '"')
        return (
            f"of {self.tried:,} cases that it refuses, it computes {self.computed:,} where they are padded: declare "
            f"{line} below it (docs/kernels.md)"
        )


def find_widening(implementation: Implementation, refused: Sequence[Case], limits: Limits) -> Widening | None:
    """Return the loosest requirements by which a user's function computes cases that it refuses as they are.

    None where no padding helps, where the function says itself what it requires, and where trying it takes too long.
    The cases that are tried are limited by their number, so that the advice is the same on every machine.
    """
    entry = implementation.entry
    if not isinstance(entry, UserImplementation) or any(entry.requirements.values()):
        return None
    small = [case for case in refused if sum(map(math.prod, case.input_shapes.values())) <= _MOST_ELEMENTS]
    with TemporaryDirectory() as folder:
        trial = _Trial(implementation, limits, Path(folder))
        try:
            small = [case for case in small if trial.dtype in case.dtypes]
            requires = _loosened(trial, _spread(small, _MOST_TRIED))
            if requires is None:
                return None
            tried = [trial.computes(case, requires) for case in _spread(small, _MOST_COUNTED)]
            return Widening(requires, sum(tried), len(tried))
        except _TooSlowError:
            return None
        finally:
            trial.close()


def _spread(cases: Sequence[Case], most: int) -> Sequence[Case]:
    """Return at most so many cases, that lie evenly apart."""
    return cases[:: max(1, math.ceil(len(cases) / most))]


def _loosened(trial: _Trial, sample: Sequence[Case]) -> Requirements | None:
    """Halve what can be without a case less, and then drop what is not needed at all."""
    computed = [case for case in sample if trial.computes(case, _STRICTEST)]
    if not computed:
        return None
    requires: Requirements = _STRICTEST

    def is_enough(looser: Requirements) -> bool:
        return all(trial.computes(case, looser) for case in computed)

    for name, value in _STRICTEST.items():
        while isinstance(value, int) and value > _LEAST_MULTIPLE:
            value //= 2
            if not is_enough({**requires, name: value}):
                break
            requires = {**requires, name: value}
    for name in _STRICTEST:
        without = {each: value for each, value in requires.items() if each != name}
        requires = without if is_enough(without) else requires
    return requires


class _TooSlowError(Exception):
    """Trying takes longer than anybody waits."""


class _Trial:
    """A worker in which a function is called as if it had declared this or that."""

    def __init__(self, implementation: Implementation, limits: Limits, folder: Path) -> None:
        assert isinstance(implementation.entry, UserImplementation), "found out before"
        self._implementation, self._entry = implementation, implementation.entry
        self.dtype = next(iter(implementation.declared.classes))
        self._runner: GroupRunner[str] = GroupRunner(Group(implementation, (self.dtype,)), limits, folder)
        self._tasks: dict[str, Task] = {}
        self._computed: dict[tuple[str, str], bool] = {}
        self._until = monotonic() + _MOST_SECONDS

    def close(self) -> None:
        """End the worker."""
        self._runner.close()

    def computes(self, case: Case, requires: Requirements) -> bool:
        """Return whether the function computes a case that is padded as these requirements say.

        Raises ``_TooSlowError`` once that has taken too long.
        """
        if monotonic() > self._until:
            raise _TooSlowError
        if case.id not in self._tasks:
            inputs = convert_inputs(case, make_exact_inputs(case), self.dtype)
            self._tasks[case.id] = task_of(case, inputs)
        task, description = self._tasks[case.id], ""
        if requires:
            own = replace(self._entry, requirements={each: dict(requires) for each in self._entry.parameters})
            padding = padded_call(replace(self._implementation, entry=own), task)
            if isinstance(padding, Failure):
                return False
            task, description = (padding.task, padding.description) if padding else (task, description)
        key = case.id, description  # which says by how much every length grows
        if key not in self._computed:
            self._computed[key] = isinstance(self._runner.evaluate(task), Computed)
        return self._computed[key]
