"""Several calls in one process: what is looked at around them is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS, numpy_backend
from attncheck.execution.sessions import Session, Step, run_session
from attncheck.execution.user_call import own_backend
from attncheck.execution.worker import Computed, Failure, Task

Array = NDArray[Any]
SHAPE = (2, 3, 9, 8)
NUMBERS = np.random.default_rng(0)
TASK = Task(
    "attention",
    {},
    {name: NUMBERS.standard_normal(SHAPE).astype(np.float32) for name in ("query", "key", "value")},
    stages=("output",),
)


def mean(query: Array, key: Array, value: Array) -> Array:
    return np.broadcast_to(value.mean(-2, keepdims=True), query.shape).copy()


def run(function: Callable[..., Any], *steps: Step) -> Any:
    return run_session(own_backend(function, "attention", BACKENDS["numpy"]), Session(steps))


def test_steps_are_done_in_order_and_each_as_often_as_it_says() -> None:
    calls = []

    def counted(query: Array, key: Array, value: Array) -> Array:
        calls.append(len(calls))
        return np.full(query.shape, len(calls), query.dtype)

    first, silent, last = run(counted, Step(TASK), Step(TASK, times=5, returns=False), Step(TASK))
    assert len(calls) == 7
    assert [first.outcome.stages["output"].flat[0], last.outcome.stages["output"].flat[0]] == [1, 7]
    assert isinstance(silent.outcome, Computed)
    assert silent.outcome.stages == {}


def test_an_input_that_is_written_is_found_and_spoils_no_other_call() -> None:
    def writing(query: Array, key: Array, value: Array) -> Array:
        value[0, 1, 2, 3] = 7
        return mean(query, key, value)

    first, second = run(writing, Step(TASK), Step(TASK))
    for result in (first, second):
        (changed,) = result.changed
        assert (changed.name, changed.index, changed.after) == ("value", (0, 1, 2, 3), 7)
        assert changed.before == float(TASK.inputs["value"][0, 1, 2, 3])
        assert isinstance(result.outcome, Failure)


def test_a_result_that_a_later_call_changes_is_found() -> None:
    kept: list[Array] = []

    def reusing(query: Array, key: Array, value: Array) -> Array:
        out = kept[0] if kept else np.empty_like(query)
        kept[:] = [out]
        out[...] = mean(query, key, value) + len(seen)
        seen.append(1)
        return out

    seen: list[int] = []
    first, _ = run(reusing, Step(TASK, stays=True), Step(TASK))
    (altered,) = first.altered
    assert altered.name == "output"
    assert altered.after == pytest.approx(altered.before + 1)
    seen.clear()
    kept.clear()
    (alone,) = run(reusing, Step(TASK, stays=True))
    assert alone.altered == ()


def test_a_result_that_is_memory_of_an_input_is_found() -> None:
    (result,) = run(lambda query, key, value: value[..., ::1], Step(TASK))
    assert result.shared == (("output", "value"),)
    (own,) = run(mean, Step(TASK))
    assert own.shared == ()


def test_memory_that_a_call_gets_was_full_of_nan_where_that_is_asked() -> None:
    def careless(query: Array, key: Array, value: Array) -> Array:
        return np.empty_like(query)

    plain, poisoned = run(careless, Step(TASK), Step(TASK, nan_memory=True))
    assert not np.isnan(plain.outcome.stages["output"]).all()
    assert np.isnan(poisoned.outcome.stages["output"]).mean() > 0.5


def test_a_backend_of_the_table_is_asked_alike() -> None:
    first, second = run_session(numpy_backend, Session((Step(TASK, stays=True), Step(TASK, nan_memory=True))))
    assert first.changed == first.altered == first.shared == ()
    np.testing.assert_array_equal(first.outcome.stages["output"], second.outcome.stages["output"])
