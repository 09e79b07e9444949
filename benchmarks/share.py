"""Whose processor time a check takes: the frameworks', the oracle's and the bounds', or the harness's own.

    pip install py-spy
    python benchmarks/share.py --output results/share

A sampling profile of `attncheck check` and all of its workers. A sample belongs to the first of these that is anywhere
on its stack: a backend (its framework's import and threads too), the oracle, the bounds, and otherwise the harness:
reading, planning, sending, comparing, writing, reporting, and the import of its own libraries. The profiler sees
Python's threads; a compiler's own threads, which are the frameworks', are not counted, so that the harness's true
share is smaller than the one shown. Threads that wait (for an answer, a place, a process) take no processor time and
are left out by what they wait in, as the profiler takes some of them for busy.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

MAX_SHARE = 0.15
"""Of all processor time, the harness's own."""

ORACLE = re.compile(r"harness/attention/(oracle|enclosure|balls|double_words|exact_array)\.py")
BOUNDS = re.compile(r"harness/attention/\w+\.py")
FRAMEWORK = re.compile(r"\((backends/\w+|torch|tensorflow|keras|jax|jaxlib)[/.]|BackendEntry\.load")

WAITING = re.compile(
    r"^(Connection\._recv \(multiprocessing|\w*Selector\.select |Condition\.wait |_worker \(concurrent|"
    r"(_receive_within|_exchange_messages|sleep|Popen\._try_wait|Popen\.poll) \()"
)
"""Innermost functions of threads that wait."""


def is_waiting(stack: str) -> bool:
    """Whether a sample is of a thread that waits."""
    return WAITING.search(stack.rpartition(";")[2]) is not None


def owner(stack: str) -> str:
    """Say whose a sample is."""
    for name, pattern in (("frameworks", FRAMEWORK), ("oracle", ORACLE), ("bounds", BOUNDS)):
        if pattern.search(stack):
            return name
    return "harness"


def inside(stack: str) -> str:
    """Name the innermost of the harness's own functions on a stack."""
    own = [frame for frame in stack.split(";") if re.search(r"\((harness|reports)/", frame)]
    return re.sub(r":\d+\)", ")", own[-1]) if own else "start-up and imports"


def profiled(command: Sequence[str], rate: int) -> Counter[str]:
    """Run a command under the profiler; return samples by stack."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.txt"
        recorder = ["py-spy", "record", "--subprocesses", "--rate", str(rate), "--format", "raw", "--output", str(path)]
        done = subprocess.run([*recorder, "--", *command], capture_output=True, text=True, check=False)
        if not path.is_file():
            sys.exit(f"no profile: {done.stderr.strip() or done.stdout.strip()}")
        samples: Counter[str] = Counter()
        for line in path.read_text(encoding="utf-8").splitlines():
            stack, _, count = line.rpartition(" ")
            samples[stack] += int(count)
        return samples


def report(samples: Counter[str], rate: int) -> list[str]:
    """Write the shares, and the harness's own by function."""
    shares: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for stack, count in samples.items():
        if is_waiting(stack):
            continue
        shares[owner(stack)] += count
        if owner(stack) == "harness":
            functions[inside(stack)] += count
    total = shares.total()
    lines = ["| whose | seconds | share |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {count / rate:.1f} | {count / total:.1%} |" for name, count in shares.most_common()]
    own = shares["harness"] / total
    lines += [
        "",
        f"The harness's own share is {own:.1%} (at most {MAX_SHARE:.0%}: {'kept' if own <= MAX_SHARE else 'missed'}).",
    ]
    lines += ["", "| the harness's own, by function | seconds |", "| --- | ---: |"]
    return lines + [f"| `{name}` | {count / rate:.1f} |" for name, count in functions.most_common(15)]


def main() -> None:
    """Profile, print and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/share"), help="default: %(default)s")
    parser.add_argument("--rate", type=int, default=30, help="samples a second (default: %(default)s)")
    parser.add_argument("arguments", nargs="*", help="of `attncheck check` (default: none)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "attncheck", "check", *options.arguments, "--quiet"]
    lines = report(profiled([*command, "--output", str(options.output / "results")], options.rate), options.rate)
    print("\n".join(lines))
    text = ["# Whose processor time", "", "Written by `benchmarks/share.py`; do not edit.", "", *lines, ""]
    (options.output / "share.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
