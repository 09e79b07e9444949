"""Requirements for a function that refuses most shapes, found by calling it.

The cases that it refuses are padded to the strictest shapes. Then each requirement is halved, and dropped, as long as
all cases still run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.padding import pad_call
from attncheck.execution.runner import GroupRunner
from attncheck.execution.user_code import declaration_code
from attncheck.execution.worker import Computed, Failure
from attncheck.execution.workers import WorkerPool
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_inputs, make_problem_of_case
from attncheck.reading.problem import Problem

RequiredShapes = Mapping[str, int | str]
_STRICTEST: RequiredShapes = {
    "lengths": "equal",
    "value_width": "equal",
    "width_multiple": 64,
    "query_length_multiple": 64,
    "key_length_multiple": 64,
}
_FIRST_REQUIREMENTS: tuple[RequiredShapes, ...] = (
    _STRICTEST,
    {"lengths": "equal", "value_width": "equal"},
    {"lengths": "equal"},
    {"value_width": "equal"},
)
"""The first requirements to try: not every function has the scale that a larger width needs, or a mask."""
# A choice: multiples below 8 are not tried; a smaller number costs further calls of each case.
_MIN_MULTIPLE = 8
_MAX_TRIED_CASES, _MAX_COUNTED_CASES = 60, 600
"""Cases on which requirements are tried, and cases on which the remaining ones are then counted."""
# A choice: larger cases take longer for each trial; a smaller limit may leave no case to try.
_MAX_INPUT_ELEMENTS = 1 << 16
_MAX_SECONDS = 60.0
"""If the trials of a function take longer, they end without a result."""


@dataclass(frozen=True)
class SuggestedRequirements:
    """RequiredShapes that a function may declare, and the number of tried cases that it then computes."""

    requires: RequiredShapes
    computed_cases: int
    tried_cases: int

    def advice(self, item: Implementation) -> str:
        """Return the advice, with the line or option to paste."""
        line = declaration_code(item.entry.module, item.mode, "requires", dict(self.requires))
        return (
            f"of {self.tried_cases:,} cases that it refuses or fails in, it computes {self.computed_cases:,} padded: "
            f"{f'give {line}' if line.startswith('-') else f'declare {line} below it'} (docs/how-to/kernel.md)"
        )


def suggest_requirements(
    implementation: Implementation, refused: Sequence[Case], limits: Limits
) -> SuggestedRequirements | None:
    """Return the loosest requirements by which a user's function computes cases that it refuses without padding.

    None if no padding helps, if the function declares requirements, or if the trials take too long. The number of tried
    cases is limited, not their time, so that the result is the same on every machine.
    """
    entry = implementation.entry
    if not isinstance(entry, UserImplementation) or any(entry.requirements.values()):
        return None
    small = [case for case in refused if sum(map(math.prod, case.input_shapes.values())) <= _MAX_INPUT_ELEMENTS]
    dtype = next(iter(implementation.mode_declarations.classes))
    small = [case for case in small if dtype in case.dtypes]
    with closing(WorkerPool(limits, probes_state=False)) as workers, suppress(_TooSlowError):
        trial = _RequirementsTrial(implementation, entry, dtype, workers.worker_for(implementation, dtype))
        if (requires := _loosest_requirements(trial, _evenly_spaced(small, _MAX_TRIED_CASES))) is not None:
            tried = [trial.can_compute(case, requires) for case in _evenly_spaced(small, _MAX_COUNTED_CASES)]
            return SuggestedRequirements(requires, sum(tried), len(tried))
    return None


def _evenly_spaced(cases: Sequence[Case], most: int) -> Sequence[Case]:
    """Return at most so many cases, evenly spaced."""
    return cases[:: max(1, math.ceil(len(cases) / most))]


def _loosest_requirements(trial: _RequirementsTrial, sample: Sequence[Case]) -> RequiredShapes | None:
    """Start with the requirements by which most cases run; halve and drop them as long as all of these run."""
    by_start = [[case for case in sample if trial.can_compute(case, start)] for start in _FIRST_REQUIREMENTS]
    computed, requires = max(zip(by_start, _FIRST_REQUIREMENTS, strict=True), key=lambda pair: len(pair[0]))
    if not computed:
        return None

    def runs_all_samples(looser: RequiredShapes) -> bool:
        return all(trial.can_compute(case, looser) for case in computed)

    start = requires
    for name, value in start.items():
        while isinstance(value, int) and value > _MIN_MULTIPLE:
            value //= 2
            if not runs_all_samples({**requires, name: value}):
                break
            requires = {**requires, name: value}
    for name in start:
        without = {key: value for key, value in requires.items() if key != name}
        requires = without if runs_all_samples(without) else requires
    return requires


class _TooSlowError(Exception):
    """The trials take too long."""


class _RequirementsTrial:
    """A worker in which a function is called as if it had declared other requirements."""

    def __init__(
        self, implementation: Implementation, entry: UserImplementation, dtype: str, runner: GroupRunner[Any]
    ) -> None:
        self._implementation, self._entry, self._dtype, self._runner = implementation, entry, dtype, runner
        self._problems: dict[str, Problem] = {}
        self._computed: dict[tuple[str, str], bool] = {}
        self._deadline = monotonic() + _MAX_SECONDS

    def can_compute(self, case: Case, requires: RequiredShapes) -> bool:
        """Return whether the function computes a case that is padded to these requirements.

        Raises ``_TooSlowError`` if the trials take too long.
        """
        if monotonic() > self._deadline:
            raise _TooSlowError
        if case.id not in self._problems:
            self._problems[case.id] = make_problem_of_case(case, make_inputs(case, self._dtype)).as_call()
        problem, description = self._problems[case.id], ""
        if requires:
            requirements = {parameter: dict(requires) for parameter in self._entry.parameters}
            entry = replace(self._entry, requirements=requirements)
            padding = pad_call(replace(self._implementation, entry=entry), problem)
            if isinstance(padding, Failure):
                return False
            problem, description = (padding.problem, padding.description) if padding else (problem, description)
        key = case.id, description  # the description contains the growth of every length
        if key not in self._computed:
            self._computed[key] = isinstance(self._runner.evaluate(problem), Computed)
        return self._computed[key]
