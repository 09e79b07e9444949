"""What the truth costs, as ratios of CPU times measured side by side in one run, on one thread.

    python benchmarks/cost.py --output results/cost

CPU time, not wall time: it hardly depends on who else uses the machine. What is compared is timed in turn, several
times over, and each figure is the median of its times, with the quartiles beside it.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measuring import on_one_thread, table
from numpy.typing import NDArray

from attncheck.attention.bounds import bound_accumulated_errors, bound_introduced_errors
from attncheck.attention.oracle import enclose_exact_stages, evaluate_from_returned_stages
from attncheck.attention.problem import Computation, OutsideDomain
from attncheck.backends import EAGER, numpy_backend
from attncheck.reading.inputs import convert_inputs, make_exact_inputs, make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.reading.selection import select_cases
from attncheck.spec.classes import rounding_model_named

Arrays = dict[str, NDArray[Any]]
Call = Callable[[], object]

_MIN_SECONDS = 0.005
"""A timing shorter than this is of several calls: the clock, and whatever else a process does, would show in it."""

_LARGE = (1, 4, 128, 64)
_ORACLE_SHAPES = ((1, 1, 4, 3), (1, 1, 16, 16), (1, 1, 64, 64), _LARGE)
_MAX_FOR_OUTPUT, _MAX_FOR_ALL = 15.0, 40.0


@dataclass(frozen=True)
class Times:
    """Seconds of CPU for one call, one number for each repetition."""

    seconds: NDArray[np.float64]

    @property
    def median(self) -> float:
        """The middle one."""
        return float(np.median(self.seconds))

    def shown(self, unit: float = 1e3) -> str:
        """Write median and quartiles, in milliseconds unless said otherwise."""
        low, middle, high = np.quantile(self.seconds * unit, (0.25, 0.5, 0.75))
        return f"{middle:.3g} ({low:.3g} to {high:.3g})"

    def over(self, other: Times) -> str:
        """Write median and quartiles of the ratio to what was timed in the same rounds."""
        return Times(self.seconds / other.seconds).shown(1)


def measure(calls: Mapping[str, Call], repetitions: int) -> dict[str, Times]:
    """Time calls in turn, so that what slows the machine for a while slows all of them."""
    counts = {name: max(1, math.ceil(_MIN_SECONDS / _timed(call, 2))) for name, call in calls.items()}
    rounds = [{name: _timed(call, counts[name]) for name, call in calls.items()} for _ in range(repetitions)]
    return {name: Times(np.array([each[name] for each in rounds])) for name in calls}


def _timed(call: Call, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return max(time.process_time() - start, 1e-9) / count


def plain_attention(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    """Evaluate attention in float64 as plainly as NumPy can; what everything is measured by."""
    scores = query @ np.swapaxes(key, -1, -2) * (1 / math.sqrt(query.shape[-1]))
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output: NDArray[Any] = exponentials / exponentials.sum(axis=-1, keepdims=True) @ value
    return output


def _every_stage(inputs: Arrays) -> Arrays:
    return numpy_backend.attention(inputs["query"], inputs["key"], inputs["value"])


def bounds_cost(repetitions: int) -> list[str]:
    """Compare B and sigma with a plain evaluation."""
    inputs = _random_inputs(_LARGE)
    exact = {name: enclosure.high for name, enclosure in enclose_exact_stages(Problem("attention", {}, inputs)).items()}
    returned = _every_stage(inputs)
    rounding, problem = (
        rounding_model_named("native", "float64"),
        Computation.from_problem(Problem("attention", {}, inputs)),
    )

    def accumulated(stages: Sequence[str] | None) -> Call:
        return lambda: bound_accumulated_errors(Problem("attention", {}, inputs), rounding, exact, stages)

    def introduced() -> None:
        for stage in returned:
            bound_introduced_errors(problem, rounding, returned, {stage: exact[stage]})

    calls: dict[str, Call] = {
        "plain": lambda: plain_attention(**inputs),
        "backend": lambda: _every_stage(inputs),
        "output": accumulated(("output",)),
        "all": accumulated(None),
        "introduced": introduced,
    }
    times = measure(calls, repetitions)
    lines = [
        ("plain float64 NumPy", "plain", ""),
        ("the NumPy backend, which returns every stage", "backend", ""),
        ("B and sigma of the output alone", "output", _verdict(times["output"], times["plain"], _MAX_FOR_OUTPUT)),
        ("B and sigma of all stages", "all", _verdict(times["all"], times["plain"], _MAX_FOR_ALL)),
        ("B and sigma of all stages' own steps", "introduced", ""),
    ]
    rows = [(text, times[name].shown(), times[name].over(times["plain"]), remark) for text, name, remark in lines]
    return table(("at " + _shown(_LARGE), "CPU ms", "times plain", "at most"), rows)


def _verdict(times: Times, plain: Times, most: float) -> str:
    ratio = Times(times.seconds / plain.seconds).median
    return f"{most:g}: {'kept' if ratio <= most else 'missed'}"


def oracle_cost(repetitions: int) -> list[str]:
    """Compare the oracle with a plain evaluation, for the output alone and for every stage."""
    rows = []
    for shape in _ORACLE_SHAPES:
        times = measure(_oracle_calls(_random_inputs(shape)), repetitions)
        asked = (times[name].over(times["plain"]) for name in ("output", "every", "steps"))
        rows.append((_shown(shape), times["plain"].shown(), times["every"].shown(), *asked))
    heads = ("(B, H, L, D)", "plain CPU ms", "oracle, all stages, CPU ms", "output alone, times plain")
    return table((*heads, "all stages, times plain", "one implementation's own steps, times plain"), rows)


def _oracle_calls(inputs: Arrays) -> dict[str, Call]:
    returned, problem = _every_stage(inputs), Computation.from_problem(Problem("attention", {}, inputs))
    return {
        "plain": lambda: plain_attention(**inputs),
        "output": lambda: enclose_exact_stages(Problem("attention", {}, inputs), ("output",)),
        "every": lambda: enclose_exact_stages(Problem("attention", {}, inputs)),
        "steps": lambda: [evaluate_from_returned_stages(problem, returned, [stage]) for stage in returned],
    }


def corpus_cost(repetitions: int, patterns: Sequence[str]) -> list[str]:
    """Compare oracle and bounds of the bundled corpus with the import of TensorFlow."""
    oracle, bounds = [], []
    for case in select_cases(patterns).cases:
        exact_inputs = make_exact_inputs(case)
        for dtype in case.dtypes:
            plain = make_problem_of_case(case, convert_inputs(case, exact_inputs, dtype)).without_layout().canonical()
            try:
                times = _case_times(plain, dtype, repetitions)
            except OutsideDomain:
                continue
            oracle.append((times["oracle"].median, case.id, dtype))
            bounds.append((times["bounds"].median, case.id, dtype))
    imports = [_import_seconds("tensorflow") for _ in range(3)]
    rows = [_corpus_row("oracle", oracle), _corpus_row("bounds", bounds)]
    rows.append(("importing TensorFlow", "", "", f"{np.median(imports):.3g}" if imports[0] else "not installed", ""))
    count = f"{len(oracle):,} cases and dtypes"
    return table((count, "median, CPU ms", "largest, CPU ms", "sum, CPU s", "largest is"), rows)


def _case_times(problem: Problem, dtype: str, repetitions: int) -> dict[str, Times]:
    def anew() -> Problem:  # a problem keeps what was made of it
        return Problem(problem.operation, problem.options, problem.inputs)

    exact = {name: enclosure.high for name, enclosure in enclose_exact_stages(anew()).items()}
    rounding = rounding_model_named(EAGER[dtype], dtype)
    return measure(
        {
            "oracle": lambda: enclose_exact_stages(anew()),
            "bounds": lambda: bound_accumulated_errors(anew(), rounding, exact),
        },
        repetitions,
    )


def _corpus_row(name: str, found: Sequence[tuple[float, str, str]]) -> tuple[str, ...]:
    seconds = np.array([each[0] for each in found])
    largest, case, dtype = max(found)
    return (
        f"{name}, every stage",
        f"{np.median(seconds) * 1e3:.3g}",
        f"{largest * 1e3:.3g}",
        f"{seconds.sum():.3g}",
        f"{case}, {dtype}",
    )


def _import_seconds(package: str) -> float:
    """Return the CPU seconds of a fresh Python that imports a package, less those of one that imports nothing."""
    used = []
    for code in ("pass", f"import {package}"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        if done.returncode:
            return 0.0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return used[1] - used[0]


def _random_inputs(shape: tuple[int, ...]) -> Arrays:
    random = np.random.RandomState(0)
    return {name: random.randn(*shape) for name in ("query", "key", "value")}


def _shown(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def main() -> None:
    """Measure, print and write the tables."""
    on_one_thread()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/cost"), help="default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=15, help="of each timing (default: %(default)s)")
    parser.add_argument("--case-repetitions", type=int, default=3, help="of each bundled case (default: %(default)s)")
    parser.add_argument("patterns", nargs="*", help="which bundled cases (default: all)")
    options = parser.parse_args()
    parts: dict[str, Callable[[], list[str]]] = {
        "Bounds": lambda: bounds_cost(options.repetitions),
        "Oracle": lambda: oracle_cost(options.repetitions),
        "The bundled corpus": lambda: corpus_cost(options.case_repetitions, options.patterns),
    }
    text = ["# Cost", "", "Written by `benchmarks/cost.py`; do not edit. Medians, quartiles in brackets."]
    for title, part in parts.items():
        lines = ["", f"## {title}", "", *part()]
        print("\n".join(lines), flush=True)
        text += lines
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "cost.md").write_text("\n".join([*text, ""]), encoding="utf-8")
    print(f"\nReport: {options.output / 'cost.md'}")


if __name__ == "__main__":
    main()
