"""Scripts for bug reports: they need no attncheck, and find what the harness found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attncheck.harness.cli import app

PLAIN = "attention/every-dimension-is-different-and-none-is-forgotten"


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Write a script and run it where attncheck cannot be imported."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(
        "import sys\nsys.modules['attncheck'] = None\n", encoding="utf-8"
    )

    def run(case: str, implementation: str, dtype: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "repro.py"
        result = CliRunner().invoke(app, ["repro", case, implementation, "--dtype", dtype, "--output", str(path)])
        assert result.exit_code == 0, result.output
        return subprocess.run(
            [sys.executable, path],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(tmp_path / "blocked")},
            check=False,
        )

    return run


def test_what_agrees_is_right_in_the_script_too(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(PLAIN, "numpy", "float64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right; at [") == 5


def test_an_own_function_that_is_wrong_is_wrong_in_the_script_too(
    tmp_path: Path, script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        "def attention(query, key, value):\n    return query[..., :1] * value[..., :1, :]\n", encoding="utf-8"
    )
    done = script(PLAIN, f"{kernel}:attention", "float32")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "output: WRONG; at [" in done.stdout


@pytest.mark.torch
def test_a_frameworks_script_carries_its_code(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(PLAIN, "torch.sdpa", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output: right; at [" in done.stdout
