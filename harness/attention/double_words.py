"""Double words: unevaluated sums of two float64 numbers, high = fl(high + low), each with a proven radius.

``docs/numerics.md``, section 2, has the algorithms, and proves every error and radius below. They use no fused
multiply-add, because NumPy has none. If a number is not finite, or so small that nothing is proven, its radius is not
finite either, and stays so. The oracle then evaluates the stage with ``balls``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
from flint import arb, ctx
from numpy.typing import NDArray

from attncheck.attention.exact_array import ExactArray, Flags, Real, intersect_flags

Pair = tuple[Real, Real]
Parts = tuple[Real, Real, Real]
Exponents = NDArray[np.int32]

U2 = 2.0**-106
"""u^2."""
SUM_ERROR, PRODUCT_ERROR, QUOTIENT_ERROR, ROOT_ERROR = 3 * U2, 7 * U2, 16 * U2, 4 * U2
ONE_SUM_ERROR = 2 * U2
EXP_ERROR = 4 * U2
"""Relative: 2^-106.4 from reducing the argument, u^2/2 from each table, 2u^2 from the last sum, and little more."""
POLYNOMIAL_ERROR = 2.0**-102
"""Relative, of e^x - 1 if x is not reduced: 7u^2 from the last product, 2u^2 from the sum in it, and little more."""
LOG_ERROR = 2.0**-101
"""Absolute: that of the exponential, the product with it, and the logarithm of 1 + d up to d^3 < 2^-135."""
MAX_SLICES = 8
"""A choice: sums that need more slices go to ``balls``; each further slice costs as many products as there are
slices."""
SLICE_BITS = 22
"""At most: two slices hold less than 53 bits, so that the lower word comes in behind them."""
KEPT_BITS = 100
"""What is left of products of matrices, and what is rounded before it is a double word, is below 2^-KEPT_BITS of every
sum of absolute terms, five times over."""
PLAIN_BITS = 48
"""Sums of products of slices that start so many bits below that are added up in float64: seven roundings of 2^-53, each
of at most 2.6 times what the terms can be."""
_RADIUS_SLACK = 1 + 2.0**-40
"""Room for the rounding of the radii themselves, which are sums of non-negative float64 numbers."""
_NEAR_UNDERFLOW = 2.0**-900
"""Below, underflow counts: in products it enlarges the radius, of quotients and square roots nothing is proven."""
_MAX_SAFE_EXPONENT = 400  # products of two such units, 2^800, and their inverses are numbers of float64
_LEAST_SUBNORMAL = 2.0**-1074
_UNDERFLOW_LOSS = 4 * _LEAST_SUBNORMAL
"""At most what underflow takes from a product: half of 2^-1074 in each of five operations, and in three terms of its
radius."""
_SPLITTER = 2.0**27 + 1  # splits the 53 bits of a float64 number into halves (Veltkamp)
_TABLE_BITS = 10  # 2^(j/1024): the remainder is at most log(2) / 2^11 (docs/numerics.md, section 2)
_NODES_PER_UNIT = 2.0**20
_MAX_NODE_INDEX = 360  # |s| is at most log(2) / 2^11, which is 355 / 2^20
_LARGEST_EXPONENT = 760.0  # e^-760 < 2^-1096 is 0 in float64, and e^760 infinite
_ZERO = np.zeros((1, 1))
_BLOCK_SIZE = 1 << 13
"""Elements: 64 KiB an array, so that the intermediates of a function stay in the cache."""
np.empty((1 << 25) - (1 << 13), np.uint8)  # glibc keeps freed memory below the largest that was freed, 32 MiB at most:
# else it hands every array of 128 KiB and more back to the system, which zeroes its pages anew for the next one.


@dataclass(frozen=True, eq=False)
class DoubleWords(ExactArray):
    """``parts`` are high, low and radius.

    Example:
        >>> from fractions import Fraction
        >>> tenth = 1 / DoubleWords.from_finite_numbers(np.array([[10.0]]))
        >>> high, low, radius = (part.item() for part in tenth.parts)
        >>> high, abs(Fraction(high) + Fraction(low) - Fraction(1, 10)) <= radius < 2.0**-104
        (0.1, True)
    """

    @classmethod
    def from_finite_numbers(cls, numbers: Real) -> Self:
        zero = np.zeros(numbers.shape)
        return cls((numbers, zero, zero))

    @property
    def pair(self) -> Pair:
        """The number without its radius."""
        return self.parts[0], self.parts[1]

    @property
    def radius(self) -> Real:
        """The largest possible distance from the truth; not finite if nothing is known."""
        return self.parts[2]

    def high_low_radius(self) -> Parts:
        high, low, radius = self.parts
        if np.isfinite(high + radius).all():  # and so are both
            return high, low, radius
        known = np.isfinite(high) & np.isfinite(radius)
        return np.where(known, high, 0.0), np.where(known, low, 0.0), np.where(known, radius, np.inf)

    def flag_zeros(self) -> Flags:
        zero: Flags = (self.parts[0] == 0) & (self.radius == 0)
        return zero

    def _with_parts(self, parts: Parts) -> Self:
        return type(self)(parts, self.attended)

    def __neg__(self) -> Self:
        return self._with_parts((-self.parts[0], -self.parts[1], self.radius))

    def _add(self, other: Self) -> Self:
        high, low = _add_pairs(self.pair, other.pair)
        radius = (self.radius + other.radius + SUM_ERROR * np.abs(high)) * _RADIUS_SLACK
        return type(self)((high, low, radius), intersect_flags(self.attended, other.attended))

    def _multiply(self, other: Self) -> Self:
        return self._with_parts(_multiply_with_radius(*self.parts, *other.parts))

    def _divide(self, other: Self) -> Self:
        return self._with_parts(_divide_with_radius(*self.parts, *other.parts))

    def __abs__(self) -> Self:
        sign = np.where(self.parts[0] < 0, -1.0, 1.0)
        return self._with_parts((sign * self.parts[0], sign * self.parts[1], self.radius))

    def _maximum(self, other: Self) -> Self:
        larger = self.select_where((self - other).parts[0] >= 0, other)
        return self._with_parts((*larger.pair, np.maximum(self.radius, other.radius)))

    def sqrt(self) -> Self:
        high = self.parts[0]
        pair = _sqrt_pair(self.pair)
        radius = self.radius / pair[0] * (1 + 2.0**-50) + ROOT_ERROR * pair[0]
        radius = np.where(high > _NEAR_UNDERFLOW, radius * _RADIUS_SLACK, np.where(self.flag_zeros(), 0.0, np.inf))
        return self._with_parts((np.where(high > 0, pair[0], 0.0), np.where(high > 0, pair[1], 0.0), radius))

    def exp(self) -> Self:
        return self._with_parts(_apply_in_blocks(_exp_with_radius, self.parts))

    def log(self) -> Self:
        return self._with_parts(_apply_in_blocks(_log_with_radius, self.parts))

    def tanh(self) -> Self:
        """Return w / (2 - w) with the sign of x, where w = 1 - e^(-2|x|)."""
        size = abs(self)
        lost = -type(self)(_expm1_with_radius(-2 * size.parts[0], -2 * size.parts[1], 2 * size.radius))
        tangent = lost / (2 - lost)
        sign = np.where(self.parts[0] < 0, -1.0, 1.0)
        # At 0 a number moves as far as its operand does: the quotient of a number so small is not proven.
        radius = np.where(self.parts[0] == 0, self.radius, tangent.radius)
        return self._with_parts((sign * tangent.parts[0], sign * tangent.parts[1], radius))

    def _row_sums(self) -> Self:
        """Add halves to halves, until one number is left, and add up the rounding errors next to it."""
        high, low = self.pair
        levels = max(self.shape[-1] - 1, 0).bit_length()
        size, missing = np.abs(high).sum(axis=-1, keepdims=True), (1 << levels) - self.shape[-1]
        if missing:
            high, low = (np.concatenate((word, np.zeros((*self.shape[:-1], missing))), -1) for word in (high, low))
        for half in (1 << level for level in reversed(range(levels))):
            high, rest = _two_sum(high[..., :half], high[..., half:])
            low = rest + (low[..., :half] + low[..., half:])
        radius = self.radius.sum(axis=-1, keepdims=True) + levels * (levels + 3) * U2 * size
        return type(self)((*_two_sum(high, low), radius * _RADIUS_SLACK))

    def __matmul__(self, other: Self) -> Self:
        left, right = _scale_rows_below_one(self.pair, -1), _scale_rows_below_one(other.pair, -2)
        terms = left.magnitudes @ right.magnitudes
        least = float(terms.min(initial=1.0))
        if not least > 0:
            least = float(terms.min(initial=1.0, where=terms > 0))
        high, low, radius, cut = _multiply_slices(left, right, least)
        if cut:
            # A sum without a term is exactly 0; one whose terms are all too small for float64 is not.
            some = (
                True if terms.all() else (left.magnitudes > 0).astype(float) @ (right.magnitudes > 0).astype(float) > 0
            )
            radius = radius + cut * some
        if left.power_of_two is None or right.power_of_two is None:
            made = tuple(np.ldexp(part, left.exponent + right.exponent) for part in (high, low, radius))
        else:
            made = tuple(part * left.power_of_two * right.power_of_two for part in (high, low, radius))
        size, moved = np.abs(made[0]), made[2]
        if not (size.size and size.min() >= _NEAR_UNDERFLOW and size.max() < np.inf):
            some = (high != 0) | (radius > 0)
            moved = (
                moved + _UNDERFLOW_LOSS * (some & (size < _NEAR_UNDERFLOW)) + 0 * size
            )  # not finite if the number is not
        moved = moved + _matmul_radius(self.parts[0], self.radius, other.parts[0], other.radius)
        return type(self)((*made[:2], moved * _RADIUS_SLACK))


def _multiply_with_radius(x: Real, x_low: Real, x_radius: Real, y: Real, y_low: Real, y_radius: Real) -> Parts:
    high, low = _multiply_pairs((x, x_low), (y, y_low))
    size, others = np.abs(x), np.abs(y)
    radius = size * y_radius + x_radius * (others + y_radius) + PRODUCT_ERROR * np.abs(high)
    if not (radius.size and radius.min() >= _NEAR_UNDERFLOW):
        radius = radius + _UNDERFLOW_LOSS * ((size + x_radius > 0) & (others + y_radius > 0))
    return high, low, radius * _RADIUS_SLACK


def _divide_with_radius(x: Real, x_low: Real, x_radius: Real, y: Real, y_low: Real, y_radius: Real) -> Parts:
    high, low = _divide_pairs((x, x_low), (y, y_low))
    size, quotient, least = np.abs(x), np.abs(high), np.abs(y) * (1 - 2.0**-50) - y_radius
    moved = (x_radius + quotient * y_radius) / np.where(least > 0, least, np.nan)
    radius = (moved + QUOTIENT_ERROR * quotient) * _RADIUS_SLACK
    if not (radius.size and radius.min() >= _NEAR_UNDERFLOW and size.min() >= _NEAR_UNDERFLOW):
        radius = radius + _LEAST_SUBNORMAL * ((x_radius > 0) & (moved < _NEAR_UNDERFLOW))
        radius = np.where((size > 0) & (np.minimum(size, quotient) < _NEAR_UNDERFLOW), np.inf, radius)
    return high, low, radius


def _apply_in_blocks(function: Callable[..., Parts], parts: tuple[Real, ...]) -> Parts:
    """Apply a function of many steps to so few elements at a time that its intermediates stay in the cache."""
    size = parts[0].size
    if size <= _BLOCK_SIZE:
        return function(*parts)
    flat = [part.reshape(-1, 1) for part in parts]
    results = np.empty((3, size, 1))
    for start in range(0, size, _BLOCK_SIZE):
        block = slice(start, start + _BLOCK_SIZE)
        results[:, block] = function(*(part[block] for part in flat))
    high, low, radius = results.reshape(3, *parts[0].shape)
    return high, low, radius


def _exp_with_radius(x: Real, x_low: Real, x_radius: Real) -> Parts:
    power = _reduce_exponent(x, x_low)
    nodes = np.rint(power.rest[0] * _NODES_PER_UNIT)
    index = nodes.astype(np.int32) + _MAX_NODE_INDEX
    (far, far_low), (near, near_low) = (
        (word.take(index) for word in _expm1_table()),
        _expm1_near_node(power.rest, nodes),
    )
    # (1 + far) (1 + near) - 1; low words and errors of products are added up in float64.
    product, error = _two_product(far, near)
    rest, first = _two_sum(far, near)
    rest, second = _fast_two_sum(rest, product)
    low = first + second + (far_low + near_low + (error + (far * near_low + far_low * near)))
    head, head_low = power.head
    product, error = _two_product(head, rest)
    high, first = _fast_two_sum(head, product)
    low = first + (head_low + (error + (head * low + head_low * rest)))
    high, low = _ldexp_pair(_fast_two_sum(high, low), power.exponent)
    size = np.abs(high)
    moved = x_radius * (1 + 2.0**-20) if x_radius.max(initial=0) < 2.0**-20 else np.expm1(x_radius)  # e^r - 1
    radius = EXP_ERROR * size + (size + _LEAST_SUBNORMAL) * moved * _RADIUS_SLACK
    return high, low, (radius + _LEAST_SUBNORMAL * (size < _NEAR_UNDERFLOW)) * _RADIUS_SLACK


def _expm1_with_radius(x: Real, x_low: Real, x_radius: Real) -> Parts:
    """Return e^x - 1 for numbers that are not positive, as exact relative to itself as the number is."""
    power = _reduce_exponent(x, x_low)
    head = _ldexp_pair(power.head, power.exponent)
    high, low = _add_pairs(_add_number(head, -np.ones_like(head[0])), _multiply_pairs(head, _expm1_small(power.rest)))
    size, is_polynomial = np.abs(high), head[0] == 1  # true if no multiple of log 2 was subtracted
    error = np.where(is_polynomial, POLYNOMIAL_ERROR * size, 2 * EXP_ERROR * np.maximum(head[0], size))
    radius = error + np.expm1(x_radius) + _UNDERFLOW_LOSS * (x != 0)
    return high, low, radius * _RADIUS_SLACK


def _log_with_radius(x: Real, x_low: Real, x_radius: Real) -> Parts:
    near = np.log(x)
    inverse = _exp_with_radius(-near, np.zeros_like(near), np.zeros_like(near))
    rest = _add_number(_multiply_pairs((x, x_low), inverse[:2]), -np.ones_like(near))
    high, low = _add_number(_add_number(rest, near), -0.5 * rest[0] * rest[0])
    least = x * (1 - 2.0**-50) - x_radius
    radius = LOG_ERROR + x_radius / np.where(least > 0, least, 0.0) + SUM_ERROR * np.abs(high)
    unproven = (np.abs(rest[0]) > 2.0**-45) | ~(least > _NEAR_UNDERFLOW) | ~(near < 600)
    return high, low, np.where(unproven, np.inf, radius * _RADIUS_SLACK)


def _matmul_radius(left: Real, left_radius: Real, right: Real, right_radius: Real) -> Real | float:
    """Return how far a product moves with its operands: r (|y| + r') + |x| r'."""
    right_moves = right_radius.any()
    if not (right_moves or left_radius.any()):
        return 0.0
    left, right = np.abs(left), np.abs(right)
    moved: Real = left_radius @ (right + right_radius) + left @ right_radius if right_moves else left_radius @ right
    if not (moved.size and moved.min() >= _NEAR_UNDERFLOW):
        some, moves, others, others_move = (
            (numbers > 0).astype(float) for numbers in (left + left_radius, left_radius, right, right_radius)
        )
        terms = moves @ others + some @ others_move
        moved = moved + 2 * _LEAST_SUBNORMAL * terms * (moved < _NEAR_UNDERFLOW)
    bound: Real = moved * (1 + (left.shape[-1] + 4) * 2.0**-52)
    return bound


@dataclass(frozen=True, eq=False)
class _ScaledRows:
    """Rows or columns of numbers of at most 1 in size, 2^exponent of which are the operand; ``whole`` are their sizes.

    ``power_of_two`` is 2^exponent, by which it is faster to multiply; None near the ends of float64. ``low`` are the
    lower words, None if there are none; what underflow took is below ``underflow_loss``.
    """

    axis: int
    high: Real
    low: Real | None
    magnitudes: Real
    exponent: Exponents
    power_of_two: Real | None
    underflow_loss: float


def _scale_rows_below_one(pair: Pair, axis: int) -> _ScaledRows:
    """Scale rows (axis -1) or columns (-2) relative to their largest numbers."""
    high, low = pair
    exponent = np.frexp(np.abs(high).max(axis=axis, keepdims=True, initial=0.0))[1]
    unit = np.ldexp(1.0, exponent) if np.abs(exponent).max(initial=0) <= _MAX_SAFE_EXPONENT else None

    def divided(numbers: Real) -> Real:
        quotient: Real = np.ldexp(numbers, -exponent) if unit is None else numbers * (1 / unit)
        return quotient

    first = divided(high)
    whole, second = np.abs(first), divided(low) if low.any() else None
    is_whole = (whole.size and whole.min() >= _NEAR_UNDERFLOW) or np.array_equal(np.ldexp(first, exponent), high)
    return _ScaledRows(axis, first, second, whole, exponent, unit, 0.0 if is_whole else 2.0**-1070)


def _multiply_slices(left: _ScaledRows, right: _ScaledRows, least: float) -> tuple[Real, Real, Real, float]:
    """Multiply by as many slices as the smallest sum of absolute terms needs.

    Products of slices of one size lie side by side, so that each sum of them is one product; the smallest are added up
    first, in float64 as long as that is enough. Returns high, low, what adding up may have rounded, and what all that
    is left out amounts to at most, if there is any term.
    """
    inner = max(left.high.shape[-1], 1)
    bits = min(SLICE_BITS, math.floor((53 - math.log2(2.6 * inner)) / 2))
    needed = KEPT_BITS + math.log2(inner) - math.log2(least)
    most = min(math.ceil(needed / bits), MAX_SLICES)
    plain = max(math.ceil((needed - PLAIN_BITS) / bits), 1)
    rows, columns = _cut_into_slices(left, bits, most), _cut_into_slices(right, bits, most)
    count = rows.count + columns.count - 1
    kept = min(most, count)
    cut = 4 * 2.0 ** (-bits * most) * (rows.is_cut or columns.is_cut or count > kept)
    cut += 2.0 ** (-PLAIN_BITS - bits * plain) * (kept > plain + 1) + left.underflow_loss + right.underflow_loss
    high = low = rounded = _ZERO
    for diagonal in reversed(range(kept)):
        first, stop = max(0, diagonal - columns.count + 1), min(diagonal + 1, rows.count)
        product = rows.select_slices(first, stop) @ columns.select_slices(diagonal + 1 - stop, diagonal + 1 - first)
        if diagonal >= plain or diagonal == kept - 1:
            high = product if high is _ZERO else high + product
        elif low is _ZERO:
            high, low = _two_sum(product, high)
        else:
            high, low = _add_number((high, low), product)
            rounded = rounded + ONE_SUM_ERROR * np.abs(high)
    return high, low, rounded, cut * inner


@dataclass(frozen=True, eq=False)
class _Slices:
    """Slices of rows side by side, or of columns one below the other and in the opposite order.

    ``capacity`` fit into ``pieces``, ``count`` there are, of ``slice_length`` numbers each; what they leave ``is_cut``.
    """

    pieces: Real
    axis: int
    slice_length: int
    capacity: int
    count: int
    is_cut: bool

    def select_slices(self, first: int, stop: int) -> Real:
        """Return slices from one up to another."""
        if self.axis == -1:
            return self.pieces[..., first * self.slice_length : stop * self.slice_length]
        return self.pieces[
            ..., (self.capacity - stop) * self.slice_length : (self.capacity - first) * self.slice_length, :
        ]


def _cut_into_slices(numbers: _ScaledRows, bits: int, max_slices: int) -> _Slices:
    """Cut numbers into multiples of 2^-bits, 2^(-2 bits) and so on, until less than 2^(-bits max_slices) is left."""
    first, second, axis = numbers.high.copy(), numbers.low, numbers.axis
    inner = first.shape[axis]
    shape = list(first.shape)
    shape[axis] *= max_slices
    pieces = np.empty(shape)
    slices = _Slices(pieces, axis, inner, max_slices, max_slices, is_cut=True)
    for index in range(max_slices):
        if second is not None and index and index % 2 == 0:
            first, second = _two_sum(first, second)
        grid = 1.5 * 2.0 ** (52 - bits * (index + 1))  # of which the last bit is the slice's
        piece = np.add(first, grid, out=slices.select_slices(index, index + 1))
        piece -= grid
        first -= piece
        if second is None and not first.any():
            return _Slices(pieces, axis, inner, max_slices, index + 1, is_cut=False)
    return slices


@dataclass(frozen=True, eq=False)
class _ReducedExponent:
    """e^x = 2^exponent head e^rest: head = 2^(j/1024), |rest| < 2^-11."""

    exponent: Exponents
    head: Pair
    rest: Pair


@cache
def _power_of_two_table() -> tuple[Pair, tuple[float, float, float]]:
    """Return 2^(j/1024) for every j, and log(2)/1024 in three parts, the first two of 32 bits."""
    with ctx.workprec(256):
        steps = 1 << _TABLE_BITS
        head = _pair_from_balls([(arb(step) / steps * arb(2).log()).exp() for step in range(steps)])
        step = arb(2).log() / steps
        parts = []
        for bits in (32, 32, 53):
            mantissa, exponent = math.frexp(float(step))
            part = math.ldexp(math.floor(math.ldexp(mantissa, bits)), exponent - bits) if bits < 53 else float(step)
            parts.append(part)
            step -= part
    return head, (parts[0], parts[1], parts[2])


@cache
def _expm1_table() -> Pair:
    """Return e^(k/2^20) - 1 for every k up to 360 in size."""
    with ctx.workprec(256):
        return _pair_from_balls(
            [(arb(node) / _NODES_PER_UNIT).expm1() for node in range(-_MAX_NODE_INDEX, _MAX_NODE_INDEX + 1)]
        )


@cache
def _taylor_coefficients() -> tuple[Pair, Pair]:
    with ctx.workprec(256):
        return _pair_from_balls([arb(1) / 6]), _pair_from_balls([arb(1) / 24])


def _pair_from_balls(numbers: list[arb]) -> Pair:
    high = np.array([float(number) for number in numbers])
    return high, np.array([float(number - first) for number, first in zip(numbers, high.tolist(), strict=True)])


def _reduce_exponent(x: Real, x_low: Real) -> _ReducedExponent:
    """Reduce arguments of the exponential; those beyond 760 in size become 760, which is beyond float64's range."""
    table, parts = _power_of_two_table()
    beyond = np.abs(x) > _LARGEST_EXPONENT
    if beyond.any():
        x, x_low = np.clip(x, -_LARGEST_EXPONENT, _LARGEST_EXPONENT), np.where(beyond, 0.0, x_low)
    steps = np.rint(x * (1 / (parts[0] + parts[1])))
    rest, first = _two_sum(x - steps * parts[0], x_low)  # the difference is exact
    rest, second = _two_sum(rest, -steps * parts[1])
    rest, third = _two_sum(rest, -steps * parts[2])
    number = steps.astype(np.int32)
    index = number & ((1 << _TABLE_BITS) - 1)
    head = table[0].take(index), table[1].take(index)
    return _ReducedExponent(number >> _TABLE_BITS, head, _fast_two_sum(rest, first + second + third))


def _expm1_small(s: Pair) -> Pair:
    """Return e^s - 1 for |s| < 2^-11, as exact relative to itself as s is."""
    sixth, small = _taylor_coefficients()
    tail = s[0] * (1 / 120 + s[0] * (1 / 720 + s[0] * (1 / 5040 + s[0] / 40320)))
    series = _multiply_pairs(s, _add_number(small, tail))
    series = _multiply_pairs(s, _add_pairs(sixth, series))
    series = _multiply_pairs(s, _add_number(series, np.full((1, 1), 0.5)))
    return _multiply_pairs(s, _add_number(series, np.ones((1, 1))))


def _expm1_near_node(s: Pair, nodes: Real) -> Pair:
    """Return e^t - 1 for the remainder t = s - node, |t| <= 2^-21, to within 2^-111; t is exact."""
    t, low = s[0] - nodes / _NODES_PER_UNIT, s[1]
    square = t * t
    upper, lower = _split_halves(t)
    error = (upper * upper - square) + lower * (t + upper)
    high, first = _fast_two_sum(t, 0.5 * square)
    return high, first + (low + (0.5 * error + t * low + t * square * (1 / 6 + t * (1 / 24))))


def _ldexp_pair(pair: Pair, exponent: Exponents) -> Pair:
    return np.ldexp(pair[0], exponent), np.ldexp(pair[1], exponent)


def _two_sum(x: Real, y: Real) -> Pair:
    """Return the sum and its error, exactly (Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _fast_two_sum(x: Real, y: Real) -> Pair:
    """Do the same if x is the larger (Dekker)."""
    total = x + y
    return total, y - (total - x)


def _split_halves(x: Real) -> Pair:
    """Cut into two numbers of 26 bits (Veltkamp)."""
    grown = _SPLITTER * x
    upper = grown - (grown - x)
    return upper, x - upper


def _two_product(x: Real, y: Real) -> Pair:
    """Return the product and its error, exactly except for underflow (Dekker)."""
    product = x * y
    (a, b), (c, d) = _split_halves(x), _split_halves(y)
    return product, (((a * c - product) + a * d) + b * c) + b * d


def _add_pairs(x: Pair, y: Pair) -> Pair:
    high, rest = _two_sum(x[0], y[0])
    low, least = _two_sum(x[1], y[1])
    high, rest = _fast_two_sum(high, rest + low)
    return _fast_two_sum(high, least + rest)


def _add_number(x: Pair, y: Real) -> Pair:
    """Add one float64 number."""
    high, rest = _two_sum(x[0], y)
    return _fast_two_sum(high, x[1] + rest)


def _multiply_pairs(x: Pair, y: Pair) -> Pair:
    high, rest = _two_product(x[0], y[0])
    return _fast_two_sum(high, rest + (x[0] * y[1] + x[1] * y[0]))


def _divide_pairs(x: Pair, y: Pair) -> Pair:
    high = x[0] / y[0]
    product, rest = _two_product(y[0], high)
    product, low = _fast_two_sum(product, y[1] * high)
    product, low = _fast_two_sum(product, low + rest)
    return _fast_two_sum(high, ((x[0] - product) + (x[1] - low)) / y[0])


def _sqrt_pair(x: Pair) -> Pair:
    high = np.sqrt(x[0])
    product, rest = _two_product(high, high)
    return _fast_two_sum(high, (((x[0] - product) - rest) + x[1]) / (2 * high))
