"""Whether a campaign of many small cases runs as fast, case by case, and in as little memory as one of few.

    python benchmarks/scale.py --output results/scale

Writes case files, runs them on NumPy with `attncheck run`, and measures each run as a command of its own: cases per
second, reading the files included, and the resident memory of the largest of its processes. Few and many are run in
turn. The report, of pandas frames, is part of it with `--command check`; `million_rows.py` measures it alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PER_FILE = 500
MAX_SLOWDOWN, MAX_GROWTH = 0.10, 200
"""Of the rate; MiB."""

HEAD = """title: Small cases
source: {{kind: derivation, title: Made for a measurement}}
operation: softmax
defaults:
  dtypes: [float64]
  random: {{generator: numpy-legacy, seed: {seed}}}
cases:
"""
CASE = """  - name: Small case {number}
    inputs: {{scores: {{draw: randn, shape: [4, 8]}}}}
"""


@dataclass(frozen=True)
class Measured:
    """One run: cases a second, and MiB of memory at most."""

    rate: float
    memory: float


def write_cases(count: int, folder: Path) -> Path:
    """Write so many cases, some hundreds a file."""
    folder.mkdir(parents=True)
    for first in range(0, count, PER_FILE):
        numbers = range(first, min(first + PER_FILE, count))
        text = HEAD.format(seed=first) + "".join(CASE.format(number=number) for number in numbers)
        (folder / f"part-{first // PER_FILE:05d}.yaml").write_text(text, encoding="utf-8")
    return folder


def measure(name: str, cases: Path, count: int, output: Path) -> Measured:
    """Run the cases once with the command of a name."""
    command = [sys.executable, "-m", "attncheck", name, str(cases), "--backend", "numpy", "--quiet"]
    command += ["--keep-arrays", "disagreeing", "--output", str(output)]
    start = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)  # the largest process: the harness, or its worker
    seconds = time.monotonic() - start
    if status:
        sys.exit(f"{' '.join(command)} ended with status {status}")
    return Measured(count / seconds, usage.ru_maxrss / 1024)


def table(found: dict[int, list[Measured]]) -> list[str]:
    """Write medians, with the least and the largest, and whether the limits are kept."""
    lines = ["| cases | runs | cases a second | memory, MiB |", "| ---: | ---: | ---: | ---: |"]
    for count, runs in found.items():
        rate, memory = _shown([each.rate for each in runs]), _shown([each.memory for each in runs])
        lines.append(f"| {count:,} | {len(runs)} | {rate} | {memory} |")
    few, many = found.values()
    slower = 1 - median(each.rate for each in many) / median(each.rate for each in few)
    growth = median(each.memory for each in many) - median(each.memory for each in few)
    return [
        *lines,
        "",
        f"The rate {'falls' if slower > 0 else 'rises'} by {abs(slower):.1%}; it may fall by {MAX_SLOWDOWN:.0%}: "
        f"{_verdict(slower <= MAX_SLOWDOWN)}.",
        f"Memory grows by {growth:.0f} MiB, of at most {MAX_GROWTH}: {_verdict(growth <= MAX_GROWTH)}.",
    ]


def _shown(numbers: Sequence[float]) -> str:
    return f"{median(numbers):.0f} ({min(numbers):.0f} to {max(numbers):.0f})"


def _verdict(kept: bool) -> str:
    return "kept" if kept else "missed"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/scale"), help="default: %(default)s")
    parser.add_argument("--few", type=int, default=1000, help="cases of a small campaign (default: %(default)s)")
    parser.add_argument("--many", type=int, default=100_000, help="cases of a large one (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--command", choices=("run", "check"), default="run", help="default: %(default)s")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found: dict[int, list[Measured]] = {options.few: [], options.many: []}
    with tempfile.TemporaryDirectory() as name:
        folders = {count: write_cases(count, Path(name) / str(count)) for count in found}
        for number in range(options.rounds):
            for count, runs in found.items():
                runs.append(measure(options.command, folders[count], count, Path(name) / "results"))
                rate, memory = runs[-1].rate, runs[-1].memory
                print(f"round {number + 1}, {count:,} cases: {rate:.0f} a second, {memory:.0f} MiB", flush=True)
    lines = table(found)
    print("\n".join(["", *lines]))
    text = ["# Scale", "", "Written by `benchmarks/scale.py`; do not edit.", "", *lines, ""]
    (options.output / "scale.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
