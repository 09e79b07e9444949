"""What was judged of what was asked, what the rest lacks, and what else narrows a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import ExitCode
from attncheck.reports.answer import exit_code_of, make_summary
from attncheck.reports.coverage import coverage, narrowings, unjudged
from attncheck.reports.frames import Frames
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]

UNSUPPORTED: dict[str, Any] = {"stage": "", "verdict": "unsupported"}


def lacking(lacks: str | None, message: str = "") -> dict[str, Any]:
    return UNSUPPORTED | {"lacks": lacks, "message": message}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{}], "judged 1 of 1 case"),
        ([{}, lacking("mask")], "judged 1 of 2 cases; 1 unsupported: 1 needs mask"),
        (
            [lacking("mask"), {}, lacking("bias"), lacking("mask"), lacking("mask, bias")],
            "judged 1 of 5 cases; 4 unsupported: 2 need mask, 1 needs bias, 1 needs mask and bias",
        ),
        # Reasons of somebody's own words that differ in numbers alone are one.
        (
            [lacking(None, f"NotImplementedError: head size {size} is not a multiple of 8") for size in (3, 12, 5)],
            'judged 0 of 3 cases; 3 unsupported: 3 say "head size N is not a multiple of 8"',
        ),
        (
            [lacking(None, "NotImplementedError: no 2 heads"), lacking(None, "NotImplementedError: no windows")],
            'judged 0 of 2 cases; 2 unsupported: 1 says "no 2 heads", 1 says "no windows"',
        ),
        ([lacking(None, "NotImplementedError")], 'judged 0 of 1 case; 1 unsupported: 1 says "no reason"'),
        (
            [lacking(name) for name in ("a", "b", "c", "d", "e", "f")],
            "judged 0 of 6 cases; 6 unsupported: 1 needs a, 1 needs b, 1 needs c, 1 needs d, 2 for other reasons",
        ),
        ([{}, {"verdict": "unverified"}], "judged 1 of 2 cases; 1 unverified: no exact answer"),
        (
            [{"verdict": "crash", "stage": ""}, {"verdict": "error", "stage": "", "xfail": True}],
            "judged 0 of 2 cases; 2 could not be run",
        ),
        # An entry that no longer happens judges nothing, and what is known to be wrong was judged.
        ([lacking("mask"), {"verdict": "numeric", "xfail": True}], "judged 1 of 2 cases; 1 unsupported: 1 needs mask"),
    ],
)
def test_what_was_judged_and_what_the_rest_lacks(
    rows: list[dict[str, Any]], words: str, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    made = [make_row(**({"case": f"file/{number}"} | fields)) for number, fields in enumerate(rows)]
    (found,) = coverage(frames_of(write_run(made)))
    assert found.words == words


def test_a_case_counts_once_for_all_dtypes_and_a_dtype_is_the_least_of_reasons(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(case="file/a"),
        make_row(case="file/a", dtype="bfloat16", **lacking("bfloat16", "declares no bfloat16")),
        make_row(case="file/b", **lacking("mask")),
        make_row(case="file/b", dtype="bfloat16", **lacking("bfloat16")),
        make_row(case="file/c", dtype="bfloat16", **lacking("bfloat16")),
        make_row(case="file/b", verdict="xpass", stage="", message="an entry"),
    ]
    (found,) = coverage(frames_of(write_run(rows)))
    assert found.words == "judged 1 of 3 cases; 2 unsupported: 1 needs bfloat16, 1 needs mask"


def test_cases_of_which_there_is_no_result_are_not_run(
    make_row: MakeRow, make_case_record: Callable[..., dict[str, Any]], write_run: WriteRun, frames_of: FramesOf
) -> None:
    cases = [make_case_record(f"file/{name}") for name in "abc"]
    frames = frames_of(write_run([make_row(case="file/a")], cases=cases, summary=False))
    assert make_summary(frames).judged == "Judged 1 of 3 cases; 2 not run"


def test_the_line_of_several_names_those_that_were_not_judged_in_all(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    def frames(partial: int) -> Frames:
        rows = [make_row(case=f"file/{case}", implementation="numpy.eager") for case in "ab"]
        for number in range(partial):
            rows.append(make_row(case="file/a", implementation=f"mine.k{number}"))
            rows.append(make_row(case="file/b", implementation=f"mine.k{number}", **lacking("mask")))
        return frames_of(write_run(rows, name=f"run{partial}"))

    assert make_summary(frames(0)).judged == "Judged 2 of 2 cases"
    one = "mine.k0: judged 1 of 2 cases; 1 unsupported: 1 needs mask"
    assert make_summary(frames(1)).judged == f"{one}. The other: judged 2 of 2 cases"
    many = make_summary(frames(6))
    assert many.judged == (
        "Not judged in all cases: mine.k0 1 of 2, mine.k1 1 of 2, mine.k2 1 of 2, mine.k3 1 of 2 and 2 more. "
        "The other: judged 2 of 2 cases"
    )
    assert f"{one}." in many.sentences


def test_too_little_ends_a_comparison_with_3_and_is_told(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(), make_row(implementation="mine.kernel", **lacking("mask"))]
    assert unjudged(frames_of(write_run(rows))) == ()
    asked = {"by_name": ["mine.kernel"], "cases": ["masking"], "tags": ["causal", "window"]}
    frames = frames_of(write_run(rows, asked=asked))
    line = "mine.kernel was asked for by name and not judged in the only case"
    assert unjudged(frames) == (line,)
    assert exit_code_of(frames) is ExitCode.NOT_RUN
    assert make_summary(frames).sentences[0] == f"Too little was judged: {line}."
    least = frames_of(write_run(rows, asked={"min_judged": "50%"}))
    assert unjudged(least) == ("mine.kernel was judged in 0 of 1 cases; at least 50% have to be (min_judged)",)


def test_what_narrows_a_run_is_named(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    rows = [make_row(), make_row(implementation="mine.kernel")]
    rows += [
        make_row(dtype=dtype, implementation=name, **lacking(dtype))
        for dtype in ("bfloat16", "float16")
        for name in ("numpy.eager", "mine.kernel")
    ]
    directory = write_run(
        rows,
        asked={"cases": ["attention", "masking"], "tags": ["causal"], "dtypes": ["float64", "bfloat16", "float16"]},
        sources={"mine.kernel": {"file": "mine.py", "line": 3}},
    )
    assert narrowings(frames_of(directory)) == (
        "bfloat16 and float16 not tested on numpy.eager, which does not declare them.",
        "bfloat16 and float16 not tested on mine.kernel: declare `dtypes`.",
        "Only what was picked ran: the cases attention and masking; the tag causal; "
        "the dtypes float64, bfloat16 and float16.",
    )
    assert narrowings(frames_of(write_run([make_row()], name="whole"))) == ()


def test_evaluations_that_others_cover_are_counted_also_where_their_case_was_judged(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    left_out = {"verdict": "unsupported", "stage": "", "lacks": "--all-cases", "message": "left out"}
    rows = [
        make_row(implementation="torch.compile"),
        *(make_row(implementation="torch.compile", dtype=dtype, **left_out) for dtype in ("float32", "float16")),
    ]
    assert narrowings(frames_of(write_run(rows))) == (
        "torch.compile was not asked for 2 evaluations, which others cover; --all-cases asks for all.",
    )


def test_the_first_line_says_who_was_judged_in_the_standard_cases_alone(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    left_out = {"verdict": "unsupported", "stage": "", "lacks": "--all-cases", "message": "left out"}
    names = ("numpy.eager", "torch.eager", "jax.jit")
    rows = [
        make_row(case=f"file/{case}", implementation=name, **(left_out if name == "jax.jit" and case == "c" else {}))
        for name in names
        for case in "abc"
    ]
    frames = frames_of(write_run(rows))
    assert make_summary(frames).judged == "numpy, torch: 3 of 3 cases; jax: the 2 standard cases, which cover the rest"
    assert [each.is_whole for each in coverage(frames)] == [True] * 3
    alone = frames_of(write_run(rows[-3:], name="alone"))
    assert make_summary(alone).judged == "Judged 2 of 2 standard cases, which cover the rest"
    lacking_too = [make_row(case="file/d", implementation=name, **lacking("mask")) for name in names[2:]]
    lacking_too += [make_row(case="file/d", implementation=name) for name in names[:2]]
    assert make_summary(frames_of(write_run([*rows, *lacking_too], name="part"))).judged == (
        "jax: judged 2 of 3 standard cases, which cover the rest; 1 unsupported: 1 needs mask. "
        "The others: judged 4 of 4 cases"
    )
