"""Worker processes: called, handed over, shared by the modes of a framework, and given up where all of them end."""

from __future__ import annotations

import operator
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernels import kernel as source
from processes import PATIENCE, has_ended, wait_until
from tables import tables_beside

from attncheck.backends import BackendEntry, Mode
from attncheck.common.errors import ExitCode
from attncheck.execution import runner as module
from attncheck.execution.call import (
    CallCancelled,
    CallTimeout,
    Limits,
    RemoteError,
    WorkerDied,
    WorkerProcess,
    WorkerProcesses,
    kill_orphans,
    start_workers_ahead,
)
from attncheck.execution.describing import DescribedWorkers, DescriptionRequest
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.runner import MAX_EQUAL_CRASHES, CrashStreak, GroupRunner, group_by_process, group_runners
from attncheck.execution.user_code import Target
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.reading.problem import Problem
from attncheck.results.reader import read_run

RunnersOf = Callable[..., list[list[GroupRunner[str]]]]
Invoke = Callable[..., tuple[int, str, str]]
forked = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    made = WorkerProcess()
    yield made
    made.kill()


def test_one_process_answers_one_call_after_the_other(worker: WorkerProcess) -> None:
    for function, arguments, message in (
        (operator.truediv, (1, 0), "ZeroDivisionError: division by zero"),
        (sys.exit, (3,), "SystemExit: 3"),
        (threading.Lock, (), "what it returned cannot be sent: TypeError"),
    ):
        assert worker.call(os.getpid, seconds=PATIENCE) == worker.pid != os.getpid()
        with pytest.raises(RemoteError, match=f"^{message}$"):
            worker.call(function, *arguments, seconds=PATIENCE)
    with pytest.raises(TypeError, match="cannot pickle"):
        worker.call(operator.is_, threading.Lock(), None, seconds=PATIENCE)
    assert worker.call(operator.mul, b"x", 2**22, seconds=PATIENCE) == b"x" * 2**22


@forked
def test_processes_that_were_started_ahead_are_taken_and_have_one_thread_each() -> None:
    start_workers_ahead(1, "colorsys")
    told = "'colorsys' in __import__('sys').modules, __import__('os').getenv('OPENBLAS_NUM_THREADS')"
    with closing(WorkerProcesses(processes=1)) as processes:
        assert processes.submit(eval, told).result() == (True, "1")


def test_a_call_ends_when_its_time_is_up_or_somebody_ends_it(worker: WorkerProcess) -> None:
    threading.Timer(0.2, worker.kill).start()
    with pytest.raises(WorkerDied):
        worker.call(time.sleep, 60, seconds=PATIENCE)
    with pytest.raises(WorkerDied, match="before it was asked"):
        worker.call(os.getpid, seconds=PATIENCE)
    assert has_ended(worker.pid)
    with pytest.raises(CallCancelled, match=r"^enough$"):
        WorkerProcess().call(time.sleep, 60, seconds=PATIENCE, cancel_reason=lambda: "enough")
    with pytest.raises(CallTimeout):
        WorkerProcess().call(time.sleep, 60, seconds=0.3)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are taken along as Linux has it")
def test_what_a_killed_harness_left_is_ended_by_the_next(tmp_path: Path, worker: WorkerProcess) -> None:
    own = worker.call(os.spawnlp, os.P_NOWAIT, "sleep", "sleep", "600", seconds=PATIENCE)
    with subprocess.Popen([sys.executable, Path(__file__).with_name("left_behind.py")], cwd=tmp_path) as harness:
        wait_until((tmp_path / "pids").is_file)
        theirs, child = map(int, (tmp_path / "pids").read_text().split())
        kill_orphans()
        assert not has_ended(child)  # its harness lives
        harness.send_signal(signal.SIGKILL)
    wait_until(lambda: has_ended(theirs))
    kill_orphans()  # or a harness beside this test, which may have been quicker
    wait_until(lambda: has_ended(child))
    assert not has_ended(own)
    worker.kill()
    assert has_ended(own)


# A process that has loaded a kernel goes on as its worker

TEXTS = tables_beside(__file__)["workers"]
CASE = "attention/logits-of-eighty-leave-almost-all-weight-on-one-key"


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """Write kernel.py, which notes the processes that load it and that call it."""
    path = tmp_path / "kernel.py"
    path.write_text(
        source(first='note("called")', before=TEXTS["noting"].format(folder=str(tmp_path))), encoding="utf-8"
    )
    return path


def noted(folder: Path, what: str) -> list[list[str]]:
    return [line.split() for line in (folder / what).read_text().splitlines()]


@forked
def test_a_check_loads_a_kernel_once_and_logs_what_it_prints(kernel: Path, invoke: Invoke, tmp_path: Path) -> None:
    command = ("check", CASE, "-i", f"{kernel}:attention")
    code, _, err = invoke(*command, "--threads", "2", "-q", "--no-report")
    assert (code, err) == (0, "")
    ((pid, threads),) = noted(tmp_path, "loaded")
    assert (threads, {each for each, _ in noted(tmp_path, "called")}) == ("2", {pid})
    wait_until(lambda: has_ended(int(pid)))
    (log,) = (tmp_path / "results" / "latest" / "logs").iterdir()
    assert log.read_text() == "hello from the top\n"
    kernel.write_text("import os\nos.kill(os.getpid(), 9)\nattention = None\n", encoding="utf-8")
    code, out, err = invoke(*command)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "its process died with exit code -9 (SIGKILL)" in err


def described(workers: DescribedWorkers, kernel: Path) -> UserImplementation:
    (found,) = select_implementations(None, [f"{kernel}:attention"], described=workers).implementations
    assert isinstance(found.entry, UserImplementation)
    return found.entry


@forked
def test_a_process_is_handed_over_once_and_to_nobody_who_prepares_it_otherwise(kernel: Path, tmp_path: Path) -> None:
    with DescribedWorkers() as workers:
        entry = described(workers, kernel)
        worker = workers.take_worker(entry, threads=1)
        assert worker is not None
        assert worker.pid == int(noted(tmp_path, "loaded")[0][0])
        assert workers.take_worker(entry, threads=1) is None
    assert worker.is_alive
    worker.kill()
    for threads, variables in ((2, {}), (1, {"SOME_FLAG": "1"})):
        with DescribedWorkers() as workers:
            assert workers.take_worker(replace(described(workers, kernel), environment=variables), threads) is None
    with DescribedWorkers() as workers:
        described(workers, kernel)  # nobody takes it
    wait_until(lambda: all(has_ended(int(pid)) for pid, _ in noted(tmp_path, "loaded")))


@forked
def test_more_functions_than_processors_are_described_by_as_many_processes_and_those_of_a_file_by_one(
    kernel: Path, tmp_path: Path
) -> None:
    with kernel.open("a", encoding="utf-8") as file:
        file.writelines(f"def f{number}(query, key, value): ...\n" for number in range(3))
    other = tmp_path / "other.py"
    other.write_text("import os\ndef attention(query, key, value): ...\nos._exit(3)\n", encoding="utf-8")
    requests = [DescriptionRequest(Target.parse(f"{kernel}:f{number}")) for number in range(3)]
    with DescribedWorkers(processes=1) as workers:
        workers.start_loading(*requests, DescriptionRequest(Target.parse(f"{other}:attention")))
        answers = [workers.wait_for_declarations(request) for request in requests]
        assert all(isinstance(answer, dict) for answer in answers)
        with pytest.raises(WorkerDied, match="exit code 3"):
            workers.wait_for_declarations(DescriptionRequest(Target.parse(f"{other}:attention")))
        assert workers.has_failed
    pids = {pid for pid, _ in noted(tmp_path, "loaded")}
    assert len(pids) == 1
    wait_until(lambda: all(has_ended(int(pid)) for pid in pids))


def test_loading_begins_without_waiting_and_an_end_in_between_leaves_nothing(tmp_path: Path) -> None:
    path, begun = tmp_path / "kernel.py", tmp_path / "begun"
    path.write_text(f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    with DescribedWorkers() as workers:
        workers.start_loading(DescriptionRequest(Target.parse(str(path))))
        wait_until(lambda: begun.is_file() and bool(begun.read_text()))
    wait_until(lambda: has_ended(int(begun.read_text())))


# Modes of a framework in one process


def problem(number: float = 1.0) -> Problem:
    return Problem("softmax", {}, {"scores": np.full((1, 1, 1, 2), number)})


@pytest.fixture
def runners_of(
    tmp_path: Path, make_backend: Callable[..., BackendEntry], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunnersOf]:
    """Return what makes runners of a framework whose modes do what is said of each before they are right."""
    made: list[list[GroupRunner[str]]] = []

    def make(*actions: str, bundled: bool = True, own_process: bool = False) -> list[list[GroupRunner[str]]]:
        modules = {
            f"mode{number}": make_backend(
                f"mode{number}", TEXTS["loud"].format(name=f"mode{number}", action=action)
            ).module
            for number, action in enumerate(actions)
        }
        modes = tuple(Mode(name, file, "for tests", own_process=own_process) for name, file in modules.items())
        entry = BackendEntry("some", "attncheck.backends.numpy_backend", ("numpy",), modes=modes)
        monkeypatch.setattr(module, "ALL_ENTRIES", {"some": entry} if bundled else {})
        groups = [group for name in modules for group in group_by_process(Implementation(entry, name), ["float64"])]
        made.extend(group_runners(groups, Limits(case_seconds=20.0), tmp_path))
        return made

    yield make
    for together in made:
        for runner in together:
            runner.close()


def pids(runner: GroupRunner[str], folder: Path) -> list[int]:
    log = (folder / f"{runner.group.name}.txt").read_text(encoding="utf-8")
    found = re.findall(r"^(mode[0-9]) in ([0-9]+)$", log, re.MULTILINE)
    assert {mode for mode, _ in found} == {runner.group.implementation.mode}
    return [int(pid) for _, pid in found]


def assert_right(*runners: GroupRunner[str]) -> None:
    for runner in runners:
        outcome = runner.evaluate(problem())
        assert isinstance(outcome, Computed), outcome
        assert (outcome.stages["weights"] == 0.5).all()


@forked
def test_modes_share_one_process_and_each_prints_to_its_own_log(runners_of: RunnersOf, tmp_path: Path) -> None:
    ((first, second),) = runners_of("pass", "pass")
    assert_right(first, second, first)
    assert len(set(pids(first, tmp_path) + pids(second, tmp_path))) == 1
    assert (len(pids(first, tmp_path)), len(pids(second, tmp_path))) == (2, 1)
    assert first.description["version"] == np.__version__
    second.stop()
    assert has_ended(pids(first, tmp_path)[0])


@forked
@pytest.mark.parametrize(
    ("action", "how"), [("pass", {"own_process": True}), ("pass", {"bundled": False}), (TEXTS["refusing"], {})]
)
def test_what_has_a_process_of_its_own(
    action: str, how: dict[str, bool], runners_of: RunnersOf, tmp_path: Path
) -> None:
    """A mode that asks for one, an implementation of somebody's own, and a mode that cannot start beside others."""
    first, second = [runner for together in runners_of("pass", action, **how) for runner in together]
    assert_right(first, second)
    assert pids(first, tmp_path) != pids(second, tmp_path)


@forked
def test_a_mode_is_not_blamed_for_what_another_did_to_the_process(runners_of: RunnersOf, tmp_path: Path) -> None:
    dies = "os.abort() if hasattr(sys, 'harmed') or scores.max() == 2 else None"
    ((harmful, harmed),) = runners_of("sys.harmed = True", dies)
    assert_right(harmful, harmed, harmful, harmed)
    died, alone, again = pids(harmed, tmp_path)
    assert alone == again != died == pids(harmful, tmp_path)[0]
    outcome = harmed.evaluate(problem(2.0))  # what ends its process alone, too, is a crash
    assert isinstance(outcome, Failure)
    assert (outcome.verdict, "SIGABRT" in outcome.message) == ("crash", True)
    assert_right(harmed, harmful)
    assert pids(harmed, tmp_path)[-1] not in (died, alone)


# What ends its process in every call is not asked for ever

CRASH, TIMEOUT = Failure("crash", "died"), Failure("timeout", "not done after 2 s")
UNSUPPORTED, ERROR, DONE = Failure("unsupported", "takes no mask"), Failure("error", "raised"), Computed({})


def is_given_up(outcomes: list[Outcome], *, keep_going: bool = False) -> bool:
    limit = CrashStreak(keep_going)
    for outcome in outcomes:
        assert limit.skipped_failure() is None
        limit.record_outcome(outcome, outcome.message if isinstance(outcome, Failure) else "")
    if (found := limit.skipped_failure()) is not None:
        assert found.verdict == "untried"
        assert "the 10 evaluations before ended the same way (crash: died); --keep-going tries all" in found.message
    return found is not None


def test_ten_equal_ends_in_a_row_are_enough() -> None:
    assert MAX_EQUAL_CRASHES == 10
    assert [is_given_up([CRASH] * count) for count in (9, 10)] == [False, True]
    for other in (DONE, ERROR, TIMEOUT):  # anything else begins the count anew
        assert [is_given_up([*[CRASH] * 9, other, *[CRASH] * count]) for count in (9, 10)] == [False, True]
    unsupported = [*[CRASH] * 5, UNSUPPORTED, UNSUPPORTED]  # says nothing either way
    assert [is_given_up([*unsupported, *[CRASH] * count]) for count in (4, 5)] == [False, True]
    assert not is_given_up([Failure("crash", f"died with exit code {number}") for number in range(30)])
    assert not is_given_up([CRASH] * 50, keep_going=True)


@forked
def test_the_rest_is_untried_until_a_run_goes_on_and_a_known_end_excuses_it(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_EQUAL_CRASHES", 3)
    (tmp_path / "picky.py").write_text(TEXTS["picky"], encoding="utf-8")
    entry = "- {implementation: picky.*, cases: ['own/*'], verdict: crash, decided: crash, reason: it dies of it}\n"
    (tmp_path / "known.yaml").write_text(entry, encoding="utf-8")

    def check(scaled: str, *words: str) -> tuple[int, str, list[str]]:
        """Check cases a to g, of which some have a scale, on what dies without; return its verdicts."""
        case, scale = (
            "  - name: Case {}\n    inputs: {{query: some, key: some, value: some}}\n",
            "    options: {scale: 0.3}\n",
        )
        lines = [case.format(name) + scale * (name in scaled) for name in "abcdefg"]
        (tmp_path / "own.yaml").write_text(TEXTS["cases"] + "".join(lines), encoding="utf-8")
        command = ("check", "own.yaml", "-i", "picky.py:attention,numpy", "--output", "out", "--no-report")
        code, out, _ = invoke(*command, *words)
        rows = read_run(tmp_path / "out").rows
        rows = rows[(rows["comparison"] == "stage") & rows["stage"].isin(["", "output"])].sort_values("case")
        assert not rows.duplicated(["case", "implementation"]).any()
        assert list(rows[rows["implementation"] == "numpy.eager"]["verdict"]) == ["agree"] * 7
        return code, out, list(rows[rows["implementation"] == "picky.attention"]["verdict"])

    stopped = ["crash"] * 3 + ["untried"] * 4
    code, out, verdicts = check("")
    assert (code, verdicts) == (ExitCode.NOT_RUN, stopped)
    assert "untried: 4 cases [float64], the first own/case-d, picky.attention: not tried: the 3 eval" in out
    assert check("", "--resume")[::2] == (ExitCode.NOT_RUN, stopped)
    assert check("", "--resume", "--keep-going")[::2] == (ExitCode.NOT_RUN, ["crash"] * 7)
    code, out, verdicts = check("a", "--expected-failures", "known.yaml")  # a is judged: otherwise nothing is
    assert (code, verdicts) == (ExitCode.AGREE, ["agree"] + ["crash"] * 3 + ["untried"] * 3), out


def test_a_worker_sets_its_threads_before_anything_imports_numpy() -> None:
    code = "import sys, attncheck.execution.describing, attncheck.execution.worker; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
