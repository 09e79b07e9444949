"""Workers driven through a plan: a unit is judged as soon as its last implementation has answered.

No more of them are alive than may compute at the same time. Where there are more, each gets through a window of the
plan and makes room for the next.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from queue import Full, Queue, SimpleQueue
from types import MappingProxyType
from typing import Any, TypeAlias

from attncheck.execution.runner import Group, GroupRunner, run_in_turn
from attncheck.execution.worker import Failure, Outcome, Task
from attncheck.executors.judges import MAX_QUICK, MIN_UNITS, JudgingProcesses
from attncheck.executors.priority_semaphore import PrioritySemaphore
from attncheck.executors.waiting import WaitingOutcomes
from attncheck.judging.units import Judge, Remembered, UnitResult
from attncheck.plan import Plan, Unit
from attncheck.recorder import ResultRecorder

WINDOW = 4096
"""Units of a plan that a worker gets through before it makes room. Starting it anew takes seconds, these take more."""

MAX_ANSWERS, MAX_TO_JUDGE = 256, 128
"""Of what workers have answered, and of units that are being judged: computing waits where judging takes longer."""


class LocalExecutor:
    """Runs a plan in local worker processes."""

    record: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, runners: Sequence[Sequence[GroupRunner[Unit]]], judge: Judge, workers: int) -> None:
        """``runners`` in one list share a worker: they take turns, unit by unit."""
        self._runners, self._judge, self._workers = runners, judge, workers

    @property
    def descriptions(self) -> Mapping[str, Mapping[str, str]]:
        """What the frameworks say of themselves, by group."""
        return {runner.group.name: runner.description for each in self._runners for runner in each}

    def compute_and_judge(self, plan: Plan, recorder: ResultRecorder, on_progress: Callable[[int, int], None]) -> None:
        """Compute and judge every unit of a plan."""
        compute_and_judge(plan, self._runners, self._judge, recorder, self._workers, on_progress)


def compute_and_judge(
    plan: Plan,
    runners: Sequence[Sequence[GroupRunner[Unit]]],
    judge: Judge,
    recorder: ResultRecorder,
    workers: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Let the runners work through their units; judge each unit when its last implementation has answered."""
    every = [runner for each in runners for runner in each]
    serving = {dtype: sum(dtype in runner.group.dtypes for runner in every) for dtype in plan.dtypes}
    total = sum(serving[unit.dtype] for unit in plan)
    answers: Queue[_Answer | BaseException] = Queue(MAX_ANSWERS)
    places = PrioritySemaphore(workers)
    unserved = deque(unit for unit in plan if not serving[unit.dtype] and judge.implementations)

    def judge_unserved(before: float) -> None:
        """Judge, in its turn, what no implementation is asked for."""
        while unserved and unserved[0].position < before and not recorder.is_stopped:
            judgements.add(unserved.popleft(), {})

    def hand_over(runner: GroupRunner[Unit], answer: _Answer | BaseException) -> None:
        while not runner.is_stopped:
            with suppress(Full):
                answers.put(answer, timeout=0.1)
                return

    def question(runner: GroupRunner[Unit], unit: Unit) -> Task | Failure:
        return runner.lack_known_beforehand(plan.case(unit), unit.dtype) or plan.task(unit)

    def drive(together: Sequence[GroupRunner[Unit]]) -> None:
        try:
            for number, window in enumerate(_windows(plan)):
                calls = [(each, unit) for unit in window for each in together if unit.dtype in each.group.dtypes]
                with places.acquire(number):
                    run_in_turn(
                        calls, question, lambda each, unit, outcome: hand_over(each, (unit, each.group, outcome))
                    )
                    if places.is_awaited:
                        _close(together)
        except BaseException as error:  # must reach the main thread, or it would wait for ever
            hand_over(together[0], error)
        finally:
            _close(together)

    with (
        closing(WaitingOutcomes(serving)) as waiting,
        closing(_Judgements(plan, judge, recorder)) as judgements,
        ThreadPoolExecutor(max(1, len(runners))) as threads,
    ):
        try:
            for together in runners:
                threads.submit(drive, together)
            on_progress(0, total)
            while recorder.evaluations < total and not recorder.is_stopped:
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                unit, group, outcome = answer
                recorder.evaluations += 1
                outcomes = waiting.add(unit, group.implementation.name, outcome)
                if outcomes is not None:
                    judge_unserved(unit.position)
                    judgements.add(unit, outcomes)
                judgements.record()
                on_progress(recorder.evaluations, total)
            judge_unserved(math.inf)
            judgements.record_all()
        finally:
            for runner in every:
                runner.stop()


_Answer: TypeAlias = tuple[Unit, Group, Outcome]


class _Judgements:
    """Units that are judged, at once or in processes, and recorded in the order in which that is done."""

    def __init__(self, plan: Plan, judge: Judge, recorder: ResultRecorder) -> None:
        self._plan, self._judge, self._recorder = plan, judge, recorder
        self._processes: JudgingProcesses | None = None
        self._quick = 0
        self._waiting: set[Future[tuple[UnitResult, Counter[str]]]] = set()
        self._done: SimpleQueue[Future[tuple[UnitResult, Counter[str]]]] = SimpleQueue()

    def add(self, unit: Unit, outcomes: Mapping[str, Outcome]) -> None:
        """Judge a unit, or have it judged."""
        case = self._plan.case(unit)
        if (found := self._judge.of_failures(case, unit.dtype, outcomes)) is not None:  # before any inputs are drawn
            self._recorder.add(found)
            return
        question = case, unit.dtype, self._plan.inputs(unit), outcomes
        remembered = self._judge.remembered(*question)
        found = None if remembered is None else remembered.result
        if found is None and (len(self._plan.units) < MIN_UNITS or self._is_quick(remembered)):
            found = self._judge.judge(*question, remembered)
        if found is not None:
            self._recorder.add(found)
            return
        if self._processes is None:
            self._processes = JudgingProcesses(self._judge)
        if len(self._waiting) >= MAX_TO_JUDGE:
            self._record_next()
        future = self._processes.submit(*question, remembered)
        self._waiting.add(future)
        future.add_done_callback(self._done.put)

    def _is_quick(self, remembered: Remembered | None) -> bool:
        """Whether only arrays are missing, the exact ones of which the store has too, and no process is there yet."""
        if remembered is None or remembered.rows is None or self._processes is not None:
            return False
        self._quick += 1
        return self._quick <= MAX_QUICK

    def record(self) -> None:
        """Record what has been judged meanwhile."""
        while not (self._done.empty() or self._recorder.is_stopped):
            self._record_next()

    def record_all(self) -> None:
        """Wait for the rest, and record it, unless the run is stopped."""
        while self._waiting and not self._recorder.is_stopped:
            self._record_next()

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()

    def _record_next(self) -> None:
        future = self._done.get()
        self._waiting.discard(future)
        found, counts = future.result()
        self._judge.store.counts.update(counts)
        self._recorder.add(found)


def _windows(plan: Iterable[Unit]) -> Iterator[list[Unit]]:
    units = iter(plan)
    while window := list(islice(units, WINDOW)):
        yield window


def _close(runners: Sequence[GroupRunner[Unit]]) -> None:
    for runner in runners:
        runner.close()
