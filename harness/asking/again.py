"""One question again: in a fresh process, or after the calls that came before it in a check.

An implementation may keep something from one call to the next: a buffer, a table for the last shape, a compiled kernel
that it takes for another's. In a fresh process its failure then does not show. It is repeated after the calls that the
check's worker had been asked before it, and of these as few are looked for as make it happen.
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
from attncheck.reading.case import Case, case_record
from attncheck.reading.selection import read_called
from attncheck.results.last_failed import CaseInDtype, Checked, killed_the_worker, what_was_found
from attncheck.results.records import changed

MAX_TRIES = 60
"""Each starts a process."""
MAX_SECONDS = 120.0
"""For looking for fewer calls; then the fewest that were found so far will do."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class MetFailure:
    """A failure that a check met.

    Attributes:
        found: What the check found.
        before: Returns the calls before it in the same process, in order.
        seen: The answer of that very call, if there is one.
        remark: What may have changed since.
    """

    found: str
    before: Callable[[], Sequence[Question]]
    seen: Answer | None = None
    remark: str = ""


def ask_again(
    engine: Engine,
    implementation: Implementation,
    question: Question,
    earlier: MetFailure | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Answer:
    """Ask a question in a fresh process, and if it does not fail there as in a check, after that check's calls.

    Args:
        engine: Who asks.
        implementation: Who is asked.
        question: The question.
        earlier: The failure that a check met.
        say: Hears what is done while it takes long.
    """
    fresh = engine.ask_in_new_process(implementation, question)
    if earlier is None or fresh.fails:
        return fresh
    before = earlier.before()
    repeated = Repetition(earlier.found, len(before), remark=earlier.remark)
    tries = _Tries(engine, implementation, question)
    say(f"in a fresh process it agrees; repeating the {len(before)} calls that the check made before it")
    if not before or not tries.fails_after(before):
        return replace(earlier.seen or fresh, repeated=repeated)
    say("it fails after them; looking for those that it takes")
    are_fewest = fewest(before, tries.fails_after)
    needed, answer = tries.failing[-1]
    return replace(answer, repeated=replace(repeated, needed=tuple(needed), are_fewest=are_fewest))


def failure_in(checked: Checked, implementation: Implementation, question: Question) -> MetFailure | None:
    """Return the failure that a check found; None if it found none, or the case has changed since."""
    case = question.case
    record = checked.cases.get(case.id)
    if record is None or changed(record, case_record(case, {})):
        return None

    def read(identities: Iterable[str]) -> Mapping[str, Case]:
        return read_called({identity: checked.address(identity) or identity for identity in identities})

    remark = _changed_since(implementation, checked)
    return failure_among(checked.asked(implementation.name), question.key, implementation, read, remark)


def failure_among(
    asked: Mapping[CaseInDtype, str],
    where: CaseInDtype,
    implementation: Implementation,
    read: Callable[[Iterable[str]], Mapping[str, Case]],
    remark: str = "",
) -> MetFailure | None:
    """Return the failure of a call among what became of all calls, with those before it, whose cases are ``read``."""
    if not (what := asked.get(where)):
        return None
    evaluations = calls_before(asked, where, _served_together(implementation, [each for _, each in asked], where[1]))

    def before() -> list[Question]:
        cases = read(identity for identity, _ in evaluations) if evaluations else {}
        return [Question(cases[identity], dtype) for identity, dtype in evaluations if identity in cases]

    return MetFailure(what, before, remark=remark)


def failure_seen_now(seen: Answer, before: Sequence[Question]) -> MetFailure:
    """Return the failure that a check has just ``seen``, after the calls before it."""
    first = next((each for each in seen.judgements if each.verdict.exit_code), None)
    what = seen.failure if first is None else what_was_found(first.verdict, first.stage, first.message)
    return MetFailure(what, lambda: before, seen)


def _changed_since(implementation: Implementation, checked: Checked) -> str:
    """Return a remark on a user's file that is younger than the results."""
    path = Path(implementation.declared.module)
    is_younger = path.suffix == ".py" and path.is_file() and path.stat().st_mtime > checked.written
    return f"{path.name} has changed since" if is_younger else ""


def calls_before(asked: Mapping[CaseInDtype, str], evaluation: CaseInDtype, dtypes: Sequence[str]) -> list[CaseInDtype]:
    """Return what a worker that serves these dtypes was asked before a place of a plan, since it was started."""
    evaluations = [each for each in asked if each[1] in dtypes]
    earlier = evaluations[: evaluations.index(evaluation)] if evaluation in evaluations else []
    deaths = [number for number, each in enumerate(earlier) if killed_the_worker(asked[each])]
    return earlier[deaths[-1] + 1 :] if deaths else earlier


def _served_together(implementation: Implementation, dtypes: Sequence[str], dtype: str) -> Sequence[str]:
    """Return the dtypes that the process of a dtype serves, in a run of these dtypes."""
    declared = [each for each in sorted({*dtypes, dtype}) if implementation.rounding_model(each)]
    return next(group.dtypes for group in group_by_process(implementation, declared) if dtype in group.dtypes)


@dataclass
class _Tries:
    """Tries a question after other calls, each time in a process of its own, and keeps what failed."""

    engine: Engine
    implementation: Implementation
    question: Question
    failing: list[tuple[Sequence[Question], Answer]] = field(default_factory=list)
    left: int = MAX_TRIES
    until: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def fails_after(self, calls: Sequence[Question]) -> bool | None:
        """Return whether the question fails after these calls; None where there have been tries enough."""
        if self.failing and (self.left <= 0 or time.monotonic() > self.until):
            return None
        self.left -= 1
        answer = self.engine.ask_in_new_process(self.implementation, self.question, calls)
        if answer.fails:
            self.failing.append((calls, answer))
        return answer.fails


def fewest(calls: Sequence[Item], fails_after: Callable[[Sequence[Item]], bool | None]) -> bool:
    """Look for the fewest calls after which it fails; the last that failed are those. Whether none can be left out.

    What is kept is mostly of one call, and of a late one: the shortest end of the calls is looked for first, then
    whether its first call alone does, and only then which others can be left out.
    """
    kept = _shortest_end(calls, fails_after)
    if kept is None or len(kept) == 1:
        return kept is not None
    alone = fails_after(kept[:1])
    return _left_out(kept, fails_after) if alone is False else bool(alone)


def _shortest_end(calls: Sequence[Item], fails_after: Callable[[Sequence[Item]], bool | None]) -> Sequence[Item] | None:
    """Return the shortest end of some calls after which it fails; None where there have been tries enough."""
    too_short, enough = 0, len(calls)
    length = 1
    while too_short + 1 < enough:
        length = min(length, enough - 1)
        failed = fails_after(calls[-length:])
        if failed is None:
            return None
        too_short, enough = (too_short, length) if failed else (length, enough)
        length = 2 * length if enough == len(calls) else (too_short + enough) // 2
    return calls[-enough:]


def _left_out(calls: Sequence[Item], fails_after: Callable[[Sequence[Item]], bool | None]) -> bool:
    """Leave out what can be, larger parts first (Zeller's ddmin), until every single call is needed."""
    size = len(calls) // 2
    while True:
        position, before = 0, len(calls)
        while position < len(calls):
            rest = [*calls[:position], *calls[position + size :]]
            failed = fails_after(rest) if rest else False
            if failed is None:
                return False
            calls, position = (rest, position) if failed else (calls, position + size)
        if size == 1 and len(calls) == before:
            return True
        size = max(1, size // 2)
