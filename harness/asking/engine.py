"""The engine: runs questions on implementations, one by one, in worker processes of this machine.

It does everything that is the same for all commands:

* around small cases, it calls a user's function with one option or input changed, to find results kept between calls;
* it pads calls as the function requires;
* it gets exact answers from the store;
* it changes the exact answer to the conventions that the function declares;
* it marks expected failures.

A check runs thousands of questions in parallel; ``executors`` do that with the same workers and the same judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Self

from attncheck.asking.answer import Answer, judge_outcome
from attncheck.asking.question import Question
from attncheck.common.store import NO_STORE, Store
from attncheck.execution.call import Limits, WorkerProcesses
from attncheck.execution.implementations import Implementation
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.execution.workers import WorkerPool
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.settings.config import load_expected_failures_of


class Engine:
    """Runs questions on implementations, and judges the results."""

    def __init__(
        self,
        limits: Limits | None = None,
        store: Store = NO_STORE,
        expected_failures: Sequence[ExpectedFailure] | None = None,
        *,
        probes_state: bool = True,
    ) -> None:
        """Make an engine without a process.

        Args:
            limits: Limits of the worker processes.
            store: The store of exact answers.
            expected_failures: The expected failures; None for the bundled lists and those of the project.
            probes_state: Whether a user's function is called around some cases with one option or input changed.
        """
        self.workers = WorkerPool(limits, probes_state=probes_state)
        self.store = store
        self._expected_failures = expected_failures
        self._expected_of: dict[str, Sequence[ExpectedFailure]] = {}
        self._judging = WorkerProcesses()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, implementation: Implementation, question: Question) -> Answer:
        """Run one question on a worker that is kept for the next one."""
        return self.judge(implementation, question, self.compute(implementation, question))

    def run_in_new_process(
        self, implementation: Implementation, question: Question, preceding: Sequence[Question] = ()
    ) -> Answer:
        """Run one question in a new process, after the preceding calls.

        If a preceding call ends the process, the next call gets another process.
        """
        if lack := _undeclared_dtype_failure(implementation, question.dtype):
            return self.judge(implementation, question, lack)
        with self.workers.new_process_worker(implementation, question.dtype, keep_going=bool(preceding)) as runner:
            for call in preceding:
                runner.evaluate(Question(call.case, call.dtype).problem)  # new: its inputs are not kept
            return self.judge(implementation, question, runner.evaluate(question.problem))

    def ask_in_background(self, implementation: Implementation, question: Question) -> Future[Answer]:
        """Run one question, and judge its result in another process while the next ones run.

        The answer has no condition numbers.
        """
        return self.judge_in_background(implementation, question, self.compute(implementation, question))

    def judge_in_background(
        self, implementation: Implementation, question: Question, outcome: Outcome
    ) -> Future[Answer]:
        """Judge the result of a question in another process; the answer has no condition numbers."""
        arguments = question, implementation, outcome, self.expected_failures_of(implementation), self.store
        if isinstance(outcome, Computed):
            return self._judging.submit(partial(judge_outcome, measure_conditions=False), *arguments)
        answered: Future[Answer] = Future()
        answered.set_result(judge_outcome(*arguments))
        return answered

    def compute(self, implementation: Implementation, question: Question) -> Outcome:
        """Run a question on a worker that is kept, without judging the result."""
        if lack := _undeclared_dtype_failure(implementation, question.dtype):
            return lack
        return self.workers.worker_for(implementation, question.dtype).evaluate(question.problem)

    def judge(self, implementation: Implementation, question: Question, outcome: Outcome) -> Answer:
        """Judge the result of a question."""
        return judge_outcome(question, implementation, outcome, self.expected_failures_of(implementation), self.store)

    def expected_failures_of(self, implementation: Implementation) -> Sequence[ExpectedFailure]:
        """Return the expected failures of an implementation. Raises ``CaseError`` for an unusable list."""
        if self._expected_failures is not None:
            return self._expected_failures
        name = implementation.entry.name
        if name not in self._expected_of:
            self._expected_of[name] = load_expected_failures_of([name])
        return self._expected_of[name]

    def close(self) -> None:
        """End all processes."""
        try:
            self._judging.close()
        finally:
            self.workers.close()


def _undeclared_dtype_failure(implementation: Implementation, dtype: str) -> Failure | None:
    """Return the failure of a call in a dtype that an implementation does not declare."""
    if implementation.rounding_model(dtype):
        return None
    return Failure("unsupported", f"declares no {dtype}", (dtype,))
