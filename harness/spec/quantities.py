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

    ``compute(stage, inputs)`` returns the quantity. ``radius(stage_radius, stage, inputs, input_radius)`` returns how
    far it moves if the stage and the inputs move by their radii. ``shape(stage, inputs)`` returns its shape, by default
    that of the stage, and raises ``ValueError`` if the quantity does not apply. It ``required_input`` an input.
    """

    name: str
    meaning: str
    compute: Callable[[Array, Mapping[str, Array]], Array]
    propagate_radius: Callable[[Array, Array, Mapping[str, Array], Mapping[str, Array]], Array]
    compute_shape: Callable[[Shape, Mapping[str, Shape]], Shape] = lambda stage, _: stage
    required_input: str | None = None


def _applied_values_radius(
    stage_radius: Array, stage: Array, inputs: Mapping[str, Array], input_radius: Mapping[str, Array]
) -> Array:
    weights, radius = np.swapaxes(np.abs(stage), -1, -2), np.swapaxes(stage_radius, -1, -2)
    moved: Array = radius * (np.abs(inputs["value"]) + input_radius["value"]) + weights * input_radius["value"]
    return moved


def _applied_values_shape(stage: Shape, inputs: Mapping[str, Shape]) -> Shape:
    if len(stage) != 4 or stage[-1] != inputs["value"][-2]:
        raise ValueError("applied_values needs a weight for each key")
    if stage[-2] != 1:
        raise ValueError(f"applied_values needs a single query, got {stage[-2]}")
    return inputs["value"]


def _log_weights(stage: Array, inputs: Mapping[str, Array]) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm: Array = np.log(stage)
    return logarithm


def _log_weights_radius(
    stage_radius: Array, stage: Array, inputs: Mapping[str, Array], input_radius: Mapping[str, Array]
) -> Array:
    # |log b - log a| <= -log(1 - r / a) for |b - a| <= r < a; what may be 0 has a logarithm of any size.
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = -np.log1p(-stage_radius / stage)
    is_zero = (stage == 0) & (stage_radius == 0)
    radius: Array = np.where(is_zero, 0.0, np.where(stage_radius < stage, moved, np.inf))
    return radius


def _allowed_as_numbers(stage: Array, _: Mapping[str, Array]) -> Array:
    return np.where(np.isnan(stage), stage, (stage > -np.inf).astype(stage.dtype))


def _allowed_radius(stage_radius: Array, *_: object) -> Array:
    # A logit that moves by something finite stays on its side of minus infinity.
    return np.where(np.isfinite(stage_radius), 0.0, np.inf)


QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (
        Quantity(
            "row_maxima",
            "the largest number of each row, one column",
            lambda stage, _: stage.max(axis=-1, keepdims=True),
            lambda stage_radius, *_: stage_radius.max(axis=-1, keepdims=True),  # |max a - max b| <= max |a - b|
            lambda stage, _: (*stage[:-1], 1),
        ),
        Quantity("log_weights", "the logarithm of each weight: a log-softmax", _log_weights, _log_weights_radius),
        Quantity(
            "allowed",
            "1 where a key may be attended, 0 where it is minus infinity: a mask, of `masked` or `biased`",
            _allowed_as_numbers,
            _allowed_radius,
        ),
        Quantity(
            "forbidden",
            "0 where a key may be attended, 1 where it is minus infinity: a mask whose true forbids",
            lambda stage, inputs: 1 - _allowed_as_numbers(stage, inputs),
            _allowed_radius,
        ),
        Quantity(
            "applied_values",
            "each value (a row) times its weight, for a single query: what is summed to the output",
            lambda stage, inputs: np.swapaxes(stage, -1, -2) * inputs["value"],
            _applied_values_radius,
            _applied_values_shape,
            required_input="value",
        ),
    )
}
