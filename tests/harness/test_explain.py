from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.errors import UsageError
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.explain import Explanation, explain_case, find_implementation
from attncheck.judging.judge_stages import StageJudgement
from attncheck.reading.addresses import select_one
from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases
from attncheck.reports.explanation import print_explanation
from attncheck.verdicts import Verdict

ATTENTION = "attention/every-dimension-is-different-and-none-is-forgotten"


@pytest.fixture(scope="module")
def case() -> Case:
    return select_one(ATTENTION)[0]


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Implementation]:
    """A NumPy backend in which one function is replaced."""

    def make(source: str) -> Implementation:
        head = (
            "from attncheck.backends import numpy_backend as reference",
            "from attncheck.backends.numpy_backend import *",
        )
        (tmp_path / "faulty_for_explain.py").write_text("\n".join([*head, source]), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        return Implementation(BackendEntry("faulty", "faulty_for_explain", ("numpy",)))

    return make


def test_an_honest_implementation_is_within_its_bounds_at_every_stage(case: Case) -> None:
    explanation = explain_case(case, find_implementation("numpy"), "float32", Limits())
    assert {judgement.stage: str(judgement.verdict) for judgement in explanation.judgements} == dict.fromkeys(
        ("raw_scores", "scores", "weights", "log_sum_exp", "output"), "agree"
    )
    assert explanation.begins_at == explanation.failure == explanation.outside == ""


def test_a_scale_that_is_off_by_one_in_a_hundred_thousand_begins_at_scores(
    case: Case, faulty: Callable[[str], Implementation], capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
def attention(query, key, value, **options):
    options["scale"] = (1 + 1e-5) / query.shape[-1] ** 0.5
    return reference.attention(query, key, value, **options)
"""
    explanation = explain_case(case, faulty(source), "float32", Limits())
    assert explanation.begins_at == "scores"
    print_explanation(explanation, select_cases([ATTENTION]).tags)
    told = capsys.readouterr().out
    assert "It goes wrong at scores:" in told
    assert "computed" in told
    assert "exact" in told
    assert "0x" in told
    assert "<- begins here" in told


def test_an_implementation_that_raises_is_told_with_its_reason(
    case: Case, faulty: Callable[[str], Implementation], capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def attention(query, key, value, **options):\n    raise ValueError('no attention today')\n"
    explanation = explain_case(case, faulty(source), "float32", Limits())
    assert explanation.failure == "error: ValueError: no attention today"
    print_explanation(explanation, select_cases([ATTENTION]).tags)
    assert "no attention today" in capsys.readouterr().out


def test_how_many_query_rows_stand_for_all_is_told(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    key = StageJudgement("key", Verdict.AGREE)
    output = StageJudgement("output", Verdict.AGREE, judged_rows=64, query_rows=4096)
    for judgements, told in (((key, output), True), ((key,), False)):
        explanation = Explanation(case, "float32", "numpy.eager", "native", judgements, "")
        print_explanation(explanation, select_cases([ATTENTION]).tags)
        assert ("64 of 4,096 query rows judged; they stand for all." in capsys.readouterr().out) is told


def test_an_implementation_is_found_by_its_name_or_its_backends() -> None:
    assert find_implementation("numpy") == find_implementation("numpy.eager") == Implementation(BACKENDS["numpy"])


@pytest.mark.parametrize("name", ["numpy.fast", "nothing"])
def test_an_unknown_implementation_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no implementation is called"):
        find_implementation(name)
