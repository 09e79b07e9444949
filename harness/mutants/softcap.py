"""Faults of the softcap: where it stands among scale, bias and mask, and its hyperbolic tangent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mask_steps import MaskRequest, add_bias, fill
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import cap
from attncheck.mutants.variant import Variant


def _capped(change: Callable[[Array, float], Array]) -> Variant:
    """Cap the scores in another way."""
    return Variant(cap=lambda stages, softcap, scale: change(stages["scores"], softcap))


def _tanh(tanh: Store) -> Variant:
    return _capped(lambda scores, softcap: softcap * tanh(scores / softcap))


def _by_ratio(argument: Array) -> Array:
    power = np.exp(2 * argument)
    ratio: Array = (power - 1) / (power + 1)
    return ratio


def _pade(argument: Array) -> Array:
    square = argument * argument
    return np.asarray(np.clip(argument * (27 + square) / (27 + 9 * square), -1, 1))


def _of_scores(scores: Array, softcap: float) -> Array:
    return cap({"scores": scores}, softcap, 1.0)


def _with_bias_under_the_cap(request: MaskRequest) -> Array:
    """Add the bias before the cap."""
    if request.softcap is None or request.uncapped is None or request.bias is None:
        return add_bias(request)
    return _of_scores(np.asarray(request.uncapped + request.bias), request.softcap)


def _minus_cap(biased: Array, allowed: Array, request: MaskRequest) -> Array:
    """Cap what is masked already: -inf becomes -cap."""
    if request.softcap is None:
        return fill(biased, allowed, request)
    return np.where(allowed, biased, np.asarray(-request.softcap, biased.dtype))


def _before_scale(scores: Array, softcap: float, scale: float) -> Array:
    raw = np.divide(scores, scale) if scale else scores
    return _of_scores(raw, softcap) * scale


def _uncapped_with_a_bias(request: MaskRequest) -> Array:
    if request.uncapped is None or request.bias is None:
        return add_bias(request)
    return np.asarray(request.uncapped + request.bias)


def _uncapped_with_a_mask(biased: Array, allowed: Array, request: MaskRequest) -> Array:
    if request.uncapped is None or request.bias is not None:
        return fill(biased, allowed, request)
    return fill(request.uncapped, allowed, request)


MUTANTS = (
    Mutant(
        "softcap_ignored",
        "softcap",
        "the argument is not passed on: vllm#7425",
        _capped(lambda scores, softcap: scores),
        "capped",
        diagnosis=("softcap-ignored",),
    ),
    Mutant(
        "softcap_after_the_mask",
        "softcap",
        "-inf becomes -cap, and masked keys get weights: onnx#7865, onnxruntime#28379",
        Variant(fill=_minus_cap),
        "masked",
        diagnosis=("softcap-after-masked",),
    ),
    Mutant(
        "softcap_after_the_bias",
        "softcap",
        "the bias is capped together with the scores: onnx#7865's kind",
        Variant(add_bias=_with_bias_under_the_cap),
        "biased",
        diagnosis=("softcap-after-biased",),
    ),
    Mutant(
        "softcap_before_the_scale",
        "softcap",
        "the cap bounds raw scores: vllm#7425's kind",
        Variant(cap=lambda stages, softcap, scale: _before_scale(stages["scores"], softcap, scale)),
        "capped",
    ),
    Mutant(
        "softcap_doubled",
        "softcap",
        "2c tanh(s / 2c): a cap handed on in another unit",
        _capped(lambda scores, softcap: _of_scores(scores, 2 * softcap)),
        "capped",
    ),
    Mutant(
        "softcap_applied_twice",
        "softcap",
        "by the caller and by the kernel",
        _capped(lambda scores, softcap: _of_scores(_of_scores(scores, softcap), softcap)),
        "capped",
    ),
    Mutant(
        "softcap_not_multiplied_back",
        "softcap",
        "tanh(s / c) without the factor c",
        _capped(lambda scores, softcap: np.tanh(scores / softcap)),
        "capped",
    ),
    Mutant(
        "softcap_not_divided_by",
        "softcap",
        "c tanh(s) for c tanh(s / c)",
        _capped(lambda scores, softcap: softcap * np.tanh(scores)),
        "capped",
    ),
    Mutant(
        "softcap_clips",
        "softcap",
        "a clamp at the cap for a hyperbolic tangent",
        _capped(lambda scores, softcap: np.clip(scores, -softcap, softcap)),
        "capped",
    ),
    Mutant(
        "softcap_by_softsign",
        "softcap",
        "c s / (c + |s|), another bounded function",
        _capped(lambda scores, softcap: scores * softcap / (softcap + np.abs(scores))),
        "capped",
    ),
    Mutant(
        "softcap_by_a_ratio_of_exponentials",
        "softcap",
        "(e^2x - 1) / (e^2x + 1) overflows: vllm#56578",
        _tanh(_by_ratio),
        "capped",
    ),
    Mutant("softcap_by_pade", "softcap", "a rational approximation of tanh", _tanh(_pade), "capped", WIDE),
    Mutant(
        "softcap_in_bfloat16",
        "softcap",
        "tanh evaluated in bfloat16",
        _tanh(lambda argument: rounding.bfloat16(np.tanh(rounding.bfloat16(argument)))),
        "capped",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "softcap_tanh_in_float16",
        "softcap",
        "tanh.approx: eleven bits",
        _tanh(lambda argument: rounding.float16(np.tanh(argument))),
        "capped",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "softcap_dropped_when_a_bias_is_given",
        "softcap",
        "a bias takes another path, which knows no cap",
        Variant(add_bias=_uncapped_with_a_bias),
        "biased",
        diagnosis=("softcap-ignored",),
    ),
    Mutant(
        "softcap_dropped_when_something_is_masked",
        "softcap",
        "a mask takes another path, which knows no cap",
        Variant(fill=_uncapped_with_a_mask),
        "masked",
        diagnosis=("softcap-ignored",),
    ),
)
