"""What failing cases have in common: found where it is so, said in the simplest words, and never made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from here import own_code_here

from attncheck.errors import ExitCode
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.limits import Limits
from attncheck.reading.case import case_record
from attncheck.reading.selection import read_expression, select_cases
from attncheck.reports.ci import render_ci_summary
from attncheck.reports.failure_patterns import in_common, in_common_lines, lengths_of
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.reports.machine.outcome import outcome_document
from attncheck.reports.markdown.report import render_markdown
from attncheck.reports.terminal import print_summary
from attncheck.results.format import Row
from attncheck.run import Settings, run_cases

Record = Mapping[str, Any]
MakeRow = Callable[..., Row]
Judged = Callable[..., Frames]
DTYPES = ("float64", "float32")
FramesOf = Callable[..., Frames]


@pytest.fixture(scope="module")
def corpus() -> list[dict[str, Any]]:
    """The records of the bundled cases of attention."""
    selection = select_cases()
    return [case_record(case, selection.tags) for case in selection.cases if case.operation == "attention"]


WHOLE_CORPUS: list[Frames] = []
"""All cases in two dtypes, right everywhere: made once, for a run is written and read for it."""


@pytest.fixture
def judged(
    corpus: list[dict[str, Any]], make_row: MakeRow, write_run: Callable[..., Path], frames_of: FramesOf
) -> Judged:
    """Return the frames of a run in which those cases fail of which a function says so; it is given a dtype, too."""
    if not WHOLE_CORPUS:
        rows = [make_row(case=case["id"], dtype=dtype, stage="output") for case in corpus for dtype in DTYPES]
        WHOLE_CORPUS.append(frames_of(write_run(rows, cases=[dict(case) for case in corpus])))
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


@pytest.mark.parametrize(
    ("where", "fails"),
    [
        ("Lk is no multiple of 8", lambda case, lengths, dtype: lengths["Lk"] % 8),
        ("Lk is odd", lambda case, lengths, dtype: lengths["Lk"] % 2),
        ("H differs from Hkv", lambda case, lengths, dtype: grouped(lengths)),
        (
            "is_causal is set and Lq differs from Lk",
            lambda case, lengths, dtype: case["options"].get("is_causal") and lengths["Lq"] != lengths["Lk"],
        ),
        ("D > 64", lambda case, lengths, dtype: lengths["D"] > 64),
        (
            "keys lie past the last full tile of 128 and D is 16",
            lambda case, lengths, dtype: lengths["D"] == 16 and lengths["Lk"] > 128 and lengths["Lk"] % 128,
        ),
        (
            "keys lie past the last full tile of D",
            lambda case, lengths, dtype: lengths["Lk"] > lengths["D"] and lengths["Lk"] % lengths["D"],
        ),
        ("Lq is 1", lambda case, lengths, dtype: lengths["Lq"] == 1),
        ("softcap is set", lambda case, lengths, dtype: "softcap" in case["options"]),
        ("mask is not given", lambda case, lengths, dtype: "mask" not in case["inputs"]),
        ("bias is given and mask is given", lambda case, lengths, dtype: {"mask", "bias"} <= case["inputs"].keys()),
        (
            "the mask is spread over queries",
            lambda case, lengths, dtype: case["inputs"].get("mask", [0] * 4)[2] == 1 and lengths["Lq"] > 1,
        ),
        ("the tag is range", lambda case, lengths, dtype: "range" in case["tags"]),
        (
            "window is set and H differs from Hkv",
            lambda case, lengths, dtype: grouped(lengths) and case["options"].get("window"),
        ),
    ],
)
def test_what_is_so_is_found_and_counted(
    corpus: list[dict[str, Any]], judged: Judged, where: str, fails: Callable[..., object]
) -> None:
    frames = judged(corpus, fails)
    count = sum(bool(fails(case, lengths_of(case), "")) for case in corpus)
    [line] = in_common_lines(frames)
    others = len(corpus) - count
    assert line == f"numpy.eager fails where {where}: {count} of {count}; passes elsewhere: {others} of {others}"


def test_a_dtype_is_a_feature_of_evaluations(corpus: list[dict[str, Any]], judged: Judged) -> None:
    frames = judged(corpus, lambda case, lengths, dtype: dtype == "float32")
    count = len(corpus)
    assert in_common_lines(frames) == [
        f"numpy.eager fails where the dtype is float32: {count} of {count} evaluations; "
        f"passes elsewhere: {count} of {count}"
    ]
    frames = judged(corpus, lambda case, lengths, dtype: dtype == "float32" and grouped(lengths))
    [found] = in_common(frames)
    assert found.where == "the dtype is float32 and H differs from Hkv"
    assert found.noun == "evaluation"


def test_where_not_all_fail_that_have_it_the_counts_say_so(corpus: list[dict[str, Any]], judged: Judged) -> None:
    held = [case["id"] for case in corpus if grouped(lengths_of(case))]
    spared = set(held[::10])
    frames = judged(corpus, lambda case, lengths, dtype: grouped(lengths) and case["id"] not in spared)
    others = len(corpus) - len(held)
    assert in_common_lines(frames) == [
        f"numpy.eager fails only where H differs from Hkv: {len(held) - len(spared)} of {len(held)}; "
        f"passes elsewhere: {others} of {others}"
    ]
    spared = set(held[::2])  # too many of them pass
    assert in_common(judged(corpus, lambda case, lengths, dtype: grouped(lengths) and case["id"] not in spared)) == ()


def test_one_of_ten_failing_cases_may_lack_what_the_others_have(corpus: list[dict[str, Any]], judged: Judged) -> None:
    softcapped = [case["id"] for case in corpus if "softcap" in case["options"]]
    others = [case["id"] for case in corpus if case["id"] not in softcapped]
    few, many = set(others[:: len(others) // 5]), set(others[:: len(others) // 20])
    frames = judged(corpus, lambda case, lengths, dtype: case["id"] in few.union(softcapped))
    [line] = in_common_lines(frames)
    assert line == (
        f"numpy.eager fails where softcap is set: {len(softcapped)} of {len(softcapped)}; "
        f"passes elsewhere: {len(others) - len(few)} of {len(others)}"
    )
    assert in_common(judged(corpus, lambda case, lengths, dtype: case["id"] in many.union(softcapped))) == ()


@pytest.mark.parametrize("fails", [lambda *_: False, lambda *_: True])
def test_of_what_is_right_or_wrong_everywhere_nothing_is_said(
    corpus: list[dict[str, Any]], judged: Judged, fails: Callable[..., object]
) -> None:
    assert in_common(judged(corpus, fails)) == ()


@pytest.mark.parametrize(("failing", "passing"), [(2, 40), (40, 2), (3, 3)])
def test_of_a_few_cases_nothing_is_said(
    corpus: list[dict[str, Any]], judged: Judged, failing: int, passing: int
) -> None:
    wrong = [case for case in corpus if grouped(lengths_of(case))][:failing]
    right = [case for case in corpus if not grouped(lengths_of(case))][:passing]
    assert in_common(judged(wrong + right, lambda case, lengths, dtype: grouped(lengths))) == ()


@pytest.mark.parametrize("seed", range(12))
def test_of_cases_that_were_drawn_no_story_is_told(corpus: list[dict[str, Any]], judged: Judged, seed: int) -> None:
    generator = random.Random(seed)
    cases = generator.sample(corpus, generator.choice([8, 20, 60, 200, 500]))
    chosen = {case["id"] for case in generator.sample(cases, generator.randint(3, min(40, len(cases) // 2)))}
    assert in_common(judged(cases, lambda case, lengths, dtype: case["id"] in chosen, ("float64",))) == ()


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
        return "error" if "softcap" in case["options"] else "numeric" if grouped(lengths) else "agree"

    frames = judged(corpus, verdict)
    assert [(each.verb, each.where) for each in in_common(frames)] == [
        ("is wrong", "H differs from Hkv"),
        ("could not be run", "softcap is set"),
    ]


def test_what_fails_alike_is_told_apart_where_all_that_is_wrong_has_nothing_in_common(
    corpus: list[dict[str, Any]], judged: Judged
) -> None:
    def verdict(case: Record, lengths: Mapping[str, int], dtype: str) -> str:
        if case["options"].get("is_causal") and lengths["Lq"] != lengths["Lk"]:
            return "numeric"
        return "nonfinite" if "softcap" in case["options"] else "agree"

    assert [(each.verb, each.where) for each in in_common(judged(corpus, verdict))] == [
        ("is wrong (numeric at output)", "is_causal is set and Lq differs from Lk"),
        ("is wrong (nonfinite at output)", "softcap is set"),
    ]


def test_every_report_says_it_before_the_list(
    corpus: list[dict[str, Any]], judged: Judged, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = judged(corpus, lambda case, lengths, dtype: "softcap" in case["options"])
    [line] = in_common_lines(frames)
    print_summary(frames, Path("report.html"), quiet=True)
    assert capsys.readouterr().out.splitlines()[0] == f"{line}."
    [found] = outcome_document(frames, ExitCode.DISAGREE).in_common
    count = sum("softcap" in case["options"] for case in corpus)
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
    assert said in render_ci_summary(frames, Path("report.md"))


EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_kernel.py"
KERNELS = (
    EXAMPLE.read_text(encoding="utf-8")
    + """


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
)


@pytest.fixture(scope="module")
def of_kernels(tmp_path_factory: pytest.TempPathFactory, frames_of: FramesOf) -> Frames:
    """Frames of three kernels, really run."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.py").write_text(KERNELS, encoding="utf-8")
    names = ("right", "wrong_everywhere", "wrong_for_groups")
    files = ["attention", "grouped_heads", "coincidences", "kernel_shapes/heads"]
    plain = read_expression("not alignment and B>0", "-k")  # with the other corner's causality come masks
    cases = select_cases(files, dtypes=("float32",), expression=plain).cases
    with own_code_here():
        chosen = select_implementations(None, [f"{folder / 'kernels.py'}:{name}" for name in names])
        run_cases(cases, chosen, Settings(folder / "out", dtypes=("float32",), limits=Limits(workers=1)))
    return frames_of(folder / "out")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("right", ()),
        ("wrong_everywhere", ()),
        ("wrong_for_groups", ("H differs from Hkv",)),
    ],
)
def test_faulty_kernels_are_told_by_what_their_failing_cases_share(
    of_kernels: Frames, name: str, words: Iterable[str]
) -> None:
    found = [each for each in in_common(of_kernels) if each.column.implementation == f"kernels.{name}"]
    assert [each.where for each in found] == list(words)
