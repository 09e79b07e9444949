"""Faults by intention in the options that no input can show."""

from __future__ import annotations

import numpy as np

from attncheck.mutants.backward import BACKWARD, Backward
from attncheck.mutants.mask_steps import Allowed, MaskRequest, within_lengths, within_window
from attncheck.mutants.mutant import EVERY, Equivalent
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant


def _right_side_dropped_when_causal(request: MaskRequest, window: tuple[int | None, int | None]) -> Array:
    return within_window(request, (window[0], None) if request.is_causal else window)


def _clipped(request: MaskRequest, lengths: Array) -> Array:
    return within_lengths(request, np.clip(lengths, 0, request.scores.shape[-1]))


EQUIVALENT = (
    Equivalent(
        "right_side_of_a_window_dropped_when_causal",
        "a bound that causality makes idle is not tested",
        "Causality asks for j <= i, a window's right side for j <= i + right with right >= 0: the first implies the "
        "second, so that both together are the first. A mask knows true and false only.",
        Variant(allowed=Allowed(window=_right_side_dropped_when_causal)),
        EVERY,
    ),
    Equivalent(
        "key_lengths_clipped_to_the_keys",
        "a clamp on lengths that are too long",
        "j < length is asked for 0 <= j < T alone: every length of T or more allows all of them, every length of 0 or "
        "less none.",
        Variant(allowed=Allowed(lengths=_clipped)),
        EVERY,
    ),
    Equivalent(
        "softcap_slope_clipped_at_zero",
        "a clamp against a slope of the wrong sign",
        "|tanh| is at most 1 and rounding is monotone: fl(c t) is at most c in magnitude, divided by c at most 1, and "
        "so is its square. 1 minus that is at least 0. NaN stays NaN.",
        Variant(backward=Backward(slope=lambda saved, softcap: np.maximum(BACKWARD.slope(saved, softcap), 0))),
        EVERY,
    ),
    Equivalent(
        "backward_weights_clipped_at_one",
        "a clamp that has nothing to clamp",
        "No weight is above 1: all exponentials are at least 0, so every rounded partial sum is at least each of its "
        "terms, and a quotient of two numbers of which the divisor is not smaller does not round above 1. NaN stays "
        "NaN.",
        Variant(backward=Backward(weights=lambda saved: np.minimum(saved.weights, 1))),
        EVERY,
    ),
)
