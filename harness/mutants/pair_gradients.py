"""Faults of gradients that show with two options together, or behind one tile of keys or queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attncheck.mutants.backward import BACKWARD, Saved, for_query, for_rows, in_groups
from attncheck.mutants.mask_steps import ALLOWED, MaskRequest
from attncheck.mutants.mutant import KERNELS, Mutant
from attncheck.mutants.pairs import has_groups
from attncheck.mutants.recomputation import weights_again
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import times
from attncheck.mutants.variant import Variant, with_backward

Asked = Callable[[MaskRequest], bool]


def _again_without(is_asked: Asked, **neutral: Any) -> Variant:
    """Make the weights again from scores that are masked in another way, where another option is given."""

    def weights(saved: Saved) -> Array:
        allowed = ALLOWED(replace(saved.request, **neutral) if is_asked(saved.request) else saved.request)
        if np.array_equal(allowed, saved.allowed):
            return saved.weights
        return weights_again(np.where(allowed, saved.unmasked, -np.inf), saved.log_sum_exp)

    return with_backward(weights=weights)


def _has_bias(request: MaskRequest) -> bool:
    return request.bias is not None


def _has_softcap(request: MaskRequest) -> bool:
    return request.softcap is not None


def _without_slope(is_asked: Asked) -> Variant:
    def slope(saved: Saved, softcap: float) -> Array:
        steep = BACKWARD.slope(saved, softcap)
        return np.ones_like(steep) if is_asked(saved.request) else steep

    return with_backward(slope=slope)


def _scaled_twice(grad_scores: Array, saved: Saved) -> Array:
    gradient = for_query(grad_scores, saved)
    return gradient if saved.request.softcap is None else times(gradient, saved.request.scale)


def _spread_along(saved: Saved, axis: int) -> bool:
    bias = saved.request.bias
    return bias is not None and bias.shape[axis] == 1


def _last_query(saved: Saved, gradient: Array) -> Array:
    """Keep the last query of a bias that all share, where causality writes row by row."""
    if not (saved.request.is_causal and _spread_along(saved, 2)):
        return gradient
    queries = gradient.shape[-2]
    return np.where((np.arange(queries) == queries - 1)[:, np.newaxis], gradient, 0)


def _first_entry_with_lengths(saved: Saved, gradient: Array) -> Array:
    if saved.request.key_lengths is None or not _spread_along(saved, 0):
        return gradient
    return np.where((np.arange(len(gradient)) == 0)[:, np.newaxis, np.newaxis, np.newaxis], gradient, 0)


def _mean_of_groups(saved: Saved, gradient: Array) -> Array:
    if saved.kv_heads == gradient.shape[1] or _spread_along(saved, 1):
        return gradient
    mean = in_groups(gradient, saved.kv_heads).mean(axis=2)
    return np.repeat(mean, gradient.shape[1] // saved.kv_heads, axis=1).astype(gradient.dtype)


def _bias_zero_in_a_window(saved: Saved, gradient: Array) -> Array:
    return gradient if saved.request.window is None else np.zeros_like(gradient)


def _first_head_when_causal(saved: Saved, weights: Array) -> Array:
    if not saved.request.is_causal or not has_groups(saved.request):
        return weights
    heads = weights.shape[1]
    first = np.arange(heads) % (heads // saved.kv_heads) == 0
    return np.where(first[:, np.newaxis, np.newaxis], weights, 0)


def _late_by_a_tile(tile: int) -> Variant:
    """Begin the loop over queries one tile behind the diagonal, from the second tile on."""

    def value_weights(saved: Saved, weights: Array) -> Array:
        if not saved.request.is_causal:
            return weights
        query, key = (np.arange(length) // tile for length in weights.shape[-2:])
        skipped = (query[:, np.newaxis] == key) & (key > 0)
        return np.where(skipped, 0, weights)

    return with_backward(value_weights=value_weights)


def _rows_of_keys(first: Callable[[int], int]) -> Callable[[Array, Array], Array]:
    """Leave the gradient of keys or values at zero from this one on."""

    def product(by_key: Array, by_query: Array) -> Array:
        gradient = for_rows(by_key, by_query)
        gradient[..., first(gradient.shape[-2]) :, :] = 0
        return gradient

    return product


def _queries_up_to(most: int) -> Callable[[Array, Array], Array]:
    return lambda by_key, by_query: for_rows(by_key[..., :most, :], by_query[..., :most, :])


def _keys_up_to(most: int) -> Callable[[Array, Saved], Array]:
    return lambda grad_scores, saved: np.asarray(grad_scores[..., :most] @ saved.key[..., :most, :])


def _whole(tile: int) -> Callable[[int], int]:
    return lambda keys: keys - keys % tile if keys > tile else keys


def _half_the_width(grad_scores: Array, saved: Saved) -> Array:
    gradient = for_query(grad_scores, saved)
    gradient[..., 64:] = 0
    return gradient


def _delta_of_the_first_keys(saved: Saved, grad_output: Array, weights: Array, gradient: Array) -> Array:
    return np.asarray((weights * gradient)[..., :128].sum(axis=-1, keepdims=True))


def _backward(name: str, defect: str, backend: Variant, first_wrong_stage: str) -> Mutant:
    return Mutant(name, "gradients of pairs", defect, backend, first_wrong_stage, KERNELS)


MUTANTS = (
    _backward(
        "window_ignored_in_the_backward_pass_of_groups",
        "p made again without the window where heads are shared: jax#32300's kind",
        _again_without(has_groups, window=None),
        "grad_query",
    ),
    _backward(
        "causal_ignored_in_the_backward_pass_with_a_bias",
        "p made again from all keys where a bias is given: keras#23038's kind",
        _again_without(_has_bias, is_causal=False),
        "grad_query",
    ),
    _backward(
        "key_lengths_ignored_in_the_backward_pass_with_a_softcap",
        "p made again for padding behind a cap: onnxruntime#28379's kind",
        _again_without(_has_softcap, key_lengths=None),
        "grad_query",
    ),
    _backward(
        "mask_ignored_in_the_backward_pass_of_groups",
        "p made again without the mask where heads are shared: FlagGems#898's kind",
        _again_without(has_groups, mask=None),
        "grad_query",
    ),
    _backward(
        "softcap_slope_missing_behind_a_mask",
        "the masked path forgets the cap on the way back: onnx#7865's kind",
        _without_slope(lambda request: request.forbids),
        "grad_query",
    ),
    _backward(
        "softcap_slope_missing_with_a_bias",
        "the biased path forgets the cap on the way back: onnx#7865's kind",
        _without_slope(_has_bias),
        "grad_query",
    ),
    _backward(
        "query_gradient_scaled_twice_with_a_softcap",
        "structure: the scale is part of the cap's argument, and applied once more",
        with_backward(query=_scaled_twice),
        "grad_query",
    ),
    _backward(
        "bias_gradient_of_the_last_query_when_causal",
        "a bias that queries share is written row by row and not added up: jax#30593's kind",
        with_backward(bias_logits=_last_query),
        "grad_bias",
    ),
    _backward(
        "bias_gradient_of_the_first_batch_entry_with_key_lengths",
        "a bias that batch entries share is not added up: TransformerEngine#2537's kind",
        with_backward(bias_logits=_first_entry_with_lengths),
        "grad_bias",
    ),
    _backward(
        "bias_gradient_averaged_in_groups",
        "query heads of a group get the mean of their gradients: FlagGems#898's kind",
        with_backward(bias_logits=_mean_of_groups),
        "grad_bias",
    ),
    _backward(
        "bias_gradient_zero_in_a_window",
        "no gradient for the bias where a window is given: jax#27184's kind",
        with_backward(bias_logits=_bias_zero_in_a_window),
        "grad_bias",
    ),
    _backward(
        "value_gradient_of_the_first_head_of_causal_groups",
        "the causal path reads one head of each group: FlagGems#898's kind",
        with_backward(value_weights=_first_head_when_causal),
        "grad_value",
    ),
    *(
        _backward(
            f"causal_value_gradient_late_by_a_tile_of_{tile}",
            "structure: the loop over tiles of queries begins behind the diagonal",
            _late_by_a_tile(tile),
            "grad_value",
        )
        for tile in (16, 64)
    ),
    _backward(
        "key_gradient_behind_whole_tiles_of_64_zero",
        "the last tile of keys is not written: FlagGems#898's kind",
        with_backward(key=_rows_of_keys(_whole(64))),
        "grad_key",
    ),
    _backward(
        "key_and_value_gradients_beyond_128_keys_zero",
        "the grid of the backward pass has one tile of 128 keys: pytorch#158212's kind",
        with_backward(key=_rows_of_keys(lambda keys: 128), value=_rows_of_keys(lambda keys: 128)),
        "grad_key",
    ),
    _backward(
        "value_gradient_of_the_first_128_queries",
        "the loop over tiles of queries runs once: pytorch#158212's kind",
        with_backward(value=_queries_up_to(128)),
        "grad_value",
    ),
    _backward(
        "query_gradient_of_the_first_128_keys",
        "the loop over tiles of keys runs once: pytorch#158212's kind",
        with_backward(query=_keys_up_to(128)),
        "grad_query",
    ),
    _backward(
        "query_gradient_beyond_width_64_zero",
        "structure: one block of 64 columns is written",
        with_backward(query=_half_the_width),
        "grad_query",
    ),
    _backward(
        "row_sum_of_the_gradient_in_the_first_128_keys",
        "the sum over a row ends with its first tile: Odyssey#2134's kind",
        with_backward(delta=_delta_of_the_first_keys),
        "grad_query",
    ),
)
