"""In which form inputs come and are handed over: layout, storage, memory layout; and which stages are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attncheck.reading import model
from attncheck.reading.case import Case
from attncheck.reading.diagnostics import CaseFileError
from attncheck.reading.dtypes import numpy_dtype
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.shapes import repeated_axes, show
from attncheck.reading.yaml_scalars import FieldPath
from attncheck.spec import OPERATIONS, PER_HEAD, InputSpec, Shape

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
