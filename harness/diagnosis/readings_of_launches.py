"""Readings of kernels with a wrong launch: tiles, parts, columns, rows, heads or entries are confused or not written.

Elements that are never written are 0, as fresh memory usually is. If a part of the keys is merged but never written,
its output and log-sum-exp are 0, so it counts as one key of score 0 and value 0. Numbers that a case does not contain,
such as the size of a tile, are the common ones of kernels, as far as they make a difference in the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attncheck.attention.problem import Computation
from attncheck.attention.walk import approximate_stages
from attncheck.diagnosis.readings_of_entries import has_heads
from attncheck.judging.alternatives import (
    Change,
    ProblemChange,
    Reading,
    ReadingForm,
    canonical_with_empty_rows,
    change_input,
    when_applicable,
    with_combined_mask,
)
from attncheck.judging.undefined import MAX_FLAGS_AT_A_TIME, scores_shape
from attncheck.reading.lowering import count_queries_and_keys, query_offset, query_positions
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.spec import LOGITS, MEANS, OPERATIONS

_BATCH_AXIS = -4
"""The axis of batch entries."""
_TILE_SIZES = (4, 8, 16, 32, 64, 128)
"""Tile sizes of kernels: each gives a form of the readings about tiles, and costs one distance per case."""
_EXP_UNDERFLOW = {"float64": -745.2, "float32": -104.0}
"""Below this an exponential is 0: it is less than half of the smallest denormal number."""
_FINITE_MINUS_INFINITIES = (-5e4, -1e4)
"""Numbers below which a kernel may take a score for minus infinity."""


def _has_output_heads(problem: Problem) -> bool:
    """Return whether the output has heads, and the values are an input that is not quantised."""
    is_plain = has_heads(problem) and "value" in problem.inputs and "value_shift" not in problem.inputs
    return is_plain and not OPERATIONS[problem.operation].computes_gradients


def _change_values(problem: Problem, change: Callable[[Any], Any]) -> Problem:
    names = [name for name in ("value", "past_value") if name in problem.inputs]
    return problem.with_inputs(**{name: change(problem.inputs[name]) for name in names})


def _set_zeros_at(array: Any, place: tuple[Any, ...]) -> Any:
    changed = array.copy()
    changed[place] = 0
    return changed


# Who may attend to whom.


def _change_causal_rows(row: Callable[[Any, Problem], Any], applies: Callable[[Problem], object]) -> Change:
    """Return a change of the row of a query in causality, to ``row(row, problem)``; None unless ``is_told``."""

    def change(problem: Problem) -> Problem | None:
        if not applies(problem):
            return None
        queries, keys = count_queries_and_keys(problem.inputs)
        rows = row(np.asarray(query_positions(problem.options, problem.inputs, np.arange(queries))), problem)
        return with_combined_mask(problem.with_options(is_causal=False), np.arange(keys) <= rows)

    return change


def _group_size(problem: Problem) -> int:
    return int(problem.inputs["query"].shape[-3] // problem.inputs["key"].shape[-3]) if has_heads(problem) else 1


_CAUSALITY_READINGS = (
    Reading("causal-rows-over-group", "causality divides the row of a query by the number of heads that share keys",
            _change_causal_rows(
                lambda row, problem: row // _group_size(problem), lambda problem: _group_size(problem) > 1
            ), "is_causal"),
    *(
        Reading(f"causal-by-tiles-of-{tile}", f"causality is that of the last one of {tile} queries",
                _change_causal_rows(
                    lambda row, problem, tile=tile: row // tile * tile + tile - 1,  # type: ignore[misc]
                    lambda problem, tile=tile: count_queries_and_keys(problem.inputs)[1] > tile,  # type: ignore[misc]
                ),
                "is_causal")
        for tile in _TILE_SIZES[:-1]
    ),
)  # fmt: skip


# Parts of keys.


def _merge_hidden_parts(size: int) -> ProblemChange:
    """Count each part of ``size`` keys that a query may not attend to as one key of score 0 and value 0."""

    def change(problem: Problem) -> Problem | None:
        is_small = count_scores(problem.operation, problem.options, problem.inputs) <= MAX_FLAGS_AT_A_TIME
        if not _has_output_heads(problem) or not is_small or "key_factor" in problem.inputs:
            return None
        plain = canonical_with_empty_rows(problem)
        shape = scores_shape(plain)
        allowed = Computation.from_problem_without_added_key(plain).flag_unmasked_scores(shape)
        if allowed is None or shape[-1] <= size:
            return None
        allowed = np.broadcast_to(allowed, shape)
        hidden = ~np.logical_or.reduceat(allowed, np.arange(0, shape[-1], size), axis=-1)
        return _append_empty_keys(plain, allowed, hidden) if hidden.any() else None

    return change


def _append_empty_keys(plain: Problem, allowed: Any, counted: Any) -> Problem:
    """Return a folded problem with further keys of score 0 and value 0, which ``counted`` queries attend to."""
    more, keys = counted.shape[-1], allowed.shape[-1]
    others = {"mask": np.concatenate([allowed, counted], axis=-1)}
    for name in ("key", "value"):
        array = plain.inputs[name]
        others[name] = np.concatenate([array, np.zeros((*array.shape[:-2], more, array.shape[-1]), array.dtype)], -2)
    for name, alone in (("key_cos", 1), ("key_sin", 0)):
        if name in plain.inputs:
            table = plain.inputs[name]
            others[name] = np.concatenate([table, np.full((more, table.shape[-1]), alone, table.dtype)], -2)
    if "bias" in plain.inputs:
        bias = plain.inputs["bias"]
        bias = np.broadcast_to(bias, (*bias.shape[:-1], keys))
        others["bias"] = np.concatenate([bias, np.zeros((*bias.shape[:-1], more), bias.dtype)], axis=-1)
    return plain.with_options(is_causal=False).with_inputs(**others)


_PART_READINGS = tuple(
    Reading(f"hidden-parts-of-{size}-merged",
            f"parts of {size} keys of which a query may attend to none are merged, with a log-sum-exp of 0",
            _merge_hidden_parts(size), first_stage="weights")
    for size in (16, 32, 64, 128, 256)
)  # fmt: skip


# What is never written, or read.


def _zero_last_columns(problem: Problem) -> Iterator[ReadingForm]:
    width = problem.inputs["value"].shape[-1]
    for first in sorted({width // 2, *_TILE_SIZES[2:]}):
        if 1 < first < width - 1:
            place = np.s_[..., first:]
            changed = _change_values(problem, lambda value, place=place: _set_zeros_at(value, place))  # type: ignore[misc]
            yield ReadingForm(changed, {"first": str(first)})


def _overwrite_first_columns(problem: Problem) -> Iterator[ReadingForm]:
    width = problem.inputs["value"].shape[-1]
    for tile in (size for size in _TILE_SIZES[2:] if size < width):

        def moved(value: Any, tile: int = tile) -> Any:
            last = value[..., (width - 1) // tile * tile :]
            changed = _set_zeros_at(value, np.s_[..., tile:])
            changed[..., : last.shape[-1]] = last
            return changed

        yield ReadingForm(_change_values(problem, moved), {"tile": str(tile)})


def _mask_last_rows(problem: Problem) -> Iterator[ReadingForm]:
    queries, _ = count_queries_and_keys(problem.inputs)
    for first in sorted({1, *_TILE_SIZES[2:], *(queries // tile * tile for tile in _TILE_SIZES[2:])}):
        if 0 < first < queries:
            yield ReadingForm(
                with_combined_mask(problem, np.arange(queries)[:, np.newaxis] < first), {"first": str(first)}
            )


def _zero_last_features(problem: Problem) -> Iterator[ReadingForm]:
    width = problem.inputs["query"].shape[-1]
    for first in sorted({width // 2, *_TILE_SIZES[3:]}):
        if 1 < first < width - 1:
            yield ReadingForm(problem.with_inputs(query=_set_zeros_at(problem.inputs["query"], np.s_[..., first:])),
                       {"first": str(first)})  # fmt: skip


def _zero_after_first_slice(axis: int) -> ProblemChange:
    place = (slice(1, None), *[slice(None)] * (-axis - 1))

    def change(problem: Problem) -> Problem | None:
        if problem.inputs["value"].shape[axis] < 2:
            return None
        if axis == _BATCH_AXIS:
            plain = problem.canonical()
            kept = Computation.from_problem_without_added_key(plain).flag_unmasked_scores(scores_shape(plain))
            if kept is not None and not kept[1:].any():  # other readings name the result of rows without a key
                return None
        return _change_values(problem, lambda value: _set_zeros_at(value, (..., *place)))

    return change


def _replace_zero_key_lengths(problem: Problem) -> Problem | None:
    lengths, (_, keys) = problem.inputs["key_lengths"], count_queries_and_keys(problem.inputs)
    return problem.with_inputs(key_lengths=np.where(lengths == 0, keys, lengths)) if (lengths == 0).any() else None


_UNWRITTEN_READINGS = (
    Reading("columns-unwritten", "columns from {first} on are not written: they are 0",
            when_applicable(_has_output_heads, _zero_last_columns), first_stage=MEANS[0]),
    Reading("columns-over-the-first", "each tile of {tile} columns is written over the first one, and the others are 0",
            when_applicable(_has_output_heads, _overwrite_first_columns), first_stage=MEANS[0]),
    Reading("rows-unwritten", "query rows from {first} on are not written: they are 0",
            when_applicable(_has_output_heads, _mask_last_rows)),
    *(
        Reading(f"{slug}-unwritten", f"{says} after the first are not written: they are 0",
                when_applicable(_has_output_heads, _zero_after_first_slice(axis)), first_stage=MEANS[0])
        for slug, says, axis in (
            ("batch-entries", "batch entries", _BATCH_AXIS), ("heads", "heads of keys and values", -3)
        )
    ),
    Reading("features-unread", "of queries and keys only the first {first} elements are read", when_applicable(
        lambda problem: has_heads(problem) and problem.inputs.keys().isdisjoint({"rotary_cos", "query_norm"}),
        _zero_last_features), first_stage=LOGITS[0]),
    Reading("key-lengths-of-longest", "the largest key length is taken for all",
            change_input("key_lengths", lambda lengths: np.full_like(lengths, lengths.max(initial=0))), "key_lengths"),
    Reading("key-lengths-of-zero-for-all", "a key length of 0 is taken for all keys", _replace_zero_key_lengths,
            "key_lengths"),
)  # fmt: skip


# Rows of low scores.


def _mask_low_rows(problem: Problem) -> Iterator[ReadingForm]:
    """Treat rows whose scores are all low like rows without a key."""
    if (
        not _has_output_heads(problem)
        or count_scores(problem.operation, problem.options, problem.inputs) > MAX_FLAGS_AT_A_TIME
    ):
        return
    dtype = problem.inputs["query"].dtype
    stages = approximate_stages(problem.canonical())
    logits = next((stages[name] for name in LOGITS[::-1] if name in stages), None)
    if logits is None or not logits.size:
        return
    highest = logits.max(axis=-1, keepdims=True)
    is_empty = np.isneginf(highest)
    for bottom in (_EXP_UNDERFLOW.get(dtype.name, _EXP_UNDERFLOW["float32"]), *_FINITE_MINUS_INFINITIES):
        if ((highest < bottom) & ~is_empty).any():
            yield ReadingForm(
                with_combined_mask(problem, np.broadcast_to(highest >= bottom, logits.shape)), {"low": f"{bottom:g}"}
            )


_LOW_ROW_READING = Reading(
    "low-rows-empty", "a row whose scores are all below {low} gives zeros, as one without a key", _mask_low_rows
)


# Rotations of one position.


def _rotate_single_query(tables: Callable[[Problem, Problem, str], Any]) -> Change:
    """Rotate the heads of a single query by other tables, of shape (B, H, 1, R)."""

    def change(problem: Problem) -> ReadingForm | None:
        query = problem.inputs["query"]
        if query.shape[-2] != 1 or query.ndim != 4 or query.shape[0] * query.shape[1] < 2 or not has_heads(problem):
            return None
        if problem.options.get("norm_after_rotation"):
            return None
        plain = canonical_with_empty_rows(problem)
        others = {f"query_{part}": tables(problem, plain, part) for part in ("cos", "sin")}
        return ReadingForm(plain.with_inputs(**others), first_stage="rotated_query")

    return change


def _rotation_tables_only_at(rotated: tuple[Any, ...]) -> Callable[[Problem, Problem, str], Any]:
    def tables(problem: Problem, plain: Problem, part: str) -> Any:
        table = plain.inputs[f"query_{part}"]
        table = np.broadcast_to(table, (*plain.inputs["query"].shape[:3], table.shape[-1])).copy()
        alone = np.full_like(table, part == "cos")
        alone[rotated] = table[rotated]
        return alone

    return tables


def _rotation_tables_by_head(problem: Problem, plain: Problem, part: str) -> Any:
    """Return the row of the table h positions later for head h, at most the last row."""
    positions = np.asarray(problem.inputs.get("query_offsets", query_offset({}, problem.inputs))).reshape(-1, 1)
    batch, heads = plain.inputs["query"].shape[:2]
    table = problem.inputs[f"rotary_{part}"]
    rows = np.minimum(np.broadcast_to(positions, (batch, 1)) + np.arange(heads), len(table) - 1)
    return table[rows][:, :, np.newaxis]


def _zero_further_queries(problem: Problem) -> ReadingForm | None:
    query = problem.inputs["query"]
    if query.shape[-2] != 1 or query.ndim != 4 or len(query) < 2 or not has_heads(problem):
        return None
    return ReadingForm(problem.with_inputs(query=_set_zeros_at(query, (slice(1, None),))), first_stage="rotated_query")


_ROTATION_READINGS = (
    Reading("rotary-of-first-head-alone", "of a single query, only the first head of the first batch entry is rotated",
            _rotate_single_query(_rotation_tables_only_at((0, 0))), "rotary_cos"),
    Reading("rotary-of-first-batch-entry-alone", "of a single query, only the first batch entry is rotated",
            when_applicable(lambda problem: len(problem.inputs["query"]) > 1,
                            _rotate_single_query(_rotation_tables_only_at((0,)))), "rotary_cos"),
    Reading("rotary-writes-first-batch-entry",
            "of a single query, the rotation writes only the first batch entry: the others are 0",
            _zero_further_queries, "rotary_cos"),
    Reading("rotary-heads-as-positions", "of a single query, head h is rotated as if it stood h positions later",
            _rotate_single_query(_rotation_tables_by_head), "rotary_cos"),
)  # fmt: skip

LAUNCH_READINGS = (*_CAUSALITY_READINGS, *_PART_READINGS, *_UNWRITTEN_READINGS, _LOW_ROW_READING, *_ROTATION_READINGS)
