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

_faulty_gradients = partial(mutant, "gradients", at="grad_query")


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


def _from_log_sum_exp(change: Callable[[Array], Array]) -> Steps:
    """Make the weights from another log_sum_exp."""
    return weights_remembered(lambda call: weights_again(call.logits, change(call.log_sum_exp)))


def _with_empty_rows(number: Callable[[int], float]) -> Steps:
    """Give the keys of rows in which nothing may be attended this weight in the backward pass."""

    def weights(call: Call) -> Array:
        filled = np.asarray(number(call.weights.shape[-1]), call.weights.dtype)
        return np.where(np.isneginf(call.log_sum_exp), filled, call.weights)

    return weights_remembered(weights)


def _tiles_kept_in(store: Store) -> Steps:
    """Add up tiles of 32 queries, each partial sum stored."""

    def product(weights: Array, rows: Array) -> Array:
        total = np.zeros((), weights.dtype)
        for start in range(0, weights.shape[-2], 32):
            tile = slice(start, start + 32)
            total = store(total + _sum_over_queries(weights[..., tile, :], rows[..., tile, :]))
        return total

    return {"_sum_over_queries": product}


@equivalent(
    weights_remembered,
    defect="a clamp that has nothing to clamp",
    proof="No weight is above 1: all exponentials are at least 0, so every rounded partial sum is at least each of "
    "its terms, and a quotient of two numbers of which the divisor is not smaller does not round above 1. NaN stays "
    "NaN.",
)
def backward_weights_clipped_at_one(call: Call) -> Array:
    return np.minimum(call.weights, 1)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_gradients(_causal_off_by, "causal_sees_the_next_key_in_the_backward_pass",
    "j <= i + 1 in the backward pass alone: tt-metal#41215's kind",
    1)
_faulty_gradients(_causal_off_by, "causal_without_its_own_key_in_the_backward_pass",
    "j < i in the backward pass alone: onnxruntime#25927's kind",
    -1)
_faulty_gradients(weights_remembered, "bias_forgotten_in_the_backward_pass",
    "p made again from scores without the bias: jax#32242's kind",
    lambda call: call.weights if call.bias is None else weights_again(call.logits - np.where(np.isfinite(call.bias),
        call.bias, 0), call.log_sum_exp))
_faulty_gradients(weights_remembered, "softcap_forgotten_in_the_backward_pass",
    "p made again from scores that are not capped: vllm#7425's kind",
    lambda call: call.weights if call.softcap is None
        else weights_again(call.logits - call.stages["capped"] + call.stages["scores"], call.log_sum_exp))
_faulty_gradients(_from_log_sum_exp, "backward_pass_reads_log_sum_exp_in_base_two",
    "log2 written, log read: flashinfer#2113",
    lambda log_sum_exp: np.asarray(log_sum_exp / np.asarray(np.log(2), log_sum_exp.dtype)))
_faulty_gradients(_from_log_sum_exp, "backward_pass_reads_log_sum_exp_in_float16", "statistics kept in 16 bits",
    lambda log_sum_exp: arithmetic.float16(log_sum_exp), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_gradients(_with_empty_rows, "gradient_nan_at_an_empty_row",
    "0 times infinity behind a right output: tensorflow#11756, jax#17070, iree#24178",
    lambda keys: np.nan, diagnosis="empty-rows-nan")
_faulty_gradients(_with_empty_rows, "gradient_uniform_at_an_empty_row",
    "the output is set to 0, the weights of the backward pass are not: keras#21123's kind",
    lambda keys: 1 / keys, diagnosis="empty-rows-uniform")
_faulty_gradients(weights_remembered, "backward_weights_in_bfloat16", "p is stored in bfloat16 for the backward pass",
    lambda call: arithmetic.bfloat16(call.weights), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_gradients(weights_remembered, "backward_weights_in_float16", "p is stored in float16 for the backward pass",
    lambda call: arithmetic.float16(call.weights), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_gradients("attention_gradients._dot", "weight_gradient_in_bfloat16",
    "dp is stored in bfloat16: pytorch#133671's kind",
    lambda grad_output, value: arithmetic.bfloat16(_dot(grad_output, value)), dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
_faulty_gradients(delta_read_as, "row_sum_from_an_output_in_bfloat16",
    "delta = sum g o from an output that was rounded for storage",
    lambda call, terms: _row_sum(call.grad_output * arithmetic.bfloat16(call.stages["output"])), dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
_faulty_gradients(_tiles_kept_in, "gradients_kept_in_bfloat16_between_tiles",
    "dk and dv are added up in the output's type: torch's CPU kernel",
    arithmetic.bfloat16, at="grad_key", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_gradients("_sum_over_queries", "gradient_products_in_tf32",
    "TF32 in the backward pass: pytorch#161022, mlx#3860",
    lambda weights, rows: _sum_over_queries(arithmetic.tf32(weights), arithmetic.tf32(rows)), at="grad_key",
    dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_gradients("attention_gradients._weighted_sum", "query_gradient_in_tf32", "TF32 in the backward pass, dq alone",
    lambda grad_raw_scores, key: _weighted_sum(arithmetic.tf32(grad_raw_scores), key), dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
