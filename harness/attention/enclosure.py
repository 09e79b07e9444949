"""A true value as two float64 numbers and a proven radius: what the oracle hands to whoever judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Elementwise, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.spec import Shape

SETTLED: Counter[str] = Counter()
"""How many stages double words settled in this process, and how many went on to balls, since it was cleared."""


@dataclass(frozen=True, eq=False)
class Enclosure(Elementwise):
    """Arrays of one shape with |truth - (high + low)| <= radius, element by element.

    Where the truth is -inf exactly (a masked score, the log_sum_exp of an empty row), high is -inf, low and radius 0.
    Where it is finite and beyond float64's range, high is infinite, low 0 and radius infinite: outside every format's
    domain, so that nothing is to be said of it.
    """

    high: Real
    low: Real
    radius: Real

    def __post_init__(self) -> None:
        if not self.high.shape == self.low.shape == self.radius.shape:
            raise ValueError(f"one shape, not {self.high.shape}, {self.low.shape} and {self.radius.shape}")

    @property
    def shape(self) -> Shape:
        """The shape of the stage."""
        return self.high.shape

    def reshaped(self, shape: Shape) -> Enclosure:
        """Return the same elements in another shape."""
        return self.mapped(lambda array: array.reshape(shape))

    def rounded(self) -> Enclosure:
        """Return the same truths with less to write down: ``low`` in 2^-16 of ``high``'s last place, ``radius`` 2^n.

        What ``low`` loses is added to the radius, which is rounded up. Nothing is rounded where ``high`` is infinite or
        so small that float64 has no 2^-16 of its last place.
        """
        with np.errstate(all="ignore"):
            unit = last_place(self.high) * _GRID
            low = np.where(unit > 0, np.rint(self.low / unit) * unit, self.low)
            lost = np.abs(self.low - low)
            wider = np.where(lost == 0, self.radius, np.nextafter(self.radius + lost, np.inf))
            wider = np.where(wider == 0, 0.0, np.maximum(wider, unit))
            mantissa, exponent = np.frexp(wider)
            power = np.ldexp(1.0, exponent - (mantissa == 0.5))
        return Enclosure(self.high, low, np.where((wider == 0) | np.isinf(wider), wider, power))

    def error_of(self, candidate: NDArray[Any]) -> Real:
        """Return |candidate - (high + low)|, float64, its own rounding below 2^-51 of it.

        candidate: of this shape, of any dtype that float64 holds. Equal infinities have the error 0; an infinity or NaN
        where the truth is finite has the error inf, and so has anything finite or NaN where the truth is infinite.
        The truth lies within ``radius`` of high + low, so the error is at least ``error_of(candidate) - radius``.

        Raises ``ValueError`` for another shape.
        """
        stored = np.asarray(candidate).astype(np.float64)
        if stored.shape != self.shape:
            raise ValueError(f"a candidate of shape {stored.shape} for a stage of shape {self.shape}")
        with np.errstate(invalid="ignore", over="ignore"):
            # Near each other candidate and high differ by an exact number (Sterbenz); far apart low hardly matters.
            error: Real = np.abs((stored - self.high) - self.low)
        if np.isfinite(error).all():  # and so are the numbers that it is the distance of
            return error
        exact_error: Real = np.where(np.isfinite(stored) & np.isfinite(self.high), error, np.inf)
        exact_error[np.isinf(self.high) & (stored == self.high)] = 0
        return exact_error


_GRID = 2.0**-16


def last_place(high: Real) -> Real:
    """Return the distance of numbers to the next larger ones; 1 where float64 has none."""
    with np.errstate(all="ignore"):
        place = np.spacing(np.abs(high))
    return np.where(np.isfinite(place), place, 1.0)


def enclose(array: ExactArray) -> Enclosure:
    """Return what is known of exact numbers; where they are not attended, -inf."""
    high, low, radius = array.split()
    if array.attended is None:
        return Enclosure(high, low, radius)
    return Enclosure(
        np.where(array.attended, high, -np.inf),
        np.where(array.attended, low, 0.0),
        np.where(array.attended, radius, 0.0),
    )


def join(parts: Sequence[Enclosure], axis: int) -> Enclosure:
    """Lay enclosures one after the other along an axis."""
    if len(parts) == 1:
        return parts[0]
    return Enclosure(
        np.concatenate([part.high for part in parts], axis),
        np.concatenate([part.low for part in parts], axis),
        np.concatenate([part.radius for part in parts], axis),
    )
