"""Compares one wrong result with one reading of its case: the reading matches it, is refuted by it, or neither.

A reading matches if its exact answer agrees with all returned stages within their bounds, and differs from the answer
of the case. It is refuted if it does not match although it would change the result by more than rounding can
(``is_distinguishable``). ``docs/diagnoses.md`` gives the rules in detail, and those for an accuracy.

Some readings have a free number, such as a scale or a factor of the bias. ``fitted_readings`` finds the number with
which the case is nearest to the returned stages.

``FailingCase`` tries confirmed readings on other failing cases without exact arithmetic. It replaces the exact answer
by float64 values, whose radii are the largest errors of float64. So a reading that matches exactly also matches there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attncheck.attention.caches import latent_projection_magnitude
from attncheck.attention.errors import Bound, Real
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.walk import approximate_stages
from attncheck.diagnosis.case_evidence import FittedNumber
from attncheck.diagnosis.readings import (
    ACCURACY_READINGS,
    APPROXIMATION_READINGS,
    EXPONENTIAL_READINGS,
    FITTED_BIAS_READING,
    FITTED_SCALE_READING,
    FITTED_STAGE_READING,
    LEFT_OUT_KEYS_READING,
    NARROWER_APPROXIMATIONS,
    apply_other_empty_row_conventions,
)
from attncheck.diagnosis.readings_of_scores import multiply_bias
from attncheck.diagnosis.replaced_steps import make_step_replacement, multiply_stages
from attncheck.diagnosis.residuals import CaseReadings, fit_number, largest_relative_bound, shorten_number
from attncheck.judging.alternatives import (
    AppliedReading,
    ReadingForm,
    describe_default_scale,
    format_scales,
    has_default_scale,
    has_scale,
    intended_scale,
    with_combined_mask,
)
from attncheck.judging.exact_stages import Array, ExactStages, Stages
from attncheck.judging.judge_stages import flag_failing_elements, stage_agrees
from attncheck.judging.stage_bounds import StageBounds, StageReference
from attncheck.judging.truth import Truth, truth_of_reading, truth_of_stages
from attncheck.judging.undefined import find_undefined, make_judged_problem
from attncheck.reading.lowering import count_queries_and_keys
from attncheck.reading.problem import Problem
from attncheck.spec import ACCURACY_PREFIX, OPERATIONS, PROJECTIONS, input_specs, stage_position
from attncheck.spec.classes import PARTS_SEPARATOR, rounding_model_named
from attncheck.spec.dtypes import round_to
from attncheck.spec.options import SIXTEEN_BIT_DTYPES
from attncheck.spec.rounding import FORMATS

_MAX_NEAR_MATCH_RATIO = 16.0
"""A reading is not refuted if the mean error is at most this many times the mean bound."""


@dataclass(frozen=True, eq=False)
class WrongResult:
    """The wrong result of an implementation: the judged rows of its failing stages, and the truth of the case.

    ``right_stages`` are the judged rows of the stages that do not fail.
    """

    truth: Truth
    failing_stages: Stages
    rounding_model: str
    right_stages: Stages = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """The problem of the case."""
        return self.truth.judged_problem.problem_without_layout

    @cached_property
    def case_readings(self) -> CaseReadings:
        """The other readings of the case; all implementations that fail the case share them."""
        readings: CaseReadings = self.truth.cached_readings.setdefault("all", CaseReadings(self.truth))
        return readings

    def stage_reference(self, stage: str) -> StageReference:
        """Return the exact answer of a stage with its bound."""
        return self.truth.stage_reference(stage, self.rounding_model)

    @cached_property
    def possible_readings(self) -> tuple[AppliedReading, ...]:
        """The readings that begin no later than the first failing stage; a later one cannot explain that stage."""
        first = min(map(stage_position, self.failing_stages))
        alternatives = self.case_readings.applied_readings
        return tuple(alternative for alternative in alternatives if stage_position(alternative.first_stage) <= first)

    @cached_property
    def allowed_relative_difference(self) -> float:
        """The approximate relative mean difference that rounding can cause."""
        unit = FORMATS[self.truth.bounds.dtype].unit_roundoff
        return max(largest_relative_bound(map(self.stage_reference, self.judged_stage_names)), unit)

    @cached_property
    def judged_stage_names(self) -> frozenset[str]:
        """The returned stages that have an exact answer."""
        return frozenset((self.failing_stages.keys() | self.right_stages.keys()) & self.truth.exact.keys())


def is_only_in_empty_rows(wrong: WrongResult) -> bool:
    """Return whether all elements that are proved wrong are in rows without a key."""
    undefined_rows = wrong.truth.undefined.rows
    if (
        undefined_rows is None
        or not undefined_rows.empty_rows.any()
        or not wrong.failing_stages.keys() <= wrong.truth.exact.keys()
    ):
        return False
    wrong_rows = False
    for stage, array in wrong.failing_stages.items():
        reference = wrong.truth.stage_reference(stage, wrong.rounding_model, array)
        failing = flag_failing_elements(reference, array)
        if (failing & ~undefined_rows.flag_affected_by_empty_rows(stage, array.shape)).any():
            return False
        wrong_rows |= bool(failing.any())
        if not failing.any() and not stage_agrees(reference, array):
            return False
    return wrong_rows


def is_distinguishable(wrong: WrongResult, alternative: AppliedReading) -> bool:
    """Return whether a reading that does not match would change the result by more than rounding can.

    False for a reading that nearly matches: an implementation of this reading may round once more than its class
    allows.
    """
    truth = wrong.case_readings.truth_of(alternative, wrong.rounding_model, wrong.failing_stages)
    if truth is None or _is_near_match(wrong, alternative, truth):
        return False
    for stage in sorted(stages_from_departure(alternative, wrong.judged_stage_names)):
        named = alternative.stage_aliases.get(stage, stage)
        reference = wrong.stage_reference(stage)
        if named not in truth.exact or _are_separated(reference, truth.stage_reference(named, wrong.rounding_model)):
            return True
    return False


def try_reading(wrong: WrongResult, alternative: AppliedReading) -> AppliedReading | None:
    """Return a reading if it matches, with a convention for the rows that lack a key only under this reading."""
    truth = wrong.case_readings.truth_of(alternative, wrong.rounding_model, wrong.failing_stages)
    if truth is None:
        return None
    if is_match(wrong, alternative, truth):
        return alternative
    if (
        alternative.stage_aliases
        or alternative.step_replacement
        or not is_only_in_empty_rows(replace(wrong, truth=truth))
    ):
        return None
    for of_rows in apply_other_empty_row_conventions(alternative.problem):
        description = f"{alternative.description}; {of_rows.description}"
        both = replace(
            alternative,
            problem=of_rows.problem,
            description=description,
            declarable_convention=of_rows.declarable_convention,
            common_description="",
        )
        if is_match(wrong, both, truth_of_reading(wrong.truth, both.problem)):
            return both
    return None


def is_match(wrong: WrongResult, alternative: AppliedReading, truth: Truth) -> bool:
    """Return whether the exact answer of a reading agrees with the returned stages, and differs from the case's."""
    named = {stage: alternative.stage_aliases.get(stage, stage) for stage in wrong.failing_stages}
    if not set(named.values()) <= truth.exact.keys():
        return False
    model = wrong.rounding_model
    if not all(
        stage_agrees(truth.stage_reference(named[stage], model, array), array)
        for stage, array in wrong.failing_stages.items()
    ):
        return False
    # Before the stage at which it departs, a reading is the case itself, although its problem may differ.
    right = (
        stages_from_departure(alternative, frozenset(wrong.right_stages))
        & truth.exact.keys() - alternative.stage_aliases.keys()
    )
    if not _all_agree(truth, {stage: wrong.right_stages[stage] for stage in right}, model):
        return False
    return any(
        _are_separated(wrong.stage_reference(stage), truth.stage_reference(named[stage], model)) for stage in named
    )


def _is_near_match(wrong: WrongResult, alternative: AppliedReading, truth: Truth) -> bool:
    for stage, array in wrong.failing_stages.items():
        name = alternative.stage_aliases.get(stage, stage)
        if name not in truth.exact or truth.exact[name].shape != array.shape:
            return False
        exact, bound = truth.exact[name], truth.bounds.bounds_by_stage(wrong.rounding_model)[name]
        error, judged = exact.distance_to(array), np.isfinite(exact.high) & np.isfinite(exact.radius)
        with np.errstate(over="ignore"):
            if not error[judged].sum() <= _MAX_NEAR_MATCH_RATIO * bound.max_error[judged].sum():
                return False
    return True


def _are_separated(first: StageReference, second: StageReference) -> bool:
    """Return whether two exact answers differ by more than the sum of their bounds."""
    first_exact, second_exact = first.exact, second.exact
    if first_exact.shape != second_exact.shape:
        return True
    allowed = first.bound.max_error + second.bound.max_error
    judged = ~(first.unjudged_elements | second.unjudged_elements)
    finite = np.isfinite(first_exact.high) & np.isfinite(second_exact.high)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(first_exact.high - second_exact.high)
        separated = finite & (distance - first_exact.radius - second_exact.radius > allowed)
        both_nan = np.isnan(first_exact.high) & np.isnan(second_exact.high)
        odd = ~finite & ~((first_exact.high == second_exact.high) | both_nan)
    return bool((judged & (separated | odd)).any())


def stages_from_departure(alternative: AppliedReading, stages: frozenset[str]) -> frozenset[str]:
    """Return the given stages from the one at which a reading departs from the case."""
    return frozenset(stage for stage in stages if stage_position(stage) >= stage_position(alternative.first_stage))


_ACCURACY_FORMATS = (("float32", "native"), ("bfloat16", "eager_pre"))
"""Dtype and rounding model of each accuracy, the most accurate first."""

_MIN_LARGEST_ERROR = 2.0**-8
"""The largest error must be at least this fraction of the noise of a format to be an error of that format."""
_MAX_SHARE_OF_NUMBERS = 0.125
"""The errors of a format are at most this fraction of the numbers of a stage, both as root mean squares."""
_MIN_ERRORS = 16
"""Minimum number of wrong elements from which an accuracy is estimated."""
_MAX_OF_ONE_SIGN = 0.95
"""Maximum share of the errors, by number and by size, that may have the same sign."""
_MAX_EXPLAINED_VARIANCE = 0.5
"""Maximum share of the errors' variance that a multiple of the exact answer may explain."""


def _all_agree(truth: Truth, failing: Stages, rounding_model: str) -> bool:
    return all(
        stage_agrees(truth.stage_reference(stage, rounding_model, array), array) for stage, array in failing.items()
    )


def judge_accuracy(wrong: WrongResult, *, is_known: bool = False) -> tuple[AppliedReading | None, set[str]]:
    """Return the accuracy of the failing stages, or None, and the names of the refuted accuracies.

    Too few errors give no accuracy, unless ``is_known``: other cases of the implementation have shown it.
    """
    truth, failing, refuted = wrong.truth, wrong.failing_stages, set[str]()
    for dtype, of_format in _ACCURACY_FORMATS:
        name = ACCURACY_READINGS[dtype].name
        if (
            FORMATS[dtype].precision >= FORMATS[truth.bounds.dtype].precision
            or truth.bounds.dtype in SIXTEEN_BIT_DTYPES
        ):
            refuted.add(name)
            continue
        if of_format not in truth.cached_readings:
            lower_bounds, unit = (
                replace(truth.bounds, dtype=dtype).bounds_by_stage(of_format),
                FORMATS[dtype].unit_roundoff,
            )
            truth.cached_readings[of_format] = _add_operand_rounding(truth.stages, lower_bounds, unit)
        bounds: dict[str, Bound] = truth.cached_readings[of_format]
        lower = replace(truth, bounds=truth.bounds.with_replaced_bounds(wrong.rounding_model, bounds))
        if not _all_agree(lower, failing, wrong.rounding_model):
            refuted.add(name)
            continue
        first = min(failing, key=stage_position)
        is_noise = _looks_like_rounding_noise(truth.exact[first], bounds[first].sigma, failing[first])
        if is_noise or (is_noise is None and is_known):
            return ACCURACY_READINGS[dtype].make_applied_reading(ReadingForm(wrong.problem), is_fitted=True), refuted
        return None, refuted if is_noise is None else refuted | {
            accuracy.name for accuracy in ACCURACY_READINGS.values()
        }
    return None, refuted


def judge_approximations(wrong: WrongResult) -> tuple[list[AppliedReading], set[str]]:
    """Return the approximations for speed that the failing stages are consistent with, and the names of refuted ones.

    A kernel of 16 bits may have any of ``APPROXIMATION_READINGS``, others only less exact ``EXPONENTIALS``. The failing
    stages must be within the bounds of a class with that part, and their errors must be noise
    (``_looks_like_rounding_noise``).
    """
    truth, failing, trades, refuted = wrong.truth, wrong.failing_stages, list[AppliedReading](), set[str]()
    parts_of_dtype = EXPONENTIAL_READINGS.get(truth.bounds.dtype, APPROXIMATION_READINGS)
    options = wrong.problem.options
    if parts_of_dtype is not APPROXIMATION_READINGS and any(
        options.get(reading.option_or_input) for reading in APPROXIMATION_READINGS.values()
    ):
        return [], set()  # the errors may be those of a hyperbolic tangent
    first, widest = min(failing, key=stage_position), [*parts_of_dtype][-1]
    holds_widest = False
    for parts, reading in [*parts_of_dtype.items()][::-1]:
        model = f"{wrong.rounding_model}{PARTS_SEPARATOR}{parts}"
        is_asked = _is_permitted_model(truth.bounds, model) and (
            not reading.option_or_input or reading.option_or_input in wrong.problem.options
        )
        # FP8 operands err by more than weights, exponentials and tanh do that are less exact, and are tried before.
        is_narrower = parts in NARROWER_APPROXIMATIONS and not holds_widest
        if not is_asked or is_narrower or not _all_agree(truth, failing, model):
            refuted.add(reading.name)
            continue
        holds_widest |= parts == widest
        if _looks_like_rounding_noise(
            truth.exact[first], truth.bounds.bounds_by_stage(model)[first].sigma, failing[first], as_stored=False
        ):
            trades.append(reading.make_applied_reading(ReadingForm(wrong.problem), is_fitted=True))
    return trades[::-1], refuted


def _is_permitted_model(bounds: StageBounds, rounding_model: str) -> bool:
    """Return whether the rounding model exists, and the operation returns an output."""
    if "output" not in bounds.exact_stages.enclosures or rounding_model.count(PARTS_SEPARATOR) > 1:
        return False
    try:
        return bool(rounding_model_named(rounding_model, bounds.dtype))
    except ValueError:  # the class permits more already
        return False


def _add_operand_rounding(stages: ExactStages, bounds: Mapping[str, Bound], unit: float) -> dict[str, Bound]:
    """Add the rounding of query and key to the bound of raw scores; the bounds of later stages include it already."""
    inputs = stages.canonical_problem.inputs
    if OPERATIONS[stages.canonical_problem.operation].has_projections:
        return {name: _add_projection_rounding(stages, name, bound, unit) for name, bound in bounds.items()}
    if "raw_scores" not in bounds or not {"query", "key"} <= inputs.keys() - stages.enclosures.keys():
        return dict(bounds)
    query, key = inputs["query"].astype(np.float64), inputs["key"].astype(np.float64)
    if "key_projection" in inputs:
        key = latent_projection_magnitude(key, inputs["key_projection"].astype(np.float64))
    group = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    size = np.abs(query) @ np.swapaxes(np.repeat(np.abs(key), group, -3) if group > 1 else np.abs(key), -1, -2)
    raw, moved = bounds["raw_scores"], (2 * unit + unit * unit) * size
    return {**bounds, "raw_scores": Bound(raw.max_error + moved, raw.sigma + moved)}


def _add_projection_rounding(stages: ExactStages, name: str, bound: Bound, unit: float) -> Bound:
    """Add the rounding of its input and its weights to the bound of a projection."""
    inputs = stages.canonical_problem.inputs
    if name not in PROJECTIONS or f"{name}_weight" not in inputs:
        return bound
    projected, weight = (np.abs(inputs[part].astype(np.float64)) for part in (name, f"{name}_weight"))
    size = projected @ weight  # (B, L, H D); the stage has (B, H, L, D)
    heads, _, width = stages.float64_values[name].shape[-3:]
    moved = (2 * unit + unit * unit) * size.reshape(*size.shape[:-1], heads, width).swapaxes(-2, -3)
    return Bound(bound.max_error + moved, bound.sigma + moved)


def _looks_like_rounding_noise(exact: Enclosure, scale: Real, array: Array, *, as_stored: bool = True) -> bool | None:
    """Return whether the errors of a stage look like roundings of a format; None if they are too few or too small.

    If ``as_stored``, the errors of a stage whose numbers are all of one 16-bit format are roundings. Errors that are
    nearly as large as the numbers show no format: in a gradient that cancels, the bounds of 16 bits allow even them.
    """
    stored = array.astype(np.float64)
    known = np.isfinite(exact.high) & np.isfinite(exact.radius) & np.isfinite(stored)
    value, error = exact.high[known], stored[known] - exact.high[known] - exact.low[known]
    wrong = error != 0
    with np.errstate(all="ignore"):
        z = np.abs(error) / scale[known]
        is_large = np.square(error).sum() > _MAX_SHARE_OF_NUMBERS**2 * np.square(value).sum()
        if is_large or wrong.sum() < _MIN_ERRORS or not np.max(z[np.isfinite(z)], initial=0.0) >= _MIN_LARGEST_ERROR:
            return None
        if as_stored and any(np.array_equal(round_to(stored, name), stored) for name in ("bfloat16", "float16")):
            return True  # for any rounding direction: truncated numbers have errors of one sign
        size = np.where(np.isfinite(z), z, 0.0)
        shares = float((error[wrong] > 0).mean()), float(size[error > 0].sum() / size.sum())
        explained = _cosine(error, value) ** 2
    has_signs = all(1 - _MAX_OF_ONE_SIGN <= share <= _MAX_OF_ONE_SIGN for share in shares)
    return has_signs and not explained > _MAX_EXPLAINED_VARIANCE


def _cosine(first: Real, second: Real) -> float:
    """Return the cosine of the angle between two vectors, 0 if one is zero; scale them first against underflow."""
    first, second = (vector / np.abs(vector).max(initial=0.0) for vector in (first, second))
    cosine = float(first @ second / np.sqrt((first @ first) * (second @ second)))
    return cosine if np.isfinite(cosine) else 0.0


MIN_ELEMENTS_TO_FIT = 8
"""Minimum number of elements that a fitted number must explain: a single element fits some scale."""


def fitted_readings(wrong: WrongResult) -> Iterator[AppliedReading]:
    """Yield the case with the best number, and before it with the nearest number of few digits."""
    truth, problem, failing = wrong.truth, wrong.problem, wrong.failing_stages
    if sum(array.size for array in failing.values()) < MIN_ELEMENTS_TO_FIT:
        return
    first = min(map(stage_position, failing))
    unit, plain = FORMATS[truth.bounds.dtype].unit_roundoff, problem.canonical(truth.judged_problem.judged_rows)
    if has_scale(problem) and first >= stage_position("scores"):
        case_scale = intended_scale(problem)
        known = truth.cached_readings.setdefault("scaled", {})
        fitted = fit_number(lambda scale: _set_scale(plain, scale), failing, case_scale, known)
        root = round_to_root(fitted / case_scale, _ROOT_CANDIDATE) if fitted is not None and case_scale else 1.0
        if _describe_root(root):
            yield multiplied_scale_reading(problem, root)
        for scale in _candidates_with_few_digits(fitted, unit, case_scale):
            yield multiplied_scale_reading(problem, scale / case_scale if case_scale else math.nan, scale)
    if "bias" in problem.inputs and first >= stage_position("biased"):
        known = truth.cached_readings.setdefault("bias scaled", {})
        fitted = fit_number(lambda factor: multiply_bias(plain, factor), failing, 1.0, known)
        for factor in _candidates_with_few_digits(fitted, unit, 1.0):
            yield multiplied_bias_reading(problem, factor)
    name = min(failing, key=stage_position)
    if (
        first >= stage_position("weights")
        and not OPERATIONS[truth.judged_problem.canonical.operation].computes_gradients
    ):
        fitted = _fit_factor(failing[name].astype(np.float64), truth.exact[name].high)
        for factor in _candidates_with_few_digits(fitted, unit, 1.0):
            yield multiplied_stages_reading(wrong, factor)
    if (run := _find_left_out_keys(wrong)) is not None:
        yield left_out_keys_reading(problem, *run)


def _fit_factor(array: Real, exact: Real) -> float | None:
    """Return the factor for which the exact stage times the factor is nearest to the array; None if there is none."""
    known = np.isfinite(array) & np.isfinite(exact)
    size = np.abs(exact[known]).max(initial=0.0)
    if not size:
        return None
    with np.errstate(all="ignore"):
        right = exact[known] / size  # whose squares neither overflow nor underflow
        factor = float((array[known] / size) @ right / (right @ right))
    return factor if math.isfinite(factor) and factor else None  # zeros are no multiple of anything


def multiplied_stages_reading(wrong: WrongResult, factor: float) -> AppliedReading:
    """Return the case with all failing stages multiplied by a fitted number."""
    replacement = make_step_replacement(multiply_stages(tuple(wrong.failing_stages), factor))
    form = ReadingForm(wrong.problem, {"factor": format_scales(factor, 1.0)[0]}, step_replacement=replacement)
    return FITTED_STAGE_READING.make_applied_reading(form, is_fitted=True, factor=factor)


def left_out_keys_reading(problem: Problem, start: int, end: int) -> AppliedReading:
    """Return the case with the keys from ``start`` to before ``end`` masked for all queries."""
    keys = count_queries_and_keys(problem.inputs)[1]
    number = np.arange(keys)
    which = f"{start:,} to {end - 1:,} of {keys:,}" if end - start > 1 else f"{start:,} of {keys:,}"
    behind = LEFT_OUT_KEYS_READING.message_template.format(which=f"{start:,} and all behind") if end == keys else ""
    form = ReadingForm(
        with_combined_mask(problem, (number < start) | (number >= end)), {"which": which}, common_description=behind
    )
    return LEFT_OUT_KEYS_READING.make_applied_reading(form, is_fitted=True)


_MAX_KEY_RUNS_TRIED = 64
"""Maximum number of runs of keys that are compared in all rows; a random mixture of the rows selects them."""


def _find_left_out_keys(wrong: WrongResult) -> tuple[int, int] | None:
    """Return the run of keys without which the weighted mean of the other values is nearest to the returned output.

    Let m be the returned mean, w the weights and v the values. If the keys in a run are left out, then
    sum over the run of w (v - m) = sum over all keys of w v - m. The left side is a difference of two running sums, so
    all runs are compared at once, for one random combination of the value columns.
    """
    weights, array, problem = (
        wrong.case_readings.case_approximation.stages.get("weights"),
        wrong.failing_stages.get("output"),
        wrong.problem,
    )
    value = problem.canonical(wrong.truth.judged_problem.judged_rows).inputs.get("value")
    can_be_left_out = "mask" in input_specs(problem.operation, problem.options.get("score"))
    if weights is None or array is None or value is None or "masked" in wrong.failing_stages or not can_be_left_out:
        return None
    is_mean = value.ndim == weights.ndim and (*weights.shape[:-1], value.shape[-1]) == array.shape
    if not is_mean or not all(np.isfinite(numbers).all() for numbers in (weights, value, array)):
        return None
    value = value.astype(np.float64)
    column = np.random.RandomState(0).standard_normal(value.shape[-1])
    with np.errstate(all="ignore"):
        values = np.repeat(value @ column, weights.shape[-3] // value.shape[-3], axis=-2)[..., np.newaxis, :]
        mean = (array.astype(np.float64) @ column)[..., np.newaxis]
        wanted = ((weights * values).sum(axis=-1, keepdims=True) - mean).ravel()
        sums = np.cumsum(weights * (values - mean), axis=-1).reshape(len(wanted), -1)
    return _find_key_run(np.pad(sums, ((0, 0), (1, 0))), wanted) if np.isfinite(sums).all() else None


def _find_key_run(sums: Real, wanted: Real) -> tuple[int, int] | None:
    """Return the start and end between which running sums grow by about ``wanted`` in every row; None without a run."""
    mixed = np.random.RandomState(1).standard_normal(len(wanted))
    along, aim, last = mixed @ sums, float(mixed @ wanted), sums.shape[-1] - 1
    order = np.argsort(along)
    above = np.searchsorted(along[order], along + aim)
    starts = np.tile(np.arange(last + 1), 2)
    ends = order[np.clip(np.concatenate([above - 1, above]), 0, last)]
    is_run = (ends > starts) & (ends - starts < last)  # without any key there is no mean
    misses = np.where(is_run, np.abs(along[ends] - along[starts] - aim), np.inf)

    def miss(run: tuple[int, int]) -> float:
        return float(np.abs(sums[:, run[1]] - sums[:, run[0]] - wanted).max(initial=0.0))

    nearest = [place for place in np.argsort(misses)[:_MAX_KEY_RUNS_TRIED] if is_run[place]]
    if not nearest:
        return None
    start, end = min(((int(starts[place]), int(ends[place])) for place in nearest), key=miss)
    # If a run up to the last key is nearly as good, prefer it: the keys between have no weight.
    return (start, last) if start and miss((start, last)) <= 4 * miss((start, end)) else (start, end)


def multiplied_bias_reading(problem: Problem, factor: float) -> AppliedReading:
    """Return the case with its bias multiplied by a fitted number."""
    form = ReadingForm(multiply_bias(problem, factor), {"factor": format_scales(factor, 1.0)[0]})
    return FITTED_BIAS_READING.make_applied_reading(form, is_fitted=True, factor=factor)


def multiplied_scale_reading(problem: Problem, factor: float, scale: float | None = None) -> AppliedReading:
    """Return the case with its scale multiplied by a fitted number; ``scale`` is the product, if it is known."""
    case_scale = intended_scale(problem)
    scale = case_scale * factor if scale is None else scale
    taken, meant = format_scales(scale, case_scale)
    shared = (
        describe_default_scale(_describe_root(factor)) if has_default_scale(problem) and _describe_root(factor) else ""
    )
    form = ReadingForm(_set_scale(problem, scale), {"taken": taken, "meant": meant}, common_description=shared)
    return FITTED_SCALE_READING.make_applied_reading(form, is_fitted=True, factor=factor, scale=scale)


def _describe_root(factor: float) -> str:
    """Describe the default scale times sqrt(n) or 1 / sqrt(n) for a small integer n; empty for other factors."""
    for number in range(2, _MAX_ROOT + 1):
        if math.isclose(factor, 1 / math.sqrt(number), rel_tol=_ROOT_TOLERANCE):
            return f"1/sqrt({number}D)"
        if math.isclose(factor, math.sqrt(number), rel_tol=_ROOT_TOLERANCE):
            return f"sqrt({number}/D)"
    return ""


def _set_scale(problem: Problem, scale: float) -> Problem:
    return problem.with_options(scale=scale)


def _candidates_with_few_digits(fitted: float | None, unit: float, reference: float) -> list[float]:
    return [] if fitted is None else list(dict.fromkeys((shorten_number(fitted, 4 * unit, reference), fitted)))


_MAX_ROOT = 16
"""The largest integer n for which a fitted factor may be sqrt(n) or 1 / sqrt(n)."""
_ROOT_TOLERANCE = 2.0**-18
"""Maximum relative difference at which a fitted factor is a root, except for roundings."""
_ROOT_CANDIDATE = 2.0**-10
"""Maximum relative difference at which a root is tried; if the factor is another number, the root does not match."""


@dataclass(frozen=True)
class FailingCase:
    """A problem in a dtype, with the ``failing_stages`` and the ``right_stages`` stages of an implementation."""

    problem: Problem
    dtype: str
    failing_stages: Stages
    right_stages: Stages
    rounding_model: str

    def find_explaining_readings(self, names: Mapping[str, FittedNumber]) -> list[AppliedReading]:
        """Return the readings that explain the case; ``names`` maps each name to its fitted number."""
        if not self.failing_stages.keys() <= self._wrong_result.truth.exact.keys():
            return []
        explaining = filter(self._is_explained_by, self._candidate_readings(names))
        by_name = {alternative.name: alternative for alternative in reversed(list(explaining))}
        for fitted in fitted_readings(self._wrong_result) if names.keys() - by_name.keys() else ():
            if fitted.name in names and fitted.name not in by_name and self._is_explained_by(fitted):
                by_name[fitted.name] = fitted
        return list(by_name.values())

    def _candidate_readings(self, names: Mapping[str, FittedNumber]) -> Iterator[AppliedReading]:
        problem, readings = self._wrong_result.problem, self._wrong_result.case_readings
        for alternative in readings.apply_readings(names):
            if alternative.step_replacement is not None or not readings.has_no_distance(alternative):
                yield alternative
        yield from (
            alternative for alternative in apply_other_empty_row_conventions(problem) if alternative.name in names
        )
        scale, bias, stage = (
            names.get(reading.name, FittedNumber())
            for reading in (FITTED_SCALE_READING, FITTED_BIAS_READING, FITTED_STAGE_READING)
        )
        if scale.factor is not None and has_scale(problem):
            yield multiplied_scale_reading(problem, round_to_root(scale.factor))
        if scale.scale is not None and has_scale(problem) and (case_scale := intended_scale(problem)):
            yield multiplied_scale_reading(problem, scale.scale / case_scale, scale.scale)
        if bias.factor is not None and "bias" in problem.inputs:
            yield multiplied_bias_reading(problem, bias.factor)
        if stage.factor is not None:
            yield multiplied_stages_reading(self._wrong_result, stage.factor)
        if any(name.startswith(ACCURACY_PREFIX) for name in names):
            accuracy, _ = judge_accuracy(self._wrong_result, is_known=True)
            yield from () if accuracy is None or accuracy.name not in names else (accuracy,)
            yield from judge_approximations(self._wrong_result)[0]

    def _is_explained_by(self, reading: AppliedReading) -> bool:
        if reading.name.startswith(ACCURACY_PREFIX):
            return True
        if reading.step_replacement is None:
            truth: Truth | None = self._approximate_truth(reading.problem)
        else:
            truth = reading.step_replacement(self._wrong_result.truth, self.rounding_model, self.failing_stages)
        if truth is None:
            return False
        arrays = {reading.stage_aliases.get(stage, stage): array for stage, array in self.failing_stages.items()}
        have_shapes = all(stage in truth.exact and truth.exact[stage].shape == of.shape for stage, of in arrays.items())
        return have_shapes and is_match(self._wrong_result, reading, truth)

    @cached_property
    def _wrong_result(self) -> WrongResult:
        return WrongResult(
            self._approximate_truth(self.problem), self.failing_stages, self.rounding_model, self.right_stages
        )

    def _approximate_truth(self, problem: Problem) -> Truth:
        """Return a truth with float64 values as the exact answer; without stages if float64 does not give them."""
        judged = make_judged_problem(replace(problem, dtype=self.dtype, supports_statistics=False), whole=True)
        rough = approximate_stages(judged.canonical)
        if self.failing_stages.keys() - rough.keys():
            return truth_of_stages(judged, ExactStages(judged.canonical))
        values = {}
        for stage, array in rough.items():
            number = array.astype(np.float64)
            # Minus infinity is exact, since a mask sets it. NaN and infinity give no information.
            unknown = np.isnan(number) | (number == np.inf)
            values[stage] = Enclosure(number, np.zeros(number.shape), np.where(unknown, np.inf, 0.0))
        uniform_rows = find_undefined(judged).uniform_rows
        bounds = StageBounds(ExactStages(judged.canonical, values), self.dtype, uniform_rows).bounds_by_stage(
            self.rounding_model
        )
        # The error of float64 is a share of the bound in this dtype.
        share = 2 * FORMATS["float64"].unit_roundoff / FORMATS[self.dtype].unit_roundoff
        exact = {}
        for stage, enclosure in values.items():
            max_error = bounds[stage].max_error
            known = (enclosure.radius == 0) & np.isfinite(enclosure.high) & np.isfinite(max_error)
            exact[stage] = replace(enclosure, radius=np.where(known, share * max_error, enclosure.radius))
        stages = ExactStages(judged.canonical, exact)
        truth = truth_of_stages(judged, stages)
        truth = replace(truth, bounds=truth.bounds.with_replaced_bounds(self.rounding_model, bounds))
        return truth.for_returned_dtypes({**self.failing_stages, **self.right_stages})


def round_to_root(factor: float, tolerance: float = _ROOT_TOLERANCE) -> float:
    """Return sqrt(n) or 1 / sqrt(n) of a small integer n if the factor is nearly that; otherwise the factor."""
    roots = [math.sqrt(number) for number in range(2, _MAX_ROOT + 1)]
    return next(
        (math.copysign(candidate, factor) for root in roots for candidate in (root, 1 / root)
         if abs(abs(factor) / candidate - 1) < tolerance),
        factor,
    )  # fmt: skip
