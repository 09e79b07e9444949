"""What was added to pad a call, dropped from the stages that come back; needs NumPy alone, for scripts too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_SHAPE = "has shape"


@dataclass(frozen=True)
class KeptElements:
    """What is kept of a stage that comes back in a ``shape``: some ``positions`` of some axes, and all of the others.

    What is dropped along the axes ``zeros`` is 0: columns of zeros, weights of masked keys, and gradients of both.
    """

    shape: tuple[int, ...]
    positions: Mapping[int, Sequence[int]]
    zeros: tuple[int, ...] = ()


def cut(array: Array, kept: KeptElements) -> tuple[Array, str]:
    """Drop what was added from a stage; say what is wrong with that, empty where nothing is.

    An array of another shape stays as it is.
    """
    if array.shape != kept.shape:
        found, expected = ("x".join(map(str, shape)) or "scalar" for shape in (array.shape, kept.shape))
        return array, f"{_SHAPE} {found}; the call was padded, expected {expected}"
    fault = _not_zero(array, kept)
    for axis, positions in kept.positions.items():
        array = array.take(list(positions), axis)
    return array, fault


def is_of_shape(fault: str) -> bool:
    """Whether what is wrong is a shape."""
    return fault.startswith(_SHAPE)


def _not_zero(array: Array, kept: KeptElements) -> str:
    """Say where an array is not 0 although what was added makes it so; empty where it is. NaN fills a row by right."""
    added = np.zeros(array.shape, dtype=np.bool_)
    for axis in kept.zeros:
        added |= ~_flags(array.shape, axis, kept.positions[axis])
    for axis in kept.positions.keys() - set(kept.zeros):  # a query that was added gives anything
        added &= _flags(array.shape, axis, kept.positions[axis])
    wrong = added & (array != 0) & ~np.isnan(array.astype(np.float64))
    if not wrong.any():
        return ""
    index = tuple(int(axis) for axis in np.unravel_index(int(np.argmax(wrong)), array.shape))
    shape = "x".join(map(str, array.shape))
    element = list(index)  # written as elements.py does, which a script does not carry along
    return f"gives {float(array[index]):.6g} at {element} of {shape}, which padding makes 0"


def _flags(shape: tuple[int, ...], axis: int, positions: Sequence[int]) -> NDArray[np.bool_]:
    """Return which elements stand at these positions of an axis; broadcasts to the shape."""
    found = np.zeros(shape[axis], dtype=np.bool_)
    found[list(positions)] = True
    return found.reshape([-1 if each == axis else 1 for each in range(len(shape))])
