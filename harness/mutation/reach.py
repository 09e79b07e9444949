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

from attncheck.execution.operations import Task
from attncheck.execution.worker import Computed, Outcome, evaluate_on
from attncheck.mutation.variant import PerCall, Step, Variant, is_function, recording


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a function of the backend by another one, or from outside, and what it returned."""

    name: str
    caller: str | None
    arrays: tuple[Any, ...]
    given: Mapping[str, Any]
    returned: Any


@dataclass(frozen=True, eq=False)
class ReferenceRun:
    """What the reference makes of a task, with the functions that it calls, in the order in which the calls begin."""

    outcome: Outcome
    calls: tuple[_Call, ...]

    def has_the_bits_of(self, variant: Variant) -> bool:
        """Whether a variant provably returns the same; where it may or may not, False."""
        if variant.steps is None or variant.hidden or not isinstance(self.outcome, Computed):
            return False
        try:
            with np.errstate(all="ignore"):
                return self._gives_the_same(variant, _replaced_by(variant))
        except BaseException:  # whatever a step raises has to be seen where it is raised
            return False

    def _gives_the_same(self, variant: Variant, replaced: _Replaced) -> bool:
        """Whether the steps of a variant return what the reference's do, call by call."""
        made: dict[tuple[str | None, str], Step] = {}
        for call in self.calls:
            if call.name in replaced.per_call:
                steps = variant.steps_of_call(call.name, call.arrays, call.given)
                if not all(map(is_function, steps)):
                    return False
                made |= {(call.name, name): step for name, step in steps.items()}
                continue  # the same function, if all that it calls returns the same
            function = made.get((call.caller, call.name)) or replaced.function_for(call)
            if function is None:
                continue
            if call.caller is None:
                return False  # to compare what it returns is to compute everything
            if not _is_same(function(*call.arrays, **call.given), call.returned):
                return False
        return True


@dataclass(frozen=True, eq=False)
class _Replaced:
    """The functions of a variant that hold replaced steps: by name, and those that one function alone calls.

    The steps of those ``per_call`` are made for each call.
    """

    everywhere: Mapping[str, Step]
    within: Mapping[tuple[str | None, str], Step]
    per_call: frozenset[str]

    def function_for(self, call: _Call) -> Step | None:
        """Return what the variant calls in the place of a call of the reference; None where that is the same."""
        return self.within.get((call.caller, call.name)) or self.everywhere.get(call.name)


@lru_cache(maxsize=4096)
def _replaced_by(variant: Variant) -> _Replaced:
    everywhere: dict[str, Step] = {}
    within: dict[tuple[str | None, str], Step] = {}
    per_call = set()
    for key, step in (variant.steps or {}).items():
        function, _, name = key.rpartition(".")
        if isinstance(step, PerCall):
            per_call.add(name)
        elif function and is_function(name):
            within[function, name] = step
        else:  # of what is no function of the backend, such as its library, the whole function is compared
            everywhere[function or name] = variant.function(function or name)
    return _Replaced(everywhere, within, frozenset(per_call - everywhere.keys()))


class Recorder:
    """The reference, which takes note of its calls; one for all tasks."""

    def __init__(self) -> None:
        self._calls: list[_Call | None] = []
        self._running: list[str] = []
        self._backend = Variant()
        for name, function in recording(self._recorded).items():
            if not name.startswith("_"):
                setattr(self._backend, name, function)

    def run(self, task: Task) -> ReferenceRun:
        """Evaluate a task."""
        self._calls.clear()
        outcome = evaluate_on(self._backend, task)
        calls = tuple(call for call in self._calls if call is not None)
        return ReferenceRun(outcome, calls)

    def _recorded(self, name: str, function: Step) -> Step:
        @wraps(function)
        def run(*arrays: Any, **given: Any) -> Any:
            caller, position = self._running[-1] if self._running else None, len(self._calls)
            self._calls.append(None)
            self._running.append(name)
            try:
                returned = function(*arrays, **given)
            finally:
                self._running.pop()
            self._calls[position] = _Call(name, caller, arrays, given, _kept(returned))
            return returned

        return run


def _kept(returned: Any) -> Any:
    """Keep what was returned from changes: stages are added to what others returned, and a step may write in place."""
    for array in returned.values() if isinstance(returned, dict) else (returned,):
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return dict(returned) if isinstance(returned, dict) else returned


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
