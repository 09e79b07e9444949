"""The weights as a backward pass uses them: stored ones, or e^(s - L) from a stored log_sum_exp.

P bounds the error of such a weight, in the notation of ``softmax``:

    stored weights       G + c_p (p + G) + 2 eta_p,      c_p = (n + r) u_sum + 3u_c + u_p + n eta_p
    e^(s - L), L stored  p (e^(E + F) - 1) + (u_p + u_c) p e^(E + F) + 2 eta_p,  F = B_L + (c_x + c_m) u_c lambda

float64 has errors of its own here. They are of second order in a bound, being relative errors of its terms, except
where float64 itself can hardly tell the weights: so p is taken as large as it can be, p e^E / Z with the E and Z of
float64 itself.

t^2 and c^2 are the variances of a key's exponent, its own and what the keys of a row share, with what is beyond the
first order: c^2 + f(t^2 + c^2). Of a row, V_nu = u_sum^2 (n + rho) + 2u_c^2, with a stored L and its own logarithm's;
of a weight's own roundings V_eps = u_p^2 + 2u_c^2. Rounded keys are those of every query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.errors import NOTHING, Logits, Operand, Real, added, every_head, sum_of_row, transposed
from attncheck.attention.exponents import Rows, second_order
from attncheck.attention.flags import handed_on
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel, rounding_model_named
from attncheck.attention.scores import scale_of
from attncheck.attention.softmax import (
    Weights,
    moved_weights,
    normalisation_error,
    stored_log_sum_exp_error,
    stored_log_sum_exp_variance,
)
from attncheck.attention.step import At, Step

_DOUBLE = rounding_model_named("native", "float64")


@dataclass(frozen=True, eq=False)
class BackwardWeights:
    """Weights that a backward pass uses: (..., Lq, Lk) per key, (..., Lq, 1) per row; ``attended`` is 1 or 0."""

    value: Real  # p
    rows: Rows
    attended: Real
    largest: Real  # p, at most
    moved: Real  # G
    stored: Real  # P of stored weights
    max_error: Real  # P
    shared: Real  # c^2, and what is beyond the first order
    of_sum: Real  # V_nu
    of_weight: float  # V_eps
    of_columns: Real  # of what rounded keys do to exponents, for all queries at once
    shares_errors: bool  # whether queries share errors of keys

    def variance(self, rounding: RoundingModel) -> Real:
        """Return the variance of each weight as it meets grad_output; constants in common to all are left out."""
        p, own = self.rows.weights, self.rows.independent
        own = own * (1.0 if rounding.recomputes else 1 - 2 * p) + sum_of_row(p * p * own)
        shared = 2 * (self.shared + sum_of_row(p * self.shared))
        relative = np.maximum(own, 0) + shared + self.of_sum + self.of_weight
        variance: Real = p * p * relative + self.attended * (2 * rounding.weight_underflow) ** 2
        return variance

    def deviation(self) -> Real:
        """Return the deviation of each weight by errors that queries share."""
        p = self.rows.weights
        deviation: Real = p * np.sqrt(self.of_columns + sum_of_row(p * p * self.of_columns))
        return deviation


def _error(at: At, weights: Weights, query: Operand, key: Operand, scores: Logits) -> BackwardWeights:
    rows, rounding = weights.rows, at.rounding
    attended = rows.attended.astype(np.float64)
    largest = _at_most(rows if rounding == _DOUBLE else at.walk_in(_DOUBLE).node("weights").rows)
    # How much larger the weights can be than float64 has them.
    more = np.divide(largest, rows.weights, out=np.ones_like(rows.weights), where=rows.weights > 0)
    moved = attended * more * moved_weights(rows)
    stored = moved + attended * (_stored(rows, largest, moved, rounding) + 2 * rounding.weight_underflow)
    max_error = stored
    if rounding.recomputes:
        max_error = np.maximum(stored, attended * (more * _recomputed(rows, rounding) + 2 * rounding.weight_underflow))
    unit = rounding.compute_unit
    of_sum = rounding.sum_unit**2 * (rows.count + rows.rescalings) + 2 * unit**2
    if rounding.recomputes or rounding.from_log_sum_exp:
        of_sum = of_sum + stored_log_sum_exp_variance(rows, rounding)
    of_columns = NOTHING
    if rounding.product_unit:
        of_columns = _of_keys(at.problem, query, key.value**2) * rounding.product_spread**2
        of_columns = of_columns + rounding.product_common * scores.value**2
    if key.variance is not None:
        of_columns = added(of_columns, _of_keys(at.problem, query, key.variance))
    return BackwardWeights(
        value=weights.value,
        rows=rows,
        attended=attended,
        largest=largest,
        moved=moved,
        stored=stored,
        max_error=max_error,
        shared=added(second_order(rows), rows.shared),
        of_sum=of_sum,
        of_weight=rounding.weight_unit**2 + 2 * unit**2,
        of_columns=of_columns,
        shares_errors=bool(rounding.product_unit) or key.variance is not None,
    )


def _of_keys(problem: Problem, query: Operand, square: Real) -> Real:
    """Return the variance of exponents, (B, H, Lq, T), from that of the keys' elements, (B, Hkv, T, D)."""
    variance: Real = scale_of(problem) ** 2 * (query.value**2 @ transposed(every_head(square, query.value.shape[1])))
    return variance


BACKWARD_WEIGHTS = Step(
    exact=lambda _, weights, *__: weights, value=lambda _, weights, *__: weights, error=_error, reach=handed_on
)


def _at_most(own: Rows) -> Real:
    p = own.weights
    most = (p + own.grown) / own.least_sum
    certain: Real = np.where(p > 0, np.where(np.isnan(most), np.inf, most), 0.0)
    return certain


def _stored(rows: Rows, largest: Real, moved: Real, rounding: RoundingModel) -> Real:
    relative = normalisation_error(rows, rounding) + rounding.weight_unit
    stored: Real = relative * (1 + 2 * relative) * (largest + moved)
    return stored


def _recomputed(rows: Rows, rounding: RoundingModel) -> Real:
    """Return how far e^(s - L) is from p, L being stored in the format of the computation."""
    shift = stored_log_sum_exp_error(rows, rounding)[..., np.newaxis]
    # p e^(E + F) - p, written so that nothing cancels: in float64, E + F is but some dozens of units.
    moved = rows.grown * np.exp(shift) + rows.weights * np.expm1(shift)
    error: Real = moved + (rounding.weight_unit + rounding.compute_unit) * (rows.weights + moved)
    return error
