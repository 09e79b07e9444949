"""A comparison that is kept in a repository: the answer as Markdown, every verdict, and the versions they are of.

README.md      the answer, the versions, what is wrong or known, and how many numbers of each document hold
verdicts.csv   one row per case, implementation and dtype: what a later run is compared with
versions.csv   one row per implementation

Nothing in verdicts.csv depends on the processor: errors, their sizes and warnings about noise stay out of it. What is
expected to fail on some processors only is published as that, whether it failed here or not. A case that was added
since the comparison was published is not in it, and is compared with nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from attncheck.errors import OutputError, ResultsError, UsageError
from attncheck.reading.expected_failures import ExpectedFailure, bundled_expected_failures
from attncheck.reports.comparison import HARMLESS, Change, Evaluation, Outcome, changes, level_of
from attncheck.reports.frames import Cell, Frames, State, cell_table, expected_failures, records, stage_order
from attncheck.reports.markdown import document_overview, escape, section_lines, table
from attncheck.reports.sections import expected_to_fail, wrong
from attncheck.reports.summary import make_summary
from attncheck.reports.write import csv_text, harmless
from attncheck.verdicts import ALL_CASES, Verdict

README, VERDICTS, VERSIONS = "README.md", "verdicts.csv", "versions.csv"


class Published(NamedTuple):
    """A published verdict: the word, the stage at which it goes wrong if it does, and whether it is expected."""

    verdict: str
    begins_at: str
    xfail: str

    @property
    def outcome(self) -> Outcome:
        """What it says of its evaluation; what is expected fails no run."""
        is_expected = self.xfail == "true"
        word = f"xfail {self.verdict}" if is_expected else self.verdict
        return Outcome(HARMLESS if is_expected else level_of(self.verdict), word, self.begins_at)


Verdicts = dict[Evaluation, Published]
"""The environment of an evaluation is empty: the file has each implementation once."""


def publish(frames: Frames, directory: Path) -> Path:
    """Write the comparison, in place of an earlier one; return the path of README.md.

    The same frames give the same bytes. Raises ``UsageError`` for runs that are not complete, ``OutputError`` for a
    folder that holds something else.
    """
    if frames.problems:
        raise UsageError(f"only complete runs are published: {frames.problems[0]}")
    verdicts = verdicts_of(frames)
    texts = {VERDICTS: _verdicts_csv(verdicts), VERSIONS: _versions_csv(frames), README: render_readme(frames)}
    with OutputError.where(directory):
        if directory.is_dir() and any(directory.iterdir()) and not (directory / VERDICTS).is_file():
            raise OutputError(
                f"{directory} is not empty and holds no published comparison; name another folder with --published"
            )
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8", newline="\n")
    return directory / README


class Drift(NamedTuple):
    """Verdicts of a run that are not the published ones, the number compared, and that of cases not published."""

    changes: list[Change]
    compared: int
    unpublished: int


def drift(frames: Frames, directory: Path) -> Drift:
    """Compare a run's verdicts with the published ones, by case, implementation and dtype.

    What the run left out because other cases stand for it is no difference, nor is a case that is not published.
    """
    left_out, published, found = _left_out(frames), read_verdicts(directory), verdicts_of(frames)
    cases = {evaluation.case for evaluation in published}
    expected = {evaluation: verdict.outcome for evaluation, verdict in published.items() if evaluation not in left_out}
    now = {evaluation: verdict.outcome for evaluation, verdict in found.items() if evaluation.case in cases}
    unpublished = {evaluation.case for evaluation in found} - cases
    return Drift(changes(expected, now), len(now), len(unpublished))


def _left_out(frames: Frames) -> set[Evaluation]:
    """Return what an implementation was not asked for because other cases stand for it."""
    rows = frames.results[frames.results["lacks"].eq(ALL_CASES)]
    return {
        Evaluation("", harmless(implementation), harmless(case), dtype)
        for case, implementation, dtype in rows[["case", "implementation", "dtype"]].itertuples(index=False)
    }


def verdicts_of(frames: Frames) -> Verdicts:
    """Return the verdicts of frames, without what was left out because other cases stand for it.

    Raises ``UsageError`` where an implementation ran in two environments.
    """
    columns = sorted(frames.columns, key=lambda column: column.implementation)
    for first, second in pairwise(columns):
        if first.implementation == second.implementation:
            raise UsageError(
                f"{first.implementation} ran in {first.environment} and in {second.environment}; "
                "a published comparison has each implementation once"
            )
    begins = _known_begins(frames)
    elsewhere = _of_some_processors(frames)
    left_out = _left_out(frames)
    return {
        evaluation: _on_some_processors(cell, elsewhere, case, column.implementation, dtype)
        or _published(cell, begins.get((case, column.implementation, dtype), ""))
        for case, cells in cell_table(frames).items()
        for column, by_dtype in cells.items()
        for dtype, cell in by_dtype.items()
        if (evaluation := Evaluation("", harmless(column.implementation), harmless(case), dtype)) not in left_out
    }


def read_verdicts(directory: Path) -> Verdicts:
    """Read the published verdicts. Raises ``ResultsError`` where there are none."""
    path = directory / VERDICTS
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        raise ResultsError(f"{path} does not exist; expected the verdicts that `attncheck publish` writes") from None
    except (OSError, UnicodeError, csv.Error) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
    if tuple(header) != _HEADER:
        raise ResultsError(f"{path} has the columns {','.join(header)}; expected {','.join(_HEADER)}")
    verdicts: Verdicts = {}
    for number, row in enumerate(rows, 2):
        if len(row) != len(_HEADER):
            raise ResultsError(f"{path}: row {number} has {len(row)} cells; expected {len(_HEADER)}")
        case, implementation, dtype = row[:3]
        evaluation = Evaluation("", implementation, case, dtype)
        if evaluation in verdicts:
            raise ResultsError(f"{path}: row {number} is the second of {' '.join(row[:3])}; expected one")
        verdicts[evaluation] = Published(*row[3:])
    return verdicts


_HEADER = ("case", "implementation", "dtype", *Published._fields)


def _published(cell: Cell, xfail_begins_at: str) -> Published:
    """Write a cell as texts, those that stand in the file."""
    if cell.state is State.ERRATUM:
        return Published(Verdict.MISPRINT.value, "", "true")
    if cell.state is State.XFAIL:
        return Published(cell.verdict, harmless(xfail_begins_at), "true")
    return Published(cell.verdict, harmless(cell.stage), "false")


def _of_some_processors(frames: Frames) -> list[ExpectedFailure]:
    """Return what is expected of the implementations on some processors alone, this machine's or others."""
    backends = {column.framework for column in frames.columns}
    return [each for each in bundled_expected_failures(sorted(backends)) if each.entry.processor is not None]


def _on_some_processors(
    cell: Cell, elsewhere: Iterable[ExpectedFailure], case: str, implementation: str, dtype: str
) -> Published | None:
    """Write a cell that agrees on some processors and fails as expected on others; None for any other cell."""
    if cell.state not in (State.AGREE, State.XFAIL):
        return None
    for each in elsewhere:
        verdict, processor = each.entry.verdict, each.entry.processor
        if each.names(implementation, case, dtype) and (cell.state is State.AGREE or cell.verdict == verdict):
            return Published(f"{verdict} with {processor}", "", "true")
    return None


def _known_begins(frames: Frames) -> Mapping[tuple[str, str, str], str]:
    """Return the first stage at which each expected failure shows, by case, implementation and dtype."""
    begins: dict[tuple[str, str, str], str] = {}
    for row in records(expected_failures(frames.results)):
        evaluation = (row["case"], row["implementation"], row["dtype"])
        stage = row["stage"] if pd.isna(row["begins_at"]) else row["begins_at"]
        begins[evaluation] = min(begins.get(evaluation, stage), stage, key=stage_order)
    return begins


def _verdicts_csv(verdicts: Verdicts) -> str:
    rows = sorted((key.case, key.implementation, key.dtype, *published) for key, published in verdicts.items())
    return csv_text(_HEADER, rows)


def _versions_csv(frames: Frames) -> str:
    runs = {run["environment"]: run for run in records(frames.environments)}
    rows = []
    for column in frames.columns:
        run = runs[column.environment]
        rows.append((column.implementation, column.version, run["python"], str(run.get("version_attncheck", ""))))
    return csv_text(("implementation", "version", "python", "attncheck"), sorted(rows))


def render_readme(frames: Frames) -> str:
    """Return the Markdown: a page that is read at once. The same frames give the same text."""
    sections = [
        _opening(frames),
        _versions(frames),
        section_lines(wrong(frames, 50)),
        section_lines(expected_to_fail(frames)),
        document_overview(frames),
    ]
    return "\n".join(line for section in sections if section for line in [*section, ""])


def _opening(frames: Frames) -> list[str]:
    answer = make_summary(frames)
    return [
        "# The bundled corpus on the pinned versions",
        "",
        f"**{escape(answer.first_line)}**",
        "",
        *(f"- {escape(sentence)}" for sentence in answer.sentences),
        "",
        "`make publish` writes this folder, at a release; nothing in it is written by hand. Every verdict is in "
        "[verdicts.csv](verdicts.csv), in which nothing depends on the processor. CI compares its runs of the corpus "
        "with it, and fails where the verdict of a case that is in it differs. `attncheck report` on the results of a "
        "run shows every case, and every document with its numbers and pictures.",
    ]


def _versions(frames: Frames) -> list[str]:
    rows = [[escape(column.implementation), escape(column.version)] for column in frames.columns]
    return ["## Versions", "", *table(["implementation", "version"], rows), "", "Also in [versions.csv](versions.csv)."]
