"""Faults of gradients that show with two options together, or behind one tile of keys or queries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _sum_over_queries, _weighted_sum
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.backward_forms import (
    bias_logits_read_as,
    gradients_read_as,
    in_gradients,
    in_groups,
    of_keys,
    of_values,
    value_weights_read_as,
    weights_made_again,
    weights_remembered,
)
from attncheck.mutation.forward_forms import Product, with_bias, with_groups, with_softcap
from attncheck.mutation.mask_forms import allowed_in
from attncheck.mutation.mutant import KERNELS, mutant
from attncheck.mutation.variant import Call, Steps

_backward = partial(mutant, "gradients of pairs", dtypes=KERNELS, at="grad_query")


def _again_without(option: str, is_asked: Callable[[Call], bool]) -> Steps:
    """Make the weights again from scores that are masked in another way, where another option is given."""
    neutral = {option: False if option == "is_causal" else None}
    return weights_remembered(
        lambda call: weights_made_again(call, allowed_in(call, **neutral)) if is_asked(call) else call.weights
    )


for _name, _defect, _option, _is_asked in (
    (
        "window_ignored_in_the_backward_pass_of_groups",
        "p made again without the window where heads are shared: jax#32300's kind",
        "window",
        with_groups,
    ),
    (
        "causal_ignored_in_the_backward_pass_with_a_bias",
        "p made again from all keys where a bias is given: keras#23038's kind",
        "is_causal",
        with_bias,
    ),
    (
        "key_lengths_ignored_in_the_backward_pass_with_a_softcap",
        "p made again for padding behind a cap: onnxruntime#28379's kind",
        "key_lengths",
        with_softcap,
    ),
    (
        "mask_ignored_in_the_backward_pass_of_groups",
        "p made again without the mask where heads are shared: FlagGems#898's kind",
        "mask",
        with_groups,
    ),
):
    _backward(at="grad_query", defect=_defect, name=_name)(_again_without(_option, _is_asked))


def _without_slope(is_asked: Callable[[Call], bool]) -> Steps:
    """Forget the softcap on the way back."""
    missing: Steps = {"_cap_slope": lambda capped, softcap: np.ones_like(capped)}
    return in_gradients(lambda call: missing if is_asked(call) else {})


def _spread_along(call: Call, axis: int) -> bool:
    return call.bias is not None and bool(call.bias.shape[axis] == 1)


def _late_by_a_tile(tile: int) -> Steps:
    """Begin the loop over queries one tile behind the diagonal, from the second tile on."""

    def change(call: Call, weights: Array) -> Array:
        if not call.is_causal:
            return weights
        query, key = (np.arange(length) // tile for length in weights.shape[-2:])
        return np.where((query[:, np.newaxis] == key) & (key > 0), 0, weights)

    return value_weights_read_as(change)


for _tile in (16, 64):
    _backward(
        _late_by_a_tile,
        at="grad_value",
        defect="structure: the loop over tiles of queries begins behind the diagonal",
        name=f"causal_value_gradient_late_by_a_tile_of_{_tile}",
    )(_tile)


def _zero_from(first: Callable[[int], int]) -> Product:
    """Leave the gradient of keys or values at zero from this one on."""

    def product(weights: Array, rows: Array) -> Array:
        gradient = _sum_over_queries(weights, rows)
        gradient[..., first(gradient.shape[-2]) :, :] = 0
        return gradient

    return product


@_backward(gradients_read_as, at="grad_query", defect="structure: one block of 64 columns is written")
def query_gradient_beyond_width_64_zero(gradients: Stages) -> Stages:
    gradients["grad_query"][..., 64:] = 0
    return gradients


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_backward(_without_slope, "softcap_slope_missing_behind_a_mask",
    "the masked path forgets the cap on the way back: onnx#7865's kind",
    lambda call: "masked" in call.stages)
_backward(_without_slope, "softcap_slope_missing_with_a_bias",
    "the biased path forgets the cap on the way back: onnx#7865's kind",
    with_bias)
_backward(in_gradients, "query_gradient_scaled_twice_with_a_softcap",
    "structure: the scale is part of the cap's argument, and applied once more",
    lambda call: {} if call.softcap is None else {"_weighted_sum": lambda gradient, key: _weighted_sum(gradient,
        key) * call.factor})
# Keep the last query of a bias that all share, where causality writes row by row.
_backward(bias_logits_read_as, "bias_gradient_of_the_last_query_when_causal",
    "a bias that queries share is written row by row and not added up: jax#30593's kind",
    lambda call, gradient: gradient if not (call.is_causal and _spread_along(call, 2))
        else np.where((np.arange(gradient.shape[-2]) == gradient.shape[-2] - 1)[:, np.newaxis], gradient, 0),
    at="grad_bias")
_backward(bias_logits_read_as, "bias_gradient_of_the_first_batch_entry_with_key_lengths",
    "a bias that batch entries share is not added up: TransformerEngine#2537's kind",
    lambda call, gradient: gradient if call.key_lengths is None or not _spread_along(call, 0)
        else np.where((np.arange(len(gradient)) == 0)[:, np.newaxis, np.newaxis, np.newaxis], gradient, 0),
    at="grad_bias")
_backward(bias_logits_read_as, "bias_gradient_averaged_in_groups",
    "query heads of a group get the mean of their gradients: FlagGems#898's kind",
    lambda call, gradient: gradient if not call.has_groups or _spread_along(call, 1) else np.repeat(in_groups(gradient,
        call.key.shape[1]).mean(axis=2), gradient.shape[1] // call.key.shape[1], axis=1).astype(gradient.dtype),
    at="grad_bias")
_backward(bias_logits_read_as, "bias_gradient_zero_in_a_window",
    "no gradient for the bias where a window is given: jax#27184's kind",
    lambda call, gradient: gradient if call.window is None else np.zeros_like(gradient), at="grad_bias")
_backward(value_weights_read_as, "value_gradient_of_the_first_head_of_causal_groups",
    "the causal path reads one head of each group: FlagGems#898's kind",
    lambda call, weights: weights if not call.is_causal or not call.has_groups
        else np.where((np.arange(weights.shape[1]) % (weights.shape[1] // call.key.shape[1]) == 0)[:, np.newaxis,
        np.newaxis], weights, 0),
    at="grad_value")
_backward(of_keys, "key_gradient_behind_whole_tiles_of_64_zero",
    "the last tile of keys is not written: FlagGems#898's kind",
    _zero_from(lambda keys: keys - keys % 64 if keys > 64 else keys), at="grad_key")
_backward("_sum_over_queries", "key_and_value_gradients_beyond_128_keys_zero",
    "the grid of the backward pass has one tile of 128 keys: pytorch#158212's kind",
    _zero_from(lambda keys: 128), at="grad_key")
_backward(of_values, "value_gradient_of_the_first_128_queries",
    "the loop over tiles of queries runs once: pytorch#158212's kind",
    lambda weights, rows: _sum_over_queries(weights[..., :128, :], rows[..., :128, :]), at="grad_value")
_backward("attention_gradients._weighted_sum", "query_gradient_of_the_first_128_keys",
    "the loop over tiles of keys runs once: pytorch#158212's kind",
    lambda gradient, key: _weighted_sum(gradient[..., :128], key[..., :128, :]))
_backward("attention_gradients._row_sum", "row_sum_of_the_gradient_in_the_first_128_keys",
    "the sum over a row ends with its first tile: Odyssey#2134's kind",
    lambda terms: np.asarray(terms[..., :128].sum(axis=-1, keepdims=True)))
