"""A wrong result recognised: is it the exact answer of another reading of the case?

For an implementation that fails, every other reading of its case's options is evaluated in float64 NumPy, and those
that come nearer than the case itself are held against their own exact answers, nearest first. One is recognised where
all stages that failed agree with it, within its bounds, and where it is told apart from the case by more than the
bounds. Each trial costs an evaluation of the oracle, so there are few, and none on large problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.judging.conventions import Convention, conventions_of, empty_row_conventions
from attncheck.harness.judging.formats import FORMATS
from attncheck.harness.judging.judge_stages import (
    agrees,
    failing_places,
)
from attncheck.harness.judging.nearness import best_scale, distance
from attncheck.harness.judging.scales import has_scale, scale_of, scales_in_words, shortest
from attncheck.harness.judging.special_rows import scores_shape
from attncheck.harness.judging.truth import Truth, find_truth, is_open
from attncheck.harness.reading.lowering import Posed
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import stage_place

Array = NDArray[Any]
Stages = Mapping[str, Array]

MOST_ELEMENTS = 1 << 15
"""Elements of a score matrix up to which readings are tried; the oracle takes a tenth of a second for so many."""
MOST_TRIALS = 5
LEAST_FITTED = 8
"""Numbers that a fitted scale must explain: some scale explains every single one."""


@dataclass(frozen=True, eq=False)
class _Wrong:
    """What an implementation got wrong: the judged rows of its failing stages, and what they were judged by."""

    truth: Truth
    posed: Posed
    stages: Stages
    numerical_class: str


def recognise(truth: Truth, failed: Stages, numerical_class: str) -> Convention | None:
    """Return the first reading of the case under which all failing stages agree; None where there is none.

    ``failed`` are the judged rows of the stages that fail.
    """
    if truth.posed is None:
        return None
    wrong = _Wrong(truth, truth.posed, failed, numerical_class)
    if _only_in_empty_rows(wrong):
        of_rows = empty_row_conventions(truth.operation, wrong.posed)
        return next((each for each in of_rows if _fits(wrong, each, truth_of(truth, each))), None)
    if not _is_small(truth):
        return None
    for convention in islice(_candidates(wrong), MOST_TRIALS):
        if found := _tried(wrong, convention):
            return found
    return next(filter(None, (_tried(wrong, each) for each in _fitted_scales(wrong))), None)


def _only_in_empty_rows(wrong: _Wrong) -> bool:
    """Whether all that is proved to be wrong lies in rows without a key."""
    special = wrong.truth.special
    if special is None or not special.empty.any() or not wrong.stages.keys() <= wrong.truth.exact.keys():
        return False
    wrong_rows = False
    for stage, array in wrong.stages.items():
        places = failing_places(wrong.truth, stage, array, wrong.numerical_class)
        if (places & ~special.places(stage, array.shape, special.empty)).any():
            return False
        wrong_rows |= bool(places.any())
        if not places.any() and not agrees(wrong.truth, stage, array, wrong.numerical_class):
            return False
    return wrong_rows


def _is_small(truth: Truth) -> bool:
    size = int(np.prod(scores_shape(truth.operation, truth.options, truth.inputs), dtype=np.int64))
    return truth.query_rows is None and size <= MOST_ELEMENTS


def _tried(wrong: _Wrong, convention: Convention) -> Convention | None:
    """Return a reading that holds, with what it says of rows that have no key only when it is read so."""
    other = truth_of(wrong.truth, convention)
    if _fits(wrong, convention, other):
        return convention
    if convention.instead or not _only_in_empty_rows(replace(wrong, truth=other)):
        return None
    for of_rows in empty_row_conventions(wrong.truth.operation, convention.posed):
        says = f"{convention.says}; {of_rows.says}"
        both = replace(convention, posed=of_rows.posed, says=says, option=of_rows.option)
        if _fits(wrong, both, truth_of(wrong.truth, both)):
            return both
    return None


def truth_of(own: Truth, convention: Convention) -> Truth:
    """Evaluate the exact answer of a reading, on the rows that are judged of the case."""
    posed = convention.posed
    whole, returned = own.query_rows is None, own.exact if own.inner else None
    return find_truth(
        own.operation, posed.options, posed.inputs, own.dtype, generic=own.generic, whole=whole, returned=returned
    )


def _fits(wrong: _Wrong, convention: Convention, other: Truth) -> bool:
    """Whether the exact answer of a reading is what was returned, and is another than the case's own."""
    named = {stage: convention.instead.get(stage, stage) for stage in wrong.stages}
    if not set(named.values()) <= other.exact.keys():
        return False
    if not all(agrees(other, named[stage], array, wrong.numerical_class) for stage, array in wrong.stages.items()):
        return False
    return any(_differ(wrong.truth, other, stage, named[stage], wrong.numerical_class) for stage in wrong.stages)


def _differ(own: Truth, other: Truth, stage: str, other_stage: str, numerical_class: str) -> bool:
    """Whether two exact answers are further apart than an implementation could be from both."""
    first, second = own.exact[stage], other.exact[other_stage]
    one, another = own.bounds(numerical_class)[stage], other.bounds(numerical_class)[other_stage]
    allowed = one.worst + another.worst
    judged = ~(is_open(first, one, own.dtype) | is_open(second, another, other.dtype))
    finite = np.isfinite(first.high) & np.isfinite(second.high)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = finite & (np.abs(first.high - second.high) - first.radius - second.radius > allowed)
        odd = ~finite & ~((first.high == second.high) | (np.isnan(first.high) & np.isnan(second.high)))
    return bool((judged & (apart | odd)).any())


def _candidates(wrong: _Wrong) -> Iterator[Convention]:
    """Yield the readings that come nearer to what was returned than the case does, nearest first."""
    operation, posed = wrong.truth.operation, wrong.posed
    first = min(map(stage_place, wrong.stages))
    possible = [each for each in conventions_of(operation, posed) if stage_place(each.stage) <= first]
    if not possible:
        return
    own = distance(operation, posed, wrong.stages)
    ranked, open_ = [], []
    least = 64 * FORMATS[wrong.truth.dtype].unit_roundoff  # nearer than that, rounding decides
    for order, convention in enumerate(possible):
        if "softcap_follows" in convention.posed.options:  # the reference knows no such order
            open_.append(convention)
        elif (found := distance(operation, convention.posed, wrong.stages, convention.instead)) < own:
            ranked.append((max(found, least), order, convention))
    yield from (convention for *_, convention in sorted(ranked, key=lambda entry: entry[:2]))
    yield from open_


def _fitted_scales(wrong: _Wrong) -> Iterator[Convention]:
    """Yield the case with the scale that fits best, and before it with the nearest number of few digits."""
    operation, posed = wrong.truth.operation, wrong.posed
    if not has_scale(operation, posed) or min(map(stage_place, wrong.stages)) < stage_place("scores"):
        return
    if sum(array.size for array in wrong.stages.values()) < LEAST_FITTED:
        return
    own, unit = scale_of(operation, posed), FORMATS[wrong.truth.dtype].unit_roundoff
    fitted = best_scale(operation, posed, wrong.stages, own)
    if fitted is None:
        return
    for scale in dict.fromkeys((shortest(fitted, 4 * unit, own), fitted)):
        told, given = scales_in_words(scale, own)
        says = f"the {{stage}} is that of scale {told} (given {given})"
        changed = Posed({**posed.options, "scale": scale}, posed.inputs)
        yield Convention("scale-fitted", says, "scores", changed, Verdict.NUMERIC)
