"""What the tests of attncheck judged of what they were asked, at the end of a session of pytest's.

A skipped test is easily overlooked: a kernel of which every test is skipped would leave a suite green. The session
fails where an implementation was judged in no case, or in fewer than ``--attncheck-min-judged`` says. Of a session in
which tests were deselected (``-k``, ``--last-failed``) nothing is required.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.outcomes import Failed, Skipped

    from attncheck.reports.coverage import Coverage
    from attncheck.results.coverage import Minimum

if not TYPE_CHECKING:
    Failed, Skipped = pytest.fail.Exception, pytest.skip.Exception  # as pytest publishes them

_JUDGED, _STOPPED, _UNVERIFIED, _UNSUPPORTED = _OUTCOMES = ("judged", "stopped", "unverified", "unsupported")
"""What became of a case, from what counts before the rest: dtypes of a case may differ."""


class NotJudged(Skipped):
    """A test that is skipped because there is nothing to judge; ``lacks`` says what the implementation would need."""

    def __init__(self, message: str, lacks: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lacks = tuple(lacks)


class StoppedError(Failed):
    """A test that fails because the implementation raised, crashed or ran out of time."""


@dataclass(eq=False)
class Judged:
    """A plugin for a session with tests of attncheck: it hears every report, from workers of pytest-xdist too."""

    minimum: Minimum | None = None
    found: dict[str, dict[str, tuple[str, str, str]]] = field(default_factory=dict)
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
            report.attncheck = [implementation, case.id, *_outcome(error)]  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember of every case the outcome that says most."""
        recorded: list[str] | None = getattr(report, "attncheck", None)
        if recorded is None:
            return
        implementation, case, outcome, lacks, message = recorded
        cases = self.found.setdefault(implementation, {})
        known = cases.get(case)
        if known is None or _rank(outcome, lacks) < _rank(*known[:2]):
            cases[case] = (outcome, lacks, message)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count what somebody left out on purpose."""
        self.deselected += len(items)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that would be green although too little was judged."""
        if session.exitstatus == pytest.ExitCode.OK and self._short():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was judged of what was asked, a line per implementation."""
        if not self.found:
            return
        terminalreporter.section("attncheck")
        for name, each in self._coverage().items():
            terminalreporter.line(f"{name}: {each.words}")
        for line in self._short():
            terminalreporter.line(f"too little was judged: {line}", red=True)

    def _short(self) -> list[str]:
        from attncheck.results.coverage import Asked, shortfalls

        found = {} if self.deselected else self._coverage()
        asked = {name: Asked(each.asked, (name,), self.minimum) for name, each in found.items()}
        absent = {name: each.lacks.not_offered for name, each in found.items()}
        return [line for name, each in found.items() for line in shortfalls({name: each.judged}, asked[name], absent)]

    def _coverage(self) -> dict[str, Coverage]:
        from attncheck.reports.coverage import Coverage, Lacks
        from attncheck.reports.frames import Column

        covered = {}
        for name, cases in self.found.items():
            count = {outcome: sum(each[0] == outcome for each in cases.values()) for outcome in _OUTCOMES}
            lacks = Lacks.of([each[1:] for each in cases.values() if each[0] == _UNSUPPORTED])
            column = Column("", name, "")
            covered[name] = Coverage(column, len(cases), count[_JUDGED], lacks, count[_UNVERIFIED], count[_STOPPED])
        return covered


def _outcome(error: BaseException | None) -> tuple[str, str, str]:
    """Return what became of a test, what the implementation lacks, and what it said."""
    if isinstance(error, NotJudged):
        message = str(error.msg)
        outcome = _UNSUPPORTED if message.startswith(_UNSUPPORTED) else _UNVERIFIED
        return outcome, ", ".join(error.lacks), message.removeprefix(f"{outcome}: ")
    return (_STOPPED if isinstance(error, StoppedError) else _JUDGED), "", ""


def _rank(outcome: str, lacks: str) -> tuple[int, bool]:
    """Sort key: what counts first. That a dtype is lacking says least."""
    from attncheck.spec import DTYPES

    return _OUTCOMES.index(outcome), lacks in DTYPES
