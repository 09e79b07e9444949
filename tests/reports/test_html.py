"""The page: that it needs nothing else, what fails in pictures and scripts, how much is on it, and in a real browser.

The snapshot in tests/net holds what it says of one small run, section by section. Clicks, filters and accessibility are
checked by ``browser_check.mjs`` beside this file, by hand.
"""

from __future__ import annotations

import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attncheck.reports.frames import Frames
from attncheck.reports.html import evidence
from attncheck.reports.html.contents import Budget
from attncheck.reports.html.page import render_html

PageOf = Callable[..., Any]


@pytest.fixture(scope="module")
def document_page(document_report: Path, page_of: PageOf) -> Any:
    return page_of((document_report / "report.html").read_text(encoding="utf-8"))


def links(page: Any) -> list[str]:
    return [element.attributes["href"] for element in page.all("a") if "href" in element.attributes]


def texts(elements: Any) -> list[str]:
    return [element.text for element in elements]


def test_links_lead_to_one_element_inside_and_the_policy_allows_its_own_script_and_no_request(
    document_page: Any,
) -> None:
    ids = [element.attributes["id"] for element in document_page.walk() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    inside = {href.removeprefix("#") for href in links(document_page)}
    assert inside <= set(ids)
    assert len(inside) > 30
    asking = {"src", "srcset", "action", "data"}
    asked = [
        element.attributes[name] for element in document_page.walk() for name in asking & element.attributes.keys()
    ]
    assert all(address.startswith("data:image/png;base64,") for address in asked)
    script = document_page.one("script")
    (policy,) = [e.attributes["content"] for e in document_page.all("meta") if "http-equiv" in e.attributes]
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{b64encode(sha256(script.raw.encode()).digest()).decode()}'" in policy
    assert "http" not in document_page.one("style").raw + script.raw


def test_a_failing_cell_shows_its_numbers_and_how_to_see_it_again(failing_frames: Frames, page_of: PageOf) -> None:
    page = page_of(failing_frames)
    (item,) = page.one("ol", of_class="wrong").all("li")
    assert item.one("a").attributes["href"] == "#cell:file/one:bad.eager"
    assert page.one("tbody", id="cell:file/one:bad.eager").all("td", of_class="failing")
    bad, old = page.one("details", id="case:file/one").all("section", of_class="evidence")
    figure = bad.one("figure")
    assert "largest 20 at [0, 0, 0, 2]; 1 of 3 elements exceed the limit 1." in figure.text
    tables = {table.one("caption").text: table.all("td")[1:] for table in figure.all("table", of_class="small")}
    assert {name: texts(cells) for name, cells in tables.items()} == {
        "computed": ["0.1", "0.205", "0.9"],
        "exact": ["0.1", "0.2", "0.7"],
        "difference": ["0", "0.005", "0.2"],
    }
    assert all([cell.classes for cell in cells] == [[], [], ["w"]] for cells in tables.values())
    commands = [f"attncheck {name} file/one bad.eager --dtype float64" for name in ("explain", "repro")]
    assert texts(bad.all("pre", of_class="command")) == commands
    assert "Expected failure: It always was ( numpy/numpy#12 )" in old.text


def test_dtypes_that_differ_are_told_apart_and_implementations_that_are_alike_share_a_cell(
    page_of: PageOf, hand: Any
) -> None:
    rows = [
        {"case": f"file/{case}", "implementation": f"{name}.eager", "verdict": "numeric" if case < failing else "agree"}
        for name, failing in (("a", 0), ("b", 1), ("c", 2))
        for case in range(3)
    ]
    table = page_of(hand.frames(rows)).one("table", of_class="matrix")
    # That which fails most comes first, and only what does not agree is linked.
    assert texts(table.all("th", scope="col")) == ["case", "c.eager 1.0", "b.eager 1.0", "a.eager 1.0"]
    both, one, alike = table.one("tbody").all("tr")
    assert [cell.attributes["class"] for cell in one.all("td")] == ["failing", "agree", "agree"]
    assert links(both.all("td")[0]) == ["#cell:file/0:c.eager"]
    assert links(one.all("td")[1]) == []
    assert [(cell.text, cell.attributes.get("colspan")) for cell in alike.all("td")] == [("✓ agree", "3")]
    words = {"float64": "agree", "float32": "agree", "float16": "numeric"}
    page = page_of(hand.frames({"dtype": dtype, "verdict": word} for dtype, word in words.items()))
    cell = page.one("table", of_class="matrix").one("td", of_class="mixed")
    assert [(part.attributes["data-d"], part.text) for part in cell.all("span")] == [
        ("float64 float32", "f64 f32 ✓ agree"),
        ("float16", "f16 ✗ numeric at weights"),
    ]


def test_the_script_that_reproduces_a_cell_is_shown_and_what_cannot_be_read_is_left_out(
    failing_frames: Frames, page_of: PageOf
) -> None:
    (directory,) = failing_frames.arrays.directories.values()
    (directory / "scripts").mkdir()
    text = "print('</code></pre><script>alert(1)</script> ]]> &amp; \"')\n"
    (directory / "scripts" / "000.py").write_text(text)
    (directory / "secret.py").write_text("secret")
    index = directory / "scripts" / "index.json"
    index.write_text('{"file/one|bad.eager|float64": "000.py", "file/one|old.eager|float64": "../secret.py", "x": 3}')
    page = page_of(failing_frames)
    (shown,) = page.all("pre", of_class="script")
    assert (shown.raw, shown.attributes["data-name"]) == (text, "file-one-bad.eager-float64.py")
    assert "secret" not in page.one("main").text
    for content in ("[]", "{", '{"file/one|bad.eager|float64": "absent.py"}'):
        index.write_text(content)
        assert 'class="script"' not in render_html(failing_frames)


def test_above_the_budget_what_fails_stays_and_the_rest_is_counted(page_of: PageOf, hand: Any) -> None:
    rows = [{"case": f"file/{n:03}", "verdict": "numeric" if n == 57 else "agree", "message": "bad"} for n in range(60)]
    page = page_of(hand.frames(rows), Budget(matrix_letters=2_500, detail_letters=4_000, wrong=0))
    table = page.one("table", of_class="matrix").one("tbody")
    assert texts(table.all("th", scope="row")) == ["000", "001", "002", "003", "057"]
    cases = page.all("details", of_class="case")
    assert [case.one("summary").one("code").text for case in cases] == ["file/000", "file/057"]
    assert [text.partition(",")[0] for text in texts(page.all("p", of_class="left-out"))] == [
        "55 of 60 cases are not listed",
        "58 cases are not detailed here",
    ]
    assert "And 1 more defect, in results.csv and numbers.csv ." in page.one("section", id="wrong").text
    ids = {element.attributes["id"] for element in page.walk() if "id" in element.attributes}
    assert {href.removeprefix("#") for href in links(page)} <= ids
    # Of what is unsupported everywhere there is a number alone.
    lacking = {"stage": "", "verdict": "unsupported", "message": "NotImplementedError: no window"}
    rows = [lacking | {"case": f"file/{number}", "lacks": "window"} for number in range(40)]
    page = page_of(hand.frames([*rows, {}, lacking | {"dtype": "float32"}]))
    assert len(page.all("details", of_class="case")) == 1
    counts = page.one("section", id="counts")
    assert texts(counts.one("tbody").all("td")) == ["✓ 1", "-", "\N{EN DASH} 41"]


FAILING = "documents/attention_scoring_post/all-four-annotations-are-scored-and-make-one-context-vector"


def summaries(page: Any, kind: str) -> dict[str, bool]:
    return {found.all("summary")[0].text: "open" in found.attributes for found in page.all("details", of_class=kind)}


def test_of_documents_only_what_fails_is_open_and_drawn_however_little_room_there_is(
    document_frames: Frames, document_page: Any, page_of: PageOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(summaries(document_page, "pages").values())
    numbers = document_frames.numbers.copy()
    numbers["verdict"] = numbers["verdict"].where(~numbers["case"].eq(FAILING), "numeric")
    assert isinstance(numbers, pd.DataFrame)
    frames = replace(document_frames, numbers=numbers)
    text = render_html(frames, Budget(pictures=0))
    opened = [name for name, is_open in summaries(page_of(text), "computation").items() if is_open]
    assert opened == ["All four annotations are scored and make one context vector ✗ fails"]
    assert text.count('class="heat"') > 3
    assert "left out, since nothing fails here: <code>attncheck show" in text
    # Many computations are put on the page when they are seen.
    late = render_html(frames, Budget(pictures=0, computations=1))
    assert late.count("<noscript>") == late.count("</noscript>") == late.count('class="computation"')
    assert late.replace("<noscript>\n", "").replace("</noscript>\n", "") == text
    # Long documents are split.
    monkeypatch.setattr(evidence, "_MAX_IN_PART", 1)
    parts = summaries(page_of(frames, Budget(pictures=0)), "part")
    assert parts["Computations 2 to 2 of 2: ✗ 1 of 1 computation fail"]
    assert not parts["Computations 1 to 1 of 2: 1 computation, none fails"]


def test_the_script_runs_without_an_error_and_the_policy_stops_what_should_not_be_there(
    in_browser: Callable[[str, str], tuple[str, str]], failing_frames: Frames
) -> None:
    page = render_html(failing_frames)
    dom, log = in_browser(page, "cell:file/one:bad.eager")
    assert "CONSOLE" not in log
    assert '<form id="filters" class="filters" aria-label' in dom  # no longer hidden
    assert "1 of 1 cases, 3 of 3 implementations shown" in dom
    assert '<details class="case failing" id="case:file/one" open="">' in dom  # as it is linked to
    added = "<script>document.body.id = 'run'</script><img src='https://example.org/x.png'></body>"
    dom, log = in_browser(page.replace("</body>", added), "")
    assert 'id="run"' not in dom
    assert "Content Security Policy" in log


@pytest.fixture
def in_browser(tmp_path: Path) -> Callable[[str, str], tuple[str, str]]:
    """Open a page; return what it has become, and what was logged."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium or Chrome is installed")
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    options += " --enable-logging=stderr --virtual-time-budget=5000 --dump-dom"

    def open_page(text: str, anchor: str) -> tuple[str, str]:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        own = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
        words = [browser, *options.split(), *own, f"{path.as_uri()}#{anchor}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        if "<html" not in done.stdout:
            pytest.skip(f"the browser does not run here: {done.stderr[-300:]}")
        return done.stdout, done.stderr

    return open_page
