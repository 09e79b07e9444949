"""Which variants cannot differ from the reference in a computation: no step of theirs is used, or all give its bits.

A variant is the reference's own code with some steps replaced. So it differs only where the reference calls a function
that holds a replaced step, and only if what that function returns is not the same there, bit by bit. The reference's
calls are recorded once for each computation. A variant's functions are handed what the reference's were handed, which
costs a fraction of the whole; whoever differs anywhere has to compute all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

import numpy as np

from attncheck.execution.worker import Computed, Outcome, Task, evaluate_on
from attncheck.mutation.variant import Step, Variant, is_function, recording


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a function of the backend by another one, and what it returned."""

    name: str
    caller: str
    arrays: tuple[Any, ...]
    given: Mapping[str, Any]
    returned: Any


@dataclass(frozen=True, eq=False)
class ReferenceRun:
    """What the reference makes of a task, with the functions that it calls: inner ones, and ``entered`` from outside.

    ``calls`` are those of inner functions that returned, in the order in which they began.
    """

    outcome: Outcome
    calls: tuple[_Call, ...]
    entered: frozenset[str]

    def has_the_bits_of(self, variant: Variant) -> bool:
        """Whether a variant provably returns the same; where it may or may not, False."""
        if variant.steps is None or variant.hidden or not isinstance(self.outcome, Computed):
            return False
        replaced = _replaced_by(variant)
        if not self.entered.isdisjoint(replaced.everywhere):
            return False  # to compare what they return is to compute everything
        with np.errstate(all="ignore"):
            return all(
                _returns_the_same(function, call) for call in self.calls if (function := replaced.function_for(call))
            )


@dataclass(frozen=True, eq=False)
class _Replaced:
    """The functions of a variant that hold replaced steps, by name, and those that one function alone calls."""

    everywhere: Mapping[str, Step]
    within: Mapping[tuple[str, str], Step]

    def function_for(self, call: _Call) -> Step | None:
        """Return what the variant calls in the place of a call of the reference; None where that is the same."""
        return self.within.get((call.caller, call.name)) or self.everywhere.get(call.name)


@lru_cache(maxsize=4096)
def _replaced_by(variant: Variant) -> _Replaced:
    everywhere, within = {}, {}
    for key, step in (variant.steps or {}).items():
        function, _, name = key.rpartition(".")
        if function and is_function(name):
            within[function, name] = step
        else:  # of what is no function of the backend, such as its library, the whole function is compared
            everywhere[function or name] = variant.function(function or name)
    return _Replaced(everywhere, within)


class Recorder:
    """The reference, which takes note of its calls; one for all tasks."""

    def __init__(self) -> None:
        self._calls: list[_Call | None] = []
        self._entered: set[str] = set()
        self._running: list[str] = []
        self._backend = Variant()
        for name, function in recording(self._recorded).items():
            if not name.startswith("_"):
                setattr(self._backend, name, function)

    def run(self, task: Task) -> ReferenceRun:
        """Evaluate a task."""
        self._calls.clear()
        self._entered.clear()
        outcome = evaluate_on(self._backend, task)
        calls = tuple(call for call in self._calls if call is not None)
        return ReferenceRun(outcome, calls, frozenset(self._entered))

    def _recorded(self, name: str, function: Step) -> Step:
        @wraps(function)
        def run(*arrays: Any, **given: Any) -> Any:
            if not self._running:
                self._entered.add(name)
            caller, position = self._running[-1:], len(self._calls)
            self._calls.append(None)
            self._running.append(name)
            try:
                returned = function(*arrays, **given)
            finally:
                self._running.pop()
            if caller:
                self._calls[position] = _Call(name, caller[0], arrays, given, _kept(returned))
            return returned

        return run


def _kept(returned: Any) -> Any:
    """Keep what was returned from changes: stages are added to what others returned."""
    return dict(returned) if isinstance(returned, dict) else returned


def _returns_the_same(function: Step, call: _Call) -> bool:
    try:
        returned = function(*call.arrays, **call.given)
    except BaseException:  # it has to be seen where it is raised
        return False
    return _is_same(returned, call.returned)


def _is_same(one: Any, other: Any) -> bool:
    """Whether no code can tell two values apart: type, bits, and how arrays lie in memory."""
    if type(one) is not type(other):
        return False
    match one:
        case np.ndarray() | np.generic():
            is_alike = one.dtype == other.dtype and one.shape == other.shape and one.strides == other.strides
            return bool(is_alike and one.tobytes() == other.tobytes())
        case dict():
            return list(one) == list(other) and all(_is_same(each, other[name]) for name, each in one.items())
        case tuple() | list():
            return len(one) == len(other) and all(map(_is_same, one, other))
        case bool() | int() | float() | str():
            return bool(repr(one) == repr(other))
    return one is other
