"""The words with which every report begins: the answer, verdicts, what is wrong, and what failing cases share."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tables import tables_beside

from attncheck.common.errors import ExitCode
from attncheck.reading.case import make_case_record
from attncheck.reading.selection import select_cases
from attncheck.reports import ci
from attncheck.reports.cells import State, cell_table
from attncheck.reports.ci import Badge, annotation_lines, make_badge
from attncheck.reports.coverage import coverage_by_column
from attncheck.reports.defects import cause_texts, find_defects, first_commands, thread_address
from attncheck.reports.document_model import Mark
from attncheck.reports.failure_patterns import (
    candidate_patterns,
    confirmed_patterns,
    describe_case,
    record_axis_lengths,
    set_options_and_inputs,
    shape_text,
    simplicity_sort_key,
)
from attncheck.reports.failures import failures_by_case, find_failures
from attncheck.reports.frames import Column, Frames
from attncheck.reports.markdown import render_inline
from attncheck.reports.summary import comparison_exit_code, make_summary, verdict_table

Fields = dict[str, Any]
TABLES = tables_beside(__file__)


def pair(**fields: Any) -> Fields:
    return {"comparison": "pair", "other": "torch.eager", "ratio": 0.0, "difference": 0.0, "index": "0,0"} | fields


def printed(verdict: str, **fields: Any) -> Fields:
    return {"comparison": "printed", "verdict": verdict} | fields


TWO = {"numpy.eager": "1.0", "torch.eager": "1.0"}
TORCH: Fields = {"implementation": "torch.eager"}
UNVERIFIED = {"verdict": "unverified"}
UNSUPPORTED: Fields = {"verdict": "unsupported", "stage": ""}


def test_the_answer_and_the_exit_code(hand: Any) -> None:
    for rows, run, word, code in TABLES["answers"]:
        frames = hand.frames(rows, **{"versions": TWO} | run)
        assert (make_summary(frames).word, comparison_exit_code(frames)) == (word, ExitCode[code]), (rows, run)


def test_the_sentences_count_what_the_answer_rests_on(hand: Any) -> None:
    for rows, sentence in TABLES["sentences"]:
        stages = [{"stage": f"own{number}"} | fields for number, fields in enumerate(rows)]
        assert sentence in make_summary(hand.frames(stages, versions=TWO)).sentences
    numbers: Fields = {"comparison": "printed", "reference_text": "0.1"}
    rows = [{}]
    rows += [numbers | {"stage": "output", "index": f"0,{place}"} for place in range(3)]
    rows += [numbers | {"stage": "output", "index": "0,2", "verdict": "numeric", "dtype": "float32"}]
    rows += [numbers | {"index": "0,0", "verdict": "misprint", "xfail": True}]
    rows += [{"comparison": "exact", "stage": "scores", "index": f"0,{place}"} for place in (0, 1)]
    document = {"kind": "document", "title": "A document", "notes": []}
    given = {"of": "weights", "basis": "printed", "transpose": False, "shape": [1, 1]}
    case = hand.case(source=document, expected=[{"name": "weights", "erratum": "Of another call.", **given}])
    assert make_summary(hand.frames(rows, cases=[case])).sentences[-1] == (
        "Of 3 printed numbers 2 hold and 1 is missed by an implementation. "
        "1 printed number comes from a different call than the document shows; it is listed as an erratum. "
        "2 further numbers are computed by the documents and not printed; "
        "all are within their error bounds."
    )


def test_the_verdict_of_a_case_on_an_implementation_is_the_worst_of_its_rows(hand: Any) -> None:
    column = Column("local", "numpy.eager", "1.0")
    for rows, state, text in TABLES["cells"]:
        frames = hand.frames(rows, versions={"numpy.eager": "1.0"})
        assert render_inline(verdict_table(frames)["file/one"][column]).replace("\\", "") == text, rows
        cell = cell_table(frames)["file/one"][column]["float64"]
        assert (cell.state, cell.text) == (State[state], text.replace("*", "")), rows
    error, unverified = {"verdict": "error", "stage": ""}, {"case": "file/two", "dtype": "float32"} | UNVERIFIED
    rows = [error, {"dtype": "float32"}, {"case": "file/two"}, unverified, TORCH | {"case": "file/three"}]
    table = verdict_table(hand.frames(rows, versions={"numpy.eager": "1"}))
    assert [list(map(render_inline, cells.values())) for cells in table.values()] == [
        ["float64: **error**; float32: agree"],
        ["not run"],
        ["float64: agree; float32: unverified"],
    ]


def test_what_is_wrong_is_told_once_per_case_where_it_begins_and_blames_nobody_else(hand: Any) -> None:
    rows: list[Fields] = [
        {"stage": "output", "verdict": "nonfinite", "message": "late"},
        {"stage": "raw_scores"},
        {"stage": "scores", "verdict": "numeric", "message": "early"},
        {"stage": "output", "comparison": "known", "verdict": "numeric", "index": "0,0", "message": "number"},
        {"stage": "scores", "dtype": "float32", "verdict": "shape", "message": "other dtype"},
        TORCH | {"stage": "", "verdict": "crash", "message": "died"},
        printed("misprint", xfail=True),
        pair(verdict="numeric", stage="scores"),
    ]
    # An error that is handed on; the other of each pair that differs is right at every stage.
    bad: Fields = {"verdict": "numeric", "begins_at": "output", "case": "file/two"} | TORCH
    for stage in ("weights", "output"):
        rows += [bad | {"stage": stage, "message": stage}, {"case": "file/two", "stage": stage}]
        rows += [pair(case="file/two", verdict="numeric", stage=stage)]
    found = failures_by_case(hand.frames(rows))
    assert [(each.dtype, each.implementation, each.stage, each.verdict, each.message, each.rows) for each in found] == [
        ("float32", "numpy.eager", "scores", "shape", "other dtype", 1),
        ("float64", "numpy.eager", "scores", "numeric", "early", 3),
        ("float64", "torch.eager", "", "crash", "died", 1),
        ("float64", "torch.eager", "output", "numeric", "output", 2),
    ]
    # A pair that differs is told where no stage is blamed; across environments, the stage was judged in another run.
    apart = pair(verdict="shape", difference=None, ratio=None, index=None, message="shape 3 against 4")
    for row, message in (
        (pair(verdict="numeric", difference=0.5, index="0,1"), "differs from torch.eager by 0.5 at [0, 1]"),
        (apart, "differs from torch.eager: shape 3 against 4"),
    ):
        (only,) = failures_by_case(hand.frames([{}, row]))
        assert (only.message, only.stage) == (message, "weights")


def test_only_issues_and_https_are_links_and_the_rest_is_text() -> None:
    assert thread_address("pytorch/pytorch#108108") == "https://github.com/pytorch/pytorch/issues/108108"
    assert thread_address("https://example.org/a?b#c") == "https://example.org/a?b#c"
    for thread in ("http://example.org", "javascript:alert(1)", "https:", "https://[", "https://example.org/a b", ""):
        assert thread_address(thread) == "", thread
    threads = {
        "javascript:alert(1)": "javascript:alert(1)",
        "a/b#1": r"[a/b\#1](https://github.com/a/b/issues/1)",
        "https://example.org": "<https://example.org>",
    }
    assert {thread: render_inline(Mark(thread, "link", thread_address(thread))) for thread in threads} == threads


def lacking(lacks: str | None, message: str = "") -> Fields:
    return UNSUPPORTED | {"lacks": lacks, "message": message}


def test_what_was_judged_and_what_the_rest_lacks(hand: Any) -> None:
    for rows, words in TABLES["coverage"]:
        (found,) = coverage_by_column(
            hand.frames([{"case": f"file/{number}"} | fields for number, fields in enumerate(rows)])
        )
        assert found.summary_text == words
    cases = [hand.case(f"file/{name}") for name in "abc"]
    frames = hand.frames([{"case": "file/a"}], cases=cases, summary=False)
    assert make_summary(frames).judged == "Judged 1 of 3 cases; 2 not run"
    # Of several, those are named that were not judged in all.
    rows = [{"case": "file/a"}, {"case": "file/b"}, {"case": "file/a", "implementation": "mine.k"}]
    rows += [{"case": "file/b", "implementation": "mine.k"} | lacking("mask")]
    said = "mine.k: judged 1 of 2 cases; 1 unsupported: mask 1. The other: judged 2 of 2 cases"
    assert make_summary(hand.frames(rows)).judged == said


LEFT_OUT = UNSUPPORTED | {"lacks": "--all-cases", "message": "left out"}


def test_the_first_line_says_who_was_judged_in_the_standard_cases_alone(hand: Any) -> None:
    names = ("numpy.eager", "torch.eager", "jax.jit")
    rows = [
        {"case": f"file/{case}", "implementation": name} | (LEFT_OUT if name == "jax.jit" and case == "c" else {})
        for name in names
        for case in "abc"
    ]
    frames = hand.frames(rows)
    assert make_summary(frames).judged == "numpy, torch: 3 of 3 cases; jax: the 2 standard cases, which cover the rest"
    assert [found.judged_all_requested for found in coverage_by_column(frames)] == [True] * 3
    alone = make_summary(hand.frames(rows[-3:])).judged
    assert alone == "Judged 2 of 2 standard cases, which cover the rest"


def test_what_fails_is_listed_from_the_simplest_on_whose_shape_is_written_by_its_axes(hand: Any) -> None:
    records = [
        hand.case("file/a", inputs={"scores": [1, 1, 9, 9]}),
        hand.case("file/b", inputs={"scores": [1, 1, 1, 4]}, options={"empty_rows": "nan"}, tags=["axis"]),
        hand.case("file/c", inputs={"scores": [1, 1, 2, 2]}),
    ]
    rows = [{"case": f"file/{name}", "dtype": dtype, "verdict": "numeric"} for name in "abc" for dtype in DTYPES]
    frames = hand.frames(rows, cases=records)
    assert [(each.case, each.dtype) for each in find_failures(frames)] == [
        (f"file/{name}", dtype) for name in "cba" for dtype in reversed(DTYPES)
    ]
    assert first_commands(frames) == ["attncheck explain file/c numpy.eager --dtype float32"]
    shapes = {"query": [2, 4, 3, 8], "key": [2, 2, 5, 8], "value": [2, 2, 5, 6], "mask": [1, 1, 3, 5]}
    options = {"is_causal": True, "softcap": 2.0, "window": None}
    record = hand.case(operation="attention", inputs=shapes, options=options, tags=["bool-mask", "grouped-heads"])
    assert describe_case(record) == "B=2 H=4 Hkv=2 Lq=3 Lk=5 D=8 Dv=6; probes bool-mask, grouped-heads"
    # What need not be given counts behind the elements.
    assert set_options_and_inputs(record) == ["softcap", "is_causal", "mask"]
    assert simplicity_sort_key(record) == (2 * 4 * 3 * 8 + 2 * 2 * 5 * (8 + 6) + 15, 3)
    # Of a record that fits no operation nothing is said.
    odd: list[dict[str, Any]] = [
        {"operation": "dreaming"},
        {"operation": "attention", "inputs": {"query": [1, 2, 3]}, "options": {"heads": 0}},
        {"operation": "multi_head_attention", "inputs": {"query_weight": [2, 3]}, "options": {"heads": "many"}},
        {"operation": "scoring", "options": {"score": ["dot"]}},
    ]
    for fields in odd:
        assert describe_case(hand.case(**fields)) == "", fields
        assert simplicity_sort_key(hand.case(**fields))[0] >= 0


def test_a_badge_counts_cases_and_is_green_where_all_agree(hand: Any) -> None:
    for rows, message, colour in TABLES["badges"]:
        frames = hand.frames([{"case": f"file/{number}"} | row for number, row in enumerate(rows)], summary=bool(rows))
        assert make_badge(frames) == Badge(message, getattr(ci, colour))
    badge = Badge('1 of 2 <agree> & "so"', ci.RED)
    root = ElementTree.fromstring(ci.render_badge_svg(badge))
    assert root.get("aria-label") == f"attention: {badge.message}"
    assert [element.text for element in root.iter() if element.tag.endswith("text")] == ["attention", badge.message]


Record = Mapping[str, Any]
Judged = Callable[..., Frames]
DTYPES = ("float64", "float32")
REPORT = Path("report.md")
FAILED: dict[str, Any] = {"stage": "", "verdict": "error", "message": "TypeError: not | today"}


def test_a_diagnosis_is_one_defect_at_whatever_stage_and_in_whatever_dtype_it_was_made(hand: Any) -> None:
    corner = {"verdict": "semantic", "diagnosis": "aligned-bottom-right", "message": "bottom-right; meant top-left"}
    rows = [
        corner | {"case": "file/0"},
        {"case": "file/0", "dtype": "float32", "verdict": "numeric", "message": "off"},
        corner | {"case": "file/1", "stage": "output"},
        {"case": "file/2", "verdict": "nonfinite", "message": "NaN; taken by itself: the window is ignored"},
    ]
    frames = hand.frames(rows)
    found = find_defects(frames)
    assert [(defect.name, defect.cases, defect.dtypes, defect.text) for defect in found] == [
        ("aligned-bottom-right", ("file/0", "file/1"), DTYPES, "bottom-right; meant top-left"),
        ("nonfinite", ("file/2",), ("float64",), "NaN; taken by itself: the window is ignored"),
    ]
    nameless = "no cause found (1 case: file/2; taken by itself: the window is ignored)"
    meant = "if it means this, it is wrong in 1 case: bottom-right; meant top-left (2 cases)"
    assert cause_texts(found) == [meant, f"what is left: {nameless}"]
    first, second = annotation_lines(frames, REPORT)
    assert "title=aligned-bottom-right%3A numpy.eager in float64%2C float32::2 cases, the simplest " in first
    assert "title=nonfinite%3A numpy.eager in float64::" in second


@pytest.fixture(scope="module")
def corpus() -> list[dict[str, Any]]:
    """The records of the bundled cases of attention; every case has a shape in words."""
    selection = select_cases()
    records = [make_case_record(case, selection.tags) for case in selection.cases]
    assert [record["id"] for record in records if "Lq=" not in shape_text(record)] == []
    return [record for record in records if record["operation"] == "attention"]


WHOLE_CORPUS: list[Frames] = []
"""All cases in two dtypes, right everywhere: made once, for a run is written and read for it."""


@pytest.fixture
def judged(corpus: list[dict[str, Any]], hand: Any) -> Judged:
    """Return the frames of a run in which those cases fail of which a function says so; it is given a dtype, too."""
    if not WHOLE_CORPUS:
        rows = [{"case": case["id"], "dtype": dtype, "stage": "output"} for case in corpus for dtype in DTYPES]
        WHOLE_CORPUS.append(hand.frames(rows, cases=[dict(case) for case in corpus]))
    (base,) = WHOLE_CORPUS

    def make(
        cases: Sequence[Record],
        verdict_of: Callable[[Record, Mapping[str, int], str], object],
        dtypes: Sequence[str] = DTYPES,
    ) -> Frames:
        chosen = {case["id"]: case for case in cases}
        results = base.results[base.results["case"].isin(chosen) & base.results["dtype"].isin(dtypes)].copy()
        found = [
            verdict_of(chosen[case], record_axis_lengths(chosen[case]), dtype)
            for case, dtype in zip(results["case"], results["dtype"], strict=True)
        ]
        results["verdict"] = [each if isinstance(each, str) else "numeric" if each else "agree" for each in found]
        results["stage"] = ["" if each in ("error", "untried", "unsupported") else "output" for each in found]
        return replace(base, results=results, cases={case: base.cases[case] for case in base.cases if case in chosen})

    return make


def grouped(lengths: Mapping[str, int]) -> bool:
    return lengths["H"] != lengths["Hkv"]


def softcapped(case: Record) -> bool:
    return "softcap" in case["options"]


WHERE: dict[str, Callable[[Record, Mapping[str, int]], object]] = {
    "Lk is no multiple of 8": lambda case, lengths: lengths["Lk"] % 8,
    "H differs from Hkv": lambda case, lengths: grouped(lengths),
    "is_causal is set and Lq differs from Lk": lambda case, lengths: (
        case["options"].get("is_causal") and lengths["Lq"] != lengths["Lk"]
    ),
    "D > 64": lambda case, lengths: lengths["D"] > 64,
    "H is 3": lambda case, lengths: lengths["H"] == 3,
    "keys lie past the last full tile of 128 and D is 16": lambda case, lengths: (
        lengths["D"] == 16 and lengths["Lk"] > 128 and lengths["Lk"] % 128
    ),
    "softcap is set": lambda case, lengths: softcapped(case),
    "mask is not given": lambda case, lengths: "mask" not in case["inputs"],
    "the tag is range": lambda case, lengths: "range" in case["tags"],
}


def _lines(frames: Frames) -> list[str]:
    return [pattern.text(with_environment=False) for pattern in candidate_patterns(frames)]


def test_what_is_so_is_found_and_counted(corpus: list[dict[str, Any]], judged: Judged) -> None:
    for where, fails in WHERE.items():
        count = sum(bool(fails(case, record_axis_lengths(case))) for case in corpus)
        others = len(corpus) - count
        line = f"numpy.eager fails where {where}: {count} of {count}; passes elsewhere: {others} of {others}"
        assert _lines(judged(corpus, lambda case, lengths, dtype: fails(case, lengths))) == [line]  # noqa: B023 # called in this round
    # A dtype is a feature of evaluations.
    [found] = candidate_patterns(judged(corpus, lambda case, lengths, dtype: dtype == "float32" and grouped(lengths)))
    assert (found.where, found.noun) == ("the dtype is float32 and H differs from Hkv", "evaluation")
    # Where each fails in one dtype and passes in the other, a case counts of which any fails.
    wide = [case["line"] for case in corpus if record_axis_lengths(case)["D"] > 64]
    [found] = candidate_patterns(
        judged(corpus, lambda case, lengths, dtype: lengths["D"] > 64 and dtype == DTYPES[case["line"] % 2])
    )
    assert (found.where, found.noun, found.failing, found.cases_with_feature) == (
        "D > 64",
        "case",
        len(wide),
        len(wide),
    )


def test_what_was_not_asked_for_the_stage_that_fails_does_not_pass(
    corpus: list[dict[str, Any]], judged: Judged
) -> None:
    frames = judged(corpus, lambda case, lengths, dtype: grouped(lengths))
    stages = frames.results["stage"].where(frames.results["verdict"] == "agree", "log_sum_exp")
    assert candidate_patterns(replace(frames, results=frames.results.assign(stage=stages))) == ()


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (["wide: [1, 0]; meant [2, 0]", "wide: [3, 0]; meant [4, 0]"], "wide"),
        (["after the mask, which has -softcap; meant before", "after the mask; meant before"],
         "after the mask; meant before"),
        (["off; meant on; of 3", "off; meant on; of 4"], "off; meant on"),
    ],
)  # fmt: skip
def test_a_defect_is_said_in_the_words_that_all_its_cases_share(hand: Any, messages: list[str], text: str) -> None:
    reading = {"verdict": "semantic", "diagnosis": "a-reading"}
    rows = [reading | {"case": f"file/{number}", "message": each} for number, each in enumerate(messages)]
    assert [defect.text for defect in find_defects(hand.frames(rows))] == [text]


def test_a_few_that_pass_or_fail_otherwise_are_counted_and_many_end_it(
    corpus: list[dict[str, Any]], judged: Judged
) -> None:
    held = [case["id"] for case in corpus if grouped(record_axis_lengths(case))]
    some, many = set(held[::10]), set(held[::2])
    frames = judged(corpus, lambda case, lengths, dtype: grouped(lengths) and case["id"] not in some)
    others = len(corpus) - len(held)
    assert _lines(frames) == [
        f"numpy.eager fails only where H differs from Hkv: {len(held) - len(some)} of {len(held)}; "
        f"passes elsewhere: {others} of {others}"
    ]
    assert (
        candidate_patterns(judged(corpus, lambda case, lengths, dtype: grouped(lengths) and case["id"] not in many))
        == ()
    )
    # None of the failing cases may lack what the others have.
    some = {next(case["id"] for case in corpus if not softcapped(case))}
    capped = {case["id"] for case in corpus if softcapped(case)}
    assert _lines(judged(corpus, lambda case, lengths, dtype: case["id"] in some | capped)) == []


def test_only_what_further_problems_bore_out_is_said(corpus: list[dict[str, Any]], judged: Judged) -> None:
    frames = judged(corpus, lambda case, lengths, dtype: softcapped(case))
    [found] = candidate_patterns(frames)
    assert confirmed_patterns(frames) == ()
    environment = found.column.environment
    asked = replace(frames.requests[environment], confirmed_features={found.column.implementation: ["softcap is set"]})
    assert confirmed_patterns(replace(frames, requests={environment: asked})) == (found,)


def test_no_story_is_told_of_few_cases_of_all_and_of_cases_that_were_drawn(
    corpus: list[dict[str, Any]], judged: Judged
) -> None:
    assert candidate_patterns(judged(corpus, lambda *_: True)) == ()
    for failing, passing in ((2, 40), (40, 2), (3, 3)):
        wrong = [case for case in corpus if grouped(record_axis_lengths(case))][:failing]
        right = [case for case in corpus if not grouped(record_axis_lengths(case))][:passing]
        assert candidate_patterns(judged(wrong + right, lambda case, lengths, dtype: grouped(lengths))) == ()
    for seed in range(12):
        generator = random.Random(seed)
        cases = generator.sample(corpus, generator.choice([8, 20, 60, 200, len(corpus) // 2]))
        chosen = {case["id"] for case in generator.sample(cases, generator.randint(3, min(40, len(cases) // 2)))}
        drawn = judged(cases, lambda case, lengths, dtype: case["id"] in chosen, ("float64",))  # noqa: B023 # called in this round
        assert candidate_patterns(drawn) == (), seed


def test_what_fails_alike_on_one_implementation_is_one_defect(hand: Any) -> None:
    """Over however many dtypes, and with other numbers and shapes in its message."""
    messages = ["no (1, 2) into [3]: 17 bytes", "no (4, 5, 6) into [7]: 1.5e+3 bytes", "no (1, 2) into [3]: 17 words"]
    rows = [FAILED | {"case": f"file/{number}", "message": text} for number, text in enumerate(messages)]
    rows += [rows[1] | {"dtype": "float32"}, rows[1] | {"implementation": "torch.eager"}]
    rows += [{"case": f"file/{number}", "verdict": "numeric", "message": "off"} for number in (7, 8)]
    frames = hand.frames(rows)
    told = find_defects(frames)
    assert [(defect.name, defect.cases, defect.evaluations) for defect in told] == [
        ("numeric", ("file/7", "file/8"), 2),
        ("error", ("file/0", "file/1"), 3),
        ("error", ("file/1",), 1),
        ("error", ("file/2",), 1),
    ]
    assert sum(defect.evaluations for defect in told) == len(find_failures(frames))


def test_two_ways_of_failing_are_told_apart_and_what_was_not_judged_says_nothing(
    corpus: list[dict[str, Any]], judged: Judged
) -> None:
    """Cases that were not tried after ten equal crashes would else hide where the crashes are."""

    def verdict(case: Record, lengths: Mapping[str, int], dtype: str) -> str:
        if case["options"].get("is_causal") and lengths["Lq"] != lengths["Lk"]:
            return "numeric"
        if softcapped(case):
            return "error"
        return {0: "untried", 1: "unsupported"}.get(len(case["id"]) % 5, "agree")

    assert [(found.verb, found.where) for found in candidate_patterns(judged(corpus, verdict))] == [
        ("is wrong", "is_causal is set and Lq differs from Lk"),
        ("could not be run", "softcap is set"),
    ]
