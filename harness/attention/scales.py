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
    def of_numbers(cls, numbers: Real) -> Self:
        return cls((numbers,))

    def split(self) -> tuple[Real, Real, Real]:
        zero = np.zeros(self.shape)
        return self.parts[0], zero, zero

    def is_zero(self) -> Flags:
        zero: Flags = self.parts[0] == 0
        return zero

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

    def exp(self) -> Self:
        return self._made(np.exp(self.parts[0]))

    def log(self) -> Self:
        return self._made(np.log(self.parts[0]))

    def sqrt(self) -> Self:
        return self._made(np.sqrt(self.parts[0]))

    def tanh(self) -> Self:
        return self._made(np.tanh(self.parts[0]))

    def _made(self, numbers: Real) -> Self:
        return type(self)((numbers,), self.attended)
