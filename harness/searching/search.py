"""The search: problems drawn, judged and, where they fail in a way that is new, reduced and written down.

Any failing case of any file, reduced: what ``attncheck reduce`` and ``attncheck repro`` do.
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
from attncheck.common.wording import written_element
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.reading.case import Case, case_record
from attncheck.reading.problem import Problem
from attncheck.reports.one_failure import failure_of_rows
from attncheck.results.format import FAILURE_NUMBERS
from attncheck.searching.concrete import asked_of, concrete_case, count_elements, has_nonfinite, kind_of, read_concrete
from attncheck.searching.findings import (
    Finding,
    ProblemSubject,
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
"""Then there is enough to fix."""
_SAVED_EVERY = 200
"""Problems between two times that the state is written."""

_AHEAD = 16
"""Problems that are computed before the first of them has to be judged, however many processes judge: the same number
of problems is the same search anywhere."""
_WORTH_PROCESSES = 64
"""Problems that take as long as processes that judge take to start."""

SECONDS_TO_FINISH = 4.0
"""Beyond its time a search may finish what it is at: put a failure to a fresh process, write a script."""

Say = Callable[[str], None]


class SearchOver(Exception):
    """The time of a search is over, whatever it is at."""


@contextmanager
def ended_after(seconds: float, end: Callable[[], None]) -> Iterator[None]:
    """Raise ``SearchOver`` in the main thread after so many seconds, once ``end`` was called, which ends what hangs.

    Where the system has no such timer, and in other threads, nothing is raised.
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
        """The name of a sequence of problems, which follows from it and from what was noted of them."""
        return f"{self.seed} {self.operation or 'all'} {','.join(self.dtypes)}"


@dataclass(frozen=True)
class _Begun:
    """A problem that was computed as its number of a search says, after so many other calls, and is being judged."""

    problem: Problem
    number: int
    calls: int
    answer: Future[Answer]


@dataclass
class Search:
    """One search on its way. ``fixed`` are findings of earlier searches that no longer fail.

    ``known`` counts the problems that fail as a list of expected failures says, by the reason that it gives.
    """

    request: SearchRequest
    subject: ProblemSubject
    folder: SearchFolder
    results: SearchResults
    say: Say = lambda line: None
    asked: int = 0
    refused: int = 0
    fixed: list[Finding] = field(default_factory=list)
    known: Counter[str] = field(default_factory=Counter)
    is_interrupted: bool = False
    begun: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """The seconds that the search takes so far."""
        return time.monotonic() - self.begun

    @property
    def seconds_left(self) -> float:
        """The seconds until it should end."""
        return self.request.seconds - self.seconds

    def run(self) -> None:
        """Search until there have been problems, seconds or findings enough; Ctrl-C ends it with what was found."""
        try:
            self._look_again()
            self._search()
        except KeyboardInterrupt:
            self.is_interrupted = True

    def write(self) -> None:
        """Write how far the search came, and its results."""
        try:
            self.folder.write()
        finally:
            self.results.write(self.asked, self.request.seed, is_interrupted=self.is_interrupted)

    def _look_again(self) -> None:
        """Judge what earlier searches found; what no longer fails is not counted any more."""
        for finding in list(self.folder.findings):
            if self.seconds_left <= 0:
                return
            if finding.needs_calls:  # by itself it does not fail
                continue
            path = self.folder.path / finding.file
            try:
                answer = self.subject.ask(read_written(path), path.stem)
            except CaseError:  # somebody removed it
                self.folder.findings.remove(finding)
                continue
            self.results.add_finding(path, answer)
            if symptom_of(answer) is None:
                self.fixed.append(finding)
                self.folder.findings.remove(finding)

    def _search(self) -> None:
        draw = Draw(self.request.seed, self.request.operation)
        known = lambda problem: any(each.explains(problem) for each in self.folder.findings)  # noqa: E731
        source = ProblemSource(draw, self.request.dtypes, self.folder.seen, known, self.subject.lacks_of)
        number = self.folder.next_numbers.get(self.request.key, 0)
        begun: deque[_Begun] = deque()
        while not self._is_over(len(begun)):
            problem = source.problem(number)
            number += 1
            try:
                answer = self._begun(problem, f"problem-{number - 1}")
            except CaseError:  # what was drawn does not fit together
                continue
            is_refused = answer.done() and answer.result().is_unsupported
            self.folder.seen.note(problem, is_refused=is_refused, lacks=answer.result().lacks if is_refused else ())
            begun.append(_Begun(problem, number - 1, self.subject.asked - 1, answer))
            if len(begun) == _AHEAD:
                self._note(begun.popleft())
        while begun and len(self.folder.findings) < MAX_FINDINGS:
            self._note(begun.popleft())

    def _begun(self, problem: Problem, name: str) -> Future[Answer]:
        """Have a problem computed, and judged in another process as soon as starting one pays."""
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
        """Reduce a failure that nothing explains which was found before, and write it down."""
        problem, number = begun.problem, begun.number
        if self._is_counted(problem, symptom):
            return
        self.say(f"problem {number} fails ({symptom}); reducing it")
        try:
            finding = self._reduced(begun, symptom, answer)
        except (SearchOver, KeyboardInterrupt):  # it is written as it was drawn
            self.folder.findings.append(self._written(problem, symptom, answer, number, None))
            raise
        if finding is not None:
            self.folder.findings.append(finding)
            self.say(f"found {finding.title}")
            self.folder.write()

    def _reduced(self, begun: _Begun, symptom: Symptom, answer: Answer) -> Finding | None:
        """Return a failure on the simplest problem that shows it; None where it turns out to be known."""
        problem, number = begun.problem, begun.number
        if symptom_of(self.subject.ask_in_new_process(problem)) != symptom:
            # It is of the calls before it, or of chance.
            finding = self._written(problem, symptom, answer, number, None)
            return replace(finding, needs_calls=max(1, begun.calls))
        seconds = min(MAX_SECONDS, self.seconds_left)
        reduced = reduce_problem(problem, lambda each: self.subject.symptom(each) == symptom, seconds=seconds)
        simplest, found = simplest_in_new_process(reduced, self.subject, symptom)
        if self._is_counted(simplest, symptom):  # more than one way leads to it
            return None
        return self._written(simplest, symptom, found, number, reduced)

    def _is_counted(self, problem: Problem, symptom: Symptom) -> bool:
        for position, each in enumerate(self.folder.findings):
            if each.symptom.is_like(symptom) and each.explains(problem):
                self.folder.findings[position] = replace(each, times=each.times + 1)
                self.results.left_out += 1
                return True
        return False

    def _written(
        self,
        problem: Problem,
        symptom: Symptom,
        answer: Answer,
        number: int,
        reduced: Reduced | None,
    ) -> Finding:
        name = self.subject.implementation.name
        identity = f"{name} {self.request.key} {number}"
        path = self.folder.path / file_name(symptom, problem, identity)
        write_case(problem, path, name_of(symptom, problem, name), f"{self.request.found_by}, problem {number}")
        self.results.add_finding(path, answer)
        failure = failure_of_rows(answer.rows, case_record(answer.case, {}), diagnosis=answer.diagnosis)
        return Finding(
            symptom,
            kind_of(problem),
            problem.dtype,
            tuple(sorted(asked_of(problem))),
            dict(problem.lengths),
            {each: array.shape for each, array in problem.inputs.items()},
            number,
            reduced.tries if reduced else 0,
            reduced.is_smallest if reduced else False,
            element_of(answer),
            path.name,
            has_nonfinite=has_nonfinite(problem),
            numbers={each: getattr(failure, each, None) for each in FAILURE_NUMBERS},
        )


def simplest_in_new_process(reduced: Reduced, subject: ProblemSubject, symptom: Symptom) -> tuple[Problem, Answer]:
    """Return the simplest step of a reduction that fails in a process of its own, too, and what is found there.

    The first step is known to.
    """
    steps = list(reduced.steps)
    too_late = len(steps)
    last = len(steps) - 1
    found = subject.ask_in_new_process(steps[last])
    while symptom_of(found) != symptom and last:
        too_late, last = last, last // 2
        found = subject.ask_in_new_process(steps[last])
    while too_late - last > 1 and too_late < len(steps):
        middle = (last + too_late) // 2
        tried = subject.ask_in_new_process(steps[middle])
        if symptom_of(tried) == symptom:
            last, found = middle, tried
        else:
            too_late = middle
    return steps[last], found


def element_of(answer: Answer) -> str:
    """Return the element where a failure is worst, with what is there and what should be."""
    if answer.failure:
        return answer.failure
    first = answer.first_failing
    if first is None or first.index is None or first.value is None or first.exact is None:
        return first.message if first is not None else ""
    where = written_element(first.index, first.stage, answer.case.layout_of(first.stage))
    limit = "" if first.error is None or first.bound is None else f", error {first.error:.4g}, bound {first.bound:.4g}"
    return f"{where}: computed {first.value:.9g}, exact {first.exact:.9g}{limit}"


MAX_NUMBERS = 1 << 15
"""Of a reduced case that is explained by itself; one of more stays what it was."""


@dataclass(frozen=True)
class ReducedCase:
    """The outcome of reducing a case: the ``answer`` to what it was reduced to, or to itself.

    ``original`` is the case itself as it was reduced, of so many ``tries``.
    """

    answer: Answer
    original: Problem | None = None
    problem: Problem | None = None
    tries: int = 0
    is_smallest: bool = False


def reduce_case(case: Case, implementation: Implementation, dtype: str, limits: Limits) -> ReducedCase:
    """Reduce a case that fails in a fresh process. Raises ``CaseError`` where a list cannot be used."""
    with Engine(limits) as engine:
        plain = engine.ask_in_new_process(implementation, Question(case, dtype))
    if not plain.fails:
        return ReducedCase(plain)
    subject = ProblemSubject(implementation, Engine(limits, expected_failures=()))
    try:
        problem = concrete_case(case, dtype)
        wanted = symptom_of(subject.ask_in_new_process(problem))
        if wanted is None:  # it is not the numbers that make it fail
            return ReducedCase(plain, problem, problem)
        reduced = reduce_problem(problem, lambda each: subject.symptom(each) == wanted, MAX_TRIES, MAX_SECONDS)
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
