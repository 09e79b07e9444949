"""Operators of the domain com.microsoft as models of one node, each of which onnxruntime loads once.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from attncheck.backends.onnxruntime_attention import describe, new_session, prepare, threads_asked_for

__all__ = ["Array", "bias_of", "describe", "heads_of", "number_or_default", "packed", "prepare", "run"]

Array: TypeAlias = NDArray[Any]

_DOMAIN = "com.microsoft"
_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int32": TensorProto.INT32}


@dataclass(frozen=True)
class _Node:
    """An operator, the inputs in their order with their dtypes (none where left out), outputs and attributes."""

    operator: str
    inputs: tuple[tuple[str, str | None], ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, float], ...]


@lru_cache(maxsize=512)
def _session(node: _Node, threads: int) -> onnxruntime.InferenceSession:
    """Load the model; shapes stay open."""
    given = {name: dtype for name, dtype in node.inputs if dtype is not None}
    names = [name if dtype else "" for name, dtype in node.inputs]
    own = helper.make_node(node.operator, names, node.outputs, domain=_DOMAIN, **dict(node.attributes))
    inputs = [helper.make_tensor_value_info(name, _TYPES[dtype], None) for name, dtype in given.items()]
    outputs = [helper.make_tensor_value_info(name, _TYPES[given["query"]], None) for name in node.outputs]
    graph = helper.make_graph([own], node.operator, inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_DOMAIN, 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return new_session(model, threads)


def run(
    operator: str,
    inputs: Mapping[str, Array | None],
    attributes: Mapping[str, float],
    outputs: tuple[str, ...] = ("output", "present_key", "present_value"),
) -> Array:
    """Run the operator on all of its inputs in their order, None where one is left out, and return its output."""
    dtypes = tuple((name, None if array is None else array.dtype.name) for name, array in inputs.items())
    node = _Node(operator, dtypes, outputs, tuple(sorted(attributes.items())))
    given = {name: np.ascontiguousarray(array) for name, array in inputs.items() if array is not None}
    found: list[Array] = _session(node, threads_asked_for()).run(outputs[:1], given)
    return found[0]


def packed(heads: Array) -> Array:
    """Lay the heads side by side, as a projection returns them: (B, H, L, D) -> (B, L, H D)."""
    batch, number, length, width = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(batch, length, number * width)


def heads_of(output: Array, number: int) -> Array:
    """Take the heads apart again: (B, L, H D) -> (B, H, L, D)."""
    batch, length, width = output.shape
    return output.reshape(batch, length, number, width // number).transpose(0, 2, 1, 3)


def bias_of(mask: Array | None, bias: Array | None, dtype: np.dtype[Any], lengths: tuple[int, int]) -> Array | None:
    """Make the attention_bias: what is added to the scores, minus infinity where nobody may attend."""
    if mask is not None:
        bias = np.where(mask, dtype.type(0) if bias is None else bias, dtype.type(-np.inf))
    # Batch and heads alone may have the length 1.
    return None if bias is None else np.broadcast_to(bias, (*bias.shape[:2], *lengths))


def number_or_default(**attributes: float | None) -> dict[str, float]:
    """Return the attributes that are given. The number 0 stands for the operator's default, and has to be refused."""
    for name, number in attributes.items():
        if number == 0:
            raise NotImplementedError(f"a {name} of 0 stands for the operator's default")
    return {name: float(number) for name, number in attributes.items() if number is not None}
