"""Faults of kernels that store operands in fewer bits: are they found, and would the usual tolerances have found them?

    python benchmarks/traded_faults.py [--output results/traded]

Each fault is put into a right kernel (``traded_kernels.py``) and held to the class that this one declares, on a few
drawn problems; tolerances in use are held against the same outputs and the exact answer. Prints how many faults, and
how many right kernels, are flagged by each. Ends with 0 if every fault is found and no right kernel is flagged.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from measuring import table
from numpy.typing import NDArray
from traded_kernels import attention, codes_of, scales_of

from attncheck.judging.judge_stages import judge_stages
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.problem import Problem
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import CodeGrid, Quantization

Array = NDArray[Any]
Coding = Callable[[Array, Quantization], Array]

CLASSES = (
    "fused with query int8 per 64 rows",
    "fused with key int8 per 64 rows less mean",
    "fused with key int4 per 32 columns",
    "fused with key float8_e4m3fn per head",
    "fused with key float8_e5m2 per row",
    "fused with key float4_e2m1fn per 16 columns",
    "fused with value float8_e4m3fn per channel",
    "fused with value int8 per 64 rows",
    "fused with value float8_e4m3fnuz per head",
    "fused with query float4_e2m1fn per 16 columns scaled in float8_e4m3fn alone less mean of 128 rows",
    "fused with value float4_e2m1fn per 16 rows of a channel scaled in float8_e4m3fn alone",
    "fused with weights float4_e2m1fn per 16 columns scaled in float8_e4m3fn",
)
"""An operand in codes each, of the formats and the ways to share a scale."""

TOLERANCES: Mapping[str, Callable[[Array, Array], bool]] = {
    "atol 1.5, rtol 0.5": lambda output, exact: np.allclose(output, exact, rtol=0.5, atol=1.5),
    "atol 0.15": lambda output, exact: np.allclose(output, exact, rtol=0, atol=0.15),
    "cosine 0.95": lambda output, exact: _cosine(output, exact) >= 0.95,
    "relative L2 0.15": lambda output, exact: np.linalg.norm(output - exact) <= 0.15 * np.linalg.norm(exact),
    "torch.testing": lambda output, exact: np.allclose(output, exact, rtol=1e-3, atol=1e-5),
}
"""In use for such kernels: the first four in their tests, the last one the default for float16."""


def _cosine(output: Array, exact: Array) -> float:
    return float(output.ravel() @ exact.ravel() / (np.linalg.norm(output) * np.linalg.norm(exact)))


def _scaled(change: Callable[[Array, Quantization], Array]) -> Coding:
    """Store codes rightly, and multiply them by other scales."""

    def coding(array: Array, quantization: Quantization) -> Array:
        scales = scales_of(array, quantization)
        return codes_of(array / scales, quantization.grid) * change(scales, quantization)

    return coding


def _coded(change: Callable[[Array, CodeGrid], Array]) -> Coding:
    """Store other codes under the right scales."""

    def coding(array: Array, quantization: Quantization) -> Array:
        scales = scales_of(array, quantization)
        return change(array / scales, quantization.grid) * scales

    return coding


_OF_ROWS = ("rows", "row", "rows of a channel")


def _next_block(scales: Array, quantization: Quantization) -> Array:
    axis = -2 if quantization.scale_group in _OF_ROWS else -1
    return np.roll(scales, -max(quantization.group_size, 1), axis=axis)


def _without_the_last_block(scales: Array, quantization: Quantization) -> Array:
    changed = scales.copy()
    if quantization.scale_group in _OF_ROWS:
        changed[..., -(scales.shape[-2] % quantization.group_size or quantization.group_size) :, :] = 1
    else:
        changed[..., -(quantization.group_size if quantization.scale_group == "columns" else 1) :] = 1
    return changed


def _first_of_all(scales: Array, _: Quantization) -> Array:
    return np.broadcast_to(scales[..., :1, :1], scales.shape)


def _swapped_pairs(codes: Array, grid: CodeGrid) -> Array:
    pairs = codes_of(codes, grid).reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., ::-1].reshape(codes.shape)


def _nan_beyond(array: Array, quantization: Quantization) -> Array:
    """Make a scale that is too small by an eighth, and let what is beyond the format be NaN."""
    scales, largest = scales_of(array, quantization) / np.float32(1.125), quantization.grid.largest
    codes = array / scales
    return np.where(np.abs(codes) > largest, np.float32(np.nan), codes_of(codes, quantization.grid)) * scales


def _saturated(array: Array, quantization: Quantization) -> Array:
    """Make a scale for a format of twice the range, so that the upper half saturates."""
    scales = scales_of(array, quantization) / np.float32(2)
    return codes_of(array / scales, quantization.grid) * scales


def _along_the_other_axis(array: Array, quantization: Quantization) -> Array:
    """Share the scales of a block along the other axis, and multiply by those of this one."""
    turned = scales_of(np.ascontiguousarray(array.swapaxes(-1, -2)), quantization).swapaxes(-1, -2)
    return codes_of(array / scales_of(array, quantization), quantization.grid) * turned


def _read_as_another(codes: Array, grid: CodeGrid) -> Array:
    """Read the bits of one format as those of another: e4m3 as e5m2, of NVIDIA as of AMD, signed as unsigned."""
    stored = codes_of(codes, grid)
    if not grid.precision:
        return np.where(stored < 0, stored + np.float32(2 * grid.largest + 2), stored)
    other = {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e4m3fnuz": "float8_e4m3fn", "float8_e5m2": "float8_e4m3fn"}
    bits = stored.astype(getattr(ml_dtypes, grid.name)).view(np.uint8)
    if grid.name not in other:
        return np.abs(stored)
    return bits.view(getattr(ml_dtypes, other[grid.name])).astype(np.float32)


FAULTS: Mapping[str, Coding] = {
    "the next block's scale": _scaled(_next_block),
    "the first block's scale for all": _scaled(_first_of_all),
    "the next head's scale": _scaled(lambda scales, _: np.roll(scales, 1, axis=1)),
    "the next batch entry's scale": _scaled(lambda scales, _: np.roll(scales, 1, axis=0)),
    "no scale for the last block": _scaled(_without_the_last_block),
    "no scale": _scaled(lambda scales, _: np.ones_like(scales)),
    "the scale in e8m0": _scaled(lambda scales, _: np.exp2(np.rint(np.log2(scales)))),
    "the scale of another range, 448 for 240": _scaled(lambda scales, _: scales * np.float32(240 / 448)),
    "the scale squared": _scaled(lambda scales, _: scales * scales),
    "negative codes cut at zero": _coded(lambda codes, grid: np.maximum(codes_of(codes, grid), 0)),
    "a zero point of one": _coded(lambda codes, grid: codes_of(codes, grid) + np.float32(grid.largest / 16)),
    "neighbours swapped, as nibbles in the other order": _coded(_swapped_pairs),
    "the last column dropped": _coded(lambda codes, grid: codes_of(codes, grid) * (np.arange(codes.shape[-1]) != 63)),
    "half of the range saturates": _saturated,
    "what saturates is NaN": _nan_beyond,
    "blocks along the other axis": _along_the_other_axis,
    "bits read as another format": _coded(_read_as_another),
}
"""Each a way to store an operand, or to read it back."""


def problems() -> Iterator[tuple[Problem, bool]]:
    """Draw problems, and say if their roundings are noise.

    They are of numbers of one size, of blocks and heads of many sizes, of keys with much in common, of keys that are
    all alike but for one, and of a channel that has nearly all of the scores.
    """
    for turn, sizes in enumerate((0.0, 0.5, 0.0, 0.0, 0.5)):
        random = np.random.default_rng(turn)
        arrays = {"query": (2, 2, 70, 64), "key": (2, 2, 150, 64), "value": (2, 2, 150, 64)}
        inputs = {
            name: random.normal(size=shape) * np.exp(sizes * random.normal(size=(*shape[:3], 1)))
            for name, shape in arrays.items()
        }
        if turn == 2:
            inputs["key"] += 3 * random.normal(size=(1, 1, 1, 64))
        if turn == 3:  # weights of all sizes between a half and one of the largest, each alike in all of a row
            direction = random.normal(size=64)
            inputs["query"] = np.linspace(0, 1, 70)[:, np.newaxis] * direction * np.ones((2, 2, 1, 1))
            inputs["key"] = np.repeat(inputs["key"][..., :1, :], 150, axis=-2)
            inputs["key"][..., 0, :] += 8 * np.log(2) * direction / (direction @ direction)
            inputs["value"] = np.abs(inputs["value"])
        if turn == 4:
            is_last = np.arange(64) == 63
            inputs["query"] = inputs["query"] * np.where(is_last, 24, 0.1) + 24 * is_last
            inputs["key"][..., 48:63] /= 10
        stored = {name: array.astype(np.float16) for name, array in inputs.items()}
        yield Problem("attention", {}, stored), turn != 3


def flagged(kernel: Callable[..., tuple[Array, Array]], problem: Problem, truth: Truth, name: str) -> tuple[bool, ...]:
    """Return whether a kernel is wrong by a class, and by each tolerance."""
    with np.errstate(all="ignore"):
        output, log_sum_exp = kernel(**problem.inputs)
    stages = {"output": output, "log_sum_exp": log_sum_exp}
    shapes = {stage: array.shape for stage, array in stages.items()}
    judged = judge_stages(truth.for_returned_dtypes(stages), stages, shapes, name)
    exact = truth.exact["output"].high
    wide = output.astype(np.float64)
    return any(each.verdict.exit_code for each in judged), *(not holds(wide, exact) for holds in TOLERANCES.values())


def _outputs(kernel: Callable[..., tuple[Array, Array]], drawn: Sequence[tuple[Problem, Truth]]) -> list[Array]:
    with np.errstate(all="ignore"):
        return [array for problem, _ in drawn for array in kernel(**problem.inputs)]


def main(arguments: list[str] | None = None) -> int:
    """Put every fault into every kernel; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/traded"))
    options = parser.parse_args(arguments)
    drawn = [
        (each, find_truth(replace(each, dtype="float16", supports_statistics=is_noise)))
        for each, is_noise in problems()
    ]
    finders = ("attncheck", *TOLERANCES)
    counts = {finder: {"faults": 0, "right kernels": 0} for finder in finders}
    missed, asked = [], 0
    for name in CLASSES:
        stored = dict(rounding_model_named(name, "float16").quantized_operands)
        right = partial(attention, stored=stored)
        variants = {fault: partial(right, coding=coding) for fault, coding in FAULTS.items()}
        if any(each.subtracts_mean for each in stored.values()):
            variants["the mean not given back"] = partial(right, is_given_back=False)
        plain = _outputs(right, drawn)
        for fault, kernel in {"": right, **variants}.items():
            if fault and all(map(np.array_equal, _outputs(kernel, drawn), plain)):
                continue  # there is but one scale, say
            verdicts = [flagged(kernel, *each, name) for each in drawn]
            found = dict(zip(finders, map(any, zip(*verdicts, strict=True)), strict=True))
            asked += bool(fault)
            for finder in finders:
                counts[finder]["faults" if fault else "right kernels"] += found[finder]
            if found["attncheck"] != bool(fault):
                missed.append(f"{name}: {fault or 'right, and flagged'}")
    rows = [(finder, *map(str, counts[finder].values())) for finder in finders]
    heads = ("flagged by", f"of {asked} faults", f"of {len(CLASSES)} right kernels")
    text = "\n".join([*table(heads, rows), ""])
    text += "".join(f"not as it should be: {each}\n" for each in missed)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "traded.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
