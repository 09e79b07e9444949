"""Small runs of the benchmarks: each finds what it should, counts it, and is able to fail."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from here import own_code_here
from tables import tables_beside

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
    assert (run.notes, len(run.rows)) == ((), 50 * 3 * 2 * (4 + 2 + 3))
    assert run.rows.equals(read_run(tmp_path / "two").rows)
    frames = make_frames(merge_runs([run]))
    assert min(len(failing(frames.results)), len(expected_failures(frames.results))) > 0
    assert "50 cases on 3 implementations in float64 and float32: 300 evaluations" in render_markdown(frames)


SOME = ("right", "mask strict", "no scale", "bias twice", "mask behind softmax", "second key twice", "relu for exp")
CASES = ["attention/a-bias-per-head-*", "attention/a-causal-row-sees-*", "attention/padding-of-different-length-*"]


def test_wrong_names_count(load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    naming = load("naming")
    rightly = "1 right, 4 rightly, 2 not named"
    some = {fault: naming.FAULTS[fault] for fault in SOME}
    for faults, pairs, cases, code, lines in (
        (some, [("no scale", "bias twice")], CASES, 0, [f"1 fault: {rightly}", "2 faults: 1 not named"]),
        ({"no scale": "scale-twice"}, [], CASES[:2], 1, ["1 fault: 1 wrongly"]),
    ):
        monkeypatch.setattr(naming, "FAULTS", faults)
        monkeypatch.setattr(naming, "PAIRS", pairs)
        assert naming.main(cases) == code
        assert capsys.readouterr().out.splitlines()[-len(lines) :] == lines


def test_what_a_few_problems_find_is_counted(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    power = load("power")
    mutants = [each for each in MUTANTS if each.topic == "scale"]
    monkeypatch.setattr(power, "search_for_all", partial(power.search_for_all, mutants=mutants))
    assert power.main(["--seeds", "1,2", "--problems", "40", "--output", str(tmp_path)]) == 1  # some are not found
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("seed 1: ", "not found: ", "| all | "))
    rows = pd.read_csv(tmp_path / "power.csv")
    assert len(rows) > 0.6 * 2 * len(mutants)
    assert set(rows["mutant"]) <= {each.name for each in mutants}
    assert rows["problems"].between(1, 40).all()
    assert not rows[["mutant", "seed"]].duplicated().any()
    assert all(own["problems"].is_monotonic_increasing for _, own in rows.groupby("seed"))
    assert "+" in (tmp_path / "power.md").read_text(encoding="utf-8")


# Soundness.

KERNELS = tables_beside(__file__)
FLOAT32 = ("--dtype", "float32", "--operation", "attention")


@pytest.fixture
def campaign(load: Load, tmp_path: Path) -> Iterator[Campaign]:
    main = load("soundness").main

    def run(*arguments: str, own: str = "") -> int:
        """Run a campaign, of somebody's own implementation where its source is given."""
        path = tmp_path / "own_backend.py"
        path.write_text(own, encoding="utf-8")
        chosen = ["--implementation", str(path)] if own else []
        standard = ["--cases", "8", "--backend", "numpy", "--output", str(tmp_path / "results")]
        return int(main([*standard, *arguments, *chosen]))

    with own_code_here():
        yield run


def parts_of(folder: Path) -> pd.DataFrame:
    return pd.concat(map(pd.read_csv, folder.glob("results/parts/part-*.csv")))


def test_correct_code_raises_no_alarm(campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign() == 0
    assert "None." in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "results" / "table.csv")
    assert set(table["dtype"]) == {"float64", "float32"}  # NumPy declares nothing in 16 bits
    assert ((table["evaluations"] == 8) & (table["elements"] > 0)).all()
    assert not table[["proven", "statistical"]].any(axis=None)


def test_a_campaign_is_as_asked_read_again_and_refuses_another(campaign: Campaign, tmp_path: Path) -> None:
    asked, found = ("--operation", "attention_gradients", "--cases", "3", "--dtype", "float32"), []
    for _ in range(2):
        assert campaign(*asked) == 0
        part, report = next(tmp_path.glob("results/parts/part-*.csv")), tmp_path / "results" / "soundness.md"
        found.append((part.stat().st_mtime_ns, report.read_bytes()))
    assert found[0] == found[1]
    rows = parts_of(tmp_path)
    assert set(rows["operation"]) == {"attention_gradients"}
    assert {"grad_query", "grad_key", "grad_value"} <= set(rows["stage"])
    for other in (("--seed", "2"), ("--pool", "7")):
        with pytest.raises(SystemExit, match="holds another campaign"):
            campaign(*asked, *other)
    with pytest.raises(SystemExit, match=r"no implementation is called 'numpy\.fast'"):
        campaign("--implementation", "numpy.fast")


def test_faulty_code_is_reproduced(campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*FLOAT32, "--pool", "30")
    assert campaign("--cases", "5", *options, own=KERNELS["faulty"]) == 1
    alarms = pd.read_csv(tmp_path / "results" / "alarms.csv")
    wrong = alarms[alarms["verdict"] == "numeric"]
    assert set(zip(wrong["implementation"], wrong["stage"], strict=True)) == {("own_backend.module", "output")}
    number = wrong["number"].iloc[0]
    command = "python benchmarks/soundness.py --seed 1 --pool 30 --operation attention --implementation"
    assert f"{command} {tmp_path / 'own_backend.py'} --only {number}`" in capsys.readouterr().out
    assert campaign(*options, "--only", str(number), own=KERNELS["faulty"]) == 1


@pytest.mark.parametrize(("declared", "code"), [("conventions = {'empty_rows': 'uniform'}", 0), ("", 1)])
def test_a_declared_convention_is_no_alarm(campaign: Campaign, tmp_path: Path, declared: str, code: int) -> None:
    assert campaign(*FLOAT32, "--cases", "16", own=KERNELS["uniform"] + declared) == code
    rows = parts_of(tmp_path)
    other = rows[rows["verdict"] == "semantic"]
    assert len(other)  # there are rows without a key
    assert other["xfail"].all() == (code == 0)
    assert len(pd.read_csv(tmp_path / "results" / "alarms.csv")) == (0 if code == 0 else len(other))


def test_errors_are_put_together_by_powers_of_two_and_drawn_with_words(load: Load, tmp_path: Path) -> None:
    curves = load("soundness_curves")
    common: dict[str, Any] = {"implementation": "numpy.eager", "dtype": "float32", "stage": "output"}
    common |= {"verdict": "agree", "tier": "within", "width": 8, "largest_score": 4.0}
    places = [(0.1, 16), (0.3, 16), (0.2, 16), (0.9, 64), (0.8, 64), (0.7, 64)]
    rows = pd.DataFrame([{**common, "ratio": ratio, "scores": f"1x1x2x{keys}"} for ratio, keys in places])
    (curve,) = curves.curves(curves.measured(rows), "keys")
    assert (curve.dtype, curve.places) == ("float32", (16.0, 64.0))
    assert (curve.middle, curve.largest) == (pytest.approx((0.2, 0.8)), pytest.approx((0.3, 0.9)))
    # What was not judged or is not known has no place, and scores near zero make one.
    for name, value in (("verdict", "numeric"), ("stage", ""), ("tier", ""), ("width", 0)):
        assert curves.curves(curves.measured(rows.assign(**{name: value})), "width") == []
    (curve,) = curves.curves(curves.measured(rows.assign(largest_score=1e-30)), "largest_score")
    assert curve.places == (2.0**-10,)
    paths = curves.write_plots(pd.concat([rows, rows.assign(implementation="own/kernel.py")]), tmp_path / "plots")
    assert [path.name for path in paths] == ["numpy.eager.svg", "own-kernel.py.svg"]
    label = ElementTree.parse(paths[0]).getroot().attrib["aria-label"]
    assert "Over sequence length (keys) in float32, from 0.2 at 16 to 0.8 at 64, at most 0.9." in label


def test_a_unit_without_rows_is_done_too_and_a_mean_over_few_causes_is_not_shown(load: Load, tmp_path: Path) -> None:
    rows, tables, files = load("soundness_rows"), load("soundness_table"), load("soundness_parts")
    parts = files.Parts(tmp_path, ["float16"], 3)
    for number in range(3):
        parts.add(rows.Unit(number, "float16"), [])
    assert [path.name for path in parts.files] == ["part-000000-000002.csv"]
    assert files.Parts(tmp_path, ["float16"], 4).missing == [3]
    row = rows.Row(0, "float32", "numpy.eager", "native", "attention", "normal", "nothing", True, "", "output", "agree")
    many = replace(row, tier="within", rms=0.3, elements=900, causes=30)
    few = replace(many, number=1, rms=0.9, causes=1)
    known = replace(many, number=2, rms=5.0, ratio=7.0, tier="proven", verdict="numeric", xfail=True, reason="a reason")
    frame = pd.DataFrame([asdict(each) for each in (many, few, known)])
    exact = tables.table(frame, ["dtype"]).iloc[0]
    assert [exact[name] for name in ("rms max", "tensors", "proven", "xfail")] == [0.3, 2, 0, 1]
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


def test_a_fault_of_codes_is_found_and_one_that_is_not_is_said(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traded = load("traded_faults")
    monkeypatch.setattr(traded, "CLASSES", ("fused with key int8 per 64 rows less mean",))
    few = {name: traded.FAULTS[name] for name in ("the next block's scale", "a zero point of one")}
    monkeypatch.setattr(traded, "FAULTS", few)
    assert traded.main(["--output", str(tmp_path)]) == 0
    assert "| flagged by | of 3 faults | of 1 right kernels |" in capsys.readouterr().out
    slight = {"a scale a little off": traded._scaled(lambda scales, _: scales * 1.00001)}
    monkeypatch.setattr(traded, "FAULTS", slight)
    assert traded.main(["--output", str(tmp_path)]) == 1
    assert "less mean: a scale a little off\n" in capsys.readouterr().out
