"""Judging in processes side by side: the same as in one, also where a process dies or judging fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from attncheck.backends import BACKENDS, numpy_backend
from attncheck.execution.call import WorkerDied
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Outcome, evaluate_on
from attncheck.executors.judges import JudgingProcesses
from attncheck.judging.units import Judge, Remembered, UnitResult
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.store import Store

NUMPY = Implementation(BACKENDS["numpy"])
HARNESS = os.getpid()


@dataclass(frozen=True)
class DyingJudge(Judge):
    """Is killed wherever it judges, but in the harness's own process."""

    def judge(
        self,
        case: Case,
        dtype: str,
        inputs: Inputs,
        collected: Mapping[str, Outcome],
        found: Remembered | None = None,
    ) -> UnitResult:
        if os.getpid() != HARNESS:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().judge(case, dtype, inputs, collected, found)


@dataclass(frozen=True)
class FailingJudge(Judge):
    """Has a fault."""

    def judge(
        self,
        case: Case,
        dtype: str,
        inputs: Inputs,
        collected: Mapping[str, Outcome],
        found: Remembered | None = None,
    ) -> UnitResult:
        raise ZeroDivisionError(f"a fault of ours in {case.id}")


@pytest.fixture(scope="module")
def questions() -> list[tuple[Case, str, Inputs, dict[str, Outcome]]]:
    found = []
    for case in select_cases(["masking/*"]).cases[:6]:
        inputs = convert_inputs(case, make_exact_inputs(case), case.dtypes[0])
        found.append((case, case.dtypes[0], inputs, {"numpy.eager": evaluate_on(numpy_backend, task_of(case, inputs))}))
    return found


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[JudgingProcesses]:
    started = JudgingProcesses(request.param((NUMPY,)), 2)
    yield started
    started.close()


@pytest.mark.parametrize("processes", [Judge], indirect=True)
def test_what_is_judged_elsewhere_is_what_is_judged_here(
    processes: JudgingProcesses, questions: list[tuple[Case, str, Inputs, dict[str, Outcome]]]
) -> None:
    futures = [processes.submit(*question) for question in questions]
    for question, future in zip(questions, futures, strict=True):
        assert future.result()[0].rows == Judge((NUMPY,)).judge(*question).rows


@pytest.mark.parametrize("processes", [DyingJudge], indirect=True)
def test_what_kills_a_judging_process_is_judged_by_the_harness_itself(
    processes: JudgingProcesses, questions: list[tuple[Case, str, Inputs, dict[str, Outcome]]]
) -> None:
    futures = [processes.submit(*question) for question in questions]
    assert all(future.result()[0].rows for future in futures)


@pytest.mark.parametrize("processes", [FailingJudge], indirect=True)
def test_a_fault_of_ours_shows_as_it_would_here(
    processes: JudgingProcesses, questions: list[tuple[Case, str, Inputs, dict[str, Outcome]]]
) -> None:
    with pytest.raises(ZeroDivisionError, match=r"a fault of ours in masking/") as raised:
        processes.submit(*questions[0]).result()
    assert raised.traceback[-1].name == "judge"


def test_what_the_store_did_is_counted(
    questions: list[tuple[Case, str, Inputs, dict[str, Outcome]]], tmp_path: Path
) -> None:
    started = JudgingProcesses(Judge((NUMPY,), store=Store(tmp_path)), 1)
    try:
        counts = [started.submit(*questions[0]).result()[1] for _ in range(2)]
    finally:
        started.close()
    assert counts[0]["kept"] == counts[0]["missing"] > 0
    assert counts[1] == {"found": 1}


def test_processes_that_are_closed_while_they_start_are_ended(
    questions: list[tuple[Case, str, Inputs, dict[str, Outcome]]],
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    started = JudgingProcesses(Judge((NUMPY,)), 2)
    futures = [started.submit(*question) for question in questions]
    started.close()
    assert all(future.cancelled() or isinstance(future.exception(), WorkerDied) for future in futures)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if child.is_running() and "resource_tracker" not in " ".join(child.cmdline())]
