"""What the soundness campaign leaves out, and what it writes down and counts."""

import importlib
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest

from attncheck.judging.xfail import reason_for
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.searching.problems import Draw, draw_problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_unit_without_rows_is_done_too(tmp_path: Path) -> None:
    rows = importlib.import_module("soundness_rows")
    files = importlib.import_module("soundness_parts")
    parts = files.Parts(tmp_path, ["float16"], 3)
    for number in range(3):
        parts.add(rows.Unit(number, "float16"), [])
    assert [path.name for path in parts.files] == ["part-000000-000002.csv"]
    assert files.Parts(tmp_path, ["float16"], 4).missing == [3]


def test_a_mean_over_few_causes_is_not_shown() -> None:
    rows, tables = importlib.import_module("soundness_rows"), importlib.import_module("soundness_table")
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
    drawn = [draw_problem(Draw(1, 40, "attention_gradients"), number) for number in range(800)]
    expected = [{"causal", "negative scale"} <= set(problem.asked.split(" + ")) for problem in drawn]
    assert any(expected)
    for implementation, excused in (("torch.sdpa", expected), ("torch.eager", [False] * len(drawn))):
        found = [reason_for(known, implementation, each.id, "float32", "output", "nonfinite") for each in drawn]
        assert [each is not None for each in found] == excused
