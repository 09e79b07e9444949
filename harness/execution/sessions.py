"""Several calls in one process, one after the other, and checks around them.

An evaluation only has the result of one call. Changes to inputs or to earlier results, and reads of memory that other
calls used, are visible only inside the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import Backend
from attncheck.execution.process_state import THIS_PROCESS, ProcessState, disable_memory_filling
from attncheck.execution.signatures import CONTRACT_FUNCTIONS
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on_backend, get_started_backend
from attncheck.reading.problem import Problem

Array = NDArray[Any]
_NAN_BLOCKS = 40
"""Blocks of each size that are filled with NaN and freed: an allocator may hand out the last, or any."""
_FILL_ROUNDS = 2
"""What the first round frees can join stale memory beside it; the second fills what is handed out then."""
_FENCE_NUMBERS = 24
"""Numbers of the blocks between them, which are kept: freed neighbours would become one larger block."""
_OTHER_WORK_SIZE = 96
"""Rows and columns of the product that is computed as other work, and elements of the blocks that are freed."""


@dataclass(frozen=True)
class SessionStep:
    """One call of a session, made so many ``times``; the last result counts.

    If it ``returns_result``, the worker sends the result back. If it ``rechecks_result``, the worker compares the
    result again after all steps. Before each call, the worker ``does_other_work_before``, or
    ``frees_nan_memory_before``: it frees memory as large as each stage, full of NaN.
    """

    problem: Problem
    times: int = 1
    returns_result: bool = True
    rechecks_result: bool = False
    does_other_work_before: bool = False
    frees_nan_memory_before: bool = False


@dataclass(frozen=True)
class Session:
    """Steps that are done in one process, one after the other."""

    steps: tuple[SessionStep, ...]

    @property
    def call_count(self) -> int:
        """Return how many calls it makes."""
        return sum(step.times for step in self.steps)


@dataclass(frozen=True)
class ChangedElement:
    """An array that is not as it was: its name, the first element that differs, and its bits as numbers."""

    name: str
    index: tuple[int, ...]
    before: float
    after: float


@dataclass(frozen=True)
class StepResult:
    """The result of a step: its outcome, inputs that the call changed, and what became of its result.

    ``altered_stages`` differ after all steps. ``stages_sharing_inputs`` are pairs of a stage and an input with common
    memory.
    """

    outcome: Outcome
    changed_inputs: tuple[ChangedElement, ...] = ()
    altered_stages: tuple[ChangedElement, ...] = ()
    stages_sharing_inputs: tuple[tuple[str, str], ...] = ()


class _RecordingBackend:
    """A backend that remembers the tensors that it made (``inputs``) and the tensors that were ``returned`` to it.

    ``before`` is called directly before the judged function, after all work of the harness.
    """

    def __init__(self, backend: Backend, before: Callable[[], None] | None) -> None:
        self._backend, self._before = backend, before
        self.inputs: list[Any] = []
        self.returned: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        if self._before is None or name not in CONTRACT_FUNCTIONS:
            return attribute
        if (user_function := getattr(attribute, "user_function", None)) is None:
            return _with_call_before(self._before, attribute)
        function = _with_call_before(self._before, user_function)
        call = partial(attribute.func, *(function if value is user_function else value for value in attribute.args))
        call.user_function = user_function  # type: ignore[attr-defined] # as ``user_call`` has it
        return call

    def from_numpy(self, array: Array) -> Any:
        tensor = self._backend.from_numpy(array)
        self.inputs.append(tensor)
        return tensor

    def to_numpy(self, tensor: Any) -> Array:
        self.returned.append(tensor)
        return self._backend.to_numpy(tensor)


def _with_call_before(before: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``before`` first."""

    @wraps(function)
    def called(*positional: Any, **named: Any) -> Any:
        before()
        return function(*positional, **named)

    return called


def run_session(backend: Backend, session: Session) -> tuple[StepResult, ...]:
    """Run the steps of a session; afterwards, check the results that stay."""
    results = []
    with disable_memory_filling():
        done = [_run_step(backend, step) for step in session.steps]
    for result, tensors, before in done:
        altered = (
            first_changed_element(name, before[name], backend.to_numpy(tensor)) for name, tensor in tensors.items()
        )
        results.append(replace(result, altered_stages=tuple(filter(None, altered))))
    return tuple(results)


@dataclass(frozen=True)
class EvaluatedSession:
    """Results of a session's steps, how many bytes the worker holds after it, and whether it is fit for more."""

    results: tuple[StepResult, ...]
    held_bytes: int
    is_process_reusable: bool


def evaluate_session(implementation: str, session: Session, log: str) -> EvaluatedSession:
    """Run a session on a started implementation, and check the state of the process afterwards."""
    backend, surroundings = get_started_backend(implementation, log), ProcessState.snapshot()
    results = run_session(backend, session)
    failed = any(isinstance(result.outcome, Failure) for result in results)
    is_fit = surroundings.restore() and not (failed and surroundings.has_new_threads())
    return EvaluatedSession(results, int(THIS_PROCESS.memory_info().rss), is_fit)


def _run_step(backend: Backend, step: SessionStep) -> tuple[StepResult, Mapping[str, Any], Mapping[str, Array]]:
    """Return the result of a step and, if it stays, the returned tensors and their numbers."""
    fences: list[Array] = []

    def free_nan_memory() -> None:
        fences.extend(_fill_freed_memory_with_nan(backend, step.problem))

    for _ in range(step.times):
        if (
            step.does_other_work_before
        ):  # compute and free something else, as a model does between two calls of attention
            square = np.linspace(-1, 1, _OTHER_WORK_SIZE**2).reshape(_OTHER_WORK_SIZE, _OTHER_WORK_SIZE)
            blocks = [np.full(_OTHER_WORK_SIZE * number, 0.5) for number in range(1, 8)]
            assert np.isfinite(square @ square).all()
            del blocks
        watched = _RecordingBackend(backend, free_nan_memory if step.frees_nan_memory_before else None)
        # Inputs of its own: a call that writes into them spoils no other.
        copies = {name: array.copy() for name, array in step.problem.inputs.items()}
        outcome = evaluate_on_backend(watched, replace(step.problem, inputs=copies))
    fences.clear()
    pairs = zip(step.problem.inputs.items(), watched.inputs, strict=False)
    changed = tuple(
        filter(None, (first_changed_element(name, array, backend.to_numpy(tensor)) for (name, array), tensor in pairs))
    )
    if not isinstance(outcome, Computed):
        return StepResult(outcome, changed), {}, {}
    tensors = _tensors_by_stage(backend, outcome.stages, watched.returned)
    shared = tuple(_stages_sharing_inputs(backend, step.problem, watched.inputs, tensors))
    stages = {name: np.array(array) for name, array in outcome.stages.items()}
    result = StepResult(
        replace(outcome, stages=stages if step.returns_result else {}), changed, stages_sharing_inputs=shared
    )
    return result, tensors if step.rechecks_result else {}, stages


def _fill_freed_memory_with_nan(backend: Backend, problem: Problem) -> list[Array]:
    """Fill memory as large as what the call may make with NaN, by NumPy and by the framework, and free it.

    What lies between the freed blocks is returned.
    """
    queries = [array for array in problem.inputs.values() if array.dtype.kind not in "biu"]
    sizes = {array.size for array in queries}
    if {"query", "key"} <= problem.inputs.keys():
        query, key = problem.inputs["query"], problem.inputs["key"]
        sizes.add(query.size // max(query.shape[-1], 1) * key.shape[-2])  # the scores
    dtypes: set[np.dtype[Any]] = {array.dtype for array in queries} | {np.dtype(np.float32), np.dtype(np.float64)}
    fences: list[Array] = []
    for _ in range(_FILL_ROUNDS):
        blocks: list[Any] = []
        for size in sorted(sizes):
            for dtype in sorted(dtypes, key=str):
                for _ in range(_NAN_BLOCKS):
                    array = np.full(size, np.nan, dtype)
                    blocks.append(array)
                    fences.append(np.ones(_FENCE_NUMBERS))
                    with suppress(Exception):  # a dtype that the framework has not, or not without being asked
                        tensor = backend.from_numpy(array)
                        blocks.append(tensor + tensor)
        blocks.clear()
    return fences


def first_changed_element(name: str, before: Array, after: Array) -> ChangedElement | None:
    """Return the first element whose bits differ; None if there is none."""
    after = np.asarray(after)
    if before.shape != after.shape:
        return ChangedElement(name, (), float("nan"), float("nan"))
    differs = view_as_integers(before) != view_as_integers(after)
    if not differs.any():
        return None
    index = tuple(int(axis) for axis in np.unravel_index(int(np.argmax(differs)), differs.shape))
    return ChangedElement(name, index, float(before[index]), float(after[index]))


def view_as_integers(array: Array) -> Array:
    """Return an array's bits as whole numbers of the same shape."""
    whole = np.ascontiguousarray(array).reshape(array.shape)
    return whole.view(f"u{whole.dtype.itemsize}")


def _tensors_by_stage(backend: Backend, stages: Mapping[str, Array], returned: Sequence[Any]) -> dict[str, Any]:
    """Return the returned tensor of each stage, which has the same numbers."""
    named: dict[str, Any] = {}
    for name, array in stages.items():
        for tensor in returned:
            candidate = np.asarray(backend.to_numpy(tensor))
            is_alike = candidate.shape == array.shape and candidate.dtype == array.dtype
            if is_alike and np.array_equal(view_as_integers(candidate), view_as_integers(array)):
                named.setdefault(name, tensor)
    return named


def _stages_sharing_inputs(
    backend: Backend, problem: Problem, input_tensors: Sequence[Any], tensors: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for stage, tensor in tensors.items():
        output = np.asarray(backend.to_numpy(tensor))
        for name, input_tensor in zip(problem.inputs, input_tensors, strict=False):
            if output.size and np.shares_memory(output, np.asarray(backend.to_numpy(input_tensor))):
                yield stage, name
