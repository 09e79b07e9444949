"""Functions called in a process of their own: what is returned, what is raised, and how a call ends otherwise."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from attncheck.execution.call import CallCancelled, CallTimeout, RemoteError, WorkerDied, WorkerProcess
from attncheck.execution.process_tree import end_strays

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes")


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    made = WorkerProcess()
    yield made
    made.end()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_one_process_answers_one_call_after_the_other(worker: WorkerProcess) -> None:
    assert worker.call(operator.add, 2, 3, seconds=30) == 5
    assert worker.call(os.getpid, seconds=30) == worker.pid
    assert worker.call(operator.mul, b"x", 2**22, seconds=30) == b"x" * 2**22
    assert worker.call(os.getpid, seconds=30) == worker.pid != os.getpid()


def test_what_is_raised_is_told_and_the_process_goes_on(worker: WorkerProcess) -> None:
    with pytest.raises(RemoteError, match=r"^ZeroDivisionError: division by zero$"):
        worker.call(operator.truediv, 1, 0, seconds=30)
    with pytest.raises(RemoteError, match=r"^SystemExit: 3$"):
        worker.call(sys.exit, 3, seconds=30)
    with pytest.raises(RemoteError, match=r"^what it returned cannot be sent: TypeError$"):
        worker.call(threading.Lock, seconds=30)
    assert worker.call(operator.add, 2, 3, seconds=30) == 5


def test_what_cannot_be_asked_is_the_caller_s_fault(worker: WorkerProcess) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        worker.call(operator.is_, threading.Lock(), None, seconds=30)
    assert worker.call(operator.add, 2, 3, seconds=30) == 5


def test_a_call_ends_after_its_time_or_when_somebody_wants_it(worker: WorkerProcess) -> None:
    worker.call(os.getpid, seconds=30)
    begun = time.monotonic()
    with pytest.raises(CallTimeout):
        worker.call(time.sleep, 60, seconds=0.3)
    assert 0.3 <= time.monotonic() - begun < 10
    with pytest.raises(CallCancelled, match=r"^enough$"):
        worker.call(os.getpid, seconds=30, look=lambda: "enough")


@posix_only
def test_a_process_that_ends_is_told_in_that_call_and_in_every_later_one(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerDied, match=r"^died with exit code -10 \(SIGUSR1\)$"):
        worker.call(signal.raise_signal, signal.SIGUSR1, seconds=30)
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"before it was asked$"):
            worker.call(os.getpid, seconds=30)


def test_to_end_it_twice_does_no_harm_and_ends_a_call_under_way(worker: WorkerProcess) -> None:
    worker.call(os.getpid, seconds=30)
    threading.Timer(0.2, worker.end).start()
    with pytest.raises(WorkerDied):
        worker.call(time.sleep, 60, seconds=30)
    worker.end()
    assert not is_running(worker.pid)


SCRIPT = """
import os, time
from pathlib import Path
from attncheck.execution.call import WorkerProcess

worker = WorkerProcess()
child = worker.call(os.spawnlp, os.P_NOWAIT, "sleep", "sleep", "600", seconds=30)
Path("pids.new").write_text(f"{worker.pid} {child}")
Path("pids.new").rename("pids")
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are taken along as Linux has it")
def test_what_a_killed_harness_has_left_is_ended_by_the_next_one_and_nothing_else(
    tmp_path: Path, worker: WorkerProcess
) -> None:
    own = worker.call(os.spawnlp, os.P_NOWAIT, "sleep", "sleep", "600", seconds=30)
    with subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=tmp_path) as harness:
        wait_until((tmp_path / "pids").is_file)
        theirs, child = map(int, (tmp_path / "pids").read_text().split())
        end_strays()
        assert is_running(child)  # its harness lives
        harness.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(theirs))
    end_strays()  # or a harness beside this test, which may have been quicker
    wait_until(lambda: not is_running(child))
    assert is_running(own)
    assert is_running(worker.pid)
    worker.end()
    assert not is_running(own)
