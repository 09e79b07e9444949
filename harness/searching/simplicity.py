"""How simple a problem is: what it asks, how large it is, how its numbers look; the simplest that fails is shown."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.searching.concrete import ConcreteCase
from attncheck.spec import HEADS

Measure = tuple[int, int, float]


def measure(problem: ConcreteCase) -> Measure:
    """Return what is smaller for a simpler problem: of what it asks, of its elements, of its numbers, in this order."""
    asked = len(problem.options.keys() - {*HEADS, "score"}) + len(problem.optional_inputs)
    forms = len(problem.memory_layout) + (problem.stages is not None) + problem.supports_statistics
    numbers = sum(complexity(array) for array in problem.inputs.values())
    options = sum(_of_option(value) for value in problem.options.values())
    return asked + forms, problem.elements, numbers + options


def complexity(array: NDArray[Any]) -> float:
    """Return how much there is to read in an array: of a number nothing if it is 0, little if it is a small integer."""
    if array.dtype.kind == "b":
        return float(np.count_nonzero(~array))
    numbers = array.astype(np.float64).ravel()
    return float(sum(_of_number(number) for number in numbers.tolist()))


def _of_number(number: float) -> float:
    """Return 0 for 0, about 1 for small integers, 2 for what can be written in few digits, 4 for what cannot."""
    if number == 0:
        return 0.1 if math.copysign(1, number) < 0 else 0.0
    if not math.isfinite(number):
        return 2.0
    sign = 0.1 if number < 0 else 0.0
    if number == int(number) and abs(number) <= 10:
        return 1 + abs(number) / 20 + sign
    if float(f"{number:.2g}") == number:
        return 2 + sign
    if math.frexp(number)[0] in (0.5, -0.5):
        return 2.5 + sign
    return 4 + sign


def _of_option(value: Any) -> float:
    match value:
        case bool() | str():
            return 0.0
        case tuple():
            return sum(0.5 if side is None else _of_number(side) for side in value)
    return _of_number(float(value))
