"""Faults of the sums in the backward pass: over queries, over the heads of a group, over the bias's broadcast axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.mutants.backward import BACKWARD, Saved, for_bias, for_rows, in_groups
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import times
from attncheck.mutants.variant import Variant, with_backward


def _over_groups(total: Callable[[Array], Array]) -> Variant:
    """Bring the gradients of a group's query heads (B, Hkv, H / Hkv, ..) together in another way."""

    def together(gradient: Array, kv_heads: int) -> Array:
        return total(in_groups(gradient, kv_heads))

    return with_backward(sum_key_heads=together, sum_value_heads=together)


def _tiled(gradient: Array, kv_heads: int) -> Array:
    batch, heads, *rest = gradient.shape
    return np.asarray(gradient.reshape(batch, heads // kv_heads, kv_heads, *rest).sum(axis=1))


def _whole_tiles_of_64(weights: Array, grad_output: Array) -> Array:
    queries = weights.shape[-2]
    whole = queries - queries % 64 if queries > 64 else queries
    return for_rows(weights[..., :whole, :], grad_output[..., :whole, :])


def _first_tile_of_64(by_key: Array, query: Array) -> Array:
    return for_rows(by_key[..., :64, :], query[..., :64, :])


def _from_padding(by_key: Array, query: Array) -> Array:
    gradient = for_rows(by_key, query)
    return np.full_like(gradient, np.nan) if by_key.shape[-2] % 16 else gradient


def _first_of_broadcast_axes(gradient: Array, bias: Array) -> Array:
    first = tuple(slice(1) if length == 1 else slice(None) for length in bias.shape)
    return gradient[first]


def _heads_for_batch(gradient: Array, bias: Array) -> Array:
    batch, heads = gradient.shape[:2]
    return for_bias(np.swapaxes(gradient, 0, 1) if batch == heads else gradient, bias)


def _averaged(gradient: Array, bias: Array) -> Array:
    return np.asarray(for_bias(gradient, bias) * (bias.size / gradient.size)).astype(gradient.dtype)


def _bias_scaled(saved: Saved, gradient: Array) -> Array:
    return times(gradient, saved.request.scale)


def _bias_through_softcap(saved: Saved, gradient: Array) -> Array:
    softcap = saved.request.softcap
    return gradient if softcap is None else np.asarray(gradient * BACKWARD.slope(saved, softcap))


MUTANTS = (
    Mutant(
        "value_gradient_without_queries_beyond_a_multiple_of_64",
        "gradients",
        "the last tile of queries is dropped: FlagGems#898",
        with_backward(value=_whole_tiles_of_64),
        "grad_value",
    ),
    Mutant(
        "key_gradient_of_the_first_64_queries",
        "gradients",
        "the loop over tiles of queries runs once: pytorch#158212's kind",
        with_backward(key=_first_tile_of_64),
        "grad_key",
    ),
    Mutant(
        "key_gradient_nan_from_padded_queries",
        "gradients",
        "statistics of padding rows are not initialised: tilelang#2461, fla#892",
        with_backward(key=_from_padding),
        "grad_key",
    ),
    Mutant(
        "group_gradient_of_its_first_head",
        "gradients",
        "one query head of a group contributes, the others are lost: FlagGems#898",
        _over_groups(lambda grouped: grouped[:, :, 0]),
        "grad_key",
    ),
    Mutant(
        "group_gradient_without_its_last_head",
        "gradients",
        "the loop over a group's query heads ends one early",
        _over_groups(lambda grouped: np.asarray((grouped[:, :, :-1] if grouped.shape[2] > 1 else grouped).sum(axis=2))),
        "grad_key",
    ),
    Mutant(
        "group_gradient_averaged",
        "gradients",
        "the mean over a group's query heads for their sum",
        _over_groups(lambda grouped: np.asarray(grouped.mean(axis=2))),
        "grad_key",
    ),
    Mutant(
        "group_gradient_summed_as_if_tiled",
        "gradients",
        "repeat forwards, tile backwards: onnx#7274's kind",
        with_backward(sum_key_heads=_tiled, sum_value_heads=_tiled),
        "grad_key",
    ),
    Mutant(
        "value_gradient_of_groups_summed_as_if_tiled",
        "gradients",
        "dk right, dv by another head map",
        with_backward(sum_value_heads=_tiled),
        "grad_value",
    ),
    Mutant(
        "bias_gradient_not_summed",
        "gradients",
        "a broadcast bias gets a gradient of the scores' shape: jax#30593, TransformerEngine#2537",
        with_backward(bias=lambda gradient, bias: gradient),
        "grad_bias",
    ),
    Mutant(
        "bias_gradient_of_the_first_of_a_broadcast_axis",
        "gradients",
        "the gradient of a broadcast bias is not added up: jax#30593",
        with_backward(bias=_first_of_broadcast_axes),
        "grad_bias",
    ),
    Mutant(
        "bias_gradient_summed_over_heads_for_batch",
        "gradients",
        "the wrong axis is added up, silent where B == H: TransformerEngine#2537's kind",
        with_backward(bias=_heads_for_batch),
        "grad_bias",
    ),
    Mutant(
        "bias_gradient_averaged",
        "gradients",
        "the mean along broadcast axes for the sum",
        with_backward(bias=_averaged),
        "grad_bias",
    ),
    Mutant(
        "bias_gradient_zero",
        "gradients",
        "no gradient for the bias: jax#27184, pytorch#148476",
        with_backward(bias=lambda gradient, bias: np.zeros_like(bias)),
        "grad_bias",
    ),
    Mutant(
        "bias_gradient_scaled",
        "gradients",
        "the bias treated as if it were scaled with the scores: TransformerEngine#236's kind",
        with_backward(bias_logits=_bias_scaled),
        "grad_bias",
        diagnosis=("bias-gradient-scaled",),
    ),
    Mutant(
        "bias_gradient_through_the_softcap",
        "gradients",
        "the bias treated as if it were capped with the scores: onnx#7865's kind",
        with_backward(bias_logits=_bias_through_softcap),
        "grad_bias",
    ),
)
