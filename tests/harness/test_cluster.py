"""Runs on a Dask cluster of real processes: the same report as here, whatever happens to the workers."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE, wait_until
from tables import tables_beside

from attncheck.backends import BackendEntry
from attncheck.common.errors import ClusterError, ExitCode, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, ImplementationSelection, make_user_entry
from attncheck.execution.runner import WorkerGroup
from attncheck.execution.user_code import Target
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.selection import select_cases
from attncheck.reports.frames import make_frames
from attncheck.reports.merge import merge_runs
from attncheck.reports.write import write_report
from attncheck.results.reader import Run, read_run, read_runs
from attncheck.run import RunSummary, Settings, run_cases

distributed = pytest.importorskip("distributed", reason="the extra dask is not installed")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are killed as POSIX systems kill")

RESOURCES = "numpy=1 first=1 second=1 wrong=1 killer=1"
TEXTS = tables_beside(__file__)["cluster"]


class Processes:
    """A scheduler, and workers that each stand for a machine: one process group with its nanny."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",
            "DASK_DISTRIBUTED__ADMIN__LOG_LENGTH": "10",
        }
        self.workers: list[subprocess.Popen[bytes]] = []
        self.started = 0
        file = folder / "scheduler.json"
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
        self.client = distributed.Client(scheduler_file=str(file), timeout=PATIENCE, set_as_default=False)
        self.address: str = self.client.scheduler.address

    def have(self, count: int) -> None:
        """See to it that so many workers are there, and answer: the scheduler may still count one that has died."""
        self.workers = [process for process in self.workers if process.poll() is None]
        for _ in range(count - len(self.workers)):
            self.started += 1
            options = ("--nthreads", "1", "--resources", RESOURCES, "--local-directory", str(self.folder))
            self.workers.append(self._start("worker", self.address, *options))
        for _ in range(len(self.workers) - count):
            self.kill(self.workers.pop())
        wait_until(lambda: len(self._answering()) == len(self.client.scheduler_info()["workers"]) == count)

    def _answering(self) -> Mapping[str, int]:
        answers: Mapping[str, int] = self.client.run(os.getpid, on_error="ignore")
        return answers

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process with all that belongs to it, at once."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        self.client.close()
        for process in (*self.workers, self.scheduler):
            with suppress(ProcessLookupError):
                self.kill(process)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{arguments[0]}-{self.started}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments, "--no-dashboard"],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class Runs:
    """Runs of the small cases, here and on the cluster, in one folder: the path of a list of failures is in reports."""

    def __init__(self, folder: Path, right: BackendEntry, wrong: BackendEntry, killer: BackendEntry) -> None:
        self.folder, self.both, self.wrong, self.killer = folder, (right, wrong), wrong, killer
        self.right = right
        self.processes = Processes(folder)
        (folder / "known.yaml").write_text(TEXTS["known"])
        self.here = self.run("here", *self.both)

    def run(
        self,
        name: str,
        *entries: BackendEntry,
        cluster: str | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        **settings: Any,
    ) -> tuple[RunSummary, Run]:
        """Run the small cases on some backends, and read back what was written."""
        expected_failures = load_expected_failures([self.folder / "known.yaml"])
        given = {"expected_failures": expected_failures, "complete": True, "command": ["attncheck", "check"]} | settings
        chosen = ImplementationSelection(tuple(map(Implementation, entries)))
        cases = select_cases(["small"], base=self.folder).cases
        asked = Settings(self.folder / name, cluster=cluster, **given)
        return run_cases(cases, chosen, asked, on_progress=on_progress), read_run(self.folder / name)

    def on_cluster(self, name: str, *entries: BackendEntry, workers: int, **more: Any) -> tuple[RunSummary, Run]:
        self.processes.have(workers)
        return self.run(name, *entries, cluster=self.processes.address, **more)

    def assert_same_report(self, name: str) -> None:
        expected, found = report(self.folder / "here"), report(self.folder / name)
        assert {"report.md", "report.html", "junit.xml", "results.csv"} <= expected.keys() == found.keys()
        assert [name for name in expected if found[name] != expected[name]] == []


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    write_backend: Callable[..., BackendEntry],
    write_small: Callable[[Path], Path],
    honest: tuple[BackendEntry, BackendEntry],
) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("cluster")
    write_small(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        made = Runs(
            folder,
            honest[0],
            write_backend(folder, "wrong", TEXTS["wrong"]),
            write_backend(folder, "killer", TEXTS["killer"]),
        )
        yield made
        made.processes.end()


_TIMES = re.compile(rb' time(stamp)?="[^"]*"')
"""When a run began and how long it took: two runs differ in nothing else."""


def report(directory: Path) -> dict[str, bytes]:
    """Return every file of the report of a run."""
    folder = directory / "report"
    write_report(make_frames(merge_runs(read_runs([directory]))), folder)
    files = [path for path in folder.iterdir() if path.suffix in (".md", ".html", ".xml", ".csv")]
    return {path.name: _TIMES.sub(b"", path.read_bytes()) for path in files}


def units_of(found: Run) -> list[tuple[str, str, str]]:
    stages = found.rows[found.rows["comparison"] == "stage"].drop_duplicates(["case", "dtype", "implementation"])
    return sorted(zip(stages["case"], stages["dtype"], stages["implementation"], strict=True))


def test_a_run_on_a_cluster_comes_to_the_report_of_a_run_here(runs: Runs) -> None:
    heard: list[tuple[int, int]] = []
    there, remote = runs.on_cluster("there", *runs.both, workers=2, on_progress=lambda *each: heard.append(each))
    summary, local = runs.here
    assert summary.exit_code == ExitCode.DISAGREE
    assert {row.verdict for row in summary.failures} >= {"numeric", "xpass"}
    assert there == summary
    assert (heard[0], heard[-1]) == ((0, 16), (16, 16))
    runs.assert_same_report("there")
    assert remote.arrays().keys() == local.arrays().keys()
    cluster = {"workers": 2, "threads": 2, "machines": 1, "resources": {RESOURCES: 2}}
    assert remote.environment == {**local.environment, "cluster": cluster, "started": remote.environment["started"]}


def test_one_of_two_workers_is_killed_midway_and_nothing_is_lost_or_told_twice(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    runs.processes.have(2)
    capfd.readouterr()

    def kill(done: int, total: int) -> None:
        if done and len(runs.processes.workers) == 2:
            assert done < total
            runs.processes.kill(runs.processes.workers.pop())

    there, _ = runs.on_cluster("killed", *runs.both, workers=2, on_progress=kill)
    assert capfd.readouterr() == ("", "")
    assert [process.poll() for process in runs.processes.workers] == [None]
    runs.processes.have(1)  # a worker that its nanny has just replaced takes a while to be known
    assert there == runs.here[0]
    runs.assert_same_report("killed")


def test_a_case_that_kills_workers_is_one_crash(runs: Runs) -> None:
    settings = {"dtypes": ("float64",), "expected_failures": ()}
    summary, found = runs.on_cluster("crash", runs.right, runs.killer, workers=2, **settings)
    crashes = found.rows[found.rows["verdict"] == "crash"]
    assert list(zip(crashes["case"], crashes["implementation"], strict=True)) == [
        ("small/small/b-weights", "killer.eager")
    ]
    # Dask gives it up after two deaths here, and then it is tried alone.
    assert "worker died 4 times with this evaluation" in crashes["message"].item()
    assert (summary.exit_code, summary.evaluations, len(units_of(found))) == (ExitCode.NOT_RUN, 8, 8)
    assert set(found.rows[found.rows["verdict"] != "crash"]["verdict"]) == {"agree"}


def test_what_no_worker_offers_or_has_in_another_version_is_named_before_anything_runs(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attncheck.executors.dask import tasks

    entry = replace(runs.right, resources={"GPU": 1})
    with pytest.raises(UsageError) as error:
        runs.on_cluster("offers", entry, workers=1)
    message = str(error.value)
    assert "offers first=1 GPU=1, which first.eager needs; workers and their resources: tcp://127.0.0.1" in message
    start = f"start one with: dask worker {runs.processes.address} --nthreads 1 "
    assert f": {RESOURCES}; {start}" in message
    assert message.endswith("--resources 'first=1 GPU=1'")
    assert not (runs.folder / "offers").exists()
    there = tasks.package_version("numpy")
    monkeypatch.setattr(
        tasks, "package_version", lambda name, found=tasks.package_version: "0.1" if name == "numpy" else found(name)
    )
    with pytest.raises(UsageError, match=f"has other versions than this machine: numpy: {there} there, 0.1 here; ins"):
        runs.on_cluster("other", runs.right, workers=1)


def test_without_workers_a_run_waits_for_a_while_and_gives_up(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from attncheck.executors.dask import driver

    monkeypatch.setattr(driver, "MAX_SECONDS_WITHOUT_WORKER", 0.5)
    monkeypatch.setattr(driver, "SECONDS_BETWEEN_CHECKS", 0.1)

    def kill(done: int, total: int) -> None:
        if done and runs.processes.workers:
            runs.processes.kill(runs.processes.workers.pop())

    with pytest.raises(ClusterError, match=r"no worker is left for 0\.5 s; start one with: dask worker tcp://"):
        runs.on_cluster("none", runs.wrong, workers=1, on_progress=kill)


def test_a_lost_cluster_is_told_in_one_line_and_what_was_judged_is_kept(runs: Runs) -> None:
    # The last one that needs the cluster.
    def kill(done: int, total: int) -> None:
        if done and runs.processes.scheduler.poll() is None:
            runs.processes.kill(runs.processes.scheduler)

    with pytest.raises(ClusterError, match=r"is lost: .* what was judged is on disk, and the same command with --res"):
        runs.on_cluster("lost", *runs.both, workers=1, on_progress=kill)
    assert ClusterError.exit_code == ExitCode.NOT_RUN
    assert 0 < len(units_of(read_run(runs.folder / "lost"))) < 16


def test_a_full_disk_of_a_worker_ends_the_run_in_one_line_that_says_how_to_go_on() -> None:
    from types import SimpleNamespace

    from attncheck.executors.dask.driver import _Driver

    driver: Any = SimpleNamespace(cluster=SimpleNamespace(address="tcp://host:1"), _in_flight={})
    failed = SimpleNamespace(exception=lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(ClusterError, match=r"a worker cannot go on: OSError: .*No space .* --resume"):
        _Driver._handle_failed_batch(driver, failed)  # type: ignore[arg-type]


def test_a_worker_that_joins_late_with_another_file_computes_nothing(tmp_path: Path) -> None:
    from attncheck.executors.dask.tasks import JobContext, check_versions, find_installed_versions, required_sources
    from attncheck.judging.units import Judge

    kernel = tmp_path / "kernel.py"
    kernel.write_text("def attention(query, key, value): return value")
    implementation = Implementation(make_user_entry(Target.parse(f"{kernel}:attention"), {}, "numpy"), "attention")
    group = WorkerGroup(implementation, ("float64",))
    versions = {
        0: find_installed_versions(required_sources([group])),
        -1: find_installed_versions(required_sources([])),
    }
    job = JobContext("run", (group,), Judge((implementation,)), Limits(), True, 1, versions)
    check_versions(job, 0)
    kernel.write_text("def attention(query, key, value): return -value")
    check_versions(job, -1)
    with pytest.raises(UsageError, match=rf"joined the cluster has other versions: {kernel}: \w+ there, \w+ here$"):
        check_versions(job, 0)
    kernel.unlink()
    with pytest.raises(UsageError, match=r"kernel\.py: nothing there"):
        check_versions(job, 0)


def test_without_a_scheduler_or_dask_a_run_is_refused_in_one_line(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from attncheck.executors.dask import connection

    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(connection, "CONNECT_SECONDS", 0.5)
        for address in ("tcp://127.0.0.1:1", "nonsense", ""):
            with pytest.raises(UsageError, match=r"no Dask scheduler answers at .*expected the address that"):
                runs.run("out", *runs.both, cluster=address)
    assert capfd.readouterr().err == ""
    gc.collect()  # what earlier tests left of Dask imports from it when it goes
    for name in [name for name in sys.modules if name.startswith("attncheck.executors.dask")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"--cluster needs the extra dask: pip install 'attncheck\[dask\]'"):
        runs.run("out", *runs.both, cluster="tcp://127.0.0.1:1")
