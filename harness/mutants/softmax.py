"""Faults of the softmax: maximum, exponential, denominator, axis, logarithm."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants import rounding
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import Softmax, largest
from attncheck.mutants.variant import Variant


def _maximum(maximum: Callable[[Array, Array], Array]) -> Variant:
    return Variant(normalise=Softmax(maximum=maximum))


def _exponential(exponential: Store) -> Variant:
    return Variant(normalise=Softmax(exponential=exponential))


def _relative_error(size: float) -> Variant:
    """Let every exponential err by up to ``size``, each by another amount, so that it does not cancel."""
    return _exponential(lambda shifted: np.exp(shifted) * (1 + size * np.sin(97 * shifted + 1)))


def _log_sum_exp(log_sum_exp: Callable[[Array, Array], Array]) -> Variant:
    return Variant(normalise=Softmax(log_sum_exp=log_sum_exp))


def _over_axis(axis: int) -> Variant:
    def normalise(logits: Array, unmasked: Array) -> Stages:
        turned = np.swapaxes(logits, axis, -1)
        stages = Softmax()(logits, unmasked)
        return stages | {"weights": np.swapaxes(Softmax()(turned, turned)["weights"], axis, -1)}

    return Variant(normalise=normalise)


def _on_changed(change: Store) -> Variant:
    """Change the logits."""
    return Variant(normalise=lambda logits, unmasked: Softmax()(change(logits), unmasked))


def _quadratic_exp(shifted: Array) -> Array:
    power = shifted * math.log2(math.e)
    whole = np.floor(np.maximum(power, -1000))
    fraction = power - whole
    return np.where(power < -1000, 0, np.exp2(whole) * (1 + fraction * (0.6565 + 0.3435 * fraction)))


def _floored(shifted: Array) -> Array:
    return np.exp(np.where(np.isfinite(shifted), np.maximum(shifted, -20), shifted))


MUTANTS = (
    Mutant(
        "maximum_not_subtracted",
        "softmax",
        "exp overflows above 88 (709 in float64)",
        _maximum(lambda logits, unmasked: np.zeros_like(largest(logits))),
        "weights",
    ),
    Mutant(
        "maximum_over_masked_keys",
        "softmax",
        "the maximum includes what is masked: everything kept underflows",
        _maximum(lambda logits, unmasked: largest(unmasked)),
        "weights",
    ),
    Mutant(
        "maximum_starts_at_zero",
        "softmax",
        "the running maximum starts at 0: rows far below it underflow",
        _maximum(lambda logits, unmasked: np.maximum(largest(logits), 0)),
        "weights",
    ),
    Mutant(
        "maximum_starts_at_minus_5e4",
        "softmax",
        "a finite sentinel for -inf: flashinfer#4267",
        _maximum(lambda logits, unmasked: np.maximum(largest(logits), np.asarray(-5e4, logits.dtype))),
        "weights",
    ),
    Mutant(
        "exp_off_by_1e_6",
        "softmax",
        "a polynomial exp of six digits: pytorch#115151's kind",
        _relative_error(1e-6),
        "weights",
        WIDE,
    ),
    Mutant("exp_off_by_1e_5", "softmax", "a polynomial exp of five digits", _relative_error(1e-5), "weights", WIDE),
    Mutant(
        "exp_off_by_1e_4",
        "softmax",
        "a polynomial exp of four digits",
        _relative_error(1e-4),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "exp_with_coarse_log2e",
        "softmax",
        "exp2(1.4427 x): five digits of log2(e)",
        _exponential(lambda shifted: np.exp2(shifted * 1.4427)),
        "weights",
        WIDE,
    ),
    Mutant(
        "exp_by_a_parabola",
        "softmax",
        "2^fraction by a quadratic",
        _exponential(_quadratic_exp),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "exp_in_float16",
        "softmax",
        "exp evaluated in float16",
        _exponential(lambda shifted: rounding.float16(np.exp(rounding.float16(shifted)))),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "exp_in_bfloat16",
        "softmax",
        "exp rounded to bfloat16",
        _exponential(lambda shifted: rounding.bfloat16(np.exp(shifted))),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "exp_floored_at_minus_20", "softmax", "a clamp keeps weights of 2e-9 alive", _exponential(_floored), "weights"
    ),
    Mutant(
        "logits_clipped_at_60",
        "softmax",
        "a clamp against overflow levels the largest logits",
        _on_changed(lambda logits: np.minimum(logits, np.asarray(60, logits.dtype))),
        "weights",
    ),
    Mutant(
        "softmax_over_queries",
        "softmax",
        "wrong axis: annotated_deep_learning#146",
        _over_axis(-2),
        "weights",
        diagnosis=("softmax-over-queries",),
    ),
    Mutant(
        "softmax_over_heads",
        "softmax",
        "wrong axis: fastNLP#254",
        _over_axis(1),
        "weights",
        diagnosis=("softmax-over-heads",),
    ),
    Mutant(
        "softmax_over_batch",
        "softmax",
        "wrong axis: PyTorch-NLP#2",
        _over_axis(0),
        "weights",
        diagnosis=("softmax-over-batch",),
    ),
    Mutant(
        "log_sum_exp_in_base_two",
        "softmax",
        "log2 for log: flashinfer#2113, sglang#35045",
        _log_sum_exp(lambda maximum, total: maximum + np.log2(total)),
        "log_sum_exp",
        diagnosis=("log-sum-exp-mixed-base",),
    ),
    Mutant(
        "log_sum_exp_without_maximum",
        "softmax",
        "log of the shifted sum alone",
        _log_sum_exp(lambda maximum, total: np.log(total)),
        "log_sum_exp",
        diagnosis=("log-sum-exp-without-maximum",),
    ),
    Mutant(
        "log_sum_exp_in_float16",
        "softmax",
        "statistics kept in 16 bits",
        _log_sum_exp(lambda maximum, total: rounding.float16(maximum + np.log(total))),
        "log_sum_exp",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
)
