"""A small soundness campaign: quiet on NumPy, able to fail, and able to tell what is known from what is wrong."""

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
UNIFORM = """
import numpy as np
from attncheck.backends import numpy_backend

def attention(query, key, value, **options):
    stages = numpy_backend.attention(query, key, value, **options)
    keys = np.concatenate([options[name] for name in ("past_value",) if name in options] + [value], axis=-2)
    keys = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)
    empty = stages["log_sum_exp"][..., None] == -np.inf
    return {"output": np.where(empty, keys.mean(axis=-2, keepdims=True), stages["output"])}
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


def own(folder: Path, text: str) -> str:
    """Write an implementation of one's own and name it for the command line."""
    path = folder / "own_backend.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_correct_implementation_raises_no_alarm(
    campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert campaign() == 0
    assert "None." in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "results" / "table.csv")
    assert set(table["dtype"]) == {"float64", "float32"}  # NumPy declares nothing in 16 bits
    assert (table["evaluations"] == 20).all()
    assert (table["elements"] > 0).all()
    assert not table[["proven", "statistical"]].any(axis=None)


def test_only_one_operation_may_be_drawn(campaign: Campaign, tmp_path: Path) -> None:
    assert campaign("--operation", "attention_gradients", "--cases", "6", "--dtype", "float32") == 0
    rows = pd.concat(map(pd.read_csv, tmp_path.glob("results/parts/part-*.csv")))
    assert set(rows["operation"]) == {"attention_gradients"}
    assert {"grad_query", "grad_key", "grad_value"} <= set(rows["stage"])


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
    with pytest.raises(SystemExit, match="holds another campaign"):
        campaign("--dtype", "float32", "--cases", "1", "--pool", "7")


def test_an_implementation_that_is_not_there_is_refused(campaign: Campaign) -> None:
    with pytest.raises(SystemExit, match=r"no implementation is called 'numpy\.fast'"):
        campaign("--implementation", "numpy.fast")


def test_a_faulty_implementation_is_named_with_what_reproduces_it(
    campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = own(tmp_path, FAULTY)
    options = ("--dtype", "float32", "--operation", "attention", "--pool", "30", "--implementation", faulty)
    assert campaign("--cases", "5", *options) == 1
    alarms = pd.read_csv(tmp_path / "results" / "alarms.csv")
    failing = alarms[alarms["verdict"] == "numeric"]
    assert set(failing["implementation"]) == {"own_backend.module"}
    assert set(failing["stage"]) == {"output"}
    number = failing["number"].iloc[0]
    command = "python benchmarks/soundness.py --seed 1 --pool 30 --operation attention --implementation"
    assert f"{command} {faulty} --only {number}`" in capsys.readouterr().out
    assert campaign(*options, "--only", str(number)) == 1


@pytest.mark.parametrize(("declared", "code"), [("conventions = {'empty_rows': 'uniform'}", 0), ("", 1)])
def test_a_convention_is_no_alarm_where_it_is_declared(
    campaign: Campaign, tmp_path: Path, declared: str, code: int
) -> None:
    options = ("--dtype", "float32", "--operation", "attention", "--cases", "25")
    assert campaign(*options, "--implementation", own(tmp_path, UNIFORM + declared)) == code
    rows = pd.concat(map(pd.read_csv, tmp_path.glob("results/parts/part-*.csv")))
    other = rows[rows["verdict"] == "semantic"]
    assert len(other)  # there are rows without a key
    assert other["xfail"].all() == (code == 0)
    alarms = pd.read_csv(tmp_path / "results" / "alarms.csv")
    assert len(alarms) == (0 if code == 0 else len(other))
