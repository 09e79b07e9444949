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
from attncheck.reading.array_kinds import Arrangement, RoundingFields, StoredArray, UnitsOff
from attncheck.reading.case import Case
from attncheck.reading.lowering import with_poison
from attncheck.reading.printed import Rounding, parse_printed
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import merge_head_weights
from attncheck.spec import InputSpec, Shape, statistics_dtype, stored_dtype
from attncheck.spec.dtypes import largest_number, round_to, rounding_error

if TYPE_CHECKING:
    from attncheck.reading.generated_arrays import Generator

Array = NDArray[Any]

_LOWEST = np.float64(-largest_number("float64"))
"""Placeholder for the lowest number of a dtype until the dtype is known; no narrower dtype has this number."""


@dataclass(frozen=True)
class Exact:
    """An array in its own dtype, and by how much each printed number may differ from what the document used."""

    array: Array
    radius: NDArray[np.float64]

    def laid_out(self, change: Callable[[Array], Array]) -> Exact:
        """Return both, laid out in another way."""
        return Exact(change(self.array), change(self.radius))


@dataclass(frozen=True)
class Inputs:
    """A case's inputs in one working dtype.

    ``radius`` says, per element, how far the stored number may lie from the one that the source computed with: half a
    unit of a printed digit, plus what conversion to the working dtype moved.
    """

    arrays: Mapping[str, Array]
    radius: Mapping[str, NDArray[np.float64]]
    dtype: str


def rounding_of(fields: RoundingFields) -> Rounding:
    """Return how the printed numbers of an input or expectation were rounded."""
    units_off = fields.digits.units if isinstance(fields.digits, UnitsOff) else 0
    return Rounding(fields.exact, fields.decimals, fields.significant_digits, fields.digits == "truncated", units_off)


def make_exact_inputs(case: Case) -> dict[str, Exact]:
    """Read, draw and build the inputs of a case, in the order of the file, lifted to the operation's ranks."""
    generator: Generator | None = None
    if case.random is not None:
        from attncheck.reading.generated_arrays import GENERATORS

        generator = GENERATORS[case.random.generator](case.random.seed)
    named: dict[str, Exact] = {}
    # A case that probes infinity may make NaN of it.
    with np.errstate(all="ignore"):
        for name, source in case.arrays.items():
            named[name] = _make(source, named, generator)
        made = {name: _make(source, named, generator) for name, source in case.inputs.items()}
    specs = case.input_specs
    return {
        name: _split_heads(exact, case.input_shapes[name])
        if name in case.merged
        else _fit_rank(exact, case.input_shapes[name], len(specs[name].axes))
        for name, exact in made.items()
    }


def convert_inputs(case: Case, exact: Mapping[str, Exact], dtype: str, computed_in: str | None = None) -> Inputs:
    """Round the inputs once to the working dtype, from the storage dtype if there is one; masks become boolean.

    The radii are those from the numbers that the source gives; with ``computed_in``, from those that it computed with,
    which are rounded to that dtype.
    """
    specs = {name: spec for name, spec in case.input_specs.items() if name in exact}
    arrays = {
        name: _round_for_storage(exact[name].array, spec, stored_dtype(spec, specs, case.options, dtype), case.storage)
        for name, spec in specs.items()
    }
    radii = {
        name: partial(_radius, exact[name], spec, arrays[name], case.storage, computed_in)
        for name, spec in specs.items()
    }
    return Inputs(with_poison(case.options, arrays, dtype), _Radii(radii), dtype)


def inputs_in(case: Case, dtype: str) -> Inputs:
    """Make the inputs of a case in a dtype."""
    return convert_inputs(case, make_exact_inputs(case), dtype)


def problem_of(case: Case, inputs: Inputs) -> Problem:
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


class _Radii(Mapping[str, NDArray[np.float64]]):
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


def _radius(
    exact: Exact, spec: InputSpec, stored: Array, storage: str | None, computed_in: str | None
) -> NDArray[np.float64]:
    """Return how far stored numbers may be from the numbers that the source computed with.

    If a number is known exactly, the source computed with it rounded to its precision. If it was printed rounded, the
    number before printing is unknown, and with it the number that the source stored.
    """
    used, radius = exact.array, exact.radius
    if computed_in is not None and spec.is_number:
        source_dtype = statistics_dtype(computed_in) if spec.statistics else computed_in
        of_source = _round_for_storage(exact.array, spec, source_dtype, storage).astype(np.float64)
        used = np.where(exact.radius > 0, exact.array, of_source)
        in_storage = rounding_error(np.abs(exact.array) + exact.radius, computed_in)
        radius = radius + np.where(exact.radius > 0, in_storage, 0.0)
    moved = np.zeros(used.shape)
    finite = np.isfinite(exact.array) & (exact.array != _LOWEST)
    moved[finite] = np.abs(stored[finite].astype(np.float64) - used[finite])
    return radius + moved


def _round_for_storage(source: Array, spec: InputSpec, dtype: str, storage: str | None) -> Array:
    if not spec.is_number:
        return np.ascontiguousarray(source.astype(bool if spec.boolean else np.int64))
    if spec.statistics:
        storage = None if storage is None else statistics_dtype(storage)
    narrow = source if storage is None else round_to(source, storage)
    stored, is_lowest = round_to(narrow, dtype), source == _LOWEST
    if is_lowest.any():
        stored = np.where(is_lowest, np.asarray(-largest_number(dtype)).astype(stored.dtype), stored)
    return np.ascontiguousarray(stored)


def _make(source: kinds.Array, named: Mapping[str, Exact], generator: Generator | None) -> Exact:
    parts = kinds.parts_of(source)
    match source:
        case kinds.Reference():
            exact = named[source.ref]
        case kinds.PrintedInput():
            printed = parse_printed(source.printed, rounding_of(source))
            exact = Exact(printed.value, printed.radius)
        case _ if parts:
            # In the order of the file, because drawing advances the generator.
            exact = _combine(source, [_make(part, named, generator) for _, part in parts])
        case _:
            exact = _known_exactly(_numbers(source, generator))
    return _arrange(exact, source)


def _combine(source: kinds.Array, parts: list[Exact]) -> Exact:
    arrays, radii = [part.array for part in parts], [part.radius for part in parts]
    if isinstance(source, kinds.Concat):
        return Exact(np.concatenate(arrays, axis=source.axis), np.concatenate(radii, axis=source.axis))
    if isinstance(source, kinds.Sum):
        return Exact(reduce(np.add, arrays), reduce(np.add, radii))
    if isinstance(source, kinds.Product):
        return reduce(_product, parts)
    if isinstance(source, kinds.Blocks | kinds.RelativeBuckets):
        from attncheck.reading.generated_arrays import spread_table

        return parts[0].laid_out(partial(spread_table, source))
    masks = [array != 0 for array in arrays]
    if isinstance(source, kinds.AsBias):
        return _known_exactly(np.where(masks[0], 0.0, -np.inf))
    rule = np.logical_or if isinstance(source, kinds.AnyOf) else np.logical_and
    return _known_exactly(np.asarray(reduce(rule, masks), np.float64))


def _known_exactly(array: Array) -> Exact:
    return Exact(array, np.zeros(array.shape))


def _product(left: Exact, right: Exact) -> Exact:
    def moved(array: Array, radius: Array) -> Array:
        return np.where(radius > 0, np.abs(array) * radius, 0)  # infinity times a radius of 0 is no NaN

    radius = moved(left.array, right.radius) + moved(right.array, left.radius) + left.radius * right.radius
    return Exact(left.array * right.array, radius)


def _numbers(source: kinds.Array, generator: Generator | None) -> Array:
    made: Array
    match source:
        case StoredArray():
            from attncheck.reading.stored_arrays import read_stored

            made = read_stored(source)
        case kinds.Values():
            made = np.array(source.values, dtype=np.float64)
        case kinds.Constant():
            made = np.full(source.shape, source.constant, dtype=np.float64)
        case kinds.Lowest():
            made = np.full(source.lowest, _LOWEST)
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
            from attncheck.reading.generated_arrays import make_pattern

            made = make_pattern(source)
    return made


def draw_parameters(source: kinds.Drawn) -> dict[str, float]:
    """Return the parameters of a draw that the file gives."""
    bounds = {"low": source.low, "high": source.high}
    return {name: value for name, value in bounds.items() if value is not None}


def _arrange(exact: Exact, arrangement: Arrangement) -> Exact:
    if arrangement.rows is not None:
        rows = arrangement.rows
        exact = exact.laid_out(lambda array: array[rows])
    if arrangement.transpose:
        exact = exact.laid_out(lambda array: np.swapaxes(array, -1, -2))
    array, times = exact.array, arrangement.times
    if times is not None:
        exact = Exact(_real(array) * _in_dtype_of(array, times), exact.radius * abs(times))
    if arrangement.plus is not None:
        exact = Exact(_real(exact.array) + _in_dtype_of(exact.array, arrangement.plus), exact.radius)
    return exact


def _real(array: Array) -> Array:
    """Return drawn integers as float64: half of an integer is no integer."""
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(np.float64)


def _in_dtype_of(array: Array, number: float) -> Any:
    """Round a number to an array's dtype: numbers that a generator draws in float32 are multiplied in float32."""
    return _real(array).dtype.type(number)


def arranged_shape(shape: Shape, arrangement: Arrangement) -> Shape:
    """Shape of an array after ``rows`` and ``transpose``. Raises ``ValueError`` if they do not apply."""
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


def _split_heads(exact: Exact, shape: Shape) -> Exact:
    """Give every head its own part of the width: (B, L, H*D) -> (B, H, L, D)."""
    batch, heads, length, width = shape
    return exact.laid_out(lambda array: array.reshape(batch, length, heads, width).swapaxes(1, 2))


def _fit_rank(exact: Exact, shape: Shape, rank: int) -> Exact:
    """Lay per-head projections side by side and add leading axes."""

    def fitted(array: Array) -> Array:
        if array.ndim == 3 and rank == 2:
            array = array.swapaxes(0, 1).reshape(merge_head_weights(array.shape))  # (H, E, D) -> (E, H*D)
        return array.reshape(shape)

    return exact.laid_out(fitted)
