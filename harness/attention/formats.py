"""The floating-point formats that attention is stored and computed in, as the few numbers that error bounds need.

IEEE 754-2019, table 3.5 (binary16, binary32, binary64); bfloat16 is binary32 with its last 16 bits left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary format: ``precision`` counts the bits of the significand, the hidden one included."""

    name: str
    precision: int
    least_exponent: int

    @property
    def unit_roundoff(self) -> float:
        """Half the distance from 1 to the next number: |fl(x) - x| <= u |x| where nothing under- or overflows."""
        return math.ldexp(1.0, -self.precision)

    @property
    def least_normal(self) -> float:
        """The least number with a whole significand."""
        return math.ldexp(1.0, self.least_exponent)

    @property
    def least_subnormal(self) -> float:
        """The least positive number."""
        return math.ldexp(1.0, self.least_exponent + 1 - self.precision)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return math.ldexp(2 - math.ldexp(1.0, 1 - self.precision), 1 - self.least_exponent)

    @property
    def underflow(self) -> float:
        """The absolute error of a result too small for the relative one.

        Frameworks and CPUs flush subnormal results to zero in every format but float16, whose subnormals begin at 6e-5
        and are kept: there it is the rounding to the nearest subnormal, half of the least one.
        """
        return self.least_subnormal / 2 if self.name == "float16" else self.least_normal


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("float64", 53, -1022),
        Format("float32", 24, -126),
        Format("bfloat16", 8, -126),
        Format("float16", 11, -14),
    )
}
