"""The search: problems are drawn and judged, and those that fail in a new way are reduced and written as cases.

``reduce_case`` reduces any failing case of any file, for ``attncheck reduce`` and ``attncheck repro``.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from attncheck.asking.answer import Answer
from attncheck.asking.engine import Engine
from attncheck.asking.question import Question
from attncheck.common.errors import CaseError
from attncheck.common.progress import duration
from attncheck.common.wording import count_noun, format_element
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.reading.case import Case, case_record
from attncheck.reading.problem import Problem
from attncheck.reports.one_failure import failure_of_rows
from attncheck.results.format import FAILURE_NUMBERS
from attncheck.searching.concrete import (
    concrete_case,
    count_elements,
    has_nonfinite,
    kind_of,
    read_concrete,
    required_features,
)
from attncheck.searching.findings import (
    ProblemSubject,
    SearchFinding,
    SearchFolder,
    Symptom,
    file_name,
    name_of,
    read_written,
    symptom_of,
    write_case,
)
from attncheck.searching.problems import Draw, ProblemSource
from attncheck.searching.reduction import MAX_SECONDS, MAX_TRIES, Reduced, reduce_problem
from attncheck.searching.results import SearchResults

MAX_FINDINGS = 20
"""A search stops then: there is enough to fix."""
_SAVED_EVERY = 200
"""Problems between two writes of the state."""

_AHEAD = 16
"""Problems that are run before the first of them has to be judged, independent of the number of processes: so a search
is the same on every machine."""
_WORTH_PROCESSES = 64
"""Running so many problems takes as long as starting processes that judge."""

SECONDS_TO_FINISH = 4.0
"""Time after the end of a search to finish its current step: run a failure in a fresh process, write a script."""

Say = Callable[[str], None]


class SearchOver(Exception):
    """The time of a search is over, in any step."""


@contextmanager
def ended_after(seconds: float, end: Callable[[], None]) -> Iterator[None]:
    """Raise ``SearchOver`` in the main thread after so many seconds, after calling ``end``, which stops running calls.

    Without such a timer in the system, and in other threads, nothing is raised.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if math.isinf(seconds) or not (hasattr(signal, "setitimer") and is_main):
        yield
        return

    def interrupt(number: int, frame: object) -> NoReturn:
        end()
        raise SearchOver

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class SearchRequest:
    """The extent of a search: a seed, an operation or all, dtypes, and its end; ``found_by`` is the command."""

    seed: int
    operation: str | None
    dtypes: Sequence[str]
    problems: int | None
    seconds: float
    found_by: str

    @property
    def key(self) -> str:
        """The name of a sequence of problems; it and the notes on earlier ones determine each problem."""
        return f"{self.seed} {self.operation or 'all'} {','.join(self.dtypes)}"


@dataclass(frozen=True)
class _Begun:
    """A problem of a search, by its number, that was run after so many other calls and is being judged."""

    problem: Problem
    number: int
    calls: int
    answer: Future[Answer]


@dataclass
class Search:
    """One running search. ``fixed`` are findings of earlier searches that no longer fail.

    ``known`` counts the problems with expected failures, by the reason in the list.
    """

    request: SearchRequest
    subject: ProblemSubject
    folder: SearchFolder
    results: SearchResults
    say: Say = lambda line: None
    asked: int = 0
    refused: int = 0
    fixed: list[SearchFinding] = field(default_factory=list)
    known: Counter[str] = field(default_factory=Counter)
    is_interrupted: bool = False
    begun: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """The seconds that the search has taken so far."""
        return time.monotonic() - self.begun

    @property
    def seconds_left(self) -> float:
        """The seconds until it should end."""
        return self.request.seconds - self.seconds

    def run(self) -> None:
        """Search until the limit of problems, seconds or findings; Ctrl-C ends it, and keeps its findings."""
        try:
            self._rerun_findings()
            self._search()
        except KeyboardInterrupt:
            self.is_interrupted = True

    def write(self) -> None:
        """Write the state of the search, and its results."""
        try:
            self.folder.write()
        finally:
            self.results.write(self.asked, self.request.seed, is_interrupted=self.is_interrupted)

    def _rerun_findings(self) -> None:
        """Rerun the findings of earlier searches; findings that no longer fail are removed."""
        for finding in list(self.folder.findings):
            if self.seconds_left <= 0:
                return
            if finding.needs_calls:  # it does not fail separately
                continue
            path = self.folder.path / finding.file
            try:
                answer = self.subject.ask(read_written(path), path.stem)
            except CaseError:  # the user removed it
                self.folder.findings.remove(finding)
                continue
            self.results.add_finding(path, answer)
            if symptom_of(answer) is None:
                self.fixed.append(finding)
                self.folder.findings.remove(finding)

    def _search(self) -> None:
        draw = Draw(self.request.seed, self.request.operation)
        known = lambda problem: any(finding.explains(problem) for finding in self.folder.findings)  # noqa: E731
        source = ProblemSource(draw, self.request.dtypes, self.folder.seen, known, self.subject.lacks_of)
        number = self.folder.next_numbers.get(self.request.key, 0)
        begun: deque[_Begun] = deque()
        while not self._is_over(len(begun)):
            problem = source.problem(number)
            number += 1
            try:
                answer = self._start(problem, f"problem-{number - 1}")
            except CaseError:  # the drawn inputs do not fit together
                continue
            is_refused = answer.done() and answer.result().is_unsupported
            self.folder.seen.note(problem, is_refused=is_refused, lacks=answer.result().lacks if is_refused else ())
            begun.append(_Begun(problem, number - 1, self.subject.asked - 1, answer))
            if len(begun) == _AHEAD:
                self._note(begun.popleft())
        while begun and len(self.folder.findings) < MAX_FINDINGS:
            self._note(begun.popleft())

    def _start(self, problem: Problem, name: str) -> Future[Answer]:
        """Run a problem; judge it in another process once the search is long enough for one to pay."""
        if self.asked >= _WORTH_PROCESSES:
            return self.subject.begin(problem, name)
        answered: Future[Answer] = Future()
        answered.set_result(self.subject.ask(problem, name))
        return answered

    def _is_over(self, begun: int) -> bool:
        enough = self.request.problems is not None and self.asked + begun >= self.request.problems
        return enough or self.seconds_left <= 0 or len(self.folder.findings) >= MAX_FINDINGS

    def _note(self, begun: _Begun) -> None:
        answer = begun.answer.result()
        self.folder.next_numbers[self.request.key] = begun.number + 1
        self.asked += 1
        self.folder.asked += 1
        self.refused += answer.is_unsupported
        if (symptom := symptom_of(answer)) is not None:
            self._add(begun, symptom, answer)
        elif answer.expected_failures:
            self.known.update(set(answer.expected_failures.values()))
            self.results.left_out += 1
        else:
            self.results.add(answer)
        if self.asked % _SAVED_EVERY == 0:
            self.folder.write()

    def _add(self, begun: _Begun, symptom: Symptom, answer: Answer) -> None:
        """Reduce a failure that no earlier finding explains, and write it as a case."""
        problem, number = begun.problem, begun.number
        if self._is_counted(problem, symptom, answer):
            return
        self.say(f"problem {number} fails ({symptom}); reducing it")
        try:
            finding = self._reduce(begun, symptom, answer)
        except (SearchOver, KeyboardInterrupt):  # the problem is written unreduced
            self.folder.findings.append(self._write_finding(problem, symptom, answer, number, None))
            raise
        if finding is not None:
            self.folder.findings.append(finding)
            self.say(f"found {finding.title}{self._next_step}")
            self.folder.write()

    def _reduce(self, begun: _Begun, symptom: Symptom, answer: Answer) -> SearchFinding | None:
        """Return the finding for the simplest problem with the failure; None if that is a known finding."""
        problem, number = begun.problem, begun.number
        if symptom_of(self.subject.ask_in_new_process(problem)) != symptom:
            # The failure depends on the calls before it, or on chance.
            finding = self._write_finding(problem, symptom, answer, number, None)
            return replace(finding, needs_calls=max(1, begun.calls))
        seconds = min(MAX_SECONDS, self.seconds_left)
        reduced = reduce_problem(problem, lambda simpler: self.subject.symptom(simpler) == symptom, seconds=seconds)
        simplest, simplest_answer = simplest_in_new_process(reduced, self.subject, symptom)
        if self._is_counted(simplest, symptom, answer):  # more than one way leads to it
            return None
        finding = self._write_finding(simplest, symptom, simplest_answer, number, reduced)
        return finding if finding.diagnosis else finding.with_diagnosis(answer.diagnosis)

    @property
    def _next_step(self) -> str:
        """A note that the search continues, and how long; empty at its end."""
        problems = math.inf if self.request.problems is None else self.request.problems - self.asked
        if self.seconds_left <= 0 or problems <= 0 or len(self.folder.findings) >= MAX_FINDINGS:
            return ""
        rest = duration(self.seconds_left) if math.isinf(problems) else count_noun(int(problems), "problem")
        return f"; searching for other failures, {rest} left; Ctrl-C ends the search"

    def _is_counted(self, problem: Problem, symptom: Symptom, answer: Answer) -> bool:
        """Return whether a finding explains a problem, and count it there; its numbers narrow the diagnosis."""
        for position, finding in enumerate(self.folder.findings):
            if finding.symptom.is_like(symptom) and finding.explains(problem):
                counted = replace(finding, times=finding.times + 1)
                self.folder.findings[position] = counted.with_diagnosis(answer.diagnosis)
                self.results.left_out += 1
                return True
        return False

    def _write_finding(
        self,
        problem: Problem,
        symptom: Symptom,
        answer: Answer,
        number: int,
        reduced: Reduced | None,
    ) -> SearchFinding:
        name = self.subject.implementation.name
        identity = f"{name} {self.request.key} {number}"
        path = self.folder.path / file_name(symptom, problem, identity)
        write_case(problem, path, name_of(symptom, problem, name), f"{self.request.found_by}, problem {number}")
        self.results.add_finding(path, answer)
        failure = failure_of_rows(answer.rows, case_record(answer.case, {}), diagnosis=answer.diagnosis)
        return SearchFinding(
            symptom,
            kind_of(problem),
            problem.dtype,
            tuple(sorted(required_features(problem))),
            dict(problem.lengths),
            {input_name: array.shape for input_name, array in problem.inputs.items()},
            number,
            reduced.tries if reduced else 0,
            reduced.is_smallest if reduced else False,
            element_of(answer),
            path.name,
            has_nonfinite=has_nonfinite(problem),
            numbers={column: getattr(failure, column, None) for column in FAILURE_NUMBERS},
        )


def simplest_in_new_process(reduced: Reduced, subject: ProblemSubject, symptom: Symptom) -> tuple[Problem, Answer]:
    """Return the simplest step of a reduction that also fails in a new process, and the answer there.

    The first step is known to fail there.
    """
    steps = list(reduced.steps)
    too_late = len(steps)
    last = len(steps) - 1
    answer = subject.ask_in_new_process(steps[last])
    while symptom_of(answer) != symptom and last:
        too_late, last = last, last // 2
        answer = subject.ask_in_new_process(steps[last])
    while too_late - last > 1 and too_late < len(steps):
        middle = (last + too_late) // 2
        tried = subject.ask_in_new_process(steps[middle])
        if symptom_of(tried) == symptom:
            last, answer = middle, tried
        else:
            too_late = middle
    return steps[last], answer


def element_of(answer: Answer) -> str:
    """Return the worst element of a failure, with its computed and exact value."""
    if answer.failure:
        return answer.failure
    first = answer.first_failing
    if first is None or first.index is None or first.value is None or first.exact is None:
        return first.message if first is not None else ""
    where = format_element(first.index, first.stage, answer.case.layout_of(first.stage))
    limit = "" if first.error is None or first.bound is None else f", error {first.error:.4g}, bound {first.bound:.4g}"
    return f"{where}: computed {first.value:.9g}, exact {first.exact:.9g}{limit}"


MAX_NUMBERS = 1 << 15
"""A reduced case with more numbers is not explained instead of the original one."""


@dataclass(frozen=True)
class ReducedCase:
    """The outcome of reducing a case: the ``answer`` for the reduced case, or for the case itself.

    ``original`` is the problem of the case, ``problem`` the reduced one, after so many ``tries``.
    """

    answer: Answer
    original: Problem | None = None
    problem: Problem | None = None
    tries: int = 0
    is_smallest: bool = False


def reduce_case(case: Case, implementation: Implementation, dtype: str, limits: Limits) -> ReducedCase:
    """Reduce a case that fails in a fresh process. Raises ``CaseError`` if a list of expected failures is invalid."""
    with Engine(limits) as engine:
        plain = engine.ask_in_new_process(implementation, Question(case, dtype))
    if not plain.fails:
        return ReducedCase(plain)
    subject = ProblemSubject(implementation, Engine(limits, expected_failures=()))
    try:
        problem = concrete_case(case, dtype)
        wanted = symptom_of(subject.ask_in_new_process(problem))
        if wanted is None:  # its numbers are not the cause of the failure
            return ReducedCase(plain, problem, problem)
        reduced = reduce_problem(problem, lambda simpler: subject.symptom(simpler) == wanted, MAX_TRIES, MAX_SECONDS)
        simplest, answer = simplest_in_new_process(reduced, subject, wanted)
        if count_elements(simplest) > MAX_NUMBERS:
            return ReducedCase(plain, problem, simplest, reduced.tries, reduced.is_smallest)
        spelled = read_concrete(simplest, Path(), "search/reduced", MAX_NUMBERS)
        answer = answer.for_question(Question(spelled, dtype))
    except CaseError:
        return ReducedCase(plain)
    finally:
        subject.close()
    return ReducedCase(answer, problem, simplest, reduced.tries, reduced.is_smallest)
