"""Faults for real: backends that raise, hang, die or return nonsense, each in a worker beside two that are right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from attncheck.backends import BackendEntry
from attncheck.errors import ExitCode
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.execution.runner import GroupRunner, group_by_process, run_in_turn
from attncheck.execution.worker import Computed, Failure, Outcome, Task
from attncheck.results.reader import Run
from attncheck.run import RunSummary

RunSmall = Callable[..., tuple[RunSummary, Run]]
Entries = tuple[BackendEntry, BackendEntry]

SCORES = ["small/small/a-scores", "small/small/c-scores"]
WEIGHTS = ["small/small/b-weights", "small/small/d-weights"]

linux_only = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="processes are looked up in /proc")


@dataclass(frozen=True)
class WrongSoftmax:
    """What a softmax does, and what must be said of it."""

    body: str
    verdict: str
    stage: str
    message: str
    exit_code: ExitCode = ExitCode.NOT_RUN


WRONG = {
    "swaps a sign": WrongSoftmax(
        "stages = numpy_backend.softmax(scores); stages['weights'] *= -1; return stages",
        "numeric", "weights", "times the largest error that is possible in this step; at [0, 0,", ExitCode.DISAGREE,
    ),
    "returns NaN": WrongSoftmax(
        "stages = numpy_backend.softmax(scores); stages['weights'][..., 1] = float('nan'); return stages",
        "nonfinite", "weights", "nan where the exact value is 0.", ExitCode.DISAGREE,
    ),
    "returns a wrong shape": WrongSoftmax(
        "stages = numpy_backend.softmax(scores); stages['weights'] = stages['weights'][..., :-1]; return stages",
        "shape", "weights", "expected shape 1x1x", ExitCode.DISAGREE,
    ),
    "returns an array without axes": WrongSoftmax(
        "return numpy_backend.softmax(scores) | {'weights': 0.5}",
        "shape", "weights", "got scalar", ExitCode.DISAGREE,
    ),
    "returns a narrower dtype": WrongSoftmax(
        "stages = numpy_backend.softmax(scores); return stages | {'weights': stages['weights'].astype('float16')}",
        "dtype", "weights", "expected float64, got float16", ExitCode.DISAGREE,
    ),
    "returns integers": WrongSoftmax(
        "stages = numpy_backend.softmax(scores); return stages | {'weights': stages['weights'].astype(int)}",
        "dtype", "weights", "expected float64, got int64", ExitCode.DISAGREE,
    ),
}  # fmt: skip

FAILING = {
    "raises": WrongSoftmax(
        "raise ValueError('no softmax\\ntoday')",
        "error", "", "ValueError: no softmax today",
    ),
    "raises a message of a thousand characters": WrongSoftmax(
        "raise ValueError('x' * 1000)",
        "error", "", "xxx...",
    ),
    "raises a message that is no text": WrongSoftmax(
        "raise ValueError('\\x1b[31mred\\x1b[0m \\x1b \\udc80\\x00')",
        "error", "", "ValueError: red \N{REPLACEMENT CHARACTER} ",
    ),
    "ends its process in good order": WrongSoftmax(
        "raise SystemExit(0)",
        "error", "", "SystemExit: 0",
    ),
    "raises KeyboardInterrupt": WrongSoftmax(
        "raise KeyboardInterrupt",
        "error", "", "KeyboardInterrupt",
    ),
    "returns nothing": WrongSoftmax(
        "return None",
        "error", "", "no stages",
    ),
    "returns no stage": WrongSoftmax(
        "return {}",
        "error", "", "no stages",
    ),
    "returns only what is beside the result": WrongSoftmax(
        "return {'mine': scores, 'log_sum_exp': scores[..., 0]}",
        "error", "", "returned mine, log_sum_exp; expected a stage named weights",
    ),
    "returns a list": WrongSoftmax(
        "return numpy_backend.softmax(scores) | {'weights': [1.0]}",
        "error", "", "stage weights is a list, expected an array",
    ),
    "returns objects that cannot be sent": WrongSoftmax(
        "import numpy; return {'weights': numpy.array([lambda: 0], dtype=object)}",
        "error", "", "stage weights is an array of object",
    ),
    "returns a stage whose name is no name": WrongSoftmax(
        "return numpy_backend.softmax(scores) | {'a | b': scores}",
        "error", "", "'a | b'",
    ),
    "has no such thing": WrongSoftmax(
        "raise NotImplementedError('softmax over four axes')",
        "unsupported", "", "NotImplementedError: softmax over four axes",
    ),
    "dies": WrongSoftmax(
        "import os; os.write(2, b'last words\\n'); os._exit(9)",
        "crash", "", "died with exit code 9; its last line: last words",
    ),
    "dies in good order": WrongSoftmax(
        "import os; os._exit(0)",
        "crash", "", "died with exit code 0",
    ),
    "breaks a segment": WrongSoftmax(
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV); import time; time.sleep(60)",
        "crash", "", "died with exit code -11",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
def test_a_backend_whose_softmax_is_wrong_is_named_and_harms_nothing_else(
    fault: WrongSoftmax, make_backend: Callable[..., BackendEntry], honest: Entries, run_small: RunSmall
) -> None:
    faulty = make_backend("faulty", f"def softmax(scores):\n    {fault.body}")
    summary, run = run_small([honest[0], faulty, honest[1]])
    stages = run.rows[run.rows["comparison"] == "stage"]
    own = assert_named(fault, stages, "faulty.eager")
    assert set(stages.drop(own.index)["verdict"]) == {"agree"}
    assert_complete(stages, "faulty.eager", but_for=set())
    assert summary.exit_code == fault.exit_code
    assert run.summary is not None
    assert run.summary["exit_code"] == fault.exit_code
    assert summary.evaluations == 12


def test_a_backend_that_hangs_is_stopped_and_harms_nothing_else(
    make_backend: Callable[..., BackendEntry], honest: Entries, run_small: RunSmall
) -> None:
    # It hangs in one case alone, and is there again for the next one.
    body = "import time; scores.shape[-2] == 2 and time.sleep(60); return numpy_backend.softmax(scores)"
    faulty = make_backend("faulty", f"def softmax(scores):\n    {body}")
    summary, run = run_small([honest[0], faulty, honest[1]], seconds=6.0)
    stages = run.rows[run.rows["comparison"] == "stage"]
    (failed,) = stages[stages["verdict"] != "agree"].to_dict("records")
    assert (failed["case"], failed["implementation"], failed["verdict"]) == (WEIGHTS[0], "faulty.eager", "timeout")
    assert failed["message"] == "not done after 6 s; the worker was stopped"
    assert_complete(stages, "faulty.eager", but_for={WEIGHTS[0]})
    assert summary.exit_code == ExitCode.NOT_RUN


@pytest.fixture(scope="module")
def failing_run(
    tmp_path_factory: pytest.TempPathFactory,
    write_small: Callable[[Path], Path],
    write_backend: Callable[..., BackendEntry],
    run_below: RunSmall,
    honest: Entries,
) -> tuple[RunSummary, Run]:
    """Run every backend that returns nothing at once, beside two that are right."""
    folder = tmp_path_factory.mktemp("failing")
    write_small(folder)
    entries = [
        write_backend(folder, f"faulty{number}", f"def softmax(scores):\n    {fault.body}")
        for number, fault in enumerate(FAILING.values())
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return run_below(folder, [honest[0], *entries, honest[1]])


@pytest.mark.parametrize("name", FAILING)
def test_a_backend_that_fails_is_named_with_its_reason(name: str, failing_run: tuple[RunSummary, Run]) -> None:
    stages = failing_run[1].rows[failing_run[1].rows["comparison"] == "stage"]
    implementation = f"faulty{list(FAILING).index(name)}.eager"
    own = assert_named(FAILING[name], stages, implementation)
    assert_complete(stages, implementation, but_for=set(WEIGHTS))
    elsewhere = stages[stages["implementation"] == implementation].drop(own.index)
    assert set(elsewhere["verdict"]) == {"agree"}


def test_backends_that_fail_harm_no_other(failing_run: tuple[RunSummary, Run]) -> None:
    summary, run = failing_run
    stages = run.rows[run.rows["comparison"] == "stage"]
    right = stages[stages["implementation"].isin(["first.eager", "second.eager"])]
    assert set(right["verdict"]) == {"agree"}
    assert len(right) == 2 * 4 * 2
    assert summary.evaluations == 4 * (2 + len(FAILING))
    assert summary.exit_code == ExitCode.NOT_RUN
    # What is unsupported is no failure.
    reasons = [row.verdict for row in summary.failures]
    assert len(reasons) == sum(2 for fault in FAILING.values() if fault.verdict != "unsupported")
    assert "unsupported" not in reasons


def test_what_nobody_supports_is_no_failure(
    make_backend: Callable[..., BackendEntry], honest: Entries, run_small: RunSmall
) -> None:
    body = FAILING["has no such thing"].body
    summary, _ = run_small([honest[0], make_backend("faulty", f"def softmax(scores):\n    {body}"), honest[1]])
    assert summary.exit_code == ExitCode.AGREE
    assert summary.verdicts["unsupported"] == 2


def assert_named(fault: WrongSoftmax, stages: pd.DataFrame, implementation: str) -> pd.DataFrame:
    """Both cases that use the softmax say what is wrong; return these rows."""
    own = stages[(stages["implementation"] == implementation) & (stages["stage"] == fault.stage)]
    assert sorted(own["case"]) == WEIGHTS
    assert set(own["verdict"]) == {fault.verdict}
    assert all(fault.message in message for message in own["message"])
    assert all(message.isprintable() and len(message) <= 500 for message in own["message"])
    return own


def assert_complete(stages: pd.DataFrame, implementation: str, but_for: set[str]) -> None:
    """Every evaluation of two that are right and of another one has all its stages, but for that one's cases named."""
    wanted = {
        (name, case, stage)
        for name in ("first.eager", implementation, "second.eager")
        for case, returned in [(case, ("raw_scores", "scores")) for case in SCORES]
        + [(case, ("weights", "log_sum_exp")) for case in WEIGHTS]
        for stage in returned
        if name != implementation or case not in but_for
    }
    found = set(zip(stages["implementation"], stages["case"], stages["stage"], strict=True))
    assert wanted <= found


@pytest.mark.parametrize(
    ("source", "verdict", "message"),
    [
        (
            "raise ImportError('libfast.so is not there')",
            "error",
            "faulty.eager cannot be started: ImportError: libfast.so",
        ),
        ("import os; os._exit(4)", "crash", "died with exit code 4"),
        ("import os; os._exit(0)", "crash", "died with exit code 0"),
        ("raise SystemExit(0)", "error", "faulty.eager cannot be started: SystemExit: 0"),
        ("def prepare(dtype, threads):\n    raise RuntimeError(dtype)", "error", "RuntimeError: float64"),
        ("def = 1", "error", "faulty.eager cannot be started: SyntaxError"),
    ],
    ids=["raises", "dies", "dies in good order", "exits", "cannot be configured", "is no Python"],
)
def test_a_backend_that_cannot_be_started_fails_in_every_case_and_is_started_once(
    source: str,
    verdict: str,
    message: str,
    tmp_path: Path,
    make_backend: Callable[..., BackendEntry],
    honest: Entries,
    run_small: RunSmall,
) -> None:
    starts = tmp_path / "starts"
    faulty = make_backend("faulty", f"open({str(starts)!r}, 'a').write('x')\n{source}")
    summary, run = run_small([honest[0], faulty, honest[1]])
    stages = run.rows[run.rows["comparison"] == "stage"]
    own = stages[stages["implementation"] == "faulty.eager"]
    assert sorted(own["case"]) == sorted(SCORES + WEIGHTS)
    assert set(own["verdict"]) == {verdict}
    assert all(message in text for text in own["message"])
    assert_complete(stages, "faulty.eager", but_for={*SCORES, *WEIGHTS})
    assert summary.exit_code == ExitCode.NOT_RUN
    assert not starts.exists() or starts.read_text() == "x"


def test_a_module_that_is_not_there_is_an_error_and_says_its_name(honest: Entries, run_small: RunSmall) -> None:
    summary, run = run_small([*honest, BackendEntry("faulty", "no_such_module", ("numpy",))])
    own = run.rows[run.rows["implementation"] == "faulty.eager"]
    assert set(own["verdict"]) == {"error"}
    assert all("No module named 'no_such_module'" in message for message in own["message"])
    assert summary.exit_code == ExitCode.NOT_RUN


def test_a_backend_that_hangs_while_it_starts_is_given_up(
    make_backend: Callable[..., BackendEntry], tmp_path: Path
) -> None:
    entry = make_backend("slow", "import time; time.sleep(60)")
    outcomes: list[tuple[str, Outcome]] = []
    (group,) = group_by_process(Implementation(entry), ["float64"])
    runner: GroupRunner[str] = GroupRunner(group, Limits(start_seconds=1.0), tmp_path)
    run_in_turn(
        [(runner, "one"), (runner, "two")],
        lambda _, key: Task("softmax", {}, {}),
        lambda _, key, outcome: outcomes.append((key, outcome)),
    )
    runner.close()
    failure = Failure("timeout", "not done after 1 s; the worker was stopped")
    assert outcomes == [("one", failure), ("two", failure)]


def test_what_a_backend_prints_goes_to_its_log(
    make_backend: Callable[..., BackendEntry],
    honest: Entries,
    run_small: RunSmall,
    capfd: pytest.CaptureFixture[str],
) -> None:
    noisy = make_backend(
        "noisy",
        "import os\nprint('at import')\n"
        "def softmax(scores):\n"
        "    print('y' * 2_000_000)\n    os.write(1, b'from C\\n'); os.write(2, b'from C, too\\n')\n"
        "    return numpy_backend.softmax(scores)",
    )
    summary, run = run_small([noisy, *honest])
    assert summary.exit_code == ExitCode.AGREE
    assert set(run.rows["verdict"]) == {"agree"}
    log = (run.directory / "logs" / "noisy.eager-float64.txt").read_text()
    assert "from C, too" in log
    assert "at import" in log
    assert log.count("y") > 1_000_000
    assert capfd.readouterr() == ("", "")


def test_a_backend_that_changes_its_inputs_harms_no_other(
    make_backend: Callable[..., BackendEntry], honest: Entries, run_small: RunSmall
) -> None:
    source = "def softmax(scores):\n    stages = numpy_backend.softmax(scores); scores[:] = 99; return stages"
    summary, run = run_small([make_backend("careless", source), *honest])
    assert summary.exit_code == ExitCode.AGREE
    assert set(run.rows["verdict"]) == {"agree"}


def test_disagreement_counts_before_what_could_not_run(
    make_backend: Callable[..., BackendEntry], honest: Entries, run_small: RunSmall
) -> None:
    wrong = make_backend("wrong", f"def softmax(scores):\n    {WRONG['swaps a sign'].body}")
    dying = make_backend("dying", f"def softmax(scores):\n    {FAILING['dies'].body}")
    summary, run = run_small([wrong, *honest, dying])
    assert summary.exit_code == ExitCode.DISAGREE
    assert {(row.implementation, row.verdict) for row in summary.failures if row.comparison == "stage"} == {
        ("wrong.eager", "numeric"),
        ("dying.eager", "crash"),
    }
    assert run.summary is not None
    assert run.summary["verdicts"]["crash"] == 2


def test_a_worker_is_replaced_after_it_died_and_its_environment_and_dtype_are_its_own(
    make_backend: Callable[..., BackendEntry], honest: Entries, run_small: RunSmall
) -> None:
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
    assert [group.dtypes for group in group_by_process(Implementation(entry), ["float32", "float64"])] == [
        ("float64",),
        ("float32",),
    ]
    _, run = run_small([entry, *honest], dtypes=("float64", "float32"))
    own = run.rows[(run.rows["implementation"] == "apart.eager") & (run.rows["comparison"] == "stage")]
    failed = own[own["verdict"] != "agree"]
    assert list(zip(failed["case"], failed["dtype"], failed["verdict"], strict=True)) == [
        ("small/small/b-weights", "float64", "crash")
    ]
    after = own[(own["case"] == "small/small/d-weights") & (own["stage"] == "weights")]
    assert sorted(after["dtype"]) == ["float32", "float64"]
    assert "ITS_OWN" not in os.environ


def test_dtypes_that_need_no_process_of_their_own_share_one(honest: Entries) -> None:
    groups = group_by_process(Implementation(honest[0]), ["float32", "float64"])
    assert [(group.name, group.dtypes) for group in groups] == [("first.eager-float32-float64", ("float32", "float64"))]


def test_the_threads_of_a_worker_are_set_before_numpy_is_loaded(
    make_backend: Callable[..., BackendEntry], run_small: RunSmall
) -> None:
    source = "import os\ndef describe():\n    return {'threads': os.environ['OMP_NUM_THREADS']}"
    _, run = run_small([make_backend("some", source)])
    assert run.environment["backends"] == {"some.eager-float64": {"threads": "1"}}


SCRIPT = """\
from pathlib import Path
from attncheck.backends import BackendEntry
from attncheck import Limits, Settings, run_cases, select_cases
from attncheck.execution.implementations import ImplementationSelection, Implementation

with open("times", "a") as times:
    times.write("x")
entries = [BackendEntry(name, module, ("numpy",)) for name, module in {entries}]
selection = select_cases(["small"])
chosen = ImplementationSelection(tuple(Implementation(entry) for entry in entries))
limits = Limits(workers=len(entries))
summary = run_cases(selection.cases, chosen, Settings(Path("out"), dtypes=("float64",), limits=limits))
print(int(summary.exit_code), summary.evaluations)
"""


def write_script(folder: Path, *entries: tuple[str, str]) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.replace("{entries}", repr(entries)), encoding="utf-8")
    return path


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path, case_folder: Path) -> None:
    module = "attncheck.backends.numpy_backend"
    script = write_script(tmp_path, ("first", module), ("second", module))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 8\n", "")
    assert (tmp_path / "times").read_text() == "x"


@linux_only
def test_workers_end_with_their_parent_even_if_it_is_killed(
    tmp_path: Path, case_folder: Path, make_backend: Callable[..., BackendEntry]
) -> None:
    # One sleeps in an evaluation, one in C where nothing of Python can run, one while it starts, one waits for work.
    pids = tmp_path / "pids"
    note = f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    entries = [
        make_backend("evaluating", f"{note}\ndef softmax(scores):\n    time.sleep(600)"),
        make_backend("stuck", f"{note}\ndef softmax(scores):\n    import ctypes; ctypes.PyDLL(None).sleep(600)"),
        make_backend("starting", f"{note}\ntime.sleep(600)"),
        make_backend("idle", note),
    ]
    script = write_script(tmp_path, *((entry.name, entry.module) for entry in entries))
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "modules")}
    with subprocess.Popen([sys.executable, script], cwd=tmp_path, env=environment) as parent:
        wait_until(lambda: pids.is_file() and len(pids.read_text().split()) == 4)
        workers = [int(pid) for pid in pids.read_text().split()]
        assert any(is_running(pid) for pid in workers)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in workers))


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that nobody has collected yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_runner_that_is_stopped_before_it_begins_starts_no_worker(
    make_backend: Callable[..., BackendEntry], tmp_path: Path
) -> None:
    started = tmp_path / "started"
    entry = make_backend("some", f"open({str(started)!r}, 'w')")
    (group,) = group_by_process(Implementation(entry), ["float64"])
    runner: GroupRunner[str] = GroupRunner(group, Limits(), tmp_path)
    runner.stop()
    reported: list[object] = []
    run_in_turn([(runner, "one")], lambda _, key: Task("softmax", {}, {}), lambda *answer: reported.append(answer))
    assert not reported
    assert not started.exists()


@pytest.mark.parametrize(("memory", "processes"), [(1, 3), (2**40, 1)])
def test_a_worker_that_holds_too_much_memory_is_replaced_after_its_evaluation(
    memory: int, processes: int, make_backend: Callable[..., BackendEntry], tmp_path: Path
) -> None:
    started = tmp_path / "started"
    entry = make_backend("some", f"import os; open({str(started)!r}, 'a').write(f'{{os.getpid()}} ')")
    (group,) = group_by_process(Implementation(entry), ["float64"])
    runner: GroupRunner[str] = GroupRunner(group, Limits(soft_memory_limit=memory), tmp_path)
    task = Task("softmax", {}, {"scores": np.zeros((1, 1, 1, 2))})
    answers = [runner.evaluate(task) for _ in range(3)]
    runner.close()
    assert [type(answer) for answer in answers] == [Computed] * 3
    assert len(started.read_text().split()) == processes


@pytest.mark.parametrize(
    ("limits", "misdeed", "told"),
    [
        (
            Limits(hard_memory_limit=2**28),
            "hoard = [bytearray(b'x' * 2**29)]; time.sleep(60)",
            "GiB of memory, more than 0.2 GiB",
        ),
        (
            Limits(max_output=2**16),
            "while True: print('on and on' * 100)",
            "MiB, more than 0.1 MiB",
        ),
    ],
    ids=["memory", "output"],
)
def test_a_worker_that_takes_too_much_is_stopped_and_the_next_one_goes_on(
    limits: Limits, misdeed: str, told: str, make_backend: Callable[..., BackendEntry], tmp_path: Path
) -> None:
    source = f"import time\ndef softmax(scores):\n    if scores.size == 1:\n        {misdeed}\n"
    entry = make_backend("greedy", f"{source}    return numpy_backend.softmax(scores)")
    (group,) = group_by_process(Implementation(entry), ["float64"])
    runner: GroupRunner[int] = GroupRunner(group, limits, tmp_path)
    first, second = (runner.evaluate(Task("softmax", {}, {"scores": np.zeros((1, 1, 1, size))})) for size in (1, 2))
    runner.close()
    assert isinstance(first, Failure)
    assert first.verdict == "crash"
    assert f"{told}; the worker was stopped" in first.message
    assert isinstance(second, Computed)
    assert (tmp_path / f"{group.name}.txt").stat().st_size < 2**16
