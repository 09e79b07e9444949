"""What the bounds of gradients start from: attention forwards and backwards once, in float64, and how it is perturbed.

Per query head, with keys and values repeated for the heads that share them. a scale, p weights, g grad_output:

    dp = g v^T,  Delta = sum_j p dp,  y = dp - Delta,  dlogits = p y,  ds = p y kappa,  kappa = sech(s / c)^2 or 1

float64 has errors of its own here. They are of second order in a bound, being relative errors of its terms, except
where float64 itself can hardly tell the weights: so p is taken as large as it can be, p e^E / Z with the E and Z of
float64 itself, and so is |y|.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.bounds_logits import (
    LOGITS,
    Arrays,
    Options,
    allowed_keys,
    attention_scale,
    logit_errors,
    next_logits,
    operands_of,
    score_error,
    softmax,
)
from attncheck.attention.bounds_rows import Rows, rows_of
from attncheck.attention.bounds_scores import slope_of_tanh
from attncheck.attention.errors import LogitError, Operand, Real, as_float64, transposed
from attncheck.attention.rounding import RoundingModel, rounding_model_named

_DOUBLE = rounding_model_named("native", "float64")


@dataclass(frozen=True, eq=False)
class Backward:
    """One evaluation. (B, H, Lq, Lk) per key, (B, H, Lq, 1) per row; ``attended`` are ones and zeros."""

    rows: Rows
    attended: Real
    scale: float
    softcap: float | None
    query: Real
    key: Real
    value: Real
    grad_output: Real
    scores: Real
    score_error: LogitError
    log_sum_exp: Real  # L
    output: Real  # o
    grad_weights: Real  # dp
    delta: Real  # Delta
    centred: Real  # y
    slope: Real  # kappa
    most_weight: Real  # p, at most
    most_centred: Real  # |y|, at most

    @property
    def grad_logits(self) -> Real:
        """p y."""
        return self.rows.weights * self.centred

    @property
    def grad_scores(self) -> Real:
        """p y kappa."""
        return self.grad_logits * self.slope


def backward_of(options: Options, inputs: Arrays, rounding: RoundingModel) -> Backward:
    """Evaluate attention and its gradients; what a mask forbids stays out."""
    given = {name: as_float64(array) for name, array in inputs.items() if array.dtype != bool}
    operands = operands_of(given)
    query, key, value = (_of_every_head(operands[name], given["query"].shape[1]) for name in ("query", "key", "value"))
    stages = _logits(options, inputs, given, query, key)
    logits = stages["masked"]
    weights, log_sum_exp = softmax(logits)
    rows, own = (
        rows_of(logits, weights, log_sum_exp, _logit_error(operands, given, options, each, stages), each)
        for each in (rounding, _DOUBLE)
    )
    attended = rows.attended.astype(np.float64)
    grad_output = given["grad_output"]
    grad_weights = grad_output @ transposed(value)
    delta = (weights * grad_weights).sum(axis=-1, keepdims=True)
    centred = np.where(rows.attended, grad_weights - delta, 0.0)
    most_weight = _at_most(own)
    uncertain = ((most_weight - weights) * np.abs(grad_weights)).sum(axis=-1, keepdims=True)
    cap = None if options.get("softcap") is None else float(options["softcap"])
    return Backward(
        rows=rows,
        attended=attended,
        scale=attention_scale(options, query.shape[-1]),
        softcap=cap,
        query=query,
        key=key,
        value=value,
        grad_output=grad_output,
        scores=stages["scores"],
        score_error=score_error(operands, given, options, rounding, stages["scores"]),
        log_sum_exp=log_sum_exp,
        output=weights @ value,
        grad_weights=grad_weights,
        delta=delta,
        centred=centred,
        slope=np.ones((1, 1)) if cap is None else slope_of_tanh(stages["scores"] / cap),
        most_weight=most_weight,
        most_centred=np.abs(centred) + attended * uncertain,
    )


def _of_every_head(operand: Operand, heads: int) -> Real:
    value = operand.value
    return np.broadcast_to(value, (*value.shape[:-3], heads, *value.shape[-2:]))


def _logits(options: Options, inputs: Arrays, given: dict[str, Real], query: Real, key: Real) -> dict[str, Real]:
    stages = {"scores": attention_scale(options, query.shape[-1]) * (query @ transposed(key))}
    asked = {"capped": options.get("softcap") is not None, "biased": "bias" in given}
    attended = allowed_keys(options, inputs, (query.shape[-2], key.shape[-2]))
    before = stages["scores"]
    for stage in LOGITS[1:]:
        if asked.get(stage, True):
            before = stages[stage] = next_logits(stage, before, options, given, attended)
    return stages


def _logit_error(
    operands: dict[str, Operand],
    given: dict[str, Real],
    options: Options,
    rounding: RoundingModel,
    stages: dict[str, Real],
) -> LogitError:
    error = score_error(operands, given, options, rounding, stages["scores"])
    return logit_errors("scores", error, given, options, rounding, stages)["masked"]


def _at_most(own: Rows) -> Real:
    p = own.weights
    most = (p + own.grown) / own.least_sum
    certain: Real = np.where(p > 0, np.where(np.isnan(most), np.inf, most), 0.0)
    return certain
