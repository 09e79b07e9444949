"""The steps of the gate in blind processes: fresh problems, repetition, sizes, surroundings and delegation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from attncheck.asking.answer import Answer
from attncheck.asking.question import Question
from attncheck.common.errors import CaseError
from attncheck.common.wording import count_noun
from attncheck.execution.implementations import as_blind
from attncheck.execution.repeating import DistinctResult, RepeatedCalls
from attncheck.execution.runner import GroupRunner
from attncheck.execution.worker import Failure
from attncheck.gating.behaviours import (
    DELEGATES,
    DEPENDS_ON_ENVIRONMENT,
    DEPENDS_ON_LAYOUT,
    DEPENDS_ON_THREADS,
    FAILS,
    WRONG,
    WRONG_BEYOND_SIZE,
    WRONG_LATER,
    WRONG_NOW_AND_THEN,
)
from attncheck.gating.kernel_under_test import (
    FIRST_STEP,
    FRESH_STEP,
    Finding,
    KernelUnderTest,
    describe_call,
    failure_text,
    is_unexpected,
    plain_problems,
    random_attention,
    seconds_until,
)
from attncheck.reading.problem import Problem
from attncheck.searching.concrete import FeatureCounts
from attncheck.searching.findings import ProblemSubject
from attncheck.searching.problems import DrawSettings, ProblemSource
from attncheck.spec import QUERY_KEY_VALUE

REPETITION_STEP, SIZE_STEP, SURROUNDINGS_STEP = "repetition", "sizes", "surroundings"
DELEGATION_STEP, END_STEP = "delegation", "the end"
_MAX_PENDING = 16
"""Problems that are called before the first of them is judged."""
_REPEATED_PROBLEMS, _MAX_JUDGED_RESULTS = 4, 6
"""Problems that are repeated, and distinct results of each that are judged: those furthest from the first."""
_CALLS_PER_SECOND = 260
"""Repeated calls for each second of the step. A choice: a call of a small problem takes one to three milliseconds."""
_MIN_REPEATED_CALLS, _MAX_REPEATED_CALLS = 300, 20_000
_TEST_VARIABLES = {"CI": "true", "GITHUB_ACTIONS": "true", "PYTEST_CURRENT_TEST": "test_kernel (call)", "DEBUG": "1"}
"""Variables that test runners and CI systems set; blind processes have none of them otherwise."""
_OTHER_THREADS = (2, 3)
_LAYOUTS = ("strided", "padded", "unaligned", "sliced", "transposed", "reversed")
_MAX_OBSERVED = 24
"""Calls in which delegation is observed."""


class FreshProblems:
    """Draws problems that nobody knows beforehand, calls the kernel with them in a blind process, and judges them."""

    def __init__(self, subject: KernelUnderTest) -> None:
        self._subject = subject
        counts, asked = FeatureCounts(), ProblemSubject(subject.implementation, subject.engine)
        self._counts = counts
        self._source = ProblemSource(
            DrawSettings(subject.seed), subject.dtypes, counts, missing_features=asked.missing_features
        )
        self._numbers = count()

    def run(self, deadline: float, max_problems: float = math.inf, step: str = FRESH_STEP) -> None:
        """Call and judge problems until a time, or so many; they are counted as those of a step."""
        subject, pending = self._subject, deque[tuple[Future[Answer], Question | None]]()
        previous: Question | None = None
        drawn = 0
        while seconds_until(deadline) > 0 and drawn < max_problems:
            drawn += 1
            number = next(self._numbers)
            problem = self._source.draw_problem(number)
            try:
                question = subject.as_question(problem, f"problem-{number}")
            except CaseError:  # the drawn inputs do not fit together
                continue
            outcome = subject.compute(question, step)
            answer = subject.engine.judge_in_background(subject.blind, question, outcome)
            refused = answer.done() and answer.result().is_unsupported
            self._counts.record_answer(
                problem, is_refused=refused, missing_features=answer.result().lacks if refused else ()
            )
            pending.append((answer, previous))
            previous = previous if refused else question
            if len(pending) == _MAX_PENDING:
                judged, before = pending.popleft()
                subject.record_answer(judged.result(), step, before)
        for judged, before in pending:
            subject.record_answer(judged.result(), step, before)


def run_first_problems(subject: KernelUnderTest) -> list[Question]:
    """Make the calls that the last step makes again; return those whose results were right."""
    questions = [
        subject.as_question(problem, f"plain-{number}")
        for number, problem in enumerate(plain_problems(subject.seed, subject.dtypes))
    ]
    for question in questions:
        answer = subject.engine.judge(subject.blind, question, subject.compute(question, FIRST_STEP))
        subject.record_answer(answer, FIRST_STEP)
    return [question for question in questions if question in subject.right_questions]


def repeat_problems(subject: KernelUnderTest, firsts: Sequence[Question], deadline: float) -> None:
    """Repeat a few problems in random order in one blind process, and look for results that differ.

    Among them are pairs of one shape with other numbers, and at the end is one more call of each.
    """
    random = np.random.default_rng(subject.seed)
    questions = _choose_repeated(subject, firsts, random)
    if not questions:
        return
    seconds = max(1.0, 0.8 * seconds_until(deadline))
    total = int(min(max(_CALLS_PER_SECOND * seconds, _MIN_REPEATED_CALLS), _MAX_REPEATED_CALLS))
    order = [*random.integers(len(questions), size=total).tolist(), *range(len(questions))]
    worker = subject.engine.workers.worker_for(subject.blind, questions[0].dtype)
    repeated = worker.repeat_calls([question.problem for question in questions], order, seconds)
    if isinstance(repeated, Failure):
        subject.add_finding(Finding(FAILS, REPETITION_STEP, f"{repeated.verdict}: {repeated.message}"))
        return
    for observation in repeated.observations:
        subject.add_finding(Finding(observation.behaviour, REPETITION_STEP, observation.text))
    for question, results, dropped in zip(questions, repeated.results, repeated.dropped, strict=True):
        _judge_repeated(subject, question, results, dropped, repeated)
    subject.judged_counts[REPETITION_STEP] += repeated.call_count
    subject.call_count += repeated.call_count


def _choose_repeated(
    subject: KernelUnderTest, firsts: Sequence[Question], random: np.random.Generator
) -> list[Question]:
    """Return small problems of one dtype, each with another of the same shapes."""
    dtype = firsts[0].dtype if firsts else subject.dtypes[0]
    right = {id(question): question for question in (*firsts, *subject.right_questions) if question.dtype == dtype}
    with_options = sorted(
        right.values(), key=lambda question: -len({*question.problem.options, *question.problem.inputs})
    )
    chosen = dict.fromkeys((*firsts[:2], *with_options[: _REPEATED_PROBLEMS - 2]))
    questions = []
    for question in chosen:
        if question.dtype != dtype:
            continue
        numbers = {
            name: array * array.dtype.type(random.choice([0.5, -1.0]))
            for name, array in question.problem.inputs.items()
            if name in QUERY_KEY_VALUE and array.dtype.kind == "f"
        }
        wide = {
            name: array.astype(np.float64) if question.problem.input_specs[name].is_number else array
            for name, array in {**question.problem.inputs, **numbers}.items()
        }
        twin = replace(question.problem, inputs=wide, stages=None)
        questions.append(question)
        if len(numbers) == len(QUERY_KEY_VALUE):
            with suppress(CaseError):
                questions.append(subject.as_question(twin, f"twin-{len(questions)}"))
    return questions


def _judge_repeated(
    subject: KernelUnderTest,
    question: Question,
    results: Sequence[DistinctResult],
    dropped: int,
    repeated: RepeatedCalls,
) -> None:
    """Judge the results of one problem that are furthest from its first one, and conclude from when they are wrong."""
    first = results[0]
    furthest = sorted(results[1:], key=lambda result: -result.distance_from(first))[: _MAX_JUDGED_RESULTS - 1]
    answers = {
        id(result): subject.engine.judge(subject.blind, question, result.outcome) for result in (first, *furthest)
    }
    wrong = [result for result in (first, *furthest) if is_unexpected(answers[id(result)])]
    if not wrong:
        return
    positions = sorted(position for result in wrong for position in result.positions)
    right = sorted(position for result in results if result not in wrong for position in result.positions)
    calls = len(positions) + len(right) + dropped
    text = failure_text(answers[id(wrong[0])])
    if right and min(positions) > max(right) and len(positions) > 1:
        behaviour = WRONG_LATER
        seen = f"right until call {max(right) + 1:,} of the process, and wrong from call {min(positions) + 1:,} on"
    else:
        was_right = WRONG_LATER if question in subject.right_questions else WRONG
        behaviour = WRONG_NOW_AND_THEN if right else was_right
        least, most = rate_interval(len(positions), calls)
        seen = f"wrong in {len(positions):,} of {calls:,} equal calls (95 % interval {least:.2%} to {most:.2%})"
    cause = answers[id(wrong[0])].diagnosis or ""
    subject.failed_counts[REPETITION_STEP] += len(positions)
    subject.add_finding(
        Finding(behaviour, REPETITION_STEP, f"{seen}: {text}", describe_call(question), len(positions), cause)
    )


def rate_interval(hits: int, calls: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the interval of Wilson (1927) for a rate, by default of 95 % confidence.

    Example:
        >>> [round(limit, 4) for limit in rate_interval(0, 100)]
        [0.0, 0.037]
    """
    rate, square = hits / calls, z * z
    centre = (rate + square / (2 * calls)) / (1 + square / calls)
    spread = z / (1 + square / calls) * math.sqrt(rate * (1 - rate) / calls + square / (4 * calls * calls))
    return max(0.0, centre - spread), min(1.0, centre + spread)


_LENGTH_LADDER = (1_025, 4_097, 8_195, 16_389, 65_536)
_WIDTH_LADDER = (129, 257, 320, 512)
_COUNT_LADDER = (33, 129)


def size_problems(subject: KernelUnderTest, dtype: str) -> Iterator[tuple[str, int, Problem]]:
    """Yield ladders of problems, one axis longer and longer, with few numbers along the others."""
    draw = np.random.default_rng([subject.seed, 1]).standard_normal
    for length in _LENGTH_LADDER:
        yield "keys", length, random_attention(draw, dtype, (1, 1, 1), (2, length), (8, 8))
    for width in _WIDTH_LADDER:
        yield "head width", width, random_attention(draw, dtype, (1, 1, 1), (3, 7), (width, width))
    for length in _LENGTH_LADDER:
        yield "queries", length, random_attention(draw, dtype, (1, 1, 1), (length, 3), (8, 8))
    for number in _COUNT_LADDER:
        yield "attention heads", number, random_attention(draw, dtype, (1, number, number), (3, 5), (8, 8))
    for entries in _COUNT_LADDER:
        yield "batch entries", entries, random_attention(draw, dtype, (entries, 1, 1), (3, 5), (8, 8))


def try_sizes(subject: KernelUnderTest, dtype: str, deadline: float) -> Iterator[str]:
    """Call sizes beyond those of any case; yield what was right up to which size."""
    largest: dict[str, int] = {}
    failing: set[str] = set()
    for number, (axis, size, problem) in enumerate(size_problems(subject, dtype)):
        if axis in failing or seconds_until(deadline) <= 0:
            continue
        question = subject.as_question(problem, f"size-{number}")
        answer = subject.engine.judge(subject.blind, question, subject.compute(question, SIZE_STEP))
        if answer.is_unsupported:
            subject.unsupported_counts[SIZE_STEP] += 1
            continue
        subject.judged_counts[SIZE_STEP] += 1
        if not is_unexpected(answer):
            largest[axis] = size
            continue
        failing.add(axis)
        subject.failed_counts[SIZE_STEP] += 1
        finding = subject.conclude(answer, SIZE_STEP)
        if finding.behaviour == WRONG and axis in largest:
            seen = f"wrong with {size:,} {axis}, right with {largest[axis]:,}: {finding.text}"
            finding = replace(finding, behaviour=WRONG_BEYOND_SIZE, text=seen)
        subject.add_finding(finding)
    yield from (f"{size:,} {axis}" for axis, size in largest.items())


def try_surroundings(subject: KernelUnderTest, firsts: Sequence[Question], deadline: float) -> None:
    """Make right calls again: in other memory layouts, with other threads, and with the variables of tests."""
    questions = list(dict.fromkeys((*firsts[:3], *subject.right_questions[:2])))
    framework = subject.implementation.entry.framework
    usual = [subject.engine.workers.worker_for(subject.blind, question.dtype) for question in questions]
    for question, worker in zip(questions, usual, strict=True):
        for kind in _LAYOUTS:
            if seconds_until(deadline) <= 0 or (kind == "reversed" and framework != "numpy"):
                continue
            names = [name for name in QUERY_KEY_VALUE if name in question.problem.inputs]
            if all(question.problem.inputs[name].ndim == 4 for name in names):
                problem = replace(question.problem, memory_layout=dict.fromkeys(names, kind))
                _try_variant(subject, question, problem, worker, (DEPENDS_ON_LAYOUT, f"with {kind} inputs"))
        if seconds_until(deadline) > 0:
            columns = {name: np.asfortranarray(array) for name, array in question.problem.inputs.items()}
            problem = replace(question.problem, inputs=columns)
            _try_variant(subject, question, problem, worker, (DEPENDS_ON_LAYOUT, "with inputs in Fortran's order"))
    for threads in _OTHER_THREADS:
        for question in questions if seconds_until(deadline) > 0 else ():
            worker = subject.engine.workers.worker_for(subject.blind, question.dtype, threads)
            _try_variant(subject, question, question.problem, worker, (DEPENDS_ON_THREADS, f"with {threads} threads"))
    if questions and seconds_until(deadline) > 0:
        blind = as_blind(subject.implementation, _TEST_VARIABLES)
        with subject.engine.workers.new_process_worker(blind, questions[0].dtype, keep_going=True) as worker:
            for question in (question for question in questions if question.dtype == questions[0].dtype):
                seen = DEPENDS_ON_ENVIRONMENT, "with the environment variables of a test"
                _try_variant(subject, question, question.problem, worker, seen)


def _try_variant(
    subject: KernelUnderTest, question: Question, problem: Problem, worker: GroupRunner[Any], seen: tuple[str, str]
) -> None:
    """Make a call in other surroundings; if it is wrong there, and right in the usual ones, add a finding."""
    behaviour, words = seen
    outcome = worker.evaluate(problem)
    subject.note_observations(outcome, question, SURROUNDINGS_STEP)
    answer = subject.engine.judge(subject.blind, question, outcome)
    if answer.is_unsupported:
        return
    subject.judged_counts[SURROUNDINGS_STEP] += 1
    if not is_unexpected(answer):
        return
    subject.failed_counts[SURROUNDINGS_STEP] += 1
    usual = subject.engine.ask(subject.blind, question)
    if is_unexpected(usual):
        subject.add_finding(subject.conclude(usual, SURROUNDINGS_STEP))
    else:
        text = f"wrong {words}, right without: {failure_text(answer)}"
        subject.add_finding(Finding(behaviour, SURROUNDINGS_STEP, text, describe_call(question)))


def observe_delegation(subject: KernelUnderTest, firsts: Sequence[Question], deadline: float) -> None:
    """Make right calls in a blind process that observes which attention of a library they call."""
    observing = as_blind(subject.implementation, observes_delegation=True)
    for question in [*dict.fromkeys((*firsts, *subject.right_questions))][:_MAX_OBSERVED]:
        if seconds_until(deadline) <= 0:
            return
        outcome = subject.engine.compute(observing, question)
        if isinstance(outcome, Failure):
            continue
        subject.judged_counts[DELEGATION_STEP] += 1
        names = {item.text for item in outcome.observations if item.behaviour == DELEGATES}
        subject.delegations.update(names)
        subject.failed_counts[DELEGATION_STEP] += bool(names)


def repeat_first_problems(subject: KernelUnderTest, firsts: Sequence[Question]) -> None:
    """Make the first calls again in the process that has made all calls, and conclude from those that are wrong now."""
    subject.unsupported_counts[END_STEP] += not firsts
    for question in firsts:
        answer = subject.engine.judge(subject.blind, question, subject.compute(question, END_STEP))
        subject.record_answer(answer, END_STEP)


def describe_counts(subject: KernelUnderTest, step: str) -> str:
    """Return how many calls of a step were judged, and how many of them fail."""
    judged, failed = subject.judged_counts[step], subject.failed_counts[step]
    refused = subject.unsupported_counts[step]
    outcome = f"{failed:,} fail" if failed else "all right"
    words = f"{count_noun(judged, 'call')} judged, {outcome}" if judged else "nothing was judged"
    return words if not refused else f"{words}; {refused:,} unsupported"
