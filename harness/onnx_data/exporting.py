"""Write cases as ONNX's tests: inputs as stored in a dtype, and as outputs the exact answer, rounded to it once.

Outputs that a case takes from a file, such as an imported case, are written unchanged, so that import and export lose
nothing; on request, the exact answer replaces them.

A case of attention becomes a node of ONNX's Attention, of the lowest opset that has its inputs and options. Causality
and windows after a past, or from the end of lengths, stay as they are. All other rules about which keys a query attends
to become its attn_mask.
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
from attncheck.backends.onnx_attention import OPSET_WITH_WINDOWS, STAGE_OF_OUTPUT_MODE, merge_heads
from attncheck.common.store import Store
from attncheck.interchange.vectors import missing_vectors_reason
from attncheck.judging.truth import truth_of_case
from attncheck.onnx_data.files import (
    BackendTest,
    InexpressibleError,
    format_name_count,
    mask_before_padding,
    shape_in_file,
    softmax_test,
    write_test,
)
from attncheck.planning.plan import Plan
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs
from attncheck.reading.lowering import Array, query_offset
from attncheck.reading.problem import Problem
from attncheck.spec import input_specs
from attncheck.spec.dtypes import numpy_dtype, round_to

_TEST_PREFIX = "test_"


@dataclass
class ExportResult:
    """The tests that were written, the cases that were left out by reason, and a comparison of stored numbers.

    ``equal_count`` counts the expected arrays from files that are the exact answer bit for bit. ``ulp_differences`` has
    the largest difference of each other array, in units in the last place.
    """

    is_exact: bool = False
    tests: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    equal_count: int = 0
    ulp_differences: list[float] = field(default_factory=list)

    def compare_stored_outputs(self, from_files: dict[str, Array], exact: dict[str, Array]) -> None:
        """Count the arrays that are the exact answer, and measure the others."""
        for stage, array in from_files.items():
            if array.tobytes() == exact[stage].tobytes():
                self.equal_count += 1
            else:
                self.ulp_differences.append(_difference_in_ulps(exact[stage], array.astype(np.float64)))


def export_tests(
    cases: Sequence[Case], dtypes: Sequence[str], folder: Path, store: Store, *, exact: bool = False
) -> ExportResult:
    """Write cases as tests into a folder, one for each dtype. Raises ``OutputError`` and ``UsageError``.

    With ``exact`` all outputs are the exact answer, also those that a case takes from a file.
    """
    exported = ExportResult(exact)
    plan = Plan.of(cases, dtypes)
    for unit in plan:
        case = plan.case(unit)
        # Attributes are float32: the exact answer is that of the rounded options.
        options: dict[str, Any] = {
            option: float(np.float32(value)) for option, value in case.options.items() if isinstance(value, float)
        }
        case = replace(case, options=replace(case.options, **options))
        name = onnx_test_name(case, unit.dtype)
        try:
            if name in exported.tests:
                raise InexpressibleError("another case has the same name")
            test = _make_test(name, case, unit.dtype, plan.inputs(unit), store, exported)
            write_test(folder / name, test)
        except InexpressibleError as reason:
            exported.left_out.setdefault(str(reason), []).append(f"{case.id} in {unit.dtype}")
            continue
        exported.tests.append(name)
    return exported


def onnx_test_name(case: Case, dtype: str) -> str:
    """Return the name of a test: that of the case, with the dtype if the case has several."""
    file, _, case_name = case.id.rpartition("/")
    name = case_name if case_name.startswith("test-") else f"{_TEST_PREFIX}{file}_{case_name}"
    name += f"_{dtype}" if len(case.dtypes) > 1 else ""
    return "".join(character if character.isalnum() else "_" for character in name)


def _make_test(
    name: str, case: Case, dtype: str, inputs: RoundedInputs, store: Store, exported: ExportResult
) -> BackendTest:
    if case.operation not in ("attention", "softmax"):
        raise InexpressibleError(f"ONNX has no operator for {case.operation}")
    is_softmax = case.operation == "softmax"
    if not is_softmax:
        require_supported(case)
    extra = None if is_softmax else matmul_output_stage(case)
    stages = ["weights"] if is_softmax else ["output", *([extra] if extra else [])]
    truth = truth_of_case(case, inputs, stages, store)
    if reason := missing_vectors_reason(truth, stages):
        raise InexpressibleError(reason)
    outputs = {stage: round_to_dtype(truth.exact[stage], dtype) for stage in stages}
    from_files = _outputs_from_files(case, dtype, outputs)
    exported.compare_stored_outputs(from_files, outputs)
    if not exported.is_exact:
        outputs |= from_files
    if is_softmax:
        return softmax_test(name, case, inputs.arrays, outputs["weights"])
    return attention_test(name, case, inputs.arrays, outputs)


def round_to_dtype(exact: Enclosure, dtype: str) -> Array:
    """Round the exact numbers to a dtype once, to the nearest, ties to even.

    The part that float64 cannot hold decides apparent ties: it is cut off, and the last bit is set to 1 instead
    (rounding to odd, as in ``spec/dtypes.py``).
    """
    if dtype == "float64":
        return exact.high
    high, low = exact.high, np.where(np.abs(exact.low) > exact.radius, exact.low, 0.0)
    inexact = (low != 0) & np.isfinite(high) & (high != 0)
    outwards = inexact & (np.signbit(low) != np.signbit(high))
    cut = np.where(outwards, np.nextafter(high, 0.0), high)
    odd = np.ascontiguousarray(cut).view(np.uint64) | inexact.astype(np.uint64)
    return round_to(odd.view(np.float64), dtype)


def _outputs_from_files(case: Case, dtype: str, outputs: dict[str, Array]) -> dict[str, Array]:
    """Return the outputs that a case takes from a file, by stage; none in a dtype other than theirs."""
    return {
        expected.of: expected.numbers.value.astype(numpy_dtype(dtype))
        for expected in case.expected
        if expected.stored and expected.numbers is not None and expected.of in outputs and case.computed_in == dtype
    }


def _difference_in_ulps(exact_numbers: Array, stored: NDArray[np.float64]) -> float:
    """Return the largest difference in units in the last place of the exact number."""
    exact = exact_numbers.astype(np.float64)
    info = ml_dtypes.finfo(numpy_dtype(exact_numbers.dtype.name))
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(info.smallest_normal))))
        units = np.abs(stored - exact) / (float(info.eps) * 2.0**exponent)
    return float(np.max(np.where(exact == stored, 0.0, units)))


def describe_export(exported: ExportResult) -> Iterator[str]:
    """Yield lines about the tests that were written and the cases that were left out."""
    yield f"{len(exported.tests):,} tests: a case in a dtype each"
    if exported.equal_count or exported.ulp_differences:
        yield (
            f"outputs that cases take from files: {exported.equal_count:,} are the exact answer, rounded once, "
            "bit for bit"
        )
    if exported.ulp_differences:
        written = "the exact answer is written" if exported.is_exact else "they are written as they are"
        largest = max(exported.ulp_differences)
        apart = f"{len(exported.ulp_differences):,} differ from it by at most {largest:.3g} units in the last place"
        yield f"outputs that cases take from files: {apart}; {written}"
    for reason, names in exported.left_out.items():
        yield f"left out: {format_name_count(names)}: {reason}"


_SUPPORTED_OPTIONS = frozenset(
    {"scale", "softcap", "is_causal", "window", "alignment", "heads", "kv_heads", "empty_rows"}
)
_SUPPORTED_INPUTS = frozenset(
    name
    for name, spec in input_specs("attention", None).items()
    if spec.required or spec.folds_into_input in ("mask", "key", "value") or name in ("mask", "bias")
)
"""Inputs that the operator has, or that become its mask."""
_OPSET, _WITH_LENGTHS = 23, 24


@dataclass(frozen=True)
class _MaskRules:
    """The rules of which keys a query attends to: ``mask`` and lengths as the operator takes them, and attributes."""

    attributes: Mapping[str, int]
    mask: Array | None
    lengths: Array | None = None
    are_in_one_mask: bool = False


def require_supported(case: Case) -> None:
    """Raise ``InexpressibleError`` for an option or an input that the operator does not have."""
    options = sorted(case.options.keys() - _SUPPORTED_OPTIONS)
    inputs = sorted(case.inputs.keys() - _SUPPORTED_INPUTS)
    if options or inputs:
        raise InexpressibleError(f"the operator has no {(options or inputs)[0]}")
    if case.options.get("empty_rows", "zero") != "zero":
        raise InexpressibleError("empty_rows is not zero, which is the operator's only convention")
    if not case.options.get("scale", 1.0) > 0:
        raise InexpressibleError("the scale is not positive, and the operator takes its root")


def matmul_output_stage(case: Case) -> str | None:
    """Return the stage of qk_matmul_output: the first expected stage that the operator can return."""
    return next(
        (expected.of for expected in case.expected if _operator_stage(expected.of) in STAGE_OF_OUTPUT_MODE), None
    )


def _operator_stage(stage: str) -> str:
    """Return the operator's name of a stage: biased scores are masked scores without a mask."""
    return "masked" if stage == "biased" else stage


def attention_test(name: str, case: Case, arrays: Mapping[str, Array], stages: Mapping[str, Array]) -> BackendTest:
    """Return the test of a case with its exact stages. Raises ``InexpressibleError``."""
    rules = _fold_mask_rules(case, arrays)
    inputs = {
        onnx_name: arrays[name_in_case] for name_in_case, onnx_name in (("query", "Q"), ("key", "K"), ("value", "V"))
    }
    outputs = {"Y": stages["output"]}
    for word, onnx_name in (("key", "K"), ("value", "V")):
        if f"past_{word}" in arrays:
            past = arrays[f"past_{word}"]
            outputs[f"present_{word}"] = np.concatenate([past, inputs[onnx_name]], axis=2)
    attributes: dict[str, Any] = dict(rules.attributes)
    attributes |= {option: float(case.options[option]) for option in ("scale", "softcap") if option in case.options}
    if case.merged:
        attributes |= {"q_num_heads": inputs["Q"].shape[1], "kv_num_heads": inputs["K"].shape[1]}
        inputs = {onnx_name: merge_heads(array) for onnx_name, array in inputs.items()}
        outputs["Y"] = merge_heads(outputs["Y"])
    inputs |= _optional_input("attn_mask", _attn_mask(case, arrays, rules))
    inputs |= {past_name: arrays[past_name] for past_name in ("past_key", "past_value") if past_name in arrays}
    inputs |= _optional_input("nonpad_kv_seqlen", rules.lengths)
    if extra := matmul_output_stage(case):
        attributes["qk_matmul_output_mode"] = STAGE_OF_OUTPUT_MODE.index(_operator_stage(extra))
        outputs["qk_matmul_output"] = stages[extra]
    opset = _OPSET if rules.lengths is None else _WITH_LENGTHS
    if rules.attributes.keys() & {"left_window_size", "right_window_size"}:
        opset = OPSET_WITH_WINDOWS
    return BackendTest(name, "Attention", opset, attributes, inputs, outputs)


def _optional_input(name: str, array: Array | None) -> dict[str, Array]:
    return {} if array is None else {name: array}


def _fold_mask_rules(case: Case, arrays: Mapping[str, Array]) -> _MaskRules:
    """Return the rules of attention as attributes and lengths of the operator if possible, and else as one mask."""
    attributes, mask, lengths = _position_attributes(case), arrays.get("mask"), arrays.get("key_lengths")
    if "query_mask" not in arrays:
        if lengths is not None and not attributes and _equals_causality(mask, arrays):
            return _MaskRules({"is_causal": 1}, None, lengths)
        if _can_express_positions(case, arrays, bool(attributes)):
            return _MaskRules(attributes, mask, lengths)
        if (
            lengths is None
            and attributes
            and "past_key" not in arrays
            and _do_queries_start_at(case, arrays, _key_count(arrays))
        ):
            return _MaskRules(attributes, mask, np.full(len(arrays["query"]), _key_count(arrays)))
    rows = np.arange(arrays["query"].shape[2])  # with rows, causality is part of the mask as well
    folded = Problem(case.operation, case.options, arrays).canonical(rows).inputs.get("mask")
    return _MaskRules({}, folded, are_in_one_mask=True)


def _position_attributes(case: Case) -> dict[str, int]:
    """Return the attributes of causality and a window."""
    attributes = {"is_causal": 1} if case.options.get("is_causal") else {}
    if window := case.options.get("window"):
        sides = zip(("left_window_size", "right_window_size"), window, strict=True)
        attributes |= {name: side for name, side in sides if side is not None}
    return attributes


def _key_count(arrays: Mapping[str, Array]) -> int:
    past = arrays.get("past_key")
    return int(arrays["key"].shape[2]) + (0 if past is None else int(past.shape[2]))


def _can_express_positions(case: Case, arrays: Mapping[str, Array], counts_positions: bool) -> bool:
    """Return whether the operator has inputs for these lengths, and the positions of these queries."""
    lengths, past = arrays.get("key_lengths"), arrays.get("past_key")
    if lengths is None:
        return not counts_positions or _do_queries_start_at(
            case, arrays, 0 if past is None else past.shape[2], from_end=False
        )
    return past is None and (not counts_positions or _do_queries_start_at(case, arrays, lengths))


def _do_queries_start_at(case: Case, arrays: Mapping[str, Array], at: Array | int, *, from_end: bool = True) -> bool:
    """Return whether the first query of each batch entry is at a position, or ``from_end``, the last one before it."""
    offsets = arrays.get("query_offsets", np.array(query_offset(case.options, arrays)))
    return bool((offsets == np.asarray(at) - (arrays["query"].shape[2] if from_end else 0)).all())


def _equals_causality(mask: Array | None, arrays: Mapping[str, Array]) -> bool:
    """Return whether a mask equals is_causal with lengths: the last query has the position of the last used key."""
    if mask is None:
        return False
    queries, keys, lengths = arrays["query"].shape[2], arrays["key"].shape[2], arrays["key_lengths"]
    positions = (lengths - queries).reshape(-1, 1, 1, 1) + np.arange(queries)[:, np.newaxis]
    causal = np.arange(keys) <= positions
    return mask.shape == causal.shape and bool((mask == causal).all())


def _attn_mask(case: Case, arrays: Mapping[str, Array], rules: _MaskRules) -> Array | None:
    """Return attn_mask, in the shape in which it is stored in the case's file if it is one input of the case.

    Any other attn_mask has all queries and keys: the operator appends keys to a short one, and its implementations
    refuse axes of length 1 other than batch and heads, or handle them wrongly.
    """
    mask, bias = rules.mask, arrays.get("bias")
    is_input = mask is None or bias is None
    if mask is not None and bias is not None:
        bias = np.asarray(np.where(mask, bias, bias.dtype.type(-np.inf)))
    name, array = ("bias", bias) if mask is None or not is_input else ("mask", mask)
    if array is None:
        return None
    shape = shape_in_file(case, name) if is_input and not (name == "mask" and rules.are_in_one_mask) else None
    if shape is None or array.shape[-1] < _key_count(arrays):
        lengths = arrays["query"].shape[2], _key_count(arrays)
        return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:-2], *lengths)))
    if mask_before_padding(case, name) is not None:
        if rules.lengths is None or shape[-1] < rules.lengths.max(initial=0):
            return array
        array = array[..., : shape[-1]]
    return np.ascontiguousarray(array).reshape(shape)
