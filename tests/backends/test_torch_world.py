"""What torch offers besides one kernel and one module: causal biases, nested tensors and flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS

TORCH = BACKENDS["torch"]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not TORCH.is_installed, reason="torch is not installed"),
]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(13)
DTYPES = ("float64", "float32", "bfloat16", "float16")


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 3, Lk 5, D 6, Dv 4.
INPUTS = {"query": normal(2, 4, 3, 6), "key": normal(2, 2, 5, 6), "value": normal(2, 2, 5, 4)}
SQUARE = {**INPUTS, "query": normal(2, 4, 5, 6)}
PAST = {"past_key": normal(2, 2, 4, 6), "past_value": normal(2, 2, 4, 4)}
MASK = RNG.random((2, 1, 3, 5)) < 0.7
MASK[..., 0] = True
BIAS = normal(1, 4, 1, 5)
LENGTHS = np.array([3, 0])
UP_TO_ITSELF = {"window": (None, 0)}
# Three sequences, of which the second has no keys: Lq 3 + 1 + 2, Lk 4 + 0 + 3.
PACKED = {
    "query": normal(1, 4, 6, 6),
    "key": normal(1, 4, 7, 6),
    "value": normal(1, 4, 7, 4),
    "cu_seqlens_q": np.array([0, 3, 4, 6]),
    "cu_seqlens_k": np.array([0, 4, 4, 7]),
}
LIKE_OUTPUT = normal(1, 4, 6, 4)


def asked(mode: str, operation: str, inputs: dict[str, Any], **options: Any) -> Any:
    """Call a mode's function with arrays, as they are."""
    backend = TORCH.load(mode)
    tensors = {name: backend.from_numpy(array) for name, array in inputs.items()}
    stages = getattr(backend, operation)(**tensors, **options)
    return {name: backend.to_numpy(stage) for name, stage in stages.items()}


def judged(judge_mode: Judge, mode: str, dtype: str, operation: str, inputs: dict[str, Any], **options: Any) -> None:
    found = judge_mode(f"torch.{mode}", dtype, operation, inputs, options)
    assert set(found.values()) == {"agree"}, found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mode", "inputs", "options"),
    [
        ("causal_upper_left", INPUTS, {"is_causal": True}),
        ("causal_upper_left", INPUTS, {"is_causal": True, "scale": 0.3}),
        ("causal_lower_right", SQUARE, {"is_causal": True}),
        ("causal_lower_right", {**SQUARE, **PAST}, UP_TO_ITSELF),
    ],
)
def test_a_causal_bias_is_causality_from_its_corner(
    judge_mode: Judge, mode: str, inputs: dict[str, Any], options: dict[str, Any], dtype: str
) -> None:
    judged(judge_mode, mode, dtype, "attention", inputs, **options)


def test_gradients_go_through_causal_biases(judge_mode: Judge) -> None:
    inputs = {**SQUARE, "grad_output": normal(2, 4, 5, 4)}
    for mode in ("causal_upper_left", "causal_lower_right"):
        judged(judge_mode, mode, "float64", "attention_gradients", inputs, is_causal=True)


@pytest.mark.parametrize(
    ("mode", "inputs", "options", "reason"),
    [
        ("causal_upper_left", INPUTS, {}, "is causal"),
        ("causal_lower_right", SQUARE, {}, "is causal"),
        ("causal_lower_right", SQUARE, {"window": (2, 0)}, "no other window"),
        ("causal_lower_right", INPUTS, {"is_causal": True}, "last query with the last key"),
    ],
)
def test_what_a_causal_bias_does_not_mean_is_refused(
    mode: str, inputs: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        asked(mode, "attention", inputs, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("causal_lower_right", {"is_causal": True}),
        ("nested", {}),
        ("nested", {"scale": 0.4}),
        ("flex", {"is_causal": True, "window": (1, None), "softcap": 1.5}),
    ],
)
def test_packed_sequences_do_not_see_each_other(
    judge_mode: Judge, mode: str, options: dict[str, Any], dtype: str
) -> None:
    judged(judge_mode, mode, dtype, "packed_attention", PACKED, **options)


@pytest.mark.parametrize(("mode", "options"), [("causal_lower_right", {"is_causal": True}), ("nested", {})])
def test_gradients_of_packed_sequences(judge_mode: Judge, mode: str, options: dict[str, Any]) -> None:
    inputs = {**PACKED, "grad_output": LIKE_OUTPUT}
    judged(judge_mode, mode, "float32", "packed_attention_gradients", inputs, **options)


def test_keys_behind_those_that_are_used_are_not_read_by_lower_right() -> None:
    key = PACKED["key"].copy()
    key[:, :, 3] = np.nan
    inputs = {**PACKED, "key_lengths": np.array([3, 0, 3])}
    expected = asked("causal_lower_right", "packed_attention", inputs, is_causal=True)["output"]
    found = asked("causal_lower_right", "packed_attention", {**inputs, "key": key}, is_causal=True)["output"]
    np.testing.assert_array_equal(found, expected)


def test_nested_tensors_take_no_groups() -> None:
    inputs = {**PACKED, "key": PACKED["key"][:, :2], "value": PACKED["value"][:, :2]}
    with pytest.raises(NotImplementedError, match="as many key and value heads"):
        asked("nested", "packed_attention", inputs)


def test_nested_tensors_go_through_one_call_with_a_nested_layout() -> None:
    import torch
    from torch.nn import functional

    seen = []
    original = functional.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.append((query.is_nested, query.layout, query.size(0)))
        return original(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", spy)
        asked("nested", "packed_attention", PACKED)
    assert seen == [(True, torch.jagged, 3)]


FLEX_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "causal": (INPUTS, {"is_causal": True}),
    "masked and biased": ({**INPUTS, "mask": MASK, "bias": BIAS}, {"scale": 0.3}),
    "capped behind a past": ({**INPUTS, **PAST}, {"softcap": 1.5, "window": (2, 1)}),
    "lengths": ({**INPUTS, "key_lengths": LENGTHS}, {"is_causal": True}),
    "offsets": ({**INPUTS, "query_offsets": np.array([2, 0])}, {"is_causal": True, "window": (1, None)}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", FLEX_CALLS)
def test_flex_attention_is_the_formula_with_its_log_sum_exp(judge_mode: Judge, call: str, dtype: str) -> None:
    inputs, options = FLEX_CALLS[call]
    found = judge_mode("torch.flex", dtype, "attention", inputs, options)
    assert found == {"log_sum_exp": "agree", "output": "agree"}


def test_a_query_without_a_key_gets_zeros_from_flex_attention() -> None:
    found = asked("flex", "attention", {**INPUTS, "key_lengths": LENGTHS})
    assert (found["output"][1] == 0).all()
    assert (found["log_sum_exp"][1] == -np.inf).all()


def test_flex_attention_compiled_is_the_formula(judge_mode: Judge) -> None:
    found = judge_mode("torch.flex_compile", "float32", "attention", SQUARE, {"is_causal": True})
    assert found == {"output": "agree"}
