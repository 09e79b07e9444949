"""Conventions that an implementation may have meant instead, each as a change of the problem of a case.

A convention is another reading of the same options: where causality and windows are counted from, which truth value of
a mask forbids, how grouped heads are shared. A mistake leaves an option out, or takes another value for it. Both are
here as problems whose exact answers a result may turn out to be (``judge_implementation.py``).

Normalised queries and keys may be taken for others: with no norm, another one, of other elements, elsewhere, or with
other weights. Each is a problem in the form to which the case is lowered (``reading/lowering.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attncheck.attention.problem import Computation
from attncheck.judging.alternatives import (
    Alternative,
    allowed_keys,
    mistake,
    queries_and_keys,
    with_allowed,
    with_mask,
)
from attncheck.judging.residuals import has_scale, other_scales, scale_of, scales_in_words
from attncheck.judging.undefined_rows import scores_shape
from attncheck.reading.lowering import Problem, query_offset, rows_of_tables
from attncheck.spec import (
    ASKED_BY,
    IGNORABLE,
    LOGITS,
    OPERATIONS,
    InputSpec,
    OptionSpec,
)
from attncheck.verdicts import Verdict

_STAGE = "normalized_query"
_EPSILONS = (
    ("norm-epsilon-outside", "outside", "epsilon is added to the root, not under it"),
    ("norm-epsilon-inside", "inside", "epsilon is added under the root"),
    ("norm-epsilon-least", "maximum", "epsilon is taken for the least root"),
    ("norm-epsilon-least-square", "square", "epsilon is taken for the least square: sqrt(max(x.x, epsilon))"),
)
"""Where epsilon may stand instead; what the case means changes nothing and is told apart from it by nobody."""


def normalizations_of(problem: Problem) -> Iterator[Alternative]:
    """Yield what the norms of a problem may be taken for, the likeliest first; nothing where there are none."""
    if "query_norm" not in problem.inputs:
        return
    yield from _left_out(problem)
    yield from _conventions(problem)
    yield from _epsilons(problem)
    yield from _weights(problem)


def _left_out(problem: Problem) -> Iterator[Alternative]:
    for name, other in (("key", "query"), ("query", "key")):
        description = f"the {other} alone is normalised"
        left = problem.with_options(unnormalized=name)
        yield mistake(f"norm-of-{other}-alone", description, left, f"normalized_{name}")
    neither = problem.with_options(unnormalized="both")
    yield mistake("norm-ignored", "query and key are not normalised", neither, _STAGE)


def _conventions(problem: Problem) -> Iterator[Alternative]:
    """Yield other elements that statistics are of, another kind of norm, and the other order."""
    options = problem.options
    taken, meant = ("each head", "all heads") if options.get("norm_over") == "full" else ("all heads", "each head")
    other = problem.with_options(norm_over="head" if taken == "each head" else "full")
    yield Alternative("norm-width", f"a norm is taken of {taken}; the case means {meant}", _STAGE, other)
    names = {"rms": "the root of the mean of squares", "l2": "the length"}
    kind = options.get("norm") or "rms"
    instead = "l2" if kind == "rms" else "rms"
    description = f"vectors are divided by {names[instead]}; the case means {names[kind]}"
    yield Alternative("norm-kind", description, _STAGE, problem.with_options(norm=instead))
    if "rotary_cos" in problem.inputs or "query_cos" in problem.inputs:
        is_late = bool(options.get("norm_after_rotation"))
        where, right = ("before", "after") if is_late else ("after", "before")
        description = f"the norm is taken {where} the rotation; the case means {right} it"
        yield Alternative("norm-order", description, _STAGE, problem.with_options(norm_after_rotation=not is_late))


def _epsilons(problem: Problem) -> Iterator[Alternative]:
    ignored = problem.with_options(epsilon=0.0)
    yield mistake("norm-epsilon-ignored", "epsilon is ignored", ignored, _STAGE)
    means = "inside" if (problem.options.get("norm") or "rms") == "rms" else "maximum"
    for name, where, description in _EPSILONS:
        if where != means:
            yield Alternative(name, description, _STAGE, problem.with_options(epsilon_at=where))


def _weights(problem: Problem) -> Iterator[Alternative]:
    """Yield weights that are left out, that are taken for what is added to 1, or that are each other's."""
    weights = {name: problem.inputs[name] for name in ("query_norm", "key_norm")}
    ones = {name: np.ones_like(weight) for name, weight in weights.items()}
    yield mistake("norm-weight-ignored", "the weights of the norms are ignored", problem.with_inputs(**ones), _STAGE)
    given = {name: weight.astype(np.float64) for name, weight in weights.items() if (weight != 1).any()}
    if not given:
        return
    more = {name: 1 + weight for name, weight in given.items()}
    description = "weights of the norms are taken for 1 + w; the case means w"
    yield Alternative("norm-weight-plus-one", description, _STAGE, problem.with_inputs(**more))
    less = {name: weight - 1 for name, weight in given.items()}
    yield mistake("norm-weight-minus-one", "weights of the norms lack 1", problem.with_inputs(**less), _STAGE)
    query, key = weights["query_norm"], weights["key_norm"]
    if all((each == each[:1]).all() for each in (query, key)):
        swapped = {
            "query_norm": np.broadcast_to(key[:1], query.shape),
            "key_norm": np.broadcast_to(query[:1], key.shape),
        }
    elif query.shape == key.shape:
        swapped = {"query_norm": key, "key_norm": query}
    else:
        return
    description = "the norms of query and key have each other's weights"
    yield mistake("norm-weights-swapped", description, problem.with_inputs(**swapped), _STAGE)


def conventions_of(problem: Problem) -> Iterator[Alternative]:
    """Yield what a case's options may be taken for, the likeliest first; nothing for an option that it has not.

    What else may go wrong than an option is in ``mistakes`` and ``replaced_steps``.
    """
    yield from _alignments(problem)
    yield from _masks(problem)
    yield from _fills(problem)
    yield from _ignored(problem)
    yield from _windows(problem)
    yield from _key_lengths(problem)
    yield from _grouped_heads(problem)
    yield from _scales(problem)
    yield from _softcaps(problem)
    yield from _rotary(problem)
    yield from normalizations_of(problem)
    yield from _parts(problem)


_ALIGNMENTS: Mapping[str, tuple[str, str]] = {
    "top_left": ("top-left", "i"),
    "bottom_right": ("bottom-right", "i + Lk - Lq"),
}


def _alignments(problem: Problem) -> Iterator[Alternative]:
    """Where positions count from: the first query stands at the first key, or the last query at the last key."""
    options = problem.options
    if options.get("is_causal"):
        subject, rule = "causality", "key j for query i iff j <= {}"
    elif options.get("window"):
        subject, rule = "the window", "query i stands at key {}"
    else:
        return
    own = query_offset(options, problem.inputs)
    default = "behind the past" if "past_key" in problem.inputs else "top-left"
    if "query_offsets" in problem.inputs:
        default = "at the offset of each batch entry"
    meant, *_ = _ALIGNMENTS.get(str(options.get("alignment")), (default,))
    for alignment, (name, position) in _ALIGNMENTS.items():
        other = problem.without_input("query_offsets").with_options(alignment=alignment)
        if query_offset(other.options, other.inputs) != own:
            description = f"{subject} is aligned {name} ({rule.format(position)}); the case means {meant}"
            yield Alternative(f"aligned-{name}", description, "masked", other)
            if options.get("is_causal") and options.get("window"):
                yield from _aligned_separately(problem, other, f"aligned-{name}", description)


def _aligned_separately(problem: Problem, other: Problem, name: str, description: str) -> Iterator[Alternative]:
    """Yield one of causality and window aligned otherwise, the other one as the case means it."""
    queries, keys = queries_and_keys(problem)
    positions = np.arange(queries)[:, np.newaxis] + query_offset(other.options, other.inputs)
    left, right = problem.options["window"]
    behind = np.arange(keys) - positions
    within = np.full(behind.shape, fill_value=True)
    within &= left is None or behind >= -left
    within &= right is None or behind <= right
    yield Alternative(name, description, "masked", with_allowed(problem.with_options(is_causal=False), behind <= 0))
    yield Alternative(name, description, "masked", with_allowed(problem.with_options(window=None), within))


def _masks(problem: Problem) -> Iterator[Alternative]:
    mask = problem.inputs.get("mask")
    if mask is not None:
        description = "the mask is read as True = may not attend; the case means True = may attend"
        yield Alternative("mask-inverted", description, "masked", problem.with_inputs(mask=~mask))
        bias = problem.inputs["bias"] + mask if "bias" in problem.inputs else mask.astype(np.float64)
        description = "the mask is added to the scores as the numbers 0 and 1"
        yield mistake("mask-added", description, problem.with_inputs(mask=np.ones_like(mask), bias=bias))


def _fills(problem: Problem) -> Iterator[Alternative]:
    """Yield what else may stand in the place of a forbidden score: minus infinity, the score and the fill, another."""
    fill = problem.options.get("mask_fill")
    if fill is None:
        return
    description = f"a forbidden score is minus infinity; the case means {fill:.6g} in its place"
    yield Alternative("fill-minus-infinity", description, "masked", problem.with_options(mask_fill=None))
    plain = problem.canonical()
    kept = Computation.as_given(plain).kept(scores_shape(plain))
    if kept is not None and not np.isneginf(problem.inputs.get("bias", np.zeros(1))).any():
        bias = np.where(kept, 0.0, float(plain.options.get("mask_fill", -np.inf))) + problem.inputs.get("bias", 0.0)
        other = plain.but({"is_causal": None, "mask_fill": None}, mask=None, bias=bias)
        description = f"{fill:.6g} is added to a forbidden score; the case means it in its place"
        yield mistake("fill-added", description, other, "masked", {"masked": "biased"})
    if has_scale(problem):
        scaled = problem.with_options(mask_fill=fill * scale_of(problem))
        yield mistake("fill-scaled", "the fill is put in place before the scores are scaled", scaled)
    inverse = problem.with_options(mask_fill=1 / fill) if fill else problem
    if fill and abs(math.log10(abs(fill))) >= 1:
        yield mistake("fill-inverted", f"the fill is {1 / fill:.6g}: the sign of an exponent is lost", inverse)


def _ignored(problem: Problem) -> Iterator[Alternative]:
    """Yield the readings in which one input or option has no effect, for those that the specification lists."""
    for name, spec in IGNORABLE.items():
        if name not in problem.inputs and not problem.options.get(name):
            continue
        stage, aliases = spec.asks_for or "weights", {}  # what asks for no stage of its own is part of the softmax
        if isinstance(spec, OptionSpec):
            other = problem.with_options(**{name: False if spec.type is bool else None})
            if stage == "masked":
                other = with_mask(other)
            else:
                aliases = {stage: LOGITS[LOGITS.index(stage) - 1]}
        elif spec.folds_into == "mask":
            other = with_mask(problem).without_input(name)
        else:
            other = problem.with_inputs(**{name: np.full_like(problem.inputs[name], spec.neutral)})
        called = spec.called or name
        verb = "are" if isinstance(spec, InputSpec) and (spec.whole or spec.adds_key) else "is"
        slug = called.removeprefix("the ").replace(" ", "-")
        yield mistake(f"{slug}-ignored", f"{called} {verb} ignored", other, stage, aliases)


def _rotary(problem: Problem) -> Iterator[Alternative]:
    """Yield other pairs, directions and positions of a rotary embedding, and what may be left unrotated."""
    if "rotary_cos" not in problem.inputs:
        return
    cos, sin = problem.inputs["rotary_cos"], problem.inputs["rotary_sin"]
    # What follows from the wrong stage is wrong, too, and stands before it in the order of stages.
    part = "normalized" if problem.options.get("norm_after_rotation") else "rotated"
    stage, neighbours, halves = f"{part}_query", "neighbours", "elements that are R apart"
    taken, meant = (halves, neighbours) if problem.options.get("rotary_interleaved") else (neighbours, halves)
    other = problem.with_options(rotary_interleaved=taken == neighbours)
    yield Alternative("rotary-pairs", f"the rotary embedding rotates {taken}; the case means {meant}", stage, other)
    nothing = problem.with_inputs(rotary_cos=np.ones_like(cos), rotary_sin=np.zeros_like(sin))
    yield mistake("rotary-ignored", "the rotary embedding is ignored", nothing, stage)
    yield mistake(
        "rotary-backwards", "the rotary embedding turns backwards", problem.with_inputs(rotary_sin=-sin), stage
    )
    past = query_offset({}, problem.inputs)
    if past and "query_offsets" not in problem.inputs:
        late = {
            name: np.concatenate([table[:past], table])[: len(table)] for name, table in (("cos", cos), ("sin", sin))
        }
        described = "positions of the rotary embedding do not count the past"
        yield mistake(
            "rotary-without-past", described, problem.with_inputs(**{f"rotary_{n}": t for n, t in late.items()}), stage
        )
    plain = problem.canonical()
    kept = {name: problem.options[name] for name in ("empty_rows",) if name in problem.options}
    if "query_offsets" in problem.inputs:
        tables = rows_of_tables(problem.without_input("query_offsets").inputs)
        found = plain.with_options(**kept).with_inputs(**tables)
        described = "positions of the rotary embedding do not count the query offsets"
        yield mistake("rotary-without-offsets", described, found, stage)
    for name, left in (("query", "key"), ("key", "query")):
        alone = {
            f"{left}_cos": np.ones_like(plain.inputs[f"{left}_cos"]),
            f"{left}_sin": np.zeros_like(plain.inputs[f"{left}_sin"]),
        }
        found = plain.with_options(**kept).with_inputs(**alone)
        yield mistake(
            f"rotary-of-{name}-alone", f"the rotary embedding rotates the {name} alone", found, f"{part}_{left}"
        )


def _windows(problem: Problem) -> Iterator[Alternative]:
    window = problem.options.get("window")
    if window is None:
        return
    seen = {tuple(window)}
    for change in ((-1, 0), (0, -1), (-1, -1), (1, 0), (0, 1), (1, 1)):
        other = tuple(end if end is None else end + moved for end, moved in zip(window, change, strict=True))
        if other in seen:
            continue
        seen.add(other)
        ends = [side for side, moved in zip(("left", "right"), change, strict=True) if moved]
        how = "too narrow" if sum(change) < 0 else "too wide"
        meant = f"{_shown(other)}; the case means {_shown(window)}, ends included"
        description = f"the window is one key {how} on the {' and the '.join(ends)}: {meant}"
        name = f"window-{how.replace(' ', '-')}-{'-and-'.join(ends)}"
        yield Alternative(name, description, "masked", problem.with_options(window=other))


def _key_lengths(problem: Problem) -> Iterator[Alternative]:
    lengths = problem.inputs.get("key_lengths")
    if lengths is None:
        return
    for moved, name, how in ((1, "long", "the last key's index"), (-1, "short", "one less")):
        description = f"a key length is taken for {how}; the case means the number of keys"
        other = problem.with_inputs(key_lengths=lengths + moved)
        yield Alternative(f"key-lengths-one-too-{name}", description, "masked", other)


def _grouped_heads(problem: Problem) -> Iterator[Alternative]:
    if problem.operation == "attention":
        heads, shared = problem.inputs["query"].shape[-3], problem.inputs["key"].shape[-3]
        names: tuple[str, ...] = ("key", "value", "key_factor", "value_factor")
        axis = -3
    elif problem.operation == "multi_head_attention":
        heads = int(problem.options["heads"])
        shared = int(problem.options.get("kv_heads") or heads)
        names, axis = ("key_weight", "value_weight", "key_bias", "value_bias"), -1
    else:
        return
    if shared in (1, heads):
        return
    order = np.arange(heads) % shared
    tiled = {name: _heads_of(problem.inputs[name], order, shared, axis) for name in names if name in problem.inputs}
    by_head = {"key_norm": -2, "past_key": -3, "past_value": -3}
    tiled |= {name: problem.inputs[name].take(order, at) for name, at in by_head.items() if name in problem.inputs}
    description = "query head h takes key and value head h % Hkv (tiled); the case means head h // (H / Hkv) (repeated)"
    options = {"kv_heads": heads} if "kv_heads" in problem.options else {}
    yield Alternative("heads-tiled", description, "raw_scores", problem.with_inputs(**tiled).with_options(**options))


def _heads_of(array: Any, order: Any, heads: int, axis: int) -> Any:
    """Take heads in another order: whole slices of an axis, or parts of the last one."""
    if axis != -1:
        return array.take(order, axis)
    return array.reshape(*array.shape[:-1], heads, -1)[..., order, :].reshape(*array.shape[:-1], -1)


def _scales(problem: Problem) -> Iterator[Alternative]:
    if not has_scale(problem):
        return
    own = scale_of(problem)
    for scale, names in other_scales(problem):
        taken, meant = scales_in_words(scale, own)
        for name, words in names.items():
            alone = f", {words}," if words else ""
            description = f"the {{stage}} is exactly that of scale {taken}{alone} instead of {meant}"
            together = (
                f", {' or '.join(all_words)},"
                if (all_words := list(dict.fromkeys(filter(None, names.values()))))
                else ""
            )
            says_all = f"the {{stage}} is exactly that of scale {taken}{together} instead of {meant}"
            changed = problem.with_options(scale=scale)
            yield Alternative(
                name, description, "scores", changed, Verdict.NUMERIC, answer=f"scale {scale!r}", unsure=says_all
            )


_LATE_SOFTCAP = "the softcap is applied after {}; the case means before it"


def _softcaps(problem: Problem) -> Iterator[Alternative]:
    if problem.options.get("softcap") is None:
        return
    if OPERATIONS[problem.operation].has_gradients:
        yield from _softcap_of_whole_rows(problem)
        return
    for stage, what, is_there in (
        ("biased", "the bias", "bias" in problem.inputs),
        ("masked", "the mask", is_masked(problem)),
    ):
        if is_there:
            description, other = _LATE_SOFTCAP.format(what), problem.with_options(softcap_follows=stage)
            yield Alternative(f"softcap-after-{stage}", description, "capped", other)
            # Who has capped the scores for nothing before returns the late softcap under the later stage's name.
            yield Alternative(f"softcap-after-{stage}", description, stage, other, stage_aliases={stage: "capped"})


def _softcap_of_whole_rows(problem: Problem) -> Iterator[Alternative]:
    """Yield a softcap behind a mask that forbids all keys of a query or none: such rows have equal logits, -softcap.

    Behind any other mask a gradient is that of no problem.
    """
    allowed = allowed_keys(problem)
    if allowed is not None and (allowed.any(axis=-1) == allowed.all(axis=-1)).all():
        other, description = problem.with_options(empty_rows="uniform"), _LATE_SOFTCAP.format("the mask")
        yield Alternative("softcap-after-masked", description, "weights", other)


def _parts(problem: Problem) -> Iterator[Alternative]:
    """Yield another base of log-sum-exps, and other weights of parts than those that follow from them."""
    if not OPERATIONS[problem.operation].has_parts:
        return
    meant = problem.options.get("lse_base") or "e"
    taken = "2" if meant == "e" else "e"
    description = f"log-sum-exps are read as logarithms in base {taken}; the case means base {meant}"
    yield Alternative(f"lse-base-{taken}", description, "weights", problem.with_options(lse_base=taken))
    log_sum_exps = problem.inputs["log_sum_exps"]
    alike = np.where(np.isneginf(log_sum_exps), log_sum_exps, np.zeros((), log_sum_exps.dtype))
    description = "the outputs of the parts are averaged, whatever their log-sum-exps"
    yield mistake("parts-averaged", description, problem.with_inputs(log_sum_exps=alike), "weights")
    if len(log_sum_exps) > 1:
        shorter = log_sum_exps.copy()
        shorter[-1] = -np.inf
        yield mistake("last-part-lost", "the last part is lost", problem.with_inputs(log_sum_exps=shorter), "weights")
        turned = problem.with_inputs(outputs=problem.inputs["outputs"][::-1], log_sum_exps=log_sum_exps)
        yield mistake("parts-reversed", "the outputs of the parts are taken in reverse order", turned, "output")


def is_masked(problem: Problem) -> bool:
    """Whether anything says who may attend to whom."""
    asking = ASKED_BY["masked"]
    return bool(asking & problem.inputs.keys() or any(problem.options.get(name) for name in asking))


def _shown(window: Any) -> str:
    return f"[{', '.join('null' if end is None else str(end) for end in window)}]"
