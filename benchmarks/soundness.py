"""The soundness campaign: thousands of random problems on correct implementations, of which none may be flagged.

    python benchmarks/soundness.py --cases 2000 --seed 1 --output results/soundness
    python benchmarks/soundness.py --operation attention_gradients --implementation 'torch.*' --dtype bfloat16
    python benchmarks/soundness.py --plots                   # and errors over lengths, widths and scores, as SVG
    python benchmarks/soundness.py --seed 1 --only 17        # one problem again, every stage of it

Ends with 0 if no proven or statistical alarm was raised, with 1 if one was, with 3 if an evaluation gave nothing to
judge. What is done is on disk: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import soundness_table
from measuring import on_one_thread
from soundness_campaign import Campaign, run_campaign
from soundness_parts import Parts
from soundness_problems import FEW_SHAPES, SHAPES, PooledDraw

from attncheck import judging, searching
from attncheck.common.errors import UsageError
from attncheck.common.progress import show_progress
from attncheck.execution.call import Limits
from attncheck.execution.environment import describe_environment
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import Implementation
from attncheck.reading.expected_failures import ExpectedFailure, load_bundled_expected_failures, load_expected_failures
from attncheck.spec import DTYPES, OPERATIONS
from attncheck.spec.verdicts import Verdict

_LIMITS = Limits(case_seconds=180.0)
_KNOWN = Path(__file__).with_name("soundness_expected_failures.yaml")
_COMPILED = frozenset({"compile", "function", "xla", "jit", "dpa_jit"})
"""Modes that compile whole problems, anew for each shape."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign that the command line asks for; return the exit code."""
    options = _parser().parse_args(arguments)
    implementations = _implementations(options)
    draw = PooledDraw(options.seed, options.operation, options.pool or _shapes(options, implementations))
    if options.only:
        return _repeat(options, draw, implementations)
    output: Path = options.output
    parts = Parts(output / "parts", options.dtype, options.cases)
    facts = _facts(options, draw, implementations)
    _settle(output / "campaign.json", facts)
    campaign = _campaign(options, draw, implementations, parts.missing, output / "logs")
    campaign.logs.mkdir(exist_ok=True)
    last = time.monotonic() + 60 * options.minutes
    with show_progress(visible=True) as progress, closing(run_campaign(campaign, progress.update)) as units:
        for unit, rows in units:
            parts.add(unit, rows)
            if time.monotonic() > last:
                break
    if not parts.files:
        raise SystemExit(f"nothing was done in {options.minutes:g} minutes; give --minutes more")
    measured = soundness_table.read_rows(parts.files)
    return _tell(measured[measured["number"] < options.cases], facts, options, draw)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="how many problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all problems (default: %(default)s)")
    parser.add_argument("--operation", choices=OPERATIONS, help="draw only problems of this one (default: all)")
    parser.add_argument(
        "--pool",
        type=int,
        help=f"how many shapes to draw from (default: {SHAPES}; {FEW_SHAPES} for compiled modes, or gradients alone)",
    )
    parser.add_argument("--output", type=Path, default=Path("results/soundness"), help="default: %(default)s")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--backend", nargs="+", help="default: every one that is installed")
    parser.add_argument(
        "--implementation", nargs="+", default=[], help="as attncheck check takes them; the default modes if absent"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many, to go on another time")
    parser.add_argument("--plots", action="store_true", help="also draw errors over lengths, widths and scores")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="print these problems and write nothing")
    return parser


def _implementations(options: argparse.Namespace) -> list[Implementation]:
    patterns = [pattern for given in options.implementation for pattern in given.split(",")]
    try:
        chosen = select_implementations(options.backend, patterns, limits=_LIMITS)
    except UsageError as error:
        raise SystemExit(str(error)) from None
    if chosen.missing:
        raise SystemExit(f"not installed: {', '.join(chosen.missing)}")
    return list(chosen.implementations)


def _shapes(options: argparse.Namespace, implementations: Sequence[Implementation]) -> int:
    compiles = any(each.mode in _COMPILED for each in implementations)
    return FEW_SHAPES if compiles or options.operation == "attention_gradients" else SHAPES


def _campaign(
    options: argparse.Namespace,
    draw: PooledDraw,
    implementations: Sequence[Implementation],
    numbers: Sequence[int],
    logs: Path,
) -> Campaign:
    return Campaign(draw, numbers, options.dtype, implementations, _expected_failures(implementations), _LIMITS, logs)


def _expected_failures(implementations: Sequence[Implementation]) -> tuple[ExpectedFailure, ...]:
    """Return what is known of these implementations on every case, and what shows in random problems alone."""
    return load_bundled_expected_failures([each.entry.name for each in implementations]) + load_expected_failures(
        [_KNOWN]
    )


def _facts(options: argparse.Namespace, draw: PooledDraw, implementations: Sequence[Implementation]) -> dict[str, str]:
    environment = describe_environment([each.entry for each in implementations], _LIMITS.threads)
    return {
        "seed": str(draw.seed),
        "operation": draw.operation or "all",
        "shapes": str(draw.shapes),
        "dtypes": ", ".join(options.dtype),
        "implementations": ", ".join(each.name for each in implementations),
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        "python": environment["python"],
        "rows": _fingerprint(Path(__file__).parent, "soundness_[!ct]*.py"),
        "problems": _fingerprint(Path(searching.__file__).parent, "*.py"),
        "judging": _fingerprint(Path(judging.__file__).parent, "*.py"),
        "platform": f"{environment['platform']}, {environment['threads_per_worker']} thread per worker",
    }


def _fingerprint(folder: Path, names: str) -> str:
    """Tell one state of some code from another: rows of both are not mixed."""
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob(names)))
    return f"sha256 {hashlib.sha256(sources).hexdigest()[:12]}"


def _settle(path: Path, facts: Mapping[str, str]) -> None:
    """Write what the campaign is; a folder that holds another one is not mixed with it."""
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != facts:
        raise SystemExit(f"{path.parent} holds another campaign; name another --output, or remove it")
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _repeat(options: argparse.Namespace, draw: PooledDraw, implementations: Sequence[Implementation]) -> int:
    """Run single problems again and print every stage of them."""
    with tempfile.TemporaryDirectory() as folder:
        campaign = _campaign(options, draw, implementations, options.only, Path(folder))
        rows = [asdict(row) for _, found in run_campaign(campaign, lambda done, total: None) for row in found]
    if not rows:
        raise SystemExit("nothing to judge: no implementation declares these dtypes, or they cannot hold the numbers")
    frame = pd.DataFrame(rows)
    with pd.option_context("display.max_rows", None, "display.width", 250, "display.max_columns", None):
        print(frame.T.to_string() if len(frame) == 1 else frame.to_string(index=False))
    return _exit_code(frame)


def _tell(rows: pd.DataFrame, facts: Mapping[str, str], options: argparse.Namespace, draw: PooledDraw) -> int:
    """Write the report and its frames, and print the table and the alarms."""
    command = _command(options, draw)
    alarms, output = soundness_table.alarms(rows), options.output
    whole = {"problems": f"{rows['number'].nunique():,}", **facts}
    (output / "soundness.md").write_text(soundness_table.report(rows, whole, command), encoding="utf-8")
    table = soundness_table.table(rows, ("dtype", "rounding_model"))
    for name, frame in {"table": table, "alarms": alarms}.items():
        frame.to_csv(output / f"{name}.csv", index=False, lineterminator="\n")
    print(soundness_table.markdown(table))
    print(soundness_table.listed(alarms, command))
    print(f"Report: {output / 'soundness.md'}")
    if options.plots:
        from soundness_curves import write_plots

        for path in write_plots(rows, output / "plots"):
            print(f"Plot: {path}")
    return _exit_code(rows)


def _command(options: argparse.Namespace, draw: PooledDraw) -> str:
    """Return what draws and judges the same problems again, when ``--only N`` is added."""
    words = ["python", "benchmarks/soundness.py", "--seed", str(draw.seed), "--pool", str(draw.shapes)]
    words += ["--operation", draw.operation] if draw.operation else []
    words += ["--implementation", *options.implementation] if options.implementation else []
    return shlex.join(words)


def _exit_code(rows: pd.DataFrame) -> int:
    codes: set[int] = {int(Verdict(verdict).exit_code) for verdict in rows.loc[~rows["xfail"], "verdict"].unique()}
    return next((code for code in (1, 3) if code in codes), 0)


if __name__ == "__main__":
    on_one_thread()
    sys.exit(main())
