"""Readings of scores: scales, biases, softcaps, and scores of keys that are not there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from attncheck.diagnosis.readings_of_entries import has_heads
from attncheck.diagnosis.readings_of_vectors import ROTATIONS, VECTOR_READINGS
from attncheck.judging.alternatives import (
    Change,
    Form,
    Number,
    Reading,
    allowed_keys,
    convention,
    default_scale,
    exchanged,
    has_default_scale,
    has_scale,
    identity,
    numbered,
    scale_of,
    scales_in_words,
    transposed,
    widths_of,
    with_each,
    with_input,
    without,
)
from attncheck.reading.lowering import queries_and_keys
from attncheck.reading.problem import Problem
from attncheck.spec import (
    ASKED_BY,
    OPERATIONS,
)

# Scores, bias and softcap.


def _scale(change: Callable[[float, Mapping[str, int]], float | None]) -> Callable[[Problem], float | None]:
    """Make a scale of the right one and the widths, for problems that have any."""

    def number(problem: Problem) -> float | None:
        return change(scale_of(problem), widths_of(problem)) if _is_scaled(problem) else None

    return number


def _is_scaled(problem: Problem) -> bool:
    """Return whether scores have a scale that matters: over no features they are all 0."""
    return has_scale(problem) and all(widths_of(problem).values())


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
        return change(problem) if _is_scaled(problem) and is_given is given else None

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
        number = count(queries_and_keys(problem.inputs)[1])
        heads = problem.inputs["query"].shape[-3]
        return problem.with_inputs(sinks=np.full(heads, math.log(number))) if number > 0 else None

    return change


_ZERO_SCORES: Sequence[tuple[str, str, Callable[[int], int]]] = (
    ("one", "one further key", lambda keys: 1),
    *((f"to-tiles-of-{tile}", f"further keys, up to a multiple of {tile},", partial(_missing, tile))
      for tile in (8, 16, 32, 64, 128)),
)  # fmt: skip
"""Names, words, and how many further keys there are beside so many."""
_SCORES = (
    convention("softcap-after-biased", _LATE_SOFTCAP.format("the bias"),
               _softcap_after("biased", lambda problem: "bias" in problem.inputs), "softcap", "capped"),
    convention("softcap-after-masked", _LATE_SOFTCAP.format("the mask"), _softcap_after("masked", is_masked),
               "softcap", "capped"),
    convention("softcap-after-masked", _LATE_SOFTCAP.format("the mask"), _softcap_of_whole_rows, "softcap"),
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
    *numbered(lambda words: f"the {{stage}} is exactly that of scale {{taken}}{words and f', {words},'} "
              "instead of {meant}", "scale", _SCALES, _with_scale, scale_of, stage="scores"),
    *numbered(str, "bias times", _BIASES, _bias_times, of="bias", stage="biased"),
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


SCORE_READINGS: Mapping[str, Sequence[Reading]] = {
    "Scores, bias and softcap": (*_SCORES, *ROTATIONS),
    **VECTOR_READINGS,
}
"""Readings by what they are about."""
