"""Detect state that a function keeps between calls: around a case, call the function with one option or input changed.

A function may cache a compiled program, an expanded mask or a factor of a scale. If the key of the cache omits what two
calls differ in, the second call gets the first call's numbers: a cache keyed by shapes, for instance. So a user's
function is called again around a few small cases, before or after the case, with one thing changed; both orders occur,
on different shapes.

Two calls with different exact answers that return the same bits are suspicious. The second of them is then repeated in
a new process. If it returns other numbers there, the function kept state; otherwise it ignores the changed option.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.operations import SECOND_CALL_FAULT, function_and_keywords, run_operation
from attncheck.execution.worker import Computed, Outcome
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.spec import OPTIONS, result_stages

Array = NDArray[Any]
_MAX_SCORES = 1 << 12
"""Scores of a case around which further calls are made: each costs as much as the case."""
_MAX_PROBES_PER_CHANGE = 2
"""Cases around which one option is changed in one order, for each function of the contract."""
_MAX_NEW_PROCESSES = 4
"""Suspicious results that are repeated; each repetition starts a process."""
_COUNTS_PER_BATCH_ENTRY = ("key_lengths", "query_offsets")
"""Inputs with a whole number per batch entry, which are changed by one."""
_MIN_VISIBLE_DIFFERENCE = 2.0**-6
"""The least difference of two answers, relative to the largest number, that no dtype's rounding hides."""


@dataclass(frozen=True)
class ChangedCall:
    """A call that differs from a case's call in one option or input.

    Attributes:
        change: The name of the option or input.
        problem: The call.
        comes_first: Whether it is made before the case's call.
        gap: The largest difference between the two answers.
    """

    change: str
    problem: Problem
    comes_first: bool
    answer_difference: float


class StateProbe:
    """Makes the changed calls around the cases of one worker."""

    def __init__(
        self, evaluate: Callable[[Problem], Outcome], in_new_process: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Take the two ways to make a call.

        Args:
            evaluate: Makes a call.
            in_new_process: Within this context, ``evaluate`` makes calls in a process that has made no other call.
        """
        self._evaluate, self._in_new_process = evaluate, in_new_process
        self._probe_counts: Counter[tuple[str, str, bool]] = Counter()
        self._new_processes = 0

    def evaluate_with_changed_calls(self, problem: Problem, evaluate: Callable[[], Outcome]) -> Outcome:
        """Evaluate a case and the changed calls around it.

        The outcome has a fault if a call returned another call's numbers.
        """
        changed_calls = list(self._choose_changed_calls(problem))
        before = {call.change: self._evaluate(call.problem) for call in changed_calls if call.comes_first}
        outcome = evaluate()
        for call in changed_calls:
            if isinstance(outcome, Computed):
                changed_outcome = before[call.change] if call.comes_first else self._evaluate(call.problem)
                if self._returns_stale_numbers(problem, outcome, call, changed_outcome):
                    fault = f"{SECOND_CALL_FAULT} that differ only in {call.change} gives the first call's numbers"
                    return replace(outcome, faults={**outcome.faults, _compared_stage(problem): fault})
        return outcome

    def _choose_changed_calls(self, problem: Problem) -> Iterator[ChangedCall]:
        """Yield the calls around a case: each change a few times in each order, if the answers differ."""
        has_query = "query" in problem.inputs
        if not has_query or count_scores(problem.operation, problem.options, problem.inputs) > _MAX_SCORES:
            return
        answer: Array | None = None
        function, _ = function_and_keywords(problem.operation, problem.options)
        shapes = [array.shape for array in problem.inputs.values()]
        for change, changed in changed_problems(problem):
            comes_first = bool(zlib.crc32(f"{change} {shapes}".encode()) & 1)  # the same in every run of the case
            if self._probe_counts[function, change, comes_first] >= _MAX_PROBES_PER_CHANGE:
                continue
            answer = _reference_answer(problem) if answer is None else answer
            gap = _max_difference(answer, _reference_answer(changed))
            if gap > _MIN_VISIBLE_DIFFERENCE * np.nanmax(np.abs(answer), initial=0):
                self._probe_counts[function, change, comes_first] += 1
                yield ChangedCall(change, changed, comes_first, gap)

    def _returns_stale_numbers(
        self, problem: Problem, outcome: Computed, call: ChangedCall, changed_outcome: Outcome
    ) -> bool:
        stage = _compared_stage(problem)
        if not isinstance(changed_outcome, Computed) or self._new_processes >= _MAX_NEW_PROCESSES:
            return False
        first, second = outcome.stages.get(stage), changed_outcome.stages.get(stage)
        if first is None or second is None or first.shape != second.shape or first.tobytes() != second.tobytes():
            return False
        self._new_processes += 1
        with self._in_new_process():
            repeated = self._evaluate(problem if call.comes_first else call.problem)
        return (
            isinstance(repeated, Computed)
            and _max_difference(first, repeated.stages.get(stage)) > call.answer_difference / 8
        )


def changed_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield calls that differ in one option, in the numbers of one input, or in its batch axis, by what is changed.

    Example:
        >>> problem = Problem("attention", {"is_causal": True, "window": (2, None)}, {})
        >>> [changed.options for _, changed in changed_problems(problem)]
        [{'window': (2, None)}, {'is_causal': True, 'window': (3, None)}]
    """
    for name, value in problem.options.items():
        if value is True:
            yield name, problem.with_changes({name: None})
        elif isinstance(value, list | tuple):  # edges of a window, of which some may be open
            wider = type(value)(None if edge is None else edge + 1 for edge in value)
            yield name, problem.with_options(**{name: wider})
        elif name in OPTIONS and OPTIONS[name].type is float:
            yield name, problem.with_options(**{name: 1.5 * value})
    for name, spec in problem.input_specs.items():
        if name not in problem.inputs or not (
            spec.is_broadcastable or spec.name_per_head or name in _COUNTS_PER_BATCH_ENTRY
        ):
            continue
        array, change = problem.inputs[name], spec.plain_name or name
        if spec.is_index:
            yield change, _with_contiguous_input(problem, name, np.maximum(array - 1, -1))
            continue
        if spec.is_count:
            yield change, _with_contiguous_input(problem, name, np.where(array > 1, array - 1, array))
            continue
        yield change, _with_contiguous_input(problem, name, np.roll(array, 1, axis=-1))
        if spec.is_broadcastable and array.ndim == len(spec.axes) and array.shape[0] > 1:
            yield f"{change}'s batch axis", _with_contiguous_input(problem, name, array[:1])


def _with_contiguous_input(problem: Problem, name: str, array: Array) -> Problem:
    return problem.with_inputs(**{name: np.ascontiguousarray(array)})


def _compared_stage(problem: Problem) -> str:
    """Return the stage that is compared: the first of the operation's result."""
    return next(iter(result_stages(problem.operation, problem.options, problem.inputs)), "")


def _reference_answer(problem: Problem) -> Array:
    """Return the answer of the NumPy backend in float64; an empty array if it does not support the call."""
    from attncheck.backends import numpy_backend

    specs = problem.input_specs
    inputs = {
        name: array.astype(np.float64) if specs[name].is_number and not specs[name].is_narrow else array
        for name, array in problem.inputs.items()
    }
    with suppress(Exception), np.errstate(all="ignore"):
        stages = run_operation(numpy_backend, problem.operation, inputs, problem.options)
        return np.asarray(stages[_compared_stage(problem)])
    return np.zeros(0)


def _max_difference(first: Array, second: Array | None) -> float:
    """Return the largest difference of finite numbers; 0 if the shapes differ."""
    if second is None or first.shape != second.shape:
        return 0.0
    with np.errstate(all="ignore"):
        apart = np.abs(first.astype(np.float64) - second.astype(np.float64))
    return float(np.max(apart, where=np.isfinite(apart), initial=0))
