"""Numbers as a document prints them: their decimal value, and the half unit that the printing rounded away.

A printed array is written as the document shows it, one row a line, numbers apart by white space:

    0.083717538 0.026383741 0.8429010 0.046997679
    0.025449248 0.080752324 0.8130461 0.080752324

or pasted as a library prints it (``printed_text.py``).
``.`` stands for an element that the document does not give; ``inf``, ``-inf`` and ``nan`` for themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.printed_text import MAX_AXES, Cells, PrintedError, shape_of, split_numbers

NOT_GIVEN = "."
_NON_FINITE = {"inf", "+inf", "-inf", "nan"}
# No digit can be matched in two ways: a long row of them that is no number after all would be tried in all of them.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_LARGEST_EXPONENT = 308
_SMALLEST_EXPONENT = -400
"""Below float64's range, because documents print such numbers: 5.77e-340."""
_AXES = ("number", "row", "matrix", "block")
MAX_NUMBERS = 30_000
"""The most numbers of one printed array: as many as a file may spell out one by one."""


@dataclass(frozen=True)
class Rounding:
    """How the numbers were rounded when they were printed; by default each as many decimals as it shows."""

    exact: bool = False
    decimals: int | None = None
    significant_digits: int | None = None
    truncated: bool = False
    units_off: int = 0


@dataclass(frozen=True)
class PrintedArray:
    """A printed array, element by element.

    Its text, its value to the nearest float64, half a unit of its last digit (and as many whole ones as the digit may
    be off by), and whether the document gives it at all. Of ``truncated`` numbers the digits behind the last were cut
    off.
    """

    text: NDArray[np.object_]
    value: NDArray[np.float64]
    half_unit: NDArray[np.float64]
    given: NDArray[np.bool_]
    truncated: bool = False

    @property
    def radius(self) -> NDArray[np.float64]:
        """How far the number that was printed may lie from what stands there."""
        return 2 * self.half_unit if self.truncated else self.half_unit

    def open_towards(self, other: NDArray[Any]) -> NDArray[np.float64]:
        """Return how far the number that was printed may lie from what stands there, on the side of other numbers.

        What was cut off lay away from zero, and of a printed zero on either side.
        """
        if not self.truncated:
            return self.half_unit
        with np.errstate(invalid="ignore"):
            inwards = np.where(self.value > 0, other < self.value, (self.value < 0) & (other > self.value))
        return np.where(inwards, 0.0, 2 * self.half_unit)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in which the array is printed."""
        return self.text.shape

    def transposed(self) -> PrintedArray:
        """Swap the last two axes."""
        return self.swapped(-1, -2)

    def swapped(self, one: int, other: int) -> PrintedArray:
        """Swap two axes."""
        return self._changed(lambda array: np.swapaxes(array, one, other))

    def reshaped(self, shape: tuple[int, ...]) -> PrintedArray:
        """Lay the numbers out in another shape."""
        return self._changed(lambda array: array.reshape(shape))

    def _changed(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> PrintedArray:
        """Apply one change of shape to all parts."""
        text, value, half_unit, given = map(change, (self.text, self.value, self.half_unit, self.given))
        return PrintedArray(text, value, half_unit, given, self.truncated)


def parse_printed(source: object, rounding: Rounding) -> PrintedArray:
    """Read a printed array from text, or from nested lists of texts for ranks above two.

    Raises ``PrintedError`` for ragged rows and for what is no number.
    """
    cells = _cells(source)
    shape = shape_of(cells)
    if len(shape) > MAX_AXES:
        raise PrintedError(f"expected at most {MAX_AXES} axes, got {len(shape)}")
    if math.prod(shape) > MAX_NUMBERS:
        raise PrintedError(f"{math.prod(shape)} numbers; expected at most {MAX_NUMBERS}")
    text = np.empty(shape, dtype=object)
    for index in np.ndindex(text.shape):
        cell: Any = cells
        for axis in index:
            cell = cell[axis]
        text[index] = cell
    value = np.empty(text.shape)
    half_unit = np.zeros(text.shape)
    for index in np.ndindex(text.shape):
        try:
            value[index], half_unit[index] = _parse_number(str(text[index]), rounding)
        except PrintedError as error:
            raise PrintedError(f"{_position(index)}{error}") from None
    return PrintedArray(text, value, half_unit, text != np.array(NOT_GIVEN, dtype=object), rounding.truncated)


def as_printed(array: NDArray[np.float64]) -> PrintedArray:
    """Return numbers that are known to the last bit. Raises ``PrintedError`` for too many."""
    if array.size > MAX_NUMBERS:
        raise PrintedError(f"{array.size} numbers; expected at most {MAX_NUMBERS}")
    text = np.empty(array.shape, dtype=object)
    for index, number in np.ndenumerate(array):
        text[index] = repr(float(number))
    return PrintedArray(text, array, np.zeros(array.shape), np.ones(array.shape, dtype=np.bool_))


def _cells(source: object) -> Cells:
    """Split texts into numbers; a list of texts has one axis more."""
    if isinstance(source, list):
        if not source:
            raise PrintedError("no number is given")
        return [_cells(item) for item in source]
    if not isinstance(source, str):
        lost = ": a bare number would lose its last digits" if isinstance(source, int | float) else ""
        raise PrintedError(f"expected text in quotes, got {source!r:.40}{lost}")
    return split_numbers(source)


def _position(index: tuple[int, ...]) -> str:
    """Say where a number stands: "row 2, number 1: "."""
    words = [f"{word} {number + 1}" for word, number in zip(_AXES, reversed(index), strict=False)]
    return f"{', '.join(reversed(words))}: " if words else ""


def _parse_number(text: str, rounding: Rounding) -> tuple[float, float]:
    """Return the nearest float64 and half a unit of the last printed digit."""
    if text == NOT_GIVEN:
        return np.nan, 0.0
    if text.lower() in _NON_FINITE:
        return float(text), 0.0
    if not _NUMBER.fullmatch(text):
        raise PrintedError(f"{text[:40]!r} is not a number")
    try:
        number = Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        raise PrintedError(f"{text[:40]!r} is beyond the range of float64") from None
    if number.adjusted() > _LARGEST_EXPONENT or np.isinf(float(number)):
        raise PrintedError(f"{text[:40]!r} is beyond the range of float64")
    if number and number.adjusted() < _SMALLEST_EXPONENT:
        raise PrintedError(f"{text[:40]!r} is closer to zero than 1e{_SMALLEST_EXPONENT}")
    return float(number), 0.0 if rounding.exact else _half_unit(number, rounding)


def _half_unit(number: Decimal, rounding: Rounding) -> float:
    if rounding.decimals is not None:
        exponent = -rounding.decimals
    elif rounding.significant_digits is not None:
        exponent = number.adjusted() - rounding.significant_digits + 1
    else:
        exponent = int(number.as_tuple().exponent)
    halves = 1 + 2 * rounding.units_off
    return halves * float(Decimal(5).scaleb(exponent - 1)) if exponent > _SMALLEST_EXPONENT else 0.0
