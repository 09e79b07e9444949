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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from attncheck.common.wording import join_words
from attncheck.reading import array_kinds as kinds
from attncheck.reading import model, shapes
from attncheck.reading.array_kinds import Alibi
from attncheck.reading.arrays import (
    MAX_ARRAY_ELEMENTS,
    ArraysByName,
    CheckedArrays,
    check_counts_at_most,
    check_dtype_range,
    check_inputs,
    check_lowest_number,
    check_named_arrays,
    check_positive_scales,
    count_checked_numbers,
    has_too_many_elements,
    list_literal_numbers,
)
from attncheck.reading.case import Case
from attncheck.reading.diagnostics import CaseFileError, locate_faults
from attncheck.reading.expectations import read_expectations
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.lowering import check_layout_inputs
from attncheck.reading.shapes import ShapeFault, format_shape
from attncheck.reading.yaml_reader import FieldPath
from attncheck.spec import (
    DEFAULT_SCORE,
    HEADS,
    OPERATIONS,
    OPERATIONS_PER_HEAD,
    OPTIONS,
    PACKED_PROJECTIONS,
    REQUESTERS_OF_STAGE,
    SCALES,
    SCORE_SPECS,
    InputSpec,
    Options,
    Shape,
    computed_stages,
    dtype_of_input,
    input_specs,
)
from attncheck.spec.dtypes import numpy_dtype

_INPUTS_ADDED_TO_SCORES = frozenset(
    name for operation in OPERATIONS.values() for name, spec in operation.inputs.items() if spec.may_be_infinite
)
"""Inputs whose -inf forbids a key."""
_MAX_MASK_FILL = 65504
"""The largest number of float16, which has the smallest range of all dtypes of cases."""
SCORE_KINDS_OF_OPTION: Mapping[str, tuple[str, ...]] = {
    option: tuple(name for name, score in SCORE_SPECS.items() if option in score.options)
    for option in OPTIONS
    if any(option in score.options for score in SCORE_SPECS.values())
}
"""Options of scoring that some kinds of score alone have."""

_CONTINUOUS_DRAWS = ("rand", "randn", "runif")
_MERGED_AXES: Mapping[str, str] = {
    name: spec.axes[1]
    for operation in OPERATIONS_PER_HEAD
    for name, spec in OPERATIONS[operation].inputs.items()
    if spec.is_number and not spec.is_broadcastable and len(spec.axes) == 4
}
"""Inputs whose heads may lie side by side, and the letter that counts them."""
MERGED_INPUTS = frozenset(_MERGED_AXES)
LINEAR_PROJECTIONS = "linear"
_INLINE_PREFIX = "inputs."
"""The prefix of the name of a packed array that is written in place; no array of a file has a dot in its name."""
_PROJECTION_WEIGHTS = frozenset(
    name
    for operation in OPERATIONS.values()
    if operation.has_projections
    for name in operation.inputs
    if name.endswith("_weight")
)
NAMES_OF_COUNTED_AXES: Mapping[str, str] = {"T": "keys", "Ts": "keys", "Lk": "keys", "Lq": "queries", "Np": "pages"}
"""What an axis that counts may not exceed counts itself."""
MAX_CHECKED_NUMBERS = 2**17
"""Numbers that are looked at one by one for all cases of a file, counted again wherever a case refers to them."""


@dataclass
class CaseBudget:
    """The numbers that may be looked at one by one while a file is read."""

    remaining_numbers: int = field(default_factory=lambda: MAX_CHECKED_NUMBERS)

    def spend_numbers(self, numbers: int, path: FieldPath) -> None:
        """Count the numbers of one more case. Raises ``CaseFileError`` if the cases so far have used the budget up."""
        self.remaining_numbers -= numbers
        if self.remaining_numbers < 0:
            raise CaseFileError(
                path,
                f"the file's cases spell out or refer to more than {MAX_CHECKED_NUMBERS} numbers; draw large arrays "
                "instead of typing them, or write several files",
            )


@dataclass(frozen=True)
class CaseLocation:
    """The name of a case, and its place."""

    id: str
    file: str
    line: int
    path: FieldPath


def find_random_settings(file: model.CaseFile, entry: model.CaseEntry) -> model.Random | None:
    """Return how a case draws its arrays: as it says itself, or as the file says of all."""
    return entry.random or file.defaults.random


@dataclass
class CaseMaker:
    """Makes a case of one entry of a file, with the file's defaults and the ``arrays`` that it may refer to."""

    file: model.CaseFile
    entry: model.CaseEntry
    arrays: CheckedArrays
    budget: CaseBudget
    location: CaseLocation

    def make_case(self) -> Case:
        """Return the case, with everything checked.

        Raises ``CaseFileError`` for its faults, and if the file's cases have used up the ``budget``.
        """
        entry = self.entry
        self.operation = entry.operation or self.file.operation
        self.random = find_random_settings(self.file, entry)
        self.options = self._read_options()
        self.specs = input_specs(self.operation, self.options.get("score"))
        self._transpose_linear_projections()
        try:
            return self._make_case()
        except CaseFileError as error:
            raise _as_fault_of_packed_input(error, entry, self.location.path) from None

    def _make_fault_at(self, message: str, *path: str | int) -> CaseFileError:
        """Return a fault at a field of the case."""
        return CaseFileError((*self.location.path, *path), message)

    def _read_options(self) -> dict[str, Any]:
        """Merge a case's options over the file's defaults; a default that does not apply to the case is left out.

        An option of the case that does not apply is a fault. A window becomes a pair.
        """
        declared = self.entry.options.model_dump(exclude_none=True)
        allowed = OPERATIONS[self.operation].options
        for name in declared:
            if name not in allowed:
                listed = ", ".join(sorted(allowed)) or "no options"
                raise self._make_fault_at(f"does not apply to {self.operation}, which takes {listed}", "options", name)
        defaults = self.file.defaults.options.model_dump(exclude_none=True)
        options = {name: value for name, value in defaults.items() if name in allowed} | declared
        for name, reason in self._find_idle_options(options).items():
            if name in declared:
                raise self._make_fault_at(reason, "options", name)
            del options[name]
        for name, message in _find_option_faults(options, self.operation):
            if name and name not in declared:
                raise CaseFileError(("defaults", "options", name), message)
            raise self._make_fault_at(message, "options", *filter(None, [name]))
        if "window" in options:
            options["window"] = tuple(options["window"])
        return options

    def _find_idle_options(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the options without effect on such a case, each with the reason."""
        idle: dict[str, str] = {}
        if "alignment" in options and not any(options.get(name) for name in OPTIONS["alignment"].requires_one_of):
            idle["alignment"] = "says where queries stand for is_causal or a window, and this case has neither"
        idle |= {
            str(spec.replaced_option): spec.conflict_reason
            for name, spec in OPERATIONS[self.operation].inputs.items()
            if name in self.entry.inputs and spec.replaced_option in options
        }
        for name in options:
            needed = OPTIONS[name].required_input
            if needed is not None and needed not in self.entry.inputs:
                idle[name] = f"says something of {needed}, which this case has not"
        if not OPERATIONS[self.operation].has_projections and self.entry.layout == "split":
            for name in filter(options.get, HEADS):
                idle[name] = "says how inputs in `layout: merged` are split; these inputs have an axis of heads"
        return idle

    def _transpose_linear_projections(self) -> None:
        """Turn projections in the layout of ``nn.Linear`` into (in, out), one for each input.

        A packed array that is written in place is drawn before the other inputs. Raises ``CaseFileError`` if it cannot
        be split, or if the case does not declare that its projections are linear.
        """
        packed = [name for name in PACKED_PROJECTIONS if name in self.entry.inputs]
        if self.options.get("projections") != LINEAR_PROJECTIONS:
            if packed:
                message = "holds three projections as nn.Linear does; such a case has `options: {projections: linear}`"
                raise self._make_fault_at(message, "inputs", packed[0])
            return
        inputs: dict[str, kinds.Input] = {}
        for name, source in self.entry.inputs.items():
            if name in PACKED_PROJECTIONS:
                inputs |= self._split_packed_input(name, source)
            elif name in _PROJECTION_WEIGHTS:  # nn.Linear has (out, in): swap the last two axes
                weight = kinds.array_or_reference(source)
                is_turned = isinstance(source, str) or not weight.transpose
                inputs[name] = weight.model_copy(update={"transpose": is_turned})
            else:
                inputs[name] = source
        self.entry = self.entry.model_copy(update={"inputs": inputs})

    def _split_packed_input(self, name: str, source: kinds.Input) -> dict[str, kinds.Input]:
        """Return the three inputs that a packed one holds, as rows of it."""
        for part in PACKED_PROJECTIONS[name]:
            if part in self.entry.inputs:
                raise self._make_fault_at(f"is given twice: {name} holds it, too", "inputs", part)
        label = source if isinstance(source, str) else f"{_INLINE_PREFIX}{name}"
        where = self.location.path
        if label not in self.arrays.sources:
            try:
                self.arrays = check_named_arrays(
                    {label: kinds.array_or_reference(source)}, self.arrays, self.random, where
                )
            except CaseFileError as error:
                raise self._make_fault_at(str(error), "inputs", name, *error.path[len(where) + 2 :]) from None
        limits = self._row_limits_of_packed_input(name, self.arrays.shapes[label])
        return {
            part: kinds.Reference.model_construct(
                ref=label, rows=list(range(*rows)), transpose=name.endswith("_weight")
            )
            for part, rows in zip(PACKED_PROJECTIONS[name], pairwise(limits), strict=True)
        }

    def _row_limits_of_packed_input(self, name: str, shape: Shape) -> tuple[int, ...]:
        """Return the limits between the rows of query, key and value, and both ends."""
        heads = int(self.options.get("heads", 1))  # without which the case is refused
        shared = int(self.options.get("kv_heads", heads))
        together = heads + 2 * shared
        axes = "(3E, E)" if name.endswith("_weight") else "(3E)"
        if len(shape) != axes.count("E"):
            message = f"expected {axes}, the rows of query, key and value, got shape {format_shape(shape)}"
            raise self._make_fault_at(message, "inputs", name)
        if shape[0] % together:
            message = (
                f"shape {format_shape(shape)}: {shape[0]} rows cannot be shared evenly by {heads} "
                f"heads of queries, {shared} "
                f"of keys and {shared} of values"
            )
            raise self._make_fault_at(message, "inputs", name)
        width = shape[0] // together
        return 0, width * heads, width * (heads + shared), shape[0]

    def _make_case(self) -> Case:
        file, entry, location, operation = self.file, self.entry, self.location, self.operation
        merged = self._count_heads_of_merged_inputs()
        self.budget.spend_numbers(count_checked_numbers(entry, self.arrays), (*location.path, "inputs"))
        heads = merged | _count_projection_heads(self.specs, self.options)
        arguments = (entry, self.specs, self.arrays, self.random, operation, location.path)
        self.inputs = inputs = check_inputs(*arguments, heads=heads)
        if not computed_stages(operation, self.options, inputs.sources):
            message = f"{operation} needs a mask, a bias, key_lengths, a query_mask, options.is_causal or a window"
            raise self._make_fault_at(message, "inputs")
        lengths = self._find_axis_lengths()
        dtypes = tuple(dict.fromkeys(entry.dtypes or file.defaults.dtypes))
        computed_in = entry.computed_in or file.source.computed_in
        self._check_number_ranges(dtypes, tuple(filter(None, [entry.storage, computed_in])), lengths)
        self._check_layout_inputs()
        self._check_query_offsets(lengths)
        self._check_mask_options(lengths.get("T", 0))  # parts that are merged have no keys any more
        case = Case(
            *(location.id, entry.name, location.file, location.line),
            title=file.title,
            source=file.source,
            operation=operation,
            random=self.random,
            arrays=self.arrays.sources,
            inputs=inputs.sources,
            input_shapes=inputs.shapes,
            stage_shapes=self._compute_stage_shapes(lengths),
            options=Options(**self.options),
            dtypes=dtypes,
            tags=tuple(dict.fromkeys([*file.defaults.tags, *entry.tags])),
            notes=tuple(entry.notes),
            allow_nonfinite=entry.allow_nonfinite,
            supports_statistics=self._has_random_rounding_errors(),
            storage=entry.storage,
            merged=frozenset(merged),
            memory_layout=self._memory_layout_of_inputs(merged),
            judged_stages=tuple(entry.stages) if entry.stages else None,
            computed_in=computed_in,
            properties=tuple(dict.fromkeys(entry.properties)),
        )
        self._check_memory_layout(case)
        self._check_storage(dtypes)
        for number, stage in enumerate(case.judged_stages or ()):
            known = [name for name in OPERATIONS[operation].stages if name in case.stage_shapes]
            if stage not in known:
                raise self._make_fault_at(f"{operation} has {', '.join(known)} here, no {stage}", "stages", number)
        return replace(case, expected=read_expectations(entry, case, location.path))

    def _count_heads_of_merged_inputs(self) -> dict[str, int]:
        """Return how many heads lie side by side in each input that comes in the merged layout."""
        if self.entry.layout == "split":
            return {}
        if self.operation not in OPERATIONS_PER_HEAD:
            raise self._make_fault_at(
                f"{self.operation} has no merged layout; {join_words(OPERATIONS_PER_HEAD)} do", "layout"
            )
        if "heads" not in self.options:
            raise self._make_fault_at("the merged layout needs options.heads", "layout")
        query_heads = int(self.options["heads"])
        heads = {"H": query_heads, "Hkv": int(self.options.get("kv_heads", query_heads))}
        return {name: heads[_MERGED_AXES[name]] for name in self.entry.inputs if name in _MERGED_AXES}

    def _find_axis_lengths(self) -> dict[str, int]:
        options = self.options
        shape = self.inputs.shapes.get("query", ())
        if 0 in shape[-1:] and (self.operation != "attention" or "scale" not in options):
            message = f"shape {format_shape(shape)}: a width of 0 is for attention with a `scale`, as 1/sqrt(0) is none"
            raise self._make_fault_at(message, "inputs", "query")
        try:
            return shapes.find_axis_lengths(
                self.specs, self.inputs.shapes, options.get("heads"), options.get("kv_heads")
            )
        except ShapeFault as fault:
            name = str(*fault.field)
            file_shape = self.inputs.file_shapes.get(name, ())
            notes = _describe_reshaped_heads(file_shape, self.inputs.shapes.get(name, ()))
            if options.get("projections") == LINEAR_PROJECTIONS and name in _PROJECTION_WEIGHTS and len(file_shape) > 1:
                turned = format_shape((*file_shape[:-2], file_shape[-1], file_shape[-2]))
                notes += f"; projections are linear: {turned} in the file is (out, in)"
            raise self._make_fault_at(f"{fault}{notes}", "inputs", name) from None

    def _check_number_ranges(self, dtypes: Sequence[str], stored_in: Sequence[str], lengths: Mapping[str, int]) -> None:
        """Refuse numbers that the narrowest dtype cannot hold, and counts that exceed their axis.

        ``dtypes`` are the working dtypes of the case, ``stored_in`` the dtypes that its inputs are rounded to before.
        """
        named = self.arrays.sources
        for name, source in self.inputs.sources.items():
            spec, path = self.specs[name], (*self.location.path, "inputs", name)
            if spec.is_number:
                formats = {dtype_of_input(spec, self.inputs.sources, self.options, dtype) for dtype in dtypes}
                check_dtype_range(source, named, path, (*formats, *(() if spec.is_narrow else stored_in)))
                if name in SCALES:
                    check_positive_scales(source, named, path)
                check_lowest_number(source, named, path, stored_in)
            if spec.is_count and not spec.is_index:
                check_counts_at_most(
                    source, named, path, lengths[spec.max_value_axis], NAMES_OF_COUNTED_AXES[spec.max_value_axis]
                )

    def _check_layout_inputs(self) -> None:
        """Check the limits of sequences, pages, indices of keys, and the weights of norms against the shapes."""
        counts = {
            name: np.array(list_literal_numbers(source, self.arrays.sources))
            for name, source in self.inputs.sources.items()
            if self.specs[name].is_count
        }
        with locate_faults((*self.location.path, "inputs")):
            check_layout_inputs(self.operation, self.options, self.inputs.shapes, counts)

    def _check_query_offsets(self, lengths: Mapping[str, int]) -> None:
        """Refuse offsets of queries without effect, and offsets beyond the tables of a rotary embedding."""
        source = self.inputs.sources.get("query_offsets")
        if source is None:
            return
        if not (self.options.get("is_causal") or "window" in self.options or "Lr" in lengths):
            message = "says where queries stand for is_causal, a window or a rotary embedding, and this case has none"
            raise self._make_fault_at(message, "inputs", "query_offsets")
        for entry, offset in enumerate(list_literal_numbers(source, self.arrays.sources)):
            if "Lr" in lengths and offset + lengths["Lq"] > lengths["Lr"]:
                where = f"the queries of batch entry {entry} end at position {offset + lengths['Lq'] - 1:g}"
                table = f"the rotary embedding has an axis Lr of {lengths['Lr']} positions, from 0 on"
                raise self._make_fault_at(f"{where}, and {table}", "inputs", "query_offsets")

    def _check_mask_options(self, keys: int) -> None:
        """Refuse ``empty_rows`` and ``mask_fill`` in a case in which nothing forbids a key."""
        options, inputs, named = self.entry.options, self.inputs.sources, self.arrays.sources
        if options.empty_rows is None and options.mask_fill is None:
            return
        masks = REQUESTERS_OF_STAGE["masked"]
        forbidden = masks & inputs.keys() or any(self.options.get(name) for name in masks)
        if not keys or forbidden:
            return
        if options.mask_fill is not None:
            what = "scores that a mask, causality, a window or lengths forbid"
            raise self._make_fault_at(f"stands in the place of {what}; nothing does here", "options", "mask_fill")
        added = (
            number
            for name in _INPUTS_ADDED_TO_SCORES & inputs.keys()
            for number in list_literal_numbers(inputs[name], named)
        )
        if not any(map(math.isinf, added)):
            message = "says what a query gives that may attend to no key; nothing forbids a key here"
            raise self._make_fault_at(message, "options", "empty_rows")

    def _compute_stage_shapes(self, lengths: Mapping[str, int]) -> dict[str, Shape]:
        """Return every stage's shape; refuse a judged stage that is too large."""
        stage_shapes, input_shapes = shapes.stage_shapes(self.operation, lengths), self.inputs.shapes
        judged = self.entry.stages
        optional = shapes.input_of_optional_gradients(self.operation)
        stage_shapes |= {stage: input_shapes[name] for stage, name in optional.items() if name in input_shapes}
        for stage, shape in stage_shapes.items():
            if has_too_many_elements(shape) and (judged is None or stage in judged):
                message = f"{stage} would be {format_shape(shape)}; expected at most {MAX_ARRAY_ELEMENTS} elements"
                last = list(stage_shapes)[-1]
                if judged is None and not has_too_many_elements(stage_shapes[last]):
                    message += f", or `stages: [{last}]` to judge that alone"
                raise self._make_fault_at(message, "inputs")
        return stage_shapes

    def _has_random_rounding_errors(self) -> bool:
        """Return the case's declaration, or else whether its inputs give rounding errors that look random."""
        if self.entry.supports_statistics is not None:
            return self.entry.supports_statistics
        alike = self.options.get("scale") == 0 or self.options.get("mask_fill") is not None  # weights of a row
        if self.entry.storage is not None or alike:
            return False
        named = self.arrays.sources
        return all(
            _is_drawn_continuous(source, named)
            or (self.specs[name].is_broadcastable and _is_zero_or_minus_infinity(source, named))
            for name, source in self.inputs.sources.items()
            if self.specs[name].is_number
        )

    def _memory_layout_of_inputs(self, merged: Mapping[str, int]) -> dict[str, str]:
        """Return the memory layout of inputs: as the case declares, and transposed for merged inputs."""
        for name in self.entry.memory_layout:
            if name in merged:
                raise self._make_fault_at(
                    "`layout: merged` says already how this lies in memory", "memory_layout", name
                )
        return dict.fromkeys(merged, "transposed") | self.entry.memory_layout

    def _check_storage(self, dtypes: Sequence[str]) -> None:
        if (storage := self.entry.storage) is None:
            return
        narrow = [dtype for dtype in dtypes if numpy_dtype(dtype).itemsize <= numpy_dtype(storage).itemsize]
        if narrow:
            message = f"expected `dtypes` that are all wider than {storage}, got {', '.join(narrow)}"
            raise self._make_fault_at(message, "storage")

    def _check_memory_layout(self, case: Case) -> None:
        """Refuse a layout that an input cannot have; draw inputs only if one has to have equal slices."""
        handed_over = [name for name in case.inputs if not self.specs[name].only_in_files]
        for name, kind in case.memory_layout.items():
            if name not in handed_over:
                message = f"expected an input that the case hands over: {', '.join(handed_over)}"
                raise self._make_fault_at(message, "memory_layout", name)
            if message := shapes.unsupported_layout_reason(kind, case.input_shapes[name]):
                raise self._make_fault_at(message, "memory_layout", name)
            if kind == "fused":  # alone in a projection, it would only have heads inside of length
                batch, _, length, _ = case.input_shapes[name]
                fused = [partner for partner, layout in case.memory_layout.items() if layout == "fused"]
                shapes_of_others = [case.input_shapes[partner] for partner in fused if partner != name]
                if not any(shape[::2] == (batch, length) for shape in shapes_of_others):
                    message = f"fused needs another fused input of a batch of {batch} and a length of {length}"
                    raise self._make_fault_at(message, "memory_layout", name)
        if "broadcast" not in case.memory_layout.values():
            return
        self.budget.spend_numbers(self.inputs.number_count, (*self.location.path, "memory_layout"))
        made = make_exact_inputs(case)
        for name, kind in case.memory_layout.items():
            if kind == "broadcast" and not shapes.find_repeated_axes(made[name].array):
                message = (
                    "broadcast needs an axis, other than the last, along which all slices are alike; "
                    f"{name} of shape {format_shape(case.input_shapes[name])} has none"
                )
                raise self._make_fault_at(message, "memory_layout", name)


def _find_option_faults(options: Mapping[str, Any], operation: str) -> Iterator[tuple[str, str]]:
    """Yield the faults of options as (name, message); the name is empty for a missing option."""
    if OPERATIONS[operation].has_projections and "heads" not in options:
        yield "", f"{operation} needs options.heads"
    for name, scores in SCORE_KINDS_OF_OPTION.items():
        if name in options and options.get("score", DEFAULT_SCORE) not in scores:
            yield name, f"the {options['score']} score has no {name}"
    for name, spec in OPTIONS.items():
        if name in options and spec.type is float and not math.isfinite(options[name]):
            yield name, f"expected a finite number, got {options[name]}"
    if options.get("mask_fill", 0) > _MAX_MASK_FILL:
        yield "mask_fill", f"expected at most {_MAX_MASK_FILL}, which every dtype holds, got {options['mask_fill']}"
    if options.get("window") == [None, None]:
        yield "window", "bounds nothing on either side; expected a number of keys on one at least"
    heads, kv_heads = options.get("heads"), options.get("kv_heads")
    if heads and kv_heads and heads % kv_heads:
        yield "kv_heads", f"{heads} query heads cannot share {kv_heads} key and value heads evenly"


def _count_projection_heads(specs: Mapping[str, InputSpec], options: Mapping[str, Any]) -> dict[str, int]:
    """Return how many heads each projection makes."""
    heads = {"H": options.get("heads"), "Hkv": options.get("kv_heads", options.get("heads"))}
    letters = {name: spec.axes[-1].partition("*")[0] for name, spec in specs.items() if len(spec.axes) == 2}
    return {name: int(heads[letter]) for name, letter in letters.items() if heads.get(letter) is not None}


def _describe_reshaped_heads(in_file: Shape, fitted: Shape) -> str:
    """Return how the shape in the file became another one: its heads were split, or those of a projection merged."""
    if len(fitted) == 4 and in_file != fitted[4 - len(in_file) :]:
        return f"; heads are split: {format_shape(in_file)} in the file is {fitted[1]} heads of width {fitted[3]}"
    if len(in_file) == 3 and len(fitted) == 2:
        return f"; heads are merged: {format_shape(in_file)} in the file is a matrix for each of {in_file[0]} heads"
    return ""


def _is_drawn_continuous(source: kinds.Array, named: ArraysByName) -> bool:
    """Return whether an array is drawn from a continuous distribution, and at most multiplied, moved or thinned out."""
    repeated = source.rows is not None and len(set(source.rows)) < len(source.rows)
    if repeated or source.times == 0 or source.plus:
        return False
    if isinstance(source, kinds.Reference):
        return _is_drawn_continuous(named[source.ref], named)
    return isinstance(source, kinds.Drawn) and source.draw in _CONTINUOUS_DRAWS and not source.floor


def _is_zero_or_minus_infinity(source: kinds.Array, named: ArraysByName) -> bool:
    """Return whether a bias is a mask: 0 if a key may be attended, minus infinity where it may not."""
    if isinstance(source, kinds.Drawn | kinds.Identity | kinds.Lowest | Alibi | kinds.RelativeBuckets):
        return False
    if source.is_scaled:
        return False
    if isinstance(source, kinds.AsBias):
        return True
    parts = (
        [named[source.ref]]
        if isinstance(source, kinds.Reference)
        else [part for _, part in kinds.array_parts_with_paths(source)]
    )
    return all(_is_zero_or_minus_infinity(part, named) for part in parts) and {
        *list_literal_numbers(source, named)
    } <= {
        0,
        -math.inf,
    }


def _as_fault_of_packed_input(error: CaseFileError, entry: model.CaseEntry, where: FieldPath) -> CaseFileError:
    """Turn a fault of an input that was split from a packed one into a fault of the packed input."""
    if error.others:
        every = (CaseFileError(error.path, str(error)), *error.others)
        first, *others = (_as_fault_of_packed_input(fault, entry, where) for fault in every)
        return CaseFileError(first.path, str(first), others)
    field = error.path[len(where) :]
    if field[:1] != ("inputs",) or len(field) < 2 or field[1] in entry.inputs:
        return error
    for packed, names in PACKED_PROJECTIONS.items():
        if field[1] in names and packed in entry.inputs:
            return CaseFileError((*where, "inputs", packed, *field[2:]), f"{field[1]}: {error}")
    return error
