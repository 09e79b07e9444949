"""Float32 attention whose products of matrices round their factors, as tensor cores do: right and too coarse ones.

A factor is rounded to nearest (oneDNN, TPUs, cuBLAS) or cut off, as a unit does that reads the leading bits of what it
is handed (triton#4574). Tensor cores cut partial sums off, too: Fasi, Higham, Mikaitis and Pranesh 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.backward import Backward, Saved, backward_by
from attncheck.mutants.mutant import Control, Mutant
from attncheck.mutants.online import NEVER_HELD, Online
from attncheck.mutants.recomputation import weights_again
from attncheck.mutants.rounding import Array, Store, sequential_matmul
from attncheck.mutants.steps import CosineScore, DotScore
from attncheck.mutants.variant import Variant

Product = Callable[[Array, Array], Array]

_SINGLE = ("float32",)
_SINGLE_BITS = 24


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
        shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
        total, wide = np.zeros(shape), (left.astype(np.float64), right.astype(np.float64))
        for start in range(0, left.shape[-1], terms):
            columns = range(start, min(start + terms, left.shape[-1]))
            parts = [total, *(wide[0][..., :, column, None] * wide[1][..., None, column, :] for column in columns)]
            total = _cut_sum(parts)
        return np.asarray(total.astype(left.dtype))

    return run


def _cut_sum(parts: list[Array]) -> Array:
    largest = np.max([np.abs(part) for part in parts], axis=0)
    last_bit = np.ldexp(1.0, np.frexp(largest)[1] - _SINGLE_BITS)
    total = np.sum([np.trunc(part / last_bit) * last_bit for part in parts], axis=0)
    return rounding.to_bits(np.asarray(total), _SINGLE_BITS, truncate=True)


def variant_by(product: Product) -> Variant:
    """Use another product of matrices wherever there is one."""

    def additive(
        query: Array, key: Array, query_weight: Array, key_weight: Array, vector: Array, bias: Array | None
    ) -> Array:
        hidden = product(query, query_weight)[..., :, np.newaxis, :] + product(key, key_weight)[..., np.newaxis, :, :]
        shifted = np.tanh(hidden if bias is None else hidden + bias)
        return product(shifted, vector[:, np.newaxis])[..., 0]

    def cosine(query: Array, key: Array, scale: float | None) -> Array:
        norm = CosineScore().norm
        scores = product(query / norm(query), np.swapaxes(key / norm(key), -1, -2))
        return scores if scale is None else scores * scale

    def project(inputs: Array, weight: Array, bias: Array | None) -> Array:
        projected = product(inputs, weight)
        return projected if bias is None else projected + bias

    return Variant(
        score=DotScore(dot=lambda query, key: product(query, np.swapaxes(key, -1, -2))),
        cosine=cosine,
        bilinear=lambda query, key, weight: product(product(query, weight), np.swapaxes(key, -1, -2)),
        additive=additive,
        average=lambda logits, weights, value: product(weights, value),
        backward=backward_by(product),
        project=project,
        project_output=lambda context, merged, weight, bias: project(merged, weight, bias),
    )


def fused_by(product: Product, block: int) -> Variant:
    """Also take the softmax in blocks of keys; go back from log_sum_exp and the output, by products again."""
    online = Online(block, product=product)
    whole = variant_by(product)
    assert isinstance(whole.backward, Backward)
    backward = replace(
        whole.backward,
        weights=lambda saved: weights_again(saved.logits, saved.log_sum_exp),
        delta=lambda saved, grad_output, weights, gradient: _delta(saved, grad_output, product),
    )
    return replace(whole, normalise=online.normalise, average=online.average, backward=backward, hidden=NEVER_HELD)


def _delta(saved: Saved, grad_output: Array, product: Product) -> Array:
    """Sum g o over the columns, as an einsum that becomes a product of matrices."""
    rows = product(grad_output[..., np.newaxis, :], saved.stages["output"][..., :, np.newaxis])
    return np.asarray(rows[..., 0])


_TF32, _BFLOAT16 = rounding.tf32, rounding.bfloat16
_CUT_TF32, _CUT_BFLOAT16 = rounding.truncated_tf32, rounding.truncated_bfloat16
_BY_FOUR, _BY_EIGHT = block_product(4), block_product(8)


def _honest(name: str, why: str, backend: Variant, rounding_model: str) -> Control:
    return Control(name, why, backend, _SINGLE, {"float32": rounding_model})


CONTROLS = (
    _honest(
        "tf32_products",
        "factors rounded to TF32, sums in float32",
        variant_by(rounded_product(_TF32)),
        "tf32_products",
    ),
    _honest(
        "tf32_products_cut_off",
        "a unit that reads ten bits of the fraction, and cuts sums of four products off",
        variant_by(rounded_product(_CUT_TF32, _BY_FOUR)),
        "tf32_products",
    ),
    _honest(
        "tf32_products_in_blocks_of_keys",
        "a fused kernel with factors cut off to TF32, sums of eight products cut off",
        fused_by(rounded_product(_CUT_TF32, _BY_EIGHT), 64),
        "tf32_products",
    ),
    _honest(
        "bfloat16_products",
        "factors rounded to bfloat16, sums in float32",
        variant_by(rounded_product(_BFLOAT16)),
        "bf16_products",
    ),
    _honest(
        "bfloat16_products_cut_off",
        "factors cut off to bfloat16, sums of eight products cut off",
        variant_by(rounded_product(_CUT_BFLOAT16, _BY_EIGHT)),
        "bf16_products",
    ),
    _honest(
        "bfloat16_products_in_blocks_of_keys",
        "a fused kernel with factors rounded to bfloat16",
        fused_by(rounded_product(_BFLOAT16), 16),
        "bf16_products",
    ),
    _honest(
        "bfloat16_products_in_three_passes",
        "each factor is the sum of two of bfloat16; the product of both lesser parts is left out",
        variant_by(in_two_parts(_BFLOAT16)),
        "bf16x3_products",
    ),
    _honest(
        "bfloat16_products_in_three_passes_cut_off",
        "the same with factors and sums cut off",
        fused_by(in_two_parts(_CUT_BFLOAT16, _BY_FOUR), 16),
        "bf16x3_products",
    ),
)


_ACCURACY = ("accuracy-of-16-bits",)


def _coarse(name: str, defect: str, backend: Variant, first_wrong_stage: str, rounding_model: str) -> Mutant:
    return Mutant(name, "products", defect, backend, first_wrong_stage, _SINGLE, _ACCURACY, {"float32": rounding_model})


def _stored(store: Store) -> Product:
    return lambda left, right: sequential_matmul(left, right, store=store)


_BY_TF32 = variant_by(rounded_product(_TF32))
_BY_BFLOAT16 = rounded_product(_BFLOAT16)

MUTANTS = (
    _coarse(
        "bfloat16_products_for_tf32",
        "one pass of bfloat16 where TF32 is asked for",
        variant_by(_BY_BFLOAT16),
        "query",
        "tf32_products",
    ),
    _coarse(
        "bfloat16_weights_for_tf32",
        "P V alone is taken in bfloat16",
        replace(_BY_TF32, average=lambda logits, weights, value: _BY_BFLOAT16(weights, value)),
        "query",
        "tf32_products",
    ),
    _coarse(
        "tf32_backward_sums_in_bfloat16",
        "running sums are kept in bfloat16 in the backward pass alone",
        replace(_BY_TF32, backward=backward_by(rounded_product(_TF32, _stored(_BFLOAT16)))),
        "query",
        "tf32_products",
    ),
    _coarse(
        "tf32_sums_in_bfloat16",
        "running sums are kept in bfloat16",
        variant_by(rounded_product(_TF32, _stored(_BFLOAT16))),
        "query",
        "tf32_products",
    ),
    _coarse(
        "float16_products_for_tf32",
        "TF32's bits with float16's range: above 65504 is infinity, small numbers lose bits",
        variant_by(rounded_product(rounding.float16)),
        "query",
        "tf32_products",
    ),
    _coarse(
        "bfloat16_sums_in_bfloat16",
        "running sums are kept in bfloat16, as its factors are",
        variant_by(rounded_product(_BFLOAT16, _stored(_BFLOAT16))),
        "query",
        "bf16_products",
    ),
    _coarse(
        "float16_products_for_bfloat16",
        "more bits than bfloat16 has, and less range",
        variant_by(rounded_product(rounding.float16)),
        "query",
        "bf16_products",
    ),
    _coarse(
        "one_pass_of_bfloat16_for_three",
        "the lesser parts are forgotten",
        variant_by(_BY_BFLOAT16),
        "query",
        "bf16x3_products",
    ),
    _coarse(
        "two_passes_of_bfloat16_for_three",
        "the lesser part of one factor is forgotten",
        variant_by(lambda left, right: in_two_parts(_BFLOAT16)(_BFLOAT16(left), right)),
        "query",
        "bf16x3_products",
    ),
    _coarse(
        "tf32_products_for_three_of_bfloat16",
        "one pass of TF32 for three of bfloat16",
        _BY_TF32,
        "query",
        "bf16x3_products",
    ),
)
