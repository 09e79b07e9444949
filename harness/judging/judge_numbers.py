"""Implementations held against numbers: those that a document prints, and those that are known by derivation.

A number holds when the implementation's is within half a unit of its last printed digit, plus what the rounding of the
case's inputs can move it by (``propagation``), plus the interim rule's allowance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.judging.compare import absolute_difference, differing_nonfinite
from attncheck.harness.judging.interim_rule import UNITS, unit_of_rows
from attncheck.harness.judging.propagation import Ball, propagate
from attncheck.harness.quantities import QUANTITIES
from attncheck.harness.reading.case import Case, Expected
from attncheck.harness.reading.inputs import Inputs
from attncheck.harness.reading.printed import PrintedArray
from attncheck.harness.results.writer import ComparisonKind, Row
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import Shape

Array = NDArray[Any]
Stages = Mapping[str, Array]


@dataclass(frozen=True)
class _Held:
    """What one implementation has where a case expects something, and the interim rule's unit for each element."""

    value: Array
    unit: NDArray[np.float64]


def judge_numbers(
    case: Case, inputs: Inputs, computed: Mapping[str, Stages], blank: Row, agreeing: frozenset[tuple[str, str]]
) -> list[Row]:
    """Return a row per number and implementation.

    ``agreeing`` tells which (implementation, stage) agree with the other implementations.
    """
    if not case.expected:
        return []
    balls = propagate(case.operation, case.options, inputs)
    rows: list[Row] = []
    for expected in case.expected:
        held = {
            name: _hold(expected, stages, inputs)
            for name, stages in computed.items()
            if expected.of in stages and _can_be_held(stages[expected.of], case.stage_shapes[expected.of])
        }
        comparison: ComparisonKind = "known" if expected.basis == "known" else "printed"
        template = replace(blank, comparison=comparison, stage=expected.name, called=expected.called)
        if expected.numbers is None:
            rows += [row for name, own in held.items() for row in _unprinted(template, name, own.value, expected)]
            continue
        propagated = _propagated(expected, balls, inputs)
        by_implementation = {
            name: _judge_one(replace(template, implementation=name), expected, expected.numbers, own, propagated)
            for name, own in held.items()
        }
        if expected.erratum:
            by_implementation = {name: _with_erratum(own, expected.erratum) for name, own in by_implementation.items()}
        elif expected.basis == "printed" and all((name, expected.of) in agreeing for name in held):
            by_implementation = _find_misprints(by_implementation)
        rows += [row for own_rows in by_implementation.values() for row in own_rows]
    return rows


def _can_be_held(stage: Array, shape: Shape) -> bool:
    """Whether a stage has the form that the numbers have; where it has not, its own row says so."""
    return stage.shape == shape and np.issubdtype(stage.dtype, np.floating)


def _hold(expected: Expected, stages: Stages, inputs: Inputs) -> _Held:
    if expected.name == expected.of:
        return _Held(stages[expected.of], unit_of_rows(expected.of, stages))
    with np.errstate(all="ignore"):
        value = QUANTITIES[expected.name].compute(stages[expected.of], inputs.arrays)
    return _Held(value, unit_of_rows(expected.name, {expected.name: value}))


def _propagated(expected: Expected, balls: Mapping[str, Ball], inputs: Inputs) -> NDArray[np.float64]:
    ball = balls[expected.of]
    radius = ball.radius
    if expected.name != expected.of:
        with np.errstate(all="ignore"):
            radius = QUANTITIES[expected.name].radius(ball.radius, ball.value, inputs.arrays, inputs.radius)
    # Where the value is infinite or NaN no radius applies: it has to be the same.
    return np.where(np.isfinite(radius), radius, 0.0)


def _unprinted(template: Row, name: str, value: Array, expected: Expected) -> list[Row]:
    message = "computed by the document, not printed; unverified until there is an exact answer to hold it against"
    row = replace(template, implementation=name, verdict=Verdict.UNVERIFIED, message=message)
    return [replace(row, index=_index(index), value=float(value[index])) for index in _document_order(value, expected)]


def _judge_one(
    template: Row, expected: Expected, numbers: PrintedArray, held: _Held, propagated: NDArray[np.float64]
) -> list[Row]:
    """Judge every number that is given, against one implementation."""
    value, unit = held.value, held.unit
    difference = absolute_difference(value, numbers.value)
    odd = differing_nonfinite(value, numbers.value)
    allowed = numbers.half_unit + propagated + UNITS * unit
    rows = []
    for index in _document_order(value, expected):
        if not numbers.given[index]:
            continue
        verdict = Verdict.NONFINITE if odd[index] else Verdict.AGREE
        if difference[index] > allowed[index]:
            verdict = Verdict.NUMERIC
        row = replace(
            template,
            verdict=verdict,
            index=_index(index),
            value=float(value[index]),
            reference=float(numbers.value[index]),
            reference_text=str(numbers.text[index]),
            difference=float(difference[index]),
            units=float(difference[index] / unit[index]),
            half_unit=float(numbers.half_unit[index]),
            propagated=float(propagated[index]),
            allowed=float(allowed[index]),
        )
        rows.append(row if verdict is Verdict.AGREE else replace(row, message=_explain(row)))
    return rows


def _explain(row: Row) -> str:
    word = "is printed as" if row.comparison == "printed" else "is known to be"
    return (
        f"{row.called or row.stage}[{row.index}] {word} {row.reference_text}, computed {row.value:.17g}; "
        f"off by {row.difference:.3g}, allowed {row.allowed:.3g}"
    )


def _with_erratum(rows: list[Row], erratum: str) -> list[Row]:
    """A recorded erratum must still be one: at least one of its numbers does not hold."""
    if all(row.verdict == Verdict.AGREE for row in rows):
        message = f"the recorded erratum no longer happens, every printed number holds: {erratum}"
        return [replace(row, verdict=Verdict.STALE, message=message) for row in rows]
    return [
        row if row.verdict == Verdict.AGREE else replace(row, verdict=Verdict.MISPRINT, known=True, message=erratum)
        for row in rows
    ]


def _find_misprints(by_implementation: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Tell a wrong printed number from a wrong implementation.

    Where every one of several implementations misses a printed number and all agree with each other, the number is
    the document's fault.
    """
    missed = Counter(row.index for rows in by_implementation.values() for row in rows if row.verdict != Verdict.AGREE)
    everywhere = {index for index, count in missed.items() if count == len(by_implementation) > 1}
    return {
        name: [
            replace(row, verdict=Verdict.MISPRINT, message=f"{row.message}; all implementations miss it and agree")
            if row.index in everywhere
            else row
            for row in rows
        ]
        for name, rows in by_implementation.items()
    }


def _document_order(value: Array, expected: Expected) -> list[tuple[int, ...]]:
    """Return the elements in the order in which the document lays them out."""
    indices = list(np.ndindex(value.shape))
    if expected.transpose:
        indices.sort(key=lambda index: (*index[:-2], index[-1], index[-2]))
    return indices


def _index(index: tuple[int, ...]) -> str:
    return ",".join(map(str, index))
