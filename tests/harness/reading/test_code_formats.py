"""Formats of codes: against gfloat, which decodes them independently, and against loops over rows and columns."""

from __future__ import annotations

from typing import Any

import gfloat
import ml_dtypes
import numpy as np
import pytest
from gfloat import formats
from numpy.typing import NDArray

from attncheck.attention.problem import Computation
from attncheck.backends import numpy_backend
from attncheck.backends.codes import code_values
from attncheck.backends.contract import CODE_FORMATS
from attncheck.reading.inputs import make_inputs, make_problem_of_case
from attncheck.reading.lowering import pack_codes
from attncheck.reading.problem import Problem
from attncheck.reading.selection import select_cases
from attncheck.spec.dtypes import numpy_dtype

Array = NDArray[Any]
INFO = {
    "float8_e4m3fn": formats.format_info_ocp_e4m3,
    "float8_e5m2": formats.format_info_ocp_e5m2,
    "float6_e2m3fn": formats.format_info_ocp_e2m3,
    "float6_e3m2fn": formats.format_info_ocp_e3m2,
    "float4_e2m1fn": formats.format_info_ocp_e2m1,
    "float8_e8m0fnu": formats.format_info_ocp_e8m0,
    "int8": formats.format_info_ocp_int8,
}


def test_every_code_is_the_number_that_gfloat_decodes() -> None:
    for name in {each.elements for each in CODE_FORMATS.values()} | {"float8_e8m0fnu"}:
        bits = next((each.bits for each in CODE_FORMATS.values() if each.elements == name), 8)
        codes = np.arange(2**bits, dtype=np.uint8)
        if name in INFO:
            scale = 64 if name == "int8" else 1  # there it is a fraction of 64
            truth = np.array([scale * gfloat.decode_float(INFO[name], int(code)).fval for code in codes])
        else:
            truth = np.array([code - (16 if name == "int4" and code > 7 else 0) for code in codes.tolist()], np.float64)
        stored = truth.astype(numpy_dtype(name)) if "int4" in name else codes.view(numpy_dtype(name))
        assert (stored.view(np.uint8) & (2**bits - 1) == codes).all(), name
        np.testing.assert_array_equal(stored.astype(np.float64), truth, err_msg=name)
        if bits < 8:
            np.testing.assert_array_equal(code_values(name), truth, err_msg=name)


def handed(swizzle: str, scales: Array) -> Array:
    ones, codes = np.ones((1, 1, 1)), np.zeros((1, 1, scales.shape[-2], 64), ml_dtypes.float4_e2m1fn)
    inputs = {"key": codes, "value": codes, "key_scale": ones, "value_scale": ones, "value_block_scale": scales}
    return pack_codes({"stored_as": "nvfp4", "swizzle": swizzle}, inputs)[1]["value_block_scale"]


@pytest.mark.parametrize("swizzle", ["4x4", "128x4"])
def test_swizzled_scales_lie_where_their_sources_say(swizzle: str) -> None:
    rows, columns = 136, 8
    scales = np.arange(rows * columns).astype(np.uint8).reshape(1, 1, rows, columns).view(ml_dtypes.float8_e4m3fn)
    moved = handed(swizzle, scales)
    assert moved.shape == ((1, 1, 256, 8) if swizzle == "128x4" else scales.shape)
    flat = moved.view(np.uint8).ravel()
    for row in range(rows):
        for column in range(columns):
            if swizzle == "4x4":  # vLLM's swizzle_scale_offset, of 2 columns in each of 4 groups
                place = (row // 4 * 4 + column // 2) * columns + column % 2 * 4 + row % 4
            else:  # tiles of 512 bytes, two in a row of tiles
                tile = row // 128 * 2 + column // 4
                place = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert flat[place] == scales.view(np.uint8)[0, 0, row, column], (row, column)


def test_a_case_is_the_attention_of_its_numbers_however_it_is_handed_over() -> None:
    cases = [case for case in select_cases(["block_formats"]).cases if case.operation == "quantized_attention"]
    assert {case.options.get("stored_as") for case in cases} == CODE_FORMATS.keys() - {"float8_e4m3fn", "float8_e5m2"}
    for case in cases:
        problem = make_problem_of_case(case, make_inputs(case, "float64"))
        inputs = problem.inputs
        called = problem.as_call()
        stages = numpy_backend.quantized_attention(**called.inputs, **called.options)
        plain: dict[str, Array] = {}
        for name in ("query", "key", "value"):
            number = inputs[name].astype(np.float64)
            for part, word in ((-1, "zero"), (1, "block_scale")):
                blocks = inputs.get(f"{name}_{word}")
                if blocks is None:
                    continue
                for axis, length in enumerate(number.shape):
                    blocks = np.repeat(blocks.astype(np.float64), length // blocks.shape[axis], axis)
                number = number - blocks if part == -1 else number * blocks
            scale = inputs.get(f"{name}_scale")
            plain[name] = number if scale is None else number * scale[..., np.newaxis]
        rest = {name: inputs[name] for name in ("mask", "key_lengths", "sinks") if name in inputs}
        options = {
            name: each for name, each in called.options.items() if name not in ("stored_as", "packing", "swizzle")
        }
        wanted = numpy_backend.attention(*plain.values(), **rest, **options)["output"]
        np.testing.assert_allclose(stages["output"], wanted, rtol=1e-12, err_msg=case.id)
        lowered = Computation.from_problem(problem.without_layout().canonical())
        assert lowered.inputs["key"].dtype == np.float64


def test_pages_of_codes_are_the_codes_of_their_slots() -> None:
    cases = [case for case in select_cases(["block_formats"]).cases if case.operation == "paged_attention"]
    assert len({case.options.get("stored_as") for case in cases}) == 8
    for case in cases:
        problem = make_problem_of_case(case, make_inputs(case, "float64"))
        inputs, called = problem.inputs, problem.as_call()
        stages = numpy_backend.paged_attention(**called.inputs, **called.options)
        options = {name: case.options[name] for name in ("stored_as", "packing") if name in case.options}
        page, queries = inputs["key_pages"].shape[1], inputs["query"].shape[2]
        for entry, used in enumerate(inputs["key_lengths"].tolist()):
            slots = [(int(inputs["block_table"][entry, key // page]), key % page) for key in range(used)]
            given = {"query": inputs["query"][entry : entry + 1]}
            for name in ("query_scale", "query_block_scale"):
                if name in inputs:
                    given[name] = np.broadcast_to(inputs[name], (2, *inputs[name].shape[1:]))[entry : entry + 1]
            for name, pages in inputs.items():
                if name.startswith(("key_", "value_")) and name != "key_lengths":
                    rows = [pages[min(at, len(pages) - 1), min(slot, pages.shape[1] - 1)] for at, slot in slots]
                    given[name.removesuffix("_pages")] = np.stack(rows)[np.newaxis].swapaxes(1, 2)
            plain = Problem("quantized_attention", options, given).as_call()  # keys of a batch entry, none swizzled
            mask = np.tri(queries, used, used - queries, dtype=np.bool_) if case.options.get("is_causal") else None
            wanted = numpy_backend.quantized_attention(**plain.inputs, **plain.options, mask=mask)["output"]
            np.testing.assert_allclose(stages["output"][entry], wanted[0], rtol=1e-12, err_msg=case.id)
