"""ONNX's Attention by onnxruntime on a CPU: its kernel, which is for opset 24, and the function of opset 25.

For an operator without a kernel it runs the graph that the standard defines the operator by. bfloat16 has neither: it
"could not find an implementation for Expand".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial

import onnx
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


def threads_asked_for() -> int:
    """Return how many threads a session has that is made now."""
    return _threads["number"]


def new_session(model: onnx.ModelProto, threads: int) -> onnxruntime.InferenceSession:
    """Load a model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4  # what goes wrong is raised
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=256)
def _session(node: Node, threads: int) -> onnxruntime.InferenceSession:
    return new_session(model_of(node), threads)


def _evaluate(node: Node, inputs: Mapping[str, Array]) -> list[Array]:
    found: list[Array] = _session(node, threads_asked_for()).run(list(node.outputs), dict(inputs))
    return found


_on_cpu = partial(OnnxAttention, _evaluate, prepare, describe)
KERNEL = _on_cpu(24)
SCORES, CAPPED, MASKED, WEIGHTS = (_on_cpu(24, mode) for mode in range(4))
FUNCTION = _on_cpu(25)
