"""The report's section on known divergences: what was wrong and does not count, and why."""

from __future__ import annotations

import re
from collections import Counter

import pandas as pd

from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import DTYPES, EMPTY_ROWS, without_a_key
from attncheck.reports.frames import Column, Frames, groups, known_divergences, stage_order
from attncheck.reports.markdown_text import code, escape, table

_KEYS = ["environment", "implementation", "verdict", "reason", "thread"]
_MOST_CASES = 3
_OTHERWISE = "something else"
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#([0-9]+)")


def known_section(frames: Frames) -> list[str]:
    """Return a line per implementation and reason; nothing where nothing known happened."""
    known = known_divergences(frames.results)
    if known.empty:
        return []
    many = len(frames.environments) > 1
    known = known.assign(reason=known["reason"].fillna(""), thread=known["thread"].fillna(""))
    rows = [
        [
            escape(f"{implementation} ({environment})" if many else implementation),
            verdict,
            _cases(part),
            " ".join(dtype for dtype in DTYPES if (part["dtype"] == dtype).any()),
            code(_begins_at(part)),
            escape(reason),
            link(thread),
        ]
        for (environment, implementation, verdict, reason, thread), part in sorted(groups(known, _KEYS).items())
    ]
    following = len(known_divergences(frames.pairs)) + len(known_divergences(frames.numbers))
    headings = ["implementation", "verdict", "cases", "dtypes", "begins at", "reason", "thread"]
    lines = [
        "## Known divergences",
        "",
        "These were known beforehand: each is declared by the implementation, or recorded with its reason, and fails "
        "no run. One that no longer happened would be reported as stale.",
        "",
        *table(headings, rows),
    ]
    if following:
        what = "1 comparison" if following == 1 else f"{following:,} comparisons"
        lines += ["", f"In {what} with other implementations or numbers, these are the reason for the difference."]
    return lines


def empty_rows_section(frames: Frames) -> list[str]:
    """Return what each implementation gives for a query without a key, where not all give the same."""
    expected = _expected_of_empty_rows(frames.results)
    if not expected:
        return []
    stages = groups(frames.results[frames.results["stage"] != ""], ["case", "environment", "implementation"])
    given: dict[Column, Counter[str]] = {}
    for column in frames.columns:
        parts = {case: stages.get((case, column.environment, column.implementation)) for case in expected}
        given[column] = Counter(_given(part, expected[case]) for case, part in parts.items() if part is not None)
    with_environment = len(frames.environments) > 1
    words = [
        word for word in (*reversed([*EMPTY_ROWS.values()]), _OTHERWISE) if any(word in said for said in given.values())
    ]
    rows = [
        [escape(column.title(with_environment=with_environment)), *(str(said[word] or "-") for word in words)]
        for column, said in given.items()
        if said.total()
    ]
    return [
        "## Queries without a key",
        "",
        "What a query that may attend to no key gives is a convention: nothing says what the weights of no key are. "
        "In how many cases each implementation gives what; one that declares its convention fails no run by it.",
        "",
        *table(["implementation", *words], rows, "l" + "r" * len(words)),
    ]


def _expected_of_empty_rows(results: pd.DataFrame) -> dict[str, str]:
    """Return what a case expects of a query without a key, of the cases in which somebody gives something else."""
    told = results[results["verdict"] == Verdict.SEMANTIC]
    return {
        case: own
        for case, message in zip(told["case"], told["message"], strict=True)
        for given in EMPTY_ROWS
        for own in EMPTY_ROWS
        if message.startswith(without_a_key(given, own))
    }


def _given(part: pd.DataFrame, expected: str) -> str:
    """Say what one implementation gives in a case that expects something of a query without a key."""
    messages = part.loc[part["verdict"] == Verdict.SEMANTIC, "message"]
    for given, words in EMPTY_ROWS.items():
        if messages.str.startswith(without_a_key(given, expected)).any():
            return words
    agrees = (part["verdict"] == Verdict.AGREE).all()
    return EMPTY_ROWS[expected] if agrees else _OTHERWISE


def _cases(part: pd.DataFrame) -> str:
    cases = sorted(set(part["case"]))
    shown = "<br>".join(code(case) for case in cases[:_MOST_CASES])
    return shown if len(cases) <= _MOST_CASES else f"{shown}<br>and {len(cases) - _MOST_CASES} more"


def _begins_at(part: pd.DataFrame) -> str:
    places = part["begins_at"].where(part["begins_at"].notna(), part["stage"])
    return str(min(places, key=stage_order))


def link(thread: str) -> str:
    """Make a link of owner/name#number, or of an address."""
    if issue := _ISSUE.fullmatch(thread):
        repository, number = issue.groups()
        return f"[{escape(thread)}](https://github.com/{repository}/issues/{number})"
    return f"<{thread}>" if thread else ""
