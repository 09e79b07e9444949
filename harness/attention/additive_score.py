"""The additive score, w . tanh(q Wq + k Wk + b), a small network (Bahdanau et al. 2015, appendix A.1.2).

    with A terms, X = q Wq (n1), Y = k Wk (n2):
    dX = (n1 + n2) u_acc |q||Wq| + u_s |X|, dY likewise (one product of [q; k] is allowed)
    dz = [ dX + dY + 3u (|X| + |Y| + |b|) ] (1 + 8u* + (n1 + n2) u_acc) + eta,   u = max(u_s, u_c)
    dh = min(1, sech(z)^2 + 0.77 dz) dz + (eps_tanh + u_s)(|h| + ..)
    D  = [ |w| dh + A u_acc |w|(|h| + dh) + 2u_s |s| ] (1 + 8u* + A u_acc) + eta

Variances by the same rules: each rounding's square, and each underflow's, through squared coefficients. Errors of X (or
Y) are shared by the keys (or queries) that meet them. Each score has its own A of them, so that a score's variance is
not affected; to the softmax those of X are errors that the keys of a row have in common.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attncheck.attention.errors import Ball, Logits, Operand, Real, product_variance, split_logits
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import reach_of_scores
from attncheck.attention.problem import Problem
from attncheck.attention.projection import flushed_factors
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.softcap import slope_of_tanh
from attncheck.attention.step import Around, At, Step, stored_logits


def _exact(problem: Problem, query: ExactArray, key: ExactArray) -> ExactArray:
    query_part = query @ problem.exact(problem.array("query_weight"))
    key_part = key @ problem.exact(problem.array("key_weight"))
    if "score_bias" in problem.inputs:
        query_part = query_part + problem.exact(problem.array("score_bias"), query_part.shape)
    each_query = query_part.rearranged(lambda part: part[..., :, np.newaxis, :])
    hidden = each_query + key_part.rearranged(lambda part: part[..., np.newaxis, :, :])  # (B, H, Lq, Lk, A)
    scores = hidden.tanh() @ problem.exact(problem.array("score_vector")[:, np.newaxis])  # (B, H, Lq, Lk, 1)
    return scores.reshaped(scores.shape[:-1])


def _hidden_value(problem: Problem, query: Real, key: Real) -> Real:
    hidden = _outer(query @ problem.array("query_weight"), key @ problem.array("key_weight"))
    return hidden + problem.inputs["score_bias"] if "score_bias" in problem.inputs else hidden


def _value(problem: Problem, query: Real, key: Real) -> Real:
    scores: Real = np.tanh(_hidden_value(problem, query, key)) @ problem.array("score_vector")
    return scores


def _radius(around: Around, _: Real, query: Ball, key: Ball) -> Real:
    of_query, of_key, vector = (around.ball(name) for name in ("query_weight", "key_weight", "score_vector"))
    radius = _outer(
        query.radius_of_product(of_query.value, of_query.radius), key.radius_of_product(of_key.value, of_key.radius)
    )
    if "score_bias" in around.problem.inputs:
        radius = radius + around.radii["score_bias"]
    height = np.tanh(_hidden_value(around.problem, query.value, key.value))
    return Ball(height, np.minimum(radius, 2)).radius_of_product(vector.value, vector.radius)


def _outer(of_query: Real | None, of_key: Real | None) -> Real:
    assert of_query is not None
    assert of_key is not None
    return of_query[..., :, np.newaxis, :] + of_key[..., np.newaxis, :, :]


def _error(at: At, query: Operand, key: Operand) -> Logits:
    return _additive_error({**at.problem.inputs, "query": query.value, "key": key.value}, at.value, at.rounding)


_OF_ALL = ("query_weight", "key_weight", "score_vector", "score_bias")
ADDITIVE_SCORES = Step(_exact, _value, _error, _radius, stored_logits, reach_of_scores(*_OF_ALL))


def _additive_error(inputs: Mapping[str, Real], exact: Real, rounding: RoundingModel) -> Logits:
    """Bound w . tanh(q Wq + k Wk + b); inputs as in ``Backend.additive_scores``, exact (..., Lq, Lk)."""
    unit, vector = rounding.score_unit, inputs["score_vector"]
    terms, width = inputs["query_weight"].shape[0] + inputs["key_weight"].shape[0], vector.shape[-1]
    part_q = _part(inputs["query"], inputs["query_weight"], terms, rounding)
    part_k = _part(inputs["key"], inputs["key_weight"], terms, rounding)
    bias = inputs.get("score_bias", np.zeros(width))
    moved, spread, of_query, hidden = _hidden(part_q, part_k, bias, terms, rounding)
    height, size = np.abs(np.tanh(hidden)), np.abs(vector)
    relative = rounding.tanh_error + unit
    moved = moved + relative * (height + moved)
    spread = spread + (rounding.tanh_error**2 + unit**2) * height**2
    summed = width * rounding.accumulate_unit + rounding.product_error
    max_error = moved @ size + summed * ((height + moved) @ size) + 2 * unit * np.abs(exact)
    floor = 2 * (width + 2) * rounding.accumulate_underflow + rounding.score_underflow * (2 + size.sum())
    floor += rounding.product_underflow * (width + size.sum())
    variance = product_variance(rounding, width, exact * exact, height**2 @ vector**2)
    variance = variance + spread @ vector**2 + 2 * unit**2 * exact * exact
    max_error = max_error * (1 + 8 * rounding.coarsest_unit + summed) + floor
    return split_logits(exact, max_error, variance, of_query @ vector**2, np.asarray(floor), rounding)


def _part(inputs: Real, weight: Real, terms: int, rounding: RoundingModel) -> Operand:
    """Return inputs times weight with its error, (..., L, A)."""
    part, u_acc, unit = inputs @ weight, rounding.accumulate_unit, rounding.score_unit
    relative = terms * u_acc + rounding.product_error
    max_error = relative * (np.abs(inputs) @ np.abs(weight)) + unit * np.abs(part)
    if rounding.product_unit:
        max_error = max_error + flushed_factors(np.abs(inputs), np.abs(weight), rounding)
    squares = (inputs * inputs) @ (weight * weight)
    return Operand(part, max_error, product_variance(rounding, terms, part * part, squares) + (unit * part) ** 2)


def _hidden(
    part_q: Operand, part_k: Operand, bias: Real, terms: int, rounding: RoundingModel
) -> tuple[Real, Real, Real, Real]:
    """Return how far tanh z moves, its variance from there, what keys may share of it, and z: (..., Lq, Lk, A) each.

    One q Wq, plus the bias, meets all keys of its row.
    """
    unit = max(rounding.score_unit, rounding.compute_unit)
    hidden = _outer(part_q.value, part_k.value) + bias
    size = _outer(np.abs(part_q.value), np.abs(part_k.value)) + np.abs(bias)
    moved = _outer(part_q.max_error, part_k.max_error) + 3 * unit * size
    moved = moved * (1 + 8 * rounding.coarsest_unit + terms * rounding.accumulate_unit)
    moved = moved + 2 * (terms + 4) * rounding.accumulate_underflow + 4 * rounding.score_underflow
    slope = slope_of_tanh(hidden)
    assert part_q.variance is not None
    of_sums = 3 * unit**2 * size**2
    spread = _outer(part_q.variance, part_k.variance) + of_sums
    steep = np.minimum(1, slope + 0.77 * np.sqrt(spread))
    of_query = part_q.variance[..., :, np.newaxis, :] + of_sums
    return np.minimum(1, slope + 0.77 * moved) * moved, steep**2 * spread, steep**2 * of_query, hidden
