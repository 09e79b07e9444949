"""Readings of the vectors before the scores: rotations, norms, latent vectors, heads and projections; and merged parts.

A wrong norm may be missing, be another norm, cover other elements, have another place, or use other weights. Readings
of latent vectors and codes (``readings_of_codes.py``) change the call before it is lowered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attncheck.diagnosis.readings_of_codes import CODE_READINGS
from attncheck.diagnosis.readings_of_entries import has_heads
from attncheck.judging.alternatives import (
    TAKE_FIRST,
    TAKE_NEXT,
    Change,
    ProblemChange,
    Reading,
    canonical_with_empty_rows,
    change_input,
    convention_reading,
    identity_like,
    intended_scale,
    leave_out_input,
    reorder_entries,
    set_options,
    starting_at_stage,
    swap_inputs,
    swap_value,
    transpose_input,
    when_applicable,
)
from attncheck.reading.lowering import query_offset, select_rotary_table_rows
from attncheck.reading.problem import Problem
from attncheck.spec import (
    CODE_INPUTS,
    LOGITS,
    MEANS,
    OPERATIONS,
    PROJECTIONS,
    QUERY_KEY_VALUE,
)

# Rotary embeddings and norms of queries and keys.


def _shown_in_rotation(change: Change, of: str = "query") -> Change:
    """Return a change of a rotation; it shows first in the normalised vectors if the norm follows the rotation."""
    part = {True: "normalized", False: "rotated"}
    return starting_at_stage(lambda problem: f"{part[bool(problem.options.get('norm_after_rotation'))]}_{of}", change)


def _rotate_without_past(problem: Problem) -> Problem | None:
    past = query_offset({}, problem.inputs)
    if not past or "query_offsets" in problem.inputs:
        return None
    tables = {name: problem.inputs[name] for name in ("rotary_cos", "rotary_sin")}
    return problem.with_inputs(
        **{name: np.concatenate([table[:past], table])[: len(table)] for name, table in tables.items()}
    )


def _rotate_queries_at(offsets: ProblemChange) -> ProblemChange:
    """Rotate the queries by other query offsets, and mask by the offsets of the case."""

    def change(problem: Problem) -> Problem | None:
        moved = offsets(problem) if {"rotary_cos", "query_offsets"} <= problem.inputs.keys() else None
        return (
            None
            if moved is None
            else canonical_with_empty_rows(problem).with_inputs(**select_rotary_table_rows(moved.inputs))
        )

    return change


def _rotate_past_again(problem: Problem) -> Problem | None:
    past = query_offset({}, problem.inputs)
    if not past:
        return None
    plain = canonical_with_empty_rows(problem)
    tables = {name: plain.inputs[f"key_{name}"].copy() for name in ("cos", "sin")}
    for name, table in tables.items():
        table[:past] = problem.inputs[f"rotary_{name}"][:past]
    return plain.with_inputs(**{f"key_{name}": table for name, table in tables.items()})


def _skip_rotation_of(unrotated: str) -> Change:
    def change(problem: Problem) -> Problem:
        plain = canonical_with_empty_rows(problem)
        cos, sin = plain.inputs[f"{unrotated}_cos"], plain.inputs[f"{unrotated}_sin"]
        return plain.with_inputs(**{f"{unrotated}_cos": np.ones_like(cos), f"{unrotated}_sin": np.zeros_like(sin)})

    return _shown_in_rotation(change, unrotated)


ROTATION_READINGS = (
    convention_reading("rotary-pairs", "the rotary embedding rotates {taken}; the case means {meant}",
               _shown_in_rotation(swap_value(
                   "rotary_interleaved", {False: "elements that are R apart", True: "neighbours"}
               )), "rotary_cos"),
    Reading("rotary-ignored", "the rotary embedding is ignored", _shown_in_rotation(
        lambda problem: problem.with_inputs(rotary_cos=np.ones_like(problem.inputs["rotary_cos"]),
                                            rotary_sin=np.zeros_like(problem.inputs["rotary_sin"]))), "rotary_cos"),
    Reading("rotary-backwards", "the rotary embedding turns backwards",
            _shown_in_rotation(change_input("rotary_sin", np.negative)), "rotary_cos"),
    Reading("rotary-without-past", "positions of the rotary embedding do not count the past",
            _shown_in_rotation(_rotate_without_past), "rotary_cos"),
    Reading("rotary-without-offsets", "positions of the rotary embedding do not count the query offsets",
            _shown_in_rotation(_rotate_queries_at(leave_out_input("query_offsets"))), "rotary_cos"),
    Reading("rotary-of-past-again", "what is cached is rotated again", _shown_in_rotation(_rotate_past_again, "key"),
            "rotary_cos"),
    Reading("rotary-of-first-batch-entry", "queries of all batch entries are rotated by the first one's offset",
            _shown_in_rotation(when_applicable(lambda problem: np.ptp(problem.inputs[
                "query_offsets"]), _rotate_queries_at(
                change_input("query_offsets", lambda offsets: np.broadcast_to(offsets[:1], offsets.shape))
            ))), "query_offsets"),
    *(
        Reading(f"rotary-of-{name}-alone", f"the rotary embedding rotates the {name} alone",
                _skip_rotation_of(unrotated), "rotary_cos")
        for name, unrotated in (("query", "key"), ("key", "query"))
    ),
)  # fmt: skip


def _move_epsilon_to(where: str) -> Change:
    meant = {"rms": "inside", "l2": "maximum"}
    return when_applicable(
        lambda problem: meant[problem.options.get("norm") or "rms"] != where, set_options(epsilon_at=where)
    )


def _change_epsilon(change: Callable[[float], float]) -> ProblemChange:
    def changed(problem: Problem) -> Problem | None:
        epsilon = problem.options.get("epsilon") or 1e-6
        return None if change(epsilon) == epsilon else problem.with_options(epsilon=change(epsilon))

    return changed


def _subtract_mean(problem: Problem) -> Problem | None:
    if problem.options.get("norm_after_rotation") and "rotary_cos" in problem.inputs:
        return None  # the rotated vectors are not inputs
    axes = (-3, -1) if problem.options.get("norm_over") == "full" else -1
    arrays = {name: problem.inputs[name].astype(np.float64) for name in ("query", "key")}
    return problem.with_inputs(**{name: array - array.mean(axis=axes, keepdims=True) for name, array in arrays.items()})


def _change_norm_weights(change: Callable[[Any], Any]) -> Change:
    """Change the weights of norms that are not all 1."""

    def changed(problem: Problem) -> Problem | None:
        weights = {name: problem.inputs[name].astype(np.float64) for name in ("query_norm", "key_norm")}
        changed_weights = {name: change(weight) for name, weight in weights.items() if (weight != 1).any()}
        return problem.with_inputs(**changed_weights) if changed_weights else None

    return changed


def _swap_norm_weights(problem: Problem) -> Problem | None:
    query, key = problem.inputs["query_norm"], problem.inputs["key_norm"]
    if (query == 1).all() and (key == 1).all():
        return None
    if all((weight == weight[:1]).all() for weight in (query, key)):
        query, key = np.broadcast_to(key[:1], query.shape), np.broadcast_to(query[:1], key.shape)
        return problem.with_inputs(query_norm=query, key_norm=key)
    return problem.with_inputs(query_norm=key, key_norm=query) if query.shape == key.shape else None


_NORM_READINGS = tuple(
    replace(reading, option_or_input="query_norm",
            first_stage="normalized_key" if reading.name == "norm-of-query-alone" else "normalized_query")
    for reading in (
        convention_reading("norm-width", "a norm is taken of {taken}; the case means {meant}",
                   swap_value("norm_over", {"head": "each head", "full": "all heads"})),
        convention_reading("norm-kind", "vectors are divided by {taken}; the case means {meant}",
                   swap_value("norm", {"rms": "the root of the mean of squares", "l2": "the length"})),
        convention_reading("norm-order", "the norm is taken {taken} the rotation; the case means {meant} it",
                   when_applicable(lambda problem: problem.inputs.keys() & {"rotary_cos", "query_cos"},
                        swap_value("norm_after_rotation", {False: "before", True: "after"}))),
        *(
            convention_reading(f"norm-epsilon-{name}", text, _move_epsilon_to(where))
            for name, where, text in (
                ("outside", "outside", "epsilon is added to the root, not under it"),
                ("inside", "inside", "epsilon is added under the root"),
                ("least", "maximum", "epsilon is taken for the least root"),
                ("least-square", "square", "epsilon is taken for the least square: sqrt(max(x.x, epsilon))"),
            )
        ),
        convention_reading("norm-weight-plus-one", "weights of the norms are taken for 1 + w; the case means w",
                   _change_norm_weights(lambda weight: 1 + weight)),
        *(
            Reading(f"norm-epsilon-{name}", f"epsilon is {words}", _change_epsilon(change))
            for name, words, change in (
                ("of-1e-5", "1e-5, whatever is given", lambda epsilon: 1e-5),
                ("at-least-1e-4", "at least 1e-4", lambda epsilon: max(epsilon, 1e-4)),
            )
        ),
        Reading("norm-of-differences", "the mean is subtracted before the norm, as a layer norm does",
                _subtract_mean),
        Reading("norm-of-query-alone", "the query alone is normalised", set_options(unnormalized="key")),
        Reading("norm-of-key-alone", "the key alone is normalised", set_options(unnormalized="query")),
        Reading("norm-ignored", "query and key are not normalised", set_options(unnormalized="both")),
        Reading("norm-epsilon-ignored", "epsilon is ignored", set_options(epsilon=0.0)),
        Reading("norm-weight-ignored", "the weights of the norms are ignored", _change_norm_weights(np.ones_like)),
        Reading("norm-weight-minus-one", "weights of the norms lack 1",
                _change_norm_weights(lambda weight: weight - 1)),
        Reading("norm-weights-swapped", "the norms of query and key have each other's weights", _swap_norm_weights),
    )
)  # fmt: skip


# Latent vectors, and scales of 8 bits, before they are widened.


_LATENT_READINGS = (
    Reading("rotated-part-ignored", "the part that is rotated is left out of the scores",
            change_input("key_rotary", np.zeros_like), "key_rotary", LOGITS[0]),
    Reading("rotated-part-alone", "the part that is not rotated is left out of the scores",
            change_input("key_projection", np.zeros_like), "key_rotary", LOGITS[0]),
    Reading("rotated-part-scaled-twice", "the part that is rotated is scaled twice",
            lambda call: call.with_inputs(key_rotary=call.inputs["key_rotary"] * intended_scale(call.without_layout())),
            "key_rotary", LOGITS[0]),
    Reading("rotated-part-one-position-late", "the part that is rotated is that of the position before",
            change_input("key_rotary", lambda part: np.roll(part, 1, axis=-2)), "key_rotary", LOGITS[0]),
    Reading("rotated-query-of-first-head", "the part of the query that is rotated is the first head's for all",
            reorder_entries(["query_rotary"], -3, TAKE_FIRST), "query_rotary", LOGITS[0]),
    *(
        Reading(f"{name}-projection-{slug}", says.format(name=name), change, f"{name}_projection", stage)
        for name, stage in (("key", LOGITS[0]), ("value", MEANS[0]))
        for slug, says, change in (
            ("of-next-head", "the {name} projection of the next head is taken",
             reorder_entries([f"{name}_projection"], -3, TAKE_NEXT)),
            ("of-first-head", "the {name} projection of the first head is taken for all",
             reorder_entries([f"{name}_projection"], -3, TAKE_FIRST)),
            ("transposed", "the {name} projection is transposed", transpose_input(f"{name}_projection")),
            ("viewed", "the {name} projection is viewed as heads first, without a transposition",
             change_input(f"{name}_projection", lambda weight: weight.swapaxes(0, 1).reshape(weight.shape))),
            ("ignored", "latent vectors are taken for the {name}s: their projection is left out",
             change_input(f"{name}_projection", identity_like)),
        )
    ),
    Reading("latent-projections-swapped", "the projections of keys and values are swapped",
            swap_inputs("key_projection", "value_projection"), "key_projection", LOGITS[0]),
)  # fmt: skip


# Heads and projections.


def _tile_heads(problem: Problem) -> Problem | None:
    if problem.operation == "attention":
        heads, shared = problem.inputs["query"].shape[-3], problem.inputs["key"].shape[-3]
        names: tuple[str, ...] = ("key", "value", *CODE_INPUTS)
        axis = -3
    elif _has_projections(problem):
        heads, shared = _head_counts_by_input(problem).values()
        names, axis = ("key_weight", "value_weight", "key_bias", "value_bias"), -1
    else:
        return None
    if shared in (1, heads):
        return None
    order = np.arange(heads) % shared
    tiled = {
        name: _reorder_heads(problem.inputs[name], order, shared, axis) for name in names if name in problem.inputs
    }
    by_head = {"key_norm": -2, "past_key": -3, "past_value": -3}
    tiled |= {name: problem.inputs[name].take(order, at) for name, at in by_head.items() if name in problem.inputs}
    options = {"kv_heads": heads} if "kv_heads" in problem.options else {}
    return problem.with_inputs(**tiled).with_options(**options)


def _head_counts_by_input(problem: Problem) -> dict[str, int]:
    """Return the number of heads of projected queries, and of projected keys and values."""
    heads = int(problem.options["heads"])
    return {"query": heads, "key": int(problem.options.get("kv_heads") or heads)}


def _reorder_heads(array: Any, order: Any, heads: int, axis: int) -> Any:
    """Return the heads in another order: slices of an axis, or parts of the last axis if ``axis`` is -1."""
    if axis != -1:
        return array.take(order, axis)
    return array.reshape(*array.shape[:-1], heads, -1)[..., order, :].reshape(*array.shape[:-1], -1)


def _read_wrong_input(read: str, wrong: str) -> Change:
    def change(problem: Problem) -> Problem | None:
        inputs = problem.inputs
        if not has_heads(problem) or inputs["key"].shape != inputs["value"].shape:
            return None
        prefixes = ("", "past_") if "past_key" in inputs else ("",)
        return problem.with_inputs(**{f"{prefix}{read}": inputs[f"{prefix}{wrong}"] for prefix in prefixes})

    return change


def _changed_projections(problem: Problem, names: Iterable[str], change: Callable[[Any, int], Any]) -> dict[str, Any]:
    """Return changed weights and biases of projections: ``change(array, number of heads)`` returns (..., H, D)."""
    changed, counts = dict[str, Any](), _head_counts_by_input(problem)
    for part in (f"{name}_{kind}" for name in names for kind in ("weight", "bias")):
        if part in problem.inputs:
            array, heads = problem.inputs[part], counts["query" if part.startswith("query") else "key"]
            changed[part] = change(array, heads).reshape(*array.shape[:-1], -1)
    return changed


def _read_next_head(read: str) -> Change:
    """Read the next head: slices of keys or values, or parts of projections."""

    def rolled(array: Any, heads: int) -> Any:
        return _reorder_heads(array, np.roll(np.arange(heads), -1), heads, -1)

    def change(problem: Problem) -> Problem | None:
        changed, names = dict[str, Any](), [f"past_{read}"]
        if _has_projections(problem):
            changed = _changed_projections(problem, [read], rolled)
        elif has_heads(problem):
            names.append(read)
        else:
            return None
        changed |= {name: np.roll(problem.inputs[name], -1, -3) for name in names if name in problem.inputs}
        return problem.with_inputs(**changed)

    return change


def _interleave_heads(problem: Problem) -> Problem:
    """Give head h the columns h, h + H, h + 2 H, ..."""
    return problem.with_inputs(
        **_changed_projections(
            problem,
            QUERY_KEY_VALUE,
            lambda array, heads: np.swapaxes(array.reshape(*array.shape[:-1], -1, heads), -1, -2),
        )
    )


def _reverse_merged_heads(problem: Problem) -> Problem:
    weight, heads = problem.inputs["output_weight"], _head_counts_by_input(problem)["query"]
    reversed_weight = weight.reshape(heads, -1, weight.shape[-1])[::-1].reshape(weight.shape)
    return problem.with_inputs(output_weight=reversed_weight)


def _has_projections(problem: Problem) -> bool:
    return OPERATIONS[problem.operation].has_projections


def _add_bias_before_product(name: str) -> ProblemChange:
    def change(problem: Problem) -> Problem | None:
        weight, bias = (problem.inputs[f"{name}_{kind}"].astype(np.float64) for kind in ("weight", "bias"))
        return problem.with_inputs(**{f"{name}_bias": bias @ weight}) if weight.shape[0] == weight.shape[1] else None

    return change


_FIRST_STAGES = {"key": LOGITS[0], "value": MEANS[0]}
"""The stage at which a wrong key or value shows first."""

_HEAD_READINGS = (
    convention_reading("heads-tiled", "query head h takes key and value head h % Hkv (tiled); the case means head "
               "h // (H / Hkv) (repeated)", _tile_heads, first_stage="raw_scores"),
    *(
        Reading(f"{read}-read-as-{wrong}", f"the {wrong} is read where the {read} is meant",
                _read_wrong_input(read, wrong), first_stage=_FIRST_STAGES[read])
        for read, wrong in (("value", "key"), ("key", "value"))
    ),
    *(
        Reading(f"{read}-of-next-head", f"the {read} of the next head is read", _read_next_head(read),
                first_stage=stage)
        for read, stage in _FIRST_STAGES.items()
    ),
    *(
        Reading(f"{name}-{slug}", f"the {kind} of the {name} projection is {how}",
                when_applicable(_has_projections, change(f"{name}_{kind}")), f"{name}_{kind}", name)
        for name in (*PROJECTIONS, "output")
        for kind, slug, how, change in (
            ("bias", "bias-missing", "missing", leave_out_input),
            ("weight", "weight-transposed", "transposed", transpose_input)
        )
    ),
    *(
        Reading(f"{name}-bias-twice", f"the bias of the {name} projection is added twice",
                when_applicable(_has_projections, change_input(f"{name}_bias", lambda bias: 2 * bias)),
                f"{name}_bias", name)
        for name in (*PROJECTIONS, "output")
    ),
    *(
        Reading(f"{name}-bias-projected", f"the bias of the {name} projection is added before the product",
                when_applicable(_has_projections, _add_bias_before_product(name)), f"{name}_bias", name)
        for name in PROJECTIONS
    ),
    Reading("output-bias-of-each-head", "each head adds the bias of the output projection",
            lambda problem: problem.with_inputs(
                output_bias=problem.inputs["output_bias"] * _head_counts_by_input(problem)["query"]
            ), "output_bias", "output"),
    Reading("key-and-value-inputs-swapped", "the inputs of the key and value projections are swapped",
            when_applicable(_has_projections, swap_inputs("key", "value")), "key", "key"),
    Reading("key-and-value-weights-swapped", "the weights of the key and value projections are swapped",
            when_applicable(_has_projections, swap_inputs("key_weight", "value_weight")), "key_weight", "key"),
    Reading("heads-split-interleaved", "heads are split with the head's number running fastest, (D, H) for (H, D)",
            when_applicable(_has_projections, _interleave_heads), "heads", "query"),
    Reading("heads-merged-in-reverse", "heads are merged in reverse order", _reverse_merged_heads, "output_weight",
            "output"),
)  # fmt: skip


# Merging parts.


def _change_lse_base(taken: str, meant: str) -> Change:
    def change(problem: Problem) -> Problem | None:
        base = problem.options.get("lse_base") or "e"
        return problem.with_options(lse_base=taken) if base == meant else None

    return change


def _set_lse_of_empty_parts(number: float) -> ProblemChange:
    def change(problem: Problem) -> Problem | None:
        totals = problem.inputs["log_sum_exps"]
        is_empty = np.isneginf(totals)
        replaced = np.where(is_empty, np.array(number, totals.dtype), totals)
        return _zero_empty_parts(problem).with_inputs(log_sum_exps=replaced) if is_empty.any() else None

    return change


def _zero_empty_parts(problem: Problem) -> Problem:
    """Set the outputs of empty parts to zero, since they have no weight."""
    is_empty, outputs = np.isneginf(problem.inputs["log_sum_exps"])[..., np.newaxis], problem.inputs["outputs"]
    return problem.with_inputs(outputs=np.where(is_empty, np.zeros((), outputs.dtype), outputs))


def _change_base_of_first_entry(problem: Problem) -> Problem:
    totals = problem.inputs["log_sum_exps"].astype(np.float64)
    totals[0] *= 1 / math.log(2) if problem.options.get("lse_base") == "2" else math.log(2)
    return problem.with_inputs(log_sum_exps=totals)


_MERGE_READINGS = tuple(
    replace(reading, option_or_input="log_sum_exps")
    for reading in (
        *(
            convention_reading(f"lse-base-{taken}",
                       f"log-sum-exps are read as logarithms in base {taken}; the case means base {meant}",
                       _change_lse_base(taken, meant), first_stage="weights")
            for taken, meant in (("2", "e"), ("e", "2"))
        ),
        Reading("parts-averaged", "the outputs of the parts are averaged, whatever their log-sum-exps",
                change_input("log_sum_exps", lambda totals: np.where(
                    np.isneginf(totals), totals, np.zeros((), totals.dtype))), first_stage="weights"),
        *(
            Reading(f"empty-part-at-{name}", f"the log-sum-exp of an empty part is taken for {words}",
                    _set_lse_of_empty_parts(number), first_stage="weights")
            for name, words, number in (("zero", "0", 0.0), ("minus-100", "-100", -100.0))
        ),
        Reading("first-part-in-other-base", "the log-sum-exp of the first part is in the other base",
                _change_base_of_first_entry, first_stage="weights"),
        Reading("log-sum-exps-with-heads-and-queries-confused", "log-sum-exps (Lq, H) are read as (H, Lq)",
                change_input("log_sum_exps", lambda totals: totals.reshape(
                    *totals.shape[:2], totals.shape[3], totals.shape[2]).swapaxes(2, 3)), first_stage="weights"),
        Reading("last-part-lost", "the last part is lost", change_input(
            "log_sum_exps", lambda totals: np.concatenate([totals[:-1], np.full_like(totals[-1:], -np.inf)])
            if len(totals) > 1 else None), first_stage="weights"),
        Reading("parts-reversed", "the outputs of the parts are taken in reverse order",
                when_applicable(lambda problem: len(problem.inputs["outputs"]) > 1, lambda problem: change_input(
                    "outputs", lambda outputs: outputs[::-1])(_zero_empty_parts(problem))), first_stage="output"),
    )
)  # fmt: skip


VECTOR_READINGS: Mapping[str, Sequence[Reading]] = {
    "Norms of queries and keys": _NORM_READINGS,
    "Latent vectors": tuple(replace(reading, changes_called_operation=True) for reading in _LATENT_READINGS),
    "Codes and their scales": CODE_READINGS,
    "Heads and projections": _HEAD_READINGS,
    "Merging parts": _MERGE_READINGS,
}
"""Readings by topic; those of rotations are among the readings of scores."""
