"""ONNX's Attention by onnxruntime on a CPU: its kernel, which is for opset 24, and the function of opset 25.

For an operator without a kernel it runs the graph that the standard defines the operator by. bfloat16 has neither: it
"could not find an implementation for Expand".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial

import onnxruntime

from attncheck.backends.onnx_attention import Array, Node, OnnxAttention, model_of

_threads = {"number": 1}


def prepare(dtype: str, threads: int) -> None:
    """Limit the threads of sessions that are made from now on."""
    _threads["number"] = threads


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {
        "version": onnxruntime.__version__,
        "device": "cpu",
        "threads": str(_threads["number"]),
        "provider": "CPUExecutionProvider",
    }


@lru_cache(maxsize=256)
def _session(node: Node, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4  # what goes wrong is raised
    model = model_of(node).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _evaluate(node: Node, inputs: Mapping[str, Array]) -> list[Array]:
    found: list[Array] = _session(node, _threads["number"]).run(list(node.outputs), dict(inputs))
    return found


_on_cpu = partial(OnnxAttention, _evaluate, prepare, describe)
KERNEL = _on_cpu(24)
SCORES, CAPPED, MASKED, WEIGHTS = (_on_cpu(24, mode) for mode in range(4))
FUNCTION = _on_cpu(25)
