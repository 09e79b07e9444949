"""Shapes of a case, checked and completed before anything is drawn or computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.spec import (
    AXES,
    MEMORY_LAYOUTS,
    MIN_AXIS_LENGTHS,
    OPERATIONS,
    STAGE_SPECS,
    Axes,
    InputSpec,
    Shape,
    input_specs,
)

_AXES_OF_ANY_LENGTH = frozenset({"D", "B", "Lq", "Lk", "P", "T", "Lr"})
"""Axes that may have length 0; without a head or a width, there is nothing to compute."""


class FieldFault(ValueError):
    """A fault of an array or a case; ``field`` leads to the place inside of its description."""

    def __init__(self, field: str | tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.field = (field,) if isinstance(field, str) else field


class ShapeFault(FieldFault):
    """The shapes of a case do not fit together; ``field`` is the input at fault."""


def add_leading_axes(shape: Shape, rank: int) -> Shape:
    """Put axes of length 1 in front until the shape has the rank.

    Example:
        >>> add_leading_axes((3, 4), 4)
        (1, 1, 3, 4)
    """
    return (1,) * (rank - len(shape)) + shape


def merged_weight_shape(shape: Shape) -> Shape:
    """Shape of a projection after one matrix per head, (H, E, D), is laid side by side as (E, H*D)."""
    heads, rows, columns = shape
    return (rows, heads * columns)


def operation_input_shape(spec: InputSpec, shape: Shape, heads: int | None = None) -> Shape:
    """Shape of an input as the operation gets it. Raises ``ValueError`` if it does not fit.

    ``heads`` are those of a projection, which may come as one matrix per head, or of an input that comes with its heads
    side by side, (B, L, heads*width), and is split.

    Example:
        >>> query = OPERATIONS["attention"].inputs["query"]
        >>> operation_input_shape(query, (7, 5)), operation_input_shape(query, (2, 7, 12), heads=3)
        ((1, 1, 7, 5), (2, 3, 7, 4))
    """
    is_projection = len(spec.axes) == 2 and "*" in spec.axes[1]
    if is_projection and len(shape) == 3:
        if heads not in (None, shape[0]):
            raise ValueError(
                f"shape {format_shape(shape)} is a matrix for each of {shape[0]} heads, and there are {heads}"
            )
        return merged_weight_shape(shape)
    if heads is not None and not is_projection:
        if len(shape) > 3:
            got = f"got shape {format_shape(shape)}; inputs with an axis of heads are `layout: split`"
            raise ValueError(f"expected at most 3 axes (B, L, heads*width) in the merged layout, {got}")
        batch, length, width = add_leading_axes(shape, 3)
        if width % heads:
            raise ValueError(f"a width of {width} cannot be split over {heads} heads")
        return (batch, heads, length, width // heads)
    if len(shape) > len(spec.axes):
        raise ValueError(
            f"expected at most {len(spec.axes)} axes ({', '.join(spec.axes)}), got shape {format_shape(shape)}"
        )
    return add_leading_axes(shape, len(spec.axes))


def find_axis_lengths(
    specs: Mapping[str, InputSpec], shapes: Mapping[str, Shape], heads: int | None, kv_heads: int | None = None
) -> dict[str, int]:
    """Give every axis letter its length from the inputs' lifted shapes.

    Raises ``ShapeFault`` if two inputs disagree, naming the second, and for heads and values of width 0.
    """
    lengths: dict[str, int] = {}
    found_in: dict[str, str] = {}
    if heads is not None:
        lengths["H"], found_in["H"] = heads, "options.heads"
        lengths["Hkv"], found_in["Hkv"] = kv_heads or heads, "options.kv_heads" if kv_heads else "options.heads"
    for name, spec in specs.items():
        if name not in shapes or spec.is_broadcastable:
            continue
        for letter, length in zip(spec.axes, shapes[name], strict=True):
            is_empty = length == 0 and letter not in _AXES_OF_ANY_LENGTH
            known = lengths.setdefault(letter, length)
            if is_empty or known != length:
                shape, axis = f"shape {format_shape(shapes[name])}", f"axis {letter} of ({', '.join(spec.axes)})"
                if is_empty:
                    raise ShapeFault(name, f"{shape}: {axis} is 0; only the batch and lengths may be")
                raise ShapeFault(name, f"{shape}: expected {axis} to be {known} as in {found_in[letter]}, got {length}")
            found_in.setdefault(letter, name)
    _add_head_widths(lengths, found_in)
    if "Hkv" in lengths and lengths["H"] % lengths["Hkv"]:
        wanted = "as many heads as query has, or a number that divides it"
        problem = f"expected {wanted}: {lengths['H']} query heads cannot share {lengths['Hkv']} evenly"
        raise ShapeFault(found_in["Hkv"] if found_in["Hkv"] in specs else "key", problem)
    if "key_indices" in shapes:
        lengths["K"] = shapes["key_indices"][-1]
    if "W" in lengths:
        slots = lengths["W"] * lengths["Lp"]
        if lengths.setdefault("Ts", slots) != slots:
            what = f"expected {slots} columns, for {lengths['W']} pages of {lengths['Lp']} slots, got {lengths['Ts']}"
            raise ShapeFault(found_in["Ts"], what)
        lengths["T"] = slots * lengths.get("S", 1)
    if "S" in lengths and lengths["S1"] != lengths["S"] + 1:
        what = f"expected {lengths['S1'] - 1}, as many as cu_seqlens_q has sequences, got {lengths['S']}"
        raise ShapeFault(found_in["S"], what)
    if "Lk" in lengths:
        lengths["T"] = lengths["Lk"] + lengths.get("P", 0)
    _check_at_least(lengths, found_in)
    _check_broadcast(specs, shapes, lengths)
    return lengths


def _check_at_least(lengths: Mapping[str, int], found_in: Mapping[str, str]) -> None:
    """Check axes that have to be at least as long as others together."""
    for letter, parts in MIN_AXIS_LENGTHS:
        length, least = lengths.get(letter), sum(lengths.get(part, 0) for part in parts)
        at_fault = next((found_in[part] for part in (letter, *parts) if part in found_in and part in {"Lr", "R"}), None)
        if length is not None and at_fault is not None and length < least:
            wanted = f"at least {' + '.join(parts)} = {least}"
            raise ShapeFault(at_fault, f"expected axis {letter} to be {wanted}, got {length}")


def _add_head_widths(lengths: dict[str, int], found_in: Mapping[str, str]) -> None:
    """Split the columns of each projection over the heads that it makes."""
    for heads, width in (("H", "D"), ("Hkv", "D"), ("Hkv", "Dv"), ("H", "Dv")):
        merged = lengths.get(f"{heads}*{width}")
        if merged is None:
            continue
        name = found_in[f"{heads}*{width}"]
        if merged % lengths[heads]:
            raise ShapeFault(name, f"{merged} columns cannot be split over {lengths[heads]} heads")
        head_width = merged // lengths[heads]
        if lengths.setdefault(width, head_width) != head_width:
            wanted = f"{lengths[heads] * lengths[width]} columns, {lengths[heads]} heads of width {lengths[width]}"
            raise ShapeFault(name, f"expected {wanted}, got {merged}")


def _check_broadcast(specs: Mapping[str, InputSpec], shapes: Mapping[str, Shape], lengths: Mapping[str, int]) -> None:
    for name, spec in specs.items():
        if name not in shapes or not spec.is_broadcastable:
            continue
        wanted = tuple(lengths[letter] for letter in spec.axes)
        for got, want in zip(shapes[name], wanted, strict=True):
            if got in (1, want) or (spec.is_per_block and 0 < got < want and want % got == 0):
                continue
            if spec.is_per_block:
                problem = f"{want} elements cannot be cut into {got} blocks of the same length"
                raise ShapeFault(name, f"shape {format_shape(shapes[name])}: {problem}")
            raise ShapeFault(name, f"shape {format_shape(shapes[name])} does not broadcast to {format_shape(wanted)}")


def concatenated_shape(shapes: Sequence[Shape], axis: int) -> Shape:
    """Shape of arrays put one after another. Raises ``ValueError`` if they do not fit.

    Example:
        >>> concatenated_shape([(2, 3), (2, 4)], -1)
        (2, 7)
    """
    listed, rank = ", ".join(map(format_shape, shapes)), len(shapes[0])
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} does not exist in arrays of {rank} axes, got {listed}")
    axis %= rank
    others = {(len(shape), shape[:axis], shape[axis + 1 :]) for shape in shapes}
    if len(others) > 1:
        raise ValueError(f"expected arrays that differ in length along axis {axis} alone, got {listed}")
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """Shape of arrays spread over each other's axes. Raises ``ValueError`` if they do not fit."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = ", ".join(map(format_shape, shapes))
        raise ValueError(f"expected shapes that broadcast to each other, got {listed}") from None


def find_stage_axes(operation: str, letters: Collection[str]) -> dict[str, Axes]:
    """Return the axes of every stage that an operation can return, if these letters have a length.

    The gradient of an optional input is left out: it has the shape of that input.
    """
    spec, optional = OPERATIONS[operation], input_of_optional_gradients(operation)
    axes = {stage: STAGE_SPECS[stage].axes for stage in spec.stages if stage not in optional}
    for stage, choices in spec.stage_axes.items():
        axes[stage] = next((choice for choice in choices if set(choice) <= set(letters)), choices[-1])
    return axes


def input_of_optional_gradients(operation: str) -> dict[str, str]:
    """Return the gradients of optional inputs, each with the name of its input, whose shape it has."""
    spec = OPERATIONS[operation]
    optional = {f"grad_{name}": name for name, spec in spec.inputs.items() if not spec.required}
    return {stage: name for stage, name in optional.items() if stage in spec.stages}


def stage_shapes(operation: str, lengths: Mapping[str, int]) -> dict[str, Shape]:
    """Return the shape of every stage that the operation can return, except for gradients of optional inputs."""
    axes, lengths = find_stage_axes(operation, lengths), {**lengths}
    if "Dv" in lengths and "H" in lengths:
        lengths.setdefault("H*Dv", lengths["H"] * lengths["Dv"])
    return {
        stage: tuple(lengths[letter] for letter in letters)
        for stage, letters in axes.items()
        if all(letter in lengths for letter in letters)
    }


def find_repeated_axes(array: NDArray[Any]) -> tuple[int, ...]:
    """Return the axes, except for the last, that have several slices, all equal."""
    return tuple(
        axis for axis in find_multi_slice_axes(array.shape) if bool((array == array.take([0], axis=axis)).all())
    )


def find_multi_slice_axes(shape: tuple[int, ...]) -> list[int]:
    """Return the axes, except for the last, that have several slices."""
    return [axis for axis, length in enumerate(shape[:-1]) if length > 1]


def unsupported_layout_reason(layout: str, shape: Shape) -> str:
    """Return why no input of a shape can have a memory layout; empty if it can."""
    spec = MEMORY_LAYOUTS[layout]
    if len(shape) < spec.min_axes:
        of_heads = " (an axis of heads is one of them)" if spec.min_axes == 4 else ""
        return f"{layout} needs {spec.min_axes} axes{of_heads}, got {format_shape(shape)}"
    if spec.max_slices is None:
        return ""
    if not find_multi_slice_axes(shape):
        return f"{layout} needs an axis, other than the last, of several slices, got {format_shape(shape)}"
    slices = shape[find_multi_slice_axes(shape)[0]]
    return f"{layout} lays at most {spec.max_slices} slices apart, got {slices}" if slices > spec.max_slices else ""


def format_shape(shape: Shape) -> str:
    """Write a shape as people do: 2x3x4."""
    return "x".join(map(str, shape)) or "scalar"


def count_scores(operation: str, options: Mapping[str, Any], inputs: Mapping[str, NDArray[Any]]) -> int:
    """Return how many scores an operation has: B * H * Lq * T, or N for parts."""
    for name in {"scores", "log_sum_exps"} & inputs.keys():
        return int(inputs[name].size)
    heads = int(options["heads"]) if OPERATIONS[operation].has_projections else 1
    if "block_table" in inputs:
        tables = inputs["block_table"] if "cu_seqlens_q" in inputs else inputs["block_table"][:1]
        keys = int(tables.size) * int(inputs["key_pages"].shape[1])
    else:
        keys = sum(int(inputs[name].shape[-2]) for name in ("key", "past_key", "cached_key") if name in inputs)
    return math.prod(inputs["query"].shape[:-1]) * heads * keys


def axis_lengths(operation: str, options: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the length of every axis letter of a case, in the order of ``AXES``; empty if the shapes do not fit.

    The keys of a case whose input is scores are also called Lk.

    Example:
        >>> shapes = {"query": (1, 4, 3, 8), "key": (1, 2, 5, 8), "value": (1, 2, 5, 6)}
        >>> axis_lengths("attention", {}, shapes)["T"], axis_lengths("attention", {}, {**shapes, "key": (1, 3, 5, 8)})
        (5, {})
    """
    try:
        specs = input_specs(operation, options.get("score"))
        lengths = find_axis_lengths(specs, shapes, options.get("heads"), options.get("kv_heads"))
    except (ValueError, KeyError, TypeError, ArithmeticError):  # a record that another program wrote
        return {}
    if "T" in lengths:
        lengths.setdefault("Lk", lengths["T"])
    return {letter: lengths[letter] for letter in AXES if letter in lengths}


_SHOWN_AXES = ("B", "H", "Hkv", "Lq", "Lk", "P", "D", "Dk", "Dv", "E", "A", "R")
_HIDDEN_IF_EQUAL_TO = {"Hkv": "H", "Dk": "D", "Dv": "D"}
"""Axes that are shown only if they differ from another one."""


def format_lengths(lengths: Mapping[str, int]) -> str:
    """Write the lengths of axes: B=1 H=4 Hkv=2 Lq=3 Lk=5 D=8."""
    shown = (
        letter
        for letter in _SHOWN_AXES
        if letter in lengths and lengths[letter] != lengths.get(_HIDDEN_IF_EQUAL_TO.get(letter, ""))
    )
    return " ".join(f"{letter}={lengths[letter]}" for letter in shown)
