"""onnxruntime's own operators, MultiHeadAttention and GroupQueryAttention: formula, cache, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES

pytestmark = [
    pytest.mark.onnxruntime,
    pytest.mark.skipif(not LIBRARIES["onnxruntime"].is_installed, reason="onnxruntime is not installed"),
]
MULTI, GROUP = "onnxruntime.multi_head_attention", "onnxruntime.group_query_attention"
Call = tuple[dict[str, Any], dict[str, Any]]
Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(25927)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4, L 5, D 16, and a past of 4 keys.
SQUARE = {name: normal(2, heads, 5, 16) for name, heads in (("query", 4), ("key", 4), ("value", 4))}
GROUPED = {**SQUARE, "key": normal(2, 2, 5, 16), "value": normal(2, 2, 5, 16)}
LONGER = {**GROUPED, "key": normal(2, 2, 7, 16), "value": normal(2, 2, 7, 16)}
ONE = {**LONGER, "query": normal(2, 4, 1, 16)}
PAST, GROUPED_PAST = ({"past_key": normal(2, heads, 4, 16), "past_value": normal(2, heads, 4, 16)} for heads in (4, 2))
MASK = RNG.random((2, 1, 5, 5)) < 0.7
MASK[..., 0] = True
PER_HEAD = RNG.random((2, 4, 5, 5)) < 0.7
PER_HEAD[..., 0] = True
BIAS = normal(1, 4, 5, 5)
SINKS = np.array([0.5, -1.0, -np.inf, 2.0])
ROTARY = {"rotary_cos": np.cos(normal(9, 8)), "rotary_sin": np.sin(normal(9, 8))}
MULTI_CALLS: dict[str, Call] = {
    "plainly": (SQUARE, {"scale": -0.3}),
    "causal": (SQUARE, {"is_causal": True}),
    "values of another width": ({**SQUARE, "value": normal(2, 4, 5, 6)}, {}),
    "a mask and a bias": ({**SQUARE, "mask": MASK, "bias": BIAS}, {}),
    "a mask of keys": ({**SQUARE, "mask": MASK[:, :, :1]}, {}),
    "a mask per head and lengths": ({**SQUARE, "mask": PER_HEAD, "key_lengths": np.array([3, 5])}, {}),
    "lengths": ({**SQUARE, "key_lengths": np.array([3, 5])}, {}),
    "behind a past": ({**SQUARE, **PAST}, {"window": (None, 0)}),
}
GROUP_CALLS: dict[str, Call] = {
    "the first prompt": (GROUPED, {"is_causal": True}),
    "the first prompt without causality": (GROUPED, {"scale": 0.3}),
    "capped before a mask and a bias": ({**GROUPED, "mask": MASK, "bias": BIAS}, {"softcap": 1.5}),
    "sinks": ({**GROUPED, "sinks": SINKS}, {"is_causal": True}),
    "a window": (GROUPED, {"window": (1, 0)}),
    "a window of the query's own key": (GROUPED, {"window": (0, 0)}),
    "a window behind a past": ({**GROUPED, **GROUPED_PAST}, {"window": (2, 0)}),
    "lengths": ({**GROUPED, "key_lengths": np.array([3, 5])}, {}),
    "more keys than queries": (LONGER, {}),
    "causal with more keys than queries": (LONGER, {"is_causal": True}),
    "a past without causality": ({**GROUPED, **GROUPED_PAST, "bias": normal(2, 1, 5, 9)}, {}),
    "one query": (ONE, {"softcap": 2.0}),
    "offsets": ({**LONGER, "query_offsets": np.array([2, 0])}, {"window": (2, 0)}),
    "halves rotated": ({**GROUPED, **ROTARY}, {"is_causal": True}),
    "neighbours rotated behind a past": (
        {**GROUPED, **GROUPED_PAST, **ROTARY},
        {"rotary_interleaved": True, "window": (None, 0)},
    ),
}
PAGED = {
    "query": normal(2, 4, 3, 16),
    "key_pages": normal(5, 2, 2, 16),
    "value_pages": normal(5, 2, 2, 16),
    "block_table": np.array([[3, 0, 99], [4, 1, 2]]),
    "key_lengths": np.array([4, 5]),
}
REFUSED: dict[str, tuple[str, Call, str]] = {
    "a window": (MULTI, (SQUARE, {"window": (1, 0)}), "no window"),
    "groups": (MULTI, (GROUPED, {}), "as many heads of keys"),
    "a wide past": (MULTI, ({**SQUARE, **PAST, "past_value": normal(2, 4, 4, 6)}, {}), "as wide as queries"),
    "a scale of 0": (MULTI, (SQUARE, {"scale": 0.0}), "scale of 0"),
    "a softcap of 0": (GROUP, (GROUPED, {"softcap": 0.0}), "softcap of 0"),
    "later keys": (GROUP, (GROUPED, {"window": (1, 1)}), "comes before a query"),
    "more queries than keys": (GROUP, ({**LONGER, "query": normal(2, 4, 9, 16)}, {}), "a key at the place"),
    "few pairs": (GROUP, ({**GROUPED, "rotary_cos": normal(9, 4), "rotary_sin": normal(9, 4)}, {}), "multiples of 8"),
    "a cache to rotate": (GROUP, ({**LONGER, **ROTARY}, {}), "rotates new keys"),
}


def asked(name: str, operation: str, inputs: dict[str, Any], **options: Any) -> NDArray[Any]:
    library, _, mode = name.partition(".")
    backend: Any = LIBRARIES[library].load(mode)
    backend.prepare("float32", 1)
    arrays = {each: array.astype(np.float32) if array.dtype.kind == "f" else array for each, array in inputs.items()}
    output: NDArray[Any] = getattr(backend, operation)(**arrays, **options)["output"]
    return output


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("call", MULTI_CALLS)
def test_multi_head_attention_is_the_formula(judge_mode: Judge, call: str, dtype: str) -> None:
    assert judge_mode(MULTI, dtype, "attention", *MULTI_CALLS[call]) == {"output": "agree"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("call", GROUP_CALLS)
def test_group_query_attention_is_the_formula(judge_mode: Judge, call: str, dtype: str) -> None:
    assert judge_mode(GROUP, dtype, "attention", *GROUP_CALLS[call]) == {"output": "agree"}


@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (1, 0)}], ids=["causal", "a window"])
def test_lengths_of_a_cache_say_where_the_last_query_stands(judge_mode: Judge, options: dict[str, Any]) -> None:
    assert judge_mode(GROUP, "float32", "paged_attention", PAGED, options) == {"output": "agree"}


def test_one_query_of_a_paged_cache_needs_no_causality(judge_mode: Judge) -> None:
    one = {**PAGED, "query": normal(2, 4, 1, 16)}
    assert judge_mode(GROUP, "float32", "paged_attention", one, {}) == {"output": "agree"}
    with pytest.raises(NotImplementedError, match="causal attention, or one query"):
        asked(GROUP, "paged_attention", PAGED)


def test_what_a_cache_holds_behind_its_last_key_is_not_read() -> None:
    spoilt = {**LONGER, "key": LONGER["key"].copy()}
    spoilt["key"][:, :, 5:] = np.nan
    expected = asked(GROUP, "attention", LONGER, is_causal=True)
    np.testing.assert_array_equal(asked(GROUP, "attention", spoilt, is_causal=True), expected)


@pytest.mark.parametrize("call", REFUSED)
def test_what_an_operator_cannot_express_is_refused(call: str) -> None:
    name, (inputs, options), reason = REFUSED[call]
    with pytest.raises(NotImplementedError, match=reason):
        asked(name, "attention", inputs, **options)
