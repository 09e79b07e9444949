"""Scales that are taken for others: the common ones, and one that is fitted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.judging.residuals import fit_scale, has_scale, other_scales, scale_of, scales_in_words, shortest
from attncheck.reading.lowering import AttentionProblem

INPUTS = {"query": np.zeros((2, 4, 3, 16)), "key": np.zeros((2, 4, 5, 16)), "value": np.zeros((2, 4, 5, 9))}
HEADS = {
    "query": np.zeros((2, 3, 64)),
    "query_weight": np.zeros((64, 32)),
    "value_weight": np.zeros((64, 18)),
}


@pytest.mark.parametrize(
    ("operation", "options", "inputs", "scale"),
    [
        ("attention", {}, INPUTS, 0.25),
        ("attention", {"scale": 0.5}, INPUTS, 0.5),
        ("scoring", {"score": "dot"}, INPUTS, 1.0),
        ("scoring", {"score": "scaled_dot"}, INPUTS, 0.25),
        ("scoring", {"score": "cosine"}, INPUTS, 1.0),
        ("multi_head_attention", {"heads": 2, "kv_heads": 1}, HEADS, 0.25),
    ],
)
def test_the_scale_that_a_case_means(
    operation: str, options: dict[str, Any], inputs: dict[str, NDArray[Any]], scale: float
) -> None:
    assert scale_of(operation, AttentionProblem(dict(options), inputs)) == scale
    assert has_scale(operation, AttentionProblem(dict(options), inputs))


def test_what_has_no_scale() -> None:
    for operation, options in (("softmax", {}), ("masking", {}), ("scoring", {"score": "general"})):
        assert not has_scale(operation, AttentionProblem(dict(options), {}))


def test_the_common_mistakes_come_once_each_and_without_the_right_one() -> None:
    found = [scale for scale, _ in other_scales("attention", AttentionProblem({}, INPUTS))]
    assert found[0] == 1.0
    assert len(found) == len(set(found))
    # 1/2 is twice the right one and its root, too.
    assert set(found) == {1.0, 1 / 16, 4.0, 1 / 3, 1 / 8, 0.5, -0.25, 0.25 / math.log(2), 0.25 * math.log(2)}
    given = dict(other_scales("attention", AttentionProblem({"scale": 0.5}, INPUTS)))
    # Half of a scale that is 1/2 is the default.
    assert given[0.25] == {
        "scale-default": "the default 1/sqrt(D)",
        "scale-twice": "twice the same factor",
        "scale-halved": "half as large",
    }
    assert given[0.125]["scale-times-default"] == "the given one times 1/sqrt(D)"


def test_of_several_heads_the_widths_are_those_of_one() -> None:
    found = dict(other_scales("multi_head_attention", AttentionProblem({"heads": 2, "kv_heads": 1}, HEADS)))
    assert found[1 / 8] == {"scale-inverse-root-of-E": "1/sqrt(E)", "scale-halved": "half as large"}
    assert found[1 / math.sqrt(18)] == {"scale-inverse-root-of-Dv": "1/sqrt(Dv)"}


@pytest.mark.parametrize("wanted", [0.31, -0.2, 3.0, 1e-2])
def test_a_scale_is_fitted_to_float64s_accuracy(wanted: float) -> None:
    slopes = np.array([0.3, -1.2, 2.0, 0.7])
    fitted = fit_scale(lambda scale: np.tanh(scale * slopes) - np.tanh(wanted * slopes), 0.35)
    assert fitted == pytest.approx(wanted, rel=4e-16)


def test_what_depends_on_no_scale_has_no_best_one() -> None:
    assert fit_scale(lambda scale: np.ones(3), 0.35) is None
    assert fit_scale(lambda scale: np.full(3, scale - 1e6), 0.35) is None
    assert fit_scale(lambda scale: np.full(3, np.nan), 0.35) is None


@pytest.mark.parametrize(
    ("scale", "short"), [(0.31 + 1e-9, 0.31), (0.31 + 1e-4, 0.3101), (1e-9, 0.0), (-0.2, -0.2), (1 / 3, 0.333333)]
)
def test_the_shortest_number_that_is_near_enough(scale: float, short: float) -> None:
    assert shortest(scale, 2e-6, 0.35) == short


def test_scales_that_look_alike_get_more_digits() -> None:
    assert scales_in_words(0.31, 0.35355339) == ["0.31", "0.3536"]
    assert scales_in_words(0.353553, 0.35355339) == ["0.353553", "0.35355339"]
