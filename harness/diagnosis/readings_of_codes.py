"""Readings of quantised keys, values and queries: other scales, blocks, zero points, and bits of another format.

They change the call of the case, before codes are packed, scales are swizzled, and the call is lowered. In the pages of
a cache, the axis of heads follows the axis of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from attncheck.backends.contract import CODE_FORMATS
from attncheck.judging.alternatives import (
    TAKE_FIRST,
    TAKE_NEXT,
    Change,
    Order,
    ProblemChange,
    Reading,
    ReadingForm,
    change_input,
    reorder_entries,
    when_applicable,
)
from attncheck.reading.lowering import block_scales_in_memory
from attncheck.reading.problem import Problem
from attncheck.spec import DEFAULT_FORMAT, LOGITS, MEANS, SCALE_PREFIX


def _code_format(problem: Problem) -> str:
    return str(problem.options.get("stored_as") or DEFAULT_FORMAT)


def _take_scales(name: str, axis: str, order: Order) -> ProblemChange:
    """Take the data of another head or key; scales have no axis of features, block scales and zero points have one."""

    def changed(problem: Problem) -> Problem | None:
        is_second = (axis == "heads") is ("key_pages" in problem.inputs)
        return reorder_entries([name], (-1 if is_second else -2) - name.endswith(("_block_scale", "_zero")), order)(
            problem
        )

    return changed


def _inverse_scale(scale: Any) -> Any:
    with np.errstate(divide="ignore", over="ignore"):
        inverse = (1 / scale.astype(np.float64)).astype(scale.dtype)
    return inverse if np.isfinite(inverse.astype(np.float64)).all() else None


def _swap_scales(problem: Problem) -> Problem:
    scales = problem.inputs["value_scale"], problem.inputs["key_scale"]
    return problem.with_inputs(key_scale=scales[0], value_scale=scales[1])


def _swap_rows_and_groups(scales: Any) -> Any:
    rows, groups = scales.shape[-2:]
    return scales.swapaxes(-1, -2).reshape(scales.shape) if rows > 1 and groups > 1 else None


def _read_swizzled_in_rows(problem: Problem) -> Problem:
    moved = {}
    for name, stem in SCALE_PREFIX.items():
        blocks = f"{stem}_block_scale"
        if name in problem.inputs and blocks in problem.inputs:
            scales = block_scales_in_memory(problem.options, problem.inputs, name)
            moved[blocks] = scales[tuple(slice(length) for length in problem.inputs[blocks].shape)]
    return problem.with_inputs(**moved)


def _map_codes(formats: Mapping[str, Any], change: Callable[[Any, Any], Any]) -> Change:
    """Change all codes whose dtype is in ``formats``: ``change(codes, formats[dtype])``."""

    def changed(problem: Problem) -> Problem | None:
        changed_codes = {
            name: change(problem.inputs[name], formats[problem.inputs[name].dtype.name])
            for name in SCALE_PREFIX
            if name in problem.inputs and problem.inputs[name].dtype.name in formats
        }
        return problem.with_inputs(**changed_codes) if changed_codes else None

    return changed


def _unsigned_bits(codes: Any, bits: int = 4) -> Any:
    """Return the bits of codes as unsigned integers."""
    return (codes.view(np.uint8) & (2**bits - 1)).astype(np.int8)


def _sign_extended(codes: Any) -> Any:
    return np.where(_unsigned_bits(codes) > 7, _unsigned_bits(codes) - 16, _unsigned_bits(codes)).astype(np.int8)


def _swap_nibbles(codes: Any) -> Any:
    return codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape)


def _change_codes(change: Callable[[Any], Any]) -> Change:
    return lambda problem: problem.with_inputs(
        **{
            name: change(problem.inputs[name])
            for name, stem in SCALE_PREFIX.items()
            if name in problem.inputs and f"{stem}_scale" in problem.inputs
        }
    )


def _rescale_to_maximum_240(problem: Problem) -> Iterator[ReadingForm]:
    """Read scales as if they mapped the largest number to 240, the maximum of e4m3fnuz, instead of 448."""
    if CODE_FORMATS[_code_format(problem)].elements == "float8_e4m3fn":
        for name in ("key", "value"):
            scale = problem.inputs[f"{name}_scale"]
            rescaled = (scale.astype(np.float64) * 448 / 240).astype(scale.dtype)
            yield ReadingForm(
                problem.with_inputs(**{f"{name}_scale": rescaled}),
                {"name": name},
                first_stage=_FIRST_STAGES[name],
            )


_FIRST_STAGES = {"key": LOGITS[0], "value": MEANS[0]}
_OTHER_FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e5m2, "float8_e5m2": ml_dtypes.float8_e4m3fn}
_FNUZ_FORMATS = {"float8_e4m3fn": ml_dtypes.float8_e4m3fnuz, "float8_e5m2": ml_dtypes.float8_e5m2fnuz}
_OTHER_SCALE_FORMATS = {"float8_e8m0fnu": ml_dtypes.float8_e4m3fn, "float8_e4m3fn": ml_dtypes.float8_e8m0fnu}

_CODE_CHANGES: Sequence[tuple[str, str, str, Callable[[str], Change]]] = (
    ("scale", "scale-ignored", "the scale of the {name}s is left out", lambda of: change_input(of, np.ones_like)),
    ("scale", "scale-twice", "the scale of the {name}s is multiplied twice", lambda of: change_input(of, np.square)),
    ("scale", "scale-divided", "the {name}s are divided by their scale", lambda of: change_input(of, _inverse_scale)),
    ("scale", "scale-of-first-head", "the {name} scale of the first head is taken for all",
     lambda of: _take_scales(of, "heads", TAKE_FIRST)),
    ("scale", "scale-of-next-head", "the {name} scale of the next head is taken",
     lambda of: _take_scales(of, "heads", TAKE_NEXT)),
    ("block_scale", "blocks-unscaled", "the scales of {name} blocks are left out",
     lambda of: change_input(of, np.ones_like)),
    ("block_scale", "block-scale-of-next-block", "the scale of the neighbouring block of the {name}s is taken",
     lambda of: reorder_entries([of], -1, TAKE_NEXT)),
    ("block_scale", "block-scale-of-next-key", "{name}s are scaled by blocks of the next key",
     lambda of: _take_scales(of, "keys", TAKE_NEXT)),
    ("block_scale", "block-scale-of-first-head", "the block scales of the first head are taken for all {name}s",
     lambda of: _take_scales(of, "heads", TAKE_FIRST)),
    ("block_scale", "block-scales-transposed", "rows and groups of the {name}s' block scales are exchanged",
     lambda of: change_input(of, _swap_rows_and_groups)),
    ("block_scale", "block-scales-in-other-format",
     "the scales of {name} blocks are read in the format of other blocks: powers of two or e4m3",
     lambda of: change_input(of, lambda scales: scales.view(_OTHER_SCALE_FORMATS[scales.dtype.name])
                           if scales.dtype.name in _OTHER_SCALE_FORMATS else None)),
    ("zero", "zero-points-ignored", "the zero points of the {name}s are left out",
     lambda of: change_input(of, np.zeros_like)),
    ("zero", "zero-points-one-too-large", "the zero points of the {name}s are taken for one more",
     lambda of: change_input(of, lambda zeros: zeros + 1)),
    ("zero", "zero-points-one-too-small", "the zero points of the {name}s are taken for one less",
     lambda of: change_input(of, lambda zeros: zeros - 1)),
    ("zero", "zero-points-added", "the zero points of the {name}s are added, not subtracted",
     lambda of: change_input(of, np.negative)),
)  # fmt: skip
"""End of an input's name, name of a reading, its message, and its change for the full name of the input."""
_KEY_AND_VALUE_READINGS = tuple(
    Reading(f"{name}-{slug}", says.format(name=name), change(f"{name}_{part}"), f"{name}_{part}", stage)
    for name, stage in _FIRST_STAGES.items()
    for part, slug, says, change in _CODE_CHANGES
)

CODE_READINGS: Sequence[Reading] = tuple(
    replace(reading, changes_called_operation=True)
    for reading in (
        *_KEY_AND_VALUE_READINGS,
        Reading("key-scale-of-next-key", "the scale of the next key is taken",
                _take_scales("key_scale", "keys", TAKE_NEXT), "key_scale", LOGITS[0]),
        Reading("scales-swapped", "the scales of keys and values are swapped", _swap_scales, "key_scale", LOGITS[0]),
        Reading("query-scale-ignored", "the scale of the queries is left out",
                change_input("query_scale", np.ones_like),
                "query_scale", LOGITS[0]),
        Reading("query-scale-twice", "the scale of the queries is multiplied twice",
                change_input("query_scale", np.square), "query_scale", LOGITS[0]),
        Reading("float8-of-other-exponent", "codes are read as e5m2 where they are e4m3, or the other way round",
                _map_codes(_OTHER_FLOAT8, lambda codes, dtype: codes.view(dtype)), "key_scale", LOGITS[0]),
        Reading("float8-read-as-fnuz", "codes of float8 are read in its fnuz form: half as large",
                _map_codes(_FNUZ_FORMATS, lambda codes, dtype: codes.view(dtype)), "key_scale", LOGITS[0]),
        Reading("float8-ends-at-240", "{name} codes are scaled as if they ended at 240 and not at 448",
                _rescale_to_maximum_240, "key_scale", LOGITS[0]),
        Reading("nibbles-swapped", "the halves of each byte are taken in the other order",
                when_applicable(
                    lambda problem: CODE_FORMATS[_code_format(problem)].bits == 4, _change_codes(_swap_nibbles)
                ),
                "stored_as", LOGITS[0]),
        Reading("four-bits-with-a-sign", "codes without a sign are read with one",
                _map_codes({"uint4": None}, lambda codes, dtype: _sign_extended(codes)), "stored_as", LOGITS[0]),
        Reading("four-bits-without-a-sign", "codes with a sign are read without one",
                _map_codes({"int4": None}, lambda codes, dtype: _unsigned_bits(codes)), "stored_as", LOGITS[0]),
        Reading("four-bits-as-whole-numbers", "codes of FP4 are read as whole numbers",
                _map_codes({"float4_e2m1fn": None}, lambda codes, dtype: _sign_extended(codes)), "stored_as",
                LOGITS[0]),
        Reading("swizzled-scales-in-rows", "swizzled scales of blocks are read as if they lay in rows",
                _read_swizzled_in_rows, "swizzle", LOGITS[0]),
    )
)  # fmt: skip
"""Readings of codes; those of a format apply to keys and values together."""
