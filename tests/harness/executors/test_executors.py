"""Workers and judging processes on this machine: how many there are, what each does, and the same results."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from kernels import kernel as source

from attncheck import run
from attncheck.backends import BACKENDS, BackendEntry, numpy_backend
from attncheck.common.store import NO_STORE
from attncheck.execution import call, runner
from attncheck.execution.call import Limits, WorkerDied
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import Implementation, ImplementationSelection, bundled_implementations
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on_backend
from attncheck.executors import local
from attncheck.executors.judging_processes import JudgingProcesses
from attncheck.executors.local import WaitingOutcomes
from attncheck.judging.units import Judge, UnitResult
from attncheck.planning.plan import Unit
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, make_inputs, make_problem_of_case
from attncheck.reading.selection import select_cases
from attncheck.results.reader import read_arrays, read_run
from attncheck.run import Settings, run_cases
from attncheck.spec.dtypes import numpy_dtype

pytestmark = pytest.mark.usefixtures("forked_workers")

COUNTING = """\
import os, psutil
from pathlib import Path
pids = Path({pids!r})
others = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
alive = [pid for pid in others if psutil.pid_exists(pid)]
with pids.open("a") as file:
    file.write(f"{{os.getpid()}} ")
with Path({alive!r}).open("a") as file:
    file.write(f"{{1 + len(alive)}} ")
"""


@pytest.mark.parametrize(("workers", "window", "starts"), [(1, 3, 6), (2, 3, 2)])
def test_no_more_workers_are_alive_than_may_be_and_a_window_at_a_time_gives_the_same(
    workers: int,
    window: int,
    starts: int,
    tmp_path: Path,
    case_folder: Path,
    make_backend: Callable[..., BackendEntry],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = COUNTING.format(pids=str(tmp_path / "pids"), alive=str(tmp_path / "alive"))
    entries = [make_backend(name, source) for name in ("one", "two")]
    chosen = ImplementationSelection(tuple(map(Implementation, entries)))
    monkeypatch.setattr(local, "WINDOW_UNITS", window)
    monkeypatch.setattr(run, "available_processors", lambda: 4)  # of which half judge
    cases = select_cases(["small"], base=tmp_path).cases
    summary = run_cases(cases, chosen, Settings(tmp_path / "out", limits=Limits(workers=workers)))
    assert summary.exit_code == 0
    counts = [int(count) for count in (tmp_path / "alive").read_text().split()]
    assert max(counts) <= workers
    assert len(counts) == starts  # 4 cases in 2 dtypes are 3 windows of 3 units
    rows = read_run(tmp_path / "out").rows
    assert len(rows[["case", "dtype", "implementation"]].drop_duplicates()) == 4 * 2 * 2
    assert set(rows["verdict"]) == {"agree"}


NUMPY = Implementation(BACKENDS["numpy"])

HARNESS = os.getpid()


@dataclass(frozen=True)
class DyingJudge(Judge):
    """Is killed wherever it judges, but in the harness's own process."""

    def judge_unit(self, *asked: Any, **named: Any) -> UnitResult:
        if os.getpid() != HARNESS:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().judge_unit(*asked, **named)


@dataclass(frozen=True)
class FailingJudge(Judge):
    """Has a fault."""

    def judge_unit(self, *asked: Any, **named: Any) -> UnitResult:
        raise ZeroDivisionError(f"a fault of ours in {asked[0].id}")


Asked = tuple[Case, str, RoundedInputs, dict[str, Outcome]]


@pytest.fixture(scope="module")
def questions() -> list[Asked]:
    found = []
    for case in select_cases(["masking/*"]).cases[:6]:
        inputs = make_inputs(case, case.dtypes[0])
        found.append(
            (
                case,
                case.dtypes[0],
                inputs,
                {"numpy.eager": evaluate_on_backend(numpy_backend, make_problem_of_case(case, inputs).as_call())},
            )
        )
    return found


def judging(judge: Judge, questions: list[Asked]) -> closing[JudgingProcesses]:
    return closing(JudgingProcesses(judge, [case for case, *_ in questions], 2))


@pytest.mark.parametrize("kind", [Judge, DyingJudge])
def test_judging_elsewhere_or_after_a_death_is_judging_here(kind: type[Judge], questions: list[Asked]) -> None:
    with judging(kind((NUMPY,)), questions) as processes:
        futures = [processes.submit(number, *question[1:]) for number, question in enumerate(questions)]
        for question, future in zip(questions, futures, strict=True):
            assert future.result()[0].rows == Judge((NUMPY,)).judge_unit(*question).rows


def test_a_fault_of_ours_shows_as_it_would_here(questions: list[Asked]) -> None:
    with judging(FailingJudge((NUMPY,)), questions) as processes:
        with pytest.raises(ZeroDivisionError, match=r"a fault of ours in masking/") as raised:
            processes.submit(0, *questions[0][1:]).result()
        assert raised.traceback[-1].name == "judge_unit"


def test_processes_that_are_closed_while_they_start_are_ended(questions: list[Asked]) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with judging(Judge((NUMPY,)), questions) as processes:
        futures = [processes.submit(number, *question[1:]) for number, question in enumerate(questions)]
    assert all(future.cancelled() or isinstance(future.exception(), WorkerDied | None) for future in futures)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if child.is_running() and "resource_tracker" not in " ".join(child.cmdline())]


def contents(folder: Path) -> tuple[Any, ...]:
    rows = read_run(folder).rows.drop(columns="seconds")
    arrays = {key: (array.dtype, array.shape, array.tobytes()) for key, array in read_arrays(folder).items()}
    return sorted(map(str, rows.to_dict("records"))), arrays


def test_a_stopped_run_leaves_no_worker_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_ANSWERS", 1)
    monkeypatch.setattr(local, "MAX_TO_JUDGE", 1)
    kernel = tmp_path / "kernel.py"
    kernel.write_text("def softmax(scores, **options):\n    return {'weights': scores}\n", encoding="utf-8")
    chosen = select_implementations(None, [f"{kernel}:softmax"])
    summary = run_cases(select_cases(["softmax"]).cases, chosen, Settings(tmp_path / "results", max_failures=1))
    assert summary.stopped is not None
    assert summary.stopped.failing == 1


def test_several_workers_come_to_what_one_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = select_cases(["softmax", "masking", "scoring"]).cases
    chosen = bundled_implementations(["numpy"])
    alone = run_cases(cases, chosen, Settings(tmp_path / "alone", limits=Limits(workers=1), store=NO_STORE))
    for module in (run, local):
        monkeypatch.setattr(module, "available_processors", lambda: 4)
    monkeypatch.setattr(local, "MIN_UNITS_FOR_PROCESSES", 10**6)  # so that nothing else takes a processor
    monkeypatch.setattr(local, "MIN_SECONDS_LEFT", 0.0)
    monkeypatch.setattr(local, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(local, "CHUNK_UNITS", 2)
    shared = run_cases(cases, chosen, Settings(tmp_path / "shared", limits=Limits(workers=3), store=NO_STORE))
    assert alone == shared
    assert contents(tmp_path / "alone") == contents(tmp_path / "shared")
    assert {path.name for path in (tmp_path / "alone" / "logs").iterdir()} == {"numpy.eager-float32-float64.txt"}
    several = {path.name for path in (tmp_path / "shared" / "logs").iterdir()}
    assert len(several) > 1


def test_ones_own_kernel_has_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("def attention(query, key, value):\n    return query\n", encoding="utf-8")
    chosen = select_implementations(None, [f"{kernel}:attention"])
    monkeypatch.setattr(local, "MIN_SECONDS_LEFT", 0.0)
    settings = Settings(tmp_path / "run", limits=Limits(workers=3), store=NO_STORE)
    run_cases(select_cases(["attention"]).cases, chosen, settings)
    assert len(list((tmp_path / "run" / "logs").iterdir())) == 1


@pytest.mark.parametrize(("kernels", "imports_framework"), [(1, False), (2, False), (5, False), (1, True), (5, True)])
def test_users_kernels_and_what_judges_them_are_no_more_processes_than_processors(
    kernels: int, imports_framework: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.WorkerGroup, "imports_framework", property(lambda group: imports_framework))
    for module in (run, local, call):
        monkeypatch.setattr(module, "available_processors", lambda: 2)
    monkeypatch.setattr(local, "WINDOW_UNITS", 16)
    monkeypatch.setattr(local, "MIN_UNITS_FOR_PROCESSES", 0)
    monkeypatch.setattr(local, "MAX_TO_JUDGE", 4)  # so that what waits is judged in this process, too
    targets = []
    for number in range(kernels):
        (tmp_path / f"kernel{number}.py").write_text(source(), encoding="utf-8")
        targets.append(f"{tmp_path}/kernel{number}.py:attention")
    chosen = select_implementations(None, targets)
    before = set(psutil.Process().children(recursive=True))
    alive: set[psutil.Process] = set()
    most = 0
    make_process = call.WorkerProcess

    def counted() -> call.WorkerProcess:
        nonlocal most
        process = make_process()
        alive.update(set(psutil.Process().children(recursive=True)) - before)
        most = max(most, sum(other.is_running() and other.status() != psutil.STATUS_ZOMBIE for other in alive))
        return process

    for module in (call, runner):
        monkeypatch.setattr(module, "WorkerProcess", counted)
    cases = select_cases(["attention"]).cases
    limits = Limits(workers=4)  # so that of five kernels not all may have a worker for the whole run
    settings = Settings(tmp_path / "run", dtypes=("float32",), limits=limits, store=NO_STORE)
    summary = run_cases(cases, chosen, settings)
    assert summary.evaluations == kernels * len(cases)
    assert len(alive) >= 2
    assert most <= 2


# Who may compute next, and what is computed


SERVING = {"float64": 1, "bfloat16": 3}


def outcome(seed: int) -> Computed:
    stage = np.random.default_rng(seed).normal(size=(1, 1, 8, 8)).astype(numpy_dtype("bfloat16"))
    return Computed({"weights": stage}, padded="with nothing", seconds=0.5)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("held", [0, 200, 2**20])
def test_outcomes_come_back_wherever_they_waited(held: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if full:
        monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    failure = Failure("unsupported", "no such keyword", ("mask",))
    with closing(WaitingOutcomes(lambda unit: SERVING[unit.dtype], held)) as waiting:
        assert list(waiting.add(Unit(9, 9, "float64"), "a", outcome(1)) or ()) == ["a"], "one alone serves it"
        for position in range(4):
            unit = Unit(position, position, "bfloat16")
            assert waiting.add(unit, "a", outcome(position)) is None
            assert waiting.add(unit, "b", failure) is None
        for position in (2, 0, 3, 1):
            found = waiting.add(Unit(position, position, "bfloat16"), "c", outcome(9))
            assert found is not None
            assert list(found) == ["a", "b", "c"]
            first, second, third = found.values()
            assert isinstance(first, Computed)
            assert isinstance(third, Computed)
            assert second == failure
            assert (first.padded, first.seconds) == ("with nothing", 0.5)
            assert first.stages["weights"].dtype == numpy_dtype("bfloat16")
            np.testing.assert_array_equal(first.stages["weights"], outcome(position).stages["weights"])
        assert (waiting._file is None) == (full or held == 2**20)
        assert waiting._held == 0
