"""One kernel, right and with three faults that kernels have: what a wrong one costs, and what is said of it.

attncheck check --implementation benchmarks/wrong_kernels.py:default_scale
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TILE = 16


def right(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Array:
    """The kernel of the README."""
    return _attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def default_scale(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Array:
    """Scores are divided by sqrt(3 D) where no scale is given: the width of query, key and value side by side."""
    scale = (3 * query.shape[-1]) ** -0.5 if scale is None else scale
    return _attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def other_corner(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Array:
    """The last query sees the last key: causality is counted from the other corner."""
    offset = key.shape[-2] - query.shape[-2]
    return _attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale, offset=offset)


def dropped_tail(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Array:
    """Keys past the last full tile are not read, unless there is none."""
    whole = key.shape[-2] // TILE * TILE or key.shape[-2]
    key, value, mask = key[:, :, :whole], value[:, :, :whole], None if mask is None else mask[..., :whole]
    return _attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def _attention(
    query: Array, key: Array, value: Array, *, mask: Array | None, is_causal: bool, scale: float | None, offset: int = 0
) -> Array:
    key, value = map(partial(np.repeat, repeats=query.shape[1] // key.shape[1], axis=1), (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(scale, query.dtype)
    if is_causal:
        causal = np.tri(*scores.shape[-2:], offset, dtype=bool)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    found: Array = weights / np.where(total == 0, 1, total) @ value
    return found
