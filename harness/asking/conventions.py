"""The questions: one call of attention each, and what it is if the implementation means this or that.

A meaning is the same problem with everything said: a mask in place of causality, a scale in place of none. Its exact
answer is what the call gives if that is meant, so that a question has to be asked with numbers for which no two
meanings have the same answer (``tests/harness/conventions`` proves that they have not, in every dtype). To ask another
one, add it to ``QUESTIONS``.

Questions asked of an implementation in its worker, and their answers compared with what they may mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from attncheck.asking.engine import Workers
from attncheck.backends.families import FAMILIES
from attncheck.common.errors import UsageError
from attncheck.diagnosis.declared import rewrite_for_conventions
from attncheck.diagnosis.readings import ASKED, problems_read_as
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.padding import lack_of
from attncheck.execution.runner import GroupRunner
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.judge_stages import agrees
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.spec import DECLARED_READINGS, DEFAULT_EMPTY_ROWS, DTYPES, EMPTY_ROWS
from attncheck.spec.dtypes import rounded_once

WIDTH = 4
"""D and Dv: 1/sqrt(D) and 1/D are exact in every dtype."""
_SPREAD = 1.5
"""Standard deviation of queries and keys: weights differ, and none is nearly 1."""


@dataclass(frozen=True, eq=False)
class Meaning:
    """What a call may mean, and by what that shows.

    Either the stage is the exact answer of ``problem``, times ``factor``; or every number of its ``rows`` (which count
    queries) is ``constant``, and all others are whatever they are.
    """

    words: str
    problem: Problem | None = None
    factor: float = 1.0
    constant: float = 0.0
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, eq=False)
class ConventionQuestion:
    """A call, and its meanings, of which the first is what attncheck's cases mean, unless they never ask it.

    ``declaration`` maps words to the convention and its value by which a function declares this, where it can.
    ``from_the_end`` is the call of a function whose own words count from the last query and key: its second meaning.
    """

    name: str
    asks: str
    call: Problem
    meanings: tuple[Meaning, ...]
    stage: str = "output"
    declaration: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_in_cases: bool = True
    from_the_end: Problem | None = None

    def counted_from_the_end(self, causal: str) -> ConventionQuestion:
        """Return the question for a function whose word for causality, and windows, count from the last query and key.

        The contract's words count from the first. What such a function is asked by its own word is then never called.
        """
        asked = replace(self, asks=self.asks.replace("is_causal", causal))
        if self.from_the_end is None:
            return asked
        first, second, *others = self.meanings
        return replace(asked, call=self.from_the_end, meanings=(second, first, *others))

    @property
    def expected(self) -> str:
        """What attncheck's cases mean; empty where they never ask it, or do not judge what comes back."""
        return self.meanings[0].words if self.is_in_cases else ""


def _normal(seed: int, *shape: int) -> Array:
    return np.random.RandomState(seed).standard_normal(shape) * _SPREAD


def _call(queries: int, keys: int, *, heads: int = 2, key_heads: int | None = None, batch: int = 1) -> Problem:
    shape = batch, key_heads or heads, keys, WIDTH
    query = _normal(1, batch, heads, queries, WIDTH)
    return Problem("attention", {}, {}).but(query=query, key=_normal(2, *shape), value=_normal(3, *shape))


def _mask(rows: str) -> Array:
    """Return a mask (1, 1, Lq, Lk) from rows such as ``"110 011"``, 1 where a query may attend to a key."""
    return np.array([[character == "1" for character in row] for row in rows.split()])[np.newaxis, np.newaxis]


def _causal(queries: int, keys: int, offset: int) -> Array:
    return (np.arange(keys) <= np.arange(queries)[:, np.newaxis] + offset)[np.newaxis, np.newaxis]


def _read(question: str, call: Problem) -> Iterator[Meaning]:
    """Yield what else a call of a question may mean, by the catalogue of readings."""
    for name, words in ASKED[question].items():
        first, *_ = problems_read_as(name, call)
        yield Meaning(words, first)


def _question(
    name: str, asks: str, call: Problem, words: str, meant: Problem | None = None, from_the_end: Problem | None = None
) -> ConventionQuestion:
    """Return a question whose first meaning is the call itself or another one, and whose others are readings."""
    meanings = (Meaning(words, meant or call), *_read(name, call))
    return ConventionQuestion(name, asks, call, meanings, from_the_end=from_the_end)


def _causality() -> list[ConventionQuestion]:
    few, many = _call(3, 5), _call(5, 3)
    past = _call(3, 3).but(past_key=_normal(4, 1, 2, 2, WIDTH), past_value=_normal(5, 1, 2, 2, WIDTH))
    causal, corner = {"is_causal": True}, "the corner is {}"
    top, bottom, ignored = corner.format("top left"), corner.format("bottom right"), "causality is left out"
    later = many.but(mask=_causal(5, 3, -2))
    masked = _call(4, 4).but(mask=_mask("1011 1101 0111 1011"))
    both = masked.inputs["mask"] & _causal(4, 4, 0)
    return [
        _question(
            "causal, more keys than queries",
            "which keys a query sees with is_causal",
            few.but(causal),
            top,
            few.but(mask=_causal(3, 5, 0)),
            from_the_end=few.but(mask=_causal(3, 5, 2)),
        ),
        ConventionQuestion(
            "causal, more queries than keys",
            "which keys a query sees with is_causal",
            many.but(causal),
            (
                Meaning(top, many.but(mask=_causal(5, 3, 0))),
                *(
                    Meaning(f"{bottom}, without a key: {value}", later.but({"empty_rows": value}))
                    for value in sorted(EMPTY_ROWS, key=DEFAULT_EMPTY_ROWS.__ne__)
                ),
                Meaning(ignored, many),
            ),
            declaration={f"{bottom}, without a key: {value}": ("corner", "bottom_right") for value in EMPTY_ROWS},
            from_the_end=later,
        ),
        ConventionQuestion(
            "causal, after a past",
            "where queries stand with is_causal, past_key and past_value",
            past.but(causal),
            (
                Meaning("after the past", past.but(mask=_causal(3, 5, 2))),
                Meaning("at the first key of the past", past.but(mask=_causal(3, 5, 0))),
                Meaning(ignored, past),
                Meaning("the past is left out", past.but(past_key=None, past_value=None, mask=_causal(3, 3, 0))),
            ),
            is_in_cases=False,  # they hand a mask over
        ),
        _question(
            "causal, with a mask",
            "which keys a query sees with is_causal and a mask",
            masked.but(causal),
            "keys that both allow",
            masked.but(mask=both),
        ),
    ]


def _masks() -> list[ConventionQuestion]:
    masked = _call(3, 4).but(mask=_mask("1011 1100 0110"))
    biased = _call(3, 4).but(bias=_normal(6, 1, 2, 3, 4))
    empty = _call(3, 4).but(mask=_mask("1011 0000 0110"))
    unmasked = empty.but(mask=_mask("1011 1111 0110"))
    lengths = _call(3, 5, batch=2).but(key_lengths=np.array([2, 4]))
    words = {"zero": "0", "uniform": "the mean of all values", "nan": "NaN"}
    return [
        _question("mask", "what true means in a mask", masked, "may attend"),
        _question("bias", "what a bias is added to", biased, "the scaled scores"),
        ConventionQuestion(
            "a query without a key",
            "what the output is",
            empty,
            (
                *(Meaning(words[value], empty.but({"empty_rows": value})) for value in words),
                Meaning("as if nothing were masked", unmasked),
            ),
            declaration={text: ("empty_rows", value) for value, text in words.items()},
        ),
        _question("key_lengths", "which keys count", lengths, "the first ones"),
    ]


def _options() -> list[ConventionQuestion]:
    plain = _call(3, 4)
    window, across = _call(6, 6).but({"window": (2, 0)}), _call(3, 6).but({"window": (1, 1)})
    capped = _call(3, 4).but({"softcap": 1.0}, bias=_normal(6, 1, 2, 3, 4))
    hidden = _call(3, 4).but({"softcap": 1.0}, mask=_mask("1011 1100 0110"))
    grouped = _call(3, 4, heads=4, key_heads=2)
    return [
        _question(
            "scale, by default",
            "what the scores are multiplied by",
            plain,
            "1/sqrt(D)",
            plain.but({"scale": WIDTH**-0.5}),
        ),
        _question("scale, of 0", "what the scores are multiplied by", plain.but({"scale": 0.0}), "0"),
        _question("softcap, with a bias", "what is capped", capped, "the scores before the bias"),
        _question("softcap, with a mask", "what is capped", hidden, "the scores before the mask"),
        _question("window (2, 0)", "how many keys a query sees", window, "its own and two before"),
        _question(
            "window (1, 1), more keys than queries",
            "where the first query stands",
            across,
            "at the first key",
            from_the_end=across.but({"window": None}, mask=_causal(3, 6, 4) & ~_causal(3, 6, 1)),
        ),
        _question("grouped heads", "which key head query head h takes", grouped, "h // (H / Hkv)"),
    ]


def _statistics() -> list[ConventionQuestion]:
    plain, empty = _call(3, 4), _call(3, 4).but(mask=_mask("1011 0000 0110"))
    constants = (("-inf", -np.inf), ("0", 0.0), ("+inf", np.inf), ("NaN", np.nan))
    return [
        ConventionQuestion(
            "log_sum_exp",
            "of which base it is",
            plain,
            (
                Meaning("e", plain),
                Meaning("2", plain, factor=float(np.log(2))),
                Meaning("e, of scores without a scale", plain.but({"scale": 1.0})),
            ),
            stage="log_sum_exp",
        ),
        ConventionQuestion(
            "log_sum_exp without a key",
            "what it is",
            empty,
            (
                *(Meaning(words, constant=constant, rows=slice(1, 2)) for words, constant in constants),
                Meaning("as if nothing were masked", empty.but(mask=_mask("1011 1111 0110"))),
            ),
            stage="log_sum_exp",
        ),
    ]


def _hidden_numbers() -> Iterable[ConventionQuestion]:
    """Ask what a number does that nobody may attend to: at key 2, which is masked for every query."""
    masked = _call(3, 4).but(mask=_mask("1101 1001 0101"))
    meanings = (Meaning("nothing", masked), Meaning("it makes the output NaN", constant=np.nan))
    for name in ("key", "value"):
        for words, number in (("NaN", np.nan), ("infinity", np.inf)):
            array = masked.inputs[name].copy()
            array[..., 2, :] = number
            call = masked.but(None, **{name: array})
            # What it does is open.
            yield ConventionQuestion(f"{words} in a masked {name}", "what it does", call, meanings, is_in_cases=False)


def _with_declarations(question: ConventionQuestion) -> ConventionQuestion:
    """Return a question with the declarations of its meanings that are readings."""
    found = {words: DECLARED_READINGS.get(name) for name, words in ASKED.get(question.name, {}).items()}
    own = {words: option for words, option in found.items() if option is not None}
    return replace(question, declaration={**own, **question.declaration})


QUESTIONS: tuple[ConventionQuestion, ...] = tuple(
    _with_declarations(question)
    for of_a_kind in (_causality, _masks, _options, _statistics, _hidden_numbers)
    for question in of_a_kind()
)
"""All questions, in the order in which they are shown."""


_OTHER_UNIT = 4.0
_NEARER = 25.0
"""What is computed in bfloat16 in place of float32 is a hundredth off, and meanings differ by half."""
_NEAR = 1e-3
Kind = Literal["measured", "open", "unsupported", "failed"]


@dataclass(frozen=True)
class MeasuredConvention:
    """What an implementation means by one question.

    Attributes:
        question: What was asked.
        kind: ``measured``; ``open`` where what came back is none of the meanings, or several; ``unsupported``, or
            ``failed`` where the call raised, ended or took too long.
        means: The meaning's words; what came back, or why nothing did, where it is none.
        declared: What the implementation declares, in the same words; empty where it declares nothing of this.
        declares: The convention by which somebody's own function declares what it does; empty where nothing has to be
            declared.
        declaration: The value of that convention.
        is_exact: Whether what came back is within the error bounds of what it means, and not merely far nearer to that
            than to anything else.
    """

    question: ConventionQuestion
    kind: Kind
    means: str
    declared: str = ""
    declares: str = ""
    declaration: str = ""
    is_exact: bool = True

    @property
    def departs(self) -> bool:
        """Whether this is not what attncheck's cases mean."""
        return self.kind in ("measured", "open") and self.means != (self.question.expected or self.means)

    @property
    def contradicts(self) -> bool:
        """Whether the implementation declares otherwise."""
        return bool(self.declared) and self.kind in ("measured", "open") and self.declared != self.means


def readings_of_answers(answers: Sequence[MeasuredConvention]) -> list[str]:
    """Return the names of the readings that an implementation's answers are, where cases mean otherwise."""
    found: dict[str, None] = {}
    for answer in answers:
        words, question = answer.means, answer.question
        if answer.kind != "measured" or not answer.departs:
            continue
        names = [name for name, text in ASKED.get(question.name, {}).items() if text == words]
        option = question.declaration.get(words)
        found |= dict.fromkeys(names or [name for name, declared in DECLARED_READINGS.items() if declared == option])
    return list(found)


def ask_within(implementation: Implementation, seconds: float, limits: Limits) -> list[str]:
    """Return the readings that a user's implementation shows when it is asked what it can be asked, in so many seconds.

    Questions whose keywords it has not are left out, and those for which there is no time.
    """
    if not isinstance(implementation.entry, UserImplementation):
        return []
    until = time.monotonic() + seconds
    problems = ((each, each.call) for each in QUESTIONS if each.is_in_cases)
    questions = [each for each, call in problems if lack_of(implementation, call, lambda: call) is None]  # noqa: B023
    return readings_of_answers(ask_all(implementation, None, limits, questions, until))


def most_exact_dtype(implementation: Implementation, wanted: str | None = None) -> str:
    """Return the dtype in which an implementation is asked: the most exact one, unless another is wanted.

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


def ask_all(
    implementation: Implementation,
    dtype: str | None = None,
    limits: Limits | None = None,
    questions: Sequence[ConventionQuestion] = QUESTIONS,
    until: float = math.inf,
) -> list[MeasuredConvention]:
    """Ask an implementation what it means, in one of its dtypes: the most exact one, unless another is asked for.

    Nothing is asked after a time of the monotonic clock, ``until``. Conventions are asked for by no keyword: what comes
    back is what it does by itself.

    Raises:
        UsageError: It declares no such dtype.
    """
    family = FAMILIES.get(getattr(implementation.entry, "signature", ""))
    if family is not None and family.corner == "bottom right":
        questions = [each.counted_from_the_end(family.says_causal) for each in questions]
    chosen = most_exact_dtype(implementation, dtype)
    with closing(Workers(limits, probes_state=False)) as workers:
        runner = workers.worker_for(implementation, chosen)
        in_time = takewhile(lambda _: time.monotonic() < until, questions)
        return [_asked(question, implementation, chosen, runner) for question in in_time]


def _asked(
    question: ConventionQuestion, implementation: Implementation, dtype: str, runner: GroupRunner[Any]
) -> MeasuredConvention:
    known = {option[0]: option for option in question.declaration.values()}
    others = {name: value for name, value in implementation.reads_calls_as.items() if name not in known}
    call = rewrite_for_conventions(question.call, others)  # what it declares is asked by itself, and nowhere else
    if call is None:
        return MeasuredConvention(
            question, "unsupported", f"it declares {', '.join(others)}, by which no call means this"
        )
    problem = problem_of_question(replace(question, call=call), dtype)
    rounding_model = implementation.rounding_model(dtype)
    assert rounding_model is not None, "the dtype was chosen for that"
    found = _measured(question, runner.evaluate(problem), dtype, rounding_model)
    if not question.declaration:
        return found
    declared = implementation.declared.conventions
    own = next(((name, declared[name].value) for name in known if name in declared), None)
    if own is not None:
        words = [text for text, option in question.declaration.items() if option == own]
        found = replace(found, declared=found.means if found.means in words else next(iter(words), ""))
    is_own = isinstance(implementation.entry, UserImplementation)
    is_open = found.departs and own is None and not ("empty_rows" in known and _has_keyword(problem, runner))
    if is_own and (found.contradicts or is_open) and found.means in question.declaration:
        name, value = question.declaration[found.means]
        return replace(found, declares=name, declaration=value)
    return found


def _has_keyword(problem: Problem, runner: GroupRunner[Any]) -> bool:
    """Return whether the function has a keyword ``empty_rows``, by which cases ask for what they mean."""
    outcome = runner.evaluate(problem.with_options(empty_rows=DEFAULT_EMPTY_ROWS))
    return isinstance(outcome, Computed) and not outcome.not_asked


def problem_of_question(question: ConventionQuestion, dtype: str) -> Problem:
    """Return the call of a question in a dtype."""
    return replace(question.call, inputs=_stored(question.call.inputs, dtype), dtype=dtype)


def _measured(question: ConventionQuestion, outcome: Outcome, dtype: str, rounding_model: str) -> MeasuredConvention:
    if isinstance(outcome, Failure):
        is_unsupported = outcome.verdict == "unsupported"
        return MeasuredConvention(question, "unsupported" if is_unsupported else "failed", outcome.message)
    assert isinstance(outcome, Computed), "an outcome is one or the other"
    array = outcome.stages.get(question.stage)
    if array is None:
        return MeasuredConvention(question, "unsupported", f"it does not return {question.stage}")
    found = [each.words for each in question.meanings if is_meant(question, each, array, dtype, rounding_model)]
    if len(found) == 1:
        return MeasuredConvention(question, "measured", found[0])
    if found:
        return MeasuredConvention(question, "open", " or ".join(found))
    nearest = _nearest(question, array, dtype)
    if nearest is None:
        return MeasuredConvention(question, "open", f"something else: {_described(question, array)}")
    return MeasuredConvention(question, "measured", nearest.words, is_exact=False)


def _nearest(question: ConventionQuestion, array: Array, dtype: str) -> Meaning | None:
    """Return the meaning that what came back is far nearer to than to any other; None where there is none."""
    distances = sorted(
        (_distance(question, each, array, dtype), number)
        for number, each in enumerate(question.meanings)
        if each.problem is not None
    )
    if not distances or not np.isfinite(distances[0][0]):
        return None
    (least, number), *others = distances
    if others:
        return question.meanings[number] if least * _NEARER < others[0][0] else None
    # Of one alone nobody can say that others are farther: it has to be near in itself.
    largest = float(np.abs(array, dtype=np.float64).max(initial=0.0))
    return question.meanings[number] if least < _NEAR * largest else None


def _distance(question: ConventionQuestion, meaning: Meaning, array: Array, dtype: str) -> float:
    """Return the largest error against a meaning; infinite where NaN and infinity are elsewhere."""
    exact = truth_of_meaning(meaning, dtype).exact.get(question.stage)
    if exact is None or exact.high.shape != array.shape:
        return float("inf")
    own = array.astype(np.float64) * meaning.factor
    is_odd = ~np.isfinite(exact.high)
    if not np.array_equal(own[is_odd], exact.high[is_odd], equal_nan=True) or not np.isfinite(own[~is_odd]).all():
        return float("inf")
    return float(np.abs(own - exact.high)[~is_odd].max(initial=0.0))


def is_meant(question: ConventionQuestion, meaning: Meaning, array: Array, dtype: str, rounding_model: str) -> bool:
    """Return whether what came back is what a meaning gives, within the bounds of the rounding model."""
    if meaning.problem is None:
        own = array[:, :, meaning.rows]
        return bool(np.array_equal(own, np.full_like(own, meaning.constant), equal_nan=True))
    truth = truth_of_meaning(meaning, dtype)
    exact = truth.exact.get(question.stage)
    if exact is None or exact.high.shape != array.shape:
        return False
    truth = truth.for_returned({question.stage: array})
    if meaning.factor == 1:
        return agrees(truth.reference(question.stage, rounding_model, array), array)
    # Another unit is rounded elsewhere, to a neighbouring exponent at most, and so is what it is made of.
    allowed = _OTHER_UNIT * (truth.bounds.of(rounding_model)[question.stage].max_error + exact.radius)
    return bool((np.abs(array.astype(np.float64) * meaning.factor - exact.high) <= allowed).all())


@lru_cache(maxsize=256)
def truth_of_meaning(meaning: Meaning, dtype: str) -> Truth:
    """Return the exact answer of what a call may mean."""
    problem = meaning.problem
    assert problem is not None, "a constant has no problem"
    return find_truth(replace(problem, inputs=_stored(problem.inputs, dtype), dtype=dtype), whole=True)


def _stored(inputs: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """Round inputs to a dtype, except for masks and counts."""
    return {name: array if array.dtype.kind in "bi" else rounded_once(array, dtype) for name, array in inputs.items()}


def _described(question: ConventionQuestion, array: Array) -> str:
    """Say of what came back what can be said without knowing what it is."""
    if (nan := np.isnan(array)).any():
        return f"{np.count_nonzero(nan)} of {array.size} numbers are NaN"
    if question.stage == "log_sum_exp":
        return f"{float(np.ravel(array[:, :, 1:2])[0]):.6g}"
    return f"shape {array.shape}, first number {float(np.ravel(array)[0]):.6g}" if array.size else "nothing"
