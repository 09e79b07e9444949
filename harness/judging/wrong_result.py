"""One wrong result and one reading of its case: whether the reading is what was returned, or would have shown.

A reading fits where all stages that failed agree with its exact answer, those that did not fail too, and where it is
told apart from the case by more than the bounds. It is refuted where it would have changed what was returned, and does
not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.formats import FORMATS
from attncheck.judging.alternatives import Alternative
from attncheck.judging.empty_row_conventions import empty_row_conventions
from attncheck.judging.judge_stages import agrees, failing_elements
from attncheck.judging.readings import Readings, relative_bound, truth_of
from attncheck.judging.truth import Truth, is_open
from attncheck.reading.canonical import AttentionProblem
from attncheck.spec import stage_position

Array = NDArray[Any]
Stages = Mapping[str, Array]

_NEARLY = 16.0
"""How many times its bounds a reading may be missed by, on average, until that refutes it."""


@dataclass(frozen=True, eq=False)
class WrongResult:
    """What an implementation got wrong: the judged rows of its failing stages, and what they were judged by.

    ``right`` are the judged rows of the stages that do not fail.
    """

    truth: Truth
    posed: AttentionProblem
    stages: Stages
    rounding_model: str
    right: Stages = field(default_factory=dict)

    @cached_property
    def readings(self) -> Readings:
        """The other readings of the case."""
        return Readings.of(self.truth, self.posed)

    @cached_property
    def possible(self) -> tuple[Alternative, ...]:
        """The readings that begin no later than the first stage that fails.

        One that begins later says nothing of this case: something else is wrong before.
        """
        first = min(map(stage_position, self.stages))
        return tuple(each for each in self.readings.alternatives if stage_position(each.stage) <= first)

    @cached_property
    def allowed(self) -> float:
        """What a mean difference over its size may be by rounding, about."""
        unit = FORMATS[self.truth.dtype].unit_roundoff
        return max(relative_bound(self.truth, self.judged, self.rounding_model), unit)

    @cached_property
    def judged(self) -> frozenset[str]:
        """All stages that there is an exact answer for."""
        return frozenset((self.stages.keys() | self.right.keys()) & self.truth.exact.keys())


def is_only_in_empty_rows(wrong: WrongResult) -> bool:
    """Whether all that is proved to be wrong lies in rows without a key."""
    special = wrong.truth.special
    if special is None or not special.empty.any() or not wrong.stages.keys() <= wrong.truth.exact.keys():
        return False
    wrong_rows = False
    for stage, array in wrong.stages.items():
        failing = failing_elements(wrong.truth, stage, array, wrong.rounding_model)
        if (failing & ~special.affected_by_empty(stage, array.shape)).any():
            return False
        wrong_rows |= bool(failing.any())
        if not failing.any() and not agrees(wrong.truth, stage, array, wrong.rounding_model):
            return False
    return wrong_rows


def would_show(wrong: WrongResult, convention: Alternative) -> bool:
    """Whether a reading that does not fit would change what was returned by more than rounding can.

    One that all but fits says nothing: who computes so may round once more than the class allows to what is right.
    """
    other = wrong.readings.truth_of(convention, wrong.rounding_model, wrong.stages)
    if other is None or _all_but_fits(wrong, convention, other):
        return False
    stages = sorted(stages_behind(convention, wrong.judged))
    pairs = [(stage, convention.stage_aliases.get(stage, stage)) for stage in stages]
    return any(named not in other.exact or _differ(wrong, other, stage, named) for stage, named in pairs)


def try_reading(wrong: WrongResult, convention: Alternative) -> Alternative | None:
    """Return a reading that holds, with what it says of rows that have no key only when it is read so."""
    other = wrong.readings.truth_of(convention, wrong.rounding_model, wrong.stages)
    if other is None:
        return None
    if does_fit(wrong, convention, other):
        return convention
    if convention.stage_aliases or convention.departs or not is_only_in_empty_rows(replace(wrong, truth=other)):
        return None
    for of_rows in empty_row_conventions(wrong.truth.operation, convention.posed):
        description = f"{convention.description}; {of_rows.description}"
        both = replace(convention, posed=of_rows.posed, description=description, option=of_rows.option)
        if does_fit(wrong, both, truth_of(wrong.truth, both)):
            return both
    return None


def does_fit(wrong: WrongResult, convention: Alternative, other: Truth) -> bool:
    """Whether the exact answer of a reading is what was returned, and is another than the case's own."""
    named = {stage: convention.stage_aliases.get(stage, stage) for stage in wrong.stages}
    if not set(named.values()) <= other.exact.keys():
        return False
    if not all(agrees(other, named[stage], array, wrong.rounding_model) for stage, array in wrong.stages.items()):
        return False
    # Before the stage at which it departs, a reading is the case itself, though its problem may be another one.
    right = stages_behind(convention, frozenset(wrong.right)) & other.exact.keys() - convention.stage_aliases.keys()
    if not all(agrees(other, stage, wrong.right[stage], wrong.rounding_model) for stage in right):
        return False
    return any(_differ(wrong, other, stage, named[stage]) for stage in wrong.stages)


def _all_but_fits(wrong: WrongResult, convention: Alternative, other: Truth) -> bool:
    bounds = other.bounds(wrong.rounding_model)
    for stage, array in wrong.stages.items():
        name = convention.stage_aliases.get(stage, stage)
        if name not in other.exact or other.exact[name].shape != array.shape:
            return False
        error, allowed = other.exact[name].error_of(array), bounds[name].max_error
        judged = np.isfinite(other.exact[name].high) & np.isfinite(other.exact[name].radius)
        with np.errstate(over="ignore"):
            if not error[judged].sum() <= _NEARLY * allowed[judged].sum():
                return False
    return True


def _differ(wrong: WrongResult, other: Truth, stage: str, other_stage: str) -> bool:
    """Whether two exact answers are further apart than an implementation could be from both."""
    first, second = wrong.truth.exact[stage], other.exact[other_stage]
    if first.shape != second.shape:
        return True
    one = wrong.truth.bounds(wrong.rounding_model)[stage]
    another = other.bounds(wrong.rounding_model)[other_stage]
    allowed = one.max_error + another.max_error
    judged = ~(is_open(first, one, wrong.truth.dtype_of(stage)) | is_open(second, another, other.dtype_of(other_stage)))
    finite = np.isfinite(first.high) & np.isfinite(second.high)
    with np.errstate(invalid="ignore", over="ignore"):
        separated = finite & (np.abs(first.high - second.high) - first.radius - second.radius > allowed)
        odd = ~finite & ~((first.high == second.high) | (np.isnan(first.high) & np.isnan(second.high)))
    return bool((judged & (separated | odd)).any())


def stages_behind(convention: Alternative, stages: frozenset[str]) -> frozenset[str]:
    """Return the stages at which a reading may show: not those before the one at which it departs."""
    return frozenset(stage for stage in stages if stage_position(stage) >= stage_position(convention.stage))
