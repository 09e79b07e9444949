"""Faults of a backward pass that makes the weights again, as fused kernels do, and of its precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.numpy_backend import _dot, _row_sum, _sum_over_queries, _weighted_sum
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array, Store
from attncheck.mutation.backward_forms import delta_read_as, weights_again, weights_made_again, weights_remembered
from attncheck.mutation.mask_forms import allowed_in, distance
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, equivalent, mutant
from attncheck.mutation.variant import Call, Steps

_faulty_gradients = partial(mutant, "gradients")


def _without(option: str) -> Steps:
    """Let the backward pass know nothing of an option that masks."""
    neutral = {option: False if option == "is_causal" else None}
    return weights_remembered(lambda call: weights_made_again(call, allowed_in(call, **neutral)))


for _option, _name, _defect in (
    ("mask", "mask", "p made again from scores that are not masked"),
    ("window", "window", "p made again without the window: jax#32300's kind"),
    ("key_lengths", "key_lengths", "p made again for padding too: tilelang#2461's kind"),
    ("is_causal", "causal", "the gradient sees the future: keras#23038's kind"),
):
    _faulty_gradients(_without, at="grad_query", defect=_defect, name=f"{_name}_ignored_in_the_backward_pass")(_option)


def _causal_off_by(steps: int) -> Steps:
    """Let key j take part in the backward pass iff j <= i + steps."""

    def weights(call: Call) -> Array:
        if not call.is_causal:
            return call.weights
        allowed = allowed_in(call, is_causal=False) & (distance(call.weights) <= steps)
        return weights_again(np.where(allowed, call.unmasked, -np.inf), call.log_sum_exp)

    return weights_remembered(weights)


_faulty_gradients(
    _causal_off_by,
    at="grad_query",
    defect="j <= i + 1 in the backward pass alone: tt-metal#41215's kind",
    name="causal_sees_the_next_key_in_the_backward_pass",
)(1)
_faulty_gradients(
    _causal_off_by,
    at="grad_query",
    defect="j < i in the backward pass alone: onnxruntime#25927's kind",
    name="causal_without_its_own_key_in_the_backward_pass",
)(-1)


@_faulty_gradients(
    weights_remembered, at="grad_query", defect="p made again from scores without the bias: jax#32242's kind"
)
def bias_forgotten_in_the_backward_pass(call: Call) -> Array:
    if call.bias is None:
        return call.weights
    return weights_again(call.logits - np.where(np.isfinite(call.bias), call.bias, 0), call.log_sum_exp)


@_faulty_gradients(
    weights_remembered, at="grad_query", defect="p made again from scores that are not capped: vllm#7425's kind"
)
def softcap_forgotten_in_the_backward_pass(call: Call) -> Array:
    if call.softcap is None:
        return call.weights
    return weights_again(call.logits - call.stages["capped"] + call.stages["scores"], call.log_sum_exp)


def _from_log_sum_exp(change: Callable[[Array], Array]) -> Steps:
    """Make the weights from another log_sum_exp."""
    return weights_remembered(lambda call: weights_again(call.logits, change(call.log_sum_exp)))


@_faulty_gradients(_from_log_sum_exp, at="grad_query", defect="log2 written, log read: flashinfer#2113")
def backward_pass_reads_log_sum_exp_in_base_two(log_sum_exp: Array) -> Array:
    return np.asarray(log_sum_exp / np.asarray(np.log(2), log_sum_exp.dtype))


@_faulty_gradients(
    _from_log_sum_exp, at="grad_query", defect="statistics kept in 16 bits", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def backward_pass_reads_log_sum_exp_in_float16(log_sum_exp: Array) -> Array:
    return arithmetic.float16(log_sum_exp)


def _with_empty_rows(number: Callable[[int], float]) -> Steps:
    """Give the keys of rows in which nothing may be attended this weight in the backward pass."""

    def weights(call: Call) -> Array:
        filled = np.asarray(number(call.weights.shape[-1]), call.weights.dtype)
        return np.where(np.isneginf(call.log_sum_exp), filled, call.weights)

    return weights_remembered(weights)


@_faulty_gradients(
    _with_empty_rows,
    at="grad_query",
    defect="0 times infinity behind a right output: tensorflow#11756, jax#17070, iree#24178",
    diagnosis="empty-rows-nan",
)
def gradient_nan_at_an_empty_row(keys: int) -> float:
    return np.nan


@_faulty_gradients(
    _with_empty_rows,
    at="grad_query",
    defect="the output is set to 0, the weights of the backward pass are not: keras#21123's kind",
    diagnosis="empty-rows-uniform",
)
def gradient_uniform_at_an_empty_row(keys: int) -> float:
    return 1 / keys


@_faulty_gradients(
    weights_remembered,
    at="grad_query",
    defect="p is stored in bfloat16 for the backward pass",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def backward_weights_in_bfloat16(call: Call) -> Array:
    return arithmetic.bfloat16(call.weights)


@_faulty_gradients(
    weights_remembered,
    at="grad_query",
    defect="p is stored in float16 for the backward pass",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def backward_weights_in_float16(call: Call) -> Array:
    return arithmetic.float16(call.weights)


@_faulty_gradients(
    "attention_gradients._dot",
    at="grad_query",
    defect="dp is stored in bfloat16: pytorch#133671's kind",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def weight_gradient_in_bfloat16(grad_output: Array, value: Array) -> Array:
    return arithmetic.bfloat16(_dot(grad_output, value))


@_faulty_gradients(
    delta_read_as,
    at="grad_query",
    defect="delta = sum g o from an output that was rounded for storage",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def row_sum_from_an_output_in_bfloat16(call: Call, terms: Array) -> Array:
    return _row_sum(call.grad_output * arithmetic.bfloat16(call.stages["output"]))


def _tiles_kept_in(store: Store) -> Steps:
    """Add up tiles of 32 queries, each partial sum stored."""

    def product(weights: Array, rows: Array) -> Array:
        total = np.zeros((), weights.dtype)
        for start in range(0, weights.shape[-2], 32):
            tile = slice(start, start + 32)
            total = store(total + _sum_over_queries(weights[..., tile, :], rows[..., tile, :]))
        return total

    return {"_sum_over_queries": product}


_faulty_gradients(
    _tiles_kept_in,
    at="grad_key",
    defect="dk and dv are added up in the output's type: torch's CPU kernel",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
    name="gradients_kept_in_bfloat16_between_tiles",
)(arithmetic.bfloat16)


@_faulty_gradients(
    "_sum_over_queries",
    at="grad_key",
    defect="TF32 in the backward pass: pytorch#161022, mlx#3860",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def gradient_products_in_tf32(weights: Array, rows: Array) -> Array:
    return _sum_over_queries(arithmetic.tf32(weights), arithmetic.tf32(rows))


@_faulty_gradients(
    "attention_gradients._weighted_sum",
    at="grad_query",
    defect="TF32 in the backward pass, dq alone",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def query_gradient_in_tf32(grad_raw_scores: Array, key: Array) -> Array:
    return _weighted_sum(arithmetic.tf32(grad_raw_scores), key)


@equivalent(
    weights_remembered,
    defect="a clamp that has nothing to clamp",
    proof="No weight is above 1: all exponentials are at least 0, so every rounded partial sum is at least each of "
    "its terms, and a quotient of two numbers of which the divisor is not smaller does not round above 1. NaN stays "
    "NaN.",
)
def backward_weights_clipped_at_one(call: Call) -> Array:
    return np.minimum(call.weights, 1)
