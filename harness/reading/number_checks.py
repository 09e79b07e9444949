"""The numbers that a case file spells out, checked against what their input may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attncheck.reading import array_kinds as kinds
from attncheck.reading.bias_kinds import Alibi
from attncheck.reading.diagnostics import CaseFileError, short
from attncheck.reading.dtypes import largest_number
from attncheck.reading.file_kinds import StoredArray
from attncheck.reading.generated_arrays import largest_of_alibi
from attncheck.reading.inputs import rounding_of
from attncheck.reading.printed import parse_printed
from attncheck.reading.stored_arrays import MAX_COUNTS
from attncheck.reading.yaml_scalars import FieldPath

Named = Mapping[str, kinds.Array]

_LARGEST_NORMAL = 13.0
"""sqrt(2 log 2^106) = 12.2: more than 53 random bits, or two such numbers, can be turned into."""


def check_finite(source: kinds.Array, named: Named, path: FieldPath, *, allow_infinite: bool) -> None:
    """Refuse NaN, and infinity where the input may not have it or where NaN could come of it."""
    if isinstance(source, kinds.Product) or source.times is not None:
        allow_infinite = False  # 0 * inf
    signs = set()
    for where, value in _literals(source, named, path):
        if math.isnan(value) or (math.isinf(value) and not allow_infinite):
            what = "NaN" if math.isnan(value) else "infinity"
            raise CaseFileError(
                where, f"{what} is not allowed here; a case that probes it says `allow_nonfinite: true`"
            )
        signs |= {value} if math.isinf(value) else set()
    if len(signs) > 1 and _has_sum(source, named):
        raise CaseFileError(path, "a sum with inf and -inf may become NaN")
    for where, part in _inside(source, named, path):
        check_finite(part, named, where, allow_infinite=allow_infinite)


def check_range(source: kinds.Array, named: Named, path: FieldPath, dtypes: Sequence[str]) -> None:
    """Refuse a finite number that the narrowest of the case's dtypes would turn into infinity."""
    largest, dtype = min((largest_number(dtype), dtype) for dtype in dtypes)
    if not _is_changed(source, named):
        for where, value in _literals(source, named, path):
            if math.isfinite(value) and abs(value) > largest:
                message = f"{value:g} is beyond the range of {dtype}; a case for wider dtypes says `dtypes`"
                raise CaseFileError(where, message)
    bound = _largest(source, named)
    if bound > largest:
        message = f"may reach {bound:.2g}, beyond the range of {dtype}; a case for wider dtypes says `dtypes`"
        raise CaseFileError(path, message)


def check_lowest(source: kinds.Array, named: Named, path: FieldPath, stored_in: Sequence[str]) -> None:
    """Refuse arithmetic with the lowest number of a dtype, and one that is not of the dtype that a case runs in."""
    if not _has_lowest(source, named):
        return
    if stored_in:
        raise CaseFileError(path, f"the lowest number is that of each dtype; that of {stored_in[0]} is a `constant`")
    if _is_changed(source, named):
        raise CaseFileError(path, "the lowest number of a dtype takes no sum, product, times or plus")


def check_whole(source: kinds.Array, named: Named, path: FieldPath) -> None:
    """Refuse counts that are not spelled out as whole numbers of at least 0."""
    if (
        not isinstance(source, kinds.Values | StoredArray | kinds.Reference)
        or source.times is not None
        or source.plus is not None
    ):
        raise CaseFileError(path, "these are counts; give them as `values` or from a `file`, without times or plus")
    if isinstance(source, StoredArray) and source.contents and not source.contents.is_all and source.contents.numbers:
        raise CaseFileError((*path, "file"), f"expected at most {MAX_COUNTS} counts, all of them whole numbers")
    for where, part in _inside(source, named, path):
        check_whole(part, named, where)
    for where, value in _own_literals(source, path):
        if isinstance(value, bool) or not math.isfinite(value) or value != int(value) or value < 0:
            raise CaseFileError(where, f"expected a whole number of at least 0, got {short(value)}")


def check_at_most(source: kinds.Array, named: Named, path: FieldPath, most: int, of: str) -> None:
    """Refuse counts of more than there is."""
    for where, value in _literals(source, named, path):
        if value > most:
            raise CaseFileError(where, f"expected at most {most}, as there are {most} {of}, got {short(value)}")


def check_boolean(source: kinds.Array, named: Named, path: FieldPath) -> None:
    """Refuse what is neither true nor false, nor 1 nor 0."""
    if isinstance(source, kinds.Sum) or source.times is not None or source.plus is not None:
        raise CaseFileError(path, "a mask is boolean; it takes no sum, times or plus")
    if isinstance(source, kinds.Lowest):
        raise CaseFileError(path, "a mask is boolean (true = may attend), got the lowest number of a dtype")
    if isinstance(source, kinds.AsBias | Alibi | kinds.RelativeBuckets):
        raise CaseFileError(path, f"a mask is boolean (true = may attend), got a bias ({kinds.kind_of(source)})")
    if isinstance(source, kinds.Drawn):
        whole = source.draw == "randint" or (source.draw == "runif" and source.floor)
        if not whole or (source.low, source.high) != (0, 2):
            raise CaseFileError(path, "a mask is boolean; a drawn one is `draw: randint, low: 0, high: 2`")
    for where, part in _inside(source, named, path):
        check_boolean(part, named, where)
    for where, value in _own_literals(source, path):
        if value not in (0, 1):
            raise CaseFileError(where, f"a mask is boolean (true = may attend), got {value}")


def check_masks(source: kinds.Array, named: Named, path: FieldPath) -> None:
    """Refuse what is neither true nor false where a kind of array is made of masks."""
    for where, part in _inside(source, named, path):
        if isinstance(source, kinds.AnyOf | kinds.AllOf | kinds.AsBias):
            check_boolean(part, named, where)
        elif not isinstance(source, kinds.Reference):  # an array by a name was checked itself
            check_masks(part, named, where)


def check_no_mask(source: kinds.Array, named: Named, path: FieldPath) -> None:
    """Refuse a mask as it is in the place of numbers: added, it forbids nothing."""
    if source.times is not None or source.plus is not None:
        return
    if isinstance(source, kinds.Reference):
        check_no_mask(named[source.ref], named, path)
    elif (kind := kinds.kind_of(source)) in kinds.MASK_KINDS:
        raise CaseFileError(
            path, f"expected numbers, got a mask ({kind}); give it as `mask`, or as a bias of 0 and -inf by `as_bias`"
        )


def spelled_out(source: kinds.Array, named: Named) -> list[float]:
    """Return the numbers that the file spells out for an array and for what it is made of."""
    return [value for _, value in _literals(source, named, ())]


def _inside(source: kinds.Array, named: Named, path: FieldPath) -> Iterator[tuple[FieldPath, kinds.Array]]:
    """Yield the arrays that one refers to or is made of, each with its place."""
    if isinstance(source, kinds.Reference):
        yield path, named[source.ref]
    for place, part in kinds.parts_of(source):
        yield (*path, *place), part


def _is_changed(source: kinds.Array, named: Named) -> bool:
    """Whether the numbers differ from those that the file spells out."""
    own = source.times is not None or source.plus is not None or isinstance(source, kinds.Sum | kinds.Product)
    return own or any(_is_changed(part, named) for _, part in _inside(source, named, ()))


def _has_lowest(source: kinds.Array, named: Named) -> bool:
    inside = (part for _, part in _inside(source, named, ()))
    return isinstance(source, kinds.Lowest) or any(_has_lowest(part, named) for part in inside)


def _has_sum(source: kinds.Array, named: Named) -> bool:
    return isinstance(source, kinds.Sum) or any(_has_sum(part, named) for _, part in _inside(source, named, ()))


def _largest(source: kinds.Array, named: Named) -> float:
    """Return a bound on the finite numbers of an array, in magnitude, without making it."""
    parts = [_largest(part, named) for _, part in _inside(source, named, ())]
    match source:
        case kinds.Sum():
            bound = sum(parts)
        case kinds.Product():
            bound = math.prod(parts)
        case kinds.Drawn():
            normal = source.draw == "randn"
            bound = _LARGEST_NORMAL if normal else max(1.0, abs(source.low or 0), abs(source.high or 0))
        case _:
            own = [abs(value) for _, value in _own_literals(source, ()) if math.isfinite(value)]
            bound = max([*parts, *own], default=1.0)  # the identity has none of these
    times = 1 if source.times is None else abs(source.times)
    return bound * times + abs(source.plus or 0)


def _literals(source: kinds.Array, named: Named, path: FieldPath) -> Iterator[tuple[FieldPath, float]]:
    """Yield the numbers that a file spells out, each with its place."""
    yield from _own_literals(source, path)
    for where, part in _inside(source, named, path):
        yield from _literals(part, named, where)


def _own_literals(source: kinds.Array, path: FieldPath) -> Iterator[tuple[FieldPath, float]]:
    match source:
        case kinds.Values():
            yield from _flat(source.values, (*path, "values"))
        case kinds.PrintedInput():
            for number in parse_printed(source.printed, rounding_of(source)).value.ravel():
                yield (*path, "printed"), float(number)
        case kinds.AsBias():
            yield from (((*path, "as_bias"), number) for number in (0.0, -math.inf))
        case StoredArray():
            yield from (((*path, "file"), number) for number in (source.contents.numbers if source.contents else ()))
        case Alibi():
            yield (*path, "alibi"), -largest_of_alibi(source)
        case kinds.Constant():
            yield (*path, "constant"), source.constant
        case kinds.Ascending():
            start, step = map(float, source.ascending)
            last = math.prod(source.shape) - 1
            for index in _ends(last):
                yield (*path, "ascending"), start + step * index if index else start
        case kinds.Geometric():
            start, ratio = map(np.float64, source.geometric)
            last = math.prod(source.shape) - 1
            with np.errstate(all="ignore"):
                for index in _ends(last):
                    yield (*path, "geometric"), float(start * ratio**index) if index else float(start)


def _ends(last: int) -> list[int]:
    """Return the places whose numbers bound all others: first, second and last; none of an empty array."""
    return sorted({0, min(1, last), last}) if last >= 0 else []


def _flat(values: Any, path: FieldPath) -> Iterator[tuple[FieldPath, float]]:
    if not isinstance(values, list):
        yield path, values
        return
    for number, value in enumerate(values):
        yield from _flat(value, (*path, number))
