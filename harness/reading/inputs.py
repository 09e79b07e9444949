"""The numbers of a case's inputs: read, drawn or built once, then rounded to the working dtype.

Everything is made in float64, or in the generator's dtype, in the order of the file, and converted at the end: every
implementation and the exact answer get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading import array_kinds as kinds
from attncheck.reading.array_kinds import Adjustments, RoundingFields, StoredArray, UnitsOff
from attncheck.reading.case import Case
from attncheck.reading.lowering import poison_unused_keys
from attncheck.reading.printed import PrintedRounding, parse_printed
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import merged_weight_shape
from attncheck.spec import InputSpec, Shape, dtype_of_input, statistics_dtype
from attncheck.spec.dtypes import largest_number, max_rounding_error, round_to

if TYPE_CHECKING:
    from attncheck.reading.generated_arrays import Generator

Array = NDArray[Any]

_LOWEST_PLACEHOLDER = np.float64(-largest_number("float64"))
"""Placeholder for the lowest number of a dtype until the dtype is known; no narrower dtype has this number."""


@dataclass(frozen=True)
class ArrayWithRadius:
    """An array in its own dtype, and by how much each printed number may differ from what the document used."""

    array: Array
    radius: NDArray[np.float64]

    def rearrange(self, change: Callable[[Array], Array]) -> ArrayWithRadius:
        """Return both, laid out in another way."""
        return ArrayWithRadius(change(self.array), change(self.radius))


@dataclass(frozen=True)
class RoundedInputs:
    """A case's inputs in one working dtype.

    ``radius`` says, per element, how far the stored number may lie from the one that the source computed with: half a
    unit of a printed digit, plus what conversion to the working dtype moved.
    """

    arrays: Mapping[str, Array]
    radius: Mapping[str, NDArray[np.float64]]
    dtype: str


def make_printed_rounding(fields: RoundingFields) -> PrintedRounding:
    """Return how the printed numbers of an input or expectation were rounded."""
    units_off = fields.digits.units if isinstance(fields.digits, UnitsOff) else 0
    return PrintedRounding(
        fields.exact, fields.decimals, fields.significant_digits, fields.digits == "truncated", units_off
    )


def make_exact_inputs(case: Case) -> dict[str, ArrayWithRadius]:
    """Read, draw and build the inputs of a case, in the order of the file, lifted to the operation's ranks."""
    generator: Generator | None = None
    if case.random is not None:
        from attncheck.reading.generated_arrays import GENERATORS

        generator = GENERATORS[case.random.generator](case.random.seed)
    named: dict[str, ArrayWithRadius] = {}
    # A case that probes infinity may make NaN of it.
    with np.errstate(all="ignore"):
        for name, source in case.arrays.items():
            named[name] = _make_array(source, named, generator)
        made = {name: _make_array(source, named, generator) for name, source in case.inputs.items()}
    specs = case.input_specs
    return {
        name: _split_heads(exact, case.input_shapes[name])
        if name in case.merged
        else _reshape_to_rank(exact, case.input_shapes[name], len(specs[name].axes))
        for name, exact in made.items()
    }


def convert_inputs(
    case: Case, exact: Mapping[str, ArrayWithRadius], dtype: str, computed_in: str | None = None
) -> RoundedInputs:
    """Round the inputs once to the working dtype, from the storage dtype if there is one; masks become boolean.

    The radii are those from the numbers that the source gives; with ``computed_in``, from those that it computed with,
    which are rounded to that dtype.
    """
    specs = {name: spec for name, spec in case.input_specs.items() if name in exact}
    arrays = {
        name: _round_through_storage(
            exact[name].array, spec, dtype_of_input(spec, specs, case.options, dtype), case.storage
        )
        for name, spec in specs.items()
    }
    radii = {
        name: partial(_compute_input_radius, exact[name], spec, arrays[name], case.storage, computed_in)
        for name, spec in specs.items()
    }
    return RoundedInputs(poison_unused_keys(case.options, arrays, dtype), _LazyRadii(radii), dtype)


def make_inputs(case: Case, dtype: str) -> RoundedInputs:
    """Make the inputs of a case in a dtype."""
    return convert_inputs(case, make_exact_inputs(case), dtype)


def make_problem_of_case(case: Case, inputs: RoundedInputs) -> Problem:
    """Return the problem that a case is, on its inputs in a dtype."""
    return Problem(
        case.operation,
        case.options,
        inputs.arrays,
        inputs.dtype,
        case.memory_layout,
        case.judged_stages,
        case.supports_statistics,
    )


class _LazyRadii(Mapping[str, NDArray[np.float64]]):
    """Radii that are computed on access: code that only makes a call needs none of them."""

    def __init__(self, makers: Mapping[str, Callable[[], NDArray[np.float64]]]) -> None:
        self._makers = makers
        self._made: dict[str, NDArray[np.float64]] = {}

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __reduce__(self) -> tuple[type, tuple[dict[str, NDArray[np.float64]]]]:
        return dict, (dict(self),)  # sent to another process they are numbers


def _compute_input_radius(
    exact: ArrayWithRadius, spec: InputSpec, stored: Array, storage: str | None, computed_in: str | None
) -> NDArray[np.float64]:
    """Return how far stored numbers may be from the numbers that the source computed with.

    If a number is known exactly, the source computed with it rounded to its precision. If it was printed rounded, the
    number before printing is unknown, and with it the number that the source stored.
    """
    used, radius = exact.array, exact.radius
    if computed_in is not None and spec.is_number:
        source_dtype = statistics_dtype(computed_in) if spec.is_row_statistic else computed_in
        of_source = _round_through_storage(exact.array, spec, source_dtype, storage).astype(np.float64)
        used = np.where(exact.radius > 0, exact.array, of_source)
        in_storage = max_rounding_error(np.abs(exact.array) + exact.radius, computed_in)
        radius = radius + np.where(exact.radius > 0, in_storage, 0.0)
    moved = np.zeros(used.shape)
    finite = np.isfinite(exact.array) & (exact.array != _LOWEST_PLACEHOLDER)
    moved[finite] = np.abs(stored[finite].astype(np.float64) - used[finite])
    return radius + moved


def _round_through_storage(source: Array, spec: InputSpec, dtype: str, storage: str | None) -> Array:
    if not spec.is_number:
        return np.ascontiguousarray(source.astype(bool if spec.is_boolean else np.int64))
    if spec.is_row_statistic:
        storage = None if storage is None else statistics_dtype(storage)
    narrow = source if storage is None else round_to(source, storage)
    stored, is_lowest = round_to(narrow, dtype), source == _LOWEST_PLACEHOLDER
    if is_lowest.any():
        stored = np.where(is_lowest, np.asarray(-largest_number(dtype)).astype(stored.dtype), stored)
    return np.ascontiguousarray(stored)


def _make_array(
    source: kinds.Array, named: Mapping[str, ArrayWithRadius], generator: Generator | None
) -> ArrayWithRadius:
    parts = kinds.array_parts_with_paths(source)
    match source:
        case kinds.Reference():
            exact = named[source.ref]
        case kinds.PrintedInput():
            printed = parse_printed(source.printed, make_printed_rounding(source))
            exact = ArrayWithRadius(printed.value, printed.radius)
        case _ if parts:
            # In the order of the file, because drawing advances the generator.
            exact = _combine_arrays(source, [_make_array(part, named, generator) for _, part in parts])
        case _:
            exact = _with_zero_radius(_make_numbers(source, generator))
    return _apply_adjustments(exact, source)


def _combine_arrays(source: kinds.Array, parts: list[ArrayWithRadius]) -> ArrayWithRadius:
    arrays, radii = [part.array for part in parts], [part.radius for part in parts]
    if isinstance(source, kinds.Concat):
        return ArrayWithRadius(np.concatenate(arrays, axis=source.axis), np.concatenate(radii, axis=source.axis))
    if isinstance(source, kinds.Sum):
        return ArrayWithRadius(reduce(np.add, arrays), reduce(np.add, radii))
    if isinstance(source, kinds.Product):
        return reduce(_multiply, parts)
    if isinstance(source, kinds.Blocks | kinds.RelativeBuckets):
        from attncheck.reading.generated_arrays import expand_table_to_positions

        return parts[0].rearrange(partial(expand_table_to_positions, source))
    masks = [array != 0 for array in arrays]
    if isinstance(source, kinds.AsBias):
        return _with_zero_radius(np.where(masks[0], 0.0, -np.inf))
    rule = np.logical_or if isinstance(source, kinds.AnyOf) else np.logical_and
    return _with_zero_radius(np.asarray(reduce(rule, masks), np.float64))


def _with_zero_radius(array: Array) -> ArrayWithRadius:
    return ArrayWithRadius(array, np.zeros(array.shape))


def _multiply(left: ArrayWithRadius, right: ArrayWithRadius) -> ArrayWithRadius:
    def moved(array: Array, radius: Array) -> Array:
        return np.where(radius > 0, np.abs(array) * radius, 0)  # infinity times a radius of 0 is no NaN

    radius = moved(left.array, right.radius) + moved(right.array, left.radius) + left.radius * right.radius
    return ArrayWithRadius(left.array * right.array, radius)


def _make_numbers(source: kinds.Array, generator: Generator | None) -> Array:
    made: Array
    match source:
        case StoredArray():
            from attncheck.reading.stored_arrays import read_stored_array

            made = read_stored_array(source)
        case kinds.Values():
            made = np.array(source.values, dtype=np.float64)
        case kinds.Constant():
            made = np.full(source.shape, source.constant, dtype=np.float64)
        case kinds.Lowest():
            made = np.full(source.lowest, _LOWEST_PLACEHOLDER)
        case kinds.Identity():
            made = np.eye(source.identity)
        case kinds.Ascending():
            start, step = source.ascending
            made = (start + step * np.arange(np.prod(source.shape), dtype=np.float64)).reshape(source.shape)
        case kinds.Geometric():
            # One multiplication after another gives the same bits everywhere; a power function need not.
            start, ratio = map(float, source.geometric)
            factors = np.full(int(np.prod(source.shape)), ratio)
            factors[:1] = start  # there may be none
            made = np.multiply.accumulate(factors).reshape(source.shape)
        case kinds.Drawn():
            assert generator is not None, "the loader refuses a draw without a generator"
            drawn: Array = getattr(generator, source.draw)(tuple(source.shape), **draw_parameters(source))
            made = np.floor(drawn) if source.floor else drawn
        case _:
            from attncheck.reading.generated_arrays import make_mask_or_bias

            made = make_mask_or_bias(source)
    return made


def draw_parameters(source: kinds.Drawn) -> dict[str, float]:
    """Return the parameters of a draw that the file gives."""
    bounds = {"low": source.low, "high": source.high}
    return {name: value for name, value in bounds.items() if value is not None}


def _apply_adjustments(exact: ArrayWithRadius, arrangement: Adjustments) -> ArrayWithRadius:
    if arrangement.rows is not None:
        rows = arrangement.rows
        exact = exact.rearrange(lambda array: array[rows])
    if arrangement.transpose:
        exact = exact.rearrange(lambda array: np.swapaxes(array, -1, -2))
    array, times = exact.array, arrangement.times
    if times is not None:
        exact = ArrayWithRadius(_as_floating(array) * _round_to_dtype_of(array, times), exact.radius * abs(times))
    if arrangement.plus is not None:
        exact = ArrayWithRadius(
            _as_floating(exact.array) + _round_to_dtype_of(exact.array, arrangement.plus), exact.radius
        )
    return exact


def _as_floating(array: Array) -> Array:
    """Return drawn integers as float64: half of an integer is no integer."""
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(np.float64)


def _round_to_dtype_of(array: Array, number: float) -> Any:
    """Round a number to an array's dtype: numbers that a generator draws in float32 are multiplied in float32."""
    return _as_floating(array).dtype.type(number)


def shape_after_arrangement(shape: Shape, arrangement: Adjustments) -> Shape:
    """Shape of an array after ``rows`` and ``transpose``. Raises ``ValueError`` if they do not apply.

    Example:
        >>> shape_after_arrangement((3, 4), Adjustments(rows=[0, 0], transpose=True))
        (4, 2)
    """
    if arrangement.rows is not None:
        if not shape:
            raise ValueError("a single number has no rows to take")
        if max(arrangement.rows) >= shape[0]:
            raise ValueError(f"rows: row {max(arrangement.rows)} of {shape[0]} (rows count from 0)")
        shape = (len(arrangement.rows), *shape[1:])
    if arrangement.transpose:
        if len(shape) < 2:
            raise ValueError("transpose needs two axes")
        shape = (*shape[:-2], shape[-1], shape[-2])
    return shape


def _split_heads(exact: ArrayWithRadius, shape: Shape) -> ArrayWithRadius:
    """Give every head its own part of the width: (B, L, H*D) -> (B, H, L, D)."""
    batch, heads, length, width = shape
    return exact.rearrange(lambda array: array.reshape(batch, length, heads, width).swapaxes(1, 2))


def _reshape_to_rank(exact: ArrayWithRadius, shape: Shape, rank: int) -> ArrayWithRadius:
    """Lay per-head projections side by side and add leading axes."""

    def fitted(array: Array) -> Array:
        if array.ndim == 3 and rank == 2:
            array = array.swapaxes(0, 1).reshape(merged_weight_shape(array.shape))  # (H, E, D) -> (E, H*D)
        return array.reshape(shape)

    return exact.rearrange(fitted)
