"""Readings with a free number: the scale, or factor of a bias, with which a case comes nearest to what was returned."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attncheck.attention.formats import FORMATS
from attncheck.judging.alternatives import Alternative
from attncheck.judging.mistakes import with_bias_times
from attncheck.judging.residuals import best_number
from attncheck.judging.scales import has_scale, scale_of, scales_in_words, shortest
from attncheck.judging.truth import Stages, Truth
from attncheck.reading.canonical import AttentionProblem, canonical_form
from attncheck.spec import stage_position
from attncheck.verdicts import Verdict

MIN_FITTED = 8
"""Numbers that a fitted one must explain: some scale explains every single one."""


def fitted_numbers(truth: Truth, posed: AttentionProblem, failing: Stages) -> Iterator[Alternative]:
    """Yield the case with the number that fits best, and before it with the nearest number of few digits."""
    if sum(array.size for array in failing.values()) < MIN_FITTED:
        return
    operation, first = truth.operation, min(map(stage_position, failing))
    unit, plain = FORMATS[truth.dtype].unit_roundoff, canonical_form(operation, posed.options, posed.inputs)
    if has_scale(operation, posed) and first >= stage_position("scores"):
        own = scale_of(operation, posed)
        known = truth._readings.setdefault("scaled", {})
        fitted = best_number(operation, lambda scale: _scaled(plain, scale), failing, own, known)
        for scale in _shortened(fitted, unit, own):
            yield with_scale_times(operation, posed, scale / own if own else math.nan, scale)
    if "bias" in posed.inputs and first >= stage_position("biased"):
        known = truth._readings.setdefault("bias scaled", {})
        fitted = best_number(operation, lambda factor: with_bias_times(plain, factor, "").posed, failing, 1.0, known)
        for factor in _shortened(fitted, unit, 1.0):
            yield with_bias_times(posed, factor, scales_in_words(factor, 1.0)[0])


def with_scale_times(operation: str, posed: AttentionProblem, factor: float, scale: float | None = None) -> Alternative:
    """Return the case with its scale times a number that was fitted; ``scale`` is the product, where it is known."""
    own = scale_of(operation, posed)
    scale = own * factor if scale is None else scale
    taken, given = scales_in_words(scale, own)
    description = f"the {{stage}} is that of scale {taken} (given {given})"
    changed = _scaled(posed, scale)
    return Alternative("scale-fitted", description, "scores", changed, Verdict.NUMERIC, is_fitted=True, factor=factor)


def _scaled(posed: AttentionProblem, scale: float) -> AttentionProblem:
    return AttentionProblem({**posed.options, "scale": scale}, posed.inputs)


def _shortened(fitted: float | None, unit: float, own: float) -> list[float]:
    return [] if fitted is None else list(dict.fromkeys((shortest(fitted, 4 * unit, own), fitted)))
