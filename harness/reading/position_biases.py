"""Biases that follow from the positions of queries and keys: ALiBi, and the relative buckets of T5.

Sources: Press et al. 2022 (arXiv 2108.12409) with the authors' code for heads that are no power of two; Raffel et al.
2020 (arXiv 1910.10683) with ``_relative_position_bucket`` of the authors' code.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.array_kinds import RelativeBuckets
from attncheck.reading.bias_kinds import Alibi
from attncheck.reading.mask_kinds import Pattern
from attncheck.reading.masks import PatternFault
from attncheck.spec import Shape

Numbers = NDArray[np.float64]
MAX_BUCKETS = 512
_DIGITS = 60


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head, each the float64 next to it.

    For n heads, a power of two, head h has 2^(-8 (h + 1) / n). For another number, the largest power of two n below it
    has its slopes first, and the rest has every other slope of 2n heads.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [_power_of_two(-8 * (head + 1), below) for head in range(below)]
    return slopes + [_power_of_two(-8 * (2 * head + 1), 2 * below) for head in range(heads - below)]


def _power_of_two(exponent: int, divisor: int) -> float:
    """Return 2^(exponent / divisor), rounded once, the same on every machine."""
    with localcontext() as context:
        context.prec = _DIGITS
        return float(Decimal(2) ** (Decimal(exponent) / divisor))


def alibi_shape(source: Alibi) -> Shape:
    """Return the shape of an ALiBi bias, (H, Lq, T)."""
    return (source.alibi, *source.shape)


def make_alibi(source: Alibi) -> Numbers:
    """Return minus slope times distance for each head, query and key."""
    slopes = np.array(alibi_slopes(source.alibi))[:, np.newaxis, np.newaxis]
    return np.asarray(-(slopes * np.abs(_distance(source))) + 0.0)  # no negative zero


def largest_of_alibi(source: Alibi) -> float:
    """Return a bound on the numbers of an ALiBi bias, in magnitude."""
    return max(alibi_slopes(source.alibi)) * (source.offset + sum(source.shape))


def bucket_shape(source: RelativeBuckets, table: Shape) -> Shape:
    """Return the shape of a bias of relative buckets, (H, Lq, T). Raises ``PatternFault``."""
    if len(table) != 2:
        shown = "x".join(map(str, table)) or "scalar"
        raise PatternFault(("relative_buckets",), f"expected a table (buckets, H), got shape {shown}")
    buckets, least = table[0], 4 if source.bidirectional else 2
    if not least <= buckets <= MAX_BUCKETS or (source.bidirectional and buckets % 2):
        even = "an even number of " if source.bidirectional else ""
        raise PatternFault(
            ("relative_buckets",), f"expected {even}{least} to {MAX_BUCKETS} rows, one for each bucket, got {buckets}"
        )
    exact = _exact_buckets(buckets, source.bidirectional)
    if source.max_distance <= exact:
        raise PatternFault(
            ("max_distance",), f"expected more than {exact}, as distances below that have a bucket of their own"
        )
    return (table[1], *source.shape)


def make_bucket_bias(source: RelativeBuckets, table: NDArray[Any]) -> NDArray[Any]:
    """Look up the number of each distance's bucket: (buckets, H) -> (H, Lq, T)."""
    buckets = relative_buckets(_distance(source), len(table), source.max_distance, bidirectional=source.bidirectional)
    return np.moveaxis(table[buckets], -1, 0)


def relative_buckets(
    distance: NDArray[np.int64], buckets: int, max_distance: int, *, bidirectional: bool
) -> NDArray[np.int64]:
    """Return the bucket of each distance j - p, exactly.

    Half of the buckets hold one distance each. The other half is as wide as a geometric sequence up to
    ``max_distance``: of e exact buckets and m others, distance n is in bucket e + floor(m log(n / e) / log(M / e)), at
    most the last. Integers tell where that floor steps, so that no logarithm is rounded.
    """
    first: NDArray[np.int64] = np.zeros(distance.shape, np.int64)
    back = np.maximum(-distance, 0)
    exact = _exact_buckets(buckets, bidirectional)
    if bidirectional:
        buckets //= 2
        first, back = np.where(distance > 0, buckets, 0), np.abs(distance)
    steps = np.array(_steps(exact, buckets - exact, max_distance), np.int64)
    wide = exact + np.searchsorted(steps, back, side="right")
    return np.asarray(first + np.where(back < exact, back, wide))


@lru_cache
def _steps(exact: int, others: int, max_distance: int) -> list[int]:
    """Return the least distance of each bucket behind the first one that holds several distances."""
    return [_least(exact, others, max_distance, step) for step in range(1, others)]


def _least(exact: int, others: int, max_distance: int, step: int) -> int:
    """Return the least n with others * log(n / exact) >= step * log(max_distance / exact)."""
    wanted = max_distance**step * exact ** (others - step)  # n^others >= this
    low, high = exact, max_distance
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**others >= wanted else (middle + 1, high)
    return low


def _exact_buckets(buckets: int, bidirectional: bool) -> int:
    return (buckets // 2 if bidirectional else buckets) // 2


def _distance(source: Pattern) -> NDArray[np.int64]:
    """Return how far each key stands behind each query, j - p: (Lq, T)."""
    queries, keys = source.shape
    return np.asarray(np.arange(keys) - (source.offset + np.arange(queries))[:, np.newaxis])
