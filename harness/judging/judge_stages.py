"""Every stage of one implementation, judged twice: against the exact answer, and against its own previous stage.

The first comparison shows if a stage is wrong, the second if it inherits the error from the stage before. The
implementation goes wrong at the first stage whose introduced error fails. A message describes the position of wrong
elements if few words describe it exactly: one head, the last rows, a tile of keys. Shape and dtype are those of whole
arrays; values are judged on the query rows whose truth is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from attncheck.attention.exact_array import Enclosure
from attncheck.attention.flags import Flags
from attncheck.attention.sampling import RowIndices, count_queries, index_in_whole_stage, select_stage_rows
from attncheck.common.wording import format_ratio
from attncheck.judging.compare import ErrorTier, Index, MeasuredErrors, index_of_largest, rate_errors
from attncheck.judging.exact_stages import Array, Stages
from attncheck.judging.stage_bounds import StageReference
from attncheck.judging.truth import Truth
from attncheck.reading.shapes import format_shape
from attncheck.spec import NORMALIZATIONS, ROTATIONS, STAGE_SPECS, Shape, query_axis, stage_position, wide_dtype
from attncheck.spec.verdicts import Verdict


@dataclass(frozen=True)
class StageJudgement:
    """The judgement of one stage of one implementation.

    ``accumulated`` measures the stage against the exact answer. ``introduced`` measures it against the exact step from
    the implementation's previous stages (None if that is not possible). ``index`` is the element in the message, with
    its ``value``, its ``exact`` value, the ``error`` and the ``bound`` B: of the comparison ``against`` the exact
    answer or the exact step. ``judged_rows`` of ``query_rows`` were judged, None for all; indices refer to the whole
    array. ``unjudged`` counts the elements of these rows without an exact answer. ``empty_rows`` is the convention that
    rows without a key follow, if nothing else differs from the case. An implementation ``has_wide_statistics`` if it
    returns log_sum_exp in float32 and outputs in 16 bits.
    """

    stage: str
    verdict: Verdict
    accumulated: MeasuredErrors | None = None
    introduced: MeasuredErrors | None = None
    index: Index | None = None
    value: float | None = None
    exact: float | None = None
    error: float | None = None
    bound: float | None = None
    against: Literal["exact", "step"] | None = None
    judged_rows: int | None = None
    query_rows: int | None = None
    unjudged: int = 0
    message: str = ""
    empty_rows: str | None = None
    has_wide_statistics: bool = False

    @property
    def is_noisy(self) -> bool:
        """True if the errors do not fail but are larger than those of every known good implementation."""
        return ErrorTier.WARNING in {measured.tier for measured in (self.accumulated, self.introduced) if measured}

    @property
    def is_at_fault(self) -> bool:
        """True if this stage itself is at fault, not one before it."""
        if self.verdict is Verdict.AGREE:
            return False
        return self.introduced is None or self.introduced.tier.is_failure or self.verdict is not Verdict.NUMERIC


def sort_stages(stages: Iterable[str], options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the stages' names in the order in which attention computes them; unknown names come last.

    Example:
        >>> sort_stages(["output", "mine", "weights", "scores"])
        ['scores', 'weights', 'output', 'mine']
    """
    ordered = sorted(stages, key=stage_position)
    if not (options or {}).get("norm_after_rotation"):
        return ordered
    late = [stage for stage in ordered if stage in NORMALIZATIONS]
    early = {*NORMALIZATIONS, *ROTATIONS}
    last = next((index for index, stage in enumerate(ordered) if stage not in early), len(ordered))
    return [*(stage for stage in ordered[:last] if stage in ROTATIONS), *late, *ordered[last:]]


def judge_stages(
    truth: Truth, stages: Mapping[str, Array], shapes: Mapping[str, Shape], rounding_model: str
) -> list[StageJudgement]:
    """Judge every stage that an implementation returned, in the order of computation."""
    sound = select_well_formed_stages(truth, stages, shapes)
    judgements = [
        judge_stage(truth, stage, stages[stage], sound, shapes, rounding_model)
        for stage in sort_stages(stages, truth.judged_problem.canonical.options)
    ]
    return explain_first_faulty_stage(judgements)


def explain_first_faulty_stage(judgements: list[StageJudgement]) -> list[StageJudgement]:
    """Replace the message of the first wrong stage, if it says that the error comes from an earlier stage."""
    begins_at = first_faulty_stage(judgements)
    explained = []
    for judged in judgements:
        if judged.stage == begins_at and judged.accumulated is not None:
            is_small = judged.accumulated.ratio <= _MAX_ACCUMULATED_RATIO
            reason = ERROR_ACCUMULATES if is_small else ERROR_WITHOUT_STEP
            judged = replace(judged, message=judged.message.replace(ERROR_FROM_EARLIER_STAGE, reason))
        explained.append(judged)
    return explained


def select_well_formed_stages(
    truth: Truth, stages: Mapping[str, Array], shapes: Mapping[str, Shape]
) -> dict[str, Array]:
    """Return the judged rows of the stages that have the right shape and dtype."""
    return {
        stage: select_stage_rows(stage, array, truth.judged_problem.judged_rows)
        for stage, array in stages.items()
        if array.shape == shapes.get(stage) and str(array.dtype) == truth.bounds.stage_dtype(stage)
    }


def first_faulty_stage(judgements: list[StageJudgement]) -> str:
    """Return the first stage that is itself at fault; empty if none is."""
    failing = [judgement for judgement in judgements if judgement.verdict.exit_code]
    at_fault = [judgement.stage for judgement in failing if judgement.is_at_fault]
    return next(iter(at_fault), failing[0].stage if failing else "")


def judge_stage(
    truth: Truth,
    stage: str,
    array: Array,
    well_formed: Stages,
    shapes: Mapping[str, Shape],
    rounding_model: str,
    *,
    judge_step: bool = True,
) -> StageJudgement:
    """Judge one stage; ``well_formed`` are all well-formed stages: the stage and those before it matter.

    Unless it ``judge_step``, it is compared only with the exact answer, and not with the step from the stage before.
    """
    wanted = shapes.get(stage)
    if wanted is not None and array.shape != wanted:
        message = f"expected shape {format_shape(wanted)}, got {format_shape(array.shape)}"
        message += _describe_swapped_axes(stage, wanted, array.shape)
        return StageJudgement(stage, Verdict.SHAPE, message=message)
    expected_dtype = truth.bounds.stage_dtype(stage)
    if wanted is not None and str(array.dtype) != expected_dtype:
        expected = " or ".join(filter(None, (expected_dtype, wide_dtype(stage, expected_dtype))))
        return StageJudgement(stage, Verdict.DTYPE, message=f"expected {expected}, got {array.dtype}")
    if wanted is None or stage not in truth.exact:
        reason = truth.no_answer_reason or f"no exact answer is known for a stage of this name: {stage}"
        return StageJudgement(stage, Verdict.UNVERIFIED, unjudged=array.size, message=reason)
    rows, reference = well_formed[stage], truth.stage_reference(stage, rounding_model, well_formed[stage])
    odd, unjudged = reference.flag_wrong_nonfinite(rows), int(np.count_nonzero(reference.unjudged_elements))
    if odd.any():
        judgement = _judge_nonfinite(stage, reference.exact, rows, odd)
    else:
        step = truth.step_reference(stage, well_formed, rounding_model) if judge_step else None
        judgement = judge_finite(stage, rows, reference, step, is_whole=truth.judged_problem.judged_rows is None)
    if unjudged and judgement.verdict is Verdict.AGREE:
        why = truth.reason_not_judged(stage, index_of_largest(reference.unjudged_elements))
        judgement = _note_unjudged_elements(judgement, reference.unjudged_elements, why)
    if unjudged or truth.bounds.has_wide_statistics:
        judgement = replace(judgement, unjudged=unjudged, has_wide_statistics=truth.bounds.has_wide_statistics)
    judged = truth.judged_problem
    queries = count_queries(judged.problem_without_layout.inputs)
    return convert_to_whole_indices(judgement, judged.judged_rows, queries)


def _note_unjudged_elements(judgement: StageJudgement, unjudged: Flags, why: str) -> StageJudgement:
    """Add to the message why elements were not judged; a stage without judged elements is unverified."""
    if unjudged.all():
        return StageJudgement(judgement.stage, Verdict.UNVERIFIED, message=f"there is no exact answer: {why}")
    message = f"{int(unjudged.sum())} of {unjudged.size} elements were not judged, for want of an exact answer: {why}"
    return replace(judgement, message=message)


def flag_failing_elements(reference: StageReference, array: Array) -> Flags:
    """Flag the elements of the judged rows of a stage that are proved to be wrong."""
    return reference.flag_beyond_bound(array) | reference.flag_wrong_nonfinite(array)


def stage_agrees(reference: StageReference, array: Array) -> bool:
    """Return whether the judged rows of a stage are right."""
    if reference.exact.shape != array.shape:  # a reading may give a stage another shape, which no returned stage has
        return False
    return not reference.flag_wrong_nonfinite(array).any() and not _measure_stage(reference, array).tier.is_failure


def convert_to_whole_indices(judgement: StageJudgement, rows: RowIndices | None, queries: int) -> StageJudgement:
    """Convert indices in the judged ``rows``, of so many ``queries``, to those in the whole stage; count the rows."""
    stage = judgement.stage
    if rows is None or query_axis(stage) is None:
        return judgement

    def moved(measured: MeasuredErrors | None) -> MeasuredErrors | None:
        return None if measured is None else replace(measured, index=index_in_whole_stage(stage, measured.index, rows))

    return replace(
        judgement,
        accumulated=moved(judgement.accumulated),
        introduced=moved(judgement.introduced),
        index=index_in_whole_stage(stage, judgement.index, rows),
        judged_rows=len(rows),
        query_rows=queries,
    )


def _judge_nonfinite(stage: str, exact: Enclosure, array: Array, odd: Flags) -> StageJudgement:
    index = index_of_largest(odd)
    value, truth = float(array[index]), float(exact.high[index])
    swallowed = "NaN swallowed: " if np.isnan(truth) else ""
    message = f"{swallowed}{value:g} where the exact value is {truth:.9g}, at {int(odd.sum())} of {odd.size} elements"
    return StageJudgement(
        stage, Verdict.NONFINITE, index=index, value=value, exact=truth, against="exact", message=message
    )


def _measure_stage(reference: StageReference, array: Array) -> MeasuredErrors:
    exact, bound, has_statistics = reference.exact, reference.bound, reference.supports_statistics
    errors = exact.distance_to(array), exact.radius, bound.max_error, bound.sigma
    return rate_errors(*errors, reference.measured_elements, supports_statistics=has_statistics)


def judge_finite(
    stage: str, array: Array, reference: StageReference, step: StageReference | None, *, is_whole: bool
) -> StageJudgement:
    """Judge a stage by its errors, with the worst element of the failing comparison; a failing step goes first."""
    accumulated, introduced = _measure_stage(reference, array), None if step is None else _measure_stage(step, array)
    is_step_right = introduced is not None and not introduced.tier.is_failure
    if step and is_step_right and (reference.flag_beyond_bound(array) & ~step.measured_elements).any():
        step = introduced = None  # at a wrong element, the step is not judged
    fails, named, failing = accumulated.tier.is_failure, accumulated, reference
    against: Literal["exact", "step"] = "exact"
    if step is not None and introduced is not None and introduced.tier.is_failure:
        fails, named, failing, against = True, introduced, step, "step"
    index, exact, bound = named.index, failing.exact, failing.bound
    details: dict[str, Any] = {}
    if index is not None:
        details = {
            "against": against,
            "value": float(array[index]),
            "exact": float(exact.high[index]),
            "error": named.error,
            "bound": float(bound.max_error[index]),
        }
    verdict = Verdict.NUMERIC if fails else Verdict.AGREE
    message = describe_errors(accumulated, introduced) if fails else ""
    if fails and named.tier is ErrorTier.PROVEN:
        wrong = failing.flag_beyond_bound(array)
        if named.ratio == np.inf:
            message = describe_errors_without_bound(stage, array, exact, wrong & (bound.max_error == 0), against)
        is_own = introduced is None or introduced.tier.is_failure
        message = "; ".join(filter(None, (message, describe_wrong_ranges(stage, wrong) if is_whole and is_own else "")))
    return StageJudgement(stage, verdict, accumulated, introduced, index, message=message, **details)


ERROR_FROM_EARLIER_STAGE = "this step is right, the error comes from before it"
ERROR_ACCUMULATES = "no step is wrong by itself: what is rounded in each adds up"
ERROR_WITHOUT_STEP = "no step is wrong by itself, but their roundings cannot add up to this error"
"""Messages of the first stage that fails, if no stage that was returned before it fails."""
_MAX_ACCUMULATED_RATIO = 4.0
"""Largest error, as a multiple of its bound, that steps within their own bounds can add up to.

The bound of a stage contains the errors of all steps, propagated to this stage. So the ratio of such a sum is at most
1, except for two terms: the roundings of stages that are stored only to return them, and products of two errors. Either
is at most as large as the bound if the bound is less than the values themselves. A choice: twice that sum.
"""


def describe_errors(accumulated: MeasuredErrors, introduced: MeasuredErrors | None) -> str:
    """Describe how large the errors of a stage are, and if the stage itself introduces them."""
    if introduced is None or not accumulated.tier.is_failure:
        return _format_error(
            "against the exact answer" if introduced is None else "in this step", introduced or accumulated
        )
    if introduced.tier.is_failure:
        return _format_error("in this step", introduced)
    return f"{_format_error('against the exact answer', accumulated)}; {ERROR_FROM_EARLIER_STAGE}"


def describe_errors_without_bound(stage: str, array: Array, exact: Enclosure, elements: Flags, against: str) -> str:
    """Describe errors of elements for which no error is possible: the error over its bound would be infinite."""
    error = np.where(elements, exact.distance_to(array), 0.0)
    largest, count = float(error.max()), int(elements.sum())
    if stage == "weights" and not exact.high[elements].any():
        keys = "a masked key has weight" if count == 1 else f"{count} masked keys have weight"
        return f"{keys}, up to {largest:.3g}: a key that may not be attended to must have exactly 0"
    what = "the exact answer" if against == "exact" else "this step"
    return f"off by up to {largest:.3g} where {what} needs no rounding, so that no error is possible ({count} elements)"


def _format_error(against: str, measured: MeasuredErrors) -> str:
    if measured.tier is ErrorTier.PROVEN:
        return f"{format_ratio(measured.ratio)} times the largest error that is possible {against}"
    return (
        f"errors too large to be rounding {against}: largest {measured.largest_z:.3g} sigma, "
        f"root mean square {measured.mean_z:.3g} sigma over {measured.elements} elements"
    )


_MIN_WRONG_ELEMENTS = 2
"""The index of a single element says more than a range."""
_AXIS_NAMES = {"Lq": ("query row", "query rows"), "Lk": ("key", "keys"), "T": ("key", "keys")}
_COLUMN = ("column", "columns")


def describe_wrong_ranges(stage: str, wrong: Flags) -> str:
    """Describe the part of a stage that has all wrong elements by ranges of its axes; empty if that is the whole stage.

    Ranges are those of indices, ends included. An axis is left out if its wrong indices are not one range.

    Example:
        >>> wrong = np.zeros((1, 2, 4, 6), dtype=bool)
        >>> wrong[:, 1, :, 4:] = True
        >>> describe_wrong_ranges("weights", wrong)
        'all 8 wrong elements are in head 1 of 2, keys 4 to 5 of 6 (counted from 0)'
    """
    count = int(wrong.sum())
    if count < _MIN_WRONG_ELEMENTS:
        return ""
    parts = []
    for axis, (one, many) in enumerate(_axis_names(stage, wrong.ndim)):
        others = tuple(another for another in range(wrong.ndim) if another != axis)
        indices = np.flatnonzero(wrong.any(axis=others))
        first, last, length = int(indices[0]), int(indices[-1]), wrong.shape[axis]
        if len(indices) < length and last - first + 1 == len(indices):
            parts.append(f"{one} {first} of {length}" if first == last else f"{many} {first} to {last} of {length}")
    return f"all {count} wrong elements are in {', '.join(parts)} (counted from 0)" if parts else ""


def _describe_swapped_axes(stage: str, expected: Shape, returned: Shape) -> str:
    """Name the two axes of a stage whose exchange gives the returned shape; empty if there are none."""
    names = [many for _, many in _axis_names(stage, len(expected))]
    for first, second in combinations(range(len(names)), 2):
        swapped = list(expected)
        swapped[first], swapped[second] = expected[second], expected[first]
        if tuple(swapped) == returned:
            return f": {names[first]} and {names[second]} are swapped"
    return ""


def _axis_names(stage: str, rank: int) -> list[tuple[str, str]]:
    """Return the names of a stage's axes, for one index and for several."""
    batch, head = ("batch entry", "batch entries"), ("head", "heads")
    letters = STAGE_SPECS[stage].axes[2:] if stage in STAGE_SPECS else ("Lq", "")
    rest = [_AXIS_NAMES.get(letter, _COLUMN) for letter in letters]
    is_merged = rank == 3 and len(rest) == 2  # the merged heads of multi_head_attention
    axes = [batch, _AXIS_NAMES["Lq"], _COLUMN] if is_merged else [batch, head, *rest]
    return axes[-rank:] if rank <= len(axes) else []
