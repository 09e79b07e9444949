"""Derived quantities: what a document prints and no backend returns, as named operators over stages and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.spec import Shape

Array = NDArray[Any]


@dataclass(frozen=True)
class Quantity:
    """A named operator.

    ``compute(stage, inputs)`` gives the quantity. ``radius(stage_radius, stage, inputs, input_radius)`` gives how far
    it moves when the stage and the inputs move by their radii. ``shape(stage, inputs)`` gives its shape from theirs and
    raises ``ValueError`` where the quantity does not apply.
    """

    name: str
    meaning: str
    needs: str | None
    compute: Callable[[Array, Mapping[str, Array]], Array]
    radius: Callable[[Array, Array, Mapping[str, Array], Mapping[str, Array]], Array]
    shape: Callable[[Shape, Mapping[str, Shape]], Shape]


def _largest_of_row(stage: Array, inputs: Mapping[str, Array]) -> Array:
    largest: Array = stage.max(axis=-1, keepdims=True)
    return largest


def _largest_of_row_radius(
    stage_radius: Array, stage: Array, inputs: Mapping[str, Array], input_radius: Mapping[str, Array]
) -> Array:
    # |max a - max b| <= max |a - b|
    largest: Array = stage_radius.max(axis=-1, keepdims=True)
    return largest


def _applied(stage: Array, inputs: Mapping[str, Array]) -> Array:
    applied: Array = np.swapaxes(stage, -1, -2) * inputs["value"]
    return applied


def _applied_radius(
    stage_radius: Array, stage: Array, inputs: Mapping[str, Array], input_radius: Mapping[str, Array]
) -> Array:
    weights, radius = np.swapaxes(np.abs(stage), -1, -2), np.swapaxes(stage_radius, -1, -2)
    moved: Array = radius * (np.abs(inputs["value"]) + input_radius["value"]) + weights * input_radius["value"]
    return moved


def _applied_shape(stage: Shape, inputs: Mapping[str, Shape]) -> Shape:
    if len(stage) != 4 or stage[-1] != inputs["value"][-2]:
        raise ValueError("needs a weight for each key")
    if stage[-2] != 1:
        raise ValueError(f"needs a single query, got {stage[-2]}")
    return inputs["value"]


def _logarithm(stage: Array, inputs: Mapping[str, Array]) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm: Array = np.log(stage)
    return logarithm


def _logarithm_radius(
    stage_radius: Array, stage: Array, inputs: Mapping[str, Array], input_radius: Mapping[str, Array]
) -> Array:
    # |log b - log a| <= -log(1 - r / a) for |b - a| <= r < a; what may be 0 has a logarithm of any size.
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = -np.log1p(-stage_radius / stage)
    is_zero = (stage == 0) & (stage_radius == 0)
    radius: Array = np.where(is_zero, 0.0, np.where(stage_radius < stage, moved, np.inf))
    return radius


def _is_allowed(stage: Array, inputs: Mapping[str, Array]) -> Array:
    allowed: Array = np.where(np.isnan(stage), stage, (stage > -np.inf).astype(stage.dtype))
    return allowed


def _is_forbidden(stage: Array, inputs: Mapping[str, Array]) -> Array:
    forbidden: Array = 1 - _is_allowed(stage, inputs)
    return forbidden


def _nothing(
    stage_radius: Array, stage: Array, inputs: Mapping[str, Array], input_radius: Mapping[str, Array]
) -> Array:
    # A logit that moves by something finite stays on its side of minus infinity.
    radius: Array = np.where(np.isfinite(stage_radius), 0.0, np.inf)
    return radius


def _same(stage: Shape, inputs: Mapping[str, Shape]) -> Shape:
    return stage


QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (
        Quantity(
            "row_maxima",
            "the largest number of each row, one column",
            None,
            _largest_of_row,
            _largest_of_row_radius,
            lambda stage, inputs: (*stage[:-1], 1),
        ),
        Quantity(
            "log_weights",
            "the logarithm of each weight: a log-softmax",
            None,
            _logarithm,
            _logarithm_radius,
            _same,
        ),
        Quantity(
            "allowed",
            "1 where a key may be attended, 0 where it is minus infinity: a mask, of `masked` or `biased`",
            None,
            _is_allowed,
            _nothing,
            _same,
        ),
        Quantity(
            "forbidden",
            "0 where a key may be attended, 1 where it is minus infinity: a mask whose true forbids",
            None,
            _is_forbidden,
            _nothing,
            _same,
        ),
        Quantity(
            "applied_values",
            "each value (a row) times its weight, for a single query: what is summed to the output",
            "value",
            _applied,
            _applied_radius,
            _applied_shape,
        ),
    )
}
