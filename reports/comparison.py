"""Comparison of two results, evaluation by evaluation; the wording of what changed; and the comparison that is kept.

``diff``, ``bisect``, ``publish --check``, ``survey --check`` and ``check --watch`` use it. An evaluation is *worse*
where it fails a run and did not before, or gives nothing and gave something; *better* is the opposite; a change that is
neither, such as another stage, is *other*. A change is a line, and a row of a table.

A repository keeps a comparison as three files:

README.md      the answer, the versions, what is wrong or known, and how many numbers of each document hold
verdicts.csv   one row per case, implementation and dtype: what a later run is compared with
versions.csv   one row per implementation

Versions are releases: which build of torch was installed, for a CPU or for CUDA, makes no difference on a CPU.
Nothing in verdicts.csv depends on the processor: errors, their sizes and warnings about noise stay out of it. What is
expected to fail on some processors only is published as that, whether it failed here or not. A case that was added
since the comparison was published is not in it, and is compared with nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from attncheck.common.errors import ExitCode, OutputError, ResultsError, UsageError
from attncheck.common.wording import count_noun, format_at_stage
from attncheck.reading.expected_failures import ExpectedFailure, load_bundled_expected_failures
from attncheck.reports.cells import Cell, State, cell_table
from attncheck.reports.document_model import Block, Items, Mark, Page, Section, Table, Text
from attncheck.reports.frames import (
    Frames,
    first_failing_stages,
    group_by_key,
    select_expected_failures,
    split_by,
    stage_sort_key,
    to_records,
)
from attncheck.reports.markdown import render_page_markdown, short_number_or_empty
from attncheck.reports.sections import defects_section, documents_section, expected_failures_section
from attncheck.reports.summary import make_summary
from attncheck.reports.write import escape_formula, read_csv_text, rows_to_csv, write_texts
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import ALL_CASES, Verdict

WORSE, BETTER, OTHER = "worse", "better", "other"
HARMLESS, WRONG, NO_RESULT = 0, 1, 2
"""Levels of an outcome: it fails no run, is wrong, or is missing."""
_LEVEL_OF_EXIT_CODE = {ExitCode.AGREE: HARMLESS, ExitCode.NOT_RUN: NO_RESULT}
Row = Mapping[str, Any]
Entry = TypeVar("Entry")
Value = TypeVar("Value")


class Evaluation(NamedTuple):
    """A case in a dtype on an implementation; the environment is empty if there is only one."""

    environment: str
    implementation: str
    case: str
    dtype: str


class Outcome(NamedTuple):
    """The outcome of an evaluation; the message explains it, and is not compared."""

    level: int
    word: str
    stage: str = ""
    detail: str = ""
    """A text after the verdict and its stage, such as the size of the error."""
    message: str = ""

    def __str__(self) -> str:
        return format_at_stage(self.word, self.stage) + self.detail


Outcomes = Mapping[Evaluation, Outcome]
MISSING_OUTCOME = Outcome(HARMLESS, "nothing")


def severity_of_verdict(verdict: str) -> int:
    """Return the level of a verdict that is not expected; ``WRONG`` for a word that is no verdict."""
    known = verdict in set(Verdict)
    return _LEVEL_OF_EXIT_CODE.get(Verdict(verdict).exit_code, WRONG) if known else WRONG


def changed_entries(
    before: Mapping[Entry, Value], after: Mapping[Entry, Value]
) -> Iterator[tuple[str, Entry, Value | None, Value | None]]:
    """Yield the keys whose values differ: added, removed or changed, the key, and both values (None if missing).

    Example:
        >>> list(changed_entries({"a": 1, "b": 2}, {"b": 3, "c": 4}))
        [('removed', 'a', 1, None), ('changed', 'b', 2, 3), ('added', 'c', None, 4)]
    """
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if old != new:
            yield "added" if old is None else "removed" if new is None else "changed", key, old, new


def outcome_changes(before: Outcomes, after: Outcomes, absent: Outcome = MISSING_OUTCOME) -> list[Row]:
    """Return a row for each evaluation whose outcomes differ, worse ones first; ``absent`` replaces a missing one.

    Outcomes that differ only in their messages are the same.
    """
    pairs = ((key, old or absent, new or absent) for _, key, old, new in changed_entries(before, after))
    rows = [_change_row(*pair) for pair in sorted(pairs) if pair[1][:-1] != pair[2][:-1]]
    return sorted(rows, key=lambda row: (WORSE, BETTER, OTHER).index(row["change"]))


def _change_row(evaluation: Evaluation, before: Outcome, after: Outcome) -> Row:
    """Return two different outcomes as a row, with the message of the new one, or else of the old one."""
    kind = OTHER if before.level == after.level else WORSE if after.level > before.level else BETTER
    cells: dict[str, str] = {}
    for side, outcome in (("before", before), ("after", after)):
        cells[side] = outcome.word + ("" if outcome.stage else outcome.detail)
        cells[f"{side}_stage"] = outcome.stage and outcome.stage + outcome.detail
    was = f"before: {before.message}" if before.message and not after.level else ""
    return {"change": kind, **evaluation._asdict(), **cells, "message": after.message or was}


def count_changes_text(kinds: Iterable[str]) -> str:
    """Count verdicts that changed, by kind, as a sentence without its end."""
    counts = Counter(kinds)
    worse = count_noun(counts[WORSE], "verdict")
    return f"{worse} got worse, {counts[BETTER]:,} got better, {counts[OTHER]:,} changed otherwise"


MAX_LISTED = 20


def abbreviated_change_lines(name: str, rows: Sequence[Row]) -> list[str]:
    """Return a line for each of the first changes of a table, and count the others."""
    rows = merge_dtypes(rows)
    more = [f"and {len(rows) - MAX_LISTED:,} more"] if len(rows) > MAX_LISTED else []
    return [*change_lines(name, rows[:MAX_LISTED]), *more]


def merge_dtypes(rows: Sequence[Row]) -> list[Row]:
    """Merge rows that differ only in their dtypes.

    Example:
        >>> merge_dtypes([{"case": "a", "dtype": "float16"}, {"case": "a", "dtype": "float32"}])
        [{'case': 'a', 'dtype': 'float32, float16'}]
    """
    together = group_by_key(rows, lambda row: tuple(value for name, value in row.items() if name != "dtype"))
    merged: list[Row] = []
    for alike in together.values():
        dtypes = {row.get("dtype", "") for row in alike}
        order = [*DTYPES, *sorted(dtypes - set(DTYPES))]
        merged.append({**alike[0], "dtype": ", ".join(sorted(dtypes, key=order.index))})
    return merged


def change_lines(name: str, rows: Sequence[Row]) -> list[str]:
    """Return a line for each row of a table of changes, with aligned cells."""
    cells = change_cells(name, rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def without_repeated_causes(rows: Sequence[Row]) -> list[Row]:
    """Leave out the cause at the beginning of a message if a row above has it; the numbers of the row stay."""
    causes, shown = set[str](), []
    for row in rows:
        cause, _, numbers = row["message"].partition("; ")
        shown.append({**row, "message": f"same cause; {numbers}"} if numbers and cause in causes else row)
        causes.add(cause)
    return shown


def change_cells(name: str, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each row of a table of changes, below ``HEADINGS``."""
    several = len({row.get("environment") for row in rows}) > 1
    where = [f" ({row['environment']})" if several else "" for row in rows]
    return [
        (row["change"], *_CELL_FUNCTIONS[name](row, f"{row.get('implementation')}{at}"))
        for row, at in zip(rows, where, strict=True)
    ]


def _verdict_cells(row: Row, who: str) -> tuple[str, ...]:
    other_case = " (another case by this id)" if row.get("case_changed") else ""
    before, after = (format_at_stage(row[side], row[f"{side}_stage"]) for side in ("before", "after"))
    return who, row["case"], row["dtype"], f"{before} -> {after}{other_case}", row["message"]


def _error_cells(row: Row, who: str) -> tuple[str, ...]:
    z, ratio = (
        f"{short_number_or_empty(row[f'before_{of}'])} -> {short_number_or_empty(row[f'after_{of}'])}"
        for of in ("z", "ratio")
    )
    tiers = f"{row['before_tier']} -> {row['after_tier']}"
    return who, row["case"], row["dtype"], row["stage"], f"z {z}", f"{ratio} of the bound ({row['measure']}), {tiers}"


def _expected_failure_cells(row: Row, who: str) -> tuple[str, ...]:
    cases = f"{row['before_cases']:,} -> {row['after_cases']:,} cases"
    return who, format_at_stage(row["verdict"], row["stage"]), cases, f"{row['reason']} {row['thread']}".strip()


def _environment_cells(row: Row, who: str) -> tuple[str, ...]:
    changed = f"{row['before']} -> {row['after']}"
    return (
        row["environment"],
        row["what"],
        {"added": row["after"], "removed": row["before"]}.get(row["change"], changed),
    )


_CELL_FUNCTIONS: Mapping[str, Callable[[Row, str], tuple[str, ...]]] = {
    "verdicts": _verdict_cells,
    "errors": _error_cells,
    "expected_failures": _expected_failure_cells,
    "cases": lambda row, who: (row["case"], f"{row['failing']:,} failing", row["what"]),
    "environments": _environment_cells,
    "counts": lambda row, who: (who, row["feature"], row["what"]),
}
HEADINGS: Mapping[str, Sequence[str]] = {
    "verdicts": ("change", "implementation", "case", "dtype", "verdict", "message"),
    "errors": ("change", "implementation", "case", "dtype", "stage", "error", "of its bound"),
    "expected_failures": ("change", "implementation", "verdict", "how often", "reason"),
    "cases": ("change", "case", "evaluations", "what"),
    "environments": ("change", "environment", "what", "value"),
}


README, VERDICTS, VERSIONS = "README.md", "verdicts.csv", "versions.csv"


_VERDICTS_HEADER = ("case", "implementation", "dtype", "verdict", "begins_at", "xfail")
_EXPECTED_PREFIX = "xfail "
"""Before the verdict of an outcome that is expected."""


def publish_comparison(frames: Frames, directory: Path) -> Path:
    """Write the comparison, replacing an earlier one; return the path of README.md.

    The same frames give the same bytes. Raises ``UsageError`` for runs that are not complete, ``OutputError`` for a
    folder with other files.
    """
    if frames.problems:
        raise UsageError(f"only complete runs are published: {frames.problems[0]}")
    verdicts = []
    for key, outcome in verdicts_of_frames(frames).items():
        verdict, is_expected = outcome.word.removeprefix(_EXPECTED_PREFIX), outcome.word.startswith(_EXPECTED_PREFIX)
        row = (key.case, key.implementation, key.dtype, verdict, outcome.stage, str(is_expected).lower())
        verdicts.append(row)
    runs = {run["environment"]: run for run in to_records(frames.environments)}
    versions = sorted(
        (column.implementation, column.release, run["python"], str(run.get("version_attncheck", "")))
        for column in frames.columns
        for run in [runs[column.environment]]
    )
    texts = {
        VERDICTS: rows_to_csv(_VERDICTS_HEADER, sorted(verdicts)),
        VERSIONS: rows_to_csv(("implementation", "version", "python", "attncheck"), versions),
        README: render_comparison_readme(frames),
    }
    with OutputError.convert_os_errors(directory):
        if directory.is_dir() and any(directory.iterdir()) and not (directory / VERDICTS).is_file():
            raise OutputError(
                f"{directory} is not empty and contains no published comparison; name another folder with --published"
            )
    write_texts(texts, directory)
    return directory / README


class PublishedDrift(NamedTuple):
    """The changes of a run's verdicts from the published ones, and the numbers of compared and unpublished cases."""

    changes: list[Row]
    compared: int
    unpublished: int


def find_drift(frames: Frames, directory: Path) -> PublishedDrift:
    """Compare a run's verdicts with the published ones, by case, implementation and dtype.

    None of these is a difference, because the published verdicts are of the corpus of their release: a case that the
    run left out because other cases cover it, an unpublished case or dtype, and a case that no longer exists.
    """
    left_out, published, verdicts = (
        _evaluations_covered_by_others(frames),
        read_published_verdicts(directory),
        verdicts_of_frames(frames),
    )
    there = {escape_formula(case) for case in frames.results["case"]}
    cases = {evaluation.case for evaluation in published}
    cases = cases & there or cases  # a run without any published case agrees with none of them
    units = {(evaluation.case, evaluation.dtype) for evaluation in published if evaluation.case in cases}
    expected = {key: outcome for key, outcome in published.items() if key.case in cases and key not in left_out}
    now = {key: outcome for key, outcome in verdicts.items() if (key.case, key.dtype) in units}
    unpublished = {evaluation.case for evaluation in verdicts} - cases
    return PublishedDrift(outcome_changes(expected, now), len(now), len(unpublished))


def _evaluations_covered_by_others(frames: Frames) -> set[Evaluation]:
    """Return the evaluations that were not requested because other cases cover them."""
    rows = frames.results[frames.results["lacks"].eq(ALL_CASES)]
    return {
        Evaluation("", escape_formula(implementation), escape_formula(case), dtype)
        for case, implementation, dtype in rows[["case", "implementation", "dtype"]].itertuples(index=False)
    }


def verdicts_of_frames(frames: Frames) -> dict[Evaluation, Outcome]:
    """Return the verdicts of frames, without evaluations that other cases cover.

    Raises ``UsageError`` if an implementation ran in two environments.
    """
    columns = sorted(frames.columns, key=lambda column: column.implementation)
    for first, second in pairwise(columns):
        if first.implementation == second.implementation:
            raise UsageError(
                f"{first.implementation} ran in {first.environment} and in {second.environment}; "
                "a published comparison has each implementation once"
            )
    expected = select_expected_failures(frames.results)
    by_evaluation = split_by(
        expected.assign(begins=first_failing_stages(expected)), ["case", "implementation", "dtype"]
    )
    first_stages = {key: min(rows["begins"], key=stage_sort_key) for key, rows in by_evaluation.items()}
    known = load_bundled_expected_failures(sorted({column.framework for column in frames.columns}))
    elsewhere = [failure for failure in known if failure.entry.processor is not None]
    left_out = _evaluations_covered_by_others(frames)
    return {
        evaluation: _cell_outcome(
            cell,
            first_stages.get((case, column.implementation, dtype), ""),
            [failure for failure in elsewhere if failure.matches_evaluation(column.implementation, case, dtype)],
        )
        for case, cells in cell_table(frames).items()
        for column, by_dtype in cells.items()
        for dtype, cell in by_dtype.items()
        if (evaluation := Evaluation("", escape_formula(column.implementation), escape_formula(case), dtype))
        not in left_out
    }


def read_published_verdicts(directory: Path) -> dict[Evaluation, Outcome]:
    """Read the published verdicts. Raises ``ResultsError`` if there are none."""
    path = directory / VERDICTS
    if not path.exists():
        raise ResultsError(
            f"{path} does not exist; restore it from version control, or write it with `attncheck publish RUN`"
        )
    verdicts: dict[Evaluation, Outcome] = {}
    for line, row in enumerate(read_csv_text(path, _VERDICTS_HEADER), 2):
        case, implementation, dtype, verdict, begins_at, xfail = row
        evaluation = Evaluation("", implementation, case, dtype)
        if evaluation in verdicts:
            raise ResultsError(f"{path}: row {line} repeats {' '.join(row[:3])}; expected each evaluation once")
        verdicts[evaluation] = _published_verdict_outcome(verdict, begins_at, is_expected=xfail == "true")
    return verdicts


def _published_verdict_outcome(verdict: str, begins_at: str, *, is_expected: bool) -> Outcome:
    """Return the outcome of a published verdict; an expected failure fails no run."""
    if is_expected:
        return Outcome(HARMLESS, _EXPECTED_PREFIX + verdict, begins_at)
    return Outcome(severity_of_verdict(verdict), verdict, begins_at)


def _cell_outcome(cell: Cell, begins_at: str, elsewhere: Sequence[ExpectedFailure]) -> Outcome:
    """Return the published outcome of a cell.

    ``elsewhere`` are its expected failures on some processors only: it may agree here, and fail as expected there.
    """
    for failure in elsewhere if cell.state in (State.AGREE, State.XFAIL) else ():
        verdict, processor = failure.entry.verdict, failure.entry.processor
        if cell.state is State.AGREE or cell.verdict == verdict:
            return _published_verdict_outcome(f"{verdict} with {processor}", "", is_expected=True)
    if cell.state is State.ERRATUM:
        return _published_verdict_outcome(Verdict.MISPRINT.value, "", is_expected=True)
    if cell.state is State.XFAIL:
        return _published_verdict_outcome(cell.verdict, escape_formula(begins_at), is_expected=True)
    return _published_verdict_outcome(cell.verdict, escape_formula(cell.stage), is_expected=False)


def render_comparison_readme(frames: Frames) -> str:
    """Return the Markdown of a page that is short enough to read. The same frames give the same text."""
    answer = make_summary(frames)
    made = (
        Mark("make publish"),
        " writes this folder, at a release; nothing in it is written by hand. Every verdict is in ",
        Mark(VERDICTS, "link", VERDICTS),
        ", in which nothing depends on the processor. CI compares its runs of the corpus with it, and fails where the "
        "verdict of a case that is in it differs. ",
        Mark("attncheck report"),
        " on the results of a run shows every case, and every document with its numbers and pictures.",
    )
    opening: list[Block] = [Text(Mark(answer.first_line, "strong")), Items(answer.sentences), Text(made)]
    frames = replace(frames, columns=tuple(replace(column, version=column.release) for column in frames.columns))
    rows = [(column.implementation, column.version) for column in frames.columns]
    also = Text(("Also in ", Mark(VERSIONS, "link", VERSIONS), "."))
    versions = Section("Versions", "versions", [Table("Versions", ("implementation", "version"), rows), also])
    sections = (versions, defects_section(frames, 50), expected_failures_section(frames), documents_section(frames))
    page = Page("The bundled corpus on the pinned versions", opening, list(filter(None, sections)))
    return render_page_markdown(page)
