"""ONNX's Attention by the evaluator that the standard comes with, written in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from attncheck.backends.onnx_attention import Array, Node, OnnxAttention, model_of


def prepare(dtype: str, threads: int) -> None:
    """Do nothing: NumPy's threads are limited before it is imported."""


def describe() -> dict[str, str]:
    """Return the versions."""
    return {"version": onnx.__version__, "device": "cpu", "numpy": np.__version__}


def _evaluate(node: Node, inputs: Mapping[str, Array]) -> list[Array]:
    found: list[Array] = ReferenceEvaluator(model_of(node)).run(list(node.outputs), dict(inputs))
    return found


_in_numpy = partial(OnnxAttention, _evaluate, prepare, describe, 25)
OUTPUT = _in_numpy()
SCORES, CAPPED, MASKED, WEIGHTS = (_in_numpy(mode) for mode in range(4))
