"""The implementations that a session of pytest judges: the worker that stays, and what a failing test says.

All tests of an implementation share a worker, so that its framework is loaded once. Where a test fails behind others, a
fresh process tells whether it takes their calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from attncheck.pytest_summary import NotJudged, StoppedError

if TYPE_CHECKING:
    # Every run of pytest in an environment with attncheck loads this module, so what is heavy waits until it is used.
    from attncheck.execution.call import Limits
    from attncheck.execution.implementations import Implementation
    from attncheck.execution.runner import GroupRunner
    from attncheck.explain import Call, Explanation
    from attncheck.reading.case import Case
    from attncheck.reading.expected_failures import ExpectedFailure
    from attncheck.reading.selection import Selection

_TIME_LIMIT = 60.0
"""Seconds that a case may take."""
_MAX_REPEATED = 5
"""Failures of an implementation that are looked at in a fresh process, too: each starts its framework anew."""
_REPEATED: Counter[str] = Counter()


@dataclass(frozen=True)
class ImplementationJudge:
    """One implementation with its worker, which serves all tests of a session."""

    implementation: Implementation
    selection: Selection
    expected_failures: tuple[ExpectedFailure, ...]

    @classmethod
    def of(cls, implementation: Implementation, selection: Selection) -> ImplementationJudge:
        """Read what is known of it, once for all tests. Raises ``CaseError`` where a list cannot be used."""
        from attncheck.config import expected_failures_of

        return cls(implementation, selection, expected_failures_of([implementation.entry.name]))

    def check(self, case: Case, dtype: str) -> None:
        """Fail the test of a case that fails, with what ``attncheck explain`` tells of it.

        Skips what is unsupported, or has no exact answer: nothing passes that was not judged.
        """
        from attncheck.explain import explain_case

        worker = _worker_of(self.implementation, dtype)
        explanation = explain_case(case, self.implementation, dtype, _limits(), worker.runner, self.expected_failures)
        before = worker.add((case, dtype), explanation.failure)
        if explanation.failure.startswith("unsupported"):
            raise NotJudged(explanation.failure, explanation.lacks)
        if explanation.judgements and all(item.verdict == "unverified" for item in explanation.judgements):
            raise NotJudged(f"unverified: {explanation.outside or 'there is no exact answer to hold it against'}")
        failing = explanation.failing_stages
        if failing and all(stage in explanation.expected_failures for stage in failing):
            pytest.xfail(next(iter(explanation.expected_failures.values())))
        if failing and explanation.failure:
            raise StoppedError(self._story(explanation, before), pytrace=False)
        if failing:
            pytest.fail(self._story(explanation, before), pytrace=False)

    def _story(self, seen: Explanation, before: Sequence[Call]) -> str:
        """Tell a failure; of the first few, whether it takes the calls of the tests before it."""
        from attncheck.commands import command, words_again, words_of
        from attncheck.execution.call import Limits
        from attncheck.explain import RepeatedExplanation, explain_as_met, met_now
        from attncheck.reading.case import case_record
        from attncheck.reports.explanation import repeated_explanation_text

        explained, lines = RepeatedExplanation(seen), []
        if before and _REPEATED[self.implementation.name] >= _MAX_REPEATED:
            lines.append(
                f"Earlier tests had called the kernel in this process; the first {_MAX_REPEATED} failures were rerun "
                "in a fresh one."
            )
        elif before:
            _REPEATED[self.implementation.name] += 1
            found = explain_as_met(seen.case, self.implementation, seen.dtype, _limits(), met_now(seen, before))
            explained = found if found.repeated else explained
        standard = Limits(case_seconds=_TIME_LIMIT)
        again = words_of(self.implementation.name, words_again([self.implementation], standard, None))
        if again and explained.repeated is None:  # the command starts a fresh process, and knows of no other
            lines.append(command("explain", case_record(seen.case, {}), again, seen.dtype))
        return "\n".join([repeated_explanation_text(explained, self.selection.tags), *lines])


def _limits() -> Limits:
    """Every test is tried: when to stop is pytest's to say (``--maxfail``)."""
    from attncheck.execution.call import Limits

    return Limits(case_seconds=_TIME_LIMIT, keep_going=True)


@dataclass
class _Worker:
    """The worker of an implementation and some dtypes, which stays for the tests that follow, and what it was asked."""

    runner: GroupRunner[Any]
    asked: list[Call]

    def add(self, call: Call, failure: str) -> list[Call]:
        """Remember a call and return those before it; one that ended the process is the last of its own."""
        from attncheck.results.last_failed import killed_the_worker

        before = self.asked
        self.asked = [] if killed_the_worker(failure) else [*before, call]
        return before


_WORKERS: dict[str, _Worker] = {}


def _worker_of(implementation: Implementation, dtype: str) -> _Worker:
    """Return the worker of an implementation and dtype. Skips what is not declared."""
    import tempfile
    from pathlib import Path

    from attncheck.execution.runner import GroupRunner, group_by_process

    groups = group_by_process(implementation, list(implementation.declared.classes))
    group = next((each for each in groups if dtype in each.dtypes), None)
    if group is None:
        raise NotJudged(f"unsupported: declares no {dtype}", (dtype,))
    if group.name not in _WORKERS:
        _WORKERS[group.name] = _Worker(GroupRunner(group, _limits(), Path(tempfile.mkdtemp("attncheck"))), [])
    return _WORKERS[group.name]


def close_workers() -> None:
    """End the workers of a session."""
    for worker in _WORKERS.values():
        worker.runner.close()
    _WORKERS.clear()
    _REPEATED.clear()
