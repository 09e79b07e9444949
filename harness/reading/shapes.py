"""Shapes of a case, checked and completed before anything is drawn or computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attncheck.harness.vocabulary import InputSpec, Shape


class ShapeFault(ValueError):
    """The shapes of a case do not fit together; ``field`` is the input at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def lift(shape: Shape, rank: int) -> Shape:
    """Put axes of length 1 in front until the shape has the rank."""
    return (1,) * (rank - len(shape)) + shape


def merge_head_weights(shape: Shape) -> Shape:
    """Shape of a projection after one matrix per head, (H, E, D), is laid side by side as (E, H*D)."""
    heads, rows, columns = shape
    return (rows, heads * columns)


def fitted_shape(spec: InputSpec, shape: Shape) -> Shape:
    """Shape of an input as the operation gets it. Raises ``ValueError`` where it has too many axes."""
    if len(shape) == 3 and len(spec.axes) == 2 and spec.axes[1].startswith("H*"):
        return merge_head_weights(shape)
    if len(shape) > len(spec.axes):
        raise ValueError(f"expected at most {len(spec.axes)} axes ({', '.join(spec.axes)}), got shape {show(shape)}")
    return lift(shape, len(spec.axes))


def bind_axes(specs: Mapping[str, InputSpec], shapes: Mapping[str, Shape], heads: int | None) -> dict[str, int]:
    """Give every axis letter its length from the inputs' lifted shapes.

    Raises ``ShapeFault`` where two inputs disagree, naming the second.
    """
    lengths: dict[str, int] = {}
    found_in: dict[str, str] = {}
    if heads is not None:
        lengths["H"], found_in["H"] = heads, "options.heads"
    for name, spec in specs.items():
        if name not in shapes or spec.broadcast:
            continue
        for letter, length in zip(spec.axes, shapes[name], strict=True):
            known = lengths.setdefault(letter, length)
            if known != length:
                raise ShapeFault(
                    name,
                    f"shape {show(shapes[name])}: expected axis {letter} of ({', '.join(spec.axes)}) "
                    f"to be {known} as in {found_in[letter]}, got {length}",
                )
            found_in.setdefault(letter, name)
    _bind_head_widths(lengths)
    _check_broadcast(specs, shapes, lengths)
    return lengths


def _bind_head_widths(lengths: dict[str, int]) -> None:
    for width in ("D", "Dv"):
        merged = lengths.get(f"H*{width}")
        if merged is None:
            continue
        if merged % lengths["H"]:
            name = "query_weight" if width == "D" else "value_weight"
            raise ShapeFault(name, f"{merged} columns cannot be split over {lengths['H']} heads")
        lengths[width] = merged // lengths["H"]


def _check_broadcast(specs: Mapping[str, InputSpec], shapes: Mapping[str, Shape], lengths: Mapping[str, int]) -> None:
    for name, spec in specs.items():
        if name not in shapes or not spec.broadcast:
            continue
        wanted = tuple(lengths[letter] for letter in spec.axes)
        for got, want in zip(shapes[name], wanted, strict=True):
            if got not in (1, want):
                raise ShapeFault(name, f"shape {show(shapes[name])} does not broadcast to {show(wanted)}")


def joined_shape(shapes: Sequence[Shape], axis: int) -> Shape:
    """Shape of arrays put one after another. Raises ``ValueError`` where they do not fit."""
    listed, rank = ", ".join(map(show, shapes)), len(shapes[0])
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} does not exist in arrays of {rank} axes, got {listed}")
    axis %= rank
    others = {(len(shape), shape[:axis], shape[axis + 1 :]) for shape in shapes}
    if len(others) > 1:
        raise ValueError(f"expected arrays that differ in length along axis {axis} alone, got {listed}")
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])


def spread_shape(shapes: Sequence[Shape]) -> Shape:
    """Shape of arrays spread over each other's axes. Raises ``ValueError`` where they do not fit."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = ", ".join(map(show, shapes))
        raise ValueError(f"expected shapes that broadcast to each other, got {listed}") from None


def stage_shapes(operation: str, lengths: Mapping[str, int]) -> dict[str, Shape]:
    """Return the shape of every stage that the operation can return."""
    axes: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("raw_scores", "scores", "biased", "masked", "weights"), ("B", "H", "Lq", "Lk")
    )
    axes["log_sum_exp"] = ("B", "H", "Lq")
    axes["output"] = ("B", "H", "Lq", "Dv")
    if operation == "multi_head_attention":
        axes |= {"query": ("B", "H", "Lq", "D"), "key": ("B", "H", "Lk", "D"), "value": ("B", "H", "Lk", "Dv")}
        axes |= {"context": ("B", "H", "Lq", "Dv"), "output": ("B", "Lq", "Eo" if "Eo" in lengths else "H*Dv")}
    return {
        stage: tuple(lengths[letter] for letter in letters)
        for stage, letters in axes.items()
        if all(letter in lengths for letter in letters)
    }


def show(shape: Shape) -> str:
    """Write a shape as people do: 2x3x4."""
    return "x".join(map(str, shape)) or "scalar"
