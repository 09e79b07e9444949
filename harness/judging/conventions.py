"""What else an implementation may have meant: other conventions, each as a change of the problem that a case poses.

A convention is another reading of the same options: where causality and windows are counted from, which truth value of
a mask forbids, how grouped heads are shared. A mistake leaves an option out, or takes another value for it. Both are
here as problems whose exact answers a result may turn out to be (``judge_implementation.py``).

What normalised queries and keys may be taken for: no norm, another one, of other elements, elsewhere, other weights.

Each is the exact answer of another problem, in the form to which the case is lowered (``reading/lowering.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attncheck.attention.problem import Problem
from attncheck.judging.alternatives import (
    Alternative,
    allowed_keys,
    mistake,
    queries_and_keys,
    with_allowed,
    with_inputs,
    with_mask,
    with_options,
    without_input,
)
from attncheck.judging.residuals import has_scale, other_scales, scale_of, scales_in_words
from attncheck.judging.undefined_rows import scores_shape
from attncheck.reading.lowering import AttentionProblem, canonical_form, query_offset, rows_of_tables
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


def normalizations_of(posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield what the norms of a problem may be taken for, the likeliest first; nothing where there are none."""
    if "query_norm" not in posed.inputs:
        return
    yield from _left_out(posed)
    yield from _conventions(posed)
    yield from _epsilons(posed)
    yield from _weights(posed)


def _left_out(posed: AttentionProblem) -> Iterator[Alternative]:
    for name, other in (("key", "query"), ("query", "key")):
        description = f"the {other} alone is normalised"
        left = with_options(posed, unnormalized=name)
        yield mistake(f"norm-of-{other}-alone", description, left, f"normalized_{name}")
    neither = with_options(posed, unnormalized="both")
    yield mistake("norm-ignored", "query and key are not normalised", neither, _STAGE)


def _conventions(posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield other elements that statistics are of, another kind of norm, and the other order."""
    options = posed.options
    taken, meant = ("each head", "all heads") if options.get("norm_over") == "full" else ("all heads", "each head")
    other = with_options(posed, norm_over="head" if taken == "each head" else "full")
    yield Alternative("norm-width", f"a norm is taken of {taken}; the case means {meant}", _STAGE, other)
    names = {"rms": "the root of the mean of squares", "l2": "the length"}
    kind = options.get("norm") or "rms"
    instead = "l2" if kind == "rms" else "rms"
    description = f"vectors are divided by {names[instead]}; the case means {names[kind]}"
    yield Alternative("norm-kind", description, _STAGE, with_options(posed, norm=instead))
    if "rotary_cos" in posed.inputs or "query_cos" in posed.inputs:
        is_late = bool(options.get("norm_after_rotation"))
        where, right = ("before", "after") if is_late else ("after", "before")
        description = f"the norm is taken {where} the rotation; the case means {right} it"
        yield Alternative("norm-order", description, _STAGE, with_options(posed, norm_after_rotation=not is_late))


def _epsilons(posed: AttentionProblem) -> Iterator[Alternative]:
    ignored = with_options(posed, epsilon=0.0)
    yield mistake("norm-epsilon-ignored", "epsilon is ignored", ignored, _STAGE)
    means = "inside" if (posed.options.get("norm") or "rms") == "rms" else "maximum"
    for name, where, description in _EPSILONS:
        if where != means:
            yield Alternative(name, description, _STAGE, with_options(posed, epsilon_at=where))


def _weights(posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield weights that are left out, that are taken for what is added to 1, or that are each other's."""
    weights = {name: posed.inputs[name] for name in ("query_norm", "key_norm")}
    ones = {name: np.ones_like(weight) for name, weight in weights.items()}
    yield mistake("norm-weight-ignored", "the weights of the norms are ignored", with_inputs(posed, **ones), _STAGE)
    given = {name: weight.astype(np.float64) for name, weight in weights.items() if (weight != 1).any()}
    if not given:
        return
    more = {name: 1 + weight for name, weight in given.items()}
    description = "weights of the norms are taken for 1 + w; the case means w"
    yield Alternative("norm-weight-plus-one", description, _STAGE, with_inputs(posed, **more))
    less = {name: weight - 1 for name, weight in given.items()}
    yield mistake("norm-weight-minus-one", "weights of the norms lack 1", with_inputs(posed, **less), _STAGE)
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
    yield mistake("norm-weights-swapped", description, with_inputs(posed, **swapped), _STAGE)


def conventions_of(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield what a case's options may be taken for, the likeliest first; nothing for an option that it has not.

    What else may go wrong than an option is in ``mistakes`` and ``replaced_steps``.
    """
    yield from _alignments(posed)
    yield from _masks(posed)
    yield from _fills(operation, posed)
    yield from _ignored(posed)
    yield from _windows(posed)
    yield from _key_lengths(posed)
    yield from _grouped_heads(operation, posed)
    yield from _scales(operation, posed)
    yield from _softcaps(operation, posed)
    yield from _rotary(operation, posed)
    yield from normalizations_of(posed)
    yield from _parts(operation, posed)


_ALIGNMENTS: Mapping[str, tuple[str, str]] = {
    "top_left": ("top-left", "i"),
    "bottom_right": ("bottom-right", "i + Lk - Lq"),
}


def _alignments(posed: AttentionProblem) -> Iterator[Alternative]:
    """Where positions count from: the first query stands at the first key, or the last query at the last key."""
    options = posed.options
    if options.get("is_causal"):
        subject, rule = "causality", "key j for query i iff j <= {}"
    elif options.get("window"):
        subject, rule = "the window", "query i stands at key {}"
    else:
        return
    own = query_offset(options, posed.inputs)
    default = "behind the past" if "past_key" in posed.inputs else "top-left"
    if "query_offsets" in posed.inputs:
        default = "at the offset of each batch entry"
    meant, *_ = _ALIGNMENTS.get(str(options.get("alignment")), (default,))
    for alignment, (name, position) in _ALIGNMENTS.items():
        other = with_options(without_input(posed, "query_offsets"), alignment=alignment)
        if query_offset(other.options, other.inputs) != own:
            description = f"{subject} is aligned {name} ({rule.format(position)}); the case means {meant}"
            yield Alternative(f"aligned-{name}", description, "masked", other)
            if options.get("is_causal") and options.get("window"):
                yield from _aligned_separately(posed, other, f"aligned-{name}", description)


def _aligned_separately(
    posed: AttentionProblem, other: AttentionProblem, name: str, description: str
) -> Iterator[Alternative]:
    """Yield one of causality and window aligned otherwise, the other one as the case means it."""
    queries, keys = queries_and_keys(posed)
    positions = np.arange(queries)[:, np.newaxis] + query_offset(other.options, other.inputs)
    left, right = posed.options["window"]
    behind = np.arange(keys) - positions
    within = np.full(behind.shape, fill_value=True)
    within &= left is None or behind >= -left
    within &= right is None or behind <= right
    yield Alternative(name, description, "masked", with_allowed(with_options(posed, is_causal=False), behind <= 0))
    yield Alternative(name, description, "masked", with_allowed(with_options(posed, window=None), within))


def _masks(posed: AttentionProblem) -> Iterator[Alternative]:
    mask = posed.inputs.get("mask")
    if mask is not None:
        description = "the mask is read as True = may not attend; the case means True = may attend"
        yield Alternative("mask-inverted", description, "masked", with_inputs(posed, mask=~mask))
        bias = posed.inputs["bias"] + mask if "bias" in posed.inputs else mask.astype(np.float64)
        description = "the mask is added to the scores as the numbers 0 and 1"
        yield mistake("mask-added", description, with_inputs(posed, mask=np.ones_like(mask), bias=bias))


def _fills(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield what else may stand in the place of a forbidden score: minus infinity, the score and the fill, another."""
    fill = posed.options.get("mask_fill")
    if fill is None:
        return
    description = f"a forbidden score is minus infinity; the case means {fill:.6g} in its place"
    yield Alternative("fill-minus-infinity", description, "masked", with_options(posed, mask_fill=None))
    plain = canonical_form(operation, posed.options, posed.inputs)
    kept = Problem.as_given(operation, plain.options, plain.inputs).kept(
        scores_shape(operation, plain.options, plain.inputs)
    )
    if kept is not None and not np.isneginf(posed.inputs.get("bias", np.zeros(1))).any():
        bias = np.where(kept, 0.0, float(plain.options.get("mask_fill", -np.inf))) + posed.inputs.get("bias", 0.0)
        inputs = {name: array for name, array in plain.inputs.items() if name != "mask"} | {"bias": bias}
        options = {name: each for name, each in plain.options.items() if name not in ("is_causal", "mask_fill")}
        description = f"{fill:.6g} is added to a forbidden score; the case means it in its place"
        yield mistake("fill-added", description, AttentionProblem(options, inputs), "masked", {"masked": "biased"})
    if has_scale(operation, posed):
        scaled = with_options(posed, mask_fill=fill * scale_of(operation, posed))
        yield mistake("fill-scaled", "the fill is put in place before the scores are scaled", scaled)
    inverse = with_options(posed, mask_fill=1 / fill) if fill else posed
    if fill and abs(math.log10(abs(fill))) >= 1:
        yield mistake("fill-inverted", f"the fill is {1 / fill:.6g}: the sign of an exponent is lost", inverse)


def _ignored(posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield the readings in which one input or option has no effect, for those that the specification lists."""
    for name, spec in IGNORABLE.items():
        if name not in posed.inputs and not posed.options.get(name):
            continue
        stage, aliases = spec.asks_for or "weights", {}  # what asks for no stage of its own is part of the softmax
        if isinstance(spec, OptionSpec):
            other = with_options(posed, **{name: False if spec.type is bool else None})
            if stage == "masked":
                other = with_mask(other)
            else:
                aliases = {stage: LOGITS[LOGITS.index(stage) - 1]}
        elif spec.folds_into == "mask":
            other = without_input(with_mask(posed), name)
        else:
            other = with_inputs(posed, **{name: np.full_like(posed.inputs[name], spec.neutral)})
        called = spec.called or name
        verb = "are" if isinstance(spec, InputSpec) and (spec.whole or spec.adds_key) else "is"
        slug = called.removeprefix("the ").replace(" ", "-")
        yield mistake(f"{slug}-ignored", f"{called} {verb} ignored", other, stage, aliases)


def _rotary(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield other pairs, directions and positions of a rotary embedding, and what may be left unrotated."""
    if "rotary_cos" not in posed.inputs:
        return
    cos, sin = posed.inputs["rotary_cos"], posed.inputs["rotary_sin"]
    # What follows from the wrong stage is wrong, too, and stands before it in the order of stages.
    part = "normalized" if posed.options.get("norm_after_rotation") else "rotated"
    stage, neighbours, halves = f"{part}_query", "neighbours", "elements that are R apart"
    taken, meant = (halves, neighbours) if posed.options.get("rotary_interleaved") else (neighbours, halves)
    other = with_options(posed, rotary_interleaved=taken == neighbours)
    yield Alternative("rotary-pairs", f"the rotary embedding rotates {taken}; the case means {meant}", stage, other)
    nothing = with_inputs(posed, rotary_cos=np.ones_like(cos), rotary_sin=np.zeros_like(sin))
    yield mistake("rotary-ignored", "the rotary embedding is ignored", nothing, stage)
    yield mistake(
        "rotary-backwards", "the rotary embedding turns backwards", with_inputs(posed, rotary_sin=-sin), stage
    )
    past = query_offset({}, posed.inputs)
    if past and "query_offsets" not in posed.inputs:
        late = {
            name: np.concatenate([table[:past], table])[: len(table)] for name, table in (("cos", cos), ("sin", sin))
        }
        described = "positions of the rotary embedding do not count the past"
        yield mistake(
            "rotary-without-past", described, with_inputs(posed, **{f"rotary_{n}": t for n, t in late.items()}), stage
        )
    plain = canonical_form(operation, posed.options, posed.inputs)
    kept = {name: posed.options[name] for name in ("empty_rows",) if name in posed.options}
    if "query_offsets" in posed.inputs:
        tables = rows_of_tables(without_input(posed, "query_offsets").inputs)
        found = AttentionProblem({**plain.options, **kept}, {**plain.inputs, **tables})
        described = "positions of the rotary embedding do not count the query offsets"
        yield mistake("rotary-without-offsets", described, found, stage)
    for name, left in (("query", "key"), ("key", "query")):
        alone = {
            f"{left}_cos": np.ones_like(plain.inputs[f"{left}_cos"]),
            f"{left}_sin": np.zeros_like(plain.inputs[f"{left}_sin"]),
        }
        found = AttentionProblem({**plain.options, **kept}, {**plain.inputs, **alone})
        yield mistake(
            f"rotary-of-{name}-alone", f"the rotary embedding rotates the {name} alone", found, f"{part}_{left}"
        )


def _windows(posed: AttentionProblem) -> Iterator[Alternative]:
    window = posed.options.get("window")
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
        yield Alternative(name, description, "masked", with_options(posed, window=other))


def _key_lengths(posed: AttentionProblem) -> Iterator[Alternative]:
    lengths = posed.inputs.get("key_lengths")
    if lengths is None:
        return
    for moved, name, how in ((1, "long", "the last key's index"), (-1, "short", "one less")):
        description = f"a key length is taken for {how}; the case means the number of keys"
        other = with_inputs(posed, key_lengths=lengths + moved)
        yield Alternative(f"key-lengths-one-too-{name}", description, "masked", other)


def _grouped_heads(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    if operation == "attention":
        heads, shared = posed.inputs["query"].shape[-3], posed.inputs["key"].shape[-3]
        names: tuple[str, ...] = ("key", "value", "key_factor", "value_factor")
        axis = -3
    elif operation == "multi_head_attention":
        heads = int(posed.options["heads"])
        shared = int(posed.options.get("kv_heads") or heads)
        names, axis = ("key_weight", "value_weight", "key_bias", "value_bias"), -1
    else:
        return
    if shared in (1, heads):
        return
    order = np.arange(heads) % shared
    tiled = {name: _heads_of(posed.inputs[name], order, shared, axis) for name in names if name in posed.inputs}
    by_head = {"key_norm": -2, "past_key": -3, "past_value": -3}
    tiled |= {name: posed.inputs[name].take(order, at) for name, at in by_head.items() if name in posed.inputs}
    description = "query head h takes key and value head h % Hkv (tiled); the case means head h // (H / Hkv) (repeated)"
    options = {"kv_heads": heads} if "kv_heads" in posed.options else {}
    yield Alternative("heads-tiled", description, "raw_scores", with_options(with_inputs(posed, **tiled), **options))


def _heads_of(array: Any, order: Any, heads: int, axis: int) -> Any:
    """Take heads in another order: whole slices of an axis, or parts of the last one."""
    if axis != -1:
        return array.take(order, axis)
    return array.reshape(*array.shape[:-1], heads, -1)[..., order, :].reshape(*array.shape[:-1], -1)


def _scales(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    if not has_scale(operation, posed):
        return
    own = scale_of(operation, posed)
    for scale, names in other_scales(operation, posed):
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
            changed = with_options(posed, scale=scale)
            yield Alternative(
                name, description, "scores", changed, Verdict.NUMERIC, answer=f"scale {scale!r}", unsure=says_all
            )


_LATE_SOFTCAP = "the softcap is applied after {}; the case means before it"


def _softcaps(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    if posed.options.get("softcap") is None:
        return
    if OPERATIONS[operation].has_gradients:
        yield from _softcap_of_whole_rows(operation, posed)
        return
    for stage, what, is_there in (
        ("biased", "the bias", "bias" in posed.inputs),
        ("masked", "the mask", is_masked(posed)),
    ):
        if is_there:
            description, other = _LATE_SOFTCAP.format(what), with_options(posed, softcap_follows=stage)
            yield Alternative(f"softcap-after-{stage}", description, "capped", other)
            # Who has capped the scores for nothing before returns the late softcap under the later stage's name.
            yield Alternative(f"softcap-after-{stage}", description, stage, other, stage_aliases={stage: "capped"})


def _softcap_of_whole_rows(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield a softcap behind a mask that forbids all keys of a query or none: such rows have equal logits, -softcap.

    Behind any other mask a gradient is that of no problem.
    """
    allowed = allowed_keys(operation, posed)
    if allowed is not None and (allowed.any(axis=-1) == allowed.all(axis=-1)).all():
        other, description = with_options(posed, empty_rows="uniform"), _LATE_SOFTCAP.format("the mask")
        yield Alternative("softcap-after-masked", description, "weights", other)


def _parts(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield another base of log-sum-exps, and other weights of parts than those that follow from them."""
    if not OPERATIONS[operation].has_parts:
        return
    meant = posed.options.get("lse_base") or "e"
    taken = "2" if meant == "e" else "e"
    description = f"log-sum-exps are read as logarithms in base {taken}; the case means base {meant}"
    yield Alternative(f"lse-base-{taken}", description, "weights", with_options(posed, lse_base=taken))
    log_sum_exps = posed.inputs["log_sum_exps"]
    alike = np.where(np.isneginf(log_sum_exps), log_sum_exps, np.zeros((), log_sum_exps.dtype))
    description = "the outputs of the parts are averaged, whatever their log-sum-exps"
    yield mistake("parts-averaged", description, with_inputs(posed, log_sum_exps=alike), "weights")
    if len(log_sum_exps) > 1:
        shorter = log_sum_exps.copy()
        shorter[-1] = -np.inf
        yield mistake("last-part-lost", "the last part is lost", with_inputs(posed, log_sum_exps=shorter), "weights")
        turned = with_inputs(posed, outputs=posed.inputs["outputs"][::-1], log_sum_exps=log_sum_exps)
        yield mistake("parts-reversed", "the outputs of the parts are taken in reverse order", turned, "output")


def is_masked(posed: AttentionProblem) -> bool:
    """Whether anything says who may attend to whom."""
    asking = ASKED_BY["masked"]
    return bool(asking & posed.inputs.keys() or any(posed.options.get(name) for name in asking))


def _shown(window: Any) -> str:
    return f"[{', '.join('null' if end is None else str(end) for end in window)}]"
