"""Expected failures by reason, and where their threads lead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.reports.expected_failures import (
    ExpectedFailureGroup,
    address_of,
    count_following,
    empty_rows,
    expected_failure_groups,
)
from attncheck.reports.frames import Frames
from attncheck.reports.markdown.report import link
from attncheck.results.format import Row


@pytest.mark.parametrize(
    ("thread", "address"),
    [
        ("pytorch/pytorch#108108", "https://github.com/pytorch/pytorch/issues/108108"),
        ("https://example.org/a?b#c", "https://example.org/a?b#c"),
        ("http://example.org", ""),
        ("javascript:alert(1)", ""),
        ("https:", ""),
        ("https://[", ""),
        ("https://example.org/a b", ""),
        ("a discussion by letter", ""),
        ("", ""),
    ],
)
def test_only_issues_and_https_are_links(thread: str, address: str) -> None:
    assert address_of(thread) == address


def test_in_markdown_what_is_no_address_is_text() -> None:
    assert link("javascript:alert(1)") == "javascript:alert(1)"
    assert link("a/b#1") == r"[a/b\#1](https://github.com/a/b/issues/1)"
    assert link("https://example.org") == "<https://example.org>"


def test_expected_failures_are_grouped_by_reason(
    make_row: Callable[..., Row], write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> None:
    known = {"xfail": True, "verdict": "numeric", "reason": "why", "thread": "a/b#1"}
    rows = [
        make_row(case="file/two", **known, begins_at="scores"),
        make_row(case="file/one", **known, dtype="float32"),
        make_row(case="file/one", xfail=True, verdict="numeric", reason="another"),
        make_row(comparison="pair", other="x", xfail=True, verdict="numeric"),
        make_row(comparison="printed", xfail=True, verdict="misprint"),
    ]
    frames = frames_of(write_run(rows))
    first, second = expected_failure_groups(frames)
    assert (first.reason, first.cases) == ("another", ("file/one",))
    assert second == ExpectedFailureGroup(
        "local", "numpy.eager", "numeric", "why", "a/b#1", ("file/one", "file/two"), ("float64", "float32"), "scores"
    )
    assert count_following(frames) == 1
    assert empty_rows(frames) is None
