"""What a search hears of a problem: the verdict and the first stage of what fails, from a worker that stays."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from attncheck.config import expected_failures_of
from attncheck.errors import CaseError
from attncheck.execution.implementations import Implementation
from attncheck.execution.lacks import lack_known_beforehand
from attncheck.execution.limits import Limits
from attncheck.execution.runner import GroupRunner, group_by_process
from attncheck.execution.user_code import UserImplementation
from attncheck.explain import Explanation, explain_case
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.searching.concrete import ConcreteCase, read_concrete
from attncheck.searching.novelty import identity_of
from attncheck.verdicts import Verdict


@dataclass(frozen=True)
class Symptom:
    """What tells one failure from another: the verdict, the first stage that is wrong, and which error was raised.

    A failure without stages (an error, a crash, a timeout) has no stage.
    """

    verdict: str
    stage: str = ""
    error: str = ""

    def is_like(self, other: Symptom) -> bool:
        """Whether two failures may be of one fault: the same, but that one was recognised and the other was not."""
        named = {Verdict.NUMERIC, Verdict.SEMANTIC}
        alike = self.verdict == other.verdict or {self.verdict, other.verdict} <= named
        return alike and (self.stage, self.error) == (other.stage, other.error)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.verdict, self.stage or self.error)))


def symptom_of(explanation: Explanation) -> Symptom | None:
    """Return how a case fails; None where it does not, where that is expected, or where it is not supported."""
    unexpected = [stage for stage in explanation.failing_stages if stage not in explanation.expected_failures]
    if not unexpected:
        return None
    if explanation.failure:
        verdict, _, message = explanation.failure.partition(": ")
        return Symptom(verdict, error=message.partition(":")[0] if verdict == Verdict.ERROR else "")
    first = explanation.begins_at if explanation.begins_at in unexpected else unexpected[0]
    verdicts = {each.stage: str(each.verdict) for each in explanation.judgements}
    return Symptom(verdicts.get(first) or verdicts[unexpected[0]], first)


@dataclass
class WorkerJudge:
    """Judges one problem after the other by the worker of an implementation, which was ``asked`` so many."""

    implementation: Implementation
    limits: Limits
    expected_failures: Sequence[ExpectedFailure]
    asked: int = 0
    _runners: dict[str, GroupRunner[Any]] = field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _numbers: count[int] = field(default_factory=count)

    @classmethod
    def of(cls, implementation: Implementation, limits: Limits) -> WorkerJudge:
        """Read what is known of an implementation. Raises ``CaseError`` where a list cannot be used."""
        return cls(implementation, limits, expected_failures_of([implementation.entry.name]))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the implementation declares."""
        return tuple(self.implementation.declared.classes)

    def read(self, problem: ConcreteCase, name: str = "problem") -> Case:
        """Return a problem as a case. Raises ``CaseError`` where it is none."""
        identity = identity_of(problem, f"{name}-{next(self._numbers)}")
        return read_concrete(problem, Path(self._folder.name), identity)

    def lacks_of(self, problem: ConcreteCase) -> tuple[str, ...]:
        """Return what the implementation lacks for a problem, as far as its parameters say; empty for no case."""
        if not isinstance(self.implementation.entry, UserImplementation):
            return ()
        try:
            lack = lack_known_beforehand(self.implementation, self.read(problem), problem.dtype)
        except CaseError:
            return ()
        finally:
            self._tidy()
        return lack.lacks if lack else ()

    def explain(self, problem: ConcreteCase) -> Explanation:
        """Have a problem computed and judged. Raises ``CaseError`` where it is none."""
        case = self.read(problem)
        found = explain_case(
            case, self.implementation, problem.dtype, self.limits, self._runner(problem.dtype), self.expected_failures
        )
        self.asked += 1
        self._tidy()
        return found

    def symptom(self, problem: ConcreteCase) -> Symptom | None:
        """Return how a problem fails; None where it does not, or is none."""
        try:
            return symptom_of(self.explain(problem))
        except CaseError:
            return None

    def afresh(self, problem: ConcreteCase) -> Explanation:
        """Judge a problem in a process of its own. Raises ``CaseError`` where it is none."""
        case, known = self.read(problem), self.expected_failures
        found = explain_case(case, self.implementation, problem.dtype, self.limits, expected_failures=known)
        self._tidy()
        return found

    def _tidy(self) -> None:
        """Remove the arrays of what was judged: there may be many thousands of problems."""
        for path in Path(self._folder.name).glob("*.npy"):
            path.unlink()

    def _runner(self, dtype: str) -> GroupRunner[Any]:
        groups = group_by_process(self.implementation, self.dtypes)
        group = next(each for each in groups if dtype in each.dtypes)
        if group.name not in self._runners:
            self._runners[group.name] = GroupRunner(group, self.limits, Path(self._folder.name))
        return self._runners[group.name]

    def close(self) -> None:
        """End the workers."""
        for runner in self._runners.values():
            runner.close()
        self._folder.cleanup()


Fails = Callable[[ConcreteCase], bool]
"""Whether a problem fails in the way that is looked for."""
