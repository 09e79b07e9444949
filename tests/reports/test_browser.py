"""The page in a real browser, where there is one: its script runs, opens what is linked to, and asks nobody anything.

Clicks, filters and accessibility are checked by ``browser_check.mjs`` beside this file, by hand.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-features=NetworkTimeServiceQuerying",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
]

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., tuple[str, str, set[str]]]:
    """Open a page; return what it has become, what was logged, and the addresses that it asked for."""

    def open_page(text: str, anchor: str = "") -> tuple[str, str, set[str]]:
        path, log = tmp_path / "report.html", tmp_path / "net.json"
        path.write_text(text, encoding="utf-8")
        own = [f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}"]
        done = subprocess.run(
            [str(BROWSER), *OPTIONS, *own, "--dump-dom", f"{path.as_uri()}#{anchor}"],
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
    opened: Callable[..., tuple[str, str, set[str]]], failing_frames: Frames
) -> None:
    dom, log, _ = opened(render_html(failing_frames), "cell-file-one--bad.eager")
    assert "CONSOLE" not in log
    assert '<form id="filters" class="filters" aria-label' in dom  # no longer hidden
    assert "1 of 1 cases, 3 of 3 implementations shown" in dom
    assert '<details class="case failing" id="case-file-one" open="">' in dom
    assert dom.count(">Copy</button>") == 5


def test_nothing_opens_by_itself_and_the_page_asks_nobody_anything(
    opened: Callable[..., tuple[str, str, set[str]]], failing_frames: Frames
) -> None:
    dom, _, asked = opened(render_html(failing_frames))
    assert '<details class="case failing" id="case-file-one">' in dom
    assert not {address for address in asked if not address.startswith(("file:", "data:"))}


def test_a_page_that_does_ask_is_seen(opened: Callable[..., tuple[str, str, set[str]]]) -> None:
    _, _, asked = opened('<html><body><img src="https://example.org/x.png"></body></html>')
    assert "https://example.org/x.png" in asked


def test_its_policy_stops_what_should_not_be_there(
    opened: Callable[..., tuple[str, str, set[str]]], failing_frames: Frames
) -> None:
    page = render_html(failing_frames)
    added = "<script>document.body.id = 'run'</script><img src='https://example.org/x.png'></body>"
    dom, log, asked = opened(page.replace("</body>", added))
    assert 'id="run"' not in dom
    assert "https://example.org/x.png" not in asked
    assert "Content Security Policy" in log
