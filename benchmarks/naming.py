"""Kernels of another hand: what is named of faults that are not the catalogue's, where the output alone is returned?

    python benchmarks/naming.py [PATTERNS]

One plain kernel with a switch for each fault, written apart from ``harness/mutation``. Each is judged on small cases in
float64 and float32, and named from all that it fails. Prints a line for each, and how many are named rightly, wrongly
and not at all; exits 1 where one is named wrongly, or the right kernel fails.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.runner import task_of
from attncheck.judging.diagnosis import Evidence, decide, evidence_of
from attncheck.judging.judge_implementation import DIAGNOSABLE, judge_and_diagnose
from attncheck.judging.truth import truth_of_case
from attncheck.mutation.naming import names_of
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.reading.shapes import score_elements

Array = NDArray[Any]

PATTERNS = ("attention/*", "windows/*", "lengths/*", "grouped_heads/*", "softcap/*", "combinations/*", "coincidences/*")
MAX_SCORES = 1 << 10

FAULTS: dict[str, str] = {
    "right": "",
    "mask off by one": "causal-next-key",
    "mask strict": "causal-without-own-key",
    "mask from the end": "aligned-bottom-right",
    "causal upside down": "causal-mirrored",
    "no causality": "causality-ignored",
    "mask as drop": "mask-inverted",
    "no mask": "mask-ignored",
    "mask of batch entry 0": "mask-of-first-batch-entry",
    "last row unmasked": "last-row-unmasked",
    "mask behind softmax": "weights-not-renormalised",
    "no scale": "scale-one",
    "scale 1/d": "scale-inverse-width",
    "scale 0.3": "scale-fitted",
    "scale times 1.01": "scale-fitted",
    "scale with log2e": "scale-times-log2e",
    "bias scaled": "bias-scaled",
    "bias twice": "bias-twice",
    "bias minus": "bias-negated",
    "bias times 0.7": "bias-fitted",
    "no bias": "bias-ignored",
    "squares": "scores-squared",
    "softmax dim -2": "softmax-over-queries",
    "softmax dim 1": "softmax-over-heads",
    "window wider": "window-too-wide-left",
    "window narrower": "window-too-narrow-left",
    "no window": "window-ignored",
    "lengths inclusive": "key-lengths-one-too-long",
    "no lengths": "key-lengths-ignored",
    "softcap off": "softcap-ignored",
    "tiled groups": "heads-tiled",
    "key as value": "value-read-as-key",
    "next value head": "value-of-next-head",
    "in float32": "accuracy-of-float32",
    "weights in float16": "accuracy-of-16-bits",
    "output times 1.001": "",
    "denominator plus 0.01": "",
    "last key dropped": "",
    "second key twice": "",
    "first value zero": "",
    "query rows reversed": "",
    "heads reversed": "",
    "batch entries swapped": "",
    "scores clipped at 1": "",
    "one element": "",
    "noise of a tenth": "",
    "keys shifted by one": "",
    "every second column": "",
    "temperature by row": "",
    "relu for exp": "",
    "top two keys": "",
    "diagonal left out": "",
    "values of the first batch entry": "",
}
"""Each fault with what may rightly be said of it, or nothing."""


def attention(fault: str) -> Callable[..., Array]:
    """Return a kernel with one fault."""

    def run(
        query: Array, key: Array, value: Array, *, mask: Array | None = None, bias: Array | None = None,
        is_causal: bool = False, scale: float | None = None, softcap: float | None = None,
        window: tuple[int | None, int | None] | None = None, key_lengths: Array | None = None,
    ) -> Array:  # fmt: skip
        dtype, (_, heads, queries, width) = query.dtype, query.shape
        if fault == "in float32":
            query, key, value = (each.astype(np.float32) for each in (query, key, value))
        group = heads // key.shape[1]
        spread = np.tile if fault == "tiled groups" else np.repeat
        key, value = (spread(each, (1, group, 1, 1)) if spread is np.tile else np.repeat(each, group, 1)
                      for each in (key, value))  # fmt: skip
        value = _values(fault, key, value)
        if fault == "keys shifted by one":
            key = np.roll(key, 1, -2)
        factor = {"no scale": 1.0, "scale 1/d": 1 / width, "scale 0.3": 0.3}.get(fault) if scale is None else scale
        factor = width**-0.5 if factor is None else factor
        factor *= {"scale times 1.01": 1.01, "scale with log2e": 1 / np.log(2)}.get(fault, 1.0)
        scores = (query @ key.swapaxes(-1, -2)) * query.dtype.type(factor)
        if fault == "squares":
            scores = scores * scores
        if fault == "temperature by row":
            scores = scores * np.linspace(1, 2, queries, dtype=query.dtype)[:, None]
        if softcap is not None and fault != "softcap off":
            scores = query.dtype.type(softcap) * np.tanh(scores / query.dtype.type(softcap))
        if fault == "scores clipped at 1":
            scores = np.minimum(scores, 1)
        if bias is not None and fault != "no bias":
            change = {"bias scaled": factor, "bias twice": 2, "bias minus": -1, "bias times 0.7": 0.7}.get(fault, 1)
            scores = scores + np.where(np.isfinite(bias), bias, 0).astype(query.dtype) * query.dtype.type(change)
            scores = np.where(np.isfinite(bias), scores, -np.inf)
        allowed = _allowed(fault, scores, mask, is_causal, window, key_lengths)
        weights = _weights(fault, scores, allowed)
        if fault == "weights in float16":
            weights = weights.astype(np.float16).astype(query.dtype)
        return _output(fault, weights @ value).astype(dtype)

    return run


def _values(fault: str, key: Array, value: Array) -> Array:
    value = value.copy()
    if fault == "key as value" and key.shape == value.shape:
        return key
    if fault == "next value head":
        return np.roll(value, -1, 1)
    if fault == "first value zero":
        value[..., 0, :] = 0
    if fault == "second key twice" and value.shape[-2] > 2:
        value[..., 2, :] = value[..., 1, :]
    if fault == "values of the first batch entry":
        return np.broadcast_to(value[:1], value.shape)
    return value


def _allowed(
    fault: str, scores: Array, mask: Array | None, is_causal: bool, window: Any, key_lengths: Array | None
) -> Array:
    queries, keys = scores.shape[-2:]
    i, j = np.arange(queries)[:, None], np.arange(keys)
    allowed = np.ones(scores.shape, dtype=bool)
    if is_causal and fault != "no causality":
        moved = {"mask off by one": 1, "mask strict": -1, "mask from the end": keys - queries}.get(fault, 0)
        allowed &= j >= i if fault == "causal upside down" else j <= i + moved
    if mask is not None and fault != "no mask":
        mask = ~mask if fault == "mask as drop" else mask
        allowed &= mask[:1] if fault == "mask of batch entry 0" else mask
    if window is not None and fault != "no window":
        left, right = window
        more = {"window wider": 1, "window narrower": -1}.get(fault, 0)
        allowed &= True if left is None else j >= i - left - more
        allowed &= True if right is None else j <= i + right
    if key_lengths is not None and fault != "no lengths":
        allowed &= j < key_lengths[:, None, None, None] + (fault == "lengths inclusive")
    if fault == "last row unmasked":
        allowed[..., -1, :] = True
    if fault == "last key dropped" and keys > 1:
        allowed[..., -1] = False
    if fault == "diagonal left out" and keys > 1:
        allowed = allowed & (i != j)
    if fault == "top two keys":
        kept = np.sort(np.where(allowed, scores, -np.inf), -1)[..., -2:][..., :1]
        allowed &= scores >= kept
    return allowed


def _weights(fault: str, scores: Array, allowed: Array) -> Array:
    axis = {"softmax dim -2": -2, "softmax dim 1": 1}.get(fault, -1)
    logits = scores if fault == "mask behind softmax" else np.where(allowed, scores, -np.inf)
    highest = logits.max(axis=axis, keepdims=True, initial=-np.inf)
    shifted = logits - np.where(np.isfinite(highest), highest, 0)
    powers = (
        np.maximum(np.where(np.isfinite(shifted), shifted, -9) + 2, 0) if fault == "relu for exp" else np.exp(shifted)
    )
    total = powers.sum(axis=axis, keepdims=True) + (0.01 if fault == "denominator plus 0.01" else 0)
    weights = (powers / np.where(total == 0, 1, total)).astype(scores.dtype)
    return np.where(allowed, weights, 0) if fault == "mask behind softmax" else weights


def _output(fault: str, output: Array) -> Array:
    output = output.copy()
    match fault:
        case "output times 1.001":
            output *= output.dtype.type(1.001)
        case "query rows reversed":
            output = output[..., ::-1, :]
        case "heads reversed":
            output = output[:, ::-1]
        case "batch entries swapped":
            output = output[::-1]
        case "one element":
            output.flat[0] += 1
        case "noise of a tenth":
            output *= (1 + 0.1 * np.random.default_rng(1).standard_normal(output.shape)).astype(output.dtype)
        case "every second column":
            output[..., 1::2] = 0
    return output


def evidence(patterns: Sequence[str]) -> dict[str, dict[Any, Evidence]]:
    """Return what every failing case says of each fault; those that a kernel cannot take are left out."""
    found: dict[str, dict[Any, Evidence]] = {fault: {} for fault in FAULTS}
    for case in select_cases(patterns).cases:
        if case.operation != "attention":
            continue
        exact = make_exact_inputs(case)
        for dtype in (dtype for dtype in case.dtypes if dtype in ("float64", "float32")):
            inputs = convert_inputs(case, exact, dtype)
            if score_elements(case.operation, case.options, inputs.arrays) > MAX_SCORES:
                continue
            task = task_of(case, inputs)
            if {"past_key", "empty_rows"} & {*task.inputs, *task.options}:
                continue
            truth = truth_of_case(case, dtype, inputs, ["output"])
            for fault, cases in found.items():
                with np.errstate(all="ignore"):
                    stages = {"output": attention(fault)(**task.inputs, **task.options)}
                judged = judge_and_diagnose(truth, stages, case.stage_shapes, "native")
                if judged.judgements[0].verdict in DIAGNOSABLE:
                    cases[case.id, dtype] = evidence_of(judged.findings, "output", case.operation)
    return found


def main(patterns: Sequence[str]) -> int:
    """Print what is named of each fault."""
    counts: Counter[str] = Counter()
    for fault, cases in evidence(patterns or PATTERNS).items():
        names = names_of(decide(cases).values())
        wanted = FAULTS[fault]
        outcome = (
            "not named"
            if not names
            else "rightly"
            if all(wanted in each.split(" or ") for each in names)
            else "wrongly"
        )
        if fault == "right":
            outcome = "wrongly" if cases else "right"
        counts[outcome] += 1
        print(f"{outcome:10} {fault:32} {len(cases):4} failing cases: {', '.join(names) or '-'}")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["wrongly"] > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
