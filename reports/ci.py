"""What a CI system shows of a report: a summary on the page of the run, annotations beside the lines of cases.

GitHub's documentation of workflow commands says what of it is taken here: a job summary is appended to the file that
``GITHUB_STEP_SUMMARY`` names and may have 1 MiB per step; an annotation is a line ``::error file=...::message`` that is
printed, and of each kind ten are shown per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from attncheck.errors import OutputError
from attncheck.reports.commands import first_commands
from attncheck.reports.defects import Defect, defects
from attncheck.reports.failure_patterns import in_common_lines
from attncheck.reports.frames import Frames, records
from attncheck.reports.markdown.text import code, commands, escape, table
from attncheck.reports.summary import make_summary
from attncheck.reports.terminal import verdict_counts
from attncheck.verdicts import Verdict
from attncheck.wording import counted

MAX_SUMMARY_BYTES = 1024 * 1024
"""What a step's summary may have in all: a longer one is not shown at all."""
MAX_ANNOTATIONS = 10
_MAX_LISTED = 20
_MAX_LETTERS = 400
_CUT = "\n\n(The rest is left out: a summary may have 1 MiB.)\n"


def render_ci_summary(frames: Frames, report: Path, *, is_written: bool = True) -> str:
    """Return a short report in Markdown: the answer, verdicts per implementation, what is wrong, where the rest is.

    Where no report is written, ``report`` is the folder of the results.
    """
    answer = make_summary(frames)
    headings, lines = verdict_counts(frames)
    listed = [escape(_short(line)) for line in (*answer.sentences, *frames.notes[:_MAX_LISTED])]
    unsaid = len(frames.notes) - _MAX_LISTED
    return "\n".join(
        [
            f"### attncheck: {escape(_short(answer.first_line))}",
            "",
            *(f"- {line}" for line in listed),
            *([f"- and {unsaid} more that could not be run"] if unsaid > 0 else []),
            "",
            *table(list(map(escape, headings)), [list(map(escape, line)) for line in lines], "l" + "r" * len(headings)),
            "",
            *_wrong(frames),
            f"The whole report: {code(report)}" if is_written else f"The results, without a report: {code(report)}",
            "",
        ]
    )


def _wrong(frames: Frames) -> list[str]:
    found = defects(frames)
    if not found:
        return []
    listed = found[:_MAX_LISTED]
    rows = [
        [
            escape(_short(each.text)),
            escape(_who(row, frames)),
            str(len(each.cases)),
            ", ".join(each.dtypes),
            f"**{row['verdict']}**",
            code(row["stage"]),
            code(row["case"]),
        ]
        for each in listed
        for row in [each.row]
    ]
    more = len(found) - len(listed)
    return [
        *(line for said in in_common_lines(frames) for line in (f"**{escape(_short(said))}.**", "")),
        *table(
            ["what is wrong", "implementation", "cases", "dtype", "verdict", "stage", "simplest case"], rows, "llrllll"
        ),
        "",
        *([f"And {counted(more, 'more defect')}.", ""] if more else []),
        *commands(first_commands(frames)),
    ]


def append_summary(text: str, path: Path) -> None:
    """Append a summary to the file that a CI system reads, cut so that the file stays within what it may have.

    Raises ``OutputError`` where the file cannot be written.
    """
    data = f"\n{text}\n".encode()
    try:
        taken = path.stat().st_size if path.exists() else 0
        room = MAX_SUMMARY_BYTES - taken
        if len(data) > room:
            kept = data[: max(0, room - len(_CUT.encode()))].rpartition(b"\n")[0]  # no line, so no table row, in half
            data = kept + _CUT.encode() if kept else b""
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise OutputError.of(f"the summary {path}", error) from None


def annotation_lines(frames: Frames, report: Path, *, is_written: bool = True) -> Iterator[str]:
    """Yield annotations: an error for each defect and for what could not be run, a warning for noise.

    Of each kind as many as are shown, then a notice that says how many there are in all. What is known beforehand is
    none: it fails nothing, and there would be too many. Where no report is written, ``report`` is the results' folder.
    """
    noisy = noisy_rows(frames)
    # Without a place, so not cut in favour of those that have one: it explains why the others may be missing.
    problems = [_command("error", {"title": "attncheck: not run"}, problem) for problem in frames.problems]
    found = [_of_defect(each, frames) for each in defects(frames)[:MAX_ANNOTATIONS]]
    errors = [*problems[:MAX_ANNOTATIONS], *found][:MAX_ANNOTATIONS]
    yield from errors
    yield from (_annotation("warning", row, frames) for row in records(noisy.head(MAX_ANNOTATIONS)))
    counts = {
        "error": (len(problems) + len(defects(frames)), len(errors)),
        "warning": (len(noisy), min(len(noisy), MAX_ANNOTATIONS)),
    }
    cut = [f"{all_ - shown} more {kind}s" for kind, (all_, shown) in counts.items() if all_ > shown]
    if cut:
        rest = "report" if is_written else "results"
        yield _command("notice", {"title": "attncheck"}, f"{' and '.join(cut)} in the {rest}: {report}")


def noisy_rows(frames: Frames) -> pd.DataFrame:
    """Return the first stage of each case that agrees and is noisier than known good implementations."""
    results = frames.results
    noisy = results["tier"].eq("warning") | results["introduced_tier"].eq("warning")
    rows = results[noisy & results["verdict"].eq(Verdict.AGREE)]
    rows = rows.drop_duplicates(["case", "dtype", "environment", "implementation"])
    return rows.assign(
        verdict="noisy", message="larger errors than known good implementations make; a warning, which fails nothing"
    )


def _of_defect(defect: Defect, frames: Frames) -> str:
    cases = f"{len(defect.cases):,} cases, the simplest " if defect.others else ""
    row = {**defect.row, "verdict": defect.name, "dtype": ", ".join(defect.dtypes), "message": defect.text}
    return _annotation("error", row, frames, cases)


def _annotation(kind: str, row: Mapping[str, Any], frames: Frames, cases: str = "") -> str:
    """Return an annotation: at the ``def`` of somebody's own implementation, else at the line of the case."""
    case = frames.cases[row["case"]]
    source = frames.sources.get((row["environment"], row["implementation"]))
    location = source or case
    dtype = f" in {row['dtype']}" if row["dtype"] else ""
    title = f"{row['verdict']}: {_who(row, frames) or case['title']}{dtype}"
    stage = f"{row['stage']}: " if row["stage"] else ""
    named = f"{case['name']} ({case['file']}:{case['line']})" if source else case["name"]
    message = f"{cases}{named}: {stage}{row['message'] or row['verdict']}"
    return _command(kind, {"file": location["file"], "line": location["line"], "title": title}, message)


def _command(kind: str, properties: Mapping[str, object], message: str) -> str:
    written = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    return f"::{kind} {written}::{_data(_short(message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _who(row: Mapping[str, Any], frames: Frames) -> str:
    many = len(frames.environments) > 1 and row["environment"]
    return f"{row['implementation']} ({row['environment']})" if many else row["implementation"]


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 3]}..."
