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
from attncheck.mutation.mutant import OPERATION_FUNCTIONS, BackendVariant, StepReplacements
from attncheck.spec import OPERATIONS as SPECS
from attncheck.spec import STAGE_SPECS, STAGES_ON_SCORES

Array = NDArray[Any]
Rounding = Callable[[Array], Array]
"""How an intermediate is stored: rounded to something, or left as it is."""

MatrixProduct: TypeAlias = Callable[[Array, Array], Array]


def leave_unrounded(array: Array) -> Array:
    """Return the array without rounding it."""
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


round_to_bfloat16: Rounding = partial(round_to_bits, bits=8)
"""Round to bfloat16's precision."""
truncate_to_bfloat16: Rounding = partial(round_to_bits, bits=8, truncate=True)
"""Cut off what bfloat16 has no bits for."""
round_to_tf32: Rounding = partial(round_to_bits, bits=11)
"""Round to TF32's precision."""
truncate_to_tf32: Rounding = partial(round_to_bits, bits=11, truncate=True)
"""Cut off what TF32 has no bits for."""


def rounding_to_dtype(dtype: Any) -> Rounding:
    """Return a function that rounds to a dtype, also to its range, and widens again."""
    return lambda array: array.astype(dtype).astype(array.dtype)


round_to_float16, round_to_float32 = rounding_to_dtype(np.float16), rounding_to_dtype(np.float32)
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


def sum_in_order(parts: Iterable[Array], like: Array, store: Rounding = leave_unrounded) -> Array:
    """Add parts one after the other, and round each partial sum by ``store``."""
    total = np.zeros((), like.dtype)
    for part in parts:
        total = store(total + part)
    return np.asarray(total)


def tiled_product(terms: int, store: Rounding = leave_unrounded, product: MatrixProduct = np.matmul) -> MatrixProduct:
    """Return a matrix product over tiles of the inner axis that rounds the running sum after each tile."""

    def multiply_tiles(left: Array, right: Array) -> Array:
        tiles = tile_slices(left.shape[-1], terms)
        parts = (product(left[..., tile], right[..., tile, :]) for tile in tiles)
        return sum_in_order(parts, left, store) if tiles else product(left, right)

    return multiply_tiles


def product_over_queries(product: MatrixProduct) -> MatrixProduct:
    """Return a sum over queries, as in the backward pass of keys and values, by a product of matrices."""
    return lambda weights, rows: product(np.swapaxes(weights, -1, -2), rows)


def tiled_row_sum(terms: int, store: Rounding = leave_unrounded) -> Callable[[Array], Array]:
    """Return a row sum over tiles that rounds the running sum after each tile, and keeps the axis."""

    def sum_tiles(row: Array) -> Array:
        tiles = tile_slices(row.shape[-1], terms)
        parts = (numpy_backend._row_sum(row[..., tile]) for tile in tiles)
        return sum_in_order(parts, row, store) if tiles else numpy_backend._row_sum(row)

    return sum_tiles


def change_call_arguments(function: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> StepReplacements:
    """Change the arguments of a function of the contract.

    ``change`` gets the arguments by name and returns the changed ones; None leaves an argument out.
    """
    right = getattr(numpy_backend, function)
    parameters = signature(right)

    def run_with_changed_arguments(*arrays: Any, **keywords: Any) -> Stages:
        bound = parameters.bind(*arrays, **keywords)
        changed = {**bound.arguments, **change(bound.arguments)}
        bound.arguments.clear()
        bound.arguments.update({name: value for name, value in changed.items() if value is not None})
        stages: Stages = right(*bound.args, **bound.kwargs)
        return stages

    return {function: run_with_changed_arguments}


def change_argument(function: str, name: str, change: Callable[[Any], Any]) -> StepReplacements:
    """Change one argument of a function of the contract, if it is given."""

    def changed_argument(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        value = arguments.get(name)
        return {} if value is None or value is False else {name: change(value)}

    return change_call_arguments(function, changed_argument)


def sequential_sum(array: Array, store: Rounding = leave_unrounded) -> Array:
    """Add along the last axis from the first to the last, each partial sum stored; the axis is kept."""
    return tiled_row_sum(1, store)(array)


def sequential_matmul(left: Array, right: Array, store: Rounding = leave_unrounded) -> Array:
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
    """Return the operation, computed in float64 and rounded once."""

    def run_in_float64(*arrays: Array) -> Array:
        return operation(*(array.astype(np.float64) for array in arrays)).astype(arrays[0].dtype)

    return run_in_float64


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
StepsForRounding: TypeAlias = Callable[[Rounding], StepReplacements]
"""Makes the steps that run between the ends; it is handed how a number is stored in the format of the ends."""


WIDE_STAGES = frozenset(name for name, spec in STAGE_SPECS.items() if spec.may_be_wide)
"""What a kernel may return in float32, whatever its ends are."""


class MixedPrecisionKernel(BackendVariant):
    """A kernel that widens 16-bit inputs, computes by ``make_steps``, and narrows all but its ``wide_stages``."""

    def __init__(
        self,
        make_steps: StepsForRounding,
        *,
        hidden_stages: frozenset[str] = UNRETURNED_STAGES,
        wide_stages: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(hidden_stages=hidden_stages)
        self._wide_stages = wide_stages
        self.steps = None  # they follow from the ends
        self._make_steps = make_steps
        self._variants: dict[str | None, BackendVariant] = {}
        for name in OPERATION_FUNCTIONS:
            self._set_contract_function(name, partial(self._run_operation, name))

    def _run_operation(self, name: str, *arrays: Any, **keywords: Any) -> Stages:
        narrow_dtype = next(
            (argument.dtype for argument in (*arrays, *keywords.values()) if _is_narrow_array(argument)), None
        )
        variant = self._variant_for_dtype(narrow_dtype)
        widened = {key: _widen_if_narrow(argument) for key, argument in keywords.items()}
        stages: Stages = getattr(variant, name)(*map(_widen_if_narrow, arrays), **widened)
        if narrow_dtype is None:
            return stages
        wide = self._wide_stages | (SPECS[name].row_statistics if name in SPECS else frozenset())
        return {stage: array if stage in wide else array.astype(narrow_dtype) for stage, array in stages.items()}

    def _variant_for_dtype(self, narrow_dtype: np.dtype[Any] | None) -> BackendVariant:
        """Return the variant that computes between ends of a format; each is made once."""
        name = None if narrow_dtype is None else narrow_dtype.name
        if name not in self._variants:
            self._variants[name] = BackendVariant(
                self._make_steps(leave_unrounded if narrow_dtype is None else rounding_to_dtype(narrow_dtype))
            )
        return self._variants[name]


def _is_narrow_array(argument: Any) -> bool:
    return isinstance(argument, np.ndarray) and argument.dtype.name in NARROW_DTYPES


def _widen_if_narrow(argument: Any) -> Any:
    return argument.astype(np.float32) if _is_narrow_array(argument) else argument
