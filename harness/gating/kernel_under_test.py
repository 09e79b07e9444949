"""A kernel under the gate: its two kinds of process, the calls that are made, and what is concluded from a failure.

The kernel runs in a process of a check, which shows that it is one, and in blind processes (``blind_calls.py``), which
do not. A failure in a blind process is made again: there, in a new blind process, and in a process of a check. From
which of these fail follows the name of the behaviour.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from attncheck.asking.answer import Answer
from attncheck.asking.engine import Engine
from attncheck.asking.question import Question
from attncheck.common.errors import ExitCode
from attncheck.common.store import Store
from attncheck.execution.call import Limits
from attncheck.execution.call_server import CHANGED_INPUT, LATE, OVERWRITTEN
from attncheck.execution.implementations import Implementation, UserImplementation, as_blind
from attncheck.execution.operations import OVERWRITTEN_FAULT, SECOND_CALL_FAULT, UNWRITTEN_FAULT, is_state_fault
from attncheck.execution.signatures import INPUTS_BY_FUNCTION
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.gating.behaviours import (
    DELEGATES,
    DEPENDS_ON_CALLS,
    DEPENDS_ON_LAYOUT,
    DEPENDS_ON_TIME,
    FAILS,
    LEAVES_THREADS,
    ONLY_KNOWN_CASES,
    RECOGNISES_TESTS,
    UNWRITTEN,
    VARIED_SURROUNDINGS,
    WRONG,
    WRONG_LATER,
    WRONG_NOW_AND_THEN,
)
from attncheck.judging.judge import (
    NEVER_WRITTEN_DIAGNOSIS,
    NEXT_CALL_DIAGNOSIS,
    OTHER_CALL_DIAGNOSIS,
    RIGHT_IN_NEW_PROCESS_DIAGNOSIS,
)
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.results.format import Row
from attncheck.searching.concrete import case_of_problem, count_elements, drawn_case_id, has_nonfinite
from attncheck.spec import DEFAULT_OPERATION
from attncheck.spec.dtypes import round_to
from attncheck.spec.verdicts import Verdict

MAX_CONFIRMED = 2
"""Failures of a step that are made again in other processes. A choice: each starts two processes."""
_REPEATS_TO_CONFIRM = 2
"""Calls of one kind of process that have to agree, so that chance is not taken for a difference between processes."""
_SECONDS_UNTIL_OLD, _MAX_REPLAYED_CALLS, _SECONDS_TO_REPLAY, _RECENT_CALLS = 8.0, 20_000, 12.0, 60
"""Seconds after which a process may have become wrong with time. Then at most so many calls are made again in a new
process, in at most so many seconds, and the most recent ones again with their own numbers."""
_SMALL_PROBLEM = 1 << 14
"""Elements of a problem that is repeated often."""


@dataclass(frozen=True)
class Finding:
    """Something that speaks against merging a kernel.

    Attributes:
        behaviour: Its name in ``BEHAVIOURS``.
        step: The step of the gate that saw it.
        text: What was seen.
        call: The call in which it was seen: its shapes, options and dtype.
        count: In how many calls it was seen.
        cause: The convention or mistake that gives these numbers, if it is known.
    """

    behaviour: str
    step: str
    text: str
    call: str = ""
    count: int = 1
    cause: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the finding for people."""
        times = f" (seen {self.count:,} times)" if self.count > 1 else ""
        yield f"  {self.step}: {self.text}{times}"
        if self.call:
            yield f"    call   {self.call}"
        if self.cause:
            yield f"    cause  {self.cause} (docs/diagnoses.md)"


@dataclass
class KernelUnderTest:
    """A kernel, the engine that runs it, and what was seen so far.

    Attributes:
        implementation: The kernel as a check calls it.
        engine: Runs and judges calls.
        dtypes: The dtypes that the kernel declares, of those that are judged.
        seed: The seed of all problems.
        blind: The kernel as blind processes call it.
        findings: What speaks against merging.
        right_questions: Small calls whose results were right, for steps that repeat them.
        delegations: In how many calls some other attention was called, by its name.
        standard_cases_agree: Whether the standard cases agree; without them, nothing else is known.
        judged_counts: How many calls of each step were judged; and likewise those unsupported and those that fail.
        call_count: How many calls the blind process that is kept has made.
        begun: The time of its first call, by ``time.monotonic``.
    """

    implementation: Implementation
    engine: Engine
    dtypes: Sequence[str]
    seed: int
    findings: list[Finding] = field(default_factory=list)
    right_questions: list[Question] = field(default_factory=list)
    delegations: Counter[str] = field(default_factory=Counter)
    standard_cases_agree: bool = True
    judged_counts: Counter[str] = field(default_factory=Counter)
    unsupported_counts: Counter[str] = field(default_factory=Counter)
    failed_counts: Counter[str] = field(default_factory=Counter)
    _confirmed: Counter[str] = field(default_factory=Counter)
    call_count: int = 0
    begun: float = field(default_factory=time.monotonic)
    _recent_questions: deque[Question] = field(default_factory=lambda: deque(maxlen=_RECENT_CALLS))

    def __post_init__(self) -> None:
        self.blind = as_blind(self.implementation)

    @classmethod
    def make(cls, implementation: Implementation, limits: Limits, store: Store, seed: int) -> KernelUnderTest:
        """Return a kernel before its first call."""
        dtypes = [dtype for dtype in implementation.mode_declarations.classes if implementation.rounding_model(dtype)]
        return cls(implementation, Engine(limits, store, probes_state=False), dtypes, seed)

    @property
    def is_program(self) -> bool:
        """True if the kernel is a program in any language."""
        entry = self.implementation.entry
        return isinstance(entry, UserImplementation) and bool(entry.target.program)

    def as_question(self, problem: Problem, name: str) -> Question:
        """Return a problem as a question. Raises ``CaseError`` if it is no valid case."""
        return Question(case_of_problem(problem, None, drawn_case_id(problem, name), max_listed=0), problem.dtype)

    def compute(self, question: Question, step: str) -> Outcome:
        """Make a call in the blind process that is kept, and note what was observed around it."""
        self.begun = self.begun if self.call_count else time.monotonic()
        outcome = self.engine.compute(self.blind, question)
        self.call_count += 1
        if isinstance(outcome, Computed):
            self._recent_questions.append(question)
        self.note_observations(outcome, question, step)
        return outcome

    def note_observations(self, outcome: Outcome, question: Question, step: str) -> None:
        """Note what was observed around a call as findings."""
        for observation in outcome.observations:
            if observation.behaviour != DELEGATES:
                self.add_finding(Finding(observation.behaviour, step, observation.text, describe_call(question)))
        faults = outcome.faults.values() if isinstance(outcome, Computed) else ()
        for fault in filter(is_state_fault, faults):
            self.add_finding(Finding(UNWRITTEN, step, fault, describe_call(question)))

    def add_finding(self, finding: Finding) -> None:
        """Add a finding, or count it with an earlier one of the same behaviour and step."""
        for place, other in enumerate(self.findings):
            if (other.behaviour, other.step, other.cause) == (finding.behaviour, finding.step, finding.cause):
                self.findings[place] = replace(other, count=other.count + finding.count)
                return
        self.findings.append(finding)

    def record_answer(self, answer: Answer, step: str, previous: Question | None = None) -> None:
        """Count a judged call; conclude what a failure means, for the first failures of a step."""
        question = answer.question
        if answer.is_unsupported:
            self.unsupported_counts[step] += 1
            return
        self.judged_counts[step] += 1
        if not is_unexpected(answer):
            if count_elements(question.problem) <= _SMALL_PROBLEM:
                self.right_questions.append(question)
            return
        self.failed_counts[step] += 1
        if self._confirmed[step] < MAX_CONFIRMED:
            self._confirmed[step] += 1
            self.add_finding(self.conclude(answer, step, previous))

    def conclude(self, answer: Answer, step: str, previous: Question | None = None) -> Finding:
        """Repeat a failed call in new processes, and return the behaviour that explains where it fails."""
        question, text = answer.question, failure_text(answer)
        behaviour = WRONG
        problem = question.problem
        row_by_row = replace(problem, memory_layout={})
        is_late = any(other.behaviour == LATE for other in self.findings)
        failed = answer.failed
        if failed is not None and failed.verdict in _VERDICTS_OF_ENDED_CALLS:  # to make it again takes as long
            behaviour = FAILS
        elif self._is_right_in_new_process(self.blind, question):
            behaviour, words = self.conclude_from_new_process(question, previous)
            text = f"{text}; {words}"
        elif failed is not None:
            behaviour = behaviour_of_failure(failed.verdict, failed.message)
        elif problem.memory_layout and self._is_right_in_new_process(self.blind, question, row_by_row):
            behaviour, text = DEPENDS_ON_LAYOUT, f"{text}; right if the inputs lie row by row in memory"
        elif not is_late and self._is_right_in_new_process(self.implementation, question):
            behaviour, text = RECOGNISES_TESTS, f"{text}; right in a process that imports attncheck"
        elif self.standard_cases_agree and step in _STEPS_OF_USUAL_CALLS:
            behaviour = ONLY_KNOWN_CASES
        return Finding(behaviour, step, text, describe_call(question), cause=answer.diagnosis or "")

    def conclude_from_new_process(self, question: Question, previous: Question | None) -> tuple[str, str]:
        """Return the behaviour of a kernel that fails a call, but not in a new process, and what was seen."""
        if self._is_wrong(lambda: self.engine.ask(self.blind, question)):
            if self._is_wrong_with_time(question):
                age = time.monotonic() - self.begun
                return DEPENDS_ON_TIME, f"the process is {age:.0f} s old, and right in a new one after as many calls"
            return DEPENDS_ON_CALLS, "the same call is right in a new process"
        after = [previous] if previous is not None else []
        if after and self._is_wrong(lambda: self.engine.run_in_new_process(self.blind, question, after)):
            return DEPENDS_ON_CALLS, "right in a new process, and wrong there after the call before it"
        return WRONG_NOW_AND_THEN, "the same call is right when it is made again"

    def record_check(self, failures: Sequence[Row], step: str) -> None:
        """Turn the failing rows of the standard cases into findings, by behaviour and cause."""
        self.standard_cases_agree = not failures
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in failures:
            behaviour = behaviour_of_failure(row.verdict, row.message)
            behaviour = _BEHAVIOURS_BY_DIAGNOSIS.get(row.diagnosis or "", behaviour)
            groups.setdefault((behaviour, row.diagnosis or ""), []).append(row)
        for (behaviour, cause), rows in groups.items():
            first, count = rows[0], len({row.case for row in rows})
            text = f"{first.stage or 'the call'} is {first.verdict}: {first.message}"
            self.add_finding(Finding(behaviour, step, text, f"case {first.case} in {first.dtype}", count, cause))

    def _is_wrong_with_time(self, question: Question) -> bool:
        """Return whether a call that fails in the old process is right in a new one after as many and the same calls.

        The last calls of the old process are made again, and before them as many calls as it has made, of one problem.
        """
        if time.monotonic() - self.begun < _SECONDS_UNTIL_OLD or not self._recent_questions:
            return False
        recent = [item for item in self._recent_questions if item.dtype == question.dtype]
        problems = [*(item.problem for item in recent), question.problem]
        order = [0] * self.call_count + [*range(len(problems))]
        if self.call_count > _MAX_REPLAYED_CALLS:
            return False
        with self.engine.workers.new_process_worker(self.blind, question.dtype) as worker:
            repeated = worker.repeat_calls(problems, order, _SECONDS_TO_REPLAY)
        if isinstance(repeated, Failure) or repeated.call_count < len(order):
            return False
        last = next(result for result in repeated.results[-1] if result.positions[-1] == len(order) - 1)
        return self.engine.judge(self.blind, question, last.outcome).agrees

    def _is_right_in_new_process(
        self, implementation: Implementation, question: Question, problem: Problem | None = None
    ) -> bool:
        """Return whether a call is right in a new process, each time that it is made there.

        It may be made as another ``problem`` with the same numbers.
        """
        with self.engine.workers.new_process_worker(implementation, question.dtype) as worker:
            outcomes = [worker.evaluate(problem or question.problem) for _ in range(_REPEATS_TO_CONFIRM)]
        return all(self.engine.judge(implementation, question, outcome).agrees for outcome in outcomes)

    def _is_wrong(self, ask: Callable[[], Answer]) -> bool:
        return all(is_unexpected(ask()) for _ in range(_REPEATS_TO_CONFIRM))

    def root_findings(self) -> list[Finding]:
        """Return the findings without what only follows from others.

        If results change after a call, other differences between calls are called wrong. If a result depends on earlier
        calls, differences between surroundings may have the same cause. If few fresh problems fail, they are hard ones.
        """
        names = {finding.behaviour for finding in self.findings}
        renamed = _CONSEQUENCES_OF_LATENESS if LATE in names else frozenset[str]()
        dropped = VARIED_SURROUNDINGS if names & _DEPENDENCES_ON_CALLS and LATE not in names else ()
        few = _SHARE_OF_HARD_PROBLEMS * self.judged_counts[FRESH_STEP]
        if not self.failed_counts[FIRST_STEP] and self.failed_counts[FRESH_STEP] <= few:
            renamed |= {ONLY_KNOWN_CASES}
        return [
            replace(finding, behaviour=WRONG) if finding.behaviour in renamed else finding
            for finding in self.findings
            if finding.behaviour not in dropped
        ]


FIRST_STEP, FRESH_STEP, MORE_STEP = "first calls", "fresh problems", "more problems"
_VERDICTS_OF_ENDED_CALLS = (Verdict.TIMEOUT, Verdict.CRASH, Verdict.UNTRIED)
_STEPS_OF_USUAL_CALLS = (FIRST_STEP, FRESH_STEP, MORE_STEP)
_SHARE_OF_HARD_PROBLEMS = 0.2
"""Of fresh problems: a kernel that stores answers fails most of them."""
_DEPENDENCES_ON_CALLS = frozenset({DEPENDS_ON_CALLS, WRONG_NOW_AND_THEN, WRONG_LATER})
_CONSEQUENCES_OF_LATENESS = frozenset(
    {RECOGNISES_TESTS, ONLY_KNOWN_CASES, DEPENDS_ON_CALLS, WRONG_NOW_AND_THEN, WRONG_LATER, *VARIED_SURROUNDINGS}
)


def is_unexpected(answer: Answer) -> bool:
    """Return whether a call fails in a way that no list of expected failures has."""
    return any(stage not in answer.expected_failures for stage in answer.failing_stages)


_BEHAVIOURS_BY_WORDS = {
    "changed its input": CHANGED_INPUT,
    "thread(s) running": LEAVES_THREADS,
    "forked, and the child": LEAVES_THREADS,
    UNWRITTEN_FAULT: UNWRITTEN,
    OVERWRITTEN_FAULT: OVERWRITTEN,
    SECOND_CALL_FAULT: DEPENDS_ON_CALLS,
}
"""By words of a message of a check: the behaviour that it tells."""


_BEHAVIOURS_BY_DIAGNOSIS = {
    NEVER_WRITTEN_DIAGNOSIS: UNWRITTEN,
    NEXT_CALL_DIAGNOSIS: OVERWRITTEN,
    **dict.fromkeys((OTHER_CALL_DIAGNOSIS, RIGHT_IN_NEW_PROCESS_DIAGNOSIS), DEPENDS_ON_CALLS),
}


def behaviour_of_failure(verdict: str, message: str) -> str:
    """Return the behaviour that a failure shows by itself: by its message, or whether it has numbers at all."""
    by_words = (behaviour for words, behaviour in _BEHAVIOURS_BY_WORDS.items() if words in message)
    return next(by_words, FAILS if Verdict(verdict).exit_code is ExitCode.NOT_RUN else WRONG)


def failure_text(answer: Answer) -> str:
    """Return what is wrong in a line."""
    failing = answer.first_failing
    return answer.failure if failing is None else f"{failing.stage} is {failing.verdict}: {failing.message}"


def describe_call(question: Question) -> str:
    """Return the operation, shapes, options and dtype of a call in a line."""
    problem = question.problem
    shapes = ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in problem.inputs.items())
    options = "".join(f", {name} = {value}" for name, value in problem.options.items())
    numbers = ", with NaN or infinity" if has_nonfinite(problem) else ""
    return f"{problem.operation} in {question.dtype}: {shapes}{options}{numbers}"


def seconds_until(deadline: float) -> float:
    """Return the seconds until a time of ``time.monotonic``."""
    return deadline - time.monotonic()


def plain_problems(seed: int, dtypes: Iterable[str]) -> list[Problem]:
    """Return calls that nearly every kernel of attention supports, in usual and in odd shapes.

    Tests of kernels draw normal or uniform numbers; so do these calls, for kernels that take a shortcut for either.
    """
    random, problems = np.random.default_rng(seed), []
    for dtype in dtypes:
        for draw, (batch, count, queries, keys, width) in (
            (random.standard_normal, (2, 2, 17, 17, 16)),
            (random.standard_normal, (1, 4, 33, 33, 32)),
            (random.standard_normal, (1, 2, 5, 70, 8)),
            (random.random, (1, 4, 40, 40, 32)),
        ):
            problems.append(random_attention(draw, dtype, (batch, count, count), (queries, keys), (width, width)))
    return problems


def random_attention(
    draw: Callable[[tuple[int, ...]], Array],
    dtype: str,
    counts: tuple[int, int, int],
    lengths: tuple[int, int],
    widths: tuple[int, int],
) -> Problem:
    """Return attention on random numbers: batch entries, query heads and key heads, then queries and keys, D and Dv."""
    entries, query_heads, key_heads = counts
    axes = (
        (query_heads, lengths[0], widths[0]),
        (key_heads, lengths[1], widths[0]),
        (key_heads, lengths[1], widths[1]),
    )
    inputs = {
        name: round_to(draw((entries, *shape)), dtype).astype(np.float64)
        for name, shape in zip(INPUTS_BY_FUNCTION[DEFAULT_OPERATION], axes, strict=True)
    }
    return Problem(DEFAULT_OPERATION, {}, inputs, dtype)
