"""Readings of the exponentials of the softmax and of the layout of the output.

The exponentials may have another denominator, or overflow because the maximum of a row is not subtracted. The output
may be stored with its axes in another order. All of them replace a step (``replaced_steps.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from attncheck.attention.errors import Real
from attncheck.diagnosis.replaced_steps import (
    PLAIN_OPS,
    SOFTMAX_OPS,
    ApproximateStages,
    ReplacedStepContext,
    StepRule,
    make_step_replacement,
    replace_step,
)
from attncheck.judging.alternatives import Reading, ReadingForm
from attncheck.spec.options import SIXTEEN_BIT_DTYPES
from attncheck.spec.rounding import FORMATS

# Denominators.


def add_to_denominator(number: float) -> StepRule:
    """Add a number to the sum of the exponentials, which are scaled so that the largest is 1."""

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        if (sums := _row_sums_of_exponentials(at)) is None:
            return {}
        errors, (highest, parts, shift) = at.max_errors, sums
        factor = parts / (parts + number)
        weights = at.exact_value("weights") * factor
        of_shift = np.expm1(shift)[..., np.newaxis] * number / (parts + number)
        max_error = errors["weights"] * factor + np.abs(weights) * (of_shift + at.few_roundings_error)
        max_error = max_error + at.rounding.weight_underflow
        total = np.log(parts[..., 0] + number) + highest
        rounded = at.few_roundings_error * (np.abs(total) + np.abs(highest) + 1)
        results = {
            "weights": (weights, max_error),
            "log_sum_exp": (total, (errors["log_sum_exp"] + 2 * shift) + rounded),
        }
        return results | at.stages_after_weights(weights, max_error)

    return compute_stages


def leave_out_denominator(at: ReplacedStepContext) -> ApproximateStages:
    """Return the exponentials themselves as weights, scaled so that the largest is 1."""
    if (with_error := _exponentials_with_error(at)) is None:
        return {}
    exponentials, max_error = with_error
    return {"weights": with_error} | at.stages_after_weights(exponentials, max_error)


def divide_by_sum_over_queries(at: ReplacedStepContext) -> ApproximateStages:
    """Divide the exponentials by their sum over the queries, after each row's maximum was subtracted."""
    if (with_error := _exponentials_with_error(at)) is None or with_error[0].ndim < 2:
        return {}
    exponentials, error = with_error
    total, moved = (array.sum(axis=-2, keepdims=True) for array in with_error)
    if not (total > moved).all():  # a key that no query may attend to
        return {}
    weights = exponentials / total
    # (e + de) / (t + dt) - e / t = (de - w dt) / (t + dt); the sum adds as many numbers as there are queries.
    roundings = at.few_roundings_error + exponentials.shape[-2] * at.rounding.coarsest_unit
    max_error = (error + weights * moved) / (total - moved) + weights * roundings + at.rounding.weight_underflow
    return {"weights": (weights, max_error)} | at.stages_after_weights(weights, max_error)


def _exponentials_with_error(at: ReplacedStepContext) -> tuple[Real, Real] | None:
    """Return exp(logit - maximum of the row) and its largest error; None if they do not follow from the weights."""
    if (sums := _row_sums_of_exponentials(at)) is None:
        return None
    _, parts, shift = sums
    exponentials = at.exact_value("weights") * parts
    of_shift = np.expm1(shift)[..., np.newaxis]
    max_error = at.max_errors["weights"] * parts + exponentials * (of_shift + at.few_roundings_error)
    return exponentials, max_error + at.rounding.weight_underflow


def _row_sums_of_exponentials(at: ReplacedStepContext) -> tuple[Real, Real, Real] | None:
    """Return each row's maximum, its sum of exp(logit - maximum), and the error of the sum's logarithm.

    None if they do not follow from the stages: with sinks, a row without a key, or a log_sum_exp in base 2.
    """
    problem = at.exact_stages.canonical_problem
    if not {"log_sum_exp", "weights"} <= at.truth.exact.keys() or problem.options.get("lse_base") == "2":
        return None
    (highest, moved), total = at.row_maxima_and_errors(), at.exact_value("log_sum_exp")
    if not np.isfinite(highest).all() or "sinks" in problem.inputs:
        return None
    return highest, np.exp(total - highest)[..., np.newaxis], at.max_errors["log_sum_exp"] + moved


# Exponentials without a maximum.

_UNCLEAR = math.log(2)
"""A logit this near to a limit of a format may or may not be beyond it.

A choice: rounding moves a logit by far less than log(2).
"""


def skip_maximum(is_wide: bool, at_overflow: float, at_underflow: float) -> StepRule:
    """Take the exponentials of the logits themselves in the dtype, or if ``is_wide``, of float16 in float32.

    ``at_overflow`` is the output of a row whose largest exponential is infinite: NaN, since infinity is divided by
    infinity, or 0 if the kernel replaces NaN. ``at_underflow`` is the output of a row whose exponentials are all 0:
    NaN, since 0 is divided by 0, or 0 if the kernel divides by another number.
    """

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        problem, dtype = at.exact_stages.canonical_problem, at.truth.bounds.dtype
        others = {"sinks", "lse_base"} & {*problem.inputs, *problem.options}
        if others or at.exact_stages.computation.added_keys or "log_sum_exp" not in at.truth.exact:
            return {}
        if is_wide and dtype not in SIXTEEN_BIT_DTYPES:
            return {}
        limits = FORMATS["float32" if is_wide else dtype]
        largest, least_normal, least = map(math.log, (limits.largest, limits.least_normal, limits.least_subnormal))
        (highest, moved), total = at.row_maxima_and_errors(), at.exact_value("log_sum_exp")
        overflows, underflows = highest - moved > largest + _UNCLEAR, highest + moved < least - _UNCLEAR
        if not (overflows | (underflows & np.isfinite(highest))).any():
            return {}
        is_unclear = (total + moved > largest - _UNCLEAR) | (highest - moved < least_normal + _UNCLEAR)
        # An exponential below the least normal number has an error of up to that number.
        lost = np.exp(np.minimum(least_normal - total, 0.0))[..., np.newaxis]
        weights = at.exact_value("weights")
        max_error = at.max_errors["weights"] + at.few_roundings_error * weights + lost
        rows = [flags[..., np.newaxis] for flags in (overflows, underflows, is_unclear)]
        is_lost = overflows | underflows | is_unclear  # in these rows, only the output is compared
        results = {
            "weights": (weights, np.where(is_lost[..., np.newaxis], np.inf, max_error)),
            "log_sum_exp": (total, np.where(is_lost, np.inf, at.max_errors["log_sum_exp"])),
        }
        for stage, (value, error) in at.stages_after_weights(weights, max_error).items():
            results[stage] = (
                np.select(rows[:2], [at_overflow, at_underflow], value),
                np.select(rows, [0.0, 0.0, np.inf], error),
            )
        return results

    return compute_stages


_WITHOUT_MAXIMUM = tuple(
    make_step_replacement(skip_maximum(is_wide, *outputs))
    for is_wide, outputs in product((False, True), ((math.nan, math.nan), (math.nan, 0.0), (0.0, 0.0)))
)


# Another layout of the output.


def swap_axes_of_output(first: int, second: int) -> StepRule:
    """Store the output with two axes exchanged, and read it as if they were not."""

    def compute_stages(at: ReplacedStepContext) -> ApproximateStages:
        if "output" not in at.truth.exact or at.exact_value("output").ndim <= max(first, second):
            return {}
        value, error = np.broadcast_arrays(at.exact_value("output"), at.max_errors["output"])
        return {
            "output": (
                value.swapaxes(first, second).reshape(value.shape),
                error.swapaxes(first, second).reshape(value.shape),
            )
        }

    return compute_stages


SOFTMAX_AND_LAYOUT_READINGS: Sequence[Reading] = (
    *(
        Reading(f"denominator-plus-{number:g}", f"{number:g} is added to the sum of the exponentials",
                replace_step(add_to_denominator(number), SOFTMAX_OPS), first_stage="weights")
        for number in (1.0, 1e-3, 1e-6, 1e-9)
    ),
    Reading("denominator-left-out", "the exponentials are not divided by their sum",
            replace_step(leave_out_denominator, SOFTMAX_OPS), first_stage="weights"),
    Reading("denominator-over-queries", "the exponentials are divided by their sum over the queries, not over the keys",
            replace_step(divide_by_sum_over_queries, SOFTMAX_OPS), first_stage="weights"),
    Reading("maximum-not-subtracted", "the maximum of a row is not subtracted, so its exponentials over- or underflow",
            lambda problem: [ReadingForm(problem, step_replacement=step) for step in _WITHOUT_MAXIMUM
                             if problem.operation in PLAIN_OPS], first_stage="weights"),
    *(
        Reading(f"output-{name}-swapped", f"the output is stored in the order {order}, not (B, H, Lq, Dv)",
                replace_step(swap_axes_of_output(*axes), PLAIN_OPS), first_stage="output")
        for name, order, axes in (
            ("heads-and-rows", "(B, Lq, H, Dv)", (1, 2)), ("rows-and-columns", "(B, H, Dv, Lq)", (2, 3))
        )
    ),
)  # fmt: skip
