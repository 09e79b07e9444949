"""Steps of attention that were computed as other steps: answers that no problem has.

Such an answer is followed from the exact stages before it in float64, and so are its error bounds, by the formulas of
the stages that it is made of. What float64 itself may be off by is the bound of class native in float64, and stands in
the answer's radius: a result fits where it is within its own class's bound beside that. No statistics are asked, only
the largest error that is possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from attncheck.attention.bounds import Bound
from attncheck.attention.errors import Real
from attncheck.attention.rounding import rounding_model_named
from attncheck.judging.alternatives import Alternative, Departs, queries_and_keys
from attncheck.judging.other_steps import (
    Follow,
    in_base_e,
    in_base_two,
    mask_not_renormalised,
    masked_at_minus_cap,
    merged_by_view,
    mixed,
    multiplied,
    not_renormalised,
    softmax_over,
    split_by_view,
    squared,
    without_maximum,
)
from attncheck.judging.scales import has_scale, scale_of, widths_of
from attncheck.judging.truth import Stages, Truth
from attncheck.oracle.enclosure import Enclosure
from attncheck.reading.canonical import AttentionProblem
from attncheck.spec import BY_SCORE, DEFAULT_EMPTY_ROWS, MEANS
from attncheck.verdicts import Verdict

_ATTENTION = ("attention", "multi_head_attention")
_WITH_SOFTMAX = ("softmax", *_ATTENTION, *BY_SCORE)
_WITH_VALUES = (*_ATTENTION, *BY_SCORE)
_MERGED = ("merge_states",)
_WITH_LOG_SUM_EXP = (*_WITH_SOFTMAX, *_MERGED)
_WITH_SCORES = ("scoring", *_ATTENTION, *BY_SCORE)
_HEADS = ("multi_head_attention",)


@dataclass(frozen=True)
class _Step:
    """A step that may have been taken for another, at a stage of some operations."""

    name: str
    description: str
    stage: str
    follow: Follow
    operations: tuple[str, ...]
    answer: str = ""
    verdict: Verdict = Verdict.NUMERIC


_STEPS = (
    _Step("log-sum-exp-base-2", "log_sum_exp is in base 2: it lacks the factor ln(2)", "log_sum_exp", in_base_two,
          _WITH_LOG_SUM_EXP),
    _Step("log-sum-exp-base-e", "log_sum_exp is in base e: it has the factor ln(2)", "log_sum_exp", in_base_e,
          _MERGED),
    _Step("log-sum-exp-mixed-base", "log_sum_exp adds the logarithm in base 2 of the sum to the maximum", "log_sum_exp",
          mixed, _WITH_LOG_SUM_EXP),
    _Step("log-sum-exp-without-maximum", "log_sum_exp lacks the maximum that was subtracted", "log_sum_exp",
          without_maximum, _WITH_LOG_SUM_EXP),
    _Step("softmax-over-queries", "the softmax runs over the queries, not over the keys", "weights", softmax_over(-2),
          _WITH_SOFTMAX),
    _Step("softmax-over-heads", "the softmax runs over the heads, not over the keys", "weights", softmax_over(-3),
          _WITH_SOFTMAX),
    _Step("softmax-over-batch", "the softmax runs over the batch, not over the keys", "weights", softmax_over(-4),
          _WITH_SOFTMAX),
    _Step("weights-not-renormalised", "masked weights are set to zero behind the softmax, the others not renormalised",
          "masked", not_renormalised, _WITH_VALUES, "not renormalised"),
    _Step("mask-not-renormalised", "weights that the mask forbids are set to zero behind the softmax, and the "
          "others not renormalised", "masked", mask_not_renormalised, _WITH_VALUES, "not renormalised"),
    _Step("softcap-after-masked", "the softcap is applied after the mask, and masked keys have the logit -softcap; the "
          "case means before it", "masked", masked_at_minus_cap, _ATTENTION, verdict=Verdict.SEMANTIC),
    _Step("scores-squared", "the scores are squared", "scores", squared, _WITH_SCORES),
    _Step("heads-merged-by-view", "heads are merged by a reshape without a transposition", "output", merged_by_view,
          _HEADS),
    _Step("heads-split-by-view", "heads are split by a reshape without a transposition", "query", split_by_view,
          _HEADS),
)  # fmt: skip


def departures_of(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield the steps that may have been taken for others in an operation."""
    for step in _STEPS:
        is_there = step.follow is not squared or has_scale(operation, posed)
        if operation in step.operations and is_there:
            found = _convention(step.name, step.description, step.stage, posed, _departs(step.follow))
            yield replace(found, answer=step.answer, verdict=step.verdict)
    if operation == "attention_gradients":
        yield from _gradients(operation, posed)
    if operation in _WITH_SOFTMAX:
        yield from _outputs(operation, posed)


def _gradients(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    scale = scale_of(operation, posed)
    width = widths_of(operation, posed)["D"]
    factors = {
        "unscaled": (1 / scale if scale else 1.0, "lacks the scale"),
        "scaled-twice": (scale, "is scaled twice"),
        **_powers({"root-of-width": (math.sqrt(width), "sqrt(D)"), "width": (width, "D")}),
    }
    yield from _multiples("gradients", ("grad_query", "grad_key"), factors, posed)
    if "bias" in posed.inputs:
        description = "the gradient of the bias is scaled like that of the scores"
        departs = _departs(multiplied(("grad_bias",), scale))
        yield _convention("bias-gradient-scaled", description, "grad_bias", posed, departs)


def _outputs(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield weights, or what they average, times a number that follows from the shapes."""
    sizes = {"keys": (float(queries_and_keys(posed)[1]), "the number of keys")}
    if operation in _ATTENTION:
        widths = widths_of(operation, posed)
        sizes["root-of-width"] = (math.sqrt(widths["D"]), "sqrt(D)")
        sizes["width"] = (widths["D"], "D")
        sizes["heads"] = (widths["H D"] / widths["D"], "the number of heads")
    factors = {
        "doubled": (2.0, "is twice as large"),
        "halved": (0.5, "is half as large"),
        "negated": (-1.0, "is the negative"),
        **_powers(sizes),
    }
    stages = ("weights", *MEANS)
    for first in range(len(stages)):  # what is returned of them begins there
        yield from _multiples("output", stages[first:], factors, posed, begins_at=stages[first])


def _powers(sizes: Mapping[str, tuple[float, str]]) -> dict[str, tuple[float, str]]:
    times = {f"times-{name}": (size, f"is {words} times too large") for name, (size, words) in sizes.items()}
    over = {f"over-{name}": (1 / (size or 1.0), f"is {words} times too small") for name, (size, words) in sizes.items()}
    return times | over


def _multiples(
    prefix: str,
    stages: tuple[str, ...],
    factors: Mapping[str, tuple[float, str]],
    posed: AttentionProblem,
    begins_at: str = "",
) -> Iterator[Alternative]:
    """Yield those of some stages that fail, times a number; numbers that are the same are one answer."""
    same = {name: f"{factor:.12g}" for name, (factor, _) in factors.items()}
    for name, (factor, description) in factors.items():
        departs = _departs(multiplied(stages, factor), only_failing=True, begins_at=begins_at)
        alike = [other for key, (_, other) in factors.items() if same[key] == same[name]]
        unsure = f"the {{stage}} {' or '.join(alike)}"
        found = _convention(f"{prefix}-{name}", f"the {{stage}} {description}", stages[0], posed, departs)
        yield replace(found, answer=f"{prefix} times {same[name]}", unsure=unsure)


def _convention(name: str, description: str, stage: str, posed: AttentionProblem, departs: Departs) -> Alternative:
    return Alternative(name, description, stage, posed, Verdict.NUMERIC, departs=departs)


def _departs(follow: Follow, *, only_failing: bool = False, begins_at: str = "") -> Departs:
    def departs(truth: Truth, rounding_model: str, failing: Stages) -> Truth | None:
        if not _is_plain(truth) or (begins_at and begins_at not in failing):
            return None
        own = {stage: bound.max_error for stage, bound in truth.bounds(rounding_model).items()}
        known = {stage: np.abs(each.low) + each.radius for stage, each in truth.exact.items()}
        with np.errstate(all="ignore"):
            found = follow(truth, truth.rounding(rounding_model), own)
            radii = follow(truth, rounding_model_named("native", "float64"), known)
        if not found:
            return None
        changed = [stage for stage in found if stage in truth.exact and (stage in failing or not only_failing)]
        exact = {stage: _enclosure(found[stage][0], radii[stage][1]) for stage in changed}
        bounds = {stage: Bound(found[stage][1], found[stage][1]) for stage in changed}
        return _other(truth, {**truth.exact, **exact}, rounding_model, {**truth.bounds(rounding_model), **bounds})

    return departs


def _other(truth: Truth, exact: Mapping[str, Enclosure], rounding_model: str, bounds: Mapping[str, Bound]) -> Truth:
    return replace(
        truth,
        exact=exact,
        solved={},
        special=None,
        supports_statistics=False,
        _bounds={rounding_model: dict(bounds)},
        _readings={},
    )


def _is_plain(truth: Truth) -> bool:
    """Whether every row has an answer by arithmetic, and all of it is known."""
    special = truth.special
    conventional = special is None or (special.convention == DEFAULT_EMPTY_ROWS and not special.nan_rows.any())
    is_defined = truth.undefined is None and not truth.inner
    return conventional and is_defined and truth.query_rows is None and "softcap_follows" not in truth.options


def _enclosure(value: Real, radius: Real) -> Enclosure:
    """Enclose what was computed in float64; NaN has no answer."""
    known = np.isfinite(value)
    radius = np.where(known, radius, np.where(np.isnan(value), np.inf, 0.0))
    return Enclosure(value, np.zeros_like(value), np.broadcast_to(radius, value.shape))
