"""A fused kernel in Triton, in its interpreter: the formula, past the edges of its blocks and without a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES

TRITON = LIBRARIES["triton"]
pytestmark = [pytest.mark.triton, pytest.mark.skipif(not TRITON.is_installed, reason="triton is not installed")]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(9171)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 35, Lk 65, D 5, Dv 6: one more, or three, than blocks of 32.
INPUTS = {"query": normal(2, 4, 35, 5), "key": normal(2, 2, 65, 5), "value": normal(2, 2, 65, 6)}
PAST = {"past_key": normal(2, 2, 4, 5), "past_value": normal(2, 2, 4, 6)}
MASK = RNG.random((2, 1, 35, 65)) < 0.7
MASK[0, 0, 3], MASK[1, 0, 4, :40] = False, False
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "scaled": (INPUTS, {"scale": -0.75}),
    "causal": (INPUTS, {"is_causal": True}),
    "behind a past": ({**INPUTS, **PAST}, {}),
    "masked, with a row without a key": ({**INPUTS, "mask": MASK, "key_lengths": np.array([33, 65])}, {}),
    "biased": ({**INPUTS, "bias": normal(1, 4, 35, 1)}, {"is_causal": True}),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("call", CALLS)
def test_the_call_is_the_formula(judge_mode: Judge, call: str, dtype: str) -> None:
    found = judge_mode("triton.fused", dtype, "attention", *CALLS[call])
    assert found == {"log_sum_exp": "agree", "output": "agree"}
