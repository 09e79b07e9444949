"""Runs a case below its folder again and again, killed before each change on the disk, and resumed: test_resume.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from attncheck import Settings, run_cases, select_cases
from attncheck.backends import BackendEntry
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.execution.runner import GroupRunner
from attncheck.execution.worker import Outcome, evaluate_on_backend
from attncheck.reading.problem import Problem
from attncheck.results.reader import Run, read_run
from attncheck.results.writer import ResultsWriter


def evaluated(runner: GroupRunner[Any], task: Problem) -> Outcome:
    """Evaluate in this process: workers are not the point."""
    runner.description = {"version": "1.0"}
    runner._meanwhile()
    return evaluate_on_backend(runner.group.implementation.entry.load(), task)


GroupRunner._evaluate_and_retry_alone = evaluated
os.fsync = lambda file: None  # the power does not fail
ResultsWriter.SECONDS_PER_PART = 0.0
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
out, cases = Path("out").resolve(), select_cases(["small"], dtypes=["float64"]).cases[:1]
entry = BackendEntry("numpy", "attncheck.backends.numpy_backend", ("numpy",))
chosen = ImplementationSelection((Implementation(entry),))


def in_a_process_of_its_own(*, resume: bool, killed_at: int | None = None) -> bool:
    """Run in a process that kills itself before so many changes of the results; return whether it came to that."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] != 0
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CHANGES and killed_at is not None and str(out) in str(arguments[0]):
            seen += 1
            if seen == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        run_cases(cases, chosen, Settings(out, dtypes=("float64",), resume=resume))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)


def rows_of(run: Run) -> list[str]:
    """Return rows without how long an evaluation took, which is another number every time."""
    return sorted(map(repr, run.rows.drop(columns="seconds").itertuples(index=False)))


run_cases(cases, chosen, Settings(Path("imported").resolve(), dtypes=("float64",)))  # no fork imports anything anew
in_a_process_of_its_own(resume=False)
unbroken = read_run(out)
changes, others = 0, []
while in_a_process_of_its_own(resume=False, killed_at=changes + 1):
    changes += 1
    if (out / "environment.json").exists():
        read_run(out)
    in_a_process_of_its_own(resume=True, killed_at=changes % 5 + 1)
    in_a_process_of_its_own(resume=True)
    found = read_run(out)
    if rows_of(found) != rows_of(unbroken) or found.summary is None or list(out.rglob("*.partial")):
        others.append(changes)
    if found.environment["backends"] != unbroken.environment["backends"]:
        others.append(f"backends {changes}")
    if changes % 3 == 0:
        shutil.rmtree(out)
print(json.dumps([changes, others]))
