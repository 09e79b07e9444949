"""What a search adds to a drawn problem: a dtype, more options and inputs of the specification, odd values, layouts.

Whatever an operation may have and a problem has not is given seldom, so that every option meets every other. What does
not fit together the loader refuses, and another problem is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin

import numpy as np

from attncheck.reading.dtypes import largest_number, rounded_once
from attncheck.reading.options import ONLY_WITH_SOME_SCORES
from attncheck.reading.shapes import ShapeFault, repeated_axes
from attncheck.searching.concrete import Array, ConcreteCase
from attncheck.searching.options import FILLS
from attncheck.searching.problems import Drawn
from attncheck.searching.shapes import Random
from attncheck.searching.structures import with_structure
from attncheck.spec import DEFAULT_SCORE, HEADS, OPERATIONS, OPTIONS, InputSpec, score_kind

_MORE_OPTIONS = 0.04
_MORE_INPUTS = 0.03
_SPECIAL = 0.12
_LAYOUT = 0.15
_NOT_ADDED = frozenset({"score", "projections", "poison", *HEADS})
"""Options that say how a file writes arrays, or that others follow from."""
_NUMBERS: Mapping[str, Callable[[Random], float]] = {
    "scale": lambda random: float(random.choice([0.0, 1.0, 0.5, 2.0, -1.0, random.uniform(-1, 2)])),
    "softcap": lambda random: float(random.choice([0.5, 1.0, 5.0, 10 ** random.uniform(-1, 2)])),
    "mask_fill": lambda random: float(random.choice(FILLS)),
    "epsilon": lambda random: float(10.0 ** random.uniform(-6, 0)),
}


def vary(drawn: Drawn, dtypes: Sequence[str], random: Random) -> ConcreteCase | None:
    """Return a drawn problem in one of some dtypes, with what else is drawn for it; None where none can hold it."""
    dtype = str(random.choice(list(dtypes)))
    if not drawn.fits(dtype):
        return None
    options, specs = dict(drawn.options), _specs_of(drawn)
    narrow = {array.dtype.name for name, array in drawn.inputs.items() if specs[name].eight_bits}
    if narrow:  # one format for all that is stored in 8 bits
        options["stored_as"] = min(narrow)
    stored = drawn.stored(dtype)
    problem = ConcreteCase(
        drawn.operation,
        {name: value for name, value in options.items() if value is not False},
        {name: _exact(array, specs[name], options.get("stored_as")) for name, array in stored.items()},
        dtype,
        supports_statistics=drawn.supports_statistics,
        regime=drawn.regime,
    )
    for change in (_more_inputs, with_structure, _more_options, _special, _memory_layout):
        problem = change(problem, random)
    return problem


def _specs_of(drawn: Drawn) -> Mapping[str, InputSpec]:
    return ConcreteCase(drawn.operation, drawn.options, {}, "").specs


def _exact(array: Array, spec: InputSpec, eight_bits: str | None) -> Array:
    if not spec.is_number:
        return array
    wide: Array = array.astype(np.float64)
    return rounded_once(wide, str(eight_bits)).astype(np.float64) if spec.eight_bits else wide


def _more_options(problem: ConcreteCase, random: Random) -> ConcreteCase:
    options = dict(problem.options)
    score = score_kind(problem.operation, options) if problem.operation == "scoring" else DEFAULT_SCORE
    for name in sorted(OPERATIONS[problem.operation].options - _NOT_ADDED - options.keys()):
        spec = OPTIONS[name]
        fits = name not in ONLY_WITH_SOME_SCORES or score in ONLY_WITH_SOME_SCORES[name]
        if random.rand() < _MORE_OPTIONS and fits and (spec.needs is None or spec.needs in problem.inputs):
            options[name] = _value_of(name, random)
    return problem.changed(options=options)


def _value_of(name: str, random: Random) -> Any:
    kind = OPTIONS[name].type
    if kind is bool:
        return True
    if kind is float:
        return _NUMBERS[name](random)
    if get_origin(kind) is tuple:  # a window
        left, right = (None if random.rand() < 0.3 else int(random.randint(0, 9)) for _ in range(2))
        return (4, None) if left is right is None else (left, right)
    return str(random.choice(list(get_args(kind))))


def _more_inputs(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Give optional inputs that a problem has not: masks, biases, lengths, sinks, whatever their axes are."""
    inputs = dict(problem.inputs)
    try:
        lengths = problem.lengths
    except ShapeFault:
        return problem
    for name, spec in problem.specs.items():
        if name in inputs or spec.required or spec.needs is not None or random.rand() >= _MORE_INPUTS:
            continue
        shape = tuple(_length_of(letter, lengths) for letter in spec.axes)
        if 0 in shape:
            continue
        inputs[name] = _drawn_input(spec, shape, problem.dtype, random, lengths.get(spec.at_most, 0))
    return problem.changed(inputs=inputs)


def _length_of(axis: str, lengths: Mapping[str, int]) -> int:
    product = 1
    for letter in axis.split("*"):
        product *= lengths.get(letter, 0)
    return product


def _drawn_input(spec: InputSpec, shape: tuple[int, ...], dtype: str, random: Random, most: int) -> Array:
    if spec.broadcast:
        kept = random.rand(len(shape)) < 0.6
        shape = tuple(length if keep else 1 for length, keep in zip(shape, kept, strict=True))
    if spec.boolean:
        return np.asarray(random.rand(*shape) < random.choice([0.5, 0.9]))
    if spec.whole:
        return np.asarray(random.randint(0, most + 1, shape), np.int64)
    numbers = np.asarray(rounded_once(random.randn(*shape), dtype)).astype(np.float64)
    if spec.may_be_infinite and random.rand() < 0.3:
        numbers = np.where(random.rand(*shape) < 0.3, -np.inf, numbers)
    return numbers


def _special(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Put odd values into one input: zeros, ties, the ends of the range, NaN and infinity in a query or a value."""
    if random.rand() >= _SPECIAL:
        return problem
    numbers = [name for name in problem.inputs if problem.specs[name].is_number and problem.inputs[name].size]
    plain = [name for name in numbers if not (problem.specs[name].statistics or problem.specs[name].eight_bits)]
    if not plain:
        return problem
    name, kind = str(random.choice(plain)), str(random.choice(list(_SPECIALS)))
    changed = _SPECIALS[kind](problem.inputs[name].copy(), problem.dtype, random)
    with np.errstate(over="ignore"):
        stored = rounded_once(changed, problem.dtype).astype(np.float64)
    return problem.changed(
        inputs={**problem.inputs, name: stored}, supports_statistics=False, special=f"{kind} in {name}"
    )


def _of_row(value: float) -> Callable[[Array, str, Random], Array]:
    """Put a number into one row of the last axis but one, or somewhere in it."""

    def put(array: Array, dtype: str, random: Random) -> Array:
        rows = array.reshape(-1, array.shape[-1])
        rows[random.randint(len(rows)), random.randint(rows.shape[1])] = value
        return rows.reshape(array.shape)

    return put


def _scaled_to(size: Callable[[str], float]) -> Callable[[Array, str, Random], Array]:
    def put(array: Array, dtype: str, random: Random) -> Array:
        finite = np.abs(array[np.isfinite(array)])
        factor = size(dtype) / max(float(finite.max(initial=0.0)), 1e-30)
        return np.asarray(array * factor)

    return put


_SPECIALS: Mapping[str, Callable[[Array, str, Random], Array]] = {
    "NaN": _of_row(np.nan),
    "infinity": _of_row(np.inf),
    "minus infinity": _of_row(-np.inf),
    "zeros": lambda array, dtype, random: np.zeros_like(array),
    "ones": lambda array, dtype, random: np.ones_like(array),
    "minus zeros": lambda array, dtype, random: np.where(random.rand(*array.shape) < 0.5, -0.0, array),
    "equal rows": lambda array, dtype, random: (
        np.broadcast_to(array[..., :1, :], array.shape).copy() if array.ndim > 1 else array
    ),
    "large numbers": _scaled_to(lambda dtype: largest_number(dtype) ** 0.4),
    "small numbers": _scaled_to(lambda dtype: 1 / largest_number(dtype)),
}


def _memory_layout(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Lay inputs out otherwise than row by row; where all slices are alike, along a stride of 0."""
    numbers = [name for name in problem.inputs if problem.specs[name].is_number and problem.inputs[name].size]
    if random.rand() >= _LAYOUT:
        return problem
    layouts = dict(problem.memory_layout)
    for name in numbers:
        if random.rand() < 0.5:
            continue
        possible = ["strided"] + ["transposed"] * (problem.inputs[name].ndim == 4)
        possible += ["broadcast"] * bool(repeated_axes(problem.inputs[name]))
        layouts[name] = str(random.choice(possible))
    return problem.changed(memory_layout=layouts)
