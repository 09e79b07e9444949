"""Worker processes: one per framework (and per dtype that needs its own), side by side, each with a time limit.

A worker that overruns its time, dies, or takes too much is killed with all that it started, and the next evaluation
gets another; none is evaluated twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition
from time import perf_counter
from typing import Generic, TypeVar

from attncheck.execution.call import CallCancelled, CallTimeout, RemoteError, WorkerDied, WorkerProcess
from attncheck.execution.describing import DescribedWorkers
from attncheck.execution.ends import EqualEnds
from attncheck.execution.environment import with_cache
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits, scores_too_large
from attncheck.execution.logs import Log
from attncheck.execution.padding import padded_call
from attncheck.execution.process_tree import memory_of
from attncheck.execution.user_code import UserImplementation
from attncheck.execution.worker import Failure, Outcome, Task, evaluate_and_measure, start
from attncheck.reading.canonical import call_form
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs


def task_of(case: Case, inputs: Inputs) -> Task:
    """Return the call that a case is, on inputs in the working dtype."""
    posed = call_form(case.operation, case.options, inputs.arrays)
    return Task(case.operation, posed.options, posed.inputs, case.memory_layout, case.judged_stages)


class PrioritySemaphore:
    """At most ``limit`` at the same time."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: list[tuple[int, int]] = []
        self._tickets = 0
        self._changed = Condition()

    @contextmanager
    def acquire(self, step: int) -> Iterator[None]:
        """Wait for a place; of those that wait, the one whose ``step`` in the plan comes first is next."""
        with self._changed:
            self._tickets += 1
            ticket = (step, self._tickets)
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._free and min(self._waiting) == ticket)
            self._waiting.remove(ticket)
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()


Key = TypeVar("Key")
Answer = TypeVar("Answer")

_STARTS = 3
"""So often in a row a worker that ran before is started again in vain."""
_AMOUNT = re.compile(r" [0-9.]+ (?=[GM]iB)")
"""What a worker took too much of, which is another number every time."""


@dataclass(frozen=True)
class Group:
    """One worker process: an implementation, and the dtypes that it can serve together."""

    implementation: Implementation
    dtypes: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for logs: the implementation, and its dtype where it has a process of its own."""
        return f"{self.implementation.name}-{'-'.join(self.dtypes)}"


def group_by_process(implementation: Implementation, dtypes: Sequence[str]) -> list[Group]:
    """Split the dtypes of an implementation over the processes that they need."""
    alone = [dtype for dtype in dtypes if dtype in implementation.entry.own_process_for]
    together = tuple(dtype for dtype in dtypes if dtype not in alone)
    groups = [Group(implementation, (dtype,)) for dtype in alone]
    return [*groups, Group(implementation, together)] if together else groups


class GroupRunner(Generic[Key]):
    """Runs the tasks of one group in its worker, one after the other; a failure is an outcome, not an end."""

    def __init__(
        self, group: Group, limits: Limits, log_directory: Path, described: DescribedWorkers | None = None
    ) -> None:
        """A worker in which the implementation was ``described`` is taken before another one is started."""
        self.group = group
        self._described = described
        self.description: dict[str, str] = {}
        self._limits = limits
        self._log = Log(log_directory / f"{group.name}.txt", limits.max_output)
        self._worker: WorkerProcess | None = None
        self._started = False
        self._starts_left = 1
        self._given_up: Failure | None = None
        self._stopping = False
        self._ends = EqualEnds(limits.keep_going)
        self._end_reason = ""

    def run(
        self,
        keys: Iterable[Key],
        task_of: Callable[[Key], Task],
        report: Callable[[Key, Outcome], None],
        turns: PrioritySemaphore | None = None,
        position_of: Callable[[Key], int] = lambda key: 0,
    ) -> None:
        """Evaluate every task, each in its turn, and report its outcome; returns early once ``stop`` is called.

        ``position_of`` says where in the plan of all runners a task stands: the turn is that of the earliest.
        """
        try:
            for key in keys:
                if self._stopping:
                    return
                with turns.acquire(position_of(key)) if turns else nullcontext():
                    if self._stopping:
                        return
                    outcome = self.evaluate(task_of(key))
                if not self._stopping:
                    report(key, outcome)
        finally:
            self.close()

    def stop(self) -> None:
        """Kill the worker; nothing more is reported."""
        self._stopping = True
        worker = self._worker
        if worker is not None:
            worker.end()

    def evaluate(self, task: Task) -> Outcome:
        """Evaluate one task in the worker, which is started if there is none; ``close`` ends it."""
        begun = perf_counter()
        outcome = self._evaluate(task)
        return replace(outcome, seconds=perf_counter() - begun)

    def _evaluate(self, task: Task) -> Outcome:
        padding = padded_call(self.group.implementation, task)
        if isinstance(padding, Failure):
            return padding
        if padding is not None:
            return padding.cut(self._evaluate_as_it_is(padding.task))
        return self._evaluate_as_it_is(task)

    def _evaluate_as_it_is(self, task: Task) -> Outcome:
        if too_large := scores_too_large(self.group.implementation.declared, task, self._limits.memory_of_each):
            return too_large
        if self._given_up is not None:
            return self._given_up
        if (untried := self._ends.instead()) is not None:
            return untried
        self._end_reason = ""
        outcome = self._evaluated(task)
        self._ends.note(outcome, self._end_reason)
        return outcome

    def _evaluated(self, task: Task) -> Outcome:
        if not self._started and (failure := self._start()) is not None:
            return failure
        answer = self._call(self._limits.case_seconds, evaluate_and_measure, task)
        if isinstance(answer, Failure):
            return answer
        if isinstance(answer.outcome, Failure):
            self._log.require_space()
        if answer.held > self._limits.soft_memory_limit or not answer.is_fit:
            self.close()
        return answer.outcome

    def _start(self) -> Failure | None:
        implementation, dtype = self.group.implementation, self.group.dtypes[0]
        entry = with_cache(implementation.entry, keep=self._limits.compilation_cache)
        what = (entry, implementation.mode, dtype, self._limits.threads, str(self._log.path))
        if self._worker is None and self._described is not None and isinstance(entry, UserImplementation):
            self._log.require_writable()
            self._worker = self._described.take(entry, self._limits.threads)
        answer = self._call(self._limits.start_seconds, start, *what)
        if isinstance(answer, Failure):
            self.close()
            # What has started before may do so again: somebody may have killed it. What never has is not asked twice.
            self._starts_left -= 1
            self._given_up = None if self._starts_left > 0 else answer
            return answer
        self.description, self._started, self._starts_left = dict(answer.description), True, _STARTS
        return None

    def _call(self, seconds: float, function: Callable[..., Answer], *arguments: object) -> Answer | Failure:
        """Call a function in the worker; what kills it becomes a failure, and the next call gets a new one."""
        self._log.begin()
        try:
            if self._worker is None:
                self._log.require_writable()
                self._worker = WorkerProcess()
            return self._worker.call(function, *arguments, seconds=seconds, look=self._excess)
        except RemoteError as raised:
            failure = Failure("error", str(raised))
        except CallTimeout:
            failure = Failure("timeout", f"not done after {seconds:g} s; the worker was stopped")
        except CallCancelled as stopped:
            failure = Failure("crash", f"{stopped}; the worker was stopped")
        except WorkerDied as ended:
            failure = Failure("crash", f"the worker process {ended}")
        self.close()
        if not self._stopping:
            self._log.require_space()
        self._end_reason = _AMOUNT.sub("", failure.message)
        return Failure(failure.verdict, f"{failure.message}{self._log.last_words()}")

    def _excess(self) -> str:
        """Say what the worker has too much of; empty where it has not."""
        if self._stopping:
            return "the run ends"
        held = memory_of(self._worker.pid) if self._worker is not None else 0
        if held > self._limits.hard_memory_limit:
            return (
                f"it held {held / 2**30:.1f} GiB of memory, more than {self._limits.hard_memory_limit / 2**30:.1f} GiB"
            )
        printed = self._log.printed()
        if printed > self._limits.max_output:
            return f"it printed {printed / 2**20:.1f} MiB, more than {self._limits.max_output / 2**20:.1f} MiB"
        return ""

    def close(self) -> None:
        """End the worker, and all that it started."""
        worker, self._worker, self._started = self._worker, None, False
        if worker is not None:
            worker.end()
