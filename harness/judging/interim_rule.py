"""The interim rule for when two numbers disagree. The only place that holds a tolerance.

Until bounds derived per element replace it, two results disagree, and a printed number fails, beyond ``UNITS`` units in
the last place of the largest magnitude of their row (the last axis). For a printed number, half a unit of its last
printed digit and what the rounding of printed inputs can move are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNITS = 64

_LEAST_MAGNITUDE = {"log_sum_exp": 1.0}
"""log_sum_exp is the row's maximum plus a logarithm, and may cancel to any small number."""


_COMPUTED_FROM = {"masked": ("scores", "biased"), "biased": ("scores",)}
"""Masking hides scores, and a bias may cancel them, but what is left keeps the error of the row it was computed in."""


def unit_of_rows(stage: str, *implementations: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return the unit that applies to each element of a stage, from the stages of the implementations compared.

    It is the distance to the next number of the dtype at the row's largest finite magnitude, but never so small that
    flushing a subnormal number to zero would count.
    """
    shape, dtype = implementations[0][stage].shape, implementations[0][stage].dtype
    magnitude = np.zeros(shape)
    for stages in implementations:
        for name in (stage, *_COMPUTED_FROM.get(stage, ())):
            if name in stages and stages[name].shape == shape:
                finite = np.isfinite(stages[name])
                magnitude = np.maximum(magnitude, np.where(finite, np.abs(stages[name].astype(np.float64)), 0))
    largest = magnitude.max(axis=-1, keepdims=True, initial=_LEAST_MAGNITUDE.get(stage, 0.0))
    # The largest number of all has no next one: its neighbour below stands in for it.
    largest = np.minimum(largest.astype(dtype), np.nextafter(np.finfo(dtype).max, np.array(0, dtype)))
    spacing = np.spacing(largest).astype(np.float64)
    least = float(np.finfo(dtype).smallest_normal) / UNITS
    return np.broadcast_to(np.maximum(spacing, least), shape)
