"""Faults of a backward pass that makes the weights again, as fused kernels do, and of its precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.backward import Saved, for_query, for_rows, grad_weights
from attncheck.mutants.mask_steps import ALLOWED, MaskRequest, distance
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.variant import Variant, with_backward


def weights_again(logits: Array, log_sum_exp: Array) -> Array:
    """Make the weights from logits and log_sum_exp (B, H, Lq, 1); a row without any key has none."""
    exponentials = np.exp(logits - np.where(np.isinf(log_sum_exp), 0, log_sum_exp))
    return np.where(np.isneginf(log_sum_exp), 0, exponentials)


def _asked(change: Callable[[MaskRequest], MaskRequest]) -> Variant:
    """Let the backward pass be asked for another mask than the forward pass; where that is none, nothing changes."""

    def weights(saved: Saved) -> Array:
        allowed = ALLOWED(change(saved.request))
        if np.array_equal(allowed, saved.allowed):
            return saved.weights
        return weights_again(np.where(allowed, saved.unmasked, -np.inf), saved.log_sum_exp)

    return with_backward(weights=weights)


def _causal_off_by(steps: int) -> Variant:
    def weights(saved: Saved) -> Array:
        request = saved.request
        if not request.is_causal:
            return saved.weights
        diagonal = distance(request) <= steps
        allowed = ALLOWED(replace(request, is_causal=False)) & diagonal
        return weights_again(np.where(allowed, saved.unmasked, -np.inf), saved.log_sum_exp)

    return with_backward(weights=weights)


def _without_bias(saved: Saved) -> Array:
    bias = saved.request.bias
    if bias is None:
        return saved.weights
    return weights_again(saved.logits - np.where(np.isfinite(bias), bias, 0), saved.log_sum_exp)


def _without_softcap(saved: Saved) -> Array:
    if saved.request.softcap is None:
        return saved.weights
    return weights_again(saved.logits - saved.stages["capped"] + saved.stages["scores"], saved.log_sum_exp)


def _from_log_sum_exp(change: Store) -> Variant:
    return with_backward(weights=lambda saved: weights_again(saved.logits, change(saved.log_sum_exp)))


def _with_empty_rows(number: Callable[[int], float]) -> Variant:
    """Give the keys of rows in which nothing may be attended this weight in the backward pass."""

    def weights(saved: Saved) -> Array:
        filled = np.asarray(number(saved.weights.shape[-1]), saved.weights.dtype)
        return np.where(np.isneginf(saved.log_sum_exp), filled, saved.weights)

    return with_backward(weights=weights)


def _tiles_kept_in(store: Store) -> Callable[[Array, Array], Array]:
    """Add up tiles of 32 queries, each partial sum stored."""

    def product(by_key: Array, by_query: Array) -> Array:
        total = np.zeros((), by_key.dtype)
        for start in range(0, by_key.shape[-2], 32):
            tile = slice(start, start + 32)
            total = store(total + for_rows(by_key[..., tile, :], by_query[..., tile, :]))
        return total

    return product


def _delta_from_rounded_output(saved: Saved, grad_output: Array, weights: Array, gradient: Array) -> Array:
    output = rounding.bfloat16(saved.stages["output"])
    return np.asarray((grad_output * output).sum(axis=-1, keepdims=True))


def _products_in_tf32(by_key: Array, by_query: Array) -> Array:
    return for_rows(rounding.tf32(by_key), rounding.tf32(by_query))


MUTANTS = (
    Mutant(
        "mask_ignored_in_the_backward_pass",
        "gradients",
        "p made again from scores that are not masked",
        _asked(lambda request: replace(request, mask=None)),
        "grad_query",
    ),
    Mutant(
        "window_ignored_in_the_backward_pass",
        "gradients",
        "p made again without the window: jax#32300's kind",
        _asked(lambda request: replace(request, window=None)),
        "grad_query",
    ),
    Mutant(
        "key_lengths_ignored_in_the_backward_pass",
        "gradients",
        "p made again for padding too: tilelang#2461's kind",
        _asked(lambda request: replace(request, key_lengths=None)),
        "grad_query",
    ),
    Mutant(
        "causal_ignored_in_the_backward_pass",
        "gradients",
        "the gradient sees the future: keras#23038's kind",
        _asked(lambda request: replace(request, is_causal=False)),
        "grad_query",
    ),
    Mutant(
        "causal_sees_the_next_key_in_the_backward_pass",
        "gradients",
        "j <= i + 1 in the backward pass alone: tt-metal#41215's kind",
        _causal_off_by(1),
        "grad_query",
    ),
    Mutant(
        "causal_without_its_own_key_in_the_backward_pass",
        "gradients",
        "j < i in the backward pass alone: onnxruntime#25927's kind",
        _causal_off_by(-1),
        "grad_query",
    ),
    Mutant(
        "bias_forgotten_in_the_backward_pass",
        "gradients",
        "p made again from scores without the bias: jax#32242's kind",
        with_backward(weights=_without_bias),
        "grad_query",
    ),
    Mutant(
        "softcap_forgotten_in_the_backward_pass",
        "gradients",
        "p made again from scores that are not capped: vllm#7425's kind",
        with_backward(weights=_without_softcap),
        "grad_query",
    ),
    Mutant(
        "backward_pass_reads_log_sum_exp_in_base_two",
        "gradients",
        "log2 written, log read: flashinfer#2113",
        _from_log_sum_exp(lambda statistics: statistics / np.asarray(np.log(2), statistics.dtype)),
        "grad_query",
    ),
    Mutant(
        "backward_pass_reads_log_sum_exp_in_float16",
        "gradients",
        "statistics kept in 16 bits",
        _from_log_sum_exp(rounding.float16),
        "grad_query",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "gradient_nan_at_an_empty_row",
        "gradients",
        "0 times infinity behind a right output: tensorflow#11756, jax#17070, iree#24178",
        _with_empty_rows(lambda keys: np.nan),
        "grad_query",
        diagnosis=("empty-rows-nan",),
    ),
    Mutant(
        "gradient_uniform_at_an_empty_row",
        "gradients",
        "the output is set to 0, the weights of the backward pass are not: keras#21123's kind",
        _with_empty_rows(lambda keys: 1 / keys),
        "grad_query",
        diagnosis=("empty-rows-uniform",),
    ),
    Mutant(
        "backward_weights_in_bfloat16",
        "gradients",
        "p is stored in bfloat16 for the backward pass",
        with_backward(weights=lambda saved: rounding.bfloat16(saved.weights)),
        "grad_query",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "backward_weights_in_float16",
        "gradients",
        "p is stored in float16 for the backward pass",
        with_backward(weights=lambda saved: rounding.float16(saved.weights)),
        "grad_query",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "weight_gradient_in_bfloat16",
        "gradients",
        "dp is stored in bfloat16: pytorch#133671's kind",
        with_backward(grad_weights=lambda saved, grad_output: rounding.bfloat16(grad_weights(saved, grad_output))),
        "grad_query",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "row_sum_from_an_output_in_bfloat16",
        "gradients",
        "delta = sum g o from an output that was rounded for storage",
        with_backward(delta=_delta_from_rounded_output),
        "grad_query",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "gradients_kept_in_bfloat16_between_tiles",
        "gradients",
        "dk and dv are added up in the output's type: torch's CPU kernel",
        with_backward(key=_tiles_kept_in(rounding.bfloat16), value=_tiles_kept_in(rounding.bfloat16)),
        "grad_key",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "gradient_products_in_tf32",
        "gradients",
        "TF32 in the backward pass: pytorch#161022, mlx#3860",
        with_backward(key=_products_in_tf32, value=_products_in_tf32),
        "grad_key",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "query_gradient_in_tf32",
        "gradients",
        "TF32 in the backward pass, dq alone",
        with_backward(query=lambda gradient, saved: for_query(rounding.tf32(gradient), saved)),
        "grad_query",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
)
