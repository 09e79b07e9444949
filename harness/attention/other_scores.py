"""Scores that are no scaled dot product: bilinear, additive, and the cosine.

The bilinear score is q W k^T (Luong et al. 2015, section 3.1), plus a number for each head if there is one; the
additive one w . tanh(q Wq + k Wk + b), a small network (Bahdanau et al. 2015, appendix A.1.2); the cosine
a q.k / (|q| |k|). ``docs/numerics.md`` derives their bounds (sections 4.1 and 4.2), and says which of their errors the
keys of a row have in common (5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from attncheck.attention.errors import (
    Ball,
    Logits,
    Operand,
    Real,
    logits_with_shared_variance,
    matmul_variance,
    transposed,
)
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import FlagContext, Flags, make_score_flag_rule
from attncheck.attention.logits import tanh_derivative
from attncheck.attention.problem import Computation, lift_per_head
from attncheck.attention.projection import flushed_factor_error
from attncheck.attention.scores import is_power_of_two, score_scale
from attncheck.attention.step import ErrorContext, RadiusContext, Step, logits_from_returned
from attncheck.spec.rounding import RoundingModel


def _exact_general_scores(problem: Computation, query: ExactArray, key: ExactArray) -> ExactArray:
    product = query @ problem.to_exact_array(problem.input_array("weight")) @ key.transposed()
    return (
        product
        if "score_bias" not in problem.inputs
        else product + problem.to_exact_array(_bias_per_head(problem), product.shape)
    )


def _bias_per_head(problem: Computation) -> Real:
    """Return the bias of each head at the rank of scores, (H, 1, 1), or 0 without one."""
    return lift_per_head(problem.inputs["score_bias"]) if "score_bias" in problem.inputs else np.zeros((1, 1, 1))


def _general_scores_radius(around: RadiusContext, _: Real, query: Ball, key: Ball) -> Real:
    weight = around.input_ball("weight")
    turned = Ball(query.value @ weight.value, query.matmul_radius(weight.value, weight.radius))
    radius = turned.matmul_radius(transposed(key.value), transposed(key.radius))
    return radius + lift_per_head(around.radii["score_bias"]) if "score_bias" in around.problem.inputs else radius


def _general_scores_with_error(at: ErrorContext, query: Operand, key: Operand) -> Logits:
    bias, weight = _bias_per_head(at.problem), at.problem.input_array("weight")
    error = _bound_bilinear_product(query.value, key.value, weight, at.value - bias, at.rounding)
    if "score_bias" not in at.problem.inputs:
        return replace(error, value=at.value)
    return _add_bias_error(error, at.value, np.abs(bias), sum(weight.shape), at.rounding)


def _add_bias_error(product: Logits, exact: Real, bias: Real, terms: int, rounding: RoundingModel) -> Logits:
    """Add a bias to a product: after it, or as the first term of its sum."""
    unit, summed = max(rounding.score_unit, rounding.compute_unit), terms * rounding.accumulate_unit
    size = np.abs(product.value) + np.abs(exact)
    max_error = product.max_error + (summed * bias + 2 * unit * size) * (1 + summed + 8 * rounding.coarsest_unit)
    # Partial sums that begin with b: (x + b)^2 <= 2 x^2 + 2 b^2.
    variance = 2 * product.independent_variance + 2 * (
        terms * rounding.accumulate_unit**2 * bias**2 + unit**2 * size**2
    )
    floor = product.underflow_error + 2 * rounding.score_underflow
    return Logits(exact, max_error + 2 * rounding.score_underflow, variance, 2 * product.shared_variance, floor)


def _propagate_general_score_flags(known: FlagContext, query: Flags, key: Flags) -> Flags:
    reached = make_score_flag_rule("weight")(known, query, key)
    return reached | lift_per_head(known.input_flags["score_bias"]) if "score_bias" in known.input_flags else reached


GENERAL_SCORES = Step(
    _exact_general_scores,
    _general_scores_with_error,
    _general_scores_radius,
    logits_from_returned,
    _propagate_general_score_flags,
)


def _bound_bilinear_product(query: Real, key: Real, weight: Real, exact: Real, rounding: RoundingModel) -> Logits:
    """Bound q W k^T: query (..., Lq, D), key (..., Lk, Dk), weight (D, Dk)."""
    u_acc, unit = rounding.accumulate_unit, rounding.score_unit
    first, second = weight.shape
    projected_query, projected_key = query @ weight, key @ transposed(weight)  # q W, k W^T
    size_q, size_k = np.abs(query), np.abs(key)
    magnitude = size_q @ np.abs(weight) @ transposed(size_k)
    halves = np.maximum(np.abs(projected_query) @ transposed(size_k), size_q @ transposed(np.abs(projected_key)))
    terms = (first + second) * u_acc + 2 * rounding.product_error
    max_error = (terms * magnitude + unit * (halves + 2 * np.abs(exact))) * (1 + terms + 8 * rounding.coarsest_unit)
    sums = size_q.sum(-1)[..., :, np.newaxis] + size_k.sum(-1)[..., np.newaxis, :]
    inner = 2 * (max(first, second) + 2) * rounding.accumulate_underflow
    floor = (inner + rounding.score_underflow) * sums + inner + 2 * rounding.score_underflow
    if rounding.product_unit:
        floor = floor + flushed_factor_error(size_q, np.abs(weight), rounding) @ transposed(size_k)
        floor = floor + flushed_factor_error(size_q @ np.abs(weight), transposed(size_k), rounding)
    variance = np.maximum(
        _bilinear_variance(query, weight, projected_query, key, exact, rounding),
        transposed(_bilinear_variance(key, transposed(weight), projected_key, query, transposed(exact), rounding)),
    )
    variance = variance + 2 * unit**2 * exact * exact
    of_query = _projected_variance(query, weight, projected_query, rounding) @ transposed(
        key * key
    )  # one q W meets all keys
    return logits_with_shared_variance(exact, max_error + floor, variance, of_query, floor, rounding)


def _projected_variance(query: Real, weight: Real, projected: Real, rounding: RoundingModel) -> Real:
    """Return the variance of ``projected``, q W, and of its storage."""
    variance = matmul_variance(rounding, weight.shape[0], projected * projected, (query * query) @ (weight * weight))
    return variance + (rounding.score_unit * projected) ** 2


def _bilinear_variance(
    query: Real, weight: Real, projected: Real, key: Real, exact: Real, rounding: RoundingModel
) -> Real:
    """Return the variance of (q W) k^T without storage of the result; ``projected`` is q W."""
    square_k = transposed(key * key)
    outer = matmul_variance(rounding, weight.shape[1], exact * exact, (projected * projected) @ square_k)
    variance: Real = _projected_variance(query, weight, projected, rounding) @ square_k + outer
    # What cuts have in common is in one product as in the other.
    return variance + 2 * rounding.common_product_variance * exact * exact if rounding.product_unit else variance


def _exact_additive_scores(problem: Computation, query: ExactArray, key: ExactArray) -> ExactArray:
    query_part = query @ problem.to_exact_array(problem.input_array("query_weight"))
    key_part = key @ problem.to_exact_array(problem.input_array("key_weight"))
    if "score_bias" in problem.inputs:
        query_part = query_part + problem.to_exact_array(problem.input_array("score_bias"), query_part.shape)
    each_query = query_part.map_parts(lambda part: part[..., :, np.newaxis, :])
    hidden = each_query + key_part.map_parts(lambda part: part[..., np.newaxis, :, :])  # (B, H, Lq, Lk, A)
    scores = hidden.tanh() @ problem.to_exact_array(
        problem.input_array("score_vector")[:, np.newaxis]
    )  # (B, H, Lq, Lk, 1)
    return scores.reshaped(scores.shape[:-1])


def _hidden_layer_value(problem: Computation, query: Real, key: Real) -> Real:
    hidden = _sum_query_and_key_parts(
        query @ problem.input_array("query_weight"), key @ problem.input_array("key_weight")
    )
    return hidden + problem.inputs["score_bias"] if "score_bias" in problem.inputs else hidden


def _additive_scores_value(problem: Computation, query: Real, key: Real) -> Real:
    scores: Real = np.tanh(_hidden_layer_value(problem, query, key)) @ problem.input_array("score_vector")
    return scores


def _additive_scores_radius(around: RadiusContext, _: Real, query: Ball, key: Ball) -> Real:
    of_query, of_key, vector = (around.input_ball(name) for name in ("query_weight", "key_weight", "score_vector"))
    radius = _sum_query_and_key_parts(
        query.matmul_radius(of_query.value, of_query.radius), key.matmul_radius(of_key.value, of_key.radius)
    )
    if "score_bias" in around.problem.inputs:
        radius = radius + around.radii["score_bias"]
    height = np.tanh(_hidden_layer_value(around.problem, query.value, key.value))
    return Ball(height, np.minimum(radius, 2)).matmul_radius(vector.value, vector.radius)


def _sum_query_and_key_parts(query_part: Real | None, key_part: Real | None) -> Real:
    assert query_part is not None
    assert key_part is not None
    return query_part[..., :, np.newaxis, :] + key_part[..., np.newaxis, :, :]


_INPUTS_SHARED_BY_SCORES = ("query_weight", "key_weight", "score_vector", "score_bias")
ADDITIVE_SCORES = Step(
    _exact_additive_scores,
    lambda at, query, key: _bound_additive_scores(
        {**at.problem.inputs, "query": query.value, "key": key.value}, at.value, at.rounding
    ),
    _additive_scores_radius,
    logits_from_returned,
    make_score_flag_rule(*_INPUTS_SHARED_BY_SCORES),
    _additive_scores_value,
)


def _bound_additive_scores(inputs: Mapping[str, Real], exact: Real, rounding: RoundingModel) -> Logits:
    """Bound w . tanh(q Wq + k Wk + b); inputs as in ``Backend.additive_scores``, exact (..., Lq, Lk)."""
    unit, vector = rounding.score_unit, inputs["score_vector"]
    terms, width = inputs["query_weight"].shape[0] + inputs["key_weight"].shape[0], vector.shape[-1]
    part_q = _project_with_error(inputs["query"], inputs["query_weight"], terms, rounding)
    part_k = _project_with_error(inputs["key"], inputs["key_weight"], terms, rounding)
    bias = inputs.get("score_bias", np.zeros(width))
    moved, spread, of_query, hidden = _hidden_layer_error(part_q, part_k, bias, terms, rounding)
    height, size = np.abs(np.tanh(hidden)), np.abs(vector)
    relative = rounding.tanh_error + unit
    moved = moved + relative * (height + moved)
    spread = spread + (rounding.tanh_error**2 + unit**2) * height**2
    summed = width * rounding.accumulate_unit + rounding.product_error
    max_error = moved @ size + summed * ((height + moved) @ size) + 2 * unit * np.abs(exact)
    floor = 2 * (width + 2) * rounding.accumulate_underflow + rounding.score_underflow * (2 + size.sum())
    floor += rounding.product_underflow * (width + size.sum())
    variance = matmul_variance(rounding, width, exact * exact, height**2 @ vector**2)
    variance = variance + spread @ vector**2 + 2 * unit**2 * exact * exact
    max_error = max_error * (1 + 8 * rounding.coarsest_unit + summed) + floor
    return logits_with_shared_variance(exact, max_error, variance, of_query @ vector**2, np.asarray(floor), rounding)


def _project_with_error(inputs: Real, weight: Real, terms: int, rounding: RoundingModel) -> Operand:
    """Return inputs times weight with its error, (..., L, A)."""
    part, u_acc, unit = inputs @ weight, rounding.accumulate_unit, rounding.score_unit
    relative = terms * u_acc + rounding.product_error
    max_error = relative * (np.abs(inputs) @ np.abs(weight)) + unit * np.abs(part)
    if rounding.product_unit:
        max_error = max_error + flushed_factor_error(np.abs(inputs), np.abs(weight), rounding)
    squares = (inputs * inputs) @ (weight * weight)
    return Operand(part, max_error, matmul_variance(rounding, terms, part * part, squares) + (unit * part) ** 2)


def _hidden_layer_error(
    part_q: Operand, part_k: Operand, bias: Real, terms: int, rounding: RoundingModel
) -> tuple[Real, Real, Real, Real]:
    """Return how far tanh z moves, its variance from there, what keys may share of it, and z: (..., Lq, Lk, A) each.

    One q Wq, plus the bias, meets all keys of its row.
    """
    unit = max(rounding.score_unit, rounding.compute_unit)
    hidden = _sum_query_and_key_parts(part_q.value, part_k.value) + bias
    size = _sum_query_and_key_parts(np.abs(part_q.value), np.abs(part_k.value)) + np.abs(bias)
    moved = _sum_query_and_key_parts(part_q.max_error, part_k.max_error) + 3 * unit * size
    moved = moved * (1 + 8 * rounding.coarsest_unit + terms * rounding.accumulate_unit)
    moved = moved + 2 * (terms + 4) * rounding.accumulate_underflow + 4 * rounding.score_underflow
    slope = tanh_derivative(hidden)
    assert part_q.variance is not None
    of_sums = 3 * unit**2 * size**2
    spread = _sum_query_and_key_parts(part_q.variance, part_k.variance) + of_sums
    steep = np.minimum(1, slope + 0.77 * np.sqrt(spread))
    of_query = part_q.variance[..., :, np.newaxis, :] + of_sums
    return np.minimum(1, slope + 0.77 * moved) * moved, steep**2 * spread, steep**2 * of_query, hidden


def _exact_cosine_scores(problem: Computation, query: ExactArray, key: ExactArray) -> ExactArray:
    query_direction, key_direction = (rows / (rows * rows).sum(-1).sqrt() for rows in (query, key))
    cosines = query_direction @ key_direction.transposed()
    scale = problem.options.get("scale")
    return cosines if scale is None else cosines * problem.magnitude_if_absolute(scale)


def _cosine_scores_value(problem: Computation, query: Real, key: Real) -> Real:
    scores: Real = (_normalise_rows(query) @ transposed(_normalise_rows(key))) * score_scale(problem)
    return scores


def _cosine_scores_radius(around: RadiusContext, _: Real, query: Ball, key: Ball) -> Real:
    moved = _direction_radius(query)[..., :, np.newaxis] + _direction_radius(key)[..., np.newaxis, :]
    radius: Real = np.minimum(moved, 2) * abs(score_scale(around.problem))
    return radius


def _direction_radius(vectors: Ball) -> Real:
    moved: Real = 2 * np.linalg.norm(vectors.radius, axis=-1) / np.linalg.norm(vectors.value, axis=-1)
    return moved


COSINE_SCORES = Step(
    _exact_cosine_scores,
    lambda at, query, key: _bound_cosine_scores(query, key, score_scale(at.problem), at.value, at.rounding),
    _cosine_scores_radius,
    logits_from_returned,
    make_score_flag_rule(),
    _cosine_scores_value,
)


def _bound_cosine_scores(query: Operand, key: Operand, scale: float, exact: Real, rounding: RoundingModel) -> Logits:
    """Bound a q.k / (|q| |k|), for |q|^2 and |k|^2 that are normal numbers of the accumulation format.

    A square root halves the relative error of a sum of squares; two lengths have together that of one.
    """
    width, size, u_acc, u_c = query.value.shape[-1], abs(scale), rounding.accumulate_unit, rounding.compute_unit
    unit_q, unit_k = _normalise_rows(query.value), _normalise_rows(key.value)
    storing = rounding.score_unit * (1 if is_power_of_two(scale) else 3)
    reduced = rounding.product_error  # of the product, and of the two lengths, whose squares may be products too
    stored = 2 * (u_c + rounding.score_unit)
    elements = size * np.abs(unit_q) @ transposed(np.abs(unit_k)) * (width * u_acc + stored + reduced)
    lengths = np.abs(exact) * ((width + 2) * u_acc + 3 * u_c + storing + reduced)
    floor = np.asarray((1 + size) * 2 * (width + 4) * (rounding.accumulate_underflow + rounding.score_underflow))
    floor = floor + (1 + size) * 2 * width * rounding.product_underflow
    max_error = (elements + lengths) * (1 + 8 * rounding.coarsest_unit + 2 * width * u_acc) + floor
    square, squares = exact * exact, size**2 * (unit_q * unit_q) @ transposed(unit_k * unit_k)
    of_lengths = square * ((width / 2 + 1) * u_acc**2 + 3 * u_c**2 + rounding.score_unit * storing)
    variance = (
        matmul_variance(rounding, width, square, squares)
        + 2 * (u_c**2 + rounding.score_unit**2) * squares
        + of_lengths
        + square * rounding.common_product_variance
    )
    # One query, divided by its length, meets all keys of its row; the scale is one number.
    of_query = (u_c**2 + rounding.score_unit**2) * squares + of_lengths
    return logits_with_shared_variance(exact, max_error, variance, of_query, floor, rounding)


def _normalise_rows(matrix: Real) -> Real:
    # Scaled first: the squares of a row may under- or overflow where its length does not.
    largest = np.abs(matrix).max(axis=-1, keepdims=True, initial=0)
    scaled = matrix / np.where(largest > 0, largest, 1)
    length = np.sqrt((scaled * scaled).sum(axis=-1, keepdims=True))
    unit: Real = scaled / length  # NaN: a vector of length 0 has no direction
    return unit
