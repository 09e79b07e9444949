"""The mutation score in several processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from attncheck.mutation.catalogue import CONTROLS, EQUIVALENT, SUBJECTS
from attncheck.mutation.score import run_mutants
from attncheck.mutation.workers import in_processes
from attncheck.reading.selection import select_cases

NAMES = ("scale_missing", "softcap_ignored", "keys_reversed", "tail_dropped_after_blocks_of_32", "reference")


def test_several_processes_find_what_one_finds() -> None:
    cases = [*select_cases(["softcap.yaml"]).cases[:4], *select_cases(["probes/long_rows.yaml"]).cases[:1]]
    subjects = [*(SUBJECTS[name] for name in NAMES), *CONTROLS[:2], *EQUIVALENT[:1]]
    alone = run_mutants(cases, (0, 1), subjects=subjects)
    with in_processes(2) as scorers:
        together = run_mutants(cases, (0, 1), scorers=scorers, subjects=subjects)
    pd.testing.assert_frame_equal(alone.evaluations, together.evaluations)
    pd.testing.assert_frame_equal(alone.subjects, together.subjects)
    assert alone.subjects["named"].any()


@pytest.mark.skipif(sys.platform != "linux", reason="the processes of others are listed in /proc")
def test_no_process_outlives_the_one_that_asks_even_if_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "from attncheck.mutation.workers import in_processes\n"
        "if __name__ == '__main__':\n"
        "    with in_processes(1) as scorers:\n"
        "        print(scorers.pool.submit(os.getpid).result(), flush=True)\n"
        "        time.sleep(600)\n"
    )
    (tmp_path / "asks.py").write_text(code)
    with subprocess.Popen([sys.executable, str(tmp_path / "asks.py")], stdout=subprocess.PIPE, text=True) as asks:
        assert asks.stdout is not None
        worker = Path(f"/proc/{int(asks.stdout.readline())}")
        assert worker.exists()
        asks.kill()
    deadline = time.monotonic() + 60
    while _runs(worker):
        assert time.monotonic() < deadline, "the worker still runs"
        time.sleep(0.05)


def _runs(process: Path) -> bool:
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # it has ended, and nobody has asked for its exit code yet
