"""What changed between two results: of another version, processor or day, or before and after a change of a kernel.

Evaluations are compared with each other by environment, implementation, case and dtype. A verdict got *worse* where it
fails now and did not before, expected failures and what is unsupported being no failures, and where something ran and
now raises, crashes or takes too long; it got *better* where the opposite is so; everything else is another change. That
alone decides the exit code: errors that grew within their bounds are reported (``errors.py`` says when), and so
are cases, implementations and versions that differ. An evaluation that only one of the results has got neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from attncheck.errors import ExitCode, UsageError
from attncheck.reports.answer import what_is_wrong
from attncheck.reports.cells import FAILS_A_RUN, Cell, cell_table
from attncheck.reports.diff.errors import error_changes
from attncheck.reports.diff.frames import (
    CASE_CHANGES,
    VERDICT_CHANGES,
    environment_changes,
    expected_failure_changes,
    typed,
)
from attncheck.reports.frames import Frames, failing, records
from attncheck.results.same_cases import changed
from attncheck.verdicts import Verdict

WORSE, BETTER, OTHER = "worse", "better", "other"
_KEYS = ["environment", "implementation", "case", "dtype"]
Key = tuple[str, str, str, str]
"""environment, implementation, case, dtype"""


@dataclass(frozen=True, eq=False)
class Difference:
    """Two results, and every change between them as tidy frames; columns are documented in ``frames.py``."""

    before: str
    after: str
    compared: int
    """Evaluations that both have."""
    only: tuple[int, int]
    """Evaluations that only the first has, and only the second, of cases and implementations that both have."""
    verdicts: pd.DataFrame
    errors: pd.DataFrame
    expected_failures: pd.DataFrame
    cases: pd.DataFrame
    environments: pd.DataFrame
    notes: tuple[str, ...]
    """What is not complete in either."""

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the frames by name."""
        return {
            "verdicts": self.verdicts,
            "errors": self.errors,
            "expected_failures": self.expected_failures,
            "cases": self.cases,
            "environments": self.environments,
        }

    @property
    def exit_code(self) -> ExitCode:
        """1 where something got worse, else 0."""
        return ExitCode.DISAGREE if self.verdicts["change"].eq(WORSE).any() else ExitCode.AGREE


class Outcome(NamedTuple):
    """What came of one evaluation: how bad it is, its verdict in words, where that begins, what it says."""

    level: int
    word: str
    stage: str
    message: str


_FAILS, _BREAKS = 1, 2
"""Levels: 0 fails no run, 1 gives something wrong, 2 gives nothing at all."""


def make_difference(before: Frames, after: Frames, titles: tuple[str, str]) -> Difference:
    """Compare two results, whose environments have the same labels (``matched_runs``).

    Raises ``UsageError`` where they have no evaluation in common.
    """
    first, second = outcomes(before), outcomes(after)
    both = first.keys() & second.keys()
    if not both:
        raise UsageError(_nothing_in_common(first, second, titles))
    differing = {
        case: lines
        for case in before.cases.keys() & after.cases.keys()
        if (lines := _changed(before.cases[case], after.cases[case], computed=True))
    }
    verdicts = _verdict_changes(first, second, differing)
    errors = error_changes(*(frames.results[~frames.results["case"].isin(differing)] for frames in (before, after)))
    problems = [(title, note) for title, of in zip(titles, (before, after), strict=True) for note in of.problems]
    return Difference(
        before=titles[0],
        after=titles[1],
        compared=len(both),
        only=_only_in_one(first, second),
        verdicts=verdicts,
        errors=_unexplained(errors, verdicts),
        expected_failures=expected_failure_changes(before, after),
        cases=_case_changes(before, after, first, second),
        environments=environment_changes(before, after),
        notes=tuple(f"{title}: {note}" for title, note in problems),
    )


def outcomes(frames: Frames) -> dict[Key, Outcome]:
    """Return what came of every evaluation."""
    wrong = frames.results[frames.results["verdict"].ne(Verdict.AGREE)].drop_duplicates(_KEYS)
    messages = {_key(row): row["message"] for row in records(wrong[[*_KEYS, "message"]])}
    found = {
        (key := (column.environment, column.implementation, case, dtype)): _outcome(cell, messages.get(key, ""))
        for case, row in cell_table(frames).items()
        for column, cells in row.items()
        for dtype, cell in cells.items()
    }
    xpassed = _only_xpass(frames)
    for row in records(what_is_wrong(frames)):
        key = _key(row)
        outcome = found.get(key)
        # A pair that differs although no stage is blamed leaves the cell itself harmless.
        word = outcome.word if outcome is not None and outcome.level else row["verdict"]
        found[key] = Outcome(0 if key in xpassed else _level(word), word, row["stage"], row["message"])
    return found


def _only_xpass(frames: Frames) -> set[Key]:
    """Return the evaluations that fail only because an expected failure or erratum no longer happens."""
    bad = pd.concat([failing(frames.results), failing(frames.numbers)])[[*_KEYS, "verdict"]]
    xpassed = bad["verdict"].eq(Verdict.XPASS)
    return set(map(_key, records(bad[xpassed]))) - set(map(_key, records(bad[~xpassed])))


def _key(row: Mapping[str, Any]) -> Key:
    return row["environment"], row["implementation"], row["case"], row["dtype"]


def _outcome(cell: Cell, message: str) -> Outcome:
    return Outcome(_level(cell.verdict) if cell.state in FAILS_A_RUN else 0, cell.word, cell.stage, message)


def _level(verdict: str) -> int:
    return _BREAKS if Verdict(verdict).exit_code is ExitCode.NOT_RUN else _FAILS


def _nothing_in_common(first: Mapping[Key, Outcome], second: Mapping[Key, Outcome], titles: tuple[str, str]) -> str:
    """Say which has no results, or in what the keys differ first."""
    for title, of in zip(titles, (first, second), strict=True):
        if not of:
            return f"nothing can be compared: {title} has no results"
    for column, name in enumerate(("environment", "implementation", "case", "dtype")):
        names = [sorted({key[column] for key in of}) for of in (first, second)]
        if not set(names[0]) & set(names[1]):
            listed = [", ".join(each[:3]) + (", ..." if len(each) > 3 else "") for each in names]
            return (
                f"nothing can be compared: no {name} is in both ({titles[0]} has {listed[0]}; {titles[1]} has "
                f"{listed[1]}); `attncheck report` compares different implementations and environments"
            )
    return f"nothing can be compared: {titles[0]} and {titles[1]} have no evaluation in common"


def _only_in_one(first: Mapping[Key, Outcome], second: Mapping[Key, Outcome]) -> tuple[int, int]:
    """Count what one has and the other lacks, though it has the same implementation, and the same case, elsewhere."""
    columns = {key[:2] for key in first} & {key[:2] for key in second}
    cases = {key[2] for key in first} & {key[2] for key in second}
    lacking = first.keys() - second.keys(), second.keys() - first.keys()
    one, other = (sum(key[:2] in columns and key[2] in cases for key in keys) for keys in lacking)
    return one, other


def _verdict_changes(
    first: Mapping[Key, Outcome], second: Mapping[Key, Outcome], differing: Mapping[str, list[str]]
) -> pd.DataFrame:
    both = ((key, one, second[key]) for key, one in first.items() if key in second)
    rows = [
        (
            _change(one, other),
            *key,
            one.word,
            one.stage,
            other.word,
            other.stage,
            key[2] in differing,
            _format_change(one, other),
        )
        for key, one, other in both
        if one[:3] != other[:3]
    ]
    names = ("change", *_KEYS, "before", "before_stage", "after", "after_stage", "case_changed", "message")
    found = typed(pd.DataFrame(rows, columns=list(names)), VERDICT_CHANGES)
    order = found["change"].map({WORSE: 0, BETTER: 1, OTHER: 2})
    return found.assign(order=order).sort_values(["order", *_KEYS], ignore_index=True).drop(columns="order")


def _unexplained(errors: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    """Leave out the errors of evaluations whose verdict changed: that says it."""
    changed = pd.MultiIndex.from_frame(verdicts[_KEYS])
    return errors[~pd.MultiIndex.from_frame(errors[_KEYS]).isin(changed)].reset_index(drop=True)


def _change(before: Outcome, after: Outcome) -> str:
    if before.level == after.level:
        return OTHER
    return WORSE if after.level > before.level else BETTER


def _format_change(before: Outcome, after: Outcome) -> str:
    if after.message or after.level:
        return after.message
    return f"before: {before.message}" if before.message else ""


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], *, computed: bool = False) -> list[str]:
    """Say what of a case differs; nothing where one of the results does not record it."""
    if not before["operation"] or not after["operation"]:
        return []
    return changed(before, after, expectations=not computed)


def _case_changes(
    before: Frames, after: Frames, first: Mapping[Key, Outcome], second: Mapping[Key, Outcome]
) -> pd.DataFrame:
    failing = [Counter(key[2] for key, outcome in of.items() if outcome.level) for of in (first, second)]
    rows = []
    for case in sorted(before.cases.keys() | after.cases.keys()):
        if case not in after.cases:
            rows.append(("removed", case, failing[0][case], ""))
        elif case not in before.cases:
            rows.append(("added", case, failing[1][case], ""))
        elif lines := _changed(before.cases[case], after.cases[case]):
            rows.append(("changed", case, failing[1][case], "; ".join(lines)))
    return typed(pd.DataFrame(rows, columns=list(CASE_CHANGES)), CASE_CHANGES)
