"""Injected faults: does a run come to the same, but for the evaluations that were hit?

    python benchmarks/faults.py --faults 180 --kills 20 --seed 1 --output results/faults

runs the bundled cases on NumPy and on ``faulty_attention.py``, once undisturbed; once with faults of all its kinds in
evaluations that are drawn, while the main process is killed (SIGKILL) at moments that are drawn, and the run goes on
with --resume. Every evaluation that was hit must have the verdict of its kind in one row, with the reason; every other
row must be as it was. Prints a line for each kind; exits 1 where anything is missing, double, or otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_attention
import pandas as pd
import psutil

from attncheck.backends import BACKENDS
from attncheck.common.errors import ResultsError
from attncheck.execution.user_call import wrap_target
from attncheck.execution.worker import evaluate_on_backend
from attncheck.reading.inputs import convert_inputs, make_exact_inputs, make_problem_of_case
from attncheck.reading.selection import select_cases
from attncheck.results.reader import read_run

IMPLEMENTATION = "faulty_attention.module"
FRAMES = ("results", "pairs", "numbers")
ROWS = "rows"
DTYPES = ("float64", "float32")
SETTINGS = ("--time-limit", "3", "--memory-limit", "0.4", "--quiet")

COMMAND = """\
from attncheck.cli import main
from attncheck.results.writer import ResultsWriter

ResultsWriter.SECONDS_PER_PART = 1.0  # so that a run that is killed every few seconds gets on
if __name__ == "__main__":
    main()
"""

_LEFT_OUT = "large"
"""Cases that take a large part of the time limit and of the memory limit by themselves."""
_ONLY_ONE_RESULT = ("softmax", "attention", "scoring", "masking")


@dataclass(frozen=True)
class Place:
    """An evaluation: the case in a dtype, on the implementation that misbehaves."""

    case: str
    dtype: str
    operation: str
    fingerprint: str


def most_cases() -> list[str]:
    """Return globs for all bundled cases but the large ones."""
    files = {case.id.rpartition("/")[0] for case in select_cases([]).cases}
    return [f"{file}/*" for file in sorted(files) if file != _LEFT_OUT]


def places(patterns: Sequence[str]) -> list[Place]:
    """Return the evaluations in which a fault can be injected: those whose call no other one has."""
    found: list[Place] = []
    for case in select_cases(patterns).cases:
        exact = make_exact_inputs(case)
        for dtype in sorted(set(case.dtypes) & set(DTYPES)):
            calls: list[str] = []

            def recorder(name: str, calls: list[str] = calls) -> Any:
                return lambda *given, **options: calls.append(faulty_attention.fingerprint(name, given, options))

            target = SimpleNamespace(**{name: recorder(name) for name in faulty_attention.FUNCTIONS})
            problem = make_problem_of_case(case, convert_inputs(case, exact, dtype)).as_call()
            evaluate_on_backend(wrap_target(target, "", BACKENDS["numpy"]), problem)  # type: ignore[arg-type] # as OwnEntry has it
            if len(calls) == 1 and problem.inputs and all(array.size for array in problem.inputs.values()):
                found.append(Place(case.id, dtype, case.operation if not problem.memory_layout else "", calls[0]))
    counts = Counter(place.fingerprint for place in found)
    return [place for place in found if counts[place.fingerprint] == 1]


def draw_plan(patterns: Sequence[str], number: int, draw: random.Random) -> dict[Place, str]:
    """Draw so many evaluations, and give each a kind: all kinds equally often, as far as the number goes."""
    left = places(patterns)
    draw.shuffle(left)
    names = list(faulty_attention.KINDS)
    plan: dict[Place, str] = {}
    for count in range(number):
        name = names[count % len(names)]
        plan[left.pop(next(at for at, place in enumerate(left) if _fits(name, place)))] = name
    return plan


def _fits(name: str, place: Place) -> bool:
    if name in ("changed inputs", "too large to be sent"):  # of inputs that can be written to, and one result
        return place.operation in _ONLY_ONE_RESULT
    return True


class Campaign:
    """One folder in which the command is run."""

    def __init__(self, folder: Path, plan: dict[Place, str], patterns: Sequence[str]) -> None:
        folder.mkdir(parents=True)
        (folder / "command.py").write_text(COMMAND, encoding="utf-8")
        plan_file = folder / "plan.json"
        plan_file.write_text(json.dumps({place.fingerprint: name for place, name in plan.items()}), encoding="utf-8")
        self.folder, self.results, self._patterns = folder, folder / "results", patterns
        self._environment = os.environ | {faulty_attention.PLAN_VARIABLE: str(plan_file.resolve())}
        self.kills = 0

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command, or go on with it."""
        implementation = Path(faulty_attention.__file__).resolve()
        names = f"numpy.eager,{implementation}"
        arguments = [
            "check",
            *self._patterns,
            "--implementation",
            names,
            "--output",
            str(self.results.resolve()),
            *SETTINGS,
            "--resume",
        ]
        with (self.folder / "printed.txt").open("ab") as printed:
            return subprocess.Popen(
                [sys.executable, "command.py", *arguments],
                cwd=self.folder, env=self._environment, stdout=printed, stderr=printed,
            )  # fmt: skip

    def kill_after(self, seconds: float) -> None:
        """Let the command run so long and kill its main process; what it leaves must be readable."""
        process = self.start()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            self.kills += 1
        process.wait()
        _require(self._wait_for_workers(process.pid), "workers outlived the main process that was killed")
        if (self.results / "environment.json").exists():
            try:
                read_run(self.results)
            except ResultsError as error:
                _require(False, f"what a killed run left cannot be read: {error}")

    def finish(self) -> None:
        """Let the command run to its end."""
        code = self.start().wait()
        _require(code in (0, 1, 3), f"the command ended with {code}; see {self.folder / 'printed.txt'}")

    def _wait_for_workers(self, main: int) -> bool:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if not any(" --multiprocessing-fork" in line for line in self.left()):
                return True
            time.sleep(0.02)
        return False

    def left(self) -> list[str]:
        """Return the command lines of what it has started and still runs, but for multiprocessing's helper."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environment = process.environ()
                if environment.get(faulty_attention.PLAN_VARIABLE) == self._environment[faulty_attention.PLAN_VARIABLE]:
                    found.append(" ".join(process.cmdline()))
        return [line for line in found if line and "resource_tracker" not in line]

    def frame(self, name: str) -> pd.DataFrame:
        """Return a frame of its report, or the rows that are on disk, which know no order."""
        if name == ROWS:
            rows = read_run(self.results).rows.drop(columns="seconds")  # measured, and never the same twice
            return rows.sort_values(list(rows.columns), ignore_index=True, key=lambda column: column.astype(str))
        return pd.read_parquet(self.results / "report" / f"{name}.parquet")


_complaints: list[str] = []


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        _complaints.append(complaint)


def compare(undisturbed: Campaign, disturbed: Campaign, plan: dict[Place, str]) -> None:
    """Require that every frame is the same but for the evaluations that failed as planned."""
    failing = {(place.case, place.dtype) for place, name in plan.items() if not _is_harmless(name)}
    for name in (*FRAMES, ROWS):
        before, after = (_without(campaign.frame(name), failing) for campaign in (undisturbed, disturbed))
        duplicates = int(after.duplicated().sum()) - int(before.duplicated().sum())
        _require(duplicates == 0, f"{name}: {duplicates} rows are double")
        difference = pd.concat([before.assign(run="undisturbed"), after.assign(run="disturbed")])
        different = difference[~difference.duplicated(subset=list(before.columns), keep=False)]
        _require(before.equals(after), f"{name}: rows differ that were not hit:\n{different.head(20).to_string()}")
        print(f"{name}: {len(after):,} rows that were not hit, {len(different)} of them different")


def _without(frame: pd.DataFrame, failing: set[tuple[str, str]]) -> pd.DataFrame:
    hit = pd.Series([place in failing for place in zip(frame["case"], frame["dtype"], strict=True)], index=frame.index)
    own = frame["implementation"] == IMPLEMENTATION
    if "other" in frame:
        own |= frame["other"] == IMPLEMENTATION
    return frame[~(hit & own)].reset_index(drop=True)


def _is_harmless(name: str) -> bool:
    return bool(faulty_attention.KINDS[name].verdict == "agree")


def table(disturbed: Campaign, plan: dict[Place, str]) -> pd.DataFrame:
    """Return what was injected and as what it was found, by kind."""
    results, pairs, numbers = (disturbed.frame(name) for name in FRAMES)
    own = results[results["implementation"] == IMPLEMENTATION]
    rows = dict(iter(own.groupby(["case", "dtype"])))
    records = []
    for place, name in plan.items():
        kind = faulty_attention.KINDS[name]
        found = rows.get((place.case, place.dtype), own.head(0))
        verdicts = sorted(set(found["verdict"]))
        is_right = _is_harmless(name) or (
            len(found) == 1 and verdicts == [kind.verdict] and kind.says in found["message"].iloc[0]
        )
        _require(is_right, f"{name} in {place.case} {place.dtype}: {found[['verdict', 'message']].to_dict('records')}")
        if not _is_harmless(name):
            elsewhere = sum(_count(frame, place) for frame in (pairs, numbers))
            _require(elsewhere == 0, f"{name} in {place.case} {place.dtype}: {elsewhere} rows of what never came back")
        records.append((name, kind.verdict, "as planned" if is_right else "otherwise"))
    frame = pd.DataFrame(records, columns=["kind", "verdict", "found"])
    counts = frame.groupby(["kind", "verdict"], sort=False)["found"]
    return pd.DataFrame(
        {"injected": counts.size(), "as planned": counts.agg(lambda each: (each == "as planned").sum())}
    )


def _count(frame: pd.DataFrame, place: Place) -> int:
    hit = (frame["case"] == place.case) & (frame["dtype"] == place.dtype)
    own = frame["implementation"] == IMPLEMENTATION
    if "other" in frame:
        own |= frame["other"] == IMPLEMENTATION
    return int((hit & own).sum())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign that the command line asks for."""
    options = _parser().parse_args(arguments)
    draw = random.Random(options.seed)
    begun = time.monotonic()
    _complaints.clear()
    patterns = options.patterns or most_cases()
    plan = draw_plan(patterns, options.faults, draw)
    undisturbed = Campaign(options.output / "undisturbed", {}, patterns)
    undisturbed.finish()
    whole = time.monotonic() - begun
    disturbed = Campaign(options.output / "disturbed", plan, patterns)
    for _ in range(options.kills):
        # Evenly over the logarithm: while it is loading, while it plans, and late.
        disturbed.kill_after(math.exp(draw.uniform(math.log(0.2), math.log(options.longest))))
    while disturbed.kills < options.kills and not _complaints:
        disturbed.kill_after(draw.uniform(0.2, 2))  # some came too late: it had ended
    disturbed.finish()
    found = table(disturbed, plan)
    print(found.to_string())
    compare(undisturbed, disturbed, plan)
    left = [line for campaign in (undisturbed, disturbed) for line in campaign.left()]
    _require(not left, f"still running: {left}")
    print(f"{len(plan)} faults injected and {disturbed.kills} times killed; {found['as planned'].sum()} as planned")
    print(f"undisturbed after {whole:.0f} s, all after {time.monotonic() - begun:.0f} s")
    print("\n".join(["", *_complaints]) if _complaints else "no row missing, none double, none different")
    return 1 if _complaints else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=180, help="how many evaluations are hit (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="of the main process (default: %(default)s)")
    parser.add_argument("--longest", type=float, default=15.0, help="seconds until a kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("patterns", nargs="*", help="which cases (default: all bundled but the large ones)")
    parser.add_argument("--output", type=Path, default=Path("results/faults"), help="a new folder")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
