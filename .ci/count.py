"""Fails when fewer tests or cases ran, or were judged, than expected: a green run that ran nothing is not green.

The expected numbers are in expected.json. Raise them when tests or cases are added; lower them only with a reason.
"""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent


def tests_that_ran(path: Path) -> int:
    """Tests of a JUnit file that were neither skipped nor left out."""
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    return sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites)


def count(environment: str, expected: dict[str, Any]) -> list[str]:
    """What is missing in one environment, a line each."""
    junit = ROOT / "results" / "tests" / f"{environment}.xml"
    summary = ROOT / "results" / "tox" / environment / "summary.json"
    if not junit.is_file() and expected.get("optional"):
        print(f"{environment}: left out, its Python is not installed")
        return []
    if not junit.is_file() or not summary.is_file():
        return [f"{environment}: it did not run"]
    run = json.loads(summary.read_text(encoding="utf-8"))
    found = {"tests": tests_that_ran(junit)} | {name: run[name] for name in ("cases", "evaluations")}
    print(f"{environment}: " + ", ".join(f"{number} {name}" for name, number in found.items()))
    print(f"{environment}: judged " + ", ".join(f"{name} in {number} cases" for name, number in run["judged"].items()))
    few = [
        f"{number} {name} ran, expected at least {expected[name]}"
        for name, number in found.items()
        if number < expected[name]
    ]
    for name, least in expected["judged"].items():
        if (judged := run["judged"].get(name, 0)) < least:
            few.append(f"{name} was judged in {judged} cases, expected at least {least}")
    return [f"{environment}: {line}" for line in few]


def main() -> int:
    """Count every environment; 1 if anything is missing."""
    expected = json.loads((ROOT / ".ci" / "expected.json").read_text(encoding="utf-8"))
    missing = [line for environment, numbers in expected.items() for line in count(environment, numbers)]
    for line in missing:
        print(f"too few: {line}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
