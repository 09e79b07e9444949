"""OpenVINO's operator ScaledDotProductAttention on a CPU, as a model of one operator.

The plugin takes it apart (ScaledDotProductAttentionDecomposition): the query is scaled before the product, and every step
is an operation in the dtype, as ``get_runtime_model`` shows. ``HINTED`` asks for each dtype by its precision hint: without
one, which is the default, processors with units for bfloat16 compute in it, whatever the model's dtype. Causality leaves
the mask unread, so that a mask beside it carries both.
https://docs.openvino.ai/2026/documentation/openvino-ir-format/operation-sets/operation-specs/sequence/scaled-dot-product-attention.html
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13

from attncheck.backends.contract import Stages, Window

Array = NDArray[Any]

_TYPES = {
    "float32": openvino.Type.f32,
    "float16": openvino.Type.f16,
    "bfloat16": openvino.Type.bf16,
    "bool": openvino.Type.boolean,
}
_HINTS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_threads = {"number": 1}


@dataclass(frozen=True)
class Operator:
    """The operator. Shapes and meanings: ``contract.py``. Without ``hint`` the plugin chooses what it computes in."""

    hint: bool

    @staticmethod
    def prepare(dtype: str, threads: int) -> None:
        """Limit the threads of models that are compiled from now on."""
        _threads["number"] = threads

    @staticmethod
    def describe() -> dict[str, str]:
        """Return the version and what may change the numbers."""
        return {
            "version": openvino.__version__,
            "device": "cpu",
            "threads": str(_threads["number"]),
            "capabilities": " ".join(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }

    @staticmethod
    def from_numpy(array: Array) -> Array:
        """Take the array as it is."""
        return array

    @staticmethod
    def to_numpy(tensor: Array) -> Array:
        """Take the array as it is."""
        return tensor

    def attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        key_lengths: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
    ) -> Stages:
        """Attend in one call; what it has no word for is part of the mask."""
        if query.shape[1] != key.shape[1]:
            raise NotImplementedError("ScaledDotProductAttention needs as many key and value heads as query heads")
        if key.shape[2] == 0 and past_key is None:
            raise NotImplementedError("without a key the output is not written (docs/findings.md)")
        past = 0
        if past_key is not None and past_value is not None:
            past = past_key.shape[2]
            key, value = np.concatenate((past_key, key), axis=2), np.concatenate((past_value, value), axis=2)
        others = (mask, bias, window, key_lengths)
        only_causal = is_causal and all(each is None for each in others)
        lengths = query.shape[2], key.shape[2]
        forbidding = _may_attend(lengths, past, mask, is_causal and not only_causal, window, key_lengths)
        attn_mask = _merge(forbidding, bias)
        if scale is not None and attn_mask is None:
            attn_mask = np.zeros((1, 1, 1, 1), query.dtype)  # the scale comes behind a mask
        return {"output": _call([query, key, value], attn_mask, scale, only_causal, self.hint)}


def _call(inputs: list[Array], attn_mask: Array | None, scale: float | None, is_causal: bool, hint: bool) -> Array:
    dtype = inputs[0].dtype
    inputs = [*inputs, *([] if attn_mask is None else [attn_mask])]
    inputs += [] if scale is None else [np.array(scale, dtype)]
    kinds = tuple((each.dtype.name, each.ndim) for each in inputs)
    compiled = _compiled(kinds, is_causal, _threads["number"], _HINTS[dtype.name] if hint else None)
    request = compiled.create_infer_request()
    request.infer([_tensor(each) for each in inputs])
    result = request.get_output_tensor(0)
    return np.array(result.data.view(dtype) if dtype.name == "bfloat16" else result.data)


def _tensor(array: Array) -> openvino.Tensor:
    array = array if array.flags.c_contiguous else array.copy()  # ascontiguousarray gives a scalar an axis
    if array.dtype.name != "bfloat16":
        return openvino.Tensor(array)
    return openvino.Tensor(array.view(np.uint16), array.shape, openvino.Type.bf16)


@lru_cache(maxsize=64)
def _compiled(
    inputs: tuple[tuple[str, int], ...], is_causal: bool, threads: int, hint: str | None
) -> openvino.CompiledModel:
    parameters = [opset13.parameter(openvino.PartialShape([-1] * rank), _TYPES[dtype]) for dtype, rank in inputs]
    model = openvino.Model([opset13.scaled_dot_product_attention(*parameters, causal=is_causal)], parameters)
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if hint is not None:
        options["INFERENCE_PRECISION_HINT"] = hint
    return openvino.Core().compile_model(model, "CPU", options)


def _may_attend(
    lengths: tuple[int, int],
    past: int,
    mask: Array | None,
    is_causal: bool,
    window: Window | None,
    key_lengths: Array | None,
) -> Array | None:
    """Combine everything that forbids a key: (B, H, Lq, T), or what broadcasts to it."""
    queries, keys = np.arange(lengths[0])[:, np.newaxis], np.arange(lengths[1])
    conditions = [] if mask is None else [mask]
    if is_causal:
        conditions.append((keys <= queries)[np.newaxis, np.newaxis])
    before, after = window or (None, None)
    if before is not None:
        conditions.append((keys >= queries + past - before)[np.newaxis, np.newaxis])
    if after is not None:
        conditions.append((keys <= queries + past + after)[np.newaxis, np.newaxis])
    if key_lengths is not None:
        conditions.append(keys < key_lengths.reshape(-1, 1, 1, 1))
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else allowed & condition
    return allowed


def _merge(allowed: Array | None, bias: Array | None) -> Array | None:
    """Make the one mask that the call takes: boolean, True = may attend, or added to the scores."""
    if allowed is None or bias is None:
        return bias if allowed is None else allowed
    return np.where(allowed, bias, bias.dtype.type(-np.inf))


HINTED, DEFAULT = Operator(hint=True), Operator(hint=False)
