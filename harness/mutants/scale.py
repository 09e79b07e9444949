"""Faults of the factor on the raw scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mask_steps import MaskRequest
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import DotScore, scale_of
from attncheck.mutants.variant import Variant


def _changed(change: Callable[[float], float]) -> Variant:
    """Change the factor, default or explicit."""
    return Variant(scale_of=lambda query, explicit: change(scale_of(query, explicit)))


def _default(default: Callable[[Array], float]) -> Variant:
    """Change the default alone."""
    return Variant(scale_of=lambda query, explicit: default(query) if explicit is None else explicit)


def _rounded(store: rounding.Store) -> Variant:
    return _changed(lambda scale: float(store(np.array(scale))))


def _scaled_after_mask(biased: Array, allowed: Array, request: MaskRequest) -> Array:
    # -inf times a negative scale is inf, times zero NaN.
    forbidden = np.asarray(-np.inf * np.float64(request.scale), biased.dtype)
    return np.where(allowed, biased, forbidden)


MUTANTS = (
    Mutant(
        "scale_of_width_plus_one",
        "scale",
        "1/sqrt(d + 1) for 1/sqrt(d)",
        _default(lambda query: 1 / math.sqrt(query.shape[-1] + 1)),
        "scores",
        diagnosis=("scale-fitted",),
    ),
    Mutant(
        "scale_off_by_1e_6",
        "scale",
        "a constant printed with six digits",
        _changed(lambda scale: scale * (1 + 1e-6)),
        "scores",
        WIDE,
        diagnosis=("scale-fitted",),
    ),
    Mutant(
        "scale_off_by_1e_5",
        "scale",
        "a constant printed with five digits",
        _changed(lambda scale: scale * (1 + 1e-5)),
        "scores",
        WIDE,
        diagnosis=("scale-fitted",),
    ),
    Mutant(
        "scale_missing",
        "scale",
        "sqrt(d) missing: mlc-llm#3426, cntkx#10, MONAI GenerativeModels#146",
        _default(lambda query: 1.0),
        "scores",
        diagnosis=("scale-one",),
    ),
    Mutant(
        "scale_applied_twice",
        "scale",
        "scaled query and scaled scores: pytorch#174049 as reported",
        _changed(lambda scale: scale * scale),
        "scores",
        diagnosis=("scale-twice",),
    ),
    Mutant(
        "scale_without_root",
        "scale",
        "1/d for 1/sqrt(d)",
        _default(lambda query: 1 / query.shape[-1]),
        "scores",
        diagnosis=("scale-inverse-width",),
    ),
    Mutant(
        "scale_of_model_width",
        "scale",
        "1/sqrt(H d), the model's width for the head's",
        _default(lambda query: 1 / math.sqrt(query.shape[1] * query.shape[-1])),
        "scores",
        diagnosis=("scale-inverse-root-of-HD",),
    ),
    Mutant(
        "scale_in_bfloat16",
        "scale",
        "the factor is computed in the storage type: MONAI GenerativeModels#146",
        _rounded(rounding.bfloat16),
        "scores",
        WIDE,
        diagnosis=("scale-fitted",),
    ),
    Mutant(
        "scale_in_float32",
        "scale",
        "tf.cast(1/sqrt(d), float64) passes a Python float through float32",
        _rounded(rounding.float32),
        "scores",
        ("float64",),
        diagnosis=("scale-fitted", "accuracy-of-float32"),
    ),
    Mutant(
        "explicit_scale_ignored",
        "scale",
        "the argument has no effect: tt-metal#33304, pytorch#151098",
        Variant(scale_of=lambda query, explicit: scale_of(query, None)),
        "scores",
        diagnosis=("scale-default",),
    ),
    Mutant(
        "explicit_scale_times_default",
        "scale",
        "the argument multiplies 1/sqrt(d) instead of replacing it",
        Variant(scale_of=lambda query, explicit: scale_of(query, None) * (1.0 if explicit is None else explicit)),
        "scores",
        diagnosis=("scale-times-default",),
    ),
    Mutant(
        "scale_zero_taken_for_absent",
        "scale",
        "`scale or default`: zero is falsy in Python",
        Variant(scale_of=lambda query, explicit: scale_of(query, explicit or None)),
        "scores",
        diagnosis=("scale-default",),
    ),
    Mutant(
        "negative_scale_loses_its_sign",
        "scale",
        "sqrt(|scale|) on query and key, the sign forgotten",
        _changed(abs),
        "scores",
        diagnosis=("scale-negated",),
    ),
    Mutant(
        "scale_applied_after_mask",
        "scale",
        "-inf is scaled too: NaN at scale 0, inf at a negative one (onnx#7865's kind)",
        Variant(fill=_scaled_after_mask),
        "masked",
    ),
    Mutant(
        "scores_scaled_in_float16",
        "scale",
        "the scale comes after a float16 product: metal-flash-attention#8",
        Variant(score=DotScore(dot=lambda query, key: rounding.float16(query @ np.swapaxes(key, -1, -2)))),
        "raw_scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
)
