"""Workers on this machine: no more alive than may be, whatever the plan, and the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.backends import BackendEntry
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.execution.limits import Limits
from attncheck.executors import local
from attncheck.reading.selection import select_cases
from attncheck.results.reader import read_run
from attncheck.run import Settings, run_cases

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


@pytest.mark.parametrize(("workers", "window", "starts"), [(1, 3, 9), (1, 100, 3), (3, 3, 3)])
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
    entries = [make_backend(name, source) for name in ("one", "two", "three")]
    chosen = ImplementationSelection(tuple(map(Implementation, entries)))
    monkeypatch.setattr(local, "WINDOW", window)
    cases = select_cases(["small"], base=tmp_path).cases
    summary = run_cases(cases, chosen, Settings(tmp_path / "out", limits=Limits(workers=workers)))
    assert summary.exit_code == 0
    counts = [int(count) for count in (tmp_path / "alive").read_text().split()]
    assert max(counts) <= workers
    assert len(counts) == starts  # 4 cases in 2 dtypes are 3 windows of 3 units
    rows = read_run(tmp_path / "out").rows
    assert len(rows[["case", "dtype", "implementation"]].drop_duplicates()) == 4 * 2 * 3
    assert set(rows["verdict"]) == {"agree"}
