"""One fault of a kernel is one cause, in small cases and in large ones of which some rows are judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from here import own_code_here

from attncheck import check
from attncheck.results.format import Row

KERNEL = """\
import numpy as np


def attention(query, key, value):
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray({scale}, query.dtype)
    exponentials = np.exp(scores - {shift})
    output = {weights} @ value
    return {output}
"""
RIGHT = {
    "scale": "query.shape[-1] ** -0.5",
    "shift": "scores.max(axis=-1, keepdims=True, initial=-np.inf)",
    "weights": "(exponentials / exponentials.sum(axis=-1, keepdims=True))",
    "output": "output",
}


SMALL, LARGE = "probes/rounding/*", "kernel_shapes/lengths/hundreds-of-queries-and-keys"
PLAIN = [
    "attention/every-dimension-is-different-and-none-is-forgotten",
    "probes/rounding/keys-with-a-large-common-offset",
    "probes/rounding/values-with-a-large-common-offset",
    "probes/rounding/pairs-of-query-and-key-entries-that-cancel-in-the-score",
]
SCALES = [("scale-inverse-root-of-3D", "(3 * query.shape[-1]) ** -0.5"), ("scale-fitted", "0.125")]
WEIGHTS = [
    ("denominator-left-out", "exponentials"),
    ("denominator-over-queries", "(exponentials / exponentials.sum(axis=-2, keepdims=True))"),
]


def failing_rows(folder: Path, cases: list[str], **fault: str) -> list[Row]:
    kernel = folder / "kernel.py"
    kernel.write_text(KERNEL.format(**RIGHT | fault), encoding="utf-8")
    with own_code_here():
        result = check(f"{kernel}:attention", cases=cases, dtypes=["float64", "float32"])
    return [row for row in result.failures if row.comparison == "stage"]


@pytest.mark.parametrize(("diagnosis", "scale"), SCALES)
def test_a_wrong_scale_is_the_only_cause_also_of_large_cases(diagnosis: str, scale: str, tmp_path: Path) -> None:
    rows = failing_rows(tmp_path, [SMALL, LARGE], scale=scale)
    assert any(row.judged_rows for row in rows), "no large case fails"
    assert {row.diagnosis for row in rows} == {diagnosis}


@pytest.mark.parametrize(("diagnosis", "weights"), WEIGHTS)
def test_a_wrong_denominator_is_the_only_cause(diagnosis: str, weights: str, tmp_path: Path) -> None:
    rows = failing_rows(tmp_path, PLAIN, weights=weights)
    assert len({row.case for row in rows}) == len(PLAIN)
    assert {row.diagnosis for row in rows} == {diagnosis}


LARGE_LOGITS = [
    "attention/logits-of-eighty-leave-almost-all-weight-on-one-key",
    "probes/rounding/logits-of-three-hundred-leave-almost-all-weight-on-one-key",
    "probes/rounding/keys-with-a-large-common-offset",
]


@pytest.mark.parametrize("output", ["output", "np.nan_to_num(output, nan=0.0)"])
def test_exponentials_of_large_logits_without_a_maximum_are_the_only_cause(output: str, tmp_path: Path) -> None:
    rows = failing_rows(tmp_path, LARGE_LOGITS, shift="0", output=output)
    assert len({row.case for row in rows}) == len(LARGE_LOGITS)
    assert {row.diagnosis for row in rows} == {"maximum-not-subtracted"}


@pytest.mark.parametrize(
    ("diagnosis", "axes"), [("output-heads-and-rows-swapped", "1, 2"), ("output-rows-and-columns-swapped", "2, 3")]
)
def test_an_output_with_swapped_axes_is_the_only_cause(diagnosis: str, axes: str, tmp_path: Path) -> None:
    rows = failing_rows(tmp_path, PLAIN, output=f"output.swapaxes({axes}).reshape(output.shape)")
    assert {row.diagnosis for row in rows} == {diagnosis}
