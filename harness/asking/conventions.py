"""Measurement of conventions: each question is one call of attention, with its possible meanings.

A meaning is the same problem without anything open: a mask instead of causality, a given scale instead of the default.
The exact answer of the meaning is the result of the call under it, so the numbers of a question must have a different
answer for each meaning (``tests/harness/conventions`` proves that they do, in every dtype). To add a question, add it
to ``QUESTIONS``.

An implementation runs the calls in its worker, and the results are compared with the meanings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from attncheck.backends.families import FAMILIES
from attncheck.common.errors import UsageError
from attncheck.diagnosis.declared import rewrite_for_conventions
from attncheck.diagnosis.readings import READINGS_BY_QUESTION, problems_under_reading
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.padding import unsupported_reason
from attncheck.execution.runner import GroupRunner
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.execution.workers import WorkerPool
from attncheck.judging.judge_stages import stage_agrees
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.spec import CONVENTION_OF_READING, DEFAULT_EMPTY_ROWS, DTYPES, EMPTY_ROWS
from attncheck.spec.dtypes import round_to

WIDTH = 4
"""D and Dv: 1/sqrt(D) and 1/D are exact in every dtype."""
_STANDARD_DEVIATION = 1.5
"""Standard deviation of queries and keys: weights differ, and none is nearly 1."""


@dataclass(frozen=True, eq=False)
class CallMeaning:
    """One meaning of a call, and the result that shows it.

    Either the stage times ``factor`` is the exact answer of ``problem``; or every number in its ``rows`` (of queries)
    is ``constant``, and all others may be anything.
    """

    text: str
    problem: Problem | None = None
    factor: float = 1.0
    constant: float = 0.0
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, eq=False)
class ConventionQuestion:
    """A call with its meanings; the first one is the meaning in attncheck's cases, if it ``is_in_cases``.

    ``declaration`` maps the words of a meaning to the convention and value by which a function declares it, if it can.
    ``call_counted_from_end`` is the call for a function whose keywords count from the last query and key: its second
    meaning.
    """

    name: str
    asks: str
    call: Problem
    meanings: tuple[CallMeaning, ...]
    stage: str = "output"
    declaration: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_in_cases: bool = True
    call_counted_from_end: Problem | None = None

    def counted_from_the_end(self, causal: str) -> ConventionQuestion:
        """Return the question for a function whose causality and windows count from the last query and key.

        Those of the contract count from the first ones. ``causal`` is the function's keyword for causality.
        """
        asked = replace(self, asks=self.asks.replace("is_causal", causal))
        if self.call_counted_from_end is None:
            return asked
        first, second, *others = self.meanings
        return replace(asked, call=self.call_counted_from_end, meanings=(second, first, *others))

    @property
    def expected(self) -> str:
        """The meaning in attncheck's cases; empty if no case has this call, or none judges its result."""
        return self.meanings[0].text if self.is_in_cases else ""


def _random_normal(seed: int, *shape: int) -> Array:
    return np.random.RandomState(seed).standard_normal(shape) * _STANDARD_DEVIATION


def _make_call(queries: int, keys: int, *, heads: int = 2, key_heads: int | None = None, batch: int = 1) -> Problem:
    shape = batch, key_heads or heads, keys, WIDTH
    query = _random_normal(1, batch, heads, queries, WIDTH)
    return Problem("attention", {}, {}).with_changes(
        query=query, key=_random_normal(2, *shape), value=_random_normal(3, *shape)
    )


def _parse_mask(rows: str) -> Array:
    """Return a mask (1, 1, Lq, Lk) from rows such as ``"110 011"``, 1 where a query may attend to a key."""
    return np.array([[character == "1" for character in row] for row in rows.split()])[np.newaxis, np.newaxis]


def _causal_mask(queries: int, keys: int, offset: int) -> Array:
    return (np.arange(keys) <= np.arange(queries)[:, np.newaxis] + offset)[np.newaxis, np.newaxis]


def _make_question(
    name: str,
    asks: str,
    call: Problem,
    words: str,
    meant: Problem | None = None,
    call_counted_from_end: Problem | None = None,
) -> ConventionQuestion:
    """Return a question whose first meaning is the call itself or another one, and whose others are readings."""
    readings = [
        CallMeaning(text, problems_under_reading(reading, call)[0])
        for reading, text in READINGS_BY_QUESTION[name].items()
    ]
    meanings = (CallMeaning(words, meant or call), *readings)
    return ConventionQuestion(name, asks, call, meanings, call_counted_from_end=call_counted_from_end)


def _causality_questions() -> list[ConventionQuestion]:
    few, many = _make_call(3, 5), _make_call(5, 3)
    past = _make_call(3, 3).with_changes(
        past_key=_random_normal(4, 1, 2, 2, WIDTH), past_value=_random_normal(5, 1, 2, 2, WIDTH)
    )
    causal, corner = {"is_causal": True}, "the corner is {}"
    top, bottom, ignored = corner.format("top left"), corner.format("bottom right"), "causality is left out"
    later = many.with_changes(mask=_causal_mask(5, 3, -2))
    masked = _make_call(4, 4).with_changes(mask=_parse_mask("1011 1101 0111 1011"))
    both = masked.inputs["mask"] & _causal_mask(4, 4, 0)
    return [
        _make_question(
            "causal, more keys than queries",
            "which keys a query sees with is_causal",
            few.with_changes(causal),
            top,
            few.with_changes(mask=_causal_mask(3, 5, 0)),
            call_counted_from_end=few.with_changes(mask=_causal_mask(3, 5, 2)),
        ),
        ConventionQuestion(
            "causal, more queries than keys",
            "which keys a query sees with is_causal",
            many.with_changes(causal),
            (
                CallMeaning(top, many.with_changes(mask=_causal_mask(5, 3, 0))),
                *(
                    CallMeaning(f"{bottom}, without a key: {value}", later.with_changes({"empty_rows": value}))
                    for value in sorted(EMPTY_ROWS, key=DEFAULT_EMPTY_ROWS.__ne__)
                ),
                CallMeaning(ignored, many),
            ),
            declaration={f"{bottom}, without a key: {value}": ("corner", "bottom_right") for value in EMPTY_ROWS},
            call_counted_from_end=later,
        ),
        ConventionQuestion(
            "causal, after a past",
            "where queries stand with is_causal, past_key and past_value",
            past.with_changes(causal),
            (
                CallMeaning("after the past", past.with_changes(mask=_causal_mask(3, 5, 2))),
                CallMeaning("at the first key of the past", past.with_changes(mask=_causal_mask(3, 5, 0))),
                CallMeaning(ignored, past),
                CallMeaning(
                    "the past is left out",
                    past.with_changes(past_key=None, past_value=None, mask=_causal_mask(3, 3, 0)),
                ),
            ),
            is_in_cases=False,  # they pass a mask
        ),
        _make_question(
            "causal, with a mask",
            "which keys a query sees with is_causal and a mask",
            masked.with_changes(causal),
            "keys that both allow",
            masked.with_changes(mask=both),
        ),
    ]


def _mask_questions() -> list[ConventionQuestion]:
    masked = _make_call(3, 4).with_changes(mask=_parse_mask("1011 1100 0110"))
    biased = _make_call(3, 4).with_changes(bias=_random_normal(6, 1, 2, 3, 4))
    empty = _make_call(3, 4).with_changes(mask=_parse_mask("1011 0000 0110"))
    unmasked = empty.with_changes(mask=_parse_mask("1011 1111 0110"))
    lengths = _make_call(3, 5, batch=2).with_changes(key_lengths=np.array([2, 4]))
    words = {"zero": "0", "uniform": "the mean of all values", "nan": "NaN"}
    return [
        _make_question("mask", "what true means in a mask", masked, "may attend"),
        _make_question("bias", "what a bias is added to", biased, "the scaled scores"),
        ConventionQuestion(
            "a query without a key",
            "what the output is",
            empty,
            (
                *(CallMeaning(words[value], empty.with_changes({"empty_rows": value})) for value in words),
                CallMeaning("as if nothing were masked", unmasked),
            ),
            declaration={text: ("empty_rows", value) for value, text in words.items()},
        ),
        _make_question("key_lengths", "which keys count", lengths, "the first ones"),
    ]


def _option_questions() -> list[ConventionQuestion]:
    plain = _make_call(3, 4)
    window, across = (
        _make_call(6, 6).with_changes({"window": (2, 0)}),
        _make_call(3, 6).with_changes({"window": (1, 1)}),
    )
    capped = _make_call(3, 4).with_changes({"softcap": 1.0}, bias=_random_normal(6, 1, 2, 3, 4))
    hidden = _make_call(3, 4).with_changes({"softcap": 1.0}, mask=_parse_mask("1011 1100 0110"))
    grouped = _make_call(3, 4, heads=4, key_heads=2)
    return [
        _make_question(
            "scale, by default",
            "what the scores are multiplied by",
            plain,
            "1/sqrt(D)",
            plain.with_changes({"scale": WIDTH**-0.5}),
        ),
        _make_question("scale, of 0", "what the scores are multiplied by", plain.with_changes({"scale": 0.0}), "0"),
        _make_question("softcap, with a bias", "what is capped", capped, "the scores before the bias"),
        _make_question("softcap, with a mask", "what is capped", hidden, "the scores before the mask"),
        _make_question("window (2, 0)", "how many keys a query sees", window, "its own and two before"),
        _make_question(
            "window (1, 1), more keys than queries",
            "where the first query stands",
            across,
            "at the first key",
            call_counted_from_end=across.with_changes(
                {"window": None}, mask=_causal_mask(3, 6, 4) & ~_causal_mask(3, 6, 1)
            ),
        ),
        _make_question("grouped heads", "which key head query head h takes", grouped, "h // (H / Hkv)"),
    ]


def _statistics_questions() -> list[ConventionQuestion]:
    plain, empty = _make_call(3, 4), _make_call(3, 4).with_changes(mask=_parse_mask("1011 0000 0110"))
    constants = (("-inf", -np.inf), ("0", 0.0), ("+inf", np.inf), ("NaN", np.nan))
    return [
        ConventionQuestion(
            "log_sum_exp",
            "of which base it is",
            plain,
            (
                CallMeaning("e", plain),
                CallMeaning("2", plain, factor=float(np.log(2))),
                CallMeaning("e, of scores without a scale", plain.with_changes({"scale": 1.0})),
            ),
            stage="log_sum_exp",
        ),
        ConventionQuestion(
            "log_sum_exp without a key",
            "what it is",
            empty,
            (
                *(CallMeaning(words, constant=constant, rows=slice(1, 2)) for words, constant in constants),
                CallMeaning("as if nothing were masked", empty.with_changes(mask=_parse_mask("1011 1111 0110"))),
            ),
            stage="log_sum_exp",
        ),
    ]


def _hidden_number_questions() -> Iterable[ConventionQuestion]:
    """Yield the questions about a number at key 2, which is masked for every query."""
    masked = _make_call(3, 4).with_changes(mask=_parse_mask("1101 1001 0101"))
    meanings = (CallMeaning("nothing", masked), CallMeaning("it makes the output NaN", constant=np.nan))
    for name in ("key", "value"):
        for words, number in (("NaN", np.nan), ("infinity", np.inf)):
            array = masked.inputs[name].copy()
            array[..., 2, :] = number
            call = masked.with_changes(None, **{name: array})
            # Cases leave the result open.
            yield ConventionQuestion(f"{words} in a masked {name}", "what it does", call, meanings, is_in_cases=False)


def _add_declarations(question: ConventionQuestion) -> ConventionQuestion:
    """Return a question with the declarations of its meanings that are readings."""
    options = {
        words: CONVENTION_OF_READING.get(name) for name, words in READINGS_BY_QUESTION.get(question.name, {}).items()
    }
    of_readings = {words: option for words, option in options.items() if option is not None}
    return replace(question, declaration={**of_readings, **question.declaration})


QUESTIONS: tuple[ConventionQuestion, ...] = tuple(
    _add_declarations(question)
    for of_a_kind in (
        _causality_questions,
        _mask_questions,
        _option_questions,
        _statistics_questions,
        _hidden_number_questions,
    )
    for question in of_a_kind()
)
"""All questions, in the order in which they are shown."""


_UNIT_CHANGE_SLACK = 4.0
"""In another unit, a result and its parts may each round in a neighbouring binade, with at most twice the error: a
factor of 2 * 2."""
_MIN_DISTANCE_RATIO = 25.0
"""Results in bfloat16 instead of float32 have errors of a hundredth, and meanings differ by half."""
_MAX_RELATIVE_DISTANCE = 1e-3
"""Of the largest number, for a single meaning. A choice: twice the unit roundoff of float16; a wrong convention
changes a result by far more."""
MeasurementKind = Literal["measured", "open", "unsupported", "failed"]


@dataclass(frozen=True)
class MeasuredConvention:
    """The measured meaning of one question for an implementation.

    Attributes:
        question: The question.
        kind: ``measured``; ``open`` if the result is none of the meanings, or several; ``unsupported``; ``failed`` if
            the call raised an error, ended the process or took too long.
        means: The words of the meaning; without one, the result, or the reason why there is none.
        declared: The declared meaning, in the same words; empty if the implementation declares none.
        declares: The convention by which a user's function should declare its meaning; empty if that is not necessary.
        declaration: The value of that convention.
        is_exact: True if the result is within the error bounds of the meaning; False if it is only much nearer to it
            than to any other.
    """

    question: ConventionQuestion
    kind: MeasurementKind
    means: str
    declared: str = ""
    declares: str = ""
    declaration: str = ""
    is_exact: bool = True

    @property
    def departs(self) -> bool:
        """True if the meaning is another one than in attncheck's cases."""
        return self.kind in ("measured", "open") and self.means != (self.question.expected or self.means)

    @property
    def contradicts(self) -> bool:
        """True if the implementation declares another meaning."""
        return bool(self.declared) and self.kind in ("measured", "open") and self.declared != self.means


def measured_reading_names(answers: Sequence[MeasuredConvention]) -> list[str]:
    """Return the names of the readings that were measured and differ from the meaning in cases."""
    readings: dict[str, None] = {}
    for answer in answers:
        words, question = answer.means, answer.question
        if answer.kind != "measured" or not answer.departs:
            continue
        names = [name for name, text in READINGS_BY_QUESTION.get(question.name, {}).items() if text == words]
        option = question.declaration.get(words)
        readings |= dict.fromkeys(
            names or [name for name, declared in CONVENTION_OF_READING.items() if declared == option]
        )
    return list(readings)


def measure_conventions_within(implementation: Implementation, seconds: float, limits: Limits) -> list[str]:
    """Return the readings that are measured of a user's implementation in so many seconds.

    Questions whose keywords it lacks are left out, and those after the time.
    """
    if not isinstance(implementation.entry, UserImplementation):
        return []
    until = time.monotonic() + seconds
    problems = ((asked, asked.call) for asked in QUESTIONS if asked.is_in_cases)
    questions = [asked for asked, call in problems if unsupported_reason(implementation, call, lambda: call) is None]  # noqa: B023
    return measured_reading_names(measure_all_conventions(implementation, None, limits, questions, until))


def most_exact_dtype(implementation: Implementation, wanted: str | None = None) -> str:
    """Return the dtype for the questions: the most exact dtype of an implementation, unless another is wanted.

    Raises:
        UsageError: It declares no such dtype.
    """
    declared = [name for name in DTYPES if implementation.rounding_model(name)]
    chosen = wanted or next(iter(declared), "")
    if chosen not in declared:
        raise UsageError(
            f"{implementation.name} declares no {chosen or 'dtype'}; expected one of {', '.join(declared)}"
        )
    return chosen


def measure_all_conventions(
    implementation: Implementation,
    dtype: str | None = None,
    limits: Limits | None = None,
    questions: Sequence[ConventionQuestion] = QUESTIONS,
    until: float = math.inf,
) -> list[MeasuredConvention]:
    """Run the questions on an implementation, in its most exact dtype unless another is given.

    No question starts after ``until``, a time of the monotonic clock. No keyword sets a convention: the results show
    the default behaviour.

    Raises:
        UsageError: It declares no such dtype.
    """
    family = FAMILIES.get(getattr(implementation.entry, "signature", ""))
    if family is not None and family.corner == "bottom right":
        questions = [question.counted_from_the_end(family.causal_argument) for question in questions]
    chosen = most_exact_dtype(implementation, dtype)
    with closing(WorkerPool(limits, probes_state=False)) as workers:
        runner = workers.worker_for(implementation, chosen)
        in_time = takewhile(lambda _: time.monotonic() < until, questions)
        return [_measure_question(question, implementation, chosen, runner) for question in in_time]


def _measure_question(
    question: ConventionQuestion, implementation: Implementation, dtype: str, runner: GroupRunner[Any]
) -> MeasuredConvention:
    known = {option[0]: option for option in question.declaration.values()}
    others = {name: value for name, value in implementation.declared_readings.items() if name not in known}
    call = rewrite_for_conventions(question.call, others)  # a declared convention is measured only by its own question
    if call is None:
        return MeasuredConvention(
            question, "unsupported", f"it declares {', '.join(others)}, by which no call means this"
        )
    problem = problem_of_question(replace(question, call=call), dtype)
    rounding_model = implementation.rounding_model(dtype)
    assert rounding_model is not None, "the dtype was chosen for that"
    measured = _match_outcome(question, runner.evaluate(problem), dtype, rounding_model)
    if not question.declaration:
        return measured
    declared = implementation.mode_declarations.conventions
    declared_option = next(((name, declared[name].value) for name in known if name in declared), None)
    if declared_option is not None:
        words = [text for text, option in question.declaration.items() if option == declared_option]
        measured = replace(measured, declared=measured.means if measured.means in words else next(iter(words), ""))
    is_own = isinstance(implementation.entry, UserImplementation)
    is_open = measured.departs and declared_option is None
    is_open = is_open and not ("empty_rows" in known and _has_empty_rows_keyword(problem, runner))
    if is_own and (measured.contradicts or is_open) and measured.means in question.declaration:
        name, value = question.declaration[measured.means]
        return replace(measured, declares=name, declaration=value)
    return measured


def _has_empty_rows_keyword(problem: Problem, runner: GroupRunner[Any]) -> bool:
    """Return whether the function has a keyword ``empty_rows``, by which cases set the convention."""
    outcome = runner.evaluate(problem.with_options(empty_rows=DEFAULT_EMPTY_ROWS))
    return isinstance(outcome, Computed) and not outcome.ignored_conventions


def problem_of_question(question: ConventionQuestion, dtype: str) -> Problem:
    """Return the call of a question in a dtype."""
    return replace(question.call, inputs=_round_inputs(question.call.inputs, dtype), dtype=dtype)


def _match_outcome(
    question: ConventionQuestion, outcome: Outcome, dtype: str, rounding_model: str
) -> MeasuredConvention:
    if isinstance(outcome, Failure):
        is_unsupported = outcome.verdict == "unsupported"
        return MeasuredConvention(question, "unsupported" if is_unsupported else "failed", outcome.message)
    assert isinstance(outcome, Computed), "an outcome is one or the other"
    array = outcome.stages.get(question.stage)
    if array is None:
        return MeasuredConvention(question, "unsupported", f"it does not return {question.stage}")
    compared = array, dtype, rounding_model
    matching = [meaning.text for meaning in question.meanings if matches_meaning(question, meaning, *compared)]
    if len(matching) == 1:
        return MeasuredConvention(question, "measured", matching[0])
    if matching:
        return MeasuredConvention(question, "open", " or ".join(matching))
    nearest = _nearest_meaning(question, array, dtype)
    if nearest is None:
        return MeasuredConvention(question, "open", f"something else: {_describe_result(question, array)}")
    return MeasuredConvention(question, "measured", nearest.text, is_exact=False)


def _nearest_meaning(question: ConventionQuestion, array: Array, dtype: str) -> CallMeaning | None:
    """Return the meaning that is much nearer to the result than any other; None if there is none."""
    distances = sorted(
        (_error_against_meaning(question, meaning, array, dtype), number)
        for number, meaning in enumerate(question.meanings)
        if meaning.problem is not None
    )
    if not distances or not np.isfinite(distances[0][0]):
        return None
    (least, number), *others = distances
    if others:
        return question.meanings[number] if least * _MIN_DISTANCE_RATIO < others[0][0] else None
    # A single meaning has no other to compare with: the result has to be near in absolute terms.
    largest = float(np.abs(array, dtype=np.float64).max(initial=0.0))
    return question.meanings[number] if least < _MAX_RELATIVE_DISTANCE * largest else None


def _error_against_meaning(question: ConventionQuestion, meaning: CallMeaning, array: Array, dtype: str) -> float:
    """Return the largest error against a meaning; infinite if NaN and infinity are at other places."""
    exact = truth_of_meaning(meaning, dtype).exact.get(question.stage)
    if exact is None or exact.high.shape != array.shape:
        return float("inf")
    numbers = array.astype(np.float64) * meaning.factor
    is_odd = ~np.isfinite(exact.high)
    if not np.array_equal(numbers[is_odd], exact.high[is_odd], equal_nan=True):
        return float("inf")
    if not np.isfinite(numbers[~is_odd]).all():
        return float("inf")
    return float(np.abs(numbers - exact.high)[~is_odd].max(initial=0.0))


def matches_meaning(
    question: ConventionQuestion, meaning: CallMeaning, array: Array, dtype: str, rounding_model: str
) -> bool:
    """Return whether the result is that of a meaning, within the bounds of the rounding model."""
    if meaning.problem is None:
        numbers = array[:, :, meaning.rows]
        return bool(np.array_equal(numbers, np.full_like(numbers, meaning.constant), equal_nan=True))
    truth = truth_of_meaning(meaning, dtype)
    exact = truth.exact.get(question.stage)
    if exact is None or exact.high.shape != array.shape:
        return False
    truth = truth.for_returned_dtypes({question.stage: array})
    if meaning.factor == 1:
        return stage_agrees(truth.stage_reference(question.stage, rounding_model, array), array)
    # A result in another unit is rounded to a neighbouring exponent at most, and so are its parts.
    allowed = _UNIT_CHANGE_SLACK * (
        truth.bounds.bounds_by_stage(rounding_model)[question.stage].max_error + exact.radius
    )
    return bool((np.abs(array.astype(np.float64) * meaning.factor - exact.high) <= allowed).all())


@lru_cache(maxsize=256)
def truth_of_meaning(meaning: CallMeaning, dtype: str) -> Truth:
    """Return the exact answer of a meaning."""
    problem = meaning.problem
    assert problem is not None, "a constant has no problem"
    return find_truth(replace(problem, inputs=_round_inputs(problem.inputs, dtype), dtype=dtype), whole=True)


def _round_inputs(inputs: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """Round inputs to a dtype, except for masks and counts."""
    return {name: array if array.dtype.kind in "bi" else round_to(array, dtype) for name, array in inputs.items()}


def _describe_result(question: ConventionQuestion, array: Array) -> str:
    """Describe a result that no meaning explains."""
    if (nan := np.isnan(array)).any():
        return f"{np.count_nonzero(nan)} of {array.size} numbers are NaN"
    if question.stage == "log_sum_exp":
        return f"{float(np.ravel(array[:, :, 1:2])[0]):.6g}"
    return f"shape {array.shape}, first number {float(np.ravel(array)[0]):.6g}" if array.size else "nothing"
