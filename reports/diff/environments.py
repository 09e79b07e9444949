"""What differs between two results besides their numbers: versions, processors, implementations, expected failures."""

from __future__ import annotations

import pandas as pd

from attncheck.reports.diff.columns import ENVIRONMENT_CHANGES, KNOWN_CHANGES, typed
from attncheck.reports.expected_failures import ExpectedFailureGroup, expected_failure_groups
from attncheck.reports.frames import Frames, records

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
