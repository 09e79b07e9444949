"""Arrays of balls, and the few operations on them that attention is made of.

Everything runs at the precision that is current in FLINT (``flint.ctx``), which is state of the whole process: the
caller sets it with ``flint.ctx.workprec``, and two threads may not share the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import numpy as np
from flint import arb, arb_mat
from numpy.typing import NDArray

from attncheck.spec import Shape

_ZERO, _ONE = arb(0), arb(1)

# Measured with python-flint 0.9 at 128 bits: from 64 x 64 x 64 on, a product costs 0.3 of what it costs just below.
_BLOCKED_FROM = 64
_BLOCKED_GAIN = 2.5


@dataclass(frozen=True, eq=False)
class BallArray:
    """An array of balls of rank 2 or more: one matrix (shape[-2], shape[-1]) per index of the leading axes, in C order.

    ``attended``, of the whole shape, is false where the exact value is -inf; the ball there is a placeholder.
    """

    shape: Shape
    matrices: list[arb_mat]
    attended: NDArray[np.bool_] | None = None

    def entries(self) -> list[arb]:
        """Return every ball, in C order."""
        if len(self.matrices) == 1:
            return self.matrices[0].entries()
        return list(chain.from_iterable(matrix.entries() for matrix in self.matrices))

    def rows(self) -> Iterator[list[arb]]:
        """Go through the rows, in C order."""
        width = self.shape[-1]
        for matrix in self.matrices:
            entries = matrix.entries()
            for start in range(0, self.shape[-2] * width, width or 1):
                yield entries[start : start + width]
            if not width:
                yield from ([] for _ in range(self.shape[-2]))

    def mapped(self, function: Callable[[arb], arb]) -> BallArray:
        """Apply a function to every ball; arb_mat's own ``exp`` is the matrix exponential."""
        return replace(self, matrices=[_matrix(self.shape, map(function, m.entries())) for m in self.matrices])

    def scaled(self, factor: arb) -> BallArray:
        """Multiply by one number."""
        return replace(self, matrices=[matrix * factor for matrix in self.matrices])

    def transposed(self) -> BallArray:
        """Swap the last two axes of an array without -inf."""
        *leading, rows, columns = self.shape
        return BallArray((*leading, columns, rows), [matrix.transpose() for matrix in self.matrices])

    def __matmul__(self, other: BallArray) -> BallArray:
        leading = np.broadcast_shapes(self.shape[:-2], other.shape[:-2])
        pairs = zip(_spread(self, leading), _spread(other, leading), strict=True)
        return BallArray((*leading, self.shape[-2], other.shape[-1]), [_product(left, right) for left, right in pairs])

    def __add__(self, other: BallArray) -> BallArray:
        sums = [left + right for left, right in zip(self.matrices, other.matrices, strict=True)]
        return BallArray(self.shape, sums, _both(self.attended, other.attended))

    def for_heads_of(self, query: BallArray) -> BallArray:
        """Repeat each head of keys or values for the query heads that share it: (B, Hkv, L, D) -> (B, H, L, D)."""
        own, heads = (balls.shape[-3] if len(balls.shape) > 2 else 1 for balls in (self, query))
        if own == 1 or own >= heads:
            return self
        matrices = [matrix for matrix in self.matrices for _ in range(heads // own)]
        return BallArray((*self.shape[:-3], heads, *self.shape[-2:]), matrices)

    def with_zero_rows(self, count: int) -> BallArray:
        """Put rows of zeros behind every matrix."""
        *leading, rows, columns = self.shape
        zeros = [_ZERO] * (count * columns)
        matrices = [arb_mat(rows + count, columns, matrix.entries() + zeros) for matrix in self.matrices]
        return BallArray((*leading, rows + count, columns), matrices)

    def with_last_column(self, column: BallArray) -> BallArray:
        """Put other balls, (..., 1), in the place of the last column."""
        pairs = zip(self.rows(), column.entries(), strict=True)
        entries = list(chain.from_iterable([*row[:-1], last] for row, last in pairs))
        if self.attended is None and column.attended is None:
            return from_entries(self.shape, entries)
        attended = np.ones(self.shape, np.bool_) if self.attended is None else self.attended.copy()
        attended[..., -1:] = True if column.attended is None else column.attended
        return from_entries(self.shape, entries, attended)

    def restricted_to(self, allowed: NDArray[np.bool_] | None) -> BallArray:
        """Set to -inf what is not allowed."""
        return self if allowed is None else replace(self, attended=_both(self.attended, allowed))


@dataclass(frozen=True, eq=False)
class Exponentials:
    """e^(x - shift) per score x, exactly 0 where it is -inf; per row the shift, any number, and the sum."""

    terms: BallArray
    shift: list[arb]
    total: list[arb]


def from_numpy(array: NDArray[Any]) -> BallArray:
    """Take stored numbers, of rank 2 or more, as exact; -inf becomes a place that is not attended."""
    stored = array.astype(np.float64)  # arb takes no number of NumPy's but float64
    attended = None
    if not np.isfinite(stored).all():
        attended = stored != -np.inf
        stored = np.where(attended, stored, 0)
    *leading, rows, columns = stored.shape
    flat = stored.reshape(math.prod(leading), rows * columns).tolist()
    return BallArray(stored.shape, [arb_mat(rows, columns, numbers) for numbers in flat], attended)


def from_entries(shape: Shape, entries: list[arb], attended: NDArray[np.bool_] | None = None) -> BallArray:
    """Lay balls, in C order, out in a shape of rank 2 or more."""
    size = shape[-2] * shape[-1]
    starts = range(0, math.prod(shape[:-2]) * size, size) if size else [0] * math.prod(shape[:-2])
    return BallArray(shape, [_matrix(shape, entries[start : start + size]) for start in starts], attended)


def unit_rows(balls: BallArray) -> BallArray:
    """Divide each row by its Euclidean length."""
    unit: list[arb] = []
    for row in balls.rows():
        length = sum((entry * entry for entry in row), _ZERO).sqrt()
        unit += [entry / length for entry in row]
    return from_entries(balls.shape, unit)


def outer_sum(left: BallArray, right: BallArray) -> BallArray:
    """Add every row of one to every row of the other: (..., Lq, A), (..., Lk, A) -> (..., Lq, Lk, A)."""
    *leading, rows, width = left.shape
    length = right.shape[-2]
    matrices = chain.from_iterable([matrix] * rows for matrix in right.matrices)
    pairs = zip(left.rows(), matrices, strict=True)
    sums = [arb_mat(length, width, row * length) + matrix for row, matrix in pairs]
    return BallArray((*leading, rows, length, width), sums)


def merge_heads(balls: BallArray) -> BallArray:
    """Lay the heads side by side: (B, H, L, D) -> (B, L, H*D)."""
    batch, heads, length, width = balls.shape
    rows = list(balls.rows())
    order = np.arange(len(rows)).reshape(batch, heads, length).swapaxes(1, 2).ravel()
    return from_entries((batch, length, heads * width), list(chain.from_iterable(rows[i] for i in order)))


def summed_in_groups(balls: BallArray, heads: int) -> BallArray:
    """Add the heads of each group up: (B, H, L, D) -> (B, Hkv, L, D)."""
    group = balls.shape[-3] // heads
    if group == 1:
        return balls
    starts = range(0, len(balls.matrices), group)
    sums = [sum(balls.matrices[start + 1 : start + group], balls.matrices[start]) for start in starts]
    return BallArray((*balls.shape[:-3], heads, *balls.shape[-2:]), sums)


def exponentials(logits: BallArray, *, uniform: int = 0) -> Exponentials:
    """Take exponentials relative to each row's largest score.

    Softmax does not depend on the shift, so any number will do, exactly; the midpoint of the largest keeps every
    exponential near or below 1. Balls themselves have no order: a < b is false when they overlap. In a row without a
    key there is none, or the first ``uniform`` ones count alike.
    """
    *leading, length = logits.shape
    attended = logits.attended
    flags = None if attended is None else attended.reshape(math.prod(leading), length).tolist()
    terms: list[arb] = []
    shift, total = [], []
    for index, row in enumerate(logits.rows()):
        members = row if flags is None else list(compress(row, flags[index]))
        if uniform and not members:
            terms += [_ONE] * uniform + [_ZERO] * (length - uniform)
            shift.append(_ZERO)
            total.append(arb(uniform))
            continue
        top = max(map(arb.mid, members), default=_ZERO)
        taken = [(member - top).exp() for member in members]
        shift.append(top)
        total.append(sum(taken, _ZERO))
        if flags is None:
            terms += taken
        else:
            following = iter(taken)
            terms += [next(following) if flag else _ZERO for flag in flags[index]]
    return Exponentials(from_entries(logits.shape, terms), shift, total)


def normalised(powers: Exponentials) -> BallArray:
    """Divide each row by its sum: the weights; a row without a term stays 0."""
    weights: list[arb] = []
    for row, total in zip(powers.terms.rows(), powers.total, strict=True):
        if total.is_zero():
            weights += row
        else:
            inverse = 1 / total
            weights += [entry * inverse for entry in row]
    return from_entries(powers.terms.shape, weights)


def log_sum(powers: Exponentials) -> BallArray:
    """Return the logarithm of each row's sum of e^x, -inf for a row without a term: (..., Lq, Lk) -> (..., Lq, 1)."""
    return log_of_sums((*powers.terms.shape[:-1], 1), powers.shift, powers.total)


def log_of_sums(shape: Shape, shift: list[arb], totals: list[arb]) -> BallArray:
    """Return the logarithms of sums, each plus its shift; -inf for a sum without a term."""
    full = [not total.is_zero() for total in totals]
    pairs = zip(shift, totals, full, strict=True)
    sums = [top + total.log() if some else _ZERO for top, total, some in pairs]
    return from_entries(shape, sums, None if all(full) else np.array(full, dtype=np.bool_).reshape(shape))


def _product(left: arb_mat, right: arb_mat) -> arb_mat:
    """Multiply, with rows and columns of zeros added where that lets FLINT's blocked product start."""
    shape = (left.nrows(), left.ncols(), right.ncols())
    rows, inner, columns = (max(length, _BLOCKED_FROM) for length in shape)
    if (rows, inner, columns) == shape or rows * inner * columns > _BLOCKED_GAIN * math.prod(shape):
        return left * right
    entries = (_padded(left, rows, inner) * _padded(right, inner, columns)).entries()
    kept = [entries[start : start + shape[2]] for start in range(0, shape[0] * columns, columns)]
    return arb_mat(shape[0], shape[2], list(chain.from_iterable(kept)))


def _padded(matrix: arb_mat, rows: int, columns: int) -> arb_mat:
    own_rows, width = matrix.nrows(), matrix.ncols()
    if (own_rows, width) == (rows, columns):
        return matrix
    entries, fill = matrix.entries(), [_ZERO] * (columns - width)
    kept = chain.from_iterable(entries[row * width : (row + 1) * width] + fill for row in range(own_rows))
    return arb_mat(rows, columns, [*kept, *([_ZERO] * ((rows - own_rows) * columns))])


def _matrix(shape: Shape, entries: Any) -> arb_mat:
    return arb_mat(shape[-2], shape[-1], list(entries))


def _spread(balls: BallArray, leading: Shape) -> list[arb_mat]:
    """Return one matrix per index of ``leading``, the same one again where the array's own axis has length 1."""
    own = balls.shape[:-2]
    if own == leading:
        return balls.matrices
    numbers = np.arange(len(balls.matrices)).reshape(own)
    return [balls.matrices[number] for number in np.broadcast_to(numbers, leading).ravel()]


def _both(one: NDArray[np.bool_] | None, other: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other
