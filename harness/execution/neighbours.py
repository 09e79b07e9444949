"""Calls that differ in one thing alone, one after the other in one process.

What a function keeps between calls (a compiled program, a mask that was laid out, an exponent of a scale) is another
call's where the key leaves out what the two differ in: a memo by shapes alone gives the second call the first one's
numbers. So beside a few small cases a user's function is called again with one thing changed, before or after the case:
both orders come up, on different shapes. Two calls with different answers that give the same bits are suspicious; the
second is then made in a process that did nothing else. Only where that gives other numbers is it the state, and not a
function that ignores what was changed.
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

from attncheck.execution.operations import SECOND_CALL, call_of, run_operation
from attncheck.execution.worker import Computed, Outcome
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import score_elements
from attncheck.spec import OPTIONS, result_stages

Array = NDArray[Any]
_MAX_SCORES = 1 << 12
"""Scores of a case beside which further calls are made."""
_ATTEMPTS = 2
"""Cases beside which a thing is changed in one order, of each function of the contract."""
_MAX_FRESH = 4
"""Suspicions that are looked into, each of which starts a process."""
_OF_ENTRIES = ("key_lengths", "query_offsets")
"""Whole numbers of each batch entry, of which one less is another call."""
_VISIBLE = 2.0**-6
"""What the answers differ by, relative to the largest, where the rounding of no dtype hides it."""


@dataclass(frozen=True)
class Neighbour:
    """The call that differs from a case's in a ``thing``; ``gap`` is how far apart their answers are."""

    thing: str
    problem: Problem
    comes_first: bool
    gap: float


class NeighbourCalls:
    """The neighbours of the cases that one worker is asked for."""

    def __init__(
        self, evaluate: Callable[[Problem], Outcome], in_fresh_process: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """``evaluate`` makes a call; within ``in_fresh_process`` it does so in a process that has done nothing yet."""
        self._evaluate, self._in_fresh_process = evaluate, in_fresh_process
        self._asked: Counter[tuple[str, str, bool]] = Counter()
        self._fresh = 0

    def beside(self, problem: Problem, evaluate: Callable[[], Outcome]) -> Outcome:
        """Evaluate a case between its neighbours; a result tells of the stage in which a call shows another's state."""
        neighbours = list(self._chosen(problem))
        before = {each.thing: self._evaluate(each.problem) for each in neighbours if each.comes_first}
        outcome = evaluate()
        for each in neighbours:
            if isinstance(outcome, Computed):
                other = before[each.thing] if each.comes_first else self._evaluate(each.problem)
                if self._shows_state(problem, outcome, each, other):
                    fault = f"{SECOND_CALL} that differ only in {each.thing} gives the first call's numbers"
                    return replace(outcome, faults={**outcome.faults, _stage_of(problem): fault})
        return outcome

    def _chosen(self, problem: Problem) -> Iterator[Neighbour]:
        """Yield what is called beside a case: each thing a few times in each order, where the answers differ."""
        if (
            "query" not in problem.inputs
            or score_elements(problem.operation, problem.options, problem.inputs) > _MAX_SCORES
        ):
            return
        own: Array | None = None
        function, _ = call_of(problem.operation, problem.options)
        for thing, changed in changed_problems(problem):
            shapes = [array.shape for array in problem.inputs.values()]
            comes_first = bool(zlib.crc32(f"{thing} {shapes}".encode()) & 1)  # the same whenever the case is asked
            if self._asked[function, thing, comes_first] >= _ATTEMPTS:
                continue
            own = _reference(problem) if own is None else own
            gap = _distance(own, _reference(changed))
            if gap > _VISIBLE * np.nanmax(np.abs(own), initial=0):
                self._asked[function, thing, comes_first] += 1
                yield Neighbour(thing, changed, comes_first, gap)

    def _shows_state(self, problem: Problem, outcome: Computed, neighbour: Neighbour, other: Outcome) -> bool:
        stage = _stage_of(problem)
        if not isinstance(other, Computed) or self._fresh >= _MAX_FRESH:
            return False
        given = outcome.stages.get(stage)
        if given is None or not _are_same(given, other.stages.get(stage)):
            return False
        self._fresh += 1
        with self._in_fresh_process():
            alone = self._evaluate(problem if neighbour.comes_first else neighbour.problem)
        return isinstance(alone, Computed) and _distance(given, alone.stages.get(stage)) > neighbour.gap / 8


def changed_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield calls that differ in one option, in the numbers of one input, or in its axis of the batch."""
    for name, value in problem.options.items():
        if value is True:
            yield (
                name,
                replace(problem, options={each: given for each, given in problem.options.items() if each != name}),
            )
        elif isinstance(value, list | tuple):  # edges, of which some may be open
            wider = [None if bound is None else bound + 1 for bound in value]
            yield name, replace(problem, options={**problem.options, name: type(value)(wider)})
        elif name in OPTIONS and OPTIONS[name].type is float:
            yield name, replace(problem, options={**problem.options, name: 1.5 * value})
    for name, spec in problem.specs.items():
        if name not in problem.inputs or not (spec.broadcast or spec.of_head or name in _OF_ENTRIES):
            continue
        array, called = problem.inputs[name], spec.called or name
        if spec.whole:
            yield called, _with(problem, name, np.where(array > 1, array - 1, array))
            continue
        yield called, _with(problem, name, np.roll(array, 1, axis=-1))
        if spec.broadcast and array.ndim == len(spec.axes) and array.shape[0] > 1:
            yield f"{called}'s batch axis", _with(problem, name, array[:1])


def _with(problem: Problem, name: str, array: Array) -> Problem:
    return replace(problem, inputs={**problem.inputs, name: np.ascontiguousarray(array)})


def _stage_of(problem: Problem) -> str:
    """Return the stage that is compared: the first of the operation's result."""
    return next(iter(result_stages(problem.operation, problem.options, problem.inputs)), "")


def _reference(problem: Problem) -> Array:
    """Return what NumPy's own code gives in float64; nothing where it has not what the call needs."""
    from attncheck.backends import numpy_backend

    specs = problem.specs
    inputs = {
        name: array.astype(np.float64) if specs[name].is_number and not specs[name].is_narrow else array
        for name, array in problem.inputs.items()
    }
    with suppress(Exception), np.errstate(all="ignore"):
        stages = run_operation(numpy_backend, problem.operation, inputs, problem.options)
        return np.asarray(stages[_stage_of(problem)])
    return np.zeros(0)


def _are_same(one: Array, other: Array | None) -> bool:
    return other is not None and one.shape == other.shape and one.tobytes() == other.tobytes()


def _distance(one: Array, other: Array | None) -> float:
    """Return the largest difference of finite numbers; 0 where the shapes are not the same."""
    if other is None or one.shape != other.shape:
        return 0.0
    with np.errstate(all="ignore"):
        apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return float(np.max(apart, where=np.isfinite(apart), initial=0))
