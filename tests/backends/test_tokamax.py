"""tokamax's attention on a CPU: the formula and its gradients, in both implementations, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES

TOKAMAX = LIBRARIES["tokamax"]
pytestmark = [pytest.mark.tokamax, pytest.mark.skipif(not TOKAMAX.is_installed, reason="tokamax is not installed")]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(957)
MODES = ("xla", "xla_chunked")


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 5, Lk 5, D 4, Dv 6.
INPUTS = {"query": normal(2, 4, 5, 4), "key": normal(2, 2, 5, 4), "value": normal(2, 2, 5, 6)}
PAST = {"past_key": normal(2, 2, 4, 4), "past_value": normal(2, 2, 4, 6)}
MASK = RNG.random((2, 1, 5, 5)) < 0.7
MASK[..., 0] = True
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "capped and causal": (INPUTS, {"scale": -0.75, "softcap": 2.0, "is_causal": True}),
    "a window of one open side": (INPUTS, {"window": (1, None)}),
    "masked and biased": ({**INPUTS, "mask": MASK, "bias": normal(1, 4, 5, 5), "key_lengths": np.array([3, 5])}, {}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_the_call_is_the_formula_and_its_gradients_are_those_of_the_formula(
    judge_mode: Judge, call: str, mode: str
) -> None:
    inputs, options = CALLS[call]
    assert judge_mode(f"tokamax.{mode}", "bfloat16", "attention", inputs, options) == {"output": "agree"}
    asked = {**inputs, "grad_output": normal(2, 4, 5, 6)}
    found = judge_mode(f"tokamax.{mode}", "float32", "attention_gradients", asked, options)
    assert set(found.values()) == {"agree"}, found
    assert len(found) == 3 + ("bias" in inputs)


@pytest.mark.parametrize("mode", MODES)
def test_a_past_comes_before_the_keys(judge_mode: Judge, mode: str) -> None:
    assert judge_mode(f"tokamax.{mode}", "float32", "attention", {**INPUTS, **PAST}, {}) == {"output": "agree"}


def test_a_window_behind_a_past_is_refused() -> None:
    backend: Any = TOKAMAX.load("xla")
    backend.prepare("float32", 1)
    tensors = {name: backend.from_numpy(array.astype(np.float32)) for name, array in {**INPUTS, **PAST}.items()}
    with pytest.raises(NotImplementedError, match="does not count a past"):
        backend.attention(**tensors, window=(1, 0))
