"""Processes that judge side by side: what one unit comes to depends on no other.

A process takes most of a second to start, so that a few units are judged without. What cannot be judged in one of them,
because it dies for want of memory or because judging itself fails, is judged in the harness's own process: whatever is
wrong shows there as it would without any.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, local

from attncheck.attention.enclosure import SETTLED
from attncheck.execution.call import RemoteError, WorkerDied, WorkerProcess
from attncheck.execution.worker import Outcome, limit_threads
from attncheck.judging.units import Judge, Remembered, UnitResult
from attncheck.processors import available_processors
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.timing import Times

MIN_UNITS = 32
"""As many units as are judged in the time that the processes take to start."""

MAX_QUICK = 256
"""As many units with known rows have their arrays put together in that time."""


class JudgingProcesses:
    """Judges units in processes of its own, as many as there are processors; ``close`` ends them.

    Each of them gets all ``cases`` once: to be sent one by one, a case takes as long as a small one takes to be judged.
    """

    def __init__(
        self, judge: Judge, cases: Sequence[Case], processes: int | None = None, times: Times | None = None
    ) -> None:
        self._judge, self._cases = judge, cases
        self._threads = ThreadPoolExecutor(processes or available_processors(), thread_name_prefix="attncheck judges")
        self._own = local()
        self._living: list[WorkerProcess] = []
        self._here = Lock()
        self._closed = False
        self._times = Times() if times is None else times

    def submit(
        self,
        case: int,
        dtype: str,
        inputs: Inputs,
        outcomes: Mapping[str, Outcome],
        found: Remembered | None = None,
    ) -> Future[tuple[UnitResult, Counter[str]]]:
        """Have a unit judged; what comes is its result, and what the store and the oracle did for it.

        ``case`` is the place of its case, ``found`` what the store was seen to have, if somebody has looked.
        """
        return self._threads.submit(self._judged, case, dtype, inputs, outcomes, found)

    def close(self) -> None:
        """End the processes; what has not been judged is dropped."""
        self._closed = True
        for worker in self._living:
            worker.end()
        self._threads.shutdown(cancel_futures=True)

    def _judged(
        self,
        case: int,
        dtype: str,
        inputs: Inputs,
        outcomes: Mapping[str, Outcome],
        found: Remembered | None = None,
    ) -> tuple[UnitResult, Counter[str]]:
        try:
            worker = self._worker()
            with self._times.of("judging"):
                return worker.call(_judge_here, case, dtype, inputs, outcomes, found, seconds=math.inf)
        except (WorkerDied, RemoteError):
            self._end_worker()
            if self._closed:
                raise
        with self._here:  # one at a time: memory may be what was missing
            return self._judge.judge(self._cases[case], dtype, inputs, outcomes, found), Counter()

    def _worker(self) -> WorkerProcess:
        """Return this thread's own process."""
        if getattr(self._own, "worker", None) is None:
            worker = WorkerProcess()
            self._living.append(worker)
            if self._closed:  # while it started; whoever closed may not have seen it
                worker.end()
            worker.call(limit_threads, 1, seconds=math.inf)
            worker.call(_prepare, self._judge, self._cases, seconds=math.inf)
            self._own.worker = worker
        found: WorkerProcess = self._own.worker
        return found

    def _end_worker(self) -> None:
        worker, self._own.worker = getattr(self._own, "worker", None), None
        if worker is not None:
            worker.end()


_judge: Judge | None = None
_cases: Sequence[Case] = ()


def _prepare(judge: Judge, cases: Sequence[Case]) -> None:
    """Called once in a judging process."""
    global _judge, _cases
    _judge, _cases = judge, cases


def _judge_here(
    case: int, dtype: str, inputs: Inputs, outcomes: Mapping[str, Outcome], found: Remembered | None
) -> tuple[UnitResult, Counter[str]]:
    """Called in a judging process for each unit."""
    assert _judge is not None
    counts = _judge.store.counts
    counts.clear()
    SETTLED.clear()
    return _judge.judge(_cases[case], dtype, inputs, outcomes, found), counts + SETTLED
