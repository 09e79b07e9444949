"""Read folders of ONNX's tests into a folder of cases: a file for each operator, next to the arrays of each case.

ONNX's Attention becomes the operation attention: inputs, options and expected stages.
https://onnx.ai/onnx/operators/onnx__Attention.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from attncheck.backends.onnx_attention import STAGE_OF_OUTPUT_MODE, merge_heads, split_heads
from attncheck.common.errors import CaseError, OutputError
from attncheck.common.wording import slug
from attncheck.onnx_data.files import (
    BackendTest,
    InexpressibleError,
    OnnxCaseEntry,
    Source,
    format_name_count,
    read_data_sets,
    softmax_entry,
    start_case_entry,
    test_folders,
)
from attncheck.reading.loader import make_case_from_data
from attncheck.reading.lowering import Array, make_window_conditions
from attncheck.reading.written_cases import format_case_file, pack_npz
from attncheck.spec.dtypes import numpy_dtype

_KNOWN_ATTRIBUTES = frozenset(
    {
        *("is_causal", "scale", "softcap", "left_window_size", "right_window_size"),
        *("q_num_heads", "kv_num_heads", "softmax_precision", "qk_matmul_output_mode"),
    }
)
_NUMERIC_INPUTS = ("Q", "K", "V", "past_key", "past_value")
_SOFTMAX_PRECISIONS = {
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}


@dataclass(frozen=True)
class _AttentionSizes:
    """Heads, the lengths of the queries, of all keys and of the past, and whether heads are side by side."""

    heads: int
    kv_heads: int
    queries: int
    keys: int
    past: int
    is_merged: bool


def attention_entry(test: BackendTest) -> OnnxCaseEntry:
    """Return the case of a test. Raises ``InexpressibleError`` if no case can express it."""
    entry = start_case_entry(test, "attention", _NUMERIC_INPUTS, _KNOWN_ATTRIBUTES)
    sizes = _attention_sizes(test)
    entry.has_merged_heads = sizes.is_merged
    if sizes.is_merged:
        entry.options |= {"heads": sizes.heads, "kv_heads": sizes.kv_heads}
    for name, onnx_name in (("query", "Q"), ("key", "K"), ("value", "V")):
        entry.inputs[name] = entry.store_array(onnx_name, test.inputs[onnx_name])
    for name in ("past_key", "past_value"):
        if name in test.inputs:
            past = test.inputs[name]
            entry.inputs[name] = entry.store_array(name, merge_heads(past) if sizes.is_merged else past)
    _add_options(entry, test)
    _add_mask(entry, test, sizes)
    _add_lengths(entry, test, sizes)
    _add_expectations(entry, test, sizes)
    return entry


def _attention_sizes(test: BackendTest) -> _AttentionSizes:
    if any(name not in test.inputs for name in ("Q", "K", "V")):
        raise InexpressibleError("the node has no Q, K or V")
    query, key, value = (test.inputs[name] for name in ("Q", "K", "V"))
    ranks = {query.ndim, key.ndim, value.ndim}
    if ranks not in ({3}, {4}):
        raise InexpressibleError(f"Q, K and V have {' and '.join(map(str, sorted(ranks)))} axes; expected 3 or 4")
    is_merged = ranks == {3}
    past = test.inputs.get("past_key")
    if ("past_key" in test.inputs) != ("past_value" in test.inputs):
        raise InexpressibleError("the node has only one of past_key and past_value")
    if past is not None and (past.ndim != 4 or test.inputs["past_value"].ndim != 4):
        raise InexpressibleError("past_key and past_value do not have 4 axes")
    heads, kv_heads = query.shape[1], key.shape[1]
    if is_merged:
        heads, kv_heads = (int(test.attributes.get(name, 0)) for name in ("q_num_heads", "kv_num_heads"))
        if min(heads, kv_heads) < 1:
            raise InexpressibleError("Q, K and V have 3 axes, and the node has no q_num_heads or kv_num_heads")
    before = 0 if past is None else past.shape[2]
    return _AttentionSizes(heads, kv_heads, query.shape[-2], before + key.shape[-2], before, is_merged)


def _split_heads(array: Array, heads: int) -> Array:
    """Split the heads: (B, L, H D) -> (B, H, L, D)."""
    if array.shape[-1] % heads:
        raise InexpressibleError("the width is not a multiple of the number of heads")
    return np.ascontiguousarray(split_heads(array, heads))


def _add_options(entry: OnnxCaseEntry, test: BackendTest) -> None:
    attributes = test.attributes
    if attributes.get("is_causal"):
        entry.options["is_causal"] = True
    if "scale" in attributes:
        if not attributes["scale"] > 0:
            raise InexpressibleError("the scale is not positive")
        entry.options["scale"] = float(attributes["scale"])
    if attributes.get("softcap"):
        if not attributes["softcap"] > 0:
            raise InexpressibleError("the softcap is not positive")
        entry.options["softcap"] = float(attributes["softcap"])
    window = [int(attributes.get(name, -1)) for name in ("left_window_size", "right_window_size")]
    if min(window) < -1:
        raise InexpressibleError("a side of the window is below -1")
    if max(window) >= 0:
        entry.options["window"] = [None if side < 0 else side for side in window]
    if "softmax_precision" not in attributes:
        return
    # A case has no precision of its softmax: its bounds are those of its dtype.
    precision, size = _SOFTMAX_PRECISIONS.get(int(attributes["softmax_precision"])), numpy_dtype(entry.dtype).itemsize
    if precision is None or (precision != entry.dtype and numpy_dtype(precision).itemsize <= size):
        raise InexpressibleError("softmax_precision is narrower than the inputs")
    entry.notes.append(f"softmax_precision ({precision}) is left out: it does not change the exact answer")


def _add_mask(entry: OnnxCaseEntry, test: BackendTest, sizes: _AttentionSizes) -> None:
    """Enter attn_mask as a mask or a bias, and write out the keys that the operator adds to a short one."""
    mask = test.inputs.get("attn_mask")
    if mask is None:
        return
    if mask.dtype.name not in ("bool", entry.dtype):
        raise InexpressibleError(f"attn_mask has dtype {mask.dtype.name}, and the inputs have {entry.dtype}")
    if not 1 <= mask.ndim <= 4:
        raise InexpressibleError(f"attn_mask has {mask.ndim} axes; expected 1 to 4")
    source: Source = entry.store_array("attn_mask", mask)
    is_boolean, length = mask.dtype == np.bool_, mask.shape[-1]
    if length == 1 < sizes.keys:
        raise InexpressibleError("attn_mask has one key, which the operator may broadcast or pad")
    if length < sizes.keys:
        padding = {
            "constant": 0 if is_boolean else float("-inf"),
            "shape": [*mask.shape[:-1], sizes.keys - length],
        }
        source = {"concat": [source, padding], "axis": -1}
    entry.inputs["mask" if is_boolean else "bias"] = source


def _add_lengths(entry: OnnxCaseEntry, test: BackendTest, sizes: _AttentionSizes) -> None:
    """Enter nonpad_kv_seqlen: with it, the last query has the position of the last key that is used."""
    lengths = test.inputs.get("nonpad_kv_seqlen")
    if lengths is None:
        return
    if sizes.past:
        raise InexpressibleError("the node has nonpad_kv_seqlen and a past")
    entry.inputs["key_lengths"] = entry.store_array("nonpad_kv_seqlen", lengths)
    if not entry.options.keys() & {"is_causal", "window"}:
        return
    offsets = lengths.reshape(-1) - sizes.queries
    if (offsets >= 0).all():
        entry.inputs["query_offsets"] = entry.store_array("query_offsets", offsets)
        return
    positions = offsets.reshape(-1, 1, 1, 1) + np.arange(sizes.queries)[:, np.newaxis]
    seen = [] if not entry.options.pop("is_causal", False) else [np.arange(sizes.keys) <= positions]
    if window := entry.options.pop("window", None):
        seen += make_window_conditions(tuple(window), positions, np.arange(sizes.keys))
    source = entry.store_array("mask_of_positions", np.logical_and.reduce(np.broadcast_arrays(*seen)))
    entry.inputs["mask"] = {"all_of": [source, entry.inputs["mask"]]} if "mask" in entry.inputs else source
    entry.notes.append(
        "is_causal and the window are written out as a mask: some queries stand before the first key, where no "
        "query_offsets lead"
    )


def _add_expectations(entry: OnnxCaseEntry, test: BackendTest, sizes: _AttentionSizes) -> None:
    for name in ("K", "V"):
        present, past = (f"{word}_{'key' if name == 'K' else 'value'}" for word in ("present", "past"))
        if present in test.outputs:
            new = _split_heads(test.inputs[name], sizes.kv_heads) if sizes.is_merged else test.inputs[name]
            whole = np.concatenate([test.inputs[past], new], axis=2) if past in test.inputs else new
            if whole.tobytes() != np.ascontiguousarray(test.outputs[present]).tobytes():
                raise InexpressibleError(f"{present} is not the past followed by the new keys or values")
    if "Y" in test.outputs:
        output = test.outputs["Y"]
        entry.add_expectation("output", "Y", _split_heads(output, sizes.heads) if sizes.is_merged else output)
    if "qk_matmul_output" in test.outputs:
        entry.add_expectation(_matmul_output_stage(entry, test), "qk_matmul_output", test.outputs["qk_matmul_output"])


def _matmul_output_stage(entry: OnnxCaseEntry, test: BackendTest) -> str:
    """Return the stage that qk_matmul_output_mode selects."""
    mode = int(test.attributes.get("qk_matmul_output_mode", 0))
    if not 0 <= mode < len(STAGE_OF_OUTPUT_MODE):
        raise InexpressibleError(
            f"qk_matmul_output_mode is {mode}; expected {', '.join(map(str, sorted(STAGE_OF_OUTPUT_MODE)))}"
        )
    stage = STAGE_OF_OUTPUT_MODE[mode]
    forbids = entry.options.keys() & {"is_causal", "window"} or entry.inputs.keys() & {"mask", "key_lengths"}
    if stage == "masked" and not forbids:
        stage = "biased" if "bias" in entry.inputs else "capped"
    return "scores" if stage == "capped" and "softcap" not in entry.options else stage


_ENTRY_FUNCTIONS: Mapping[str, Callable[[BackendTest], OnnxCaseEntry]] = {
    "Attention": attention_entry,
    "Softmax": softmax_entry,
}


@dataclass
class ImportResult:
    """The number of written cases by file, and the tests that were left out by reason.

    ``notes`` are the parts of tests that their cases do not express.
    """

    files: dict[Path, int] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)


def import_tests(folder: Path, output: Path) -> ImportResult:
    """Write the tests of a folder as cases. Raises ``OnnxDataError``, and ``OutputError`` if a file exists already."""
    importing = _TestImport(output)
    try:
        for place in test_folders(folder):
            importing.import_test(place)
        return importing.write_case_files()
    except BaseException:  # half of a folder of cases is none
        for path in importing.written:
            path.unlink(missing_ok=True)
        raise


@dataclass
class _TestImport:
    """The result of an import: the entries of each file, and the paths that were ``written``."""

    output: Path
    imported: ImportResult = field(default_factory=ImportResult)
    cases: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    written: list[Path] = field(default_factory=list)

    def import_test(self, place: Path) -> None:
        """Make cases of the data sets of a test, or store the reason why not."""
        try:
            for test in read_data_sets(place):
                self._import_data_set(test)
        except InexpressibleError as reason:
            self.imported.left_out.setdefault(str(reason), []).append(place.resolve().name)

    def _import_data_set(self, test: BackendTest) -> None:
        try:
            entry = _ENTRY_FUNCTIONS[test.operator](test)
        except ValueError as error:  # NumPy's, of arrays that do not go together
            raise InexpressibleError(f"the shapes do not fit together: {error}") from None
        entries, identity = self.cases.setdefault(entry.operation, {}), slug(test.name)
        if identity in entries:
            raise InexpressibleError("another test has the same name")
        arrays = Path("arrays") / f"{test.name}.npz"
        content, checksum = pack_npz(entry.stored_arrays)
        self._write_file(self.output / arrays, content)
        data = entry.case_file_entry(test.name, identity, {"file": arrays.as_posix(), "sha256": checksum})
        try:
            make_case_from_data(
                _case_file_content(entry.operation, [data]), self.output, f"{entry.operation}/{identity}"
            )
        except CaseError as error:
            (self.output / arrays).unlink()
            [first, *_] = error.faults
            said = ": ".join(filter(None, ["what no case may be", first.field, first.message]))
            raise InexpressibleError(said) from None
        entries[identity] = data
        for note in entry.notes:
            self.imported.notes.setdefault(note, []).append(test.name)

    def _write_file(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                self.written.append(path)
                file.write(content)
        except FileExistsError:
            raise OutputError(f"{path} is already there; remove it, or name another folder with --output") from None
        except OSError as error:
            raise OutputError.from_os_error(path, error) from None

    def write_case_files(self) -> ImportResult:
        """Write the case files."""
        for operation, entries in self.cases.items():
            if entries:
                path = self.output / f"{operation}.yaml"
                file = _case_file_content(operation, list(entries.values()))
                self._write_file(path, format_case_file(file).encode())
                self.imported.files[path] = len(entries)
        return self.imported


def _case_file_content(operation: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    operator = operation.capitalize()
    notes = "Inputs and outputs are those of the tests, to the last bit. Outputs are compared with the exact answer."
    return {
        "title": f"ONNX's tests of {operator}",
        "source": {
            "kind": "document",
            "title": "ONNX backend test data",
            "author": "the ONNX authors",
            "section": f"node tests of {operator}",
            "notes": [notes],
        },
        "operation": operation,
        "cases": entries,
    }


def describe_import(imported: ImportResult) -> Iterator[str]:
    """Yield lines about the tests that were read and the tests that were left out."""
    for path, count in imported.files.items():
        yield f"{count:,} cases: {path}"
    for note, names in imported.notes.items():
        yield f"noted in {format_name_count(names)}: {note}"
    for reason, names in imported.left_out.items():
        yield f"left out: {format_name_count(names)}: {reason}"
