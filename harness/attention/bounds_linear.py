"""Error bounds of linear layers, and of the scores that are small networks: the bilinear and the additive one.

    y = x W + b  (n terms)   D = (n + 1) u_acc ( |x||W| + |b| ) + E_x |W| + storage + 2(n + 2) eta_acc + k eta_o
                             |x| with its error E_x; storage, where u_o is coarser than u_acc: of x W and of the sum
    q W k^T  (n1, n2)        D = { c |q||W||k|^T + u_s [ max(|qW||k|^T, |q||Wk^T|) + 2 |s| ] } (1 + c + 8u*) + eta
                             c = (n1 + n2) u_acc; either association
    w . tanh(q Wq + k Wk + b), A terms, X = q Wq (n1), Y = k Wk (n2):
                             dX = (n1 + n2) u_acc |q||Wq| + u_s |X|, dY likewise (one product of [q; k] is allowed)
                             dz = [ dX + dY + 3u (|X| + |Y| + |b|) ] (1 + 8u* + (n1 + n2) u_acc) + eta
                             u = max(u_s, u_c)
                             dh = min(1, sech(z)^2 + 0.77 dz) dz + (eps_tanh + u_s)(|h| + ..)
                             D  = [ |w| dh + A u_acc |w|(|h| + dh) + 2u_s |s| ] (1 + 8u* + A u_acc) + eta

Variances by the same rules: each rounding's square, and each underflow's, through squared coefficients. Errors of X (or
Y) are shared by the keys (or queries) that meet them, but each score has its own A of them, so that a score's variance
is not affected.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attncheck.attention.bounds_scores import slope_of_tanh
from attncheck.attention.errors import (
    ORDER_FACTOR,
    LogitError,
    Operand,
    Real,
    product_variance,
    transposed,
)
from attncheck.attention.rounding import RoundingModel


def projected(
    inputs: Operand, weight: Real, bias: Real | None, exact: Real, rounding: RoundingModel, carried: Real | None = None
) -> Operand:
    """Bound inputs (..., L, E) times weight (E, F) plus bias (F,); returns ``exact`` (..., L, F) with its error.

    ``carried`` is what the inputs' own variance adds, where they are not independent of each other.
    """
    length, u_acc, size = weight.shape[0], rounding.accumulate_unit, np.abs(weight)
    offset = np.zeros(weight.shape[-1]) if bias is None else bias
    product = exact - offset
    magnitude = inputs.magnitude @ size + np.abs(offset)
    worst = (length + 1) * u_acc * magnitude * (1 + 8 * rounding.coarsest_unit)
    if rounding.product_unit:
        worst = worst + rounding.product_error * (inputs.magnitude @ size) + _flushed(inputs.magnitude, size, rounding)
    if inputs.worst is not None:
        worst = worst + inputs.worst @ size
    squares = (inputs.value * inputs.value) @ (weight * weight)
    variance = product_variance(rounding, length, product * product, squares)
    cut = length if rounding.product_unit else 1
    # The bias is added last, or the sum starts from it (as in a fused linear layer of few rows).
    variance = np.maximum(
        variance + u_acc**2 * exact * exact,
        variance + ORDER_FACTOR * u_acc**2 * length * np.maximum(offset * offset + offset * product, 0) * cut,
    )
    if carried is None and inputs.variance is not None:
        carried = inputs.variance @ (weight * weight)
    if carried is not None:
        variance = variance + carried
    stored = 1 if bias is None else 2
    if rounding.output_unit > u_acc:
        unit = rounding.output_unit
        worst = worst + unit * ((np.abs(product) + worst) * (stored - 1))
        worst = worst + unit * (np.abs(exact) + worst)
        variance = variance + unit**2 * (exact * exact + (stored - 1) * product * product)
    lost, flushed = 2 * (length + 2) * rounding.accumulate_underflow, stored * rounding.output_underflow
    # What underflows is rounded like anything else, by at most eta.
    return Operand(exact, worst + lost + flushed, variance + lost**2 + flushed**2)


def general_scores(query: Real, key: Real, weight: Real, exact: Real, rounding: RoundingModel) -> LogitError:
    """Bound q W k^T: query (..., Lq, D), key (..., Lk, Dk), weight (D, Dk)."""
    u_acc, unit = rounding.accumulate_unit, rounding.score_unit
    first, second = weight.shape
    left, right = query @ weight, key @ transposed(weight)  # q W, k W^T
    size_q, size_k = np.abs(query), np.abs(key)
    magnitude = size_q @ np.abs(weight) @ transposed(size_k)
    halves = np.maximum(np.abs(left) @ transposed(size_k), size_q @ transposed(np.abs(right)))
    terms = (first + second) * u_acc + 2 * rounding.product_error
    worst = (terms * magnitude + unit * (halves + 2 * np.abs(exact))) * (1 + terms + 8 * rounding.coarsest_unit)
    sums = size_q.sum(-1)[..., :, np.newaxis] + size_k.sum(-1)[..., np.newaxis, :]
    inner = 2 * (max(first, second) + 2) * rounding.accumulate_underflow
    floor = (inner + rounding.score_underflow) * sums + inner + 2 * rounding.score_underflow
    if rounding.product_unit:
        floor = floor + _flushed(size_q, np.abs(weight), rounding) @ transposed(size_k)
        floor = floor + _flushed(size_q @ np.abs(weight), transposed(size_k), rounding)
    variance = np.maximum(
        _bilinear_variance(query, weight, left, key, exact, rounding),
        transposed(_bilinear_variance(key, transposed(weight), right, query, transposed(exact), rounding)),
    )
    variance = variance + 2 * unit**2 * exact * exact
    return LogitError(worst + floor, variance, np.zeros((1, 1)), floor)


def additive_scores(inputs: Mapping[str, Real], exact: Real, rounding: RoundingModel) -> LogitError:
    """Bound w . tanh(q Wq + k Wk + b); inputs as in ``Backend.additive_scores``, exact (..., Lq, Lk)."""
    unit, vector = rounding.score_unit, inputs["score_vector"]
    terms, width = inputs["query_weight"].shape[0] + inputs["key_weight"].shape[0], vector.shape[-1]
    part_q = _part(inputs["query"], inputs["query_weight"], terms, rounding)
    part_k = _part(inputs["key"], inputs["key_weight"], terms, rounding)
    bias = inputs.get("score_bias", np.zeros(width))
    moved, spread, hidden = _hidden(part_q, part_k, bias, terms, rounding)
    height, size = np.abs(np.tanh(hidden)), np.abs(vector)
    relative = rounding.tanh_error + unit
    moved = moved + relative * (height + moved)
    spread = spread + (rounding.tanh_error**2 + unit**2) * height**2
    summed = width * rounding.accumulate_unit + rounding.product_error
    worst = moved @ size + summed * ((height + moved) @ size) + 2 * unit * np.abs(exact)
    floor = 2 * (width + 2) * rounding.accumulate_underflow + rounding.score_underflow * (2 + size.sum())
    floor += rounding.product_underflow * (width + size.sum())
    variance = product_variance(rounding, width, exact * exact, height**2 @ vector**2)
    variance = variance + spread @ vector**2 + 2 * unit**2 * exact * exact
    worst = worst * (1 + 8 * rounding.coarsest_unit + summed) + floor
    return LogitError(worst, variance, np.zeros((1, 1)), np.asarray(floor))


def _bilinear_variance(query: Real, weight: Real, left: Real, key: Real, exact: Real, rounding: RoundingModel) -> Real:
    """Return the variance of (q W) k^T, storage of the result left out; ``left`` is q W."""
    first, second = weight.shape
    inner = product_variance(rounding, first, left * left, (query * query) @ (weight * weight))
    inner = inner + (rounding.score_unit * left) ** 2
    square_k = transposed(key * key)
    outer = product_variance(rounding, second, exact * exact, (left * left) @ square_k)
    variance: Real = inner @ square_k + outer
    # What cuts have in common is in one product as in the other.
    return variance + 2 * rounding.product_common * exact * exact if rounding.product_unit else variance


def _part(inputs: Real, weight: Real, terms: int, rounding: RoundingModel) -> Operand:
    """Return inputs times weight with its error, (..., L, A)."""
    part, u_acc, unit = inputs @ weight, rounding.accumulate_unit, rounding.score_unit
    relative = terms * u_acc + rounding.product_error
    worst = relative * (np.abs(inputs) @ np.abs(weight)) + unit * np.abs(part)
    if rounding.product_unit:
        worst = worst + _flushed(np.abs(inputs), np.abs(weight), rounding)
    squares = (inputs * inputs) @ (weight * weight)
    return Operand(part, worst, product_variance(rounding, terms, part * part, squares) + (unit * part) ** 2)


def _flushed(left: Real, right: Real, rounding: RoundingModel) -> Real:
    """Bound what factors that are flushed to zero take from a product of two matrices of magnitudes."""
    lost: Real = rounding.product_underflow * (left.sum(axis=-1, keepdims=True) + right.sum(axis=-2, keepdims=True))
    return lost


def _hidden(
    part_q: Operand, part_k: Operand, bias: Real, terms: int, rounding: RoundingModel
) -> tuple[Real, Real, Real]:
    """Return how far tanh z moves, its variance from there, and z: (..., Lq, Lk, A) each."""

    def outer(of_query: Real | None, of_key: Real | None) -> Real:
        assert of_query is not None
        assert of_key is not None
        return of_query[..., :, np.newaxis, :] + of_key[..., np.newaxis, :, :]

    unit = max(rounding.score_unit, rounding.compute_unit)
    hidden = outer(part_q.value, part_k.value) + bias
    size = outer(np.abs(part_q.value), np.abs(part_k.value)) + np.abs(bias)
    moved = outer(part_q.worst, part_k.worst) + 3 * unit * size
    moved = moved * (1 + 8 * rounding.coarsest_unit + terms * rounding.accumulate_unit)
    moved = moved + 2 * (terms + 4) * rounding.accumulate_underflow + 4 * rounding.score_underflow
    slope = slope_of_tanh(hidden)
    spread = outer(part_q.variance, part_k.variance) + 3 * unit**2 * size**2
    steep = np.minimum(1, slope + 0.77 * np.sqrt(spread))
    return np.minimum(1, slope + 0.77 * moved) * moved, steep**2 * spread, hidden
