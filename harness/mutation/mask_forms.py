"""Ways to mask wrongly: faulty functions that say what is forbidden, what it gets, and what a bias is."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, TypeAlias

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Stages
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.variant import Call, Steps

Masks: TypeAlias = dict[str, Any]
"""What ``mask_scores`` is asked for besides the scores: bias, mask, is_causal, window and so on."""
_NOTHING: Masks = {
    name: each.default
    for name, each in signature(numpy_backend.mask_scores).parameters.items()
    if each.kind is Parameter.KEYWORD_ONLY
}
NO_RULES: Masks = {option: each for option, each in _NOTHING.items() if option != "bias"}
"""Nothing is forbidden."""


def forbids(masks: Masks) -> bool:
    """Whether anything may be forbidden."""
    given = masks["mask"] is not None or masks["key_lengths"] is not None
    return bool(masks["is_causal"] or given or any(side is not None for side in masks["window"] or ()))


def allowed_keys(scores: Array, masks: Masks) -> Array:
    """Return which key each query may attend to, (B, H, Lq, T), as the backend has it."""
    asked = {**_NOTHING, **masks, "bias": None, "mask_fill": None}
    stages = numpy_backend.mask_scores(np.zeros(scores.shape, bool), **asked)
    return np.asarray(~np.isneginf(stages["masked"])) if "masked" in stages else np.ones(scores.shape, bool)


def causal_keys(queries: int, keys: int) -> Array:
    """Return which key each query sees that sees none behind its own, (Lq, T)."""
    return allowed_keys(np.zeros((queries, keys), bool), {"is_causal": True})


def keys_within(scores: Array, window: Any) -> Array:
    """Return which key each query sees through a window, (Lq, T)."""
    return allowed_keys(np.zeros(scores.shape[-2:], bool), {"window": window})


def distance(scores: Array) -> Array:
    """Return how far each key stands behind each query, j - i: (Lq, T)."""
    queries, keys = scores.shape[-2:]
    behind: Array = np.arange(keys) - np.arange(queries)[:, np.newaxis]
    return behind


def both(mask: Array | None, pattern: Array) -> Array:
    """Return a mask that allows what both allow."""
    return pattern if mask is None else np.logical_and(mask, pattern)


def masks_read_as(change: Callable[[Array, Masks], Masks]) -> Steps:
    """Mask by other options, where anything is forbidden: ``change(scores, masks)`` are those that differ."""

    def mask_scores(scores: Array, **given: Any) -> Stages:
        masks = {**_NOTHING, **given}
        if not forbids(masks):
            return numpy_backend.mask_scores(scores, **masks)
        masks |= change(scores, masks)
        if masks["mask"] is None:  # whatever is left of the rules, there is a stage for them
            masks["mask"] = np.ones((), bool)
        return numpy_backend.mask_scores(scores, **masks)

    return {"mask_scores": mask_scores}


def mask_read_as(change: Callable[[Array, Array], Array]) -> Steps:
    """Take the mask for another one: ``change(mask, scores)``."""
    return _option_read_as("mask", change)


def window_read_as(change: Callable[..., Any]) -> Steps:
    """Take the window for another one: ``change(left, right)``."""
    return _option_read_as("window", lambda window, scores: change(*window))


def lengths_read_as(change: Callable[[Array, int], Array]) -> Steps:
    """Take the lengths for others: ``change(lengths, keys)``."""
    return _option_read_as("key_lengths", lambda lengths, scores: change(lengths, scores.shape[-1]))


def _option_read_as(option: str, change: Callable[[Any, Array], Any]) -> Steps:
    return masks_read_as(lambda scores, masks: {} if masks[option] is None else {option: change(masks[option], scores)})


def causal_pattern(pattern: Callable[[int, int], Array]) -> Steps:
    """Take another pattern for causality: ``pattern(queries, keys)``, of queries that stand at their own index."""

    def change(scores: Array, masks: Masks) -> Masks:
        if not masks["is_causal"] or masks["query_offsets"] is not None:
            return {}
        return {"is_causal": False, "mask": both(masks["mask"], pattern(*scores.shape[-2:]))}

    return masks_read_as(change)


def window_pattern(pattern: Callable[[Array, Masks], Array]) -> Steps:
    """Take another pattern for the window: ``pattern(scores, masks)``, of queries that stand at their own index."""
    return _pattern("window", pattern)


def lengths_pattern(pattern: Callable[[Array, Masks], Array]) -> Steps:
    """Take another pattern for the lengths: ``pattern(scores, masks)``."""
    return _pattern("key_lengths", pattern)


def _pattern(option: str, pattern: Callable[[Array, Masks], Array]) -> Steps:
    def change(scores: Array, masks: Masks) -> Masks:
        if masks[option] is None or (option == "window" and masks["query_offsets"] is not None):
            return {}
        return {option: None, "mask": both(masks["mask"], pattern(scores, masks))}

    return masks_read_as(change)


def dropped(option: str, where: Callable[[Masks], bool] = lambda masks: True) -> Steps:
    """Do as if a rule had not been given, always or where something else is."""
    neutral = {option: _NOTHING[option]}
    return masks_read_as(lambda scores, masks: neutral if where(masks) else {})


def filled(fill: Callable[[Array, Array, Masks], Array]) -> Steps:
    """Give what is forbidden another number than -inf: ``fill(biased, allowed, masks)``."""

    def mask_scores(scores: Array, **given: Any) -> Stages:
        masks = {**_NOTHING, **given}
        stages = numpy_backend.mask_scores(scores, **masks)
        if "masked" in stages:
            stages["masked"] = fill(stages.get("biased", scores), allowed_keys(scores, masks), masks)
        return stages

    return {"mask_scores": mask_scores}


def bias_added(add: Callable[[Array, Array, Masks], Array]) -> Steps:
    """Add the bias in another way, where there is one: ``add(scores, bias, masks)``."""

    def mask_scores(scores: Array, **given: Any) -> Stages:
        masks = {**_NOTHING, **given}
        if masks["bias"] is None:
            return numpy_backend.mask_scores(scores, **masks)
        biased = add(scores, masks["bias"], masks)
        return {"biased": biased} | numpy_backend.mask_scores(biased, **{**masks, "bias": None})

    return {"mask_scores": mask_scores}


def bias_dropped(where: Callable[[Masks], bool]) -> Steps:
    """Do as if a bias had not been given, where something else is."""
    return bias_added(lambda scores, bias, masks: scores if where(masks) else np.asarray(scores + bias))


def bias_read_as(change: Callable[[Array, Array], Array]) -> Steps:
    """Take the bias for another one: ``change(bias, scores)``."""
    return bias_added(lambda scores, bias, masks: np.asarray(scores + change(bias, scores)))


def allowed_in(call: Call, **changed: Any) -> Array:
    """Return which key each query of a call may attend to, or may with other masks, (B, H, Lq, T)."""
    offsets = call.query_offsets
    window = call.window if offsets is not None else numpy_backend._seen_from_the_first_key(call.window, call.past)
    masks = {"mask": call.mask, "is_causal": call.is_causal, "window": window, "key_lengths": call.key_lengths}
    masks["query_offsets"] = offsets
    return allowed_keys(np.zeros(call.scores_shape, bool), masks | changed)
