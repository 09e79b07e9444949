"""One thing that is wrong: in however many cases it shows, the simplest of them, and what they have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attncheck.reading.case import case_record
from attncheck.reading.selection import select_cases
from attncheck.reports.ci import annotation_lines
from attncheck.reports.defects import cause_line, defects, first_commands
from attncheck.reports.failure_patterns import (
    described,
    given_of,
    in_common,
    in_common_lines,
    lengths_of,
    shape_text,
    simplicity,
)
from attncheck.reports.frames import Frames
from attncheck.reports.summary import findings

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
    found = defects(frames)
    assert [(defect.name, defect.cases, defect.dtypes, defect.text) for defect in found] == [
        ("aligned-bottom-right", ("file/0", "file/1"), DTYPES, "bottom-right; meant top-left"),
        ("nonfinite", ("file/2",), ("float64",), "NaN; taken by itself: the window is ignored"),
    ]
    nameless = "no cause found (1 case: file/2; taken by itself: the window is ignored)"
    assert cause_line(found) == f"bottom-right; meant top-left (2 cases); {nameless}"
    first, second = annotation_lines(frames, REPORT)
    assert "title=aligned-bottom-right%3A numpy.eager in float64%2C float32::2 cases, the simplest " in first
    assert "title=nonfinite%3A numpy.eager in float64::" in second


def test_a_shape_is_written_by_its_axes(hand: Any) -> None:
    shapes = {"query": [2, 4, 3, 8], "key": [2, 2, 5, 8], "value": [2, 2, 5, 6], "mask": [1, 1, 3, 5]}
    record = hand.case(operation="attention", inputs=shapes, tags=["bool-mask", "grouped-heads"])
    assert described(record) == "B=2 H=4 Hkv=2 Lq=3 Lk=5 D=8 Dv=6; probes bool-mask, grouped-heads"
    alike = {name: [2, 2, 5, 8] for name in ("query", "key", "value")}
    assert shape_text(hand.case(operation="attention", inputs=alike)) == "B=2 H=2 Lq=5 Lk=5 D=8"
    # What need not be given counts behind the elements.
    elements = 2 * 4 * 3 * 8 + 2 * 2 * 5 * (8 + 6) + 15
    for options, given in (
        ({"is_causal": True, "softcap": 2.0, "window": None}, ["softcap", "is_causal", "mask"]),
        ({"is_causal": False}, ["mask"]),
    ):
        record = hand.case(operation="attention", inputs=shapes, options=options)
        assert (given_of(record), simplicity(record)) == (given, (elements, len(given)))


def test_of_a_record_that_fits_no_operation_nothing_is_said(hand: Any) -> None:
    records: list[dict[str, Any]] = [
        {"operation": ""},
        {"operation": "dreaming"},
        {"operation": "attention", "inputs": {"query": [1]}},
        {"operation": "attention", "inputs": {"query": [1, 2, 3]}, "options": {"heads": 0}},
        {"operation": "multi_head_attention", "inputs": {"query_weight": [2, 3]}, "options": {"heads": "many"}},
        {"operation": "scoring", "options": {"score": ["dot"]}},
    ]
    for fields in records:
        record = hand.case(**fields)
        assert (described(record), simplicity(record)[0] >= 0) == ("", True), fields


def test_what_fails_is_listed_from_the_simplest_on(hand: Any) -> None:
    records = [
        hand.case("file/a", inputs={"scores": [1, 1, 9, 9]}),
        hand.case("file/b", inputs={"scores": [1, 1, 1, 4]}, options={"empty_rows": "nan"}, tags=["axis"]),
        hand.case("file/c", inputs={"scores": [1, 1, 2, 2]}),
    ]
    rows = [{"case": f"file/{name}", "dtype": dtype, "verdict": "numeric"} for name in "abc" for dtype in DTYPES]
    frames = hand.frames(rows, cases=records)
    wrong = findings(frames)
    assert list(zip(wrong["case"], wrong["dtype"], strict=True)) == [
        (f"file/{name}", dtype) for name in "cba" for dtype in reversed(DTYPES)
    ]
    assert first_commands(frames) == ["attncheck explain file/c numpy.eager --dtype float32"]
    (defect,) = defects(frames)
    assert defect.cases == ("file/c", "file/b", "file/a")


@pytest.fixture(scope="module")
def corpus() -> list[dict[str, Any]]:
    """The records of the bundled cases of attention; every case has a shape in words."""
    selection = select_cases()
    records = [case_record(case, selection.tags) for case in selection.cases]
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
            verdict_of(chosen[case], lengths_of(chosen[case]), dtype)
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
    "keys lie past the last full tile of 128 and D is 16": lambda case, lengths: (
        lengths["D"] == 16 and lengths["Lk"] > 128 and lengths["Lk"] % 128
    ),
    "keys lie past the last full tile of D": lambda case, lengths: (
        lengths["Lk"] > lengths["D"] and lengths["Lk"] % lengths["D"]
    ),
    "softcap is set": lambda case, lengths: softcapped(case),
    "mask is not given": lambda case, lengths: "mask" not in case["inputs"],
    "the mask is spread over queries": lambda case, lengths: (
        case["inputs"].get("mask", [0] * 4)[2] == 1 and lengths["Lq"] > 1
    ),
    "the tag is range": lambda case, lengths: "range" in case["tags"],
}


def test_what_is_so_is_found_and_counted(corpus: list[dict[str, Any]], judged: Judged) -> None:
    for where, fails in WHERE.items():
        count = sum(bool(fails(case, lengths_of(case))) for case in corpus)
        others = len(corpus) - count
        line = f"numpy.eager fails where {where}: {count} of {count}; passes elsewhere: {others} of {others}"
        assert in_common_lines(judged(corpus, lambda case, lengths, dtype: fails(case, lengths))) == [line]  # noqa: B023 # called in this round


def test_a_dtype_is_a_feature_of_evaluations(corpus: list[dict[str, Any]], judged: Judged) -> None:
    [found] = in_common(judged(corpus, lambda case, lengths, dtype: dtype == "float32" and grouped(lengths)))
    assert (found.where, found.noun) == ("the dtype is float32 and H differs from Hkv", "evaluation")


def test_a_few_that_pass_or_fail_otherwise_are_counted_and_many_end_it(
    corpus: list[dict[str, Any]], judged: Judged
) -> None:
    held = [case["id"] for case in corpus if grouped(lengths_of(case))]
    some, many = set(held[::10]), set(held[::2])
    frames = judged(corpus, lambda case, lengths, dtype: grouped(lengths) and case["id"] not in some)
    others = len(corpus) - len(held)
    assert in_common_lines(frames) == [
        f"numpy.eager fails only where H differs from Hkv: {len(held) - len(some)} of {len(held)}; "
        f"passes elsewhere: {others} of {others}"
    ]
    assert in_common(judged(corpus, lambda case, lengths, dtype: grouped(lengths) and case["id"] not in many)) == ()
    # One of ten failing cases may lack what the others have.
    capped = [case["id"] for case in corpus if softcapped(case)]
    rest = [case["id"] for case in corpus if not softcapped(case)]
    some, many = set(rest[:: len(rest) // 5]), set(rest[:: len(rest) // 20])
    assert in_common_lines(judged(corpus, lambda case, lengths, dtype: case["id"] in some.union(capped))) == [
        f"numpy.eager fails where softcap is set: {len(capped)} of {len(capped)}; "
        f"passes elsewhere: {len(rest) - len(some)} of {len(rest)}"
    ]
    assert in_common(judged(corpus, lambda case, lengths, dtype: case["id"] in many.union(capped))) == ()


def test_no_story_is_told_of_few_cases_of_all_and_of_cases_that_were_drawn(
    corpus: list[dict[str, Any]], judged: Judged
) -> None:
    assert in_common(judged(corpus, lambda *_: True)) == ()
    for failing, passing in ((2, 40), (40, 2), (3, 3)):
        wrong = [case for case in corpus if grouped(lengths_of(case))][:failing]
        right = [case for case in corpus if not grouped(lengths_of(case))][:passing]
        assert in_common(judged(wrong + right, lambda case, lengths, dtype: grouped(lengths))) == ()
    for seed in range(12):
        generator = random.Random(seed)
        cases = generator.sample(corpus, generator.choice([8, 20, 60, 200, 500]))
        chosen = {case["id"] for case in generator.sample(cases, generator.randint(3, min(40, len(cases) // 2)))}
        drawn = judged(cases, lambda case, lengths, dtype: case["id"] in chosen, ("float64",))  # noqa: B023 # called in this round
        assert in_common(drawn) == (), seed


def test_what_was_not_judged_or_fails_as_expected_says_nothing(corpus: list[dict[str, Any]], judged: Judged) -> None:
    """Cases that were not tried after ten equal crashes would else hide where the crashes are."""

    def verdict(case: Record, lengths: Mapping[str, int], dtype: str) -> str:
        if grouped(lengths):
            return "error"
        return {0: "untried", 1: "unsupported"}.get(len(case["id"]) % 3, "agree")

    [found] = in_common(judged(corpus, verdict))
    assert found.where == "H differs from Hkv"
    assert found.others == sum(len(case["id"]) % 3 == 2 for case in corpus if not grouped(lengths_of(case)))


def test_two_ways_of_failing_are_told_apart(corpus: list[dict[str, Any]], judged: Judged) -> None:
    def verdict(case: Record, lengths: Mapping[str, int], dtype: str) -> str:
        if case["options"].get("is_causal") and lengths["Lq"] != lengths["Lk"]:
            return "numeric"
        return "nonfinite" if softcapped(case) else "agree"

    assert [(found.verb, found.where) for found in in_common(judged(corpus, verdict))] == [
        ("is wrong (numeric at output)", "is_causal is set and Lq differs from Lk"),
        ("is wrong (nonfinite at output)", "softcap is set"),
    ]


def test_what_fails_alike_on_one_implementation_is_one_defect(hand: Any) -> None:
    """Over however many dtypes, and with other numbers and shapes in its message."""
    messages = ["no (1, 2) into [3]: 17 bytes", "no (4, 5, 6) into [7]: 1.5e+3 bytes", "no (1, 2) into [3]: 17 words"]
    rows = [FAILED | {"case": f"file/{number}", "message": text} for number, text in enumerate(messages)]
    rows += [rows[1] | {"dtype": "float32"}, rows[1] | {"implementation": "torch.eager"}]
    rows += [{"case": f"file/{number}", "verdict": "numeric", "message": "off"} for number in (7, 8)]
    frames = hand.frames(rows)
    told = defects(frames)
    assert [(defect.name, defect.cases, defect.evaluations) for defect in told] == [
        ("numeric", ("file/7", "file/8"), 2),
        ("error", ("file/0", "file/1"), 3),
        ("error", ("file/1",), 1),
        ("error", ("file/2",), 1),
    ]
    assert sum(defect.evaluations for defect in told) == len(findings(frames))
