"""Kernels with 16-bit ends: inputs are widened to float32, results are rounded once, and what is between is stated.

In float64 and float32 nothing is rounded in between, so that one kernel serves all four dtypes. First comes what these
are made of: narrower numbers inside wider arrays, the same products and sums in tiles, in other orders and widths, and
calls with other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Stages
from attncheck.mutation.mutant import OPERATIONS, Steps, Variant
from attncheck.spec import OPERATIONS as SPECS
from attncheck.spec import STAGE_SPECS, STAGES_ON_SCORES

Array = NDArray[Any]
Store = Callable[[Array], Array]
"""How an intermediate is stored: rounded to something, or left as it is."""

Product: TypeAlias = Callable[[Array, Array], Array]


def store_exactly(array: Array) -> Array:
    """Store without rounding."""
    return array


def round_to_bits(array: Array, bits: int, *, truncate: bool = False) -> Array:
    """Round (or truncate towards zero) to a significand of so many bits; the exponent keeps its range.

    Example:
        >>> [round_to_bits(np.array([1.2, 1.3]), bits=2, truncate=cut).tolist() for cut in (False, True)]
        [[1.0, 1.5], [1.0, 1.0]]
    """
    significand, exponent = np.frexp(array)
    integral = (np.trunc if truncate else np.rint)(significand * 2.0**bits)
    rounded: Array = np.ldexp(integral, exponent - bits).astype(array.dtype)
    return rounded


bfloat16: Store = partial(round_to_bits, bits=8)
"""Round to bfloat16's precision."""
truncated_bfloat16: Store = partial(round_to_bits, bits=8, truncate=True)
"""Cut off what bfloat16 has no bits for."""
tf32: Store = partial(round_to_bits, bits=11)
"""Round to TF32's precision."""
truncated_tf32: Store = partial(round_to_bits, bits=11, truncate=True)
"""Cut off what TF32 has no bits for."""


def store_in_format(dtype: Any) -> Store:
    """Round to a format, its range included, and widen again."""
    return lambda array: array.astype(dtype).astype(array.dtype)


float16, float32 = store_in_format(np.float16), store_in_format(np.float32)
"""Round to float16, in which what is above 65504 is infinity, or to float32."""


def tile_slices(length: int, tile: int) -> list[slice]:
    """Cut a length into tiles."""
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def pad_last_axis(array: Array, multiple: int, number: float = 0) -> Array:
    """Extend the last axis to a multiple of a length, filled with a number.

    Example:
        >>> pad_last_axis(np.ones((2, 5)), 4).shape
        (2, 8)
    """
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % multiple)], constant_values=number)


def sum_in_order(parts: Iterable[Array], like: Array, store: Store = store_exactly) -> Array:
    """Add parts one after the other, and round each partial sum by ``store``."""
    total = np.zeros((), like.dtype)
    for part in parts:
        total = store(total + part)
    return np.asarray(total)


def tiled_product(terms: int, store: Store = store_exactly, product: Product = np.matmul) -> Product:
    """Return a matrix product over tiles of the inner axis that rounds the running sum after each tile."""

    def run(left: Array, right: Array) -> Array:
        tiles = tile_slices(left.shape[-1], terms)
        parts = (product(left[..., tile], right[..., tile, :]) for tile in tiles)
        return sum_in_order(parts, left, store) if tiles else product(left, right)

    return run


def product_over_queries(product: Product) -> Product:
    """Sum over queries, as a backward pass does for keys and values, by a product of matrices."""
    return lambda weights, rows: product(np.swapaxes(weights, -1, -2), rows)


def tiled_row_sum(terms: int, store: Store = store_exactly) -> Callable[[Array], Array]:
    """Return a row sum over tiles that rounds the running sum after each tile, and keeps the axis."""

    def run(row: Array) -> Array:
        tiles = tile_slices(row.shape[-1], terms)
        parts = (numpy_backend._row_sum(row[..., tile]) for tile in tiles)
        return sum_in_order(parts, row, store) if tiles else numpy_backend._row_sum(row)

    return run


def change_call(function: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Steps:
    """Change the arguments of a function of the contract.

    ``change`` gets the arguments by name and returns the changed ones; None leaves an argument out.
    """
    right = getattr(numpy_backend, function)
    parameters = signature(right)

    def run(*arrays: Any, **keywords: Any) -> Stages:
        bound = parameters.bind(*arrays, **keywords)
        changed = {**bound.arguments, **change(bound.arguments)}
        bound.arguments.clear()
        bound.arguments.update({name: value for name, value in changed.items() if value is not None})
        stages: Stages = right(*bound.args, **bound.kwargs)
        return stages

    return {function: run}


def change_argument(function: str, name: str, change: Callable[[Any], Any]) -> Steps:
    """Change one argument of a function of the contract, if it is given."""

    def changed(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        value = arguments.get(name)
        return {} if value is None or value is False else {name: change(value)}

    return change_call(function, changed)


def sequential_sum(array: Array, store: Store = store_exactly) -> Array:
    """Add along the last axis from the first to the last, each partial sum stored; the axis is kept."""
    return tiled_row_sum(1, store)(array)


def sequential_matmul(left: Array, right: Array, store: Store = store_exactly) -> Array:
    """Multiply matrices with one running sum per element, each partial sum stored."""
    return tiled_product(1, store, np.multiply)(left, right) if left.shape[-1] else np.asarray(left @ right)


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


def accumulate_in_float64(operation: Callable[..., Array]) -> Callable[..., Array]:
    """Accumulate in float64 and round once."""

    def run(*arrays: Array) -> Array:
        return operation(*(array.astype(np.float64) for array in arrays)).astype(arrays[0].dtype)

    return run


def tanh_by_ratio(argument: Array) -> Array:
    """Return tanh as a ratio of exponentials, which overflow."""
    power = np.exp(2 * argument)
    return np.asarray((power - 1) / (power + 1))


def tanh_by_pade(argument: Array) -> Array:
    """Return Pade's approximation of tanh, x (27 + x^2) / (27 + 9 x^2), cut off at 1."""
    square = argument * argument
    return np.asarray(np.clip(argument * (27 + square) / (27 + 9 * square), -1, 1))


NARROW_DTYPES = ("bfloat16", "float16")
ALL_DTYPES = ("float64", "float32", *NARROW_DTYPES)
UNRETURNED_STAGES = frozenset(STAGES_ON_SCORES)
"""What a fused kernel holds in tiles and never as a whole."""
StepsForStore: TypeAlias = Callable[[Store], Steps]
"""Makes the steps that run between the ends; it is handed how a number is stored in the format of the ends."""


WIDE_STAGES = frozenset(name for name, spec in STAGE_SPECS.items() if spec.may_be_wide)
"""What a kernel may return in float32, whatever its ends are."""


class Kernel(Variant):
    """A kernel that widens, computes and narrows, all but its ``wide`` stages; the steps of ``inside`` compute."""

    def __init__(
        self, inside: StepsForStore, *, hidden: frozenset[str] = UNRETURNED_STAGES, wide: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(hidden=hidden)
        self._wide = wide
        self.steps = None  # they follow from the ends
        self._inside = inside
        self._variants: dict[str | None, Variant] = {}
        for name in OPERATIONS:
            self._offer(name, partial(self._between_ends, name))

    def _between_ends(self, name: str, *arrays: Any, **keywords: Any) -> Stages:
        ends = next((argument.dtype for argument in (*arrays, *keywords.values()) if _is_narrow(argument)), None)
        variant = self._variant(ends)
        widened = {key: _widen(argument) for key, argument in keywords.items()}
        stages: Stages = getattr(variant, name)(*map(_widen, arrays), **widened)
        if ends is None:
            return stages
        wide = self._wide | (SPECS[name].row_statistics if name in SPECS else frozenset())
        return {stage: array if stage in wide else array.astype(ends) for stage, array in stages.items()}

    def _variant(self, ends: np.dtype[Any] | None) -> Variant:
        """Return the variant that computes between ends of a format; each is made once."""
        name = None if ends is None else ends.name
        if name not in self._variants:
            self._variants[name] = Variant(self._inside(store_exactly if ends is None else store_in_format(ends)))
        return self._variants[name]


def _is_narrow(argument: Any) -> bool:
    return isinstance(argument, np.ndarray) and argument.dtype.name in NARROW_DTYPES


def _widen(argument: Any) -> Any:
    return argument.astype(np.float32) if _is_narrow(argument) else argument
