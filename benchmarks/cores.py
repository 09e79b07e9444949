"""What a second processor is worth to judging, and what many would be.

    python benchmarks/cores.py --output results/cores

In every round `attncheck check` judges the bundled corpus on NumPy without a store, once on one processor and once on
all of them, in turn; wall times are of whole commands. What does not spread is the processor time of the harness's own
process, which reads, plans, draws inputs, records and writes the report: its share says what many processors are worth
(Amdahl 1967): 1 / (s + (1 - s) / k) on k of them. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic

from measuring import shown, table

LEAST = 0.8
"""On k processors at least this times k as fast as on one."""

FORETOLD = (4, 8, 16, 32)
_CHECK = """
import resource, sys
from attncheck.cli import main
sys.argv = ["attncheck", *sys.argv[1:]]
try:
    main()
finally:
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(*(of.ru_utime + of.ru_stime for of in each), file=sys.stderr)
"""


@dataclass(frozen=True)
class Measured:
    """One run: seconds by the clock, of the harness's own process, and of the workers and judges that it started."""

    wall: float
    own: float
    others: float

    @property
    def serial(self) -> float:
        """The share of processor time that more processors do not shorten."""
        return self.own / (self.own + self.others)


def measure(arguments: Sequence[str], processors: Collection[int]) -> Measured:
    """Run the command once on these processors."""
    start = monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, "check", *arguments],
        preexec_fn=lambda: os.sched_setaffinity(0, processors),
        capture_output=True,
        text=True,
        check=False,
    )
    wall = monotonic() - start
    if done.returncode not in (0, 1):
        sys.exit(f"attncheck check {' '.join(arguments)} ended with status {done.returncode}: {done.stderr.strip()}")
    own, others = map(float, done.stderr.splitlines()[-1].split())
    return Measured(wall, own, others)


def report(one: Sequence[Measured], every: Sequence[Measured], processors: int) -> list[str]:
    """Write what was measured, whether the limit is kept, and what follows for more processors."""
    rows = [
        [
            name,
            shown([run.wall for run in runs]),
            shown([run.own for run in runs]),
            shown([run.others for run in runs]),
            f"{median(run.serial for run in runs):.1%}",
        ]
        for name, runs in (("1", one), (str(processors), every))
    ]
    faster = [alone.wall / together.wall for alone, together in zip(one, every, strict=True)]
    serial = median(run.serial for run in one)
    kept = "kept" if median(faster) >= LEAST * processors else "missed"
    return [
        *table(("processors", "wall", "own process", "workers and judges", "own share"), rows),
        "",
        f"On {processors} processors {shown(faster, ' times')} as fast as on one. "
        f"At least {LEAST * processors:g} times: {kept}.",
        "",
        f"With a serial share of {serial:.1%}, so many processors are worth:",
        "",
        *table(("processors", "times as fast"), [[str(k), f"{1 / (serial + (1 - serial) / k):.1f}"] for k in FORETOLD]),
    ]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/cores"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("arguments", nargs="*", help="of `attncheck check` (default: --backend numpy)")
    options = parser.parse_args()
    every = os.sched_getaffinity(0)
    if len(every) == 1:
        sys.exit("There is one processor only: nothing can be compared.")
    one, together = [], []
    with tempfile.TemporaryDirectory() as folder:
        arguments = options.arguments or ["--backend", "numpy"]
        arguments = [*arguments, "--no-cache", "--quiet", "--output", str(Path(folder) / "results")]
        for number in range(options.rounds):
            one.append(measure(arguments, {min(every)}))
            together.append(measure(arguments, every))
            walls = f"{one[-1].wall:.1f} s on 1, {together[-1].wall:.1f} s on {len(every)}"
            print(f"round {number + 1}: {walls}", flush=True)
    lines = report(one, together, len(every))
    print("\n".join(["", *lines]))
    options.output.mkdir(parents=True, exist_ok=True)
    text = ["# Cores", "", "Written by `benchmarks/cores.py`; do not edit.", "", *lines, ""]
    (options.output / "cores.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
