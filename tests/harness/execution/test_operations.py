"""Calls and memory layouts of problems, what evaluations share, and what one call leaves to the next."""

from __future__ import annotations

import gc
import locale
import multiprocessing
import os
import random
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from evaluating import attention_output, attention_problem
from hypothesis import given
from hypothesis import strategies as st
from kernels import kernel
from numpy.typing import NDArray
from tables import tables_beside

import attncheck
from attncheck.asking.accuracy import measure_accuracy
from attncheck.backends import BACKENDS, Mode, numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution import process_state
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.operations import (
    MAX_ELEMENTS_TO_CALL_AGAIN,
    OVERWRITTEN_FAULT,
    UNWRITTEN_FAULT,
    apply_memory_layout,
    run_operation,
    unsupported_conventions,
)
from attncheck.execution.process_state import Misbehaved, ProcessState, forbid_leaked_threads
from attncheck.execution.runner import refuse_too_many_scores
from attncheck.execution.state_probe import StateProbe
from attncheck.execution.user_call import wrap_target
from attncheck.execution.worker import Computed, Outcome, evaluate_on_backend
from attncheck.judging.judge import NEVER_WRITTEN_DIAGNOSIS, NEXT_CALL_DIAGNOSIS
from attncheck.reading.problem import Problem
from attncheck.reading.selection import select_cases
from attncheck.spec import MEMORY_LAYOUTS, OPERATIONS, result_stages

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


def test_the_result_is_the_last_stage_asked_for() -> None:
    for operation, asked, wanted in TABLES["results"]:
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
        assert unsupported_conventions(cast(Backend, backend), operation, given_options) == expected


@pytest.mark.parametrize("name", [name for name, entry in BACKENDS.items() if entry.is_installed])
def test_every_eager_mode_is_asked_for_every_convention(name: str) -> None:
    backend = BACKENDS[name].load()
    operations = [each for each in OPERATIONS.values() if "empty_rows" in each.options]
    assert [unsupported_conventions(backend, each.name, {"empty_rows": "nan"}) for each in operations] == [()] * len(
        operations
    )


def test_what_a_backend_cannot_be_asked_is_unsupported_and_nothing_is_converted() -> None:
    for operation, inputs, options, reason, lacks in TABLES["lacking"]:
        backend = Small()
        with pytest.raises(NotImplementedError) as error:
            run_operation(cast(Backend, backend), operation, inputs, options)
        assert (str(error.value), [*getattr(error.value, "lacks", ())]) == (reason, lacks)
        assert backend.converted == []


# Layouts


def _array(shape: tuple[int, ...], dtype: type = np.float32, *, repeated: bool = False) -> NDArray[Any]:
    numbers = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    return np.ascontiguousarray(np.broadcast_to(numbers[:, :1], shape)) if repeated else numbers


def _one(array: NDArray[Any], layout: str) -> NDArray[Any]:
    moved = apply_memory_layout({"query": array, "key": array}, {"query": layout})
    assert (list(moved), moved["key"] is array) == (["query", "key"], True), "only what is named is moved"
    return moved["query"]


@given(
    shape=st.tuples(*[st.integers(0, 4)] * 4),
    repeated=st.booleans(),
    layout=st.sampled_from([*MEMORY_LAYOUTS]),
    dtype=st.sampled_from([np.float64, ml_dtypes.bfloat16]),
)
def test_a_layout_changes_no_number(layout: str, dtype: type, shape: tuple[int, ...], repeated: bool) -> None:
    array = _array(shape, dtype, repeated=repeated)
    before, other = array.copy(), _one(array, layout)
    assert (other.shape, other.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(other.astype(np.float64), array.astype(np.float64))
    np.testing.assert_array_equal(array, before)
    assert array.flags.c_contiguous


def test_strides_are_those_of_the_layout() -> None:
    for layout, shape, repeated, strides in TABLES["strides"]:
        other = _one(_array(tuple(shape), repeated=repeated), layout)
        assert other.strides == tuple(strides), (layout, shape)
        if layout == "strided":  # what lies between would show
            assert other.base is not None
            assert (other.base.reshape(2, 3, 4, 10)[..., 1::2] == 7).all()
    ones = _one(np.ones((2, 3, 4, 5), dtype=np.float32), "broadcast")
    assert ones.strides == (0, 0, 0, 4), "never the last"


def test_fused_inputs_lie_side_by_side_in_each_token_of_their_length() -> None:
    shapes = {"query": (2, 6, 9, 4), "key": (2, 2, 9, 4), "value": (2, 2, 9, 3), "bias": (2, 1, 5, 7)}
    arrays = {name: _array(shape) for name, shape in shapes.items()}
    moved = apply_memory_layout(arrays, dict.fromkeys(arrays, "fused"))
    token = 4 * (6 * 4 + 2 * 4 + 2 * 3)  # bytes
    strides = {"query": (9 * token, 16, token, 4), "key": (9 * token, 16, token, 4), "value": (9 * token, 12, token, 4)}
    assert {name: moved[name].strides for name in strides} == strides
    assert moved["key"].ctypes.data - moved["query"].ctypes.data == 4 * 6 * 4
    assert not np.shares_memory(moved["bias"], moved["query"])
    for name, array in arrays.items():
        np.testing.assert_array_equal(moved[name], array)


# Scores that would not fit


LENGTH = 32_768
HOLDS, TILES = (
    Mode("eager", "some_module", "modular"),
    Mode("flash", "some_module", "in tiles", stores_all_scores=False),
)
SMALL = np.broadcast_to(np.float32(0), (2, 1, 16, 8))


def problem(operation: str = "attention", dtype: str = "float32", **options: Any) -> Problem:
    """One head of 32,768 queries and keys that take no memory."""
    zero = np.broadcast_to(np.zeros((), dtype), (1, 1, LENGTH, 64))
    return Problem(operation, options, dict.fromkeys(("query", "key", "value"), zero))


@pytest.mark.parametrize(
    ("asked", "scores", "stages", "size"),
    [
        (problem(), 2**30, 3, 4),
        (problem(is_causal=True, softcap=2.0, dtype="float16"), 2**30, 5, 2),
        (problem("attention_gradients"), 2**30, 2, 4),  # they return no scores, and hold them
        (Problem("multi_head_attention", {"heads": 4}, dict.fromkeys(THREE, SMALL[:, 0])), 2 * 4 * 16 * 16, 3, 4),
        (Problem("attention", {}, dict.fromkeys([*THREE, "past_key", "past_value"], SMALL)), 2 * 16 * 32, 3, 4),
    ],
    ids=["three stages", "float16", "gradients", "heads", "the past"],
)
def test_what_the_stages_alone_take_is_the_limit(asked: Problem, scores: int, stages: int, size: int) -> None:
    memory = scores * stages * size
    assert refuse_too_many_scores(HOLDS, asked, memory) is None
    assert refuse_too_many_scores(TILES, asked, 1) is None, "who takes scores in tiles is asked"
    found = refuse_too_many_scores(HOLDS, asked, memory - 1)
    assert found is not None
    assert found.verdict == "unsupported"
    large = f", {memory / 2**30:.1f} GiB" if scores == 2**30 else ""
    assert f"would hold {scores:,} scores in {stages} stages{large}" in found.message


def test_scores_that_are_given_are_there_already() -> None:
    scores = np.broadcast_to(np.float32(0), (1, 1, LENGTH, LENGTH))
    assert refuse_too_many_scores(HOLDS, Problem("softmax", {}, {"scores": scores}), 1) is None


# What evaluations share


@pytest.fixture
def snapshot() -> Iterator[ProcessState]:
    """Take what is now, of this test alone."""
    process_state._make_restorers.cache_clear()
    found = ProcessState.snapshot()
    yield found
    found.restore()
    process_state._make_restorers.cache_clear()


def state() -> dict[str, Any]:
    return {
        "folder": Path.cwd(),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "locale": locale.setlocale(locale.LC_ALL),
        "random": random.getstate(),
        "NumPy's random": str(np.random.get_state()),
        "recursion": sys.getrecursionlimit(),
        "garbage": gc.isenabled(),
        "functions": (np.asarray, np.exp),
    }


def test_what_python_and_numpy_keep_is_put_back(snapshot: ProcessState, tmp_path: Path) -> None:
    before = state()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
    warnings.simplefilter("error")
    warnings.showwarning = print
    locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8")
    random.seed(3)
    np.random.seed(3)
    sys.setrecursionlimit(sys.getrecursionlimit() + 7)
    gc.disable()
    np.asarray = np.exp = None  # type: ignore[assignment]
    changed = {name: value != before[name] for name, value in state().items()}
    (tmp_path / "gone").rmdir()
    assert snapshot.restore()
    assert all(changed.values()), changed
    assert state() == before


# Threads

STARTS = "import threading\ndef begin(target):\n    threading.Thread(target=target, name='mine', daemon=True).start()\n"
WAITS = "def wait(event):\n    event.wait()\n"


@pytest.fixture
def event() -> Iterator[threading.Event]:
    """What threads wait for; they end with the test."""
    event = threading.Event()
    yield event
    event.set()


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    exec(source, vars(made))
    return made


def test_a_thread_that_a_framework_starts_is_its_own_affair_and_any_other_a_fault(
    event: threading.Event, snapshot: ProcessState
) -> None:
    assert not snapshot.has_new_threads()
    for name in ("torch._inductor.async_compile", "triton.runtime", "jax", "keras.src.utils"):
        with forbid_leaked_threads():
            module(name, STARTS).begin(event.wait)
    assert snapshot.has_new_threads()
    # Who starts it decides, not what it runs, nor who calls back.
    compute = module("torch.nn.functional", WAITS).wait
    called_back = module("torch.library", "def call(function, given):\n    function(given)\n").call
    leaks: list[Callable[[], None]] = [
        lambda: module("my_kernel", STARTS).begin(lambda: compute(event)),
        lambda: called_back(module("my_kernel", STARTS).begin, event.wait),
        *(partial(module(name, STARTS).begin, event.wait) for name in ("torch_helpers", "__main__", "torchish")),
    ]
    for leak in leaks:
        with pytest.raises(Misbehaved, match=r"left 1 thread.*: mine"), forbid_leaked_threads():
            leak()


def test_a_call_keeps_nothing_for_the_garbage_collector() -> None:
    def call() -> weakref.ref[Any]:
        held = np.zeros(3)
        with forbid_leaked_threads():
            pass
        return weakref.ref(held)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [ProcessPoolExecutor, multiprocessing.Pool, ThreadPoolExecutor, ThreadPool])
def test_a_pool_is_a_fault_while_it_works(kind: Any, event: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "_WAIT_SECONDS", 0.3)  # for children that are still there
    pools: list[Any] = []

    def call(function: Callable[..., Any], *given: Any, waits: bool) -> None:
        with forbid_leaked_threads():
            pools.append(pool := kind(1))
            futures = hasattr(pool, "submit")
            job = pool.submit(function, *given) if futures else pool.apply_async(function, given)
            if waits:
                (job.result if futures else job.get)()

    try:
        call(abs, -1.0, waits=True)
        works_on = (event.wait,) if kind in (ThreadPoolExecutor, ThreadPool) else (time.sleep, 60.0)
        with pytest.raises(Misbehaved, match=r"left \d+ thread"):
            call(*works_on, waits=False)
    finally:
        event.set()
        for pool in pools:
            for process in {**(getattr(pool, "_processes", None) or {})}.values() if hasattr(pool, "submit") else ():
                process.kill()
            (pool.shutdown if hasattr(pool, "submit") else pool.terminate)()


Given = dict[str, Any]
Memo = dict[Any, Any]
LENGTHS = range(5, 13)
"""Of keys: with so many shapes each thing is changed before a case and behind one."""


def keeping(name: str, *key: str) -> Callable[[Memo, Given], Given]:
    """Take a keyword from the first call of its shapes, and of these other keywords."""

    def change(memo: Memo, given: Given) -> Given:
        kept = (name, given["key"].shape, *(np.asarray(given.get(each, 0)).tobytes() for each in key))
        found = memo.setdefault(kept, given.get(name))
        rest = {each: value for each, value in given.items() if each != name}
        return rest if found is None else {**rest, name: found}

    return change


def mask_batch_kept(memo: Memo, given: Given) -> Given:
    """Read the mask of the first batch entry where the first call of these shapes had one for all."""
    if "mask" not in given:
        return given
    entries = memo.setdefault(given["key"].shape, given["mask"].shape[0])
    return {**given, "mask": given["mask"][:1]} if entries == 1 else given


def scale_ignored(memo: Memo, given: Given) -> Given:
    return {name: value for name, value in given.items() if name != "scale"}


ALL = {"scale": 0.4, "is_causal": True, "window": (3, 0), "softcap": 2.0}
KERNELS: dict[str, tuple[Callable[[Memo, Given], Given], str]] = {
    "scale by shapes": (keeping("scale"), "scale"),
    "causality by shapes": (keeping("is_causal"), "is_causal"),
    "window by shapes": (keeping("window"), "window"),
    "cap by shapes": (keeping("softcap"), "softcap"),
    "mask by shapes": (keeping("mask", "is_causal"), "the mask"),
    "bias by shapes": (keeping("bias"), "the bias"),
    "key lengths by shapes": (keeping("key_lengths"), "the key lengths"),
    "query offsets by shapes": (keeping("query_offsets", "is_causal"), "query_offsets"),
    "the mask's batch axis by shapes": (mask_batch_kept, "the mask's batch axis"),
    "scale by itself": (keeping("scale", "scale"), ""),
    "mask by itself": (keeping("mask", "mask"), ""),
    "nothing": (lambda memo, given: given, ""),
    "a scale that is ignored": (scale_ignored, ""),
}


def problems(option: str) -> Iterator[Problem]:
    """Yield problems with an option or input, all of other shapes."""
    draw = np.random.default_rng(42)
    for keys in LENGTHS:
        arrays = {name: draw.standard_normal((2, 2, keys, 4)) for name in ("query", "key", "value")}
        more = {
            "mask": draw.random((2, 1, keys, keys)) < 0.6,
            "bias": draw.standard_normal((2, 2, keys, keys)),
            "key_lengths": np.array([keys - 1, keys // 2]),
            "query_offsets": np.array([2, 3]),
        }
        named = "is_causal" if option == "query_offsets" else option  # offsets alone say nothing
        options = {name: value for name, value in ALL.items() if name == named}
        yield Problem("attention", options, {**arrays, **{name: each for name, each in more.items() if name == option}})


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_second_of_two_calls_shows_what_the_first_left_behind_in_both_orders(kernel: str) -> None:
    change, expected = KERNELS[kernel]
    memo: Memo = {}
    backend = SimpleNamespace(
        from_numpy=lambda array: array,
        to_numpy=lambda array: array,
        attention=lambda **given: numpy_backend.attention(**change(memo, given)),
    )

    def evaluate(problem: Problem) -> Outcome:
        return evaluate_on_backend(cast(Backend, backend), problem)

    @contextmanager
    def in_fresh_process() -> Iterator[None]:
        kept = dict(memo)
        memo.clear()
        yield
        memo.clear()
        memo.update(kept)

    faults: set[str] = set()
    are_right: set[bool] = set()
    for option in (*ALL, "mask", "bias", "key_lengths", "query_offsets"):
        memo.clear()
        probe = StateProbe(evaluate, in_fresh_process)
        for problem in problems(option):
            found = probe.evaluate_with_changed_calls(problem, lambda problem=problem: evaluate(problem))  # type: ignore[misc]
            assert isinstance(found, Computed)
            if found.faults:
                faults |= set(found.faults.values())
                right = numpy_backend.attention(**problem.inputs, **problem.options)["output"]
                are_right.add(bool(np.array_equal(found.stages["output"], right)))
    said = f"the second of two calls that differ only in {expected} gives the first call's numbers"
    if not expected:
        assert faults == set()
    else:
        assert said in faults
        assert faults <= {said, f"{said.replace(' gives', chr(39) + 's batch axis gives')}"}
        # After a changed call the case itself is wrong; before it, the changed call is.
        assert are_right >= ({True, False} if expected in ALL else {False})


@pytest.mark.skipif(sys.platform != "linux", reason="glibc fills memory")
def test_what_is_left_unwritten_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hollow.py"
    path.write_text(
        "import numpy as np\n"
        "from attncheck.backends import numpy_backend\n"
        "def attention(query, key, value, *, scale=None):\n"
        "    output = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)\n"
        "    output[..., 1:] = numpy_backend.attention(query, key, value, scale=scale)['output'][..., 1:]\n"
        "    return output\n",
        encoding="utf-8",
    )
    found = [
        row
        for row in attncheck.check(f"{path}:attention", cases=["attention/*scale*"]).failures
        if row.comparison == "stage"
    ]
    assert {(row.diagnosis, row.message.partition(":")[0]) for row in found} == {
        (NEVER_WRITTEN_DIAGNOSIS, UNWRITTEN_FAULT)
    }


BUFFERS: dict[tuple[int, ...], NDArray[Any]] = {}


def its_buffer(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    output = numpy_backend.attention(query, key, value)["output"]
    buffer = BUFFERS.setdefault(output.shape, np.empty_like(output))
    buffer[...] = output
    return buffer


def test_a_result_that_the_next_call_overwrites_is_a_fault_of_every_case_and_an_input_is_none() -> None:
    fault = f"{OVERWRITTEN_FAULT}: return a new array"
    for function, expected in (
        (its_buffer, {"output": fault}),
        (lambda query, key, value: numpy_backend.attention(query, key, value)["output"], {}),
        (lambda query, key, value: value, {}),
        (lambda query, key, value: query[..., ::-1], {}),
    ):
        backend = cast(Backend, wrap_target(function, "attention", BACKENDS["numpy"]))
        for keys in (3, 4, 3):  # alone, behind another one, and again
            problem = attention_problem(keys)
            found = evaluate_on_backend(backend, problem, calls_again=True)
            assert isinstance(found, Computed)
            assert found.faults == expected
            if expected:
                assert np.array_equal(found.stages["output"], attention_output(problem)), "the first call's numbers"


def test_a_large_call_is_made_once() -> None:
    backend = cast(Backend, wrap_target(its_buffer, "attention", BACKENDS["numpy"]))
    found = evaluate_on_backend(backend, attention_problem(MAX_ELEMENTS_TO_CALL_AGAIN), calls_again=True)
    assert isinstance(found, Computed)
    assert found.faults == {}


def test_a_check_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "kept.py"
    kept = "np.copyto(kept := BUFFERS.setdefault(output.shape, np.empty_like(output)), output) or kept"
    path.write_text(kernel(kept, before="BUFFERS = {}\n"), encoding="utf-8")
    found = attncheck.check(f"{path}:attention", cases=["attention/logits-of-*"], dtypes=["float32"])
    assert {(row.diagnosis, row.message) for row in found.failures} == {
        (NEXT_CALL_DIAGNOSIS, f"{OVERWRITTEN_FAULT}: return a new array")
    }


KEEPS_THE_FIRST_SCALE = """\
import numpy as np
scales = {}
def attention(query, key, value, *, scale=None):
    first = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.swapaxes(-1, -2) * query.dtype.type(scales.setdefault(key.shape, first))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""


def test_a_check_names_it(tmp_path: Path) -> None:
    path = tmp_path / "kept.py"
    path.write_text(KEEPS_THE_FIRST_SCALE, encoding="utf-8")
    found = attncheck.check(f"{path}:attention", cases=["attention/*scale*"], dtypes=["float32"])
    messages = {row.message.partition(" numbers;")[0] for row in found.failures}
    assert "the second of two calls that differ only in scale gives the first call's" in messages


def test_no_class_holds_where_a_check_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "kept.py"
    path.write_text(KEEPS_THE_FIRST_SCALE, encoding="utf-8")
    (implementation,) = select_implementations(None, [f"{path}:attention"]).implementations
    found = attncheck.check(f"{path}:attention", cases=["attention/*scale*"], dtypes=["float32"])
    spoilt = {row.case for row in found.failures if "differ only in" in row.message}
    measured = measure_accuracy(implementation, select_cases(["attention/*scale*"]).cases, "float32", Limits())
    assert spoilt
    assert spoilt <= set(measured.wrong_anyhow)
