"""The HTML report: one file that needs nothing else."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from attncheck.reports.frames import Frames
from attncheck.reports.html.compiled import CompiledTemplates
from attncheck.reports.html.contents import Budget, budget_of
from attncheck.reports.html.page import make_page
from attncheck.reports.html.text import BEYOND, LEVELS, NOT_JUDGED, failing_words

TEMPLATES = Path(__file__).parent / "templates"
_PIECES_TOGETHER = 1000
"""A template gives a piece for each of its words."""
# HTML allows none of these, not even as references.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")


def render_html(frames: Frames, budget: Budget | None = None) -> str:
    """Return the whole report. The same frames give the same text."""
    return "".join(html_pieces(frames, budget))


def html_pieces(frames: Frames, budget: Budget | None = None) -> Iterator[str]:
    """Give the whole report piece by piece.

    Every text that comes from a case or a framework is escaped, and the page's content security policy allows no
    script but its own and no request to anywhere.
    """
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    stream = (
        environment()
        .get_template("page.html")
        .stream(
            page=make_page(frames, budget or budget_of(len(frames.columns))),
            script=Markup(script),
            style=Markup(style),
            script_hash=b64encode(sha256(script.encode()).digest()).decode("ascii"),
            failing_words=failing_words,
            levels=[*((name, text) for _, name, text in LEVELS), BEYOND, NOT_JUDGED],
        )
    )
    stream.enable_buffering(_PIECES_TOGETHER)
    return (without_forbidden(piece) for piece in stream)


def without_forbidden(text: str) -> str:
    """Return a text without what HTML does not allow in any form."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def environment() -> Environment:
    """Return what renders the templates, every text escaped."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=CompiledTemplates(TEMPLATES),
    )
