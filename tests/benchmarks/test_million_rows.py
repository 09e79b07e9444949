"""The drawn results directory: what the reader takes, of the size that is asked for, the same each time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from attncheck.merge import merge_runs
from attncheck.reports.frames import expected_failures, failing
from attncheck.reports.making import make_frames
from attncheck.reports.markdown.report import render_markdown
from attncheck.results.reader import read_run

PATH = Path(__file__).parents[2] / "benchmarks" / "million_rows.py"


@pytest.fixture(scope="module")
def million_rows() -> ModuleType:
    spec = importlib.util.spec_from_file_location("million_rows", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_drawn_run_is_read_and_reported(million_rows: ModuleType, tmp_path: Path) -> None:
    for name in ("one", "two"):
        arguments = [str(tmp_path / name), "--cases", "50", "--implementations", "3", "--dtypes", "2", "--pairs", "2"]
        assert million_rows.main(arguments) == 0
    run = read_run(tmp_path / "one")
    assert run.notes == ()
    assert len(run.rows) == 50 * 3 * 2 * (4 + 2 + 3)
    assert run.rows.equals(read_run(tmp_path / "two").rows)
    frames = make_frames(merge_runs([run]))
    assert len(failing(frames.results)) > 0
    assert len(expected_failures(frames.results)) > 0
    assert "50 cases on 3 implementations in float64 and float32: 300 evaluations" in render_markdown(frames)
