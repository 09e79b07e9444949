"""Sums over keys or queries in a backward pass, of a factor with errors times inputs, and what storing them rounds.

With E the largest error of the factor and x what it is, N the terms of a sum, T the tiles that are added up in the
output's format, n_s = 1 if |a| is a power of two, else 3:

    B' = [ E |y| + c (|x| + E)|y| ] (1 + 8u*) + eta,    c = N u_acc + n_s max(u_s, u_p) + n_pre u_pre + (T - 1) u_o
    B  = B' + k_o u_o (|d| + B') + eta_o

where a scale may meet the factor before or after the sum, or the input before it. Heads of a group of G add up: N
counts the terms of all and T their tiles, each head may be stored, and G u_acc is added. Where nothing is attended to,
gradients are exactly 0, and so is B. Variances likewise: squares, and f u_acc^2 [ N (d^2/3 + Q/6) + Q ] for a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.backward_softmax import storage_of
from attncheck.attention.backward_weights import BackwardWeights
from attncheck.attention.errors import NOTHING, ORDER_FACTOR, Bound, Finished, Real, bound_of, product_factors
from attncheck.attention.exponents import is_linear
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.scores import constant_roundings, folds_exactly_into_operands, roundings_of_scale

_MAX_LINEAR = 1 / 4
"""Variance of a logit's error up to which gradients have a statistical scale, which is looser than that of weights."""


@dataclass(frozen=True)
class Scaling:
    """What a scale rounds, relative to what is added up."""

    factor: float  # max(1, |a|), for what underflows before it is scaled
    max_error: float = 0.0  # n_s max(u_s, u_p) + n_pre u_pre
    variance: float = 0.0
    constant: float = 0.0  # n_a u_s: the roundings of the constant, one number in every element


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over keys or queries of an error-prone factor times inputs, per query head: (B, H, L, D) or ``NOTHING``."""

    value: Real
    magnitude: Real  # of what is added up, errors included
    squares: Real
    max_error: Real  # what the factor's errors make
    variance: Real
    moves: Real  # what a relative change of all scores makes: one number's error, in every head the same
    deviation: Real  # of what errors that all terms share make
    scaling: Scaling
    floor: Real  # what underflow of the factor makes
    lost: Real  # its variance
    count: Real  # N: what is not exactly 0
    constants: float  # u_s^2 + u_c^2, and of factors that are cut off


def scaling_of(scale: float, rounding: RoundingModel) -> Scaling:
    """Return what scaling ds, a sum of it, or what it meets, rounds."""
    folds_exactly, counted = folds_exactly_into_operands(scale, rounding), roundings_of_scale(scale)
    folded, storing = 0.0 if folds_exactly else rounding.prescale_unit, storage_of(rounding)[0]
    return Scaling(
        factor=max(1.0, abs(scale)),
        max_error=(1 + counted) * storing + rounding.prescale_count * folded,
        variance=storing**2 + 2 * folded**2,
        constant=constant_roundings(counted, folds_exactly) * rounding.score_unit,
    )


def bound_of_sums(sums: Sums, exact: Real, length: int, rounding: RoundingModel) -> Bound:
    """Add up the heads of each group, and what adding and storing round; ``length`` is that of what is summed over."""
    heads = exact.shape[-3]
    group = sums.value.shape[-3] // heads if heads else 1
    # The tiles of all heads of a group are added up in one place.
    tiles = 1 if rounding.gradient_tile is None else max(math.ceil(length / rounding.gradient_tile), 1) * max(group, 1)

    def together(array: Real) -> Real:
        if group == 1:
            return array
        whole = np.broadcast_to(array, sums.value.shape)
        summed: Real = whole.reshape(*whole.shape[:-3], heads, group, *whole.shape[-2:]).sum(axis=-3)
        return summed

    count, u_acc, u_o = together(sums.count), rounding.accumulate_unit, rounding.output_unit
    magnitude, squares = together(sums.magnitude), together(sums.squares)
    some = count > 0
    relative = count * u_acc + sums.scaling.max_error + (tiles - 1) * u_o + rounding.product_error
    # A sum before it is scaled, its products and partial sums.
    lost = 2 * (count + 2) * rounding.accumulate_underflow + (tiles + 1) * rounding.output_underflow
    floor = some * sums.scaling.factor * lost
    max_error = (together(sums.max_error) + relative * magnitude) * (1 + 8 * rounding.coarsest_unit)
    max_error = max_error + floor
    variance, heads_square, exact_square = together(sums.variance), together(sums.value**2), exact * exact
    if sums.lost is not NOTHING:
        max_error, variance = max_error + together(sums.floor), variance + together(sums.lost)
    if sums.moves is not NOTHING:
        variance = variance + sums.constants * together(sums.moves) ** 2
    if sums.deviation is not NOTHING:
        variance = variance + together(sums.deviation) ** 2
    of_total, of_squares = product_factors(rounding, count)
    variance = variance + of_total * np.maximum(exact_square, heads_square)
    variance += (of_squares + sums.scaling.variance) * squares
    variance += sums.scaling.constant**2 * exact_square
    if tiles > 1:
        variance += ORDER_FACTOR * u_o**2 * tiles * (heads_square / 3 + squares / 6)
    if group > 1:
        max_error = max_error + (rounding.output_count * u_o + group * u_acc) * (magnitude + max_error)
        max_error, floor = (
            max_error + some * group * rounding.output_underflow,
            floor + group * rounding.output_underflow,
        )
        variance += (rounding.output_count * u_o**2 + group * u_acc**2) * heads_square
    return bound_of_stored(exact, max_error, variance, floor, some, rounding)


def bound_of_stored(
    exact: Real, max_error: Real, variance: Real, floor: Real, some: NDArray[np.bool_], rounding: RoundingModel
) -> Bound:
    """Round what is returned; where nothing was added up it is exactly 0."""
    max_error = (
        max_error
        + rounding.output_count * rounding.output_unit * (np.abs(exact) + max_error)
        + rounding.output_underflow
    )
    variance = variance + rounding.output_count * (rounding.output_unit * exact) ** 2
    bound = bound_of(exact, max_error, variance, floor + rounding.output_underflow)
    if some.all():
        return bound
    return Bound(np.where(some, bound.max_error, 0.0), np.where(some, bound.sigma, 0.0))


def finished(stage: str, weights: BackwardWeights, exact: Real, bound: Bound) -> Finished:
    """Return a gradient with its bound; no statistical scale where weights that reach it are no longer linear."""
    bent = of_bent_weights(weights)
    if not bent.any():
        return Finished(exact, bound)
    reached = _reached(stage, bent, bound.max_error.shape)
    return Finished(exact, Bound(bound.max_error, np.where(reached, bound.max_error, bound.sigma)))


def of_bent_weights(weights: BackwardWeights) -> NDArray[np.bool_]:
    """Return, (B, H, Lq, Lk), where a row's weights are no longer linear in the errors of its exponents."""
    linear = is_linear(weights.rows, _MAX_LINEAR)
    bent: NDArray[np.bool_] = weights.rows.attended & ~linear.all(axis=-1, keepdims=True)
    return bent


def _reached(stage: str, bent: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return, in a gradient's shape, what these weights (B, H, Lq, Lk) reach."""
    reached = np.asarray(bent.any(axis=-1 if stage == "grad_query" else -2))[..., np.newaxis]
    groups = reached.shape[-3] // shape[-3] if shape[-3] else 1
    # (B, H, L, 1) -> (B, Hkv, H / Hkv, L, 1): a key head is reached by every query head that shares it.
    shared = reached.reshape(*reached.shape[:-3], shape[-3], groups, *reached.shape[-2:]).any(axis=-3)
    return np.broadcast_to(shared, shape)
