"""Arrays of double words: unevaluated sums of two float64 numbers, high = fl(high + low), each with a proven radius.

Every operation has a relative error that is proven for all operands, without fused operations, which NumPy has not
(Joldes, Muller, Popescu 2017, "Tight and rigorous error bounds for basic building blocks of double-word arithmetic",
ACM TOMS 44; the square root: Lefevre, Louvet, Muller, Picot, Rideau 2023, ACM TOMS 49). Matrix products are exact on
any BLAS (Ozaki, Ogita, Oishi, Rump 2012, "Error-free transformations of matrix multiplication", Numerical Algorithms
59): rows of the left and columns of the right operand are cut into slices of so many bits that all partial sums of
products of slices are integers below 2^53. All of it is derived in docs/numerics.md, section 2.

Radii are sums of non-negative float64 numbers, each times 1 + 2^-40 (``_ROOM``) for what their own evaluation rounds.
What underflow may take away is added where a result is near it. Where a number is not finite, or so small that nothing
is proven, the radius is infinite: what is asked then goes to ``balls``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from flint import arb, ctx
from numpy.typing import NDArray

from attncheck.attention.exact_array import ExactArray, Flags, Real, both

Pair = tuple[Real, Real]
Exponents = NDArray[np.int32]

U2 = 2.0**-106
"""u^2."""
SUM_ERROR, PRODUCT_ERROR, QUOTIENT_ERROR, ROOT_ERROR = 3 * U2, 7 * U2, 16 * U2, 4 * U2
ONE_SUM_ERROR = 2 * U2
EXP_ERROR = 2.0**-103
"""Relative: 2^-106 from reducing the argument, 2^-107 from the table, 3u^2 from the last sum, less from the rest."""
POLYNOMIAL_ERROR = 2.0**-102
"""Relative, of e^x - 1 where x is not reduced: 7u^2 from the last product, 2u^2 from the sum in it, and little more."""
LOG_ERROR = 2.0**-101
"""Absolute: that of the exponential, the product with it, and the logarithm of 1 + d up to d^3 < 2^-135."""
MAX_SLICES = 8
KEPT_BITS = 104
"""Slices leave less than this of a number, so that numbers far smaller than others of their row take more slices; and
products of slices that are left out are less of every sum of absolute terms."""
_ROOM = 1 + 2.0**-40
_NEAR_UNDERFLOW = 2.0**-900
_LEAST = 2.0**-1074
_LOST = 3 * _LEAST
"""At most what underflow takes from a product: half of 2^-1074 in each of six operations."""
_SPLITTER = 2.0**27 + 1
_TABLE_BITS = 10
_LARGEST_EXPONENT = 760.0
_NOTHING = np.zeros((1, 1)), np.zeros((1, 1))


@dataclass(frozen=True, eq=False)
class DoubleWords(ExactArray):
    """``parts`` are high, low and radius."""

    @classmethod
    def of_numbers(cls, numbers: Real) -> Self:
        zero = np.zeros(numbers.shape)
        return cls((numbers, zero, zero))

    @property
    def pair(self) -> Pair:
        """The number without its radius."""
        return self.parts[0], self.parts[1]

    @property
    def radius(self) -> Real:
        """How far it may be from the truth."""
        radius: Real = self.parts[2]
        return radius

    def split(self) -> tuple[Real, Real, Real]:
        high, low, radius = self.parts
        return high, low, radius

    def is_zero(self) -> Flags:
        zero: Flags = (self.parts[0] == 0) & (self.radius == 0)
        return zero

    def _made(self, pair: Pair, radius: Real, attended: Flags | None) -> Self:
        """Return a result; where it is not finite, nothing is known of it."""
        high, low = pair
        if not np.isfinite(high + low + radius).all():
            known = np.isfinite(high + low)
            radius = np.where(known & np.isfinite(radius), radius, np.inf)
            high, low = np.where(known, high, 0.0), np.where(known, low, 0.0)
        return type(self)((high, low, radius), attended)

    def __neg__(self) -> Self:
        return type(self)((-self.parts[0], -self.parts[1], self.radius), self.attended)

    def _plus(self, other: Self) -> Self:
        pair = _sum(self.pair, other.pair)
        radius = (self.radius + other.radius + SUM_ERROR * np.abs(pair[0])) * _ROOM
        return self._made(pair, radius, both(self.attended, other.attended))

    def _times(self, other: Self) -> Self:
        pair = _product(self.pair, other.pair)
        size, others, own, theirs = np.abs(self.parts[0]), np.abs(other.parts[0]), self.radius, other.radius
        radius = size * theirs + own * (others + theirs) + PRODUCT_ERROR * np.abs(pair[0])
        if not (radius.size and radius.min() >= _NEAR_UNDERFLOW):
            tiny = (np.abs(pair[0]) < _NEAR_UNDERFLOW) & (size > 0) & (others > 0)
            moved = ((own > 0) & (others + theirs > 0)) | ((theirs > 0) & (size > 0))
            radius = radius + _LOST * tiny + _LEAST * (moved & (radius < _NEAR_UNDERFLOW))
        return self._made(pair, radius * _ROOM, self.attended)

    def _by(self, other: Self) -> Self:
        high, low = _quotient(self.pair, other.pair)
        size, least = np.abs(self.parts[0]), np.abs(other.parts[0]) * (1 - 2.0**-50) - other.radius
        moved = (self.radius + np.abs(high) * other.radius) / np.where(least > 0, least, np.nan)
        radius = (moved + QUOTIENT_ERROR * np.abs(high)) * _ROOM + _LEAST * (
            (self.radius > 0) & (moved < _NEAR_UNDERFLOW)
        )
        unproven = (size > 0) & (np.minimum(size, np.abs(high)) < _NEAR_UNDERFLOW)
        return self._made((high, low), np.where(unproven, np.inf, radius), self.attended)

    def __abs__(self) -> Self:
        sign = np.where(self.parts[0] < 0, -1.0, 1.0)
        return type(self)((sign * self.parts[0], sign * self.parts[1], self.radius), self.attended)

    def _maximum(self, other: Self) -> Self:
        larger = self.where((self - other).parts[0] >= 0, other)
        return type(self)((*larger.pair, np.maximum(self.radius, other.radius)), self.attended)

    def sqrt(self) -> Self:
        high = self.parts[0]
        pair = _root(self.pair)
        radius = self.radius / pair[0] * (1 + 2.0**-50) + ROOT_ERROR * pair[0]
        radius = np.where(high > _NEAR_UNDERFLOW, radius * _ROOM, np.where(self.is_zero(), 0.0, np.inf))
        return self._made((np.where(high > 0, pair[0], 0.0), np.where(high > 0, pair[1], 0.0)), radius, self.attended)

    def exp(self) -> Self:
        power = _reduced(self.pair)
        head = power.head
        pair = _scaled(_sum(head, _product(head, power.rest)), power.exponent)
        size = np.abs(pair[0])
        radius = EXP_ERROR * size + (size + _LEAST) * np.expm1(self.radius) * _ROOM
        return self._made(pair, (radius + _LEAST * (size < _NEAR_UNDERFLOW)) * _ROOM, self.attended)

    def log(self) -> Self:
        near = np.log(self.parts[0])
        inverse = self.of_numbers(-near).exp()
        rest = _plus_number(_product(self.pair, inverse.pair), -np.ones_like(near))
        pair = _plus_number(_plus_number(rest, near), -0.5 * rest[0] * rest[0])
        least = self.parts[0] * (1 - 2.0**-50) - self.radius
        radius = LOG_ERROR + self.radius / np.where(least > 0, least, 0.0) + SUM_ERROR * np.abs(pair[0])
        unproven = (np.abs(rest[0]) > 2.0**-45) | ~(least > _NEAR_UNDERFLOW) | ~(near < 600)
        return self._made(pair, np.where(unproven, np.inf, radius * _ROOM), self.attended)

    def tanh(self) -> Self:
        """Return w / (2 - w) with the sign of x, where w = 1 - e^(-2|x|)."""
        size = abs(self)
        lost = -type(self)((-2 * size.parts[0], -2 * size.parts[1], 2 * size.radius))._exponential_less_one()
        tangent = lost / (2 - lost)
        zero = self.parts[0] == 0
        sign = np.where(self.parts[0] < 0, -1.0, 1.0)
        # At 0 a number moves as far as its operand does: the quotient of a number so small is not proven.
        radius = np.where(zero, self.radius, tangent.radius)
        return self._made((sign * tangent.parts[0], sign * tangent.parts[1]), radius, self.attended)

    def _exponential_less_one(self) -> Self:
        """Return e^x - 1 for numbers that are not positive, as exact relative to itself as the number is."""
        power = _reduced(self.pair)
        head = _scaled(power.head, power.exponent)
        pair = _sum(_plus_number(head, -np.ones_like(head[0])), _product(head, power.rest))
        size, is_polynomial = np.abs(pair[0]), head[0] == 1  # where no multiple of log 2 was taken away
        error = np.where(is_polynomial, POLYNOMIAL_ERROR * size, EXP_ERROR * np.maximum(head[0], size))
        radius = error + np.expm1(self.radius) + _LOST * (self.parts[0] != 0)
        return self._made(pair, radius * _ROOM, self.attended)

    def _row_sums(self) -> Self:
        """Add halves to halves, until one is left."""
        high, low = self.pair
        size, levels = np.abs(high).sum(axis=-1, keepdims=True), 0
        while high.shape[-1] > 1:
            half, is_odd = divmod(high.shape[-1], 2)
            first, last, rest = slice(half), slice(half, 2 * half), slice(2 * half, None)
            total = _sum((high[..., first], low[..., first]), (high[..., last], low[..., last]))
            rests = (high[..., rest], low[..., rest])
            high, low = (np.concatenate(each, axis=-1) for each in zip(total, rests, strict=True)) if is_odd else total
            levels += 1
        if not high.shape[-1]:
            high = low = np.zeros_like(size)
        radius = self.radius.sum(axis=-1, keepdims=True) + levels * SUM_ERROR * size
        return self._made((high, low), radius * _ROOM, None)

    def __matmul__(self, other: Self) -> Self:
        inner = self.shape[-1]
        bits = (53 - math.ceil(math.log2(max(inner, 1) * MAX_SLICES))) // 2
        left, right = _sliced(self.pair, -1, bits), _sliced(other.pair, -2, bits)
        count, others = len(left.pieces), len(right.pieces)
        kept, cut = _kept(left, right, bits)
        # Products of slices of one size lie side by side, so that each sum of them is one product.
        side, turned = np.concatenate(left.pieces, axis=-1), np.concatenate(right.pieces[::-1], axis=-2)
        pair, size = _NOTHING, _NOTHING[0]
        for diagonal in reversed(range(kept)):
            first, stop = max(0, diagonal - others + 1), min(diagonal + 1, count)
            start = others - 1 - diagonal + first
            columns, rows = side[..., first * inner : stop * inner], turned[..., start * inner :, :]
            product = (columns @ rows[..., : (stop - first) * inner, :]) * 2.0 ** (-bits * (diagonal + 2))
            pair, size = _plus_number(pair, product), size + np.abs(product)
        radius = (kept - 1) * ONE_SUM_ERROR * size + cut
        if left.rest is not None or right.rest is not None:
            radius = radius + _moved(left.whole, left.rest, right.whole, right.rest)
        exponent = left.exponent + right.exponent
        near = (size > 0) | (radius > 0)
        pair, radius = _scaled(pair, exponent), np.ldexp(radius, exponent)
        near &= np.abs(pair[0]) < _NEAR_UNDERFLOW
        if near.any():
            radius = radius + _LOST * near
        if self.radius.any() or other.radius.any():
            radius = radius + _moved(np.abs(self.parts[0]), self.radius, np.abs(other.parts[0]), other.radius)
        return self._made(pair, radius * _ROOM, None)


def _kept(left: _Slices, right: _Slices, bits: int) -> tuple[int, Real]:
    """Return how many sums of products of slices to make, by size, and what the others amount to at most.

    The others, up to eight products of slices in each, are below 2^-KEPT_BITS of every sum of absolute terms.
    """
    inner, count = left.whole.shape[-1], len(left.pieces) + len(right.pieces) - 1
    terms = left.whole @ right.whole
    least = terms.min(initial=1.0, where=terms > 0)
    kept = math.ceil((KEPT_BITS + math.log2(MAX_SLICES * max(inner, 1)) - math.log2(least)) / bits)
    if kept >= count:
        return count, _NOTHING[0]
    return kept, MAX_SLICES * inner * 2.0 ** (1 - bits * kept) * (terms > 0)


def _moved(left: Real, own: Real | None, right: Real, theirs: Real | None) -> Real:
    """Return how far a product of magnitudes moves with its operands: r|y| + (|x| + r) r'."""
    inner = left.shape[-1]
    own, theirs = (np.zeros((1, 1)) if rest is None else rest for rest in (own, theirs))
    own, theirs = np.broadcast_to(own, left.shape), np.broadcast_to(theirs, right.shape)
    moved: Real = own @ right + (left + own) @ theirs
    if not (moved.size and moved.min() >= _NEAR_UNDERFLOW):
        some, moves, others, others_move = ((each > 0).astype(np.float64) for each in (left + own, own, right, theirs))
        terms = moves @ others + some @ others_move
        moved = moved + 2 * _LEAST * terms * (moved < _NEAR_UNDERFLOW)
    bound: Real = moved * (1 + (inner + 4) * 2.0**-52)
    return bound


@dataclass(frozen=True, eq=False)
class _Slices:
    """Integers below 2^bits with x = 2^exponent sum_s pieces_s 2^(-bits (s + 1)), to within 2^exponent rest.

    ``whole`` is |x| 2^-exponent, at most 1.
    """

    pieces: list[Real]
    exponent: Exponents
    whole: Real
    rest: Real | None


def _sliced(pair: Pair, axis: int, bits: int) -> _Slices:
    """Cut rows (axis -1) or columns (-2) relative to their largest numbers."""
    high, low = pair
    exponent = np.frexp(np.abs(high).max(axis=axis, keepdims=True, initial=0.0))[1]
    is_double = bool(low.any())
    first, second = np.ldexp(high, -exponent), np.ldexp(low, -exponent) if is_double else low
    whole = np.abs(first)
    lost: Any = False
    if exponent.size and exponent.max() > 0:  # only a division by a power of two underflows
        lost = (np.ldexp(first, exponent) != high) | (np.ldexp(second, exponent) != low if is_double else False)
    pieces: list[Real] = []
    unit = 1.0
    while True:
        first, unit = first * 2.0**bits, unit * 2.0**-bits
        piece = np.rint(first)
        pieces.append(piece)
        first = first - piece
        if is_double:
            first, second = _two_sum(first, second * 2.0**bits)
        rest = np.abs(first) * unit
        if len(pieces) == MAX_SLICES or bool((rest <= 2.0**-KEPT_BITS * whole).all()):
            break
    is_cut = bool(rest.any() or np.any(lost))
    return _Slices(pieces, exponent, whole, rest * (1 + 2.0**-50) + 2.0**-1070 * lost if is_cut else None)


@dataclass(frozen=True, eq=False)
class _Power:
    """e^x = 2^exponent head (1 + rest): head = 2^(j/1024), |rest| < 2^-11."""

    exponent: Exponents
    head: Pair
    rest: Pair


@cache
def _constants() -> tuple[Pair, tuple[float, float, float], Pair, Pair]:
    """Return 2^(j/1024) for every j; log(2)/1024 in three parts, the first two of 32 bits; 1/6 and 1/24."""
    with ctx.workprec(256):
        steps = 1 << _TABLE_BITS
        head = _pairs([(arb(step) / steps * arb(2).log()).exp() for step in range(steps)])
        step = arb(2).log() / steps
        parts = []
        for bits in (32, 32, 53):
            mantissa, exponent = math.frexp(float(step))
            part = math.ldexp(math.floor(math.ldexp(mantissa, bits)), exponent - bits) if bits < 53 else float(step)
            parts.append(part)
            step -= part
        sixth, small = (_pairs([arb(1) / number]) for number in (6, 24))
    return head, (parts[0], parts[1], parts[2]), sixth, small


def _pairs(numbers: list[arb]) -> Pair:
    high = np.array([float(number) for number in numbers])
    return high, np.array([float(number - first) for number, first in zip(numbers, high.tolist(), strict=True)])


def _reduced(pair: Pair) -> _Power:
    """Reduce arguments of the exponential; beyond 760 in size they are 760, where float64 has ended already."""
    table, parts, sixth, small = _constants()
    beyond = np.abs(pair[0]) > _LARGEST_EXPONENT
    if beyond.any():
        pair = np.clip(pair[0], -_LARGEST_EXPONENT, _LARGEST_EXPONENT), np.where(beyond, 0.0, pair[1])
    steps = np.rint(pair[0] * (1 / (parts[0] + parts[1])))
    rest = _plus_number(_two_sum(pair[0], -steps * parts[0]), -steps * parts[1])
    s = _plus_number(_plus_number(rest, pair[1]), -steps * parts[2])
    tail = s[0] * (1 / 120 + s[0] * (1 / 720 + s[0] * (1 / 5040 + s[0] / 40320)))
    series = _product(s, _plus_number(small, tail))
    series = _product(s, _sum(sixth, series))
    series = _product(s, _plus_number(series, np.full((1, 1), 0.5)))
    series = _product(s, _plus_number(series, np.ones((1, 1))))
    number = steps.astype(np.int32)
    index = number & ((1 << _TABLE_BITS) - 1)
    return _Power(number >> _TABLE_BITS, (table[0][index], table[1][index]), series)


def _scaled(pair: Pair, exponent: Exponents) -> Pair:
    return np.ldexp(pair[0], exponent), np.ldexp(pair[1], exponent)


def _two_sum(x: Real, y: Real) -> Pair:
    """Return the sum and its error, exactly (Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _fast_two_sum(x: Real, y: Real) -> Pair:
    """Do the same where x is the larger (Dekker)."""
    total = x + y
    return total, y - (total - x)


def _halves(x: Real) -> Pair:
    """Cut into two numbers of 26 bits (Veltkamp)."""
    grown = _SPLITTER * x
    upper = grown - (grown - x)
    return upper, x - upper


def _two_product(x: Real, y: Real) -> Pair:
    """Return the product and its error, exactly except for underflow (Dekker)."""
    product = x * y
    (a, b), (c, d) = _halves(x), _halves(y)
    return product, (((a * c - product) + a * d) + b * c) + b * d


def _sum(x: Pair, y: Pair) -> Pair:
    high, rest = _two_sum(x[0], y[0])
    low, least = _two_sum(x[1], y[1])
    high, rest = _fast_two_sum(high, rest + low)
    return _fast_two_sum(high, least + rest)


def _plus_number(x: Pair, y: Real) -> Pair:
    """Add one float64 number."""
    high, rest = _two_sum(x[0], y)
    return _fast_two_sum(high, x[1] + rest)


def _product(x: Pair, y: Pair) -> Pair:
    high, rest = _two_product(x[0], y[0])
    return _fast_two_sum(high, rest + (x[0] * y[1] + x[1] * y[0]))


def _quotient(x: Pair, y: Pair) -> Pair:
    high = x[0] / y[0]
    product, rest = _two_product(y[0], high)
    product, low = _fast_two_sum(product, y[1] * high)
    product, low = _fast_two_sum(product, low + rest)
    return _fast_two_sum(high, ((x[0] - product) + (x[1] - low)) / y[0])


def _root(x: Pair) -> Pair:
    high = np.sqrt(x[0])
    product, rest = _two_product(high, high)
    return _fast_two_sum(high, (((x[0] - product) - rest) + x[1]) / (2 * high))
