"""Curves of a campaign: the middle and the largest error by powers of two, and nothing from what was not judged."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soundness_curves")


def rows(**fields: Any) -> pd.DataFrame:
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
    return pd.DataFrame([{**common, "ratio": r, "scores": s, **fields} for r, s in zip(ratios, scores, strict=True)])


def test_errors_are_put_together_by_powers_of_two(module: ModuleType) -> None:
    (curve,) = module.curves(module.measured(rows()), "keys")
    assert (curve.dtype, curve.places) == ("float32", (16.0, 64.0))
    assert curve.middle == pytest.approx((0.2, 0.8))
    assert curve.largest == pytest.approx((0.3, 0.9))


@pytest.mark.parametrize("fields", [{"verdict": "numeric"}, {"stage": ""}, {"tier": ""}, {"width": 0}])
def test_what_was_not_judged_or_is_not_known_has_no_place(module: ModuleType, fields: dict[str, Any]) -> None:
    assert module.curves(module.measured(rows(**fields)), "width") == []


def test_scores_near_zero_make_one_place(module: ModuleType) -> None:
    (curve,) = module.curves(module.measured(rows(largest_score=1e-30)), "largest_score")
    assert curve.places == (2.0**-10,)


def test_every_implementation_has_a_picture_that_is_told_in_words(module: ModuleType, tmp_path: Path) -> None:
    both = pd.concat([rows(), rows(implementation="own/kernel.py")])
    paths = module.write_plots(both, tmp_path / "plots")
    assert [path.name for path in paths] == ["numpy.eager.svg", "own-kernel.py.svg"]
    label = ElementTree.parse(paths[0]).getroot().attrib["aria-label"]
    assert "Over sequence length (keys) in float32, from 0.2 at 16 to 0.8 at 64, at most 0.9." in label
