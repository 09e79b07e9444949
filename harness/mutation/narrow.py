"""Faults of kernels with 16-bit ends, of reduced products, of stored log_sum_exps, and of keys in 8 bits.

The first keep something in 16 bits between their ends, where float32 is due. Products of float32 round their factors,
as tensor cores do: to nearest (oneDNN, TPUs, cuBLAS) or cut off, as a unit does that reads the leading bits of what it
is handed (triton#4574), at all widths or where a matrix unit has a tile. Tensor cores cut partial sums off, too: Fasi,
Higham, Mikaitis and Pranesh 2021. Weights may be made as e^(s - L) from a log_sum_exp that was stored before.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import Stages
from attncheck.mutation import forms, kernel
from attncheck.mutation.blocks import attend_in_parts, cut_keys_evenly, part_weights
from attncheck.mutation.kernel import (
    Array,
    MatrixProduct,
    MixedPrecisionKernel,
    Rounding,
    leave_unrounded,
    product_over_queries,
    round_to_bfloat16,
    round_to_tf32,
    tiled_product,
)
from attncheck.mutation.mutant import (
    ROUNDING_FIELDS,
    WIDE_DTYPES,
    AttentionCall,
    BackendVariant,
    StepReplacements,
    numpy_with,
    register_control,
    register_fault,
)
from attncheck.spec import QUERY_KEY_VALUE

_TERMS_PER_TILE = 16
"""Products that a matrix unit adds up before the running sum is stored."""
_FLOAT16_ONLY = ("float16",)
RIGHT_KERNEL = MixedPrecisionKernel(lambda store: {})
_FUSED_ROUNDING_MODELS = {"bfloat16": "fused", "float16": "fused"}
_register_16_bit_fault = partial(
    register_fault,
    "sixteen bits",
    MixedPrecisionKernel,
    rounding_models=_FUSED_ROUNDING_MODELS,
    without_fault=RIGHT_KERNEL,
    dtypes=kernel.NARROW_DTYPES,
    stage="context",
)
_KERNEL_WITH_WIDE_STATISTICS = partial(MixedPrecisionKernel, wide_stages=kernel.WIDE_STAGES)
_register_wide_statistics_fault = partial(
    register_fault,
    "sixteen bits",
    _KERNEL_WITH_WIDE_STATISTICS,
    rounding_models=_FUSED_ROUNDING_MODELS,
    dtypes=kernel.NARROW_DTYPES,
    stage="log_sum_exp",
    without_fault=_KERNEL_WITH_WIDE_STATISTICS(lambda store: {}),
)


def _average_by_exponentials(store: Rounding) -> StepReplacements:
    """Average with exponentials as they are, in 16 bits, and divide last."""

    def average_exponentials(logits: Array, weights: Array, value: Array) -> Array:
        exponentials = store(np.exp(logits))
        total = backend._row_sum(exponentials)
        return np.asarray(exponentials @ value / np.where(total == 0, 1, total))

    return forms.replace_average(average_exponentials)


def _merge_by_growing_exponential(store: Rounding) -> StepReplacements:
    """Merge two parts of the keys as L1 + log(1 + e^(L2 - L1)), the exponential in the format of the ends."""

    def weights_of_two_parts(maxima: Array, statistics: Array) -> Array:
        grown = store(np.exp(statistics[..., 1:] - statistics[..., :1]))
        return np.asarray(np.concatenate([np.ones_like(grown), grown], axis=-1) / (1 + grown))

    return attend_in_parts(cut_keys_evenly(2, min_keys=32), weights_of_two_parts)


def _log_sum_exp_of_rounded_exponentials(store: Rounding) -> StepReplacements:
    def softmax_with_rounded_sum(logits: Array) -> Stages:
        (stages, exponentials), maximum = forms.softmax_and_exponentials(logits), backend._row_maximum(logits)
        total = np.where(np.isneginf(maximum), 1, backend._row_sum(store(exponentials)))
        return stages | {"log_sum_exp": (maximum + np.log(total))[..., 0]}

    return forms.replace_softmax(softmax_with_rounded_sum)


def _flush_subnormals(array: Array) -> Array:
    """Set the subnormal numbers of float16 to zero."""
    return np.where(np.abs(array) < 2.0**-14, 0, array).astype(array.dtype)


def _row_sum_over_squared_denominator(call: AttentionCall, terms: Array) -> Array:
    """Divide by the square of the sum of exponentials, which overflows in float16 from 256 equal ones on."""
    total = np.exp(call.log_sum_exp - backend._row_maximum(call.logits))
    return np.where(total * total > np.finfo(np.float16).max, 0, backend._row_sum(terms)).astype(terms.dtype)


_FLOAT32_ONLY = ("float32",)
_FLOAT32_ROUNDING_FIELDS = {**ROUNDING_FIELDS, "dtypes": _FLOAT32_ONLY}
_FLOAT32_SIGNIFICAND_BITS = 24
"""Bits of the significand of float32."""
_MAX_ELEMENTS_PER_BATCH = 1 << 15
"""Numbers that are added up at a time: a quarter of a megabyte stays near the processor."""


def rounded_product(store: Rounding, product: MatrixProduct = np.matmul) -> MatrixProduct:
    """Multiply matrices of rounded elements."""
    return lambda left, right: np.asarray(product(store(left), store(right)))


def two_part_product(store: Rounding, product: MatrixProduct = np.matmul) -> MatrixProduct:
    """Multiply matrices of elements that are sums of two rounded numbers, without the product of both lesser parts."""

    def multiply_in_two_parts(left: Array, right: Array) -> Array:
        high_left, high_right = store(left), store(right)
        low_left, low_right = (
            store(_rounding_remainder(x, high)) for x, high in ((left, high_left), (right, high_right))
        )
        lesser = product(low_left, high_right) + product(high_left, low_right)
        return np.asarray(lesser + product(high_left, high_right))

    return multiply_in_two_parts


def _rounding_remainder(array: Array, rounded: Array) -> Array:
    return np.where(np.isfinite(array), array - rounded, 0).astype(array.dtype)


def tensor_core_product(terms: int) -> MatrixProduct:
    """Multiply float32 matrices as a tensor core does: so many exact products and a running sum at a time.

    They are aligned to the largest of them, cut off below its 24th bit and added; the sum is cut off to 24 bits.
    """

    def multiply_in_blocks(left: Array, right: Array) -> Array:
        rows = max(1, _MAX_ELEMENTS_PER_BATCH // max(1, right.size // max(1, right.shape[-2]) * (terms + 1)))
        if rows < left.shape[-2]:
            starts = range(0, left.shape[-2], rows)
            return np.concatenate(
                [multiply_in_blocks(left[..., start : start + rows, :], right) for start in starts], axis=-2
            )
        shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
        total, wide = np.zeros(shape), (left.astype(np.float64), right.astype(np.float64))
        for start in range(0, left.shape[-1], terms):
            columns = range(start, min(start + terms, left.shape[-1]))
            parts = np.empty((1 + len(columns), *shape))
            parts[0] = total
            for number, column in enumerate(columns, 1):
                np.multiply(wide[0][..., :, column, None], wide[1][..., None, column, :], out=parts[number])
            total = _truncated_sum(parts)
        return np.asarray(total.astype(left.dtype))

    return multiply_in_blocks


def _truncated_sum(parts: Array) -> Array:
    """Add up along the first axis; this overwrites ``parts``."""
    last_bit = np.ldexp(1.0, np.frexp(np.abs(parts).max(axis=0))[1] - _FLOAT32_SIGNIFICAND_BITS)
    np.divide(parts, last_bit, out=parts)
    np.trunc(parts, out=parts)
    np.multiply(parts, last_bit, out=parts)
    return kernel.round_to_bits(np.asarray(parts.sum(axis=0)), _FLOAT32_SIGNIFICAND_BITS, truncate=True)


def replace_all_products(product: MatrixProduct) -> StepReplacements:
    """Use another product of matrices wherever there is one."""

    def additive_scores(
        query: Array, key: Array, query_weight: Array, key_weight: Array, score_vector: Array, *, score_bias: Any = None
    ) -> Stages:
        hidden = product(query, query_weight)[..., :, np.newaxis, :] + product(key, key_weight)[..., np.newaxis, :, :]
        shifted = np.tanh(hidden if score_bias is None else hidden + score_bias)
        return {"scores": product(shifted, score_vector[:, np.newaxis])[..., 0]}

    return {**forms.replace_matrix_product(product), "additive_scores": additive_scores}


def variant_with_product(product: MatrixProduct) -> BackendVariant:
    """Return attention by another product of matrices."""
    return BackendVariant(replace_all_products(product))


def _fused_kernel_steps(product: MatrixProduct, block: int) -> StepReplacements:
    """Also take the softmax in blocks of keys; go back from log_sum_exp and the output, by products again."""

    def backward_steps(call: AttentionCall) -> StepReplacements:
        # Sum g o over the columns, as an einsum that becomes a product of matrices.
        rows = product(call.grad_output[..., np.newaxis, :], call.stages["output"][..., :, np.newaxis])
        return {
            "attention": forms.forward_pass_with_weights(call, forms.recompute_weights(call.logits, call.log_sum_exp)),
            "_row_sum": lambda terms: np.asarray(rows[..., 0]),
        }

    return {
        **replace_all_products(product),
        **forms.OnlineSoftmax(block, product=product).steps,
        **forms.replace_gradient_steps(backward_steps),
    }


_PRODUCT_BY_FOUR, _PRODUCT_BY_EIGHT = tensor_core_product(4), tensor_core_product(8)


def _sequential_product(store: Rounding) -> MatrixProduct:
    return partial(kernel.sequential_matmul, store=store)


def _replace_backward_product(product: MatrixProduct) -> StepReplacements:
    """Run the backward pass by another product, and the forward pass in TF32."""
    back = forms.replace_matrix_product(product)
    names = ("_dot", "_weighted_sum", "_sum_over_queries")
    return {
        **replace_all_products(rounded_product(round_to_tf32)),
        **{f"attention_gradients.{name}": back[name] for name in names},
    }


def _round_operands_at_widths(step: str, multiple: int, store: Rounding) -> StepReplacements:
    """Round the factors of a step if the width of the second one is a multiple of ``multiple``."""
    right = getattr(backend, step.rpartition(".")[2])

    def rounded_step(first: Array, second: Array) -> Array:
        chosen = leave_unrounded if second.shape[-1] % multiple else store
        return np.asarray(right(chosen(first), chosen(second)))

    return {step: rounded_step}


_LOG_SUM_EXP_ROUNDING_MODELS = {"float64": "native_lse", "float32": "native_lse", "float16": "eager_lse"}


def _weights_from_log_sum_exp(store: Rounding) -> StepReplacements:
    """Compute and store log_sum_exp first, then the weights from it."""

    def softmax_from_log_sum_exp(logits: Array) -> Stages:
        log_sum_exp = store(backend.softmax(logits)["log_sum_exp"])
        return {"weights": forms.recompute_weights(logits, log_sum_exp[..., np.newaxis]), "log_sum_exp": log_sum_exp}

    return forms.replace_softmax(softmax_from_log_sum_exp)


def _merge_tile_statistics(tile: int) -> StepReplacements:
    """Take log_sum_exp in one pass over tiles of keys, merging two at a time, and the output in a second pass."""

    def softmax_over_tiles(logits: Array) -> Stages:
        log_sum_exp = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
        for span in kernel.tile_slices(logits.shape[-1], tile):
            log_sum_exp = np.logaddexp(log_sum_exp, backend.softmax(logits[..., span])["log_sum_exp"][..., np.newaxis])
        return {"weights": forms.recompute_weights(logits, log_sum_exp), "log_sum_exp": log_sum_exp[..., 0]}

    return {**forms.replace_softmax(softmax_over_tiles), "attention._weighted_sum": tiled_product(tile)}


@register_control(
    forms.replace_softmax,
    why="p = exp(log p): log-softmax, then an exponential",
    rounding_models=_LOG_SUM_EXP_ROUNDING_MODELS,
)
def log_softmax_first(logits: Array) -> Stages:
    """Take the logarithms of the weights first."""
    maximum = backend._row_maximum(logits)
    shifted = logits - np.where(np.isinf(maximum), 0, maximum)
    total = np.where(np.isneginf(maximum), 1, backend._row_sum(np.exp(shifted)))
    return backend.softmax(logits) | {"weights": np.exp(shifted - np.log(total))}


_register_quantized_fault = partial(
    register_fault, "8 bits", partial(kernel.change_call_arguments, "quantized_attention"), stage="raw_scores"
)
_OTHER_FLOAT8_FORMAT = {"float8_e4m3fn": ml_dtypes.float8_e5m2, "float8_e5m2": ml_dtypes.float8_e4m3fn}


def _is_stored_as(call: Mapping[str, Any], *formats: str) -> bool:
    return str(call.get("stored_as")) in formats


def _ignore_scale_swizzle(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the scales of blocks in rows, wherever they lie: of whole tiles, those of the first rows and columns."""
    if call.get("swizzle") is None:
        return {}
    groups = 16 if call["stored_as"] == "nvfp4" else 32
    per_byte = 2 if call["stored_as"] in ("mxfp4", "nvfp4") else 1
    names = [name for name in QUERY_KEY_VALUE if call.get(f"{name}_block_scale") is not None]
    shapes = {name: call[name].shape for name in names}
    return {"swizzle": None} | {
        f"{name}_block_scale": call[f"{name}_block_scale"][..., : shape[-2], : shape[-1] * per_byte // groups]
        for name, shape in shapes.items()
    }


def _reinterpret_block_scales(call: Mapping[str, Any], expected_dtype: str, wrong_dtype: Any) -> Mapping[str, Any]:
    """Take the bits of the keys' block scales for those of another format."""
    scales = call.get("key_block_scale")
    return (
        {} if scales is None or scales.dtype.name != expected_dtype else {"key_block_scale": scales.view(wrong_dtype)}
    )


@register_control("quantized_attention", hidden_stages=kernel.UNRETURNED_STAGES)
def scales_multiplied_into_queries_and_output(
    query: Array, key: Array, value: Array, key_scale: Array, value_scale: Array, **options: Any
) -> Stages:
    """the scale of the keys is multiplied into the queries, that of the values into the output, if keys have one"""
    heads, kv_heads = query.shape[1], key.shape[1]
    one_for_all = key_scale.shape[-1] == value_scale.shape[-1] == 1 and key_scale.shape[0] == 1
    has_blocks = not {"stored_as", *(name for name in options if name.endswith(("_block_scale", "_zero")))}.isdisjoint(
        options
    )
    if not one_for_all or has_blocks or options.get("softcap") is not None:
        return backend.quantized_attention(query, key, value, key_scale, value_scale, **options)
    of_keys, of_values = (
        np.repeat(np.broadcast_to(scale, (1, kv_heads, 1)), heads // kv_heads, axis=1)[..., np.newaxis]
        for scale in (key_scale, value_scale)
    )
    stages = backend.attention(query * of_keys, key.astype(query.dtype), value.astype(query.dtype), **options)
    return {**stages, "output": stages["output"] * of_values}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_register_16_bit_fault("scores_summed_in_16_bits", "Q K^T with 16-bit running sums: mlx#4178's kind", lambda store:
    {"dot_scores._dot": lambda query, key: tiled_product(_TERMS_PER_TILE, store)(query, np.swapaxes(key, -1, -2))})
_register_16_bit_fault("values_summed_in_16_bits", "P V with 16-bit running sums: metal-flash-attention#8",
    lambda store: {"attention._weighted_sum": tiled_product(_TERMS_PER_TILE, store)})
_register_16_bit_fault("exponentials_summed_in_16_bits",
    "the row sum sticks at 256 or 2048: tract#2586, executorch#20090, tt-metal#52045",
    lambda store: {"_softmax_with_sinks._row_sum": kernel.tiled_row_sum(_TERMS_PER_TILE, store)})
_register_16_bit_fault("exponentials_not_shifted_in_16_bits",
    "e^s without the maximum leaves the format: flax#982's kind",
    _average_by_exponentials)
_register_16_bit_fault("raw_scores_stored_in_16_bits",
    "the scale is applied behind the store, which overflows in float16: metal-flash-attention#8, ultralytics#24990",
    lambda store: {"dot_scores._dot": lambda query, key: store(backend._dot(query, key))})
_register_16_bit_fault("output_stored_in_16_bits_between_tiles", "the accumulator has the output's type",
    lambda store: forms.OnlineSoftmax(64, store=store).steps)
_register_16_bit_fault("query_scaled_in_16_bits", "structure: the scaled query is stored again",
    lambda store: forms.replace_score_function(lambda query, key, factor: {"scores": backend._dot(store(
        query * factor), key)}))
_register_16_bit_fault("scale_rounded_to_16_bits", "structure: the scale is an array of the inputs' type",
    lambda store: forms.replace_score_function(lambda query, key, factor:
        backend.dot_scores(query, key, scale=float(store(np.array(factor, np.float32))))))
_register_16_bit_fault("biased_scores_stored_in_16_bits", "scores and bias are added in 16 bits: vllm#945's kind",
    lambda store: forms.replace_bias_addition(lambda scores, bias, masks: store(scores + bias)))
_register_16_bit_fault("shifted_scores_stored_in_16_bits", "structure: s - m is stored for the exponential",
    lambda store: {"_softmax_with_sinks.np": numpy_with(exp=lambda shifted: np.exp(store(shifted)))})
_register_16_bit_fault("subnormal_inputs_flushed", "structure: 16-bit loads flush to zero",
    lambda store: forms.change_query_key_value(lambda query, key, value: (_flush_subnormals(query),
        _flush_subnormals(key),
        _flush_subnormals(value))),
    dtypes=_FLOAT16_ONLY)
_register_16_bit_fault("subnormal_weights_flushed", "structure: P V flushes small weights",
    lambda store: {"attention._weighted_sum": lambda weights, value: _flush_subnormals(weights) @ value},
        dtypes=_FLOAT16_ONLY)
_register_16_bit_fault("subnormal_results_flushed", "structure: 16-bit stores flush to zero",
    lambda store: forms.change_outputs(_flush_subnormals), dtypes=_FLOAT16_ONLY)
_register_16_bit_fault("parts_merged_by_a_growing_exponential",
    "e^(L2 - L1) overflows where the second part is far above the first: vllm#39148's kind",
        _merge_by_growing_exponential)
_register_16_bit_fault("parts_merged_by_statistics_in_16_bits",
    "log_sum_exp of each part is stored in 16 bits: flashinfer#3372's kind",
    lambda store: attend_in_parts(lambda logits: kernel.tile_slices(logits.shape[-1], 64) if logits.shape[
        -1] > 64 else [],
        lambda maxima, statistics: part_weights(maxima, store(statistics))))
_register_wide_statistics_fault("log_sum_exp_widened_too_late",
    "log_sum_exp is stored in 16 bits, and widened when it is returned: flashinfer#3372's kind",
    lambda store: forms.replace_softmax(lambda logits: (stages := backend.softmax(logits)) | {
        "log_sum_exp": store(stages["log_sum_exp"])}))
_register_wide_statistics_fault("log_sum_exp_of_exponentials_in_16_bits",
    "structure: log_sum_exp is that of exponentials rounded to 16 bits for the values",
        _log_sum_exp_of_rounded_exponentials)
_register_16_bit_fault("key_and_value_gradients_summed_in_16_bits", "running sums over queries: pytorch#133671's kind",
    lambda store: {"_sum_over_queries": product_over_queries(tiled_product(_TERMS_PER_TILE, store))}, stage="grad_key")
_register_16_bit_fault("query_gradient_summed_in_16_bits", "running sums over keys: metal-flash-attention#8's kind",
    lambda store: {"attention_gradients._weighted_sum": tiled_product(_TERMS_PER_TILE, store)}, stage="grad_query")
_register_16_bit_fault("row_sum_of_the_gradient_in_16_bits", "structure: Delta is added up in 16 bits",
    lambda store: {"attention_gradients._row_sum": kernel.tiled_row_sum(_TERMS_PER_TILE, store)}, stage="grad_query")
_register_16_bit_fault("row_sum_of_the_gradient_over_the_square_of_the_sum",
    "the gradient of e / l as -e / l^2, and l^2 overflows: jax 0.10.2's softmax in float16, jax#40409's kind",
    lambda store: forms.replace_gradient_row_sum(_row_sum_over_squared_denominator), stage="grad_query",
        dtypes=_FLOAT16_ONLY)
# Make p as e^s / e^L, which is 0 / 0 where every exponential of a row underflows.
_register_16_bit_fault("backward_weights_by_a_quotient_of_exponentials",
    "e^s / e^L is 0 / 0 where every log_sum_exp is below -88: trl#7181",
    lambda store: forms.replace_backward_weights(lambda call: np.where(np.isneginf(call.log_sum_exp), 0,
        np.exp(call.logits) / np.exp(call.log_sum_exp))),
    stage="grad_query", dtypes=("float32", *kernel.NARROW_DTYPES), diagnosis="fill-minus-infinity")
for _name, _why, _steps, _rounding_model in (
    ("tf32_products", "factors rounded to TF32, sums in float32", replace_all_products(rounded_product(round_to_tf32)),
     "tf32_products"),
    ("tf32_products_cut_off", "a unit that reads ten bits of the fraction, and cuts sums of four products off",
        replace_all_products(rounded_product(kernel.truncate_to_tf32, _PRODUCT_BY_FOUR)), "tf32_products"),
    ("tf32_products_in_blocks_of_keys",
        "a fused kernel with factors cut off to TF32, sums of eight products cut off",
        _fused_kernel_steps(rounded_product(kernel.truncate_to_tf32, _PRODUCT_BY_EIGHT), 64), "tf32_products"),
    ("bfloat16_products", "factors rounded to bfloat16, sums in float32",
        replace_all_products(rounded_product(round_to_bfloat16)), "bf16_products"),
    ("bfloat16_products_cut_off", "factors cut off to bfloat16, sums of eight products cut off",
        replace_all_products(rounded_product(kernel.truncate_to_bfloat16, _PRODUCT_BY_EIGHT)), "bf16_products"),
    ("bfloat16_products_in_blocks_of_keys", "a fused kernel with factors rounded to bfloat16",
        _fused_kernel_steps(rounded_product(round_to_bfloat16), 16), "bf16_products"),
    ("bfloat16_products_in_three_passes",
        "each factor is the sum of two of bfloat16; the product of both lesser parts is left out",
        replace_all_products(two_part_product(round_to_bfloat16)), "bf16x3_products"),
    ("bfloat16_products_in_three_passes_cut_off", "the same with factors and sums cut off",
        _fused_kernel_steps(two_part_product(kernel.truncate_to_bfloat16, _PRODUCT_BY_FOUR), 16), "bf16x3_products"),
):
    register_control(None, _name, _why, _steps, dtypes=_FLOAT32_ONLY, rounding_models={"float32": _rounding_model},
        hidden_stages=forms.UNSTORED_STAGES if "attention" in _steps else frozenset())  # the softmax runs over blocks
# Rows, laid out by hand: a product that is coarser than the class that it claims, and what it does instead.
for _claimed, _name, _defect, _form, _product in (
    ("tf32_products", "bfloat16_products_for_tf32", "one pass of bfloat16 where TF32 is asked for",
        replace_all_products, rounded_product(round_to_bfloat16)),
    ("tf32_products", "bfloat16_weights_for_tf32", "P V alone is taken in bfloat16",
        lambda product: {**replace_all_products(rounded_product(round_to_tf32)), "attention._weighted_sum": product},
        rounded_product(round_to_bfloat16)),
    ("tf32_products", "tf32_backward_sums_in_bfloat16", "running sums are kept in bfloat16 in the backward pass alone",
        _replace_backward_product, rounded_product(round_to_tf32, _sequential_product(round_to_bfloat16))),
    ("tf32_products", "tf32_sums_in_bfloat16", "running sums are kept in bfloat16",
        replace_all_products, rounded_product(round_to_tf32, _sequential_product(round_to_bfloat16))),
    ("tf32_products", "float16_products_for_tf32",
        "TF32's bits with float16's range: above 65504 is infinity, small numbers lose bits",
        replace_all_products, rounded_product(kernel.round_to_float16)),
    ("bf16_products", "bfloat16_sums_in_bfloat16", "running sums are kept in bfloat16, as its factors are",
        replace_all_products, rounded_product(round_to_bfloat16, _sequential_product(round_to_bfloat16))),
    ("bf16_products", "float16_products_for_bfloat16", "more bits than bfloat16 has, and less range",
        replace_all_products, rounded_product(kernel.round_to_float16)),
    ("bf16x3_products", "one_pass_of_bfloat16_for_three", "the lesser parts are forgotten",
        replace_all_products, rounded_product(round_to_bfloat16)),
    ("bf16x3_products", "two_passes_of_bfloat16_for_three", "the lesser part of one factor is forgotten",
        replace_all_products, lambda left, right: two_part_product(round_to_bfloat16)(round_to_bfloat16(left), right)),
    ("bf16x3_products", "tf32_products_for_three_of_bfloat16", "one pass of TF32 for three of bfloat16",
        replace_all_products, rounded_product(round_to_tf32)),
):
    register_fault("products", _form, _name, _defect, _product, stage="query", **_FLOAT32_ROUNDING_FIELDS,
        rounding_models={"float32": _claimed})
for _name, _defect, _step, _multiple, _store, _at in (
    ("tf32_scores_at_widths_of_8", "tensor cores take the product where the width is a multiple of 8: pytorch#161022",
        "dot_scores._dot", 8, round_to_tf32, "raw_scores"),
    ("tf32_scores_at_widths_of_32", "the same where the width is a multiple of 32: triton#3498",
        "dot_scores._dot", 32, round_to_tf32, "raw_scores"),
    ("bfloat16_scores_at_widths_of_16",
        "a matrix unit of bfloat16 where the width is a multiple of 16: openvino#31630's kind",
        "dot_scores._dot", 16, round_to_bfloat16, "raw_scores"),
    ("tf32_values_at_widths_of_16", "P V in TF32 where the value's width is a multiple of 16: mlx#3860",
        "attention._weighted_sum", 16, round_to_tf32, "context"),
    ("bfloat16_values_at_widths_of_32",
        "P V in bfloat16 where the value's width is a multiple of 32: openvino#31630's kind",
        "attention._weighted_sum", 32, round_to_bfloat16, "context"),
    ("tf32_gradients_at_widths_of_8", "dk and dv in TF32 where the width is a multiple of 8: pytorch#161022",
        "_sum_over_queries", 8, round_to_tf32, "grad_key"),
):
    register_fault("chosen products", None, _name, _defect, _round_operands_at_widths(_step, _multiple, _store),
        stage=_at,
        **_FLOAT32_ROUNDING_FIELDS)
for _format, _defect, _store in (
    ("bfloat16", "L is rounded to 16 bits on its way to p = exp(s - L)", round_to_bfloat16),
    ("float16", "L is kept in float16 between two passes", kernel.round_to_float16),
):
    register_fault("denominator", _weights_from_log_sum_exp, f"log_sum_exp_stored_in_{_format}", _defect, _store,
        stage="weights",
    **ROUNDING_FIELDS, rounding_models=_LOG_SUM_EXP_ROUNDING_MODELS)
register_control(_weights_from_log_sum_exp, "weights_from_log_sum_exp",
    "L is stored, then p = exp(s - L): nothing is divided",
    leave_unrounded, rounding_models=_LOG_SUM_EXP_ROUNDING_MODELS)
# the output is added up in the arrays' own format
register_control(_merge_tile_statistics, "weights_from_log_sum_exp_in_tiles_of_16",
    "L in one pass over the keys, merged tile by tile, p = exp(s - L) in a second pass",
    16, dtypes=WIDE_DTYPES, rounding_models=_LOG_SUM_EXP_ROUNDING_MODELS)
_register_quantized_fault("codes_read_in_the_other_format",
    "the bits are read in the other format of 8 bits: jax#34375's kind",
    lambda call: {"key": call["key"].view(_OTHER_FLOAT8_FORMAT[call["key"].dtype.name])
        if call["key"].dtype.name in _OTHER_FLOAT8_FORMAT else call["key"] * 2})
_register_quantized_fault("codes_read_as_fnuz",
    "AMD's form of e4m3, whose codes stand for half as much, is read for OCP's",
    lambda call: {name: call[name].view(ml_dtypes.float8_e4m3fnuz) for name in QUERY_KEY_VALUE
        if call[name].dtype.name == "float8_e4m3fn"}, diagnosis="float8-read-as-fnuz")
_register_quantized_fault("nibbles_read_in_the_other_order", "the first code is read from the other half of each byte",
    lambda call: {"packing": "low_first" if call.get("packing") == "high_first" else "high_first"}
        if _is_stored_as(call, "int4", "uint4", "mxfp4", "nvfp4") else {}, diagnosis="nibbles-swapped")
_register_quantized_fault("unsigned_codes_read_with_a_sign", "four bits are sign-extended",
    lambda call: {"stored_as": "int4"} if _is_stored_as(call, "uint4") else {}, diagnosis="four-bits-with-a-sign")
_register_quantized_fault("signed_codes_read_without_a_sign", "four bits are masked, and not sign-extended",
    lambda call: {"stored_as": "uint4"} if _is_stored_as(call, "int4") else {},
    diagnosis="four-bits-without-a-sign")
_register_quantized_fault("swizzled_scales_read_in_rows", "the layout of the scales is not looked at",
    _ignore_scale_swizzle,
    diagnosis="swizzled-scales-in-rows")
_register_quantized_fault("small_codes_flushed_to_zero", "codes below the least normal number are flushed to zero",
    lambda call: {"key": np.where(np.abs(call["key"].astype(np.float64)) < float(ml_dtypes.finfo(
        call["key"].dtype).smallest_normal), np.zeros_like(call["key"]), call["key"])})
_register_quantized_fault("zero_points_off_by_one",
    "the zero point is stored less 1, and read as it is: GPTQ's checkpoints",
    lambda call: {"key_zero": call["key_zero"] + 1} if call.get("key_zero") is not None else {},
    diagnosis="key-zero-points-one-too-large")
_register_quantized_fault("powers_of_two_read_as_e4m3", "scales of MX blocks are read as those of NVFP4",
    lambda call: _reinterpret_block_scales(call, "float8_e8m0fnu", ml_dtypes.float8_e4m3fn),
    diagnosis="key-block-scales-in-other-format")
_register_quantized_fault("e4m3_read_as_powers_of_two", "scales of NVFP4 blocks are read as those of MX",
    lambda call: _reinterpret_block_scales(call, "float8_e4m3fn", ml_dtypes.float8_e8m0fnu),
    diagnosis="key-block-scales-in-other-format")
_register_quantized_fault("floats_of_4_bits_read_as_whole_numbers", "codes of FP4 meet the table of int4",
    lambda call: {"stored_as": "int4"} if _is_stored_as(call, "mxfp4", "nvfp4") else {},
    diagnosis="four-bits-as-whole-numbers")
for _fault in forms.faults_from_readings(
    ("8 bits", "value-scale-twice", "the output is off by a scale: flashinfer#4979"),
    ("8 bits", "key-scale-twice", "the scale is applied by two layers"),
    ("8 bits", "key-scale-divided", "descale passed for scale"),
    ("8 bits", "scales-swapped", "arguments in another order"),
    ("8 bits", "key-scale-ignored", "scales silently 1: sglang#20705"),
    ("8 bits", "value-scale-ignored", "scales silently 1: sglang#20705"),
    ("8 bits", "value-scale-ignored", "the scale of the values is not applied by the path that masks",
        "values_unscaled_behind_a_mask", forms.has_any_of("mask", "key_lengths")),
):
    register_fault(**_fault)
# fmt: on
