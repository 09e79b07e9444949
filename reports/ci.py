"""Reports for CI systems: a summary on the page of a run, annotations at the lines of cases, and SARIF 2.1.0.

The limits are from GitHub's documentation of workflow commands. A job summary is appended to the file that
``GITHUB_STEP_SUMMARY`` names, and may have 1 MiB per step. An annotation is a printed line
``::error file=...::message``; GitHub shows ten of each kind per step.

Code scanning shows SARIF: an alert for each fault, at the ``def`` of your kernel. A defect may fail many cases and is
one result: its location is that of the simplest case, and the lines of other cases are related locations. Its
fingerprint has neither numbers nor lines, so the alert stays the same if the code around it changes; GitHub identifies
alerts by ``primaryLocationLineHash``. Expected failures are no results; units that could not be run are notifications.

A badge shows how much of a corpus agrees: a small SVG, or the JSON from which shields.io draws one. It is green only if
all requested cases were judged and agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any
from urllib.parse import quote

from attncheck.common.errors import ExitCode, OutputError
from attncheck.common.wording import truncate_list
from attncheck.reports.cells import State, cell_table
from attncheck.reports.coverage import coverage_by_column
from attncheck.reports.defects import Defect, find_defects, group_by_defect
from attncheck.reports.failures import failures_of
from attncheck.reports.frames import Frames
from attncheck.reports.html.contents import template_environment
from attncheck.reports.json_documents import Failure, make_header, to_plain_data
from attncheck.reports.markdown import blocks_lines, code_span, escape_markdown
from attncheck.reports.one_failure import EVALUATION_KEYS
from attncheck.reports.sections import defects_section, implementations_table, truncate
from attncheck.reports.summary import comparison_exit_code, make_summary
from attncheck.results.format import FAILURE_NUMBERS
from attncheck.spec.verdicts import Verdict

MAX_SUMMARY_BYTES = 1024 * 1024
"""The largest summary of a step; GitHub does not show a larger one."""
MAX_ANNOTATIONS = 10
NOISY_RULE = "noisy"
_MAX_LISTED_DEFECTS = 20
_MAX_MESSAGE_LETTERS = 400
_TRUNCATION_NOTE = "\n\n(The rest is left out: a summary may have 1 MiB.)\n"


def render_ci_summary(frames: Frames, report: Path, *, is_written: bool = True) -> str:
    """Return a short report in Markdown: the answer, verdicts per implementation, defects, and the path of the report.

    If no report is written, ``report`` is the folder of the results.
    """
    answer = make_summary(frames)
    bad = defects_section(frames, _MAX_LISTED_DEFECTS, most_letters=_MAX_MESSAGE_LETTERS)
    counts = [implementations_table(frames)] if frames.columns else []
    notes = truncate_list(_MAX_LISTED_DEFECTS, frames.notes, "and {} more that could not be run")
    listed = [escape_markdown(truncate(line, _MAX_MESSAGE_LETTERS)) for line in (*answer.sentences, *notes)]
    return "\n".join(
        [
            f"### attncheck: {escape_markdown(truncate(answer.first_line, _MAX_MESSAGE_LETTERS))}",
            "",
            *(f"- {line}" for line in listed),
            "",
            *blocks_lines([*counts, *([] if bad is None else bad.blocks)]),
            "",
            f"The whole report: {code_span(report)}"
            if is_written
            else f"The results, without a report: {code_span(report)}",
            "",
        ]
    )


def append_summary(text: str, path: Path) -> None:
    """Append a summary to the file that a CI system reads, truncated to the file's largest size.

    Raises ``OutputError`` if the file cannot be written.
    """
    data = f"\n{text}\n".encode()
    with OutputError.convert_os_errors(f"the summary {path}"):
        taken = path.stat().st_size if path.exists() else 0
        room = MAX_SUMMARY_BYTES - taken
        if len(data) > room:
            note = _TRUNCATION_NOTE.encode()
            kept = data[: max(0, room - len(note))].rpartition(b"\n")[0]  # whole lines, so that no table row is cut
            data = kept + note if kept else b""
        with path.open("ab") as file:
            file.write(data)


def annotation_lines(frames: Frames, report: Path, *, is_written: bool = True) -> Iterator[str]:
    """Yield annotations: an error for each defect and each unit that could not be run, a warning for noise.

    Each kind is limited to the number that is shown; a notice then counts the rest. Expected failures get none: they
    fail nothing, and there would be too many. If no report is written, ``report`` is the folder of the results.
    """
    noisy = noisy_stages(frames)
    # Problems come before defects: they explain why others may be missing.
    problems = [_workflow_command("error", {"title": "attncheck: not run"}, problem) for problem in frames.problems]
    errors = problems[:MAX_ANNOTATIONS]
    for defect in find_defects(frames)[: MAX_ANNOTATIONS - len(errors)]:
        cases = f"{len(defect.cases):,} cases, the simplest " if defect.further_case_count else ""
        shown = replace(defect.first, verdict=defect.name, dtype=", ".join(defect.dtypes), message=defect.text)
        errors.append(_annotation_line("error", shown, frames, cases))
    yield from errors
    yield from (_annotation_line("warning", failure, frames) for failure in noisy[:MAX_ANNOTATIONS])
    counts = {
        "error": (len(problems) + len(find_defects(frames)), len(errors)),
        "warning": (len(noisy), min(len(noisy), MAX_ANNOTATIONS)),
    }
    cut = [f"{all_ - shown} more {kind}s" for kind, (all_, shown) in counts.items() if all_ > shown]
    if cut:
        rest = "report" if is_written else "results"
        yield _workflow_command("notice", {"title": "attncheck"}, f"{' and '.join(cut)} in the {rest}: {report}")


def noisy_stages(frames: Frames) -> list[Failure]:
    """Return the first stage of each case that agrees and is noisier than known good implementations."""
    results = frames.results
    noisy = results["tier"].eq("warning") | results["introduced_tier"].eq("warning")
    rows = results[noisy & results["verdict"].eq(Verdict.AGREE)].drop_duplicates(list(EVALUATION_KEYS))
    message = "larger errors than known good implementations make; a warning, which fails nothing"
    return failures_of(frames, rows.assign(verdict=NOISY_RULE, message=message, begins_at=None))


def _annotation_line(kind: str, failure: Failure, frames: Frames, cases: str = "") -> str:
    """Return an annotation at the ``def`` of a user's function, else at the line of the case."""
    case = frames.cases[failure.case]
    source = frames.sources.get((failure.environment, failure.implementation))
    location = source or case
    dtype = f" in {failure.dtype}" if failure.dtype else ""
    who = frames.name_with_environment(failure.implementation, failure.environment)
    title = f"{failure.verdict}: {who or case['title']}{dtype}"
    stage = f"{failure.stage}: " if failure.stage else ""
    named = f"{case['name']} ({case['file']}:{case['line']})" if source else case["name"]
    message = f"{cases}{named}: {stage}{failure.message or failure.verdict}"
    return _workflow_command(kind, {"file": location["file"], "line": location["line"], "title": title}, message)


def _workflow_command(kind: str, properties: Mapping[str, object], message: str) -> str:
    values = {
        name: _escape_workflow_data(str(value)).replace(":", "%3A").replace(",", "%2C")
        for name, value in properties.items()
    }
    written = ",".join(f"{name}={value}" for name, value in values.items())
    return f"::{kind} {written}::{_escape_workflow_data(truncate(message, _MAX_MESSAGE_LETTERS))}"


def _escape_workflow_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_MAX_RELATED_LOCATIONS = 20
_MAX_CASES = 50
_FIELDS_WITHOUT_CASE = ("verdict", "stage", *FAILURE_NUMBERS)

RULE_HELP: Mapping[str, str] = {
    Verdict.MISPRINT: "A document prints a number that the exact answer misses.",
    Verdict.SEMANTIC: "The answer is right for another convention than the case's own.",
    Verdict.NUMERIC: "An error is larger than the roundings that the implementation declares can make.",
    Verdict.NONFINITE: "A value is NaN or infinite where the exact one is not, or the other way round.",
    Verdict.DTYPE: "A result has another dtype than it should have.",
    Verdict.SHAPE: "A result has another shape than it should have.",
    Verdict.XPASS: "A recorded failure or erratum no longer happens: remove its entry.",
    Verdict.UNTRIED: "The case was not tried, because the cases before it ended the same way too often.",
    Verdict.ERROR: "The call raised an error.",
    Verdict.TIMEOUT: "The call took longer than its time limit.",
    Verdict.CRASH: "The call ended its process.",
    NOISY_RULE: "The errors are larger than those of known good implementations. They fail nothing.",
}
"""The texts of rules that are no diagnosis."""
_EXPLAIN_HINT = "attncheck explain shows the first stage that is wrong, and its worst element."


def render_sarif(frames: Frames, below: PurePosixPath | None = None) -> str:
    """Return the log. The same results give the same text.

    ``below`` is the folder of the run in its repository; paths of files are relative to the repository.
    """
    every_defect = [*find_defects(frames), *group_by_defect(frames, noisy_stages(frames), {})]
    rules = sorted({defect.name for defect in every_defect})
    place = below or PurePosixPath()
    has_failed = bool(frames.problems) or frames.has_faults
    code = ExitCode.BAD_INPUT if frames.has_faults else ExitCode.NOT_RUN
    why = {"exitCodeDescription": code.name.lower().replace("_", " ")} if has_failed else {}
    notifications = [{"level": "error", "message": {"text": text}} for text in frames.problems]
    run = {
        "tool": {
            "driver": {
                "name": "attncheck",
                "version": make_header("").version,
                "rules": [_sarif_rule(rule) for rule in rules],
            }
        },
        "invocations": [{"executionSuccessful": not has_failed, **why, "toolExecutionNotifications": notifications}],
        "results": [_sarif_result(defect, frames, rules, place) for defect in every_defect],
        "columnKind": "unicodeCodePoints",
    }
    log = {"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}
    return json.dumps(to_plain_data(log), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _sarif_rule(name: str) -> dict[str, Any]:
    text = RULE_HELP.get(name) or f"The numbers are those of a known convention or mistake: {name.replace('-', ' ')}."
    where = "docs/reference/verdicts.md" if name in RULE_HELP else "docs/diagnoses.md"
    level = "warning" if name == NOISY_RULE else "error"
    return {
        "id": name,
        "name": "".join(part.capitalize() for part in name.split("-")),
        "shortDescription": {"text": text if name in RULE_HELP else f"attention: {name.replace('-', ' ')}"},
        "fullDescription": {"text": text},
        "help": {"text": f"{text} {_EXPLAIN_HINT} The documentation says more in {where}."},
        "defaultConfiguration": {"level": level},
        "properties": {"tags": ["attention", "numerics"], "precision": "very-high", "problem.severity": level},
    }


def _sarif_result(defect: Defect, frames: Frames, rules: Sequence[str], below: PurePosixPath) -> dict[str, Any]:
    first, rule = defect.first, defect.name
    source = frames.sources.get((first.environment, first.implementation))  # its def, or else the line of the case
    file, line = (source["file"], source["line"]) if source else (first.file, first.line or 1)
    # Only files that exist here: bundled cases are in no user's repository.
    here = [case for identity in defect.cases if Path((case := frames.cases[identity])["file"]).is_file()]
    parts = (first.environment, first.implementation, rule, first.stage, "" if first.dtype else first.case)
    mark = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return {
        "ruleId": rule,
        "ruleIndex": rules.index(rule),
        "level": "warning" if rule == NOISY_RULE else "error",
        "message": {"text": _sarif_message(defect)},
        "locations": [_sarif_location(file, line, below)],
        "relatedLocations": [
            {"id": number, **_sarif_location(case["file"], case["line"], below), "message": {"text": case["name"]}}
            for number, case in enumerate(here[:_MAX_RELATED_LOCATIONS], 1)
        ],
        "occurrenceCount": defect.evaluations,
        "partialFingerprints": {"primaryLocationLineHash": f"{mark}:1", "attncheck/v1": mark},
        "properties": {
            "implementation": first.implementation,
            "cases": list(defect.cases[:_MAX_CASES]),
            "dtypes": [dtype for dtype in defect.dtypes if dtype],
            **{name: value for name, value in asdict(first).items() if name in _FIELDS_WITHOUT_CASE},
        },
    }


def _sarif_message(defect: Defect) -> str:
    first, cases = defect.first, defect.cases
    who = f"{first.implementation}: " if first.implementation else ""
    stage = f"{first.stage}: " if first.stage else ""
    more = f" It happens in {len(cases):,} cases; this is the simplest." if len(cases) > 1 else ""
    again = f" Run: {first.next[0]}" if first.next else ""
    what = " ".join((defect.text or first.verdict).split())
    return f"{who}{stage}{what} (case {first.case}{f' in {first.dtype}' if first.dtype else ''}).{more}{again}"


def _sarif_location(file: str, line: int, below: PurePosixPath) -> dict[str, Any]:
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if path.is_absolute():
        artifact = {"uri": path.as_uri()}
    else:  # relative to the root of the sources
        uri = quote(normpath(below / path.as_posix()).encode("utf-8", "surrogateescape"))
        artifact = {"uri": uri, "uriBaseId": "%SRCROOT%"}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": max(line, 1)}}}


def folder_in_repository(folder: Path) -> PurePosixPath:
    """Return a folder relative to its repository, which is the closest parent with a ``.git``."""
    folder = folder.resolve()
    root = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), folder)
    return PurePosixPath(folder.relative_to(root).as_posix())


BADGE_LABEL = "attention"
BADGE_LABEL_COLOUR = "#24292f"
GREEN, RED, AMBER, BLUE, GREY = "#1a7f37", "#cf222e", "#8a5a00", "#0860c4", "#57606a"
"""All agrees; something is wrong; something could not be run; a part was judged, and agrees; nothing was judged."""
BADGE_TEXT_COLOUR = "#ffffff"
_BADGE_PADDING = 8
_LETTER_WIDTHS = {**dict.fromkeys("il,. ", 3.5), **dict.fromkeys("tfr", 4.5), **dict.fromkeys("0123456789", 7.0)}
"""Widths in pixels of letters of 11 pixels in the badge's fonts."""
_DEFAULT_LETTER_WIDTH = 6.8
"""The width of all other letters."""


@dataclass(frozen=True)
class Badge:
    """The message of a badge, and its colour."""

    message: str
    colour: str


def make_badge(frames: Frames) -> Badge:
    """Count the requested cases that agree, of all implementations together."""
    cells = [cells for row in cell_table(frames).values() for cells in row.values()]
    states = [{cell.state for cell in of_case.values()} for of_case in cells]
    right, open_ = {State.AGREE, State.ERRATUM}, {State.UNSUPPORTED, State.UNVERIFIED}
    agree = sum(bool(of_case & right) and of_case <= right | open_ for of_case in states)
    counts = coverage_by_column(frames)
    asked, judged = sum(entry.asked for entry in counts), sum(entry.judged for entry in counts)
    code = comparison_exit_code(frames)
    if not judged:
        return Badge("not judged", GREY)
    message = f"{agree:,} of {asked:,} agree"
    if code is ExitCode.AGREE:
        return Badge(message, GREEN if agree == judged == asked else BLUE)
    return Badge(message, RED if code is ExitCode.DISAGREE else AMBER)


def render_badge_svg(badge: Badge) -> str:
    """Return the badge as a self-contained SVG that a screen reader can read."""
    parts, start = [], 0
    for text, colour in ((BADGE_LABEL, BADGE_LABEL_COLOUR), (badge.message, badge.colour)):
        width = round(sum(_LETTER_WIDTHS.get(letter, _DEFAULT_LETTER_WIDTH) for letter in text)) + 2 * _BADGE_PADDING
        parts.append((text, colour, start, width))
        start += width
    return (
        template_environment()
        .get_template("badge.svg")
        .render(parts=parts, whole=start, padding=_BADGE_PADDING, ink=BADGE_TEXT_COLOUR)
        + "\n"
    )


def render_badge_json(badge: Badge) -> str:
    """Return the JSON that shields.io reads from an endpoint."""
    record = {"schemaVersion": 1, "label": BADGE_LABEL, "message": badge.message, "color": badge.colour}
    return json.dumps(record, indent=2) + "\n"
