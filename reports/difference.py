"""Changes between two results: of another version, processor or day, or before and after a change of a kernel.

Evaluations are compared by environment, implementation, case and dtype (``comparison``). Only verdicts that got worse
decide the exit code: errors that grew within their bounds are reported, and so are cases, implementations and versions
that differ. An evaluation that only one of the results has got neither worse nor better.

Errors are compared only for cases that are the same in both results. A version, a processor or a BLAS that sums in
another order changes errors, too, and the report should ignore that. So neither the error is compared nor its ratio to
the bound B: in a small tensor, one more rounding moves the ratio from 0.1 to 0.9. The rule compares z, the error over
its statistical scale sigma (docs/numerics.md, sections 5 and 7), which stays small in any order of rounding. An error
grew if, against the exact answer or in the step from the implementation's previous stage,

- it is beyond rounding noise now: the largest z exceeds max(3, lambda(N) / 2) over the N elements of the stage, the
  limit of a warning, or the tier is warning or worse now and was not before; and
- the largest z, or the root mean square of z, more than doubled.

It shrank if the same is true in the other direction. An error that grew within its bound is reported and fails nothing.
On special inputs, errors may add up in one direction, so z is less reliable; the rule is the same, because a doubling
beyond noise deserves a look.

On the bundled corpus, the rule reports no difference between any two of the four frameworks' eager modes, which sum in
different orders and call different BLAS and exponentials. Reporting a ratio that doubled and exceeds 0.1 would report
13 to 29 stages of each.

A difference is printed, and written as Markdown, tables and JSON. So are the differences between releases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from attncheck.common.errors import ExitCode, OutputError, UsageError
from attncheck.common.wording import count_noun
from attncheck.judging.compare import ErrorTier, z_warning_limit
from attncheck.reports import comparison
from attncheck.reports.cells import FAILS_A_RUN, cell_table
from attncheck.reports.defects import expected_failure_groups
from attncheck.reports.document_model import Block, Items, Mark, Page, Section, Table, Text, more_in_files
from attncheck.reports.failures import failures_by_case
from attncheck.reports.frames import Frames, environment_facts, make_frames, select_failing, to_records
from attncheck.reports.json_documents import BisectionDocument, DifferenceDocument, DifferenceRecord, opening_fields
from attncheck.reports.markdown import render_page_markdown
from attncheck.reports.merge import merge_runs
from attncheck.reports.outcome import first_command_of_each, to_json_rows
from attncheck.reports.terminal import Line
from attncheck.reports.write import write_csv, write_parquet, write_texts
from attncheck.results.reader import find_runs, read_runs
from attncheck.results.records import describe_case_changes
from attncheck.spec.verdicts import Verdict

_EVALUATION_KEYS = list(comparison.Evaluation._fields)


@dataclass(frozen=True, eq=False)
class Difference:
    """Two results, and every change between them as tidy frames.

    Columns begin with ``before`` or ``after``: ``before_z`` is the ``largest_z`` of the first results, ``before`` a
    verdict, a version or a value, and ``before_cases`` the number of cases with an expected failure.
    """

    before: str
    after: str
    compared: int
    """Evaluations that both have."""
    only: tuple[int, int]
    """The evaluations that only the first has, and only the second, for cases and implementations that both have."""
    verdicts: pd.DataFrame
    errors: pd.DataFrame
    expected_failures: pd.DataFrame
    cases: pd.DataFrame
    environments: pd.DataFrame
    notes: tuple[str, ...]
    """Notes about incomplete results."""

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the frames by name."""
        return {name: getattr(self, name) for name in _TITLES}

    @property
    def exit_code(self) -> ExitCode:
        """1 if a verdict got worse, else 0."""
        return ExitCode.DISAGREE if self.verdicts["change"].eq(comparison.WORSE).any() else ExitCode.AGREE


def compare_frames(before: Frames, after: Frames, titles: tuple[str, str]) -> Difference:
    """Compare two results, whose environments have the same labels (``with_matching_labels``).

    Raises ``UsageError`` if they have no evaluation in common.
    """
    first, second = outcomes_of_frames(before), outcomes_of_frames(after)
    both = first.keys() & second.keys()
    if not both:
        raise UsageError(_no_overlap_message(first, second, titles))
    differing = {
        case: lines
        for case in before.cases.keys() & after.cases.keys()
        if (lines := _case_differences(before.cases[case], after.cases[case], computed=True))
    }
    changes = comparison.outcome_changes({key: first[key] for key in both}, {key: second[key] for key in both})
    rows = [{**change, "case_changed": change["case"] in differing} for change in changes]
    verdicts = to_typed_frame(rows, VERDICT_CHANGE_COLUMNS)
    errors = error_changes(*(frames.results[~frames.results["case"].isin(differing)] for frames in (before, after)))
    problems = [(title, note) for title, of in zip(titles, (before, after), strict=True) for note in of.problems]
    return Difference(
        before=titles[0],
        after=titles[1],
        compared=len(both),
        only=_count_in_one_only(first, second),
        verdicts=verdicts,
        errors=errors[~_evaluation_index(errors).isin(_evaluation_index(verdicts))].reset_index(drop=True),
        expected_failures=expected_failure_changes(before, after),
        cases=_case_changes(before, after, first, second),
        environments=environment_changes(before, after),
        notes=tuple(f"{title}: {note}" for title, note in problems),
    )


def _evaluation_index(frame: pd.DataFrame) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(frame[_EVALUATION_KEYS].astype(object))


def outcomes_of_frames(frames: Frames) -> dict[comparison.Evaluation, comparison.Outcome]:
    """Return the outcome of every evaluation."""
    wrong = frames.results[frames.results["verdict"].ne(Verdict.AGREE)].drop_duplicates(_EVALUATION_KEYS)
    messages = {_row_evaluation(row): row["message"] for row in to_records(wrong[[*_EVALUATION_KEYS, "message"]])}
    outcome_by_key = {
        (key := comparison.Evaluation(column.environment, column.implementation, case, dtype)): comparison.Outcome(
            comparison.severity_of_verdict(cell.verdict) if cell.state in FAILS_A_RUN else comparison.HARMLESS,
            cell.word,
            cell.stage,
            message=messages.get(key, ""),
        )
        for case, row in cell_table(frames).items()
        for column, cells in row.items()
        for dtype, cell in cells.items()
    }
    bad = pd.concat([select_failing(frames.results), select_failing(frames.numbers)])[[*_EVALUATION_KEYS, "verdict"]]
    is_stale = bad["verdict"].eq(Verdict.XPASS)  # an expected failure or erratum that no longer happens
    xpassed = set(map(_row_evaluation, to_records(bad[is_stale]))) - set(
        map(_row_evaluation, to_records(bad[~is_stale]))
    )
    for failure in failures_by_case(frames):
        key = _row_evaluation(vars(failure))
        outcome = outcome_by_key.get(key)
        # A pair that differs although no stage is blamed leaves the cell itself harmless.
        word = outcome.word if outcome is not None and outcome.level else failure.verdict
        level = comparison.HARMLESS if key in xpassed else comparison.severity_of_verdict(word)
        outcome_by_key[key] = comparison.Outcome(level, word, failure.stage, message=failure.message)
    return outcome_by_key


def _row_evaluation(row: Mapping[str, Any]) -> comparison.Evaluation:
    return comparison.Evaluation(*(row[name] for name in _EVALUATION_KEYS))


def _no_overlap_message(first: comparison.Outcomes, second: comparison.Outcomes, titles: tuple[str, str]) -> str:
    """Name the results that are empty, or the first part of the key that never matches."""
    for title, of in zip(titles, (first, second), strict=True):
        if not of:
            return f"nothing can be compared: {title} has no results"
    for column, name in enumerate(_EVALUATION_KEYS):
        names = [sorted({key[column] for key in of}) for of in (first, second)]
        if not set(names[0]) & set(names[1]):
            listed = [", ".join(values[:3]) + (", ..." if len(values) > 3 else "") for values in names]
            return (
                f"nothing can be compared: no {name} is in both ({titles[0]} has {listed[0]}; {titles[1]} has "
                f"{listed[1]}); `attncheck report` compares different implementations and environments"
            )
    return f"nothing can be compared: {titles[0]} and {titles[1]} have no evaluation in common"


def _count_in_one_only(first: comparison.Outcomes, second: comparison.Outcomes) -> tuple[int, int]:
    """Count the evaluations that only one has, among implementations and cases that both have."""
    columns = {key[:2] for key in first} & {key[:2] for key in second}
    cases = {key[2] for key in first} & {key[2] for key in second}
    lacking = first.keys() - second.keys(), second.keys() - first.keys()
    only_first, only_second = (sum(key[:2] in columns and key[2] in cases for key in keys) for keys in lacking)
    return only_first, only_second


def _case_differences(before: Mapping[str, Any], after: Mapping[str, Any], *, computed: bool = False) -> list[str]:
    """List the differences of a case; empty if one of the results does not record the case."""
    if not before["operation"] or not after["operation"]:
        return []
    return describe_case_changes(before, after, expectations=not computed)


def _case_changes(
    before: Frames, after: Frames, first: comparison.Outcomes, second: comparison.Outcomes
) -> pd.DataFrame:
    fails_before, fails_now = (
        Counter(key[2] for key, outcome in of.items() if outcome.level) for of in (first, second)
    )
    rows = []
    for change, case, old, new in sorted(comparison.changed_entries(before.cases, after.cases), key=itemgetter(1)):
        lines = _case_differences(old, new) if old and new else []
        if lines or change != "changed":
            rows.append((change, case, (fails_now if new else fails_before)[case], "; ".join(lines)))
    return to_typed_frame(rows, CASE_CHANGE_COLUMNS)


_ERROR_KEYS = [*_EVALUATION_KEYS, "stage"]
_MIN_GROWTH = 2.0
_MEASURE_COLUMNS = {
    "accumulated": {"z": "largest_z", "mean": "mean_z", "ratio": "ratio", "tier": "tier"},
    "introduced": {"z": "introduced_z", "ratio": "introduced_ratio", "tier": "introduced_tier"},
}


def error_changes(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Return the errors that grew or shrank between two ``results`` frames whose environments have the same names."""
    parts = [
        _select_grown_errors(lower, higher, change, measure)
        for measure in _MEASURE_COLUMNS
        for change, lower, higher in (("grew", before, after), ("shrank", after, before))
    ]
    changes = to_typed_frame(pd.concat(parts), ERROR_CHANGE_COLUMNS)
    if changes.empty:
        return changes
    # One line per stage: the measure in which it is larger.
    changes = changes.assign(largest=changes[["before_z", "after_z"]].max(axis=1))
    changes = changes.sort_values(["change", "largest", *_ERROR_KEYS, "measure"], ascending=[True, False, *[True] * 6])
    return changes.drop_duplicates(["change", *_ERROR_KEYS]).drop(columns="largest").reset_index(drop=True)


def _select_grown_errors(lower: pd.DataFrame, higher: pd.DataFrame, change: str, measure: str) -> pd.DataFrame:
    names = _MEASURE_COLUMNS[measure]
    is_noisy = higher[names["tier"]].notna() & higher[names["tier"]].ne(ErrorTier.WITHIN)
    is_noisy |= higher[names["z"]].gt(_z_limits(higher["shape"]))
    low, high = ("before", "after") if change == "grew" else ("after", "before")
    joined = _measurements(higher[is_noisy], names, high).merge(_measurements(lower, names, low), on=_ERROR_KEYS)
    known_limit = joined[f"{high}_z"] > joined[f"{high}_limit"]
    new_tier = joined[f"{high}_tier"].ne(ErrorTier.WITHIN) & joined[f"{low}_tier"].eq(ErrorTier.WITHIN)
    grown = joined[f"{high}_z"] > _MIN_GROWTH * joined[f"{low}_z"]
    if "mean" in names:
        grown |= joined[f"{high}_mean"] > _MIN_GROWTH * joined[f"{low}_mean"]
    return joined[(known_limit | new_tier) & grown].assign(change=change, measure=measure)


def _measurements(rows: pd.DataFrame, names: Mapping[str, str], when: str) -> pd.DataFrame:
    """Return the keys and measurements of measured rows, under the same names for both measures."""
    kept = rows[rows[names["z"]].notna()]
    measured = kept[_ERROR_KEYS].assign(**{f"{when}_{measure}": kept[column] for measure, column in names.items()})
    return measured.assign(**{f"{when}_limit": _z_limits(kept["shape"])})


def _z_limits(shapes: pd.Series[str]) -> pd.Series[float]:
    """Return the limit of z for tensors of each shape, written 1x2x5x5."""
    lengths = {
        text: [int(length) for length in text.split("x") if length.isdigit()] for text in shapes.dropna().unique()
    }
    limits = {shape: z_warning_limit(prod(lengths_of_shape)) for shape, lengths_of_shape in lengths.items()}
    return shapes.map(limits).astype("float64")


VERDICT_CHANGE_COLUMNS = (
    "change",
    *_EVALUATION_KEYS,
    "before",
    "before_stage",
    "after",
    "after_stage",
    "case_changed",
    "message",
)
ERROR_MEASURE_COLUMNS = ("before_z", "after_z", "before_ratio", "after_ratio")
ERROR_CHANGE_COLUMNS = ("change", *_ERROR_KEYS, "measure", *ERROR_MEASURE_COLUMNS, "before_tier", "after_tier")
KNOWN_CHANGE_COLUMNS = (
    "change",
    *_EVALUATION_KEYS[:2],
    "verdict",
    "stage",
    "before_cases",
    "after_cases",
    "reason",
    "thread",
)
CASE_CHANGE_COLUMNS = ("change", "case", "failing", "what")
ENVIRONMENT_CHANGE_COLUMNS = ("change", "environment", "what", "before", "after")

_NUMBER_DTYPES = {
    **dict.fromkeys(ERROR_MEASURE_COLUMNS, "float64"),
    **dict.fromkeys(("before_cases", "after_cases", "failing"), "int64"),
    "case_changed": "bool",
}


def to_typed_frame(rows: pd.DataFrame | Sequence[object], columns: Sequence[str]) -> pd.DataFrame:
    """Return rows as a frame with these columns and their types, even if there is no row."""
    frame = pd.DataFrame(rows, columns=list(columns))
    return frame.astype({name: _NUMBER_DTYPES.get(name, "str") for name in columns}).reset_index(drop=True)


_HIDDEN_FACTS = frozenset({"command", "exit code"})
"""Facts of environments about the start and the end of a run, not about the machine."""
_CPU_FEATURES_FACT = "cpu features"


def environment_changes(before: Frames, after: Frames) -> pd.DataFrame:
    """Return environments and implementations added or removed, and versions and processors that differ."""
    rows = []
    for change, (environment, what), old, new in comparison.changed_entries(
        _environment_facts(before), _environment_facts(after)
    ):
        if what == _CPU_FEATURES_FACT and old is not None and new is not None:
            old, new = _names_without(old, new), _names_without(new, old)
        rows.append((change, environment, what, old or "", new or ""))
    return to_typed_frame(rows, ENVIRONMENT_CHANGE_COLUMNS)


def _environment_facts(frames: Frames) -> dict[tuple[str, str], str]:
    """Return the facts of all environments as texts, by the environment's label and the fact's name."""
    labels = frames.environments["environment"]
    facts = {
        (environment, name): text
        for name, texts in environment_facts(frames)
        for environment, text in zip(labels, texts, strict=True)
        if text and name not in _HIDDEN_FACTS
    }
    for column in frames.columns:
        facts[column.environment, f"implementation {column.implementation}"] = column.version
    return facts


def _names_without(names: str, others: str) -> str:
    """Return the words of ``names`` that ``others`` does not have."""
    return " ".join(sorted(set(names.split()) - set(others.split())))


def expected_failure_changes(before: Frames, after: Frames) -> pd.DataFrame:
    """Return the expected failures that appeared, disappeared, or happen in more or fewer cases."""
    first, second = (
        {tuple(group[name] for name in (*KNOWN_CHANGE_COLUMNS[1:4], "reason")): group for group in groups}
        for groups in map(expected_failure_groups, (before, after))
    )
    old, new = ({key: len(group["cases"]) for key, group in groups.items()} for groups in (first, second))
    rows = []
    for change, key, was, now in sorted(comparison.changed_entries(old, new), key=itemgetter(1)):
        group, word = second.get(key) or first[key], {"added": "appeared", "removed": "went"}.get(change, change)
        rows.append((word, *key[:3], group["begins_at"], was or 0, now or 0, group["reason"], group["thread"]))
    return to_typed_frame(rows, KNOWN_CHANGE_COLUMNS)


_MAX_MARKDOWN_ROWS = 200

_TITLES = {
    "verdicts": "Verdicts",
    "errors": "Errors beyond rounding noise",
    "expected_failures": "Expected failures",
    "cases": "Cases",
    "environments": "Environments and implementations",
}
_TABLE_NOTES = {
    "verdicts": "Worse is what fails now and did not before, and what ran and now gives nothing.",
    "errors": "z is the largest error in units of its statistical scale: it more than doubled or halved, and the "
    "larger one is more than rounding noise. What is within its bound fails nothing.",
    "expected_failures": "How many cases fail as expected.",
    "cases": "Cases that only one of the two has, or that are not the same; the errors of those are not compared.",
    "environments": "Versions, processors and settings that differ, and implementations that only one of the two has.",
}


def difference_sentences(difference: Difference) -> list[str]:
    """Summarize the changes, the worst first; one sentence if nothing changed."""
    changed = comparison.count_changes_text(difference.verdicts["change"])
    lines = [f"{changed}; {count_noun(difference.compared, 'evaluation')} compared."]
    if any(difference.only):
        before, after = difference.only
        lines.append(
            f"{count_noun(before, 'evaluation')} only in {difference.before}, {after:,} only in {difference.after}."
        )
    if len(difference.errors):
        grew = int(difference.errors["change"].eq("grew").sum())
        shrank = len(difference.errors) - grew
        lines.append(f"{count_noun(grew, 'error')} grew beyond rounding noise, {shrank:,} shrank below it.")
    for name, what in (("expected_failures", "expected failure"), ("cases", "case")):
        frame = difference.tables()[name]
        if len(frame):
            counts = frame["change"].value_counts(sort=False)
            parts = ", ".join(f"{count:,} {change}" for change, count in counts.items())
            lines.append(f"{what.capitalize()}s: {parts}.")
    return [*lines, *(f"{note}." for note in difference.notes)]


def difference_lines(difference: Difference, *, quiet: bool, verbose: bool = False) -> Iterator[Line]:
    """Yield a line per change; if ``quiet``, only verdicts that got worse, and if ``verbose``, all changes."""
    tables = difference.tables()
    if quiet:
        tables = {"verdicts": tables["verdicts"][tables["verdicts"]["change"].eq(comparison.WORSE)]}
    if not quiet:
        yield Text(f"{difference.before} -> {difference.after}", "bold")
        yield from difference_sentences(difference)
    for name, frame in tables.items():
        yield from _change_lines(name, frame, verbose=verbose)


def _change_lines(name: str, frame: pd.DataFrame, *, verbose: bool = False) -> Iterator[Line]:
    if frame.empty:
        return
    read = to_records(frame if verbose or name == "verdicts" else frame.head(comparison.MAX_LISTED))
    rows = comparison.merge_dtypes(read)
    shown = rows if verbose else rows[: comparison.MAX_LISTED]
    yield from ("", Text(_TITLES[name], "bold"))
    printed = comparison.without_repeated_causes(shown) if name == "verdicts" else shown
    for line, row in zip(comparison.change_lines(name, printed), shown, strict=True):
        yield Text(line, "red" if row["change"] == comparison.WORSE else "")
    if more := len(rows) - len(shown) + len(frame) - len(read):
        yield f"and {more:,} more: --verbose lists all"


def render_diff_markdown(difference: Difference) -> str:
    """Return the difference as Markdown. The same results give the same text."""
    opening: list[Block] = [
        Text((Mark(difference.before), " → ", Mark(difference.after))),
        Items(difference_sentences(difference)),
    ]
    sections = []
    for name, frame in difference.tables().items():
        cells = comparison.change_cells(name, comparison.merge_dtypes(to_records(frame.head(_MAX_MARKDOWN_ROWS))))
        rows = [(Mark(change, "strong") if change == comparison.WORSE else change, *rest) for change, *rest in cells]
        table = Table(_TITLES[name], comparison.HEADINGS[name], rows)
        more = len(frame) - _MAX_MARKDOWN_ROWS
        rest = [more_in_files(f"{more:,} more", f"diff_{name}.csv")] if more > 0 else []
        sections += [Section(_TITLES[name], name, [Text(_TABLE_NOTES[name]), table, *rest])] if rows else []
    return render_page_markdown(Page("What changed", opening, sections))


def write_difference(difference: Difference, directory: Path) -> Path:
    """Write diff.md and diff_verdicts.csv, diff_verdicts.parquet (with pyarrow) and so on; return the path of diff.md.

    The same results give the same bytes. Raises ``OutputError`` if the folder cannot be written.
    """
    with OutputError.convert_os_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in difference.tables().items():
            write_csv(frame, directory / f"diff_{name}.csv")
            write_parquet(frame, directory / f"diff_{name}.parquet")
    write_texts({"diff.md": render_diff_markdown(difference)}, directory)
    return directory / "diff.md"


def read_frames(folder: Path) -> Frames:
    """Read the results of one release."""
    return make_frames(merge_runs(read_runs(find_runs([folder])), across=False))


_CHANGE_KINDS = (comparison.WORSE, comparison.BETTER, comparison.OTHER)


@dataclass
class Bisection:
    """Releases of a distribution, oldest first, and the differences from each release to the next that ran."""

    distribution: str
    releases: dict[str, Frames] = field(default_factory=dict)
    steps: list[Difference] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)
    """Releases that could not be run, and why."""

    def add(self, version: str, frames: Frames) -> None:
        """Add the next release. Raises ``UsageError`` if it has no evaluation in common with the one before."""
        if self.releases:
            before, earlier = list(self.releases.items())[-1]
            self.steps.append(compare_frames(earlier, frames, (before, version)))
        self.releases[version] = frames

    @property
    def has_worsened(self) -> bool:
        """Return whether a verdict got worse in any release."""
        return any((step.verdicts["change"] == comparison.WORSE).any() for step in self.steps)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each release: the counts of its outcomes, and of the changes from the one before."""
        kinds = {step.after: step.verdicts["change"].value_counts() for step in self.steps}
        for version, frames in self.releases.items():
            outcomes_now = [outcome for outcome in outcomes_of_frames(frames).values() if outcome.word]
            counts = kinds.get(version)
            yield {
                "release": version,
                "right": sum(not outcome.level and outcome.word == "agree" for outcome in outcomes_now),
                "failing": sum(bool(outcome.level) for outcome in outcomes_now),
                "unsupported": sum(outcome.word == "unsupported" for outcome in outcomes_now),
                **{kind: None if counts is None else int(counts.get(kind, 0)) for kind in _CHANGE_KINDS},
            }


def bisection_lines(bisection: Bisection) -> Iterator[Line]:
    """Yield a table of the releases, then every verdict that a release changed."""
    headings = ("release", "right", "failing", "unsupported", *_CHANGE_KINDS)
    rows = [
        (f"{bisection.distribution} {release}", *("-" if value is None else str(value) for value in counts))
        for release, *counts in (row.values() for row in bisection.rows())
    ]
    yield Table("Releases", headings, rows, "lrrrrrr")
    changed = [step for step in bisection.steps if len(step.verdicts)]
    for step in changed:
        yield from ("", f"{bisection.distribution} {step.after} changed, against {step.before}:")
        yield from _change_lines("verdicts", step.verdicts)
    yield from [_bisection_answer(bisection)] if bisection.steps and not changed else []
    yield from bisection.missed.values()


def difference_document(difference: Difference, after: Frames) -> DifferenceDocument:
    """Return the changes between two results; ``after`` has the numbers of verdicts that got worse."""
    worse = difference.verdicts[difference.verdicts["change"].eq(comparison.WORSE)]
    keys = set(map(_row_evaluation, to_records(worse)))
    failures = [failure for failure in failures_by_case(after) if _row_evaluation(vars(failure)) in keys]
    return DifferenceDocument.derive(
        difference,
        **opening_fields("diff", difference.exit_code, difference_sentences(difference)[0]),
        failures=failures,
        next=first_command_of_each(failures),
        notes=difference.notes,
        **_common_fields(difference),
    )


def _common_fields(difference: Difference) -> dict[str, Any]:
    """Return the sentences and the rows of all tables."""
    tables = {name: to_json_rows(frame) for name, frame in difference.tables().items()}
    return {"sentences": difference_sentences(difference), **tables}


def bisection_document(bisection: Bisection, code: ExitCode) -> BisectionDocument:
    """Return the outcomes of several releases."""
    return BisectionDocument.derive(
        bisection,
        **opening_fields("bisect", code, _bisection_answer(bisection)),
        notes=list(bisection.missed.values()),
        releases=list(bisection.rows()),
        steps=[DifferenceRecord.derive(step, **_common_fields(step)) for step in bisection.steps],
    )


def _bisection_answer(bisection: Bisection) -> str:
    changed = [step.after for step in bisection.steps if len(step.verdicts)]
    if not changed:
        return "No release changed a verdict."
    return f"{bisection.distribution} changed verdicts in {', '.join(changed)}."
