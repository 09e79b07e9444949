"""The arrays of a case file, checked before a number is drawn: kinds, names, shapes, sizes, ranges, finiteness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from attncheck.reading import array_kinds as kinds
from attncheck.reading import generated_arrays as generated
from attncheck.reading import model
from attncheck.reading.array_kinds import MASK_PATTERNS, Alibi, PrintedRows, RoundingFields, StoredArray
from attncheck.reading.diagnostics import CaseFileError, collect_results_or_faults, locate_faults, shorten_value
from attncheck.reading.inputs import draw_parameters, make_printed_rounding, shape_after_arrangement
from attncheck.reading.printed import MAX_AXES, PrintedArray, max_number_count, parse_printed
from attncheck.reading.shapes import broadcast_shape, concatenated_shape, format_shape, operation_input_shape
from attncheck.reading.stored_arrays import MAX_COUNTS, MAX_STORED_NUMBERS, summarize_stored_array
from attncheck.reading.yaml_reader import FieldPath
from attncheck.spec import InputSpec, Shape
from attncheck.spec.dtypes import largest_number

ArraysByName = Mapping[str, kinds.Array]

_MAX_NORMAL_DRAW = 13.0
"""sqrt(2 log 2^106) = 12.2: more than 53 random bits, or two such numbers, can be turned into."""


def check_finite(source: kinds.Array, named: ArraysByName, path: FieldPath, *, allow_infinite: bool) -> None:
    """Refuse NaN, and infinity if the input may not have it or if NaN could result from it."""
    if isinstance(source, kinds.Product) or source.times is not None:
        allow_infinite = False  # 0 * inf
    signs = set()
    for where, value in _nested_literals(source, named, path):
        if math.isnan(value) or (math.isinf(value) and not allow_infinite):
            what = "NaN" if math.isnan(value) else "infinity"
            raise CaseFileError(
                where, f"{what} is not allowed here; a case that probes it says `allow_nonfinite: true`"
            )
        signs |= {value} if math.isinf(value) else set()
    if len(signs) > 1 and any(isinstance(part, kinds.Sum) for _, part in _nested_arrays(source, named)):
        raise CaseFileError(path, "a sum with inf and -inf may become NaN")
    for where, part in _parts_with_paths(source, named, path):
        check_finite(part, named, where, allow_infinite=allow_infinite)


def check_dtype_range(source: kinds.Array, named: ArraysByName, path: FieldPath, dtypes: Sequence[str]) -> None:
    """Refuse a finite number that the narrowest of the case's dtypes would turn into infinity."""
    largest, dtype = min((largest_number(dtype), dtype) for dtype in dtypes)
    if not _has_arithmetic(source, named):
        for where, value in _nested_literals(source, named, path):
            if math.isfinite(value) and abs(value) > largest:
                message = f"{value:g} is beyond the range of {dtype}; a case for wider dtypes says `dtypes`"
                raise CaseFileError(where, message)
    bound = _magnitude_bound(source, named)
    if bound > largest:
        message = f"may reach {bound:.2g}, beyond the range of {dtype}; a case for wider dtypes says `dtypes`"
        raise CaseFileError(path, message)


def check_positive_scales(source: kinds.Array, named: ArraysByName, path: FieldPath) -> None:
    """Refuse a scale of codes that is not above 0: formats of scales have no sign, and nothing is divided by 0."""
    for at, part in _nested_arrays(source, named, path):
        if isinstance(part, kinds.Drawn) and (part.draw != "runif" or not (part.low or 0) > 0):
            raise CaseFileError(at, "scales of codes are positive; draw them by `draw: runif` with a `low` above 0")
        for where, value in _literals_with_paths(part, at):
            if not (math.isfinite(value) and value > 0):
                raise CaseFileError(where, f"scales of codes are positive, got {value:g}")


def check_lowest_number(source: kinds.Array, named: ArraysByName, path: FieldPath, stored_in: Sequence[str]) -> None:
    """Refuse arithmetic with the lowest number of a dtype, and one that is not of the dtype that a case runs in."""
    if not any(isinstance(part, kinds.Lowest) for _, part in _nested_arrays(source, named)):
        return
    if stored_in:
        raise CaseFileError(path, f"the lowest number is that of each dtype; that of {stored_in[0]} is a `constant`")
    if _has_arithmetic(source, named):
        raise CaseFileError(path, "the lowest number of a dtype takes no sum, product, times or plus")


def check_counts(
    source: kinds.Array, named: ArraysByName, path: FieldPath, least: int = 0, *, is_index: bool = False
) -> None:
    """Refuse counts, or indices, that are not spelled out as whole numbers of at least ``least``."""
    for at, part in _nested_arrays(source, named, path):
        is_spelled = isinstance(part, kinds.Values | StoredArray | kinds.Reference)
        if not is_spelled or part.is_scaled or (is_index and part.is_arranged):
            what, more = ("indices", "rows, transpose, ") if is_index else ("counts", "")
            message = f"these are {what}; give them as `values` or from a `file`, without {more}times or plus"
            raise CaseFileError(at, message)
        if (
            isinstance(part, StoredArray)
            and part.contents
            and not part.contents.lists_all_numbers
            and part.contents.listed_numbers
        ):
            raise CaseFileError((*at, "file"), f"expected at most {MAX_COUNTS} counts, all of them whole numbers")
        for where, value in _literals_with_paths(part, at):
            if isinstance(value, bool) or not math.isfinite(value) or value != int(value) or value < least:
                raise CaseFileError(where, f"expected a whole number of at least {least}, got {shorten_value(value)}")


def check_counts_at_most(source: kinds.Array, named: ArraysByName, path: FieldPath, most: int, of: str) -> None:
    """Refuse counts of more than there is."""
    for where, value in _nested_literals(source, named, path):
        if value > most:
            raise CaseFileError(where, f"expected at most {most}, as there are {most} {of}, got {shorten_value(value)}")


def check_boolean_mask(source: kinds.Array, named: ArraysByName, path: FieldPath) -> None:
    """Refuse what is neither true nor false, nor 1 nor 0."""
    for at, part in _nested_arrays(source, named, path):
        if isinstance(part, kinds.Sum) or part.is_scaled:
            raise CaseFileError(at, "a mask is boolean; it takes no sum, times or plus")
        if isinstance(part, kinds.Lowest):
            raise CaseFileError(at, "a mask is boolean (true = may attend), got the lowest number of a dtype")
        if isinstance(part, kinds.AsBias | Alibi | kinds.RelativeBuckets):
            raise CaseFileError(at, f"a mask is boolean (true = may attend), got a bias ({kinds.kind_of(part)})")
        if isinstance(part, kinds.Drawn):
            whole = part.draw == "randint" or (part.draw == "runif" and part.floor)
            if not whole or (part.low, part.high) != (0, 2):
                raise CaseFileError(at, "a mask is boolean; a drawn one is `draw: randint, low: 0, high: 2`")
        for where, value in _literals_with_paths(part, at):
            if value not in (0, 1):
                raise CaseFileError(where, f"a mask is boolean (true = may attend), got {value}")


def check_parts_are_masks(source: kinds.Array, named: ArraysByName, path: FieldPath) -> None:
    """Refuse numbers other than true and false in arrays that are made of masks."""
    for where, part in _parts_with_paths(source, named, path):
        if isinstance(source, kinds.AnyOf | kinds.AllOf | kinds.AsBias):
            check_boolean_mask(part, named, where)
        elif not isinstance(source, kinds.Reference):  # an array by a name was checked itself
            check_parts_are_masks(part, named, where)


def check_is_no_mask(source: kinds.Array, named: ArraysByName, path: FieldPath) -> None:
    """Refuse a mask as it is in the place of numbers: added, it forbids nothing."""
    if source.is_scaled:
        return
    if isinstance(source, kinds.Reference):
        check_is_no_mask(named[source.ref], named, path)
    elif (kind := kinds.kind_of(source)) in kinds.MASK_KINDS:
        raise CaseFileError(
            path, f"expected numbers, got a mask ({kind}); give it as `mask`, or as a bias of 0 and -inf by `as_bias`"
        )


def list_literal_numbers(source: kinds.Array, named: ArraysByName) -> list[float]:
    """Return the numbers that the file spells out for an array and its parts, with repetitions."""
    return [value for _, part in _nested_arrays(source, named) for value in _literals_of_array(part)]


def _literals_of_array(source: kinds.Array) -> Iterable[float]:
    if isinstance(source, StoredArray) and source.contents:
        return source.contents.listed_numbers
    return (value for _, value in _literals_with_paths(source, ()))


def _parts_with_paths(
    source: kinds.Array, named: ArraysByName, path: FieldPath
) -> Iterator[tuple[FieldPath, kinds.Array]]:
    """Yield the arrays that one refers to or is made of, each with its place."""
    if isinstance(source, kinds.Reference):
        yield path, named[source.ref]
    for place, part in kinds.array_parts_with_paths(source):
        yield (*path, *place), part


def _nested_arrays(
    source: kinds.Array, named: ArraysByName, path: FieldPath = ()
) -> Iterator[tuple[FieldPath, kinds.Array]]:
    """Yield an array and, at every level, those that it refers to or is made of, each with its place."""
    yield path, source
    for where, part in _parts_with_paths(source, named, path):
        yield from _nested_arrays(part, named, where)


def _has_arithmetic(source: kinds.Array, named: ArraysByName) -> bool:
    """Return whether the numbers differ from those that the file spells out."""
    return any(
        part.is_scaled or isinstance(part, kinds.Sum | kinds.Product) for _, part in _nested_arrays(source, named)
    )


def _magnitude_bound(source: kinds.Array, named: ArraysByName) -> float:
    """Return a bound on the finite numbers of an array, in magnitude, without making it."""
    parts = [_magnitude_bound(part, named) for _, part in _parts_with_paths(source, named, ())]
    match source:
        case kinds.Sum():
            bound = sum(parts)
        case kinds.Product():
            bound = math.prod(parts)
        case kinds.Drawn():
            normal = source.draw == "randn"
            bound = _MAX_NORMAL_DRAW if normal else max(1.0, abs(source.low or 0), abs(source.high or 0))
        case _:
            literals = [abs(value) for _, value in _literals_with_paths(source, ()) if math.isfinite(value)]
            bound = max([*parts, *literals], default=1.0)  # the identity has none of these
    times = 1 if source.times is None else abs(source.times)
    return bound * times + abs(source.plus or 0)


def _nested_literals(source: kinds.Array, named: ArraysByName, path: FieldPath) -> Iterator[tuple[FieldPath, float]]:
    """Yield the numbers that a file spells out, each with its place."""
    for where, part in _nested_arrays(source, named, path):
        yield from _literals_with_paths(part, where)


def _literals_with_paths(source: kinds.Array, path: FieldPath) -> Iterator[tuple[FieldPath, float]]:
    match source:
        case kinds.Values():
            yield from _flatten_with_paths(source.values, (*path, "values"))
        case kinds.PrintedInput():
            for number in parse_printed(source.printed, make_printed_rounding(source)).value.ravel():
                yield (*path, "printed"), float(number)
        case kinds.AsBias():
            yield from (((*path, "as_bias"), number) for number in (0.0, -math.inf))
        case StoredArray():
            numbers = source.contents.distinct_numbers if source.contents else ()
            yield from (((*path, "file"), number) for number in numbers)
        case Alibi():
            yield (*path, "alibi"), -generated.alibi_magnitude_bound(source)
        case kinds.Constant():
            yield (*path, "constant"), source.constant
        case kinds.Ascending() | kinds.Geometric():
            field = kinds.kind_of(source)
            start, by = map(np.float64, getattr(source, field))
            last = math.prod(source.shape) - 1
            # The first, the second and the last number bound all others; an empty array has none.
            for index in sorted({0, min(1, last), last} if last >= 0 else ()):
                with np.errstate(all="ignore"):
                    value = start + by * index if isinstance(source, kinds.Ascending) else start * by**index
                yield (*path, field), float(value if index else start)


def _flatten_with_paths(values: Any, path: FieldPath) -> Iterator[tuple[FieldPath, float]]:
    if not isinstance(values, list):
        yield path, values
        return
    for number, value in enumerate(values):
        yield from _flatten_with_paths(value, (*path, number))


MAX_ARRAY_ELEMENTS = MAX_STORED_NUMBERS
"""The largest array of a case: 512 MiB in float64."""
MAX_CASE_NUMBERS = 2**27
"""The most numbers of all arrays that a case makes, the parts of arrays among them: 1 GiB in float64."""
MAX_NESTED_ARRAYS = 200
"""The most arrays that one may be made of."""
MAX_INT64 = 2**63 - 1
"""The largest int64, the dtype in which ``randint`` draws."""


@dataclass(frozen=True)
class CheckedArrays:
    """Shapes of the named arrays, in the order in which they are made; how many numbers are made for all of them.

    ``spelled_and_checked_counts`` says how many numbers the file spells out for each, and how many are looked at to
    check it. ``file_shapes`` are the shapes of inputs in the file, before heads are split and axes added.
    """

    sources: Mapping[str, kinds.Array]
    shapes: Mapping[str, Shape]
    number_count: int = 0
    spelled_and_checked_counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    file_shapes: Mapping[str, Shape] = field(default_factory=dict)


@dataclass
class _ArrayBudget:
    """The sources of arrays, and how many numbers have been made so far."""

    shapes: Mapping[str, Shape]
    random: model.Random | None
    number_count: int

    def count_array(self, shape: Shape, path: FieldPath) -> Shape:
        """Count one more array. Raises ``CaseFileError`` if it, or all of them together, are too large."""
        self.number_count += math.prod(_require_allowed_size(shape, path))
        if self.number_count > MAX_CASE_NUMBERS:
            raise CaseFileError(
                path,
                f"with this array {self.number_count} numbers are made for the case; "
                f"expected at most {MAX_CASE_NUMBERS}",
            )
        return shape


NO_CHECKED_ARRAYS = CheckedArrays({}, {})


def check_named_arrays(
    group: Mapping[str, kinds.Array], before: CheckedArrays, random: model.Random | None, where: FieldPath
) -> CheckedArrays:
    """Check the arrays that inputs may refer to: first the file's, then a case's with the file's as ``before``.

    Raises ``CaseFileError`` for a name that is taken, and for an array that cannot be made.
    """
    sources, shapes, spelled = dict(before.sources), dict(before.shapes), dict(before.spelled_and_checked_counts)
    making = _ArrayBudget(shapes, random, before.number_count)
    for name, source in group.items():
        path = (*where, "arrays", name)
        if name in sources:
            raise CaseFileError(path, f"the array {name!r} is already defined at the top of the file")
        shapes[name] = _array_shape(source, making, path)
        _check_nesting(source, sources, path)
        sources[name] = source
        spelled[name] = _count_spelled_and_checked(source, spelled)
    return CheckedArrays(sources, shapes, making.number_count, spelled)


def count_checked_numbers(entry: model.CaseEntry, arrays: CheckedArrays) -> int:
    """Return how many numbers are looked at, one by one, to check a case's inputs."""
    return sum(
        _count_spelled_and_checked(kinds.array_or_reference(source), arrays.spelled_and_checked_counts)[1]
        for source in entry.inputs.values()
    )


def _count_spelled_and_checked(source: kinds.Array, named: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return how many numbers the file spells out for an array, and how many the checks look at, at every level."""
    match source:
        case kinds.Values() | kinds.PrintedInput():
            count = _count_listed_numbers(source.values if isinstance(source, kinds.Values) else source.printed)
            return count, count
        case kinds.Reference():
            inner = [named.get(source.ref, (0, 0))]
        case _:
            inner = [_count_spelled_and_checked(part, named) for _, part in kinds.array_parts_with_paths(source)]
            if isinstance(source, MASK_PATTERNS):  # their lists, such as the parents of a tree
                lists = (value for name, value in source if name != "rows" and isinstance(value, list))
                listed = sum(map(_count_listed_numbers, lists))
                inner += [(listed, listed)] * bool(listed)
    numbers = 1 + sum(spelled for spelled, _ in inner)
    return numbers, numbers + sum(looked for _, looked in inner)


def _count_listed_numbers(values: Any) -> int:
    if isinstance(values, list):
        return sum(map(_count_listed_numbers, values))
    return max_number_count(values) if isinstance(values, str) else 1


def check_inputs(
    entry: model.CaseEntry,
    specs: Mapping[str, InputSpec],
    arrays: CheckedArrays,
    random: model.Random | None,
    operation: str,
    where: FieldPath,
    *,
    heads: Mapping[str, int],
) -> CheckedArrays:
    """Check a case's inputs, also for NaN, infinity and masks, which arrays that are no inputs may have.

    ``heads`` are the heads of projections, and of inputs in the merged layout.

    Raises ``CaseFileError`` for an input that the operation lacks, does not have, or cannot take.
    """
    sources: dict[str, kinds.Array] = {}
    shapes: dict[str, Shape] = {}
    in_file: dict[str, Shape] = {}
    making = _ArrayBudget(arrays.shapes, random, arrays.number_count)

    def resolve(name: str, value: kinds.Input) -> None:
        path = (*where, "inputs", name)
        if name not in specs:
            raise CaseFileError(path, f"{operation} has no input {name!r}; expected {', '.join(specs)}")
        source = kinds.array_or_reference(value)
        shape = in_file[name] = _array_shape(source, making, path)
        _check_nesting(source, arrays.sources, path)
        if specs[name].is_boolean:
            check_boolean_mask(source, arrays.sources, path)
        if specs[name].is_number:
            check_is_no_mask(source, arrays.sources, path)
        if specs[name].is_count:
            check_counts(source, arrays.sources, path, specs[name].min_value, is_index=specs[name].is_index)
        if not entry.allow_nonfinite:
            check_finite(source, arrays.sources, path, allow_infinite=specs[name].may_be_infinite)
        with locate_faults(path):
            shapes[name] = operation_input_shape(specs[name], shape, heads.get(name))
        sources[name] = source

    collect_results_or_faults(partial(resolve, name, value) for name, value in entry.inputs.items())
    missing = [name for name, spec in specs.items() if spec.required and name not in sources]
    if missing:
        raise CaseFileError((*where, "inputs", missing[0]), f"{operation} needs this input: {missing[0]} is missing")
    for name in sources:
        if specs[name].required_input not in (None, *sources):
            raise CaseFileError((*where, "inputs", name), f"needs {specs[name].required_input}, which is missing")
    return CheckedArrays(sources, shapes, making.number_count, file_shapes=in_file)


def _check_nesting(source: kinds.Array, named: ArraysByName, path: FieldPath) -> None:
    """Refuse arrays that double with each name (b is a + a, c is b + b, ...), and numbers instead of masks."""
    if any(islice(_nested_arrays(source, named), MAX_NESTED_ARRAYS, None)):
        raise CaseFileError(path, f"made of more than {MAX_NESTED_ARRAYS} arrays, counting the parts of parts")
    check_parts_are_masks(source, named, path)


def _array_shape(source: kinds.Array, making: _ArrayBudget, path: FieldPath) -> Shape:
    """Shape of an array, without making it."""
    for name, number in (("times", source.times), ("plus", source.plus)):
        if number is not None and not math.isfinite(number):
            raise CaseFileError((*path, name), f"expected a finite number, got {number}")
    with locate_faults(path):
        shape = shape_after_arrangement(making.count_array(_shape_before_arranging(source, making, path), path), source)
    if len(shape) > MAX_AXES:
        raise CaseFileError(path, f"expected at most {MAX_AXES} axes, got {len(shape)}")
    return shape if source.rows is None else making.count_array(shape, path)  # a row may be taken many times


def _shape_before_arranging(source: kinds.Array, making: _ArrayBudget, path: FieldPath) -> Shape:
    match source:
        case kinds.Values():
            return _nested_shape(source.values, (*path, "values"))
        case kinds.PrintedInput():
            printed = parse_printed_rows(source.printed, source, (*path, "printed"))
            if not printed.given.all():
                raise CaseFileError((*path, "printed"), "an input must give every number, '.' leaves one out")
            return printed.shape
        case kinds.Identity():
            return _require_allowed_size((source.identity, source.identity), (*path, "identity"))
        case kinds.Reference():
            if source.ref not in making.shapes:
                known = ", ".join(making.shapes) or "none"
                raise CaseFileError(path, f"no array is named {source.ref!r}; arrays defined before it: {known}")
            return making.shapes[source.ref]
        case kinds.Lowest() | kinds.Drawn() | kinds.Constant() | kinds.Ascending() | kinds.Geometric():
            field = "lowest" if isinstance(source, kinds.Lowest) else "shape"
            shape = _require_allowed_size(tuple(getattr(source, field)), (*path, field))
            if isinstance(source, kinds.Drawn):
                _check_draw(source, making.random, shape, path)
            return shape
    parts = [_array_shape(part, making, (*path, *place)) for place, part in kinds.array_parts_with_paths(source)]
    with locate_faults(path, kinds.kind_of(source)):
        return _require_allowed_size(_shape_from_parts(source, parts), path)


def _shape_from_parts(source: kinds.Array, parts: list[Shape]) -> Shape:
    """Return the shape of an array that is stored, made of positions, or made of arrays of these shapes."""
    match source:
        case StoredArray():
            return source.remember_contents(summarize_stored_array(source)).shape
        case kinds.Concat():
            return concatenated_shape(parts, source.axis)
        case kinds.Blocks():
            return generated.block_mask_shape(parts[0], source.block_size, source.shape)
        case kinds.RelativeBuckets():
            return generated.bucket_bias_shape(source, parts[0])
        case Alibi():
            return generated.alibi_shape(source)
    return generated.mask_shape(source) if isinstance(source, MASK_PATTERNS) else broadcast_shape(parts)


def _check_draw(source: kinds.Drawn, random: model.Random | None, shape: Shape, path: FieldPath) -> None:
    if random is None:
        raise CaseFileError(path, "a drawn array needs a generator and a seed: give the case or the defaults `random`")
    parameters = draw_parameters(source)
    for name, value in parameters.items():
        if not math.isfinite(value):
            raise CaseFileError((*path, name), f"expected a finite number, got {value}")
        if source.draw == "randint" and (value != int(value) or abs(value) > MAX_INT64):
            raise CaseFileError((*path, name), f"expected a whole number of at most 63 bits, got {value}")
    if math.isinf(float(parameters.get("high", 0)) - float(parameters.get("low", 0))):
        raise CaseFileError((*path, "high"), "high - low is beyond the range of float64")
    with locate_faults(path, "draw"):
        generated.check_draw(random.generator, source.draw, parameters, shape)


def has_too_many_elements(shape: Shape) -> bool:
    """Return whether an array has too many elements; an axis of length 0 is no leave to grow along others."""
    return math.prod(max(1, length) for length in shape) > MAX_ARRAY_ELEMENTS


def _require_allowed_size(shape: Shape, path: FieldPath) -> Shape:
    if has_too_many_elements(shape):
        elements = f"{math.prod(shape)} elements" if all(shape) else "too long, though empty"
        raise CaseFileError(path, f"{format_shape(shape)} is {elements}; expected at most {MAX_ARRAY_ELEMENTS}")
    return shape


def _nested_shape(values: Any, path: FieldPath) -> Shape:
    if isinstance(values, bool | int | float):
        return ()
    if not isinstance(values, list) or not values:
        hint = "; an array of length 0 is a `constant` with its `shape`" if values == [] else ""
        raise CaseFileError(path, f"expected a number or a list of numbers, got {shorten_value(values)}{hint}")
    shapes = [_nested_shape(value, (*path, number)) for number, value in enumerate(values)]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise CaseFileError(
                (*path, number),
                f"ragged: row {number + 1} has shape {format_shape(shape)}, row 1 has shape {format_shape(shapes[0])}",
            )
    return (len(values), *shapes[0])


def parse_printed_rows(rows: PrintedRows, fields: RoundingFields, path: FieldPath) -> PrintedArray:
    """Read printed numbers as they were rounded. Raises ``CaseFileError`` for a word that is no number."""
    if sum([fields.exact, fields.decimals is not None, fields.significant_digits is not None]) > 1:
        raise CaseFileError(path[:-1], "expected at most one of exact, decimals, significant_digits")
    if fields.exact and fields.digits is not None:
        raise CaseFileError(
            (*path[:-1], "digits"), "exact numbers are not rounded; expected at most one of exact, digits"
        )
    with locate_faults(path):
        return parse_printed(rows, make_printed_rounding(fields))
