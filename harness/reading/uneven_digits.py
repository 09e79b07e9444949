"""Printed numbers that show fewer digits than their neighbours: what is probably rounded further back than it looks.

NumPy prints ``[0.  0.30273854]``: it leaves out the zeros that end a number, so that the 0. has eight decimals too.
Taken for what it shows, it was rounded to a whole number, and 0.3 would hold against it.

R gives every column decimals of its own, others every row: so a number is suspect where it has fewer decimals than one
in its row and than one in its column, or ends in a point, as NumPy alone writes. Numbers of as many significant digits
as their neighbours were rounded to these. And a zero that is missing by chance at the end of many digits costs nothing:
a number is suspect if it has at most half as many digits as others, or may be off by a thousandth of the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation

import numpy as np
from numpy.typing import NDArray

from attncheck.reading import array_kinds as kinds
from attncheck.reading import model
from attncheck.reading.array_fields import PrintedRows, RoundingFields
from attncheck.reading.file_kinds import StoredNumbers
from attncheck.reading.inputs import rounding_of
from attncheck.reading.printed import PrintedArray, parse_printed
from attncheck.reading.yaml_scalars import FieldPath

Warnings = Iterator[tuple[FieldPath, str]]
Counts = NDArray[np.int64]
_NONE = -(2**31)
"""Decimals and digits of what is no number."""
_MAX_OFF = 1e-3
"""Of the largest number: by what a number that shows too few digits may be off before anybody is told."""


def uneven_digits(entry: model.CaseEntry, arrays: Mapping[str, kinds.Array], where: FieldPath) -> Warnings:
    """Warn of the printed numbers of a case, its own arrays and the file's ``arrays`` that its inputs refer to."""
    for number, expectation in enumerate(entry.expect):
        for field in ("printed", "known"):
            rows = getattr(expectation, field)
            if rows is not None and not isinstance(rows, StoredNumbers):
                path = (*where, "expect", number, field)
                yield from _of_numbers(rows, expectation, path, declared=entry.digits is not None)
    for name, given in entry.inputs.items():
        yield from _of_array(kinds.as_array(given), arrays, (*where, "inputs", name), (*where, "arrays"), entry)


def _of_array(
    source: kinds.Array, named: Mapping[str, kinds.Array], path: FieldPath, own: FieldPath, entry: model.CaseEntry
) -> Warnings:
    match source:
        case kinds.PrintedInput():
            yield from _of_numbers(source.printed, source, (*path, "printed"), declared=False)
        case kinds.Reference():
            top = own if source.ref in entry.arrays else ("arrays",)
            yield from _of_array(named[source.ref], named, (*top, source.ref), own, entry)
        case _:
            for place, part in kinds.parts_of(source):
                yield from _of_array(part, named, (*path, *place), own, entry)


def _of_numbers(rows: PrintedRows, fields: RoundingFields, path: FieldPath, *, declared: bool) -> Warnings:
    says = fields.exact or fields.digits is not None or declared
    if says or fields.decimals is not None or fields.significant_digits is not None:
        return
    numbers = parse_printed(rows, rounding_of(fields))
    found = _uneven(numbers)
    if found is None:
        return
    short, decimals = found
    first = tuple(np.argwhere(short)[0])
    within = f"{numbers.half_unit[first]:.1g}"
    others = int(short.sum()) - 1
    shown = f"{numbers.text[first]} and {others} more show" if others else f"{numbers.text[first]} shows"
    yield (
        path,
        f"{shown} fewer digits than numbers beside, so that anything within {within} of it holds: say "
        f"`decimals: {decimals}` if all were rounded alike and NumPy left zeros out, `significant_digits` for those "
        "of R and %g, `exact: true`, or `digits: rounded` if each shows all the digits that it was rounded to",
    )


def _uneven(numbers: PrintedArray) -> tuple[NDArray[np.bool_], int] | None:
    """Return which numbers show fewer digits than neighbours, and the most decimals that any has; None if none do."""
    text = numbers.text
    decimals, digits = _counts(text)
    if not text.size:
        return None
    short = (decimals > _NONE) & (decimals < decimals.max()) & (digits < digits.max())
    of_numpy = np.array([str(each).endswith(".") for each in text.ravel()]).reshape(text.shape)
    for axis in (-1, -2)[: text.ndim]:
        if text.shape[axis] > 1:
            short &= of_numpy | (decimals < decimals.max(axis=axis, keepdims=True))
    largest = np.abs(numbers.value[np.isfinite(numbers.value)]).max(initial=0.0)
    short &= (2 * digits <= digits.max()) | (numbers.half_unit > _MAX_OFF * largest)
    return (short, int(decimals.max())) if short.any() else None


def _counts(text: NDArray[np.object_]) -> tuple[Counts, Counts]:
    """Return every number's decimals and significant digits; a zero has none of these."""
    decimals, digits = np.full(text.shape, _NONE), np.full(text.shape, _NONE)
    for index in np.ndindex(text.shape):
        try:
            number = Decimal(str(text[index]))
        except InvalidOperation:  # a number that is not given
            continue
        if number.is_finite():
            decimals[index] = max(0, -int(number.as_tuple().exponent))
            digits[index] = len(number.as_tuple().digits) if number else 0
    return decimals, digits
