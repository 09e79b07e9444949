"""Implementations compared with numbers: printed by a document, known by derivation, or computed and not printed.

``docs/numerics.md``, section 8, defines when a printed number is right, which differences the document's rounding may
explain, and when the document is wrong. Numbers that a document computes and does not print are compared with the exact
answer. A number without an exact answer is not compared: it is unverified, unless it is the same digit for digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import propagate_radii
from attncheck.attention.errors import Ball, Real
from attncheck.attention.flags import Flags
from attncheck.common.wording import format_element, format_index
from attncheck.judging.compare import (
    absolute_difference,
    error_ratio,
    flag_differing_nonfinite,
    has_floating_dtype,
    index_of_largest,
)
from attncheck.judging.exact_stages import Array, Stages
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.reading.case import Case, ExpectedStage
from attncheck.reading.inputs import RoundedInputs, convert_inputs, make_exact_inputs, make_inputs
from attncheck.reading.lowering import select_rotary_table_rows
from attncheck.reading.printed import PrintedArray
from attncheck.reading.problem import Problem
from attncheck.results.format import ComparisonKind, Row
from attncheck.spec.dtypes import round_to
from attncheck.spec.quantities import QUANTITIES
from attncheck.spec.verdicts import Verdict

_DOCUMENT_PRECISIONS = ("float64", "float32")
"""In these a document's rounding explains only last digits; rounding to 16 bits would explain most wrong digits."""


def flag_numbers_missed_by_truth(target: ComparisonTarget, numbers: PrintedArray) -> Flags:
    """Flag printed numbers that the exact answer itself misses; none without an exact answer."""
    slack = numbers.radius_on_side_of(target.exact_numbers) + target.max_shift
    # The exact numbers are rounded to float64 here, and so are the printed ones.
    rounding = 2 * np.spacing(np.abs(numbers.value))
    missed: Flags = absolute_difference(target.exact_numbers, numbers.value) > slack + rounding
    return missed | (flag_differing_nonfinite(target.exact_numbers, numbers.value) & np.isfinite(slack))


def explain_misprints(reference: NumberReference, expected: ExpectedStage, numbers: PrintedArray) -> NDArray[Any]:
    """Return for every misprint a possible explanation, and how a case declares it; empty if there is none."""
    hints = np.full(numbers.shape, "", dtype=object)
    if reference.case.computed_in is None:
        for precision in _DOCUMENT_PRECISIONS:
            target = reference.find_target(expected, precision)
            explained = ~flag_numbers_missed_by_truth(target, numbers) & np.isfinite(target.max_shift)
            hints[explained & (hints == "")] = (
                f"rounding in {precision} would explain it: if the document was computed in {precision}, say "
                f"`computed_in: {precision}` in its `source` or in the case"
            )
    target = reference.find_target(expected, reference.case.computed_in)
    if (
        numbers.half_unit.any()
        and not flag_numbers_missed_by_truth(target, replace(numbers, truncated=True))[numbers.given].any()
    ):
        hints[...] = "all of these numbers hold if digits were cut off and not rounded: `digits: truncated` says so"
    return hints


ROUNDING_MODEL_OF_DOCUMENT = {"float64": "native", "float32": "native", "bfloat16": "eager_pre", "float16": "eager_pre"}
"""The class whose bounds include those of all others in a dtype: it is not known how a document's code was run."""


@dataclass(frozen=True, eq=False)
class ComparisonTarget:
    """The numbers with which one expectation is compared; NaN if there is no such number.

    ``exact_numbers`` are the exact numbers, ``propagated_error`` is the largest change by the inputs' rounding,
    ``document_error`` the largest error of the precision that the document was computed in, 0 if none is declared.
    """

    exact_numbers: Real
    propagated_error: Real
    document_error: Real

    @property
    def max_shift(self) -> Real:
        """The largest distance of the number from the exact one before it was printed."""
        return self.propagated_error + self.document_error


@dataclass(frozen=True, eq=False)
class NumberReference:
    """A case in a dtype as the reference for numbers; results for each precision are cached."""

    case: Case
    inputs: RoundedInputs
    truth: Truth
    _balls: dict[str | None, tuple[Mapping[str, Ball], RoundedInputs]] = field(default_factory=dict)
    _documents: dict[str, tuple[Truth, RoundedInputs]] = field(default_factory=dict)

    def find_target(self, expected: ExpectedStage, computed_in: str | None) -> ComparisonTarget:
        """Return the numbers with which an expectation is compared; without ``computed_in``, the exact ones."""
        nothing = np.full(expected.shape, np.nan)
        if expected.of not in self.truth.exact:
            return ComparisonTarget(nothing, nothing, nothing)
        exact = self.truth.exact[expected.of]
        values = np.where(np.isfinite(exact.radius), exact.high, np.nan)
        document = np.zeros(expected.shape) if computed_in is None else self._document_error(expected, computed_in)
        propagated = self._propagated_radius(expected, computed_in)
        return ComparisonTarget(compute_expected_quantity(expected, values, self.inputs), propagated, document)

    def reason_not_compared(self, expected: ExpectedStage, target: ComparisonTarget, index: tuple[int, ...]) -> str:
        """Return why a number cannot be compared."""
        truth = self.truth
        if expected.of in truth.exact and np.isfinite(target.exact_numbers[index]):
            if np.isnan(target.propagated_error[index]):
                return "the rounding of the inputs can move it by any amount"
            if np.isnan(target.document_error[index]):
                return f"no finite bound is known for its error in {self.case.computed_in}"
        if expected.of not in truth.exact:
            return f"there is no exact answer: {truth.no_answer_reason}"
        at = index if expected.name == expected.of else index_of_largest(~np.isfinite(truth.exact[expected.of].radius))
        return f"there is no exact answer: {truth.reason_not_judged(expected.of, at)}"

    def _propagated_radius(self, expected: ExpectedStage, computed_in: str | None) -> Real:
        if computed_in not in self._balls:
            case, inputs = self.case, self.inputs
            if computed_in is not None:
                inputs = convert_inputs(case, make_exact_inputs(case), self.truth.bounds.dtype, computed_in)
            # Radii of what became the mask do not matter; those of all other inputs are laid out as their numbers.
            counts = {name: array for name, array in inputs.arrays.items() if case.input_specs[name].is_count}
            radii = {**inputs.radius, **counts}
            problem = Problem(case.operation, case.options, radii).without_layout()
            radius = {**problem.canonical().inputs, **select_rotary_table_rows(radii, of_past=(0, 0))}
            self._balls[computed_in] = propagate_radii(self.truth.judged_problem.canonical, radius), inputs
        balls, inputs = self._balls[computed_in]
        ball = balls[expected.of]
        value, radius_of_stage = ball.value, ball.radius
        if expected.name != expected.of:
            with np.errstate(all="ignore"):
                radius_of_stage = QUANTITIES[expected.name].propagate_radius(
                    ball.radius, value, inputs.arrays, inputs.radius
                )
            value = compute_expected_quantity(expected, value, inputs)
        # If the value is infinite or NaN no radius applies: it has to be the same.
        open_ = np.isfinite(value) & ~np.isfinite(radius_of_stage)
        return np.where(open_, np.nan, np.where(np.isfinite(radius_of_stage), radius_of_stage, 0.0))

    def _document_error(self, expected: ExpectedStage, computed_in: str) -> Real:
        """Return the largest error of a document that was computed in a precision."""
        if computed_in not in self._documents:
            truth, inputs = self.truth, self.inputs
            if computed_in != truth.bounds.dtype:
                inputs = make_inputs(self.case, computed_in)
                truth = truth_of_case(self.case, inputs, store=truth.store)
            self._documents[computed_in] = truth, inputs
        truth, inputs = self._documents[computed_in]
        value = np.full(expected.shape, np.nan)
        if expected.of in truth.exact:
            value = compute_expected_quantity(
                expected, truth.exact[expected.of].high, RoundedInputs(_as_float64(inputs), {}, "float64")
            )
        rounded = round_to(value, computed_in)
        return max_error_of_quantity(expected, truth, ROUNDING_MODEL_OF_DOCUMENT[computed_in], inputs, rounded)


def compute_expected_quantity(expected: ExpectedStage, stage: Array, inputs: RoundedInputs) -> Array:
    """Return the expected quantity: the stage itself, or a quantity derived from it."""
    if expected.name == expected.of:
        return stage
    with np.errstate(all="ignore"):
        return QUANTITIES[expected.name].compute(stage, inputs.arrays)


def max_error_of_quantity(
    expected: ExpectedStage, truth: Truth, rounding_model: str, inputs: RoundedInputs, value: Array
) -> Real:
    """Return the largest error of a class, NaN if it is unknown.

    A derived quantity inherits the error of its stage, and rounds once more: to ``value``, in the dtype of that.
    """
    if expected.of not in truth.exact:
        return np.full(expected.shape, np.nan)
    reference = truth.stage_reference(expected.of, rounding_model)
    if expected.name == expected.of:
        return reference.max_error
    exact_inputs = {name: np.zeros(array.shape) for name, array in inputs.arrays.items()}
    radius_of = QUANTITIES[expected.name].propagate_radius
    with np.errstate(all="ignore"):
        moved = radius_of(reference.max_error, reference.exact.high, _as_float64(inputs), exact_inputs)
        return moved + np.where(np.isfinite(value), np.spacing(np.abs(value)).astype(np.float64), 0.0)


def _as_float64(inputs: RoundedInputs) -> dict[str, Array]:
    return {name: array.astype(np.float64) for name, array in inputs.arrays.items()}


_COMPARISONS: Mapping[str, ComparisonKind] = {"printed": "printed", "known": "known", "unprinted": "exact"}


@dataclass(frozen=True, eq=False)
class _ComparedValue:
    """One expectation, its target, and one implementation's value with the largest error of its class."""

    reference: NumberReference
    expected: ExpectedStage
    target: ComparisonTarget
    value: Array
    bound: Real

    @property
    def uncomparable_elements(self) -> NDArray[np.bool_]:
        """Flags of elements that cannot be compared."""
        return ~np.isfinite(self.target.max_shift + self.bound)

    def reason_not_compared(self, index: tuple[int, ...]) -> str:
        """Return why an element cannot be compared."""
        return self.reference.reason_not_compared(self.expected, self.target, index)


def judge_numbers(
    case: Case,
    inputs: RoundedInputs,
    truth: Truth,
    computed: Mapping[str, Stages],
    classes: Mapping[str, str],
    blank: Row,
) -> list[Row]:
    """Return a row per number and implementation."""
    reference = NumberReference(case, inputs, truth)
    rows: list[Row] = []
    for expected in case.expected:
        target = reference.find_target(expected, case.computed_in if expected.basis == "printed" else None)
        template = replace(blank, comparison=_COMPARISONS[expected.basis], stage=expected.name, called=expected.called)
        for name, stages in computed.items():
            stage = stages.get(expected.of)
            if stage is None or stage.shape != case.stage_shapes[expected.of] or not has_floating_dtype(stage):
                continue  # a row of the stage reports another shape or dtype
            value = compute_expected_quantity(expected, stage, inputs)
            bound = max_error_of_quantity(expected, truth.for_returned_dtypes(stages), classes[name], inputs, value)
            compared = _ComparedValue(reference, expected, target, value, bound)
            row = replace(template, implementation=name)
            if expected.numbers is None:
                rows += _make_rows_against_exact(row, compared)
                continue
            comparison, printed = _NumberComparison.compare_all(compared, expected.numbers), expected.numbers.given
            judged = [
                comparison.make_row(row, index)
                for index in _list_indices_in_document_order(value, expected)
                if printed[index]
            ]
            rows += _mark_erratum(judged, expected.erratum) if expected.erratum else judged
    return rows


def _make_rows_against_exact(template: Row, compared: _ComparedValue) -> list[Row]:
    """Compare a quantity that a document computes and does not print with the exact answer."""
    value, exact, bound = compared.value, compared.target.exact_numbers, compared.bound
    difference, odd = absolute_difference(value, exact), flag_differing_nonfinite(value, exact)
    ratio, open_ = error_ratio(difference, bound), compared.uncomparable_elements
    rows = []
    for index in _list_indices_in_document_order(value, compared.expected):
        row = replace(template, index=format_index(index), value=float(value[index]))
        if open_[index]:
            rows.append(
                replace(row, verdict=Verdict.UNVERIFIED, message=f"not compared: {compared.reason_not_compared(index)}")
            )
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
        rows.append(
            row if verdict is Verdict.AGREE else replace(row, message=_describe_difference(row, compared.expected))
        )
    return rows


@dataclass(frozen=True, eq=False)
class _NumberComparison:
    """The comparison of a value with given numbers: the differences, and the largest that are allowed.

    ``missed_by_truth`` flags the printed numbers that the exact answer itself misses. Arrays have the numbers' shape.
    """

    compared: _ComparedValue
    numbers: PrintedArray
    difference: Array
    differing_nonfinite: NDArray[np.bool_]
    half_unit: Array
    missed_by_truth: NDArray[np.bool_]
    uncomparable_elements: NDArray[np.bool_]

    @classmethod
    def compare_all(cls, compared: _ComparedValue, numbers: PrintedArray) -> _NumberComparison:
        """Compare all numbers at once."""
        value = compared.value
        difference, odd = absolute_difference(value, numbers.value), flag_differing_nonfinite(value, numbers.value)
        missed_by_truth = flag_numbers_missed_by_truth(compared.target, numbers) & (
            compared.expected.basis == "printed"
        )
        return cls(
            compared,
            numbers,
            difference,
            odd,
            numbers.radius_on_side_of(value),
            missed_by_truth,
            compared.uncomparable_elements,
        )

    @cached_property
    def allowed(self) -> Array:
        """The largest difference that is allowed: by the digits that are not given, and by rounding."""
        return self.half_unit + self.compared.target.max_shift + self.compared.bound

    @property
    def declared_dtype(self) -> str | None:
        """The dtype that a document was computed in, if it declares one."""
        return self.compared.reference.case.computed_in if self.compared.expected.basis == "printed" else None

    def make_row(self, template: Row, index: tuple[int, ...]) -> Row:
        """Return the verdict on one number."""
        numbers, target, expected = self.numbers, self.compared.target, self.compared.expected
        row = replace(
            template,
            index=format_index(index),
            value=float(self.compared.value[index]),
            reference=float(numbers.value[index]),
            reference_text=str(numbers.text[index]),
            difference=float(self.difference[index]),
            half_unit=float(self.half_unit[index]),
        )
        if self.uncomparable_elements[index]:
            return _make_uncompared_row(
                row, expected, self.compared.reason_not_compared(index), is_odd=bool(self.differing_nonfinite[index])
            )
        row = replace(
            row,
            propagated=float(target.propagated_error[index]),
            document_bound=float(target.document_error[index]) if self.declared_dtype else None,
            allowed=float(self.allowed[index]),
            exact=float(target.exact_numbers[index]),
        )
        if self.difference[index] > self.allowed[index] or self.differing_nonfinite[index]:
            return self._make_missed_row(row, index)
        if self.declared_dtype and self.difference[index] > self.allowed[index] - target.document_error[index]:
            return replace(
                row,
                message=f"{_describe_difference(row, expected)}{_describe_document_share(row, self.declared_dtype)}",
            )
        return row

    def _make_missed_row(self, row: Row, index: tuple[int, ...]) -> Row:
        """Return the row of a wrong number; its verdict says if the document or the implementation is wrong."""
        message = (
            f"{_describe_difference(row, self.compared.expected)}{_describe_document_share(row, self.declared_dtype)}"
        )
        if not self.missed_by_truth[index]:
            verdict = Verdict.NONFINITE if self.differing_nonfinite[index] else Verdict.NUMERIC
            return replace(row, verdict=verdict, message=message)
        hint = explain_misprints(self.compared.reference, self.compared.expected, self.numbers)[index]
        message = f"{message}; the exact answer is {float(self.compared.target.exact_numbers[index]):.17g}"
        message = f"{message}; {hint}" if hint else message
        return replace(row, verdict=Verdict.MISPRINT, message=message, hint=hint or None)


def _make_uncompared_row(row: Row, expected: ExpectedStage, why: str, *, is_odd: bool) -> Row:
    """Return the row of a number without a bound: it agrees if it is the same, and is unverified otherwise.

    A number that is known to be NaN or infinity is meant as such: another one fails without a bound.
    """
    if not row.difference and not is_odd:
        return replace(row, verdict=Verdict.AGREE)
    word = "printed as" if row.comparison == "printed" else "known to be"
    message = f"{_describe_element(row, expected)} is {word} {row.reference_text}, computed {row.value:.17g}"
    is_meant = is_odd and row.comparison == "known" and not np.isfinite(row.reference or 0.0)
    verdict = Verdict.NONFINITE if is_meant else Verdict.UNVERIFIED
    return replace(row, verdict=verdict, message=f"{message}; not compared: {why}")


def _describe_element(row: Row, expected: ExpectedStage) -> str:
    """Return the text of the number's element, with indices as the document counts them."""
    return format_element(row.index or "", row.called or row.stage, expected.layout)


def _describe_difference(row: Row, expected: ExpectedStage) -> str:
    word = {"printed": "is printed as", "known": "is known to be", "exact": "is exactly"}[row.comparison]
    reference = f"{row.reference:.17g}" if row.reference_text is None else row.reference_text
    return (
        f"{_describe_element(row, expected)} {word} {reference}, computed {row.value:.17g}; "
        f"off by {row.difference:.3g}, allowed {row.allowed:.3g}"
    )


def _describe_document_share(row: Row, declared: str | None) -> str:
    """Return the text for the share of the bound that is due to the precision of the document."""
    return f", {row.document_bound:.3g} of it for rounding in {declared}, as the document says" if declared else ""


def _mark_erratum(rows: list[Row], erratum: str) -> list[Row]:
    """Mark misprints as expected by a recorded erratum, or all rows as xpass if no number is wrong any more.

    An erratum excuses only the document: a number that the exact answer does not miss must be right.
    """
    if all(row.verdict == Verdict.AGREE for row in rows):
        message = f"the recorded erratum no longer happens, every printed number holds: {erratum}"
        return [replace(row, verdict=Verdict.XPASS, message=message) for row in rows]
    return [replace(row, xfail=True, message=erratum) if row.verdict == Verdict.MISPRINT else row for row in rows]


def _list_indices_in_document_order(value: Array, expected: ExpectedStage) -> list[tuple[int, ...]]:
    """Return the indices in the order in which the document prints the numbers."""
    indices = list(np.ndindex(value.shape))
    if expected.transpose:
        indices.sort(key=lambda index: (*index[:-2], index[-1], index[-2]))
    return indices
