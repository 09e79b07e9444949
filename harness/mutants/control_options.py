"""Right implementations of windows, caches, groups, softcaps and gradients that compute in another way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.backward import Backward, Saved, for_query, for_rows
from attncheck.mutants.mask_steps import MaskRequest, is_empty, without_a_key
from attncheck.mutants.mutant import WIDE, Control
from attncheck.mutants.online import NEVER_HELD
from attncheck.mutants.recomputation import weights_again
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import SOFTMAX, CosineScore, DotScore, dot, times
from attncheck.mutants.variant import Variant, with_backward


def _delta_from_output(saved: Saved, grad_output: Array, weights: Array, gradient: Array) -> Array:
    return np.asarray((grad_output * saved.stages["output"]).sum(axis=-1, keepdims=True))


def _from_log_sum_exp(saved: Saved) -> Array:
    return weights_again(saved.logits, saved.log_sum_exp)


def _in_tiles(rows: int) -> Callable[[Array, Array], Array]:
    """Add up tiles of so many queries, one after the other."""

    def product(by_key: Array, by_query: Array) -> Array:
        total = for_rows(by_key[..., :rows, :], by_query[..., :rows, :])
        for start in range(rows, by_key.shape[-2], rows):
            tile = slice(start, start + rows)
            total = total + for_rows(by_key[..., tile, :], by_query[..., tile, :])
        return total

    return product


def _scaled_last(grad_scores: Array, saved: Saved) -> Array:
    return times(for_query(grad_scores, saved), saved.request.scale)


def _sech_squared(saved: Saved, softcap: float) -> Array:
    return np.asarray(1 / np.cosh(saved.stages["scores"] / softcap) ** 2)


def _in_groups(left: Array, right: Array) -> Array:
    """Multiply (B, H, L, X) with (B, Hkv, X, Y), each query head with its group's."""
    batch, kv_heads = right.shape[:2]
    grouped = left.reshape(batch, kv_heads, left.shape[1] // kv_heads, *left.shape[2:])
    product = np.einsum("bkglx,bkxy->bkgly", grouped, right)
    return np.asarray(product.reshape(*left.shape[:3], right.shape[-1]))


_GROUPED = Variant(
    repeat_key=lambda inputs, heads: inputs,
    repeat_value=lambda inputs, heads: inputs,
    score=DotScore(dot=lambda query, key: _in_groups(query, np.swapaxes(key, -1, -2))),
    average=lambda logits, weights, value: _in_groups(weights, value),
    backward=Backward(
        grad_weights=lambda saved, grad_output: _in_groups(grad_output, np.swapaxes(saved.value, -1, -2)),
        query=lambda grad_scores, saved: _in_groups(grad_scores, saved.key),
    ),
)


def _gathered(logits: Array, unmasked: Array) -> Stages:
    """Take only the keys that may be attended, side by side, and put their weights back where they belong."""
    order = np.argsort(logits == -np.inf, axis=-1, kind="stable")
    stages = SOFTMAX(np.take_along_axis(logits, order, axis=-1), unmasked)
    weights = np.zeros_like(logits)
    np.put_along_axis(weights, order, stages["weights"], axis=-1)
    return stages | {"weights": weights}


def _two_halves(logits: Array, weights: Array, value: Array) -> Array:
    """Attend to the first and to the last half of the keys, and merge the two by their log_sum_exp."""
    half = logits.shape[-1] // 2
    parts = [(logits[..., :half], value[..., :half, :]), (logits[..., half:], value[..., half:, :])]
    softmaxes = [SOFTMAX(logits, logits) for logits, _ in parts]
    statistics = np.stack([stages["log_sum_exp"] for stages in softmaxes], axis=-1)
    shares = SOFTMAX(statistics, statistics)["weights"]
    averages = [stages["weights"] @ value for stages, (_, value) in zip(softmaxes, parts, strict=True)]
    return np.asarray(averages[0] * shares[..., :1] + averages[1] * shares[..., 1:])


def _by_expm1(stages: Stages, softcap: float, scale: float) -> Array:
    argument: Array = stages["scores"] / softcap
    grown = np.expm1(-2 * np.abs(argument))  # e^-2|x| - 1 loses nothing at small x, and cannot overflow
    return np.asarray(softcap * np.copysign(-grown / (2 + grown), argument))


def _divided_after_the_product(query: Array, key: Array, scale: float | None) -> Array:
    norm = CosineScore().norm
    cosine = dot(query, key) / (norm(query) * np.swapaxes(norm(key), -1, -2))
    return np.asarray(cosine if scale is None else cosine * scale)


def _least_finite(logits: Array, request: MaskRequest) -> Array:
    if request.empty_rows != "uniform":
        return without_a_key(logits, request)
    return np.where(is_empty(logits), np.finfo(logits.dtype).min, logits)


CONTROLS = (
    Control(
        "uniform_rows_by_the_least_finite_number",
        "equal scores have equal weights, whatever they are: torch.finfo(dtype).min in place of masked scores",
        Variant(without_a_key=_least_finite),
    ),
    Control(
        "masks_that_are_added",
        "the gradient of a row without a key goes on to its scores, where the mask is a sum and no selection",
        with_backward(selected=lambda saved, gradient: gradient),
    ),
    Control(
        "gradient_row_sum_from_the_output",
        "sum p dp = g o: Dao et al. 2022, FlashAttention, appendix B.4",
        with_backward(delta=_delta_from_output),
        WIDE,  # in 16 bits the class eager has no row sum from an output that was stored
    ),
    Control(
        "backward_weights_from_log_sum_exp",
        "p = exp(s - L), made again in the backward pass, and the row sum from the output",
        with_backward(weights=_from_log_sum_exp, delta=_delta_from_output),
        WIDE,
    ),
    Control(
        "fused_backward_pass",
        "weights made again, row sum from the output, sums in tiles of 64 queries",
        with_backward(weights=_from_log_sum_exp, delta=_delta_from_output, key=_in_tiles(64), value=_in_tiles(64)),
        WIDE,
    ),
    Control(
        "gradients_in_tiles_of_16_queries",
        "sums over queries tile by tile",
        with_backward(key=_in_tiles(16), value=_in_tiles(16)),
    ),
    Control(
        "softmax_gradient_distributed",
        "p dp - p delta for p (dp - delta), as automatic differentiation gives it",
        with_backward(grad_logits=lambda weights, gradient, delta: weights * gradient - weights * delta),
    ),
    Control(
        "query_gradient_scaled_last",
        "a (ds k) for (a ds) k",
        with_backward(query_scale=lambda gradient, scale: gradient, query=_scaled_last),
    ),
    Control("softcap_slope_by_cosh", "1 - tanh^2 = 1 / cosh^2", with_backward(slope=_sech_squared)),
    Control("softcap_by_expm1", "tanh x = -expm1(-2x) / (2 + expm1(-2x))", Variant(cap=_by_expm1)),
    Control("grouped_heads_by_einsum", "query heads of a group side by side, nothing repeated", _GROUPED, WIDE),
    Control(
        "attended_keys_gathered",
        "what a window or a mask forbids is left out of the sums",
        Variant(normalise=_gathered),
    ),
    Control(
        "halves_of_the_keys_merged",
        "each half has its softmax, merged by log_sum_exp as in split decoding",
        Variant(average=_two_halves, hidden=NEVER_HELD),
    ),
    Control(
        "cosine_divided_after_the_product",
        "q k / (|q| |k|) for (q / |q|) (k / |k|)",
        Variant(cosine=_divided_after_the_product),
    ),
)
