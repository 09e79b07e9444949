"""flax's attention on a CPU: the formula and its gradients, the weights that it sows, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES

FLAX = LIBRARIES["flax"]
pytestmark = [pytest.mark.flax, pytest.mark.skipif(not FLAX.is_installed, reason="flax is not installed")]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(12)
MODES = {"dpa": {"output"}, "sown": {"weights", "output"}}


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 5, Lk 5, D and Dv 4.
INPUTS = {"query": normal(2, 4, 5, 4), "key": normal(2, 2, 5, 4), "value": normal(2, 2, 5, 4)}
PAST = {"past_key": normal(2, 2, 3, 4), "past_value": normal(2, 2, 3, 4)}
MASK = RNG.random((2, 1, 5, 5)) < 0.7
MASK[..., 0] = True
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": (INPUTS, {"is_causal": True}),
    "masked and biased": ({**INPUTS, "mask": MASK, "bias": normal(1, 4, 5, 5)}, {}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_the_call_is_the_formula_and_its_gradients_are_those_of_the_formula(
    judge_mode: Judge, call: str, mode: str
) -> None:
    inputs, options = CALLS[call]
    for dtype in ("float32", "bfloat16"):
        found = judge_mode(f"flax.{mode}", dtype, "attention", inputs, options)
        assert found == dict.fromkeys(MODES[mode], "agree")
    asked = {**inputs, "grad_output": normal(2, 4, 5, 4)}
    found = judge_mode(f"flax.{mode}", "float32", "attention_gradients", asked, options)
    assert set(found.values()) == {"agree"}, found
    assert len(found) == 3 + ("bias" in inputs)


@pytest.mark.parametrize("mode", MODES)
def test_a_past_comes_before_the_keys(judge_mode: Judge, mode: str) -> None:
    found = judge_mode(f"flax.{mode}", "float32", "attention", {**INPUTS, **PAST}, {})
    assert found == dict.fromkeys(MODES[mode], "agree")


def test_flax_has_no_scale() -> None:
    assert "scale" not in FLAX.load("dpa").attention.__annotations__
