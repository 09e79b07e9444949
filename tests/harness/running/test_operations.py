"""Which function of a backend an operation calls, and with what."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from attncheck.backends.contract import Backend
from attncheck.harness.running.operations import run_operation
from attncheck.harness.vocabulary import OPERATIONS


class Recorder:
    """A backend that notes how it was called; its arrays are marked, so that what is not converted shows."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def from_numpy(self, array: Any) -> tuple[str, Any]:
        return ("own", array)

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> dict[str, Any]:
            self.calls.append((name, arguments))
            return {"output": name}

        return call


def call_of(operation: str, inputs: dict[str, Any], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    recorder = Recorder()
    stages = run_operation(cast(Backend, recorder), operation, inputs, options)
    (call,) = recorder.calls
    assert stages == {"output": call[0]}
    return call


@pytest.mark.parametrize(
    ("operation", "options", "function", "passed"),
    [
        ("softmax", {}, "softmax", {}),
        ("masking", {"is_causal": True}, "mask_scores", {"is_causal": True}),
        ("attention", {"scale": 0.5, "is_causal": True}, "attention", {"scale": 0.5, "is_causal": True}),
        ("multi_head_attention", {"heads": 2}, "multi_head_attention", {"heads": 2}),
        ("scoring", {}, "dot_scores", {}),
        ("scoring", {"score": "scaled_dot"}, "dot_scores", {}),
        ("scoring", {"score": "scaled_dot", "scale": 0}, "dot_scores", {"scale": 0}),
        ("scoring", {"score": "dot"}, "dot_scores", {"scale": 1.0}),
        ("scoring", {"score": "dot", "scale": 0}, "dot_scores", {"scale": 0}),
        ("scoring", {"score": "general"}, "general_scores", {}),
        ("scoring", {"score": "additive"}, "additive_scores", {}),
    ],
)
def test_an_operation_calls_its_function_with_the_backends_own_arrays(
    operation: str, options: dict[str, Any], function: str, passed: dict[str, Any]
) -> None:
    before = dict(options)
    name, arguments = call_of(operation, {"first": 1, "second": 2}, options)
    assert name == function
    assert arguments == {"first": ("own", 1), "second": ("own", 2)} | passed
    assert options == before


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_of_the_vocabulary_can_be_run(operation: str) -> None:
    name, _ = call_of(operation, {}, {})
    assert name != "from_numpy"


def test_an_operation_that_is_not_in_the_vocabulary_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="an operation that no backend has: dreaming"):
        run_operation(cast(Backend, Recorder()), "dreaming", {"scores": np.zeros(1)}, {})
