"""Documents on the page: only what fails is open, long ones are split, and what fails has all of its pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from attncheck.reports.frames import Frames
from attncheck.reports.html import documents
from attncheck.reports.html.contents import Budget
from attncheck.reports.html.render import render_html
from attncheck.reports.html.text import failing_words

PageOf = Callable[..., Any]
FAILING = "documents/attention_scoring_post/all-four-annotations-are-scored-and-make-one-context-vector"


@pytest.fixture
def failing_frames(document_frames: Frames) -> Frames:
    """The run of the documents, in which a number of one computation fails."""
    numbers = document_frames.numbers.copy()
    numbers["verdict"] = numbers["verdict"].where(~numbers["case"].eq(FAILING), "numeric")
    assert isinstance(numbers, pd.DataFrame)
    assert numbers["verdict"].eq("numeric").any()
    return replace(document_frames, numbers=numbers)


def summaries(page: Any, kind: str) -> dict[str, bool]:
    found = {}
    for each in page.all("details", of_class=kind):
        summary = each.all("summary")[0]
        found[summary.text] = "open" in each.attributes
    return found


def test_only_what_fails_is_open(failing_frames: Frames, document_frames: Frames, page_of: PageOf) -> None:
    assert not any(summaries(page_of(document_frames), "pages").values())
    page = page_of(failing_frames)
    opened = [text for text, is_open in summaries(page, "computation").items() if is_open]
    assert opened == ["All four annotations are scored and make one context vector ✗ fails"]
    opened = [text for text, is_open in summaries(page, "pages").items() if is_open]
    assert opened == ["Attention scoring and the context vector ✗ 1 of 2 computations fail"]


def test_what_fails_is_drawn_however_little_room_there_is(failing_frames: Frames) -> None:
    none = render_html(failing_frames, Budget(pictures=0))
    assert none.count('class="heat"') > 3
    assert "left out, since nothing fails here: <code>attncheck show" in none


def test_long_documents_are_split(failing_frames: Frames, page_of: PageOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_IN_PART", 1)
    parts = summaries(page_of(failing_frames), "part")
    assert parts["Computations 2 to 2 of 2: ✗ 1 of 1 computation fail"]
    assert not parts["Computations 1 to 1 of 2: 1 computation, none fails"]


def test_many_computations_are_put_on_the_page_when_they_are_seen(failing_frames: Frames) -> None:
    at_once, late = (render_html(failing_frames, Budget(computations=most)) for most in (60, 1))
    assert "<noscript>" not in at_once
    assert late.count("<noscript>") == late.count("</noscript>") == late.count('class="computation"')
    assert late.replace("<noscript>\n", "").replace("</noscript>\n", "") == at_once


@pytest.mark.parametrize(
    ("failing", "of", "text"),
    [(0, 1, "1 computation, none fails"), (2, 12, "2 of 12 computations fail")],
)
def test_how_many_fail_is_said(failing: int, of: int, text: str) -> None:
    assert failing_words(failing, of) == text
