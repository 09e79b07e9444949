"""Kernels with 16-bit ends: inputs are widened to float32, results are rounded once, and what is between is stated.

In float64 and float32 nothing is rounded in between, so that one kernel serves all four dtypes. Other arithmetic comes
first: narrower numbers inside wider arrays, and the same products and sums in other orders and widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import Stages
from attncheck.mutation.mutant import OPERATIONS, Steps, Variant
from attncheck.spec import ON_SCORES, STAGE_SPECS
from attncheck.spec import OPERATIONS as SPECS

Array = NDArray[Any]
Store = Callable[[Array], Array]
"""How an intermediate is stored: rounded to something, or left as it is."""

_SIGNIFICAND_BITS = {"bfloat16": 8, "tf32": 11}


def exactly(array: Array) -> Array:
    """Store without rounding."""
    return array


def to_bits(array: Array, bits: int, *, truncate: bool = False) -> Array:
    """Round (or truncate towards zero) to a significand of so many bits; the exponent keeps its range."""
    significand, exponent = np.frexp(array)
    integral = (np.trunc if truncate else np.rint)(significand * 2.0**bits)
    rounded: Array = np.ldexp(integral, exponent - bits).astype(array.dtype)
    return rounded


def bfloat16(array: Array) -> Array:
    """Round to bfloat16's precision."""
    return to_bits(array, _SIGNIFICAND_BITS["bfloat16"])


def truncated_bfloat16(array: Array) -> Array:
    """Cut off what bfloat16 has no bits for."""
    return to_bits(array, _SIGNIFICAND_BITS["bfloat16"], truncate=True)


def tf32(array: Array) -> Array:
    """Round to TF32's precision."""
    return to_bits(array, _SIGNIFICAND_BITS["tf32"])


def truncated_tf32(array: Array) -> Array:
    """Cut off what TF32 has no bits for."""
    return to_bits(array, _SIGNIFICAND_BITS["tf32"], truncate=True)


def float16(array: Array) -> Array:
    """Round to float16, its range included: above 65504 is infinity."""
    return array.astype(np.float16).astype(array.dtype)


def float32(array: Array) -> Array:
    """Round to float32."""
    return array.astype(np.float32).astype(array.dtype)


def sequential_sum(array: Array, store: Store = exactly) -> Array:
    """Add along the last axis from the first to the last, each partial sum stored; the axis is kept."""
    total = np.zeros((*array.shape[:-1], 1), array.dtype)
    for position in range(array.shape[-1]):
        total = store(total + array[..., position : position + 1])
    return total


def sequential_matmul(left: Array, right: Array, store: Store = exactly) -> Array:
    """Multiply matrices with one running sum per element, each partial sum stored."""
    product = np.zeros((*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]))
    product = product.astype(left.dtype)
    for position in range(left.shape[-1]):
        term = left[..., :, position : position + 1] * right[..., position : position + 1, :]
        product = store(product + term)
    return product


def reversed_matmul(left: Array, right: Array) -> Array:
    """Multiply matrices, terms in reversed order."""
    return np.asarray(np.ascontiguousarray(left[..., ::-1]) @ np.ascontiguousarray(right[..., ::-1, :]))


def pairwise_sum(terms: Array) -> Array:
    """Add neighbours, then their sums, and so on."""
    while terms.shape[-1] > 1:
        odd = terms[..., terms.shape[-1] // 2 * 2 :]
        terms = np.concatenate([terms[..., :-1:2] + terms[..., 1::2], odd], axis=-1)
    return np.asarray(terms.sum(axis=-1, keepdims=True))


def pairwise_matmul(left: Array, right: Array) -> Array:
    """Multiply matrices by halves of the inner axis."""
    parts = max(1, left.shape[-1] // 2)
    if left.shape[-1] < 2:
        return np.asarray(left @ right)
    return pairwise_matmul(left[..., :parts], right[..., :parts, :]) + pairwise_matmul(
        left[..., parts:], right[..., parts:, :]
    )


def wider(operation: Callable[..., Array]) -> Callable[..., Array]:
    """Accumulate in float64 and round once."""

    def run(*arrays: Array) -> Array:
        return operation(*(array.astype(np.float64) for array in arrays)).astype(arrays[0].dtype)

    return run


def fused_multiply_add(left: Array, right: Array) -> Array:
    """Multiply matrices with one rounding per step: float64 holds a float32 product exactly."""
    product = np.zeros((*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]))
    for position in range(left.shape[-1]):
        term = left[..., :, position : position + 1].astype(np.float64) * right[..., position : position + 1, :]
        product = (product + term).astype(left.dtype).astype(np.float64)
    return product.astype(left.dtype)


def einsum(left: Array, right: Array) -> Array:
    """Multiply matrices by einsum."""
    return np.asarray(np.einsum("...ij,...jk->...ik", left, right))


def by_transposes(left: Array, right: Array) -> Array:
    """Multiply matrices as A B = (B^T A^T)^T, from copies."""
    swapped = np.swapaxes(right, -1, -2).copy() @ np.swapaxes(left, -1, -2).copy()
    return np.swapaxes(swapped, -1, -2).copy()


def by_rows(left: Array, right: Array) -> Array:
    """Multiply matrices one row at a time."""
    rows = [left[..., row : row + 1, :] @ right for row in range(left.shape[-2])]
    return np.concatenate(rows, axis=-2) if rows else np.asarray(left @ right)


def tanh_by_ratio(argument: Array) -> Array:
    """Return tanh as a ratio of exponentials, which overflow."""
    power = np.exp(2 * argument)
    return np.asarray((power - 1) / (power + 1))


def tanh_by_pade(argument: Array) -> Array:
    """Return Pade's approximation of tanh, x (27 + x^2) / (27 + 9 x^2), cut off at 1."""
    square = argument * argument
    return np.asarray(np.clip(argument * (27 + square) / (27 + 9 * square), -1, 1))


NARROW = ("bfloat16", "float16")
ALL = ("float64", "float32", *NARROW)
NEVER_RETURNED = frozenset(ON_SCORES)
"""What a fused kernel holds in tiles and never as a whole."""
Inside: TypeAlias = Callable[[Store], Steps]
"""Makes the steps that run between the ends; it is handed how a number is stored in the format of the ends."""


def stored_as(dtype: np.dtype[Any]) -> Store:
    """Round to a 16-bit format and widen again."""
    return lambda array: array.astype(dtype).astype(array.dtype)


STATISTICS = frozenset(name for name, spec in STAGE_SPECS.items() if spec.may_be_wide)
"""What a kernel may return in float32, whatever its ends are."""


class Kernel(Variant):
    """A kernel that widens, computes and narrows, all but its ``wide`` stages; the steps of ``inside`` compute."""

    def __init__(
        self, inside: Inside, *, hidden: frozenset[str] = NEVER_RETURNED, wide: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(hidden=hidden)
        self._wide = wide
        self.steps = None  # they follow from the ends
        self._inside = inside
        self._variants: dict[str | None, Variant] = {}
        for name in OPERATIONS:
            self._offer(name, partial(self._between_ends, name))

    def _between_ends(self, name: str, *arrays: Any, **given: Any) -> Stages:
        ends = next((each.dtype for each in (*arrays, *given.values()) if _is_narrow(each)), None)
        variant = self._variant(ends)
        widened = {key: _widened(each) for key, each in given.items()}
        stages: Stages = getattr(variant, name)(*map(_widened, arrays), **widened)
        if ends is None:
            return stages
        wide = self._wide | (SPECS[name].statistics if name in SPECS else frozenset())
        return {stage: array if stage in wide else array.astype(ends) for stage, array in stages.items()}

    def _variant(self, ends: np.dtype[Any] | None) -> Variant:
        """Return what computes between ends of a format, which is made once."""
        name = None if ends is None else ends.name
        if name not in self._variants:
            self._variants[name] = Variant(self._inside(exactly if ends is None else stored_as(ends)))
        return self._variants[name]


def _is_narrow(given: Any) -> bool:
    return isinstance(given, np.ndarray) and given.dtype.name in NARROW


def _widened(given: Any) -> Any:
    return given.astype(np.float32) if _is_narrow(given) else given
