"""Workers and judging processes on this machine: how many there are, what each does, and the same results."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest
from processes import wait_until

from attncheck import run
from attncheck.backends import BACKENDS, BackendEntry, numpy_backend
from attncheck.dtypes import numpy_dtype
from attncheck.execution.call import Limits, WorkerDied
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import Implementation, ImplementationSelection, bundled_implementations
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on
from attncheck.executors import local
from attncheck.executors.local import CHUNK, MIN_UNITS, JudgingProcesses, PrioritySemaphore, SharedWork, WaitingOutcomes
from attncheck.judging.units import Judge, Remembered, UnitResult
from attncheck.plan import Unit
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.results.reader import read_arrays, read_run
from attncheck.run import Settings, run_cases
from attncheck.store import NO_STORE, Store

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
    monkeypatch.setattr(local, "WINDOW", window)
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

    def judge(
        self, case: Case, dtype: str, inputs: Inputs, collected: Mapping[str, Outcome], found: Remembered | None = None
    ) -> UnitResult:
        if os.getpid() != HARNESS:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().judge(case, dtype, inputs, collected, found)


@dataclass(frozen=True)
class FailingJudge(Judge):
    """Has a fault."""

    def judge(
        self, case: Case, dtype: str, inputs: Inputs, collected: Mapping[str, Outcome], found: Remembered | None = None
    ) -> UnitResult:
        raise ZeroDivisionError(f"a fault of ours in {case.id}")


Asked = tuple[Case, str, Inputs, dict[str, Outcome]]


@pytest.fixture(scope="module")
def questions() -> list[Asked]:
    found = []
    for case in select_cases(["masking/*"]).cases[:6]:
        inputs = convert_inputs(case, make_exact_inputs(case), case.dtypes[0])
        found.append((case, case.dtypes[0], inputs, {"numpy.eager": evaluate_on(numpy_backend, task_of(case, inputs))}))
    return found


def judging(judge: Judge, questions: list[Asked]) -> closing[JudgingProcesses]:
    return closing(JudgingProcesses(judge, [case for case, *_ in questions], 2))


@pytest.mark.parametrize("kind", [Judge, DyingJudge])
def test_judging_elsewhere_or_after_a_death_is_judging_here(kind: type[Judge], questions: list[Asked]) -> None:
    with judging(kind((NUMPY,)), questions) as processes:
        futures = [processes.submit(number, *question[1:]) for number, question in enumerate(questions)]
        for question, future in zip(questions, futures, strict=True):
            assert future.result()[0].rows == Judge((NUMPY,)).judge(*question).rows


def test_a_fault_of_ours_shows_as_it_would_here(questions: list[Asked]) -> None:
    with judging(FailingJudge((NUMPY,)), questions) as processes:
        with pytest.raises(ZeroDivisionError, match=r"a fault of ours in masking/") as raised:
            processes.submit(0, *questions[0][1:]).result()
        assert raised.traceback[-1].name == "judge"


def test_what_the_store_did_is_counted(questions: list[Asked], tmp_path: Path) -> None:
    with judging(Judge((NUMPY,), store=Store(tmp_path)), questions[:1]) as processes:
        counts = [processes.submit(0, *questions[0][1:]).result()[1] for _ in range(2)]
    assert counts[0]["kept"] == counts[0]["missing"] > 0
    assert counts[1] == {"found": 1}


def test_processes_that_are_closed_while_they_start_are_ended(questions: list[Asked]) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with judging(Judge((NUMPY,)), questions) as processes:
        futures = [processes.submit(number, *question[1:]) for number, question in enumerate(questions)]
    assert all(future.cancelled() or isinstance(future.exception(), WorkerDied) for future in futures)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if child.is_running() and "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Gets an entry whenever judging processes are begun."""
    begun: list[None] = []

    def begin(*given: Any, **named: Any) -> JudgingProcesses:
        begun.append(None)
        return JudgingProcesses(*given, **named)

    monkeypatch.setattr(local, "JudgingProcesses", begin)
    return begun


def contents(folder: Path) -> tuple[Any, ...]:
    rows = read_run(folder).rows.drop(columns="seconds")
    arrays = {key: (array.dtype, array.shape, array.tobytes()) for key, array in read_arrays(folder).items()}
    return sorted(map(str, rows.to_dict("records"))), arrays


def test_documents_judged_before_have_their_arrays_put_together(started: list[None], tmp_path: Path) -> None:
    cases = select_cases(["documents/*", "scoring"]).cases
    chosen = bundled_implementations(["numpy"])

    def run(name: str, store: Store) -> int:
        before = len(started)
        run_cases(cases, chosen, Settings(tmp_path / name, dtypes=("float64",), store=store))
        return len(started) - before

    assert len(cases) >= MIN_UNITS
    assert run("plain", NO_STORE) == 1
    assert run("first", Store(tmp_path / "store")) == 1
    assert run("again", Store(tmp_path / "store")) == 0
    assert contents(tmp_path / "plain") == contents(tmp_path / "first") == contents(tmp_path / "again")
    assert contents(tmp_path / "plain")[1]


class _Counted(JudgingProcesses):
    """Remembers how many units ever waited for judging processes at once, each with those before it."""

    most = 0

    def submit(self, *question: Any) -> Future[Any]:
        waiting = self._threads._work_queue.qsize() + 1
        _Counted.most = max(_Counted.most, waiting)
        return super().submit(*question)


def test_computing_waits_for_judging_and_comes_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = select_cases(["softmax", "masking", "scoring"]).cases
    chosen = bundled_implementations(["numpy"])
    settings = Settings(tmp_path / "freely", store=NO_STORE)
    run_cases(cases, chosen, settings)
    monkeypatch.setattr(local, "JudgingProcesses", _Counted)
    monkeypatch.setattr(local, "MAX_ANSWERS", 1)
    monkeypatch.setattr(local, "MAX_TO_JUDGE", 3)
    run_cases(cases, chosen, replace(settings, output=tmp_path / "in step"))
    assert 0 < _Counted.most <= 3
    assert contents(tmp_path / "freely") == contents(tmp_path / "in step")


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
        monkeypatch.setattr(module, "available_processors", lambda: 3)
    monkeypatch.setattr(local, "MIN_SECONDS_LEFT", 0.0)
    monkeypatch.setattr(local, "_BETWEEN_LOOKS", 0.001)
    monkeypatch.setattr(local, "CHUNK", 2)
    shared = run_cases(cases, chosen, Settings(tmp_path / "shared", limits=Limits(workers=3), store=NO_STORE))
    assert alone == shared
    assert contents(tmp_path / "alone") == contents(tmp_path / "shared")
    assert {path.name for path in (tmp_path / "alone" / "logs").iterdir()} == {"numpy.eager-float32-float64.txt"}
    several = {path.name for path in (tmp_path / "shared" / "logs").iterdir()}
    assert {"numpy.eager-float32-float64.txt", "numpy.eager-float32-float64-2.txt"} <= several


def test_ones_own_kernel_has_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("def attention(query, key, value):\n    return query\n", encoding="utf-8")
    chosen = select_implementations(None, [f"{kernel}:attention"])
    monkeypatch.setattr(local, "MIN_SECONDS_LEFT", 0.0)
    run_cases(
        select_cases(["attention"]).cases, chosen, Settings(tmp_path / "run", limits=Limits(workers=3), store=NO_STORE)
    )
    assert len(list((tmp_path / "run" / "logs").iterdir())) == 1


@pytest.mark.parametrize("places", [1, 3])
def test_no_more_than_the_places_are_taken_and_all_come_through(places: int) -> None:
    turns, inside, most = PrioritySemaphore(places), list[int](), list[int]()

    def work(steps: int) -> None:
        for step in range(steps):
            with turns.acquire(step):
                inside.append(step)
                most.append(len(inside))
                inside.pop()

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(work, 50) for _ in range(8)]:
            future.result(timeout=30)
    assert len(most) == 8 * 50
    assert max(most) <= places


def test_whoever_is_furthest_behind_is_next() -> None:
    turns, order, held, everyone = PrioritySemaphore(1), [], Event(), Event()

    def hold() -> None:
        with turns.acquire(0):
            held.set()
            everyone.wait(10)

    def queue(done: int) -> None:
        with turns.acquire(done):
            order.append(done)

    with ThreadPoolExecutor(5) as threads:
        threads.submit(hold)
        held.wait(10)
        futures = [threads.submit(queue, done) for done in (7, 3, 9, 1)]
        try:
            wait_until(lambda: len(turns._waiting) == 4)
        finally:
            everyone.set()
        for future in futures:
            future.result(timeout=10)
    assert order == [1, 3, 7, 9]


def test_a_spare_place_is_one_that_nobody_waits_for() -> None:
    places = PrioritySemaphore(1)
    with pytest.raises(ValueError, match="oops"), places.acquire(0):
        raise ValueError("oops")
    with places.spare(lambda: True) as has_place:
        assert has_place, "it is free again after an exception"
        with places.spare(lambda: False) as has_another:
            assert not has_another
    with places.acquire(0):
        answers = iter([True, True, False])
        with places.spare(lambda: next(answers)) as has_place:  # it is wanted twice, and there is none
            assert not has_place
    with places.spare(lambda: True) as has_place:
        assert has_place


def test_no_place_is_spare_while_as_many_are_taken_as_there_are_processors() -> None:
    places = PrioritySemaphore(3, busy=2)
    with places.spare(lambda: True) as has_place:
        assert has_place
    with places.acquire(0), places.acquire(0):
        answers = iter([True, False])
        with places.spare(lambda: next(answers)) as has_place:
            assert not has_place
        with places.acquire(0):
            pass


def test_whoever_waits_comes_before_whoever_takes_what_is_spare() -> None:
    places, order = PrioritySemaphore(1), []
    begun = Event()

    def wait() -> None:
        begun.set()
        with places.acquire(5):
            order.append("waited")

    def help_out() -> None:
        with places.spare(lambda: True):
            order.append("spare")

    with places.acquire(0):
        waiting, helping = Thread(target=wait), Thread(target=help_out)
        waiting.start()
        begun.wait(10)
        wait_until(lambda: places.is_awaited)
        helping.start()
    waiting.join(10)
    helping.join(10)
    assert order == ["waited", "spare"]


def units(number: int) -> list[Unit]:
    return [Unit(position, position, "float64") for position in range(number)]


def test_every_unit_is_taken_once_in_order() -> None:
    assert SharedWork([]).is_done
    work, taken = SharedWork(units(10)), []
    assert not work.is_done
    while not work.is_done:
        taken += work.take(3)
    assert [unit.position for unit in taken] == list(range(10))
    assert not work.take(3)


def test_the_rest_is_long_where_it_would_take_long_at_the_speed_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(local, "perf_counter", lambda: now[0])
    for taken, seconds, is_long in (
        (1, 100.0, False),  # the first chunk is still computed: nothing is known of the speed
        (2, 0.1, False),
        (2, 100.0, True),
        (9, 100.0, False),  # one chunk is left, which another worker would not get done any sooner
    ):
        work = SharedWork(units(10 * CHUNK))
        for _ in range(taken):
            work.take(CHUNK)
        now[0] += seconds
        assert work.is_long is is_long


SERVING = {"float64": 1, "bfloat16": 3}


def outcome(seed: int) -> Computed:
    stage = np.random.default_rng(seed).normal(size=(1, 1, 8, 8)).astype(numpy_dtype("bfloat16"))
    return Computed({"weights": stage}, padded="with nothing", seconds=0.5)


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("held", [0, 200, 2**20])
def test_outcomes_come_back_wherever_they_waited(held: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if full:
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
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
