"""Workers driven through a plan: a unit is judged as soon as its last implementation has answered.

No more of them are alive than may compute at the same time. Where there are more, each gets through a window of the
plan and makes room for the next: of those that wait the one that comes first in the plan goes on. Where there are
fewer, and one has long to go, another of its kind takes part.

Where fewer workers may be alive than there are frameworks, implementations come through a plan one after the other.
Then most of what they answer waits for the others' answers to a unit, and what memory should not hold waits in a file
that has no name and no other reader.

Processes judge side by side: what one unit comes to depends on no other. Workers and judging processes together are no
more than processors. The one exception are a few frameworks that are compared: each keeps its worker for the run,
beside one process that judges. A framework takes seconds to start, so that they cannot take turns unit by unit, and if
one came after the other, nothing would be judged before the last of them had begun.

Workers may have all processors until there is something to judge, then half of them. A process takes most of a second
to start, so that a few units are judged without. What cannot be judged in one of them, because it dies for want of
memory or because judging itself fails, is judged in the harness's own process: whatever is wrong shows there as it
would without any.
"""

from __future__ import annotations

import math
import pickle
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Full, Queue, SimpleQueue
from threading import Condition, Lock
from time import perf_counter, sleep
from types import MappingProxyType
from typing import IO, Any, TypeAlias

from attncheck.common.processors import available_processors
from attncheck.common.progress import ActivityTimes
from attncheck.execution.runner import GroupRunner, WorkerGroup, evaluate_in_turn
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.executors.base import ResultRecorder
from attncheck.executors.judging_processes import JudgingProcesses
from attncheck.judging.units import Judge, StoredUnit, UnitResult
from attncheck.planning.plan import Plan, Unit
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs

MIN_UNITS_FOR_PROCESSES = 32
"""As many units as are judged in the time that the processes take to start."""


WINDOW_UNITS = 4096
"""Units of a plan that a worker gets through before it makes room. Starting it anew takes seconds, these take more."""

_POLL_SECONDS = 0.1
"""Seconds between checks whether a helper is worth its start."""

MAX_ANSWERS, MAX_TO_JUDGE = 8, 128
"""The most answers of workers, and of units that are being judged: if judging takes longer, computing waits.

More answers would come for units whose inputs the plan has forgotten meanwhile, and would have to make again.
"""


class LocalExecutor:
    """Runs a plan in local worker processes."""

    environment_record: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        runners: Sequence[Sequence[GroupRunner[Unit]]],
        judge: Judge,
        workers: int,
        helpers: Sequence[Sequence[GroupRunner[Unit]]] = (),
        times: ActivityTimes | None = None,
    ) -> None:
        """``runners`` in one list share a worker: they take turns, unit by unit.

        ``helpers`` are runners of the same groups, with separate workers, which take part if a place is free.
        ``times`` gets the seconds of everything.
        """
        self._runners, self._judge, self._workers, self._helpers = runners, judge, workers, helpers
        self._times = ActivityTimes() if times is None else times
        self._calls_left: Counter[str] = Counter()

    @property
    def descriptions(self) -> Mapping[str, Mapping[str, str]]:
        """Return the descriptions of the frameworks, by group."""
        return {runner.group.name: runner.description for sharing in self._runners for runner in sharing}

    @property
    def starting_frameworks(self) -> Sequence[str]:
        """Return the names of the frameworks that workers import at the moment."""
        runners = (runner for sharing in (*self._runners, *self._helpers) for runner in sharing if runner.is_starting)
        return list(dict.fromkeys(runner.group.implementation.entry.packages[0] for runner in runners))

    @property
    def calls_left(self) -> Mapping[str, int]:
        """Return how many calls of each implementation have not returned yet."""
        return dict(self._calls_left)

    def compute_and_judge(self, plan: Plan, recorder: ResultRecorder, on_progress: Callable[[int, int], None]) -> None:
        """Compute every unit of a plan, and judge each when its last implementation has answered."""
        every = [runner for sharing in self._runners for runner in sharing]
        total = sum(unit.dtype in runner.group.dtypes for runner in every for unit in plan)
        calls, unsupported = _decide_calls(plan, every)
        asked = Counter(position for _, position in calls)
        self._calls_left = Counter(
            runner.group.implementation.name
            for runner in every
            for unit in plan
            if (runner.group.name, unit.position) in calls
        )
        computing = _RunnerThreads(plan, self._runners, self._helpers, self._workers, calls)
        unasked = deque(unit for unit in plan if not asked[unit.position] and self._judge.implementations)

        def judge(unit: Unit, outcomes: Mapping[str, Outcome]) -> None:
            left_out: dict[str, Outcome] = {
                runner.group.implementation.name: unsupported.get((runner.group.name, unit.position))
                or runner.outcome_of_left_out_case(plan.case(unit), unit.dtype, partial(plan.problem, unit))
                for runner in every
                if unit.dtype in runner.group.dtypes and (runner.group.name, unit.position) not in calls
            }
            recorder.evaluations += len(left_out)
            judgements.add(unit, {**outcomes, **left_out})

        def judge_unevaluated_units(before: float) -> None:
            """Judge, in its turn, what no implementation is asked for."""
            while unasked and unasked[0].position < before and not recorder.is_stopped:
                judge(unasked.popleft(), {})

        with (
            closing(WaitingOutcomes(lambda unit: asked[unit.position])) as waiting,
            closing(_JudgingQueue(plan, self._judge, recorder, self._times, computing)) as judgements,
            computing.compute_in_threads(),
        ):
            on_progress(done := 0, total)
            for _ in range(sum(asked.values())):
                answer = computing.answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                unit, group, outcome = answer
                recorder.evaluations += 1
                self._calls_left[group.implementation.name] -= 1
                outcomes = waiting.add(unit, group.implementation.name, outcome)
                if outcomes is not None:
                    judge_unevaluated_units(unit.position)
                    judge(unit, outcomes)
                judgements.record()
                on_progress(done := recorder.evaluations, total)
                if recorder.is_stopped:
                    break
            judge_unevaluated_units(math.inf)
            judgements.record_all()
            if recorder.evaluations > done:
                on_progress(recorder.evaluations, total)
        self._add_times()

    def _add_times(self) -> None:
        """Add the seconds of workers to the times, by activity."""
        for runner in (runner for sharing in (*self._runners, *self._helpers) for runner in sharing):
            seconds = runner.times.seconds
            parts = {what: seconds.get(what, 0.0) for what in ("importing", "compiling")}
            name = runner.group.implementation.name
            for what, taken in parts.items():
                self._times.add_seconds(f"{what} {name}", taken, runner.times.programs.get(what, 0))
            self._times.add_seconds(f"computing {name}", seconds.get("all", 0.0) - sum(parts.values()))


class _RunnerThreads:
    """Runners in threads, and their answers."""

    def __init__(
        self,
        plan: Plan,
        runners: Sequence[Sequence[GroupRunner[Unit]]],
        helpers: Sequence[Sequence[GroupRunner[Unit]]],
        workers: int,
        calls: Set[_CallKey],
    ) -> None:
        self.answers: Queue[_Answer | BaseException] = Queue(MAX_ANSWERS)
        self._plan, self._runners, self._helpers, self._calls = plan, runners, helpers, calls
        self._places = PrioritySemaphore(workers, available_processors())
        self._compares_frameworks = runs_several_frameworks([sharing[0].group for sharing in runners], workers)
        self.judging: Callable[[], int] = lambda: 0
        """How many processes judge now."""
        self.waits_for_judges = False
        """Whether workers have had to wait for those that judge."""

    def reserve_half_for_judging(self) -> None:
        """Limit workers to half of the processors from now on, unless they are compared frameworks."""
        if not self._compares_frameworks:
            self._places.reduce_limit(max(1, available_processors() // 2))

    def max_judging(self) -> int:
        """Return how many processes may judge: one per free processor, and at least one next to compared frameworks.

        A worker that waits for judges computes nothing, although it has a place: then every processor is free.
        """
        if self.waits_for_judges:
            return available_processors()
        return max(int(self._compares_frameworks), available_processors() - self._places.claimed_places)

    @contextmanager
    def compute_in_threads(self) -> Iterator[None]:
        """Compute meanwhile; in the end every runner is stopped."""
        works: dict[tuple[str, ...], SharedWork] = {}
        for sharing in self._runners:
            names = {runner.group.name for runner in sharing}
            units = [unit for unit in self._plan if any((name, unit.position) in self._calls for name in names)]
            works[_process_key(sharing)] = SharedWork(units)
        helped = {_process_key(sharing) for sharing in self._helpers}
        with ThreadPoolExecutor(max(1, len(self._runners) + len(self._helpers))) as threads:
            try:
                for sharing in sorted(
                    self._runners, key=_needs_no_compilation
                ):  # what compiles takes the longest: it starts first
                    at_once = CHUNK_UNITS if _process_key(sharing) in helped else WINDOW_UNITS
                    threads.submit(
                        self._call_and_report_errors, sharing, self._evaluate_all, works[_process_key(sharing)], at_once
                    )
                for sharing in self._helpers:
                    threads.submit(
                        self._call_and_report_errors, sharing, self._help_while_free, works[_process_key(sharing)]
                    )
                yield
            finally:
                for runner in (runner for sharing in (*self._runners, *self._helpers) for runner in sharing):
                    runner.stop()

    def _call_and_report_errors(
        self, together: _SharingRunners, function: Callable[..., None], *arguments: Any
    ) -> None:
        try:
            function(together, *arguments)
        except BaseException as error:  # must reach the main thread, or it would wait for ever
            self._put_answer(together[0], error)
        finally:
            _close_runners(together)

    def _evaluate_all(self, together: _SharingRunners, work: SharedWork, at_once: int) -> None:
        """Evaluate all units; after a window, make room if another worker waits for the place."""
        for window in count():
            with self._places.acquire(window):
                for _ in range(0, WINDOW_UNITS, at_once):
                    self._evaluate_units(together, work.take_units(at_once))
                if (is_over := work.is_done or together[0].is_stopped) or self._places.is_awaited:
                    _close_runners(together)  # while it has the place, which is the next one's then
            if is_over:
                return

    def _help_while_free(self, together: _SharingRunners, work: SharedWork) -> None:
        """Take units whenever a place is free and the rest is long."""

        def is_over() -> bool:
            return work.is_done or together[0].is_stopped

        while not is_over():
            if not self._compares_frameworks and self._places.claimed_places + self.judging() >= available_processors():
                sleep(_POLL_SECONDS)
                continue
            with self._places.acquire_spare(lambda: not is_over()) as has_place:
                if has_place and work.is_long:
                    while not (self._places.is_awaited or is_over()):
                        self._evaluate_units(together, work.take_units(CHUNK_UNITS))
                    _close_runners(together)
            sleep(_POLL_SECONDS)

    def _evaluate_units(self, together: _SharingRunners, units: Sequence[Unit]) -> None:
        pairs = ((runner, unit) for unit in units for runner in together)
        evaluate_in_turn(
            [(runner, unit) for runner, unit in pairs if (runner.group.name, unit.position) in self._calls],
            lambda runner, unit: self._plan.problem(unit),
            lambda runner, unit, outcome: self._put_answer(runner, (unit, runner.group, outcome)),
        )

    def _put_answer(self, runner: GroupRunner[Unit], answer: _Answer | BaseException) -> None:
        while not runner.is_stopped:
            with suppress(Full):
                self.answers.put(answer, timeout=0.1)
                return


_SharingRunners: TypeAlias = Sequence[GroupRunner[Unit]]
_Answer: TypeAlias = tuple[Unit, WorkerGroup, Outcome]
_CallKey: TypeAlias = tuple[str, int]
"""The name of a group, and the position of a unit in the plan."""


class _JudgingQueue:
    """Units that are judged, at once or in processes, and recorded in the order in which that is done."""

    def __init__(
        self, plan: Plan, judge: Judge, recorder: ResultRecorder, times: ActivityTimes, computing: _RunnerThreads
    ) -> None:
        self._plan, self._judge, self._recorder, self._times = plan, judge, recorder, times
        self._computing = computing
        self._processes: JudgingProcesses | None = None
        self._waiting: set[Future[tuple[UnitResult, Counter[str]]]] = set()
        self._done: SimpleQueue[Future[tuple[UnitResult, Counter[str]]]] = SimpleQueue()

    def add(self, unit: Unit, outcomes: Mapping[str, Outcome]) -> None:
        """Judge a unit, here or in a process."""
        case = self._plan.case(unit)
        if (
            result := self._judge.judge_failures_only(case, unit.dtype, outcomes)
        ) is not None:  # before any inputs are drawn
            self._write_result(result)
            return
        with self._times.measure("drawing inputs"):
            question = case, unit.dtype, self._plan.inputs(unit), outcomes
        with self._times.measure("looking up"):
            remembered = self._judge.look_up_stored_unit(*question)
        if remembered is not None and remembered.result is not None:
            self._write_result(remembered.result)
            return
        if len(self._plan.units) < MIN_UNITS_FOR_PROCESSES:
            self._judge_in_this_process(question, remembered)
            return
        if self._processes is None:
            self._computing.reserve_half_for_judging()
            self._processes = JudgingProcesses(
                self._judge, self._plan.cases, times=self._times, max_alive=self._computing.max_judging
            )
            self._computing.judging = partial(getattr, self._processes, "alive_count")
        if len(self._waiting) >= MAX_TO_JUDGE:
            if not self._processes.alive_count and self._done.empty():
                self._judge_in_this_process(question, remembered)
                return
            self._computing.waits_for_judges = True
            self._record_next()
        future = self._processes.submit(unit.case_index, *question[1:], remembered)
        self._waiting.add(future)
        future.add_done_callback(self._done.put)

    def _judge_in_this_process(
        self, question: tuple[Case, str, RoundedInputs, Mapping[str, Outcome]], remembered: StoredUnit | None
    ) -> None:
        with self._times.measure("judging"):
            result = self._judge.judge_unit(*question, remembered)
        self._write_result(result)

    def record(self) -> None:
        """Record the units that have been judged meanwhile."""
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
        result, counts = future.result()
        self._judge.store.event_counts.update(counts)
        self._write_result(result)

    def _write_result(self, result: UnitResult) -> None:
        with self._times.measure("writing"):
            self._recorder.record_result(result)


def runs_several_frameworks(groups: Sequence[WorkerGroup], workers: int) -> bool:
    """Return whether groups need several frameworks, and no more than may have a worker for the whole run."""
    processes = {group.process_key for group in groups if group.imports_framework}
    return 1 < len(processes) <= workers


def _process_key(together: _SharingRunners) -> tuple[str, ...]:
    return together[0].group.process_key


def _decide_calls(plan: Plan, runners: Sequence[GroupRunner[Unit]]) -> tuple[Set[_CallKey], Mapping[_CallKey, Failure]]:
    """Return the calls to make, and the outcomes of calls that are known to be unsupported; others are left out."""
    unsupported, calls = {}, set()
    for unit in plan:
        for runner in runners:
            if not runner.group.runs_case(unit.dtype, in_standard=unit.is_standard):
                continue
            key = runner.group.name, unit.position
            failure = runner.known_unsupported_outcome(plan.case(unit), unit.dtype)
            if failure is None:
                calls.add(key)
            else:
                unsupported[key] = failure
    return calls, unsupported


def _needs_no_compilation(together: _SharingRunners) -> bool:
    """Return whether none of these compiles each case separately."""
    return not any(runner.group.implementation.runs_only_standard_cases for runner in together)


def _close_runners(runners: _SharingRunners) -> None:
    for runner in runners:
        runner.close()


CHUNK_UNITS = 32
"""Units that a worker takes at once if several workers share the work."""
MIN_SECONDS_LEFT = 15.0
"""If the rest takes less time, no further worker is started, since a start takes seconds."""


class SharedWork:
    """The units of a plan, taken in order."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units, self._next = units, 0
        self._begun = 0.0
        self._lock = Lock()

    def take_units(self, most: int) -> Sequence[Unit]:
        """Return the next units, at most so many; empty if none are left."""
        with self._lock:
            self._begun = self._begun or perf_counter()
            taken = self._units[self._next : self._next + most]
            self._next += len(taken)
            return taken

    @property
    def is_long(self) -> bool:
        """Return whether the rest takes so long, at the speed so far, that another worker pays."""
        with self._lock:
            done, remaining = self._next - CHUNK_UNITS, len(self._units) - self._next
            return (
                done > 0
                and remaining > CHUNK_UNITS
                and (perf_counter() - self._begun) / done * remaining > MIN_SECONDS_LEFT
            )

    @property
    def is_done(self) -> bool:
        """Return whether nothing is left."""
        with self._lock:
            return self._next >= len(self._units)


MAX_WAITING_BYTES = 2**28
"""Bytes of arrays that wait in memory."""


@dataclass(frozen=True)
class _FiledOutcome:
    """The place of an outcome in the file."""

    offset: int
    length: int


class WaitingOutcomes:
    """Outcomes by unit, until every implementation that is asked for it has answered."""

    def __init__(self, asked_of: Callable[[Unit], int], max_held: int = MAX_WAITING_BYTES) -> None:
        """``asked_of`` counts the implementations that are asked for a unit."""
        self._count_implementations, self._max_held = asked_of, max_held
        self._waiting: dict[int, dict[str, Outcome | _FiledOutcome]] = {}
        self._held = 0
        self._file: IO[bytes] | None = None

    def add(self, unit: Unit, implementation: str, outcome: Outcome) -> dict[str, Outcome] | None:
        """Return all answers to the unit if this is the last one, else None."""
        waiting = self._waiting.setdefault(unit.position, {})
        if len(waiting) + 1 < self._count_implementations(unit):
            waiting[implementation] = self._store_outcome(outcome)
            return None
        del self._waiting[unit.position]
        return {**{name: self._restore_outcome(kept) for name, kept in waiting.items()}, implementation: outcome}

    def close(self) -> None:
        """Forget what still waits."""
        self._waiting.clear()
        if self._file is not None:
            self._file.close()

    def _store_outcome(self, outcome: Outcome) -> Outcome | _FiledOutcome:
        size = _size_in_bytes(outcome)
        if self._held + size > self._max_held:
            with suppress(OSError):  # where no file can hold it, memory has to
                return self._write_to_file(outcome)
        self._held += size
        return outcome

    def _write_to_file(self, outcome: Outcome) -> _FiledOutcome:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        data = pickle.dumps(outcome)
        offset = self._file.seek(0, 2)
        self._file.write(data)
        self._file.flush()
        return _FiledOutcome(offset, len(data))

    def _restore_outcome(self, kept: Outcome | _FiledOutcome) -> Outcome:
        if not isinstance(kept, _FiledOutcome):
            self._held -= _size_in_bytes(kept)
            return kept
        assert self._file is not None
        self._file.seek(kept.offset)
        outcome: Outcome = pickle.loads(self._file.read(kept.length))  # what this process wrote, and nobody else can
        return outcome


def _size_in_bytes(outcome: Outcome) -> int:
    return sum(array.nbytes for array in outcome.stages.values()) if isinstance(outcome, Computed) else 0


_RECHECK_SECONDS = 0.2
"""Seconds between checks whether a free place is still wanted."""


class PrioritySemaphore:
    """At most ``limit`` at the same time; a place is spare while fewer than ``busy`` are taken."""

    def __init__(self, limit: int, busy_limit: int | None = None) -> None:
        self._limit = self._free = limit
        self._kept_free = max(0, limit - (limit if busy_limit is None else busy_limit))
        self._waiting: list[tuple[int, int]] = []
        self._tickets = 0
        self._changed = Condition()

    @property
    def is_awaited(self) -> bool:
        """Return whether a thread waits for a place."""
        with self._changed:
            return bool(self._waiting)

    @property
    def claimed_places(self) -> int:
        """Return how many places are taken, or will be at once."""
        with self._changed:
            taken = self._limit - self._free
            return max(taken, min(self._limit, taken + len(self._waiting)))

    def reduce_limit(self, limit: int) -> None:
        """Reduce the number of places; places in use beyond it are not given away again."""
        with self._changed:
            fewer = max(0, self._limit - limit)
            self._limit -= fewer
            self._free -= fewer

    @contextmanager
    def acquire(self, step: int) -> Iterator[None]:
        """Wait for a place; the waiting thread with the lowest ``step`` in the plan is next."""
        with self._changed:
            self._tickets += 1
            ticket = (step, self._tickets)
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._free > 0 and min(self._waiting) == ticket)
            self._waiting.remove(ticket)
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    @contextmanager
    def acquire_spare(self, is_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Wait for a place that no other thread waits for; yield False if it is no longer wanted."""
        with self._changed:
            while (wanted := is_wanted()) and not (self._free > self._kept_free and not self._waiting):
                self._changed.wait(_RECHECK_SECONDS)
            self._free -= wanted
        try:
            yield wanted
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()
