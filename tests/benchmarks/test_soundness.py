"""A small soundness campaign: quiet on NumPy, and able to fail."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAULTY = """
from attncheck.backends import numpy_backend
from attncheck.backends.numpy_backend import *

def attention(query, key, value, **options):
    stages = numpy_backend.attention(query, key, value, **options)
    stages["output"] = stages["output"] * (1 + 1e-4)
    return stages
"""

Campaign = Callable[..., int]


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Campaign:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = importlib.import_module("soundness").main

    def run(*arguments: str) -> int:
        code: int = main(["--cases", "20", "--backend", "numpy", "--output", str(tmp_path / "results"), *arguments])
        return code

    return run


def test_a_correct_implementation_raises_no_alarm(
    campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert campaign() == 0
    assert "None." in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "results" / "table.csv")
    assert set(table["dtype"]) == {"float64", "float32"}
    assert (table["evaluations"] == 20).all()
    assert (table["elements"] > 0).all()
    assert not table[["T1", "T2"]].any(axis=None)


def test_a_campaign_that_is_done_is_read_again_and_not_run(campaign: Campaign, tmp_path: Path) -> None:
    assert campaign("--dtype", "float32", "--cases", "3") == 0
    part = next(tmp_path.glob("results/parts/part-*.csv"))
    before = part.stat().st_mtime_ns
    first = (tmp_path / "results" / "soundness.md").read_bytes()
    assert campaign("--dtype", "float32", "--cases", "3") == 0
    assert part.stat().st_mtime_ns == before
    assert (tmp_path / "results" / "soundness.md").read_bytes() == first


def test_another_campaign_in_the_same_folder_is_refused(campaign: Campaign) -> None:
    campaign("--dtype", "float32", "--cases", "1")
    with pytest.raises(SystemExit, match="holds another campaign"):
        campaign("--dtype", "float32", "--cases", "1", "--seed", "2")


def test_a_faulty_implementation_is_named_with_what_reproduces_it(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faulty_backend.py").write_text(FAULTY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert campaign("--dtype", "float32", "--module", "faulty_backend", "--cases", "10") == 1
    alarms = pd.read_csv(tmp_path / "results" / "alarms.csv")
    failing = alarms[alarms["verdict"] == "numeric"]
    assert set(failing["implementation"]) == {"faulty_backend.eager"}
    assert set(failing["stage"]) == {"output"}
    number = failing["number"].iloc[0]
    command = f"python benchmarks/soundness.py --seed 1 --module faulty_backend --only {number}"
    assert command in capsys.readouterr().out
    assert campaign("--dtype", "float32", "--module", "faulty_backend", "--only", str(number)) == 1
