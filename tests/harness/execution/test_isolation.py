"""Whatever an implementation does to its process: one outcome with its reason, and the next evaluation is right."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from forked import workers_forked
from processes import PATIENCE, has_ended, kill_child, wait_until
from tables import tables_beside

from attncheck.backends import BackendEntry, numpy_backend
from attncheck.common.errors import ExitCode, OutputError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import load_user_implementation
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import GroupRunner, group_by_process
from attncheck.execution.user_code import Target
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on_backend
from attncheck.reading.problem import Problem
from attncheck.results.reader import Run
from attncheck.run import RunSummary

RunSmall = Callable[..., tuple[RunSummary, Run]]
Entries = tuple[BackendEntry, BackendEntry]
MakeBackend = Callable[..., BackendEntry]
Runner = GroupRunner[Problem]
MakeRunner = Callable[..., Runner]

PATH = Path(__file__).parents[3] / "benchmarks" / "faulty_attention.py"
RIGHT = 0.5
"""The scores that are right are full of this number; those at which a fault is injected, of its number above it."""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="faults are injected as Linux has them")
forked = pytest.mark.usefixtures("forked_workers")


def softmax_of(number: float = RIGHT, size: int = 4) -> Problem:
    return Problem("softmax", {}, {"scores": np.full((1, 1, 1, size), number)})


def assert_right(outcome: Outcome, size: int = 4) -> None:
    assert isinstance(outcome, Computed), outcome
    np.testing.assert_allclose(outcome.stages["weights"], np.full((1, 1, 1, size), 1 / size), rtol=1e-15)


TABLES = tables_beside(__file__)["isolation"]


def test_what_is_no_result_is_a_failure_with_its_reason() -> None:
    for body, says in TABLES["failing"].items():
        names: dict[str, Any] = {"numpy_backend": numpy_backend}
        exec(f"def softmax(scores):\n    {body}", names)
        outcome = evaluate_on_backend(
            SimpleNamespace(**{**vars(numpy_backend), "softmax": names["softmax"]}), softmax_of()
        )
        assert isinstance(outcome, Failure), body
        assert says in f"{outcome.verdict}: {outcome.message}"
        assert outcome.message.isprintable()


# A run of many that fail, each in a worker beside two that are right

BODIES, UNSTARTABLE = TABLES["softmax does"], TABLES["at its start"]


@forked
def test_those_that_fail_are_named_with_their_reasons_and_harm_no_other(
    make_backend: MakeBackend, honest: Entries, run_small: RunSmall, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faulty = [make_backend(name, f"def softmax(scores):\n    {body}") for name, (body, *_) in BODIES.items()]
    starting = {name: f"open({str(tmp_path / name)!r}, 'a').write('x')\n" for name in UNSTARTABLE}
    unstartable = [make_backend(name, starting[name] + source) for name, (source, *_) in UNSTARTABLE.items()]
    entries = [honest[0], *faulty, *unstartable, make_backend("noisy", TABLES["noisy"]), honest[1]]
    summary, run = run_small(entries)
    stages = run.rows[run.rows["comparison"] == "stage"]
    failing: dict[str, dict[str, tuple[str, str]]] = {}
    for row in stages[stages["verdict"] != "agree"].to_dict("records"):
        name = row["implementation"].removesuffix(".eager")
        failing.setdefault(name, {})[row["case"].removeprefix("small/small/")] = row["verdict"], row["message"]
    assert failing.keys() == {*BODIES, *UNSTARTABLE}
    for name, (_, verdict, message) in (BODIES | UNSTARTABLE).items():
        scores = [] if name in BODIES else ["a-scores", "c-scores"]
        assert sorted(failing[name]) == sorted([*scores, "b-weights", "d-weights"])
        assert all(each[0] == verdict and message in each[1] for each in failing[name].values()), failing[name]
        assert name in BODIES or name == "absent" or (tmp_path / name).read_text() == "x", "it is started once"
    right = stages[stages["verdict"] == "agree"].groupby("implementation")["case"].nunique().to_dict()
    assert right == {f"{name}.eager": 4 for name in ("first", "noisy", "second")} | {
        f"{name}.eager": 2 for name in BODIES
    }
    # Disagreement counts before what could not run, and what is unsupported is no failure.
    assert (summary.exit_code, (run.summary or {})["exit_code"]) == (ExitCode.DISAGREE, 1)
    assert summary.evaluations == 4 * len(entries)
    assert summary.verdicts["crash"] == (run.summary or {})["verdicts"]["crash"] == 2 + 4
    assert {row.implementation for row in summary.failures if row.comparison == "stage"} == {
        f"{name}.eager" for name in failing if name != "lacks"
    }
    log = (run.directory / "logs" / "noisy.eager-float64.txt").read_text()
    assert ("from C, too" in log, "at import" in log, log.count("y") > 1_000_000) == (True, True, True)
    assert capfd.readouterr() == ("", "")
    assert run.environment["backends"]["noisy.eager-float64"] == {"threads": "1"}


@forked
def test_a_replaced_worker_keeps_its_variables(make_backend: MakeBackend, run_small: RunSmall) -> None:
    # Dies the first time that it is asked for weights in float64, and refuses what its process was not prepared for.
    source = (
        "import os\n"
        "def prepare(dtype, threads):\n    global prepared; prepared = dtype\n"
        "def softmax(scores):\n"
        "    assert prepared == str(scores.dtype), prepared\n"
        "    assert os.environ['ITS_OWN'] == 'yes'\n"
        "    if scores.shape[-2] == 2 and prepared == 'float64': os._exit(1)\n"
        "    return numpy_backend.softmax(scores)"
    )
    entry = make_backend("apart", source, own_process_for=frozenset({"float64"}), environment={"ITS_OWN": "yes"})
    _, run = run_small([entry], dtypes=("float64", "float32"))
    failed = run.rows[run.rows["verdict"] != "agree"]
    assert list(zip(failed["case"], failed["dtype"], failed["verdict"], strict=True)) == [
        ("small/small/b-weights", "float64", "crash")
    ]
    assert set(run.rows[run.rows["case"] == "small/small/d-weights"]["dtype"]) == {"float32", "float64"}
    assert "ITS_OWN" not in os.environ


def start_script(folder: Path, *entries: tuple[str, str]) -> subprocess.Popen[str]:
    """Run the small cases on modules as a script does that has no main guard."""
    environment, pipe = os.environ | {"PYTHONPATH": str(folder / "modules")}, subprocess.PIPE
    command = [sys.executable, Path(__file__).with_name("without_guard.py"), json.dumps(entries)]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.usefixtures("case_folder")
def test_a_script_without_a_main_guard_runs_once_and_imports_no_dask(tmp_path: Path) -> None:
    with start_script(tmp_path, ("first", "attncheck.backends.numpy_backend")) as script:
        assert script.communicate(timeout=PATIENCE) == ("0 4\n[]\n", "")
    assert (script.returncode, (tmp_path / "times").read_text()) == (0, "x")


# One sleeps in an evaluation, one in C where nothing of Python can run, one while it starts, one waits for work.
BUSY_WITH = {
    "evaluating": "def softmax(scores):\n    time.sleep(600)",
    "stuck": "def softmax(scores):\n    import ctypes; ctypes.PyDLL(None).sleep(600)",
    "starting": "time.sleep(600)",
    "idle": "",
}


@linux_only
@pytest.mark.usefixtures("case_folder")
def test_workers_end_with_a_killed_parent(tmp_path: Path, make_backend: MakeBackend) -> None:
    pids = tmp_path / "pids"
    note = f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    entries = [make_backend(name, f"{note}\n{code}") for name, code in BUSY_WITH.items()]
    with start_script(tmp_path, *((entry.name, entry.module) for entry in entries)) as parent:
        wait_until(lambda: pids.is_file() and len(pids.read_text().split()) == len(BUSY_WITH))
        workers = [int(pid) for pid in pids.read_text().split()]
        assert not all(map(has_ended, workers))
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, workers)))


# Runners of one worker


@pytest.fixture
def make_runner(make_backend: MakeBackend, tmp_path: Path) -> Iterator[MakeRunner]:
    """Return what makes a runner of a backend that does something at its start, and before it is right."""
    made: list[Runner] = []

    def make(source: str = "pass", *, at_start: str = "", **limits: object) -> Runner:
        lines = "".join(f"    {line}\n" for line in source.splitlines())
        imports = f"import os, signal, subprocess, sys, time\n{at_start}\n"
        text = f"{imports}def softmax(scores):\n    size = scores.shape[-1]\n{lines}"
        entry = make_backend("tried", f"{text}    return numpy_backend.softmax(scores)")
        (group,) = group_by_process(Implementation(entry), ["float64"])
        (tmp_path / "logs").mkdir(exist_ok=True)
        made.append(GroupRunner(group, Limits(**limits), tmp_path / "logs"))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def noting(path: Path) -> str:
    """Return a line that adds its process to a file."""
    return f"open({str(path)!r}, 'a').write(f'{{os.getpid()}} ')"


def pids_in(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()]


@forked
def test_a_backend_that_hangs_at_its_start_is_given_up(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(at_start=f"{noting(tmp_path / 'pids')}; time.sleep(60)", start_seconds=0.5)
    failure = Failure("timeout", "not done after 0.5 s; the worker was stopped")
    assert [runner.evaluate(softmax_of()) for _ in range(2)] == [failure] * 2
    assert len(pids_in(tmp_path / "pids")) == 1


@forked
def test_a_worker_that_holds_too_much_memory_is_replaced_after_its_evaluation(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    for memory, processes in ((2**40, 1), (1, 2 + 1)):
        runner = make_runner(at_start=noting(tmp_path / "pids"), soft_memory_limit=memory)
        for _ in range(2):
            assert_right(runner.evaluate(softmax_of()))
        assert len(pids_in(tmp_path / "pids")) == processes


def test_a_worker_killed_between_two_evaluations_is_replaced(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(noting(tmp_path / "pids"))
    assert_right(runner.evaluate(softmax_of()))
    (pid,) = pids_in(tmp_path / "pids")
    kill_child(pid)
    message = "the worker process died with exit code -9 (SIGKILL) before it was asked"
    assert runner.evaluate(softmax_of()) == Failure("crash", message)
    assert_right(runner.evaluate(softmax_of()))
    assert len({*pids_in(tmp_path / "pids")}) == 2


@forked
def test_starting_again_is_tried_but_not_for_ever(make_runner: MakeRunner, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    count = f"with open({str(starts)!r}, 'a+') as file:\n    print(file=file)\n    file.seek(0)\n"
    refuse = "    turn = len(file.read())\nif turn in (2, 4, 5, 6):\n    raise SystemExit"
    runner = make_runner("if size == 3:\n    os._exit(1)", at_start=count + refuse)
    dead = Failure("crash", "the worker process died with exit code 1")
    gone = Failure("error", "tried.eager cannot be started: SystemExit:")
    assert_right(runner.evaluate(softmax_of()))
    assert [runner.evaluate(softmax_of(size=size)) for size in (3, 4)] == [dead, gone]
    assert_right(runner.evaluate(softmax_of()))
    assert [runner.evaluate(softmax_of(size=size)) for size in (3, 4, 4, 4, 4, 4)] == [dead, *[gone] * 5]
    assert len(starts.read_text()) == 6


@forked
def test_a_worker_that_stops_after_its_answer_keeps_nobody_waiting(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(noting(tmp_path / "pids"), case_seconds=1.0)
    assert_right(runner.evaluate(softmax_of()))
    os.kill(pids_in(tmp_path / "pids")[0], signal.SIGSTOP)
    large = 2**18  # does not fit into the pipe: whoever sends it waits
    message = "not done after 1 s; the worker was stopped"
    assert runner.evaluate(softmax_of(size=large)) == Failure("timeout", message)
    assert_right(runner.evaluate(softmax_of()))


@forked
def test_an_answer_that_breaks_off_in_the_middle_is_none(make_runner: MakeRunner) -> None:
    # The process ends while its answer, of more than a pipe holds, is on its way.
    runner = make_runner(
        "if size > 4:\n    import multiprocessing.connection as connection\n    send = connection.Connection._send\n"
        "    connection.Connection._send = lambda self, data, *more: (send(self, data[:9999]), os._exit(5))"
    )
    assert runner.evaluate(softmax_of(size=2**16)) == Failure("crash", "the worker process died with exit code 5")
    assert_right(runner.evaluate(softmax_of()))


@forked
def test_last_words_are_those_of_the_evaluation_and_of_a_timeout_too(make_runner: MakeRunner) -> None:
    runner = make_runner(
        "if size == 3:\n    print('old words')\nif size == 2:\n    os._exit(1)\n"
        "if size == 1:\n    print('one\\n\\ntwo\\nthree\\n\\x1b[1mfour')\n    time.sleep(60)",
        case_seconds=1.0,
    )
    assert_right(runner.evaluate(softmax_of(size=3)), 3)
    assert runner.evaluate(softmax_of(size=2)) == Failure("crash", "the worker process died with exit code 1")
    message = "not done after 1 s; the worker was stopped; its last lines: two | three | four"
    assert runner.evaluate(softmax_of(size=1)) == Failure("timeout", message)


@forked
def test_a_log_that_cannot_be_written_or_a_full_disk_is_no_fault_of_the_implementation(
    make_runner: MakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner("if size == 3:\n    raise OSError(28, 'No space left on device')")
    assert isinstance(runner.evaluate(softmax_of(size=3)), Failure)
    free = shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert_right(runner.evaluate(softmax_of()))
    with pytest.raises(OutputError, match=r"txt cannot be written: No space left on device; free some space"):
        runner.evaluate(softmax_of(size=3))
    runner = make_runner()
    shutil.rmtree(tmp_path / "logs")
    with pytest.raises(OutputError, match=r"logs/tried\.eager-float64\.txt cannot be written: No such file"):
        runner.evaluate(softmax_of())


# Every kind of fault, for real


def load_faulty() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faulty_attention", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


FAULTY = load_faulty()
LEFT_OUT = {"abort", "terminated", "one endless line on stdout", "memory bit by bit", "sleep", "deadlock"}
"""What ends in the same place as another kind does; ``benchmarks/faults.py`` injects them too."""
KINDS = [kind for kind in FAULTY.KINDS if kind not in LEFT_OUT]
SPAWNED = ["every file closed", "other files in their places"]
"""What ends a worker by what it does to files, of which a forked one has others."""
MAX_PRINTED = 2**22


def kinds_with(*verdicts: str) -> list[str]:
    return [kind for kind in KINDS if FAULTY.KINDS[kind].verdict in verdicts and kind not in SPAWNED]


def problem_of(kind: str, hit: Outcome, *after: Outcome) -> str:
    """Return what is wrong with the outcomes of a fault and of what is right behind it, or nothing."""
    expected = FAULTY.KINDS[kind]
    try:
        for outcome in after:
            assert_right(outcome)
        if expected.verdict == "agree":
            assert_right(hit)
        else:
            assert isinstance(hit, Failure)
            assert (hit.verdict, expected.says in hit.message) == (expected.verdict, True)
            assert hit.message.isprintable()
            assert len(hit.message) <= 500
    except AssertionError as error:
        return f"{kind}: {hit}: {error}"
    return ""


@linux_only
def test_a_fault_is_said_once_harms_no_other_evaluation_and_nothing_outlives_a_worker(
    forking: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Odd numbers: a call is made again with half of every number, which is to be no other kind.
    scores = {kind: softmax_of(2.0 * number + 1).inputs["scores"] for number, kind in enumerate(KINDS)}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({FAULTY.fingerprint("softmax", (each,), {}): kind for kind, each in scores.items()}))
    monkeypatch.setenv(FAULTY.PLAN_VARIABLE, str(plan))
    implementation, workers = load_user_implementation(Target(str(PATH)), None), set[int]()

    def problems(kinds: list[str], seconds: float) -> list[str]:
        """Evaluate what is right, and then, for each kind, what is hit and what is right twice."""
        folder = tmp_path / kinds[0]
        folder.mkdir()
        (group,) = group_by_process(implementation, ["float64"])
        limits = Limits(case_seconds=seconds, hard_memory_limit=2**29, max_output=MAX_PRINTED)
        found = []
        with closing(Runner(group, limits, folder)) as runner:
            assert_right(runner.evaluate(softmax_of()))
            for kind in kinds:
                if (process := runner._slot.process) is not None:
                    workers.add(process.pid)
                numbers = (2.0 * KINDS.index(kind) + 1, RIGHT, RIGHT)
                found.append(problem_of(kind, *(runner.evaluate(softmax_of(number)) for number in numbers)))
                assert all(path.stat().st_size < 2 * MAX_PRINTED for path in folder.iterdir())
        return found

    # Those that end their worker take one each. What others leave behind is found by a spawned worker's variables.
    timeouts = kinds_with("timeout")
    with workers_forked(), ThreadPoolExecutor(3) as threads:
        slow = [threads.submit(problems, kinds, 1.0) for kinds in (timeouts[::2], timeouts[1::2])]
        found = problems(kinds_with("crash"), 60.0)
        for future in slow:
            found += future.result()
    found += problems([*SPAWNED, *kinds_with("error", "agree")], 60.0)
    assert [problem for problem in found if problem] == []
    assert len(found) == len(KINDS)
    assert len(workers) > len([kind for kind in KINDS if FAULTY.KINDS[kind].verdict in ("crash", "timeout")])
    assert [pid for pid in workers if not has_ended(pid)] == []
    assert left_behind(plan) == []


def left_behind(plan: Path) -> list[str]:
    """Return the commands of other processes that have a plan; multiprocessing's own helper is a child of this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(FAULTY.PLAN_VARIABLE) == str(plan):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return [command for command in found if "multiprocessing.resource_tracker" not in command]
