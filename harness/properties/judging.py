"""Two calls compared with each other: bitwise the same, within the bounds of both, or broken.

Bits are compared first. If they differ, each call is compared with the exact answer of its inputs. The oracle merges
parts of the keys exactly by their log-sum-exps, and the result is compared with the whole. ``docs/numerics.md`` derives
how much two calls (section 7.1), and merged parts (4.5), may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attncheck.attention.errors import Elementwise, Real
from attncheck.attention.flags import Flags
from attncheck.common.store import NO_STORE, Store
from attncheck.common.wording import format_element, format_index
from attncheck.execution.sessions import view_as_integers
from attncheck.judging.compare import error_ratio, index_of_largest
from attncheck.judging.judge_stages import flag_failing_elements
from attncheck.judging.truth import Truth, find_truth
from attncheck.properties.variants import PropertyVariant, multiply_by_power_of_two, result_stage_names
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import format_shape
from attncheck.spec.verdicts import PropertyOutcome

StageArrays = dict[str, Array]


@dataclass(frozen=True)
class VariantResult:
    """The outcome of one variant of a property, and the element that shows it: in the columns of ``Row``."""

    verdict: PropertyOutcome
    message: str = ""
    stage: str = ""
    index: str = ""
    value: float | None = None
    reference: float | None = None
    exact: float | None = None
    first_bound: float | None = None
    second_bound: float | None = None
    differing: int = 0
    elements: int = 0


class TruthCache:
    """The exact answers of problems, each computed once, on request."""

    def __init__(self, store: Store = NO_STORE) -> None:
        self._store = store
        self._truths: dict[int, tuple[Problem, Truth]] = {}

    def truth_of(self, problem: Problem) -> Truth:
        """Return the truth of a problem; it is cached by object."""
        if id(problem) not in self._truths:
            truth = find_truth(replace(problem, supports_statistics=False), whole=True, store=self._store)
            self._truths[id(problem)] = problem, truth  # the problem stays alive, or another one might get its id
        return self._truths[id(problem)][1]


@dataclass(frozen=True, eq=False)
class CallResult(Elementwise):
    """The result of one of two calls, with its exact answer, the allowed errors, and flags of larger ones."""

    description: str
    array: Array
    exact: Real
    max_error: Real
    exceeds_bound: Flags
    is_undetermined: Flags

    @property
    def error(self) -> Real:
        """The distance of each element from the exact answer."""
        with np.errstate(invalid="ignore"):
            error: Real = np.abs(self.array.astype(np.float64) - self.exact)
        return np.where(np.isnan(error), np.inf, error)


def judge_call_result(description: str, truth: Truth, stage: str, array: Array, rounding_model: str) -> CallResult:
    """Compare the result of a call with its exact answer."""
    truth = truth.for_returned_dtypes({stage: array})
    if stage not in truth.exact:
        nothing = np.full(array.shape, np.nan)
        return CallResult(description, array, nothing, nothing, np.zeros(array.shape, bool), np.ones(array.shape, bool))
    reference = truth.stage_reference(stage, rounding_model, array)
    exact, bound = reference.exact, reference.bound
    allowed, wrong = bound.max_error + exact.radius, flag_failing_elements(reference, array)
    return CallResult(description, array, exact.high, allowed, wrong, reference.unjudged_elements)


def judge_variant(
    variant: PropertyVariant,
    problem: Problem,
    first_result: StageArrays,
    further_results: Sequence[StageArrays],
    rounding_model: str,
    truths: TruthCache,
) -> VariantResult:
    """Judge one variant of a property: the most severe result of its stages."""
    if variant.merges_parts:
        return judge_merged_parts(variant, problem, first_result, further_results, rounding_model, truths)
    stage_results = []
    for stage in variant.stages or result_stage_names(problem):
        arrays = [result[stage] for result in further_results]
        combined = multiply_by_power_of_two(variant.combine(stage, arrays), variant.result_factor)

        def judge_both_calls(stage: str = stage, arrays: list[Array] = arrays) -> tuple[CallResult, CallResult]:
            one = judge_call_result(
                "the first call", truths.truth_of(problem), stage, first_result[stage], rounding_model
            )
            return one, _combined_call_result(variant, stage, arrays, rounding_model, truths)

        compared, may_spread = variant.compared_elements.get(stage), variant.nan_may_spread
        judged = judge_arrays(
            stage,
            first_result[stage],
            combined,
            variant.description,
            judge_both_calls,
            compared,
            nan_may_spread=may_spread,
        )
        stage_results.append(judged)
    return max(stage_results, key=lambda result: result.verdict.severity)


def _combined_call_result(
    variant: PropertyVariant, stage: str, arrays: Sequence[Array], rounding_model: str, truths: TruthCache
) -> CallResult:
    """Compare each further call with its exact answer, and map all of it back to the first call."""
    sides = [
        judge_call_result(call.description, truths.truth_of(call.reference_problem), stage, array, rounding_model)
        for call, array in zip(variant.calls, arrays, strict=True)
    ]
    names = ("array", "exact", "max_error", "exceeds_bound", "is_undetermined")
    combined, exact, allowed, *flags = (
        variant.combine(stage, [getattr(side, name) for side in sides]) for name in names
    )
    factor = variant.result_factor
    return CallResult(
        variant.description, multiply_by_power_of_two(combined, factor), exact * factor, allowed * factor, *flags
    )


def judge_arrays(
    stage: str,
    first: Array,
    second: Array,
    description: str,
    judge_both_calls: Callable[[], tuple[CallResult, CallResult]],
    compared: Flags | None = None,
    *,
    nan_may_spread: bool = False,
) -> VariantResult:
    """Compare results in the ``compared`` elements; ``judge_both_calls`` gives the exact answers if bits differ."""
    if first.shape != second.shape or first.dtype != second.dtype:
        shapes = format_shape(first.shape), format_shape(second.shape)
        message = f"{stage} is {first.dtype} {shapes[0]}, and {second.dtype} {shapes[1]}: {description}"
        return VariantResult(PropertyOutcome.BROKEN, message, stage)
    chosen = np.broadcast_to(True if compared is None else compared, first.shape)
    differs = chosen & (view_as_integers(first) != view_as_integers(second)) & ~(_is_nan(first) & _is_nan(second))
    differing, elements = int(differs.sum()), int(chosen.sum())
    if not differing:
        return VariantResult(
            PropertyOutcome.BITWISE, f"all {elements} elements: {description}", stage, elements=elements
        )
    first_side, second_side = (side.map_arrays(np.asarray) for side in judge_both_calls())
    judged = _judge_by_errors(stage, first_side, second_side, differs, chosen, nan_may_spread=nan_may_spread)
    return replace(judged, differing=differing, elements=elements)


def _is_nan(array: Array) -> Flags:
    return np.isnan(array.astype(np.float64))


_DIFFERENT_ANSWERS_MESSAGE = (
    "the two calls have not the same exact answer, so that they cannot be compared with each other"
)
_SAME_ANSWER_TOLERANCE = 2.0**-40
"""Relative to a number: an exact answer is enclosed far more narrowly."""
_SMALLEST_DIFFERENCE = 1e-300
"""Smallest difference that counts: the numbers below it are near the underflow of float64."""


def _judge_by_errors(
    stage: str, before: CallResult, after: CallResult, differs: Flags, compared: Flags, *, nan_may_spread: bool
) -> VariantResult:
    """Judge two results with different bits; if ``nan_may_spread``, NaN only in the second is a convention."""
    # Exact answers are apart if they differ by more than their uncertainty, relative to the numbers.
    size = np.maximum(np.abs(before.exact), np.abs(after.exact))
    with np.errstate(invalid="ignore"):
        apart = (
            np.abs(before.exact - after.exact)
            > _SAME_ANSWER_TOLERANCE * size + before.max_error * _SAME_ANSWER_TOLERANCE + _SMALLEST_DIFFERENCE
        )
    apart = compared & apart & np.isfinite(before.exact) & np.isfinite(after.exact)
    if apart.any():
        element = _element_result(stage, before, after, index_of_largest(apart), PropertyOutcome.NOT_JUDGED)
        return replace(element, message=_DIFFERENT_ANSWERS_MESSAGE)
    spread = compared & ~before.exceeds_bound & ~_is_nan(before.array) & _is_nan(after.array) & nan_may_spread
    wrong = compared & (before.exceeds_bound | after.exceeds_bound) & ~spread
    if wrong.any():
        return _element_result(stage, before, after, _worst_element(before, after, wrong), PropertyOutcome.BROKEN)
    for elements, outcome in (
        (differs & (_is_nan(before.array) != _is_nan(after.array)) & ~spread, PropertyOutcome.BROKEN),
        (spread, PropertyOutcome.NAN),
        (differs & (before.is_undetermined | after.is_undetermined), PropertyOutcome.NOT_JUDGED),
    ):
        if elements.any():
            return _element_result(stage, before, after, index_of_largest(elements), outcome)
    return _element_result(stage, before, after, _worst_element(before, after, differs), PropertyOutcome.WITHIN_BOUNDS)


def _worst_element(before: CallResult, after: CallResult, candidates: Flags) -> tuple[int, ...]:
    """Return the element with the largest error over its bound in either result."""
    ratios = np.maximum(error_ratio(before.error, before.max_error), error_ratio(after.error, after.max_error))
    return index_of_largest(np.where(candidates, np.where(np.isnan(ratios), np.inf, ratios), -1))


def _element_result(
    stage: str, before: CallResult, after: CallResult, index: tuple[int, ...], outcome: PropertyOutcome
) -> VariantResult:
    """Return the outcome at an element, with the numbers and bounds of both results."""
    first, second = float(before.array[index]), float(after.array[index])
    bounds = float(before.max_error[index]), float(after.max_error[index])
    exact = float(before.exact[index])
    at = format_element(index, stage)
    differ = "" if np.isnan(second - first) else f", which differ by {abs(second - first):.3g}"
    message = f"{at} is {first:.9g}, and {second:.9g} with {after.description}{differ}"
    if outcome is PropertyOutcome.NOT_JUDGED:
        message += "; there is no exact answer to hold them against"
    elif outcome is PropertyOutcome.NAN:
        message += "; what NaN does that no query may read is a convention"
    else:
        message += f"; exactly {exact:.9g}, where {bounds[0] + bounds[1]:.3g} is allowed for both together"
        beyond = [side.description for side in (before, after) if side.exceeds_bound[index]]
        if outcome is PropertyOutcome.BROKEN and beyond:
            message += f"; beyond its bound is {' and '.join(beyond)}"
    return VariantResult(outcome, message, stage, format_index(index), first, second, exact, *bounds)


_MERGE_STATISTIC = "log_sum_exp"


def judge_merged_parts(
    variant: PropertyVariant,
    problem: Problem,
    first_result: StageArrays,
    part_results: Sequence[StageArrays],
    rounding_model: str,
    truths: TruthCache,
) -> VariantResult:
    """Compare parts of the keys, merged by their outputs and log_sum_exps, with the output of all keys."""
    if any(_MERGE_STATISTIC not in part for part in part_results):
        return VariantResult(PropertyOutcome.UNSUPPORTED, f"returns no {_MERGE_STATISTIC} to merge by")
    if any(np.isnan(part[_MERGE_STATISTIC].astype(np.float64)).any() for part in part_results):
        return VariantResult(PropertyOutcome.BROKEN, f"a {_MERGE_STATISTIC} of a part is NaN", _MERGE_STATISTIC)
    outputs = np.stack([part["output"].astype(np.float64) for part in part_results])
    statistics = np.stack([part[_MERGE_STATISTIC].astype(np.float64) for part in part_results])
    # The oracle merges the returned parts; a part without a key has no weight.
    parts = Problem("merge_states", {}, {"outputs": outputs, "log_sum_exps": statistics}, "float64")
    merged = find_truth(parts, whole=True).exact["output"]
    rounded = merged.high.astype(first_result["output"].dtype)

    def judge_both_calls() -> tuple[CallResult, CallResult]:
        one = judge_call_result(
            "the first call", truths.truth_of(problem), "output", first_result["output"], rounding_model
        )
        bound = _merged_bound(variant, part_results, one.exact, rounding_model, truths) + merged.radius
        allowed = bound + np.spacing(np.abs(one.exact))
        with np.errstate(invalid="ignore"):
            error = np.abs(merged.high - one.exact)
        wrong = ~one.is_undetermined & (np.isnan(error) | (error > allowed + one.max_error * 2.0**-50))
        return one, CallResult(variant.description, merged.high, one.exact, allowed, wrong, one.is_undetermined)

    return judge_arrays("output", first_result["output"], rounded, variant.description, judge_both_calls)


def _merged_bound(
    variant: PropertyVariant, part_results: Sequence[StageArrays], whole: Real, rounding_model: str, truths: TruthCache
) -> Real:
    """Return the largest error of the merged output, from the bounds of the parts."""
    exact, allowed, logs, widths = [], [], [], []
    for call, result in zip(variant.calls, part_results, strict=True):
        truth = truths.truth_of(call.reference_problem)
        output = judge_call_result(call.description, truth, "output", result["output"], rounding_model)
        statistic = judge_call_result(
            call.description, truth, _MERGE_STATISTIC, result[_MERGE_STATISTIC], rounding_model
        )
        empty = statistic.exact == -np.inf
        exact.append(np.where(empty[..., np.newaxis], 0.0, output.exact))
        allowed.append(np.where(empty[..., np.newaxis], 0.0, output.max_error))
        logs.append(statistic.exact)
        widths.append(np.where(empty, 0.0, statistic.max_error))
    # The softmax over parts, of which at least one has a key.
    largest = np.max(logs, axis=0)
    powers = np.exp(np.stack(logs) - np.where(np.isfinite(largest), largest, 0.0))
    weights = (powers / np.maximum(powers.sum(axis=0), np.finfo(np.float64).tiny))[..., np.newaxis]
    beta = np.max(np.stack(widths), axis=0)[..., np.newaxis]
    spread = (weights * np.abs(np.stack(exact) - whole)).sum(axis=0)
    bound: Real = np.exp(2 * beta) * (weights * np.stack(allowed)).sum(axis=0) + np.expm1(2 * beta) * spread
    return bound
