"""One thing that is wrong: in however many cases it shows, the simplest of them, and what they have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from here import own_code_here

from attncheck.errors import ExitCode
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.reading.case import case_record
from attncheck.reading.expressions import read_expression
from attncheck.reading.selection import select_cases
from attncheck.reports.ci import annotation_lines, render_ci_summary
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
from attncheck.reports.html.page import render_html
from attncheck.reports.machine.outcome import outcome_document
from attncheck.reports.markdown import render_markdown
from attncheck.reports.summary import findings
from attncheck.reports.terminal import print_summary
from attncheck.run import Settings, run_cases

Record = Mapping[str, Any]
Judged = Callable[..., Frames]
DTYPES = ("float64", "float32")
REPORT = Path("report.md")
FAILED: dict[str, Any] = {"stage": "", "verdict": "error", "message": "TypeError: not | today"}


@pytest.fixture
def frames(hand: Any) -> Frames:
    """Twenty-five cases that raise for one reason, one in another dtype too, and others for reasons of their own."""
    rows = [FAILED | {"case": f"file/{number:02}"} for number in range(25)]
    rows += [
        FAILED | {"case": "file/24", "dtype": "float32"},
        FAILED | {"case": "file/25", "message": "TypeError: another"},
        FAILED | {"case": "file/26", "implementation": "torch.eager"},
        {"case": "file/27", "verdict": "numeric", "message": "off"},
        {"case": "file/28", "verdict": "numeric", "message": "off"},
    ]
    made: Frames = hand.frames(rows)
    return made


def test_what_fails_alike_on_one_implementation_is_one_in_every_format(
    frames: Frames, capsys: pytest.CaptureFixture[str]
) -> None:
    told = defects(frames)
    assert [(defect.name, defect.row["case"], defect.others, defect.evaluations) for defect in told] == [
        ("numeric", "file/27", 1, 2),
        ("error", "file/00", 24, 26),
        ("error", "file/25", 0, 1),
        ("error", "file/26", 0, 1),
    ]
    assert told[1].dtypes == DTYPES
    assert sum(defect.evaluations for defect in told) == len(findings(frames)) == 30
    print_summary(frames, REPORT, quiet=True)
    assert capsys.readouterr().out.splitlines() == [
        "numeric: 2 cases [float64], the first file/27, numpy.eager",
        "  off",
        "error: 25 cases [float64, float32], the first file/00, numpy.eager: TypeError: not | today",
        "error: file/25 [float64] numpy.eager: TypeError: another",
        "and 1 more defect",
    ]
    line = "2. **error**<br>numpy.eager: 25 cases, in float64, float32; 26 comparisons fail<br>The simplest: `file/00`"
    line += r"<br>B=1 H=1 Lq=1 Lk=3<br>TypeError: not \| today"
    for text in (render_markdown(frames), render_ci_summary(frames, REPORT)):
        assert line in text
        assert "<summary>All 25 cases</summary>" in text
        assert "more defect" not in text
    page = render_html(frames).partition('id="wrong"')[2].partition("</section>")[0]
    assert page.count('class="message">TypeError: not | today') == 2
    assert "numpy.eager: 25 cases, in float64, float32" in page
    assert "All 25 cases" in page


def test_errors_that_differ_in_numbers_and_shapes_are_one(hand: Any) -> None:
    messages = ["no (1, 2) into [3]: 17 bytes", "no (4, 5, 6) into [7]: 1.5e+3 bytes", "no (1, 2) into [3]: 17 words"]
    rows = [FAILED | {"case": f"file/{number}", "message": text} for number, text in enumerate(messages)]
    assert [defect.cases for defect in defects(hand.frames(rows))] == [("file/0", "file/1"), ("file/2",)]


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


def test_a_card_of_the_page_has_the_cause_and_lists_the_cases_of_all(hand: Any) -> None:
    scale = {"verdict": "semantic", "message": "a scale", "diagnosis": "x"}
    rows = [scale | {"case": f"file/{number}", "dtype": dtype} for number in range(3) for dtype in DTYPES]
    rows += [{"case": f"file/{number}", "verdict": "numeric", "message": f"off by {number}"} for number in range(3, 8)]
    rows += [{"case": "file/8", "verdict": "numeric", "stage": "output"}, FAILED | {"case": "file/9"}]
    rows += [FAILED | {"case": "file/0", "dtype": "float16"}]
    page = render_html(hand.frames(rows)).partition('id="wrong"')[2].partition("</section>")[0]
    assert "<strong>a scale</strong>" in page
    assert [page.count(f">file/{number}</a>") for number in range(10)] == [4, 1, 1, 2, 1, 1, 1, 1, 1, 1]


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


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": ""},
        {"operation": "dreaming"},
        {"operation": "attention", "inputs": {"query": [1]}},
        {"operation": "attention", "inputs": {"query": [1, 2, 3]}, "options": {"heads": 0}},
        {"operation": "multi_head_attention", "inputs": {"query_weight": [2, 3]}, "options": {"heads": "many"}},
        {"operation": "scoring", "options": {"score": ["dot"]}},
        {"operation": "scoring", "options": {"score": "shouting"}},
    ],
)
def test_of_a_record_that_fits_no_operation_nothing_is_said(hand: Any, fields: dict[str, Any]) -> None:
    record = hand.case(**fields)
    assert described(record) == ""
    assert simplicity(record)[0] >= 0


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
    "Lk is odd": lambda case, lengths: lengths["Lk"] % 2,
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
    "Lq is 1": lambda case, lengths: lengths["Lq"] == 1,
    "softcap is set": lambda case, lengths: softcapped(case),
    "mask is not given": lambda case, lengths: "mask" not in case["inputs"],
    "bias is given and mask is given": lambda case, lengths: {"mask", "bias"} <= case["inputs"].keys(),
    "the mask is spread over queries": lambda case, lengths: (
        case["inputs"].get("mask", [0] * 4)[2] == 1 and lengths["Lq"] > 1
    ),
    "the tag is range": lambda case, lengths: "range" in case["tags"],
    "window is set and H differs from Hkv": lambda case, lengths: grouped(lengths) and case["options"].get("window"),
}


def test_what_is_so_is_found_and_counted(corpus: list[dict[str, Any]], judged: Judged) -> None:
    for where, fails in WHERE.items():
        count = sum(bool(fails(case, lengths_of(case))) for case in corpus)
        others = len(corpus) - count
        line = f"numpy.eager fails where {where}: {count} of {count}; passes elsewhere: {others} of {others}"
        assert in_common_lines(judged(corpus, lambda case, lengths, dtype: fails(case, lengths))) == [line]  # noqa: B023 # called in this round


def test_a_dtype_is_a_feature_of_evaluations(corpus: list[dict[str, Any]], judged: Judged) -> None:
    frames = judged(corpus, lambda case, lengths, dtype: dtype == "float32")
    count = len(corpus)
    assert in_common_lines(frames) == [
        f"numpy.eager fails where the dtype is float32: {count} of {count} evaluations; "
        f"passes elsewhere: {count} of {count}"
    ]
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
    for verdict in (False, True):
        assert in_common(judged(corpus, lambda *_: verdict)) == ()  # noqa: B023 # called in this round
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
        return "error" if softcapped(case) else "numeric" if grouped(lengths) else "agree"

    def alike(case: Record, lengths: Mapping[str, int], dtype: str) -> str:
        if case["options"].get("is_causal") and lengths["Lq"] != lengths["Lk"]:
            return "numeric"
        return "nonfinite" if softcapped(case) else "agree"

    assert [(found.verb, found.where) for found in in_common(judged(corpus, verdict))] == [
        ("is wrong", "H differs from Hkv"),
        ("could not be run", "softcap is set"),
    ]
    assert [(found.verb, found.where) for found in in_common(judged(corpus, alike))] == [
        ("is wrong (numeric at output)", "is_causal is set and Lq differs from Lk"),
        ("is wrong (nonfinite at output)", "softcap is set"),
    ]


def test_every_report_says_it_before_the_list(
    corpus: list[dict[str, Any]], judged: Judged, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = judged(corpus, lambda case, lengths, dtype: softcapped(case))
    [line] = in_common_lines(frames)
    print_summary(frames, REPORT, quiet=True)
    assert capsys.readouterr().out.splitlines()[0] == f"{line}."
    [found] = outcome_document(frames, ExitCode.DISAGREE).in_common
    count = sum(map(softcapped, corpus))
    assert asdict(found) == {
        "environment": "local",
        "implementation": "numpy.eager",
        "text": line,
        "where": "softcap is set",
        "failing": count,
        "of": count,
        "passing_elsewhere": len(corpus) - count,
        "counted": "cases",
    }
    assert f"<strong>{line}.</strong>" in render_html(frames)
    said = f"**{line}.**".replace("_", r"\_")
    assert said in render_markdown(frames)
    assert said in render_ci_summary(frames, REPORT)


EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_kernel.py"
KERNELS = """


def _attention(query, key, value, mask, is_causal, scale):
    return attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def right(query, key, value, *, mask=None, is_causal=False, scale=None):
    return _attention(query, key, value, mask, is_causal, scale)


def wrong_everywhere(query, key, value, *, mask=None, is_causal=False, scale=None):
    return _attention(query, key, value, mask, is_causal, scale) + np.asarray(1, query.dtype)


def wrong_for_groups(query, key, value, *, mask=None, is_causal=False, scale=None):
    repeated = np.concatenate([key] * (query.shape[1] // key.shape[1]), axis=1)  # in the order of other frameworks
    return _attention(query, repeated, np.concatenate([value] * (query.shape[1] // key.shape[1]), axis=1), mask,
                      is_causal, scale)
"""


def test_faulty_kernels_are_told_by_what_their_failing_cases_share(
    tmp_path: Path, frames_of: Callable[..., Frames]
) -> None:
    (tmp_path / "kernels.py").write_text(EXAMPLE.read_text(encoding="utf-8") + KERNELS, encoding="utf-8")
    names = ("right", "wrong_everywhere", "wrong_for_groups")
    files = ["attention", "grouped_heads", "coincidences", "kernel_shapes/heads"]
    plain = read_expression("not alignment and B>0", "-k")  # with the other corner's causality come masks
    cases = select_cases(files, dtypes=("float32",), expression=plain).cases
    with own_code_here():
        chosen = select_implementations(None, [f"{tmp_path / 'kernels.py'}:{name}" for name in names])
        run_cases(cases, chosen, Settings(tmp_path / "out", dtypes=("float32",), limits=Limits(workers=1)))
    found = [(common.column.implementation, common.where) for common in in_common(frames_of(tmp_path / "out"))]
    assert found == [("kernels.wrong_for_groups", "H differs from Hkv")]
