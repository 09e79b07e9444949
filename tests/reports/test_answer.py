"""The words with which every report begins, and the verdict of each case on each implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import ExitCode
from attncheck.reports.answer import exit_code_of, make_summary, verdict_table, what_is_wrong
from attncheck.reports.frames import Column, Frames
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]

TWO = {"numpy.eager": "1.0", "torch.eager": "1.0"}


def pair(**fields: Any) -> dict[str, Any]:
    return {"comparison": "pair", "other": "torch.eager", "ratio": 0.0, "difference": 0.0, "index": "0,0"} | fields


ALONE = "numpy agrees with the exact answer"
NO_TORCH = "torch was judged in no case"
TORCH: dict[str, Any] = {"implementation": "torch.eager"}
BOTH: list[dict[str, Any]] = [{}, TORCH]
UNSUPPORTED = {"verdict": "unsupported", "stage": ""}
ONLY = "in the only case that it was judged in"


@pytest.mark.parametrize(
    ("rows", "run", "word", "code"),
    [
        ([*BOTH, pair()], {}, "numpy and torch agree", ExitCode.AGREE),
        ([{}, pair(), UNSUPPORTED | TORCH], {}, f"{ALONE}; {NO_TORCH}", 0),
        (
            [*BOTH, pair(), {"verdict": "misprint", "xfail": True, "comparison": "printed"}],
            {},
            "numpy and torch agree",
            0,
        ),
        ([*BOTH, pair()], {"left_out": {"jax": "not installed"}}, "numpy and torch agree", ExitCode.AGREE),
        # Who is wrong is named, and who is not.
        ([{}, pair(), {"verdict": "numeric"} | TORCH], {}, f"torch is wrong {ONLY}; {ALONE}", ExitCode.DISAGREE),
        (
            [*BOTH, pair(verdict="numeric")],
            {},
            "numpy and torch agree; numpy.eager and torch.eager differ in 1 case",
            1,
        ),
        # What is printed or recorded wrongly is nobody's error.
        (
            [*BOTH, pair(), {"verdict": "misprint", "comparison": "printed"}],
            {},
            "numpy and torch agree. 1 of 1 printed number does not hold",
            ExitCode.DISAGREE,
        ),
        (
            [*BOTH, pair(), {"verdict": "xpass", "comparison": "printed"}],
            {},
            "numpy and torch agree. 1 record no longer holds",
            ExitCode.DISAGREE,
        ),
        (
            [*BOTH, pair(), {"verdict": "xpass", "stage": "", "message": "an entry"}],
            {},
            "numpy and torch agree. 1 record no longer holds",
            ExitCode.DISAGREE,
        ),
        (
            [*BOTH, pair(), {"verdict": "unverified", "comparison": "printed"}],
            {},
            "numpy and torch agree. 1 of 1 printed number is unverified",
            ExitCode.AGREE,
        ),
        (
            [TORCH, {"verdict": "numeric"}, {"verdict": "crash", "stage": "", "case": "file/two"}],
            {},
            f"numpy is wrong {ONLY}; torch agrees with the exact answer; in 1 case, numpy could not be run",
            ExitCode.DISAGREE,
        ),
        (
            [{}, {"verdict": "error", "stage": "", "implementation": "torch.eager"}],
            {},
            f"{ALONE}; {NO_TORCH}; in 1 case, torch could not be run",
            ExitCode.NOT_RUN,
        ),
        ([*BOTH, pair()], {"summary": False}, "numpy and torch agree; not everything could be run", ExitCode.NOT_RUN),
        (
            [*BOTH, pair()],
            {"missing": {"jax": "not installed"}},
            "numpy and torch agree; not everything could be run",
            ExitCode.NOT_RUN,
        ),
        (
            [*BOTH, pair()],
            {"faults": ["x.yaml:1: this was left out: bad"]},
            "numpy and torch agree; not everything could be run",
            ExitCode.BAD_INPUT,
        ),
        (
            [TORCH, pair(), {"verdict": "numeric"}],
            {"faults": ["x.yaml:1: bad"]},
            f"numpy is wrong {ONLY}; torch agrees with the exact answer; not everything could be run",
            ExitCode.BAD_INPUT,
        ),
        (
            [*BOTH, pair()],
            {"label": "x: bad case: y", "left_out": {"jax": "not installed"}},
            "numpy and torch agree",
            0,
        ),
        # Nothing is green that was not judged.
        ([{"verdict": "unverified"}], {"versions": {"numpy.eager": "1.0"}}, "Nothing was judged", ExitCode.NOT_RUN),
        ([{"verdict": "unverified"}, {"verdict": "unverified"} | TORCH], {}, "Nothing was judged", ExitCode.NOT_RUN),
        ([UNSUPPORTED, UNSUPPORTED | TORCH], {}, "Nothing was judged", ExitCode.NOT_RUN),
        (
            [*BOTH, pair(verdict="unverified", ratio=None)],
            {},
            "numpy and torch agree with the exact answer, and no two of them could be compared",
            ExitCode.AGREE,
        ),
        ([*BOTH, pair(), pair(verdict="unverified", stage="own")], {}, "numpy and torch agree", ExitCode.AGREE),
        ([{"verdict": "error", "stage": ""}], {}, "Nothing could be run", ExitCode.NOT_RUN),
        ([], {"versions": {}, "missing": {"jax": "not installed"}}, "Nothing was run", ExitCode.NOT_RUN),
        ([], {"versions": {}}, "Nothing was run", ExitCode.AGREE),
    ],
)
def test_the_answer_and_the_exit_code(
    rows: list[dict[str, Any]],
    run: dict[str, Any],
    word: str,
    code: ExitCode,
    make_row: MakeRow,
    write_run: WriteRun,
    frames_of: FramesOf,
) -> None:
    frames = frames_of(write_run([make_row(**fields) for fields in rows], **({"versions": TWO, "name": "run"} | run)))
    assert make_summary(frames).word == word
    assert exit_code_of(frames) == code


def test_the_sentences_count_what_the_answer_rests_on(
    make_row: MakeRow, make_case_record: Callable[..., dict[str, Any]], write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(case=case, dtype=dtype, implementation=name)
        for case in ("file/one", "file/two")
        for dtype in ("float32", "float64")
        for name in TWO
    ]
    numbers: dict[str, Any] = {"comparison": "printed", "reference_text": "0.1"}
    rows += [
        make_row(**pair(verdict=verdict), stage=stage)
        for stage, verdict in [("scores", "numeric"), ("weights", "agree")]
    ]
    rows += [make_row(**numbers, stage="output", index=f"0,{place}") for place in range(3)]
    rows += [make_row(**numbers, stage="output", index="0,2", verdict="numeric", dtype="float32")]
    rows += [make_row(**numbers, stage="weights", index="0,0", verdict="misprint", xfail=True)]
    rows += [make_row(comparison="exact", stage="scores", index=f"0,{place}") for place in (0, 1)]
    document = {"kind": "document", "title": "A document", "notes": []}
    given = {"of": "weights", "basis": "printed", "transpose": False, "shape": [1, 1]}
    expected = [{"name": "weights", "erratum": "Of another call.", **given}]
    cases = [make_case_record(source=document, expected=expected), make_case_record("file/two")]
    answer = make_summary(frames_of(write_run(rows, cases=cases)))
    assert answer.sentences == (
        "2 cases on 2 implementations in float64 and float32: 8 evaluations, all of them judged.",
        "Of 8 stages held against the exact answer, every one is within its error bound.",
        "Of 2 comparisons of two implementations at one stage, 1 disagrees.",
        "Of 3 printed numbers 2 hold and 1 is missed by an implementation. "
        "1 number printed for another call than the one shown is recorded as errata. "
        "2 further numbers are computed by the documents and not printed; held against the exact answer, "
        "every one is within its error bound.",
    )


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"tier": "within"}], "Of 1 stage held against the exact answer, every one is within its error bound."),
        ([{"tier": "proven", "verdict": "numeric"}, {}], "Of 2 stages held against the exact answer, 1 fails."),
        # A form or NaN that is wrong is held against the answer, too, though it has no tier.
        ([{"verdict": "shape"}, {"verdict": "nonfinite"}], "Of 2 stages held against the exact answer, 2 fail."),
        (
            [
                {"tier": "warning"},
                {"tier": "within", "introduced_tier": "warning"},
                {"tier": "statistical", "verdict": "numeric"},
                {},
            ],
            "Of 4 stages held against the exact answer, 1 fails. "
            "2 are noisier than known good implementations, a warning.",
        ),
        (
            [{"tier": "warning", "introduced_tier": "warning"}],
            "Of 1 stage held against the exact answer, every one is within its error bound. "
            "1 is noisier than known good implementations, a warning.",
        ),
        ([{"verdict": "unverified"}, {"verdict": "crash", "stage": ""}], "No stage was held against the exact answer."),
        ([], "No stage was held against the exact answer."),
    ],
)
def test_stages_are_counted_by_what_the_exact_answer_says(
    rows: list[dict[str, Any]], sentence: str, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    stages = [make_row(**({"stage": f"own{number}"} | fields)) for number, fields in enumerate(rows)]
    assert sentence in make_summary(frames_of(write_run(stages, versions=TWO))).sentences


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
def test_pairs_whose_values_have_no_bound_are_counted_apart(
    verdicts: list[str], sentence: str, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(**pair(verdict=verdict, stage=f"own{number}")) for number, verdict in enumerate(verdicts)]
    assert make_summary(frames_of(write_run([make_row(), *rows]))).sentences[2] == sentence


def test_unprinted_numbers_that_fail_are_counted(
    make_row: MakeRow, make_case_record: Callable[..., dict[str, Any]], write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(), make_row(comparison="printed", index="0", reference_text="1.")]
    rows += [make_row(comparison="exact", index=f"{n}", verdict=v) for n, v in enumerate(("agree", "numeric"))]
    cases = [make_case_record(source={"kind": "document", "title": "A document", "notes": []})]
    assert make_summary(frames_of(write_run(rows, cases=cases))).sentences[-1] == (
        "The documents print 1 number: every one holds. 2 further numbers are computed by the documents and not "
        "printed; held against the exact answer, 1 of 2 comparisons of them fail."
    )


def test_numbers_of_cases_that_are_no_documents_are_not_counted_as_printed(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    frames = frames_of(write_run([make_row(comparison="printed", index="0", reference_text="0.1")]))
    assert make_summary(frames).sentences[-1] == "No printed number of a document was compared."


@pytest.mark.parametrize(
    ("rows", "cell"),
    [
        ([{}], "agree"),
        ([{"verdict": "unverified"}], "unverified"),
        ([{}, {"verdict": "unverified", "stage": "scores"}], "agree"),
        ([{"verdict": "unsupported", "stage": ""}], "unsupported"),
        ([{}, {"verdict": "misprint", "xfail": True, "comparison": "printed"}], "agree (erratum)"),
        ([{"verdict": "numeric"}], "**numeric** at weights"),
        ([{"verdict": "numeric"}, {"verdict": "nonfinite", "stage": "output"}], "**nonfinite** at weights"),
        # Errors that add up fail at the weights, and the one step that is wrong comes after them.
        (
            [{"verdict": "numeric", "begins_at": "output", "stage": stage} for stage in ("weights", "output")],
            "**numeric** at output",
        ),
        ([{}, {"comparison": "exact", "verdict": "numeric", "stage": "scores"}], "**numeric** at scores"),
        ([{"verdict": "error", "stage": ""}], "**error**"),
        ([{"verdict": "error", "stage": ""}, {"dtype": "float32"}], "float64: **error**; float32: agree"),
        ([{"verdict": "agree"}, {"dtype": "float32", "verdict": "unverified"}], "float64: agree; float32: unverified"),
        ([{}, {"comparison": "known", "verdict": "numeric", "stage": "row_maxima"}], "**numeric** at row_maxima"),
        ([{"implementation": "torch.eager"}], "not run"),
    ],
)
def test_the_verdict_of_a_case_on_an_implementation(
    rows: list[dict[str, Any]], cell: str, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    frames = frames_of(write_run([make_row(**fields) for fields in rows], versions={"numpy.eager": "1.0"}))
    assert verdict_table(frames) == {"file/one": {Column("local", "numpy.eager", "1.0"): cell}}


def test_what_is_wrong_is_told_once_per_case_by_its_first_failing_stage(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(stage="output", verdict="nonfinite", message="late"),
        make_row(stage="raw_scores"),
        make_row(stage="scores", verdict="numeric", message="early"),
        make_row(stage="output", comparison="known", verdict="numeric", index="0,0", message="number"),
        make_row(stage="scores", dtype="float32", verdict="shape", message="other dtype"),
        make_row(stage="", implementation="torch.eager", verdict="crash", message="died"),
        make_row(stage="weights", verdict="misprint", xfail=True, comparison="printed"),
        make_row(**pair(verdict="numeric"), stage="scores"),
    ]
    found = what_is_wrong(frames_of(write_run(rows)))
    assert found[["dtype", "implementation", "stage", "verdict", "message", "rows"]].to_numpy().tolist() == [
        ["float32", "numpy.eager", "scores", "shape", "other dtype", 1],
        ["float64", "numpy.eager", "scores", "numeric", "early", 3],
        ["float64", "torch.eager", "", "crash", "died", 1],
    ]


def test_an_error_that_is_handed_on_is_told_where_it_begins_and_blames_nobody_else(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    bad: dict[str, Any] = {"implementation": "torch.eager", "verdict": "numeric", "begins_at": "output"}
    rows = [make_row(stage=stage, message=stage, **bad) for stage in ("weights", "output")]
    # The other of each pair that differs is right at every stage.
    rows += [make_row(stage=stage) for stage in ("weights", "output")]
    rows += [make_row(**pair(verdict="numeric"), stage=stage) for stage in ("weights", "output")]
    found = what_is_wrong(frames_of(write_run(rows)))
    assert found[["implementation", "stage", "message", "rows"]].to_numpy().tolist() == [
        ["torch.eager", "output", "output", 2]
    ]


def test_a_pair_that_differs_is_told_where_no_stage_is_blamed(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    # Across environments, where the stage was judged in another run.
    rows = [make_row(), make_row(**pair(verdict="numeric", difference=0.5, index="0,1"))]
    found = what_is_wrong(frames_of(write_run(rows)))
    assert found["message"].tolist() == ["differs from torch.eager by 0.5 at [0, 1]"]
    assert found["stage"].tolist() == ["weights"]


def test_a_pair_whose_forms_differ_is_told_without_a_number(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    apart = pair(verdict="shape", difference=None, ratio=None, index=None, message="shape 3 against 4")
    (message,) = what_is_wrong(frames_of(write_run([make_row(), make_row(**apart)])))["message"]
    assert message == "differs from torch.eager: shape 3 against 4"


def test_nothing_is_wrong_where_all_agree(document_frames: Frames) -> None:
    assert what_is_wrong(document_frames).empty
    assert "rows" in what_is_wrong(document_frames).columns
    answer = make_summary(document_frames)
    count = len(document_frames.cases)
    assert answer.first_line == f"first and second agree. Judged {count} of {count} cases on each."
    assert answer.sentences[1].endswith(" held against the exact answer, every one is within its error bound.")
    assert ": every one holds." in answer.sentences[3]
    assert answer.sentences[3].endswith("; held against the exact answer, every one is within its error bound.")
    assert exit_code_of(document_frames) == ExitCode.AGREE
    words = {cell for cells in verdict_table(document_frames).values() for cell in cells.values()}
    assert words == {"agree", "agree (erratum)"}
