"""A results directory of any size, drawn and not computed: what a report costs when there are a million rows.

    python benchmarks/million_rows.py OUTPUT --cases 370 --implementations 40 --dtypes 4     # many implementations
    python benchmarks/million_rows.py OUTPUT --cases 100000 --implementations 2 --dtypes 1 --pairs 1 --numbers 0
    /usr/bin/time -v attncheck report OUTPUT

Each evaluation has ``--stages`` rows of stages, ``--pairs`` of comparisons with the implementations after it, and
``--numbers`` of numbers that are known. One evaluation in a hundred fails, one in a hundred fails as expected. The
same arguments give the same results.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attncheck.backends import BACKENDS
from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter
from attncheck.spec import DTYPES

_STAGES = ("scores", "masked_scores", "weights", "log_sum_exp", "output")
_BACKENDS = tuple(BACKENDS)
_CASES_PER_FILE = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the results directory that the command line asks for; say how many rows it has."""
    options = _parser().parse_args(arguments)
    names = [f"{_BACKENDS[number % 4]}.mode{number // 4}" for number in range(options.implementations)]
    writer = ResultsWriter(options.output)
    writer.write_json("environment.json", _environment(options.label, names))
    writer.write_json("cases.json", {"cases": [_case(number, options) for number in range(options.cases)]})
    draw, count = random.Random(options.seed), 0
    for number in range(options.cases):
        for dtype in DTYPES[: options.dtypes]:
            rows = [
                row for place in range(len(names)) for row in _evaluation(number, dtype, place, names, options, draw)
            ]
            writer.add_rows(rows)
            count += len(rows)
    writer.flush()
    writer.write_json("summary.json", {"exit_code": 1})
    print(f"{options.output}: {count:,} rows")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--label", default="drawn")
    parser.add_argument("--seed", type=int, default=1)
    for name, standard in (
        ("cases", 370),
        ("implementations", 40),
        ("dtypes", 4),
        ("stages", 4),
        ("pairs", 10),
        ("numbers", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=standard)
    return parser


def _environment(label: str, names: Sequence[str]) -> dict[str, Any]:
    packages = {name: name.partition(".")[0] for name in names}
    return {
        "label": label,
        "command": "python benchmarks/million_rows.py",
        "python": "3.11.7",
        "platform": "drawn",
        "machine": "x86_64",
        "cpu_features": ["AVX2"],
        "processors": 2,
        "threads_per_worker": 1,
        "versions": dict.fromkeys(packages.values(), "1.0"),
        "flags": {},
        "byte_order": "little",
        "implementations": packages,
        "classes": {name: dict.fromkeys(DTYPES, "native") for name in names},
        "left_out": {},
        "missing": {},
        "faults": [],
    }


def _file_of(number: int) -> str:
    return f"drawn/file-{number // _CASES_PER_FILE}"


def _identity(number: int) -> str:
    return f"{_file_of(number)}/case-{number}-is-one-of-very-many"


def _case(number: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "id": _identity(number),
        "name": f"Case {number} is one of very many",
        "file": f"{_file_of(number)}.yaml",
        "line": 7 + number % _CASES_PER_FILE,
        "title": f"Drawn cases, file {number // _CASES_PER_FILE}",
        "source": {"kind": "derivation", "title": "Drawn", "notes": []},
        "operation": "attention",
        "options": {"is_causal": number % 2 == 0},
        "dtypes": list(DTYPES[: options.dtypes]),
        "storage": None,
        "memory_layout": {},
        "merged": [],
        "inputs": {name: [1, 2, 5, 8] for name in ("query", "key", "value")},
        "tags": ["drawn"],
        "notes": [],
        "expected": [],
    }


def _evaluation(
    number: int, dtype: str, place: int, names: Sequence[str], options: argparse.Namespace, draw: random.Random
) -> Iterator[Row]:
    """Give one implementation's rows of one case in one dtype."""
    blank = Row(_identity(number), "attention", dtype, names[place], "stage", "", "agree")
    fate = draw.random()
    for stage in _STAGES[: options.stages]:
        row = replace(_measured(blank, draw), stage=stage, shape="1x2x5x5", elements=50, tier="within")
        row = replace(row, against="exact", largest_z=draw.random(), mean_z=draw.random(), introduced_tier="within")
        if fate < 0.02 and stage != _STAGES[0]:  # one in a hundred fails, one is known
            message = f"computed {row.value!r}, exact {row.reference!r}"
            row = replace(row, verdict="numeric", tier="proven", begins_at=_STAGES[1], message=message)
            if fate < 0.01:
                row = replace(row, xfail=True, reason="it is drawn so", thread="example/drawn#1")
        yield row
    others = [names[(place + step) % len(names)] for step in range(1, options.pairs + 1)]
    for other, stage in zip(others, _STAGES * options.pairs, strict=False):
        yield replace(_measured(blank, draw), comparison="pair", other=other, stage=stage)
    for index in range(options.numbers):
        number_row = replace(_measured(blank, draw), comparison="known", stage="weights", index=f"0,{index}")
        yield replace(number_row, reference_text=f"{draw.random():.4f}", half_unit=5e-5)


def _measured(blank: Row, draw: random.Random) -> Row:
    """Put a value, an error and its bound into a row, all three drawn."""
    value, ratio = draw.gauss(0, 1), draw.random()
    error = ratio * 1e-7
    index = f"0,{draw.randrange(2)},{draw.randrange(5)},{draw.randrange(5)}"
    numbers = {"value": value, "reference": value - error, "difference": error, "allowed": 1e-7, "ratio": ratio}
    return replace(blank, index=index, **numbers)


if __name__ == "__main__":
    raise SystemExit(main())
