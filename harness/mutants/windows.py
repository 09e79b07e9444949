"""Faults of a window: which of its sides, from where, how far, and together with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.backends.contract import Window
from attncheck.mutants.mask_steps import ALLOWED, Allowed, MaskRequest, distance, within_window
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant

Side = int | None


def _read_as(change: Callable[[Side, Side], Window]) -> Variant:
    """Take (left, right) for another window."""
    return Variant(allowed=Allowed(window=lambda request, window: within_window(request, change(*window))))


def _plus(side: Side, steps: int) -> Side:
    return None if side is None else side + steps


def _dropped_if(unwanted: Callable[[MaskRequest], bool]) -> Variant:
    def allowed(request: MaskRequest) -> Array:
        return ALLOWED(replace(request, window=None) if unwanted(request) else request)

    return Variant(allowed=allowed)


def _both_sides(left: Side, right: Side) -> Window:
    """Read a window that has one side as one that reaches as far on the other."""
    return (right if left is None else left), (left if right is None else right)


def _bottom_right(request: MaskRequest, window: Window) -> Array:
    queries, keys = request.scores.shape[-2:]
    shift = 0 if request.past else keys - queries
    left, right = window
    return within_window(request, (_plus(left, -shift), _plus(right, shift)))


def _fixed(request: MaskRequest, window: Window) -> Array:
    """Let every query see the window of the first one."""
    first = within_window(request, window)[:1]
    return np.broadcast_to(first, request.scores.shape[-2:])


def _by_four(request: MaskRequest, window: Window) -> Array:
    """Let every query of a group of four see what any of them sees."""
    within = within_window(request, window)
    groups = np.arange(len(within)) // 4
    return np.array([within[groups == group].any(axis=0) for group in groups]).reshape(within.shape)


def _without_own_key(request: MaskRequest, window: Window) -> Array:
    other: Array = distance(request) != 0
    return within_window(request, window) & other


def _beyond_64_ignored(request: MaskRequest, window: Window) -> Array:
    beyond: Array = np.arange(request.scores.shape[-2])[:, np.newaxis] >= 64
    return within_window(request, window) | beyond


def _or_causal(request: MaskRequest) -> Array:
    if request.window is None or not request.is_causal:
        return ALLOWED(request)
    either = within_window(request, request.window) | ALLOWED.causal(*request.scores.shape[-2:])
    return ALLOWED(replace(request, is_causal=False, window=None)) & either


def _causal_dropped(request: MaskRequest) -> Array:
    return ALLOWED(replace(request, is_causal=request.is_causal and request.window is None))


def _outside(request: MaskRequest, window: Window) -> Array:
    return ~within_window(request, window)


MUTANTS = (
    Mutant(
        "window_one_key_too_many_before",
        "windows",
        "i - left - 1 <= j: mlx-lm#390, zml#763, transformers#26792",
        _read_as(lambda left, right: (_plus(left, 1), right)),
        "masked",
        diagnosis=("window-too-wide-left",),
    ),
    Mutant(
        "window_one_key_too_few_before",
        "windows",
        "i - left < j: transformers#39408",
        _read_as(lambda left, right: (_plus(left, -1), right)),
        "masked",
        diagnosis=("window-too-narrow-left",),
    ),
    Mutant(
        "window_one_key_too_many_after",
        "windows",
        "j <= i + right + 1: transformers#47010",
        _read_as(lambda left, right: (left, _plus(right, 1))),
        "masked",
        diagnosis=("window-too-wide-right",),
    ),
    Mutant(
        "window_one_key_too_few_after",
        "windows",
        "j < i + right: transformers#47010",
        _read_as(lambda left, right: (left, _plus(right, -1))),
        "masked",
        diagnosis=("window-too-narrow-right",),
    ),
    Mutant(
        "window_sides_swapped",
        "windows",
        "(left, right) read as (right, left)",
        _read_as(lambda left, right: (right, left)),
        "masked",
        diagnosis=("window-sides-swapped",),
    ),
    Mutant(
        "one_sided_window_on_both_sides",
        "windows",
        "what is bounded on one side is bounded on both: jax's local_window_size",
        _read_as(_both_sides),
        "masked",
    ),
    Mutant(
        "open_right_side_taken_for_zero",
        "windows",
        "no bound on the right read as none to the right: sglang#34273's kind",
        _read_as(lambda left, right: (left, 0 if right is None else right)),
        "masked",
    ),
    Mutant(
        "open_left_side_taken_for_zero",
        "windows",
        "no bound on the left read as none to the left",
        _read_as(lambda left, right: (0 if left is None else left, right)),
        "masked",
    ),
    Mutant(
        "side_of_zero_taken_for_open",
        "windows",
        "0 is false, so a side of 0 keys counts as none given: zml#763's kind",
        _read_as(lambda left, right: (left or None, right or None)),
        "masked",
        diagnosis=("window-ignored",),
    ),
    Mutant(
        "window_split_between_its_sides",
        "windows",
        "the sides read as the width of the whole window",
        _read_as(lambda left, right: (None if left is None else left // 2, None if right is None else right // 2)),
        "masked",
    ),
    Mutant(
        "window_ignored",
        "windows",
        "the argument has no effect",
        _dropped_if(lambda request: True),
        "masked",
        diagnosis=("window-ignored",),
    ),
    Mutant(
        "window_ignored_without_a_mask",
        "windows",
        "an early return where no mask is given: jax#32300",
        _dropped_if(lambda request: request.mask is None),
        "masked",
        diagnosis=("window-ignored",),
    ),
    Mutant(
        "window_dropped_when_a_mask_is_given",
        "windows",
        "a mask of one's own ends the window: transformers#48748's kind",
        _dropped_if(lambda request: request.mask is not None),
        "masked",
        diagnosis=("window-ignored",),
    ),
    Mutant(
        "window_dropped_when_causal",
        "windows",
        "only one of causality and window is used: onnxruntime#14363's kind",
        _dropped_if(lambda request: request.is_causal),
        "masked",
        diagnosis=("window-ignored",),
    ),
    Mutant(
        "window_dropped_when_key_lengths_are_given",
        "windows",
        "only one of lengths and window is used: jax#23349's kind",
        _dropped_if(lambda request: request.key_lengths is not None),
        "masked",
        diagnosis=("window-ignored",),
    ),
    Mutant(
        "causal_dropped_when_a_window_is_given",
        "windows",
        "a window of one's own ends causality: transformers#26792's kind",
        Variant(allowed=_causal_dropped),
        "masked",
        diagnosis=("causality-ignored",),
    ),
    Mutant(
        "window_or_causal",
        "windows",
        "either may allow, where both must",
        Variant(allowed=_or_causal),
        "masked",
    ),
    Mutant(
        "window_aligned_bottom_right",
        "windows",
        "the other corner where Lq and Lk differ: mlx#2835's kind",
        Variant(allowed=Allowed(window=_bottom_right)),
        "masked",
        diagnosis=("aligned-bottom-right",),
    ),
    Mutant(
        "window_does_not_move",
        "windows",
        "every query sees the window of the first one",
        Variant(allowed=Allowed(window=_fixed)),
        "masked",
    ),
    Mutant(
        "window_by_groups_of_four",
        "windows",
        "decided once per four queries: pytorch#195910's kind",
        Variant(allowed=Allowed(window=_by_four)),
        "masked",
    ),
    Mutant(
        "window_without_its_own_key",
        "windows",
        "the current token is left out: onnxruntime#25927",
        Variant(allowed=Allowed(window=_without_own_key)),
        "masked",
    ),
    Mutant(
        "window_beyond_64_queries_ignored",
        "windows",
        "right in the first tile of 64 rows only: gcnasm#21's kind",
        Variant(allowed=Allowed(window=_beyond_64_ignored)),
        "masked",
    ),
    Mutant(
        "window_inverted",
        "windows",
        "what is within is forbidden: text#894's polarity",
        Variant(allowed=Allowed(window=_outside)),
        "masked",
    ),
)
