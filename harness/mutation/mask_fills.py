"""Faults of a fill: the finite number that takes the place of a score where a mask says no."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.numpy_backend import (
    _cap,
    _row_sum,
    _softmax_with_sinks,
    _weighted_sum,
    mask_scores,
    multi_head_attention,
)
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.backward_forms import value_weights_read_as
from attncheck.mutation.forward_forms import in_attention
from attncheck.mutation.mask_forms import NO_RULES, Masks, allowed_in, allowed_keys, filled, masks_read_as
from attncheck.mutation.mutant import control, mutant
from attncheck.mutation.variant import Call, Steps, within

_faulty_fill = partial(mutant, "mask fills", at="masked")


def _placed(place: Callable[[Array, Array, Array, Masks], Array]) -> Steps:
    """Put a fill in place in another way, where there is one: ``place(biased, allowed, fill, masks)``."""

    def fill(biased: Array, allowed: Array, masks: Masks) -> Array:
        if masks["mask_fill"] is None:
            return np.where(allowed, biased, np.asarray(-np.inf, biased.dtype))
        return place(biased, allowed, np.asarray(masks["mask_fill"], biased.dtype), masks)

    return filled(fill)


def _fill_read_as(change: Callable[[float], float | None]) -> Steps:
    """Take the fill for another one."""

    def changed(scores: Array, masks: Masks) -> Masks:
        return {} if masks["mask_fill"] is None else {"mask_fill": change(masks["mask_fill"])}

    return masks_read_as(changed)


@_faulty_fill(
    _placed, defect="mask and causality are filled one after the other, and the fills add up: transformers#31035"
)
def fills_that_add_up(biased: Array, allowed: Array, fill: Array, masks: Masks) -> Array:
    if masks["mask"] is None or not masks["is_causal"]:
        return np.where(allowed, biased, fill)
    by_mask = allowed_keys(biased, {**NO_RULES, "mask": masks["mask"]})
    by_rules = allowed_keys(biased, {**masks, "mask": None})
    return np.where(by_mask | by_rules, np.where(allowed, biased, fill), fill + fill)


def _fill_of_call(change: Callable[[Call, float], float]) -> Steps:
    """Take the fill of attention for another one."""

    def steps(call: Call) -> Steps:
        if call.mask_fill is None:
            return {}
        return {"mask_scores": lambda scores, **given: _masked(scores, given, change(call, call.mask_fill))}

    return in_attention(steps)


def _masked(scores: Array, given: Masks, fill: float) -> dict[str, Array]:
    return mask_scores(scores, **{**given, "mask_fill": fill})


def _where_filled(steps_of: Callable[[Call, Array], Steps]) -> Steps:
    """Replace steps of attention where fills stand beside scores: ``steps_of(call, kept)``."""
    return in_attention(lambda call: {} if call.mask_fill is None else steps_of(call, allowed_in(call)))


@control(_where_filled, why="the sum of exponentials is that of the scores that are kept and that of the fills")
def fills_added_up_apart(call: Call, kept: Array) -> Steps:
    def total(exponentials: Array) -> Array:
        return np.asarray(_row_sum(np.where(kept, exponentials, 0)) + _row_sum(np.where(kept, 0, exponentials)))

    return {"_softmax_with_sinks": within(_softmax_with_sinks, _row_sum=total)}


@control(_where_filled, why="the values behind fills are averaged apart, and added")
def values_behind_fills_averaged_apart(call: Call, kept: Array) -> Steps:
    def average(weights: Array, value: Array) -> Array:
        parts = (_weighted_sum(np.where(each, weights, 0), value) for each in (kept, ~kept))
        return np.asarray(sum(parts))

    return {"_weighted_sum": average}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_fill(_fill_read_as, "fill_ignored",
    "the argument has no effect: a row without a key is 0 or NaN, and not the mean",
    lambda fill: None, diagnosis="fill-minus-infinity")
_faulty_fill(_fill_read_as, "fill_with_a_lost_exponent", "a typo, 1e-9 for -1e9: RibonanzaNet#5",
    lambda fill: 1 / fill if fill else fill, diagnosis="fill-inverted")
_faulty_fill(_fill_read_as, "fill_of_the_other_sign", "the sign is lost: what is masked has all of the weight",
    lambda fill: -fill, diagnosis="fill-negated")
_faulty_fill(_fill_read_as, "fill_of_minus_1e4_whatever_is_asked",
    "a constant of its own: -1e4 for every dtype, transformers#12109",
    lambda fill: -1e4, diagnosis="fill-of-minus-1e4")
_faulty_fill(_placed, "fill_added", "(1 - mask) * -1e4 is added, and not put in place: transformers#12109",
    lambda biased, allowed, fill, masks: np.where(allowed, biased, biased + fill), diagnosis="fill-added")
_faulty_fill(_placed, "fill_where_the_mask_says_yes", "masked_fill(mask == 1), where 1 says yes: unturtle#56",
    lambda biased, allowed, fill, masks: np.where(allowed, fill, biased), diagnosis="mask-inverted")
_faulty_fill(_placed, "fill_left_out_of_rows_without_a_key",
    "a row without a key is minus infinity: what a guard against empty rows leaves",
    lambda biased, allowed, fill, masks: np.where(~allowed.any(axis=-1, keepdims=True), np.asarray(-np.inf,
        biased.dtype), np.where(allowed, biased, fill)))
_faulty_fill(_placed, "fill_as_an_upper_limit", "the lesser of score and fill: a fill above a score has no effect",
    lambda biased, allowed, fill, masks: np.where(allowed, biased, np.minimum(biased, fill)))
_faulty_fill(_placed, "fill_for_the_mask_alone",
    "the fill is for the mask alone: causality and lengths are minus infinity",
    lambda biased, allowed, fill, masks: np.where(allowed_keys(biased, {**masks, "mask": None}), np.where(allowed,
        biased, fill), np.asarray(-np.inf, biased.dtype)))
_faulty_fill(_placed, "fill_in_front_of_the_bias", "the bias comes behind the mask, and moves the fill",
    lambda biased, allowed, fill, masks: np.where(allowed, biased, fill + np.asarray(0 if masks["bias"] is None
        else masks["bias"], biased.dtype)))
_faulty_fill(_fill_of_call, "fill_scaled", "masked before the scores are scaled",
    lambda call, fill: fill * call.factor, diagnosis="fill-scaled")
_faulty_fill(_fill_of_call, "fill_held_back_by_the_softcap",
    "the softcap comes behind the mask, and holds the fill back: onnx#7865",
    lambda call, fill: fill if call.softcap is None else float(_cap(np.asarray(fill), call.softcap)))
_faulty_fill("multi_head_attention", "fill_lost_between_projections",
    "the layer does not hand the fill on to its attention: its heads mask by minus infinity",
    lambda *arrays, mask_fill=None, **given: multi_head_attention(*arrays, **given), diagnosis="fill-minus-infinity")
mutant("mask fills", "attention_gradients._allowed_keys", "gradient_through_a_fill",
    "the gradient goes through a score that the fill took the place of: a mask that is added",
    lambda *_, **__: None, at="grad_query")
mutant("mask fills", value_weights_read_as, "no_gradient_of_values_behind_a_fill",
    "values behind a mask get no gradient, though a row of fills alone is their mean",
    lambda call, weights: weights if call.mask_fill is None else np.where(allowed_in(call), weights, 0),
    at="grad_value")
