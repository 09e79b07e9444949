"""The cosine of query and key, times a scale if one is given: a q.k / (|q| |k|) (Graves et al. 2014, section 3.3.1).

    A_c = |a| |q||k|^T / (|q|_2 |k|_2)
    D = [ A_c (d u_acc + 2(u_c + u_s)) + |s| ((d + 2) u_acc + 3u_c + n_s u_s) ] (1 + 8u* + 2d u_acc) + eta

D covers: normalise first; divide last; multiply by reciprocals. Around x, x / |x| moves by at most 2 |r| / |x| in the
norms of vectors; a product of two unit vectors moves by at most the sum of what they move by, and by at most 2.
"""

from __future__ import annotations

import numpy as np

from attncheck.attention.errors import Ball, Logits, Operand, Real, product_variance, split_logits, transposed
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import reach_of_scores
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.scores import is_power_of_two, scale_of
from attncheck.attention.step import Around, At, Step, stored_logits


def _exact(problem: Problem, query: ExactArray, key: ExactArray) -> ExactArray:
    query_direction, key_direction = (rows / (rows * rows).sum(-1).sqrt() for rows in (query, key))
    cosines = query_direction @ key_direction.transposed()
    scale = problem.options.get("scale")
    return cosines if scale is None else cosines * problem.number(scale)


def _value(problem: Problem, query: Real, key: Real) -> Real:
    return (_unit_rows(query) @ transposed(_unit_rows(key))) * scale_of(problem)


def _radius(around: Around, _: Real, query: Ball, key: Ball) -> Real:
    moved = _moved_direction(query)[..., :, np.newaxis] + _moved_direction(key)[..., np.newaxis, :]
    return np.minimum(moved, 2) * abs(scale_of(around.problem))


def _moved_direction(vectors: Ball) -> Real:
    moved: Real = 2 * np.linalg.norm(vectors.radius, axis=-1) / np.linalg.norm(vectors.value, axis=-1)
    return moved


def _error(at: At, query: Operand, key: Operand) -> Logits:
    return _cosine_error(query, key, scale_of(at.problem), at.value, at.rounding)


COSINE_SCORES = Step(_exact, _value, _error, _radius, stored_logits, reach_of_scores())


def _cosine_error(query: Operand, key: Operand, scale: float, exact: Real, rounding: RoundingModel) -> Logits:
    """Bound a q.k / (|q| |k|), for |q|^2 and |k|^2 that are normal numbers of the accumulation format.

    A square root halves the relative error of a sum of squares; two lengths have together that of one.
    """
    width, size, u_acc, u_c = query.value.shape[-1], abs(scale), rounding.accumulate_unit, rounding.compute_unit
    unit_q, unit_k = _unit_rows(query.value), _unit_rows(key.value)
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
        product_variance(rounding, width, square, squares)
        + 2 * (u_c**2 + rounding.score_unit**2) * squares
        + of_lengths
        + square * rounding.product_common
    )
    # One query, divided by its length, meets all keys of its row; the scale is one number.
    of_query = (u_c**2 + rounding.score_unit**2) * squares + of_lengths
    return split_logits(exact, max_error, variance, of_query, floor, rounding)


def _unit_rows(matrix: Real) -> Real:
    # Scaled first: the squares of a row may under- or overflow where its length does not.
    largest = np.abs(matrix).max(axis=-1, keepdims=True, initial=0)
    scaled = matrix / np.where(largest > 0, largest, 1)
    length = np.sqrt((scaled * scaled).sum(axis=-1, keepdims=True))
    unit: Real = scaled / length  # NaN: a vector of length 0 has no direction
    return unit
