"""The benchmark of the search's power: it finds faults, and says what it did not find."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from attncheck.mutation.catalogue import MUTANTS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("power")


def test_what_a_few_problems_find_is_counted(
    power: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert power.main(["--seeds", "1,2", "--problems", "12", "--output", str(tmp_path)]) == 1  # some are not found
    printed = capsys.readouterr().out
    assert "seed 1: " in printed
    assert "not found: " in printed
    with (tmp_path / "power.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 300
    assert {row["mutant"] for row in rows} < {each.name for each in MUTANTS}
    assert all(1 <= int(row["problems"]) <= 12 for row in rows)
    assert len({(row["mutant"], row["seed"]) for row in rows}) == len(rows)
    assert "| all | " in printed
    assert "+" in (tmp_path / "power.md").read_text(encoding="utf-8")


def test_a_problem_finds_a_fault_that_it_reaches_and_no_right_variant(power: ModuleType) -> None:
    scale = [each for each in MUTANTS if each.topic == "scale"]
    found = list(power.search_for_all(3, 60.0, 400, scale))
    assert len(found) > 0.8 * len(scale)
    assert [each.problems for each in found] == sorted(each.problems for each in found)
