"""Whether errors look like the roundings of a format."""

from __future__ import annotations

import numpy as np
import pytest

from attncheck.judging.truth import find_truth
from attncheck.judging.wrong_result import _cosine, _is_noise

RNG = np.random.default_rng(8)


def test_errors_of_a_stage_whose_exact_values_are_all_zero_are_looked_at() -> None:
    inputs = {"query": np.zeros((1, 1, 9, 4)), "key": RNG.normal(size=(1, 1, 9, 4))}
    truth = find_truth("scoring", {"scale": 1.0}, inputs, "float64", supports_statistics=True)
    returned = RNG.normal(size=(1, 1, 9, 9))
    assert _is_noise(truth, np.full((1, 1, 9, 9), 1e-16), "scores", returned)


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e300])
def test_the_angle_between_vectors_is_that_of_any_multiple(size: float) -> None:
    one, other = RNG.normal(size=5), RNG.normal(size=5)
    expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    with np.errstate(all="ignore"):
        assert _cosine(one * size, other) == pytest.approx(expected)
        assert _cosine(np.zeros(5), other) == 0
