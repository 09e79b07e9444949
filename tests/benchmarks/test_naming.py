"""Faults of another hand are named by what they are, or not at all."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOME = ("right", "mask strict", "no scale", "bias twice", "mask behind softmax", "second key twice", "relu for exp")


@pytest.fixture
def naming(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("naming")
    monkeypatch.setattr(module, "FAULTS", {fault: module.FAULTS[fault] for fault in SOME})
    return module


CASES = ["attention/a-bias-per-head-*", "attention/a-causal-row-sees-*", "attention/padding-of-different-length-*"]


def test_faults_are_named_rightly_or_not_at_all(naming: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert naming.main(CASES) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 right, 4 rightly, 2 not named"


def test_a_wrong_name_is_counted_as_one(
    naming: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "FAULTS", {"no scale": "scale-twice"})
    assert naming.main(CASES[:2]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 wrongly"
