"""One call that says whether a function is attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck import UsageError, check

Array = NDArray[Any]
PLAIN = "attention/every-dimension-is-different-and-none-is-forgotten"


def attention(
    query: Array, key: Array, value: Array, *, mask: Array | None = None, scale: float | None = None
) -> Array:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(factor, query.dtype)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    output: Array = weights / np.where(total == 0, 1, total) @ value
    return output


def test_a_right_function_agrees_and_says_what_it_was_not_asked(tmp_path: Path) -> None:
    result = check(attention, cases=["attention/*"], output=tmp_path / "kept")
    assert result.agrees
    assert result.explain().splitlines()[0] == result.headline
    verdicts = result.frames.results["verdict"]
    assert set(verdicts) == {"agree", "unsupported"}
    assert (tmp_path / "kept" / "summary.json").is_file()


def test_a_wrong_one_does_not_and_the_explanation_names_case_stage_and_element() -> None:
    result = check(lambda query, key, value: attention(query, key, value, scale=1.0), cases=[PLAIN], dtypes=["float32"])
    assert not result.agrees
    assert [(row.case, row.verdict) for row in result.failures] == [(PLAIN, "numeric")]
    assert "Every dimension is different" in result.explain()
    assert "exact" in result.explain()


def test_more_failures_than_are_told_are_counted() -> None:
    result = check(lambda query, key, value: value[..., :1, :] + 0 * query[..., :1], cases=["attention/*"])
    assert "more that fail" in result.explain(most=1)


def test_what_cannot_be_called_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="expected attention"):
        check(lambda query: query)


def test_a_script_without_a_main_guard_is_not_run_again_by_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\n"
        "from attncheck import check\n"
        f"result = check(lambda query, key, value: value, cases=['{PLAIN}'], dtypes=['float64'])\n"
        "print(result.agrees)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["once", "False"]
