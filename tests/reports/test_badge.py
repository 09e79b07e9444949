"""The badge: what it counts, that it is green only where all was judged, and that everybody can read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attncheck.reports.badge import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    INK,
    LABEL_COLOUR,
    RED,
    Badge,
    badge_of,
    render_endpoint,
    render_svg,
)
from attncheck.reports.frames import Frames
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
MakeCase = Callable[..., dict[str, object]]


def test_it_counts_cases_and_is_green_where_all_agree(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    assert badge_of(frames_of(write_run([make_row()]))) == Badge("1 of 1 agree", GREEN)
    rows = [make_row(case="file/one"), make_row(case="file/two", verdict="numeric", message="off")]
    assert badge_of(frames_of(write_run(rows))) == Badge("1 of 2 agree", RED)


@pytest.mark.parametrize(
    ("fields", "badge"),
    [
        ({"verdict": "unsupported", "stage": ""}, Badge("1 of 2 agree", BLUE)),
        ({"verdict": "unverified"}, Badge("1 of 2 agree", BLUE)),
        ({"verdict": "crash", "stage": "", "message": "it ended"}, Badge("1 of 2 agree", AMBER)),
    ],
)
def test_it_is_not_green_where_something_was_not_judged(
    fields: dict[str, str], badge: Badge, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    assert badge_of(frames_of(write_run([make_row(), make_row(case="file/two", **fields)]))) == badge


def test_where_nothing_was_judged_it_says_so(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    assert badge_of(frames_of(write_run([make_row(verdict="unsupported", stage="")]))) == Badge("not judged", GREY)
    assert badge_of(frames_of(write_run(summary=False))) == Badge("not judged", GREY)


def _luminance(colour: str) -> float:
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colour", [GREEN, RED, AMBER, BLUE, GREY, LABEL_COLOUR])
def test_every_colour_has_the_contrast_that_wcag_asks_for(colour: str) -> None:
    light, dark = sorted((_luminance(INK), _luminance(colour)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_the_image_is_xml_that_a_screen_reader_reads_and_the_endpoint_is_that_of_shields() -> None:
    badge = Badge('1 of 2 <agree> & "so"', RED)
    root = ElementTree.fromstring(render_svg(badge))
    assert root.get("aria-label") == f"attention: {badge.message}"
    assert [each.text for each in root.iter() if each.tag.endswith("text")] == ["attention", badge.message]
    assert json.loads(render_endpoint(badge)) == {
        "schemaVersion": 1,
        "label": "attention",
        "message": badge.message,
        "color": RED,
    }
