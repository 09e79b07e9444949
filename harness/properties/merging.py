"""Parts of the keys, merged exactly by their log-sum-exps, compared with the whole.

With outputs o_n and log-sum-exps L_n of the parts, p_n = e^(L_n) / sum_m e^(L_m), the whole is o = sum_n p_n o_n.
Errors of at most B_n in the outputs and beta in every log-sum-exp change each weight by a factor of at most
e^(2 beta), so that the merged output is off by at most

    e^(2 beta) sum_n p_n B_n + (e^(2 beta) - 1) sum_n p_n |o_n - o|

because the weights sum to 1 before and after. The merging itself is the oracle's, and rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.judging.truth import find_truth
from attncheck.oracle.enclosure import Enclosure
from attncheck.properties.judging import Finding, Results, Side, Truths, judge_arrays, side_of
from attncheck.properties.problem import Problem
from attncheck.properties.rows import PropertyOutcome
from attncheck.properties.variants import Variant

Array = NDArray[Any]
Real = NDArray[np.float64]
_STATISTIC = "log_sum_exp"


def judge_merged(
    variant: Variant,
    problem: Problem,
    first: Results,
    others: Sequence[Results],
    rounding_model: str,
    truths: Truths,
) -> Finding:
    """Judge parts of the keys, each with its output and its log_sum_exp, against the output of all keys."""
    if any(_STATISTIC not in each for each in others):
        return Finding(PropertyOutcome.UNSUPPORTED, f"returns no {_STATISTIC} to merge by")
    if any(np.isnan(each[_STATISTIC].astype(np.float64)).any() for each in others):
        return Finding(PropertyOutcome.BROKEN, f"a {_STATISTIC} of a part is NaN", _STATISTIC)
    outputs = np.stack([each["output"].astype(np.float64) for each in others])
    statistics = np.stack([each[_STATISTIC].astype(np.float64) for each in others])
    merged = _merged(outputs, statistics)
    rounded = merged.high.astype(first["output"].dtype)

    def sides() -> tuple[Side, Side]:
        one = side_of("the first call", truths.of(problem), "output", first["output"], rounding_model)
        bound = _bound(variant, others, one.exact, rounding_model, truths) + merged.radius
        allowed = bound + np.spacing(np.abs(one.exact))
        with np.errstate(invalid="ignore"):
            error = np.abs(merged.high - one.exact)
        wrong = ~one.is_open & (np.isnan(error) | (error > allowed + one.allowed * 2.0**-50))
        return one, Side(variant.what, merged.high, one.exact, allowed, wrong, one.is_open)

    return judge_arrays("output", first["output"], rounded, variant.what, sides)


def _merged(outputs: Real, statistics: Real) -> Enclosure:
    """Merge parts as the oracle does, from what came back; one without a key counts for nothing."""
    inputs = {"outputs": outputs, "log_sum_exps": statistics}
    truth = find_truth("merge_states", {}, inputs, "float64", supports_statistics=False, whole=True)
    return truth.exact["output"]


def _bound(variant: Variant, others: Sequence[Results], whole: Real, rounding_model: str, truths: Truths) -> Real:
    """Return how far the merged output may be off, by the bounds of the parts."""
    exact, allowed, logs, widths = [], [], [], []
    for call, result in zip(variant.calls, others, strict=True):
        truth = truths.of(call.exact_problem)
        output = side_of(call.what, truth, "output", result["output"], rounding_model)
        statistic = side_of(call.what, truth, _STATISTIC, result[_STATISTIC], rounding_model)
        empty = statistic.exact == -np.inf
        exact.append(np.where(empty[..., np.newaxis], 0.0, output.exact))
        allowed.append(np.where(empty[..., np.newaxis], 0.0, output.allowed))
        logs.append(statistic.exact)
        widths.append(np.where(empty, 0.0, statistic.allowed))
    weights = _weights(np.stack(logs))[..., np.newaxis]
    beta = np.max(np.stack(widths), axis=0)[..., np.newaxis]
    spread = (weights * np.abs(np.stack(exact) - whole)).sum(axis=0)
    bound: Real = np.exp(2 * beta) * (weights * np.stack(allowed)).sum(axis=0) + np.expm1(2 * beta) * spread
    return bound


def _weights(logs: Real) -> Real:
    """Return the softmax over parts, of which one at least has a key."""
    largest = logs.max(axis=0, keepdims=True)
    powers = np.exp(logs - np.where(np.isfinite(largest), largest, 0.0))
    total: Real = powers / np.maximum(powers.sum(axis=0, keepdims=True), np.finfo(np.float64).tiny)
    return total
