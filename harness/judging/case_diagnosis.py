"""Diagnose one case: of which other readings of it is a wrong result the exact answer, within their bounds?

For an implementation that fails, every other reading of its case is evaluated in float64 NumPy, and those that come
near enough are compared with their own exact answers, nearest first. Some fit, and some are refuted
(``wrong_result.py``).

One case names a cause where a single reading fits it. Of several failing cases of one implementation only what is
refuted by none of them is named (``diagnosis.py``). Each trial costs an evaluation of the oracle, so there are few, and
none on large problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.rounding import FORMATS
from attncheck.judging.alternatives import Alternative, empty_row_conventions
from attncheck.judging.diagnosis import NO_FINDINGS, Findings
from attncheck.judging.judge_stages import agrees
from attncheck.judging.readings import truth_of
from attncheck.judging.residuals import approximate, residual
from attncheck.judging.truth import Truth
from attncheck.judging.undefined_rows import scores_shape
from attncheck.judging.wrong_result import (
    WrongResult,
    does_fit,
    fitted_numbers,
    is_only_in_empty_rows,
    judge_accuracy,
    stages_behind,
    try_reading,
    would_show,
)

Array = NDArray[Any]
Stages = Mapping[str, Array]

MAX_ELEMENTS = 1 << 15
"""Elements of a score matrix up to which readings are tried; the oracle takes a tenth of a second for so many."""
MAX_TRIALS = 8
_MARGIN = 2.0**10
"""How many times its bound a mean difference may be until a reading is not worth a trial."""


def diagnose_case(truth: Truth, failed: Stages, rounding_model: str, right: Stages | None = None) -> Findings:
    """Return the readings of a case under which all failing stages agree, and those that would have shown.

    ``failed`` are the judged rows of the stages that fail, ``right`` of those that do not.
    """
    if truth.posed is None:
        return NO_FINDINGS
    wrong = WrongResult(truth, truth.posed, failed, rounding_model, right or {})
    if is_only_in_empty_rows(wrong):
        of_rows = empty_row_conventions(truth.operation, wrong.posed)
        found = next((each for each in of_rows if does_fit(wrong, each, truth_of(truth, each))), None)
        return Findings((*([] if found is None else [found]), *_giving_rows_a_key(wrong)))
    if not _is_small(truth) or not failed.keys() <= truth.exact.keys():
        return NO_FINDINGS
    return _regular(wrong)


def _regular(wrong: WrongResult) -> Findings:
    near, refuted = _near(wrong)
    fits: list[Alternative] = []
    for convention in near[:MAX_TRIALS]:
        if found := try_reading(wrong, convention):
            fits.append(found)
        elif would_show(wrong, convention):
            refuted.add(convention)
    open_ = frozenset(each.name for each in near[MAX_TRIALS:])
    names = _refuted_in_every_form(wrong, refuted)
    if not fits:
        fits, fitted_refuted = _fitted(wrong)
        names |= fitted_refuted
    return Findings(tuple(fits), frozenset(names - {each.name for each in fits}), open_)


def _refuted_in_every_form(wrong: WrongResult, refuted: Set[Alternative]) -> set[str]:
    """Return the names that are refuted: some have several forms, as causality aligned alone or with a window."""
    return {each.name for each in refuted} - {each.name for each in wrong.possible if each not in refuted}


def _giving_rows_a_key(wrong: WrongResult) -> list[Alternative]:
    """Return what else may be behind rows without a key that are wrong: what lets them attend, and changes no other.

    A reading whose distance is not known is tried, too: what may be the cause of such a row is not left out for that.
    """
    if not _is_small(wrong.truth):
        return []
    near = [
        each
        for each in wrong.possible
        if not wrong.readings.is_open(each)
        and wrong.readings.residual(each, wrong.stages) <= _MARGIN * wrong.allowed
        and _gives_rows_a_key(wrong, each)
    ]
    worth_trying = [*near[:MAX_TRIALS], *filter(wrong.readings.is_open, wrong.possible)]
    return [found for each in worth_trying if (found := try_reading(wrong, each))]


def _gives_rows_a_key(wrong: WrongResult, reading: Alternative) -> bool:
    """Whether fewer rows have no key under a reading, or those that have none give something else."""
    if reading.posed.options.get("empty_rows") != wrong.posed.options.get("empty_rows"):
        return True
    return bool(wrong.readings.approximation(reading).special.empty.sum() < wrong.readings.own.special.empty.sum())


def _is_small(truth: Truth) -> bool:
    size = int(np.prod(scores_shape(truth.operation, truth.options, truth.inputs), dtype=np.int64))
    return truth.query_rows is None and size <= MAX_ELEMENTS


def _near(wrong: WrongResult) -> tuple[list[Alternative], set[Alternative]]:
    """Return the readings that are worth a trial, nearest first, and those that are refuted by distance."""
    readings, refuted = wrong.readings, set[Alternative]()
    own = residual(readings.own, wrong.stages)
    unit, allowed = FORMATS[wrong.truth.dtype].unit_roundoff, wrong.allowed
    ranked, open_ = [], []
    for order, convention in enumerate(wrong.possible):
        if readings.is_open(convention):
            open_.append(convention)
            continue
        far = readings.residual(convention, wrong.stages)
        if far < own and far <= _MARGIN * allowed:
            ranked.append((max(far, 64 * unit), order, convention))  # nearer than that, rounding decides
        elif readings.separation(convention, stages_behind(convention, wrong.judged)) > _MARGIN * allowed:
            refuted.add(convention)
    return [
        *(each for *_, each in sorted(ranked, key=lambda entry: entry[:2])),
        *_steps(wrong, open_, refuted),
    ], refuted


def _steps(wrong: WrongResult, steps: list[Alternative], refuted: set[Alternative]) -> list[Alternative]:
    """Return the steps that fit: no trial of theirs needs the oracle, so that none is left out for its number."""
    left = []
    for convention in steps:
        if convention.departs is None or try_reading(wrong, convention):
            left.append(convention)
        elif would_show(wrong, convention):
            refuted.add(convention)
    return left


def _fitted(wrong: WrongResult) -> tuple[list[Alternative], set[str]]:
    """Return what fits with a number that is found for it, else the accuracy that it has; and what does not."""
    missed = set[str]()
    fits: dict[str, Alternative] = {}
    for convention in fitted_numbers(wrong.truth, wrong.posed, wrong.stages):
        nearest = approximate(wrong.truth.operation, convention.posed)
        if not residual(nearest, wrong.stages) <= _MARGIN * wrong.allowed:
            missed.add(convention.name)
        elif convention.name not in fits and (found := try_reading(wrong, convention)):
            fits[convention.name] = found
        elif would_show(wrong, convention):
            missed.add(convention.name)
    if fits:
        return list(fits.values()), missed - fits.keys()
    accuracy, refuted = judge_accuracy(wrong.truth, wrong.posed, wrong.stages, wrong.rounding_model, agrees)
    return ([] if accuracy is None else [accuracy]), refuted | missed
