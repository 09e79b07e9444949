"""The catalogue of readings: what an implementation may compute instead of the case, one row each.

A convention is another meaning of the same options: the corner from which causality and windows count, the truth value
of a mask that forbids, the assignment of grouped heads. A mistake ignores an option, or uses another value: no user
intends that. Both have the exact answer of another problem, so a result can be compared with it within bounds
(``wrong_result.py``). A reading applies only to cases that use its option. If it does not change the result of a case,
that case cannot confirm it.

The diagnosis tries all readings on a failing case, and ``docs/diagnoses.md`` lists them. Readings that replace a step
have no problem (``replaced_steps.py``). ``READING_CATALOGUE`` has all readings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attncheck.attention.problem import Computation
from attncheck.diagnosis.readings_of_entries import (
    ENTRY_READINGS,
    describe_position_rule,
    move_window_side,
    within_window,
)
from attncheck.diagnosis.readings_of_gradients import GRADIENT_READINGS
from attncheck.diagnosis.readings_of_launches import LAUNCH_READINGS
from attncheck.diagnosis.readings_of_scores import SCORE_READINGS, is_masked
from attncheck.diagnosis.readings_of_sequences import INDEX_READINGS, SEQUENCE_READINGS
from attncheck.diagnosis.readings_of_softmax import SOFTMAX_AND_LAYOUT_READINGS
from attncheck.diagnosis.replaced_steps import REPLACED_STEPS
from attncheck.judging.alternatives import (
    AppliedReading,
    Change,
    Reading,
    ReadingForm,
    canonical_with_empty_rows,
    change_input,
    convention_reading,
    flag_allowed_keys,
    has_scale,
    intended_scale,
    leave_out_input,
    reordering_readings,
    starting_at_stage,
    when_applicable,
    with_all_allowed_mask,
    with_combined_mask,
)
from attncheck.judging.empty_row_conventions import OTHER_EMPTY_ROWS
from attncheck.judging.undefined import MAX_FLAGS_AT_A_TIME, find_empty_rows_convention, flag_empty_rows, scores_shape
from attncheck.reading.lowering import count_queries_and_keys, query_offset
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.spec import ACCURACY_PREFIX, IGNORABLE_INPUTS_AND_OPTIONS, LOGITS, OPERATIONS, InputSpec, OptionSpec
from attncheck.spec.classes import PARTS_SEPARATOR, ROUNDING_PRESETS

# Masks: which query attends to which key.

_ALIGNMENTS: Mapping[str, tuple[str, str]] = {
    "top_left": ("top-left", "i"),
    "bottom_right": ("bottom-right", "i + Lk - Lq"),
}


def _align_at_corner(alignment: str, position: str) -> Change:
    """Align causality and the window at a corner: the first query with the first key, or the last with the last."""

    def change(problem: Problem) -> Iterator[ReadingForm]:
        if (subject := describe_position_rule(problem)) is None:
            return
        options, realigned = problem.options, problem.without_input("query_offsets").with_options(alignment=alignment)
        if query_offset(realigned.options, realigned.inputs) == query_offset(options, problem.inputs):
            return
        default = "behind the past" if "past_key" in problem.inputs else "top-left"
        if "query_offsets" in problem.inputs:
            default = "at the offset of each batch entry"
        meant, *_ = _ALIGNMENTS.get(str(options.get("alignment")), (default,))
        words = {"subject": subject[0], "rule": subject[1].format(position), "meant": meant}
        yield ReadingForm(realigned, words)
        if options.get("is_causal") and options.get("window"):
            yield from (ReadingForm(separate, words) for separate in _realign_one_rule(problem, realigned))

    return change


def _realign_one_rule(problem: Problem, realigned: Problem) -> Iterator[Problem]:
    """Yield the problem with only causality realigned, and with only the window realigned."""
    queries, keys = count_queries_and_keys(problem.inputs)
    first, key = query_offset(realigned.options, realigned.inputs), np.arange(keys)
    positions = np.arange(queries)[:, np.newaxis] + first
    yield with_combined_mask(problem.with_options(is_causal=False), key <= positions)
    yield with_combined_mask(problem.with_options(window=None), within_window(problem, positions, key))


def _move_window_ends(*moves: int) -> Change:
    """Move the ends of a window; None if an end that moves is unbounded."""

    def change(problem: Problem) -> ReadingForm | None:
        window = problem.options["window"]
        if any(end is None and move for end, move in zip(window, moves, strict=True)):
            return None
        moved = tuple(map(move_window_side, window, moves))
        words = {"window": moved, "meant": window}
        return ReadingForm(problem.with_options(window=moved), {name: json.dumps(ends) for name, ends in words.items()})

    return change


def _mask_by_distance(allows: Callable[[Any], Any]) -> Change:
    """Replace causality by a mask of the keys whose distance after the query is allowed."""

    def change(problem: Problem) -> Problem:
        queries, keys = count_queries_and_keys(problem.inputs)
        distance = np.arange(keys) - np.arange(queries)[:, np.newaxis] - query_offset(problem.options, problem.inputs)
        return with_combined_mask(problem.with_options(is_causal=False), allows(distance))

    return change


def _add_causality_to_scores(problem: Problem) -> Problem:
    """Add the mask and causality to the scores as the numbers 0 and 1."""
    queries, keys = count_queries_and_keys(problem.inputs)
    first = query_offset(problem.options, problem.inputs)
    allowed = np.arange(keys) <= np.arange(queries)[:, np.newaxis] + first
    added = allowed & problem.inputs.get("mask", np.True_)
    bias = problem.inputs.get("bias", np.zeros(())) + added.reshape((1,) * (4 - added.ndim) + added.shape)
    return with_all_allowed_mask(problem.without_input("mask").with_options(is_causal=False)).with_inputs(bias=bias)


def _unmask_last_row(problem: Problem) -> Problem | None:
    """Unmask the last query, as if the last incomplete tile had no mask."""
    plain = problem.canonical()
    shape = scores_shape(plain)
    allowed = Computation.from_problem_without_added_key(plain).flag_unmasked_scores(shape)
    if allowed is None or not shape[-2]:
        return None
    unmasked = allowed.copy()
    unmasked[..., -1, :] = True
    return canonical_with_empty_rows(problem).with_options(is_causal=False).with_inputs(mask=unmasked)


def _add_fill_to_scores(problem: Problem) -> ReadingForm | None:
    plain = problem.canonical()
    kept = Computation.from_problem_without_added_key(plain).flag_unmasked_scores(scores_shape(plain))
    if kept is None or np.isneginf(problem.inputs.get("bias", np.zeros(1))).any():
        return None
    bias = np.where(kept, 0.0, float(plain.options.get("mask_fill", -np.inf))) + problem.inputs.get("bias", 0.0)
    unmasked = plain.with_changes({"is_causal": None, "mask_fill": None}, mask=None, bias=bias)
    return ReadingForm(unmasked, _fill_text_values(problem), stage_aliases={"masked": "biased"})


def _fill_text_values(problem: Problem) -> dict[str, str]:
    return {"fill": f"{problem.options['mask_fill']:.6g}"}


def _invert_fill(problem: Problem) -> ReadingForm | None:
    fill = problem.options["mask_fill"]
    if not fill or abs(math.log10(abs(fill))) < 1:
        return None
    return ReadingForm(problem.with_options(mask_fill=1 / fill), {"fill": f"{1 / fill:.6g}"})


def _first_stage_of_offsets(problem: Problem) -> str:
    """Return the first stage that depends on query offsets: the rotated query, if there is a rotation."""
    return "rotated_query" if "rotary_cos" in problem.inputs else "masked"


def _set_fill(number: Callable[[Problem], float]) -> Change:
    """Set masked scores to a number; the case sets them to minus infinity."""

    def change(problem: Problem) -> Problem | None:
        if problem.options.get("mask_fill") is not None or "mask_fill" not in OPERATIONS[problem.operation].options:
            return None
        return problem.with_options(mask_fill=number(problem)) if is_masked(problem) else None

    return change


def _lowest_finite_number(problem: Problem) -> float:
    """Return the lowest finite number of the dtype of the scores."""
    dtype = next(problem.inputs[name].dtype for name in ("query", "scores") if name in problem.inputs)
    return float(np.finfo(dtype if dtype.kind == "f" else np.float32).min)


def _change_fill(change: Callable[[float], float]) -> Change:
    def changed(problem: Problem) -> ReadingForm | None:
        fill = problem.options["mask_fill"]
        other_fill = change(fill)
        words = {"fill": f"{other_fill:.6g}", "meant": f"{fill:.6g}"}
        return None if other_fill == fill else ReadingForm(problem.with_options(mask_fill=other_fill), words)

    return changed


def _make_ignored_reading(name: str, spec: InputSpec | OptionSpec) -> Reading:
    """Return the reading in which an input or option has no effect."""
    stage = spec.first_stage if isinstance(spec, InputSpec) else str(spec.requested_stage)

    def change(problem: Problem) -> Problem | ReadingForm:
        if isinstance(spec, OptionSpec):
            without_option = problem.with_options(**{name: False if spec.type is bool else None})
            if stage == "masked":
                return with_all_allowed_mask(without_option)
            return ReadingForm(without_option, stage_aliases={stage: LOGITS[LOGITS.index(stage) - 1]})
        if spec.folds_into_input == "mask":
            return with_all_allowed_mask(problem).without_input(name)
        if spec.neutral_value is None:
            return problem.without_input(name)
        return problem.with_inputs(**{name: np.full_like(problem.inputs[name], spec.neutral_value)})

    called = spec.plain_name or name
    verb = "are" if isinstance(spec, InputSpec) and (spec.is_count or spec.adds_key) else "is"
    slug = called.removeprefix("the ").replace(" ", "-")
    return Reading(f"{slug}-ignored", f"{called} {verb} ignored", change, name, stage)


_MASK_READINGS = (
    *(
        convention_reading(f"aligned-{name}", f"{{subject}} is aligned {name} ({{rule}}); the case means {{meant}}",
                   _align_at_corner(alignment, position))
        for alignment, (name, position) in _ALIGNMENTS.items()
    ),
    convention_reading("mask-inverted", "the mask is read as True = may not attend; the case means True = may attend",
               change_input("mask", np.logical_not), "mask"),
    convention_reading("fill-minus-infinity", "a forbidden score is minus infinity; the case means {fill} in its place",
               lambda problem: ReadingForm(problem.with_options(mask_fill=None), _fill_text_values(problem)),
               "mask_fill"),
    *(
        convention_reading(f"window-too-{how}-{ends.replace(' the', '').replace(' ', '-')}",
                   f"the window is one key too {how} on the {ends}: {{window}}; the case means {{meant}}, ends "
                   "included",
                   _move_window_ends(step * of_left, step * of_right), "window")
        for how, step in (("narrow", -1), ("wide", 1))
        for ends, of_left, of_right in (("left", 1, 0), ("right", 0, 1), ("left and the right", 1, 1))
    ),
    *(
        convention_reading(f"key-lengths-one-too-{name}",
                   f"a key length is taken for {how}; the case means the number of keys",
                   change_input("key_lengths", partial(np.add, moved)), "key_lengths")
        for moved, name, how in ((1, "long", "the last key's index"), (-1, "short", "one less"))
    ),
    Reading("mask-added", "the mask is added to the scores as the numbers 0 and 1",
            lambda problem: problem.with_inputs(
                mask=np.ones_like(problem.inputs["mask"]),
                bias=problem.inputs.get("bias", np.zeros(())) + problem.inputs["mask"],
            ), "mask"),
    Reading("causality-added", "causality is added to the scores as the numbers 0 and 1", _add_causality_to_scores,
            "is_causal"),
    Reading("fill-added", "{fill} is added to a forbidden score; the case means it in its place", _add_fill_to_scores,
            "mask_fill"),
    Reading("fill-scaled", "the fill is put in place before the scores are scaled",
            lambda problem: problem.with_options(mask_fill=problem.options["mask_fill"] * intended_scale(problem))
            if has_scale(problem) else None, "mask_fill"),
    *(
        Reading(f"masked-at-{name}", f"a forbidden score is {words}; the case means minus infinity", _set_fill(number))
        for name, words, number in (
            ("minus-1e4", "a finite number, such as -1e4", lambda problem: -1e4),
            ("minus-1e9", "a finite number, such as -1e9", lambda problem: -1e9),
            ("least-number", "the least finite number", _lowest_finite_number),
            ("zero", "0", lambda problem: 0.0),
        )
    ),
    *(
        Reading(f"fill-{name}", f"the fill is {{fill}}, {words}; the case means {{meant}}", _change_fill(change),
                "mask_fill")
        for name, words, change in (
            ("negated", "of the other sign", lambda fill: -fill), ("of-minus-1e4", "a constant", lambda fill: -1e4)
        )
    ),
    Reading("fill-inverted", "the fill is {fill}: the sign of an exponent is lost", _invert_fill, "mask_fill"),
    *(_make_ignored_reading(name, spec) for name, spec in IGNORABLE_INPUTS_AND_OPTIONS.items()),
    Reading("causal-next-key", "causality is off by one: each query sees one key too many, j <= i + 1",
            _mask_by_distance(lambda distance: distance <= 1), "is_causal"),
    Reading("causal-without-own-key", "causality is off by one: no query sees its own key, j < i",
            _mask_by_distance(lambda distance: distance <= -1), "is_causal"),
    Reading("causal-mirrored", "causality is mirrored: query i sees the keys j >= i",
            _mask_by_distance(lambda distance: distance >= 0), "is_causal"),
    Reading("window-sides-swapped", "left and right of the window are swapped",
            lambda problem: problem.with_options(window=tuple(problem.options["window"])[::-1]), "window"),
    Reading("last-row-unmasked", "the last query row is not masked", _unmask_last_row),
    Reading("mask-transposed", "queries and keys of the mask are swapped", when_applicable(
        lambda problem: len(set(count_queries_and_keys(problem.inputs))) == 1,
        change_input("mask", lambda mask: mask.swapaxes(-1, -2) if mask.ndim > 1 else None)), "mask"),
    *(
        replace(reading, change=starting_at_stage(_first_stage_of_offsets, reading.change))
        for reading in (
            Reading("query-offsets-ignored", "the query offsets are ignored", leave_out_input("query_offsets"),
                    "query_offsets"),
            *reordering_readings("query-offsets", "the query offset", ["query_offsets"], {"batch entry": -1}, "masked"),
            Reading("query-offsets-of-longest", "the largest query offset is taken for all",
                    change_input("query_offsets", lambda offsets: np.full_like(offsets, offsets.max(initial=0))),
                    "query_offsets"),
            Reading("query-offsets-one-too-far", "query offsets are one too far",
                    when_applicable(lambda problem: "rotary_cos" not in problem.inputs,  # whose table would end
                         change_input("query_offsets", lambda offsets: offsets + 1)), "query_offsets"),
        )
    ),
)  # fmt: skip


# Rows without a key.


def _unmask_empty_rows(problem: Problem) -> ReadingForm | None:
    if count_scores(problem.operation, problem.options, problem.inputs) > MAX_FLAGS_AT_A_TIME:
        return None  # the mask would be as large as the score matrix
    allowed = flag_allowed_keys(problem)
    if allowed is None:
        return None
    mask = allowed | flag_empty_rows(problem)[..., np.newaxis]
    unmasked = problem.canonical().with_options(is_causal=False).with_inputs(mask=mask)
    return ReadingForm(unmasked, {"own": find_empty_rows_convention(problem)})


EMPTY_ROW_READINGS = (
    *OTHER_EMPTY_ROWS,
    convention_reading("empty-rows-unmasked",
               "a query without a key attends to all keys, as if nothing were masked; the case expects {own}",
               _unmask_empty_rows, first_stage="weights"),
)  # fmt: skip


def apply_other_empty_row_conventions(problem: Problem) -> Iterator[AppliedReading]:
    """Yield the other conventions for rows without a key; nothing if there is no such row."""
    if flag_empty_rows(problem).any():
        yield from (alternative for reading in EMPTY_ROW_READINGS for alternative in reading.apply_to_problem(problem))


# Readings with a fitted number, and accuracies; they are tried only if no other reading fits (``wrong_result.py``).

FITTED_SCALE_READING = Reading(
    "scale-fitted", "the {stage} is that of scale {taken} (given {meant})", lambda problem: None,
                       first_stage="scores")  # fmt: skip
FITTED_STAGE_READING = Reading("stage-fitted", "the {stage} is {factor} times the right one", lambda problem: None,
                       first_stage="weights")  # fmt: skip
LEFT_OUT_KEYS_READING = Reading("keys-fitted", "keys are left out: {which}", lambda problem: None)
FITTED_BIAS_READING = Reading(
    "bias-fitted", "the bias is multiplied by {factor}", lambda problem: None, first_stage="biased"
)


def _accuracy_reading(name: str, words: str, of: str = "") -> Reading:
    return Reading(
        f"{ACCURACY_PREFIX}{name}", f"the {{stage}} is as accurate as {words}", lambda problem: None, of, first_stage=""
    )


ACCURACY_READINGS: Mapping[str, Reading] = {
    "float32": _accuracy_reading("float32", "float32"), "bfloat16": _accuracy_reading("16-bits", "16 bits")
}  # fmt: skip
APPROXIMATION_READINGS: Mapping[str, Reading] = {
    parts: _accuracy_reading(name, f'{words}, which a class permits "with {parts}"', of)
    for parts, name, words, of in (
        ("tanh 2^-11", "approximate-tanh", "with hyperbolic tangents to 2^-11", "softcap"),
        ("exp 8.8e-5", "cubic-exponentials", "with exponentials to 8.8e-5", ""),
        ("weights float8_e4m3fn", "fp8-weights", "where weights are FP8", ""),
        ("sums float16", "float16-sums", "where products are added up in float16", ""),
        ("query int8 per 128 rows and key int8 per 128 rows", "int8-operands",
         "where queries and keys are 8-bit integers with scales", ""),
        (ROUNDING_PRESETS["flash3_fp8"].parts.partition(PARTS_SEPARATOR)[2], "fp8-operands",
         "where queries, keys, values and weights are FP8", ""),
    )
}  # fmt: skip
"""Approximations for speed in a kernel of 16 bits: part of a class -> accuracy, the tightest first."""
EXPONENTIAL_READINGS: Mapping[str, Mapping[str, Reading]] = {
    dtype: {part: _accuracy_reading("exponentials", "with exponentials off by 128 units in the last place")}
    for dtype, part in (("float32", "exp 2^-17"), ("float64", "exp 2^-46"))
}
"""Dtype -> part of a class with less exact exponentials; usual ones are within four units in the last place."""
NARROWER_APPROXIMATIONS = frozenset({"tanh 2^-11", "exp 8.8e-5", "weights float8_e4m3fn"})
"""Parts whose bounds are within the bounds of the last part of ``APPROXIMATION_READINGS`` for every problem."""

READING_CATALOGUE: Mapping[str, Sequence[Reading]] = {
    "Who may attend to whom": (*_MASK_READINGS, *SEQUENCE_READINGS, *INDEX_READINGS, *EMPTY_ROW_READINGS),
    "Other entries, heads and places": ENTRY_READINGS,
    "Tiles, parts, and what is never written": LAUNCH_READINGS,
    **SCORE_READINGS,
    "Softmax, log_sum_exp and output": (*REPLACED_STEPS, *SOFTMAX_AND_LAYOUT_READINGS),
    "Gradients": GRADIENT_READINGS,
    "Fitted numbers, and accuracy": (
        FITTED_SCALE_READING,
        FITTED_BIAS_READING,
        FITTED_STAGE_READING,
        LEFT_OUT_KEYS_READING,
        *ACCURACY_READINGS.values(),
        *APPROXIMATION_READINGS.values(),
        *(reading for rows in EXPONENTIAL_READINGS.values() for reading in rows.values()),
    ),
}
"""All readings, by topic."""
ALL_READINGS: Sequence[Reading] = sorted(
    (reading for readings in READING_CATALOGUE.values() for reading in readings if reading not in EMPTY_ROW_READINGS),
    key=lambda reading: not reading.is_convention,
)
"""All readings except those of rows without a key, conventions first."""


def apply_all_readings(
    problem: Problem, names: Container[str] | None = None, *, changes_called_operation: bool = False
) -> Iterator[AppliedReading]:
    """Yield the readings that apply to a problem, conventions first; only those in ``names``, unless that is None.

    If ``changes_called_operation``, the problem is a call, and only the readings of calls apply; their problems are
    lowered.
    """
    for reading in ALL_READINGS:
        is_asked = names is None or reading.name in names
        if is_asked and reading.changes_called_operation is changes_called_operation:
            yield from reading.apply_to_problem(problem)


def apply_readings_named(name: str, problem: Problem) -> Iterator[AppliedReading]:
    """Yield the readings of a name that make another problem of a problem, with all stages and without NaN rows."""
    of_rows = apply_other_empty_row_conventions(problem) if name.startswith("empty-rows-") else ()
    rows = (reading for reading in ALL_READINGS if reading.name == name and not reading.changes_called_operation)
    for alternative in (*(form for row in rows for form in row.apply_to_problem(problem)), *of_rows):
        is_problem = alternative.step_replacement is None and not alternative.stage_aliases
        if alternative.name == name and is_problem and alternative.empty_rows != "nan":
            yield alternative


def problems_under_reading(name: str, problem: Problem) -> list[Problem]:
    """Return the problems of the readings of a name, one for each form; empty if none applies."""
    rows = (reading for reading in ALL_READINGS if reading.name == name)
    return [
        form.problem for reading in rows for form in reading.apply_to_problem(problem) if form.step_replacement is None
    ]


READINGS_BY_QUESTION: Mapping[str, Mapping[str, str]] = {
    "causal, more keys than queries": {
        "aligned-bottom-right": "the corner is bottom right", "causality-ignored": "causality is left out"
    },
    "causal, with a mask": {"causality-ignored": "only the mask counts", "mask-ignored": "only causality counts"},
    "mask": {"mask-inverted": "may not attend", "mask-ignored": "the mask is left out"},
    "bias": {"bias-scaled": "the scores before the scale", "bias-ignored": "the bias is left out"},
    "key_lengths": {
        "key-lengths-from-the-end": "the last ones",
        "key-lengths-one-too-long": "one more than the first ones",
        "key-lengths-ignored": "key_lengths are left out",
    },
    "scale, by default": {"scale-one": "1", "scale-inverse-width": "1/D"},
    "scale, of 0": {"scale-default": "as without a scale", "scale-one": "1"},
    "softcap, with a bias": {
        "softcap-after-biased": "the scores with the bias", "softcap-ignored": "the softcap is left out"
    },
    "softcap, with a mask": {
        "softcap-after-masked": "the scores after the mask", "softcap-ignored": "the softcap is left out"
    },
    "window (2, 0)": {
        "window-too-narrow-left": "its own and one before",
        "window-zero-as-open": "its own and two before, and all after",
        "window-ignored": "the window is left out",
    },
    "window (1, 1), more keys than queries": {
        "aligned-bottom-right": "so that the last query stands at the last key",
        "window-ignored": "the window is left out",
    },
    "grouped heads": {"heads-tiled": "h % Hkv"},
}  # fmt: skip
"""Question of `attncheck conventions` -> possible answers: the names of readings, each with its meaning in words.

The questions about rows without a key, a past, and statistics have other answers."""
