"""One fault of a kernel is one cause, in small cases and in large ones of which some rows are judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from here import own_code_here

from attncheck import check

KERNEL = """\
import numpy as np


def attention(query, key, value):
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray({scale}, query.dtype)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    return weights / weights.sum(axis=-1, keepdims=True) @ value
"""
CASES = ["probes/rounding/*", "kernel_shapes/lengths/hundreds-of-queries-and-keys"]


@pytest.mark.parametrize(
    ("scale", "diagnosis"), [("(3 * query.shape[-1]) ** -0.5", "scale-inverse-root-of-3D"), ("0.125", "scale-fitted")]
)
def test_a_wrong_scale_is_the_only_cause(scale: str, diagnosis: str, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(KERNEL.format(scale=scale), encoding="utf-8")
    with own_code_here():
        result = check(f"{kernel}:attention", cases=CASES, dtypes=["float64", "float32"])
    failing = [row for row in result.failures if row.comparison == "stage"]
    assert any(row.judged_rows for row in failing), "no large case fails"
    assert {row.diagnosis for row in failing} == {diagnosis}
