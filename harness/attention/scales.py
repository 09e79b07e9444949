"""Arrays of float64 numbers without a radius: the sums of absolute terms beside which a radius is small or not.

No term is negative, so that no sum cancels: they are right to some 40 bits, and only their size matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from attncheck.attention.exact_array import ExactArray, Flags, Real, both


@dataclass(frozen=True, eq=False)
class Scales(ExactArray):
    """``parts`` are one array of numbers."""

    @classmethod
    def of_numbers(cls, numbers: Real) -> Self:  # noqa: D102
        return cls((numbers,))

    def split(self) -> tuple[Real, Real, Real]:  # noqa: D102
        zero = np.zeros(self.shape)
        return self.parts[0], zero, zero

    def is_zero(self) -> Flags:  # noqa: D102
        zero: Flags = self.parts[0] == 0
        return zero

    def is_small_beside(self, scale: ExactArray, tolerance: float) -> Flags:  # noqa: D102
        return np.ones(np.broadcast_shapes(self.shape, scale.shape), np.bool_)

    def largest_of_rows(self) -> Self:  # noqa: D102
        numbers = self.parts[0] if self.attended is None else np.where(self.attended, self.parts[0], -np.inf)
        largest = numbers.max(axis=-1, keepdims=True, initial=-np.inf)
        return self.of_numbers(np.where(largest > -np.inf, largest, 0.0))

    def __neg__(self) -> Self:
        return self._made(-self.parts[0])

    def __abs__(self) -> Self:
        return self._made(np.abs(self.parts[0]))

    def _plus(self, other: Self) -> Self:
        return type(self)((self.parts[0] + other.parts[0],), both(self.attended, other.attended))

    def _times(self, other: Self) -> Self:
        return self._made(self.parts[0] * other.parts[0])

    def _by(self, other: Self) -> Self:
        return self._made(self.parts[0] / other.parts[0])

    def __matmul__(self, other: Self) -> Self:
        return type(self)((self.parts[0] @ other.parts[0],))

    def _row_sums(self) -> Self:
        return type(self)((self.parts[0].sum(axis=-1, keepdims=True),))

    def _maximum(self, other: Self) -> Self:
        return self._made(np.maximum(self.parts[0], other.parts[0]))

    def exp(self) -> Self:  # noqa: D102
        return self._made(np.exp(self.parts[0]))

    def log(self) -> Self:  # noqa: D102
        return self._made(np.log(self.parts[0]))

    def sqrt(self) -> Self:  # noqa: D102
        return self._made(np.sqrt(self.parts[0]))

    def tanh(self) -> Self:  # noqa: D102
        return self._made(np.tanh(self.parts[0]))

    def _made(self, numbers: Real) -> Self:
        return type(self)((numbers,), self.attended)
