"""A badge that says how much of a corpus agrees: a small SVG, or the JSON that shields.io draws one from.

It is green where everything that was asked was judged and agrees, and nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from xml.sax.saxutils import escape

from attncheck.errors import ExitCode
from attncheck.reports.answer import exit_code_of
from attncheck.reports.cells import cell_table
from attncheck.reports.coverage import coverage
from attncheck.reports.frames import Frames
from attncheck.reports.terminal import counted_as
from attncheck.verdicts import Verdict

LABEL = "attention"
LABEL_COLOUR = "#24292f"
GREEN, RED, AMBER, BLUE, GREY = "#1a7f37", "#cf222e", "#8a5a00", "#0860c4", "#57606a"
"""All agrees; something is wrong; something could not be run; a part was judged, and agrees; nothing was judged."""
INK = "#ffffff"
_PADDING, _HEIGHT = 8, 20
_WIDTHS = {**dict.fromkeys("il,. ", 3.5), **dict.fromkeys("tfr", 4.5), **dict.fromkeys("0123456789", 7.0)}
"""Pixels, of letters of 11 pixels in the fonts that are named."""
_WIDTH = 6.8
"""Of all others."""


@dataclass(frozen=True)
class Badge:
    """What a badge says, and its colour."""

    message: str
    colour: str


def badge_of(frames: Frames) -> Badge:
    """Count the cases that agree among those that were asked, of all implementations together."""
    rows = cell_table(frames).values()
    agree = sum(counted_as(row[column]) == Verdict.AGREE for row in rows for column in frames.columns if column in row)
    counts = coverage(frames)
    asked, judged = sum(each.asked for each in counts), sum(each.judged for each in counts)
    code = exit_code_of(frames)
    if not judged:
        return Badge("not judged", GREY)
    message = f"{agree:,} of {asked:,} agree"
    if code is ExitCode.AGREE:
        return Badge(message, GREEN if agree == judged == asked else BLUE)
    return Badge(message, RED if code is ExitCode.DISAGREE else AMBER)


def render_svg(badge: Badge) -> str:
    """Return the badge as an SVG that needs nothing else, and that a screen reader reads."""
    widths = [
        round(sum(_WIDTHS.get(letter, _WIDTH) for letter in text)) + 2 * _PADDING for text in (LABEL, badge.message)
    ]
    whole, title = sum(widths), escape(f"{LABEL}: {badge.message}", {'"': "&quot;"})
    texts = "".join(
        f'<text x="{start + width / 2:g}" y="14" textLength="{width - 2 * _PADDING}">{escape(text)}</text>'
        for text, start, width in zip((LABEL, badge.message), (0, widths[0]), widths, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{_HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<clipPath id="round"><rect width="{whole}" height="{_HEIGHT}" rx="3"/></clipPath>'
        f'<g clip-path="url(#round)"><rect width="{widths[0]}" height="{_HEIGHT}" fill="{LABEL_COLOUR}"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="{_HEIGHT}" fill="{badge.colour}"/></g>'
        f'<g fill="{INK}" text-anchor="middle" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="11">'
        f"{texts}</g></svg>\n"
    )


def render_endpoint(badge: Badge) -> str:
    """Return what shields.io reads from an endpoint."""
    record = {"schemaVersion": 1, "label": LABEL, "message": badge.message, "color": badge.colour}
    return json.dumps(record, indent=2) + "\n"
