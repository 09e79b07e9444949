"""Float32 attention whose products of matrices round their factors, as tensor cores do: right and too coarse ones.

A factor is rounded to nearest (oneDNN, TPUs, cuBLAS) or cut off, as a unit does that reads the leading bits of what it
is handed (triton#4574). Tensor cores cut partial sums off, too: Fasi, Higham, Mikaitis and Pranesh 2021.

Beside them: weights that are made as e^(s - L) from a log_sum_exp that was stored before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _row_maximum, _row_sum, softmax
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array, Store, sequential_matmul
from attncheck.mutation.backward_forms import in_gradients, stages_remembered, weights_again
from attncheck.mutation.forward_forms import Product, normalised, products_by
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, control, mutant
from attncheck.mutation.online import NEVER_HELD, Online
from attncheck.mutation.variant import Call, Steps, Variant

_SINGLE = ("float32",)
_SINGLE_BITS = 24
_ELEMENTS_AT_A_TIME = 1 << 15
"""Numbers that are added up at a time: a quarter of a megabyte stays near the processor."""


def rounded_product(store: Store, product: Product = np.matmul) -> Product:
    """Multiply matrices of rounded elements."""
    return lambda left, right: np.asarray(product(store(left), store(right)))


def in_two_parts(store: Store, product: Product = np.matmul) -> Product:
    """Multiply matrices of elements that are sums of two rounded numbers, without the product of both lesser parts."""

    def run(left: Array, right: Array) -> Array:
        high_left, high_right = store(left), store(right)
        low_left, low_right = (store(_rest(x, high)) for x, high in ((left, high_left), (right, high_right)))
        lesser = product(low_left, high_right) + product(high_left, low_right)
        return np.asarray(lesser + product(high_left, high_right))

    return run


def _rest(array: Array, part: Array) -> Array:
    return np.where(np.isfinite(array), array - part, 0).astype(array.dtype)


def block_product(terms: int) -> Product:
    """Multiply float32 matrices as a tensor core does: so many exact products and a running sum at a time.

    They are aligned to the largest of them, cut off below its 24th bit and added; the sum is cut off to 24 bits.
    """

    def run(left: Array, right: Array) -> Array:
        rows = max(1, _ELEMENTS_AT_A_TIME // max(1, right.size // max(1, right.shape[-2]) * (terms + 1)))
        if rows < left.shape[-2]:
            starts = range(0, left.shape[-2], rows)
            return np.concatenate([run(left[..., start : start + rows, :], right) for start in starts], axis=-2)
        shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
        total, wide = np.zeros(shape), (left.astype(np.float64), right.astype(np.float64))
        for start in range(0, left.shape[-1], terms):
            columns = range(start, min(start + terms, left.shape[-1]))
            parts = np.empty((1 + len(columns), *shape))
            parts[0] = total
            for number, column in enumerate(columns, 1):
                np.multiply(wide[0][..., :, column, None], wide[1][..., None, column, :], out=parts[number])
            total = _cut_sum(parts)
        return np.asarray(total.astype(left.dtype))

    return run


def _cut_sum(parts: Array) -> Array:
    """Add up along the first axis; what is handed over is written over."""
    last_bit = np.ldexp(1.0, np.frexp(np.abs(parts).max(axis=0))[1] - _SINGLE_BITS)
    np.divide(parts, last_bit, out=parts)
    np.trunc(parts, out=parts)
    np.multiply(parts, last_bit, out=parts)
    return arithmetic.to_bits(np.asarray(parts.sum(axis=0)), _SINGLE_BITS, truncate=True)


def steps_by(product: Product) -> Steps:
    """Use another product of matrices wherever there is one."""

    def additive_scores(
        query: Array,
        key: Array,
        query_weight: Array,
        key_weight: Array,
        score_vector: Array,
        *,
        score_bias: Array | None = None,
    ) -> Stages:
        hidden = product(query, query_weight)[..., :, np.newaxis, :] + product(key, key_weight)[..., np.newaxis, :, :]
        shifted = np.tanh(hidden if score_bias is None else hidden + score_bias)
        return {"scores": product(shifted, score_vector[:, np.newaxis])[..., 0]}

    return {**products_by(product), "additive_scores": additive_scores}


def variant_by(product: Product) -> Variant:
    """Return attention by another product of matrices."""
    return Variant(steps_by(product))


def _fused_by(product: Product, block: int) -> Steps:
    """Also take the softmax in blocks of keys; go back from log_sum_exp and the output, by products again."""

    def backward(call: Call) -> Steps:
        # Sum g o over the columns, as an einsum that becomes a product of matrices.
        rows = product(call.grad_output[..., np.newaxis, :], call.stages["output"][..., :, np.newaxis])
        return {
            "attention": stages_remembered(call, weights_again(call.logits, call.log_sum_exp)),
            "_row_sum": lambda terms: np.asarray(rows[..., 0]),
        }

    return {**steps_by(product), **Online(block, product=product).steps, **in_gradients(backward)}


_TF32, _BFLOAT16 = arithmetic.tf32, arithmetic.bfloat16
_CUT_TF32, _CUT_BFLOAT16 = arithmetic.truncated_tf32, arithmetic.truncated_bfloat16
_BY_FOUR, _BY_EIGHT = block_product(4), block_product(8)

for _name, _why, _steps, _rounding_model in (
    ("tf32_products", "factors rounded to TF32, sums in float32", steps_by(rounded_product(_TF32)), "tf32_products"),
    (
        "tf32_products_cut_off",
        "a unit that reads ten bits of the fraction, and cuts sums of four products off",
        steps_by(rounded_product(_CUT_TF32, _BY_FOUR)),
        "tf32_products",
    ),
    (
        "tf32_products_in_blocks_of_keys",
        "a fused kernel with factors cut off to TF32, sums of eight products cut off",
        _fused_by(rounded_product(_CUT_TF32, _BY_EIGHT), 64),
        "tf32_products",
    ),
    (
        "bfloat16_products",
        "factors rounded to bfloat16, sums in float32",
        steps_by(rounded_product(_BFLOAT16)),
        "bf16_products",
    ),
    (
        "bfloat16_products_cut_off",
        "factors cut off to bfloat16, sums of eight products cut off",
        steps_by(rounded_product(_CUT_BFLOAT16, _BY_EIGHT)),
        "bf16_products",
    ),
    (
        "bfloat16_products_in_blocks_of_keys",
        "a fused kernel with factors rounded to bfloat16",
        _fused_by(rounded_product(_BFLOAT16), 16),
        "bf16_products",
    ),
    (
        "bfloat16_products_in_three_passes",
        "each factor is the sum of two of bfloat16; the product of both lesser parts is left out",
        steps_by(in_two_parts(_BFLOAT16)),
        "bf16x3_products",
    ),
    (
        "bfloat16_products_in_three_passes_cut_off",
        "the same with factors and sums cut off",
        _fused_by(in_two_parts(_CUT_BFLOAT16, _BY_FOUR), 16),
        "bf16x3_products",
    ),
):
    control(
        why=_why,
        dtypes=_SINGLE,
        classes={"float32": _rounding_model},
        hidden=NEVER_HELD if "attention" in _steps else frozenset(),  # the softmax runs over blocks
        name=_name,
    )(_steps)


def _coarse(
    steps: Callable[[Product], Steps], *, defect: str, rounding_model: str, name: str
) -> Callable[[Product], Product]:
    """Register a product that is coarser than the class that it claims."""
    return mutant(
        "products",
        steps,
        at="query",
        defect=defect,
        dtypes=_SINGLE,
        diagnosis=ACCURACY_OF_16_BITS,
        classes={"float32": rounding_model},
        name=name,
    )


def _stored(store: Store) -> Product:
    return lambda left, right: sequential_matmul(left, right, store=store)


def _weights_alone(product: Product) -> Steps:
    """Average the values by another product, and take all others in TF32."""
    return {**steps_by(rounded_product(_TF32)), "attention._weighted_sum": product}


def _backward_alone(product: Product) -> Steps:
    """Go back by another product, and forward in TF32."""
    back = products_by(product)
    names = ("_dot", "_weighted_sum", "_sum_over_queries")
    return {**steps_by(rounded_product(_TF32)), **{f"attention_gradients.{name}": back[name] for name in names}}


_coarse(
    steps_by,
    defect="one pass of bfloat16 where TF32 is asked for",
    rounding_model="tf32_products",
    name="bfloat16_products_for_tf32",
)(rounded_product(_BFLOAT16))
_coarse(
    _weights_alone,
    defect="P V alone is taken in bfloat16",
    rounding_model="tf32_products",
    name="bfloat16_weights_for_tf32",
)(rounded_product(_BFLOAT16))
_coarse(
    _backward_alone,
    defect="running sums are kept in bfloat16 in the backward pass alone",
    rounding_model="tf32_products",
    name="tf32_backward_sums_in_bfloat16",
)(rounded_product(_TF32, _stored(_BFLOAT16)))
_coarse(
    steps_by, defect="running sums are kept in bfloat16", rounding_model="tf32_products", name="tf32_sums_in_bfloat16"
)(rounded_product(_TF32, _stored(_BFLOAT16)))
_coarse(
    steps_by,
    defect="TF32's bits with float16's range: above 65504 is infinity, small numbers lose bits",
    rounding_model="tf32_products",
    name="float16_products_for_tf32",
)(rounded_product(arithmetic.float16))
_coarse(
    steps_by,
    defect="running sums are kept in bfloat16, as its factors are",
    rounding_model="bf16_products",
    name="bfloat16_sums_in_bfloat16",
)(rounded_product(_BFLOAT16, _stored(_BFLOAT16)))
_coarse(
    steps_by,
    defect="more bits than bfloat16 has, and less range",
    rounding_model="bf16_products",
    name="float16_products_for_bfloat16",
)(rounded_product(arithmetic.float16))
_coarse(
    steps_by,
    defect="the lesser parts are forgotten",
    rounding_model="bf16x3_products",
    name="one_pass_of_bfloat16_for_three",
)(rounded_product(_BFLOAT16))
_coarse(
    steps_by,
    defect="the lesser part of one factor is forgotten",
    rounding_model="bf16x3_products",
    name="two_passes_of_bfloat16_for_three",
)(lambda left, right: in_two_parts(_BFLOAT16)(_BFLOAT16(left), right))
_coarse(
    steps_by,
    defect="one pass of TF32 for three of bfloat16",
    rounding_model="bf16x3_products",
    name="tf32_products_for_three_of_bfloat16",
)(rounded_product(_TF32))


_FROM_LOG_SUM_EXP = {"float64": "native_lse", "float32": "native_lse", "float16": "eager_lse"}


def _from_log_sum_exp(store: Store) -> Steps:
    """Take log_sum_exp first and store it, then make the weights of it."""

    def normalise(logits: Array) -> Stages:
        log_sum_exp = store(softmax(logits)["log_sum_exp"])
        return {"weights": weights_again(logits, log_sum_exp[..., np.newaxis]), "log_sum_exp": log_sum_exp}

    return normalised(normalise)


control(
    _from_log_sum_exp,
    why="L is stored, then p = exp(s - L): nothing is divided",
    classes=_FROM_LOG_SUM_EXP,
    name="weights_from_log_sum_exp",
)(arithmetic.exactly)


def _of_tiles(keys: int) -> Steps:
    """Take log_sum_exp in one pass over tiles of keys, merging two at a time, and the output in a second pass."""

    def normalise(logits: Array) -> Stages:
        log_sum_exp = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
        for start in range(0, logits.shape[-1], keys):
            tile = softmax(logits[..., start : start + keys])
            log_sum_exp = np.logaddexp(log_sum_exp, tile["log_sum_exp"][..., np.newaxis])
        return {"weights": weights_again(logits, log_sum_exp), "log_sum_exp": log_sum_exp[..., 0]}

    def average(weights: Array, value: Array) -> Array:
        output = np.zeros((*weights.shape[:-1], value.shape[-1]), weights.dtype)
        for start in range(0, weights.shape[-1], keys):
            output = output + weights[..., start : start + keys] @ value[..., start : start + keys, :]
        return output

    return {**normalised(normalise), "attention._weighted_sum": average}


control(
    _of_tiles,
    why="L in one pass over the keys, merged tile by tile, p = exp(s - L) in a second pass",
    dtypes=WIDE,  # the output is added up in the arrays' own format
    classes=_FROM_LOG_SUM_EXP,
    name="weights_from_log_sum_exp_in_tiles_of_16",
)(16)


@control(normalised, why="p = exp(log p): log-softmax, then an exponential", classes=_FROM_LOG_SUM_EXP)
def log_softmax_first(logits: Array) -> Stages:
    """Take the logarithms of the weights first."""
    maximum = _row_maximum(logits)
    shifted = logits - np.where(np.isinf(maximum), 0, maximum)
    total = np.where(np.isneginf(maximum), 1, _row_sum(np.exp(shifted)))
    return softmax(logits) | {"weights": np.exp(shifted - np.log(total))}


for _format, _defect, _store in (
    ("bfloat16", "L is rounded to 16 bits on its way to p = exp(s - L)", arithmetic.bfloat16),
    ("float16", "L is kept in float16 between two passes", arithmetic.float16),
):
    mutant(
        "denominator",
        _from_log_sum_exp,
        at="weights",
        defect=_defect,
        dtypes=WIDE,
        diagnosis=ACCURACY_OF_16_BITS,
        classes=_FROM_LOG_SUM_EXP,
        name=f"log_sum_exp_stored_in_{_format}",
    )(_store)
