"""The files of one of ONNX's backend tests: read as data with limits, never executed; data outside of them is refused.

A test is a folder with ``model.onnx``, and in ``test_data_set_0`` a TensorProto for each input and output of its graph.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from attncheck.backends.onnx_attention import INPUTS, OUTPUTS, TYPES, up_to_the_last
from attncheck.errors import OnnxDataError, OutputError
from attncheck.reading.stored_arrays import MAX_FILE, MAX_STORED

Array = NDArray[Any]
MODEL, DATA_SET = "model.onnx", "test_data_set_"
OPERATORS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Attention": (INPUTS, OUTPUTS),
    "Softmax": (("input",), ("output",)),
}
"""The operators that cases know, and what the standard calls their inputs and outputs."""
_MAX_MODEL = 2**24
"""Bytes of a model of one node, which has no numbers in it."""
_DOMAINS = ("", "ai.onnx")
_DTYPES = {number: name for name, number in TYPES.items()}


class NotACase(Exception):
    """A test that no case can say, and why."""


@dataclass(frozen=True, eq=False)
class BackendTest:
    """A node with its inputs and outputs, by the names that the standard gives them."""

    name: str
    operator: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def folders_of(folder: Path) -> list[Path]:
    """Return the tests in a folder, or the one that it is. Raises ``OnnxDataError`` where there is none."""
    try:
        found = [folder] if (folder / MODEL).is_file() else sorted(path.parent for path in folder.glob(f"*/{MODEL}"))
    except OSError as error:
        raise OnnxDataError(f"{folder} cannot be read: {os.strerror(error.errno or 0)}") from None
    if not found:
        raise OnnxDataError(f"{folder} holds no test of ONNX; expected folders with {MODEL} and {DATA_SET}0 in it")
    return found


def read_tests(folder: Path) -> Iterator[BackendTest]:
    """Give the data sets of a test, one after the other.

    Raises ``NotACase`` for a model of anything else than one of the ``OPERATORS``, and ``OnnxDataError`` for a damaged
    file.
    """
    model = _parsed(folder / MODEL, onnx.ModelProto, _MAX_MODEL)
    node = _only_node(model, folder / MODEL)
    sets = sorted(folder.glob(f"{DATA_SET}*"), key=lambda path: (len(path.name), path.name))
    if not sets:
        raise OnnxDataError(f"{folder} has no {DATA_SET}0, where its inputs and outputs are expected")
    for place in sets:
        number = place.name.removeprefix(DATA_SET)
        name = folder.resolve().name + ("" if number == "0" else f"_{number}")
        yield _read_set(name, model, node, place)


def _only_node(model: Any, path: Path) -> Any:
    """Return a model's one node.

    Raises ``NotACase`` where it has others, or is none of the ``OPERATORS``, and ``OnnxDataError`` where it has none.
    """
    nodes = list(model.graph.node)
    if not nodes:
        raise OnnxDataError(f"{path} has no node; expected a model of one operator")
    if len(nodes) > 1:
        raise NotACase("a graph of several nodes, as an operator that is written out: no node says what is computed")
    node = nodes[0]
    if node.op_type not in OPERATORS or node.domain not in _DOMAINS:
        raise NotACase("another operator than Attention and Softmax")
    if model.graph.initializer or model.graph.sparse_initializer:
        raise NotACase("a model with numbers in it, which are no inputs")
    return node


def _read_set(name: str, model: Any, node: Any, place: Path) -> BackendTest:
    inputs = _arrays([value.name for value in model.graph.input], place, "input")
    outputs = _arrays([value.name for value in model.graph.output], place, "output")
    names = OPERATORS[node.op_type]
    return BackendTest(
        name,
        node.op_type,
        next((each.version for each in model.opset_import if each.domain in _DOMAINS), 0),
        {each.name: _attribute(each, place) for each in node.attribute},
        _by_formal_names(node.input, names[0], inputs, place),
        _by_formal_names(node.output, names[1], outputs, place),
    )


def _attribute(attribute: Any, place: Path) -> Any:
    try:
        return helper.get_attribute_value(attribute)
    except Exception as error:  # whatever a damaged attribute makes of it
        raise OnnxDataError(f"{place.parent / MODEL}: attribute {attribute.name[:40]!r}: {str(error)[:120]}") from None


def _by_formal_names(
    names: Sequence[str], formal: Sequence[str], arrays: Mapping[str, Array], place: Path
) -> dict[str, Array]:
    """Give the standard's names to what a node takes or returns; an empty name is left out."""
    if len(names) > len(formal):
        raise OnnxDataError(f"{place.parent / MODEL}: a node of {len(names)} inputs or outputs; expected {len(formal)}")
    found = {}
    for own, name in zip(names, formal, strict=False):
        if own:
            if own not in arrays:
                raise OnnxDataError(
                    f"{place.parent / MODEL}: the graph has no input or output {own[:40]!r} of its node"
                )
            found[name] = arrays[own]
    return found


def _arrays(names: Sequence[str], place: Path, kind: str) -> dict[str, Array]:
    return {name: read_tensor(place / f"{kind}_{number}.pb") for number, name in enumerate(names)}


def read_tensor(path: Path) -> Array:
    """Return the array of a TensorProto. Raises ``OnnxDataError``, and ``NotACase`` for a dtype that cases lack."""
    tensor = _parsed(path, onnx.TensorProto, MAX_FILE)
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise OnnxDataError(f"{path}: its numbers lie in another file, which is not read; store them in the tensor")
    if tensor.data_type == onnx.TensorProto.UNDEFINED:
        raise OnnxDataError(f"{path} is no TensorProto: it says no type of its numbers")
    if tensor.data_type not in _DTYPES:
        raise NotACase("numbers of a type that no case has")
    if any(length < 0 for length in tensor.dims) or math.prod(max(1, length) for length in tensor.dims) > MAX_STORED:
        shape = "x".join(map(str, tensor.dims[:8]))
        raise OnnxDataError(f"{path}: a tensor of {shape}; expected at most {MAX_STORED} numbers")
    try:
        return np.ascontiguousarray(numpy_helper.to_array(tensor)).reshape(tuple(tensor.dims))
    except Exception as error:  # whatever bytes that do not fit make of the package
        raise OnnxDataError(f"{path} is damaged or cut off: {str(error)[:120]}") from None


def _parsed(path: Path, kind: Any, largest: int) -> Any:
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
        raise OnnxDataError(f"{path} is no {kind.__name__}: {str(error)[:120]}") from None
    return message


def write_test(folder: Path, test: BackendTest) -> None:
    """Write a test as ONNX's own are written. Raises ``OutputError``, also where the folder is there already."""
    data = folder / f"{DATA_SET}0"
    try:
        data.mkdir(parents=True)
        (folder / MODEL).write_bytes(_model_of(test).SerializeToString())
        for kind, arrays in (("input", test.inputs), ("output", test.outputs)):
            for number, (name, array) in enumerate(arrays.items()):
                tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
                (data / f"{kind}_{number}.pb").write_bytes(tensor.SerializeToString())
    except FileExistsError:
        raise OutputError(f"{data} is already there; remove it, or name another folder") from None
    except OSError as error:
        raise OutputError.of(folder, error) from None


def _model_of(test: BackendTest) -> Any:
    names = [
        [name if name in arrays else "" for name in up_to_the_last(formal, arrays)]
        for formal, arrays in zip(OPERATORS[test.operator], (test.inputs, test.outputs), strict=True)
    ]
    node = helper.make_node(test.operator, *names, **test.attributes)
    infos = [
        [helper.make_tensor_value_info(name, TYPES[each.dtype.name], each.shape) for name, each in arrays.items()]
        for arrays in (test.inputs, test.outputs)
    ]
    graph = helper.make_graph([node], test.name, *infos)
    opsets = [helper.make_opsetid("", test.opset)]
    return helper.make_model(graph, producer_name="attncheck", opset_imports=opsets, ir_version=10)
