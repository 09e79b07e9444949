"""Faults of positions: causality, windows, offsets of queries, and biases that follow from positions.

A kernel gets a bias as numbers. What a model's code, or a kernel that makes the bias itself, does instead is told from
them: a bias that is minus a slope times a distance (ALiBi), or one that depends on the distance alone (T5).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _rotate, _row_maximum, softmax
from attncheck.judging.alternatives import queries_and_keys
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array
from attncheck.mutation.mutant import Call, Steps, equivalent, mutant
from attncheck.reading.generated_arrays import alibi_slopes, relative_buckets

_faulty_causal = partial(mutant, "causal", at="masked")
_faulty_empty_rows = partial(mutant, "empty rows", at="weights")
_faulty_windows = partial(mutant, "windows", at="masked")


def _empty_rows(changed: Callable[[Array], Stages]) -> Steps:
    """Give rows in which nothing may be attended other weights, or another log_sum_exp, made from the logits."""

    def normalise(logits: Array) -> Stages:
        stages = softmax(logits)
        empty = _row_maximum(logits) == -np.inf
        for stage, other in changed(logits).items():
            rows = empty[..., 0] if other.ndim < logits.ndim else empty
            stages[stage] = np.asarray(np.where(rows, other, stages[stage]), logits.dtype)
        return stages

    return forms.normalised(normalise)


@_faulty_windows(forms.window_pattern, defect="decided once per four queries: pytorch#195910's kind")
def window_by_groups_of_four(scores: Array, masks: forms.Masks) -> Array:
    """Let every query of a group of four see what any of them sees."""
    within = forms.keys_within(scores, masks["window"])
    groups = np.arange(len(within)) // 4
    return np.array([within[groups == group].any(axis=0) for group in groups]).reshape(within.shape)


@equivalent(
    forms.masks_read_as,
    defect="a bound that causality makes idle is not tested",
    proof="Causality asks for j <= i, a window's right side for j <= i + right with right >= 0: the first implies the "
    "second, so that both together are the first. A mask knows true and false only.",
)
def right_side_of_a_window_dropped_when_causal(scores: Array, masks: forms.Masks) -> forms.Masks:
    window = masks["window"]
    return {} if window is None or not masks["is_causal"] else {"window": (window[0], None)}


def _rotated(rows: Callable[[Call, Array, str], Array]) -> Steps:
    """Rotate queries with offsets by other rows, ``rows(call, table, name)``, where each batch entry has its own."""

    def steps(call: Call) -> Steps:
        if call.query_offsets is None or call.rotary_cos is None:
            return {}

        def rotate(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
            if cos.ndim > 2:  # the rows of each batch entry
                cos, sin = rows(call, cos, "cos"), rows(call, sin, "sin")
            return _rotate(inputs, cos, sin, interleaved)

        return {"_rotate": rotate}

    return forms.in_attention(steps)


# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
# fmt: off
for _fault in forms.misread(
    ("causal", "causal-next-key", "j <= i + 1: tt-metal#41215"),
    ("causal", "causal-without-own-key", "j < i: onnxruntime#25927's kind"),
    ("causal", "causal-mirrored", "j >= i, the upper triangle"),
    ("causal", "aligned-bottom-right", "the other corner: mlx#2835, cutlass#2336, flash-attention#1778",
        "causal_aligned_bottom_right", forms.given("is_causal")),
    ("causal", "aligned-bottom-right", "the other corner, if Lq == 1 only: onnxruntime#29020",
        "causal_bottom_right_for_one_query", lambda problem: problem.options.get("is_causal")
        and queries_and_keys(problem)[0] == 1),
    ("causal", "causality-ignored", "the argument has no effect: keras#23038"),
    ("causal", "causality-ignored", "a mask of one's own ends causality: transformers#48748, keras",
        "causal_dropped_when_a_mask_is_given", forms.given("mask")),
    ("causal", "causality-ignored", "a bias of one's own ends causality", "causal_dropped_when_a_bias_is_given",
        forms.given("bias")),
    ("windows", "causality-ignored", "a window of one's own ends causality: transformers#26792's kind",
        "causal_dropped_when_a_window_is_given", forms.given("window")),
    ("windows", "aligned-bottom-right", "the other corner where Lq and Lk differ: mlx#2835's kind",
        "window_aligned_bottom_right", forms.given("window")),
    ("windows", "window-too-wide-right", "j <= i + right + 1: transformers#47010"),
    ("windows", "window-too-narrow-right", "j < i + right: transformers#47010"),
    ("windows", "window-sides-swapped", "(left, right) read as (right, left)"),
    ("windows", "window-on-both-sides", "what is bounded on one side is bounded on both: jax's local_window_size"),
    ("windows", "window-open-right-as-zero", "no bound on the right read as none to the right: sglang#34273's kind"),
    ("windows", "window-open-left-as-zero", "no bound on the left read as none to the left"),
    ("windows", "window-zero-as-open", "0 is false, so a side of 0 keys counts as none given: zml#763's kind"),
    ("windows", "window-ignored", "the argument has no effect"),
    ("windows", "window-ignored", "an early return where no mask is given: jax#32300",
        "window_ignored_without_a_mask", lambda problem: "mask" not in problem.inputs),
    ("windows", "window-ignored", "a mask of one's own ends the window: transformers#48748's kind",
        "window_dropped_when_a_mask_is_given", forms.given("mask")),
    ("windows", "window-ignored", "only one of causality and window is used: onnxruntime#14363's kind",
        "window_dropped_when_causal", forms.given("is_causal")),
    ("windows", "window-ignored", "only one of lengths and window is used: jax#23349's kind",
        "window_dropped_when_key_lengths_are_given", forms.given("key_lengths")),
    ("windows", "window-or-causality", "either may allow, where both must"),
    ("windows", "window-of-first-query", "every query sees the window of the first one"),
    ("windows", "window-without-own-key", "the current token is left out: onnxruntime#25927"),
    ("windows", "window-inverted", "what is within is forbidden: text#894's polarity"),
    ("query offsets", "query-offsets-of-first-batch-entry",
        "the position of the first sequence for all of them: candle-vllm#140, reasoning-from-scratch#33"),
    ("query offsets", "query-offsets-ignored", "causality counts from the first key whatever the cache: onnx#8054"),
    ("query offsets", "query-offsets-one-too-far", "positions start at 1: mlx-lm#390's kind"),
    ("query offsets", "query-offsets-of-longest", "the longest sequence's position for all: left padding is assumed"),
    ("query offsets", "query-offsets-of-next-batch-entry", "batch index off by one"),
    ("biases from positions", "bias-of-first-half-of-heads",
        "every rank counts its heads from 0: flashinfer#1606, Megatron-DeepSpeed#227"),
    ("biases from positions", "bias-of-first-head-of-group",
        "query heads of a group share the bias of its first: a kernel that packs groups"),
    ("biases from positions", "bias-ignored", "no bias once there is a cache: TensorRT-LLM#13870",
        "bias_dropped_behind_a_past", forms.given("past_key")),
):
    mutant(**_fault)
mutant("rotary", _rotated, "query_offsets_do_not_reach_the_rotation",
    "one position of the rotation for the whole batch: reasoning-from-scratch#33",
    lambda call, table, name: getattr(call, f"rotary_{name}")[call.past :], at="rotated_query",
    diagnosis="rotary-without-offsets")
mutant("rotary", _rotated, "query_offset_of_the_first_batch_entry_in_the_rotation",
    "positions of a batch are those of its first sequence: reasoning-from-scratch#33",
    lambda call, table, name: table[:1], at="rotated_query", diagnosis="rotary-of-first-batch-entry")
_faulty_causal(forms.causal_pattern, "causal_by_groups_of_four",  # every query sees what the group's last one sees
    "decided once per four queries: pytorch#195910",
    lambda queries, keys: np.asarray(forms.causal_keys(queries, keys)[np.minimum(np.arange(queries) // 4 * 4 + 3,
        queries - 1)]))
_faulty_causal(forms.causal_pattern, "causal_beyond_64_queries_ignored",
    "right in the first tile of 64 rows only: gcnasm#21",
    lambda queries, keys: np.asarray(forms.causal_keys(queries, keys) | (np.arange(queries)[:, np.newaxis] >= 64)))
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
_faulty_windows(forms.window_read_as, "window_split_between_its_sides",
    "the sides read as the width of the whole window",
    lambda left, right: (None if left is None else left // 2, None if right is None else right // 2))
_faulty_windows(forms.window_pattern, "window_beyond_64_queries_ignored",
    "right in the first tile of 64 rows only: gcnasm#21's kind",
    lambda scores, masks: np.asarray(forms.keys_within(scores, masks["window"]) | (np.arange(scores.shape[-2])[:,
        np.newaxis] >= 64)))
# fmt: on


@mutant(
    "query offsets",
    forms.masks_read_as,
    at="masked",
    defect="the near end of the window counts in the block of queries: lalamo#200's kind",
)
def query_offsets_reach_the_far_side_of_the_window_alone(scores: Array, masks: forms.Masks) -> forms.Masks:
    """Move the left end of the window by the offset, and leave its right end and causality where they are."""
    left, right = masks["window"] or (None, None)
    if masks["query_offsets"] is None or right is None:
        return {}
    far = forms.allowed_keys(scores, {"window": (left, None), "query_offsets": masks["query_offsets"]})
    near = forms.allowed_keys(scores, {"window": (None, right)})
    return {"window": None, "mask": forms.both(masks["mask"], far & near)}


_faulty = partial(mutant, "biases from positions", at="biased")
_TOLERANCE = 2.0**-6
"""A slope and its products are rounded to the dtype."""


def _alibi_read_as(change: Callable[[Array, Array, Array], Array]) -> Steps:
    """Take another bias, (H, Lq, T), for ALiBi: ``change(slopes, query, key)`` by positions; leave others alone."""

    def read(bias: Array, scores: Array) -> Array:
        found = _slopes_and_offset(bias)
        if found is None:
            return bias
        slopes, offset = found
        queries, keys = bias.shape[-2:]
        query, key = offset + np.arange(queries)[:, np.newaxis], np.arange(keys)
        return np.asarray(change(slopes[:, np.newaxis, np.newaxis], query, key)[np.newaxis], bias.dtype)

    return forms.bias_read_as(read)


def _slopes_and_offset(bias: Array) -> tuple[Array, int] | None:
    """Return the slope of each head, and the position of the first query, where a bias is ALiBi."""
    if bias.ndim != 4 or bias.shape[0] != 1 or bias.shape[1] < 2 or bias.shape[-1] < 2 or not bias.shape[-2]:
        return None
    own = (bias[0, :, 0] == 0).all(axis=0)
    if own.sum() != 1:
        return None
    offset = int(own.argmax())
    slopes = -np.asarray(bias[0, :, 0, offset - 1 if offset else 1], np.float64)
    away = np.abs(np.arange(bias.shape[-1]) - offset - np.arange(bias.shape[-2])[:, np.newaxis])
    is_alibi = np.allclose(np.asarray(bias[0], np.float64), -slopes[:, np.newaxis, np.newaxis] * away, rtol=_TOLERANCE)
    return (slopes, offset) if is_alibi and (slopes > 0).all() else None


def _slopes_read_as(change: Callable[[Array], Array]) -> Steps:
    """Take other slopes for those of ALiBi: ``change(slopes)``, (H)."""
    return _alibi_read_as(lambda slopes, query, key: -change(slopes.ravel())[:, None, None] * np.abs(query - key))


def _below(heads: int) -> int:
    """Return the largest power of two that is no more than a number of heads."""
    return 1 << (heads.bit_length() - 1)


_faulty(_slopes_read_as, "alibi_slopes_of_one_sequence",
    "2^(-8 (h + 1) / n) for any number of heads: mlx#343, fixed by mlx#3071",
    lambda slopes: slopes if len(slopes) == _below(len(slopes))
        else np.asarray(2.0 ** (-8 * np.arange(1, len(slopes) + 1) / len(slopes))))  # fmt: skip


_faulty(_slopes_read_as, "alibi_slopes_without_leaving_any_out",
    "the first slopes of 2n heads, not every other one, where n heads are too few",
    lambda slopes: np.array([*alibi_slopes(below := _below(len(slopes))), *alibi_slopes(2 * below)[:
        len(slopes) - below]]))  # fmt: skip


def _distances_read_as(change: Callable[[Array], Array]) -> Steps:
    """Look a bias up at other distances j - p, where it is told by the distance alone: ``change(distance)``."""

    def read(bias: Array, scores: Array) -> Array:
        found = _by_distance(bias)
        if found is None:
            return bias
        numbers, zero = found
        queries, keys = bias.shape[-2:]
        offset = queries - 1 - zero
        distance = np.arange(keys) - (offset + np.arange(queries))[:, np.newaxis]
        return np.asarray(numbers[..., np.clip(change(distance) + offset + queries - 1, 0, numbers.shape[-1] - 1)])

    return forms.bias_read_as(read)


def _by_distance(bias: Array) -> tuple[Array, int] | None:
    """Return the numbers of a bias from the least distance on, (..., Lq + T - 1), where nothing else tells them."""
    if bias.ndim != 4 or min(bias.shape[-2:]) < 2 or bias.shape[-1] < bias.shape[-2]:
        return None
    queries, keys = bias.shape[-2:]
    numbers = np.concatenate([bias[..., ::-1, 0], bias[..., 0, 1:]], axis=-1)
    place = np.arange(keys) + queries - 1 - np.arange(queries)[:, np.newaxis]
    if not np.array_equal(numbers[..., place], bias) or (numbers == numbers[..., :1]).all():
        return None
    return numbers, queries - 1 - (keys - queries)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# of eight heads, this is twice the bias
_faulty(_slopes_read_as, "alibi_slopes_begin_with_one", "2^(-8 h / n), the exponent off by one: aprender#2143",
    lambda slopes: np.asarray(slopes * 2.0 ** (8 / _below(len(slopes)))), diagnosis=("bias-twice", "bias-fitted"))
_faulty(_slopes_read_as, "alibi_slopes_sorted",
    "slopes in order for every number of heads: CROMA#12, TensorRT-LLM#1611",
    lambda slopes: np.sort(slopes)[::-1])
_faulty(_alibi_read_as, "alibi_of_the_keys_alone",
    "the slope times the key's position: right but with sinks, as rows are shifted",
    lambda slopes, query, key: np.asarray(slopes * (key + 0 * query)))
_faulty(_alibi_read_as, "alibi_without_magnitude",
    "a signed distance, which rewards later keys where nothing forbids them",
    lambda slopes, query, key: np.asarray(slopes * (key - query)))
_faulty(_alibi_read_as, "alibi_from_the_first_new_key",
    "distances that do not count the past: flash-attention#907's kind",
    lambda slopes, query, key: np.asarray(-slopes * np.abs(query - query[0] - key)))
_faulty(_distances_read_as, "relative_distance_of_the_other_sign",
    "the distance p - j for j - p: later keys have the buckets of earlier ones",
    lambda distance: -distance)
_faulty(_distances_read_as, "relative_buckets_of_both_sides",
    "the buckets of an encoder in a decoder: text-to-text-transfer-transformer#415",
    lambda distance: np.asarray(np.where(distance < 0, -relative_buckets(np.minimum(distance, 0), 32, 128,
        bidirectional=True), distance)))
_faulty(_distances_read_as, "relative_buckets_of_one_side",
    "the buckets of a decoder in an encoder: every later key as the own one",
    lambda distance: np.minimum(distance, 0))
_faulty(_distances_read_as, "relative_buckets_without_a_logarithm",
    "buckets that end with those of a distance each: no logarithm",
    lambda distance: np.clip(distance, -8, 8))
_faulty(_distances_read_as, "relative_buckets_one_distance_late",
    "the step to the next bucket one distance late: > for >=",
    lambda distance: np.asarray(distance - np.sign(distance) * (np.abs(distance) >= 8)))
# fmt: on
