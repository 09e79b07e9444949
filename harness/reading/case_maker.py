"""One entry of a case file made into a case, with everything that is checked before anybody computes it.

A case's options are read over those of its file: which apply, which make sense together, in the form that the rest
takes; and so is the form in which inputs come and are handed over: layout, storage, memory layout.

A case of ``projections: linear`` holds weights as ``nn.Linear`` of torch does: (out, in), and three of them packed in
one. It is rewritten to one whose weights are (in, out) before anything else is read of it, so that nobody else knows of
the other layout. Faults are reported in the file's own names and shapes.

Statistical tests rest on inputs that are continuous and unstructured, so that rounding errors behave like noise.
Repeated or printed rows, small integers, a common offset or scores that are all alike make rounding errors that agree
with each other, and right implementations would be flagged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from attncheck.dtypes import numpy_dtype
from attncheck.reading import array_kinds as kinds
from attncheck.reading import model
from attncheck.reading.array_kinds import Alibi, Array
from attncheck.reading.arrays import (
    MAX_ELEMENTS,
    Arrays,
    Named,
    check_at_most,
    check_lowest,
    check_range,
    is_too_large,
    looked_at,
    named_arrays,
    resolve_inputs,
    spelled_out,
)
from attncheck.reading.case import Case
from attncheck.reading.diagnostics import CaseFileError
from attncheck.reading.expectations import read_expectations
from attncheck.reading.inputs import DEFAULT_EIGHT_BITS, make_exact_inputs
from attncheck.reading.lowering import check_lowered
from attncheck.reading.shapes import ShapeFault, bind_axes, optional_gradients, repeated_axes, show, stage_shapes
from attncheck.reading.yaml_reader import FieldPath
from attncheck.spec import (
    ASKED_BY,
    DEFAULT_SCORE,
    HEADS,
    OPERATIONS,
    OPTIONS,
    PACKED_PROJECTIONS,
    PER_HEAD,
    SCORE_SPECS,
    InputSpec,
    Options,
    Shape,
    computed_stages,
    inputs_of,
)

_ADDED = frozenset(
    name for operation in OPERATIONS.values() for name, spec in operation.inputs.items() if spec.may_be_infinite
)
"""Inputs that forbid a key where they are -inf."""
_LARGEST_FILL = 65504
ONLY_WITH_SOME_SCORES: Mapping[str, tuple[str, ...]] = {
    option: tuple(name for name, score in SCORE_SPECS.items() if option in score.options)
    for option in OPTIONS
    if any(option in score.options for score in SCORE_SPECS.values())
}
"""Options of scoring that some kinds of score alone have."""


def read_options(defaults: model.Options, entry: model.CaseEntry, operation: str, where: FieldPath) -> dict[str, Any]:
    """Merge a case's options over the file's; the case's own must apply to it, the file's are for those that they fit.

    A window becomes a pair. Raises ``CaseFileError``.
    """
    own = entry.options.model_dump(exclude_none=True)
    allowed = OPERATIONS[operation].options
    for name in own:
        if name not in allowed:
            listed = ", ".join(sorted(allowed)) or "no options"
            raise CaseFileError((*where, "options", name), f"does not apply to {operation}, which takes {listed}")
    shared = {name: value for name, value in defaults.model_dump(exclude_none=True).items() if name in allowed}
    idle = _idle(shared | own, operation, entry)
    for name, reason in idle.items():
        if name in own:
            raise CaseFileError((*where, "options", name), reason)
    options = {name: value for name, value in (shared | own).items() if name not in idle}
    paths = {name: ((*where, "options", name) if name in own else ("defaults", "options", name)) for name in options}
    _check(options, operation, where, paths)
    if "window" in options:
        options["window"] = tuple(options["window"])
    return options


def check_empty_rows(
    entry: model.CaseEntry,
    options: Mapping[str, Any],
    inputs: Mapping[str, Array],
    named: Mapping[str, Array],
    keys: int,
    where: FieldPath,
) -> None:
    """Refuse a word on rows without a key in a case that can have none, and a fill where nothing says no."""
    if entry.options.empty_rows is None and entry.options.mask_fill is None:
        return
    infinite = any(map(math.isinf, chain(*(spelled_out(inputs[name], named) for name in _ADDED & inputs.keys()))))
    masks = ASKED_BY["masked"]
    forbidden = masks & inputs.keys() or any(options.get(name) for name in masks)
    if keys and not forbidden and entry.options.mask_fill is not None:
        message = "stands in the place of scores that a mask, causality, a window or lengths forbid; nothing does here"
        raise CaseFileError((*where, "options", "mask_fill"), message)
    if keys and not forbidden and not infinite:
        message = "says what a query gives that may attend to no key; nothing forbids a key here"
        raise CaseFileError((*where, "options", "empty_rows"), message)


def _idle(options: Mapping[str, Any], operation: str, entry: model.CaseEntry) -> dict[str, str]:
    """Return the options that say nothing of such a case, each with the reason."""
    idle: dict[str, str] = {}
    if "alignment" in options and not options.get("is_causal") and "window" not in options:
        idle["alignment"] = "says where queries stand for is_causal or a window, and this case has neither"
    if "alignment" in options and "query_offsets" in entry.inputs:
        idle["alignment"] = "says where queries stand, and query_offsets say it of each batch entry"
    for name in options:
        needed = OPTIONS[name].needs
        if needed is not None and needed not in entry.inputs:
            idle[name] = f"says something of {needed}, which this case has not"
    if not OPERATIONS[operation].has_projections and entry.layout == "split":
        for name in HEADS:
            idle[name] = "says how inputs in `layout: merged` are split; these inputs have an axis of heads"
    return idle


def _check(options: Mapping[str, Any], operation: str, where: FieldPath, paths: Mapping[str, FieldPath]) -> None:
    if OPERATIONS[operation].has_projections and "heads" not in options:
        raise CaseFileError((*where, "options"), f"{operation} needs options.heads")
    for name, scores in ONLY_WITH_SOME_SCORES.items():
        if name in options and options.get("score", DEFAULT_SCORE) not in scores:
            raise CaseFileError(paths[name], f"the {options['score']} score has no {name}")
    for name, spec in OPTIONS.items():
        if name in options and spec.type is float and not math.isfinite(options[name]):
            raise CaseFileError(paths[name], f"expected a finite number, got {options[name]}")
    if options.get("mask_fill", 0) > _LARGEST_FILL:
        message = f"expected at most {_LARGEST_FILL}, which every dtype holds, got {options['mask_fill']}"
        raise CaseFileError(paths["mask_fill"], message)
    if options.get("window") == [None, None]:
        raise CaseFileError(paths["window"], "bounds nothing on either side; expected a number of keys on one at least")
    heads, kv_heads = options.get("heads"), options.get("kv_heads")
    if heads and kv_heads and heads % kv_heads:
        raise CaseFileError(
            paths["kv_heads"], f"{heads} query heads cannot share {kv_heads} key and value heads evenly"
        )


_MERGED_AXES: Mapping[str, str] = {
    name: spec.axes[1]
    for operation in PER_HEAD
    for name, spec in OPERATIONS[operation].inputs.items()
    if spec.is_number and not spec.broadcast and len(spec.axes) == 4
}
"""Inputs whose heads may lie side by side, and the letter that counts them."""
MERGED_INPUTS = frozenset(_MERGED_AXES)


def merged_heads(
    entry: model.CaseEntry, operation: str, options: Mapping[str, Any], where: FieldPath
) -> dict[str, int]:
    """Return how many heads lie side by side in each input that comes in the merged layout.

    Raises ``CaseFileError`` for an operation that has no such layout, and where ``options.heads`` is missing.
    """
    if entry.layout == "split":
        return {}
    if operation not in PER_HEAD:
        raise CaseFileError((*where, "layout"), f"{operation} has no merged layout; {' and '.join(PER_HEAD)} do")
    if "heads" not in options:
        raise CaseFileError((*where, "layout"), "the merged layout needs options.heads")
    heads = {"H": int(options["heads"]), "Hkv": int(options.get("kv_heads", options["heads"]))}
    return {name: heads[_MERGED_AXES[name]] for name in entry.inputs if name in _MERGED_AXES}


def projected_heads(specs: Mapping[str, InputSpec], options: Mapping[str, Any]) -> dict[str, int]:
    """Return how many heads each projection makes."""
    heads = {"H": options.get("heads"), "Hkv": options.get("kv_heads", options.get("heads"))}
    letters = {name: spec.axes[-1].partition("*")[0] for name, spec in specs.items() if len(spec.axes) == 2}
    return {name: int(heads[letter]) for name, letter in letters.items() if heads.get(letter) is not None}


def heads_note(given: Shape, fitted: Shape) -> str:
    """Return how the shape in the file became another one: its heads were split, or those of a projection merged."""
    if len(fitted) == 4 and given != fitted[4 - len(given) :]:
        return f"; heads are split: {show(given)} in the file is {fitted[1]} heads of width {fitted[3]}"
    if len(given) == 3 and len(fitted) == 2:
        return f"; heads are merged: {show(given)} in the file is a matrix for each of {given[0]} heads"
    return ""


def memory_layout_of(entry: model.CaseEntry, merged: Mapping[str, int], where: FieldPath) -> dict[str, str]:
    """Return how inputs lie in memory: as the case says, and in the merged layout with their heads inside of length.

    Raises ``CaseFileError`` where a case says both of one input.
    """
    for name in entry.memory_layout:
        if name in merged:
            raise CaseFileError(
                (*where, "memory_layout", name), "`layout: merged` says already how this lies in memory"
            )
    return dict.fromkeys(merged, "transposed") | entry.memory_layout


def check_form(case: Case, where: FieldPath) -> None:
    """Refuse a memory layout that an input cannot have, storage that is not narrower, and stages that cannot be.

    Draws nothing, except for an input that is to have equal slices.
    """
    _check_memory_layout(case, where)
    _check_storage(case.storage, case.dtypes, where)
    for number, stage in enumerate(case.judged_stages or ()):
        known = [name for name in OPERATIONS[case.operation].stages if name in case.stage_shapes]
        if stage not in known:
            raise CaseFileError((*where, "stages", number), f"{case.operation} has {', '.join(known)} here, no {stage}")


def _check_storage(storage: str | None, dtypes: Sequence[str], where: FieldPath) -> None:
    if storage is None:
        return
    narrow = [dtype for dtype in dtypes if numpy_dtype(dtype).itemsize <= numpy_dtype(storage).itemsize]
    if narrow:
        raise CaseFileError(
            (*where, "storage"), f"expected `dtypes` that are all wider than {storage}, got {', '.join(narrow)}"
        )


def _check_memory_layout(case: Case, where: FieldPath) -> None:
    numbers = [name for name in case.inputs if case.input_specs[name].is_number]
    for name, kind in case.memory_layout.items():
        path = (*where, "memory_layout", name)
        if name not in numbers:
            raise CaseFileError(path, f"expected an input of this case that holds numbers: {', '.join(numbers)}")
        if kind == "transposed" and len(case.input_shapes[name]) != 4:
            shape = show(case.input_shapes[name])
            raise CaseFileError(path, f"only an input with an axis of heads can be transposed in memory, got {shape}")
    if "broadcast" in case.memory_layout.values():
        made = make_exact_inputs(case)
        for name, kind in case.memory_layout.items():
            if kind == "broadcast" and not repeated_axes(made[name].array):
                raise CaseFileError(
                    (*where, "memory_layout", name),
                    "broadcast needs an axis, other than the last, along which all slices are alike; "
                    f"{name} of shape {show(case.input_shapes[name])} has none",
                )


_CONTINUOUS = ("rand", "randn", "runif")


def support_statistics(
    specs: Mapping[str, InputSpec], inputs: Mapping[str, kinds.Array], named: Named, options: Mapping[str, object]
) -> bool:
    """Tell from how they were drawn whether a case's inputs support statistics, for a case that does not say so."""
    if options.get("scale") == 0:
        return False  # every weight of a row is the same
    return all(
        _is_continuous(source, named) or (specs[name].broadcast and _is_block(source, named))
        for name, source in inputs.items()
        if specs[name].is_number
    )


def _is_continuous(source: kinds.Array, named: Named) -> bool:
    """Return whether an array is drawn from a continuous distribution, and at most multiplied, moved or thinned out."""
    repeated = source.rows is not None and len(set(source.rows)) < len(source.rows)
    if repeated or source.times == 0 or source.plus:
        return False
    if isinstance(source, kinds.Reference):
        return _is_continuous(named[source.ref], named)
    return isinstance(source, kinds.Drawn) and source.draw in _CONTINUOUS and not source.floor


def _is_block(source: kinds.Array, named: Named) -> bool:
    """Return whether a bias is a mask: 0 where a key may be attended, minus infinity where it may not."""
    if isinstance(source, kinds.Drawn | kinds.Identity | kinds.Lowest | Alibi | kinds.RelativeBuckets):
        return False
    if source.times is not None or source.plus is not None:
        return False
    if isinstance(source, kinds.AsBias):
        return True
    inside = [part for _, part in kinds.parts_of(source)]
    parts = inside or ([named[source.ref]] if isinstance(source, kinds.Reference) else [])
    return all(value in (0, -math.inf) for value in spelled_out(source, named)) and all(
        _is_block(part, named) for part in parts
    )


LINEAR = "linear"
_INLINE = "inputs."
"""Begins the name of a packed array that is written where it is used; no array of a file has a dot in its name."""
_WEIGHTS = frozenset(
    name
    for operation in OPERATIONS.values()
    if operation.has_projections
    for name in operation.inputs
    if name.endswith("_weight")
)


def read_linear(
    entry: model.CaseEntry,
    options: Mapping[str, Any],
    arrays: Arrays,
    random: model.Random | None,
    where: FieldPath,
) -> tuple[model.CaseEntry, Arrays]:
    """Return the case whose projections are (in, out), one for each input, and the arrays that it refers to.

    A packed array that is written where it is used is drawn before the other inputs. Raises ``CaseFileError`` for one
    that cannot be cut, and where the case does not say that its projections are linear.
    """
    packed = [name for name in PACKED_PROJECTIONS if name in entry.inputs]
    if options.get("projections") != LINEAR:
        if packed:
            message = "holds three projections as nn.Linear does; such a case has `options: {projections: linear}`"
            raise CaseFileError((*where, "inputs", packed[0]), message)
        return entry, arrays
    inputs: dict[str, kinds.Input] = {}
    for name, given in entry.inputs.items():
        if name in PACKED_PROJECTIONS:
            parts, arrays = _cut(name, given, entry, (options, arrays, random), where)
            inputs |= parts
        else:
            inputs[name] = _turned(given) if name in _WEIGHTS else given
    return entry.model_copy(update={"inputs": inputs}), arrays


def in_terms_of_file(error: CaseFileError, entry: model.CaseEntry, where: FieldPath) -> CaseFileError:
    """Return a fault of an input that was cut from a packed one as a fault of that."""
    if error.others:
        first, *others = (in_terms_of_file(each, entry, where) for each in (_alone(error), *error.others))
        return CaseFileError(first.path, str(first), others)
    field = error.path[len(where) :]
    if field[:1] != ("inputs",) or len(field) < 2 or field[1] in entry.inputs:
        return error
    for packed, names in PACKED_PROJECTIONS.items():
        if field[1] in names and packed in entry.inputs:
            return CaseFileError((*where, "inputs", packed, *field[2:]), f"{field[1]}: {error}")
    return error


def _alone(error: CaseFileError) -> CaseFileError:
    return CaseFileError(error.path, str(error))


def linear_note(name: str, given: Shape, options: Mapping[str, Any]) -> str:
    """Return which shape a weight has in the file, where messages have the other one."""
    if options.get("projections") != LINEAR or name not in _WEIGHTS or len(given) < 2:
        return ""
    return f"; projections are linear: {show((*given[:-2], given[-1], given[-2]))} in the file is (out, in)"


def _turned(given: kinds.Input) -> kinds.Array:
    """Swap the last two axes: of each head, where there is a matrix for each."""
    source = kinds.as_array(given)
    if isinstance(given, str):
        return source.model_copy(update={"transpose": True})
    return source.model_copy(update={"transpose": not source.transpose})


def _cut(
    name: str,
    given: kinds.Input,
    entry: model.CaseEntry,
    read: tuple[Mapping[str, Any], Arrays, model.Random | None],
    where: FieldPath,
) -> tuple[dict[str, kinds.Input], Arrays]:
    """Return the three inputs that a packed one holds, as rows of it."""
    options, arrays, random = read
    path = (*where, "inputs", name)
    for own in PACKED_PROJECTIONS[name]:
        if own in entry.inputs:
            raise CaseFileError((*where, "inputs", own), f"is given twice: {name} holds it, too")
    label = given if isinstance(given, str) else f"{_INLINE}{name}"
    if label not in arrays.sources:
        try:
            arrays = named_arrays({label: kinds.as_array(given)}, arrays, random, where)
        except CaseFileError as error:
            raise CaseFileError((*path, *error.path[len(where) + 2 :]), str(error)) from None
    shape, is_weight = arrays.shapes[label], name.endswith("_weight")
    limits = _limits(name, shape, options, path)
    cut = {
        own: kinds.Reference.model_construct(ref=label, rows=list(range(*each)), transpose=is_weight)
        for own, each in zip(PACKED_PROJECTIONS[name], pairwise(limits), strict=True)
    }
    return dict(cut), arrays


def _limits(name: str, shape: Shape, options: Mapping[str, Any], path: FieldPath) -> tuple[int, ...]:
    """Return where the rows of query, key and value begin and end."""
    heads = int(options.get("heads", 1))  # without which the case is refused
    shared = int(options.get("kv_heads", heads))
    together = heads + 2 * shared
    axes = "(3E, E)" if name.endswith("_weight") else "(3E)"
    if len(shape) != axes.count("E"):
        raise CaseFileError(path, f"expected {axes}, the rows of query, key and value, got shape {show(shape)}")
    if shape[0] % together:
        raise CaseFileError(
            path,
            f"shape {show(shape)}: {shape[0]} rows cannot be shared evenly by {heads} heads of queries, {shared} of "
            f"keys and {shared} of values",
        )
    width = shape[0] // together
    return 0, width * heads, width * (heads + shared), shape[0]


AT_MOST_WORDS: Mapping[str, str] = {"T": "keys", "Lk": "keys", "Lq": "queries", "Np": "pages"}
"""What an axis that counts may not exceed counts itself."""
MAX_LOOKED_AT = 2**17
"""Numbers that are looked at one by one for all cases of a file, counted again wherever a case refers to them."""


@dataclass
class Budget:
    """The cost that reading a file may have, whatever its cases refer to."""

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
    """The name of a case, and its place."""

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
