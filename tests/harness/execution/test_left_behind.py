"""What may outlive a call: a framework's own threads and pools with nothing to do, and nothing that still computes."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType, ModuleType

import numpy as np
import pytest

from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.left_behind import Misbehaved, nothing_left_behind
from attncheck.execution.limits import Limits
from attncheck.execution.runner import Group, GroupRunner
from attncheck.execution.worker import Computed, Task

STARTS = "import threading\ndef begin(target):\n    threading.Thread(target=target, name='mine', daemon=True).start()\n"
WAITS = "def wait(event):\n    event.wait()\n"


@pytest.fixture
def event() -> Iterator[threading.Event]:
    """What threads wait for; they end with the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def pool(event: threading.Event) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        yield pool
        event.set()


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    exec(source, vars(made))
    return made


@pytest.mark.parametrize("name", ["torch._inductor.async_compile", "triton.runtime", "jax", "keras.src.utils"])
def test_a_thread_that_a_framework_starts_is_its_own_affair(name: str, event: threading.Event) -> None:
    with nothing_left_behind():
        module(name, STARTS).begin(event.wait)


@pytest.mark.parametrize("name", ["my_kernel", "torch_helpers", "__main__", "torchish"])
def test_a_thread_that_anybody_else_starts_is_a_fault(name: str, event: threading.Event) -> None:
    with pytest.raises(Misbehaved, match="left 1 thread"), nothing_left_behind():
        module(name, STARTS).begin(event.wait)


def test_a_framework_s_function_in_one_s_own_thread_is_a_fault(event: threading.Event) -> None:
    compute = module("torch.nn.functional", WAITS).wait
    with pytest.raises(Misbehaved, match="mine"), nothing_left_behind():
        module("my_kernel", STARTS).begin(lambda: compute(event))


def test_what_a_framework_calls_back_starts_threads_of_its_own(event: threading.Event) -> None:
    called_back = module("torch.library", "def call(function, given):\n    function(given)\n").call
    with pytest.raises(Misbehaved, match="mine"), nothing_left_behind():
        called_back(module("my_kernel", STARTS).begin, event.wait)


def test_a_pool_with_nothing_left_to_do_is_none(pool: ThreadPoolExecutor) -> None:
    with nothing_left_behind():
        futures: list[Future[float]] = [pool.submit(abs, -1.0) for _ in range(3)]
        assert [future.result() for future in futures] == [1, 1, 1]


def test_a_pool_that_works_on_is_a_fault(pool: ThreadPoolExecutor, event: threading.Event) -> None:
    def call() -> None:
        with nothing_left_behind():
            pool.submit(abs, -1.0).result()
            pool.submit(event.wait)

    with pytest.raises(Misbehaved, match=r"left 1 thread.*pool_0"):
        call()


def test_a_pool_that_has_work_waiting_is_a_fault(pool: ThreadPoolExecutor, event: threading.Event) -> None:
    begun = threading.Event()

    def first() -> None:
        begun.set()
        event.wait()

    def call() -> None:
        with nothing_left_behind():
            pool.submit(first)
            pool.submit(abs, -1.0)
            begun.wait()

    with pytest.raises(Misbehaved, match="pool_0"):
        call()


def test_a_thread_from_outside_python_counts_while_it_runs_python(event: threading.Event) -> None:
    begun, ended = threading.Event(), threading.Event()

    def foreign() -> None:
        threading.current_thread()  # from now on it is listed
        begun.set()
        event.wait()
        ended.set()

    def begin() -> None:
        _thread.start_new_thread(foreign, ())
        begun.wait()

    with pytest.raises(Misbehaved, match="left 1 thread"), nothing_left_behind():
        begin()
    begun.clear()
    with nothing_left_behind():
        event.set()
        begin()
        ended.wait()
        _until_gone("foreign")


def _until_gone(name: str) -> None:
    """Wait until no thread runs a function of this name."""
    while any(name in _functions(frame) for frame in sys._current_frames().values()):
        pass


def _functions(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def test_starting_threads_is_as_it_was_afterwards() -> None:
    start = threading.Thread.start
    with nothing_left_behind():
        assert threading.Thread.start is not start
    assert threading.Thread.start is start


COMPILED = """
import torch

@torch.compile(dynamic=False)
def attention(query, key, value):
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value

attention.framework = "torch"
"""


@pytest.mark.torch
def test_a_kernel_that_is_compiled_leaves_its_compiler_s_threads(
    tmp_path: Path,
) -> None:
    (tmp_path / "kernel.py").write_text(COMPILED, encoding="utf-8")
    (found,) = select_implementations(None, [f"{tmp_path / 'kernel.py'}:attention"]).implementations
    runner: GroupRunner[str] = GroupRunner(Group(found, ("float32",)), Limits(compilation_cache=False), tmp_path)
    try:
        outcome = runner.evaluate(Task("attention", {}, _inputs()))
    finally:
        runner.close()
    assert isinstance(outcome, Computed), outcome
    assert outcome.stages["output"].shape == (1, 2, 3, 6)


def _inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {"query": (1, 2, 3, 5), "key": (1, 2, 4, 5), "value": (1, 2, 4, 6)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
