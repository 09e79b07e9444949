"""OpenVINO's operator on a CPU: the formula in each dtype that is asked for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES
from attncheck.processors import processor_flags

OPENVINO = LIBRARIES["openvino"]
pytestmark = [
    pytest.mark.openvino,
    pytest.mark.skipif(not OPENVINO.is_installed, reason="openvino is not installed"),
]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(31630)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 3, Lq 4, Lk 5, D 6, Dv 7.
INPUTS = {"query": normal(2, 3, 4, 6), "key": normal(2, 3, 5, 6), "value": normal(2, 3, 5, 7)}
PAST = {"past_key": normal(2, 3, 3, 6), "past_value": normal(2, 3, 3, 7)}
MASK = RNG.random((2, 1, 4, 5)) < 0.7
MASK[..., 0] = True
BIAS = normal(1, 3, 1, 5)
LENGTHS = np.array([3, 5])
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "scaled": (INPUTS, {"scale": 0.3}),
    "a scale of zero": (INPUTS, {"scale": 0.0}),
    "causal": (INPUTS, {"is_causal": True}),
    "causal and scaled": (INPUTS, {"is_causal": True, "scale": 0.3}),
    "masked": ({**INPUTS, "mask": MASK}, {}),
    "biased": ({**INPUTS, "bias": BIAS}, {"scale": -0.5}),
    "masked, biased and causal": ({**INPUTS, "mask": MASK, "bias": BIAS}, {"is_causal": True}),
    "lengths and causal": ({**INPUTS, "key_lengths": LENGTHS}, {"is_causal": True}),
    "a window behind a past": ({**INPUTS, **PAST}, {"window": (2, 0)}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("call", CALLS)
def test_the_operator_is_the_formula(judge_mode: Judge, call: str, dtype: str) -> None:
    assert judge_mode("openvino.sdpa", dtype, "attention", *CALLS[call]) == {"output": "agree"}


def test_without_a_hint_the_processor_decides_what_float32_is_computed_in(judge_mode: Judge) -> None:
    flags = processor_flags()
    assert flags is not None
    found = judge_mode("openvino.default", "float32", "attention", INPUTS, {})
    assert found == {"output": "numeric" if "avx512_bf16" in flags else "agree"}


def asked(inputs: dict[str, Any], **options: Any) -> NDArray[Any]:
    backend: Any = OPENVINO.load("sdpa")
    backend.prepare("float32", 1)
    arrays = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in inputs.items()}
    output: NDArray[Any] = backend.attention(**arrays, **options)["output"]
    return output


def test_a_query_without_a_key_is_nan_and_no_other() -> None:
    mask = np.ones((2, 1, 4, 5), dtype=bool)
    mask[1, 0, 2] = False
    output = asked({**INPUTS, "mask": mask})
    assert np.isnan(output[1, :, 2]).all()
    assert np.isfinite(np.delete(output[1], 2, axis=1)).all()
    assert np.isfinite(output[0]).all()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"key": INPUTS["key"][:, :1], "value": INPUTS["value"][:, :1]}, "as many key and value heads"),
        ({"key": INPUTS["key"][:, :, :0], "value": INPUTS["value"][:, :, :0]}, "is not written"),
    ],
)
def test_what_would_give_no_answer_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        asked({**INPUTS, **changed})


def test_an_output_stays_as_it_was_when_the_next_call_comes() -> None:
    first = asked(INPUTS)
    kept = first.copy()
    asked({**INPUTS, "value": INPUTS["value"] + 1})
    np.testing.assert_array_equal(first, kept)
