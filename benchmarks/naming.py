"""Kernels of another hand: what is named of faults that are not the catalogue's, where the output alone is returned?

    python benchmarks/naming.py [PATTERNS]
    python benchmarks/naming.py --together

One plain kernel with a switch for each fault, written apart from ``harness/mutation``, and kernels with two of them.
Each is judged on small cases in float64 and float32, and named from all that it fails. Prints a line for each, and how
many are named rightly, in part (one fault of two), wrongly and not at all; exits 1 where one is named wrongly, or the
right kernel fails.

With ``--together`` the kernels have conventions: all pairs of twelve, forty threes, and forty with a fault beside one
to four of them. Each is diagnosed as a run is, in float64. Prints how many are named rightly, and of how many faults a
report says that they are there, and which they are.
"""

from __future__ import annotations

import inspect
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.common.store import Store
from attncheck.common.wording import CONVENTIONS_SEPARATOR, count_noun
from attncheck.diagnosis.case_evidence import Evidence
from attncheck.diagnosis.decision import DIAGNOSABLE_VERDICTS, NAME_SEPARATOR, collect_evidence, decide_diagnoses
from attncheck.diagnosis.examine import judge_and_diagnose
from attncheck.diagnosis.run import diagnose_rows
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import Parameters, missing_conventions
from attncheck.execution.worker import Computed
from attncheck.judging.truth import truth_of_case
from attncheck.judging.units import Evaluation, Judge
from attncheck.mutation.judgement import diagnosis_names
from attncheck.planning.plan import Plan
from attncheck.reading.inputs import convert_inputs, make_exact_inputs, make_problem_of_case
from attncheck.reading.selection import select_cases
from attncheck.reading.shapes import count_scores
from attncheck.results.format import Row

Array = NDArray[Any]

PATTERNS = (
    *("attention/*", "windows/*", "lengths/*", "grouped_heads/*", "softcap/*", "coincidences/*"),
    *("caches/*", "query_offsets/*", "probes/*", "designs/attention/*", "designs/kernels/*"),
)
MAX_SCORES = 1 << 12

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
    "scale 1/sqrt(3d)": "scale-inverse-root-of-3D",
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
    "keys of zeros to tiles of eight": "zero-score-keys-to-tiles-of-8",
    "causality as numbers": "causality-added",
    "output times 1.001": "stage-fitted",
    "denominator plus 0.01": "",
    "last key dropped": "last-key-dropped",
    "second key twice": "",
    "first value zero": "",
    "query rows reversed": "",
    "heads reversed": "",
    "batch entries swapped": "",
    "scores clipped at 1": "",
    "one element": "",
    "noise of a tenth": "",
    "keys shifted by one": "key-one-position-late",
    "every second column": "",
    "temperature by row": "",
    "relu for exp": "",
    "top two keys": "",
    "diagonal left out": "window-without-own-key",
    "values of the first batch entry": "value-of-first-batch-entry",
}
"""Each fault with what may rightly be said of it, or nothing."""

PAIRS = [
    ("mask from the end", other)
    for other in (
        *("no scale", "scale 1/d", "bias twice", "no bias", "mask as drop", "softcap off", "tiled groups"),
        *("window wider", "no lengths", "lengths inclusive", "next value head", "one element", "last key dropped"),
    )
] + [
    *(("mask off by one", "bias minus"), ("mask off by one", "lengths inclusive"), ("mask strict", "tiled groups")),
    *(("no causality", "bias scaled"), ("no causality", "no mask"), ("no mask", "no bias"), ("no mask", "softcap off")),
    *(("mask as drop", "window narrower"), ("mask of batch entry 0", "tiled groups"), ("no scale", "no bias")),
    *(("scale 1/d", "no mask"), ("scale 0.3", "softcap off"), ("scale with log2e", "no causality")),
    *(("bias twice", "softcap off"), ("bias minus", "tiled groups"), ("bias scaled", "window wider")),
    *(("no bias", "no window"), ("no window", "no lengths"), ("window wider", "tiled groups")),
    *(("lengths inclusive", "softcap off"), ("no lengths", "no bias"), ("softcap off", "tiled groups")),
    *(("key as value", "no mask"), ("next value head", "no bias"), ("in float32", "no causality")),
    *(("output times 1.001", "no bias"), ("relu for exp", "no mask")),
]
"""Kernels with two faults."""


CONVENTIONS = {
    "mask from the end": "aligned-bottom-right",
    "tiled groups": "heads-tiled",
    "mask as drop": "mask-inverted",
    "softcap behind the bias": "softcap-after-biased",
    "window narrower": "window-too-narrow-left",
    "window open on the right": "window-too-narrow-right",
    "lengths inclusive": "key-lengths-one-too-long",
    "scale 1/d": "scale-inverse-width",
    "bias scaled": "bias-scaled",
    "lowest number for minus infinity": "empty-rows-uniform",
    "fill ignored": "fill-minus-infinity",
    "rotation of neighbours": "rotary-pairs",
}
"""What a kernel may mean on purpose, with its name."""
CONVENTION_PATTERNS = (*PATTERNS, "empty_rows/*", "mask_fill/*", "rotary/*", "position_biases/*")


def attention(*faults: str) -> Callable[..., Array]:
    """Return a kernel with some faults."""

    def run(
        query: Array, key: Array, value: Array, *, mask: Array | None = None, bias: Array | None = None,
        is_causal: bool = False, scale: float | None = None, softcap: float | None = None,
        window: tuple[int | None, int | None] | None = None, key_lengths: Array | None = None,
        mask_fill: float | None = None, rotary_cos: Array | None = None, rotary_sin: Array | None = None,
        rotary_interleaved: bool = False,
    ) -> Array:  # fmt: skip
        if rotary_cos is not None and rotary_sin is not None:
            by_pairs = rotary_interleaved or "rotation of neighbours" in faults
            query, key = (_rotated(each, rotary_cos, rotary_sin, by_pairs=by_pairs) for each in (query, key))
        dtype, (_, heads, queries, width) = query.dtype, query.shape
        if "in float32" in faults:
            query, key, value = (each.astype(np.float32) for each in (query, key, value))
        group = heads // key.shape[1]
        spread = np.tile if "tiled groups" in faults else np.repeat
        key, value = (spread(each, (1, group, 1, 1)) if spread is np.tile else np.repeat(each, group, 1)
                      for each in (key, value))  # fmt: skip
        value = _values(faults, key, value)
        if "keys shifted by one" in faults:
            key = np.roll(key, 1, -2)
        default = _of(
            faults,
            {"no scale": 1.0, "scale 1/d": 1 / width, "scale 1/sqrt(3d)": (3 * width) ** -0.5, "scale 0.3": 0.3},
            width**-0.5,
        )
        factor = default if scale is None else scale
        factor *= _of(faults, {"scale times 1.01": 1.01, "scale with log2e": 1 / np.log(2)}, 1.0)
        scores = (query @ key.swapaxes(-1, -2)) * query.dtype.type(factor)
        if "squares" in faults:
            scores = scores * scores
        if "temperature by row" in faults:
            scores = scores * np.linspace(1, 2, queries, dtype=query.dtype)[:, None]
        is_late = "softcap behind the bias" in faults
        if softcap is not None and "softcap off" not in faults and not is_late:
            scores = query.dtype.type(softcap) * np.tanh(scores / query.dtype.type(softcap))
        if "scores clipped at 1" in faults:
            scores = np.minimum(scores, 1)
        if bias is not None and "no bias" not in faults:
            changes = {"bias scaled": factor, "bias twice": 2, "bias minus": -1, "bias times 0.7": 0.7}
            change = _of(faults, changes, 1)
            scores = scores + np.where(np.isfinite(bias), bias, 0).astype(query.dtype) * query.dtype.type(change)
            scores = np.where(np.isfinite(bias), scores, -np.inf)
        if softcap is not None and is_late:
            scores = query.dtype.type(softcap) * np.tanh(scores / query.dtype.type(softcap))
        allowed = _allowed(faults, scores, mask, is_causal, window, key_lengths)
        if mask_fill is not None and "fill ignored" not in faults:
            scores, allowed = np.where(allowed, scores, scores.dtype.type(mask_fill)), np.ones_like(allowed)
        scores, allowed = _added(faults, scores, allowed, is_causal=is_causal)
        if "lowest number for minus infinity" in faults:
            scores = np.where(allowed & np.isfinite(scores), scores, np.finfo(scores.dtype).min)
            allowed = np.ones_like(allowed)
        weights = _weights(faults, scores, allowed)
        if "weights in float16" in faults:
            weights = weights.astype(np.float16).astype(query.dtype)
        return _output(faults, weights @ value).astype(dtype)

    return run


def _added(faults: Collection[str], scores: Array, allowed: Array, *, is_causal: bool) -> tuple[Array, Array]:
    """Add who may attend to whom as numbers, where causality is."""
    is_added = is_causal and "causality as numbers" in faults
    return (scores + allowed, np.ones_like(allowed)) if is_added else (scores, allowed)


def _rotated(array: Array, cos: Array, sin: Array, *, by_pairs: bool) -> Array:
    """Rotate the first elements of vectors, each at its own position."""
    pairs = cos.shape[-1]
    first, second = (np.s_[..., : 2 * pairs : 2], np.s_[..., 1 : 2 * pairs : 2]) if by_pairs else (
        np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs]
    )  # fmt: skip
    cos, sin, rotated = cos[: array.shape[-2]], sin[: array.shape[-2]], array.copy()
    rotated[first] = array[first] * cos - array[second] * sin
    rotated[second] = array[first] * sin + array[second] * cos
    return rotated


def _of(faults: Collection[str], table: Mapping[str, Any], default: Any) -> Any:
    return next((table[fault] for fault in faults if fault in table), default)


def _values(faults: Collection[str], key: Array, value: Array) -> Array:
    value = value.copy()
    if "key as value" in faults and key.shape == value.shape:
        return key
    if "next value head" in faults:
        return np.roll(value, -1, 1)
    if "first value zero" in faults:
        value[..., 0, :] = 0
    if "second key twice" in faults and value.shape[-2] > 2:
        value[..., 2, :] = value[..., 1, :]
    if "values of the first batch entry" in faults:
        return np.broadcast_to(value[:1], value.shape)
    return value


def _allowed(
    faults: Collection[str], scores: Array, mask: Array | None, is_causal: bool, window: Any, key_lengths: Array | None
) -> Array:
    queries, keys = scores.shape[-2:]
    i, j = np.arange(queries)[:, None], np.arange(keys)
    allowed = np.ones(scores.shape, dtype=bool)
    if is_causal and "no causality" not in faults:
        moved = _of(faults, {"mask off by one": 1, "mask strict": -1, "mask from the end": keys - queries}, 0)
        allowed &= j >= i if "causal upside down" in faults else j <= i + moved
    if mask is not None and "no mask" not in faults:
        mask = ~mask if "mask as drop" in faults else mask
        allowed &= mask[:1] if "mask of batch entry 0" in faults else mask
    if window is not None and "no window" not in faults:
        left, right = window
        more = _of(faults, {"window wider": 1, "window narrower": -1}, 0)
        allowed &= True if left is None else j >= i - left - more
        allowed &= True if right is None else j <= i + right - ("window open on the right" in faults)
    if key_lengths is not None and "no lengths" not in faults:
        allowed &= j < key_lengths[:, None, None, None] + ("lengths inclusive" in faults)
    if "last row unmasked" in faults:
        allowed[..., -1, :] = True
    if "last key dropped" in faults and keys > 1:
        allowed[..., -1] = False
    if "diagonal left out" in faults and keys > 1:
        allowed = allowed & (i != j)
    if "top two keys" in faults:
        kept = np.sort(np.where(allowed, scores, -np.inf), -1)[..., -2:][..., :1]
        allowed &= scores >= kept
    return allowed


def _weights(faults: Collection[str], scores: Array, allowed: Array) -> Array:
    axis = _of(faults, {"softmax dim -2": -2, "softmax dim 1": 1}, -1)
    logits = scores if "mask behind softmax" in faults else np.where(allowed, scores, -np.inf)
    highest = logits.max(axis=axis, keepdims=True, initial=-np.inf)
    shifted = logits - np.where(np.isfinite(highest), highest, 0)
    powers = (
        np.maximum(np.where(np.isfinite(shifted), shifted, -9) + 2, 0) if "relu for exp" in faults else np.exp(shifted)
    )
    if "keys of zeros to tiles of eight" in faults:
        missing = -scores.shape[-1] % 8
        with np.errstate(over="ignore"):
            further = missing * np.exp(-np.where(np.isfinite(highest), highest, 0))
    else:
        further = 0
    total = powers.sum(axis=axis, keepdims=True) + further + (0.01 if "denominator plus 0.01" in faults else 0)
    weights = (powers / np.where(total == 0, 1, total)).astype(scores.dtype)
    return np.where(allowed, weights, 0) if "mask behind softmax" in faults else weights


def _output(faults: Collection[str], output: Array) -> Array:
    output = output.copy()
    if "output times 1.001" in faults:
        output *= output.dtype.type(1.001)
    if "query rows reversed" in faults:
        output = output[..., ::-1, :]
    if "heads reversed" in faults:
        output = output[:, ::-1]
    if "batch entries swapped" in faults:
        output = output[::-1]
    if "one element" in faults:
        output.flat[0] += 1
    if "noise of a tenth" in faults:
        output *= (1 + 0.1 * np.random.default_rng(1).standard_normal(output.shape)).astype(output.dtype)
    if "every second column" in faults:
        output[..., 1::2] = 0
    return output


def evidence(patterns: Sequence[str]) -> dict[tuple[str, ...], dict[Any, Evidence]]:
    """Return what every failing case says of each kernel; cases that a kernel cannot take are left out."""
    found: dict[tuple[str, ...], dict[Any, Evidence]] = {
        **{(fault,): {} for fault in FAULTS},
        **{tuple(pair): {} for pair in PAIRS},
    }
    for case in select_cases(patterns).cases:
        if case.operation != "attention":
            continue
        exact = make_exact_inputs(case)
        for dtype in (dtype for dtype in case.dtypes if dtype in ("float64", "float32")):
            inputs = convert_inputs(case, exact, dtype)
            if not 0 < count_scores(case.operation, case.options, inputs.arrays) <= MAX_SCORES:
                continue
            call = make_problem_of_case(case, inputs).as_call()
            given = {**call.inputs, **call.options}
            if "empty_rows" in given or TAKEN.missing_names(given):
                continue
            truth = truth_of_case(case, inputs, ["output"])
            for faults, cases in found.items():
                with np.errstate(all="ignore"):
                    stages = {"output": attention(*faults)(**given)}
                judged = judge_and_diagnose(truth, stages, case.stage_shapes, "native")
                if judged.judgements[0].verdict in DIAGNOSABLE_VERDICTS:
                    cases[case.id, dtype] = collect_evidence(judged.findings, "output", case.operation)
    return found


def outcome_of(faults: Sequence[str], cases: Mapping[Any, Evidence], names: Sequence[str]) -> str:
    """Return how a kernel was named: rightly where every name is that of one of its faults."""
    wanted = {name for fault in faults if (name := FAULTS[fault])}
    if faults == ("right",):
        return "wrongly" if cases else "right"
    if not names:
        return "not named"
    if not all(wanted & {*each.split(" or ")} for each in names):
        return "wrongly"
    found = {name for each in names for name in each.split(" or ")}
    return "rightly" if wanted <= found else "in part"


def named_together(kernels: Sequence[Sequence[str]]) -> Iterator[Counter[str]]:
    """Yield what a run names of each kernel with its failing cases, "" for those without a name."""
    cases = [case for case in select_cases(CONVENTION_PATTERNS).cases if case.operation == "attention"]
    plan = Plan.of(cases, ("float64",))
    entry = UserImplementation("kernel", "", (), classes={"float64": "native"}, parameters={"attention": TAKEN})
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge([Implementation(entry, "attention")], store=Store(Path(folder)))
        yield from (_named_by_a_run(faults, plan, judge) for faults in kernels)


TAKEN = Parameters(frozenset(inspect.signature(attention()).parameters))


def _named_by_a_run(faults: Sequence[str], plan: Plan, judge: Judge) -> Counter[str]:
    (item,), kernel = judge.implementations, attention(*faults)
    rows: list[Row] = []
    returned: dict[Evaluation, Computed] = {}
    for unit in plan:
        case, inputs = plan.case(unit), plan.inputs(unit)
        call = make_problem_of_case(case, inputs).as_call()
        unasked = missing_conventions(TAKEN, call.options)
        given = {name: value for name, value in {**call.inputs, **call.options}.items() if name not in unasked}
        small = 0 < count_scores(case.operation, case.options, inputs.arrays) <= MAX_SCORES
        if not small or unasked or TAKEN.missing_names(given):
            continue
        with np.errstate(all="ignore"):
            computed = Computed({"output": kernel(**given)}, ignored_conventions=unasked)
        result = judge.judge_unit(case, unit.dtype, inputs, {item.name: computed})
        rows += [row for row in result.rows if row.verdict.exit_code]
        returned[item.name, case.id, unit.dtype] = computed
    found = diagnose_rows(rows, plan, judge, returned.get)
    return Counter((row.diagnosis or "") for row in found if row.comparison == "stage" and not row.xfail)


def together() -> int:
    """Print what is named of conventions and of faults beside them; return 1 where a pair has a wrong name."""
    choice = random.Random(44)
    faults = [
        fault for fault, name in FAULTS.items() if name and fault not in CONVENTIONS and fault not in _OF_ACCURACY
    ]
    mixed = [
        (fault, *choice.sample([*CONVENTIONS], 1 + number % 4))
        for number, fault in enumerate(choice.sample(faults, len(faults)) + choice.sample(faults, len(faults)))
    ][:40]
    pairs = [*combinations(CONVENTIONS, 2)]
    threes = choice.sample([*combinations(CONVENTIONS, 3)], _THREES)
    kernels = (*pairs, *threes, *mixed)
    counts, wrong = Counter[str](), 0
    for kernel, found in zip(kernels, named_together(kernels), strict=True):
        parts = {part.partition(NAME_SEPARATOR)[0] for name in found for part in name.split(CONVENTIONS_SEPARATOR)} - {
            ""
        }
        names = {_AS_ONE.get(part, part) for part in parts}
        known = {CONVENTIONS[part] for part in kernel if part in CONVENTIONS}
        if known >= _OF_WINDOW:
            names, known = names - _OF_WINDOW | {_BOTH_ENDS}, known - _OF_WINDOW | {_BOTH_ENDS}
        fault = FAULTS[kernel[0]] if kernel[0] not in CONVENTIONS else ""
        strange = names - known - {fault}
        causes = names - known
        if fault:
            outcome = f"{'named' if fault in names else 'shown' if causes or found[''] else 'hidden'}"
        else:
            outcome = "rightly" if names == known else "in part" if names < known else "wrongly"
            wrong += outcome == "wrongly"
        counts[f"{'faults' if fault else 'pairs' if len(kernel) == 2 else 'threes'} {outcome}"] += 1
        print(f"{outcome:8} {' and '.join(kernel):80} {dict(found)} {sorted(strange) or ''}", flush=True)
    said = f"{len(pairs)} pairs, {len(threes)} threes and {len(mixed)} kernels with a fault"
    print(f"Of {said}: {dict(sorted(counts.items()))}")
    return int(wrong > 0)


_THREES = 40
"""So many of the 220 ways to have three conventions at once."""
_OF_WINDOW = frozenset({"window-too-narrow-left", "window-too-narrow-right"})
_BOTH_ENDS = "window-too-narrow-left-and-right"
_AS_ONE = {"scale-twice": "scale-inverse-width"}
"""Names of one answer: the scale is left to its default wherever it is another one."""
_OF_ACCURACY = frozenset({"in float32", "weights in float16"})
"""What changes accuracy alone: it is no fault beside others."""


def main(patterns: Sequence[str]) -> int:
    """Print what is named of each fault."""
    if "--together" in patterns:
        return together()
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for faults, cases in evidence(patterns or PATTERNS).items():
        names = diagnosis_names(decide_diagnoses(cases).values())
        outcome = outcome_of(faults, cases, names)
        counts[len(faults)][outcome] += 1
        print(f"{outcome:10} {' and '.join(faults):48} {len(cases):4} failing cases: {', '.join(names) or '-'}")
    for number, of in counts.items():
        print(f"{count_noun(number, 'fault')}: {', '.join(f'{count} {outcome}' for outcome, count in of.items())}")
    return int(any(of["wrongly"] for of in counts.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
