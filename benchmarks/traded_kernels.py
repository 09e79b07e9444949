"""Right kernels that trade accuracy for speed, emulated: 16 bits in and out, float32 inside but for what each gives up.

attncheck check --implementation benchmarks/traded_kernels.py:sage1 --dtype float16

Each declares the class that it is right to, and is wrong, or may be, without that declaration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import GRIDS, SCALE_FORMATS, CodeGrid, Quantization

Array = NDArray[Any]
Product = Callable[[Array, Array], Array]

_CUBIC = tuple(map(np.float32, (0.077119089663028717, 0.227564394474029541, 0.695146143436431885, 1.0)))
"""2^f for f in [0, 1), to 8.8e-5: FlashAttention 4, flash_attn/cute/softmax.py."""
_TANH_BITS = 11


def cubic_exponential(argument: Array) -> Array:
    """Evaluate e^x as 2^n times a cubic of the rest of x log2(e)."""
    exponent = np.maximum(argument * np.float32(np.log2(np.e)), np.float32(-127))
    whole = np.floor(exponent)
    power = np.zeros_like(exponent)
    for coefficient in _CUBIC:
        power = power * (exponent - whole) + coefficient
    return np.where(np.isneginf(argument), np.float32(0), np.ldexp(power, whole.astype(np.int32)))


def approximate_tanh(argument: Array) -> Array:
    """Evaluate tanh and keep eleven bits of it, as ``tanh.approx.f32`` does."""
    fraction, exponent = np.frexp(np.tanh(argument))
    return np.ldexp(np.rint(np.ldexp(fraction, _TANH_BITS)), exponent - _TANH_BITS).astype(np.float32)


def product_in_float16(left: Array, right: Array, promoted: float = math.inf) -> Array:
    """Add products up in float16, one after the other, and so many of them in float32."""
    whole, total = np.zeros((), np.float32), np.zeros((), np.float16)
    for index in range(left.shape[-1]):
        term = left[..., :, index, np.newaxis] * right[..., np.newaxis, index, :]
        total = (total.astype(np.float32) + term).astype(np.float16)
        if (index + 1) % promoted == 0:
            whole, total = whole + total.astype(np.float32), np.zeros((), np.float16)
    return whole + total.astype(np.float32)


def exact_product(left: Array, right: Array) -> Array:
    """Add products up without error, as codes in int32, and round once."""
    return (left.astype(np.float64) @ right.astype(np.float64)).astype(np.float32)


def tensor_core(bits: int, block: int, promoted: float = math.inf, exact: int = 1) -> Product:
    """Return a product that aligns blocks and a running sum, cuts them off at so many bits, and adds them up.

    Widths of units of NVIDIA: Fasi et al. 2021, PeerJ CS 7:e330; Khattak and Mikaitis 2025, arXiv 2512.07004; Xie et
    al. 2025, arXiv 2511.10909. What is aligned are sums of ``exact`` products; one of ``promoted`` is added to others
    in float32.
    """

    def product(left: Array, right: Array) -> Array:
        wide, length = (left.astype(np.float64), right.astype(np.float64)), left.shape[-1]
        total, running = np.zeros((), np.float32), np.zeros((*left.shape[:-1], right.shape[-1]))
        for start in range(0, length, block):
            places = [slice(each, each + exact) for each in range(start, min(start + block, length), exact)]
            terms = np.stack([*(wide[0][..., each] @ wide[1][..., each, :] for each in places), running])
            running = _cut(terms, np.abs(terms).max(axis=0), bits).sum(axis=0)
            running = _cut(running, np.abs(running), min(bits, 24))
            if (start + block) % promoted == 0:
                total, running = total + running.astype(np.float32), np.zeros_like(running)
        return total + running.astype(np.float32)

    return product


def _cut(terms: Array, size: Array, bits: int) -> Array:
    """Cut numbers off below so many bits of a size."""
    unit = np.ldexp(1.0, np.frexp(size)[1] - bits)
    return np.trunc(terms / unit) * unit


def codes_with_scales(array: Array, quantization: Quantization) -> Array:
    """Round an array (..., L, D) of float32 to codes of a narrow format, and return what they stand for."""
    scales = scales_of(array, quantization)
    return codes_of(array / scales, quantization.grid) * scales


def scales_of(array: Array, quantization: Quantization) -> Array:
    """Return the scale of each element of an array (..., L, D): the largest of its block has the largest code."""
    rows, columns = array.shape[-2:]
    height = {"rows": quantization.group_size, "row": 1, "columns": 1}.get(quantization.scale_group, max(rows, 1))
    height = quantization.group_size if quantization.scale_group == "rows of a channel" else height
    width = {"columns": quantization.group_size, "channel": 1, "rows of a channel": 1}.get(
        quantization.scale_group, max(columns, 1)
    )
    found, signs = np.ones_like(array), np.ones_like(array)
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            block = array[..., row : row + height, column : column + width]
            axes = None if quantization.scale_group == "tensor" else (-2, -1)
            if quantization.scale_group != "none":
                most, least = (end(block, axis=axes, keepdims=True) for end in (np.max, np.min))
                scale = np.maximum(most, -least) / np.float32(quantization.grid.largest)
                found[..., row : row + height, column : column + width] = scale
                signs[..., row : row + height, column : column + width] = np.where(most > -least, -1, 1)
    found = _stored_scales(found, quantization) * (1 if np.isinf(quantization.grid.shorter_end) else signs)
    return np.where(found == 0, np.float32(1), found)


def _stored_scales(scales: Array, quantization: Quantization) -> Array:
    """Round scales to their format: powers of two as OCP Microscaling 1.0 has them, or e4m3, maybe below a second."""
    kept, largest = SCALE_FORMATS[quantization.scale_format], np.float32(quantization.grid.largest)
    if kept.is_power_of_two:
        exponents = np.frexp(scales * largest)[1] - np.frexp(largest)[1]
        return np.where(scales == 0, scales, np.ldexp(np.float32(1), exponents))
    second = (scales.max(initial=0) or np.float32(1)) / np.float32(448) if kept.has_second_scale else np.float32(1)
    kept_in = np.dtype(quantization.scale_format.partition(" ")[0])
    return np.minimum(scales / second, np.float32(kept.largest)).astype(kept_in).astype(np.float32) * second


def codes_of(array: Array, grid: CodeGrid) -> Array:
    """Round numbers of float32 to those of a narrow format; what is beyond it saturates."""
    saturated = np.clip(array, -grid.largest, min(grid.largest, grid.shorter_end))
    rounded = np.rint(saturated) if not grid.precision else saturated.astype(getattr(ml_dtypes, grid.name))
    return rounded.astype(np.float32)


def codes_before_scales(array: Array, quantization: Quantization) -> Array:
    """Round to codes by scales that are not rounded yet: SageAttention 3, blackwell/softmax_fused.h."""
    scales = scales_of(array, replace(quantization, scale_format="float32"))
    return codes_of(array / scales, quantization.grid) * scales_of(array, quantization)


def mean_of_rows(array: Array, count: int, dtype: np.dtype[Any]) -> Array:
    """Return the mean of all rows, or of so many, (..., L, D), in a format: the last of them are filled with zeros."""
    if not count:
        return array.mean(axis=-2, keepdims=True).astype(dtype).astype(np.float32)
    starts = np.arange(0, array.shape[-2], count)
    means = (np.add.reduceat(array, starts, axis=-2) / np.float32(count)).astype(dtype).astype(np.float32)
    return np.repeat(means, count, axis=-2)[..., : array.shape[-2], :]


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    exponential: Callable[[Array], Array] = np.exp,
    tanh: Callable[[Array], Array] = np.tanh,
    product: Product = np.matmul,
    product_of_scores: Product | None = None,
    stored: Mapping[str, Quantization] | None = None,
    weights_in: str = "",
    coding: Callable[[Array, Quantization], Array] = codes_with_scales,
    coding_of_weights: Callable[[Array, Quantization], Array] | None = None,
    is_given_back: bool = True,
) -> tuple[Array, Array]:
    """Return output and log_sum_exp of attention (B, H, L, D), with these functions, products and codes.

    ``coding`` makes an operand of what it is stored as. Unless it ``is_given_back``, log_sum_exp lacks what
    scores lost, and so do scores what the mean of the query makes.
    """
    stored, group = stored or {}, query.shape[1] // key.shape[1]
    operands = {"query": query, "key": np.repeat(key, group, axis=1), "value": np.repeat(value, group, axis=1)}
    operands = {name: array.astype(np.float32) for name, array in operands.items()}
    moved = given_back = np.zeros((), np.float32)
    means = {
        name: mean_of_rows(operands[name], quantization.mean_block_rows, query.dtype)
        for name, quantization in stored.items()
        if quantization.subtracts_mean
    }
    if "key" in means:
        moved = operands["query"] @ means["key"].swapaxes(-1, -2)
    operands |= {name: (operands[name] - mean).astype(query.dtype).astype("f4") for name, mean in means.items()}
    if "query" in means and is_given_back:
        given_back = (means["query"] @ operands["key"].swapaxes(-1, -2)).astype(query.dtype).astype(np.float32)
    operands |= {name: coding(operands[name], each) for name, each in stored.items() if name in operands}
    factor = np.float32(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (product_of_scores or product)(operands["query"], operands["key"].swapaxes(-1, -2))
    scores = (scores + given_back) * factor
    if softcap is not None:
        cap = np.float32(softcap)
        scores, moved = cap * tanh((scores + moved * factor) / cap), np.zeros((), np.float32)
    scores = _masked(scores, mask, is_causal=is_causal)
    maximum = _largest(scores)
    powers = exponential(scores - maximum)
    total = powers.sum(axis=-1, keepdims=True)
    if "weights" in stored:
        rounded = _twice_scaled(powers, stored["weights"], coding_of_weights or coding)
    else:
        rounded = _codes_of_weights(powers, weights_in) if weights_in else powers.astype(query.dtype).astype(np.float32)
    output = product(rounded, operands["value"]) / np.maximum(total, np.finfo(np.float32).tiny)
    with np.errstate(divide="ignore"):
        log_sum_exp = np.log(total) + maximum + (moved.astype(query.dtype) * factor if is_given_back else np.float32(0))
    return output.astype(query.dtype), log_sum_exp[..., 0]


def _masked(scores: Array, mask: Array | None, *, is_causal: bool) -> Array:
    allowed = np.ones(scores.shape[-2:], np.bool_) if mask is None else mask
    allowed = allowed & np.tri(*scores.shape[-2:], dtype=np.bool_) if is_causal else allowed
    return np.where(allowed, scores, -np.float32(np.inf))


def _largest(scores: Array) -> Array:
    """Return the largest score of each row, the lowest number where there is none: (..., 1)."""
    return np.maximum(scores.max(axis=-1, keepdims=True), np.finfo(np.float32).min)


def gradients(
    query: Array,
    key: Array,
    value: Array,
    grad_output: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    stored: Mapping[str, Quantization],
    coding: Callable[[Array, Quantization], Array] = codes_with_scales,
) -> dict[str, Array]:
    """Return the gradients of attention (B, H, L, D), with operands of products on the way back in codes."""

    def coded(name: str, array: Array) -> Array:
        return coding(array, stored[name]) if name in stored else array

    q, k, v, g = (array.astype(np.float32) for array in (query, key, value, grad_output))
    group = query.shape[1] // key.shape[1]
    k, v = (np.repeat(each, group, axis=1) for each in (k, v))
    factor = np.float32(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = _masked(q @ k.swapaxes(-1, -2) * factor, mask, is_causal=is_causal)
    powers = np.exp(scores - _largest(scores))
    weights = powers / np.maximum(powers.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    met = coded("grad_output", g)
    centred = met @ coded("backward_value", v).swapaxes(-1, -2) - (g * (weights @ v)).sum(axis=-1, keepdims=True)
    of_scores = coded("grad_scores", weights * centred)
    found = {
        "grad_query": factor * (of_scores @ coded("backward_key", k)),
        "grad_key": factor * (of_scores.swapaxes(-1, -2) @ coded("backward_query", q)),
        "grad_value": coded("backward_weights", weights).swapaxes(-1, -2) @ met,
    }
    for name in ("grad_key", "grad_value"):
        batch, _, rows, columns = found[name].shape
        found[name] = found[name].reshape(batch, -1, group, rows, columns).sum(axis=2)
    return {name: array.astype(query.dtype) for name, array in found.items()}


_ON_THE_WAY_BACK = (
    "fused with grad_output int8 per 64 rows and backward_value float8_e4m3fn per head "
    "and backward_weights int8 per head scaled in float16 and grad_scores int8 per 64 rows "
    "and backward_query float8_e4m3fn per head and backward_key int8 per 16 columns scaled in float8_e4m3fn"
)


def attention_gradients(query: Array, key: Array, value: Array, grad_output: Array, *, mask: Array | None = None,
                        is_causal: bool = False, scale: float | None = None) -> dict[str, Array]:  # fmt: skip
    """Return the gradients of attention with every operand of the way back in codes."""
    stored = dict(rounding_model_named(_ON_THE_WAY_BACK, "float16").quantized_operands)
    return gradients(query, key, value, grad_output, mask=mask, is_causal=is_causal, scale=scale, stored=stored)


attention_gradients.classes = dict.fromkeys(("float16", "bfloat16"), _ON_THE_WAY_BACK)  # type: ignore[attr-defined]


def _codes_of_weights(powers: Array, name: str) -> Array:
    per = "none" if GRIDS[name].precision else "tensor"
    return codes_with_scales(np.maximum(powers, 0), Quantization(GRIDS[name], per))


def _twice_scaled(powers: Array, quantization: Quantization, coding: Callable[[Array, Quantization], Array]) -> Array:
    """Store exponentials by blocks, after a scale for which 1 is the largest code in the largest scale."""
    alone = replace(quantization, scale_format=f"{quantization.scale_format} alone")
    whole = np.float32(SCALE_FORMATS[alone.scale_format].largest * quantization.grid.largest)
    return coding(powers * whole, alone) / whole


def declared(name: str, **changes: Any) -> Callable[..., Any]:
    """Return the kernel that stores its operands as a class says, and declares it."""
    stored = dict(rounding_model_named(name, "float16").quantized_operands)
    kernel: Any = partial(attention, stored=stored, **changes)

    def named(query: Array, key: Array, value: Array, *, mask: Array | None = None, is_causal: bool = False,
              scale: float | None = None, softcap: float | None = None) -> Array:  # fmt: skip
        output: Array = kernel(query, key, value, mask=mask, is_causal=is_causal, scale=scale, softcap=softcap)[0]
        return output

    found: Any = named
    found.kernel, found.classes = kernel, {"float16": name, "bfloat16": name}
    return named


tanh_approx = declared("tanh_approx", tanh=approximate_tanh)
flash4 = declared("flash4", exponential=cubic_exponential)
flash3_fp8 = declared("flash3_fp8", weights_in="float8_e4m3fn", product=tensor_core(14, 32))
sage1 = declared("sage1", product=partial(product_in_float16, promoted=64), product_of_scores=exact_product)
sage2 = declared("sage2", weights_in="float8_e4m3fn", product=tensor_core(14, 32, 64), product_of_scores=exact_product)
sage3 = declared("sage3", product=tensor_core(36, 64, exact=16), coding_of_weights=codes_before_scales)
llama_q8_0 = declared("llama_q8_0")
llama_q4_0 = declared("llama_q4_0")
float16_of_32 = declared("fused with sums float16 per 32 products", product=partial(product_in_float16, promoted=32))
volta = declared("fused with sums cut at 24 bits", product=tensor_core(24, 4))
ampere = declared("fused with sums cut at 25 bits", product=tensor_core(25, 8))
hopper = declared("fused with sums cut at 26 bits", product=tensor_core(26, 16))
int8_weights = declared("fused with weights int8 and value int8 per channel", weights_in="int8")

KERNELS: Mapping[str, Callable[..., Any]] = {
    "tanh_approx": tanh_approx,
    "flash4": flash4,
    "flash3_fp8": flash3_fp8,
    "sage1": sage1,
    "sage2": sage2,
    "sage3": sage3,
    "int8_weights": int8_weights,
    "llama_q8_0": llama_q8_0,
    "llama_q4_0": llama_q4_0,
    "float16_of_32": float16_of_32,
}
"""Each with its class, as it declares it, and as ``kernel`` what returns a log_sum_exp as well."""
OF_16_BITS: Mapping[str, Callable[..., Any]] = {"volta": volta, "ampere": ampere, "hopper": hopper}
"""The same of units of 16 bits, of which no class without their cuts tells."""
