"""Repeat a failure in a new process, or after the calls that preceded it in a check.

An implementation may keep state between calls: a buffer, a table for the last shape, a compiled kernel that it confuses
with another. A new process then does not reproduce the failure. In that case the question is repeated after the calls
that the check's worker made before it, and a minimal sequence of these calls that triggers the failure is searched for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from attncheck.asking.answer import Answer, Repetition
from attncheck.asking.engine import Engine
from attncheck.asking.question import Question
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import group_by_process
from attncheck.reading.case import Case, make_case_record
from attncheck.reading.selection import read_cases_at_addresses
from attncheck.results.last_failed import CaseInDtype, CheckRecord, failure_text, has_killed_worker
from attncheck.results.records import describe_case_changes

MAX_TRIES = 60
"""New processes that one search for a minimal sequence may start; each costs at least the import of a framework. A
choice: with fewer, sequences of many calls are not minimal; ``MAX_SECONDS`` is usually reached first."""
MAX_SECONDS = 120.0
"""Seconds after which the search stops and returns the shortest sequence so far: two minutes that a user waits."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class ReportedFailure:
    """A failure that a check reported.

    Attributes:
        description: The failure in words.
        preceding: Returns the calls that the same process made before it, in order.
        answer: The answer of the failing call, if it is still in memory.
        remark: A change since the check that may explain a different result; empty if there is none.
    """

    description: str
    preceding: Callable[[], Sequence[Question]]
    answer: Answer | None = None
    remark: str = ""


def ask_again(
    engine: Engine,
    implementation: Implementation,
    question: Question,
    earlier: ReportedFailure | None = None,
    *,
    print_line: Callable[[str], None] = lambda line: None,
) -> Answer:
    """Ask a question in a new process; if it does not fail there, ask it again after the calls of a check.

    Args:
        engine: The engine.
        implementation: The implementation.
        question: The question.
        earlier: The failure that a check reported.
        say: Called with a progress message before a long step.
    """
    fresh = engine.run_in_new_process(implementation, question)
    if earlier is None or fresh.fails:
        return fresh
    preceding = earlier.preceding()
    repeated = Repetition(earlier.description, len(preceding), remark=earlier.remark)
    attempts = _Attempts(engine, implementation, question)
    print_line(f"in a fresh process it agrees; repeating the {len(preceding)} calls that the check made before it")
    if not preceding or not attempts.fails_after(preceding):
        return replace(earlier.answer or fresh, repeated=repeated)
    print_line("it fails after them; looking for those that it takes")
    needed, are_fewest = find_minimal_sequence(preceding, attempts.fails_after)
    return replace(attempts.failing[-1], repeated=replace(repeated, needed=tuple(needed), are_fewest=are_fewest))


def find_reported_failure(
    checked: CheckRecord, implementation: Implementation, question: Question
) -> ReportedFailure | None:
    """Return the failure that a check reported; None if there was none, or if the case has changed since."""
    case = question.case
    record = checked.cases.get(case.id)
    if record is None or describe_case_changes(record, make_case_record(case, {})):
        return None

    def read(identities: Iterable[str]) -> Mapping[str, Case]:
        return read_cases_at_addresses(
            {identity: checked.case_address(identity) or identity for identity in identities}
        )

    path = Path(implementation.mode_declarations.module)
    is_younger = path.suffix == ".py" and path.is_file() and path.stat().st_mtime > checked.written_at
    remark = f"{path.name} has changed since" if is_younger else ""
    return find_failure_among_calls(
        checked.outcomes_of_calls(implementation.name), question.key, implementation, read, remark
    )


def find_failure_among_calls(
    asked: Mapping[CaseInDtype, str],
    where: CaseInDtype,
    implementation: Implementation,
    read: Callable[[Iterable[str]], Mapping[str, Case]],
    remark: str = "",
) -> ReportedFailure | None:
    """Return the failure of one call of a check, with the calls that preceded it; None if it did not fail.

    Args:
        asked: The outcome of every call of the check in words, in their order; empty for a call that agreed.
        where: The case and dtype of the call.
        implementation: The implementation that the check called.
        read: Reads the cases of these ids.
        remark: A change since the check.
    """
    if not (description := asked.get(where)):
        return None
    declared = [dtype for dtype in sorted({dtype for _, dtype in asked}) if implementation.rounding_model(dtype)]
    [served] = [group.dtypes for group in group_by_process(implementation, declared) if where[1] in group.dtypes]
    evaluations = calls_before(asked, where, served)

    def preceding() -> list[Question]:
        cases = read(identity for identity, _ in evaluations) if evaluations else {}
        return [Question(cases[identity], dtype) for identity, dtype in evaluations if identity in cases]

    return ReportedFailure(description, preceding, remark=remark)


def reported_failure_from_answer(answer: Answer, preceding: Sequence[Question]) -> ReportedFailure:
    """Return the failure of an answer that is still in memory, after the calls that preceded it."""
    failing = next((judgement for judgement in answer.judgements if judgement.verdict.exit_code), None)
    description = answer.failure if failing is None else failure_text(failing.verdict, failing.stage, failing.message)
    return ReportedFailure(description, lambda: preceding, answer)


def calls_before(asked: Mapping[CaseInDtype, str], evaluation: CaseInDtype, dtypes: Sequence[str]) -> list[CaseInDtype]:
    """Return the calls that a worker for these dtypes made before an evaluation, since it was last started."""
    evaluations = [call for call in asked if call[1] in dtypes]
    earlier = evaluations[: evaluations.index(evaluation)] if evaluation in evaluations else []
    deaths = [number for number, call in enumerate(earlier) if has_killed_worker(asked[call])]
    return earlier[deaths[-1] + 1 :] if deaths else earlier


@dataclass
class _Attempts:
    """Asks a question after other calls, each time in a new process, and keeps the answers that fail."""

    engine: Engine
    implementation: Implementation
    question: Question
    failing: list[Answer] = field(default_factory=list)
    remaining_tries: int = MAX_TRIES
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def fails_after(self, calls: Sequence[Question]) -> bool | None:
        """Return whether the question fails after these calls; None if the limit of attempts is reached."""
        if self.failing and (self.remaining_tries <= 0 or time.monotonic() > self.deadline):
            return None
        self.remaining_tries -= 1
        answer = self.engine.run_in_new_process(self.implementation, self.question, calls)
        if answer.fails:
            self.failing.append(answer)
        return answer.fails


def find_minimal_sequence(
    calls: Sequence[Item], fails_after: Callable[[Sequence[Item]], bool | None]
) -> tuple[Sequence[Item], bool]:
    """Find a minimal sequence of calls that triggers a failure, as all ``calls`` do.

    The state usually comes from one late call. So the shortest end of the sequence is found first, by bisection. Then
    its first call is tried without the others, and only then calls are removed in parts. The returned sequence is
    the last one for which ``fails_after`` was true.

    Returns:
        The sequence, and whether it is minimal: False if the limit of attempts (``fails_after`` is None) was reached.

    Example:
        >>> find_minimal_sequence(list(range(10)), lambda calls: 3 in calls and 7 in calls)
        ([3, 7], True)
    """
    too_short, enough, length = 0, len(calls), 1
    while too_short + 1 < enough:
        length = min(length, enough - 1)
        failed = fails_after(calls[-length:])
        if failed is None:
            return calls[-enough:], False
        too_short, enough = (too_short, length) if failed else (length, enough)
        length = 2 * length if enough == len(calls) else (too_short + enough) // 2
    shortest_end = calls[-enough:]
    if enough == 1:
        return shortest_end, True
    fails_alone = fails_after(shortest_end[:1])
    if fails_alone is None:
        return shortest_end, False
    return (shortest_end[:1], True) if fails_alone else _remove_calls(shortest_end, fails_after)


def _remove_calls(
    calls: Sequence[Item], fails_after: Callable[[Sequence[Item]], bool | None]
) -> tuple[Sequence[Item], bool]:
    """Remove calls, larger parts first, until each one is needed (delta debugging: Zeller and Hildebrandt 2002)."""
    size = len(calls) // 2
    while True:
        position, before = 0, len(calls)
        while position < len(calls):
            rest = [*calls[:position], *calls[position + size :]]
            failed = fails_after(rest) if rest else False
            if failed is None:
                return calls, False
            calls, position = (rest, position) if failed else (calls, position + size)
        if size == 1 and len(calls) == before:
            return calls, True
        size = max(1, size // 2)
