"""Implementations compared with numbers: printed by a document, known by derivation, or computed and not printed.

``docs/numerics.md``, section 8, says when a printed number holds, what a document's own rounding may explain, and when
it is the document's fault. What a document computes and does not print is compared with the exact answer. Where there
is no exact answer nothing is compared, and nothing holds, except what is the same digit for digit: such a number is
unverified, and its neighbours are judged as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import propagate
from attncheck.attention.errors import Ball, Real
from attncheck.attention.flags import Flags
from attncheck.common.wording import stored_index, written_element
from attncheck.judging.compare import absolute_difference, differing_nonfinite, index_of_largest, is_floating, quotient
from attncheck.judging.exact_stages import Array, Stages
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.reading.case import Case, Expected
from attncheck.reading.inputs import Inputs, convert_inputs, inputs_in, make_exact_inputs
from attncheck.reading.lowering import rows_of_tables
from attncheck.reading.printed import PrintedArray
from attncheck.reading.problem import Problem
from attncheck.results.format import ComparisonKind, Row
from attncheck.spec.dtypes import rounded_once
from attncheck.spec.quantities import QUANTITIES
from attncheck.spec.verdicts import Verdict

_PRECISIONS = ("float64", "float32")
"""In these a document's rounding explains last digits alone; that of 16 bits explains most wrong digits, too."""


def misses(target: Target, numbers: PrintedArray) -> Flags:
    """Return where the exact answer itself is not what is printed; nowhere that nothing can be compared."""
    slack = numbers.open_towards(target.exact) + target.moved
    # The exact numbers are rounded to float64 here, and so are the printed ones.
    rounding = 2 * np.spacing(np.abs(numbers.value))
    missed: Flags = absolute_difference(target.exact, numbers.value) > slack + rounding
    return missed | (differing_nonfinite(target.exact, numbers.value) & np.isfinite(slack))


def hints_of(reference: Reference, expected: Expected, numbers: PrintedArray) -> NDArray[Any]:
    """Say of every misprint what would explain it, and how a case says that it is so; empty where nothing would."""
    hints = np.full(numbers.shape, "", dtype=object)
    if reference.case.computed_in is None:
        for precision in _PRECISIONS:
            target = reference.target(expected, precision)
            explained = ~misses(target, numbers) & np.isfinite(target.moved)
            hints[explained & (hints == "")] = (
                f"rounding in {precision} would explain it: if the document was computed in {precision}, say "
                f"`computed_in: {precision}` in its `source` or in the case"
            )
    target = reference.target(expected, reference.case.computed_in)
    if numbers.half_unit.any() and not misses(target, replace(numbers, truncated=True))[numbers.given].any():
        hints[...] = "all of these numbers hold if digits were cut off and not rounded: `digits: truncated` says so"
    return hints


CLASS_OF_DOCUMENT = {"float64": "native", "float32": "native", "bfloat16": "eager_pre", "float16": "eager_pre"}
"""The class that holds all others in a dtype: nobody knows how a document's code was run."""


@dataclass(frozen=True, eq=False)
class Target:
    """What one expectation is compared with; each is NaN where there is no such number.

    ``exact`` are the exact numbers, ``propagated`` is what the inputs' rounding can move them by, ``document`` the
    largest error of the precision that the document was computed in, and 0 where none is declared.
    """

    exact: Real
    propagated: Real
    document: Real

    @property
    def moved(self) -> Real:
        """How far the number may lie from the exact one before it was printed."""
        return self.propagated + self.document


@dataclass(frozen=True, eq=False)
class Reference:
    """A case in a dtype as the reference for numbers; what is worked out for a precision is kept."""

    case: Case
    inputs: Inputs
    truth: Truth
    _balls: dict[str | None, tuple[Mapping[str, Ball], Inputs]] = field(default_factory=dict)
    _documents: dict[str, tuple[Truth, Inputs]] = field(default_factory=dict)

    def target(self, expected: Expected, computed_in: str | None) -> Target:
        """Return what an expectation is compared with, computed in a precision; None for the exact answer itself."""
        nothing = np.full(expected.shape, np.nan)
        if expected.of not in self.truth.exact:
            return Target(nothing, nothing, nothing)
        exact = self.truth.exact[expected.of]
        values = np.where(np.isfinite(exact.radius), exact.high, np.nan)
        document = np.zeros(expected.shape) if computed_in is None else self._document(expected, computed_in)
        propagated = self._propagated(expected, computed_in)
        return Target(derived(expected, values, self.inputs), propagated, document)

    def why_open(self, expected: Expected, target: Target, index: tuple[int, ...]) -> str:
        """Say why a number cannot be compared with anything."""
        truth = self.truth
        if expected.of in truth.exact and np.isfinite(target.exact[index]):
            if np.isnan(target.propagated[index]):
                return "the rounding of the inputs can move it by any amount"
            if np.isnan(target.document[index]):
                return f"no finite bound is known for its error in {self.case.computed_in}"
        if expected.of not in truth.exact:
            return f"there is no exact answer: {truth.outside}"
        at = index if expected.name == expected.of else index_of_largest(~np.isfinite(truth.exact[expected.of].radius))
        return f"there is no exact answer: {truth.why_open(expected.of, at)}"

    def _propagated(self, expected: Expected, computed_in: str | None) -> Real:
        if computed_in not in self._balls:
            case, inputs = self.case, self.inputs
            if computed_in is not None:
                inputs = convert_inputs(case, make_exact_inputs(case), self.truth.bounds.dtype, computed_in)
            # Of a canonical form the radii of what became the mask say nothing; all numbers' are laid out alike.
            counts = {name: array for name, array in inputs.arrays.items() if case.input_specs[name].whole}
            given = {**inputs.radius, **counts}
            problem = Problem(case.operation, case.options, given).without_layout()
            radius = {**problem.canonical().inputs, **rows_of_tables(given, of_past=(0, 0))}
            found = propagate(self.truth.judged.canonical, radius)
            self._balls[computed_in] = found, inputs
        balls, inputs = self._balls[computed_in]
        ball = balls[expected.of]
        value, radius_of_stage = ball.value, ball.radius
        if expected.name != expected.of:
            with np.errstate(all="ignore"):
                radius_of_stage = QUANTITIES[expected.name].radius(ball.radius, value, inputs.arrays, inputs.radius)
            value = derived(expected, value, inputs)
        # Where the value is infinite or NaN no radius applies: it has to be the same.
        open_ = np.isfinite(value) & ~np.isfinite(radius_of_stage)
        return np.where(open_, np.nan, np.where(np.isfinite(radius_of_stage), radius_of_stage, 0.0))

    def _document(self, expected: Expected, computed_in: str) -> Real:
        """Return the largest error of a document that was computed in a precision."""
        if computed_in not in self._documents:
            truth, inputs = self.truth, self.inputs
            if computed_in != truth.bounds.dtype:
                inputs = inputs_in(self.case, computed_in)
                truth = truth_of_case(self.case, inputs, store=truth.store)
            self._documents[computed_in] = truth, inputs
        truth, inputs = self._documents[computed_in]
        value = np.full(expected.shape, np.nan)
        if expected.of in truth.exact:
            value = derived(expected, truth.exact[expected.of].high, Inputs(_as_float64(inputs), {}, "float64"))
        rounded = rounded_once(value, computed_in)
        return largest_error(expected, truth, CLASS_OF_DOCUMENT[computed_in], inputs, rounded)


def derived(expected: Expected, stage: Array, inputs: Inputs) -> Array:
    """Return the quantity that is expected: the stage itself, or what is derived from it."""
    if expected.name == expected.of:
        return stage
    with np.errstate(all="ignore"):
        return QUANTITIES[expected.name].compute(stage, inputs.arrays)


def largest_error(expected: Expected, truth: Truth, rounding_model: str, inputs: Inputs, value: Array) -> Real:
    """Return the largest error of a class, NaN where nothing is known of it.

    A derived quantity inherits its stage's, and rounds once more: ``value``, in its own dtype.
    """
    if expected.of not in truth.exact:
        return np.full(expected.shape, np.nan)
    reference = truth.reference(expected.of, rounding_model)
    if expected.name == expected.of:
        return reference.max_error
    exact_inputs = {name: np.zeros(array.shape) for name, array in inputs.arrays.items()}
    radius_of = QUANTITIES[expected.name].radius
    with np.errstate(all="ignore"):
        moved = radius_of(reference.max_error, reference.exact.high, _as_float64(inputs), exact_inputs)
        return moved + np.where(np.isfinite(value), np.spacing(np.abs(value)).astype(np.float64), 0.0)


def _as_float64(inputs: Inputs) -> dict[str, Array]:
    return {name: array.astype(np.float64) for name, array in inputs.arrays.items()}


_COMPARISONS: Mapping[str, ComparisonKind] = {"printed": "printed", "known": "known", "unprinted": "exact"}


@dataclass(frozen=True, eq=False)
class _Held:
    """One expectation, what it is compared with, and one implementation's value with the largest error of its class."""

    reference: Reference
    expected: Expected
    target: Target
    value: Array
    bound: Real

    @property
    def open(self) -> NDArray[np.bool_]:
        """Where nothing can be compared."""
        return ~np.isfinite(self.target.moved + self.bound)

    def why_open(self, index: tuple[int, ...]) -> str:
        """Say why nothing can be compared at an element."""
        return self.reference.why_open(self.expected, self.target, index)


def judge_numbers(
    case: Case,
    inputs: Inputs,
    truth: Truth,
    computed: Mapping[str, Stages],
    classes: Mapping[str, str],
    blank: Row,
) -> list[Row]:
    """Return a row per number and implementation."""
    reference = Reference(case, inputs, truth)
    rows: list[Row] = []
    for expected in case.expected:
        target = reference.target(expected, case.computed_in if expected.basis == "printed" else None)
        template = replace(blank, comparison=_COMPARISONS[expected.basis], stage=expected.name, called=expected.called)
        for name, stages in computed.items():
            if expected.of not in stages or not _can_be_held(stages[expected.of], case.stage_shapes[expected.of]):
                continue
            value = derived(expected, stages[expected.of], inputs)
            bound = largest_error(expected, truth.for_returned(stages), classes[name], inputs, value)
            held = _Held(reference, expected, target, value, bound)
            rows += _judge_one(replace(template, implementation=name), held)
    return rows


def _can_be_held(stage: Array, shape: tuple[int, ...]) -> bool:
    """Whether a stage has the form that the numbers have; where it has not, its own row says so."""
    return stage.shape == shape and is_floating(stage)


def _judge_one(template: Row, held: _Held) -> list[Row]:
    expected = held.expected
    if expected.numbers is None:
        return _against_exact(template, held)
    rows = _against_numbers(template, held, expected.numbers)
    return _with_erratum(rows, expected.erratum) if expected.erratum else rows


def _against_exact(template: Row, held: _Held) -> list[Row]:
    """Hold what a document computes and does not print against the exact answer."""
    value, exact, bound = held.value, held.target.exact, held.bound
    difference, odd = absolute_difference(value, exact), differing_nonfinite(value, exact)
    ratio, open_ = quotient(difference, bound), held.open
    rows = []
    for index in _document_order(value, held.expected):
        row = replace(template, index=stored_index(index), value=float(value[index]))
        if open_[index]:
            rows.append(replace(row, verdict=Verdict.UNVERIFIED, message=f"not compared: {held.why_open(index)}"))
            continue
        verdict = Verdict.NONFINITE if odd[index] else Verdict.AGREE
        verdict = Verdict.NUMERIC if difference[index] > bound[index] else verdict
        row = replace(
            row,
            verdict=verdict,
            reference=float(exact[index]),
            difference=float(difference[index]),
            allowed=float(bound[index]),
            ratio=float(ratio[index]),
        )
        rows.append(row if verdict is Verdict.AGREE else replace(row, message=_explain(row, held.expected)))
    return rows


def _against_numbers(template: Row, held: _Held, numbers: PrintedArray) -> list[Row]:
    """Hold every number that is given against one implementation."""
    beside = _BesideNumbers.of(held, numbers)
    indices = _document_order(held.value, held.expected)
    return [beside.row(template, index) for index in indices if numbers.given[index]]


@dataclass(frozen=True, eq=False)
class _BesideNumbers:
    """What is held, beside the numbers that are given: how far apart they are, and how far they may be.

    ``missed_by_truth`` are the printed numbers that the exact answer itself misses. Arrays of the numbers' shape.
    """

    held: _Held
    numbers: PrintedArray
    difference: Array
    odd: NDArray[np.bool_]
    half_unit: Array
    missed_by_truth: NDArray[np.bool_]
    open: NDArray[np.bool_]

    @classmethod
    def of(cls, held: _Held, numbers: PrintedArray) -> _BesideNumbers:
        """Compare all numbers at once."""
        difference = absolute_difference(held.value, numbers.value)
        odd = differing_nonfinite(held.value, numbers.value)
        missed_by_truth = misses(held.target, numbers) & (held.expected.basis == "printed")
        return cls(held, numbers, difference, odd, numbers.open_towards(held.value), missed_by_truth, held.open)

    @cached_property
    def allowed(self) -> Array:
        """How far apart they may be: by the digits that are not given, and by rounding."""
        return self.half_unit + self.held.target.moved + self.held.bound

    @property
    def declared(self) -> str | None:
        """The dtype that a document says it was computed in."""
        return self.held.reference.case.computed_in if self.held.expected.basis == "printed" else None

    def row(self, template: Row, index: tuple[int, ...]) -> Row:
        """Return the verdict on one number."""
        numbers, target = self.numbers, self.held.target
        row = replace(
            template,
            index=stored_index(index),
            value=float(self.held.value[index]),
            reference=float(numbers.value[index]),
            reference_text=str(numbers.text[index]),
            difference=float(self.difference[index]),
            half_unit=float(self.half_unit[index]),
        )
        if self.open[index]:
            return _not_compared(row, self.held.expected, self.held.why_open(index), is_odd=bool(self.odd[index]))
        row = replace(
            row,
            propagated=float(target.propagated[index]),
            document_bound=float(target.document[index]) if self.declared else None,
            allowed=float(self.allowed[index]),
            exact=float(target.exact[index]),
        )
        if self.difference[index] > self.allowed[index] or self.odd[index]:
            return self._missed(row, index)
        if self.declared and self.difference[index] > self.allowed[index] - target.document[index]:
            return replace(row, message=f"{_explain(row, self.held.expected)}{_of_which(row, self.declared)}")
        return row

    def _missed(self, row: Row, index: tuple[int, ...]) -> Row:
        """Say that a number does not hold, and whether the document or the implementation is wrong."""
        message = f"{_explain(row, self.held.expected)}{_of_which(row, self.declared)}"
        if not self.missed_by_truth[index]:
            verdict = Verdict.NONFINITE if self.odd[index] else Verdict.NUMERIC
            return replace(row, verdict=verdict, message=message)
        hint = hints_of(self.held.reference, self.held.expected, self.numbers)[index]
        message = f"{message}; the exact answer is {float(self.held.target.exact[index]):.17g}"
        message = f"{message}; {hint}" if hint else message
        return replace(row, verdict=Verdict.MISPRINT, message=message, hint=hint or None)


def _not_compared(row: Row, expected: Expected, why: str, *, is_odd: bool) -> Row:
    """Say of a number for which no error is allowed that it is the same, or that it is open.

    Numbers that are known to be NaN or infinity are meant as such, which no error bound could excuse.
    """
    if not row.difference and not is_odd:
        return replace(row, verdict=Verdict.AGREE)
    word = "printed as" if row.comparison == "printed" else "known to be"
    message = f"{_named(row, expected)} is {word} {row.reference_text}, computed {row.value:.17g}"
    is_meant = is_odd and row.comparison == "known" and not np.isfinite(row.reference or 0.0)
    verdict = Verdict.NONFINITE if is_meant else Verdict.UNVERIFIED
    return replace(row, verdict=verdict, message=f"{message}; not compared: {why}")


def _named(row: Row, expected: Expected) -> str:
    """Write the number's place as the document counts it."""
    return written_element(row.index or "", row.called or row.stage, expected.layout)


def _explain(row: Row, expected: Expected) -> str:
    word = {"printed": "is printed as", "known": "is known to be", "exact": "is exactly"}[row.comparison]
    reference = f"{row.reference:.17g}" if row.reference_text is None else row.reference_text
    return (
        f"{_named(row, expected)} {word} {reference}, computed {row.value:.17g}; "
        f"off by {row.difference:.3g}, allowed {row.allowed:.3g}"
    )


def _of_which(row: Row, declared: str | None) -> str:
    """Say how much of what is allowed is for the precision that the document was computed in."""
    return f", {row.document_bound:.3g} of it for rounding in {declared}, as the document says" if declared else ""


def _with_erratum(rows: list[Row], erratum: str) -> list[Row]:
    """A recorded erratum must still be one: at least one of its numbers does not hold.

    It excuses the document, not the implementation: a number that the exact answer does not miss must hold.
    """
    if all(row.verdict == Verdict.AGREE for row in rows):
        message = f"the recorded erratum no longer happens, every printed number holds: {erratum}"
        return [replace(row, verdict=Verdict.XPASS, message=message) for row in rows]
    return [replace(row, xfail=True, message=erratum) if row.verdict == Verdict.MISPRINT else row for row in rows]


def _document_order(value: Array, expected: Expected) -> list[tuple[int, ...]]:
    """Return the elements in the order in which the document lays them out."""
    indices = list(np.ndindex(value.shape))
    if expected.transpose:
        indices.sort(key=lambda index: (*index[:-2], index[-1], index[-2]))
    return indices
