"""Mistakes that implementations are known to make, each as another problem than the case's.

None of these is a convention: nobody means them. Each is the exact answer of a problem that the case does not pose, so
that a result can be compared with it within bounds (``judge_implementation.py``). A mistake is offered by cases that
have what it is about, and one that changes nothing there is told apart from the case by nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from attncheck.attention.problem import Computation
from attncheck.judging.alternatives import (
    Alternative,
    mistake,
    queries_and_keys,
    with_allowed,
)
from attncheck.judging.residuals import has_scale, scale_of
from attncheck.judging.undefined_rows import scores_shape
from attncheck.reading.lowering import Problem, query_offset
from attncheck.spec import BY_SCORE, LOGITS, MEANS, OPERATIONS, PER_HEAD, PROJECTIONS, score_kind
from attncheck.verdicts import Verdict

_SHARED_AXES = ((0, "batch-entry", "batch entry"), (1, "head", "head"))
_PROJECTIONS = (*PROJECTIONS, "output")
_READ_AT = {"key": LOGITS[0], "value": MEANS[0]}
"""Where a key or value that is not the one that is meant shows first."""


def mistakes_of(problem: Problem) -> Iterator[Alternative]:
    """Yield what a case may have been computed as by mistake."""
    yield from _biases(problem)
    yield from _causality(problem)
    yield from _sides(problem)
    yield from _last_row(problem)
    yield from _shared(problem)
    yield from _transposed_mask(problem)
    yield from _operands(problem)
    yield from _networks(problem)
    if OPERATIONS[problem.operation].has_projections:
        yield from _projections(problem)
        yield from _interleaved(problem)


def _biases(problem: Problem) -> Iterator[Alternative]:
    bias = problem.inputs.get("bias")
    if bias is None:
        return
    for name, factor, description in _factors_of_bias(problem):
        if factor != 1 and (factor > 0 or np.isfinite(bias).all()):
            other = _with_bias_times(problem, factor)
            answer = f"bias times {factor:.12g}"
            yield Alternative(name, description, "biased", other, Verdict.NUMERIC, answer=answer)


def _factors_of_bias(problem: Problem) -> Iterator[tuple[str, float, str]]:
    if has_scale(problem):
        scale = scale_of(problem)
        yield "bias-scaled", scale, "the bias is added before the scores are scaled"
        if scale:
            yield "bias-unscaled", 1 / scale, "the bias is divided by the scale"
    yield "bias-negated", -1.0, "the bias is subtracted"
    yield "bias-twice", 2.0, "the bias is added twice"
    yield "bias-times-log2e", 1 / math.log(2), "the bias is multiplied by log2(e), as before an exponential in base 2"
    yield "bias-times-ln2", math.log(2), "the bias is added in base 2: it lacks the factor log2(e)"


def with_bias_times(problem: Problem, factor: float, words: str) -> Alternative:
    """Return a bias times a number that was fitted."""
    description = f"the bias is multiplied by {words}"
    changed = _with_bias_times(problem, factor)
    return Alternative("bias-fitted", description, "biased", changed, Verdict.NUMERIC, is_fitted=True, factor=factor)


def _with_bias_times(problem: Problem, factor: float) -> Problem:
    """Multiply what is finite: minus infinity stays what it is."""
    bias = problem.inputs["bias"].astype(np.float64)
    with np.errstate(over="ignore"):  # the lowest number of a dtype may become minus infinity, as it does in base 2
        multiplied = np.where(np.isfinite(bias), bias, 0.0) * factor
    return problem.with_inputs(bias=np.where(np.isfinite(bias), multiplied, bias))


def _causality(problem: Problem) -> Iterator[Alternative]:
    """Yield diagonals that are one off. As a mask: the position that a case counts from has no option for it."""
    if not problem.options.get("is_causal"):
        return
    queries, keys = queries_and_keys(problem)
    behind = np.arange(keys) - np.arange(queries)[:, np.newaxis] - query_offset(problem.options, problem.inputs)
    for name, steps, description in (
        ("causal-next-key", 1, "causality is off by one: each query sees one key too many, j <= i + 1"),
        ("causal-without-own-key", -1, "causality is off by one: no query sees its own key, j < i"),
    ):
        yield mistake(name, description, with_allowed(problem.with_options(is_causal=False), behind <= steps))
    mirrored = with_allowed(problem.with_options(is_causal=False), behind >= 0)
    yield mistake("causal-mirrored", "causality is mirrored: query i sees the keys j >= i", mirrored)


def _sides(problem: Problem) -> Iterator[Alternative]:
    window = problem.options.get("window")
    if window is not None and window[0] != window[1]:
        left, right = window
        yield mistake("window-sides-swapped", "left and right of the window are swapped", _window(problem, right, left))


def _window(problem: Problem, left: int | None, right: int | None) -> Problem:
    return problem.with_options(window=(left, right))


def _last_row(problem: Problem) -> Iterator[Alternative]:
    """Yield a last query that sees all keys: of tiles, the one that is left over has lost its mask."""
    plain = problem.canonical()
    shape = scores_shape(plain)
    allowed = Computation.as_given(plain).kept(shape)
    if allowed is None or not shape[-2]:
        return
    unmasked = allowed.copy()
    unmasked[..., -1, :] = True
    kept = {name: problem.options[name] for name in ("empty_rows",) if name in problem.options}
    other = plain.with_options(is_causal=False, **kept).with_inputs(mask=unmasked)
    yield mistake("last-row-unmasked", "the last query row is not masked", other)


def _shared(problem: Problem) -> Iterator[Alternative]:
    """Yield what belongs to one head or batch entry, taken for all: a stride of zero."""
    for name, stage, plural in (("mask", "masked", "the mask"), ("bias", "biased", "the bias")):
        array = problem.inputs.get(name)
        for axis, slug, word in _SHARED_AXES:
            if array is not None and array.ndim == 4 and array.shape[axis] > 1:
                description = f"{plural} of the first {word} is taken for all"
                shared = np.broadcast_to(array.take([0], axis), array.shape)
                yield mistake(f"{name}-of-first-{slug}", description, problem.with_inputs(**{name: shared}), stage)
    lengths = problem.inputs.get("key_lengths")
    if lengths is not None and lengths.size > 1:
        description = "the key length of the first batch entry is taken for all"
        shared = np.broadcast_to(lengths[:1], lengths.shape)
        yield mistake("key-lengths-of-first-batch-entry", description, problem.with_inputs(key_lengths=shared))
    offsets = problem.inputs.get("query_offsets")
    if offsets is not None:
        stage = "rotated_query" if "rotary_cos" in problem.inputs else "masked"
        described = "the query offsets are ignored"
        yield mistake("query-offsets-ignored", described, problem.without_input("query_offsets"), stage)
        shared = np.broadcast_to(offsets[:1], offsets.shape)
        if (shared != offsets).any():
            description = "the query offset of the first batch entry is taken for all"
            other = problem.with_inputs(query_offsets=shared)
            yield mistake("query-offsets-of-first-batch-entry", description, other, stage)


def _transposed_mask(problem: Problem) -> Iterator[Alternative]:
    mask = problem.inputs.get("mask")
    if mask is None:
        return
    queries, keys = queries_and_keys(problem)
    if mask.ndim >= 2 and queries == keys and max(mask.shape[-2:]) > 1:
        description = "queries and keys of the mask are swapped"
        yield mistake("mask-transposed", description, problem.with_inputs(mask=np.swapaxes(mask, -1, -2)))


def _operands(problem: Problem) -> Iterator[Alternative]:
    """Yield one of key and value read for the other, and heads of which one is read for all."""
    if problem.operation not in (*PER_HEAD, *BY_SCORE) or "key_projection" in problem.inputs:  # which is of one head
        return
    inputs = problem.inputs
    if inputs["key"].shape == inputs["value"].shape:
        for read, wrong in (("value", "key"), ("key", "value")):
            others = {f"{past}{read}": inputs[f"{past}{wrong}"] for past in _pasts(problem)}
            yield mistake(f"{read}-read-as-{wrong}", _reads(read, wrong), problem.with_inputs(**others), _READ_AT[read])
    for read, stage in _READ_AT.items():
        if inputs[read].shape[-3] > 1:
            others = {f"{past}{read}": np.roll(inputs[f"{past}{read}"], -1, -3) for past in _pasts(problem)}
            description = f"the {read} of the next head is read"
            yield mistake(f"{read}-of-next-head", description, problem.with_inputs(**others), stage)


def _networks(problem: Problem) -> Iterator[Alternative]:
    """Yield what is done wrongly to the weights of a bilinear and an additive score."""
    inputs, kind = problem.inputs, score_kind(problem.operation, problem.options)
    if kind not in ("general", "additive"):
        return
    for name in ("weight", "query_weight", "key_weight"):
        weight = inputs.get(name)
        if weight is not None and weight.shape[0] == weight.shape[1] > 1:
            words = f"the {name.replace('_', ' ')} of the score is transposed"
            yield mistake(
                f"score-{name.replace('_', '-')}-transposed", words, problem.with_inputs(**{name: weight.T}), "scores"
            )
    if kind == "additive" and inputs["query_weight"].shape == inputs["key_weight"].shape:
        exchanged = {"query_weight": inputs["key_weight"], "key_weight": inputs["query_weight"]}
        words = "the weights of query and key are exchanged"
        yield mistake("score-weights-exchanged", words, problem.with_inputs(**exchanged), "scores")
    if kind == "additive":
        root = math.sqrt(inputs["query"].shape[-1])
        scaled = problem.with_inputs(score_vector=inputs["score_vector"].astype(np.float64) / root)
        yield mistake("score-scaled", "the additive score is divided by sqrt(D)", scaled, "scores")
    if "score_bias" in inputs:
        yield mistake(
            "score-bias-missing", "the bias of the score is missing", problem.without_input("score_bias"), "scores"
        )


def _reads(read: str, wrong: str) -> str:
    return f"the {wrong} is read where the {read} is meant"


def _pasts(problem: Problem) -> tuple[str, ...]:
    return ("", "past_") if "past_key" in problem.inputs else ("",)


def _projections(problem: Problem) -> Iterator[Alternative]:
    for name in _PROJECTIONS:
        if f"{name}_bias" in problem.inputs:
            dropped = problem.without_input(f"{name}_bias")
            yield mistake(f"{name}-bias-missing", f"the bias of the {name} projection is missing", dropped, name)
        weight = problem.inputs.get(f"{name}_weight")
        if weight is not None and weight.shape[0] == weight.shape[1] > 1:
            other = problem.with_inputs(**{f"{name}_weight": weight.T})
            yield mistake(
                f"{name}-weight-transposed", f"the weight of the {name} projection is transposed", other, name
            )


def _interleaved(problem: Problem) -> Iterator[Alternative]:
    """Yield heads that are dealt out in turn, or laid side by side from the last to the first."""
    heads = int(problem.options["heads"])
    counts = {"query": heads} | dict.fromkeys(("key", "value"), int(problem.options.get("kv_heads") or heads))
    if heads > 1:
        others: dict[str, Any] = {}
        for name, count in counts.items():
            for part in (f"{name}_weight", f"{name}_bias"):
                if part in problem.inputs:
                    others[part] = _dealt_out(problem.inputs[part], count)
        description = "heads are split with the head's number running fastest, (D, H) for (H, D)"
        yield mistake("heads-split-interleaved", description, problem.with_inputs(**others), "query")
        for name, stage in (("key", "raw_scores"), ("value", "context")):
            rolled = {
                part: _heads_rolled(problem.inputs[part], counts[name])
                for part in (f"{name}_weight", f"{name}_bias")
                if part in problem.inputs
            }
            if f"past_{name}" in problem.inputs:
                rolled[f"past_{name}"] = np.roll(problem.inputs[f"past_{name}"], -1, -3)
            if counts[name] > 1:
                description = f"the {name} of the next head is read"
                yield mistake(f"{name}-of-next-head", description, problem.with_inputs(**rolled), stage)
    if heads > 1 and (weight := problem.inputs.get("output_weight")) is not None:
        other = weight.reshape(heads, -1, weight.shape[-1])[::-1].reshape(weight.shape)
        description = "heads are merged in reverse order"
        yield mistake("heads-merged-in-reverse", description, problem.with_inputs(output_weight=other), "output")


def _heads_rolled(array: Any, heads: int) -> Any:
    """Give every head the columns of the next one."""
    return np.roll(array.reshape(*array.shape[:-1], heads, -1), -1, -2).reshape(array.shape)


def _dealt_out(array: Any, heads: int) -> Any:
    """Give head h the columns h, h + H, h + 2 H, ..."""
    parts = array.reshape(*array.shape[:-1], -1, heads)
    return np.swapaxes(parts, -1, -2).reshape(array.shape)
