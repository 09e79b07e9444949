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
_faulty_empty_rows = partial(mutant, "empty rows")
_faulty_windows = partial(mutant, "windows", at="masked")

Side = int | None


def _diagonal(offset: Callable[[int, int], int]) -> Steps:
    """Let key j be attended by query i iff j <= i + offset."""
    return causal_pattern(lambda queries, keys: np.tri(queries, keys, offset(queries, keys), dtype=bool))


@_faulty_causal(_diagonal, defect="j <= i + 1: tt-metal#41215", diagnosis="causal-next-key")
def causal_sees_the_next_key(queries: int, keys: int) -> int:
    return 1


@_faulty_causal(_diagonal, defect="j < i: onnxruntime#25927's kind", diagnosis="causal-without-own-key")
def causal_without_its_own_key(queries: int, keys: int) -> int:
    return -1


@_faulty_causal(
    _diagonal, defect="the other corner: mlx#2835, cutlass#2336, flash-attention#1778", diagnosis="aligned-bottom-right"
)
def causal_aligned_bottom_right(queries: int, keys: int) -> int:
    return keys - queries


@_faulty_causal(
    _diagonal, defect="the other corner, if Lq == 1 only: onnxruntime#29020", diagnosis="aligned-bottom-right"
)
def causal_bottom_right_for_one_query(queries: int, keys: int) -> int:
    return keys - queries if queries == 1 else 0


@_faulty_causal(causal_pattern, defect="j >= i, the upper triangle", diagnosis="causal-mirrored")
def causal_mirrored(queries: int, keys: int) -> Array:
    return causal_keys(keys, queries).T


@_faulty_causal(causal_pattern, defect="decided once per four queries: pytorch#195910")
def causal_by_groups_of_four(queries: int, keys: int) -> Array:
    """Let every query of a group of four see what the group's last one sees."""
    last = np.minimum(np.arange(queries) // 4 * 4 + 3, queries - 1)
    return np.asarray(causal_keys(queries, keys)[last])


def _causality_dropped_if(unwanted: Callable[[Masks], bool]) -> Steps:
    return dropped("is_causal", unwanted)


@_faulty_causal(_causality_dropped_if, defect="the argument has no effect: keras#23038", diagnosis="causality-ignored")
def causal_ignored(masks: Masks) -> bool:
    return True


@_faulty_causal(
    _causality_dropped_if,
    defect="a mask of one's own ends causality: transformers#48748, keras",
    diagnosis="causality-ignored",
)
def causal_dropped_when_a_mask_is_given(masks: Masks) -> bool:
    return masks["mask"] is not None


@_faulty_causal(_causality_dropped_if, defect="a bias of one's own ends causality", diagnosis="causality-ignored")
def causal_dropped_when_a_bias_is_given(masks: Masks) -> bool:
    return masks["bias"] is not None


@_faulty_causal(causal_pattern, defect="right in the first tile of 64 rows only: gcnasm#21")
def causal_beyond_64_queries_ignored(queries: int, keys: int) -> Array:
    return np.asarray(causal_keys(queries, keys) | (np.arange(queries)[:, np.newaxis] >= 64))


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


@_faulty_empty_rows(
    _empty_rows,
    at="weights",
    defect="softmax of a row of -inf: pytorch#103749, rten#1321, iree#24178",
    diagnosis="empty-rows-nan",
)
def empty_row_gives_nan(logits: Array) -> Stages:
    return {"weights": np.full(logits.shape, np.nan), "log_sum_exp": np.full(logits.shape[:-1], np.nan)}


@_faulty_empty_rows(
    _empty_rows, at="weights", defect="the mean of the values: keras#21123", diagnosis="empty-rows-uniform"
)
def empty_row_is_uniform(logits: Array) -> Stages:
    return {"weights": np.full(logits.shape, 1 / logits.shape[-1])}


@_faulty_empty_rows(_empty_rows, at="weights", defect="argmax of nothing is 0")
def empty_row_takes_the_first_key(logits: Array) -> Stages:
    first = np.arange(logits.shape[-1]) == 0
    return {"weights": np.broadcast_to(first, logits.shape)}


@_faulty_empty_rows(_empty_rows, at="log_sum_exp", defect="log 1 for -inf: merged states weigh an empty one (mlx#2608)")
def empty_row_has_log_sum_exp_zero(logits: Array) -> Stages:
    return {"log_sum_exp": np.zeros(logits.shape[:-1])}


def _plus(side: Side, steps: int) -> Side:
    return None if side is None else side + steps


def _window_dropped_if(unwanted: Callable[[Masks], bool]) -> Steps:
    return dropped("window", unwanted)


@_faulty_windows(
    window_read_as,
    defect="i - left - 1 <= j: mlx-lm#390, zml#763, transformers#26792",
    diagnosis="window-too-wide-left",
)
def window_one_key_too_many_before(left: Side, right: Side) -> Window:
    return _plus(left, 1), right


@_faulty_windows(window_read_as, defect="i - left < j: transformers#39408", diagnosis="window-too-narrow-left")
def window_one_key_too_few_before(left: Side, right: Side) -> Window:
    return _plus(left, -1), right


@_faulty_windows(window_read_as, defect="j <= i + right + 1: transformers#47010", diagnosis="window-too-wide-right")
def window_one_key_too_many_after(left: Side, right: Side) -> Window:
    return left, _plus(right, 1)


@_faulty_windows(window_read_as, defect="j < i + right: transformers#47010", diagnosis="window-too-narrow-right")
def window_one_key_too_few_after(left: Side, right: Side) -> Window:
    return left, _plus(right, -1)


@_faulty_windows(window_read_as, defect="(left, right) read as (right, left)", diagnosis="window-sides-swapped")
def window_sides_swapped(left: Side, right: Side) -> Window:
    return right, left


@_faulty_windows(window_read_as, defect="what is bounded on one side is bounded on both: jax's local_window_size")
def one_sided_window_on_both_sides(left: Side, right: Side) -> Window:
    return (right if left is None else left), (left if right is None else right)


@_faulty_windows(window_read_as, defect="no bound on the right read as none to the right: sglang#34273's kind")
def open_right_side_taken_for_zero(left: Side, right: Side) -> Window:
    return left, 0 if right is None else right


@_faulty_windows(window_read_as, defect="no bound on the left read as none to the left")
def open_left_side_taken_for_zero(left: Side, right: Side) -> Window:
    return 0 if left is None else left, right


@_faulty_windows(
    window_read_as,
    defect="0 is false, so a side of 0 keys counts as none given: zml#763's kind",
    diagnosis="window-ignored",
)
def side_of_zero_taken_for_open(left: Side, right: Side) -> Window:
    return left or None, right or None


@_faulty_windows(window_read_as, defect="the sides read as the width of the whole window")
def window_split_between_its_sides(left: Side, right: Side) -> Window:
    return None if left is None else left // 2, None if right is None else right // 2


@_faulty_windows(_window_dropped_if, defect="the argument has no effect", diagnosis="window-ignored")
def window_ignored(masks: Masks) -> bool:
    return True


@_faulty_windows(
    _window_dropped_if, defect="an early return where no mask is given: jax#32300", diagnosis="window-ignored"
)
def window_ignored_without_a_mask(masks: Masks) -> bool:
    return masks["mask"] is None


@_faulty_windows(
    _window_dropped_if,
    defect="a mask of one's own ends the window: transformers#48748's kind",
    diagnosis="window-ignored",
)
def window_dropped_when_a_mask_is_given(masks: Masks) -> bool:
    return masks["mask"] is not None


@_faulty_windows(
    _window_dropped_if,
    defect="only one of causality and window is used: onnxruntime#14363's kind",
    diagnosis="window-ignored",
)
def window_dropped_when_causal(masks: Masks) -> bool:
    return bool(masks["is_causal"])


@_faulty_windows(
    _window_dropped_if, defect="only one of lengths and window is used: jax#23349's kind", diagnosis="window-ignored"
)
def window_dropped_when_key_lengths_are_given(masks: Masks) -> bool:
    return masks["key_lengths"] is not None


@_faulty_windows(
    _causality_dropped_if,
    defect="a window of one's own ends causality: transformers#26792's kind",
    diagnosis="causality-ignored",
)
def causal_dropped_when_a_window_is_given(masks: Masks) -> bool:
    return masks["window"] is not None


@_faulty_windows(masks_read_as, defect="either may allow, where both must")
def window_or_causal(scores: Array, masks: Masks) -> Masks:
    if masks["window"] is None or not masks["is_causal"]:
        return {}
    either = keys_within(scores, masks["window"]) | causal_keys(*scores.shape[-2:])
    return {"is_causal": False, "window": None, "mask": both(masks["mask"], either)}


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


@_faulty_windows(window_pattern, defect="every query sees the window of the first one")
def window_does_not_move(scores: Array, masks: Masks) -> Array:
    first = keys_within(scores, masks["window"])[:1]
    return np.broadcast_to(first, scores.shape[-2:])


@_faulty_windows(window_pattern, defect="decided once per four queries: pytorch#195910's kind")
def window_by_groups_of_four(scores: Array, masks: Masks) -> Array:
    """Let every query of a group of four see what any of them sees."""
    within = keys_within(scores, masks["window"])
    groups = np.arange(len(within)) // 4
    return np.array([within[groups == group].any(axis=0) for group in groups]).reshape(within.shape)


@_faulty_windows(window_pattern, defect="the current token is left out: onnxruntime#25927")
def window_without_its_own_key(scores: Array, masks: Masks) -> Array:
    return np.asarray(keys_within(scores, masks["window"]) & (distance(scores) != 0))


@_faulty_windows(window_pattern, defect="right in the first tile of 64 rows only: gcnasm#21's kind")
def window_beyond_64_queries_ignored(scores: Array, masks: Masks) -> Array:
    beyond = np.arange(scores.shape[-2])[:, np.newaxis] >= 64
    return np.asarray(keys_within(scores, masks["window"]) | beyond)


@_faulty_windows(window_pattern, defect="what is within is forbidden: text#894's polarity")
def window_inverted(scores: Array, masks: Masks) -> Array:
    return ~keys_within(scores, masks["window"])


@equivalent(
    masks_read_as,
    defect="a bound that causality makes idle is not tested",
    proof="Causality asks for j <= i, a window's right side for j <= i + right with right >= 0: the first implies the "
    "second, so that both together are the first. A mask knows true and false only.",
)
def right_side_of_a_window_dropped_when_causal(scores: Array, masks: Masks) -> Masks:
    window = masks["window"]
    return {} if window is None or not masks["is_causal"] else {"window": (window[0], None)}
