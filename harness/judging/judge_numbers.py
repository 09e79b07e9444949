"""Implementations held against numbers: printed by a document, known by derivation, or computed and not printed.

A number holds when the implementation's is within half a unit of its last printed digit, plus what the rounding of the
case's inputs can move it by (``propagation``), plus the error bound of the implementation's numerical class. A printed
number that the exact answer itself misses is the document's fault. What a document computes and does not print is held
against the exact answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.judging.compare import absolute_difference, differing_nonfinite, is_floating, quotient
from attncheck.harness.judging.propagation import Ball, propagate
from attncheck.harness.judging.truth import Truth
from attncheck.harness.quantities import QUANTITIES
from attncheck.harness.reading.case import Case, Expected
from attncheck.harness.reading.inputs import Inputs
from attncheck.harness.reading.lowering import essential
from attncheck.harness.reading.printed import PrintedArray
from attncheck.harness.results.format import ComparisonKind, Row
from attncheck.harness.verdicts import Verdict

Array = NDArray[Any]
Real = NDArray[np.float64]
Stages = Mapping[str, Array]

_COMPARISONS: Mapping[str, ComparisonKind] = {"printed": "printed", "known": "known", "unprinted": "exact"}


@dataclass(frozen=True)
class _Target:
    """What an expectation is held against: the exact numbers, and what the inputs' rounding can move them by."""

    exact: Real
    propagated: Real


def judge_numbers(
    case: Case,
    inputs: Inputs,
    truth: Truth,
    computed: Mapping[str, Stages],
    classes: Mapping[str, str],
    blank: Row,
) -> list[Row]:
    """Return a row per number and implementation."""
    if not case.expected:
        return []
    if not truth.exact:
        return _without_truth(case, inputs, truth.outside, computed, blank)
    # Of an essential form the radii of what became the mask say nothing; those of all numbers are laid out alike.
    radius = essential(case.operation, case.options, inputs.radius).inputs
    balls = propagate(truth.operation, truth.options, Inputs(truth.inputs, radius))
    rows: list[Row] = []
    for expected in case.expected:
        target = _Target(_derive(expected, truth.exact[expected.of].high, inputs), _propagated(expected, balls, inputs))
        template = replace(blank, comparison=_COMPARISONS[expected.basis], stage=expected.name, called=expected.called)
        for name, stages in computed.items():
            if expected.of not in stages or not _can_be_held(stages[expected.of], case.stage_shapes[expected.of]):
                continue
            value = _derive(expected, stages[expected.of], inputs)
            bound = _bound(expected, truth, classes[name], inputs, value)
            rows += _judge_one(replace(template, implementation=name), expected, target, value, bound)
    return rows


def _without_truth(case: Case, inputs: Inputs, outside: str, computed: Mapping[str, Stages], blank: Row) -> list[Row]:
    """Hold numbers for which no error bound exists: what is equal holds, NaN and infinity must, the rest is open."""
    rows = []
    for expected, (name, stages) in product(case.expected, computed.items()):
        numbers, array = expected.numbers, stages.get(expected.of)
        if numbers is None or array is None or not _can_be_held(array, case.stage_shapes[expected.of]):
            continue
        value = _derive(expected, array, inputs)
        difference, odd = absolute_difference(value, numbers.value), differing_nonfinite(value, numbers.value)
        for index in _document_order(value, expected):
            if not numbers.given[index]:
                continue
            row = replace(
                blank,
                implementation=name,
                comparison=_COMPARISONS[expected.basis],
                stage=expected.name,
                called=expected.called,
                verdict=Verdict.NONFINITE
                if odd[index]
                else Verdict.AGREE
                if not difference[index]
                else Verdict.UNVERIFIED,
                index=_index(index),
                value=float(value[index]),
                reference=float(numbers.value[index]),
                reference_text=str(numbers.text[index]),
                difference=float(difference[index]),
                half_unit=float(numbers.half_unit[index]),
                message="" if not difference[index] and not odd[index] else f"there is no exact answer: {outside}",
            )
            rows.append(row)
    return rows


def _can_be_held(stage: Array, shape: tuple[int, ...]) -> bool:
    """Whether a stage has the form that the numbers have; where it has not, its own row says so."""
    return stage.shape == shape and is_floating(stage)


def _derive(expected: Expected, stage: Array, inputs: Inputs) -> Array:
    """Return the quantity that is expected: the stage itself, or what is derived from it."""
    if expected.name == expected.of:
        return stage
    with np.errstate(all="ignore"):
        return QUANTITIES[expected.name].compute(stage, inputs.arrays)


def _bound(expected: Expected, truth: Truth, numerical_class: str, inputs: Inputs, value: Array) -> Real:
    """Return the largest error of the class; a derived quantity inherits its stage's, and rounds once more."""
    worst = truth.bounds(numerical_class)[expected.of].worst
    if expected.name == expected.of:
        return worst
    exact_inputs = {name: np.zeros(array.shape) for name, array in inputs.arrays.items()}
    with np.errstate(all="ignore"):
        moved = QUANTITIES[expected.name].radius(worst, truth.exact[expected.of].high, inputs.arrays, exact_inputs)
        return moved + np.where(np.isfinite(value), np.spacing(np.abs(value)).astype(np.float64), 0.0)


def _propagated(expected: Expected, balls: Mapping[str, Ball], inputs: Inputs) -> Real:
    ball = balls[expected.of]
    radius = ball.radius
    if expected.name != expected.of:
        with np.errstate(all="ignore"):
            radius = QUANTITIES[expected.name].radius(ball.radius, ball.value, inputs.arrays, inputs.radius)
    # Where the value is infinite or NaN no radius applies: it has to be the same.
    return np.where(np.isfinite(radius), radius, 0.0)


def _judge_one(template: Row, expected: Expected, target: _Target, value: Array, bound: Real) -> list[Row]:
    if expected.numbers is None:
        return _against_exact(template, expected, target, value, bound)
    rows = _against_numbers(template, expected, expected.numbers, target, value, bound)
    return _with_erratum(rows, expected.erratum) if expected.erratum else rows


def _against_exact(template: Row, expected: Expected, target: _Target, value: Array, bound: Real) -> list[Row]:
    """Hold what a document computes and does not print against the exact answer."""
    difference, odd = absolute_difference(value, target.exact), differing_nonfinite(value, target.exact)
    ratio = quotient(difference, bound)
    rows = []
    for index in _document_order(value, expected):
        verdict = Verdict.NONFINITE if odd[index] else Verdict.AGREE
        verdict = Verdict.NUMERIC if difference[index] > bound[index] else verdict
        row = replace(
            template,
            verdict=verdict,
            index=_index(index),
            value=float(value[index]),
            reference=float(target.exact[index]),
            difference=float(difference[index]),
            allowed=float(bound[index]),
            ratio=float(ratio[index]),
        )
        rows.append(row if verdict is Verdict.AGREE else replace(row, message=_explain(row)))
    return rows


def _against_numbers(
    template: Row, expected: Expected, numbers: PrintedArray, target: _Target, value: Array, bound: Real
) -> list[Row]:
    """Hold every number that is given against one implementation."""
    difference, odd = absolute_difference(value, numbers.value), differing_nonfinite(value, numbers.value)
    slack = numbers.half_unit + target.propagated
    # The exact numbers are rounded to float64 here, and so are the printed ones.
    missed_by_truth = absolute_difference(target.exact, numbers.value) > slack + 2 * np.spacing(np.abs(numbers.value))
    missed_by_truth |= differing_nonfinite(target.exact, numbers.value)
    allowed = slack + bound
    rows = []
    for index in _document_order(value, expected):
        if not numbers.given[index]:
            continue
        verdict = Verdict.NONFINITE if odd[index] else Verdict.AGREE
        verdict = Verdict.NUMERIC if difference[index] > allowed[index] else verdict
        misprinted = verdict is not Verdict.AGREE and expected.basis == "printed" and missed_by_truth[index]
        row = replace(
            template,
            verdict=Verdict.MISPRINT if misprinted else verdict,
            index=_index(index),
            value=float(value[index]),
            reference=float(numbers.value[index]),
            reference_text=str(numbers.text[index]),
            difference=float(difference[index]),
            half_unit=float(numbers.half_unit[index]),
            propagated=float(target.propagated[index]),
            allowed=float(allowed[index]),
        )
        if misprinted:
            row = replace(row, message=f"{_explain(row)}; the exact answer is {float(target.exact[index]):.17g}")
        elif verdict is not Verdict.AGREE:
            row = replace(row, message=_explain(row))
        rows.append(row)
    return rows


def _explain(row: Row) -> str:
    word = {"printed": "is printed as", "known": "is known to be", "exact": "is exactly"}[row.comparison]
    reference = f"{row.reference:.17g}" if row.reference_text is None else row.reference_text
    return (
        f"{row.called or row.stage}[{row.index}] {word} {reference}, computed {row.value:.17g}; "
        f"off by {row.difference:.3g}, allowed {row.allowed:.3g}"
    )


def _with_erratum(rows: list[Row], erratum: str) -> list[Row]:
    """A recorded erratum must still be one: at least one of its numbers does not hold.

    It excuses the document, not the implementation: a number that the exact answer does not miss must hold.
    """
    if all(row.verdict == Verdict.AGREE for row in rows):
        message = f"the recorded erratum no longer happens, every printed number holds: {erratum}"
        return [replace(row, verdict=Verdict.STALE, message=message) for row in rows]
    return [replace(row, known=True, message=erratum) if row.verdict == Verdict.MISPRINT else row for row in rows]


def _document_order(value: Array, expected: Expected) -> list[tuple[int, ...]]:
    """Return the elements in the order in which the document lays them out."""
    indices = list(np.ndindex(value.shape))
    if expected.transpose:
        indices.sort(key=lambda index: (*index[:-2], index[-1], index[-2]))
    return indices


def _index(index: tuple[int, ...]) -> str:
    return ",".join(map(str, index))
