"""The page: that it needs nothing else, what fails in pictures and scripts, how much is on it, and in a real browser.

The snapshot in tests/net holds what it says of one small run, section by section. Clicks, filters and accessibility are
checked by ``browser_check.mjs`` beside this file, by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from attncheck.reports.frames import Cell, Column, Frames, State
from attncheck.reports.html import evidence
from attncheck.reports.html.contents import (
    Budget,
    failing_words,
    make_anchors,
    shape_text,
    short,
    slug,
    unique_slugs,
    urgent_first,
    within,
)
from attncheck.reports.html.evidence import error_pictures, heat_of
from attncheck.reports.html.page import render_html
from attncheck.reports.panels import Panel
from attncheck.results.format import EXACT, StoredArray, bound_name

PageOf = Callable[..., Any]


@pytest.fixture(scope="module")
def document_page(document_report: Path, page_of: PageOf) -> Any:
    return page_of((document_report / "report.html").read_text(encoding="utf-8"))


def links(page: Any) -> list[str]:
    return [element.attributes["href"] for element in page.all("a") if "href" in element.attributes]


def texts(elements: Any) -> list[str]:
    return [element.text for element in elements]


def listed(page: Any) -> list[str]:
    """Return the cases of the matrix, by name."""
    return [row.one("th", scope="row").text for row in page.one("table", of_class="matrix").one("tbody").all("tr")]


def detailed(page: Any) -> list[str]:
    return [case.one("summary").one("code").text for case in page.all("details", of_class="case")]


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


def test_a_documents_numbers_stand_beside_the_exact_ones(document_page: Any) -> None:
    post = document_page.one("article", id="document-attention_scoring_post")
    tables = [table for table in post.all("table", of_class="numbers") if table.all("thead")]
    assert texts(tables[0].all("th", scope="col"))[:3] == ["element", "printed", "exact"]
    assert texts(tables[0].one("tbody").all("td")) == ["927", "927", "927", "927"]
    drawn = {table.one("caption").text: table for table in post.all("table", of_class="heat")}
    weights = drawn["attention_weights (weights)"].all("td")[1:]
    assert texts(weights) == ["0.119", "7.95e-232", "0", "0.881"]
    assert all(re.fullmatch("background:#[0-9a-f]{6}", cell.attributes["style"]) for cell in weights)


def test_a_failing_cell_shows_its_numbers_and_how_to_see_it_again(failing_frames: Frames, page_of: PageOf) -> None:
    page = page_of(failing_frames)
    (item,) = page.one("ol", of_class="wrong").all("li")
    assert item.one("a").attributes["href"] == "#cell-file-one--bad.eager"
    assert page.one("tbody", id="cell-file-one--bad.eager").all("td", of_class="failing")
    case = page.one("details", id="case-file-one")
    stages = case.one("table", of_class="stages")
    assert texts(stages.all("td", of_class="n")) == ["0.25 0.12", "20 19 numeric", "20 19 numeric"]
    bad, old = case.all("section", of_class="evidence")
    assert bad.all("p", of_class="message")[0].text == "20 times the bound"
    (row,) = bad.all("div", of_class="scroll")[0].one("tbody").all("tr")
    assert texts(row.all("td")) == ["numeric", "[0, 0, 0, 2]", "0.9", "0.7", "0.2", "0.01", "the exact answer"]
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
    assert old.one("a").attributes["href"] == "https://github.com/numpy/numpy/issues/12"
    # Pairs are counted both ways and lead to the worst case.
    pairs = page.one("section", id="pairs")
    disagree, near = "✗ 1 of 1 10 of the allowed", "✓ 0 of 1 0.5 of the allowed"
    assert sorted(sorted(texts(row.all("td"))) for row in pairs.one("tbody").all("tr")) == sorted(
        [sorted(["—", disagree, near]), sorted([disagree, "—", ""]), sorted([near, "", "—"])]
    )
    assert set(links(pairs)) == {"#case-file-one"}


def test_a_failing_array_that_is_too_large_to_read_is_a_map(hand: Any, page_of: PageOf) -> None:
    exact = np.zeros((1, 1, 9, 9))
    wrong = exact.copy()
    wrong[0, 0, 4, 5] = 3.0
    arrays = [
        StoredArray("file/one", "float64", name, "weights", array)
        for name, array in [("numpy.eager", wrong), (EXACT, exact), (bound_name("native"), exact + 1)]
    ]
    figure = (
        page_of(hand.frames([{"verdict": "numeric", "index": "0,0,4,5"}], arrays=arrays))
        .one("section", id="wrong")
        .one("figure")
    )
    assert figure.all("table") == []
    levels = {path.attributes["class"]: path.attributes["d"] for path in figure.one("svg").all("path")}
    assert (levels["e2"], levels["ex"]) == ("M5 4h1v1h-1z", "M5.2 4.2l.6 .6m0-.6l-.6 .6")


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


def test_dtypes_that_differ_are_told_apart(page_of: PageOf, hand: Any) -> None:
    words = {"float64": "agree", "float32": "agree", "bfloat16": "unsupported", "float16": "numeric"}
    page = page_of(hand.frames({"dtype": dtype, "verdict": word} for dtype, word in words.items()))
    cell = page.one("table", of_class="matrix").one("td", of_class="mixed")
    parts = [(part.attributes["data-d"], part.attributes["data-v"], part.text) for part in cell.all("span")]
    assert parts == [
        ("float64 float32", "agree", "f64 f32 ✓ agree"),
        ("bfloat16", "unsupported", "bf16 \N{EN DASH} unsupported"),
        ("float16", "numeric", "f16 ✗ numeric at weights"),
    ]


def test_implementations_that_are_alike_share_a_cell_and_only_what_does_not_agree_is_linked(
    page_of: PageOf, hand: Any
) -> None:
    rows = [
        {
            "case": case,
            "implementation": name,
            "verdict": "numeric" if (case, name) == ("file/b", "b.eager") else "agree",
        }
        for case in ("file/a", "file/b")
        for name in ("a.eager", "b.eager")
    ]
    alike, apart = page_of(hand.frames(rows)).one("table", of_class="matrix").one("tbody").all("tr")
    assert [(cell.text, cell.attributes.get("colspan")) for cell in alike.all("td")] == [("✓ agree", "2")]
    assert links(apart.all("td")[0]) == ["#cell-file-b--b.eager"]
    assert (apart.all("td")[1].text, links(apart.all("td")[1])) == ("✓ agree", [])


def test_partial_results_nothing_and_two_environments_are_said(page_of: PageOf, hand: Any) -> None:
    page = page_of(hand.frames([{}], summary=False))
    assert page.one("p", of_class="partial").text.startswith("Partial results. The run local was interrupted")
    page = page_of(hand.frames(missing={"jax": "not installed"}))
    assert page.one("h1").text == "! Nothing was run."
    assert not page.all("table", of_class="matrix")
    bad = hand.run([{"verdict": "error", "stage": "", "message": "no"}], label="new")
    page = page_of(hand.frames_of(bad, hand.run([{}], label="old")))
    headings = texts(page.one("table", of_class="matrix").all("th", scope="col"))
    assert headings == ["case", "numpy.eager 1.0 new", "numpy.eager 1.0 old"]
    assert page.one("ol", of_class="wrong").one("a").attributes["href"] == "#cell-file-one--numpy.eager--new"


def test_the_implementation_that_fails_most_has_the_first_column(page_of: PageOf, hand: Any) -> None:
    rows = [
        {"case": f"file/{case}", "implementation": f"{name}.eager", "verdict": "numeric" if case < failing else "agree"}
        for name, failing in (("a", 0), ("b", 1), ("c", 2))
        for case in range(3)
    ]
    page = page_of(hand.frames(rows))
    table = page.one("table", of_class="matrix")
    headings = texts(table.all("th", scope="col"))
    assert headings == ["case", "c.eager 1.0", "b.eager 1.0", "a.eager 1.0"]
    first = table.one("tbody").all("tr")[1]
    assert [cell.attributes["class"] for cell in first.all("td")] == ["failing", "agree", "agree"]
    assert texts(page.one("select", id="f-column").all("option"))[1:] == headings[1:]


def test_above_the_budget_what_fails_stays_and_the_rest_is_counted(page_of: PageOf, hand: Any) -> None:
    rows = [{"case": f"file/{n:03}", "verdict": "numeric" if n == 57 else "agree", "message": "bad"} for n in range(60)]
    page = page_of(hand.frames(rows), Budget(matrix_letters=2_500, detail_letters=4_000, wrong=0))
    assert listed(page) == ["000", "001", "002", "003", "057"]
    assert detailed(page) == ["file/000", "file/057"]
    assert texts(page.all("p", of_class="left-out")) == [
        "55 of 60 cases are not listed, to keep this page small; those that fail or are expected to fail come first. "
        "All are in results.parquet .",
        "58 cases are not detailed here, to keep this page small: those that fail or are expected to fail come first. "
        "Every stage of every case is in results.parquet .",
    ]
    assert "And 1 more defect, in results.csv and numbers.csv ." in page.one("section", id="wrong").text
    ids = {element.attributes["id"] for element in page.walk() if "id" in element.attributes}
    assert {href.removeprefix("#") for href in links(page)} <= ids
    # Of what is unsupported everywhere there is a number alone.
    lacking = {"stage": "", "verdict": "unsupported", "message": "NotImplementedError: no window"}
    rows = [lacking | {"case": f"file/{number}", "lacks": "window"} for number in range(40)]
    page = page_of(hand.frames([*rows, {}, lacking | {"dtype": "float32"}]))
    assert (listed(page), detailed(page)) == (["one"], ["file/one"])
    counts = page.one("section", id="counts")
    assert texts(counts.one("tbody").all("td")) == ["✓ 1", "-", "\N{EN DASH} 41"]
    assert counts.one("summary").text == "numpy.eager: 40 unsupported: window 40"


def test_the_page_of_a_kernel_that_fails_everywhere_is_small(hand: Any) -> None:
    rows = [
        hand.row(
            case=f"probes/of/{number:04}-{'a-name-of-a-common-length-' * 3}",
            dtype=dtype,
            stage=stage,
            verdict="numeric",
            message=f"{number} times the largest error that is possible in this step; at [0, 0] computed 1, exact 2",
            **dict.fromkeys(("value", "reference", "difference", "allowed", "ratio"), 1.2345678901234567 + number),
            index="0,0,1,2",
        )
        for number in range(2_000)
        for dtype in ("float64", "float32", "float16")
        for stage in ("scores", "weights", "output")
    ]
    assert len(render_html(hand.frames(rows)).encode()) < 3_000_000


def test_every_tag_leads_to_what_it_probes_and_answers(page_of: PageOf, hand: Any) -> None:
    said = {"probes": "No later key is seen.", "defect": "A mask that is off by one."}
    page = page_of(hand.frames([{}], cases=[hand.case(tags=["causal", "untold"], probes={"causal": said})]))
    (linked,) = [link for link in page.all("a") if link.attributes.get("href") == "#tag-causal"]
    assert linked.text == "causal"
    assert all(words in page.one("div", id="tag-causal").text for words in said.values())
    assert "#tag-untold" not in links(page)


FAILING = "documents/attention_scoring_post/all-four-annotations-are-scored-and-make-one-context-vector"


def summaries(page: Any, kind: str) -> dict[str, bool]:
    return {found.all("summary")[0].text: "open" in found.attributes for found in page.all("details", of_class=kind)}


def opened(page: Any, kind: str) -> list[str]:
    return [summary for summary, is_open in summaries(page, kind).items() if is_open]


def test_of_documents_only_what_fails_is_open_and_drawn_however_little_room_there_is(
    document_frames: Frames, document_page: Any, page_of: PageOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(document_page, "pages") == []
    numbers = document_frames.numbers.copy()
    numbers["verdict"] = numbers["verdict"].where(~numbers["case"].eq(FAILING), "numeric")
    assert isinstance(numbers, pd.DataFrame)
    frames = replace(document_frames, numbers=numbers)
    text = render_html(frames, Budget(pictures=0))
    page = page_of(text)
    assert opened(page, "computation") == ["All four annotations are scored and make one context vector ✗ fails"]
    assert opened(page, "pages") == ["Attention scoring and the context vector ✗ 1 of 2 computations fail"]
    assert text.count('class="heat"') > 3
    assert "left out, since nothing fails here: <code>attncheck show" in text
    # Many computations are put on the page when they are seen.
    late = render_html(frames, Budget(pictures=0, computations=1))
    assert "<noscript>" not in text
    assert late.count("<noscript>") == late.count("</noscript>") == late.count('class="computation"')
    assert late.replace("<noscript>\n", "").replace("</noscript>\n", "") == text
    # Long documents are split.
    monkeypatch.setattr(evidence, "_MAX_IN_PART", 1)
    parts = summaries(page_of(frames, Budget(pictures=0)), "part")
    assert parts["Computations 2 to 2 of 2: ✗ 1 of 1 computation fail"]
    assert not parts["Computations 1 to 1 of 2: 1 computation, none fails"]
    assert failing_words(2, 12) == "2 of 12 computations fail"


ONE = Column("here", "torch.sdpa", "2.0")


def test_anchors_are_readable_harmless_and_each_is_another() -> None:
    anchors = make_anchors(["softmax/a-scores", "softmax a scores", "é"], [ONE])
    names = [anchors.case(case) for case in ("softmax/a-scores", "softmax a scores", "é")]
    assert names == ["case-softmax-a-scores", "case-softmax-a-scores-2", "case-x"]
    assert anchors.cell("softmax/a-scores", ONE) == "cell-softmax-a-scores--torch.sdpa"
    there = Column("there", "torch.sdpa", "2.1")
    assert make_anchors(["a"], [ONE, there]).cell("a", there) == "cell-a--torch.sdpa--there"
    assert [slug("<a href='x'>"), slug("'\""), len(slug("a" * 500))] == ["a-href-x", "x", 120]
    assert unique_slugs(["a", "a-2", "a", "a"]) == ["a", "a-2", "a-3", "a-4"]


def test_a_map_has_every_cell_once_and_marks_what_is_beyond_the_bound() -> None:
    errors = np.array([[0.0, 0.1, 0.5, 1.0], [1.5, 10.0, 11.0, np.inf], [np.nan, 0.05, 0.05, 0.05]])
    (picture,) = error_pictures(errors, "a <b>")
    svg = ElementTree.fromstring(str(picture))[1]
    assert svg.attrib["aria-label"] == "a <b>"
    paths = {path.attrib["class"]: path.attrib["d"] for path in svg.findall("path")}
    assert paths.pop("ex").count("M") == 4
    assert {level: paths[level] for level in ("e0", "e1", "e2", "e3", "en")} == {
        "e0": "M0 0h2v1h-2zM1 2h3v1h-3z",
        "e1": "M2 0h2v1h-2z",
        "e2": "M0 1h2v1h-2z",
        "e3": "M2 1h2v1h-2z",
        "en": "M0 2h1v1h-1z",
    }
    assert svg.find("circle") is not None
    # A large one stays small and loses no error.
    errors = np.zeros((1, 1, 300, 500))
    errors[0, 0, 211, 407] = 5.0
    (picture,) = error_pictures(errors, "large")
    assert len(picture) < 5_000
    assert 'class="e2"' in picture
    assert re.search(r'viewBox="-\.5 -\.5 3[0-3] 3[0-3]"', picture)
    for nothing in (np.zeros((0, 3)), np.full((2, 2), np.nan)):
        assert error_pictures(nothing, "none") == []


def test_a_matrix_is_a_table_with_its_numbers_and_a_large_one_a_picture(page_of: PageOf) -> None:
    small = page_of(heat_of(Panel("m", np.array([[0.0, 1.0]]), "#000000", "query", "key", ("first",), ())))
    assert (small.one("caption").text, small.one("thead").one("td").text) == ("m", "query ↓ key →")
    assert texts(small.all("th")) == ["0", "1", "first"]
    cells = small.one("tbody").all("td")
    assert [(cell.text, cell.classes, cell.attributes["style"]) for cell in cells] == [
        ("0", [], "background:#f3f1f4"),
        ("1", ["l"], "background:#000000"),
    ]
    large = page_of(heat_of(Panel("m", np.eye(30))))
    image = large.one("img")
    assert image.attributes["alt"] == "m: 30 x 30 matrix, from 0 to 1"
    with Image.open(BytesIO(b64decode(image.attributes["src"].partition(",")[2]))) as picture:
        assert (picture.size, picture.getpixel((1, 0)), picture.getpixel((3, 3))) == (
            (30, 30),
            (0xF3, 0xF1, 0xF4),
            (0x6A, 0x0D, 0x83),
        )
    assert [short(1 / 3), short(None), short(float("nan"))] == ["0.333", "\N{EN DASH}", "\N{EN DASH}"]
    assert (shape_text((2, 3)), shape_text(())) == ("2 \N{MULTIPLICATION SIGN} 3", "scalar")


def test_what_fails_comes_first_then_what_is_known_and_a_budget_ends_the_list() -> None:
    states = {"a": State.AGREE, "b": State.XFAIL, "c": State.UNSUPPORTED, "d": State.FAILING}
    table = {case: {ONE: {"float64": Cell(state, "agree", "")}} for case, state in states.items()}
    assert urgent_first(table) == ["d", "b", "a", "c"]
    assert list(within(["d", "b", "a"], {"d": 5, "b": 4, "a": 1}.__getitem__, 9)) == ["d", "b"]


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-features=NetworkTimeServiceQuerying "
    "--enable-logging=stderr --virtual-time-budget=5000"
)


@pytest.fixture
def in_browser(tmp_path: Path) -> Callable[..., tuple[str, str, set[str]]]:
    """Open a page; return what it has become, what was logged, and the addresses that it asked for."""
    if BROWSER is None:
        pytest.skip("no Chromium or Chrome is installed")

    def open_page(text: str, anchor: str = "") -> tuple[str, str, set[str]]:
        path, log = tmp_path / "report.html", tmp_path / "net.json"
        path.write_text(text, encoding="utf-8")
        own = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
        done = subprocess.run(
            [BROWSER, *OPTIONS.split(), *own, f"--log-net-log={log}", "--dump-dom", f"{path.as_uri()}#{anchor}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if "<html" not in done.stdout:
            pytest.skip(f"the browser does not run here: {done.stderr[-300:]}")
        return done.stdout, done.stderr, _asked_for(log.read_text(encoding="utf-8"))

    return open_page


def _asked_for(log: str) -> set[str]:
    try:
        events = json.loads(log)["events"]
    except json.JSONDecodeError:  # a browser that is ended early leaves the list open
        events = json.loads(log.rstrip().rstrip(",") + "]}")["events"]
    told = [event["params"] for event in events if "url" in event.get("params", {})]
    # What a browser asks for its own sake, such as the time, has no page that asked for it.
    return {each["url"] for each in told if each.get("initiator", "not an origin") != "not an origin"}


def test_the_script_runs_without_an_error_and_opens_what_is_linked_to(
    in_browser: Callable[..., tuple[str, str, set[str]]], failing_frames: Frames
) -> None:
    page = render_html(failing_frames)
    dom, log, asked = in_browser(page, "cell-file-one--bad.eager")
    assert "CONSOLE" not in log
    assert '<form id="filters" class="filters" aria-label' in dom  # no longer hidden
    assert "1 of 1 cases, 3 of 3 implementations shown" in dom
    assert '<details class="case failing" id="case-file-one" open="">' in dom
    assert dom.count(">Copy</button>") == 5
    assert not {address for address in asked if not address.startswith(("file:", "data:"))}
    dom, _, _ = in_browser(page)
    assert '<details class="case failing" id="case-file-one">' in dom  # nothing opens by itself


def test_its_policy_stops_what_should_not_be_there(
    in_browser: Callable[..., tuple[str, str, set[str]]], failing_frames: Frames
) -> None:
    outside = "https://example.org/x.png"
    _, _, asked = in_browser(f'<html><body><img src="{outside}"></body></html>')
    assert outside in asked  # a page that does ask is seen
    added = f"<script>document.body.id = 'run'</script><img src='{outside}'></body>"
    dom, log, asked = in_browser(render_html(failing_frames).replace("</body>", added))
    assert 'id="run"' not in dom
    assert outside not in asked
    assert "Content Security Policy" in log
