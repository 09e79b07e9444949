"""The power of the search: after how many problems, and how many seconds, does it find each fault of the catalogue?

    python benchmarks/power.py --seeds 1,2,3,4,5 --minutes 10 --output results/power
    python benchmarks/power.py --reduce 20        # and reduce the first failing problem of 20 faults

Every fault is a variant of the NumPy reference. The search begins from nothing, and all faults are put to the same
problems: which are drawn does not follow from what a fault answers, as long as nothing is found. A problem finds a
fault if any stage of it is flagged. Prints a table by topic; ``power.md`` has that of options and their pairs, too.
Ends with 0 if every fault is found for every seed, else with 1.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median

from measuring import on_one_thread, table

from attncheck.asking.engine import Engine
from attncheck.backends import EAGER, EAGER_MODE
from attncheck.common.errors import CaseError
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.mutation import variant_entry
from attncheck.mutation.catalogue import HAND_WRITTEN_FAULTS
from attncheck.mutation.judgement import first_wrong_stage
from attncheck.mutation.mutant import Mutant
from attncheck.mutation.unit import SeededUnit, UnitScorer
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import format_shape
from attncheck.searching.concrete import case_of_problem, required_features
from attncheck.searching.findings import ProblemSubject, Symptom
from attncheck.searching.problems import DrawSettings, ProblemSource
from attncheck.searching.reduction import reduce_problem
from attncheck.searching.search import simplest_in_new_process
from attncheck.spec import DTYPES

_SHARED = "shared heads"
MAX_ELEMENTS = 40
"""Of each input of a reduced problem, as many as somebody looks at."""


@dataclass(frozen=True, eq=False)
class Found:
    """A fault that a seed's search found: after so many problems and seconds, by one of them."""

    mutant: Mutant
    seed: int
    problems: int
    seconds: float
    problem: Problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for every fault, print the tables, and reduce what some are found by; return the exit code."""
    options = _parser().parse_args(arguments)
    warnings.simplefilter("ignore", RuntimeWarning)  # numbers beyond a dtype are infinite, on purpose
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found: list[Found] = []
    for seed in seeds:
        one = list(search_for_all(seed, 60 * options.minutes, options.problems))
        found += one
        _print_seed(seed, one)
    options.output.mkdir(parents=True, exist_ok=True)
    _write(options.output / "power.csv", found)
    lines = report(found, len(seeds))
    (options.output / "power.md").write_text("\n".join([*lines, "", *options_report(found)]) + "\n", encoding="utf-8")
    print("\n".join(lines))
    if options.reduce:
        print("\n".join(_reduced_lines(found, options.reduce)))
    return 0 if len(found) == len(HAND_WRITTEN_FAULTS) * len(seeds) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3,4,5", help="comma-separated (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each seed (default: %(default)s)")
    parser.add_argument("--problems", type=int, default=10**9, help="most problems of each seed")
    parser.add_argument("--reduce", type=int, default=0, metavar="N", help="reduce what N of the faults are found by")
    parser.add_argument("--output", type=Path, default=Path("results/power"), help="default: %(default)s")
    return parser


def search_for_all(
    seed: int, seconds: float, problems: int, mutants: Sequence[Mutant] = HAND_WRITTEN_FAULTS
) -> Iterator[Found]:
    """Yield every fault when it is found, until all are, or there is no time left."""
    source, begun = ProblemSource(DrawSettings(seed), DTYPES), time.monotonic()
    left, asked, number = list(mutants), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while left and asked < problems and time.monotonic() - begun < seconds:
            problem = source.draw_problem(number)
            number += 1
            try:
                case = case_of_problem(problem, Path(folder), f"search/problem-{number}")
            except CaseError:  # what was drawn does not fit together
                continue
            asked += 1
            scorer = UnitScorer(SeededUnit(case, problem.dtype))
            for mutant in [each for each in left if problem.dtype in each.dtypes]:
                if first_wrong_stage(scorer.judge_subject(mutant) or ()) is not None:
                    left.remove(mutant)
                    yield Found(mutant, seed, asked, time.monotonic() - begun, problem)
            for path in Path(folder).glob("*.npy"):
                path.unlink()


def _print_seed(seed: int, found: Sequence[Found]) -> None:
    missed = sorted({each.name for each in HAND_WRITTEN_FAULTS} - {each.mutant.name for each in found})
    after = f"; median {median(each.problems for each in found):g} problems" if found else ""
    last = f", the last one after {found[-1].seconds:.0f} s" if found else ""
    print(f"seed {seed}: {len(found)} of {len(HAND_WRITTEN_FAULTS)} found{after}{last}", flush=True)
    if missed:
        print(f"  not found: {', '.join(missed)}")


def report(found: Sequence[Found], seeds: int) -> list[str]:
    """Return the table by topic, and what is true of all."""
    by_topic: dict[str, list[Found]] = defaultdict(list)
    for each in found:
        by_topic[each.mutant.topic].append(each)
    known = {
        topic: sum(each.topic == topic for each in HAND_WRITTEN_FAULTS)
        for topic in {each.topic for each in HAND_WRITTEN_FAULTS}
    }
    heads = ("faults of", "faults", "found", "median problems", "median s", "most problems")
    rows = [
        (topic, str(known[topic]), f"{len(by_topic[topic])} of {known[topic] * seeds}", *_figures(by_topic[topic]))
        for topic in sorted(known)
    ]
    every = f"{len(found)} of {len(HAND_WRITTEN_FAULTS) * seeds}"
    rows.append(("all", str(len(HAND_WRITTEN_FAULTS)), every, *_figures(found)))
    return table(heads, rows)


def options_report(found: Sequence[Found]) -> list[str]:
    """Return the table by what the first problem that finds a fault asks: options, inputs, shared heads, and pairs."""
    rows = [(name, str(len(each)), *_figures(each)) for name, each in sorted(_by_options(found).items())]
    return [
        "By what the first problem that finds a fault asks, alone and in pairs:",
        "",
        *table(("asked", "found", "median problems", "median s", "most problems"), rows),
    ]


def _figures(found: Sequence[Found]) -> tuple[str, str, str]:
    if not found:
        return "-", "-", "-"
    problems = _medians(found, "problems")
    seconds = _medians(found, "seconds")
    return f"{median(problems):g}", f"{median(seconds):.2f}", f"{max(each.problems for each in found)}"


def _medians(found: Sequence[Found], name: str) -> list[float]:
    """Return the median of each fault over the seeds that found it."""
    by_fault: dict[str, list[float]] = defaultdict(list)
    for each in found:
        by_fault[each.mutant.name].append(getattr(each, name))
    return [median(each) for each in by_fault.values()]


def _by_options(found: Sequence[Found]) -> Mapping[str, list[Found]]:
    by_option: dict[str, list[Found]] = defaultdict(list)
    for each in found:
        asked = sorted(
            {_SHARED if name.endswith("shared") else name.split(" ")[0] for name in required_features(each.problem)}
        )
        for name in asked or ["nothing"]:
            by_option[name].append(each)
        for pair in combinations(asked, 2):
            by_option[" + ".join(pair)].append(each)
    return by_option


def _write(path: Path, found: Sequence[Found]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("mutant", "topic", "seed", "problems", "seconds", "operation", "asked", "dtype"))
        for each in found:
            asked = " ".join(sorted(required_features(each.problem)))
            row = (each.mutant.name, each.mutant.topic, each.seed, each.problems, f"{each.seconds:.2f}")
            writer.writerow((*row, each.problem.operation, asked, each.problem.dtype))


def _reduced_lines(found: Sequence[Found], count: int) -> Iterator[str]:
    """Reduce what some faults are found by, evenly over the catalogue, each by a worker as a search does."""
    by_name = {each.mutant.name: each for each in reversed(found)}
    names = [each.name for each in HAND_WRITTEN_FAULTS if each.name in by_name]
    chosen = [by_name[name] for name in names[:: max(1, len(names) // count)][:count]]
    rows, small = [], 0
    for each in chosen:
        entry = replace(variant_entry(each.mutant.name), classes={**EAGER, **each.mutant.rounding_models})
        engine = Engine(Limits(keep_going=True), expected_failures=())
        subject = ProblemSubject(Implementation(entry, EAGER_MODE), engine)
        begun = time.monotonic()
        try:
            symptom = subject.run_for_symptom(each.problem)
            if symptom is None:
                rows.append((each.mutant.name, "does not fail in a worker", "", "", ""))
                continue
            reduced = reduce_problem(each.problem, partial(_fails, subject, symptom))
            simplest, _ = simplest_in_new_process(reduced, subject, symptom)
        finally:
            subject.close()
        sizes = ", ".join(f"{name} {format_shape(array.shape)}" for name, array in simplest.inputs.items())
        small += all(array.size <= MAX_ELEMENTS for array in simplest.inputs.values())
        asked = ", ".join(sorted(simplest.options)) or "-"
        tries = f"{reduced.tries} in {time.monotonic() - begun:.1f} s"
        rows.append((each.mutant.name, str(symptom), sizes, asked, tries))
    yield ""
    yield from table(("fault", "fails with", "reduced to", "options", "tries"), rows)
    yield ""
    yield f"{small} of {len(chosen)} have at most {MAX_ELEMENTS} elements in each input"


def _fails(subject: ProblemSubject, symptom: Symptom, problem: Problem) -> bool:
    return subject.run_for_symptom(problem) == symptom


if __name__ == "__main__":
    on_one_thread()
    sys.exit(main())
