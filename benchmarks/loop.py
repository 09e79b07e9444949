"""Measure how long an author of a kernel waits, relative to the imports of TensorFlow, torch, and NumPy with pandas.

    python benchmarks/loop.py --output results/loop [--mutants] [--busy]

In each round, each command runs once, in turn, so a slow machine slows all of them. The commands are: a NumPy kernel
and a torch kernel on the whole corpus and one case by its id, with a store that has the exact answers; the NumPy kernel
without a store; the NumPy kernel after an edit, which gives results of other bits in each round, and the same in a
``--watch`` that runs for all rounds; a wrong kernel and the right kernel of which it is made, without a store and with
one that has their verdicts; the imports; and the peer, a plain loop with ``assert_allclose`` over the evaluations in
which the kernel is judged (``peer/allclose_loop.py``). The table has wall times until the first line of the answer and
until the end, and processor times of whole commands: medians, minimum and maximum. A ratio compares the wall times of
two whole commands in the same round.
``--mutants`` adds all faulty variants on the whole corpus, which take minutes a round. ``--busy`` keeps each processor
busy with another process, as on a machine that several people use.

All commands run with compiled bytecode: without it, each takes about 1.5 times as long. The benchmark stops if the
modules of attncheck have none after the first round.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from statistics import median

from measuring import Timed, shown, timed

import attncheck.run
from attncheck.common.processors import available_processors
from attncheck.common.store import CACHE_VARIABLE
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.operations import function_and_keywords, run_operation
from attncheck.execution.padding import unsupported_before_call
from attncheck.planning.plan import Plan
from attncheck.reading.selection import select_cases

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE_CASE = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
EDITED_KERNEL, WATCHED_KERNEL = "edited_kernel.py", "watched_kernel.py"
WATCHED, PEER = "NumPy kernel, watched", "plain allclose loop"


@dataclass(frozen=True)
class Limit:
    """What a command may take, of a round's other times, and how that is written."""

    text: str
    share: Callable[[Mapping[str, float]], float]
    most: float


_PRODUCT = "query @ np.swapaxes(key, -1, -2)"
"""The product of the example kernel that an edit splits."""


def write_edited_kernel(path: Path, number: int) -> None:
    """Write the example kernel with its scores summed in two parts: right, with other last bits for each number."""
    text = (EXAMPLES / "numpy_kernel.py").read_text(encoding="utf-8")
    if text.count(_PRODUCT) != 1:
        raise SystemExit(f"{EXAMPLES / 'numpy_kernel.py'} has no {_PRODUCT}: change loop.py, too")
    parts = (f"query[..., {part}] @ np.swapaxes(key[..., {part}], -1, -2)" for part in (f":{number}", f"{number}:"))
    path.write_text(text.replace(_PRODUCT, f"({' + '.join(parts)})"), encoding="utf-8")


@contextmanager
def busy_processors(count: int) -> Iterator[None]:
    """Keep as many processors busy."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()


@contextmanager
def watched_kernel(folder: Path, environment: Mapping[str, str]) -> Iterator[Callable[[int], float]]:
    """Watch a kernel; yield a function that edits it and returns the seconds until the verdict is printed."""
    kernel = folder / WATCHED_KERNEL
    write_edited_kernel(kernel, 1)
    check = [sys.executable, "-m", "attncheck", "check", "--output", str(folder / "watched"), "--watch"]
    with subprocess.Popen(
        [*check, "--implementation", f"{kernel}:attention"],
        env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = process.stdout

        def wait_for(text: str) -> None:
            for line in lines:
                if text in line:
                    return
            raise SystemExit(f"attncheck check --watch ended before it printed {text!r}")

        def time_edit(number: int) -> float:
            time.sleep(2.0)  # the report of the round before is written
            write_edited_kernel(kernel, number)
            begun = time.monotonic()
            wait_for(f"{WATCHED_KERNEL}: ")
            return time.monotonic() - begun

        wait_for("attncheck: watching")
        try:
            yield time_edit
        finally:
            process.terminate()


def record_judged_calls(path: Path) -> None:
    """Record the calls in which the example kernel is judged, each with the numbers of the NumPy backend."""
    chosen = select_implementations(None, [f"{EXAMPLES / 'numpy_kernel.py'}:attention"])
    [kernel] = chosen.implementations
    reference = select_implementations(["numpy"], []).implementations[0].entry.load("eager")
    plan = Plan.of(select_cases().cases, ("float64", "float32"))
    calls = []
    for unit in plan:
        case = plan.case(unit)
        if unsupported_before_call(kernel, case, unit.dtype) is None:
            problem = plan.problem(unit)
            name, keywords = function_and_keywords(problem.operation, problem.options)
            if name == "attention" and set(problem.inputs) - {"mask"} == {"query", "key", "value"}:
                inputs = [problem.inputs[name] for name in ("query", "key", "value")]
                given = {name: array for name, array in problem.inputs.items() if name == "mask"}
                keywords = {name: value for name, value in keywords.items() if name in ("is_causal", "scale")} | given
                output = run_operation(reference, problem.operation, problem.inputs, problem.options)["output"]
                calls.append((inputs, keywords, output))
    path.write_bytes(pickle.dumps(calls))


LIMITS = {
    "NumPy kernel, no cache": Limit(
        "import tensorflow", lambda of: of["NumPy kernel, no cache"] / of["import tensorflow"], 1.1
    ),
    "NumPy kernel, edited": Limit(
        "import tensorflow", lambda of: of["NumPy kernel, edited"] / of["import tensorflow"], 0.4
    ),
    WATCHED: Limit("import tensorflow", lambda of: of[WATCHED] / of["import tensorflow"], 0.25),
    PEER: Limit("NumPy kernel, edited, over this", lambda of: of["NumPy kernel, edited"] / of[PEER], 4.0),
    "NumPy kernel, again": Limit(
        "import tensorflow", lambda of: of["NumPy kernel, again"] / of["import tensorflow"], 1.2
    ),
    "torch kernel, again": Limit(
        "1.5 import tensorflow + import torch",
        lambda of: of["torch kernel, again"] / (1.5 * of["import tensorflow"] + of["import torch"]),
        1.0,
    ),
    "faulty variants, again": Limit(
        "import tensorflow", lambda of: of["faulty variants, again"] / of["import tensorflow"], 15.0
    ),
    "wrong kernel, no cache": Limit(
        "the right one", lambda of: of["wrong kernel, no cache"] / of["right kernel, no cache"], 2.0
    ),
    "wrong kernel, again": Limit(
        "the right one", lambda of: of["wrong kernel, again"] / of["right kernel, again"], 2.0
    ),
    "one case": Limit("import numpy, pandas", lambda of: of["one case"] / of["import numpy, pandas"], 2.0),
}


def commands(folder: Path, *, mutants: bool) -> dict[str, list[str]]:
    """Return what is timed, by name."""
    judge_mutants = [sys.executable, "-m", "attncheck", "mutants"]
    of_mutants = {"faulty variants, no cache": [*judge_mutants, "--no-cache"], "faulty variants, again": judge_mutants}
    check = [sys.executable, "-m", "attncheck", "check", "--output", str(folder / "results"), "--implementation"]
    wrong, right = (f"{Path(__file__).parent / 'wrong_kernels.py'}:{name}" for name in ("default_scale", "right"))
    peer = Path(__file__).parent / "peer" / "allclose_loop.py"
    numpy_kernel, torch_kernel = (f"{EXAMPLES / name}_kernel.py:attention" for name in ("numpy", "torch"))
    return {
        "NumPy kernel, no cache": [*check, numpy_kernel, "--no-cache"],
        "NumPy kernel, again": [*check, numpy_kernel],
        "NumPy kernel, edited": [*check, f"{folder / EDITED_KERNEL}:attention"],
        "torch kernel, again": [*check, torch_kernel, "--framework", "torch"],
        "right kernel, no cache": [*check, right, "--no-cache"],
        "wrong kernel, no cache": [*check, wrong, "--no-cache"],
        "right kernel, again": [*check, right],
        "wrong kernel, again": [*check, wrong],
        "one case": [*check, numpy_kernel, ONE_CASE],
        PEER: [sys.executable, *map(str, (peer, folder / "calls.pickle", folder / EDITED_KERNEL))],
        "import tensorflow": [sys.executable, "-c", "import tensorflow"],
        "import torch": [sys.executable, "-c", "import torch"],
        "import numpy, pandas": [sys.executable, "-c", "import numpy, pandas"],
        **(of_mutants if mutants else {}),
    }


def checked(command: Sequence[str], environment: Mapping[str, str]) -> Timed:
    """Run a command to its end; what could not be run has no time."""
    found = timed(command, environment)
    if not found.ended.startswith(("exit 0", "exit 1")):
        raise SystemExit(f"{' '.join(command)}: {found.ended}")
    return found


def table(rounds: Sequence[Mapping[str, Timed]]) -> list[str]:
    """Write what was measured, and whether each limit was kept."""
    lines = [
        "| command | wall | first line | processor | beside | ratio | at most | |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    walls = [{name: timed.wall for name, timed in commands.items()} for commands in rounds]
    for name in rounds[0]:
        cells = [
            shown([getattr(commands[name], part) for commands in rounds], " s")
            for part in ("wall", "first_line", "processor")
        ]
        if limit := LIMITS.get(name):
            shares = [limit.share(each) for each in walls]
            kept = "kept" if median(shares) <= limit.most else "missed"
            cells += [limit.text, shown(shares, ""), f"{limit.most:g}", kept]
        else:
            cells += [""] * 4
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/loop"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--mutants", action="store_true", help="also time all faulty variants on the whole corpus")
    parser.add_argument("--busy", action="store_true", help="keep each processor busy with another process")
    options = parser.parse_args()
    busy = available_processors() if options.busy else 0
    with tempfile.TemporaryDirectory() as name, busy_processors(busy):
        folder = Path(name)
        environment = {CACHE_VARIABLE: str(folder / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"}
        # Modules are compiled once, as pip leaves them behind, also where this checkout is installed as editable.
        environment["PYTHONDONTWRITEBYTECODE"] = ""
        asked = commands(folder, mutants=options.mutants)
        write_edited_kernel(folder / EDITED_KERNEL, 1)
        record_judged_calls(folder / "calls.pickle")
        for command in asked.values():  # the first time everything is worked out, and files come into memory
            checked(command, environment)
        if not Path(cache_from_source(attncheck.run.__file__)).exists():
            raise SystemExit("attncheck has no compiled bytecode: its folder cannot be written")
        rounds = []
        with watched_kernel(folder, environment) as time_edit:
            for number in range(options.rounds):
                write_edited_kernel(folder / EDITED_KERNEL, number + 2)
                times = {name: checked(command, environment) for name, command in asked.items()}
                seconds = time_edit(number + 2)
                rounds.append(times | {WATCHED: Timed(seconds, seconds, math.nan, "")})
                seconds_by_name = (f"{name} {timed.wall:.1f} s" for name, timed in rounds[-1].items())
                print(f"round {number + 1}: {', '.join(seconds_by_name)}", flush=True)
    state = f"With compiled bytecode, {f'and {busy} other processes' if busy else 'on an otherwise idle machine'}."
    head = ["# The loop", "", f"Written by `benchmarks/loop.py`; do not edit. {state}", ""]
    lines = [*head, *table(rounds)]
    print("\n".join(lines[4:]))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "loop.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
