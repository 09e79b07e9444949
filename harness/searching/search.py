"""The search: draws problems, runs and judges them, and writes each new kind of failure as a reduced case.

The cases of a corpus test what their authors thought of. A search tests combinations of options, shapes and numbers
that no author chose. Problems are drawn with bugs of kernels in mind: lengths next to tile sizes, rows without a key,
numbers that cancel or overflow, and combinations of features that this search has not run before (``problems.py``,
``FeatureCounts`` in ``concrete.py``).

``Search.run`` first reruns the findings of earlier searches in its folder, and removes the fixed ones. Then it repeats:

1. Draw the next problem. The seed, the number of the problem and the record of earlier problems determine it, so the
   same search finds the same failures again.
2. Run the problem in the worker of the implementation. Its judgement may run in another process meanwhile: up to
   ``_MAX_PENDING`` problems wait for their verdict, however many processes there are. Otherwise the record that
   determines the next problem would depend on the speed of the machine.
3. If the problem fails, compare the failure with the findings so far. A finding explains a failure with a similar
   symptom (verdict, first wrong stage, error) if the problem has all features and lengths that the finding needs. Then
   only count it: one bug fails in many problems, and each should be reported once.
4. Otherwise run the problem again in a new process. If it passes there, the failure depends on the calls before it; it
   is written as it is, with the number of these calls.
5. If it fails there, too, reduce it (``reduction.py``) and write the reduced problem as a case file.

The reduction runs its tries in one worker, because a new process for each would take most of the time. So a
try could fail only because of the tries before it. ``simplest_in_new_process`` therefore takes the simplest step that
also fails in a new process.

The search stops at its limit of problems or time, at ``MAX_FINDINGS`` findings, or at Ctrl-C. A timer interrupts any
step when the time is over, and a failure that is being reduced is then written unreduced, so that none is lost.

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
from attncheck.common.progress import format_duration
from attncheck.common.wording import count_noun, format_element
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.reading.case import Case, make_case_record
from attncheck.reading.problem import Problem
from attncheck.reports.one_failure import failure_of_rows
from attncheck.results.format import FAILURE_NUMBERS
from attncheck.searching.concrete import (
    case_of_problem,
    concrete_problem,
    count_elements,
    has_nonfinite,
    operation_and_score,
    required_features,
)
from attncheck.searching.findings import (
    ProblemSubject,
    SearchFinding,
    SearchFolder,
    Symptom,
    case_file_name,
    case_title,
    read_written_problem,
    symptom_of,
    write_case,
)
from attncheck.searching.problems import DrawSettings, ProblemSource
from attncheck.searching.reduction import MAX_SECONDS, MAX_TRIES, Reduction, reduce_problem
from attncheck.searching.results import SearchResults

MAX_FINDINGS = 20
"""A search stops then. A choice: a user fixes the first findings before more are useful."""
_PROBLEMS_PER_SAVE = 200
"""Problems between two writes of the state. A choice: a search that is killed repeats at most so many problems."""

_MAX_PENDING = 16
"""Problems that are run before the first of them has to be judged, independent of the number of processes: so a search
is the same on every machine."""
_MIN_PROBLEMS_FOR_PROCESSES = 64
"""Running so many problems takes as long as starting processes that judge."""

SECONDS_TO_FINISH = 4.0
"""Time after the end of a search to finish its current step: run a failure in a fresh process, write a script."""

ShowLine = Callable[[str], None]


class SearchTimeExpired(Exception):
    """The time of a search is over, in any step."""


@contextmanager
def stop_search_after(seconds: float, stop_calls: Callable[[], None]) -> Iterator[None]:
    """Raise ``SearchTimeExpired`` in the main thread after so many seconds, after calling ``stop_calls``.

    Without such a timer in the system, and in other threads, nothing is raised.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if math.isinf(seconds) or not (hasattr(signal, "setitimer") and is_main):
        yield
        return

    def interrupt(number: int, frame: object) -> NoReturn:
        stop_calls()
        raise SearchTimeExpired

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
    def sequence_name(self) -> str:
        """The name of a sequence of problems; it and the notes on earlier ones determine each problem."""
        return f"{self.seed} {self.operation or 'all'} {','.join(self.dtypes)}"


@dataclass(frozen=True)
class _PendingProblem:
    """A problem of a search, by its number, that was run after so many other calls and is being judged."""

    problem: Problem
    number: int
    earlier_calls: int
    answer: Future[Answer]


@dataclass
class Search:
    """One running search. ``fixed_findings`` are findings of earlier searches that no longer fail.

    ``expected_failure_counts`` counts the problems with expected failures, by the reason in the list.
    """

    request: SearchRequest
    subject: ProblemSubject
    folder: SearchFolder
    results: SearchResults
    show_line: ShowLine = lambda line: None
    problem_count: int = 0
    unsupported_count: int = 0
    fixed_findings: list[SearchFinding] = field(default_factory=list)
    expected_failure_counts: Counter[str] = field(default_factory=Counter)
    is_interrupted: bool = False
    start_time: float = field(default_factory=time.monotonic)

    @property
    def elapsed_seconds(self) -> float:
        """The seconds that the search has taken so far."""
        return time.monotonic() - self.start_time

    @property
    def seconds_left(self) -> float:
        """The seconds until it should end."""
        return self.request.seconds - self.elapsed_seconds

    def run(self) -> None:
        """Search until the limit of problems, seconds or findings; Ctrl-C ends it, and keeps its findings."""
        try:
            self._rerun_findings()
            self._search_new_problems()
        except KeyboardInterrupt:
            self.is_interrupted = True

    def write(self) -> None:
        """Write the state of the search, and its results."""
        try:
            self.folder.write()
        finally:
            self.results.write(self.problem_count, self.request.seed, is_interrupted=self.is_interrupted)

    def _rerun_findings(self) -> None:
        """Rerun the findings of earlier searches; findings that no longer fail are removed."""
        for finding in list(self.folder.findings):
            if self.seconds_left <= 0:
                return
            if finding.needs_calls:  # it does not fail separately
                continue
            path = self.folder.path / finding.file
            try:
                answer = self.subject.run_and_judge(read_written_problem(path), path.stem)
            except CaseError:  # the user removed it
                self.folder.findings.remove(finding)
                continue
            self.results.add_finding(path, answer)
            if symptom_of(answer) is None:
                self.fixed_findings.append(finding)
                self.folder.findings.remove(finding)

    def _search_new_problems(self) -> None:
        settings = DrawSettings(self.request.seed, self.request.operation)
        is_known = lambda problem: any(finding.explains(problem) for finding in self.folder.findings)  # noqa: E731
        source = ProblemSource(
            settings, self.request.dtypes, self.folder.feature_counts, is_known, self.subject.missing_features
        )
        number = self.folder.next_numbers.get(self.request.sequence_name, 0)
        pending: deque[_PendingProblem] = deque()
        while not self._is_finished(len(pending)):
            problem = source.draw_problem(number)
            number += 1
            try:
                answer = self._start_problem(problem, f"problem-{number - 1}")
            except CaseError:  # the drawn inputs do not fit together
                continue
            is_refused = answer.done() and answer.result().is_unsupported
            self.folder.feature_counts.record_answer(
                problem, is_refused=is_refused, missing_features=answer.result().lacks if is_refused else ()
            )
            pending.append(_PendingProblem(problem, number - 1, self.subject.run_count - 1, answer))
            if len(pending) == _MAX_PENDING:
                self._record_answer(pending.popleft())
        while pending and len(self.folder.findings) < MAX_FINDINGS:
            self._record_answer(pending.popleft())

    def _start_problem(self, problem: Problem, name: str) -> Future[Answer]:
        """Run a problem; judge it in another process once the search is long enough for one to pay."""
        if self.problem_count >= _MIN_PROBLEMS_FOR_PROCESSES:
            return self.subject.start_in_background(problem, name)
        answered: Future[Answer] = Future()
        answered.set_result(self.subject.run_and_judge(problem, name))
        return answered

    def _is_finished(self, pending_count: int) -> bool:
        enough = self.request.problems is not None and self.problem_count + pending_count >= self.request.problems
        return enough or self.seconds_left <= 0 or len(self.folder.findings) >= MAX_FINDINGS

    def _record_answer(self, pending: _PendingProblem) -> None:
        answer = pending.answer.result()
        self.folder.next_numbers[self.request.sequence_name] = pending.number + 1
        self.problem_count += 1
        self.folder.problem_count += 1
        self.unsupported_count += answer.is_unsupported
        if (symptom := symptom_of(answer)) is not None:
            self._add_failure(pending, symptom, answer)
        elif answer.expected_failures:
            self.expected_failure_counts.update(set(answer.expected_failures.values()))
            self.results.left_out_problems += 1
        else:
            self.results.add_answer(answer)
        if self.problem_count % _PROBLEMS_PER_SAVE == 0:
            self.folder.write()

    def _add_failure(self, pending: _PendingProblem, symptom: Symptom, answer: Answer) -> None:
        """Reduce a failure that no earlier finding explains, and write it as a case."""
        problem, number = pending.problem, pending.number
        if self._is_known_failure(problem, symptom, answer):
            return
        self.show_line(f"problem {number} fails ({symptom}); reducing it")
        try:
            finding = self._reduce_failure(pending, symptom, answer)
        except (SearchTimeExpired, KeyboardInterrupt):  # the problem is written unreduced
            self.folder.findings.append(self._write_finding(problem, symptom, answer, number, None))
            raise
        if finding is not None:
            self.folder.findings.append(finding)
            self.show_line(f"found {finding.title}{self._remaining_search_text}")
            self.folder.write()

    def _reduce_failure(self, pending: _PendingProblem, symptom: Symptom, answer: Answer) -> SearchFinding | None:
        """Return the finding for the simplest problem with the failure; None if that is a known finding."""
        problem, number = pending.problem, pending.number
        if symptom_of(self.subject.run_in_new_process(problem)) != symptom:
            # The failure depends on the calls before it, or on chance.
            finding = self._write_finding(problem, symptom, answer, number, None)
            return replace(finding, needs_calls=max(1, pending.earlier_calls))
        seconds = min(MAX_SECONDS, self.seconds_left)
        reduced = reduce_problem(
            problem, lambda simpler: self.subject.run_for_symptom(simpler) == symptom, seconds=seconds
        )
        simplest, simplest_answer = simplest_in_new_process(reduced, self.subject, symptom)
        if self._is_known_failure(simplest, symptom, answer):  # more than one way leads to it
            return None
        finding = self._write_finding(simplest, symptom, simplest_answer, number, reduced)
        return finding if finding.diagnosis else finding.with_diagnosis(answer.diagnosis)

    @property
    def _remaining_search_text(self) -> str:
        """A note that the search continues, and how long; empty at its end."""
        problems = math.inf if self.request.problems is None else self.request.problems - self.problem_count
        if self.seconds_left <= 0 or problems <= 0 or len(self.folder.findings) >= MAX_FINDINGS:
            return ""
        rest = format_duration(self.seconds_left) if math.isinf(problems) else count_noun(int(problems), "problem")
        return f"; searching for other failures, {rest} left; Ctrl-C ends the search"

    def _is_known_failure(self, problem: Problem, symptom: Symptom, answer: Answer) -> bool:
        """Return whether a finding explains a problem, and count it there; its numbers narrow the diagnosis."""
        for position, finding in enumerate(self.folder.findings):
            if finding.symptom.is_similar_to(symptom) and finding.explains(problem):
                counted = replace(finding, times=finding.times + 1)
                self.folder.findings[position] = counted.with_diagnosis(answer.diagnosis)
                self.results.left_out_problems += 1
                return True
        return False

    def _write_finding(
        self,
        problem: Problem,
        symptom: Symptom,
        answer: Answer,
        number: int,
        reduced: Reduction | None,
    ) -> SearchFinding:
        name = self.subject.implementation.name
        identity = f"{name} {self.request.sequence_name} {number}"
        path = self.folder.path / case_file_name(symptom, problem, identity)
        write_case(problem, path, case_title(symptom, problem, name), f"{self.request.found_by}, problem {number}")
        self.results.add_finding(path, answer)
        failure = failure_of_rows(answer.rows, make_case_record(answer.case, {}), diagnosis=answer.diagnosis)
        return SearchFinding(
            symptom,
            operation_and_score(problem),
            problem.dtype,
            tuple(sorted(required_features(problem))),
            dict(problem.axis_lengths),
            {input_name: array.shape for input_name, array in problem.inputs.items()},
            number,
            reduced.tries if reduced else 0,
            reduced.is_smallest if reduced else False,
            describe_worst_element(answer),
            path.name,
            has_nonfinite=has_nonfinite(problem),
            numbers={column: getattr(failure, column, None) for column in FAILURE_NUMBERS},
        )


def simplest_in_new_process(reduced: Reduction, subject: ProblemSubject, symptom: Symptom) -> tuple[Problem, Answer]:
    """Return the simplest step of a reduction that also fails in a new process, and the answer there.

    The first step is known to fail there.
    """
    steps = list(reduced.steps)
    too_late = len(steps)
    last = len(steps) - 1
    answer = subject.run_in_new_process(steps[last])
    while symptom_of(answer) != symptom and last:
        too_late, last = last, last // 2
        answer = subject.run_in_new_process(steps[last])
    while too_late - last > 1 and too_late < len(steps):
        middle = (last + too_late) // 2
        tried = subject.run_in_new_process(steps[middle])
        if symptom_of(tried) == symptom:
            last, answer = middle, tried
        else:
            too_late = middle
    return steps[last], answer


def describe_worst_element(answer: Answer) -> str:
    """Return the worst element of a failure, with its computed and exact value."""
    if answer.failure:
        return answer.failure
    first = answer.first_failing
    if first is None or first.index is None or first.value is None or first.exact is None:
        return first.message if first is not None else ""
    where = format_element(first.index, first.stage, answer.case.layout_of(first.stage))
    limit = "" if first.error is None or first.bound is None else f", error {first.error:.4g}, bound {first.bound:.4g}"
    return f"{where}: computed {first.value:.9g}, exact {first.exact:.9g}{limit}"


MAX_EXPLAINED_NUMBERS = 1 << 15
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


def reduce_case(
    case: Case, implementation: Implementation, dtype: str, limits: Limits, plain: Answer | None = None
) -> ReducedCase:
    """Reduce a case that fails in a fresh process; ``plain`` is the answer to the case there, if it is known.

    Raises ``CaseError`` if a list of expected failures is invalid.
    """
    if plain is None:
        with Engine(limits) as engine:
            plain = engine.run_in_new_process(implementation, Question(case, dtype))
    if not plain.fails:
        return ReducedCase(plain)
    subject = ProblemSubject(implementation, Engine(limits, expected_failures=()))
    try:
        problem = concrete_problem(case, dtype)
        wanted = subject.run_for_symptom(problem)  # the first call of a worker is a call in a new process
        if wanted is None:  # its numbers are not the cause of the failure
            return ReducedCase(plain, problem, problem)
        reduced = reduce_problem(
            problem, lambda simpler: subject.run_for_symptom(simpler) == wanted, MAX_TRIES, MAX_SECONDS
        )
        simplest, answer = simplest_in_new_process(reduced, subject, wanted)
        if count_elements(simplest) > MAX_EXPLAINED_NUMBERS:
            return ReducedCase(plain, problem, simplest, reduced.tries, reduced.is_smallest)
        spelled = case_of_problem(simplest, Path(), "search/reduced", MAX_EXPLAINED_NUMBERS)
        answer = answer.for_question(Question(spelled, dtype))
    except CaseError:
        return ReducedCase(plain)
    finally:
        subject.close()
    return ReducedCase(answer, problem, simplest, reduced.tries, reduced.is_smallest)
