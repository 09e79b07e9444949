"""Measure how long an author of a kernel waits, relative to the imports of TensorFlow, torch, and NumPy with pandas.

    python benchmarks/loop.py --output results/loop [--mutants] [--busy]

In each round, each command runs once, in turn, so a slow machine slows all of them. The commands are: a NumPy kernel
and a torch kernel on the whole corpus and one case by its id, with a store that has the exact answers; the NumPy kernel
without a store; the NumPy kernel after an edit, which gives results of other bits in each round; a wrong kernel and the
right kernel of which it is made, without a store and with one that has their verdicts; and the imports. The table has
wall and processor times of whole commands: medians, minimum and maximum. A ratio compares two times of the same round.
``--mutants`` adds all faulty variants on the whole corpus, which take minutes a round. ``--busy`` keeps each processor
busy with another process, as on a machine that several people use.

All commands run with compiled bytecode: without it, each takes about 1.5 times as long. The benchmark stops if the
modules of attncheck have none after the first round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
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

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE_CASE = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
EDITED_KERNEL = "edited_kernel.py"


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


LIMITS = {
    "NumPy kernel, no cache": Limit(
        "import tensorflow", lambda of: of["NumPy kernel, no cache"] / of["import tensorflow"], 1.1
    ),
    "NumPy kernel, edited": Limit(
        "import tensorflow", lambda of: of["NumPy kernel, edited"] / of["import tensorflow"], 0.4
    ),
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


def table(walls: Sequence[Mapping[str, float]], processors: Sequence[Mapping[str, float]]) -> list[str]:
    """Write what was measured, and whether each limit was kept."""
    lines = [
        "| command | wall | processor | beside | ratio | at most | |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for name in walls[0]:
        cells = [shown([each[name] for each in walls], " s"), shown([each[name] for each in processors], " s")]
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
        for command in asked.values():  # the first time everything is worked out, and files come into memory
            checked(command, environment)
        if not Path(cache_from_source(attncheck.run.__file__)).exists():
            raise SystemExit("attncheck has no compiled bytecode: its folder cannot be written")
        walls, processors = [], []
        for number in range(options.rounds):
            write_edited_kernel(folder / EDITED_KERNEL, number + 2)
            found = {each: checked(command, environment) for each, command in asked.items()}
            walls.append({each: of.wall for each, of in found.items()})
            processors.append({each: of.processor for each, of in found.items()})
            print(
                f"round {number + 1}: {', '.join(f'{each} {wall:.1f} s' for each, wall in walls[-1].items())}",
                flush=True,
            )
    state = f"With compiled bytecode, {f'and {busy} other processes' if busy else 'on an otherwise idle machine'}."
    head = ["# The loop", "", f"Written by `benchmarks/loop.py`; do not edit. {state}", ""]
    lines = [*head, *table(walls, processors)]
    print("\n".join(lines[4:]))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "loop.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
