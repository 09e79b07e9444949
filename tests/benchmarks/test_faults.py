"""A small campaign of injected faults: it finds everything as planned, and can find it otherwise."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="faults are injected as Linux has them")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("faults")


def test_a_small_campaign_finds_all_as_planned_and_says_so_where_it_is_not(
    faults: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = faults.faulty_attention.KINDS
    few = ("exit with last words", "exception", "fork that comes back", "folder deleted")
    monkeypatch.setattr(faults.faulty_attention, "KINDS", {name: kinds[name] for name in few})
    arguments = ["--faults", "6", "--kills", "2", "--longest", "2", "--output", str(tmp_path / "out"), "softmax"]
    assert faults.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "6 faults injected and 2 times killed; 6 as planned\n" in printed
    assert "no row missing, none double, none different" in printed

    # The same results, held against another plan: of one fault less, and of one of another kind.
    plan = faults.draw_plan(["softmax"], 6, faults.random.Random(1))
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
