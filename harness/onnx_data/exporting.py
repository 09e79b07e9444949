"""Cases written as ONNX's tests: inputs as stored in a dtype, and as outputs the exact answer, rounded to it once.

Outputs that a case takes from a file, as one that was imported does, are written as they are, so that the way there and
back loses nothing; the exact answer stands in their place where it is requested.

A case of attention becomes a node of ONNX's Attention, of the least opset that has what it needs. Causality and windows
behind a past, or from the end of lengths, stay as they are. All other rules about who attends to whom become its
attn_mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.attention.exact_array import Enclosure
from attncheck.backends.onnx_attention import STAGE_OF_MODE, WITH_WINDOWS, side_by_side
from attncheck.common.store import Store
from attncheck.interchange.vectors import lacks
from attncheck.judging.truth import truth_of_case
from attncheck.onnx_data.files import (
    BackendTest,
    NotACase,
    counted_names,
    padded,
    shape_in_file,
    softmax_test,
    write_test,
)
from attncheck.planning.plan import Plan
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.reading.lowering import Array, query_offset
from attncheck.reading.problem import Problem
from attncheck.spec import inputs_of
from attncheck.spec.dtypes import numpy_dtype, rounded_once

_PREFIX = "test_"


@dataclass
class Exported:
    """The tests that were written, the cases that were not by the reason, and how stored numbers compare.

    ``alike`` counts the arrays that cases take from files as expected ones and that are the exact answer bit for bit,
    and ``others`` the largest difference of each other one, in units in the last place.
    """

    is_exact: bool = False
    tests: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    alike: int = 0
    others: list[float] = field(default_factory=list)

    def compare(self, given: dict[str, Array], exact: dict[str, Array]) -> None:
        """Count the arrays that are the exact answer, and measure the others."""
        for stage, array in given.items():
            if array.tobytes() == exact[stage].tobytes():
                self.alike += 1
            else:
                self.others.append(_units_apart(exact[stage], array.astype(np.float64)))


def export_tests(
    cases: Sequence[Case], dtypes: Sequence[str], folder: Path, store: Store, *, exact: bool = False
) -> Exported:
    """Write cases as tests into a folder, one for each dtype. Raises ``OutputError`` and ``UsageError``.

    With ``exact`` all outputs are the exact answer, those too that a case takes from a file.
    """
    exported = Exported(exact)
    plan = Plan.of(cases, dtypes)
    for unit in plan:
        case = _as_stored(plan.case(unit))
        name = name_of(case, unit.dtype)
        try:
            if name in exported.tests:
                raise NotACase("another case of the same name")
            test = _test_of(name, case, unit.dtype, plan.inputs(unit), store, exported)
            write_test(folder / name, test)
        except NotACase as reason:
            exported.left_out.setdefault(str(reason), []).append(f"{case.id} in {unit.dtype}")
            continue
        exported.tests.append(name)
    return exported


def name_of(case: Case, dtype: str) -> str:
    """Return what a test is called: as the case, with its dtype where the case has several."""
    file, _, own = case.id.rpartition("/")
    name = own if own.startswith("test-") else f"{_PREFIX}{file}_{own}"
    name += f"_{dtype}" if len(case.dtypes) > 1 else ""
    return "".join(each if each.isalnum() else "_" for each in name)


def _as_stored(case: Case) -> Case:
    """Round what becomes an attribute to the float32 that holds it, so that the exact answer is that of the model."""
    rounded: dict[str, Any] = {
        name: _as_float32(value) for name, value in case.options.items() if isinstance(value, float)
    }
    return replace(case, options=replace(case.options, **rounded))


def _as_float32(number: float | None) -> float | None:
    return None if number is None else float(np.float32(number))


def _test_of(name: str, case: Case, dtype: str, inputs: Inputs, store: Store, exported: Exported) -> BackendTest:
    if case.operation not in ("attention", "softmax"):
        raise NotACase(f"{case.operation}, which is no operator of ONNX")
    is_softmax = case.operation == "softmax"
    if not is_softmax:
        check_said(case)
    extra = None if is_softmax else extra_stage(case)
    stages = ["weights"] if is_softmax else ["output", *([extra] if extra else [])]
    truth = truth_of_case(case, inputs, stages, store)
    if reason := lacks(truth, stages):
        raise NotACase(reason)
    outputs = {stage: rounded(truth.exact[stage], dtype) for stage in stages}
    given = _given(case, dtype, outputs)
    exported.compare(given, outputs)
    if not exported.is_exact:
        outputs |= given
    if is_softmax:
        return softmax_test(name, case, inputs.arrays, outputs["weights"])
    return attention_test(name, case, inputs.arrays, outputs)


def rounded(exact: Enclosure, dtype: str) -> Array:
    """Round the exact numbers to a dtype once, to the nearest, in the middle between two to the even one.

    What float64 cannot hold decides where its number would be in the middle: it is cut off, and the last bit set to 1
    instead (rounding to odd, as in ``reading/dtypes.py``).
    """
    if dtype == "float64":
        return exact.high
    high, low = exact.high, np.where(np.abs(exact.low) > exact.radius, exact.low, 0.0)
    inexact = (low != 0) & np.isfinite(high) & (high != 0)
    outwards = inexact & (np.signbit(low) != np.signbit(high))
    cut = np.where(outwards, np.nextafter(high, 0.0), high)
    odd = np.ascontiguousarray(cut).view(np.uint64) | inexact.astype(np.uint64)
    return rounded_once(odd.view(np.float64), dtype)


def _given(case: Case, dtype: str, outputs: dict[str, Array]) -> dict[str, Array]:
    """Return the outputs that a case takes from a file, by their stages; none in another dtype than they are of."""
    return {
        expected.of: expected.numbers.value.astype(numpy_dtype(dtype))
        for expected in case.expected
        if expected.stored and expected.numbers is not None and expected.of in outputs and case.computed_in == dtype
    }


def _units_apart(own: Array, stored: NDArray[np.float64]) -> float:
    """Return the largest difference in units in the last place of the exact number."""
    exact = own.astype(np.float64)
    info = ml_dtypes.finfo(numpy_dtype(own.dtype.name))
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(info.smallest_normal))))
        units = np.abs(stored - exact) / (float(info.eps) * 2.0**exponent)
    return float(np.max(np.where(exact == stored, 0.0, units)))


def lines_of(exported: Exported) -> Iterator[str]:
    """Yield lines on what was written and what was not."""
    yield f"{len(exported.tests):,} tests: a case in a dtype each"
    if exported.alike or exported.others:
        yield f"outputs that cases take from files: {exported.alike:,} are the exact answer, rounded once, bit for bit"
    if exported.others:
        written = "the exact answer is written" if exported.is_exact else "they are written as they are"
        apart = f"{len(exported.others):,} differ from it by at most {max(exported.others):.3g} units in the last place"
        yield f"outputs that cases take from files: {apart}; {written}"
    for reason, names in exported.left_out.items():
        yield f"left out: {counted_names(names)}: {reason}"


_SAID = frozenset({"scale", "softcap", "is_causal", "window", "alignment", "heads", "kv_heads", "empty_rows"})
_TAKEN = frozenset(
    name
    for name, spec in inputs_of("attention", None).items()
    if spec.required or spec.folds_into in ("mask", "key", "value") or name in ("mask", "bias")
)
"""Inputs that the operator has, or that become its mask."""
_OPSET, _WITH_LENGTHS = 23, 24


@dataclass(frozen=True)
class _Rules:
    """The rules of who attends to whom: ``mask`` and lengths as the operator takes them, and its attributes."""

    attributes: Mapping[str, int]
    mask: Array | None
    lengths: Array | None = None
    are_folded: bool = False


def check_said(case: Case) -> None:
    """Raises ``NotACase`` for an option or an input that the operator does not have."""
    options = sorted(case.options.keys() - _SAID)
    inputs = sorted(case.inputs.keys() - _TAKEN)
    if options or inputs:
        raise NotACase(f"{(options or inputs)[0]}, which the operator does not have")
    if case.options.get("empty_rows", "zero") != "zero":
        raise NotACase("empty_rows that are not zero, as the operator has them")
    if not case.options.get("scale", 1.0) > 0:
        raise NotACase("a scale that is not positive, whose root the operator takes")


def extra_stage(case: Case) -> str | None:
    """Return the stage that qk_matmul_output is to hold: the first that the case expects, and the operator has."""
    return next((expected.of for expected in case.expected if _kind_of(expected.of) in STAGE_OF_MODE), None)


def _kind_of(stage: str) -> str:
    """Return the stage under which the operator hands one out: biased scores are masked ones without a mask."""
    return "masked" if stage == "biased" else stage


def attention_test(name: str, case: Case, arrays: Mapping[str, Array], stages: Mapping[str, Array]) -> BackendTest:
    """Return the test of a case with its exact stages. Raises ``NotACase``."""
    rules = _rules(case, arrays)
    inputs = {onnx_name: arrays[own] for own, onnx_name in (("query", "Q"), ("key", "K"), ("value", "V"))}
    outputs = {"Y": stages["output"]}
    for word, own in (("key", "K"), ("value", "V")):
        if f"past_{word}" in arrays:
            past = arrays[f"past_{word}"]
            outputs[f"present_{word}"] = np.concatenate([past, inputs[own]], axis=2)
    attributes: dict[str, Any] = dict(rules.attributes)
    attributes |= {each: float(case.options[each]) for each in ("scale", "softcap") if each in case.options}
    if case.merged:
        attributes |= {"q_num_heads": inputs["Q"].shape[1], "kv_num_heads": inputs["K"].shape[1]}
        inputs = {each: side_by_side(array) for each, array in inputs.items()}
        outputs["Y"] = side_by_side(outputs["Y"])
    inputs |= _named("attn_mask", _attn_mask(case, arrays, rules))
    inputs |= {each: arrays[each] for each in ("past_key", "past_value") if each in arrays}
    inputs |= _named("nonpad_kv_seqlen", rules.lengths)
    if extra := extra_stage(case):
        attributes["qk_matmul_output_mode"] = STAGE_OF_MODE.index(_kind_of(extra))
        outputs["qk_matmul_output"] = stages[extra]
    return BackendTest(name, "Attention", _opset(rules), attributes, inputs, outputs)


def _named(name: str, array: Array | None) -> dict[str, Array]:
    return {} if array is None else {name: array}


def _opset(rules: _Rules) -> int:
    if rules.attributes.keys() & {"left_window_size", "right_window_size"}:
        return WITH_WINDOWS
    return _OPSET if rules.lengths is None else _WITH_LENGTHS


def _rules(case: Case, arrays: Mapping[str, Array]) -> _Rules:
    """Return who attends to whom, as the operator says it where it can, and otherwise as one mask."""
    attributes, mask, lengths = _positions(case), arrays.get("mask"), arrays.get("key_lengths")
    if "query_mask" not in arrays:
        if lengths is not None and not attributes and _is_causality_of(mask, arrays):
            return _Rules({"is_causal": 1}, None, lengths)
        if _are_known(case, arrays, bool(attributes)):
            return _Rules(attributes, mask, lengths)
        if lengths is None and attributes and "past_key" not in arrays and _begin(case, arrays, _keys(arrays)):
            return _Rules(attributes, mask, np.full(len(arrays["query"]), _keys(arrays)))
    rows = np.arange(arrays["query"].shape[2])  # with rows, causality is part of the mask as well
    folded = Problem(case.operation, case.options, arrays).canonical(rows).inputs.get("mask")
    return _Rules({}, folded, are_folded=True)


def _positions(case: Case) -> dict[str, int]:
    """Return the attributes of causality and a window."""
    attributes = {"is_causal": 1} if case.options.get("is_causal") else {}
    if window := case.options.get("window"):
        sides = zip(("left_window_size", "right_window_size"), window, strict=True)
        attributes |= {name: side for name, side in sides if side is not None}
    return attributes


def _keys(arrays: Mapping[str, Array]) -> int:
    past = arrays.get("past_key")
    return int(arrays["key"].shape[2]) + (0 if past is None else int(past.shape[2]))


def _are_known(case: Case, arrays: Mapping[str, Array], counts_positions: bool) -> bool:
    """Return whether the operator itself has these lengths, and queries where they stand."""
    lengths, past = arrays.get("key_lengths"), arrays.get("past_key")
    if lengths is None:
        return not counts_positions or _begin(case, arrays, 0 if past is None else past.shape[2], from_end=False)
    return past is None and (not counts_positions or _begin(case, arrays, lengths))


def _begin(case: Case, arrays: Mapping[str, Array], at: Array | int, *, from_end: bool = True) -> bool:
    """Return whether the first query of each batch entry stands at a position, or as many queries before it."""
    own = arrays.get("query_offsets", np.array(query_offset(case.options, arrays)))
    return bool((own == np.asarray(at) - (arrays["query"].shape[2] if from_end else 0)).all())


def _is_causality_of(mask: Array | None, arrays: Mapping[str, Array]) -> bool:
    """Return whether a mask says what is_causal says with lengths: the last query is at the last used key."""
    if mask is None:
        return False
    queries, keys, lengths = arrays["query"].shape[2], arrays["key"].shape[2], arrays["key_lengths"]
    positions = (lengths - queries).reshape(-1, 1, 1, 1) + np.arange(queries)[:, np.newaxis]
    causal = np.arange(keys) <= positions
    return mask.shape == causal.shape and bool((mask == causal).all())


def _attn_mask(case: Case, arrays: Mapping[str, Array], rules: _Rules) -> Array | None:
    """Return the one attn_mask, in the shape in which it lies in the case's file if it is one input of the case.

    Any other has all queries and keys: the operator adds keys to one that is short, and its implementations take no
    other axis of length 1 than batch and heads, or take it wrongly.
    """
    mask, bias = rules.mask, arrays.get("bias")
    is_input = mask is None or bias is None
    if mask is not None and bias is not None:
        bias = np.asarray(np.where(mask, bias, bias.dtype.type(-np.inf)))
    name, array = ("bias", bias) if mask is None or not is_input else ("mask", mask)
    if array is None:
        return None
    shape = shape_in_file(case, name) if is_input and not (name == "mask" and rules.are_folded) else None
    if shape is None or array.shape[-1] < _keys(arrays):
        lengths = arrays["query"].shape[2], _keys(arrays)
        return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:-2], *lengths)))
    if padded(case, name) is not None:
        if rules.lengths is None or shape[-1] < rules.lengths.max(initial=0):
            return array
        array = array[..., : shape[-1]]
    return np.ascontiguousarray(array).reshape(shape)
