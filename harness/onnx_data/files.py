"""The files of one of ONNX's backend tests: read as data with limits, never executed; external data is refused.

A test is a folder with ``model.onnx``, and in ``test_data_set_0`` a TensorProto for each input and output of its graph.
It becomes an entry of a new case file, with the arrays in a file next to it. An entry stores the layout of an input in
the file if ONNX's operator depends on it. ONNX's Softmax is the operation softmax over the last axis, and vice versa.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from attncheck.backends.onnx_attention import INPUTS, ONNX_TYPES, OUTPUTS, names_up_to_last_present
from attncheck.common.errors import OnnxDataError, OutputError
from attncheck.reading import array_kinds as kinds
from attncheck.reading.array_kinds import StoredArray
from attncheck.reading.case import Case
from attncheck.reading.lowering import Array
from attncheck.reading.stored_arrays import MAX_FILE_BYTES, MAX_STORED_NUMBERS
from attncheck.spec import DTYPES, Shape

MODEL, DATA_SET = "model.onnx", "test_data_set_"
OPERATORS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Attention": (INPUTS, OUTPUTS),
    "Softmax": (("input",), ("output",)),
}
"""The operators with an operation of cases, and the standard's names of their inputs and outputs."""
_MAX_MODEL_BYTES = 2**24
"""The largest size in bytes of a model of one node without numbers."""
_MAX_NAMES = 3
_DOMAINS = ("", "ai.onnx")
_DTYPE_OF_ONNX_TYPE = {number: name for name, number in ONNX_TYPES.items()}


class InexpressibleError(Exception):
    """A test that no case can express, or the reverse, with the reason."""


@dataclass(frozen=True, eq=False)
class BackendTest:
    """A node with its inputs and outputs, by the standard's names."""

    name: str
    operator: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def test_folders(folder: Path) -> list[Path]:
    """Return the folders of tests in a folder, or the folder itself. Raises ``OnnxDataError`` if there is none."""
    try:
        folders = [folder] if (folder / MODEL).is_file() else sorted(path.parent for path in folder.glob(f"*/{MODEL}"))
    except OSError as error:
        raise OnnxDataError(f"{folder} cannot be read: {os.strerror(error.errno or 0)}") from None
    if not folders:
        raise OnnxDataError(f"{folder} has no ONNX test; expected folders with {MODEL} and {DATA_SET}0")
    return folders


def read_data_sets(folder: Path) -> Iterator[BackendTest]:
    """Yield the data sets of a test.

    Raises ``InexpressibleError`` unless the model is one of the ``OPERATORS``, and ``OnnxDataError`` for damaged files.
    """
    model = _parse_protobuf(folder / MODEL, onnx.ModelProto, _MAX_MODEL_BYTES)
    node = _get_single_node(model, folder / MODEL)
    input_names, output_names = OPERATORS[node.op_type]
    opset = next((imported.version for imported in model.opset_import if imported.domain in _DOMAINS), 0)
    sets = sorted(folder.glob(f"{DATA_SET}*"), key=lambda path: (len(path.name), path.name))
    if not sets:
        raise OnnxDataError(f"{folder} has no folder {DATA_SET}0; expected inputs and outputs in it")
    for place in sets:
        number = place.name.removeprefix(DATA_SET)
        name = folder.resolve().name + ("" if number == "0" else f"_{number}")
        inputs = _read_tensors([value.name for value in model.graph.input], place, "input")
        outputs = _read_tensors([value.name for value in model.graph.output], place, "output")
        yield BackendTest(
            name,
            node.op_type,
            opset,
            {attribute.name: _attribute_value(attribute, place) for attribute in node.attribute},
            _name_by_standard(node.input, input_names, inputs, place),
            _name_by_standard(node.output, output_names, outputs, place),
        )


def _get_single_node(model: Any, path: Path) -> Any:
    """Return a model's only node.

    Raises ``InexpressibleError`` if it has more nodes, or another operator, and ``OnnxDataError`` if it has none.
    """
    nodes = list(model.graph.node)
    if not nodes:
        raise OnnxDataError(f"{path} has no node; expected a model of one operator")
    if len(nodes) > 1:
        raise InexpressibleError("the graph has several nodes, such as an expanded operator; expected one node")
    node = nodes[0]
    if node.op_type not in OPERATORS or node.domain not in _DOMAINS:
        raise InexpressibleError("the operator is neither Attention nor Softmax")
    if model.graph.initializer or model.graph.sparse_initializer:
        raise InexpressibleError("the model has initializers; expected all numbers as inputs")
    return node


def _attribute_value(attribute: Any, place: Path) -> Any:
    try:
        return helper.get_attribute_value(attribute)
    except Exception as error:  # whatever a damaged attribute makes of it
        raise OnnxDataError(f"{place.parent / MODEL}: attribute {attribute.name[:40]!r}: {str(error)[:120]}") from None


def _name_by_standard(
    names: Sequence[str], formal: Sequence[str], arrays: Mapping[str, Array], place: Path
) -> dict[str, Array]:
    """Return the inputs or outputs of a node by the standard's names; an empty name is left out."""
    if len(names) > len(formal):
        raise OnnxDataError(
            f"{place.parent / MODEL}: the node has {len(names)} inputs or outputs; expected at most {len(formal)}"
        )
    by_name = {}
    for graph_name, name in zip(names, formal, strict=False):
        if graph_name:
            if graph_name not in arrays:
                raise OnnxDataError(
                    f"{place.parent / MODEL}: the graph has no input or output {graph_name[:40]!r} of its node"
                )
            by_name[name] = arrays[graph_name]
    return by_name


def _read_tensors(names: Sequence[str], place: Path, kind: str) -> dict[str, Array]:
    return {name: read_tensor(place / f"{kind}_{number}.pb") for number, name in enumerate(names)}


def read_tensor(path: Path) -> Array:
    """Return the array of a TensorProto.

    Raises ``OnnxDataError``, and ``InexpressibleError`` for a dtype that cases lack.
    """
    tensor = _parse_protobuf(path, onnx.TensorProto, MAX_FILE_BYTES)
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise OnnxDataError(
            f"{path}: the numbers are in another file, which attncheck does not read; store them in the tensor"
        )
    if tensor.data_type == onnx.TensorProto.UNDEFINED:
        raise OnnxDataError(f"{path} is not a TensorProto: the type of its numbers is missing")
    if tensor.data_type not in _DTYPE_OF_ONNX_TYPE:
        raise InexpressibleError("the numbers have a type that no case has")
    if (
        any(length < 0 for length in tensor.dims)
        or math.prod(max(1, length) for length in tensor.dims) > MAX_STORED_NUMBERS
    ):
        shape = "x".join(map(str, tensor.dims[:8]))
        raise OnnxDataError(f"{path}: the tensor has shape {shape}; expected at most {MAX_STORED_NUMBERS} numbers")
    try:
        return np.ascontiguousarray(numpy_helper.to_array(tensor)).reshape(tuple(tensor.dims))
    except Exception as error:  # whatever bytes that do not fit make of the package
        raise OnnxDataError(f"{path} is damaged or incomplete: {str(error)[:120]}") from None


def _parse_protobuf(path: Path, kind: Any, largest: int) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise OnnxDataError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from None
    if len(data) > largest:
        raise OnnxDataError(f"{path} is too large; expected at most {largest} bytes")
    message = kind()
    try:
        message.ParseFromString(data)
    except Exception as error:  # protobuf's own class of errors, which differs between its versions
        raise OnnxDataError(f"{path} is not a {kind.__name__}: {str(error)[:120]}") from None
    return message


def write_test(folder: Path, test: BackendTest) -> None:
    """Write a test in the form of ONNX's tests. Raises ``OutputError``, also if the folder exists already."""
    data = folder / f"{DATA_SET}0"
    if data.exists():
        raise OutputError(f"{data} is already there; remove it, or name another folder")
    with OutputError.convert_os_errors(folder):
        data.mkdir(parents=True)
        (folder / MODEL).write_bytes(_make_model(test).SerializeToString())
        for kind, arrays in (("input", test.inputs), ("output", test.outputs)):
            for number, (name, array) in enumerate(arrays.items()):
                tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
                (data / f"{kind}_{number}.pb").write_bytes(tensor.SerializeToString())


def _make_model(test: BackendTest) -> Any:
    names = [
        [name if name in arrays else "" for name in names_up_to_last_present(formal, arrays)]
        for formal, arrays in zip(OPERATORS[test.operator], (test.inputs, test.outputs), strict=True)
    ]
    node = helper.make_node(test.operator, *names, **test.attributes)
    infos = [
        [
            helper.make_tensor_value_info(name, ONNX_TYPES[array.dtype.name], array.shape)
            for name, array in arrays.items()
        ]
        for arrays in (test.inputs, test.outputs)
    ]
    graph = helper.make_graph([node], test.name, *infos)
    opsets = [helper.make_opsetid("", test.opset)]
    return helper.make_model(graph, producer_name="attncheck", opset_imports=opsets, ir_version=10)


Source = dict[str, Any]
"""The description of an array in a case file."""


@dataclass
class OnnxCaseEntry:
    """A case as far as it is known; ``notes`` are the parts of the test that the case does not express.

    ``inputs`` and ``expected`` stages refer to arrays by name; ``stored_arrays`` are these arrays.
    """

    operation: str
    dtype: str
    inputs: dict[str, Source] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    expected: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_merged_heads: bool = False
    stored_arrays: dict[str, Array] = field(default_factory=dict)

    def store_array(self, name: str, array: Array) -> Source:
        """Add an array to the file of arrays, and return the case's reference to it."""
        self.stored_arrays[name] = array
        return {"name": name}

    def add_expectation(self, stage: str, called: str, array: Array, *, transpose: bool = False) -> None:
        """Expect the test's numbers of a stage."""
        if array.dtype.name != self.dtype:
            self.notes.append(f"{called} is of {array.dtype.name} and is left out: the case computes in {self.dtype}")
            return
        turned = {"transpose": True} if transpose else {}
        self.expected.append({"stage": stage, "called": called, "printed": self.store_array(called, array), **turned})

    def case_file_entry(self, name: str, identity: str, place: dict[str, str]) -> dict[str, Any]:
        """Return the entry of a case file; ``place`` is the file of the arrays and its checksum."""
        stored = {source["name"] for name, source in self.inputs.items() if "name" in source and name != "bias"}
        numbers = (self.stored_arrays[array_name] for array_name in stored)
        is_nonfinite = any(array.dtype.kind in "fV" and not np.isfinite(array).all() for array in numbers)
        fields: dict[str, Any] = {
            "name": name,
            "id": identity,
            "inputs": {name: _add_file_references(source, place) for name, source in self.inputs.items()},
            "options": self.options,
            "dtypes": [self.dtype],
            "layout": "merged" if self.has_merged_heads else None,
            "allow_nonfinite": True if is_nonfinite else None,
            "computed_in": self.dtype if self.expected else None,
            "expect": [
                {**expected, "printed": _add_file_references(expected["printed"], place)} for expected in self.expected
            ],
            "notes": self.notes,
        }
        return {key: value for key, value in fields.items() if value not in (None, {}, [])}


def _add_file_references(source: Any, place: dict[str, str]) -> Any:
    """Add the file and its checksum to every reference to an array."""
    if isinstance(source, list):
        return [_add_file_references(item, place) for item in source]
    if not isinstance(source, dict):
        return source
    fields = {key: _add_file_references(value, place) for key, value in source.items()}
    return {"file": place["file"], **fields, "sha256": place["sha256"]} if "name" in source else fields


def start_case_entry(
    test: BackendTest, operation: str, numbers: tuple[str, ...], known: frozenset[str]
) -> OnnxCaseEntry:
    """Begin a case in the dtype of a test's ``numbers``.

    Raises ``InexpressibleError`` if they differ, or no case has the dtype.

    ``known`` are the attributes that a case can express.
    """
    missing = [name for name in numbers[:1] if name not in test.inputs]
    if missing or not test.outputs:
        raise InexpressibleError("the node has no first input, or no output")
    unknown = sorted(test.attributes.keys() - known)
    if unknown:
        raise InexpressibleError(f"a case cannot express the attribute {unknown[0]}")
    for name, value in test.attributes.items():
        if not isinstance(value, int | float):
            raise InexpressibleError(f"the attribute {name} is not a number")
    dtypes = {test.inputs[name].dtype.name for name in numbers if name in test.inputs}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise InexpressibleError(
            f"the inputs have dtypes {' and '.join(sorted(dtypes))}; expected one of {', '.join(DTYPES)}"
        )
    return OnnxCaseEntry(operation, dtypes.pop())


def format_name_count(names: Sequence[str]) -> str:
    """Return the number of names, and the first of them."""
    listed = ", ".join(names[:_MAX_NAMES])
    return f"{len(names):,} ({listed}{', ...' if len(names) > _MAX_NAMES else ''})"


def shape_in_file(case: Case, name: str) -> Shape | None:
    """Return the shape in its file of an input that is stored in one; None for any other input."""
    return _stored_shape(mask_before_padding(case, name) or _input_source(case, name))


def is_stored_transposed(case: Case, name: str) -> bool:
    """Return whether an input is stored in a file with its last two axes swapped."""
    source = _input_source(case, name)
    return isinstance(source, StoredArray) and source.transpose


def mask_before_padding(case: Case, name: str) -> kinds.Array | None:
    """Return a mask or a bias without the forbidden keys that are appended to it; None if there are none."""
    source = _input_source(case, name)
    match source:
        case kinds.Concat(concat=[StoredArray() as first, kinds.Constant() as rest], axis=-1) if not (
            source.is_arranged
        ):
            return first if rest.constant == (-math.inf if name == "bias" else 0) else None
    return None


def _input_source(case: Case, name: str) -> kinds.Array:
    source = case.inputs[name]
    return case.arrays[source.ref] if isinstance(source, kinds.Reference) and not source.is_arranged else source


def _stored_shape(source: kinds.Array) -> Shape | None:
    if not isinstance(source, StoredArray) or source.contents is None or source.rows is not None:
        return None
    return source.contents.shape


_SOFTMAX_OPSET = 13
"""The first opset whose Softmax has one axis. Before, the axis was the place at which the array became a matrix."""


def softmax_entry(test: BackendTest) -> OnnxCaseEntry:
    """Return the case of a test. If it is along the last axis but one, its array is transposed.

    Raises ``InexpressibleError`` if no case can express the test.
    """
    entry = start_case_entry(test, "softmax", ("input",), frozenset({"axis"}))
    if test.opset < _SOFTMAX_OPSET:
        raise InexpressibleError(
            f"Softmax is of an opset before {_SOFTMAX_OPSET}, which reshapes the array to a matrix"
        )
    scores, output = test.inputs["input"], test.outputs["output"]
    if scores.ndim < 1:
        raise InexpressibleError("Softmax has a single number")
    axis = int(test.attributes.get("axis", -1))
    axis = axis - scores.ndim if axis >= 0 else axis
    if axis not in (-1, -2):
        raise InexpressibleError("Softmax is along another axis than the last two")
    _require_finite_rows(scores, axis)
    source = entry.store_array("input", scores)
    entry.inputs["scores"] = {**source, "transpose": True} if axis == -2 else source
    entry.add_expectation("weights", "output", output, transpose=axis == -2)
    return entry


def softmax_test(name: str, case: Case, arrays: Mapping[str, Array], weights: Array) -> BackendTest:
    """Return the test of a case and its exact weights, both of four axes. Raises ``InexpressibleError``."""
    scores, turned = arrays["scores"], is_stored_transposed(case, "scores")
    _require_finite_rows(scores, -1)
    shape = shape_in_file(case, "scores") or scores.shape
    if turned:
        scores, weights = (np.swapaxes(array, -1, -2) for array in (scores, weights))
    scores, weights = (array.reshape(shape) for array in (scores, weights))
    attributes = {"axis": scores.ndim - 2} if turned else {}
    return BackendTest(name, "Softmax", _SOFTMAX_OPSET, attributes, {"input": scores}, {"output": weights})


def _require_finite_rows(scores: Array, axis: int) -> None:
    """Refuse a row without a finite score: its result is a convention in cases, and NaN by ONNX's formula."""
    if (scores == -np.inf).all(axis=axis).any():
        raise InexpressibleError("a row has only minus infinity, for which ONNX's Softmax returns NaN")
