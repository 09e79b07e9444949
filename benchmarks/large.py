"""What judging one head of 32,768 queries and keys costs, beside the kernel that is judged, on one thread.

    python benchmarks/large.py --output results/large

The kernel is torch's scaled_dot_product_attention as ``torch.sdpa`` calls it, the case that of
``benchmarks/large_cases/causal.yaml``: D = 64, float32, judged on 64 rows. Times are CPU times, taken in turn in the
same rounds; memory is the resident set of a fresh process, looked at every few milliseconds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measuring import on_one_thread, table
from numpy.typing import NDArray

from attncheck.backends import BACKENDS
from attncheck.execution.worker import Computed
from attncheck.judging.judge import judge_case
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, make_inputs
from attncheck.reading.selection import select_cases

_CASE = Path(__file__).parent / "large_cases" / "causal.yaml"
_DTYPE, _CLASS, _RETURNED = "float32", "native", ("output",)
_MAX_TIMES_KERNEL, _MAX_MEMORY = 6.0, 2**30
_LOOK_EVERY_SECONDS = 0.002


@dataclass(frozen=True)
class Round:
    """CPU seconds of one round."""

    kernel: float
    oracle: float
    bounds: float
    judging: float


def the_case() -> tuple[Case, RoundedInputs]:
    """Return the case and its inputs."""
    (case,) = select_cases([str(_CASE)]).cases
    return case, make_inputs(case, _DTYPE)


def kernel_of(inputs: RoundedInputs) -> Callable[[], NDArray[Any]]:
    """Return the kernel's call, as the implementation torch.sdpa makes it, on one thread."""
    backend = BACKENDS["torch"].load("sdpa")
    backend.prepare(_DTYPE, 1)
    tensors = [backend.from_numpy(inputs.arrays[name]) for name in ("query", "key", "value")]
    return lambda: backend.to_numpy(backend.attention(*tensors, is_causal=True)["output"])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returned."""
    start = time.process_time()
    found = call()
    return time.process_time() - start, found


def one_round(case: Case, inputs: RoundedInputs, kernel: Callable[[], NDArray[Any]]) -> Round:
    """Time the kernel, what is true, how far off it may be, and all of judging."""
    kernel_seconds, output = timed(kernel)
    oracle, truth = timed(lambda: truth_of_case(case, inputs, _RETURNED))
    bounds, _ = timed(lambda: truth.bounds.bounds_by_stage(_CLASS))
    outcomes, classes = {"torch.sdpa": Computed({"output": output})}, {"torch.sdpa": _CLASS}
    judging, judged = timed(lambda: judge_case(case, _DTYPE, inputs, outcomes, classes))
    if judged.has_disagreement:
        sys.exit(f"the kernel is judged to be wrong: {judged.rows}")
    return Round(kernel_seconds, oracle, bounds, judging)


def shown(numbers: Sequence[float]) -> str:
    """Write the median, and the smallest and largest in brackets."""
    return f"{np.median(numbers):.3g} ({min(numbers):.3g} to {max(numbers):.3g})"


def times_table(rounds: Sequence[Round]) -> list[str]:
    """Compare with the kernel, round by round."""
    kernel = [each.kernel for each in rounds]
    parts: Mapping[str, list[float]] = {
        "the kernel": kernel,
        "oracle": [each.oracle for each in rounds],
        "bounds": [each.bounds for each in rounds],
        "oracle and bounds": [each.oracle + each.bounds for each in rounds],
        "judging in all": [each.judging for each in rounds],
    }
    rows = []
    for name, seconds in parts.items():
        ratios = [own / of_kernel for own, of_kernel in zip(seconds, kernel, strict=True)]
        limit = ""
        if name == "oracle and bounds":
            limit = f"{_MAX_TIMES_KERNEL:g}: {'kept' if np.median(ratios) <= _MAX_TIMES_KERNEL else 'missed'}"
        rows.append((name, shown(seconds), shown(ratios), limit))
    return table((f"{len(rounds)} rounds", "CPU s", "times the kernel", "at most"), rows)


def limits_table(case: Case, inputs: RoundedInputs) -> list[str]:
    """Say what takes the time of oracle and bounds."""
    profile = cProfile.Profile()
    profile.runcall(lambda: truth_of_case(case, inputs, _RETURNED).bounds.bounds_by_stage(_CLASS))
    entries = pstats.Stats(profile).stats  # type: ignore[attr-defined] # it is there, and without types
    total = sum(own for _, _, own, _, _ in entries.values())
    largest = sorted(entries.items(), key=lambda entry: -entry[1][2])[:8]
    rows = [
        (f"{Path(file).name}, line {line}, {name}" if line else name, f"{100 * own / total:.0f} %", f"{calls:,}")
        for (file, line, name), (_, calls, own, _, _) in largest
    ]
    return table(("what takes the time of oracle and bounds", "share, profiled", "calls"), rows)


def memory_table() -> list[str]:
    """Measure the memory above the inputs in a process of its own."""
    rows = []
    for what in ("oracle and bounds", "judging in all"):
        command = [sys.executable, __file__, "--memory", what]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        verdict = "kept" if found["above"] <= _MAX_MEMORY else "missed"
        limit = f"{_MAX_MEMORY / 2**20:.0f}: {verdict}" if what == "oracle and bounds" else ""
        rows.append((what, *(f"{found[name] / 2**20:.0f}" for name in ("inputs", "above")), limit))
    return table(("peak memory, MiB", "arrays of the inputs", "above what the process held with them", "at most"), rows)


def memory_above(what: str) -> dict[str, int]:
    """Return how many bytes the inputs take, and the largest resident set while judging above that before it."""
    case, inputs = the_case()
    output = np.zeros_like(inputs.arrays["query"])

    def work() -> object:
        if what == "judging in all":
            return judge_case(
                case, _DTYPE, inputs, {"torch.sdpa": Computed({"output": output})}, {"torch.sdpa": _CLASS}
            )
        truth: Truth = truth_of_case(case, inputs, _RETURNED)
        return truth.bounds.bounds_by_stage(_CLASS)

    process, done, seen = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def look() -> None:
        while not done.wait(_LOOK_EVERY_SECONDS):
            seen.append(process.memory_info().rss)

    looking = threading.Thread(target=look)
    looking.start()
    work()
    done.set()
    looking.join()
    return {"inputs": sum(array.nbytes for array in inputs.arrays.values()), "above": max(seen) - before}


def main() -> None:
    """Measure, print and write the tables."""
    on_one_thread()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/large"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory_above(options.memory)))
        return
    case, inputs = the_case()
    kernel = kernel_of(inputs)
    one_round(case, inputs, kernel)  # what is imported and set up at the first call is no part of it
    rounds = [one_round(case, inputs, kernel) for _ in range(options.rounds)]
    lines = ["# Large shapes", "", "Written by `benchmarks/large.py`; do not edit. Medians, extremes in brackets.", ""]
    lines += [f"{case.id}, {_DTYPE}", "", *times_table(rounds), "", *memory_table(), "", *limits_table(case, inputs)]
    print("\n".join(lines))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "large.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"\nReport: {options.output / 'large.md'}")


if __name__ == "__main__":
    main()
