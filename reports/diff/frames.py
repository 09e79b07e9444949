"""The frames of a difference, and what differs besides numbers: versions, processors, implementations."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from attncheck.reports.expected_failures import ExpectedFailureGroup, expected_failure_groups
from attncheck.reports.frames import Frames, records

DIFF_COLUMNS: Mapping[str, str] = {
    "environment": "label of the run, of both where they have different ones",
    "implementation": "backend and mode",
    "case": "id of the case",
    "dtype": "working dtype of inputs and results",
    "stage": "named intermediate, or derived quantity",
    "change": "of verdicts worse, better or other; of errors grew or shrank; else added, removed, changed",
    "before": "verdict, version or value in the first results; empty where there is none",
    "after": "the same in the second",
    "before_stage": "where it began to go wrong in the first results; empty where nothing failed",
    "after_stage": "the same in the second",
    "case_changed": "whether the two results mean different cases by this id, so that errors were not compared",
    "message": "what is wrong now, in words, or what was wrong before",
    "measure": "accumulated: against the exact answer; introduced: by the step from the implementation's own stage",
    "before_z": "largest error in units of its statistical scale, in the first results",
    "after_z": "the same in the second",
    "before_ratio": "largest error over its bound, in the first results; 1 is the limit",
    "after_ratio": "the same in the second",
    "before_tier": "within, warning (noisy), statistical or proven (wrong), in the first results",
    "after_tier": "the same in the second",
    "verdict": "one word: docs/reference/verdicts.md",
    "before_cases": "in how many cases the expected failure happened in the first results",
    "after_cases": "the same in the second",
    "reason": "why the failure is expected",
    "thread": "where that is discussed",
    "failing": "evaluations of the case that fail: of a removed case in the first results, else in the second",
    "what": "what of it differs",
}

VERDICT_CHANGES = (
    "change",
    "environment",
    "implementation",
    "case",
    "dtype",
    "before",
    "before_stage",
    "after",
    "after_stage",
    "case_changed",
    "message",
)
ERROR_CHANGES = (
    "change",
    "environment",
    "implementation",
    "case",
    "dtype",
    "stage",
    "measure",
    "before_z",
    "after_z",
    "before_ratio",
    "after_ratio",
    "before_tier",
    "after_tier",
)
KNOWN_CHANGES = (
    "change",
    "environment",
    "implementation",
    "verdict",
    "stage",
    "before_cases",
    "after_cases",
    "reason",
    "thread",
)
CASE_CHANGES = ("change", "case", "failing", "what")
ENVIRONMENT_CHANGES = ("change", "environment", "what", "before", "after")

_NUMBERS = {
    **dict.fromkeys(("before_z", "after_z", "before_ratio", "after_ratio"), "float64"),
    **dict.fromkeys(("before_cases", "after_cases", "failing"), "int64"),
    "case_changed": "bool",
}


def typed(frame: pd.DataFrame, columns: tuple[str, ...]) -> pd.DataFrame:
    """Return the columns in order and in their types, also where there is no row to tell them from."""
    return frame[list(columns)].astype({name: _NUMBERS.get(name, "str") for name in columns}).reset_index(drop=True)


_HIDDEN = frozenset({"environment", "command", "complete", "exit_code"})
"""Columns of environments that say how a run was started and ended, not where it ran."""
_FEATURES = "cpu features"


def environment_changes(before: Frames, after: Frames) -> pd.DataFrame:
    """Return environments and implementations added or removed, and versions and processors that differ."""
    facts = [_facts(frames) for frames in (before, after)]
    rows = []
    for environment, what in dict.fromkeys([*facts[0], *facts[1]]):
        one, other = (of.get((environment, what)) for of in facts)
        if one == other:
            continue
        change = "added" if one is None else "removed" if other is None else "changed"
        if what == _FEATURES and one is not None and other is not None:
            one, other = _without(one, other), _without(other, one)
        rows.append((change, environment, what, one or "", other or ""))
    return typed(pd.DataFrame(rows, columns=list(ENVIRONMENT_CHANGES)), ENVIRONMENT_CHANGES)


def _facts(frames: Frames) -> dict[tuple[str, str], str]:
    """Return what is said of each environment, by its label and by what is said, as text."""
    facts = {
        (row["environment"], str(name).removeprefix("version_").replace("_", " ")): _text(value)
        for row in records(frames.environments)
        for name, value in row.items()
        if name not in _HIDDEN and not pd.isna(value)
    }
    for column in frames.columns:
        facts[column.environment, f"implementation {column.implementation}"] = column.version
    return facts


def _without(names: str, others: str) -> str:
    """Return those of many names that the other side has not."""
    return " ".join(sorted(set(names.split()) - set(others.split())))


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def expected_failure_changes(before: Frames, after: Frames) -> pd.DataFrame:
    """Return the expected failures that appeared, went, or happen in more or fewer cases."""
    first, second = ({_of(group): group for group in expected_failure_groups(frames)} for frames in (before, after))
    rows = []
    for key in sorted(first.keys() | second.keys()):
        one, other = first.get(key), second.get(key)
        counts = [len(group.cases) if group else 0 for group in (one, other)]
        group = other or one
        if counts[0] == counts[1] or group is None:
            continue
        change = "appeared" if one is None else "went" if other is None else "changed"
        changed = (change, *key[:3], group.begins_at, *counts, group.reason, group.thread)
        rows.append(changed)
    return typed(pd.DataFrame(rows, columns=list(KNOWN_CHANGES)), KNOWN_CHANGES)


def _of(group: ExpectedFailureGroup) -> tuple[str, str, str, str]:
    return group.environment, group.implementation, group.verdict, group.reason
