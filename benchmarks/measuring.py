"""What benchmarks share: one thread, the time of whole commands, and tables."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def on_one_thread() -> None:
    """Begin anew with libraries on one thread, unless they are: NumPy reads these variables when it is loaded."""
    if any(os.environ.get(name) != "1" for name in _THREADS):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | dict.fromkeys(_THREADS, "1"))


@dataclass(frozen=True)
class Timed:
    """One command: wall time, time to its first printed line, and processor time including child processes."""

    wall: float
    first_line: float
    processor: float
    ended: str


def timed(command: Sequence[str], environment: Mapping[str, str]) -> Timed:
    """Run a command to its end."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        printed = process.stdout.readline()
        first_line = time.monotonic() - start
        printed += process.stdout.read()
        code = process.wait()
        errors.seek(0)
        said = errors.read()
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = (printed.strip() or said.strip() or "nothing").splitlines()[-1]
    return Timed(wall, first_line, processor, f"exit {code}: {last[:150]}")


def shown(numbers: Sequence[float], unit: str = " s") -> str:
    """Write the median, with the least and the largest; empty if nothing was measured."""
    if any(map(math.isnan, numbers)):
        return ""
    return f"{median(numbers):.3g}{unit} ({min(numbers):.3g} to {max(numbers):.3g})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in Markdown."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
