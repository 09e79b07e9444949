"""The soundness campaign's work: random problems run on every implementation, and every stage of it judged."""

from __future__ import annotations

import multiprocessing
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore

from soundness_problems import DrawnProblem, PooledDraw, draw_problem
from soundness_rows import Judge, Row, Unit

from attncheck.common.processors import available_processors
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import GroupRunner, WorkerGroup, evaluate_in_turn, group_by_process
from attncheck.execution.worker import Outcome
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.problem import Problem

_AHEAD = 24
"""Evaluations that a worker may be ahead of the judge: their arrays wait in memory."""
_WORTH_PROCESSES = 100
"""Evaluations that are worth starting processes that judge."""
_Found = tuple[Unit, DrawnProblem, Mapping[str, Outcome]]


@dataclass(frozen=True)
class Campaign:
    """What to run: the problems with these numbers, in these dtypes, on these implementations; and what is known."""

    draw: PooledDraw
    numbers: Sequence[int]
    dtypes: Sequence[str]
    implementations: Sequence[Implementation]
    expected_failures: Sequence[ExpectedFailure]
    limits: Limits
    logs: Path

    @property
    def units(self) -> list[Unit]:
        """Every problem in every dtype."""
        return [Unit(number, dtype) for number in self.numbers for dtype in self.dtypes]


def run_campaign(
    campaign: Campaign, on_progress: Callable[[int, int], None]
) -> Generator[tuple[Unit, list[Row]], None, None]:
    """Run and judge every unit; ``on_progress`` hears units judged and planned.

    A unit that no implementation declares, or that lies beyond the range of its dtype, has no rows.
    """
    groups = [
        group
        for implementation in campaign.implementations
        for group in group_by_process(implementation, list(filter(implementation.rounding_model, campaign.dtypes)))
    ]
    runners: list[GroupRunner[Unit]] = [GroupRunner(group, campaign.limits, campaign.logs) for group in groups]
    problem = lru_cache(maxsize=4 * _AHEAD)(lambda number: draw_problem(campaign.draw, number))
    judge = Judge({each.name: each for each in campaign.implementations}, campaign.expected_failures)
    served = {dtype for runner in runners for dtype in runner.group.dtypes}
    asked = [unit for unit in campaign.units if unit.dtype in served and problem(unit.number).fits(unit.dtype)]
    for unit in set(campaign.units).difference(asked):
        yield unit, []
    on_progress(0, len(asked))
    found = ((unit, problem(unit.number), outcomes) for unit, outcomes in _outcomes(asked, runners, problem))
    judged = _judged_side_by_side(judge, found) if len(asked) >= _WORTH_PROCESSES else _judged_here(judge, found)
    for done, each in enumerate(judged, start=1):
        yield each
        on_progress(done, len(asked))


def _judged_here(judge: Judge, found: Iterable[_Found]) -> Iterator[tuple[Unit, list[Row]]]:
    for unit, drawn, outcomes in found:
        yield unit, judge.rows_of(unit, drawn, outcomes)


def _judged_side_by_side(judge: Judge, found: Iterable[_Found]) -> Iterator[tuple[Unit, list[Row]]]:
    """Judge by a process for each processor, in order."""
    count = available_processors()
    waiting: deque[tuple[Unit, Future[list[Row]]]] = deque()
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as processes:
        for unit, drawn, outcomes in found:
            waiting.append((unit, processes.submit(judge.rows_of, unit, drawn, outcomes)))
            if len(waiting) > 2 * count:
                first, rows = waiting.popleft()
                yield first, rows.result()
        for unit, rows in waiting:
            yield unit, rows.result()


def _outcomes(
    units: Sequence[Unit], runners: Sequence[GroupRunner[Unit]], problem: Callable[[int], DrawnProblem]
) -> Iterator[tuple[Unit, dict[str, Outcome]]]:
    """Give every unit when its last implementation has answered; workers of all groups run side by side."""
    answers: SimpleQueue[tuple[Unit, WorkerGroup, Outcome] | BaseException] = SimpleQueue()
    rooms = [Semaphore(_AHEAD) for _ in runners]

    def drive(runner: GroupRunner[Unit], room: Semaphore) -> None:
        def call(_: GroupRunner[Unit], unit: Unit) -> Problem:
            room.acquire()  # released when the unit is judged
            drawn = problem(unit.number)
            return Problem(drawn.operation, drawn.options, drawn.stored(unit.dtype), unit.dtype).as_call()

        own = [(runner, unit) for unit in units if unit.dtype in runner.group.dtypes]
        try:
            evaluate_in_turn(own, call, lambda each, unit, outcome: answers.put((unit, each.group, outcome)))
        except BaseException as error:  # must reach the main thread, or it would wait for ever
            answers.put(error)
        finally:
            runner.close()

    waiting = Counter(unit for runner in runners for unit in units if unit.dtype in runner.group.dtypes)
    collected: dict[Unit, dict[str, Outcome]] = defaultdict(dict)
    with ThreadPoolExecutor(max_workers=max(1, len(runners))) as threads:
        try:
            for runner, room in zip(runners, rooms, strict=True):
                threads.submit(drive, runner, room)
            for _ in range(waiting.total()):
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                unit, group, outcome = answer
                collected[unit][group.implementation.name] = outcome
                if len(collected[unit]) == waiting[unit]:
                    yield unit, collected.pop(unit)
                    for runner, room in zip(runners, rooms, strict=True):
                        if unit.dtype in runner.group.dtypes:
                            room.release()
        finally:
            for runner, room in zip(runners, rooms, strict=True):
                runner.stop()
                room.release(len(units) + 1)
