"""A problem as a property sees it, whose axes have names, and what a property asks of it.

A property makes further problems of one: it cuts, orders or fills along axes, whatever inputs have them. Their calls
bring results that are mapped back to what the first call gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.sessions import Session
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import axis_lengths, optional_gradients, stage_axes
from attncheck.spec import OPERATIONS, Axes, result_stages

Change = Callable[[Array, int], Array]
"""What is done to an array along an axis, which is counted from the end."""


class SaysNothing(Exception):
    """A property says nothing of a problem; says why."""


def lengths_of(problem: Problem) -> Mapping[str, int]:
    """Return the length of every axis by its letter; the keys of a problem that has only scores are Lk, too."""
    shapes = {name: array.shape for name, array in problem.inputs.items()}
    return axis_lengths(problem.operation, problem.options, shapes)


def result_of(problem: Problem) -> tuple[str, ...]:
    """Return the stages that are the result of a problem."""
    return result_stages(problem.operation, problem.options, problem.inputs) or ("masked",)


def call_for(problem: Problem, stages: Sequence[str] | None = None) -> Problem:
    """Return the call of a problem that returns these stages: by default the result."""
    return replace(problem.as_call(), stages=tuple(stages or result_of(problem)))


def change_along(problem: Problem, letters: Mapping[str, Change]) -> Problem:
    """Change every input that has one of these axes; an axis of length 1 that stands for all stays."""
    changed: dict[str, Array] = {}
    for name, array in problem.inputs.items():
        for letter, change in letters.items():
            if (axis := axis_of_input(problem, name, letter)) is not None:
                changed[name] = np.ascontiguousarray(change(changed.get(name, array), axis))
    return problem.but(**changed)


def axis_of_input(problem: Problem, name: str, letter: str) -> int | None:
    """Return an input's axis, from the end; None without one, or where one of length 1 stands for all."""
    return _axis(problem, problem.specs[name].axes, letter, problem.inputs[name].shape)


def axis_of_stage(problem: Problem, stage: str, letter: str, shape: tuple[int, ...]) -> int | None:
    """Return a stage's axis, from the end; None without one, or where one of length 1 stands for all."""
    return _axis(problem, axes_of_stage(problem, stage), letter, shape)


def axes_of_stage(problem: Problem, stage: str) -> Axes:
    """Return the axes of a stage: of the gradient of what may be left out, those of that input."""
    if name := optional_gradients(problem.operation).get(stage):
        return problem.specs[name].axes
    return stage_axes(problem.operation, {*lengths_of(problem), "H*Dv"})[stage]


def _axis(problem: Problem, axes: Axes, letter: str, shape: tuple[int, ...]) -> int | None:
    if letter not in axes:
        return None
    axis = axes.index(letter) - len(axes)
    if len(shape) < -axis or (shape[axis] == 1 and lengths_of(problem).get(letter, 1) != 1):
        return None
    return axis


def allowed_keys(problem: Problem) -> NDArray[np.bool_]:
    """Return which query may attend to which key, (B, H, Lq, T), of what the problem is once it is laid out."""
    plain = problem.without_layout().canonical()
    query, key = plain.inputs["query"], plain.inputs["key"]
    shape = (query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
    allowed = np.ones(shape, np.bool_) & plain.inputs.get("mask", True)
    if plain.options.get("is_causal"):
        allowed &= np.arange(shape[-1]) <= np.arange(shape[-2])[:, np.newaxis]
    if "bias" in plain.inputs:
        allowed &= plain.inputs["bias"] != -np.inf
    return allowed


def require(problem: Problem, *, has: Sequence[str] = (), lacks: Sequence[str] = ()) -> None:
    """Raise ``SaysNothing`` where a problem lacks an input or option that is needed, or has one that does not fit."""
    given = {*problem.inputs, *(name for name, value in problem.options.items() if value not in (None, False))}
    if missing := [name for name in has if name not in given]:
        raise SaysNothing(f"the case has no {missing[0]}")
    if there := [name for name in lacks if name in given]:
        raise SaysNothing(f"the case has {there[0]}")


def require_operation(problem: Problem, *names: str) -> None:
    """Raise ``SaysNothing`` for any other operation than these."""
    if problem.operation not in names:
        raise SaysNothing(f"it says nothing of {problem.operation}")


def taken(indices: Sequence[int] | NDArray[np.intp]) -> Change:
    """Return what takes these along an axis, in this order."""
    return lambda array, axis: array.take(np.asarray(indices, np.intp), axis=axis)


def times(array: Array, factor: float) -> Array:
    """Multiply by a power of two, which rounds no number that is neither tiny nor huge."""
    if factor == 1:
        return array
    with np.errstate(over="ignore"):
        return (array.astype(np.float64) * factor).astype(array.dtype)


def per_head(problem: Problem) -> bool:
    """Tell if the operation has an axis of heads and no projections."""
    own = OPERATIONS[problem.operation]
    return not own.has_projections and any("H" in spec.axes for spec in problem.specs.values())


Combine = Callable[[str, Sequence[Array]], Array]
"""Lays the results of calls out as the first call's, stage by stage: it moves elements, and computes nothing."""


def only_one(stage: str, results: Sequence[Array]) -> Array:
    """Map the result of the only call: it lies as the first call's does."""
    (result,) = results
    return result


@dataclass(frozen=True, eq=False)
class FurtherCall:
    """One further call; ``truth`` is the problem whose exact answer it has to give, by default its own."""

    what: str
    problem: Problem
    truth: Problem | None = None

    @property
    def exact_problem(self) -> Problem:
        """The problem whose exact answer counts."""
        return self.truth or self.problem


@dataclass(frozen=True, eq=False)
class PropertyVariant:
    """One way in which a property is asked: calls, and what becomes of their results.

    What is combined times ``factor``, a power of two, is compared with what the first call gave, where ``compared``
    says so. Where it ``is_merged``, every call is of a part of the keys, and the outputs are merged by their log-sum-
    exps. Where ``nan_may_spread``, NaN from the further calls is a convention. The calls are made ``where`` it says,
    with so many ``threads``.
    """

    what: str
    calls: tuple[FurtherCall, ...]
    combine: Combine = only_one
    factor: float = 1.0
    compared: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    stages: tuple[str, ...] | None = None
    is_merged: bool = False
    nan_may_spread: bool = False
    where: Literal["here", "fresh process", "threads"] = "here"
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Pair:
    """Two results of a session, by the numbers of their steps, that are to be the same; the truth is the problem's.

    Without a number, the first result is that of a process that has done nothing else.
    """

    what: str
    one: int | None
    other: int
    problem: Problem


@dataclass(frozen=True, eq=False)
class SessionVariant:
    """Calls one after the other in one process, and which of their results are to be the same.

    Of a ``problem``, the first step is its call, whose inputs, and whose kept result, may not change.
    """

    what: str
    session: Session
    pairs: tuple[Pair, ...] = ()
    problem: Problem | None = None


AnyVariant = PropertyVariant | SessionVariant
