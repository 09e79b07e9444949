"""The numbers of a case's inputs: read, drawn or built once, then rounded to the working dtype.

Everything is made in float64, or in the generator's own dtype, in the order of the file, and converted at the end:
every implementation, and whoever judges it, gets the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.reading import model
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.generators import GENERATORS, Generator, draw
from attncheck.harness.reading.printed import Rounding, parse_printed
from attncheck.harness.reading.shapes import merge_head_weights
from attncheck.harness.vocabulary import Shape

Array = NDArray[Any]


@dataclass(frozen=True)
class Exact:
    """An array in its own dtype, and by how much each printed number may differ from what the document used."""

    array: Array
    radius: NDArray[np.float64]


@dataclass(frozen=True)
class Inputs:
    """A case's inputs in one working dtype.

    ``radius`` says, per element, how far the stored number may lie from the one that the source computed with: half a
    unit of a printed digit, plus what conversion to the working dtype moved.
    """

    arrays: Mapping[str, Array]
    radius: Mapping[str, NDArray[np.float64]]


def rounding_of(fields: model.RoundingFields) -> Rounding:
    """Return how the printed numbers of an input or expectation were rounded."""
    return Rounding(fields.exact, fields.decimals, fields.significant_digits)


def make_exact_inputs(case: Case) -> dict[str, Exact]:
    """Read, draw and build the inputs of a case, in the order of the file, lifted to the operation's ranks."""
    generator = GENERATORS[case.random.generator](case.random.seed) if case.random else None
    named: dict[str, Exact] = {}
    for name, source in case.arrays.items():
        named[name] = _make(source, named, generator)
    made = {name: _make(source, named, generator) for name, source in case.inputs.items()}
    specs = case.input_specs
    return {name: _fit(exact, case.input_shapes[name], len(specs[name].axes)) for name, exact in made.items()}


def convert_inputs(case: Case, exact: Mapping[str, Exact], dtype: str) -> Inputs:
    """Round the inputs once to the working dtype; masks become boolean."""
    arrays: dict[str, Array] = {}
    radius: dict[str, NDArray[np.float64]] = {}
    for name, spec in case.input_specs.items():
        if name not in exact:
            continue
        source = exact[name].array
        stored = np.ascontiguousarray(source.astype(bool if spec.boolean else dtype))
        moved = np.zeros(source.shape)
        finite = np.isfinite(source)
        moved[finite] = np.abs(stored[finite].astype(np.float64) - source[finite])
        arrays[name], radius[name] = stored, exact[name].radius + moved
    return Inputs(arrays, radius)


def _make(source: model.Array, named: Mapping[str, Exact], generator: Generator | None) -> Exact:
    if isinstance(source, model.Reference):
        found = named[source.ref]
        return Exact(_arrange(found.array, source), _arrange(found.radius, source))
    if isinstance(source, model.PrintedInput):
        printed = parse_printed(source.printed, rounding_of(source))
        return Exact(_arrange(printed.value, source), _arrange(printed.half_unit, source))
    array = _arrange(_numbers(source, generator), source)
    return Exact(array, np.zeros(array.shape))


def _numbers(source: model.Array, generator: Generator | None) -> Array:
    match source:
        case model.Values():
            return np.array(source.values, dtype=np.float64)
        case model.Constant():
            return np.full(source.shape, source.constant, dtype=np.float64)
        case model.Identity():
            return np.eye(source.identity)
        case model.Ascending():
            start, step = source.ascending
            return (start + step * np.arange(np.prod(source.shape), dtype=np.float64)).reshape(source.shape)
        case model.Drawn():
            assert generator is not None, "the loader refuses a draw without a generator"
            drawn = draw(generator, source.draw, tuple(source.shape), draw_parameters(source))
            drawn = np.floor(drawn) if source.floor else drawn
            return drawn if source.times is None else drawn * drawn.dtype.type(source.times)
    raise AssertionError(f"an array of unknown kind: {source!r}")


def draw_parameters(source: model.Drawn) -> dict[str, float]:
    """Return the parameters of a draw that the file gives."""
    given = {"low": source.low, "high": source.high}
    return {name: value for name, value in given.items() if value is not None}


def _arrange(array: Array, arrangement: model.Arrangement) -> Array:
    if arrangement.rows is not None:
        array = array[arrangement.rows]
    return np.swapaxes(array, -1, -2) if arrangement.transpose else array


def arranged_shape(shape: Shape, arrangement: model.Arrangement) -> Shape:
    """Shape of an array after ``rows`` and ``transpose``. Raises ``ValueError`` where they do not apply."""
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


def _fit(exact: Exact, shape: Shape, rank: int) -> Exact:
    """Lay per-head projections side by side and add leading axes."""

    def fitted(array: Array) -> Array:
        if array.ndim == 3 and rank == 2:
            array = array.swapaxes(0, 1).reshape(merge_head_weights(array.shape))  # (H, E, D) -> (E, H*D)
        return array.reshape(shape)

    return Exact(fitted(exact.array), fitted(exact.radius))
