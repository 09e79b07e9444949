"""Faults of causality and of windows: which of their sides, from where, how far, and together with what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages, Window
from attncheck.backends.numpy_backend import _row_maximum, mask_scores, softmax
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import normalised, where
from attncheck.mutation.mask_forms import (
    Masks,
    both,
    causal_keys,
    causal_pattern,
    distance,
    dropped,
    keys_within,
    masks_read_as,
    window_pattern,
    window_read_as,
)
from attncheck.mutation.mutant import equivalent, mutant
from attncheck.mutation.variant import Steps

_faulty_causal = partial(mutant, "causal", at="masked")
_faulty_empty_rows = partial(mutant, "empty rows", at="weights")
_faulty_windows = partial(mutant, "windows", at="masked")

Side = int | None


def _diagonal(offset: Callable[[int, int], int]) -> Steps:
    """Let key j be attended by query i iff j <= i + offset."""
    return causal_pattern(lambda queries, keys: np.tri(queries, keys, offset(queries, keys), dtype=bool))


def _causality_dropped_if(unwanted: Callable[[Masks], bool]) -> Steps:
    return dropped("is_causal", unwanted)


def _empty_rows(changed: Callable[[Array], Stages]) -> Steps:
    """Give rows in which nothing may be attended other weights, or another log_sum_exp, made from the logits."""

    def normalise(logits: Array) -> Stages:
        stages = softmax(logits)
        empty = _row_maximum(logits) == -np.inf
        for stage, other in changed(logits).items():
            rows = empty[..., 0] if other.ndim < logits.ndim else empty
            stages[stage] = np.asarray(np.where(rows, other, stages[stage]), logits.dtype)
        return stages

    return normalised(normalise)


def _plus(side: Side, steps: int) -> Side:
    return None if side is None else side + steps


def _window_dropped_if(unwanted: Callable[[Masks], bool]) -> Steps:
    return dropped("window", unwanted)


def _window_without_a_past(change: Callable[[Array, Window], Window]) -> Steps:
    """Take another window, ``change(scores, window)``, but behind a past."""
    wrong = window_pattern(lambda scores, masks: keys_within(scores, change(scores, masks["window"])))
    return wrong | where(lambda call: call.past > 0, {"mask_scores": mask_scores})


@_faulty_windows(
    _window_without_a_past,
    defect="the other corner where Lq and Lk differ: mlx#2835's kind",
    diagnosis="aligned-bottom-right",
)
def window_aligned_bottom_right(scores: Array, window: Window) -> Window:
    queries, keys = scores.shape[-2:]
    left, right = window
    return _plus(left, queries - keys), _plus(right, keys - queries)


@_faulty_windows(window_pattern, defect="decided once per four queries: pytorch#195910's kind")
def window_by_groups_of_four(scores: Array, masks: Masks) -> Array:
    """Let every query of a group of four see what any of them sees."""
    within = keys_within(scores, masks["window"])
    groups = np.arange(len(within)) // 4
    return np.array([within[groups == group].any(axis=0) for group in groups]).reshape(within.shape)


@equivalent(
    masks_read_as,
    defect="a bound that causality makes idle is not tested",
    proof="Causality asks for j <= i, a window's right side for j <= i + right with right >= 0: the first implies the "
    "second, so that both together are the first. A mask knows true and false only.",
)
def right_side_of_a_window_dropped_when_causal(scores: Array, masks: Masks) -> Masks:
    window = masks["window"]
    return {} if window is None or not masks["is_causal"] else {"window": (window[0], None)}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_causal(_diagonal, "causal_sees_the_next_key", "j <= i + 1: tt-metal#41215",
    lambda queries, keys: 1, diagnosis="causal-next-key")
_faulty_causal(_diagonal, "causal_without_its_own_key", "j < i: onnxruntime#25927's kind",
    lambda queries, keys: -1, diagnosis="causal-without-own-key")
_faulty_causal(_diagonal, "causal_aligned_bottom_right",
    "the other corner: mlx#2835, cutlass#2336, flash-attention#1778",
    lambda queries, keys: keys - queries, diagnosis="aligned-bottom-right")
_faulty_causal(_diagonal, "causal_bottom_right_for_one_query", "the other corner, if Lq == 1 only: onnxruntime#29020",
    lambda queries, keys: keys - queries if queries == 1 else 0, diagnosis="aligned-bottom-right")
_faulty_causal(causal_pattern, "causal_mirrored", "j >= i, the upper triangle",
    lambda queries, keys: causal_keys(keys, queries).T, diagnosis="causal-mirrored")
# Let every query of a group of four see what the group's last one sees.
_faulty_causal(causal_pattern, "causal_by_groups_of_four", "decided once per four queries: pytorch#195910",
    lambda queries, keys: np.asarray(causal_keys(queries, keys)[np.minimum(np.arange(queries) // 4 * 4 + 3,
        queries - 1)]))
_faulty_causal(_causality_dropped_if, "causal_ignored", "the argument has no effect: keras#23038",
    lambda masks: True, diagnosis="causality-ignored")
_faulty_causal(_causality_dropped_if, "causal_dropped_when_a_mask_is_given",
    "a mask of one's own ends causality: transformers#48748, keras",
    lambda masks: masks["mask"] is not None, diagnosis="causality-ignored")
_faulty_causal(_causality_dropped_if, "causal_dropped_when_a_bias_is_given", "a bias of one's own ends causality",
    lambda masks: masks["bias"] is not None, diagnosis="causality-ignored")
_faulty_causal(causal_pattern, "causal_beyond_64_queries_ignored", "right in the first tile of 64 rows only: gcnasm#21",
    lambda queries, keys: np.asarray(causal_keys(queries, keys) | (np.arange(queries)[:, np.newaxis] >= 64)))
_faulty_empty_rows(_empty_rows, "empty_row_gives_nan",
    "softmax of a row of -inf: pytorch#103749, rten#1321, iree#24178",
    lambda logits: {"weights": np.full(logits.shape, np.nan), "log_sum_exp": np.full(logits.shape[:-1], np.nan)},
    diagnosis="empty-rows-nan")
_faulty_empty_rows(_empty_rows, "empty_row_is_uniform", "the mean of the values: keras#21123",
    lambda logits: {"weights": np.full(logits.shape, 1 / logits.shape[-1])}, diagnosis="empty-rows-uniform")
_faulty_empty_rows(_empty_rows, "empty_row_takes_the_first_key", "argmax of nothing is 0",
    lambda logits: {"weights": np.broadcast_to(np.arange(logits.shape[-1]) == 0, logits.shape)})
_faulty_empty_rows(_empty_rows, "empty_row_has_log_sum_exp_zero",
    "log 1 for -inf: merged states weigh an empty one (mlx#2608)",
    lambda logits: {"log_sum_exp": np.zeros(logits.shape[:-1])}, at="log_sum_exp")
_faulty_windows(window_read_as, "window_one_key_too_many_before",
    "i - left - 1 <= j: mlx-lm#390, zml#763, transformers#26792",
    lambda left, right: (_plus(left, 1), right), diagnosis="window-too-wide-left")
_faulty_windows(window_read_as, "window_one_key_too_few_before", "i - left < j: transformers#39408",
    lambda left, right: (_plus(left, -1), right), diagnosis="window-too-narrow-left")
_faulty_windows(window_read_as, "window_one_key_too_many_after", "j <= i + right + 1: transformers#47010",
    lambda left, right: (left, _plus(right, 1)), diagnosis="window-too-wide-right")
_faulty_windows(window_read_as, "window_one_key_too_few_after", "j < i + right: transformers#47010",
    lambda left, right: (left, _plus(right, -1)), diagnosis="window-too-narrow-right")
_faulty_windows(window_read_as, "window_sides_swapped", "(left, right) read as (right, left)",
    lambda left, right: (right, left), diagnosis="window-sides-swapped")
_faulty_windows(window_read_as, "one_sided_window_on_both_sides",
    "what is bounded on one side is bounded on both: jax's local_window_size",
    lambda left, right: (right if left is None else left, left if right is None else right),
    diagnosis="window-on-both-sides")
_faulty_windows(window_read_as, "open_right_side_taken_for_zero",
    "no bound on the right read as none to the right: sglang#34273's kind",
    lambda left, right: (left, 0 if right is None else right), diagnosis="window-open-right-as-zero")
_faulty_windows(window_read_as, "open_left_side_taken_for_zero", "no bound on the left read as none to the left",
    lambda left, right: (0 if left is None else left, right), diagnosis="window-open-left-as-zero")
_faulty_windows(window_read_as, "side_of_zero_taken_for_open",
    "0 is false, so a side of 0 keys counts as none given: zml#763's kind",
    lambda left, right: (left or None, right or None), diagnosis=("window-ignored", "window-zero-as-open"))
_faulty_windows(window_read_as, "window_split_between_its_sides", "the sides read as the width of the whole window",
    lambda left, right: (None if left is None else left // 2, None if right is None else right // 2))
_faulty_windows(_window_dropped_if, "window_ignored", "the argument has no effect",
    lambda masks: True, diagnosis="window-ignored")
_faulty_windows(_window_dropped_if, "window_ignored_without_a_mask",
    "an early return where no mask is given: jax#32300",
    lambda masks: masks["mask"] is None, diagnosis="window-ignored")
_faulty_windows(_window_dropped_if, "window_dropped_when_a_mask_is_given",
    "a mask of one's own ends the window: transformers#48748's kind",
    lambda masks: masks["mask"] is not None, diagnosis="window-ignored")
_faulty_windows(_window_dropped_if, "window_dropped_when_causal",
    "only one of causality and window is used: onnxruntime#14363's kind",
    lambda masks: bool(masks["is_causal"]), diagnosis="window-ignored")
_faulty_windows(_window_dropped_if, "window_dropped_when_key_lengths_are_given",
    "only one of lengths and window is used: jax#23349's kind",
    lambda masks: masks["key_lengths"] is not None, diagnosis="window-ignored")
_faulty_windows(_causality_dropped_if, "causal_dropped_when_a_window_is_given",
    "a window of one's own ends causality: transformers#26792's kind",
    lambda masks: masks["window"] is not None, diagnosis="causality-ignored")
_faulty_windows(masks_read_as, "window_or_causal", "either may allow, where both must",
    lambda scores, masks: {} if masks["window"] is None or not masks["is_causal"] else {"is_causal": False, "window":
        None, "mask": both(masks["mask"], keys_within(scores, masks["window"]) | causal_keys(*scores.shape[-2:]))})
_faulty_windows(window_pattern, "window_does_not_move", "every query sees the window of the first one",
    lambda scores, masks: np.broadcast_to(keys_within(scores, masks["window"])[:1], scores.shape[-2:]),
    diagnosis="window-of-first-query")
_faulty_windows(window_pattern, "window_without_its_own_key", "the current token is left out: onnxruntime#25927",
    lambda scores, masks: np.asarray(keys_within(scores, masks["window"]) & (distance(scores) != 0)),
    diagnosis="window-without-own-key")
_faulty_windows(window_pattern, "window_beyond_64_queries_ignored",
    "right in the first tile of 64 rows only: gcnasm#21's kind",
    lambda scores, masks: np.asarray(keys_within(scores, masks["window"]) | (np.arange(scores.shape[-2])[:,
        np.newaxis] >= 64)))
_faulty_windows(window_pattern, "window_inverted", "what is within is forbidden: text#894's polarity",
    lambda scores, masks: ~keys_within(scores, masks["window"]), diagnosis="window-inverted")
