"""The bilinear score, q W k^T (Luong et al. 2015, section 3.1), plus a number for each head where there is one.

q W k^T  (n1, n2)        D = { c |q||W||k|^T + u_s [ max(|qW||k|^T, |q||Wk^T|) + 2 |s| ] } (1 + c + 8u*) + eta
                         c = (n1 + n2) u_acc; either association
q W k^T + b              c (|q||W||k|^T + |b|), for the sum may begin with b; 2u (|s - b| + |s|) for 2u_s |s|,
                         u = max(u_s, u_c): the product is stored before b is added, or added to it as it is
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attncheck.attention.errors import Ball, Logits, Operand, Real, product_variance, split_logits, transposed
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import Flags, Reach, reach_of_scores
from attncheck.attention.problem import Problem, per_head
from attncheck.attention.projection import flushed_factors
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import Around, At, Step, stored_logits


def _exact(problem: Problem, query: ExactArray, key: ExactArray) -> ExactArray:
    product = query @ problem.exact(problem.array("weight")) @ key.transposed()
    return product if "score_bias" not in problem.inputs else product + problem.exact(_bias(problem), product.shape)


def _value(problem: Problem, query: Real, key: Real) -> Real:
    scores: Real = query @ problem.array("weight") @ transposed(key)
    return scores if "score_bias" not in problem.inputs else scores + _bias(problem)


def _bias(problem: Problem) -> Real:
    """Return the bias of each head at the rank of scores, (H, 1, 1), or 0 without one."""
    return per_head(problem.inputs["score_bias"]) if "score_bias" in problem.inputs else np.zeros((1, 1, 1))


def _radius(around: Around, _: Real, query: Ball, key: Ball) -> Real:
    weight = around.ball("weight")
    turned = Ball(query.value @ weight.value, query.radius_of_product(weight.value, weight.radius))
    radius = turned.radius_of_product(transposed(key.value), transposed(key.radius))
    return radius + per_head(around.radii["score_bias"]) if "score_bias" in around.problem.inputs else radius


def _error(at: At, query: Operand, key: Operand) -> Logits:
    bias, weight = _bias(at.problem), at.problem.array("weight")
    error = _general_error(query.value, key.value, weight, at.value - bias, at.rounding)
    if "score_bias" not in at.problem.inputs:
        return replace(error, value=at.value)
    return _with_bias(error, at.value, np.abs(bias), sum(weight.shape), at.rounding)


def _with_bias(product: Logits, exact: Real, bias: Real, terms: int, rounding: RoundingModel) -> Logits:
    """Add a bias to a product: behind it, or as the first term of its sum."""
    unit, summed = max(rounding.score_unit, rounding.compute_unit), terms * rounding.accumulate_unit
    size = np.abs(product.value) + np.abs(exact)
    max_error = product.max_error + (summed * bias + 2 * unit * size) * (1 + summed + 8 * rounding.coarsest_unit)
    # Partial sums that begin with b: (x + b)^2 <= 2 x^2 + 2 b^2.
    variance = 2 * product.independent + 2 * (terms * rounding.accumulate_unit**2 * bias**2 + unit**2 * size**2)
    floor = product.floor + 2 * rounding.score_underflow
    return Logits(exact, max_error + 2 * rounding.score_underflow, variance, 2 * product.shared, floor)


def _reach(known: Reach, query: Flags, key: Flags) -> Flags:
    reached = reach_of_scores("weight")(known, query, key)
    return reached | per_head(known.flags["score_bias"]) if "score_bias" in known.flags else reached


GENERAL_SCORES = Step(_exact, _value, _error, _radius, stored_logits, _reach)


def _general_error(query: Real, key: Real, weight: Real, exact: Real, rounding: RoundingModel) -> Logits:
    """Bound q W k^T: query (..., Lq, D), key (..., Lk, Dk), weight (D, Dk)."""
    u_acc, unit = rounding.accumulate_unit, rounding.score_unit
    first, second = weight.shape
    left, right = query @ weight, key @ transposed(weight)  # q W, k W^T
    size_q, size_k = np.abs(query), np.abs(key)
    magnitude = size_q @ np.abs(weight) @ transposed(size_k)
    halves = np.maximum(np.abs(left) @ transposed(size_k), size_q @ transposed(np.abs(right)))
    terms = (first + second) * u_acc + 2 * rounding.product_error
    max_error = (terms * magnitude + unit * (halves + 2 * np.abs(exact))) * (1 + terms + 8 * rounding.coarsest_unit)
    sums = size_q.sum(-1)[..., :, np.newaxis] + size_k.sum(-1)[..., np.newaxis, :]
    inner = 2 * (max(first, second) + 2) * rounding.accumulate_underflow
    floor = (inner + rounding.score_underflow) * sums + inner + 2 * rounding.score_underflow
    if rounding.product_unit:
        floor = floor + flushed_factors(size_q, np.abs(weight), rounding) @ transposed(size_k)
        floor = floor + flushed_factors(size_q @ np.abs(weight), transposed(size_k), rounding)
    variance = np.maximum(
        _bilinear_variance(query, weight, left, key, exact, rounding),
        transposed(_bilinear_variance(key, transposed(weight), right, query, transposed(exact), rounding)),
    )
    variance = variance + 2 * unit**2 * exact * exact
    of_query = _projected_variance(query, weight, left, rounding) @ transposed(key * key)  # one q W meets all keys
    return split_logits(exact, max_error + floor, variance, of_query, floor, rounding)


def _projected_variance(query: Real, weight: Real, left: Real, rounding: RoundingModel) -> Real:
    """Return the variance of q W, which is ``left``, and of its storage."""
    variance = product_variance(rounding, weight.shape[0], left * left, (query * query) @ (weight * weight))
    return variance + (rounding.score_unit * left) ** 2


def _bilinear_variance(query: Real, weight: Real, left: Real, key: Real, exact: Real, rounding: RoundingModel) -> Real:
    """Return the variance of (q W) k^T, storage of the result left out; ``left`` is q W."""
    square_k = transposed(key * key)
    outer = product_variance(rounding, weight.shape[1], exact * exact, (left * left) @ square_k)
    variance: Real = _projected_variance(query, weight, left, rounding) @ square_k + outer
    # What cuts have in common is in one product as in the other.
    return variance + 2 * rounding.product_common * exact * exact if rounding.product_unit else variance
