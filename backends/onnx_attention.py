"""ONNX's operator Attention as a model of one node, and its evaluation by what the standard comes with, in NumPy.

Tensors are NumPy's arrays. ``qk_matmul_output_mode`` hands out one stage beside the output.
https://onnx.ai/onnx/operators/onnx__Attention.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from attncheck.backends import numpy_backend
from attncheck.backends.contract import CallOptions, Stages, Window, pass_as_options

Array: TypeAlias = NDArray[Any]
Evaluate = Callable[["OnnxNode", Mapping[str, Array]], list[Array]]
"""Runs a model of one node with these inputs, and returns the outputs that the node has."""

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
STAGE_OF_OUTPUT_MODE = ("scores", "capped", "masked", "weights")
"""What qk_matmul_output is by its mode; without a mask the third is the biased scores."""
ONNX_TYPES = {
    "float64": TensorProto.DOUBLE,
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "bool": TensorProto.BOOL,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
}


@dataclass(frozen=True)
class OnnxNode:
    """An operator, its version, inputs with dtypes (None for omitted ones), outputs (empty if omitted), attributes."""

    operator: str
    opset: int
    inputs: tuple[tuple[str, str | None], ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, float], ...]
    domain: str = ""

    @property
    def returned_outputs(self) -> list[str]:
        """Return the names of the outputs that are not omitted."""
        return list(filter(None, self.outputs))


@lru_cache(maxsize=512)
def make_model(node: OnnxNode) -> onnx.ModelProto:
    """Make the model; shapes stay open, and outputs are of the first input's dtype."""
    dtypes = {name: dtype for name, dtype in node.inputs if dtype is not None}
    names = [name if dtype else "" for name, dtype in node.inputs]
    operator_node = helper.make_node(node.operator, names, node.outputs, domain=node.domain, **dict(node.attributes))
    inputs = [helper.make_tensor_value_info(name, ONNX_TYPES[dtype], None) for name, dtype in dtypes.items()]
    outputs = [
        helper.make_tensor_value_info(name, ONNX_TYPES[next(iter(dtypes.values()))], None)
        for name in node.returned_outputs
    ]
    graph = helper.make_graph([operator_node], node.operator, inputs, outputs)
    opsets = [helper.make_opsetid("", node.opset), *([helper.make_opsetid(node.domain, 1)] if node.domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def names_up_to_last_present(names: tuple[str, ...], present: Any) -> tuple[str, ...]:
    """Return the names that a node lists, up to the last one that is present."""
    return names[: 1 + max(place for place, name in enumerate(names) if name in present)]


@dataclass(frozen=True)
class OnnxAttention:
    """The operator, evaluated by ``evaluate``. Shapes and meanings: ``contract.py``.

    ``output_mode`` is its qk_matmul_output_mode; without one it returns only the output.
    """

    evaluate: Evaluate
    prepare: Callable[[str, int], None]
    describe: Callable[[], dict[str, str]]
    opset: int
    output_mode: int | None = None

    from_numpy, to_numpy = staticmethod(numpy_backend.from_numpy), staticmethod(numpy_backend.to_numpy)

    @pass_as_options("mask", "bias", "is_causal", "scale", "softcap", "window", "key_lengths", "past_key", "past_value")
    def attention(self, query: Array, key: Array, value: Array, options: CallOptions) -> Stages:
        """Attend in one node. After a past, causality and a window count from its end, as in the contract."""
        mask, bias, key_lengths = options.mask, options.bias, options.key_lengths
        past_key, past_value = options.past_key, options.past_value
        counts_positions = options.is_causal or options.window is not None
        keys = key.shape[2] + (0 if past_key is None else past_key.shape[2])
        named = {"Q": query, "K": key, "V": value}
        if past_key is not None and past_value is not None:
            named |= {"past_key": past_key, "past_value": past_value}
        if key_lengths is not None and (counts_positions or past_key is not None):
            # With lengths, the operator aligns the last query with the last key; and it accepts none with a past.
            used = np.arange(keys) < key_lengths.reshape(-1, 1, 1, 1)
            mask, key_lengths = used if mask is None else mask & used, None
        if key_lengths is not None:
            named["nonpad_kv_seqlen"] = key_lengths.astype(np.int64)
        # The operator has one attn_mask: boolean (True is allowed), or numbers that are added to the scores.
        attn_mask = bias if mask is None else mask
        if mask is not None and bias is not None:
            attn_mask = np.where(mask, bias, bias.dtype.type(-np.inf))
        if attn_mask is not None:
            # Its shape is "broadcastable", but onnxruntime accepts only batch and head axes of length 1.
            named["attn_mask"] = np.broadcast_to(attn_mask, (*attn_mask.shape[:2], query.shape[2], keys))
        output, *stage = self._evaluate_node(named, self._attributes(query.dtype.name, options))
        forbids = counts_positions or mask is not None or key_lengths is not None
        stages: Stages = dict.fromkeys(self._stage_of(options, forbids=forbids), *stage)
        return stages | {"output": output}

    @pass_as_options("is_causal", "scale", "softcap", "window")
    def paged_attention(
        self,
        query: Array,
        key_pages: Array,
        value_pages: Array,
        block_table: Array,
        key_lengths: Array,
        options: CallOptions,
    ) -> Stages:
        """Gather the pages, and attend to an external cache: with its lengths, positions count from the end."""
        if self.output_mode is not None:
            raise NotImplementedError("has stages of attention alone")
        key, value = gather_pages(key_pages, value_pages, block_table)
        unused = (np.arange(key.shape[2]) >= key_lengths.reshape(-1, 1))[:, np.newaxis, :, np.newaxis]
        key, value = (np.where(unused, array.dtype.type(0), array) for array in (key, value))  # 0 times NaN is NaN
        named = {"Q": query, "K": key, "V": value, "nonpad_kv_seqlen": key_lengths.astype(np.int64)}
        (output,) = self._evaluate_node(named, self._attributes(query.dtype.name, options))
        return {"output": output}

    def _evaluate_node(self, named: dict[str, Array], attributes: dict[str, float]) -> list[Array]:
        """Return Y, and the stage if ``output_mode`` requests one."""
        caches = ("present_key", "present_value") if "past_key" in named else ()
        outputs = ("Y", *caches, *(() if self.output_mode is None else ("qk_matmul_output",)))
        dtypes = {name: array.dtype.name for name, array in named.items()}
        node = OnnxNode(
            "Attention",
            self.opset,
            tuple((name, dtypes.get(name)) for name in names_up_to_last_present(INPUTS, named)),
            tuple(name if name in outputs else "" for name in names_up_to_last_present(OUTPUTS, outputs)),
            tuple(sorted(attributes.items())),
        )
        results = dict(zip(outputs, self.evaluate(node, named), strict=True))
        return [results[name] for name in outputs if name not in caches]

    def _attributes(self, dtype: str, options: CallOptions) -> dict[str, float]:
        scale, softcap = options.scale, options.softcap
        if scale is not None and scale <= 0:
            raise NotImplementedError("Attention multiplies query and key by the root of the scale, which is positive")
        for number in (scale, softcap):
            if dtype == "float64" and number is not None and number != float(np.float32(number)):
                raise NotImplementedError("an attribute of ONNX is a float32, and this scale or softcap is none")
        attributes: dict[str, float] = {"is_causal": 1} if options.is_causal else {}
        if scale is not None:
            attributes["scale"] = float(scale)
        if softcap is not None:
            attributes["softcap"] = float(softcap)
        if self.output_mode is not None:
            attributes["qk_matmul_output_mode"] = self.output_mode
        return attributes | self._window_attributes(options.window)

    def _window_attributes(self, window: Window | None) -> dict[str, float]:
        if window is None:
            return {}
        left, right = window
        if self.opset >= OPSET_WITH_WINDOWS:
            sides = {"left_window_size": left, "right_window_size": right}
            return {name: side for name, side in sides.items() if side is not None}
        if (left, right) != (None, 0):
            raise NotImplementedError("Attention has windows since opset 25")
        return {"is_causal": 1}

    def _stage_of(self, options: CallOptions, *, forbids: bool) -> tuple[str, ...]:
        """Return the name of the stage that the operator returns, if the call computes it."""
        if self.output_mode is None:
            return ()
        stage = STAGE_OF_OUTPUT_MODE[self.output_mode]
        if stage == "capped" and options.softcap is None:
            raise NotImplementedError("without a softcap there is no stage behind it")
        if stage == "masked" and not forbids:
            stage = "biased"
        if stage == "biased" and options.bias is None:
            raise NotImplementedError("without a mask and a bias there is no stage behind them")
        return (stage,)


OPSET_WITH_WINDOWS = 25


def gather_pages(key_pages: Array, value_pages: Array, block_table: Array) -> Iterator[Array]:
    """Yield keys and values of each batch entry, (B, Hkv, T, D), of pages (Np, Lp, Hkv, D)."""
    table = np.clip(block_table, 0, len(key_pages) - 1)  # entries after the last used page may be no pages
    for pages in (key_pages[table], value_pages[table]):  # (B, W, Lp, Hkv, D)
        yield pages.reshape(len(table), -1, *pages.shape[3:]).transpose(0, 2, 1, 3)


def merge_heads(heads: Array) -> Array:
    """Merge heads, as a projection returns them: (B, H, L, D) -> (B, L, H D)."""
    batch, number, length, width = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(batch, length, number * width)


def split_heads(rows: Array, heads: int) -> Array:
    """Split heads: (B, L, H D) -> (B, H, L, D)."""
    batch, length, width = rows.shape
    return rows.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def _prepare_numpy(dtype: str, threads: int) -> None:
    """Do nothing: NumPy's threads are limited before it is imported."""


def _describe_numpy() -> dict[str, str]:
    """Return the versions."""
    return {"version": onnx.__version__, "device": "cpu", "numpy": np.__version__}


def _evaluate_in_numpy(node: OnnxNode, inputs: Mapping[str, Array]) -> list[Array]:
    from onnx.reference import ReferenceEvaluator  # imported here, because writing files does not need it

    outputs: list[Array] = ReferenceEvaluator(make_model(node)).run(node.returned_outputs, dict(inputs))
    return outputs


_make_numpy_operator = partial(OnnxAttention, _evaluate_in_numpy, _prepare_numpy, _describe_numpy, 25)
OUTPUT = _make_numpy_operator()
SCORES, CAPPED, MASKED, WEIGHTS = (_make_numpy_operator(mode) for mode in range(4))
