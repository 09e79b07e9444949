"""The stages between the product of query and key and the softmax: which follows which, and with what error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention import bounds_linear, bounds_scores
from attncheck.attention.errors import LogitError, Operand, Real
from attncheck.attention.rounding import RoundingModel

Arrays = Mapping[str, NDArray[Any]]
Options = Mapping[str, Any]

LOGITS = ("scores", "capped", "biased", "masked")
"""The stages that the softmax may follow from, in order."""


_LATE_SOFTCAP: Mapping[str, tuple[str, ...]] = {
    "biased": ("scores", "biased", "capped", "masked"),
    "masked": ("scores", "biased", "masked", "capped"),
}


def logits_of(options: Options) -> tuple[str, ...]:
    """Return the same stages in the order in which they are computed, were it another one by convention."""
    return _LATE_SOFTCAP.get(str(options.get("softcap_follows")), LOGITS)


def attention_scale(options: Options, width: int) -> float:
    """Return the factor of the scores: that given, else 1/sqrt(D), and 1 for the kinds that have none."""
    if options.get("scale") is not None:
        return float(options["scale"])
    return 1 / math.sqrt(width) if options.get("score", "scaled_dot") == "scaled_dot" else 1.0


def score_error(
    operands: Mapping[str, Operand], given: Mapping[str, Real], options: Options, rounding: RoundingModel, exact: Real
) -> LogitError:
    """Return the error of ``scores``, of any kind."""
    query = operands["query"]
    match options.get("score", "scaled_dot"):
        case "general":
            return bounds_linear.general_scores(given["query"], given["key"], given["weight"], exact, rounding)
        case "additive":
            return bounds_linear.additive_scores(given, exact, rounding)
        case "cosine":
            scale = attention_scale(options, query.value.shape[-1])
            return bounds_scores.cosine_scores(query, operands["key"], scale, exact, rounding)
    products = bounds_scores.products_of(query, operands["key"], rounding)
    return bounds_scores.scores(products, attention_scale(options, query.value.shape[-1]), exact, rounding)


def next_logit_error(
    stage: str,
    error: LogitError,
    options: Options,
    rounding: RoundingModel,
    exact: Mapping[str, Real],
    before: Real,
) -> LogitError:
    """Return the error of a stage from that of the stage before it."""
    match stage:
        case "capped":
            return bounds_scores.capped(before, error, float(options["softcap"]), rounding)
        case "biased":
            return bounds_scores.biased(before, exact["biased"], error, rounding)
    return error


def logit_errors(
    start: str,
    error: LogitError,
    given: Mapping[str, Real],
    options: Options,
    rounding: RoundingModel,
    exact: Mapping[str, Real],
) -> dict[str, LogitError]:
    """Return the errors of the stages after ``start``, itself included."""
    errors = {start: error}
    before = exact.get(start, given.get(start, np.zeros(())))
    order = logits_of(options)
    for stage in order[order.index(start) + 1 :]:
        if stage in exact:
            if stage == "capped":  # tanh(-inf) is -1 without any error
                before = np.where(before == -np.inf, 0.0, before)
            errors[stage] = error = next_logit_error(stage, error, options, rounding, exact, before)
            before = exact[stage]
    return errors if start in exact else {name: each for name, each in errors.items() if name != start}


def operands_of(given: Mapping[str, Real]) -> dict[str, Operand]:
    """Take query, key and value as exact; keys and values that query heads share are repeated."""
    operands = {name: Operand(given[name]) for name in ("query", "key", "value") if name in given}
    heads = given["query"].shape[-3] if given["query"].ndim > 2 else 1
    return {name: each if name == "query" else each.for_query_heads(heads) for name, each in operands.items()}


def next_logits(
    stage: str, before: Real, options: Options, given: Mapping[str, Real], attended: NDArray[np.bool_] | None
) -> Real:
    """Evaluate a stage from the one before it, in float64."""
    match stage:
        case "capped":
            cap = float(options["softcap"])
            return np.asarray(cap * np.tanh(before / cap))
        case "biased":
            return before + given["bias"]
    return before if attended is None else np.where(attended, before, -np.inf)


def softmax(logits: Real) -> tuple[Real, Real]:
    """Evaluate weights and log_sum_exp in float64: 0 and -inf in a row without a key."""
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(logits - np.where(np.isfinite(highest), highest, 0.0))
    total = powers.sum(axis=-1, keepdims=True)
    divisor = np.where(total > 0, total, 1)
    return powers / divisor, (highest + np.log(divisor))[..., 0]


def allowed_keys(options: Options, inputs: Arrays, lengths: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Return which keys mask and causality allow, ``lengths`` being Lq and Lk; None where nothing forbids any."""
    allowed = inputs.get("mask")
    if options.get("is_causal"):
        causal = np.tri(*lengths, dtype=np.bool_)
        allowed = causal if allowed is None else allowed & causal
    return allowed
