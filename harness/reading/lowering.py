"""What a case's options mean, in two forms.

``delivered`` is what an implementation is asked: the call as its signature says it, with what no signature has (a mask
of queries, a position that no argument tells) folded into the mask. ``essential`` is what is true: who may attend to
whom is one mask, the past is part of the keys, and nothing else is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Inputs = Mapping[str, Array]
Options = Mapping[str, Any]

_READING_ONLY = frozenset({"alignment", "empty_rows"})
_OF_LAYOUT = frozenset({"heads", "kv_heads"})


@dataclass(frozen=True, eq=False)
class Posed:
    """An operation's options and inputs."""

    options: dict[str, Any]
    inputs: dict[str, Array]


def delivered(operation: str, options: Options, inputs: Inputs) -> Posed:
    """Return the call that implementations are asked for: is_causal and window count from the positions they know."""
    own, past = query_offset(options, inputs), _past_length(inputs)
    folded = {
        name
        for name, differs in (("is_causal", own != 0 or past != 0), ("window", own != past), ("query_mask", True))
        if differs
    }
    return _folded(operation, options, inputs, folded)


def essential(operation: str, options: Options, inputs: Inputs) -> Posed:
    """Return the same computation with one mask and one set of keys and values."""
    folded = {"window", "key_lengths", "query_mask"}
    if query_offset(options, inputs) or not folded.isdisjoint({*options, *inputs}):
        folded.add("is_causal")
    posed = _folded(operation, options, inputs, folded)
    for name in ("key", "value"):
        if f"past_{name}" in posed.inputs:
            posed.inputs[name] = np.concatenate([posed.inputs.pop(f"past_{name}"), posed.inputs[name]], axis=-2)
    return posed


def query_offset(options: Options, inputs: Inputs) -> int:
    """Return the position of the first query among all keys, which causality and windows count from."""
    match options.get("alignment"):
        case "top_left":
            return 0
        case "bottom_right":
            queries, keys = _lengths(inputs)
            return keys - queries
    return _past_length(inputs)


def _folded(operation: str, options: Options, inputs: Inputs, names: set[str]) -> Posed:
    """Turn these options and inputs into one mask, together with the mask that is given."""
    # What is not causal is not asked for causality: a function without that keyword can do it.
    kept_options = {name: value for name, value in options.items() if name not in _READING_ONLY and value is not False}
    if operation != "multi_head_attention":
        kept_options = {name: value for name, value in kept_options.items() if name not in _OF_LAYOUT}
    kept_inputs = dict(inputs)
    allowed: list[Array] = []
    positions = np.arange(_lengths(inputs)[0])[:, np.newaxis] + query_offset(options, inputs) if names else np.zeros(0)
    keys = np.arange(_lengths(inputs)[1]) if names else np.zeros(0)
    if "is_causal" in names and kept_options.pop("is_causal", False):
        allowed.append(keys <= positions)
    if "window" in names and (window := kept_options.pop("window", None)) is not None:
        allowed += _within(window, positions, keys)
    if "key_lengths" in names and (lengths := kept_inputs.pop("key_lengths", None)) is not None:
        allowed.append(keys < lengths.reshape(-1, 1, 1, 1))
    if "query_mask" in names and (queries := kept_inputs.pop("query_mask", None)) is not None:
        allowed.append(queries[:, np.newaxis, :, np.newaxis])
    if allowed:
        kept_inputs["mask"] = _all_of([*allowed, *([inputs["mask"]] if "mask" in inputs else [])])
    return Posed(kept_options, kept_inputs)


def _within(window: tuple[int | None, int | None], positions: Array, keys: Array) -> list[Array]:
    left, right = window
    before = [] if left is None else [keys >= positions - left]
    return before if right is None else [*before, keys <= positions + right]


def _all_of(masks: Iterable[Array]) -> Array:
    together: Array = reduce(np.logical_and, masks)
    return together.reshape((1,) * (4 - together.ndim) + together.shape)


def _past_length(inputs: Inputs) -> int:
    return int(inputs["past_key"].shape[-2]) if "past_key" in inputs else 0


def _lengths(inputs: Inputs) -> tuple[int, int]:
    """Return how many queries and how many keys there are, the past among them."""
    if "query" not in inputs:
        queries, keys = inputs["scores"].shape[-2:]
        return int(queries), int(keys)
    return int(inputs["query"].shape[-2]), int(inputs["key"].shape[-2]) + _past_length(inputs)
