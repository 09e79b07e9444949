"""The soundness campaign: thousands of random problems on correct implementations, of which none may be flagged.

    python benchmarks/soundness.py --cases 2000 --seed 1 --output results/soundness
    python benchmarks/soundness.py --seed 1 --only 17        # one problem again, every stage of it

Ends with 0 if no T1 or T2 alarm was raised, with 1 if one was, with 3 if an evaluation gave nothing to judge. What is
done is on disk: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import soundness_table
from soundness_campaign import Campaign, run_campaign
from soundness_rows import Parts

from attncheck.backends import BackendEntry
from attncheck.harness import judging
from attncheck.harness.progress import progress_bar
from attncheck.harness.running.environment import describe_environment
from attncheck.harness.running.executor import Limits
from attncheck.harness.running.implementations import Implementation, choose_implementations
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import DTYPES

_LIMITS = Limits(case_seconds=180.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign that the command line asks for; return the exit code."""
    options = _parser().parse_args(arguments)
    implementations = _implementations(options)
    if options.only:
        return _repeat(options, implementations)
    output: Path = options.output
    parts = Parts(output / "parts", options.dtype, options.cases)
    facts = _facts(options, implementations)
    _settle(output / "campaign.json", facts)
    campaign = Campaign(options.seed, parts.missing, options.dtype, implementations, _LIMITS, output / "logs")
    campaign.logs.mkdir(exist_ok=True)
    with progress_bar(visible=True) as advance:
        for unit, rows in run_campaign(campaign, advance):
            parts.add(unit, rows)
    measured = soundness_table.read_rows(parts.files)
    return _tell(measured[measured["number"] < options.cases], facts, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="how many problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all problems (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/soundness"), help="default: %(default)s")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--backend", nargs="+", help="default: every one that is installed")
    parser.add_argument("--module", help="another module with the functions of a backend, judged as well")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="print these problems and write nothing")
    return parser


def _implementations(options: argparse.Namespace) -> list[Implementation]:
    chosen = choose_implementations(options.backend)
    if chosen.missing:
        raise SystemExit(f"not installed: {', '.join(chosen.missing)}")
    found = list(chosen.implementations)
    if options.module:
        found.append(Implementation(BackendEntry(options.module.rpartition(".")[2], options.module, ("numpy",))))
    return found


def _facts(options: argparse.Namespace, implementations: Sequence[Implementation]) -> dict[str, str]:
    environment = describe_environment([each.entry for each in implementations], _LIMITS.threads)
    return {
        "seed": str(options.seed),
        "dtypes": ", ".join(options.dtype),
        "implementations": ", ".join(each.name for each in implementations),
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        "python": environment["python"],
        "problems": _fingerprint(Path(__file__).parent, "soundness_[pr]*.py"),
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


def _repeat(options: argparse.Namespace, implementations: Sequence[Implementation]) -> int:
    """Run single problems again and print every stage of them."""
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(options.seed, options.only, options.dtype, implementations, _LIMITS, Path(folder))
        rows = [asdict(row) for _, found in run_campaign(campaign, lambda done, total: None) for row in found]
    frame = pd.DataFrame(rows)
    with pd.option_context("display.max_rows", None, "display.width", 250, "display.max_columns", None):
        print(frame.T.to_string() if len(frame) == 1 else frame.to_string(index=False))
    return _exit_code(frame)


def _tell(rows: pd.DataFrame, facts: Mapping[str, str], options: argparse.Namespace) -> int:
    """Write the report and its frames, and print the table and the alarms."""
    command = f"python benchmarks/soundness.py --seed {options.seed}"
    if options.module:
        command += f" --module {options.module}"
    told, output = soundness_table.alarms(rows), options.output
    whole = {"problems": f"{rows['number'].nunique():,}", **facts}
    (output / "soundness.md").write_text(soundness_table.report(rows, whole, command), encoding="utf-8")
    table = soundness_table.table(rows, ("dtype", "numerical_class"))
    for name, frame in {"table": table, "alarms": told}.items():
        frame.to_csv(output / f"{name}.csv", index=False, lineterminator="\n")
    print(soundness_table.markdown(table))
    print(soundness_table.listed(told, command))
    print(f"Report: {output / 'soundness.md'}")
    return _exit_code(rows)


def _exit_code(rows: pd.DataFrame) -> int:
    codes: set[int] = {int(Verdict(verdict).exit_code) for verdict in rows["verdict"].unique()}
    return next((code for code in (1, 3) if code in codes), 0)


if __name__ == "__main__":
    sys.exit(main())
