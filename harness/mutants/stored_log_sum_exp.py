"""Weights that are made as e^(s - L) from a log_sum_exp that was stored before: right ones, and what may go wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants import rounding
from attncheck.mutants.mutant import EVERY, WIDE, Control, Mutant
from attncheck.mutants.recomputation import weights_again
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import SOFTMAX, largest
from attncheck.mutants.variant import Variant

CLASSES = {"float64": "native_lse", "float32": "native_lse", "float16": "eager_lse"}


def _stored(store: Store = rounding.exactly) -> Callable[[Array, Array], Stages]:
    """Take log_sum_exp first and store it."""

    def normalise(logits: Array, unmasked: Array) -> Stages:
        log_sum_exp = store(SOFTMAX(logits, unmasked)["log_sum_exp"])
        return {"weights": weights_again(logits, log_sum_exp[..., np.newaxis]), "log_sum_exp": log_sum_exp}

    return normalise


def _of_tiles(keys: int) -> Variant:
    """Take log_sum_exp in one pass over tiles of keys, merging two at a time, and the output in a second pass."""

    def normalise(logits: Array, unmasked: Array) -> Stages:
        log_sum_exp = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
        for start in range(0, logits.shape[-1], keys):
            tile = SOFTMAX(logits[..., start : start + keys], unmasked[..., start : start + keys])
            log_sum_exp = np.logaddexp(log_sum_exp, tile["log_sum_exp"][..., np.newaxis])
        return {"weights": weights_again(logits, log_sum_exp), "log_sum_exp": log_sum_exp[..., 0]}

    def average(logits: Array, weights: Array, value: Array) -> Array:
        output = np.zeros((*logits.shape[:-1], value.shape[-1]), logits.dtype)
        for start in range(0, logits.shape[-1], keys):
            output = output + weights[..., start : start + keys] @ value[..., start : start + keys, :]
        return output

    return Variant(normalise=normalise, average=average)


def _log_softmax(logits: Array, unmasked: Array) -> Stages:
    """Take the logarithms of the weights first."""
    maximum = largest(logits)
    empty = np.isneginf(maximum)
    shifted = logits - np.where(np.isinf(maximum), 0, maximum)
    total = np.where(empty, 1, np.exp(shifted).sum(axis=-1, keepdims=True))
    log_sum_exp = np.where(np.isinf(maximum), maximum, maximum + np.log(total))
    return {"weights": np.exp(shifted - np.log(total)), "log_sum_exp": log_sum_exp[..., 0]}


CONTROLS = (
    Control(
        "weights_from_log_sum_exp",
        "L is stored, then p = exp(s - L): nothing is divided",
        Variant(normalise=_stored()),
        EVERY,
        CLASSES,
    ),
    Control(
        "weights_from_log_sum_exp_in_tiles_of_16",
        "L in one pass over the keys, merged tile by tile, p = exp(s - L) in a second pass",
        _of_tiles(16),
        WIDE,  # the output is added up in the arrays' own format
        CLASSES,
    ),
    Control(
        "log_softmax_first",
        "p = exp(log p): log-softmax, then an exponential",
        Variant(normalise=_log_softmax),
        EVERY,
        CLASSES,
    ),
)

MUTANTS = (
    Mutant(
        "log_sum_exp_stored_in_bfloat16",
        "denominator",
        "L is rounded to 16 bits on its way to p = exp(s - L)",
        Variant(normalise=_stored(rounding.bfloat16)),
        "weights",
        WIDE,
        ("accuracy-of-16-bits",),
        CLASSES,
    ),
    Mutant(
        "log_sum_exp_stored_in_float16",
        "denominator",
        "L is kept in float16 between two passes",
        Variant(normalise=_stored(rounding.float16)),
        "weights",
        WIDE,
        ("accuracy-of-16-bits",),
        CLASSES,
    ),
)
