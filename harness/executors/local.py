"""Workers driven through a plan, side by side: a unit is judged as soon as its last implementation has answered."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from attncheck.execution.runner import Group, GroupRunner, PrioritySemaphore
from attncheck.execution.worker import Outcome
from attncheck.plan import Plan, Unit
from attncheck.recorder import Judge, ResultRecorder


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
    answers: SimpleQueue[tuple[Unit, Group, Outcome] | BaseException] = SimpleQueue()
    turns = PrioritySemaphore(workers)
    unserved = deque(unit for unit in plan if not serving[unit.dtype] and judge.implementations)

    def finish(unit: Unit, outcomes: Mapping[str, Outcome]) -> None:
        recorder.add(judge.judge(plan.case(unit), unit.dtype, plan.inputs(unit), outcomes))

    def finish_unserved(before: float) -> None:
        """Judge, in its turn, what no implementation is asked for."""
        while unserved and unserved[0].position < before and not recorder.is_stopped:
            finish(unserved.popleft(), {})

    def drive(runner: GroupRunner[Unit]) -> None:
        own = (unit for unit in plan if unit.dtype in runner.group.dtypes)
        try:
            runner.run(
                own, plan.task, lambda unit, outcome: answers.put((unit, runner.group, outcome)), turns, _position
            )
        except BaseException as error:  # must reach the main thread, or it would wait for ever
            answers.put(error)

    outcomes: dict[int, dict[str, Outcome]] = {}
    with ThreadPoolExecutor(max_workers=max(1, len(runners))) as threads:
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
                    finish_unserved(unit.position)
                    finish(unit, outcomes.pop(unit.position))
                on_progress(recorder.evaluations, total)
            finish_unserved(math.inf)
        finally:
            for runner in runners:
                runner.stop()


def _position(unit: Unit) -> int:
    return unit.position
