"""Processes that judge units side by side: the result of one unit depends on no other.

Such a process imports only the modules that judge. ``prestart_judges`` starts processes before there is anything to
judge, while the harness imports its modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from attncheck.common.progress import ARITHMETIC_COUNTS, ActivityTimes
from attncheck.execution.call import WorkerProcesses, start_workers_ahead

if TYPE_CHECKING:
    from attncheck.execution.worker import Outcome
    from attncheck.judging.units import Judge, StoredUnit, UnitResult
    from attncheck.reading.case import Case
    from attncheck.reading.inputs import RoundedInputs


def prestart_judges(processes: int) -> None:
    """Start processes, so that this many idle ones have imported the modules that judge."""
    start_workers_ahead(processes, "attncheck.executors.judging_processes", "attncheck.judging.judge")


class JudgingProcesses:
    """Judges units in processes, by default as many as there are processors; ``close`` ends them.

    Each process gets all ``cases`` once: to send a case takes as long as to judge a small one.
    """

    def __init__(
        self,
        judge: Judge,
        cases: Sequence[Case],
        processes: int | None = None,
        times: ActivityTimes | None = None,
        max_alive: Callable[[], int] | None = None,
    ) -> None:
        """``max_alive`` returns how many may be alive now, if that changes."""
        self._judge, self._cases = judge, cases
        during = partial((ActivityTimes() if times is None else times).measure, "judging")
        self._processes = WorkerProcesses(
            _remember_judge, judge, cases, processes=processes, call_context=during, max_alive=max_alive
        )

    def submit(
        self,
        case: int,
        dtype: str,
        inputs: RoundedInputs,
        outcomes: Mapping[str, Outcome],
        stored_unit: StoredUnit | None = None,
    ) -> Future[tuple[UnitResult, Counter[str]]]:
        """Judge a unit in a process; return the future of its result and of the counts of store and oracle.

        ``case`` is the index of its case, ``stored_unit`` the entry of the store, if the caller has looked it up.
        """
        unit_arguments = dtype, inputs, outcomes, stored_unit
        judge_here = lambda: (self._judge.judge_unit(self._cases[case], *unit_arguments), Counter[str]())  # noqa: E731
        return self._processes.submit(_judge_unit, case, *unit_arguments, fallback=judge_here)

    @property
    def alive_count(self) -> int:
        """Return how many of them are alive."""
        return self._processes.alive_count

    def close(self) -> None:
        """End the processes; units that have not been judged are dropped."""
        self._processes.close()


_judge: Judge | None = None
_cases: Sequence[Case] = ()


def _remember_judge(judge: Judge, cases: Sequence[Case]) -> None:
    """Called once in a judging process."""
    global _judge, _cases
    _judge, _cases = judge, cases


def _judge_unit(
    case: int, dtype: str, inputs: RoundedInputs, outcomes: Mapping[str, Outcome], stored_unit: StoredUnit | None
) -> tuple[UnitResult, Counter[str]]:
    """Called in a judging process for each unit."""
    assert _judge is not None
    counts = _judge.store.event_counts
    counts.clear()
    ARITHMETIC_COUNTS.clear()
    return _judge.judge_unit(_cases[case], dtype, inputs, outcomes, stored_unit), counts + ARITHMETIC_COUNTS
