"""The tests of attncheck in a session of pytest's: which there are, how one judges, and what was judged in the end.

The tests of ``--attncheck`` are one per case and dtype of each implementation, and belong to no file. All tests of an
implementation share a worker, so that its framework is loaded once. Where a test fails behind others, a fresh process
tells whether it takes their calls.

A skipped test is easily overlooked: a kernel of which every test is skipped would leave a suite green. The session
fails where an implementation was judged in no case, or in fewer than ``--attncheck-min-judged`` says. Of a session in
which tests were deselected (``-k``, ``--last-failed``) nothing is required.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.outcomes import Failed, Skipped

    from attncheck.asking.answer import Answer
    from attncheck.asking.engine import Engine
    from attncheck.asking.question import Question
    from attncheck.common.store import Store

    # Every run of pytest in an environment with attncheck loads this module, so what is heavy waits until it is used.
    from attncheck.execution.call import Limits
    from attncheck.execution.implementations import Implementation
    from attncheck.execution.user_code import Target
    from attncheck.reading.case import Case
    from attncheck.reading.selection import CaseSelection
    from attncheck.reports.coverage import Coverage
    from attncheck.results.coverage import MinimumJudged
    from attncheck.settings.options import RunOptions


COLLECTOR_NAME = "attncheck"
"""The beginning of these tests' ids."""


class _CaseCollector(pytest.Collector):
    """The place of the tests of ``--attncheck`` in the tree of a session."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class CaseItem(pytest.Item):
    """One case in one dtype."""

    def __init__(self, *, judge: ImplementationJudge, case: Case, dtype: str, **node: Any) -> None:
        super().__init__(**node)
        self.judge, self.case, self.dtype = judge, case, dtype
        self.add_marker(pytest.mark.attncheck(implementation=judge.implementation.name))

    def runtest(self) -> None:
        """Judge the case."""
        self.judge.check(self.case, self.dtype)

    def reportinfo(self) -> tuple[str, int, str]:
        """Return the file and line of the case."""
        return self.case.file, self.case.line - 1, self.name


def make_items(
    session: pytest.Session, judges: Sequence[ImplementationJudge], dtypes: Sequence[str], ids: Sequence[str]
) -> list[CaseItem]:
    """Return the tests of implementations that ``ids`` name, all where there are none.

    Raises ``UsageError`` for an id that names no test.
    """
    collector = _CaseCollector.from_parent(session, name=COLLECTOR_NAME, nodeid=COLLECTOR_NAME)
    items = []
    for judge in judges:
        for case, dtype in cases_in_dtypes(judge.selection, dtypes):
            name = f"{judge.implementation.name}[{case.id}-{dtype}]"
            # An id that pytest composes itself is, since 9.2, another one than the same text read back.
            node = {"name": name, "nodeid": f"{COLLECTOR_NAME}::{name}"}
            items.append(CaseItem.from_parent(collector, judge=judge, case=case, dtype=dtype, **node))
    return _select_by_ids(items, ids)


def _select_by_ids(items: list[CaseItem], ids: Sequence[str]) -> list[CaseItem]:
    """Return the tests that the ids name, all where there are none; an id without a case names all of its own."""
    named = {wanted: [i for i in items if i.nodeid == wanted or i.nodeid.startswith(f"{wanted}[")] for wanted in ids}
    for wanted in ids:
        if not named[wanted]:
            begin = ", ".join(dict.fromkeys(item.nodeid.partition("[")[0] for item in items))
            problem = f"the ids of {len(items)} tests begin with {begin}: --collect-only lists them"
            raise pytest.UsageError(f"not found: {wanted}; {problem}")
    return [item for item in items if not ids or any(item in these for these in named.values())]


@cache
def select_cases(options: RunOptions) -> CaseSelection:
    """Return the cases that are asked for. Raises ``CaseError`` where a file has a fault."""
    from attncheck.common.errors import CaseError
    from attncheck.settings.config import check_user_cases, select_configured_cases

    check_user_cases(options)
    selection = select_configured_cases(options)
    if selection.faults:
        raise CaseError(list(selection.faults))
    return selection


def cases_in_dtypes(selection: CaseSelection, dtypes: Sequence[str]) -> Iterator[tuple[Case, str]]:
    """Yield every case in each of its dtypes, or in those of them that are asked for."""
    return ((case, dtype) for case in selection.cases for dtype in case.dtypes if not dtypes or dtype in dtypes)


_TIME_LIMIT = 60.0
"""Seconds that a case may take."""
_MAX_REPETITIONS = 5
"""Failures of an implementation that are looked at in a fresh process, too: each starts its framework anew."""
_REPETITIONS: Counter[str] = Counter()


@dataclass(frozen=True)
class ImplementationJudge:
    """One implementation with its worker, which serves all tests of a session."""

    implementation: Implementation
    selection: CaseSelection
    store: Store

    @classmethod
    def of(cls, implementation: Implementation, selection: CaseSelection, store: Store) -> ImplementationJudge:
        """Read what is known of it, once for all tests. Raises ``CaseError`` where a list cannot be used."""
        _shared_engine(store).expected_failures_of(implementation)
        return cls(implementation, selection, store)

    def check(self, case: Case, dtype: str) -> None:
        """Fail the test of a case that fails, with what ``attncheck explain`` tells of it.

        Skips what is unsupported, or has no exact answer: nothing passes that was not judged.
        """
        from attncheck.asking.question import Question

        if not self.implementation.rounding_model(dtype):
            raise NotJudged(f"unsupported: declares no {dtype}", (dtype,))
        question = Question(case, dtype)
        answer = _shared_engine(self.store).ask(self.implementation, question)
        before = _record_question(self.implementation, question, answer)
        if answer.is_unsupported:
            raise NotJudged(answer.failure, answer.lacks)
        if answer.judgements and all(item.verdict == "unverified" for item in answer.judgements):
            raise NotJudged(f"unverified: {answer.outside or 'there is no exact answer to hold it against'}")
        failing = answer.failing_stages
        if failing and all(stage in answer.expected_failures for stage in failing):
            pytest.xfail(next(iter(answer.expected_failures.values())))
        if failing and answer.failure:
            raise StoppedError(self._failure_text(answer, before), pytrace=False)
        if failing:
            pytest.fail(self._failure_text(answer, before), pytrace=False)

    def _failure_text(self, seen: Answer, before: Sequence[Question]) -> str:
        """Describe a failure; for the first few, with the earlier calls that it takes."""
        from attncheck.asking.again import ask_again, reported_failure_from_answer
        from attncheck.execution.call import Limits
        from attncheck.reading.case import make_case_record
        from attncheck.settings.commands import case_command, command_words_by_name, command_words_of
        from attncheck.showing.explanation import explanation_text

        explained, lines = seen, []
        if before and _REPETITIONS[self.implementation.name] >= _MAX_REPETITIONS:
            rerun = f"the first {_MAX_REPETITIONS} failures were rerun in a fresh one."
            lines.append(f"Earlier tests had called the kernel in this process; {rerun}")
        elif before:
            _REPETITIONS[self.implementation.name] += 1
            met = reported_failure_from_answer(seen, before)
            again = ask_again(_shared_engine(self.store), self.implementation, seen.question, met)
            explained = again if again.repeated else explained
        standard = Limits(case_seconds=_TIME_LIMIT)
        words = command_words_of(self.implementation.name, command_words_by_name([self.implementation], standard, None))
        if words and explained.repeated is None:  # the command starts a fresh process, and knows of no other
            lines.append(case_command("explain", make_case_record(seen.case, {}), words, seen.dtype))
        return "\n".join([explanation_text(explained, self.selection.tags), *lines])


def _unlimited_failures() -> Limits:
    """Every test is tried: when to stop is pytest's to say (``--maxfail``)."""
    from attncheck.execution.call import Limits

    return Limits(case_seconds=_TIME_LIMIT, keep_going=True)


_SHARED_ENGINE: list[Engine] = []
"""The one of a session, once a test has asked something."""
_QUESTIONS_ASKED: dict[str, list[Question]] = {}
"""By worker, the questions that it was asked, without their arrays."""


def _shared_engine(store: Store) -> Engine:
    """Return the engine of a session, whose workers stay for the tests that follow."""
    from attncheck.asking.engine import Engine

    if not _SHARED_ENGINE:
        _SHARED_ENGINE.append(Engine(_unlimited_failures(), store))
    return _SHARED_ENGINE[0]


def _record_question(implementation: Implementation, question: Question, answer: Answer) -> list[Question]:
    """Remember a question and return those before it; one that ended the process is the last of its own."""
    from attncheck.asking.question import Question
    from attncheck.execution.workers import process_group_for
    from attncheck.results.last_failed import has_killed_worker

    worker = process_group_for(implementation, question.dtype).name
    before = _QUESTIONS_ASKED.get(worker, [])
    _QUESTIONS_ASKED[worker] = (
        [] if has_killed_worker(answer.failure) else [*before, Question(question.case, question.dtype)]
    )
    return before


_FUNCTIONS_BY_NAME: dict[str, list[Target]] = {}
"""By names in reports, the functions that ``conformance`` was called for."""


def with_unique_name(implementation: Implementation) -> Implementation:
    """Number a function that is called like another one before it: two would share a worker, and be counted as one."""
    from attncheck.execution.implementations import UserImplementation, with_report_name

    if not isinstance(implementation.entry, UserImplementation):
        return implementation
    target, alike = implementation.entry.target, _FUNCTIONS_BY_NAME.setdefault(implementation.name, [])
    if target not in alike:
        alike.append(target)
    number = alike.index(target) + 1
    return implementation if number == 1 else with_report_name(implementation, f"{implementation.name}_{number}")


def close_workers() -> None:
    """End the workers of a session."""
    for engine in _SHARED_ENGINE:
        engine.close()
    _SHARED_ENGINE.clear()
    _QUESTIONS_ASKED.clear()
    _FUNCTIONS_BY_NAME.clear()
    _REPETITIONS.clear()


if not TYPE_CHECKING:
    Failed, Skipped = pytest.fail.Exception, pytest.skip.Exception  # as pytest publishes them

_JUDGED, _STOPPED, _UNVERIFIED, _UNSUPPORTED = _OUTCOMES_BY_RANK = ("judged", "stopped", "unverified", "unsupported")
"""Outcomes of a case, those first that count before the others: dtypes of a case may differ."""


class NotJudged(Skipped):
    """A test that is skipped because there is nothing to judge; ``lacks`` says what the implementation would need."""

    def __init__(self, message: str, lacks: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lacks = tuple(lacks)


class StoppedError(Failed):
    """A test that fails because the implementation raised, crashed or ran out of time."""


@dataclass(eq=False)
class JudgedSummary:
    """A plugin for a session with tests of attncheck: it hears every report, from workers of pytest-xdist too."""

    minimum: MinimumJudged | None = None
    results: dict[str, dict[str, tuple[str, str, str]]] = field(default_factory=dict)
    """By implementation and case: what became of it, what it lacks, and what was said."""
    deselected: int = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write down what a test of attncheck is of, and what became of it."""
        report = yield
        marker = item.get_closest_marker("attncheck")
        implementation = marker.kwargs.get("implementation") if marker is not None else None
        case = getattr(item, "case", None) or getattr(getattr(item, "callspec", None), "params", {}).get("case")
        if implementation and case is not None and report.when == "call":
            error = call.excinfo.value if call.excinfo is not None else None
            report.attncheck = [implementation, case.id, *_test_outcome(error)]  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember of every case the outcome that says most."""
        recorded: list[str] | None = getattr(report, "attncheck", None)
        if recorded is None:
            return
        implementation, case, outcome, lacks, message = recorded
        cases = self.results.setdefault(implementation, {})
        known = cases.get(case)
        if known is None or _outcome_rank(outcome, lacks) < _outcome_rank(*known[:2]):
            cases[case] = (outcome, lacks, message)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count what somebody left out on purpose."""
        self.deselected += len(items)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that would be green although too little was judged."""
        if session.exitstatus == pytest.ExitCode.OK and self._shortfall_sentences():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how many of the cases were judged, a line per implementation."""
        if not self.results:
            return
        terminalreporter.section("attncheck")
        for name, coverage in self._coverage_by_implementation().items():
            terminalreporter.line(f"{name}: {coverage.summary_text}")
        for line in self._shortfall_sentences():
            terminalreporter.line(f"too little was judged: {line}", red=True)

    def _shortfall_sentences(self) -> list[str]:
        from attncheck.results.coverage import RequestedRun, shortfall_sentences

        by_name = {} if self.deselected else self._coverage_by_implementation()
        asked = {name: RequestedRun(coverage.asked, (name,), self.minimum) for name, coverage in by_name.items()}
        absent = {name: coverage.lacks.not_offered for name, coverage in by_name.items()}
        return [
            line
            for name, coverage in by_name.items()
            for line in shortfall_sentences({name: coverage.judged}, asked[name], absent)
        ]

    def _coverage_by_implementation(self) -> dict[str, Coverage]:
        from attncheck.reports.coverage import Coverage, UnsupportedReasons
        from attncheck.reports.frames import Column

        covered = {}
        for name, cases in self.results.items():
            count = {outcome: sum(result[0] == outcome for result in cases.values()) for outcome in _OUTCOMES_BY_RANK}
            lacks = UnsupportedReasons.from_reasons(
                [result[1:] for result in cases.values() if result[0] == _UNSUPPORTED]
            )
            column = Column("", name, "")
            covered[name] = Coverage(column, len(cases), count[_JUDGED], lacks, count[_UNVERIFIED], count[_STOPPED])
        return covered


def _test_outcome(error: BaseException | None) -> tuple[str, str, str]:
    """Return what became of a test, what the implementation lacks, and what it said."""
    if isinstance(error, NotJudged):
        message = str(error.msg)
        outcome = _UNSUPPORTED if message.startswith(_UNSUPPORTED) else _UNVERIFIED
        return outcome, ", ".join(error.lacks), message.removeprefix(f"{outcome}: ")
    return (_STOPPED if isinstance(error, StoppedError) else _JUDGED), "", ""


def _outcome_rank(outcome: str, lacks: str) -> tuple[int, bool]:
    """Sort key: what counts first. That a dtype is lacking says least."""
    from attncheck.spec import DTYPES

    return _OUTCOMES_BY_RANK.index(outcome), lacks in DTYPES
