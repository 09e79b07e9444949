"""Attention to codes: numbers of a few bits with their scales, of which numbers are made before anything is computed.

A framework gives its functions of arrays, as in ``composed.py``. Shapes and meanings: ``contract.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Unpack

from attncheck.backends.composed import Operation
from attncheck.backends.contract import CODE_FORMATS, Stages, Stored, StoredPages, Tensor, show_keywords_of


def code_values(elements: str) -> list[float]:
    """Return the number that each code of at most six bits stands for, in the order of the codes' bits."""
    if elements in ("int4", "uint4"):
        return [code - 16.0 if elements == "int4" and code > 7 else float(code) for code in range(16)]
    exponent_bits, fraction_bits = _EXPONENT_AND_MANTISSA_BITS[elements]
    least, fractions = 1 - (2 ** (exponent_bits - 1) - 1), 2**fraction_bits
    values = []
    for code in range(2 ** (exponent_bits + fraction_bits)):
        exponent, fraction = divmod(code, fractions)
        values.append((fraction / fractions + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 1 + least))
    return [*values, *(-value for value in values)]


_EXPONENT_AND_MANTISSA_BITS = {"float4_e2m1fn": (2, 1), "float6_e2m3fn": (2, 3), "float6_e3m2fn": (3, 2)}
"""Bits of the exponent and of the fraction; there is neither infinity nor NaN."""


def make_dequantize(
    cast: Callable[..., Tensor],
    look_up: Callable[..., Tensor],
    stack: Callable[..., Tensor],
    repeat: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """Return what makes numbers of codes: (code - zero) block_scale scale.

    ``cast(array, dtype)`` takes an array to another dtype, ``look_up(values, codes, dtype)`` codes to numbers;
    ``stack(arrays, axis)`` and ``repeat(array, count, axis)`` are NumPy's.
    """

    def expand_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
        for axis, length in enumerate(shape):
            if blocks.shape[axis] not in (1, length):
                blocks = repeat(blocks, length // blocks.shape[axis], axis)
        return blocks

    def unswizzle(scales: Tensor, swizzle: str | None, rows: int, columns: int) -> Tensor:
        outer, (height, width) = scales.shape[:-2], scales.shape[-2:]
        if swizzle == "4x4":
            tiles = scales.reshape(*outer, height // 4, 4, width // 4, 4)
            return tiles.swapaxes(-3, -1).swapaxes(-2, -1).reshape(scales.shape)
        if swizzle == "128x4":
            tiles = scales.reshape(*outer, height // 128, width // 4, 32, 4, 4)
            return tiles.swapaxes(-4, -2).reshape(scales.shape)[..., :rows, :columns]
        return scales

    def dequantize(
        codes: Tensor,
        scale: Tensor,
        block_scale: Tensor | None,
        zero: Tensor | None,
        *,
        stored_as: str | None,
        packing: str,
        swizzle: str | None,
    ) -> Tensor:
        stored = CODE_FORMATS[stored_as or "float8_e4m3fn"]
        if stored.bits == 4:
            halves = (codes & 15, codes >> 4)
            codes = stack(halves if packing == "low_first" else halves[::-1], -1)
            codes = codes.reshape(*codes.shape[:-2], -1)
        is_small = stored.bits < 8
        values = look_up(code_values(stored.elements), codes, scale.dtype) if is_small else cast(codes, scale.dtype)
        if zero is not None:
            values = values - expand_blocks(cast(zero, scale.dtype), values.shape)
        if block_scale is not None:
            groups = values.shape[-1] // (stored.group or values.shape[-1])
            block_scale = unswizzle(block_scale, swizzle, values.shape[-2], groups)
            values = values * expand_blocks(cast(block_scale, scale.dtype), values.shape)
        return values * scale[..., None]

    return dequantize


def make_numbers_of_codes(dequantize: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return the function that converts codes of query, key and value to numbers, and removes the codes' options."""

    def numbers_of_codes(
        query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], *, in_pages: bool = False
    ) -> list[Tensor]:
        form = {"stored_as": options.pop("stored_as", None), "packing": options.pop("packing", "low_first")}
        swizzle = options.pop("swizzle", None)
        arrays = []
        for name, codes in (("query", query), ("key", key), ("value", value)):
            parts = [codes, *(options.pop(f"{name}_{part}", None) for part in ("scale", "block_scale", "zero"))]
            is_page = in_pages and name != "query"
            if is_page:  # (Np, Lp, Hkv, D) -> (Np, Hkv, Lp, D), as keys lie outside of pages
                parts = [None if part is None else part.swapaxes(1, 2) for part in parts]
            if parts[1] is not None:
                array_swizzle = None if swizzle == "4x4" and name != "value" else swizzle  # that one is of values alone
                codes = dequantize(*parts, swizzle=array_swizzle, **form)
                codes = codes.swapaxes(1, 2) if is_page else codes
            arrays.append(codes)
        return arrays

    return numbers_of_codes


def make_quantized_attention(
    numbers_of_codes: Callable[..., list[Tensor]], attention: Operation, group: Any = Stored
) -> Operation:
    """Return attention to codes, which ``numbers_of_codes`` converts to numbers, with the keywords of ``group``."""

    @show_keywords_of(group)
    def quantized_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_scale: Tensor,
        value_scale: Tensor,
        *,
        mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        **options: Unpack[Stored],
    ) -> Stages:
        """Make numbers of codes, and attend."""
        keywords = {**options, "key_scale": key_scale, "value_scale": value_scale}
        numbers = numbers_of_codes(query, key, value, keywords)
        return attention(*numbers, mask=mask, key_lengths=key_lengths, **keywords)

    return quantized_attention


def make_attention_to_pages_of_codes(numbers_of_codes: Callable[..., list[Tensor]], attention: Operation) -> Operation:
    """Return attention to pages that may have codes, which ``numbers_of_codes`` converts to numbers, page by page."""

    @wraps(attention)
    def attention_to_codes(
        query: Tensor, key_pages: Tensor, value_pages: Tensor, *tables: Tensor, **options: Any
    ) -> Stages:
        return attention(*numbers_of_codes(query, key_pages, value_pages, options, in_pages=True), *tables, **options)

    parameters = [
        item for name, item in signature(attention).parameters.items() if name not in StoredPages.__annotations__
    ]
    parameters.append(Parameter("options", Parameter.VAR_KEYWORD))
    attention_to_codes.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return show_keywords_of(StoredPages)(attention_to_codes)
