"""What a worker is asked for a case: the call that implementations know, on inputs that lie as the case says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attncheck.backends import numpy_backend
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Computed, Task, evaluate_on
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: What workers are asked
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
cases:
  - name: The case at hand
"""
SPLIT = """\
    inputs:
      query: {draw: randn, shape: [2, 4, 3, 6]}
      key: {draw: randn, shape: [2, 2, 5, 6]}
      value: {draw: randn, shape: [2, 2, 5, 7]}
"""
MERGED = """\
    layout: merged
    options: {heads: 4, kv_heads: 2, is_causal: true, alignment: bottom_right}
    inputs:
      query: {draw: randn, shape: [2, 3, 24]}
      key: {draw: randn, shape: [2, 5, 12]}
      value: {draw: randn, shape: [2, 5, 14]}
"""


def _task(load_text: Load, text: str) -> Task:
    [case] = load_text(HEAD + text)
    return task_of(case, convert_inputs(case, make_exact_inputs(case), "float64"))


def test_the_options_are_those_of_the_call(load_text: Load) -> None:
    text = "    options: {is_causal: true, window: [1, 1], empty_rows: nan, softcap: 2}\n"
    task = _task(load_text, SPLIT + text)
    assert (task.operation, task.memory_layout) == ("attention", {})
    assert task.options == {"is_causal": True, "window": (1, 1), "softcap": 2, "empty_rows": "nan"}
    assert task.inputs.keys() == {"query", "key", "value"}


def test_a_call_with_heads_side_by_side_says_nothing_of_them(load_text: Load) -> None:
    task = _task(load_text, MERGED)
    assert task.options == {}
    assert task.inputs["mask"].shape == (1, 1, 3, 5)
    assert task.memory_layout == dict.fromkeys(("query", "key", "value"), "transposed")


class Strides:
    """A backend that notes how its inputs lie in memory."""

    def __init__(self) -> None:
        self.strides: dict[str, tuple[int, ...]] = {}

    def from_numpy(self, array: Any) -> Any:
        return array

    def to_numpy(self, tensor: Any) -> Any:
        return tensor

    def attention(self, **inputs: Any) -> dict[str, Any]:
        self.strides = {name: array.strides for name, array in inputs.items()}
        return {"output": inputs["query"]}


@pytest.mark.parametrize(
    ("text", "strides"),
    [
        (SPLIT, {"query": (576, 144, 48, 8), "key": (480, 240, 48, 8), "value": (560, 280, 56, 8)}),
        (
            SPLIT + "    memory_layout: {query: strided, key: transposed}\n",
            {"query": (1152, 288, 96, 16), "key": (480, 48, 96, 8), "value": (560, 280, 56, 8)},
        ),
        (
            MERGED.replace(", is_causal: true, alignment: bottom_right", ""),
            {"query": (576, 48, 192, 8), "key": (480, 48, 96, 8), "value": (560, 56, 112, 8)},
        ),
    ],
)
def test_a_backend_gets_its_inputs_with_the_strides_that_the_case_asks_for(
    load_text: Load, text: str, strides: dict[str, tuple[int, ...]]
) -> None:
    backend = Strides()
    outcome = evaluate_on(backend, _task(load_text, text))  # type: ignore[arg-type] # has what is called
    assert isinstance(outcome, Computed)
    assert backend.strides == strides


def test_the_layout_changes_nothing_of_the_result(load_text: Load) -> None:
    merged = _task(load_text, MERGED)
    separate = Task(merged.operation, merged.options, merged.inputs)
    first, second = (evaluate_on(numpy_backend, task) for task in (merged, separate))
    assert isinstance(first, Computed)
    assert isinstance(second, Computed)
    np.testing.assert_allclose(first.stages["output"], second.stages["output"], rtol=1e-14)
