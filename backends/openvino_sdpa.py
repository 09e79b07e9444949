"""OpenVINO's operator ScaledDotProductAttention on a CPU, as a model of one operator.

The plugin takes it apart (ScaledDotProductAttentionDecomposition): the query is scaled before the product, and every step
is an operation in the dtype, as ``get_runtime_model`` shows. With ``hint`` each dtype is asked for by its precision hint: without
one, which is the default, processors with units for bfloat16 compute in it, whatever the model's dtype. They do the same
where float16 is asked for and they have no units for it, so that there a model of float16 is asked for in float32. Causality leaves
the mask unread, so that a mask beside it carries both.
https://docs.openvino.ai/2026/documentation/openvino-ir-format/operation-sets/operation-specs/sequence/scaled-dot-product-attention.html
"""  # noqa: E501

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13

from attncheck.backends import numpy_backend
from attncheck.backends.library_arrays import EagerArrays

Array = NDArray[Any]

_TYPES = {
    "float32": openvino.Type.f32,
    "float16": openvino.Type.f16,
    "bfloat16": openvino.Type.bf16,
    "bool": openvino.Type.boolean,
}
_PRECISION_HINTS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_threads = {"number": 1}


class NumpyArrays(EagerArrays):
    """The operator takes NumPy's arrays."""

    def prepare(self, dtype: str, threads: int) -> None:
        """Limit the threads of models that are compiled from now on."""
        _threads["number"] = threads

    def describe(self) -> dict[str, str]:
        """Return the version and what may change the numbers."""
        return {
            "version": openvino.__version__,
            "device": "cpu",
            "threads": str(_threads["number"]),
            "capabilities": " ".join(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }

    from_numpy, to_numpy = staticmethod(numpy_backend.from_numpy), staticmethod(numpy_backend.to_numpy)


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    hint: bool = True,
) -> Array:
    """Attend in one call. Without ``hint`` the plugin chooses what it computes in."""
    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("ScaledDotProductAttention needs as many key and value heads as query heads")
    if key.shape[2] == 0 or key.shape[3] == 0:
        raise NotImplementedError("without a key, or features, the output is not written (docs/findings.md)")
    dtype = query.dtype
    if scale is not None and attn_mask is None:
        attn_mask = np.zeros((1, 1, 1, 1), dtype)  # the scale comes behind a mask
    inputs = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    inputs += [] if scale is None else [np.array(scale, dtype)]
    kinds = tuple((array.dtype.name, array.ndim) for array in inputs)
    compiled = _compile_model(kinds, is_causal, _threads["number"], _PRECISION_HINTS[dtype.name] if hint else None)
    request = compiled.create_infer_request()
    request.infer([_tensor(array) for array in inputs])
    result = request.get_output_tensor(0)
    return np.array(result.data.view(dtype) if dtype.name == "bfloat16" else result.data)


def _tensor(array: Array) -> openvino.Tensor:
    array = array if array.flags.c_contiguous else array.copy()  # ascontiguousarray gives a scalar an axis
    if array.dtype.name != "bfloat16":
        return openvino.Tensor(array)
    return openvino.Tensor(array.view(np.uint16), array.shape, openvino.Type.bf16)


@lru_cache(maxsize=64)
def _compile_model(
    inputs: tuple[tuple[str, int], ...], is_causal: bool, threads: int, hint: str | None
) -> openvino.CompiledModel:
    parameters = [opset13.parameter(openvino.PartialShape([-1] * rank), _TYPES[dtype]) for dtype, rank in inputs]
    model = openvino.Model([opset13.scaled_dot_product_attention(*parameters, causal=is_causal)], parameters)
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    core = openvino.Core()
    if hint is not None:
        has_units = hint != "f16" or "FP16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        options["INFERENCE_PRECISION_HINT"] = hint if has_units else "f32"
    return core.compile_model(model, "CPU", options)


ARRAYS = NumpyArrays()
