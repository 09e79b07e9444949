"""Which function of a backend an operation calls, and with what."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from attncheck.backends import BACKENDS
from attncheck.backends.contract import Backend
from attncheck.execution.operations import not_asked, run_operation
from attncheck.spec import OPERATIONS, result_stages


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
        ("scoring", {"score": "cosine"}, "cosine_scores", {}),
        ("scoring", {"score": "cosine", "scale": 2}, "cosine_scores", {"scale": 2}),
        ("scoring", {"softcap": 2.5}, "dot_scores", {"softcap": 2.5}),
        ("attention_gradients", {"window": (1, None)}, "attention_gradients", {"window": (1, None)}),
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
def test_every_operation_of_the_specification_can_be_run(operation: str) -> None:
    name, _ = call_of(operation, {}, {})
    assert name != "from_numpy"


def test_an_operation_that_is_not_in_the_specification_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="an operation that no backend has: dreaming"):
        run_operation(cast(Backend, Recorder()), "dreaming", {"scores": np.zeros(1)}, {})


@pytest.mark.parametrize(
    ("operation", "asked", "wanted"),
    [
        ("scoring", {"query": 1, "score": "general"}, ("scores",)),
        ("scoring", {"query": 1, "softcap": None}, ("scores",)),
        ("scoring", {"query": 1, "softcap": 2.0}, ("capped",)),
        ("softmax", {"scores": 1}, ("weights",)),
        ("attention", {"bias": 1, "is_causal": True}, ("output",)),
        ("attention_gradients", {"mask": 1}, ("grad_query", "grad_key", "grad_value")),
        ("attention_gradients", {"bias": 1}, ("grad_query", "grad_key", "grad_value", "grad_bias")),
        ("multi_head_attention", {}, ("output",)),
        ("masking", {"scores": 1, "bias": 1}, ("biased",)),
        ("masking", {"scores": 1, "bias": 1, "is_causal": False, "window": (None, None)}, ("biased",)),
        ("masking", {"scores": 1, "is_causal": True}, ("masked",)),
        ("masking", {"scores": 1, "bias": 1, "mask": 1}, ("masked",)),
        ("masking", {"scores": 1, "key_lengths": 1}, ("masked",)),
        ("masking", {"scores": 1, "window": (None, 0)}, ("masked",)),
        ("masking", {"scores": 1}, ()),
    ],
)
def test_the_result_of_an_operation_is_the_last_stage_that_is_asked_for(
    operation: str, asked: dict[str, Any], wanted: tuple[str, ...]
) -> None:
    inputs = {name for name, value in asked.items() if name in OPERATIONS[operation].inputs and value is not None}
    options = {name: value for name, value in asked.items() if name not in inputs}
    assert result_stages(operation, options, inputs) == wanted


def test_every_operation_has_a_result_among_its_stages() -> None:
    for name, operation in OPERATIONS.items():
        assert set(result_stages(name, {}, {"mask"})) <= set(operation.stages)
        assert result_stages(name, {}, {"mask"})


class Small:
    """A backend with a single function that takes little; everything else it does not have."""

    def __init__(self) -> None:
        self.converted: list[Any] = []

    def from_numpy(self, array: Any) -> Any:
        self.converted.append(array)
        return array

    def attention(self, query: Any, key: Any, value: Any, *, is_causal: bool = False) -> dict[str, Any]:
        return {"output": (query, key, value, is_causal)}


THREE = {"query": 1, "key": 2, "value": 3}


def test_what_a_function_takes_is_asked_of_it() -> None:
    stages = run_operation(cast(Backend, Small()), "attention", THREE, {"is_causal": True})
    assert stages == {"output": (1, 2, 3, True)}


class Asked(Small):
    """A backend whose attention takes the convention of a query without a key."""

    def attention(self, query: Any, key: Any, value: Any, *, empty_rows: str = "zero") -> dict[str, Any]:  # type: ignore[override]
        return {"output": empty_rows}


def test_a_convention_is_asked_of_a_function_that_takes_it_and_left_out_of_any_other() -> None:
    options = {"empty_rows": "nan"}
    assert run_operation(cast(Backend, Asked()), "attention", THREE, options) == {"output": "nan"}
    assert not_asked(cast(Backend, Asked()), "attention", options) == ()
    assert run_operation(cast(Backend, Small()), "attention", THREE, options) == {"output": (1, 2, 3, False)}
    assert not_asked(cast(Backend, Small()), "attention", options) == ("empty_rows",)
    assert call_of("attention", {}, options) == ("attention", options)  # it takes anything
    assert not_asked(cast(Backend, Recorder()), "attention", options) == ()
    assert not_asked(cast(Backend, Small()), "softmax", options) == ()  # it has none to ask
    assert not_asked(cast(Backend, Small()), "attention", {}) == ()


@pytest.mark.parametrize("name", [name for name, entry in BACKENDS.items() if entry.is_installed])
def test_every_eager_mode_is_asked_for_every_convention(name: str) -> None:
    backend = BACKENDS[name].load()
    operations = [each for each in OPERATIONS.values() if "empty_rows" in each.options]
    assert len(operations) == 7
    assert [not_asked(backend, each.name, {"empty_rows": "nan"}) for each in operations] == [()] * 7


@pytest.mark.parametrize(
    ("operation", "inputs", "options", "reason"),
    [
        ("softmax", {"scores": 1}, {}, "has no softmax"),
        ("masking", {"scores": 1}, {}, "has no mask_scores"),
        ("scoring", {"query": 1, "key": 2}, {"score": "cosine"}, "has no cosine_scores"),
        ("attention_gradients", THREE, {}, "has no attention_gradients"),
        ("attention", THREE, {"softcap": 2.0}, "takes no softcap"),
        ("attention", THREE | {"key_lengths": 4}, {}, "takes no key_lengths"),
        ("attention", THREE | {"mask": 4, "bias": 5}, {"window": (1, 1)}, "takes no mask, bias, window"),
    ],
)
def test_what_a_backend_cannot_be_asked_is_unsupported_and_nothing_is_converted(
    operation: str, inputs: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    backend = Small()
    with pytest.raises(NotImplementedError) as error:
        run_operation(cast(Backend, backend), operation, inputs, options)
    assert str(error.value) == reason
    assert backend.converted == []
