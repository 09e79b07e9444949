"""Faults of merging what attention gave for parts of the keys, and right ways to merge in another order or base."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce

import numpy as np

from attncheck.backends.contract import LseBase, Stages
from attncheck.backends.numpy_backend import (
    _logarithms_in_base,
    _mean_of_parts,
    _natural_logarithms,
    _without_empty_parts,
    merge_states,
    softmax,
)
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.mutant import EVERY, control, mutant
from attncheck.mutation.variant import Steps

_faulty_merge = partial(mutant, "merging", at="weights")
_LN2 = math.log(2)


def _read_as(natural: Callable[[Array, LseBase], Array]) -> Steps:
    """Read the log-sum-exps otherwise; what is returned is in the base that is asked for."""
    return {"_natural_logarithms": natural}


def _weighed(weigh: Callable[[Array], Array]) -> Steps:
    """Weigh the parts otherwise, by their natural log-sum-exps (B, H, Lq, N); log_sum_exp is right."""
    return {"merge_states.softmax": lambda scores: softmax(scores) | {"weights": weigh(scores)}}


def _totalled(total: Callable[[Array], Array]) -> Steps:
    """Return another log_sum_exp, made from the natural ones of the parts."""
    return {"merge_states.softmax": lambda scores: softmax(scores) | {"log_sum_exp": total(scores)}}


def _softmax_of(change: Callable[[Array], Array]) -> Steps:
    """Take the softmax of other log-sum-exps."""
    return {"merge_states.softmax": lambda scores: softmax(change(scores))}


def _maximum(scores: Array) -> Array:
    """Return the largest of each row, 0 where all parts are empty."""
    highest = scores.max(axis=-1, keepdims=True)
    return np.where(np.isneginf(highest), 0, highest)


@_faulty_merge(
    _read_as,
    at="weights",
    defect="a prefix in base e meets a suffix in base 2: sglang#40903",
    diagnosis="first-part-in-other-base",
)
def first_part_in_the_other_base(scores: Array, base: LseBase) -> Array:
    factor = np.ones(scores.shape[-1], scores.dtype)
    factor[0] = 1 / _LN2 if base == "2" else _LN2
    return np.asarray(_natural_logarithms(scores, base) * factor)


@_faulty_merge("merge_states.softmax", at="weights", defect="e^L without its maximum: inf / inf, or 0 / 0: trl#7181")
def parts_merged_without_their_maximum(scores: Array) -> Stages:
    powers = np.exp(scores)
    total = powers.sum(axis=-1, keepdims=True)
    return {"weights": powers / np.where(total == 0, 1, total), "log_sum_exp": np.log(total)[..., 0]}


@_faulty_merge(
    "merge_states.softmax",
    at="weights",
    defect="-inf minus -inf where all parts are empty: flashinfer#4051",
    diagnosis="empty-rows-nan",
)
def nothing_at_all_gives_nan(scores: Array) -> Stages:
    stages = softmax(scores)
    empty = np.isneginf(scores).all(axis=-1, keepdims=True)
    return stages | {"weights": np.where(empty, np.nan, stages["weights"])}


@_faulty_merge("merge_states", at="output", defect="the first part is handed on where all are empty: vllm#39148's kind")
def first_part_handed_on_where_all_are_empty(outputs: Array, log_sum_exps: Array, *, lse_base: LseBase = "e") -> Stages:
    stages = merge_states(outputs, log_sum_exps, lse_base=lse_base)
    empty = np.isneginf(log_sum_exps.max(axis=0))[..., np.newaxis]
    return stages | {"output": np.where(empty, outputs[0], stages["output"])}


@_faulty_merge(
    _totalled, at="log_sum_exp", defect="a query without a key gets plus infinity, as in FlashAttention 2: vllm#28181"
)
def whole_of_nothing_is_plus_infinity(scores: Array) -> Array:
    total = softmax(scores)["log_sum_exp"]
    return np.where(np.isneginf(total), np.inf, total)


@_faulty_merge(
    _weighed, at="weights", defect="a merge of two keeps the larger log-sum-exp: the next part weighs too much"
)
def running_log_sum_exp_is_the_larger_one(scores: Array) -> Array:
    """Merge one part after the other, the ones before counting by the largest of them alone."""
    weights, running = np.zeros_like(scores), scores[..., :1]
    weights[..., :1] = ~np.isneginf(running)
    for number in range(1, scores.shape[-1]):
        own = scores[..., number : number + 1]
        shares = softmax(np.concatenate([running, own], axis=-1))["weights"]
        weights[..., :number] *= shares[..., :1]
        weights[..., number : number + 1] = shares[..., 1:]
        running = np.maximum(running, own)
    return weights


# What is right.

Pair = tuple[Array, Array]
"""Output and log_sum_exp of parts that have been merged, (B, H, Lq, Dv) and (B, H, Lq)."""


def _merged_by(merge: Callable[[list[Pair]], Pair]) -> Steps:
    """Merge by a function of the parts, in float32 or wider, their log-sum-exps natural."""

    def merge_states(outputs: Array, log_sum_exps: Array, *, lse_base: LseBase = "e") -> Stages:
        parts = _without_empty_parts(outputs, log_sum_exps).astype(log_sum_exps.dtype)
        output, total = merge(list(zip(parts, _natural_logarithms(log_sum_exps, lse_base), strict=True)))
        return {"log_sum_exp": _logarithms_in_base(total, lse_base), "output": output.astype(outputs.dtype)}

    return {"merge_states": merge_states}


def _merged_pair(one: Pair, other: Pair) -> Pair:
    """Merge two parts by a softmax of two."""
    stages = softmax(np.stack([one[1], other[1]], axis=-1))
    return _mean_of_parts(stages["weights"], np.stack([one[0], other[0]], axis=-2)), stages["log_sum_exp"]


_right_merge = partial(control, _merged_by, dtypes=EVERY)


@_right_merge(why="one part after the other, as they come around a ring")
def parts_merged_in_sequence(parts: list[Pair]) -> Pair:
    return reduce(_merged_pair, parts)


@_right_merge(why="one part after the other, from the last")
def parts_merged_in_reverse(parts: list[Pair]) -> Pair:
    return reduce(_merged_pair, parts[::-1])


@_right_merge(why="two by two, as a reduction over devices does")
def parts_merged_in_a_tree(parts: list[Pair]) -> Pair:
    while len(parts) > 1:
        pairs = [_merged_pair(*parts[start : start + 2]) for start in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


@_right_merge(why="a logistic function of the difference, as ring attention has it")
def parts_merged_by_a_logistic_function(parts: list[Pair]) -> Pair:
    def merge(one: Pair, other: Pair) -> Pair:
        (output, total), (own_output, own_total) = one, other
        with np.errstate(all="ignore"):
            above = own_total - total
            share = np.where(np.isneginf(total), 1, 1 / (1 + np.exp(-above))).astype(total.dtype)
            share = np.where(np.isneginf(own_total), 0, share).astype(total.dtype)
        merged = output - share[..., np.newaxis] * (output - own_output)
        return merged, np.logaddexp(total, own_total)

    return reduce(merge, parts)


@_right_merge(why="weights e^(L_n - L) from an L that was stored, as split decoding combines")
def parts_weighed_from_the_stored_whole(parts: list[Pair]) -> Pair:
    totals = np.stack([total for _, total in parts], axis=-1)
    whole = softmax(totals)["log_sum_exp"]
    shift = np.where(np.isneginf(whole), 0, whole)[..., np.newaxis]
    return _mean_of_parts(np.exp(totals - shift), np.stack([output for output, _ in parts], axis=-2)), whole


@_right_merge(why="exponentials and the logarithm in base 2")
def parts_merged_in_powers_of_two(parts: list[Pair]) -> Pair:
    totals = np.stack([total for _, total in parts], axis=-1) * (1 / _LN2)
    highest = _maximum(totals)
    powers = np.exp2(totals - highest)
    sums = powers.sum(axis=-1, keepdims=True)
    weights = powers / np.where(sums == 0, 1, sums)
    with np.errstate(divide="ignore"):
        whole = (highest + np.log2(sums))[..., 0] * _LN2
    return _mean_of_parts(weights, np.stack([output for output, _ in parts], axis=-2)), whole


@_right_merge(why="outputs times e^(L_n - m), added up, and divided at the end")
def parts_divided_at_the_end(parts: list[Pair]) -> Pair:
    highest = reduce(np.maximum, [total for _, total in parts])
    shift = np.where(np.isneginf(highest), 0, highest)
    powers = [np.exp(total - shift) for _, total in parts]
    sums = sum(powers[1:], powers[0])
    mean = sum(output * power[..., np.newaxis] for (output, _), power in zip(parts, powers, strict=True))
    with np.errstate(divide="ignore"):
        return np.asarray(mean / np.where(sums == 0, 1, sums)[..., np.newaxis]), np.asarray(shift + np.log(sums))


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_merge(None, "parts_are_always_merged_in_base_e",
    "log2 is written and log is read: flashinfer#2113, pytorch#181645",
    {"_natural_logarithms": lambda scores, base: scores, "_logarithms_in_base": lambda scores, base: scores},
    diagnosis="lse-base-e")
_faulty_merge(None, "parts_are_always_merged_in_base_two", "log is written and log2 is read: sglang#35045",
    {"_natural_logarithms": lambda scores, base: _natural_logarithms(scores, "2"), "_logarithms_in_base":
        lambda scores, base: _logarithms_in_base(scores, "2")},
    diagnosis="lse-base-2")
_faulty_merge("_logarithms_in_base", "whole_returned_in_base_e",
    "the whole is returned in base e, whatever the parts are in: vllm#28840's kind",
    lambda scores, base: scores, at="log_sum_exp", diagnosis="log-sum-exp-base-e")
_faulty_merge("_logarithms_in_base", "whole_returned_in_base_two",
    "the whole is returned in base 2, whatever the parts are in: cudnn-frontend#931's kind",
    lambda scores, base: np.asarray(scores / _LN2), at="log_sum_exp", diagnosis="log-sum-exp-base-2")
_faulty_merge(_weighed, "parts_not_normalised", "structure: each part is scaled to the maximum, and never to the sum",
    lambda scores: np.asarray(np.exp(scores - _maximum(scores))))
_faulty_merge(_weighed, "parts_averaged", "structure: the merge forgets how much each part weighs",
    lambda scores: softmax(np.where(np.isneginf(scores), scores, 0).astype(scores.dtype))["weights"],
    diagnosis="parts-averaged")
_faulty_merge(_softmax_of, "empty_part_weighs_as_zero", "the logarithm of an empty part's sum is 0: mlx#2608",
    lambda scores: np.where(np.isneginf(scores), 0, scores), diagnosis="empty-part-at-zero")
_faulty_merge(_softmax_of, "empty_part_is_plus_infinity",
    "an empty part is written as plus infinity: vllm#28181, #15492",
    lambda scores: np.where(np.isneginf(scores), np.inf, scores))
_faulty_merge("_without_empty_parts", "empty_part_let_through",
    "0 times the NaN of an empty part: flashinfer#5262, vllm#27491",
    lambda outputs, log_sum_exps: outputs, at="output")
_faulty_merge(_totalled, "whole_is_the_maximum_alone", "the maximum is stored in place of the whole: aiter#3334's kind",
    lambda scores: np.asarray(scores.max(axis=-1)), at="log_sum_exp", diagnosis="log-sum-exp-of-maximum-alone")
_faulty_merge(_totalled, "whole_adds_the_logarithm_of_the_count", "structure: the parts are counted, not weighed",
    lambda scores: np.asarray(scores.max(axis=-1) + np.log(scores.shape[-1]).astype(scores.dtype)), at="log_sum_exp")
_faulty_merge(_totalled, "whole_without_its_maximum", "the maximum that was subtracted is not added again",
    lambda scores: np.asarray(softmax(scores)["log_sum_exp"] - _maximum(scores)[..., 0]), at="log_sum_exp",
    diagnosis="log-sum-exp-without-maximum")
_faulty_merge("_mean_of_parts", "outputs_in_reverse_order",
    "structure: outputs are gathered in the order in which devices answer",
    lambda weights, parts: _mean_of_parts(weights, parts[..., ::-1, :]), at="output", diagnosis="parts-reversed")
_faulty_merge(_softmax_of, "last_part_not_merged", "structure: one part fewer is merged than there are",
    lambda scores: np.where(np.arange(scores.shape[-1]) < max(scores.shape[-1] - 1, 1), scores,
        -np.inf).astype(scores.dtype),
    diagnosis="last-part-lost")
_faulty_merge(_softmax_of, "parts_beyond_32_lost", "structure: a warp merges its 32 parts, and no more",
    lambda scores: np.where(np.arange(scores.shape[-1]) < 32, scores, -np.inf).astype(scores.dtype),
    diagnosis="last-part-lost")
_faulty_merge(_read_as, "heads_and_queries_of_log_sum_exps_confused",
    "(Lq, H) is read as (H, Lq): statistics of kernels have their own layout",
    lambda scores, base: _natural_logarithms(np.ascontiguousarray(scores).reshape(scores.shape[0], scores.shape[2],
        scores.shape[1], scores.shape[3]).swapaxes(1, 2), base),
    diagnosis="log-sum-exps-with-heads-and-queries-confused")
_faulty_merge(_read_as, "log_sum_exps_of_the_first_head", "structure: one log-sum-exp per query is read for all heads",
    lambda scores, base: _natural_logarithms(np.broadcast_to(scores[:, :1], scores.shape), base),
    diagnosis="log-sum-exps-of-first-head")
_faulty_merge(_softmax_of, "log_sum_exps_of_parts_in_bfloat16",
    "log_sum_exp of each part is stored in 16 bits: flashinfer#3372's kind",
    lambda scores: arithmetic.bfloat16(scores))
_faulty_merge(_softmax_of, "empty_part_is_minus_a_hundred",
    "-100 for minus infinity: a part that is empty weighs beside low ones",
    lambda scores: np.asarray(np.maximum(scores, np.asarray(-100, scores.dtype))),
    diagnosis="empty-part-at-minus-100")
