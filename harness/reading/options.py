"""A case's options over those of its file: which apply, which make sense together, in the form that the rest takes.

In which form inputs come and are handed over: layout, storage, memory layout; and which stages are judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from attncheck.reading import model
from attncheck.reading.array_kinds import Array
from attncheck.reading.case import Case
from attncheck.reading.diagnostics import CaseFileError
from attncheck.reading.dtypes import numpy_dtype
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.number_checks import spelled_out
from attncheck.reading.shapes import repeated_axes, show
from attncheck.reading.yaml_scalars import FieldPath
from attncheck.spec import ASKED_BY, DEFAULT_SCORE, HEADS, OPERATIONS, OPTIONS, PER_HEAD, SCORE_SPECS, InputSpec, Shape

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
    """Say how the shape in the file became another one: its heads were split, or those of a projection merged."""
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
