"""Keys and values in other forms: in a cache, in 8 bits with scales, or as latent vectors.

Keys and values of a cache stand in front of those that are projected. It holds what the projections gave before,
rotated if there is a rotary embedding: the rotation behind this step has the cosine 1 and the sine 0 there. Nothing
is rounded, and the new ones bring their errors along. Without projections the past is joined before anything is
computed (``reading/lowering.py``).

Keys and values in 8 bits are multiplied by their scales (``docs/numerics.md``, section 4.1b; Micikevicius et al. 2022,
"FP8 Formats for Deep Learning", arXiv 2209.05433). Latent vectors are projected to keys and values, which are made, or
absorbed into query and output: one bound for both forms (section 4.1d; DeepSeek-AI 2024, "DeepSeek-V2", arXiv
2405.04434, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Ball, Bound, BoundedStage, Operand, Real, matmul_variance, transposed
from attncheck.attention.exact_array import ExactArray, concatenate
from attncheck.attention.flags import FlagContext, Flags, any_over_axes
from attncheck.attention.problem import Computation
from attncheck.attention.projection import bound_linear_layer
from attncheck.attention.scores import PRODUCT, ProductSums, compute_product_sums, score_scale
from attncheck.attention.softmax import Weights
from attncheck.attention.step import ErrorContext, RadiusContext, Step
from attncheck.attention.weighted_mean import WEIGHTED_MEAN


def prepend_cache_step(name: str) -> Step:
    """Return the step that puts the cache in front of the projected key or value: (B, Hkv, P + Lk, D)."""
    cached = f"cached_{name}"

    def exact(problem: Computation, new: ExactArray) -> ExactArray:
        return concatenate([problem.to_exact_array(problem.input_array(cached)), new], axis=-2)

    def error(at: ErrorContext, new: Operand) -> Operand:
        none = np.zeros(at.problem.input_array(cached).shape)
        errors = (new.max_error, new.variance)
        return Operand(at.value, *(None if part is None else _concatenate(none, part) for part in errors))

    def radius(around: RadiusContext, _: Real, new: Ball) -> Real:
        return _concatenate(around.radii[cached], new.radius)

    def reach(known: FlagContext, new: Flags) -> Flags:
        problem = known.problem
        past = known.input_flags.get(cached, np.zeros((1, 1, 1, 1), np.bool_))
        lengths = problem.input_array(cached).shape[-2], problem.input_array(name).shape[-2] + problem.added_keys
        leading = np.broadcast_shapes(past.shape[:-2], new.shape[:-2])
        width = max(past.shape[-1], new.shape[-1])
        parts = zip((past, new), lengths, strict=True)
        return _concatenate(*(np.broadcast_to(part, (*leading, length, width)) for part, length in parts))

    return Step(exact, error, radius, propagate_flags=reach)


def _concatenate(past: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([past, new], axis=-2)


def dequantization_step(name: str) -> Step:
    """Return (code - shift) factor for an input in codes; factors have the axes (B, Hkv, T, 1), or those of codes."""
    factor, shift = f"{name}_factor", f"{name}_shift"

    def exact(problem: Computation, codes: ExactArray) -> ExactArray:
        shifted = codes - problem.to_exact_array(problem.input_array(shift)) if shift in problem.inputs else codes
        return shifted * problem.to_exact_array(problem.input_array(factor))

    def error(at: ErrorContext, codes: Operand) -> Operand:
        size, count = np.abs(at.value), 2
        lost: Real | float = 1.0
        if (
            at.problem.input_array(factor).shape[-1] > 1
        ):  # scales of blocks, which may be multiplied before the codes are
            lost = 1 + np.abs(codes.value)
        if shift in at.problem.inputs:
            zeros = np.abs(at.problem.input_array(shift))
            size = (np.abs(codes.value) + zeros) * np.abs(at.problem.input_array(factor))
            count, lost = 3, lost + zeros
        unit = max(at.rounding.output_unit, at.rounding.compute_unit)
        underflow = max(at.rounding.output_underflow, at.rounding.accumulate_underflow)
        return Operand(at.value, count * unit * size + lost * underflow, count * (unit * size) ** 2)

    def reach(known: FlagContext, flags: Flags) -> Flags:
        for part_name in known.input_flags.keys() & {factor, shift}:
            flags = flags | known.input_flags[part_name]
        return flags

    return Step(exact, error, propagate_flags=reach)


def latent_projection_step(name: str) -> Step:
    """Return keys or values of every head; elements after the latent part of a key stay: (B, H, T, D + Dr)."""

    def exact(problem: Computation, latents: ExactArray) -> ExactArray:
        return latents @ problem.to_exact_array(
            _append_identity_block(_projection_weight(problem, name), latents.shape[-1])
        )

    def error(at: ErrorContext, latents: Operand) -> Operand:
        weight = _projection_weight(at.problem, name)
        width, columns = weight.shape[-2:]
        inputs = Operand(latents.value[..., :width])
        made = bound_linear_layer(inputs, weight, None, at.value[..., :columns], at.rounding)
        rest = np.zeros((*made.value.shape[:-1], at.value.shape[-1] - columns))
        return Operand(at.value, *(np.concatenate([part, rest], axis=-1) for part in made.max_error_and_variance))

    def radius(around: RadiusContext, _: Real, latents: Ball) -> Real:
        weight, width = around.input_ball(f"{name}_projection"), latents.value.shape[-1]
        return latents.matmul_radius(
            _append_identity_block(weight.value, width), _append_identity_block(weight.radius, width, 0)
        )

    def reach(known: FlagContext, flags: Flags) -> Flags:
        width, columns = _projection_weight(known.problem, name).shape[-2:]
        weight = known.input_flags[f"{name}_projection"]
        made: Flags = any_over_axes(flags[..., :width], -1) | any_over_axes(weight, -2)
        made = np.broadcast_to(made, (*made.shape[:-1], columns))
        rest = flags[..., width:]
        return np.concatenate([made, np.broadcast_to(rest, (*made.shape[:-1], rest.shape[-1]))], axis=-1)

    return Step(exact, error, radius, propagate_flags=reach)


def latent_projection_magnitude(latents: Real, weight: Real) -> Real:
    """Return what keys or values made of latent vectors are sums of the absolute terms of: (B, H, T, D + Dr)."""
    return np.abs(latents) @ _append_identity_block(np.abs(weight), latents.shape[-1])


def _projection_weight(problem: Computation, name: str) -> Real:
    return problem.input_array(f"{name}_projection")


def _append_identity_block(weight: Real, rows: int, diagonal: int = 1) -> Real:
    """Extend a projection by an identity, which passes through further columns: (H, C, D) -> (H, C + Dr, D + Dr)."""
    heads, width, columns = weight.shape
    whole = np.zeros((heads, rows, columns + rows - width), weight.dtype)
    whole[:, :width, :columns] = weight
    whole[:, width:, columns:] = diagonal * np.eye(rows - width, dtype=weight.dtype)
    return whole


def _latent_product_error(at: ErrorContext, query: Operand, key: Operand) -> ProductSums:
    made, absorbed = compute_product_sums(query, key, at.rounding), _prepare_absorbed_products(at, query)
    added, variance = _split_product_storage_error(at, query.value, key.value)
    carried = np.maximum(made.propagated_error, absorbed.propagated_error)
    return replace(
        made,
        head_width=max(made.head_width, absorbed.head_width),
        magnitude=np.maximum(made.magnitude, absorbed.magnitude),
        squared_products=np.maximum(made.squared_products, absorbed.squared_products),
        propagated_error=carried + added * (1 + 8 * at.rounding.coarsest_unit) + 2 * at.rounding.score_unit * carried,
        shared_variance=absorbed.shared_variance,
        independent_variance=made.independent_variance + variance,
        sum_of_magnitudes=np.maximum(made.sum_of_magnitudes, absorbed.sum_of_magnitudes),
        rounded_operand_count=np.maximum(made.rounded_operand_count, absorbed.rounded_operand_count),
    )


def _prepare_absorbed_products(at: ErrorContext, query: Operand) -> ProductSums:
    """Prepare the bounds of a query that the projection is part of, times latent vectors."""
    weight, latents = _projection_weight(at.problem, "key"), at.problem.input_array("key")
    columns = weight.shape[-1]
    content, rotary = query.value[..., :columns], query.value[..., columns:]
    made = bound_linear_layer(Operand(content), transposed(weight), None, content @ transposed(weight), at.rounding)
    none = np.zeros_like(rotary)
    parts = zip((made.value, *made.max_error_and_variance), (rotary, none, none), strict=True)
    return compute_product_sums(
        Operand(*(np.concatenate(pair, axis=-1) for pair in parts)), Operand(latents), at.rounding
    )


def _split_product_storage_error(at: ErrorContext, query: Real, key: Real) -> tuple[Real, Real]:
    """Bound the storage of two products before they are added up, and its variance; 0 if there is only one product."""
    columns, unit = _projection_weight(at.problem, "key").shape[-1], at.rounding.score_unit
    if query.shape[-1] == columns:
        return np.zeros((1, 1)), np.zeros((1, 1))
    parts = (query[..., part] @ transposed(key[..., part]) for part in (np.s_[:columns], np.s_[columns:]))
    content, rotary = map(np.abs, parts)
    scale = abs(score_scale(at.problem))
    underflow = 2 * at.rounding.score_underflow / np.where(scale > 0, np.minimum(1.0, scale), 1.0)
    return unit * (content + rotary) + underflow, unit**2 * (content**2 + rotary**2)


def _latent_mean_error(at: ErrorContext, weights: Weights | Operand, value: Operand) -> BoundedStage:
    made = WEIGHTED_MEAN.propagate_error(at, weights, value).final_bound
    exact_values = WEIGHTED_MEAN.propagate_error(at, weights, Operand(value.value)).final_bound
    absorbed = _bound_absorbed_mean(at, weights, exact_values)
    return BoundedStage(
        at.value, Bound(np.maximum(made.max_error, absorbed.max_error), np.maximum(made.sigma, absorbed.sigma))
    )


def _bound_absorbed_mean(at: ErrorContext, weights: Weights | Operand, exact_values: Bound) -> Bound:
    """Bound a mean of latent vectors that is projected, given the bound of a mean of exact values."""
    rounding, weight = at.rounding, _projection_weight(at.problem, "value")
    exact, size, count = _weights_maxima_and_counts(weights)
    unstored = replace(rounding, output_unit=0.0)  # how results are stored is part of the other bound
    behind = bound_linear_layer(_mean_latents_with_error(at, exact, size, count), weight, None, at.value, unstored)
    behind_error, behind_variance = behind.max_error_and_variance
    is_some = (count > 0) & np.isfinite(at.value)
    stored = 1 + rounding.output_count * rounding.output_unit + 8 * rounding.coarsest_unit
    max_error = exact_values.max_error + np.where(is_some, behind_error * stored, 0.0)
    sigma = np.sqrt(exact_values.sigma**2 + np.where(is_some, behind_variance, 0.0))
    return Bound(max_error, np.minimum(sigma, max_error))


def _weights_maxima_and_counts(weights: Weights | Operand) -> tuple[Real, Real, Real]:
    """Return weights, the largest that each may be as computed, and how many of a row are not 0."""
    if isinstance(weights, Weights):
        rows = weights.rows
        return rows.weights, (rows.weights + rows.max_weight_growth) / rows.min_normalizer, rows.attended_count
    count = (weights.magnitude > 0).sum(axis=-1, keepdims=True).astype(np.float64)
    return weights.value, weights.magnitude, count


def _mean_latents_with_error(at: ErrorContext, exact: Real, size: Real, count: Real) -> Operand:
    """Return the weighted mean of latent vectors with its error: (B, H, Lq, C)."""
    rounding, latents = at.rounding, at.problem.input_array("value")
    terms = count + np.ceil(count / rounding.min_block_keys)
    mean = exact @ latents
    relative = terms * rounding.accumulate_unit + 2 * rounding.compute_unit + rounding.output_unit
    relative = relative + rounding.product_error
    underflow = 2 * terms * rounding.accumulate_underflow + rounding.output_underflow
    if rounding.product_unit:
        underflow = underflow + rounding.product_underflow * (count + np.abs(latents).sum(axis=-2, keepdims=True))
    max_error = relative * (1 + relative) * (size @ np.abs(latents)) + underflow
    variance = matmul_variance(rounding, count, mean**2, exact**2 @ latents**2)
    variance = variance + (2 * rounding.compute_unit**2 + rounding.output_unit**2) * mean**2 + underflow**2
    return Operand(mean, max_error, variance)


LATENT_PRODUCT = replace(PRODUCT, propagate_error=_latent_product_error)
LATENT_MEAN = replace(WEIGHTED_MEAN, propagate_error=_latent_mean_error)
