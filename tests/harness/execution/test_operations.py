"""Which function of a backend a task calls, with what, in which layout, and whether its scores would fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.backends import BACKENDS, Mode, numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution.layout import apply_layout
from attncheck.execution.limits import scores_too_large
from attncheck.execution.operations import not_asked, run_operation
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Computed, Task, evaluate_on
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
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


LAYOUTS = ("strided", "transposed", "broadcast")


DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def _array(shape: tuple[int, ...], dtype: type = np.float32, *, repeated: bool = False) -> NDArray[Any]:
    numbers = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    return np.ascontiguousarray(np.broadcast_to(numbers[:, :1], shape)) if repeated else numbers


def _one(array: NDArray[Any], layout: str) -> NDArray[Any]:
    return apply_layout({"query": array}, {"query": layout})["query"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20)
@given(shape=st.tuples(*[st.integers(0, 4)] * 4), repeated=st.booleans())
def test_the_numbers_shape_and_dtype_are_the_same(
    layout: str, dtype: type, shape: tuple[int, ...], repeated: bool
) -> None:
    array = _array(shape, dtype, repeated=repeated)
    other = _one(array, layout)
    assert (other.shape, other.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(other.astype(np.float64), array.astype(np.float64))


def test_strided_is_every_second_number_and_what_lies_between_would_show() -> None:
    array = _array((2, 3, 4, 5))
    other = _one(array, "strided")
    assert other.strides == (2 * 3 * 4 * 5 * 2 * 2, 4 * 5 * 4 * 2, 5 * 4 * 2, 4 * 2)
    assert other.base is not None
    assert (other.base.reshape(2, 3, 4, 10)[..., 1::2] == 7).all()


def test_transposed_has_the_heads_inside_of_the_length() -> None:
    other = _one(_array((2, 3, 4, 5)), "transposed")
    assert other.strides == (4 * 3 * 5 * 4, 5 * 4, 3 * 5 * 4, 4)
    assert other.swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3, 4, 5), (4 * 5 * 4, 0, 5 * 4, 4)), ((1, 3, 4, 5), (4 * 5 * 4, 0, 5 * 4, 4)), ((3, 5), (5 * 4, 4))],
)
def test_broadcast_has_stride_0_where_all_slices_are_alike(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    other = _one(_array(shape, repeated=len(shape) == 4), "broadcast")
    assert tuple(0 if stride == 0 else stride for stride in other.strides)[1:] == strides[1:]
    assert (other.strides[0] == strides[0]) or shape[0] == 1


def test_several_axes_may_have_stride_0_but_never_the_last() -> None:
    other = _one(np.ones((2, 3, 4, 5), dtype=np.float32), "broadcast")
    assert other.strides == (0, 0, 0, 4)


def test_only_what_is_named_is_moved() -> None:
    query, key = _array((1, 2, 3, 4)), _array((1, 2, 3, 4))
    moved = apply_layout({"query": query, "key": key}, {"key": "strided"})
    assert list(moved) == ["query", "key"]
    assert moved["query"] is query
    assert moved["key"] is not key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_array_that_was_given_is_left_alone(layout: str) -> None:
    array = _array((2, 2, 3, 4), repeated=True)
    before = array.copy()
    _one(array, layout)
    np.testing.assert_array_equal(array, before)
    assert array.flags.c_contiguous


LENGTH = 32_768


HOLDS, TILES = Mode("eager", "some_module", "modular"), Mode("flash", "some_module", "in tiles", holds_scores=False)


def task(operation: str = "attention", dtype: str = "float32", **options: Any) -> Task:
    """One head of 32,768 queries and keys that take no memory."""
    zero = np.broadcast_to(np.zeros((), dtype), (1, 1, LENGTH, 64))
    return Task(operation, options, dict.fromkeys(("query", "key", "value"), zero))


# raw_scores, scores, weights, and with causality masked: 2^30 scores each.
@pytest.mark.parametrize(("options", "dtype", "gibibytes"), [
    ({}, "float32", 12),
    ({"is_causal": True}, "float32", 16),
    ({"is_causal": True}, "float64", 32),
    ({"is_causal": True, "softcap": 2.0}, "float16", 10),
])  # fmt: skip
def test_what_the_stages_alone_take_is_the_limit(options: dict[str, Any], dtype: str, gibibytes: int) -> None:
    asked = task(dtype=dtype, **options)
    assert scores_too_large(HOLDS, asked, gibibytes * 2**30) is None
    found = scores_too_large(HOLDS, asked, gibibytes * 2**30 - 1)
    assert found is not None
    assert found.verdict == "unsupported"
    assert f"would hold 1,073,741,824 scores in {3 + len(options)} stages, {gibibytes}.0 GiB" in found.message


def test_a_kernel_that_takes_scores_in_tiles_is_asked() -> None:
    assert scores_too_large(TILES, task(), 1) is None


def test_heads_and_the_past_count() -> None:
    zero = np.broadcast_to(np.float32(0), (2, 16, 8))
    inputs = dict.fromkeys(("query", "key", "value"), zero)
    projected = Task("multi_head_attention", {"heads": 4}, inputs)
    elements, stages = 2 * 4 * 16 * 16, 3
    assert scores_too_large(HOLDS, projected, elements * stages * 4) is None
    assert scores_too_large(HOLDS, projected, elements * stages * 4 - 1) is not None
    per_head = {name: array[:, np.newaxis] for name, array in inputs.items()}
    past = Task("attention", {}, {**per_head, "past_key": per_head["key"], "past_value": per_head["value"]})
    elements = 2 * 16 * 32
    assert scores_too_large(HOLDS, past, elements * stages * 4) is None
    assert scores_too_large(HOLDS, past, elements * stages * 4 - 1) is not None


def test_gradients_return_no_scores_and_hold_them() -> None:
    found = scores_too_large(HOLDS, task("attention_gradients"), 8 * 2**30 - 1)
    assert found is not None
    assert "in 2 stages, 8.0 GiB" in found.message
    assert scores_too_large(HOLDS, task("attention_gradients"), 8 * 2**30) is None


def test_scores_that_are_given_are_there_already() -> None:
    given = Task("softmax", {}, {"scores": np.broadcast_to(np.float32(0), (1, 1, LENGTH, LENGTH))})
    assert scores_too_large(HOLDS, given, 1) is None
