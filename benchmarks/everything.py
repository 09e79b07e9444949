"""How long every implementation that is installed takes together, and in how much memory.

    python benchmarks/everything.py --output results/everything [--rounds 5] [--cold]

Runs `attncheck check --implementation all` once so that exact answers and what frameworks compile are there, then so
often again, and prints the seconds of whole commands and the peak of memory of all processes together: the
proportional share of every process (PSS), in which pages that several share count once. The import of TensorFlow is
timed in every round besides. ``--cold`` begins with an empty folder for all that is kept. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from measuring import shown, table, timed

from attncheck.common.store import CACHE_VARIABLE

MAX_SECONDS, MAX_GIB = 300.0, 6.0
BETWEEN_LOOKS = 0.5
"""Seconds between looks at the memory."""


@dataclass(frozen=True)
class Measured:
    """One run: seconds by the clock, GiB at most, the most processes at once, and the last line that it printed."""

    wall: float
    memory: float
    processes: int
    ended: str


def memory_of(process: psutil.Process) -> tuple[float, int]:
    """Return the GiB that a process and all below it hold together, and how many they are."""
    held, count = 0, 0
    with suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                held, count = held + each.memory_full_info().pss, count + 1
    return held / 2**30, count


def run_all(output: Path, environment: Mapping[str, str], arguments: Sequence[str]) -> Measured:
    """Run every implementation to its end, and look at its memory meanwhile."""
    return run(["--implementation", "all", "--output", str(output), *arguments], output.parent, environment)[0]


def run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[Measured, str]:
    """Run ``attncheck check`` to its end, and look at its memory meanwhile; return that, and what it printed."""
    command = [sys.executable, "-m", "attncheck", "check", *arguments]
    start, memory, processes = time.monotonic(), 0.0, 0
    with (folder / "printed.txt").open("w+", encoding="utf-8") as printed:
        with subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment) as started:
            watched = psutil.Process(started.pid)
            while started.poll() is None:
                now, count = memory_of(watched)
                memory, processes = max(memory, now), max(processes, count)
                time.sleep(BETWEEN_LOOKS)
        wall = time.monotonic() - start
        printed.seek(0)
        text = printed.read()
    last = (text.strip() or "nothing").splitlines()[-1]
    return Measured(wall, memory, processes, f"exit {started.returncode}: {last[:150]}"), text


def _row(name: str, runs: Sequence[Measured]) -> list[str]:
    seconds, memory = shown([each.wall for each in runs]), shown([each.memory for each in runs], " GiB")
    return [name, seconds, memory, str(max(each.processes for each in runs))]


def report(first: Measured, rounds: Sequence[Measured], imports: Sequence[float]) -> list[str]:
    """Write the table, and whether the runs after the first keep the limits."""
    wall, memory = median(each.wall for each in rounds), max(each.memory for each in rounds)
    return [
        *table(("run", "seconds", "memory", "processes"), [_row("first", [first]), _row("again", rounds)]),
        "",
        f"Beside the import of TensorFlow: {shown(imports)}.",
        f"At most {MAX_SECONDS:g} s: {'kept' if wall <= MAX_SECONDS else 'missed'}.",
        f"At most {MAX_GIB:g} GiB: {'kept' if memory <= MAX_GIB else 'missed'}.",
        f"The last run: {rounds[-1].ended}",
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/everything"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="runs after the first, 1 at least (default: %(default)s)")
    parser.add_argument("--cold", action="store_true", help="begin with an empty folder for all that is kept")
    parser.add_argument("arguments", nargs="*", help="of `attncheck check` (default: none)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **({CACHE_VARIABLE: str(Path(folder) / "kept")} if asked.cold else {})}
        results = Path(folder) / "results"
        first = run_all(results, environment, asked.arguments)
        print(f"first: {first.wall:.0f} s, {first.memory:.1f} GiB, {first.ended}", flush=True)
        imports, rounds = [], []
        for number in range(1, asked.rounds + 1):
            imports.append(timed([sys.executable, "-c", "import tensorflow"], {}).wall)
            rounds.append(run_all(results, environment, asked.arguments))
            print(f"round {number}: {rounds[-1].wall:.0f} s, {rounds[-1].memory:.1f} GiB", flush=True)
    lines = report(first, rounds, imports)
    print("\n".join(lines))
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / "everything.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
