"""Faults of what a masked key gets: a finite number, a product, a weight after all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.mutants.mask_steps import MaskRequest
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant


def _filled_with(number: Callable[[Array], float]) -> Variant:
    def fill(biased: Array, allowed: Array, request: MaskRequest) -> Array:
        return np.where(allowed, biased, np.asarray(number(biased), biased.dtype))

    return Variant(fill=fill)


def _times_infinity(biased: Array, allowed: Array, request: MaskRequest) -> Array:
    # Only where a mask and causality come together: alone, either is a plain -inf in the reference this is taken from.
    kept = np.nan if request.mask is not None and request.is_causal else 1
    return np.where(allowed, biased * kept, -np.inf).astype(biased.dtype)


def _least_finite(biased: Array) -> float:
    # ml_dtypes' bfloat16 has no np.finfo; its range is float32's but for the last digits.
    return float(np.finfo(biased.dtype).min) if biased.dtype.kind == "f" else -3.38953139e38


MUTANTS = (
    Mutant(
        "mask_filled_with_minus_1e4",
        "masks",
        "leaks where a masked logit is 1e4 above a kept one: transformers#12109",
        _filled_with(lambda biased: -1e4),
        "masked",
        diagnosis=("empty-rows-uniform",),
    ),
    Mutant(
        "mask_filled_with_minus_1e9",
        "masks",
        "an empty row becomes uniform: tensorflow#55682's mask",
        _filled_with(lambda biased: -1e9),
        "masked",
        WIDE,
        diagnosis=("empty-rows-uniform",),
    ),
    Mutant(
        "mask_filled_with_least_finite",
        "masks",
        "an empty row becomes uniform: pytorch#109517, transformers#31303",
        _filled_with(_least_finite),
        "masked",
        diagnosis=("empty-rows-uniform",),
    ),
    Mutant(
        "mask_filled_with_minus_1e_minus_9",
        "masks",
        "a typo for -1e9: RibonanzaNet#5",
        _filled_with(lambda biased: -1e-9),
        "masked",
    ),
    Mutant(
        "mask_multiplied_to_scores",
        "masks",
        "scores * mask leaves masked keys at 0",
        _filled_with(lambda biased: 0.0),
        "masked",
    ),
    Mutant(
        "mask_added_as_zero_and_one",
        "masks",
        "a boolean mask converted to numbers and added: torch's float masks",
        Variant(fill=lambda biased, allowed, request: biased + allowed.astype(biased.dtype)),
        "masked",
        diagnosis=("mask-added",),
    ),
    Mutant(
        "mask_times_minus_infinity",
        "masks",
        "(1 - mask) * -inf = NaN at kept slots: onnx 1.19.1's reference",
        Variant(fill=_times_infinity),
        "masked",
    ),
    Mutant(
        "mask_after_softmax",
        "masks",
        "weights * mask, not renormalised: vigg_ribonanza#1",
        Variant(
            fill=lambda biased, allowed, request: biased,
            after_softmax=lambda weights, allowed: np.where(allowed, weights, 0),
        ),
        "masked",
        diagnosis=("weights-not-renormalised",),
    ),
    Mutant(
        "masked_weights_leak_1e_10",
        "masks",
        "a masked weight is tiny, not zero",
        Variant(after_softmax=lambda weights, allowed: np.where(allowed, weights, np.asarray(1e-10, weights.dtype))),
        "weights",
        WIDE,
    ),
)
