"""Workers driven through their units, side by side: each is judged as soon as its last implementation has answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from queue import SimpleQueue

from attncheck.harness.bench import Bench, Unit
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import Exact, Inputs, convert_inputs, make_exact_inputs
from attncheck.harness.running.executor import Group, GroupRunner
from attncheck.harness.running.tasks import task_of
from attncheck.harness.running.turns import Turns
from attncheck.harness.running.worker import Outcome, Task


def compute_and_judge(
    units: Sequence[Unit],
    runners: Sequence[GroupRunner[Unit]],
    bench: Bench,
    workers: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Let every runner work through its units; judge each unit when its last implementation has answered."""
    planned = [(runner, [unit for unit in units if unit.dtype in runner.group.dtypes]) for runner in runners]
    total = sum(len(own) for _, own in planned)
    served = {dtype for runner in runners for dtype in runner.group.dtypes}
    undeclared = [unit for unit in units if bench.implementations and unit.dtype not in served]
    answers: SimpleQueue[tuple[Unit, Group, Outcome] | BaseException] = SimpleQueue()
    inputs = InputCache()

    def drive(runner: GroupRunner[Unit], own: Sequence[Unit]) -> None:
        try:
            runner.run(own, inputs.task, lambda unit, outcome: answers.put((unit, runner.group, outcome)), turns)
        except BaseException as error:  # must reach the main thread, or it would wait for ever
            answers.put(error)

    turns = Turns(workers)
    waiting = Counter(id(unit) for _, own in planned for unit in own)
    outcomes: dict[int, dict[str, Outcome]] = {}
    with ThreadPoolExecutor(max_workers=max(1, len(runners))) as threads:
        try:
            for runner, own in planned:
                threads.submit(drive, runner, own)
            for unit in undeclared:
                bench.judge(unit, inputs.of(unit), {})
            on_progress(0, total)
            while bench.evaluations < total:
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                unit, group, outcome = answer
                bench.evaluations += 1
                outcomes.setdefault(id(unit), {})[group.implementation.name] = outcome
                waiting[id(unit)] -= 1
                if not waiting[id(unit)]:
                    bench.judge(unit, inputs.of(unit), outcomes.pop(id(unit)))
                on_progress(bench.evaluations, total)
        finally:
            for runner in runners:
                runner.stop()


class InputCache:
    """Inputs of the cases that are being worked on, made once for all workers."""

    def __init__(self) -> None:
        self._exact: Callable[[int], dict[str, Exact]]
        self._cases: dict[int, Case] = {}
        self._exact = lru_cache(maxsize=64)(lambda key: make_exact_inputs(self._cases[key]))

    def of(self, unit: Unit) -> Inputs:
        """Return the inputs of a unit in its dtype."""
        self._cases[id(unit.case)] = unit.case
        return convert_inputs(unit.case, self._exact(id(unit.case)), unit.dtype)

    def task(self, unit: Unit) -> Task:
        """Return what a worker has to evaluate for a unit."""
        return task_of(unit.case, self.of(unit))
