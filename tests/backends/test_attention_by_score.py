"""Attention by a bilinear, an additive and a cosine score: the scores' own function, and then what attention does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Stages = dict[str, NDArray[Any]]
Run = Callable[..., Stages]
RNG = np.random.default_rng(1409)
QUERY, KEY, WIDE_KEY = (RNG.normal(size=(2, 3, *shape)) for shape in ((4, 5), (6, 5), (6, 7)))
VALUE, BIAS = RNG.normal(size=(2, 3, 6, 8)), RNG.normal(size=(1, 3, 4, 6))
MASK = RNG.random((2, 1, 4, 6)) < 0.6
NETWORK = (RNG.normal(size=(5, 9)), RNG.normal(size=(7, 9)), RNG.normal(size=9))
LENGTHS = np.array([6, 0])
KINDS: dict[str, tuple[NDArray[Any], tuple[NDArray[Any], ...], dict[str, Any]]] = {
    "general": (WIDE_KEY, (RNG.normal(size=(5, 7)),), {"score_bias": RNG.normal(size=3)}),
    "additive": (WIDE_KEY, NETWORK, {"score_bias": RNG.normal(size=9)}),
    "cosine": (KEY, (), {"scale": 3.0}),
}
MASKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a bias": {"bias": BIAS},
    "a mask and a bias": {"mask": MASK, "bias": BIAS},
    "causality and a window": {"is_causal": True, "window": (2, None)},
    "key lengths": {"key_lengths": LENGTHS},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_stages_are_those_of_the_score_the_mask_and_the_softmax(
    run: Run, unit: float, kind: str, masks: dict[str, Any]
) -> None:
    key, network, given = KINDS[kind]
    stages = run(f"{kind}_attention", QUERY, key, VALUE, *network, **given, **masks)
    scores = run(f"{kind}_scores", QUERY, key, *network, **given)
    masked = run("mask_scores", scores["scores"], **masks) if masks else {}
    logits = [*scores.values(), *masked.values()][-1]
    wanted = {**scores, **masked, **run("softmax", logits)}
    assert set(stages) == {*wanted, "output"}
    for name, array in wanted.items():
        np.testing.assert_allclose(stages[name], array, rtol=0, atol=200 * unit, err_msg=name)
    np.testing.assert_allclose(stages["output"], stages["weights"] @ VALUE, rtol=0, atol=200 * unit)


@pytest.mark.parametrize(("empty_rows", "weight"), [("zero", 0.0), ("uniform", 1 / 6), ("nan", np.nan)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_a_key_follows_the_convention(
    run: Run, unit: float, kind: str, empty_rows: str, weight: float
) -> None:
    key, network, given = KINDS[kind]
    stages = run(f"{kind}_attention", QUERY, key, VALUE, *network, **given, key_lengths=LENGTHS, empty_rows=empty_rows)
    np.testing.assert_allclose(stages["weights"][1], np.full((3, 4, 6), weight), rtol=4 * unit)
    assert empty_rows != "zero" or (stages["log_sum_exp"][1] == -np.inf).all()
    assert np.isfinite(stages["output"][0]).all()


def test_a_shift_of_every_score_of_a_head_moves_log_sum_exp_alone(run: Run, unit: float) -> None:
    key, network, given = KINDS["general"]
    plain = run("general_attention", QUERY, key, VALUE, *network)
    moved = run("general_attention", QUERY, key, VALUE, *network, **given)
    shift = given["score_bias"][:, np.newaxis]
    np.testing.assert_allclose(moved["log_sum_exp"], plain["log_sum_exp"] + shift, rtol=0, atol=200 * unit)
    np.testing.assert_allclose(moved["output"], plain["output"], rtol=0, atol=200 * unit)
