"""The words with which every report begins, the verdict of each case, and what is known to be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from attncheck.errors import ExitCode
from attncheck.reports.cells import Cell, State, cell_table, worst_cell
from attncheck.reports.expected_failures import (
    ExpectedFailureGroup,
    address_of,
    count_following,
    empty_rows,
    expected_failure_groups,
)
from attncheck.reports.frames import Column, Frames
from attncheck.reports.markdown.report import link
from attncheck.reports.printed_numbers import misprints
from attncheck.reports.summary import exit_code_of, make_summary, verdict_table, what_is_wrong

TWO = {"numpy.eager": "1.0", "torch.eager": "1.0"}


def pair(**fields: Any) -> dict[str, Any]:
    return {"comparison": "pair", "other": "torch.eager", "ratio": 0.0, "difference": 0.0, "index": "0,0"} | fields


ALONE = "numpy agrees with the exact answer"
NO_TORCH = "torch was judged in no case"
TORCH: dict[str, Any] = {"implementation": "torch.eager"}
BOTH: list[dict[str, Any]] = [{}, TORCH]
UNSUPPORTED = {"verdict": "unsupported", "stage": ""}
ONLY = "in the only case that it was judged in"


NUMERIC, AT_NUMERIC = {"verdict": "numeric"}, {"verdict": "numeric"} | TORCH
UNVERIFIED, AGREE = {"verdict": "unverified"}, "numpy and torch agree"
ERROR, CRASH = {"verdict": "error", "stage": ""}, {"verdict": "crash", "stage": "", "case": "file/two"}
INCOMPLETE = f"{AGREE}; not everything could be run"
NO_JAX, BAD = {"jax": "not installed"}, {"faults": ["x.yaml:1: this was left out: bad"]}
WRONG = f"numpy is wrong {ONLY}; torch agrees with the exact answer"
COMPARED = f"{AGREE} with the exact answer, and no two of them could be compared"


def printed(verdict: str, **fields: Any) -> dict[str, Any]:
    return {"comparison": "printed", "verdict": verdict} | fields


ANSWERS: list[tuple[list[dict[str, Any]], dict[str, Any], str, int]] = [
    ([*BOTH, pair()], {}, AGREE, ExitCode.AGREE),
    ([{}, pair(), UNSUPPORTED | TORCH], {}, f"{ALONE}; {NO_TORCH}", ExitCode.AGREE),
    ([*BOTH, pair(), printed("misprint", xfail=True)], {}, AGREE, ExitCode.AGREE),
    ([*BOTH, pair()], {"left_out": NO_JAX}, AGREE, ExitCode.AGREE),
    # Who is wrong is named, and who is not.
    ([{}, pair(), AT_NUMERIC], {}, f"torch is wrong {ONLY}; {ALONE}", ExitCode.DISAGREE),
    ([*BOTH, pair(verdict="numeric")], {}, f"{AGREE}; numpy.eager and torch.eager differ in 1 case", ExitCode.DISAGREE),
    # What is printed or recorded wrongly is nobody's error.
    ([*BOTH, pair(), printed("misprint")], {}, f"{AGREE}. 1 of 1 printed number does not hold", ExitCode.DISAGREE),
    ([*BOTH, pair(), printed("xpass")], {}, f"{AGREE}. 1 record no longer holds", ExitCode.DISAGREE),
    ([*BOTH, pair(), ERROR | {"verdict": "xpass"}], {}, f"{AGREE}. 1 record no longer holds", ExitCode.DISAGREE),
    ([*BOTH, pair(), printed("unverified")], {}, f"{AGREE}. 1 of 1 printed number is unverified", ExitCode.AGREE),
    ([TORCH, NUMERIC, CRASH], {}, f"{WRONG}; in 1 case, numpy could not be run", ExitCode.DISAGREE),
    ([{}, ERROR | TORCH], {}, f"{ALONE}; {NO_TORCH}; in 1 case, torch could not be run", ExitCode.NOT_RUN),
    ([*BOTH, pair()], {"summary": False}, INCOMPLETE, ExitCode.NOT_RUN),
    ([*BOTH, pair()], {"missing": NO_JAX}, INCOMPLETE, ExitCode.NOT_RUN),
    ([*BOTH, pair()], BAD, INCOMPLETE, ExitCode.BAD_INPUT),
    ([TORCH, pair(), NUMERIC], BAD, f"{WRONG}; not everything could be run", ExitCode.BAD_INPUT),
    ([*BOTH, pair()], {"label": "x: bad case: y", "left_out": NO_JAX}, AGREE, ExitCode.AGREE),
    # Nothing is green that was not judged.
    ([UNVERIFIED], {"versions": {"numpy.eager": "1.0"}}, "Nothing was judged", ExitCode.NOT_RUN),
    ([UNVERIFIED, UNVERIFIED | TORCH], {}, "Nothing was judged", ExitCode.NOT_RUN),
    ([UNSUPPORTED, UNSUPPORTED | TORCH], {}, "Nothing was judged", ExitCode.NOT_RUN),
    ([*BOTH, pair(verdict="unverified", ratio=None)], {}, COMPARED, ExitCode.AGREE),
    ([*BOTH, pair(), pair(verdict="unverified", stage="own")], {}, AGREE, ExitCode.AGREE),
    ([ERROR], {}, "Nothing could be run", ExitCode.NOT_RUN),
    ([], {"versions": {}, "missing": NO_JAX}, "Nothing was run", ExitCode.NOT_RUN),
    ([], {"versions": {}}, "Nothing was run", ExitCode.AGREE),
]


def test_the_answer_and_the_exit_code(hand: Any) -> None:
    for number, (rows, run, word, code) in enumerate(ANSWERS):
        made = [hand.row(**fields) for fields in rows]
        frames = hand.frames(made, **({"versions": TWO, "name": f"run {number}"} | run))
        assert (make_summary(frames).word, exit_code_of(frames)) == (word, code), (rows, run)


def test_the_sentences_count_what_the_answer_rests_on(hand: Any) -> None:
    rows = [
        hand.row(case=case, dtype=dtype, implementation=name)
        for case in ("file/one", "file/two")
        for dtype in ("float32", "float64")
        for name in TWO
    ]
    numbers: dict[str, Any] = {"comparison": "printed", "reference_text": "0.1"}
    rows += [
        hand.row(**pair(verdict=verdict), stage=stage)
        for stage, verdict in [("scores", "numeric"), ("weights", "agree")]
    ]
    rows += [hand.row(**numbers, stage="output", index=f"0,{place}") for place in range(3)]
    rows += [hand.row(**numbers, stage="output", index="0,2", verdict="numeric", dtype="float32")]
    rows += [hand.row(**numbers, stage="weights", index="0,0", verdict="misprint", xfail=True)]
    rows += [hand.row(comparison="exact", stage="scores", index=f"0,{place}") for place in (0, 1)]
    document = {"kind": "document", "title": "A document", "notes": []}
    given = {"of": "weights", "basis": "printed", "transpose": False, "shape": [1, 1]}
    expected = [{"name": "weights", "erratum": "Of another call.", **given}]
    cases = [hand.case(source=document, expected=expected), hand.case("file/two")]
    answer = make_summary(hand.frames(rows, cases=cases))
    assert answer.sentences == (
        "2 cases on 2 implementations in float64 and float32: 8 evaluations, all of them judged.",
        "8 stages were compared with the exact answer; all are within their error bounds.",
        "Of 2 comparisons of two implementations at one stage, 1 disagrees.",
        "Of 3 printed numbers 2 hold and 1 is missed by an implementation. "
        "1 printed number comes from a different call than the document shows; it is listed as an erratum. "
        "2 further numbers are computed by the documents and not printed; "
        "all are within their error bounds.",
    )


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"tier": "within"}], "1 stage was compared with the exact answer; it is within its error bound."),
        ([{"tier": "proven", "verdict": "numeric"}, {}], "2 stages were compared with the exact answer; 1 fails."),
        # A form or NaN that is wrong is compared with the answer, too, though it has no tier.
        ([{"verdict": "shape"}, {"verdict": "nonfinite"}], "2 stages were compared with the exact answer; 2 fail."),
        (
            [
                {"tier": "warning"},
                {"tier": "within", "introduced_tier": "warning"},
                {"tier": "statistical", "verdict": "numeric"},
                {},
            ],
            "4 stages were compared with the exact answer; 1 fails. "
            "2 are noisier than known good implementations, a warning.",
        ),
        (
            [{"tier": "warning", "introduced_tier": "warning"}],
            "1 stage was compared with the exact answer; it is within its error bound. "
            "1 is noisier than known good implementations, a warning.",
        ),
        (
            [{"verdict": "unverified"}, {"verdict": "crash", "stage": ""}],
            "No stage was compared with the exact answer.",
        ),
        ([], "No stage was compared with the exact answer."),
    ],
)
def test_stages_are_counted_by_what_the_exact_answer_says(rows: list[dict[str, Any]], sentence: str, hand: Any) -> None:
    stages = [hand.row(**({"stage": f"own{number}"} | fields)) for number, fields in enumerate(rows)]
    assert sentence in make_summary(hand.frames(stages, versions=TWO)).sentences


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        (["agree", "agree"], "Of 2 comparisons of two implementations at one stage, none disagrees."),
        (
            ["agree", "unverified", "numeric"],
            "Of 2 comparisons of two implementations at one stage, 1 disagrees. "
            "In 1 more the values differ and were not compared: no exact answer bounds them.",
        ),
        (
            ["unverified", "unverified"],
            "Of 0 comparisons of two implementations at one stage, none disagrees. "
            "In 2 more the values differ and were not compared: no exact answer bounds them.",
        ),
    ],
)
def test_pairs_whose_values_have_no_bound_are_counted_apart(verdicts: list[str], sentence: str, hand: Any) -> None:
    rows = [hand.row(**pair(verdict=verdict, stage=f"own{number}")) for number, verdict in enumerate(verdicts)]
    assert make_summary(hand.frames([hand.row(), *rows])).sentences[2] == sentence


def test_unprinted_numbers_that_fail_are_counted(hand: Any) -> None:
    rows = [hand.row(), hand.row(comparison="printed", index="0", reference_text="1.")]
    rows += [hand.row(comparison="exact", index=f"{n}", verdict=v) for n, v in enumerate(("agree", "numeric"))]
    cases = [hand.case(source={"kind": "document", "title": "A document", "notes": []})]
    assert make_summary(hand.frames(rows, cases=cases)).sentences[-1] == (
        "The documents print 1 number: every one holds. 2 further numbers are computed by the documents and not "
        "printed; 1 of 2 comparisons of them fail."
    )


def test_numbers_of_cases_that_are_no_documents_are_not_counted_as_printed(hand: Any) -> None:
    frames = hand.frames([hand.row(comparison="printed", index="0", reference_text="0.1")])
    assert make_summary(frames).sentences[-1] == "The cases give 1 number to compare with: every one holds."


KNOWN = [{"verdict": "semantic", "xfail": True}, {"verdict": "error", "xfail": True, "comparison": "known"}]
ADDED_UP = [{"verdict": "numeric", "begins_at": "output", "stage": stage} for stage in ("weights", "output")]
LATER = {"verdict": "numeric", "stage": "output", "begins_at": "scores"}
EXACT = {"verdict": "numeric", "stage": "scores", "comparison": "exact"}
CELLS: list[tuple[list[dict[str, Any]], str, Cell]] = [
    ([{}], "agree", Cell(State.AGREE, "agree", "")),
    ([UNVERIFIED], "unverified", Cell(State.UNVERIFIED, "unverified", "")),
    ([{}, UNVERIFIED | {"stage": "scores"}], "agree", Cell(State.AGREE, "agree", "")),
    ([UNSUPPORTED], "unsupported", Cell(State.UNSUPPORTED, "unsupported", "")),
    ([{}, printed("misprint", xfail=True)], "agree (erratum)", Cell(State.ERRATUM, "agree", "")),
    (KNOWN, "other convention", Cell(State.XFAIL, "semantic", "")),
    ([NUMERIC], "**numeric** at weights", Cell(State.FAILING, "numeric", "weights")),
    (
        [NUMERIC, {"verdict": "nonfinite", "stage": "output"}],
        "**nonfinite** at weights",
        Cell(State.FAILING, "nonfinite", "weights"),
    ),
    # Errors that add up fail at the weights, and the one step that is wrong comes after them.
    (ADDED_UP, "**numeric** at output", Cell(State.FAILING, "numeric", "output")),
    ([LATER, {"verdict": "shape"}], "**shape** at scores", Cell(State.FAILING, "shape", "scores")),
    (
        [{}, LATER | {"comparison": "exact", "stage": "scores"}],
        "**numeric** at scores",
        Cell(State.FAILING, "numeric", "scores"),
    ),
    (
        [{}, {"comparison": "known", "verdict": "numeric", "stage": "row_maxima"}],
        "**numeric** at row_maxima",
        Cell(State.FAILING, "numeric", "row_maxima"),
    ),
    ([ERROR], "**error**", Cell(State.FAILING, "error", "")),
    (
        [{"verdict": "numeric", "xfail": True}, {"verdict": "timeout", "stage": ""}],
        "**timeout**",
        Cell(State.FAILING, "timeout", ""),
    ),
]


def test_the_verdict_of_a_case_on_an_implementation_is_the_worst_of_its_rows(hand: Any) -> None:
    for number, (rows, text, cell) in enumerate(CELLS):
        made = [hand.row(**fields) for fields in rows]
        frames = hand.frames(made, versions={"numpy.eager": "1.0"}, name=f"run {number}")
        column = Column("local", "numpy.eager", "1.0")
        assert verdict_table(frames) == {"file/one": {column: text}}, rows
        assert cell_table(frames) == {"file/one": {column: {"float64": cell}}}, rows
        assert cell.text == text.replace("*", ""), rows
    dtypes = {"case": "file/two", "dtype": "float32"}
    rows = [ERROR, {"dtype": "float32"}, {"case": "file/two"}, UNVERIFIED | dtypes, TORCH | {"case": "file/three"}]
    frames = hand.frames([hand.row(**fields) for fields in rows], versions={"numpy.eager": "1.0"})
    assert [list(cells.values()) for cells in verdict_table(frames).values()] == [
        ["float64: **error**; float32: agree"],
        ["not run"],
        ["float64: agree; float32: unverified"],
    ]


def test_what_is_wrong_is_told_once_per_case_by_its_first_failing_stage(hand: Any) -> None:
    rows = [
        hand.row(stage="output", verdict="nonfinite", message="late"),
        hand.row(stage="raw_scores"),
        hand.row(stage="scores", verdict="numeric", message="early"),
        hand.row(stage="output", comparison="known", verdict="numeric", index="0,0", message="number"),
        hand.row(stage="scores", dtype="float32", verdict="shape", message="other dtype"),
        hand.row(stage="", implementation="torch.eager", verdict="crash", message="died"),
        hand.row(stage="weights", verdict="misprint", xfail=True, comparison="printed"),
        hand.row(**pair(verdict="numeric"), stage="scores"),
    ]
    found = what_is_wrong(hand.frames(rows))
    assert found[["dtype", "implementation", "stage", "verdict", "message", "rows"]].to_numpy().tolist() == [
        ["float32", "numpy.eager", "scores", "shape", "other dtype", 1],
        ["float64", "numpy.eager", "scores", "numeric", "early", 3],
        ["float64", "torch.eager", "", "crash", "died", 1],
    ]


def test_an_error_that_is_handed_on_is_told_where_it_begins_and_blames_nobody_else(hand: Any) -> None:
    bad: dict[str, Any] = {"implementation": "torch.eager", "verdict": "numeric", "begins_at": "output"}
    rows = [hand.row(stage=stage, message=stage, **bad) for stage in ("weights", "output")]
    # The other of each pair that differs is right at every stage.
    rows += [hand.row(stage=stage) for stage in ("weights", "output")]
    rows += [hand.row(**pair(verdict="numeric"), stage=stage) for stage in ("weights", "output")]
    found = what_is_wrong(hand.frames(rows))
    assert found[["implementation", "stage", "message", "rows"]].to_numpy().tolist() == [
        ["torch.eager", "output", "output", 2]
    ]


def test_a_pair_that_differs_is_told_where_no_stage_is_blamed(hand: Any) -> None:
    # Across environments, where the stage was judged in another run.
    rows = [hand.row(), hand.row(**pair(verdict="numeric", difference=0.5, index="0,1"))]
    found = what_is_wrong(hand.frames(rows))
    assert found["message"].tolist() == ["differs from torch.eager by 0.5 at [0, 1]"]
    assert found["stage"].tolist() == ["weights"]


def test_a_pair_whose_forms_differ_is_told_without_a_number(hand: Any) -> None:
    apart = pair(verdict="shape", difference=None, ratio=None, index=None, message="shape 3 against 4")
    (message,) = what_is_wrong(hand.frames([hand.row(), hand.row(**apart)]))["message"]
    assert message == "differs from torch.eager: shape 3 against 4"


def test_nothing_is_wrong_where_all_agree(document_frames: Frames) -> None:
    assert what_is_wrong(document_frames).empty
    assert "rows" in what_is_wrong(document_frames).columns
    answer = make_summary(document_frames)
    count = len(document_frames.cases)
    assert answer.first_line == f"first and second agree. Judged {count} of {count} cases on each."
    assert answer.sentences[1].endswith(" compared with the exact answer; all are within their error bounds.")
    assert ": every one holds." in answer.sentences[3]
    assert answer.sentences[3].endswith(" not printed; all are within their error bounds.")
    assert exit_code_of(document_frames) == ExitCode.AGREE
    words = {cell for cells in verdict_table(document_frames).values() for cell in cells.values()}
    assert words == {"agree", "agree (erratum)"}


def test_the_worst_of_several_dtypes_is_the_most_severe() -> None:
    known, failing = Cell(State.XFAIL, "crash", ""), Cell(State.FAILING, "numeric", "scores")
    assert worst_cell({"float64": known, "float32": failing}) == failing


IN_FLOAT32 = "rounding in float32 would explain it: say `computed_in: float32`"


def message_of(hints: list[str | None], hand: Any) -> str:
    printed = {"comparison": "printed", "verdict": "misprint", "reference_text": "0.25", "exact": 0.5}
    rows = [hand.row(**printed, index=f"0,{place}", hint=hint) for place, hint in enumerate(hints)]
    frames: Frames = hand.frames([hand.row(), *rows])
    (found,) = misprints(frames)
    return found.message


def test_what_would_explain_all_misprints_of_a_matrix_is_said_once(hand: Any) -> None:
    message = message_of([IN_FLOAT32] * 5, hand)
    assert message.startswith("weights[0, 0] is printed as 0.25, should be 0.5. weights[0, 1]")
    assert message.endswith(
        ". And 2 more numbers of it. Rounding in float32 would explain it: say `computed_in: float32`"
    )
    assert message.count("would explain") == 1


def test_what_would_explain_some_misprints_says_how_many(hand: Any) -> None:
    message = message_of([IN_FLOAT32, None, IN_FLOAT32], hand)
    assert message.endswith(f". For 2 of these 3 numbers: {IN_FLOAT32}")
    assert "explain" not in message_of([None, None], hand)


def test_only_issues_and_https_are_links() -> None:
    assert address_of("pytorch/pytorch#108108") == "https://github.com/pytorch/pytorch/issues/108108"
    assert address_of("https://example.org/a?b#c") == "https://example.org/a?b#c"
    for thread in ("http://example.org", "javascript:alert(1)", "https:", "https://[", "https://example.org/a b"):
        assert address_of(thread) == "", thread
    assert address_of("a discussion by letter") == address_of("") == ""


def test_in_markdown_what_is_no_address_is_text() -> None:
    assert link("javascript:alert(1)") == "javascript:alert(1)"
    assert link("a/b#1") == r"[a/b\#1](https://github.com/a/b/issues/1)"
    assert link("https://example.org") == "<https://example.org>"


def test_expected_failures_are_grouped_by_reason(hand: Any) -> None:
    known = {"xfail": True, "verdict": "numeric", "reason": "why", "thread": "a/b#1"}
    rows = [
        hand.row(case="file/two", **known, begins_at="scores"),
        hand.row(case="file/one", **known, dtype="float32"),
        hand.row(case="file/one", xfail=True, verdict="numeric", reason="another"),
        hand.row(comparison="pair", other="x", xfail=True, verdict="numeric"),
        hand.row(comparison="printed", xfail=True, verdict="misprint"),
    ]
    frames = hand.frames(rows)
    first, second = expected_failure_groups(frames)
    assert (first.reason, first.cases) == ("another", ("file/one",))
    assert second == ExpectedFailureGroup(
        "local", "numpy.eager", "numeric", "why", "a/b#1", ("file/one", "file/two"), ("float64", "float32"), "scores"
    )
    assert count_following(frames) == 1
    assert empty_rows(frames) is None
