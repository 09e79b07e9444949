"""Real numbers that are known to within a radius: the operands of exact rules, and the oracle's results.

A rule is written once and runs in two arithmetics. ``DoubleWords`` (``double_words``) is fast and has 106 bits;
``Balls`` (``balls``) has as many bits as requested. Every operation returns an enclosure of the result for any numbers
within the operands' radii. ``Magnitudes`` has no radii: radii of double words are compared with it. Shapes broadcast as
NumPy's do. An ``Enclosure`` is a true value as two float64 numbers and a proven radius.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Elementwise
from attncheck.attention.errors import Real as Real
from attncheck.spec import Shape

Flags = NDArray[np.bool_]
Array = TypeVar("Array", bound="ExactArray")
Rearrangement = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class ExactArray(ABC):
    """An array of rank 2 or more. ``parts`` are arrays of its shape that together represent each number.

    ``attended``, of the whole shape, is false where the exact value is -inf; the number there is a placeholder.
    """

    parts: tuple[NDArray[Any], ...]
    attended: Flags | None = None

    @classmethod
    @abstractmethod
    def from_finite_numbers(cls, numbers: Real) -> Self:
        """Take finite numbers as exact."""

    @classmethod
    def wrap_stored_numbers(cls, stored: NDArray[Any]) -> Self:
        """Take stored numbers as exact; -inf becomes a place that is not attended."""
        numbers = stored.astype(np.float64)
        if np.isfinite(numbers).all():
            return cls.from_finite_numbers(numbers)
        attended = numbers != -np.inf
        return cls.from_finite_numbers(np.where(attended, numbers, 0.0)).mask_forbidden(attended)

    @abstractmethod
    def high_low_radius(self) -> tuple[Real, Real, Real]:
        """Return high, low and radius with |x - (high + low)| <= radius; an infinite radius if nothing is known."""

    @abstractmethod
    def flag_zeros(self) -> Flags:
        """Return which numbers are exactly 0."""

    def flag_small_radii(self, sizes: ExactArray, tolerance: float) -> Flags:
        """Return which radii are at most ``tolerance`` times ``sizes``, none of which is negative."""
        radius = self.high_low_radius()[2]
        largest = np.minimum(sizes.high_low_radius()[0], np.finfo(np.float64).max)
        return (radius <= tolerance * largest) & np.isfinite(radius)

    def approximate_row_maxima(self) -> Self:
        """Return some exact number near the largest attended one of each row, 0 if there is none: (..., 1)."""
        high = self.high_low_radius()[0]
        attended = high if self.attended is None else np.where(self.attended, high, -np.inf)
        largest = attended.max(axis=-1, keepdims=True, initial=-np.inf)
        return self.from_finite_numbers(np.where(np.isfinite(largest), largest, 0.0))

    @abstractmethod
    def __neg__(self) -> Self: ...

    @abstractmethod
    def __abs__(self) -> Self: ...

    @abstractmethod
    def _add(self, other: Self) -> Self: ...

    @abstractmethod
    def _multiply(self, other: Self) -> Self: ...

    @abstractmethod
    def _divide(self, other: Self) -> Self:
        """Divide by numbers of which none is 0."""

    @abstractmethod
    def __matmul__(self, other: Self) -> Self: ...

    @abstractmethod
    def _row_sums(self) -> Self:
        """Add up along the last axis, which stays with length 1."""

    @abstractmethod
    def _maximum(self, other: Self) -> Self: ...

    @abstractmethod
    def exp(self) -> Self:
        """Return e^x."""

    def exp_of_attended(self) -> Self:
        """Return e^x, and 0 for numbers that are not attended."""
        powers = self.with_attended().exp()
        if self.attended is None or self.attended.all():
            return powers
        return powers.select_where(self.attended, 0.0)

    @abstractmethod
    def log(self) -> Self:
        """Return the natural logarithm of positive numbers."""

    @abstractmethod
    def sqrt(self) -> Self:
        """Return the square root of numbers that are not negative."""

    @abstractmethod
    def tanh(self) -> Self:
        """Return the hyperbolic tangent, as exact relative to itself as the number is."""

    @property
    def shape(self) -> Shape:
        """The shape."""
        return self.parts[0].shape

    def __add__(self, other: Self | float) -> Self:
        return self._add(self._as_array(other))

    __radd__ = __add__

    def __sub__(self, other: Self | float) -> Self:
        return self + -other

    def __rsub__(self, other: float) -> Self:
        return -self + other

    def __mul__(self, other: Self | float) -> Self:
        return self._multiply(self._as_array(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Self | float) -> Self:
        return self._divide(self._as_array(other))

    def __rtruediv__(self, other: float) -> Self:
        return self._as_array(other) / self

    def maximum(self, other: Self | float) -> Self:
        """Return the larger number of two, place by place."""
        return self._maximum(self._as_array(other))

    def _as_array(self, other: Self | float) -> Self:
        return self.from_finite_numbers(np.full((1, 1), float(other))) if isinstance(other, int | float) else other

    def sum(self, *axes: int) -> Self:
        """Add up over axes, which stay with length 1."""
        total = self
        for axis in axes:
            if axis == -1:
                total = total._row_sums()
                continue
            last = total.map_parts(partial(np.moveaxis, source=axis, destination=-1))
            total = last._row_sums().map_parts(partial(np.moveaxis, source=-1, destination=axis))
        return total

    def map_parts(self, function: Rearrangement) -> Self:
        """Rearrange, repeat or leave out elements."""
        attended = None if self.attended is None else function(self.attended)
        return type(self)(tuple(map(function, self.parts)), attended)

    def reshaped(self, shape: Shape) -> Self:
        """Return the same elements in another shape."""
        return self.map_parts(lambda part: part.reshape(shape))

    def transposed(self) -> Self:
        """Swap the last two axes."""
        return self.map_parts(lambda part: part.swapaxes(-1, -2))

    def repeat_heads_for(self, query: Self) -> Self:
        """Repeat each head of keys or values for the query heads that share it: (B, Hkv, L, D) -> (B, H, L, D)."""
        key_heads, query_heads = (array.shape[-3] if len(array.shape) > 2 else 1 for array in (self, query))
        return (
            self
            if key_heads == 1 or key_heads >= query_heads
            else self.map_parts(lambda part: part.repeat(query_heads // key_heads, axis=-3))
        )

    def sum_head_groups(self, heads: int) -> Self:
        """Add the heads of each group up: (B, H, L, D) -> (B, Hkv, L, D)."""
        *batch, query_heads, length, width = self.shape
        if query_heads == heads:
            return self
        return (
            self.reshaped((*batch, heads, query_heads // heads, length, width))
            .sum(-3)
            .reshaped((*batch, heads, length, width))
        )

    def select_where(self, flags: Flags, rest: Self | float) -> Self:
        """Keep flagged elements and take the rest from another array; ``attended`` stays."""
        pairs = zip(self.parts, self._as_array(rest).parts, strict=True)
        parts = (np.where(flags, kept, new) for kept, new in pairs)
        return type(self)(tuple(parts), self.attended)

    def replace_zeros_by_ones(self) -> Self:
        """Replace exact zeros by 1."""
        zeros = self.flag_zeros()
        return self.select_where(~zeros, 1.0) if zeros.any() else self

    def replace_at(self, index: Any, inserted: Self) -> Self:
        """Replace the numbers at an index."""

        def replaced(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
            changed = old.copy()
            changed[index] = new
            return changed

        parts = tuple(replaced(old, new) for old, new in zip(self.parts, inserted.parts, strict=True))
        if self.attended is None and inserted.attended is None:
            return type(self)(parts)
        mine, theirs = (np.True_ if array.attended is None else array.attended for array in (self, inserted))
        return type(self)(parts, replaced(np.broadcast_to(mine, self.shape), np.asarray(theirs)))

    def mask_forbidden(self, allowed: Flags | None) -> Self:
        """Set numbers that are not allowed to -inf."""
        return type(self)(self.parts, intersect_flags(self.attended, allowed))

    def with_attended(self, attended: Flags | None = None) -> Self:
        """Replace ``attended`` by other flags, or by None."""
        return type(self)(self.parts, attended)


def concatenate(arrays: Sequence[Array], axis: int) -> Array:
    """Lay arrays without -inf one after the other."""
    parts = zip(*(array.parts for array in arrays), strict=True)
    return type(arrays[0])(tuple(np.concatenate(pieces, axis) for pieces in parts))


def intersect_flags(first: Flags | None, second: Flags | None) -> Flags | None:
    """Return the elements that are attended in both; None is everything."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


@dataclass(frozen=True, eq=False)
class Exponentials:
    """The exponentials e^(x - shift) of scores x, 0 for x = -inf; per row, (..., 1), the shift and the sum."""

    terms: ExactArray
    row_shift: ExactArray
    row_sum: ExactArray


def compute_row_exponentials(logits: ExactArray, *, uniform: int = 0) -> Exponentials:
    """Take exponentials relative to each row's largest score.

    Softmax does not depend on the shift, so any number will do, exactly. In a row without a key there is none, or the
    first ``uniform`` ones count alike.
    """
    shift, attended = logits.approximate_row_maxima(), logits.attended
    terms = (logits - shift).exp_of_attended()
    if uniform and attended is not None:
        some = np.asarray(attended.any(axis=-1, keepdims=True))
        ones = (np.arange(logits.shape[-1]) < uniform).astype(np.float64)[np.newaxis]
        terms = terms.select_where(some, logits.from_finite_numbers(ones))
    return Exponentials(terms, shift, terms.sum(-1))


def divide_by_row_sums(powers: Exponentials) -> ExactArray:
    """Divide each row by its sum: the weights; a row without a term stays 0."""
    return powers.terms * (1 / powers.row_sum.replace_zeros_by_ones())


def log_row_sums(powers: Exponentials) -> ExactArray:
    """Return the logarithm of each row's sum of e^x, -inf for a row without a term: (..., Lq, Lk) -> (..., Lq, 1)."""
    full = ~powers.row_sum.flag_zeros()
    sums = powers.row_sum.replace_zeros_by_ones().log() + powers.row_shift
    return sums.mask_forbidden(None if full.all() else full)


@dataclass(frozen=True, eq=False)
class Enclosure(Elementwise):
    """Arrays of one shape with |truth - (high + low)| <= radius, element by element.

    If the truth is exactly -inf (a masked score, the log_sum_exp of an empty row), high is -inf, and low and radius are
    0. If the truth is finite and beyond float64's range, high is infinite, low 0 and radius infinite: no format has it,
    so it is not judged.
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
        return self.map_arrays(lambda array: array.reshape(shape))

    def round_for_storage(self) -> Enclosure:
        """Return the same truths with less to write down: ``low`` in 2^-16 of ``high``'s last place, ``radius`` 2^n.

        What ``low`` loses is added to the radius, which is rounded up. Nothing is rounded where ``high`` is infinite or
        so small that float64 has no 2^-16 of its last place.
        """
        with np.errstate(all="ignore"):
            unit = unit_in_last_place(self.high) * _LOW_WORD_UNITS
            low = np.where(unit > 0, np.rint(self.low / unit) * unit, self.low)
            lost = np.abs(self.low - low)
            wider = np.where(lost == 0, self.radius, np.nextafter(self.radius + lost, np.inf))
            wider = np.where(wider == 0, 0.0, np.maximum(wider, unit))
            mantissa, exponent = np.frexp(wider)
            power = np.ldexp(1.0, exponent - (mantissa == 0.5))
        return Enclosure(self.high, low, np.where((wider == 0) | np.isinf(wider), wider, power))

    def distance_to(self, candidate: NDArray[Any]) -> Real:
        """Return |candidate - (high + low)|, float64, its own rounding below 2^-51 of it.

        candidate: of this shape, of any dtype that float64 holds. Equal infinities have the error 0; an infinity or NaN
        if the truth is finite has the error inf, and so has anything finite or NaN if the truth is infinite.
        The truth lies within ``radius`` of high + low, so the error is at least ``distance_to(candidate) - radius``.

        Raises ``ValueError`` for another shape.

        Example:
            >>> truth = Enclosure(np.array([1.0, -np.inf]), np.array([2.0**-60, 0.0]), np.zeros(2))
            >>> truth.distance_to(np.array([1.0, -np.inf])).tolist() == [2.0**-60, 0.0]
            True
            >>> truth.distance_to(np.array([np.nan, -1e308])).tolist()
            [inf, inf]
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


_LOW_WORD_UNITS = 2.0**-16
"""A choice: with low words of 16 bits an enclosure takes a third of the space in the store. Coarser words widen the
radius, which is subtracted from every error: at 2^-16 of a last place it hides nothing."""


def unit_in_last_place(high: Real) -> Real:
    """Return the distance of numbers to the next larger ones; 1 if float64 has none."""
    with np.errstate(all="ignore"):
        place: Real = np.spacing(np.abs(high))
    known = np.isfinite(place)
    return place if known.all() else np.where(known, place, 1.0)


def make_enclosure(array: ExactArray) -> Enclosure:
    """Return exact numbers as an enclosure; -inf for those that are not attended."""
    high, low, radius = array.high_low_radius()
    if array.attended is None or array.attended.all():
        return Enclosure(high, low, radius)
    return Enclosure(
        np.where(array.attended, high, -np.inf),
        np.where(array.attended, low, 0.0),
        np.where(array.attended, radius, 0.0),
    )


def concatenate_enclosures(parts: Sequence[Enclosure], axis: int) -> Enclosure:
    """Lay enclosures one after the other along an axis."""
    if len(parts) == 1:
        return parts[0]
    return Enclosure(
        np.concatenate([part.high for part in parts], axis),
        np.concatenate([part.low for part in parts], axis),
        np.concatenate([part.radius for part in parts], axis),
    )
