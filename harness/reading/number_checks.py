"""The numbers that a case file spells out, checked against what their input may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attncheck.harness.reading import model
from attncheck.harness.reading.faults import FieldFault
from attncheck.harness.reading.inputs import rounding_of
from attncheck.harness.reading.printed import parse_printed
from attncheck.harness.reading.yaml_scalars import FieldPath


def followed(source: model.Array, named: Mapping[str, model.Array]) -> model.Array:
    """Return the array itself behind references."""
    while isinstance(source, model.Reference):
        source = named[source.ref]
    return source


def check_finite(source: model.Array, path: FieldPath, *, allow_infinite: bool) -> None:
    """Refuse NaN, and infinity where the input may not have it."""
    for place, value in _literals(source, path):
        if math.isnan(value) or (math.isinf(value) and not allow_infinite):
            what = "NaN" if math.isnan(value) else "infinity"
            raise FieldFault(place, f"{what} is not allowed here; a case that probes it says `allow_nonfinite: true`")


def check_range(source: model.Array, path: FieldPath, dtypes: Sequence[str]) -> None:
    """Refuse a finite number that the narrowest of the case's dtypes would turn into infinity."""
    largest, dtype = min((float(np.finfo(dtype).max), dtype) for dtype in dtypes)
    for place, value in _literals(source, path):
        if math.isfinite(value) and abs(value) > largest:
            raise FieldFault(place, f"{value:g} is beyond the range of {dtype}; a case for wider dtypes says `dtypes`")


def check_boolean(source: model.Array, path: FieldPath) -> None:
    """Refuse what is neither true nor false, nor 1 nor 0."""
    for place, value in _literals(source, path):
        if value not in (0, 1):
            raise FieldFault(place, f"a mask is boolean (true = may attend), got {value}")
    if isinstance(source, model.Drawn):
        whole = source.draw == "randint" or (source.draw == "runif" and source.floor)
        if not whole or (source.low, source.high) != (0, 2) or source.times is not None:
            raise FieldFault(path, "a mask is boolean; a drawn one is `draw: randint, low: 0, high: 2`")


def _literals(source: model.Array, path: FieldPath) -> Iterator[tuple[FieldPath, float]]:
    """Yield the numbers that a file spells out, each with its place."""
    match source:
        case model.Values():
            yield from _flat(source.values, (*path, "values"))
        case model.PrintedInput():
            for number in parse_printed(source.printed, rounding_of(source)).value.ravel():
                yield (*path, "printed"), float(number)
        case model.Constant():
            yield (*path, "constant"), source.constant
        case model.Ascending():
            start, step = map(float, source.ascending)
            last = math.prod(source.shape) - 1
            for index in sorted({0, min(1, last), last}):
                yield (*path, "ascending"), start + step * index if index else start


def _flat(values: Any, path: FieldPath) -> Iterator[tuple[FieldPath, float]]:
    if not isinstance(values, list):
        yield path, values
        return
    for number, value in enumerate(values):
        yield from _flat(value, (*path, number))
