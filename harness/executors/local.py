"""Workers driven through a plan, side by side: a unit is judged as soon as its last implementation has answered."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, TypeAlias

from attncheck.execution.runner import Group, GroupRunner, PrioritySemaphore
from attncheck.execution.worker import Outcome
from attncheck.executors.judges import MAX_QUICK, MIN_UNITS, JudgingProcesses
from attncheck.judging.units import Judge, Remembered, UnitResult
from attncheck.plan import Plan, Unit
from attncheck.recorder import ResultRecorder


class LocalExecutor:
    """Runs a plan in local worker processes."""

    record: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, runners: Sequence[GroupRunner[Unit]], judge: Judge, workers: int) -> None:
        self._runners, self._judge, self._workers = runners, judge, workers

    @property
    def descriptions(self) -> Mapping[str, Mapping[str, str]]:
        """What the frameworks say of themselves, by group."""
        return {runner.group.name: runner.description for runner in self._runners}

    def compute_and_judge(self, plan: Plan, recorder: ResultRecorder, on_progress: Callable[[int, int], None]) -> None:
        """Compute and judge every unit of a plan."""
        compute_and_judge(plan, self._runners, self._judge, recorder, self._workers, on_progress)


def compute_and_judge(
    plan: Plan,
    runners: Sequence[GroupRunner[Unit]],
    judge: Judge,
    recorder: ResultRecorder,
    workers: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Let every runner work through its units; judge each unit when its last implementation has answered."""
    serving = {dtype: sum(dtype in runner.group.dtypes for runner in runners) for dtype in plan.dtypes}
    total = sum(serving[unit.dtype] for unit in plan)
    answers: SimpleQueue[_Answer | BaseException] = SimpleQueue()
    turns = PrioritySemaphore(workers)
    unserved = deque(unit for unit in plan if not serving[unit.dtype] and judge.implementations)

    def judge_unserved(before: float) -> None:
        """Judge, in its turn, what no implementation is asked for."""
        while unserved and unserved[0].position < before and not recorder.is_stopped:
            judgements.add(unserved.popleft(), {})

    def drive(runner: GroupRunner[Unit]) -> None:
        own = (unit for unit in plan if unit.dtype in runner.group.dtypes)
        try:
            runner.run(
                own, plan.task, lambda unit, outcome: answers.put((unit, runner.group, outcome)), turns, _position
            )
        except BaseException as error:  # must reach the main thread, or it would wait for ever
            answers.put(error)

    outcomes: dict[int, dict[str, Outcome]] = {}
    with closing(_Judgements(plan, judge, recorder)) as judgements, ThreadPoolExecutor(max(1, len(runners))) as threads:
        try:
            for runner in runners:
                threads.submit(drive, runner)
            on_progress(0, total)
            while recorder.evaluations < total and not recorder.is_stopped:
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                unit, group, outcome = answer
                recorder.evaluations += 1
                found = outcomes.setdefault(unit.position, {})
                found[group.implementation.name] = outcome
                if len(found) == serving[unit.dtype]:
                    judge_unserved(unit.position)
                    judgements.add(unit, outcomes.pop(unit.position))
                judgements.record()
                on_progress(recorder.evaluations, total)
            judge_unserved(math.inf)
            judgements.record_all()
        finally:
            for runner in runners:
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


def _position(unit: Unit) -> int:
    return unit.position
