"""What was judged of what was asked, what the rest lacks, what was padded, and the badge that counts it."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from attncheck.errors import ExitCode
from attncheck.reports.coverage import coverage, judged_counts, narrowings, unjudged
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.reports.summary import exit_code_of, make_summary
from attncheck.reports.write import (
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

UNSUPPORTED: dict[str, Any] = {"stage": "", "verdict": "unsupported"}


def lacking(lacks: str | None, message: str = "") -> dict[str, Any]:
    return UNSUPPORTED | {"lacks": lacks, "message": message}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{}], "judged 1 of 1 case"),
        ([{}, lacking("mask")], "judged 1 of 2 cases; 1 unsupported: mask 1"),
        (
            [lacking("mask"), {}, lacking("bias"), lacking("mask"), lacking("mask, bias")],
            "judged 1 of 5 cases; 4 unsupported: mask 3, bias 2",
        ),
        # Reasons of somebody's own words that differ in numbers alone are one.
        (
            [lacking(None, f"NotImplementedError: head size {size} is not a multiple of 8") for size in (3, 12, 5)],
            'judged 0 of 3 cases; 3 unsupported: "head size N is not a multiple of 8" 3',
        ),
        (
            [lacking(None, "NotImplementedError: no 2 heads"), lacking(None, "NotImplementedError: no windows")],
            'judged 0 of 2 cases; 2 unsupported: "no 2 heads" 1, "no windows" 1',
        ),
        ([lacking(None, "NotImplementedError")], 'judged 0 of 1 case; 1 unsupported: "no reason" 1'),
        (
            [lacking(name) for name in "abcdefghij"],
            "judged 0 of 10 cases; 10 unsupported: a 1, b 1, c 1, d 1, e 1, f 1, g 1, h 1, and 2 more",
        ),
        # An operation that it does not offer is none of its cases.
        (
            [{}, lacking("mask"), lacking("softmax()"), lacking("softmax()"), lacking("dot_scores()")],
            "judged 1 of 2 cases of softmax; 1 unsupported: mask 1; other operations not offered: 2",
        ),
        (
            [lacking("softmax()"), lacking("dot_scores()")],
            "judged 0 of 2 cases; operations not offered: 2",
        ),
        ([{}, {"verdict": "unverified"}], "judged 1 of 2 cases; 1 unverified: no exact answer"),
        (
            [{"verdict": "crash", "stage": ""}, {"verdict": "error", "stage": "", "xfail": True}],
            "judged 0 of 2 cases; 2 could not be run",
        ),
        # An entry that no longer happens judges nothing, and what is known to be wrong was judged.
        ([lacking("mask"), {"verdict": "numeric", "xfail": True}], "judged 1 of 2 cases; 1 unsupported: mask 1"),
    ],
)
def test_what_was_judged_and_what_the_rest_lacks(rows: list[dict[str, Any]], words: str, hand: Any) -> None:
    made = [hand.row(**({"case": f"file/{number}"} | fields)) for number, fields in enumerate(rows)]
    (found,) = coverage(hand.frames(made))
    assert found.words == words


def test_a_case_counts_once_for_all_dtypes_and_a_dtype_is_the_least_of_reasons(hand: Any) -> None:
    rows = [
        hand.row(case="file/a"),
        hand.row(case="file/a", dtype="bfloat16", **lacking("bfloat16", "declares no bfloat16")),
        hand.row(case="file/b", **lacking("mask")),
        hand.row(case="file/b", dtype="bfloat16", **lacking("bfloat16")),
        hand.row(case="file/c", dtype="bfloat16", **lacking("bfloat16")),
        hand.row(case="file/b", verdict="xpass", stage="", message="an entry"),
    ]
    (found,) = coverage(hand.frames(rows))
    assert found.words == "judged 1 of 3 cases; 2 unsupported: bfloat16 1, mask 1"


def test_cases_of_which_there_is_no_result_are_not_run(hand: Any) -> None:
    cases = [hand.case(f"file/{name}") for name in "abc"]
    frames = hand.frames([hand.row(case="file/a")], cases=cases, summary=False)
    assert make_summary(frames).judged == "Judged 1 of 3 cases; 2 not run"


def test_the_line_of_several_names_those_that_were_not_judged_in_all(hand: Any) -> None:
    def frames(partial: int) -> Frames:
        rows = [hand.row(case=f"file/{case}", implementation="numpy.eager") for case in "ab"]
        for number in range(partial):
            rows.append(hand.row(case="file/a", implementation=f"mine.k{number}"))
            rows.append(hand.row(case="file/b", implementation=f"mine.k{number}", **lacking("mask")))
        return hand.frames(rows, name=f"run{partial}")

    assert make_summary(frames(0)).judged == "Judged 2 of 2 cases"
    one = "mine.k0: judged 1 of 2 cases; 1 unsupported: mask 1"
    assert make_summary(frames(1)).judged == f"{one}. The other: judged 2 of 2 cases"
    many = make_summary(frames(6))
    assert many.judged == (
        "Not judged in all cases: mine.k0 1 of 2, mine.k1 1 of 2, mine.k2 1 of 2, mine.k3 1 of 2 and 2 more. "
        "The other: judged 2 of 2 cases"
    )
    assert f"{one}." in many.sentences


def test_too_little_ends_a_comparison_with_3_and_is_told(hand: Any) -> None:
    rows = [hand.row(), hand.row(implementation="mine.kernel", **lacking("mask"))]
    assert unjudged(hand.frames(rows)) == ()
    asked = {"by_name": ["mine.kernel"], "cases": ["masking"], "tags": ["causal", "window"]}
    frames = hand.frames(rows, asked=asked)
    line = "mine.kernel was asked for by name and not judged in the only case"
    assert unjudged(frames) == (line,)
    assert exit_code_of(frames) is ExitCode.NOT_RUN
    assert make_summary(frames).sentences[0] == f"Too little was judged: {line}."
    least = hand.frames(rows, asked={"min_judged": "50%"})
    assert unjudged(least) == ("mine.kernel was judged in 0 of 1 cases; at least 50% have to be (min_judged)",)


def test_what_narrows_a_run_is_named(hand: Any) -> None:
    rows = [hand.row(), hand.row(implementation="mine.kernel")]
    rows += [
        hand.row(dtype=dtype, implementation=name, **lacking(dtype))
        for dtype in ("bfloat16", "float16")
        for name in ("numpy.eager", "mine.kernel")
    ]
    directory = hand.run(
        rows,
        asked={"cases": ["attention", "masking"], "tags": ["causal"], "dtypes": ["float64", "bfloat16", "float16"]},
        sources={"mine.kernel": {"file": "mine.py", "line": 3}},
    )
    assert narrowings(hand.frames_of(directory)) == (
        "bfloat16 and float16 not tested on numpy.eager, which does not declare them.",
        "bfloat16 and float16 not tested on mine.kernel: declare `dtypes`.",
        "Partial run: only the cases attention and masking; the tag causal; the dtypes float64, bfloat16 and float16.",
    )
    assert narrowings(hand.frames([hand.row()], name="whole")) == ()


def test_evaluations_that_others_cover_are_counted_also_where_their_case_was_judged(hand: Any) -> None:
    left_out = {"verdict": "unsupported", "stage": "", "lacks": "--all-cases", "message": "left out"}
    rows = [
        hand.row(implementation="torch.compile"),
        *(hand.row(implementation="torch.compile", dtype=dtype, **left_out) for dtype in ("float32", "float16")),
    ]
    assert narrowings(hand.frames(rows)) == (
        "torch.compile was not asked for 2 evaluations, which others cover; --all-cases asks for all.",
    )


def test_the_first_line_says_who_was_judged_in_the_standard_cases_alone(hand: Any) -> None:
    left_out = {"verdict": "unsupported", "stage": "", "lacks": "--all-cases", "message": "left out"}
    names = ("numpy.eager", "torch.eager", "jax.jit")
    rows = [
        hand.row(case=f"file/{case}", implementation=name, **(left_out if name == "jax.jit" and case == "c" else {}))
        for name in names
        for case in "abc"
    ]
    frames = hand.frames(rows)
    assert make_summary(frames).judged == "numpy, torch: 3 of 3 cases; jax: the 2 standard cases, which cover the rest"
    assert [each.is_whole for each in coverage(frames)] == [True] * 3
    alone = hand.frames(rows[-3:], name="alone")
    assert make_summary(alone).judged == "Judged 2 of 2 standard cases, which cover the rest"
    lacking_too = [hand.row(case="file/d", implementation=name, **lacking("mask")) for name in names[2:]]
    lacking_too += [hand.row(case="file/d", implementation=name) for name in names[:2]]
    assert make_summary(hand.frames([*rows, *lacking_too], name="part")).judged == (
        "jax: judged 2 of 3 standard cases, which cover the rest; 1 unsupported: mask 1. "
        "The others: judged 4 of 4 cases"
    )


PADDED, MORE = (
    "zero columns (D 5 to 8, Dv 3 to 8)",
    "zero columns (D 5 to 8), queries (Lq 3 to 16), masked keys (T 7 to 16)",
)


@pytest.mark.parametrize(
    ("padded", "sentence"),
    [
        ([PADDED, None], "On numpy.eager, 1 case was padded with zero columns, as it requires."),
        ([PADDED, PADDED], "On numpy.eager, 2 cases were padded with zero columns, as it requires."),
        (
            [PADDED, MORE, None],
            "On numpy.eager, 2 cases were padded, as it requires: 2 with zero columns, 1 with masked keys and "
            "1 with queries.",
        ),
        (
            ["a block mask (3 sequences)", "a block mask (2 sequences), zero columns (D 5 to 8)"],
            "On numpy.eager, which has no function for packed sequences, 2 cases were called with a block mask "
            "instead. On numpy.eager, 1 case was padded with zero columns, as it requires.",
        ),
        ([None, None], ""),
        (["with something else", None], "On numpy.eager, 1 case was padded."),  # as nobody here writes it
    ],
)
def test_the_facts_count_cases_by_what_was_added(padded: list[str | None], sentence: str, hand: Any) -> None:
    rows = [hand.row(case=f"file/{number}", padded=each) for number, each in enumerate(padded)]
    rows += [hand.row(case="file/0", dtype="float32", padded=padded[0])]  # another dtype is no other case
    frames = hand.frames(rows)
    said = [each for each in make_summary(frames).sentences if "padded" in each or "mask" in each]
    assert " ".join(said) == sentence
    (counts,) = judged_counts(frames).values()
    assert counts["padded"] == len([each for each in padded if each])


def test_padded_cases_count_as_judged_and_unsupported_ones_are_not_padded(hand: Any) -> None:
    unsupported: dict[str, Any] = {"stage": "", "verdict": "unsupported", "message": "says no", "padded": PADDED}
    frames = hand.frames([hand.row(padded=PADDED), hand.row(case="file/two", **unsupported)])
    (found,) = coverage(frames)
    assert (found.judged, found.lacks.cases) == (1, 1)
    assert "On numpy.eager, 1 case was padded with zero columns, as it requires." in make_summary(frames).sentences


def test_the_page_of_a_case_says_what_was_added(hand: Any) -> None:
    rows = [hand.row(padded=PADDED), hand.row(dtype="float32", stage="", verdict="crash", message="died", padded=MORE)]
    page = render_html(hand.frames(rows))
    assert f"<small>padded with {PADDED}</small>" in page
    assert f"<small>padded with {MORE}</small>" in page


def test_it_counts_cases_and_is_green_where_all_agree(hand: Any) -> None:
    assert badge_of(hand.frames([hand.row()])) == Badge("1 of 1 agree", GREEN)
    rows = [hand.row(case="file/one"), hand.row(case="file/two", verdict="numeric", message="off")]
    assert badge_of(hand.frames(rows)) == Badge("1 of 2 agree", RED)


@pytest.mark.parametrize(
    ("fields", "badge"),
    [
        ({"verdict": "unsupported", "stage": ""}, Badge("1 of 2 agree", BLUE)),
        ({"verdict": "unverified"}, Badge("1 of 2 agree", BLUE)),
        ({"verdict": "crash", "stage": "", "message": "it ended"}, Badge("1 of 2 agree", AMBER)),
    ],
)
def test_it_is_not_green_where_something_was_not_judged(fields: dict[str, str], badge: Badge, hand: Any) -> None:
    assert badge_of(hand.frames([hand.row(), hand.row(case="file/two", **fields)])) == badge


def test_where_nothing_was_judged_it_says_so(hand: Any) -> None:
    assert badge_of(hand.frames([hand.row(verdict="unsupported", stage="")])) == Badge("not judged", GREY)
    assert badge_of(hand.frames(summary=False)) == Badge("not judged", GREY)


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
