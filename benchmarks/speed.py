"""How long `attncheck check` takes, beside a plain pytest suite over the same cases and the import of TensorFlow.

    python benchmarks/speed.py --output results/speed

Both run the same cases on the same implementations, each as a command of its own, in turn, so that what slows the
machine for a while slows both. In every round each begins with an empty folder for what frameworks compile (*first*),
and then runs again with what the first run left there (*second*); both use the same settings of it. Wall and processor
times of whole commands, medians with the least and the largest; the ratio is that of the same round.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from measuring import Timed, shown, timed

from attncheck.backends import BACKENDS
from attncheck.common.store import CACHE_VARIABLE
from attncheck.execution.environment import with_cache_variables
from attncheck.planning.plan import Plan
from attncheck.reading.selection import select_cases

PEER = Path(__file__).parent / "peer" / "test_peer.py"


def write_problems(patterns: Sequence[str], path: Path) -> int:
    """Write every case in every dtype, inputs made, for the peer; return how many."""
    plan = Plan.of(select_cases(patterns).cases, ())
    problems = {(plan.case(unit).id, unit.dtype): plan.problem(unit) for unit in plan}
    path.write_bytes(pickle.dumps(problems, pickle.HIGHEST_PROTOCOL))
    return len(problems)


def peer_environment(backends: Sequence[str], problems: Path, cache: Path) -> dict[str, str]:
    """Return the variables of the peer: what to run, and the same cache settings as attncheck's own workers have."""
    os.environ[CACHE_VARIABLE] = str(cache)
    kept: dict[str, str] = {}
    for name in backends:
        entry = BACKENDS[name]
        kept |= {
            key: text for key, text in with_cache_variables(entry, keep=True).environment.items() if key in entry.cache
        }
    del os.environ[CACHE_VARIABLE]
    return {"PEER_PROBLEMS": str(problems), "PEER_BACKENDS": ",".join(backends), **kept}


def one_round(patterns: Sequence[str], backends: Sequence[str], folder: Path, problems: Path) -> dict[str, Timed]:
    """Run both, first and second, and the import; every command once."""
    caches = {name: folder / name for name in ("attncheck", "peer")}
    for cache in caches.values():
        shutil.rmtree(cache, ignore_errors=True)
    check = [sys.executable, "-m", "attncheck", "check", *patterns, "--backend", ",".join(backends)]
    check += ["--output", str(folder / "results")]
    peer = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--no-header", "-r", "", "-p", "no:cacheprovider"]
    peer += ["-p", "no:attncheck", "-p", "no:hypothesispytest", "--noconftest", str(PEER)]
    given = {CACHE_VARIABLE: str(caches["attncheck"])}, peer_environment(backends, problems, caches["peer"])
    found = {}
    for when in ("first", "second"):
        found[f"attncheck, {when}"] = timed(check, given[0])
        found[f"peer, {when}"] = timed(peer, given[1])
    found["import tensorflow"] = timed([sys.executable, "-c", "import tensorflow"], {"TF_CPP_MIN_LOG_LEVEL": "3"})
    return found


def table(rounds: Sequence[Mapping[str, Timed]]) -> list[str]:
    """Write what was measured, and whether attncheck kept its limit: no longer than the peer."""
    lines = ["| command | wall | processor | beside the peer | at most 1 |", "| --- | ---: | ---: | ---: | --- |"]
    for name in rounds[0]:
        walls, processors = [each[name].wall for each in rounds], [each[name].processor for each in rounds]
        ratio = verdict = ""
        if name.startswith("attncheck"):
            ratios = [each[name].wall / each[name.replace("attncheck", "peer")].wall for each in rounds]
            ratio, verdict = shown(ratios, ""), "kept" if median(ratios) <= 1 else "missed"
        lines.append(f"| {name} | {shown(walls)} | {shown(processors)} | {ratio} | {verdict} |")
    return [*lines, "", *(f"- {name}: {each.ended}" for name, each in rounds[-1].items())]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/speed"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--backend", default=",".join(BACKENDS), help="default: %(default)s")
    parser.add_argument("patterns", nargs="*", help="which cases (default: the bundled corpus)")
    options = parser.parse_args()
    backends = options.backend.split(",")
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_problems(options.patterns, folder / "problems.pickle")
        rounds = []
        for number in range(options.rounds):
            rounds.append(one_round(options.patterns, backends, folder, folder / "problems.pickle"))
            times = ", ".join(f"{name} {each.wall:.1f} s" for name, each in rounds[-1].items())
            print(f"round {number + 1}: {times}", flush=True)
    title = f"{count} cases and dtypes on {', '.join(backends)}; {options.rounds} rounds"
    lines = ["# Speed", "", "Written by `benchmarks/speed.py`; do not edit.", "", title, "", *table(rounds)]
    print("\n".join(lines[4:]))
    (options.output / "speed.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
