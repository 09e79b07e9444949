"""What evaluations share is put back, and what may outlive a call: threads and pools with nothing to do."""

from __future__ import annotations

import _thread
import gc
import locale
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from processes import wait_until

from attncheck.backends import BACKENDS
from attncheck.execution import process_state
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.operations import Task
from attncheck.execution.process_state import Misbehaved, ProcessState, has_many_mappings, no_leaked_threads
from attncheck.execution.runner import Group, GroupRunner
from attncheck.execution.sessions import Session, SessionStep, run_session
from attncheck.execution.user_call import own_backend
from attncheck.execution.worker import Computed, Failure


@pytest.fixture
def snapshot() -> Iterator[ProcessState]:
    """Take what is now, of this test alone."""
    process_state._restorers.cache_clear()
    found = ProcessState.snapshot()
    yield found
    found.restore()
    process_state._restorers.cache_clear()


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


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_signals_are_handled_as_before_and_timers_are_off(snapshot: ProcessState) -> None:
    before, heard = signal.getsignal(signal.SIGALRM), []
    signal.signal(signal.SIGALRM, lambda *given: heard.append(given))
    signal.setitimer(signal.ITIMER_REAL, 50.0, 50.0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    assert snapshot.restore()
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_output_that_goes_elsewhere_cannot_be_put_back(snapshot: ProcessState, tmp_path: Path) -> None:
    kept = os.dup(2)
    try:
        with (tmp_path / "elsewhere").open("w") as file:
            os.dup2(file.fileno(), 2)
        assert not snapshot.restore()
        os.close(2)
        assert not snapshot.restore()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert snapshot.restore()


def test_threads_that_were_not_there_are_noticed(snapshot: ProcessState) -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    wait: Callable[[], None] = thread.join
    assert not snapshot.has_more_threads()
    thread.start()
    assert snapshot.has_more_threads()
    event.set()
    wait()
    assert not snapshot.has_more_threads()


@pytest.mark.parametrize(
    ("mappings", "held", "many"),
    [(60, 2**31, True), (40, 2**31, False), (60, 2**20, False), (0, 2**40, False)],
    ids=["more than half", "less than half", "a small process", "another system"],
)
def test_a_process_with_many_memory_mappings_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mappings: int, held: int, many: bool
) -> None:
    if mappings:
        (tmp_path / "maps").write_text("7f00-7f01 r--p\n" * mappings)
    (tmp_path / "most").write_text("100\n")
    monkeypatch.setattr(process_state, "_MAPPINGS", tmp_path / "maps")
    monkeypatch.setattr(process_state, "_MAX_MAPPINGS", tmp_path / "most")
    assert has_many_mappings(held) is many


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


def test_a_thread_that_a_framework_starts_is_its_own_affair_and_any_other_a_fault(event: threading.Event) -> None:
    for name in ("torch._inductor.async_compile", "triton.runtime", "jax", "keras.src.utils"):
        with no_leaked_threads():
            module(name, STARTS).begin(event.wait)
    for name in ("my_kernel", "torch_helpers", "__main__", "torchish"):
        with pytest.raises(Misbehaved, match=r"left 1 thread.*: mine"), no_leaked_threads():
            module(name, STARTS).begin(event.wait)


def test_whose_thread_it_is_depends_on_who_starts_it_not_on_what_runs_or_calls_back(event: threading.Event) -> None:
    compute = module("torch.nn.functional", WAITS).wait
    with pytest.raises(Misbehaved, match="mine"), no_leaked_threads():
        module("my_kernel", STARTS).begin(lambda: compute(event))
    called_back = module("torch.library", "def call(function, given):\n    function(given)\n").call
    with pytest.raises(Misbehaved, match="mine"), no_leaked_threads():
        called_back(module("my_kernel", STARTS).begin, event.wait)


@pytest.mark.parametrize("kind", [ProcessPoolExecutor, multiprocessing.Pool, ThreadPoolExecutor, ThreadPool])
def test_a_pool_is_a_fault_while_it_works(kind: Any, event: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "_WAIT", 0.3)  # for children that are still there
    pools: list[Any] = []

    def call(function: Callable[..., Any], *given: Any, waits: bool) -> None:
        with no_leaked_threads():
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


def test_a_pool_that_has_work_waiting_is_a_fault(event: threading.Event) -> None:
    begun = threading.Event()

    def first() -> None:
        begun.set()
        event.wait()

    def submit(pool: ThreadPoolExecutor) -> None:
        pool.submit(first)
        pool.submit(abs, -1.0)
        begun.wait()

    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        with pytest.raises(Misbehaved, match=r"left 1 thread.*pool_0"), no_leaked_threads():
            submit(pool)
        event.set()


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

    with pytest.raises(Misbehaved, match="left 1 thread"), no_leaked_threads():
        begin()
    begun.clear()
    with no_leaked_threads():
        event.set()
        begin()
        ended.wait()
        wait_until(lambda: not any("foreign" in _functions(each) for each in sys._current_frames().values()))


def _functions(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


COMPILED = """
import torch

@torch.compile(dynamic=False)
def attention(query, key, value):
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value

attention.framework = "torch"
"""


@pytest.mark.torch
def test_a_kernel_that_is_compiled_leaves_its_compiler_s_threads(tmp_path: Path) -> None:
    compiled_by_no_run_before = COMPILED.replace("** -0.5", f"** -0.5{time.time_ns()}")  # its headers are
    (tmp_path / "kernel.py").write_text(compiled_by_no_run_before, encoding="utf-8")
    (found,) = select_implementations(None, [f"{tmp_path / 'kernel.py'}:attention"]).implementations
    runner: GroupRunner[str] = GroupRunner(Group(found, ("float32",)), Limits(), tmp_path)
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


# Several calls in one process


Array = NDArray[Any]

SHAPE = (2, 3, 9, 8)

NUMBERS = np.random.default_rng(0)

CALL = Task(
    "attention",
    {},
    {name: NUMBERS.standard_normal(SHAPE).astype(np.float32) for name in ("query", "key", "value")},
    stages=("output",),
)


def mean(query: Array, key: Array, value: Array) -> Array:
    return np.broadcast_to(value.mean(-2, keepdims=True), query.shape).copy()


def run(function: Callable[..., Any], *steps: SessionStep) -> Any:
    return run_session(own_backend(function, "attention", BACKENDS["numpy"]), Session(steps))


def test_steps_are_done_in_order_and_each_as_often_as_it_says() -> None:
    calls = []

    def counted(query: Array, key: Array, value: Array) -> Array:
        calls.append(len(calls))
        return np.full(query.shape, len(calls), query.dtype)

    first, silent, last = run(counted, SessionStep(CALL), SessionStep(CALL, times=5, returns=False), SessionStep(CALL))
    assert len(calls) == 7
    assert [first.outcome.stages["output"].flat[0], last.outcome.stages["output"].flat[0]] == [1, 7]
    assert isinstance(silent.outcome, Computed)
    assert silent.outcome.stages == {}


def test_an_input_that_is_written_is_found_and_spoils_no_other_call() -> None:
    def writing(query: Array, key: Array, value: Array) -> Array:
        value[0, 1, 2, 3] = 7
        return mean(query, key, value)

    first, second = run(writing, SessionStep(CALL), SessionStep(CALL))
    for result in (first, second):
        (changed,) = result.changed
        assert (changed.name, changed.index, changed.after) == ("value", (0, 1, 2, 3), 7)
        assert changed.before == float(CALL.inputs["value"][0, 1, 2, 3])
        assert isinstance(result.outcome, Failure)


def test_a_result_that_a_later_call_changes_or_that_is_memory_of_an_input_is_found() -> None:
    kept: list[Array] = []
    seen: list[int] = []

    def reusing(query: Array, key: Array, value: Array) -> Array:
        out = kept[0] if kept else np.empty_like(query)
        kept[:] = [out]
        out[...] = mean(query, key, value) + len(seen)
        seen.append(1)
        return out

    first, _ = run(reusing, SessionStep(CALL, stays=True), SessionStep(CALL))
    (altered,) = first.altered
    assert altered.name == "output"
    assert altered.after == pytest.approx(altered.before + 1)
    seen.clear()
    kept.clear()
    (alone,) = run(reusing, SessionStep(CALL, stays=True))
    assert (alone.altered, alone.shared) == ((), ())
    (result,) = run(lambda query, key, value: value[..., ::1], SessionStep(CALL))
    assert result.shared == (("output", "value"),)


def test_memory_that_a_call_gets_was_full_of_nan_where_that_is_asked() -> None:
    def careless(query: Array, key: Array, value: Array) -> Array:
        return np.empty_like(query)

    plain, poisoned = run(careless, SessionStep(CALL), SessionStep(CALL, nan_memory=True))
    assert not np.isnan(plain.outcome.stages["output"]).all()
    assert np.isnan(poisoned.outcome.stages["output"]).mean() > 0.5
