"""Small runs of the benchmarks: each finds what it should, counts it, and is able to fail."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from here import own_code_here

from attncheck.judging.xfail import reason_for
from attncheck.merge import merge_runs
from attncheck.mutation.catalogue import MUTANTS
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reports.build_frames import make_frames
from attncheck.reports.frames import expected_failures, failing
from attncheck.reports.markdown import render_markdown
from attncheck.results.reader import read_run
from attncheck.searching.problems import Draw, draw_problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Load = Callable[[str], ModuleType]
Campaign = Callable[..., int]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module of the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.skipif(sys.platform != "linux", reason="faults are injected as Linux has them")
def test_a_small_campaign_finds_all_as_planned_and_says_so_where_it_is_not(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = load("faults")
    kinds = faults.faulty_attention.KINDS
    few = ("exit with last words", "exception", "fork that comes back", "folder deleted")
    monkeypatch.setattr(faults.faulty_attention, "KINDS", {name: kinds[name] for name in few})
    arguments = ["--faults", "4", "--kills", "1", "--longest", "2", "--output", str(tmp_path / "out"), "softmax"]
    assert faults.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "4 faults injected and 1 times killed; 4 as planned\n" in printed
    assert "no row missing, none double, none different" in printed

    # The same results, compared with another plan: of one fault less, and of one of another kind.
    plan = faults.draw_plan(["softmax"], 4, faults.random.Random(1))
    undisturbed, disturbed = (object.__new__(faults.Campaign) for _ in range(2))
    undisturbed.results, disturbed.results = (
        tmp_path / "out" / name / "results" for name in ("undisturbed", "disturbed")
    )
    first = next(place for place, name in plan.items() if name == "exception")
    faults.compare(undisturbed, disturbed, {place: name for place, name in plan.items() if place != first})
    assert any("rows differ that were not hit" in complaint for complaint in faults._complaints)
    faults._complaints.clear()
    faults.table(disturbed, plan | {first: "exit with last words"})
    assert len(faults._complaints) == 1


def test_a_drawn_run_is_read_and_reported(load: Load, tmp_path: Path) -> None:
    million_rows = load("million_rows")
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


SOME = ("right", "mask strict", "no scale", "bias twice", "mask behind softmax", "second key twice", "relu for exp")


CASES = ["attention/a-bias-per-head-*", "attention/a-causal-row-sees-*", "attention/padding-of-different-length-*"]


def test_wrong_names_count(load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    naming = load("naming")
    monkeypatch.setattr(naming, "FAULTS", {fault: naming.FAULTS[fault] for fault in SOME})
    monkeypatch.setattr(naming, "PAIRS", [("no scale", "bias twice")])
    assert naming.main(CASES) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["1 fault: 1 right, 4 rightly, 2 not named", "2 faults: 1 not named"]
    monkeypatch.setattr(naming, "FAULTS", {"no scale": "scale-twice"})
    monkeypatch.setattr(naming, "PAIRS", [])
    assert naming.main(CASES[:2]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 fault: 1 wrongly"


def test_what_a_few_problems_find_is_counted(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    power = load("power")
    mutants = [each for each in MUTANTS if each.topic == "scale"]
    monkeypatch.setattr(power, "search_for_all", partial(power.search_for_all, mutants=mutants))
    assert power.main(["--seeds", "1,2", "--problems", "40", "--output", str(tmp_path)]) == 1  # some are not found
    printed = capsys.readouterr().out
    assert "seed 1: " in printed
    assert "not found: " in printed
    with (tmp_path / "power.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 0.6 * 2 * len(mutants)
    assert {row["mutant"] for row in rows} <= {each.name for each in mutants}
    assert all(1 <= int(row["problems"]) <= 40 for row in rows)
    assert len({(row["mutant"], row["seed"]) for row in rows}) == len(rows)
    for seed in "12":
        order = [int(row["problems"]) for row in rows if row["seed"] == seed]
        assert order == sorted(order)
    assert "| all | " in printed
    assert "+" in (tmp_path / "power.md").read_text(encoding="utf-8")


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


@pytest.fixture
def campaign(load: Load, tmp_path: Path) -> Iterator[Campaign]:
    main = load("soundness").main

    def run(*arguments: str) -> int:
        code: int = main(["--cases", "8", "--backend", "numpy", "--output", str(tmp_path / "results"), *arguments])
        return code

    with own_code_here():
        yield run


def own(folder: Path, text: str) -> str:
    """Write an implementation of one's own and name it for the command line."""
    path = folder / "own_backend.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_correct_code_raises_no_alarm(campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign() == 0
    assert "None." in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "results" / "table.csv")
    assert set(table["dtype"]) == {"float64", "float32"}  # NumPy declares nothing in 16 bits
    assert (table["evaluations"] == 8).all()
    assert (table["elements"] > 0).all()
    assert not table[["proven", "statistical"]].any(axis=None)


def test_a_campaign_is_as_asked_read_again_and_refuses_another(campaign: Campaign, tmp_path: Path) -> None:
    asked = ("--operation", "attention_gradients", "--cases", "3", "--dtype", "float32")
    assert campaign(*asked) == 0
    rows = pd.concat(map(pd.read_csv, tmp_path.glob("results/parts/part-*.csv")))
    assert set(rows["operation"]) == {"attention_gradients"}
    assert {"grad_query", "grad_key", "grad_value"} <= set(rows["stage"])
    part = next(tmp_path.glob("results/parts/part-*.csv"))
    before = part.stat().st_mtime_ns
    first = (tmp_path / "results" / "soundness.md").read_bytes()
    assert campaign(*asked) == 0
    assert part.stat().st_mtime_ns == before
    assert (tmp_path / "results" / "soundness.md").read_bytes() == first
    for other in (("--seed", "2"), ("--pool", "7")):
        with pytest.raises(SystemExit, match="holds another campaign"):
            campaign(*asked, *other)
    with pytest.raises(SystemExit, match=r"no implementation is called 'numpy\.fast'"):
        campaign("--implementation", "numpy.fast")


def test_faulty_code_is_reproduced(campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_declared_convention_is_no_alarm(campaign: Campaign, tmp_path: Path, declared: str, code: int) -> None:
    options = ("--dtype", "float32", "--operation", "attention", "--cases", "16")
    assert campaign(*options, "--implementation", own(tmp_path, UNIFORM + declared)) == code
    rows = pd.concat(map(pd.read_csv, tmp_path.glob("results/parts/part-*.csv")))
    other = rows[rows["verdict"] == "semantic"]
    assert len(other)  # there are rows without a key
    assert other["xfail"].all() == (code == 0)
    alarms = pd.read_csv(tmp_path / "results" / "alarms.csv")
    assert len(alarms) == (0 if code == 0 else len(other))


def rows(**changed: Any) -> pd.DataFrame:
    ratios = [0.1, 0.3, 0.2, 0.9, 0.8, 0.7]
    common = {
        "implementation": "numpy.eager",
        "dtype": "float32",
        "stage": "output",
        "verdict": "agree",
        "tier": "within",
        "width": 8,
        "largest_score": 4.0,
    }
    scores = ["1x1x2x16"] * 3 + ["1x1x2x64"] * 3
    return pd.DataFrame([{**common, "ratio": r, "scores": s, **changed} for r, s in zip(ratios, scores, strict=True)])


def test_errors_are_put_together_by_powers_of_two_and_drawn_with_words(load: Load, tmp_path: Path) -> None:
    curves = load("soundness_curves")
    (curve,) = curves.curves(curves.measured(rows()), "keys")
    assert (curve.dtype, curve.places) == ("float32", (16.0, 64.0))
    assert curve.middle == pytest.approx((0.2, 0.8))
    assert curve.largest == pytest.approx((0.3, 0.9))
    # What was not judged or is not known has no place, and scores near zero make one.
    for changed in ({"verdict": "numeric"}, {"stage": ""}, {"tier": ""}, {"width": 0}):
        assert curves.curves(curves.measured(rows(**changed)), "width") == []
    (curve,) = curves.curves(curves.measured(rows(largest_score=1e-30)), "largest_score")
    assert curve.places == (2.0**-10,)
    both = pd.concat([rows(), rows(implementation="own/kernel.py")])
    paths = curves.write_plots(both, tmp_path / "plots")
    assert [path.name for path in paths] == ["numpy.eager.svg", "own-kernel.py.svg"]
    label = ElementTree.parse(paths[0]).getroot().attrib["aria-label"]
    assert "Over sequence length (keys) in float32, from 0.2 at 16 to 0.8 at 64, at most 0.9." in label


def test_a_unit_without_rows_is_done_too(load: Load, tmp_path: Path) -> None:
    rows = load("soundness_rows")
    files = load("soundness_parts")
    parts = files.Parts(tmp_path, ["float16"], 3)
    for number in range(3):
        parts.add(rows.Unit(number, "float16"), [])
    assert [path.name for path in parts.files] == ["part-000000-000002.csv"]
    assert files.Parts(tmp_path, ["float16"], 4).missing == [3]


def test_a_mean_over_few_causes_is_not_shown(load: Load) -> None:
    rows, tables = load("soundness_rows"), load("soundness_table")
    row = rows.Row(0, "float32", "numpy.eager", "native", "attention", "normal", "nothing", True, "", "output", "agree")
    many = replace(row, tier="within", rms=0.3, elements=900, causes=30)
    few = replace(many, number=1, rms=0.9, causes=1)
    known = replace(many, number=2, rms=5.0, ratio=7.0, tier="proven", verdict="numeric", xfail=True, reason="a reason")
    frame = pd.DataFrame([{each.name: getattr(one, each.name) for each in fields(one)} for one in (many, few, known)])
    exact = tables.table(frame, ["dtype"]).iloc[0]
    assert exact["rms max"] == 0.3
    assert (exact["tensors"], exact["proven"], exact["xfail"]) == (2, 0, 1)
    assert tables.alarms(frame).empty
    assert tables.explained(frame)["reason"].tolist() == ["a reason"]


def test_a_negative_scale_on_causal_attention_is_known_of_the_flash_kernel_alone() -> None:
    known = load_expected_failures([BENCHMARKS / "soundness_expected_failures.yaml"])
    drawn = [draw_problem(Draw(1, 40, "attention_gradients"), number) for number in range(600)]
    expected = [{"is_causal", "scale negative"} <= set(problem.asked.split(" + ")) for problem in drawn]
    assert any(expected)
    for implementation, excused in (("torch.sdpa", expected), ("torch.eager", [False] * len(drawn))):
        found = [reason_for(known, implementation, each.id, "float32", "output", "nonfinite") for each in drawn]
        assert [each is not None for each in found] == excused
