"""Error bounds of the gradients of attention, accumulated from the inputs; none of them follows from another.

With E_ds, E_dl, P of ``bounds_gradients_worst`` and their variances, a the scale, N the terms of a sum, T the tiles
that are added up in the output's format, n_s = 1 if |a| is a power of two, else 3:

    grad_query  B' = |a| [ E_ds |k| + c (|ds| + E_ds)|k| ] (1 + 8u*) + eta
    grad_key    B' = |a| [ E_ds^T |q| + c (|ds| + E_ds)^T |q| ] (1 + 8u*) + eta
                c  = N u_acc + n_s max(u_s, u_p) + n_pre u_pre + (T - 1) u_o
    grad_value  B' = [ P^T |g| + (N u_acc + (T - 1) u_o)(p + P)^T |g| ] (1 + 8u*) + eta
    grad_bias   B' = [ sum E_dl + (N - 1) u_acc sum (|p y| + E_dl) ] (1 + 8u*)
    each        B  = B' + k_o u_o (|d| + B') + eta_o

where a scale may meet ds before or after the sum, or q and k before it. Heads of a group of G add up: N counts the
terms of all, each head may be stored, and G u_acc is added. Where nothing is attended to, gradients are exactly 0, and
so is B. Variances likewise: squares, and f u_acc^2 [ N (d^2/3 + Q/6) + Q ] for a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds_backward import Backward, backward_of
from attncheck.attention.bounds_gradients_scale import (
    Spread,
    columns_deviation,
    constant_moves,
    logits_variance,
    query_variance,
    scores_variance,
    spread_of,
    weights_deviation,
    weights_variance,
)
from attncheck.attention.bounds_gradients_worst import Largest, largest_errors, storage_of
from attncheck.attention.errors import (
    ORDER_FACTOR,
    Bound,
    Real,
    product_variance,
    settle,
    summation_variance,
    transposed,
)
from attncheck.attention.exponents import is_linear
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.scores import constant_roundings, folds_exactly_into_operands, roundings_of_scale

_MAX_LINEAR = 1 / 4
"""Variance of a logit's error up to which gradients have a statistical scale, which is looser than that of weights."""


@dataclass(frozen=True)
class _Scaling:
    """What a scale rounds, relative to what is added up."""

    factor: float  # max(1, |a|), for what underflows before it is scaled
    worst: float = 0.0  # n_s max(u_s, u_p) + n_pre u_pre
    variance: float = 0.0
    constant: float = 0.0  # n_a u_s: the roundings of the constant, one number in every element


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over keys or queries of an error-prone factor times inputs, per query head: (B, H, L, D) each."""

    value: Real
    magnitude: Real  # of what is added up, errors included
    squares: Real
    worst: Real  # what the factor's errors make
    variance: Real
    moves: Real  # what a relative change of all scores makes: one number's error, in every head the same
    deviation: Real  # of what errors that all terms share make
    scaling: _Scaling
    floor: Real  # what underflow of the factor makes
    lost: Real  # its variance
    count: Real  # N: what is not exactly 0


def gradient_bounds(
    problem: Problem, rounding: RoundingModel, exact: Mapping[str, Real], wanted: Set[str]
) -> dict[str, Bound]:
    """Bound ``attention_gradients``: inputs of rank 4, ``exact`` the gradients."""
    back, inputs = backward_of(problem, rounding), problem.inputs
    largest, spread = largest_errors(back, rounding), spread_of(back, rounding)
    logits = logits_variance(back, spread, rounding)
    scores = scores_variance(back, spread, logits, rounding)
    bounds = {}
    if "grad_query" in wanted:
        sums = _over_keys(back, largest, query_variance(back, spread, rounding), rounding)
        bounds["grad_query"] = _settled(sums, exact["grad_query"], inputs["key"].shape[-2], spread, rounding)
    if "grad_key" in wanted:
        sums = _over_queries(back, largest, scores, columns_deviation(back, spread, rounding), rounding)
        bounds["grad_key"] = _settled(sums, exact["grad_key"], inputs["query"].shape[-2], spread, rounding)
    if "grad_value" in wanted:
        sums = _of_weights(back, largest, weights_variance(back, spread, rounding), spread, rounding)
        bounds["grad_value"] = _settled(sums, exact["grad_value"], inputs["query"].shape[-2], spread, rounding)
    if "grad_bias" in wanted:
        bounds["grad_bias"] = _of_bias(back, largest, spread, logits, exact["grad_bias"], rounding)
    bent = back.attended.astype(np.bool_) & (~is_linear(back.rows, _MAX_LINEAR)).any(axis=-1, keepdims=True)
    return {
        stage: Bound(bound.worst, np.where(_reached(stage, bent, bound.worst.shape), bound.worst, bound.scale))
        for stage, bound in bounds.items()
    }


def _reached(stage: str, bent: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return, in a gradient's shape, what these weights (B, H, Lq, Lk) reach."""
    if stage == "grad_bias":
        lifted = (1,) * (bent.ndim - len(shape)) + shape
        axes = tuple(axis for axis, length in enumerate(lifted) if length == 1)
        return np.broadcast_to(bent.any(axis=axes, keepdims=True).reshape(shape), shape)
    reached = np.asarray(bent.any(axis=-1 if stage == "grad_query" else -2))[..., np.newaxis]
    groups = reached.shape[-3] // shape[-3] if shape[-3] else 1
    # (B, H, L, 1) -> (B, Hkv, H / Hkv, L, 1): a key head is reached by every query head that shares it.
    shared = reached.reshape(*reached.shape[:-3], shape[-3], groups, *reached.shape[-2:]).any(axis=-3)
    return np.broadcast_to(shared, shape)


def _over_keys(back: Backward, largest: Largest, variance: Real, rounding: RoundingModel) -> _Sums:
    """Return a ds k."""
    scale, size = abs(back.scale), np.abs(back.key)
    scores, count = np.abs(back.grad_scores), back.rows.count
    return _Sums(
        value=back.scale * (back.grad_scores @ back.key),
        magnitude=scale * ((scores + largest.grad_scores) @ size),
        squares=scale**2 * (scores**2 @ size**2),
        worst=scale * (largest.grad_scores @ size),
        variance=scale**2 * variance,
        moves=np.zeros((1, 1)),
        deviation=np.zeros((1, 1)),
        scaling=_scaling(back.scale, rounding),
        floor=_underflow(back, back.attended @ size, scores.sum(axis=-1, keepdims=True), rounding),
        lost=_underflow(back, back.attended @ size**2, (scores**2).sum(axis=-1, keepdims=True), rounding, power=2),
        count=count,
    )


def _over_queries(back: Backward, largest: Largest, variance: Real, deviation: Real, rounding: RoundingModel) -> _Sums:
    """Return a ds^T q."""
    scale, size = abs(back.scale), np.abs(back.query)
    scores, attended = np.abs(back.grad_scores), transposed(back.attended)
    count = attended.sum(axis=-1, keepdims=True)
    return _Sums(
        value=back.scale * (transposed(back.grad_scores) @ back.query),
        magnitude=scale * (transposed(scores + largest.grad_scores) @ size),
        squares=scale**2 * (transposed(scores**2) @ size**2),
        worst=scale * (transposed(largest.grad_scores) @ size),
        variance=scale**2 * (transposed(variance) @ size**2),
        moves=back.scale * (transposed(constant_moves(back) * back.slope) @ back.query),
        deviation=scale * (transposed(deviation) @ size) if rounding.product_unit else np.zeros((1, 1)),
        scaling=_scaling(back.scale, rounding),
        floor=_underflow(back, attended @ size, transposed(scores).sum(axis=-1, keepdims=True), rounding),
        lost=_underflow(back, attended @ size**2, transposed(scores**2).sum(axis=-1, keepdims=True), rounding, power=2),
        count=count,
    )


def _of_weights(back: Backward, largest: Largest, variance: Real, spread: Spread, rounding: RoundingModel) -> _Sums:
    """Return p^T g."""
    rows, gradient = back.rows, back.grad_output
    size, count = np.abs(gradient), transposed(back.attended).sum(axis=-1, keepdims=True)
    return _Sums(
        value=transposed(rows.weights) @ gradient,
        magnitude=transposed(back.most_weight + largest.weights) @ size,
        squares=transposed(rows.weights**2) @ size**2,
        worst=transposed(largest.weights) @ size,
        variance=transposed(variance) @ size**2,
        moves=transposed(rows.weights * (rows.shifted - rows.mean_shifted)) @ gradient,
        deviation=transposed(weights_deviation(back, spread)) @ size if rounding.product_unit else np.zeros((1, 1)),
        scaling=_Scaling(1.0),
        floor=np.zeros((1, 1)),
        lost=np.zeros((1, 1)),
        count=count,
    )


def _scaling(scale: float, rounding: RoundingModel) -> _Scaling:
    """Return what scaling ds, a sum of it, or what it meets, rounds."""
    folds_exactly, counted = folds_exactly_into_operands(scale, rounding), roundings_of_scale(scale)
    folded, storing = 0.0 if folds_exactly else rounding.prescale_unit, storage_of(rounding)[0]
    return _Scaling(
        factor=max(1.0, abs(scale)),
        worst=(1 + counted) * storing + rounding.prescale_count * folded,
        variance=storing**2 + 2 * folded**2,
        constant=constant_roundings(counted, folds_exactly) * rounding.score_unit,
    )


def _underflow(back: Backward, entries: Real, gradients: Real, rounding: RoundingModel, *, power: int = 1) -> Real:
    """Bound what underflow does to a scaled ds and to a scaled operand; their squares with ``power`` 2."""
    folded = 0.0 if rounding.folding == "none" else rounding.prescale_underflow
    scale = max(1.0, abs(back.scale))
    floor: Real = (scale * 2 * storage_of(rounding)[1]) ** power * entries + (scale * folded) ** power * gradients
    return floor


def _settled(sums: _Sums, exact: Real, length: int, spread: Spread, rounding: RoundingModel) -> Bound:
    """Add up the heads of each group, and what adding and storing round; ``length`` is that of what is summed over."""
    heads = exact.shape[-3]
    group = sums.value.shape[-3] // heads if heads else 1
    tiles = 1 if rounding.gradient_tile is None else max(math.ceil(length / rounding.gradient_tile), 1)

    def together(array: Real) -> Real:
        whole = np.broadcast_to(array, sums.value.shape)
        summed: Real = whole.reshape(*whole.shape[:-3], heads, group, *whole.shape[-2:]).sum(axis=-3)
        return summed

    count, u_acc, u_o = together(sums.count), rounding.accumulate_unit, rounding.output_unit
    magnitude, squares = together(sums.magnitude), together(sums.squares)
    some = count > 0
    relative = count * u_acc + sums.scaling.worst + (tiles - 1) * u_o + rounding.product_error
    # A sum before it is scaled, its products and partial sums.
    lost = 2 * (count + 2) * rounding.accumulate_underflow + (tiles + 1) * rounding.output_underflow
    floor = some * sums.scaling.factor * lost
    worst = (together(sums.worst) + relative * magnitude) * (1 + 8 * rounding.coarsest_unit)
    worst = worst + together(sums.floor) + floor
    heads_square = together(sums.value**2)
    square = np.maximum(exact * exact, heads_square)
    variance = together(sums.variance + sums.lost) + spread.constants * together(sums.moves) ** 2
    variance += product_variance(rounding, count, square, squares) + sums.scaling.variance * squares
    if rounding.product_unit:
        variance += together(sums.deviation) ** 2
    variance += sums.scaling.constant**2 * exact * exact
    if tiles > 1:
        variance += ORDER_FACTOR * u_o**2 * tiles * (heads_square / 3 + squares / 6)
    if group > 1:
        worst = worst + (rounding.output_count * u_o + group * u_acc) * (magnitude + worst)
        worst, floor = worst + some * group * rounding.output_underflow, floor + group * rounding.output_underflow
        variance += (rounding.output_count * u_o**2 + group * u_acc**2) * heads_square
    return _stored(exact, worst, variance, floor, some, rounding)


def _of_bias(
    back: Backward, largest: Largest, spread: Spread, variance: Real, exact: Real, rounding: RoundingModel
) -> Bound:
    """Sum the gradients of the logits over the axes along which the bias was spread."""
    shape = (1,) * (back.grad_logits.ndim - exact.ndim) + exact.shape
    axes = tuple(axis for axis, length in enumerate(shape) if length == 1)

    def together(array: Real) -> Real:
        summed: Real = array.sum(axis=axes, keepdims=True).reshape(exact.shape)
        return summed

    count, error, u_acc = together(back.attended), largest.grad_logits, rounding.accumulate_unit
    size = np.abs(back.grad_logits) + error
    worst = together(error) + np.maximum(count - 1, 0) * u_acc * together(size)
    worst = worst * (1 + 8 * rounding.coarsest_unit)
    if shape[-1] == 1:
        # The errors of one row have causes in common.
        variance = np.sqrt(variance).sum(axis=-1, keepdims=True) ** 2
    # Rounded keys and values are those of every query.
    summed = together(np.sqrt(variance)) ** 2 if rounding.product_unit else together(variance)
    variance = summed + spread.constants * together(constant_moves(back)) ** 2
    added = summation_variance(u_acc, count, exact * exact, together(back.grad_logits**2))
    variance = variance + np.where(count > 1, added, 0.0)
    return _stored(exact, worst, variance, np.zeros(exact.shape), count > 0, rounding)


def _stored(
    exact: Real, worst: Real, variance: Real, floor: Real, some: NDArray[np.bool_], rounding: RoundingModel
) -> Bound:
    """Round what is returned; where nothing was added up it is exactly 0."""
    worst = worst + rounding.output_count * rounding.output_unit * (np.abs(exact) + worst) + rounding.output_underflow
    variance = variance + rounding.output_count * (rounding.output_unit * exact) ** 2
    bound = settle(exact, worst, variance, floor + rounding.output_underflow)
    return Bound(np.where(some, bound.worst, 0.0), np.where(some, bound.scale, 0.0))
