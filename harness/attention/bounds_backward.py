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

from attncheck.attention.errors import Logits, Real, for_query_heads, transposed
from attncheck.attention.exponents import Rows
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel, rounding_model_named
from attncheck.attention.scores import scale_of
from attncheck.attention.softcap import cap_of, slope_of_tanh
from attncheck.attention.walk import error_walk, value_walk

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
    score_error: Logits
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


def backward_of(problem: Problem, rounding: RoundingModel) -> Backward:
    """Evaluate attention and its gradients; what a mask forbids stays out."""
    heads, values = problem.inputs["query"].shape[1], value_walk(problem)
    query, key, value = (_of_every_head(problem.inputs[name], heads) for name in ("query", "key", "value"))
    weights, log_sum_exp = values.node("exponentials")
    forwards = error_walk(problem, rounding, values)
    rows, own = (walk.node("exponentials") for walk in (forwards, error_walk(problem, _DOUBLE, values)))
    attended = rows.attended.astype(np.float64)
    grad_output = problem.inputs["grad_output"]
    grad_weights = grad_output @ transposed(value)
    delta = (weights * grad_weights).sum(axis=-1, keepdims=True)
    centred = np.where(rows.attended, grad_weights - delta, 0.0)
    most_weight = _at_most(own)
    uncertain = ((most_weight - weights) * np.abs(grad_weights)).sum(axis=-1, keepdims=True)
    scores, cap = values.node("scores"), cap_of(problem)
    return Backward(
        rows=rows,
        attended=attended,
        scale=scale_of(problem),
        softcap=cap,
        query=query,
        key=key,
        value=value,
        grad_output=grad_output,
        scores=scores,
        score_error=forwards.node("scores"),
        log_sum_exp=log_sum_exp,
        output=weights @ value,
        grad_weights=grad_weights,
        delta=delta,
        centred=centred,
        slope=np.ones((1, 1)) if cap is None else slope_of_tanh(scores / cap),
        most_weight=most_weight,
        most_centred=np.abs(centred) + attended * uncertain,
    )


def _of_every_head(array: Real, heads: int) -> Real:
    shared = for_query_heads(array, heads)
    return np.broadcast_to(shared, (*shared.shape[:-3], heads, *shared.shape[-2:]))


def _at_most(own: Rows) -> Real:
    p = own.weights
    most = (p + own.grown) / own.least_sum
    certain: Real = np.where(p > 0, np.where(np.isnan(most), np.inf, most), 0.0)
    return certain
