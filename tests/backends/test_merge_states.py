"""Merging parts of attention: numbers known without a computer, invariants, empty parts, and formats of 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[Any]
Run = Callable[..., dict[str, Array]]
PARTS, BATCH, HEADS, QUERIES, WIDTH = 3, 2, 4, 5, 7


class Setting(Protocol):
    """A backend that is prepared for a dtype."""

    backend: Any
    dtype: np.dtype[Any]


def drawn(seed: int = 0, at: float = 0.0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    outputs = rng.standard_normal((PARTS, BATCH, HEADS, QUERIES, WIDTH))
    return outputs, at + 2 * rng.standard_normal((PARTS, BATCH, HEADS, QUERIES))


def test_the_stages_come_in_order_with_their_shapes_and_the_dtype(run: Run, setting: Setting) -> None:
    stages = run("merge_states", *drawn())
    assert set(stages) == {"weights", "log_sum_exp", "output"}
    assert stages["weights"].shape == (BATCH, HEADS, QUERIES, PARTS)
    assert stages["log_sum_exp"].shape == (BATCH, HEADS, QUERIES)
    assert stages["output"].shape == (BATCH, HEADS, QUERIES, WIDTH)
    assert {stage.dtype for stage in stages.values()} == {setting.dtype}


def test_parts_weigh_as_the_sums_that_their_logarithms_are_of(run: Run, unit: float) -> None:
    outputs = np.array([3.0, 0.0, 6.0]).reshape(3, 1, 1, 1, 1)
    stages = run("merge_states", outputs, np.log([1.0, 2.0, 5.0]).reshape(3, 1, 1, 1))
    np.testing.assert_allclose(stages["weights"].ravel(), [1 / 8, 2 / 8, 5 / 8], rtol=16 * unit)
    np.testing.assert_allclose(stages["log_sum_exp"].ravel(), [math.log(8)], rtol=16 * unit)
    np.testing.assert_allclose(stages["output"].ravel(), [33 / 8], rtol=16 * unit)


def test_in_base_two_logarithms_are_given_and_returned_to_base_two(run: Run, unit: float) -> None:
    outputs = np.array([3.0, 0.0, 6.0]).reshape(3, 1, 1, 1, 1)
    stages = run("merge_states", outputs, np.array([5.0, 4.0, 4.0]).reshape(3, 1, 1, 1), lse_base="2")
    np.testing.assert_allclose(stages["weights"].ravel(), [1 / 2, 1 / 4, 1 / 4], rtol=32 * unit)
    np.testing.assert_allclose(stages["log_sum_exp"].ravel(), [6], rtol=16 * unit)
    np.testing.assert_allclose(stages["output"].ravel(), [3], rtol=32 * unit)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), at=st.sampled_from([0.0, -90.0, -800.0, 800.0]))
def test_the_order_of_the_parts_does_not_matter(run: Run, unit: float, seed: int, at: float) -> None:
    outputs, log_sum_exps = drawn(seed, at)
    one, other = run("merge_states", outputs, log_sum_exps), run("merge_states", outputs[::-1], log_sum_exps[::-1])
    for stage in ("log_sum_exp", "output"):  # rounded once, differences of log-sum-exps keep their error
        np.testing.assert_allclose(one[stage], other[stage], rtol=16 * unit, atol=64 * unit)


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("base", ["e", "2"])
def test_an_empty_part_counts_for_nothing(run: Run, poison: float, base: str, unit: float) -> None:
    outputs, log_sum_exps = drawn()
    outputs[1], log_sum_exps[1] = poison, -math.inf
    stages = run("merge_states", outputs, log_sum_exps, lse_base=base)
    without = run("merge_states", outputs[[0, 2]], log_sum_exps[[0, 2]], lse_base=base)
    assert (stages["weights"][..., 1] == 0).all()
    for stage in ("log_sum_exp", "output"):
        np.testing.assert_allclose(stages[stage], without[stage], rtol=8 * unit, atol=8 * unit)


@pytest.mark.parametrize("poison", [0.5, math.nan])
def test_where_every_part_is_empty_there_is_nothing(run: Run, poison: float) -> None:
    outputs, log_sum_exps = drawn()
    outputs[:, 0, 1, 2], log_sum_exps[:, 0, 1, 2] = poison, -math.inf
    stages = run("merge_states", outputs, log_sum_exps)
    assert (stages["weights"][0, 1, 2] == 0).all()
    assert (stages["output"][0, 1, 2] == 0).all()
    assert stages["log_sum_exp"][0, 1, 2] == -math.inf
    assert np.isfinite(stages["log_sum_exp"]).sum() == stages["log_sum_exp"].size - 1
    assert np.isfinite(stages["output"]).all()


def test_parts_of_attention_become_attention_on_all_keys(run: Run, unit: float) -> None:
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((BATCH, HEADS, length, WIDTH)) for length in (QUERIES, 9, 9))
    whole = run("attention", query, key, value)
    parts = [run("attention", query, key[:, :, span], value[:, :, span]) for span in (slice(4), slice(4, 9))]
    stacked = (np.stack([part[stage] for part in parts]) for stage in ("output", "log_sum_exp"))
    merged = run("merge_states", *stacked)
    for stage in ("log_sum_exp", "output"):
        np.testing.assert_allclose(merged[stage], whole[stage], rtol=64 * unit, atol=64 * unit)


@pytest.mark.parametrize("base", ["e", "2"])
def test_in_sixteen_bits_log_sum_exps_are_float32_and_the_output_is_not(half_setting: Setting, base: str) -> None:
    outputs, log_sum_exps = drawn(at=-500)
    stored = outputs.astype(half_setting.dtype), log_sum_exps.astype(np.float32)
    backend = half_setting.backend
    stages = backend.merge_states(*map(backend.from_numpy, stored), lse_base=base)
    found = {name: backend.to_numpy(stage) for name, stage in stages.items()}
    assert found["weights"].dtype == found["log_sum_exp"].dtype == np.float32
    assert found["output"].dtype == half_setting.dtype
    factor = 1 if base == "e" else math.log(2)
    scores = np.moveaxis(stored[1].astype(np.float64) * factor, 0, -1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mean = np.einsum("bhqn,nbhqd->bhqd", weights, stored[0].astype(np.float64))
    np.testing.assert_allclose(found["weights"], weights, rtol=1e-3)  # at -500 a float32 has steps of 3e-5
    unit = float(ml_dtypes.finfo(half_setting.dtype).eps)
    np.testing.assert_allclose(found["output"].astype(np.float64), mean, rtol=unit, atol=4 * unit)
