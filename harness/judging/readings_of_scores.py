"""Readings of scores and of what they are made of: scales, biases, softcaps, rotations, norms, heads and projections.

Normalised queries and keys may be taken for others: with no norm, another one, of other elements, elsewhere, or with
other weights. Latent vectors and codes (``readings_of_codes.py``) are read otherwise before they are lowered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attncheck.judging.alternatives import (
    Change,
    Changed,
    Form,
    Number,
    Reading,
    allowed_keys,
    convention,
    default_scale,
    exchanged,
    folded,
    has_default_scale,
    has_scale,
    identity,
    numbered,
    of_first,
    only,
    queries_and_keys,
    scale_of,
    scales_in_words,
    set_to,
    toggled,
    transposed,
    widths_of,
    with_each,
    with_input,
    without,
)
from attncheck.judging.readings_of_codes import CODE_READINGS
from attncheck.judging.readings_of_entries import has_heads
from attncheck.reading.lowering import Problem, query_offset, rows_of_tables
from attncheck.spec import (
    ASKED_BY,
    LOGITS,
    MEANS,
    OF_CODES,
    OPERATIONS,
    PROJECTIONS,
    QUERY_KEY_VALUE,
)

# Scores, bias and softcap.


def _scale(change: Callable[[float, Mapping[str, int]], float | None]) -> Callable[[Problem], float | None]:
    """Make a scale of the right one and the widths, for problems that have any."""

    def number(problem: Problem) -> float | None:
        return change(scale_of(problem), widths_of(problem)) if has_scale(problem) else None

    return number


def _root_of(name: str) -> Callable[[float, Mapping[str, int]], float | None]:
    return lambda own, widths: 1 / math.sqrt(widths[name]) if name in widths else None


def _root_of_times(number: int) -> Callable[[float, Mapping[str, int]], float | None]:
    return lambda own, widths: 1 / math.sqrt(number * widths["D"])


def _times_default(problem: Problem) -> float | None:
    return scale_of(problem) / math.sqrt(widths_of(problem)["D"])


def _if_given(change: Callable[[Problem], float | None], *, given: bool = True) -> Callable[[Problem], float | None]:
    """Return a number for problems that give a scale, or that have one and do not."""

    def number(problem: Problem) -> float | None:
        is_given = problem.options.get("scale") is not None
        return change(problem) if has_scale(problem) and is_given is given else None

    return number


_SCALES: Sequence[Number] = (
    ("scale-default", "the default 1/sqrt(D)", _if_given(_scale(_root_of("D")))),
    ("scale-default", "1/sqrt(D)", _if_given(_scale(_root_of("D")), given=False)),
    ("scale-times-default", "the given one times 1/sqrt(D)", _if_given(_times_default)),
    ("scale-times-default", "the right one times 1/sqrt(D)",
     _if_given(lambda problem: None if has_default_scale(problem) else _times_default(problem), given=False)),
    ("scale-one", "", _scale(lambda own, widths: 1.0)),
    ("scale-twice", "twice the same factor", _scale(lambda own, widths: own * own)),
    ("scale-root", "the root of the right one, as if one of query and key had it",
     _scale(lambda own, widths: math.sqrt(own) if own > 0 else None)),
    ("scale-inverse-width", "1/D", _scale(lambda own, widths: 1 / widths["D"])),
    ("scale-root-of-width", "sqrt(D)", _scale(lambda own, widths: math.sqrt(widths["D"]))),
    *((f"scale-inverse-root-of-{name.replace(' ', '')}", f"1/sqrt({name})", _scale(_root_of(name)))
      for name in ("Dv", "H D", "E", "C + Dr", "Dn", "C")),
    *((f"scale-inverse-root-of-{number}D", f"1/sqrt({number}D)", _scale(_root_of_times(number))) for number in (2, 3)),
    ("scale-doubled", "twice as large", _scale(lambda own, widths: 2 * own)),
    ("scale-halved", "half as large", _scale(lambda own, widths: own / 2)),
    ("scale-negated", "the negative", _scale(lambda own, widths: -own)),
    ("scale-times-log2e", "log2(e) times as large", _scale(lambda own, widths: own / math.log(2))),
    ("scale-times-ln2", "ln(2) times as large", _scale(lambda own, widths: own * math.log(2))),
)  # fmt: skip


_AS_DEFAULTS: Mapping[str, str] = {"": "1", "twice the same factor": "1/D"}
"""Numbers that follow from the shapes where no scale is given; others say so in their words."""


def _with_scale(problem: Problem, scale: float, words: str) -> Form:
    taken, meant = scales_in_words(scale, scale_of(problem))
    default = words if "sqrt(" in words or words == "1/D" else _AS_DEFAULTS.get(words)
    shared = default_scale(default) if default and has_default_scale(problem) else ""
    return Form(problem.with_options(scale=scale), {"taken": taken, "meant": meant}, shared=shared)


def _bias_times(problem: Problem, factor: float, words: str) -> Sequence[Form]:
    is_possible = factor > 0 or np.isfinite(problem.inputs["bias"]).all()
    return [Form(with_bias_times(problem, factor))] if is_possible else []


def with_bias_times(problem: Problem, factor: float) -> Problem:
    """Multiply what is finite of a bias: minus infinity stays what it is."""
    return problem.with_inputs(bias=_times(problem.inputs["bias"], factor))


def _times(array: Any, factor: float) -> Any:
    array = array.astype(np.float64)
    with np.errstate(over="ignore"):  # the lowest number of a dtype may become minus infinity, as it does in base 2
        return np.where(np.isfinite(array), np.where(np.isfinite(array), array, 0.0) * factor, array)


_BIASES: Sequence[Number] = (
    ("bias-scaled", "the bias is added before the scores are scaled", _scale(lambda own, widths: own)),
    ("bias-unscaled", "the bias is divided by the scale", _scale(lambda own, widths: 1 / own if own else None)),
    ("bias-negated", "the bias is subtracted", lambda problem: -1.0),
    ("bias-twice", "the bias is added twice", lambda problem: 2.0),
    ("bias-times-log2e", "the bias is multiplied by log2(e), as before an exponential in base 2",
     lambda problem: 1 / math.log(2)),
    ("bias-times-ln2", "the bias is added in base 2: it lacks the factor log2(e)", lambda problem: math.log(2)),
)  # fmt: skip


def _softcap(change: Callable[[float, Problem], float]) -> Callable[[Problem], float | None]:
    return lambda problem: change(float(problem.options["softcap"]), problem) if has_scale(problem) else None


_SOFTCAPS: Sequence[Number] = (
    (
        "softcap-of-raw-scores",
        "on scores before they are scaled",
        _softcap(lambda cap, problem: cap * scale_of(problem)),
    ),
    ("softcap-doubled", "twice as large", _softcap(lambda cap, problem: 2 * cap)),
    ("softcap-halved", "half as large", _softcap(lambda cap, problem: cap / 2)),
)


def _with_softcap(problem: Problem, softcap: float, words: str) -> Sequence[Form]:
    words_of = {"taken": f"{softcap:.6g}", "meant": f"{problem.options['softcap']:.6g}"}
    return [Form(problem.with_options(softcap=softcap), words_of)] if softcap > 0 else []


_LATE_SOFTCAP = "the softcap is applied after {}; the case means before it"


def _softcap_after(stage: str, is_there: Callable[[Problem], bool]) -> Change:
    """Cap later; who has capped the scores for nothing before returns the late softcap under the later stage's name."""

    def change(problem: Problem) -> Sequence[Form]:
        if OPERATIONS[problem.operation].has_gradients or not is_there(problem):
            return []
        other = problem.with_options(softcap_follows=stage)
        return [Form(other), Form(other, stage=stage, stage_aliases={stage: "capped"})]

    return change


def _softcap_of_whole_rows(problem: Problem) -> Form | None:
    """Cap behind a mask that forbids all keys of a query or none: such rows have equal logits, -softcap.

    Behind any other mask a gradient is that of no problem.
    """
    if not OPERATIONS[problem.operation].has_gradients:
        return None
    allowed = allowed_keys(problem)
    if allowed is None or not (allowed.any(axis=-1) == allowed.all(axis=-1)).all():
        return None
    return Form(problem.with_options(empty_rows="uniform"), stage="weights")


def is_masked(problem: Problem) -> bool:
    """Whether anything says who may attend to whom."""
    asking = ASKED_BY["masked"]
    return bool(asking & problem.inputs.keys() or any(problem.options.get(name) for name in asking))


def _missing(tile: int, keys: int) -> int:
    return -keys % tile


def _with_zero_scores(count: Callable[[int], int]) -> Change:
    """Let further keys of score 0 and value 0 take part, as a tile does whose keys behind the last are not masked."""

    def change(problem: Problem) -> Problem | None:
        if "sinks" not in OPERATIONS[problem.operation].inputs or "sinks" in problem.inputs or not has_heads(problem):
            return None
        number = count(queries_and_keys(problem)[1])
        heads = problem.inputs["query"].shape[-3]
        return problem.with_inputs(sinks=np.full(heads, math.log(number))) if number > 0 else None

    return change


_ZERO_SCORES: Sequence[tuple[str, str, Callable[[int], int]]] = (
    ("one", "one further key", lambda keys: 1),
    *((f"to-tiles-of-{tile}", f"further keys, up to a multiple of {tile},", partial(_missing, tile))
      for tile in (8, 16, 32, 64, 128)),
)  # fmt: skip
"""Names, words, and how many further keys there are beside so many."""
_DECLARED_AS = {
    "scale-one": ("scale", "1"),
    "scale-inverse-width": ("scale", "1/D"),
    "bias-scaled": ("bias", "before_scale"),
}


def _declared(rows: Iterable[Reading]) -> Iterator[Reading]:
    """Yield rows of numbers, those that somebody may declare with their declaration."""
    return (replace(row, option=_DECLARED_AS.get(row.name)) for row in rows)


_SCORES = (
    convention("softcap-after-biased", _LATE_SOFTCAP.format("the bias"),
               _softcap_after("biased", lambda problem: "bias" in problem.inputs), "softcap", "capped",
               option=("softcap", "behind_bias")),
    convention("softcap-after-masked", _LATE_SOFTCAP.format("the mask"), _softcap_after("masked", is_masked),
               "softcap", "capped", option=("softcap", "behind_mask")),
    convention("softcap-after-masked", _LATE_SOFTCAP.format("the mask"), _softcap_of_whole_rows, "softcap",
               option=("softcap", "behind_mask")),
    *numbered(lambda words: f"the softcap is {{taken}}, {words}; the case means {{meant}}", "softcap", _SOFTCAPS,
              _with_softcap, lambda problem: float(problem.options["softcap"]), of="softcap", stage="capped"),
    Reading("sinks-twice", "the sinks count twice",
            with_input("sinks", lambda sinks: sinks.astype(np.float64) + math.log(2)), "sinks", "weights"),
    Reading("sinks-scaled", "the sinks are scaled as scores are",
            lambda problem: problem.with_inputs(
                sinks=_times(problem.inputs["sinks"], scale_of(problem) if has_scale(problem) else 1.0)
            ), "sinks", "weights"),
    *(
        Reading(f"zero-score-keys-{slug}", f"as if {words} of score 0 took part: the weights add up to less than 1",
                _with_zero_scores(count), stage="weights")
        for slug, words, count in _ZERO_SCORES
    ),
    Reading("score-weight-ignored", "the weight of the score is ignored", with_input("weight", identity), "weight",
            "scores"),
    Reading("score-bias-negated", "the bias of the score is subtracted", with_input("score_bias", np.negative),
            "score_bias", "scores"),
    *_declared(numbered(lambda words: f"the {{stage}} is exactly that of scale {{taken}}{words and f', {words},'} "
                        "instead of {meant}", "scale", _SCALES, _with_scale, scale_of, stage="scores")),
    *_declared(numbered(str, "bias times", _BIASES, _bias_times, of="bias", stage="biased")),
    *(
        Reading(f"score-{name.replace('_', '-')}-transposed",
                f"the {name.replace('_', ' ')} of the score is transposed", transposed(name), of, "scores")
        for name, of in (("weight", "weight"), ("query_weight", "score_vector"), ("key_weight", "score_vector"))
    ),
    Reading("score-weights-exchanged", "the weights of query and key are exchanged",
            exchanged("query_weight", "key_weight"), "score_vector", "scores"),
    Reading("score-scaled", "the additive score is divided by sqrt(D)",
            lambda problem: problem.with_inputs(
                score_vector=problem.inputs["score_vector"] / math.sqrt(problem.inputs["query"].shape[-1])
            ), "score_vector", "scores"),
    Reading("score-scaled", "the score is divided by sqrt(D)", lambda problem: with_each(
        ("weight", "score_bias"), lambda array: array / math.sqrt(problem.inputs["query"].shape[-1])
    )(problem), "weight", "scores"),
    Reading("score-bias-missing", "the bias of the score is missing", without("score_bias"), "score_bias", "scores"),
)  # fmt: skip


# Rotary embeddings and norms of queries and keys.


def _rotated(change: Change, of: str = "query") -> Change:
    """Change a rotation; what follows from the wrong stage is wrong, too, and stands before it in their order."""

    def changed(problem: Problem) -> Form | None:
        found = change(problem)
        form = Form(found) if isinstance(found, Problem) else found
        assert form is None or isinstance(form, Form)
        part = "normalized" if problem.options.get("norm_after_rotation") else "rotated"
        return form and replace(form, stage=f"{part}_{of}")

    return changed


def _rotated_without_past(problem: Problem) -> Problem | None:
    past = query_offset({}, problem.inputs)
    if not past or "query_offsets" in problem.inputs:
        return None
    tables = {name: problem.inputs[name] for name in ("rotary_cos", "rotary_sin")}
    return problem.with_inputs(**{n: np.concatenate([each[:past], each])[: len(each)] for n, each in tables.items()})


def _rotated_at(offsets: Changed) -> Changed:
    """Rotate as if queries of each batch entry stood elsewhere, and mask as is meant."""

    def change(problem: Problem) -> Problem | None:
        other = offsets(problem) if {"rotary_cos", "query_offsets"} <= problem.inputs.keys() else None
        return None if other is None else folded(problem).with_inputs(**rows_of_tables(other.inputs))

    return change


def _past_again(problem: Problem) -> Problem | None:
    past = query_offset({}, problem.inputs)
    if not past:
        return None
    plain = folded(problem)
    tables = {name: plain.inputs[f"key_{name}"].copy() for name in ("cos", "sin")}
    for name, table in tables.items():
        table[:past] = problem.inputs[f"rotary_{name}"][:past]
    return plain.with_inputs(**{f"key_{name}": table for name, table in tables.items()})


def _rotated_alone(left: str) -> Change:
    def change(problem: Problem) -> Problem:
        plain = folded(problem)
        cos, sin = plain.inputs[f"{left}_cos"], plain.inputs[f"{left}_sin"]
        return plain.with_inputs(**{f"{left}_cos": np.ones_like(cos), f"{left}_sin": np.zeros_like(sin)})

    return _rotated(change, left)


_ROTATIONS = (
    convention("rotary-pairs", "the rotary embedding rotates {taken}; the case means {meant}", _rotated(toggled(
                   "rotary_interleaved", {False: "elements that are R apart", True: "neighbours"}
               )), "rotary_cos"),
    Reading("rotary-ignored", "the rotary embedding is ignored", _rotated(
        lambda problem: problem.with_inputs(rotary_cos=np.ones_like(problem.inputs["rotary_cos"]),
                                            rotary_sin=np.zeros_like(problem.inputs["rotary_sin"]))), "rotary_cos"),
    Reading("rotary-backwards", "the rotary embedding turns backwards",
            _rotated(with_input("rotary_sin", np.negative)), "rotary_cos"),
    Reading("rotary-without-past", "positions of the rotary embedding do not count the past",
            _rotated(_rotated_without_past), "rotary_cos"),
    Reading("rotary-without-offsets", "positions of the rotary embedding do not count the query offsets",
            _rotated(_rotated_at(without("query_offsets"))), "rotary_cos"),
    Reading("rotary-of-past-again", "what is cached is rotated again", _rotated(_past_again, "key"), "rotary_cos"),
    Reading("rotary-of-first-batch-entry", "queries of all batch entries are rotated by the first one's offset",
            _rotated(only(lambda problem: np.ptp(problem.inputs["query_offsets"]), _rotated_at(
                with_input("query_offsets", lambda offsets: np.broadcast_to(offsets[:1], offsets.shape))
            ))), "query_offsets"),
    *(
        Reading(f"rotary-of-{name}-alone", f"the rotary embedding rotates the {name} alone", _rotated_alone(left),
                "rotary_cos")
        for name, left in (("query", "key"), ("key", "query"))
    ),
)  # fmt: skip


def _epsilon_at(where: str) -> Change:
    meant = {"rms": "inside", "l2": "maximum"}
    return only(lambda problem: meant[problem.options.get("norm") or "rms"] != where, set_to(epsilon_at=where))


def _other_epsilon(change: Callable[[float], float]) -> Changed:
    def changed(problem: Problem) -> Problem | None:
        own = problem.options.get("epsilon") or 1e-6
        return None if change(own) == own else problem.with_options(epsilon=change(own))

    return changed


def _centred(problem: Problem) -> Problem | None:
    if problem.options.get("norm_after_rotation") and "rotary_cos" in problem.inputs:
        return None  # what is rotated is no input
    axes = (-3, -1) if problem.options.get("norm_over") == "full" else -1
    arrays = {name: problem.inputs[name].astype(np.float64) for name in ("query", "key")}
    return problem.with_inputs(**{n: each - each.mean(axis=axes, keepdims=True) for n, each in arrays.items()})


def _norm_weights(change: Callable[[Any], Any]) -> Change:
    """Change weights of norms that are not 1."""

    def changed(problem: Problem) -> Problem | None:
        weights = {name: problem.inputs[name].astype(np.float64) for name in ("query_norm", "key_norm")}
        given = {name: change(weight) for name, weight in weights.items() if (weight != 1).any()}
        return problem.with_inputs(**given) if given else None

    return changed


def _norm_weights_swapped(problem: Problem) -> Problem | None:
    query, key = problem.inputs["query_norm"], problem.inputs["key_norm"]
    if (query == 1).all() and (key == 1).all():
        return None
    if all((weight == weight[:1]).all() for weight in (query, key)):
        query, key = np.broadcast_to(key[:1], query.shape), np.broadcast_to(query[:1], key.shape)
        return problem.with_inputs(query_norm=query, key_norm=key)
    return problem.with_inputs(query_norm=key, key_norm=query) if query.shape == key.shape else None


_NORMS = tuple(
    replace(reading, of="query_norm", stage="normalized_key" if reading.name == "norm-of-query-alone" else
            "normalized_query")
    for reading in (
        convention("norm-width", "a norm is taken of {taken}; the case means {meant}",
                   toggled("norm_over", {"head": "each head", "full": "all heads"})),
        convention("norm-kind", "vectors are divided by {taken}; the case means {meant}",
                   toggled("norm", {"rms": "the root of the mean of squares", "l2": "the length"})),
        convention("norm-order", "the norm is taken {taken} the rotation; the case means {meant} it",
                   only(lambda problem: problem.inputs.keys() & {"rotary_cos", "query_cos"},
                        toggled("norm_after_rotation", {False: "before", True: "after"}))),
        *(
            convention(f"norm-epsilon-{name}", text, _epsilon_at(where))
            for name, where, text in (
                ("outside", "outside", "epsilon is added to the root, not under it"),
                ("inside", "inside", "epsilon is added under the root"),
                ("least", "maximum", "epsilon is taken for the least root"),
                ("least-square", "square", "epsilon is taken for the least square: sqrt(max(x.x, epsilon))"),
            )
        ),
        convention("norm-weight-plus-one", "weights of the norms are taken for 1 + w; the case means w",
                   _norm_weights(lambda weight: 1 + weight)),
        *(
            Reading(f"norm-epsilon-{name}", f"epsilon is {words}", _other_epsilon(change))
            for name, words, change in (
                ("of-1e-5", "1e-5, whatever is given", lambda epsilon: 1e-5),
                ("at-least-1e-4", "at least 1e-4", lambda epsilon: max(epsilon, 1e-4)),
            )
        ),
        Reading("norm-of-differences", "the mean is subtracted before the norm, as a layer norm does", _centred),
        Reading("norm-of-query-alone", "the query alone is normalised", set_to(unnormalized="key")),
        Reading("norm-of-key-alone", "the key alone is normalised", set_to(unnormalized="query")),
        Reading("norm-ignored", "query and key are not normalised", set_to(unnormalized="both")),
        Reading("norm-epsilon-ignored", "epsilon is ignored", set_to(epsilon=0.0)),
        Reading("norm-weight-ignored", "the weights of the norms are ignored", _norm_weights(np.ones_like)),
        Reading("norm-weight-minus-one", "weights of the norms lack 1", _norm_weights(lambda weight: weight - 1)),
        Reading("norm-weights-swapped", "the norms of query and key have each other's weights", _norm_weights_swapped),
    )
)  # fmt: skip


# Latent vectors, and scales of 8 bits, before they are widened.


def _viewed(weight: Any) -> Any:
    """Read (C, H, D) in memory as (H, C, D)."""
    return weight.swapaxes(0, 1).reshape(weight.shape)


_LATENTS = (
    Reading("rotated-part-ignored", "the part that is rotated is left out of the scores",
            with_input("key_rotary", np.zeros_like), "key_rotary", LOGITS[0]),
    Reading("rotated-part-alone", "the part that is not rotated is left out of the scores",
            with_input("key_projection", np.zeros_like), "key_rotary", LOGITS[0]),
    Reading("rotated-part-scaled-twice", "the part that is rotated is scaled twice",
            lambda called: called.with_inputs(key_rotary=called.inputs["key_rotary"] * scale_of(called.lowered())),
            "key_rotary", LOGITS[0]),
    Reading("rotated-part-one-position-late", "the part that is rotated is that of the position before",
            with_input("key_rotary", lambda each: np.roll(each, 1, axis=-2)), "key_rotary", LOGITS[0]),
    Reading("rotated-query-of-first-head", "the part of the query that is rotated is the first head's for all",
            of_first("query_rotary", -3), "query_rotary", LOGITS[0]),
    *(
        Reading(f"{name}-projection-{slug}", says.format(name=name), change, f"{name}_projection", stage)
        for name, stage in (("key", LOGITS[0]), ("value", MEANS[0]))
        for slug, says, change in (
            ("of-next-head", "the {name} projection of the next head is taken",
             with_input(f"{name}_projection", lambda weight: np.roll(weight, -1, 0))),
            ("of-first-head", "the {name} projection of the first head is taken for all",
             of_first(f"{name}_projection", -3)),
            ("transposed", "the {name} projection is transposed", transposed(f"{name}_projection")),
            ("viewed", "the {name} projection is viewed as heads first, without a transposition",
             with_input(f"{name}_projection", _viewed)),
            ("ignored", "latent vectors are taken for the {name}s: their projection is left out",
             with_input(f"{name}_projection", identity)),
        )
    ),
    Reading("latent-projections-swapped", "the projections of keys and values are swapped",
            exchanged("key_projection", "value_projection"), "key_projection", LOGITS[0]),
)  # fmt: skip


# Heads and projections.


def _tiled(problem: Problem) -> Problem | None:
    if problem.operation == "attention":
        heads, shared = problem.inputs["query"].shape[-3], problem.inputs["key"].shape[-3]
        names: tuple[str, ...] = ("key", "value", *OF_CODES)
        axis = -3
    elif _projects(problem):
        heads, shared = _heads_of(problem).values()
        names, axis = ("key_weight", "value_weight", "key_bias", "value_bias"), -1
    else:
        return None
    if shared in (1, heads):
        return None
    order = np.arange(heads) % shared
    tiled = {name: _taken(problem.inputs[name], order, shared, axis) for name in names if name in problem.inputs}
    by_head = {"key_norm": -2, "past_key": -3, "past_value": -3}
    tiled |= {name: problem.inputs[name].take(order, at) for name, at in by_head.items() if name in problem.inputs}
    options = {"kv_heads": heads} if "kv_heads" in problem.options else {}
    return problem.with_inputs(**tiled).with_options(**options)


def _heads_of(problem: Problem) -> dict[str, int]:
    """Return how many heads projected queries, and projected keys and values have."""
    heads = int(problem.options["heads"])
    return {"query": heads, "key": int(problem.options.get("kv_heads") or heads)}


def _taken(array: Any, order: Any, heads: int, axis: int) -> Any:
    """Take heads in another order: whole slices of an axis, or parts of the last one."""
    if axis != -1:
        return array.take(order, axis)
    return array.reshape(*array.shape[:-1], heads, -1)[..., order, :].reshape(*array.shape[:-1], -1)


def _pasts(problem: Problem) -> tuple[str, ...]:
    return ("", "past_") if "past_key" in problem.inputs else ("",)


def _read_as(read: str, wrong: str) -> Change:
    def change(problem: Problem) -> Problem | None:
        inputs = problem.inputs
        if not has_heads(problem) or inputs["key"].shape != inputs["value"].shape:
            return None
        return problem.with_inputs(**{f"{past}{read}": inputs[f"{past}{wrong}"] for past in _pasts(problem)})

    return change


def _projections(problem: Problem, names: Iterable[str], change: Callable[[Any, int], Any]) -> dict[str, Any]:
    """Change weights and biases of projections, seen as heads side by side, (..., H, D), given how many heads."""
    others, counts = dict[str, Any](), _heads_of(problem)
    for part in (f"{name}_{kind}" for name in names for kind in ("weight", "bias")):
        if part in problem.inputs:
            array, heads = problem.inputs[part], counts["query" if part.startswith("query") else "key"]
            others[part] = change(array, heads).reshape(*array.shape[:-1], -1)
    return others


def _of_next_head(read: str) -> Change:
    """Read what is of the next head: whole slices, or parts of what projections give."""

    def rolled(array: Any, heads: int) -> Any:
        return _taken(array, np.roll(np.arange(heads), -1), heads, -1)

    def change(problem: Problem) -> Problem | None:
        others, names = dict[str, Any](), [f"past_{read}"]
        if _projects(problem):
            others = _projections(problem, [read], rolled)
        elif has_heads(problem):
            names.append(read)
        else:
            return None
        others |= {name: np.roll(problem.inputs[name], -1, -3) for name in names if name in problem.inputs}
        return problem.with_inputs(**others)

    return change


def _dealt_out(problem: Problem) -> Problem:
    """Give head h the columns h, h + H, h + 2 H, ..."""
    return problem.with_inputs(
        **_projections(
            problem,
            QUERY_KEY_VALUE,
            lambda array, heads: np.swapaxes(array.reshape(*array.shape[:-1], -1, heads), -1, -2),
        )
    )


def _merged_in_reverse(problem: Problem) -> Problem:
    weight, heads = problem.inputs["output_weight"], _heads_of(problem)["query"]
    other = weight.reshape(heads, -1, weight.shape[-1])[::-1].reshape(weight.shape)
    return problem.with_inputs(output_weight=other)


def _projects(problem: Problem) -> bool:
    return OPERATIONS[problem.operation].has_projections


def _biased_before(name: str) -> Changed:
    def change(problem: Problem) -> Problem | None:
        weight, bias = (problem.inputs[f"{name}_{kind}"].astype(np.float64) for kind in ("weight", "bias"))
        return problem.with_inputs(**{f"{name}_bias": bias @ weight}) if weight.shape[0] == weight.shape[1] else None

    return change


_READ_AT = {"key": LOGITS[0], "value": MEANS[0]}
"""Where a key or value that is not the one that is meant shows first."""

_HEADS = (
    convention("heads-tiled", "query head h takes key and value head h % Hkv (tiled); the case means head "
               "h // (H / Hkv) (repeated)", _tiled, stage="raw_scores", option=("heads", "tiled")),
    *(
        Reading(f"{read}-read-as-{wrong}", f"the {wrong} is read where the {read} is meant", _read_as(read, wrong),
                stage=_READ_AT[read])
        for read, wrong in (("value", "key"), ("key", "value"))
    ),
    *(
        Reading(f"{read}-of-next-head", f"the {read} of the next head is read", _of_next_head(read), stage=stage)
        for read, stage in _READ_AT.items()
    ),
    *(
        Reading(f"{name}-{slug}", f"the {kind} of the {name} projection is {how}",
                only(_projects, change(f"{name}_{kind}")), f"{name}_{kind}", name)
        for name in (*PROJECTIONS, "output")
        for kind, slug, how, change in (
            ("bias", "bias-missing", "missing", without), ("weight", "weight-transposed", "transposed", transposed)
        )
    ),
    *(
        Reading(f"{name}-bias-twice", f"the bias of the {name} projection is added twice",
                only(_projects, with_input(f"{name}_bias", lambda bias: 2 * bias)), f"{name}_bias", name)
        for name in (*PROJECTIONS, "output")
    ),
    *(
        Reading(f"{name}-bias-projected", f"the bias of the {name} projection is added before the product",
                only(_projects, _biased_before(name)), f"{name}_bias", name)
        for name in PROJECTIONS
    ),
    Reading("output-bias-of-each-head", "each head adds the bias of the output projection",
            lambda problem: problem.with_inputs(
                output_bias=problem.inputs["output_bias"] * _heads_of(problem)["query"]
            ), "output_bias", "output"),
    Reading("key-and-value-inputs-swapped", "the inputs of the key and value projections are swapped",
            only(_projects, exchanged("key", "value")), "key", "key"),
    Reading("key-and-value-weights-swapped", "the weights of the key and value projections are swapped",
            only(_projects, exchanged("key_weight", "value_weight")), "key_weight", "key"),
    Reading("heads-split-interleaved", "heads are split with the head's number running fastest, (D, H) for (H, D)",
            only(_projects, _dealt_out), "heads", "query"),
    Reading("heads-merged-in-reverse", "heads are merged in reverse order", _merged_in_reverse, "output_weight",
            "output"),
)  # fmt: skip


# Merging parts.


def _other_base(taken: str, meant: str) -> Change:
    def change(problem: Problem) -> Problem | None:
        own = problem.options.get("lse_base") or "e"
        return problem.with_options(lse_base=taken) if own == meant else None

    return change


def _empty_part(number: float) -> Changed:
    def change(problem: Problem) -> Problem | None:
        totals = problem.inputs["log_sum_exps"]
        is_empty = np.isneginf(totals)
        other = np.where(is_empty, np.array(number, totals.dtype), totals)
        return _without_empty(problem).with_inputs(log_sum_exps=other) if is_empty.any() else None

    return change


def _without_empty(problem: Problem) -> Problem:
    """Let empty parts hold zeros: what they hold counts for nothing."""
    is_empty, outputs = np.isneginf(problem.inputs["log_sum_exps"])[..., np.newaxis], problem.inputs["outputs"]
    return problem.with_inputs(outputs=np.where(is_empty, np.zeros((), outputs.dtype), outputs))


def _first_in_other_base(problem: Problem) -> Problem:
    totals = problem.inputs["log_sum_exps"].astype(np.float64)
    totals[0] *= 1 / math.log(2) if problem.options.get("lse_base") == "2" else math.log(2)
    return problem.with_inputs(log_sum_exps=totals)


_PARTS = tuple(
    replace(reading, of="log_sum_exps")
    for reading in (
        *(
            convention(f"lse-base-{taken}",
                       f"log-sum-exps are read as logarithms in base {taken}; the case means base {meant}",
                       _other_base(taken, meant), stage="weights")
            for taken, meant in (("2", "e"), ("e", "2"))
        ),
        Reading("parts-averaged", "the outputs of the parts are averaged, whatever their log-sum-exps",
                with_input("log_sum_exps", lambda each: np.where(np.isneginf(each), each, np.zeros((), each.dtype))),
                stage="weights"),
        *(
            Reading(f"empty-part-at-{name}", f"the log-sum-exp of an empty part is taken for {words}",
                    _empty_part(number), stage="weights")
            for name, words, number in (("zero", "0", 0.0), ("minus-100", "-100", -100.0))
        ),
        Reading("first-part-in-other-base", "the log-sum-exp of the first part is in the other base",
                _first_in_other_base, stage="weights"),
        Reading("log-sum-exps-with-heads-and-queries-confused", "log-sum-exps (Lq, H) are read as (H, Lq)",
                with_input("log_sum_exps", lambda each: each.reshape(*each.shape[:2], each.shape[3], each.shape[2])
                           .swapaxes(2, 3)), stage="weights"),
        Reading("last-part-lost", "the last part is lost", with_input(
            "log_sum_exps", lambda totals: np.concatenate([totals[:-1], np.full_like(totals[-1:], -np.inf)])
            if len(totals) > 1 else None), stage="weights"),
        Reading("parts-reversed", "the outputs of the parts are taken in reverse order",
                only(lambda problem: len(problem.inputs["outputs"]) > 1, lambda problem: with_input(
                    "outputs", lambda outputs: outputs[::-1])(_without_empty(problem))), stage="output"),
    )
)  # fmt: skip


SCORE_READINGS: Mapping[str, Sequence[Reading]] = {
    "Scores, bias and softcap": (*_SCORES, *_ROTATIONS),
    "Norms of queries and keys": _NORMS,
    "Latent vectors": tuple(replace(reading, before_lowering=True) for reading in _LATENTS),
    "Codes and their scales": CODE_READINGS,
    "Heads and projections": _HEADS,
    "Merging parts": _PARTS,
}
"""Readings by what they are about."""
