"""One entry of a case file made into a case, with everything that is checked before anybody computes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attncheck.reading import model
from attncheck.reading.arrays import MAX_ELEMENTS, Arrays, is_too_large, looked_at, resolve_inputs
from attncheck.reading.case import Case
from attncheck.reading.diagnostics import CaseFileError
from attncheck.reading.expectations import read_expectations
from attncheck.reading.forms import check_form, heads_note, memory_layout_of, merged_heads, projected_heads
from attncheck.reading.inputs import DEFAULT_EIGHT_BITS
from attncheck.reading.linear_projections import in_terms_of_file, linear_note, read_linear
from attncheck.reading.lowered import check_lowered
from attncheck.reading.number_checks import check_at_most, check_lowest, check_range, spelled_out
from attncheck.reading.options import check_empty_rows, read_options
from attncheck.reading.shapes import ShapeFault, bind_axes, optional_gradients, show, stage_shapes
from attncheck.reading.statistics_support import support_statistics
from attncheck.reading.yaml_scalars import FieldPath
from attncheck.spec import InputSpec, Options, Shape, computed_stages, inputs_of

AT_MOST_WORDS: Mapping[str, str] = {"T": "keys", "Lk": "keys", "Lq": "queries", "Np": "pages"}
"""What an axis that counts may not exceed counts itself."""
MAX_LOOKED_AT = 2**17
"""Numbers that are looked at one by one for all cases of a file, counted again wherever a case refers to them."""


@dataclass
class Budget:
    """What reading a file may cost, whatever its cases refer to."""

    left: int = field(default_factory=lambda: MAX_LOOKED_AT)

    def spend(self, numbers: int, path: FieldPath) -> None:
        """Raises ``CaseFileError`` where the cases read so far have used it up."""
        self.left -= numbers
        if self.left < 0:
            raise CaseFileError(
                path,
                f"the file's cases spell out or refer to more than {MAX_LOOKED_AT} numbers; draw large arrays instead "
                "of typing them, or write several files",
            )


@dataclass(frozen=True)
class CaseLocation:
    """What a case is called, and where it stands."""

    id: str
    file: str
    line: int
    path: FieldPath


def random_of(file: model.CaseFile, entry: model.CaseEntry) -> model.Random | None:
    """Return how a case draws its arrays: as it says itself, or as the file says of all."""
    return entry.random or file.defaults.random


def make_case(
    file: model.CaseFile, entry: model.CaseEntry, arrays: Arrays, budget: Budget, location: CaseLocation
) -> Case:
    """Return the case that an entry describes, with ``arrays`` it may refer to.

    Raises ``CaseFileError`` for its faults, and where the file's cases have used up the ``budget``.
    """
    where = location.path
    options = read_options(file.defaults.options, entry, entry.operation or file.operation, where)
    read, arrays = read_linear(entry, options, arrays, random_of(file, entry), where)
    try:
        return _make_case(file, read, options, arrays, budget, location)
    except CaseFileError as error:
        raise in_terms_of_file(error, entry, where) from None


def _make_case(
    file: model.CaseFile,
    entry: model.CaseEntry,
    options: Mapping[str, Any],
    arrays: Arrays,
    budget: Budget,
    location: CaseLocation,
) -> Case:
    where = location.path
    operation = entry.operation or file.operation
    specs = inputs_of(operation, str(options["score"]) if "score" in options else None)
    merged = merged_heads(entry, operation, options, where)
    budget.spend(looked_at(entry, arrays), (*where, "inputs"))
    heads = merged | projected_heads(specs, options)
    inputs = resolve_inputs(entry, specs, arrays, random_of(file, entry), operation, where, heads=heads)
    if not computed_stages(operation, options, inputs.sources):
        raise CaseFileError(
            (*where, "inputs"),
            f"{operation} needs a mask, a bias, key_lengths, a query_mask, options.is_causal or a window",
        )
    lengths = _lengths(specs, inputs, options, where)
    keys = lengths.get("T", 0)  # parts that are merged have none any more
    dtypes = tuple(dict.fromkeys(entry.dtypes or file.defaults.dtypes))
    computed_in = entry.computed_in or file.source.computed_in
    stored_in = tuple(filter(None, [entry.storage, computed_in]))
    eight_bits = str(options.get("stored_as", DEFAULT_EIGHT_BITS))
    _check_numbers(specs, inputs, arrays, (dtypes, stored_in, eight_bits), lengths, where)
    _check_lowered(operation, options, specs, inputs, arrays, where)
    _check_offsets(inputs, arrays, options, lengths, where)
    check_empty_rows(entry, options, inputs.sources, arrays.sources, keys, where)
    case = Case(
        id=location.id,
        name=entry.name,
        file=location.file,
        line=location.line,
        title=file.title,
        source=file.source,
        operation=operation,
        random=random_of(file, entry),
        arrays=arrays.sources,
        inputs=inputs.sources,
        input_shapes=inputs.shapes,
        stage_shapes=_stage_shapes(operation, lengths, inputs, entry.stages, where),
        options=Options(**options),
        dtypes=dtypes,
        tags=tuple(dict.fromkeys([*file.defaults.tags, *entry.tags])),
        notes=tuple(entry.notes),
        allow_nonfinite=entry.allow_nonfinite,
        supports_statistics=_supports_statistics(entry, specs, inputs, arrays, options),
        storage=entry.storage,
        merged=frozenset(merged),
        memory_layout=memory_layout_of(entry, merged, where),
        judged_stages=tuple(entry.stages) if entry.stages else None,
        computed_in=computed_in,
        properties=tuple(dict.fromkeys(entry.properties)),
    )
    if "broadcast" in case.memory_layout.values():  # whose arrays are made here, and looked at
        budget.spend(inputs.numbers, (*where, "memory_layout"))
    check_form(case, where)
    return replace(case, expected=read_expectations(entry, case, where))


def _supports_statistics(
    entry: model.CaseEntry, specs: Mapping[str, InputSpec], inputs: Arrays, arrays: Arrays, options: Mapping[str, Any]
) -> bool:
    """Return what a case says of itself, or else whether what it draws has rounding errors as statistics expect."""
    if entry.supports_statistics is not None:
        return entry.supports_statistics
    return entry.storage is None and support_statistics(specs, inputs.sources, arrays.sources, options)


def _lengths(
    specs: Mapping[str, InputSpec], inputs: Arrays, options: Mapping[str, Any], where: FieldPath
) -> dict[str, int]:
    try:
        return bind_axes(specs, inputs.shapes, options.get("heads"), options.get("kv_heads"))
    except ShapeFault as fault:
        given = inputs.given.get(fault.field, ())
        notes = heads_note(given, inputs.shapes.get(fault.field, ())) + linear_note(fault.field, given, options)
        message = f"{fault}{notes}"
        raise CaseFileError((*where, "inputs", fault.field), message) from None


def _check_numbers(
    specs: Mapping[str, InputSpec],
    inputs: Arrays,
    arrays: Arrays,
    dtypes: tuple[tuple[str, ...], tuple[str, ...], str],
    lengths: Mapping[str, int],
    where: FieldPath,
) -> None:
    """Refuse what the narrowest dtype cannot hold, and counts of more than there is.

    ``dtypes`` are those that the case is computed in, those that its inputs are rounded to before, and the format of 8
    bits that keys and values may be stored in.
    """
    computed_in, stored_in, eight_bits = dtypes
    for name, source in inputs.sources.items():
        path = (*where, "inputs", name)
        if specs[name].is_number:
            narrow = (eight_bits,) if specs[name].eight_bits else ()
            check_range(source, arrays.sources, path, (*narrow, *computed_in, *stored_in))
            check_lowest(source, arrays.sources, path, stored_in)
        if specs[name].whole:
            letter = specs[name].at_most
            check_at_most(source, arrays.sources, path, lengths[letter], AT_MOST_WORDS[letter])


def _check_lowered(
    operation: str,
    options: Mapping[str, Any],
    specs: Mapping[str, InputSpec],
    inputs: Arrays,
    arrays: Arrays,
    where: FieldPath,
) -> None:
    """Hold the limits of sequences, pages, and weights of norms against what there is of them."""
    counts = {
        name: np.array(spelled_out(source, arrays.sources))
        for name, source in inputs.sources.items()
        if specs[name].whole
    }
    try:
        check_lowered(operation, options, inputs.shapes, counts)
    except ShapeFault as fault:
        raise CaseFileError((*where, "inputs", fault.field), str(fault)) from None


def _check_offsets(
    inputs: Arrays, arrays: Arrays, options: Mapping[str, Any], lengths: Mapping[str, int], where: FieldPath
) -> None:
    """Refuse offsets of queries that say nothing, and those that lead out of the tables of a rotary embedding."""
    source = inputs.sources.get("query_offsets")
    if source is None:
        return
    path = (*where, "inputs", "query_offsets")
    if not (options.get("is_causal") or "window" in options or "Lr" in lengths):
        message = "says where queries stand for is_causal, a window or a rotary embedding, and this case has none"
        raise CaseFileError(path, message)
    for entry, offset in enumerate(spelled_out(source, arrays.sources)):
        if "Lr" in lengths and offset + lengths["Lq"] > lengths["Lr"]:
            raise CaseFileError(
                path,
                f"the queries of batch entry {entry} end at position {offset + lengths['Lq'] - 1:g}, and the rotary "
                f"embedding has an axis Lr of {lengths['Lr']} positions, from 0 on",
            )


def _stage_shapes(
    operation: str, lengths: Mapping[str, int], inputs: Arrays, judged: Collection[str] | None, where: FieldPath
) -> dict[str, Shape]:
    """Return every stage's shape; one that is judged is refused where it is too large, others nobody has to hold."""
    shapes = stage_shapes(operation, lengths)
    shapes |= {
        stage: inputs.shapes[name] for stage, name in optional_gradients(operation).items() if name in inputs.shapes
    }
    for stage, shape in shapes.items():
        if is_too_large(shape) and (judged is None or stage in judged):
            message = f"{stage} would be {show(shape)}; expected at most {MAX_ELEMENTS} elements"
            if judged is None and not is_too_large(shapes[list(shapes)[-1]]):
                message += f", or `stages: [{list(shapes)[-1]}]` to judge that alone"
            raise CaseFileError((*where, "inputs"), message)
    return shapes
