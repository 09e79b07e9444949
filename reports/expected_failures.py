"""What was wrong and does not count: expected failures, and what queries without a key give by convention."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pandas as pd

from attncheck.reports.frames import Column, Frames, expected_failures, groups, stage_order
from attncheck.spec import DEFAULT_EMPTY_ROWS, DTYPES, EMPTY_ROWS
from attncheck.verdicts import Verdict

EXPECTED_FAILURES_NOTE = (
    "These fail as expected, and fail no run: each is declared by the implementation, or recorded with its "
    "reason, or is a convention of its own where it has no keyword to be asked for the case's. A recorded one that no "
    "longer happened would be reported as xpass."
)
EMPTY_ROWS_NOTE = (
    "What a query that may attend to no key gives is a convention: nothing says what the weights of no key are. "
    "Counted are the cases in which each implementation gives what. One with the keyword empty_rows gives what a case "
    "asks for. The own convention of another fails no run where it is declared or recorded, or where a case asks for "
    "uniform or nan."
)
_KEYS = ["environment", "implementation", "verdict", "reason", "thread"]
_OTHERWISE = "something else"
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#([0-9]+)", re.ASCII)


@dataclass(frozen=True)
class ExpectedFailureGroup:
    """The expected failures of one implementation that have one verdict and one reason."""

    environment: str
    implementation: str
    verdict: str
    reason: str
    thread: str
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    begins_at: str


@dataclass(frozen=True)
class EmptyRows:
    """In how many cases each implementation gives what for a query without a key."""

    words: tuple[str, ...]
    given: dict[Column, Counter[str]]
    note: str = EMPTY_ROWS_NOTE


def expected_failure_groups(frames: Frames) -> list[ExpectedFailureGroup]:
    """Return the expected failures of stages, by implementation and reason."""
    expected = expected_failures(frames.results)
    expected = expected.assign(reason=expected["reason"].fillna(""), thread=expected["thread"].fillna(""))
    return [_group(part, *key) for key, part in sorted(groups(expected, _KEYS).items(), key=lambda item: item[0])]


def _group(
    part: pd.DataFrame, environment: str, implementation: str, verdict: str, reason: str, thread: str
) -> ExpectedFailureGroup:
    stages = part["begins_at"].where(part["begins_at"].notna(), part["stage"])
    dtypes = set(part["dtype"])
    return ExpectedFailureGroup(
        environment,
        implementation,
        verdict,
        reason,
        thread,
        cases=tuple(sorted(set(part["case"]))),
        dtypes=tuple(dtype for dtype in DTYPES if dtype in dtypes),
        begins_at=str(min(set(stages), key=stage_order)),
    )


def count_following(frames: Frames) -> int:
    """Count the comparisons of pairs and numbers whose difference has an expected failure for its reason."""
    return len(expected_failures(frames.pairs)) + len(expected_failures(frames.numbers))


def address_of(thread: str) -> str:
    """Return where owner/name#number or an https address leads; empty for anything else, which is shown as text."""
    if issue := _ISSUE.fullmatch(thread):
        repository, number = issue.groups()
        return f"https://github.com/{repository}/issues/{number}"
    try:
        parts = urlsplit(thread)
    except ValueError:
        return ""
    plain = not any(character.isspace() or not character.isprintable() for character in thread)
    return thread if parts.scheme == "https" and parts.hostname and plain else ""


def empty_rows(frames: Frames) -> EmptyRows | None:
    """Return what each implementation gives for a query without a key; None where all give what the cases mean."""
    differing = frames.results.loc[frames.results["empty_rows"].notna(), "case"].unique()
    if not len(differing):
        return None
    expected = {case: _meant_by(frames.cases, case) for case in differing}
    results = frames.results[frames.results["case"].isin(expected) & frames.results["stage"].ne("")]
    stages = groups(results, ["case", "environment", "implementation"])
    given: dict[Column, Counter[str]] = {}
    for column in frames.columns:
        parts = {case: stages.get((case, column.environment, column.implementation)) for case in expected}
        counts = Counter(_given(part, expected[case]) for case, part in parts.items() if part is not None)
        if counts.total():
            given[column] = counts
    words = (*reversed([*EMPTY_ROWS.values()]), _OTHERWISE)
    return EmptyRows(tuple(word for word in words if any(word in counts for counts in given.values())), given)


def _meant_by(cases: Mapping[str, Mapping[str, Any]], case: str) -> str:
    """Return what a case means a query without a key to give."""
    meant = cases[case]["options"].get("empty_rows") if case in cases else None
    return str(meant) if meant in EMPTY_ROWS else DEFAULT_EMPTY_ROWS


def _given(part: pd.DataFrame, expected: str) -> str:
    """Say what one implementation gives in a case that means a query without a key to give something."""
    given = {value for value in part["empty_rows"].dropna() if value in EMPTY_ROWS}
    if given:
        return EMPTY_ROWS[given.pop()] if len(given) == 1 else _OTHERWISE
    agrees = (part["verdict"] == Verdict.AGREE).all()
    return EMPTY_ROWS[expected] if agrees else _OTHERWISE
