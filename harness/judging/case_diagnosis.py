"""Diagnose one case: of which other readings of it is a wrong result the exact answer, within their bounds?

For an implementation that fails, every other reading of its case is evaluated in float64 NumPy, and those that come
near enough are held against their own exact answers, nearest first. A reading fits where all stages that failed agree
with it, those that did not fail too, and where it is told apart from the case by more than the bounds. It is refuted
where it would have changed what was returned, and does not fit.

One case names a cause where a single reading fits it. Of several failing cases of one implementation only what is
refuted by none of them is named (``diagnosis.py``). Each trial costs an evaluation of the oracle, so there are few, and
none on large problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.formats import FORMATS
from attncheck.judging.accuracy import judge_accuracy
from attncheck.judging.alternatives import Alternative
from attncheck.judging.conventions import empty_row_conventions
from attncheck.judging.findings import NO_FINDINGS, Findings
from attncheck.judging.fitted import fitted_numbers
from attncheck.judging.judge_stages import agrees, failing_elements
from attncheck.judging.readings import Readings, relative_bound, truth_of
from attncheck.judging.residuals import approximate, residual
from attncheck.judging.special_rows import scores_shape
from attncheck.judging.truth import Truth, is_open
from attncheck.reading.canonical import AttentionProblem
from attncheck.spec import stage_position

Array = NDArray[Any]
Stages = Mapping[str, Array]

MAX_ELEMENTS = 1 << 15
"""Elements of a score matrix up to which readings are tried; the oracle takes a tenth of a second for so many."""
MAX_TRIALS = 8
_NEARLY = 16.0
"""How many times its bounds a reading may be missed by, on average, until that refutes it."""
_MARGIN = 2.0**10
"""How many times its bound a mean difference may be until a reading is not worth a trial."""


@dataclass(frozen=True, eq=False)
class _Wrong:
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
        return Readings.of(self.truth, self.posed)

    @cached_property
    def allowed(self) -> float:
        """What a mean difference over its size may be by rounding, about."""
        unit = FORMATS[self.truth.dtype].unit_roundoff
        return max(relative_bound(self.truth, self.judged, self.rounding_model), unit)

    @cached_property
    def judged(self) -> frozenset[str]:
        """All stages that there is an exact answer for."""
        return frozenset((self.stages.keys() | self.right.keys()) & self.truth.exact.keys())


def diagnose_case(truth: Truth, failed: Stages, rounding_model: str, right: Stages | None = None) -> Findings:
    """Return the readings of a case under which all failing stages agree, and those that would have shown.

    ``failed`` are the judged rows of the stages that fail, ``right`` of those that do not.
    """
    if truth.posed is None:
        return NO_FINDINGS
    wrong = _Wrong(truth, truth.posed, failed, rounding_model, right or {})
    if _only_in_empty_rows(wrong):
        of_rows = empty_row_conventions(truth.operation, wrong.posed)
        found = next((each for each in of_rows if _fits(wrong, each, truth_of(truth, each))), None)
        return Findings((*([] if found is None else [found]), *_giving_rows_a_key(wrong)))
    if not _is_small(truth) or not failed.keys() <= truth.exact.keys():
        return NO_FINDINGS
    return _regular(wrong)


def _regular(wrong: _Wrong) -> Findings:
    near, refuted = _near(wrong)
    fits: list[Alternative] = []
    for convention in near[:MAX_TRIALS]:
        if found := _tried(wrong, convention):
            fits.append(found)
        elif _would_show(wrong, convention):
            refuted.add(convention)
    open_ = frozenset(each.name for each in near[MAX_TRIALS:])
    names = _refuted_in_every_form(wrong, refuted)
    if not fits:
        fits, fitted_refuted = _fitted(wrong)
        names |= fitted_refuted
    return Findings(tuple(fits), frozenset(names - {each.name for each in fits}), open_)


def _refuted_in_every_form(wrong: _Wrong, refuted: Set[Alternative]) -> set[str]:
    """Return the names that are refuted: some have several forms, as causality aligned alone or with a window."""
    first = min(map(stage_position, wrong.stages))
    possible = (each for each in wrong.readings.alternatives if stage_position(each.stage) <= first)
    return {each.name for each in refuted} - {each.name for each in possible if each not in refuted}


def _only_in_empty_rows(wrong: _Wrong) -> bool:
    """Whether all that is proved to be wrong lies in rows without a key."""
    special = wrong.truth.special
    if special is None or not special.empty.any() or not wrong.stages.keys() <= wrong.truth.exact.keys():
        return False
    wrong_rows = False
    for stage, array in wrong.stages.items():
        failing = failing_elements(wrong.truth, stage, array, wrong.rounding_model)
        if (failing & ~special.affected_elements(stage, array.shape, special.empty)).any():
            return False
        wrong_rows |= bool(failing.any())
        if not failing.any() and not agrees(wrong.truth, stage, array, wrong.rounding_model):
            return False
    return wrong_rows


def _giving_rows_a_key(wrong: _Wrong) -> list[Alternative]:
    """Return what else may be behind rows without a key that are wrong: what lets them attend, and changes no other.

    A reading whose distance is not known is tried, too: what may be the cause of such a row is not left out for that.
    """
    if not _is_small(wrong.truth):
        return []
    first = min(map(stage_position, wrong.stages))
    possible = [each for each in wrong.readings.alternatives if stage_position(each.stage) <= first]
    near = [
        each
        for each in possible
        if not wrong.readings.is_open(each)
        and wrong.readings.residual(each, wrong.stages) <= _MARGIN * wrong.allowed
        and _gives_rows_a_key(wrong, each)
    ]
    tried = [*near[:MAX_TRIALS], *filter(wrong.readings.is_open, possible)]
    return [found for each in tried if (found := _tried(wrong, each))]


def _gives_rows_a_key(wrong: _Wrong, reading: Alternative) -> bool:
    """Whether fewer rows have no key under a reading, or those that have none give something else."""
    if reading.posed.options.get("empty_rows") != wrong.posed.options.get("empty_rows"):
        return True
    return bool(wrong.readings.approximation(reading).special.empty.sum() < wrong.readings.own.special.empty.sum())


def _is_small(truth: Truth) -> bool:
    size = int(np.prod(scores_shape(truth.operation, truth.options, truth.inputs), dtype=np.int64))
    return truth.query_rows is None and size <= MAX_ELEMENTS


def _near(wrong: _Wrong) -> tuple[list[Alternative], set[Alternative]]:
    """Return the readings that are worth a trial, nearest first, and those that are refuted by distance.

    A reading that begins after the first stage that fails says nothing of this case: something else is wrong before.
    """
    readings, refuted = wrong.readings, set[Alternative]()
    first = min(map(stage_position, wrong.stages))
    own = residual(readings.own, wrong.stages)
    unit, allowed = FORMATS[wrong.truth.dtype].unit_roundoff, wrong.allowed
    ranked, open_ = [], []
    for order, convention in enumerate(readings.alternatives):
        if stage_position(convention.stage) > first:
            continue
        if readings.is_open(convention):
            open_.append(convention)
            continue
        far = readings.residual(convention, wrong.stages)
        if far < own and far <= _MARGIN * allowed:
            ranked.append((max(far, 64 * unit), order, convention))  # nearer than that, rounding decides
        elif readings.separation(convention, _behind(convention, wrong.judged)) > _MARGIN * allowed:
            refuted.add(convention)
    return [
        *(each for *_, each in sorted(ranked, key=lambda entry: entry[:2])),
        *_steps(wrong, open_, refuted),
    ], refuted


def _behind(convention: Alternative, stages: frozenset[str]) -> frozenset[str]:
    """Return the stages at which a reading may show: not those before the one at which it departs."""
    return frozenset(stage for stage in stages if stage_position(stage) >= stage_position(convention.stage))


def _steps(wrong: _Wrong, steps: list[Alternative], refuted: set[Alternative]) -> list[Alternative]:
    """Return the steps that fit: no trial of theirs needs the oracle, so that none is left out for its number."""
    left = []
    for convention in steps:
        if convention.departs is None or _tried(wrong, convention):
            left.append(convention)
        elif _would_show(wrong, convention):
            refuted.add(convention)
    return left


def _would_show(wrong: _Wrong, convention: Alternative) -> bool:
    """Whether a reading that does not fit would change what was returned by more than rounding can.

    One that all but fits says nothing: who computes so may round once more than the class allows to what is right.
    """
    other = wrong.readings.truth_of(convention, wrong.rounding_model, wrong.stages)
    if other is None or _all_but_fits(wrong, convention, other):
        return False
    pairs = [(stage, convention.stage_aliases.get(stage, stage)) for stage in sorted(_behind(convention, wrong.judged))]
    return any(named not in other.exact or _differ(wrong, other, stage, named) for stage, named in pairs)


def _tried(wrong: _Wrong, convention: Alternative) -> Alternative | None:
    """Return a reading that holds, with what it says of rows that have no key only when it is read so."""
    other = wrong.readings.truth_of(convention, wrong.rounding_model, wrong.stages)
    if other is None:
        return None
    if _fits(wrong, convention, other):
        return convention
    if convention.stage_aliases or convention.departs or not _only_in_empty_rows(replace(wrong, truth=other)):
        return None
    for of_rows in empty_row_conventions(wrong.truth.operation, convention.posed):
        description = f"{convention.description}; {of_rows.description}"
        both = replace(convention, posed=of_rows.posed, description=description, option=of_rows.option)
        if _fits(wrong, both, truth_of(wrong.truth, both)):
            return both
    return None


def _fits(wrong: _Wrong, convention: Alternative, other: Truth) -> bool:
    """Whether the exact answer of a reading is what was returned, and is another than the case's own."""
    named = {stage: convention.stage_aliases.get(stage, stage) for stage in wrong.stages}
    if not set(named.values()) <= other.exact.keys():
        return False
    if not all(agrees(other, named[stage], array, wrong.rounding_model) for stage, array in wrong.stages.items()):
        return False
    # Before the stage at which it departs, a reading is the case itself, though its problem may be another one.
    right = _behind(convention, frozenset(wrong.right)) & other.exact.keys() - convention.stage_aliases.keys()
    if not all(agrees(other, stage, wrong.right[stage], wrong.rounding_model) for stage in right):
        return False
    return any(_differ(wrong, other, stage, named[stage]) for stage in wrong.stages)


def _all_but_fits(wrong: _Wrong, convention: Alternative, other: Truth) -> bool:
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


def _differ(wrong: _Wrong, other: Truth, stage: str, other_stage: str) -> bool:
    """Whether two exact answers are further apart than an implementation could be from both."""
    first, second = wrong.truth.exact[stage], other.exact[other_stage]
    if first.shape != second.shape:
        return True
    one = wrong.truth.bounds(wrong.rounding_model)[stage]
    another = other.bounds(wrong.rounding_model)[other_stage]
    allowed = one.max_error + another.max_error
    judged = ~(is_open(first, one, wrong.truth.dtype) | is_open(second, another, other.dtype))
    finite = np.isfinite(first.high) & np.isfinite(second.high)
    with np.errstate(invalid="ignore", over="ignore"):
        separated = finite & (np.abs(first.high - second.high) - first.radius - second.radius > allowed)
        odd = ~finite & ~((first.high == second.high) | (np.isnan(first.high) & np.isnan(second.high)))
    return bool((judged & (separated | odd)).any())


def _fitted(wrong: _Wrong) -> tuple[list[Alternative], set[str]]:
    """Return what fits with a number that is found for it, else the accuracy that it has; and what does not."""
    missed = set[str]()
    fits: dict[str, Alternative] = {}
    for convention in fitted_numbers(wrong.truth, wrong.posed, wrong.stages):
        nearest = approximate(wrong.truth.operation, convention.posed)
        if not residual(nearest, wrong.stages) <= _MARGIN * wrong.allowed:
            missed.add(convention.name)
        elif convention.name not in fits and (found := _tried(wrong, convention)):
            fits[convention.name] = found
        elif _would_show(wrong, convention):
            missed.add(convention.name)
    if fits:
        return list(fits.values()), missed - fits.keys()
    accuracy, refuted = judge_accuracy(wrong.truth, wrong.posed, wrong.stages, wrong.rounding_model, agrees)
    return ([] if accuracy is None else [accuracy]), refuted | missed
