"""Faults that follow from the specification: of every input, option and stage of every operation.

An input is left out, neutral, zero, taken twice, inverted, off by one, another entry's along each of its axes, or read
with two neighbouring axes exchanged. An option is left out, taken twice, negated, or another of its values; a window
has each edge off by one, or its sides exchanged. A stage is rounded to eight bits. What an option or an input is said
to be decides which families apply to it, so that a new one has its faults by its row of the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Stages, Window
from attncheck.mutation.kernel import Array, bfloat16
from attncheck.mutation.mutant import Steps, mutant
from attncheck.spec import OPERATIONS, OPTIONS, InputSpec, Operation, OptionSpec

ONE_DTYPE = ("float32",)
"""What an input means does not depend on the dtype, and in this one kernels round."""
AXES: Mapping[str, str] = {
    **{"B": "batch_entry", "H": "head", "Hkv": "head", "Lq": "query", "Lk": "key", "T": "key", "N": "part"},
    **{"Np": "page", "Lp": "slot", "W": "page", "D": "feature", "Dv": "feature", "P": "past_key", "S": "sequence"},
    **{"Lr": "position", "R": "pair", "Dr": "feature", "C": "latent", "A": "unit", "Dk": "key_feature"},
    **{"E": "input", "Ek": "input", "Ev": "input", "Eo": "output"},
}
"""What lies along an axis; of others, such as the width of a projection, an element."""


@dataclass(frozen=True)
class ArgumentFault:
    """A change of an argument; None in place of it leaves it out."""

    name: str
    defect: str
    change: Callable[[Any], Any]


@dataclass(frozen=True)
class FaultFamily(ArgumentFault):
    """A fault of every argument for which it ``applies``."""

    applies: Callable[[Any], bool]


def _is_count(spec: InputSpec) -> bool:
    """Whether an input counts keys or queries, rather than saying where something begins."""
    return spec.whole and spec.axes in (("B",), ("S",))


OF_INPUTS = (
    FaultFamily("left_out", "has no effect", lambda array: None, lambda spec: not spec.required and spec.needs is None),
    FaultFamily("zero", "is never read", np.zeros_like, lambda spec: spec.required and spec.is_number),
    FaultFamily("taken_twice", "is added twice", lambda array: array + array, lambda spec: spec.is_number),
    FaultFamily("inverted", "is read as its opposite", np.logical_not, lambda spec: spec.boolean),
    FaultFamily("one_more", "is one more", lambda array: array + 1, _is_count),
    FaultFamily("one_less", "is one less", lambda array: np.maximum(array - 1, 0), _is_count),
)


def _widened(left: int, right: int) -> Callable[[Window], Window]:
    """Move the edges of a window that has them."""

    def change(window: Window) -> Window:
        first, last = window
        return None if first is None else first + left, None if last is None else last + right

    return change


def _is_window(spec: OptionSpec) -> bool:
    return bool(spec.type == Window)


def _is_factor(spec: OptionSpec) -> bool:
    return spec.type is float and spec.name != "epsilon"  # which decides little of what is not near zero


OF_OPTIONS = (
    FaultFamily("left_out", "has no effect", lambda value: None, lambda spec: spec.name != "epsilon"),
    FaultFamily("taken_twice", "is applied twice as large", lambda value: 2 * value, _is_factor),
    FaultFamily(
        "negated", "has the other sign", lambda value: -value, lambda spec: spec.type is float and not spec.positive
    ),
    FaultFamily("one_wider_before", "sees one key more before", _widened(1, 0), _is_window),
    FaultFamily("one_narrower_before", "sees one key fewer before", _widened(-1, 0), _is_window),
    FaultFamily("one_wider_after", "sees one key more after", _widened(0, 1), _is_window),
    FaultFamily("one_narrower_after", "sees one key fewer after", _widened(0, -1), _is_window),
    FaultFamily("turned_round", "has its sides exchanged", lambda window: window[::-1], _is_window),
)


def of_input(spec: InputSpec) -> Iterator[ArgumentFault]:
    """Yield the faults of an input."""
    yield from (family for family in OF_INPUTS if family.applies(spec))
    if spec.neutral is not None:
        neutral = spec.neutral
        yield ArgumentFault("neutral", "is what changes nothing", lambda array: np.full_like(array, neutral))
    names = [AXES.get(axis, "element") for axis in spec.axes]
    for axis, name in enumerate(names, -len(names)):
        if spec.axes[axis] != "S1":  # limits between sequences have no next one
            yield ArgumentFault(
                f"of_the_next_{name}", f"is that of the next {_words(name)}", _next_along(axis, len(names))
            )
    for first, second in pairwise(range(-len(names), 0)):
        both = f"{names[first]}_and_{names[second]}"
        yield ArgumentFault(
            f"with_{both}_exchanged", f"is laid out with {_words(both)} exchanged", _exchanged(first, len(names))
        )


def of_option(spec: OptionSpec) -> Iterator[ArgumentFault]:
    """Yield the faults of an option; of values by name, the first is what is meant where none is given."""
    yield from (family for family in OF_OPTIONS if family.applies(spec))
    others = get_args(spec.type)[1:] if get_origin(spec.type) is Literal else ()
    if len(others) > 1:
        for other in others:
            yield ArgumentFault(f"taken_for_{other}", f"is read as {other}", _always(other))


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda given: value


def _next_along(axis: int, rank: int) -> Callable[[Array], Array]:
    return lambda array: np.roll(array, -1, axis) if array.ndim == rank else array


def _exchanged(axis: int, rank: int) -> Callable[[Array], Array]:
    """Read the memory of an array as if an axis and the next one lay the other way round."""

    def change(array: Array) -> Array:
        if array.ndim != rank:
            return array
        shape = list(array.shape)
        shape[axis], shape[axis + 1] = shape[axis + 1], shape[axis]
        return array.reshape(shape).swapaxes(axis, axis + 1)

    return change


def _words(name: str) -> str:
    return name.replace("_", " ")


def argument_read_as(function: str, name: str, change: Callable[[Any], Any]) -> Steps:
    """Take an argument of a function of the contract for another one, where it is given."""
    right = getattr(numpy_backend, function)
    parameters = signature(right)

    def run(*arrays: Any, **given: Any) -> Stages:
        bound = parameters.bind(*arrays, **given)
        value = bound.arguments.get(name)
        if value is not None and value is not False:
            other = change(value)
            if other is None:
                del bound.arguments[name]
            else:
                bound.arguments[name] = other
        stages: Stages = right(*bound.args, **bound.kwargs)
        return stages

    return {function: run}


def stage_rounded(function: str, stage: str) -> Steps:
    """Round a stage of a function of the contract to eight bits when it is returned."""
    right = getattr(numpy_backend, function)

    def run(*arrays: Any, **given: Any) -> Stages:
        stages = right(*arrays, **given)
        return {name: bfloat16(array) if name == stage else array for name, array in stages.items()}

    return {function: run}


def applies(operation: Operation, name: str, spec: InputSpec | OptionSpec, fault: ArgumentFault) -> bool:
    """Whether an input of an operation can show a fault of an argument.

    What an operation hands on to attention as it is may get lost on the way; all else of it is a fault of attention.
    """
    attention = OPERATIONS["attention"]
    is_handed_on = spec is attention.inputs.get(name) or (isinstance(spec, OptionSpec) and name in attention.options)
    if is_handed_on and operation is not attention and not operation.has_gradients and fault.name != "left_out":
        return False
    if "batch_entry" in fault.name and "cu_seqlens_q" in operation.inputs:
        return False  # there is one
    is_normalised = operation.score == "cosine" or "normalized_query" in operation.stages
    return not (fault.name == "taken_twice" and is_normalised and name in ("query", "key"))


def arguments_of(operation: Operation) -> Iterator[tuple[str, InputSpec | OptionSpec]]:
    """Yield the inputs and options of an operation that its function takes."""
    taken = signature(getattr(numpy_backend, operation.function)).parameters.keys()
    yield from ((name, spec) for name, spec in operation.inputs.items() if name in taken)
    yield from ((name, spec) for name, spec in OPTIONS.items() if name in taken and name in operation.options)


def faults_of(operation: Operation, name: str, spec: InputSpec | OptionSpec) -> Iterator[ArgumentFault]:
    """Yield the faults of an argument of an operation."""
    of_argument = of_input(spec) if isinstance(spec, InputSpec) else of_option(spec)
    yield from (fault for fault in of_argument if applies(operation, name, spec, fault))


def stages_of(operation: Operation) -> Iterator[str]:
    """Yield the stages that the NumPy backend returns of an operation; of several sequences it has the last ones."""
    is_by_sequence = not {"cu_seqlens_q", "key_pages"}.isdisjoint(operation.inputs) and not operation.has_gradients
    stages = operation.stages[-2:] if is_by_sequence else operation.stages
    yield from (stage for stage in stages if stage not in operation.for_lowered)


_faulty = partial(mutant, "by the specification", None, dtypes=ONE_DTYPE)
for _operation in OPERATIONS.values():
    _what = _words(_operation.name)
    for _name, _spec in arguments_of(_operation):
        for _fault in faults_of(_operation, _name, _spec):
            _faulty(
                f"{_operation.name}_{_name}_{_fault.name}",
                f"the {_words(_name)} of {_what} {_fault.defect}",
                argument_read_as(_operation.function, _name, _fault.change),
                at=_spec.asks_for or _operation.stages[0],
                of=(_operation.name, _name),
            )
    for _stage in stages_of(_operation):
        _faulty(
            f"{_operation.name}_{_stage}_rounded_to_eight_bits",
            f"the {_words(_stage)} of {_what} is stored in bfloat16",
            stage_rounded(_operation.function, _stage),
            at=_stage,
            of=(_operation.name, ""),
        )
