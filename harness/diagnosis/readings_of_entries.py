"""Readings that use the data of another entry, another position, or another pattern of the same kind.

An entry is a batch entry, a head, a query or a key. A wrong kernel may use the data of the first entry for all entries
(a stride of zero), those of the next entry (an index that is off by one), or all entries in reverse order. Further
readings join the cache with the new keys in another way, and assign query heads to other heads of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from attncheck.diagnosis.replaced_steps import change_joined_past
from attncheck.judging.alternatives import (
    Change,
    ProblemChange,
    Reading,
    ReadingForm,
    change_input,
    change_inputs,
    reordering_readings,
    swap_inputs,
    when_applicable,
    with_all_allowed_mask,
    with_combined_mask,
)
from attncheck.reading import lowering
from attncheck.reading.lowering import Array, count_queries_and_keys, query_offset
from attncheck.reading.problem import Problem
from attncheck.spec import (
    CODE_INPUTS,
    LOGITS,
    MEANS,
    OPERATIONS,
    OPERATIONS_BY_SCORE,
    OPERATIONS_PER_HEAD,
    PER_HEAD_INPUTS,
)


def has_heads(problem: Problem) -> bool:
    """Return whether the inputs ``key`` and ``value`` have heads; latent vectors do not."""
    return problem.operation in (*OPERATIONS_PER_HEAD, *OPERATIONS_BY_SCORE) and "key_projection" not in problem.inputs


_BATCH_AXIS, _HEAD_AXIS = {"batch entry": -4}, {"head": -3}
_OTHER_ENTRY_READINGS = (
    *reordering_readings("mask", "the mask", ["mask"], _BATCH_AXIS | _HEAD_AXIS, "masked"),
    *reordering_readings("mask", "the mask", ["mask"], {"query": -2}, "masked", "of-first"),
    *reordering_readings("bias", "the bias", ["bias"], _BATCH_AXIS | _HEAD_AXIS, "biased"),
    *reordering_readings("bias", "the bias", ["bias"], {"query": -2}, "biased", "of-first"),
    *reordering_readings("bias", "the bias", ["bias"], _HEAD_AXIS, "biased", "in-reverse-of"),
    *reordering_readings("key-lengths", "the key length", ["key_lengths"], {"batch entry": -1}, "masked"),
    *(
        reading
        for name, spec in PER_HEAD_INPUTS.items()
        for reading in reordering_readings(
            name.replace("_", "-"), str(spec.name_per_head), [name], {"head": -1}, spec.first_stage)
    ),
    *reordering_readings("key", "the key", ["key", "past_key"], _BATCH_AXIS, LOGITS[0], when=has_heads),
    *reordering_readings("value", "the value", ["value", "past_value"], _BATCH_AXIS, MEANS[0], when=has_heads),
    *reordering_readings("key", "the key", ["key", "past_key"], _HEAD_AXIS, LOGITS[0], "of-first", "in-reverse-of",
                 when=has_heads),
    *reordering_readings("value", "the value", ["value", "past_value"], _HEAD_AXIS, MEANS[0],
              "of-first", "in-reverse-of", when=has_heads),
    *reordering_readings("gate", "the gate", ["gate"], _BATCH_AXIS | _HEAD_AXIS, MEANS[-1]),
    *reordering_readings("past", "what is cached", ["past_key", "past_value"], _BATCH_AXIS | _HEAD_AXIS, LOGITS[0]),
    *reordering_readings("score-bias", "the bias of the score", ["score_bias"], {"head": -1}, "scores", "of-first"),
    *reordering_readings("log-sum-exps", "the log-sum-exp", ["log_sum_exps"], {"batch entry": -3, "head": -2},
              "weights"),
)  # fmt: skip


# Heads that groups of query heads share.


def use_other_heads(names: Sequence[str], head_of: Callable[[Any, int, int], Any]) -> ProblemChange:
    """Use other heads of keys and values for query heads: ``head_of(query head, heads, size of a group)``."""

    def change(problem: Problem) -> Problem | None:
        if not has_heads(problem) or "value" not in problem.inputs:
            return None
        heads, shared = problem.inputs["query"].shape[-3], problem.inputs["key"].shape[-3]
        if shared in (1, heads):
            return None
        every, group = np.arange(heads), heads // shared
        changed = {}
        for name in ("key", "value", "past_key", "past_value", *CODE_INPUTS):
            if name in problem.inputs:
                is_wrong = name.removeprefix("past_").partition("_")[0] in names
                changed[name] = problem.inputs[name].take(
                    head_of(every, shared, group) if is_wrong else every // group, -3
                )
        if "key_norm" in problem.inputs:
            changed["key_norm"] = problem.inputs["key_norm"].take(every // group, -2)
        options = {"kv_heads": heads} if "kv_heads" in problem.options else {}
        return problem.with_inputs(**changed).with_options(**options)

    return change


_KEY_AND_VALUE = ("key", "value")
_GROUP_READINGS = (
    *(
        Reading(f"{name}-heads-tiled", f"query head h takes {name} head h % Hkv (tiled), though not that of the other",
                use_other_heads([name], lambda head, shared, group: head % shared), first_stage=stage)
        for name, stage in (("key", LOGITS[0]), ("value", MEANS[0]))
    ),
    *(
        Reading(f"groups-{slug}", says, use_other_heads(_KEY_AND_VALUE, head_of), first_stage=LOGITS[0])
        for slug, says, head_of in (
            ("as-large-as-their-number", "query head h takes key and value head h // Hkv",
             lambda head, shared, group: head // shared % shared),
            ("in-reverse", "groups take the heads of keys and values from the last to the first",
             lambda head, shared, group: shared - 1 - head // group),
            ("of-first-head", "all query heads take the first head of keys and values",
             lambda head, shared, group: head * 0),
            ("one-head-late", "the last query head of each group takes the next one's head of keys and values",
             lambda head, shared, group: (head + 1) // group % shared),
            ("of-two-heads", "query head h takes key and value head h // 2, whatever the size of a group",
             lambda head, shared, group: np.minimum(head // 2, shared - 1)),
        )
    ),
)  # fmt: skip


def _take_other_heads(name: str, axis: int, head_of: Callable[[Any, int, int], Any]) -> ProblemChange:
    """Use the data of another head: ``head_of(query head, heads of keys, size of a group)``.

    None if that is the first head for all: another reading covers it.
    """

    def change(problem: Problem) -> Problem | None:
        array = problem.inputs[name]
        if not has_heads(problem) or array.ndim < -axis or array.shape[axis] != problem.inputs["query"].shape[-3]:
            return None
        heads, shared = array.shape[axis], problem.inputs["key"].shape[-3]
        order = head_of(np.arange(heads), shared, heads // shared)
        return problem.with_inputs(**{name: array.take(order, axis)}) if order.any() else None

    return change


_PER_HEAD_READINGS = tuple(
    Reading(f"{of.replace('_', '-')}-{slug}", f"the {of.replace('_', ' ')} {says}",
            _take_other_heads(of, axis, head_of), of, stage)
    for of, axis, stage in (("bias", -3, "biased"),
                            *((name, -1, spec.first_stage) for name, spec in PER_HEAD_INPUTS.items()))
    for slug, says, head_of in (
        ("of-first-head-of-group", "of the first head of a group is taken for all of it",
         lambda head, shared, group: head // group * group),
        ("by-key-heads", "of query head h is that of its group, h // (H / Hkv)",
         lambda head, shared, group: head // group),
        ("of-first-half-of-heads", "of the first half of the heads is taken for the other",
         lambda head, shared, group: head % max(len(head) // 2, 1)),
    )
)  # fmt: skip


# What comes from a cache.


def _change_joined_cache(change: Callable[[Any, int], Any], *names: str) -> Change:
    """Change joined past and new keys, values or both, given the length of the past.

    Projected new keys and values are not inputs, so the change replaces a step.
    """
    replacement = change_joined_past(change, names)

    def changed(problem: Problem) -> Problem | ReadingForm | None:
        if OPERATIONS[problem.operation].has_projections:
            return ReadingForm(problem, step_replacement=replacement)
        if not has_heads(problem):
            return None
        return _replace_joined_cache(problem, change, *names)

    return changed


def _replace_joined_cache(problem: Problem, change: Callable[[Any, int], Any], *names: str) -> Problem:
    """Change keys or values joined after their past, if there is one, given its length."""
    changed: dict[str, Any] = {}
    for name in names:
        parts = {part: problem.inputs[part] for part in (f"past_{name}", name) if part in problem.inputs}
        length = sum(array.shape[-2] for array in parts.values()) - problem.inputs[name].shape[-2]
        both = change(np.concatenate([*parts.values()], axis=-2), length)
        changed |= dict(zip(parts, np.split(both, [length], axis=-2)[-len(parts) :], strict=True))
    return problem.with_inputs(**changed)


_PAST_INPUTS = ("past_key", "past_value")


def _zero_new_entries(joined: Any, length: int) -> Any:
    changed = joined.copy()
    changed[..., length:, :] = 0
    return changed


def _overwrite_last_past(joined: Any, length: int) -> Any:
    gap = np.zeros_like(joined[..., :1, :])
    return np.concatenate([joined[..., : length - 1, :], joined[..., length:, :], gap], axis=-2)


def _write_one_slot_late(joined: Any, length: int) -> Any:
    gap = np.zeros_like(joined[..., :1, :])
    return np.concatenate([joined[..., :length, :], gap, joined[..., length:, :]], axis=-2)[..., : joined.shape[-2], :]


def _change_if_past(name: str, change: Callable[[Any, int], Any]) -> ProblemChange:
    """Change a mask or a bias that has an entry for each key, given the length of the past."""

    def changed(problem: Problem) -> Problem | None:
        array, (_, keys) = problem.inputs[name], count_queries_and_keys(problem.inputs)
        past = query_offset({}, problem.inputs)
        return problem.with_inputs(**{name: change(array, past)}) if past and array.shape[-1] == keys > 1 else None

    return changed


def _add_past_to_lengths(problem: Problem) -> Problem | None:
    if "past_key" not in problem.inputs:
        return None
    _, keys = count_queries_and_keys(problem.inputs)
    lengths = problem.inputs["key_lengths"] + query_offset({}, problem.inputs)
    return problem.with_inputs(key_lengths=lengths) if (lengths < keys).any() else None  # else they have no effect


_CACHE_READINGS = (
    *(
        Reading(f"past-{slug}", says, _change_joined_cache(change, *_KEY_AND_VALUE), "past_key", LOGITS[0])
        for slug, says, change in (
            ("behind-new", "the past is joined behind the new keys and values",
             lambda both, past: np.roll(both, -past, axis=-2)),
            ("without-new", "new keys and values are not written: zeros stand there",
             _zero_new_entries),
            ("overwritten", "new keys and values are written one slot early, over the last of the past",
             _overwrite_last_past),
            ("with-a-gap", "new keys and values are written one slot late", _write_one_slot_late),
        )
    ),
    *(
        Reading(f"past-{of}{slug}", f"{called} of the past are {how}", change_inputs(names, change), "past_key", stage)
        for of, called, names, stage in (
            ("", "keys and values", _PAST_INPUTS, LOGITS[0]), ("values-", "values", _PAST_INPUTS[1:], MEANS[0])
        )
        for slug, how, change in (
            ("dropped", "zeros", np.zeros_like), ("in-reverse", "in reverse order", lambda past: past[..., ::-1, :]),
            ("viewed", "viewed with heads for positions, (H, L, D) for (L, H, D)",
             lambda past: past.reshape(np.array(past.shape)[[0, 2, 1, 3]]).swapaxes(1, 2)),
            ("one-position-late", "those of the position before", lambda past: np.roll(past, 1, axis=-2)),
        )
    ),
    Reading("past-swapped", "keys of the past are taken for its values, and the other way round",
            swap_inputs("past_key", "past_value"), "past_key", LOGITS[0]),
    Reading("mask-beside-past", "the mask does not reach the past, which is always attended",
            _change_if_past("mask", lambda mask, past: mask | (np.arange(mask.shape[-1]) < past)), "mask"),
    *(
        Reading(f"{name}-from-first-new-key", f"the {name} counts from the first new key",
                _change_if_past(name, lambda array, past: np.roll(array, past, axis=-1)), name, stage)
        for name, stage in (("mask", "masked"), ("bias", "biased"))
    ),
    Reading("key-lengths-of-new-keys", "key lengths count from the first new key", _add_past_to_lengths, "key_lengths"),
)  # fmt: skip


# Places and patterns.


def _read_previous_position(name: str) -> Change:
    def rolled(both: Any, past: int) -> Any:
        return np.roll(both, 1, axis=-2)

    replacement = change_joined_past(rolled, [name])

    def change(problem: Problem) -> Problem | ReadingForm | None:
        if "past_key" in problem.inputs and OPERATIONS[problem.operation].has_projections:
            return ReadingForm(problem, step_replacement=replacement)
        if not has_heads(problem) or "rotary_cos" in problem.inputs or name not in problem.inputs:
            return None
        return _replace_joined_cache(problem, rolled, name) if count_queries_and_keys(problem.inputs)[1] > 1 else None

    return change


def _has_plain_heads(problem: Problem) -> bool:
    return has_heads(problem) and "query_norm" not in problem.inputs


def _swap_queries_and_keys(problem: Problem) -> Problem | None:
    unsupported = {"past_key", "rotary_cos", "key_factor"}
    is_plain = _has_plain_heads(problem) and problem.inputs.keys().isdisjoint(unsupported)
    return swap_inputs("query", "key")(problem) if is_plain else None


def _zero_last_column(array: Any) -> Any:
    return np.concatenate([array[..., :-1], np.zeros_like(array[..., -1:])], axis=-1) if array.shape[-1] > 1 else array


def _mask_last_key(problem: Problem) -> Problem | None:
    if OPERATIONS[problem.operation].merges_parts or problem.operation in ("scoring", "softmax"):
        return None
    keys = count_queries_and_keys(problem.inputs)[1]
    return with_combined_mask(problem, np.arange(keys)[np.newaxis] < keys - 1) if keys > 1 else None


def _replace_lengths_by_mask(pattern: Callable[[Any, Any, Any], Any]) -> ProblemChange:
    """Replace key lengths by the mask ``pattern(lengths, query, key)``; None if it allows all, like ignored lengths."""

    def change(problem: Problem) -> Problem | None:
        queries, keys = count_queries_and_keys(problem.inputs)
        allowed = pattern(problem.inputs["key_lengths"], np.arange(queries)[:, np.newaxis], np.arange(keys))
        return None if allowed.all() else with_combined_mask(problem.without_input("key_lengths"), allowed)

    return change


def _as_batch_axis(lengths: Any) -> Any:
    return lengths.reshape(-1, 1, 1, 1)


def _apply_lengths_by_head(problem: Problem) -> Problem | None:
    lengths, query = problem.inputs["key_lengths"], problem.inputs.get("query", problem.inputs.get("scores"))
    if query is None or query.ndim < 4 or len(lengths) != query.shape[-3]:
        return None
    allowed = np.arange(count_queries_and_keys(problem.inputs)[1]) < lengths.reshape(1, -1, 1, 1)
    return with_combined_mask(problem.without_input("key_lengths"), allowed)


def _swap_batch_and_head_axes(name: str) -> ProblemChange:
    """Read (B, 1, ..) as (1, H, ..), or the other way round, if there are as many heads as batch entries."""

    def change(problem: Problem) -> Problem | None:
        array, query = problem.inputs[name], problem.inputs.get("query", problem.inputs.get("scores"))
        if query is None or array.ndim != 4 or query.ndim != 4 or query.shape[0] != query.shape[1]:
            return None
        return problem.with_inputs(**{name: array.swapaxes(0, 1)}) if array.shape[0] != array.shape[1] else None

    return change


def _change_mask_pattern(
    of: Sequence[str], pattern: Callable[[Problem, Array, Array], Any], change: Callable[[Problem, Any], Problem]
) -> ProblemChange:
    """Change a problem with the options ``of``, given the mask (Lq, Lk) of another pattern.

    ``pattern`` gets the problem and the positions of queries, (Lq, 1), and of keys, (Lk,). It does not apply if each
    batch entry has a query offset.
    """

    def changed(problem: Problem) -> Problem | None:
        if "query_offsets" in problem.inputs or not all(problem.options.get(name) for name in of):
            return None
        queries, keys = count_queries_and_keys(problem.inputs)
        positions = np.arange(queries)[:, np.newaxis] + query_offset(problem.options, problem.inputs)
        return change(problem, np.broadcast_to(pattern(problem, positions, np.arange(keys)), (queries, keys)))

    return changed


def within_window(problem: Problem, query: Array, key: Array) -> Any:
    """Return the mask of a window for the given positions of queries and keys.

    Example:
        >>> ones = {name: np.ones((1, 1, 3, 4)) for name in ("query", "key", "value")}
        >>> problem = Problem("attention", {"window": (1, 0)}, ones)
        >>> within_window(problem, np.arange(3)[:, np.newaxis], np.arange(3)).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    rules = lowering.make_window_conditions(problem.options["window"], query, key)
    return reduce(np.logical_and, rules, np.ones(np.broadcast_shapes(query.shape, key.shape), np.bool_))


def _change_window(change: Callable[[Any, Any], tuple[Any, Any]]) -> ProblemChange:
    """Replace the sides of a window; there is no window if both sides are unbounded."""

    def changed(problem: Problem) -> Problem | None:
        window = tuple(problem.options["window"])
        changed_window = change(*window)
        if changed_window == window:
            return None
        return with_all_allowed_mask(problem).with_options(
            window=None if changed_window == (None, None) else changed_window
        )

    return changed


def describe_position_rule(problem: Problem) -> tuple[str, str] | None:
    """Return the option that compares positions, in words, and its rule; None without such an option."""
    if problem.options.get("is_causal"):
        return "causality", "key j for query i iff j <= {}"
    return ("the window", "query i stands at key {}") if problem.options.get("window") else None


def move_window_side(side: int | None, steps: int) -> int | None:
    """Return a side of a window moved by ``steps`` keys; None, an unbounded side, stays None.

    Example:
        >>> move_window_side(2, -1), move_window_side(None, -1)
        (1, None)
    """
    return None if side is None else side + steps


def _align_at_key_lengths(problem: Problem) -> Problem | None:
    """Align causality and the window so that the last query is at the last key within its length."""
    if not (problem.options.get("is_causal") or problem.options.get("window")):
        return None
    lengths, (queries, keys) = _as_batch_axis(problem.inputs["key_lengths"]), count_queries_and_keys(problem.inputs)
    positions, key = np.arange(queries)[:, np.newaxis] + lengths - queries, np.arange(keys)
    allowed = (key < lengths) & np.asarray(not problem.options.get("is_causal") or key <= positions)
    if problem.options.get("window"):
        allowed = allowed & within_window(problem, positions, key)
    plain = problem.without_input("key_lengths").without_input("query_offsets")
    return with_combined_mask(plain.with_options(is_causal=False, window=None), allowed)


_POSITION_READINGS = (
    *(
        Reading(f"{name}-one-position-late", f"the {name} of the position before is read",
                _read_previous_position(name), name, stage)
        for name, stage in (("key", LOGITS[0]), ("value", MEANS[0]))
    ),
    Reading("bias-one-key-late", "the bias of the key before is read",
            change_input("bias", lambda bias: np.roll(bias, 1, axis=-1)), "bias", "biased"),
    Reading("query-and-key-exchanged", "queries are taken for keys, and the other way round", _swap_queries_and_keys,
            first_stage=LOGITS[0]),
    *(
        Reading(f"last-{slug}-dropped", f"the last {says} is left out",
                when_applicable(_has_plain_heads, change_inputs([name, f"past_{name}"], _zero_last_column)),
                name, stage)
        for name, slug, says, stage in (
            ("query", "feature", "element of queries and keys", LOGITS[0]),
            ("value", "value-column", "column of the values", MEANS[0]),
        )
    ),
    Reading("last-key-dropped", "no query sees the last key", _mask_last_key),
    Reading("key-lengths-from-the-end", "key lengths count from the last key",
            _replace_lengths_by_mask(lambda lengths, query, key: key >= len(key) - _as_batch_axis(lengths)),
            "key_lengths"),
    Reading("key-lengths-of-queries", "key lengths are taken for those of queries, whose later ones see nothing",
            _replace_lengths_by_mask(lambda lengths, query, key: (query < _as_batch_axis(lengths)) & (key >= 0)),
            "key_lengths"),
    Reading("key-lengths-up-to-four", "key lengths are rounded up to whole tiles of four keys",
            lambda problem: problem.with_inputs(key_lengths=np.minimum(
                -(-problem.inputs["key_lengths"] // 4) * 4, count_queries_and_keys(problem.inputs)[1]
            ).astype(problem.inputs["key_lengths"].dtype)), "key_lengths"),
    Reading("key-lengths-of-queries-too", "key lengths are taken for those of queries, too",
            _replace_lengths_by_mask(
                lambda lengths, query, key: (query < _as_batch_axis(lengths)) & (key < _as_batch_axis(lengths))
            ), "key_lengths"),
    Reading("key-lengths-of-heads", "key lengths are those of heads, not of batch entries", _apply_lengths_by_head,
            "key_lengths"),
    Reading("key-lengths-at-least-one", "a key length of 0 is taken for 1",
            change_input("key_lengths", lambda lengths: np.maximum(lengths, 1)), "key_lengths"),
    Reading("aligned-with-key-lengths", "causality or the window is aligned with the last key that counts",
            _align_at_key_lengths, "key_lengths"),
    *(
        Reading(f"{name}-of-batch-for-heads", f"the {name} of batch entries is read as one of heads",
                _swap_batch_and_head_axes(name), name, stage)
        for name, stage in (("mask", "masked"), ("bias", "biased"))
    ),
    Reading("mask-or-causality", "a key is seen that the mask or causality allows, where both must",
            _change_mask_pattern(["is_causal"], lambda problem, query, key: key <= query,
                                 lambda problem, seen: problem.with_options(is_causal=False).with_inputs(
                                     mask=problem.inputs["mask"] | seen)), "mask"),
    Reading("window-or-causality", "a key is seen that the window or causality allows, where both must",
            _change_mask_pattern(
                ["is_causal"], lambda problem, query, key: (key <= query) | within_window(problem, query, key),
                lambda problem, seen: with_combined_mask(problem.with_options(window=None, is_causal=False), seen)
            ), "window"),
    *(
        Reading(f"window-{slug}", says, _change_window(change), "window")
        for slug, says, change in (
            ("on-both-sides", "a window that is bounded on one side is bounded on both",
             lambda left, right: (right if left is None else left, left if right is None else right)),
            ("left-for-both", "the left side of the window is taken for both", lambda left, right: (left, left)),
            ("right-for-both", "the right side of the window is taken for both", lambda left, right: (right, right)),
            ("open-right-as-zero", "a right side of the window without a bound is taken for 0",
             lambda left, right: (left, 0 if right is None else right)),
            ("open-left-as-zero", "a left side of the window without a bound is taken for 0",
             lambda left, right: (0 if left is None else left, right)),
            ("zero-as-open", "a side of 0 of the window is taken for one without a bound",
             lambda left, right: (left or None, right or None)),
            ("one-key-late", "the window of the next query is taken",
             lambda left, right: (move_window_side(left, -1), move_window_side(right, 1))),
            ("one-key-early", "the window of the query before is taken",
             lambda left, right: (move_window_side(left, 1), move_window_side(right, -1))),
        )
    ),
    *(
        Reading(f"window-{slug}", says, _change_mask_pattern(["window"], pattern,
                lambda problem, seen: with_combined_mask(
            with_all_allowed_mask(problem).with_options(window=None), seen)), "window")
        for slug, says, pattern in (
            ("of-first-query", "the window of the first query is taken for all",
             lambda problem, query, key: within_window(problem, query[:1], key)),
            ("without-own-key", "no query sees its own key in the window",
             lambda problem, query, key: within_window(problem, query, key) & (query != key)),
            ("inverted", "the window forbids what is within",
             lambda problem, query, key: ~within_window(problem, query, key)),
        )
    ),
)  # fmt: skip


# Rows of a mask, each with a first and a last key that it allows.


def _change_mask_rows(change: Callable[[Any, Any, Any, Any], Any]) -> ProblemChange:
    """Change rows of a mask: ``change(mask, key, first, last)``, by the first and last allowed key; not empty rows."""

    def changed(mask: Any) -> Any:
        keys = mask.shape[-1]
        if mask.ndim < 2 or keys < 2:
            return None
        first, last = mask.argmax(-1)[..., np.newaxis], keys - 1 - mask[..., ::-1].argmax(-1)[..., np.newaxis]
        return change(mask, np.arange(keys), first, last) & mask.any(axis=-1, keepdims=True)

    return change_input("mask", changed)


def _last_allowed_run(mask: Any, key: Any, first: Any, last: Any) -> Any:
    gap = np.where(~mask & (key <= last), key, -1).max(axis=-1, keepdims=True, initial=-1)
    return mask & (key > gap)


def _make_mask_causal(problem: Problem) -> Problem | None:
    (queries, keys), mask = count_queries_and_keys(problem.inputs), problem.inputs["mask"]
    has_rows = mask.ndim > 1 and mask.shape[-2] > 1
    return problem.with_inputs(mask=mask & np.tri(queries, keys, keys - queries, dtype=bool)) if has_rows else None


_MASK_ROW_READINGS = (
    *(
        Reading(f"mask-{slug}", says, _change_mask_rows(change), "mask")
        for slug, says, change in (
            ("one-key-early", "each row of the mask begins one key early",
             lambda mask, key, first, last: mask | (key == first - 1)),
            ("without-first-key", "the first key that each row of the mask allows is left out",
             lambda mask, key, first, last: mask & (key != first)),
            ("without-first-key-but-key-0",
             "the first key that a row of the mask allows is left out, unless it is key 0",
             lambda mask, key, first, last: mask & ~((key == first) & (first > 0))),
            ("one-key-more", "each row of the mask ends one key late",
             lambda mask, key, first, last: mask | (key == last + 1)),
            ("without-last-key", "the last key that each row of the mask allows is left out",
             lambda mask, key, first, last: mask & (key != last)),
            ("without-gaps", "each row of the mask is taken for all keys from its first to its last",
             lambda mask, key, first, last: (key >= first) & (key <= last)),
            ("of-last-run", "of each row of the mask only the last run of keys is seen", _last_allowed_run),
        )
    ),
    Reading("mask-and-causal", "the mask is taken for causal: nothing behind the diagonal is seen", _make_mask_causal,
            "mask"),
)  # fmt: skip

ENTRY_READINGS = (
    *_OTHER_ENTRY_READINGS,
    *_GROUP_READINGS,
    *_PER_HEAD_READINGS,
    *_CACHE_READINGS,
    *_POSITION_READINGS,
    *_MASK_ROW_READINGS,
)
