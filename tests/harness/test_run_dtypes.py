"""Cases in dtypes that an implementation does not declare: it is unsupported there, and everybody else runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.errors import ExitCode
from attncheck.results.reader import Run
from attncheck.run import RunSummary

RunSmall = Callable[..., tuple[RunSummary, Run]]
pytestmark = pytest.mark.usefixtures("workers_here")
NARROW = "defaults: {dtypes: [%s]}\n"

IN_DOUBLE = """
import numpy as np

def softmax(scores):
    stages = numpy_backend.softmax(scores.astype(np.float64))
    return {name: array.astype(scores.dtype) for name, array in stages.items()}
"""
"""Everything in float64, and rounded at the end."""


@pytest.fixture
def narrow_cases(case_folder: Path) -> Callable[[str], None]:
    """Leave only softmax without known numbers, in these dtypes."""

    def write(dtypes: str) -> None:
        (case_folder / "small.yaml").write_text(
            "title: Small cases\nsource: {kind: derivation, title: Made for the tests}\noperation: softmax\n"
            f"defaults: {{dtypes: [{dtypes}]}}\n"
            "cases:\n  - name: Some weights\n    inputs: {scores: {values: [[0, 1, 2], [3, 1, 0]]}}\n"
        )

    return write


@pytest.fixture
def wide(make_backend: Callable[..., BackendEntry]) -> BackendEntry:
    """Return a backend that declares all four dtypes."""
    return make_backend("wide", IN_DOUBLE)


def test_who_declares_no_such_dtype_is_unsupported_and_was_never_asked(
    run_small: RunSmall, narrow_cases: Callable[[str], None], wide: BackendEntry
) -> None:
    narrow_cases("bfloat16, float64")
    summary, run = run_small([BACKENDS["numpy"], wide], dtypes=())
    narrow = run.rows[run.rows["dtype"] == "bfloat16"]
    [refused] = narrow[narrow["implementation"] == "numpy.eager"].itertuples()
    assert (refused.verdict, refused.message) == ("unsupported", "declares no bfloat16")
    stages = narrow[narrow["comparison"] == "stage"]
    assert set(stages[stages["implementation"] == "wide.eager"]["verdict"]) == {"agree"}
    assert set(run.rows[run.rows["dtype"] == "float64"]["verdict"]) == {"agree"}
    # wide in both, numpy in float64 alone
    assert summary.evaluations == 3
    assert set(run.environment["backends"]) == {"numpy.eager-float64", "wide.eager-bfloat16-float64"}
    assert run.environment["classes"]["numpy.eager"]["bfloat16"] is None
    assert run.environment["classes"]["wide.eager"]["bfloat16"] == "eager"


def test_a_case_that_nobody_can_run_is_told_and_ends(run_small: RunSmall, narrow_cases: Callable[[str], None]) -> None:
    narrow_cases("bfloat16, float16")
    summary, run = run_small([BACKENDS["numpy"]], dtypes=())
    assert summary.evaluations == 0
    assert sorted(zip(run.rows["dtype"], run.rows["message"], strict=True)) == [
        ("bfloat16", "declares no bfloat16"),
        ("float16", "declares no float16"),
    ]
    assert set(run.rows["verdict"]) == {"unsupported"}
    assert run.summary is not None


def test_a_faulty_implementation_is_caught_in_16_bits(
    run_small: RunSmall, narrow_cases: Callable[[str], None], make_backend: Callable[..., BackendEntry]
) -> None:
    narrow_cases("bfloat16")
    wrong = make_backend("wrong", IN_DOUBLE.replace("scores.astype", "(scores * 1.25).astype"))
    summary, run = run_small([wrong], dtypes=("bfloat16",))
    assert summary.exit_code == ExitCode.DISAGREE
    weights = run.rows[run.rows["stage"] == "weights"]
    assert list(weights["verdict"]) == ["numeric"]


def test_what_nobody_was_asked_for_is_not_judged(
    run_small: RunSmall, narrow_cases: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*arguments: Any) -> Any:
        raise AssertionError("the exact answer was worked out for nobody")

    monkeypatch.setattr("attncheck.judging.judge.judge", judge)
    narrow_cases("float64")
    summary, run = run_small([], missing=("torch",), dtypes=())
    assert (summary.evaluations, len(run.rows)) == (0, 0)
