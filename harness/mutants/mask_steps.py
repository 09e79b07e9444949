"""Who may attend to whom, in replaceable steps: each default is what ``numpy_backend`` does, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from attncheck.backends.contract import EmptyRows, Window
from attncheck.mutants.rounding import Array


@dataclass(frozen=True)
class MaskRequest:
    """What mask_scores is asked for, and what else an implementation may know where it masks.

    ``scale`` is what the scores were multiplied with, 1 where nobody said; ``uncapped`` are they before their
    ``softcap``; the first ``past`` keys come from a cache, and query heads share ``kv_heads`` heads of keys and values
    (0 where nobody said). The window counts from the first key. ``empty_rows`` is what a row without a key is to give.
    """

    scores: Array
    mask: Array | None = None
    bias: Array | None = None
    is_causal: bool = False
    scale: float = 1.0
    window: Window | None = None
    key_lengths: Array | None = None
    softcap: float | None = None
    uncapped: Array | None = None
    past: int = 0
    kv_heads: int = 0
    empty_rows: EmptyRows = "zero"

    @property
    def forbids(self) -> bool:
        """Whether anything may be forbidden."""
        sides = self.window or ()
        return (
            self.is_causal
            or self.mask is not None
            or self.key_lengths is not None
            or any(side is not None for side in sides)
        )


def without_a_key(logits: Array, request: MaskRequest) -> Array:
    """Give rows without a key equal scores, or NaN, where another convention than zero is asked for."""
    if request.empty_rows == "zero":
        return logits
    return np.where(is_empty(logits), 0.0 if request.empty_rows == "uniform" else np.nan, logits)


def is_empty(logits: Array) -> Array:
    """Return which rows are all -inf, the axis of keys kept."""
    empty: Array = (logits == -np.inf).all(axis=-1, keepdims=True)
    return empty


def add_bias(request: MaskRequest) -> Array:
    """Add the bias, which is there."""
    assert request.bias is not None
    biased: Array = request.scores + request.bias
    return biased


def causal_mask(queries: int, keys: int) -> Array:
    """Let key j be attended by query i iff j <= i."""
    return np.tri(queries, keys, dtype=bool)


def distance(request: MaskRequest) -> Array:
    """Return how far each key stands behind each query, j - i: (Lq, T)."""
    queries, keys = request.scores.shape[-2:]
    behind: Array = np.arange(keys) - np.arange(queries)[:, np.newaxis]
    return behind


def within_window(request: MaskRequest, window: Window) -> Array:
    """Let key j be attended by query i iff i - left <= j <= i + right."""
    behind, (left, right) = distance(request), window
    within = np.ones(behind.shape, dtype=bool)
    if left is not None:
        within &= behind >= -left
    if right is not None:
        within &= behind <= right
    return within


def within_lengths(request: MaskRequest, key_lengths: Array) -> Array:
    """Let a batch entry's first keys be attended, as many as it has: (B, 1, 1, T)."""
    within: Array = np.arange(request.scores.shape[-1]) < key_lengths[:, np.newaxis, np.newaxis, np.newaxis]
    return within


def window_after(window: Window | None, past: int) -> Window | None:
    """Return the window for queries that are counted from 0, though they stand behind a past."""
    if window is None:
        return None
    left, right = window
    return (None if left is None else left - past, None if right is None else right + past)


@dataclass(frozen=True)
class Allowed:
    """Which keys each query may attend to: all that is asked for must allow."""

    causal: Callable[[int, int], Array] = causal_mask
    mask: Callable[[Array, MaskRequest], Array] = lambda mask, request: mask
    window: Callable[[MaskRequest, Window], Array] = within_window
    lengths: Callable[[MaskRequest, Array], Array] = within_lengths

    def __call__(self, request: MaskRequest) -> Array:
        """Return a boolean array that broadcasts to the scores."""
        rules: list[Array] = [np.ones((), dtype=bool)]
        if request.is_causal:
            rules.append(self.causal(*request.scores.shape[-2:]))
        if request.mask is not None:
            rules.append(self.mask(request.mask, request))
        if request.window is not None:
            rules.append(self.window(request, request.window))
        if request.key_lengths is not None:
            rules.append(self.lengths(request, request.key_lengths))
        return reduce(np.logical_and, rules)


def fill(biased: Array, allowed: Array, request: MaskRequest) -> Array:
    """Set what may not be attended to -inf."""
    return np.where(allowed, biased, -np.inf)


ALLOWED = Allowed()
