"""Which function of a backend a task calls, with what, in which layout, and whether its scores would fit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tables import tables_beside

from attncheck.backends import BACKENDS, Mode
from attncheck.backends.contract import Backend
from attncheck.execution.operations import Task, apply_layout, not_asked, run_operation
from attncheck.execution.runner import scores_too_large, task_of
from attncheck.execution.worker import Computed, evaluate_on
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.spec import OPERATIONS, result_stages

TABLES = tables_beside(__file__)

THREE = {"query": 1, "key": 2, "value": 3}


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


@pytest.mark.parametrize(("operation", "options", "function", "passed"), TABLES["functions"])
def test_an_operation_calls_its_function_with_the_backends_own_arrays(
    operation: str, options: dict[str, Any], function: str, passed: dict[str, Any]
) -> None:
    before, recorder = dict(options), Recorder()
    stages = run_operation(cast(Backend, recorder), operation, {"first": 1, "second": 2}, options)
    assert recorder.calls == [(function, {"first": ("own", 1), "second": ("own", 2)} | passed)]
    assert stages == {"output": function}
    assert options == before


def test_every_operation_of_the_specification_can_be_run_and_no_other() -> None:
    for operation in OPERATIONS:
        run_operation(cast(Backend, Recorder()), operation, {}, {})
    with pytest.raises(AssertionError, match="an operation that no backend has: dreaming"):
        run_operation(cast(Backend, Recorder()), "dreaming", {"scores": np.zeros(1)}, {})


@pytest.mark.parametrize(("operation", "asked", "wanted"), TABLES["results"])
def test_the_result_is_the_last_stage_asked_for(operation: str, asked: dict[str, Any], wanted: tuple[str, ...]) -> None:
    inputs = {name for name, value in asked.items() if name in OPERATIONS[operation].inputs and value is not None}
    options = {name: tuple(own) if name == "window" else own for name, own in asked.items() if name not in inputs}
    assert [*result_stages(operation, options, inputs)] == wanted


class Small:
    """A backend with a single function that takes little; everything else it does not have."""

    def __init__(self) -> None:
        self.converted: list[Any] = []

    def from_numpy(self, array: Any) -> Any:
        self.converted.append(array)
        return array

    def attention(self, query: Any, key: Any, value: Any, *, is_causal: bool = False) -> dict[str, Any]:
        return {"output": (query, key, value, is_causal)}


class Asked(Small):
    """A backend whose attention takes the convention of a query without a key."""

    def attention(self, query: Any, key: Any, value: Any, *, empty_rows: str = "zero") -> dict[str, Any]:  # type: ignore[override]
        return {"output": empty_rows}


def test_a_convention_is_asked_of_a_function_that_takes_it_and_left_out_of_any_other() -> None:
    small, options = cast(Backend, Small()), {"empty_rows": "nan"}
    assert run_operation(cast(Backend, Asked()), "attention", THREE, options) == {"output": "nan"}
    assert run_operation(small, "attention", THREE, options | {"is_causal": True}) == {"output": (1, 2, 3, True)}
    for backend, operation, given_options, expected in (
        (Asked(), "attention", options, ()),
        (Small(), "attention", options, ("empty_rows",)),
        (Recorder(), "attention", options, ()),  # it takes anything
        (Small(), "softmax", options, ()),  # it has none to ask
        (Small(), "attention", {}, ()),
    ):
        assert not_asked(cast(Backend, backend), operation, given_options) == expected


@pytest.mark.parametrize("name", [name for name, entry in BACKENDS.items() if entry.is_installed])
def test_every_eager_mode_is_asked_for_every_convention(name: str) -> None:
    backend = BACKENDS[name].load()
    operations = [each for each in OPERATIONS.values() if "empty_rows" in each.options]
    assert len(operations) == 7
    assert [not_asked(backend, each.name, {"empty_rows": "nan"}) for each in operations] == [()] * 7


@pytest.mark.parametrize(("operation", "inputs", "options", "reason", "lacks"), TABLES["lacking"])
def test_what_a_backend_cannot_be_asked_is_unsupported_and_nothing_is_converted(
    operation: str, inputs: dict[str, Any], options: dict[str, Any], reason: str, lacks: tuple[str, ...]
) -> None:
    backend = Small()
    with pytest.raises(NotImplementedError) as error:
        run_operation(cast(Backend, backend), operation, inputs, options)
    assert (str(error.value), [*getattr(error.value, "lacks", ())]) == (reason, lacks)
    assert backend.converted == []


# Layouts


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
    options: {heads: 4, kv_heads: 2}
    inputs:
      query: {draw: randn, shape: [2, 3, 24]}
      key: {draw: randn, shape: [2, 5, 12]}
      value: {draw: randn, shape: [2, 5, 14]}
"""
WITHIN = "    options: {is_causal: true, window: [1, 1], empty_rows: nan, softcap: 2}\n"
BOTTOM_RIGHT = MERGED.replace("2}", "2, is_causal: true, alignment: bottom_right}")
APART = {"query": (576, 144, 48, 8), "key": (480, 240, 48, 8), "value": (560, 280, 56, 8)}
TOGETHER = {"query": (576, 48, 192, 8), "key": (480, 48, 96, 8), "value": (560, 56, 112, 8)}


@pytest.mark.parametrize(
    ("text", "options", "strides"),
    [
        (SPLIT + WITHIN, {"is_causal": True, "window": (1, 1), "softcap": 2, "empty_rows": "nan"}, APART),
        (
            SPLIT + "    memory_layout: {query: strided, key: transposed}\n",
            {},
            APART | {"query": (1152, 288, 96, 16), "key": (480, 48, 96, 8)},
        ),
        (MERGED, {}, TOGETHER),
        (BOTTOM_RIGHT, {}, TOGETHER | {"mask": (15, 15, 5, 1)}),
    ],
)
def test_a_backend_gets_the_options_and_the_inputs_with_the_strides_that_the_case_asks_for(
    load_text: Callable[[str | bytes], list[Case]],
    text: str,
    options: dict[str, Any],
    strides: dict[str, tuple[int, ...]],
) -> None:
    given_arrays: dict[str, Any] = {}

    def attention(**arrays: Any) -> dict[str, Any]:
        given_arrays.update(arrays)
        return {"output": arrays["query"]}

    [case] = load_text(HEAD + text)
    task = task_of(case, convert_inputs(case, make_exact_inputs(case), "float64"))
    assert task.options == options
    backend = SimpleNamespace(from_numpy=lambda array: array, to_numpy=lambda array: array, attention=attention)
    assert isinstance(evaluate_on(backend, task), Computed)
    assert {name: array.strides for name, array in given_arrays.items() if name not in options} == strides


def _array(shape: tuple[int, ...], dtype: type = np.float32, *, repeated: bool = False) -> NDArray[Any]:
    numbers = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    return np.ascontiguousarray(np.broadcast_to(numbers[:, :1], shape)) if repeated else numbers


def _one(array: NDArray[Any], layout: str) -> NDArray[Any]:
    return apply_layout({"query": array}, {"query": layout})["query"]


@settings(max_examples=60)
@given(
    shape=st.tuples(*[st.integers(0, 4)] * 4),
    repeated=st.booleans(),
    layout=st.sampled_from(["strided", "transposed", "broadcast"]),
    dtype=st.sampled_from([np.float64, ml_dtypes.bfloat16]),
)
def test_a_layout_changes_no_number(layout: str, dtype: type, shape: tuple[int, ...], repeated: bool) -> None:
    array = _array(shape, dtype, repeated=repeated)
    before, other = array.copy(), _one(array, layout)
    assert (other.shape, other.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(other.astype(np.float64), array.astype(np.float64))
    np.testing.assert_array_equal(array, before)
    assert array.flags.c_contiguous


@pytest.mark.parametrize(
    ("layout", "array", "strides"),
    [
        ("strided", _array((2, 3, 4, 5)), (480, 160, 40, 8)),
        ("transposed", _array((2, 3, 4, 5)), (240, 20, 60, 4)),
        ("broadcast", _array((2, 3, 4, 5), repeated=True), (80, 0, 20, 4)),
        ("broadcast", _array((3, 5)), (20, 4)),
        ("broadcast", np.ones((2, 3, 4, 5), dtype=np.float32), (0, 0, 0, 4)),  # never the last
    ],
)
def test_strides_are_those_of_the_layout(layout: str, array: NDArray[Any], strides: tuple[int, ...]) -> None:
    other = _one(array, layout)
    assert other.strides == strides
    if layout == "strided":  # what lies between would show
        assert other.base is not None
        assert (other.base.reshape(2, 3, 4, 10)[..., 1::2] == 7).all()


def test_only_what_is_named_is_moved() -> None:
    query, key = _array((1, 2, 3, 4)), _array((1, 2, 3, 4))
    moved = apply_layout({"query": query, "key": key}, {"key": "strided"})
    assert list(moved) == ["query", "key"]
    assert moved["query"] is query
    assert moved["key"] is not key


# Scores that would not fit


LENGTH = 32_768
HOLDS, TILES = Mode("eager", "some_module", "modular"), Mode("flash", "some_module", "in tiles", holds_scores=False)
SMALL = np.broadcast_to(np.float32(0), (2, 1, 16, 8))


def task(operation: str = "attention", dtype: str = "float32", **options: Any) -> Task:
    """One head of 32,768 queries and keys that take no memory."""
    zero = np.broadcast_to(np.zeros((), dtype), (1, 1, LENGTH, 64))
    return Task(operation, options, dict.fromkeys(("query", "key", "value"), zero))


@pytest.mark.parametrize(
    ("asked", "scores", "stages", "size"),
    [
        (task(), 2**30, 3, 4),
        (task(is_causal=True, dtype="float64"), 2**30, 4, 8),
        (task(is_causal=True, softcap=2.0, dtype="float16"), 2**30, 5, 2),
        (task("attention_gradients"), 2**30, 2, 4),  # they return no scores, and hold them
        (Task("multi_head_attention", {"heads": 4}, dict.fromkeys(THREE, SMALL[:, 0])), 2 * 4 * 16 * 16, 3, 4),
        (Task("attention", {}, dict.fromkeys([*THREE, "past_key", "past_value"], SMALL)), 2 * 16 * 32, 3, 4),
    ],
    ids=["three stages", "float64", "float16", "gradients", "heads", "the past"],
)
def test_what_the_stages_alone_take_is_the_limit(asked: Task, scores: int, stages: int, size: int) -> None:
    memory = scores * stages * size
    assert scores_too_large(HOLDS, asked, memory) is None
    found = scores_too_large(HOLDS, asked, memory - 1)
    assert found is not None
    assert found.verdict == "unsupported"
    assert f"would hold {scores:,} scores in {stages} stages" in found.message
    if scores == 2**30:
        assert f"stages, {memory / 2**30:.1f} GiB" in found.message


def test_what_takes_scores_in_tiles_is_asked_and_scores_that_are_given_are_there_already() -> None:
    assert scores_too_large(TILES, task(), 1) is None
    scores = np.broadcast_to(np.float32(0), (1, 1, LENGTH, LENGTH))
    assert scores_too_large(HOLDS, Task("softmax", {}, {"scores": scores}), 1) is None
