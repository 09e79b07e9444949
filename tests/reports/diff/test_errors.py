"""Errors that grew: twice as much and beyond rounding noise, and nothing that another order of summation explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from attncheck.judging.tiers import noise_limit, threshold
from attncheck.reports.diff.errors import error_changes

Stage = Callable[..., pd.DataFrame]


@pytest.fixture
def stage() -> Stage:
    """Return a frame of one stage of 2x2x16x16 = 1024 elements."""

    def make(**fields: Any) -> pd.DataFrame:
        standard = {
            "environment": "here",
            "implementation": "numpy.eager",
            "case": "file/one",
            "dtype": "float32",
            "stage": "weights",
            "shape": "2x2x16x16",
            "ratio": 0.01,
            "tier": "within",
            "largest_z": 1.0,
            "mean_z": 0.3,
            "introduced_tier": "within",
            "introduced_ratio": 0.01,
            "introduced_z": 1.0,
        }
        return pd.DataFrame([standard | fields])

    return make


LIMIT = noise_limit(1024)


def test_the_limit_of_noise_is_that_of_the_third_tier() -> None:
    assert noise_limit(1) == 3.0  # lambda(1) / 2 = sqrt(2 ln(2e6)) / 2 = 2.69
    assert threshold(1024) / 2 == pytest.approx(3.2742, abs=1e-4)  # ln(2 1024 / 1e-6) = 7.6246 + 13.8155
    assert threshold(1024) / 2 == LIMIT


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({}, {}, []),
        ({"largest_z": 1.0}, {"largest_z": LIMIT}, []),  # rounding noise still
        ({"largest_z": 1.0}, {"largest_z": LIMIT + 0.01}, ["grew"]),
        ({"largest_z": LIMIT + 0.01}, {"largest_z": 1.0}, ["shrank"]),
        ({"largest_z": 2.0}, {"largest_z": 3.9}, []),  # beyond noise, and not twice as much
        ({"largest_z": 2.0}, {"largest_z": 4.1}, ["grew"]),
        ({"ratio": 0.01}, {"ratio": 0.99}, []),  # a bound of one rounding is reached by one rounding
        ({"largest_z": 0.1}, {"largest_z": 1.5}, []),
        ({"introduced_z": 1.0}, {"introduced_z": 4.0}, ["grew"]),
        ({"mean_z": 0.3}, {"mean_z": 0.7, "tier": "warning"}, ["grew"]),
        ({"mean_z": 0.5}, {"mean_z": 0.7, "tier": "warning"}, []),
        ({"mean_z": 0.7, "tier": "warning"}, {"mean_z": 0.3}, ["shrank"]),
        ({"largest_z": 50.0, "tier": "proven"}, {"largest_z": 200.0, "tier": "proven"}, ["grew"]),
        ({"largest_z": 50.0, "tier": "proven"}, {"largest_z": 60.0, "tier": "proven"}, []),
        ({"largest_z": 1.0}, {"largest_z": float("inf"), "tier": "proven"}, ["grew"]),
        ({"largest_z": float("nan")}, {"largest_z": 9.0}, []),  # was not measured
    ],
)
def test_an_error_grew_where_it_doubled_and_is_beyond_noise(
    before: dict[str, Any], after: dict[str, Any], changes: list[str], stage: Stage
) -> None:
    assert list(error_changes(stage(**before), stage(**after))["change"]) == changes


def test_a_stage_has_one_line_with_the_measure_in_which_it_is_larger(stage: Stage) -> None:
    (row,) = error_changes(stage(), stage(largest_z=5.0, introduced_z=7.0, introduced_ratio=0.4)).to_dict("records")
    assert (row["measure"], row["before_z"], row["after_z"]) == ("introduced", 1.0, 7.0)
    assert (row["before_ratio"], row["after_ratio"]) == (0.01, 0.4)


def test_a_scalar_and_what_has_no_shape_are_compared_or_not(stage: Stage) -> None:
    assert len(error_changes(stage(shape="scalar"), stage(shape="scalar", largest_z=3.1))) == 1
    assert error_changes(stage(shape=None), stage(shape=None, largest_z=3.1)).empty


def test_the_largest_comes_first(stage: Stage) -> None:
    before = pd.concat([stage(case=name) for name in "abc"])
    after = pd.concat([stage(case=name, largest_z=z) for name, z in (("a", 4.0), ("b", 8.0), ("c", 6.0))])
    assert list(error_changes(before, after)["case"]) == ["b", "c", "a"]
