"""What a case's options mean, in two forms.

``call_form`` is what an implementation is asked: the call as its signature says it, with what no signature has (a mask
of queries, a position that no argument tells) folded into the mask. ``canonical_form`` is what is true: one mask says
who may attend to whom, the past is part of the keys, a rotary embedding has a row for each query and key, and nothing
else is left. Behind projections the past stays apart, as what is cached of earlier ones. Parts that are merged are
scores, one for each part, and values of each query's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.dtypes import rounded_once
from attncheck.spec import CONVENTIONS, HEADS, OPERATIONS, OPTIONS, InputSpec

Array = NDArray[Any]
Rows = NDArray[np.intp]
Inputs = Mapping[str, Array]
Options = Mapping[str, Any]

_READING_ONLY = frozenset(name for name, spec in OPTIONS.items() if spec.for_reading and name != "score")
_SPECS: Mapping[str, InputSpec] = {
    name: spec
    for own in OPERATIONS.values()
    if not (own.has_projections or own.is_lowered)
    for name, spec in own.inputs.items()
}
_MASKS = frozenset(name for name, spec in _SPECS.items() if spec.folds_into == "mask")
_ROTARY = frozenset({"rotary_cos", "rotary_sin"})
_PASTS = tuple((name, str(spec.folds_into)) for name, spec in _SPECS.items() if spec.folds_into in ("key", "value"))
"""Inputs that come before another one, and the name of that."""


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """An operation's options and inputs."""

    options: dict[str, Any]
    inputs: dict[str, Array]


def call_form(operation: str, options: Options, inputs: Inputs) -> AttentionProblem:
    """Return the call that implementations are asked for: is_causal and window count from the positions they know."""
    if OPERATIONS[operation].is_lowered:  # its signature says all that a case can
        kept = {name: value for name, value in options.items() if name not in _READING_ONLY and value is not False}
        return AttentionProblem(kept, dict(inputs))
    if OPERATIONS[operation].has_parts:
        return AttentionProblem(_without_base_e(options), dict(inputs))
    own, past = query_offset(options, inputs), _past_length(inputs)
    is_told = "query_offsets" in inputs  # so that the function knows where queries stand
    folded = {
        name
        for name, differs in (("is_causal", own != 0 or past != 0), ("window", own != past))
        if differs and not is_told
    } | {"query_mask"}
    return _folded(operation, options, inputs, folded)  # a convention, empty_rows, is part of the call


def canonical_form(operation: str, options: Options, inputs: Inputs, rows: Rows | None = None) -> AttentionProblem:
    """Return the same computation with one mask and one set of keys and values.

    Where ``rows`` are given, with these query rows alone: nothing of the shape (Lq, Lk) is made. Causality is then part
    of the mask, for a row that has moved up would otherwise be taken for an earlier one.
    """
    if OPERATIONS[operation].has_parts:
        is_canonical = "log_sum_exps" not in inputs
        meant = {name: value for name, value in _without_base_e(options).items() if name not in CONVENTIONS}
        return AttentionProblem(meant, dict(inputs) if is_canonical else _as_scores(inputs, rows))
    folded = {"window", *_MASKS}
    if rows is not None or query_offset(options, inputs) or not folded.isdisjoint({*options, *inputs}):
        folded.add("is_causal")
    posed = _folded(operation, options, inputs, folded, rows)
    for name in CONVENTIONS:  # what a row without a key gives is not computed from anything
        posed.options.pop(name, None)
    for past, name in _PASTS:
        if past in posed.inputs and OPERATIONS[operation].has_projections:
            posed.inputs[f"cached_{name}"] = posed.inputs.pop(past)  # the new ones are not projected yet
        elif past in posed.inputs:
            posed.inputs[name] = np.concatenate([posed.inputs.pop(past), posed.inputs[name]], axis=-2)
    tables = rows_of_tables(inputs, rows)
    kept = {name: array for name, array in posed.inputs.items() if name not in _ROTARY}
    return AttentionProblem(posed.options, kept | tables)


def _without_base_e(options: Options) -> dict[str, Any]:
    """Leave out the base that log_sum_exps have anyway: a function without that keyword can do it."""
    return {name: value for name, value in options.items() if (name, value) != ("lse_base", "e")}


def _as_scores(inputs: Inputs, rows: Rows | None) -> dict[str, Array]:
    """Return parts as keys: log_sum_exps as scores, outputs as values, of which those of an empty part are 0.

    What an empty part holds counts for nothing, whatever it is: NaN, too.
    """
    kept = {name: array if rows is None else _rows_of(name, array, rows) for name, array in inputs.items()}
    log_sum_exps, outputs = kept["log_sum_exps"], kept["outputs"]
    empty = (log_sum_exps == -np.inf)[..., np.newaxis]
    values = np.where(empty, np.zeros((), outputs.dtype), outputs)
    lowered = {"scores": np.moveaxis(log_sum_exps, 0, -1), "row_values": np.moveaxis(values, 0, -2)}
    return {name: np.ascontiguousarray(each) for name, each in lowered.items()}


def rows_of_tables(inputs: Inputs, rows: Rows | None = None, of_past: tuple[float, float] = (1, 0)) -> dict[str, Array]:
    """Return the rows of the rotary tables for each query and each key, which count the past.

    A past comes rotated: its keys have ``of_past``, the cosine and sine of no rotation. Empty without tables.
    """
    if inputs.keys().isdisjoint(_ROTARY):
        return {}
    (queries, keys), past = _lengths(inputs), _past_length(inputs)
    positions = query_positions({}, inputs, np.arange(queries) if rows is None else rows)[..., 0]
    found: dict[str, Array] = {}
    for name, table, alone in zip(("cos", "sin"), (inputs["rotary_cos"], inputs["rotary_sin"]), of_past, strict=True):
        found[f"query_{name}"] = table[positions]
        before = np.full((past, table.shape[-1]), alone, table.dtype)
        found[f"key_{name}"] = np.concatenate([before, table[past:keys]])
    return found


def query_offset(options: Options, inputs: Inputs) -> int:
    """Return the position of the first query among all keys, which causality and windows count from."""
    match options.get("alignment"):
        case "top_left":
            return 0
        case "bottom_right":
            queries, keys = _lengths(inputs)
            return keys - queries
    return _past_length(inputs)


def query_positions(options: Options, inputs: Inputs, rows: Rows) -> Array:
    """Return where query rows stand among all keys: (Lq, 1), or (B, 1, Lq, 1) where each batch entry has an offset."""
    offsets = inputs.get("query_offsets")
    if offsets is None:
        return np.asarray(rows[:, np.newaxis] + query_offset(options, inputs))
    return np.asarray(rows[:, np.newaxis] + offsets.astype(np.intp).reshape(-1, 1, 1, 1))


def _folded(
    operation: str, options: Options, inputs: Inputs, names: set[str], rows: Rows | None = None
) -> AttentionProblem:
    """Turn these options and inputs into one mask, together with the mask that is given; with ``rows``, of these."""
    # What is not causal is not asked for causality: a function without that keyword can do it.
    kept_options = {name: value for name, value in options.items() if name not in _READING_ONLY and value is not False}
    if not OPERATIONS[operation].has_projections:
        kept_options = {name: value for name, value in kept_options.items() if name not in HEADS}
    if kept_options.get("mask_fill") is not None:
        kept_options |= _rounded_fill(float(kept_options.pop("mask_fill")), inputs)
    kept_inputs = {name: array if rows is None else _rows_of(name, array, rows) for name, array in inputs.items()}
    allowed: list[Array] = []
    if names:
        queries = np.arange(_lengths(inputs)[0]) if rows is None else rows
        positions, keys = query_positions(options, inputs, queries), np.arange(_lengths(inputs)[1])
    if "is_causal" in names and kept_options.pop("is_causal", False):
        allowed.append(keys <= positions)
    if "window" in names and (window := kept_options.pop("window", None)) is not None:
        allowed += within_window(window, positions, keys)
    if "query_offsets" in names:
        kept_inputs.pop("query_offsets", None)
    if "key_lengths" in names and (lengths := kept_inputs.pop("key_lengths", None)) is not None:
        allowed.append(keys < lengths.reshape(-1, 1, 1, 1))
    if "query_mask" in names and (is_query := kept_inputs.pop("query_mask", None)) is not None:
        allowed.append(is_query[:, np.newaxis, :, np.newaxis])
    if allowed:
        kept_inputs["mask"] = _all_of([*allowed, *([kept_inputs["mask"]] if "mask" in inputs else [])])
    return AttentionProblem(kept_options, kept_inputs)


def _rounded_fill(fill: float, inputs: Inputs) -> dict[str, float]:
    """Round a fill to the dtype of what it stands among; beyond the dtype's range it is -inf, as without one."""
    dtype = inputs["query" if "query" in inputs else "scores"].dtype.name
    with np.errstate(over="ignore"):
        rounded = float(rounded_once(np.array(fill), dtype))
    return {} if rounded == -np.inf else {"mask_fill": rounded}


def _rows_of(name: str, array: Array, rows: Rows) -> Array:
    """Keep these query rows of an input that has any; one row of a mask or bias stands for all."""
    spec = _SPECS.get(name)
    if spec is None or "Lq" not in spec.axes:
        return array
    axis = spec.axes.index("Lq") - len(spec.axes)
    one_for_all = spec.broadcast and (array.ndim < -axis or array.shape[axis] == 1)
    return array if one_for_all else array.take(rows, axis)


def within_window(window: tuple[int | None, int | None], positions: Array, keys: Array) -> list[Array]:
    """Return what a window asks of keys, for queries at these positions."""
    left, right = window
    before = [] if left is None else [keys >= positions - left]
    return before if right is None else [*before, keys <= positions + right]


def _all_of(masks: Iterable[Array]) -> Array:
    together: Array = reduce(np.logical_and, masks)
    return together.reshape((1,) * (4 - together.ndim) + together.shape)


def _past_length(inputs: Inputs) -> int:
    past = inputs.get("past_key", inputs.get("cached_key"))
    return 0 if past is None else int(past.shape[-2])


def _lengths(inputs: Inputs) -> tuple[int, int]:
    """Return how many queries and how many keys there are, the past among them."""
    if "query" not in inputs:
        queries, keys = inputs["scores"].shape[-2:]
        return int(queries), int(keys)
    return int(inputs["query"].shape[-2]), int(inputs["key"].shape[-2]) + _past_length(inputs)
