"""The expectations of a case file, checked and laid out in the stages' own shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from attncheck.reading import model
from attncheck.reading.array_kinds import Digits, PrintedRows, RoundingFields, StoredNumbers, UnitsOff
from attncheck.reading.arrays import parse_printed_rows
from attncheck.reading.case import Case, ExpectedStage
from attncheck.reading.diagnostics import CaseFileError, collect_results_or_faults, locate_faults
from attncheck.reading.printed import PrintedArray, make_exact_printed_array
from attncheck.reading.shapes import add_leading_axes, find_stage_axes, format_shape
from attncheck.reading.stored_arrays import read_stored_array, summarize_stored_array
from attncheck.reading.yaml_reader import FieldPath
from attncheck.spec import OPERATIONS, Shape, computed_stages
from attncheck.spec.quantities import QUANTITIES

COMPARABLE_DTYPES = ("float64", "float32")
"""The dtypes in which decimal numbers can be compared with computed ones."""


_NO_NUMBERS_MESSAGE = "compared with the exact answer alone, not against numbers"


def read_expectations(entry: model.CaseEntry, case: Case, where: FieldPath) -> tuple[ExpectedStage, ...]:
    """Check what a case says of its stages, and give its numbers the stages' shapes. Raises ``CaseFileError``."""
    sources = [_inherit_case_digits(source, entry) for source in entry.expect]
    for name in ("computed_in", "digits"):
        if getattr(entry, name) is not None and not any(source.printed for source in sources):
            raise CaseFileError((*where, name), "says something of printed numbers, and this case expects none")
    narrow = [dtype for dtype in case.dtypes if dtype not in (*COMPARABLE_DTYPES, entry.computed_in)]
    if sources and narrow:
        raise CaseFileError(
            (*where, "expect"),
            f"numbers are compared with what is computed in {' and '.join(COMPARABLE_DTYPES)} alone, and in the dtype "
            f"that the case's `computed_in` names; without {', '.join(narrow)} among `dtypes` this case may have them",
        )
    if sources and OPERATIONS[case.operation].computes_gradients:
        raise CaseFileError((*where, "expect"), f"gradients are {_NO_NUMBERS_MESSAGE}")
    if sources and not OPERATIONS[case.operation].can_have_expected_numbers:
        raise CaseFileError((*where, "expect"), f"{case.operation} is {_NO_NUMBERS_MESSAGE}")
    stages = computed_stages(case.operation, case.options, case.input_shapes)
    shapes = {stage: case.stage_shapes[stage] for stage in stages}
    return tuple(
        collect_results_or_faults(
            partial(_read_expectation, source, case, shapes, (*where, "expect", number))
            for number, source in enumerate(sources)
        )
    )


def _inherit_case_digits(source: model.Expectation, entry: model.CaseEntry) -> model.Expectation:
    """Add the case's ``digits`` to an expectation of printed text that has none."""
    is_text = source.printed is not None and not isinstance(source.printed, StoredNumbers)
    if entry.digits is None or not is_text or source.digits is not None or source.exact:
        return source
    return source.model_copy(update={"digits": entry.digits})


def _read_expectation(
    source: model.Expectation, case: Case, shapes: Mapping[str, Shape], path: FieldPath
) -> ExpectedStage:
    operation = case.operation
    name, of, shape = _name_stage_and_shape(source, operation, shapes, case.input_shapes, path)
    bases = [basis for basis in ("printed", "known", "unprinted") if getattr(source, basis) not in (None, False)]
    if len(bases) != 1:
        raise CaseFileError(
            path, f"expected exactly one of printed, known, unprinted, got {', '.join(bases) or 'none'}"
        )
    basis = bases[0]
    if basis == "known" and not source.because:
        raise CaseFileError((*path, "known"), "known numbers need `because`: a derivation or a cited source")
    numbers = None
    if basis != "unprinted":
        numbers = _read_numbers(getattr(source, basis), source, (*path, basis))
        axes = find_stage_axes(operation, {}).get(of, ()) if name == of else ()
        if "projections" in case.options:  # whose numbers are printed as nn.Linear gives them
            numbers = _split_heads(numbers, shape, axes)
        numbers = _fit_numbers(numbers, source.transpose, shape, axes, (*path, basis))
    return ExpectedStage(
        name=name,
        of=of,
        shape=shape,
        basis=basis,  # type: ignore[arg-type]
        numbers=numbers,
        **source.model_dump(include={"called", "because", "erratum", "note", "transpose"}),
        digits=_describe_last_digits(source.digits),
        stored=isinstance(source.printed, StoredNumbers),
    )


def _read_numbers(source: StoredNumbers | PrintedRows, fields: RoundingFields, path: FieldPath) -> PrintedArray:
    """Return numbers from text, or from a file, which holds them to the last bit."""
    if not isinstance(source, StoredNumbers):
        return parse_printed_rows(source, fields, path)
    for name in ("exact", "decimals", "significant_digits", "digits"):
        if getattr(fields, name) not in (None, False):
            raise CaseFileError((*path[:-1], name), "says how numbers were printed, and these come from a file")
    with locate_faults(path, "file"):
        source.remember_contents(summarize_stored_array(source))
        return make_exact_printed_array(read_stored_array(source))


def _describe_last_digits(digits: Digits | None) -> str | None:
    if isinstance(digits, UnitsOff):
        return f"Last digits may be off by {digits.units}: {digits.because}"
    return "Digits were cut off, not rounded." if digits == "truncated" else None


def _name_stage_and_shape(
    source: model.Expectation, operation: str, shapes: Mapping[str, Shape], inputs: Mapping[str, Shape], path: FieldPath
) -> tuple[str, str, Shape]:
    """Return the name of an expectation, the stage that it is derived from, and its shape."""
    stage = source.of if source.quantity else source.stage
    if (source.quantity is None) == (source.stage is None) or stage is None:
        raise CaseFileError(path, "expected either `stage`, or `quantity` with `of`")
    if stage not in shapes:
        field = (*path, "of" if source.quantity else "stage")
        raise CaseFileError(field, f"{operation} has no stage {stage} here, only {', '.join(shapes)}")
    if not math.prod(shapes[stage]):
        raise CaseFileError(path, f"{stage} has shape {format_shape(shapes[stage])} here, which holds no number")
    if source.quantity is None:
        return stage, stage, shapes[stage]
    quantity = QUANTITIES.get(source.quantity)
    if quantity is None:
        raise CaseFileError((*path, "quantity"), f"no quantity {source.quantity!r}; expected {', '.join(QUANTITIES)}")
    if quantity.required_input and quantity.required_input not in inputs:
        raise CaseFileError((*path, "quantity"), f"{quantity.name} needs the input {quantity.required_input}")
    with locate_faults(path, "quantity"):
        return quantity.name, stage, quantity.compute_shape(shapes[stage], inputs)


def _split_heads(numbers: PrintedArray, shape: Shape, axes: Sequence[str]) -> PrintedArray:
    """Split numbers with heads side by side into heads: (B, L, H*W) -> (B, H, L, W)."""
    if len(axes) != 4 or axes[-1] not in ("D", "Dv") or len(numbers.shape) > 3:
        return numbers
    batch, heads, length, width = shape
    if add_leading_axes(numbers.shape, 3) != (batch, length, heads * width):
        return numbers
    return numbers.rearrange(lambda array: array.reshape(batch, length, heads, width).swapaxes(1, 2))


def _fit_numbers(
    numbers: PrintedArray, transpose: bool, shape: Shape, axes: Sequence[str], path: FieldPath
) -> PrintedArray:
    """Give the numbers the stage's own shape: transposed if declared, leading axes of length 1 added."""
    if transpose:
        if len(numbers.shape) < 2:
            raise CaseFileError(path, "transpose needs two axes")
        numbers = numbers.rearrange(lambda array: array.swapaxes(-1, -2))
    # A document may print a column or a row vector for what is one row or one number here.
    if numbers.text.size != math.prod(shape) or not _is_equal_without_ones(numbers.shape, shape):
        raise CaseFileError(path, _describe_wrong_shape(numbers.shape, shape, axes))
    return numbers.rearrange(lambda array: array.reshape(shape))


def _describe_wrong_shape(got: Shape, wanted: Shape, axes: Sequence[str]) -> str:
    """Return the message for a wrong shape; for several heads, with a hint that each has its own rows."""
    message = f"expected numbers of shape {format_shape(wanted)}"
    if len(axes) < 2 or axes[1] not in ("H", "Hkv") or wanted[1] == 1:
        return f"{message}, got {format_shape(got)}"
    message += f", which is ({', '.join(axes)}): heads are split; got {format_shape(got)}"
    batch, heads, *rest = wanted
    if len(rest) == 2 and _is_equal_without_ones(got, (batch, rest[0], heads * rest[1])):
        message += f", {heads} heads side by side; write a list of texts, one for each head"
    return message


def _is_equal_without_ones(got: Shape, wanted: Shape) -> bool:
    return [length for length in got if length != 1] == [length for length in wanted if length != 1]
