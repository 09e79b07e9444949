"""Arithmetics of numbers that one array holds: balls (FLINT's arb) for what 106 bits do not settle, and scales.

Balls run at the precision that is current in FLINT (``flint.ctx``), which is state of the whole process: the caller
sets it with ``flint.ctx.workprec``, and two threads may not share the oracle. Scales are float64 numbers beside which a
radius is small or not: sums of absolute terms. No term is negative, so that no sum cancels: they are right to some 40
bits, and only their size matters. Doubles are what error bounds are the bounds of: plain float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from flint import arb, arb_mat
from numpy.typing import NDArray

from attncheck.attention.exact_array import ExactArray, Flags, Real, intersect_flags

ObjectArray = NDArray[np.object_]


@dataclass(frozen=True, eq=False)
class SingleArray(ExactArray):
    """Numbers in one array; for objects, NumPy calls their methods of the same names."""

    @property
    def numbers(self) -> Any:
        """The numbers."""
        return self.parts[0]

    def _with_numbers(self, numbers: NDArray[Any]) -> Self:
        return type(self)((numbers,), self.attended)

    def _apply(self, function: np.ufunc) -> Self:
        return self._with_numbers(function(self.numbers))

    def __neg__(self) -> Self:
        return self._with_numbers(-self.numbers)

    def __abs__(self) -> Self:
        return self._with_numbers(np.abs(self.numbers))

    def _add(self, other: Self) -> Self:
        return type(self)((self.numbers + other.numbers,), intersect_flags(self.attended, other.attended))

    def _multiply(self, other: Self) -> Self:
        return self._with_numbers(self.numbers * other.numbers)

    def _divide(self, other: Self) -> Self:
        return self._with_numbers(self.numbers / other.numbers)

    def exp(self) -> Self:
        return self._apply(np.exp)

    def log(self) -> Self:
        return self._apply(np.log)

    def sqrt(self) -> Self:
        return self._apply(np.sqrt)

    def tanh(self) -> Self:
        return self._apply(np.tanh)


@dataclass(frozen=True, eq=False)
class Magnitudes(SingleArray):
    """The numbers are those of float64, without a radius."""

    @classmethod
    def from_finite_numbers(cls, numbers: Real) -> Self:
        return cls((numbers,))

    def high_low_radius(self) -> tuple[Real, Real, Real]:
        zero = np.zeros(self.shape)
        return self.numbers, zero, zero

    def flag_zeros(self) -> Flags:
        zero: Flags = self.numbers == 0
        return zero

    def __matmul__(self, other: Self) -> Self:
        return type(self)((self.numbers @ other.numbers,))

    def _row_sums(self) -> Self:
        return type(self)((self.numbers.sum(axis=-1, keepdims=True),))

    def _maximum(self, other: Self) -> Self:
        return self._with_numbers(np.maximum(self.numbers, other.numbers))


@dataclass(frozen=True, eq=False)
class Float64Array(Magnitudes):
    """The numbers are those of float64, NaN and infinities among them: what is not attended is -inf as it stands."""

    @classmethod
    def wrap_stored_numbers(cls, stored: NDArray[Any]) -> Self:
        return cls((stored,))

    def mask_forbidden(self, allowed: Flags | None) -> Self:
        return self if allowed is None else self._with_numbers(np.where(allowed, self.numbers, -np.inf))


@dataclass(frozen=True, eq=False)
class Balls(SingleArray):
    """The numbers are balls."""

    @classmethod
    def from_finite_numbers(cls, numbers: Real) -> Self:
        return cls((_map_elements(arb, numbers),))

    def _apply(self, function: np.ufunc) -> Self:
        return self._with_numbers(_map_elements(getattr(arb, function.__name__), self.numbers))

    def exp_of_attended(self) -> Self:
        if self.attended is None:
            return self.exp()
        powers = np.full(self.shape, arb(0), dtype=object)
        powers[self.attended] = _map_elements(arb.exp, self.numbers[self.attended])
        return type(self)((powers,))

    def high_low_radius(self) -> tuple[Real, Real, Real]:
        """Return high = x to nearest, low = (x - high) to nearest, radius = |x - high - low| rounded up.

        All in ball arithmetic, so that the radius holds whatever ``high`` and ``low`` lost: the bits of a midpoint that
        do not fit in 106, and everything below 2^-1074. A number beyond float64 has an infinite radius.
        """
        high = _to_float64(self.numbers)
        rest = self.numbers - high
        low = _to_float64(rest)
        uppers = _map_elements(arb.abs_upper, rest - low)
        # float() rounds to nearest and underflows to 0: the next number up bounds it again, unless it was 0 exactly.
        upper = _to_float64(uppers)
        is_zero = upper == 0
        is_zero[is_zero] = list(map(arb.is_zero, uppers[is_zero].tolist()))
        radius = np.where(is_zero, 0.0, np.nextafter(upper, np.inf))
        lost = ~(np.isfinite(high) & np.isfinite(low))
        return high, np.where(lost, 0.0, low), np.where(lost, np.inf, radius)

    def flag_zeros(self) -> Flags:
        return np.array(list(map(arb.is_zero, self.numbers.ravel().tolist())), np.bool_).reshape(self.shape)

    def flag_small_radii(self, sizes: ExactArray, tolerance: float) -> Flags:
        limits = np.broadcast_to(sizes.parts[0] * arb(tolerance), self.shape)
        pairs = zip(self.numbers.ravel().tolist(), limits.ravel().tolist(), strict=True)
        return np.array([ball.rad() <= limit for ball, limit in pairs], np.bool_).reshape(self.shape)

    def approximate_row_maxima(self) -> Self:
        """Return the largest midpoint: balls themselves have no order, a < b is false when they overlap."""
        rows = self.numbers.reshape(math.prod(self.shape[:-1]), self.shape[-1])
        flags = np.ones(rows.shape, np.bool_) if self.attended is None else self.attended.reshape(rows.shape)
        tops = np.empty(len(rows), dtype=object)
        tops[:] = [max(map(arb.mid, row[attended]), default=arb(0)) for row, attended in zip(rows, flags, strict=True)]
        return type(self)((tops.reshape(*self.shape[:-1], 1),))

    def __matmul__(self, other: Self) -> Self:
        leading = np.broadcast_shapes(self.shape[:-2], other.shape[:-2])
        result = np.empty((*leading, self.shape[-2], other.shape[-1]), dtype=object)
        left, right = (np.broadcast_to(operand.numbers, (*leading, *operand.shape[-2:])) for operand in (self, other))
        for index in np.ndindex(leading):
            product = _to_arb_matrix(left[index]) * _to_arb_matrix(right[index])
            entries = product.entries()
            result[index] = np.fromiter(entries, object, len(entries)).reshape(result.shape[-2:])
        return type(self)((result,))

    def _row_sums(self) -> Self:
        return type(self)((np.add.reduce(self.numbers, axis=-1, keepdims=True, initial=arb(0)),))

    def _maximum(self, other: Self) -> Self:
        return self._with_numbers(np.frompyfunc(arb.max, 2, 1)(self.numbers, other.numbers))


def _map_elements(function: Callable[[Any], arb], numbers: NDArray[Any]) -> ObjectArray:
    """Call a function on every element: twice as fast as NumPy, which looks up a method for each object."""
    return np.fromiter(map(function, numbers.ravel().tolist()), object, numbers.size).reshape(numbers.shape)


def _to_float64(balls: ObjectArray) -> Real:
    return balls.astype(np.float64)


def _to_arb_matrix(balls: ObjectArray) -> arb_mat:
    rows, columns = balls.shape
    return arb_mat(rows, columns, balls.ravel().tolist())
