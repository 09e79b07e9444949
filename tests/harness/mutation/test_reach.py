"""What is told of a fault from a step alone: that it has the bits of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from attncheck.backends import numpy_backend
from attncheck.dtypes import numpy_dtype
from attncheck.execution.worker import Computed, Outcome, Task, evaluate_on
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.reach import Recorder, ReferenceRun
from attncheck.mutation.variant import PerCall, Steps, Variant


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def task() -> Task:
    rng = np.random.default_rng(11)
    inputs = {name: rng.normal(size=(2, 2, 4, 3)) for name in ("query", "key", "value", "grad_output")}
    return Task("attention_gradients", {"is_causal": True}, inputs)


def _bits(outcome: Outcome) -> Any:
    if not isinstance(outcome, Computed):
        return outcome
    return [(name, str(each.dtype), each.shape, each.tobytes()) for name, each in outcome.stages.items()]


@pytest.mark.parametrize(("dtype", "first"), [("float64", 0), ("float16", 3)])
def test_whoever_is_said_to_have_the_references_bits_has_them(
    dtype: str, first: int, tasks: Mapping[str, Task], recorder: Recorder
) -> None:
    decided = same = 0
    for problem in list(tasks.values())[first::6]:
        stored = numpy_dtype(dtype)
        with np.errstate(over="ignore"):
            arrays = {
                name: each.astype(stored) if each.dtype.kind == "f" else each for name, each in problem.inputs.items()
            }
        asked = Task(problem.operation, problem.options, arrays, problem.memory_layout)
        run = recorder.run(asked)
        right = _bits(evaluate_on(SUBJECTS["reference"].backend, asked))
        assert _bits(run.outcome) == right
        for name, subject in SUBJECTS.items():
            is_same = _bits(evaluate_on(subject.backend, asked)) == right
            is_decided = run.has_the_bits_of(subject.backend)
            assert is_same or not is_decided, name
            decided, same = decided + is_decided, same + is_same
    assert decided > same / 2, "most of what is the same is told from a step alone"


def _decided(run: ReferenceRun, steps: Steps, **given: Any) -> bool:
    return run.has_the_bits_of(Variant(steps, **given))


def test_a_step_that_is_not_called_changes_nothing(task: Task, recorder: Recorder) -> None:
    run = recorder.run(task)

    def fail(*arrays: Any) -> Any:
        raise AssertionError("never called")

    assert _decided(run, {"_cap": fail})
    assert _decided(run, {"dot_scores._cap": fail})
    assert _decided(run, {"_cap.np": None})
    assert _decided(run, {"multi_head_attention": PerCall(fail)})


def test_a_step_is_compared_where_it_is_replaced_alone(task: Task, recorder: Recorder) -> None:
    run = recorder.run(task)

    def doubled(weights: Any, value: Any) -> Any:
        return 2 * (weights @ value)

    assert not _decided(run, {"attention._weighted_sum": doubled})
    assert not _decided(run, {"_weighted_sum": doubled})
    assert _decided(run, {"multi_head_attention._merge_heads": doubled})
    assert _decided(run, {"attention._weighted_sum": np.matmul})


def test_whatever_code_can_tell_apart_is_not_the_same(task: Task, recorder: Recorder) -> None:
    run = recorder.run(task)
    changes: dict[str, Any] = {
        "other numbers": lambda scores: -np.abs(scores) * 0.0,
        "another dtype": lambda scores: scores.astype(np.float32),
        "another shape": lambda scores: scores[..., :1],
        "another layout, in which a product may be added up in another order": np.asfortranarray,
        "another type": list,
        "the last bit": lambda scores: np.nextafter(scores, np.inf),
    }
    for change in changes.values():
        assert not _decided(run, {"_dot": lambda query, key, change=change: change(numpy_backend._dot(query, key))})
    assert _decided(run, {"_dot": lambda query, key: numpy_backend._dot(query, key).copy()})


def test_the_sign_of_a_zero_is_told_and_a_nan_is_the_same_nan(recorder: Recorder) -> None:
    zeros = np.zeros((1, 1, 2, 2))
    run = recorder.run(Task("attention", {}, {"query": zeros, "key": zeros, "value": zeros * np.nan}))
    assert not _decided(run, {"_dot": lambda query, key: -numpy_backend._dot(query, key)})
    assert _decided(run, {"_weighted_sum": lambda weights, value: numpy_backend._weighted_sum(weights, value) + 0.0})


def test_a_step_that_writes_into_what_it_is_handed_spoils_nothing(task: Task, recorder: Recorder) -> None:
    run = recorder.run(task)
    before = _bits(run.outcome)

    def in_place(scores: Any, sinks: Any, empty_rows: Any) -> Any:
        scores[...] = 0
        return numpy_backend._softmax_with_sinks(scores, sinks, empty_rows)

    assert not _decided(run, {"_softmax_with_sinks": in_place})
    assert _bits(run.outcome) == before
    assert isinstance(evaluate_on(Variant({"_softmax_with_sinks": in_place}), task), Computed)


def test_what_cannot_be_told_from_a_step_is_evaluated(task: Task, recorder: Recorder) -> None:
    run = recorder.run(task)

    def fail(query: Any, key: Any) -> Any:
        raise ValueError

    assert not _decided(run, {"_dot": fail}), "it raises, and has to be seen to"
    assert not _decided(run, {"attention_gradients": numpy_backend.attention_gradients}), "it is all there is"
    assert not _decided(run, {}, hidden=frozenset({"grad_key"}))
    kernel = next(each.backend for each in SUBJECTS.values() if each.backend.steps is None)
    assert not run.has_the_bits_of(kernel), "its steps follow from its ends"
    assert not recorder.run(Task("attention", {}, {"query": np.zeros((1, 1, 2, 2))})).has_the_bits_of(Variant())


def test_a_step_may_be_a_function_that_is_made_for_each_call(task: Task, recorder: Recorder) -> None:
    run = recorder.run(task)
    assert _decided(run, {"attention": PerCall(lambda call: {})})
    assert _decided(run, {"attention": PerCall(lambda call: {"_weighted_sum": lambda weights, value: weights @ value})})
    assert not _decided(
        run, {"attention": PerCall(lambda call: {"_weighted_sum": lambda weights, value: call.weights})}
    )
    assert not _decided(run, {"attention": PerCall(lambda call: {"_scale_of": numpy_backend._scale_of})}), "refused"
    assert not _decided(run, {"attention_gradients": PerCall(lambda call: {"np": np})}), "no function of the backend"
    entered = {"attention_gradients": PerCall(lambda call: {"_row_sum": lambda terms: call.step("_row_sum")(terms)})}
    assert _decided(run, entered), "the function that is called from outside is the same if all that it calls is"
    other = {"attention_gradients": PerCall(lambda call: {"_row_sum": lambda terms: terms[..., :1]})}
    assert not _decided(run, other)


def test_steps_that_are_made_for_a_call_are_called_in_the_order_of_the_calls(task: Task, recorder: Recorder) -> None:
    """A step may remember what an earlier one of the same call was handed."""

    def steps(call: Any) -> Steps:
        seen: list[Any] = []

        def softmax(scores: Any, *given: Any) -> Any:
            seen.append(scores)
            return numpy_backend._softmax_with_sinks(scores, *given)

        def weighted_sum(weights: Any, value: Any) -> Any:
            assert len(seen) == 1
            return numpy_backend._softmax_with_sinks(seen[0], None, "zero")["weights"] @ value

        return {"_softmax_with_sinks": softmax, "_weighted_sum": weighted_sum}

    assert _decided(recorder.run(task), {"attention": PerCall(steps)})
