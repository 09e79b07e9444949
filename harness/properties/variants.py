"""Variants of properties: changes of a problem along named axes, and the further calls that they give.

A property makes further problems from one: it cuts, orders or fills along axes, in all inputs that have them. The
results of their calls are mapped back to the result of the first call.
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
from attncheck.reading.shapes import axis_lengths, find_stage_axes, input_of_optional_gradients
from attncheck.spec import OPERATIONS, Axes, result_stages

ArrayChange = Callable[[Array, int], Array]
"""Changes an array along an axis, which is counted from the end."""


class NotApplicable(Exception):
    """A property does not apply to a problem; the message is the reason."""


def lengths_by_letter(problem: Problem) -> Mapping[str, int]:
    """Return the length of every axis by its letter; the keys of a problem with only scores are Lk, too."""
    shapes = {name: array.shape for name, array in problem.inputs.items()}
    return axis_lengths(problem.operation, problem.options, shapes)


def result_stage_names(problem: Problem) -> tuple[str, ...]:
    """Return the stages that are the result of a problem.

    Example:
        >>> [result_stage_names(Problem(name, {}, {})) for name in ("attention", "softmax")]
        [('output',), ('weights',)]
    """
    return result_stages(problem.operation, problem.options, problem.inputs) or ("masked",)


def call_returning(problem: Problem, stages: Sequence[str] | None = None) -> Problem:
    """Return the call of a problem that returns these stages: by default the result."""
    return replace(problem.as_call(), stages=tuple(stages or result_stage_names(problem)))


def change_along_axes(problem: Problem, letters: Mapping[str, ArrayChange]) -> Problem:
    """Change every input that has one of these axes; an axis of length 1 that is broadcast stays.

    Example:
        >>> arrays = {name: np.arange(3.0).reshape(1, 1, 3, 1) for name in ("query", "key", "value")}
        >>> problem = Problem("attention", {}, {**arrays, "mask": np.array([[[[True, True, False]]]])})
        >>> fewer = change_along_axes(problem, {"Lk": take_indices([2, 0]), "T": take_indices([2, 0])})
        >>> fewer.inputs["key"].ravel().tolist(), fewer.inputs["query"].shape, fewer.inputs["mask"].tolist()
        ([2.0, 0.0], (1, 1, 3, 1), [[[[False, True]]]])
    """
    changed: dict[str, Array] = {}
    for name, array in problem.inputs.items():
        for letter, change in letters.items():
            if (axis := input_axis(problem, name, letter)) is not None:
                changed[name] = np.ascontiguousarray(change(changed.get(name, array), axis))
    return problem.with_changes(**changed)


def input_axis(problem: Problem, name: str, letter: str) -> int | None:
    """Return an input's axis, from the end; None without one, or if it is broadcast."""
    return _axis_from_end(problem, problem.input_specs[name].axes, letter, problem.inputs[name].shape)


def stage_axis(problem: Problem, stage: str, letter: str, shape: tuple[int, ...]) -> int | None:
    """Return a stage's axis, from the end; None without one, or if it is broadcast."""
    return _axis_from_end(problem, result_axes(problem, stage), letter, shape)


def result_axes(problem: Problem, stage: str) -> Axes:
    """Return the axes of a stage: for the gradient of an optional input, those of that input."""
    if name := input_of_optional_gradients(problem.operation).get(stage):
        return problem.input_specs[name].axes
    return find_stage_axes(problem.operation, {*lengths_by_letter(problem), "H*Dv"})[stage]


def _axis_from_end(problem: Problem, axes: Axes, letter: str, shape: tuple[int, ...]) -> int | None:
    if letter not in axes:
        return None
    axis = axes.index(letter) - len(axes)
    if len(shape) < -axis or (shape[axis] == 1 and lengths_by_letter(problem).get(letter, 1) != 1):
        return None
    return axis


def allowed_keys(problem: Problem) -> NDArray[np.bool_]:
    """Return flags of keys that queries may attend to, (B, H, Lq, T), for the problem without a layout.

    Example:
        >>> ones = {name: np.ones((1, 1, 3, 4)) for name in ("query", "key", "value")}
        >>> problem = Problem("attention", {"is_causal": True}, {**ones, "key_lengths": np.array([2])})
        >>> allowed_keys(problem)[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    """
    plain = problem.without_layout().canonical()
    query, key = plain.inputs["query"], plain.inputs["key"]
    shape = (query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
    allowed = np.ones(shape, np.bool_) & plain.inputs.get("mask", True)
    if plain.options.get("is_causal"):
        allowed &= np.arange(shape[-1]) <= np.arange(shape[-2])[:, np.newaxis]
    if "bias" in plain.inputs:
        allowed &= plain.inputs["bias"] != -np.inf
    return allowed


def require_arguments(problem: Problem, *, required: Sequence[str] = (), forbidden: Sequence[str] = ()) -> None:
    """Raise ``NotApplicable`` if a problem lacks an input or option, or has one that does not fit."""
    present = {*problem.inputs, *(name for name, value in problem.options.items() if value not in (None, False))}
    if missing := [name for name in required if name not in present]:
        raise NotApplicable(f"the case has no {missing[0]}")
    if there := [name for name in forbidden if name in present]:
        raise NotApplicable(f"the case has {there[0]}")


def require_operation(problem: Problem, *names: str) -> None:
    """Raise ``NotApplicable`` for any other operation than these."""
    if problem.operation not in names:
        raise NotApplicable(f"it says nothing of {problem.operation}")


def take_indices(indices: Sequence[int] | NDArray[np.intp]) -> ArrayChange:
    """Return a change that takes these indices along an axis, in this order."""
    return lambda array, axis: array.take(np.asarray(indices, np.intp), axis=axis)


def multiply_by_power_of_two(array: Array, factor: float) -> Array:
    """Multiply by a power of two, which rounds only tiny and huge numbers.

    Example:
        >>> multiply_by_power_of_two(np.array([1.5, 6e-8, 3e4], np.float16), 8.0).tolist()
        [12.0, 4.76837158203125e-07, inf]
    """
    if factor == 1:
        return array
    with np.errstate(over="ignore"):
        return (array.astype(np.float64) * factor).astype(array.dtype)


def has_head_axis(problem: Problem) -> bool:
    """Return whether the operation has an axis of heads and no projections."""
    operation = OPERATIONS[problem.operation]
    return not operation.has_projections and any("H" in spec.axes for spec in problem.input_specs.values())


CombineResults = Callable[[str, Sequence[Array]], Array]
"""Maps the results of calls back to the first call's, stage by stage, only by moving elements."""


def single_result(stage: str, results: Sequence[Array]) -> Array:
    """Return the result of the only call, which has the first call's layout."""
    (result,) = results
    return result


@dataclass(frozen=True, eq=False)
class FurtherCall:
    """One further call; ``expected_problem`` is the problem whose exact answer is right, by default ``problem``."""

    description: str
    problem: Problem
    expected_problem: Problem | None = None

    @property
    def reference_problem(self) -> Problem:
        """The problem whose exact answer counts."""
        return self.expected_problem or self.problem


@dataclass(frozen=True, eq=False)
class PropertyVariant:
    """One way to test a property: further calls, and how their results are combined.

    The combined result times ``result_factor``, a power of two, is compared with the result of the first call, in the
    elements that ``compared_elements`` flags by stage (by default all). If it ``merges_parts``, every call has a part
    of the keys, and the outputs are merged by their log-sum-exps. If ``nan_may_spread``, NaN from the further calls is
    a convention.
    ``process_kind`` is the process of the calls, which may have several ``threads``.
    """

    description: str
    calls: tuple[FurtherCall, ...]
    combine: CombineResults = single_result
    result_factor: float = 1.0
    compared_elements: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    stages: tuple[str, ...] | None = None
    merges_parts: bool = False
    nan_may_spread: bool = False
    process_kind: Literal["here", "fresh process", "threads"] = "here"
    threads: int = 1


@dataclass(frozen=True, eq=False)
class ResultPair:
    """Two results of a session, by the numbers of their steps, that have to be the same; ``problem`` has the truth.

    If the first number is None, the first result is that of a new process.
    """

    description: str
    first_step: int | None
    second_step: int
    problem: Problem


@dataclass(frozen=True, eq=False)
class SessionVariant:
    """Calls one after the other in one process, and pairs of their results that have to be the same.

    With a ``problem``, the first step is its call, whose inputs and kept result must not change.
    """

    description: str
    session: Session
    pairs: tuple[ResultPair, ...] = ()
    problem: Problem | None = None


AnyVariant = PropertyVariant | SessionVariant
