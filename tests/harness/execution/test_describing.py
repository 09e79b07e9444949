"""An own implementation is loaded once: the process that describes it goes on as a worker of the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import psutil
import pytest

from attncheck.execution.describing import DescribedWorkers, Question
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.limits import Limits
from attncheck.execution.runner import Group, GroupRunner
from attncheck.execution.user_code import Target, UserImplementation
from attncheck.execution.worker import Computed, Failure, Task

Invoke = Callable[..., tuple[int, str, str]]
KERNEL = """
import os
from pathlib import Path
import numpy as np

def note(what):
    with Path({folder!r}, what).open("a") as file:
        file.write(f"{{os.getpid()}} {{os.environ['OMP_NUM_THREADS']}}\\n")

note("loaded")
print("hello from the top")

def attention(query, key, value):
    note("called")
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
CASE = "attention/logits-of-eighty-leave-almost-all-weight-on-one-key"
ONE = np.ones((1, 1, 2, 4), dtype=np.float32)
TASK = Task("attention", {}, {"query": ONE, "key": ONE, "value": ONE})


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """Write kernel.py, which notes the processes that load it and that call it."""
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.format(folder=str(tmp_path)), encoding="utf-8")
    return path


def noted(folder: Path, what: str) -> list[list[str]]:
    return [line.split() for line in (folder / what).read_text().splitlines()]


def is_gone(pid: int) -> bool:
    """Wait until a process has ended with all of its threads: its parent is not told before."""
    deadline = monotonic() + 20
    while psutil.pid_exists(pid) and not (
        psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and len(list(Path(f"/proc/{pid}/task").glob("*"))) <= 1
    ):
        if monotonic() > deadline:
            return False
        sleep(0.05)
    return True


def test_a_check_loads_a_kernel_once_and_calls_it_in_the_same_process(
    kernel: Path, invoke: Invoke, tmp_path: Path
) -> None:
    code, _, err = invoke("check", CASE, "-i", f"{kernel}:attention", "--threads", "2", "-q")
    assert (code, err) == (0, "")
    ((pid, threads),) = noted(tmp_path, "loaded")
    assert threads == "2"
    called = noted(tmp_path, "called")
    assert called
    assert {each for each, _ in called} == {pid}
    assert is_gone(int(pid))


def test_what_a_kernel_prints_as_it_is_loaded_stands_in_the_log_of_the_run_once(
    kernel: Path, invoke: Invoke, tmp_path: Path
) -> None:
    assert invoke("check", CASE, "-i", f"{kernel}:attention", "-q")[0] == 0
    (log,) = (tmp_path / "results" / "latest" / "logs").iterdir()
    assert log.read_text() == "hello from the top\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("os.kill(os.getpid(), 9)", "its process died with exit code -9 (SIGKILL)"),
        ("os._exit(5)", "its process died with exit code 5"),
        ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
        ("def broken(:", "cannot be loaded: SyntaxError"),
    ],
)
def test_a_kernel_that_ends_its_process_as_it_is_loaded_is_a_message(
    line: str, message: str, kernel: Path, invoke: Invoke
) -> None:
    kernel.write_text(f"import os\n{line}\n", encoding="utf-8")
    code, out, err = invoke("check", CASE, "-i", f"{kernel}:attention")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def described(workers: DescribedWorkers, kernel: Path) -> UserImplementation:
    (found,) = select_implementations(None, [f"{kernel}:attention"], described=workers).implementations
    assert isinstance(found.entry, UserImplementation)
    return found.entry


def test_a_process_is_handed_over_once_and_ended_where_nobody_takes_it(kernel: Path, tmp_path: Path) -> None:
    with DescribedWorkers() as workers:
        entry = described(workers, kernel)
        ((pid, _),) = noted(tmp_path, "loaded")
        worker = workers.take(entry, threads=1)
        assert worker is not None
        assert worker.pid == int(pid)
        assert workers.take(entry, threads=1) is None
    assert worker.is_alive
    worker.end()
    with DescribedWorkers() as workers:
        described(workers, kernel)
    assert is_gone(int(noted(tmp_path, "loaded")[1][0]))


@pytest.mark.parametrize(("threads", "variables"), [(2, {}), (1, {"SOME_FLAG": "1"})])
def test_a_process_that_was_prepared_otherwise_is_not_taken_and_ends(
    threads: int, variables: dict[str, str], kernel: Path, tmp_path: Path
) -> None:
    with DescribedWorkers() as workers:
        entry = replace(described(workers, kernel), environment=variables)
        assert workers.take(entry, threads) is None
        assert is_gone(int(noted(tmp_path, "loaded")[0][0]))


def test_of_a_process_that_was_killed_meanwhile_a_run_starts_another(kernel: Path, tmp_path: Path) -> None:
    with DescribedWorkers() as workers:
        (found,) = select_implementations(None, [f"{kernel}:attention"], described=workers).implementations
        killed = int(noted(tmp_path, "loaded")[0][0])
        os.kill(killed, signal.SIGKILL)
        assert is_gone(killed)
        runner: GroupRunner[str] = GroupRunner(Group(found, ("float32",)), Limits(), tmp_path, described=workers)
        outcome = runner.evaluate(TASK)
        runner.close()
    assert isinstance(outcome, Computed)
    assert len(noted(tmp_path, "loaded")) == 2


def test_a_worker_that_follows_the_first_is_loaded_anew(kernel: Path, tmp_path: Path) -> None:
    text = kernel.read_text().replace('    note("called")\n', "    os._exit(7)\n")
    kernel.write_text(text, encoding="utf-8")
    with DescribedWorkers() as workers:
        (found,) = select_implementations(None, [f"{kernel}:attention"], described=workers).implementations
        runner: GroupRunner[str] = GroupRunner(Group(found, ("float32",)), Limits(), tmp_path, described=workers)
        outcomes = [runner.evaluate(TASK), runner.evaluate(TASK)]
        runner.close()
    assert all(isinstance(each, Failure) and each.verdict == "crash" for each in outcomes)
    assert len({pid for pid, _ in noted(tmp_path, "loaded")}) == 2


def test_loading_begins_without_waiting_and_an_end_in_between_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    begun = tmp_path / "begun"
    path.write_text(
        f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    with DescribedWorkers() as workers:
        workers.begin(Question(Target.of(str(path))))
        while not begun.is_file() or not begun.read_text():
            sleep(0.02)
    assert is_gone(int(begun.read_text()))
