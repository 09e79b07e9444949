"""Simpler numbers, masks, counts and options in the place of those of a problem that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from attncheck.reading.dtypes import rounded_once
from attncheck.searching.attempts import Attempts
from attncheck.searching.concrete import Array, ConcreteCase
from attncheck.searching.simplicity import complexity
from attncheck.spec import statistics_dtype

_ONE_BY_ONE = 64
"""Numbers of an array of which each is looked at."""
_OPTIONS: dict[str, Sequence[Any]] = {
    "scale": (1.0, 2.0, 0.5, -1.0),
    "softcap": (1.0, 2.0, 10.0),
    "mask_fill": (0.0, -1.0, -10.0),
    "epsilon": (1.0,),
    "window": ((0, 0), (0, None), (None, 0), (1, 0), (0, 1), (1, 1), (1, None), (None, 1)),
}


def simplify_options(attempts: Attempts) -> None:
    """Give options simpler values."""
    for name, values in _OPTIONS.items():
        for value in values:
            if name in attempts.failing.options and attempts.take(partial(_with_option, name=name, value=value)):
                break


def _with_option(problem: ConcreteCase, name: str, value: Any) -> ConcreteCase:
    return problem.changed(options={**problem.options, name: value})


def simplify_masks(attempts: Attempts) -> None:
    """Let a mask or bias say the same for all of an axis, and forbid less."""
    for name in list(attempts.failing.optional_inputs):
        if attempts.failing.specs[name].broadcast:
            for axis in range(attempts.failing.inputs[name].ndim):
                attempts.take(partial(_spread, name=name, axis=axis))
        if attempts.failing.specs[name].boolean:
            _replace_parts(attempts, name, lambda part: np.ones_like(part))


def _spread(problem: ConcreteCase, name: str, axis: int) -> ConcreteCase:
    return _with(problem, name, problem.inputs[name].take([0], axis))


def simplify_counts(attempts: Attempts) -> None:
    """Let lengths be 0 or 1, all of them or one by one."""
    for name, array in list(attempts.failing.inputs.items()):
        spec = attempts.failing.specs[name]
        if spec.whole and not spec.required:
            for number in (0, 1):
                attempts.take(partial(_with, name=name, array=np.full_like(array, number)))


def simplify_numbers(attempts: Attempts) -> None:
    """Round whole arrays, first to the simplest numbers; then parts of them, and single numbers."""
    names = [name for name in attempts.failing.inputs if attempts.failing.specs[name].is_number]
    for simpler in _ROUNDINGS:
        attempts.take(partial(_all_rounded, names=names, simpler=simpler))
    for name in names:
        for simpler in _ROUNDINGS:
            if attempts.take(partial(_rounded, name=name, simpler=simpler)):
                break
        _replace_parts(attempts, name, np.zeros_like)
        _replace_parts(attempts, name, np.ones_like)
        _replace_parts(attempts, name, lambda part: np.clip(np.rint(_finite(part)), -2, 2))
        _replace_parts(attempts, name, _in_two_digits)


def _finite(array: Array) -> Array:
    return np.where(np.isfinite(array), array, 0.0)


def _in_two_digits(array: Array) -> Array:
    short = [float(f"{number:.2g}") for number in array.ravel().tolist()]
    return np.array(short).reshape(array.shape)


def _power_of_two(array: Array) -> Array:
    exponent = np.round(np.log2(np.where(array == 0, 1, np.abs(_finite(array)) + (array == 0) + 1e-300)))
    return np.where(np.isfinite(array) & (array != 0), np.sign(array) * 2.0 ** np.clip(exponent, -126, 126), array)


_ROUNDINGS: Sequence[Callable[[Array], Array]] = (
    np.zeros_like,
    np.ones_like,
    _finite,
    lambda array: np.clip(np.rint(_finite(array)), -2, 2),
    lambda array: np.sign(array) if np.isfinite(array).all() else array,
    np.rint,
    lambda array: np.arange(1, array.size + 1, dtype=np.float64).reshape(array.shape),
    _power_of_two,
    _in_two_digits,
)


def _all_rounded(problem: ConcreteCase, names: Sequence[str], simpler: Callable[[Array], Array]) -> ConcreteCase:
    for name in names:
        problem = _rounded(problem, name, simpler)
    return problem


def _rounded(problem: ConcreteCase, name: str, simpler: Callable[[Array], Array]) -> ConcreteCase:
    return _with(problem, name, simpler(problem.inputs[name]))


def _with(problem: ConcreteCase, name: str, array: Array) -> ConcreteCase:
    """Put another array in the place of an input, in the format in which that is stored; no more statistics of it."""
    spec = problem.specs[name]
    if spec.is_number:
        format_ = str(problem.options.get("stored_as", "float8_e4m3fn")) if spec.eight_bits else problem.dtype
        dtype = statistics_dtype(problem.dtype) if spec.statistics else format_
        with np.errstate(over="ignore"):
            array = rounded_once(np.asarray(array, np.float64), dtype).astype(np.float64)
    layout = {each: kind for each, kind in problem.memory_layout.items() if each != name or kind != "broadcast"}
    return problem.changed(
        inputs={**problem.inputs, name: array},
        memory_layout=layout,
        supports_statistics=problem.supports_statistics and not spec.is_number,
    )


def _replace_parts(attempts: Attempts, name: str, simpler: Callable[[Array], Array]) -> None:
    """Replace parts of an array where that makes it simpler: halves, quarters, and so on to single numbers."""
    size = attempts.failing.inputs[name].size
    if size < 2 or size > _ONE_BY_ONE * 8:
        return
    for length in _sizes(size, 1 if size <= _ONE_BY_ONE else size // 8):
        for begin in range(0, size, length):
            array = attempts.failing.inputs[name]
            part = array.ravel()[begin : begin + length]
            other = simpler(part)
            if complexity(other) < complexity(part):
                attempts.take(partial(_with_part, name=name, begin=begin, part=other))


def _sizes(size: int, least: int) -> Iterator[int]:
    length = (size + 1) // 2
    while length >= max(least, 1):
        yield length
        if length == 1:
            return
        length = (length + 1) // 2


def _with_part(problem: ConcreteCase, name: str, begin: int, part: Array) -> ConcreteCase:
    array = problem.inputs[name].copy()
    array.ravel()[begin : begin + part.size] = part
    return _with(problem, name, array)
