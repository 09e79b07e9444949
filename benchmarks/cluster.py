"""What a cluster is worth: two workers of Dask's against one on a campaign of NumPy cases, and one lost midway.

    python benchmarks/cluster.py                  # 500 cases, five runs of each in turn
    python benchmarks/cluster.py --cases 2000 --repeats 9

Starts two clusters on this machine, of one and of two workers, and runs the same drawn cases on each in turn, after a
run that nobody times. Then it runs them here and on the two workers, kills one of these midway with all that belongs to
it, and compares the two reports byte by byte. Needs the extra dask, and a processor for each worker. Exit code 1 where
two workers are not worth what the project asks of them, or a report is another.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, sleep

import psutil

from attncheck import Case, Settings, bundled_implementations, merge_runs, read_runs, run_cases, select_cases
from attncheck.reports.frames import make_frames
from attncheck.reports.write import write_report

MIN_GAIN = 1.7
_START_SECONDS = 60.0
_HEAD = """\
title: Drawn for the benchmark
source: {kind: derivation, title: Drawn}
operation: attention
defaults: {dtypes: [float64, float32]}
cases:
"""
_CASE = """\
  - name: Case {number} is drawn
    random: {{generator: numpy-legacy, seed: {number}}}
    inputs:
      query: {{draw: randn, shape: [1, 2, {queries}, 8]}}
      key: {{draw: randn, shape: [1, 2, {keys}, 8]}}
      value: {{draw: randn, shape: [1, 2, {keys}, 8]}}
"""


@dataclass(frozen=True)
class Cluster:
    """A scheduler and its workers, each with its nanny a process group of its own."""

    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]
    address: str

    def seconds_of_scheduler(self) -> float:
        """Return the CPU time that the scheduler has taken."""
        times = psutil.Process(self.scheduler.pid).cpu_times()
        return float(times.user + times.system)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, compare, print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = drawn_cases(folder, options.cases)
        with started(folder, 1) as one, started(folder, 2) as two:
            is_fast = compare_times(folder, cases, {"one worker": one, "two workers": two}, options.repeats)
            is_same = compare_reports(folder, cases, two)
    return 0 if is_fast and is_same else 1


def drawn_cases(folder: Path, count: int) -> Sequence[Case]:
    """Write and read attention problems of small, unlike shapes."""
    (folder / "drawn").mkdir()
    texts = (_CASE.format(number=number, queries=4 + number % 9, keys=4 + number % 13) for number in range(count))
    (folder / "drawn" / "drawn.yaml").write_text(_HEAD + "".join(texts), encoding="utf-8")
    selection = select_cases(["drawn"], base=folder)
    assert not selection.faults, selection.faults
    return selection.cases


@contextmanager
def started(folder: Path, workers: int) -> Iterator[Cluster]:
    """Start a cluster on this machine, and end it."""
    file = folder / f"scheduler-{workers}.json"
    arguments = ("--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
    cluster = Cluster(_process("scheduler", *arguments), [], str(file))
    try:
        options = ("--scheduler-file", str(file), "--nthreads", "1", "--resources", "numpy=1")
        deadline = perf_counter() + _START_SECONDS
        while not file.exists() and perf_counter() < deadline:
            sleep(0.05)
        cluster.workers.extend(_process("worker", *options, "--local-directory", str(folder)) for _ in range(workers))
        yield Cluster(cluster.scheduler, cluster.workers, _address(file, workers))
    finally:
        for process in (*cluster.workers, cluster.scheduler):
            _kill(process)


def compare_times(folder: Path, cases: Sequence[Case], clusters: dict[str, Cluster], repeats: int) -> bool:
    """Time both clusters in turn; print medians and what client and scheduler take; tell whether two are worth it."""
    seconds: dict[str, list[float]] = {name: [] for name in clusters}
    shares: dict[str, list[float]] = {"client": [], "scheduler": []}
    gains: list[float] = []
    for turn in range(repeats + 1):
        gains.append(gain_of_machine())
        for name, cluster in clusters.items():
            begun, client, scheduler = perf_counter(), process_time(), cluster.seconds_of_scheduler()
            run_campaign(folder / "timed", cases, cluster.address)
            taken = perf_counter() - begun
            if turn:  # before, workers import what they need
                seconds[name].append(taken)
                shares["client"].append((process_time() - client) / taken)
                shares["scheduler"].append((cluster.seconds_of_scheduler() - scheduler) / taken)
    for name, found in seconds.items():
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{name}: median {statistics.median(found):.2f} s of {repeats} runs ({spread}), {len(cases)} cases")
    for name, share in shares.items():
        print(f"{name}: CPU time {100 * statistics.median(share):.0f} % of the time")
    print(f"two processes that only count are {statistics.median(gains):.2f} times as fast as one on this machine now")
    one, two = (statistics.median(found) for found in seconds.values())
    is_kept = one / two >= MIN_GAIN
    print(f"two workers are {one / two:.2f} times as fast; at least {MIN_GAIN}: {'kept' if is_kept else 'missed'}")
    return is_kept


def gain_of_machine() -> float:
    """Return how much faster two processes are than one that share nothing: less where others keep the machine busy."""
    begun = perf_counter()
    for _ in range(2):
        _count().wait()
    middle = perf_counter()
    for process in [_count(), _count()]:
        process.wait()
    return (middle - begun) / (perf_counter() - middle)


def _count() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "for number in range(10_000_000): pass"])


def compare_reports(folder: Path, cases: Sequence[Case], cluster: Cluster) -> bool:
    """Run here, and on a cluster of which a worker is killed midway; tell whether the reports are the same."""

    def kill_one(done: int, total: int) -> None:
        if done >= total // 2 and len(cluster.workers) > 1:
            _kill(cluster.workers.pop())

    run_campaign(folder / "here", cases, None)
    run_campaign(folder / "there", cases, cluster.address, kill_one)
    here, there = (_report(folder / name) for name in ("here", "there"))
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    verdict = (
        f"other than that of a local run: {', '.join(differing)}" if differing else "the same as that of a local run"
    )
    print(f"one of two workers killed midway: the report is {verdict}")
    return not differing


def run_campaign(
    output: Path,
    cases: Sequence[Case],
    address: str | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run cases on NumPy, here or on a cluster."""
    settings = Settings(output, command=("benchmarks/cluster.py",), cluster=address)
    run_cases(cases, bundled_implementations(["numpy"]), settings, on_progress=on_progress)


def _report(output: Path) -> dict[str, bytes]:
    write_report(make_frames(merge_runs(read_runs([output]))), output / "report")
    kinds = (".csv", ".html", ".md", ".xml")
    return {path.name: path.read_bytes() for path in (output / "report").iterdir() if path.suffix in kinds}


def _process(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dask", *arguments, "--no-dashboard"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _address(file: Path, workers: int) -> str:
    """Wait until all workers are there, and return the scheduler's address."""
    from distributed import Client

    with Client(scheduler_file=str(file), timeout=_START_SECONDS, set_as_default=False) as client:
        client.wait_for_workers(workers, timeout=_START_SECONDS)
        return str(client.scheduler.address)


if __name__ == "__main__":
    raise SystemExit(main())
