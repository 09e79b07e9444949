"""Whatever an implementation does to its process: one outcome with its reason, and the next evaluation is right."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import pytest

from attncheck.backends import BackendEntry
from attncheck.errors import OutputError
from attncheck.execution.implementation_selection import user_implementation
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.execution.runner import GroupRunner, group_by_process
from attncheck.execution.user_code import Target
from attncheck.execution.worker import Computed, Failure, Outcome, Task

PATH = Path(__file__).parents[3] / "benchmarks" / "faulty_attention.py"
BIT = 0.5
"""The scores that are right are full of this number; those at which a fault is injected, of its number above it."""

Runner = GroupRunner[Task]
MakeRunner = Callable[..., Runner]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="faults are injected as Linux has them")


def load_faulty() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faulty_attention", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


FAULTY = load_faulty()
KINDS = list(FAULTY.KINDS)


def softmax_of(number: float, size: int = 4) -> Task:
    return Task("softmax", {}, {"scores": np.full((1, 1, 1, size), number)})


def assert_right(outcome: Outcome, size: int = 4) -> None:
    assert isinstance(outcome, Computed), outcome
    np.testing.assert_allclose(outcome.stages["weights"], np.full((1, 1, 1, size), 1 / size), rtol=1e-15)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Plan each kind of fault at scores of its own."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    scores = {kind: softmax_of(number + 1.0).inputs["scores"] for number, kind in enumerate(KINDS)}
    path.write_text(json.dumps({FAULTY.fingerprint("softmax", (each,), {}): kind for kind, each in scores.items()}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULTY.PLAN_VARIABLE, str(path))
        yield path


@pytest.fixture(scope="module")
def outcomes(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Evaluate, for each kind, what is right, then what is hit, then what is right twice."""
    implementation = user_implementation(Target(str(PATH)), None)
    limits = Limits(case_seconds=6.0, hard_memory_limit=2**29, max_output=2**22)

    def run(number: int) -> list[Outcome]:
        folder = tmp_path_factory.mktemp("logs")
        (group,) = group_by_process(implementation, ["float64"])
        runner: Runner = GroupRunner(group, limits, folder)
        with closing(runner):
            return [runner.evaluate(softmax_of(each)) for each in (BIT, number + 1.0, BIT, BIT)]

    with ThreadPoolExecutor(4) as threads:
        return dict(zip(KINDS, threads.map(run, range(len(KINDS))), strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_a_fault_is_told_once_with_its_reason_and_harms_no_other_evaluation(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    kind = FAULTY.KINDS[name]
    before, hit, *after = outcomes[name]
    for outcome in (before, *after):
        assert_right(outcome)
    if kind.verdict == "agree":
        assert_right(hit)
        return
    assert isinstance(hit, Failure)
    assert (hit.verdict, kind.says in hit.message) == (kind.verdict, True), hit
    assert hit.message.isprintable()
    assert len(hit.message) <= 500


def test_nothing_that_a_worker_started_outlives_it(outcomes: dict[str, list[Outcome]], plan: Path) -> None:
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(FAULTY.PLAN_VARIABLE) == str(plan):
                left.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    assert len(outcomes) == len(KINDS)
    # multiprocessing's own helper is this process's child, and stays.
    assert [each for each in left if "multiprocessing.resource_tracker" not in each] == []


@pytest.fixture
def make_runner(make_backend: Callable[..., BackendEntry], tmp_path: Path) -> Iterator[MakeRunner]:
    """Return what makes a runner of a backend that does something before it is right."""
    made: list[Runner] = []

    def make(source: str, **limits: object) -> Runner:
        lines = "".join(f"    {line}\n" for line in source.splitlines())
        text = f"import os, signal, subprocess, sys, time\ndef softmax(scores):\n    size = scores.shape[-1]\n{lines}"
        entry = make_backend("tried", f"{text}    return numpy_backend.softmax(scores)")
        (group,) = group_by_process(Implementation(entry), ["float64"])
        (tmp_path / "logs").mkdir(exist_ok=True)
        made.append(GroupRunner(group, Limits(**limits), tmp_path / "logs"))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def log_of(runner: Runner, tmp_path: Path) -> Path:
    return tmp_path / "logs" / f"{runner.group.name}.txt"


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_worker_that_is_killed_between_two_evaluations_is_told_in_the_next_one_and_replaced(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    runner = make_runner(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))")
    assert_right(runner.evaluate(softmax_of(BIT)))
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    # Its parent can hear of it a moment later than it looks dead from outside: its other threads end, too.
    wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    told = "the worker process died with exit code -9 (SIGKILL) before it was asked"
    assert runner.evaluate(softmax_of(BIT)) == Failure("crash", told)
    assert_right(runner.evaluate(softmax_of(BIT)))
    assert int((tmp_path / "pid").read_text()) != pid


def test_a_worker_that_is_killed_while_it_evaluates_is_told_and_replaced(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    pids = tmp_path / "pid"
    runner = make_runner(f"if size == 3:\n    open({str(pids)!r}, 'w').write(f'{{os.getpid()}}.')\n    time.sleep(60)")

    def kill() -> None:
        wait_until(lambda: pids.is_file() and pids.read_text().endswith("."))
        os.kill(int(pids.read_text().strip(".")), signal.SIGKILL)

    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(kill)
        outcome = runner.evaluate(softmax_of(BIT, 3))
        killing.result()
    assert outcome == Failure("crash", "the worker process died with exit code -9 (SIGKILL)")
    assert_right(runner.evaluate(softmax_of(BIT)))


def test_a_worker_that_does_not_come_up_again_at_once_is_given_another_chance_but_not_for_ever(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    runner = make_runner("if size == 3:\n    os._exit(1)")
    module = Path(sys.path[0]) / "tried_backend.py"
    at_import = f"with open({str(starts)!r}, 'a+') as file:\n    print(file=file)\n    file.seek(0)\n"
    module.write_text(
        f"{at_import}    turn = len(file.read())\nif turn in (2, 4, 5, 6):\n    raise SystemExit\n{module.read_text()}"
    )
    assert_right(runner.evaluate(softmax_of(BIT)))
    dead = Failure("crash", "the worker process died with exit code 1")
    gone = Failure("error", "tried.eager cannot be started: SystemExit:")
    assert runner.evaluate(softmax_of(BIT, 3)) == dead
    assert runner.evaluate(softmax_of(BIT)) == gone
    assert_right(runner.evaluate(softmax_of(BIT)))
    assert runner.evaluate(softmax_of(BIT, 3)) == dead
    assert [runner.evaluate(softmax_of(BIT)) for _ in range(5)] == [gone] * 5
    assert len(starts.read_text()) == 6


def test_a_worker_that_stops_after_its_answer_keeps_nobody_waiting(make_runner: MakeRunner, tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    runner = make_runner(f"open({str(pids)!r}, 'w').write(str(os.getpid()))", case_seconds=1.0)
    assert_right(runner.evaluate(softmax_of(BIT)))
    os.kill(int(pids.read_text()), signal.SIGSTOP)
    large = 2**18  # does not fit into the pipe: whoever sends it waits
    assert runner.evaluate(softmax_of(BIT, large)) == Failure("timeout", "not done after 1 s; the worker was stopped")
    assert_right(runner.evaluate(softmax_of(BIT)))


def test_an_answer_that_breaks_off_in_the_middle_is_none(make_runner: MakeRunner) -> None:
    # A thread ends the process while its answer, of more than a pipe holds, is on its way.
    source = (
        "if size > 4:\n    import multiprocessing.connection as connection\n    send = connection.Connection._send\n"
        "    connection.Connection._send = lambda self, data, *more: (send(self, data[:9999]), os._exit(5))"
    )
    runner = make_runner(source)
    outcome = runner.evaluate(softmax_of(BIT, 2**16))
    assert outcome == Failure("crash", "the worker process died with exit code 5")
    assert_right(runner.evaluate(softmax_of(BIT)))


def test_a_forked_child_that_comes_back_does_not_answer(make_runner: MakeRunner) -> None:
    runner = make_runner("if size == 3:\n    os.fork()")
    for size in (3, 4, 4, 3, 4):
        assert_right(runner.evaluate(softmax_of(BIT, size)), size)


def test_last_words_are_those_of_the_evaluation(make_runner: MakeRunner) -> None:
    runner = make_runner("if size == 3:\n    print('old words')\nif size == 2:\n    os._exit(1)")
    assert_right(runner.evaluate(softmax_of(BIT, 3)), 3)
    assert runner.evaluate(softmax_of(BIT, 2)) == Failure("crash", "the worker process died with exit code 1")


def test_a_timeout_tells_what_was_printed_last(make_runner: MakeRunner) -> None:
    runner = make_runner("print('one\\n\\ntwo\\nthree\\n\\x1b[1mfour')\ntime.sleep(60)", case_seconds=0.5)
    told = "not done after 0.5 s; the worker was stopped; its last lines: two | three | four"
    assert runner.evaluate(softmax_of(BIT)) == Failure("timeout", told)


def test_what_many_evaluations_print_is_cut_and_stops_none(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner("print('x' * 40_000)\ntime.sleep(0.25 * (size == 3))", max_output=2**16)
    for size in (4, 4, 4, 3, 4, 4, 4, 3):
        assert_right(runner.evaluate(softmax_of(BIT, size)), size)
    assert log_of(runner, tmp_path).stat().st_size < 2**16 + 2 * 40_001
    assert "[what was printed before is left out]" in log_of(runner, tmp_path).read_text()


def test_children_end_with_their_worker_when_it_is_closed(make_runner: MakeRunner, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    source = f"child = subprocess.Popen(['sleep', '600'])\nopen({str(pids)!r}, 'w').write(str(child.pid))"
    runner = make_runner(source)
    assert_right(runner.evaluate(softmax_of(BIT)))
    child = int(pids.read_text())
    assert not has_ended(child)
    runner.close()
    wait_until(lambda: has_ended(child))


def test_a_log_that_cannot_be_written_is_no_fault_of_the_implementation(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    runner = make_runner("pass")
    shutil.rmtree(tmp_path / "logs")
    with pytest.raises(OutputError, match=r"logs/tried\.eager-float64\.txt cannot be written: No such file"):
        runner.evaluate(softmax_of(BIT))


def test_a_disk_that_is_full_is_no_fault_of_the_implementation(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner("if size == 3:\n    raise OSError(28, 'No space left on device')")
    assert isinstance(runner.evaluate(softmax_of(BIT, 3)), Failure)
    free = shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert_right(runner.evaluate(softmax_of(BIT)))
    with pytest.raises(OutputError, match=r"txt cannot be written: No space left on device; free some space"):
        runner.evaluate(softmax_of(BIT, 3))
