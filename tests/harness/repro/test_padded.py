"""Scripts of padded calls: what was called stands in them, and what is dropped again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attncheck.cli import app

Done = subprocess.CompletedProcess[str]
CASE = "attention/every-dimension-is-different-and-none-is-forgotten"
RESTRICTED = """
import numpy as np


def attention(query, key, value, *, mask=None, scale=None):
    assert query.shape[-1] % 8 == 0 and query.shape[-1] == value.shape[-1]
    assert query.shape[-2] % 16 == 0 and key.shape[-2] % 16 == 0
    scores = query @ key.mT * np.asarray(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return {"weights": weights, "output": weights @ value}


attention.requires = {
    "width_multiple": 8, "value_width": "equal", "query_length_multiple": 16, "key_length_multiple": 16
}
"""


def written(folder: Path, name: str, code: int) -> str:
    path = folder / "written.py"
    result = CliRunner().invoke(app, ["repro", CASE, name, "--output", str(path)])
    assert result.exit_code == code, result.output
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("was", "instead", "says"),
    [
        ("return {", "return {", ""),
        ("weights @ value}", "2 * weights @ value}", "output is WRONG"),
        ("scores, -np.inf)", "scores, -3)", "weights gives"),  # masked keys have weights
    ],
    ids=["right", "wrong", "wrong in what was added"],
)
def test_a_script_makes_the_padded_call_and_finds_what_the_harness_found(
    tmp_path: Path, kernel: Callable[..., str], run_script: Callable[[str], Done], was: str, instead: str, says: str
) -> None:
    text = written(tmp_path, f"{kernel(RESTRICTED.replace(was, instead))}:attention", 0)
    assert "It makes one call, padded with zero columns (" in text
    assert "scale=" in text
    assert '"weights": KeptElements(' in text
    done = run_script(text)
    assert done.returncode == bool(says), done.stdout + done.stderr
    assert says in done.stdout
    assert "AssertionError" not in done.stderr


def test_no_script_is_written_of_what_cannot_be_padded(tmp_path: Path, kernel: Callable[..., str]) -> None:
    path = kernel(RESTRICTED.replace("mask=None, scale=None", "mask=None").replace("if scale is None else scale", ""))
    result = CliRunner().invoke(app, ["repro", CASE, f"{path}:attention", "--output", str(tmp_path / "written.py")])
    assert "unsupported: takes no scale, which has to be given where the width is padded" in str(result.exception)
