"""The fuzzing campaign: hostile files for every reader, of which none may give a traceback, hang, or write elsewhere.

    python benchmarks/fuzz.py --inputs 200000 --seed 1 --target loader --output results/fuzz
    python benchmarks/fuzz.py --target all                       # every reader, each as often as is its standard
    python benchmarks/fuzz.py --target loader --seed 1 --only 17 # one input again, with its traceback

Ends with 0 if every input was accepted or refused with a message, with 1 if one was not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fuzz_pool import Tally, make_input, run_target
from fuzz_targets import ACCEPTED, REFUSED, TARGETS

_COLUMNS = (
    "inputs",
    "accepted",
    "refused",
    "tracebacks",
    "over 5 s",
    "died",
    "ran or wrote",
    "slowest s",
    "peak MiB",
    "minutes",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign that the command line asks for; return the exit code."""
    options = _parser().parse_args(arguments)
    targets = list(TARGETS) if options.target == "all" else [options.target]
    if options.only is not None:
        return _repeat(targets[0], options.seed, options.only)
    tallies: dict[str, Tally] = {}
    for target in targets:
        inputs = TARGETS[target].standard if options.inputs is None else options.inputs
        memory = options.memory if target != "results" else 2 * options.memory
        tallies[target] = run_target(target, options.seed, inputs, options.processes, memory, options.output)
    text = _table(tallies, options.seed) + _format_tallies(tallies, options)
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "fuzz.md").write_text(text + "\n", encoding="utf-8")
    return 1 if any(tally.findings for tally in tallies.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=(*TARGETS, "all"), default="loader")
    parser.add_argument("--inputs", type=int, help="of each target; 200,000 case files if absent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--memory", type=float, default=4.0, help="GiB of addresses that a worker may have")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="take this input alone, here")
    parser.add_argument("--output", type=Path, default=Path("results/fuzz"))
    return parser


def _repeat(target: str, seed: int, number: int) -> int:
    """Take one input in this process: whatever it raises is shown."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "input"
        place.mkdir()
        make_input(target, seed, number, place)
        print(TARGETS[target].take(place))
    return 0


def _table(tallies: dict[str, Tally], seed: int) -> str:
    lines = [f"Seed {seed}.", "", f"| target | {' | '.join(_COLUMNS)} |", f"| --- |{' ---: |' * len(_COLUMNS)}"]
    for target, tally in tallies.items():
        counts = [tally.outcomes[name] for name in (ACCEPTED, REFUSED, "traceback", "over 5 s", "died", "ran or wrote")]
        cells = [f"{count:,}" for count in (tally.inputs, *counts)]
        cells += [f"{tally.slowest[0]:.2f}", f"{tally.peak_bytes / 2**20:,.0f}", f"{tally.seconds / 60:.1f}"]
        lines.append(f"| {target} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_tallies(tallies: dict[str, Tally], options: argparse.Namespace) -> str:
    lines = [
        f"{target} {number}: {message.strip().splitlines()[-1][:200]}"
        for target, tally in tallies.items()
        for number, message in sorted(tally.findings)
    ]
    return "".join(f"\n\n{line}" for line in lines[:50]) + (f"\n\nSee {options.output / 'findings'}" if lines else "")


if __name__ == "__main__":
    raise SystemExit(main())
