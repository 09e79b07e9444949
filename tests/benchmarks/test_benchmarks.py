"""Small runs of the benchmarks: each finds what it should, counts it, and is able to fail."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from here import own_code_here
from tables import tables_beside

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Load = Callable[[str], ModuleType]
Campaign = Callable[..., int]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module of the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def load_gate(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module of ``benchmarks/gate_kernels``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gate_kernels"))
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


def test_the_text_that_each_fault_of_the_harness_replaces_is_there_once(load: Load) -> None:
    faults = load("harness_faults").FAULTS
    texts = {fault.file: (BENCHMARKS.parent / fault.file).read_text(encoding="utf-8") for fault in faults}
    assert [fault.name for fault in faults if texts[fault.file].count(fault.old) != 1] == []


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


# Faults where several things meet.


def test_faults_that_cases_meet_are_red_and_right_kernels_are_not_flagged(
    load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    combined, combinations = load("combined"), load("combinations")
    never = combinations.When(lambda call: False)
    lost = combinations.lost("sinks")
    faults = {
        "sinks are lost": combinations.Fault(combinations.given("sinks"), lost),
        "nothing": combinations.Fault(combinations.given("sinks"), lambda call: call.again()),
        "never": combinations.Fault(never, lost),
    }
    monkeypatch.setattr(combined, "FAULTS", faults)
    monkeypatch.setattr(combined, "KERNELS", dict(list(combined.KERNELS.items())[:5]))
    assert combined.main(["sinks/*"]) == 1
    printed = capsys.readouterr().out
    cases = combined.select_cases(["sinks/*"]).cases
    given = sum(case.operation == "attention" and "sinks" in case.inputs for case in cases)
    assert f"of {given:4} cases that meet it: sinks are lost" in printed
    assert f"0 red of {given:4} cases that meet it: nothing" in printed
    assert "0 red of    0 cases that meet it: never" in printed
    assert "3 faults: 1 are red" in printed
    assert "5 right kernels: 0 are flagged" in printed

    monkeypatch.setattr(combined, "FAULTS", {"sinks are lost": faults["sinks are lost"]})
    monkeypatch.setattr(combined, "KERNELS", {"wrong": load("combined_kernels").Kernel(lost)})
    assert combined.main(["sinks/*"]) == 1
    assert "1 right kernels: 1 are flagged" in capsys.readouterr().out


def test_a_kernel_that_keeps_a_scale_is_red_beside_its_neighbours(
    load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    combined, operations = load("combined"), load("combined_operations")
    name = next(each for each in operations.STATE if "without its scale" in each)
    monkeypatch.setattr(combined, "FAULTS", {name: operations.STATE[name]})
    monkeypatch.setattr(combined, "STATE", {name: operations.STATE[name]})
    monkeypatch.setattr(combined, "KERNELS", {})
    assert combined.main(["attention/*", "probes/scale_and_bias/*", "softcap/*"]) == 0
    assert "1 faults: 1 are red" in capsys.readouterr().out


# Kernels that misbehave although their numbers are right.


def test_the_catalogue_lists_each_gate_kernel_once_with_a_known_behaviour(load_gate: Load) -> None:
    catalogue = load_gate("catalogue")
    of_catalogue = (catalogue.MISBEHAVING, catalogue.RIGHT_KERNELS, catalogue.FOR_BAD_INPUTS, catalogue.ILLUSIONS)
    kernels = list(chain.from_iterable(of_catalogue))
    assert len(kernels) == len(set(kernels)) == 60 + 60 + 4 + 7
    assert {kernel.behaviour for kernel in kernels} == {catalogue.RIGHT, *catalogue.BEHAVIOURS}
    for kernel in kernels:
        text = (catalogue.FOLDER / kernel.file).read_text(encoding="utf-8")
        assert kernel.kind == "program" or f"\ndef {kernel.name}(" in text, kernel.target


def test_a_tolerance_passes_right_kernels_and_many_that_misbehave(
    load_gate: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allclose = load_gate("allclose")
    monkeypatch.setattr(allclose, "TRIALS", 1)
    assert allclose.main(["--kind", "numpy"]) == 0
    counts = {line[:38].strip(): line[38:].split() for line in capsys.readouterr().out.splitlines()}
    assert counts["right, numpy"] == ["20", "20", "20"]
    assert counts["reuses-output-buffer"] == ["3", "3", "3"]
    assert counts["returns-before-finished"] == ["2", "1", "1"]
