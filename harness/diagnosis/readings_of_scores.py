"""Readings of scores: scales, biases, softcaps, and scores of keys that do not exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from attncheck.diagnosis.readings_of_entries import has_heads
from attncheck.diagnosis.readings_of_vectors import ROTATION_READINGS, VECTOR_READINGS
from attncheck.judging.alternatives import (
    Change,
    NumberRow,
    Reading,
    ReadingForm,
    change_input,
    change_inputs,
    convention_reading,
    describe_default_scale,
    flag_allowed_keys,
    format_scales,
    has_default_scale,
    has_scale,
    identity_like,
    intended_scale,
    leave_out_input,
    number_readings,
    swap_inputs,
    transpose_input,
    widths_for_scale,
)
from attncheck.reading.lowering import count_queries_and_keys
from attncheck.reading.problem import Problem
from attncheck.spec import OPERATIONS, REQUESTERS_OF_STAGE

# Scores, bias and softcap.


def _scale_number(change: Callable[[float, Mapping[str, int]], float | None]) -> Callable[[Problem], float | None]:
    """Return a scale computed from the right scale and the widths, for problems with a scale."""

    def number(problem: Problem) -> float | None:
        return change(intended_scale(problem), widths_for_scale(problem)) if _is_scaled(problem) else None

    return number


def _is_scaled(problem: Problem) -> bool:
    """Return whether the scale affects the scores; without features, all scores are 0."""
    return has_scale(problem) and all(widths_for_scale(problem).values())


def _inverse_root_of(name: str) -> Callable[[float, Mapping[str, int]], float | None]:
    return lambda scale, widths: 1 / math.sqrt(widths[name]) if name in widths else None


def _scale_times_default(problem: Problem) -> float | None:
    return intended_scale(problem) / math.sqrt(widths_for_scale(problem)["D"])


def _if_scale_given(
    change: Callable[[Problem], float | None], *, is_set: bool = True
) -> Callable[[Problem], float | None]:
    """Return a number for problems that set the scale, or else for those with a default scale."""

    def number(problem: Problem) -> float | None:
        is_given = problem.options.get("scale") is not None
        return change(problem) if _is_scaled(problem) and is_given is is_set else None

    return number


_APPLIED_TWICE = "the square of the right one, as if applied twice"
_SCALE_NUMBERS: Sequence[NumberRow] = (
    ("scale-default", "the default 1/sqrt(D)", _if_scale_given(_scale_number(_inverse_root_of("D")))),
    ("scale-default", "1/sqrt(D)", _if_scale_given(_scale_number(_inverse_root_of("D")), is_set=False)),
    ("scale-times-default", "the given one times 1/sqrt(D)", _if_scale_given(_scale_times_default)),
    ("scale-times-default", "the right one times 1/sqrt(D)",
     _if_scale_given(
         lambda problem: None if has_default_scale(problem) else _scale_times_default(problem), is_set=False
     )),
    ("scale-one", "", _scale_number(lambda scale, widths: 1.0)),
    ("scale-twice", _APPLIED_TWICE, _scale_number(lambda scale, widths: scale * scale)),
    ("scale-root", "the root of the right one, as if one of query and key had it",
     _scale_number(lambda scale, widths: math.sqrt(scale) if scale > 0 else None)),
    ("scale-inverse-width", "1/D", _scale_number(lambda scale, widths: 1 / widths["D"])),
    ("scale-root-of-width", "sqrt(D)", _scale_number(lambda scale, widths: math.sqrt(widths["D"]))),
    *((f"scale-inverse-root-of-{name.replace(' ', '')}", f"1/sqrt({name})", _scale_number(_inverse_root_of(name)))
      for name in ("Dv", "H D", "E", "C + Dr", "Dn", "C")),
    *((f"scale-inverse-root-of-{number}D", f"1/sqrt({number}D)",
       _scale_number(partial(lambda number, scale, widths: 1 / math.sqrt(number * widths["D"]), number)))
      for number in (2, 3)),
    ("scale-doubled", "twice as large", _scale_number(lambda scale, widths: 2 * scale)),
    ("scale-halved", "half as large", _scale_number(lambda scale, widths: scale / 2)),
    ("scale-negated", "the negative", _scale_number(lambda scale, widths: -scale)),
    ("scale-times-log2e", "log2(e) times as large", _scale_number(lambda scale, widths: scale / math.log(2))),
    ("scale-times-ln2", "ln(2) times as large", _scale_number(lambda scale, widths: scale * math.log(2))),
)  # fmt: skip


_DEFAULT_FORMULAS: Mapping[str, str] = {"": "1", _APPLIED_TWICE: "1/D"}
"""Words of numbers that depend only on the shapes if no scale is given; other words contain the formula."""


def _scale_form(problem: Problem, scale: float, words: str) -> ReadingForm:
    taken, meant = format_scales(scale, intended_scale(problem))
    default = words if "sqrt(" in words or words == "1/D" else _DEFAULT_FORMULAS.get(words)
    shared = describe_default_scale(default) if default and has_default_scale(problem) else ""
    return ReadingForm(problem.with_options(scale=scale), {"taken": taken, "meant": meant}, common_description=shared)


def multiply_bias(problem: Problem, factor: float) -> Problem:
    """Multiply the finite elements of the bias; minus infinity does not change.

    Example:
        >>> bias = np.array([[[[1.0, -3.0, -np.inf]]]])
        >>> multiply_bias(Problem("attention", {}, {"bias": bias}), 2.0).inputs["bias"].tolist()
        [[[[2.0, -6.0, -inf]]]]
    """
    return problem.with_inputs(bias=_multiply_finite(problem.inputs["bias"], factor))


def _multiply_finite(array: Any, factor: float) -> Any:
    array = array.astype(np.float64)
    with np.errstate(over="ignore"):  # the lowest number of a dtype may become minus infinity, as it does in base 2
        return np.where(np.isfinite(array), np.where(np.isfinite(array), array, 0.0) * factor, array)


_BIAS_NUMBERS: Sequence[NumberRow] = (
    ("bias-scaled", "the bias is added before the scores are scaled", _scale_number(lambda scale, widths: scale)),
    ("bias-unscaled", "the bias is divided by the scale",
     _scale_number(lambda scale, widths: 1 / scale if scale else None)),
    ("bias-negated", "the bias is subtracted", lambda problem: -1.0),
    ("bias-twice", "the bias is added twice", lambda problem: 2.0),
    ("bias-times-log2e", "the bias is multiplied by log2(e), as before an exponential in base 2",
     lambda problem: 1 / math.log(2)),
    ("bias-times-ln2", "the bias is added in base 2: it lacks the factor log2(e)", lambda problem: math.log(2)),
)  # fmt: skip


def _softcap_number(change: Callable[[float, Problem], float]) -> Callable[[Problem], float | None]:
    return lambda problem: change(float(problem.options["softcap"]), problem) if has_scale(problem) else None


_SOFTCAP_NUMBERS: Sequence[NumberRow] = (
    (
        "softcap-of-raw-scores",
        "on scores before they are scaled",
        _softcap_number(lambda cap, problem: cap * intended_scale(problem)),
    ),
    ("softcap-doubled", "twice as large", _softcap_number(lambda cap, problem: 2 * cap)),
    ("softcap-halved", "half as large", _softcap_number(lambda cap, problem: cap / 2)),
)


def _softcap_forms(problem: Problem, softcap: float, words: str) -> Sequence[ReadingForm]:
    words_of = {"taken": f"{softcap:.6g}", "meant": f"{problem.options['softcap']:.6g}"}
    return [ReadingForm(problem.with_options(softcap=softcap), words_of)] if softcap > 0 else []


_LATE_SOFTCAP_MESSAGE = "the softcap is applied after {}; the case means before it"


def _apply_softcap_after(stage: str, is_there: Callable[[Problem], bool]) -> Change:
    """Apply the softcap later; in a second form, the late softcap is returned under the name of the later stage."""

    def change(problem: Problem) -> Sequence[ReadingForm]:
        if OPERATIONS[problem.operation].computes_gradients or not is_there(problem):
            return []
        moved = problem.with_options(softcap_follows=stage)
        return [ReadingForm(moved), ReadingForm(moved, first_stage=stage, stage_aliases={stage: "capped"})]

    return change


def _apply_softcap_after_row_mask(problem: Problem) -> ReadingForm | None:
    """Apply the softcap after a mask that masks all keys of a query or none: a masked row has equal logits, -softcap.

    Only for gradients: after any other mask, no problem has these gradients.
    """
    if not OPERATIONS[problem.operation].computes_gradients:
        return None
    allowed = flag_allowed_keys(problem)
    if allowed is None or not (allowed.any(axis=-1) == allowed.all(axis=-1)).all():
        return None
    return ReadingForm(problem.with_options(empty_rows="uniform"), first_stage="weights")


def is_masked(problem: Problem) -> bool:
    """Return whether an input or an option masks keys.

    Example:
        >>> bias, lengths = np.zeros((1, 1, 1, 1)), np.array([3])
        >>> [is_masked(Problem("attention", {}, inputs)) for inputs in ({"bias": bias}, {"key_lengths": lengths})]
        [False, True]
    """
    names = REQUESTERS_OF_STAGE["masked"]
    return bool(names & problem.inputs.keys() or any(problem.options.get(name) for name in names))


def _append_zero_scores(count: Callable[[int], int]) -> Change:
    """Add keys of score 0 and value 0, like a tile whose keys after the last one are not masked."""

    def change(problem: Problem) -> Problem | None:
        if "sinks" not in OPERATIONS[problem.operation].inputs or "sinks" in problem.inputs or not has_heads(problem):
            return None
        number = count(count_queries_and_keys(problem.inputs)[1])
        heads = problem.inputs["query"].shape[-3]
        return problem.with_inputs(sinks=np.full(heads, math.log(number))) if number > 0 else None

    return change


_ZERO_SCORE_COUNTS: Sequence[tuple[str, str, Callable[[int], int]]] = (
    ("one", "a padding key", lambda keys: 1),
    *((f"to-tiles-of-{tile}", f"padding keys up to a multiple of {tile}",
       partial(lambda tile, keys: -keys % tile, tile))
      for tile in (8, 16, 32, 64, 128)),
)  # fmt: skip
"""Name, words, and the number of additional keys for a number of keys."""
_SCORE_AND_SOFTCAP_READINGS = (
    convention_reading("softcap-after-biased", _LATE_SOFTCAP_MESSAGE.format("the bias"),
               _apply_softcap_after("biased", lambda problem: "bias" in problem.inputs), "softcap", "capped"),
    convention_reading("softcap-after-masked", _LATE_SOFTCAP_MESSAGE.format("the mask"),
               _apply_softcap_after("masked", is_masked), "softcap", "capped"),
    convention_reading("softcap-after-masked", _LATE_SOFTCAP_MESSAGE.format("the mask"),
               _apply_softcap_after_row_mask, "softcap"),
    *number_readings(lambda words: f"the softcap is {{taken}}, {words}; the case means {{meant}}", "softcap",
              _SOFTCAP_NUMBERS, _softcap_forms, lambda problem: float(problem.options["softcap"]),
              option_or_input="softcap", first_stage="capped"),
    Reading("sinks-twice", "the sinks count twice",
            change_input("sinks", lambda sinks: sinks.astype(np.float64) + math.log(2)), "sinks", "weights"),
    Reading("sinks-scaled", "the sinks are scaled as scores are",
            lambda problem: problem.with_inputs(
                sinks=_multiply_finite(problem.inputs["sinks"], intended_scale(problem) if has_scale(problem) else 1.0)
            ), "sinks", "weights"),
    *(
        Reading(f"zero-score-keys-{slug}",
                f"as if {words} (score 0) were not masked: the weights add up to less than 1",
                _append_zero_scores(count), first_stage="weights")
        for slug, words, count in _ZERO_SCORE_COUNTS
    ),
    Reading("score-weight-ignored", "the weight of the score is ignored",
            change_input("weight", identity_like), "weight",
            "scores"),
    Reading("score-bias-negated", "the bias of the score is subtracted", change_input("score_bias", np.negative),
            "score_bias", "scores"),
    *number_readings(lambda words: f"the {{stage}} is exactly that of scale {{taken}}{words and f', {words},'} "
              "instead of {meant}", "scale", _SCALE_NUMBERS, _scale_form, intended_scale, first_stage="scores"),
    *number_readings(
        str, "bias times", _BIAS_NUMBERS,
        lambda problem, factor, words: [ReadingForm(multiply_bias(problem, factor))]
        if factor > 0 or np.isfinite(problem.inputs["bias"]).all() else [],
        option_or_input="bias", first_stage="biased"),
    *(
        Reading(f"score-{name.replace('_', '-')}-transposed",
                f"the {name.replace('_', ' ')} of the score is transposed", transpose_input(name), of, "scores")
        for name, of in (("weight", "weight"), ("query_weight", "score_vector"), ("key_weight", "score_vector"))
    ),
    Reading("score-weights-exchanged", "the weights of query and key are exchanged",
            swap_inputs("query_weight", "key_weight"), "score_vector", "scores"),
    Reading("score-scaled", "the additive score is divided by sqrt(D)",
            lambda problem: problem.with_inputs(
                score_vector=problem.inputs["score_vector"] / math.sqrt(problem.inputs["query"].shape[-1])
            ), "score_vector", "scores"),
    Reading("score-scaled", "the score is divided by sqrt(D)", lambda problem: change_inputs(
        ("weight", "score_bias"), lambda array: array / math.sqrt(problem.inputs["query"].shape[-1])
    )(problem), "weight", "scores"),
    Reading("score-bias-missing", "the bias of the score is missing",
            leave_out_input("score_bias"), "score_bias", "scores"),
)  # fmt: skip


SCORE_READINGS: Mapping[str, Sequence[Reading]] = {
    "Scores, bias and softcap": (*_SCORE_AND_SOFTCAP_READINGS, *ROTATION_READINGS),
    **VECTOR_READINGS,
}
"""Readings by topic."""
