"""A report as SARIF 2.1.0, which code scanning shows: an alert for each fault, at the ``def`` of one's own kernel.

A defect may fail many cases and is one result: its place is that of the simplest case, the lines of others are related
locations, and its fingerprint holds neither numbers nor lines, so that the alert stays the same while the code around
it changes. GitHub tells alerts apart by
``primaryLocationLineHash``. What fails as expected is no result; what could not be run is a notification.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import pandas as pd

from attncheck.errors import ExitCode
from attncheck.explain import NUMBERS
from attncheck.reports.ci import noisy_rows
from attncheck.reports.defects import Defect, defects, grouped
from attncheck.reports.frames import Frames
from attncheck.reports.machine.documents import Failure
from attncheck.reports.machine.failures import failures_of
from attncheck.reports.machine.text import header, plain
from attncheck.verdicts import Verdict

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
NOISY = "noisy"
_MAX_RELATED = 20
_MAX_CASES = 50
_WITHOUT_CASE = ("verdict", "stage", *NUMBERS)

HELP: Mapping[str, str] = {
    Verdict.MISPRINT: "A document prints a number that the exact answer misses.",
    Verdict.SEMANTIC: "The answer is right for another convention than the case's own.",
    Verdict.NUMERIC: "An error is larger than the roundings that the implementation declares can make.",
    Verdict.NONFINITE: "A value is NaN or infinite where the exact one is not, or the other way round.",
    Verdict.DTYPE: "A result has another dtype than it should have.",
    Verdict.SHAPE: "A result has another shape than it should have.",
    Verdict.XPASS: "A recorded failure or erratum no longer happens: remove its entry.",
    Verdict.UNTRIED: "The case was not tried, because those before it had ended alike too often.",
    Verdict.ERROR: "The call raised an error.",
    Verdict.TIMEOUT: "The call took longer than its time limit.",
    Verdict.CRASH: "The call ended its process.",
    NOISY: "The errors are larger than those of known good implementations. They fail nothing.",
}
"""By rule: what it says, of those that are no diagnosis."""
_EXPLAINED = "attncheck explain shows the first stage that is wrong, and its worst element."


def render_sarif(frames: Frames, below: PurePosixPath | None = None) -> str:
    """Return the log. The same results give the same text.

    ``below`` is the folder of the run in its repository, by which files are named there.
    """
    noisy = grouped(frames, noisy_rows(frames).assign(rows=1), {})
    found = [*defects(frames), *noisy]
    firsts = failures_of(frames, pd.DataFrame([each.row for each in found])) if found else []
    rules = sorted({each.name for each in found})
    place = below or PurePosixPath()
    run = {
        "tool": {
            "driver": {
                "name": "attncheck",
                "version": header("").version,
                "rules": [_rule(rule) for rule in rules],
            }
        },
        "invocations": [_invocation(frames)],
        "results": [
            _result(each, replace(first, message=each.text), frames, rules, place)
            for each, first in zip(found, firsts, strict=True)
        ],
        "columnKind": "unicodeCodePoints",
    }
    log = {"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}
    return json.dumps(plain(log), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _rule(name: str) -> dict[str, Any]:
    text = HELP.get(name) or f"The numbers are those of a known convention or mistake: {name.replace('-', ' ')}."
    where = "docs/reference/verdicts.md" if name in HELP else "docs/diagnoses.md"
    level = "warning" if name == NOISY else "error"
    return {
        "id": name,
        "name": "".join(part.capitalize() for part in name.split("-")),
        "shortDescription": {"text": text if name in HELP else f"attention: {name.replace('-', ' ')}"},
        "fullDescription": {"text": text},
        "help": {"text": f"{text} {_EXPLAINED} The documentation says more in {where}."},
        "defaultConfiguration": {"level": level},
        "properties": {"tags": ["attention", "numerics"], "precision": "very-high", "problem.severity": level},
    }


def _result(
    defect: Defect, first: Failure, frames: Frames, rules: Sequence[str], below: PurePosixPath
) -> dict[str, Any]:
    rule = defect.name
    file, line = _location_of(first, frames)
    parts = (first.environment, first.implementation, rule, first.stage, "" if first.dtype else first.case)
    mark = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return {
        "ruleId": rule,
        "ruleIndex": rules.index(rule),
        "level": "warning" if rule == NOISY else "error",
        "message": {"text": _message(first, defect.cases)},
        "locations": [_location(file, line, below)],
        "relatedLocations": _related([frames.cases[each] for each in defect.cases], below),
        "occurrenceCount": defect.evaluations,
        "partialFingerprints": {"primaryLocationLineHash": f"{mark}:1", "attncheck/v1": mark},
        "properties": {
            "implementation": first.implementation,
            "cases": list(defect.cases[:_MAX_CASES]),
            "dtypes": [dtype for dtype in defect.dtypes if dtype],
            **{name: value for name, value in asdict(first).items() if name in _WITHOUT_CASE},
        },
    }


def _related(cases: Iterable[Mapping[str, Any]], below: PurePosixPath) -> list[dict[str, Any]]:
    """Return the lines of cases in files that are here; those of bundled cases are no part of anybody's repository."""
    here = [case for case in cases if Path(case["file"]).is_file()]
    return [
        {"id": number, **_location(case["file"], case["line"], below), "message": {"text": case["name"]}}
        for number, case in enumerate(here[:_MAX_RELATED], 1)
    ]


def _message(first: Failure, cases: Sequence[str]) -> str:
    who = f"{first.implementation}: " if first.implementation else ""
    stage = f"{first.stage}: " if first.stage else ""
    more = f" It happens in {len(cases):,} cases; this is the simplest." if len(cases) > 1 else ""
    again = f" Run: {first.next[0]}" if first.next else ""
    what = " ".join((first.message or first.verdict).split())
    return f"{who}{stage}{what} (case {first.case}{f' in {first.dtype}' if first.dtype else ''}).{more}{again}"


def _location_of(failure: Failure, frames: Frames) -> tuple[str, int]:
    """Return where a failure is shown: at the ``def`` of an own implementation, else at the line of its case."""
    source = frames.sources.get((failure.environment, failure.implementation))
    return (source["file"], source["line"]) if source else (failure.file, failure.line or 1)


def _location(file: str, line: int, below: PurePosixPath) -> dict[str, Any]:
    uri, base = _uri(file, below)
    artifact = {"uri": uri, **({"uriBaseId": "%SRCROOT%"} if base else {})}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": max(line, 1)}}}


def _uri(file: str, below: PurePosixPath) -> tuple[str, bool]:
    """Return a file as a URI, and whether that begins at the root of the sources."""
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if path.is_absolute():
        return path.as_uri(), False
    parts: list[str] = []
    for part in (below / path.as_posix()).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return quote("/".join(parts).encode("utf-8", "surrogateescape")), True


def _invocation(frames: Frames) -> dict[str, Any]:
    notifications = [{"level": "error", "message": {"text": text}} for text in frames.problems]
    has_failed = frames.is_incomplete or frames.has_faults
    code = ExitCode.BAD_INPUT if frames.has_faults else ExitCode.NOT_RUN if has_failed else ExitCode.AGREE
    why = {"exitCodeDescription": code.name.lower().replace("_", " ")} if has_failed else {}
    return {"executionSuccessful": not has_failed, **why, "toolExecutionNotifications": notifications}


def folder_in_repository(folder: Path) -> PurePosixPath:
    """Return a folder as its repository names it; the repository begins where a ``.git`` is."""
    folder = folder.resolve()
    root = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)
    return PurePosixPath(folder.relative_to(root).as_posix())
