"""An operation called on a backend: inputs laid out in memory, the function, its parameters, and stages cut back.

Inputs are laid out as a case asks, because now and then a kernel reads a strided or stride-0 input wrongly. What was
added to pad a call is dropped from the stages that come back. Scripts that repeat a failure carry both along.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import Backend, Stages, UnsupportedError
from attncheck.execution.call_server import FREE_BYTE
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import find_repeated_axes
from attncheck.spec import CONVENTIONS, OPERATIONS, OPTIONS, score_spec


def run_operation(
    backend: Backend, operation: str, inputs: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
) -> Stages:
    """Call the backend's function for an operation, inputs turned into the framework's own arrays.

    Conventions that the function does not take are left out (``ignored_conventions``). Raises ``UnsupportedError`` if
    the backend has no such function, or the function has not every other parameter that the case needs.
    """
    name, keywords = function_and_keywords(operation, options)
    function = getattr(backend, name, None)
    if function is None:
        raise UnsupportedError.of_function(name)
    left_out = unsupported_conventions(backend, operation, options)
    keywords = {keyword: value for keyword, value in keywords.items() if keyword not in left_out}
    require_parameters(function_parameters(function), {**inputs, **keywords})
    tensors = {name: backend.from_numpy(array) for name, array in inputs.items()}
    stages: Stages = function(**tensors, **keywords)
    return stages


@dataclass(frozen=True)
class Parameters:
    """The keywords that a function takes: the ``names`` of its parameters, or any, where it ``takes_all``."""

    names: frozenset[str]
    takes_all: bool = False

    def accepted_names(self, names: Iterable[str]) -> frozenset[str]:
        """Return which of these names there is a parameter for."""
        return frozenset(name for name in names if self.takes_all or name in self.names)

    def missing_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return, in order, the names that there is no parameter for."""
        return () if self.takes_all else tuple(name for name in names if name not in self.names)


def unsupported_conventions(backend: Backend, operation: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the conventions among the options that the backend's function has no parameter for."""
    if CONVENTIONS.isdisjoint(options):
        return ()
    name, _ = function_and_keywords(operation, options)
    function = getattr(backend, name, None)
    if function is None:
        return ()
    # Somebody's own function is called by a wrapper that takes anything.
    return missing_conventions(function_parameters(getattr(function, "user_function", function)), options)


def missing_conventions(parameters: Parameters, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the conventions among the options that there is no parameter for."""
    return parameters.missing_names(sorted(CONVENTIONS & options.keys()))


def require_parameters(parameters: Parameters, asked: Iterable[str]) -> None:
    """Raise ``UnsupportedError`` for what there is no parameter for: a capability is a parameter."""
    if missing := parameters.missing_names(asked):
        raise UnsupportedError(f"takes no {', '.join(missing)}", missing)


def function_parameters(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a function: of what it wraps, which hundreds of variants have in common."""
    function = getattr(function, "__func__", function)
    return _parameters_of_wrapped(inspect.unwrap(function, stop=lambda wrapped: hasattr(wrapped, "__signature__")))


@lru_cache(maxsize=256)
def _parameters_of_wrapped(function: Callable[..., Any]) -> Parameters:
    kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    return Parameters(frozenset(kinds), inspect.Parameter.VAR_KEYWORD in kinds.values())


def function_and_keywords(operation: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the contract's function of an operation, and the keywords that it is called with besides inputs."""
    kinds = {name: OPTIONS[name].type for name in options if name != "score"}
    # A file may say 1 where a number with a point is meant: kernels are given what their users give.
    keywords = {name: float(options[name]) if kind is float else options[name] for name, kind in kinds.items()}
    assert operation in OPERATIONS, f"an operation that no backend has: {operation}"
    if not OPERATIONS[operation].has_score_option:
        return OPERATIONS[operation].function_name, keywords
    score = score_spec(options)
    return score.function_name, keywords if score.fixed_scale is None else {"scale": score.fixed_scale, **keywords}


Array = NDArray[Any]


def apply_memory_layout(inputs: Mapping[str, Array], memory_layout: Mapping[str, str]) -> dict[str, Array]:
    """Return the same numbers, each input that ``memory_layout`` names as a view, as ``MEMORY_LAYOUTS`` says.

    Memory next to the numbers is 7, true for a mask, so that a kernel that ignores strides returns wrong numbers.
    """
    alone = {name: kind for name, kind in memory_layout.items() if kind != "fused" and name in inputs}
    fused = {name: inputs[name] for name, kind in memory_layout.items() if kind == "fused" and name in inputs}
    return {
        **inputs,
        **{name: _LAYOUTS[kind](inputs[name]) for name, kind in alone.items()},
        **_as_slices_of_one_array(fused),
    }


def _as_slices_of_one_array(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Cut inputs (B, H, L, D) of one batch, length and dtype out of one array (B, L, all their heads side by side)."""
    views: dict[str, Array] = {}
    for place in {(array.shape[0], array.shape[2], array.dtype) for array in inputs.values()}:
        parts = {name: part for name, part in inputs.items() if (part.shape[0], part.shape[2], part.dtype) == place}
        tokens = np.full((*place[:2], sum(part.shape[1] * part.shape[3] for part in parts.values())), 7, place[2])
        first = 0
        for name, array in parts.items():
            heads, width = array.shape[1], array.shape[3]
            view = tokens[..., first : first + heads * width].reshape(*place[:2], heads, width).swapaxes(1, 2)
            views[name] = _copy_into(view, array)
            first += heads * width
    return views


def _copy_into(memory: Array, array: Array) -> Array:
    """Write an array into a part of some memory, whose rest must show when it is read."""
    memory[...] = array
    return memory


def _wider_memory(array: Array, width: int) -> Array:
    return np.full((*array.shape[:-1], width), 7, dtype=array.dtype)


def _as_broadcast_view(array: Array) -> Array:
    repeated = find_repeated_axes(array)
    first = array[tuple(slice(1) if axis in repeated else slice(None) for axis in range(array.ndim))]
    return np.broadcast_to(np.ascontiguousarray(first), array.shape)


def _as_distant_slices(array: Array, distance: int | None = None) -> Array:
    """Lay slices along the first axis of several out with a distance between them: by default, room for another."""
    if not array.size:
        return array
    axis = next((axis for axis, length in enumerate(array.shape) if length > 1), 0)
    slices, numbers = array.shape[axis], math.prod(array.shape[axis + 1 :])
    memory = np.full((slices, numbers + (numbers if distance is None else distance)), 7, dtype=array.dtype)
    return _copy_into(memory[:, :numbers].reshape(array.shape), array)


def _as_reversed_view(array: Array) -> Array:
    """Reverse the last two axes in memory; the same amount of memory follows, which a contiguous read would use."""
    memory = np.full((2, *array.shape), 7, dtype=array.dtype)
    return _copy_into(memory[0, ..., ::-1, ::-1], array)


def _as_unaligned_array(array: Array) -> Array:
    memory = np.full(array.size + 2 * _ALIGNMENT_BYTES, 7, dtype=array.dtype)
    address = memory.ctypes.data // array.itemsize
    first = -address % (_ALIGNMENT_BYTES // array.itemsize) + 1
    return _copy_into(memory[first : first + array.size].reshape(array.shape), array)


_SLICE_DISTANCE = 2**16
"""Numbers between slices that are ``distant``: an offset of 16 bits reaches none but the first."""
_ALIGNMENT_BYTES = 64
"""Bytes at which vectors of every processor begin."""
_LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "strided": lambda array: _copy_into(_wider_memory(array, 2 * array.shape[-1])[..., ::2], array),
    "transposed": lambda array: np.ascontiguousarray(array.swapaxes(-2, -3)).swapaxes(-2, -3),
    "broadcast": _as_broadcast_view,
    "padded": lambda array: _copy_into(_wider_memory(array, array.shape[-1] + 3)[..., : array.shape[-1]], array),
    "unaligned": _as_unaligned_array,
    "reversed": _as_reversed_view,
    "sliced": lambda array: _copy_into(
        np.full((*array.shape[:-2], 2 * array.shape[-2], array.shape[-1]), 7, array.dtype)[..., : array.shape[-2], :],
        array,
    ),
    "spaced": _as_distant_slices,
    "distant": lambda array: _as_distant_slices(array, _SLICE_DISTANCE),
}


_SHAPE_FAULT_PREFIX = "has shape"
SECOND_CALL_FAULT = "the second of two calls"
"""The begin of what is wrong with a stage that shows the state of another call."""
UNWRITTEN_FAULT = "memory is left unwritten"
"""The begin of what is wrong with a stage that shows what free memory was filled with."""
OVERWRITTEN_FAULT = "the output of one call is overwritten by the next call"
"""The begin of what is wrong with a stage that is not the caller's to keep."""
MAX_ELEMENTS_TO_CALL_AGAIN = 1 << 14
"""Numbers of all inputs up to which a user's function is called again; larger calls could take long."""


@dataclass(frozen=True)
class KeptElements:
    """The elements kept of a stage of this ``shape``: some ``positions`` of some axes, and all of the others.

    What is dropped along the axes ``axes_with_zero_padding`` is 0: columns of zeros, weights of masked keys, and
    gradients of both.
    """

    shape: tuple[int, ...]
    positions: Mapping[int, Sequence[int]]
    axes_with_zero_padding: tuple[int, ...] = ()


def strip_padding(array: Array, kept: KeptElements) -> tuple[Array, str]:
    """Drop what was added from a stage; say what is wrong with that, empty if nothing is.

    An array of another shape stays as it is.
    """
    if array.shape != kept.shape:
        returned, expected = ("x".join(map(str, shape)) or "scalar" for shape in (array.shape, kept.shape))
        return array, f"{_SHAPE_FAULT_PREFIX} {returned}; the call was padded, expected {expected}"
    fault = _nonzero_padding(array, kept)
    for axis, positions in kept.positions.items():
        array = array.take(list(positions), axis)
    return array, fault


def is_shape_fault(fault: str) -> bool:
    """Return whether what is wrong is a shape."""
    return fault.startswith(_SHAPE_FAULT_PREFIX)


def is_state_fault(fault: str) -> bool:
    """Return whether what is wrong is what was in memory before: of another call, or of none."""
    return fault.startswith((SECOND_CALL_FAULT, UNWRITTEN_FAULT))


def find_unwritten_numbers(stages: Mapping[str, Array]) -> dict[str, str]:
    """Return the faults of stages with numbers that nobody wrote."""
    faults = {}
    for stage, array in stages.items():
        size = array.dtype.itemsize
        if array.dtype.kind in "fV" and size in (2, 4, 8):
            bits = np.ascontiguousarray(array).view(f"u{size}")
            if count := int((bits == int.from_bytes(bytes([FREE_BYTE]) * size)).sum()):
                faults[stage] = (
                    f"{UNWRITTEN_FAULT}: {count} of {array.size} numbers are what free memory was filled with"
                )
    return faults


def should_call_again(backend: Backend, problem: Problem) -> bool:
    """Return whether a call is of somebody's own function, and small enough to be made once more."""
    function = getattr(
        getattr(backend, function_and_keywords(problem.operation, problem.options)[0], None), "user_function", None
    )
    if function is None or getattr(function, "returns_new_arrays", False):
        return False
    return sum(map(np.size, problem.inputs.values())) <= MAX_ELEMENTS_TO_CALL_AGAIN


def find_overwritten_results(
    backend: Backend, problem: Problem, returned: Stages, arrays: Mapping[str, Array]
) -> dict[str, str]:
    """Call a function again with half of every number, and return the faults of stages that this has changed.

    ``arrays`` are copies of what was ``returned``. The second call is made for each case, right behind the first: what
    is found does not depend on the other cases that a process is asked for. A function that returns its input, or a
    view of it, returns memory that is the caller's.
    """
    specs = problem.input_specs
    halves = {
        name: (array / 2).astype(array.dtype) if specs[name].is_number and not specs[name].is_narrow else array.copy()
        for name, array in problem.inputs.items()
    }
    with suppress(Exception):  # the first call's result is judged; what the second one raises, cases of its kind show
        run_operation(backend, problem.operation, apply_memory_layout(halves, problem.memory_layout), problem.options)
    return {
        name: f"{OVERWRITTEN_FAULT}: return a new array"
        for name, array in arrays.items()
        if np.asarray(backend.to_numpy(returned[name])).tobytes() != array.tobytes()
    }


def _nonzero_padding(array: Array, kept: KeptElements) -> str:
    """Return the fault of an array that is not 0 where padding makes it 0; empty without one. NaN may fill a row."""
    added = np.zeros(array.shape, dtype=np.bool_)
    for axis in kept.axes_with_zero_padding:
        added |= ~_position_flags(array.shape, axis, kept.positions[axis])
    for axis in kept.positions.keys() - set(kept.axes_with_zero_padding):  # a query that was added gives anything
        added &= _position_flags(array.shape, axis, kept.positions[axis])
    wrong = added & (array != 0) & ~np.isnan(array.astype(np.float64))
    if not wrong.any():
        return ""
    index = tuple(int(axis) for axis in np.unravel_index(int(np.argmax(wrong)), array.shape))
    shape = "x".join(map(str, array.shape))
    element = list(index)  # written as wording.py does, which a script does not carry along
    return f"gives {float(array[index]):.6g} at {element} of {shape}, which padding makes 0"


def _position_flags(shape: tuple[int, ...], axis: int, positions: Sequence[int]) -> NDArray[np.bool_]:
    """Return which elements stand at these positions of an axis; broadcasts to the shape."""
    flags = np.zeros(shape[axis], dtype=np.bool_)
    flags[list(positions)] = True
    return flags.reshape([-1 if number == axis else 1 for number in range(len(shape))])
